"""What runs inside a guest of the lab: one `replayer replay` after the other, each kept on the share when it ends.

In: `runs.json` of a folder, which `lab_cli` writes. Out, beside it, for each run its standard output, the files that it
wrote below the data folder, and, last, `NAME.done.json` with what came of it. All runs of a boot share one interpreter,
since an emulated processor takes longer to load it than to replay.
"""

import contextlib
import ctypes
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from replayer.guest import MARK

_LRU_GEN = Path("/sys/kernel/mm/lru_gen/enabled")
_FAULT_AROUND = Path("/sys/kernel/debug/fault_around_bytes")
_MGLRU = {"on": "y", "off": "n"}
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4


def run_all(share: Path) -> int:
    """Runs what `share` asks for and is not there yet; returns 0 whatever came of the runs."""
    plan = json.loads((share / "runs.json").read_text())
    # From the start: a small guest reads more than it can hold while libraries load, and what of them is left by then,
    # and so the room for experts, would differ by 40 MiB from boot to boot. Pages that a fault would map for their
    # neighbourhood alone are left out, since how many there are depends on the memory that a guest has.
    around = _FAULT_AROUND.read_text()
    _FAULT_AROUND.write_text(str(os.sysconf("SC_PAGE_SIZE")))
    lock_what_is_touched(also_later=True)
    from replayer.loop import compile_ahead

    compile_ahead()
    # Read and written once before the first run counts: what Python loads for a first result stays in memory, and a
    # boot's later runs would have less of it than the one that `mem=` was found by.
    exit_code, _, errors = _replay(plan["warm_up"], Path(plan["data"]))
    if exit_code:
        _say(f"warm-up ended with code {exit_code}: {' '.join(errors.split())[-200:]}")
    lock_what_is_touched(also_later=False)
    _FAULT_AROUND.write_text(around)
    for run in plan["runs"]:
        name = str(run["name"])
        _say(f"run {name}")
        done = _run(run, share / name, Path(plan["data"]), Path(plan["numba"]))
        file = share / f"{name}.done.json"
        beside = file.with_suffix(".tmp")
        beside.write_text(json.dumps(done))
        os.sync()
        beside.rename(file)
        _say(f"ran {name}, exit code {done['exit_code']}")
    return 0


def lock_what_is_touched(*, also_later: bool) -> None:
    """Keeps the pages of interpreter and libraries that this process has touched in memory, charged to it.

    also_later: also what it maps from now on, once it touches that; a later call without ends this.

    A measuring process maps the same pages. What it has to read again itself is charged to its wall, and MGLRU prefers
    to keep mapped pages: in a wall with room for 100 MiB of experts, 14 MiB of them were left.

    Raises:
        OSError: the kernel refuses.
    """
    flags = _MCL_CURRENT | _MCL_ONFAULT | (_MCL_FUTURE if also_later else 0)
    if ctypes.CDLL(None, use_errno=True).mlockall(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mlockall: {os.strerror(number)}")


def _run(run: dict[str, Any], folder: Path, data: Path, numba_cache: Path) -> dict[str, Any]:
    if run["mglru"] is not None:
        _LRU_GEN.write_text(_MGLRU[run["mglru"]])
    compiled_before = _files(numba_cache)
    exit_code, out, errors = _replay(run["argv"], data)
    folder.mkdir(exist_ok=True)
    (folder / "stdout").write_text(out)
    if (data / "results").is_dir():
        # Contents alone: what else belongs to a file is not for a share of another kernel.
        shutil.copytree(data / "results", folder / "results", copy_function=shutil.copyfile, dirs_exist_ok=True)
    return {
        "exit_code": exit_code,
        "stderr": errors[-2000:],
        "compiled_files": len(_files(numba_cache) - compiled_before),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _replay(argv: list[str], data: Path) -> tuple[int, str, str]:
    """One `replayer` in an empty data folder: exit code, standard output and standard error."""
    from replayer.cli import main as replayer_main

    shutil.rmtree(data, ignore_errors=True)
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            exit_code = replayer_main([*argv, "--data", str(data), "--json"])
        except SystemExit as error:
            exit_code = error.code if isinstance(error.code, int) else 1
    return exit_code, out.getvalue(), errors.getvalue()


def _files(folder: Path) -> set[tuple[str, int]]:
    """Every file with the time of its last change: an index is rewritten under its name."""
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def _say(words: str) -> None:
    print(f"{MARK} {words}", file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.exit(run_all(Path(sys.argv[1])))
