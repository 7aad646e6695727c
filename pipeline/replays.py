"""Native replays of a trace: its pool, the conditions to replay, and `replayer …` as a process of its own for each.

A replay limits memory, pins threads to reads and may be killed for want of memory, so it never runs inside the
process that asks for it. What the replayer counted and proved comes back as its documents; the rows are in the data
folder by then. Knows nothing of Dagster.
"""

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pipeline.ingest import read_stored
from replayer.capacity import NotEnforceable, find_memory_controller, memory_group
from replayer.pool import MANIFEST, Pool, read_pool
from replayer.trace import MalformedTrace
from schemas.columns import MECHANISMS
from schemas.files import DataFolder

AUTOMATIC = "auto"
"""The mechanism that stands for: a memory cgroup where one can be made, else none."""

_PATIENCE_S = 30.0


class ReplayFailed(ValueError):
    """A pool was not built or a replay not started, so there is no run to keep; the replayer's own sentence."""


@dataclass(frozen=True)
class Conditions:
    """What to replay: each owner at each capacity, `repeats` times.

    capacity_shares: of the pool's bytes, above 0 up to 1; without a mechanism memory has no limit, and a booted machine
    has the one it has, so each owner is replayed once. steps: `a:b` as the command line takes it, null for all.
    wait_s: for another replay to end.
    """

    owners: Sequence[str] = ("page_cache",)
    capacity_shares: Sequence[float] = (0.25, 0.5, 0.75)
    mechanism: str = AUTOMATIC
    steps: str | None = None
    device: str = "cpu"
    repeats: int = 1
    wait_s: int = 600

    def __post_init__(self) -> None:
        wrong = [share for share in self.capacity_shares if not 0 < share <= 1]
        if wrong:
            raise ReplayFailed(f"capacity share {wrong[0]}, wanted above 0 and at most 1: a part of the pool's bytes")
        if self.mechanism not in (AUTOMATIC, *MECHANISMS):
            raise ReplayFailed(f"mechanism {self.mechanism!r:.40}, wanted one of {', '.join((AUTOMATIC, *MECHANISMS))}")
        if not self.owners or not self.capacity_shares:
            raise ReplayFailed(
                "no owner or no capacity share is named, so there is nothing to replay; name one of each"
            )


def usable_mechanism(wanted: str) -> tuple[str, str | None]:
    """The mechanism to use, and why it is not the cgroup that `auto` prefers (null otherwise)."""
    if wanted != AUTOMATIC:
        return wanted, None
    try:
        # Made and removed: that a group may be made is known only once one was.
        with memory_group(find_memory_controller(), "wall"):
            return "cgroup", None
    except NotEnforceable as refusal:
        return "none", str(refusal)


def pool_of(
    data: DataFolder,
    trace_id: str,
    *,
    folder: Path | None = None,
    expert_bytes: int | None = None,
    layout: str = "per-expert",
) -> Pool:
    """The pool to replay `trace_id` against, built if it is not there; by default in the data folder.

    Raises:
        ReplayFailed: it is not there and cannot be built. MalformedPool: what is there is no finished pool.
    """
    place = data.pool_folder(trace_id) if folder is None else folder
    if not (place / MANIFEST).is_file():
        if expert_bytes is None and read_stored(data, trace_id).expert_bytes is None:
            raise ReplayFailed(
                f"trace {trace_id} does not say how large an expert is, so no pool can be built for it; give "
                f"expert_bytes, or build one: replayer pool build --trace {data.trace_file(trace_id)} --expert-bytes B "
                f"--out {place}"
            )
        size = [] if expert_bytes is None else ["--expert-bytes", str(expert_bytes)]
        trace = str(data.trace_file(trace_id))
        _call(["pool", "build", "--trace", trace, *size, "--layout", layout, "--out", str(place)])
    return read_pool(place)


def replay_all(data: DataFolder, trace_id: str, pool: Pool, wanted: Conditions) -> Iterator[list[dict[str, Any]]]:
    """Replays one condition after the other; gives the documents of each, one per repetition.

    Every run is in the data folder when its document comes, also one whose proofs failed. Call from the main thread.

    Raises:
        ReplayFailed: a run could not be started.
    """
    mechanism, _ = usable_mechanism(wanted.mechanism)
    for owner, capacity in _conditions(pool, wanted, mechanism):
        arguments = ["replay", str(data.trace_file(trace_id)), "--pool", str(pool.folder), "--data", str(data.root)]
        arguments += ["--owner", owner, "--mechanism", mechanism, "--device", wanted.device]
        arguments += ["--repeat", str(wanted.repeats), "--wait", str(wanted.wait_s), "--json"]
        arguments += [] if capacity is None else ["--capacity", str(capacity)]
        arguments += [] if wanted.steps is None else ["--steps", wanted.steps]
        document = _call(arguments)
        yield document if isinstance(document, list) else [document]


@contextlib.contextmanager
def compiling_ahead() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that compiles the measured loop, some 15 s of work the first time, while something else goes on."""
    command = [sys.executable, "-P", "-c", "from replayer.loop import compile_ahead; compile_ahead()"]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere) as process:  # noqa: S603 - fixed words
        try:
            yield process
        finally:
            process.kill()


def _conditions(pool: Pool, wanted: Conditions, mechanism: str) -> list[tuple[str, int | None]]:
    """(owner, capacity in bytes) of each condition; null where nothing limits memory, or the machine as it is does."""
    if mechanism in ("none", "boot"):
        return [(owner, None) for owner in wanted.owners]
    pool_bytes = int(pool.object_bytes.sum())
    capacities = [math.floor(Fraction(str(share)) * pool_bytes) for share in wanted.capacity_shares]
    return [(owner, capacity) for owner in wanted.owners for capacity in capacities]


def unreplayed_traces(data: DataFolder) -> list[str]:
    """Ids of the traces without a native run that have a pool, or sizes to build one from."""
    found = []
    for trace_id in data.trace_ids():
        if any((data.results / "replay_run" / trace_id).glob("[!.]*.parquet")):
            continue
        try:
            has_sizes = read_stored(data, trace_id).expert_bytes is not None
        except (MalformedTrace, OSError):
            continue
        if has_sizes or (data.pool_folder(trace_id) / MANIFEST).is_file():
            found.append(trace_id)
    return found


def _call(arguments: list[str]) -> Any:
    """Runs `replayer …` and gives what it printed as JSON; null if it printed nothing.

    An interrupt ends it as Ctrl-C would: memory is released, and a run that had begun is kept as interrupted.
    """
    command = [sys.executable, "-P", "-m", "replayer", *arguments]
    with subprocess.Popen(  # noqa: S603 - no shell reads the words
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C at the terminal is for this process, which passes it on once.
        process_group=0,
    ) as process:
        try:
            said, complaint = process.communicate()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_PATIENCE_S)
            raise
        finally:
            process.kill()
    if "--json" in arguments and said:
        # It exits with 1 also where a run was made and a proof did not hold: that run is kept, and marked.
        return json.loads(said)
    if process.returncode:
        last = (complaint.strip() or f"replayer {arguments[0]} ended with code {process.returncode}").splitlines()[-1]
        raise ReplayFailed(last.removeprefix("replayer: "))
    return None
