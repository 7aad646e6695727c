"""A trace, a plan and a link → what prefetching by that plan would have saved: misses, bytes and time, simulated.

In: `Trace`, `plan.Plan`, a global LRU of experts and a `Link`; out: `PrefetchResult`. Making plans belongs to the
pipeline, delivering them to a kernel to `advice`.

The clock. Events run one after the other. An event begins once the one before has computed; at that instant its
accesses are classified against the cache and moved to its top (event-atomic LRU), its demand reads join the link, then
the prefetches that become known with it. It computes for `compute_ns` once all it waits for has arrived. A plan issued
after event i is known as soon as i has been routed, so it overlaps with the reads and the compute of i.

The link sends one read at a time; a read takes bytes ÷ bandwidth on it and arrives `latency_ns` after it was sent, and
at most `queue_depth` reads are under way. Demand reads go before waiting prefetches and stop none under way. A prefetch
enters the cache when it arrives, at the top, as a read by the page cache would. One that is under way when its expert
is accessed is waited for (late); one that still waits is given up for a demand read.

Letters: N events, A accesses, M ids of the plan, O objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numba
import numpy as np
import numpy.typing as npt

from replayer.plan import BEFORE_ALL, MalformedPlan, Plan, first_misfit
from replayer.simulate import UnusableRequest
from replayer.trace import IntArray, Trace, steps_without_warmup, walk
from schemas.columns import SIMULATED_DELIVERIES
from schemas.trace import PHASE_CODES

FATES = (
    "not_delivered",
    "skipped_resident",
    "skipped_pending",
    "dropped",
    "expired",
    "in_flight",
    "used_in_time",
    "used_late",
    "wasted",
    "unused",
)
"""What became of an id of a plan; `PrefetchResult.fates` holds places in this tuple.

not_delivered: of an event that is not scored; skipped: its expert was in the cache, or named and not yet arrived;
dropped: the window was full; expired: it had not left when its target began or its expert was read on demand; in_flight
at the end; used: its expert was accessed before it was evicted, without waiting or late; wasted: evicted before it was
used; unused: still in the cache, not accessed, at the end.
"""

OUTCOMES = ("miss", "hit", "late")
"""What became of an access: a demand read, found in the cache, or waited for while a prefetch was under way."""

_RESIDENT_SKIP, _PENDING_SKIP, _DROPPED, _EXPIRED, _FLYING, _IN_TIME, _LATE, _WASTED, _UNUSED = range(1, 10)
_QUEUED = 100
_MISS, _HIT, _HIT_LATE = range(3)
_OUT, _WAITING, _ON_LINK, _RESIDENT = range(4)


@dataclass(frozen=True)
class Link:
    """What lies between the experts and the cache, and what there is to hide behind.

    bandwidth_bytes_per_s and queue_depth: null is unbounded; latency_ns: of each read, beside its transfer;
    compute_ns: of each event, that is of one pass of one layer.
    """

    bandwidth_bytes_per_s: int | None = None
    latency_ns: int = 0
    queue_depth: int | None = None
    compute_ns: int = 0

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "queue_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UnusableRequest(f"{name} {value}, wanted at least 1, or none for unbounded")
        if min(self.latency_ns, self.compute_ns) < 0:
            raise UnusableRequest(f"latency {self.latency_ns} ns and compute {self.compute_ns} ns, wanted none below 0")


@dataclass(frozen=True)
class Window:
    """How far a plan is delivered ahead; null is unbounded.

    events: a prefetch is held back until so many events before its target; experts: prefetches that may wait, be under
    way or lie in the cache unused at once, beyond which newcomers are dropped.
    """

    events: int | None = None
    experts: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and value < 1:
                raise UnusableRequest(f"a window of {value} {one.name}, wanted at least 1, or none for unbounded")


@dataclass(frozen=True)
class PrefetchResult:
    """Counts over the scored events, without and with the plan; bytes are null where expert sizes are unknown.

    Of accesses: misses_without, misses_with (demand reads), removed (missed without, not read on demand with) in time
    and late, displaced (hit without, read on demand with), delayed (hit without, late with), predicted_accesses,
    predicted_misses (named for their event and missed without). Of ids of the plan: predicted_experts, and what became
    of them, as `FATES` says; queued, submitted (left on the link), completed (arrived), used are sums of those. Time:
    stall is waiting for reads; events_ns is stall and compute; overlap_ns = Σ over events of min(stall without,
    compute). fates: (M,) places in `FATES`; outcomes: (A,) places in `OUTCOMES`, of all events that are no warm-up.
    """

    selections: int
    events: int
    covered_events: int
    accesses: int
    covered_accesses: int
    predicted_experts: int
    predicted_accesses: int
    misses_without: int
    predicted_misses: int
    misses_with: int
    removed_in_time: int
    removed_late: int
    displaced: int
    delayed: int
    late: int
    skipped_resident: int
    skipped_pending: int
    dropped: int
    expired: int
    queued: int
    submitted: int
    completed: int
    in_flight: int
    used: int
    used_in_time: int
    used_late: int
    wasted: int
    unused: int
    miss_bytes_without: int | None
    miss_bytes_with: int | None
    removed_bytes: int | None
    displaced_bytes: int | None
    submitted_bytes: int | None
    used_bytes: int | None
    wasted_bytes: int | None
    unused_bytes: int | None
    in_flight_bytes: int | None
    device_bytes_with: int | None
    compute_ns: int
    stall_ns_without: int
    stall_ns_with: int
    events_ns_without: int
    events_ns_with: int
    overlap_ns: int
    fates: npt.NDArray[np.uint8] = field(repr=False, compare=False)
    outcomes: npt.NDArray[np.uint8] = field(repr=False, compare=False)

    @property
    def removed(self) -> int:
        """Accesses that missed without the plan and were not read on demand with it."""
        return self.removed_in_time + self.removed_late


def broken_identity(result: PrefetchResult) -> str | None:
    """The first identity of a result that does not add up, with both sides; null where all do."""
    one = result
    sides: list[tuple[str, int | None, int | None]] = [
        (
            "predicted = skipped + dropped + queued",
            one.predicted_experts,
            one.skipped_resident + one.skipped_pending + one.dropped + one.queued,
        ),
        ("queued = expired + submitted", one.queued, one.expired + one.submitted),
        ("submitted = completed + in flight at the end", one.submitted, one.completed + one.in_flight),
        ("completed = used + wasted + unused", one.completed, one.used + one.wasted + one.unused),
        ("used = in time + late", one.used, one.used_in_time + one.used_late),
        (
            "misses with = without - removed + displaced",
            one.misses_with,
            one.misses_without - one.removed + one.displaced,
        ),
        ("late accesses = removed late + delayed", one.late, one.removed_late + one.delayed),
        ("time without = compute + stall", one.events_ns_without, one.compute_ns + one.stall_ns_without),
        ("time with = compute + stall", one.events_ns_with, one.compute_ns + one.stall_ns_with),
    ]  # fmt: skip
    if one.submitted_bytes is not None:
        assert one.removed_bytes is not None and one.displaced_bytes is not None, "sizes are known for all or none"
        assert one.miss_bytes_without is not None and one.miss_bytes_with is not None, "as above"
        assert one.used_bytes is not None and one.wasted_bytes is not None, "as above"
        assert one.unused_bytes is not None and one.in_flight_bytes is not None, "as above"
        sides += [
            (
                "submitted bytes = used + wasted + unused + in flight",
                one.submitted_bytes,
                one.used_bytes + one.wasted_bytes + one.unused_bytes + one.in_flight_bytes,
            ),
            (
                "miss bytes with = without - removed + displaced",
                one.miss_bytes_with,
                one.miss_bytes_without - one.removed_bytes + one.displaced_bytes,
            ),
            ("device bytes = missed + submitted", one.device_bytes_with, one.miss_bytes_with + one.submitted_bytes),
        ]
    return next((f"{name}: {left} and {right}" for name, left, right in sides if left != right), None)


def simulate_prefetch(
    trace: Trace,
    plan: Plan,
    *,
    capacity_experts: int,
    link: Link,
    expert_bytes: int | None = None,
    window: Window | None = None,
    delivery: str = "read",
    scored: npt.NDArray[np.bool_] | None = None,
) -> PrefetchResult:
    """What a plan would have saved; see `simulate_prefetches`."""
    (result,) = simulate_prefetches(
        trace,
        [plan],
        capacity_experts=capacity_experts,
        link=link,
        expert_bytes=expert_bytes,
        window=window,
        delivery=delivery,
        scored=scored,
    )
    return result


def simulate_prefetches(
    trace: Trace,
    plans: Sequence[Plan],
    *,
    capacity_experts: int,
    link: Link,
    expert_bytes: int | None = None,
    window: Window | None = None,
    delivery: str = "read",
    scored: npt.NDArray[np.bool_] | None = None,
) -> list[PrefetchResult]:
    """What each of the plans would have saved an LRU of `capacity_experts` over all layers, against no plan.

    All events but warm-up are replayed; those of `scored` (N,; default all) are counted, and predictions for them
    alone delivered. Sizes come from `expert_bytes`, else from the trace. Delivery `read` moves a named expert that is
    resident to the top, as reading it would; `willneed` leaves it where it is, as advice to the page cache does.

    Raises:
        MalformedPlan: a plan does not fit the trace. UnusableRequest: a capacity below 0, a bandwidth where sizes are
        unknown, an unknown delivery.
    """
    if capacity_experts < 0:
        raise UnusableRequest(f"a capacity of {capacity_experts} experts, wanted at least 0")
    if delivery not in SIMULATED_DELIVERIES:
        raise UnusableRequest(f"delivery {delivery!r}, wanted one of {', '.join(SIMULATED_DELIVERIES)}")
    sizes = sizes_of_objects(trace, expert_bytes)
    if sizes is None and link.bandwidth_bytes_per_s is not None:
        raise UnusableRequest(
            f"trace {trace.metadata.trace_id} does not say how large an expert is, and a link of "
            f"{link.bandwidth_bytes_per_s:,} bytes a second needs it; give expert_bytes"
        )
    for plan in plans:
        if (misfit := first_misfit(plan, trace)) is not None:
            raise MalformedPlan(f"{misfit}; make a plan for trace {trace.metadata.trace_id}")
    is_scored = np.ones(len(trace.event_layer), dtype=bool) if scored is None else scored
    run = _Run(trace, capacity_experts, link, sizes, window or Window(), delivery, is_scored)
    without = run.replay(_nothing(trace))
    return [run.result(plan, without) for plan in plans]


def sizes_of_objects(trace: Trace, expert_bytes: int | None = None) -> IntArray | None:
    """(O,) bytes of each expert, by layer and id; null where neither the trace nor `expert_bytes` says."""
    if expert_bytes is not None:
        if expert_bytes < 1:
            raise UnusableRequest(f"experts of {expert_bytes} bytes, wanted at least 1")
        return np.full(trace.num_objects, expert_bytes, dtype=np.int64)
    of_layers = [trace.metadata.sizes_of_layer(layer) for layer in range(len(trace.metadata.moe_layer_ids))]
    if any(sizes is None for sizes in of_layers):
        return None
    return np.array([size for sizes in of_layers for size in sizes or []], dtype=np.int64)


def _nothing(trace: Trace) -> Plan:
    events = len(trace.event_layer)
    return Plan(
        covered=np.zeros(events, dtype=bool),
        issued_after=np.full(events, BEFORE_ALL, dtype=np.int64),
        first_id=np.zeros(events + 1, dtype=np.int64),
        expert_ids=np.empty(0, dtype=np.uint16),
    )


@dataclass(frozen=True)
class _Replayed:
    fates: npt.NDArray[np.uint8]
    outcomes: npt.NDArray[np.uint8]
    stall_ns: IntArray


class _Run:
    """What plans of one trace are held against: its accesses, a cache and a link."""

    def __init__(
        self,
        trace: Trace,
        capacity_experts: int,
        link: Link,
        sizes: IntArray | None,
        window: Window,
        delivery: str,
        scored: npt.NDArray[np.bool_],
    ) -> None:
        self.trace, self.link, self.sizes, self.window = trace, link, sizes, window
        self.capacity, self.refresh = capacity_experts, delivery == "read"
        self.events = np.flatnonzero(trace.event_phase != PHASE_CODES["warmup"])
        self.scored = scored[self.events]
        self.walk = walk(trace, 0, len(steps_without_warmup(trace)), order="router")
        self.transfer_ns = np.zeros(trace.num_objects, dtype=np.int64)
        if sizes is not None and link.bandwidth_bytes_per_s is not None:
            # Rounded up, so that a link is never faster than it is said to be.
            self.transfer_ns = -(-sizes * 1_000_000_000 // link.bandwidth_bytes_per_s)

    def replay(self, plan: Plan) -> _Replayed:
        """Fates of the plan's ids, outcomes of all accesses, and the wait of each event that is no warm-up."""
        fates = np.zeros(len(plan.expert_ids), dtype=np.uint8)
        outcomes = np.zeros(len(self.walk.objects), dtype=np.uint8)
        stall_ns = np.zeros(len(self.events), dtype=np.int64)
        issues, first_issue = self._issues(plan)
        _replay(
            self.walk.objects,
            self.walk.first_access,
            self.capacity,
            self.transfer_ns,
            self.link.latency_ns,
            self.link.queue_depth or 0,
            self.link.compute_ns,
            issues,
            first_issue,
            plan.first_id[self.events],
            plan.first_id[self.events + 1],
            self._objects(plan),
            self.window.experts or 0,
            self.refresh,
            fates,
            outcomes,
            stall_ns,
        )
        return _Replayed(fates, outcomes, stall_ns)

    def _objects(self, plan: Plan) -> npt.NDArray[np.int32]:
        """(M,) the objects that a plan names."""
        first = self.trace.layer_first_object[self.trace.event_layer]
        return (np.repeat(first, np.diff(plan.first_id)) + plan.expert_ids).astype(np.int32)

    def _issues(self, plan: Plan) -> tuple[IntArray, IntArray]:
        """(targets in the order of issue, offsets into them: before all events, then of each event)."""
        targets = np.flatnonzero(plan.covered[self.events] & self.scored)
        # An event that is replayed in place of a warm-up event: the last one before it.
        after = np.searchsorted(self.events, plan.issued_after[self.events[targets]], side="right") - 1
        if self.window.events is not None:
            after = np.maximum(after, targets - self.window.events)
        order = np.argsort(after, kind="stable")
        first = np.searchsorted(after[order], np.arange(-1, len(self.events) + 1))
        return targets[order], first.astype(np.int64)

    def result(self, plan: Plan, without: _Replayed) -> PrefetchResult:
        """The counts of a plan; raises AssertionError where they do not add up."""
        with_plan = self.replay(plan)
        is_scored = np.repeat(self.scored, np.diff(self.walk.first_access))  # (A,)
        covered = plan.covered[self.events] & self.scored
        named = self._named(plan)
        was_miss, is_miss = (one.outcomes == _MISS for one in (without, with_plan))
        is_hit, is_late = (with_plan.outcomes == code for code in (_HIT, _HIT_LATE))
        fate = {name: with_plan.fates == code for code, name in enumerate(FATES)}
        accesses = {
            "accesses": is_scored,
            "misses_without": is_scored & was_miss,
            "misses_with": is_scored & is_miss,
            "removed_in_time": is_scored & was_miss & is_hit,
            "removed_late": is_scored & was_miss & is_late,
            "displaced": is_scored & ~was_miss & is_miss,
            "delayed": is_scored & ~was_miss & is_late,
            "late": is_scored & is_late,
            "predicted_accesses": is_scored & named,
            "predicted_misses": is_scored & named & was_miss,
            "covered_accesses": np.repeat(covered, np.diff(self.walk.first_access)),
        }
        count = {name: int(of.sum()) for name, of in accesses.items()}
        ids = {name: int(of.sum()) for name, of in fate.items()}
        completed = sum(ids[name] for name in ("used_in_time", "used_late", "wasted", "unused"))
        submitted = completed + ids["in_flight"]
        lengths = np.diff(plan.first_id)[self.events]
        size_of_access = None if self.sizes is None else self.sizes[self.walk.objects]
        size_of_id = None if self.sizes is None else self.sizes[self._objects(plan)]

        def access_bytes(*names: str) -> int | None:
            return None if size_of_access is None else sum(int(size_of_access[accesses[name]].sum()) for name in names)

        def id_bytes(*names: str) -> int | None:
            return None if size_of_id is None else sum(int(size_of_id[fate[name]].sum()) for name in names)

        missed, sent = access_bytes("misses_with"), id_bytes(*FATES[_FLYING:])
        stalls = [int(one.stall_ns[self.scored].sum()) for one in (without, with_plan)]
        events = int(self.scored.sum())
        compute_ns = events * self.link.compute_ns
        result = PrefetchResult(
            **count,
            selections=int(self.walk.selections[self.scored].sum()),
            events=events,
            covered_events=int(covered.sum()),
            predicted_experts=int(lengths[covered].sum()),
            **{name: ids[name] for name in FATES[1:]},
            queued=submitted + ids["expired"],
            submitted=submitted,
            completed=completed,
            used=ids["used_in_time"] + ids["used_late"],
            miss_bytes_without=access_bytes("misses_without"),
            miss_bytes_with=missed,
            removed_bytes=access_bytes("removed_in_time", "removed_late"),
            displaced_bytes=access_bytes("displaced"),
            submitted_bytes=sent,
            used_bytes=id_bytes("used_in_time", "used_late"),
            wasted_bytes=id_bytes("wasted"),
            unused_bytes=id_bytes("unused"),
            in_flight_bytes=id_bytes("in_flight"),
            device_bytes_with=None if missed is None or sent is None else missed + sent,
            compute_ns=compute_ns,
            stall_ns_without=stalls[0],
            stall_ns_with=stalls[1],
            events_ns_without=compute_ns + stalls[0],
            events_ns_with=compute_ns + stalls[1],
            overlap_ns=int(np.minimum(without.stall_ns[self.scored], self.link.compute_ns).sum()),
            fates=with_plan.fates,
            outcomes=with_plan.outcomes,
        )
        assert (broken := broken_identity(result)) is None, f"a count of prefetches is wrong: {broken}"
        return result

    def _named(self, plan: Plan) -> npt.NDArray[np.bool_]:
        """(A,) whether the plan names an access for its event."""
        named = np.zeros(len(self.walk.objects), dtype=np.bool_)
        _mark_named(
            self.walk.objects,
            self.walk.first_access,
            plan.first_id[self.events],
            plan.first_id[self.events + 1],
            self._objects(plan),
            self.trace.num_objects,
            named,
        )
        return named


@numba.njit(cache=True, nogil=True)
def _mark_named(objects, first_access, id_begin, id_end, ids, num_objects, named):  # type: ignore[no-untyped-def]
    named_in = np.full(num_objects, -1, dtype=np.int64)
    for event in range(len(id_begin)):
        for place in range(id_begin[event], id_end[event]):
            named_in[ids[place]] = event
        for access in range(first_access[event], first_access[event + 1]):
            named[access] = named_in[objects[access]] == event


@numba.njit(cache=True, nogil=True)
def _unlink(newer, older, thing):  # type: ignore[no-untyped-def]
    older[newer[thing]] = older[thing]
    newer[older[thing]] = newer[thing]


@numba.njit(cache=True, nogil=True)
def _to_top(newer, older, thing):  # type: ignore[no-untyped-def]
    # The last place of both is the sentinel: its older neighbour is the newest, its newer one the oldest.
    end = len(newer) - 1
    below = older[end]
    older[thing] = below
    newer[thing] = end
    newer[below] = thing
    older[end] = thing


@numba.njit(cache=True, nogil=True)
def _insert(newer, older, state, prefetch, fates, held, capacity, thing):  # type: ignore[no-untyped-def]
    """Puts a thing on top and evicts the oldest beyond the capacity; the prefetches held, and residents more by."""
    if capacity == 0:
        state[thing] = _OUT
        if prefetch[thing] >= 0:
            fates[prefetch[thing]] = _WASTED
            prefetch[thing] = -1
            held -= 1
        return held, 0
    _to_top(newer, older, thing)
    state[thing] = _RESIDENT
    return held, 1


@numba.njit(cache=True, nogil=True)
def _evict_oldest(newer, older, state, prefetch, fates, held):  # type: ignore[no-untyped-def]
    victim = newer[len(newer) - 1]
    _unlink(newer, older, victim)
    state[victim] = _OUT
    if prefetch[victim] >= 0:
        fates[prefetch[victim]] = _WASTED
        prefetch[victim] = -1
        held -= 1
    return held


@numba.njit(cache=True, nogil=True)
def _replay(  # type: ignore[no-untyped-def]
    objects, first_access, capacity, transfer_ns, latency_ns, queue_depth, compute_ns, issues, first_issue, id_begin,
    id_end, ids, window_experts, refresh, fates, outcomes, stall_ns,
):  # fmt: skip
    """Fills `fates` (M,), `outcomes` (A,) and `stall_ns` (N,); a queue depth or window of 0 is unbounded."""
    num_objects, num_events = len(transfer_ns), len(first_access) - 1
    newer = np.full(num_objects + 1, num_objects, dtype=np.int32)
    older = np.full(num_objects + 1, num_objects, dtype=np.int32)
    state = np.zeros(num_objects, dtype=np.uint8)
    prefetch = np.full(num_objects, -1, dtype=np.int64)  # the id of the plan that waits, flies or is unused
    last_target = np.full(num_objects, -1, dtype=np.int64)  # of a waiting prefetch
    # Each id of the plan waits at most once and flies at most once.
    waiting = np.empty(len(ids), dtype=np.int64)
    waits_since = np.empty(len(ids), dtype=np.int64)
    flying = np.empty(len(ids), dtype=np.int64)
    arrives = np.empty(len(ids), dtype=np.int64)
    arrival_of = np.zeros(num_objects, dtype=np.int64)
    first_waiting, num_waiting, first_flying, num_flying = 0, 0, 0, 0
    under_way = np.zeros(max(queue_depth, 1), dtype=np.int64)  # when the last reads arrive, a ring
    sent = 0
    link_free, now, held, residents = 0, 0, 0, 0
    # One round before the first event, for what is known before it, and one after the last, for what arrives still.
    for event in range(-1, num_events + 1):
        while first_waiting < num_waiting:
            place = waiting[first_waiting]
            if fates[place] != _QUEUED:
                first_waiting += 1
                continue
            start = max(link_free, waits_since[first_waiting])
            if queue_depth > 0:
                start = max(start, under_way[sent % queue_depth])
            if start > now:
                break
            first_waiting += 1
            thing = ids[place]
            link_free = start + transfer_ns[thing]
            arrives[num_flying] = link_free + latency_ns
            arrival_of[thing] = arrives[num_flying]
            if queue_depth > 0:
                under_way[sent % queue_depth] = arrives[num_flying]
            sent += 1
            flying[num_flying] = place
            num_flying += 1
            fates[place] = _FLYING
            state[thing] = _ON_LINK
        while first_flying < num_flying and arrives[first_flying] <= now:
            place = flying[first_flying]
            first_flying += 1
            if fates[place] != _FLYING:
                continue
            thing = ids[place]
            fates[place] = _UNUSED
            held, more = _insert(newer, older, state, prefetch, fates, held, capacity, thing)
            residents += more
            if residents > capacity:
                held = _evict_oldest(newer, older, state, prefetch, fates, held)
                residents -= 1
        if event == num_events:
            break
        if event >= 0:
            begin, end = first_access[event], first_access[event + 1]
            ready = now
            for access in range(begin, end):
                thing = objects[access]
                place = prefetch[thing]
                if state[thing] == _RESIDENT:
                    outcomes[access] = _HIT
                    if place >= 0:
                        fates[place] = _IN_TIME
                elif state[thing] == _ON_LINK:
                    outcomes[access] = _HIT_LATE
                    ready = max(ready, arrival_of[thing])
                    fates[place] = _LATE
                else:
                    outcomes[access] = _MISS
                    if place >= 0:
                        fates[place] = _EXPIRED
                if place >= 0:
                    prefetch[thing] = -1
                    held -= 1
            for access in range(begin, end):
                # What was resident may have been pushed out by a member before it: it comes back, as the stack says.
                thing = objects[access]
                if state[thing] == _RESIDENT:
                    _unlink(newer, older, thing)
                    _to_top(newer, older, thing)
                    continue
                held, more = _insert(newer, older, state, prefetch, fates, held, capacity, thing)
                residents += more
                if residents > capacity:
                    held = _evict_oldest(newer, older, state, prefetch, fates, held)
                    residents -= 1
            for place in range(id_begin[event], id_end[event]):
                thing = ids[place]
                if state[thing] == _WAITING and last_target[thing] <= event:
                    fates[prefetch[thing]] = _EXPIRED
                    prefetch[thing] = -1
                    state[thing] = _OUT
                    held -= 1
            for access in range(begin, end):
                if outcomes[access] == _MISS:
                    start = max(link_free, now)
                    if queue_depth > 0:
                        start = max(start, under_way[sent % queue_depth])
                    link_free = start + transfer_ns[objects[access]]
                    if queue_depth > 0:
                        under_way[sent % queue_depth] = link_free + latency_ns
                    sent += 1
                    ready = max(ready, link_free + latency_ns)
            stall_ns[event] = ready - now
        for issue in range(first_issue[event + 1], first_issue[event + 2]):
            target = issues[issue]
            for place in range(id_begin[target], id_end[target]):
                thing = ids[place]
                if state[thing] == _RESIDENT:
                    fates[place] = _RESIDENT_SKIP
                    if refresh:
                        _unlink(newer, older, thing)
                        _to_top(newer, older, thing)
                elif state[thing] != _OUT:
                    fates[place] = _PENDING_SKIP
                    last_target[thing] = max(last_target[thing], target)
                elif window_experts > 0 and held >= window_experts:
                    fates[place] = _DROPPED
                else:
                    fates[place] = _QUEUED
                    state[thing] = _WAITING
                    prefetch[thing] = place
                    last_target[thing] = target
                    waiting[num_waiting] = place
                    waits_since[num_waiting] = now
                    num_waiting += 1
                    held += 1
        if event >= 0:
            now += stall_ns[event] + compute_ns
