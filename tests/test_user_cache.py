"""Slots of a user-space cache against a model that remembers what every slot was filled with."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer import policies, user_cache
from replayer.caches import Caches, Events
from replayer.loop import Decisions, Schedule
from replayer.policies import Parameters, kernel_of, knows_future
from replayer.priorities import next_times
from replayer.user_cache import Sizes, UserCache, plan_slots
from schemas.columns import POLICIES
from tests.oracles import lru as lru_oracle

ADDRESS = 4096
SLOT_BYTES = 10
LAYERS, EXPERTS, K = 3, 12, 3


class Walked:
    """Events of K different experts of one layer each, layer after layer."""

    def __init__(self, seed: int, steps: int, scope: str) -> None:
        generator = np.random.default_rng(seed)
        weights = 1 / np.arange(2, EXPERTS + 2)
        chosen = np.argsort(generator.exponential(size=(steps, LAYERS, EXPERTS)) / weights, axis=-1)[..., :K]
        self.objects = (chosen + EXPERTS * np.arange(LAYERS)[:, None]).astype(np.int32).reshape(-1)
        self.events = steps * LAYERS
        self.first = np.arange(self.events + 1) * K
        layer = np.tile(np.arange(LAYERS, dtype=np.int32), steps)
        self.cache = layer if scope == "layer" else np.zeros_like(layer)
        self.first_object = np.arange(LAYERS + 1) * EXPERTS if scope == "layer" else np.array([0, LAYERS * EXPERTS])
        self.step = np.repeat(np.arange(steps), LAYERS)
        self.counts = np.bincount(self.objects, minlength=LAYERS * EXPERTS)

    @property
    def future(self) -> npt.NDArray[np.uint32]:
        times = np.empty(len(self.objects), dtype=np.uint32)
        upcoming = np.full(LAYERS * EXPERTS, 2**32 - 1, dtype=np.uint32)
        next_times(self.objects, self.first, upcoming, 0, True, times)
        return times

    def sizes(self, policy: str, slots_each: int) -> Sizes:
        caches = len(self.first_object) - 1
        held = np.full(LAYERS * EXPERTS, SLOT_BYTES)
        return plan_slots(policy, slots_each * caches * SLOT_BYTES, self.first_object, held, np.full(caches, K))

    def decided(self, cache: UserCache, future: npt.NDArray[Any] | None) -> Iterator[tuple[Any, Any, Any]]:
        """(objects, addresses, hits) event by event."""
        num_accesses = len(self.objects)
        schedule = Schedule(np.array([0, self.events]), self.first, np.arange(self.events), self.objects)
        decisions = Decisions(np.empty(num_accesses, dtype=np.int64), np.empty(num_accesses, dtype=np.uint8))
        decider = cache.over(schedule, decisions, self.cache, self.step, future)
        for event in range(self.events):
            decider.decide(event)
            accesses = slice(self.first[event], self.first[event + 1])
            yield (
                self.objects[accesses].tolist(),
                decisions.address[accesses].tolist(),
                decisions.was_hit[accesses].astype(bool).tolist(),
            )


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_decides_event_by_event_as_over_the_whole_walk(policy: str, scope: str) -> None:
    walked = Walked(seed=3, steps=120, scope=scope)
    sizes = walked.sizes(policy, 8)
    future = walked.future if knows_future(policy) else None
    cache = UserCache(policy, sizes, region_address=ADDRESS, counts=walked.counts)
    caches = Caches(None, sizes.decided, sizes.first_object)
    run, state = kernel_of(policy, "event_atomic", caches, Parameters(0, walked.counts, 0.5))
    expected = np.empty(len(walked.objects), dtype=np.uint8)
    run(state, Events(walked.objects, walked.first, walked.cache, walked.step, future), caches, True, expected)
    # What each address was filled with last: a hit must find its own expert there.
    filled = {int(cache.slot_address[cache.slots.slot_of[thing]]): int(thing) for thing in cache.preloaded}
    found: list[bool] = []
    for objects, addresses, hits in walked.decided(cache, future):
        for thing, address, hit in zip(objects, addresses, hits, strict=True):
            assert not hit or filled[address] == thing
        kept = [address for address in addresses if address]
        assert len(set(kept)) == len(kept), "two members of an event share a slot"
        filled |= {address: thing for thing, address, hit in zip(objects, addresses, hits, strict=True) if address}
        found += hits
    assert found == expected.astype(bool).tolist()
    assert sum(found) < len(found)
    # The models of the kernel's lists may thrash at two dozen folios.
    assert sum(found) > 0 or policy in policies.KERNEL_MODELS
    assert all(ADDRESS <= address < ADDRESS + sizes.total_bytes for address in filled)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from(["layer", "global"]))
@settings(max_examples=18, deadline=None)
def test_lru_over_slots_is_lru_of_the_oracle(seed: int, slots: int, scope: str) -> None:
    walked = Walked(seed, steps=30, scope=scope)
    slots = max(slots, K)
    cache = UserCache("lru", walked.sizes("lru", slots), region_address=ADDRESS)
    found = [hit for _, _, hits in walked.decided(cache, None) for hit in hits]
    expected: dict[int, list[bool]] = {}
    for number in range(len(walked.first_object) - 1):
        mine = [event for event in range(walked.events) if walked.cache[event] == number]
        events = [walked.objects[walked.first[event] : walked.first[event + 1]].tolist() for event in mine]
        hits = lru_oracle(events, size=dict.fromkeys(range(LAYERS * EXPERTS), 1), capacity=slots)
        for place, event in enumerate(mine):
            expected[event] = [bool(hit) for hit in hits[place * K : (place + 1) * K]]
    assert found == [hit for event in range(walked.events) for hit in expected[event]]


def test_slots_are_as_large_as_the_largest_expert_of_their_cache() -> None:
    held = np.array([10, 30, 20, 5, 5, 5])
    sizes = plan_slots("fifo", 2 * 61, np.array([0, 3, 6]), held, np.array([2, 2]))
    assert sizes.slot_bytes.tolist() == [30, 5]
    # 61 bytes each: two of 30, and no more than there are experts of 5.
    assert sizes.slots.tolist() == sizes.decided.tolist() == [2, 3]
    assert sizes.base_bytes.tolist() == [0, 60]
    assert sizes.total_bytes == 75


def test_policy_that_may_drop_a_member_of_the_event_keeps_slots_free_for_it() -> None:
    arguments = 100, np.array([0, 50]), np.full(50, 10), np.array([3])
    assert plan_slots("lru", *arguments).decided.tolist() == [10]
    assert plan_slots("belady_bypass", *arguments).decided.tolist() == [7]
    assert plan_slots("belady_bypass", 500, *arguments[1:]).decided.tolist() == [50], "everything fits"


def test_a_cache_smaller_than_an_event_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leaves 2 slots of 10 bytes where an event asks for 3 experts at once"):
        plan_slots("lru", 29, np.array([0, 50]), np.full(50, 10), np.array([3]))
    with pytest.raises(ValueError, match=r"ask for some 60 bytes"):
        plan_slots("two_list", 50, np.array([0, 50]), np.full(50, 10), np.array([3]))


def test_bookkeeping_is_counted() -> None:
    walked = Walked(0, 1, "global")
    cache = UserCache("lru", walked.sizes("lru", 6), region_address=ADDRESS)
    parts = [*cache.slots, cache.slot_address, *cache.state, cache.caches.admits]
    assert cache.metadata_bytes == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("policy", ["lru", "belady_bypass"])
def test_what_is_rehearsed_is_what_runs(policy: str) -> None:
    """Else code would be compiled, or loaded, inside a memory limit."""
    walked = Walked(seed=0, steps=2, scope="layer")
    future = walked.future if knows_future(policy) else None
    user_cache.rehearse(policy, future)
    known = user_cache._compiled.cache_info().misses
    cache = UserCache(policy, walked.sizes(policy, 8), region_address=ADDRESS, counts=walked.counts)
    assert list(walked.decided(cache, future))
    assert user_cache._compiled.cache_info().misses == known


def test_every_kernel_says_who_is_resident() -> None:
    """Between two events no policy holds more than its capacity, and it holds what hits next."""
    walked = Walked(seed=1, steps=60, scope="global")
    for policy in POLICIES:
        cache = UserCache(policy, walked.sizes(policy, 9), region_address=ADDRESS, counts=walked.counts)
        future = walked.future if knows_future(policy) else None
        pinned = set(cache.preloaded.tolist())
        before: set[int] = pinned
        for objects, _, hits in walked.decided(cache, future):
            assert {thing for thing, hit in zip(objects, hits, strict=True) if hit} == before & set(objects), policy
            array, least = policies.residency_of(cache.state)
            before = pinned | set(np.flatnonzero(array[: LAYERS * EXPERTS] >= least).tolist())
            assert len(before) <= int(cache.caches.capacities.sum()), policy
