"""Which parser a file is for, decided by its content; and the refusal of what can be no trace.

Names and suffixes are never looked at: published files lie about what they hold.
"""

import json
from pathlib import Path

from pipeline.dumps import events_csv, jsonl, npz, route_csv
from pipeline.dumps.blocks import MAX_LINE_BYTES, DumpFile, MalformedDump, ParsedDump, RefusedDump

KNOWN = (
    "npz with experts [layers, tokens, k]; route CSV v1; JSONL {tok, layers}; "
    "JSONL {iteration, layer, experts}; conformance events CSV; each also gzipped, npz aside"
)
_COUNT_KEYS = {"routed", "counts", "expert_counts", "logical_count", "expert_activation", "heatmap", "selections"}


def parse(dump: DumpFile, *, top_k_model: int | None, spool_folder: Path) -> ParsedDump:
    """The parsed dump, its rows not yet read.

    Raises:
        RefusedDump: the content cannot be a trace or is of no known layout. MalformedDump: known, but broken.
    """
    head = dump.head()
    _refuse_binary(dump, head)
    if head.startswith(b"PK"):
        return npz.parse(dump, spool_folder)
    line = _first_line(dump, head)
    if line.startswith(("{", "[")):
        return _parse_json(dump, line, head, top_k_model)
    header = _header_line(head)
    columns = {name.strip() for name in header.split(",")}
    if head.startswith(b"# route_trace") or columns >= {"layer", "slot", "expert"}:
        return route_csv.parse(dump)
    if columns >= {"scheduler_step", "layer", "requested_experts"}:
        return events_csv.parse(dump)
    if {"layer_id", "expert_id", "count"} <= columns or {"layer", "expert", "hits"} <= columns:
        raise RefusedDump(
            f"{dump.path}: counts per layer and expert ({header[:120]!r}), not the routes of tokens; a count has no "
            "order, so no cache can be replayed on it: record the ids of every token"
        )
    if b"ffn_moe_" in head and b"..." in head:
        raise RefusedDump(
            f"{dump.path}: printed tensors whose axes are shortened to `...`, so ids are lost; "
            "write ffn_moe_topk with its strides instead"
        )
    raise RefusedDump(f"{dump.path}: no known layout; its first line is {line[:120]!r}. Known: {KNOWN}")


def _refuse_binary(dump: DumpFile, head: bytes) -> None:
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise RefusedDump(f"{dump.path}: a git-lfs pointer, not the dump itself; run: git lfs pull")
    if head.startswith(b"\x93NUMPY"):
        raise RefusedDump(
            f"{dump.path}: a bare npy array; wanted an npz with `experts` [layers, tokens, k]: "
            "np.savez(path, experts=ids.astype('int16'), meta=json_text). Pickled arrays are never loaded"
        )
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise RefusedDump(f"{dump.path}: a pickle, which is never loaded: it could run code; save npz or JSONL")
    if head.startswith(b"GGUF"):
        raise RefusedDump(f"{dump.path}: a GGUF file (imatrix counts or weights), not the routes of tokens")
    if head.startswith(b"PAR1"):
        raise RefusedDump(f"{dump.path}: Parquet; a canonical trace needs no ingest, raw dumps are text or npz")
    if head.startswith(b"PK") and b"data.pkl" in head[:4096]:
        raise RefusedDump(f"{dump.path}: a torch file, which is a pickle inside; save npz or JSONL")
    if head.startswith(b"PK") and dump.is_gzip:
        raise RefusedDump(f"{dump.path}: an npz inside gzip; unpack the outer layer (gunzip) and ingest the npz")


def _parse_json(dump: DumpFile, line: str, head: bytes, top_k_model: int | None) -> ParsedDump:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        if line in ("{", "["):
            raise RefusedDump(f"{dump.path}: one JSON document over many lines, wanted one object per line") from None
        if b"\n" not in head and len(head) < dump.size_bytes and not dump.is_gzip:
            raise RefusedDump(f"{dump.path}: one JSON document of {dump.size_bytes} bytes on a line; {KNOWN}") from None
        raise MalformedDump(
            f"{dump.path}, line 1: no complete JSON object ({line[:80]!r}…): is the dump truncated?"
        ) from None
    if not isinstance(value, dict):
        raise RefusedDump(f"{dump.path}: a JSON {type(value).__name__} per line, wanted objects. Known: {KNOWN}")
    keys = set(value)
    if isinstance(value.get("layers"), list) and "tok" in keys:
        return jsonl.parse_tokens(dump)
    if keys & _COUNT_KEYS:
        raise RefusedDump(
            f"{dump.path}: counts per layer and expert (field {sorted(keys & _COUNT_KEYS)[0]!r}), not the routes of "
            "tokens; a count has no order, so no cache can be replayed on it: record the ids of every token"
        )
    if keys & set(jsonl.LAYER_KEYS) and any(isinstance(value.get(key), list) for key in jsonl.EXPERT_KEYS):
        return jsonl.parse_passes(dump, top_k_model)
    fields = ", ".join(sorted(map(str, keys))[:8])
    raise RefusedDump(f"{dump.path}: JSONL of no known layout, fields {fields[:200]}. Known: {KNOWN}")


def _first_line(dump: DumpFile, head: bytes) -> str:
    stream, read = dump.stream(), 0
    while read < MAX_LINE_BYTES and (line := stream.readline(MAX_LINE_BYTES)):
        read += len(line)
        if line.strip():
            return line.decode("utf-8", errors="replace").strip()
    return head[:200].decode("utf-8", errors="replace")


def _header_line(head: bytes) -> str:
    for line in head.splitlines():
        if line.strip() and not line.lstrip().startswith(b"#"):
            return line.decode("utf-8", errors="replace").strip()
    return ""
