"""Whole curves in one pass: hits of LRU and of a static table at every capacity, and what follows from them.

In: the events of a walk, chunk by chunk, and the caches (`caches`). Out: stack distances, hits by capacity, the cycle
under which a global LRU cannot hit, and the split of slots over layers that hits most. Points of single policies
belong to the policies' kernels, windows and contracts to `simulate`.

Letters: A accesses and N events of the chunk, O objects, C caches, E objects of one cache, K capacities.

A stack is kept as slots of time: each access takes the next slot of its cache and frees the one its object had, so
the occupied slots after an object's own hold the objects accessed since. Slots are 64 to a word of bits and 32 words
to a group; a word knows how much its group holds before it, a group how much its cache does. When the slots run out,
the occupied ones move down in order, so memory depends on the objects alone. Mattson et al. 1970, "Evaluation
techniques for storage hierarchies"; slots of time after Bennett and Kruskal 1975, "LRU stack processing".
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from replayer.caches import Caches, Events

FIRST_ACCESS = -1
"""Distance of the first access to an object."""

NEVER_HITS = -2
"""Distance of a later access that hits at no capacity: to an object that may not enter, or that its own atomic event
named before and nothing else did."""

LANES = 32
_WORD_BITS, _GROUP_BITS = 6, 11  # 64 slots a word, 32 words a group
_SLOTS_PER_OBJECT = 4  # tried 2, 3, 4: the fewer, the more often slots run out; the whole still lies in L2
_CHUNK_ACCESSES = 2**17  # distances that lie in L2 between the pass that finds them and the one that counts them

IntArray = npt.NDArray[np.int64]


class CapacityBelowLargestExpert(ValueError):
    """A capacity in bytes that some experts of its cache exceed: they leave the stack, which no single pass models."""


class LruStack(NamedTuple):
    """The recency stack of every cache.

    last_slot: (O,) int32 within the cache's slots, or FIRST_ACCESS before the first access, NEVER_HITS outside the
    stack after it; occupied: words of 64 slots; word_rank, group_rank, slot_rank: what lies before each in its group,
    its cache and its word, in experts (no slot_rank: bits are counted) or bytes; first_word, first_group: (C + 1,);
    next_slot, held: (C,) the first slot never used, and what the stack holds; word_count: scratch.
    """

    last_slot: npt.NDArray[np.int32]
    occupied: npt.NDArray[np.uint64]
    word_rank: npt.NDArray[np.integer[Any]]
    group_rank: npt.NDArray[np.integer[Any]]
    slot_rank: IntArray | None
    first_word: IntArray
    first_group: IntArray
    next_slot: IntArray
    held: IntArray
    word_count: npt.NDArray[np.int32]


def lru_distances_state(caches: Caches, seed: int = 0) -> LruStack:
    """Empty stacks, in bytes where the caches have sizes; `seed` is not used."""
    del seed
    experts = np.diff(caches.first_object)
    groups = -(-_SLOTS_PER_OBJECT * experts >> _GROUP_BITS) + (experts == 0)
    first_group = np.concatenate([[0], np.cumsum(-(-groups // LANES) * LANES)])
    first_word = np.concatenate([[0], np.cumsum(groups << _GROUP_BITS - _WORD_BITS)])
    words = int(first_word[-1])
    weighted = caches.sizes is not None
    return LruStack(
        last_slot=np.full(caches.num_objects, FIRST_ACCESS, dtype=np.int32),
        occupied=np.zeros(words, dtype=np.uint64),
        word_rank=np.zeros(words, dtype=np.int64 if weighted else np.uint16),
        group_rank=np.zeros(first_group[-1], dtype=np.int64 if weighted else np.int32),
        slot_rank=np.zeros(words << _WORD_BITS, dtype=np.int64) if weighted else None,
        first_word=first_word,
        first_group=first_group,
        next_slot=np.zeros(len(experts), dtype=np.int64),
        held=np.zeros(len(experts), dtype=np.int64),
        word_count=np.zeros(words, dtype=np.int32),
    )


def _type_count_ones(_context: Any, word: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


def _type_take_after(_context: Any, ranks: Any, start: Any, lane: Any, amount: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, lane, amount = arguments
        element = context.get_value_type(ranks.dtype)
        vector = ir.VectorType(element, LANES)
        address = builder.gep(context.make_array(ranks)(context, builder, array).data, [start])
        address = builder.bitcast(address, vector.as_pointer())

        def in_every_lane(value: Any) -> Any:
            value = builder.trunc(value, element) if element.width < value.type.width else value
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
            return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None))

        is_after = builder.icmp_signed(">", ir.Constant(vector, list(range(LANES))), in_every_lane(lane))
        taken = builder.select(is_after, in_every_lane(amount), ir.Constant(vector, None))
        alignment = element.width // 8
        builder.store(builder.sub(builder.load(address, align=alignment), taken), address, align=alignment)
        return context.get_dummy_value()

    return types.void(ranks, types.int64, types.int64, types.int64), generate


_count_ones: Any = intrinsic(_type_count_ones)
# ranks[start + i] -= amount for each of LANES lanes i > lane. Written as a loop this does not become a vector
# operation, and the whole pass takes 7 times as long.
_take_after: Any = intrinsic(_type_take_after)


@numba.njit(cache=True, nogil=True)
def lru_distances(state, events, caches, atomic, distance):  # type: ignore[no-untyped-def]
    """Fills `distance` (A,) of one chunk: int32 in experts where the caches have no sizes, else int64 in bytes.

    In experts, how many others were accessed since the last access to the same object (A B C A gives 2): a hit
    where distance < capacity. In bytes, the stack down to the object, its own size included: a hit where
    distance ≤ capacity, if no expert of the cache is larger than that. Else FIRST_ACCESS or NEVER_HITS. Event-atomic,
    distances are those at the event's start, and its members then move to the top in the order walked.
    """
    _distances(
        state.last_slot, state.occupied, state.word_rank, state.group_rank, state.slot_rank, state.first_word,
        state.first_group, state.next_slot, state.held, state.word_count, events.objects, events.first_access,
        events.cache, caches.first_object, caches.sizes, caches.admits, atomic, distance,
    )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _distances(  # type: ignore[no-untyped-def]
    last_slot, occupied, word_rank, group_rank, slot_rank, first_word, first_group, next_slot, held, word_count,
    objects, first_access, cache, first_object, sizes, admits, atomic, distance,
):  # fmt: skip
    for event in range(len(cache)):
        which = cache[event]
        word0, group0 = first_word[which], first_group[which]
        last_block = (first_group[which + 1] - group0) // LANES - 1
        end_slot = (first_word[which + 1] - word0) << _WORD_BITS
        start, end = first_access[event], first_access[event + 1]
        above, slot = held[which], next_slot[which]
        if atomic:
            for access in range(start, end):
                thing = objects[access]
                old = np.int64(last_slot[thing])
                if old >= 0:
                    distance[access] = above - _rank(occupied, word_rank, group_rank, slot_rank, word0, group0, old)
                else:
                    distance[access] = old
                    last_slot[thing] = NEVER_HITS
        for access in range(start, end):
            thing = objects[access]
            if slot == end_slot:
                slot = _move_down(
                    last_slot, occupied, word_rank, group_rank, slot_rank, word_count, word0, group0, end_slot,
                    first_object[which], first_object[which + 1], sizes,
                )  # fmt: skip
            old = np.int64(last_slot[thing])
            size = 1
            if sizes is not None:
                size = sizes[thing]
            if not atomic:
                if old >= 0:
                    distance[access] = above - _rank(occupied, word_rank, group_rank, slot_rank, word0, group0, old)
                else:
                    distance[access] = old
                    last_slot[thing] = NEVER_HITS
            if old >= 0:
                _free(occupied, word_rank, group_rank, slot_rank, word0, group0, last_block, old, size)
                above -= size
            elif admits is not None:
                may_enter = admits[thing]
                if not may_enter:
                    continue
            # Inside what every access calls, this condition would leave reference counts in the loop: twice the time.
            if slot & 63 == 0:
                _open_word(word_rank, group_rank, word0, group0, slot, above)
            _take(last_slot, occupied, word_rank, group_rank, slot_rank, word0, group0, slot, above, thing)
            above += size
            slot += 1
        held[which], next_slot[which] = above, slot


@numba.njit(cache=True, nogil=True)
def _rank(occupied, word_rank, group_rank, slot_rank, word0, group0, slot):  # type: ignore[no-untyped-def]
    """Experts in slots up to this one, its own included; bytes in slots before it."""
    word = word0 + (slot >> _WORD_BITS)
    before = np.int64(group_rank[group0 + (slot >> _GROUP_BITS)]) + np.int64(word_rank[word])
    if slot_rank is not None:
        return before + slot_rank[(word0 << _WORD_BITS) + slot]
    bit = np.uint64(1) << np.uint64(slot & 63)
    return before + np.int64(_count_ones(occupied[word] & (bit | (bit - np.uint64(1)))))


@numba.njit(cache=True, nogil=True)
def _free(occupied, word_rank, group_rank, slot_rank, word0, group0, last_block, slot, size):  # type: ignore[no-untyped-def]
    word, group = slot >> _WORD_BITS, slot >> _GROUP_BITS
    occupied[word0 + word] ^= np.uint64(1) << np.uint64(slot & 63)
    if slot_rank is not None:
        first = (word0 + word) << _WORD_BITS
        _take_after(slot_rank, first, slot & 63, size)
        _take_after(slot_rank, first + LANES, (slot & 63) - LANES, size)
    _take_after(word_rank, word0 + (group << _GROUP_BITS - _WORD_BITS), word & (LANES - 1), size)
    for block in range(group // LANES, last_block + 1):
        _take_after(group_rank, group0 + block * LANES, group - block * LANES, size)


@numba.njit(cache=True, nogil=True)
def _take(last_slot, occupied, word_rank, group_rank, slot_rank, word0, group0, slot, above, thing):  # type: ignore[no-untyped-def]
    if slot_rank is not None:
        before = group_rank[group0 + (slot >> _GROUP_BITS)] + word_rank[word0 + (slot >> _WORD_BITS)]
        slot_rank[(word0 << _WORD_BITS) + slot] = above - before
    occupied[word0 + (slot >> _WORD_BITS)] |= np.uint64(1) << np.uint64(slot & 63)
    last_slot[thing] = slot


@numba.njit(cache=True, nogil=True)
def _open_word(word_rank, group_rank, word0, group0, slot, before):  # type: ignore[no-untyped-def]
    """Sets what lies before a word whose first slot is taken next, and before its group: all that the stack holds.

    Until here the ranks beyond the last slot taken mean nothing.
    """
    group = group0 + (slot >> _GROUP_BITS)
    if slot & ((1 << _GROUP_BITS) - 1) == 0:
        group_rank[group] = before
    word_rank[word0 + (slot >> _WORD_BITS)] = before - group_rank[group]


@numba.njit(cache=True, nogil=True)
def _move_down(  # type: ignore[no-untyped-def]
    last_slot, occupied, word_rank, group_rank, slot_rank, word_count, word0, group0, end_slot, begin, end, sizes
):
    """Gives the occupied slots of a cache the lowest numbers, in order; returns the first free one."""
    words = end_slot >> _WORD_BITS
    count = np.int64(0)
    for word in range(word0, word0 + words):
        word_count[word] = count
        count += np.int64(_count_ones(occupied[word]))
    for thing in range(begin, end):
        slot = np.int64(last_slot[thing])
        if slot >= 0:
            word = word0 + (slot >> _WORD_BITS)
            below = (np.uint64(1) << np.uint64(slot & 63)) - np.uint64(1)
            last_slot[thing] = word_count[word] + np.int64(_count_ones(occupied[word] & below))
    for word in range(words):
        left = count - (word << _WORD_BITS)
        if left >= 64:
            occupied[word0 + word] = ~np.uint64(0)
        elif left > 0:
            occupied[word0 + word] = (np.uint64(1) << np.uint64(left)) - np.uint64(1)
        else:
            occupied[word0 + word] = 0
    if slot_rank is not None:
        for thing in range(begin, end):
            if last_slot[thing] >= 0:
                slot_rank[(word0 << _WORD_BITS) + last_slot[thing]] = sizes[thing]
    before = 0
    for place in range(count):
        size = 1
        if slot_rank is not None:
            size = slot_rank[(word0 << _WORD_BITS) + place]
        if place & 63 == 0:
            _open_word(word_rank, group_rank, word0, group0, place, before)
        if slot_rank is not None:
            outside = group_rank[group0 + (place >> _GROUP_BITS)] + word_rank[word0 + (place >> _WORD_BITS)]
            slot_rank[(word0 << _WORD_BITS) + place] = before - outside
        before += size
    return count


class Counts(NamedTuple):
    """Scored accesses by stack distance.

    hits: (O,) at first_object[cache] + distance; hit_bytes: (O,) the same in bytes, or null; accesses,
    compulsory_misses: (C,).
    """

    hits: IntArray
    hit_bytes: IntArray | None
    accesses: IntArray
    compulsory_misses: IntArray


def counts_state(caches: Caches, expert_bytes: IntArray | None = None) -> Counts:
    """Nothing counted yet; `expert_bytes` (O,) adds up bytes of hits, too."""
    nothing = np.zeros(caches.num_objects, dtype=np.int64)
    return Counts(
        nothing,
        None if expert_bytes is None else nothing.copy(),
        np.zeros(len(caches.capacities), dtype=np.int64),
        np.zeros(len(caches.capacities), dtype=np.int64),
    )


@numba.njit(cache=True, nogil=True)
def count_distances(counts, events, caches, scored, expert_bytes, distance):  # type: ignore[no-untyped-def]
    """Adds the scored events (N,) of one chunk, whose distances are in experts."""
    _count_distances(
        counts.hits, counts.hit_bytes, counts.accesses, counts.compulsory_misses, events.objects, events.first_access,
        events.cache, caches.first_object, scored, expert_bytes, distance,
    )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _count_distances(  # type: ignore[no-untyped-def]
    hits, hit_bytes, accesses, compulsory_misses, objects, first_access, cache, first_object, scored, expert_bytes,
    distance,
):  # fmt: skip
    for event in range(len(cache)):
        if not scored[event]:
            continue
        which = cache[event]
        first = first_object[which]
        accesses[which] += first_access[event + 1] - first_access[event]
        for access in range(first_access[event], first_access[event + 1]):
            found = distance[access]
            if found >= 0:
                hits[first + found] += 1
                if hit_bytes is not None:
                    hit_bytes[first + found] += expert_bytes[objects[access]]
            elif found == FIRST_ACCESS:
                compulsory_misses[which] += 1


@numba.njit(cache=True, nogil=True)
def _count_byte_distances(  # type: ignore[no-untyped-def]
    hits, hit_bytes, accesses, compulsory_misses, objects, first_access, cache, ascending, sizes, scored, distance,
):  # fmt: skip
    """As `_count_distances`, at the first of a cache's `ascending` (C, K) capacities that is not below the distance."""
    for event in range(len(cache)):
        if not scored[event]:
            continue
        which = cache[event]
        accesses[which] += first_access[event + 1] - first_access[event]
        for access in range(first_access[event], first_access[event + 1]):
            found = distance[access]
            if found >= 0:
                begin, end = 0, ascending.shape[1]
                while begin < end:
                    middle = (begin + end) >> 1
                    if ascending[which, middle] < found:
                        begin = middle + 1
                    else:
                        end = middle
                if begin < ascending.shape[1]:
                    hits[which, begin] += 1
                    hit_bytes[which, begin] += sizes[objects[access]]
            elif found == FIRST_ACCESS:
                compulsory_misses[which] += 1


@dataclass(frozen=True)
class Curve:
    """Hits of every cache at every capacity in experts, from 0 to all that the cache has.

    hits: one (E + 1,) a cache; hit_bytes: the same in bytes, or null; accesses, compulsory_misses: (C,), the same at
    every capacity.
    """

    hits: tuple[IntArray, ...]
    hit_bytes: tuple[IntArray, ...] | None
    accesses: IntArray
    compulsory_misses: IntArray


@dataclass(frozen=True)
class ByteCurve:
    """Hits of every cache at K capacities in bytes, in the order asked.

    hits, hit_bytes: (K, C); accesses, compulsory_misses: (C,).
    """

    hits: IntArray
    hit_bytes: IntArray
    accesses: IntArray
    compulsory_misses: IntArray


class LruCurve:
    """The whole LRU curve in experts: chunks go in one after the other, the curve of all so far comes out.

    What may enter is as `caches` says, their capacities and sizes play no part; `expert_bytes` (O,) adds up bytes.
    """

    def __init__(self, caches: Caches, atomic: bool, *, expert_bytes: IntArray | None = None) -> None:
        self._caches = caches._replace(sizes=None)
        self._atomic, self._expert_bytes = atomic, expert_bytes
        self._stack = lru_distances_state(self._caches)
        self._counts = counts_state(self._caches, expert_bytes)

    def add(self, events: Events, scored: npt.NDArray[np.bool_]) -> None:
        """Walks the next events; those `scored` (N,) count."""
        for part, part_scored, distance in _parts(events, scored, np.int32):
            lru_distances(self._stack, part, self._caches, self._atomic, distance)
            count_distances(self._counts, part, self._caches, part_scored, self._expert_bytes, distance)

    def curve(self) -> Curve:
        """Hits at every capacity."""
        counts, first_object = self._counts, self._caches.first_object
        return Curve(
            _cumulated(counts.hits, first_object),
            None if counts.hit_bytes is None else _cumulated(counts.hit_bytes, first_object),
            counts.accesses.copy(),
            counts.compulsory_misses.copy(),
        )


class LruByteCurve:
    """LRU of experts of unequal size at K capacities (K, C) in bytes, in one pass whose cost hardly depends on K.

    Caches of equal sizes need no bytes: a capacity of b bytes holds b // size experts, see `LruCurve`.

    Raises:
        CapacityBelowLargestExpert: a capacity that some of a cache's experts exceed, but not all. Such experts are
            served past the cache, so what is resident no longer is a prefix of one and the same stack.
    """

    def __init__(self, caches: Caches, atomic: bool, capacities: IntArray) -> None:
        assert caches.sizes is not None, "capacities in bytes need sizes"
        for which in range(capacities.shape[1]):
            begin, end = caches.first_object[which], caches.first_object[which + 1]
            sizes = caches.sizes[begin:end]
            if caches.admits is not None:
                sizes = sizes[caches.admits[begin:end]]
            if not len(sizes):
                continue
            between = capacities[(capacities[:, which] >= sizes.min()) & (capacities[:, which] < sizes.max()), which]
            if len(between):
                raise CapacityBelowLargestExpert(
                    f"capacity of {int(between[0]):,} bytes in cache {which}, whose largest expert has "
                    f"{int(sizes.max()):,}: no curve runs between its smallest and its largest expert; ask for at "
                    "least the largest, or simulate this capacity alone"
                )
        self._caches, self._atomic = caches, atomic
        self._order = np.argsort(capacities, axis=0, kind="stable")
        self._ascending = np.ascontiguousarray(np.take_along_axis(capacities, self._order, axis=0).T)  # (C, K)
        self._stack = lru_distances_state(caches)
        self._hits, self._hit_bytes = np.zeros((2, *self._ascending.shape), dtype=np.int64)
        self._accesses, self._compulsory_misses = np.zeros((2, capacities.shape[1]), dtype=np.int64)

    def add(self, events: Events, scored: npt.NDArray[np.bool_]) -> None:
        """Walks the next events; those `scored` (N,) count."""
        for part, part_scored, distance in _parts(events, scored, np.int64):
            lru_distances(self._stack, part, self._caches, self._atomic, distance)
            _count_byte_distances(
                self._hits, self._hit_bytes, self._accesses, self._compulsory_misses, part.objects, part.first_access,
                part.cache, self._ascending, self._caches.sizes, part_scored, distance,
            )  # fmt: skip

    def curve(self) -> ByteCurve:
        """Hits at the capacities asked for."""
        hits, hit_bytes = np.empty((2, *self._order.shape), dtype=np.int64)
        np.put_along_axis(hits, self._order, np.cumsum(self._hits, axis=1).T, axis=0)
        np.put_along_axis(hit_bytes, self._order, np.cumsum(self._hit_bytes, axis=1).T, axis=0)
        return ByteCurve(hits, hit_bytes, self._accesses.copy(), self._compulsory_misses.copy())


def _parts(
    events: Events, scored: npt.NDArray[np.bool_], dtype: type[np.signedinteger[Any]]
) -> Iterator[tuple[Events, npt.NDArray[np.bool_], npt.NDArray[np.signedinteger[Any]]]]:
    """The events and their `scored` in parts of about _CHUNK_ACCESSES, each with room for its distances."""
    begin, num_events = 0, len(events.cache)
    while begin < num_events:
        first = events.first_access[begin]
        end = int(np.searchsorted(events.first_access, first + _CHUNK_ACCESSES, side="right")) - 1
        end = min(max(end, begin + 1), num_events)
        last = events.first_access[end]
        part = Events(
            events.objects[first:last],
            events.first_access[begin : end + 1] - first,
            events.cache[begin:end],
            events.step[begin:end],
        )
        yield part, scored[begin:end], np.empty(last - first, dtype=dtype)
        begin = end


def _cumulated(counts: IntArray, first_object: IntArray) -> tuple[IntArray, ...]:
    """Counts (O,) by place in the cache → one (E + 1,) a cache: Σ of those before each place."""
    sums = np.concatenate([[0], np.cumsum(counts)])
    return tuple(sums[begin : end + 1] - sums[begin] for begin, end in itertools.pairwise(first_object))


def static_hits(fit_counts: IntArray, counts: IntArray, first_object: IntArray) -> tuple[IntArray, ...]:
    """Hits of a static table of every size in experts, from 0 to all of a cache: one (E + 1,) a cache.

    The table of c experts holds the c with the most `fit_counts` (O,), ties to the lowest; `counts` (O,) are the
    accesses to score. With scored first accesses for `counts` the same gives the compulsory misses that a table saves.
    """
    ranked = np.concatenate(
        [begin + np.argsort(-fit_counts[begin:end], kind="stable") for begin, end in itertools.pairwise(first_object)]
    )
    return _cumulated(counts[ranked], first_object)


def hits_at(hits: Sequence[IntArray], capacities: Sequence[int] | IntArray) -> IntArray:
    """(C,) hits of each cache at its own capacity in experts; beyond all its experts nothing more hits."""
    pairs = zip(hits, capacities, strict=True)
    return np.array([of_cache[min(capacity, len(of_cache) - 1)] for of_cache, capacity in pairs], dtype=np.int64)


def equal_quota_hits(hits: Sequence[IntArray]) -> IntArray:
    """(most experts of a cache + 1,) hits of all caches together where each holds that many experts."""
    most = max(len(of_cache) for of_cache in hits)
    return np.sum([np.pad(of_cache, (0, most - len(of_cache)), mode="edge") for of_cache in hits], axis=0)


class TokenCycle:
    """What a global LRU must hold before it can hit: chunks go in one after the other.

    Between two visits of a layer, the other layers access some number of distinct experts; (L − 1) × k where every step
    visits every layer once with k experts. An event misses entirely at that capacity or below: whatever it last
    accessed lies deeper. `least` and `most` are the extremes over all visits but each layer's first, null if there are
    none: at or below `least` nothing ever hits, below `most` some event cannot. Under dedup `none` this holds
    event-atomically only: sequentially, an event may hit what it named itself.
    """

    def __init__(self, num_objects: int, num_layers: int) -> None:
        everything = Caches(None, np.array([num_objects]), np.array([0, num_objects]))
        self._stack, self._num_objects = lru_distances_state(everything), num_objects
        self._newest = np.full(num_layers, -1, dtype=np.int32)
        self._extremes = np.array([num_objects, -1], dtype=np.int64)

    def add(self, events: Events) -> None:
        """Walks the next events, whose `cache` is their layer."""
        stack = self._stack
        _visits(
            stack.last_slot, stack.occupied, stack.word_rank, stack.group_rank, stack.first_word, stack.first_group,
            stack.next_slot, stack.held, stack.word_count, events.objects, events.first_access, events.cache,
            self._num_objects, self._newest, self._extremes,
        )  # fmt: skip

    @property
    def least(self) -> int | None:
        """The capacity in experts up to which no access hits."""
        return int(self._extremes[0]) if self._extremes[1] >= 0 else None

    @property
    def most(self) -> int | None:
        """The capacity in experts up to which at least one event cannot hit."""
        return int(self._extremes[1]) if self._extremes[1] >= 0 else None


@numba.njit(cache=True, nogil=True)
def _visits(  # type: ignore[no-untyped-def]
    last_slot, occupied, word_rank, group_rank, first_word, first_group, next_slot, held, word_count, objects,
    first_access, layer, num_objects, newest, extremes,
):  # fmt: skip
    last_block, end_slot = first_group[1] // LANES - 1, first_word[1] << _WORD_BITS
    above, slot = held[0], next_slot[0]
    for event in range(len(layer)):
        start, end = first_access[event], first_access[event + 1]
        if start == end:
            continue
        # Nothing of the layer lies above the one it named last, so what does was accessed by others since.
        before = newest[layer[event]]
        if before >= 0:
            old = np.int64(last_slot[before])
            others = above - _rank(occupied, word_rank, group_rank, None, 0, 0, old)
            extremes[0], extremes[1] = min(extremes[0], others), max(extremes[1], others)
        for access in range(start, end):
            thing = objects[access]
            if slot == end_slot:
                slot = _move_down(
                    last_slot, occupied, word_rank, group_rank, None, word_count, 0, 0, end_slot, 0, num_objects, None
                )
            old = np.int64(last_slot[thing])
            if old >= 0:
                _free(occupied, word_rank, group_rank, None, 0, 0, last_block, old, 1)
                above -= 1
            if slot & 63 == 0:
                _open_word(word_rank, group_rank, 0, 0, slot, above)
            _take(last_slot, occupied, word_rank, group_rank, None, 0, 0, slot, above, thing)
            above += 1
            slot += 1
        newest[layer[event]] = objects[end - 1]
    held[0], next_slot[0] = above, slot


def fitted_quotas(hits: Sequence[IntArray], total: int) -> IntArray:
    """(C,) the split of `total` experts over the caches with the most hits, given each cache's hits by capacity.

    Exact for curves of any shape, by dynamic programming over the caches: total × Σ E additions. All of `total` is
    given away, up to all that the caches have; among equally good splits the lowest cache gets the most, then the
    second lowest, and so on.
    """
    if total < 0:
        raise ValueError(f"{total} experts to split, wanted at least 0")
    experts = np.array([len(of_cache) - 1 for of_cache in hits], dtype=np.int64)
    total = min(total, int(experts.sum()))
    # Later caches together hold between `fewest` and `most`: what the earlier ones cannot, and what they have.
    fewest = np.maximum(total - np.concatenate([[0], np.cumsum(experts)]), 0)  # (C + 1,)
    most = np.minimum(np.concatenate([np.cumsum(experts[::-1])[::-1], [0]]), total)  # (C + 1,)
    best = [np.zeros(1, dtype=np.int64)]
    for cache in range(len(experts) - 1, -1, -1):
        own = np.full(most[cache] - fewest[cache] + 1, np.iinfo(np.int64).min, dtype=np.int64)
        _add_cache(own, fewest[cache], best[0], fewest[cache + 1], hits[cache])
        best.insert(0, own)
    quotas = np.zeros(len(experts), dtype=np.int64)
    left = total
    for cache, of_cache in enumerate(hits):
        later = left - np.arange(len(of_cache))
        possible = np.flatnonzero((later >= fewest[cache + 1]) & (later <= most[cache + 1]))
        reached = of_cache[possible] + best[cache + 1][later[possible] - fewest[cache + 1]]
        quotas[cache] = possible[reached == best[cache][left - fewest[cache]]][-1]
        left -= int(quotas[cache])
    return quotas


@numba.njit(cache=True, nogil=True)
def _add_cache(own, fewest_own, later, fewest_later, hits):  # type: ignore[no-untyped-def]
    """own[n] = max over c of hits[c] + later[n − c], where own starts at `fewest_own` and later at `fewest_later`."""
    for capacity in range(len(hits)):
        shift = fewest_later + capacity - fewest_own  # of later[0] in own
        begin, end = max(shift, 0), min(shift + len(later), len(own))
        if begin < end:
            mine, theirs, gained = own[begin:end], later[begin - shift : end - shift], hits[capacity]
            for place in range(end - begin):
                mine[place] = max(mine[place], theirs[place] + gained)
