"""Packed dumps: recognised by their first bytes, unpacked as a stream and never beyond a limit.

In: an open file of stored bytes. Out: a stream of what is packed in it. How a fault is worded for a dump, and which
file of an archive is read, belongs to `blocks`. Names in an archive are labels; nothing is opened or written by them.
"""

import bz2
import gzip
import io
import lzma
import re
import stat
import zipfile
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from replayer.quantities import format_bytes


class DamagedPacking(ValueError):
    """Packed data that ends early or cannot be unpacked."""


class BeyondLimit(ValueError):
    """Packed data that becomes larger than was allowed."""


@dataclass(frozen=True)
class Unpacking:
    """How far packed dumps are unpacked, and where to, if they cannot be read as a stream.

    max_bytes: of all files of a dump together; the default is a dozen times the 5 GB that an ingest is made for.
    max_ratio: of unpacked to stored bytes of a file, asked once RATIO_FROM_BYTES are unpacked. Published dumps shrink
    4- to 8-fold; deflate cannot reach more than 1,032, zstd and xz reach some 10,000, and neither does so on routes.
    spool_folder: of the unnamed file; null is the system's folder for temporary files, which can be memory.
    """

    max_bytes: int = 64 * 2**30
    max_ratio: int = 1000
    spool_folder: Path | None = None


RATIO_FROM_BYTES = 64 * 2**20
"""Unpacked bytes up to which a file may shrink as far as it likes: so much can be held in memory anyway."""

XZ_MEMORY_BYTES = 256 * 2**20
"""Most memory for an xz dictionary: `xz -9` needs 65 MiB. zstd has a limit of its own, 128 MiB."""

LARGEST_READ_BYTES = 16 * 2**20
"""Of a zip in one piece, so of its directory, which is read whole: that is over 100,000 names."""

_CHUNK_BYTES = 1024 * 1024

# A zstd file may start with a skippable frame, as pzstd writes it.
_MAGIC = (
    ("gzip", re.compile(rb"\x1f\x8b")),
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", re.DOTALL)),
    ("xz", re.compile(rb"\xfd7zXZ\x00")),
    ("bzip2", re.compile(rb"BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)")),
    ("zip", re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08)")),
)
_NOT_READ = (
    ("a tar archive", re.compile(rb".{257}ustar", re.DOTALL)),
    ("a 7z archive", re.compile(rb"7z\xbc\xaf\x27\x1c")),
    ("a rar archive", re.compile(rb"Rar!\x1a\x07")),
    ("packed by lz4", re.compile(rb"\x04\x22\x4d\x18")),
    ("packed by lzip", re.compile(rb"LZIP\x01")),
    ("packed by compress", re.compile(rb"\x1f[\x9d\xa0]")),
)


def packing_of(head: bytes) -> str | None:
    """`gzip`, `zstd`, `xz`, `bzip2` or `zip` by the first bytes of a file; null for anything else."""
    return next((name for name, magic in _MAGIC if magic.match(head)), None)


def not_read(head: bytes) -> str | None:
    """What a file is, if it is packed in a way that is not read."""
    return next((name for name, magic in _NOT_READ if magic.match(head)), None)


@dataclass
class Unpacked:
    """Counts what the files of one dump unpack to; reading a file again counts once."""

    unpacking: Unpacking
    _farthest: dict[Hashable, int] = field(default_factory=dict)
    _total: int = 0

    def count(self, file: Hashable, unpacked: int, stored: int) -> None:
        """That `stored` bytes of the file became so many by now.

        Raises:
            BeyondLimit: they are too many.
        """
        before = self._farthest.get(file, 0)
        if unpacked <= before:
            return
        self._farthest[file] = unpacked
        self._total += unpacked - before
        if self._total > self.unpacking.max_bytes:
            raise BeyondLimit(
                f"unpacks to more than {format_bytes(self.unpacking.max_bytes)}; if it is meant to, raise "
                "--max-unpacked"
            )
        if unpacked > RATIO_FROM_BYTES and unpacked > self.unpacking.max_ratio * stored:
            raise BeyondLimit(
                f"{format_bytes(stored)} unpack to more than {format_bytes(unpacked)}, over {self.unpacking.max_ratio} "
                "times as much: a decompression bomb, or one row again and again; if it is meant to, raise --max-ratio"
            )


class Unpacker(io.RawIOBase):
    """What is packed in a file, from the start, counted; damage and truncation raise DamagedPacking."""

    def __init__(self, packing: str, inner: Any, stored: int, file: Hashable, unpacked: Unpacked) -> None:
        self._packing, self._inner, self._stored = packing, inner, stored
        self._file, self._unpacked = file, unpacked
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        try:
            read: int = self._inner.readinto(buffer)
        except EOFError:
            raise self._truncated() from None
        except OSError as error:
            # Arrow, gzip and bz2 say damage with an OSError that has no number; a disk's has one.
            if error.errno is not None:
                raise
            if "runcated" in str(error):
                raise self._truncated() from None
            raise self._damaged(error) from None
        except (zlib.error, lzma.LZMAError, zipfile.BadZipFile, ValueError, RuntimeError, NotImplementedError) as error:
            raise self._damaged(error) from None
        self._done += read
        self._unpacked.count(self._file, self._done, self._stored)
        return read

    def _truncated(self) -> DamagedPacking:
        return DamagedPacking(f"the {self._packing} data ends early: truncated; copy the dump again")

    def _damaged(self, error: BaseException) -> DamagedPacking:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        if "too much memory" in reason or "emory usage limit" in reason:
            return DamagedPacking(
                f"the {self._packing} data needs more memory to unpack than is allowed; pack it with a smaller window "
                "(zstd without --long, xz -9 or less)"
            )
        return DamagedPacking(f"damaged {self._packing} data ({reason}); copy the dump again")


def opened(packing: str, file: BinaryIO) -> Any:
    """A reader of what is packed in the file, which is at its start."""
    if packing == "gzip":
        return gzip.GzipFile(fileobj=file)
    if packing == "bzip2":
        return bz2.BZ2File(file)
    if packing == "xz":
        return _Xz(file)
    return pa.CompressedInputStream(pa.PythonFile(_KeptOpen(file), mode="r"), "zstd")


class _Xz(io.RawIOBase):
    """One xz stream after the other, each with a limit on memory, which lzma.LZMAFile has not."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._stream: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        while True:
            stored = b""
            if self._stream is None or self._stream.eof:
                stored = self._next_stream()
                if not stored:
                    return 0
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
            elif self._stream.needs_input:
                stored = self._file.read(_CHUNK_BYTES)
                if not stored:
                    raise EOFError
            data = self._stream.decompress(stored, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)

    def _next_stream(self) -> bytes:
        # Between streams there may be zeros.
        stored = b"" if self._stream is None else self._stream.unused_data.lstrip(b"\0")
        while not stored:
            read = self._file.read(_CHUNK_BYTES)
            if not read:
                break
            stored = read if self._stream is None else read.lstrip(b"\0")
        return stored


class _KeptOpen:
    """A file that its reader cannot close, and cannot read a large piece of at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(LARGEST_READ_BYTES + 1 if size < 0 else min(size, LARGEST_READ_BYTES + 1))
        if len(data) > LARGEST_READ_BYTES:
            raise zipfile.BadZipFile(f"a directory of over {LARGEST_READ_BYTES} bytes")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


# zip archives

DAMAGED_ZIP = (
    ValueError, EOFError, OSError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""What zipfile and its decompressors raise on damaged content."""


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """The archive, its directory read in bounded memory; closing it leaves the file open.

    Raises:
        DAMAGED_ZIP: it is none.
    """
    return zipfile.ZipFile(cast(BinaryIO, _KeptOpen(file)))


def holds_arrays(names: Sequence[str]) -> bool:
    """Whether a zip of these names is an npz or a torch file: one dump, whatever the number of names."""
    return bool(names) and (
        all(name.endswith(".npy") for name in names) or any(name.rsplit("/")[-1] == "data.pkl" for name in names)
    )


def starts_with_array(head: bytes) -> bool:
    """The same by the first bytes of a zip, of which only the first name is known."""
    length = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + length].endswith((b".npy", b"data.pkl"))


def files_in(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files of an archive that are no folders and not hidden."""
    return [
        info
        for info in archive.infolist()
        if not info.is_dir() and not info.filename.startswith("__MACOSX/") and not re.match(r"\.(?!\.)", _base(info))
    ]


def member_fault(info: zipfile.ZipInfo) -> str | None:
    """Why a file of an archive is not read, or null."""
    name = info.filename
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name) or ".." in re.split(r"[/\\]", name):
        return "its name leads out of the archive"
    if "\\" in name or any(ord(character) < 32 for character in info.orig_filename):
        return "its name is no file name"
    kind = stat.S_IFMT(info.external_attr >> 16)
    if info.create_system == 3 and kind not in (0, stat.S_IFREG):
        return "it is a link or a device, not a file"
    if info.flag_bits & 0x1:
        return "it is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        return f"it is packed by zip method {info.compress_type}, which is not read"
    return None


def _base(info: zipfile.ZipInfo) -> str:
    return info.filename.rsplit("/")[-1]
