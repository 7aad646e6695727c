"""A trace and its rows of `hit_rate` → table `reporting_block`: the minimal reporting block of arXiv 2608.07911.

The questions, and what answers them, belong to `replayer.disclosure`. Answered for one cache per layer.
"""

from fractions import Fraction

import polars as pl

from replayer.disclosure import position_bands
from replayer.disclosure import reporting_block as answer
from replayer.simulate import Capacity, Window, outcomes, prepare
from replayer.trace import Trace
from schemas.tables import TABLES


def reporting_block(trace: Trace, rates: pl.DataFrame) -> pl.DataFrame:
    """Table `reporting_block` of `rates`, all rows of `hit_rate` of the trace; the bands (B7) are LRU's, event-atomic.

    Raises:
        ValueError: no row of scope layer, or rows of another trace or of several windows.
        replayer.simulate.UnusableRequest: the window of the rows is not one of the trace.
    """
    rows = rates.filter(pl.col("scope") == "layer").to_dicts()
    bands = unions = None
    capacities = sorted({row["capacity_experts_total"] for row in rows if row["capacity_experts_total"] is not None})
    if capacities:
        replay = prepare(trace, Window(warm_fraction=Fraction(str(rows[0]["warm_fraction"]))))
        middle = capacities[len(capacities) // 2] // len(trace.metadata.moe_layer_ids)
        (lru,) = outcomes(
            replay, names=["lru"], scope="layer", semantics=["event_atomic"], capacities=[Capacity(experts=middle)]
        )
        unions, bands = replay.survey.unions, ("lru", position_bands(replay.survey.step_accesses, lru.step_hits))
    block = answer(trace.metadata, rows, unions=unions, bands=bands)
    return TABLES["reporting_block"].frame({"trace_id": trace.metadata.trace_id, **item} for item in block)
