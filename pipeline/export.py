"""Canonical trace → raw dump layouts that others read: the open format, and older layouts where they hold the trace.

What a layout cannot say of its rows is refused, never left out: the exported file, ingested again, gives the same rows.
Facts of the trace's metadata that a layout has no place for are named (`Exported.left_out`).

Letters: R rows of a part, K experts per row.
"""

import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from pipeline.dumps.arrays import spool
from pipeline.dumps.open_format import FORMAT, MAX_RECORD_BYTES, PARQUET_KEY, VERSION
from replayer.trace import read_metadata, trace_parts
from schemas.files import publish
from schemas.trace import TraceMetadata

_FACTS = (
    "model", "engine", "domain", "capture_method", "hidden_layers", "top_k_model", "id_space", "weight_kind",
    "expert_bytes", "num_experts", "dropped_rows", "engine_observations",
)  # fmt: skip
_ROWS_OF_A_RECORD = 1024
"""Rows of one JSON line at most: a thousand rows of 512 experts with weights stay below MAX_RECORD_BYTES."""
_ROWS_OF_A_GROUP = 128 * 1024


class CannotHold(ValueError):
    """A trace that the wanted layout has no form for; says what it cannot hold."""


@dataclass(frozen=True)
class Exported:
    """What was written. left_out names known facts of the trace's metadata that the layout has no place for."""

    rows: int
    left_out: list[str]


@dataclass(frozen=True)
class _Writer:
    description: str
    holds: tuple[str, ...]
    write: Callable[["_Source", BinaryIO], None]


class _Source:
    """A trace and its parts, each of whole steps; refusals name the trace and the layout."""

    def __init__(self, path: Path, layout: str) -> None:
        self.path, self.layout = path, layout
        self.metadata: TraceMetadata = read_metadata(path)
        self.rows = 0
        self.left_out: list[str] = []
        self._is_ascending = True
        experts = set(self.metadata.experts_per_layer)
        if len(experts) > 1:
            raise self.cannot(f"layers of {min(experts)} to {max(experts)} experts")

    @property
    def num_experts(self) -> int | None:
        return self.metadata.experts_per_layer[0] if self.metadata.num_experts_source == "declared" else None

    def cannot(self, what: str) -> CannotHold:
        return CannotHold(
            f"trace {self.metadata.trace_id}: {self.layout} cannot hold {what}; export it as open_jsonl or open_parquet"
            if not self.layout.startswith("open_")
            else f"trace {self.metadata.trace_id}: {self.layout} cannot hold {what}"
        )

    def parts(self) -> Iterator[pl.DataFrame]:
        """Parts as frames, enums as text, with pass_id: an event's place among those of its step that are of the same
        layer, phase and kind. The trace does not number passes; this tells them apart."""
        for part in trace_parts(self.path):
            frame = part.with_columns(pl.col("phase", "pass_kind").cast(pl.String))
            events = frame.group_by("event_id", maintain_order=True).agg(
                pl.col("step_id", "layer_id", "phase", "pass_kind").first()
            )
            pass_id = pl.int_range(pl.len()).over("step_id", "layer_id", "phase", "pass_kind").alias("pass_id")
            events = events.select("event_id", pass_id)
            frame = frame.join(events, on="event_id", how="left", maintain_order="left")
            self.rows += frame.height
            ids = frame["expert_ids"].to_numpy().astype(np.int32)
            self._is_ascending = self._is_ascending and bool((np.diff(ids, axis=1) > 0).all())
            yield frame

    def check_order_is_told(self) -> None:
        """For layouts that do not say whether ids are in router order: their reader takes ids out of order for it."""
        if not self.metadata.rank_known and not self._is_ascending:
            raise self.cannot("ids that are neither sorted nor in router order")

    def check_only(self, part: pl.DataFrame, column: str, value: object) -> None:
        other = part.filter(pl.col(column).ne_missing(value))
        if other.height:
            found = other[column][0]
            raise self.cannot(f"{column} {'unknown' if found is None else found} (step {other['step_id'][0]})")

    def check_empty(self, part: pl.DataFrame, column: str) -> None:
        if part[column].null_count() < part.height:
            raise self.cannot(column)

    def check_lists_of_layers(self) -> None:
        """For layouts that list layers without their numbers and steps without their passes."""
        layers = self.metadata.moe_layer_ids
        if layers != list(range(len(layers))):
            raise self.cannot(f"layer numbers ({str(layers)[:60]})")

    def check_a_token_a_step(self, part: pl.DataFrame) -> None:
        """One row an event and one event a layer in each step, no phase, one request, nothing beside the ids."""
        for column in ("router_weights", "predicted_expert_ids"):
            self.check_empty(part, column)
        for column, value in (("phase", "unknown"), ("pass_kind", "normal"), ("request_id", 0), ("row_in_event", 0)):
            self.check_only(part, column, value)
        layers = np.tile(np.arange(len(self.metadata.moe_layer_ids)), part["step_id"].n_unique())
        if not np.array_equal(part["layer_id"].to_numpy(), layers):
            raise self.cannot("steps without a row of each layer")


def export(trace: Path, layout: str, out: Path) -> Exported:
    """Writes the trace in one of FORMATS; `out` appears only when it is whole.

    Raises:
        CannotHold: the layout has no form for something in the rows. MalformedTrace: the trace is damaged.
        OSError: it cannot be written.
    """
    writer = FORMATS[layout]
    source = _Source(trace, layout)
    known = {**source.metadata.model_dump(), "num_experts": source.num_experts}
    known["dropped_rows"] = source.metadata.counts.dropped_rows
    known["weight_kind"] = None if source.metadata.weight_kind == "absent" else source.metadata.weight_kind
    with publish(out) as temporary, temporary.open("wb") as file:
        writer.write(source, file)
    lost = [name for name in _FACTS if known[name] not in (None, [], {}) and name not in writer.holds]
    if any(check.name == "positions captured" and check.outcome == "warn" for check in source.metadata.checks):
        lost.append("missing positions")
    return Exported(source.rows, [*lost, *source.left_out])


# The open format


def _header(source: _Source) -> str:
    metadata = source.metadata
    said: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "top_k": metadata.top_k_observed,
        **{name: getattr(metadata, name) for name in ("model", "engine", "domain", "capture_method", "hidden_layers")},
        "moe_layer_ids": metadata.moe_layer_ids,
        "num_experts": source.num_experts,
        "top_k_model": metadata.top_k_model,
        "expert_bytes": metadata.expert_bytes,
        "id_space": metadata.id_space,
        "weight_kind": metadata.weight_kind,
        "rank_known": metadata.rank_known,
        "dropped_rows": metadata.counts.dropped_rows or None,
    }
    if metadata.pass_boundaries != "recorded":
        said["pass_boundaries_known"] = False
    if metadata.layer_base == "assumed_from_0":
        said["layer_ids_known"] = False
    return json.dumps({name: value for name, value in said.items() if value is not None}, ensure_ascii=False)


def _check_positions(source: _Source, part: pl.DataFrame) -> None:
    known = pl.col("token_position").is_not_null()
    mixed = (
        part.group_by("step_id").agg(known.any().alias("any"), known.all().alias("all")).filter("any", ~pl.col("all"))
    )
    if mixed.height:
        raise source.cannot(f"positions of some rows of a step only (step {mixed['step_id'][0]})")


_ROW_LISTS = ("request_id", "token_position", "expert_ids", "router_weights", "predicted_expert_ids")


def _write_open_jsonl(source: _Source, file: BinaryIO) -> None:
    file.write(_header(source).encode() + b"\n")
    records = 0
    for part in source.parts():
        _check_positions(source, part)
        per_record = min(_ROWS_OF_A_RECORD, max(1, MAX_RECORD_BYTES // (64 * (source.metadata.top_k_observed + 1))))
        rows = part.with_columns(
            pl.col("expert_ids").cast(pl.List(pl.UInt16)),
            pl.col("router_weights").cast(pl.List(pl.Float32)),
            (pl.col("row_in_event") // per_record).alias("slice"),
        )
        events = rows.group_by("event_id", "slice", maintain_order=True).agg(
            pl.col("step_id", "pass_id", "phase", "pass_kind", "layer_id").first(), pl.col(*_ROW_LISTS)
        )
        for name in ("token_position", "router_weights", "predicted_expert_ids"):
            empty = pl.col(name).list.drop_nulls().list.len() == 0
            events = events.with_columns(pl.when(~empty).then(name).alias(name))
        unused = [name for name in events.columns if events[name].null_count() == events.height]
        events.drop("event_id", "slice", *unused).write_ndjson(file)
        records += events.height
    file.write(json.dumps({"end": True, "records": records}).encode() + b"\n")


def _write_open_parquet(source: _Source, file: BinaryIO) -> None:
    schema = pa.schema(
        [
            pa.field("step_id", pa.uint32(), nullable=False),
            pa.field("pass_id", pa.uint16(), nullable=False),
            pa.field("request_id", pa.uint32(), nullable=False),
            pa.field("token_position", pa.uint32()),
            pa.field("phase", pa.string(), nullable=False),
            pa.field("pass_kind", pa.string(), nullable=False),
            pa.field("layer_id", pa.uint16(), nullable=False),
            pa.field("expert_ids", pa.list_(pa.uint16()), nullable=False),
            pa.field("router_weights", pa.list_(pa.float32())),
            pa.field("predicted_expert_ids", pa.list_(pa.uint16())),
        ],
        metadata={PARQUET_KEY: _header(source).encode()},
    )
    texts = ["phase", "pass_kind", "layer_id", "expert_ids.list.element"]
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=texts) as writer:
        for part in source.parts():
            _check_positions(source, part)
            rows = part.select(schema.names).with_columns(pl.col("router_weights").cast(pl.List(pl.Float32)))
            for begin in range(0, rows.height, _ROWS_OF_A_GROUP):
                writer.write_table(rows.slice(begin, _ROWS_OF_A_GROUP).to_arrow().cast(schema))


# Layouts of others


def _write_route_csv(source: _Source, file: BinaryIO) -> None:
    metadata, top_k = source.metadata, source.metadata.top_k_observed
    if metadata.layer_base == "assumed_from_0":
        raise source.cannot("layers whose numbers are not known")
    if metadata.pass_boundaries != "recorded":
        raise source.cannot("steps that are no passes")
    facts = {
        "model": metadata.model,
        "engine": metadata.engine,
        "n_layer": metadata.hidden_layers,
        "n_expert": source.num_experts,
        "n_expert_used": top_k,
    }
    for name, lost in (("model", "/"), ("engine", "")):
        # Words are split at blanks, and of the path of a model its reader keeps the name.
        if facts[name] is not None and (
            str(facts[name]).split() != [facts[name]] or (lost and lost in str(facts[name]))
        ):
            facts[name] = None
            source.left_out.append(name)
    said = " ".join(f"{key}={value}" for key, value in facts.items() if value is not None)
    lines = ["# route_trace v1", f"# {said}"]
    sizes = metadata.expert_bytes or []
    if any(isinstance(of_layer, list) for of_layer in sizes):
        source.left_out.append("expert_bytes")
    else:
        numbered = zip(metadata.moe_layer_ids, sizes, strict=False)
        lines += [f"# layer={layer} expert_bytes={of_layer}" for layer, of_layer in numbered]
    columns = ["turn", "phase", "step", "layer", "slot", "expert", *(["weight"] if _has_weights(source.path) else [])]
    file.write(("\n".join([*lines, ",".join(columns)]) + "\n").encode())
    options = pacsv.WriteOptions(include_header=False, quoting_style="none")
    last: pl.DataFrame | None = None
    for part in source.parts():
        source.check_empty(part, "predicted_expert_ids")
        source.check_only(part, "pass_kind", "normal")
        odd = part.filter(pl.col("token_position").is_null() | ~pl.col("phase").is_in(("prefill", "decode")))
        if odd.height:
            phase = odd["phase"][0]
            what = "unknown positions" if phase in ("prefill", "decode") else f"phase {phase}"
            raise source.cannot(f"{what} (step {odd['step_id'][0]})")
        _check_steps_show(source, part if last is None else pl.concat([last, part]))
        last = part.tail(1)
        rows = part.height
        weights = part["router_weights"].cast(pl.List(pl.Float32)).to_arrow()
        values: dict[str, npt.NDArray[Any]] = {
            "turn": np.repeat(part["request_id"].to_numpy(), top_k),
            "phase": np.repeat((part["phase"] == "decode").to_numpy().astype(np.int8), top_k),
            "step": np.repeat(part["token_position"].to_numpy(), top_k),
            "layer": np.repeat(part["layer_id"].to_numpy(), top_k),
            "slot": np.tile(np.arange(top_k), rows),
            "expert": part["expert_ids"].to_numpy().reshape(-1),
        }
        if "weight" in columns:
            flat = np.full((rows, top_k), np.nan, dtype=np.float32)
            filled = weights.is_valid().to_numpy(zero_copy_only=False)
            flat[filled] = weights.flatten().to_numpy(zero_copy_only=False).reshape(-1, top_k)
            values["weight"] = flat.reshape(-1)
        pacsv.write_csv(pa.table(values), file, options)
    source.check_order_is_told()


def _has_weights(path: Path) -> bool:
    with pq.ParquetFile(path) as file:
        place = next(
            number for number in range(len(file.schema)) if file.schema.column(number).path.startswith("router_weights")
        )
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(place).statistics
            if statistics is None or statistics.num_values:
                return True
    return False


def _check_steps_show(source: _Source, part: pl.DataFrame) -> None:
    """A reader of route CSV finds steps by turn, phase, layer and, in decode, position: they must be the trace's."""
    turn, layer, place, step = (
        part[name].to_numpy().astype(np.int64) for name in ("request_id", "layer_id", "token_position", "step_id")
    )
    decode = (part["phase"] == "decode").to_numpy()
    begins = (np.diff(turn) != 0) | (np.diff(decode.astype(np.int8)) != 0) | (np.diff(layer) < 0)
    begins |= decode[1:] & (np.diff(place) != 0)
    again = ~begins & (np.diff(layer) == 0) & (np.diff(place) <= 0)
    wrong = (begins != (np.diff(step) != 0)) | again
    if wrong.any():
        raise source.cannot(
            f"steps of several requests, phases, passes or decoded tokens, or two steps that look like one (step "
            f"{step[1:][wrong][0]})"
        )


def _write_npz(source: _Source, file: BinaryIO) -> None:
    metadata, top_k = source.metadata, source.metadata.top_k_observed
    if metadata.layer_base == "recorded":
        raise source.cannot("layers whose numbers are known")
    source.check_lists_of_layers()
    layers, tokens = len(metadata.moe_layer_ids), metadata.counts.steps
    dtype = np.dtype("<i2" if metadata.experts_per_layer[0] <= 2**15 else "<i4")
    with tempfile.TemporaryDirectory() as folder:
        memory = spool(layers * tokens * top_k * dtype.itemsize, Path(folder))
    experts = np.frombuffer(memory, dtype=dtype, count=layers * tokens * top_k).reshape(layers, tokens, top_k)
    token = 0
    for part in source.parts():
        source.check_a_token_a_step(part)
        if not np.array_equal(part["token_position"].to_numpy(), part["step_id"].to_numpy()):
            raise source.cannot("positions that do not count tokens from 0")
        ids = part["expert_ids"].to_numpy().reshape(-1, layers, top_k)
        experts[:, token : token + len(ids)] = ids.transpose(1, 0, 2)
        token += len(ids)
    source.check_order_is_told()
    meta = {
        "model": metadata.model,
        "source": metadata.capture_method,
        "num_experts": source.num_experts,
        "top_k": metadata.top_k_model,
        "k": top_k,
        "n_moe_layers": layers,
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        text = np.array(json.dumps({key: value for key, value in meta.items() if value is not None}))
        for name, array in (("experts", experts), ("meta", text)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _write_token_lines(source: _Source, file: BinaryIO) -> None:
    if source.metadata.layer_base == "recorded":
        raise source.cannot("layers whose numbers are known")
    source.check_lists_of_layers()
    for part in source.parts():
        source.check_a_token_a_step(part)
        positions = part.group_by("step_id", maintain_order=True).agg(
            pl.col("token_position").first().alias("tok"),
            (pl.col("token_position").n_unique() > 1).alias("differ"),
            pl.col("expert_ids").cast(pl.List(pl.UInt16)).alias("layers"),
        )
        odd = positions.filter(pl.col("tok").is_null() | pl.col("differ"))
        if odd.height:
            raise source.cannot(f"unknown or different positions of one token (step {odd['step_id'][0]})")
        positions.select("tok", "layers").write_ndjson(file)
    source.check_order_is_told()


_OPEN_FACTS = tuple(name for name in _FACTS if name != "engine_observations")

FORMATS = {
    "open_jsonl": _Writer("the open format as JSON lines", _OPEN_FACTS, _write_open_jsonl),
    "open_parquet": _Writer("the open format as Parquet", _OPEN_FACTS, _write_open_parquet),
    "route_csv_v1": _Writer(
        "route CSV v1", ("model", "engine", "hidden_layers", "num_experts", "expert_bytes"), _write_route_csv
    ),
    "npz_experts": _Writer(
        "npz with experts [layers, tokens, k]", ("model", "capture_method", "num_experts", "top_k_model"), _write_npz
    ),
    "jsonl_tok_layers": _Writer("JSONL {tok, layers}", (), _write_token_lines),
}
"""The layouts that can be written, by the names that a trace's metadata give them."""
