"""Lookahead plans → what they are worth before any cache is asked: recall, precision, coverage, beside their nulls.

`score_plan` counts what a plan named of what events accessed and knows no predictor; `score_misses` does the same for
the accesses that a cache missed, the only ones a plan can help. Out: rows of `lookahead_recall` and of
`lookahead_recall_missed`; what each column means is in `schemas`. Plans are made in `predictors`; what they save is
another matter.

Letters: N events, L layers, E experts, A accesses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.hit_rates import table_capacities
from pipeline.predictors import (
    Fit,
    conditional,
    first_part,
    first_step_after,
    frequency,
    learned,
    narrowed,
    oracle,
    popularity,
    previous_token,
    random,
    recorded,
    shuffled,
    union,
    union_of_event,
)
from replayer import recency
from replayer.caches import Caches, Events
from replayer.plan import Plan
from replayer.simulate import UnusableRequest, default_order, default_phase
from replayer.trace import IntArray, Trace, events_of_phase, steps_without_warmup, walk
from schemas.columns import PREDICTORS
from schemas.tables import TABLES
from schemas.trace import PHASE_CODES

FIT_FRACTION = Fraction("0.6")
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
WIDTH_FACTORS = (1, 2)

_WARMUP = PHASE_CODES["warmup"]


@dataclass(frozen=True)
class Prediction:
    """A plan and what tells it from the others: the key of `lookahead_recall` without trace, phase and layer.

    fit, lookahead_layers, lookahead_steps and width are null where there is no such thing. Of each prediction at most
    the first `read` experts count (null: all).
    """

    plan: Plan
    predictor: str
    fit: str | None = None
    lookahead_layers: int | None = None
    lookahead_steps: int | None = None
    width: int | None = None
    read: int | None = None

    @property
    def key(self) -> dict[str, Any]:
        """The columns."""
        names = ("predictor", "fit", "lookahead_layers", "lookahead_steps", "width")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PlanScore:
    """Per layer (L,) what a plan named and what was accessed over the scored events: columns of `lookahead_recall`."""

    events: IntArray
    covered_events: IntArray
    accesses: IntArray
    covered_accesses: IntArray
    predicted_experts: IntArray
    predicted_accesses: IntArray
    chance_predicted_accesses: npt.NDArray[np.float64]


def score_plan(trace: Trace, plan: Plan, scored: npt.NDArray[np.bool_], *, width: int | None = None) -> PlanScore:
    """Counts over the events of `scored` (N,), reading at most the first `width` experts of each prediction.

    An expert named twice counts once. By chance an event with u accesses and m named of E experts expects u·m ÷ E.

    Raises:
        ValueError: the plan is of another trace: it has other events, or names an expert its layer does not have.
    """
    _check_events(trace, plan)
    num_layers = len(trace.layer_first_object) - 1
    counts = np.zeros((6, num_layers), dtype=np.int64)
    chance = np.zeros(num_layers, dtype=np.float64)
    worst = _score_events(
        np.flatnonzero(scored),
        trace.event_layer,
        trace.event_first_row,
        trace.expert_ids,
        np.diff(trace.layer_first_object),
        plan.covered,
        plan.first_id,
        plan.expert_ids,
        len(plan.expert_ids) if width is None else width,
        counts,
        chance,
    )
    if worst >= 0:
        raise ValueError(f"the plan for event {worst} names an expert beyond its layer's experts")
    names = ("events", "covered_events", "accesses", "covered_accesses", "predicted_experts", "predicted_accesses")
    return PlanScore(**dict(zip(names, counts, strict=True)), chance_predicted_accesses=chance)


def _check_events(trace: Trace, plan: Plan) -> None:
    if not len(plan.covered) == len(plan.first_id) - 1 == len(trace.event_layer):
        raise ValueError(f"a plan for {len(plan.covered)} events, the trace has {len(trace.event_layer)}")


@dataclass(frozen=True)
class Misses:
    """What a cache does not hold when it is asked: first_id (N + 1,) offsets into expert_ids, those of each event."""

    policy: str
    scope: str
    semantics: str
    access_order: str
    capacity_experts_total: int
    first_id: IntArray
    expert_ids: npt.NDArray[np.uint16]


def lru_misses(trace: Trace, *, capacity_experts_total: int) -> Misses:
    """Misses of one LRU over all layers, event-atomic, on the whole trace from an empty cache; warm-up has none."""
    order = default_order(trace)
    asked = walk(trace, 0, len(steps_without_warmup(trace)), order=order)
    caches = Caches(None, np.array([capacity_experts_total]), np.array([0, trace.num_objects]))
    was_hit = np.zeros(len(asked.objects), dtype=np.uint8)
    events = Events(asked.objects, asked.first_access, np.zeros(asked.num_events, dtype=np.int32), asked.step)
    recency.lru(recency.lru_state(caches), events, caches, True, was_hit)
    missed = np.flatnonzero(was_hit == 0)
    event_of = np.repeat(np.flatnonzero(trace.event_phase != _WARMUP), np.diff(asked.first_access))[missed]
    first_object = trace.layer_first_object[trace.event_layer[event_of]]
    per_event = np.bincount(event_of, minlength=len(trace.event_layer))
    return Misses(
        "lru", "global", "event_atomic", order, capacity_experts_total,
        np.concatenate([[0], np.cumsum(per_event)]).astype(np.int64),
        (asked.objects[missed] - first_object).astype(np.uint16),
    )  # fmt: skip


def score_misses(
    trace: Trace, plan: Plan, misses: Misses, scored: npt.NDArray[np.bool_], *, width: int | None = None
) -> dict[str, float]:
    """`misses`, `predicted_misses` and `chance_predicted_misses` over the events of `scored` (N,) and all layers.

    Raises:
        ValueError: the plan is of a trace of other events.
    """
    _check_events(trace, plan)
    counts = np.zeros(2, dtype=np.int64)
    chance = _score_misses(
        np.flatnonzero(scored),
        trace.event_layer,
        np.diff(trace.layer_first_object),
        misses.first_id,
        misses.expert_ids,
        plan.first_id,
        plan.expert_ids,
        len(plan.expert_ids) if width is None else width,
        counts,
    )
    missed, predicted = counts.tolist()
    return {"misses": missed, "predicted_misses": predicted, "chance_predicted_misses": chance}


def lookahead_recall(trace: Trace, **choices: Any) -> pl.DataFrame:
    """The table `lookahead_recall` alone; as `lookahead_tables`."""
    return lookahead_tables(trace, **choices)[0]


def lookahead_tables(
    trace: Trace,
    *,
    fit_fraction: Fraction = FIT_FRACTION,
    depths: Sequence[int] = DEPTHS,
    width_factors: Sequence[int] = WIDTH_FACTORS,
    names: Sequence[str] = PREDICTORS,
    recorded_plan: Plan | None = None,
    seed: int = 0,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables `lookahead_recall` and `lookahead_recall_missed` of one trace.

    The first has per predictor, depth and width a row per target layer, then the total; the second per such total a
    row per capacity of the table `hit_rate`, of one LRU over all layers. What learns does so on the first
    floor(fit_fraction × steps) steps, warm-up aside; all are scored over the rest, so that they compare: decode events
    where the trace has any, else all. All scored events count, those no prediction reaches too. Widths are the factors
    × k, at most the experts of the layer with the most. Depths that no layer of the trace can reach are left out.
    `recorded_plan` is what the trace's file holds (`predictors.recorded`).

    Raises:
        UnusableRequest: the fraction is not between 0 and 1, or a depth or width factor is below 1.
    """
    if not 0 < fit_fraction < 1:
        raise UnusableRequest(f"fit fraction {float(fit_fraction)}, wanted 0 < fraction < 1")
    fit = first_part(trace, fit_fraction)
    window = score_window(trace, fit)
    shares = {int(number) * len(trace.metadata.moe_layer_ids) for number in table_capacities(trace)}
    caches = [lru_misses(trace, capacity_experts_total=total) for total in sorted(shares)]
    rows: list[dict[str, Any]] = []
    on_misses: list[dict[str, Any]] = []
    for one in _predictions(trace, fit, depths, width_factors, names, recorded_plan, seed):
        rows += recall_rows(trace, one, window, seed=seed)
        for cache in caches:
            counts = score_misses(trace, one.plan, cache, window.scored, width=one.read)
            contract = {
                name: getattr(cache, name)
                for name in ("policy", "scope", "semantics", "access_order", "capacity_experts_total")
            }
            columns = {**one.key, **window.contract, **contract, **counts, "accesses": rows[-1]["accesses"]}
            on_misses.append({**columns, **_ratios("lookahead_recall_missed", columns)})
    return TABLES["lookahead_recall"].frame(rows), TABLES["lookahead_recall_missed"].frame(on_misses)


@dataclass(frozen=True)
class ScoreWindow:
    """Which events count, (N,), and the columns that say so."""

    scored: npt.NDArray[np.bool_]
    contract: dict[str, Any]


def score_window(trace: Trace, fit: Fit | None) -> ScoreWindow:
    """Decode events where there are any, else all; of a trace that is fitted only those after the fitted steps."""
    phase = default_phase(trace)
    warm_steps = 0 if fit is None or fit.other is not None else fit.steps
    scored = events_of_phase(trace, phase) & (trace.event_step >= first_step_after(trace, warm_steps))
    return ScoreWindow(
        scored,
        {
            "trace_id": trace.metadata.trace_id,
            "phase": phase,
            "step_begin": 0,
            "step_end": len(steps_without_warmup(trace)),
            "warm_steps": warm_steps,
        },
    )


def _predictions(
    trace: Trace,
    fit: Fit,
    depths: Sequence[int],
    width_factors: Sequence[int],
    names: Sequence[str],
    recorded_plan: Plan | None,
    seed: int,
) -> Iterator[Prediction]:
    """The predictions of the tables. A plan is made at the largest width and read at each: they begin alike."""
    num_layers = len(trace.layer_first_object) - 1
    most_experts = int(np.diff(trace.layer_first_object).max())
    widths = sorted({min(factor * trace.top_k, most_experts) for factor in width_factors})
    reached = sorted({depth for depth in depths if depth < num_layers})
    previous = previous_token(trace)
    if "previous_token" in names:
        yield Prediction(previous, "previous_token", None, 0, 1)
    if "frequency" in names:
        plan = frequency(trace, width=widths[-1], fit=fit)
        yield from (Prediction(plan, "frequency", fit.text, width=width, read=width) for width in widths)
    for depth in reached if {"conditional", "union"} & set(names) else ():
        plan = conditional(trace, depth=depth, width=widths[-1], fit=fit)
        for width in widths:
            if "conditional" in names:
                yield Prediction(plan, "conditional", fit.text, depth, 0, width, width)
            if "union" in names:
                both = union(previous, narrowed(plan, width=width))
                yield Prediction(both, "union", fit.text, depth, 0, width)
    if "learned" in names and reached:
        plan = learned(trace, depth=reached[0], width=widths[-1], fit=fit)
        yield from (Prediction(plan, "learned", fit.text, reached[0], 0, width, width) for width in widths)
    if "recorded" in names and recorded_plan is not None:
        yield Prediction(recorded_plan, "recorded")
    if "oracle" in names:
        layers, steps = (1, 0) if num_layers > 1 else (0, 1)
        yield Prediction(oracle(trace), "oracle", None, layers, steps)
    if "random" in names:
        plan = random(trace, width=widths[-1], seed=seed)
        yield from (Prediction(plan, "random", width=width, read=width) for width in widths)
    if "popularity" in names:
        plan = popularity(trace, width=widths[-1], fit=fit, seed=seed)
        yield from (Prediction(plan, "popularity", fit.text, width=width, read=width) for width in widths)


TAKES = {
    "previous_token": (),
    "frequency": ("width", "fit"),
    "conditional": ("depth", "width", "fit"),
    "union": ("depth", "width", "fit"),
    "learned": ("depth", "width", "fit"),
    "recorded": (),
    "oracle": ("depth",),
    "random": ("width",),
    "popularity": ("width", "fit"),
}
"""What each predictor can be told; a seed also draws the shuffled null, so any of them may have one."""


def predict(
    trace: Trace, path: Path, predictor: str, *, depth: int = 1, width: int, fit: Fit, seed: int = 0
) -> Prediction:
    """The prediction of one predictor by name, which looks at what `TAKES` says; `path` is the trace's own file.

    Raises:
        UnusableRequest: the trace has no recorded predictions, no layer that many layers before another, or no layer
            of that many experts.
        MalformedTrace: its recorded predictions cannot be read.
    """
    num_layers = len(trace.layer_first_object) - 1
    if "depth" in TAKES[predictor] and depth >= num_layers:
        most = f"wanted at most {num_layers - 1}" if num_layers > 1 else "so none lies ahead; choose another predictor"
        raise UnusableRequest(f"depth {depth}, but trace {trace.metadata.trace_id} has {num_layers} MoE layers; {most}")
    most_experts = int(np.diff(trace.layer_first_object).max())
    if "width" in TAKES[predictor] and width > most_experts:
        raise UnusableRequest(
            f"width {width}, but a layer of trace {trace.metadata.trace_id} has at most {most_experts} experts; "
            f"wanted at most {most_experts}"
        )
    if predictor == "recorded":
        plan = recorded(path, trace)
        if plan is None:
            raise UnusableRequest(
                f"trace {trace.metadata.trace_id} has no recorded predictions, since its dump held none; choose "
                "another predictor, or ingest a dump with predicted_expert_ids"
            )
        return Prediction(plan, "recorded")
    if predictor == "previous_token":
        return Prediction(previous_token(trace), "previous_token", None, 0, 1)
    if predictor == "oracle":
        return Prediction(oracle(trace, depth=depth), "oracle", None, depth, 0)
    if predictor == "random":
        return Prediction(random(trace, width=width, seed=seed), "random", width=width)
    if predictor == "frequency":
        return Prediction(frequency(trace, width=width, fit=fit), "frequency", fit.text, width=width)
    if predictor == "popularity":
        return Prediction(popularity(trace, width=width, fit=fit, seed=seed), "popularity", fit.text, width=width)
    by_source = learned if predictor == "learned" else conditional
    plan = by_source(trace, depth=depth, width=width, fit=fit)
    if predictor == "union":
        plan = union(previous_token(trace), plan)
    return Prediction(plan, predictor, fit.text, depth, 0, width)


def recall_rows(trace: Trace, one: Prediction, window: ScoreWindow, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of `lookahead_recall`: one per layer, in order, then the total; the shuffled null is drawn from the seed."""
    score = score_plan(trace, one.plan, window.scored, width=one.read)
    null = score_plan(trace, shuffled(one.plan, trace, seed=seed, among=window.scored), window.scored, width=one.read)
    counted = {**vars(score), "shuffled_predicted_accesses": null.predicted_accesses}
    columns = {name: [*values.tolist(), values.sum().item()] for name, values in counted.items()}
    layer_ids: list[int | None] = [*trace.metadata.moe_layer_ids, None]
    rows = []
    for place, layer_id in enumerate(layer_ids):
        counts = {name: values[place] for name, values in columns.items()}
        ratios = _ratios("lookahead_recall", counts)
        rows.append({**one.key, **window.contract, "layer_id": layer_id, "seed": seed, **counts, **ratios})
    return rows


def _ratios(table: str, counts: dict[str, Any]) -> dict[str, float | None]:
    named = {column.name: column.ratio for column in TABLES[table].columns if column.ratio is not None}
    return {name: counts[part] / counts[whole] if counts[whole] else None for name, (part, whole) in named.items()}


@numba.njit(cache=True, nogil=True)
def _score_events(  # type: ignore[no-untyped-def]
    events, event_layer, event_first_row, expert_ids, num_experts, covered, first_id, named, width, counts, chance
):
    """Adds to (6, L) `counts` in the order of `PlanScore`, and to (L,) `chance`; the first malformed event, or −1."""
    accessed_in = np.full(num_experts.max(), -1, dtype=np.int64)
    named_in = np.full(num_experts.max(), -1, dtype=np.int64)
    members = np.empty(num_experts.max(), dtype=np.int64)
    for event in events:
        layer = event_layer[event]
        accesses = union_of_event(event, expert_ids, event_first_row, accessed_in, event, members)
        counts[0, layer] += 1
        counts[2, layer] += accesses
        if not covered[event]:
            continue
        predicted, found = 0, 0
        for expert in named[first_id[event] : min(first_id[event + 1], first_id[event] + width)]:
            if expert >= num_experts[layer]:
                return event
            if named_in[expert] != event:
                named_in[expert] = event
                predicted += 1
                found += accessed_in[expert] == event
        counts[1, layer] += 1
        counts[3, layer] += accesses
        counts[4, layer] += predicted
        counts[5, layer] += found
        chance[layer] += accesses * predicted / num_experts[layer]
    return -1


@numba.njit(cache=True, nogil=True)
def _score_misses(  # type: ignore[no-untyped-def]
    events, event_layer, num_experts, first_missed, missed, first_id, named, width, counts
):
    """Adds misses and those of them that were named to (2,) `counts`; returns how many chance would have named."""
    named_in = np.full(1 << 16, -1, dtype=np.int64)
    chance = 0.0
    for event in events:
        misses = first_missed[event + 1] - first_missed[event]
        predicted = 0
        for expert in named[first_id[event] : min(first_id[event + 1], first_id[event] + width)]:
            if named_in[expert] != event:
                named_in[expert] = event
                predicted += 1
        for expert in missed[first_missed[event] : first_missed[event + 1]]:
            counts[1] += named_in[expert] == event
        counts[0] += misses
        chance += misses * predicted / num_experts[event_layer[event]]
    return chance
