"""`make bench [WHAT="name name"]`: ratios within one run, medians of interleaved repetitions, on generated data.

Absolute figures are for orientation: they are of whatever machine runs this. Everything is written below one temporary
folder and removed at the end, also after an interrupt.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from pipeline.ingest import ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.bench import decode, dumps, lookahead, loop, owners, page_cache_model, policies, pool, replay, stream
from tests.bench.processes import peak_of

REPETITIONS = 5
SAMPLES = 11
"""Pairs behind a median of the benches that read and write files."""

LAYERS, EXPERTS, TOP_K = 48, 128, 8


def sticky_routes(tokens: int, seed: int = 0) -> np.ndarray:
    """(layers, tokens, k) int16: Zipf-popular experts of which some are kept from the token before."""
    generator = np.random.default_rng(seed)
    popularity = np.log(1.0 / np.arange(1, EXPERTS + 1) ** 0.7)
    ids = np.empty((LAYERS, tokens, TOP_K), dtype=np.int16)
    for layer in range(LAYERS):
        shift = generator.permutation(EXPERTS)
        for begin in range(0, tokens, 4096):
            rows = min(4096, tokens - begin)
            # Gumbel top-k: k different experts per token, drawn by popularity.
            scores = popularity + generator.gumbel(size=(rows, EXPERTS))
            ids[layer, begin : begin + rows] = shift[np.argpartition(-scores, TOP_K, axis=1)[:, :TOP_K]]
    return ids


def write_route_csv(path: Path, ids: np.ndarray, target_bytes: int) -> None:
    """Route CSV v1 of at least that size; the same routes again and again under another turn."""
    layers, tokens, top_k = ids.shape
    experts = ids.transpose(1, 0, 2).reshape(-1)
    rows = len(experts)
    frame = pl.DataFrame(
        {
            "turn": np.zeros(rows, dtype=np.int32),
            "phase": np.ones(rows, dtype=np.int8),
            "step": np.repeat(np.arange(tokens, dtype=np.int32), layers * top_k),
            "layer": np.tile(np.repeat(np.arange(layers, dtype=np.int16), top_k), tokens),
            "slot": np.tile(np.arange(top_k, dtype=np.int8), tokens * layers),
            "expert": experts,
            "weight": np.tile((0.3 / np.arange(1, top_k + 1)).astype(np.float32).round(4), tokens * layers),
            "residency": np.ones(rows, dtype=np.int8),
            "expert_bytes": np.zeros(rows, dtype=np.int32),
        }
    )
    with path.open("wb") as file:
        file.write(
            f"# route_trace v1\n# model=bench n_layer={layers} n_expert={EXPERTS} n_expert_used={top_k}\n".encode()
        )
        file.write((",".join(frame.columns) + "\n").encode())
        turn = 0
        while file.tell() < target_bytes:
            frame.with_columns(pl.lit(turn, pl.Int32).alias("turn")).write_csv(file, include_header=False)
            turn += 1


def write_jsonl(path: Path, ids: np.ndarray) -> None:
    """One line per token: tok and the layers' ids."""
    with path.open("w") as file:
        for token, layers in enumerate(ids.transpose(1, 0, 2).tolist()):
            file.write(json.dumps({"tok": token, "layers": layers}) + "\n")


def interleaved(*works: Callable[[], object]) -> list[float]:
    """Median seconds of each, one repetition of every work after the other; the first round is not counted."""
    seconds: list[list[float]] = [[] for _ in works]
    for repetition in range(REPETITIONS + 1):
        for place, work in enumerate(works):
            started = time.perf_counter()
            work()
            if repetition:
                seconds[place].append(time.perf_counter() - started)
    return [statistics.median(times) for times in seconds]


def ingest_fresh(dump: Path, folder: Path) -> None:
    """Ingests into an empty data folder, so that nothing is found to be there already."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        ingest(dump, DataFolder(Path(fresh)), UserMetadata())


def bench_npz(folder: Path) -> None:
    """Ingest of npz: at least 15 M selections a second."""
    ids = sticky_routes(40_000)
    np.savez_compressed(folder / "a.npz", experts=ids, meta=json.dumps({"num_experts": EXPERTS, "k": TOP_K}))
    (seconds,) = interleaved(lambda: ingest_fresh(folder / "a.npz", folder))
    report("ingest npz", f"{ids.size / seconds / 1e6:.1f} M selections/s", "≥ 15", ids.size / seconds >= 15e6)


def bench_csv(folder: Path) -> None:
    """Ingest of route CSV against polars scanning all columns of the same file."""
    write_route_csv(folder / "a.csv", sticky_routes(2000), 200_000_000)
    ours, theirs = interleaved(
        lambda: ingest_fresh(folder / "a.csv", folder),
        lambda: pl.scan_csv(folder / "a.csv", comment_prefix="#").select(pl.all().sum()).collect(),
    )
    size = (folder / "a.csv").stat().st_size
    report_ratio("ingest CSV ÷ polars scan", size, ours, theirs)


def bench_jsonl(folder: Path) -> None:
    """Ingest of token JSONL against polars scanning the same file."""
    write_jsonl(folder / "a.jsonl", sticky_routes(60_000))
    ours, theirs = interleaved(
        lambda: ingest_fresh(folder / "a.jsonl", folder),
        lambda: pl.scan_ndjson(folder / "a.jsonl").select(pl.col("tok").sum(), pl.col("layers").len()).collect(),
    )
    size = (folder / "a.jsonl").stat().st_size
    report_ratio("ingest JSONL ÷ polars scan", size, ours, theirs)


def bench_memory(folder: Path) -> None:
    """Peak memory of ingesting generated 5 GB dumps: at most 1 GiB, in every layout."""
    ids = sticky_routes(2000)
    write_route_csv(folder / "big.csv", ids, 5_000_000_000)
    _memory_of(folder, "big.csv")
    # Five GB of int16 ids: 6.5 million tokens, unpacked layer by layer to an unnamed file.
    tokens = 5_000_000_000 // (LAYERS * TOP_K * 2)
    shape = (LAYERS, tokens // 2000 * 2000, TOP_K)
    big = np.lib.format.open_memmap(folder / "experts.npy", mode="w+", dtype=np.int16, shape=shape)
    for begin in range(0, shape[1], 2000):
        big[:, begin : begin + 2000] = ids
        if begin % 200_000 == 0:
            big.flush()
    big.flush()
    del big
    import zipfile

    with zipfile.ZipFile(folder / "big.npz", "w", allowZip64=True) as archive:
        archive.write(folder / "experts.npy", "experts.npy")
    (folder / "experts.npy").unlink()
    _memory_of(folder, "big.npz")
    line = json.dumps({"tok": 1, "layers": ids.transpose(1, 0, 2)[0].tolist()}) + "\n"
    with (folder / "big.jsonl").open("w") as file:
        rows = enumerate(ids.transpose(1, 0, 2).tolist())
        tokens_as_text = [json.dumps({"tok": token, "layers": row}) + "\n" for token, row in rows]
        block = "".join(tokens_as_text)
        for _ in range(5_000_000_000 // (len(line) * len(tokens_as_text)) + 1):
            file.write(block)
    _memory_of(folder, "big.jsonl")


def _memory_of(folder: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as data:
        command = [sys.executable, "-m", "pipeline", "ingest", str(folder / name), "--data", data]
        seconds, peak = peak_of(command)
    size = (folder / name).stat().st_size
    (folder / name).unlink()
    report(
        f"peak memory, {name} of {size / 1e9:.1f} GB",
        f"{peak / 2**20:.0f} MiB in {seconds:.0f} s",
        "≤ 1024 MiB",
        peak <= 2**30,
    )


def bench_start(folder: Path) -> None:
    """The whole command `replayer simulate` on 3.07 M selections: under 3 s from the second start on."""
    np.savez(folder / "a.npz", experts=sticky_routes(8000), meta=json.dumps({"num_experts": EXPERTS}))
    trace = ingest(folder / "a.npz", DataFolder(folder / "data"), UserMetadata()).path
    command = [sys.executable, "-m", "replayer", "simulate", str(trace), "--capacity-experts", "17", "--json"]
    (seconds,) = interleaved(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    report("replayer simulate, whole command", f"{seconds:.2f} s", "< 3", seconds < 3)


def report_ratio(what: str, size_bytes: int, ours: float, theirs: float) -> None:
    """Our speed as a part of polars', which must be at least 0.3."""
    speeds = f"{size_bytes / ours / 1e6:.0f} against {size_bytes / theirs / 1e6:.0f} MB/s"
    report(what, f"{theirs / ours:.2f} ({speeds})", "≥ 0.3", theirs / ours >= 0.3)


def report(what: str, found: str, wanted: str, reached: bool) -> None:
    """One line per figure."""
    print(f"{what:<44} {found:<44} wanted {wanted:<12} {'reached' if reached else 'MISSED'}", flush=True)


BENCHES = {"npz": bench_npz, "csv": bench_csv, "jsonl": bench_jsonl, "start": bench_start, "memory": bench_memory}
SAMPLED_BENCHES = {
    "pool": pool.main,
    "loop": loop.main,
    "cpu": loop.cpu,
    "owners": owners.main,
    "replay": replay.main,
    "policies": policies.main,
    "model": page_cache_model.main,
    "lookahead": lookahead.main,
    "decode": decode.main,
}
ON_REQUEST = {"scale": policies.scale, "stream": stream.main, "dumps": dumps.memory, "fuzz": dumps.fuzz}
"""Minutes each, so only by name."""
"""Those that take a number of samples, and make and remove their own folder."""


def main() -> None:
    """Runs the named benches, all by default."""
    parser = argparse.ArgumentParser(description="Benchmarks: ratios within one run, on generated data.")
    parser.add_argument("names", nargs="*", choices=[*BENCHES, *SAMPLED_BENCHES, *ON_REQUEST, []], help="which")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help=f"pairs a median, for {', '.join(SAMPLED_BENCHES)} (%(default)s)"
    )
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    for name in arguments.names or [*BENCHES, *SAMPLED_BENCHES]:
        sampled = {**SAMPLED_BENCHES, **ON_REQUEST}
        if name in sampled:
            sampled[name](arguments.samples)
            continue
        with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
            BENCHES[name](Path(folder))


if __name__ == "__main__":
    main()
