"""Which experts an owner's locked memory holds, and which an admission table lets in: decided before a run.

In: a resolved replay, the pool, what is asked for, a capacity in bytes. Out: tables, places and slots for the measuring
process, and, decided once more from the trace alone, what that process must have found. Files and processes do not
belong here.

Letters: O objects, A accesses, N events, L layers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replayer import policies, priorities, recency
from replayer.caches import Caches, Events
from replayer.owners import ReadPlan
from replayer.request import Request, fits_a_table
from replayer.simulate import Replay, admission_table, fitted_counts, layer_quotas
from replayer.trace import Walk
from replayer.user_cache import PINNED_FRACTION, Sizes, UserCache, plan_slots, rehearse

IntArray = npt.NDArray[np.int64]

SLACK_BYTES = 4 << 20
SLACK_SHARE = 256
"""What locked memory leaves of a limit: SLACK_BYTES and a SLACK_SHARE-th of the capacity, for page tables, counters in
flight between processors, and what the reader allocates after its own memory was measured."""


@dataclass(frozen=True)
class Holding:
    """What is locked. place: (O,) of a table's experts in the region, −1 outside; sizes: of a user-space cache."""

    arena_bytes: int
    preload_bytes: int
    place: IntArray
    sizes: Sizes | None


@dataclass(frozen=True)
class Choice:
    """What an owner needs to know of the trace before the run.

    counts: (O,) accesses of what a table is fitted on, null without one; admitted: (O,) of an admission table, null
    without; cache: (N,) which cache of a user-space cache serves an event; next_time: (passes, A) when an access's
    object is accessed next, or (0, 0).
    """

    counts: IntArray | None
    admitted: npt.NDArray[np.bool_] | None
    first_object: IntArray
    cache: npt.NDArray[np.int32]
    next_time: npt.NDArray[Any]


def choose(resolved: Replay, request: Request) -> Choice:
    """Fits tables and looks into the future, as far as an owner asks for it.

    Raises:
        simulate.UnusableRequest: a fit or an admission table that does not match the trace.
    """
    walk, layers = resolved.walk, resolved.trace.layer_first_object
    whole = np.array([0, resolved.trace.num_objects])
    scope, policy, admit = request.scope or "global", request.policy, request.admit
    passes = 2 if request.warm_pass else 1
    return Choice(
        counts=fitted_counts(resolved, request.fit or "same") if fits_a_table(request) else None,
        admitted=None if admit is None else admission_table(resolved, scope, admit),
        first_object=np.asarray(layers if scope == "layer" else whole, dtype=np.int64),
        cache=walk.layer.astype(np.int32) if scope == "layer" else np.zeros(walk.num_events, dtype=np.int32),
        next_time=_next_times(walk, passes, resolved.trace.num_objects)
        if policy is not None and policies.knows_future(policy)
        else np.zeros((0, 0), dtype=np.uint32),
    )


def _next_times(walk: Walk, passes: int, num_objects: int) -> npt.NDArray[Any]:
    dtype: Any = np.uint32 if passes * walk.num_events < np.iinfo(np.uint32).max else np.uint64
    times = np.empty((passes, len(walk.objects)), dtype=dtype)
    upcoming = np.full(num_objects, np.iinfo(dtype).max, dtype=dtype)
    for passed in reversed(range(passes)):
        priorities.next_times(walk.objects, walk.first_access, upcoming, passed * walk.num_events, True, times[passed])
    return times


def room_bytes(capacity_bytes: int, arena_fraction: float | None, headroom_bytes: int, *, limited: bool) -> int:
    """What locked memory may take of a capacity; under a limit it leaves what the reader needs to go on."""
    locked = int(capacity_bytes * (1.0 if arena_fraction is None else arena_fraction))
    if limited:
        left = capacity_bytes - locked + headroom_bytes
        locked -= max(0, SLACK_BYTES + capacity_bytes // SLACK_SHARE - left)
    return max(locked, 0)


def hold(
    choice: Choice, reads: ReadPlan, object_bytes: IntArray, walk: Walk, room: int, page_bytes: int, request: Request
) -> Holding:
    """The table, or the slots, of so much room; the bookkeeping of a policy is taken off the room.

    Raises:
        ValueError: too little room for what one event asks for.
    """
    policy, seed = request.policy, request.seed
    if policy is not None:
        largest = np.zeros(len(choice.first_object) - 1, dtype=np.int64)
        np.maximum.at(largest, choice.cache, np.diff(walk.first_access))
        sizes = plan_slots(policy, room, choice.first_object, reads.held_bytes, largest)
        trial = UserCache(policy, sizes, region_address=1, seed=seed, counts=choice.counts)
        sizes = plan_slots(policy, room - trial.metadata_bytes, choice.first_object, reads.held_bytes, largest)
        trial = UserCache(policy, sizes, region_address=1, seed=seed, counts=choice.counts)
        preloaded = trial.preloaded
        # In this process, so that the memory of compiling is not charged to a limited one.
        rehearse(policy, choice.next_time if len(choice.next_time) else None)
        nothing = np.full(len(object_bytes), -1, dtype=np.int64)
        return Holding(sizes.total_bytes, int(object_bytes[preloaded].sum()), nothing, sizes)
    assert choice.counts is not None, "a table is fitted"
    caches = len(choice.first_object) - 1
    # Whole pages are locked, so the last one counts whole.
    quotas = layer_quotas(room // page_bytes * page_bytes, caches)
    table = recency.static_table(choice.counts, reads.held_bytes, quotas, choice.first_object)
    held = np.where(table, reads.held_bytes, 0)
    place = np.where(table, np.cumsum(held) - held, -1)
    return Holding(int(held.sum()), int(object_bytes[table].sum()), place, None)


def expected_hits(choice: Choice, holding: Holding, walk: Walk, request: Request) -> npt.NDArray[np.bool_]:
    """(A,) accesses of the last pass that locked memory must serve.

    Of a policy, the simulator's own walk over whole passes; of a table, what it names.
    """
    policy = request.policy
    if policy is None:
        named: npt.NDArray[np.bool_] = holding.place[walk.objects] >= 0
        return named
    assert holding.sizes is not None, "a policy has slots"
    caches = Caches(None, holding.sizes.decided, holding.sizes.first_object)
    parameters = policies.Parameters(request.seed, choice.counts, PINNED_FRACTION)
    run, state = policies.kernel_of(policy, "event_atomic", caches, parameters)
    was_hit = np.empty(len(walk.objects), dtype=np.uint8)
    for passed in range(2 if request.warm_pass else 1):
        future = choice.next_time[passed] if len(choice.next_time) else None
        run(state, Events(walk.objects, walk.first_access, choice.cache, walk.step, future), caches, True, was_hit)
    return was_hit != 0
