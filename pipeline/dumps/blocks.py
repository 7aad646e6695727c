"""What a parser is asked (`Layout`, `Sample`, `Asked`), what it hands over (`ParsedDump` of `RowBlock`s), and the files
it reads from (`DumpFile`, `DumpFolder`).

Dumps are untrusted: nothing is unpickled, a line or a block is bounded, and a file that changes while it is read is
refused. Letters: R rows of a block, K experts per row.
"""

import codecs
import errno
import hashlib
import io
import itertools
import json
import os
import re
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dumps.packing import (
    DAMAGED_ZIP,
    BeyondLimit,
    DamagedPacking,
    Unpacked,
    Unpacker,
    Unpacking,
    files_in,
    holds_arrays,
    member_fault,
    not_read,
    open_zip,
    opened,
    packing_of,
    starts_with_array,
)
from replayer.quantities import format_bytes
from schemas.trace import CheckRecord, EngineObservation, IdSpace, UserMetadata, WeightKind

HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_MEMBERS = 4096
"""Most files of one dump."""
MAX_LAYERS = 256
"""Most layers that are believed: the deepest published mixtures have fewer than half as many, so more of them are the
tokens of an array whose axes were swapped."""
ROWS_PER_BLOCK = 128 * 1024
"""Rows a parser aims at per block; a step that is larger stays whole."""
UNFINISHED = (".tmp", ".part", ".partial", ".crdownload")
"""Suffixes of copies and downloads that are under way."""
DEFAULT_UNPACKING = Unpacking()

_MAGIC_BYTES = 512
_DISK_LEFT_BYTES = 256 * 1024 * 1024


class _NoTraceOfIt(ValueError):
    """check: the check that refuses, by its name in `pipeline.validator`; null where the layout itself does."""

    def __init__(self, message: str, *, check: str | None = None) -> None:
        super().__init__(message)
        self.check = check


class MalformedDump(_NoTraceOfIt):
    """A dump of a known layout that is broken: truncated, contradicting itself, or changed while it was read."""


class RefusedDump(_NoTraceOfIt):
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
    `requests_named` means that `request` numbers what the dump names, so that equal routes of different requests are no
    copies; `copies_ruled_out` that the layout or its parser leaves no room for what stands twice (see `repeats`).
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
    requests_named: bool = False
    copies_ruled_out: bool = False
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

    One that is packed (gzip, zstd, xz, bzip2, or a zip of one file) is seen unpacked; an npz and a torch file are zips,
    and seen as they are. `follow` false refuses a symbolic link.

    Raises:
        MalformedDump: it is empty, no regular file, or its packing is damaged. RefusedDump: packed twice, or packed in
        a way that is not read. OSError: it cannot be opened.
    """

    def __init__(self, path: Path, unpacking: Unpacking = DEFAULT_UNPACKING, *, follow: bool = True) -> None:
        # O_NONBLOCK so that a FIFO in the dumps folder is refused instead of waited for.
        flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
        self._stat = os.fstat(descriptor)
        if not stat.S_ISREG(self._stat.st_mode):
            os.close(descriptor)
            raise MalformedDump(f"{path}: not a regular file; pass the dump itself")
        self._set_up(path, os.fdopen(descriptor, "rb"), Unpacked(unpacking))
        try:
            if self._stat.st_size == 0:
                raise MalformedDump(f"{path}: the file is empty; was the recorder stopped before it wrote anything?")
            head = self.raw.read(_MAGIC_BYTES)
            if (what := not_read(head)) is not None:
                raise RefusedDump(
                    f"{path}: {what}, which is not read; unpack it (into a folder, if it is several files)"
                )
            self.packing = packing_of(head)
            if self.packing == "zip":
                self._look_into_zip()
            if self.packing is not None and not self.archived:
                self._refuse_packed_twice()
        except BaseException:
            self.close()
            raise

    packing: str | None
    """gzip, zstd, xz, bzip2 or zip; null if the file is not packed."""
    archived: list[zipfile.ZipInfo]
    """The files of a zip of several; else empty."""

    def _set_up(self, path: Path, file: BinaryIO, unpacked: Unpacked) -> None:
        self.path, self._file, self._unpacked = path, file, unpacked
        self.packing, self.archived = None, []
        self._archive: zipfile.ZipFile | None = None
        self._member: zipfile.ZipInfo | None = None
        self._spooled: BinaryIO | None = None
        self._is_whole = True

    @classmethod
    def archived_file(cls, archive: "DumpFile", info: zipfile.ZipInfo) -> "DumpFile":
        """One file of a zip of several, with the name of both; it is readable as long as the archive is open."""
        dump = cls.__new__(cls)
        dump._set_up(archive.path / info.filename, archive._file, archive._unpacked)
        dump._stat, dump._is_whole = archive._stat, False
        dump.packing, dump._archive, dump._member = "zip", archive._archive, info
        if not info.file_size:
            raise MalformedDump(f"{dump.path}: the file is empty; was the recorder stopped before it wrote anything?")
        dump._refuse_packed_twice()
        return dump

    def _look_into_zip(self) -> None:
        try:
            archive = open_zip(self._file)
            names = archive.namelist()
        except DAMAGED_ZIP as error:
            raise MalformedDump(
                f"{self.path}: a truncated or damaged npz or zip ({str(error)[:200]}); copy the dump again"
            ) from None
        if holds_arrays(names):
            self.packing = None
            return
        files = files_in(archive)
        if not 0 < len(files) <= MAX_MEMBERS:
            raise MalformedDump(f"{self.path}: {len(files)} files in the zip, wanted 1 to {MAX_MEMBERS}, of one dump")
        for info in files:
            if (fault := member_fault(info)) is not None:
                raise RefusedDump(f"{self.path}: {info.filename[:120]!r} in the zip is not read: {fault}")
        self._archive = archive
        if len(files) == 1:
            self._member = files[0]
        else:
            self.archived = files

    def _refuse_packed_twice(self) -> None:
        with self._content() as content:
            head = content.read(_MAGIC_BYTES)
        if not head:
            raise MalformedDump(f"{self.path}: nothing is packed in it; was the recorder stopped before it wrote?")
        inside = packing_of(head)
        what = not_read(head) or (f"packed by {inside}" if inside else None)
        if inside == "zip" and starts_with_array(head):
            return
        if what is not None:
            raise RefusedDump(f"{self.path}: what is packed in it is {what} again; unpack the outer layer")

    def __enter__(self) -> "DumpFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; one of an archive leaves the archive open."""
        if self._spooled is not None:
            self._spooled.close()
        if self._is_whole:
            self._file.close()

    @property
    def size_bytes(self) -> int:
        """Stored bytes."""
        return self._stat.st_size if self._is_whole or self._member is None else self._member.compress_size

    @property
    def is_packed(self) -> bool:
        return self.packing is not None

    @property
    def read_bytes(self) -> int:
        """How far the stored bytes were read, as far as they are read one after the other; from any thread."""
        try:
            return os.lseek(self._file.fileno(), 0, os.SEEK_CUR)
        except (OSError, ValueError):
            return 0

    @property
    def raw(self) -> BinaryIO:
        """The content from the start, in a file that can be sought: where it is packed, unpacked to an unnamed one.

        Raises:
            As `stream`; OSError: the disk is nearly full.
        """
        if self.packing is None:
            self._file.seek(0)
            return self._file
        if self._spooled is None:
            self._spooled = self._spool()
        self._spooled.seek(0)
        return self._spooled

    def _spool(self) -> BinaryIO:
        folder = self._unpacked.unpacking.spool_folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed with the dump
        try:
            with self._content() as content:
                while chunk := content.read(8 * 1024 * 1024):
                    disk = os.fstatvfs(file.fileno())
                    if disk.f_bavail * disk.f_frsize < len(chunk) + _DISK_LEFT_BYTES:
                        raise OSError(
                            errno.ENOSPC,
                            f"too little room to unpack it: under {format_bytes(_DISK_LEFT_BYTES)} would be left",
                            str(self.path),
                        )
                    file.write(chunk)
        except BaseException:
            file.close()
            raise
        return file

    def check_unpacked_size(self, size_bytes: int) -> None:
        """Raises RefusedDump if arrays of that size are more than may be unpacked from this file."""
        try:
            self._unpacked.count((self.path, "arrays"), size_bytes, self.size_bytes)
        except BeyondLimit as error:
            raise RefusedDump(f"{self.path}: {error}") from None

    def _content(self) -> io.BufferedReader:
        if self.packing is None:
            return _reader(self.raw, self.path)
        if self.archived:
            raise RefusedDump(f"{self.path}: {len(self.archived)} files in one zip, which are a dump of several")
        self._file.seek(0)
        if self._member is None:
            inner, stored = opened(self.packing, self._file), self.size_bytes
        else:
            inner, stored = self._archived_content(self._member), self._member.compress_size
        return _reader(Unpacker(self.packing, inner, stored, self.path, self._unpacked), self.path)

    def _archived_content(self, info: zipfile.ZipInfo) -> io.BufferedIOBase:
        assert self._archive is not None
        try:
            return cast(io.BufferedIOBase, self._archive.open(info))
        except DAMAGED_ZIP as error:
            raise MalformedDump(
                f"{self.path}: truncated or damaged zip data ({str(error)[:200]}); copy the dump again"
            ) from None

    def stream(self) -> io.BufferedReader:
        """The content from the start, unpacked if it is packed; truncation raises MalformedDump.

        All streams share one file position: a new one ends the one before.
        """
        reader = self._content()
        if reader.peek(3).startswith(codecs.BOM_UTF8):
            reader.read(3)
        return reader

    def head(self) -> bytes:
        """The first 64 KiB of the content."""
        return self.stream().read(HEAD_BYTES)

    def sha256(self) -> "hashlib._Hash":
        """SHA-256 over the stored bytes; of one file of an archive, over its content."""
        digest = hashlib.sha256()
        if self._is_whole:
            self._file.seek(0)
        source: BinaryIO = self._file if self._is_whole else cast(BinaryIO, self._content())
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
    """A dump of several files: one a layer, a rank, or a turn; in a folder, in a zip, or named one by one.

    `files` are in natural order (rank2 before rank10), without metadata (`.toml`) and hidden files; `open` opens them.
    `missing` names files that the numbers in the others' names leave out: a warning here, since layers can be left out
    for a reason and the parser alone knows what a rank holds; where names say how many there are (`-1-of-3`), a
    missing one is refused.

    Raises:
        MalformedDump: no file, more than MAX_MEMBERS, an unfinished copy, something that is no plain file (a link could
        lead anywhere, a subfolder is a dump of its own), a file that is missing for certain. OSError: it cannot be
        listed.
    """

    def __init__(self, path: Path, files: list[Path] | None = None, unpacking: Unpacking = DEFAULT_UNPACKING) -> None:
        self._set_up(path, unpacking)
        self._is_listed = files is None
        listed = self._list() if files is None else files
        self.files = sorted((file for file in listed if file.suffix != ".toml"), key=lambda file: _natural(file.name))
        self._states = [self._state(file) for file in self.files]
        self._look_at_names()

    @classmethod
    def of_archive(cls, archive: DumpFile) -> "DumpFolder":
        """The files of a zip; closing the folder closes the archive."""
        folder = cls.__new__(cls)
        folder._set_up(archive.path, archive._unpacked.unpacking)
        folder._is_listed, folder._archive = False, archive
        folder._infos = {
            archive.path / info.filename: info for info in archive.archived if not info.filename.endswith(".toml")
        }
        if len(folder._infos) < sum(not info.filename.endswith(".toml") for info in archive.archived):
            raise MalformedDump(f"{archive.path}: a name stands twice in the zip; pack it again")
        within = {file.parent for file in folder._infos}
        if len(within) > 1:
            raise MalformedDump(
                f"{archive.path}: its files are in {len(within)} folders; a dump of several files is in one, pack each "
                "folder by itself"
            )
        folder.files = sorted(folder._infos, key=lambda file: _natural(file.name))
        folder._look_at_names()
        return folder

    files: list[Path]
    missing: list[str]
    _states: list[tuple[int, int, int]]

    def _set_up(self, path: Path, unpacking: Unpacking) -> None:
        self.path = path
        self.files, self.missing, self._states = [], [], []
        self._unpacked = Unpacked(unpacking)
        self._archive: DumpFile | None = None
        self._infos: dict[Path, zipfile.ZipInfo] = {}
        self._opened: dict[Path, DumpFile] = {}
        self._read: dict[Path, int] = {}

    def _list(self) -> list[Path]:
        listed = []
        for file in self.path.iterdir():
            if file.name.startswith("."):
                continue
            listed.append(file)
            if len(listed) > 2 * MAX_MEMBERS:
                break
        return listed

    def _look_at_names(self) -> None:
        if not 0 < len(self.files) <= MAX_MEMBERS:
            raise MalformedDump(
                f"{self.path}: {len(self.files)} files, wanted 1 to {MAX_MEMBERS}, all of one dump (one a layer, "
                "rank or turn)"
            )
        for file in self.files:
            if file.suffix in UNFINISHED:
                raise MalformedDump(f"{file}: an unfinished copy; wait until it has its name, or remove it")
        self.missing, is_certain = missing_names([file.name for file in self.files])
        if self.missing and is_certain:
            raise MalformedDump(f"{self.path}: {', '.join(self.missing[:5])} is missing; copy it into the dump")

    def __enter__(self) -> "DumpFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._archive is not None:
            self._archive.close()

    @staticmethod
    def _state(file: Path) -> tuple[int, int, int]:
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode):
            if stat.S_ISLNK(found.st_mode):
                what = "a link, which could lead out of the folder; copy the file itself there (cp -L)"
            elif stat.S_ISDIR(found.st_mode):
                what = "a folder inside a folder; ingest each by itself"
            else:
                what = "no file; remove it from the dump"
            raise MalformedDump(f"{file}: {what}")
        return found.st_ino, found.st_size, found.st_mtime_ns

    def open(self, file: Path) -> DumpFile:
        """One of `files`.

        Raises:
            As `DumpFile`; MalformedDump also where it is another file than the one that was listed.
        """
        if self._archive is not None:
            return DumpFile.archived_file(self._archive, self._infos[file])
        dump = DumpFile(file, self._unpacked.unpacking, follow=False)
        dump._unpacked = self._unpacked
        if dump.archived:
            dump.close()
            raise RefusedDump(f"{file}: an archive of several files inside a dump of several; unpack it")
        found = dump._stat
        if (found.st_ino, found.st_size, found.st_mtime_ns) != self._states[self.files.index(file)]:
            dump.close()
            raise _changed(file)
        self._keep_read_bytes()
        self._opened[file] = dump
        return dump

    @property
    def size_bytes(self) -> int:
        """Stored bytes of all files."""
        return sum(size for _, size, _ in self._states) if self._archive is None else self._archive.size_bytes

    @property
    def read_bytes(self) -> int:
        """How far the stored bytes were read since `read_again`; from any thread."""
        if self._archive is not None:
            return self._archive.read_bytes
        self._keep_read_bytes()
        return sum(self._read.values())

    def _keep_read_bytes(self) -> None:
        # A file that is closed was read; parsers open several at a time at most.
        for file, dump in list(self._opened.items()):
            self._read[file] = max(self._read.get(file, 0), dump.read_bytes)
            if dump._file.closed:
                self._read[file] = dump.size_bytes
                self._opened.pop(file, None)

    def read_again(self) -> None:
        """Counts `read_bytes` from 0 again: a new pass over the files begins."""
        self._opened.clear()
        self._read.clear()

    def sha256(self) -> "hashlib._Hash":
        """SHA-256 over the names and the SHA-256 of each file, in order; of an archive, over its bytes."""
        if self._archive is not None:
            return self._archive.sha256()
        digest = hashlib.sha256()
        for file in self.files:
            with self.open(file) as member:
                digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0" + member.sha256().digest())
        return digest

    def checks(self) -> list[CheckRecord]:
        """What the names of the files say of the dump."""
        more = f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
        return [
            CheckRecord(
                name="files complete",
                outcome="warn" if self.missing else "ok",
                wanted="no gap in the numbers in the files' names",
                found=f"missing, by the names of the others: {', '.join(self.missing[:8])}{more}"
                if self.missing
                else f"{len(self.files)} files",
            )
        ]

    def check_unchanged(self) -> None:
        """Raises MalformedDump if a file was written to, added or removed since the folder was opened."""
        if self._archive is not None:
            self._archive.check_unchanged()
            return
        for file, state in zip(self.files, self._states, strict=True):
            try:
                is_same = self._state(file) == state
            except FileNotFoundError:
                is_same = False
            if not is_same:
                raise _changed(file)
        if self._is_listed:
            now = {file for file in self._list() if file.suffix != ".toml"}
            for file in sorted(now - set(self.files))[:1]:
                raise MalformedDump(
                    f"{file}: added while the folder was read; wait until the recorder has ended, then ingest again"
                )


def _changed(file: Path) -> MalformedDump:
    return MalformedDump(f"{file}: changed while it was read; wait until the recorder has closed it, then ingest again")


def missing_names(names: Sequence[str]) -> tuple[list[str], bool]:
    """(names that are missing from a numbered series, whether the names themselves say so: `-1-of-3`).

    A series is names that differ in one number only. Numbers that are all equally far apart (each second layer), or
    farther than there are names (times, process ids), are no series with a gap, but of ranks, shards
    and parts each counts, and ranks from 0.
    """
    parts = [re.split(r"([0-9]{1,18})", name) for name in names]
    if len({(len(part), tuple(part[::2])) for part in parts}) != 1:
        return [], False
    columns = [[part[place] for part in parts] for place in range(1, len(parts[0]), 2)]
    varying = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    of = [place for place in range(1, len(columns)) if _OF.fullmatch(parts[0][2 * place])]
    if len(of) == 1 and varying in ([], [of[0] - 1]):
        place, total = of[0] - 1, int(columns[of[0]][0])
        if total <= MAX_MEMBERS:
            there = {int(number) for number in columns[place]}
            first = 0 if 0 in there else 1
            return _named(parts[0], place, columns[place][0], set(range(first, first + total)) - there), True
    if len(varying) != 1:
        return [], False
    column = columns[varying[0]]
    there = {int(number) for number in column}
    counted = _COUNTED.search(parts[0][2 * varying[0]])
    counts_each = counted is not None
    low, high = 0 if counted and counted.group("from_0") else min(there), max(there)
    gap = high - low + 1 - len(there)
    distances = {after - before for before, after in itertools.pairwise(sorted(there))}
    if gap > max(len(there), 8 if counts_each else 0) or (len(distances) == 1 and len(there) > 3 and not counts_each):
        return [], False
    return _named(parts[0], varying[0], column[0], set(range(low, high + 1)) - there), False


def _named(part: list[str], place: int, example: str, numbers: set[int]) -> list[str]:
    width = len(example) if example.startswith("0") else 0
    before, after = "".join(part[: 2 * place + 1]), "".join(part[2 * place + 2 :])
    return [f"{before}{number:0{width}d}{after}" for number in sorted(numbers)]


_OF = re.compile(r"[-_ .]?of[-_ .]?", re.IGNORECASE)
_COUNTED = re.compile(r"(?:(?P<from_0>rank|(?:^|[-_.])[dt]p)|shard|part)[-_ .]?$", re.IGNORECASE)


def _natural(name: str) -> list[tuple[int, str]]:
    # rank2 before rank10.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,18})", name)]


Dump = DumpFile | DumpFolder


class _Source(io.RawIOBase):
    """Words the faults of a stream that is unpacked, whoever reads it."""

    def __init__(self, inner: BinaryIO | io.RawIOBase, path: Path) -> None:
        self._inner = inner
        self._path = path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        try:
            return cast(int, self._inner.readinto(buffer))  # type: ignore[union-attr]
        except DamagedPacking as error:
            raise MalformedDump(f"{self._path}: {error}") from None
        except BeyondLimit as error:
            raise RefusedDump(f"{self._path}: {error}") from None


def _reader(inner: BinaryIO | io.RawIOBase, path: Path) -> io.BufferedReader:
    return io.BufferedReader(_Source(inner, path), 1024 * 1024)


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
