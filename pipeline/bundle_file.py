"""Results as one file that another place can check: tables, hashes of traces, seeds, environment.

A bundle is a zip archive whose members are stored as they are (Parquet is packed already): `manifest.json`,
`results/<table>.parquet` of every table that has rows, `reporting.md`, and `traces/<trace_id>.parquet` where they were
asked for. What writes one is `pack`, what its numbers are held against is in `verify`.

A bundle is untrusted input. What is read is bounded before it is unpacked, names are looked at before a path is made of
them, every table is validated.
"""

import hashlib
import json
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.bundle import UnusableBundle, is_line
from schemas.columns import PASS_KINDS, PHASES
from schemas.tables import TABLES, Table
from schemas.trace import TRACE_ID_PATTERN
from schemas.validation import ContractViolation, validate_table

FORMAT, FORMAT_VERSION = "expert-tier bundle", 1
MANIFEST, REPORTING = "manifest.json", "reporting.md"

MOST_BYTES = 2**32 - 2**20
"""Of the archive: beyond, a zip archive needs records that are read before they can be bounded."""
MOST_MEMBERS = 4096
_MOST_DIRECTORY_BYTES = 1 << 20
_MOST_TEXT_BYTES = 4 << 20
MOST_TABLE_BYTES = 256 << 20
MOST_UNPACKED_BYTES = 1 << 30
"""Of all tables together, in memory."""
_MOST_PART_BYTES = 512 << 20
"""Of a row group of a trace, in memory."""

_END = struct.Struct("<4s4H2LH")
_END_OF_ZIP64 = b"PK\x06\x07"
_REMEDY = "the bundle is damaged or was not written by expert-tier bundle"
_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError, ValueError)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Member(_Model):
    """A member of the archive; rows of a table, null of what is none."""

    bytes: int
    sha256: str
    rows: int | None


class PackedTrace(_Model):
    """A trace that results are of. All but the id is null where it was not in the data folder.

    rows_sha256 is of the rows and so the same whoever wrote the file; file_sha256 of its bytes; source_sha256 of the
    raw dump it was made from.
    """

    trace_id: str
    rows_sha256: str | None
    file_sha256: str | None
    source_sha256: str | None
    bytes: int | None
    packed: bool


class Manifest(_Model):
    """What a bundle says of itself."""

    format: Literal["expert-tier bundle"]
    format_version: int
    made_by: str
    expert_tier_version: str
    git_commit: str | None
    selected_traces: list[str] | None
    selected_runs: list[str] | None
    environment: dict[str, str]
    seeds: dict[str, list[int]]
    traces: list[PackedTrace]
    members: dict[str, Member]


def rows_sha256(file: Path) -> str:
    """SHA-256 of a trace's rows: of each column which values are there, how long lists are, and the values in order.

    Raises:
        UnusableBundle: it is no Parquet file of a trace.
    """
    hashes: dict[str, Any] = {}
    try:
        with pq.ParquetFile(file) as parquet:
            names = sorted(parquet.schema_arrow.names)
            for batch in parquet.iter_batches(batch_size=1 << 16):
                for name in names:
                    own = hashes.setdefault(name, [hashlib.sha256() for _ in range(3)])
                    _hash_column(own, name, batch.column(name))
    except _UNREADABLE as error:
        raise UnusableBundle(
            f"{file}: unreadable ({' '.join(str(error).split())[:200]}); make the trace again"
        ) from None
    whole = hashlib.sha256()
    for name in sorted(hashes):
        whole.update(name.encode() + b"\0" + b"".join(own.digest() for own in hashes[name]))
    return whole.hexdigest()


def _hash_column(hashes: Sequence[Any], name: str, column: pa.Array) -> None:
    known = pc.is_valid(column)
    hashes[0].update(known.to_numpy(zero_copy_only=False).astype(np.uint8).tobytes())
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        hashes[1].update(pc.list_value_length(column).drop_null().to_numpy().astype("<i8").tobytes())
    if pa.types.is_nested(column.type):
        column = column.drop_null().flatten()
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
    column = column.drop_null()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        values = pa.array(PHASES if name == "phase" else PASS_KINDS, column.type)
        column = pc.fill_null(pc.index_in(column, values), -1)
    numbers = column.to_numpy(zero_copy_only=False)
    hashes[2].update(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes())


def traces_of(tables: Mapping[str, pl.DataFrame]) -> set[str]:
    """Traces that results are of, but for the one that `inversion` draws itself."""
    named = [name for name, table in TABLES.items() if "trace_id" in table.column_names and name != "inversion"]
    return {str(one) for name in named for one in tables[name]["trace_id"].unique()}


def seeds_of(tables: Mapping[str, pl.DataFrame]) -> dict[str, list[int]]:
    """Every seed that is known, by table and column."""
    return {
        f"{name}.{column}": sorted(frame[column].drop_nulls().unique().to_list())
        for name, frame in sorted(tables.items())
        for column in frame.columns
        if column.endswith("seed") and frame[column].drop_nulls().len()
    }


def reporting_text(block: pl.DataFrame) -> str:
    """What results have to be reported with, of each trace, as the table `reporting_block` answers it."""
    lines = ["# Reporting block (arXiv 2608.07911)", ""]
    for (trace_id,), rows in block.sort("trace_id", "item").group_by("trace_id", maintain_order=True):
        lines += [f"## {trace_id}", ""]
        lines += [f"- {row['item']} {row['question']}: {row['answer']}" for row in rows.iter_rows(named=True)]
        lines.append("")
    return "\n".join(lines) if block.height else "\n".join([*lines, "No trace was simulated.", ""])


class BundleFile:
    """An open bundle. Every read is bounded by what the archive's own size allows, and fails with UnusableBundle."""

    def __init__(self, path: Path) -> None:
        """Opens and looks at names and sizes; nothing is unpacked but the manifest.

        Raises:
            UnusableBundle: it is no bundle, or of another format version. OSError: it cannot be read.
        """
        self.path = path
        self._file: BinaryIO = path.open("rb")
        try:
            self._infos = self._members()
            self.manifest = self._manifest()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "BundleFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._archive.close()
        self._file.close()

    @property
    def names(self) -> list[str]:
        """Members but the manifest, sorted."""
        return sorted(set(self._infos) - {MANIFEST})

    def _unusable(self, what: str) -> UnusableBundle:
        return UnusableBundle(f"{self.path}: {what}; {_REMEDY}")

    def _members(self) -> dict[str, zipfile.ZipInfo]:
        size = self._file.seek(0, 2)
        if size > MOST_BYTES + _MOST_DIRECTORY_BYTES:
            raise self._unusable(f"{size:,} bytes, wanted at most {MOST_BYTES:,}")
        # The directory is read whole by zipfile, so its size is looked at before.
        self._file.seek(max(size - _END.size - 20, 0))
        tail = self._file.read()
        if size < _END.size or tail[-_END.size : -_END.size + 4] != b"PK\x05\x06":
            raise self._unusable("no bundle, or cut short")
        count, directory_bytes = _END.unpack(tail[-_END.size :])[4:6]
        if tail.startswith(_END_OF_ZIP64) or count > MOST_MEMBERS or directory_bytes > _MOST_DIRECTORY_BYTES:
            raise self._unusable(f"a directory of {count:,} members in {directory_bytes:,} bytes")
        try:
            self._archive = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError, struct.error) as error:
            raise self._unusable(f"unreadable ({error})") from None
        infos: dict[str, zipfile.ZipInfo] = {}
        for info in self._archive.infolist():
            name = info.orig_filename
            if not _is_member(name):
                raise self._unusable(f"a member {name!r:.80}, which no bundle has")
            if name in infos:
                raise self._unusable(f"two members {name!r:.80}")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise self._unusable(f"member {name} packed or encrypted, wanted stored as it is")
            infos[name] = info
        if sum(info.file_size for info in infos.values()) > size:
            raise self._unusable("members that lie over each other")
        return infos

    def _manifest(self) -> Manifest:
        if MANIFEST not in self._infos:
            raise self._unusable(f"no {MANIFEST}")
        content = self.read(MANIFEST, _MOST_TEXT_BYTES)
        try:
            said = json.loads(content)
        except (ValueError, RecursionError):
            raise self._unusable(f"{MANIFEST} is no JSON") from None
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise self._unusable(f"{MANIFEST} is of no bundle")
        if said.get("format_version") != FORMAT_VERSION:
            raise UnusableBundle(
                f"{self.path}: format version {said.get('format_version')!r:.20}, wanted {FORMAT_VERSION}; read it "
                f"with the version that wrote it ({said.get('expert_tier_version')!r:.40})"
            )
        try:
            manifest = Manifest.model_validate(said)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise self._unusable(f"{MANIFEST}: {place}: {first['msg']}") from None
        if not all(is_line(text) for text in (manifest.made_by, manifest.expert_tier_version)):
            raise self._unusable(f"{MANIFEST} does not say in a line what made the results")
        for trace in manifest.traces:
            # `inversion` and tests aside, ids become names of files.
            if not TRACE_ID_PATTERN.fullmatch(trace.trace_id):
                raise self._unusable(f"{MANIFEST}: trace id {trace.trace_id!r:.60}")
        return manifest

    def read(self, name: str, most_bytes: int = MOST_TABLE_BYTES) -> bytes:
        """A member, whole.

        Raises:
            UnusableBundle: it is too large or damaged.
        """
        info = self._infos[name]
        if info.file_size > most_bytes:
            raise self._unusable(f"member {name} of {info.file_size:,} bytes, wanted at most {most_bytes:,}")
        try:
            return self._archive.read(info)
        except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
            raise self._unusable(f"member {name}: {' '.join(str(error).split())[:120]}") from None

    def sha256(self, name: str) -> str:
        """Of a member's content, read in parts.

        Raises:
            UnusableBundle: it is damaged.
        """
        digest = hashlib.sha256()
        try:
            with self._archive.open(self._infos[name]) as member:
                while block := member.read(1 << 20):
                    digest.update(block)
        except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
            raise self._unusable(f"member {name}: {' '.join(str(error).split())[:120]}") from None
        return digest.hexdigest()

    def size(self, name: str) -> int:
        """Bytes of a member."""
        return self._infos[name].file_size

    def table(self, name: str, room_bytes: int = MOST_UNPACKED_BYTES) -> pl.DataFrame:
        """A table of the bundle, validated; empty where the bundle has none.

        Raises:
            UnusableBundle: it is damaged, would take more than `room_bytes`, or breaks the table's contract.
        """
        member = f"results/{name}.parquet"
        if member not in self._infos:
            return TABLES[name].frame([])
        frame = self._unpacked(member, TABLES[name], self.read(member), room_bytes)
        try:
            return validate_table(frame, TABLES[name])
        except ContractViolation as violation:
            raise UnusableBundle(str(violation).removeprefix(f"{name}: ")) from None

    def _unpacked(self, member: str, table: Table, content: bytes, room_bytes: int) -> pl.DataFrame:
        try:
            texts = [one.name for one in table.columns if one.dtype == pl.String]
            # Texts stay in their dictionary until it is known what they take: a page of a few bytes can name one text
            # a billion times.
            parquet = pq.ParquetFile(pa.BufferReader(content), read_dictionary=texts)
            found = pq.read_schema(pa.BufferReader(content))
            empty = pl.from_arrow(found.empty_table())
            assert isinstance(empty, pl.DataFrame)
            if dict(empty.schema) != table.polars_schema:
                raise self._unusable(f"member {member}: other columns than table {table.name} of this version")
            unpacked = sum(parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups))
            rows = parquet.metadata.num_rows
            if max(unpacked, rows * 8 * len(table.columns)) > room_bytes:
                raise self._unusable(
                    f"member {member}: {rows:,} rows, {unpacked:,} bytes, wanted {room_bytes:,} at most"
                )
            read = parquet.read()
            size = sum(_text_bytes(read.column(one)) for one in texts)
            if size > room_bytes:
                raise self._unusable(f"member {member}: texts of {size:,} bytes, wanted {room_bytes:,} at most")
            read.validate(full=True)
            frame = pl.from_arrow(read.cast(found))
        except (*_UNREADABLE, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            if isinstance(error, UnusableBundle):
                raise
            raise self._unusable(f"member {member}: unreadable ({' '.join(str(error).split())[:120]})") from None
        assert isinstance(frame, pl.DataFrame), "a table is a frame"
        return frame

    def unpack_trace(self, trace_id: str, target: Path) -> None:
        """Writes a packed trace to a file, after a look at what it takes to read.

        Raises:
            UnusableBundle: it is damaged, or unpacks to more than a trace of its rows. OSError: it cannot be written.
        """
        name = f"traces/{trace_id}.parquet"
        try:
            with self._archive.open(self._infos[name]) as member, target.open("wb") as file:
                while block := member.read(1 << 20):
                    file.write(block)
        except zipfile.BadZipFile as error:
            raise self._unusable(f"member {name}: {error}") from None
        try:
            footer = pq.read_metadata(target)
            for group in range(footer.num_row_groups):
                part = footer.row_group(group)
                # A row of k experts of the widest trace that is known takes less than 1 KiB.
                if max(part.total_byte_size, part.num_rows * 64) > _MOST_PART_BYTES:
                    raise self._unusable(f"member {name}: a row group of {part.num_rows:,} rows")
        except _UNREADABLE as error:
            if isinstance(error, UnusableBundle):
                raise
            raise self._unusable(f"member {name}: unreadable ({' '.join(str(error).split())[:120]})") from None


def _text_bytes(column: pa.ChunkedArray) -> int:
    """Bytes of a column of texts once they leave their dictionary."""
    total = 0
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            lengths = pc.binary_length(chunk.dictionary)
            total += pc.sum(lengths.take(chunk.indices)).as_py() or 0
        else:
            total += chunk.nbytes
    return total


def _is_member(name: str) -> bool:
    if name in (MANIFEST, REPORTING):
        return True
    table = re.fullmatch(r"results/([a-z_]+)\.parquet", name)
    if table is not None:
        return table[1] in TABLES
    trace = re.fullmatch(r"traces/(.+)\.parquet", name)
    return trace is not None and TRACE_ID_PATTERN.fullmatch(trace[1]) is not None
