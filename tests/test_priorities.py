"""Policies with a smallest key, against oracles and hand-worked cases, whole and cut into chunks."""

from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer import priorities
from replayer.caches import Caches, Events
from tests import priority_oracles

COUNTING = ("lfu_gated", "lfu_always", "lfu_in_cache", "lfru", "least_stale")
BELADY = ("belady_bypass", "belady_forced")
POLICIES = COUNTING + BELADY
TIME_TYPES = (np.uint32, np.uint64)


class Workload(NamedTuple):
    """A walk over some caches. events: (cache, objects) each; cuts: the events before which a chunk ends."""

    caches: Caches
    events: list[tuple[int, list[int]]]
    cuts: list[int]

    def chunks(self) -> list[list[tuple[int, list[int]]]]:
        bounds = [0, *self.cuts, len(self.events)]
        return [self.events[begin:end] for begin, end in pairwise(bounds)]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """1–3 caches of 1–6 objects, up to 24 events of up to 5 accesses with repeats; sizes and admission now and then."""
    objects_of_cache = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    first_object = np.concatenate([[0], np.cumsum(objects_of_cache)]).astype(np.int64)
    num_objects = int(first_object[-1])

    def members(cache: int) -> st.SearchStrategy[tuple[int, list[int]]]:
        one = st.integers(int(first_object[cache]), int(first_object[cache + 1]) - 1)
        return st.tuples(st.just(cache), st.lists(one, max_size=5))

    events = draw(st.lists(st.integers(0, len(objects_of_cache) - 1).flatmap(members), min_size=1, max_size=24))
    sizes = draw(st.none() | st.lists(st.integers(1, 4), min_size=num_objects, max_size=num_objects))
    admits = draw(st.none() | st.lists(st.booleans(), min_size=num_objects, max_size=num_objects))
    largest = 4 if sizes is None else 12
    capacities = draw(st.lists(st.integers(0, largest), min_size=len(objects_of_cache), max_size=len(objects_of_cache)))
    caches = Caches(
        sizes=None if sizes is None else np.array(sizes, dtype=np.int64),
        capacities=np.array(capacities, dtype=np.int64),
        first_object=first_object,
        admits=None if admits is None else np.array(admits),
    )
    return Workload(caches, events, sorted(draw(st.lists(st.integers(0, len(events)), max_size=3))))


def as_arrays(events: list[tuple[int, list[int]]]) -> Events:
    return Events(
        objects=np.array([thing for _, event in events for thing in event], dtype=np.int32),
        first_access=np.cumsum([0, *(len(event) for _, event in events)]).astype(np.int64),
        cache=np.array([cache for cache, _ in events], dtype=np.int32),
        step=np.arange(len(events), dtype=np.int64),
    )


def with_next_times(chunks: list[Events], num_objects: int, atomic: bool, time_type: Any) -> list[Events]:
    """The chunks with their next accesses, found from the last chunk to the first."""
    upcoming = np.full(num_objects, np.iinfo(time_type).max, dtype=time_type)
    base = sum(len(chunk.cache) if atomic else len(chunk.objects) for chunk in chunks)
    found = []
    for chunk in reversed(chunks):
        base -= len(chunk.cache) if atomic else len(chunk.objects)
        result = np.zeros(len(chunk.objects), dtype=time_type)
        priorities.next_times(chunk.objects, chunk.first_access, upcoming, base, atomic, result)
        found.append(chunk._replace(next_time=result))
    return found[::-1]


def kernel_decisions(policy: str, chunks: list[Events], caches: Caches, atomic: bool, time_type: Any = np.uint32):
    if policy in BELADY:
        chunks = with_next_times(chunks, caches.num_objects, atomic, time_type)
    state = getattr(priorities, f"{policy}_state")(caches, 0)
    decisions: list[bool] = []
    for chunk in chunks:
        was_hit = np.full(len(chunk.objects), 7, dtype=np.uint8)
        getattr(priorities, policy)(state, chunk, caches, atomic, was_hit)
        assert set(was_hit.tolist()) <= {0, 1}
        decisions += (was_hit == 1).tolist()
    return decisions


def oracle_decisions(policy: str, events: list[tuple[int, list[int]]], caches: Caches, atomic: bool) -> list[bool]:
    sizes = [1] * caches.num_objects if caches.sizes is None else caches.sizes.tolist()
    admits = range(caches.num_objects) if caches.admits is None else np.flatnonzero(caches.admits).tolist()
    decisions = [
        iter(
            priority_oracles.decide(
                policy,
                [event for its_cache, event in events if its_cache == cache],
                atomic=atomic,
                size=sizes,
                capacity=int(capacity),
                admits=set(admits),
            )
        )
        for cache, capacity in enumerate(caches.capacities)
    ]
    return [next(decisions[cache]) for cache, event in events for _ in event]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=48, deadline=None)
@given(workload=workloads(), time_type=st.sampled_from(TIME_TYPES))
def test_kernel_decides_every_access_as_the_oracle_does_however_the_walk_is_cut(policy, workload, time_type):
    caches, events, _ = workload
    for atomic in (False, True):
        expected = oracle_decisions(policy, events, caches, atomic)
        assert kernel_decisions(policy, [as_arrays(events)], caches, atomic, time_type) == expected, atomic
        chunks = [as_arrays(chunk) for chunk in workload.chunks()]
        assert kernel_decisions(policy, chunks, caches, atomic, time_type) == expected, (atomic, "in chunks")


@cache
def skewed_walk(seed: int, *, num_caches: int, objects_of_cache: int, num_events: int, members: int) -> Workload:
    """Events of distinct objects of skewed and drifting popularity; long enough for counts and ages to grow."""
    rng = np.random.default_rng(seed)
    popularity = rng.permuted(np.tile(np.arange(1, objects_of_cache + 1) ** -0.8, (num_caches, 1)), axis=1)
    events = []
    for number in range(num_events):
        cache = number % num_caches
        if rng.random() < 0.1:
            popularity[cache] = np.roll(popularity[cache], 1)
        share = popularity[cache] / popularity[cache].sum()
        chosen = rng.choice(objects_of_cache, size=members, replace=False, p=share)
        events.append((cache, (chosen + cache * objects_of_cache).tolist()))
    caches = Caches(None, np.zeros(num_caches, dtype=np.int64), np.arange(num_caches + 1) * objects_of_cache)
    return Workload(caches, events, sorted(rng.integers(0, num_events, size=4).tolist()))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_caches", "objects_of_cache"), [(1, 150), (3, 40)])
@pytest.mark.parametrize("in_bytes", [False, True])
def test_kernel_agrees_with_the_oracle_on_longer_walks(policy, num_caches, objects_of_cache, in_bytes):
    workload = skewed_walk(7, num_caches=num_caches, objects_of_cache=objects_of_cache, num_events=240, members=6)
    num_objects = workload.caches.num_objects
    sizes = np.random.default_rng(1).integers(1, 6, size=num_objects) if in_bytes else None
    chunks = [as_arrays(chunk) for chunk in workload.chunks()]
    for share, atomic in product((0.1, 0.3, 0.6), (False, True)):
        held = int(share * objects_of_cache * (3 if in_bytes else 1))
        caches = workload.caches._replace(sizes=sizes, capacities=np.full(num_caches, held))
        expected = oracle_decisions(policy, workload.events, caches, atomic)
        assert kernel_decisions(policy, chunks, caches, atomic) == expected, (share, atomic)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("atomic", [False, True])
def test_a_walk_in_chunks_is_decided_as_the_whole_walk(policy, atomic):
    workload = skewed_walk(3, num_caches=2, objects_of_cache=300, num_events=4_000, members=8)
    caches = workload.caches._replace(capacities=np.array([40, 120]))
    whole = kernel_decisions(policy, [as_arrays(workload.events)], caches, atomic)
    for length in (1, 333, 4_000):
        parts = [as_arrays(workload.events[begin : begin + length]) for begin in range(0, 4_000, length)]
        assert kernel_decisions(policy, parts, caches, atomic) == whole, length


@settings(max_examples=60, deadline=None)
@given(workload=workloads(), time_type=st.sampled_from(TIME_TYPES))
def test_next_times_are_those_found_by_looking_ahead(workload, time_type):
    chunks = [as_arrays(chunk) for chunk in workload.chunks()]
    never = np.iinfo(time_type).max
    for atomic in (False, True):
        found = with_next_times(chunks, workload.caches.num_objects, atomic, time_type)
        times = [None if time == never else time for chunk in found for time in chunk.next_time.tolist()]
        expected = priority_oracles.next_times([event for _, event in workload.events], atomic=atomic)
        assert times == [None if time == priority_oracles.INFINITY else time for time in expected]


@pytest.mark.parametrize(("time_type", "base"), [(np.uint32, 2**32 - 2), (np.uint64, 2**42 - 1)])
def test_next_times_refuses_times_that_its_type_or_a_state_cannot_hold(time_type, base):
    never = np.iinfo(time_type).max
    objects, first_access = np.zeros(2, dtype=np.int32), np.array([0, 1, 2])
    upcoming, result = np.full(1, never, dtype=time_type), np.zeros(2, dtype=time_type)
    with pytest.raises(OverflowError, match="beyond what their type holds"):
        priorities.next_times(objects, first_access, upcoming, base, False, result)
    priorities.next_times(objects, first_access, upcoming, base - 1, False, result)
    assert result.tolist() == [base, never]


def decisions_of(policy: str, events: list[list[int]], *, capacity: int, atomic: bool, sizes=None, admits=None) -> str:
    """Decisions of one cache of objects 0–3 as text: H or m for each access."""
    caches = Caches(
        None if sizes is None else np.array(sizes), np.array([capacity]), np.array([0, 4]),
        None if admits is None else np.array(admits),
    )  # fmt: skip
    hits = kernel_decisions(policy, [as_arrays([(0, event) for event in events])], caches, atomic)
    return "".join("H" if hit else "m" for hit in hits)


# Worked by hand.


def test_in_cache_counts_are_forgotten_on_eviction():
    # 0 was used three times, but 1 and 2 (twice each) find it gone: it comes back with count 1 and leaves for 3.
    events = [[0], [0], [1], [1], [1], [2], [2], [0], [3], [0]]
    assert decisions_of("lfu_in_cache", events, capacity=2, atomic=False) == "mHmHHmHmmm"
    assert decisions_of("lfu_always", events, capacity=2, atomic=False) == "mHmHHmHmmH"


def test_in_cache_ties_leave_the_least_recent():
    # 0 and 1 both count 2, 0 was used longer ago.
    assert decisions_of("lfu_in_cache", [[1], [0], [0], [1], [2], [1]], capacity=2, atomic=False) == "mmHHmH"
    assert decisions_of("lfu_in_cache", [[1], [0], [0], [1], [2], [0]], capacity=2, atomic=False) == "mmHHmm"


def test_lfru_evicts_by_frequency_over_age():
    # When 2 comes, 0 was used 3 times and last 4 events ago (3 ÷ 5), 1 once and in the event before (1 ÷ 2).
    events = [[0], [0], [0], [3], [3], [1], [2], [0]]
    assert decisions_of("lfru", events, capacity=3, atomic=False) == "mHHmHmmH"
    # Two events more and 1 ÷ 4 ... 3 ÷ 7: the scores keep their order, so 1 leaves; with 0 used twice it would not.
    assert decisions_of("lfru", [[0], [1], [0], [1], [1], [3], [3], [3], [2], [0]], capacity=3, atomic=False)[-1] == "m"


def test_lfru_scores_change_order_as_time_goes_by():
    # Before event 3: 0 scores 2 ÷ 3, 1 scores 1 ÷ 2 and leaves. Before event 6: 0 scores 2 ÷ 6, 3 scores 1 ÷ 2.
    assert decisions_of("lfru", [[0], [0], [1], [2], [0]], capacity=2, atomic=False) == "mHmmH"
    assert decisions_of("lfru", [[0], [0], [1], [1], [1], [1], [2], [0]], capacity=2, atomic=False) == "mHmHHHmm"


def test_equal_lfru_scores_leave_the_least_recent_then_the_lowest():
    # When 2 comes in event 4, 0 scores 2 ÷ 4 (last used in event 1) and 1 scores 1 ÷ 2 (event 3): 0 is less recent.
    events = [[0], [0], [3], [1], [2]]
    only_served = [True, True, True, False]
    assert decisions_of("lfru", [*events, [0]], capacity=2, atomic=False, admits=only_served) == "mHmmmm"
    assert decisions_of("lfru", [*events, [1]], capacity=2, atomic=False, admits=only_served) == "mHmmmH"
    # 1 and 0 of one event are equal in everything: 0 leaves, although it was named last.
    assert decisions_of("lfru", [[1, 0], [2], [0]], capacity=2, atomic=False) == "mmmm"
    assert decisions_of("lfru", [[1, 0], [2], [1]], capacity=2, atomic=False) == "mmmH"


def test_least_stale_counts_events_back_and_leaves_the_lowest_first():
    # 1 and 0 are of the same event: 0 leaves although an access is later than 1's; LRU would evict 1.
    assert decisions_of("least_stale", [[1, 0], [2], [1]], capacity=2, atomic=False) == "mmmH"
    assert decisions_of("least_stale", [[1], [0], [2], [0]], capacity=2, atomic=False) == "mmmH"


def test_sequential_events_of_least_stale_may_evict_their_own_members():
    assert decisions_of("least_stale", [[0, 1, 2, 1], [0]], capacity=2, atomic=False) == "mmmHm"
    assert decisions_of("least_stale", [[0, 1, 2, 1], [0]], capacity=2, atomic=True) == "mmmmH"


def test_what_is_not_admitted_changes_no_state():
    # 2 may not enter: neither its accesses nor their counts move anything, in either semantics.
    admits = [True, True, False, True]
    for policy, atomic in product(POLICIES, (False, True)):
        served = decisions_of(policy, [[0], [2], [2], [0], [2]], capacity=1, atomic=atomic, admits=admits)
        assert served == "mmmHm", (policy, atomic)


def test_nothing_is_evicted_for_what_cannot_be_given_room():
    # Sizes 1, 2, 3, 4. When 3 comes beside 2, a member, only 0 could go, and that is too little: 0 stays.
    for policy in COUNTING:
        events = [[0], [2], [2, 3], [0, 2]]
        assert decisions_of(policy, events, capacity=4, atomic=True, sizes=[1, 2, 3, 4]) == "mmHmHH", policy


def most_hits(accesses: list[int], capacity: int, *, must_admit: bool) -> int:
    """The most hits any demand policy can have, by trying every victim (and, unless it must admit, bypassing)."""
    reached = {frozenset(): 0}
    for thing in accesses:
        then: dict[frozenset[int], int] = {}
        for resident, hits in reached.items():
            choices = [resident]
            if thing not in resident and capacity:
                enters = [resident | {thing}] if len(resident) < capacity else []
                enters = enters or [resident - {victim} | {thing} for victim in resident]
                choices = enters if must_admit else [resident, *enters]
            for choice in choices:
                then[choice] = max(then.get(choice, 0), hits + (thing in resident))
        reached = then
    return max(reached.values())


@settings(max_examples=60, deadline=None)
@given(accesses=st.lists(st.integers(0, 3), min_size=1, max_size=14), capacity=st.integers(0, 4), forced=st.booleans())
def test_sequential_belady_has_as_many_hits_as_trying_every_victim(accesses, capacity, forced):
    policy = "belady_forced" if forced else "belady_bypass"
    decisions = decisions_of(policy, [[thing] for thing in accesses], capacity=capacity, atomic=False)
    assert decisions.count("H") == most_hits(accesses, capacity, must_admit=forced)


@pytest.mark.parametrize("policy", ["lfu_gated", "lfu_always", "lfu_in_cache"])
def test_lfu_refuses_to_count_beyond_its_keys(policy):
    caches = Caches(None, np.array([1]), np.array([0, 4]))
    chunk = as_arrays([(0, [0, 1, 2, 3])])
    was_hit = np.zeros(4, dtype=np.uint8)
    state = getattr(priorities, f"{policy}_state")(caches, 0)
    state.clock[0] = 2**36 - 4
    with pytest.raises(OverflowError, match="68,719,476,735 accesses"):
        getattr(priorities, policy)(state, chunk, caches, False, was_hit)
    state.clock[0] = 0
    state.keys[2] = (2**27 - 4) << 36
    with pytest.raises(OverflowError, match="134,217,727 of them to one expert"):
        getattr(priorities, policy)(state, chunk, caches, False, was_hit)


def test_lfru_refuses_counts_and_ages_whose_product_overflows():
    caches = Caches(None, np.array([1]), np.array([0, 4]))
    state = priorities.lfru_state(caches, 0)
    state.counts[1], state.events[0] = 2**31, 2**31
    with pytest.raises(OverflowError, match="below 2\\^62"):
        priorities.lfru(state, as_arrays([(0, [0])]), caches, False, np.zeros(1, dtype=np.uint8))
