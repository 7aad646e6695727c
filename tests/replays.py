"""Builds small pools, replays them for real, and reaches into runs that are going on. No test cases live here."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from replayer import replay as supervisor
from replayer.capacity import NotEnforceable, find_memory_controller, memory_group
from replayer.machine import storage_of
from replayer.pool import Pool, build_pool, plan_pool
from replayer.replay import Run
from replayer.request import Request
from replayer.trace import Trace

PAGE = os.sysconf("SC_PAGE_SIZE")
KIB, MIB = 2**10, 2**20
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
PATIENCE_S = 30.0
WAIT_S = 240
"""For somebody else's replay, which holds the machine."""


def routing(steps: int, layers: int = 4, experts: int = 16, k: int = 4, seed: int = 0) -> npt.NDArray[np.int64]:
    """[steps, layers, k] of different experts, the low ones more often."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(2, experts + 2)
    scores = generator.exponential(size=(steps, layers, experts)) / weights
    return np.argsort(scores, axis=-1)[..., :k]


def pool_for(trace: Trace, folder: Path, expert_bytes: Any, *, layout: str = "per_layer", align: int = PAGE) -> Pool:
    """A pool that suits `trace`; skips where the folder of the tests is on no disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    storage = storage_of(folder.parent)
    if not storage.suitable:
        pytest.skip(f"{folder.parent} is on {storage.filesystem}: {storage.reason}")
    metadata = trace.metadata
    plan = plan_pool(
        metadata.moe_layer_ids, metadata.experts_per_layer, expert_bytes, layout=layout, alignment_bytes=align
    )
    return build_pool(plan, folder)


def needs_memory_groups() -> None:
    """Skips where no memory cgroup can be made."""
    try:
        with memory_group(find_memory_controller(), "wall"):
            pass
    except NotEnforceable as refusal:
        pytest.skip(f"no memory cgroup can be made here: {refusal}")


def request(**asked: Any) -> Request:
    """What a test asks for: without torch, unless it says otherwise."""
    return Request(**{"destination": "none", **asked})


def replayed(trace: Trace, pool: Pool, progress: supervisor.Progress | None = None, **asked: Any) -> Run:
    """One run; waits while somebody else's replay holds the machine."""
    return supervisor.replay(trace, pool, request(**asked), wait_s=WAIT_S, progress=progress)


def reading(device_bytes: int, measured: Callable[[], Run]) -> Run:
    """A run that read this much, of at most six: a machine that pages out what lies idle takes a few pages, seldom.

    One that is further off than that is handed back as it is, for the test to fail.
    """
    for _ in range(5):
        run = measured()
        if not 0 < run.run["device_bytes"] - device_bytes <= MIB:
            return run
    return measured()


def proof(run: Run, name: str) -> dict[str, Any]:
    """The proof of that name; a run has it once."""
    (found,) = [one for one in run.proofs if one["name"] == name]
    return found


def failed(run: Run, spoils: str = "bytes") -> set[str]:
    """Names of the proofs that did not hold and spoil the bytes, or the times alone."""
    return {one["name"] for one in run.proofs if one["held"] is False and one["spoils"] == spoils}


def children(pid: int) -> dict[int, str]:
    """Living children of a process → their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def reader_of(pid: int) -> int:
    """The measuring process of a supervisor."""
    (found,) = [child for child, command in children(pid).items() if "measure" in command]
    return found


def balloon_of(pid: int) -> int:
    """The balloon of a supervisor."""
    (found,) = [child for child, command in children(pid).items() if "capacity.py" in command]
    return found


def our_groups() -> list[Path]:
    """Folders of all groups that a replay made, whoever's, and has not removed."""
    with contextlib.suppress(NotEnforceable):
        return sorted(find_memory_controller().parent.glob("expert-tier-*"))
    return []


def until(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """What the condition gives once it is true; fails the test if it never is."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited for {seconds:.0f} s")
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Holds a process still, all its threads, so that a fault lands inside the run and not after it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", 5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def interfered(
    trace: Trace,
    pool: Pool,
    act: Callable[[int], object],
    *,
    during: str = "measured pass",
    share: float = 0.25,
    **asked: Any,
) -> Run:
    """One run, with `act` done once to its reader, which is held still, when so much of that pass is over.

    `act` gets the reader's process id. On a busy machine a small run may be over before anybody looks: then another.
    """
    for _ in range(10):
        with pytest.MonkeyPatch.context() as patched:
            midway = _Midway(act, during, share)
            patched.setattr(supervisor, "_POLL_S", 0.001)
            patched.setattr(supervisor, "_Child", midway.watching(supervisor._Child))
            run = replayed(trace, pool, midway, **asked)
        if midway.landed:
            return run
    pytest.fail("ten runs were over before anything could be done to them")


class _Midway:
    """Called as `progress`."""

    def __init__(self, act: Callable[[int], object], during: str, share: float) -> None:
        self.act, self.during, self.share = act, during, share
        self.landed = self.late = False
        self.child: Any = None

    def watching(self, child_class: Any) -> Any:
        def start(*arguments: Any) -> Any:
            self.child = child_class(*arguments)
            return self.child

        return start

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self.during or done < self.share * total or self.landed or self.late:
            return
        pid = self.child.process.pid
        with stopped(pid):
            self.late = self.child.arena.arrays["control"][supervisor.loop.EVENTS_DONE] > 0.7 * total
            if not self.late:
                self.landed = True
                self.act(pid)


def measured_by(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """Lets the measuring process run the lines `before` first."""
    program = f"import os\nfrom replayer import measure\n{before}\nstatus = measure.main()\nos._exit(status)\n"
    monkeypatch.setattr(supervisor, "MEASURE_COMMAND", (sys.executable, "-P", "-c", program))


def tampered(monkeypatch: pytest.MonkeyPatch, tamper: Callable[[dict[str, Any]], None]) -> None:
    """Changes the plan in the shared arena before the measuring process sees it."""

    class Tampering(supervisor._Child):
        def __init__(self, recording: Any, arena: Any, *rest: Any) -> None:
            tamper(arena.arrays)
            super().__init__(recording, arena, *rest)

    monkeypatch.setattr(supervisor, "_Child", Tampering)


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "replayer", *(str(argument) for argument in arguments)]


def called(*arguments: object, within: Sequence[object] = (), **options: Any) -> "subprocess.CompletedProcess[str]":
    """The command line as a process of its own, started by the words `within`; options `env`, `cwd`."""
    command = [*(str(word) for word in within), *command_line(*arguments)]
    return subprocess.run(
        command, **{"env": ENVIRONMENT, **options}, capture_output=True, text=True, timeout=WAIT_S + 60, check=False
    )
