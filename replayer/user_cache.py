"""A user-space cache as engines build it: a policy decides, locked slots hold, and every event is decided on its own.

The policy is one of `policies`, called event by event; here lies what it needs beside: which slot holds which expert.
Slots are as large as the largest expert of their cache, so that any expert fits any of them. Decisions are compiled
into a function that `loop` calls through its address: whichever demand thread ends an event decides the next one. The
measuring process imports this, so it touches no files and no frames. Reading into slots belongs to `loop`.

Letters: O objects, C caches, S slots, A accesses.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from replayer import page_cache_models, policies, priorities, queues, recency
from replayer.caches import Caches, Events
from replayer.loop import DECIDED, Decisions, Schedule, now_ns

IntArray = npt.NDArray[np.int64]

PINNED_FRACTION = 0.5
"""Share of the slots that the table of pinned_lru fills."""

_ALWAYS = np.iinfo(np.int64).max

_KEEPS_MEMBERS = frozenset(name for name in policies.KERNELS if name != "belady_bypass") | {"static"}
"""Policies that let no member of an event go before the event is over, if their cache holds as many."""


class Slots(NamedTuple):
    """slot_of: (O,) int32, −1 outside; thing_in: (S,) int32, −1 vacant; hand: (C,) where the search for a slot goes on.

    used_in: (S,) int64 event in which a member of the event was found there (not to be given away in it), the highest
    number for what never leaves; first_slot: (C + 1,).
    """

    slot_of: npt.NDArray[np.int32]
    thing_in: npt.NDArray[np.int32]
    hand: IntArray
    used_in: IntArray
    first_slot: IntArray


@dataclass(frozen=True)
class Sizes:
    """How a capacity becomes slots.

    first_object: (C + 1,); slot_bytes: (C,); slots: (C,) that exist; decided: (C,) that the policy may fill, fewer
    where it may drop a member of the event whose bytes are still to be copied.
    """

    first_object: IntArray
    slot_bytes: IntArray
    slots: IntArray
    decided: IntArray

    @property
    def total_bytes(self) -> int:
        """Of all slots."""
        return int(self.slot_bytes @ self.slots)

    @property
    def base_bytes(self) -> IntArray:
        """(C,) where the slots of each cache begin."""
        ends = np.cumsum(self.slot_bytes * self.slots)
        begins: IntArray = ends - self.slot_bytes * self.slots
        return begins


def plan_slots(
    policy: str, room_bytes: int, first_object: IntArray, held_bytes: IntArray, largest_event: IntArray
) -> Sizes:
    """Splits `room_bytes` into equal shares for the caches, the remainder to the lowest, and those into slots.

    held_bytes: (O,) what an object takes of a slot; largest_event: (C,) most accesses of one event of each cache.

    Raises:
        ValueError: a cache holds fewer experts than one of its events asks for at once.
    """
    caches = len(first_object) - 1
    slot_bytes = np.maximum.reduceat(held_bytes, first_object[:-1]).astype(np.int64)
    shares = np.full(caches, max(room_bytes, 0) // caches, dtype=np.int64)
    shares[0] += max(room_bytes, 0) % caches
    slots = np.minimum(shares // slot_bytes, np.diff(first_object))
    spare = np.zeros_like(slots) if policy in _KEEPS_MEMBERS else largest_event
    # Where everything fits nothing is dropped.
    spare = np.where(slots == np.diff(first_object), 0, spare)
    decided = slots - spare
    short = np.flatnonzero(decided < largest_event)
    if len(short):
        worst = int(short[0])
        needed = int(((largest_event + spare) * slot_bytes).max()) * caches
        raise ValueError(
            f"a capacity that leaves {int(slots[worst])} slots of {int(slot_bytes[worst]):,} bytes where an event asks "
            f"for {int(largest_event[worst])} experts at once ({policy} needs {int((largest_event + spare)[worst])}); "
            f"ask for some {needed:,} bytes"
        )
    return Sizes(np.asarray(first_object, dtype=np.int64), slot_bytes, slots, decided)


class UserCache:
    """A policy and its slots, from the first event on.

    region_address: of the first slot, above 0; counts: (O,) of the policies that begin with a table.
    """

    def __init__(
        self,
        policy: str,
        sizes: Sizes,
        *,
        region_address: int,
        seed: int = 0,
        counts: IntArray | None = None,
    ) -> None:
        self.policy = policy
        self.caches = Caches(None, sizes.decided, sizes.first_object)
        _, self.state = policies.kernel_of(
            policy, "event_atomic", self.caches, policies.Parameters(seed, counts, PINNED_FRACTION)
        )
        self.resident, self.least = policies.residency_of(self.state)
        first_slot = np.concatenate([[0], np.cumsum(sizes.slots)]).astype(np.int64)
        self.slots = Slots(
            slot_of=np.full(self.caches.num_objects, -1, dtype=np.int32),
            thing_in=np.full(int(first_slot[-1]), -1, dtype=np.int32),
            hand=first_slot[:-1].copy(),
            used_in=np.full(int(first_slot[-1]), -1, dtype=np.int64),
            first_slot=first_slot,
        )
        self.slot_address = (
            region_address
            + np.repeat(sizes.base_bytes, sizes.slots)
            + sizes.slot_bytes.repeat(sizes.slots)
            * (np.arange(first_slot[-1]) - np.repeat(first_slot[:-1], sizes.slots))
        )
        self.progress = np.zeros(3, dtype=np.int64)
        self._place_pinned()

    def _place_pinned(self) -> None:
        """Gives a slot to what the policy begins with."""
        state = self.state
        table = state.table if hasattr(state, "table") else getattr(state, "pinned", None)
        self.preloaded = np.flatnonzero(table) if table is not None else np.zeros(0, dtype=np.int64)
        for thing in self.preloaded.tolist():
            cache = int(np.searchsorted(self.caches.first_object, thing, side="right")) - 1
            slot = int(self.slots.hand[cache])
            self.slots.hand[cache] += 1
            self.slots.slot_of[thing], self.slots.thing_in[slot] = slot, thing
            self.slots.used_in[slot] = _ALWAYS
        self.slots.hand[:] = self.slots.first_slot[:-1]

    def take_decide_ns(self) -> int:
        """Time that decisions took since the last call."""
        found, self.progress[1] = int(self.progress[1]), 0
        return found

    @property
    def metadata_bytes(self) -> int:
        """Of policy state and slot tables."""
        arrays = [self.slot_address, *self.slots, *_arrays_of(self.state), self.caches.admits]
        return sum(array.nbytes for array in arrays)

    def over(
        self,
        schedule: Schedule,
        decisions: Decisions,
        event_cache: npt.NDArray[np.int32],
        event_step: IntArray,
        next_time: npt.NDArray[Any] | None,
    ) -> "Decider":
        """What decides the events of one pass, in their order; several passes are one after the other.

        event_cache, event_step: (N,); next_time: (A,) of the policies that know the future.
        """
        return Decider(
            self.policy,
            _Stage(
                state=self.state,
                caches=self.caches,
                slots=self.slots,
                resident=self.resident,
                least=np.array([self.least], dtype=np.int64),
                slot_address=self.slot_address,
                objects=schedule.objects,
                first_access=schedule.event_first_access,
                event_cache=event_cache,
                event_step=event_step,
                next_time=next_time,
                address=decisions.address,
                was_hit=decisions.was_hit,
                progress=self.progress,
                one_event=np.zeros(2, dtype=np.int64),
                clock=np.zeros(2, dtype=np.int64),
            ),
        )


class _Stage(NamedTuple):
    """All that a decision reads and writes, in the order in which compiled code finds it.

    least: (1,) see `policies.residency_of`; progress: (3,) events decided so far, time that took, when the one in hand
    began; one_event, clock: (2,) scratch. The rest as in `UserCache.over`.
    """

    state: Any
    caches: Caches
    slots: Slots
    resident: npt.NDArray[Any]
    least: IntArray
    slot_address: IntArray
    objects: npt.NDArray[np.int32]
    first_access: IntArray
    event_cache: npt.NDArray[np.int32]
    event_step: IntArray
    next_time: npt.NDArray[Any] | None
    address: IntArray
    was_hit: npt.NDArray[np.uint8]
    progress: IntArray
    one_event: IntArray
    clock: IntArray


class Decider:
    """A compiled function and the stage it works on; whoever has the two addresses needs this object alive.

    function_address: of int64 function(void *stage, int64 event), which fills the decisions of that event's accesses
    and gives `loop.DECIDED`, or anything else if policy and slots contradict each other, a fault of this program.
    """

    def __init__(self, policy: str, stage: _Stage) -> None:
        self._stage = stage
        self._words = np.array(_words(stage), dtype=np.int64)
        signature = types.int64(types.CPointer(numba.typeof(stage)), types.int64)
        self._function = _compiled(policy, signature)
        self.function_address = int(self._function.address)
        self.stage_address = int(self._words.ctypes.data)

    def decide(self, event: int) -> None:
        """Decides one event; what the loop does by the two addresses.

        Raises:
            RuntimeError: see above.
        """
        if self._function.ctypes(self.stage_address, event) != DECIDED:
            raise RuntimeError(f"event {event}: the policy holds what no slot does")


@functools.cache
def _compiled(policy: str, signature: Any) -> Any:
    """The function of a policy, loaded once: what is loaded under a memory limit is charged to it."""
    return numba.cfunc(signature, cache=True)(_DECIDES[policy])


def rehearse(policy: str, next_time: npt.NDArray[Any] | None) -> None:
    """Decides an event of four objects: compiles a policy, or loads what was compiled, before anybody waits for it.

    next_time: any array of the dtype that events will carry, null without.
    """
    four = np.arange(4)
    sizes = Sizes(np.array([0, 4]), np.array([1]), np.array([4]), np.array([4]))
    cache = UserCache(policy, sizes, region_address=1, counts=four)
    schedule = Schedule(np.array([0, 1]), np.array([0, 1]), four[:1], four[:1].astype(np.int32))
    decisions = Decisions(np.empty(1, dtype=np.int64), np.empty(1, dtype=np.uint8))
    future = None if next_time is None else np.zeros(1, dtype=next_time.dtype)
    cache.over(schedule, decisions, np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64), future).decide(0)


def _words(value: Any) -> list[int]:
    """A tuple of arrays as compiled code holds it, in words of 8 bytes: owner, parent, items, size, address, …"""
    if value is None:
        return [0]
    if isinstance(value, np.ndarray):
        return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
    return [word for part in value for word in _words(part)]


def _arrays_of(state: Any) -> list[npt.NDArray[Any]]:
    found: list[npt.NDArray[Any]] = []
    for part in state:
        found += [part] if isinstance(part, np.ndarray) else _arrays_of(part)
    return found


@numba.njit(cache=True, nogil=True)
def _place(slots, resident, least, objects, cache, event, slot_address, was_hit, address):  # type: ignore[no-untyped-def]
    """Finds the slot of each hit and one for each newcomer that stays; False if one of them finds none."""
    first, end = slots.first_slot[cache], slots.first_slot[cache + 1]
    for access in range(len(objects)):
        address[access] = 0
        if was_hit[access]:
            slot = slots.slot_of[objects[access]]
            if slot < 0:
                return False
            if slots.used_in[slot] < event:
                slots.used_in[slot] = event
            address[access] = slot_address[slot]
    for access in range(len(objects)):
        thing = objects[access]
        if was_hit[access] or resident[thing] < least:
            continue
        # What was dropped may still lie in its slot; it is read again, as the policy says, and two copies lead nowhere.
        slot = np.int64(slots.slot_of[thing])
        if slot >= 0:
            slots.used_in[slot] = event
            address[access] = slot_address[slot]
            continue
        slot = slots.hand[cache]
        for _ in range(end - first):
            held = slots.thing_in[slot]
            if slots.used_in[slot] < event and (held < 0 or resident[held] < least):
                break
            slot = slot + 1 if slot + 1 < end else first
        else:
            return False
        if slots.thing_in[slot] >= 0:
            slots.slot_of[slots.thing_in[slot]] = -1
        slots.thing_in[slot] = thing
        slots.slot_of[thing] = slot
        slots.used_in[slot] = event
        address[access] = slot_address[slot]
        slots.hand[cache] = slot + 1 if slot + 1 < end else first
    return True


@numba.njit(nogil=True)
def _event(stage, event):  # type: ignore[no-untyped-def]
    """(the event's objects, first accesses, cache, step), for a policy; notes when its decision begins."""
    stage.progress[2] = now_ns(stage.clock)
    begin, end = stage.first_access[event], stage.first_access[event + 1]
    stage.one_event[1] = end - begin
    return (
        stage.objects[begin:end],
        stage.one_event,
        stage.event_cache[event : event + 1],
        stage.event_step[event : event + 1],
    )


@numba.njit(nogil=True)
def _hits(stage, event):  # type: ignore[no-untyped-def]
    """(K,) of the event's accesses, which the policy fills."""
    return stage.was_hit[stage.first_access[event] : stage.first_access[event + 1]]


@numba.njit(nogil=True)
def _decided(stage, event):  # type: ignore[no-untyped-def]
    """Finds slots for what the policy said of an event; `loop.DECIDED` if there were."""
    begin, end = stage.first_access[event], stage.first_access[event + 1]
    found = _place(
        stage.slots, stage.resident, stage.least[0], stage.objects[begin:end], stage.event_cache[event],
        stage.progress[0], stage.slot_address, stage.was_hit[begin:end], stage.address[begin:end],
    )  # fmt: skip
    stage.progress[0] += 1
    stage.progress[1] += now_ns(stage.clock) - stage.progress[2]
    return np.int64(DECIDED) if found else np.int64(0)


@numba.njit(nogil=True)
def _future(stage, event):  # type: ignore[no-untyped-def]
    """(K,) when the event's objects are accessed next."""
    return stage.next_time[stage.first_access[event] : stage.first_access[event + 1]]


# One function for each policy, since compiled code finds a kernel by its name. They are compiled when asked for.


def _lru(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    recency.lru(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _fifo(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    queues.fifo(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _clock(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    queues.clock(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _sieve(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    queues.sieve(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _s3fifo(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    queues.s3fifo(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _arc(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    queues.arc(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _random(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    queues.random(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _lfu_gated(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    priorities.lfu_gated(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _lfu_always(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    priorities.lfu_always(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _lfu_in_cache(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    priorities.lfu_in_cache(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _lfru(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    priorities.lfru(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _least_stale(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    priorities.least_stale(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _belady_bypass(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, _future(stage[0], event))
    priorities.belady_bypass(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _belady_forced(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, _future(stage[0], event))
    priorities.belady_forced(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _static(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    recency.static(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _pinned_lru(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    recency.pinned_lru(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _two_list(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    page_cache_models.two_list(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


def _mglru(stage, event):  # type: ignore[no-untyped-def]
    objects, first, cache, step = _event(stage[0], event)
    events = Events(objects, first, cache, step, None)
    page_cache_models.mglru(stage[0].state, events, stage[0].caches, True, _hits(stage[0], event))
    return _decided(stage[0], event)


_DECIDES: dict[str, Callable[..., Any]] = {
    "lru": _lru,
    "fifo": _fifo,
    "clock": _clock,
    "sieve": _sieve,
    "s3fifo": _s3fifo,
    "arc": _arc,
    "random": _random,
    "lfu_gated": _lfu_gated,
    "lfu_always": _lfu_always,
    "lfu_in_cache": _lfu_in_cache,
    "lfru": _lfru,
    "least_stale": _least_stale,
    "belady_bypass": _belady_bypass,
    "belady_forced": _belady_forced,
    "static": _static,
    "pinned_lru": _pinned_lru,
    "two_list": _two_list,
    "mglru": _mglru,
}
