"""Eviction policies as numba kernels: accesses in, one hit-or-miss decision per access out.

Each kernel walks all caches of a scope at once (one per layer, or a single one) and returns `was_hit` (A,) uint8.
Counting, windows and contracts belong to `simulate`. Definitions: every kernel implements both semantics.

Letters: A accesses, N events, O objects, C caches. Shared arguments: objects (A,), first_access (N + 1,),
event_cache (N,) the cache that serves the event, sizes (O,) and capacities (C,) in one unit (experts of size 1, or
bytes), first_object (C + 1,) the objects of each cache, atomic.

Event-atomic: a whole event is classified before anything is admitted, and none of its members is a victim meanwhile.
Sequential: access by access. An object larger than its cache is served and never admitted.
"""

import numba
import numpy as np

NEVER = 2**42
"""Time of a next access that never comes; beyond any real time."""

_TIME_BITS = 36  # LFU keys pack (count, recency): 6.8e10 accesses, 1.3e8 accesses of one expert
_ASIDE = -2  # place of a resident that the victim scan of its own event has set aside
_OBJECT_BITS = 20  # Belady keys pack (next time, object); replayer.trace.MAX_OBJECTS is 2**20


@numba.njit(cache=True, nogil=True)
def lru(objects, first_access, event_cache, sizes, capacities, first_object, atomic):  # type: ignore[no-untyped-def]
    """Least recently used: resident is the longest prefix of the recency stack that fits.

    In event-atomic semantics the event's members move to the top in the order walked, the last on top, and the stack
    is cut once, afterwards. Mattson et al. 1970, "Evaluation techniques for storage hierarchies".
    """
    num_objects, num_caches = len(sizes), len(capacities)
    was_hit = np.zeros(len(objects), dtype=np.uint8)
    # A circular doubly linked list per cache through a sentinel node num_objects + cache.
    newer = np.arange(num_objects + num_caches)
    older = np.arange(num_objects + num_caches)
    resident = np.zeros(num_objects, dtype=np.uint8)
    used = np.zeros(num_caches, dtype=np.int64)
    for event in range(len(event_cache)):
        cache = event_cache[event]
        sentinel = num_objects + cache
        start, end = first_access[event], first_access[event + 1]
        if atomic:
            for access in range(start, end):
                was_hit[access] = resident[objects[access]]
        for access in range(start, end):
            thing = objects[access]
            if not atomic:
                was_hit[access] = resident[thing]
            if resident[thing]:
                older[newer[thing]] = older[thing]
                newer[older[thing]] = newer[thing]
            elif sizes[thing] > capacities[cache]:
                continue
            else:
                resident[thing] = 1
                used[cache] += sizes[thing]
            top = older[sentinel]
            older[sentinel] = thing
            newer[thing] = sentinel
            older[thing] = top
            newer[top] = thing
            if not atomic:
                _cut_stack(cache, sentinel, newer, older, resident, used, sizes, capacities)
        if atomic:
            _cut_stack(cache, sentinel, newer, older, resident, used, sizes, capacities)
    return was_hit


@numba.njit(cache=True, nogil=True)
def _cut_stack(cache, sentinel, newer, older, resident, used, sizes, capacities):  # type: ignore[no-untyped-def]
    while used[cache] > capacities[cache]:
        victim = newer[sentinel]
        newer[sentinel] = newer[victim]
        older[newer[victim]] = sentinel
        resident[victim] = 0
        used[cache] -= sizes[victim]


# One indexed binary heap per cache, smallest key on top. Cache c owns heap[first_object[c]:first_object[c + 1]];
# place[object] is the object's slot, or -1 while it is not resident. Keys of residents are never equal.


@numba.njit(cache=True, nogil=True)
def _heap_up(heap, place, keys, base, slot):  # type: ignore[no-untyped-def]
    thing = heap[base + slot]
    while slot > 0:
        parent = (slot - 1) >> 1
        above = heap[base + parent]
        if keys[above] <= keys[thing]:
            break
        heap[base + slot] = above
        place[above] = slot
        slot = parent
    heap[base + slot] = thing
    place[thing] = slot


@numba.njit(cache=True, nogil=True)
def _heap_down(heap, place, keys, base, length, slot):  # type: ignore[no-untyped-def]
    thing = heap[base + slot]
    while True:
        child = 2 * slot + 1
        if child >= length:
            break
        if child + 1 < length and keys[heap[base + child + 1]] < keys[heap[base + child]]:
            child += 1
        below = heap[base + child]
        if keys[thing] <= keys[below]:
            break
        heap[base + slot] = below
        place[below] = slot
        slot = child
    heap[base + slot] = thing
    place[thing] = slot


@numba.njit(cache=True, nogil=True)
def _heap_push(heap, place, keys, base, lengths, cache, thing):  # type: ignore[no-untyped-def]
    slot = lengths[cache]
    lengths[cache] += 1
    heap[base + slot] = thing
    _heap_up(heap, place, keys, base, slot)


@numba.njit(cache=True, nogil=True)
def _heap_pop(heap, place, keys, base, lengths, cache):  # type: ignore[no-untyped-def]
    thing = heap[base]
    place[thing] = -1
    lengths[cache] -= 1
    if lengths[cache] > 0:
        last = heap[base + lengths[cache]]
        heap[base] = last
        place[last] = 0
        _heap_down(heap, place, keys, base, lengths[cache], 0)
    return thing


@numba.njit(cache=True, nogil=True)
def _heap_rekey(heap, place, keys, base, lengths, cache, thing, key):  # type: ignore[no-untyped-def]
    keys[thing] = key
    _heap_up(heap, place, keys, base, place[thing])
    _heap_down(heap, place, keys, base, lengths[cache], place[thing])


@numba.njit(cache=True, nogil=True)
def lfu(objects, first_access, event_cache, sizes, capacities, first_object, atomic, gated):  # type: ignore[no-untyped-def]
    """Least frequently used with perfect counts: they run from the start and survive eviction.

    The victim has the lowest count, then is the least recent. `gated` admits a newcomer only if its count, this access
    included, exceeds that of every victim it needs. In event-atomic semantics the hits are touched in order, then
    the misses are inserted in order; a member that the victim scan meets is set aside and put back unchanged.
    """
    num_objects, num_caches = len(sizes), len(capacities)
    was_hit = np.zeros(len(objects), dtype=np.uint8)
    heap = np.empty(num_objects, dtype=np.int32)
    place = np.full(num_objects, -1, dtype=np.int32)
    keys = np.zeros(num_objects, dtype=np.int64)
    lengths = np.zeros(num_caches, dtype=np.int64)
    used = np.zeros(num_caches, dtype=np.int64)
    counts = np.zeros(num_objects, dtype=np.int64)
    member_of = np.full(num_objects, -1, dtype=np.int64)
    members_aside = np.empty(num_objects, dtype=np.int32)
    victims = np.empty(num_objects, dtype=np.int32)
    clock = 0
    for event in range(len(event_cache)):
        cache = event_cache[event]
        base = first_object[cache]
        start, end = first_access[event], first_access[event + 1]
        if atomic:
            for access in range(start, end):
                was_hit[access] = place[objects[access]] >= 0
                member_of[objects[access]] = event
            for access in range(start, end):
                if was_hit[access]:
                    thing = objects[access]
                    counts[thing] += 1
                    clock += 1
                    _heap_rekey(heap, place, keys, base, lengths, cache, thing, counts[thing] << _TIME_BITS | clock)
        num_aside = 0
        for access in range(start, end):
            thing = objects[access]
            if atomic:
                if was_hit[access]:
                    continue
            else:
                was_hit[access] = place[thing] >= 0
            counts[thing] += 1
            clock += 1
            key = counts[thing] << _TIME_BITS | clock
            if place[thing] >= 0:
                _heap_rekey(heap, place, keys, base, lengths, cache, thing, key)
                continue
            keys[thing] = key
            if place[thing] == _ASIDE:
                # Named again by its own event: it is resident, and goes back with its new key afterwards.
                continue
            num_victims = 0
            room = capacities[cache] - used[cache]
            admitted = sizes[thing] <= capacities[cache]
            while admitted and room < sizes[thing]:
                if lengths[cache] == 0:
                    admitted = False
                    break
                candidate = heap[base]
                if atomic and member_of[candidate] == event:
                    members_aside[num_aside] = _heap_pop(heap, place, keys, base, lengths, cache)
                    place[candidate] = _ASIDE
                    num_aside += 1
                elif gated and counts[thing] <= counts[candidate]:
                    admitted = False
                else:
                    victims[num_victims] = _heap_pop(heap, place, keys, base, lengths, cache)
                    num_victims += 1
                    room += sizes[candidate]
            if admitted:
                used[cache] = capacities[cache] - room + sizes[thing]
                _heap_push(heap, place, keys, base, lengths, cache, thing)
            else:
                for index in range(num_victims):
                    _heap_push(heap, place, keys, base, lengths, cache, victims[index])
        for index in range(num_aside):
            _heap_push(heap, place, keys, base, lengths, cache, members_aside[index])
    return was_hit


@numba.njit(cache=True, nogil=True)
def next_times(objects, first_access, num_objects, atomic):  # type: ignore[no-untyped-def]
    """When each access's object is accessed next: (A,) an event (atomic; this event aside) or an access, or NEVER."""
    upcoming = np.full(num_objects, NEVER, dtype=np.int64)
    result = np.empty(len(objects), dtype=np.int64)
    for event in range(len(first_access) - 2, -1, -1):
        if atomic:
            for access in range(first_access[event], first_access[event + 1]):
                result[access] = upcoming[objects[access]]
            for access in range(first_access[event], first_access[event + 1]):
                upcoming[objects[access]] = event
        else:
            for access in range(first_access[event + 1] - 1, first_access[event] - 1, -1):
                result[access] = upcoming[objects[access]]
                upcoming[objects[access]] = access
    return result


@numba.njit(cache=True, nogil=True)
def belady(objects, first_access, event_cache, sizes, capacities, first_object, atomic, forced, next_time):  # type: ignore[no-untyped-def]
    """Farthest next access leaves: the optimum for equal sizes, a reference only for unequal ones.

    Bypass, sequential: a miss in a full cache is admitted only if its next access is nearer than that of every
    resident it would displace. Bypass, event-atomic: of residents and members the nearest stay. Forced: the newcomer
    (event-atomic: every member, the nearest of them if they do not fit) stays. Ties leave in descending (layer,
    expert). Belady 1966, "A study of replacement algorithms"; with bypass, McFarling 1989.
    """
    num_objects, num_caches = len(sizes), len(capacities)
    was_hit = np.zeros(len(objects), dtype=np.uint8)
    heap = np.empty(num_objects, dtype=np.int32)
    place = np.full(num_objects, -1, dtype=np.int32)
    keys = np.zeros(num_objects, dtype=np.int64)
    lengths = np.zeros(num_caches, dtype=np.int64)
    used = np.zeros(num_caches, dtype=np.int64)
    member_of = np.full(num_objects, -1, dtype=np.int64)
    aside = np.empty(num_objects, dtype=np.int32)
    for event in range(len(event_cache)):
        cache = event_cache[event]
        base = first_object[cache]
        start, end = first_access[event], first_access[event + 1]
        if atomic:
            for access in range(start, end):
                was_hit[access] = place[objects[access]] >= 0
            for access in range(start, end):
                thing = objects[access]
                key = -(next_time[access] << _OBJECT_BITS | thing)
                member_of[thing] = event
                if place[thing] >= 0:
                    _heap_rekey(heap, place, keys, base, lengths, cache, thing, key)
                elif sizes[thing] <= capacities[cache]:
                    keys[thing] = key
                    used[cache] += sizes[thing]
                    _heap_push(heap, place, keys, base, lengths, cache, thing)
            num_aside = 0
            while used[cache] > capacities[cache]:
                if lengths[cache] == 0:
                    # Forced, and the members alone exceed the cache: the farthest of them go.
                    used[cache] = 0
                    for index in range(num_aside):
                        used[cache] += sizes[aside[index]]
                        _heap_push(heap, place, keys, base, lengths, cache, aside[index])
                    num_aside = 0
                    while used[cache] > capacities[cache]:
                        used[cache] -= sizes[_heap_pop(heap, place, keys, base, lengths, cache)]
                    break
                thing = _heap_pop(heap, place, keys, base, lengths, cache)
                if forced and member_of[thing] == event:
                    aside[num_aside] = thing
                    num_aside += 1
                else:
                    used[cache] -= sizes[thing]
            for index in range(num_aside):
                _heap_push(heap, place, keys, base, lengths, cache, aside[index])
            continue
        for access in range(start, end):
            thing = objects[access]
            key = -(next_time[access] << _OBJECT_BITS | thing)
            if place[thing] >= 0:
                was_hit[access] = 1
                _heap_rekey(heap, place, keys, base, lengths, cache, thing, key)
                continue
            if sizes[thing] > capacities[cache]:
                continue
            keys[thing] = key
            num_aside = 0
            room = capacities[cache] - used[cache]
            while room < sizes[thing]:
                farthest = heap[base]
                if not forced and next_time[access] >= -keys[farthest] >> _OBJECT_BITS:
                    break
                room += sizes[farthest]
                aside[num_aside] = _heap_pop(heap, place, keys, base, lengths, cache)
                num_aside += 1
            if room >= sizes[thing]:
                used[cache] = capacities[cache] - room + sizes[thing]
                _heap_push(heap, place, keys, base, lengths, cache, thing)
            else:
                for index in range(num_aside):
                    _heap_push(heap, place, keys, base, lengths, cache, aside[index])
    return was_hit


def static_table(counts, sizes, capacities, first_object):  # type: ignore[no-untyped-def]
    """The most accessed objects of each cache, as a mask (O,): in order of count, ties to the lowest (layer, expert).

    An object that no longer fits is passed over and smaller ones further down are still taken; with equal sizes this
    is the top c, filled up with objects never accessed where fewer than c were.
    """
    chosen = np.zeros(len(sizes), dtype=bool)
    for cache, capacity in enumerate(capacities):
        begin, end = first_object[cache], first_object[cache + 1]
        room = capacity
        for offset in np.argsort(-counts[begin:end], kind="stable"):
            thing = begin + offset
            if sizes[thing] <= room:
                chosen[thing] = True
                room -= sizes[thing]
    return chosen
