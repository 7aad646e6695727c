"""Policies whose victim is the smallest of some key: the LFU family, Least-Stale, LFRU and Belady, as numba kernels.

In: chunks of events and the caches that serve them (`caches`). Out: one hit-or-miss decision per access. For Belady,
`next_times` finds when each access's object is accessed next, from the last chunk to the first. Counting, windows and
contracts belong to `simulate`; policies whose victim is found by its place in a queue live elsewhere.

Every structure is exact, and none holds a float:

- Counts and recency only grow while an object is resident. A heap holds lower bounds of them: a hit changes the
  object's key and leaves the heap alone, a bound is corrected when it comes to the top.
- Next accesses come nearer with every hit. Each block of objects knows its farthest: a hit changes at most that of
  its block, an eviction looks through the blocks, then through the victim's.
- LFRU's scores fall as time goes by, at different speeds. A tournament knows of each match until when it stands.

Event-atomic, Belady aside: the hits are touched in order, then the misses inserted in order; a member of the event
that the victim scan meets is set aside meanwhile. Where the other residents do not make enough room, nothing is
evicted and the object is served, not admitted. An object that `admits` refuses never enters, so nothing of it is kept.

Letters: A accesses and N events of a chunk, O objects, C caches. Cache c owns [first_object[c], first_object[c + 1])
of each array over objects.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from replayer.caches import Caches

NEVER = 2**42
"""Time of a next access that never comes, in a Belady state; `next_times` says the maximum of its dtype instead."""

_OBJECT_BITS = 20  # keys pack an object below a time; replayer.trace.MAX_OBJECTS is 2**20
_OBJECT_MASK = 2**_OBJECT_BITS - 1
_CLOCK_BITS = 36  # LFU keys pack (count, clock): 6.8e10 accesses, 1.3e8 of one object
_CLOCK_MASK = 2**_CLOCK_BITS - 1
_MAX_COUNT = 2 ** (63 - _CLOCK_BITS) - 1
_NOTHING = 2**63 - 1  # above every real key and time


@numba.njit(cache=True, nogil=True)
def _longest_event(first_access):  # type: ignore[no-untyped-def]
    longest = 0
    for event in range(len(first_access) - 1):
        longest = max(longest, first_access[event + 1] - first_access[event])
    return longest


class HeapState(NamedTuple):
    """A heap of lower bounds for each cache; that of cache c is heap_*[first_object[c] :][: heap_length[c]].

    keys, resident, heap_keys, heap_objects: (O,); heap_length, used, events: (C,), events it has served; clock: (1,),
    accesses so far.
    """

    keys: npt.NDArray[np.int64]
    resident: npt.NDArray[np.uint8]
    heap_keys: npt.NDArray[np.int64]
    heap_objects: npt.NDArray[np.int32]
    heap_length: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]
    clock: npt.NDArray[np.int64]


def _heap_state(caches: Caches, seed: int) -> HeapState:
    num_objects, num_caches = caches.num_objects, len(caches.capacities)
    return HeapState(
        keys=np.zeros(num_objects, dtype=np.int64),
        resident=np.zeros(num_objects, dtype=np.uint8),
        heap_keys=np.zeros(num_objects, dtype=np.int64),
        heap_objects=np.zeros(num_objects, dtype=np.int32),
        heap_length=np.zeros(num_caches, dtype=np.int64),
        used=np.zeros(num_caches, dtype=np.int64),
        events=np.zeros(num_caches, dtype=np.int64),
        clock=np.zeros(1, dtype=np.int64),
    )


lfu_gated_state = lfu_always_state = least_stale_state = _heap_state


@numba.njit(cache=True, nogil=True)
def _replace_top(heap_keys, heap_objects, base, length, key, thing):  # type: ignore[no-untyped-def]
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= length:
            break
        if child + 1 < length and heap_keys[base + child + 1] < heap_keys[base + child]:
            child += 1
        below = heap_keys[base + child]
        if key <= below:
            break
        heap_keys[base + slot] = below
        heap_objects[base + slot] = heap_objects[base + child]
        slot = child
    heap_keys[base + slot] = key
    heap_objects[base + slot] = thing


@numba.njit(cache=True, nogil=True)
def _push(heap_keys, heap_objects, base, heap_length, cache, key, thing):  # type: ignore[no-untyped-def]
    slot = heap_length[cache]
    heap_length[cache] += 1
    while slot > 0:
        parent = (slot - 1) >> 1
        above = heap_keys[base + parent]
        if above <= key:
            break
        heap_keys[base + slot] = above
        heap_objects[base + slot] = heap_objects[base + parent]
        slot = parent
    heap_keys[base + slot] = key
    heap_objects[base + slot] = thing


@numba.njit(cache=True, nogil=True)
def _pop(heap_keys, heap_objects, base, heap_length, cache):  # type: ignore[no-untyped-def]
    heap_length[cache] -= 1
    last = base + heap_length[cache]
    _replace_top(heap_keys, heap_objects, base, heap_length[cache], heap_keys[last], heap_objects[last])


@numba.njit(cache=True, nogil=True)
def _settled_top(heap_keys, heap_objects, base, length, keys):  # type: ignore[no-untyped-def]
    """The object of the smallest key, once the bounds above it are corrected: at most one correction per hit."""
    while True:
        thing = heap_objects[base]
        if heap_keys[base] == keys[thing]:
            return thing
        _replace_top(heap_keys, heap_objects, base, length, keys[thing], thing)


@numba.njit(cache=True, nogil=True)
def _touched(key, thing, clock, event, counted):  # type: ignore[no-untyped-def]
    """The key after one more access: (count, clock), or (event, object) where nothing is counted."""
    if counted:
        return ((key >> _CLOCK_BITS) + 1) << _CLOCK_BITS | clock
    return event << _OBJECT_BITS | thing


@numba.njit(cache=True, nogil=True)
def _require_room_for_counts(keys, clock, num_accesses):  # type: ignore[no-untyped-def]
    if clock + num_accesses > _CLOCK_MASK or (keys.max() >> _CLOCK_BITS) + num_accesses > _MAX_COUNT:
        raise OverflowError("LFU can count 68,719,476,735 accesses, 134,217,727 of them to one expert")


@numba.njit(cache=True, nogil=True)
def _serve_heap(state, walked, caches, sizes, admits, counted, gated, atomic, was_hit):  # type: ignore[no-untyped-def]
    keys, resident, heap_keys, heap_objects = state.keys, state.resident, state.heap_keys, state.heap_objects
    heap_length, used, events = state.heap_length, state.used, state.events
    objects, first_access = walked.objects, walked.first_access
    missed = np.empty(_longest_event(first_access), dtype=np.int64)
    aside = np.empty(len(keys), dtype=np.int32)
    victims = np.empty(len(keys), dtype=np.int32)
    clock = state.clock[0]
    if counted:
        _require_room_for_counts(keys, clock, len(objects))
    for event in range(len(walked.cache)):
        cache = walked.cache[event]
        base, capacity = caches.first_object[cache], caches.capacities[cache]
        start, end = first_access[event], first_access[event + 1]
        events[cache] += 1
        now = events[cache]
        clock_before = clock
        num_missed, num_aside = 0, 0
        if atomic:
            for access in range(start, end):
                thing = objects[access]
                found = resident[thing]
                was_hit[access] = found
                missed[num_missed] = access
                num_missed += 1 - found
                if found:
                    clock += 1
                    keys[thing] = _touched(keys[thing], thing, clock, now, counted)
        for index in range(num_missed if atomic else end - start):
            if atomic:
                thing = objects[missed[index]]
            else:
                thing = objects[start + index]
                was_hit[start + index] = resident[thing]
            if admits is not None and not admits[thing]:
                continue
            clock += 1
            key = _touched(keys[thing], thing, clock, now, counted)
            keys[thing] = key
            if resident[thing]:
                # A hit; in event-atomic semantics one more mention by the event that has just admitted it.
                continue
            size = 1 if sizes is None else sizes[thing]
            room = capacity - used[cache]
            admitted = size <= capacity
            num_victims = 0
            while admitted and room < size:
                if heap_length[cache] == 0:
                    admitted = False
                    break
                candidate = _settled_top(heap_keys, heap_objects, base, heap_length[cache], keys)
                least = heap_keys[base]
                is_member = atomic and (least & _CLOCK_MASK > clock_before if counted else least >> _OBJECT_BITS == now)
                if is_member:
                    aside[num_aside] = candidate
                    num_aside += 1
                elif gated and key >> _CLOCK_BITS <= least >> _CLOCK_BITS:
                    admitted = False
                    break
                elif sizes is None:
                    # One leaves, one enters, in its place.
                    resident[candidate], resident[thing] = 0, 1
                    _replace_top(heap_keys, heap_objects, base, heap_length[cache], key, thing)
                    break
                else:
                    victims[num_victims] = candidate
                    num_victims += 1
                    room += sizes[candidate]
                _pop(heap_keys, heap_objects, base, heap_length, cache)
            if resident[thing]:
                continue
            if admitted:
                _push(heap_keys, heap_objects, base, heap_length, cache, key, thing)
                resident[thing] = 1
                used[cache] = capacity - room + size
                for index_of_victim in range(num_victims):
                    resident[victims[index_of_victim]] = 0
            else:
                for index_of_victim in range(num_victims):
                    victim = victims[index_of_victim]
                    _push(heap_keys, heap_objects, base, heap_length, cache, keys[victim], victim)
        for index in range(num_aside):
            _push(heap_keys, heap_objects, base, heap_length, cache, keys[aside[index]], aside[index])
    state.clock[0] = clock


@numba.njit(cache=True, nogil=True)
def lfu_gated(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """Least frequently used, admitting only what is counted more often than everything it would evict.

    Counts run from the start and survive eviction; the newcomer's includes this access. The victim has the lowest
    count, then is the least recent.
    """
    _serve_heap(state, events, caches, caches.sizes, caches.admits, True, True, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def lfu_always(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """Least frequently used with the counts and victims of `lfu_gated`; every miss that fits is admitted."""
    _serve_heap(state, events, caches, caches.sizes, caches.admits, True, False, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def least_stale(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """The victim's last use lies the most events back, ties to the lowest (layer, expert).

    Events are those that the cache serves, in sequential semantics too. With recency counted in events as in Zhang
    2026, "Reproducible Evaluation of MoE Expert Caching" (arXiv 2608.07911), where ties are drawn by lot.
    """
    _serve_heap(state, events, caches, caches.sizes, caches.admits, False, False, atomic, was_hit)


class InCacheState(NamedTuple):
    """What was used once stands in a queue, in order of use, and what was used again in a heap of lower bounds.

    queue: (O,), a ring for each cache over its own objects; queue_head, queue_length: (C,); the rest as `HeapState`.
    """

    keys: npt.NDArray[np.int64]
    resident: npt.NDArray[np.uint8]
    queue: npt.NDArray[np.int32]
    queue_head: npt.NDArray[np.int64]
    queue_length: npt.NDArray[np.int64]
    heap_keys: npt.NDArray[np.int64]
    heap_objects: npt.NDArray[np.int32]
    heap_length: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    clock: npt.NDArray[np.int64]


def lfu_in_cache_state(caches: Caches, seed: int) -> InCacheState:
    """The state of `lfu_in_cache` before its first access."""
    heap = _heap_state(caches, seed)
    return InCacheState(
        keys=heap.keys,
        resident=heap.resident,
        queue=np.zeros(caches.num_objects, dtype=np.int32),
        queue_head=np.zeros_like(heap.heap_length),
        queue_length=np.zeros_like(heap.heap_length),
        heap_keys=heap.heap_keys,
        heap_objects=heap.heap_objects,
        heap_length=heap.heap_length,
        used=heap.used,
        clock=heap.clock,
    )


@numba.njit(cache=True, nogil=True)
def _serve_in_cache(state, walked, caches, sizes, admits, atomic, was_hit):  # type: ignore[no-untyped-def]
    keys, resident, used = state.keys, state.resident, state.used
    queue, queue_head, queue_length = state.queue, state.queue_head, state.queue_length
    heap_keys, heap_objects, heap_length = state.heap_keys, state.heap_objects, state.heap_length
    objects, first_access = walked.objects, walked.first_access
    missed = np.empty(_longest_event(first_access), dtype=np.int64)
    aside = np.empty(len(keys), dtype=np.int32)
    victims = np.empty(len(keys), dtype=np.int32)
    clock = state.clock[0]
    _require_room_for_counts(keys, clock, len(objects))
    for event in range(len(walked.cache)):
        cache = walked.cache[event]
        base, capacity = caches.first_object[cache], caches.capacities[cache]
        width = caches.first_object[cache + 1] - base
        start, end = first_access[event], first_access[event + 1]
        clock_before = clock
        num_missed, num_aside = 0, 0
        if atomic:
            for access in range(start, end):
                thing = objects[access]
                found = resident[thing]
                was_hit[access] = found
                missed[num_missed] = access
                num_missed += 1 - found
                if found:
                    clock += 1
                    keys[thing] = _touched(keys[thing], thing, clock, 0, True)
        for index in range(num_missed if atomic else end - start):
            if atomic:
                thing = objects[missed[index]]
            else:
                thing = objects[start + index]
                was_hit[start + index] = resident[thing]
            if resident[thing]:
                # A hit; in event-atomic semantics one more mention by the event that has just admitted it.
                clock += 1
                keys[thing] = _touched(keys[thing], thing, clock, 0, True)
                continue
            size = 1 if sizes is None else sizes[thing]
            if size > capacity or (admits is not None and not admits[thing]):
                continue
            room = capacity - used[cache]
            num_victims, num_queued = 0, 0
            while room < size:
                victim = -1
                while victim < 0 and queue_length[cache] > 0:
                    oldest = queue[base + queue_head[cache]]
                    used_once = keys[oldest] >> _CLOCK_BITS == 1
                    if used_once and atomic and keys[oldest] & _CLOCK_MASK > clock_before:
                        # This event admitted it, and all that stand behind it.
                        break
                    queue_head[cache] = queue_head[cache] + 1 if queue_head[cache] + 1 < width else 0
                    queue_length[cache] -= 1
                    if used_once:
                        victim = oldest
                        num_queued += 1
                    else:
                        _push(heap_keys, heap_objects, base, heap_length, cache, keys[oldest], oldest)
                while victim < 0 and heap_length[cache] > 0:
                    candidate = _settled_top(heap_keys, heap_objects, base, heap_length[cache], keys)
                    if atomic and heap_keys[base] & _CLOCK_MASK > clock_before:
                        aside[num_aside] = candidate
                        num_aside += 1
                    else:
                        victim = candidate
                    _pop(heap_keys, heap_objects, base, heap_length, cache)
                if victim < 0:
                    break
                victims[num_victims] = victim
                num_victims += 1
                room += 1 if sizes is None else sizes[victim]
            if room >= size:
                for index_of_victim in range(num_victims):
                    keys[victims[index_of_victim]] = 0
                    resident[victims[index_of_victim]] = 0
                tail = queue_head[cache] + queue_length[cache]
                queue[base + (tail if tail < width else tail - width)] = thing
                queue_length[cache] += 1
                clock += 1
                keys[thing] = _touched(0, thing, clock, 0, True)
                resident[thing] = 1
                used[cache] = capacity - room + size
            else:
                for index_of_victim in range(num_victims - 1, -1, -1):
                    victim = victims[index_of_victim]
                    if index_of_victim < num_queued:
                        queue_head[cache] = (queue_head[cache] if queue_head[cache] > 0 else width) - 1
                        queue_length[cache] += 1
                        queue[base + queue_head[cache]] = victim
                    else:
                        _push(heap_keys, heap_objects, base, heap_length, cache, keys[victim], victim)
        for index in range(num_aside):
            _push(heap_keys, heap_objects, base, heap_length, cache, keys[aside[index]], aside[index])
    state.clock[0] = clock


@numba.njit(cache=True, nogil=True)
def lfu_in_cache(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """Least frequently used whose counts begin anew with every admission; ties leave the least recent first."""
    _serve_in_cache(state, events, caches, caches.sizes, caches.admits, atomic, was_hit)


class TournamentState(NamedTuple):
    """A tournament for each cache in which the resident of the lowest score wins.

    counts, last_use (events), resident, known_count, known_last_use (as of the object's last match): (O,);
    winner, stands_until: (2 × O,), nodes of cache c from 2 × first_object[c] on: 1 is the final, node i is between
    2i and 2i + 1, the objects are the last E nodes; -1 = nobody. used, events: (C,), events it has served.
    """

    counts: npt.NDArray[np.int64]
    last_use: npt.NDArray[np.int64]
    resident: npt.NDArray[np.uint8]
    known_count: npt.NDArray[np.int64]
    known_last_use: npt.NDArray[np.int64]
    winner: npt.NDArray[np.int32]
    stands_until: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]


def lfru_state(caches: Caches, seed: int) -> TournamentState:
    """The state of `lfru` before its first access."""
    num_objects, num_caches = caches.num_objects, len(caches.capacities)
    return TournamentState(
        counts=np.zeros(num_objects, dtype=np.int64),
        last_use=np.zeros(num_objects, dtype=np.int64),
        resident=np.zeros(num_objects, dtype=np.uint8),
        known_count=np.zeros(num_objects, dtype=np.int64),
        known_last_use=np.zeros(num_objects, dtype=np.int64),
        winner=np.full(2 * num_objects, -1, dtype=np.int32),
        stands_until=np.full(2 * num_objects, _NOTHING, dtype=np.int64),
        used=np.zeros(num_caches, dtype=np.int64),
        events=np.zeros(num_caches, dtype=np.int64),
    )


@numba.njit(cache=True, nogil=True)
def _play(state, root, node, thing, now):  # type: ignore[no-untyped-def]
    """Replays the matches from `node` up to the final, or until nothing of `thing` shows any more."""
    winner, stands_until = state.winner, state.stands_until
    known_count, known_last_use = state.known_count, state.known_last_use
    while node > 0:
        one, other = winner[root + 2 * node], winner[root + 2 * node + 1]
        until = min(stands_until[root + 2 * node], stands_until[root + 2 * node + 1])
        first = max(one, other)
        if one >= 0 and other >= 0:
            # Counts over ages, multiplied out; equal scores of equal recency have equal counts.
            ahead = known_count[one] * (now - known_last_use[other] + 1)
            behind = known_count[other] * (now - known_last_use[one] + 1)
            if ahead == behind:
                ahead, behind = known_last_use[one], known_last_use[other]
            if ahead == behind:
                ahead, behind = np.int64(one), np.int64(other)
            first, second = (one, other) if ahead < behind else (other, one)
            lead = known_count[first] - known_count[second]
            if lead > 0:
                # The less frequent falls faster: from this event on its score is the lower one.
                turn = known_count[first] * (known_last_use[second] - 1)
                turn -= known_count[second] * (known_last_use[first] - 1)
                until = min(until, turn // lead + 1)
        if winner[root + node] == first and first != thing and stands_until[root + node] == until:
            break
        winner[root + node] = first
        stands_until[root + node] = until
        node >>= 1


@numba.njit(cache=True, nogil=True)
def _enter(state, first_object, num_objects, thing, now):  # type: ignore[no-untyped-def]
    state.known_count[thing] = state.counts[thing]
    state.known_last_use[thing] = state.last_use[thing]
    leaf = num_objects + thing - first_object
    state.winner[2 * first_object + leaf] = thing
    _play(state, 2 * first_object, leaf >> 1, thing, now)


@numba.njit(cache=True, nogil=True)
def _leave(state, first_object, num_objects, thing, now):  # type: ignore[no-untyped-def]
    leaf = num_objects + thing - first_object
    state.winner[2 * first_object + leaf] = -1
    _play(state, 2 * first_object, leaf >> 1, thing, now)


@numba.njit(cache=True, nogil=True)
def _lowest_score(state, first_object, num_objects, now):  # type: ignore[no-untyped-def]
    """The object of the lowest score, or -1. A touch can only raise a score, so only winners need to be up to date."""
    root = 2 * first_object
    while True:
        while state.stands_until[root + 1] <= now:
            node = 1
            while True:
                if state.stands_until[root + 2 * node] <= now:
                    node = 2 * node
                elif state.stands_until[root + 2 * node + 1] <= now:
                    node = 2 * node + 1
                else:
                    break
            _play(state, root, node, -1, now)
        thing = state.winner[root + 1]
        if thing < 0:
            return thing
        if state.known_count[thing] == state.counts[thing] and state.known_last_use[thing] == state.last_use[thing]:
            return thing
        _enter(state, first_object, num_objects, thing, now)


@numba.njit(cache=True, nogil=True)
def _serve_tournament(state, walked, caches, sizes, admits, atomic, was_hit):  # type: ignore[no-untyped-def]
    counts, last_use, resident, used, events = state.counts, state.last_use, state.resident, state.used, state.events
    objects, first_access = walked.objects, walked.first_access
    if counts.max() + len(objects) > 2**62 // (events.max() + len(walked.cache) + 1):
        raise OverflowError("LFRU compares counts times ages, which have to stay below 2^62")
    missed = np.empty(_longest_event(first_access), dtype=np.int64)
    aside = np.empty(len(counts), dtype=np.int32)
    victims = np.empty(len(counts), dtype=np.int32)
    for event in range(len(walked.cache)):
        cache = walked.cache[event]
        base, capacity = caches.first_object[cache], caches.capacities[cache]
        width = caches.first_object[cache + 1] - base
        start, end = first_access[event], first_access[event + 1]
        events[cache] += 1
        now = events[cache]
        num_missed, num_aside = 0, 0
        if atomic:
            for access in range(start, end):
                thing = objects[access]
                found = resident[thing]
                was_hit[access] = found
                missed[num_missed] = access
                num_missed += 1 - found
                if found:
                    counts[thing] += 1
                    last_use[thing] = now
        for index in range(num_missed if atomic else end - start):
            if atomic:
                thing = objects[missed[index]]
            else:
                thing = objects[start + index]
                was_hit[start + index] = resident[thing]
            if admits is not None and not admits[thing]:
                continue
            counts[thing] += 1
            last_use[thing] = now
            size = 1 if sizes is None else sizes[thing]
            if resident[thing] or size > capacity:
                continue
            room = capacity - used[cache]
            num_victims = 0
            while room < size:
                candidate = _lowest_score(state, base, width, now)
                if candidate < 0:
                    break
                _leave(state, base, width, candidate, now)
                if atomic and last_use[candidate] == now:
                    aside[num_aside] = candidate
                    num_aside += 1
                else:
                    victims[num_victims] = candidate
                    num_victims += 1
                    room += 1 if sizes is None else sizes[candidate]
            if room >= size:
                for index_of_victim in range(num_victims):
                    resident[victims[index_of_victim]] = 0
                _enter(state, base, width, thing, now)
                resident[thing] = 1
                used[cache] = capacity - room + size
            else:
                for index_of_victim in range(num_victims):
                    _enter(state, base, width, victims[index_of_victim], now)
        for index in range(num_aside):
            _enter(state, base, width, aside[index], now)


@numba.njit(cache=True, nogil=True)
def lfru(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """The victim has the lowest frequency ÷ age; ties leave the least recent first, then the lowest (layer, expert).

    Frequencies count from the start and survive eviction; age = events that the cache has served since the last use,
    plus one, in sequential semantics too. After Zhang 2026, "Reproducible Evaluation of MoE Expert Caching" (arXiv
    2608.07911), which counts age in events of all layers (sequentially, in accesses) and draws ties by lot.
    """
    _serve_tournament(state, events, caches, caches.sizes, caches.admits, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def next_times(objects, first_access, upcoming, base, atomic, result):  # type: ignore[no-untyped-def]
    """When the object of each access of one chunk is accessed next: an access, or in event-atomic semantics an event.

    Chunks are given from the last to the first. `base` is the number of accesses (events) before this one; `upcoming`
    (O,), all the dtype's maximum at first, carries over what later chunks access; `result` (A,) receives the times,
    the maximum for never. An event does not count as the next one of its own members.
    """
    end_of_chunk = base + (len(first_access) - 1 if atomic else len(objects))
    if end_of_chunk > (2**32 - 1 if result.itemsize == 4 else NEVER):
        raise OverflowError("next accesses lie beyond what their type holds")
    for event in range(len(first_access) - 2, -1, -1):
        start, end = first_access[event], first_access[event + 1]
        if atomic:
            for access in range(start, end):
                result[access] = upcoming[objects[access]]
            for access in range(start, end):
                upcoming[objects[access]] = base + event
        else:
            for access in range(end - 1, start - 1, -1):
                thing = objects[access]
                result[access] = upcoming[thing]
                upcoming[thing] = base + access


class BeladyState(NamedTuple):
    """The next access of every resident as a key that is the smaller the farther, and each block's smallest.

    keys, resident: (O,); smallest: one per block of 2^block_bits objects of a cache; first_block: (C + 1,);
    used: (C,); block_bits, events: (1,), events served so far.
    """

    keys: npt.NDArray[np.int64]
    resident: npt.NDArray[np.uint8]
    smallest: npt.NDArray[np.int64]
    first_block: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    block_bits: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]


def _belady_state(caches: Caches, seed: int) -> BeladyState:
    objects_of_cache = np.diff(caches.first_object)
    # About as many blocks as objects in one: an eviction looks through either once.
    block_bits = max(4, (int(objects_of_cache.max()).bit_length() + 1) // 2)
    blocks_of_cache = -(-objects_of_cache >> block_bits)
    return BeladyState(
        keys=np.full(caches.num_objects, _NOTHING, dtype=np.int64),
        resident=np.zeros(caches.num_objects, dtype=np.uint8),
        smallest=np.full(int(blocks_of_cache.sum()), _NOTHING, dtype=np.int64),
        first_block=np.concatenate([[0], np.cumsum(blocks_of_cache)]).astype(np.int64),
        used=np.zeros(len(caches.capacities), dtype=np.int64),
        block_bits=np.array([block_bits], dtype=np.int64),
        events=np.zeros(1, dtype=np.int64),
    )


belady_bypass_state = belady_forced_state = _belady_state


@numba.njit(cache=True, nogil=True)
def _least(values, start, end):  # type: ignore[no-untyped-def]
    # Indices that count from 0 need no test for negative ones, which would keep the loop from being vectorised.
    part, least = values[start:end], _NOTHING
    for index in range(len(part)):
        least = min(least, part[index])
    return least


@numba.njit(cache=True, nogil=True)
def _take_out(keys, smallest, block, first, end, thing):  # type: ignore[no-untyped-def]
    """Takes `thing` out of its block of the objects [first, end)."""
    keys[thing] = _NOTHING
    smallest[block] = _least(keys, first, end)


@numba.njit(cache=True, nogil=True)
def _serve_belady(state, walked, next_time, caches, sizes, admits, forced, atomic, was_hit):  # type: ignore[no-untyped-def]
    keys, resident, smallest, used, bits = state.keys, state.resident, state.smallest, state.used, state.block_bits[0]
    objects, first_access = walked.objects, walked.first_access
    never = np.iinfo(next_time.dtype).max
    victims = np.empty(len(keys), dtype=np.int64)
    victim_keys = np.empty(len(keys), dtype=np.int64)
    for event in range(len(walked.cache)):
        cache = walked.cache[event]
        base, end_of_cache = caches.first_object[cache], caches.first_object[cache + 1]
        first_block, end_block = state.first_block[cache], state.first_block[cache + 1]
        capacity = caches.capacities[cache]
        start, end = first_access[event], first_access[event + 1]
        if atomic:
            now = state.events[0] + event
            for access in range(start, end):
                was_hit[access] = resident[objects[access]]
            for access in range(start, end):
                thing = objects[access]
                if resident[thing] or (admits is not None and not admits[thing]):
                    continue
                size = 1 if sizes is None else sizes[thing]
                if size <= capacity:
                    resident[thing] = 1
                    used[cache] += size
            # Forced: before its members have their next accesses, so that among the keys later than this very event
            # there are only others.
            for members_may_leave in (False, True):
                if members_may_leave:
                    for access in range(start, end):
                        thing = np.int64(objects[access])
                        if resident[thing]:
                            time = NEVER if next_time[access] == never else np.int64(next_time[access])
                            block = first_block + ((thing - base) >> bits)
                            keys[thing] = -(time << _OBJECT_BITS | thing)
                            smallest[block] = min(smallest[block], keys[thing])
                while used[cache] > capacity and (forced or members_may_leave):
                    farthest = _least(smallest, first_block, end_block)
                    if not members_may_leave and (farthest == _NOTHING or -farthest >> _OBJECT_BITS <= now):
                        break
                    victim = -farthest & _OBJECT_MASK
                    home = (victim - base) >> bits
                    first = base + (home << bits)
                    _take_out(keys, smallest, first_block + home, first, min(first + (1 << bits), end_of_cache), victim)
                    resident[victim] = 0
                    used[cache] -= 1 if sizes is None else sizes[victim]
            continue
        for access in range(start, end):
            thing = np.int64(objects[access])
            found = resident[thing]
            was_hit[access] = found
            time = NEVER if next_time[access] == never else np.int64(next_time[access])
            if not found:
                size = 1 if sizes is None else sizes[thing]
                if size > capacity or (admits is not None and not admits[thing]):
                    continue
                room = capacity - used[cache]
                num_victims = 0
                while room < size:
                    farthest = _least(smallest, first_block, end_block)
                    if not forced and time >= -farthest >> _OBJECT_BITS:
                        break
                    victim = -farthest & _OBJECT_MASK
                    home = (victim - base) >> bits
                    first = base + (home << bits)
                    _take_out(keys, smallest, first_block + home, first, min(first + (1 << bits), end_of_cache), victim)
                    victims[num_victims], victim_keys[num_victims] = victim, farthest
                    num_victims += 1
                    room += 1 if sizes is None else sizes[victim]
                if room < size:
                    for index in range(num_victims):
                        block = first_block + ((victims[index] - base) >> bits)
                        keys[victims[index]] = victim_keys[index]
                        smallest[block] = min(smallest[block], victim_keys[index])
                    continue
                for index in range(num_victims):
                    resident[victims[index]] = 0
                resident[thing] = 1
                used[cache] = capacity - room + size
            block = first_block + ((thing - base) >> bits)
            keys[thing] = -(time << _OBJECT_BITS | thing)
            smallest[block] = min(smallest[block], keys[thing])
    state.events[0] += len(walked.cache)


@numba.njit(cache=True, nogil=True)
def belady_bypass(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """Farthest next access leaves, newcomers included: the optimum for equal sizes, a reference for unequal ones.

    Sequential: a miss in a full cache is admitted only if its next access is nearer than that of every resident it
    would displace. Event-atomic: of residents and members the nearest next events stay. Ties leave in descending
    (layer, expert). Belady 1966, "A study of replacement algorithms"; with bypass, McFarling 1989.
    """
    _serve_belady(state, events, events.next_time, caches, caches.sizes, caches.admits, False, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def belady_forced(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """Farthest next access leaves, but a newcomer that fits stays.

    Event-atomic: every member stays, the nearest of them if they exceed the cache. Ties as in `belady_bypass`.
    """
    _serve_belady(state, events, events.next_time, caches, caches.sizes, caches.admits, True, atomic, was_hit)
