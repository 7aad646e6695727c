"""A trace larger than memory through `replayer simulate`: peak memory and time at 1.5 billion accesses.

The dump is written, ingested and simulated by the commands a user runs; about 13 GB of disk, removed afterwards.
"""

import json
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np

from tests.bench.policies import EXPERTS, LAYERS, TOKENS, TOP_K, report, synthetic_routes
from tests.bench.processes import peak_of

ACCESSES = (15_000_000, 150_000_000, 1_500_000_000)
MEMORY_BYTES = 4 * 2**30
SHARE = 0.25
POLICIES = "lru,sieve,belady_bypass"


def main(samples: int) -> None:
    """Once per length, whatever the samples: the longest takes a quarter of an hour."""
    del samples
    routes = np.ascontiguousarray(synthetic_routes().transpose(1, 0, 2) % EXPERTS, dtype=np.int16)
    for accesses in ACCESSES:
        with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
            _measure(Path(folder), routes, accesses)


def _measure(folder: Path, routes: np.ndarray, accesses: int) -> None:
    tokens = accesses // (LAYERS * TOP_K)
    dump = folder / "stream.npz"
    _write_dump(dump, routes, tokens)
    started = time.perf_counter()
    ingest = [sys.executable, "-m", "pipeline", "ingest", str(dump), "--data", str(folder / "data")]
    _, peak = peak_of(ingest)
    dump.unlink()
    said = f"{peak / 2**20:,.0f} MiB, {time.perf_counter() - started:.0f} s"
    report(f"ingest, {accesses:,} accesses", said)
    (trace,) = (folder / "data" / "traces").glob("*.parquet")
    simulate = [
        sys.executable, "-m", "replayer", "simulate", str(trace), "--policy", POLICIES, "--scope", "global",
        "--capacity-experts", str(int(SHARE * LAYERS * EXPERTS)), "--semantics", "sequential", "--json",
    ]  # fmt: skip
    found = folder / "found.json"
    seconds, peak = peak_of(simulate, output=found)
    rows = {row["policy"]: row for row in json.loads(found.read_text())["results"]}
    rates = ", ".join(f"{name} {row['hit_rate']:.4f}" for name, row in rows.items())
    assert all(row["accesses"] == tokens * LAYERS * TOP_K for row in rows.values())
    report(
        f"simulate, {accesses:,} accesses",
        f"{peak / 2**20:,.0f} MiB, {seconds:.0f} s, {seconds / accesses * 1e9:.0f} ns an access; {rates}",
        "≤ 4096 MiB",
        reached=peak <= MEMORY_BYTES,
    )


def _write_dump(path: Path, routes: np.ndarray, tokens: int) -> None:
    """An npz dump of the same routes again and again, written layer by layer so that it is never in memory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with archive.open("experts.npy", "w", force_zip64=True) as file:
            header = {"descr": "<i2", "fortran_order": False, "shape": (LAYERS, tokens, TOP_K)}
            np.lib.format.write_array_header_1_0(file, header)
            for layer in range(LAYERS):
                for begin in range(0, tokens, TOKENS):
                    file.write(routes[layer, : min(TOKENS, tokens - begin)].tobytes())
        with archive.open("meta.npy", "w") as file:
            np.lib.format.write_array(file, np.array(json.dumps({"num_experts": EXPERTS, "k": TOP_K})))
