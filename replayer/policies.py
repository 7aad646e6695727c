"""The policies by name: which kernel decides, what its state needs, which semantics it is defined in.

The kernels are in `recency`, `queues`, `priorities` and `page_cache_models`; their common contract is in `caches`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replayer import page_cache_models, priorities, queues, recency
from replayer.caches import Caches, Policy
from schemas.columns import POLICIES

KERNELS: dict[str, Policy] = {
    "lru": Policy(recency.lru_state, recency.lru),
    "fifo": Policy(queues.fifo_state, queues.fifo),
    "clock": Policy(queues.clock_state, queues.clock),
    "sieve": Policy(queues.sieve_state, queues.sieve),
    "s3fifo": Policy(queues.s3fifo_state, queues.s3fifo),
    "arc": Policy(queues.arc_state, queues.arc),
    "random": Policy(queues.random_state, queues.random),
    "lfu_gated": Policy(priorities.lfu_gated_state, priorities.lfu_gated),
    "lfu_always": Policy(priorities.lfu_always_state, priorities.lfu_always),
    "lfu_in_cache": Policy(priorities.lfu_in_cache_state, priorities.lfu_in_cache),
    "lfru": Policy(priorities.lfru_state, priorities.lfru),
    "least_stale": Policy(priorities.least_stale_state, priorities.least_stale),
    "belady_bypass": Policy(priorities.belady_bypass_state, priorities.belady_bypass, knows_future=True),
    "belady_forced": Policy(priorities.belady_forced_state, priorities.belady_forced, knows_future=True),
}
"""Policies whose state needs the caches and a seed alone."""

TOKEN_CLOCK = Policy(recency.token_clock_state, recency.token_clock)

FITTED = ("static", "pinned_lru")
"""Policies that begin with a table of the most accessed objects."""

KERNEL_MODELS = ("two_list", "mglru")
"""Policies that model the kernel's page cache, an expert being so many folios."""

ALWAYS_ADMITTING = tuple(
    name for name in POLICIES if name not in ("static", "pinned_lru", "lfu_gated", "belady_bypass", *KERNEL_MODELS)
)
"""Policies that admit whatever misses and fits."""


@dataclass(frozen=True)
class Parameters:
    """What some policies need beside caches: counts (O,) of a fit, the pinned share, folios per expert, a seed."""

    seed: int = 0
    counts: npt.NDArray[np.int64] | None = None
    pinned_fraction: float | None = None
    folios_per_expert: int = 1


def semantics_of(name: str) -> tuple[str, ...]:
    """The semantics in which a policy is defined."""
    return ("event_atomic", "sequential", "token_clock") if name == "lru" else ("event_atomic", "sequential")


def knows_future(name: str) -> bool:
    """Whether a policy's events carry the next accesses."""
    return name in KERNELS and KERNELS[name].knows_future


def residency_of(state: Any) -> tuple[npt.NDArray[Any], int]:
    """(an array (O, …), the least value in it of an object that is resident), between two events of a state's kernel.

    Pinned objects are resident whatever their value. Both are views: what a kernel decides shows in them.
    """
    if isinstance(state, recency.PinnedState):
        state = state.stack
    if isinstance(state, recency.RecencyState):
        return state.slot, 0
    if isinstance(state, recency.TableState):
        return state.table.view(np.uint8), 1
    if isinstance(state, queues.RandomState):
        return state.place, 0
    if isinstance(state, queues.HandState | queues.S3FifoState | queues.ArcState):
        return state.flags, queues.LEAST_RESIDENT[type(state)]
    array: npt.NDArray[Any] = state.resident
    return array, 1


def kernel_of(name: str, semantics: str, caches: Caches, parameters: Parameters) -> tuple[Any, Any]:
    """(the kernel that decides, a fresh state for it).

    Raises:
        ValueError: counts or a pinned share are missing for a policy that needs them.
    """
    if name == "lru" and semantics == "token_clock":
        return TOKEN_CLOCK.run, TOKEN_CLOCK.new_state(caches, parameters.seed)
    if name in KERNELS:
        return KERNELS[name].run, KERNELS[name].new_state(caches, parameters.seed)
    if name in KERNEL_MODELS:
        folios = parameters.folios_per_expert
        if name == "two_list":
            return page_cache_models.two_list, page_cache_models.two_list_state(caches, parameters.seed, folios)
        return page_cache_models.mglru, page_cache_models.mglru_state(caches, parameters.seed, folios)
    if parameters.counts is None:
        raise ValueError(f"{name} needs the counts of a fit")
    if name == "static":
        return recency.static, recency.static_state(caches, parameters.counts)
    if parameters.pinned_fraction is None:
        raise ValueError("pinned_lru needs the share that is pinned")
    return recency.pinned_lru, recency.pinned_lru_state(caches, parameters.counts, parameters.pinned_fraction)
