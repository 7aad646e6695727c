"""Several traces → one: batches, mixtures of tenants and domains, and the shuffled null; and the figures they need.

In: `replayer.trace.Trace`s of one model. Out: a Trace to simulate, never one to write; the `+` and `@` in its trace_id
are what no canonical trace may have. Steps count from 0 and hold no warm-up. What a cache makes of it belongs to
`simulate`, intervals to `intervals`.

Letters: S steps, N events, R rows, A accesses, O objects, L layers, P parts (an event of a source that becomes an event
of the new trace, or some of its rows).
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from replayer.trace import IntArray, Trace, check_rows, steps_without_warmup
from schemas.trace import PHASE_CODES, SCHEMA_VERSION, Counts, TraceMetadata, UserMetadata

StepRange = tuple[int | None, int | None]
StepCounts = npt.NDArray[np.integer[Any]]

_NUM_PHASES = len(PHASE_CODES)


class UnmatchedTraces(ValueError):
    """Traces, or steps of them, that cannot be put together."""


@dataclass(frozen=True)
class Mixture:
    """Steps of several traces one after the other.

    source_of_step: (S,) which of the traces given a step comes from; source_step: (S,) which of its steps, counted
    without warm-up.
    """

    trace: Trace
    source_of_step: npt.NDArray[np.int32]
    source_step: IntArray


def merged(traces: Sequence[Trace]) -> Trace:
    """The traces as streams of one batch: step i of each together, as many steps as the shortest has.

    An event of the batch is what its streams ask of one layer in one pass of one phase: its rows are theirs, stream by
    stream in the order given. Prefill and decode of one step therefore stay two events per layer. The j-th event of a
    stream in a (step, layer, phase) belongs to pass j, so streams that repeat a pass (a failed speculation, then its
    fallback) meet in its first pass with those that do not, also in a layer that the first pass left out.

    Events of a step keep the order of each stream: one comes as soon as every stream that has it has reached it, the
    lowest (pass, layer, phase) first. Where streams contradict one another, the first stream decides.

    Raises:
        UnmatchedTraces: no trace, or not of the same layers, experts and top k.
    """
    _check_one_model(traces)
    selected = [_events_by_step(trace) for trace in traces]
    num_steps = min(len(first_event) - 1 for _, first_event in selected)
    events = [all_events[: first_event[num_steps]] for all_events, first_event in selected]
    first_part = np.stack([first_event[: num_steps + 1] for _, first_event in selected])
    first_part += np.cumsum([0, *(len(one) for one in events[:-1])])[:, np.newaxis]
    layers = len(traces[0].layer_first_object) - 1
    slots = []
    for trace, one in zip(traces, events, strict=True):
        layer, phase = trace.event_layer[one], trace.event_phase[one]
        passes = _pass_ordinals(trace.event_step[one], layer, phase, layers)
        slots.append((passes * layers + layer) * _NUM_PHASES + phase)
    target, first_event = _places(np.concatenate(slots), first_part, max(int(one.max()) for one in slots) + 1)
    accepted = _accepted_tokens(traces)
    step_accepted = None
    if accepted is not None:
        step_accepted = np.zeros((num_steps, _NUM_PHASES), dtype=np.int32)
        for tokens in accepted:
            step_accepted += tokens[:num_steps]
    trace_id = "+".join(trace.metadata.trace_id for trace in traces)
    return _gathered(traces, trace_id, events, np.split(target, first_part[1:, 0]), first_event, step_accepted)


def switched(
    first: Trace, second: Trace, *, first_steps: StepRange = (None, None), second_steps: StepRange = (None, None)
) -> Mixture:
    """The selected steps of the first trace, then those of the second: the domain changes.

    Ranges are half-open and counted without warm-up steps; null is the end of the trace.

    Raises:
        UnmatchedTraces: the traces are not of one model, or do not have these steps.
    """
    traces = [first, second]
    _check_one_model(traces)
    ranges, names = [], []
    for trace, steps in zip(traces, (first_steps, second_steps), strict=True):
        total = len(steps_without_warmup(trace))
        begin, end = _resolved(steps, total, trace.metadata.trace_id)
        ranges.append(np.arange(begin, end))
        whole = (begin, end) == (0, total)
        names.append(trace.metadata.trace_id + ("" if whole else f"@{begin}-{end}"))
    source_of_step = np.repeat(np.arange(2, dtype=np.int32), [len(steps) for steps in ranges])
    return _mixture(traces, f"{'+'.join(names)}@switched", source_of_step, np.concatenate(ranges))


def interleaved(traces: Sequence[Trace], arrivals: Sequence[int] | None = None) -> Mixture:
    """The traces as tenants who take turns, a step each; each begins with its first step.

    A tenant arrives before the step of the mixture that `arrivals` says (0 for all) and takes that step, then everyone
    present takes turns; who arrives together goes in the order given. The mixture ends where the tenant whose turn it
    is has no step left.

    Raises:
        UnmatchedTraces: the traces are not of one model, nobody is there at step 0, or the mixture ends before a
        tenant arrives.
    """
    _check_one_model(traces)
    arrivals = [0] * len(traces) if arrivals is None else list(arrivals)
    if len(arrivals) != len(traces) or min(arrivals) != 0:
        raise UnmatchedTraces(f"arrivals {arrivals} of {len(traces)} traces, wanted one each, the earliest 0")
    left = [len(steps_without_warmup(trace)) for trace in traces]
    coming = deque(sorted(range(len(traces)), key=lambda tenant: (arrivals[tenant], tenant)))
    present: deque[int] = deque()
    turns: list[int] = []
    while True:
        arriving = []
        while coming and arrivals[coming[0]] == len(turns):
            arriving.append(coming.popleft())
        present.extendleft(reversed(arriving))
        if not left[present[0]]:
            break
        left[present[0]] -= 1
        turns.append(present[0])
        present.rotate(-1)
    if coming:
        raise UnmatchedTraces(
            f"trace {traces[coming[0]].metadata.trace_id} is to arrive at step {arrivals[coming[0]]}, but the mixture "
            f"ends at step {len(turns)}; wanted an earlier arrival, or longer traces"
        )
    source_of_step = np.array(turns, dtype=np.int32)
    source_step = np.empty(len(turns), dtype=np.int64)
    for tenant in range(len(traces)):
        mine = np.flatnonzero(source_of_step == tenant)
        source_step[mine] = np.arange(len(mine))
    names = [
        trace.metadata.trace_id + (f"@from-{arrival}" if arrival else "")
        for trace, arrival in zip(traces, arrivals, strict=True)
    ]
    return _mixture(traces, f"{'+'.join(names)}@interleaved", source_of_step, source_step)


def shuffled(trace: Trace, seed: int = 0, *, steps: StepRange = (None, None)) -> Trace:
    """The token-shuffled null: the same events and sizes, their rows exchanged at random over the selected steps.

    The T rows that a layer has in one phase, in recorded order, become `rows[default_rng(seed).permutation(T)]`, drawn
    afresh for every layer and phase. So layers with equally many rows are shuffled alike and a token keeps its routes
    through all of them; a layer that some passes skip has a permutation of its own. With one row per event that
    permutes the steps of a phase. As `pipeline.locality` shuffles, phase by phase. Warm-up stays as it is.

    Raises:
        UnmatchedTraces: the trace does not have these steps.
    """
    all_events, first_event = _events_by_step(trace)
    begin, end = _resolved(steps, len(first_event) - 1, trace.metadata.trace_id)
    selected = all_events[first_event[begin] : first_event[end]]
    group = trace.event_layer[selected].astype(np.int64) * _NUM_PHASES + trace.event_phase[selected]
    order = np.argsort(group, kind="stable")
    selected, group = selected[order], group[order]
    expert_ids = trace.expert_ids.copy()
    for one, other in pairwise(np.flatnonzero(np.diff(group, prepend=-1, append=-1))):
        events = selected[one:other]
        rows = _ranges(trace.event_first_row[events], trace.event_first_row[events + 1])
        expert_ids[rows] = trace.expert_ids[rows[np.random.default_rng(seed).permutation(len(rows))]]
    _, accesses = check_rows(expert_ids, trace.event_first_row, trace.event_layer, trace.layer_first_object)
    trace_id = f"{trace.metadata.trace_id}@shuffled-{seed}"
    metadata = trace.metadata.model_copy(
        update={
            **_identity([trace.metadata], trace_id),
            "counts": trace.metadata.counts.model_copy(update={"accesses": int(accesses)}),
        }
    )
    return replace(trace, metadata=metadata, expert_ids=expert_ids)


# What a batch changes


def dedup_factor(stream_accesses: Sequence[int], merged_accesses: int) -> float | None:
    """Σ of the accesses of the streams alone ÷ accesses of their batch; null if 0 ÷ 0.

    With one row per event and stream the numerator is the batch's selections.
    """
    return _ratio(sum(stream_accesses), merged_accesses)


def per_token_miss_ratio(
    stream_misses: Sequence[int], merged_misses: int, *, stream_tokens: int, merged_tokens: int
) -> float | None:
    """Misses per token of the batch ÷ misses per token of its streams, each alone with the whole budget.

    Tokens are summed over streams; over the same steps they are equal and cancel. Null where nothing is divided.
    """
    alone = _ratio(sum(stream_misses), stream_tokens)
    together = _ratio(merged_misses, merged_tokens)
    return None if alone is None or together is None else _ratio(together, alone)


# After a switch


class Recovery(NamedTuple):
    """How long a hit rate suffers from a switch, and what that costs.

    recovery_steps: from the switch to the first window of `window_steps` whose hit rate is at least the steady one less
    `margin`, 0 if the first window's is; null if none is. steady_hits ÷ steady_accesses: the steady hit rate.
    extra_misses of compared_accesses: misses beyond those of the second trace warm and alone, over all its steps;
    negative if the switch helped, null if that run is not known.
    """

    recovery_steps: int | None
    window_steps: int
    margin: float
    steady_hits: int
    steady_accesses: int
    extra_misses: int | None
    compared_accesses: int | None


def recovery(
    hits: StepCounts,
    accesses: StepCounts,
    switch_step: int,
    *,
    window_steps: int,
    margin: float,
    alone_hits: StepCounts | None = None,
) -> Recovery:
    """The recovery of the steps from `switch_step` on, from (S,) hits and accesses.

    `alone_hits` (S − switch_step,) are the hits of the same steps where the second trace is replayed warm and alone.
    Each window is then judged by the same window of that run, so a hard passage of the text is not taken for a
    cold cache. Without it the steady state is the median window (the lower of two) of the later half of the windows:
    one always recovers to that, so it says when, not whether. Windows without an access judge nothing.

    For tenants who take turns pass the steps of one tenant, and as `switch_step` its first one after the arrival.
    """
    if len(hits) != len(accesses) or not 0 <= switch_step <= len(hits) or window_steps < 1:
        raise ValueError(
            f"{len(hits)} steps of hits and {len(accesses)} of accesses, switch at {switch_step}, windows of "
            f"{window_steps}; wanted equally many steps, the switch among them, and windows of at least one step"
        )
    found, asked = hits[switch_step:].astype(np.int64), accesses[switch_step:].astype(np.int64)
    if alone_hits is not None and len(alone_hits) != len(found):
        raise ValueError(f"{len(alone_hits)} steps alone, wanted the {len(found)} after the switch")
    window_hits, window_accesses = _window_sums(found, window_steps), _window_sums(asked, window_steps)
    judges = window_accesses > 0
    if alone_hits is not None:
        alone = alone_hits.astype(np.int64)
        steady_hits, steady_accesses = int(alone.sum()), int(asked.sum())
        wanted = _window_sums(alone, window_steps).astype(np.float64)
    else:
        steady_hits, steady_accesses = _median_of_later_half(window_hits, window_accesses)
        wanted = window_accesses * steady_hits / max(steady_accesses, 1)
    recovered = np.flatnonzero(judges & (window_hits >= wanted - margin * window_accesses))
    return Recovery(
        recovery_steps=int(recovered[0]) if len(recovered) else None,
        window_steps=window_steps,
        margin=margin,
        steady_hits=steady_hits,
        steady_accesses=steady_accesses,
        extra_misses=None if alone_hits is None else steady_hits - int(found.sum()),
        compared_accesses=None if alone_hits is None else steady_accesses,
    )


def _median_of_later_half(window_hits: IntArray, window_accesses: IntArray) -> tuple[int, int]:
    """Hits and accesses of the (lower) median window of the later half of those with an access; (0, 0) without."""
    late = np.arange(len(window_hits) // 2, len(window_hits))
    late = late[window_accesses[late] > 0]
    if not len(late):
        return 0, 0
    middle = late[np.argsort(window_hits[late] / window_accesses[late], kind="stable")[(len(late) - 1) // 2]]
    return int(window_hits[middle]), int(window_accesses[middle])


# Putting traces together


def _resolved(steps: StepRange, total: int, trace_id: str) -> tuple[int, int]:
    begin, end = 0 if steps[0] is None else steps[0], total if steps[1] is None else steps[1]
    if not 0 <= begin < end <= total:
        raise UnmatchedTraces(
            f"steps {begin}:{end} of trace {trace_id}, which has {total} steps without warm-up; "
            f"wanted a range inside 0:{total} with at least one step"
        )
    return begin, end


def _events_by_step(trace: Trace) -> tuple[IntArray, IntArray]:
    """((n,) events that are no warm-up, (S + 1,) where each step begins among them)."""
    events = np.flatnonzero(trace.event_phase != PHASE_CODES["warmup"])
    begins = np.flatnonzero(np.diff(trace.event_step[events], prepend=-1))
    return events, np.append(begins, len(events)).astype(np.int64)


@numba.njit(cache=True, nogil=True)
def _pass_ordinals(step, layer, phase, num_layers):  # type: ignore[no-untyped-def]
    """(n,) how many earlier events have the same step, layer and phase; steps ascend."""
    latest = np.full(num_layers * _NUM_PHASES, -1, dtype=np.int64)
    passes = np.zeros(num_layers * _NUM_PHASES, dtype=np.int64)
    ordinal = np.empty(len(step), dtype=np.int64)
    for event in range(len(step)):
        place = layer[event] * _NUM_PHASES + phase[event]
        passes[place] = passes[place] + 1 if latest[place] == step[event] else 0
        latest[place] = step[event]
        ordinal[event] = passes[place]
    return ordinal


@numba.njit(cache=True, nogil=True)
def _places(slot, first_part, num_slots):  # type: ignore[no-untyped-def]
    """((P,) the event of the batch that each part belongs to, (S + 1,) the first event of each step).

    slot: (P,) stream after stream, the (pass, layer, phase) of each part as a number; a stream has a slot once a step.
    first_part: (streams, S + 1).
    """
    num_streams, num_steps = first_part.shape[0], first_part.shape[1] - 1
    event_of_part = np.empty(len(slot), dtype=np.int64)
    first_event = np.zeros(num_steps + 1, dtype=np.int64)
    awaited = np.zeros(num_slots, dtype=np.int64)  # streams that have the slot still before them
    event_of_slot = np.full(num_slots, -1, dtype=np.int64)
    head = np.empty(num_streams, dtype=np.int64)
    placed = 0
    for step in range(num_steps):
        for stream in range(num_streams):
            head[stream] = first_part[stream, step]
            for part in range(first_part[stream, step] + 1, first_part[stream, step + 1]):
                awaited[slot[part]] += 1
        while True:
            chosen, stuck = -1, -1
            for stream in range(num_streams):
                if head[stream] < first_part[stream, step + 1]:
                    candidate = slot[head[stream]]
                    if stuck < 0:
                        stuck = candidate
                    if awaited[candidate] == 0 and (chosen < 0 or candidate < chosen):
                        chosen = candidate
            if stuck < 0:
                break
            event_of_slot[chosen if chosen >= 0 else stuck] = placed
            placed += 1
            for stream in range(num_streams):
                end = first_part[stream, step + 1]
                while head[stream] < end and event_of_slot[slot[head[stream]]] >= 0:
                    head[stream] += 1
                    if head[stream] < end:
                        awaited[slot[head[stream]]] -= 1
        for stream in range(num_streams):
            for part in range(first_part[stream, step], first_part[stream, step + 1]):
                event_of_part[part] = event_of_slot[slot[part]]
        for stream in range(num_streams):
            for part in range(first_part[stream, step], first_part[stream, step + 1]):
                event_of_slot[slot[part]] = -1
        first_event[step + 1] = placed
    return event_of_part, first_event


def _mixture(
    traces: Sequence[Trace], trace_id: str, source_of_step: npt.NDArray[np.int32], source_step: IntArray
) -> Mixture:
    """The mixture of these steps of these traces."""
    chosen, begins = [], []
    num_events = np.empty(len(source_step), dtype=np.int64)
    for ordinal, trace in enumerate(traces):
        all_events, first = _events_by_step(trace)
        mine = np.flatnonzero(source_of_step == ordinal)
        begin, end = first[source_step[mine]], first[source_step[mine] + 1]
        num_events[mine] = end - begin
        chosen.append(all_events[_ranges(begin, end)])
        begins.append(mine)
    first_event = np.append(0, np.cumsum(num_events))
    targets = [_ranges(first_event[mine], first_event[mine + 1]) for mine in begins]
    accepted = _accepted_tokens(traces)
    step_accepted = None
    if accepted is not None:
        step_accepted = np.empty((len(source_step), _NUM_PHASES), dtype=np.int32)
        for tokens, mine in zip(accepted, begins, strict=True):
            step_accepted[mine] = tokens[source_step[mine]]
    trace = _gathered(traces, trace_id, chosen, targets, first_event, step_accepted)
    return Mixture(trace, source_of_step, source_step)


def _gathered(
    traces: Sequence[Trace],
    trace_id: str,
    events: Sequence[IntArray],
    targets: Sequence[IntArray],
    first_event: IntArray,
    step_accepted: npt.NDArray[np.int32] | None,
) -> Trace:
    """The trace to which each source gives `events` as (part of) its events `targets`.

    A source gives an event at most once; rows of several sources stand in the order of the sources. first_event:
    (S + 1,) of the new trace.
    """
    num_events, num_steps = int(first_event[-1]), len(first_event) - 1
    layer, phase = np.empty(num_events, dtype=np.int32), np.empty(num_events, dtype=np.int8)
    event_first_row = np.zeros(num_events + 1, dtype=np.int64)
    for trace, event, target in zip(traces, events, targets, strict=True):
        layer[target], phase[target] = trace.event_layer[event], trace.event_phase[event]
        event_first_row[target + 1] += trace.event_first_row[event + 1] - trace.event_first_row[event]
    np.cumsum(event_first_row, out=event_first_row)
    expert_ids = np.empty((event_first_row[-1], traces[0].top_k), dtype=np.uint16)
    next_row = event_first_row[:-1].copy()
    for trace, event, target in zip(traces, events, targets, strict=True):
        _append_rows(trace.expert_ids, trace.event_first_row, event, target, next_row, expert_ids)
    layer_first_object = traces[0].layer_first_object
    _, accesses = check_rows(expert_ids, event_first_row, layer, layer_first_object)
    rows_by_phase = np.zeros(_NUM_PHASES, dtype=np.int64)
    np.add.at(rows_by_phase, phase, np.diff(event_first_row))
    sources = [trace.metadata for trace in traces]
    if step_accepted is None:
        accepted = sum(metadata.counts.accepted_tokens for metadata in sources)
    else:
        accepted = int(step_accepted.sum())
    counts = Counts(
        rows=len(expert_ids),
        events=num_events,
        steps=num_steps,
        requests=sum(metadata.counts.requests for metadata in sources),
        selections=expert_ids.size,
        accesses=int(accesses),
        accepted_tokens=accepted,
        rows_by_phase={name: int(rows_by_phase[code]) for name, code in PHASE_CODES.items()},
        dropped_rows={},
    )
    return Trace(
        metadata=_metadata_of(sources, trace_id, counts),
        event_layer=layer,
        event_step=np.repeat(np.arange(num_steps), np.diff(first_event)),
        event_phase=phase,
        event_first_row=event_first_row,
        expert_ids=expert_ids,
        layer_first_object=layer_first_object,
        step_accepted=step_accepted,
    )


@numba.njit(cache=True, nogil=True)
def _append_rows(expert_ids, event_first_row, events, targets, next_row, appended):  # type: ignore[no-untyped-def]
    for part in range(len(events)):
        to = next_row[targets[part]]
        for row in range(event_first_row[events[part]], event_first_row[events[part] + 1]):
            for rank in range(expert_ids.shape[1]):
                appended[to, rank] = expert_ids[row, rank]
            to += 1
        next_row[targets[part]] = to


def _accepted_tokens(traces: Sequence[Trace]) -> list[npt.NDArray[np.int32]] | None:
    """(S, phases) tokens accepted in the steps of each trace, warm-up aside; null where one does not say."""
    accepted = []
    for trace in traces:
        if trace.step_accepted is None:
            return None
        places = np.searchsorted(np.unique(trace.event_step), steps_without_warmup(trace))
        accepted.append(trace.step_accepted[places])
    return accepted


def _metadata_of(sources: Sequence[TraceMetadata], trace_id: str, counts: Counts) -> TraceMetadata:
    """What all sources say alike stays said; what they contradict each other in, or one does not say, is unknown.

    Requests are the sources' whole ones, and so are accepted tokens where no trace says which step accepts them.
    """
    first = sources[0]

    def agreed(name: str) -> Any:
        said = {getattr(metadata, name) for metadata in sources}
        return said.pop() if len(said) == 1 else None

    sizes = [[metadata.sizes_of_layer(layer) for layer in range(len(first.moe_layer_ids))] for metadata in sources]
    facts = {
        name: agreed(name)
        for name in (
            "model", "engine", "domain", "capture_method", "hidden_layers", "top_k_model", "id_space", "weight_kind",
        )
    }  # fmt: skip
    return first.model_copy(
        update={
            **_identity(sources, trace_id),
            **facts,
            "schema_version": SCHEMA_VERSION,
            "layer_base": agreed("layer_base") or "assumed_from_0",
            "num_experts_source": agreed("num_experts_source") or "observed",
            "expert_bytes": first.expert_bytes if all(one == sizes[0] for one in sizes) else None,
            "rank_known": all(metadata.rank_known for metadata in sources),
            "pass_boundaries": agreed("pass_boundaries") or "assumed_per_token",
            "user_metadata": UserMetadata(),
            "counts": counts,
            "checks": [],
            "engine_observations": [],
        }
    )


def _identity(sources: Sequence[TraceMetadata], trace_id: str) -> dict[str, Any]:
    """Who a trace made of others is: its hash covers the raw dumps behind it and what was done with them."""
    said = "\n".join([trace_id, *(metadata.source.sha256 for metadata in sources)])
    source = sources[0].source.model_copy(
        update={
            "file": "+".join(metadata.source.file for metadata in sources),
            "bytes": sum(metadata.source.bytes for metadata in sources),
            "sha256": hashlib.sha256(said.encode()).hexdigest(),
        }
    )
    return {"trace_id": trace_id, "supersedes": None, "source": source}


def _check_one_model(traces: Sequence[Trace]) -> None:
    if not traces:
        raise UnmatchedTraces("no trace to put together, wanted at least one")
    first = traces[0].metadata
    for trace in traces:
        other = trace.metadata
        differences = [
            f"{what} {ours}, the other {theirs}"
            for what, ours, theirs in (
                ("MoE layers", first.moe_layer_ids, other.moe_layer_ids),
                ("experts per layer", first.experts_per_layer, other.experts_per_layer),
                ("top k", traces[0].top_k, trace.top_k),
            )
            if ours != theirs
        ]
        if differences:
            observed = "observed" in (first.num_experts_source, other.num_experts_source)
            raise UnmatchedTraces(
                f"traces {first.trace_id} and {other.trace_id} are not of one model: the first has "
                f"{'; '.join(differences)}"
                + ("; where the dump does not say num_experts, ingest it with --meta num_experts=N" if observed else "")
            )
        if not len(steps_without_warmup(trace)):
            raise UnmatchedTraces(f"trace {other.trace_id} has no step but warm-up")


# Small figures


def _ranges(begins: IntArray, ends: IntArray) -> IntArray:
    """The integers of all half-open ranges, one range after the other."""
    lengths = ends - begins
    offsets = begins - (np.cumsum(lengths) - lengths)
    return np.repeat(offsets, lengths) + np.arange(int(lengths.sum()))


def _window_sums(values: IntArray, window_steps: int) -> IntArray:
    """(S − window_steps + 1,) sums of every window, empty if there is none."""
    sums = np.append(0, np.cumsum(values))
    return sums[window_steps:] - sums[:-window_steps]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
