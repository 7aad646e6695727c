"""From what one run left behind to the rows of its tables. Numbers in, numbers out: no files, no processes.

Every quantity is defined by its column in `schemas.columns`. What the numbers must satisfy is in `proofs`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from replayer import counters
from replayer.advice import Planned
from replayer.caches import Caches, Events
from replayer.holdings import Choice, Holding
from replayer.loop import (
    COMPLETED,
    DIRECT,
    DROPPED,
    HELD,
    HINT_COMPLETED,
    HINT_IN_FLIGHT,
    OVERWRITTEN,
    SUBMITTED,
)
from replayer.nodes import Nodes
from replayer.owners import ReadPlan, holds_memory, reads_directly
from replayer.pool import Pool
from replayer.recency import lru, lru_state
from replayer.request import Request
from replayer.trace import Trace, Walk, steps_without_warmup

IntArray = npt.NDArray[np.int64]

DEVICE_BYTES_COUNTER = "read_bytes of /proc/self/task/*/io, demand threads"
DEVICE_BYTES_COUNTER_HINTED = "read_bytes of /proc/self/task/*/io, demand threads and the hints' worker"
DEVICE_BYTES_COUNTER_PROCESS = "read_bytes of /proc/self/io, whole process"


_MEASURED = (
    "reads", "returned_bytes", "observed_accesses", "native_hits", "native_partial_hits", "native_misses",
    "native_hit_rate", "arena_hits", "missing_bytes", "direct_bytes", "device_bytes", "device_bytes_counter",
    "own_fault_bytes", "overshoot_bytes", "raced_pages", "neighbor_bytes", "amplification_nominal",
    "resident_miss_bytes", "amplification_resident", "interval_ns", "wall_ns", "check_ns", "step_median_ns", "stall_ns",
    "stall_median_ns", "stall_p99_ns", "observe_ns", "verify_ns", "decide_ns", "cpu_ns", "consumed_digest",
    "checked_bytes", "resident_median_bytes", "resident_max_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """How memory was limited. Null: there was no such limit. See the columns of the same names.

    others_bytes: own memory of other replays in the same wall. memory_bytes: MemTotal of a machine that is the limit.
    """

    detail: str | None = None
    capacity_bytes: int | None = None
    wall_bytes: int | None = None
    enforced_bytes: int | None = None
    balloon_bytes: int | None = None
    balloon_start_ticks: int | None = None
    balloon_machine_locked_bytes: int | None = None
    limit_bytes: int | None = None
    group_path: str | None = None
    others_bytes: int = 0
    memory_bytes: int | None = None
    offline_bytes: int | None = None


@dataclass(frozen=True)
class Company:
    """Which of how many replays that run together, and whether they do so in one wall."""

    together_id: str
    number: int
    size: int
    shares_wall: bool


@dataclass
class Recording:
    """Everything one run left behind, before anybody judged it.

    arrays: those of `loop.Results`, of the measured pass (of the warm-up pass if the run ended in it). cold, warm,
    before, after: snapshots of the measuring process, null if it did not get there. pool_files: (size, ctime_ns,
    inode) of each file, before and after, null if it is not there. asker_cpu_ns: processor time, in the last pass, of
    the process that asked for events one by one, null where the whole schedule was known.
    """

    request: Request
    trace: Trace
    pool: Pool
    reads: ReadPlan
    choice: Choice
    planned: Planned | None
    miss_path: str | None
    walk: Walk
    page_bytes: int
    direct_alignment_bytes: int
    step_begin: int
    step_end: int
    arrays: Mapping[str, npt.NDArray[Any]]
    step_counters: list[tuple[str, int]]
    residency_counter: str
    nodes: Nodes
    status: str = "complete"
    failure: str | None = None
    measured: bool = False
    own_anonymous_bytes: int | None = None
    own_kernel_bytes: int | None = None
    limits: Limits = field(default_factory=Limits)
    company: Company | None = None
    overlap_ns: int | None = None
    shortest_ns: int | None = None
    holding: Holding | None = None
    arena_bytes: int | None = None
    preload_ns: int | None = None
    decide_ns: int | None = None
    delivery_error: int | None = None
    piece_bytes: int | None = None
    files_stay_open: bool | None = None
    cold: dict[str, Any] | None = None
    warm: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    span: dict[str, int] | None = None
    machine_before: dict[str, Any] = field(default_factory=dict)
    machine_after: dict[str, Any] = field(default_factory=dict)
    pool_files_before: list[tuple[int, int, int] | None] = field(default_factory=list)
    pool_files_after: list[tuple[int, int, int] | None] = field(default_factory=list)
    group_oom_kills: int | None = None
    unsuitable_storage: str | None = None
    asker_cpu_ns: int | None = None

    @property
    def capacity_bytes(self) -> int | None:
        """What was asked for, or what a wall that was asked for leaves; null without a limit, or before it is known."""
        return self.limits.capacity_bytes if self.request.capacity_bytes is None else self.request.capacity_bytes

    @property
    def device_bytes_counter(self) -> str:
        """What the device's bytes are counted by."""
        if self.request.delivery == "uring":
            # The kernel reads for it in threads of its own, too.
            return DEVICE_BYTES_COUNTER_PROCESS
        return DEVICE_BYTES_COUNTER if self.planned is None else DEVICE_BYTES_COUNTER_HINTED

    def device_bytes_of(self, texts: Mapping[str, str | bytes | None]) -> int | None:
        """What the threads that read the pool have had read from the device, by the texts of their counters."""
        if self.device_bytes_counter == DEVICE_BYTES_COUNTER_PROCESS:
            return sum_of_read_bytes(texts, ["io"])
        numbers = range(self.request.threads + (self.planned is not None))
        return sum_of_read_bytes(texts, [f"thread_io {number}" for number in numbers])

    @property
    def num_steps(self) -> int:
        return self.step_end - self.step_begin

    @cached_property
    def ended_steps(self) -> int:
        """Measured steps that ended, checks included."""
        return int(np.count_nonzero(self.arrays["check_end_ns"])) if self.measured else 0

    @cached_property
    def ended_events(self) -> int:
        return int(self.step_first_event[self.ended_steps])

    @cached_property
    def step_first_event(self) -> IntArray:
        """(S + 1,) offsets into the events."""
        return np.searchsorted(self.walk.step, np.arange(self.num_steps + 1)).astype(np.int64)

    @cached_property
    def access_event(self) -> IntArray:
        """(A,) event of each access."""
        return np.repeat(np.arange(self.walk.num_events), np.diff(self.walk.first_access))

    @cached_property
    def access_pages(self) -> IntArray:
        """(A,) pages that each access's extents lie in."""
        begin = self.pool.extent_offset_bytes // self.page_bytes
        end = -(-(self.pool.extent_offset_bytes + self.pool.extent_length_bytes) // self.page_bytes)
        of_object = np.add.reduceat(end - begin, self.pool.object_first_extent[:-1])
        pages: IntArray = of_object[self.walk.objects]
        return pages

    @property
    def ended_step_ids(self) -> list[int]:
        """(ended steps,) step_id of each in the trace."""
        ids = steps_without_warmup(self.trace)[self.step_begin : self.step_begin + self.ended_steps]
        return [int(step_id) for step_id in ids]

    @cached_property
    def _counter_number(self) -> dict[str, int]:
        return {name: number for number, (name, _) in enumerate(self.step_counters)}

    def step_text(self, step: int, name: str) -> bytes | None:
        """Text of a counter file after a step; null if it could not be read, or is none of those read then."""
        number = self._counter_number.get(name)
        if number is None:
            return None
        length = int(self.arrays["counter_length"][step, number])
        if length < 0:
            return None
        place = int(self.arrays["counter_first_byte"][number])
        return self.arrays["counter_text"][step, place : place + length].tobytes()

    @cached_property
    def step_device_bytes(self) -> IntArray | None:
        """(ended steps,) what the demand threads had read from the device; null if the kernel does not count it."""
        if self.before is None:
            return None
        last = self.device_bytes_of(self.before["text"])
        names = [name for name, _ in self.step_counters if name == "io" or name.startswith("thread_io ")]
        totals = [
            self.device_bytes_of({name: self.step_text(step, name) for name in names})
            for step in range(self.ended_steps)
        ]
        if last is None or any(total is None for total in totals):
            return None
        counted = np.array([last, *totals], dtype=np.int64)
        return counted[1:] - counted[:-1]

    @cached_property
    def stalls_ns(self) -> IntArray:
        """(events of ended steps,) from an event's first read's begin to its last read's end."""
        if self.ended_events == 0:
            return np.zeros(0, dtype=np.int64)
        first = self.walk.first_access[: self.ended_events]
        end = self.walk.first_access[self.ended_events]
        stalls: IntArray = np.maximum.reduceat(self.arrays["end_ns"][:end], first) - np.minimum.reduceat(
            self.arrays["begin_ns"][:end], first
        )
        return stalls

    @cached_property
    def classes(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(A,) whether an access of an ended step was observed to hit, to hit in part, to miss."""
        missing = self.arrays["missing_pages"]
        observed = missing >= 0
        observed[self.walk.first_access[self.ended_events] :] = False
        absent = observed & (missing == self.access_pages)
        hit = observed & (missing == 0) & ~absent
        return hit, observed & ~hit & ~absent, absent

    @cached_property
    def direct_object_bytes(self) -> IntArray:
        """(O,) bytes that a read past the page cache asks for, cut at the end of the file as the device has it."""
        pool, reads, unit = self.pool, self.reads, self.direct_alignment_bytes
        file_end = -(-pool.file_bytes // unit) * unit
        length = np.minimum(reads.length, file_end[pool.extent_file] - reads.offset)
        of_object: IntArray = np.add.reduceat(length, pool.object_first_extent[:-1])
        return of_object

    def served(self, path: int) -> npt.NDArray[np.bool_]:
        """(A,) accesses that got their bytes so."""
        was: npt.NDArray[np.bool_] = self.arrays["path"] == path
        return was

    @cached_property
    def resident_bytes(self) -> IntArray:
        """(ended steps,) of the pool."""
        return self.arrays["resident_pages"][: self.ended_steps] * self.page_bytes


def text_of(snapshot: dict[str, Any] | None, name: str) -> bytes | None:
    """Text of a counter file in a snapshot; null if there is none."""
    text = None if snapshot is None else snapshot["text"].get(name)
    return None if text is None else text.encode()


def sum_of_read_bytes(texts: Mapping[str, str | bytes | None], names: Sequence[str]) -> int | None:
    """Sum of read_bytes over counter files of /proc/*/io; null if one was not there."""
    total = 0
    for name in names:
        text = texts.get(name)
        parsed = counters.parse_io(text.encode() if isinstance(text, str) else text)
        if parsed is None or "read_bytes" not in parsed:
            return None
        total += parsed["read_bytes"]
    return total


def between(recording: Recording, name: str, parse: Any, pick: Any) -> int | None:
    """How much a counter grew over the measured pass; null if it was not there."""
    first, last = parse(text_of(recording.before, name)), parse(text_of(recording.after, name))
    if first is None or last is None or pick(first) is None or pick(last) is None:
        return None
    return int(pick(last) - pick(first))


def median_of(values: IntArray) -> int | None:
    """The lower median, a value that occurred; null of nothing."""
    return int(np.sort(values)[(len(values) - 1) // 2]) if len(values) else None


def percentile_99_of(values: IntArray) -> int | None:
    """The ⌈0.99 n⌉-th smallest of n; null of nothing."""
    return int(np.sort(values)[math.ceil(0.99 * len(values)) - 1]) if len(values) else None


def simulated_lru_hits(recording: Recording, capacity_bytes: int) -> npt.NDArray[np.bool_]:
    """(A,) measured accesses that a simulated LRU of that capacity hits: global, event-atomic, the same passes."""
    walk, pool = recording.walk, recording.pool
    caches = Caches(
        pool.object_bytes, np.array([capacity_bytes], dtype=np.int64), np.array([0, pool.num_objects], dtype=np.int64)
    )
    events = Events(walk.objects, walk.first_access, np.zeros_like(walk.layer), walk.step)
    state, was_hit = lru_state(caches), np.empty(len(walk.objects), dtype=np.uint8)
    for _ in range(2 if recording.request.warm_pass else 1):
        lru(state, events, caches, True, was_hit)
    return was_hit != 0


def account(recording: Recording) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """(columns of replay_run that are counted or measured, rows of replay_step, rows of replay_layer), less run_id."""
    pool, walk, request = recording.pool, recording.walk, recording.request
    sizes = pool.object_bytes[walk.objects]
    run: dict[str, Any] = {
        "replayed_steps": recording.num_steps,
        "events": walk.num_events,
        "selections": int(walk.selections.sum()),
        "accesses": len(walk.objects),
        "union_ratio": len(walk.objects) / int(walk.selections.sum()),
        "demand_bytes": int(sizes.sum()),
        "cold_resident_bytes": None if recording.cold is None else recording.cold["resident_bytes"],
        "warm_device_bytes": _warm_device_bytes(recording),
    }
    run["nominal_miss_bytes"] = None
    # A part of a run has no counterpart in the simulation of the whole.
    if recording.capacity_bytes is not None and recording.status == "complete":
        run["nominal_miss_bytes"] = int(sizes[~simulated_lru_hits(recording, recording.capacity_bytes)].sum())
    run.update(dict.fromkeys(_MEASURED))
    if not recording.measured:
        return run, [], []
    resident = recording.resident_bytes
    run["resident_median_bytes"] = median_of(resident)
    run["resident_max_bytes"] = int(resident.max()) if len(resident) else None
    hits = None
    # Of an owner that keeps experts elsewhere too, what the page cache holds is no capacity of the whole.
    if request.owner in ("page_cache", "page_cache_mmap") and run["resident_median_bytes"] is not None:
        hits = simulated_lru_hits(recording, run["resident_median_bytes"])
        if recording.status == "complete":
            run["resident_miss_bytes"] = int(sizes[~hits].sum())
    run.update(_counted(recording))
    run.update(_timed(recording))
    for kind in ("nominal", "resident"):
        base = run[f"{kind}_miss_bytes"]
        if base and run["device_bytes"] is not None:
            run[f"amplification_{kind}"] = run["device_bytes"] / base
    return run, _step_rows(recording, sizes, hits), _layer_rows(recording, sizes, hits)


def has_readahead(request: Request) -> bool:
    """Whether the kernel may read more of the pool than it is asked for."""
    return request.fadvise in ("normal", "sequential", "noreuse")


def _warm_device_bytes(recording: Recording) -> int | None:
    if recording.cold is None or recording.warm is None:
        return None
    first = recording.device_bytes_of(recording.cold["text"])
    last = recording.device_bytes_of(recording.warm["text"])
    return None if first is None or last is None else last - first


def _counted(recording: Recording) -> dict[str, Any]:
    arrays, walk, request = recording.arrays, recording.walk, recording.request
    returned = arrays["returned"]
    sizes = recording.pool.object_bytes[walk.objects]
    hit, partial, absent = recording.classes
    observed = int(np.count_nonzero(hit | partial | absent))
    all_observed = observed == len(walk.objects)
    missing_bytes = int(arrays["missing_pages"][partial | absent].sum()) * recording.page_bytes
    device_bytes = own_fault_bytes = neighbor_bytes = None
    if recording.before is not None and recording.after is not None:
        first = recording.device_bytes_of(recording.before["text"])
        last = recording.device_bytes_of(recording.after["text"])
        process_bytes = between(recording, "io", counters.parse_io, lambda io: io.get("read_bytes"))
        if first is not None and last is not None:
            device_bytes = last - first
            own_fault_bytes = None if process_bytes is None else max(process_bytes - device_bytes, 0)
        devices = [name for name in recording.before["text"] if name.startswith("device ")]
        read = [between(recording, name, counters.parse_block_stat, lambda stat: stat.read_bytes) for name in devices]
        whole = [size for size in read if size is not None]
        if whole and len(whole) == len(read) and process_bytes is not None:
            # The device counts at completion, the process at submission: what is in flight may make it negative.
            neighbor_bytes = max(sum(whole) - process_bytes, 0)
    is_direct = recording.served(DIRECT)
    direct_bytes = int(recording.direct_object_bytes[walk.objects[is_direct]].sum())
    cached_missing = int(arrays["missing_pages"][(partial | absent) & ~is_direct].sum()) * recording.page_bytes
    beyond = None if device_bytes is None or not all_observed else device_bytes - direct_bytes - cached_missing
    all_direct = reads_directly(request.owner, recording.miss_path)
    readahead = has_readahead(request) and not all_direct
    exact = not readahead and not all_direct and recording.planned is None
    held = int(np.count_nonzero(recording.served(HELD)))
    return {
        "reads": int(np.count_nonzero(returned == sizes)),
        "returned_bytes": int(returned[returned > 0].sum()),
        "observed_accesses": observed,
        "native_hits": int(np.count_nonzero(hit)),
        "native_partial_hits": int(np.count_nonzero(partial)),
        "native_misses": int(np.count_nonzero(absent)),
        "native_hit_rate": int(np.count_nonzero(hit)) / observed if observed else None,
        "arena_hits": held if holds_memory(request.owner) else None,
        "missing_bytes": missing_bytes if all_observed else None,
        "direct_bytes": direct_bytes,
        "device_bytes": device_bytes,
        "device_bytes_counter": None if device_bytes is None else recording.device_bytes_counter,
        "own_fault_bytes": own_fault_bytes,
        "overshoot_bytes": beyond if readahead and recording.planned is None else None,
        "raced_pages": beyond // recording.page_bytes if exact and beyond is not None else None,
        "neighbor_bytes": neighbor_bytes,
        "consumed_digest": f"{int(arrays['digest'].sum(dtype=np.uint64)):016x}"
        if recording.status == "complete"
        else None,
        "checked_bytes": int(arrays["checked_words"].sum()) * 8,
    }


def delivery_columns(recording: Recording) -> dict[str, Any] | None:
    """Columns of replay_delivery that are counted; null where nothing was delivered, or measured."""
    planned, arrays = recording.planned, recording.arrays
    if planned is None or not recording.measured:
        return None
    state, mailbox = arrays["hints_state"], arrays["hints_mailbox"]
    delivered = (state == HINT_COMPLETED) | (state == HINT_IN_FLIGHT)
    hit, partial, absent = recording.classes
    named = named_accesses(recording)
    seen = named & (hit | partial | absent)
    return {
        "hints": len(planned.event),
        "hints_submitted": int(mailbox[SUBMITTED]),
        "hints_completed": int(mailbox[COMPLETED]),
        "hints_overwritten": int(mailbox[OVERWRITTEN]),
        "hints_dropped": int(mailbox[DROPPED]),
        "hints_in_flight": int(np.count_nonzero(state == HINT_IN_FLIGHT)),
        "hinted_missing_bytes": int(arrays["hints_hint_missing_pages"].sum()) * recording.page_bytes,
        "hinted_read_bytes": int(arrays["hints_hint_grown_pages"].sum()) * recording.page_bytes,
        "hint_ns": int((arrays["hints_hint_end_ns"] - arrays["hints_hint_begin_ns"])[delivered].sum()),
        "named_accesses": int(np.count_nonzero(seen)),
        "named_hits": int(np.count_nonzero(seen & hit)),
    }


def named_accesses(recording: Recording) -> npt.NDArray[np.bool_]:
    """(A,) accesses whose expert a hint for their event named, whatever became of the hint."""
    planned, walk = recording.planned, recording.walk
    if planned is None:
        return np.zeros(len(walk.objects), dtype=bool)
    width = np.int64(recording.pool.num_objects)
    of_id = np.repeat(planned.event, np.diff(planned.hint_first_object))
    accesses = recording.access_event * width + walk.objects
    named: npt.NDArray[np.bool_] = np.isin(accesses, of_id * width + planned.hint_objects)
    return named


def _timed(recording: Recording) -> dict[str, Any]:
    arrays, steps = recording.arrays, recording.ended_steps
    wall_ns = (arrays["step_end_ns"] - arrays["step_begin_ns"])[:steps]
    stalls = recording.stalls_ns
    span = recording.span
    cpu_ns = None
    if recording.before is not None and recording.after is not None:
        cpu_ns = recording.after["process_cpu_ns"] - recording.before["process_cpu_ns"]
    return {
        "interval_ns": None if span is None else span["end_ns"] - span["begin_ns"],
        "wall_ns": int(wall_ns.sum()),
        "check_ns": int((arrays["check_end_ns"] - arrays["step_end_ns"])[:steps].sum()),
        "step_median_ns": median_of(wall_ns),
        "stall_ns": int(stalls.sum()),
        "stall_median_ns": median_of(stalls),
        "stall_p99_ns": percentile_99_of(stalls),
        "observe_ns": int(arrays["observe_ns"].sum()),
        "verify_ns": int(arrays["verify_ns"].sum()),
        "decide_ns": recording.decide_ns,
        "cpu_ns": cpu_ns,
    }


def _step_rows(recording: Recording, sizes: IntArray, simulated: npt.NDArray[np.bool_] | None) -> list[dict[str, Any]]:
    walk, arrays = recording.walk, recording.arrays
    rows = []
    for step, step_id in enumerate(recording.ended_step_ids):
        first_event, end_event = recording.step_first_event[step], recording.step_first_event[step + 1]
        chosen = slice(int(walk.first_access[first_event]), int(walk.first_access[end_event]))
        device = recording.step_device_bytes
        rows.append(
            {
                "step_id": step_id,
                **_group(recording, chosen, sizes, simulated, recording.stalls_ns[first_event:end_event]),
                "device_bytes": None if device is None else int(device[step]),
                "resident_bytes": int(recording.resident_bytes[step]),
                "wall_ns": int(arrays["step_end_ns"][step] - arrays["step_begin_ns"][step]),
                "check_ns": int(arrays["check_end_ns"][step] - arrays["step_end_ns"][step]),
            }
        )
    return rows


def _layer_rows(recording: Recording, sizes: IntArray, simulated: npt.NDArray[np.bool_] | None) -> list[dict[str, Any]]:
    walk = recording.walk
    ended = np.arange(walk.num_events) < recording.ended_events
    rows = []
    for layer, layer_id in enumerate(recording.trace.metadata.moe_layer_ids):
        events = ended & (walk.layer == layer)
        if events.any():
            chosen = events[recording.access_event]
            stalls = recording.stalls_ns[events[: recording.ended_events]]
            rows.append({"layer_id": layer_id, **_group(recording, chosen, sizes, simulated, stalls)})
    return rows


def access_columns(recording: Recording) -> dict[str, npt.NDArray[Any]]:
    """The columns of replay_access, less run_id: observed accesses of ended steps, in the order walked."""
    hit, partial, absent = recording.classes
    chosen = np.flatnonzero(hit | partial | absent) if recording.measured else np.zeros(0, dtype=np.int64)
    objects = recording.walk.objects[chosen]
    steps = steps_without_warmup(recording.trace)[recording.step_begin : recording.step_end]
    return {
        "access": chosen.astype(np.int64),
        "step_id": steps[recording.walk.step[recording.access_event[chosen]]].astype(np.uint32),
        "layer_id": recording.pool.object_layer_id[objects].astype(np.int64),
        "expert_id": recording.pool.object_expert_id[objects].astype(np.int64),
        "expert_bytes": recording.pool.object_bytes[objects].astype(np.int64),
        "missing_bytes": recording.arrays["missing_pages"][chosen].astype(np.int64) * recording.page_bytes,
    }


def _group(
    recording: Recording,
    chosen: slice | npt.NDArray[np.bool_],
    sizes: IntArray,
    simulated: npt.NDArray[np.bool_] | None,
    stalls: IntArray,
) -> dict[str, Any]:
    """What steps and layers have in common."""
    hit, partial, absent = (which[chosen] for which in recording.classes)
    accesses, observed = len(hit), int(np.count_nonzero(hit | partial | absent))
    missing = recording.arrays["missing_pages"][chosen]
    hits = None if simulated is None else int(np.count_nonzero(simulated[chosen]))
    return {
        "events": len(stalls),
        "accesses": accesses,
        "demand_bytes": int(sizes[chosen].sum()),
        "observed_accesses": observed,
        "native_hits": int(np.count_nonzero(hit)),
        "native_partial_hits": int(np.count_nonzero(partial)),
        "native_misses": int(np.count_nonzero(absent)),
        "native_hit_rate": int(np.count_nonzero(hit)) / observed if observed else None,
        "missing_bytes": int(missing[missing > 0].sum()) * recording.page_bytes if observed == accesses else None,
        "simulated_hits": hits,
        "simulated_misses": None if hits is None else accesses - hits,
        "stall_ns": int(stalls.sum()),
        "stall_median_ns": median_of(stalls),
        "stall_p99_ns": percentile_99_of(stalls),
    }
