"""The minimal reporting block of arXiv 2608.07911 (§10, Appendix B) for one set of simulated results.

In: a trace's metadata, rows of `hit_rate` of one window, how many experts its events access, and what the user states
of workload and service. Out: an answer per item A1–D4, and the derived numbers behind them as functions: pressure,
Belady gap, miss bytes per step and token, hit rate by band. Nothing is simulated here but the conformance trace.

What nobody said is `unknown`; what cannot apply to the set says so and why. An answer is `known` where nothing in it is
unknown. Letters: L layers, U sizes of a union. m misses: m_c of the best policy that does not know the future, m_B of
Belady with bypass, m_F of Belady forced to admit.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from replayer.quantities import format_bytes, parse_fraction
from replayer.trace import Trace
from schemas.trace import PHASE_CODES, SCHEMA_VERSION, TraceMetadata

IntArray = npt.NDArray[np.int64]
ResultRow = Mapping[str, Any]

UNKNOWN = "unknown"
NOT_APPLICABLE = "not applicable"
TOPICS = {"A": "execution", "B": "workload", "C": "regime", "D": "oracle"}
WINDOW_COLUMNS = (
    "trace_id", "access_order", "dedup", "step_begin", "step_end", "phase", "warm_fraction", "warm_steps", "warm_pass",
    "scored_steps", "selections", "accesses",
)  # fmt: skip
"""What all rows of one set share."""

NUM_BANDS = 4


# Derived numbers


@dataclass(frozen=True)
class Pressure:
    """r = experts an event accesses ÷ capacity of its cache, over events.

    mean and p95 are null without events or with a capacity of 0; p95 is the ⌈0.95 n⌉-th smallest of n. Above 1 no cache
    of that size can hold the event, and `events_above` is counted in whole numbers.
    """

    events: int
    mean: float | None
    p95: float | None
    events_above: int

    @property
    def share_above(self) -> float | None:
        return _ratio(self.events_above, self.events)


def pressure(
    union_sizes: npt.ArrayLike, capacity_experts: npt.ArrayLike, events: npt.ArrayLike | None = None
) -> Pressure:
    """r of events of `union_sizes` experts each (1-D), in caches of `capacity_experts` (one for all, or one per event).

    `events` counts each entry that many times, so that a histogram need not be spelt out.
    """
    sizes = np.asarray(union_sizes, dtype=np.int64)
    capacities = np.broadcast_to(np.asarray(capacity_experts, dtype=np.int64), sizes.shape)
    weights = np.ones_like(sizes) if events is None else np.asarray(events, dtype=np.int64)
    sizes, capacities, weights = (each[weights > 0] for each in (sizes, capacities, weights))
    total = int(weights.sum())
    above = int(weights[sizes > capacities].sum())
    if not total or not capacities.all():
        return Pressure(total, None, None, above)
    ratios = sizes / capacities
    ranked = np.argsort(ratios, kind="stable")
    place = np.searchsorted(np.cumsum(weights[ranked]), _rank_of_p95(total))
    return Pressure(total, float((ratios * weights).sum() / total), float(ratios[ranked][place]), above)


def _rank_of_p95(total: int) -> int:
    """⌈0.95 n⌉ in whole numbers: 0.95 has no exact float."""
    return -(-95 * total // 100)


@dataclass(frozen=True)
class BelladyGap:
    """What Belady saves over the best policy that does not know the future, and how much of that admission alone does.

    gap = (m_c − m_B) ÷ m_c; admission share = (m_F − m_B) ÷ (m_c − m_B), victim share the rest: (m_c − m_F) ÷ the same.
    A share is null without m_F, or where there is no gap to split; where forced admission costs more than the best
    policy misses, the admission share is above 1 and the victim share below 0.
    """

    misses_best_causal: int
    misses_bypass: int
    misses_forced: int | None = None

    @property
    def saved_misses(self) -> int:
        return self.misses_best_causal - self.misses_bypass

    @property
    def gap(self) -> float | None:
        return _ratio(self.saved_misses, self.misses_best_causal)

    @property
    def admission_misses(self) -> int | None:
        return None if self.misses_forced is None else self.misses_forced - self.misses_bypass

    @property
    def victim_misses(self) -> int | None:
        return None if self.misses_forced is None else self.misses_best_causal - self.misses_forced

    @property
    def admission_share(self) -> float | None:
        return None if self.admission_misses is None else _ratio(self.admission_misses, self.saved_misses)

    @property
    def victim_share(self) -> float | None:
        return None if self.victim_misses is None else _ratio(self.victim_misses, self.saved_misses)


def belady_gap(misses_best_causal: int, misses_bypass: int, misses_forced: int | None = None) -> BelladyGap:
    """The gap to Belady of one contract and its split; the misses share a denominator, so counts are enough."""
    return BelladyGap(misses_best_causal, misses_bypass, misses_forced)


def miss_bytes_per_step(row: ResultRow) -> float | None:
    """Bytes missed per scored step; null if sizes are unknown."""
    return None if row["miss_bytes"] is None else _ratio(row["miss_bytes"], row["scored_steps"])


def miss_bytes_per_token(row: ResultRow) -> float | None:
    """Bytes missed per token accepted in the scored steps; null if sizes or accepted tokens are unknown."""
    tokens = row.get("scored_accepted_tokens")
    return None if row["miss_bytes"] is None or tokens is None else _ratio(row["miss_bytes"], tokens)


@dataclass(frozen=True)
class Band:
    """Consecutive scored steps, numbered over the selection; step_end is the first after them."""

    step_begin: int
    step_end: int
    accesses: int
    hits: int

    @property
    def hit_rate(self) -> float | None:
        return _ratio(self.hits, self.accesses)


def position_bands(step_accesses: IntArray, step_hits: IntArray, num_bands: int = NUM_BANDS) -> list[Band]:
    """Scored hits by band of the scored steps, the bands of equal length ± 1 step; (S,) scored counts per step."""
    scored = np.flatnonzero(step_accesses)
    return [
        Band(int(band[0]), int(band[-1]) + 1, int(step_accesses[band].sum()), int(step_hits[band].sum()))
        for band in np.array_split(scored, num_bands)
        if len(band)
    ]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


# The conformance trace


@dataclass(frozen=True)
class Conformance:
    """What one replay of the conformance trace counts."""

    accesses: int
    hits: int
    misses: int
    compulsory_misses: int


CONFORMANCE_SETS = ((0, 1), (0, 2), (0, 1), (0, 3), (0, 1))
CONFORMANCE_LAYERS, CONFORMANCE_EXPERTS, CONFORMANCE_CAPACITY = 3, 4, 2
PUBLISHED = Conformance(accesses=30, hits=12, misses=18, compulsory_misses=12)
"""Event-atomic LRU of two experts per layer: 2608.07911 §2.5, artifact event-atomic-toy-trace-v1."""


def conformance_trace() -> Trace:
    """Five steps of three layers of four experts; in each step every layer is asked for the same two."""
    ids = np.repeat(np.array(CONFORMANCE_SETS, dtype=np.uint16), CONFORMANCE_LAYERS, axis=0)
    steps, layers, rows = len(CONFORMANCE_SETS), CONFORMANCE_LAYERS, len(ids)
    metadata = TraceMetadata.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "trace_id": "event-atomic-toy-trace-v1",
            **dict.fromkeys(("supersedes", "model", "engine", "domain", "hidden_layers", "expert_bytes")),
            "capture_method": "written by hand (arXiv 2608.07911 §2.5)",
            "moe_layer_ids": list(range(layers)),
            "layer_base": "declared",
            "experts_per_layer": [CONFORMANCE_EXPERTS] * layers,
            "num_experts_source": "declared",
            "top_k_model": ids.shape[1],
            "top_k_observed": ids.shape[1],
            "id_space": "logical",
            "weight_kind": "absent",
            "rank_known": True,
            "pass_boundaries": "recorded",
            "source": {
                "file": "event-atomic-toy-trace-v1",
                "folder": "",
                "format": "events_csv",
                "bytes": ids.nbytes,
                "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            },
            "user_metadata": {},
            "parser_version": 0,
            "counts": {
                "rows": rows,
                "events": rows,
                "steps": steps,
                "requests": 1,
                "selections": ids.size,
                "accesses": ids.size,
                "accepted_tokens": steps,
                "rows_by_phase": {name: rows * (name == "decode") for name in PHASE_CODES},
                "dropped_rows": {},
            },
            "checks": [],
            "engine_observations": [],
        }
    )
    return Trace(
        metadata=metadata,
        event_layer=np.tile(np.arange(layers, dtype=np.int32), steps),
        event_step=np.repeat(np.arange(steps, dtype=np.int64), layers),
        event_phase=np.full(rows, PHASE_CODES["decode"], dtype=np.int8),
        event_first_row=np.arange(rows + 1, dtype=np.int64),
        expert_ids=ids,
        layer_first_object=np.arange(layers + 1, dtype=np.int64) * CONFORMANCE_EXPERTS,
    )


@cache
def conformance(semantics: str = "event_atomic", order: str = "router") -> Conformance:
    """Replays the conformance trace with our own LRU, once per process and question."""
    # simulate may use the derived numbers above, so it is not imported before a replay is asked for.
    from replayer.simulate import Capacity, prepare, simulate

    (row,) = simulate(
        prepare(conformance_trace(), order=order),
        names=["lru"],
        scope="layer",
        semantics=[semantics],
        capacities=[Capacity(experts=CONFORMANCE_CAPACITY)],
    )
    return Conformance(row["accesses"], row["hits"], row["misses"], row["compulsory_misses"])


# The block


@dataclass(frozen=True)
class Stated:
    """What only the user can say of workload and service; null is unknown.

    token_agreement: mean and 95th percentile over pairs of requests of the share of positions with equal tokens;
    unique_sequences: distinct, of all; expert_jaccard: within a category over pairs whose texts barely overlap, and
    across categories. shared_prefix_steps: decode steps that generated prefixes share. bandwidth_bytes_per_s: what the
    level below the cache may deliver at the service rate aimed at.
    """

    templates_per_category: int | None = None
    distinct_prompt_heads: int | None = None
    distinct_final_lines: int | None = None
    chat_template_applied: bool | None = None
    shared_prefix_steps: int | None = None
    position_locked: bool | None = None
    token_agreement: tuple[float, float] | None = None
    unique_sequences: tuple[int, int] | None = None
    expert_jaccard: tuple[float, float] | None = None
    matched_pair_control: str | None = None
    service_discipline: str | None = None
    bandwidth_bytes_per_s: float | None = None


class _Answer(NamedTuple):
    """One answer, or a part of one; `known` unless something in it is not."""

    text: str
    known: bool = True


_NOTHING = _Answer(UNKNOWN, known=False)


def _joined(parts: Iterable[_Answer], separator: str = "; ") -> _Answer:
    parts = list(parts)
    return _Answer(separator.join(part.text for part in parts), all(part.known for part in parts))


def _unless_null(value: object, text: str, otherwise: str = UNKNOWN) -> _Answer:
    return _Answer(otherwise, known=False) if value is None else _Answer(text)


def _not_applicable(reason: str) -> _Answer:
    return _Answer(f"{NOT_APPLICABLE}: {reason}")


@dataclass(frozen=True)
class _Set:
    """One set of results, as the items ask of it."""

    metadata: TraceMetadata
    rows: Sequence[ResultRow]
    unions: IntArray | None
    stated: Stated
    expert_bytes: int | None
    bands: tuple[str, Sequence[Band]] | None

    @property
    def some(self) -> ResultRow:
        """Any row: for what all of them share."""
        return self.rows[0]

    def distinct(self, *names: str) -> list[Any]:
        """Distinct values (tuples, of several columns), in the order of the rows."""
        values = (tuple(row.get(name) for name in names) for row in self.rows)
        return [value[0] if len(names) == 1 else value for value in dict.fromkeys(values)]

    def contracts(self) -> list[list[ResultRow]]:
        """Rows by what has to agree before misses are compared."""
        names = ("scope", "semantics", "capacity_experts_total", "capacity_bytes", "admission", "quota_fit")
        groups: dict[tuple[Any, ...], list[ResultRow]] = {}
        for row in self.rows:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
        return list(groups.values())

    def capacities(self) -> list[ResultRow]:
        """One row per scope, capacity and way to share it out."""
        names = ("scope", "capacity_experts_total", "capacity_bytes", "quota_fit")
        return list({tuple(row.get(name) for name in names): row for row in reversed(self.rows)}.values())[::-1]

    @property
    def scores_everything(self) -> bool:
        """Whether every replayed event is scored."""
        by_phase = self.metadata.counts.rows_by_phase
        others = {phase for phase, rows in by_phase.items() if rows} - {self.some["phase"], "warmup"}
        is_of_phase = self.some["phase"] == "all" or not others
        return is_of_phase and not self.some["warm_steps"] and not self.some["warm_pass"]

    @property
    def num_layers(self) -> int:
        return len(self.metadata.moe_layer_ids)

    def layer_sizes(self, layer: int) -> list[int] | None:
        """Bytes of each expert of a layer; null if unknown."""
        if self.expert_bytes is not None:
            return [self.expert_bytes] * self.metadata.experts_per_layer[layer]
        return self.metadata.sizes_of_layer(layer)

    @property
    def pool_bytes(self) -> int | None:
        sizes = [self.layer_sizes(layer) for layer in range(self.num_layers)]
        return None if None in sizes else sum(sum(of_layer or []) for of_layer in sizes)

    @property
    def sizes_differ(self) -> bool:
        """Whether two experts of the pool are known to differ in size."""
        sizes = {size for layer in range(self.num_layers) for size in self.layer_sizes(layer) or []}
        return len(sizes) > 1

    def cache_experts(self, row: ResultRow) -> list[int] | None:
        """(L,) whole experts that the cache of each layer's events holds; null where no number says."""
        if row.get("quota_fit") is not None:
            return None
        total, in_bytes = row["capacity_experts_total"], row["capacity_bytes"]
        if total is not None:
            return [total if row["scope"] == "global" else total // self.num_layers] * self.num_layers
        held = []
        for layer in range(self.num_layers):
            sizes = set(self.layer_sizes(layer) or [])
            if len(sizes) != 1 or (row["scope"] == "global" and self.sizes_differ):
                return None
            share = in_bytes if row["scope"] == "global" else in_bytes // self.num_layers
            if row["scope"] == "layer" and layer == 0:
                share += in_bytes % self.num_layers
            held.append(share // sizes.pop())
        return held

    def pressure_of(self, row: ResultRow) -> Pressure | None:
        """As the row says it, else from the unions; null where the capacity is no number of experts."""
        if row.get("pressure_mean") is not None:
            above = row["events_above_capacity"]
            return Pressure(row["scored_events"], row["pressure_mean"], row["pressure_p95"], above)
        held = self.cache_experts(row)
        if self.unions is None or held is None:
            return None
        sizes = np.tile(np.arange(self.unions.shape[1]), self.num_layers)
        return pressure(sizes, np.repeat(held, self.unions.shape[1]), self.unions.ravel())

    @property
    def num_events(self) -> int | None:
        """Scored events."""
        return self.some.get("scored_events") if self.unions is None else int(self.unions.sum())


def reporting_block(
    metadata: TraceMetadata,
    rows: Sequence[ResultRow],
    *,
    unions: IntArray | None = None,
    stated: Stated | None = None,
    expert_bytes: int | None = None,
    bands: tuple[str, Sequence[Band]] | None = None,
) -> list[dict[str, Any]]:
    """Items A1 to D4, each a dict of item, topic, question, answer and known.

    `rows` are of the table `hit_rate`, of one trace and one window (`WINDOW_COLUMNS`); `unions` (L, U) counts the
    scored events of each layer by the accesses they make, null if not counted; `expert_bytes` is the size that the
    request gave to all experts, where the trace knows none; `bands` names a policy and its hits by `position_bands`.

    Raises:
        ValueError: no rows, or rows of another trace or of several windows.
    """
    if not rows:
        raise ValueError("a reporting block of no result at all")
    differing = [name for name in WINDOW_COLUMNS if len({row[name] for row in rows}) > 1]
    if differing:
        raise ValueError(f"rows of several windows in one reporting block: they differ in {', '.join(differing)}")
    if rows[0]["trace_id"] != metadata.trace_id:
        raise ValueError(f"rows of trace {rows[0]['trace_id']}, but metadata of {metadata.trace_id}")
    given = _Set(metadata, rows, unions, stated or Stated(), expert_bytes, bands)
    block = []
    for item, question, answer_of in _ITEMS:
        answer = answer_of(given)
        block.append(
            {
                "item": item,
                "topic": TOPICS[item[0]],
                "question": question,
                "answer": answer.text,
                "known": answer.known,
            }
        )
    return block


def reporting_text(block: Sequence[Mapping[str, Any]]) -> list[str]:
    """The block for a terminal or a file, a line per item under its topic."""
    lines: list[str] = []
    for topic, items in itertools.groupby(block, key=lambda line: line["topic"]):
        lines += [topic, *(f"  {line['item']}  {line['question']}: {line['answer']}" for line in items)]
    return lines


def is_causal(row: ResultRow) -> bool:
    """Whether the policy of a row knew nothing of the steps it is scored on beforehand."""
    tables = [row.get("fit"), row.get("quota_fit"), _fit_of_admission(row.get("admission"))]
    return not row["policy"].startswith("belady") and not any(seen_beforehand(row, fit) for fit in tables if fit)


def _fit_of_admission(admission: str | None) -> str | None:
    return None if admission is None else admission.rpartition(":top:")[0] or None


def seen_beforehand(row: ResultRow, fit: str) -> int:
    """Selected steps that `fit` looked at and that are scored afterwards; 0 for a fit on another trace."""
    num_steps = row["step_end"] - row["step_begin"]
    if fit != "same" and not fit.startswith("first:"):
        return 0
    fit_steps = num_steps if fit == "same" else math.floor(parse_fraction(fit.removeprefix("first:")) * num_steps)
    return max(0, fit_steps - int(row["warm_steps"]))


def best_causal(rows: Sequence[ResultRow]) -> ResultRow | None:
    """The row with the fewest misses of those that knew nothing beforehand, the first of equals; null without any."""
    return min((row for row in rows if is_causal(row)), key=lambda row: row["misses"], default=None)


# The items


def _a1(given: _Set) -> _Answer:
    units = {
        "event_atomic": "an event, that is all experts one pass of one layer in one step asks for, at once",
        "sequential": "a single access",
        "token_clock": "a single access, with a recency that ticks once a step",
    }
    asked = "each distinct expert once" if given.some["dedup"] == "union" else "every selection"
    parts = [f"{semantics}: {units[semantics]}" for semantics in given.distinct("semantics")]
    return _Answer("; ".join([*parts, f"an event accesses {asked}"]))


def _a2(given: _Set) -> _Answer:
    immediate = (
        "at once, after each access: an expert that is resident when its event begins can be evicted before its turn "
        "and is then counted as a miss"
    )
    times = {
        "event_atomic": "at the end of the event: what is resident when it begins stays until it was served",
        "sequential": immediate,
        "token_clock": immediate,
    }
    return _Answer("; ".join(f"{semantics}: {times[semantics]}" for semantics in given.distinct("semantics")))


def _a3(given: _Set) -> _Answer:
    seeds = [str(seed) for seed in given.distinct("seed") if seed is not None]
    orders = {
        "router": "the router's, row by row, an expert at its first mention",
        "ascending": "ascending expert ids, so the checkpoint's numbering takes part in what stays",
        "descending": "descending expert ids, so the checkpoint's numbering takes part in what stays",
        "random": f"random, seed {', '.join(seeds) or UNKNOWN}",
    }
    text = orders[given.some["access_order"]]
    if "event_atomic" in given.distinct("semantics"):
        text += "; event-atomic it decides no hit of its own event, only who is the more recent afterwards"
    return _Answer(text)


def _a4(given: _Set) -> _Answer:
    order = given.some["access_order"]
    semantics = dict.fromkeys(["event_atomic", "sequential", *given.distinct("semantics")])
    return conformance_answer(order, {each: conformance(each, order) for each in semantics})


def conformance_answer(order: str, found: Mapping[str, Conformance]) -> _Answer:
    """What the conformance trace says of this simulator, by semantics; `event_atomic` is held against the publication.

    In a fixed order the trace counts the same under both semantics, and then the answer says that it proves less.
    """
    atomic = found["event_atomic"]
    verdict = "as published" if atomic == PUBLISHED else f"NOT as published ({PUBLISHED.hits} and {PUBLISHED.misses})"
    text = (
        f"run with this simulator ({CONFORMANCE_LAYERS} layers, {CONFORMANCE_EXPERTS} experts, "
        f"{len(CONFORMANCE_SETS)} steps, LRU of {CONFORMANCE_CAPACITY} per layer, {order} order), event_atomic: "
        f"{atomic.accesses} accesses, {atomic.hits} hits, {atomic.misses} misses, {atomic.compulsory_misses} of them "
        f"compulsory, {verdict}"
    )
    others = {semantics: counts for semantics, counts in found.items() if semantics != "event_atomic"}
    text += "".join(f"; {semantics}: {counts.hits} hits" for semantics, counts in others.items())
    if atomic in others.values():
        text += ", so in this order the trace does not tell the semantics apart"
    return _Answer(text)


def _b1(given: _Set) -> _Answer:
    said = given.stated
    facts = {
        "templates per category": said.templates_per_category,
        "distinct prompt heads": said.distinct_prompt_heads,
        "distinct final lines": said.distinct_final_lines,
    }
    if set(facts.values()) == {None}:
        return _NOTHING
    return _joined(_unless_null(value, f"{name} {value}", f"{name} {UNKNOWN}") for name, value in facts.items())


def _b2(given: _Set) -> _Answer:
    applied = given.stated.chat_template_applied
    return _unless_null(applied, "yes" if applied else "no")


def _b3(given: _Set) -> _Answer:
    some, counts = given.some, given.metadata.counts
    how = ", one assumed per token position" if given.metadata.pass_boundaries == "assumed_per_token" else ""
    recorded = _Answer(
        f"{some['scored_steps']:,} steps scored of {some['step_end'] - some['step_begin']:,} replayed and "
        f"{counts.steps:,} recorded{how}"
    )
    unsaid = counts.rows_by_phase.get("unknown", 0)
    parts = [recorded]
    if some["phase"] == "unknown" or (some["phase"] == "all" and unsaid):
        parts.append(_Answer(f"whether they are decode steps: {UNKNOWN}", known=False))
    else:
        parts.append(_Answer("of every phase" if some["phase"] == "all" else f"of phase {some['phase']}"))
    if counts.requests > 1:
        shared = given.stated.shared_prefix_steps
        beyond = shared is not None and some["step_end"] > shared
        parts.append(
            _unless_null(
                shared,
                f"they {'reach' if beyond else 'do not reach'} beyond the {shared} steps of a shared prefix",
                f"whether they reach beyond a shared prefix: {UNKNOWN}",
            )
        )
    return _joined(parts)


def _b4(given: _Set) -> _Answer:
    if given.metadata.counts.requests == 1:
        return _not_applicable("one request runs alone")
    locked = given.stated.position_locked
    return _unless_null(locked, "yes" if locked else "no")


def _b5(given: _Set) -> _Answer:
    agreement, unique = given.stated.token_agreement, given.stated.unique_sequences
    if agreement is None and unique is None:
        return _NOTHING
    mean, p95 = agreement or (0.0, 0.0)
    distinct, of_all = unique or (0, 0)
    return _joined(
        [
            _unless_null(
                agreement,
                f"positional token agreement {_percent(mean)} in the mean, {_percent(p95)} at the 95th percentile",
                f"positional token agreement {UNKNOWN}",
            ),
            _unless_null(unique, f"{distinct} of {of_all} sequences unique", f"unique sequences {UNKNOWN}"),
        ]
    )


def _b6(given: _Set) -> _Answer:
    overlap = given.stated.expert_jaccard
    if overlap is not None:
        return _Answer(f"Jaccard {overlap[0]:.3f} within a category, {overlap[1]:.3f} across categories")
    if given.metadata.counts.requests == 1:
        return _not_applicable("one request makes no pair")
    return _NOTHING


def _b7(given: _Set) -> _Answer:
    if given.bands is None or not given.bands[1]:
        return _NOTHING
    policy, bands = given.bands
    rates = [band.hit_rate for band in bands]
    text = ", ".join(
        f"{band.step_begin:,}–{band.step_end - 1:,} {_percent(rate)}" for band, rate in zip(bands, rates, strict=True)
    )
    known = [rate for rate in rates if rate is not None]
    spread = f"; {100 * (max(known) - min(known)):.1f} points between the lowest and the highest" if known else ""
    return _Answer(f"hit rate of {policy} by band of scored steps: {text}{spread}")


def _b8(given: _Set) -> _Answer:
    control = given.stated.matched_pair_control
    if control is not None:
        return _Answer(control)
    return _not_applicable("one trace, so no two constructions of a workload are compared")


def _c1(given: _Set) -> _Answer:
    parts = []
    if given.unions is None or not given.unions.any():
        mean = _ratio(given.some["accesses"], given.num_events or 0)
        parts.append(_unless_null(mean, f"union of an event {mean or 0:.2f} experts in the mean", f"unions {UNKNOWN}"))
    else:
        sizes = np.arange(given.unions.shape[1])
        of_size = given.unions.sum(axis=0)
        total = int(of_size.sum())
        p95 = int(np.searchsorted(np.cumsum(of_size), _rank_of_p95(total)))
        parts.append(
            _Answer(
                f"union of an event {(sizes * of_size).sum() / total:.2f} experts in the mean, {p95} at the 95th "
                f"percentile, {int(np.flatnonzero(of_size)[-1])} at most"
            )
        )
    for row in given.capacities():
        name, found = _capacity_text(given, row), given.pressure_of(row)
        if found is None:
            parts.append(_Answer(f"{name}: r {UNKNOWN}", known=False))
            continue
        if found.mean is None or found.p95 is None:
            parts.append(_Answer(f"{name}: no r, since a cache holds nothing"))
            continue
        text = (
            f"{name}: r = union ÷ capacity of its cache {found.mean:.3f} in the mean, {found.p95:.3f} at the 95th "
            f"percentile, above 1 in {_percent(found.share_above)} of {found.events:,} events"
        )
        held = given.cache_experts(row)
        if row["scope"] == "global" and held is not None and row["scored_steps"]:
            cycle = row["accesses"] / row["scored_steps"]
            text += f" (a whole step: {cycle:,.1f} accesses, {cycle / held[0]:.3f} of the cache)"
        parts.append(_Answer(text))
    return _joined(parts)


def _c2(given: _Set) -> _Answer:
    parts = []
    for row in given.capacities():
        text = _capacity_text(given, row)
        if row["scope"] == "global":
            parts.append(f"{text}: no quotas, so no remainder")
        elif row.get("quota_fit") is not None:
            parts.append(f"{text}: layers' shares fitted on {row['quota_fit']}")
        elif row["capacity_experts_total"] is not None:
            parts.append(f"{text}: equal quotas, no remainder")
        else:
            rest = row["capacity_bytes"] % given.num_layers
            parts.append(f"{text}: equal quotas, the remainder of {rest} bytes to the lowest layer")
    return _Answer("; ".join(parts))


def _c3(given: _Set) -> _Answer:
    some = given.some
    what = "after" if some["dedup"] == "union" else "without"
    parts = [
        f"accesses, {what} deduplication inside an event ({some['accesses']:,}); before it there are "
        f"{some['selections']:,} selections"
    ]
    for rows in given.contracts():
        row = best_causal(rows) or rows[0]
        parts.append(
            f"{_contract_text(given, row)}, {row['policy']}: misses ÷ accesses "
            f"{_percent(_ratio(row['misses'], row['accesses']))}, misses ÷ selections "
            f"{_percent(_ratio(row['misses'], row['selections']))}"
        )
    return _Answer("; ".join(parts))


def _c4(given: _Set) -> _Answer:
    if given.some["dedup"] == "none":
        return _Answer(
            "yes: every selection is an access, so repeats inside an event enter the hit rate of each policy"
        )
    share = _percent(_ratio(given.some["accesses"], given.some["selections"]))
    return _Answer(f"no: the union comes before any policy; accesses ÷ selections {share} stands apart")


def _c5(given: _Set) -> _Answer:
    requests, events = given.metadata.counts.requests, given.num_events
    if requests == 1:
        return _Answer("one request, its steps in recorded order: nothing is scheduled")
    rows_per_event = _ratio(given.some["selections"], given.metadata.top_k_observed * (events or 0))
    concurrency = "" if rows_per_event is None else f"{rows_per_event:.2f} tokens per scored event in the mean, "
    said = given.stated.service_discipline
    return _unless_null(
        said,
        f"{requests:,} requests, {concurrency}{said}",
        f"{requests:,} requests, {concurrency}discipline {UNKNOWN}; steps are replayed as recorded",
    )


def _c6(given: _Set) -> _Answer:
    fitted = [row for row in given.rows if row.get("fit") is not None]
    if not fitted:
        return _not_applicable("no static or pinned policy in the set")
    parts = []
    for (policy, fit, fraction), of_policy in _grouped(fitted, "policy", "fit", "pinned_fraction"):
        pinned = "" if fraction is None else f" ({_percent(fraction)} of each capacity)"
        parts.append(f"{policy}{pinned}: {_fit_text(of_policy[0], fit)}")
        for row in of_policy:
            if row["semantics"] == of_policy[0]["semantics"]:
                loaded = row["preload_bytes"]
                size = f"expert sizes {UNKNOWN}" if loaded is None else format_bytes(loaded)
                parts.append(f"{_capacity_text(given, row)} preloaded ({size}), counted apart and never as misses")
    rules = {
        "layer": "quota: the most accessed of each layer",
        "global": "quota: the most accessed over all (layer, expert)",
    }
    parts += [f"{rules[scope]}, ties to the lowest" for scope in given.distinct("scope")]
    return _Answer("; ".join(parts), known=not any(row["preload_bytes"] is None for row in fitted))


def _grouped(rows: Sequence[ResultRow], *names: str) -> list[tuple[tuple[Any, ...], list[ResultRow]]]:
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return list(groups.items())


def _fit_text(row: ResultRow, fit: str) -> str:
    seen = seen_beforehand(row, fit)
    if fit == "same":
        return "fitted on the steps it is scored on, a diagnostic and no policy"
    if not fit.startswith("first:"):
        return f"fitted on {fit}, another trace"
    share = _percent(float(parse_fraction(fit.removeprefix("first:"))))
    split = f"{seen:,} of them scored afterwards" if seen else "none of them scored"
    return f"fitted on the first {share} of the replayed steps, {split}"


def _c7(given: _Set) -> _Answer:
    experts = sorted(set(given.metadata.experts_per_layer))
    shape = (
        f"then compare {'–'.join(str(number) for number in (experts[:1] + experts[1:][-1:]))} experts per layer, "
        f"{given.metadata.top_k_observed} per token, {given.num_layers} layers"
    )
    parts = []
    for row in given.capacities():
        name, found = _capacity_text(given, row), given.pressure_of(row)
        mean = "undefined" if found is None or found.mean is None else f"{found.mean:.3f}"
        parts.append(_unless_null(found, f"{name} {mean}", f"{name} {UNKNOWN}"))
    aligned = _joined(parts, ", ")
    return _Answer(f"align on mean r: {aligned.text}; {shape}", aligned.known)


def _d1(given: _Set) -> _Answer:
    bandwidth = given.stated.bandwidth_bytes_per_s
    parts = []
    for rows in given.contracts():
        row = best_causal(rows) or rows[0]
        name = f"{_contract_text(given, row)}, {row['policy']}"
        tokens = row.get("scored_accepted_tokens")
        per_token, per_step = miss_bytes_per_token(row), miss_bytes_per_step(row)
        experts = _ratio(row["misses"], tokens or 0)
        if per_token is not None:
            rate = "" if bandwidth is None or not per_token else f", at most {bandwidth / per_token:,.2f} tokens/s"
            parts.append(_Answer(f"{name}: {format_bytes(round(per_token))} missed per accepted token{rate}"))
        elif experts is not None:
            text = f"{name}: bytes {UNKNOWN}, since expert sizes are; {experts:,.2f} experts missed per accepted token"
            parts.append(_Answer(text, known=False))
        else:
            text = f"{name}: accepted tokens {UNKNOWN}"
            text += "" if per_step is None else f"; {format_bytes(round(per_step))} missed per step"
            parts.append(_Answer(text, known=False))
    budget = f"{format_bytes(round(bandwidth or 0))}/s"
    parts.append(_unless_null(bandwidth, f"bandwidth budget assumed: {budget}", f"bandwidth budget {UNKNOWN}"))
    return _joined(parts)


def _d2(given: _Set) -> _Answer:
    parts = [_gap_answer(given, rows) for rows in given.contracts()]
    claimed = [part for part in parts if part is not None]
    if not claimed:
        return _not_applicable("no Belady in the set, so no gap is claimed")
    if not given.scores_everything:
        claimed.append(_Answer("Belady misses least over the whole replay, of which these counts are a part"))
    return _joined(claimed)


def _gap_answer(given: _Set, rows: Sequence[ResultRow]) -> _Answer | None:
    """The gap of one contract; null where it has no Belady."""
    misses = {row["policy"]: row["misses"] for row in rows if row["policy"].startswith("belady")}
    if not misses:
        return None
    name = _contract_text(given, rows[0])
    best = best_causal(rows)
    if best is None or "belady_bypass" not in misses:
        missing = "a policy that does not know the future" if best is None else "belady_bypass"
        return _Answer(f"{name}: gap {UNKNOWN}, since {missing} was not simulated", known=False)
    found = belady_gap(best["misses"], misses["belady_bypass"], misses.get("belady_forced"))
    text = (
        f"{name}: gap {_percent(found.gap)} ({found.saved_misses:,} of the {found.misses_best_causal:,} misses of "
        f"{best['policy']})"
    )
    if given.sizes_differ and rows[0]["capacity_experts_total"] is None:
        text += ", a reference and no bound, since experts differ in size"
    if found.admission_misses is None:
        return _Answer(f"{text}; its split {UNKNOWN}, since belady_forced was not simulated", known=False)
    return _Answer(
        f"{text}; admission share {_percent(found.admission_share)} ({found.admission_misses:,} ÷ "
        f"{found.saved_misses:,}), victim share {_percent(found.victim_share)} ({found.victim_misses:,} ÷ "
        f"{found.saved_misses:,})"
    )


def _d3(given: _Set) -> _Answer:
    del given
    return _Answer("none is made: every policy is replayed over the whole window, and none is chosen step by step")


def _d4(given: _Set) -> _Answer:
    some, metadata = given.some, given.metadata
    capacities = ", ".join(_capacity_text(given, row) for row in given.capacities())
    requests = metadata.counts.requests
    service = given.stated.service_discipline if requests > 1 else "alone"
    parts = [
        _unless_null(metadata.model, f"model {metadata.model}", f"model {UNKNOWN}"),
        _Answer(f"trace {metadata.trace_id}, steps {some['step_begin']:,} to {some['step_end'] - 1:,}"),
        _Answer(capacities),
        _unless_null(service, f"{requests:,} requests, {service}" if requests > 1 else "one request alone",
                     f"{requests:,} requests, service discipline and fairness {UNKNOWN}"),
        _Answer("lossless: every miss is served, no expert is replaced or left out"),
    ]  # fmt: skip
    return _Answer(f"a result of this set holds for: {_joined(parts).text}", all(part.known for part in parts))


def _percent(ratio: float | None) -> str:
    return "—" if ratio is None else f"{100 * ratio:.1f} %"


def _capacity_text(given: _Set, row: ResultRow) -> str:
    """`8 experts per layer (6.2 % of all)`."""
    total, in_bytes = row["capacity_experts_total"], row["capacity_bytes"]
    where = "in one cache" if row["scope"] == "global" else "in a cache per layer"
    if total is None:
        pool = given.pool_bytes
        share = f" ({_percent(in_bytes / pool)} of all)" if pool else ""
        return f"{format_bytes(in_bytes)} {where}{share}"
    share = f" ({_percent(total / sum(given.metadata.experts_per_layer))} of all)"
    if row["scope"] == "global":
        return f"{total:,} experts {where}{share}"
    if row.get("quota_fit") is not None:
        return f"{total:,} experts over a cache per layer{share}"
    return f"{total // given.num_layers:,} experts per layer{share}"


def _contract_text(given: _Set, row: ResultRow) -> str:
    admission = "" if row.get("admission") is None else f", admitted by {row['admission']}"
    return f"{row['semantics']}, {_capacity_text(given, row)}{admission}"


_ITEMS: tuple[tuple[str, str, Callable[[_Set], _Answer]], ...] = (
    ("A1", "unit that is classified as hit or miss at once", _a1),
    ("A2", "when it is decided what stays", _a2),
    ("A3", "order of accesses inside an event", _a3),
    ("A4", "conformance trace", _a4),
    ("B1", "instruction templates per category", _b1),
    ("B2", "chat template applied", _b2),
    ("B3", "decode steps", _b3),
    ("B4", "requests locked to one position", _b4),
    ("B5", "agreement of generated tokens", _b5),
    ("B6", "expert overlap of texts that barely overlap", _b6),
    ("B7", "stability over decode positions", _b7),
    ("B8", "matched-pair control", _b8),
    ("C1", "unions, capacities and their ratio r", _c1),
    ("C2", "cache scope and remainder", _c2),
    ("C3", "denominator of misses", _c3),
    ("C4", "deduplication credited to a policy", _c4),
    ("C5", "service discipline", _c5),
    ("C6", "static tables", _c6),
    ("C7", "comparison across models", _c7),
    ("D1", "bytes per output token and bandwidth budget", _d1),
    ("D2", "gap to Belady and its split", _d2),
    ("D3", "gains of the best of several batches per step", _d3),
    ("D4", "scope of negative results", _d4),
)
