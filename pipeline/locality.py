"""Canonical trace → how much a cache could gain: reuse, skew and footprint, and the overlap of two traces.

In: `replayer.trace.Trace`. Out: rows of `trace_locality` and `domain_overlap`; what each column means is in `schemas`.
No cache is simulated here, nothing is read or written.

A *token* is one row of a layer in the scored phase, in recorded order. Letters: T tokens of a layer, K experts per
token, E experts of the layer, O objects, W windows. An object is a (layer, expert), numbered as in `replayer.trace`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import polars as pl

from replayer.simulate import default_phase
from replayer.trace import IntArray, Trace, events_of_phase
from schemas.tables import TABLES

REUSE_WINDOWS = (1, 8, 64)
TOP_EXPERTS = 8
OVERLAP_TOP_EXPERTS = (8, 16, 32)


def trace_locality(trace: Trace, *, seed: int = 0) -> pl.DataFrame:
    """The table `trace_locality` of one trace: a row per layer, in order, then the total.

    Scored are the decode rows where there are any, else all rows but those of warm-up. The shuffled twin draws
    `default_rng(seed).permutation(T)` afresh for every distinct T, so layers with equally many tokens are shuffled
    alike and a ragged layer (a pass that skipped it) leaves the others as they are.
    """
    phase = default_phase(trace)
    pool = np.diff(trace.layer_first_object)  # (L,)
    permutations: dict[int, IntArray] = {}
    layers = []
    for rows, num_experts in zip(_rows_by_layer(trace, events_of_phase(trace, phase)), pool, strict=True):
        if len(rows) not in permutations:
            permutations[len(rows)] = np.random.default_rng(seed).permutation(len(rows))
        shuffled = rows[permutations[len(rows)]]
        layers.append(_layer_figures(trace.expert_ids, rows, shuffled, int(num_experts)))
    total: dict[str, Any] = {name: sum(figures[name] for figures in layers) for name in layers[0] if name != "counts"}
    total["counts"] = np.concatenate([figures["counts"] for figures in layers])
    identity = {"trace_id": trace.metadata.trace_id, "phase": phase, "seed": seed}
    layer_ids: list[int | None] = [*trace.metadata.moe_layer_ids, None]
    return TABLES["trace_locality"].frame(
        {**identity, "layer_id": layer_id, **_derived(figures)}
        for layer_id, figures in zip(layer_ids, [*layers, total], strict=True)
    )


def domain_overlap(first: Trace, second: Trace, *, top_experts: Sequence[int] = OVERLAP_TOP_EXPERTS) -> pl.DataFrame:
    """The table `domain_overlap` of two traces: per set size a row per layer, in order, then the total.

    A set holds the most selected experts of a layer, ties to the lowest id, and never one that does not occur. Counted
    are decode rows where both traces have them, else all rows of both but those of warm-up. Empty where the traces
    have other layers or experts, or are the same trace.
    """
    first, second = sorted((first, second), key=lambda trace: trace.metadata.trace_id)
    table, mine, theirs = TABLES["domain_overlap"], first.metadata, second.metadata
    shapes = [(metadata.moe_layer_ids, metadata.experts_per_layer) for metadata in (mine, theirs)]
    if shapes[0] != shapes[1] or mine.trace_id == theirs.trace_id:
        return table.frame([])
    phase = "decode" if {default_phase(first), default_phase(second)} == {"decode"} else "all"
    ranked = [_ranked_experts(trace, phase) for trace in (first, second)]
    rows: list[dict[str, object]] = []
    for size in sorted(set(top_experts)):
        sets = [[set(layer[:size].tolist()) for layer in layers] for layers in ranked]
        shared = [len(one & other) for one, other in zip(*sets, strict=True)]
        joint = [len(one | other) for one, other in zip(*sets, strict=True)]
        chance = [
            len(one) * len(other) / experts for one, other, experts in zip(*sets, mine.experts_per_layer, strict=True)
        ]
        layer_ids: list[int | None] = [*mine.moe_layer_ids, None]
        rows += [
            {
                "trace_id": mine.trace_id,
                "other_trace_id": theirs.trace_id,
                "phase": phase,
                "top_experts": size,
                "layer_id": layer_id,
                "shared_experts": in_both,
                "joint_experts": in_either,
                "jaccard_ratio": _ratio(in_both, in_either),
                "chance_shared_experts": by_chance,
            }
            for layer_id, in_both, in_either, by_chance in zip(
                layer_ids, [*shared, sum(shared)], [*joint, sum(joint)], [*chance, sum(chance)], strict=True
            )
        ]
    return table.frame(rows)


def _rows_by_layer(trace: Trace, scored: npt.NDArray[np.bool_]) -> list[IntArray]:
    """Per layer the (T,) indices of the rows of its scored events, in recorded order."""
    events = np.flatnonzero(scored)
    num_layers = len(trace.layer_first_object) - 1
    first_row = np.concatenate(
        [[0], np.cumsum(np.bincount(trace.event_layer[events], np.diff(trace.event_first_row)[events], num_layers))]
    ).astype(np.int64)
    rows = np.empty(first_row[-1], dtype=np.int64)
    _place_rows(events, trace.event_layer, trace.event_first_row, first_row[:-1].copy(), rows)
    return [rows[begin:end] for begin, end in pairwise(first_row)]


@numba.njit(cache=True)
def _place_rows(events, event_layer, event_first_row, next_place, rows):  # type: ignore[no-untyped-def]
    for event in events:
        layer = event_layer[event]
        for row in range(event_first_row[event], event_first_row[event + 1]):
            rows[next_place[layer]] = row
            next_place[layer] += 1


def _layer_figures(
    expert_ids: npt.NDArray[np.uint16], rows: IntArray, shuffled: IntArray, num_experts: int
) -> dict[str, Any]:
    """What adds up over layers, by column name, and `counts`, the (E,) selections of each expert."""
    windows = np.array(REUSE_WINDOWS, dtype=np.int64)
    reused, counts = reuse_counts(rows, expert_ids, num_experts, windows)
    by_chance, _ = reuse_counts(shuffled, expert_ids, num_experts, windows)
    tokens, top_k = len(rows), expert_ids.shape[1]
    share = counts / tokens if tokens else np.zeros(num_experts)
    descending = np.sort(counts)[::-1]
    return {
        "tokens": tokens,
        "selections": tokens * top_k,
        "reuse_selections": max(tokens - 1, 0) * top_k,
        **{f"w{w}_reused_selections": int(n) for w, n in zip(REUSE_WINDOWS, reused, strict=True)},
        **{f"w{w}_shuffled_reused_selections": int(n) for w, n in zip(REUSE_WINDOWS, by_chance, strict=True)},
        "chance_numerator": float((share**2).sum()),
        "chance_denominator": float(share.sum()),
        "uniform_denominator": tokens * num_experts,
        "top8_selections": int(descending[:TOP_EXPERTS].sum()),
        "distinct_experts": int((counts > 0).sum()),
        "pool_experts": num_experts,
        "working_set_95_experts": _working_set(descending),
        "counts": counts,
    }


def _derived(figures: dict[str, Any]) -> dict[str, Any]:
    """`figures` without the counts, with the ratios of a row and the exponent of its pooled counts."""
    columns = {name: value for name, value in figures.items() if name != "counts"}
    for column in TABLES["trace_locality"].columns:
        if column.ratio is not None:
            numerator, denominator = column.ratio
            columns[column.name] = _ratio(figures[numerator], figures[denominator])
    columns["zipf_alpha"] = zipf_alpha(figures["counts"])
    return columns


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@numba.njit(cache=True)
def reuse_counts(rows, expert_ids, num_experts, windows):  # type: ignore[no-untyped-def]
    """((W,) selections whose expert one of the w tokens before used, (E,) selections of each expert).

    `rows` are the tokens of one layer in the order to judge; the first has no token before it.
    """
    top_k = expert_ids.shape[1]
    reused = np.zeros(len(windows), dtype=np.int64)
    counts = np.zeros(num_experts, dtype=np.int64)
    last_token = np.full(num_experts, -1, dtype=np.int64)
    for token in range(len(rows)):
        for rank in range(top_k):
            expert = expert_ids[rows[token], rank]
            counts[expert] += 1
            if last_token[expert] >= 0:
                for window in range(len(windows)):
                    reused[window] += token - last_token[expert] <= windows[window]
        for rank in range(top_k):
            last_token[expert_ids[rows[token], rank]] = token
    return reused, counts


def zipf_alpha(counts: IntArray) -> float | None:
    """−slope of ln(count) on ln(rank) by least squares over the nonzero counts; null with fewer than two."""
    nonzero = np.sort(counts[counts > 0])[::-1]
    if len(nonzero) < 2:
        return None
    rank = np.log(np.arange(1, len(nonzero) + 1))
    rank -= rank.mean()
    return float(-(rank @ np.log(nonzero)) / (rank @ rank)) + 0.0  # + 0.0: equal counts give 0, not −0


def _working_set(descending: IntArray) -> int:
    """Fewest experts that carry 95 % of the selections, in integers: 20 × carried ≥ 19 × all."""
    total = int(descending.sum())
    return int(np.searchsorted(20 * np.cumsum(descending), 19 * total)) + 1 if total else 0


def _ranked_experts(trace: Trace, phase: str) -> list[IntArray]:
    """Per layer the experts that occur, the most selected first, ties to the lowest id."""
    ranked = []
    for rows, num_experts in zip(
        _rows_by_layer(trace, events_of_phase(trace, phase)), np.diff(trace.layer_first_object), strict=True
    ):
        counts = np.bincount(trace.expert_ids[rows].ravel(), minlength=int(num_experts))
        descending = np.argsort(-counts, kind="stable")
        ranked.append(descending[: int((counts > 0).sum())])
    return ranked
