"""The kernel's page cache in a memory-limited group, as policies: `two_list` (the classic lists) and `mglru`.

Modelled are clean pages of files that nobody maps, read whole through descriptors, without swap: what a native replay
with owner `page_cache` does. The contract of a kernel is in `caches`. Fitting and validating against native runs is in
`tests/bench/page_cache_model.py`; device, readahead and time do not belong here.

A folio is what the kernel ages and evicts as one. An object is `folios_per_object` of them, read in order; with sizes
they are near equal parts of it, the larger ones first. An access hits if all its folios are resident; a part of them
is a miss that reads the rest. A state whose `missing` is not empty (`state._replace(missing=array)`) gets there the
folios that each access of the chunk found absent. Lists, ages and batches count folios, capacities alone have the unit
of the sizes, so that a model of coarse folios keeps the proportions of one of pages.

A group of accesses is what is in flight at once: an event in event-atomic semantics, else one access. It is classified
as a whole, its hits are touched in order, then its misses are read in order, folio by folio: a resident folio is
touched, an absent one inserted. Reclaim passes over the folios of the group's objects and leaves them where they are,
as the kernel does with locked pages; if all others together do not make room, the folio is served and not admitted.

Letters: A accesses, O objects, C caches, F folios.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from replayer.caches import Caches

PAGE_BYTES = 4096
RECLAIM_PAGES = 32
"""Pages that are reclaimed at once at the limit of a group (SWAP_CLUSTER_MAX)."""

MGLRU_BATCH_PAGES = 64
"""Pages that the multi-generational LRU evicts at once (MIN_LRU_BATCH)."""

AT_EVERY_RECLAIM = -1
"""`refresh_accesses` of kernels that bring a group's statistics up to date whenever they reclaim from it."""

_COARSE_FOLIO_BYTES = 2**20  # of a whole expert whose size nobody knows
_DEFAULT_PRIORITY = 12  # the first scan looks at a 4096th of each list, every further one at twice as much

_RESIDENT, _REFERENCED, _ACTIVE = 1, 2, 4
(_INACTIVE_FOLIOS, _ACTIVE_FOLIOS, _USED, _AGE, _REFAULTS, _SEEN_REFAULTS, _KNOWN_INACTIVE, _KNOWN_ACTIVE,
 _KNOWN_REFAULTS, _COUNTS) = range(10)  # fmt: skip
_PARTS, _BATCH, _FOLIOS_PER_GIB, _REFRESH, _ACCESSES, _GROUP, _SETTINGS = range(7)


class TwoListState(NamedTuple):
    """Both lists of each cache, and what its reclaim counts.

    newer, older: (F + 2C,) int32 neighbours; the inactive list of cache c runs through node F + 2c, its active list
    through F + 2c + 1. flags: (F,) resident, referenced, active. evicted_at: (F,) age at the last eviction, −1 before
    it. resident: (O,) resident folios; group_of: (O,) the last group that named an object. counts: (C, …); setting:
    (…,). missing: (A,) int32, or empty.
    """

    newer: npt.NDArray[np.int32]
    older: npt.NDArray[np.int32]
    flags: npt.NDArray[np.uint8]
    evicted_at: npt.NDArray[np.int64]
    resident: npt.NDArray[np.int32]
    group_of: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    setting: npt.NDArray[np.int64]
    missing: npt.NDArray[np.int32]


def two_list_state(
    caches: Caches,
    seed: int = 0,
    folios_per_object: int = 1,
    *,
    folio_bytes: int | None = None,
    refresh_accesses: int = 0,
) -> TwoListState:
    """Empty lists.

    folio_bytes decides how many folios are reclaimed at once and when lists count as larger than 1 GiB; null: from the
    sizes, without sizes a page, or 1 MiB where an object is one folio. refresh_accesses: list sizes and refaults are
    known as they were at the last multiple of so many accesses; AT_EVERY_RECLAIM: as they are; 0: sizes as they are,
    and refaults alone never deactivate. `seed` is not used.
    """
    del seed
    num_folios, num_caches = caches.num_objects * folios_per_object, len(caches.capacities)
    return TwoListState(
        newer=_empty_lists(num_folios, 2 * num_caches),
        older=_empty_lists(num_folios, 2 * num_caches),
        flags=np.zeros(num_folios, dtype=np.uint8),
        evicted_at=np.full(num_folios, -1, dtype=np.int64),
        resident=np.zeros(caches.num_objects, dtype=np.int32),
        group_of=np.full(caches.num_objects, -1, dtype=np.int64),
        counts=np.zeros((num_caches, _COUNTS), dtype=np.int64),
        setting=_setting(caches, folios_per_object, folio_bytes, RECLAIM_PAGES, refresh_accesses),
        missing=np.zeros(0, dtype=np.int32),
    )


def _empty_lists(num_folios: int, num_lists: int) -> npt.NDArray[np.int32]:
    return np.arange(num_folios + num_lists, dtype=np.int32)


def _setting(
    caches: Caches, folios_per_object: int, folio_bytes: int | None, batch_pages: int, refresh_accesses: int
) -> npt.NDArray[np.int64]:
    if folio_bytes is None and caches.sizes is not None and caches.num_objects:
        folio_bytes = math.ceil(int(caches.sizes.sum()) / (caches.num_objects * folios_per_object))
    if folio_bytes is None:
        folio_bytes = PAGE_BYTES if folios_per_object > 1 else _COARSE_FOLIO_BYTES
    setting = np.zeros(_SETTINGS, dtype=np.int64)
    setting[_PARTS] = folios_per_object
    setting[_BATCH] = max(batch_pages * PAGE_BYTES // max(folio_bytes, 1), 1)
    setting[_FOLIOS_PER_GIB] = max(2**30 // max(folio_bytes, 1), 1)
    setting[_REFRESH] = refresh_accesses
    return setting


@numba.njit(cache=True, nogil=True)
def two_list(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """The active and the inactive list of files with refault distance, as in Linux 6.18 without MGLRU.

    A read of an absent folio puts it on the inactive list, referenced; a second read of one that is referenced and
    inactive activates it. Neither list is reordered by reads of folios that are active or not yet referenced, so both
    are queues. An evicted folio that is read again enters the active list if its refault distance, what was evicted
    or activated meanwhile, is at most the length of that list.

    At the limit 32 pages or a little more are reclaimed at once: scans from a 4096th of each list on, doubled until
    enough is gone, evict the oldest of the inactive list whether they are referenced or not, and move a like part of
    the active list over (folios keep their reference), the latter only while inactive × ratio < active, or refaults
    entered the active list since the last reclaim. Ratio is 1 below 1 GiB, then int(√(10 × GiB)).

    A group's statistics, by which this is decided, were brought up to date at every reclaim until "memcg: use
    ratelimited stats flush in the reclaim" (August 2024), and are every two seconds since. A model knows no seconds: by
    default sizes are right, and refaults, which are seen once in two seconds then, are left out.

    Left out as well: batches of each processor (31 folios), and the order in which threads reach the lists.
    Sources: mm/vmscan.c, mm/workingset.c, mm/swap.c and mm/filemap.c of Linux; the comment that opens workingset.c.
    """
    _two_list(state.newer, state.older, state.flags, state.evicted_at, state.resident, state.group_of, state.counts,
              state.setting, state.missing, events.objects, events.first_access, events.cache, caches.sizes,
              caches.capacities, caches.admits, atomic, was_hit)  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _size(sizes, thing, part, parts):  # type: ignore[no-untyped-def]
    """Size of a folio: the first size % parts of an object are one larger than its others."""
    if sizes is None:
        return np.int64(1)
    return sizes[thing] // parts + (part < sizes[thing] % parts)


@numba.njit(cache=True, nogil=True)
def _capacity(sizes, capacity, parts):  # type: ignore[no-untyped-def]
    if sizes is None:
        return capacity * parts
    return capacity


@numba.njit(cache=True, nogil=True)
def _fits(sizes, admits, thing, capacity, parts):  # type: ignore[no-untyped-def]
    """Whether an object may enter at all."""
    if admits is not None and not admits[thing]:
        return False
    if sizes is None:
        return parts <= capacity
    return sizes[thing] <= capacity


@numba.njit(cache=True, nogil=True)
def _unlink(newer, older, node):  # type: ignore[no-untyped-def]
    newer[older[node]] = newer[node]
    older[newer[node]] = older[node]


@numba.njit(cache=True, nogil=True)
def _push(newer, older, sentinel, node):  # type: ignore[no-untyped-def]
    """Makes a node the newest of a list."""
    newest = older[sentinel]
    older[sentinel] = node
    newer[node] = sentinel
    older[node] = newest
    newer[newest] = node


@numba.njit(cache=True, nogil=True)
def _in_flight(sizes, flags, resident, thing, parts):  # type: ignore[no-untyped-def]
    """Size of an object's resident folios; the lowest bit of a flag says that a folio is."""
    if sizes is None:
        return np.int64(resident[thing])
    if resident[thing] == parts:
        return sizes[thing]
    total = np.int64(0)
    if resident[thing]:
        for part in range(parts):
            if flags[thing * parts + part] & _RESIDENT:
                total += _size(sizes, thing, part, parts)
    return total


@numba.njit(cache=True, nogil=True)
def _two_list(  # type: ignore[no-untyped-def]
    newer, older, flags, evicted_at, resident, group_of, counts, setting, missing, objects, first_access, cache, sizes,
    capacities, admits, atomic, was_hit,
):  # fmt: skip
    parts, refresh = setting[_PARTS], setting[_REFRESH]
    num_folios = len(flags)
    for event in range(len(cache)):
        which = cache[event]
        mine = counts[which]
        inactive = num_folios + 2 * which
        capacity = _capacity(sizes, capacities[which], parts)
        begin = first_access[event]
        while begin < first_access[event + 1]:
            end = first_access[event + 1] if atomic else begin + 1
            setting[_GROUP] += 1
            group = setting[_GROUP]
            protected = np.int64(0)
            for access in range(begin, end):
                thing = objects[access]
                if refresh > 0:
                    if setting[_ACCESSES] % refresh == 0:
                        counts[:, _KNOWN_INACTIVE] = counts[:, _INACTIVE_FOLIOS]
                        counts[:, _KNOWN_ACTIVE] = counts[:, _ACTIVE_FOLIOS]
                        counts[:, _KNOWN_REFAULTS] = counts[:, _REFAULTS]
                    setting[_ACCESSES] += 1
                was_hit[access] = resident[thing] == parts
                if len(missing) > 0:
                    missing[access] = parts - resident[thing]
                if group_of[thing] != group:
                    group_of[thing] = group
                    protected += _in_flight(sizes, flags, resident, thing, parts)
            for turn in range(2):
                for access in range(begin, end):
                    thing = objects[access]
                    if was_hit[access] == turn or not _fits(sizes, admits, thing, capacity, parts):
                        continue
                    for part in range(parts):
                        folio = thing * parts + part
                        if flags[folio] & _RESIDENT:
                            if not flags[folio] & _REFERENCED:
                                flags[folio] |= _REFERENCED
                            elif not flags[folio] & _ACTIVE:
                                _unlink(newer, older, folio)
                                _push(newer, older, inactive + 1, folio)
                                flags[folio] = _RESIDENT | _ACTIVE
                                mine[_INACTIVE_FOLIOS] -= 1
                                mine[_ACTIVE_FOLIOS] += 1
                                mine[_AGE] += 1
                            continue
                        size = _size(sizes, thing, part, parts)
                        if mine[_USED] + size > capacity:
                            if protected + size > capacity:
                                continue
                            _reclaim_two_list(newer, older, flags, evicted_at, resident, group_of, mine, setting,
                                              inactive, group, sizes, capacity - size)  # fmt: skip
                        protected += size
                        mine[_USED] += size
                        resident[thing] += 1
                        longest = mine[_KNOWN_ACTIVE] if refresh > 0 else mine[_ACTIVE_FOLIOS]
                        if evicted_at[folio] >= 0 and mine[_AGE] - evicted_at[folio] <= longest:
                            flags[folio] = _RESIDENT | _REFERENCED | _ACTIVE
                            _push(newer, older, inactive + 1, folio)
                            mine[_ACTIVE_FOLIOS] += 1
                            mine[_REFAULTS] += 1
                            mine[_AGE] += 1
                        else:
                            flags[folio] = _RESIDENT | _REFERENCED
                            _push(newer, older, inactive, folio)
                            mine[_INACTIVE_FOLIOS] += 1
            begin = end


@numba.njit(cache=True, nogil=True)
def _reclaim_two_list(  # type: ignore[no-untyped-def]
    newer, older, flags, evicted_at, resident, group_of, mine, setting, inactive, group, sizes, wanted
):
    """Reclaims until at most `wanted` is used; there must be so much outside the group."""
    parts, batch = setting[_PARTS], setting[_BATCH]
    while mine[_USED] > wanted:
        low, high, refaults = mine[_INACTIVE_FOLIOS], mine[_ACTIVE_FOLIOS], mine[_SEEN_REFAULTS]
        if setting[_REFRESH] == AT_EVERY_RECLAIM:
            refaults = mine[_REFAULTS]
        elif setting[_REFRESH] > 0:
            low, high, refaults = mine[_KNOWN_INACTIVE], mine[_KNOWN_ACTIVE], mine[_KNOWN_REFAULTS]
        gib = (low + high) // setting[_FOLIOS_PER_GIB]
        ratio = np.int64(math.sqrt(10.0 * gib)) if gib > 0 else 1
        deactivates = low * ratio < high or refaults != mine[_SEEN_REFAULTS]
        mine[_SEEN_REFAULTS] = refaults
        reclaimed = 0
        # The last folio of each list that belongs to the group, so that nobody walks over it twice.
        passed_inactive, passed_active = inactive, inactive + 1
        # Once more, and deactivating, where nothing could be reclaimed.
        for _ in range(2):
            for priority in range(_DEFAULT_PRIORITY, -1, -1):
                to_evict = mine[_INACTIVE_FOLIOS] >> priority
                to_deactivate = mine[_ACTIVE_FOLIOS] >> priority if deactivates else 0
                gone = 0
                while to_evict > 0 or to_deactivate > 0:
                    for _ in range(min(to_evict, batch)):
                        folio = newer[passed_inactive]
                        while folio != inactive and group_of[folio // parts] == group:
                            passed_inactive = folio
                            folio = newer[folio]
                        if folio == inactive:
                            break
                        _unlink(newer, older, folio)
                        flags[folio] = 0
                        evicted_at[folio] = mine[_AGE]
                        mine[_AGE] += 1
                        mine[_INACTIVE_FOLIOS] -= 1
                        resident[folio // parts] -= 1
                        mine[_USED] -= _size(sizes, folio // parts, folio % parts, parts)
                        gone += 1
                    for _ in range(min(to_deactivate, batch)):
                        folio = newer[passed_active]
                        while folio != inactive + 1 and group_of[folio // parts] == group:
                            passed_active = folio
                            folio = newer[folio]
                        if folio == inactive + 1:
                            break
                        _unlink(newer, older, folio)
                        _push(newer, older, inactive, folio)
                        flags[folio] &= ~_ACTIVE
                        mine[_ACTIVE_FOLIOS] -= 1
                        mine[_INACTIVE_FOLIOS] += 1
                    to_evict -= batch
                    to_deactivate -= batch
                    if gone >= batch:
                        break
                reclaimed += gone
                if reclaimed >= batch:
                    break
            if reclaimed > 0:
                break
            deactivates = True


_GENERATIONS, _LEAST_GENERATIONS, _TIERS = 4, 2, 4
_MOST_READS = 5  # further ones are not counted
_ABSENT = 255  # in `reads`: the folio is not resident
(_OLDEST, _YOUNGEST, _HELD, _FIRST_SIZE, _REFAULTED, _EVICTED, _PROTECTED, _MEAN_REFAULTED, _MEAN_TOTAL,
 _GENERATION_COUNTS) = (0, 1, 2, 3, 7, 11, 15, 19, 23, 27)  # fmt: skip


class MglruState(NamedTuple):
    """The generations of each cache, and what their feedback counts.

    newer, older: (F + 4C,) int32 neighbours; generation g of cache c runs through node F + 4c + g % 4. reads: (F,) of
    a folio since it came or moved, 255 while it is absent. evicted_in: (F,) the oldest generation at the last eviction,
    −1 before it; evicted_reads: (F,) its reads then. isolated: a batch on its way out. Others as in TwoListState.
    """

    newer: npt.NDArray[np.int32]
    older: npt.NDArray[np.int32]
    reads: npt.NDArray[np.uint8]
    evicted_in: npt.NDArray[np.int64]
    evicted_reads: npt.NDArray[np.uint8]
    resident: npt.NDArray[np.int32]
    group_of: npt.NDArray[np.int64]
    isolated: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    setting: npt.NDArray[np.int64]
    missing: npt.NDArray[np.int32]


def mglru_state(
    caches: Caches, seed: int = 0, folios_per_object: int = 1, *, folio_bytes: int | None = None
) -> MglruState:
    """Four empty generations; folio_bytes as in `two_list_state`. `seed` is not used."""
    del seed
    num_folios, num_caches = caches.num_objects * folios_per_object, len(caches.capacities)
    setting = _setting(caches, folios_per_object, folio_bytes, MGLRU_BATCH_PAGES, 0)
    counts = np.zeros((num_caches, _GENERATION_COUNTS), dtype=np.int64)
    counts[:, _YOUNGEST] = _GENERATIONS - 1
    return MglruState(
        newer=_empty_lists(num_folios, _GENERATIONS * num_caches),
        older=_empty_lists(num_folios, _GENERATIONS * num_caches),
        reads=np.full(num_folios, _ABSENT, dtype=np.uint8),
        evicted_in=np.full(num_folios, -1, dtype=np.int64),
        evicted_reads=np.zeros(num_folios, dtype=np.uint8),
        resident=np.zeros(caches.num_objects, dtype=np.int32),
        group_of=np.full(caches.num_objects, -1, dtype=np.int64),
        isolated=np.zeros(int(setting[_BATCH]), dtype=np.int32),
        counts=counts,
        setting=setting,
        missing=np.zeros(0, dtype=np.int32),
    )


@numba.njit(cache=True, nogil=True)
def mglru(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """The multi-generational LRU of files, as in Linux 6.12. Not validated: no native run stands beside it yet.

    Two to four generations. A folio that is read enters the second oldest of four, else the oldest; reads through
    descriptors move no folio, they are counted, and n of them make tier ⌈log₂ n⌉. Eviction takes batches of 64 pages
    from the oldest generation. A folio of a tier above the highest one that feedback lets go, or one read five times,
    is moved to the old end of the next generation instead, and its count begins anew. Feedback lets tiers go up to the
    first whose share of refaults is more than twice tier 0's; its counts are averaged over generations, each halving
    the ones before. A folio counts as refaulted if no generation has ended since its eviction, and with four reads then
    it counts as read five times. A new youngest generation begins where but two are left, or where three are and the
    youngest holds more than half of all or the oldest less than a quarter.

    Left out: page tables, anonymous memory, time to live, batches of each processor. A generation whose other folios
    are gone while the group's stay keeps being the oldest, and the next one is looked at.
    Sources: Documentation/mm/multigen_lru.rst, mm/vmscan.c, mm/workingset.c, include/linux/mm_inline.h of Linux 6.12.
    """
    _mglru(state.newer, state.older, state.reads, state.evicted_in, state.evicted_reads, state.resident, state.group_of,
           state.isolated, state.counts, state.setting, state.missing, events.objects, events.first_access,
           events.cache, caches.sizes, caches.capacities, caches.admits, atomic, was_hit)  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _tier(reads):  # type: ignore[no-untyped-def]
    """⌈log₂ reads⌉: 0, 1, 2, 2, 3 of one to five."""
    if reads <= 1:
        return 0
    if reads == 2:
        return 1
    return 2 if reads <= 4 else 3


@numba.njit(cache=True, nogil=True)
def _mglru(  # type: ignore[no-untyped-def]
    newer, older, reads, evicted_in, evicted_reads, resident, group_of, isolated, counts, setting, missing,
    objects, first_access, cache, sizes, capacities, admits, atomic, was_hit,
):  # fmt: skip
    parts = setting[_PARTS]
    num_folios = len(reads)
    for event in range(len(cache)):
        which = cache[event]
        mine = counts[which]
        lists = num_folios + _GENERATIONS * which
        capacity = _capacity(sizes, capacities[which], parts)
        begin = first_access[event]
        while begin < first_access[event + 1]:
            end = first_access[event + 1] if atomic else begin + 1
            setting[_GROUP] += 1
            group = setting[_GROUP]
            protected = np.int64(0)
            for access in range(begin, end):
                thing = objects[access]
                was_hit[access] = resident[thing] == parts
                if len(missing) > 0:
                    missing[access] = parts - resident[thing]
                if group_of[thing] != group:
                    group_of[thing] = group
                    protected += _resident_size(sizes, reads, resident, thing, parts)
            for turn in range(2):
                for access in range(begin, end):
                    thing = objects[access]
                    if was_hit[access] == turn or not _fits(sizes, admits, thing, capacity, parts):
                        continue
                    for part in range(parts):
                        folio = thing * parts + part
                        if reads[folio] != _ABSENT:
                            reads[folio] = min(reads[folio] + 1, _MOST_READS)
                            continue
                        size = _size(sizes, thing, part, parts)
                        if mine[_HELD] + size > capacity:
                            if protected + size > capacity:
                                continue
                            _reclaim_mglru(newer, older, reads, evicted_in, evicted_reads, resident,
                                           group_of, isolated, mine, setting, lists, group, sizes,
                                           capacity - size)  # fmt: skip
                        protected += size
                        mine[_HELD] += size
                        resident[thing] += 1
                        reads[folio] = 1
                        if evicted_in[folio] == mine[_OLDEST]:
                            mine[_REFAULTED + _tier(evicted_reads[folio])] += 1
                            if evicted_reads[folio] >= _MOST_READS - 1:
                                reads[folio] = _MOST_READS
                        generation = mine[_OLDEST]
                        if mine[_OLDEST] + _LEAST_GENERATIONS < mine[_YOUNGEST]:
                            generation += 1
                        mine[_FIRST_SIZE + generation % _GENERATIONS] += 1
                        _push(newer, older, lists + generation % _GENERATIONS, folio)
            begin = end


@numba.njit(cache=True, nogil=True)
def _resident_size(sizes, reads, resident, thing, parts):  # type: ignore[no-untyped-def]
    """Size of an object's resident folios."""
    if sizes is None:
        return np.int64(resident[thing])
    total = np.int64(0)
    for part in range(parts):
        if reads[thing * parts + part] != _ABSENT:
            total += _size(sizes, thing, part, parts)
    return total


@numba.njit(cache=True, nogil=True)
def _highest_tier_to_evict(mine, batch):  # type: ignore[no-untyped-def]
    """The last tier before the first one that refaults more than twice as much as tier 0, for its size."""
    refaulted = mine[_MEAN_REFAULTED] + mine[_REFAULTED]
    total = mine[_MEAN_TOTAL] + mine[_EVICTED]
    for tier in range(1, _TIERS):
        tier_refaulted = mine[_MEAN_REFAULTED + tier] + mine[_REFAULTED + tier]
        tier_total = mine[_MEAN_TOTAL + tier] + mine[_EVICTED + tier] + mine[_PROTECTED + tier]
        few = tier_refaulted < batch
        if not few and tier_refaulted * (total + batch) > (refaulted + 1) * tier_total * 2:
            return tier - 1
    return _TIERS - 1


@numba.njit(cache=True, nogil=True)
def _end_empty_generations(mine):  # type: ignore[no-untyped-def]
    """Lets the next generation be the oldest where that one is empty; returns whether any ended."""
    ended = False
    while mine[_OLDEST] + _LEAST_GENERATIONS <= mine[_YOUNGEST]:
        if mine[_FIRST_SIZE + mine[_OLDEST] % _GENERATIONS]:
            break
        mine[_OLDEST] += 1
        ended = True
        for tier in range(_TIERS):
            total = mine[_EVICTED + tier] + mine[_PROTECTED + tier]
            mine[_MEAN_REFAULTED + tier] = (mine[_MEAN_REFAULTED + tier] + mine[_REFAULTED + tier]) // 2
            mine[_MEAN_TOTAL + tier] = (mine[_MEAN_TOTAL + tier] + total) // 2
            mine[_REFAULTED + tier] = 0
            mine[_EVICTED + tier] = 0
            mine[_PROTECTED + tier] = 0
    return ended


@numba.njit(cache=True, nogil=True)
def _evict_batch(  # type: ignore[no-untyped-def]
    newer, older, reads, evicted_in, evicted_reads, resident, group_of, isolated, mine, setting, lists, group,
    sizes, least,
):  # fmt: skip
    """(folios looked at, folios evicted) of the oldest generation with folios outside the group; `least` stay alone."""
    parts, batch = setting[_PARTS], setting[_BATCH]
    num_isolated, scanned = 0, 0
    highest = _highest_tier_to_evict(mine, batch)
    generation = mine[_OLDEST]
    while generation + least <= mine[_YOUNGEST] and scanned == 0:
        slot = generation % _GENERATIONS
        following = (generation + 1) % _GENERATIONS
        passed = lists + slot
        # Each one that is protected goes to the very end of the next generation, so the last of them is the next there.
        old_end = lists + following
        while scanned < 64 * batch and num_isolated < batch:
            folio = newer[passed]
            while folio != lists + slot and group_of[folio // parts] == group:
                passed = folio
                folio = newer[folio]
            if folio == lists + slot:
                break
            scanned += 1
            _unlink(newer, older, folio)
            mine[_FIRST_SIZE + slot] -= 1
            tier = _tier(reads[folio])
            if generation < mine[_YOUNGEST] and (tier > highest or reads[folio] == _MOST_READS):
                above = newer[old_end]
                newer[old_end] = folio
                older[folio] = old_end
                newer[folio] = above
                older[above] = folio
                mine[_FIRST_SIZE + following] += 1
                mine[_PROTECTED + tier] += 1
                reads[folio] = 0
            else:
                isolated[num_isolated] = folio
                num_isolated += 1
        generation += 1
    if _end_empty_generations(mine):
        scanned += 1
    for place in range(num_isolated):
        folio = isolated[place]
        evicted_in[folio] = mine[_OLDEST]
        evicted_reads[folio] = reads[folio]
        mine[_EVICTED + _tier(reads[folio])] += 1
        reads[folio] = _ABSENT
        resident[folio // parts] -= 1
        mine[_HELD] -= _size(sizes, folio // parts, folio % parts, parts)
    return scanned, num_isolated


@numba.njit(cache=True, nogil=True)
def _reclaim_mglru(  # type: ignore[no-untyped-def]
    newer, older, reads, evicted_in, evicted_reads, resident, group_of, isolated, mine, setting, lists, group,
    sizes, wanted,
):  # fmt: skip
    """Reclaims until at most `wanted` is held; there must be so much outside the group."""
    batch = setting[_BATCH]
    while mine[_HELD] > wanted:
        reclaimed = 0
        for priority in range(_DEFAULT_PRIORITY, -1, -1):
            scanned = 0
            while True:
                total = np.int64(0)
                for slot in range(_GENERATIONS):
                    total += mine[_FIRST_SIZE + slot]
                spread = mine[_YOUNGEST] - mine[_OLDEST]
                youngest = mine[_FIRST_SIZE + mine[_YOUNGEST] % _GENERATIONS]
                oldest = mine[_FIRST_SIZE + mine[_OLDEST] % _GENERATIONS]
                ages = spread < _LEAST_GENERATIONS or (
                    spread == _LEAST_GENERATIONS and (youngest * 2 > total or oldest * 4 < total)
                )
                if ages and priority < _DEFAULT_PRIORITY:
                    mine[_YOUNGEST] += 1
                    break
                to_scan = total >> priority
                if to_scan == 0 or spread < _LEAST_GENERATIONS:
                    break
                looked_at, evicted = _evict_batch(
                    newer, older, reads, evicted_in, evicted_reads, resident, group_of, isolated, mine,
                    setting, lists, group, sizes, _LEAST_GENERATIONS,
                )  # fmt: skip
                reclaimed += evicted
                scanned += looked_at
                if looked_at == 0 or mine[_YOUNGEST] - mine[_OLDEST] < _LEAST_GENERATIONS or scanned >= to_scan:
                    break
            # The reclaim asks for RECLAIM_PAGES, half a batch.
            if 2 * reclaimed >= batch:
                break
        if reclaimed == 0:
            # All others are the group's own: look at the youngest generations as well.
            _evict_batch(newer, older, reads, evicted_in, evicted_reads, resident, group_of, isolated, mine,
                         setting, lists, group, sizes, 0)  # fmt: skip
