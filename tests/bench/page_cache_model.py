"""Fresh native replays against `two_list` and LRU, access by access: who foretells what the kernel had in its cache?

Two geometries of published traces where they are at hand, and the bundled sample's decode steps with experts of 1 MiB.
Every condition is replayed as it is, and with the group's memory.stat read all the time: the kernel brings the
statistics up to date then, by which it balances its lists, and which are up to two seconds old otherwise.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from pipeline.ingest import ingest
from replayer.caches import Caches, Events
from replayer.capacity import find_memory_controller
from replayer.page_cache_models import two_list, two_list_state
from replayer.recency import lru, lru_state
from schemas.files import DataFolder
from schemas.trace import UserMetadata

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT.parent / "shared" / "traces"
KIB, MIB = 2**10, 2**20
SHARES = (0.25, 0.5)
MEMORY_STAT_S = 0.02
"""Between two looks at memory.stat; a hundredth of the time after which the kernel looks itself."""


class Geometry(NamedTuple):
    """What is replayed: a dump, of its layers the first so many, experts of one size, steps."""

    name: str
    dump: Path
    layers: int
    expert_bytes: int
    steps: str


PUBLISHED_GEOMETRIES = (
    Geometry("code", PUBLISHED / "qwen3-30b-code.npz", 48, 256 * KIB, "0:100"),
    Geometry("math", PUBLISHED / "qwen3-30b-math.npz", 24, MIB, "1000:1060"),
)
SAMPLE = Geometry("sample", ROOT / "pipeline" / "sample" / "code.route.csv.gz", 8, MIB, "0:480")


def main(samples: int) -> None:
    """A third of `samples` runs, at least 2, of each condition."""
    folder = Path(tempfile.mkdtemp(prefix="expert-tier-bench-"))
    try:
        present = [geometry for geometry in PUBLISHED_GEOMETRIES if geometry.dump.is_file()]
        for geometry in [*present, SAMPLE]:
            _measure(geometry, folder / geometry.name, max(samples // 3, 2))
            shutil.rmtree(folder / geometry.name)
    finally:
        shutil.rmtree(folder)


def _measure(geometry: Geometry, folder: Path, runs: int) -> None:
    folder.mkdir()
    trace, pool = _trace(geometry, folder), folder / "pool"
    _run("pool", "build", "--trace", trace, "--expert-bytes", geometry.expert_bytes, "--out", pool, "--json")
    whole = json.loads(_run("pool", "verify", pool, "--content", "none", "--json"))["pool_bytes"]
    print(f"{geometry.name}, pool of {whole / MIB:,.0f} MiB, experts of {geometry.expert_bytes / MIB:g} MiB, steps "
          f"{geometry.steps}; misses are model ÷ native bytes, agreement is per access")  # fmt: skip
    print(f"  {'':<32} {'misses':>7} {'min':>7} {'max':>7} {'agree':>7}   {'both hit':>9} {'both miss':>9} "
          f"{'native':>7} {'model':>7} alone hits")  # fmt: skip
    for share in SHARES:
        for is_fresh in (False, True):
            data = folder / f"{share}-{is_fresh}"
            with _statistics_kept_fresh() if is_fresh else contextlib.nullcontext():
                _run("replay", trace, "--pool", pool, "--mechanism", "cgroup", "--capacity", int(whole * share),
                     "--steps", geometry.steps, "--repeat", runs, "--device", "none", "--accesses", "--data", data,
                     "--json")  # fmt: skip
            _compare(f"{100 * share:.0f} %, statistics {'fresh' if is_fresh else 'late'}", data, geometry)


def _trace(geometry: Geometry, folder: Path) -> Path:
    """A canonical trace without expert sizes, of one token a step."""
    if geometry.dump.suffix == ".npz":
        with np.load(geometry.dump) as dump:
            experts = dump["experts"][: geometry.layers]
            num_experts = json.loads(str(dump["meta"]))["num_experts"]
    else:
        rows = pl.read_parquet(ingest(geometry.dump, DataFolder(folder / "whole"), UserMetadata()).path)
        decoded = rows.filter(pl.col("phase") == "decode").sort("layer_id", maintain_order=True)
        ids = decoded["expert_ids"].to_numpy()
        experts, num_experts = ids.reshape(geometry.layers, -1, ids.shape[1]), 32
    dump_file = folder / f"{geometry.name}.npz"
    np.savez_compressed(dump_file, experts=experts.astype(np.int16), meta=json.dumps({"num_experts": num_experts}))
    return ingest(dump_file, DataFolder(folder), UserMetadata()).path


@contextlib.contextmanager
def _statistics_kept_fresh() -> Iterator[None]:
    """Reads memory.stat of every replay's group again and again."""
    over = threading.Event()
    groups = find_memory_controller().parent

    def read() -> None:
        while not over.wait(MEMORY_STAT_S):
            for group in groups.glob("expert-tier-*"):
                with contextlib.suppress(OSError):
                    (group / "memory.stat").read_bytes()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def _compare(label: str, data: Path, geometry: Geometry) -> None:
    runs = [
        pl.read_parquet(file).row(0, named=True) for file in sorted((data / "results" / "replay_run").rglob("*.p*"))
    ]
    valid = [run for run in runs if run["bytes_valid"]]
    if not valid:
        print(f"  {label}: 0 of {len(runs)} runs valid: {runs[0]['bytes_reasons']}")
        return
    accesses = [
        pl.read_parquet(DataFolder(data).run_file("replay_access", run["trace_id"], run["run_id"])) for run in valid
    ]
    missing = [frame["missing_bytes"].to_numpy() for frame in accesses]
    between = [float(np.mean((one == 0) == (other == 0))) for one, other in combinations(missing, 2)]
    agree = f", two runs agree by {statistics.median(between):.4f}" if between else ""
    print(f"  {label}: {len(valid)} of {len(runs)} runs valid{agree}")
    frame = accesses[0].with_columns(pl.struct("step_id", "layer_id").rle_id().alias("event"))
    experts, event = int(frame["expert_id"].to_numpy().max()) + 1, frame["event"].to_numpy()
    num_events = int(event[-1]) + 1
    walk = Events(
        (frame["layer_id"] * experts + frame["expert_id"]).to_numpy().astype(np.int32),
        np.searchsorted(event, np.arange(num_events + 1)).astype(np.int64),
        np.zeros(num_events, dtype=np.int32),
        np.zeros(num_events, dtype=np.int64),
    )
    pages = geometry.expert_bytes // os.sysconf("SC_PAGE_SIZE")
    for model, folios, is_atomic in (
        ("lru", 1, True), ("two_list", 1, False), ("two_list", 8, False), ("two_list", pages, False),
        ("two_list", pages, True),
    ):  # fmt: skip
        foretold = [
            _foretold(model, walk, run["resident_median_bytes"], geometry.expert_bytes, folios, is_atomic=is_atomic)
            for run in valid
        ]
        name = f"{model}{'' if model == 'lru' else f' of {folios} folios'}{', atomic' if is_atomic else ''}"
        _print_scores(name, foretold, missing)


def _foretold(
    model: str, walk: Events, capacity_bytes: int, expert_bytes: int, folios: int, *, is_atomic: bool
) -> np.ndarray[Any, Any]:
    """(A,) bytes that each access of the second pass misses."""
    num_objects = int(walk.objects.max()) + 1
    caches = Caches(
        np.full(num_objects, expert_bytes), np.array([capacity_bytes], dtype=np.int64), np.array([0, num_objects])
    )
    was_hit = np.zeros(len(walk.objects), dtype=np.uint8)
    if model == "lru":
        stack = lru_state(caches)
        for _ in range(2):
            lru(stack, walk, caches, is_atomic, was_hit)
        return np.where(was_hit == 1, 0, expert_bytes)
    state = two_list_state(caches, 0, folios)._replace(missing=np.zeros(len(walk.objects), dtype=np.int32))
    for _ in range(2):
        two_list(state, walk, caches, is_atomic, was_hit)
    return state.missing.astype(np.int64) * (expert_bytes // folios)


def _print_scores(name: str, foretold: list[np.ndarray[Any, Any]], native: list[np.ndarray[Any, Any]]) -> None:
    misses = [float(model.sum() / kernel.sum()) for model, kernel in zip(foretold, native, strict=True)]
    agreement = [float(np.mean((model == 0) == (kernel == 0))) for model, kernel in zip(foretold, native, strict=True)]
    modelled, real = np.concatenate(foretold) == 0, np.concatenate(native) == 0
    table = (np.sum(modelled & real), np.sum(~modelled & ~real), np.sum(real & ~modelled), np.sum(modelled & ~real))
    both_hit, both_miss, native_alone, model_alone = (int(count) for count in table)
    print(
        f"  {'  ' + name:<32} {statistics.median(misses):>7.3f} {min(misses):>7.3f} {max(misses):>7.3f} "
        f"{statistics.median(agreement):>7.4f}   {both_hit:>9,} {both_miss:>9,} {native_alone:>7,} {model_alone:>7,}",
        flush=True,
    )


def _run(*words: object) -> str:
    command = [sys.executable, "-m", "replayer", *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
