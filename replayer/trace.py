"""Canonical Parquet → events: what a cache is asked for, in order, as numpy arrays.

In: a file written by the pipeline, checked against its own metadata. Out: `Trace` (rows grouped into events, in memory)
or `TraceFile` (the same, one part of whole steps at a time), and `Walk` (accesses of the selected events). What the
columns mean is in `schemas`; writing traces does not belong here.

Letters: N events, R rows, K experts per row, A accesses. An *object* is a (layer, expert) numbered
`layer_first_object[layer] + expert`, where layer is the ordinal among the trace's MoE layers.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from replayer.content import mix
from schemas.columns import ACCESS_ORDERS, SCORED_PHASES
from schemas.trace import METADATA_KEY, PASS_KIND_CODES, PHASE_CODES, SCHEMA_VERSION, TraceMetadata, arrow_schema

MAX_OBJECTS = 2**20
"""Most (layer, expert) pairs; policy kernels pack an object beside a time into one 64-bit key."""

IntArray = npt.NDArray[np.int64]


class MalformedTrace(ValueError):
    """A file that should be a canonical trace is none, or does not keep its contract."""


@dataclass(frozen=True)
class Trace:
    """A canonical trace in memory, without weights.

    event_layer: (N,) ordinal of the event's MoE layer; event_step: (N,) step_id; event_phase: (N,) code of PHASES;
    event_first_row: (N + 1,) offsets into the rows; expert_ids: (R, K) uint16; layer_first_object: (L + 1,);
    first_event: event_id of the first event, above 0 in a later part of a file; step_accepted: (S, phases) tokens
    accepted in each distinct step, ascending, by phase code; null in a trace that was put together in memory.
    """

    metadata: TraceMetadata
    event_layer: npt.NDArray[np.int32]
    event_step: npt.NDArray[np.int64]
    event_phase: npt.NDArray[np.int8]
    event_first_row: IntArray
    expert_ids: npt.NDArray[np.uint16]
    layer_first_object: IntArray
    first_event: int = 0
    step_accepted: npt.NDArray[np.int32] | None = None

    @property
    def num_objects(self) -> int:
        return int(self.layer_first_object[-1])

    @property
    def top_k(self) -> int:
        return int(self.expert_ids.shape[1])


@dataclass(frozen=True)
class TraceFile:
    """A canonical trace that stays on disk: its parts are its row groups, each of whole steps.

    steps: (S,) the step_ids that count as steps of a replay, ascending; step_accepted: (S, phases) tokens accepted in
    each of them; phases: codes that occur; part_first_event: event_id that each part begins with.
    """

    path: Path
    metadata: TraceMetadata
    layer_first_object: IntArray
    steps: IntArray
    step_accepted: npt.NDArray[np.int32]
    phases: frozenset[int]
    part_first_event: tuple[int, ...]

    @property
    def num_objects(self) -> int:
        return int(self.layer_first_object[-1])

    @property
    def top_k(self) -> int:
        return self.metadata.top_k_observed

    def part(self, number: int) -> Trace:
        """One row group as a trace."""
        try:
            with pq.ParquetFile(self.path) as file:
                table = file.read_row_group(number, _EVENT_COLUMNS)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, error) from None
        return _part_of(self.path, table, self.metadata, self.part_first_event[number])[0]


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
            table = file.read(_COLUMNS, use_threads=True)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    table = table.combine_chunks()
    trace, accesses = _part_of(path, table, metadata, 0)
    _check_counts(
        path,
        metadata,
        rows=len(trace.expert_ids),
        events=len(trace.event_layer),
        steps=len(np.unique(trace.event_step)),
        accesses=accesses,
    )
    return replace(trace, step_accepted=_by_step(_accepted_tokens(path, table), np.unique(trace.event_step)))


def open_trace(path: Path) -> TraceFile:
    """Checks a whole canonical trace part by part and keeps it on disk, for traces larger than memory.

    Memory: that of one row group, and some 60 bytes per step and request in it.

    Raises:
        MalformedTrace: the file is no canonical trace, or its rows contradict its metadata.
        OSError: it cannot be read.
    """
    metadata = read_metadata(path)
    rows = events = steps = accesses = 0
    last_step = -1
    starts, counted, accepted, phases = [], [], [], set()
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow, arrow_schema(metadata.top_k_observed))
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, _COLUMNS)
                part, unions = _part_of(path, table, metadata, events)
                accepted.append(_accepted_tokens(path, table))
                if len(part.event_step) and part.event_step[0] <= last_step:
                    raise MalformedTrace(
                        f"{path}: step {part.event_step[0]} is cut by a row group; ingest the dump again"
                    )
                starts.append(events)
                counted.append(steps_without_warmup(part))
                phases.update(np.unique(part.event_phase).tolist())
                last_step = int(part.event_step[-1]) if len(part.event_step) else last_step
                rows += len(part.expert_ids)
                events += len(part.event_layer)
                steps += len(np.unique(part.event_step))
                accesses += unions
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    _check_counts(path, metadata, rows=rows, events=events, steps=steps, accesses=accesses)
    all_steps = np.concatenate(counted) if counted else np.empty(0, dtype=np.int64)
    tokens = np.zeros((0, len(PHASE_CODES)), dtype=np.int32)
    if accepted:
        tokens = _by_step(pl.concat(accepted), all_steps)
    return TraceFile(
        path,
        metadata,
        _first_objects(metadata),
        all_steps,
        tokens,
        frozenset(phases),
        tuple(starts),
    )


READ_BYTES = 2**28
"""Rows that take more than this are read part by part instead of whole."""


def open_or_read(path: Path) -> Trace | TraceFile:
    """The trace in memory, or on disk where its rows take more than `READ_BYTES`.

    Raises:
        MalformedTrace, OSError: as `read_trace`.
    """
    metadata = read_metadata(path)
    return (
        open_trace(path) if metadata.counts.rows * (2 * metadata.top_k_observed + 25) > READ_BYTES else read_trace(path)
    )


_EVENT_COLUMNS = ["event_id", "step_id", "phase", "layer_id", "expert_ids"]
_COLUMNS = [*_EVENT_COLUMNS, "request_id", "pass_kind"]


def _check_counts(path: Path, metadata: TraceMetadata, **found: int) -> None:
    for name, number in found.items():
        if number != getattr(metadata.counts, name):
            raise MalformedTrace(
                f"{path}: {number} {name}, its metadata says {getattr(metadata.counts, name)}; ingest the dump again"
            )


def _first_objects(metadata: TraceMetadata) -> IntArray:
    return np.concatenate([[0], np.cumsum(metadata.experts_per_layer, dtype=np.int64)]).astype(np.int64)


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


def _part_of(path: Path, table: pa.Table, metadata: TraceMetadata, first_event: int) -> tuple[Trace, int]:
    """(the rows of a table as a trace whose events are numbered from `first_event` on, Σ of its events' unions)."""
    rows = table.num_rows
    for name in table.column_names:
        column = table.column(name)
        if column.null_count:
            raise MalformedTrace(
                f"{path}: column {name} has {column.null_count} nulls, wanted none; ingest the dump again"
            )
    first_object = _first_objects(metadata)
    if first_object[-1] > MAX_OBJECTS:
        raise MalformedTrace(f"{path}: {first_object[-1]} (layer, expert) pairs, at most {MAX_OBJECTS} are supported")
    event_id = _numpy(table, "event_id").astype(np.int64)
    starts = np.flatnonzero(np.diff(event_id, prepend=first_event - 1))
    if rows and (
        event_id[0] != first_event
        or not np.array_equal(event_id[starts], np.arange(first_event, first_event + len(starts)))
    ):
        raise MalformedTrace(f"{path}: event_id is not dense and ascending; ingest the dump again")
    layer_ids = np.asarray(metadata.moe_layer_ids, dtype=np.int64)
    event_layer_id = _numpy(table, "layer_id")[starts].astype(np.int64)
    event_layer = np.searchsorted(layer_ids, event_layer_id)
    if np.any(layer_ids[np.minimum(event_layer, len(layer_ids) - 1)] != event_layer_id):
        raise MalformedTrace(f"{path}: a layer_id that is not in moe_layer_ids; ingest the dump again")
    flat = table.column("expert_ids").combine_chunks()
    flat = flat.chunk(0) if isinstance(flat, pa.ChunkedArray) else flat
    expert_ids = flat.flatten().to_numpy(zero_copy_only=False).reshape(rows, metadata.top_k_observed)
    row_phase = _codes(path, table, "phase", PHASE_CODES)
    trace = Trace(
        metadata=metadata,
        event_layer=event_layer.astype(np.int32),
        event_step=_numpy(table, "step_id")[starts].astype(np.int64),
        event_phase=row_phase[starts],
        event_first_row=np.append(starts, rows).astype(np.int64),
        expert_ids=np.ascontiguousarray(expert_ids, dtype=np.uint16),
        layer_first_object=first_object,
        first_event=first_event,
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
    if np.any(row_phase != np.repeat(trace.event_phase, rows_of_event)):
        raise MalformedTrace(f"{path}: phase changes within an event; ingest the dump again")
    return trace, accesses


def _accepted_tokens(path: Path, table: pa.Table) -> pl.DataFrame:
    """Columns step, request, phase, tokens: 2 of a speculative request of a step that was accepted, else 1.

    Of a prefill there is a row for each step it takes; the token is accepted in the last one (`_by_step`).
    """
    step, request = _numpy(table, "step_id"), _numpy(table, "request_id")
    phase = _codes(path, table, "phase", PHASE_CODES)
    pass_kind = _codes(path, table, "pass_kind", PASS_KIND_CODES)
    accepts = pl.col("pass_kind") == PASS_KIND_CODES["spec_accept"]
    rows = pl.LazyFrame({"step": step, "request": request, "phase": phase, "pass_kind": pass_kind})
    counted = [PHASE_CODES[name] for name in ("decode", "unknown", "prefill")]
    is_prefill = pl.col("phase") == PHASE_CODES["prefill"]
    return (
        rows.filter(pl.col("phase").is_in(counted))
        .group_by("step", "request", "phase")
        .agg(tokens=1 + accepts.any().cast(pl.Int32))
        .with_columns(tokens=pl.when(is_prefill).then(1).otherwise(pl.col("tokens")))
        .collect()
    )


def _by_step(accepted: pl.DataFrame, steps: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
    """(S, phases) tokens of each of the `steps`, ascending, from what `_accepted_tokens` gave for all of them."""
    is_last = pl.col("step") == pl.col("step").max().over("request", "phase")
    kept = accepted.filter(is_last | (pl.col("phase") != PHASE_CODES["prefill"]))
    result = np.zeros((len(steps), len(PHASE_CODES)), dtype=np.int32)
    place = np.searchsorted(steps, kept["step"].to_numpy())
    np.add.at(result, (place, kept["phase"].to_numpy()), kept["tokens"].to_numpy())
    return result


def _numpy(table: pa.Table, name: str) -> npt.NDArray[np.generic]:
    values: npt.NDArray[np.generic] = table.column(name).to_numpy()
    return values


def _codes(path: Path, table: pa.Table, name: str, code_of: dict[str, int]) -> npt.NDArray[np.int8]:
    # Dictionaries may differ between row groups and files; unify, then map names to our codes.
    column = table.column(name).unify_dictionaries().combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    to_code = np.array([code_of.get(value, -1) for value in column.dictionary.to_pylist()] or [-1], dtype=np.int8)
    indices = column.indices.to_numpy(zero_copy_only=False)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(to_code):
        raise MalformedTrace(f"{path}: a damaged {name}; ingest the dump again")
    codes: npt.NDArray[np.int8] = to_code[indices]
    if codes.size and codes.min() < 0:
        raise MalformedTrace(f"{path}: a {name} outside {', '.join(code_of)}; ingest the dump again")
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
    `descending` ids, or `random` (a draw per event of its own, from the seed and the event's id). Under dedup `none`
    every selection is an access.
    """
    return walk_steps(trace, steps_without_warmup(trace)[step_begin:step_end], order=order, dedup=dedup, seed=seed)


def walk_steps(trace: Trace, steps: IntArray, *, order: str, dedup: str = "union", seed: int = 0) -> Walk:
    """The walk of the given step_ids, ascending; those that a part of a trace does not hold give no event."""
    if order not in ACCESS_ORDERS:
        raise ValueError(f"order {order!r}, wanted one of {', '.join(ACCESS_ORDERS)}")
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
        np.uint64(seed % 2**64),
        trace.first_event,
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
    events, expert_ids, event_first_row, event_layer, layer_first_object, order, keep_repeats, seed, first_event
):
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
            # Fisher and Yates; the draws depend on the event alone, so that a part walks as it would in the whole.
            drawn = seed ^ mix(np.uint64(first_event + event))
            for last in range(end - 1, start, -1):
                drawn = mix(drawn + np.uint64(0x9E3779B97F4A7C15))
                other = start + np.int64(drawn % np.uint64(last - start + 1))
                objects[last], objects[other] = objects[other], objects[last]
    first_access[len(events)] = end
    return objects[:end], first_access


def part_of_walk(whole: Walk, begin: int, end: int) -> Walk:
    """Events [begin, end) of a walk, as views."""
    first = whole.first_access[begin]
    return Walk(
        objects=whole.objects[first : whole.first_access[end]],
        first_access=whole.first_access[begin : end + 1] - first,
        layer=whole.layer[begin:end],
        step=whole.step[begin:end],
        phase=whole.phase[begin:end],
        selections=whole.selections[begin:end],
        order=whole.order,
        dedup=whole.dedup,
    )
