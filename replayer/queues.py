"""Policies whose victim is found by a queue or a hand: FIFO, CLOCK, SIEVE, S3-FIFO, ARC and random.

In: the events and caches of `caches`. Out: one hit-or-miss per access, and the state that the next chunk of the walk
goes on from: `NAME_state(caches, seed)` allocates it, `NAME(state, events, caches, atomic, was_hit)` decides. LRU and
the policies that rank objects by counts or by the future do not belong here; counting belongs to `simulate`.

What the papers leave open is ruled alike. Event-atomic: the event's hits are touched in order, then its misses are
inserted in order; the search for a victim passes over members of the event and leaves their places, bits and counts
alone. A newcomer is inserted only if it fits beside the members that are resident by then; else it is served, and
neither queues nor ghosts nor hands change. Sequential: the same for events of one access. Byte sizes: evict until the
newcomer fits; shares and targets of a cache are bytes, too. Evictions are O(1) per access, averaged over the walk.

Letters: A accesses, N events, O objects, C caches. A queue is a circle of links through a sentinel node of its own,
which lies between its newest and its oldest object.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from replayer.caches import Caches

# The highest bit of an object's flags: it is a resident member of the event being served. Sentinels always carry it,
# so that one comparison stops a search for a victim at both.
_MEMBER = 128


@numba.njit(cache=True, nogil=True, inline="always")
def _mark(flags, objects, start, end, least, sizes):  # type: ignore[no-untyped-def]
    """Marks the resident members of an event, those flagged `least` or above, and returns what they occupy."""
    occupied = 0
    for access in range(start, end):
        thing = np.uint32(objects[access])
        flag = flags[thing]
        is_unmarked = (flag >= least) & (flag < _MEMBER)
        flags[thing] = flag | _MEMBER * is_unmarked
        occupied += is_unmarked if sizes is None else sizes[thing] * is_unmarked
    return occupied


@numba.njit(cache=True, nogil=True, inline="always")
def _unmark(flags, objects, start, end):  # type: ignore[no-untyped-def]
    for access in range(start, end):
        flags[np.uint32(objects[access])] &= ~_MEMBER


@numba.njit(cache=True, nogil=True, inline="always")
def _unlink(newer, older, thing):  # type: ignore[no-untyped-def]
    after, before = newer[thing], older[thing]
    newer[before] = after
    older[after] = before


@numba.njit(cache=True, nogil=True, inline="always")
def _append(newer, older, sentinel, thing):  # type: ignore[no-untyped-def]
    last = older[sentinel]
    newer[last] = thing
    older[thing] = last
    newer[thing] = sentinel
    older[sentinel] = thing


@numba.njit(cache=True, nogil=True, inline="always")
def _pass_members(flags, newer, passed):  # type: ignore[no-untyped-def]
    """The node after which the queue goes on with an object that may leave, or ends."""
    ahead = newer[passed]
    while flags[ahead] > _MEMBER:  # a sentinel is no more than that
        passed = ahead
        ahead = newer[passed]
    return passed


class HandState(NamedTuple):
    """One queue per cache and a hand that walks it. Node O + c is the sentinel of cache c.

    flags: (O + C,) uint8, 0 is absent; newer: (O + C,) uint32; newest, passed: (C,) uint32, the newest node and the
    one behind the hand; room: (C,) int64, what is free.
    """

    flags: npt.NDArray[np.uint8]
    newer: npt.NDArray[np.uint32]
    newest: npt.NDArray[np.uint32]
    passed: npt.NDArray[np.uint32]
    room: npt.NDArray[np.int64]


_RESIDENT, _VISITED = 1, 2


def fifo_state(caches: Caches, seed: int) -> HandState:
    """The state of `fifo`, `clock` or `sieve` before the first access."""
    num_objects, num_caches = caches.num_objects, len(caches.capacities)
    flags = np.zeros(num_objects + num_caches, dtype=np.uint8)
    flags[num_objects:] = _MEMBER
    newer = np.arange(num_objects + num_caches, dtype=np.uint32)
    sentinels = newer[num_objects:]
    return HandState(flags, newer, sentinels.copy(), sentinels.copy(), caches.capacities.astype(np.int64))


clock_state = sieve_state = fifo_state


@numba.njit(cache=True, nogil=True)
def fifo(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """First in, first out: the oldest resident leaves; a hit changes nothing.

    A member that was passed over stays where it is: it is the first to leave once its event has ended.
    """
    _walk_hand(state, events, caches.capacities, caches.sizes, caches.admits, None, None, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def clock(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """CLOCK: a hand sweeps a circle of residents, clears reference bits and evicts the first it finds clear.

    Corbató 1968, "A paging experiment with the Multics system", of which this is the variant with one bit. The paper
    leaves the bit of a newcomer open: it is clear here, set by hits alone (FIFO with reinsertion). The newcomer
    stands right behind the hand. The hand moves on over members, so that they have a whole sweep before them.
    """
    _walk_hand(state, events, caches.capacities, caches.sizes, caches.admits, True, True, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def sieve(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """SIEVE: a hand moves from the oldest to the newest, clears visited bits and evicts the first it finds clear.

    Zhang, Yang, Yue, Vigfusson, Rashmi 2024, "SIEVE is simpler than LRU" (NSDI), Algorithm 1: newcomers go to the
    newest end, wherever the hand is; the hand stays behind the evicted object, and starts over at the oldest when
    it was the newest. The hand moves on over members, and their bits stay as they are.
    """
    _walk_hand(state, events, caches.capacities, caches.sizes, caches.admits, True, None, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def _walk_hand(  # type: ignore[no-untyped-def]
    state, events, capacities, sizes, admits, has_bits, inserts_behind_hand, atomic, was_hit
):
    # has_bits and inserts_behind_hand are True or None, so that each policy is compiled without the others' branches.
    flags, newer, newest, passed_of, room_of = state
    objects, first_access, event_cache = events.objects, events.first_access, events.cache
    num_caches, num_events = len(capacities), len(event_cache)
    num_objects = len(flags) - num_caches
    # Event by event costs time, and a single cache sees the same accesses either way.
    at_once = num_caches == 1 and not atomic
    member = _MEMBER if atomic else 0
    for event in range(min(num_events, 1) if at_once else num_events):
        cache = event_cache[event]
        start, end = first_access[event], first_access[num_events if at_once else event + 1]
        fits = capacities[cache]
        if atomic:
            num_misses = 0
            for access in range(start, end):
                thing = np.uint32(objects[access])
                is_hit = flags[thing] >= _RESIDENT
                was_hit[access] = is_hit
                num_misses += not is_hit
                if has_bits is not None:
                    flags[thing] |= _VISITED * is_hit
            if num_misses == 0:
                continue
            fits -= _mark(flags, objects, start, end, _RESIDENT, sizes)
        sentinel = np.uint32(num_objects + cache)
        last, passed, room = newest[cache], passed_of[cache], room_of[cache]
        if has_bits is None:
            passed = sentinel
        ahead = newer[passed]
        for access in range(start, end):
            thing = np.uint32(objects[access])
            flag = flags[thing]
            if not atomic:
                was_hit[access] = flag >= _RESIDENT
            elif was_hit[access] != 0:
                continue
            if flag >= _RESIDENT:  # event-atomic: a repeated miss, inserted by now
                if has_bits is not None:
                    flags[thing] = flag | _VISITED
                continue
            if admits is not None and not admits[thing]:
                continue
            size = 1 if sizes is None else sizes[thing]
            if size > fits:
                continue
            if atomic:
                fits -= size
            while room < size:
                flag = flags[ahead]
                while flag != _RESIDENT:
                    if flag < _MEMBER:
                        flags[ahead] = _RESIDENT
                    passed = ahead
                    ahead = newer[passed]
                    flag = flags[ahead]
                flags[ahead] = 0
                room += 1 if sizes is None else sizes[ahead]
                ahead = newer[ahead]
                newer[passed] = ahead
                if inserts_behind_hand is None and ahead == sentinel:
                    last = passed
                    passed = sentinel
                    ahead = newer[sentinel]
            room -= size
            flags[thing] = _RESIDENT | member
            if inserts_behind_hand is None:
                newer[last] = thing
                newer[thing] = sentinel
                last = thing
            else:
                newer[passed] = thing
                newer[thing] = ahead
                passed = thing
        newest[cache], passed_of[cache], room_of[cache] = last, passed, room
        if atomic:
            _unmark(flags, objects, start, end)


class S3FifoState(NamedTuple):
    """Three queues per cache: small, main and ghost. Node O + 3c + q is the sentinel of queue q of cache c.

    flags: (O + 3C,) uint8, the queue, and in the two lowest bits the counted hits; newer, older: (O + 3C,) uint32;
    used: (C, 3) int64, what each queue holds; has_evicted: (C,) uint8.
    """

    flags: npt.NDArray[np.uint8]
    newer: npt.NDArray[np.uint32]
    older: npt.NDArray[np.uint32]
    used: npt.NDArray[np.int64]
    has_evicted: npt.NDArray[np.uint8]


_COUNTED = 3  # the lowest bits of the flags: at most 3 hits
_GHOST, _SMALL, _MAIN = 4, 8, 16  # residents are those from _SMALL on
_PROMOTING_HITS = 2


def s3fifo_state(caches: Caches, seed: int) -> S3FifoState:
    """The state of `s3fifo` before the first access."""
    num_objects, num_queues = caches.num_objects, 3 * len(caches.capacities)
    flags = np.zeros(num_objects + num_queues, dtype=np.uint8)
    flags[num_objects:] = _MEMBER
    unlinked = np.arange(num_objects + num_queues, dtype=np.uint32)
    return S3FifoState(
        flags=flags,
        newer=unlinked,
        older=unlinked.copy(),
        used=np.zeros((num_queues // 3, 3), dtype=np.int64),
        has_evicted=np.zeros(num_queues // 3, dtype=np.uint8),
    )


@numba.njit(cache=True, nogil=True)
def s3fifo(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """S3-FIFO: a small queue lets one-hit wonders go early, a main queue reinserts what was hit, a ghost remembers.

    Yang, Zhang, Qiu, Yue, Rashmi 2023, "FIFO queues are all you need for cache eviction" (SOSP), Algorithm 1. Of a
    capacity c, small has floor(c / 10), at least 1, main the rest, and the ghost remembers floor(9 c / 10). Hits are
    counted to 3. From small, an object of 2 or more hits moves to main with its count cleared, others become ghosts;
    from main, an object of a positive count goes to the newest end with one less, others leave for good. A newcomer
    enters main if the ghost remembers it, else small.

    Where paper and simulator of the same authors (libCacheSim) can be read both ways, this follows the simulator,
    count by count: the ghost is asked, and forgets the newcomer, before anything is evicted; a promotion evicts
    nothing from main; the victim is main's where main holds more than its share or small has none, else small's;
    and until the first eviction a newcomer that finds small's share used up enters main. The simulator refuses
    objects that are not smaller than small's share, hence everything below a capacity of 20; here they enter.
    Event-atomic: members keep their places in both queues. An object larger than the ghost's share is not remembered.
    """
    _walk_s3fifo(state, events, caches.capacities, caches.sizes, caches.admits, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def _walk_s3fifo(state, events, capacities, sizes, admits, atomic, was_hit):  # type: ignore[no-untyped-def]
    flags, newer, older, used, has_evicted = state
    objects, first_access, event_cache = events.objects, events.first_access, events.cache
    num_caches, num_events = len(capacities), len(event_cache)
    num_objects = len(flags) - 3 * num_caches
    at_once = num_caches == 1 and not atomic
    member = _MEMBER if atomic else 0
    for event in range(min(num_events, 1) if at_once else num_events):
        cache = event_cache[event]
        start, end = first_access[event], first_access[num_events if at_once else event + 1]
        capacity = capacities[cache]
        fits = capacity
        if atomic:
            num_misses = 0
            for access in range(start, end):
                thing = np.uint32(objects[access])
                flag = flags[thing]
                is_hit = flag >= _SMALL
                was_hit[access] = is_hit
                num_misses += not is_hit
                flags[thing] = flag + (is_hit & ((flag & _COUNTED) < _COUNTED))
            if num_misses == 0:
                continue
            fits -= _mark(flags, objects, start, end, _SMALL, sizes)
        small = np.uint32(num_objects + 3 * cache)
        main, ghost = np.uint32(small + 1), np.uint32(small + 2)
        in_small, in_main, in_ghost = used[cache, 0], used[cache, 1], used[cache, 2]
        small_share, ghost_share = max(capacity // 10, 1), capacity * 9 // 10
        # The search for a victim goes on behind the members that this event has already made it pass over.
        passed_small, passed_main = small, main
        for access in range(start, end):
            thing = np.uint32(objects[access])
            flag = flags[thing]
            if not atomic:
                was_hit[access] = flag >= _SMALL
            elif was_hit[access] != 0:
                continue
            if flag >= _SMALL:
                flags[thing] = flag + ((flag & _COUNTED) < _COUNTED)
                continue
            if admits is not None and not admits[thing]:
                continue
            size = 1 if sizes is None else sizes[thing]
            if size > fits:
                continue
            if atomic:
                fits -= size
            if flag == _GHOST:
                _unlink(newer, older, thing)
                in_ghost -= size
            while in_small + in_main + size > capacity:
                has_evicted[cache] = 1
                passed_small = _pass_members(flags, newer, passed_small)
                passed_main = _pass_members(flags, newer, passed_main)
                has_small, has_main = newer[passed_small] != small, newer[passed_main] != main
                if has_main and (in_main > capacity - small_share or not has_small):
                    oldest = newer[passed_main]
                    while flags[oldest] != _MAIN:
                        flags[oldest] -= 1
                        _unlink(newer, older, oldest)
                        _append(newer, older, main, oldest)
                        passed_main = _pass_members(flags, newer, passed_main)
                        oldest = newer[passed_main]
                    _unlink(newer, older, oldest)
                    flags[oldest] = 0
                    in_main -= 1 if sizes is None else sizes[oldest]
                    continue
                while newer[passed_small] != small:
                    oldest = newer[passed_small]
                    oldest_size = 1 if sizes is None else sizes[oldest]
                    _unlink(newer, older, oldest)
                    in_small -= oldest_size
                    if flags[oldest] >= _SMALL + _PROMOTING_HITS:
                        flags[oldest] = _MAIN
                        _append(newer, older, main, oldest)
                        in_main += oldest_size
                        passed_small = _pass_members(flags, newer, passed_small)
                        continue
                    flags[oldest] = 0
                    if oldest_size <= ghost_share:
                        while in_ghost + oldest_size > ghost_share:
                            in_ghost -= _forget(flags, newer, older, ghost, sizes)
                        flags[oldest] = _GHOST
                        _append(newer, older, ghost, oldest)
                        in_ghost += oldest_size
                    break
            if flag == _GHOST or (has_evicted[cache] == 0 and in_small >= small_share):
                in_main += size
                flags[thing] = _MAIN | member
                _append(newer, older, main, thing)
            else:
                in_small += size
                flags[thing] = _SMALL | member
                _append(newer, older, small, thing)
        used[cache, 0], used[cache, 1], used[cache, 2] = in_small, in_main, in_ghost
        if atomic:
            _unmark(flags, objects, start, end)


@numba.njit(cache=True, nogil=True, inline="always")
def _forget(flags, newer, older, sentinel, sizes):  # type: ignore[no-untyped-def]
    """Drops the oldest of a queue and returns its size."""
    oldest = newer[sentinel]
    flags[oldest] = 0
    _unlink(newer, older, oldest)
    return 1 if sizes is None else sizes[oldest]


class ArcState(NamedTuple):
    """Four queues per cache: T1, T2, B1 and B2. Node O + 4c + q is the sentinel of queue q of cache c.

    flags: (O + 4C,) uint8, the queue; newer, older: (O + 4C,) uint32; used: (C, 4) int64, what each queue holds;
    target: (C,) float64, what T1 should hold, `p` of the paper.
    """

    flags: npt.NDArray[np.uint8]
    newer: npt.NDArray[np.uint32]
    older: npt.NDArray[np.uint32]
    used: npt.NDArray[np.int64]
    target: npt.NDArray[np.float64]


_B1, _B2, _T1, _T2 = 1, 2, 4, 8  # residents are those from _T1 on


def arc_state(caches: Caches, seed: int) -> ArcState:
    """The state of `arc` before the first access."""
    num_objects, num_queues = caches.num_objects, 4 * len(caches.capacities)
    flags = np.zeros(num_objects + num_queues, dtype=np.uint8)
    flags[num_objects:] = _MEMBER
    unlinked = np.arange(num_objects + num_queues, dtype=np.uint32)
    return ArcState(
        flags=flags,
        newer=unlinked,
        older=unlinked.copy(),
        used=np.zeros((num_queues // 4, 4), dtype=np.int64),
        target=np.zeros(num_queues // 4, dtype=np.float64),
    )


@numba.njit(cache=True, nogil=True)
def arc(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """ARC: T1 of objects seen once, T2 of those seen again, and ghosts B1 and B2 of each that move their shares.

    Megiddo, Modha 2003, "ARC: a self-tuning, low overhead replacement cache" (FAST), Figure 4. The target of T1 is a
    real number, as printed there: a ghost hit in B1 adds max(1, |B2| / |B1|), one in B2 takes max(1, |B1| / |B2|).

    Event-atomic: touched and inserted members are the most recent of T1 and T2, so a search meets one only where
    the queue has nobody else; then the victim is the other queue's. A member that waits for its insertion may be
    forgotten as a ghost. With byte sizes, |X| is what X holds, and the target moves by the newcomer's size times as
    much. Before a newcomer s that no ghost remembers, the oldest leave B1, then T1 for good, until |T1| + |B1| + s ≤ c,
    then B2 until all four + s ≤ 2 c; for every newcomer REPLACE runs until it fits. For equal sizes this is Figure 4.
    """
    _walk_arc(state, events, caches.capacities, caches.sizes, caches.admits, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def _walk_arc(state, events, capacities, sizes, admits, atomic, was_hit):  # type: ignore[no-untyped-def]
    flags, newer, older, used, target_of = state
    objects, first_access, event_cache = events.objects, events.first_access, events.cache
    num_caches, num_events = len(capacities), len(event_cache)
    num_objects = len(flags) - 4 * num_caches
    at_once = num_caches == 1 and not atomic
    member = _MEMBER if atomic else 0
    for event in range(min(num_events, 1) if at_once else num_events):
        cache = event_cache[event]
        start, end = first_access[event], first_access[num_events if at_once else event + 1]
        t1 = np.uint32(num_objects + 4 * cache)
        t2, b1, b2 = np.uint32(t1 + 1), np.uint32(t1 + 2), np.uint32(t1 + 3)
        in_t1, in_t2, in_b1, in_b2 = used[cache, 0], used[cache, 1], used[cache, 2], used[cache, 3]
        capacity, target = capacities[cache], target_of[cache]
        fits = capacity
        if atomic:
            num_misses = 0
            for access in range(start, end):
                is_hit = flags[np.uint32(objects[access])] >= _T1
                was_hit[access] = is_hit
                num_misses += not is_hit
            if num_misses > 0:
                fits -= _mark(flags, objects, start, end, _T1, sizes)
            for access in range(start, end):
                if was_hit[access] != 0:
                    moved = _arc_touch(flags, newer, older, t2, sizes, np.uint32(objects[access]))
                    in_t1 -= moved
                    in_t2 += moved
            if num_misses == 0:
                used[cache, 0], used[cache, 1] = in_t1, in_t2
                continue
        for access in range(start, end):
            thing = np.uint32(objects[access])
            flag = flags[thing]
            if not atomic:
                was_hit[access] = flag >= _T1
            elif was_hit[access] != 0:
                continue
            if flag >= _T1:
                moved = _arc_touch(flags, newer, older, t2, sizes, thing)
                in_t1 -= moved
                in_t2 += moved
                continue
            if admits is not None and not admits[thing]:
                continue
            size = 1 if sizes is None else sizes[thing]
            if size > fits:
                continue
            if atomic:
                fits -= size
            if flag == _B1:
                target = min(target + max(in_b2 / in_b1, 1.0) * size, capacity)
                _unlink(newer, older, thing)
                in_b1 -= size
            elif flag == _B2:
                target = max(target - max(in_b1 / in_b2, 1.0) * size, 0.0)
                _unlink(newer, older, thing)
                in_b2 -= size
            else:
                while in_t1 + in_b1 + size > capacity and in_b1 > 0:
                    in_b1 -= _forget(flags, newer, older, b1, sizes)
                while in_t1 + size > capacity:  # B1 is empty, and T1 has more than members, since these fit
                    in_t1 -= _forget(flags, newer, older, t1, sizes)
                while in_t1 + in_t2 + in_b1 + in_b2 + size > 2 * capacity and in_b2 > 0:
                    in_b2 -= _forget(flags, newer, older, b2, sizes)
            while in_t1 + in_t2 + size > capacity:
                once, again = newer[t1], newer[t2]
                is_over = in_t1 > target or (flag == _B2 and in_t1 == target)
                if flags[once] < _MEMBER and (is_over or flags[again] >= _MEMBER):
                    victim_size = 1 if sizes is None else sizes[once]
                    in_t1 -= victim_size
                    in_b1 += victim_size
                    flags[once] = _B1
                    _unlink(newer, older, once)
                    _append(newer, older, b1, once)
                else:
                    victim_size = 1 if sizes is None else sizes[again]
                    in_t2 -= victim_size
                    in_b2 += victim_size
                    flags[again] = _B2
                    _unlink(newer, older, again)
                    _append(newer, older, b2, again)
            if flag == 0:
                in_t1 += size
                flags[thing] = _T1 | member
                _append(newer, older, t1, thing)
            else:
                in_t2 += size
                flags[thing] = _T2 | member
                _append(newer, older, t2, thing)
        used[cache, 0], used[cache, 1], used[cache, 2], used[cache, 3] = in_t1, in_t2, in_b1, in_b2
        target_of[cache] = target
        if atomic:
            _unmark(flags, objects, start, end)


@numba.njit(cache=True, nogil=True, inline="always")
def _arc_touch(flags, newer, older, t2, sizes, thing):  # type: ignore[no-untyped-def]
    """Makes a resident the newest of T2 and returns what T1 loses by that."""
    flag = flags[thing]
    flags[thing] = _T2 | (flag & _MEMBER)
    _unlink(newer, older, thing)
    _append(newer, older, t2, thing)
    return (1 if sizes is None else sizes[thing]) * ((flag & _T1) != 0)


class RandomState(NamedTuple):
    """The residents of each cache in a row, and where the generator of its draws is.

    Cache c keeps its `num_residents[c]` residents in `residents` from the number of its first object on.

    residents: (O,) uint32; place: (O,) int32, an object's place in that row, −1 if absent; num_residents, room: (C,)
    int64; generator: (C,) uint64.
    """

    residents: npt.NDArray[np.uint32]
    place: npt.NDArray[np.int32]
    num_residents: npt.NDArray[np.int64]
    room: npt.NDArray[np.int64]
    generator: npt.NDArray[np.uint64]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@numba.njit(cache=True, nogil=True)
def _mixed(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def random_state(caches: Caches, seed: int) -> RandomState:
    """The state of `random` before the first access; cache c draws from stream c of the seed."""
    num_objects, num_caches = caches.num_objects, len(caches.capacities)
    streams = [(seed + int(_GOLDEN) * (cache + 1)) % 2**64 for cache in range(num_caches)]
    return RandomState(
        residents=np.zeros(num_objects, dtype=np.uint32),
        place=np.full(num_objects, -1, dtype=np.int32),
        num_residents=np.zeros(num_caches, dtype=np.int64),
        room=caches.capacities.astype(np.int64),
        generator=np.array([_mixed(np.uint64(stream)) for stream in streams], dtype=np.uint64),
    )


@numba.njit(cache=True, nogil=True)
def random(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """A resident drawn uniformly leaves (event-atomic: of those that are no members); a hit changes nothing.

    Draws are SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), one stream per
    cache, so that neither threads nor other caches change them. Uniform within 2^-24: a draw is the upper part of a
    product of 44 bits and at most 2^20 residents.
    """
    _walk_random(state, events, caches.capacities, caches.first_object, caches.sizes, caches.admits, atomic, was_hit)


@numba.njit(cache=True, nogil=True)
def _walk_random(  # type: ignore[no-untyped-def]
    state, events, capacities, first_object, sizes, admits, atomic, was_hit
):
    residents, place, num_residents, room_of, generator = state
    objects, first_access, event_cache = events.objects, events.first_access, events.cache
    for event in range(len(event_cache)):
        cache = event_cache[event]
        start, end = first_access[event], first_access[event + 1]
        base = first_object[cache]
        count, room = num_residents[cache], room_of[cache]
        fits = capacities[cache]
        # Residents from this place on are members of the event.
        first_member = count
        if atomic:
            num_misses = 0
            for access in range(start, end):
                is_hit = place[np.uint32(objects[access])] >= 0
                was_hit[access] = is_hit
                num_misses += not is_hit
            if num_misses == 0:
                continue
            for access in range(start, end):
                thing = np.uint32(objects[access])
                at = place[thing]
                if 0 <= at < first_member:
                    first_member -= 1
                    other = residents[base + first_member]
                    residents[base + at], place[other] = other, at
                    residents[base + first_member], place[thing] = thing, first_member
                    fits -= 1 if sizes is None else sizes[thing]
        for access in range(start, end):
            thing = np.uint32(objects[access])
            if not atomic:
                was_hit[access] = place[thing] >= 0
            if place[thing] >= 0:
                continue
            if admits is not None and not admits[thing]:
                continue
            size = 1 if sizes is None else sizes[thing]
            if size > fits:
                continue
            if atomic:
                fits -= size
            while room < size:
                generator[cache] += _GOLDEN
                draw = (_mixed(generator[cache]) >> np.uint64(20)) * np.uint64(first_member)
                at = np.int64(draw >> np.uint64(44))
                victim = residents[base + at]
                room += 1 if sizes is None else sizes[victim]
                # The last that is no member moves to the victim's place, and the last member to that one's.
                first_member -= 1
                count -= 1
                other = residents[base + first_member]
                residents[base + at], place[other] = other, at
                other = residents[base + count]
                if first_member < count:
                    residents[base + first_member], place[other] = other, first_member
                place[victim] = -1
            residents[base + count], place[thing] = thing, count
            count += 1
            room -= size
            if not atomic:
                first_member = count
        num_residents[cache], room_of[cache] = count, room


LEAST_RESIDENT = {HandState: _RESIDENT, S3FifoState: _SMALL, ArcState: _T1}
"""Per kind of state the lowest flags of a resident, between two events."""
