"""Native replays under a wall and a balloon: are all proofs kept, and how far are device bytes from simulated LRU?

The `code` trace where it is at hand (100 steps, experts of 256 KiB, a pool of 1.5 GiB), else the bundled sample.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces" / "qwen3-30b-code.npz"
MIB = 2**20


def main(samples: int) -> None:
    """`samples` runs at a quarter of the pool, by wall and by balloon; fewer, at least 5, at other capacities."""
    folder = Path(tempfile.mkdtemp(prefix="expert-tier-bench-"))
    try:
        _measure(folder, samples)
    finally:
        shutil.rmtree(folder)


def _measure(folder: Path, samples: int) -> None:
    trace, expert_bytes, steps = _trace(folder)
    pool = folder / "pool"
    size = [] if expert_bytes is None else ["--expert-bytes", str(expert_bytes)]
    _run(
        "replayer", "pool", "build", "--trace", str(trace), *size, "--layout", "per-layer", "--out", str(pool), "--json"
    )
    whole = json.loads(_run("replayer", "pool", "verify", str(pool), "--content", "none", "--json"))["pool_bytes"]
    few = max(samples // 4, 5)
    machine = ["--machine-bytes", str(whole // 2 + 512 * MIB)]
    print(f"{trace.stem}, pool of {whole / MIB:,.0f} MiB, steps {steps}; device bytes ÷ simulated LRU miss bytes")
    print(f"{'condition':<34} {'valid':>7} {'median':>8} {'min':>7} {'max':>7} {'nominal':>8}  resident MiB")
    for share in (0.25, 0.5, 0.75):
        _condition(trace, pool, steps, "cgroup", share, whole, samples if share == 0.25 else few)
    _condition(trace, pool, steps, "balloon", 0.25, whole, samples, *machine)
    _condition(trace, pool, steps, "cgroup", 0.25, whole, 3, "--owner", "restream")


def _trace(folder: Path) -> tuple[Path, int | None, str]:
    if PUBLISHED.is_file():
        _run("expert-tier", "ingest", str(PUBLISHED), "--data", str(folder), "--trace-id", "code")
        return folder / "traces" / "code.parquet", 256 * 1024, "0:100"
    sample = Path(__file__).parents[2] / "pipeline" / "sample" / "code.route.csv.gz"
    _run("expert-tier", "ingest", str(sample), "--data", str(folder), "--trace-id", "code")
    return folder / "traces" / "code.parquet", None, "0:200"


def _condition(
    trace: Path, pool: Path, steps: str, mechanism: str, share: float, whole: int, repeats: int, *more: str
) -> None:
    capacity = int(whole * share)
    command = (
        "replayer", "replay", str(trace), "--pool", str(pool), "--mechanism", mechanism, "--capacity", str(capacity),
        "--steps", steps, "--repeat", str(repeats), "--device", "none", "--json", *more,
    )  # fmt: skip
    runs: list[dict[str, Any]] = json.loads(_run(*command))
    valid = [run for run in runs if run["bytes_valid"]]
    label = f"{mechanism} at {100 * share:.0f} %{' restream' if more[:1] == ('--owner',) else ''}"
    if not valid:
        print(f"{label:<34} {0:>3}/{len(runs):<3} {runs[0]['bytes_reasons']}")
        return
    base = "demand_bytes" if "restream" in label else "resident_miss_bytes"
    if not all(run[base] and run["nominal_miss_bytes"] for run in valid):
        most = max(run["device_bytes"] for run in valid)
        print(f"{label:<34} {len(valid):>3}/{len(runs):<3} all fits: no simulated miss, at most {most:,} device bytes")
        return
    ratios = [run["device_bytes"] / run[base] for run in valid]
    nominal = statistics.median(run["device_bytes"] / run["nominal_miss_bytes"] for run in valid)
    resident = statistics.median(run["resident_median_bytes"] for run in valid) / MIB
    print(
        f"{label:<34} {len(valid):>3}/{len(runs):<3} {statistics.median(ratios):>8.3f} {min(ratios):>7.3f} "
        f"{max(ratios):>7.3f} {nominal:>8.3f}  {resident:,.1f} of {capacity / MIB:,.0f}"
        f"{'  (device bytes ÷ demand bytes)' if base == 'demand_bytes' else ''}"
    )


def _run(*command: str) -> str:
    binary = Path(sys.executable).parent / command[0]
    done = subprocess.run([str(binary), *command[1:]], capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
