"""A user-space cache as engines build it: a policy decides, locked slots hold, and every event is decided on its own.

The policy is one of `policies`, called event by event; here lies what it needs beside: which slot holds which expert.
Slots are as large as the largest expert of their cache, so that any expert fits any of them. The measuring process
imports this, so it touches no files and no frames. Reading into slots belongs to `loop`.

Letters: O objects, C caches, S slots, A accesses.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from replayer import policies
from replayer.caches import Caches, Events
from replayer.loop import Decisions, Schedule

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
        self.caches = Caches(None, sizes.decided, sizes.first_object)
        self.run, self.state = policies.kernel_of(
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
        self.decided_events = 0
        self.decide_ns = 0
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

    @property
    def metadata_bytes(self) -> int:
        """Of policy state and slot tables."""
        arrays = [self.slot_address, *self.slots, *_arrays_of(self.state), self.caches.admits]
        return sum(array.nbytes for array in arrays)

    def decide(self, events: Events, address: IntArray, was_hit: npt.NDArray[np.uint8]) -> None:
        """One event: fills address (A,), 0 where nothing is kept, and was_hit (A,).

        Raises:
            RuntimeError: the policy and the slots contradict each other; a fault of this program.
        """
        begin_ns = time.monotonic_ns()
        self.run(self.state, events, self.caches, True, was_hit)
        failed = _place(
            self.slots, self.resident, self.least, events.objects, int(events.cache[0]), self.decided_events,
            self.slot_address, was_hit, address,
        )  # fmt: skip
        self.decided_events += 1
        self.decide_ns += time.monotonic_ns() - begin_ns
        if failed:
            raise RuntimeError(f"event {self.decided_events - 1}: the policy holds what no slot does")


def decide_pass(
    cache: UserCache,
    schedule: Schedule,
    decisions: Decisions,
    event_cache: npt.NDArray[np.int32],
    event_step: IntArray,
    next_time: npt.NDArray[Any] | None,
    *,
    served: Callable[[], None],
    wait: Callable[[], None],
    has_quit: Callable[[int], bool],
) -> None:
    """Decides every event of one pass when the one before it is served.

    event_cache, event_step: (N,); next_time: (A,) of the policies that know the future. `served` waits for the end of
    an event, `wait` is the barrier of `loop.work`, which lets the threads go on; `has_quit(event)` ends the pass.
    """
    steps, firsts = schedule.step_first_event.tolist(), schedule.event_first_access.tolist()
    one_event = np.zeros(2, dtype=np.int64)

    def decide(event: int) -> None:
        accesses = slice(firsts[event], firsts[event + 1])
        one_event[1] = firsts[event + 1] - firsts[event]
        future = None if next_time is None else next_time[accesses]
        events = Events(
            schedule.objects[accesses],
            one_event,
            event_cache[event : event + 1],
            event_step[event : event + 1],
            future,
        )
        cache.decide(events, decisions.address[accesses], decisions.was_hit[accesses])

    if len(steps) > 1:
        wait()
    for begin, end in itertools.pairwise(steps):
        if begin < end:
            decide(begin)
            wait()
        for event in range(begin, end):
            served()
            quits = has_quit(event)
            if event + 1 < end and not quits:
                decide(event + 1)
            wait()
            if quits:
                return
        wait()
        wait()


def rehearse(policy: str, next_time: npt.NDArray[Any] | None) -> None:
    """Decides an event of four objects: compiles a policy, or loads what was compiled, before anybody waits for it.

    next_time: any array of the dtype that events will carry, null without.
    """
    four = np.arange(4)
    sizes = Sizes(np.array([0, 4]), np.array([1]), np.array([4]), np.array([4]))
    cache = UserCache(policy, sizes, region_address=1, counts=four)
    events = Events(
        four[:1].astype(np.int32),
        np.array([0, 1]),
        np.zeros(1, dtype=np.int32),
        np.zeros(1, dtype=np.int64),
        None if next_time is None else np.zeros(1, dtype=next_time.dtype),
    )
    cache.decide(events, np.empty(1, dtype=np.int64), np.empty(1, dtype=np.uint8))


def _arrays_of(state: Any) -> list[npt.NDArray[Any]]:
    found: list[npt.NDArray[Any]] = []
    for part in state:
        found += [part] if isinstance(part, np.ndarray) else _arrays_of(part)
    return found


@numba.njit(cache=True, nogil=True)
def _place(slots, resident, least, objects, cache, event, slot_address, was_hit, address):  # type: ignore[no-untyped-def]
    """Finds the slot of each hit and one for each newcomer that stays. 1 if a hit has none, or none is to be had."""
    first, end = slots.first_slot[cache], slots.first_slot[cache + 1]
    for access in range(len(objects)):
        address[access] = 0
        if was_hit[access]:
            slot = slots.slot_of[objects[access]]
            if slot < 0:
                return 1
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
            return 1
        if slots.thing_in[slot] >= 0:
            slots.slot_of[slots.thing_in[slot]] = -1
        slots.thing_in[slot] = thing
        slots.slot_of[thing] = slot
        slots.used_in[slot] = event
        address[access] = slot_address[slot]
        slots.hand[cache] = slot + 1 if slot + 1 < end else first
    return 0
