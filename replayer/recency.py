"""Policies that order residents by their last use, as kernels: LRU, LRU by a token clock, a pinned table beside LRU.

The contract of a kernel is in `caches`. The recency stack of LRU is a ring of slots: from the top down to the bottom,
then the vacant slots, then the top again. A miss turns the ring by one slot instead of relinking anything, and the two
neighbours of a slot lie side by side. The token clock inserts below the top; its list is of objects, through a
sentinel per cache.

Letters: O objects, C caches, S slots.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from replayer.caches import Caches

_OUTSIDE = -1  # not resident


class RecencyState(NamedTuple):
    """The rings of all caches, one after the other.

    slot: (O,) int32 of a resident, else OUTSIDE; links: (2 S,) int32, the slot above and the one below of each;
    thing_in: (S,) int32; top, bottom: (C,) slots; used: (C,).
    """

    slot: npt.NDArray[np.int32]
    links: npt.NDArray[np.int32]
    thing_in: npt.NDArray[np.int32]
    top: npt.NDArray[np.int64]
    bottom: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]


class TokenClockState(NamedTuple):
    """newer, older: (O + C,) int32 neighbours; used: (C,); last_step: (O,)."""

    newer: npt.NDArray[np.int32]
    older: npt.NDArray[np.int32]
    used: npt.NDArray[np.int64]
    last_step: npt.NDArray[np.int64]


class PinnedState(NamedTuple):
    """A recency state beside the objects that never leave (O,) and what they leave of each capacity (C,)."""

    stack: RecencyState
    pinned: npt.NDArray[np.bool_]
    capacities: npt.NDArray[np.int64]


class TableState(NamedTuple):
    """(O,) the objects that are resident from the first access to the last."""

    table: npt.NDArray[np.bool_]


def lru_state(caches: Caches, seed: int = 0) -> RecencyState:
    """Rings of vacant slots; `seed` is not used."""
    del seed
    slots = np.diff(caches.first_object)
    if caches.sizes is None:
        slots = np.minimum(slots, caches.capacities)
    first = np.concatenate([[0], np.cumsum(slots)])
    links = np.empty((first[-1], 2), dtype=np.int32)
    links[:, 0] = np.arange(-1, first[-1] - 1)
    links[:, 1] = np.arange(1, first[-1] + 1)
    inhabited = slots > 0
    links[first[:-1][inhabited], 0] = first[1:][inhabited] - 1
    links[first[1:][inhabited] - 1, 1] = first[:-1][inhabited]
    return RecencyState(
        slot=np.full(caches.num_objects, _OUTSIDE, dtype=np.int32),
        links=links.ravel(),
        thing_in=np.full(first[-1], _OUTSIDE, dtype=np.int32),
        top=first[:-1].copy(),
        # Above the top, so that the first to enter becomes the bottom when it is the only one.
        bottom=np.full(len(slots), _OUTSIDE, dtype=np.int64),
        used=np.zeros(len(slots), dtype=np.int64),
    )


def token_clock_state(caches: Caches, seed: int = 0) -> TokenClockState:
    """Empty stacks; `seed` is not used."""
    del seed
    num_objects, num_caches = caches.num_objects, len(caches.capacities)
    newer = np.full(num_objects + num_caches, _OUTSIDE, dtype=np.int32)
    newer[num_objects:] = np.arange(num_objects, num_objects + num_caches)
    nothing = np.zeros(num_caches, dtype=np.int64)
    return TokenClockState(newer, newer.copy(), nothing, np.full(num_objects, -1, dtype=np.int64))


def pinned_lru_state(caches: Caches, counts: npt.NDArray[np.int64], pinned_fraction: float) -> PinnedState:
    """floor(pinned_fraction × capacity) of each cache holds its most accessed objects, the rest is LRU.

    Objects that the fit never saw are not pinned; what the table leaves of its part belongs to the LRU.
    """
    part = np.floor(pinned_fraction * caches.capacities).astype(np.int64)
    pinned = static_table(counts, caches.sizes, part, caches.first_object) & (counts > 0)
    sizes = pinned.astype(np.int64) if caches.sizes is None else np.where(pinned, caches.sizes, 0)
    sums = np.concatenate([[0], np.cumsum(sizes)])
    left = caches.capacities - np.diff(sums[caches.first_object])
    return PinnedState(lru_state(caches._replace(capacities=left)), pinned, left)


def static_state(caches: Caches, counts: npt.NDArray[np.int64]) -> TableState:
    """The table of the most accessed objects of each cache."""
    return TableState(static_table(counts, caches.sizes, caches.capacities, caches.first_object))


def static_table(
    counts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64] | None,
    capacities: npt.NDArray[np.int64],
    first_object: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """The most accessed objects of each cache, as a mask (O,): in order of count, ties to the lowest (layer, expert).

    An object that no longer fits is passed over and smaller ones further down are still taken; with equal sizes this
    is the top c, filled up with objects never accessed where fewer than c were.
    """
    chosen = np.zeros(int(first_object[-1]), dtype=bool)
    for cache, capacity in enumerate(capacities):
        begin, end = first_object[cache], first_object[cache + 1]
        ranked = begin + np.argsort(-counts[begin:end], kind="stable")
        if sizes is None:
            chosen[ranked[:capacity]] = True
            continue
        room = capacity
        for thing in ranked:
            if sizes[thing] <= room:
                chosen[thing] = True
                room -= sizes[thing]
    return chosen


@numba.njit(cache=True, nogil=True)
def lru(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """Least recently used: resident is the longest prefix of the recency stack that fits.

    In event-atomic semantics the event's members move to the top in the order walked, the last on top, and the stack
    is cut once, afterwards. Mattson et al. 1970, "Evaluation techniques for storage hierarchies".
    """
    # None instead of False, here and where there are no sizes: what is not needed is left out when it is compiled.
    if atomic:
        _lru(state.slot, state.links, state.thing_in, state.top, state.bottom, state.used, None, events.objects,
             events.first_access, events.cache, caches.sizes, caches.capacities, caches.admits, True,
             was_hit)  # fmt: skip
    else:
        _lru(state.slot, state.links, state.thing_in, state.top, state.bottom, state.used, None, events.objects,
             events.first_access, events.cache, caches.sizes, caches.capacities, caches.admits, None,
             was_hit)  # fmt: skip


@numba.njit(cache=True, nogil=True)
def pinned_lru(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """Pinned objects always hit and take no part in the stack; all others share what is left, by LRU."""
    stack = state.stack
    if atomic:
        _lru(stack.slot, stack.links, stack.thing_in, stack.top, stack.bottom, stack.used, state.pinned, events.objects,
             events.first_access, events.cache, caches.sizes, state.capacities, caches.admits, True,
             was_hit)  # fmt: skip
    else:
        _lru(stack.slot, stack.links, stack.thing_in, stack.top, stack.bottom, stack.used, state.pinned, events.objects,
             events.first_access, events.cache, caches.sizes, state.capacities, caches.admits, None,
             was_hit)  # fmt: skip


@numba.njit(cache=True, nogil=True)
def static(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """A fixed table: nothing enters, nothing leaves, in either semantics."""
    for access in range(len(events.objects)):
        was_hit[access] = state.table[events.objects[access]]


@numba.njit(cache=True, nogil=True)
def _lru(  # type: ignore[no-untyped-def]
    slots, links, thing_in, tops, bottoms, used, pinned, objects, first_access, cache, sizes, capacities, admits,
    at_once, was_hit,
):  # fmt: skip
    # What lies above an object only grows until it is accessed again, so cutting the stack after every access leaves
    # the same residents as cutting it once after the event: the semantics differ in when hits are looked up, alone.
    for event in range(len(cache)):
        which = cache[event]
        capacity, held, top = capacities[which], used[which], tops[which]
        bottom = bottoms[which]
        start, end = first_access[event], first_access[event + 1]
        if at_once is not None:
            for access in range(start, end):
                was_hit[access] = slots[objects[access]] >= 0
        # The slot that the ring has above the top: a vacant one, or the bottom.
        last = np.int64(0)
        if capacity > 0:
            last = np.int64(links[2 * top])
        for access in range(start, end):
            thing = objects[access]
            if pinned is not None and pinned[thing]:
                was_hit[access] = 1
                continue
            slot = np.int64(slots[thing])
            if at_once is None:
                was_hit[access] = slot >= 0
            if slot >= 0:
                if slot == top:
                    continue
                above = np.int64(links[2 * slot])
                if sizes is not None and slot == bottom:
                    bottom = above
                if slot == last:
                    last = above
                else:
                    below = np.int64(links[2 * slot + 1])
                    links[2 * above + 1] = below
                    links[2 * below] = above
                    links[2 * slot] = last
                    links[2 * slot + 1] = top
                    links[2 * last + 1] = slot
                    links[2 * top] = slot
                top = slot
                continue
            if admits is not None and not admits[thing]:
                continue
            if sizes is None:
                if capacity == 0:
                    continue
                if held == capacity:
                    slots[thing_in[last]] = _OUTSIDE
                else:
                    held += 1
            else:
                if sizes[thing] > capacity:
                    continue
                while held + sizes[thing] > capacity:
                    held -= sizes[thing_in[bottom]]
                    slots[thing_in[bottom]] = _OUTSIDE
                    bottom = np.int64(links[2 * bottom])
                if held == 0:
                    bottom = last
                held += sizes[thing]
            thing_in[last] = thing
            slots[thing] = last
            top = last
            last = np.int64(links[2 * last])
        used[which], tops[which], bottoms[which] = held, top, bottom


@numba.njit(cache=True, nogil=True)
def token_clock(state, events, caches, atomic, was_hit):  # type: ignore[no-untyped-def]
    """LRU whose clock ticks once a step: walked access by access, victims by (last step, layer, expert).

    Among equally old residents the lowest (layer, expert) leaves, members of the current step included. `atomic` is
    not used: this is a semantics of its own.
    """
    _token_clock(state.newer, state.older, state.used, state.last_step, events.objects, events.first_access,
                 events.cache, events.step, caches.sizes, caches.capacities, caches.admits, was_hit)  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _token_clock(  # type: ignore[no-untyped-def]
    newer, older, used, last_step, objects, first_access, cache, step, sizes, capacities, admits, was_hit
):
    num_objects = len(newer) - len(used)
    for event in range(len(cache)):
        which, now = cache[event], step[event]
        sentinel = num_objects + which
        capacity = capacities[which]
        for access in range(first_access[event], first_access[event + 1]):
            thing = objects[access]
            was_hit[access] = newer[thing] >= 0
            if was_hit[access]:
                older[newer[thing]] = older[thing]
                newer[older[thing]] = newer[thing]
            else:
                if admits is not None and not admits[thing]:
                    continue
                size = 1
                if sizes is not None:
                    size = sizes[thing]
                if size > capacity:
                    continue
                used[which] += size
                while used[which] > capacity:
                    victim = newer[sentinel]
                    newer[sentinel] = newer[victim]
                    older[newer[victim]] = sentinel
                    newer[victim] = -1
                    if sizes is None:
                        used[which] -= 1
                    else:
                        used[which] -= sizes[victim]
            # The stack is sorted by (step, object), so the newcomer goes below the current step's higher objects.
            last_step[thing] = now
            below = older[sentinel]
            while below != sentinel and last_step[below] == now and below > thing:
                below = older[below]
            above = newer[below]
            older[above] = thing
            newer[thing] = above
            older[thing] = below
            newer[below] = thing
