"""Simulated hit rates: contracts and windows in, counts out. Decisions come from `policies`, accesses from `trace`.

`simulate` is the function behind `replayer simulate`. Definitions: which steps are replayed and scored, what an access
is, how capacities and fits are read. Nothing here measures a machine.
"""

import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import polars as pl

from replayer import curves, intervals, policies, priorities, recency, streams
from replayer.caches import Caches, Events
from replayer.disclosure import pressure
from replayer.quantities import parse_fraction
from replayer.trace import (
    Trace,
    TraceFile,
    Walk,
    open_or_read,
    part_of_walk,
    steps_without_warmup,
    walk_steps,
)
from schemas.columns import POLICIES, SCOPES, SEMANTICS
from schemas.tables import CONTRACT
from schemas.trace import PHASE_CODES

SIMULATOR_VERSION = 1
"""Raised whenever the same request on the same trace would give other counts."""


class UnusableRequest(ValueError):
    """What was asked for does not fit the trace: a call to correct, not data to mend."""


@dataclass(frozen=True)
class Capacity:
    """A capacity in experts (per layer in scope layer, total in scope global) or in bytes (always total)."""

    experts: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.experts is None) == (self.bytes is None) or (self.experts or self.bytes or 0) < 0:
            raise ValueError("a capacity is a number of experts or of bytes, not negative")


@dataclass(frozen=True)
class Window:
    """What is replayed and what is scored.

    `steps` is half-open and counted without warm-up steps; null is all. `phase` null means decode where the trace has
    decode rows, else all. Warm steps = floor(warm_fraction × selected steps). Under `warm_pass` the selection is
    replayed once unscored, then replayed again and scored.
    """

    steps: tuple[int | None, int | None] = (None, None)
    phase: str | None = None
    warm_fraction: Fraction = Fraction(0)
    warm_pass: bool = False


def default_phase(trace: Trace | TraceFile) -> str:
    """`decode` where the trace has decode rows, else `all`."""
    decode = PHASE_CODES["decode"]
    found = decode in trace.phases if isinstance(trace, TraceFile) else np.any(trace.event_phase == decode)
    return "decode" if found else "all"


def default_order(trace: Trace | TraceFile) -> str:
    """`router` where the dump keeps router order, else `ascending`."""
    return "router" if trace.metadata.rank_known else "ascending"


PIECE_ACCESSES = 2**24
"""Most accesses that are decided at a time where the walk is in memory; an event is never cut."""


class MemoryWalk:
    """A walk in memory, in pieces of whole events."""

    def __init__(self, whole: Walk, piece_accesses: int = PIECE_ACCESSES) -> None:
        self.whole = whole
        wanted = np.arange(0, int(whole.first_access[-1]) + 1, piece_accesses)
        cuts = np.unique(np.append(np.searchsorted(whole.first_access, wanted), whole.num_events))
        self._cuts = cuts[cuts <= whole.num_events]

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def __getitem__(self, number: int) -> Walk:
        return part_of_walk(self.whole, int(self._cuts[number]), int(self._cuts[number + 1]))


@dataclass(frozen=True)
class FileWalk:
    """A walk over a trace that stays on disk: a piece is made from a row group each time it is asked for."""

    trace: TraceFile
    steps: npt.NDArray[np.int64]
    order: str
    dedup: str
    seed: int

    def __len__(self) -> int:
        return len(self.trace.part_first_event)

    def __getitem__(self, number: int) -> Walk:
        return walk_steps(self.trace.part(number), self.steps, order=self.order, dedup=self.dedup, seed=self.seed)


@dataclass(frozen=True)
class Survey:
    """What one look at a walk counts, before any policy decides.

    first_seen: (O,) place of an object's first access, above all places if there is none; step_accesses: (S,);
    accesses, selections, events: (L, phases); unions: (L, U) scored events by experts accessed; named: (O,) scored
    accesses of each object; piece_accesses, piece_events: sizes of the pieces; accepted: (S, phases) accepted tokens of
    each step, null where the trace does not say. All but the first and the last count scored events alone.
    """

    first_seen: npt.NDArray[np.int64]
    step_accesses: npt.NDArray[np.int64]
    accesses: npt.NDArray[np.int64]
    selections: npt.NDArray[np.int64]
    events: npt.NDArray[np.int64]
    unions: npt.NDArray[np.int64]
    named: npt.NDArray[np.int64]
    piece_accesses: tuple[int, ...]
    piece_events: tuple[int, ...]
    accepted: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class Replay:
    """A walk with its window resolved: the part that all policies and capacities of one call share."""

    trace: Trace | TraceFile
    pieces: MemoryWalk | FileWalk
    window: Window
    order: str
    dedup: str
    phase: str
    step_begin: int
    step_end: int
    warm_steps: int
    seed: int
    survey: Survey

    @property
    def walk(self) -> Walk:
        """The whole walk of one pass, where it is in memory."""
        if not isinstance(self.pieces, MemoryWalk):
            raise TypeError("the walk of a trace on disk exists in pieces only")
        return self.pieces.whole

    @property
    def passes(self) -> int:
        return 2 if self.window.warm_pass else 1

    @property
    def num_steps(self) -> int:
        return self.step_end - self.step_begin

    @property
    def num_scored(self) -> int:
        """Accesses that count."""
        return int(self.survey.accesses.sum())

    def is_scored(self, piece: Walk) -> npt.NDArray[np.bool_]:
        """(N,) whether an event of the pass that counts is scored."""
        return _is_scored(piece, self.warm_steps, self.phase)


def _is_scored(piece: Walk, warm_steps: int, phase: str) -> npt.NDArray[np.bool_]:
    scored: npt.NDArray[np.bool_] = piece.step >= warm_steps
    if phase != "all":
        scored = scored & (piece.phase == PHASE_CODES[phase])
    return scored


def prepare(
    trace: Trace | TraceFile,
    window: Window | None = None,
    *,
    order: str | None = None,
    dedup: str = "union",
    seed: int = 0,
) -> Replay:
    """Resolves steps, phase and warm part of a replay and counts what it asks for.

    Raises:
        UnusableRequest: the steps, phase or order do not exist in this trace.
    """
    window = window or Window()
    trace_id = trace.metadata.trace_id
    steps = trace.steps if isinstance(trace, TraceFile) else steps_without_warmup(trace)
    total = len(steps)
    begin = 0 if window.steps[0] is None else window.steps[0]
    end = total if window.steps[1] is None else window.steps[1]
    if not 0 <= begin < end <= total:
        raise UnusableRequest(
            f"steps {begin}:{end} of trace {trace_id}, which has {total} steps without warm-up; "
            f"wanted a range inside 0:{total} with at least one step"
        )
    if not 0 <= window.warm_fraction < 1:
        raise UnusableRequest(f"warm fraction {float(window.warm_fraction)}, wanted 0 ≤ fraction < 1")
    if order == "router" and not trace.metadata.rank_known:
        raise UnusableRequest(
            f"order router, but the ids of trace {trace_id} arrived sorted, so router order is "
            "unknown; use --order ascending, descending or random"
        )
    order = order or default_order(trace)
    phase = window.phase or default_phase(trace)
    if phase != "all" and (phase not in PHASE_CODES or phase == "warmup"):
        raise UnusableRequest(f"phase {phase!r}, wanted prefill, decode, unknown or all")
    warm_steps = math.floor(window.warm_fraction * (end - begin))
    pieces: MemoryWalk | FileWalk
    if isinstance(trace, TraceFile):
        pieces = FileWalk(trace, steps[begin:end], order, dedup, seed)
    else:
        pieces = MemoryWalk(walk_steps(trace, steps[begin:end], order=order, dedup=dedup, seed=seed))
    survey = _survey_of(trace, pieces, steps[begin:end], warm_steps, phase, dedup)
    if not survey.accesses.any():
        raise UnusableRequest(
            f"steps {begin}:{end} of trace {trace_id} have no event of phase {phase} to score after "
            f"{warm_steps} warm steps; wanted another --phase, --steps or --warm-fraction"
        )
    return Replay(trace, pieces, window, order, dedup, phase, begin, end, warm_steps, seed, survey)


def _survey_of(
    trace: Trace | TraceFile,
    pieces: MemoryWalk | FileWalk,
    steps: npt.NDArray[np.int64],
    warm_steps: int,
    phase: str,
    dedup: str,
) -> Survey:
    layers, widest = len(trace.metadata.moe_layer_ids), max(trace.metadata.experts_per_layer)
    # Only a walk of every selection may name an object twice in an event.
    newest = np.full(trace.num_objects, -1, dtype=np.int64) if dedup == "none" else None
    first_seen = np.full(trace.num_objects, np.iinfo(np.int64).max, dtype=np.int64)
    step_accesses = np.zeros(len(steps), dtype=np.int64)
    by_phase = np.zeros((3, layers, len(PHASE_CODES)), dtype=np.int64)
    unions = np.zeros((layers, widest + 1), dtype=np.int64)
    named = np.zeros(trace.num_objects, dtype=np.int64)
    sizes: list[int] = []
    events: list[int] = []
    for number in range(len(pieces)):
        piece = pieces[number]
        _survey(piece.objects, piece.first_access, piece.layer, piece.step, piece.phase, piece.selections,
                _is_scored(piece, warm_steps, phase), sum(sizes), first_seen, step_accesses, by_phase, unions,
                named, newest)  # fmt: skip
        sizes.append(len(piece.objects))
        events.append(piece.num_events)
    accepted = None
    if trace.step_accepted is not None:
        known = trace.steps if isinstance(trace, TraceFile) else np.unique(trace.event_step)
        places = np.searchsorted(known, steps)
        accepted = trace.step_accepted[places].astype(np.int64)
    accesses, selections, scored_events = by_phase
    return Survey(
        first_seen, step_accesses, accesses, selections, scored_events, unions, named, tuple(sizes), tuple(events),
        accepted,
    )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _survey(  # type: ignore[no-untyped-def]
    objects, first_access, layer, step, phase, selections, scored, base, first_seen, step_accesses, by_phase, unions,
    named, newest,
):  # fmt: skip
    for access in range(len(objects)):
        if first_seen[objects[access]] > base + access:
            first_seen[objects[access]] = base + access
    for event in range(len(layer)):
        if not scored[event]:
            continue
        start, end = first_access[event], first_access[event + 1]
        step_accesses[step[event]] += end - start
        by_phase[0, layer[event], phase[event]] += end - start
        by_phase[1, layer[event], phase[event]] += selections[event]
        by_phase[2, layer[event], phase[event]] += 1
        union = end - start
        for access in range(start, end):
            thing = objects[access]
            named[thing] += 1
            if newest is not None:
                # Places of accesses only grow, so one at or after the event's start was written in this event.
                union -= newest[thing] >= base + start
                newest[thing] = base + access
        unions[layer[event], union] += 1


def object_sizes(trace: Trace | TraceFile, expert_bytes: int | None = None) -> npt.NDArray[np.int64] | None:
    """(O,) bytes of each (layer, expert): `expert_bytes` for all, else the trace's own sizes; null if unknown."""
    if expert_bytes is not None and trace.metadata.expert_bytes is not None:
        raise UnusableRequest(
            f"--expert-bytes, but trace {trace.metadata.trace_id} has its own expert sizes; leave it out, or ingest "
            "the dump with --meta expert_bytes=…"
        )
    if expert_bytes is not None:
        return np.full(trace.num_objects, expert_bytes, dtype=np.int64)
    if trace.metadata.expert_bytes is None:
        return None
    layers = [trace.metadata.sizes_of_layer(layer) or [] for layer in range(len(trace.metadata.moe_layer_ids))]
    return np.concatenate([np.asarray(sizes, dtype=np.int64) for sizes in layers])


def fitted_counts(replay: Replay, fit: str) -> npt.NDArray[np.int64]:
    """(O,) accesses of each object over what a table is fitted on.

    `same` = all replayed steps; `first:f` = the first floor(f × selected steps); `TRACE[:first:f]` = another trace.

    Raises:
        UnusableRequest: the fit is malformed, or the other trace has other layers or expert counts.
    """
    counts = np.zeros(replay.trace.num_objects, dtype=np.int64)
    pieces, fit_steps = _fit_window(replay, fit)
    for number in range(len(pieces)):
        piece = pieces[number]
        _count_accesses(piece.objects, piece.first_access, piece.step, fit_steps, counts)
    return counts


def _fit_window(replay: Replay, fit: str) -> tuple[MemoryWalk | FileWalk, int]:
    """(the walk that a fit looks at, how many of its first steps)."""
    source, fraction = _parse_fit(fit)
    pieces: MemoryWalk | FileWalk
    if source is None:
        pieces, limit = replay.pieces, replay.num_steps
    else:
        other = open_or_read(Path(source))
        mine, theirs = replay.trace.metadata, other.metadata
        if (mine.moe_layer_ids, mine.experts_per_layer) != (theirs.moe_layer_ids, theirs.experts_per_layer):
            raise UnusableRequest(
                f"fit {source}: layers {theirs.moe_layer_ids} with {theirs.experts_per_layer} experts, the trace has "
                f"{mine.moe_layer_ids} with {mine.experts_per_layer}; a table fits one model only"
            )
        pieces, limit = _whole_walk(other, order="ascending", dedup=replay.dedup)
    fit_steps = limit if fraction is None else math.floor(fraction * limit)
    if fit_steps == 0:
        raise UnusableRequest(
            f"fit {fit!r} of {limit} steps is no step at all; wanted a larger fraction, or --fit same"
        )
    return pieces, fit_steps


def _whole_walk(trace: Trace | TraceFile, *, order: str, dedup: str) -> tuple[MemoryWalk | FileWalk, int]:
    if isinstance(trace, TraceFile):
        return FileWalk(trace, trace.steps, order, dedup, 0), len(trace.steps)
    steps = steps_without_warmup(trace)
    return MemoryWalk(walk_steps(trace, steps, order=order, dedup=dedup)), len(steps)


@numba.njit(cache=True, nogil=True)
def _count_accesses(objects, first_access, step, end_step, counts):  # type: ignore[no-untyped-def]
    for event in range(len(step)):
        if step[event] < end_step:
            for access in range(first_access[event], first_access[event + 1]):
                counts[objects[access]] += 1


def _parse_fit(fit: str) -> tuple[str | None, Fraction | None]:
    if fit == "same":
        return None, None
    head, found, fraction = fit.rpartition("first:")
    if not found:
        return fit, None
    try:
        share = parse_fraction(fraction)
    except ValueError:
        share = Fraction(-1)
    if not 0 < share <= 1 or (head and not head.endswith(":")):
        raise UnusableRequest(f"fit {fit!r}, wanted same, first:F with 0 < F ≤ 1, TRACE or TRACE:first:F")
    return head.removesuffix(":") or None, share


def admission_table(replay: Replay, scope: str, admit: str) -> npt.NDArray[np.bool_]:
    """(O,) what may enter: `FIT:top:N`, the N most accessed of a fit, or a Parquet or CSV file of layer and expert.

    N is per layer in scope layer and in all in scope global, ties to the lowest (layer, expert). A file has the
    columns layer_id, the model's own number, and expert_id; (layer, expert) pairs it does not name are refused entry.

    Raises:
        UnusableRequest: the table is malformed, or names what the trace does not have.
    """
    fit, found, number = admit.rpartition(":top:")
    if not found:
        return _admission_file(replay, Path(admit))
    if not (number.isdecimal() and len(number) < 20 and int(number)):
        raise UnusableRequest(f"admission {admit[:200]!r}: top {number[:40]!r}, wanted a number of experts above 0")
    layers = replay.trace.layer_first_object
    first_object = layers if scope == "layer" else np.array([0, replay.trace.num_objects])
    capacities = np.full(len(first_object) - 1, min(int(number), replay.trace.num_objects), dtype=np.int64)
    return recency.static_table(fitted_counts(replay, fit), None, capacities, first_object)


def _admission_file(replay: Replay, path: Path) -> npt.NDArray[np.bool_]:
    if path.suffix not in (".parquet", ".csv") or not path.is_file():
        raise UnusableRequest(
            f"admission {str(path)!r}, wanted FIT:top:N (FIT as for --fit, for example first:0.6:top:32), or a "
            ".parquet or .csv file with the columns layer_id and expert_id"
        )
    try:
        read = pl.read_parquet if path.suffix == ".parquet" else pl.read_csv
        table = read(path, columns=["layer_id", "expert_id"]).cast(pl.Int64)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UnusableRequest(f"admission table {path}: {str(error).splitlines()[0][:200]}") from None
    metadata = replay.trace.metadata
    ordinal = {layer_id: number for number, layer_id in enumerate(metadata.moe_layer_ids)}
    admits = np.zeros(replay.trace.num_objects, dtype=bool)
    for layer_id, expert_id in table.iter_rows():
        number = ordinal.get(layer_id, -1)
        if number < 0 or expert_id is None or not 0 <= expert_id < metadata.experts_per_layer[number]:
            raise UnusableRequest(
                f"admission table {path}: layer {layer_id}, expert {expert_id} is not in the trace, whose layers are "
                f"{metadata.moe_layer_ids}"
            )
        admits[replay.trace.layer_first_object[number] + expert_id] = True
    return admits


def layer_quotas(total_bytes: int, num_layers: int) -> npt.NDArray[np.int64]:
    """(L,) equal byte quotas, the remainder to the lowest layer."""
    quotas = np.full(num_layers, total_bytes // num_layers, dtype=np.int64)
    quotas[0] += total_bytes % num_layers
    return quotas


@dataclass(frozen=True)
class Choices:
    """What a request may say beside policy and capacity; every one of them is a column of the contract.

    fit: of static and pinned tables; pinned_fraction: share of each capacity that pinned_lru pins; admit: what may
    enter, null for everything; quota_fit: what the layers' shares of a capacity are fitted on, null for equal shares;
    folios_per_expert: granularity of two_list and mglru.
    """

    fit: str = "same"
    pinned_fraction: Fraction = Fraction(1, 2)
    admit: str | None = None
    quota_fit: str | None = None
    folios_per_expert: int = 1


@dataclass(frozen=True)
class Outcome:
    """One simulated contract.

    row: of the table `hit_rate`; step_hits: (S,) scored hits of each selected step; counts: (L, phases, 4) scored hits,
    misses, compulsory misses and miss bytes (0 where sizes are unknown).
    """

    row: dict[str, Any]
    step_hits: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


_LATER = (
    "hit_rate_low", "hit_rate_high", "block_steps", "reference_policy", "over_reference", "over_reference_low",
    "over_reference_high", "shuffled_accesses", "shuffled_hits", "shuffled_hit_rate",
)  # fmt: skip
"""Columns of a row that `with_intervals` and `with_nulls` fill in."""


def simulate(
    replay: Replay,
    *,
    names: Sequence[str],
    scope: str,
    semantics: Sequence[str],
    capacities: Sequence[Capacity],
    fit: str = "same",
    expert_bytes: int | None = None,
    choices: Choices | None = None,
) -> Iterator[dict[str, Any]]:
    """One row of the table `hit_rate` per policy, semantics and capacity, in that nesting.

    Raises:
        UnusableRequest: a capacity in bytes without known sizes, or a fit that does not match.
    """
    chosen = choices or Choices(fit=fit)
    for outcome in outcomes(
        replay,
        names=names,
        scope=scope,
        semantics=semantics,
        capacities=capacities,
        expert_bytes=expert_bytes,
        choices=chosen,
    ):
        yield outcome.row


def outcomes(
    replay: Replay,
    *,
    names: Sequence[str],
    scope: str,
    semantics: Sequence[str],
    capacities: Sequence[Capacity],
    expert_bytes: int | None = None,
    choices: Choices | None = None,
) -> list[Outcome]:
    """One outcome per policy, semantics and capacity, in that nesting.

    Raises:
        UnusableRequest: as `decide_cells`.
    """
    cells = [Cell(*each) for each in itertools.product(names, semantics, capacities)]
    return decide_cells(replay, cells, scope=scope, expert_bytes=expert_bytes, choices=choices)


class Cell(NamedTuple):
    """One point of a request."""

    policy: str
    semantics: str
    capacity: Capacity


def decide_cells(
    replay: Replay,
    cells: Sequence[Cell],
    *,
    scope: str,
    expert_bytes: int | None = None,
    choices: Choices | None = None,
) -> list[Outcome]:
    """One outcome per cell, in their order; they share the walk and run on all cores.

    The trace is walked once (twice under a warm pass, and once backwards before that for the Beladys), however many
    cells there are.

    Raises:
        UnusableRequest: a capacity in bytes without known sizes, a semantics that a policy is not defined in, or a fit
            or an admission table that does not match.
    """
    chosen = choices or Choices()
    _require("policy", [cell.policy for cell in cells], POLICIES)
    _require("scope", [scope], SCOPES)
    _require("semantics", [cell.semantics for cell in cells], SEMANTICS)
    for cell in cells:
        if cell.semantics not in policies.semantics_of(cell.policy):
            raise UnusableRequest(
                f"semantics {cell.semantics} is defined for lru alone; leave it out, or leave out {cell.policy}"
            )
    sizes = object_sizes(replay.trace, expert_bytes)
    if sizes is None and any(cell.capacity.bytes is not None for cell in cells):
        raise UnusableRequest(
            f"capacity in bytes, but trace {replay.trace.metadata.trace_id} has no expert sizes; "
            "add --expert-bytes, or say --capacity-experts"
        )
    accesses = replay.passes * sum(replay.survey.piece_accesses)
    if sizes is not None and int(sizes.max()) * max(accesses, len(sizes)) >= 2**62:
        raise UnusableRequest(
            f"experts of {int(sizes.max()):,} bytes accessed {accesses:,} times are over 2^62 bytes; "
            "is the size of one expert right?"
        )
    if chosen.quota_fit is not None and scope == "layer" and any(cell.capacity.bytes is not None for cell in cells):
        raise UnusableRequest("fitted quotas split capacities in experts; say --capacity-experts")
    is_fitted = any(cell.policy in policies.FITTED for cell in cells)
    counts = fitted_counts(replay, chosen.fit) if is_fitted else None
    admits = None if chosen.admit is None else admission_table(replay, scope, chosen.admit)
    layer_hits = {}
    if chosen.quota_fit is not None and scope == "layer":
        layer_hits = {one: _fitted_curves(replay, chosen.quota_fit, one) for one in {cell.semantics for cell in cells}}
    jobs = [_Job(replay, cell, scope, sizes, counts, admits, chosen, layer_hits.get(cell.semantics)) for cell in cells]
    try:
        _decide(replay, jobs, scope)
    except OverflowError as error:
        # Counters of a kernel are full, at 10^8 uses of one expert or more; it stops before it would be wrong.
        raise UnusableRequest(f"trace {replay.trace.metadata.trace_id} is too long: {error}") from None
    base = {**contract_columns(replay, scope, chosen), **_demand(replay, sizes)}
    return [job.outcome(base) for job in jobs]


def _fitted_curves(replay: Replay, fit: str, semantics: str) -> tuple[npt.NDArray[np.int64], ...]:
    """Per layer the hits of an LRU of 0, 1, … experts over the steps that quotas are fitted on."""
    layers = replay.trace.layer_first_object
    whole = curves.LruCurve(Caches(None, np.diff(layers), layers), semantics == "event_atomic")
    pieces, fit_steps = _fit_window(replay, fit)
    for number in range(len(pieces)):
        piece = pieces[number]
        whole.add(Events(piece.objects, piece.first_access, piece.layer, piece.step), piece.step < fit_steps)
    return whole.curve().hits


class _Job:
    """One policy under one contract, while it walks."""

    def __init__(
        self,
        replay: Replay,
        cell: Cell,
        scope: str,
        sizes: npt.NDArray[np.int64] | None,
        counts: npt.NDArray[np.int64] | None,
        admits: npt.NDArray[np.bool_] | None,
        chosen: Choices,
        layer_hits: Sequence[npt.NDArray[np.int64]] | None,
    ) -> None:
        self.replay = replay
        self.name, self.semantics, self.capacity = name, semantics, capacity = cell
        self.scope, self.sizes, self.chosen = scope, sizes, chosen
        layers = replay.trace.layer_first_object
        first_object = layers if scope == "layer" else np.array([0, replay.trace.num_objects])
        num_caches = len(first_object) - 1
        if capacity.bytes is not None:
            capacities = layer_quotas(capacity.bytes, num_caches)
        else:
            capacities = np.full(num_caches, capacity.experts, dtype=np.int64)
            if layer_hits is not None:
                capacities = curves.fitted_quotas(layer_hits, int(capacities.sum()))
        self.caches = Caches(None if capacity.bytes is None else sizes, capacities, first_object, admits)
        self.run, self.state = policies.kernel_of(
            name,
            semantics,
            self.caches,
            policies.Parameters(replay.seed, counts, float(chosen.pinned_fraction), chosen.folios_per_expert),
        )
        self.preload_bytes = None
        if name in policies.FITTED and sizes is not None:
            self.preload_bytes = int(sizes[self.state.table if name == "static" else self.state.pinned].sum())
        self.step_hits = np.zeros(replay.num_steps, dtype=np.int64)
        self.counts = np.zeros((len(layers) - 1, len(PHASE_CODES), 4), dtype=np.int64)

    @property
    def is_atomic(self) -> bool:
        return self.semantics == "event_atomic"

    def take(self, piece: Walk, events: Events, base: int, scored: npt.NDArray[np.bool_] | None) -> None:
        """Decides one piece, and counts it unless `scored` is null."""
        was_hit = np.empty(len(piece.objects), dtype=np.uint8)
        self.run(self.state, events, self.caches, self.is_atomic, was_hit)
        if scored is not None:
            _tally(piece.objects, piece.first_access, piece.layer, piece.step, piece.phase, scored, was_hit, base,
                   self.replay.survey.first_seen, self.sizes, self.step_hits, self.counts)  # fmt: skip

    def outcome(self, base: dict[str, Any]) -> Outcome:
        """The row of `hit_rate` and what it was summed from."""
        replay, capacity = self.replay, self.capacity
        hits, misses, compulsory, miss_bytes = self.counts.sum(axis=(0, 1)).tolist()
        accesses = replay.num_scored
        accepted = base["scored_accepted_tokens"]
        known = None if self.sizes is None else miss_bytes
        row = {
            **base,
            "policy": self.name,
            "semantics": self.semantics,
            **capacity_columns(replay.trace, self.scope, capacity, self.sizes),
            "fit": self.chosen.fit if self.name in policies.FITTED else None,
            "pinned_fraction": float(self.chosen.pinned_fraction) if self.name == "pinned_lru" else None,
            "folios_per_expert": self.chosen.folios_per_expert if self.name in policies.KERNEL_MODELS else None,
            "seed": replay.seed if replay.order == "random" or self.name == "random" else None,
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / accesses if accesses else None,
            **dict.fromkeys(_LATER),
            "compulsory_misses": compulsory,
            "capacity_misses": misses - compulsory,
            "miss_bytes": known,
            "miss_bytes_per_step": None if known is None else known / base["scored_steps"],
            "miss_bytes_per_accepted_token": known / accepted if known is not None and accepted else None,
            "preload_bytes": self.preload_bytes,
            **self._pressure(),
        }
        return Outcome(row, self.step_hits, self.counts)

    def _pressure(self) -> dict[str, float | int | None]:
        """Union of an event ÷ capacity of its cache: mean, 95th percentile, and how often above 1."""
        if self.capacity.bytes is not None:
            return dict.fromkeys(("pressure_mean", "pressure_p95", "events_above_capacity"))
        unions = self.replay.survey.unions
        held = np.broadcast_to(self.caches.capacities, len(unions))
        found = pressure(
            np.tile(np.arange(unions.shape[1]), len(unions)), np.repeat(held, unions.shape[1]), unions.ravel()
        )
        return {
            "pressure_mean": found.mean,
            "pressure_p95": found.p95,
            "events_above_capacity": found.events_above,
        }


def _decide(replay: Replay, jobs: Sequence[_Job], scope: str) -> None:
    future = {
        atomic: _Future(replay, atomic) for atomic in {job.is_atomic for job in jobs if policies.knows_future(job.name)}
    }
    base = 0
    # The kernels run without the interpreter lock, and no job sees another: the number of threads changes nothing.
    with ThreadPoolExecutor(min(len(jobs), len(os.sched_getaffinity(0)))) as threads:
        for passed in range(replay.passes):
            for number in range(len(replay.pieces)):
                piece = replay.pieces[number]
                scored = replay.is_scored(piece) if passed == replay.passes - 1 else None
                cache = piece.layer if scope == "layer" else np.zeros_like(piece.layer)
                events = {
                    atomic: Events(piece.objects, piece.first_access, cache, piece.step, times)
                    for atomic, times in [
                        (None, None),
                        *((atomic, known.of_piece(passed, number)) for atomic, known in future.items()),
                    ]
                }

                def take(job: _Job, piece=piece, events=events, scored=scored, base=base) -> None:  # type: ignore[no-untyped-def]
                    job.take(piece, events[job.is_atomic if policies.knows_future(job.name) else None], base, scored)

                for _ in threads.map(take, jobs):
                    pass
                base += len(piece.objects)


class _Future:
    """When each access's object is accessed next, found by walking all passes backwards.

    Kept in memory up to `SPILL_BYTES`, beyond that in an unnamed file beside other temporary ones, read and written
    piece by piece: mapped, the file would count as memory of this process.
    """

    def __init__(self, replay: Replay, atomic: bool) -> None:
        survey = replay.survey
        units = survey.piece_events if atomic else survey.piece_accesses
        total = replay.passes * sum(survey.piece_accesses)
        fits = replay.passes * sum(units) < 2**32 - 1
        self._dtype: np.dtype[Any] = np.dtype(np.uint32 if fits else np.uint64)
        self._firsts = np.concatenate([[0], np.cumsum(survey.piece_accesses)])
        is_spilled = total * self._dtype.itemsize > SPILL_BYTES
        self._file = tempfile.TemporaryFile() if is_spilled else None  # noqa: SIM115
        self._times: npt.NDArray[Any] = np.empty(0 if is_spilled else total, dtype=self._dtype)
        upcoming = np.full(replay.trace.num_objects, 2 ** (8 * self._dtype.itemsize) - 1, dtype=self._dtype)
        base = replay.passes * sum(units)
        for passed in reversed(range(replay.passes)):
            for number in reversed(range(len(replay.pieces))):
                piece = replay.pieces[number]
                base -= units[number]
                start, end = self._place(passed, number)
                into = np.empty(end - start, dtype=self._dtype) if is_spilled else self._times[start:end]
                priorities.next_times(piece.objects, piece.first_access, upcoming, base, atomic, into)
                if self._file is not None:
                    self._file.seek(start * self._dtype.itemsize)
                    into.tofile(self._file)

    def of_piece(self, passed: int, number: int) -> npt.NDArray[Any]:
        """(a,) the next accesses of one piece of one pass."""
        start, end = self._place(passed, number)
        if self._file is None:
            return self._times[start:end]
        self._file.seek(start * self._dtype.itemsize)
        found: npt.NDArray[Any] = np.fromfile(self._file, dtype=self._dtype, count=end - start)
        return found

    def _place(self, passed: int, number: int) -> tuple[int, int]:
        first = passed * int(self._firsts[-1])
        return first + int(self._firsts[number]), first + int(self._firsts[number + 1])


SPILL_BYTES = 2**30
"""Next accesses that take more than this lie in a file while a trace is simulated."""


@numba.njit(cache=True, nogil=True)
def _tally(  # type: ignore[no-untyped-def]
    objects, first_access, layer, step, phase, scored, was_hit, base, first_seen, sizes, step_hits, counts
):
    for event in range(len(layer)):
        if not scored[event]:
            continue
        hits = misses = compulsory = miss_bytes = 0
        for access in range(first_access[event], first_access[event + 1]):
            if was_hit[access]:
                hits += 1
                continue
            misses += 1
            if first_seen[objects[access]] == base + access:
                compulsory += 1
            if sizes is not None:
                miss_bytes += sizes[objects[access]]
        step_hits[step[event]] += hits
        into = counts[layer[event], phase[event]]
        into[0] += hits
        into[1] += misses
        into[2] += compulsory
        into[3] += miss_bytes


def contract_columns(replay: Replay, scope: str, chosen: Choices) -> dict[str, Any]:
    """Columns of the contract that all policies and capacities of a request share."""
    return {
        "trace_id": replay.trace.metadata.trace_id,
        "scope": scope,
        "access_order": replay.order,
        "dedup": replay.dedup,
        "step_begin": replay.step_begin,
        "step_end": replay.step_end,
        "phase": replay.phase,
        "warm_fraction": float(replay.window.warm_fraction),
        "warm_steps": replay.warm_steps,
        "warm_pass": replay.window.warm_pass,
        "admission": chosen.admit,
        "quota_fit": chosen.quota_fit if scope == "layer" else None,
    }


def _demand(replay: Replay, sizes: npt.NDArray[np.int64] | None) -> dict[str, Any]:
    survey = replay.survey
    accesses, selections = replay.num_scored, int(survey.selections.sum())
    scored_steps = int(np.count_nonzero(survey.step_accesses))
    numerator, denominator, uniform = _lag1_chance(replay)
    return {
        "scored_steps": scored_steps,
        "scored_accepted_tokens": _accepted(replay),
        "selections": selections,
        "accesses": accesses,
        "union_ratio": accesses / selections if selections else None,
        "demand_bytes": None if sizes is None else int(survey.named @ sizes),
        "scored_events": int(survey.events.sum()),
        "lag1_chance_numerator": numerator,
        "lag1_chance_denominator": denominator,
        "lag1_chance_ratio": numerator / denominator if denominator else None,
        "lag1_uniform_denominator": uniform,
        "lag1_uniform_ratio": accesses / uniform if uniform else None,
    }


def _accepted(replay: Replay) -> int | None:
    """Tokens accepted in the scored steps, of the scored phase; null where the trace in hand does not say."""
    accepted = replay.survey.accepted
    if accepted is None:
        return None
    scored = accepted[replay.survey.step_accesses > 0]
    return int(scored.sum() if replay.phase == "all" else scored[:, PHASE_CODES[replay.phase]].sum())


def with_intervals(replay: Replay, found: Sequence[Outcome], reference: str = "lru", seed: int = 0) -> list[Outcome]:
    """The outcomes with 95 % intervals of their hit rates and of their differences to `reference`.

    The reference is the outcome of that policy under the same scope, semantics, capacity and admission.
    """
    accesses = replay.survey.step_accesses
    is_scored = accesses > 0
    accesses = accesses[is_scored]

    def same(row: dict[str, Any]) -> tuple[object, ...]:
        return tuple(row[name] for name in ("semantics", "capacity_experts_total", "capacity_bytes", "admission"))

    references = {same(one.row): one for one in found if one.row["policy"] == reference}
    result = []
    for one in found:
        row = dict(one.row)
        alone = intervals.hit_rate_interval(one.step_hits[is_scored], accesses, seed=seed)
        if alone is not None:
            row |= {"hit_rate_low": alone.low, "hit_rate_high": alone.high, "block_steps": alone.block_steps}
        other = references.get(same(row))
        if other is not None and one.row["policy"] != reference and row["hit_rate"] is not None:
            row |= {"reference_policy": reference, "over_reference": row["hit_rate"] - other.row["hit_rate"]}
            both = intervals.difference_interval(
                one.step_hits[is_scored], accesses, other.step_hits[is_scored], accesses, seed=seed
            )
            if both is not None:
                row |= {"over_reference_low": both.low, "over_reference_high": both.high}
        result.append(dataclasses.replace(one, row=row))
    return result


def shuffled_replay(replay: Replay, seed: int = 0) -> Replay:
    """The same replay of the same trace with its tokens shuffled over the steps (`streams.shuffled`).

    Raises:
        TypeError: the trace is not in memory.
    """
    if isinstance(replay.trace, TraceFile):
        raise TypeError("a trace on disk is not shuffled")
    window = dataclasses.replace(replay.window, phase=replay.phase)
    trace = streams.shuffled(replay.trace, seed, steps=(replay.step_begin, replay.step_end))
    return prepare(trace, window, order=replay.order, dedup=replay.dedup, seed=replay.seed)


def with_nulls(found: Sequence[Outcome], shuffled: Replay, again: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with what the same requests found on the same trace, its tokens shuffled.

    `again` are the outcomes of `shuffled`, in the order of `found`.
    """
    return [
        dataclasses.replace(
            one,
            row={
                **one.row,
                "shuffled_accesses": shuffled.num_scored,
                "shuffled_hits": null.row["hits"],
                "shuffled_hit_rate": null.row["hit_rate"],
            },
        )
        for one, null in zip(found, again, strict=True)
    ]


def layer_rows(replay: Replay, one: Outcome) -> list[dict[str, Any]]:
    """Rows of the table `hit_rate_layer`: the outcome layer by layer."""
    contract = {name: one.row[name] for name in CONTRACT}
    return [
        {**contract, "layer_id": layer_id, **_counted(counts, one.row["miss_bytes"] is not None)}
        for layer_id, counts in zip(replay.trace.metadata.moe_layer_ids, one.counts.sum(axis=1).tolist(), strict=True)
    ]


def phase_rows(one: Outcome) -> list[dict[str, Any]]:
    """The outcome phase by phase, of those with a scored access."""
    by_phase = one.counts.sum(axis=0).tolist()
    return [
        {"phase": phase, **_counted(by_phase[code], one.row["miss_bytes"] is not None)}
        for phase, code in PHASE_CODES.items()
        if by_phase[code][0] + by_phase[code][1]
    ]


def step_rows(replay: Replay, one: Outcome) -> list[dict[str, Any]]:
    """Accesses and hits of every scored step, numbered over the selection."""
    accesses = replay.survey.step_accesses
    return [
        {"step": int(step), "accesses": int(accesses[step]), "hits": int(one.step_hits[step])}
        for step in np.flatnonzero(accesses)
    ]


def _counted(counts: Sequence[int], sized: bool) -> dict[str, Any]:
    hits, misses, compulsory, miss_bytes = counts
    return {
        "accesses": hits + misses,
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "compulsory_misses": compulsory,
        "capacity_misses": misses - compulsory,
        "miss_bytes": miss_bytes if sized else None,
    }


def _lag1_chance(replay: Replay) -> tuple[float, float, int]:
    """(Σ p², Σ p, Σ tokens × E) over layers, p the share of a layer's scored tokens that access an expert.

    A token is an event, which accesses an expert once however many of its rows select it; under dedup `none` it is a
    row, and the figures are those of `trace_locality`. Σ p² ÷ Σ p is how often an access names an expert of the token
    before, were tokens drawn independently by popularity; accesses ÷ the third is the same under a uniform router.
    """
    survey, layers = replay.survey, replay.trace.layer_first_object
    tokens = survey.events.sum(axis=1)
    if replay.dedup == "none":
        tokens = survey.selections.sum(axis=1) // replay.trace.top_k
    pool = np.diff(layers)
    share = survey.named / np.repeat(np.maximum(tokens, 1), pool)
    return float((share**2).sum()), float(share.sum()), int((tokens * pool).sum())


def capacity_columns(
    trace: Trace | TraceFile, scope: str, capacity: Capacity, sizes: npt.NDArray[np.int64] | None
) -> dict[str, int | None]:
    """The columns capacity_experts_total and capacity_bytes."""
    if capacity.experts is None:
        return {"capacity_experts_total": None, "capacity_bytes": capacity.bytes}
    layers = trace.layer_first_object
    total = capacity.experts * (len(layers) - 1) if scope == "layer" else capacity.experts
    in_bytes: int | None = None
    if sizes is not None:
        # Experts of unequal size have no common price; a cache per layer only needs them equal inside each layer.
        groups = [sizes] if scope == "global" else [sizes[a:b] for a, b in itertools.pairwise(layers)]
        if all(group.min() == group.max() for group in groups):
            in_bytes = int(sum(capacity.experts * int(group[0]) for group in groups))
    return {"capacity_experts_total": total, "capacity_bytes": in_bytes}


def _require(what: str, found: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in found if name not in allowed]
    if unknown:
        raise UnusableRequest(f"{what} {unknown[0]!r}, wanted one of {', '.join(allowed)}")
