"""Policies against brute-force oracles, decision by decision, and the invariants that hold on every trace."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer import policies, priorities, recency
from replayer.caches import Caches, Events
from replayer.policies import Parameters
from replayer.simulate import Capacity, layer_quotas, object_sizes
from replayer.trace import Trace, Walk, part_of_walk, steps_without_warmup, walk
from schemas.columns import ACCESS_ORDERS, DEDUPS, POLICIES, SCOPES
from tests import oracles
from tests.builders import make_trace
from tests.strategies import access_lists, capacities, event_lists, routing_traces, single_row_traces

PRELOADED = ("static", "pinned_lru")
DEMAND_POLICIES = tuple(policy for policy in POLICIES if policy not in PRELOADED)
ATOMIC_OR_NOT = ("event_atomic", "sequential")


def whole_walk(trace: Trace, *, order: str = "router", dedup: str = "union") -> Walk:
    return walk(trace, 0, len(steps_without_warmup(trace)), order=order, dedup=dedup)


def caches_of(trace: Trace, steps: Walk, scope: str, capacity: Capacity):
    """(N,) the cache of each event, (C,) capacities, (C + 1,) first objects and (O,) sizes, as kernels take them."""
    per_layer = scope == "layer"
    num_caches = len(trace.metadata.moe_layer_ids) if per_layer else 1
    if capacity.bytes is None:
        sizes, held = np.ones(trace.num_objects, dtype=np.int64), np.full(num_caches, capacity.experts, dtype=np.int64)
    else:
        sizes, held = object_sizes(trace), layer_quotas(capacity.bytes, num_caches)
    first_object = trace.layer_first_object if per_layer else np.array([0, trace.num_objects])
    return steps.layer if per_layer else np.zeros_like(steps.layer), held, first_object, sizes


def kernel_decisions(
    policy: str,
    semantics: str,
    trace: Trace,
    steps: Walk,
    scope: str,
    capacity: Capacity,
    *,
    admits=None,
    cuts=(),
    pinned_fraction: float = 0.5,
):
    """Decisions of a kernel over a walk cut before the events `cuts`; a static table is fitted on the whole walk."""
    event_cache, held, first_object, sizes = caches_of(trace, steps, scope, capacity)
    caches = Caches(None if capacity.bytes is None else sizes, held, np.asarray(first_object), admits)
    counts = np.bincount(steps.objects, minlength=trace.num_objects)
    run, state = policies.kernel_of(
        policy, semantics, caches, Parameters(counts=counts, pinned_fraction=pinned_fraction)
    )
    atomic = semantics == "event_atomic"
    bounds = [0, *sorted(set(cuts) - {0}), steps.num_events]
    pieces = [part_of_walk(steps, begin, end) for begin, end in pairwise(bounds)]
    next_time = [None] * len(pieces)
    if policies.knows_future(policy):
        next_time = next_times_of(pieces, trace.num_objects, atomic)
    was_hit = []
    for (begin, end), piece, times in zip(pairwise(bounds), pieces, next_time, strict=True):
        events = Events(piece.objects, piece.first_access, event_cache[begin:end], piece.step, times)
        decided = np.full(len(piece.objects), 77, dtype=np.uint8)
        run(state, events, caches, atomic, decided)
        was_hit += decided.tolist()
    assert set(was_hit) <= {0, 1}
    return [bool(hit) for hit in was_hit]


def next_times_of(pieces: list[Walk], num_objects: int, atomic: bool) -> list[np.ndarray]:
    upcoming = np.full(num_objects, np.iinfo(np.uint32).max, dtype=np.uint32)
    base = sum(piece.num_events if atomic else len(piece.objects) for piece in pieces)
    found = []
    for piece in reversed(pieces):
        base -= piece.num_events if atomic else len(piece.objects)
        times = np.empty(len(piece.objects), dtype=np.uint32)
        priorities.next_times(piece.objects, piece.first_access, upcoming, base, atomic, times)
        found.append(times)
    return found[::-1]


def oracle_decisions(
    policy: str, semantics: str, trace: Trace, steps: Walk, scope: str, capacity: Capacity, *, admits=None
):
    event_cache, held, _, sizes = caches_of(trace, steps, scope, capacity)
    bounds = steps.first_access.tolist()
    events = [steps.objects[begin:end].tolist() for begin, end in pairwise(bounds)]
    cache_of_event = event_cache.tolist()
    admitted = None if admits is None else set(np.flatnonzero(admits).tolist())
    step_of_event = steps.step.tolist()

    def decide(mine, **known):
        return oracles.decide(policy, semantics, mine, fitted_on=mine, admitted=admitted, **known)

    return oracles.each_cache(
        decide,
        events,
        cache_of_event,
        dict(enumerate(held.tolist())),
        step_of_event=step_of_event,
        size=dict(enumerate(sizes.tolist())),
    )


def count_hits(policy: str, semantics: str, trace: Trace, scope: str, experts: int) -> int:
    return sum(kernel_decisions(policy, semantics, trace, whole_walk(trace), scope, Capacity(experts=experts)))


@pytest.mark.parametrize("policy", oracles.POLICIES)
@settings(max_examples=24, deadline=None)
@given(
    trace=routing_traces(),
    order=st.sampled_from(ACCESS_ORDERS),
    dedup=st.sampled_from(DEDUPS),
    sizes_in_bytes=st.lists(st.integers(1, 40), max_size=4),
    data=st.data(),
)
def test_kernel_decides_every_access_as_the_oracle_does(policy, trace, order, dedup, sizes_in_bytes, data):
    steps = whole_walk(trace, order=order, dedup=dedup)
    sizes_asked = [Capacity(experts=experts) for experts in range(trace.num_objects + 2)]
    if trace.metadata.expert_bytes is not None:
        sizes_asked += [Capacity(bytes=size) for size in sizes_in_bytes]
    admits = data.draw(st.none() | admission_masks(trace))
    for semantics, scope, capacity in product(policies.semantics_of(policy), SCOPES, sizes_asked):
        asked = (policy, semantics, trace, steps, scope, capacity)
        found, wanted = kernel_decisions(*asked, admits=admits), oracle_decisions(*asked, admits=admits)
        assert found == wanted, (semantics, scope, capacity)


def admission_masks(trace: Trace):
    return st.lists(st.booleans(), min_size=trace.num_objects, max_size=trace.num_objects).map(np.array)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), trace=routing_traces(), dedup=st.sampled_from(DEDUPS), scope=st.sampled_from(SCOPES))
def test_a_walk_in_pieces_is_decided_as_the_whole(policy, data, trace, dedup, scope):
    steps = whole_walk(trace, dedup=dedup)
    capacity = data.draw(capacities(trace))
    cuts = data.draw(st.sets(st.integers(0, steps.num_events - 1)))
    admits = data.draw(st.none() | admission_masks(trace))
    for semantics in policies.semantics_of(policy):
        asked = (policy, semantics, trace, steps, scope, capacity)
        assert kernel_decisions(*asked, admits=admits) == kernel_decisions(*asked, admits=admits, cuts=cuts), semantics


@pytest.mark.parametrize("policy", DEMAND_POLICIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), trace=routing_traces(), scope=st.sampled_from(SCOPES))
def test_what_may_not_enter_never_hits(policy, data, trace, scope):
    steps = whole_walk(trace)
    admits, capacity = data.draw(admission_masks(trace)), data.draw(capacities(trace))
    for semantics in policies.semantics_of(policy):
        hits = kernel_decisions(policy, semantics, trace, steps, scope, capacity, admits=admits)
        assert not any(hit for hit, thing in zip(hits, steps.objects, strict=True) if not admits[thing])


@pytest.mark.parametrize("policy", DEMAND_POLICIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), trace=routing_traces(), scope=st.sampled_from(SCOPES))
def test_a_table_that_admits_everything_changes_nothing(policy, data, trace, scope):
    steps, capacity = whole_walk(trace), data.draw(capacities(trace))
    everything = np.ones(trace.num_objects, dtype=bool)
    for semantics in policies.semantics_of(policy):
        asked = (policy, semantics, trace, steps, scope, capacity)
        assert kernel_decisions(*asked) == kernel_decisions(*asked, admits=everything)


@settings(max_examples=36, deadline=None)
@given(data=st.data(), trace=routing_traces(), scope=st.sampled_from(SCOPES), semantics=st.sampled_from(ATOMIC_OR_NOT))
def test_pinning_nothing_is_lru_and_pinning_everything_is_static(data, trace, scope, semantics):
    steps, capacity = whole_walk(trace), data.draw(capacities(trace))
    asked = (semantics, trace, steps, scope, capacity)
    assert kernel_decisions("pinned_lru", *asked, pinned_fraction=0.0) == kernel_decisions("lru", *asked)
    pinned = kernel_decisions("pinned_lru", *asked, pinned_fraction=1.0)
    static = kernel_decisions("static", *asked)
    assert all(mine or not table for mine, table in zip(pinned, static, strict=True))


def one_layer(events: list[list[int]]) -> Trace:
    """A trace of one layer whose events are these: one row each of one expert, or as many rows as the event has."""
    return make_trace([[[[expert] for expert in event]] for event in events], num_experts=4)


@settings(max_examples=60, deadline=None)
@given(accesses=access_lists(), experts=st.integers(0, 4), forced=st.booleans())
def test_sequential_belady_has_as_many_hits_as_trying_every_victim(accesses, experts, forced):
    policy = "belady_forced" if forced else "belady_bypass"
    hits = count_hits(policy, "sequential", one_layer([[one] for one in accesses]), "global", experts)
    assert hits == oracles.most_hits_sequential(accesses, experts, must_admit=forced)


@settings(max_examples=60, deadline=None)
@given(events=event_lists(), experts=st.integers(0, 4))
def test_event_atomic_belady_with_bypass_has_as_many_hits_as_trying_every_subset(events, experts):
    hits = count_hits("belady_bypass", "event_atomic", one_layer(events), "global", experts)
    assert hits == oracles.most_hits_atomic(events, experts)


def test_event_atomic_forced_belady_may_lie_below_the_optimum_with_bypass():
    events = [[0], [1, 2], [0]]
    assert count_hits("belady_forced", "event_atomic", one_layer(events), "layer", 2) == 0
    assert count_hits("belady_bypass", "event_atomic", one_layer(events), "layer", 2) == 1


@given(trace=routing_traces(), scope=st.sampled_from(SCOPES), experts=st.integers(0, 19))
@settings(max_examples=36, deadline=None)
def test_no_policy_beats_sequential_belady(trace, scope, experts):
    hits = {policy: count_hits(policy, "sequential", trace, scope, experts) for policy in POLICIES}
    assert all(hits["belady_bypass"] >= hits[policy] for policy in DEMAND_POLICIES)
    assert all(hits["belady_forced"] >= hits[policy] for policy in policies.ALWAYS_ADMITTING)


@given(trace=routing_traces(), scope=st.sampled_from(SCOPES), experts=st.integers(0, 19))
@settings(max_examples=36, deadline=None)
def test_a_static_table_gains_over_belady_at_most_its_preload(trace, scope, experts):
    steps = whole_walk(trace)
    _, held, first_object, sizes = caches_of(trace, steps, scope, Capacity(experts=experts))
    table = recency.static_table(np.bincount(steps.objects, minlength=trace.num_objects), sizes, held, first_object)
    gained = count_hits("static", "sequential", trace, scope, experts) - table.sum()
    assert gained <= count_hits("belady_bypass", "sequential", trace, scope, experts)


@given(trace=single_row_traces())
@settings(max_examples=36, deadline=None)
def test_event_atomic_lru_of_top_k_experts_hits_exactly_the_lag_1_reuse(trace):
    steps = whole_walk(trace)
    events = steps.objects.reshape(-1, len(trace.metadata.moe_layer_ids), trace.top_k).tolist()
    reused = sum(oracles.lag1_reuse(layer) for layer in zip(*events, strict=True))
    assert count_hits("lru", "event_atomic", trace, "layer", trace.top_k) == reused


@given(trace=single_row_traces(), semantics=st.sampled_from(ATOMIC_OR_NOT), data=st.data())
@settings(max_examples=36, deadline=None)
def test_global_lru_below_one_token_cycle_never_hits(trace, semantics, data):
    other_layers = len(trace.metadata.moe_layer_ids) - 1
    experts = data.draw(st.integers(0, other_layers * trace.top_k))
    assert count_hits("lru", semantics, trace, "global", experts) == 0


def test_global_lru_of_one_slot_more_than_the_other_layers_need_hits():
    trace = make_trace(np.zeros((2, 3, 1), dtype=int))
    assert count_hits("lru", "event_atomic", trace, "global", 2) == 0
    assert count_hits("lru", "event_atomic", trace, "global", 3) == 3


@given(trace=single_row_traces())
@settings(max_examples=36, deadline=None)
def test_global_sequential_lru_of_one_token_cycle_equals_lru_of_top_k_per_layer(trace):
    steps = whole_walk(trace)
    cycle = len(trace.metadata.moe_layer_ids) * trace.top_k
    at_once = kernel_decisions("lru", "sequential", trace, steps, "global", Capacity(experts=cycle))
    layered = kernel_decisions("lru", "sequential", trace, steps, "layer", Capacity(experts=trace.top_k))
    assert at_once == layered


@given(trace=routing_traces(), semantics=st.sampled_from(ATOMIC_OR_NOT), scope=st.sampled_from(SCOPES))
@settings(max_examples=36, deadline=None)
def test_lru_keeps_every_hit_when_capacity_grows(trace, semantics, scope):
    steps = whole_walk(trace)
    smaller = [False] * len(steps.objects)
    for experts in range(trace.num_objects + 1):
        larger = kernel_decisions("lru", semantics, trace, steps, scope, Capacity(experts=experts))
        assert all(after or not before for before, after in zip(smaller, larger, strict=True))
        smaller = larger


@given(
    trace=routing_traces(known_sizes=True),
    policy=st.sampled_from(POLICIES),
    semantics=st.sampled_from(ATOMIC_OR_NOT),
    scope=st.sampled_from(SCOPES),
    capacity=st.sampled_from([Capacity(experts=0), Capacity(bytes=0)]),
)
@settings(max_examples=36, deadline=None)
def test_nothing_hits_in_a_cache_of_capacity_0(trace, policy, semantics, scope, capacity):
    assert not any(kernel_decisions(policy, semantics, trace, whole_walk(trace), scope, capacity))


@given(
    trace=routing_traces(known_sizes=True),
    policy=st.sampled_from(DEMAND_POLICIES),
    semantics=st.sampled_from(ATOMIC_OR_NOT),
    scope=st.sampled_from(SCOPES),
    in_bytes=st.booleans(),
)
@settings(max_examples=36, deadline=None)
def test_a_cache_of_the_whole_footprint_misses_only_first_accesses(trace, policy, semantics, scope, in_bytes):
    steps = whole_walk(trace)
    # Byte quotas are equal, so the quota of each layer must hold the largest one.
    footprint = int(object_sizes(trace).sum()) * len(trace.metadata.moe_layer_ids)
    capacity = Capacity(bytes=footprint) if in_bytes else Capacity(experts=trace.num_objects)
    was_hit = kernel_decisions(policy, semantics, trace, steps, scope, capacity)
    objects = steps.objects.tolist()
    assert was_hit == [thing in objects[:access] for access, thing in enumerate(objects)]


@given(trace=routing_traces(), semantics=st.sampled_from(ATOMIC_OR_NOT), scope=st.sampled_from(SCOPES), data=st.data())
@settings(max_examples=36, deadline=None)
def test_renaming_experts_leaves_lru_counts_alone(trace, semantics, scope, data):
    renamed_ids = trace.expert_ids.copy()
    bounds = trace.event_first_row
    new_names = [data.draw(st.permutations(range(count))) for count in trace.metadata.experts_per_layer]
    for event, layer in enumerate(trace.event_layer):
        rows = slice(bounds[event], bounds[event + 1])
        renamed_ids[rows] = np.array(new_names[layer], dtype=np.uint16)[trace.expert_ids[rows]]
    renamed = Trace(**{**vars(trace), "expert_ids": renamed_ids})
    experts = data.draw(st.integers(0, trace.num_objects))
    before = count_hits("lru", semantics, trace, scope, experts)
    assert count_hits("lru", semantics, renamed, scope, experts) == before


def decisions_of(policy: str, semantics: str, events: list[list[int]], *, dedup: str = "union", **capacity: int) -> str:
    """Decisions on one layer of experts 0–3 of sizes 1, 2, 3, 4 as text: H or m for each access."""
    rows = [[[[expert] for expert in event]] for event in events]
    trace = make_trace(rows, expert_bytes=[[1, 2, 3, 4]], num_experts=4)
    steps = whole_walk(trace, dedup=dedup)
    hits = kernel_decisions(policy, semantics, trace, steps, "layer", Capacity(**capacity))
    return "".join("H" if hit else "m" for hit in hits)


def test_lru_keeps_the_longest_prefix_of_its_stack_that_fits():
    # After 0, 1, 2 the stack is 2 (3 bytes), 1 (2), 0 (1): 5 bytes hold 2 and 1; that 0 alone would fit is no help.
    assert decisions_of("lru", "sequential", [[0], [1], [2], [1], [0]], bytes=5) == "mmmHm"


def test_an_expert_larger_than_its_quota_is_served_and_evicts_nothing():
    for policy in DEMAND_POLICIES:
        for semantics in ATOMIC_OR_NOT:
            assert decisions_of(policy, semantics, [[0], [3], [0], [3]], bytes=3) == "mmHm", (policy, semantics)


def test_event_atomic_lru_leaves_the_last_named_members_of_an_event_larger_than_the_cache():
    assert decisions_of("lru", "event_atomic", [[0, 1, 2], [0, 1, 2]], experts=2) == "mmmmHH"


def test_gated_lfu_admits_only_above_the_count_of_its_victim():
    assert decisions_of("lfu_gated", "sequential", [[0], [1], [1], [0]], experts=1) == "mmmm"
    assert decisions_of("lfu_gated", "sequential", [[0], [1], [1], [1]], experts=1) == "mmmH"
    assert decisions_of("lfu_always", "sequential", [[0], [1], [1], [0]], experts=1) == "mmHm"


def test_lfu_evicts_the_least_recent_of_the_least_frequent():
    assert decisions_of("lfu_always", "sequential", [[0], [1], [2], [1], [0]], experts=2) == "mmmHm"


def test_lfu_never_evicts_a_member_of_the_event_it_serves():
    # 1 is resident with the lowest count, but a member; 0 has the higher count and leaves.
    assert decisions_of("lfu_always", "event_atomic", [[0], [0], [1], [1, 2], [1, 2], [0]], experts=2) == "mHmHmHHm"


@pytest.mark.parametrize(
    ("policy", "events", "decisions"),
    [
        ("lfu_always", [[0], [0], [1], [1], [2, 3, 2], [1]], "mHmHmmmH"),
        ("lfu_gated", [[0], [0], [1], [1], [2, 3, 2, 2, 2], [0]], "mHmHmmmmmH"),
    ],
)
def test_lfu_knows_a_member_as_resident_while_the_victim_scan_skips_it(policy, events, decisions):
    # Expert 2 is admitted, skipped while a victim for 3 is sought, then mentioned again: no second admission.
    assert decisions_of(policy, "event_atomic", events, dedup="none", experts=3) == decisions


def test_belady_with_bypass_serves_what_is_needed_later_than_every_resident():
    assert decisions_of("belady_bypass", "sequential", [[0], [1], [0], [1]], experts=1) == "mmHm"
    assert decisions_of("belady_forced", "sequential", [[0], [1], [0], [1]], experts=1) == "mmmm"
