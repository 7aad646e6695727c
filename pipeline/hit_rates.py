"""Simulated hit rates and curves of a trace under the contracts the report compares; pure.

The window is the study's fair one: every policy warms on the first 60 % of the steps and is scored on the rest, and
a static table is fitted on those same 60 % (2608.12103 §3). Where the last 40 % hold nothing to score (a trace of a
few steps, or prefill at its end) everything is scored cold and the row says so.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import polars as pl

from replayer.simulate import Capacity, Replay, UnusableRequest, Window, prepare, simulate
from replayer.trace import Trace
from schemas.columns import POLICIES, SCOPES, SEMANTICS
from schemas.tables import TABLES

WARM_FRACTION = Fraction("0.6")
CAPACITY_SHARES = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))
"""Capacities of the table hit_rate, as shares of a layer's experts."""

CURVE_POINTS = 12


def hit_rate(trace: Trace) -> pl.DataFrame:
    """Table `hit_rate`: every policy, scope and semantics at an eighth, a quarter and a half of the experts."""
    return pl.concat([_rows(trace, scope, _table_capacities(trace)) for scope in SCOPES])


def miss_ratio_curve(trace: Trace) -> pl.DataFrame:
    """Table `miss_ratio_curve`: the same contracts at about a dozen capacities from one expert a layer to all."""
    points = pl.concat([_rows(trace, scope, _curve_capacities(trace)) for scope in SCOPES])
    accesses = pl.col("accesses")
    return points.with_columns(pl.when(accesses != 0).then(pl.col("misses") / accesses).alias("miss_ratio")).select(
        TABLES["miss_ratio_curve"].column_names
    )


def _table_capacities(trace: Trace) -> list[int]:
    experts = max(trace.metadata.experts_per_layer)
    return sorted({max(1, math.ceil(share * experts)) for share in CAPACITY_SHARES})


def _curve_capacities(trace: Trace) -> list[int]:
    """Experts per layer, spaced evenly on a log scale, with k, the table's capacities and all experts among them."""
    experts = max(trace.metadata.experts_per_layer)
    steps = CURVE_POINTS - 1
    spaced = {round(experts ** (step / steps)) for step in range(CURVE_POINTS)}
    return sorted(spaced | {min(trace.top_k, experts), *_table_capacities(trace)})


def _rows(trace: Trace, scope: str, per_layer: Sequence[int]) -> pl.DataFrame:
    replay, fit = _fair_replay(trace)
    layers = len(trace.metadata.moe_layer_ids)
    # Equal totals in both scopes, so that a global cache is compared with the same number of slots.
    capacities = [Capacity(experts=number * (layers if scope == "global" else 1)) for number in per_layer]
    rows = simulate(replay, names=POLICIES, scope=scope, semantics=SEMANTICS, capacities=capacities, fit=fit)
    return TABLES["hit_rate"].frame(rows)


def _fair_replay(trace: Trace) -> tuple[Replay, str]:
    try:
        replay = prepare(trace, Window(warm_fraction=WARM_FRACTION))
    except UnusableRequest:
        return prepare(trace, Window()), "same"
    return replay, f"first:{float(WARM_FRACTION)}" if replay.warm_steps else "same"
