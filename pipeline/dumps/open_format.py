"""The open dump format, version 1, specified in README: JSON lines that an engine can write, or the same as Parquet.

One vocabulary for both, that of the canonical trace. JSON lines: a header, a record per layer of a forward pass with
one entry a row in each of its lists, a closing line. Parquet: a row per row, the header in the file's key-value
metadata. Keys that a version does not know are ignored, versions that this one does not know are refused.

Letters: N records, R rows, K experts per row.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    Sample,
    first_bad_line,
    is_integer,
    json_fault,
    read_line,
)
from schemas.columns import PASS_KINDS, PHASES
from schemas.trace import (
    CheckRecord,
    ExpertBytes,
    IdSpace,
    LayerId,
    NonNegativeInt,
    NumExperts,
    NumLayers,
    Text,
    TopK,
    WeightKind,
    arrow_schema,
)

FORMAT = "expert-tier-routes"
VERSION = 1
PARQUET_KEY = b"expert_tier_routes"
"""Key of a Parquet file's metadata under which the header stands."""

MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Longest line; a longer record is written as several of the same layer, one after the other."""

MAX_PASSES = 2**16
"""Most forward passes of a step."""

_MAX_REASONS = 1000
_PREDICTED = arrow_schema(1).field("predicted_expert_ids").type


class Header(BaseModel):
    """What a dump says of itself once. Null and absent are the same: unknown."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    top_k: TopK
    model: Text | None = None
    engine: Text | None = None
    domain: Text | None = None
    capture_method: Text | None = None
    hidden_layers: NumLayers | None = None
    moe_layer_ids: list[LayerId] | None = None
    num_experts: NumExperts | None = None
    top_k_model: TopK | None = None
    expert_bytes: ExpertBytes | list[ExpertBytes] | list[list[ExpertBytes]] | None = None
    id_space: IdSpace | None = None
    weight_kind: WeightKind | None = None
    rank_known: Annotated[bool, Field(strict=True)] | None = None
    pass_boundaries_known: Annotated[bool, Field(strict=True)] = True
    layer_ids_known: Annotated[bool, Field(strict=True)] = True
    dropped_rows: dict[Text, NonNegativeInt] | None = None


def parse_jsonl(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Reads the header at once, records as they are asked for.

    Raises:
        RefusedDump: another version of the format. MalformedDump: a header without what it MUST hold.
    """
    stream, number = dump.stream(), 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if line.strip():
            break
    fault = json_fault(line, lambda value: None)
    if fault is not None:
        raise MalformedDump(f"{dump.path}, line {number}: {fault}; wanted the header of the format")
    header = _header(dump.path, f"line {number}", json.loads(line))
    parsed = _parsed("open_jsonl", dump.path, header, asked)
    parsed.blocks = _walk(dump.path, header, asked, parsed, _jsonl_rows(dump, header, number, parsed))
    return parsed


def parse_parquet(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Reads the footer at once, row groups as they are asked for.

    Raises:
        RefusedDump: another version of the format. MalformedDump: no header, or a column is missing or of another type.
    """
    try:
        # Buffered, so that a column of a large row group is read in pieces.
        file = pq.ParquetFile(pa.PythonFile(dump.raw, mode="r"), buffer_size=1024 * 1024)
        stored = (file.metadata.metadata or {})[PARQUET_KEY]
        said = json.loads(stored)
    except (pa.ArrowException, OSError, KeyError, ValueError, RecursionError) as error:
        raise _unreadable(dump, error) from None
    header = _header(dump.path, f"metadata {PARQUET_KEY.decode()}", said)
    _check_columns(dump.path, file.schema_arrow)
    parsed = _parsed("open_parquet", dump.path, header, asked)
    parsed.blocks = _walk(dump.path, header, asked, parsed, _parquet_rows(dump, file, header.top_k))
    return parsed


def _is_parquet(sample: Sample) -> bool:
    return PARQUET_KEY.decode() in sample.parquet_keys


LAYOUTS = (
    Layout("open_jsonl", "the open format as JSON lines", lambda sample: sample.field("format") == FORMAT, parse_jsonl),
    Layout("open_parquet", "the open format as Parquet", _is_parquet, parse_parquet),
)


def _header(path: Path, where: str, said: object) -> Header:
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        found = said.get("format") if isinstance(said, dict) else said
        raise MalformedDump(f'{path}, {where}: wanted "format": "{FORMAT}", found {str(found)[:80]!r}')
    version = said.get("version")
    if not is_integer(version) or version != VERSION:
        raise RefusedDump(
            f"{path}, {where}: version {str(version)[:40]!r} of the open format, this program reads version {VERSION}; "
            f"write version {VERSION}, or use a newer program"
        )
    try:
        header = Header.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise MalformedDump(f"{path}, {where}: {key[:80]}: {first['msg']} (found {first['input']!r:.80})") from None
    layers, sizes = header.moe_layer_ids, header.expert_bytes
    if layers is not None and sorted(set(layers)) != layers:
        raise MalformedDump(f"{path}, {where}: moe_layer_ids {str(layers)[:80]}, wanted ascending without repeats")
    if isinstance(sizes, list) and len(sizes) != len(layers or ()):
        raise MalformedDump(
            f"{path}, {where}: expert_bytes has {len(sizes)} entries for {len(layers or ())} moe_layer_ids; wanted one "
            "for each, in their order, or one number for all experts"
        )
    if len(header.dropped_rows or {}) > _MAX_REASONS:
        raise MalformedDump(f"{path}, {where}: dropped_rows has over {_MAX_REASONS} reasons")
    return header


def _parsed(layout: str, path: Path, header: Header, asked: Asked) -> ParsedDump:
    if asked.user.expert_id_base:
        raise RefusedDump(
            f"{path}: you say expert_id_base = {asked.user.expert_id_base}, the open format counts experts from 0; "
            "write them so"
        )
    sizes = header.expert_bytes
    return ParsedDump(
        format=layout,
        blocks=iter(()),
        top_k=header.top_k,
        model=header.model,
        engine=header.engine,
        capture_method=header.capture_method,
        domain=header.domain,
        hidden_layers=header.hidden_layers,
        num_experts=header.num_experts,
        top_k_model=header.top_k_model,
        layers_are_ordinals=not header.layer_ids_known,
        layer_expert_bytes=dict(zip(header.moe_layer_ids or (), sizes, strict=True))  # type: ignore[arg-type]
        if isinstance(sizes, list)
        else sizes,
        pass_boundaries="recorded" if header.pass_boundaries_known else "assumed_per_token",
        id_space=header.id_space,
        weight_kind=header.weight_kind,
        rank_known=header.rank_known,
        dropped_rows=dict(header.dropped_rows or {}),
        # Its steps never go back, and their numbers are the writer's word that none is a copy.
        copies_ruled_out=True,
    )


# Rows, whatever they were stored as


@dataclass
class _Rows:
    """Rows in recorded order, before steps are numbered. position is −1 where unknown."""

    step: npt.NDArray[np.int64]
    pass_id: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int8]
    pass_kind: npt.NDArray[np.int8]
    layer: npt.NDArray[np.int32]
    expert_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None
    predicted: pa.ListArray | None

    def part(self, begin: int, end: int) -> "_Rows":
        fields: dict[str, Any] = {
            name: None if values is None else values[begin:end] for name, values in vars(self).items()
        }
        return _Rows(**fields)

    @staticmethod
    def joined(parts: "list[_Rows]") -> "_Rows":
        if len(parts) == 1:
            return parts[0]
        fields: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in vars(parts[0])
            if name not in ("weights", "predicted")
        }
        weights, predicted = [part.weights for part in parts], [part.predicted for part in parts]
        fields["weights"] = fields["predicted"] = None
        if any(one is not None for one in weights):
            fields["weights"] = np.concatenate(
                [
                    np.full(part.expert_ids.shape, np.nan, dtype=np.float32) if one is None else one
                    for one, part in zip(weights, parts, strict=True)
                ]
            )
        if any(one is not None for one in predicted):
            fields["predicted"] = pa.concat_arrays(
                [
                    pa.nulls(len(part.step), _PREDICTED) if one is None else one
                    for one, part in zip(predicted, parts, strict=True)
                ]
            )
        return _Rows(**fields)


def _walk(path: Path, header: Header, asked: Asked, parsed: ParsedDump, parts: Iterator[_Rows]) -> Iterator[RowBlock]:
    """Blocks of whole steps; steps are numbered densely, layers held against the header."""
    layers = _Layers(path, header, asked)
    held: list[_Rows] = []
    steps, previous = 0, -1
    for part in parts:
        if not len(part.step):
            continue
        held.append(part)
        rows = sum(len(one.step) for one in held)
        if rows < ROWS_PER_BLOCK or held[0].step[0] == part.step[-1]:
            continue
        whole = _Rows.joined(held)
        # The last step may go on in the next part.
        end = int(np.searchsorted(whole.step, whole.step[-1])) if (np.diff(whole.step) >= 0).all() else rows
        for block in _blocks(path, whole.part(0, end), steps, previous, layers):
            yield block
            steps = int(block.step[-1]) + 1
        previous = int(whole.step[end - 1])
        held = [whole.part(end, rows)]
    if held:
        yield from _blocks(path, _Rows.joined(held), steps, previous, layers)
    missing = sorted(set(header.moe_layer_ids or ()) - layers.found)
    if header.moe_layer_ids is not None:
        parsed.checks.append(
            CheckRecord(
                name="declared layers recorded",
                outcome="warn" if missing else "ok",
                wanted="routes of each layer of moe_layer_ids",
                found=f"no route of layers {missing[:5]}{' and more' if len(missing) > 5 else ''}"
                if missing
                else "as wanted",
            )
        )


class _Layers:
    """The layers seen, none of which the header rules out."""

    def __init__(self, path: Path, header: Header, asked: Asked) -> None:
        self.path, self.found = path, set[int]()
        self.num_experts = header.num_experts or asked.user.num_experts or 2**16
        self.allowed = None if header.moe_layer_ids is None else np.array(header.moe_layer_ids)
        self.wanted = "a layer of the header's moe_layer_ids"
        if not header.layer_ids_known and asked.user.moe_layer_ids is not None:
            self.allowed = np.arange(len(asked.user.moe_layer_ids))
            self.wanted = "the places of as many layers as you say in moe_layer_ids"

    def see(self, rows: _Rows) -> None:
        layers = np.unique(rows.layer)
        self.found |= set(layers.tolist())
        if self.allowed is not None and (odd := layers[~np.isin(layers, self.allowed)]).size:
            row = int(np.flatnonzero(rows.layer == odd[0])[0])
            raise MalformedDump(f"{self.path}, step {rows.step[row]}: layer_id {odd[0]}, wanted {self.wanted}")
        highest = None if rows.predicted is None else pc.max(rows.predicted.flatten()).as_py()
        if highest is not None and highest >= self.num_experts:
            raise MalformedDump(
                f"{self.path}, steps {rows.step[0]} to {rows.step[-1]}: expert id {highest} among "
                f"predicted_expert_ids, but ids run 0..{self.num_experts - 1}"
            )


def _blocks(path: Path, rows: _Rows, steps: int, previous: int, layers: _Layers) -> Iterator[RowBlock]:
    layers.see(rows)
    back = np.diff(rows.step, prepend=previous) < 0
    if back.any():
        row = int(np.flatnonzero(back)[0])
        raise MalformedDump(
            f"{path}: step_id {rows.step[row]} after {rows.step[row - 1] if row else previous}; steps MUST NOT go "
            "back: are two streams written into one file?"
        )
    begins = np.diff(rows.step, prepend=rows.step[0] - 1) > 0
    starts = np.flatnonzero(begins)
    step = steps + np.cumsum(begins) - 1
    known = rows.position >= 0
    in_step = np.add.reduceat(known, starts)
    partly = (in_step > 0) & (in_step < np.diff(np.append(starts, len(step))))
    if partly.any():
        raise MalformedDump(
            f"{path}, step {rows.step[starts[np.flatnonzero(partly)[0]]]}: token_position of some rows only; write it "
            "for all rows of a step or for none"
        )
    # A block has positions or none.
    cuts = np.flatnonzero(np.diff(known[starts].astype(np.int8))) + 1
    # What a pass is for is part of which pass it is: a pass of the trace has one phase and one kind.
    passes = (rows.pass_id * 32 + rows.phase * 8 + rows.pass_kind).astype(np.int32)
    for begin, end in _parts_of([0, *starts[cuts].tolist(), len(step)], starts):
        part = rows.part(begin, end)
        yield RowBlock(
            step=step[begin:end],
            pass_in_step=passes[begin:end],
            layer=part.layer,
            request=part.request,
            position=part.position if known[begin] else None,
            phase=part.phase,
            expert_ids=part.expert_ids,
            weights=part.weights,
            pass_kind=part.pass_kind,
            predicted=part.predicted,
        )


def _parts_of(bounds: list[int], starts: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges between bounds, cut further at starts of steps into about ROWS_PER_BLOCK rows."""
    for first, last in itertools.pairwise(bounds):
        begin = first
        for start in [*starts[(starts > first) & (starts < last)].tolist(), last]:
            if start - begin >= ROWS_PER_BLOCK or start == last:
                yield begin, start
                begin = start


# JSON lines

_JSON = pa.schema(
    [
        ("step_id", pa.int64()),
        ("pass_id", pa.int64()),
        ("phase", pa.string()),
        ("pass_kind", pa.string()),
        ("layer_id", pa.int64()),
        ("request_id", pa.list_(pa.int64())),
        ("token_position", pa.list_(pa.int64())),
        ("expert_ids", pa.list_(pa.list_(pa.int32()))),
        ("router_weights", pa.list_(pa.list_(pa.float32()))),
        ("predicted_expert_ids", pa.list_(pa.list_(pa.int32()))),
        ("missing", pa.int64()),
        ("reason", pa.string()),
        ("end", pa.bool_()),
        ("records", pa.int64()),
    ]
)
_NUMBERS = {"step_id": 2**62, "pass_id": MAX_PASSES, "layer_id": 2**16}
_ROW_NUMBERS = ("request_id", "token_position")


class _BadRecord(Exception):
    """The columns of some records are not what they should be; which one is found by reading line by line."""


def _jsonl_rows(dump: DumpFile, header: Header, header_lines: int, parsed: ParsedDump) -> Iterator[_Rows]:
    stream = dump.stream()
    for number in range(header_lines):
        read_line(stream, dump.path, number + 1)
    fault = _record_fault(header.top_k)

    def line_fault(line: bytes) -> str | None:
        if len(line) > MAX_RECORD_BYTES:
            return f"a record of {len(line)} bytes, at most {MAX_RECORD_BYTES}; write several of the same layer"
        return json_fault(line, fault)

    records, closing = 0, None
    try:
        for batch in _batches(stream):
            if closing is not None and batch.num_rows:
                raise _after_end(dump)
            is_end = pc.is_valid(batch.column("end"))
            if pc.any(is_end).as_py():
                at = is_end.index(True).as_py()
                if at != batch.num_rows - 1:
                    raise _after_end(dump)
                closing = batch.column("records")[at].as_py()
                if not batch.column("end")[at].as_py() or closing is None:
                    raise _BadRecord
                batch = batch.slice(0, at)
            records += batch.num_rows
            is_hole = pc.is_valid(batch.column("missing"))
            if pc.any(is_hole).as_py():
                _count_holes(dump, batch.filter(is_hole), parsed)
                batch = batch.filter(pc.invert(is_hole))
            if batch.num_rows:
                yield _rows_of_records(batch, header.top_k)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, _BadRecord) as error:
        raise first_bad_line(dump, line_fault, skip_lines=header_lines) from error
    if closing is None:
        raise MalformedDump(
            f"{dump.path}: no closing line after {records} records: truncated, or its writer was killed; copy the dump "
            f'again, or, if what is there is all you want, append {{"end": true, "records": {records}}}'
        )
    if closing != records:
        raise MalformedDump(
            f"{dump.path}: the closing line counts {closing} records, found {records}: lines were lost or repeated; "
            "copy the dump again"
        )


def _batches(stream: Any) -> Iterator[pa.RecordBatch]:
    """Batches of the records, empty lines left out, columns of other names ignored."""
    if not stream.peek(1):
        return
    reader = pajson.open_json(
        pa.PythonFile(stream, mode="r"),
        read_options=pajson.ReadOptions(block_size=MAX_RECORD_BYTES),
        parse_options=pajson.ParseOptions(explicit_schema=_JSON, unexpected_field_behavior="ignore"),
    )
    for batch in reader:
        yield batch.select(_JSON.names)


def _after_end(dump: DumpFile) -> MalformedDump:
    return MalformedDump(f"{dump.path}: lines after the closing line; one file holds one dump: ingest each by itself")


def _count_holes(dump: DumpFile, holes: pa.RecordBatch, parsed: ParsedDump) -> None:
    if (
        holes.column("reason").null_count
        or (pc.min(holes.column("missing")).as_py() or 0) < 0
        or (pc.max(pc.binary_length(holes.column("reason"))).as_py() or 0) > 4096
        or holes.column("expert_ids").null_count != holes.num_rows
    ):
        raise _BadRecord
    sums = pa.table({"reason": holes.column("reason"), "missing": holes.column("missing")})
    for row in sums.group_by("reason").aggregate([("missing", "sum")]).to_pylist():
        reason, positions = row["reason"], row["missing_sum"]
        parsed.missing_positions[reason] = parsed.missing_positions.get(reason, 0) + positions
    if len(parsed.missing_positions) > _MAX_REASONS:
        raise MalformedDump(
            f"{dump.path}: over {_MAX_REASONS} different reasons of missing routes; wanted a few words, no numbers"
        )


def _rows_of_records(records: pa.RecordBatch, top_k: int) -> _Rows:
    """(N,) records → (R,) rows; raises _BadRecord where their lists do not agree."""
    lists = records.column("expert_ids")
    ids = lists.flatten()
    if lists.null_count or ids.null_count or not _has_width(ids, top_k):
        raise _BadRecord
    experts = ids.flatten()
    lengths = lists.value_lengths().to_numpy().astype(np.int64)  # (N,)
    rows = int(lengths.sum())
    if experts.null_count or (lengths < 1).any():
        raise _BadRecord
    numbers = {name: _numbers(records.column(name), limit) for name, limit in _NUMBERS.items()}
    if records.column("step_id").null_count or records.column("layer_id").null_count:
        raise _BadRecord
    request = _row_numbers(records.column("request_id"), lengths, missing=0)
    position = _row_numbers(records.column("token_position"), lengths, missing=-1)
    weights, present = _rows_of_lists(records.column("router_weights"), lengths)
    kept = None
    if weights is not None:
        if not _has_width(weights.drop_null(), top_k):
            raise _BadRecord
        kept = np.full((rows, top_k), np.nan, dtype=np.float32)
        filled = present[np.flatnonzero(weights.is_valid())]
        kept[filled] = weights.flatten().to_numpy(zero_copy_only=False).reshape(-1, top_k)
    lists_of_plan, present = _rows_of_lists(records.column("predicted_expert_ids"), lengths)
    plan = None if lists_of_plan is None else _plan(lists_of_plan, present, rows)
    return _Rows(
        step=np.repeat(numbers["step_id"], lengths),
        pass_id=np.repeat(numbers["pass_id"], lengths),
        request=request,
        position=position,
        phase=np.repeat(_codes(records.column("phase"), PHASES, "unknown"), lengths),
        pass_kind=np.repeat(_codes(records.column("pass_kind"), PASS_KINDS, "normal"), lengths),
        layer=np.repeat(numbers["layer_id"].astype(np.int32), lengths),
        expert_ids=experts.to_numpy().reshape(-1, top_k),
        weights=kept,
        predicted=plan,
    )


def _has_width(lists: pa.ListArray, width: int) -> bool:
    return bool((lists.value_lengths().to_numpy(zero_copy_only=False) == width).all())


def _numbers(column: pa.Array, limit: int) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = column.fill_null(0).to_numpy().astype(np.int64)
    if len(values) and not 0 <= values.min() <= values.max() < limit:
        raise _BadRecord
    return values


def _codes(column: pa.Array, names: tuple[str, ...], default: str) -> npt.NDArray[np.int8]:
    found = pc.index_in(column.fill_null(default), pa.array(names))
    if found.null_count:
        raise _BadRecord
    codes: npt.NDArray[np.int8] = found.to_numpy().astype(np.int8)
    return codes


def _rows_of_lists(column: pa.ListArray, lengths: npt.NDArray[np.int64]) -> tuple[pa.Array | None, Any]:
    """(values of the rows that have a list, (those rows,) their numbers); nothing where no record has one."""
    if column.null_count == len(column):
        return None, np.zeros(0, dtype=np.int64)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    found = column.value_lengths().fill_null(0).to_numpy()
    if (found[present] != lengths[present]).any():
        raise _BadRecord
    return column.flatten(), np.flatnonzero(np.repeat(present, lengths))


def _row_numbers(column: pa.ListArray, lengths: npt.NDArray[np.int64], *, missing: int) -> npt.NDArray[np.int64]:
    """(R,) a number a row, `missing` where a record has none."""
    values, present = _rows_of_lists(column, lengths)
    numbers = np.full(int(lengths.sum()), missing, dtype=np.int64)
    if values is None:
        return numbers
    if values.null_count or (len(values) and pc.min(values).as_py() < 0):
        raise _BadRecord
    numbers[present] = values.to_numpy()
    return numbers


def _plan(lists: pa.ListArray, present: npt.NDArray[np.int64], rows: int) -> pa.ListArray:
    """(R,) lists of uint16, null where a row has none; `lists` are those of the rows `present`."""
    values = lists.flatten()
    ids: npt.NDArray[np.int32] = values.to_numpy(zero_copy_only=False)
    if values.null_count or (len(ids) and not 0 <= ids.min() <= ids.max() < 2**16):
        raise _BadRecord
    lengths = np.zeros(rows, dtype=np.int64)
    lengths[present] = lists.value_lengths().fill_null(0).to_numpy()
    is_null = np.ones(rows, dtype=bool)
    is_null[present] = ~lists.is_valid().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), values.cast(pa.uint16()), type=_PREDICTED, mask=pa.array(is_null)
    )


def _record_fault(top_k: int) -> Callable[[object], str | None]:
    def fault(value: object) -> str | None:
        if not isinstance(value, dict):
            return "wanted an object"
        if value.get("end") is not None:
            return None if value["end"] is True and is_integer(value.get("records")) else _WANTED_END
        if value.get("missing") is not None:
            sound = is_integer(value["missing"]) and value["missing"] >= 0 and isinstance(value.get("reason"), str)
            sound = sound and len(value["reason"]) <= 4096 and value.get("expert_ids") is None
            return None if sound else 'wanted {"missing": positions, "reason": "why"} and no experts'
        for key, limit in _NUMBERS.items():
            number: Any = value.get(key)
            if number is None and key == "pass_id":
                continue
            if not is_integer(number) or not 0 <= number < limit:
                return f"{key} is {str(number)[:40]!r}, wanted a whole number below {limit}"
        for key, names in (("phase", PHASES), ("pass_kind", PASS_KINDS)):
            if value.get(key) not in (None, *names):
                return f"{key} is {str(value[key])[:40]!r}, wanted one of {', '.join(names)}"
        return _lists_fault(value, top_k)

    return fault


_WANTED_END = 'wanted {"end": true, "records": number of lines between the header and this one}'


def _lists_fault(value: dict[str, Any], top_k: int) -> str | None:
    ids = value.get("expert_ids")
    if not isinstance(ids, list) or not ids:
        return f"expert_ids is {str(ids)[:80]}, wanted a list of {top_k} ids for each row"
    for row in ids:
        if (
            not isinstance(row, list)
            or len(row) != top_k
            or not all(is_integer(one) and abs(one) < 2**31 for one in row)
        ):
            return (
                f"a row of expert_ids is {str(row)[:80]}, wanted top_k = {top_k} whole numbers; a token whose routes "
                "were not captured is left out of the record and counted in a line with missing and reason"
            )
    for key in _ROW_NUMBERS:
        numbers = value.get(key)
        if numbers is not None and not (
            isinstance(numbers, list) and len(numbers) == len(ids) and all(is_integer(n) and n >= 0 for n in numbers)
        ):
            return f"{key} is {str(numbers)[:80]}, wanted {len(ids)} whole numbers, one a row of expert_ids, or null"
    for key in ("router_weights", "predicted_expert_ids"):
        rows = value.get(key)
        if rows is not None and not (isinstance(rows, list) and len(rows) == len(ids)):
            return f"{key} has not {len(ids)} entries, one a row of expert_ids; {str(rows)[:80]}"
    for row in value.get("router_weights") or ():
        if row is not None and not (
            isinstance(row, list)
            and len(row) == top_k
            and all(one is None or (isinstance(one, int | float) and not isinstance(one, bool)) for one in row)
        ):
            return f"a row of router_weights is {str(row)[:80]}, wanted top_k = {top_k} numbers, null where unknown"
    for row in value.get("predicted_expert_ids") or ():
        if row is not None and not (isinstance(row, list) and all(is_integer(one) and 0 <= one < 2**16 for one in row)):
            return (
                f"a row of predicted_expert_ids is {str(row)[:80]}, wanted expert ids, or null where no plan was made"
            )
    return None


# Parquet

_MUST = ("step_id", "layer_id", "expert_ids")
_INTEGERS = ("step_id", "pass_id", "request_id", "token_position", "layer_id")
_TEXTS = ("phase", "pass_kind")
_LISTS = ("expert_ids", "router_weights", "predicted_expert_ids")


def _unreadable(dump: DumpFile, error: Exception) -> MalformedDump:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return MalformedDump(f"{dump.path}: truncated or damaged Parquet ({reason[:200]}); copy the dump again")


def _check_columns(path: Path, schema: pa.Schema) -> None:
    names = schema.names
    for name in (*_MUST, *_INTEGERS, *_TEXTS, *_LISTS):
        if names.count(name) > 1 or (name in _MUST and name not in names):
            raise MalformedDump(
                f"{path}: column {name} {'is missing' if name not in names else 'stands twice'}; wanted "
                f"{', '.join(_MUST)}, found {', '.join(names)[:200]}"
            )
        if name not in names:
            continue
        kind = schema.field(name).type
        if name in _INTEGERS:
            sound, wanted = pa.types.is_integer(kind), "whole numbers"
        elif name in _TEXTS:
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            sound, wanted = pa.types.is_string(plain) or pa.types.is_large_string(plain), "texts"
        else:
            of_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            of_kind = pa.types.is_floating if name == "router_weights" else pa.types.is_integer
            sound = of_lists and of_kind(kind.value_type)
            wanted = f"lists of {'floats' if name == 'router_weights' else 'whole numbers'}"
        if not sound:
            raise MalformedDump(f"{path}: column {name} is {kind}, wanted {wanted}")


def _parquet_rows(dump: DumpFile, file: pq.ParquetFile, top_k: int) -> Iterator[_Rows]:
    columns = [name for name in (*_INTEGERS, *_TEXTS, *_LISTS) if name in file.schema_arrow.names]
    row = 0
    try:
        for batch in file.iter_batches(batch_size=ROWS_PER_BLOCK // 4, columns=columns):
            if batch.num_rows:
                yield _rows_of_batch(dump, batch, top_k, row)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(dump, error) from None


def _rows_of_batch(dump: DumpFile, batch: pa.RecordBatch, top_k: int, first_row: int) -> _Rows:
    rows = batch.num_rows
    columns = {name: batch.column(name) for name in batch.schema.names}

    def bad(name: str, wanted: str) -> MalformedDump:
        return MalformedDump(f"{dump.path}, rows {first_row}..{first_row + rows - 1}: {name}: wanted {wanted}")

    def numbers(name: str, limit: int, missing: int | None) -> npt.NDArray[np.int64]:
        column = columns.get(name)
        if column is None:
            return np.full(rows, missing, dtype=np.int64)
        if column.null_count and missing is None:
            raise bad(name, "a value in every row")
        # Of unsigned 64 bits only what fits is there; the cast says so.
        values: npt.NDArray[np.int64] = column.cast(pa.int64()).fill_null(-1 if missing is None else missing).to_numpy()
        given = values[column.is_valid().to_numpy(zero_copy_only=False)]
        if len(given) and not 0 <= given.min() <= given.max() < limit:
            raise bad(name, f"whole numbers from 0 to below {limit}")
        return values

    def codes(name: str, allowed: tuple[str, ...], default: str) -> npt.NDArray[np.int8]:
        column = columns.get(name, pa.nulls(rows, pa.string()))
        try:
            return _codes(column.cast(pa.string()), allowed, default)
        except _BadRecord:
            raise bad(name, f"one of {', '.join(allowed)}") from None

    def lists(name: str) -> pa.ListArray | None:
        column = columns.get(name)
        if column is None or column.null_count == rows:
            return None
        return column.cast(pa.list_(pa.float32() if name == "router_weights" else pa.int32()))

    try:
        ids, weights, plan = (lists(name) for name in _LISTS)
        if ids is None or ids.null_count or not _has_width(ids, top_k) or (experts := ids.flatten()).null_count:
            raise bad("expert_ids", f"top_k = {top_k} ids in every row; leave rows out that were not captured")
        kept = None
        if weights is not None:
            if not _has_width(weights.drop_null(), top_k):
                raise bad("router_weights", f"top_k = {top_k} numbers or null")
            kept = np.full((rows, top_k), np.nan, dtype=np.float32)
            filled = np.flatnonzero(weights.is_valid())
            kept[filled] = weights.flatten().to_numpy(zero_copy_only=False).reshape(-1, top_k)
        return _Rows(
            step=numbers("step_id", 2**62, None),
            pass_id=numbers("pass_id", MAX_PASSES, 0),
            request=numbers("request_id", 2**62, 0),
            position=numbers("token_position", 2**62, -1),
            phase=codes("phase", PHASES, "unknown"),
            pass_kind=codes("pass_kind", PASS_KINDS, "normal"),
            layer=numbers("layer_id", 2**16, None).astype(np.int32),
            expert_ids=experts.to_numpy().reshape(-1, top_k),
            weights=kept,
            predicted=None if plan is None else _plan(plan, np.arange(rows), rows),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise bad("values", f"numbers of 32 bits ({str(error).splitlines()[0][:120]})") from None
    except _BadRecord:
        raise bad("predicted_expert_ids", "ids from 0 to 65535") from None
