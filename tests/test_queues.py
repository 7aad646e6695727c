"""FIFO, CLOCK, SIEVE, S3-FIFO, ARC and random: kernels against oracles, decision by decision, and what holds of all."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer import queues
from replayer.caches import Caches, Events
from replayer.trace import Trace, steps_without_warmup, walk
from schemas.columns import ACCESS_ORDERS, DEDUPS, SCOPES
from tests import queue_oracles
from tests.oracles import one_by_one
from tests.strategies import routing_traces

POLICIES = ("fifo", "clock", "sieve", "s3fifo", "arc", "random")
ATOMIC = (True, False)


class Case(NamedTuple):
    """What a kernel is asked, and the seed of `random`."""

    events: Events
    caches: Caches
    seed: int = 0


def decisions(policy: str, case: Case, atomic: bool, cuts: list[int] | None = None) -> list[bool]:
    """Decisions of a kernel over the walk, cut into chunks before the events `cuts`."""
    state = getattr(queues, f"{policy}_state")(case.caches, case.seed)
    found = []
    for begin, end in pairwise([0, *(cuts or []), len(case.events.cache)]):
        chunk = chunk_of(case.events, begin, end)
        was_hit = np.full(len(chunk.objects), 7, dtype=np.uint8)
        getattr(queues, policy)(state, chunk, case.caches, atomic, was_hit)
        assert was_hit.size == 0 or was_hit.max() <= 1
        found += was_hit.astype(bool).tolist()
    return found


def chunk_of(events: Events, begin: int, end: int) -> Events:
    bounds = events.first_access[begin : end + 1]
    objects = events.objects[bounds[0] : bounds[-1]]
    return Events(objects, bounds - bounds[0], events.cache[begin:end], events.step[begin:end])


def oracle_decisions(policy: str, case: Case, atomic: bool) -> list[bool]:
    events, caches = case.events, case.caches
    listed = [events.objects[begin:end].tolist() for begin, end in pairwise(events.first_access.tolist())]
    size = [1] * caches.num_objects if caches.sizes is None else caches.sizes.tolist()
    refused = [] if caches.admits is None else np.flatnonzero(~caches.admits).tolist()
    found = {}
    for cache, capacity in enumerate(caches.capacities.tolist()):
        mine = [event for event, its_cache in zip(listed, events.cache.tolist(), strict=True) if its_cache == cache]
        decided = queue_oracles.decide(
            policy,
            mine if atomic else one_by_one(mine),
            size=size,
            capacity=capacity,
            refused=refused,
            seed=case.seed,
            stream=cache,
        )
        found[cache] = iter(decided)
    return [
        next(found[cache])
        for event, cache in zip(listed, events.cache.tolist(), strict=True)
        for _ in range(len(event))
    ]


def case_of(trace: Trace, scope: str, capacity: int, *, order="router", dedup="union", sizes=None, admits=None, seed=0):
    """The whole trace in caches of one scope, each of `capacity`."""
    steps = walk(trace, 0, len(steps_without_warmup(trace)), order=order, dedup=dedup)
    first_object = trace.layer_first_object if scope == "layer" else np.array([0, trace.num_objects])
    cache = steps.layer if scope == "layer" else np.zeros_like(steps.layer)
    capacities = np.full(len(first_object) - 1, capacity)
    return Case(
        Events(steps.objects, steps.first_access, cache, steps.step),
        Caches(sizes, capacities, first_object, admits),
        seed,
    )


@st.composite
def cases(draw: st.DrawFn, *, may_refuse: bool = True) -> Case:
    trace = draw(routing_traces())
    objects = trace.num_objects
    size_lists = st.lists(st.integers(1, 5), min_size=objects, max_size=objects)
    sizes = draw(st.one_of(st.none(), size_lists))
    admit_lists = st.lists(st.booleans(), min_size=objects, max_size=objects)
    admits = draw(st.one_of(st.none(), admit_lists)) if may_refuse else None
    largest = objects + 1 if sizes is None else sum(sizes) + 1
    return case_of(
        trace,
        draw(st.sampled_from(SCOPES)),
        draw(st.integers(0, largest)),
        order=draw(st.sampled_from(ACCESS_ORDERS)),
        dedup=draw(st.sampled_from(DEDUPS)),
        sizes=None if sizes is None else np.array(sizes, dtype=np.int64),
        admits=None if admits is None else np.array(admits),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


@st.composite
def one_cache(draw: st.DrawFn) -> Case:
    """Longer walks through one cache of up to forty objects: ghosts and shares of more than an object."""
    num_objects = draw(st.integers(2, 40))
    per_event = draw(st.integers(1, min(6, num_objects)))
    hot = st.integers(0, max(1, num_objects // 3))
    thing = st.one_of(hot, st.integers(0, num_objects - 1))
    listed = draw(st.lists(st.lists(thing, min_size=1, max_size=per_event), min_size=20, max_size=120))
    sizes = draw(st.one_of(st.none(), st.lists(st.integers(1, 9), min_size=num_objects, max_size=num_objects)))
    total = num_objects if sizes is None else sum(sizes)
    return walk_of(listed, draw(st.integers(1, total)), num_objects=num_objects, sizes=sizes)


def walk_of(listed: list[list[int]], capacity: int, *, num_objects: int = 10, sizes=None, seed: int = 0) -> Case:
    """One cache that is asked for the listed events."""
    events = Events(
        np.array([thing for event in listed for thing in event], dtype=np.int32),
        np.concatenate([[0], np.cumsum([len(event) for event in listed])]),
        np.zeros(len(listed), dtype=np.int32),
        np.arange(len(listed)),
    )
    sizes = None if sizes is None else np.array(sizes, dtype=np.int64)
    return Case(events, Caches(sizes, np.array([capacity]), np.array([0, num_objects])), seed)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=36, deadline=None)
@given(case=cases(), atomic=st.booleans())
def test_kernel_decides_every_access_as_the_oracle_does(policy, case, atomic):
    assert decisions(policy, case, atomic) == oracle_decisions(policy, case, atomic)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=24, deadline=None)
@given(case=one_cache(), atomic=st.booleans())
def test_kernel_decides_longer_walks_as_the_oracle_does(policy, case, atomic):
    assert decisions(policy, case, atomic) == oracle_decisions(policy, case, atomic)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("atomic", ATOMIC)
def test_kernel_decides_a_skewed_walk_of_thousands_as_the_oracle_does(policy, atomic):
    generator = np.random.default_rng(5)
    listed = [(np.unique(generator.zipf(1.2, 6) + event // 40) % 200).tolist() for event in range(800)]
    for capacity in (1, 7, 20, 45, 110):
        case = walk_of(listed, capacity, num_objects=200, seed=9)
        assert decisions(policy, case, atomic) == oracle_decisions(policy, case, atomic), capacity


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 20, 45])
def test_arc_is_figure_4_of_its_paper(capacity):
    generator = np.random.default_rng(3)
    accesses = (generator.zipf(1.2, 4000) % 60 + np.arange(4000) // 400).tolist()
    case = walk_of(singles(*accesses), capacity, num_objects=70)
    assert decisions("arc", case, False) == queue_oracles.arc_of_figure_4(accesses, capacity)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=18, deadline=None)
@given(case=cases(), atomic=st.booleans(), data=st.data())
def test_a_walk_cut_into_chunks_is_decided_as_a_whole(policy, case, atomic, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(case.events.cache)), max_size=4)))
    assert decisions(policy, case, atomic, cuts) == decisions(policy, case, atomic)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=18, deadline=None)
@given(case=cases(), atomic=st.booleans())
def test_a_cache_decides_the_same_whether_others_are_walked_beside_it_or_not(policy, case, atomic):
    together = np.array(decisions(policy, case, atomic))
    cache_of_access = np.repeat(case.events.cache, np.diff(case.events.first_access))
    for cache in range(len(case.caches.capacities)):
        mine = case.events.cache == cache
        alone = Events(
            case.events.objects[cache_of_access == cache],
            np.concatenate([[0], np.cumsum(np.diff(case.events.first_access)[mine])]),
            case.events.cache[mine],
            case.events.step[mine],
        )
        assert decisions(policy, case._replace(events=alone), atomic) == together[cache_of_access == cache].tolist()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=18, deadline=None)
@given(case=cases(), atomic=st.booleans())
def test_sizes_of_1_and_admitting_everything_are_the_same_as_none(policy, case, atomic):
    objects = case.caches.num_objects
    bare = case._replace(caches=case.caches._replace(sizes=None, admits=None))
    spelt = bare.caches._replace(sizes=np.ones(objects, dtype=np.int64), admits=np.ones(objects, dtype=bool))
    assert decisions(policy, bare._replace(caches=spelt), atomic) == decisions(policy, bare, atomic)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=18, deadline=None)
@given(case=one_cache(), atomic=st.booleans(), tens=st.integers(1, 3))
def test_equal_sizes_decide_as_sizes_of_1_do(policy, case, atomic, tens):
    # Capacities of whole tens, since S3-FIFO rounds its shares to the unit.
    objects, size = case.caches.num_objects, 2**21
    bare = case.caches._replace(sizes=None, capacities=np.array([10 * tens]))
    in_bytes = Caches(np.full(objects, size), np.array([10 * tens * size]), case.caches.first_object)
    assert decisions(policy, case._replace(caches=in_bytes), atomic) == decisions(
        policy, case._replace(caches=bare), atomic
    )


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=18, deadline=None)
@given(case=cases(), atomic=st.booleans())
def test_accesses_of_refused_objects_change_nothing(policy, case, atomic):
    admits = case.caches.admits
    if admits is None:
        return
    is_admitted = admits[case.events.objects]
    found = np.array(decisions(policy, case, atomic), dtype=bool)
    assert not found[~is_admitted].any()
    bounds = np.concatenate([[0], np.cumsum(is_admitted)])[case.events.first_access]
    without = case.events._replace(objects=case.events.objects[is_admitted], first_access=bounds)
    assert decisions(policy, case._replace(events=without), atomic) == found[is_admitted].tolist()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=18, deadline=None)
@given(case=one_cache())
def test_events_of_one_access_are_decided_the_same_in_both_semantics(policy, case):
    single = walk_of(
        [[thing] for thing in case.events.objects.tolist()],
        int(case.caches.capacities[0]),
        num_objects=case.caches.num_objects,
        sizes=case.caches.sizes,
    )
    assert decisions(policy, single, True) == decisions(policy, single, False)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=18, deadline=None)
@given(case=cases(may_refuse=False), atomic=st.booleans())
def test_capacity_0_hits_nothing_and_the_footprint_misses_first_accesses_only(policy, case, atomic):
    sizes = np.ones(case.caches.num_objects, dtype=np.int64) if case.caches.sizes is None else case.caches.sizes

    def found_with(capacity):
        capacities = np.full_like(case.caches.capacities, capacity)
        return decisions(policy, case._replace(caches=case.caches._replace(capacities=capacities)), atomic)

    assert not any(found_with(0))
    objects, bounds = case.events.objects.tolist(), case.events.first_access.tolist()
    event_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)) if atomic else np.arange(len(objects))
    starts = [bounds[event] for event in event_of] if atomic else range(len(objects))
    assert found_with(int(sizes.sum())) == [
        thing in objects[:start] for thing, start in zip(objects, starts, strict=True)
    ]


def text(policy: str, listed: list[list[int]], capacity: int, *, atomic: bool = False, sizes=None) -> str:
    """Decisions as text: H or m for each access."""
    return "".join("H" if hit else "m" for hit in decisions(policy, walk_of(listed, capacity, sizes=sizes), atomic))


def singles(*things: int) -> list[list[int]]:
    return [[thing] for thing in things]


def test_fifo_shows_beladys_anomaly():
    """Belady, Nelson, Shedler 1969: nine faults in three frames, ten in four."""
    accesses = singles(1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)
    assert text("fifo", accesses, 3).count("m") == 9
    assert text("fifo", accesses, 4).count("m") == 10


def test_clock_gives_a_hit_object_a_second_sweep():
    # 1 was hit, so 2 leaves for 4; then the bit of 1 is clear again, but the hand stands at 3, which leaves for 5.
    assert text("clock", singles(1, 2, 3, 1, 4, 5, 1, 3), 3) == "mmmHmmHm"


def test_sieve_keeps_a_visited_object_in_its_place():
    # The hand clears 1, evicts 2 and stays before 3; after 3 it starts over at 1, the oldest, though 1 was hit early.
    assert text("sieve", singles(1, 2, 3, 1, 4, 5, 4, 5, 6, 1), 3) == "mmmHmmHHmm"


def test_sieve_starts_over_at_the_oldest_after_it_evicted_the_newest():
    # 1 and 2 are visited, so 3, the newest, leaves for 4; the hand starts over and finds 1 clear.
    assert text("sieve", singles(1, 2, 3, 1, 2, 4, 5, 2, 4, 1), 3) == "mmmHHmmHHm"


def test_s3fifo_lets_one_hit_wonders_go_and_keeps_what_was_hit_twice():
    """At 20, small has two places. 0 was hit twice there, 1 once: 0 moves to main, 1 goes, and the ghost knows it."""
    fill = list(range(20))  # 0 and 1 fill small, the others main
    listed = singles(*fill, 0, 0, 1, 20, 0, 1)
    assert text_of_many("s3fifo", listed, 20) == "m" * 20 + "HHH" + "mHm"
    # Without the third hit of the pair, 0 leaves small first, as its oldest.
    assert text_of_many("s3fifo", singles(*fill, 0, 1, 20, 0), 20) == "m" * 20 + "HH" + "mm"


def test_s3fifo_takes_back_what_the_ghost_remembers_into_main():
    # 0 leaves small for 20 and comes back into main, for 1; then 21 and 22 drive 20 and 21 out of small, not 0.
    listed = singles(*range(20), 20, 0, 21, 22, 0, 20)
    assert text_of_many("s3fifo", listed, 20) == "m" * 20 + "mm" + "mm" + "Hm"


def text_of_many(policy: str, listed: list[list[int]], capacity: int) -> str:
    return "".join("H" if hit else "m" for hit in decisions(policy, walk_of(listed, capacity, num_objects=30), False))


def test_arc_protects_what_was_seen_twice_from_a_scan():
    assert text("arc", singles(1, 2, 1, 2, 3, 4, 5, 6, 1, 2), 3) == "mmHHmmmmHH"
    assert text("fifo", singles(1, 2, 1, 2, 3, 4, 5, 6, 1, 2), 3) == "mmHHmmmmmm"


@pytest.mark.parametrize("policy", POLICIES)
def test_members_of_an_event_are_never_victims_of_each_other(policy):
    # Two places: 1 and 2 stay although 3 wants in; with the event over, 3 may evict one of them.
    assert text(policy, [[1, 2], [1, 2, 3], [1, 2], [3], [3]], 2, atomic=True) == "mmHHmHHmH"


@pytest.mark.parametrize("policy", POLICIES)
def test_members_too_many_for_the_cache_are_served_and_the_first_of_them_stay(policy):
    assert text(policy, [[1, 2, 3], [1, 2, 3]], 2, atomic=True) == "mmmHHm"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_newcomer_that_does_not_fit_beside_members_evicts_nothing(policy):
    # 1 has 2 bytes, 2 has 3, and 3 has 4, of 5: 3 does not fit beside 1, a member, so 2 stays as well.
    assert text(policy, [[1], [2], [1, 3], [2]], 5, atomic=True, sizes=[1, 2, 3, 4, 1, 1, 1, 1, 1, 1]) == "mmHmH"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("atomic", ATOMIC)
def test_an_object_larger_than_the_cache_is_served_and_evicts_nothing(policy, atomic):
    assert text(policy, singles(0, 3, 0, 3), 3, atomic=atomic, sizes=[1, 2, 3, 4] + [1] * 6) == "mmHm"


def test_a_repeated_miss_of_an_event_is_a_miss_and_a_touch():
    # 1 is named twice: missed twice, but its bit is set, so 2 leaves for 3 although 1 is older.
    assert text("clock", [[1, 1], [2], [3], [1]], 2, atomic=True) == "mmmmH"
    assert text("clock", [[1], [2], [3], [1]], 2, atomic=True) == "mmmm"


def test_random_evicts_uniformly_by_seed():
    """10,000 evictions over a full cache of eight, one access later told apart by who still hits."""
    residents = 8
    counts = np.zeros(residents, dtype=int)
    for seed in range(2000):
        listed = singles(*range(residents), residents, *range(residents))
        found = decisions("random", walk_of(listed, residents, seed=seed), False)
        counts[found[residents + 1 :].index(False)] += 1
    # The first miss afterwards is the victim; 250 each expected, of standard deviation below 15.
    assert np.all(np.abs(counts - 2000 / residents) < 75)


def test_random_is_decided_by_its_seed_alone():
    listed = singles(*np.random.default_rng(1).integers(0, 10, 300).tolist())
    runs = [decisions("random", walk_of(listed, 4, seed=seed), False) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
