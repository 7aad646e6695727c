"""Whole curves of a prepared replay: LRU and a static table at every capacity, and the floor under a global LRU.

One pass gives all capacities; `curves` holds the kernels, `simulate` what a replay is and scores.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replayer import curves
from replayer.caches import Caches, Events
from replayer.simulate import Capacity, Choices, Replay, capacity_columns, contract_columns, fitted_counts, object_sizes

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HitCurve:
    """Scored hits at every capacity.

    capacity_experts_total, hits, compulsory_misses: (K,); hit_bytes: (K,), null if sizes are unknown. In scope layer
    every layer holds equally many experts, up to all that it has.
    """

    policy: str
    semantics: str | None
    capacity_experts_total: IntArray
    hits: IntArray
    compulsory_misses: IntArray
    hit_bytes: IntArray | None


def lru_curve(replay: Replay, *, scope: str, semantics: str, expert_bytes: int | None = None) -> HitCurve:
    """LRU in one pass (two under a warm pass) over the replay."""
    sizes = object_sizes(replay.trace, expert_bytes)
    caches = _caches(replay, scope)
    whole = curves.LruCurve(caches, semantics == "event_atomic", expert_bytes=sizes)
    for passed in range(replay.passes):
        for number in range(len(replay.pieces)):
            piece = replay.pieces[number]
            is_last = passed == replay.passes - 1
            scored = replay.is_scored(piece) if is_last else np.zeros(piece.num_events, dtype=bool)
            cache = piece.layer if scope == "layer" else np.zeros_like(piece.layer)
            whole.add(Events(piece.objects, piece.first_access, cache, piece.step), scored)
    found = whole.curve()
    hits = curves.equal_quota_hits(found.hits)
    return HitCurve(
        "lru",
        semantics,
        _totals(caches, len(hits)),
        hits,
        np.full(len(hits), found.compulsory_misses.sum(), dtype=np.int64),
        None if found.hit_bytes is None else curves.equal_quota_hits(found.hit_bytes),
    )


def static_curve(replay: Replay, *, scope: str, fit: str = "same", expert_bytes: int | None = None) -> HitCurve:
    """Tables of every size, fitted as `simulate.fitted_counts` says; no order of accesses matters to them."""
    sizes = object_sizes(replay.trace, expert_bytes)
    caches, fitted, named = _caches(replay, scope), fitted_counts(replay, fit), replay.survey.named
    hits = curves.equal_quota_hits(curves.static_hits(fitted, named, caches.first_object))
    first = first_scored_accesses(replay)
    saved = curves.equal_quota_hits(curves.static_hits(fitted, first, caches.first_object))
    in_bytes = None
    if sizes is not None:
        in_bytes = curves.equal_quota_hits(curves.static_hits(fitted, named * sizes, caches.first_object))
    return HitCurve("static", None, _totals(caches, len(hits)), hits, int(first.sum()) - saved, in_bytes)


def curve_rows(
    replay: Replay, curve: HitCurve, *, scope: str, per_cache: Iterable[int], fit: str
) -> list[dict[str, Any]]:
    """Rows of the table `miss_ratio_curve`: the points where each cache holds so many experts."""
    sizes, accesses = object_sizes(replay.trace), replay.num_scored
    demand = None if sizes is None else int(replay.survey.named @ sizes)
    rows = []
    for experts in per_cache:
        place = min(experts, len(curve.hits) - 1)
        misses, compulsory = accesses - int(curve.hits[place]), int(curve.compulsory_misses[place])
        rows.append(
            {
                **contract_columns(replay, scope, Choices()),
                **dict.fromkeys(("pinned_fraction", "folios_per_expert")),
                "policy": curve.policy,
                "semantics": curve.semantics,
                **capacity_columns(replay.trace, scope, Capacity(experts=experts), sizes),
                "fit": fit if curve.policy == "static" else None,
                "seed": replay.seed if replay.order == "random" else None,
                "accesses": accesses,
                "misses": misses,
                "miss_ratio": misses / accesses if accesses else None,
                "compulsory_misses": compulsory,
                "capacity_misses": misses - compulsory,
                "demand_bytes": demand,
                "miss_bytes": None
                if curve.hit_bytes is None or demand is None
                else demand - int(curve.hit_bytes[place]),
            }
        )
    return rows


def first_scored_accesses(replay: Replay) -> IntArray:
    """(O,) 1 for an object whose first access in the replay is scored, else 0."""
    first = np.zeros(replay.trace.num_objects, dtype=np.int64)
    if replay.passes > 1:
        return first
    base = 0
    for number in range(len(replay.pieces)):
        piece = replay.pieces[number]
        scored = np.repeat(replay.is_scored(piece), np.diff(piece.first_access))
        seen = replay.survey.first_seen - base
        here = np.flatnonzero((seen >= 0) & (seen < len(piece.objects)))
        first[here] = scored[seen[here]]
        base += len(piece.objects)
    return first


def cycle_floor(replay: Replay) -> int | None:
    """The capacity in experts at or below which a global LRU hits nothing, whatever is scored; null for one visit."""
    cycle = curves.TokenCycle(replay.trace.num_objects, len(replay.trace.metadata.moe_layer_ids))
    for _ in range(replay.passes):
        for number in range(len(replay.pieces)):
            piece = replay.pieces[number]
            cycle.add(Events(piece.objects, piece.first_access, piece.layer, piece.step))
    return cycle.least


def _caches(replay: Replay, scope: str) -> Caches:
    layers = replay.trace.layer_first_object
    first_object = layers if scope == "layer" else np.array([0, replay.trace.num_objects], dtype=np.int64)
    return Caches(None, np.diff(first_object), first_object)


def _totals(caches: Caches, points: int) -> IntArray:
    """(K,) experts of all caches together where each may hold 0, 1, …, K − 1."""
    return np.arange(points, dtype=np.int64) * len(caches.capacities)
