"""What a parser is asked (`Layout`, `Sample`, `Asked`), what it hands over (`ParsedDump` of `RowBlock`s), and the files
it reads from (`DumpFile`, `DumpFolder`).

Dumps are untrusted: nothing is unpickled, a line or a block is bounded, and a file that changes while it is read is
refused. Letters: R rows of a block, K experts per row.
"""

import codecs
import gzip
import hashlib
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.trace import CheckRecord, EngineObservation, IdSpace, UserMetadata, WeightKind

HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_MEMBERS = 4096
"""Most files of one dump."""
ROWS_PER_BLOCK = 128 * 1024
"""Rows a parser aims at per block; a step that is larger stays whole."""


class MalformedDump(ValueError):
    """A dump of a known layout that is broken: truncated, contradicting itself, or changed while it was read."""


class RefusedDump(ValueError):
    """A file that cannot become a trace, however sound: counts, pointers, pickles, unknown layouts."""


@dataclass(frozen=True)
class RowBlock:
    """Whole steps, one row per token position of one pass of one layer, in recorded order.

    step (R,) counts the dump's steps densely from 0; pass_in_step (R,) the passes of a step; layer (R,) as the dump
    numbers it; request (R,); position (R,) or null; phase (R,) codes of PHASES; expert_ids (R, K) int32, not yet
    checked; weights (R, K) float32 or null, NaN where unknown. pass_kind (R,) codes of PASS_KINDS where the dump says
    them; predicted (R,) lists of uint16, null where no plan covered the row.
    """

    step: npt.NDArray[np.int64]
    pass_in_step: npt.NDArray[np.int32]
    layer: npt.NDArray[np.int32]
    request: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64] | None
    phase: npt.NDArray[np.int8]
    expert_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None = None
    pass_kind: npt.NDArray[np.int8] | None = None
    predicted: pa.ListArray | None = None

    @property
    def rows(self) -> int:
        return len(self.step)


@dataclass
class ParsedDump:
    """What a dump says of itself, and its rows.

    `blocks` can be walked once. `dropped_rows`, `missing_positions`, `checks` and `observations` are complete only
    afterwards. `layers_are_ordinals` means the dump lists layers without their numbers. `speculative` asks for the
    typing of passes by record width. `rank_known` is false where the layout loses router order, null where the ids
    tell. `layer_expert_bytes` is one size of all experts, one a layer, or those of each layer's experts.
    `dropped_rows` counts, by reason, rows of the dump that are not in the trace; `missing_positions` token
    positions that the dump itself says were not captured. `checks` are the parser's own, of what only it can see.
    """

    format: str
    blocks: Iterator[RowBlock]
    top_k: int
    model: str | None = None
    engine: str | None = None
    capture_method: str | None = None
    domain: str | None = None
    hidden_layers: int | None = None
    num_experts: int | None = None
    largest_storable_id: int | None = None
    top_k_model: int | None = None
    layers_are_ordinals: bool = False
    layer_expert_bytes: int | dict[int, int] | dict[int, list[int]] | None = None
    pass_boundaries: str = "recorded"
    speculative: bool = False
    top_k_is_inferred: bool = False
    id_space: IdSpace | None = None
    weight_kind: WeightKind | None = None
    rank_known: bool | None = None
    dropped_rows: dict[str, int] = field(default_factory=dict)
    missing_positions: dict[str, int] = field(default_factory=dict)
    checks: list[CheckRecord] = field(default_factory=list)
    observations: list[EngineObservation] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """What a parser gets beside the dump: what the user says of it, and where large arrays may be spooled."""

    user: UserMetadata
    spool_folder: Path


@dataclass(frozen=True)
class Sample:
    """What a file shows at first sight, for the layouts to recognise theirs by content.

    head: its first 64 KiB, unpacked. line: its first line that is not blank. value: that line as JSON, null where it is
    none. header: the first line that is not blank and no `#` comment. columns: that line's names, split at commas.
    members: names in a zip (npz and torch files are such), else empty. parquet_keys, parquet_columns: keys of a Parquet
    file's metadata and names of its columns.
    """

    head: bytes
    line: str
    value: object | None
    header: str
    columns: frozenset[str]
    members: tuple[str, ...] = ()
    parquet_keys: frozenset[str] = frozenset()
    parquet_columns: frozenset[str] = frozenset()

    def field(self, name: str) -> object | None:
        """A field of the first line's object; null where there is none."""
        return self.value.get(name) if isinstance(self.value, dict) else None


@dataclass(frozen=True)
class Layout:
    """A layout of raw dumps: how its content is recognised, and the parser of a file, of a folder of files, or both.

    name: as in a trace's metadata. description: a few words for the list of known layouts. Parsers raise RefusedDump
    where the content can be no trace, MalformedDump where it is broken.
    """

    name: str
    description: str
    claims: "Callable[[Sample], bool]"
    parse: "Callable[[DumpFile, Asked], ParsedDump] | None" = None
    parse_folder: "Callable[[DumpFolder, Asked], ParsedDump] | None" = None


@dataclass(frozen=True)
class NoTrace:
    """A kind of file that looks like a dump and can be none: how it is recognised, and why it is refused."""

    claims: "Callable[[Sample], bool]"
    reason: str


class DumpFile:
    """A raw dump opened once; every pass over it reads the same inode.

    Raises:
        MalformedDump: it is empty or no regular file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK so that a FIFO in the dumps folder is refused instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._stat = os.fstat(descriptor)
        if not stat.S_ISREG(self._stat.st_mode):
            os.close(descriptor)
            raise MalformedDump(f"{path}: not a regular file; pass the dump itself")
        self._file: BinaryIO = os.fdopen(descriptor, "rb")
        try:
            if self._stat.st_size == 0:
                raise MalformedDump(f"{path}: the file is empty; was the recorder stopped before it wrote anything?")
            head = self._file.read(2)
            self.is_packed = head == b"\x1f\x8b"
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "DumpFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def size_bytes(self) -> int:
        return self._stat.st_size

    @property
    def raw(self) -> BinaryIO:
        """The stored bytes from the start."""
        self._file.seek(0)
        return self._file

    def stream(self) -> io.BufferedReader:
        """The content from the start, decompressed if the file is gzip; truncation raises MalformedDump.

        All streams share one file position: a new one ends the one before.
        """
        inner = gzip.GzipFile(fileobj=self.raw) if self.is_packed else self.raw
        reader: io.BufferedReader = io.BufferedReader(_Source(inner, self.path), 1024 * 1024)
        if reader.peek(3).startswith(codecs.BOM_UTF8):
            reader.read(3)
        return reader

    def head(self) -> bytes:
        """The first 64 KiB of the content."""
        return self.stream().read(HEAD_BYTES)

    def sha256(self) -> "hashlib._Hash":
        """SHA-256 over the stored bytes."""
        digest = hashlib.sha256()
        source = self.raw
        while chunk := source.read(4 * 1024 * 1024):
            digest.update(chunk)
        return digest

    def check_unchanged(self) -> None:
        """Raises MalformedDump if the file was written to since it was opened."""
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise MalformedDump(
                f"{self.path}: changed while it was read ({self._stat.st_size} → {now.st_size} bytes); "
                "wait until the recorder has closed it, then ingest again"
            )


class DumpFolder:
    """A dump of several files: one a layer, a rank, or a turn.

    Raises:
        MalformedDump: no file, or more than MAX_MEMBERS. OSError: it cannot be listed.
    """

    def __init__(self, path: Path, files: list[Path] | None = None) -> None:
        self.path = path
        listed = files if files is not None else [file for file in path.iterdir() if not file.name.startswith(".")]
        self.files = sorted((file for file in listed if file.suffix != ".toml"), key=lambda file: _natural(file.name))
        if not 0 < len(self.files) <= MAX_MEMBERS:
            raise MalformedDump(
                f"{path}: {len(self.files)} files, wanted 1 to {MAX_MEMBERS}, all of one dump (one a layer, "
                "rank or turn)"
            )
        self._states = [self._state(file) for file in self.files]

    def __enter__(self) -> "DumpFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @staticmethod
    def _state(file: Path) -> tuple[int, int, int]:
        found = file.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    @property
    def size_bytes(self) -> int:
        """Stored bytes of all files."""
        return sum(size for _, size, _ in self._states)

    def sha256(self) -> "hashlib._Hash":
        """SHA-256 over the names and the SHA-256 of each file, in order."""
        digest = hashlib.sha256()
        for file in self.files:
            with DumpFile(file) as member:
                digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0" + member.sha256().digest())
        return digest

    def check_unchanged(self) -> None:
        """Raises MalformedDump if a file was written to since the folder was opened."""
        for file, state in zip(self.files, self._states, strict=True):
            if self._state(file) != state:
                raise MalformedDump(
                    f"{file}: changed while it was read; wait until the recorder has closed it, then ingest again"
                )


def _natural(name: str) -> list[tuple[int, str]]:
    # rank2 before rank10.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,18})", name)]


Dump = DumpFile | DumpFolder


class _Source(io.RawIOBase):
    """Words the faults of a compressed or shrinking stream, whoever reads it."""

    def __init__(self, inner: BinaryIO | gzip.GzipFile, path: Path) -> None:
        self._inner = inner
        self._path = path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        try:
            return cast(int, self._inner.readinto(buffer))  # type: ignore[union-attr]
        except EOFError:
            raise MalformedDump(f"{self._path}: the gzip data ends early: truncated; copy the dump again") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise MalformedDump(f"{self._path}: damaged gzip data ({error}); copy the dump again") from None


def read_line(stream: io.BufferedReader, path: Path, number: int) -> bytes:
    """The next line with its end, or b"" at the end of the stream."""
    line = stream.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise MalformedDump(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; is this a text dump?")
    return line


def first_bad_line(dump: DumpFile, fault_of: Callable[[bytes], str | None], *, skip_lines: int = 0) -> MalformedDump:
    """The error for the first line in which `fault_of` finds a fault: slow, and only run once something is wrong."""
    stream = dump.stream()
    number = 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if number <= skip_lines or not line.strip():
            continue
        fault = fault_of(line)
        if fault is not None:
            last = not stream.peek(1)
            hint = "; it is the last line: the dump is truncated, copy or record it again" if last else ""
            return MalformedDump(f"{dump.path}, line {number}: {fault}{hint}")
    return MalformedDump(
        f"{dump.path}: unreadable, though each of its {number} lines reads well alone; is one of them far longer than "
        "the first?"
    )


def json_fault(line: bytes, fault_of: Callable[[object], str | None]) -> str | None:
    """What is wrong with one line of a JSONL dump, or null."""
    try:
        value = json.loads(line, object_pairs_hook=_without_repeats)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return "JSON nested too deep"
    except UnicodeEncodeError:
        return "half of a surrogate pair in a text"
    except ValueError as error:
        return f"no JSON object ({str(error).splitlines()[0]})"
    return fault_of(value)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field stands twice")
    return fields


def is_integer(value: object) -> bool:
    """Whether a JSON value is a whole number (true and false are not)."""
    return isinstance(value, int) and not isinstance(value, bool)
