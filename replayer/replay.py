"""One native run: pool dropped and proven absent, memory limited, warm-up and measured pass in one process, judged.

This process supervises: it plans, starts the measuring process inside the limit, watches, and accounts for what that
one left in the arena they share, also when it was interrupted or killed. The loop itself is in `loop`.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import replayer
from replayer import counters, loop
from replayer.accounting import Company, Limits, Recording, access_columns, account, delivery_columns
from replayer.advice import Planned, hints_of, named_steps
from replayer.arena import Arena
from replayer.boot import calibrate
from replayer.capacity import Balloon, Group, find_memory_controller, launch_in, memory_group, remove_leftovers
from replayer.command import terminate_as_interrupt
from replayer.content import expert_key
from replayer.holdings import Choice, choose, hold, room_bytes
from replayer.machine import Storage, direct_io_alignment, machine_row
from replayer.nodes import available_bytes, left_out_bytes, memory_nodes
from replayer.offline import OfflineBlocks
from replayer.owners import (
    ReadPlan,
    default_miss_path,
    has_table,
    holds_memory,
    paths_of,
    plan_reads,
    reads_directly,
    ways_of,
)
from replayer.plan import read_plan
from replayer.policies import knows_future
from replayer.pool import Pool, UnsuitableStorage, check_against_trace, check_files, check_planned, pool_storages
from replayer.proofs import Proof, prove, replayed_events, selected_events, verdicts
from replayer.reclaim import node_rows, reclaim_rows
from replayer.request import Request, UnusableReplay, check_request, fits_a_table
from replayer.seat import Asking, NotServed, Seat
from replayer.simulate import UnusableRequest, Window, prepare
from replayer.trace import Trace

Progress = Callable[[str, int, int], None]
"""Called with what is going on, and how many of how many events of the pass are done."""

SAMPLE_EVERY = 16
"""Under `observe` sample, one of so many accesses has its residency asked for."""

BALLOON_PROCESS_BYTES = 21 << 19
"""What the balloon's own interpreter takes beside the locked region, where it shares the reader's machine: 10.8 MiB
were seen (CPython 3.11, glibc). A little less here leaves the reader a little less than asked for, never more."""

_LEAST_READ_AHEAD_BYTES = 128 << 10
_GRACE_S = 0.6
_POLL_S = 0.2
_STEP_COUNTERS = (
    ("io", "/proc/self/io", 512),
    ("cgroup", "/proc/self/cgroup", 8192),
    ("meminfo", "/proc/meminfo", 4096),
    ("vmstat", "/proc/vmstat", 12288),
    ("memory_pressure", "/proc/pressure/memory", 256),
    ("io_pressure", "/proc/pressure/io", 256),
)
_RUN_COUNTERS = (("status", "/proc/self/status"), ("cpu", "/proc/stat"))
_GROUP_PRESSURES = (("group_memory_pressure", "memory.pressure"), ("group_io_pressure", "io.pressure"))
_THREAD_IO_BYTES = 512
_OF_AN_ACCESS = frozenset(
    {"objects", "begin_ns", "end_ns", "returned", "missing_pages", "path", "decided_address", "decided_was_hit"}
)
_MACHINE_LOCK = "\0expert-tier-replay"
_RESIDENCY = {"cachestat": loop.RESIDENCY_CACHESTAT, "mincore": loop.RESIDENCY_MINCORE}
_OBSERVE_EVERY = {"none": 0, "sample": SAMPLE_EVERY, "every": 1}
_VERIFY = {"edges": loop.VERIFY_EDGES, "all": loop.VERIFY_ALL}
MEASURE_COMMAND = (sys.executable, "-P", "-m", "replayer.measure")


class ReplayBusy(OSError):
    """Another replay, or a build of the pool, is going on."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The rows that one run leaves in each table; `accesses` are columns, less run_id, null where not asked for."""

    run: dict[str, Any]
    steps: list[dict[str, Any]]
    reclaim: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
    delivery: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    proofs: list[dict[str, Any]]
    pool: dict[str, Any]
    machine: dict[str, Any]
    accesses: dict[str, npt.NDArray[Any]] | None = None


def replay(
    trace: Trace,
    pool: Pool,
    request: Request,
    *,
    repeat: int = 0,
    wait_s: float = 0,
    keeps_accesses: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Replays `trace` against `pool` once; call from the main thread.

    A run that could be started always comes back as a row, whatever came of it; an interrupt (KeyboardInterrupt or
    SIGTERM) stops it and marks it. `keeps_accesses`: what each observed access found resident comes back as well.

    Raises:
        UnusableReplay, PoolMismatch: trace, pool and request do not go together; nothing was started.
        UnsuitableStorage: the pool is not on a device.
        NotEnforceable: this machine cannot limit memory so. ReplayBusy: another replay is going on.
        MalformedPool: the pool or a file of it is not what its manifest says. OSError: a file cannot be opened.
    """
    tenant = _Tenant.of(trace, pool, request)
    with _alone([pool], wait_s), terminate_as_interrupt():
        remove_leftovers()
        tenant.check_storage()
        loop.compile_ahead()
        with _arena_of(tenant.recording) as arena:
            tenant.recording.arrays = arena.arrays
            for _ in _record(tenant.recording, arena, tenant.storages, progress):
                pass
            return tenant.account(repeat, keeps_accesses)


def replay_as_asked(
    planned: Trace,
    pool: Pool,
    request: Request,
    *,
    event_slots: int,
    ask: Callable[[Asking, ReadPlan], None],
    asked: Callable[[], Trace],
    wait_s: float = 0,
) -> tuple[Run, Asking]:
    """Serves the events that `ask` asks for, which nobody knows before; call from the main thread.

    `planned` has the events that will come, in order, with as many accesses each as there may be; `ask` is called once
    for each pass and asks for all of them; `asked` is then the trace of what it asked for, by which the run is
    accounted for and proven as a replay of it would be. An event has at most `event_slots` accesses. Also gives back
    the times of each event of the last pass.

    Raises:
        UnusableReplay: also for an owner that must know the future. NotServed: the run did not complete; says why.
        And as `replay`.
    """
    _check_knows_no_future(request)
    tenant = _Tenant.of(planned, pool, request)
    with _alone([pool], wait_s), terminate_as_interrupt(), contextlib.ExitStack() as stack:
        remove_leftovers()
        tenant.check_storage()
        loop.compile_ahead()
        recording = tenant.recording
        arena = stack.enter_context(_arena_of(recording))
        recording.arrays = arena.arrays
        # Locked memory is filled through the slots, one a thread.
        seat = Seat.create(max(event_slots, request.threads), recording.reads.slot_bytes)
        stack.callback(seat.close)
        asking = Asking(seat, arena.arrays)
        for _ in _record(recording, arena, tenant.storages, None, asking=asking, ask=ask):
            pass
        if recording.status == "interrupted":
            raise KeyboardInterrupt
        if recording.status != "complete":
            raise NotServed(str(recording.failure))
        tenant.recording = _as_asked(recording, asked())
        return tenant.account(0, False), asking


def _check_knows_no_future(request: Request) -> None:
    """Refuses what needs the events before they come.

    Raises:
        UnusableReplay: says which.
    """
    if request.policy is not None and knows_future(request.policy):
        raise UnusableReplay(f"--policy {request.policy}, which knows the future, and a decode's comes with its tokens")
    tables = [("--fit", request.fit or "same")] if fits_a_table(request) else []
    tables += [("--admit", request.admit)] if request.admit is not None else []
    for option, said in tables:
        if said == "same" or said.startswith(("same:", "first:")):
            raise UnusableReplay(
                f"{option} {said} would be fitted on events that are still to come; name another trace of this model"
            )
    if request.plan is not None:
        raise UnusableReplay("--plan names events of a trace, and a decode makes its own; leave it out")
    if request.destination == "cuda":
        raise UnusableReplay("--device cuda of a replay; a decode takes its bytes out of plain memory")


def _as_asked(recording: Recording, trace: Trace) -> Recording:
    """The recording of a run whose events turned out to be those of `trace`."""
    told = _plan(trace, recording.pool, recording.request)
    accesses, planned = len(told.walk.objects), len(recording.walk.objects)
    arrays = {
        name: array[:accesses] if len(array) == planned and name in _OF_AN_ACCESS else array
        for name, array in recording.arrays.items()
    }
    return dataclasses.replace(
        recording, trace=trace, walk=told.walk, choice=told.choice, arrays=arrays, step_begin=told.step_begin,
        step_end=told.step_end,
    )  # fmt: skip


def replay_together(
    tenants: Sequence[tuple[Trace, Pool, Request]],
    *,
    shares_wall: bool,
    repeat: int = 0,
    wait_s: float = 0,
    progress: Progress | None = None,
) -> list[Run]:
    """Replays several traces at the same time, each against a pool of its own; call from the main thread.

    Passes begin together. In one wall (mechanism cgroup) the capacities are summed, and whose pages go is the kernel's
    choice. When one replay does not complete, the others are stopped and marked.

    Raises:
        UnusableReplay: fewer than two, two of one pool, or requests that do not share a wall; and as `replay`.
    """
    folders = [pool.folder.resolve() for _, pool, _ in tenants]
    if len(folders) < 2 or len(set(folders)) < len(folders):
        raise UnusableReplay(
            f"{len(folders)} replays together, of {len(set(folders))} pools; wanted two or more, each of a pool of its "
            "own, so that it is known who reads what: build the pool twice"
        )
    requests = [request for _, _, request in tenants]
    if shares_wall and any(one.mechanism != "cgroup" or one.capacity_bytes is None for one in requests):
        raise UnusableReplay("replays in one wall, which is a cgroup of their capacities; say mechanism and capacity")
    if len({one.warm_pass for one in requests}) > 1:
        raise UnusableReplay("replays together, one with and one without a warm-up pass; say the same for both")
    if any(one.mechanism in ("balloon", "boot", "offline") for one in requests):
        raise UnusableReplay(
            "replays together under balloons or on a small machine would take each other's memory; say cgroup or none"
        )
    planned = [_Tenant.of(*tenant) for tenant in tenants]
    together_id = f"together-{secrets.token_hex(4)}"
    with _alone([pool for _, pool, _ in tenants], wait_s), terminate_as_interrupt(), contextlib.ExitStack() as stack:
        remove_leftovers()
        for tenant in planned:
            tenant.check_storage()
        loop.compile_ahead()
        group = stack.enter_context(memory_group(find_memory_controller(), "wall")) if shares_wall else None
        recordings = [tenant.recording for tenant in planned]
        arenas = []
        for number, recording in enumerate(recordings):
            recording.company = Company(together_id, number, len(recordings), shares_wall)
            arenas.append(stack.enter_context(_arena_of(recording)))
            recording.arrays = arenas[-1].arrays
        _drive(
            [
                _record(tenant.recording, arena, tenant.storages, progress, group)
                for tenant, arena in zip(planned, arenas, strict=True)
            ],
            recordings,
            group,
        )
        _note_overlap(recordings)
        return [tenant.account(repeat, False) for tenant in planned]


def _drive(runs: list[Iterator[None]], recordings: list[Recording], group: Group | None) -> None:
    """Takes all replays from one meeting point to the next; one that ends early, or an interrupt, stops all."""
    alive = list(runs)
    first = True
    try:
        while alive:
            ended = [run for run in alive if next(run, alive) is alive]
            if ended and len(ended) < len(alive):
                # An interrupt is for all; it reached the one that was waited for.
                if any(recording.status == "interrupted" for recording in recordings):
                    raise KeyboardInterrupt
                for run in alive:
                    if run not in ended:
                        _throw(run, _Ended("failed", "another replay that ran together with it did not complete"))
                return
            alive = [run for run in alive if run not in ended]
            if first and group is not None and alive:
                _limit_together(recordings, group)
            first = False
    except KeyboardInterrupt:
        for run in runs:
            _throw(run, KeyboardInterrupt())
    finally:
        for run in runs:
            _throw(run, GeneratorExit())


def _throw(run: Iterator[None], error: BaseException) -> None:
    """Ends a replay where it is; one that has ended takes no notice."""
    assert isinstance(run, Generator), "a replay is a generator"
    with contextlib.suppress(StopIteration, GeneratorExit, KeyboardInterrupt, _Ended):
        run.throw(error)
    run.close()


def _limit_together(recordings: list[Recording], group: Group) -> None:
    """One limit around all: what their own memory takes, counted once, and the sum of their capacities."""
    own = max(sum(recording.own_anonymous_bytes or 0 for recording in recordings), group.anonymous_bytes() or 0)
    own += group.kernel_bytes() or 0
    room = sum((one.request.capacity_bytes or 0) + one.request.headroom_bytes for one in recordings)
    limit = group.set_limit_bytes(own + room)
    for recording in recordings:
        recording.limits = Limits(
            detail=f"cgroup v{group.version} around {len(recordings)} replays",
            wall_bytes=own + room,
            enforced_bytes=limit - own,
            limit_bytes=limit,
            group_path=group.folder.name,
            others_bytes=own - (recording.own_anonymous_bytes or 0),
        )


def _note_overlap(recordings: list[Recording]) -> None:
    """Time in which all measured passes ran, and the shortest of them; nothing unless all completed."""
    spans = [recording.span for recording in recordings if recording.span is not None]
    if len(spans) < len(recordings):
        return
    overlap = min(span["end_ns"] for span in spans) - max(span["begin_ns"] for span in spans)
    for recording in recordings:
        recording.overlap_ns = max(0, overlap)
        recording.shortest_ns = min(span["end_ns"] - span["begin_ns"] for span in spans)


@dataclasses.dataclass
class _Tenant:
    """One replay, planned and checked."""

    recording: Recording
    started_at: datetime
    storages: Sequence[Storage] = ()

    @classmethod
    def of(cls, trace: Trace, pool: Pool, request: Request) -> "_Tenant":
        check_request(request)
        check_against_trace(pool, trace.metadata)
        if pool.content is not None:
            check_planned(pool)
        elif request.verify == "all":
            raise UnusableReplay(f"--verify, but what {pool.folder} must hold is not known; leave --verify out")
        started_at = datetime.now(UTC)
        try:
            recording = _plan(trace, pool, request)
        except UnusableRequest as error:
            raise UnusableReplay(str(error)) from None
        _check_room(recording)
        return cls(recording, started_at)

    def check_storage(self) -> None:
        """Looks at file system and files, now that nobody else builds the pool."""
        pool, request = self.recording.pool, self.recording.request
        self.storages = pool_storages(pool)
        unsuitable = next((storage for storage in self.storages if not storage.suitable), None)
        self.recording.unsuitable_storage = None if unsuitable is None else unsuitable.reason
        if unsuitable is not None and not request.allow_unsuitable:
            raise UnsuitableStorage(
                f"{pool.folder}: a pool on {unsuitable.filesystem} proves nothing: {unsuitable.reason}; put it on a "
                "local disk, or add --allow-unsuitable to have the run made and marked"
            )
        check_files(pool, *self.storages)
        if request.split != "none" and request.delivery != "none":
            # Only advice is cut short by the kernel, at what it reads ahead.
            automatic = _announce_bytes(self.storages) if request.delivery == "advice" else None
            self.recording.piece_bytes = automatic if request.split == "auto" else int(request.split)

    def account(self, repeat: int, keeps_accesses: bool) -> Run:
        """Rows of what the replay left behind."""
        recording = self.recording
        # Files and machine are looked at again at once, while nothing of ours runs any more.
        recording.pool_files_after = _pool_files(recording.pool)
        if any(found is not None for found in recording.pool_files_after):
            recording.machine_after = machine_row(pool_storages(recording.pool)[0])
        counted, steps, layers = account(recording)
        reclaim = reclaim_rows(recording, counted["device_bytes"])
        proofs = prove(recording, counted)
        accesses = access_columns(recording) if keeps_accesses else None
        run_id = f"{self.started_at:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        rows = _rows(recording, run_id, self.started_at, repeat, counted, steps, reclaim, layers, proofs)
        return dataclasses.replace(rows, accesses=accesses)


def condition_hash(
    trace_id: str, pool_id: str, request: Request, choice: Choice | None = None, planned: Planned | None = None
) -> str:
    """Names what was asked for: the same for every repetition of one condition.

    A table, or a plan, counts by what it says, not by the name of a file.
    """
    said = dataclasses.asdict(request)
    tables = [] if choice is None else [table for table in (choice.counts, choice.admitted) if table is not None]
    if planned is not None:
        said["plan"] = _plan_hash(planned)
    if tables:
        said |= {"fit": None, "admit": None}
        said["tables"] = [hashlib.sha256(table.astype("<i8").tobytes()).hexdigest() for table in tables]
    text = json.dumps([trace_id, pool_id, said], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plan_hash(planned: Planned) -> str:
    """First 12 hex digits of SHA-256 over the hints that a replay hands over."""
    content = hashlib.sha256()
    for array in (planned.place_first_hint, planned.hint_first_object, planned.hint_objects, planned.event):
        content.update(array.astype("<i8").tobytes())
    return content.hexdigest()[:12]


def _plan(trace: Trace, pool: Pool, request: Request) -> Recording:
    resolved = prepare(trace, Window(request.steps, "all"))
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    alignment = _direct_alignment_bytes(pool)
    planned = None
    if request.plan is not None:
        planned = _hints(Path(request.plan), trace, resolved.step_begin, resolved.step_end)
    reading_threads = request.threads + (planned is not None)
    threads_io = [(f"thread_io {number}", _THREAD_IO_BYTES) for number in range(reading_threads)]
    own = [(name, size) for name, _, size in _STEP_COUNTERS]
    if holds_memory(request.owner):
        own.append(("own_status", 4096))
    if request.mechanism == "balloon":
        own += [("balloon_status", 8192), ("balloon_stat", 1024)]
    if request.mechanism == "cgroup" or request.outer_group_bytes is not None:
        own += [("limit", 64), ("usage", 64), *((name, 256) for name, _ in _GROUP_PRESSURES)]
        if request.group_stat == "step":
            own.append(("memory_stat", 8192))
    choice = choose(resolved, request)
    miss_path = request.miss_path or default_miss_path(request.owner)
    return Recording(
        request=request,
        trace=trace,
        pool=pool,
        reads=plan_reads(pool, paths_of(request.owner, miss_path, pool.num_objects, choice.admitted), alignment),
        choice=choice,
        planned=planned,
        miss_path=miss_path,
        walk=resolved.walk,
        page_bytes=page_bytes,
        direct_alignment_bytes=alignment,
        step_begin=resolved.step_begin,
        step_end=resolved.step_end,
        arrays={},
        step_counters=own + threads_io,
        residency_counter=counters.residency_counter(),
        nodes=memory_nodes(accelerators=request.accelerator_memory),
    )


def _hints(path: Path, trace: Trace, step_begin: int, step_end: int) -> Planned:
    """What a plan's file has for the replayed steps.

    Raises:
        MalformedPlan: the file is no plan of this trace. UnusableReplay: it names nothing for these steps, so that the
            replay would be one without a plan under the name of one.
    """
    plan = read_plan(path, trace)
    planned = hints_of(plan, trace, replayed_events(trace, step_begin, step_end))
    if not len(planned.event):
        named = named_steps(plan, trace)
        if named is None:
            raise UnusableReplay(f"--plan {path}: it names no expert for any step, so there is nothing to deliver")
        length = min(step_end - step_begin, named[1] - named[0])
        raise UnusableReplay(
            f"--plan {path}: it names experts for steps {named[0]} to {named[1] - 1}, replayed are {step_begin} to "
            f"{step_end - 1}, for which it has no hint; add --steps {named[0]}:{named[0] + length}"
        )
    return planned


def check_plan_is_heard(trace: Trace, request: Request) -> None:
    """Refuses, before anything runs, a request whose plan cannot be read or has nothing for the replayed steps.

    Raises:
        MalformedPlan, UnusableReplay: as said. OSError: the file cannot be read.
    """
    if request.plan is None:
        return
    try:
        resolved = prepare(trace, Window(request.steps, "all"))
    except UnusableRequest as error:
        raise UnusableReplay(str(error)) from None
    _hints(Path(request.plan), trace, resolved.step_begin, resolved.step_end)


def _direct_alignment_bytes(pool: Pool) -> int:
    """What O_DIRECT asks for on the pool's file systems, the most of all; a page where one does not say."""
    one_of_device: dict[int, Path] = {}
    for path in pool.paths:
        with contextlib.suppress(OSError):
            one_of_device.setdefault(path.stat().st_dev, path)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    # Powers of two, so the largest is a multiple of the others.
    return max((direct_io_alignment(path) or page_bytes for path in one_of_device.values()), default=page_bytes)


def _check_room(recording: Recording) -> None:
    """Refuses a capacity that does not hold what is in flight: reads would evict each other before they are copied."""
    request, capacity = recording.request, recording.capacity_bytes
    if capacity is None:
        return
    if capacity < recording.page_bytes:
        raise UnusableReplay(
            f"capacity of {capacity:,} bytes, less than a page of {recording.page_bytes:,}; ask for more"
        )
    room = _page_cache_room(recording)
    if room is None or request.allow_thrash:
        return
    largest = _largest(recording)
    if room < request.threads * largest:
        rest = " beside its locked memory" if holds_memory(request.owner) else ""
        raise UnusableReplay(
            f"capacity of {capacity:,} bytes{rest}, but {request.threads} threads have up to "
            f"{request.threads * largest:,} bytes in flight, so experts would be evicted while they are read; ask for "
            "more, use fewer --threads, or add --allow-thrash to measure it all the same"
        )


def _page_cache_room(recording: Recording) -> int | None:
    """What a limit leaves for pages that reads pass through; null where none do, or nothing limits them."""
    request, capacity = recording.request, recording.capacity_bytes
    if capacity is None or request.mechanism == "none" or reads_directly(request.owner, recording.miss_path):
        return None
    if not holds_memory(request.owner):
        return capacity
    return capacity - _locked_room(recording, capacity) + request.headroom_bytes


def _locked_room(recording: Recording, capacity: int) -> int:
    request = recording.request
    return room_bytes(capacity, request.arena_fraction, request.headroom_bytes, limited=request.mechanism != "none")


def _largest(recording: Recording) -> int:
    """Bytes of the largest expert that is accessed."""
    return int(recording.pool.object_bytes[np.unique(recording.walk.objects)].max())


@contextlib.contextmanager
def _alone(pools: Sequence[Pool], wait_s: float) -> Iterator[None]:
    """Holds the machine's and the pools' locks, waiting so long for them: two replays would measure each other."""
    deadline = time.monotonic() + wait_s
    descriptors = [os.open(pool.folder, os.O_RDONLY | os.O_CLOEXEC) for pool in pools]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as machine:
        try:
            # A name without a file: it is free again when its holder dies, however.
            _take(
                lambda: machine.bind(_MACHINE_LOCK),
                deadline,
                "another replay runs on this machine, and two would measure each other; try again later, or add --wait",
            )
            for descriptor, pool in zip(descriptors, pools, strict=True):
                _take(
                    functools.partial(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB),
                    deadline,
                    f"{pool.folder}: somebody builds or replays this pool; try again later, or add --wait",
                )
            yield
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _take(lock: Callable[[], object], deadline: float, refusal: str) -> None:
    while True:
        try:
            lock()
            return
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EWOULDBLOCK):
                raise
            if time.monotonic() >= deadline:
                raise ReplayBusy(refusal) from None
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _arena_of(recording: Recording) -> Iterator[Arena]:
    walk, pool, reads, choice = recording.walk, recording.pool, recording.reads, recording.choice
    decided = len(walk.objects) if recording.request.policy is not None else 1
    accesses, events, steps = len(walk.objects), walk.num_events, recording.num_steps
    threads, names = recording.request.threads, recording.step_counters
    places = np.concatenate([[0], np.cumsum([size for _, size in names])]).astype(np.int64)
    planned: dict[str, np.ndarray[Any, Any]] = {
        "step_first_event": recording.step_first_event,
        "event_first_access": walk.first_access.astype(np.int64),
        "event_id": _event_ids(recording),
        "objects": walk.objects.astype(np.int32),
        "object_first_extent": pool.object_first_extent,
        "object_layer_id": pool.object_layer_id.astype(np.int64),
        "object_expert_id": pool.object_expert_id.astype(np.int64),
        "object_key": _object_keys(pool),
        "object_path": reads.path,
        "object_count": np.zeros(1, dtype=np.int64) if choice.counts is None else choice.counts,
        "held_place": np.full(pool.num_objects, -1, dtype=np.int64),
        "event_cache": choice.cache,
        "event_step": walk.step.astype(np.int64),
        "next_time": choice.next_time,
        "file_ways": ways_of(reads.path, pool, mapped=recording.residency_counter == "mincore"),
        "extent_object": pool.extent_object,
        "extent_held_offset": reads.held_offset,
        "extent_file": pool.extent_file.astype(np.int32),
        "extent_offset": reads.offset,
        "extent_length": reads.length,
        "extent_skip": reads.skip,
        "extent_wanted": reads.wanted,
        "extent_slot_offset": reads.slot_offset,
        "extent_first_word": reads.first_word,
        "file_bytes": pool.file_bytes,
        "counter_first_byte": places,
    }
    per_access = dict.fromkeys(("begin_ns", "end_ns", "returned"), ("int64", (accesses,)))
    per_step = dict.fromkeys(("step_begin_ns", "step_end_ns", "check_end_ns", "resident_pages"), ("int64", (steps,)))
    per_thread = dict.fromkeys(("wrong", "checked_words", "observe_ns", "verify_ns"), ("int64", (threads,)))
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        **{name: (array.dtype.name, array.shape) for name, array in planned.items()},
        **per_access,
        "missing_pages": ("int32", (accesses,)),
        "path": ("uint8", (accesses,)),
        "decided_address": ("int64", (decided,)),
        "decided_was_hit": ("uint8", (decided,)),
        **per_step,
        "digest": ("uint64", (threads,)),
        **per_thread,
        "counter_text": ("uint8", (steps, int(places[-1]))),
        "counter_length": ("int32", (steps, len(names))),
        "ticket": ("int64", (events,)),
        "control": ("int64", (8,)),
    }
    hints = recording.planned
    if hints is not None:
        for name in ("place_first_hint", "hint_first_object", "hint_objects"):
            planned[f"hints_{name}"] = getattr(hints, name)
            layout[f"hints_{name}"] = (planned[f"hints_{name}"].dtype.name, planned[f"hints_{name}"].shape)
        for name in ("hint_missing_pages", "hint_grown_pages", "hint_begin_ns", "hint_end_ns"):
            layout[f"hints_{name}"] = ("int64", (len(hints.event),))
        layout["hints_state"] = ("uint8", (len(hints.event),))
        layout["hints_queue"] = ("int64", (recording.request.hint_slots or 1,))
        layout["hints_mailbox"] = ("int64", (8,))
    arena = Arena.create(layout)
    try:
        for name, array in planned.items():
            arena.arrays[name][...] = array
        yield arena
    finally:
        arena.close()


def _event_ids(recording: Recording) -> np.ndarray[Any, Any]:
    """(N,) event_id of each replayed event: its place in the trace."""
    return selected_events(recording).astype(np.int64)


def _object_keys(pool: Pool) -> np.ndarray[Any, Any]:
    pairs = zip(pool.object_layer_id.tolist(), pool.object_expert_id.tolist(), strict=True)
    return np.array([expert_key(layer_id, expert_id) for layer_id, expert_id in pairs], dtype=np.uint64)


def _pool_files(pool: Pool) -> list[tuple[int, int, int] | None]:
    """Of each file, size, time of the last change of anything about it, and inode; null if it is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in pool.paths:
        try:
            stat = path.lstat()
        except OSError:
            found.append(None)
        else:
            # Unlike the time of the last write, nobody can set this one back.
            found.append((stat.st_size, stat.st_ctime_ns, stat.st_ino))
    return found


def _record(
    recording: Recording,
    arena: Arena,
    storages: Sequence[Storage],
    progress: Progress | None,
    shared: Group | None = None,
    *,
    asking: Asking | None = None,
    ask: Callable[[Asking, ReadPlan], None] | None = None,
) -> Iterator[None]:
    """Runs the measuring process and notes in `recording` what came of it.

    Comes back wherever replays that run together meet: before the limit, before the first read, before the measured
    pass. `shared`: the group that all of them run in.
    """
    request = recording.request
    recording.pool_files_before = _pool_files(recording.pool)
    recording.machine_before = machine_row(storages[0])
    with contextlib.ExitStack() as stack:
        group, outer, child = shared, None, None
        try:
            if shared is None and (request.mechanism == "cgroup" or request.outer_group_bytes is not None):
                controller = find_memory_controller()
                walled = request.mechanism == "cgroup"
                group = stack.enter_context(memory_group(controller, "wall" if walled else "machine"))
                if request.outer_group_bytes is not None:
                    outer = group
                    outer.set_limit_bytes(request.outer_group_bytes)
            child = stack.enter_context(_Child(recording, arena, storages, group, asking))
            ready = child.expect("ready")
            recording.files_stay_open = bool(ready["files_stay_open"])
            _note_own_memory(recording, ready, None if shared is not None else group)
            yield
            balloon = None if shared is not None else _limit(recording, group, outer, stack)
            child.open_counters(_counter_files(recording, storages, group, balloon))
            if holds_memory(request.owner):
                _hold(recording, child)
            _drop(recording.pool)
            yield
            child.tell("run")
            if recording.company is not None:
                # The others are told before anybody is waited for.
                yield
            recording.cold = child.expect("cold")["snapshot"]
            if request.warm_pass:
                _have_asked(recording, asking, ask)
                warm = child.expect("warm", progress=progress, what="warm-up pass")
                recording.warm = recording.before = warm["snapshot"]
            else:
                recording.before = recording.cold
            recording.measured = True
            if request.warm_pass and recording.company is not None:
                yield
                child.tell("measure")
                yield
            _have_asked(recording, asking, ask)
            done = child.expect("done", progress=progress, what="measured pass")
            recording.after, recording.span, recording.decide_ns = done["after"], done["span"], done["decide_ns"]
            recording.delivery_error = done["delivery_error"]
            if recording.company is not None:
                yield
        except KeyboardInterrupt:
            if child is not None:
                child.stop()
            recording.status, recording.failure = "interrupted", f"interrupted {_where(recording)}"
        except _Ended as ended:
            recording.status, recording.failure = ended.status, ended.message
        if group is not None:
            recording.group_oom_kills = group.oom_kills()


def _have_asked(recording: Recording, asking: Asking | None, ask: Callable[[Asking, ReadPlan], None] | None) -> None:
    """Has all events of a pass asked for, where somebody does; a loop that ended before says itself why."""
    if asking is None or ask is None:
        return
    asking.rewind()
    begin_ns = time.process_time_ns()
    with contextlib.suppress(NotServed):
        ask(asking, recording.reads)
    recording.asker_cpu_ns = time.process_time_ns() - begin_ns


def _drop(pool: Pool) -> None:
    for path in pool.paths:
        counters.drop(path)


def _hold(recording: Recording, child: "_Child") -> None:
    """Has the process lock memory and fill it, now that there is a limit around it."""
    request, capacity = recording.request, recording.capacity_bytes
    assert capacity is not None, "checked before"
    try:
        holding = hold(
            recording.choice,
            recording.reads,
            recording.pool.object_bytes,
            recording.walk,
            _locked_room(recording, capacity),
            recording.page_bytes,
            request,
        )
    except ValueError as error:
        kept = capacity - _locked_room(recording, capacity)
        beside = f", and {kept:,} more that are kept from locked memory (--headroom takes their place)" if kept else ""
        raise UnusableReplay(f"{error}{beside}") from None
    recording.holding = holding
    recording.arrays["held_place"][:] = holding.place
    sizes = {} if holding.sizes is None else {
        name: getattr(holding.sizes, name).tolist() for name in holding.sizes.__dataclass_fields__
    }  # fmt: skip
    child.tell(json.dumps({"arena_bytes": holding.arena_bytes, **sizes}))
    held = child.expect("held")
    recording.preload_ns = held["preload_ns"]
    recording.arena_bytes = (counters.parse_status(held["status"].encode()) or {}).get("VmLck")


def _note_own_memory(recording: Recording, ready: dict[str, Any], group: Group | None) -> None:
    status = counters.parse_status(ready["status"].encode()) or {}
    counted = None if group is None else group.anonymous_bytes()
    known = [size for size in (status.get("RssAnon"), counted) if size is not None]
    recording.own_anonymous_bytes = max(known) if known else None
    recording.own_kernel_bytes = None if group is None else group.kernel_bytes()


def _limit(
    recording: Recording, group: Group | None, outer: Group | None, stack: contextlib.ExitStack
) -> Balloon | None:
    """Enforces the capacity, now that the reader's own memory is known; fills `recording.limits`."""
    request = recording.request
    if request.mechanism == "none":
        return None
    own = (recording.own_anonymous_bytes or 0) + (recording.own_kernel_bytes or 0)
    room = _asked_room(recording, own)
    if request.mechanism in ("boot", "offline"):
        _limit_by_machine(recording, own, room, stack)
        return None
    assert room is not None, "checked before"
    capacity = recording.capacity_bytes
    available = available_bytes(recording.nodes)
    if room > available and outer is None:
        raise UnusableReplay(
            f"capacity and headroom of {room:,} bytes, but this machine has {available:,} bytes available: it would be "
            "the limit, not the mechanism; ask for less"
        )
    if request.mechanism == "cgroup":
        assert group is not None, "mechanism cgroup has a group"
        limit = group.set_limit_bytes(own + room)
        recording.limits = Limits(
            detail=f"cgroup v{group.version}",
            capacity_bytes=capacity,
            wall_bytes=own + room,
            enforced_bytes=limit - own,
            limit_bytes=limit,
            group_path=group.folder.name,
        )
        return None
    if outer is not None:
        assert request.outer_group_bytes is not None, "an outer group has a limit"
        size = request.outer_group_bytes - own - room - BALLOON_PROCESS_BYTES
        wanted = f"a machine of {request.outer_group_bytes:,} bytes"
    else:
        size, wanted = available - room, f"{available:,} bytes available"
    if size <= 0:
        raise UnusableReplay(f"capacity and headroom of {room:,} bytes leave nothing to lock of {wanted}; ask for less")
    balloon = stack.enter_context(
        Balloon.inflate(size, outer, nodes=recording.nodes.bound_to, left_out_bytes=left_out_bytes(recording.nodes))
    )
    if outer is not None:
        used = outer.usage_bytes() - (outer.cache_bytes() or 0)
        left = (outer.limit_bytes() or 0) - used
        detail = f"balloon in a cgroup v{outer.version} that stands for the machine"
    else:
        left = available_bytes(recording.nodes)
        detail = "balloon on the whole machine"
    recording.limits = Limits(
        detail=detail,
        capacity_bytes=capacity,
        wall_bytes=own + room,
        enforced_bytes=max(left, 0),
        balloon_bytes=balloon.size_bytes,
        balloon_start_ticks=balloon.start_time_ticks,
        balloon_machine_locked_bytes=balloon.machine_locked_bytes,
        limit_bytes=None if outer is None else outer.limit_bytes(),
        group_path=None if outer is None else outer.folder.name,
    )
    return balloon


def _asked_room(recording: Recording, own_bytes: int) -> int | None:
    """Bytes for experts and headroom that were asked for, or that a wall leaves; null of a machine as it is."""
    request = recording.request
    if request.wall_bytes is None:
        return None if request.capacity_bytes is None else request.capacity_bytes + request.headroom_bytes
    room = request.wall_bytes - own_bytes
    recording.limits = Limits(capacity_bytes=room - request.headroom_bytes)
    if room <= request.headroom_bytes:
        raise UnusableReplay(
            f"--wall {request.wall_bytes:,} bytes, but the reader's own memory and headroom take "
            f"{own_bytes + request.headroom_bytes:,} of it; ask for more"
        )
    _check_room(recording)
    return room


def _limit_by_machine(recording: Recording, own_bytes: int, room: int | None, stack: contextlib.ExitStack) -> None:
    """Takes the machine for the limit: as it was booted, or with blocks of its memory offline until the run ends."""
    blocks = None
    if recording.request.mechanism == "offline":
        assert room is not None, "checked before"
        nodes = recording.nodes
        blocks = stack.enter_context(OfflineBlocks.take(room, lambda: available_bytes(nodes), nodes))
    found = calibrate(
        Path("/proc/meminfo").read_bytes(),
        Path("/proc/cmdline").read_text(),
        available_bytes(recording.nodes),
        room_bytes=room,
        pool_bytes=int(recording.pool.file_bytes.sum()),
        step_bytes=0 if blocks is None else blocks.block_bytes,
    )
    headroom = recording.request.headroom_bytes
    recording.limits = Limits(
        detail=found.detail if blocks is None else blocks.detail,
        capacity_bytes=max((found.room_bytes if room is None else room) - headroom, 0),
        wall_bytes=own_bytes + found.room_bytes,
        enforced_bytes=found.room_bytes,
        memory_bytes=found.memory_bytes,
        offline_bytes=None if blocks is None else blocks.bytes,
    )
    _check_room(recording)


def _counter_files(
    recording: Recording, storages: Sequence[Storage], group: Group | None, balloon: Balloon | None
) -> dict[str, list[list[str]]]:
    """Which counter files are read after each step, in the order of their slots, and which around each pass."""
    paths = {name: path for name, path, _ in _STEP_COUNTERS} | {"own_status": "/proc/self/status"}
    if balloon is not None:
        paths |= {"balloon_status": str(balloon.status_file), "balloon_stat": str(balloon.stat_file)}
    run_counters = [list(pair) for pair in _RUN_COUNTERS]
    if group is not None:
        paths |= {"limit": str(group.limit_file), "usage": str(group.usage_file), "memory_stat": str(group.stat_file)}
        paths |= {name: str(group.folder / file) for name, file in _GROUP_PRESSURES}
        if recording.request.group_stat == "pass":
            run_counters.append(["memory_stat", str(group.stat_file)])
        run_counters.append(["numa_stat", str(group.folder / "memory.numa_stat")])
    run_counters += [[f"node {node.node_id}", str(node.meminfo_file)] for node in recording.nodes.all]
    stat_files = [storage.block_stat_file for storage in storages]
    # Of one device more than is counted, what others read could not be told.
    if all(stat_files):
        run_counters += [[f"device {number}", str(path)] for number, path in enumerate(stat_files)]
    step_counters = [[name, paths[name]] for name, _ in recording.step_counters if not name.startswith("thread_io ")]
    return {"step_counters": step_counters, "run_counters": run_counters}


def _where(recording: Recording) -> str:
    """How far the run got, in words."""
    if recording.cold is None:
        return "before the first read"
    done = int(recording.arrays["control"][loop.EVENTS_DONE])
    which = "measured pass" if recording.measured else "warm-up pass"
    return f"in the {which}, step {_step_id(recording, max(done - 1, 0))}"


def _step_id(recording: Recording, event: int) -> int:
    return int(recording.trace.event_step[_event_ids(recording)[event]])


class _Ended(Exception):
    """The measuring process ended before it said what was awaited."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Child:
    """The measuring process and the lines it is spoken to in."""

    def __init__(
        self,
        recording: Recording,
        arena: Arena,
        storages: Sequence[Storage],
        group: Group | None,
        asking: Asking | None = None,
    ) -> None:
        self.recording, self.arena, self.group, self.asking = recording, arena, group, asking
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._said = b""
        # The package as it is here, wherever the command was called from; a folder of that name there is not ours.
        place = str(Path(replayer.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([place, *_paths(os.environ.get("PYTHONPATH"))])}
        self.process = launch_in(
            group,
            list(MEASURE_COMMAND),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            pass_fds=[arena.descriptor, *([] if asking is None else [asking.seat.descriptor])],
            # Ctrl-C at the terminal is for this process, which then stops the other one and marks the run.
            process_group=0,
        )
        if asking is not None:
            asking.is_alive = lambda: self.process.poll() is None
        try:
            self.tell(json.dumps(self._spec(storages)))
        except BaseException:
            self.__exit__()
            raise

    def _spec(self, storages: Sequence[Storage]) -> dict[str, Any]:
        recording, request = self.recording, self.recording.request
        return {
            "parent_pid": os.getpid(),
            "first_to_die": request.mechanism in ("balloon", "boot", "offline"),
            "memory_nodes": recording.nodes.bound_to,
            "arena_descriptor": self.arena.descriptor,
            "layout": self.arena.layout,
            "paths": [str(path.absolute()) for path in recording.pool.paths],
            "owner": request.owner,
            "fadvise": request.fadvise,
            "device": request.destination,
            "threads": request.threads,
            "slots": 2 if request.destination == "cuda" else 1,
            "slot_bytes": recording.reads.slot_bytes,
            "residency": _RESIDENCY[recording.residency_counter],
            "observe_every": _OBSERVE_EVERY[request.observe],
            "announce_bytes": _announce_bytes(storages) if request.fadvise == "willneed" else 0,
            "delivery": request.delivery,
            "piece_bytes": recording.piece_bytes or 0,
            "hint_slots": request.hint_slots,
            "policy": request.policy,
            "seed": request.seed,
            "verify": _VERIFY[request.verify] if recording.pool.content is not None else loop.VERIFY_EDGES,
            "warm_pass": request.warm_pass,
            "meets": recording.company is not None,
            "seat": None if self.asking is None else self.asking.seat.named(),
        }

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def tell(self, line: str) -> None:
        """Writes one line to the process."""
        assert self.process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def open_counters(self, files: dict[str, list[list[str]]]) -> None:
        """Says which counter files there are, now that there is a limit."""
        self.tell(json.dumps(files))

    def expect(self, kind: str, *, progress: Progress | None = None, what: str = "") -> dict[str, Any]:
        """The next report, which must be of that kind.

        Raises:
            _Ended: the process failed, was stopped or died instead.
        """
        assert self.process.stdout is not None, "stdout is a pipe"
        control = self.arena.arrays["control"]
        while b"\n" not in self._said:
            if not select.select([self.process.stdout], [], [], _POLL_S)[0]:
                if progress is not None and what:
                    progress(what, int(control[loop.EVENTS_DONE]), self.recording.walk.num_events)
                continue
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise self._end()
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        report: dict[str, Any] = json.loads(line)
        if report["kind"] == "failed":
            if report["wrong_call"]:
                raise UnusableReplay(report["message"])
            raise _Ended("failed", report["message"])
        failed_access = int(control[loop.FAILED_ACCESS])
        if failed_access:
            raise _Ended("failed", self._failed_access(failed_access - 1))
        failed_decision = int(control[loop.FAILED_DECISION])
        if failed_decision:
            step_id = _step_id(self.recording, failed_decision - 1)
            raise _Ended("failed", f"step {step_id}: the policy holds what no slot does, a fault of this program")
        if report["kind"] == "stopped":
            raise _Ended("interrupted", f"the measuring process was asked to stop {_where(self.recording)}")
        if report["kind"] != kind:
            raise _Ended("failed", f"the measuring process said {report['kind']} where {kind} was awaited")
        return report

    def stop(self) -> None:
        """Ends the process: the loop at its next event, whatever else at once."""
        self.arena.arrays["control"][loop.STOP] = 1
        if self.asking is not None:
            self.asking.release()
        # Before the first read there is nothing to bring home, and imports do not look at the flag.
        if self.recording.cold is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_S)
        self.process.kill()
        self.process.wait()

    def _end(self) -> _Ended:
        status = self.process.wait()
        recording = self.recording
        if status == -signal.SIGKILL:
            by_kernel = self.group is not None and (self.group.oom_kills() or 0) > 0
            why = (
                "by the kernel: its memory limit did not suffice; allow more --headroom"
                + (", or a larger --machine-bytes" if recording.request.outer_group_bytes is not None else "")
                if by_kernel
                else "by SIGKILL, perhaps by the kernel for want of memory"
            )
            return _Ended("killed", f"the measuring process was killed {_where(recording)} {why}")
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()
        return _Ended(
            "failed", f"the measuring process ended with code {status} {_where(recording)}: {' '.join(last[-1:])}"
        )

    def _failed_access(self, access: int) -> str:
        """Step, expert, file and reason of a read that failed."""
        recording, pool = self.recording, self.recording.pool
        obj, returned = int(recording.walk.objects[access]), int(self.arena.arrays["returned"][access])
        extent = int(pool.object_first_extent[obj])
        step_id = _step_id(recording, int(recording.access_event[access]))
        where = (
            f"step {step_id}, layer {pool.object_layer_id[obj]}, expert {pool.object_expert_id[obj]}, "
            f"{pool.paths[pool.extent_file[extent]]}"
        )
        if returned <= -1_000_000:
            return f"{where}: the copy to the accelerator failed with CUDA error {-returned - 1_000_000}"
        if returned < 0:
            reason = os.strerror(-returned)
            return f"{where}: read failed: {reason}; look at the device (dmesg) and at: replayer pool verify"
        return (
            f"{where}: the file ended after {returned:,} of the expert's {pool.object_bytes[obj]:,} bytes, so it "
            "shrank during the run; build the pool again"
        )


def _announce_bytes(storages: Sequence[Storage]) -> int:
    """Pieces in which a read is announced: the kernel reads no more of one announcement than the device's readahead."""
    return min(storage.read_ahead_bytes or _LEAST_READ_AHEAD_BYTES for storage in storages)


def _paths(joined: str | None) -> list[str]:
    return [path for path in (joined or "").split(os.pathsep) if path]


def _rows(
    recording: Recording,
    run_id: str,
    started_at: datetime,
    repeat: int,
    counted: dict[str, Any],
    steps: list[dict[str, Any]],
    reclaim: list[dict[str, Any]],
    layers: list[dict[str, Any]],
    proofs: list[Proof],
) -> Run:
    request, limits, pool, walk = recording.request, recording.limits, recording.pool, recording.walk
    trace_id = recording.trace.metadata.trace_id
    run = {
        "run_id": run_id,
        "started_at": f"{started_at:%Y-%m-%dT%H:%M:%S.%fZ}",
        "condition_hash": condition_hash(trace_id, pool.pool_id, request, recording.choice, recording.planned),
        "trace_id": trace_id,
        "pool_id": pool.pool_id,
        "machine_id": recording.machine_before["machine_id"],
        "replayer_version": package_version(),
        "status": recording.status,
        "failure": recording.failure,
        **verdicts(proofs),
        "thrash": _thrashes(recording),
        **{name: getattr(request, name) for name in (
            "owner", "policy", "mechanism", "fadvise", "destination", "threads", "observe",
            "verify", "warm_pass", "headroom_bytes", "outer_group_bytes",
        )},
        **_choices(recording),
        **_company(recording),
        "group_stat": None if recording.limits.group_path is None else request.group_stat,
        "capacity_bytes": recording.capacity_bytes,
        "arena_bytes": recording.arena_bytes,
        "preload_bytes": None if recording.holding is None else recording.holding.preload_bytes,
        "preload_ns": recording.preload_ns,
        "mechanism_detail": limits.detail,
        "residency_counter": recording.residency_counter,
        "files_stay_open": recording.files_stay_open,
        "repeat": repeat,
        "step_begin": recording.step_begin,
        "step_end": recording.step_end,
        "access_order": walk.order,
        "own_anonymous_bytes": recording.own_anonymous_bytes,
        "own_kernel_bytes": recording.own_kernel_bytes,
        "wall_bytes": limits.wall_bytes,
        "enforced_bytes": limits.enforced_bytes,
        "balloon_bytes": limits.balloon_bytes,
        "offline_bytes": limits.offline_bytes,
        **counted,
    }  # fmt: skip
    return Run(
        run=run,
        steps=[{"run_id": run_id, **row} for row in steps],
        reclaim=[{"run_id": run_id, **row} for row in reclaim],
        nodes=[{"run_id": run_id, **row} for row in node_rows(recording)],
        delivery=[{"run_id": run_id, **row} for row in _delivery_rows(recording)],
        layers=[{"run_id": run_id, **row} for row in layers],
        proofs=[{"run_id": run_id, **dataclasses.asdict(proof)} for proof in proofs],
        pool=pool_row(pool),
        machine=recording.machine_before,
    )


def _choices(recording: Recording) -> dict[str, Any]:
    """Columns of what the owner was told, with what it does where it was not."""
    request = recording.request
    keeps = holds_memory(request.owner) or has_table(request.owner)
    fitted = recording.choice.counts is not None
    return {
        "scope": (request.scope or "global") if keeps else None,
        "fit": (request.fit or "same") if fitted else None,
        "admission": request.admit,
        "seed": request.seed if request.policy == "random" else None,
        "miss_path": recording.miss_path,
        "arena_fraction": request.arena_fraction,
    }


def _delivery_rows(recording: Recording) -> list[dict[str, Any]]:
    """The row of replay_delivery, less run_id, where a plan was delivered."""
    counted, planned, request = delivery_columns(recording), recording.planned, recording.request
    if counted is None or planned is None:
        return []
    return [
        {
            "delivery": request.delivery,
            "plan_hash": _plan_hash(planned),
            "piece_bytes": recording.piece_bytes,
            "hint_slots": request.hint_slots,
            **counted,
        }
    ]


def _company(recording: Recording) -> dict[str, Any]:
    """Columns of the replays that ran together."""
    company = recording.company
    return {
        "together_id": None if company is None else company.together_id,
        "tenant_number": None if company is None else company.number,
        "tenants": None if company is None else company.size,
        "shares_wall": None if company is None else company.shares_wall,
        "overlap_ns": recording.overlap_ns,
    }


def _thrashes(recording: Recording) -> bool:
    room = _page_cache_room(recording)
    return room is not None and room < recording.request.threads * _largest(recording)


def pool_row(pool: Pool) -> dict[str, Any]:
    """The pool's row of the table `pool`."""
    return {
        "pool_id": pool.pool_id,
        "layout": pool.layout,
        "content": pool.content,
        "alignment_bytes": pool.alignment_bytes,
        "moe_layers": len(pool.moe_layer_ids),
        "pool_experts": pool.num_objects,
        "pool_bytes": int(pool.object_bytes.sum()),
        "expert_bytes_min": int(pool.object_bytes.min()),
        "expert_bytes_max": int(pool.object_bytes.max()),
        "files": len(pool.files),
        "file_bytes": int(pool.file_bytes.sum()),
    }


def package_version() -> str:
    """Version of the package that measures; `not installed` where it runs from a folder."""
    try:
        return version("expert-tier")
    except PackageNotFoundError:
        return "not installed"
