"""Parsed dump → canonical rows: layer numbers, typing of passes, event numbers, the checks of a whole dump.

In: a `ParsedDump` and what its user says of it. Out: tables of canonical rows and, at the end, the trace's metadata, or
an error that says where, what was wanted, what was found and what to do. Layout knowledge belongs to `dumps`, files to
`ingest`.

Letters: R rows of a block, K experts per row, L layers seen so far.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from pipeline.dumps.blocks import MalformedDump, ParsedDump, RowBlock
from replayer.trace import MAX_OBJECTS
from schemas.columns import PASS_KINDS, PHASES
from schemas.trace import (
    PASS_KIND_CODES,
    PHASE_CODES,
    SCHEMA_VERSION,
    CheckRecord,
    Counts,
    Source,
    TraceMetadata,
    UserMetadata,
)

PARSER_VERSION = 1
"""Raised whenever the same dump would give another trace; older traces are parsed again by the nightly schedule."""

WARMUP_ROWS = 16
"""Shortest leading block of one identical row, in all layers, that counts as the engine's warm-up (published ones
run from 2,048 to 16,640 rows; no sound dump at hand starts with more than one)."""

FROZEN_ROWS = 16
"""Identical rows in a row, in every layer, from which on padding or a replayed graph is named."""

FROZEN_LAYER_ROWS = 64
"""The same within one layer, where chance reaches further."""

LARGEST_WEIGHT = 65504
"""The largest 16-bit float."""

CONSTANT_ROWS = 16
"""Rows from which on a layer that never changes is refused: an unwritten buffer, not a popular expert."""

IDENTICAL_ROWS = 32
"""Rows from which on two layers with equal routes are refused as copies; below it they are only named."""

PARTITION_CHANCE = 0.01
"""Expected chance windows up to which one window that partitions the experts is evidence of a strided-view copy."""

SHORT_WINDOW_CHANCE = 1e-4
"""The same for a window that is shorter than a whole partition, as a copy of passes shorter than E ÷ k tokens shows."""

COLLAPSE_SHARE = 0.9
"""Share of a layer's selections on its k most selected experts from which on a collapse is named; it can be real."""


# Typing of passes


def type_passes(
    record_step: npt.NDArray[np.int64], record_pass: npt.NDArray[np.int32], record_rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int8], int | None]:
    """(codes of PASS_KINDS per record, first step that fits no rule or null); a record is one layer of one pass.

    One pass in a step: one row a layer is `normal`, two are `spec_accept`. Two passes: the second (one row a layer) is
    `spec_fallback`; the first is `spec_rejected` if two rows wide, else `normal` that was repeated. Rebuilt from
    record width and repetition alone, after 2608.12103 §2.
    """
    kinds = np.full(len(record_step), PASS_KIND_CODES["normal"], dtype=np.int8)
    starts = np.flatnonzero(np.diff(record_step, prepend=-1))
    lengths = np.diff(np.append(starts, len(record_step)))
    passes = np.repeat(np.maximum.reduceat(record_pass, starts) + 1, lengths)
    narrow, wide = [], []
    for ordinal in (0, 1):
        in_pass = record_pass == ordinal
        fewest = np.minimum.reduceat(np.where(in_pass, record_rows, 2), starts)
        most = np.maximum.reduceat(np.where(in_pass, record_rows, 1), starts)
        narrow.append(np.repeat(most == 1, lengths))
        wide.append(np.repeat(fewest == 2, lengths))
    first, second = record_pass == 0, record_pass == 1
    kinds[(passes == 1) & wide[0]] = PASS_KIND_CODES["spec_accept"]
    kinds[(passes == 2) & first & wide[0]] = PASS_KIND_CODES["spec_rejected"]
    kinds[(passes == 2) & second] = PASS_KIND_CODES["spec_fallback"]
    sound = (passes == 1) & (narrow[0] | wide[0]) | (passes == 2) & (narrow[0] | wide[0]) & narrow[1]
    wrong = record_step[~sound]
    return kinds, int(wrong[0]) if len(wrong) else None


# Checks over a whole dump


@dataclass
class _LayerState:
    """What the scan remembers of each layer seen, grown as layers and ids appear."""

    num_experts: int
    layers: int = 0
    last_row: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    window_start: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    longest_window: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    changes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    last_set: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    run: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    longest_run: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def grow(self, layers: int, num_experts: int) -> None:
        """Room for that many layers and experts; doubling the experts, since a dump may not say how many there are."""
        if num_experts > self.last_row.shape[1]:
            wanted = max(num_experts, min(2 * self.last_row.shape[1], 65535))
            self.num_experts = max(self.num_experts, num_experts)
            self.last_row = _padded(self.last_row, (self.last_row.shape[0], wanted), -1)
            self.counts = _padded(self.counts, self.last_row.shape, 0)
        if layers > self.layers:
            wide = self.last_row.shape[1]
            self.last_row = _padded(self.last_row, (layers, wide), -1)
            self.counts = _padded(self.counts, (layers, wide), 0)
            names = ("rows", "window_start", "longest_window", "changes", "hashes", "last_set", "run", "longest_run")
            for name in names:
                setattr(self, name, _padded(getattr(self, name), (layers,), 0))
            self.layers = layers


def _padded(array: npt.NDArray[Any], shape: tuple[int, ...], value: int) -> npt.NDArray[Any]:
    larger = np.full(shape, value, dtype=array.dtype)
    larger[tuple(slice(0, length) for length in array.shape)] = array
    return larger


@numba.njit(cache=True, nogil=True)
def _scan(  # type: ignore[no-untyped-def]
    layer, expert_ids, counted, last_row, counts, rows, window_start, longest_window, changes, hashes, last_set, run,
    longest_run, first_ids,
):  # fmt: skip
    """One pass over a block's rows in recorded order; returns (row with a repeated id or −1, ascending rows).

    A window of rows in which no id repeats is tracked per layer: in the flat copy of a strided top-k view the rows
    partition the experts, so the window reaches experts ÷ k rows. Layers are hashed, and runs of identical rows found,
    by the set of a row, whatever its order. Rows not `counted` (warm-up) are only checked.
    """
    top_k = expert_ids.shape[1]
    ascending_rows = 0
    for row in range(len(layer)):
        where = layer[row]
        ordinal = rows[where]
        ascending = True
        for rank in range(top_k):
            expert = expert_ids[row, rank]
            for before in range(rank):
                if expert_ids[row, before] == expert:
                    return row, ascending_rows
            if rank > 0 and expert_ids[row, rank - 1] >= expert:
                ascending = False
        ascending_rows += ascending
        if not counted[row]:
            continue
        changed = False
        row_set = np.uint64(0)
        for rank in range(top_k):
            expert = expert_ids[row, rank]
            window_start[where] = max(window_start[where], last_row[where, expert] + 1)
            last_row[where, expert] = ordinal
            counts[where, expert] += 1
            # A multiplicative mix, so that a sum over the row tells sets apart (constants of splitmix64).
            mixed = np.uint64(expert + 1) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            row_set += mixed ^ (mixed >> np.uint64(27))
            if ordinal == 0:
                first_ids[where, rank] = expert
            elif first_ids[where, rank] != expert:
                changed = True
        run[where] = run[where] + 1 if ordinal > 0 and last_set[where] == row_set else 1
        longest_run[where] = max(longest_run[where], run[where])
        last_set[where] = row_set
        hashes[where] = hashes[where] * np.uint64(1099511628211) + row_set
        changes[where] += changed
        longest_window[where] = max(longest_window[where], ordinal - window_start[where] + 1)
        rows[where] = ordinal + 1
    return -1, ascending_rows


@numba.njit(cache=True, nogil=True)
def _union_sizes(event_first_row, expert_ids, seen_in, first_event):  # type: ignore[no-untyped-def]
    """Σ over events of distinct experts; `seen_in` (experts,) remembers the event an expert was last seen in."""
    total = 0
    for event in range(len(event_first_row) - 1):
        for row in range(event_first_row[event], event_first_row[event + 1]):
            for rank in range(expert_ids.shape[1]):
                if seen_in[expert_ids[row, rank]] != first_event + event:
                    seen_in[expert_ids[row, rank]] = first_event + event
                    total += 1
    return total


@dataclass
class _PassShape:
    """Passes with the same layers: how many, which layers, and where the first was met."""

    passes: int
    layers: frozenset[int]
    step: int
    phase: str


@dataclass(frozen=True)
class NumberedBlock:
    """A block with its layers as compact indices and its records (one layer of one pass) found."""

    block: RowBlock
    layer: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int8]
    pass_kind: npt.NDArray[np.int8]
    record_first_row: npt.NDArray[np.int64]
    record_step: npt.NDArray[np.int64]


class Canonical:
    """The state of one ingest: walks the parsed blocks, checks them, numbers events, and sums up."""

    def __init__(self, path: Path, parsed: ParsedDump, user: UserMetadata) -> None:
        self.path, self.parsed, self.user = path, parsed, user
        self.top_k = parsed.top_k
        self.declared = user.num_experts or parsed.num_experts
        self.base = user.expert_id_base or 0
        if user.num_experts and parsed.num_experts and user.num_experts != parsed.num_experts:
            raise MalformedDump(
                f"{path}: you say num_experts = {user.num_experts}, the dump says {parsed.num_experts}; correct yours"
            )
        if self.declared is not None and self.declared > 65535:
            raise MalformedDump(f"{path}: {self.declared} experts per layer, at most 65,535 are supported")
        storable = parsed.largest_storable_id
        if storable is not None and self.declared is not None and self.declared - 1 > storable:
            raise MalformedDump(
                f"{path}: ids are stored in a type whose largest value is {storable}, which cannot hold id "
                f"{self.declared - 1} of {self.declared} experts: they wrapped; record with a wider type"
            )
        if user.top_k_model is not None and self.declared is not None and user.top_k_model > self.declared:
            raise MalformedDump(
                f"{path}: you say top_k_model = {user.top_k_model} of {self.declared} experts; correct it"
            )
        if self.declared is not None and self.top_k > self.declared:
            raise MalformedDump(
                f"{path}: {self.top_k} experts per token of {self.declared} experts; is k taken for E somewhere?"
            )
        self.index_of_layer = np.full(65536, -1, dtype=np.int64)
        self.layer_numbers: list[int] = []
        self.state = _LayerState(self.declared or 0)
        self.first_ids = np.zeros((0, self.top_k), dtype=np.int32)
        self.warmup_ids = np.zeros((0, self.top_k), dtype=np.int32)
        self.last_position: dict[int, int] = {}
        self.position_gaps = self.position_restarts = 0
        self.partial_passes = 0
        self.layer_marks = np.random.default_rng(0).integers(1, 2**63, 65536, dtype=np.uint64)
        self.shapes: dict[tuple[int, bool], _PassShape] = {}
        self.pruned_passes = 0
        self.ascending_rows = self.rows = self.events = self.steps = self.accesses = self.accepted = 0
        self.rows_by_phase = dict.fromkeys(PHASES, 0)
        self.requests: set[int] = set()
        self.prefilled: set[int] = set()
        self.kinds = np.zeros(len(PASS_KINDS), dtype=np.int64)
        self.weight_rows = self.descending_rows = 0
        self.weight_sums: tuple[float, float] | None = None
        self.seen_in = np.full(65536, -1, dtype=np.int64)

    # Walking

    def blocks(self) -> Iterator[NumberedBlock]:
        """Checked blocks of whole steps; the leading rows are held until it is known whether they are warm-up."""
        held: list[RowBlock] = []
        leading, leading_rows = True, 0
        for block in self.parsed.blocks:
            if not block.rows:
                continue
            block = self._based(block)
            self._find_layers(block)
            if not leading:
                yield self._checked(block, 0)
                continue
            prefix = self._leading_prefix(block)
            leading_rows += int((block.layer[:prefix] == self.layer_numbers[0]).sum())
            leading = prefix == block.rows
            if leading and leading_rows < WARMUP_ROWS:
                held.append(block)
                continue
            is_warmup = leading_rows >= WARMUP_ROWS
            for before in held:
                yield self._checked(before, before.rows if is_warmup else 0)
            held = []
            yield self._checked(block, prefix if is_warmup else 0)
        for block in held:
            yield self._checked(block, 0)

    def _based(self, block: RowBlock) -> RowBlock:
        """The block with ids counted from 0 and known to be in range."""
        ids = block.expert_ids - self.base if self.base else block.expert_ids
        lowest, highest = int(ids.min()), int(ids.max())
        limit = self.declared if self.declared is not None else 65535
        if lowest < 0 or highest >= limit:
            bad = ((ids < 0) | (ids >= limit)).any(axis=1)
            row = int(np.flatnonzero(bad)[0])
            found = int(ids[row][(ids[row] < 0) | (ids[row] >= limit)][0])
            meaning = (
                "a negative id marks a route that was not captured" if found < 0 else "ids run 0.." + str(limit - 1)
            )
            hint = (
                "if the dump counts experts from 1, say --meta expert_id_base=1"
                if found == limit
                else "leave such rows out when recording, or correct num_experts"
            )
            raise MalformedDump(
                f"{self._where(block, row)}: expert id {found + self.base}, but {meaning}; {int(bad.sum())} rows of "
                f"this block are affected; {hint}"
            )
        return block if ids is block.expert_ids else _with_ids(block, ids)

    def _where(self, block: RowBlock, row: int) -> str:
        position = f", position {int(block.position[row])}" if block.position is not None else ""
        return f"{self.path}, step {int(block.step[row])}, layer {int(block.layer[row])}{position}"

    def _find_layers(self, block: RowBlock) -> None:
        if block.layer.min() < 0 or block.layer.max() > 65535:
            row = int(np.flatnonzero((block.layer < 0) | (block.layer > 65535))[0])
            raise MalformedDump(f"{self._where(block, row)}: wanted a layer number of 0..65535")
        for number in np.unique(block.layer[self.index_of_layer[block.layer] < 0]).tolist():
            self.index_of_layer[number] = len(self.layer_numbers)
            self.layer_numbers.append(number)
        num_experts = self.declared or int(block.expert_ids.max()) + 1
        layers = len(self.layer_numbers)
        if layers * max(num_experts, self.state.num_experts) > MAX_OBJECTS:
            raise MalformedDump(
                f"{self.path}: {layers} layers × {num_experts} experts; at most {MAX_OBJECTS:,} are supported. "
                "Is a column mistaken for the layer or the expert?"
            )
        self.state.grow(layers, num_experts)
        if layers > len(self.first_ids):
            self.first_ids = _padded(self.first_ids, (layers, self.top_k), -1)

    def _leading_prefix(self, block: RowBlock) -> int:
        """Rows of the leading steps whose every row equals the first row of its layer in the dump."""
        layer = self.index_of_layer[block.layer]
        if len(self.layer_numbers) > len(self.warmup_ids):
            self.warmup_ids = _padded(self.warmup_ids, (len(self.layer_numbers), self.top_k), -1)
        unseen = self.warmup_ids[layer, 0] < 0
        for row in np.flatnonzero(unseen)[np.unique(layer[unseen], return_index=True)[1]].tolist():
            self.warmup_ids[layer[row]] = block.expert_ids[row]
        differs = (block.expert_ids != self.warmup_ids[layer]).any(axis=1)
        if not differs.any():
            return block.rows
        first = int(np.flatnonzero(differs)[0])
        return int(np.searchsorted(block.step, block.step[first]))

    def _checked(self, block: RowBlock, warmup_rows: int) -> NumberedBlock:
        layer = self.index_of_layer[block.layer]
        phase = block.phase
        if self.user.phase is not None:
            phase = np.where(phase == PHASE_CODES["unknown"], PHASE_CODES[self.user.phase], phase).astype(np.int8)
        if warmup_rows:
            phase = phase.copy()
            phase[:warmup_rows] = PHASE_CODES["warmup"]
        # A dump may say itself what was warm-up.
        counted = phase != PHASE_CODES["warmup"]
        state = self.state
        repeated, ascending = _scan(
            layer, block.expert_ids, counted, state.last_row, state.counts, state.rows, state.window_start,
            state.longest_window, state.changes, state.hashes, state.last_set, state.run, state.longest_run,
            self.first_ids,
        )  # fmt: skip
        if repeated >= 0:
            raise self._repeated(block, repeated)
        self.ascending_rows += ascending
        self._check_positions(block, layer, counted)
        first_row, step, kinds = self._records(block, phase)
        self._look_at_weights(block, counted)
        numbered = NumberedBlock(block, layer, phase, kinds, first_row, step)
        self._sum_up(numbered)
        return numbered

    def _repeated(self, block: RowBlock, row: int) -> MalformedDump:
        ids = block.expert_ids[row]
        if not ids.any():
            same = (block.layer == block.layer[row]) & ~block.expert_ids.any(axis=1)
            return MalformedDump(
                f"{self._where(block, row)}: all ids are 0 ({int(same.sum())} such rows of this layer in the block): "
                "an unwritten buffer, not expert 0; the layer is dense or was not captured, leave it out when recording"
            )
        return MalformedDump(
            f"{self._where(block, row)}: an id stands twice in {ids.tolist()}; a router picks {self.top_k} different "
            "experts. Are these counts, or is a fused shared expert or padding among the ids?"
        )

    def _records(
        self, block: RowBlock, phase: npt.NDArray[np.int8]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """First rows and steps of the block's records, pass kinds of its rows; checks that passes are whole."""
        changes = np.zeros(block.rows, dtype=bool)
        changes[0] = True
        for values in (block.step, block.pass_in_step, block.layer, phase, block.pass_kind):
            if values is not None:
                changes[1:] |= values[1:] != values[:-1]
        first_row = np.flatnonzero(changes)
        record_rows = np.diff(np.append(first_row, block.rows))
        step = block.step[first_row]
        passes = block.pass_in_step[first_row]
        if record_rows.max() > 65536:
            row = int(first_row[record_rows.argmax()])
            raise MalformedDump(f"{self._where(block, row)}: {record_rows.max()} rows in one event, at most 65,536")
        if block.pass_kind is not None:
            kinds = block.pass_kind[first_row]
        elif self.parsed.speculative:
            kinds, wrong = type_passes(step, passes, record_rows)
            if wrong is not None:
                raise MalformedDump(
                    f"{self.path}, step {wrong} (counted from 0): its passes fit no rule: wanted one pass of k or 2k "
                    "ids in every layer, or a failed pass and a fallback of k; is a record missing or duplicated?"
                )
        else:
            kinds = np.zeros(len(first_row), dtype=np.int8)
        self._check_shape(block, first_row, record_rows, phase, kinds)
        return first_row, step, np.repeat(kinds, record_rows)

    def _check_shape(
        self,
        block: RowBlock,
        first_row: npt.NDArray[np.int64],
        record_rows: npt.NDArray[np.int64],
        phase: npt.NDArray[np.int8],
        kinds: npt.NDArray[np.int8],
    ) -> None:
        """Every pass has the same rows in each layer, the last one aside; its layers are remembered for the end."""
        # Repetitions layer by layer interleave two passes; each is looked at whole.
        order = np.lexsort((block.pass_in_step[first_row], block.step[first_row]))
        first_row, record_rows, kinds = first_row[order], record_rows[order], kinds[order]
        pass_key = np.stack([block.step[first_row], block.pass_in_step[first_row], phase[first_row]])
        begins = np.ones(len(first_row), dtype=bool)
        begins[1:] = (pass_key[:, 1:] != pass_key[:, :-1]).any(axis=0)
        starts = np.flatnonzero(begins)
        lengths = np.diff(np.append(starts, len(first_row)))
        layer = block.layer[first_row]
        back = ~begins[1:] & (np.diff(layer) <= 0)
        if back.any():
            row = int(first_row[np.flatnonzero(back)[0] + 1])
            raise MalformedDump(
                f"{self._where(block, row)}: the layer goes back inside a pass; records of one pass must stand "
                "together, in ascending layers: are two streams written into one file?"
            )
        # A step of two passes holds a speculation that failed; either may have been cut short.
        failed = np.isin(kinds, (PASS_KIND_CODES["spec_rejected"], PASS_KIND_CODES["spec_fallback"]))
        if self.parsed.speculative:
            failed = pass_key[1] > 0
        repeated = np.isin(pass_key[0], pass_key[0][failed])
        phase_of_pass = phase[first_row[starts]].astype(np.uint64)
        marks = np.add.reduceat(self.layer_marks[layer], starts) * np.uint64(8) + phase_of_pass
        for may_be_partial in (False, True):
            chosen = np.flatnonzero(repeated[starts] == may_be_partial)
            names, where, counts = np.unique(marks[chosen], return_index=True, return_counts=True)
            for mark, at, passes in zip(names.tolist(), chosen[where].tolist(), counts.tolist(), strict=True):
                known = self.shapes.get((mark, may_be_partial))
                if known is not None:
                    known.passes += passes
                    continue
                begin, end = starts[at], starts[at] + lengths[at]
                self.shapes[mark, may_be_partial] = _PassShape(
                    passes,
                    frozenset(layer[begin:end].tolist()),
                    int(block.step[first_row[begin]]),
                    PHASES[int(phase[first_row[begin]])],
                )
        ragged = record_rows != np.repeat(record_rows[starts], lengths)
        if ragged.any():
            at = np.flatnonzero(ragged)
            last = np.isin(at, starts + lengths - 1) & (record_rows[at] < record_rows[np.maximum(at - 1, 0)])
            multi = phase[first_row[at]] != PHASE_CODES["decode"]
            if not (last & multi).all():
                record = int(at[~(last & multi)][0])
                row = int(first_row[record])
                pass_start = int(starts[np.searchsorted(starts, record, side="right") - 1])
                raise MalformedDump(
                    f"{self._where(block, row)}: {int(record_rows[record])} rows, but {int(record_rows[pass_start])} "
                    "in the first layer of the pass; only the last layer may have fewer (output tokens of a prefill)"
                )
            self.pruned_passes += len(at)

    def _look_at_weights(self, block: RowBlock, counted: npt.NDArray[np.bool_]) -> None:
        if block.weights is None:
            return
        weights = block.weights[counted & ~np.isnan(block.weights).any(axis=1)]
        if not len(weights):
            return
        self.weight_rows += len(weights)
        self.descending_rows += int((np.diff(weights, axis=1) <= 0).all(axis=1).sum())
        sums = weights.sum(axis=1)
        low, high = float(sums.min()), float(sums.max())
        before = self.weight_sums or (low, high)
        self.weight_sums = (min(before[0], low), max(before[1], high))

    def _sum_up(self, numbered: NumberedBlock) -> None:
        block, phase = numbered.block, numbered.phase
        bounds = np.append(numbered.record_first_row, block.rows)
        self.accesses += int(_union_sizes(bounds, block.expert_ids, self.seen_in, self.events))
        self.rows += block.rows
        for code, rows in enumerate(np.bincount(phase, minlength=len(PHASES)).tolist()):
            self.rows_by_phase[PHASES[code]] += rows
        self.kinds += np.bincount(numbered.pass_kind[numbered.record_first_row], minlength=len(PASS_KINDS))
        self.requests |= _distinct(block.request)
        prefill, warmup = phase == PHASE_CODES["prefill"], phase == PHASE_CODES["warmup"]
        self.prefilled |= _distinct(block.request[prefill])
        decoded = ~prefill & ~warmup
        accepted = decoded & (numbered.pass_kind == PASS_KIND_CODES["spec_accept"])
        self.accepted += sum(_distinct_pairs(block.step[rows], block.request[rows]) for rows in (decoded, accepted))

    # Writing

    def number(self, numbered: NumberedBlock) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(event_id, row_in_event) of the block's rows; counts events and steps on."""
        first_row, rows = numbered.record_first_row, numbered.block.rows
        lengths = np.diff(np.append(first_row, rows))
        event = self.events + np.repeat(np.arange(len(first_row)), lengths)
        row_in_event = np.arange(rows) - np.repeat(first_row, lengths)
        self.events += len(first_row)
        self.steps = int(numbered.block.step[-1]) + 1
        if self.events >= 2**32:
            raise MalformedDump(f"{self.path}: more than 2^32 events; split the dump")
        return event, row_in_event

    def table(self, numbered: NumberedBlock, schema: pa.Schema) -> pa.Table:
        """The block as rows of the canonical trace."""
        block = numbered.block
        event, row_in_event = self.number(numbered)
        if self.parsed.layers_are_ordinals and self.user.moe_layer_ids is not None:
            layer_ids = np.asarray(self._layer_ids())[block.layer]
        else:
            layer_ids = block.layer
        nothing = pa.nulls(block.rows, pa.uint32())
        position = nothing if block.position is None else pa.array(_checked_u32(self.path, block.position))
        weights: pa.Array = pa.nulls(block.rows, schema.field("router_weights").type)
        if block.weights is not None:
            if (np.abs(block.weights) > LARGEST_WEIGHT).any():
                row = int(np.flatnonzero((np.abs(block.weights) > LARGEST_WEIGHT).any(axis=1))[0])
                raise MalformedDump(f"{self._where(block, row)}: a weight beyond 16-bit floats ({LARGEST_WEIGHT})")
            flat = pa.array(block.weights.reshape(-1).astype(np.float16), mask=np.isnan(block.weights.reshape(-1)))
            unknown = np.isnan(block.weights).all(axis=1)
            weights = pa.FixedSizeListArray.from_arrays(flat, type=weights.type, mask=pa.array(unknown))
        return pa.Table.from_arrays(
            [
                pa.array(event.astype(np.uint32)),
                pa.array(row_in_event.astype(np.uint16)),
                pa.array(block.step.astype(np.uint32)),
                pa.array(_checked_u32(self.path, block.request)),
                position,
                pa.DictionaryArray.from_arrays(pa.array(numbered.phase), list(PHASES)),
                pa.DictionaryArray.from_arrays(pa.array(numbered.pass_kind), list(PASS_KINDS)),
                pa.array(layer_ids.astype(np.uint16)),
                pa.FixedSizeListArray.from_arrays(
                    pa.array(block.expert_ids.reshape(-1).astype(np.uint16)), type=schema.field("expert_ids").type
                ),
                weights,
                pa.nulls(block.rows, schema.field("predicted_expert_ids").type)
                if block.predicted is None
                else block.predicted,
            ],
            schema=schema,
        )

    def _layer_ids(self) -> list[int]:
        """The model's numbers of the dump's layers, ascending."""
        said = self.user.moe_layer_ids
        found = sorted(self.layer_numbers)
        if said is None:
            return found
        if self.parsed.layers_are_ordinals:
            if len(said) != len(found):
                raise MalformedDump(
                    f"{self.path}: you say {len(said)} moe_layer_ids, the dump has {len(found)} layers; correct them"
                )
            return said
        if said != found:
            raise MalformedDump(f"{self.path}: you say moe_layer_ids {said}, the dump records {found}; correct them")
        return found

    # Summing up

    def metadata(
        self, source: tuple[Path, str], trace_id: str, supersedes: str | None, source_bytes: int
    ) -> TraceMetadata:
        """The metadata of the whole dump; all checks that need its end run here.

        Raises:
            MalformedDump: a check fails.
        """
        if not self.rows:
            raise MalformedDump(f"{self.path}: a header and no route: was the recorder stopped before it wrote any?")
        user, parsed = self.user, self.parsed
        layer_ids = self._layer_ids()
        checks = self._checks()
        hidden = user.hidden_layers or parsed.hidden_layers
        if hidden is not None and layer_ids[-1] >= hidden:
            raise MalformedDump(
                f"{self.path}: layer {layer_ids[-1]}, but the model has {hidden} layers (0..{hidden - 1})"
            )
        if parsed.layers_are_ordinals and user.moe_layer_ids is None and hidden not in (None, len(layer_ids)):
            raise MalformedDump(
                f"{self.path}: {len(layer_ids)} layer lists without numbers, but the model has {hidden} layers; "
                "which are they? say --meta moe_layer_ids=[…]"
            )
        if not parsed.layers_are_ordinals:
            layer_base = "recorded"
        elif user.moe_layer_ids is not None or hidden == len(layer_ids):
            # With as many lists as hidden layers there is only one way to number them.
            layer_base = "declared"
        else:
            layer_base = "assumed_from_0"
        path, sha256 = source
        try:
            return TraceMetadata(
                schema_version=SCHEMA_VERSION,
                trace_id=trace_id,
                supersedes=supersedes,
                model=user.model or _text(parsed.model),
                engine=user.engine or _text(parsed.engine),
                domain=user.domain or _text(parsed.domain),
                capture_method=user.capture_method or _text(parsed.capture_method),
                hidden_layers=hidden,
                moe_layer_ids=layer_ids,
                layer_base=layer_base,
                experts_per_layer=[self._num_experts()] * len(layer_ids),
                num_experts_source="declared" if self.declared is not None else "observed",
                top_k_model=user.top_k_model or parsed.top_k_model,
                top_k_observed=self.top_k,
                expert_bytes=self._expert_bytes(layer_ids),
                id_space=user.id_space or parsed.id_space,
                weight_kind=user.weight_kind or parsed.weight_kind if self.weight_rows else "absent",
                rank_known=self._rank_known(),
                pass_boundaries=parsed.pass_boundaries,
                source=Source(
                    file=_text(path.name),
                    folder=_text(str(path.absolute().parent)),
                    format=parsed.format,
                    bytes=source_bytes,
                    sha256=sha256,
                ),
                user_metadata=user,
                parser_version=PARSER_VERSION,
                counts=Counts(
                    rows=self.rows,
                    events=self.events,
                    steps=self.steps,
                    requests=len(self.requests),
                    selections=self.rows * self.top_k,
                    accesses=self.accesses,
                    accepted_tokens=self.accepted + len(self.prefilled),
                    rows_by_phase=self.rows_by_phase,
                    dropped_rows=parsed.dropped_rows,
                ),
                checks=checks,
                engine_observations=parsed.observations,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise MalformedDump(
                f"{path}: {first['msg'].removeprefix('Value error, ')}; correct what you say of it"
            ) from None

    def _num_experts(self) -> int:
        if self.declared is not None:
            return self.declared
        return int(np.flatnonzero(self.state.counts.any(axis=0))[-1]) + 1 if self.state.counts.any() else self.top_k

    def _rank_known(self) -> bool:
        if self.parsed.rank_known is not None:
            return self.parsed.rank_known or self.top_k == 1
        return self.top_k == 1 or self.ascending_rows < self.rows

    def _expert_bytes(self, layer_ids: list[int]) -> list[int] | list[list[int]] | None:
        said = self.user.expert_bytes
        if isinstance(said, int):
            return [said] * len(layer_ids)
        if said is not None:
            return said
        sizes = self.parsed.layer_expert_bytes
        if isinstance(sizes, int):
            return [sizes] * len(layer_ids)
        if sizes is None or any(layer not in sizes for layer in layer_ids):
            return None
        return [sizes[layer] for layer in layer_ids]  # type: ignore[return-value]

    def _checks(self) -> list[CheckRecord]:
        self._check_layers_present()
        checks = [
            CheckRecord(
                name="expert ids in range",
                outcome="ok" if self.declared is not None else "not_applicable",
                wanted="0 ≤ id < num_experts",
                found=f"ids 0..{self._num_experts() - 1} at most"
                if self.declared is not None
                else f"the number of experts is not declared; ids run 0..{self._num_experts() - 1}",
            ),
            CheckRecord(
                name="no expert twice in a row",
                outcome="ok",
                wanted=f"{self.top_k} different ids per token and layer",
                found=f"{self.rows} rows looked at",
            ),
            self._partition_check(),
            self._constant_check(),
            self._identical_check(),
            self._warmup_check(),
            CheckRecord(
                name="every pass has every layer",
                outcome="warn" if self.pruned_passes else "ok",
                wanted=f"{len(self.layer_numbers)} layers with equally many rows in every pass",
                found=f"{self.pruned_passes} passes with fewer rows in the last layer (output tokens of a prefill)"
                if self.pruned_passes
                else "as wanted",
            ),
            self._weight_check(),
            CheckRecord(
                name="router order kept",
                outcome="ok" if self._rank_known() else "warn",
                wanted="ids of a row in router order",
                found="ids are not sorted"
                if self._rank_known()
                else "the layout does not keep router order"
                if self.parsed.rank_known is False
                else f"all {self.rows} rows have ascending ids, so router order is lost",
            ),
            self._skew_check(),
            self._top_k_check(),
            self._frozen_check(),
            self._position_check(),
        ]
        if self.parsed.largest_storable_id == 255 and self.declared == 256:
            filled = int(self.state.counts[:, 255].sum())
            checks.append(
                CheckRecord(
                    name="255 is an expert",
                    outcome="warn" if filled else "ok",
                    wanted="id 255 of 256 experts in 8 bits is an expert, not a fill value of −1",
                    found=f"{filled} selections of id 255; the dump cannot tell them from −1",
                )
            )
        dropped = sum(self.parsed.dropped_rows.values())
        checks.append(
            CheckRecord(
                name="rows dropped",
                outcome="warn" if dropped else "ok",
                wanted="every route of the dump is in the trace",
                found="; ".join(f"{rows} rows: {reason}" for reason, rows in self.parsed.dropped_rows.items())
                or "none",
            )
        )
        if self.parsed.missing_positions:
            missing = "; ".join(f"{count}: {reason}" for reason, count in self.parsed.missing_positions.items())
            checks.append(
                CheckRecord(
                    name="positions captured",
                    outcome="warn",
                    wanted="routes of every token position",
                    found=f"token positions that the dump holds no routes of: {missing}",
                )
            )
        checks += self.parsed.checks
        if self.parsed.speculative:
            found = ", ".join(f"{count} {kind}" for kind, count in zip(PASS_KINDS, self.kinds.tolist(), strict=True))
            checks.append(
                CheckRecord(
                    name="speculation typed",
                    outcome="ok",
                    wanted="every pass is normal, accepted, rejected or a fallback by width and repetition",
                    found=f"events: {found}; accepted tokens: {self.accepted}; {self.partial_passes} partial passes",
                )
            )
            mixed = np.count_nonzero(self.kinds) > 1
            doubtful = self.parsed.top_k_is_inferred and not mixed
            checks.append(
                CheckRecord(
                    name="k of the records",
                    outcome="warn" if doubtful else "ok",
                    wanted="k is said (top_k_model), or records of k and of 2k ids show it",
                    found=f"k = {self.top_k} is inferred, all records are as wide; if they are pairs of tokens, say "
                    f"--meta top_k_model={self.top_k // 2}"
                    if doubtful
                    else f"k = {self.top_k}",
                )
            )
        return checks

    def _check_layers_present(self) -> None:
        everything = sorted(self.layer_numbers)
        for (_, may_be_partial), shape in self.shapes.items():
            missing = [layer for layer in everything if layer not in shape.layers]
            if not missing:
                continue
            if missing == everything[-1:] and shape.phase == "prefill":
                self.pruned_passes += shape.passes
                continue
            if may_be_partial and missing in (everything[-len(missing) :], everything[: len(missing)]):
                self.partial_passes += shape.passes
                continue
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            at_end = shape.step == self.steps - 1
            hint = "it is the last step: the dump is truncated" if at_end else "was that layer not captured?"
            raise MalformedDump(
                f"{self.path}, step {shape.step}: layers {missing[:5]}{more} are missing, but other passes have them; "
                f"{hint}"
            )

    def _check_positions(self, block: RowBlock, layer: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]) -> None:
        """Positions of the first layer's rows, per request: a repeat is refused, gaps and restarts are counted."""
        if block.position is None:
            return
        rows = np.flatnonzero((layer == 0) & counted)
        rows = rows[np.argsort(block.request[rows], kind="stable")]
        request, position = block.request[rows], block.position[rows]
        for begin, end in itertools.pairwise([*np.flatnonzero(np.diff(request, prepend=-1)).tolist(), len(rows)]):
            one = int(request[begin])
            before = self.last_position.get(one, int(position[begin]) - 1)
            steps = np.diff(position[begin:end], prepend=before)
            if not steps.all():
                row = int(rows[begin + int(np.flatnonzero(steps == 0)[0])])
                raise MalformedDump(
                    f"{self._where(block, row)}: the same position of the same request stands twice in a row; a token "
                    "recorded twice counts twice: remove the repetition"
                )
            self.position_gaps += int(np.count_nonzero(steps > 1))
            self.position_restarts += int(np.count_nonzero(steps < 0))
            self.last_position[one] = int(position[end - 1])

    def _partition_check(self) -> CheckRecord:
        num_experts, rows = self._num_experts(), int(self.state.rows.sum())
        window, limit = num_experts // self.top_k, PARTITION_CHANCE
        for shorter in range(2, window):
            if rows * _chance_of_partition(num_experts, self.top_k, shorter) < SHORT_WINDOW_CHANCE:
                window, limit = shorter, SHORT_WINDOW_CHANCE
                break
        expected = rows * _chance_of_partition(num_experts, self.top_k, window)
        longest = int(self.state.longest_window.max())
        wanted = f"no {window} rows of a layer in a row without a repeated id"
        if window < 2 or expected > limit:
            found = f"too few experts or too many rows to tell from chance ({expected:.2g} such windows expected)"
            return CheckRecord(name="no strided-view copy", outcome="not_applicable", wanted=wanted, found=found)
        if longest >= window:
            layer = self.layer_numbers[int(self.state.longest_window.argmax())]
            raise MalformedDump(
                f"{self.path}, layer {layer}: {longest} rows in a row share no id, as if they partition the "
                f"{num_experts} experts (a run of {window} is looked for, {expected:.2g} expected by chance): the flat "
                "copy of a strided top-k view, not routes; copy the view with its row stride when recording"
            )
        return CheckRecord(name="no strided-view copy", outcome="ok", wanted=wanted, found=f"at most {longest} rows")

    def _constant_check(self) -> CheckRecord:
        constant = (self.state.changes == 0) & (self.state.rows >= CONSTANT_ROWS)
        if self.rows_by_phase["warmup"] == self.rows and self.rows:
            constant = np.ones(len(self.layer_numbers), dtype=bool)
        if constant.any():
            layers = [self.layer_numbers[index] for index in np.flatnonzero(constant)[:5].tolist()]
            raise MalformedDump(
                f"{self.path}: layers {layers}{' and more' if constant.sum() > 5 else ''} choose the same experts in "
                "every row: an unwritten buffer or a warm-up batch, not routes; record again while the model runs"
            )
        return CheckRecord(
            name="no constant layer",
            outcome="ok" if self.state.rows.max() >= CONSTANT_ROWS else "not_applicable",
            wanted=f"a layer changes within {CONSTANT_ROWS} rows",
            found=f"{int(self.state.rows.max())} rows per layer",
        )

    def _identical_check(self) -> CheckRecord:
        groups: dict[tuple[int, int], list[int]] = {}
        for index, number in enumerate(self.layer_numbers):
            key = (int(self.state.hashes[index]), int(self.state.rows[index]))
            groups.setdefault(key, []).append(number)
        copies = [sorted(numbers) for numbers in groups.values() if len(numbers) > 1]
        wanted = "no two layers with the same routes"
        if not copies:
            return CheckRecord(name="layers differ", outcome="ok", wanted=wanted, found="as wanted")
        rows = max(key[1] for key, numbers in groups.items() if len(numbers) > 1)
        found = f"layers {copies[0][:5]} are equal over {rows} rows"
        if rows >= IDENTICAL_ROWS and not self.user.tied_routing:
            raise MalformedDump(
                f"{self.path}: {found}: one is a copy of the other; if the model really ties its routers, say "
                "--meta tied_routing=true"
            )
        return CheckRecord(name="layers differ", outcome="warn", wanted=wanted, found=found)

    def _warmup_check(self) -> CheckRecord:
        rows = self.rows_by_phase["warmup"]
        return CheckRecord(
            name="no warm-up rows",
            outcome="warn" if rows else "ok",
            wanted=f"fewer than {WARMUP_ROWS} identical rows at the start",
            found=f"{rows} leading rows repeat one token in every layer: marked warmup, never replayed"
            if rows
            else "as wanted",
        )

    def _weight_check(self) -> CheckRecord:
        wanted = "weights fall along a row, as router order does"
        if not self.weight_rows or self.weight_sums is None:
            return CheckRecord(name="weights agree", outcome="not_applicable", wanted=wanted, found="no weights")
        low, high = self.weight_sums
        found = f"{self.descending_rows} of {self.weight_rows} rows fall; sums {low:.4g}..{high:.4g}"
        agrees = self.descending_rows == self.weight_rows
        return CheckRecord(name="weights agree", outcome="ok" if agrees else "warn", wanted=wanted, found=found)

    def _top_k_check(self) -> CheckRecord:
        model = self.user.top_k_model or self.parsed.top_k_model
        differs = model is not None and model != self.top_k
        return CheckRecord(
            name="k is the model's",
            outcome="warn" if differs else "ok" if model is not None else "not_applicable",
            wanted="as many experts per token as the model's configuration says",
            found=f"{self.top_k} in the dump, {model if model is not None else 'unknown'} in the model"
            + ("; an override of the engine, padding, or a fused shared expert?" if differs else ""),
        )

    def _frozen_check(self) -> CheckRecord:
        runs = self.state.longest_run
        everywhere, worst = int(runs.min()), int(runs.argmax())
        frozen = everywhere >= FROZEN_ROWS or int(runs[worst]) >= FROZEN_LAYER_ROWS
        return CheckRecord(
            name="no frozen rows",
            outcome="warn" if frozen else "ok",
            wanted=f"fewer than {FROZEN_ROWS} identical rows in a row in all layers, {FROZEN_LAYER_ROWS} in one",
            found=f"{everywhere} in every layer, {int(runs[worst])} in layer {self.layer_numbers[worst]}"
            + ("; padding, or a graph replayed without new routes?" if frozen else ""),
        )

    def _position_check(self) -> CheckRecord:
        wanted = "token positions of a request go up by one"
        if not self.last_position:
            return CheckRecord(
                name="positions continuous", outcome="not_applicable", wanted=wanted, found="none recorded"
            )
        gaps, restarts = self.position_gaps, self.position_restarts
        return CheckRecord(
            name="positions continuous",
            outcome="warn" if gaps or restarts else "ok",
            wanted=wanted,
            found=f"{gaps} gaps, {restarts} places where positions go back"
            + ("; several sequences in one request, lost or repeated tokens?" if gaps or restarts else ""),
        )

    def _skew_check(self) -> CheckRecord:
        carried = np.sort(self.state.counts, axis=1)[:, -self.top_k :].sum(axis=1)
        share = carried / np.maximum(self.state.rows * self.top_k, 1)
        worst = int(share.argmax())
        found = f"at most {share[worst]:.1%} of a layer's selections on {self.top_k} experts"
        return CheckRecord(
            name="no routing collapse",
            outcome="warn" if share[worst] > COLLAPSE_SHARE else "ok",
            wanted=f"a layer's {self.top_k} most selected experts carry at most {COLLAPSE_SHARE:.0%} of its selections",
            found=f"{found} (layer {self.layer_numbers[worst]})",
        )


def _text(value: str | None) -> str | None:
    # File names and JSON may hold what is no text; metadata are UTF-8.
    return None if value is None else value.encode("utf-8", "backslashreplace").decode()


def _distinct(values: npt.NDArray[np.int64]) -> set[int]:
    # Most blocks hold one request; sorting them to find that out would cost more than parsing them.
    if len(values) and values.min() == values.max():
        return {int(values[0])}
    return set(np.unique(values).tolist())


def _distinct_pairs(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> int:
    """How many different pairs there are; `ascending` is sorted."""
    if len(_distinct(values)) <= 1:
        return int(np.count_nonzero(np.diff(ascending))) + 1 if len(ascending) else 0
    return len(np.unique(np.stack([ascending, values], axis=1), axis=0))


def _chance_of_partition(num_experts: int, top_k: int, rows: int) -> float:
    """Probability that `rows` independent uniform k-subsets of the experts are disjoint."""
    logarithm = 0.0
    for row in range(1, rows):
        logarithm += _log_choose(num_experts - row * top_k, top_k) - _log_choose(num_experts, top_k)
    return math.exp(logarithm)


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def _with_ids(block: RowBlock, ids: npt.NDArray[np.int32]) -> RowBlock:
    return replace(block, expert_ids=ids)


def _checked_u32(path: Path, values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    if values.min() < 0 or values.max() >= 2**32:
        raise MalformedDump(
            f"{path}: a request or position of {int(values.min())}..{int(values.max())}, wanted 0..2^32−1"
        )
    return values.astype(np.uint32)
