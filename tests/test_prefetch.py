"""Simulated prefetch: the kernel against a replay in lists, identities, and what must hold of plans that know all."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.plan import BEFORE_ALL, MalformedPlan, Plan
from replayer.prefetch import FATES, OUTCOMES, Link, Window, broken_identity, simulate_prefetch, sizes_of_objects
from replayer.simulate import Capacity, UnusableRequest, prepare, simulate
from replayer.trace import Trace, steps_without_warmup, walk
from schemas.columns import SIMULATED_DELIVERIES
from schemas.trace import PHASE_CODES
from tests.builders import make_trace
from tests.prefetch_oracles import Replay
from tests.strategies import routing_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
SECOND_NS = 1_000_000_000


def plan_of(predictions: list[tuple[int, list[int]] | None]) -> Plan:
    """A plan of (issued after, experts) per event; none is not covered."""
    lengths = [0 if one is None else len(one[1]) for one in predictions]
    return Plan(
        covered=np.array([one is not None for one in predictions]),
        issued_after=np.array([BEFORE_ALL if one is None else one[0] for one in predictions], dtype=np.int64),
        first_id=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        expert_ids=np.array([expert for one in predictions if one for expert in one[1]], dtype=np.uint16),
    )


def experts_of_events(trace: Trace) -> list[list[int]]:
    """The distinct experts of every event, in order of first mention."""
    bounds = pairwise(trace.event_first_row.tolist())
    return [list(dict.fromkeys(trace.expert_ids[begin:end].ravel().tolist())) for begin, end in bounds]


def oracle_plan(trace: Trace, depth: int | None = None) -> Plan:
    """Names what every event accesses, `depth` events before it, or before all of them."""
    return plan_of(
        [
            (BEFORE_ALL if depth is None else max(number - depth, BEFORE_ALL), experts)
            for number, experts in enumerate(experts_of_events(trace))
        ]
    )


class Case(NamedTuple):
    trace: Trace
    plan: Plan
    capacity: int
    link: Link
    window: Window
    delivery: str
    scored: np.ndarray


@st.composite
def plans(draw: st.DrawFn, trace: Trace) -> Plan:
    """Any plan that fits: what each event accesses among other experts, issued at any event before it."""
    experts = np.diff(trace.layer_first_object)[trace.event_layer].tolist()
    predictions: list[tuple[int, list[int]] | None] = []
    for event, count in enumerate(experts):
        if draw(st.integers(0, 3)) == 0:
            predictions.append(None)
            continue
        named = draw(st.permutations(range(count)))[: draw(st.integers(0, count))]
        predictions.append((draw(st.integers(BEFORE_ALL, event - 1)), named))
    return plan_of(predictions)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    trace = draw(routing_traces(known_sizes=True))
    unbounded_or = lambda most: st.one_of(st.none(), st.integers(1, most))  # noqa: E731
    link = Link(
        draw(st.one_of(st.none(), st.sampled_from([SECOND_NS // 7, SECOND_NS // 2, SECOND_NS]))),
        draw(st.integers(0, 9)),
        draw(unbounded_or(3)),
        draw(st.integers(0, 30)),
    )
    events = len(trace.event_layer)
    return Case(
        trace=trace,
        plan=draw(plans(trace)),
        capacity=draw(st.integers(0, trace.num_objects + 1)),
        link=link,
        window=Window(draw(unbounded_or(4)), draw(unbounded_or(4))),
        delivery=draw(st.sampled_from(SIMULATED_DELIVERIES)),
        scored=np.array(draw(st.lists(st.booleans(), min_size=events, max_size=events))),
    )


def result_of(case: Case, **changes):
    one = case._replace(**changes)
    return simulate_prefetch(
        one.trace, one.plan, capacity_experts=one.capacity, link=one.link, window=one.window, delivery=one.delivery,
        scored=one.scored,
    )  # fmt: skip


def slow(case: Case, *, with_plan: bool = True) -> tuple[Replay, list[int]]:
    """The replay in lists, over the events that are no warm-up, and which those are."""
    trace, plan = case.trace, case.plan
    kept = [event for event, phase in enumerate(trace.event_phase) if phase != PHASE_CODES["warmup"]]
    first = trace.layer_first_object[trace.event_layer].tolist()
    experts = experts_of_events(trace)
    named = []
    for event in kept:
        if not (with_plan and plan.covered[event] and case.scored[event]):
            named.append(None)
            continue
        # A prediction issued at a warm-up event is there when the last event before it has begun.
        after = sum(one <= plan.issued_after[event] for one in kept) - 1
        ids = plan.expert_ids[plan.first_id[event] : plan.first_id[event + 1]].tolist()
        named.append((after, [first[event] + expert for expert in ids]))
    sizes = sizes_of_objects(trace).tolist()
    bandwidth = case.link.bandwidth_bytes_per_s
    replay = Replay(
        [[first[event] + expert for expert in experts[event]] for event in kept],
        named,
        capacity=case.capacity,
        transfer=[0 if bandwidth is None else -(-size * SECOND_NS // bandwidth) for size in sizes],
        latency=case.link.latency_ns,
        depth=case.link.queue_depth,
        compute=case.link.compute_ns,
        window_events=case.window.events,
        window_held=case.window.experts,
        touch=case.delivery == "read",
    )
    return replay, kept


@settings(deadline=None, max_examples=240)
@given(cases())
def test_outcomes_fates_and_times_are_those_of_a_replay_in_lists(case):
    result = result_of(case)
    (with_plan, kept), (without, _) = slow(case), slow(case, with_plan=False)
    outcomes = [one for event in with_plan.outcomes for one in event]
    assert [OUTCOMES[code] for code in result.outcomes] == outcomes
    first = case.trace.layer_first_object[case.trace.event_layer].tolist()
    place_of = {event: place for place, event in enumerate(kept)}
    fates = []
    for event in range(len(first)):
        for expert in case.plan.expert_ids[case.plan.first_id[event] : case.plan.first_id[event + 1]].tolist():
            fates.append(with_plan.fates.get((place_of.get(event), first[event] + expert), "not_delivered"))
    assert [FATES[code] for code in result.fates] == fates
    counted = [bool(case.scored[event]) for event in kept]
    scored_with = [one for event, is_in in zip(with_plan.outcomes, counted, strict=True) if is_in for one in event]
    scored_without = [one for event, is_in in zip(without.outcomes, counted, strict=True) if is_in for one in event]
    both = list(zip(scored_without, scored_with, strict=True))
    assert result.accesses == len(both)
    assert result.misses_without == scored_without.count("miss")
    assert result.misses_with == scored_with.count("miss")
    assert result.removed_in_time == both.count(("miss", "hit"))
    assert result.removed_late == both.count(("miss", "late"))
    assert result.displaced == both.count(("hit", "miss"))
    assert result.delayed == both.count(("hit", "late"))
    waits = [(a, b) for a, b, is_in in zip(without.stalls, with_plan.stalls, counted, strict=True) if is_in]
    assert result.stall_ns_without == sum(one for one, _ in waits)
    assert result.stall_ns_with == sum(one for _, one in waits)
    assert result.overlap_ns == sum(min(one, case.link.compute_ns) for one, _ in waits)
    for name in FATES[1:]:
        assert getattr(result, name) == fates.count(name)


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_every_identity_adds_up_and_is_seen_to_break(case, data):
    result = result_of(case)
    assert broken_identity(result) is None
    names = [
        "predicted_experts", "misses_with", "displaced", "removed_late", "late", "queued", "submitted", "completed",
        "in_flight", "used", "used_in_time", "wasted", "unused", "expired", "dropped", "stall_ns_with",
        "submitted_bytes",
        "wasted_bytes", "miss_bytes_with", "removed_bytes", "device_bytes_with", "events_ns_with", "events_ns_without",
    ]  # fmt: skip
    name = data.draw(st.sampled_from(names))
    wrong = dataclasses.replace(result, **{name: getattr(result, name) + 1})
    assert broken_identity(wrong) is not None


@settings(deadline=None, max_examples=60)
@given(cases())
def test_without_a_plan_misses_are_those_of_the_simulator(case):
    nothing = plan_of([None] * len(case.trace.event_layer))
    result = result_of(case, plan=nothing, scored=np.ones(len(case.trace.event_layer), dtype=bool))
    (row,) = simulate(
        prepare(case.trace), names=["lru"], scope="global", semantics=["event_atomic"],
        capacities=[Capacity(experts=case.capacity)],
    )  # fmt: skip
    in_phase = row["phase"] == "all"
    if in_phase:
        assert result.misses_without == row["misses"]
    assert result.misses_with == result.misses_without
    assert result.submitted == result.removed == result.displaced == 0
    assert result.events_ns_with == result.events_ns_without


@settings(deadline=None, max_examples=90)
@given(routing_traces(), st.integers(1, 3))
def test_the_oracle_with_nothing_in_its_way_removes_every_miss(trace, depth):
    # Without warm-up events, so that a distance in events is one in replayed events.
    trace = dataclasses.replace(trace, event_phase=np.where(trace.event_phase == PHASE_CODES["warmup"],
                                PHASE_CODES["unknown"], trace.event_phase).astype(np.int8))  # fmt: skip
    unions = [len(experts) for experts in experts_of_events(trace)]
    room = max(sum(unions[begin : begin + depth + 1]) for begin in range(len(unions)))
    for plan, window in ((oracle_plan(trace, depth), None), (oracle_plan(trace), Window(events=depth))):
        result = simulate_prefetch(trace, plan, capacity_experts=room, link=Link(), window=window)
        assert result.misses_with == result.late == result.displaced == result.wasted == 0
        assert result.removed_in_time == result.misses_without == result.used == result.submitted


@settings(deadline=None, max_examples=36)
@given(routing_traces())
def test_the_oracle_removes_every_miss_of_a_cache_that_holds_everything_whenever_it_is_told(trace):
    result = simulate_prefetch(trace, oracle_plan(trace), capacity_experts=trace.num_objects, link=Link())
    assert result.misses_with == 0
    assert result.removed_in_time == result.misses_without


def test_by_hand_a_prefetch_in_time_one_late_and_one_that_displaces():
    # One layer, one expert an event, a cache of 2; a read takes 10 ns on the link and 5 ns beside, an event computes
    # 12 ns. Without a plan: 0 1 0 2 0 misses at 0, 1 and 2; each waits 15 ns.
    trace = make_trace(np.array([[[0]], [[1]], [[0]], [[2]], [[0]]]), num_experts=4, expert_bytes=10)
    link = Link(bandwidth_bytes_per_s=SECOND_NS, latency_ns=5, compute_ns=12)
    # At event 0 (its own read is on the link until 10): 1 is sent at 10, arrives at 25; event 1 begins at 27. In time.
    # At event 2 (27 + 12 = 39): 2 is sent at once, arrives at 54; event 3 begins at 51, waits 3.
    plan = plan_of([None, (0, [1]), None, (2, [2]), None])
    result = simulate_prefetch(trace, plan, capacity_experts=2, link=link)
    assert (result.misses_without, result.misses_with, result.removed_in_time, result.removed_late) == (3, 1, 1, 1)
    assert (result.stall_ns_without, result.stall_ns_with, result.overlap_ns) == (45, 18, 36)
    assert (result.events_ns_without, result.events_ns_with) == (105, 78)
    # Naming 3 and 2 for event 2 pushes 0 out: 0 is read again.
    plan = plan_of([None, None, (1, [3]), None, None])
    far = simulate_prefetch(trace, plan, capacity_experts=1, link=Link(compute_ns=1))
    assert (far.submitted, far.wasted, far.displaced) == (1, 1, 0)
    plan = plan_of([None, None, (1, [3, 2]), None, None])
    near = simulate_prefetch(trace, plan, capacity_experts=2, link=Link(compute_ns=1))
    # 3 and 2 come while 1 computes, so 0 misses at event 2, where it pushes 3 out; 2 is used at event 3, 0 hits again.
    assert [OUTCOMES[code] for code in near.outcomes] == ["miss", "miss", "miss", "hit", "hit"]
    assert (near.displaced, near.removed_in_time, near.wasted, near.used) == (1, 1, 1, 1)


def test_by_hand_a_demand_read_goes_before_what_waits_and_not_before_what_is_under_way():
    trace = make_trace(np.array([[[0]], [[1]], [[2]]]), num_experts=6, expert_bytes=10)
    link = Link(bandwidth_bytes_per_s=SECOND_NS, compute_ns=5)
    # At 0: 0 is on the link until 10. 3 then until 20, 4 and 5 wait. Event 1 begins at 15: 1 goes from 20 to 30, before
    # 4 and 5; then 4 until 40, and event 2 begins at 35: 2 waits for 4 until 40 and is there at 50. 5 never left.
    plan = plan_of([None, None, (0, [3, 4, 5])])
    result = simulate_prefetch(trace, plan, capacity_experts=6, link=link)
    assert result.stall_ns_with == 10 + 15 + 15
    assert (result.submitted, result.expired, result.unused) == (2, 1, 2)


def test_advice_leaves_a_resident_where_it_is_and_a_read_renews_it():
    # A cache of 2: 0 and 1 are resident, 2 and 0 are named for the events after the next; 2 pushes out the older one.
    trace = make_trace(np.array([[[0]], [[1]], [[2]], [[0]]]), num_experts=3)
    plan = plan_of([None, None, (1, [2]), (0, [0])])
    outcome = {
        delivery: simulate_prefetch(trace, plan, capacity_experts=2, link=Link(compute_ns=1), delivery=delivery)
        for delivery in SIMULATED_DELIVERIES
    }
    plan_late = plan_of([None, None, (1, [2]), (1, [0])])
    renewed = [
        simulate_prefetch(trace, plan_late, capacity_experts=2, link=Link(compute_ns=1), delivery=delivery).misses_with
        for delivery in SIMULATED_DELIVERIES
    ]
    assert renewed == [2, 3]
    assert {one.removed_in_time for one in outcome.values()} == {1}


def test_bytes_are_unknown_where_sizes_are_and_a_bandwidth_needs_them():
    trace = make_trace(np.zeros((3, 1, 1), dtype=int))
    result = simulate_prefetch(trace, oracle_plan(trace), capacity_experts=1, link=Link())
    assert result.device_bytes_with is None
    assert result.wasted_bytes is None
    with pytest.raises(UnusableRequest, match="does not say how large"):
        simulate_prefetch(trace, oracle_plan(trace), capacity_experts=1, link=Link(bandwidth_bytes_per_s=1))
    known = simulate_prefetch(
        trace, oracle_plan(trace), capacity_experts=1, link=Link(bandwidth_bytes_per_s=1), expert_bytes=3
    )
    assert (known.miss_bytes_without, known.device_bytes_with, known.submitted_bytes) == (3, 3, 3)


@pytest.mark.parametrize("asked", [{"bandwidth_bytes_per_s": 0}, {"queue_depth": 0}, {"latency_ns": -1}])
def test_a_link_that_cannot_be_is_refused(asked):
    with pytest.raises(UnusableRequest, match="wanted"):
        Link(**asked)


@pytest.mark.parametrize("asked", [{"events": 0}, {"experts": 0}])
def test_a_window_that_holds_nothing_is_refused(asked):
    with pytest.raises(UnusableRequest, match="a window of 0"):
        Window(**asked)


def test_a_plan_that_does_not_fit_an_unknown_delivery_and_a_capacity_below_0_are_refused():
    trace = make_trace(np.zeros((3, 1, 1), dtype=int))
    with pytest.raises(MalformedPlan, match="event 1: issued after event 1"):
        simulate_prefetch(trace, plan_of([None, (1, [0]), None]), capacity_experts=1, link=Link())
    with pytest.raises(UnusableRequest, match="wanted one of read, willneed"):
        simulate_prefetch(trace, oracle_plan(trace), capacity_experts=1, link=Link(), delivery="pigeon")
    with pytest.raises(UnusableRequest, match="at least 0"):
        simulate_prefetch(trace, oracle_plan(trace), capacity_experts=-1, link=Link())


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"public router dumps are not at {TRACES}")
@pytest.mark.parametrize("domain", ["code", "math"])
def test_on_real_routes_the_oracle_removes_every_miss_of_a_tenth_of_the_experts(domain):
    with np.load(TRACES / f"qwen3-30b-{domain}.npz") as dump:
        trace = make_trace(np.ascontiguousarray(dump["experts"].transpose(1, 0, 2)), num_experts=128)
    accessed = walk(trace, 0, len(steps_without_warmup(trace)), order="router")
    experts = (accessed.objects - trace.layer_first_object[accessed.layer].repeat(8)).astype(np.uint16)
    numbers = np.arange(len(trace.event_layer))
    plan = Plan(np.ones(len(numbers), dtype=bool), numbers - 1, accessed.first_access, experts)
    result = simulate_prefetch(trace, plan, capacity_experts=trace.num_objects // 10, link=Link())
    assert result.misses_without > 1_000_000
    assert result.misses_with == result.displaced == result.late == 0
    assert result.removed_in_time == result.used == result.misses_without
