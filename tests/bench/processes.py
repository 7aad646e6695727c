"""What a child process takes, watched from outside."""

import contextlib
import subprocess
import time
from pathlib import Path


def peak_of(command: list[str], output: Path | None = None) -> tuple[float, int]:
    """(seconds, peak resident bytes) of one child, whose standard output goes to a file or nowhere.

    The peak is of anonymous memory and files mapped, read from /proc while it runs: rusage of a child starts at its
    parent's size.
    """
    started = time.perf_counter()
    with output.open("wb") if output else contextlib.nullcontext(subprocess.DEVNULL) as file:
        child = subprocess.Popen(command, stdout=file)
        peak = 0
        while child.poll() is None:
            for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.1)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} exited {child.returncode}")
    return time.perf_counter() - started, peak
