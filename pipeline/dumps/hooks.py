"""Routes as research scripts write them, record by record: JSONL, CSV and Parquet of hooks on the router.

Every layout here was read from a published file or from the script that writes it; each parser's docstring names its
columns. Records come in batches of columns in recorded order; what begins a step differs by layout, the rest does not.

Letters: R records of a batch, K experts per record, T tokens, L layers.
"""

import csv
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    NoTrace,
    ParsedDump,
    RefusedDump,
    RowBlock,
    Sample,
    first_bad_line,
    is_integer,
    json_fault,
    read_line,
)
from pipeline.dumps.jsonl import batches as json_batches
from pipeline.dumps.sequences import Sequences
from schemas.trace import MAX_TOP_K, PHASE_CODES, CheckRecord

Columns = dict[str, npt.NDArray[Any]]

BLOCK_BYTES = 4 * 1024 * 1024
MAX_STEP_ROWS = 2**22
"""Most rows of one step, which stays whole in memory."""
PROBABILITY_TOLERANCE = 0.01
"""How far a probability may lie above 1: it may have been rounded to bfloat16."""
MAX_REQUESTS = 2**20
"""Most different requests whose names are remembered."""
MAX_SPOOLED_ROWS = 2**32 - 1
"""Most rows whose places are remembered, 4 bytes each."""

_UNKNOWN = PHASE_CODES["unknown"]


# Records, whatever the layout


@dataclass
class _Steps:
    """Cuts batches of columns into blocks of whole steps.

    `begins(columns)` says, for every row but the first, whether a step begins at it; the first row given is the last
    one of the batch before.
    """

    path: Path
    begins: Callable[[Columns], npt.NDArray[np.bool_]]
    steps: int = 0
    _held: list[Columns] = field(default_factory=list)
    _held_rows: int = 0
    _last: Columns | None = None

    def blocks(self, batches: Iterator[Columns]) -> Iterator[Columns]:
        """Columns of whole steps with `step` added, of about ROWS_PER_BLOCK rows."""
        for columns in batches:
            rows = len(columns["layer"])
            if not rows:
                continue
            if self._last is None:
                first = np.concatenate([[True], self.begins(columns)])
            else:
                joined = {name: np.concatenate([self._last[name], values]) for name, values in columns.items()}
                first = self.begins(joined)
            self._last = {name: values[-1:] for name, values in columns.items()}
            columns = columns | {"first": first}
            starts = np.flatnonzero(first)
            # The last step may go on in the next batch.
            cut = int(starts[-1]) if len(starts) else 0
            if cut:
                self._held.append({name: values[:cut] for name, values in columns.items()})
                self._held_rows += cut
            if (cut or (len(starts) and self._held)) and self._held_rows >= ROWS_PER_BLOCK // 2:
                yield self._taken()
            self._held.append({name: values[cut:] for name, values in columns.items()})
            self._held_rows += rows - cut
            if self._held_rows > MAX_STEP_ROWS + ROWS_PER_BLOCK:
                raise MalformedDump(
                    f"{self.path}: over {MAX_STEP_ROWS:,} rows in one forward pass; is a column mistaken for the step?"
                )
        if self._held:
            yield self._taken()

    def _taken(self) -> Columns:
        columns = {name: np.concatenate([held[name] for held in self._held]) for name in self._held[0]}
        columns["step"] = self.steps + np.cumsum(columns.pop("first"), dtype=np.int64) - 1
        self.steps = int(columns["step"][-1]) + 1
        self._held, self._held_rows = [], 0
        # A pass that ran token by token inside one step is put together layer by layer, as events are.
        order = np.lexsort((columns["layer"], columns["step"]))
        if (np.diff(order) != 1).any():
            columns = {name: values[order] for name, values in columns.items()}
        return columns


def _row_block(columns: Columns) -> RowBlock:
    rows = len(columns["step"])
    return RowBlock(
        step=columns["step"],
        pass_in_step=np.zeros(rows, dtype=np.int32),
        layer=columns["layer"].astype(np.int32),
        request=columns["request"].astype(np.int64) if "request" in columns else np.zeros(rows, dtype=np.int64),
        position=columns["position"].astype(np.int64) if "position" in columns else None,
        phase=columns["phase"] if "phase" in columns else np.full(rows, _UNKNOWN, dtype=np.int8),
        expert_ids=np.ascontiguousarray(columns["ids"], dtype=np.int32),
        weights=columns.get("weights"),
    )


def _id_matrix(lists: pa.ListArray, top_k: int) -> npt.NDArray[np.int32] | None:
    """(R, K), or null where a list is missing, of another length, or holds a null."""
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    ids = lists.flatten()
    if lists.null_count or ids.null_count or not (lengths == top_k).all():
        return None
    matrix: npt.NDArray[np.int32] = ids.to_numpy(zero_copy_only=False).reshape(-1, top_k)
    return matrix


def _weight_matrix(lists: pa.ListArray, top_k: int) -> npt.NDArray[np.float32] | None:
    """(R, K), NaN where a list is missing or empty; null where one is of another length or holds a null."""
    lengths = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    values = lists.flatten()
    if values.null_count or not ((lengths == top_k) | (lengths == 0)).all():
        return None
    weights = np.full((len(lists), top_k), np.nan, dtype=np.float32)
    weights[lengths == top_k] = values.to_numpy(zero_copy_only=False).reshape(-1, top_k)
    return weights


def _has_nulls(batch: pa.RecordBatch, *names: str) -> bool:
    return any(batch.column(name).null_count for name in names)


def _whole(value: object, limit: int) -> bool:
    return is_integer(value) and 0 <= value < limit  # type: ignore[operator]


def _ids_fault(value: object, key: str, top_k: int) -> str | None:
    if not isinstance(value, list) or not all(is_integer(expert) and abs(expert) < 2**31 for expert in value):
        return f"{key} is {value!r:.80}, wanted a list of whole numbers"
    if len(value) != top_k:
        return f"{key} has {len(value)} ids, wanted {top_k}"
    return None


def _are_probabilities(values: pa.Array) -> bool:
    numbers = values.to_numpy(zero_copy_only=False)
    # What is no number is unknown.
    return not bool(((numbers < 0) | (numbers > 1 + PROBABILITY_TOLERANCE)).any())


def _probabilities_fault(value: object, key: str, top_k: int) -> str | None:
    fault = _weights_fault(value, key, top_k)
    if fault is not None or not isinstance(value, list):
        return fault
    wrong = [number for number in value if number < 0 or number > 1 + PROBABILITY_TOLERANCE]
    return f"{key} holds {wrong[0]!r:.40}, wanted probabilities of 0 to 1" if wrong else None


def _weights_fault(value: object, key: str, top_k: int) -> str | None:
    if value is None or value == []:
        return None
    numbers = isinstance(value, list) and all(
        isinstance(weight, int | float) and not isinstance(weight, bool) for weight in value
    )
    if not numbers or len(value) != top_k:  # type: ignore[arg-type]
        return f"{key} is {value!r:.80}, wanted {top_k} numbers or none"
    return None


class _Names:
    """Numbers for the names of requests, in the order in which they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.numbers: dict[object, int] = {}

    def of(self, names: pa.Array) -> npt.NDArray[np.int64]:
        encoded = names.dictionary_encode()
        try:
            distinct = encoded.dictionary.to_pylist()
        except UnicodeDecodeError as error:
            raise MalformedDump(f"{self.path}: a request's name is no UTF-8 ({error}); copy the dump again") from None
        for name in distinct:
            self.numbers.setdefault(name, len(self.numbers))
        if len(self.numbers) > MAX_REQUESTS:
            raise MalformedDump(f"{self.path}: over {MAX_REQUESTS:,} different requests; is another column meant?")
        table = np.array([self.numbers[name] for name in distinct], dtype=np.int64)
        numbers: npt.NDArray[np.int64] = table[encoded.indices.to_numpy(zero_copy_only=False)]
        return numbers


def _first_records(dump: DumpFile, count: int) -> list[dict[str, Any]]:
    """The first objects of a JSONL file."""
    stream, number = dump.stream(), 0
    found: list[dict[str, Any]] = []
    while len(found) < count and (line := read_line(stream, dump.path, number + 1)):
        number += 1
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise MalformedDump(f"{dump.path}, line {number}: no JSON object: is the dump truncated?")
            found.append(value)
    return found


def _width(path: Path, ids: object, key: str, line: int) -> int:
    if not isinstance(ids, list) or not 0 < len(ids) <= MAX_TOP_K:
        raise MalformedDump(f"{path}, line {line}: {key} is {ids!r:.80}, wanted the ids of 1 to {MAX_TOP_K} experts")
    return len(ids)


# JSONL with a metadata line: `moe-cache-lab.routing-jsonl`

_ROUTING_FORMAT = "moe-cache-lab.routing-jsonl"
_PHASES = {"prompt": PHASE_CODES["prefill"], "generated": PHASE_CODES["decode"]}


def parse_routing_selections(dump: DumpFile, asked: Asked) -> ParsedDump:
    """A metadata line {record_type: metadata, format, format_version: 1, model_id, num_experts, experts_per_token},
    then {record_type: routing_selection, phase, token_position, token_id, layer, selected_experts,
    selected_probabilities}.

    The prompt stands layer by layer and is one pass; generated tokens stand token by token, a pass each. One request.

    Raises:
        RefusedDump: version 2, whose encoder and decoder number their layers alike. MalformedDump: no metadata line, a
        line that is no such record, a prompt record after a generated one.
    """
    records = _first_records(dump, 2)
    said = records[0]
    if said.get("record_type") != "metadata":
        raise MalformedDump(f"{dump.path}, line 1: no metadata record; is the beginning of the dump missing?")
    if said.get("format_version") != 1:
        raise RefusedDump(
            f"{dump.path}: {_ROUTING_FORMAT} of version {said.get('format_version')!r:.20}; wanted version 1: "
            "later ones hold encoder and decoder stages, whose layers have the same numbers"
        )
    if len(records) < 2:
        raise MalformedDump(f"{dump.path}: a metadata line and no route: was the recorder stopped before it wrote any?")
    counts: dict[str, int | None] = {}
    for key in ("num_experts", "experts_per_token"):
        value = said.get(key)
        if value is not None and not (is_integer(value) and 0 < value < 2**31):
            raise MalformedDump(f"{dump.path}, line 1: {key} is {str(value)[:40]!r}, wanted a positive whole number")
        counts[key] = value
    top_k = counts["experts_per_token"] or _width(dump.path, records[1].get("selected_experts"), "selected_experts", 2)
    texts = {key: said[key] if isinstance(said.get(key), str) else None for key in ("model_id", "capture_method")}
    version = said.get("transformers_version")
    return ParsedDump(
        format="routing_selection_jsonl",
        blocks=_selection_blocks(dump, top_k),
        top_k=top_k,
        model=texts["model_id"],
        engine=f"transformers {version}" if isinstance(version, str) else None,
        capture_method=texts["capture_method"],
        num_experts=counts["num_experts"],
        top_k_model=counts["experts_per_token"],
        id_space="logical",
    )


def _selection_blocks(dump: DumpFile, top_k: int) -> Iterator[RowBlock]:
    schema = pa.schema(
        [
            ("record_type", pa.string()), ("phase", pa.string()), ("token_position", pa.int64()),
            ("layer", pa.int64()), ("selected_experts", pa.list_(pa.int32())),
            ("selected_probabilities", pa.list_(pa.float32())),
        ]
    )  # fmt: skip

    def fault(value: object) -> str | None:
        if not isinstance(value, dict) or value.get("record_type") != "routing_selection":
            return "wanted a record of record_type routing_selection"
        if not isinstance(value.get("phase"), str) or value["phase"] not in _PHASES:
            return f"phase is {str(value.get('phase'))[:40]!r}, wanted prompt or generated"
        for key, limit in (("token_position", 2**32), ("layer", 2**16)):
            if not _whole(value.get(key), limit):
                return f"{key} is {str(value.get(key))[:40]!r}, wanted a whole number below {limit}"
        return _ids_fault(value.get("selected_experts"), "selected_experts", top_k) or _probabilities_fault(
            value.get("selected_probabilities"), "selected_probabilities", top_k
        )

    def batches() -> Iterator[Columns]:
        metadata_rows = 1
        for batch in json_batches(dump, schema, lambda value: None if _is_metadata(value) else fault(value)):
            batch, metadata_rows = batch.slice(metadata_rows), 0
            ids = _id_matrix(batch.column("selected_experts"), top_k)
            weights = _weight_matrix(batch.column("selected_probabilities"), top_k)
            sound = ids is not None and weights is not None and not _has_nulls(batch, *schema.names[:4])
            if sound:
                layer, position = batch.column("layer").to_numpy(), batch.column("token_position").to_numpy()
                phases = np.full(batch.num_rows, -1, dtype=np.int8)
                for name, code in _PHASES.items():
                    phases[pc.equal(batch.column("phase"), name).to_numpy(zero_copy_only=False)] = code
                sound = _are_probabilities(batch.column("selected_probabilities").flatten()) and bool(
                    pc.all(pc.equal(batch.column("record_type"), "routing_selection")).as_py() is not False
                    and (phases >= 0).all()
                    and (layer >= 0).all()
                    and (layer < 2**16).all()
                    and (position >= 0).all()
                    and (position < 2**32).all()
                )
            if not sound or ids is None or weights is None:
                raise first_bad_line(dump, lambda line: json_fault(line, fault), skip_lines=1)
            yield {"layer": layer, "position": position, "phase": phases, "ids": ids, "weights": weights}

    decode = _PHASES["generated"]

    def begins(columns: Columns) -> npt.NDArray[np.bool_]:
        phase, position, layer = columns["phase"], columns["position"], columns["layer"]
        if (np.diff(phase) < 0).any():
            row = int(np.flatnonzero(np.diff(phase) < 0)[0]) + 1
            raise MalformedDump(
                f"{dump.path}: a prompt record (position {position[row]}) after generated ones; one file holds one "
                "prompt and what was generated after it"
            )
        prompt = (phase[1:] != decode) & (phase[:-1] != decode)
        backwards = prompt & ((np.diff(layer) < 0) | ((np.diff(layer) == 0) & (np.diff(position) <= 0)))
        if backwards.any():
            row = int(np.flatnonzero(backwards)[0]) + 1
            raise MalformedDump(
                f"{dump.path}: layer {layer[row]}, position {position[row]} of the prompt after layer "
                f"{layer[row - 1]}, position {position[row - 1]}; wanted the prompt layer by layer, positions ascending"
            )
        starts: npt.NDArray[np.bool_] = (np.diff(phase) != 0) | ((phase[1:] == decode) & (np.diff(position) != 0))
        return starts

    for columns in _Steps(dump.path, begins).blocks(batches()):
        yield _row_block(columns)


def _is_metadata(value: object) -> bool:
    return isinstance(value, dict) and value.get("record_type") == "metadata"


def _is_routing_selections(sample: Sample) -> bool:
    kind = sample.field("record_type")
    return (kind == "metadata" and sample.field("format") == _ROUTING_FORMAT) or (
        kind == "routing_selection" and isinstance(sample.field("selected_experts"), list)
    )


# Strict JSONL 1.0.0

_STRICT = ("schema_version", "request_id", "forward_id", "hook_order", "token_index", "layer_id", "selected_expert_ids")


def parse_strict(dump: DumpFile, asked: Asked) -> ParsedDump:
    """{schema_version: "1.0.0", request_id, conversation_id, turn_index, phase, forward_id, hook_order, token_index,
    token_id, layer_id, selected_expert_ids, selected_expert_weights, observed_at_ns}, a line per token and layer.

    A step is a `forward_id` of one turn of one conversation; `token_index` is the place in the turn. The recorder asks
    llama.cpp for the top-k tensor, which is known to change the graph and with it the generated tokens.

    Raises:
        RefusedDump: another schema_version. MalformedDump: a line that is no such record, or records out of order.
    """
    first = _first_records(dump, 1)[0]
    if first.get("schema_version") != "1.0.0":
        raise RefusedDump(
            f"{dump.path}: schema_version {str(first.get('schema_version'))[:40]!r} of the strict route JSONL; "
            'known: "1.0.0"'
        )
    top_k = _width(dump.path, first.get("selected_expert_ids"), "selected_expert_ids", 1)
    parsed = ParsedDump(format="strict_route_jsonl", blocks=iter(()), top_k=top_k, requests_named=True)
    parsed.blocks = _strict_blocks(dump, top_k)
    parsed.checks.append(
        CheckRecord(
            name="capture left the tokens alone",
            outcome="warn",
            wanted="the same tokens with and without the recorder",
            found="the dump does not say; asking for the top-k tensor in the eval callback has changed tokens",
        )
    )
    return parsed


def _strict_blocks(dump: DumpFile, top_k: int) -> Iterator[RowBlock]:
    numbers = {"forward_id": 2**62, "hook_order": 2**62, "token_index": 2**32, "layer_id": 2**16}
    texts = ("schema_version", "request_id", "conversation_id", "phase")
    schema = pa.schema(
        [
            *((name, pa.string()) for name in texts),
            ("turn_index", pa.int64()),
            *((name, pa.int64()) for name in numbers),
            ("selected_expert_ids", pa.list_(pa.int32())),
            ("selected_expert_weights", pa.list_(pa.float32())),
        ]
    )
    phases = {"prefill": PHASE_CODES["prefill"], "decode": PHASE_CODES["decode"]}

    def fault(value: object) -> str | None:
        if not isinstance(value, dict):
            return "wanted an object"
        if value.get("schema_version") != "1.0.0":
            return f"schema_version is {str(value.get('schema_version'))[:40]!r}, wanted '1.0.0'"
        if not isinstance(value.get("request_id"), str):
            return f"request_id is {str(value.get('request_id'))[:40]!r}, wanted a text"
        if not isinstance(value.get("conversation_id"), str | None):
            return f"conversation_id is {str(value.get('conversation_id'))[:40]!r}, wanted a text"
        if not isinstance(value.get("phase"), str) or value["phase"] not in phases:
            return f"phase is {str(value.get('phase'))[:40]!r}, wanted prefill or decode"
        for key, limit in numbers.items():
            if not _whole(value.get(key), limit):
                return f"{key} is {str(value.get(key))[:40]!r}, wanted a whole number below {limit}"
        if value.get("turn_index") is not None and not _whole(value["turn_index"], 2**31):
            return f"turn_index is {str(value['turn_index'])[:40]!r}, wanted a whole number"
        return _ids_fault(value.get("selected_expert_ids"), "selected_expert_ids", top_k) or _weights_fault(
            value.get("selected_expert_weights"), "selected_expert_weights", top_k
        )

    names = _Names(dump.path)

    def batches() -> Iterator[Columns]:
        for batch in json_batches(dump, schema, fault):
            ids = _id_matrix(batch.column("selected_expert_ids"), top_k)
            weights = _weight_matrix(batch.column("selected_expert_weights"), top_k)
            needed = ("schema_version", "request_id", "phase", *numbers)
            sound = ids is not None and weights is not None and not _has_nulls(batch, *needed)
            if sound:
                values = {name: batch.column(name).to_numpy() for name in numbers}
                phase = np.full(batch.num_rows, -1, dtype=np.int8)
                for name, code in phases.items():
                    phase[pc.equal(batch.column("phase"), name).to_numpy(zero_copy_only=False)] = code
                turn = pc.fill_null(batch.column("turn_index"), 0).to_numpy()
                sound = bool(
                    pc.all(pc.equal(batch.column("schema_version"), "1.0.0")).as_py() is not False
                    and (phase >= 0).all()
                    and ((turn >= 0) & (turn < 2**31)).all()
                    and all(((values[name] >= 0) & (values[name] < limit)).all() for name, limit in numbers.items())
                )
            if not sound or ids is None or weights is None:
                raise first_bad_line(dump, lambda line: json_fault(line, fault))
            who = pc.binary_join_element_wise(
                pc.fill_null(batch.column("conversation_id"), ""), batch.column("request_id"),
                pc.cast(pc.fill_null(batch.column("turn_index"), 0), pa.string()), "\x1f",
            )  # fmt: skip
            yield {
                "layer": values["layer_id"], "position": values["token_index"], "forward": values["forward_id"],
                "hook": values["hook_order"], "request": names.of(who), "phase": phase, "ids": ids, "weights": weights,
            }  # fmt: skip

    def begins(columns: Columns) -> npt.NDArray[np.bool_]:
        same = np.diff(columns["request"]) == 0
        for name, column in (("forward_id", columns["forward"]), ("hook_order", columns["hook"])):
            back = same & (np.diff(column) < 0)
            if back.any():
                row = int(np.flatnonzero(back)[0]) + 1
                raise MalformedDump(
                    f"{dump.path}: {name} {column[row]} after {column[row - 1]} in one turn (layer "
                    f"{columns['layer'][row]}, token_index {columns['position'][row]}); records must stand in the "
                    "order in which they were observed"
                )
        starts: npt.NDArray[np.bool_] = ~same | (np.diff(columns["forward"]) != 0)
        return starts

    for columns in _Steps(dump.path, begins).blocks(batches()):
        yield _row_block(columns)


def _is_strict(sample: Sample) -> bool:
    return isinstance(sample.value, dict) and set(_STRICT) <= set(sample.value)


# JSONL of whole sequences: allenai/analysis_mixtral


def parse_exp_ids(dump: DumpFile, asked: Asked) -> ParsedDump:
    """{input_ids, predicted_token_ids, exp_ids: [tokens, k, layers]}, a line per sequence of a teacher-forced text.

    The order of the axes is checked, not believed: experts of one token and layer differ along the k axis, and the same
    must not hold along the other one. `--meta top_k_model=K` decides where both do.

    Raises:
        RefusedDump: the axes cannot be told apart. MalformedDump: a line that is no such sequence, or one of another
        shape.
    """
    shape, along = _axes(dump, asked.user.top_k_model)
    top_k, layers = shape if along == 1 else shape[::-1]
    if top_k > MAX_TOP_K or layers > 2**16:
        raise MalformedDump(f"{dump.path}, line 1: {top_k} experts per token in {layers} layers; are they scores?")
    return ParsedDump(
        format="exp_ids_jsonl",
        blocks=_sequence_blocks(dump, shape, along),
        top_k=top_k,
        capture_method="teacher-forced text, one sequence per line",
        layers_are_ordinals=True,
        pass_boundaries="assumed_per_token",
    )


def _axes(dump: DumpFile, top_k: int | None) -> tuple[tuple[int, int], int]:
    """((second, third axis), which of them is k: 1 or 2) by the first sequence."""
    ids = _sequence(dump, _first_records(dump, 1)[0], 1)
    shape = (ids.shape[1], ids.shape[2])
    fits = [axis for axis in (1, 2) if _distinct_along(ids, axis)]
    if top_k is not None:
        said = [axis for axis in (1, 2) if shape[axis - 1] == top_k]
        if not said:
            raise MalformedDump(
                f"{dump.path}, line 1: exp_ids is shaped {list(ids.shape)}, so neither axis is top_k_model = {top_k}"
            )
        fits = [axis for axis in fits if axis in said] or said
    if fits == [1] or (fits == [2] and top_k is not None):
        return shape, fits[0]
    if fits == [2]:
        raise RefusedDump(
            f"{dump.path}, line 1: exp_ids is shaped {list(ids.shape)}, wanted [tokens, k, layers], but ids repeat "
            f"along the k axis; if it is [tokens, layers, k], say --meta top_k_model={shape[1]}"
        )
    if not fits:
        raise MalformedDump(
            f"{dump.path}, line 1: ids repeat along both axes of exp_ids {list(ids.shape)}; a router picks different "
            "experts: are these counts?"
        )
    raise RefusedDump(
        f"{dump.path}, line 1: exp_ids is shaped {list(ids.shape)}, and either axis may be k; say --meta top_k_model=K"
    )


def _distinct_along(ids: npt.NDArray[np.int64], axis: int) -> bool:
    return ids.shape[axis] == 1 or bool((np.diff(np.sort(ids, axis=axis), axis=axis) != 0).all())


def _sequence(dump: DumpFile, record: object, line: int) -> npt.NDArray[np.int64]:
    """(T, a, b) ids of one line."""
    where = f"{dump.path}, line {line}"
    if not isinstance(record, dict) or not {"input_ids", "exp_ids"} <= set(record):
        raise MalformedDump(f"{where}: wanted an object with input_ids and exp_ids")
    try:
        ids = np.array(record["exp_ids"])
    except (ValueError, OverflowError):
        raise MalformedDump(f"{where}: exp_ids is ragged; wanted [tokens, k, layers], equally long lists") from None
    if ids.ndim != 3 or ids.dtype.kind != "i" or 0 in ids.shape or np.abs(ids).max() >= 2**31:
        raise MalformedDump(
            f"{where}: exp_ids is {ids.dtype} shaped {list(ids.shape)}, wanted whole numbers [tokens, k, layers]"
        )
    tokens = record["input_ids"]
    if not isinstance(tokens, list) or len(tokens) != len(ids):
        found = len(tokens) if isinstance(tokens, list) else "no list of"
        raise MalformedDump(f"{where}: {found} input_ids, but exp_ids of {len(ids)} tokens; record again")
    return ids


def _sequence_blocks(dump: DumpFile, shape: tuple[int, int], along: int) -> Iterator[RowBlock]:
    layers = shape[1] if along == 1 else shape[0]
    sequences = Sequences(range(layers))
    stream, number, request = dump.stream(), 0, 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if not line.strip():
            continue
        record: list[object] = []

        def keep(value: object, record: list[object] = record) -> None:
            record.append(value)

        fault = json_fault(line, keep)
        if fault is not None:
            last = not stream.peek(1)
            hint = "; it is the last line: the dump is truncated, copy or record it again" if last else ""
            raise MalformedDump(f"{dump.path}, line {number}: {fault}{hint}")
        ids = _sequence(dump, record[0], number)
        if ids.shape[1:] != shape:
            raise MalformedDump(
                f"{dump.path}, line {number}: exp_ids is shaped {list(ids.shape)}, the first line's "
                f"{['tokens', *shape]}; one dump has one model"
            )
        routes = (ids.transpose(0, 2, 1) if along == 1 else ids).astype(np.int32)
        yield from sequences.blocks(routes, request=request, positions=np.arange(len(ids), dtype=np.int64))
        request += 1


def _is_exp_ids(sample: Sample) -> bool:
    return isinstance(sample.field("exp_ids"), list) and isinstance(sample.field("input_ids"), list)


# CSV of moe-beyond

_BEYOND = ("Layer ID", "Batch Number", "Token", "Activated Expert IDs")
_BEYOND_READ = ("Layer ID", "Batch Number", "Activated Expert IDs")
_LIST = r"^\s*\[\s*[0-9]{1,9}(\s*,\s*[0-9]{1,9})*\s*\]\s*$"


def parse_beyond(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`Layer ID,Batch Number,Token,Activated Expert IDs`, ids as a quoted Python list, one row per token and layer.

    Token is the decoded text: a comma, a quote, a line end or `nan` are tokens like others, and never looked at. There
    is no position: it is the row's place among those of its layer, and rows of all layers are put together by it.
    Batch Number says nothing more: the layers must agree on it, whether it counts prompts or steps is not known.

    Raises:
        MalformedDump: a record that does not parse, layers of different length or batches.
    """
    first = next(_beyond_batches(dump, None), None)
    if first is None:
        raise MalformedDump(f"{dump.path}: a header and no route: was the recorder stopped before it wrote any?")
    top_k = first["ids"].shape[1]
    return ParsedDump(
        format="moe_beyond_csv",
        blocks=_beyond_blocks(dump, top_k, asked.spool_folder),
        top_k=top_k,
        pass_boundaries="assumed_per_token",
    )


def _beyond_batches(dump: DumpFile, top_k: int | None) -> Iterator[Columns]:
    """layer, batch (R,) and ids (R, K) in recorded order; K is that of the first record where not given."""
    try:
        reader = pacsv.open_csv(
            pa.PythonFile(dump.stream(), mode="r"),
            read_options=pacsv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
            parse_options=pacsv.ParseOptions(newlines_in_values=True),
            convert_options=pacsv.ConvertOptions(
                # Numbers as texts: Arrow reads 0x1f as 31.
                column_types=dict.fromkeys(_BEYOND_READ, pa.string()),
                include_columns=list(_BEYOND_READ),
                null_values=[],
            ),
        )
        for batch in reader:
            if not batch.num_rows:
                continue
            texts = batch.column("Activated Expert IDs")
            sound = bool(pc.all(pc.match_substring_regex(texts, _LIST)).as_py())
            if sound:
                parts = pc.split_pattern(pc.utf8_trim(texts, " []\t\r\n"), ",")
                lengths = parts.value_lengths().to_numpy()
                top_k = top_k or int(lengths[0])
                sound = bool((lengths == top_k).all()) and top_k <= MAX_TOP_K
            numbers = [pc.utf8_trim_whitespace(batch.column(name)) for name in _BEYOND_READ[:2]]
            if not all(pc.all(pc.match_substring_regex(one, r"^-?[0-9]{1,9}$")).as_py() for one in numbers):
                raise _bad_record(dump, top_k)
            layer, number = (pc.cast(one, pa.int64()).to_numpy() for one in numbers)
            sound = sound and bool(((layer >= 0) & (layer < 2**16)).all() and (np.abs(number) < 2**31).all())
            if not sound or top_k is None:
                raise _bad_record(dump, top_k)
            ids = pc.cast(pc.utf8_trim_whitespace(parts.flatten()), pa.int32()).to_numpy().reshape(-1, top_k)
            yield {"layer": layer, "batch": number, "ids": ids}
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise _bad_record(dump, top_k) from error


def _bad_record(dump: DumpFile, top_k: int | None) -> MalformedDump:
    """The error for the first record that is none: slow, and only run once something is wrong."""
    stream, number = dump.stream(), 0

    def lines() -> Iterator[str]:
        nonlocal number
        while line := read_line(stream, dump.path, number + 1):
            number += 1
            yield line.decode("utf-8", errors="replace")

    where: dict[str, int] = {}
    try:
        for record in csv.reader(lines()):
            if not record:
                continue
            if not where:
                where = {name.strip(): place for place, name in enumerate(record)}
                continue
            fault = _record_fault(record, where, top_k)
            if fault is not None:
                last = "; it is the last line: the dump is truncated, copy or record it again" * (not stream.peek(1))
                return MalformedDump(f"{dump.path}, line {number}: {fault}{last}")
            top_k = top_k or record[where["Activated Expert IDs"]].count(",") + 1
    except csv.Error as error:
        return MalformedDump(f"{dump.path}, line {number}: no CSV ({error})")
    return MalformedDump(
        f"{dump.path}: unreadable, though each of its {number} lines reads well alone; is one far longer?"
    )


def _record_fault(record: list[str], where: dict[str, int], top_k: int | None) -> str | None:
    if len(record) != len(where):
        return f"{len(record)} fields, wanted {len(where)} ({','.join(where)})"
    for name in ("Layer ID", "Batch Number"):
        if not record[where[name]].strip().isdecimal() or len(record[where[name]]) > 9:
            return f"{name} is {record[where[name]][:40]!r}, wanted a whole number"
    ids = record[where["Activated Expert IDs"]]
    try:
        listed = json.loads(ids)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not listed or not all(_whole(expert, 10**9) for expert in listed):
        return f"Activated Expert IDs is {ids[:80]!r}, wanted a list of whole numbers"
    if top_k is not None and len(listed) != top_k:
        return f"{len(listed)} ids, the first record has {top_k}"
    return None


def _beyond_blocks(dump: DumpFile, top_k: int, spool_folder: Path) -> Iterator[RowBlock]:
    # Layers may stand one after the other, so all rows are spooled and put together by their place in the layer.
    spool_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=spool_folder) as file:
        rows = 0
        places: dict[int, list[npt.NDArray[np.uint32]]] = {}
        for columns in _beyond_batches(dump, top_k):
            layer = columns["layer"]
            if rows + len(layer) > MAX_SPOOLED_ROWS:
                raise MalformedDump(f"{dump.path}: over {MAX_SPOOLED_ROWS:,} rows; split the dump")
            for number in np.unique(layer).tolist():
                places.setdefault(number, []).append((rows + np.flatnonzero(layer == number)).astype(np.uint32))
            np.concatenate([columns["batch"][:, None], columns["ids"]], axis=1).astype(np.int32).tofile(file)
            rows += len(layer)
        file.flush()
        numbers = sorted(places)
        yield from _by_layer(dump, numbers, [np.concatenate(places.pop(number)) for number in numbers], file, top_k)


def _by_layer(
    dump: DumpFile, numbers: list[int], rows_of: list[npt.NDArray[np.uint32]], file: BinaryIO, top_k: int
) -> Iterator[RowBlock]:
    """Blocks of the spooled rows [batch, ids…], token by token; `rows_of` has the rows of each layer."""
    tokens = len(rows_of[0])
    for number, rows in zip(numbers, rows_of, strict=True):
        if len(rows) != tokens:
            raise MalformedDump(
                f"{dump.path}: layer {number} has {len(rows)} tokens, layer {numbers[0]} {tokens}; there is no "
                "position to put them together by: is the dump truncated, or a row missing?"
            )
    sequences = Sequences(numbers)
    per_block = max(1, ROWS_PER_BLOCK // len(numbers))
    for begin in range(0, tokens, per_block):
        end = min(begin + per_block, tokens)
        # Mapped anew for each block, so that pages looked at do not pile up.
        stored = np.memmap(file, dtype=np.int32, mode="r", shape=(tokens * len(numbers), 1 + top_k))
        part = np.stack([stored[rows[begin:end]] for rows in rows_of], axis=1)  # (T, L, 1 + K)
        del stored
        apart = (part[:, :, 0] != part[:, :1, 0]).any(axis=1)
        if apart.any():
            token = int(np.flatnonzero(apart)[0])
            batches = sorted(set(part[token, :, 0].tolist()))[:4]
            raise MalformedDump(
                f"{dump.path}: token {begin + token} of the layers is of batches {batches}; "
                "rows of the layers do not belong together: is one missing?"
            )
        positions = np.arange(begin, end, dtype=np.int64)
        yield from sequences.blocks(part[:, :, 1:], request=0, positions=positions)


def _is_beyond(sample: Sample) -> bool:
    return set(_BEYOND) <= sample.columns and "Predicted Expert IDs" not in sample.columns


# Parquet of the KTransformers routing collector

_PARQUET = {"context_id", "token_position", "layer_id", "expert_ids", "expert_weights"}


def parse_parquet(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Parquet with context_id, token_position, layer_id, expert_ids and expert_weights (lists), a row per token and
    layer call in recorded order; beside them token_id (a counter of rows), token_category, expert_scores_all.

    A pass ends where the context changes, the layer goes back, or its positions do; with one layer every row is a step.
    Some recorders count positions inside a call: where they restart in a context, positions are unknown.

    Raises:
        MalformedDump: damaged, a column of another type, nulls, rows of different widths.
    """
    first = next(_parquet_batches(dump, sorted(_PARQUET), 1), None)
    if first is None:
        raise MalformedDump(f"{dump.path}: no row: was the recorder stopped before it wrote any?")
    widths = first.column("expert_ids").value_lengths().to_pylist()
    top_k = widths[0] or 0
    if not 0 < top_k <= MAX_TOP_K:
        raise MalformedDump(f"{dump.path}, row 0: {top_k} expert_ids, wanted 1 to {MAX_TOP_K}")
    restarts, layers = _looked_through(dump)
    parsed = ParsedDump(
        format="route_parquet",
        blocks=iter(()),
        top_k=top_k,
        pass_boundaries="recorded" if layers > 1 else "assumed_per_token",
        # Where positions say nothing, a context that stands again is not seen by them.
        requests_named=not restarts,
    )
    if restarts:
        parsed.checks.append(
            CheckRecord(
                name="positions of the sequence",
                outcome="warn",
                wanted="token_position counts on in a context",
                found=f"it goes back at {restarts} passes, so it counts inside a call; positions are left unknown",
            )
        )
    parsed.blocks = _parquet_blocks(dump, top_k, restarts > 0, layers == 1, parsed)
    return parsed


def _parquet_batches(dump: DumpFile, columns: list[str], rows: int = 16 * 1024) -> Iterator[pa.RecordBatch]:
    types = {
        "context_id": pa.types.is_string, "token_position": pa.types.is_integer, "layer_id": pa.types.is_integer,
        "expert_ids": _is_integer_list, "expert_weights": _is_float_list, "expert_scores_all": _is_float_list,
    }  # fmt: skip
    try:
        file = pq.ParquetFile(dump.raw, pre_buffer=False)
        schema = file.schema_arrow
        for name in columns:
            if not types[name](schema.field(name).type):
                raise MalformedDump(
                    f"{dump.path}: column {name} is {str(schema.field(name).type)!r:.60}, wanted texts as context_id, "
                    "whole numbers, and lists of them as expert_ids"
                )
        yield from file.iter_batches(batch_size=rows, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise MalformedDump(f"{dump.path}: truncated or damaged Parquet ({reason}); copy the dump again") from None


def _is_integer_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))


def _is_float_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_floating(kind.value_type))


def _call_columns(dump: DumpFile, batch: pa.RecordBatch, row: int, names: _Names) -> Columns:
    for name in ("context_id", "token_position", "layer_id"):
        if batch.column(name).null_count:
            at = row + int(np.flatnonzero(batch.column(name).is_null().to_numpy(zero_copy_only=False))[0])
            raise MalformedDump(f"{dump.path}, row {at}: {name} is null; leave such rows out when recording")
    layer, position = (batch.column(name).to_numpy().astype(np.int64) for name in ("layer_id", "token_position"))
    for name, values, limit in (("layer_id", layer, 2**16), ("token_position", position, 2**32)):
        if ((values < 0) | (values >= limit)).any():
            at = int(np.flatnonzero((values < 0) | (values >= limit))[0])
            raise MalformedDump(
                f"{dump.path}, row {row + at}: {name} is {values[at]}, wanted a whole number below {limit}"
            )
    return {"layer": layer, "position": position, "request": names.of(batch.column("context_id"))}


def _call_begins(columns: Columns) -> npt.NDArray[np.bool_]:
    layer = np.diff(columns["layer"])
    again = (layer == 0) & (np.diff(columns["position"]) <= 0)
    starts: npt.NDArray[np.bool_] = (np.diff(columns["request"]) != 0) | (layer < 0) | again
    return starts


def _looked_through(dump: DumpFile) -> tuple[int, int]:
    """(passes whose first position is no later than the last one of the same context, layers) of the whole file."""
    names, restarts, layers = _Names(dump.path), 0, set[int]()
    last: dict[int, int] = {}
    carried: Columns | None = None
    row = 0
    for batch in _parquet_batches(dump, ["context_id", "token_position", "layer_id"]):
        columns = _call_columns(dump, batch, row, names)
        row += batch.num_rows
        layers |= set(np.unique(columns["layer"]).tolist())
        joined = columns if carried is None else {n: np.concatenate([carried[n], v]) for n, v in columns.items()}
        begins = _call_begins(joined)
        first = np.concatenate([[True], begins]) if carried is None else begins
        for at in np.flatnonzero(first).tolist():
            request, position = int(columns["request"][at]), int(columns["position"][at])
            restarts += position <= last.get(request, -1)
            last[request] = position
        carried = {name: values[-1:] for name, values in columns.items()}
    return restarts, len(layers)


def _parquet_blocks(
    dump: DumpFile, top_k: int, positions_unknown: bool, one_layer: bool, parsed: ParsedDump
) -> Iterator[RowBlock]:
    names = _Names(dump.path)
    row = 0

    def batches() -> Iterator[Columns]:
        nonlocal row
        for batch in _parquet_batches(dump, sorted(_PARQUET)):
            columns = _call_columns(dump, batch, row, names)
            ids = _id_matrix(batch.column("expert_ids"), top_k)
            weights = _weight_matrix(batch.column("expert_weights"), top_k)
            if ids is None or weights is None:
                lengths = batch.column("expert_ids" if ids is None else "expert_weights").value_lengths().to_pylist()
                at = next((place for place, length in enumerate(lengths) if length != top_k), 0)
                raise MalformedDump(
                    f"{dump.path}, row {row + at}: {lengths[at]} values in "
                    f"{'expert_ids' if ids is None else 'expert_weights'}, wanted {top_k}, none of them null"
                )
            if np.abs(ids.astype(np.int64)).max() >= 2**31:
                raise MalformedDump(f"{dump.path}: an id beyond 31 bits among rows {row}..; record again")
            row += batch.num_rows
            yield columns | {"ids": ids.astype(np.int32), "weights": weights}

    def begins(columns: Columns) -> npt.NDArray[np.bool_]:
        return np.ones(len(columns["layer"]) - 1, dtype=np.bool_) if one_layer else _call_begins(columns)

    for columns in _Steps(dump.path, begins).blocks(batches()):
        if positions_unknown:
            del columns["position"]
        yield _row_block(columns)
    parsed.checks += _score_check(dump, top_k)


def _score_check(dump: DumpFile, top_k: int) -> list[CheckRecord]:
    """Whether the ids are those of the largest scores, in the first 16 Ki rows that have scores."""
    try:
        batch = next(_parquet_batches(dump, ["expert_ids", "expert_scores_all"]), None)
    except MalformedDump:
        return []
    if batch is None:
        return []
    scored = batch.filter(pc.is_valid(batch.column("expert_scores_all")))
    lengths = scored.column("expert_scores_all").value_lengths().to_numpy() if scored.num_rows else np.zeros(0)
    ids = _id_matrix(scored.column("expert_ids"), top_k) if scored.num_rows else None
    if ids is None or len(set(lengths.tolist())) != 1 or lengths[0] < top_k:
        return []
    scores = scored.column("expert_scores_all").flatten().to_numpy(zero_copy_only=False).reshape(len(ids), -1)
    if ids.max() >= scores.shape[1] or ids.min() < 0:
        found, agrees = f"id {ids.max()} of {scores.shape[1]} scores", False
    else:
        least = np.take_along_axis(scores, ids.astype(np.int64), axis=1).min(axis=1)
        rows = int(((scores > least[:, None]).sum(axis=1) >= top_k).sum())
        found, agrees = f"{len(ids) - rows} of {len(ids)} rows looked at", rows == 0
    return [
        CheckRecord(
            name="ids are the largest scores",
            outcome="ok" if agrees else "warn",
            wanted="no expert outside expert_ids has a larger score than one inside",
            found=found + ("" if agrees else "; a bias or groups of the router, or ids of other rows?"),
        )
    ]


def _is_route_parquet(sample: Sample) -> bool:
    return sample.head.startswith(b"PAR1") and sample.parquet_columns >= _PARQUET


LAYOUTS = (
    Layout(
        "routing_selection_jsonl",
        "JSONL metadata line, then routing_selection records",
        _is_routing_selections,
        parse_routing_selections,
    ),
    Layout("strict_route_jsonl", "strict route JSONL 1.0.0", _is_strict, parse_strict),
    Layout("exp_ids_jsonl", "JSONL {input_ids, exp_ids [tokens, k, layers]}", _is_exp_ids, parse_exp_ids),
    Layout("moe_beyond_csv", "CSV Layer ID, Batch Number, Token, Activated Expert IDs", _is_beyond, parse_beyond),
    Layout(
        "route_parquet", "Parquet context_id, token_position, layer_id, expert_ids", _is_route_parquet, parse_parquet
    ),
)

NO_TRACES = (
    NoTrace(
        lambda sample: "Predicted Expert IDs" in sample.columns,
        "a predictor's output (column `Predicted Expert IDs`), not the routes of tokens; ingest the recording that it "
        "was trained on",
    ),
    NoTrace(
        lambda sample: {"layer_id", "token_id", "expert_0"} <= sample.columns,
        "dense scores per token with layer_id 0 in every file, so which layer they are of is lost; ingest the folder "
        "of the per-layer .pt files beside it",
    ),
)
"""Look-alikes of these layouts."""
