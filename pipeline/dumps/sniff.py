"""Which layout a file is of, decided by its content; and the refusal of what can be no trace.

Names and suffixes are never looked at: published files lie about what they hold.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dumps import (
    events_csv,
    hook_arrays,
    hooks,
    jsonl,
    llama_cpp,
    llama_cpp_binary,
    megatron,
    npz,
    open_format,
    repeats,
    rl_replay,
    route_csv,
    router_logits,
    sglang,
    sglang_responses,
    tensorrt_llm,
    torch_file,
    vllm,
    vllm_logs,
)
from pipeline.dumps.arrays import DAMAGE, line_of
from pipeline.dumps.blocks import (
    MAX_LINE_BYTES,
    Asked,
    Dump,
    DumpFile,
    DumpFolder,
    Layout,
    MalformedDump,
    NoTrace,
    ParsedDump,
    RefusedDump,
    Sample,
)
from pipeline.dumps.packing import open_zip
from schemas.trace import METADATA_KEY

_TREES = (
    *sglang.TREE_LAYOUTS,
    *rl_replay.TREE_LAYOUTS,
    *router_logits.TREE_LAYOUTS,
    *hook_arrays.TREE_LAYOUTS,
)

LAYOUTS: tuple[Layout, ...] = (
    *open_format.LAYOUTS,
    *llama_cpp_binary.LAYOUTS,
    *llama_cpp.LAYOUTS,
    *torch_file.layouts(_TREES, sglang.TREE_NO_TRACES),
    *sglang_responses.LAYOUTS,
    *vllm_logs.LAYOUTS,
    *vllm.LAYOUTS,
    *megatron.LAYOUTS,
    *tensorrt_llm.LAYOUTS,
    *router_logits.LAYOUTS,
    *hook_arrays.LAYOUTS,
    *hooks.LAYOUTS,
    *npz.LAYOUTS,
    *route_csv.LAYOUTS,
    *events_csv.LAYOUTS,
    *jsonl.LAYOUTS,
)
"""In the order in which they are asked; the first that claims a file gets it."""

_NO_ORDER = (
    "not the routes of tokens; a count has no order, so no cache can be replayed on it: record the ids of every token"
)

NO_TRACES: tuple[NoTrace, ...] = (
    *llama_cpp_binary.NO_TRACES,
    *llama_cpp.NO_TRACES,
    *hooks.NO_TRACES,
    NoTrace(
        lambda sample: METADATA_KEY.decode() in sample.parquet_keys,
        "a canonical trace, which needs no ingest: put it into the folder traces of your data folder",
    ),
    NoTrace(
        lambda sample: (
            {"layer_id", "expert_id", "count"} <= sample.columns or {"layer", "expert", "hits"} <= sample.columns
        ),
        f"counts per layer and expert (a CSV with a column of counts), {_NO_ORDER}",
    ),
    NoTrace(
        lambda sample: b"ffn_moe_" in sample.head and b"..." in sample.head,
        "printed tensors whose axes are shortened to `...`, so ids are lost; write ffn_moe_topk with its strides "
        "instead",
    ),
    *(
        NoTrace(
            lambda sample, key=key: isinstance(sample.value, dict) and key in sample.value,  # type: ignore[misc]
            f"counts per layer and expert (field {key!r}), {_NO_ORDER}",
        )
        for key in sorted(jsonl.COUNT_KEYS)
    ),
)
"""What looks like a dump and can be no trace, asked after the layouts."""


def parse(dump: Dump, asked: Asked) -> ParsedDump:
    """The parsed dump, its rows not yet read; reading them finds what stands twice.

    Raises:
        RefusedDump: the content cannot be a trace or is of no known layout. MalformedDump: known, but broken.
    """
    parsed = _parse(dump, asked)
    parsed.blocks = repeats.watched(dump.path, parsed)
    return parsed


def _parse(dump: Dump, asked: Asked) -> ParsedDump:
    if isinstance(dump, DumpFolder):
        return _parse_folder(dump, asked)
    sample = look(dump)
    for layout in LAYOUTS:
        if layout.claims(sample):
            if layout.parse is None:
                raise RefusedDump(
                    f"{dump.path}: one file of a dump of several ({layout.description}); put all of them into one "
                    "folder and ingest the folder"
                )
            return layout.parse(dump, asked)
    for kind in NO_TRACES:
        if kind.claims(sample):
            raise RefusedDump(f"{dump.path}: {kind.reason}")
    raise _unknown(dump, sample)


LIST = "expert-tier inspect --layouts lists what is read"


def described() -> list[tuple[str, str]]:
    """(name, a few words) of each layout that is read; what lies in torch files has names of its own."""
    trees = [(layout.name, f"torch file: {layout.description}") for layout in _TREES]
    return [(layout.name, layout.description) for layout in LAYOUTS if layout.name != torch_file.NAME] + trees


def _parse_folder(folder: DumpFolder, asked: Asked) -> ParsedDump:
    """The layout of the first file that one claims; files that are none of it are the parser's to judge.

    A torch file may be the sidecar of a dump of another kind, so that it decides only where no other file does.
    """
    said: RefusedDump | MalformedDump | None = None
    found: tuple[Layout, str] | None = None
    for file in folder.files:
        try:
            with folder.open(file) as dump:
                sample = look(dump)
        except (RefusedDump, MalformedDump) as error:
            # It may be a sidecar (weights, hidden states), which the parser of the others knows by name.
            said = said or error
            continue
        layout = next((one for one in LAYOUTS if one.claims(sample)), None)
        if layout is None:
            reason = next((kind.reason for kind in NO_TRACES if kind.claims(sample)), None)
            said = said or (RefusedDump(f"{file}: {reason}") if reason else None)
        elif found is None or found[0].name == torch_file.NAME != layout.name:
            found = layout, file.name
        if found is not None and found[0].name != torch_file.NAME:
            break
    if found is None:
        raise said or RefusedDump(f"{folder.path}: none of its {len(folder.files)} files is of a known layout; {LIST}")
    layout, name = found
    if layout.parse_folder is None:
        raise RefusedDump(
            f"{folder.path}: {name} is a whole dump of its own ({layout.description}); ingest each file by itself"
        )
    return layout.parse_folder(folder, asked)


def look(dump: DumpFile) -> Sample:
    """What the file shows at first sight.

    Raises:
        RefusedDump: a kind of file that is refused before anything in it is looked at. MalformedDump: it is damaged.
    """
    head = dump.head()
    _refuse_binary(dump, head)
    line, header = _first_line(dump, head), _header_line(head)
    value: object | None = None
    if line.startswith(("{", "[")):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
    if head.startswith(b"PAR1"):
        return Sample(head, "", None, "", frozenset(), (), *_parquet_names(dump))
    members: tuple[str, ...] = ()
    if head.startswith(b"PK"):
        raw = dump.raw
        try:
            with open_zip(raw) as archive:
                members = tuple(archive.namelist())
        except DAMAGE as error:
            raise MalformedDump(
                f"{dump.path}: a truncated or damaged npz or torch file ({error}); copy the dump again"
            ) from None
    return Sample(head, line, value, header, frozenset(name.strip() for name in header.split(",")), members)


def _parquet_names(dump: DumpFile) -> tuple[frozenset[str], frozenset[str]]:
    """(keys of the file's metadata, names of its columns)."""
    try:
        file = pq.ParquetFile(pa.PythonFile(dump.raw, mode="r"))
        keys = [key.decode("utf-8", "replace") for key in file.metadata.metadata or {}]
        return frozenset(keys), frozenset(file.schema_arrow.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise MalformedDump(
            f"{dump.path}: truncated or damaged Parquet ({line_of(error)}); copy the dump again"
        ) from None


def _unknown(dump: DumpFile, sample: Sample) -> RefusedDump | MalformedDump:
    if sample.head.startswith(b"PAR1"):
        columns = ", ".join(sorted(sample.parquet_columns)[:8])
        return RefusedDump(f"{dump.path}: Parquet of no known layout, columns {columns[:200]}; {LIST}")
    if sample.members:
        return npz.unknown(dump, sample.members)
    if not sample.line.startswith(("{", "[")):
        return RefusedDump(f"{dump.path}: no known layout; its first line is {sample.line[:120]!r}; {LIST}")
    if sample.value is None:
        if sample.line in ("{", "["):
            return RefusedDump(f"{dump.path}: one JSON document over many lines, wanted one object per line")
        if b"\n" not in sample.head and len(sample.head) < dump.size_bytes and not dump.is_packed:
            return RefusedDump(f"{dump.path}: one JSON document of {dump.size_bytes} bytes on a line; {LIST}")
        return MalformedDump(
            f"{dump.path}, line 1: no complete JSON object ({sample.line[:80]!r}…): is the dump truncated?"
        )
    if not isinstance(sample.value, dict):
        return RefusedDump(f"{dump.path}: a JSON {type(sample.value).__name__} per line, wanted objects; {LIST}")
    fields = ", ".join(sorted(map(str, sample.value))[:8])
    return RefusedDump(f"{dump.path}: JSONL of no known layout, fields {fields[:200]}; {LIST}")


def _refuse_binary(dump: DumpFile, head: bytes) -> None:
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise RefusedDump(f"{dump.path}: a git-lfs pointer, not the dump itself; run: git lfs pull")
    if head.startswith(b"\x93NUMPY"):
        raise RefusedDump(
            f"{dump.path}: a bare npy array; wanted an npz with `experts` [layers, tokens, k]: "
            "np.savez(path, experts=ids.astype('int16'), meta=json_text). Pickled arrays are never loaded"
        )
    if head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")) and not head.startswith(
        torch_file.LEGACY_MAGIC
    ):
        raise RefusedDump(f"{dump.path}: a pickle, which is never loaded: it could run code; save npz or JSONL")
    if head.startswith(b"GGUF"):
        raise RefusedDump(f"{dump.path}: a GGUF file (imatrix counts or weights), not the routes of tokens")


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
