"""What the user says of a dump, its identity, and the ingest of it into a data folder: publish once, or refuse.

In: a dump's path and the user's metadata. Out: `data/traces/<trace_id>.parquet`, validated before it gets its name, or
an error that says where, what was wanted, what was found and what to do. What makes rows canonical is in `canonical`.
"""

import contextlib
import fnmatch
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from pipeline import canonical, model_sizes
from pipeline.canonical import Canonical
from pipeline.dumps import sniff
from pipeline.dumps.blocks import (
    DEFAULT_UNPACKING,
    ROWS_PER_BLOCK,
    Asked,
    Dump,
    DumpFile,
    DumpFolder,
    MalformedDump,
    RefusedDump,
)
from pipeline.dumps.packing import Unpacking
from pipeline.validator import refused_unread
from replayer.trace import MalformedTrace, read_metadata, trace_parts
from schemas.files import DataFolder, publish, remove_stale
from schemas.trace import (
    METADATA_KEY,
    TRACE_ID_PATTERN,
    CheckVerdict,
    ModelFile,
    Source,
    TraceMetadata,
    UserMetadata,
    arrow_schema,
)
from schemas.validation import validate_trace

_WILDCARDS = re.compile(r"[*?\[]")
_TEXTS = ("model", "engine", "domain", "capture_method", "id_space", "weight_kind", "phase")


class WrongMetadata(ValueError):
    """What the user said of a dump on the command line is unreadable, unknown or of a wrong type."""


@dataclass
class Reading:
    """How far an ingest is, for whoever watches it from another thread: what is done, and with which dump."""

    stage: str = "opening"
    dump: Dump | None = None

    def begin(self, stage: str, dump: Dump) -> None:
        """Another pass over the dump begins."""
        if isinstance(dump, DumpFolder):
            dump.read_again()
        self.stage, self.dump = stage, dump


@dataclass(frozen=True)
class Ingested:
    """A trace that is in the data folder, and whether this call wrote it."""

    metadata: TraceMetadata
    path: Path
    is_new: bool

    @property
    def warnings(self) -> list[str]:
        found = [f"{check.name}: {check.found}" for check in self.metadata.checks if check.outcome == "warn"]
        return found if self.is_new else ["already ingested: the same dump is one trace", *found]


def read_user_metadata(dump_path: Path, overrides: Sequence[str] = ()) -> UserMetadata:
    """What the user says of a dump: `<dump>.toml` (or the dump's name with its last suffix replaced), then overrides.

    Beside a folder it is `<folder>.toml`, also for some files of it that are named by a pattern.

    An override is `key=value`; the value is read as JSON where it is JSON, else as text.

    Raises:
        MalformedDump: unreadable TOML, an unknown key, a value of a wrong type. WrongMetadata: the same in an override.
    """
    said: dict[str, object] = {}
    beside = metadata_file(dump_path)
    if beside is not None:
        try:
            said = tomllib.loads(beside.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise MalformedDump(f'{beside}: no TOML ({reason}); wanted lines like model = "name"') from None
    overridden: dict[str, object] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise WrongMetadata(f"--meta {override!r:.80}: wanted key=value, for example --meta domain=code")
        key, read = key.strip(), value
        if key not in _TEXTS:
            with contextlib.suppress(ValueError, RecursionError):
                read = json.loads(value)
        if key in overridden and overridden[key] != read:
            raise WrongMetadata(f"--meta {key} is said twice, as {overridden[key]!r:.40} and {read!r:.40}; say it once")
        overridden[key] = read
    said |= overridden
    try:
        return UserMetadata.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        # Further parts name kinds of values that a key may have, or places in a list.
        parts = [part for number, part in enumerate(first["loc"]) if number == 0 or isinstance(part, int)]
        key = ".".join(map(str, parts)) or "metadata"
        if first["type"] == "extra_forbidden":
            what, advice = "no such key", f"known keys: {', '.join(UserMetadata.model_fields)}"
        else:
            what, advice = first["msg"].removeprefix("Value error, "), "correct it, or leave it out"
        sentence = f"{key}: {what} (found {first['input']!r:.80}); {advice}"
        if key.split(".")[0] in overridden:
            raise WrongMetadata(f"--meta {sentence}") from None
        raise MalformedDump(f"{beside}: {sentence}") from None


def metadata_file(dump_path: Path) -> Path | None:
    """The TOML file beside a dump: `<dump>.toml`, else the dump's name with its last suffix replaced; null if none."""
    dump_path = named(dump_path)
    if is_pattern(dump_path):
        dump_path = named(dump_path.absolute().parent)
    if not dump_path.name:
        return None
    for name in (dump_path.name + ".toml", dump_path.stem + ".toml"):
        beside = dump_path.parent / name
        with contextlib.suppress(OSError):
            if beside.is_file():
                return beside
    return None


def named(path: Path) -> Path:
    """The path with a last part that is a name: `.` and `..` are none."""
    return path if path.name not in ("", "..") else path.resolve()


def is_pattern(path: Path) -> bool:
    """Whether a path names files by `*`, `?` or `[…]` in its last part, and is no file itself."""
    try:
        return bool(_WILDCARDS.search(path.name)) and not path.exists()
    except (OSError, ValueError):
        return False


def open_dump(path: Path, unpacking: Unpacking = DEFAULT_UNPACKING) -> Dump:
    """The dump at a path: a file, a folder or a zip whose files are one dump, or the files that a pattern matches.

    Raises:
        MalformedDump: empty, or none of these. RefusedDump: packed in a way that is not read. OSError: it cannot be
        opened.
    """
    if path.is_dir():
        return DumpFolder(path, unpacking=unpacking)
    if is_pattern(path):
        if _WILDCARDS.search(str(path.parent)) and not path.parent.exists():
            raise MalformedDump(f"{path}: a pattern stands for files of one folder; name the folder without wildcards")
        files = [
            file
            for file in path.parent.iterdir()
            if fnmatch.fnmatchcase(file.name, path.name) and not file.name.startswith(".")
        ]
        if not files:
            raise MalformedDump(
                f"{path}: matches no file, wanted the files of one dump; list the folder with: ls {path.parent}"
            )
        return DumpFolder(path, files, unpacking)
    file = DumpFile(path, unpacking)
    if not file.archived:
        return file
    try:
        return DumpFolder.of_archive(file)
    except BaseException:
        file.close()
        raise


def name_of(path: Path) -> str:
    """What a dump is called: its file or folder, or the folder of the files that a pattern matches."""
    return named(path.absolute().parent).name if is_pattern(path) else named(path).name


def identity(dump: Dump, user: UserMetadata, model: ModelFile | None = None) -> tuple[str, str]:
    """(SHA-256 of the bytes, of bytes, user-given metadata and what a model file said), hexadecimal."""
    digest = dump.sha256()
    source = digest.hexdigest()
    said = user.model_dump(exclude_none=True)
    if said:
        digest.update(b"\0" + json.dumps(said, sort_keys=True).encode())
    if model is not None:
        digest.update(b"\0model\0" + json.dumps(model.model_dump(), sort_keys=True).encode())
    return source, digest.hexdigest()


def slug(file_name: str) -> str:
    """A dump's name without its suffixes, as the readable head of a trace_id."""
    suffixes = r"(\.(gz|zst|xz|bz2|zip|npz|csv|jsonl|json|txt|route|pt|bin|safetensors|parquet))+$"
    stem = re.sub(suffixes, "", file_name.lower())
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:60] or "dump"


def ingest(
    path: Path,
    data: DataFolder,
    user: UserMetadata,
    *,
    trace_id: str | None = None,
    model: ModelFile | None = None,
    unpacking: Unpacking = DEFAULT_UNPACKING,
    reading: Reading | None = None,
) -> Ingested:
    """The canonical trace of a dump, written unless it is already there.

    Without a model file the trace that the dump became with one is its trace, too, if there is no other.
    `unpacking`: how far packed dumps are unpacked; its folder is the traces'. `reading`: told how far it is.

    Raises:
        MalformedDump, RefusedDump: the dump is broken or can be no trace, or `trace_id` is taken. OSError: I/O.
    """
    if trace_id is not None and not TRACE_ID_PATTERN.fullmatch(trace_id):
        raise MalformedDump(f"--trace-id {trace_id!r}: wanted lower-case letters, digits, `.`, `_`, `-`, at most 128")
    remove_stale(data.traces)
    path, reading = named(path), reading or Reading()
    with open_dump(path, replace(unpacking, spool_folder=data.traces)) as dump:
        reading.begin("identifying", dump)
        source_sha256, whole = identity(dump, user, model)
        reading.begin("reading", dump)
        given, trace_id = trace_id, trace_id or f"{slug(name_of(path))}-{whole[:12]}"
        there = _same_dump(data, source_sha256, user, model)
        if there is not None:
            model = there.model_file
            if given is not None and there.trace_id != given:
                raise MalformedDump(
                    f"{path}: already ingested as {there.trace_id}, and the same dump is one trace; use that id, or "
                    f"remove {data.trace_file(there.trace_id)} first"
                )
            trace_id = there.trace_id
            if there.parser_version >= canonical.PARSER_VERSION:
                return Ingested(there, data.trace_file(trace_id), is_new=False)
        elif (other := _readable_source(data.trace_file(trace_id))) is not None:
            raise MalformedDump(
                f"{path}: trace id {trace_id} already names another dump ({other.file}, SHA-256 {other.sha256[:12]}…); "
                "choose another --trace-id"
            )
        supersedes = there.supersedes if there else _superseded(data, path, whole)
        target = data.trace_file(trace_id)

        def claim() -> None:
            # Whoever published the same name meanwhile must have meant the same dump, and the same dump the same name.
            source = _readable_source(target)
            if there is None and source is not None and source.sha256 != source_sha256:
                raise MalformedDump(f"{path}: trace id {target.stem} was taken meanwhile; choose another --trace-id")
            twin = _same_dump(data, source_sha256, user, model)
            if twin is not None and twin.trace_id != target.stem:
                raise MalformedDump(f"{path}: ingested as {twin.trace_id} meanwhile, and the same dump is one trace")

        with publish(target, claim=claim) as temporary:
            rows = _canonical(dump, user, model, data.traces)
            metadata = _write(
                rows, temporary, (path, source_sha256), user, model, trace_id, supersedes, dump.size_bytes
            )
            validate_trace(trace_parts(temporary), metadata)
            dump.check_unchanged()
    return Ingested(metadata, target, is_new=True)


@dataclass(frozen=True)
class Verdict:
    """How a dump fared: the metadata its trace would have, or why there is none; and every check, in order."""

    metadata: TraceMetadata | None
    refusal: MalformedDump | RefusedDump | None
    checks: list[CheckVerdict]

    @property
    def outcome(self) -> Literal["ok", "warn", "refuse"]:
        if self.refusal is not None:
            return "refuse"
        return "warn" if any(check.outcome == "warn" for check in self.checks) else "ok"


def judge(
    path: Path,
    user: UserMetadata,
    spool_folder: Path,
    *,
    model: ModelFile | None = None,
    unpacking: Unpacking = DEFAULT_UNPACKING,
    reading: Reading | None = None,
) -> Verdict:
    """Every check of a dump, whether it passes or not; nothing is kept.

    Raises:
        OSError: I/O.
    """
    path, reading = named(path), reading or Reading()
    rows: Canonical | None = None
    try:
        with open_dump(path, replace(unpacking, spool_folder=spool_folder)) as dump:
            reading.begin("identifying", dump)
            source_sha256, whole = identity(dump, user, model)
            reading.begin("reading", dump)
            trace_id = f"{slug(name_of(path))}-{whole[:12]}"
            rows = _canonical(dump, user, model, spool_folder)
            metadata = _write(rows, None, (path, source_sha256), user, model, trace_id, None, dump.size_bytes)
            dump.check_unchanged()
    except (MalformedDump, RefusedDump) as error:
        return Verdict(None, error, rows.validator.verdicts(error) if rows is not None else refused_unread(error))
    return Verdict(metadata, None, [CheckVerdict(**check.model_dump()) for check in metadata.checks])


def inspect(path: Path, user: UserMetadata, spool_folder: Path) -> TraceMetadata:
    """The metadata a dump's trace would have, with every check run; nothing is kept.

    Raises:
        As `ingest`.
    """
    verdict = judge(path, user, spool_folder)
    if verdict.metadata is None:
        assert verdict.refusal is not None, "a dump has either metadata or a refusal"
        raise verdict.refusal
    return verdict.metadata


def trace_id_for(path: Path, data: DataFolder, user: UserMetadata) -> str:
    """The id of the dump's trace: the one it has in the folder, else the one it will have."""
    path = named(path)
    with open_dump(path) as dump:
        source_sha256, whole = identity(dump, user)
    there = _same_dump(data, source_sha256, user, None)
    return there.trace_id if there else f"{slug(name_of(path))}-{whole[:12]}"


def read_stored(data: DataFolder, trace_id: str) -> TraceMetadata:
    """The metadata of a trace of the folder.

    Raises:
        MalformedTrace: the file is no canonical trace, or it is another one's: a copied or renamed file.
    """
    file = data.trace_file(trace_id)
    metadata = read_metadata(file)
    if metadata.trace_id != trace_id:
        raise MalformedTrace(f"{file}: holds trace {metadata.trace_id}; give it that name back, or remove the copy")
    return metadata


def _readable_source(file: Path) -> Source | None:
    # A damaged trace names no dump any more; ingesting its dump again is how it is mended.
    try:
        return read_metadata(file).source
    except (MalformedTrace, FileNotFoundError):
        return None


def stored_metadata(data: DataFolder) -> Iterator[TraceMetadata]:
    """Metadata of every readable trace in the folder; files that are none are passed over."""
    for trace_id in data.trace_ids():
        with contextlib.suppress(MalformedTrace, OSError):
            yield read_stored(data, trace_id)


def _same_dump(
    data: DataFolder, source_sha256: str, user: UserMetadata, model: ModelFile | None
) -> TraceMetadata | None:
    with_a_model = None
    for metadata in stored_metadata(data):
        if metadata.source.sha256 == source_sha256 and metadata.user_metadata == user:
            if metadata.model_file == model:
                return metadata
            with_a_model = with_a_model or metadata
    return with_a_model if model is None else None


def _superseded(data: DataFolder, path: Path, whole: str) -> str | None:
    folder = str(path.absolute().parent)
    earlier = [
        metadata.trace_id
        for metadata in stored_metadata(data)
        if (metadata.source.file, metadata.source.folder) == (path.name, folder)
        and not metadata.trace_id.endswith(whole[:12])
    ]
    return max(earlier, key=lambda trace_id: data.trace_file(trace_id).stat().st_mtime_ns, default=None)


def _canonical(dump: Dump, user: UserMetadata, model: ModelFile | None, spool_folder: Path) -> Canonical:
    parsed = sniff.parse(dump, Asked(model_sizes.filled(user, model), spool_folder))
    if isinstance(dump, DumpFolder):
        parsed.checks += dump.checks()
    return Canonical(dump.path, parsed, user if model is None else model_sizes.fill(dump.path, parsed, user, model))


def _write(
    rows: Canonical,
    target: Path | None,
    source: tuple[Path, str],
    user: UserMetadata,
    model: ModelFile | None,
    trace_id: str,
    supersedes: str | None,
    source_bytes: int,
) -> TraceMetadata:
    # Before a schema is made of its k.
    rows.validator.look_at_header()
    schema = arrow_schema(rows.top_k)
    with contextlib.ExitStack() as stack:
        writer = None
        if target is not None:
            writer = stack.enter_context(_writer(target, schema))
            # Encoding runs without the interpreter lock: the next block is read meanwhile, and one waits at most.
            thread = stack.enter_context(ThreadPoolExecutor(1))
        writing: Future[None] | None = None
        for group in _row_groups(rows.table(block, schema) for block in rows.blocks()):
            if writer is None:
                continue
            if writing is not None:
                writing.result()
            writing = thread.submit(writer.write_table, group)
        if writing is not None:
            writing.result()
        metadata = rows.metadata(source, trace_id, supersedes, source_bytes)
        if model is not None:
            model_sizes.check_layers(rows.path, metadata.moe_layer_ids, model)
            metadata = metadata.model_copy(update={"user_metadata": user, "model_file": model})
        if writer is not None:
            writer.add_key_value_metadata({METADATA_KEY: metadata.model_dump_json().encode()})
    return metadata


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables joined to row groups of a fair size: parsers of text yield small blocks, which are slow to read back."""
    gathered: list[pa.Table] = []
    for table in tables:
        gathered.append(table)
        if sum(part.num_rows for part in gathered) >= ROWS_PER_BLOCK:
            yield pa.concat_tables(gathered)
            gathered = []
    if gathered:
        yield pa.concat_tables(gathered)


def _writer(target: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Dictionary bit-packing of the ids does nearly all of the compression; float16 stays PLAIN, since DuckDB cannot
    # read other encodings of it.
    deltas = ("event_id", "step_id", "request_id", "token_position")
    return pq.ParquetWriter(
        target,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=["phase", "pass_kind", "layer_id", "row_in_event", "expert_ids.list.element"],
        column_encoding=dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
        write_page_index=True,
    )
