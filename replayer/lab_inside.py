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

from replayer.cli import main as replayer_main
from replayer.guest import MARK
from replayer.loop import compile_ahead

_LRU_GEN = Path("/sys/kernel/mm/lru_gen/enabled")
_MGLRU = {"on": "y", "off": "n"}
_MCL_CURRENT, _MCL_ONFAULT = 1, 4


def run_all(share: Path) -> int:
    """Runs what `share` asks for and is not there yet; returns 0 whatever came of the runs."""
    plan = json.loads((share / "runs.json").read_text())
    compile_ahead()
    lock_what_is_loaded()
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


def lock_what_is_loaded() -> None:
    """Keeps the pages of interpreter and libraries that this process has touched in memory, charged to it.

    A measuring process maps the same pages. What it has to read again itself is charged to its wall, and MGLRU prefers
    to keep mapped pages: in a wall with room for 100 MiB of experts, 14 MiB of them were left.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).mlockall(_MCL_CURRENT | _MCL_ONFAULT) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mlockall: {os.strerror(number)}")


def _run(run: dict[str, Any], folder: Path, data: Path, numba_cache: Path) -> dict[str, Any]:
    if run["mglru"] is not None:
        _LRU_GEN.write_text(_MGLRU[run["mglru"]])
    compiled_before = _files(numba_cache)
    shutil.rmtree(data, ignore_errors=True)
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            exit_code = replayer_main([*run["argv"], "--data", str(data), "--json"])
        except SystemExit as error:
            exit_code = error.code if isinstance(error.code, int) else 1
    folder.mkdir(exist_ok=True)
    (folder / "stdout").write_text(out.getvalue())
    if (data / "results").is_dir():
        # Contents alone: what else belongs to a file is not for a share of another kernel.
        shutil.copytree(data / "results", folder / "results", copy_function=shutil.copyfile, dirs_exist_ok=True)
    return {
        "exit_code": exit_code,
        "stderr": errors.getvalue()[-2000:],
        "compiled_files": len(_files(numba_cache) - compiled_before),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _files(folder: Path) -> set[tuple[str, int]]:
    """Every file with the time of its last change: an index is rewritten under its name."""
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def _say(words: str) -> None:
    print(f"{MARK} {words}", file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.exit(run_all(Path(sys.argv[1])))
