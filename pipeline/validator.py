"""Looks at a raw dump's rows block by block, and judges every check of `dump_checks` at their end.

In: blocks of rows, as `canonical` sees them. Out: one verdict per check, in order, or a refusal that names its check.
Reads no file and repairs nothing.

Letters: R rows of a block, K experts per row, L layers seen so far, E experts per layer.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from pipeline.dump_checks import (
    CHECKS,
    COLLAPSE_SHARE,
    COMPARED_SETS,
    CONSTANT_ROWS,
    COPY_SHARE,
    COPY_SHIFT,
    FROZEN_LAYER_ROWS,
    FROZEN_LAYERS,
    FROZEN_ROWS,
    FROZEN_ROWS_NAMED,
    FROZEN_ROWS_REFUSED,
    FROZEN_SETS,
    IDENTICAL_ROWS,
    IDENTITY,
    ORDER,
    PADDING_CHANCE,
    PADDING_TOKENS,
    PARTITION_CHANCE,
    REPEATED_PASS_ROWS,
    REPEATED_RUNS,
    SHORT_WINDOW_CHANCE,
    SIMILAR_SHARE,
    SPARE_SELECTIONS,
    SPARE_SHARE,
    SUM_TOLERANCE,
    Check,
)
from pipeline.dumps.blocks import MAX_LAYERS, MalformedDump, ParsedDump, RefusedDump, RowBlock
from replayer.trace import MAX_OBJECTS
from schemas.columns import PASS_KINDS, PHASES
from schemas.trace import (
    MAX_TOP_K,
    PASS_KIND_CODES,
    PHASE_CODES,
    CheckOutcome,
    CheckRecord,
    CheckVerdict,
    StoredOutcome,
    UserMetadata,
)


def refused_unread(error: MalformedDump | RefusedDump) -> list[CheckVerdict]:
    """The verdicts of a dump that no parser took."""
    return [_verdict(check, "refuse" if check.name == IDENTITY else "not_reached", str(error)) for check in CHECKS]


def _verdict(check: Check, outcome: CheckOutcome, found: str) -> CheckVerdict:
    found = "" if outcome == "not_reached" else found
    return CheckVerdict(name=check.name, outcome=outcome, wanted=check.wanted, found=found)


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
    longest_run, first_ids, row_sets,
):  # fmt: skip
    """One pass over a block's rows in recorded order; returns (row with a repeated id or −1, ascending rows).

    A window of rows in which no id repeats is tracked per layer: in the flat copy of a strided top-k view the rows
    partition the experts, so the window reaches experts ÷ k rows. Layers are hashed, and runs of identical rows found,
    by the set of a row, whatever its order; the hash of each is left in `row_sets`. Rows not `counted` (warm-up) are
    only checked.
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
        row_sets[row] = row_set
        hashes[where] = hashes[where] * np.uint64(1099511628211) + row_set
        changes[where] += changed
        longest_window[where] = max(longest_window[where], ordinal - window_start[where] + 1)
        rows[where] = ordinal + 1
    return -1, ascending_rows


@numba.njit(cache=True, nogil=True)
def _sum_tokens(token, layer, row_sets, looked_at, marks, digests, rows, first_row, by_layer):  # type: ignore[no-untyped-def]
    """Sums the rows of a block up by token: a digest over its layers, its rows, its first row; and fills `by_layer`.

    token (R,); digests, rows, first_row (T,); by_layer (T', L), the sets of the first tokens layer by layer, 0 where
    there is none.
    """
    for row in range(len(token)):
        if not looked_at[row]:
            continue
        one, where = token[row], layer[row]
        if rows[one] == 0:
            first_row[one] = row
        rows[one] += 1
        digests[one] += row_sets[row] * marks[where]
        if one < len(by_layer):
            by_layer[one, where] = row_sets[row]


@numba.njit(cache=True, nogil=True)
def _closest_layers(by_layer, least_rows, furthest, most_share):  # type: ignore[no-untyped-def]
    """The pair of layers whose sets agree in the largest share of rows: (layer, layer, shift, rows, unequal rows).

    Row t of the first is held against row t + shift of the second, where either has just changed: rows that stay as
    they are say nothing. Rows are −1 where no pair differs in at most `most_share` of at least `least_rows` rows.
    """
    tokens, layers = by_layer.shape
    found = (-1, -1, 0, -1, 0)
    best = 2.0
    limit = max(1, int(tokens * most_share))
    for one in range(layers):
        for other in range(one + 1, layers):
            for shift in range(-furthest, furthest + 1):
                rows = unequal = 0
                for token in range(max(1, 1 - shift), min(tokens, tokens - shift)):
                    mine, theirs = by_layer[token, one], by_layer[token + shift, other]
                    if mine == 0 or theirs == 0:
                        continue
                    stays = mine == by_layer[token - 1, one] and theirs == by_layer[token + shift - 1, other]
                    if stays:
                        continue
                    rows += 1
                    if mine != theirs:
                        unequal += 1
                        if unequal > limit:
                            break
                if rows < least_rows or unequal > max(1, int(rows * most_share)):
                    continue
                share = unequal / rows
                if share < best:
                    best = share
                    found = (one, other, shift, rows, unequal)
    return found


@dataclass
class _PassShape:
    """Passes with the same layers: how many, which layers, and where the first was met."""

    passes: int
    layers: frozenset[int]
    step: int
    phase: str


_FAILED_KINDS = (PASS_KIND_CODES["spec_rejected"], PASS_KIND_CODES["spec_fallback"])


@dataclass(frozen=True)
class Records:
    """The records of a block: one layer of one pass each, in recorded order.

    first_row (records,) in the block; rows (records,) of each; step (records,).
    """

    first_row: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """Which token each row of a block is: the n-th row of every record of a pass is the same token.

    count: tokens of the block. record, in_record, token (R,): the row's record, its place in it, and its token.
    is_whole (R,) is false for rows of a record that has fewer than others of its pass: nobody knows whose they are.
    """

    count: int
    record: npt.NDArray[np.int64]
    in_record: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    is_whole: npt.NDArray[np.bool_]


def _tokens_of(block: RowBlock, records: Records, phase: npt.NDArray[np.int8]) -> Tokens:
    # A step that mixes prefill and decode has a record of each in every layer.
    in_step = block.pass_in_step[records.first_row].astype(np.int64)
    key = records.step * (int(in_step.max()) + 1) + in_step
    key_and_phase = key * len(PHASES) + phase[records.first_row]
    if (key[1:] >= key[:-1]).all():
        pass_of_record = np.cumsum(np.diff(key_and_phase, prepend=key_and_phase[0]) != 0)
    else:
        # Speculation may be repeated layer by layer, which interleaves two passes.
        _, pass_of_record = np.unique(key_and_phase, return_inverse=True)
    width = np.zeros(int(pass_of_record.max()) + 1, dtype=np.int64)
    np.maximum.at(width, pass_of_record, records.rows)
    record = np.repeat(np.arange(len(records.rows)), records.rows)
    in_record = np.arange(block.rows) - records.first_row[record]
    token = (np.cumsum(width) - width)[pass_of_record[record]] + in_record
    is_whole = (records.rows == width[pass_of_record])[record]
    return Tokens(int(width.sum()), record, in_record, token, is_whole)


@dataclass
class _Repeats:
    """Runs of tokens that choose the same experts in every layer as the token before of the same request."""

    longest: int = 1
    longest_step: int = 0
    longest_request: int = 0
    finished: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(FROZEN_ROWS_REFUSED + 1, dtype=np.int64))
    """Runs that ended, by their length; the last entry counts longer ones, too."""
    last: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By request: digest of its last token, length of the run that it ends, and the step where the run began."""

    def add(self, request: int, digests: npt.NDArray[np.uint64], steps: npt.NDArray[np.int64]) -> None:
        """Further tokens of a request, in order."""
        begins = np.concatenate([[0], np.flatnonzero(digests[1:] != digests[:-1]) + 1])
        lengths = np.diff(np.append(begins, len(digests)))
        starts = steps[begins]
        if request in self.last:
            digest, length, step = self.last[request]
            if digest == int(digests[0]):
                lengths[0] += length
                starts[0] = step
            else:
                self._finish(np.array([length]))
        place = int(lengths.argmax())
        if lengths[place] > self.longest:
            self.longest, self.longest_step, self.longest_request = int(lengths[place]), int(starts[place]), request
        self._finish(lengths[:-1])
        self.last[request] = (int(digests[-1]), int(lengths[-1]), int(starts[-1]))

    def _finish(self, lengths: npt.NDArray[np.int64]) -> None:
        self.finished += np.bincount(np.minimum(lengths, FROZEN_ROWS_REFUSED), minlength=len(self.finished))

    def prevail(self, length: int) -> bool:
        """Whether there are more runs of that length or longer than shorter ones of two and more tokens.

        Where a router repeats by itself, short runs are the many.
        """
        runs = self._runs()
        return bool(runs[length:].sum() > runs[2:length].sum())

    @property
    def only_once(self) -> bool:
        """Whether there is one run of two and more tokens, and no other."""
        return int(self._runs()[2:].sum()) == 1

    def _runs(self) -> npt.NDArray[np.int64]:
        unfinished = [min(run, FROZEN_ROWS_REFUSED) for _, run, _ in self.last.values()]
        return self.finished + np.bincount(unfinished, minlength=len(self.finished))


class Validator:
    """The state of all checks of one dump: looks at its blocks in order, and judges at the end."""

    def __init__(self, path: Path, parsed: ParsedDump, user: UserMetadata) -> None:
        self.path, self.parsed, self.user = path, parsed, user
        self.top_k = parsed.top_k - (user.shared_experts or 0)
        self.declared = user.num_experts or parsed.num_experts
        self.index_of_layer = np.full(65536, -1, dtype=np.int64)
        self.layer_numbers: list[int] = []
        self.rows = self.warmup_rows = self.dropped_warmup_rows = self._said_warmup_rows = 0
        self.last_step = -1
        self.read_whole = False
        self.kinds = np.zeros(len(PASS_KINDS), dtype=np.int64)
        self.accepted = 0
        self.repaired: str | None = None
        self.rows_changed = False
        self._state = _LayerState(self.declared or 0)
        self._first_ids = np.zeros((0, max(self.top_k, 0)), dtype=np.int32)
        self._warmup_ids = np.zeros((0, max(self.top_k, 0)), dtype=np.int32)
        self._last_position: dict[int, int] = {}
        self._position_gaps = self._position_restarts = 0
        self._partial_passes = self._pruned_passes = 0
        generator = np.random.default_rng(0)
        self._layer_marks = generator.integers(1, 2**63, 65536, dtype=np.uint64)
        self._id_marks = generator.integers(1, 2**63, 65536, dtype=np.uint64)
        self._rank_marks = generator.integers(1, 2**63, MAX_TOP_K, dtype=np.uint64)
        self._shapes: dict[tuple[int, bool], _PassShape] = {}
        self._ascending_rows = 0
        self._weight_rows = self._falling_rows = 0
        self._weight_sums: tuple[float, float] | None = None
        self._weight_range: tuple[float, float] | None = None
        self._layer_digests = generator.integers(1, 2**63, MAX_LAYERS, dtype=np.uint64) | np.uint64(1)
        self._repeats = _Repeats()
        self._by_layer = np.zeros((0, 0), dtype=np.uint64)
        self._tokens = self._leading_padding = self._counting_up = 0
        self._first_counting_up = 0
        self._began: set[int] = set()
        self._trailing: dict[int, int] = {}
        self._last_pass: int | None = None
        self._run = self._runs = self._long_runs = 0

    # Looking, block by block

    def look_at_header(self) -> None:
        """What header and user say of experts and k, before any row is read.

        Raises:
            MalformedDump, RefusedDump: they contradict each other, or name more than can be.
        """
        path, user, parsed = self.path, self.user, self.parsed
        name = "expert ids in range"
        if parsed.top_k > MAX_TOP_K:
            raise MalformedDump(
                f"{path}: {parsed.top_k} experts per token, at most {MAX_TOP_K} are supported; are they scores?",
                check=name,
            )
        if user.num_experts and parsed.num_experts and user.num_experts != parsed.num_experts:
            raise MalformedDump(
                f"{path}: you say num_experts = {user.num_experts}, the dump says {parsed.num_experts}; correct yours",
                check=name,
            )
        if self.declared is not None and self.declared > 65535:
            raise MalformedDump(f"{path}: {self.declared} experts per layer, at most 65,535 are supported", check=name)
        storable = parsed.largest_storable_id
        if storable is not None and self.declared is not None and self.declared - 1 > storable:
            raise MalformedDump(
                f"{path}: ids are stored in a type whose largest value is {storable}, which cannot hold id "
                f"{self.declared - 1} of {self.declared} experts: they wrapped; record with a wider type",
                check=name,
            )
        if user.top_k_model is not None and self.declared is not None and user.top_k_model > self.declared:
            raise MalformedDump(
                f"{path}: you say top_k_model = {user.top_k_model} of {self.declared} experts; correct it",
                check="what is said fits",
            )
        if self.top_k < 1:
            raise MalformedDump(
                f"{path}: you say shared_experts = {user.shared_experts}, but the dump has {parsed.top_k} ids per "
                "token; correct it",
                check="what is said fits",
            )
        if self.declared is not None and self.top_k > self.declared:
            raise MalformedDump(
                f"{path}: {self.top_k} experts per token of {self.declared} experts; is k taken for E somewhere?",
                check=name,
            )
        self._refuse_other_ids()

    def look_at_ids(self, block: RowBlock) -> None:
        """Ids and layers of a block, in range; finds room for its layers."""
        self._look_at_range(block)
        self._find_layers(block)

    def leading_prefix(self, block: RowBlock) -> int:
        """Rows of the leading steps whose every row equals the first row of its layer in the dump."""
        layer = self.index_of_layer[block.layer]
        if len(self.layer_numbers) > len(self._warmup_ids):
            self._warmup_ids = _padded(self._warmup_ids, (len(self.layer_numbers), self.top_k), -1)
        unseen = self._warmup_ids[layer, 0] < 0
        for row in np.flatnonzero(unseen)[np.unique(layer[unseen], return_index=True)[1]].tolist():
            self._warmup_ids[layer[row]] = block.expert_ids[row]
        differs = (block.expert_ids != self._warmup_ids[layer]).any(axis=1)
        if not differs.any():
            return block.rows
        first = int(np.flatnonzero(differs)[0])
        return int(np.searchsorted(block.step, block.step[first]))

    def look_at_rows(self, block: RowBlock, phase: npt.NDArray[np.int8], warmup_rows: int) -> Records:
        """The block's rows in recorded order, of which the first `warmup_rows` are the engine's warm-up.

        Raises:
            MalformedDump: a row that can be no route, or a pass that is not whole.
        """
        layer = self.index_of_layer[block.layer]
        # A dump may say itself what was warm-up.
        counted = phase != PHASE_CODES["warmup"]
        state, row_sets = self._state, np.zeros(block.rows, dtype=np.uint64)
        repeated, ascending = _scan(
            layer, block.expert_ids, counted, state.last_row, state.counts, state.rows, state.window_start,
            state.longest_window, state.changes, state.hashes, state.last_set, state.run, state.longest_run,
            self._first_ids, row_sets,
        )  # fmt: skip
        if repeated >= 0:
            raise self._repeated(block, repeated)
        self._ascending_rows += ascending
        # A fallback runs the tokens of the pass that failed again.
        is_again = np.zeros(block.rows, dtype=bool)
        if block.pass_kind is not None:
            is_again = block.pass_kind == PASS_KIND_CODES["spec_fallback"]
        self._look_at_positions(block, layer, counted & ~is_again)
        changes = np.zeros(block.rows, dtype=bool)
        changes[0] = True
        for values in (block.step, block.pass_in_step, block.layer, phase, block.pass_kind):
            if values is not None:
                changes[1:] |= values[1:] != values[:-1]
        first_row = np.flatnonzero(changes)
        records = Records(first_row, np.diff(np.append(first_row, block.rows)), block.step[first_row])
        if records.rows.max() > 65536:
            row = int(first_row[records.rows.argmax()])
            raise MalformedDump(
                f"{self.where(block, row)}: {records.rows.max()} rows in one event, at most 65,536",
                check="every pass has every layer",
            )
        self._look_at_shape(block, records, phase)
        tokens = _tokens_of(block, records, phase)
        self._look_at_digests(block, tokens, row_sets, counted & tokens.is_whole & ~is_again)
        self._look_at_tokens(block, records, tokens, counted)
        self._look_at_weights(block, counted)
        self.rows += block.rows
        self.warmup_rows += int(np.count_nonzero(~counted))
        self._said_warmup_rows += int(np.count_nonzero(~counted)) - warmup_rows
        self.last_step = int(block.step[-1])
        return records

    def where(self, block: RowBlock, row: int) -> str:
        """The place of a row, for a person."""
        position = f", position {int(block.position[row])}" if block.position is not None else ""
        return f"{self.path}, step {int(block.step[row])}, layer {int(block.layer[row])}{position}"

    def _refuse_other_ids(self) -> None:
        said, space = self.user.id_space, self.user.id_space or self.parsed.id_space
        mapped = any(check.name == "ids are logical" for check in self.parsed.checks)
        if space in (None, "logical") or said == "physical" or mapped:
            return
        if space == "physical":
            raise RefusedDump(
                f"{self.path}: physical ids, of which replicas of one expert have several, and no map of each pass to "
                "logical ones; record logical ids, or say --meta id_space=physical to take each copy for an expert",
                check="ids are logical",
            )
        means = "a place in a cache, not an expert" if space == "slot" else "every rank counts from 0 again"
        raise RefusedDump(
            f"{self.path}: {space} ids ({means}), and no map from them to logical ones; record logical ids",
            check="ids are logical",
        )

    def _look_at_range(self, block: RowBlock) -> None:
        ids = block.expert_ids
        lowest, highest = int(ids.min()), int(ids.max())
        limit = self.declared if self.declared is not None else 65535
        if lowest >= 0 and highest < limit:
            return
        outside = (ids < 0) | (ids >= limit)
        bad = outside.any(axis=1)
        row = int(np.flatnonzero(bad)[0])
        base = self.user.expert_id_base or 0
        found = int(ids[row][outside[row]][0])
        meaning = "a negative id marks a route that was not captured" if found < 0 else "ids run 0.." + str(limit - 1)
        raise MalformedDump(
            f"{self.where(block, row)}: expert id {found + base}, but {meaning}; {int(bad.sum())} of {block.rows} rows "
            f"of this block are affected; {self._meaning_outside(ids, limit, found)}",
            check="expert ids in range",
        )

    def _meaning_outside(self, ids: npt.NDArray[np.int32], limit: int, found: int) -> str:
        """What ids out of range most likely are, and what to do; nothing is clamped and nothing guessed."""
        if found < 0:
            return (
                "if the dump counts experts from 1, do not say so of one that counts from 0"
                if self.user.expert_id_base
                else "leave such rows out when recording, or correct num_experts"
            )
        extra = ids >= limit  # (R, K)
        per_row = int(extra[0].sum())
        if int(ids.max()) == limit and not (ids == 0).any() and not self.user.expert_id_base:
            return "the dump counts experts from 1: say --expert-id-base 1 (--meta expert_id_base=1)"
        if 0 < per_row < ids.shape[1] and (extra.sum(axis=1) == per_row).all() and ids.max() < limit + per_row:
            return (
                f"every row has {per_row} of them: fused shared experts, which are not routed; say "
                f"--strip-shared-experts {per_row} (--meta shared_experts={per_row}), or --meta expert_id_base=1 if "
                "the dump counts experts from 1"
            )
        if int(ids.max()) == limit and not self.user.expert_id_base:
            return "if the dump counts experts from 1, say --meta expert_id_base=1, else correct num_experts"
        return (
            "zero-compute experts (they have no weights, and a canonical row has no place for a choice of none) or "
            "physical ids of replicas? record the routed, logical ids, or correct num_experts"
        )

    def _find_layers(self, block: RowBlock) -> None:
        if block.layer.min() < 0 or block.layer.max() > 65535:
            row = int(np.flatnonzero((block.layer < 0) | (block.layer > 65535))[0])
            raise MalformedDump(
                f"{self.where(block, row)}: wanted a layer number of 0..65535", check="layers are numbered"
            )
        for number in np.unique(block.layer[self.index_of_layer[block.layer] < 0]).tolist():
            self.index_of_layer[number] = len(self.layer_numbers)
            self.layer_numbers.append(number)
        num_experts = self.declared or int(block.expert_ids.max()) + 1
        layers = len(self.layer_numbers)
        if layers > MAX_LAYERS:
            raise MalformedDump(
                f"{self.path}: {layers} layers, at most {MAX_LAYERS} are believed; are the axes of tokens and layers "
                "swapped, or is a column mistaken for the layer?",
                check="every pass has every layer",
            )
        if layers * max(num_experts, self._state.num_experts) > MAX_OBJECTS:
            raise MalformedDump(
                f"{self.path}: {layers} layers × {num_experts} experts; at most {MAX_OBJECTS:,} are supported. "
                "Is a column mistaken for the layer or the expert?",
                check="expert ids in range",
            )
        self._state.grow(layers, num_experts)
        if layers > len(self._first_ids):
            self._first_ids = _padded(self._first_ids, (layers, self.top_k), -1)

    def _repeated(self, block: RowBlock, row: int) -> MalformedDump:
        ids = block.expert_ids[row]
        if ids.any():
            return MalformedDump(
                f"{self.where(block, row)}: an id stands twice in {ids.tolist()}; a router picks {self.top_k} "
                "different experts. Are these counts, or is a fused shared expert or padding among the ids?",
                check="no expert twice in a row",
            )
        zero: npt.NDArray[np.bool_] = ~(block.expert_ids != 0).any(axis=1)
        of_layer = block.layer == block.layer[row]
        affected, layers = np.unique(block.layer[zero]), np.unique(block.layer)
        if zero.all():
            hint = "nothing was captured; does the recorder read the buffer that the router writes?"
        elif zero[of_layer].all():
            hint = (
                "the layer is dense or was not captured: leave it out when recording, or name the routed layers where "
                "the layout lists all of them (--layer-map, --meta moe_layer_ids=[…])"
            )
        elif len(affected) == len(layers):
            hint = (
                "in every layer a part of the rows: one rank's shard of a padded buffer, or a prompt that was not "
                "captured; record on the rank that gathers all tokens"
            )
        else:
            hint = "rows that were never written; leave them out when recording"
        return MalformedDump(
            f"{self.where(block, row)}: all ids are 0 ({int((zero & of_layer).sum())} of {int(of_layer.sum())} rows of "
            f"this layer, {zero.mean():.1%} of all rows and {len(affected)} of {len(layers)} layers of the block): an "
            f"unwritten buffer, not expert 0; {hint}",
            check="no constant layer",
        )

    def _look_at_positions(self, block: RowBlock, layer: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]) -> None:
        """Positions of the first layer's rows, per request: a repeat is refused, gaps and restarts are counted."""
        if block.position is None:
            return
        rows = np.flatnonzero((layer == 0) & counted)
        rows = rows[np.argsort(block.request[rows], kind="stable")]
        request, position = block.request[rows], block.position[rows]
        for begin, end in itertools.pairwise([*np.flatnonzero(np.diff(request, prepend=-1)).tolist(), len(rows)]):
            one = int(request[begin])
            before = self._last_position.get(one, int(position[begin]) - 1)
            steps = np.diff(position[begin:end], prepend=before)
            if not steps.all():
                row = int(rows[begin + int(np.flatnonzero(steps == 0)[0])])
                raise MalformedDump(
                    f"{self.where(block, row)}: the same position of the same request stands twice in a row; a token "
                    "recorded twice counts twice: remove the repetition",
                    check="positions continuous",
                )
            self._position_gaps += int(np.count_nonzero(steps > 1))
            self._position_restarts += int(np.count_nonzero(steps < 0))
            self._last_position[one] = int(position[end - 1])

    def _look_at_shape(self, block: RowBlock, records: Records, phase: npt.NDArray[np.int8]) -> None:
        """Every pass has the same rows in each layer, the last one aside; its layers are remembered for the end."""
        # Repetitions layer by layer interleave two passes; each is looked at whole.
        order = np.lexsort((block.pass_in_step[records.first_row], records.step))
        first_row, record_rows = records.first_row[order], records.rows[order]
        pass_key = np.stack([block.step[first_row], block.pass_in_step[first_row], phase[first_row]])
        begins = np.ones(len(first_row), dtype=bool)
        begins[1:] = (pass_key[:, 1:] != pass_key[:, :-1]).any(axis=0)
        starts = np.flatnonzero(begins)
        lengths = np.diff(np.append(starts, len(first_row)))
        layer = block.layer[first_row]
        back = ~begins[1:] & (np.diff(layer) <= 0)
        name = "every pass has every layer"
        if back.any():
            row = int(first_row[np.flatnonzero(back)[0] + 1])
            raise MalformedDump(
                f"{self.where(block, row)}: the layer goes back inside a pass; records of one pass must stand "
                "together, in ascending layers: are two streams written into one file?",
                check=name,
            )
        # A step of two passes holds a speculation that failed; either may have been cut short.
        failed = np.zeros(len(first_row), dtype=bool)
        if block.pass_kind is not None:
            failed = np.isin(block.pass_kind[first_row], _FAILED_KINDS)
        elif self.parsed.speculative:
            failed = pass_key[1] > 0
        repeated = np.isin(pass_key[0], pass_key[0][failed])
        phase_of_pass = phase[first_row[starts]].astype(np.uint64)
        marks = np.add.reduceat(self._layer_marks[layer], starts) * np.uint64(8) + phase_of_pass
        for may_be_partial in (False, True):
            chosen = np.flatnonzero(repeated[starts] == may_be_partial)
            names, where, counts = np.unique(marks[chosen], return_index=True, return_counts=True)
            for mark, at, passes in zip(names.tolist(), chosen[where].tolist(), counts.tolist(), strict=True):
                known = self._shapes.get((mark, may_be_partial))
                if known is not None:
                    known.passes += passes
                    continue
                begin, end = starts[at], starts[at] + lengths[at]
                self._shapes[mark, may_be_partial] = _PassShape(
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
                    f"{self.where(block, row)}: {int(record_rows[record])} rows, but {int(record_rows[pass_start])} "
                    "in the first layer of the pass; only the last layer may have fewer (output tokens of a prefill)",
                    check=name,
                )
            self._pruned_passes += len(at)

    def _look_at_digests(
        self,
        block: RowBlock,
        tokens: Tokens,
        row_sets: npt.NDArray[np.uint64],
        looked_at: npt.NDArray[np.bool_],
    ) -> None:
        """Tokens that repeat the one before in every layer, and the first tokens' sets, to hold layers against."""
        layers, count = len(self.layer_numbers), tokens.count
        digests, rows = np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)
        first_row = np.zeros(count, dtype=np.int64)
        room = max(0, COMPARED_SETS // layers - len(self._by_layer))
        by_layer = np.zeros((min(room, count), layers), dtype=np.uint64)
        _sum_tokens(
            tokens.token, self.index_of_layer[block.layer], row_sets, looked_at, self._layer_digests, digests, rows,
            first_row, by_layer,
        )  # fmt: skip
        if len(by_layer):
            before = _padded(self._by_layer, (len(self._by_layer), layers), 0)
            self._by_layer = np.concatenate([before, by_layer[rows[: len(by_layer)] > 0]])
        seen = rows > 0
        digests, first_row = digests[seen], first_row[seen]
        request, step = block.request[first_row], block.step[first_row]
        if len(request) and request.min() != request.max():
            order = np.argsort(request, kind="stable")
            digests, request, step = digests[order], request[order], step[order]
        bounds = [0, *(np.flatnonzero(np.diff(request)) + 1).tolist(), len(request)] if len(request) else []
        for begin, end in itertools.pairwise(bounds):
            self._repeats.add(int(request[begin]), digests[begin:end], step[begin:end])

    def _look_at_tokens(
        self, block: RowBlock, records: Records, tokens: Tokens, counted: npt.NDArray[np.bool_]
    ) -> None:
        """Tokens, whole over their layers: those whose ids count up in every layer, and passes equal to the last.

        A pruned last layer holds fewer rows and is passed over.
        """
        looks_for_copies = block.position is None and not self.parsed.speculative
        if self.top_k < 2 and not looks_for_copies:
            return
        modulus = self.declared or 65536
        counts_up = _counts_up(block.expert_ids, modulus)
        if self.top_k > 1 and not counts_up.any() and not looks_for_copies:
            # The usual block: whatever counted up at the end of its requests before was no padding at an edge.
            self._tokens += int(np.count_nonzero(counted & (self.index_of_layer[block.layer] == 0)))
            for request in distinct(block.request[counted]):
                self._end_of_padding(request)
            return
        whole = counted & tokens.is_whole
        if looks_for_copies:
            key = records.step * (int(block.pass_in_step.max()) + 1) + block.pass_in_step[records.first_row]
            _, pass_of_record = np.unique(key, return_inverse=True)
            self._look_at_passes(block, pass_of_record[tokens.record], tokens.in_record, counted)
        if self.top_k < 2:
            return
        token, count = tokens.token, tokens.count
        seen, padded, owner = np.zeros(count, bool), np.ones(count, bool), np.zeros(count, dtype=np.int64)
        seen[token[whole]] = True
        padded[token[whole & ~counts_up]] = False
        owner[token[whole]] = block.request[whole]
        if not self._counting_up and (padded & seen).any():
            self._first_counting_up = int(block.step[whole & (padded & seen)[token]][0])
        self._counting_up += int((padded & seen).sum())
        owner, padded = owner[seen], padded[seen]
        self._tokens += len(owner)
        order = np.argsort(owner, kind="stable")
        owner, padded = owner[order], padded[order]
        for begin, end in itertools.pairwise([*np.flatnonzero(np.diff(owner, prepend=-1)).tolist(), len(owner)]):
            real = np.flatnonzero(~padded[begin:end])
            one = int(owner[begin])
            if not len(real):
                self._trailing[one] = self._trailing.get(one, 0) + end - begin
                continue
            if one not in self._began:
                self._leading_padding += int(real[0])
            self._end_of_padding(one)
            if real[-1] < end - begin - 1:
                self._trailing[one] = int(end - begin - 1 - real[-1])

    def _end_of_padding(self, request: int) -> None:
        """A real token of a request: what counted up before it is padding only if the request began with it."""
        before = self._trailing.pop(request, 0)
        if request not in self._began:
            self._leading_padding += before
            self._began.add(request)

    def _look_at_passes(
        self,
        block: RowBlock,
        pass_of_row: npt.NDArray[np.int64],
        in_record: npt.NDArray[np.int64],
        counted: npt.NDArray[np.bool_],
    ) -> None:
        """Runs of equal passes: a hash over (layer, row, ids in order) of each, beside that of the pass before."""
        marks = (self._id_marks[block.expert_ids] * self._rank_marks[: self.top_k]).sum(axis=1, dtype=np.uint64)
        marks = marks * self._layer_marks[block.layer] * (2 * in_record.astype(np.uint64) + np.uint64(1))
        hashes = np.zeros(int(pass_of_row.max()) + 1, dtype=np.uint64)
        np.add.at(hashes, pass_of_row, marks)
        rows = np.bincount(pass_of_row, weights=counted, minlength=len(hashes))
        for one in hashes[rows >= REPEATED_PASS_ROWS].tolist():
            if one == self._last_pass:
                self._run += 1
                self._long_runs += self._run == 2
            else:
                self._last_pass, self._run = one, 1
                self._runs += 1

    def _look_at_weights(self, block: RowBlock, counted: npt.NDArray[np.bool_]) -> None:
        if block.weights is None:
            return
        weights = block.weights[counted & ~np.isnan(block.weights).any(axis=1)]
        if not len(weights):
            return
        self._weight_rows += len(weights)
        self._falling_rows += int((np.diff(weights, axis=1) <= 0).all(axis=1).sum())
        self._weight_sums = _widened(self._weight_sums, weights.sum(axis=1))
        self._weight_range = _widened(self._weight_range, weights)

    # What it knows of the whole dump

    @property
    def has_weights(self) -> bool:
        return self._weight_rows > 0

    @property
    def num_experts(self) -> int:
        """As declared, else the largest id that was selected and one."""
        if self.declared is not None:
            return self.declared
        counts = self._state.counts
        return int(np.flatnonzero(counts.any(axis=0))[-1]) + 1 if counts.any() else self.top_k

    @property
    def rank_known(self) -> bool:
        """Whether ids stand in router order."""
        if self.parsed.rank_known is not None:
            return self.parsed.rank_known or self.top_k == 1
        return self.top_k == 1 or self._ascending_rows < self.rows

    @property
    def hidden_layers(self) -> int | None:
        return self.user.hidden_layers or self.parsed.hidden_layers

    def layer_ids(self) -> list[int]:
        """The model's numbers of the dump's layers, ascending."""
        said = self.user.moe_layer_ids
        found = sorted(self.layer_numbers)
        if said is None:
            return found
        if self.parsed.layers_are_ordinals:
            if len(said) != len(found):
                raise MalformedDump(
                    f"{self.path}: you say {len(said)} moe_layer_ids, the dump has {len(found)} layers; correct them",
                    check="layers are numbered",
                )
            return said
        if said != found:
            raise MalformedDump(
                f"{self.path}: you say moe_layer_ids {said}, the dump records {found}; correct them",
                check="layers are numbered",
            )
        return found

    # Judging

    def checks(self) -> list[CheckRecord]:
        """Every check of a dump that was read to its end, in order.

        Raises:
            MalformedDump, RefusedDump: the first that refuses.
        """
        if not self.rows:
            if self.dropped_warmup_rows:
                raise MalformedDump(
                    f"{self.path}: all {self.dropped_warmup_rows} rows repeat one token, and you say to drop them as "
                    "warm-up; record again while the model runs",
                    check="no constant layer",
                )
            raise MalformedDump(f"{self.path}: a header and no route: was the recorder stopped before it wrote any?")
        self.read_whole = True
        own = {record.name: record for record in self._own_checks()}
        judges = self._judges()
        judged = [own.pop(check.name) if check.name in own else judges[check.name]() for check in CHECKS]
        return [*judged, *own.values()]

    def verdicts(self, error: MalformedDump | RefusedDump) -> list[CheckVerdict]:
        """Every check of a dump that was refused: those before the refusal as far as its rows were read."""
        if error.check is None or error.check not in ORDER:
            return refused_unread(error)
        verdicts = []
        until = "" if self.read_whole else f" ({self.rows} rows read until the refusal)"
        for check in CHECKS:
            if check.name == error.check:
                verdicts.append(_verdict(check, "refuse", str(error)))
            elif ORDER[check.name] > ORDER[error.check]:
                verdicts.append(_verdict(check, "not_reached", ""))
            elif not self.rows and check.name != IDENTITY:
                verdicts.append(_verdict(check, "not_applicable", "no row was read before the refusal"))
            else:
                try:
                    judged = self._judges()[check.name]()
                    verdicts.append(CheckVerdict(**{**judged.model_dump(), "found": judged.found + until}))
                except (MalformedDump, RefusedDump) as also:
                    verdicts.append(_verdict(check, "refuse", str(also)))
        return verdicts

    def _own_checks(self) -> list[CheckRecord]:
        """What the parser alone could see; several of one name are one record, as bad as the worst."""
        joined: dict[str, CheckRecord] = {}
        for record in self.parsed.checks:
            before = joined.get(record.name)
            if before is not None:
                worse = record if record.outcome == "warn" else before
                record = record.model_copy(
                    update={"outcome": worse.outcome, "found": f"{before.found}; {record.found}"}
                )
            joined[record.name] = record
        return list(joined.values())

    def _judges(self) -> dict[str, Callable[[], CheckRecord]]:
        return {
            IDENTITY: lambda: self._record(IDENTITY, "ok", self.parsed.format),
            "expert ids in range": self._range_check,
            "255 is an expert": self._fill_check,
            "no expert twice in a row": lambda: self._record(
                "no expert twice in a row", "ok", f"{self.rows} rows looked at"
            ),
            "shared experts apart": self._shared_check,
            "no strided-view copy": self._partition_check,
            "no constant layer": self._constant_check,
            "layers differ": self._identical_check,
            "no warm-up rows": self._warmup_check,
            "no padding rows": self._padding_check,
            "every pass has every layer": self._layers_check,
            "rows conserved": self._conservation_check,
            "no pass twice": self._copies_check,
            "weights agree": self._weight_check,
            "positions continuous": self._position_check,
            "no frozen rows": self._frozen_check,
            "ids are logical": self._id_space_check,
            "no routing collapse": self._skew_check,
            "router order kept": self._order_check,
            "k is the model's": self._top_k_check,
            "layers are numbered": self._numbering_check,
            "rows dropped": self._dropped_check,
            "positions captured": self._captured_check,
            "speculation typed": self._speculation_check,
            "k of the records": self._width_check,
            "what is said fits": lambda: self._record("what is said fits", "ok", "no contradiction"),
            "repaired as asked": lambda: self._record(
                "repaired as asked", "warn" if self.rows_changed else "ok", self.repaired or "nothing was asked for"
            ),
        }

    def _record(self, name: str, outcome: StoredOutcome, found: str, wanted: str | None = None) -> CheckRecord:
        wanted = wanted or CHECKS[ORDER[name]].wanted
        return CheckRecord(name=name, outcome=outcome, wanted=wanted, found=found)

    def _range_check(self) -> CheckRecord:
        name, highest = "expert ids in range", self.num_experts - 1
        everything = ", so every token selects every one" if highest + 1 == self.top_k else ""
        if self.declared is None:
            if everything and self._state.rows.max() >= IDENTICAL_ROWS:
                raise MalformedDump(
                    f"{self.path}: ids run 0..{highest} and a row has {self.top_k}{everything}; is k taken for the "
                    "number of experts? Say --meta num_experts=E if the model really has no more",
                    check=name,
                )
            found = f"the number of experts is not declared; ids run 0..{highest}{everything}"
            return self._record(name, "warn" if everything else "not_applicable", found)
        found = f"ids 0..{highest} at most{everything}"
        if self.parsed.largest_storable_id is not None:
            found += f", stored in a type that reaches {self.parsed.largest_storable_id}"
        chosen = np.flatnonzero(self._state.counts.any(axis=0))
        spare = highest - int(chosen[-1]) if len(chosen) else 0
        selections = int(self._state.counts.sum())
        expected = selections * spare / self.declared
        if spare >= SPARE_SHARE * self.declared and expected >= SPARE_SELECTIONS:
            found = (
                f"{self.declared} experts are declared, but no id is above {int(chosen[-1])} in {selections} "
                f"selections of {len(self.layer_numbers)} layers; a router that balances would choose the {spare} "
                f"others about {expected:.0f} times: num_experts of another model, or ids of one rank?"
            )
            return self._record(name, "warn", found)
        return self._record(name, "warn" if everything else "ok", found)

    def _fill_check(self) -> CheckRecord:
        name, counts = "255 is an expert", self._state.counts
        filled = int(counts[:, 255].sum()) if counts.shape[1] > 255 else 0
        if self.parsed.largest_storable_id != 255:
            return self._record(name, "not_applicable", "ids are not stored in 8 bits")
        if self.declared not in (None, 256):
            return self._record(name, "ok", "id 255 is out of range, so none is one")
        found = f"{filled} selections of id 255" + ("; the dump cannot tell them from −1" if filled else "")
        return self._record(name, "warn" if filled else "ok", found)

    def _partition_check(self) -> CheckRecord:
        name = "no strided-view copy"
        num_experts, rows = self.num_experts, int(self._state.rows.sum())
        window, limit = num_experts // self.top_k, PARTITION_CHANCE
        for shorter in range(2, window):
            if rows * _chance_of_partition(num_experts, self.top_k, shorter) < SHORT_WINDOW_CHANCE:
                window, limit = shorter, SHORT_WINDOW_CHANCE
                break
        expected = rows * _chance_of_partition(num_experts, self.top_k, window)
        longest = int(self._state.longest_window.max())
        wanted = f"no {window} rows of a layer in a row without a repeated id"
        if window < 2 or expected > limit:
            found = f"too few experts or too many rows to tell from chance ({expected:.2g} such windows expected)"
            return self._record(name, "not_applicable", found, wanted)
        if longest >= window:
            layer = self.layer_numbers[int(self._state.longest_window.argmax())]
            raise MalformedDump(
                f"{self.path}, layer {layer}: {longest} rows in a row share no id, as if they partition the "
                f"{num_experts} experts (a run of {window} is looked for, {expected:.2g} expected by chance): the flat "
                "copy of a strided top-k view, not routes; copy the view with its row stride when recording",
                check=name,
            )
        return self._record(name, "ok", f"at most {longest} rows", wanted)

    def _constant_check(self) -> CheckRecord:
        name, state = "no constant layer", self._state
        constant = (state.changes == 0) & (state.rows >= CONSTANT_ROWS)
        if self.warmup_rows == self.rows and self.rows:
            constant = np.ones(len(self.layer_numbers), dtype=bool)
        if constant.any():
            layers = [self.layer_numbers[index] for index in np.flatnonzero(constant)[:5].tolist()]
            raise MalformedDump(
                f"{self.path}: layers {layers}{' and more' if constant.sum() > 5 else ''} choose the same experts in "
                "every row: an unwritten buffer or a warm-up batch, not routes; record again while the model runs",
                check=name,
            )
        most = int(state.rows.max())
        return self._record(name, "ok" if most >= CONSTANT_ROWS else "not_applicable", f"{most} rows per layer")

    def _identical_check(self) -> CheckRecord:
        name = "layers differ"
        if self.num_experts == self.top_k:
            return self._record(name, "not_applicable", "every token selects every expert")
        groups: dict[tuple[int, int], list[int]] = {}
        for index, number in enumerate(self.layer_numbers):
            key = (int(self._state.hashes[index]), int(self._state.rows[index]))
            groups.setdefault(key, []).append(number)
        copies = [sorted(numbers) for numbers in groups.values() if len(numbers) > 1]
        if not copies:
            return self._near_copies()
        rows = max(key[1] for key, numbers in groups.items() if len(numbers) > 1)
        more = f" and {len(copies) - 1} more groups" if len(copies) > 1 else ""
        found = f"layers {copies[0][:5]}{more} are equal over {rows} rows"
        if rows >= IDENTICAL_ROWS and not self.user.tied_routing:
            raise MalformedDump(
                f"{self.path}: {found}: one is a copy of the other; if the model really ties its routers, say "
                "--meta tied_routing=true",
                check=name,
            )
        return self._record(name, "warn", found)

    def _near_copies(self) -> CheckRecord:
        """Layers that differ as a whole, but in few rows, or only by a shift of some rows."""
        name, layers = "layers differ", len(self.layer_numbers)
        one, other, shift, rows, unequal = _closest_layers(
            self._by_layer, IDENTICAL_ROWS, COPY_SHIFT, 1 - SIMILAR_SHARE
        )
        if rows < 0:
            return self._record(name, "ok", f"{layers} different layers")
        numbers = [self.layer_numbers[one], self.layer_numbers[other]]
        shifted = f", {abs(shift)} row{'s' * (abs(shift) > 1)} apart," if shift else ""
        found = f"layers {numbers}{shifted} are equal in {rows - unequal} of {rows} rows in which they change"
        if unequal > max(1, int(rows * (1 - COPY_SHARE))) or self.user.tied_routing:
            return self._record(name, "warn", found)
        raise MalformedDump(
            f"{self.path}: {found}: one is a copy of the other; record each layer from its own router, or if the model "
            "really ties them, say --meta tied_routing=true",
            check=name,
        )

    def _warmup_check(self) -> CheckRecord:
        name, rows, dropped = "no warm-up rows", self.warmup_rows, self.dropped_warmup_rows
        if dropped:
            return self._record(name, "warn", f"{dropped} leading rows repeat one token in every layer: dropped")
        found = f"{rows} leading rows repeat one token in every layer: marked warmup, never replayed"
        if self._said_warmup_rows:
            found = f"{rows} rows, {self._said_warmup_rows} of them as the dump says: marked warmup, never replayed"
        return self._record(name, "warn" if rows else "ok", found if rows else "none")

    def _padding_check(self) -> CheckRecord:
        name, layers = "no padding rows", len(self.layer_numbers)
        chance = _chance_of_counting_up(self.num_experts, self.top_k, ordered=self.rank_known) ** layers
        expected = self._tokens * chance
        if expected > PADDING_CHANCE or self.top_k < 2:
            found = f"{expected:.2g} tokens with consecutive ids in every layer are expected by chance"
            return self._record(name, "not_applicable", "one id per token" if self.top_k < 2 else found)
        edges = self._leading_padding + sum(self._trailing.values())
        found = f"{edges} of {self._tokens} tokens at the edges of requests have consecutive ids in every layer"
        inside = self._counting_up - edges
        if edges < PADDING_TOKENS and inside >= PADDING_TOKENS:
            raise MalformedDump(
                f"{self.path}, from step {self._first_counting_up} on: {inside} of {self._tokens} tokens inside "
                f"requests have consecutive ids in every layer ({expected:.2g} expected by chance): padding between "
                "sequences that were joined, or rows that were never written; cut it by length where it is recorded, "
                "and record each sequence as a request of its own",
                check=name,
            )
        if edges < PADDING_TOKENS:
            return self._record(name, "ok", found)
        if not self._began:
            return self._record(name, "warn", f"all {edges} tokens have consecutive ids: made, not routed?")
        raise MalformedDump(
            f"{self.path}: {found} ({expected:.2g} expected by chance): padding that was filled with a running number; "
            "cut it by length where it is recorded, or say the lengths: --sequence-lengths N,N,… "
            "(--meta sequence_lengths=[…])",
            check=name,
        )

    def _layers_check(self) -> CheckRecord:
        name, everything = "every pass has every layer", sorted(self.layer_numbers)
        pruned, self._partial_passes = self._pruned_passes, 0
        for (_, may_be_partial), shape in self._shapes.items():
            missing = [layer for layer in everything if layer not in shape.layers]
            if not missing:
                continue
            if missing == everything[-1:] and shape.phase == "prefill":
                pruned += shape.passes
                continue
            if may_be_partial and missing in (everything[-len(missing) :], everything[: len(missing)]):
                self._partial_passes += shape.passes
                continue
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            at_end = shape.step == self.last_step
            hint = "it is the last step: the dump is truncated" if at_end else "was that layer not captured?"
            raise MalformedDump(
                f"{self.path}, step {shape.step}: layers {missing[:5]}{more} are missing, but other passes have them; "
                f"{hint}",
                check=name,
            )
        return self._record(
            name,
            "warn" if pruned else "ok",
            f"{pruned} passes with fewer rows in the last layer (output tokens of a prefill)" if pruned else "they do",
            f"{len(everything)} layers with equally many rows in every pass",
        )

    def _conservation_check(self) -> CheckRecord:
        name, state = "rows conserved", self._state
        selections = state.counts.sum(axis=1)
        wrong = np.flatnonzero(selections != state.rows * self.top_k)
        last = int(np.argmax(self.layer_numbers))
        others = np.delete(state.rows, last)
        unequal = len(np.unique(others)) > 1 or (len(others) and state.rows[last] > others[0])
        if len(wrong) or (unequal and not self._partial_passes):
            index = int(wrong[0]) if len(wrong) else int(np.argmin(state.rows))
            raise MalformedDump(
                f"{self.path}, layer {self.layer_numbers[index]}: {int(selections[index])} selections of "
                f"{int(state.rows[index])} rows, but {int(state.rows.max())} rows × {self.top_k} in another layer; "
                "every token passes every layer once: were layers joined of several runs?",
                check=name,
            )
        if len(np.unique(state.rows)) == 1:
            return self._record(name, "ok", f"{int(selections[0])} selections in each of {len(selections)} layers")
        reason = "speculation was cut short" if self._partial_passes else "the last layer was pruned"
        found = f"{int(selections.min())} to {int(selections.max())} selections per layer, since {reason}"
        return self._record(name, "ok", found)

    def _copies_check(self) -> CheckRecord:
        name = "no pass twice"
        if not self._runs:
            why = "token positions tell" if self._last_position else "speculation, or too few rows per pass"
            return self._record(name, "not_applicable", why)
        found = f"{self._long_runs} of {self._runs} passes stand twice or more in a row"
        if self._runs >= REPEATED_RUNS and 2 * self._long_runs > self._runs:
            raise MalformedDump(
                f"{self.path}: {found}: recorded by several ranks and joined, or by a node that ran twice; keep one of "
                "each",
                check=name,
            )
        return self._record(name, "warn" if self._long_runs else "ok", found)

    def _weight_check(self) -> CheckRecord:
        name = "weights agree"
        if self._weight_sums is None or self._weight_range is None:
            return self._record(name, "not_applicable", "no weights")
        low, high = self._weight_sums
        kind = self.user.weight_kind or self.parsed.weight_kind
        found = f"{self._falling_rows} of {self._weight_rows} rows fall; sums {low:.4g}..{high:.4g}"
        agrees = self._falling_rows == self._weight_rows
        smallest, largest = self._weight_range
        fault = None
        if kind in ("softmax", "renormalised", "sigmoid", "scaled") and smallest < 0:
            fault = f"a weight of {smallest:.4g} is not one of kind {kind}"
        elif kind in ("softmax", "renormalised", "sigmoid") and largest > 1 + SUM_TOLERANCE:
            fault = f"a weight of {largest:.4g} is not one of kind {kind}"
        elif kind == "softmax" and high > 1 + SUM_TOLERANCE:
            fault = "a part of a softmax sums to 1 at most"
        elif kind == "renormalised" and (abs(low - 1) > SUM_TOLERANCE or abs(high - 1) > SUM_TOLERANCE):
            fault = "renormalised weights sum to 1"
        if fault:
            return self._record(name, "warn", f"{found}; {fault}: is weight_kind right?")
        return self._record(name, "ok" if agrees else "warn", found)

    def _position_check(self) -> CheckRecord:
        name = "positions continuous"
        if not self._last_position:
            return self._record(name, "not_applicable", "none recorded")
        gaps, restarts = self._position_gaps, self._position_restarts
        return self._record(
            name,
            "warn" if gaps or restarts else "ok",
            f"{gaps} gaps, {restarts} places where positions go back"
            + ("; several sequences in one request, lost or repeated tokens?" if gaps or restarts else ""),
        )

    def _frozen_check(self) -> CheckRecord:
        name, repeats, longest_run = "no frozen rows", self._repeats, self._state.longest_run
        layers, longest = len(self.layer_numbers), repeats.longest
        # Few layers, or few sets to choose from, repeat by chance.
        many_sets = _log_choose(self.num_experts, self.top_k) > math.log(FROZEN_SETS)
        is_deep = many_sets and layers >= FROZEN_LAYERS
        request = f", request {repeats.longest_request}" if len(repeats.last) > 1 else ""
        refused = is_deep and longest >= FROZEN_ROWS_REFUSED and repeats.prevail(FROZEN_ROWS_REFUSED)
        if refused and not self.user.repeated_tokens:
            raise MalformedDump(
                f"{self.path}, from step {repeats.longest_step} on{request}: {longest} tokens in a row choose the same "
                f"experts in all {layers} layers: a buffer that was not written again, a replayed graph, or padding; "
                "record again, or if the model really repeats one token there, say --meta repeated_tokens=true",
                check=name,
            )
        worst = int(longest_run.argmax())
        named = is_deep and longest >= FROZEN_ROWS_NAMED
        named = named or (many_sets and longest >= FROZEN_ROWS_REFUSED and layers > 1 and repeats.only_once)
        named = named or longest >= FROZEN_ROWS or int(longest_run[worst]) >= FROZEN_LAYER_ROWS
        at = f" (from step {repeats.longest_step} on{request})" if longest > 1 else ""
        return self._record(
            name,
            "warn" if named else "ok",
            f"{longest} in every layer{at}, {int(longest_run[worst])} in layer {self.layer_numbers[worst]}"
            + ("; padding, or a graph replayed without new routes?" if named else ""),
        )

    def _id_space_check(self) -> CheckRecord:
        name, space = "ids are logical", self.user.id_space or self.parsed.id_space
        if space is None:
            return self._record(name, "not_applicable", "neither dump nor user says what an id names")
        if space == "physical":
            return self._record(name, "warn", "physical, as you say: each copy of an expert counts as one")
        return self._record(name, "ok", space)

    def _shared_check(self) -> CheckRecord:
        name, state = "shared experts apart", self._state
        if self.top_k < 2 or state.rows.min(initial=CONSTANT_ROWS) < CONSTANT_ROWS or not state.layers:
            return self._record(name, "not_applicable", "too few rows, or one id a row, to tell")
        everywhere = np.flatnonzero((state.counts == state.rows[:, np.newaxis]).all(axis=0))
        if not 0 < len(everywhere) < self.top_k:
            return self._record(name, "ok", "none")
        routed = self.num_experts - len(everywhere)
        found = f"ids {everywhere.tolist()[:5]} stand in every row of every layer"
        if everywhere[0] < routed:
            return self._record(name, "warn", f"{found}; is a shared expert among the ids?")
        raise MalformedDump(
            f"{self.path}: {found}, and no id is higher: fused shared experts, which are not routed; say "
            f"--strip-shared-experts {len(everywhere)} --meta num_experts={routed}, or leave them out when recording",
            check=name,
        )

    def _skew_check(self) -> CheckRecord:
        carried = np.sort(self._state.counts, axis=1)[:, -self.top_k :].sum(axis=1)
        share = carried / np.maximum(self._state.rows * self.top_k, 1)
        worst = int(share.argmax())
        found = f"at most {share[worst]:.1%} of a layer's selections on {self.top_k} experts"
        return self._record(
            "no routing collapse",
            "warn" if share[worst] > COLLAPSE_SHARE else "ok",
            f"{found} (layer {self.layer_numbers[worst]})",
        )

    def _order_check(self) -> CheckRecord:
        if self.rank_known:
            return self._record("router order kept", "ok", "ids are not sorted")
        found = (
            "the layout does not keep router order"
            if self.parsed.rank_known is False
            else f"all {self.rows} rows have ascending ids, so router order is lost"
        )
        return self._record("router order kept", "warn", found)

    def _top_k_check(self) -> CheckRecord:
        model = self.user.top_k_model or self.parsed.top_k_model
        differs = model is not None and model != self.top_k
        return self._record(
            "k is the model's",
            "warn" if differs else "ok" if model is not None else "not_applicable",
            f"{self.top_k} in the dump, {model if model is not None else 'unknown'} in the model"
            + ("; an override of the engine, padding, or a fused shared expert?" if differs else ""),
        )

    def _numbering_check(self) -> CheckRecord:
        name = "layers are numbered"
        layer_ids, hidden = self.layer_ids(), self.hidden_layers
        if hidden is not None and layer_ids[-1] >= hidden:
            raise MalformedDump(
                f"{self.path}: layer {layer_ids[-1]}, but the model has {hidden} layers (0..{hidden - 1}); correct "
                "hidden_layers, or the numbers of the layers (--layer-map N,N,…, --meta moe_layer_ids=[…])",
                check=name,
            )
        unnamed = self.parsed.layers_are_ordinals and self.user.moe_layer_ids is None
        if unnamed and hidden not in (None, len(layer_ids)):
            raise MalformedDump(
                f"{self.path}: {len(layer_ids)} layer lists without numbers, but the model has {hidden} layers; "
                "which are they? say --meta moe_layer_ids=[…], or --layer-map N,N,…",
                check=name,
            )
        if unnamed and hidden is None:
            return self._record(name, "not_applicable", f"{len(layer_ids)} lists without numbers, counted from 0")
        return self._record(name, "ok", f"{len(layer_ids)} layers, {layer_ids[0]} to {layer_ids[-1]}")

    def _dropped_check(self) -> CheckRecord:
        reasons = [f"{rows} rows: {reason}" for reason, rows in self.parsed.dropped_rows.items()]
        dropped = sum(self.parsed.dropped_rows.values())
        return self._record("rows dropped", "warn" if dropped else "ok", "; ".join(reasons) or "none")

    def _captured_check(self) -> CheckRecord:
        missing = "; ".join(f"{count}: {reason}" for reason, count in self.parsed.missing_positions.items())
        if not missing:
            return self._record("positions captured", "not_applicable", "the dump names none that were not")
        found = f"token positions that the dump holds no routes of: {missing}"
        return self._record("positions captured", "warn", found)

    def _speculation_check(self) -> CheckRecord:
        if not self.parsed.speculative:
            return self._record("speculation typed", "not_applicable", "not a dump of speculative passes")
        found = ", ".join(f"{count} {kind}" for kind, count in zip(PASS_KINDS, self.kinds.tolist(), strict=True))
        return self._record(
            "speculation typed",
            "ok",
            f"events: {found}; accepted tokens: {self.accepted}; {self._partial_passes} partial passes",
        )

    def _width_check(self) -> CheckRecord:
        name = "k of the records"
        if not self.parsed.speculative:
            return self._record(name, "not_applicable", f"k = {self.top_k} by the layout")
        doubtful = self.parsed.top_k_is_inferred and not np.count_nonzero(self.kinds) > 1
        found = (
            f"k = {self.top_k} is inferred, all records are as wide; if they are pairs of tokens, say "
            f"--meta top_k_model={self.top_k // 2}"
        )
        return self._record(name, "warn" if doubtful else "ok", found if doubtful else f"k = {self.top_k}")


def distinct(values: npt.NDArray[np.int64]) -> set[int]:
    """The different values."""
    # Most blocks hold one request; sorting them to find that out would cost more than parsing them.
    if len(values) and values.min() == values.max():
        return {int(values[0])}
    return set(np.unique(values).tolist())


def _counts_up(ids: npt.NDArray[np.int32], modulus: int) -> npt.NDArray[np.bool_]:
    """Rows whose ids are consecutive modulo the experts; (R, K) → (R,), never where K is 1."""
    if ids.shape[1] < 2:
        return np.zeros(len(ids), dtype=np.bool_)
    first = ids[:, 1] - ids[:, 0]
    found: npt.NDArray[np.bool_] = (first == 1) | (first == 1 - modulus)
    # Few rows begin so; only they are looked at whole.
    rows = np.flatnonzero(found)
    steps = np.diff(ids[rows], axis=1)
    found[rows] = ((steps == 1) | (steps == 1 - modulus)).all(axis=1)
    return found


def _widened(before: tuple[float, float] | None, values: npt.NDArray[np.float32]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if before is None else (min(before[0], low), max(before[1], high))


def _chance_of_partition(num_experts: int, top_k: int, rows: int) -> float:
    """Probability that `rows` independent uniform k-subsets of the experts are disjoint."""
    logarithm = 0.0
    for row in range(1, rows):
        logarithm += _log_choose(num_experts - row * top_k, top_k) - _log_choose(num_experts, top_k)
    return math.exp(logarithm)


def _chance_of_counting_up(num_experts: int, top_k: int, *, ordered: bool) -> float:
    """Probability that k ids, drawn uniformly, are consecutive modulo E; in the order drawn, or sorted first."""
    if top_k >= num_experts and not ordered:
        return 1.0
    sets = math.exp(math.log(num_experts) - _log_choose(num_experts, top_k))
    return min(1.0, sets / math.exp(math.lgamma(top_k + 1)) if ordered and top_k < 100 else sets)


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
