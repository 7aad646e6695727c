"""Binary dumps of tools built on llama.cpp and of flash-moe, all little-endian; how graphs become passes is in
`llama_cpp`.

Sizes in a file are somebody's word: a record is held against the bytes that are there before any of it is kept.

Letters: T tokens of a graph, K experts per token, D width of the hidden state.
"""

import io
import struct
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import (
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    NoTrace,
    ParsedDump,
    RefusedDump,
    RowBlock,
    Sample,
)
from pipeline.dumps.llama_cpp import (
    CALLBACK,
    MAX_PASS_SELECTIONS,
    PERTURBATION,
    Recorded,
    Rows,
    draft_check,
    draft_layer,
    recorded,
    survey,
)
from schemas.trace import MAX_TOP_K, PHASE_CODES, CheckRecord

Words = npt.NDArray[np.int32]

MAX_TOKENS = 65536
"""Most tokens of a graph: as many as an event may have rows."""

_CHUNK_WORDS = 2 * 1024 * 1024
_TRUNCATED = "the dump is truncated, copy or record it again"


class _WordStream:
    """The content as 32-bit words, read in chunks; offsets are counted in bytes from the start."""

    def __init__(self, dump: DumpFile, chunk_words: int = 0) -> None:
        self.path, self._stream = dump.path, dump.stream()
        self._chunk_bytes = 4 * (chunk_words or _CHUNK_WORDS)
        self.offset_bytes = 0
        self._bytes = b""

    def words(self) -> Words:
        """What is held and not yet taken."""
        return np.frombuffer(self._bytes, dtype="<i4", count=len(self._bytes) // 4)

    def take(self, words: int) -> None:
        """Lets go of so many words."""
        self._bytes = self._bytes[4 * words :]
        self.offset_bytes += 4 * words

    def more(self) -> bool:
        """Reads on; false at the end of the file."""
        chunk = self._stream.read(self._chunk_bytes)
        self._bytes += chunk
        return bool(chunk)

    @property
    def left_bytes(self) -> int:
        return len(self._bytes)


# Records that say how long they are: MTSP and llama-moe-trace


@numba.njit(cache=True, nogil=True)
def _walk(words, header, magic, top_k, max_tokens, heads):  # type: ignore[no-untyped-def]
    """(records found, words taken, whether the next one is no record); `heads` gets (word, layer, T) of each.

    A record is [magic,] layer, T, K and T·K ids; magic 0 stands for none. top_k 0 takes that of the first record.
    """
    place, found = 0, 0
    before = header - 3
    while place + header <= len(words) and found < len(heads):
        layer, tokens, width = words[place + before], words[place + before + 1], words[place + before + 2]
        if before and words[place] != magic:
            return found, place, True
        if layer < 0 or layer > 65535 or tokens < 0 or tokens > max_tokens or width != top_k:
            return found, place, True
        if place + header + tokens * width > len(words):
            break
        heads[found, 0], heads[found, 1], heads[found, 2] = place + header, layer, tokens
        found += 1
        place += header + tokens * width
    return found, place, False


def _records(dump: DumpFile, *, header: int, magic: int, top_k: int, what: str) -> Iterator[Rows]:
    """Rows of records of `header` words, whole records at a time."""
    stream = _WordStream(dump)
    heads = np.zeros((256 * 1024, 3), dtype=np.int64)
    records = 0
    is_open = True
    while True:
        words = stream.words()
        found, taken, is_wrong = _walk(words, header, magic, top_k, MAX_TOKENS, heads)
        if found:
            start, layer, tokens = heads[:found].T
            within = np.arange(int(tokens.sum())) - np.repeat(np.cumsum(tokens) - tokens, tokens)
            rows = np.repeat(start, tokens) + within * top_k
            ids = words[rows[:, None] + np.arange(top_k)]
            yield Rows(np.repeat(layer, tokens), np.repeat(records + np.arange(found), tokens), ids)
            records += found
            stream.take(taken)
            if taken < len(words):
                continue
        if is_wrong:
            at = words[taken : taken + header].tolist()
            raise MalformedDump(
                f"{dump.path}, byte {stream.offset_bytes}, record {records} (counted from 0): {at} is no record; "
                f"wanted {what} with a layer below 65,536, at most {MAX_TOKENS:,} tokens and k = {top_k} as in the "
                "first: is a part of the file missing?"
            )
        if not is_open:
            break
        is_open = stream.more()
    if stream.left_bytes:
        raise MalformedDump(
            f"{dump.path}, byte {stream.offset_bytes}, record {records} (counted from 0): the file ends inside it: "
            f"{_TRUNCATED}"
        )


def _first_width(dump: DumpFile, header: int) -> int:
    head = dump.stream().read(4 * header)
    if len(head) < 4 * header:
        raise MalformedDump(f"{dump.path}: {len(head)} bytes, no whole record: {_TRUNCATED}")
    width = int(np.frombuffer(head, dtype="<i4")[header - 1])
    if not 0 < width <= MAX_TOP_K:
        raise MalformedDump(f"{dump.path}: its first record has k = {width}, wanted 1 to {MAX_TOP_K}")
    return width


_MTSP = int.from_bytes(b"MTSP", "little")


def parse_mtsp(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`MTSP` records: u32 magic, layer, T, K, then i32 ids [T, K] (llama.cpp-lab `moe-trace-spec`).

    The target and its draft block (multi-token prediction, numbered n_layer) write into one file. The draft block is
    left out and counted. Positions are not recorded, so which tokens of a verifying pass were accepted, and which are
    evaluated again, cannot be told: all passes of the target stay, as they ran.

    Raises:
        MalformedDump: broken records. RefusedDump: it cannot be told whether the highest layer is a draft block.
    """
    top_k = _first_width(dump, 4)

    def source() -> Iterator[Rows]:
        what = "[MTSP, layer, tokens, k, ids]"
        return _records(dump, header=4, magic=_MTSP, top_k=top_k, what=what)

    found = survey(dump, source())
    draft = draft_layer(found, asked)
    if draft is None and asked.user.hidden_layers is None:
        raise RefusedDump(
            f"{dump.path}: layer {found.layers[-1]} never runs by itself, so whether it is the model's last or its "
            f"draft block cannot be told; say --meta hidden_layers={found.layers[-1]} if it is the draft block, "
            f"--meta hidden_layers={found.layers[-1] + 1} if not"
        )
    parsed = ParsedDump(
        format="mtsp", blocks=iter(()), top_k=top_k, engine="llama.cpp", capture_method=CALLBACK,
        hidden_layers=draft,
    )  # fmt: skip
    parsed.checks += [PERTURBATION, draft_check(found, asked, draft)]
    rows = Recorded(dump, parsed, source, found, draft_from=draft)

    def blocks() -> Iterator[RowBlock]:
        yield from rows.blocks()
        parsed.checks.append(
            CheckRecord(
                name="speculation verified",
                outcome="warn",
                wanted="which tokens of a verifying pass were accepted",
                found=f"not recorded: {rows.several_token_passes} passes of several tokens hold rejected drafts as "
                f"well; {rows.repeated_passes} passes begin with the routes of the pass before, as if it was evaluated "
                "again; each pass counts as one accepted token",
            )
        )

    parsed.blocks = blocks()
    return parsed


def parse_llama_moe_trace(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Records of i32 layer, T, K, then i32 ids [T, K], one after the other (`llama-moe-trace`).

    The context is emptied every n_batch tokens; where is not recorded, so positions are unknown.

    Raises:
        MalformedDump: truncated, or a record that contradicts the first.
    """
    top_k = _first_width(dump, 3)

    def source() -> Iterator[Rows]:
        return _records(dump, header=3, magic=0, top_k=top_k, what="[layer, tokens, k, ids]")

    found = survey(dump, source())
    parsed = ParsedDump(
        format="llama_moe_trace", blocks=iter(()), top_k=top_k, engine="llama.cpp", capture_method=CALLBACK
    )
    parsed.checks.append(PERTURBATION)
    return recorded(parsed, Recorded(dump, parsed, source, found))


def _is_llama_moe_trace(sample: Sample) -> bool:
    """Whether records follow one another through the head; ids differ inside a row, and one record is whole."""
    words = np.frombuffer(sample.head, dtype="<i4", count=len(sample.head) // 4)
    if len(words) < 4 or not (0 <= words[0] < 4096 and 0 < words[1] <= MAX_TOKENS and 0 < words[2] <= MAX_TOP_K):
        return False
    heads = np.zeros((4096, 3), dtype=np.int64)
    found, _, is_wrong = _walk(words, 3, 0, int(words[2]), MAX_TOKENS, heads)
    if is_wrong and found < 2:
        return False
    rows = heads[:found]
    if not found:
        # A graph of many tokens is longer than the head: its ids must still look like ids.
        ids = words[3:]
        return len(ids) >= 64 and bool((ids >= -1).all() and (ids < 65536).all())
    if found > 1 and len(set(rows[:, 1].tolist())) == 1:
        return False
    ids = np.concatenate([words[start : start + tokens * int(words[2])] for start, _, tokens in rows.tolist()])
    if not len(ids) or ids.min() < -1 or ids.max() >= 65536:
        return False
    first = ids[: len(ids) // words[2] * words[2]].reshape(-1, words[2])[:64]
    return all(len(set(row)) == len(row) for row in first.tolist() if row[0] >= 0)


# MOETRACE

_MOETRACE_HEADER = struct.Struct("<8s7I")
_MOETRACE_CHUNK = 0xC0A1E5CE
_NO_ID = 0xFFFF
_WEIGHT_TOLERANCE = 0.01
"""How far a normalised weight may lie above 1: it is stored as float16."""
_MAX_CHUNK_BYTES = 256 * 1024 * 1024


def parse_moetrace(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`MOETRACE`: header, then a chunk per ubatch of a prompt (llama.cpp-lab `moe-trace`, versions 1 and 2).

    Header: magic, u32 version, n_layer, n_expert, n_used, hc, hash_layer_count, reserved. Chunk: u32 0xC0A1E5CE, u32 T,
    i32 token ids [T], then per layer ids [T, K] (u8 in version 1, u16 in 2), f16 normalised weights [T, K], and f16
    stream gates [T, hc] where hc > 0. 0xFFFF is no id: a dense layer, or the last layer but for its output tokens,
    which stand at the front whichever they are. Version 1 writes 0 there, which cannot be told from expert 0.

    The context is emptied every n_ctx tokens; where is not recorded, so positions are unknown and there is one request.

    Raises:
        MalformedDump: truncated, sizes beyond the file, an id without a layer's others. RefusedDump: another version.
    """
    stream = dump.stream()
    head = stream.read(_MOETRACE_HEADER.size)
    if len(head) < _MOETRACE_HEADER.size:
        raise MalformedDump(f"{dump.path}: ends in its header, after {len(head)} bytes: {_TRUNCATED}")
    _, version, layers, experts, top_k, streams, hashed, _ = _MOETRACE_HEADER.unpack(head)
    if version not in (1, 2):
        raise RefusedDump(f"{dump.path}: MOETRACE version {version}, wanted 1 or 2; record with another version")
    if not 0 < layers <= 65536 or not 0 < top_k <= MAX_TOP_K or not 0 < experts < 65536 or streams > 65536:
        raise MalformedDump(
            f"{dump.path}: the header says {layers} layers, {experts} experts, {top_k} per token, {streams} streams; "
            f"wanted up to 65,536, 65,535, {MAX_TOP_K} and 65,536"
        )
    if hashed > layers:
        raise MalformedDump(f"{dump.path}: the header says {hashed} hash-routed layers of {layers}")
    parsed = ParsedDump(
        format="moetrace",
        blocks=iter(()),
        top_k=top_k,
        engine="llama.cpp",
        capture_method=f"{CALLBACK}, prompt only",
        hidden_layers=layers,
        num_experts=experts,
        top_k_model=top_k,
        largest_storable_id=255 if version == 1 else _NO_ID - 1,
        weight_kind="renormalised",
    )
    parsed.checks += [
        PERTURBATION,
        CheckRecord(
            name="routes of a router",
            outcome="warn" if hashed else "ok",
            wanted="every layer's experts are chosen by a router",
            found=f"layers 0..{hashed - 1} choose by the token's id (hash-routed), as the header says"
            if hashed
            else "the header names no hash-routed layer",
        ),
        CheckRecord(
            name="sequences apart",
            outcome="warn",
            wanted="where a sequence ends",
            found="the context is emptied every n_ctx tokens, and where is not recorded: one request, no positions",
        ),
    ]
    id_bytes = 1 if version == 1 else 2
    token_bytes = 4 + layers * (top_k * (id_bytes + 2) + 2 * streams)
    chosen = None if asked.user.moe_layer_ids is None else np.asarray(asked.user.moe_layer_ids)
    if chosen is not None and len(chosen) and chosen[-1] >= layers:
        raise MalformedDump(
            f"{dump.path}: you say moe_layer_ids up to {chosen[-1]}, the header says {layers} layers; correct them"
        )

    def blocks() -> Iterator[RowBlock]:
        source = dump.stream()
        source.read(_MOETRACE_HEADER.size)
        offset, step = _MOETRACE_HEADER.size, 0
        while lead := source.read(8):
            if len(lead) < 8:
                raise MalformedDump(f"{dump.path}, byte {offset}, chunk {step}: ends inside it: {_TRUNCATED}")
            magic, tokens = struct.unpack("<2I", lead)
            if magic != _MOETRACE_CHUNK:
                raise MalformedDump(
                    f"{dump.path}, byte {offset}, chunk {step}: begins with 0x{magic:08x}, wanted "
                    f"0x{_MOETRACE_CHUNK:08x}: is a part of the file missing?"
                )
            if not 0 < tokens <= MAX_TOKENS or tokens * layers * top_k > MAX_PASS_SELECTIONS:
                raise MalformedDump(
                    f"{dump.path}, byte {offset}, chunk {step}: {tokens} tokens, wanted 1 to {MAX_TOKENS:,} and at "
                    f"most {MAX_PASS_SELECTIONS:,} selections in a chunk; record with a smaller ubatch (-ub)"
                )
            if tokens * token_bytes > _MAX_CHUNK_BYTES:
                raise MalformedDump(
                    f"{dump.path}, byte {offset}, chunk {step}: {tokens} tokens of {token_bytes} bytes, wanted at most "
                    f"{_MAX_CHUNK_BYTES:,} bytes in a chunk; record with a smaller ubatch (-ub)"
                )
            chunk = _read_exactly(source, tokens * token_bytes)
            if len(chunk) < tokens * token_bytes:
                raise MalformedDump(
                    f"{dump.path}, byte {offset}, chunk {step}: {8 + len(chunk)} of {8 + tokens * token_bytes} bytes: "
                    f"{_TRUNCATED}"
                )
            block = _moetrace_block(dump, parsed, chunk, (layers, tokens, top_k, streams), id_bytes, chosen, step)
            offset += 8 + len(chunk)
            step += 1
            if block is not None:
                yield block

    parsed.blocks = blocks()
    return parsed


def _moetrace_block(
    dump: DumpFile,
    parsed: ParsedDump,
    chunk: bytearray,
    shape: tuple[int, int, int, int],
    id_bytes: int,
    chosen: npt.NDArray[np.int64] | None,
    step: int,
) -> RowBlock | None:
    layers, tokens, top_k, _ = shape
    per_layer = np.frombuffer(chunk, dtype=np.uint8, offset=4 * tokens).reshape(layers, -1)
    picks = tokens * top_k
    stored = per_layer[:, : picks * id_bytes].copy().view(f"<u{id_bytes}").reshape(layers, tokens, top_k)
    weights = per_layer[:, picks * id_bytes : picks * (id_bytes + 2)].copy().view("<f2").astype(np.float32)
    weights = weights.reshape(layers, tokens, top_k)
    no_probability = ~((weights >= 0) & (weights <= 1 + _WEIGHT_TOLERANCE))
    # Where the tool saw no weights it writes zeros: a router gives no token nothing.
    weights[(weights == 0).all(axis=2)] = np.nan
    layer = np.arange(layers)
    if chosen is not None:
        left_out = np.setdiff1d(layer, chosen)
        _count(parsed, "a layer that you do not list in moe_layer_ids", len(left_out) * tokens)
        stored, weights, layer = stored[chosen], weights[chosen], chosen
        no_probability = no_probability[chosen]
    no_id = (stored == _NO_ID) if id_bytes == 2 else np.zeros(stored.shape, dtype=bool)
    captured = ~no_id.all(axis=2)
    torn = no_id.any(axis=2) & captured
    if torn.any():
        at, token = np.argwhere(torn)[0].tolist()
        raise MalformedDump(
            f"{dump.path}, chunk {step}, layer {int(layer[at])}, row {token}: {stored[at, token].tolist()}, where "
            "65535 is no id: a token with fewer experts cannot be read; record again"
        )
    wrong = no_probability & np.expand_dims(captured, 2)
    if wrong.any():
        at, token, rank = np.argwhere(wrong)[0].tolist()
        raise MalformedDump(
            f"{dump.path}, chunk {step}, layer {int(layer[at])}, row {token}: weight {weights[at, token, rank]:.4g} of "
            f"expert {int(stored[at, token, rank])} ({int(wrong.sum())} such weights in the chunk), wanted 0 to 1, "
            "normalised: are sizes of the header wrong, or the file damaged? record again"
        )
    _count(parsed, "no id (0xFFFF): dense, or the last layer but for its output tokens", int((~captured).sum()))
    if not captured.any():
        return None
    rows = int(captured.sum())
    return RowBlock(
        step=np.full(rows, step, dtype=np.int64),
        pass_in_step=np.zeros(rows, dtype=np.int32),
        layer=np.repeat(layer, captured.sum(axis=1)).astype(np.int32),
        request=np.zeros(rows, dtype=np.int64),
        position=None,
        phase=np.full(rows, PHASE_CODES["prefill"], dtype=np.int8),
        expert_ids=stored[captured].astype(np.int32),
        weights=weights[captured],
    )


def _count(parsed: ParsedDump, reason: str, rows: int) -> None:
    if rows:
        parsed.dropped_rows[reason] = parsed.dropped_rows.get(reason, 0) + rows


def _read_exactly(stream: io.BufferedReader, size: int) -> bytearray:
    # Grows with what is there, so that a size beyond the file reserves nothing.
    content = bytearray()
    while len(content) < size and (part := stream.read(min(size - len(content), 4 * 1024 * 1024))):
        content += part
    return content


# flash-moe --collect-routing

_MAX_FLASH_MOE_K = 64
_MAX_HIDDEN = 65536


def parse_flash_moe(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Records of i32 layer, i32 K, f32 hidden [D], i32 ids [K] (flash-moe `--collect-routing`), one token each.

    D is not in the file. It is the distance at which headers stand again: the smallest at which every record of the
    whole file is one. K is what the engine ran with, which may be less than the model's.

    Raises:
        MalformedDump: no D fits, or the file ends inside a record. RefusedDump: a single record fits any D.
    """
    top_k, record_words = _flash_moe_shape(dump)

    def source() -> Iterator[Rows]:
        stream, records = _WordStream(dump, max(_CHUNK_WORDS, 2 * record_words)), 0
        while stream.more():
            words = stream.words()
            whole = len(words) // record_words
            part = words[: whole * record_words].reshape(whole, record_words)
            ids = part[:, record_words - top_k :]
            wrong = (part[:, 1] != top_k) | (part[:, 0] < 0) | (part[:, 0] > 65535)
            wrong |= (ids < -1).any(axis=1) | (ids > 65535).any(axis=1)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise MalformedDump(
                    f"{dump.path}, byte {stream.offset_bytes + 4 * at * record_words}, record {records + at} (counted "
                    f"from 0): layer {int(part[at, 0])}, k {int(part[at, 1])}, ids {ids[at].tolist()[:8]}; wanted "
                    f"k = {top_k} and small numbers, with D = {record_words - 2 - top_k}: is a part of the file "
                    "missing?"
                )
            yield Rows(part[:, 0].astype(np.int64), records + np.arange(whole), ids.copy())
            records += whole
            stream.take(whole * record_words)
        if stream.left_bytes:
            raise MalformedDump(
                f"{dump.path}, byte {stream.offset_bytes}, record {records} (counted from 0): {stream.left_bytes} of "
                f"{4 * record_words} bytes: {_TRUNCATED}"
            )

    found = survey(dump, source())
    parsed = ParsedDump(
        format="flash_moe_routing", blocks=iter(()), top_k=top_k, engine="flash-moe", capture_method="--collect-routing"
    )
    parsed.checks.append(
        CheckRecord(
            name="width of the hidden state",
            outcome="ok",
            wanted="one width with which every record of the file is one",
            found=f"{record_words - 2 - top_k} numbers, the smallest with which all records are",
        )
    )
    return recorded(parsed, Recorded(dump, parsed, source, found, prunes=False))


def _flash_moe_shape(dump: DumpFile) -> tuple[int, int]:
    """(K, words of a record)."""
    head = dump.stream().read(4 * 2 * (_MAX_HIDDEN + 2 + _MAX_FLASH_MOE_K))
    words = np.frombuffer(head, dtype="<i4", count=len(head) // 4)
    top_k = int(words[1])
    period = _period(words)
    if period is None:
        raise RefusedDump(
            f"{dump.path}: a record of k = {top_k} and none after it, so the width of its hidden state cannot be told; "
            "record more than one layer and token"
        )
    return top_k, period


def _period(words: Words) -> int | None:
    """Distance of the first header of a flash-moe dump to the next, in words; null if there is none.

    A header is layer and K as in the first, with K different small ids before it; wherever another follows at once as
    far again, it must be one too. Normal floats are no small integers, so a hidden state does not look like one.
    """
    if len(words) < 4:
        return None
    top_k = int(words[1])
    if not (0 <= words[0] < 4096 and 0 < top_k <= _MAX_FLASH_MOE_K):
        return None
    places = np.flatnonzero(words[1:] == top_k)
    for place in places[places > 2 + top_k].tolist():
        if not (0 <= words[place] < 4096 and _are_ids(words[place - top_k : place])):
            continue
        hidden = words[2 : place - top_k].view(np.float32)
        if not np.isfinite(hidden).all() or (np.abs(hidden) > 1e-30).mean() < 0.5:
            continue
        after = 2 * place
        if after + 1 < len(words) and not (
            words[after + 1] == top_k and 0 <= words[after] < 4096 and _are_ids(words[after - top_k : after])
        ):
            continue
        return int(place)
    return None


def _are_ids(words: Words) -> bool:
    return bool((words >= 0).all() and (words < 65536).all()) and len(set(words.tolist())) == len(words)


def _is_flash_moe(sample: Sample) -> bool:
    words: Any = np.frombuffer(sample.head, dtype="<i4", count=len(sample.head) // 4)
    return _period(words) is not None


LAYOUTS: tuple[Layout, ...] = (
    Layout("moetrace", "MOETRACE", lambda sample: sample.head.startswith(b"MOETRACE"), parse_moetrace),
    Layout("mtsp", "MTSP records", lambda sample: sample.head.startswith(b"MTSP"), parse_mtsp),
    Layout("llama_moe_trace", "llama-moe-trace binary", _is_llama_moe_trace, parse_llama_moe_trace),
    Layout("flash_moe_routing", "flash-moe --collect-routing", _is_flash_moe, parse_flash_moe),
)

NO_TRACES: tuple[NoTrace, ...] = (
    NoTrace(
        lambda sample: sample.head.startswith(b"IKU1"),
        "an expert history of colibri's inkling (IKU1): counts per layer and expert have no order, so no cache can be "
        "replayed on them; record ROUTE_TRACE",
    ),
    NoTrace(
        lambda sample: sample.head.startswith(b"EXPHIST1"),
        "an EXPHIST1 history: an entry per expert matrix (gate, up, down) of every route, which counts each route "
        "several times, so it is not read; record ffn_moe_topk instead",
    ),
    NoTrace(
        lambda sample: _is_legacy_imatrix(sample.head),
        "a legacy importance matrix (imatrix.dat): calls per tensor, no counts per expert and no routes",
    ),
)
"""Binary files of this family that hold no routes."""


def _is_legacy_imatrix(head: bytes) -> bool:
    """i32 entries, i32 length of the first name, and the name of a tensor."""
    if len(head) < 12:
        return False
    entries, length = struct.unpack("<2i", head[:8])
    name = head[8 : 8 + max(length, 0)]
    return 0 < entries < 2**20 and 0 < length < 256 and name.endswith(b".weight") and name.isascii()
