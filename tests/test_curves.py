"""Whole curves against stacks scanned by hand, against the LRU kernel at every capacity, and the laws they keep."""

from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replayer.caches import Caches, Events
from replayer.curves import (
    FIRST_ACCESS,
    NEVER_HITS,
    ByteCurve,
    CapacityBelowLargestExpert,
    Curve,
    LruByteCurve,
    LruCurve,
    TokenCycle,
    equal_quota_hits,
    fitted_quotas,
    hits_at,
    lru_distances,
    lru_distances_state,
    static_hits,
)
from replayer.recency import lru, lru_state
from replayer.trace import Trace, Walk, steps_without_warmup, walk
from schemas.columns import ACCESS_ORDERS, DEDUPS, SCOPES
from tests import curve_oracles, oracles
from tests.builders import make_trace
from tests.strategies import routing_traces, single_row_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"public router dumps are not at {TRACES}")
HALF_A_DIGIT = 5.01e-5  # the values are printed with four decimals


def whole_walk(trace: Trace, *, order: str = "router", dedup: str = "union") -> Walk:
    return walk(trace, 0, len(steps_without_warmup(trace)), order=order, dedup=dedup)


def events_of(steps: Walk, scope: str) -> Events:
    served_by = steps.layer if scope == "layer" else np.zeros_like(steps.layer)
    return Events(steps.objects, steps.first_access, served_by, steps.step)


def caches_of(trace: Trace, scope: str, *, sizes=None, admits=None, capacities=0) -> Caches:
    first_object = trace.layer_first_object if scope == "layer" else np.array([0, trace.num_objects])
    num_caches = len(first_object) - 1
    held = np.broadcast_to(np.asarray(capacities, dtype=np.int64), (num_caches,)).copy()
    return Caches(None if sizes is None else np.asarray(sizes, dtype=np.int64), held, first_object, admits)


def cut(events: Events, bounds: list[int]) -> list[tuple[Events, slice]]:
    """The events between neighbouring bounds as chunks, each with the accesses it covers."""
    chunks = []
    for begin, end in pairwise(sorted({0, *bounds, len(events.cache)})):
        first, last = events.first_access[begin], events.first_access[end]
        chunk = Events(
            events.objects[first:last],
            events.first_access[begin : end + 1] - first,
            events.cache[begin:end],
            events.step[begin:end],
        )
        chunks.append((chunk, slice(first, last)))
    return chunks


def distances(events: Events, caches: Caches, atomic: bool, bounds: list[int] | None = None) -> np.ndarray:
    found = np.full(len(events.objects), -99, dtype=np.int32 if caches.sizes is None else np.int64)
    state = lru_distances_state(caches)
    for chunk, accesses in cut(events, bounds or []):
        lru_distances(state, chunk, caches, atomic, found[accesses])
    return found


def curve_of(events: Events, caches: Caches, atomic: bool, scored=None, **known) -> Curve:
    one = LruCurve(caches, atomic, **known)
    one.add(events, np.ones(len(events.cache), dtype=bool) if scored is None else scored)
    return one.curve()


def kernel_hits(events: Events, caches: Caches, atomic: bool) -> np.ndarray:
    """(A,) whether the LRU kernel hits."""
    was_hit = np.zeros(len(events.objects), dtype=np.uint8)
    lru(lru_state(caches), events, caches, atomic, was_hit)
    return was_hit.astype(bool)


def listed(events: Events) -> list[list[int]]:
    return [events.objects[begin:end].tolist() for begin, end in pairwise(events.first_access.tolist())]


def by_cache(oracle, events: Events, **known) -> list:
    """An oracle's answers per access, each cache asked about its own events."""
    answers = {
        which: iter(oracle([e for e, its in zip(listed(events), events.cache, strict=True) if its == which], **known))
        for which in set(events.cache.tolist())
    }
    return [
        next(answers[which]) for event, which in zip(listed(events), events.cache.tolist(), strict=True) for _ in event
    ]


def as_words(found: np.ndarray) -> list:
    return [{FIRST_ACCESS: "first", NEVER_HITS: "never"}.get(value, value) for value in found.tolist()]


bounds = st.lists(st.integers(0, 24), max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    trace=routing_traces(),
    order=st.sampled_from(ACCESS_ORDERS),
    dedup=st.sampled_from(DEDUPS),
    bounds=bounds,
    data=st.data(),
)
def test_distances_are_places_in_the_stack_wherever_the_walk_is_cut(trace, order, dedup, bounds, data):
    steps = whole_walk(trace, order=order, dedup=dedup)
    admitted = data.draw(st.none() | st.sets(st.integers(0, trace.num_objects - 1)))
    admits = None if admitted is None else np.isin(np.arange(trace.num_objects), list(admitted))
    for scope, atomic in product(SCOPES, (True, False)):
        events = events_of(steps, scope)
        found = distances(
            events, caches_of(trace, scope, admits=admits), atomic, [min(b, len(events.cache)) for b in bounds]
        )
        wanted = by_cache(curve_oracles.stack_distances, events, atomic=atomic, admitted=admitted)
        assert as_words(found) == wanted, (scope, atomic)


@settings(max_examples=80, deadline=None)
@given(trace=routing_traces(), dedup=st.sampled_from(DEDUPS), bounds=bounds, data=st.data())
def test_distances_in_bytes_add_up_the_stack_down_to_the_expert(trace, dedup, bounds, data):
    steps = whole_walk(trace, dedup=dedup)
    size = data.draw(st.lists(st.integers(1, 2**40), min_size=trace.num_objects, max_size=trace.num_objects))
    for scope, atomic in product(SCOPES, (True, False)):
        events = events_of(steps, scope)
        caches = caches_of(trace, scope, sizes=size)
        found = distances(events, caches, atomic, [min(b, len(events.cache)) for b in bounds])
        assert as_words(found) == by_cache(curve_oracles.byte_distances, events, atomic=atomic, size=size)


def one_cache(objects: np.ndarray) -> tuple[Events, np.ndarray]:
    """Accesses as events of four (the rest left out), in one cache, and its first objects."""
    num_events = len(objects) // 4
    zeros = np.zeros(num_events, dtype=np.int32)
    events = Events(objects[: 4 * num_events], 4 * np.arange(num_events + 1), zeros, zeros.astype(np.int64))
    return events, np.array([0, int(objects.max()) + 1])


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(("num_objects", "skew"), [(1, 0), (64, 0), (511, 0.5), (513, 1), (1200, 0)])
def test_distances_stay_exact_when_slots_of_time_run_out(num_objects, skew, atomic):
    # 64 slots are a word, 2,048 a group and all that a cache of up to 512 experts has; 1,200 experts have 3 groups.
    generator = np.random.default_rng(num_objects)
    popularity = np.arange(1, num_objects + 1) ** -float(skew)
    objects = generator.choice(num_objects, size=13_000, p=popularity / popularity.sum()).astype(np.int32)
    objects[-1] = num_objects - 1
    events, first_object = one_cache(objects)
    size = generator.integers(1, 10**7, num_objects)
    nothing = np.zeros(1, dtype=np.int64)
    found = distances(events, Caches(None, nothing, first_object), atomic)
    assert as_words(found) == curve_oracles.stack_distances(listed(events), atomic=atomic)
    found = distances(events, Caches(size, nothing, first_object), atomic)
    assert as_words(found) == curve_oracles.byte_distances(listed(events), atomic=atomic, size=size.tolist())


@pytest.mark.parametrize("atomic", [True, False])
def test_a_curve_of_many_groups_equals_the_kernel(atomic):
    # 40,000 experts have 160,000 slots: 79 groups, three blocks of ranks.
    generator = np.random.default_rng(1)
    objects = (40_000 * generator.random(400_000) ** 2).astype(np.int32)
    objects[-1] = 39_999
    events, first_object = one_cache(objects)
    curve = curve_of(events, Caches(None, np.zeros(1, dtype=np.int64), first_object), atomic)
    for capacity in (1, 3, 1000, 9999, 20_000, 40_000):
        caches = Caches(None, np.array([capacity]), first_object)
        assert curve.hits[0][capacity] == kernel_hits(events, caches, atomic).sum()
    assert curve.compulsory_misses[0] == len(np.unique(objects))


@settings(max_examples=60, deadline=None)
@given(
    trace=routing_traces(known_sizes=True),
    dedup=st.sampled_from(DEDUPS),
    order=st.sampled_from(ACCESS_ORDERS),
    data=st.data(),
)
def test_a_curve_counts_what_the_kernel_decides_at_every_capacity(trace, dedup, order, data):
    steps = whole_walk(trace, order=order, dedup=dedup)
    num_events = len(steps.layer)
    scored = np.array(data.draw(st.lists(st.booleans(), min_size=num_events, max_size=num_events)))
    sizes = np.array(data.draw(st.lists(st.integers(1, 9), min_size=trace.num_objects, max_size=trace.num_objects)))
    admits = data.draw(st.none() | st.just(np.arange(trace.num_objects) % 3 > 0))
    access_scored = np.repeat(scored, np.diff(steps.first_access))
    first = np.zeros(len(steps.objects), dtype=bool)
    first[np.unique(steps.objects, return_index=True)[1]] = True
    for scope, atomic in product(SCOPES, (True, False)):
        events, caches = events_of(steps, scope), caches_of(trace, scope, admits=admits)
        curve = curve_of(events, caches, atomic, scored, expert_bytes=sizes)
        of_cache = np.repeat(events.cache, np.diff(events.first_access))
        for which in range(len(caches.capacities)):
            mine = (of_cache == which) & access_scored
            assert curve.accesses[which] == mine.sum()
            assert curve.compulsory_misses[which] == (mine & first).sum()
            for capacity in range(len(curve.hits[which])):
                at = caches_of(trace, scope, admits=admits, capacities=capacity)
                hit = mine & kernel_hits(events, at, atomic)
                assert curve.hits[which][capacity] == hit.sum()
                assert curve.hit_bytes[which][capacity] == sizes[events.objects[hit]].sum()


@settings(max_examples=80, deadline=None)
@given(
    trace=routing_traces(),
    dedup=st.sampled_from(DEDUPS),
    scope=st.sampled_from(SCOPES),
    atomic=st.booleans(),
    data=st.data(),
)
def test_a_byte_curve_counts_what_the_kernel_decides_from_the_largest_expert_on(trace, dedup, scope, atomic, data):
    events = events_of(whole_walk(trace, dedup=dedup), scope)
    sizes = np.array(data.draw(st.lists(st.integers(3, 9), min_size=trace.num_objects, max_size=trace.num_objects)))
    num_caches = len(caches_of(trace, scope).capacities)
    admits = data.draw(st.none() | st.just(np.arange(trace.num_objects) % 3 > 0))
    capacity = st.integers(9, 9 + int(sizes.sum())) | st.integers(0, 2)
    quotas = st.lists(capacity, min_size=num_caches, max_size=num_caches)
    asked = np.array(data.draw(st.lists(quotas, min_size=1, max_size=6)))
    one = LruByteCurve(caches_of(trace, scope, sizes=sizes, admits=admits), atomic, asked)
    for chunk, _ in cut(events, [len(events.cache) // 2]):
        one.add(chunk, np.ones(len(chunk.cache), dtype=bool))
    curve: ByteCurve = one.curve()
    of_cache = np.repeat(events.cache, np.diff(events.first_access))
    for row, quota in enumerate(asked):
        hit = kernel_hits(events, caches_of(trace, scope, sizes=sizes, admits=admits, capacities=quota), atomic)
        for which in range(num_caches):
            assert curve.hits[row, which] == (hit & (of_cache == which)).sum()
            assert curve.hit_bytes[row, which] == sizes[events.objects[hit & (of_cache == which)]].sum()
    assert curve.accesses.sum() == len(events.objects)
    assert curve.compulsory_misses.sum() == len(np.unique(events.objects))


@settings(max_examples=40, deadline=None)
@given(trace=routing_traces(), scope=st.sampled_from(SCOPES), atomic=st.booleans(), size=st.integers(1, 5))
def test_equal_experts_in_bytes_are_experts_counted_by_the_quotient(trace, scope, atomic, size):
    events, sizes = events_of(whole_walk(trace), scope), np.full(trace.num_objects, size)
    curve = curve_of(events, caches_of(trace, scope), atomic)
    in_bytes = np.arange(size * (trace.num_objects + 1) + 1)
    asked = np.repeat(in_bytes[:, None], len(curve.hits), axis=1)
    one = LruByteCurve(caches_of(trace, scope, sizes=sizes), atomic, asked)
    one.add(events, np.ones(len(events.cache), dtype=bool))
    for capacity, hits in zip(in_bytes.tolist(), one.curve().hits, strict=True):
        assert hits.tolist() == hits_at(curve.hits, [capacity // size] * len(curve.hits)).tolist()


def test_a_capacity_between_the_smallest_and_the_largest_expert_is_refused():
    caches = Caches(np.array([2, 5]), np.array([0]), np.array([0, 2]))
    with pytest.raises(CapacityBelowLargestExpert, match=r"4 bytes in cache 0, whose largest expert has 5: "):
        LruByteCurve(caches, True, np.array([[9], [4]]))
    for held in (0, 1, 5, 6):
        LruByteCurve(caches, True, np.array([[held]]))
    only_small = caches._replace(admits=np.array([True, False]))
    LruByteCurve(only_small, True, np.array([[4]]))


def test_the_distance_of_a_after_a_b_c_is_2():
    events, first_object = one_cache(np.array([0, 1, 2, 0], dtype=np.int32))
    found = distances(events, Caches(None, np.array([0]), first_object), False)
    assert as_words(found) == ["first", "first", "first", 2]


def test_a_repeat_within_the_first_event_of_an_expert_is_a_miss_but_not_compulsory():
    trace = make_trace([[[[0], [0]]], [[[0], [0]]]], num_experts=2)
    events = events_of(whole_walk(trace, dedup="none"), "layer")
    assert as_words(distances(events, caches_of(trace, "layer"), True)) == ["first", "never", 0, 0]
    curve = curve_of(events, caches_of(trace, "layer"), True)
    assert (curve.accesses.tolist(), curve.compulsory_misses.tolist(), curve.hits[0].tolist()) == ([4], [1], [0, 2, 2])


@settings(max_examples=60, deadline=None)
@given(trace=routing_traces(), scope=st.sampled_from(SCOPES), atomic=st.booleans())
def test_hits_grow_with_capacity_up_to_all_but_compulsory_misses(trace, scope, atomic):
    curve = curve_of(events_of(whole_walk(trace), scope), caches_of(trace, scope), atomic)
    for hits, accesses, compulsory in zip(curve.hits, curve.accesses, curve.compulsory_misses, strict=True):
        assert hits[0] == 0
        assert np.all(np.diff(hits) >= 0)
        assert hits[-1] == accesses - compulsory


@settings(max_examples=60, deadline=None)
@given(trace=single_row_traces())
def test_event_atomic_hits_at_top_k_experts_are_the_lag_1_reuse(trace):
    steps = whole_walk(trace)
    curve = curve_of(events_of(steps, "layer"), caches_of(trace, "layer"), True)
    events = steps.objects.reshape(-1, len(trace.metadata.moe_layer_ids), trace.top_k).tolist()
    wanted = [oracles.lag1_reuse(layer) for layer in zip(*events, strict=True)]
    assert [int(hits[trace.top_k]) for hits in curve.hits] == wanted


@settings(max_examples=60, deadline=None)
@given(trace=single_row_traces(), atomic=st.booleans())
def test_a_global_cache_of_one_token_cycle_never_hits(trace, atomic):
    steps = whole_walk(trace)
    curve = curve_of(events_of(steps, "global"), caches_of(trace, "global"), atomic)
    layers = len(trace.metadata.moe_layer_ids)
    assert curve.hits[0][(layers - 1) * trace.top_k] == 0
    cycle = TokenCycle(trace.num_objects, layers)
    cycle.add(events_of(steps, "layer"))
    is_repeated = steps.num_events > layers
    floor = (layers - 1) * trace.top_k
    assert (cycle.least, cycle.most) == ((floor, floor) if is_repeated else (None, None))


@settings(max_examples=60, deadline=None)
@given(trace=single_row_traces())
def test_global_sequential_hits_of_one_token_are_those_of_top_k_per_layer(trace):
    steps = whole_walk(trace)
    at_once = curve_of(events_of(steps, "global"), caches_of(trace, "global"), False)
    layered = curve_of(events_of(steps, "layer"), caches_of(trace, "layer"), False)
    layers = len(trace.metadata.moe_layer_ids)
    assert at_once.hits[0][layers * trace.top_k] == equal_quota_hits(layered.hits)[trace.top_k]


@settings(max_examples=100, deadline=None)
@given(trace=routing_traces(), dedup=st.sampled_from(DEDUPS), bounds=bounds)
def test_the_token_cycle_is_what_other_layers_access_between_two_visits(trace, dedup, bounds):
    steps = whole_walk(trace, dedup=dedup)
    layered, together = events_of(steps, "layer"), events_of(steps, "global")
    others = curve_oracles.others_between_visits(listed(layered), layered.cache.tolist())
    known = [count for count in others if count is not None]
    cycle = TokenCycle(trace.num_objects, len(trace.metadata.moe_layer_ids))
    for chunk, _ in cut(layered, [min(b, len(layered.cache)) for b in bounds]):
        cycle.add(chunk)
    assert (cycle.least, cycle.most) == ((min(known), max(known)) if known else (None, None))
    for atomic in (True, False) if dedup == "union" else (True,):
        found = distances(together, caches_of(trace, "global"), atomic)
        for event, count in enumerate(others):
            of_event = found[together.first_access[event] : together.first_access[event + 1]]
            assert count is None or not np.any((of_event >= 0) & (of_event < count)), "no hit at or below its cycle"


def test_a_token_cycle_runs_through_slots_of_time_that_run_out():
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(16), (2000, 3, 1)), axis=2)[:, :, :4]
    trace = make_trace(ids, num_experts=16)
    cycle = TokenCycle(trace.num_objects, 3)
    cycle.add(events_of(whole_walk(trace), "layer"))
    assert (cycle.least, cycle.most) == (8, 8)


@settings(max_examples=60, deadline=None)
@given(trace=routing_traces(), scope=st.sampled_from(SCOPES), data=st.data())
def test_a_static_table_of_every_size_hits_what_its_members_are_accessed(trace, scope, data):
    objects = whole_walk(trace).objects
    fitted_on = objects[: data.draw(st.integers(0, len(objects)))]
    first_object = caches_of(trace, scope).first_object
    counts = [np.bincount(accesses, minlength=trace.num_objects) for accesses in (fitted_on, objects)]
    for (begin, end), hits in zip(pairwise(first_object.tolist()), static_hits(*counts, first_object), strict=True):
        mine = [thing for thing in objects.tolist() if begin <= thing < end]
        wanted = [
            curve_oracles.table_hits(mine, fitted_on.tolist(), range(begin, end), size)
            for size in range(end - begin + 1)
        ]
        assert hits.tolist() == wanted


def curves(max_caches: int, max_experts: int) -> st.SearchStrategy[list[list[int]]]:
    """Hits by capacity of some caches, never falling, of any shape."""
    gains = st.lists(st.integers(0, 4), min_size=1, max_size=max_experts)
    one = gains.map(lambda each: np.cumsum([0, *each]).tolist())
    return st.lists(one, min_size=1, max_size=max_caches)


@settings(max_examples=300, deadline=None)
@given(curves=curves(max_caches=4, max_experts=5), total=st.integers(0, 21))
@example(curves=[[0, 0, 9], [0, 4, 5]], total=2)
@example(curves=[[0, 1], [0, 1]], total=1)
@example(curves=[[0, 0], [0, 0, 0]], total=2)
def test_fitted_quotas_are_the_best_of_all_splits(curves, total):
    found = fitted_quotas([np.array(hits) for hits in curves], total)
    assert tuple(found.tolist()) == curve_oracles.best_split(curves, total)


def test_a_split_of_less_than_nothing_is_refused():
    with pytest.raises(ValueError, match="-1 experts to split"):
        fitted_quotas([np.array([0, 1])], -1)


@settings(max_examples=40, deadline=None)
@given(trace=routing_traces(), atomic=st.booleans(), data=st.data())
def test_fitted_quotas_hit_at_least_what_equal_quotas_hit(trace, atomic, data):
    curve = curve_of(events_of(whole_walk(trace), "layer"), caches_of(trace, "layer"), atomic)
    equal = data.draw(st.integers(0, max(trace.metadata.experts_per_layer)))
    quotas = fitted_quotas(curve.hits, equal * len(curve.hits))
    assert hits_at(curve.hits, quotas).sum() >= equal_quota_hits(curve.hits)[equal]
    assert equal_quota_hits(curve.hits)[equal] == hits_at(curve.hits, [equal] * len(curve.hits)).sum()


@cache
def code_trace() -> Trace:
    with np.load(TRACES / "qwen3-30b-code.npz") as dump:
        return make_trace(np.ascontiguousarray(dump["experts"].transpose(1, 0, 2)), num_experts=128)


@needs_traces
@pytest.mark.parametrize(
    ("atomic", "misses_per_token"),
    [
        (False, [5.2431, 2.7527, 1.8004, 0.9749, 0.2849, 0.0850]),
        (True, [4.2570, 2.5775, 1.7248, 0.9483, 0.2823, 0.0846]),
    ],
)
def test_layer_24_of_a_public_trace_misses_as_others_computed(atomic, misses_per_token):
    # Recomputed independently from Shriniwas410/cacheable-by-design @03366ef1, `code`; sequential with libCacheSim too.
    trace = code_trace()
    curve = curve_of(events_of(whole_walk(trace), "layer"), caches_of(trace, "layer"), atomic)
    misses = curve.accesses[24] - curve.hits[24][[8, 17, 25, 38, 64, 89]]
    assert (misses / 8000).tolist() == pytest.approx(misses_per_token, abs=HALF_A_DIGIT)


@needs_traces
def test_all_layers_of_a_public_trace_hit_as_others_computed():
    # The same source, hit rates over all 48 layers.
    trace = code_trace()
    steps, accesses = whole_walk(trace), 8000 * 48 * 8
    layered = equal_quota_hits(curve_of(events_of(steps, "layer"), caches_of(trace, "layer"), True).hits)
    wanted = [0.4741, 0.6741, 0.7840, 0.8815, 0.9335, 0.9629, 0.9896]
    assert (layered[[8, 17, 25, 38, 51, 64, 89]] / accesses).tolist() == pytest.approx(wanted, abs=HALF_A_DIGIT)
    together = curve_of(events_of(steps, "global"), caches_of(trace, "global"), False).hits[0]
    wanted = [0.3487, 0.6506, 0.8873, 0.9705]
    assert (together[[384, 816, 1824, 3072]] / accesses).tolist() == pytest.approx(wanted, abs=HALF_A_DIGIT)
    # One token cycle: 47 other layers of 8 experts.
    cycle = TokenCycle(trace.num_objects, 48)
    cycle.add(events_of(steps, "layer"))
    assert (cycle.least, cycle.most) == (376, 376)
    assert (together[376], together[377] > 0) == (0, True)
