"""What predictors name and what plans score, written from the definitions in plain Python.

Nothing here imports what it is held against.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from replayer.trace import Trace
from schemas.columns import PHASES

COUNTED = (
    "events",
    "covered_events",
    "accesses",
    "covered_accesses",
    "predicted_experts",
    "predicted_accesses",
    "chance_predicted_accesses",
)


@dataclass(frozen=True)
class Event:
    """An event in plain Python: what the oracles see of a trace."""

    layer: int
    step: int
    phase: str
    rows: list[list[int]]

    @property
    def experts(self) -> list[int]:
        return list(dict.fromkeys(expert for row in self.rows for expert in row))


def events_of(trace: Trace) -> list[Event]:
    bounds = trace.event_first_row.tolist()
    columns = (trace.event_layer.tolist(), trace.event_step.tolist(), trace.event_phase.tolist())
    return [
        Event(layer, step, PHASES[phase], trace.expert_ids[begin:end].tolist())
        for layer, step, phase, begin, end in zip(*columns, bounds, bounds[1:], strict=False)
    ]


def oracle_previous(events: list[Event]) -> list[list[int] | None]:
    predictions: list[list[int] | None] = []
    for place, event in enumerate(events):
        before = [one for one in events[:place] if one.layer == event.layer and one.phase != "warmup"]
        predictions.append(before[-1].experts if before and event.phase != "warmup" else None)
    return predictions


def oracle_frequency(
    events: list[Event], width: int, num_experts: list[int], first_scored_step: float
) -> list[list[int] | None]:
    count: Counter[tuple[int, int]] = Counter()
    for event in events:
        if event.step < first_scored_step and event.phase != "warmup":
            count.update((event.layer, expert) for expert in event.experts)
    ranked = [
        sorted((e for e in range(experts) if count[layer, e]), key=lambda e: (-count[layer, e], e))[:width]
        for layer, experts in enumerate(num_experts)
    ]
    return [
        ranked[event.layer] if event.step >= first_scored_step and event.phase != "warmup" else None for event in events
    ]


def oracle_union(first: list[list[int] | None], second: list[list[int] | None]) -> list[list[int] | None]:
    return [
        None if one is None and two is None else list(dict.fromkeys((one or []) + (two or [])))
        for one, two in zip(first, second, strict=True)
    ]


def oracle_pairs(events: list[Event], depth: int) -> dict[int, int]:
    """Target → source: for each event look on until its layer comes again, the target comes, or the pass is over."""
    pairs = {}
    for source, event in enumerate(events):
        for target in range(source + 1, len(events)):
            other = events[target]
            if event.phase == "warmup" or (other.step, other.phase) != (event.step, event.phase):
                continue
            if other.layer == event.layer + depth:
                pairs[target] = source
            if other.layer in (event.layer, event.layer + depth):
                break
    return pairs


def oracle_conditional(
    events: list[Event], depth: int, width: int, num_experts: list[int], first_scored_step: float
) -> list[list[int] | None]:
    pairs = oracle_pairs(events, depth)
    count: Counter[tuple[int, int, int]] = Counter()
    for target, source in pairs.items():
        if events[target].step < first_scored_step:
            layer = events[source].layer
            count.update((layer, one, seen) for one in events[source].experts for seen in events[target].experts)
    whole: Counter[tuple[int, int]] = Counter()
    for (layer, one, _), times in count.items():
        whole[layer, one] += times
    predictions: list[list[int] | None] = [None] * len(events)
    for target, source in pairs.items():
        if events[target].step >= first_scored_step:
            layer = events[source].layer
            sums = {
                expert: sum(
                    Fraction(count[layer, one, expert], whole[layer, one])
                    for one in events[source].experts
                    if whole[layer, one]
                )
                for expert in range(num_experts[layer + depth])
            }
            ranked = sorted((expert for expert in sums if sums[expert]), key=lambda expert: (-sums[expert], expert))
            predictions[target] = ranked[:width]
    return predictions


def oracle_score(
    events: list[Event], predictions: list[list[int] | None], scored: list[bool], num_experts: list[int]
) -> list[dict[str, float]]:
    """One dict per layer, then the total."""
    layers = []
    for layer, experts in enumerate(num_experts):
        mine = [
            (set(event.experts), named)
            for event, named, counts in zip(events, predictions, scored, strict=True)
            if counts and event.layer == layer
        ]
        covered = [(used, set(named)) for used, named in mine if named is not None]
        layers.append(
            {
                "events": len(mine),
                "covered_events": len(covered),
                "accesses": sum(len(used) for used, _ in mine),
                "covered_accesses": sum(len(used) for used, _ in covered),
                "predicted_experts": sum(len(named) for _, named in covered),
                "predicted_accesses": sum(len(used & named) for used, named in covered),
                "chance_predicted_accesses": sum(len(used) * len(named) / experts for used, named in covered),
            }
        )
    return [*layers, {name: sum(one[name] for one in layers) for name in COUNTED}]
