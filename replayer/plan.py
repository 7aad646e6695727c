"""Lookahead plans: which experts somebody named for an event before it ran, and a Parquet file of that.

Anybody may write such a file: one row per target event with `event_id, issued_after_event_id, expert_ids` and, if
known, `layer_id` and `scores`. No row: nothing is said about that event; an empty list: nothing is needed. A file may
say whose it is, as key `trace_id` of its Parquet metadata. In: a file, the trace it is for; out: `Plan`. Who makes
plans belongs to the pipeline, what they are worth to `prefetch`, how they are delivered to `advice`.

Letters: N events of the trace, M ids of the plan.
"""

import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from replayer.trace import IntArray, Trace
from schemas.files import publish

BEFORE_ALL = -1
"""`Plan.issued_after` of what is known before the first event; null in a file."""

_IDS = pa.list_(pa.field("element", pa.uint16(), nullable=False))
PLAN_SCHEMA = pa.schema([
    pa.field("event_id", pa.uint32(), nullable=False),
    pa.field("issued_after_event_id", pa.uint32()),
    pa.field("layer_id", pa.uint16()),
    pa.field("expert_ids", _IDS, nullable=False),
])  # fmt: skip
"""What `write_plan` writes. Files of others may leave out `layer_id`, and have `scores` and what else they like."""

_TRACE_KEY = b"trace_id"
_NEEDED = ("event_id", "issued_after_event_id", "expert_ids")
_BATCH_ROWS = 1 << 14


class MalformedPlan(ValueError):
    """A file is no plan, or a plan does not fit its trace; says where first, what was wanted and what was found."""


@dataclass(frozen=True)
class Plan:
    """What was named for each event of a trace before it ran.

    covered: (N,) whether there is a prediction at all; issued_after: (N,) the last event before the prediction was
    made, `BEFORE_ALL` where it was known before the first, and where there is none; first_id: (N + 1,) offsets into
    expert_ids: (M,) the named experts, most wanted first, each once. A covered event without experts is a prediction
    that nothing is needed.
    """

    covered: npt.NDArray[np.bool_]
    issued_after: IntArray
    first_id: IntArray
    expert_ids: npt.NDArray[np.uint16]


def first_misfit(plan: Plan, trace: Trace) -> str | None:
    """What is first wrong with a plan for this trace, in the order of its events; null where it fits."""
    events = len(trace.event_layer)
    if not len(plan.covered) == len(plan.issued_after) == len(plan.first_id) - 1 == events:
        return f"a plan for {len(plan.covered):,} events, the trace has {events:,}"
    lengths = np.diff(plan.first_id)
    if plan.first_id[0] != 0 or plan.first_id[-1] != len(plan.expert_ids) or (lengths < 0).any():
        return "offsets that do not divide the ids of the plan among its events"
    layers = trace.metadata.moe_layer_ids
    of_id = np.repeat(np.arange(events), lengths)  # (M,)
    experts = np.diff(trace.layer_first_object)[trace.event_layer]  # (N,)
    faults: list[tuple[int, str]] = []
    if (late := np.flatnonzero(plan.covered & (plan.issued_after >= np.arange(events)))).size:
        event = int(late[0])
        faults.append((event, f"issued after event {plan.issued_after[event]}, wanted an event before its target"))
    if (early := np.flatnonzero(plan.issued_after < BEFORE_ALL)).size:
        faults.append((int(early[0]), f"issued after event {plan.issued_after[early[0]]}, wanted {BEFORE_ALL} or more"))
    if (silent := np.flatnonzero(~plan.covered & (lengths > 0))).size:
        faults.append((int(silent[0]), "experts of an event that is not covered"))
    if (beyond := np.flatnonzero(plan.expert_ids >= experts[of_id])).size:
        event = int(of_id[beyond[0]])
        faults.append((
            event,
            f"expert {plan.expert_ids[beyond[0]]}, wanted below the {experts[event]} of layer "
            f"{layers[trace.event_layer[event]]}",
        ))  # fmt: skip
    keys = of_id * (1 << 16) + plan.expert_ids
    order = np.argsort(keys, kind="stable")
    if (again := np.flatnonzero(np.diff(keys[order]) == 0)).size:
        place = order[again[0] + 1]
        faults.append((int(of_id[place]), f"expert {plan.expert_ids[place]} named twice"))
    if not faults:
        return None
    event, fault = min(faults)
    return f"event {event + trace.first_event}: {fault}"


def write_plan(path: Path, plan: Plan, trace: Trace) -> None:
    """Writes a plan for the trace; rows in the order of events.

    Raises:
        MalformedPlan: it does not fit the trace, or a file that is no plan is in the way. OSError: it cannot be
            written. An older file is untouched then.
    """
    check_replaceable(path)
    if (misfit := first_misfit(plan, trace)) is not None:
        raise MalformedPlan(f"{path}: {misfit}")
    targets = np.flatnonzero(plan.covered)
    after = plan.issued_after[targets]
    layer_ids = np.array(trace.metadata.moe_layer_ids, dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(np.diff(plan.first_id)[targets])]).astype(np.int32)
    table = pa.table(
        [
            pa.array(targets.astype(np.uint32)),
            pa.array(np.where(after < 0, 0, after).astype(np.uint32), mask=after < 0),
            pa.array(layer_ids[trace.event_layer[targets]]),
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(plan.expert_ids), type=_IDS),
        ],
        schema=PLAN_SCHEMA.with_metadata({_TRACE_KEY: trace.metadata.trace_id.encode()}),
    )
    with publish(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def check_replaceable(path: Path) -> None:
    """Refuses to write a plan over what is none; an empty file may be written over.

    Raises:
        MalformedPlan: something else is there. OSError: it cannot be read.
    """
    advice = "a plan is written over nothing but a plan; choose another name"
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        raise MalformedPlan(f"{path}: a folder, wanted the name of a file; name one in it")
    if not stat.S_ISREG(found.st_mode):
        raise MalformedPlan(f"{path}: no regular file; {advice}")
    if found.st_size == 0:
        return
    try:
        with path.open("rb") as content:
            names = pq.read_schema(content).names
    except (pa.ArrowException, UnicodeDecodeError):
        names = []
    except OSError as error:
        if error.errno is not None:
            raise
        names = []
    if not set(_NEEDED) <= set(names):
        raise MalformedPlan(f"{path}: there already, and no lookahead plan; {advice}")


def read_plan(path: Path, trace: Trace) -> Plan:
    """The plan of a file for the trace.

    Memory: 2 bytes per id, 25 per event, and as much again of a file's batch.

    Raises:
        MalformedPlan: the file is no plan or does not fit the trace; says what is first wrong. OSError: unreadable.
    """
    events = len(trace.event_layer)
    experts = np.diff(trace.layer_first_object)
    covered = np.zeros(events, dtype=bool)
    issued_after = np.full(events, BEFORE_ALL, dtype=np.int64)
    lengths = np.zeros(events, dtype=np.int64)
    rows: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint16]]] = []
    try:
        # Opened by us: the system's own words name the file, those of pyarrow are its own.
        with path.open("rb") as content, pq.ParquetFile(content) as file:
            _check_columns(path, file, events, int(experts.max(initial=0)))
            _check_trace(path, file, trace)
            columns = [name for name in (*_NEEDED, "layer_id") if name in file.schema_arrow.names]
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                targets, ids = _read_batch(path, batch, trace, covered, issued_after)
                counts = np.diff(ids[0])
                lengths[targets] = counts
                rows.append((targets, counts, ids[1]))
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        # pyarrow raises OSError for damaged content, too; only the operating system's own errors carry a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MalformedPlan(f"{path}: no Parquet file of a lookahead plan: {said}") from None
    first_id = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    expert_ids = np.empty(int(first_id[-1]), dtype=np.uint16)
    for targets, counts, values in rows:
        # Where each id goes: the start of its event, and its place within the list.
        within = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
        expert_ids[np.repeat(first_id[targets], counts) + within] = values
    plan = Plan(covered, issued_after, first_id, expert_ids)
    if (misfit := first_misfit(plan, trace)) is not None:
        raise MalformedPlan(f"{path}: {misfit}; make a plan for trace {trace.metadata.trace_id}")
    return plan


def _check_columns(path: Path, file: pq.ParquetFile, events: int, most_experts: int) -> None:
    """Refuses, before anything is decoded, what is no plan of a trace of that many events."""
    schema = file.schema_arrow
    for name in _NEEDED:
        if name not in schema.names:
            raise MalformedPlan(f"{path}: no column {name}, wanted {', '.join(_NEEDED)}; found {schema.names[:10]}")
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise MalformedPlan(f"{path}: column {name!r} is there twice, wanted once")
    for name in ("event_id", "issued_after_event_id", "layer_id"):
        # A column of nulls alone may have no type of its own.
        if name in schema.names and not _is_whole(schema.field(name).type):
            raise MalformedPlan(f"{path}: column {name} of {schema.field(name).type}, wanted integers")
    ids = schema.field("expert_ids").type
    is_list = pa.types.is_list(ids) or pa.types.is_large_list(ids) or pa.types.is_fixed_size_list(ids)
    if not (is_list and _is_whole(ids.value_type)):
        raise MalformedPlan(f"{path}: column expert_ids of {ids}, wanted lists of integers")
    metadata = file.metadata
    if metadata.num_rows > events:
        raise MalformedPlan(f"{path}: {metadata.num_rows:,} rows, wanted one per event, of which there are {events:,}")
    held = 0
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(place) for place in range(metadata.num_columns)]
        held += sum(one.num_values for one in chunks if one.path_in_schema.split(".")[0] == "expert_ids")
    if held > events * max(most_experts, 1):
        raise MalformedPlan(
            f"{path}: {held:,} expert ids, wanted at most {events:,} events × {most_experts:,} experts, each named once"
        )


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_null(kind))


def _check_trace(path: Path, file: pq.ParquetFile, trace: Trace) -> None:
    """Refuses a plan that says it is another trace's; one that says nothing is taken as it is."""
    said = (file.schema_arrow.metadata or file.metadata.metadata or {}).get(_TRACE_KEY)
    if said is not None and said != trace.metadata.trace_id.encode():
        raise MalformedPlan(
            f"{path}: a plan of trace {said.decode(errors='replace')[:80]}, wanted one of {trace.metadata.trace_id}; "
            f"make a plan for trace {trace.metadata.trace_id}"
        )


def _whole(path: Path, name: str, values: pa.Array) -> pa.Array:
    """The values as 64-bit integers."""
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid:
        most = np.iinfo(np.int64).max
        beyond = max(value for value in values.to_pylist() if value is not None)
        raise MalformedPlan(f"{path}: column {name}: {beyond}, wanted at most {most}; write ids of the trace") from None


def _read_batch(
    path: Path,
    batch: pa.RecordBatch,
    trace: Trace,
    covered: npt.NDArray[np.bool_],
    issued_after: IntArray,
) -> tuple[IntArray, tuple[IntArray, npt.NDArray[np.uint16]]]:
    """Fills in what a batch says; returns its events and, of their ids, offsets and values."""
    events = len(covered)

    def refuse(event: object, fault: str) -> MalformedPlan:
        return MalformedPlan(f"{path}: event {event}: {fault}; make a plan for trace {trace.metadata.trace_id}")

    lists = batch.column("expert_ids")
    if pa.types.is_fixed_size_list(lists.type):
        lists = lists.cast(pa.large_list(lists.type.value_type))
    if batch.column("event_id").null_count or lists.null_count or lists.flatten().null_count:
        raise MalformedPlan(
            f"{path}: nulls in event_id or expert_ids, wanted none; leave out rows of nothing predicted"
        )
    targets = _whole(path, "event_id", batch.column("event_id")).to_numpy(zero_copy_only=False) - trace.first_event
    if (outside := np.flatnonzero((targets < 0) | (targets >= events))).size:
        raise refuse(targets[outside[0]] + trace.first_event, f"the trace has {events:,} events")
    after = _whole(path, "issued_after_event_id", batch.column("issued_after_event_id"))
    issued = after.fill_null(trace.first_event + BEFORE_ALL).to_numpy(zero_copy_only=False) - trace.first_event
    if "layer_id" in batch.schema.names:
        told = _whole(path, "layer_id", batch.column("layer_id"))
        is_told = told.is_valid().to_numpy(zero_copy_only=False)
        said = told.fill_null(0).to_numpy(zero_copy_only=False)
        layers = np.array(trace.metadata.moe_layer_ids, dtype=np.int64)[trace.event_layer[targets]]
        if (other := np.flatnonzero(is_told & (said != layers))).size:
            first = other[0]
            raise refuse(
                targets[first] + trace.first_event,
                f"layer_id {said[first]}, in the trace it is of layer {layers[first]}",
            )
    ordered, counts = np.unique(targets, return_counts=True)
    twice = [*ordered[counts > 1], *ordered[covered[ordered]]]
    if twice:
        raise refuse(twice[0] + trace.first_event, "two rows, wanted one")
    values = _whole(path, "expert_ids", lists.flatten()).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))]).astype(np.int64)
    if (strange := np.flatnonzero((values < 0) | (values > np.iinfo(np.uint16).max))).size:
        event = targets[np.searchsorted(offsets, strange[0], side="right") - 1]
        raise refuse(event + trace.first_event, f"expert {values[strange[0]]}, wanted 0 to 65535")
    covered[targets] = True
    issued_after[targets] = issued
    return targets, (offsets, values.astype(np.uint16))
