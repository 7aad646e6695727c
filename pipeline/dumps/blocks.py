"""What a parser hands over (`ParsedDump` of `RowBlock`s), and the file it reads from (`DumpFile`).

Dumps are untrusted: nothing is unpickled, a line or a block is bounded, and a file that changes while it is read is
refused. Letters: R rows of a block, K experts per row.
"""

import codecs
import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from schemas.trace import EngineObservation

HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024 * 1024
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
    checked; weights (R, K) float32 or null, NaN where unknown.
    """

    step: npt.NDArray[np.int64]
    pass_in_step: npt.NDArray[np.int32]
    layer: npt.NDArray[np.int32]
    request: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64] | None
    phase: npt.NDArray[np.int8]
    expert_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        return len(self.step)


@dataclass
class ParsedDump:
    """What a dump says of itself, and its rows.

    `blocks` can be walked once. `dropped_rows` and `observations` are complete only afterwards. `layers_are_ordinals`
    means the dump lists layers without their numbers. `speculative` asks for the typing of passes by record width.
    """

    format: str
    blocks: Iterator[RowBlock]
    top_k: int
    model: str | None = None
    engine: str | None = None
    capture_method: str | None = None
    hidden_layers: int | None = None
    num_experts: int | None = None
    largest_storable_id: int | None = None
    top_k_model: int | None = None
    layers_are_ordinals: bool = False
    layer_expert_bytes: dict[int, int] | None = None
    pass_boundaries: str = "recorded"
    speculative: bool = False
    top_k_is_inferred: bool = False
    dropped_rows: dict[str, int] = field(default_factory=dict)
    observations: list[EngineObservation] = field(default_factory=list)


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
            self.is_gzip = head == b"\x1f\x8b"
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
        inner = gzip.GzipFile(fileobj=self.raw) if self.is_gzip else self.raw
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
