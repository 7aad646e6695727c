"""Building a pool against `dd` of the same bytes: ratios of throughput, medians of interleaved pairs."""

import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from replayer.pool import PoolPlan, build_pool, plan_pool

POOL_BYTES = 2**30
CASES = {
    "1 MiB an expert, a file each": (1, POOL_BYTES // 2**20, 2**20, "per_expert"),
    "256 KiB an expert, a file each": (8, POOL_BYTES // 2**18 // 8, 2**18, "per_expert"),
    "one file": (1, POOL_BYTES // 2**24, 2**24, "per_layer"),
    "8 stacked files": (8, POOL_BYTES // 2**20 // 8, 2**20, "stacked"),
}
"""Name → layers, experts of each, bytes of an expert, layout."""
WANTED = 0.8


def build_seconds(plan: PoolPlan, folder: Path) -> float:
    """Seconds of one build into a folder that does not exist yet."""
    started = time.perf_counter()
    build_pool(plan, folder)
    return time.perf_counter() - started


def dd_seconds(sources: list[Path], target: Path) -> float:
    """Seconds `dd bs=4M conv=fsync` takes to copy the files, which lie warm, each to a file in the folder `target`."""
    for source in sources:
        with source.open("rb") as file:
            while file.read(2**22):
                pass
    target.mkdir()
    copy = f'n=0; for f; do n=$((n+1)); dd if="$f" of={target}/$n bs=4M conv=fsync status=none || exit 1; done'
    started = time.perf_counter()
    subprocess.run(["sh", "-c", copy, "sh", *map(str, sources)], check=True)
    return time.perf_counter() - started


def measure(folder: Path, name: str, samples: int, generator: random.Random) -> None:
    """Prints one case: the ratio to dd of the pool's files one by one, and to dd of one file of the same length."""
    layers, experts, expert_bytes, layout = CASES[name]
    plan = plan_pool(
        range(layers), [experts] * layers, expert_bytes, layout=layout, alignment_bytes=os.sysconf("SC_PAGE_SIZE")
    )
    source = build_pool(plan, folder / "source")
    files = [source.folder / file for file in source.files]
    works: dict[str, Callable[[], float]] = {
        "build": lambda: build_seconds(plan, folder / "built"),
        "dd of the files": lambda: dd_seconds(files, folder / "copy"),
    }
    if len(files) > 1:
        joined = folder / "joined"
        with joined.open("wb") as file:
            subprocess.run(["xargs", "-0", "cat"], input="\0".join(map(str, files)).encode(), stdout=file, check=True)
        works["dd of one file"] = lambda: dd_seconds([joined], folder / "copy")
    seconds: dict[str, list[float]] = {work: [] for work in works}
    # The first round is not counted.
    for sample in range(samples + 1):
        for work in generator.sample(list(works), len(works)):
            elapsed = works[work]()
            if sample:
                seconds[work].append(elapsed)
            for made in ("built", "copy"):
                shutil.rmtree(folder / made, ignore_errors=True)
            os.sync()
    for work, theirs in seconds.items():
        if work == "build":
            continue
        ratios = sorted(other / own for own, other in zip(seconds["build"], theirs, strict=True))
        ratio = statistics.median(ratios)
        own_speed, their_speed = (
            plan.file_bytes.sum() / statistics.median(times) / 1e6 for times in (seconds["build"], theirs)
        )
        print(
            f"build ÷ {work:<16} {name:<32} {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}; {own_speed:.0f} against "
            f"{their_speed:.0f} MB/s)  wanted ≥ {WANTED}  {'reached' if ratio >= WANTED else 'MISSED'}",
            flush=True,
        )


def main(samples: int) -> None:
    """Measures every case with that many interleaved rounds; needs 3 GiB of disk, removed afterwards."""
    for name in CASES:
        with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
            measure(Path(folder), name, samples, random.Random(0))
