"""What every policy kernel takes: the events to serve and the caches that serve them.

A kernel is `run(state, events, caches, atomic, was_hit)`: it decides the accesses of one chunk of a walk, writes one
hit-or-miss per access and leaves in `state` whatever the next chunk needs, so that a walk may be cut between any two
events. Decisions belong to the policies, counting to `simulate`.

Letters: A accesses and N events of the chunk, O objects, C caches. An object is a (layer, expert).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Events(NamedTuple):
    """Consecutive events of a walk.

    objects: (A,) int32; first_access: (N + 1,) int64, from 0; cache: (N,) int32, which cache serves the event; step:
    (N,) int64; next_time: (A,) unsigned, when the object is accessed next, for the policies that know the future.
    """

    objects: npt.NDArray[np.int32]
    first_access: npt.NDArray[np.int64]
    cache: npt.NDArray[np.int32]
    step: npt.NDArray[np.int64]
    next_time: npt.NDArray[np.unsignedinteger[Any]] | None = None


class _Caches(NamedTuple):
    sizes: npt.NDArray[np.int64] | None
    capacities: npt.NDArray[np.int64]
    first_object: npt.NDArray[np.int64]
    admits: npt.NDArray[np.bool_]


class Caches(_Caches):
    """One cache per layer, or a single one over all.

    sizes: (O,) int64 in the unit of the capacities, null where every object has size 1; capacities: (C,) int64;
    first_object: (C + 1,) int64, the objects of each cache; admits: (O,) bool, what may enter; null says everything.
    Kernels are compiled for both kinds of sizes, so there is always a mask: it is asked on misses alone.
    """

    __slots__ = ()

    def __new__(
        cls,
        sizes: npt.NDArray[np.int64] | None,
        capacities: npt.NDArray[np.int64],
        first_object: npt.NDArray[np.int64],
        admits: npt.NDArray[np.bool_] | None = None,
    ) -> "Caches":
        everything = np.ones(int(first_object[-1]), dtype=np.bool_)
        return super().__new__(cls, sizes, capacities, first_object, everything if admits is None else admits)

    @property
    def num_objects(self) -> int:
        """Objects of all caches."""
        return int(self.first_object[-1])


@dataclass(frozen=True)
class Policy:
    """A policy's kernel and the maker of its state.

    `new_state(caches, seed)` allocates; `run(state, events, caches, atomic, was_hit)` decides. `knows_future`: the
    events carry `next_time`.
    """

    new_state: Callable[[Caches, int], tuple[Any, ...]]
    run: Callable[..., None]
    knows_future: bool = False
