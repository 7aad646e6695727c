"""Simulated hit rates and curves of a trace under the contracts the report compares; pure.

The window is the study's fair one: every policy warms on the first 60 % of the steps and is scored on the rest, and
a static table is fitted on those same 60 % (2608.12103 §3). Where the last 40 % hold nothing to score (a trace of a
few steps, or prefill at its end) everything is scored cold and the row says so.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import polars as pl

from replayer.hit_curves import curve_rows, lru_curve, static_curve
from replayer.simulate import (
    Capacity,
    Choices,
    Replay,
    UnusableRequest,
    Window,
    layer_rows,
    outcomes,
    prepare,
    shuffled_replay,
    with_intervals,
    with_nulls,
)
from replayer.trace import Trace
from schemas.columns import POLICIES, SCOPES
from schemas.tables import TABLES

WARM_FRACTION = Fraction("0.6")
CAPACITY_SHARES = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))
"""Capacities of the table hit_rate, as shares of a layer's experts."""

CURVE_POINTS = 12
"""Capacities at which policies are simulated that no single pass gives a curve of."""

CURVE_POLICIES = ("lfu_gated", "lfu_always", "belady_forced", "belady_bypass")

WHOLE_CURVE_POINTS = 512
"""Most capacities of a curve that one pass gives whole; beyond, they are spaced evenly on a log scale."""


TABLE_SEMANTICS = ("event_atomic", "sequential")
"""Both ways of counting; a token clock exists for LRU alone, and has its place in `replayer simulate`."""


def hit_rate(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Tables `hit_rate` and `hit_rate_layer`: every policy at an eighth, a quarter and a half of the experts.

    With intervals, with differences to LRU, and with the same on the trace's tokens shuffled.
    """
    rows: list[dict[str, Any]] = []
    by_layer: list[dict[str, Any]] = []
    for scope in SCOPES:
        replay, fit = _fair_replay(trace)
        shuffled = shuffled_replay(replay)
        decided = functools.partial(
            outcomes,
            names=POLICIES,
            scope=scope,
            semantics=TABLE_SEMANTICS,
            capacities=[Capacity(experts=number) for number in _in_scope(trace, scope, table_capacities(trace))],
            choices=Choices(fit=fit),
        )
        found = with_nulls(with_intervals(replay, decided(replay)), shuffled, decided(shuffled))
        rows += [one.row for one in found]
        by_layer += [row for one in found for row in layer_rows(replay, one)]
    return TABLES["hit_rate"].frame(rows), TABLES["hit_rate_layer"].frame(by_layer)


def miss_ratio_curve(trace: Trace) -> pl.DataFrame:
    """Table `miss_ratio_curve`: LRU and static tables at every capacity, other policies at about a dozen."""
    rows: list[dict[str, Any]] = []
    for scope in SCOPES:
        replay, fit = _fair_replay(trace)
        everything = max(trace.metadata.experts_per_layer) if scope == "layer" else trace.num_objects
        asked = _in_scope(trace, scope, _curve_capacities(trace))
        whole = range(1, everything + 1)
        points = (
            whole if everything <= WHOLE_CURVE_POINTS else sorted({*_spaced(everything, WHOLE_CURVE_POINTS), *asked})
        )
        table = static_curve(replay, scope=scope, fit=fit)
        for semantics in TABLE_SEMANTICS:
            curves = [
                lru_curve(replay, scope=scope, semantics=semantics),
                # A table does not change, so the order of accesses does not matter to it.
                replace(table, semantics=semantics),
            ]
            for curve in curves:
                rows += curve_rows(replay, curve, scope=scope, per_cache=points, fit=fit)
        capacities = [Capacity(experts=number) for number in asked]
        for one in outcomes(
            replay, names=CURVE_POLICIES, scope=scope, semantics=TABLE_SEMANTICS, capacities=capacities
        ):
            accesses, misses = one.row["accesses"], one.row["misses"]
            rows.append({**one.row, "miss_ratio": misses / accesses if accesses else None})
    table_columns = TABLES["miss_ratio_curve"].column_names
    return TABLES["miss_ratio_curve"].frame({name: row[name] for name in table_columns} for row in rows)


def table_capacities(trace: Trace) -> list[int]:
    """Experts per layer at which the table hit_rate is simulated."""
    experts = max(trace.metadata.experts_per_layer)
    return sorted({max(1, math.ceil(share * experts)) for share in CAPACITY_SHARES})


def _curve_capacities(trace: Trace) -> list[int]:
    """Experts per layer, spaced evenly on a log scale, with k, the table's capacities and all experts among them."""
    experts = max(trace.metadata.experts_per_layer)
    return sorted({*_spaced(experts, CURVE_POINTS), min(trace.top_k, experts), *table_capacities(trace)})


def _spaced(last: int, points: int) -> set[int]:
    """Whole numbers from 1 to `last`, about `points` of them, evenly on a log scale."""
    return {round(last ** (step / (points - 1))) for step in range(points)}


def _in_scope(trace: Trace, scope: str, per_layer: Sequence[int]) -> list[int]:
    """Equal totals in both scopes, so that a global cache is compared with the same number of slots."""
    return [number * (len(trace.metadata.moe_layer_ids) if scope == "global" else 1) for number in per_layer]


def _fair_replay(trace: Trace) -> tuple[Replay, str]:
    try:
        replay = prepare(trace, Window(warm_fraction=WARM_FRACTION))
    except UnusableRequest:
        return prepare(trace, Window()), "same"
    return replay, f"first:{float(WARM_FRACTION)}" if replay.warm_steps else "same"
