"""Runs of an experiment → its tables of conditions and effects, and the paragraph that says what they show.

In: what the experiment is (`Design`) and rows of `replay_run`, each with its columns of `experiment_run`. Every
sentence is made from the numbers alone. Which runs to make belongs to `experiment`.

Two conditions are compared block by block: a repetition of one is divided by the same repetition of the other, since
both were run close together, and the lower median of these ratios is the effect. What a condition does against itself
is told by all ratios of two of its own repetitions; an effect inside the range of either of the two conditions against
itself is reported as none. That range widens with the number of repetitions, so more of them never make an effect out
of noise, though they may hide a small one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import Any, NamedTuple

from replayer.quantities import format_bytes

Row = dict[str, Any]

FINDINGS = ("comparison", "response", "tenants")
"""What a paragraph is about: conditions against a baseline, a size against its answer, replays that share memory."""

MOST_ATTEMPTS_NAMED = 3


class Metric(NamedTuple):
    """A number of a run: `numerator` ÷ `denominator`, of columns of replay_run; without a denominator, the numerator.

    is_time: only runs whose times are valid have it.
    """

    words: str
    numerator: Callable[[Row], int | None]
    denominator: Callable[[Row], int | None] | None = None
    is_time: bool = False
    text: Callable[[float], str] = format_bytes  # type: ignore[assignment]


def _column(name: str) -> Callable[[Row], int | None]:
    return lambda run: run.get(name)


def _held(run: Row) -> int | None:
    resident = run.get("resident_median_bytes")
    return None if resident is None else resident + (run.get("arena_bytes") or 0)


def _bytes(size: float) -> str:
    return format_bytes(round(size))


def _duration(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:,.3f} ms"


def _number(number: float) -> str:
    return f"{number:,.3f}"


METRICS: dict[str, Metric] = {
    "step_median_ns": Metric("the median step time", _column("step_median_ns"), None, True, _duration),
    "wall_ns": Metric("the time of all steps", _column("wall_ns"), None, True, _duration),
    "wall_ns_per_selection": Metric(
        "the time per token", _column("wall_ns"), _column("selections"), True, _duration
    ),
    "stall_median_ns": Metric("the median stall", _column("stall_median_ns"), None, True, _duration),
    "stall_p99_ns": Metric("the 99th percentile of stalls", _column("stall_p99_ns"), None, True, _duration),
    "device_bytes": Metric("bytes from the device", _column("device_bytes"), None, False, _bytes),
    "device_bytes_per_selection": Metric(
        "bytes from the device per token", _column("device_bytes"), _column("selections"), False, _bytes
    ),
    "demand_bytes_per_selection": Metric(
        "bytes demanded per token", _column("demand_bytes"), _column("selections"), False, _bytes
    ),
    "nominal_miss_bytes": Metric(
        "bytes a simulated LRU of the capacity misses", _column("nominal_miss_bytes"), None, False, _bytes
    ),
    "resident_miss_bytes": Metric(
        "bytes a simulated LRU of the measured residency misses", _column("resident_miss_bytes"), None, False, _bytes
    ),
    "amplification_nominal": Metric(
        "device bytes per byte a simulated LRU of the capacity misses",
        _column("device_bytes"), _column("nominal_miss_bytes"), False, _number,
    ),
    "amplification_resident": Metric(
        "device bytes per byte a simulated LRU of the measured residency misses",
        _column("device_bytes"), _column("resident_miss_bytes"), False, _number,
    ),
    "native_hit_rate": Metric(
        "the measured hit rate", _column("native_hits"), _column("observed_accesses"), False, _number
    ),
    "arena_hits": Metric("accesses served from locked memory", _column("arena_hits"), None, False, _number),
    "capacity_bytes": Metric("the capacity", _column("capacity_bytes"), None, False, _bytes),
    "wall_bytes": Metric("the wall", _column("wall_bytes"), None, False, _bytes),
    "own_anonymous_bytes": Metric("the reader's own memory", _column("own_anonymous_bytes"), None, False, _bytes),
    "arena_bytes": Metric("locked memory", _column("arena_bytes"), None, False, _bytes),
    "resident_median_bytes": Metric(
        "bytes in the page cache", _column("resident_median_bytes"), None, False, _bytes
    ),
    "held_bytes": Metric("bytes of experts held", _held, None, False, _bytes),
    "preload_bytes": Metric("bytes preloaded", _column("preload_bytes"), None, False, _bytes),
}  # fmt: skip
"""By name; the unit stands at the end of it, as in a column's."""


@dataclass(frozen=True)
class Member:
    """A condition as its judge sees it; tenants: one null where it is a single replay; arm: its [[condition]]."""

    condition: str
    arm: str = ""
    group: str = ""
    is_baseline: bool = False
    tenants: tuple[str | None, ...] = (None,)
    has_wall: bool = False
    shares_wall: bool = False


@dataclass(frozen=True)
class Design:
    """What was to be run, and what the paragraph is about."""

    finding: str
    metrics: tuple[str, ...]
    order: str
    repeats: int
    members: tuple[Member, ...]

    def group_of(self, member: Member) -> list[Member]:
        """Everyone it is compared among, itself included."""
        return [one for one in self.members if one.group == member.group]


class Effect(NamedTuple):
    """How many times as much, block by block; self_low to self_high is what either does against itself.

    outside_spread is null where there is no ratio (nothing to divide by) or no second repetition.
    """

    pairs: int
    effect: float | None
    effect_low: float | None
    effect_high: float | None
    self_low: float | None
    self_high: float | None
    outside_spread: bool | None


Samples = dict[int, tuple[float, float]]
"""Repetition → (numerator, denominator) of a metric."""


def counts(design: Design, runs: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """(condition, repetition) → its runs, of every repetition that counts: the first attempt all of whose runs are
    complete and valid in bytes. An attempt without one of its tenants does not count.
    """
    attempts: dict[tuple[str, int, int], list[Row]] = {}
    for run in runs:
        attempts.setdefault((run["condition"], run["repetition"], run["attempt"]), []).append(run)
    tenants = {one.condition: one.tenants for one in design.members}
    counted: dict[tuple[str, int], list[Row]] = {}
    for (condition, repetition, _), members in sorted(attempts.items()):
        is_whole = len(members) == len(tenants.get(condition, ())) and {run["tenant"] for run in members} == set(
            tenants[condition]
        )
        if is_whole and all(run["status"] == "complete" and run["bytes_valid"] for run in members):
            counted.setdefault((condition, repetition), members)
    return counted


def compare(condition: Samples, baseline: Samples) -> Effect:
    """The condition against the baseline, over the repetitions that both have."""
    ratios = []
    for repetition in sorted(condition.keys() & baseline.keys()):
        over, under = _value(condition[repetition]), _value(baseline[repetition])
        if over is not None and under:
            ratios.append(over / under)
    against_themselves = _self_ratios(condition) + _self_ratios(baseline)
    known = len(condition) > 1 and len(baseline) > 1 and bool(against_themselves)
    low, high = (min(against_themselves), max(against_themselves)) if known else (None, None)
    if not ratios:
        return Effect(0, None, None, None, low, high, None)
    effect = median_low(ratios)
    outside = None if low is None or high is None else not low <= effect <= high
    return Effect(len(ratios), effect, min(ratios), max(ratios), low, high, outside)


def _self_ratios(samples: Samples) -> list[float]:
    values = [value for value in map(_value, samples.values()) if value is not None]
    return [one / other for one in values for other in values if other] if len(values) > 1 else []


def _value(sample: tuple[float, float]) -> float | None:
    return sample[0] / sample[1] if sample[1] else None


@dataclass(frozen=True)
class Evidence:
    """The runs of a design, those that count apart."""

    design: Design
    runs: Sequence[Row]
    counted: dict[tuple[str, int], list[Row]]

    @classmethod
    def of(cls, design: Design, runs: Iterable[Row]) -> "Evidence":
        """Sorts out what counts."""
        found = sorted(runs, key=lambda run: (run["position"], run["run_id"]))
        return cls(design, found, counts(design, found))

    def samples(self, condition: str, tenant: str | None, metric: str) -> Samples:
        """Of the repetitions that count and have the metric."""
        chosen = METRICS[metric]
        found: Samples = {}
        for (name, repetition), members in self.counted.items():
            for run in members:
                if name != condition or run["tenant"] != tenant or (chosen.is_time and not run["time_valid"]):
                    continue
                over = chosen.numerator(run)
                under = 1 if chosen.denominator is None else chosen.denominator(run)
                if over is not None and under is not None:
                    found[repetition] = (over, under)
        return found

    def together(self, members: Sequence[Member], tenant: str | None, metric: str) -> Samples:
        """Of several conditions as one: numerators and denominators summed, in repetitions that all of them have."""
        each = [self.samples(one.condition, tenant, metric) for one in members]
        shared = set.intersection(*(set(samples) for samples in each)) if each else set()
        return {
            repetition: (sum(one[repetition][0] for one in each), sum(one[repetition][1] for one in each))
            for repetition in sorted(shared)
        }

    def median(self, condition: str, tenant: str | None, metric: str) -> float | None:
        """The lower median over the repetitions that count, a value that occurred."""
        values = [value for value in map(_value, self.samples(condition, tenant, metric).values()) if value is not None]
        return median_low(values) if values else None

    def baselines(self, member: Member, tenant: str | None) -> list[Member]:
        """What a condition is compared with: the baselines of its group, or the largest capacity of a response."""
        others = [one for one in self.design.group_of(member) if tenant in one.tenants]
        if self.design.finding != "response":
            return [one for one in others if one.is_baseline]
        sized = [(self._memory(one, tenant), one) for one in others]
        known = [(size, one) for size, one in sized if size is not None]
        return [max(known, key=lambda pair: pair[0])[1]] if known else []

    def _memory(self, member: Member, tenant: str | None) -> float | None:
        """What a condition was given: of owners in equal walls, the wall less what they need is the capacity."""
        return self.median(member.condition, tenant, "capacity_bytes")


def condition_rows(experiment_id: str, evidence: Evidence) -> list[Row]:
    """Rows of the table `experiment_condition`."""
    rows = []
    for member in evidence.design.members:
        for tenant in member.tenants:
            own = [run for run in evidence.runs if (run["condition"], run["tenant"]) == (member.condition, tenant)]
            for metric in METRICS:
                samples = evidence.samples(member.condition, tenant, metric)
                values = [value for value in map(_value, samples.values()) if value is not None]
                rows.append(
                    {
                        "experiment_id": experiment_id,
                        "condition": member.condition,
                        "tenant": tenant,
                        "metric": metric,
                        "runs": len(own),
                        "valid_runs": sum(bool(run["bytes_valid"]) for run in own),
                        "counted_runs": len(values),
                        "median_value": median_low(values) if values else None,
                        "lowest_value": min(values, default=None),
                        "highest_value": max(values, default=None),
                        "relative_spread": _relative_spread(samples),
                    }
                )
    return rows


def effect_rows(experiment_id: str, evidence: Evidence) -> list[Row]:
    """Rows of the table `experiment_effect`: every metric of every condition that is no baseline."""
    rows = []
    for member in evidence.design.members:
        for tenant in member.tenants:
            baselines = evidence.baselines(member, tenant)
            if not baselines or member in baselines:
                continue
            for metric in METRICS:
                effect = compare(
                    evidence.samples(member.condition, tenant, metric), evidence.together(baselines, tenant, metric)
                )
                of_response = evidence.design.finding == "response"
                line = {
                    "inverse_capacity_deviation": _deviation(
                        evidence, member, baselines[0], tenant, metric, "capacity_bytes"
                    ),
                    "inverse_residency_deviation": _deviation(
                        evidence, member, baselines[0], tenant, metric, "held_bytes"
                    ),
                    "monotone": _is_monotone(evidence, member, tenant, metric),
                }
                rows.append(
                    {
                        "experiment_id": experiment_id,
                        "condition": member.condition,
                        "tenant": tenant,
                        "metric": metric,
                        "baseline": _named(baselines),
                        **effect._asdict(),
                        **(line if of_response else dict.fromkeys(line)),
                    }
                )
    return rows


def _named(members: Sequence[Member]) -> str:
    first = members[0]
    if len(members) == 1:
        return first.condition
    return f"{first.arm} ({len(members)} together{f', {first.group}' if first.group else ''})"


def _deviation(
    evidence: Evidence, member: Member, anchor: Member, tenant: str | None, metric: str, size: str
) -> float | None:
    """How far the metric lies from a line that falls with 1 ÷ size and goes through the anchor; 0 is on it."""
    here, there = (evidence.median(one.condition, tenant, metric) for one in (member, anchor))
    small, large = (evidence.median(one.condition, tenant, size) for one in (member, anchor))
    if here is None or not there or not small or not large:
        return None
    return here / (there * large / small) - 1


def _by_capacity(evidence: Evidence, member: Member, tenant: str | None) -> list[Member]:
    """The group's conditions that have runs, the largest capacity first."""
    sized = [
        (size, one)
        for one in evidence.design.group_of(member)
        for size in [evidence.median(one.condition, tenant, "capacity_bytes")]
        if size is not None
    ]
    return [one for _, one in sorted(sized, key=lambda pair: -pair[0])]


def _is_monotone(evidence: Evidence, member: Member, tenant: str | None, metric: str) -> bool | None:
    """Whether the medians never fall as the capacity does; null with fewer than two of them."""
    medians = [evidence.median(one.condition, tenant, metric) for one in _by_capacity(evidence, member, tenant)]
    known = [value for value in medians if value is not None]
    if len(known) < 2 or len(known) < len(medians):
        return None
    return all(before <= after for before, after in pairwise(known))


def paragraph(evidence: Evidence) -> str:
    """What the experiment shows: effects with their spread, what was measured, and what the runs are worth."""
    design = evidence.design
    sentences: list[str] = []
    groups = list(dict.fromkeys(member.group for member in design.members))
    for group in groups:
        members = [one for one in design.members if one.group == group]
        if design.finding == "response":
            sentences += _response(evidence, members)
        else:
            sentences += _comparisons(evidence, members)
        if design.finding == "tenants":
            sentences += _evictions(evidence, members)
        if all(one.has_wall for one in members):
            sentences.append(_walls(evidence, members))
    return " ".join([*sentences, _validity(evidence), *_digests(evidence)])


def _comparisons(evidence: Evidence, members: Sequence[Member]) -> list[str]:
    sentences = []
    for member in members:
        for tenant in member.tenants:
            baselines = evidence.baselines(member, tenant)
            if not baselines or member in baselines:
                continue
            subject = member.condition if tenant is None else f"{member.condition}, tenant {tenant}"
            sentences.append(_effects_sentence(evidence, subject, member, baselines, tenant))
            sentences += _held_sentence(evidence, subject, member, baselines, tenant)
    return sentences


def _effects_sentence(
    evidence: Evidence, subject: str, member: Member, baselines: Sequence[Member], tenant: str | None
) -> str:
    said = [
        _effect_words(
            METRICS[metric].words,
            evidence.samples(member.condition, tenant, metric),
            evidence.together(baselines, tenant, metric),
        )
        for metric in evidence.design.metrics
    ]
    return f"{subject} against {_named(baselines)}: {'; '.join(said)}."


def _effect_words(words: str, condition: Samples, baseline: Samples) -> str:
    effect = compare(condition, baseline)
    if effect.effect is None:
        shared = condition.keys() & baseline.keys()
        return f"no ratio of {words}, {'of which the baseline has 0' if shared else 'valid in no repetition of both'}"
    said = f"{_times(effect.effect)} ({_range(effect.effect_low, effect.effect_high)} in {_pairs(effect.pairs)})"
    if effect.outside_spread is None:
        return f"{words} {said}, of too few repetitions to tell from chance"
    spread = f"the spread of a condition against itself ({_range(effect.self_low, effect.self_high)})"
    if effect.outside_spread:
        return f"{words} {said}, outside {spread}"
    return f"no effect on {words}, {said}, inside {spread}"


def _held_sentence(
    evidence: Evidence, subject: str, member: Member, baselines: Sequence[Member], tenant: str | None
) -> list[str]:
    here = evidence.median(member.condition, tenant, "held_bytes")
    there = [evidence.median(one.condition, tenant, "held_bytes") for one in baselines]
    known = [value for value in there if value is not None]
    if here is None or len(known) < len(there) or not known:
        return []
    others = _bytes(known[0]) if len(known) == 1 else f"{_bytes(min(known))} to {_bytes(max(known))} each"
    return [f"Measured, {subject} held {_bytes(here)} of experts, {_named(baselines)} {others}."]


def _response(evidence: Evidence, members: Sequence[Member]) -> list[str]:
    tenant = members[0].tenants[0]
    ordered = _by_capacity(evidence, members[0], tenant)
    if len(ordered) < 2:
        return ["Fewer than two capacities have a repetition that counts, so there is no response to speak of."]
    anchor = ordered[0]
    listed = []
    for one in ordered:
        parts = [f"{_bytes(evidence.median(one.condition, tenant, 'capacity_bytes') or 0)} of capacity"]
        for metric, label in (
            ("held_bytes", "held"), ("device_bytes", "from the device"), ("step_median_ns", "a step"),
            ("amplification_nominal", "per nominally missed byte"),
        ):  # fmt: skip
            value = evidence.median(one.condition, tenant, metric)
            if value is not None:
                parts.append(f"{METRICS[metric].text(value)} {label}")
        listed.append(f"{one.condition}: {', '.join(parts)}")
    sentences = [f"{'; '.join(listed)} (medians)."]
    sentences += [_effects_sentence(evidence, one.condition, one, [anchor], tenant) for one in ordered[1:]]
    deviations = [
        f"{_signed(by_capacity)} at {one.condition} ({_signed(by_residency)} by what was held)"
        for one in ordered[1:]
        for by_capacity in [_deviation(evidence, one, anchor, tenant, "device_bytes", "capacity_bytes")]
        for by_residency in [_deviation(evidence, one, anchor, tenant, "device_bytes", "held_bytes")]
        if by_capacity is not None
    ]
    if deviations:
        sentences.append(
            f"From the inverse-capacity line through {anchor.condition}, device bytes deviate by "
            f"{', '.join(deviations)}."
        )
    return [*sentences, *_smoothness(evidence, ordered, tenant)]


def _smoothness(evidence: Evidence, ordered: Sequence[Member], tenant: str | None) -> list[str]:
    """Whether each smaller capacity costs more, and more than what a capacity does against itself."""
    inside: list[str] = []
    unknown: list[str] = []
    falling: list[str] = []
    spreads: list[float] = []
    for metric in evidence.design.metrics:
        words = METRICS[metric].words
        if _is_monotone(evidence, ordered[0], tenant, metric) is False:
            falling.append(words)
        samples = [evidence.samples(one.condition, tenant, metric) for one in ordered]
        spreads += [spread for spread in map(_relative_spread, samples) if spread is not None]
        for (larger, before), (smaller, after) in pairwise(zip(ordered, samples, strict=True)):
            outside = compare(after, before).outside_spread
            step = f"{words} from {larger.condition} to {smaller.condition}"
            if outside is None:
                unknown.append(step)
            elif not outside:
                inside.append(step)
    spread = f"run-to-run spread is at most {100 * max(spreads):.1f} % of a median" if spreads else "no spread is known"
    if falling:
        return [
            f"Not monotone in the capacity: {' and '.join(falling)}; {spread}.",
            "DRAM is no smooth sizing knob here.",
        ]
    if inside or unknown:
        said = [f"inside the spread of a capacity against itself: {', '.join(inside)}"] if inside else []
        said += [f"of too few valid repetitions to tell: {', '.join(unknown)}"] if unknown else []
        return [
            f"Nothing falls as the capacity grows smaller, but {'; '.join(said)}; {spread}.",
            "That DRAM is a smooth sizing knob here is not shown.",
        ]
    return [f"Every smaller capacity costs more, outside the spread; {spread}.", "DRAM is a smooth sizing knob here."]


def _relative_spread(samples: Samples) -> float | None:
    values = [value for value in map(_value, samples.values()) if value is not None]
    middle = median_low(values) if values else None
    return (max(values) - min(values)) / middle if middle else None


def _evictions(evidence: Evidence, members: Sequence[Member]) -> list[str]:
    """Who holds more and who less in one wall than behind walls of their own."""
    sentences = []
    for member in (one for one in members if one.shares_wall):
        changes: dict[str, Effect] = {}
        for tenant in member.tenants:
            baselines = evidence.baselines(member, tenant)
            changes[str(tenant)] = compare(
                evidence.samples(member.condition, tenant, "held_bytes"),
                evidence.together(baselines, tenant, "held_bytes"),
            )
        clear = {name: one.effect for name, one in changes.items() if one.outside_spread and one.effect is not None}
        winners = [name for name, effect in clear.items() if effect > 1]
        losers = [name for name, effect in clear.items() if effect < 1]
        said = ", ".join(
            f"{name} holds {_times(one.effect)}" for name, one in changes.items() if one.effect is not None
        )
        if winners and losers:
            verdict = f"{' and '.join(winners)} {_verb('evict', winners)} {' and '.join(losers)}"
        elif losers:
            verdict = f"{' and '.join(losers)} {_verb('lose', losers)} memory, and nobody gains any outside the spread"
        elif winners:
            verdict = (
                f"{' and '.join(winners)} {_verb('gain', winners)} memory, and nobody loses any outside the spread"
            )
        else:
            verdict = "nobody evicts another beyond the spread of a condition against itself"
        walls = _named(evidence.baselines(member, member.tenants[0]))
        sentences.append(f"In {member.condition} against {walls}, {said or 'nothing was measured'}: {verdict}.")
    return sentences


def _walls(evidence: Evidence, members: Sequence[Member]) -> str:
    among = f" ({members[0].group})" if members[0].group else ""
    walls = _wall_bytes(evidence, members)
    if not walls:
        return f"No wall was measured{among}."
    difference = (max(walls) - min(walls)) / max(walls)
    if difference == 0:
        return f"All walls{among} are equal: {_bytes(max(walls))}."
    return f"Walls{among} differ by up to {100 * difference:.3f} % of {_bytes(max(walls))}."


def wall_difference(evidence: Evidence) -> float | None:
    """Largest relative difference of walls that were to be equal; null where none were."""
    groups: dict[str, list[Member]] = {}
    for one in evidence.design.members:
        groups.setdefault(one.group, []).append(one)
    equal = [members for members in groups.values() if all(one.has_wall for one in members)]
    known = [walls for walls in (_wall_bytes(evidence, members) for members in equal) if walls]
    return max(((max(walls) - min(walls)) / max(walls) for walls in known), default=None)


def _wall_bytes(evidence: Evidence, members: Sequence[Member]) -> list[int]:
    names = {one.condition for one in members}
    return [
        run["wall_bytes"]
        for (condition, _), runs in evidence.counted.items()
        for run in runs
        if condition in names and run["wall_bytes"] is not None
    ]


def is_finished(evidence: Evidence) -> bool:
    """Whether every condition has all its repetitions."""
    wanted = {(one.condition, number) for one in evidence.design.members for number in range(evidence.design.repeats)}
    return wanted <= evidence.counted.keys()


def _validity(evidence: Evidence) -> str:
    design = evidence.design
    wanted = len(design.members) * design.repeats
    have = sum(repetition < design.repeats for _, repetition in evidence.counted)
    counted = {run["run_id"] for runs in evidence.counted.values() for run in runs}
    bad = [run for run in evidence.runs if not run["bytes_valid"]]
    untimed = sum(not run["time_valid"] for run in evidence.runs if run["run_id"] in counted)
    said = f"{have} of {wanted} repetitions are complete"
    said += f" and bytes_valid in all {len(counted)} runs" if have == wanted else "; the experiment is not finished"
    if bad:
        reasons = list(dict.fromkeys(run["bytes_reasons"] or run["failure"] or run["status"] for run in bad))
        said += f"; {len(bad)} more were not valid and count nowhere ({'; '.join(reasons[:MOST_ATTEMPTS_NAMED])})"
    if untimed:
        said += f"; times of {untimed} of these are not valid and left out of times"
    return f"{said}."


def digests_agree(evidence: Evidence) -> bool | None:
    """Whether runs of the same steps of the same trace and pool consumed the same content; null if there is none."""
    groups = _digest_groups(evidence)
    return all(len(digests) == 1 for digests in groups.values()) if groups else None


def _digest_groups(evidence: Evidence) -> dict[tuple[Any, ...], set[str]]:
    groups: dict[tuple[Any, ...], set[str]] = {}
    for runs in evidence.counted.values():
        for run in runs:
            key = (run["trace_id"], run["pool_id"], run["step_begin"], run["step_end"], run["access_order"])
            if run["consumed_digest"] is not None:
                groups.setdefault(key, set()).add(run["consumed_digest"])
    return groups


def _digests(evidence: Evidence) -> list[str]:
    agree = digests_agree(evidence)
    if agree is None:
        return []
    if agree:
        return ["All runs of one trace and pool consumed the same content, whoever owned it."]
    differing = [str(key[0]) for key, digests in _digest_groups(evidence).items() if len(digests) > 1]
    return [f"Runs of one trace and pool consumed DIFFERENT content ({', '.join(differing)}): nothing above holds."]


def _times(ratio: float) -> str:
    return f"{ratio:.3f} times"


def _range(low: float | None, high: float | None) -> str:
    return "unknown" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _pairs(number: int) -> str:
    return "1 pair" if number == 1 else f"{number} pairs"


def _signed(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:+.1f} %"


def _verb(verb: str, subjects: Sequence[str]) -> str:
    return verb if len(subjects) > 1 else f"{verb}s"
