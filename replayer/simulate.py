"""Simulated hit rates: contracts and windows in, counts out. Decisions come from `policies`, accesses from `trace`.

`simulate` is the function behind `replayer simulate`. Definitions: which steps are replayed and scored, what an access
is, how capacities and fits are read. Nothing here measures a machine.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replayer import policies
from replayer.quantities import parse_fraction
from replayer.trace import Trace, Walk, read_trace, repeat_twice, steps_without_warmup, walk
from schemas.columns import POLICIES, SCOPES, SEMANTICS
from schemas.trace import PHASE_CODES


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


def default_phase(trace: Trace) -> str:
    """`decode` where the trace has decode rows, else `all`."""
    return "decode" if np.any(trace.event_phase == PHASE_CODES["decode"]) else "all"


def default_order(trace: Trace) -> str:
    """`router` where the dump keeps router order, else `ascending`."""
    return "router" if trace.metadata.rank_known else "ascending"


@dataclass(frozen=True)
class Replay:
    """A walk with its window resolved: the part that all policies and capacities of one call share.

    scored: (N,) whether an event counts; cold: (A,) whether an access is the first to its object in the replay.
    """

    trace: Trace
    walk: Walk
    window: Window
    phase: str
    step_begin: int
    step_end: int
    warm_steps: int
    scored: npt.NDArray[np.bool_]
    cold: npt.NDArray[np.bool_]
    seed: int

    @cached_property
    def scored_accesses(self) -> npt.NDArray[np.bool_]:
        """(A,) whether an access counts."""
        return np.repeat(self.scored, np.diff(self.walk.first_access))

    @cached_property
    def num_scored(self) -> int:
        """Accesses that count."""
        return int(np.count_nonzero(self.scored_accesses))


def prepare(
    trace: Trace, window: Window | None = None, *, order: str | None = None, dedup: str = "union", seed: int = 0
) -> Replay:
    """Resolves steps, phase and warm part of a replay and lists its accesses.

    Raises:
        UnusableRequest: the steps, phase or order do not exist in this trace.
    """
    window = window or Window()
    total = len(steps_without_warmup(trace))
    begin = 0 if window.steps[0] is None else window.steps[0]
    end = total if window.steps[1] is None else window.steps[1]
    if not 0 <= begin < end <= total:
        raise UnusableRequest(
            f"steps {begin}:{end} of trace {trace.metadata.trace_id}, which has {total} steps without warm-up; "
            f"wanted a range inside 0:{total} with at least one step"
        )
    if not 0 <= window.warm_fraction < 1:
        raise UnusableRequest(f"warm fraction {float(window.warm_fraction)}, wanted 0 ≤ fraction < 1")
    if order == "router" and not trace.metadata.rank_known:
        raise UnusableRequest(
            f"order router, but the ids of trace {trace.metadata.trace_id} arrived sorted, so router order is "
            "unknown; use --order ascending, descending or random"
        )
    order = order or default_order(trace)
    phase = window.phase or default_phase(trace)
    steps = walk(trace, begin, end, order=order, dedup=dedup, seed=seed)
    warm_steps = math.floor(window.warm_fraction * (end - begin))
    scored = steps.step >= warm_steps
    if phase != "all":
        if phase not in PHASE_CODES or phase == "warmup":
            raise UnusableRequest(f"phase {phase!r}, wanted prefill, decode, unknown or all")
        scored &= steps.phase == PHASE_CODES[phase]
    if not scored.any():
        raise UnusableRequest(
            f"steps {begin}:{end} of trace {trace.metadata.trace_id} have no event of phase {phase} to score after "
            f"{warm_steps} warm steps; wanted another --phase, --steps or --warm-fraction"
        )
    if window.warm_pass:
        steps = repeat_twice(steps)
        scored = np.concatenate([np.zeros_like(scored), scored])
    cold = np.zeros(len(steps.objects), dtype=bool)
    cold[np.unique(steps.objects, return_index=True)[1]] = True
    return Replay(trace, steps, window, phase, begin, end, warm_steps, scored, cold, seed)


def object_sizes(trace: Trace, expert_bytes: int | None = None) -> npt.NDArray[np.int64] | None:
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
    """(O,) accesses of each object over what a static table is fitted on.

    `same` = all replayed steps; `first:f` = the first floor(f × selected steps); `TRACE[:first:f]` = another trace.

    Raises:
        UnusableRequest: the fit is malformed, or the other trace has other layers or expert counts.
    """
    source, fraction = _parse_fit(fit)
    if source is None:
        steps = replay.walk
        limit = replay.step_end - replay.step_begin
        num_events = steps.num_events // 2 if replay.window.warm_pass else steps.num_events
    else:
        other = read_trace(Path(source))
        mine, theirs = replay.trace.metadata, other.metadata
        if (mine.moe_layer_ids, mine.experts_per_layer) != (theirs.moe_layer_ids, theirs.experts_per_layer):
            raise UnusableRequest(
                f"fit {source}: layers {theirs.moe_layer_ids} with {theirs.experts_per_layer} experts, the trace has "
                f"{mine.moe_layer_ids} with {mine.experts_per_layer}; a table fits one model only"
            )
        limit = len(steps_without_warmup(other))
        steps = walk(other, 0, limit, order="ascending", dedup=replay.walk.dedup)
        num_events = steps.num_events
    fit_steps = limit if fraction is None else math.floor(fraction * limit)
    if fit_steps == 0:
        raise UnusableRequest(
            f"fit {fit!r} of {limit} steps is no step at all; wanted a larger fraction, or --fit same"
        )
    fitted = steps.step[:num_events] < fit_steps
    accesses = np.repeat(fitted, np.diff(steps.first_access[: num_events + 1]))
    objects = steps.objects[: steps.first_access[num_events]][accesses]
    return np.bincount(objects, minlength=replay.trace.num_objects).astype(np.int64)


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


def layer_quotas(total_bytes: int, num_layers: int) -> npt.NDArray[np.int64]:
    """(L,) equal byte quotas, the remainder to the lowest layer."""
    quotas = np.full(num_layers, total_bytes // num_layers, dtype=np.int64)
    quotas[0] += total_bytes % num_layers
    return quotas


def simulate(
    replay: Replay,
    *,
    names: Sequence[str],
    scope: str,
    semantics: Sequence[str],
    capacities: Sequence[Capacity],
    fit: str = "same",
    expert_bytes: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One row of the table `hit_rate` per policy, semantics and capacity, in that nesting.

    Raises:
        UnusableRequest: a capacity in bytes without known sizes, or a fit that does not match.
    """
    _require("policy", names, POLICIES)
    _require("scope", [scope], SCOPES)
    _require("semantics", semantics, SEMANTICS)
    sizes = object_sizes(replay.trace, expert_bytes)
    if sizes is None and any(capacity.bytes is not None for capacity in capacities):
        raise UnusableRequest(
            f"capacity in bytes, but trace {replay.trace.metadata.trace_id} has no expert sizes; "
            "add --expert-bytes, or say --capacity-experts"
        )
    if sizes is not None and int(sizes.max()) * max(len(replay.walk.objects), len(sizes)) >= 2**62:
        raise UnusableRequest(
            f"experts of {int(sizes.max()):,} bytes accessed {len(replay.walk.objects):,} times are over 2^62 bytes; "
            "is the size of one expert right?"
        )
    counts = fitted_counts(replay, fit) if "static" in names else None
    decided = _Decisions(replay, scope, sizes, counts)
    base = {**_contract(replay, scope), **_demand(replay, sizes)}

    def row(job: tuple[str, str, Capacity]) -> dict[str, Any]:
        name, one, capacity = job
        was_hit, preload_bytes = decided.decide(name, one, capacity)
        return {
            **base,
            "policy": name,
            "semantics": one,
            **_capacity_columns(replay.trace, scope, capacity, sizes),
            "fit": fit if name == "static" else None,
            **_counts(replay, was_hit, sizes),
            "preload_bytes": preload_bytes,
        }

    decided.prepare(names, semantics)
    jobs = list(itertools.product(names, semantics, capacities))
    # The kernels run without the interpreter lock; results come in the order of the jobs, whatever the threads do.
    with ThreadPoolExecutor(min(len(jobs), len(os.sched_getaffinity(0)))) as threads:
        yield from threads.map(row, jobs)


class _Decisions:
    """Runs kernels over one replay, keeping what several runs share (next accesses, the fitted counts)."""

    def __init__(
        self,
        replay: Replay,
        scope: str,
        sizes: npt.NDArray[np.int64] | None,
        counts: npt.NDArray[np.int64] | None,
    ) -> None:
        trace = replay.trace
        self.replay, self.scope, self.sizes, self.counts = replay, scope, sizes, counts
        self.unit = np.ones(trace.num_objects, dtype=np.int64)
        layered = scope == "layer"
        self.event_cache = replay.walk.layer if layered else np.zeros_like(replay.walk.layer)
        self.first_object = trace.layer_first_object if layered else np.array([0, trace.num_objects])
        self.next_time: dict[bool, npt.NDArray[np.int64]] = {}

    def prepare(self, names: Sequence[str], semantics: Sequence[str]) -> None:
        """Finds, once, the next accesses that the Belady policies will ask for."""
        if any(name.startswith("belady") for name in names):
            walked, num_objects = self.replay.walk, self.replay.trace.num_objects
            for one in semantics:
                atomic = one == "event_atomic"
                self.next_time[atomic] = policies.next_times(walked.objects, walked.first_access, num_objects, atomic)

    def decide(
        self, name: str, semantics: str, capacity: Capacity
    ) -> tuple[npt.NDArray[np.uint8] | npt.NDArray[np.bool_], int | None]:
        """(A,) whether each access hits, and the bytes preloaded (null unless static with known sizes)."""
        walked = self.replay.walk
        num_caches = len(self.first_object) - 1
        sizes = self.unit if capacity.bytes is None else self.sizes
        if capacity.bytes is None:
            capacities = np.full(num_caches, capacity.experts, dtype=np.int64)
        else:
            capacities = layer_quotas(capacity.bytes, num_caches)
        if name == "static":
            table = policies.static_table(self.counts, sizes, capacities, self.first_object)
            return table[walked.objects], None if self.sizes is None else int(self.sizes[table].sum())
        atomic = semantics == "event_atomic"
        shared = (walked.objects, walked.first_access, self.event_cache, sizes, capacities, self.first_object, atomic)
        if name == "lru":
            return policies.lru(*shared), None
        if name in ("lfu_gated", "lfu_always"):
            return policies.lfu(*shared, name == "lfu_gated"), None
        return policies.belady(*shared, name == "belady_forced", self.next_time[atomic]), None


def _contract(replay: Replay, scope: str) -> dict[str, Any]:
    return {
        "trace_id": replay.trace.metadata.trace_id,
        "scope": scope,
        "access_order": replay.walk.order,
        "dedup": replay.walk.dedup,
        "step_begin": replay.step_begin,
        "step_end": replay.step_end,
        "phase": replay.phase,
        "warm_fraction": float(replay.window.warm_fraction),
        "warm_steps": replay.warm_steps,
        "warm_pass": replay.window.warm_pass,
        "seed": replay.seed if replay.walk.order == "random" else None,
    }


def _demand(replay: Replay, sizes: npt.NDArray[np.int64] | None) -> dict[str, Any]:
    scored = replay.scored_accesses
    accesses = replay.num_scored
    selections = int(replay.walk.selections[replay.scored].sum())
    return {
        "scored_steps": len(np.unique(replay.walk.step[replay.scored])),
        "selections": selections,
        "accesses": accesses,
        "union_ratio": accesses / selections if selections else None,
        "demand_bytes": None if sizes is None else int(sizes[replay.walk.objects[scored]].sum()),
    }


def _capacity_columns(
    trace: Trace, scope: str, capacity: Capacity, sizes: npt.NDArray[np.int64] | None
) -> dict[str, int | None]:
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


def _counts(
    replay: Replay,
    was_hit: npt.NDArray[np.uint8] | npt.NDArray[np.bool_],
    sizes: npt.NDArray[np.int64] | None,
) -> dict[str, Any]:
    missed = replay.scored_accesses & (was_hit == 0)
    accesses, misses = replay.num_scored, int(np.count_nonzero(missed))
    return {
        "hits": accesses - misses,
        "misses": misses,
        "hit_rate": (accesses - misses) / accesses if accesses else None,
        "compulsory_misses": int(np.count_nonzero(missed & replay.cold)),
        "miss_bytes": None if sizes is None else int(sizes[replay.walk.objects[missed]].sum()),
    }


def _require(what: str, found: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in found if name not in allowed]
    if unknown:
        raise UnusableRequest(f"{what} {unknown[0]!r}, wanted one of {', '.join(allowed)}")
