"""Parsed dump → canonical rows: typing of passes, event numbers, counts, and the trace's metadata.

In: a `ParsedDump` and what its user says of it. Out: tables of canonical rows and, at the end, the trace's metadata, or
an error that says where, what was wanted, what was found and what to do. Layout knowledge belongs to `dumps`, faults of
a dump to `validator`, what the user wants changed to `repairs`, files to `ingest`.

Letters: R rows of a block, K experts per row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from pipeline.dump_checks import WARMUP_ROWS
from pipeline.dumps.blocks import MalformedDump, ParsedDump, RowBlock
from pipeline.repairs import Repairs
from pipeline.validator import Records, Validator, distinct
from schemas.columns import PASS_KINDS, PHASES
from schemas.trace import PASS_KIND_CODES, PHASE_CODES, SCHEMA_VERSION, Counts, Source, TraceMetadata, UserMetadata

PARSER_VERSION = 2
"""Raised whenever the same dump would give another trace; older traces are parsed again by the nightly schedule."""

LARGEST_WEIGHT = 65504
"""The largest 16-bit float."""


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


@dataclass(frozen=True)
class NumberedBlock:
    """A block with its records (one layer of one pass) found; phase (R,) and pass_kind (R,) are codes."""

    block: RowBlock
    phase: npt.NDArray[np.int8]
    pass_kind: npt.NDArray[np.int8]
    records: Records


class Canonical:
    """The state of one ingest: walks the parsed blocks, has them repaired and checked, numbers events, and sums up."""

    def __init__(self, path: Path, parsed: ParsedDump, user: UserMetadata) -> None:
        self.path, self.parsed, self.user = path, parsed, user
        self.validator = Validator(path, parsed, user)
        self.repairs = Repairs(path, user, self.validator.declared)
        self.events = self.steps = self.accesses = self.accepted = 0
        self.rows_by_phase = dict.fromkeys(PHASES, 0)
        self.requests: set[int] = set()
        self.prefilled: set[int] = set()
        self.seen_in = np.full(65536, -1, dtype=np.int64)

    @property
    def top_k(self) -> int:
        """Experts per row of the trace."""
        return self.validator.top_k

    # Walking

    def blocks(self) -> Iterator[NumberedBlock]:
        """Checked blocks of whole steps; the leading rows are held until it is known whether they are warm-up."""
        self.validator.look_at_header()
        held: list[RowBlock] = []
        leading, leading_rows = True, 0
        for block in self.parsed.blocks:
            block = self.repairs.apply(block) if block.rows else block
            if not block.rows:
                continue
            self.validator.look_at_ids(block)
            if not leading:
                yield from self._checked(block, 0)
                continue
            prefix = self.validator.leading_prefix(block)
            leading_rows += int((block.layer[:prefix] == self.validator.layer_numbers[0]).sum())
            leading = prefix == block.rows
            if leading and leading_rows < WARMUP_ROWS:
                held.append(block)
                continue
            is_warmup = leading_rows >= WARMUP_ROWS
            for before in held:
                yield from self._checked(before, before.rows if is_warmup else 0)
            held = []
            yield from self._checked(block, prefix if is_warmup else 0)
        for block in held:
            yield from self._checked(block, 0)

    def _checked(self, block: RowBlock, warmup_rows: int) -> Iterator[NumberedBlock]:
        """The block with what it is known to be, if a row of it is left."""
        block = self.repairs.without_warmup(block, warmup_rows)
        if self.user.drop_warmup:
            self.validator.dropped_warmup_rows += warmup_rows
            warmup_rows = 0
        if not block.rows:
            return
        phase = block.phase
        if self.user.phase is not None:
            phase = np.where(phase == PHASE_CODES["unknown"], PHASE_CODES[self.user.phase], phase).astype(np.int8)
        if warmup_rows:
            phase = phase.copy()
            phase[:warmup_rows] = PHASE_CODES["warmup"]
        records = self.validator.look_at_rows(block, phase, warmup_rows)
        numbered = NumberedBlock(block, phase, np.repeat(self._kinds(block, records), records.rows), records)
        self._sum_up(numbered)
        yield numbered

    def _kinds(self, block: RowBlock, records: Records) -> npt.NDArray[np.int8]:
        """Codes of PASS_KINDS of the block's records."""
        if block.pass_kind is not None:
            return block.pass_kind[records.first_row]
        if not self.parsed.speculative:
            return np.zeros(len(records.first_row), dtype=np.int8)
        kinds, wrong = type_passes(records.step, block.pass_in_step[records.first_row], records.rows)
        if wrong is not None:
            raise MalformedDump(
                f"{self.path}, step {wrong} (counted from 0): its passes fit no rule: wanted one pass of k or 2k "
                "ids in every layer, or a failed pass and a fallback of k; is a record missing or duplicated?",
                check="speculation typed",
            )
        return kinds

    def _sum_up(self, numbered: NumberedBlock) -> None:
        block, phase = numbered.block, numbered.phase
        bounds = np.append(numbered.records.first_row, block.rows)
        self.accesses += int(_union_sizes(bounds, block.expert_ids, self.seen_in, self.events))
        for code, rows in enumerate(np.bincount(phase, minlength=len(PHASES)).tolist()):
            self.rows_by_phase[PHASES[code]] += rows
        kinds = numbered.pass_kind[numbered.records.first_row]
        self.validator.kinds += np.bincount(kinds, minlength=len(PASS_KINDS))
        self.requests |= distinct(block.request)
        prefill, warmup = phase == PHASE_CODES["prefill"], phase == PHASE_CODES["warmup"]
        self.prefilled |= distinct(block.request[prefill])
        decoded = ~prefill & ~warmup
        accepted = decoded & (numbered.pass_kind == PASS_KIND_CODES["spec_accept"])
        self.accepted += sum(_distinct_pairs(block.step[rows], block.request[rows]) for rows in (decoded, accepted))

    # Writing

    def number(self, numbered: NumberedBlock) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(event_id, row_in_event) of the block's rows; counts events and steps on."""
        first_row, rows, lengths = numbered.records.first_row, numbered.block.rows, numbered.records.rows
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
            layer_ids = np.asarray(self.validator.layer_ids())[block.layer]
        else:
            layer_ids = block.layer
        nothing = pa.nulls(block.rows, pa.uint32())
        position = nothing if block.position is None else pa.array(_checked_u32(self.path, block.position))
        weights: pa.Array = pa.nulls(block.rows, schema.field("router_weights").type)
        if block.weights is not None:
            if (np.abs(block.weights) > LARGEST_WEIGHT).any():
                row = int(np.flatnonzero((np.abs(block.weights) > LARGEST_WEIGHT).any(axis=1))[0])
                raise MalformedDump(
                    f"{self.validator.where(block, row)}: a weight beyond 16-bit floats ({LARGEST_WEIGHT})"
                )
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

    # Summing up

    def metadata(
        self, source: tuple[Path, str], trace_id: str, supersedes: str | None, source_bytes: int
    ) -> TraceMetadata:
        """The metadata of the whole dump; all checks that need its end run here.

        Raises:
            MalformedDump: a check fails.
        """
        user, parsed, validator = self.user, self.parsed, self.validator
        validator.accepted, validator.repaired = self.accepted, self.repairs.found
        validator.rows_changed = self.repairs.changed_rows
        self.repairs.check_lengths()
        checks = validator.checks()
        layer_ids, hidden = validator.layer_ids(), validator.hidden_layers
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
                experts_per_layer=[validator.num_experts] * len(layer_ids),
                num_experts_source="declared" if validator.declared is not None else "observed",
                top_k_model=user.top_k_model or parsed.top_k_model,
                top_k_observed=self.top_k,
                expert_bytes=self._expert_bytes(layer_ids),
                id_space=user.id_space or parsed.id_space,
                weight_kind=user.weight_kind or parsed.weight_kind if validator.has_weights else "absent",
                rank_known=validator.rank_known,
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
                    rows=validator.rows,
                    events=self.events,
                    steps=self.steps,
                    requests=len(self.requests),
                    selections=validator.rows * self.top_k,
                    accesses=self.accesses,
                    accepted_tokens=self.accepted + len(self.prefilled),
                    rows_by_phase=self.rows_by_phase,
                    dropped_rows={**parsed.dropped_rows, **self.repairs.dropped_rows},
                ),
                checks=checks,
                engine_observations=parsed.observations,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise MalformedDump(
                f"{path}: {first['msg'].removeprefix('Value error, ')}; correct what you say of it",
                check="what is said fits",
            ) from None

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


def _text(value: str | None) -> str | None:
    # File names and JSON may hold what is no text; metadata are UTF-8.
    return None if value is None else value.encode("utf-8", "backslashreplace").decode()


def _distinct_pairs(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> int:
    """How many different pairs there are; `ascending` is sorted."""
    if len(distinct(values)) <= 1:
        return int(np.count_nonzero(np.diff(ascending))) + 1 if len(ascending) else 0
    return len(np.unique(np.stack([ascending, values], axis=1), axis=0))


def _checked_u32(path: Path, values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    if values.min() < 0 or values.max() >= 2**32:
        raise MalformedDump(
            f"{path}: a request or position of {int(values.min())}..{int(values.max())}, wanted 0..2^32−1"
        )
    return values.astype(np.uint32)
