"""What a wall does on a kernel with cgroup v2: run inside a guest by test_lab, prints one JSON document. No test cases.

Standard library and `replayer.capacity` alone, since an emulated processor takes a minute to load more.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replayer.capacity import (
    Balloon,
    Group,
    NotEnforceable,
    find_memory_controller,
    launch_in,
    memory_group,
    remove_leftovers,
)

MIB = 2**20
ROOT = Path("/sys/fs/cgroup")
NOBODY = 65534


def found() -> list[str]:
    """Version and folder of the controller that this process may use, or why not and what would help."""
    try:
        controller = find_memory_controller()
    except NotEnforceable as refusal:
        return ["refused", refusal.reason, refusal.remedy]
    return [str(controller.version), str(controller.parent)]


def elsewhere(folder: Path, what: str, user: int = 0) -> Any:
    """What one of these functions finds in a process of its own, inside `folder`, as that user."""
    moved = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    command = ["/bin/sh", "-c", moved, str(folder), sys.executable, "-P", "-m", "tests.v2_in_a_guest", what, str(user)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def filled() -> dict[str, Any]:
    """Page cache and anonymous memory under a wall: limited, counted, released."""
    told: dict[str, Any] = {}
    controller = find_memory_controller()
    file = Path(os.environ["TMPDIR"]).parent / "disk0/file"
    with memory_group(controller, "wall") as group:
        told["folder"] = str(group.folder)
        told["limit"] = group.set_limit_bytes(16 * MIB)
        told["swap"] = (group.folder / "memory.swap.max").read_text().strip() if has_swap_limit(group) else None
        reader = launch_in(group, ["/bin/sh", "-c", f"cat {file} > /dev/null; echo; read _"],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert reader.stdout is not None
        assert reader.stdin is not None
        reader.stdout.readline()
        told |= {"usage": group.usage_bytes(), "peak": group.peak_bytes(), "cache": group.cache_bytes()}
        told |= {"anonymous": group.anonymous_bytes(), "kernel": group.kernel_bytes(), "oom_kills": group.oom_kills()}
        told["lowered"] = group.set_limit_bytes(8 * MIB)
        told["cache_lowered"] = group.cache_bytes()
        reader.stdin.close()
        reader.wait()
        eater = launch_in(group, [sys.executable, "-S", "-c", "x = bytearray(64 << 20)"])
        told["eater"] = eater.wait()
        told["oom_kills_after"] = group.oom_kills()
    told["is_gone"] = not group.folder.exists()
    return told


def has_swap_limit(group: Group) -> bool:
    """Whether the kernel keeps one per group."""
    return (group.folder / "memory.swap.max").exists()


def ballooned() -> dict[str, Any]:
    """A balloon in a group that stands for the machine."""
    with memory_group(find_memory_controller(), "machine") as group:
        group.set_limit_bytes(128 * MIB)
        with Balloon.inflate(48 * MIB, group) as balloon:
            told = {"locked": balloon.locked_bytes(), "charged": group.usage_bytes()}
        try:
            with Balloon.inflate(120 * MIB, group):
                told["too_large"] = "inflated"
        except NotEnforceable as refusal:
            told["too_large"] = refusal.reason
    return told


def left_behind() -> list[str]:
    """What is said of a group whose maker was killed."""
    code = (
        "import sys, time; from replayer.capacity import *; "
        "g = memory_group(find_memory_controller(), 'wall'); "
        "launch_in(g, ['/bin/sleep', '600']); print(g.folder, flush=True); time.sleep(600)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    maker.stdout.readline()
    maker.kill()
    maker.wait()
    deadline = time.monotonic() + 10
    said: list[str] = []
    while not said and time.monotonic() < deadline:
        said = remove_leftovers()
    return said


def main() -> dict[str, Any]:
    """Everything, in folders that are left as they were found."""
    told: dict[str, Any] = {"root": found(), "filled": filled(), "ballooned": ballooned(), "left": left_behind()}
    # What systemd does with Delegate=yes: a folder given to a user, whose shell is in a leaf.
    given = ROOT / "given"
    leaf = given / "leaf"
    leaf.mkdir(parents=True)
    for name in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
        os.chown(given / name, NOBODY, NOBODY)
    os.chown(leaf, NOBODY, NOBODY)
    os.chown(leaf / "cgroup.procs", NOBODY, NOBODY)
    told["controllers_before"] = (given / "cgroup.controllers").read_text().split()
    told["delegated"] = elsewhere(leaf, "wall", NOBODY)
    told["not_delegated"] = elsewhere(ROOT, "found", NOBODY)
    # No internal processes: a folder that holds processes and has nobody above it that is ours.
    os.chown(given, 0, 0)
    (given / "cgroup.subtree_control").write_text("-memory")
    os.chown(given / "cgroup.subtree_control", 0, 0)
    told["not_given"] = elsewhere(leaf, "found", NOBODY)
    leaf.rmdir()
    given.rmdir()
    told["left_in_root"] = sorted(path.name for path in ROOT.glob("expert-tier-*"))
    return told


def wall() -> dict[str, Any]:
    """A wall made by whoever this is, held and released."""
    try:
        with memory_group(find_memory_controller(), "wall") as group:
            limit = group.set_limit_bytes(8 * MIB)
            inside = launch_in(group, ["/bin/cat", "/proc/self/cgroup"], stdout=subprocess.PIPE).communicate()[0]
            folder = str(group.folder)
    except NotEnforceable as refusal:
        return {"refused": str(refusal)}
    return {"limit": limit, "folder": folder, "inside": inside.decode(), "is_gone": not Path(folder).exists()}


if __name__ == "__main__":
    functions: dict[str, Callable[[], Any]] = {"found": found, "wall": wall, "main": main}
    if len(sys.argv) > 2 and int(sys.argv[2]):
        os.setgid(NOBODY)
        os.setuid(int(sys.argv[2]))
    print(json.dumps(functions[sys.argv[1]]()))
