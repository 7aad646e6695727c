"""SGLang's responses of `/generate` with `return_routed_experts`, as JSON or JSONL.

From sglang `python/sglang/srt/state_capturer/routed_experts.py`: meta_info.routed_experts is base64 of little-endian
int32 [T − 1 − start, L, K]; newer responses have input_expert_ids and output_expert_ids with expert_ids_schema
{num_layers, top_k, moe_layer_ids, dtype, layout, id_space, and num_rows and start_position of input and output}. Dense
layers and rows that were never written hold 0, which is an expert's id too, so which layers are dense must be declared.

Letters: L hidden layers, T tokens of a sequence, K experts per token.
"""

import base64
import binascii
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import (
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    Sample,
    is_integer,
)
from pipeline.dumps.repeats import Responses, digest_of
from pipeline.dumps.sequences import Sequences
from pipeline.dumps.torch_file import describe
from schemas.trace import CheckRecord

MAX_RESPONSE_BYTES = 128 * 1024 * 1024
"""Longest line, or whole document, of responses: its text and its arrays are in memory at once."""


def count(counts: dict[str, int], reason: str, number: int) -> None:
    """Counts rows or positions under a reason."""
    counts[reason] = counts.get(reason, 0) + number


def moe_planes(path: Path, where: str, ids: npt.NDArray[Any], layers: Sequence[int] | None) -> list[int]:
    """The planes of a [T, L, K] array that are MoE layers: `layers` where declared, else all of them.

    Engines fill dense layers, and rows that nobody wrote, with 0, which is an expert's id too. So a plane of zeros is
    no layer unless it is declared dense.

    Raises:
        RefusedDump: all ids are 0. MalformedDump: a plane or a token of zeros that is not declared, a dense layer with
        ids, a declared layer that is not there.
    """
    planes = ids.shape[1]
    if layers is not None and (not layers or max(layers) >= planes):
        raise MalformedDump(
            f"{path}{where}: MoE layers {list(layers)[:8]} are declared, but the planes are 0..{planes - 1}"
        )
    written = (ids != 0).any(axis=2)  # (T, L)
    chosen = list(range(planes)) if layers is None else list(layers)
    # One expert per token can be expert 0 for a while; two equal ids are no route.
    is_telling = ids.shape[2] > 1 or len(ids) >= 16
    if not len(ids) or not is_telling:
        return chosen
    if not written.any():
        raise RefusedDump(
            f"{path}{where}: every id of {len(ids)} tokens and {planes} layers is 0: a buffer that nobody wrote "
            "(speculative decoding, a hybrid model or a wrong cache group do that), not expert 0; record again"
        )
    empty = [plane for plane in chosen if not written[:, plane].any()]
    if empty:
        raise MalformedDump(
            f"{path}{where}: layers {empty[:8]} hold 0 alone: dense layers are stored like that, and 0 is an expert "
            f"too; say --meta moe_layer_ids=[…] without them (layers run 0..{planes - 1})"
        )
    dense = sorted(set(range(planes)) - set(chosen))
    if dense and written[:, dense].any():
        layer = next(plane for plane in dense if written[:, plane].any())
        raise MalformedDump(f"{path}{where}: layer {layer} is declared dense, but holds ids; correct moe_layer_ids")
    unwritten = ~written[:, chosen].any(axis=1)
    if ids.shape[2] > 1 and unwritten.any():
        token = int(np.flatnonzero(unwritten)[0])
        raise MalformedDump(
            f"{path}{where}: {int(unwritten.sum())} of {len(ids)} tokens, first token {token}, hold 0 in every layer: "
            "never written (a buffer shorter than the prompt, a prefix kept elsewhere), not expert 0; record again"
        )
    return chosen


@dataclass(frozen=True)
class _Response:
    """Routes of one response: ids (T, L, K) of positions from `start` on, MoE layers where the response says them."""

    where: str
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None
    start: int
    prompt_tokens: int
    layers: list[int] | None
    id_space: str | None
    cached: int
    name: object = None


@dataclass
class _Found:
    """What the responses of a dump have in common, and counts over them."""

    with_last: int = 0
    without_last: int = 0
    cross_checked: int = 0
    speculative: int = 0


def parse_responses(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Responses of `/generate`: one JSON document (a response or a list of them), or one response a line.

    Read of each: meta_info.{prompt_tokens, completion_tokens, cached_tokens, spec_verify_ct, routed_experts,
    routed_experts_start_len, input_expert_ids, output_expert_ids, expert_ids_schema, expert_logits}. A response without
    routes (null, not asked for) is left out and counted; an empty text is a route of no rows. Positions of a cached
    prefix were not run in that request, and are left out and counted. meta_info.id names a response: it stands once.

    Raises:
        RefusedDump: no routes, or zeros alone. MalformedDump: sizes that contradict each other, undeclared layers.
    """
    found, missing = _Found(), dict[str, int]()
    responses = _responses(dump, asked, found, missing)
    first = next(responses, None)
    if first is None:
        raise RefusedDump(
            f"{dump.path}: responses without routes; start the server with --enable-return-routed-experts and ask "
            "with return_routed_experts"
        )
    layers = moe_planes(dump.path, first.where, first.ids, _declared(first, asked))
    parsed = ParsedDump(
        format="sglang_routed_experts",
        blocks=iter(()),
        top_k=first.ids.shape[2],
        engine="SGLang",
        capture_method="return_routed_experts",
        hidden_layers=first.ids.shape[1],
        pass_boundaries="assumed_per_token",
        id_space="logical" if first.id_space == "logical_global" else None,
        missing_positions=missing,
    )
    parsed.blocks = _response_blocks(dump, first, responses, layers, asked, found, parsed)
    return parsed


def _declared(response: _Response, asked: Asked) -> list[int] | None:
    return response.layers if response.layers is not None else asked.user.moe_layer_ids


def _response_blocks(
    dump: DumpFile, first: _Response, others: Iterator[_Response], layers: list[int], asked: Asked, found: _Found,
    parsed: ParsedDump,
) -> Iterator[RowBlock]:  # fmt: skip
    sequences = Sequences(layers)
    shape = first.ids.shape[1:]
    request = 0
    named = Responses(dump.path)
    one: _Response | None = first
    while one is not None:
        if one.ids.shape[1:] != shape or (one.id_space, one.layers) != (first.id_space, first.layers):
            raise MalformedDump(
                f"{dump.path}{one.where}: {list(one.ids.shape[1:])} layers and experts, or another schema than the "
                f"first response's {list(shape)}; are two models in one file?"
            )
        named.see(one.name, digest_of([one.ids]), one.where)
        if len(one.ids):
            moe_planes(dump.path, one.where, one.ids, _declared(one, asked))
        begin = max(0, min(one.cached - one.start, len(one.ids)))
        if begin:
            count(parsed.dropped_rows, "cached prefix: run in an earlier request, not in this", begin * len(layers))
        positions = np.arange(one.start + begin, one.start + len(one.ids))
        yield from sequences.blocks(
            one.ids[begin:, layers],
            request=request,
            positions=positions,
            prompt_tokens=one.prompt_tokens,
            weights=None if one.weights is None else one.weights[begin:, layers],
        )
        request += 1
        one = next(others, None)
    parsed.copies_ruled_out = not named.unnamed
    parsed.checks += [
        CheckRecord(
            name="rows fit the tokens",
            outcome="warn" if found.with_last else "ok",
            wanted="a row for each token but the last, which was sampled and never run",
            found=f"{found.without_last} responses with one row less than tokens, {found.with_last} with a row each",
        )
    ]
    if found.cross_checked:
        parsed.checks.append(
            CheckRecord(
                name="both payloads agree",
                outcome="ok",
                wanted="input_expert_ids and output_expert_ids hold the rows of routed_experts",
                found=f"{found.cross_checked} responses hold both, and agree",
            )
        )
    if found.speculative:
        parsed.checks.append(
            CheckRecord(
                name="routes of accepted tokens",
                outcome="warn",
                wanted="no speculative decoding, whose rows may be of rejected drafts",
                found=f"{found.speculative} responses were decoded speculatively; their routes are unverified",
            )
        )


def _responses(dump: DumpFile, asked: Asked, found: _Found, missing: dict[str, int]) -> Iterator[_Response]:
    for number, value in _documents(dump):
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            where = f", line {number}" if number else ""
            if isinstance(value, list):
                where += f", response {index}"
            response = _response(dump.path, where, one, asked, found, missing)
            if response is not None:
                yield response


def _documents(dump: DumpFile) -> Iterator[tuple[int, object]]:
    """(line number, JSON value) of each line, or (0, value) of a document over many lines."""
    stream = dump.stream()
    number = values = 0
    while line := stream.readline(MAX_RESPONSE_BYTES + 1):
        number += 1
        if len(line) > MAX_RESPONSE_BYTES:
            raise RefusedDump(
                f"{dump.path}, line {number}: responses of more than {MAX_RESPONSE_BYTES} bytes on a line; save one "
                "response a line (JSONL)"
            )
        if not line.strip():
            continue
        try:
            value: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            if values:
                hint = "" if stream.peek(1) else "; it is the last line: the dump is truncated, copy it again"
                raise MalformedDump(
                    f"{dump.path}, line {number}: no JSON ({str(error).splitlines()[0][:100]}){hint}"
                ) from None
            whole = line + stream.read(MAX_RESPONSE_BYTES + 1)
            if len(whole) > MAX_RESPONSE_BYTES:
                raise RefusedDump(
                    f"{dump.path}: one JSON document of more than {MAX_RESPONSE_BYTES} bytes; save one response a "
                    "line (JSONL)"
                ) from None
            try:
                value = json.loads(whole)
            except (ValueError, RecursionError) as error_of_whole:
                raise MalformedDump(
                    f"{dump.path}: no complete JSON ({str(error_of_whole).splitlines()[0][:100]}): is the dump "
                    "truncated? copy it again"
                ) from None
            yield 0, value
            return
        values += 1
        yield number, value


def _response(
    path: Path, where: str, value: object, asked: Asked, found: _Found, missing: dict[str, int]
) -> _Response | None:
    """The routes of one response, or null where it was not asked for them."""
    meta = value.get("meta_info") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(meta, dict):
        raise MalformedDump(f"{path}{where}: {describe(value)}, wanted a response of /generate with meta_info")
    names = ("routed_experts", "input_expert_ids", "output_expert_ids")
    payloads = {name: _decoded(path, where, meta, name, "<i4") for name in names}
    prompt, completion = (_whole(path, where, meta, name) for name in ("prompt_tokens", "completion_tokens"))
    if all(payload is None for payload in payloads.values()):
        count(missing, "responses that were not asked for routes", prompt + completion)
        return None
    found.speculative += is_integer(meta.get("spec_verify_ct")) and meta["spec_verify_ct"] > 0
    schema = meta.get("expert_ids_schema")
    if schema is not None and not isinstance(schema, dict):
        raise MalformedDump(f"{path}{where}: expert_ids_schema is {describe(schema)}, wanted an object")
    planes, top_k, layers, id_space = _schema(path, where, schema, asked)
    tokens = prompt + completion
    if payloads["input_expert_ids"] is not None or payloads["output_expert_ids"] is not None:
        if schema is None:
            raise MalformedDump(f"{path}{where}: input_expert_ids or output_expert_ids without expert_ids_schema")
        ids, start = _partitions(path, where, payloads, schema, (planes, top_k), (prompt, completion), missing)
        whole = payloads["routed_experts"]
        if whole is not None and whole.size:
            if not np.array_equal(whole.reshape(-1)[start * planes * top_k :][: ids.size], ids.reshape(-1)):
                raise MalformedDump(
                    f"{path}{where}: routed_experts differs from input_expert_ids and output_expert_ids"
                )
            found.cross_checked += 1
    else:
        whole = payloads["routed_experts"]
        assert whole is not None  # one payload is there
        start = value.get("routed_experts_start_len", meta.get("routed_experts_start_len", 0)) or 0
        if not is_integer(start) or not 0 <= start <= tokens:
            raise MalformedDump(f"{path}{where}: routed_experts_start_len is {describe(start)}, wanted 0..{tokens}")
        if whole.size % (planes * top_k):
            raise MalformedDump(
                f"{path}{where}: routed_experts holds {whole.size} ids, no multiple of {planes} layers × {top_k} "
                "experts; correct hidden_layers and top_k_model"
            )
        beside: Any = value.get("routed_experts_shape", meta.get("routed_experts_shape"))
        rows = whole.size // (planes * top_k)
        if beside is not None and beside != [rows, planes, top_k]:
            raise MalformedDump(
                f"{path}{where}: routed_experts_shape is {str(beside)[:60]}, wanted "
                f"[{rows}, {planes}, {top_k}] (tokens, layers, experts per token); correct hidden_layers and "
                "top_k_model, or save the axes in that order"
            )
        ids = whole.reshape(-1, planes, top_k)
        if start:
            count(missing, "before routed_experts_start_len: not asked for", start)
    rows, end = len(ids), start + len(ids)
    if end not in (tokens - 1, tokens) and (schema is None or payloads["output_expert_ids"] is not None):
        raise MalformedDump(
            f"{path}{where}: {rows} rows from position {start} on, but {prompt} prompt and {completion} completion "
            f"tokens; wanted {max(tokens - 1 - start, 0)} rows (each token but the last, which is never run)"
            + ("; the capture buffer may be shorter than the prompt" if end < prompt else "; is L or K wrong?")
        )
    if end == tokens:
        found.with_last += 1
    else:
        found.without_last += 1
    weights = _decoded(path, where, meta, "expert_logits", "<f4")
    if weights is not None and weights.size != ids.size:
        raise MalformedDump(
            f"{path}{where}: expert_logits holds {weights.size} numbers for {ids.size} ids; wanted one each"
        )
    cached: Any = meta.get("cached_tokens")
    if cached is not None and not (is_integer(cached) and 0 <= cached <= prompt):
        raise MalformedDump(
            f"{path}{where}: cached_tokens is {str(cached)[:40]!r}, wanted a whole number of at most {prompt} prompt "
            "tokens; rows of a cached prefix are another request's"
        )
    return _Response(
        where, ids.astype(np.int32), None if weights is None else weights.reshape(ids.shape).astype(np.float32), start,
        prompt, layers, id_space, cached or 0, _name(value, meta),
    )  # fmt: skip


def _name(value: dict[str, Any], meta: dict[str, Any]) -> object:
    """The id of a response, null where it has none."""
    said = (meta.get("id"), value.get("id"), value.get("rid"), value.get("request_id"))
    return next((one for one in said if isinstance(one, str) or is_integer(one)), None)


def _partitions(
    path: Path, where: str, payloads: dict[str, npt.NDArray[Any] | None], schema: dict[str, Any],
    shape: tuple[int, int], lengths: tuple[int, int], missing: dict[str, int],
) -> tuple[npt.NDArray[Any], int]:  # fmt: skip
    """(rows of input and output partition one after the other, position of the first)."""
    found: list[tuple[npt.NDArray[Any], int]] = []
    for name in ("input", "output"):
        payload = payloads[f"{name}_expert_ids"]
        if payload is None:
            count(missing, f"{name}_expert_ids was not asked for", lengths[0] if name == "input" else lengths[1])
            continue
        rows: Any = schema.get(f"{name}_num_rows")
        start: Any = schema.get(f"{name}_start_position")
        if not is_integer(rows) or not is_integer(start) or rows < 0 or not 0 <= start < 2**32:
            raise MalformedDump(
                f"{path}{where}: expert_ids_schema has {name}_num_rows {describe(rows)}, {name}_start_position "
                f"{describe(start)}; wanted whole numbers"
            )
        if payload.size != rows * shape[0] * shape[1]:
            raise MalformedDump(
                f"{path}{where}: {name}_expert_ids holds {payload.size} ids, wanted {rows} rows × {shape[0]} layers × "
                f"{shape[1]} experts"
            )
        found.append((payload.reshape(rows, *shape), start))
    for (before, start_before), (_, start) in itertools.pairwise(found):
        if start_before + len(before) != start:
            raise MalformedDump(
                f"{path}{where}: input rows end at position {start_before + len(before)}, output rows start at {start}"
            )
    return np.concatenate([rows for rows, _ in found]), found[0][1]


def _schema(
    path: Path, where: str, schema: dict[str, Any] | None, asked: Asked
) -> tuple[int, int, list[int] | None, str | None]:
    """(layer planes, experts per token, MoE layers or null, id space or null)."""
    if schema is None:
        planes, top_k = asked.user.hidden_layers, asked.user.top_k_model
        if planes is None or top_k is None:
            raise MalformedDump(
                f"{path}{where}: routed_experts is a row of ids without its shape; say --meta hidden_layers=L and "
                "--meta top_k_model=K (num_hidden_layers and num_experts_per_tok of the model's config.json)"
            )
        return planes, top_k, None, None
    said: list[Any] = [schema.get(name) for name in ("num_layers", "top_k", "moe_layer_ids")]
    planes, top_k, layers = said
    if not is_integer(planes) or not is_integer(top_k) or not 0 < planes < 2**16 or not 0 < top_k < 2**16:
        raise MalformedDump(
            f"{path}{where}: expert_ids_schema has num_layers {describe(planes)}, top_k {describe(top_k)}; wanted "
            "positive whole numbers"
        )
    is_list = isinstance(layers, list) and all(is_integer(layer) and 0 <= layer < planes for layer in layers)
    if not is_list or layers != sorted(set(layers)):
        raise MalformedDump(
            f"{path}{where}: expert_ids_schema has moe_layer_ids {describe(layers)}, wanted ascending ones"
        )
    _refuse_swapped(path, where, (planes, top_k), schema.get("shape"), asked)
    for name, wanted in (("dtype", "int32"), ("layout", "row_major"), ("id_space", "logical_global")):
        if schema.get(name, wanted) != wanted:
            raise RefusedDump(
                f"{path}{where}: expert_ids_schema has {name} {describe(schema[name])}, only {wanted!r} is read"
            )
    return planes, top_k, layers, "logical_global"


def _refuse_swapped(path: Path, where: str, shape: tuple[int, int], said: object, asked: Asked) -> None:
    """Holds layers and experts per token of a schema against the model's and against a shape that stands beside.

    Ids in another order of axes fill the same bytes, so only what is said elsewhere can show it. An engine may run with
    fewer experts than the model has, but not with other layers.

    Raises:
        MalformedDump: they differ.
    """
    planes, top_k = shape
    hidden, experts = asked.user.hidden_layers, asked.user.top_k_model
    if hidden is not None and planes != hidden:
        swapped = " (the two are swapped)" if top_k == hidden or planes == experts else ""
        raise MalformedDump(
            f"{path}{where}: expert_ids_schema has num_layers {planes} and top_k {top_k}, the model has {hidden} layers"
            f"{'' if experts is None else f' and {experts} experts per token'}{swapped}; correct what is wrong, the "
            "schema or what you say of the model"
        )
    if said is not None and (not isinstance(said, list) or said[-2:] != [planes, top_k]):
        raise MalformedDump(
            f"{path}{where}: expert_ids_schema has shape {str(said)[:60]}, wanted [rows, {planes}, {top_k}] by its "
            "num_layers and top_k; another order of axes is not read"
        )


def _decoded(path: Path, where: str, meta: dict[str, Any], name: str, dtype: str) -> npt.NDArray[Any] | None:
    """The numbers of a base64 field; null where it was not asked for, none where it is empty."""
    text = meta.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise MalformedDump(
            f"{path}{where}: {name} is {describe(text)}, wanted base64 text; with skip_tokenizer_init it is another "
            "thing: save the response of /generate as it came"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedDump(f"{path}{where}: {name} is no base64 ({describe(error)}); was it cut short?") from None
    if len(data) % 4:
        raise MalformedDump(f"{path}{where}: {name} has {len(data)} bytes, wanted 4 a number; was it cut short?")
    return np.frombuffer(data, dtype=dtype)


def _whole(path: Path, where: str, meta: dict[str, Any], name: str) -> int:
    value: Any = meta.get(name)
    if not is_integer(value) or not 0 <= value < 2**32:
        raise MalformedDump(
            f"{path}{where}: meta_info.{name} is {describe(value)}, wanted a whole number: without it rows have no "
            "positions"
        )
    return int(value)


_PAYLOADS = ('"routed_experts"', '"input_expert_ids"', '"output_expert_ids"')


def _is_responses(sample: Sample) -> bool:
    value = sample.value[0] if isinstance(sample.value, list) and sample.value else sample.value
    if isinstance(value, dict):
        meta = value.get("meta_info")
        return isinstance(meta, dict) and any(name[1:-1] in meta for name in _PAYLOADS)
    # A line beyond what is looked at, or a document over many lines.
    text = sample.line if len(sample.line) > 2 else sample.head.decode("utf-8", errors="replace")
    return sample.line.startswith(("{", "[")) and '"meta_info"' in text and any(name in text for name in _PAYLOADS)


LAYOUTS = (
    Layout(
        "sglang_routed_experts",
        "SGLang responses of /generate with return_routed_experts",
        _is_responses,
        parse_responses,
    ),
)
