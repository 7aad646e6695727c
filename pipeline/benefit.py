"""What lookahead would have saved: the table `lookahead_benefit`, simulated. Trace in, rows out; no file is touched.

Each plan is delivered to an LRU over all layers through a link, and held against the same cache without it. Plans come
from `predictors`, the simulation is `replayer.prefetch`; what the kernel makes of a plan is measured by native replays.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl

from pipeline.hit_rates import table_capacities
from pipeline.lookahead import Prediction, score_window
from pipeline.predictors import Fit, conditional, first_part, frequency, oracle, previous_token
from replayer.prefetch import Link, PrefetchResult, broken_identity, simulate_prefetches, sizes_of_objects
from replayer.trace import Trace
from schemas.tables import TABLES

FIT_FRACTION = Fraction("0.6")
DEPTHS = (1, 2, 4)

UNBOUNDED = Link()
"""Everything named arrives at once: what is saved then is a matter of prediction alone."""

TYPICAL = Link(bandwidth_bytes_per_s=6_000_000_000, latency_ns=100_000, queue_depth=8, compute_ns=1_000_000)
"""An assumption, not a measurement: one PCIe 4 SSD, and 1 ms of compute in each layer of a pass to hide behind."""


def lookahead_benefit(trace: Trace, *, links: Sequence[Link] = (UNBOUNDED, TYPICAL)) -> pl.DataFrame:
    """The table of one trace: a row per predictor, capacity of the table `hit_rate`, and link.

    What learns does so on the first three fifths of the steps; all are scored over the rest, as in `lookahead_recall`.
    Links with a bandwidth are left out where the trace does not say how large an expert is.

    Raises:
        AssertionError: the counts of a simulation do not add up.
    """
    fit = first_part(trace, FIT_FRACTION)
    window = score_window(trace, fit)
    predictions = _predictions(trace, fit)
    sizes = sizes_of_objects(trace)
    layers = len(trace.metadata.moe_layer_ids)
    rows = []
    for capacity in sorted({int(number) * layers for number in table_capacities(trace)}):
        for link in links:
            if link.bandwidth_bytes_per_s is not None and sizes is None:
                continue
            plans = [one.plan for one in predictions]
            results = simulate_prefetches(trace, plans, capacity_experts=capacity, link=link, scored=window.scored)
            for one, result in zip(predictions, results, strict=True):
                broken = broken_identity(result)
                assert broken is None, f"{one.predictor} at {capacity} experts: {broken}"
                rows.append(
                    {**one.key, **window.contract, "capacity_experts_total": capacity, **_columns(result, link)}
                )
    return TABLES["lookahead_benefit"].frame(rows)


def _predictions(trace: Trace, fit: Fit) -> list[Prediction]:
    num_layers = len(trace.metadata.moe_layer_ids)
    width = min(trace.top_k, int(np.diff(trace.layer_first_object).max()))
    found = [
        Prediction(previous_token(trace), "previous_token", None, 0, 1),
        Prediction(frequency(trace, width=width, fit=fit), "frequency", fit.text, width=width),
    ]
    for depth in (depth for depth in DEPTHS if depth < num_layers):
        plan = conditional(trace, depth=depth, width=width, fit=fit)
        found.append(Prediction(plan, "conditional", fit.text, depth, 0, width))
    depths = [depth for depth in DEPTHS if depth < num_layers]
    if depths:
        found += [Prediction(oracle(trace, depth=depth), "oracle", None, depth, 0) for depth in depths]
    else:
        found.append(Prediction(oracle(trace), "oracle", None, 0, 1))
    return found


def _columns(result: PrefetchResult, link: Link) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "latency_ns": link.latency_ns,
        "queue_depth": link.queue_depth,
        "compute_ns": link.compute_ns,
        "events": result.events,
        "covered_events": result.covered_events,
        "selections": result.selections,
        "accesses": result.accesses,
        "predicted_experts": result.predicted_experts,
        "predicted_accesses": result.predicted_accesses,
        "misses": result.misses_without,
        "predicted_misses": result.predicted_misses,
        "simulated_misses_with": result.misses_with,
        "simulated_removed_misses": result.removed,
        "simulated_removed_late": result.removed_late,
        "simulated_displaced": result.displaced,
        "simulated_submitted": result.submitted,
        "simulated_completed": result.completed,
        "simulated_used": result.used,
        "simulated_used_late": result.used_late,
        "simulated_wasted": result.wasted,
        "miss_bytes": result.miss_bytes_without,
        "simulated_removed_bytes": result.removed_bytes,
        "simulated_displaced_bytes": result.displaced_bytes,
        "simulated_wasted_bytes": result.wasted_bytes,
        "simulated_device_bytes": result.device_bytes_with,
        "simulated_time_without_ns": result.events_ns_without,
        "simulated_time_with_ns": result.events_ns_with,
        "simulated_overlap_ns": result.overlap_ns,
    }
    named = {one.name: one.ratio for one in TABLES["lookahead_benefit"].columns if one.ratio is not None}
    ratios = {
        name: None if counts[part] is None or not counts[whole] else counts[part] / counts[whole]
        for name, (part, whole) in named.items()
    }
    return {**counts, **ratios}
