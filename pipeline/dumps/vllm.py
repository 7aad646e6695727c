"""vLLM: `routed_experts` as returned with a response: JSON, base64, npz, safetensors.

Every generation stores a sequence as [tokens, layers, k]: with all hidden layers on the axis (dense ones zero) and
without the last sampled token, or, around version 0.21, with the MoE layers only and the prompt in a field of its own.
What a cache or a preemption left out stays out: −1, null and omitted prefixes are holes, never expert 0. Routes that
VLLM_MOE_ROUTING_SIMULATION_STRATEGY made up look like real ones and cannot be told from them: the user must know.

Layouts after the documentation of vLLM 0.21 and later (routed_experts_replay, routed_experts).
Letters: T tokens of a sequence, L layers of the axis, K experts per token.
"""

import base64
import binascii
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.arrays import DAMAGE, Header, Npz, Safetensors
from pipeline.dumps.blocks import (
    MAX_LAYERS,
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
    is_integer,
    read_line,
)
from pipeline.dumps.jsonl import integers_of, loads
from pipeline.dumps.repeats import Responses, digest_of
from pipeline.dumps.sequences import Sequences
from schemas.trace import CheckRecord

MAX_DOCUMENT_BYTES = 32 * 1024 * 1024
"""Largest JSON document that is read whole; nested lists take some twenty times their text in memory."""

BYTES_KEYS = ("data", "base64", "b64", "bytes", "buffer", "routed_experts")
"""Fields of an encoded array that may hold its bytes; `shape` stands beside, and `dtype` where values need it."""

OFFSET_KEYS = ("start", "offset", "start_len", "start_position", "routed_experts_start_len")
"""Fields that say which token position the first row of an encoded array is of."""

_FIELDS = ("routed_experts", "prompt_routed_experts")
_PROMPT_LENGTHS = ("prompt_lengths", "prompt_length", "prompt_lens", "prompt_len", "num_prompt_tokens")
_LENGTHS = ("lengths", "length", "seq_lens", "seq_len", "seq_lengths")
_STARTS = ("routed_experts_start", "starts", "start", "offsets", "offset")
_LAYERS_SAID = ("num_layers", "num_hidden_layers", "hidden_layers", "num_moe_layers", "n_moe_layers")
_TOP_K_SAID = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
"""Fields that say the layers and experts per token; a bare top_k beside a response is the sampler's."""

_TRAINERS = {
    "attention_mask", "loss_mask", "response_mask", "rollout_id", "samples", "meta_info", "rollout_routed_experts",
}  # fmt: skip
"""Fields of other frameworks' dumps that carry routed_experts too, with paddings and orders of their own."""

_MAX_COMPANION_BYTES = 64 * 1024 * 1024
_DTYPES = {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"}


@dataclass(frozen=True)
class _Piece:
    """Routes of consecutive tokens of one request.

    ids: (T, L, K), of any integer type. start: position of the first row, null if unknown. prompt_tokens: positions
    below it are prefill; null if unknown. is_null: (T,) tokens that the engine returned nothing for.
    """

    ids: npt.NDArray[Any]
    request: int
    start: int | None
    prompt_tokens: int | None
    where: str
    is_null: npt.NDArray[np.bool_] | None = None


@dataclass
class _Tally:
    """What is said of all sequences of a dump at its end."""

    with_last: int = 0
    without_last: int = 0
    unplaced: int = 0
    device_layout: int = 0
    without_routes: int = 0

    def checks(self) -> Iterator[CheckRecord]:
        placed = self.with_last + self.without_last
        yield CheckRecord(
            name="token positions known",
            outcome="warn" if self.unplaced else "ok",
            wanted="lengths or an offset say which position the first row of a request is of",
            found=f"{self.unplaced} requests with unknown positions and phases: a prefix may be omitted; save the "
            f"offset beside ({', '.join(OFFSET_KEYS[:2])}) or the lengths"
            if self.unplaced
            else f"{placed} requests of known length: {self.without_last} without a row of the last token, "
            f"{self.with_last} with one"
            if placed
            else "as wanted",
        )
        if self.device_layout:
            yield CheckRecord(
                name="axis order",
                outcome="warn",
                wanted="[tokens, layers, k]",
                found=f"{self.device_layout} requests in the device layout [layers, tokens, k], as their lengths show: "
                "turned",
            )
        if self.without_routes:
            yield CheckRecord(
                name="every request has routes",
                outcome="warn",
                wanted="routed_experts of every choice",
                found=f"{self.without_routes} choices have null (preempted, or not captured): they are not in the "
                "trace",
            )


@dataclass
class _Walk:
    """Turns pieces into blocks: takes out holes and declared dense layers, refuses what was never written."""

    path: Path
    parsed: ParsedDump
    layers: list[int]
    axis: int
    """Length of the dump's layer axis; `layers` are the entries kept, and `axis` − 1 the largest possible."""
    sequences: Sequences = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = Sequences(self.layers)

    def blocks(self, pieces: Iterable[_Piece]) -> Iterator[RowBlock]:
        per_block = max(1, ROWS_PER_BLOCK // self.axis)
        for piece in pieces:
            if piece.ids.shape[1:] != (self.axis, self.parsed.top_k):
                raise MalformedDump(
                    f"{self.path}, {piece.where}: routed_experts is shaped {list(piece.ids.shape)}, the first one "
                    f"[…, {self.axis}, {self.parsed.top_k}]; one dump is of one model: split it"
                )
            largest = self.parsed.largest_storable_id
            if largest is not None and np.iinfo(piece.ids.dtype).max < largest:
                raise MalformedDump(
                    f"{self.path}, {piece.where}: ids of type {piece.ids.dtype}, the first ones in a wider type; "
                    "record all with one type"
                )
            captured = False
            for begin in range(0, len(piece.ids), per_block):
                end = min(begin + per_block, len(piece.ids))
                ids, present, captured = self._present(piece, begin, end, captured)
                if not present.any():
                    continue
                place = None if piece.start is None else piece.start + begin + np.flatnonzero(present)
                yield from self.sequences.blocks(
                    ids[present], request=piece.request, positions=place, prompt_tokens=piece.prompt_tokens
                )

    def _present(
        self, piece: _Piece, begin: int, end: int, captured: bool
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], bool]:
        """Ids of the kept layers, which tokens have routes, and whether one had any yet."""
        stored = piece.ids[begin:end]
        if stored.dtype.itemsize >= 4 and stored.size and (stored.min() < -(2**31) or stored.max() >= 2**31):
            raise MalformedDump(f"{self.path}, {piece.where}: an id beyond 31 bits in rows {begin}..{end - 1}")
        ids = stored.astype(np.int32)
        null = np.zeros(end - begin, dtype=bool) if piece.is_null is None else piece.is_null[begin:end]
        if len(self.layers) < self.axis:
            dense = np.delete(ids, self.layers, axis=1)[~null]
            if not np.isin(dense, (0, -1)).all():
                raise MalformedDump(
                    f"{self.path}, {piece.where}: there are routes in layers that moe_layer_ids leaves out; correct it"
                )
            ids = ids[:, self.layers]
        fill = int(np.iinfo(stored.dtype).max) if stored.dtype.kind == "u" and stored.dtype.itemsize <= 2 else None
        if fill is not None and ids.shape[2] > 1 and (wrapped := (ids == fill).all(axis=(1, 2))).any():
            raise MalformedDump(
                f"{self.path}, {piece.where}, row {begin + int(wrapped.argmax())}: all ids are {fill}: −1 (not "
                f"captured) in {stored.dtype} wrapped to it, and may be an expert elsewhere; record with a signed type"
            )
        gone = (ids == -1).all(axis=2)
        absent = gone.all(axis=1)
        partly = gone.any(axis=1) & ~absent & ~null
        if partly.any():
            row = int(partly.argmax())
            entries = [self.layers[entry] for entry in np.flatnonzero(gone[row])[:5].tolist()]
            raise MalformedDump(
                f"{self.path}, {piece.where}, row {begin + row}: layers {entries} are −1, but others have routes; if "
                "they are dense, say which are not: --meta moe_layer_ids=[…]"
            )
        present = ~absent & ~null
        first = int(present.argmax()) if present.any() else len(present)
        leading = np.arange(len(present)) < (0 if captured else first)
        missing = self.parsed.missing_positions
        for reason, tokens in (
            ("null, preempted", null),
            ("−1, cached prefix", absent & ~null & leading),
            ("−1, not captured", absent & ~null & ~leading),
        ):
            if tokens.any():
                missing[reason] = missing.get(reason, 0) + int(tokens.sum())
        self._refuse_zeros(piece, begin, ids, present)
        if len(self.layers) < self.axis:
            reason = "dense layers (not among moe_layer_ids)"
            rows = int(present.sum()) * (self.axis - len(self.layers))
            self.parsed.dropped_rows[reason] = self.parsed.dropped_rows.get(reason, 0) + rows
        return ids, present, captured or bool(present.any())

    def _refuse_zeros(
        self, piece: _Piece, begin: int, ids: npt.NDArray[np.int32], present: npt.NDArray[np.bool_]
    ) -> None:
        if ids.shape[2] < 2 or not (zero := (ids == 0).all(axis=2) & present[:, None]).any():
            return
        if (whole := zero.all(axis=1)).any():
            row = begin + int(whole.argmax())
            raise MalformedDump(
                f"{self.path}, {piece.where}, row {row}: the ids of all layers are 0 ({int(whole.sum())} such rows): a "
                "slot that was never written (a cached prefix, or another layer group's slots), not expert 0; record "
                "again without prefix reuse"
            )
        empty = zero.sum(axis=0) == present.sum()
        if empty.any():
            dense = [self.layers[entry] for entry in np.flatnonzero(empty).tolist()]
            others = [layer for layer in self.layers if layer not in dense]
            raise MalformedDump(
                f"{self.path}, {piece.where}: layers {dense[:5]}{' and more' if len(dense) > 5 else ''} are all zero "
                "in every row: dense, or never captured, but not expert 0; if they are dense, say --meta "
                f"moe_layer_ids={others}"
            )
        row, entry = (int(at[0]) for at in np.nonzero(zero))
        raise MalformedDump(
            f"{self.path}, {piece.where}, row {begin + row}: all ids of layer {self.layers[entry]} are 0: a part that "
            "was never written, not expert 0; record again"
        )


def _opened(
    dump: DumpFile,
    asked: Asked,
    layout: str,
    first: npt.NDArray[Any] | Header,
    pieces: Callable[[_Tally], Iterator[_Piece]],
    is_typed: bool,
) -> ParsedDump:
    """The parsed dump whose first sequence is shaped so; `is_typed` where ids come in a type of limited range."""
    _, axis, top_k = first.shape[-3:]
    said, hidden = asked.user.moe_layer_ids, asked.user.hidden_layers
    layers, ordinals = list(range(axis)), True
    moe, experts = None if said is None else len(said), asked.user.top_k_model
    is_other = hidden is not None and axis not in (hidden, moe) and (moe is not None or axis > hidden)
    # Without the MoE layers' numbers, fewer entries than hidden layers may be those alone; an engine may run with fewer
    # experts per token than the model has, but not with as many as it has layers.
    is_swapped = hidden is not None and axis != top_k and top_k in (hidden, moe) and axis not in (hidden, moe)
    if is_other or is_swapped or (axis == experts != top_k and axis not in (hidden, moe)):
        raise MalformedDump(
            f"{dump.path}: routed_experts is shaped [tokens, {axis}, {top_k}], but the model has "
            + ", ".join(
                f"{number} {what}"
                for number, what in ((hidden, "layers"), (moe, "MoE layers"), (experts, "experts per token"))
                if number is not None
            )
            + "; wanted [tokens, layers, k]: is an axis order wrong?"
        )
    if said is not None and len(said) < axis:
        if said[-1] >= axis or hidden not in (None, axis):
            raise MalformedDump(
                f"{dump.path}: the layer axis has {axis} entries; you say {len(said)} moe_layer_ids up to {said[-1]}"
                f"{'' if hidden is None else f' of {hidden} layers'}: it is neither theirs nor that of all layers"
            )
        layers, ordinals, hidden = said, False, axis
    parsed = ParsedDump(
        format=layout,
        blocks=iter(()),
        top_k=top_k,
        hidden_layers=None if ordinals else hidden,
        layers_are_ordinals=ordinals,
        largest_storable_id=int(np.iinfo(first.dtype).max) if is_typed else None,
        pass_boundaries="assumed_per_token",
        capture_method="routed_experts returned by the engine",
    )

    def blocks() -> Iterator[RowBlock]:
        tally = _Tally()
        yield from _Walk(dump.path, parsed, layers, axis).blocks(pieces(tally))
        parsed.checks.extend(tally.checks())

    parsed.blocks = blocks()
    return parsed


def _placed(
    ids: npt.NDArray[Any],
    where: str,
    *,
    path: Path,
    asked: Asked,
    tally: _Tally,
    offset: int | None,
    prompt: int | None,
    total: int | None,
    is_generated: bool,
    starts_with_hole: bool,
    says_nothing: int | None,
) -> tuple[npt.NDArray[Any], int | None]:
    """The array with tokens first, and the position of its first row; null where nothing says it.

    total: tokens of the sequence, with the last sampled one. is_generated: the prompt's routes stand elsewhere.
    says_nothing: the start where a prompt length alone is known, as the layout has it.

    Raises:
        MalformedDump: more rows than tokens. RefusedDump: an axis order that cannot be told.
    """
    tokens, layers = ids.shape[:2]
    begin = offset if offset is not None else prompt if is_generated else 0
    wanted = None if total is None or begin is None else (total - begin, total - begin - 1)
    fits = wanted is not None and tokens in wanted
    completion = None if total is None or prompt is None else total - prompt
    if not fits and not is_generated and offset is None and completion is not None:
        fits = tokens == completion - 1
    if not fits and wanted is not None and layers in wanted:
        declared = asked.user.hidden_layers if asked.user.moe_layer_ids is None else len(asked.user.moe_layer_ids)
        if layers > MAX_LAYERS or declared == tokens:
            tally.device_layout += 1
            ids, (tokens, layers), fits = ids.swapaxes(0, 1), (layers, tokens), True
        elif declared is None or declared not in (layers, asked.user.hidden_layers):
            raise RefusedDump(
                f"{path}, {where}: shaped {list(ids.shape)} for {total} tokens: [tokens, layers, k] with an omitted "
                "prefix, or the device layout [layers, tokens, k]? say --meta hidden_layers=N"
            )
    if layers > MAX_LAYERS:
        raise RefusedDump(
            f"{path}, {where}: {layers} layers, at most {MAX_LAYERS} are believed: the device layout [layers, tokens, "
            "k]? save [tokens, layers, k], or the lengths beside it"
        )
    if wanted is not None and tokens > max(wanted):
        raise MalformedDump(
            f"{path}, {where}: {tokens} rows for {max(wanted)} tokens; are rejected draft tokens or padding among them?"
        )
    if offset is not None or fits:
        if fits and total is not None and wanted is not None:
            tally.with_last += tokens == wanted[0]
            tally.without_last += tokens != wanted[0]
        if offset is None and not is_generated and total is not None and tokens not in (total, total - 1):
            # As many rows as follow the prompt: what is omitted is the whole prompt.
            return ids, prompt
        return ids, begin
    if is_generated:
        # Rows of a response are its tokens from the first one on, whether or not the last has one.
        tally.unplaced += begin is None
        return ids, begin
    if starts_with_hole:
        return ids, 0
    if total is None and says_nothing is not None:
        return ids, says_nothing
    tally.unplaced += 1
    return ids, None


# JSON


def parse_json(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Responses with `routed_experts`: an object or a list of them per line, or one document of at most 32 MiB.

    A record is a response (`choices`), an offline RequestOutput (`outputs`) or a flat object. An array is nested lists;
    an object of bytes in base64 (one of BYTES_KEYS), `shape`, `dtype` and maybe an offset (one of OFFSET_KEYS); base64
    with `routed_experts_shape` and `routed_experts_dtype` beside it; or base64 of a whole npy file.

    Raises:
        MalformedDump: no JSON, ragged lists, bytes that do not fit the shape. RefusedDump: nothing was captured.
    """
    records = _records(dump)
    first: _Piece | None = None
    facts: Mapping[str, Any] = {}
    choices, tally = 0, _Tally()
    for record, where in records:
        facts = facts or record
        choices += 1
        first = next(_response(dump.path, record, where, asked, tally, itertools.count()), None)
        if first is not None:
            break
    if first is None:
        raise RefusedDump(
            f"{dump.path}: {choices} responses, none with routes (routed_experts is null or absent); start the server "
            "with --enable-return-routed-experts"
        )

    def pieces(tally: _Tally) -> Iterator[_Piece]:
        requests, named = itertools.count(), Responses(dump.path)
        for record, where in _records(dump):
            routes = []
            for piece in _response(dump.path, record, where, asked, tally, requests):
                routes.append(digest_of([piece.ids]))
                yield piece
            if routes:
                name, choices, is_unique = _name(record)
                named.see(name, b"".join(routes), f", {where}", part=choices, is_unique=is_unique)
        parsed.copies_ruled_out = not named.unnamed

    is_typed = first.ids.dtype != np.int64
    parsed = _opened(dump, asked, "vllm_routed_experts", first.ids, pieces, is_typed)
    model, fingerprint = facts.get("model"), facts.get("system_fingerprint")
    parsed.model = model if isinstance(model, str) else None
    if isinstance(fingerprint, str) and fingerprint.startswith("vllm"):
        parsed.engine = fingerprint[:200]
    return parsed


def _records(dump: DumpFile) -> Iterator[tuple[dict[str, Any], str]]:
    stream = dump.stream()
    number, line = 1, read_line(stream, dump.path, 1) if _first_line_is_whole(dump) else b""
    if not line:
        text = dump.stream().read(MAX_DOCUMENT_BYTES + 1)
        if len(text) > MAX_DOCUMENT_BYTES:
            raise RefusedDump(
                f"{dump.path}: one JSON document of more than {MAX_DOCUMENT_BYTES} bytes; write one response per line, "
                "or the arrays as npz"
            )
        try:
            value = loads(text)
        except (ValueError, RecursionError) as error:
            raise MalformedDump(f"{dump.path}: no JSON document ({_said(error)}): is the dump truncated?") from None
        yield from _objects(dump.path, value, "the document")
        return
    stream = dump.stream()
    number = 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if not line.strip():
            continue
        try:
            value = loads(line)
        except (ValueError, RecursionError) as error:
            hint = "" if stream.peek(1) else "; it is the last line: the dump is truncated, copy or record it again"
            raise MalformedDump(f"{dump.path}, line {number}: no JSON ({_said(error)}){hint}") from None
        yield from _objects(dump.path, value, f"line {number}")


def _first_line_is_whole(dump: DumpFile) -> bool:
    stream = dump.stream()
    for _ in range(1000):
        line = stream.readline(MAX_LINE_BYTES + 1)
        if line.strip() or not line:
            break
    try:
        loads(line)
    except (ValueError, RecursionError):
        return False
    return len(line) <= MAX_LINE_BYTES


def _objects(path: Path, value: object, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    listed = value if isinstance(value, list) else [value]
    for index, record in enumerate(listed):
        place = f"{where}, entry {index}" if isinstance(value, list) else where
        if not isinstance(record, dict):
            raise MalformedDump(f"{path}, {place}: wanted a response (an object), found {str(record)[:40]!r}")
        yield record, place


def _response(
    path: Path, record: dict[str, Any], where: str, asked: Asked, tally: _Tally, requests: Iterator[int]
) -> Iterator[_Piece]:
    """The pieces of a response: the prompt's routes go to its first choice, whose pass it was."""
    listed = next((record[key] for key in ("choices", "outputs") if isinstance(record.get(key), list)), None)
    choices = [record] if listed is None else listed
    usage = record.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    for index, choice in enumerate(choices):
        place = where if listed is None else f"{where}, choice {index}"
        if not isinstance(choice, dict):
            raise MalformedDump(f"{path}, {place}: wanted an object, found {str(choice)[:40]!r}")
        request = next(requests)
        prompt = _first_count((record, choice), ("prompt_token_ids",))
        if prompt is None and is_integer(usage.get("prompt_tokens")):
            prompt = int(usage["prompt_tokens"])
        completion = _first_count((choice,), ("token_ids", "output_token_ids", "completion_token_ids"))
        if completion is None and len(choices) == 1 and is_integer(usage.get("completion_tokens")):
            completion = int(usage["completion_tokens"])
        if (prompt or 0) < 0 or (completion or 0) < 0:
            raise MalformedDump(
                f"{path}, {place}: {prompt} prompt and {completion} completion tokens, wanted 0 or more"
            )
        total = None if prompt is None or completion is None else prompt + completion
        details = usage.get("prompt_tokens_details")
        cached: Any = details.get("cached_tokens") if isinstance(details, dict) else None
        carriers = (choice,) if listed is None else (choice, record)
        asked_prompt = _array(path, carriers, "prompt_routed_experts", place) if index == 0 or listed is None else None
        is_split = any(holder.get("prompt_routed_experts") is not None for holder in carriers)
        routes = _array(path, (choice, *_nested(choice)), "routed_experts", place)
        if asked_prompt is not None:
            ids, null, offset = asked_prompt
            # What ends with the prompt: its rows are its tokens, the last one's included.
            ids, start = _placed(
                ids, f"{place}, prompt", path=path, asked=asked, tally=_Tally(), offset=offset, prompt=prompt,
                total=prompt, is_generated=False, starts_with_hole=_starts_with_hole(ids, null), says_nothing=0,
            )  # fmt: skip
            if prompt is None and start == 0:
                prompt = len(ids)
                total = None if completion is None else prompt + completion
            tally.unplaced += start is None
            yield _Piece(ids, request, start, prompt, f"{place}, prompt", null)
        elif is_split and prompt is None:
            prompt = _rows_of(path, carriers, place)
            total = None if completion is None or prompt is None else prompt + completion
        if routes is None:
            tally.without_routes += 1
            continue
        ids, null, offset = routes
        ids, start = _placed(
            ids, place, path=path, asked=asked, tally=tally, offset=offset, prompt=prompt, total=total,
            is_generated=is_split, starts_with_hole=_starts_with_hole(ids, null), says_nothing=None,
        )  # fmt: skip
        if start is None and total is not None and is_integer(cached) and total - 1 - len(ids) > cached:
            raise MalformedDump(
                f"{path}, {place}: {len(ids)} rows for {total} tokens, of which the usage says {cached} were cached; "
                f"wanted {total - 1} rows, or those behind the cached prefix: is the shape wrong?"
            )
        yield _Piece(ids, request, start, prompt, place, null)


def _name(record: dict[str, Any]) -> tuple[object, tuple[str, ...], bool]:
    """(what names a response, or null; the indices of its choices; whether a name never stands for two).

    A server makes an id of its own for every response; offline, requests are counted from 0 in every run.
    """
    choices = record.get("choices")
    listed = choices if isinstance(choices, list) else []
    indices = tuple(str(choice.get("index")) for choice in listed if isinstance(choice, dict))
    for key, is_unique in (("id", True), ("request_id", False), ("req_id", False), ("rid", False)):
        name = record.get(key)
        if isinstance(name, str) or is_integer(name):
            # Numbers count something, in every run anew.
            return name, indices, is_unique and isinstance(name, str)
    return None, (), False


def _nested(choice: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    message = choice.get("message")
    return (message,) if isinstance(message, dict) else ()


def _rows_of(path: Path, holders: Iterable[dict[str, Any]], where: str) -> int | None:
    found = _array(path, holders, "prompt_routed_experts", where)
    return None if found is None or found[2] not in (None, 0) else len(found[0])


def _first_count(holders: Iterable[dict[str, Any]], keys: tuple[str, ...]) -> int | None:
    return next((len(holder[key]) for holder in holders for key in keys if isinstance(holder.get(key), list)), None)


def _starts_with_hole(ids: npt.NDArray[Any], null: npt.NDArray[np.bool_] | None) -> bool:
    # A cached prefix is in the array as −1, so nothing before it was left out.
    return bool(len(ids) and ((null is not None and null[0]) or (ids[0] == -1).all()))


def _array(
    path: Path, holders: Iterable[dict[str, Any]], name: str, where: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None, int | None] | None:
    """(ids (T, L, K), tokens that are null, offset) of the first holder with that field; null if none has routes."""
    for holder in holders:
        value = holder.get(name)
        if value is None:
            continue
        offset = _offset(path, where, holder, f"{name}_start", f"{name}_offset", f"{name}_start_len")
        if isinstance(value, dict):
            offset = offset if offset is not None else _offset(path, where, value, *OFFSET_KEYS)
            data = next((value[key] for key in BYTES_KEYS if isinstance(value.get(key), str)), None)
            if data is None:
                raise MalformedDump(
                    f"{path}, {where}: {name} has fields {', '.join(sorted(map(str, value))[:8])[:120]}; wanted its "
                    f"bytes in base64 as one of {', '.join(BYTES_KEYS)}"
                )
            ids = _decoded(path, where, name, data, value.get("shape"), value.get("dtype"))
            _refuse_other_axes(path, where, name, ids, value, (*_LAYERS_SAID, "layers"), (*_TOP_K_SAID, "top_k", "k"))
            _refuse_other_axes(path, where, name, ids, holder, _LAYERS_SAID, _TOP_K_SAID)
            return ids, None, offset
        if isinstance(value, str):
            ids = _decoded(path, where, name, value, holder.get(f"{name}_shape"), holder.get(f"{name}_dtype"))
            _refuse_other_axes(path, where, name, ids, holder, _LAYERS_SAID, _TOP_K_SAID)
            return ids, None, offset
        found = _from_lists(value)
        if isinstance(found, str):
            raise MalformedDump(f"{path}, {where}: {name}: {found}")
        return (*found, offset) if found[0].size else None
    return None


def _refuse_other_axes(
    path: Path, where: str, name: str, ids: npt.NDArray[Any], said: dict[str, Any], layers: tuple[str, ...],
    top_k: tuple[str, ...],
) -> None:  # fmt: skip
    """Holds the shape beside encoded ids against layers and k said elsewhere: any order of axes fills the same bytes.

    Raises:
        MalformedDump: they differ.
    """
    for keys, axis in ((layers, 1), (top_k, 2)):
        numbers = {key: said[key] for key in keys if is_integer(said.get(key))}
        # Of hidden and MoE layers either may be the axis.
        if numbers and ids.shape[axis] not in numbers.values():
            key = next(iter(numbers))
            raise MalformedDump(
                f"{path}, {where}: {name} is shaped {list(ids.shape)}, but {key} is {numbers[key]}; wanted [tokens, "
                "layers, k]: is an axis order wrong?"
            )


def _offset(path: Path, where: str, holder: dict[str, Any], *keys: str) -> int | None:
    key = next((key for key in keys if holder.get(key) is not None), None)
    if key is None:
        return None
    if not is_integer(holder[key]) or not 0 <= holder[key] < 2**31:
        raise MalformedDump(f"{path}, {where}: {key} is {str(holder[key])[:40]!r}, wanted a position of 0 or more")
    return int(holder[key])


def _from_lists(value: object) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None] | str:
    """(ids (T, L, K), tokens that are null); or what is wrong. Null tokens hold −1."""
    tokens = integers_of(value, 3)
    if tokens is None:
        return f"{str(value)[:60]!r}… is no list [token][layer][k] of whole numbers"
    null = np.asarray(tokens.is_null()) if tokens.null_count else None
    layers = tokens.drop_null().flatten()
    flat = layers.flatten()
    if layers.null_count or flat.null_count:
        return "a layer or an id is null; only whole tokens may be"
    present = len(tokens) - tokens.null_count
    if present == 0:
        return np.zeros((0, 0, 0), dtype=np.int64), None
    width, top_k = len(layers) // present, len(flat) // max(len(layers), 1)
    uniform = (
        width
        and top_k
        and (np.asarray(tokens.drop_null().value_lengths()) == width).all()
        and (np.asarray(layers.value_lengths()) == top_k).all()
    )
    if not uniform:
        return "ragged lists: every token has as many layers, every layer as many ids; is one missing?"
    ids = np.full((len(tokens), width, top_k), -1, dtype=np.int64)
    ids[slice(None) if null is None else ~null] = np.asarray(flat).reshape(present, width, top_k)
    return ids, null


def _decoded(path: Path, where: str, name: str, text: str, shape: object, dtype: object) -> npt.NDArray[Any]:
    """An array from base64: of an npy file, or of bare little-endian values with shape and type beside."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedDump(f"{path}, {where}: {name} is no base64 ({text[:24]!r}…); is the dump truncated?") from None
    if data.startswith(b"\x93NUMPY"):
        try:
            array = np.load(io.BytesIO(data), allow_pickle=False)
        except DAMAGE as error:
            raise MalformedDump(f"{path}, {where}: {name} is a damaged npy file ({_said(error)})") from None
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 3 or not array.size:
            raise MalformedDump(
                f"{path}, {where}: {name} is {array.dtype} shaped {list(array.shape)}, wanted integers shaped "
                "[tokens, layers, k]"
            )
        return array
    if not isinstance(shape, list) or len(shape) != 3 or not all(is_integer(one) and 0 < one < 2**31 for one in shape):
        raise MalformedDump(
            f"{path}, {where}: {name} is base64 with shape {str(shape)[:60]}, wanted [tokens, layers, k] beside it"
        )
    values = prod(shape)
    spelled = str(dtype).removeprefix("torch.") if dtype is not None else None
    if spelled is not None and spelled not in _DTYPES:
        try:
            spelled = np.dtype(spelled).name
        except (TypeError, ValueError, SyntaxError):
            spelled = "none"
        if spelled not in _DTYPES or str(dtype).startswith(">"):
            raise MalformedDump(f"{path}, {where}: {name} has dtype {str(dtype)[:40]!r}, wanted an integer type")
    if spelled is None:
        width = len(data) // values
        spelled = {1: "uint8", 2: "uint16", 4: "uint32"}.get(width, "none")
        is_certain = spelled != "none" and len(data) == width * values
        if not is_certain or (np.frombuffer(data, dtype=f"<u{width}") >> (8 * width - 1)).any():
            raise MalformedDump(
                f"{path}, {where}: {name} is {len(data)} bytes for a shape of {values} values and has no dtype; add it"
            )
    kind = np.dtype(spelled).newbyteorder("<")
    if len(data) != values * kind.itemsize:
        raise MalformedDump(
            f"{path}, {where}: {name} is {len(data)} bytes, wanted {values * kind.itemsize} for {shape} of {spelled}; "
            "is the dump truncated?"
        )
    return np.frombuffer(data, dtype=kind).reshape(shape)


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


# npz and safetensors


@dataclass(frozen=True)
class _Arrays:
    """The arrays of an npz or a safetensors file, whichever it is: their headers, a read, and a giving back."""

    headers: Mapping[str, Header]
    read: Callable[[str], tuple[npt.NDArray[Any], Callable[[], None]]]
    said: Mapping[str, Any]


def parse_npz(dump: DumpFile, asked: Asked) -> ParsedDump:
    """npz with `routed_experts` [T, L, K] (or several, with the request before or after the name); see `_of_arrays`."""
    archive = Npz(dump)

    def read(name: str) -> tuple[npt.NDArray[Any], Callable[[], None]]:
        stored = archive.array(name, asked.spool_folder)
        return stored.values, stored.let_go

    names = [name for name in archive.names if name != "meta"]
    said = archive.json("meta") if "meta" in archive.names else {}
    try:
        headers = {name: archive.header(name) for name in names}
    except KeyError as error:
        # The archive adds `.npy` to every name; what has none is no array.
        raise MalformedDump(f"{dump.path}: a member that is no npy array ({_said(error)}); save arrays alone") from None
    return _of_arrays(dump, asked, "vllm_routed_experts_npz", _Arrays(headers, read, said))


def parse_safetensors(dump: DumpFile, asked: Asked) -> ParsedDump:
    """safetensors with `routed_experts` [T, L, K] (or several, with the request before or after the name)."""
    file = Safetensors(dump)
    arrays = _Arrays(file.headers, lambda name: (file.array(name), lambda: None), file.metadata)
    return _of_arrays(dump, asked, "vllm_routed_experts_safetensors", arrays)


def _of_arrays(dump: DumpFile, asked: Asked, layout: str, arrays: _Arrays) -> ParsedDump:
    """One request per array, or several in one array where `lengths` says so.

    Beside `routed_experts` may stand, with the same prefix and suffix: `prompt_routed_experts`, a prompt length (one of
    _PROMPT_LENGTHS, or `prompt_token_ids`), lengths of whole sequences (one of _LENGTHS), offsets (one of _STARTS). An
    array [N, T, L, K] is a padded batch and needs lengths: padding is left out by length, never by value.

    Raises:
        MalformedDump: shapes and lengths that contradict each other. RefusedDump: no ids, or padding of unknown length.
    """
    routes = _route_names(arrays.headers)
    if not routes:
        raise RefusedDump(f"{dump.path}: no array named routed_experts; found {', '.join(list(arrays.headers)[:5])}")
    for name in [name for pair in routes for name in pair if name is not None]:
        header = arrays.headers[name]
        if header.dtype.kind not in "iu" or header.is_bf16 or len(header.shape) not in (3, 4):
            raise RefusedDump(
                f"{dump.path}: {name} is {header.dtype} shaped {list(header.shape)}, wanted integer ids shaped "
                "[tokens, layers, k]; scores and counts are no trace"
            )
        if 0 in header.shape:
            raise MalformedDump(
                f"{dump.path}: {name} is shaped {list(header.shape)}, so it holds no route; record again"
            )
    sizes = {arrays.headers[name].dtype for pair in routes for name in pair if name is not None}
    if len(sizes) > 1:
        raise MalformedDump(f"{dump.path}: routed_experts in types {', '.join(sorted(map(str, sizes)))}; save in one")
    first = next(name for name in routes[0] if name is not None)

    def pieces(tally: _Tally) -> Iterator[_Piece]:
        requests = itertools.count()
        for prompt_name, name in routes:
            yield from _pieces(dump.path, arrays, asked, tally, requests, prompt_name, name)

    parsed = _opened(dump, asked, layout, _turned(arrays, first, dump.path, asked), pieces, is_typed=True)
    experts, model = arrays.said.get("num_experts"), arrays.said.get("model")
    if experts is not None:
        if not re.fullmatch(r"[0-9]{1,9}", str(experts)) or int(str(experts)) == 0:
            raise MalformedDump(f"{dump.path}: num_experts is {str(experts)[:40]!r}, wanted a positive whole number")
        parsed.num_experts = int(str(experts))
    parsed.model = model if isinstance(model, str) else None
    return parsed


def _turned(arrays: _Arrays, name: str, path: Path, asked: Asked) -> Header:
    """The header of the first array, with its tokens first: lengths may show the device layout."""
    header = arrays.headers[name]
    if len(header.shape) == 4:
        return header
    lengths = _companion(path, arrays, name, _LENGTHS)
    if lengths is None or len(lengths) != 1:
        return header
    starts = _companion(path, arrays, name, _STARTS)
    view = np.broadcast_to(np.zeros((), dtype=header.dtype), header.shape)
    turned, _ = _placed(
        view, name, path=path, asked=asked, tally=_Tally(), offset=None if starts is None else int(starts[0]),
        prompt=None, total=int(lengths[0]), is_generated=False, starts_with_hole=False, says_nothing=None,
    )  # fmt: skip
    return Header(turned.shape, header.dtype)


def _route_names(names: Iterable[str]) -> list[tuple[str | None, str | None]]:
    """(name of the prompt's array, of the rest's) per request, in the order of the file."""
    found: dict[str, list[str | None]] = {}
    for name in names:
        kind = _kind(name)
        if kind is not None:
            request = name.replace(kind, "", 1)
            found.setdefault(request, [None, None])[kind == "routed_experts"] = name
    return [(pair[0], pair[1]) for pair in found.values()]


def _kind(name: str) -> str | None:
    """Which of _FIELDS an array is of, its request before or after the name; null for others and for companions."""
    match = re.fullmatch(r"(?:.*[^A-Za-z])??(prompt_routed_experts|routed_experts)(?:[^A-Za-z].*)?", name)
    if match is None or "rollout" in name:
        return None
    kind = match.group(1)
    if kind == "routed_experts" and "prompt_routed_experts" in name:
        kind = "prompt_routed_experts"
    return None if re.search(r"routed_experts_(start|shape|dtype|offset)", name) else kind


def _companion(path: Path, arrays: _Arrays, name: str, keys: tuple[str, ...]) -> npt.NDArray[np.int64] | None:
    """Whole numbers that stand beside an array of routes, flat; null if there are none."""
    kind = _kind(name) or "routed_experts"
    for key in keys:
        beside = name.replace(kind, key)
        header = arrays.headers.get(beside)
        if header is None:
            continue
        if header.dtype.kind not in "iu" or len(header.shape) > 2 or header.size_bytes > _MAX_COMPANION_BYTES:
            raise MalformedDump(
                f"{path}: {beside} is {header.dtype} shaped {list(header.shape)}, wanted one whole number per request"
            )
        values = arrays.read(beside)[0].reshape(-1).astype(np.int64)
        if not len(values) or values.min() < 0 or values.max() >= 2**31:
            raise MalformedDump(f"{path}: {beside} holds {values[:5].tolist()}, wanted whole numbers of 0 or more")
        return values
    return None


def _pieces(
    path: Path, arrays: _Arrays, asked: Asked, tally: _Tally, requests: Iterator[int], prompt_name: str | None,
    name: str | None,
) -> Iterator[_Piece]:  # fmt: skip
    main = name or prompt_name
    assert main is not None, "a pair of names holds one"
    prompts = _companion(path, arrays, main, _PROMPT_LENGTHS)
    if prompts is None:
        beside = arrays.headers.get(main.replace(_kind(main) or "", "prompt_token_ids"))
        prompts = None if beside is None or len(beside.shape) != 1 else np.array([beside.shape[0]])
    lengths = _companion(path, arrays, main, _LENGTHS)
    starts = _companion(path, arrays, main, _STARTS)
    request = None
    if prompt_name is not None:
        ids, let_go = arrays.read(prompt_name)
        if ids.ndim != 3 or (prompts is not None and (len(prompts) != 1 or len(ids) != prompts[0])):
            raise MalformedDump(
                f"{path}: {prompt_name} is shaped {list(ids.shape)}, wanted the {prompts} tokens of one prompt"
            )
        prompts, request = np.array([len(ids)]), next(requests)
        yield _Piece(ids, request, 0, len(ids), prompt_name)
        let_go()
    if name is None:
        return
    ids, let_go = arrays.read(name)
    if ids.ndim == 4:
        parts = _padded_batch(path, name, ids, lengths, starts)
    elif lengths is not None and len(lengths) > 1:
        parts = _joined(path, name, ids, lengths, starts)
    else:
        parts = [(ids, None if lengths is None else int(lengths[0]))]
    for values, what in ((prompts, "prompt lengths"), (starts, "offsets")):
        if values is not None and len(values) != len(parts):
            raise MalformedDump(f"{path}: {len(values)} {what} for {len(parts)} sequences of {name}")
    for index, (part, total) in enumerate(parts):
        prompt = None if prompts is None else int(prompts[index])
        if prompt is not None and total is not None and prompt > total:
            raise MalformedDump(f"{path}: {name}: a prompt of {prompt} tokens in a sequence of {total}")
        where = name if len(parts) == 1 else f"{name}, sequence {index}"
        placed, start = _placed(
            part, where, path=path, asked=asked, tally=tally,
            offset=None if starts is None else int(starts[index]), prompt=prompt, total=total,
            is_generated=prompt_name is not None, starts_with_hole=_starts_with_hole(part, None),
            says_nothing=None if prompt is None else 0,
        )  # fmt: skip
        yield _Piece(placed, next(requests) if request is None else request, start, prompt, where)
    let_go()


def _joined(
    path: Path,
    name: str,
    ids: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64] | None,
) -> list[tuple[npt.NDArray[Any], int | None]]:
    """Sequences that stand one after the other in an array, cut by their lengths."""
    omitted = np.zeros(len(lengths), dtype=np.int64) if starts is None else starts
    if len(omitted) != len(lengths):
        raise MalformedDump(f"{path}: {len(omitted)} offsets for {len(lengths)} sequences of {name}")
    for last in (0, 1):
        rows = lengths - last - omitted
        if rows.sum() == len(ids) and rows.min() >= 0:
            ends = np.cumsum(rows).tolist()
            cuts = itertools.pairwise([0, *ends])
            return [
                (ids[begin:end], total)
                for (begin, end), total in zip(cuts, lengths.tolist(), strict=True)
                if end > begin
            ]
    raise MalformedDump(
        f"{path}: {name} has {len(ids)} rows, but its {len(lengths)} lengths add up to {lengths.sum() - omitted.sum()} "
        f"({len(lengths)} fewer without the last tokens): rows are missing, or padding is among them"
    )


def _padded_batch(
    path: Path,
    name: str,
    ids: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64] | None,
    starts: npt.NDArray[np.int64] | None,
) -> list[tuple[npt.NDArray[Any], int | None]]:
    if lengths is None or len(lengths) != len(ids):
        raise RefusedDump(
            f"{path}: {name} is a batch shaped {list(ids.shape)} with {0 if lengths is None else len(lengths)} lengths"
            f"; padding looks like routes: save the {len(ids)} lengths beside it (an array named lengths)"
        )
    omitted = np.zeros(len(lengths), dtype=np.int64) if starts is None else starts
    if len(omitted) != len(lengths):
        raise MalformedDump(f"{path}: {len(omitted)} offsets for {len(lengths)} sequences of {name}")
    last = int((lengths - omitted).max() > ids.shape[1])
    rows = lengths - omitted - last
    if rows.max() > ids.shape[1] or rows.min() < 0:
        raise MalformedDump(f"{path}: {name} is shaped {list(ids.shape)}, but a length is {int(lengths.max())}")
    return [(ids[index, :count], int(lengths[index])) for index, count in enumerate(rows.tolist()) if count > 0]


# Recognition

_IN_TEXT = re.compile(rb'"(?:prompt_)?routed_experts"\s*:')
_RESPONSE = re.compile(rb'"object"\s*:\s*"(?:text_completion|chat\.completion)"')
_TENSOR = re.compile(rb'"([^"\\]{0,200})"\s*:\s*\{\s*"(?:dtype|shape|data_offsets)"')


def _is_response(sample: Sample) -> bool:
    if sample.value is None:
        head = sample.head.lstrip()
        if not head.startswith((b"{", b"[")) or any(b'"%s"' % key.encode() in head for key in _TRAINERS):
            return False
        return bool(_IN_TEXT.search(head) or (_RESPONSE.search(head) and b'"choices"' in head))
    value = sample.value[0] if isinstance(sample.value, list) and sample.value else sample.value
    if not isinstance(value, dict) or _TRAINERS & set(value):
        return False
    listed: list[Any] = next((value[key] for key in ("choices", "outputs") if isinstance(value.get(key), list)), [])
    inner = [choice for choice in listed if isinstance(choice, dict)]
    if any("meta_info" in choice for choice in inner):
        return False
    inner += [message for choice in inner if isinstance(message := choice.get("message"), dict)]
    return any(key in one for one in (value, *inner) for key in _FIELDS)


def _is_npz(sample: Sample) -> bool:
    names = {name.removesuffix(".npy") for name in sample.members}
    return bool(_route_names(names)) and not _TRAINERS & names


def _is_safetensors(sample: Sample) -> bool:
    if sample.head[8:9] != b"{":
        return False
    names = {name.decode("utf-8", "replace") for name in _TENSOR.findall(sample.head[8:])}
    return bool(_route_names(names)) and not _TRAINERS & names


LAYOUTS = (
    Layout("vllm_routed_experts_npz", "npz with routed_experts [tokens, layers, k] (vLLM)", _is_npz, parse_npz),
    Layout(
        "vllm_routed_experts_safetensors",
        "safetensors with routed_experts [tokens, layers, k] (vLLM)",
        _is_safetensors,
        parse_safetensors,
    ),
    Layout("vllm_routed_experts", "JSON or JSONL responses with routed_experts (vLLM)", _is_response, parse_json),
)
