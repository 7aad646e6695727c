"""Predictors: functions trace → `Plan`, each told when it names what.

In: a trace; for those that learn, the steps they may learn from (`Fit`). Out: a plan whose `issued_after` is the event
at which the prediction was made. What a plan is worth is counted in `lookahead`; nothing is read or written here but
the recorded predictions of a trace's own file.

Letters: N events, L layers, P pairs, E experts, M experts named at most. A layer is its ordinal among the trace's MoE
layers, and so is a distance in layers: the next MoE layer is one away, dense layers between or not.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from replayer.content import mix
from replayer.plan import BEFORE_ALL, Plan, first_misfit
from replayer.quantities import parse_fraction
from replayer.simulate import UnusableRequest
from replayer.trace import IntArray, MalformedTrace, Trace, steps_without_warmup
from schemas.columns import PHASES
from schemas.trace import PHASE_CODES

BoolArray = npt.NDArray[np.bool_]

LEARNED_EPOCHS = 1
LEARNED_BATCH = 400
LEARNED_RATE = 0.05
LEARNED_RIDGE = 10.0
"""Tried on 8,000 steps of 48 × 128 experts, 3,200 of them scored: with 1, 2, 4 and 8 epochs and rates of 0.02 to 0.1
recall stays within 0.651 to 0.659, where the least-squares start alone has 0.656 and `conditional` 0.543."""

_LEARNED_BYTES = 1 << 26
_WARMUP = PHASE_CODES["warmup"]
_NUM_PHASES = len(PHASES)


@dataclass(frozen=True)
class Fit:
    """The steps that a predictor learns from: the first `steps` ones, warm-up aside.

    text: as tables store it, `first:F`, `TRACE_ID` or `TRACE_ID:first:F`; other: the other trace they are of, null for
    the trace that is predicted, of which only the events after these steps are then covered.
    """

    text: str
    steps: int
    other: Trace | None = None


def first_part(trace: Trace, fraction: Fraction) -> Fit:
    """The first floor(fraction × steps) steps of the trace itself."""
    return Fit(f"first:{_decimal(fraction)}", math.floor(fraction * len(steps_without_warmup(trace))))


def parse_fit(text: str, trace: Trace, read: Callable[[str], Trace]) -> Fit:
    """The fit that `first:F`, `TRACE_ID` or `TRACE_ID:first:F` names; `read` gives the trace of an id.

    Raises:
        UnusableRequest: it is none of these, has no step, or its trace is the predicted one or has other layers or
            expert counts.
    """
    source, first, fraction = text.rpartition("first:") if "first:" in text else (text, "", "1")
    try:
        share = parse_fraction(fraction)
    except ValueError:
        share = Fraction(-1)
    is_own = not source
    if not 0 < share <= 1 or (is_own and share == 1) or (first and source and not source.endswith(":")):
        raise UnusableRequest(f"fit {text[:80]!r}, wanted first:F with 0 < F < 1, TRACE_ID or TRACE_ID:first:F")
    source = source.removesuffix(":") if first else source
    other = None if is_own else read(source)
    if other is not None:
        mine, theirs = trace.metadata, other.metadata
        if mine.trace_id == theirs.trace_id:
            raise UnusableRequest(
                f"fit {text!r} is the predicted trace itself; wanted first:F, so that what is scored was not learned"
            )
        if (mine.moe_layer_ids, mine.experts_per_layer) != (theirs.moe_layer_ids, theirs.experts_per_layer):
            raise UnusableRequest(f"fit {text}: {_shapes_differ(trace, other)}; a predictor fits one model only")
    steps = len(steps_without_warmup(other or trace))
    fit = Fit(text, math.floor(share * steps), other)
    if fit.steps == 0:
        raise UnusableRequest(f"fit {text!r} of {steps} steps is no step at all; wanted a larger fraction")
    return fit


def _shapes_differ(trace: Trace, other: Trace) -> str:
    mine, theirs = trace.metadata, other.metadata
    if mine.moe_layer_ids != theirs.moe_layer_ids:
        ours, found = mine.moe_layer_ids, theirs.moe_layer_ids
        place = next((at for at, pair in enumerate(zip(ours, found, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            return f"{len(found)} layers, the trace has {len(ours)}"
        return f"layer {found[place]} where the trace has {ours[place]}"
    pairs = zip(mine.moe_layer_ids, mine.experts_per_layer, theirs.experts_per_layer, strict=True)
    layer, ours_of, found_of = next(one for one in pairs if one[1] != one[2])
    return f"layer {layer} has {found_of} experts, in the trace {ours_of}"


def previous_token(trace: Trace) -> Plan:
    """Names the union of the same layer's previous event, warm-up aside, in order of first mention; issued at it.

    Previous is meant in recorded order, so after a prefill the first decode event is told the whole union of it, and
    a speculative pass the experts of the pass before. The first event of a layer is not covered.
    """
    sources = _previous_events(trace.event_layer, trace.event_phase, _num_layers(trace))
    return Plan(sources >= 0, sources, *_unions_of(trace, sources))


def frequency(trace: Trace, *, width: int, fit: Fit) -> Plan:
    """Names the `width` experts of the layer that most events of the fitted steps accessed, ties to the lowest id.

    Experts that were not accessed are not named. Known when the fitted steps are over, or before all events where
    another trace was fitted.
    """
    _check_positive(width=width)
    counts = _access_counts(trace, fit)
    named = []
    for begin, end in _layer_bounds(trace):
        ranked = np.argsort(-counts[begin:end], kind="stable")[:width]
        named.append(ranked[counts[begin:end][ranked] > 0].astype(np.uint16))
    asked = _asked(trace, fit)
    lengths = np.array([len(one) for one in named])
    # The predictions of the layers one after the other, of which each event takes its own.
    layer = np.where(asked, trace.event_layer, -1).astype(np.int64)
    first_id = _offsets(np.where(asked, lengths[trace.event_layer], 0))
    ids = _taken(_offsets(lengths), np.concatenate(named), layer, first_id)
    return Plan(asked, _after_the_fit(trace, fit, asked), first_id, ids)


def conditional(trace: Trace, *, depth: int, width: int, fit: Fit) -> Plan:
    """Names the `width` experts most often seen `depth` layers on from the experts of an event; issued at that event.

    An event of layer l is paired with the next event of layer l + depth of the same step and phase in recorded order,
    unless layer l comes again before it: passes of one step do not mix. Over the pairs of the fitted steps
    (warm-up aside, every phase) count[s, e] is the number of pairs with s in the first event and e in the second. The
    prediction made at an event with experts S ranks e by

        Σ over s in S of count[s, e] ÷ Σ over e' of count[s, e'],

    sums taken to the nearest 2⁻³², ties to the lowest id. An expert of sum 0 was never seen and is not named, so a
    prediction may be shorter than `width` or empty. Covered are paired events that were not fitted on: never an event
    of the first `depth` layers.

    Cost: time grows with events × experts per event × E. Memory: per thread one E × E table of counts (4 bytes) and of
    shares (8 bytes), 9.6 MB at 896 experts; 2 M + 8 bytes per covered event.

    Raises:
        UnusableRequest: depth or width is below 1.
    """
    _check_positive(depth=depth, width=width)
    experts = np.diff(trace.layer_first_object)
    width = _at_most_all(trace, width)
    sources, asked = _sources(trace, depth), _asked(trace, fit)
    asked &= sources >= 0
    learned = fit.other or trace
    fit_sources = sources if fit.other is None else _sources(learned, depth)
    is_fitted = (fit_sources >= 0) & _is_fitted(trace, fit)
    num_layers = _num_layers(trace)
    ask, first_ask = _by_layer(np.flatnonzero(asked), trace.event_layer, num_layers)
    pairs, first_pair = _by_layer(np.flatnonzero(is_fitted), learned.event_layer, num_layers)
    place = np.cumsum(asked) - 1  # (N,) of each covered event among them
    named = np.zeros((len(ask), width), dtype=np.uint16)  # (P, M)
    lengths = np.zeros(len(ask), dtype=np.int64)  # (P,)

    def name(layer: int) -> None:
        targets = pairs[first_pair[layer] : first_pair[layer + 1]]
        count = _pair_counts(fit_sources[targets], targets, learned.expert_ids, learned.event_first_row,
                             experts[layer - depth], experts[layer])  # fmt: skip
        events = ask[first_ask[layer] : first_ask[layer + 1]]
        _name_likeliest(place[events], sources[events], trace.expert_ids, trace.event_first_row, count, named, lengths)

    _for_each_layer(name, range(depth, num_layers))
    return _plan_of_rows(asked, sources, named, lengths)


def union(first: Plan, second: Plan) -> Plan:
    """What either plan names, the first one's experts before what the second one adds.

    Covered is what one of them covers; issued when the later of those that cover an event was.
    """
    covered = first.covered | second.covered
    issued_after = np.maximum(
        np.where(first.covered, first.issued_after, BEFORE_ALL),
        np.where(second.covered, second.issued_after, BEFORE_ALL),
    )
    return Plan(covered, issued_after, *_merged(first.first_id, first.expert_ids, second.first_id, second.expert_ids))


def recorded(path: Path, trace: Trace) -> Plan | None:
    """What the trace's file says that a plan had named before each event (`predicted_expert_ids`); null if nothing.

    An event is covered if one of its rows has a prediction, and then their union in order of first mention is named.
    When it was made is not recorded; it counts as made at the event before.

    Raises:
        MalformedTrace: the column cannot be read, or names an expert that the layer does not have.
    """
    events = len(trace.event_layer)
    lists: list[pa.Array] = []
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, ["predicted_expert_ids"]).column(0)
                lists += column.chunks
    except (pa.ArrowException, KeyError, OSError) as error:
        raise MalformedTrace(f"{path}: predicted_expert_ids: {str(error).splitlines()[0][:200]}") from None
    rows = pa.concat_arrays(lists) if lists else pa.array([], pa.list_(pa.uint16()))
    if len(rows) != trace.event_first_row[-1]:
        raise MalformedTrace(f"{path}: {len(rows):,} rows, the trace has {trace.event_first_row[-1]:,}")
    if rows.null_count == len(rows):
        return None
    is_said = rows.is_valid().to_numpy(zero_copy_only=False)
    lengths = rows.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ids = rows.flatten().to_numpy(zero_copy_only=False).astype(np.uint16)
    covered = np.add.reduceat(is_said, trace.event_first_row[:-1]) > 0
    # Offsets of events instead of rows: the ids of an event's rows lie one after the other.
    first_id = _offsets(lengths.astype(np.int64))[trace.event_first_row]
    plan = Plan(
        covered,
        np.where(covered, np.arange(events) - 1, BEFORE_ALL),
        *_merged(first_id, ids, np.zeros(events + 1, dtype=np.int64), np.empty(0, dtype=np.uint16)),
    )
    if (misfit := first_misfit(plan, trace)) is not None:
        raise MalformedTrace(f"{path}: predicted_expert_ids of {misfit}")
    return plan


def oracle(trace: Trace, *, depth: int = 1) -> Plan:
    """Names what each event accesses, in order of first mention: the bound of all predictors.

    Issued at the event `depth` layers before in the same pass, else (in the first layers) at the event before.
    """
    _check_positive(depth=depth)
    events = np.arange(len(trace.event_layer))
    covered = trace.event_phase != _WARMUP
    sources = _sources(trace, depth)
    issued_after = np.where(covered, np.where(sources >= 0, sources, events - 1), BEFORE_ALL)
    return Plan(covered, issued_after, *_unions_of(trace, np.where(covered, events, -1)))


def random(trace: Trace, *, width: int, seed: int = 0) -> Plan:
    """Names `width` experts of the layer uniformly at random, without repeats; known before all events.

    Each event draws by itself, from the seed and its number. Expected recall is width ÷ E.
    """
    _check_positive(width=width)
    width = _at_most_all(trace, width)
    asked = trace.event_phase != _WARMUP
    events = np.flatnonzero(asked)
    named, lengths = _draw_uniformly(
        events + trace.first_event, trace.event_layer[events], np.diff(trace.layer_first_object), width, _seed(seed)
    )
    return _plan_of_rows(asked, np.full(len(asked), BEFORE_ALL), named, lengths)


def popularity(trace: Trace, *, width: int, fit: Fit, seed: int = 0) -> Plan:
    """Names `width` experts at random without repeats, each drawn in proportion to its accesses in the fitted steps.

    The null that knows how skewed a layer is and nothing else. Experts never accessed there are not named. Known when
    the fitted steps are over. Each event draws by itself: Efraimidis and Spirakis 2006, "Weighted random sampling with
    a reservoir", keys ln(u) ÷ weight.
    """
    _check_positive(width=width)
    width = _at_most_all(trace, width)
    asked = _asked(trace, fit)
    events = np.flatnonzero(asked)
    named, lengths = _draw_by_weight(
        events + trace.first_event, trace.event_layer[events], _access_counts(trace, fit), trace.layer_first_object,
        width, _seed(seed),
    )  # fmt: skip
    return _plan_of_rows(asked, _after_the_fit(trace, fit, asked), named, lengths)


def learned(trace: Trace, *, depth: int, width: int, fit: Fit, epochs: int = LEARNED_EPOCHS) -> Plan:
    """Names the `width` likeliest experts by a logistic regression per layer and expert; issued at the source event.

    Pairs, fitted and covered events are those of `conditional`. The inputs are the experts of the source event,
    one-hot; each target expert is a regression of its own. All start at the ridge regression of their occurrence, in
    closed form, and are taken down the mean log-loss by Adam (Kingma and Ba 2015) with a falling rate, in an order of
    pairs that is always the same. Layers are trained together, as many as keep pairs and tables within 64 MiB.

    Raises:
        UnusableRequest: depth, width or epochs is below 1.
    """
    _check_positive(depth=depth, width=width, epochs=epochs)
    width = _at_most_all(trace, width)
    sources, asked = _sources(trace, depth), _asked(trace, fit)
    asked &= sources >= 0
    learned_from = fit.other or trace
    fit_sources = sources if fit.other is None else _sources(learned_from, depth)
    is_fitted = (fit_sources >= 0) & _is_fitted(trace, fit)
    num_layers, experts = _num_layers(trace), np.diff(trace.layer_first_object)
    ask, first_ask = _by_layer(np.flatnonzero(asked), trace.event_layer, num_layers)
    pairs, first_pair = _by_layer(np.flatnonzero(is_fitted), learned_from.event_layer, num_layers)
    place = np.cumsum(asked) - 1
    named = np.zeros((len(ask), width), dtype=np.uint16)
    lengths = np.zeros(len(ask), dtype=np.int64)
    most = int(experts.max())
    longest = int(max(np.diff(first_pair).max(), np.diff(first_ask).max(), 1))
    # Of a layer: inputs and targets, 4 bytes each, and five tables: weights, slopes, products and two moments.
    together = max(1, _LEARNED_BYTES // (8 * longest * most + 20 * most * most))
    for begin in range(depth, num_layers, together):
        layers = range(begin, min(begin + together, num_layers))
        fitted = [pairs[first_pair[layer] : first_pair[layer + 1]] for layer in layers]
        asking = [ask[first_ask[layer] : first_ask[layer + 1]] for layer in layers]
        inputs = _one_hot(learned_from, [fit_sources[one] for one in fitted], most)
        targets = _one_hot(learned_from, fitted, most)
        questions = _one_hot(trace, [sources[one] for one in asking], most)
        answers = _regress(
            inputs, targets, [len(one) for one in fitted], questions, width, experts[list(layers)], epochs
        )
        for events, layer, found in zip(asking, layers, answers, strict=True):
            size = min(width, int(experts[layer]))
            named[place[events], :size] = found[: len(events), :size]
            lengths[place[events]] = size
    return _plan_of_rows(asked, sources, named, lengths)


def narrowed(plan: Plan, *, width: int) -> Plan:
    """The plan with at most the first `width` experts of each prediction."""
    first_id = _offsets(np.minimum(np.diff(plan.first_id), width))
    return replace(plan, first_id=first_id, expert_ids=_taken(plan.first_id, plan.expert_ids,
                                                              np.arange(len(plan.covered)), first_id))  # fmt: skip


def shuffled(plan: Plan, trace: Trace, *, seed: int = 0, among: BoolArray | None = None) -> Plan:
    """The predictions of a plan permuted among the covered events of the same layer: the null of its timing.

    `among` (N,) restricts that to some events; others keep theirs. A plan that is no better than this knows a layer's
    popular experts at most, not when they are used.
    """
    chosen = plan.covered if among is None else plan.covered & among
    sources = np.arange(len(chosen))
    generator = np.random.default_rng(seed)
    events, first = _by_layer(np.flatnonzero(chosen), trace.event_layer, _num_layers(trace))
    for begin, end in pairwise(first):
        sources[events[begin:end]] = generator.permutation(events[begin:end])
    first_id = _offsets(np.diff(plan.first_id)[sources])
    return replace(plan, first_id=first_id, expert_ids=_taken(plan.first_id, plan.expert_ids, sources, first_id))


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UnusableRequest(f"{name} {number} of a prediction, wanted at least 1")


def _at_most_all(trace: Trace, width: int) -> int:
    """No prediction can be wider than the largest layer, and none takes the memory of one."""
    return min(width, int(np.diff(trace.layer_first_object).max()))


def _num_layers(trace: Trace) -> int:
    return len(trace.layer_first_object) - 1


def _layer_bounds(trace: Trace) -> list[tuple[int, int]]:
    return list(pairwise(trace.layer_first_object.tolist()))


def _seed(seed: int) -> np.uint64:
    return np.uint64(seed % 2**64)


def _decimal(fraction: Fraction) -> str:
    return str(float(fraction)) if Fraction(str(float(fraction))) == fraction else str(fraction)


def _is_fitted(trace: Trace, fit: Fit) -> BoolArray:
    """(N,) of the trace that is learned from: whether an event is of the fitted steps; warm-up events may be among."""
    learned = fit.other or trace
    fitted: BoolArray = learned.event_step < first_step_after(learned, fit.steps)
    return fitted


def _asked(trace: Trace, fit: Fit) -> BoolArray:
    """(N,) whether an event may be predicted: no warm-up, and not learned from."""
    asked: BoolArray = trace.event_phase != _WARMUP
    if fit.other is None:
        asked = asked & ~_is_fitted(trace, fit)
    return asked


def first_step_after(trace: Trace, fit_steps: int) -> int:
    """The step_id of the first step after `fit_steps` steps, counted without warm-up steps."""
    # Steps never descend, so this is `steps_without_warmup` without its sorting.
    steps = trace.event_step[trace.event_phase != _WARMUP]
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    return int(steps[starts[fit_steps]]) if fit_steps < len(starts) else np.iinfo(np.int64).max


def _after_the_fit(trace: Trace, fit: Fit, asked: BoolArray) -> IntArray:
    """(N,) the last fitted event; before all where another trace was fitted."""
    last = BEFORE_ALL
    if fit.other is None and (fitted := np.flatnonzero(_is_fitted(trace, fit))).size:
        last = int(fitted[-1])
    return np.where(asked, last, BEFORE_ALL)


def _access_counts(trace: Trace, fit: Fit) -> IntArray:
    """(O,) events of the fitted steps, warm-up aside, that accessed each (layer, expert)."""
    learned = fit.other or trace
    events = np.flatnonzero(_is_fitted(trace, fit) & (learned.event_phase != _WARMUP))
    counts: IntArray = _count_accesses(
        events, learned.expert_ids, learned.event_first_row, learned.event_layer, learned.layer_first_object
    )
    return counts


def _sources(trace: Trace, depth: int) -> IntArray:
    """(N,) the event `depth` layers before each event in the same pass, or −1."""
    phases = trace.event_phase
    sources: IntArray = _paired_events(trace.event_layer, trace.event_step, phases, _num_layers(trace), depth)
    return sources


def _for_each_layer(work: Callable[[int], None], layers: range) -> None:
    # The kernels run without the interpreter lock, and no layer sees another: the number of threads changes nothing.
    if not layers:
        return
    with ThreadPoolExecutor(min(len(layers), len(os.sched_getaffinity(0)))) as threads:
        for _ in threads.map(work, layers):
            pass


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _plan_of_rows(covered: BoolArray, issued_after: IntArray, named: npt.NDArray[np.uint16], lengths: IntArray) -> Plan:
    """The plan whose covered events name the first `lengths` (P,) of the rows of `named` (P, M), in their order."""
    ids_of_event = np.zeros(len(covered), dtype=np.int64)
    ids_of_event[covered] = lengths
    is_named = np.arange(named.shape[1]) < lengths[:, np.newaxis]  # (P, M)
    return Plan(covered, np.where(covered, issued_after, BEFORE_ALL), _offsets(ids_of_event), named[is_named])


def _unions_of(trace: Trace, sources: IntArray) -> tuple[IntArray, npt.NDArray[np.uint16]]:
    found: tuple[IntArray, npt.NDArray[np.uint16]] = _unions(
        sources, trace.expert_ids, trace.event_first_row, int(np.diff(trace.layer_first_object).max())
    )
    return found


def _one_hot(trace: Trace, events_of_layer: list[IntArray], experts: int) -> npt.NDArray[np.float32]:
    """(layers, most events, E) with a 1 for each expert of an event, 0 after a layer's last event."""
    rows = np.zeros((len(events_of_layer), max(map(len, events_of_layer), default=0), experts), dtype=np.float32)
    for layer, events in enumerate(events_of_layer):
        _set_experts(events, trace.expert_ids, trace.event_first_row, rows[layer])
    return rows


def _regress(
    inputs: npt.NDArray[np.float32],
    targets: npt.NDArray[np.float32],
    lengths: list[int],
    questions: npt.NDArray[np.float32],
    width: int,
    experts: IntArray,
    epochs: int,
) -> npt.NDArray[np.int64]:
    """(layers, questions, M) the likeliest experts of regressions fitted on (layers, pairs, E), layer by layer."""
    import torch

    known = torch.tensor(lengths)[:, None, None]
    pairs, most = inputs.shape[1:]
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    share = (y.sum(1, keepdim=True) + 0.5) / (known + 1)  # (layers, 1, E)
    products = torch.bmm(x.transpose(1, 2), x)  # (layers, E, E)
    seen = torch.diagonal(products, dim1=1, dim2=2)[:, :, None]
    products += LEARNED_RIDGE * torch.eye(most)
    weights = torch.linalg.solve(products, torch.bmm(x.transpose(1, 2), y) - seen * share)
    # From shares to log-odds by the slope at the mean share: the same for all experts, so that their ranks stay.
    mean_share = share.mean(2, keepdim=True)
    slope_there = 1 / (mean_share * (1 - mean_share)).clamp(min=1e-3)
    weights *= slope_there
    bias = torch.logit(mean_share, eps=1e-3) + slope_there * (share - mean_share)
    is_pair = (torch.arange(pairs)[:, None] < known).float()  # (layers, pairs, 1)
    moments = [torch.zeros_like(one) for one in (weights, weights, bias, bias)]
    # Batches stride over all pairs, so each is of the whole time that was fitted.
    strides = max(1, -(-pairs // LEARNED_BATCH))
    steps = epochs * strides if pairs else 0
    for step in range(1, steps + 1):
        chosen = slice((step - 1) % strides, None, strides)
        part = x[:, chosen]
        wrong = torch.baddbmm(bias, part, weights).sigmoid_().sub_(y[:, chosen]).mul_(is_pair[:, chosen])
        wrong /= part.shape[1]
        rate = LEARNED_RATE * (1 - (step - 1) / steps)
        for value, slope, mean, square in (
            (weights, torch.bmm(part.transpose(1, 2), wrong), moments[0], moments[1]),
            (bias, wrong.sum(1, keepdim=True), moments[2], moments[3]),
        ):
            mean.lerp_(slope, 0.1)
            square.mul_(0.99).addcmul_(slope, slope, value=0.01)
            root = (square / (1 - 0.99**step)).sqrt_().add_(1e-8)
            value.addcdiv_(mean, root, value=-rate / (1 - 0.9**step))
    logits = torch.baddbmm(bias, torch.from_numpy(questions), weights)
    beyond = torch.arange(most) >= torch.from_numpy(experts)[:, None]
    logits.masked_fill_(beyond[:, None, :], -torch.inf)
    best: npt.NDArray[np.int64] = logits.topk(min(width, most), dim=2).indices.numpy()
    return best


@numba.njit(cache=True, nogil=True)
def _previous_events(event_layer, event_phase, num_layers):  # type: ignore[no-untyped-def]
    """(N,) the event of the same layer before each event, or −1."""
    previous = np.full(num_layers, -1, dtype=np.int64)
    sources = np.full(len(event_layer), -1, dtype=np.int64)
    for event in range(len(event_layer)):
        if event_phase[event] != _WARMUP:
            sources[event] = previous[event_layer[event]]
            previous[event_layer[event]] = event
    return sources


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _by_layer(events, event_layer, num_layers):  # type: ignore[no-untyped-def]
    """(the events layer by layer, in their order; (L + 1,) offsets)."""
    first = np.zeros(num_layers + 1, dtype=np.int64)
    for event in events:
        first[event_layer[event] + 1] += 1
    for layer in range(num_layers):
        first[layer + 1] += first[layer]
    place = first[:-1].copy()
    sorted_events = np.empty(len(events), dtype=np.int64)
    for event in events:
        layer = event_layer[event]
        sorted_events[place[layer]] = event
        place[layer] += 1
    return sorted_events, first


@numba.njit(cache=True, nogil=True)
def union_of_event(event, expert_ids, event_first_row, seen_in, mark, members):  # type: ignore[no-untyped-def]
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


@numba.njit(cache=True, nogil=True)
def _unions(sources, expert_ids, event_first_row, num_experts):  # type: ignore[no-untyped-def]
    """((N + 1,) offsets, the experts of each event's source in order of first mention)."""
    first_id = np.zeros(len(sources) + 1, dtype=np.int64)
    upper = 0
    for source in sources:
        if source >= 0:
            rows = event_first_row[source + 1] - event_first_row[source]
            upper += min(rows * expert_ids.shape[1], num_experts)
    seen_in = np.full(num_experts, -1, dtype=np.int64)
    members = np.empty(num_experts, dtype=np.uint16)
    named = np.empty(upper, dtype=np.uint16)
    for event in range(len(sources)):
        first = first_id[event]
        first_id[event + 1] = first
        if sources[event] >= 0:
            size = union_of_event(sources[event], expert_ids, event_first_row, seen_in, event, members)
            named[first : first + size] = members[:size]
            first_id[event + 1] = first + size
    return first_id, named[: first_id[-1]].copy()


@numba.njit(cache=True, nogil=True)
def _merged(first_id, expert_ids, other_first_id, other_ids):  # type: ignore[no-untyped-def]
    """((N + 1,) offsets, each event's ids of the first and then of the second, each once)."""
    merged_first = np.zeros(len(first_id), dtype=np.int64)
    merged = np.empty(len(expert_ids) + len(other_ids), dtype=np.uint16)
    named_in = np.full(1 << 16, -1, dtype=np.int64)
    end = 0
    for event in range(len(first_id) - 1):
        for expert in expert_ids[first_id[event] : first_id[event + 1]]:
            if named_in[expert] != event:
                named_in[expert] = event
                merged[end] = expert
                end += 1
        for expert in other_ids[other_first_id[event] : other_first_id[event + 1]]:
            if named_in[expert] != event:
                named_in[expert] = event
                merged[end] = expert
                end += 1
        merged_first[event + 1] = end
    return merged_first, merged[:end].copy()


@numba.njit(cache=True, nogil=True)
def _taken(first_id, expert_ids, sources, new_first_id):  # type: ignore[no-untyped-def]
    """For each event the first ids that its source has, as many as its new offsets leave; none of a source of −1."""
    taken = np.empty(new_first_id[-1], dtype=np.uint16)
    for event in range(len(sources)):
        if sources[event] >= 0:
            begin = first_id[sources[event]]
            size = new_first_id[event + 1] - new_first_id[event]
            taken[new_first_id[event] : new_first_id[event + 1]] = expert_ids[begin : begin + size]
    return taken


@numba.njit(cache=True, nogil=True)
def _count_accesses(events, expert_ids, event_first_row, event_layer, layer_first_object):  # type: ignore[no-untyped-def]
    counts = np.zeros(layer_first_object[-1], dtype=np.int64)
    seen_in = np.full(layer_first_object[-1], -1, dtype=np.int64)
    for event in events:
        base = layer_first_object[event_layer[event]]
        for row in range(event_first_row[event], event_first_row[event + 1]):
            for rank in range(expert_ids.shape[1]):
                thing = base + expert_ids[row, rank]
                if seen_in[thing] != event:
                    seen_in[thing] = event
                    counts[thing] += 1
    return counts


@numba.njit(cache=True, nogil=True)
def _set_experts(events, expert_ids, event_first_row, rows):  # type: ignore[no-untyped-def]
    for place in range(len(events)):
        for row in range(event_first_row[events[place]], event_first_row[events[place] + 1]):
            for rank in range(expert_ids.shape[1]):
                rows[place, expert_ids[row, rank]] = 1


@numba.njit(cache=True, nogil=True)
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
        num_givens = union_of_event(sources[pair], expert_ids, event_first_row, seen_in_source, pair, givens)
        num_members = union_of_event(targets[pair], expert_ids, event_first_row, seen_in_target, pair, members)
        for given in givens[:num_givens]:
            for member in members[:num_members]:
                count[given, member] += np.uint32(1)
    return count


@numba.njit(cache=True, nogil=True)
def _name_likeliest(places, sources, expert_ids, event_first_row, count, named, lengths):  # type: ignore[no-untyped-def]
    """Fills `named` and `lengths` at the places: the experts with the largest sums at the sources, largest first."""
    source_experts, target_experts = count.shape
    width = named.shape[1]
    often = np.zeros(target_experts, dtype=np.int64)
    for given in range(source_experts):
        for expert in range(target_experts):
            often[expert] += count[given, expert]
    # The most frequent experts first: then few that come later displace one that is already among the best.
    order = np.argsort(-often, kind="mergesort")
    share = np.zeros(count.shape, dtype=np.float64)
    for given in range(source_experts):
        whole = 0
        for expert in range(target_experts):
            whole += count[given, expert]
        if whole > 0:
            for at in range(target_experts):
                share[given, at] = count[given, order[at]] / whole
    seen_in = np.full(source_experts, -1, dtype=np.int64)
    givens = np.empty(source_experts, dtype=np.int64)
    sums = np.empty(target_experts, dtype=np.float64)
    best = np.empty(width, dtype=np.uint64)
    for asked in range(len(places)):
        num_givens = union_of_event(sources[asked], expert_ids, event_first_row, seen_in, asked, givens)
        sums[:] = 0
        for given in givens[:num_givens]:
            row = share[given]
            for at in range(target_experts):
                sums[at] += row[at]
        size = 0
        floor = 0.5
        for at in range(target_experts):
            scaled = sums[at] * 2.0**32
            if scaled < floor:
                continue
            # On a grid: the order in which shares were added must not decide between equal sums. Beside the rank its
            # id, turned round, so that the largest key is the largest sum and then the lowest id.
            rank = np.uint64(np.rint(scaled))
            if rank == np.uint64(0):
                continue
            key = (rank << np.uint64(16)) | np.uint64(0xFFFF - order[at])
            if size == width:
                if key < best[width - 1]:
                    continue
                size -= 1
            place = size
            while place > 0 and key > best[place - 1]:
                best[place] = best[place - 1]
                place -= 1
            best[place] = key
            size += 1
            if size == width:
                floor = np.float64(best[width - 1] >> np.uint64(16)) - 0.5
        for at in range(size):
            named[places[asked], at] = np.uint16(np.uint64(0xFFFF) - (best[at] & np.uint64(0xFFFF)))
        lengths[places[asked]] = size


@numba.njit(cache=True, nogil=True)
def _draw_uniformly(event_ids, layers, num_experts, width, seed):  # type: ignore[no-untyped-def]
    """((P, M), (P,)): the first draws of Fisher and Yates, an event's own."""
    named = np.zeros((len(event_ids), width), dtype=np.uint16)
    lengths = np.empty(len(event_ids), dtype=np.int64)
    urn = np.arange(num_experts.max())
    swaps = np.empty(width, dtype=np.int64)
    for place in range(len(event_ids)):
        experts = num_experts[layers[place]]
        size = min(width, experts)
        drawn = seed ^ mix(np.uint64(event_ids[place]))
        for rank in range(size):
            drawn = mix(drawn + np.uint64(0x9E3779B97F4A7C15))
            other = rank + np.int64(drawn % np.uint64(experts - rank))
            urn[rank], urn[other] = urn[other], urn[rank]
            named[place, rank] = urn[rank]
            swaps[rank] = other
        for rank in range(size - 1, -1, -1):
            other = swaps[rank]
            urn[rank], urn[other] = urn[other], urn[rank]
        lengths[place] = size
    return named, lengths


@numba.njit(cache=True, nogil=True)
def _draw_by_weight(event_ids, layers, counts, first_object, width, seed):  # type: ignore[no-untyped-def]
    named = np.zeros((len(event_ids), width), dtype=np.uint16)
    lengths = np.empty(len(event_ids), dtype=np.int64)
    best = np.empty(width, dtype=np.float64)
    for place in range(len(event_ids)):
        layer = layers[place]
        begin, end = first_object[layer], first_object[layer + 1]
        drawn = seed ^ mix(np.uint64(event_ids[place]))
        size = 0
        for thing in range(begin, end):
            if counts[thing] == 0:
                continue
            drawn = mix(drawn + np.uint64(0x9E3779B97F4A7C15))
            # In (0, 1), both ends left out.
            uniform = (np.float64(drawn >> np.uint64(12)) + 0.5) * 2.0**-52
            key = np.log(uniform) / counts[thing]
            if size == width:
                if key <= best[width - 1]:
                    continue
                size -= 1
            at = size
            while at > 0 and key > best[at - 1]:
                best[at] = best[at - 1]
                named[place, at] = named[place, at - 1]
                at -= 1
            best[at] = key
            named[place, at] = thing - begin
            size += 1
        lengths[place] = size
    return named, lengths
