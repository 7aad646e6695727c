"""Canonical trace → lookahead plans → their recall, precision and coverage.

A *predictor* is a function trace → `Plan`; `score_plan` counts what a plan named of what events accessed and knows no
predictor. Out: rows of `lookahead_recall`; what each column means is in `schemas`. Delivering a plan to a cache does
not belong here, and nothing is read or written.

Letters: N events, L layers, P pairs, E experts, M experts named at most. A layer is its ordinal among the trace's MoE
layers, and so is a distance in layers: the next MoE layer is one away, dense layers between or not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numba
import numpy as np
import numpy.typing as npt
import polars as pl

from replayer.simulate import UnusableRequest, default_phase
from replayer.trace import IntArray, Trace, events_of_phase, steps_without_warmup
from schemas.columns import PHASES
from schemas.tables import TABLES
from schemas.trace import PHASE_CODES

FIT_FRACTION = Fraction("0.6")
DEPTHS = (1, 2, 3, 4)
WIDTH_FACTORS = (1, 2)

_WARMUP = PHASE_CODES["warmup"]
_NUM_PHASES = len(PHASES)


@dataclass(frozen=True)
class Plan:
    """What a predictor named for each event of a trace before it ran.

    covered: (N,) whether there is a prediction at all; first_id: (N + 1,) offsets into expert_ids: the named experts,
    most wanted first. A covered event without experts is a prediction that nothing is needed.
    """

    covered: npt.NDArray[np.bool_]
    first_id: IntArray
    expert_ids: npt.NDArray[np.uint16]


def previous_token(trace: Trace) -> Plan:
    """Names the union of the same layer's previous event, warm-up aside, in order of first mention.

    Previous is meant in recorded order, so after a prefill the first decode event is told the whole union of it, and
    a speculative pass the experts of the pass before. The first event of a layer is not covered.
    """
    sources = _previous_events(trace.event_layer, trace.event_phase, len(trace.layer_first_object) - 1)
    first_id, expert_ids = _unions(sources, trace.expert_ids, trace.event_first_row, trace.num_objects)
    return Plan(sources >= 0, first_id, expert_ids)


def conditional(trace: Trace, *, depth: int, width: int, fit_steps: int) -> Plan:
    """Names the `width` experts most often seen `depth` layers on from the experts of an event.

    An event of layer l is paired with the next event of layer l + depth of the same step and phase in recorded order,
    unless layer l comes again before it: passes of one step do not mix. Over the pairs of the first `fit_steps` steps
    (warm-up aside, every phase) count[s, e] is the number of pairs with s in the first event and e in the second. The
    prediction made at an event with experts S ranks e by

        Σ over s in S of count[s, e] ÷ Σ over e' of count[s, e'],

    sums taken to the nearest 2⁻³², ties to the lowest id. An expert of sum 0 was never seen and is not named, so a
    prediction may be shorter than `width` or empty. Covered are paired events after the fitted steps: never an event
    of the first `depth` layers, nor one that the table was fitted on.

    Cost: one E × E table at a time; time grows with events × experts per event × E.

    Raises:
        UnusableRequest: depth or width is below 1.
    """
    if min(depth, width) < 1:
        raise UnusableRequest(f"depth {depth} and width {width} of a prediction, wanted at least 1 of each")
    num_layers = len(trace.layer_first_object) - 1
    sources = _paired_events(trace.event_layer, trace.event_step, trace.event_phase, num_layers, depth)
    is_fitted = trace.event_step < _first_step_after(trace, fit_steps)
    fitted, asked = (np.flatnonzero((sources >= 0) & window) for window in (is_fitted, ~is_fitted))
    rows = (trace.expert_ids, trace.event_first_row)
    named = np.zeros((len(asked), width), dtype=np.uint16)  # (P, M)
    lengths = np.zeros(len(asked), dtype=np.int64)  # (P,)
    experts = np.diff(trace.layer_first_object)
    for layer in range(depth, num_layers):
        fit = fitted[trace.event_layer[fitted] == layer]
        count = _pair_counts(sources[fit], fit, *rows, experts[layer - depth], experts[layer])
        ask = np.flatnonzero(trace.event_layer[asked] == layer)
        _name_likeliest(ask, sources[asked], *rows, count, named, lengths)
    covered = np.zeros(len(sources), dtype=bool)
    covered[asked] = True
    ids_of_event = np.zeros(len(sources), dtype=np.int64)
    ids_of_event[asked] = lengths
    is_named = np.arange(width) < lengths[:, np.newaxis]  # (P, M)
    return Plan(covered, _offsets(ids_of_event), named[is_named])


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
    if not len(plan.covered) == len(plan.first_id) - 1 == len(trace.event_layer):
        raise ValueError(f"a plan for {len(plan.covered)} events, the trace has {len(trace.event_layer)}")
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


def lookahead_recall(
    trace: Trace,
    *,
    fit_fraction: Fraction = FIT_FRACTION,
    depths: Sequence[int] = DEPTHS,
    width_factors: Sequence[int] = WIDTH_FACTORS,
) -> pl.DataFrame:
    """The table `lookahead_recall` of one trace: per predictor, depth and width a row per target layer, then the total.

    `conditional` is fitted on the first floor(fit_fraction × steps) steps, warm-up aside. Both predictors are scored
    over the rest, so that they compare: decode events where the trace has any, else all. All scored events count,
    those no prediction reaches too. Widths are the factors × k, at most the experts of the layer with the most.
    Depths that no layer of the trace can reach are left out.

    Raises:
        UnusableRequest: the fraction is not between 0 and 1, or a depth or width factor is below 1.
    """
    if not 0 < fit_fraction < 1:
        raise UnusableRequest(f"fit fraction {float(fit_fraction)}, wanted 0 < fraction < 1")
    phase = default_phase(trace)
    steps = len(steps_without_warmup(trace))
    fit_steps = math.floor(fit_fraction * steps)
    scored = events_of_phase(trace, phase) & (trace.event_step >= _first_step_after(trace, fit_steps))
    contract: dict[str, object] = {
        "trace_id": trace.metadata.trace_id,
        "phase": phase,
        "step_begin": 0,
        "step_end": steps,
        "warm_steps": fit_steps,
    }
    rows = _rows_of(
        trace,
        score_plan(trace, previous_token(trace), scored),
        {
            **contract,
            "predictor": "previous_token",
            "fit": None,
            "lookahead_layers": 0,
            "lookahead_steps": 1,
            "width": None,
        },
    )
    most_experts = int(np.diff(trace.layer_first_object).max())
    widths = sorted({min(factor * trace.top_k, most_experts) for factor in width_factors})
    num_layers = len(trace.layer_first_object) - 1
    for depth in sorted({depth for depth in depths if depth < num_layers}):
        plan = conditional(trace, depth=depth, width=widths[-1], fit_steps=fit_steps)
        for width in widths:
            rows += _rows_of(
                trace,
                score_plan(trace, plan, scored, width=width),
                {
                    **contract,
                    "predictor": "conditional",
                    "fit": f"first:{_decimal(fit_fraction)}",
                    "lookahead_layers": depth,
                    "lookahead_steps": 0,
                    "width": width,
                },
            )
    return TABLES["lookahead_recall"].frame(rows)


def _rows_of(trace: Trace, score: PlanScore, key: dict[str, object]) -> list[dict[str, object]]:
    columns = {name: [*values.tolist(), values.sum().item()] for name, values in vars(score).items()}
    for column in TABLES["lookahead_recall"].columns:
        if column.ratio is not None:
            parts, wholes = (columns[name] for name in column.ratio)
            columns[column.name] = [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]
    layer_ids: list[int | None] = [*trace.metadata.moe_layer_ids, None]
    return [
        {**key, "layer_id": layer_id, **{name: values[place] for name, values in columns.items()}}
        for place, layer_id in enumerate(layer_ids)
    ]


def _decimal(fraction: Fraction) -> str:
    return str(float(fraction)) if Fraction(str(float(fraction))) == fraction else str(fraction)


def _first_step_after(trace: Trace, fit_steps: int) -> int:
    """The step_id of the first step after `fit_steps` steps, counted without warm-up steps."""
    steps = steps_without_warmup(trace)
    return int(steps[fit_steps]) if fit_steps < len(steps) else np.iinfo(np.int64).max


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@numba.njit(cache=True)
def _previous_events(event_layer, event_phase, num_layers):  # type: ignore[no-untyped-def]
    """(N,) the event of the same layer before each event, or −1."""
    previous = np.full(num_layers, -1, dtype=np.int64)
    sources = np.full(len(event_layer), -1, dtype=np.int64)
    for event in range(len(event_layer)):
        if event_phase[event] != _WARMUP:
            sources[event] = previous[event_layer[event]]
            previous[event_layer[event]] = event
    return sources


@numba.njit(cache=True)
def _paired_events(event_layer, event_step, event_phase, num_layers, depth):  # type: ignore[no-untyped-def]
    """(N,) the event `depth` layers before each event in the same pass, or −1."""
    waiting = np.full((_NUM_PHASES, num_layers), -1, dtype=np.int64)
    sources = np.full(len(event_layer), -1, dtype=np.int64)
    for event in range(len(event_layer)):
        layer, phase = event_layer[event], event_phase[event]
        if phase == _WARMUP:
            continue
        if layer >= depth:
            source = waiting[phase, layer - depth]
            if source >= 0 and event_step[source] == event_step[event]:
                sources[event] = source
                waiting[phase, layer - depth] = -1
        waiting[phase, layer] = event
    return sources


@numba.njit(cache=True)
def _union(event, expert_ids, event_first_row, seen_in, mark, members):  # type: ignore[no-untyped-def]
    """Writes the event's experts, in order of first mention, to `members` and returns how many there are."""
    size = 0
    for row in range(event_first_row[event], event_first_row[event + 1]):
        for rank in range(expert_ids.shape[1]):
            expert = expert_ids[row, rank]
            if seen_in[expert] != mark:
                seen_in[expert] = mark
                members[size] = expert
                size += 1
    return size


@numba.njit(cache=True)
def _unions(sources, expert_ids, event_first_row, num_experts):  # type: ignore[no-untyped-def]
    """((N + 1,) offsets, the experts of each event's source in order of first mention)."""
    seen_in = np.full(num_experts, -1, dtype=np.int64)
    members = np.empty(num_experts, dtype=np.uint16)
    first_id = np.zeros(len(sources) + 1, dtype=np.int64)
    for event in range(len(sources)):
        size = 0
        if sources[event] >= 0:
            size = _union(sources[event], expert_ids, event_first_row, seen_in, event, members)
        first_id[event + 1] = first_id[event] + size
    named = np.empty(first_id[-1], dtype=np.uint16)
    seen_in[:] = -1
    for event in range(len(sources)):
        if sources[event] >= 0:
            size = _union(sources[event], expert_ids, event_first_row, seen_in, event, members)
            named[first_id[event] : first_id[event + 1]] = members[:size]
    return first_id, named


@numba.njit(cache=True)
def _pair_counts(  # type: ignore[no-untyped-def]
    sources, targets, expert_ids, event_first_row, source_experts, target_experts
):
    """(E, E) pairs with the one expert in the source and the other in the target."""
    count = np.zeros((source_experts, target_experts), dtype=np.uint32)
    seen_in_source = np.full(source_experts, -1, dtype=np.int64)
    seen_in_target = np.full(target_experts, -1, dtype=np.int64)
    givens = np.empty(source_experts, dtype=np.int64)
    members = np.empty(target_experts, dtype=np.int64)
    for pair in range(len(sources)):
        num_givens = _union(sources[pair], expert_ids, event_first_row, seen_in_source, pair, givens)
        num_members = _union(targets[pair], expert_ids, event_first_row, seen_in_target, pair, members)
        for given in givens[:num_givens]:
            for member in members[:num_members]:
                count[given, member] += 1
    return count


@numba.njit(cache=True)
def _name_likeliest(ask, sources, expert_ids, event_first_row, count, named, lengths):  # type: ignore[no-untyped-def]
    """Fills `named` and `lengths` at the places `ask`: the experts with the largest sums, largest first."""
    source_experts, target_experts = count.shape
    width = named.shape[1]
    share = np.zeros(count.shape, dtype=np.float64)
    for given in range(source_experts):
        whole = 0
        for expert in range(target_experts):
            whole += count[given, expert]
        if whole > 0:
            for expert in range(target_experts):
                share[given, expert] = count[given, expert] / whole
    seen_in = np.full(source_experts, -1, dtype=np.int64)
    givens = np.empty(source_experts, dtype=np.int64)
    sums = np.empty(target_experts, dtype=np.float64)
    best = np.empty(width, dtype=np.int64)
    for place in ask:
        num_givens = _union(sources[place], expert_ids, event_first_row, seen_in, place, givens)
        sums[:] = 0
        for given in givens[:num_givens]:
            for expert in range(target_experts):
                sums[expert] += share[given, expert]
        size = 0
        for expert in range(target_experts):
            # On a grid: the order in which shares were added must not decide between equal sums.
            rank = np.int64(np.rint(sums[expert] * 2.0**32))
            if rank == 0 or (size == width and rank <= best[width - 1]):
                continue
            at = size if size < width else width - 1
            while at > 0 and rank > best[at - 1]:
                best[at] = best[at - 1]
                named[place, at] = named[place, at - 1]
                at -= 1
            best[at] = rank
            named[place, at] = expert
            size = min(size + 1, width)
        lengths[place] = size


@numba.njit(cache=True)
def _score_events(  # type: ignore[no-untyped-def]
    events, event_layer, event_first_row, expert_ids, num_experts, covered, first_id, named, width, counts, chance
):
    """Adds to (6, L) `counts` in the order of `PlanScore`, and to (L,) `chance`; the first malformed event, or −1."""
    accessed_in = np.full(num_experts.max(), -1, dtype=np.int64)
    named_in = np.full(num_experts.max(), -1, dtype=np.int64)
    members = np.empty(num_experts.max(), dtype=np.int64)
    for event in events:
        layer = event_layer[event]
        accesses = _union(event, expert_ids, event_first_row, accessed_in, event, members)
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
