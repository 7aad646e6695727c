"""Runs that need a disk of their own: a loop device, mounted where no other process sees it, and gone afterwards.

`on_private_disk` starts this file as a program in its own mount namespace; it prints one JSON document. No test cases.
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replayer import replay as supervisor
from replayer.machine import storage_of
from replayer.pool import Pool, build_pool, plan_pool, read_pool
from replayer.trace import Trace
from tests.builders import make_trace
from tests.replays import ENVIRONMENT, KIB, MIB, ROOT, WAIT_S, interfered, replayed, request, routing

_FIBMAP = 1
_DISK_BYTES = 32 * MIB
_NO_DISK = 77


def on_private_disk(what: str, folder: Path) -> dict[str, Any]:
    """What came of one of the runs below; skips where there can be no such disk."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.private_disk", what, folder],
        env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S + 60, check=False,
    )  # fmt: skip
    if done.returncode == _NO_DISK or "unshare" in done.stderr:
        pytest.skip(f"no disk of one's own here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def _command(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{words[0]}: {done.stderr.strip() or done.returncode}", file=sys.stderr)
        sys.exit(_NO_DISK)


def _disk(folder: Path) -> tuple[Path, Path]:
    """(image, mount point) of an ext4 on a loop device that goes with its last user."""
    image, mount = folder / "image", folder / "disk"
    with image.open("wb") as file:
        file.truncate(_DISK_BYTES)
    mount.mkdir()
    _command("mkfs.ext4", "-q", "-b", 4096, "-O", "^has_journal", image)
    _command("mount", "-o", "loop", image, mount)
    return image, mount


def _small() -> Trace:
    return make_trace(routing(60), layer_ids=[0, 1, 2, 3], num_experts=16)


def _pool(trace: Trace, folder: Path) -> Pool:
    metadata = trace.metadata
    plan = plan_pool(
        metadata.moe_layer_ids, metadata.experts_per_layer, 64 * KIB, layout="per_layer", alignment_bytes=64 * KIB
    )
    return build_pool(plan, folder, allow_unsuitable=True)


def _outcome(run: supervisor.Run) -> dict[str, Any]:
    return {"run": run.run, "proofs": run.proofs, "machine": run.machine}


def _read_ahead(folder: Path) -> dict[str, Any]:
    """The loop device's readahead changes in the middle of a sound run."""
    _, mount = _disk(folder)
    trace = _small()
    pool = _pool(trace, mount / "pool")
    knob = Path(f"/sys/block/{storage_of(mount).device}/queue/read_ahead_kb")
    before = knob.read_text()
    try:
        knob.write_text("128")
        return _outcome(interfered(trace, pool, lambda _reader: knob.write_text("64"), allow_unsuitable=True))
    finally:
        knob.write_text(before)


def _input_output_error(folder: Path) -> dict[str, Any]:
    """The disk loses its end during the run; what lies there cannot be read."""
    image, mount = _disk(folder)
    trace = _small()
    pool = _pool(trace, mount / "pool")
    os.sync()
    with (pool.folder / pool.files[-1]).open("rb") as file:
        middle = pool.file_bytes[-1] // 4096 // 2
        (block,) = struct.unpack("i", fcntl.ioctl(file, _FIBMAP, struct.pack("i", middle)))

    def lose(_reader: int) -> None:
        os.truncate(image, block * 4096)

    run = interfered(trace, pool, lose, share=0.1, owner="restream", warm_pass=False, allow_unsuitable=True)
    os.truncate(image, _DISK_BYTES)
    return {**_outcome(run), "file": pool.files[-1]}


def _no_direct_reads(folder: Path) -> dict[str, Any]:
    """ramfs has no O_DIRECT; asked for all the same, and without, and with the permission to be there."""
    mount = folder / "ramfs"
    mount.mkdir()
    _command("mount", "-t", "ramfs", "none", mount)
    trace = _small()
    # It does not say how much room it has, so nothing can be built there.
    _pool(trace, folder / "pool")
    shutil.copytree(folder / "pool", mount / "pool")
    pool = read_pool(mount / "pool")
    said = {}
    for owner, allowed in (("restream", True), ("page_cache", False)):
        asked = request(owner=owner, allow_unsuitable=allowed)
        try:
            supervisor.replay(trace, pool, asked, wait_s=WAIT_S)
        except Exception as error:
            said[owner] = f"{type(error).__name__}: {error}"
    run = replayed(trace, pool, allow_unsuitable=True, warm_pass=False)
    return {**said, **_outcome(run)}


_RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "read_ahead": _read_ahead,
    "input_output_error": _input_output_error,
    "no_direct_reads": _no_direct_reads,
}

if __name__ == "__main__":
    print(json.dumps(_RUNS[sys.argv[1]](Path(sys.argv[2]))))
