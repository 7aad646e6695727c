"""Canonical Parquet → events: what a cache is asked for, in order, as numpy arrays.

In: a file written by the pipeline, checked against its own metadata. Out: `Trace` (rows grouped into events) and
`Walk` (accesses of the selected events). What the columns mean is in `schemas`; writing traces does not belong here.

Letters: N events, R rows, K experts per row, A accesses. An *object* is a (layer, expert) numbered
`layer_first_object[layer] + expert`, where layer is the ordinal among the trace's MoE layers.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from schemas.columns import ACCESS_ORDERS, SCORED_PHASES
from schemas.trace import METADATA_KEY, PHASE_CODES, SCHEMA_VERSION, TraceMetadata, arrow_schema

MAX_OBJECTS = 2**20
"""Most (layer, expert) pairs; policy kernels pack an object beside a time into one 64-bit key."""

IntArray = npt.NDArray[np.int64]


class MalformedTrace(ValueError):
    """A file that should be a canonical trace is none, or does not keep its contract."""


@dataclass(frozen=True)
class Trace:
    """A canonical trace in memory, without weights.

    event_layer: (N,) ordinal of the event's MoE layer; event_step: (N,) step_id; event_phase: (N,) code of PHASES;
    event_first_row: (N + 1,) offsets into the rows; expert_ids: (R, K) uint16; layer_first_object: (L + 1,).
    """

    metadata: TraceMetadata
    event_layer: npt.NDArray[np.int32]
    event_step: npt.NDArray[np.int64]
    event_phase: npt.NDArray[np.int8]
    event_first_row: IntArray
    expert_ids: npt.NDArray[np.uint16]
    layer_first_object: IntArray

    @property
    def num_objects(self) -> int:
        return int(self.layer_first_object[-1])

    @property
    def top_k(self) -> int:
        return int(self.expert_ids.shape[1])


def read_metadata(path: Path) -> TraceMetadata:
    """The metadata of a canonical trace.

    Raises:
        MalformedTrace: the file is no Parquet, carries no metadata of ours, or a newer contract.
        OSError: it cannot be read.
    """
    try:
        file = pq.read_metadata(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    return _metadata_of(path, file)


def _metadata_of(path: Path, file: pq.FileMetaData) -> TraceMetadata:
    stored = (file.metadata or {}).get(METADATA_KEY)
    if stored is None:
        raise MalformedTrace(
            f"{path}: Parquet without expert_tier metadata, so no canonical trace; make one with: "
            "expert-tier ingest DUMP"
        )
    try:
        metadata = TraceMetadata.model_validate_json(stored)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "metadata"
        raise MalformedTrace(f"{path}: metadata {where}: {first['msg']}; ingest the dump again") from None
    if metadata.schema_version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise MalformedTrace(
            f"{path}: canonical trace contract {metadata.schema_version}, this version reads {SCHEMA_VERSION}; "
            "ingest the dump again"
        )
    return metadata


def read_trace(path: Path) -> Trace:
    """Reads a whole canonical trace, without weights.

    Memory: 2 K bytes per row and about 25 per row on top while reading.

    Raises:
        MalformedTrace: the file is no canonical trace, or its rows contradict its metadata.
        OSError: it cannot be read.
    """
    metadata = read_metadata(path)
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow, arrow_schema(metadata.top_k_observed))
            table = file.read(["event_id", "step_id", "phase", "layer_id", "expert_ids"], use_threads=True)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    return _trace_of(path, table.combine_chunks(), metadata)


def trace_parts(path: Path) -> Iterator[pl.DataFrame]:
    """The rows of a canonical trace, all columns, one row group (whole steps) after the other.

    Raises:
        MalformedTrace: the file is no readable Parquet. OSError: it cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                frame = pl.from_arrow(file.read_row_group(group))
                assert isinstance(frame, pl.DataFrame), "a table is a frame"
                yield frame
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _check_columns(path: Path, schema: pa.Schema, wanted: pa.Schema) -> None:
    if len(set(schema.names)) != len(schema.names):
        raise MalformedTrace(f"{path}: a column stands twice; ingest the dump again")
    for field in wanted:
        if field.name not in schema.names:
            raise MalformedTrace(f"{path}: column {field.name} is missing; ingest the dump again")
        found = schema.field(field.name).type
        if not found.equals(field.type) and not (pa.types.is_nested(found) and found == field.type):
            raise MalformedTrace(f"{path}: column {field.name} is {found}, wanted {field.type}; ingest the dump again")


def _trace_of(path: Path, table: pa.Table, metadata: TraceMetadata) -> Trace:
    rows = table.num_rows
    counts = metadata.counts
    for name in table.column_names:
        column = table.column(name)
        if column.null_count:
            raise MalformedTrace(
                f"{path}: column {name} has {column.null_count} nulls, wanted none; ingest the dump again"
            )
    if rows != counts.rows:
        raise MalformedTrace(f"{path}: {rows} rows, its metadata says {counts.rows}; ingest the dump again")
    first_object = np.concatenate([[0], np.cumsum(metadata.experts_per_layer, dtype=np.int64)]).astype(np.int64)
    if first_object[-1] > MAX_OBJECTS:
        raise MalformedTrace(f"{path}: {first_object[-1]} (layer, expert) pairs, at most {MAX_OBJECTS} are supported")
    event_id = _numpy(table, "event_id").astype(np.int64)
    starts = np.flatnonzero(np.diff(event_id, prepend=-1))
    if rows and (event_id[0] != 0 or not np.array_equal(event_id[starts], np.arange(len(starts)))):
        raise MalformedTrace(f"{path}: event_id is not dense and ascending; ingest the dump again")
    layer_ids = np.asarray(metadata.moe_layer_ids, dtype=np.int64)
    event_layer_id = _numpy(table, "layer_id")[starts].astype(np.int64)
    event_layer = np.searchsorted(layer_ids, event_layer_id)
    if np.any(layer_ids[np.minimum(event_layer, len(layer_ids) - 1)] != event_layer_id):
        raise MalformedTrace(f"{path}: a layer_id that is not in moe_layer_ids; ingest the dump again")
    flat = table.column("expert_ids").combine_chunks()
    flat = flat.chunk(0) if isinstance(flat, pa.ChunkedArray) else flat
    expert_ids = flat.flatten().to_numpy(zero_copy_only=False).reshape(rows, metadata.top_k_observed)
    trace = Trace(
        metadata=metadata,
        event_layer=event_layer.astype(np.int32),
        event_step=_numpy(table, "step_id")[starts].astype(np.int64),
        event_phase=_phase_codes(path, table)[starts],
        event_first_row=np.append(starts, rows).astype(np.int64),
        expert_ids=np.ascontiguousarray(expert_ids, dtype=np.uint16),
        layer_first_object=first_object,
    )
    # The kernels index by these ids without bounds checks, so they are checked once, here.
    worst, accesses = check_rows(trace.expert_ids, trace.event_first_row, trace.event_layer, first_object)
    if worst >= 0:
        raise MalformedTrace(
            f"{path}: row {worst}: an expert id beyond its layer's experts, or one twice; ingest the dump again"
        )
    if np.any(np.diff(trace.event_step) < 0):
        raise MalformedTrace(f"{path}: step_id descends; ingest the dump again")
    rows_of_event = np.diff(trace.event_first_row)
    for name, of_event in (("layer_id", event_layer_id), ("step_id", trace.event_step)):
        if np.any(_numpy(table, name) != np.repeat(of_event, rows_of_event)):
            raise MalformedTrace(f"{path}: {name} changes within an event; ingest the dump again")
    if np.any(_phase_codes(path, table) != np.repeat(trace.event_phase, rows_of_event)):
        raise MalformedTrace(f"{path}: phase changes within an event; ingest the dump again")
    found = {"events": len(starts), "steps": len(np.unique(trace.event_step)), "accesses": accesses}
    for name, number in found.items():
        if number != getattr(counts, name):
            raise MalformedTrace(
                f"{path}: {number} {name}, its metadata says {getattr(counts, name)}; ingest the dump again"
            )
    return trace


def _numpy(table: pa.Table, name: str) -> npt.NDArray[np.generic]:
    values: npt.NDArray[np.generic] = table.column(name).to_numpy()
    return values


def _phase_codes(path: Path, table: pa.Table) -> npt.NDArray[np.int8]:
    # Dictionaries may differ between row groups and files; unify, then map names to our codes.
    column = table.column("phase").unify_dictionaries().combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    to_code = np.array([PHASE_CODES.get(name, -1) for name in column.dictionary.to_pylist()] or [-1], dtype=np.int8)
    indices = column.indices.to_numpy(zero_copy_only=False)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(to_code):
        raise MalformedTrace(f"{path}: a damaged phase; ingest the dump again")
    codes: npt.NDArray[np.int8] = to_code[indices]
    if codes.size and codes.min() < 0:
        raise MalformedTrace(f"{path}: a phase outside {', '.join(PHASE_CODES)}; ingest the dump again")
    return codes


def _unreadable(path: Path, error: Exception) -> Exception:
    # pyarrow raises OSError for damaged content, too; only the operating system's own errors carry a number.
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, os.strerror(error.errno), str(path))
    return MalformedTrace(
        f"{path}: not a readable Parquet file ({_first_line(error)}); make one: expert-tier ingest DUMP"
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


@numba.njit(cache=True)
def check_rows(expert_ids, event_first_row, event_layer, layer_first_object):  # type: ignore[no-untyped-def]
    """(first row with an id at or above its layer's number of experts or with one twice, or −1; Σ of the unions)."""
    row_seen = np.full(layer_first_object[-1], -1, dtype=np.int64)
    accesses = 0
    for event in range(len(event_layer)):
        layer = event_layer[event]
        base = layer_first_object[layer]
        num_experts = layer_first_object[layer + 1] - base
        for row in range(event_first_row[event], event_first_row[event + 1]):
            for rank in range(expert_ids.shape[1]):
                expert = expert_ids[row, rank]
                if expert >= num_experts or row_seen[base + expert] == row:
                    return row, accesses
                if row_seen[base + expert] < event_first_row[event]:
                    accesses += 1
                row_seen[base + expert] = row
    return -1, accesses


@dataclass(frozen=True)
class Walk:
    """Accesses of selected events in the order a simulation walks them.

    objects: (A,) int32; first_access: (N + 1,) offsets into objects; layer, step, phase: (N,) of each event, step
    counted from 0 over the selection.
    """

    objects: npt.NDArray[np.int32]
    first_access: IntArray
    layer: npt.NDArray[np.int32]
    step: IntArray
    phase: npt.NDArray[np.int8]
    selections: IntArray
    order: str
    dedup: str

    @property
    def num_events(self) -> int:
        return len(self.layer)


def events_of_phase(trace: Trace, phase: str) -> npt.NDArray[np.bool_]:
    """(N,) whether an event is of `phase`; `all` is every event but those of warm-up, which no phase holds."""
    if phase not in SCORED_PHASES:
        raise ValueError(f"phase {phase!r}, wanted one of {', '.join(SCORED_PHASES)}")
    is_of_phase: npt.NDArray[np.bool_] = (
        trace.event_phase != PHASE_CODES["warmup"] if phase == "all" else trace.event_phase == PHASE_CODES[phase]
    )
    return is_of_phase


def steps_without_warmup(trace: Trace) -> npt.NDArray[np.int64]:
    """The step_ids that count as steps of a replay, ascending: all but those of warm-up events alone."""
    return np.unique(trace.event_step[trace.event_phase != PHASE_CODES["warmup"]])


def walk(trace: Trace, step_begin: int, step_end: int, *, order: str, dedup: str = "union", seed: int = 0) -> Walk:
    """The accesses of steps `[step_begin, step_end)`, counted without warm-up steps; warm-up events are left out.

    `order` is that of accesses inside an event: `router` (row by row, rank by rank, first mention), `ascending` or
    `descending` ids, or `random` (seeded). Under dedup `none` every selection is an access.
    """
    if order not in ACCESS_ORDERS:
        raise ValueError(f"order {order!r}, wanted one of {', '.join(ACCESS_ORDERS)}")
    steps = steps_without_warmup(trace)[step_begin:step_end]
    selected = trace.event_phase != PHASE_CODES["warmup"]
    if len(steps):
        selected &= (trace.event_step >= steps[0]) & (trace.event_step <= steps[-1])
    else:
        selected[:] = False
    events = np.flatnonzero(selected)
    objects, first_access = _walk_events(
        events,
        trace.expert_ids,
        trace.event_first_row,
        trace.event_layer,
        trace.layer_first_object,
        ACCESS_ORDERS.index(order),
        dedup == "none",
        seed,
    )
    rows = trace.event_first_row[events + 1] - trace.event_first_row[events]
    return Walk(
        objects=objects,
        first_access=first_access,
        layer=trace.event_layer[events],
        step=np.searchsorted(steps, trace.event_step[events]).astype(np.int64),
        phase=trace.event_phase[events],
        selections=(rows * trace.top_k).astype(np.int64),
        order=order,
        dedup=dedup,
    )


_ASCENDING, _DESCENDING, _RANDOM = (ACCESS_ORDERS.index(name) for name in ("ascending", "descending", "random"))


@numba.njit(cache=True)
def _walk_events(  # type: ignore[no-untyped-def]
    events, expert_ids, event_first_row, event_layer, layer_first_object, order, keep_repeats, seed
):
    np.random.seed(seed)
    top_k = expert_ids.shape[1]
    upper = 0
    for event in events:
        upper += (event_first_row[event + 1] - event_first_row[event]) * top_k
    objects = np.empty(upper, dtype=np.int32)
    first_access = np.empty(len(events) + 1, dtype=np.int64)
    seen_in = np.full(layer_first_object[-1], -1, dtype=np.int64)
    end = 0
    for ordinal in range(len(events)):
        event = events[ordinal]
        first_access[ordinal] = end
        start = end
        base = layer_first_object[event_layer[event]]
        for row in range(event_first_row[event], event_first_row[event + 1]):
            for rank in range(top_k):
                expert = base + expert_ids[row, rank]
                if keep_repeats or seen_in[expert] != ordinal:
                    seen_in[expert] = ordinal
                    objects[end] = expert
                    end += 1
        if order in (_ASCENDING, _DESCENDING):
            objects[start:end].sort()
        if order == _DESCENDING:
            objects[start:end] = objects[start:end][::-1].copy()
        if order == _RANDOM:
            for last in range(end - 1, start, -1):
                other = start + np.random.randint(0, last - start + 1)
                objects[last], objects[other] = objects[other], objects[last]
    first_access[len(events)] = end
    return objects[:end].copy(), first_access


def repeat_twice(once: Walk) -> Walk:
    """The walk followed by itself: a warm pass, then the pass that is scored."""
    return Walk(
        objects=np.concatenate([once.objects, once.objects]),
        first_access=np.concatenate([once.first_access, once.first_access[1:] + once.first_access[-1]]),
        layer=np.concatenate([once.layer, once.layer]),
        step=np.concatenate([once.step, once.step]),
        phase=np.concatenate([once.phase, once.phase]),
        selections=np.concatenate([once.selections, once.selections]),
        order=once.order,
        dedup=once.dedup,
    )
