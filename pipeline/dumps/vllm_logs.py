"""Files that recorders inside vLLM write: the routes of the VLLM_LOG_MOE patches, and statistics, which are no trace.

Layouts after published logs and the recorder's documentation. Letters: K experts per token.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    Asked,
    DumpFile,
    DumpFolder,
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
from pipeline.dumps.jsonl import batches, loads
from schemas.trace import PHASE_CODES, CheckRecord

MAX_PASS_ROWS = 4 * 1024 * 1024
"""Most rows of one forward pass in a log; the next layer's must be seen before they can be put in order."""


def parse_moe_routes(dump: DumpFile, asked: Asked) -> ParsedDump:
    """A meta line, then `{type: route, req_id, token_idx, layer, topk_ids, topk_weights}`: the VLLM_LOG_MOE patches.

    `token_idx` is a row of a batch or a running counter, never a position, and `req_id` is often constant. A request is
    cut where `req_id` changes, where a meta line stands, and where `token_idx` of a layer does not follow on by one: it
    goes back, stands again, or jumps. Layers of one pass are put token by token. Dummy batches come along as recorded.

    Raises:
        MalformedDump: a line that is no such record, or layers of a pass with different rows.
    """
    meta, route = _heading(dump)
    top_k = len(route["topk_ids"])
    logged = meta.get("layers_logged")
    listed = isinstance(logged, list) and len(logged) > 0 and all(is_integer(layer) for layer in logged)
    version, model = meta.get("vllm_version"), meta.get("model_id")
    parsed = ParsedDump(
        format="vllm_moe_routes",
        blocks=iter(()),
        top_k=top_k,
        model=model if isinstance(model, str) else None,
        engine=f"vLLM {version}"[:200] if isinstance(version, str) else "vLLM",
        capture_method="VLLM_LOG_MOE logging patch",
        num_experts=_stated(dump, meta, "num_experts"),
        top_k_model=_stated(dump, meta, "top_k"),
        pass_boundaries="assumed_per_token",
    )
    log = _Log(dump, parsed, isinstance(route.get("req_id"), int), bool(listed and len(logged or ()) == 1))
    parsed.blocks = log.blocks()
    return parsed


def _heading(dump: DumpFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """The meta line (empty if there is none) and the first route."""
    stream, meta = dump.stream(), dict[str, Any]()
    for number in range(1, 1000):
        line = read_line(stream, dump.path, number)
        if not line:
            break
        if not line.strip():
            continue
        fault = json_fault(line, _route_fault(None))
        value = None if fault is not None else loads(line)
        if value is None:
            raise first_bad_line(dump, lambda line: json_fault(line, _route_fault(None)))
        if value["type"] == "route":
            return meta, value
        meta = meta or value
    raise MalformedDump(f"{dump.path}: a meta line and no route: was the recorder stopped before it wrote any?")


def _stated(dump: DumpFile, meta: dict[str, Any], key: str) -> int | None:
    value = meta.get(key)
    if value is not None and not (is_integer(value) and 0 < value < 2**31):
        raise MalformedDump(f"{dump.path}: the meta line says {key} = {str(value)[:40]!r}, wanted a positive number")
    return value


def _route_fault(top_k: int | None) -> Callable[[object], str | None]:
    def fault(value: object) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or kind not in ("meta", "route"):
            return "wanted an object of type meta or route"
        if kind == "meta":
            return None
        for key, limit in (("token_idx", 2**62), ("layer", 2**16)):
            if not is_integer(value.get(key)) or not 0 <= value[key] < limit:
                return f"{key} is {str(value.get(key))[:40]!r}, wanted a whole number of 0 or more"
        ids, weights, request = value.get("topk_ids"), value.get("topk_weights"), value.get("req_id")
        if not isinstance(ids, list) or not ids or not all(is_integer(one) and abs(one) < 2**31 for one in ids):
            return f"topk_ids is {str(ids)[:80]}, wanted whole numbers"
        if top_k is not None and len(ids) != top_k:
            return f"topk_ids has {len(ids)} ids, the first route {top_k}"
        numbers = isinstance(weights, list) and all(
            one is None or (isinstance(one, int | float) and not isinstance(one, bool)) for one in weights
        )
        if weights is not None and (not numbers or len(weights) != len(ids)):
            return f"topk_weights is {str(weights)[:80]}, wanted {len(ids)} numbers"
        if request is not None and not isinstance(request, str) and not (is_integer(request) and abs(request) < 2**62):
            return f"req_id is {str(request)[:40]!r}, wanted a text or a number"
        return None

    return fault


class _Log:
    """Rows of a log as passes: finds where one ends, orders it token by token, and cuts requests.

    is_single: the meta line says that one layer was logged, so rows need not wait for others.
    """

    def __init__(self, dump: DumpFile, parsed: ParsedDump, has_number: bool, is_single: bool) -> None:
        self.dump, self.parsed = dump, parsed
        self.request_type = pa.int64() if has_number else pa.string()
        self.is_single = is_single
        self.steps = self.requests = self.restarts = self.jumps = 0
        self.names: set[object] = set()
        self.last_first: tuple[int, int] | None = None
        """(layer, last token_idx) of the first layer of the pass before."""
        self.last_row: tuple[tuple[int, int], int] | None = None
        """((run, request), token_idx) of the row before."""

    def blocks(self) -> Iterator[RowBlock]:
        held: dict[str, npt.NDArray[Any]] = {}
        for rows in self._rows():
            held = rows if not held else {key: _joined_rows(held[key], rows[key]) for key in rows}
            count = len(held["layer"])
            if count < ROWS_PER_BLOCK // 2:
                continue
            if not self.is_single and (held["layer"] == held["layer"][0]).all():
                self.is_single = True
            keep = 0 if self.is_single else count - int(self._pass_starts(held)[-1])
            if keep > MAX_PASS_ROWS:
                raise MalformedDump(
                    f"{self.dump.path}: a pass of more than {MAX_PASS_ROWS} rows; do rows of layers stand mixed?"
                )
            if keep < count:
                yield from self._emit({key: values[: count - keep] for key, values in held.items()}, is_end=False)
                held = {key: values[count - keep :] for key, values in held.items()} if keep else {}
        if held and len(held["layer"]):
            yield from self._emit(held, is_end=True)
        self.parsed.checks.append(
            CheckRecord(
                name="requests of the log",
                outcome="warn",
                wanted="req_id and token_idx name requests and positions",
                found=f"{len(self.names)} different req_id; {self.requests + 1} requests cut where req_id changes, or "
                f"token_idx goes back ({self.restarts}) or jumps ({self.jumps}); token_idx is a row of a batch, so "
                "positions are unknown",
            )
        )

    def _rows(self) -> Iterator[dict[str, npt.NDArray[Any]]]:
        top_k = self.parsed.top_k
        schema = pa.schema(
            [
                ("type", pa.string()), ("req_id", self.request_type), ("token_idx", pa.int64()), ("layer", pa.int32()),
                ("topk_ids", pa.list_(pa.int32())), ("topk_weights", pa.list_(pa.float32())),
            ]
        )  # fmt: skip
        fault = _route_fault(top_k)
        runs = 0
        for batch in batches(self.dump, schema, fault):
            kind = batch.column("type").dictionary_encode()
            is_route = np.asarray(pc.equal(batch.column("type"), "route").fill_null(False))
            known = is_route | np.asarray(pc.equal(batch.column("type"), "meta").fill_null(False))
            run = runs + np.cumsum(~is_route)
            runs = int(run[-1]) if len(run) else runs
            routes = batch.filter(pa.array(is_route))
            ids, weights = routes.column("topk_ids"), routes.column("topk_weights")
            widths = ids.value_lengths().to_numpy(zero_copy_only=False)
            sound = (
                known.all()
                and kind.null_count == 0
                and ids.null_count == ids.flatten().null_count == 0
                and routes.column("token_idx").null_count == routes.column("layer").null_count == 0
                and (widths == top_k).all()
                and (not routes.num_rows or routes.column("token_idx").to_numpy().min() >= 0)
                and (not routes.num_rows or routes.column("layer").to_numpy().min() >= 0)
                and np.isin(weights.drop_null().value_lengths().to_numpy(zero_copy_only=False), (top_k,)).all()
            )
            if not sound:
                raise first_bad_line(self.dump, lambda line: json_fault(line, fault))
            if not routes.num_rows:
                continue
            values = np.full((routes.num_rows, top_k), np.nan, dtype=np.float32)
            given = ~np.asarray(weights.is_null())
            values[given] = weights.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, top_k)
            yield {
                "run": run[is_route],
                "request": self._request_codes(routes.column("req_id")),
                "token": routes.column("token_idx").to_numpy(),
                "layer": routes.column("layer").to_numpy(),
                "ids": ids.flatten().to_numpy().reshape(-1, top_k),
                "weights": values,
            }

    def _request_codes(self, names: pa.Array) -> npt.NDArray[np.int64]:
        encoded = names.dictionary_encode(null_encoding="encode")
        # Only whether neighbours differ is asked, so a hash will do, and no table of names grows.
        values = encoded.dictionary.to_pylist()
        if len(self.names) < 1_000_000:
            self.names.update(values)
        codes = np.array([hash(value) for value in values], dtype=np.int64)
        found: npt.NDArray[np.int64] = codes[encoded.indices.to_numpy(zero_copy_only=False)]
        return found

    @staticmethod
    def _segment_starts(rows: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Where the run, the request or the layer changes, or token_idx does not follow on by one."""
        starts = np.ones(len(rows["layer"]), dtype=bool)
        starts[1:] = np.diff(rows["token"]) != 1
        for key in ("run", "request", "layer"):
            starts[1:] |= rows[key][1:] != rows[key][:-1]
        return starts

    def _pass_starts(self, rows: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
        """First rows of passes: a segment whose layer is not above the one before, or of another request or run."""
        segments = np.flatnonzero(self._segment_starts(rows))
        begins = np.ones(len(segments), dtype=bool)
        begins[1:] = np.diff(rows["layer"][segments]) <= 0
        for key in ("run", "request"):
            begins[1:] |= rows[key][segments[1:]] != rows[key][segments[:-1]]
        return segments[begins]

    def _emit(self, rows: dict[str, npt.NDArray[Any]], *, is_end: bool) -> Iterator[RowBlock]:
        count = len(rows["layer"])
        layer, token = rows["layer"], rows["token"]
        if self.is_single and (layer != layer[0]).any() | (
            self.last_first is not None and self.last_first[0] != layer[0]
        ):
            raise MalformedDump(
                f"{self.dump.path}: layers {sorted(set(layer.tolist()))[:5]} in one log, but its start has one layer "
                "only; is layers_logged wrong, or are two logs joined?"
            )
        segments = np.flatnonzero(self._segment_starts(rows))
        passes = self._pass_starts(rows)
        lengths = np.diff(np.append(segments, count))
        pass_of_segment = np.searchsorted(passes, segments, side="right") - 1
        first_segment = np.searchsorted(segments, passes)
        ragged = lengths != lengths[first_segment][pass_of_segment]
        if ragged.any():
            at = int(np.flatnonzero(ragged)[0])
            last = is_end and int(pass_of_segment[at]) == len(passes) - 1
            raise MalformedDump(
                f"{self.dump.path}, token_idx {int(token[segments[at]])}, layer {int(layer[segments[at]])}: "
                f"{int(lengths[at])} rows, but {int(lengths[first_segment[pass_of_segment[at]]])} in the first layer "
                "of the pass; " + ("it is the last pass: the dump is truncated" if last else "are rows missing?")
            )
        request = self._requests(rows, passes, lengths[first_segment])
        pass_of_row = np.searchsorted(passes, np.arange(count), side="right") - 1
        row_in_segment = np.arange(count) - segments[np.searchsorted(segments, np.arange(count), side="right") - 1]
        order = np.lexsort((layer, row_in_segment, pass_of_row))
        key_pass, key_row = pass_of_row[order], row_in_segment[order]
        new = np.ones(count, dtype=bool)
        new[1:] = (np.diff(key_pass) != 0) | (np.diff(key_row) != 0)
        step = self.steps + np.cumsum(new) - 1
        self.steps = int(step[-1]) + 1
        self.last_row = ((int(rows["run"][-1]), int(rows["request"][-1])), int(token[-1]))
        weights = rows["weights"][order]
        yield RowBlock(
            step=step,
            pass_in_step=np.zeros(count, dtype=np.int32),
            layer=layer[order].astype(np.int32),
            request=request[key_pass],
            position=None,
            phase=np.full(count, PHASE_CODES["unknown"], dtype=np.int8),
            expert_ids=np.ascontiguousarray(rows["ids"][order], dtype=np.int32),
            weights=None if np.isnan(weights).all() else weights,
        )

    def _requests(
        self, rows: dict[str, npt.NDArray[Any]], passes: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The request of each pass: it goes on where the first layer's token_idx, or the row before, is one less."""
        token, name = rows["token"], np.stack([rows["run"], rows["request"]])
        first = token[passes]
        cut = np.ones(len(passes), dtype=bool)
        before = first[:-1] + lengths[:-1] - 1
        follows = (first[1:] == before + 1) | (first[1:] == token[passes[1:] - 1] + 1)
        same = (name[:, passes[1:]] == name[:, passes[:-1]]).all(axis=0)
        cut[1:] = ~(follows & same)
        back, ahead = same & ~follows & (first[1:] <= before), same & ~follows & (first[1:] > before)
        if self.last_first is not None and self.last_row is not None:
            names_differ = self.last_row[0] != (int(rows["run"][0]), int(rows["request"][0]))
            goes_on = int(first[0]) in (self.last_first[1] + 1, self.last_row[1] + 1)
            cut[0] = names_differ or not goes_on
            if cut[0] and not names_differ:
                self.restarts += int(first[0]) <= self.last_first[1]
                self.jumps += int(first[0]) > self.last_first[1]
        else:
            cut[0] = False
        self.restarts += int(back.sum())
        self.jumps += int(ahead.sum())
        request = self.requests + np.cumsum(cut)
        self.requests = int(request[-1])
        self.last_first = (int(rows["layer"][passes[-1]]), int(first[-1] + lengths[-1] - 1))
        return request


def _joined_rows(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([before, after])


# Statistics of the expert-routing recorder


def refuse_stats(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Refuses counts per step, layer and expert, and says whether even they are whole.

    Raises:
        RefusedDump: always.
    """
    stream, number, last = dump.stream(), 0, b""
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        last = line if line.strip() else last
    try:
        value = loads(last)
    except (ValueError, RecursionError):
        value = None
    status = value.get("status") if isinstance(value, dict) and value.get("record_type") == "summary" else None
    ending = (
        "" if status == "complete"
        else f"; its summary says {str(status)[:40]!r}, so it is truncated too" if status is not None
        else "; it has no closing summary, so it is truncated too"
    )  # fmt: skip
    raise RefusedDump(
        f"{dump.path}: counts per step, layer and expert (vLLM's expert-routing statistics), not the routes of tokens; "
        f"a count has no order, so no cache can be replayed on it: record routed_experts{ending}"
    )


def _refuse_stats_folder(folder: DumpFolder, asked: Asked) -> ParsedDump:
    for file in folder.files:
        with folder.open(file) as dump:
            if b'"record_type"' in dump.head():
                return refuse_stats(dump, asked)
    raise RefusedDump(f"{folder.path}: expert-routing statistics (counts), not the routes of tokens")


# Recognition


def _is_moe_routes(sample: Sample) -> bool:
    if sample.field("type") == "route":
        return isinstance(sample.field("topk_ids"), list) and sample.field("token_idx") is not None
    known = {"layers_logged", "top_k", "model_id", "num_experts", "vllm_version"}
    return sample.field("type") == "meta" and len(known & set(sample.value or ())) >= 2  # type: ignore[call-overload]


def _is_stats(sample: Sample) -> bool:
    kind = sample.field("record_type")
    if kind == "metadata":
        return sample.field("schema_version") is not None and isinstance(sample.field("layers"), list)
    return (
        kind in ("decode_step", "summary")
        and sample.field("decode_steps" if kind == "summary" else "layers") is not None
    )


LAYOUTS = (
    Layout(
        "vllm_expert_stats", "vLLM expert-routing statistics (refused)", _is_stats, refuse_stats, _refuse_stats_folder
    ),
    Layout("vllm_moe_routes", "JSONL of the VLLM_LOG_MOE patches (moe_routes)", _is_moe_routes, parse_moe_routes),
)
