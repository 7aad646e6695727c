"""JSONL dumps: a token per line (`{"tok", "layers"}`), or a router pass of one layer per line (speculative decoding).

Token lines list their layers in order without numbers, have no phase and no weights. Pass lines carry a layer and one
or two tokens' ids; what a pass was for is decided later, in `pipeline.canonical`, from record width and repetition.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json as pajson

from pipeline.dumps.blocks import (
    MAX_LINE_BYTES,
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
from pipeline.dumps.repeats import TELLING_SELECTIONS
from schemas.trace import PHASE_CODES

LAYER_KEYS = ("layer", "layer_id")
EXPERT_KEYS = ("experts", "expert_ids", "indices", "ids", "topk_ids")
COUNT_KEYS = {"routed", "counts", "expert_counts", "logical_count", "expert_activation", "heatmap", "selections"}
"""Fields of records that hold counts, whatever else stands beside them."""
_OF_OTHERS = {"request_id", "req_id", "request", "rank", "phase", "num_experts", "predicted", "token", "position"}
"""Fields that say what this layout cannot hold: records of several requests or ranks are no passes of one stream."""

_EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "n_expert")
_REQUEST_KEYS = ("request_id", "req_id", "request", "req")
"""Fields of token lines that say what else they may be: how many experts there are, and whose token it is."""

BLOCK_BYTES = 4 * 1024 * 1024
_TELLING_COPIES = 4
"""Ids of a pass from which on its repetition in the same iteration is a copy: 4 ids of 16 experts agree by chance once
in 43,680."""
ITERATION_KEYS = ("iteration", "iter", "step")


def parse_tokens(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`{"tok": n, "layers": [[ids], …]}`, one line per token.

    Raises:
        MalformedDump: a line that is no such object, or lines of different shapes.
    """
    first = _first_object(dump)
    layers, said = first["layers"], {key: first[key] for key in _EXPERTS_KEYS if first.get(key) is not None}
    num_experts = next(iter(said.values()), None)
    if num_experts is not None and not (is_integer(num_experts) and 0 < num_experts < 2**16):
        raise MalformedDump(
            f"{dump.path}, line 1: {next(iter(said))} is {str(num_experts)[:40]!r}, wanted a whole number of 1..65535; "
            "correct it, or leave it out"
        )
    if not layers or not isinstance(layers[0], list) or not layers[0]:
        raise MalformedDump(f"{dump.path}, line 1: layers lists no experts; wanted one list of ids per layer")
    shape = (len(layers), len(layers[0]))
    return ParsedDump(
        format="jsonl_tok_layers",
        blocks=_token_blocks(dump, shape, num_experts, first),
        top_k=shape[1],
        num_experts=num_experts,
        layers_are_ordinals=True,
        pass_boundaries="assumed_per_token",
    )


def _token_blocks(
    dump: DumpFile, shape: tuple[int, int], num_experts: int | None, first: dict[str, Any]
) -> Iterator[RowBlock]:
    # What every line must say alike, where it says it; names of requests may be texts.
    alike: dict[str, object] = dict.fromkeys(_EXPERTS_KEYS, num_experts)
    named = {key: pa.string() for key in _REQUEST_KEYS if isinstance(first.get(key), str)}
    schema = pa.schema(
        [
            ("tok", pa.int64()),
            ("layers", pa.list_(pa.list_(pa.int32()))),
            *((key, named.get(key, pa.int64())) for key in (*_EXPERTS_KEYS, *_REQUEST_KEYS)),
        ]
    )

    def fault(value: object) -> str | None:
        if not isinstance(value, dict) or not is_integer(value.get("tok")) or not isinstance(value.get("layers"), list):
            return 'wanted {"tok": whole number, "layers": [[ids], …]}'
        found = [len(ids) if isinstance(ids, list) else 0 for ids in value["layers"]]
        if len(found) != shape[0]:
            return f"{len(found)} layers, the first line has {shape[0]}: a layer is missing or added"
        for layer, ids in enumerate(value["layers"]):
            if found[layer] != shape[1]:
                return f"layer list {layer} has {found[layer]} ids, wanted {shape[1]}"
            if not all(is_integer(expert) and abs(expert) < 2**31 for expert in ids):
                return f"layer list {layer} is {str(ids)[:80]}, wanted whole numbers"
        for key in schema.names[2:]:
            said = value.get(key)
            if said is None:
                continue
            if (key in named and not isinstance(said, str)) or (key not in named and not is_integer(said)):
                return f"{key} is {str(said)[:40]!r}, wanted a {'text' if key in named else 'whole number'} or nothing"
            if alike.setdefault(key, said) == said:
                continue
            if key in _EXPERTS_KEYS:
                before = "says no number of experts" if num_experts is None else f"says {num_experts} experts"
                return f"{key} is {said}, but the first line {before}; say the same in every line"
            return (
                f"{key} is {str(said)[:40]!r}, before it was {str(alike[key])[:40]!r}: tokens of several requests, "
                "which this layout cannot tell apart; write one request a file, or the open format (README)"
            )
        return None

    layers, top_k = shape
    step = 0
    for batch in batches(dump, schema, fault):
        tokens = batch.num_rows
        lists = batch.column("layers")
        inner = lists.flatten()
        ids = inner.flatten()
        whole = (
            lists.null_count == inner.null_count == ids.null_count == batch.column("tok").null_count == 0
            and len(inner) == tokens * layers
            and len(ids) == len(inner) * top_k
            and _uniform(lists, layers)
            and _uniform(inner, top_k)
        )
        for key in schema.names[2:]:
            if batch.column(key).null_count < tokens:
                values = batch.column(key).drop_null().unique()
                whole = whole and len(values) == 1 and alike.setdefault(key, values[0].as_py()) == values[0].as_py()
        if not whole:
            raise first_bad_line(dump, lambda line: json_fault(line, fault))
        position = batch.column("tok").to_numpy()
        if tokens and position.min() < 0:
            raise MalformedDump(f"{dump.path}: tok {position.min()}, wanted 0 or more")
        yield RowBlock(
            step=np.repeat(np.arange(step, step + tokens), layers),
            pass_in_step=np.zeros(tokens * layers, dtype=np.int32),
            layer=np.tile(np.arange(layers, dtype=np.int32), tokens),
            request=np.zeros(tokens * layers, dtype=np.int64),
            position=np.repeat(position, layers),
            phase=np.full(tokens * layers, PHASE_CODES["unknown"], dtype=np.int8),
            expert_ids=ids.to_numpy().reshape(-1, top_k),
        )
        step += tokens


def parse_passes(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`{iteration, layer, experts}`, one line per router pass of one layer, `experts` k or 2k wide.

    k is `top_k_model` where the user gives it, else the narrowest record of the first 8 MiB.

    Raises:
        MalformedDump: a line that is no such object, a width other than k and 2k, or a record that stands twice.
        RefusedDump: lists that never change, or of one iteration alone: they may be of the most used experts.
    """
    first = _first_object(dump)
    layer_key, expert_key = _key(first, LAYER_KEYS), _key(first, EXPERT_KEYS)
    iteration_key = next((key for key in ITERATION_KEYS if key in first), None)
    if iteration_key is None:
        raise MalformedDump(
            f"{dump.path}, line 1: no {' / '.join(ITERATION_KEYS)}; without the engine iteration an accepted "
            "speculation cannot be told from a rejected one: record it with every pass"
        )
    top_k_model = asked.user.top_k_model
    top_k = top_k_model or _narrowest(dump, expert_key)
    return ParsedDump(
        format="spec_jsonl",
        blocks=_pass_blocks(dump, layer_key, expert_key, iteration_key, top_k),
        top_k=top_k,
        speculative=True,
        top_k_is_inferred=top_k_model is None,
    )


def _is_passes(sample: Sample) -> bool:
    if not isinstance(sample.value, dict) or (COUNT_KEYS | _OF_OTHERS) & set(sample.value):
        return False
    if any(len(set(keys) & set(sample.value)) > 1 for keys in (LAYER_KEYS, EXPERT_KEYS)):
        return False
    return bool(set(LAYER_KEYS) & set(sample.value)) and any(
        isinstance(sample.value.get(key), list) for key in EXPERT_KEYS
    )


LAYOUTS = (
    Layout(
        "jsonl_tok_layers",
        "JSONL {tok, layers}",
        lambda sample: isinstance(sample.field("layers"), list) and "tok" in (sample.value or ()),  # type: ignore[operator]
        parse_tokens,
    ),
    Layout("spec_jsonl", "JSONL {iteration, layer, experts}", _is_passes, parse_passes),
)


def _key(record: dict[str, Any], allowed: tuple[str, ...]) -> str:
    return next(key for key in allowed if key in record)


def _narrowest(dump: DumpFile, expert_key: str) -> int:
    stream, number, width, read = dump.stream(), 0, 0, 0
    while read < 8 * 1024 * 1024 and (line := read_line(stream, dump.path, number + 1)):
        number, read = number + 1, read + len(line)
        found: list[int] = []

        def width_of(value: object, found: list[int] = found) -> str | None:
            ids = value.get(expert_key) if isinstance(value, dict) else None
            if not isinstance(ids, list) or not ids:
                return f"{expert_key} lists no experts"
            found.append(len(ids))
            return None

        if not line.strip():
            continue
        fault = json_fault(line, width_of)
        if fault is not None:
            raise first_bad_line(dump, lambda line: json_fault(line, width_of))
        width = min(width or found[0], found[0])
    return width


def _pass_blocks(dump: DumpFile, layer_key: str, expert_key: str, iteration_key: str, top_k: int) -> Iterator[RowBlock]:
    schema = pa.schema([(layer_key, pa.int32()), (expert_key, pa.list_(pa.int32())), (iteration_key, pa.int64())])

    def fault(value: object) -> str | None:
        if not isinstance(value, dict):
            return "wanted an object"
        for key, limit in ((layer_key, 2**16), (iteration_key, 2**32)):
            if not is_integer(value.get(key)) or not 0 <= value[key] < limit:
                return f"{key} is {str(value.get(key))[:40]!r}, wanted a whole number below {limit}"
        ids = value.get(expert_key)
        if not isinstance(ids, list) or not all(is_integer(expert) and abs(expert) < 2**31 for expert in ids):
            return f"{expert_key} is {str(ids)[:80]}, wanted a list of whole numbers"
        if len(ids) not in (top_k, 2 * top_k):
            return (
                f"{expert_key} has {len(ids)} ids, wanted k = {top_k} or, for a speculated pair of tokens, "
                f"{2 * top_k}; if k is another, say --meta top_k_model=K"
            )
        return None

    held: list[pa.RecordBatch] = []
    state = _Iterations(dump, (iteration_key, layer_key, expert_key))
    for batch in batches(dump, schema, fault):
        widths = batch.column(expert_key).value_lengths().to_numpy(zero_copy_only=False)
        sound = (
            all(batch.column(index).null_count == 0 for index in range(3))
            and batch.column(expert_key).flatten().null_count == 0
            and bool(np.isin(widths, (top_k, 2 * top_k)).all())
            and (
                not batch.num_rows or min(batch.column(key).to_numpy().min() for key in (layer_key, iteration_key)) >= 0
            )
        )
        if not sound:
            raise first_bad_line(dump, lambda line: json_fault(line, fault))
        held.append(batch)
        iterations = batch.column(iteration_key).to_numpy()
        if sum(part.num_rows for part in held) < ROWS_PER_BLOCK // 2 or not len(iterations):
            continue
        # The last iteration may go on in the next batch.
        table = pa.Table.from_batches(held).combine_chunks().to_batches()[0]
        all_iterations = table.column(iteration_key).to_numpy()
        last = int(np.flatnonzero(all_iterations != all_iterations[-1])[-1]) + 1 if len(set(all_iterations)) > 1 else 0
        if last:
            yield state.block(table.slice(0, last), layer_key, expert_key, iteration_key, top_k)
        held = [table.slice(last)]
    if held and sum(part.num_rows for part in held):
        table = pa.Table.from_batches(held).combine_chunks().to_batches()[0]
        yield state.block(table, layer_key, expert_key, iteration_key, top_k)
    state.refuse_hot_lists()


class _Iterations:
    """Numbers iterations densely, finds the passes inside each, and refuses records that stand twice.

    keys: how the dump calls the iteration, the layer and the experts.
    """

    def __init__(self, dump: DumpFile, keys: tuple[str, str, str]) -> None:
        self.dump, self.keys = dump, keys
        self.previous: int | None = None
        self.steps = self.selections = 0
        self._layers: set[int] = set()
        self._first: dict[int, bytes] = {}
        """Layer → the ids of its first row, as long as every row of the dump is its layer's first."""
        self._is_static = True

    def refuse_hot_lists(self) -> None:
        """Refuses a dump of one iteration, and one whose every row is the first one of its layer.

        A router's choice changes from token to token. A list of a layer's most used experts does not, and with an
        iteration written beside it nothing else tells it from a route.

        Raises:
            RefusedDump: as said.
        """
        iteration_key, _, expert_key = self.keys
        if self.steps == 1 and len(self._layers) > 1:
            raise RefusedDump(
                f"{self.dump.path}: one {iteration_key} alone, a list of {expert_key} for each of {len(self._layers)} "
                "layers; a list of the most used experts looks like that too, so wanted two iterations or more: record "
                "the passes of a whole generation"
            )
        if self._is_static and self.selections >= TELLING_SELECTIONS:
            raise RefusedDump(
                f"{self.dump.path}: each layer has the same {expert_key} in every record of {self.steps} iterations: a "
                "list of the most used experts, or a buffer written once, not routes, which change from token to "
                "token; record what each pass chose"
            )

    def _look_for_hot_lists(self, layer: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> None:
        """`layer` (R,), `ids` (R, K), rows in recorded order."""
        self.selections += ids.size
        self._layers.update(np.unique(layer).tolist())
        if not self._is_static:
            return
        for number in np.unique(layer).tolist():
            of_layer = ids[layer == number]
            first = self._first.setdefault(number, of_layer[0].tobytes())
            self._is_static &= bool((of_layer == np.frombuffer(first, dtype=of_layer.dtype)).all())

    def _refuse_copies(
        self,
        iteration: npt.NDArray[np.int64],
        layer: npt.NDArray[np.int32],
        passes: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int32],
    ) -> None:
        """Refuses a second pass that is the first one again, in every layer that it has; a fallback runs anew.

        Raises:
            MalformedDump: there is one.
        """
        if not passes.any():
            return
        begin = np.cumsum(rows) - rows
        # What runs more than twice fits no rule of speculation, and is refused as that.
        two = ~np.isin(iteration, iteration[passes > 1])
        order = np.flatnonzero(two)[np.lexsort((passes[two], layer[two], iteration[two]))]
        first, second = order[:-1], order[1:]
        paired = (iteration[first] == iteration[second]) & (layer[first] == layer[second]) & (rows[second] == 1)
        first, second = first[paired], second[paired]
        equal = (rows[first] == 1) & (ids[begin[first]] == ids[begin[second]]).all(axis=1)
        starts = np.flatnonzero(np.diff(iteration[second], prepend=-1))
        if not len(starts):
            return
        lengths = np.diff(np.append(starts, len(second)))
        copies = np.add.reduceat(equal, starts) == lengths
        for at in np.flatnonzero(copies).tolist():
            number, records = int(iteration[second[starts[at]]]), int(lengths[at])
            layers = len(np.unique(layer[iteration == number]))
            # Two sweeps of few ids may agree by chance; a lone record of a sweep is no fallback.
            if records * ids.shape[1] < _TELLING_COPIES and records * 2 > layers:
                continue
            iteration_key, layer_key, _ = self.keys
            place = int(layer[second[starts[at]]])
            raise MalformedDump(
                f"{self.dump.path}, {iteration_key} {number}, {layer_key} {place}: the record stands twice with the "
                f"same ids ({records} such records in this {iteration_key}); wanted each pass once: recorded by "
                "several ranks and joined, or written again? A fallback would be taken for it: leave the copies out",
                check="no pass twice",
            )

    def block(
        self, records: pa.RecordBatch, layer_key: str, expert_key: str, iteration_key: str, top_k: int
    ) -> RowBlock:
        iteration = records.column(iteration_key).to_numpy()
        layer = records.column(layer_key).to_numpy()
        lists = records.column(expert_key)
        if np.any(np.diff(iteration) < 0) or (self.previous is not None and iteration[0] < self.previous):
            raise MalformedDump(f"{self.dump.path}: {iteration_key} goes back; records must stand in recorded order")
        self.previous = int(iteration[-1])
        starts = np.flatnonzero(np.diff(iteration, prepend=iteration[0] - 1))
        step_of_record = self.steps + np.cumsum(np.isin(np.arange(len(iteration)), starts)) - 1
        self.steps += len(starts)
        rows_of_record = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64) // top_k
        passes = _passes(layer, starts)
        ids = lists.flatten().to_numpy().reshape(-1, top_k)
        self._refuse_copies(iteration, layer, passes, rows_of_record, ids)
        self._look_for_hot_lists(np.repeat(layer, rows_of_record), ids)
        return RowBlock(
            step=np.repeat(step_of_record, rows_of_record),
            pass_in_step=np.repeat(passes, rows_of_record),
            layer=np.repeat(layer, rows_of_record).astype(np.int32),
            request=np.zeros(len(ids), dtype=np.int64),
            position=None,
            # The study's dumps hold decode only: prefill is excluded where they are recorded.
            phase=np.full(len(ids), PHASE_CODES["decode"], dtype=np.int8),
            expert_ids=np.ascontiguousarray(ids, dtype=np.int32),
        )


def _passes(layer: npt.NDArray[np.int32], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The pass of each record in its iteration.

    Engines repeat either whole sweeps (a pass ends where the layer number drops) or layer by layer (a record follows
    one of the same layer: the repetition is the second pass).
    """
    passes = np.zeros(len(layer), dtype=np.int32)
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(layer)], strict=True):
        steps = np.diff(layer[begin:end])
        if not len(steps) or steps.min() > 0:
            continue
        if (steps == 0).any() and (steps >= 0).all():
            same = np.concatenate([[False], steps == 0])
            run = 0
            for offset, repeated in enumerate(same.tolist()):
                run = run + 1 if repeated else 0
                passes[begin + offset] = run
        else:
            passes[begin + 1 : end] = np.cumsum(steps <= 0)
    return passes


def _first_object(dump: DumpFile) -> dict[str, Any]:
    stream = dump.stream()
    number = 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                break
            if isinstance(value, dict):
                return value
            break
    raise MalformedDump(f"{dump.path}, line {number}: no JSON object: is the dump truncated?")


def batches(dump: DumpFile, schema: pa.Schema, fault: Callable[[object], str | None]) -> Iterator[pa.RecordBatch]:
    """The file's records, only the columns of `schema`; any line that does not fit raises with its number."""
    block_bytes = _block_bytes(dump)
    try:
        reader = pajson.open_json(
            pa.PythonFile(dump.stream(), mode="r"),
            read_options=pajson.ReadOptions(block_size=block_bytes),
            parse_options=pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        for batch in reader:
            yield batch.select(schema.names)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        bad = first_bad_line(dump, lambda line: json_fault(line, fault))
        raise bad from error


def _block_bytes(dump: DumpFile) -> int:
    # Several blocks are read ahead, so they bound memory; a line must fit into one.
    first_line = len(dump.stream().readline(MAX_LINE_BYTES))
    return min(MAX_LINE_BYTES, max(BLOCK_BYTES, 8 * first_line))


def _uniform(lists: pa.ListArray, length: int) -> bool:
    return bool((lists.value_lengths().to_numpy(zero_copy_only=False) == length).all())


def loads(text: bytes) -> Any:
    """JSON whose fractions stay text, so that no list of numbers with one passes for whole numbers.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.loads(text, parse_float=str, parse_constant=str)


def integers_of(value: object, depth: int) -> pa.Array | None:
    """Nested JSON lists of whole numbers as an Arrow list array, `depth` axes deep; null if they are none.

    The JSON must come from `loads`: Arrow would cut a fraction to a whole number.
    """
    if not isinstance(value, list):
        return None
    kind: pa.DataType = pa.int64()
    for _ in range(depth - 1):
        kind = pa.list_(kind)
    try:
        return pa.array(value, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, ValueError, TypeError):
        return None
