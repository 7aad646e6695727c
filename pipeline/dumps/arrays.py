"""Arrays inside dumps: members of an npz and tensors of a safetensors file, read without pickle and in bounded memory.

Headers are somebody's word: a shape is held against the bytes that are there before anything of its size is reserved.
Large arrays are unpacked to an unnamed file, so nothing of them can be left behind.
"""

import json
import lzma
import mmap
import os
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from pipeline.dumps.packing import open_zip

IN_MEMORY_BYTES = 128 * 1024 * 1024
"""Larger arrays are unpacked to an unnamed file: layouts store them layer by layer, and they are needed by token."""

MAX_HEADER_BYTES = 64 * 1024 * 1024
"""Largest header of a safetensors file that is read."""

_MAX_TEXT_BYTES = 1024 * 1024
_MAX_NPY_HEADER_BYTES = 64 * 1024

# What zipfile, its decompressors, numpy's header parser and json raise on damaged content.
DAMAGE = (
    ValueError, EOFError, OSError, RecursionError, RuntimeError, SyntaxError, NotImplementedError, TypeError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError,
)  # fmt: skip

# BF16 has no numpy type: its upper half of a float32 is widened by `as_float32`.
_SAFETENSORS = {
    "U8": "|u1", "I8": "|i1", "BOOL": "|b1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2",
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """Shape, type and order of an array, before it is read; is_bf16 where `dtype` holds the bits of bfloat16."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool = False
    is_bf16: bool = False

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Npz:
    """The arrays of an npz by name, without `.npy`.

    Raises:
        MalformedDump: truncated, damaged, or a name stands twice. RefusedDump: an array of pickled objects is read.
    """

    def __init__(self, dump: DumpFile) -> None:
        self.path, raw = dump.path, dump.raw
        try:
            self._archive = open_zip(raw)
        except DAMAGE as error:
            raise MalformedDump(f"{dump.path}: a truncated or damaged npz ({error}); copy the dump again") from None
        dump.check_unpacked_size(sum(info.file_size for info in self._archive.infolist()))
        members = self._archive.namelist()
        if len(set(members)) != len(members):
            raise MalformedDump(
                f"{dump.path}: an array stands twice in the npz, so which one is meant is unknown; save again"
            )
        self.names = [name.removesuffix(".npy") for name in members]

    def header(self, name: str) -> Header:
        """What the array's own header says."""
        try:
            with self._archive.open(f"{name}.npy") as file:
                shape, fortran, dtype = _npy_header(file)
        except DAMAGE as error:
            raise MalformedDump(
                f"{self.path}: {name}.npy has no readable npy header ({error}); copy the dump again"
            ) from None
        if dtype.hasobject:
            raise RefusedDump(
                f"{self.path}: {name}.npy holds pickled Python objects, which are never loaded; save "
                "plain integer arrays"
            )
        if any(isinstance(length, bool) or not isinstance(length, int) or length < 0 for length in shape):
            raise MalformedDump(
                f"{self.path}: {name} is shaped {list(shape)}, wanted whole numbers; copy the dump again"
            )
        return Header(shape, dtype, fortran)

    def text(self, name: str) -> str:
        """An array that is one string of at most 1 MiB."""
        header = self.header(name)
        size = max(self._archive.getinfo(f"{name}.npy").file_size, header.size_bytes)
        if size > _MAX_TEXT_BYTES or header.shape not in ((), (1,)) or header.dtype.kind not in "US":
            raise MalformedDump(
                f"{self.path}: {name} is {header.dtype} shaped {list(header.shape)}, wanted one JSON string of at most "
                "1 MiB"
            )
        with self._archive.open(f"{name}.npy") as file:
            try:
                return str(np.lib.format.read_array(file, allow_pickle=False).reshape(())[()])
            except DAMAGE as error:
                raise MalformedDump(f"{self.path}: {name} is no JSON ({line_of(error)}); record again") from None

    def json(self, name: str) -> dict[str, Any]:
        """An array that is one string with a JSON object."""
        try:
            value = json.loads(self.text(name))
        except MalformedDump:
            raise
        except DAMAGE as error:
            raise MalformedDump(f"{self.path}: {name} is no JSON ({line_of(error)}); record again") from None
        if not isinstance(value, dict):
            raise MalformedDump(f"{self.path}: {name} is a JSON {type(value).__name__}, wanted an object")
        return value

    def array(self, name: str, spool_folder: Path) -> "Spooled":
        """The array's data, unpacked once."""
        header = self.header(name)
        size_bytes = header.size_bytes
        declared = self._archive.getinfo(f"{name}.npy").file_size
        if size_bytes > declared:
            raise MalformedDump(
                f"{self.path}: {name} is shaped {list(header.shape)} ({size_bytes} bytes), but holds at most "
                f"{declared}; copy the dump again"
            )
        memory = spool(size_bytes, spool_folder)
        chunk_bytes, done = 8 * 1024 * 1024, 0
        try:
            with self._archive.open(f"{name}.npy") as file:
                _npy_header(file)
                while chunk := file.read(min(chunk_bytes, size_bytes - done + 1)):
                    if done + len(chunk) > size_bytes:
                        raise MalformedDump(f"{self.path}: {name} holds more data than its header says; record again")
                    memory[done : done + len(chunk)] = chunk
                    done += len(chunk)
                    if size_bytes > IN_MEMORY_BYTES:
                        # Written pages of a shared mapping count as memory of the process until they are let go.
                        memory.madvise(mmap.MADV_DONTNEED)
        except MalformedDump:
            raise
        except DAMAGE as error:
            raise MalformedDump(f"{self.path}: {name} is truncated or damaged ({error}); copy the dump again") from None
        if done != size_bytes:
            raise MalformedDump(f"{self.path}: {name} ends after {done} of {size_bytes} bytes; copy the dump again")
        return Spooled(memory, header)


@dataclass(frozen=True)
class Spooled:
    """An array in memory of its own or in an unnamed file."""

    memory: mmap.mmap
    header: Header

    @property
    def values(self) -> npt.NDArray[Any]:
        """A view of the whole array; of bfloat16 its bits."""
        flat = np.frombuffer(self.memory, dtype=self.header.dtype, count=prod(self.header.shape))
        return flat.reshape(self.header.shape, order="F" if self.header.is_fortran else "C")

    def let_go(self) -> None:
        """Gives back the memory of pages that were looked at; they are read again when needed."""
        if self.header.size_bytes > IN_MEMORY_BYTES:
            self.memory.madvise(mmap.MADV_DONTNEED)


def spool(size_bytes: int, folder: Path) -> mmap.mmap:
    """Writable memory of that many bytes, in an unnamed file of the folder where it is large.

    Raises:
        OSError: the disk is full.
    """
    if size_bytes <= IN_MEMORY_BYTES:
        return mmap.mmap(-1, max(size_bytes, 1))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        # Reserved, not truncated: a full disk is an error here, and a SIGBUS on a hole of a mapping.
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)


class Safetensors:
    """The tensors of a safetensors file by name, and its metadata.

    Raises:
        MalformedDump: the header is no JSON of tensors that lie inside the file, one after the other.
    """

    def __init__(self, dump: DumpFile) -> None:
        self.path = dump.path
        file = dump.raw
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise MalformedDump(
                f"{dump.path}: a safetensors header of {length} bytes in a file of {size}; copy the dump again"
            )
        self._data_offset = 8 + length
        self._file = file
        try:
            fields = json.loads(file.read(length))
            said = fields.pop("__metadata__", {})
            self.metadata: Mapping[str, str] = {str(key): str(value) for key, value in said.items()}
            self.headers = {str(name): self._header(field) for name, field in fields.items()}
            self._offsets = {str(name): int(field["data_offsets"][0]) for name, field in fields.items()}
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise MalformedDump(f"{dump.path}: no readable safetensors header ({line_of(error)})") from None
        for name, header in self.headers.items():
            begin = self._offsets[name]
            if begin < 0 or self._data_offset + begin + header.size_bytes > size:
                raise MalformedDump(
                    f"{dump.path}: tensor {name!r:.80} ends beyond the file: truncated; copy the dump again"
                )
        self._refuse_holes(size - self._data_offset)

    def _refuse_holes(self, data_bytes: int) -> None:
        """Tensors lie one after the other and fill the file, as the format has it; else one holds another's bytes."""
        end, before = 0, "the header"
        for name in sorted(self.headers, key=lambda name: (self._offsets[name], self.headers[name].size_bytes)):
            begin = self._offsets[name]
            if begin != end:
                what = "overlaps" if begin < end else "leaves a gap behind"
                raise MalformedDump(
                    f"{self.path}: tensor {name!r:.80} begins at byte {begin} of the data and {what} {before!r:.80}, "
                    f"which ends at {end}; wanted one after the other: the header is damaged, save again"
                )
            end, before = begin + self.headers[name].size_bytes, name
        if end != data_bytes:
            raise MalformedDump(
                f"{self.path}: {data_bytes} bytes of data, but the header's tensors end at {end}; wanted no more: "
                "is a tensor missing from the header? save again"
            )

    @staticmethod
    def _header(field: dict[str, Any]) -> Header:
        shape = tuple(field["shape"])
        if len(shape) > 32 or any(type(length) is not int or not 0 <= length < 2**48 for length in shape):
            raise ValueError(f"a tensor shaped {str(shape)[:80]}")
        if field["dtype"] not in _SAFETENSORS:
            raise ValueError(f"a tensor of type {field['dtype']!r:.40}")
        begin, end = field["data_offsets"]
        header = Header(shape, np.dtype(_SAFETENSORS[field["dtype"]]), is_bf16=field["dtype"] == "BF16")
        if end - begin != header.size_bytes:
            raise ValueError(f"{end - begin} bytes for a tensor of {header.size_bytes}")
        return header

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor as it lies in the file, mapped; of bfloat16 its bits."""
        header = self.headers[name]
        if not header.size_bytes:
            return np.zeros(header.shape, dtype=header.dtype)
        return np.memmap(
            self._file, dtype=header.dtype, mode="r", offset=self._data_offset + self._offsets[name], shape=header.shape
        )


def as_float32(values: npt.NDArray[Any], is_bf16: bool) -> npt.NDArray[np.float32]:
    """Values as float32; `values` holds the bits of bfloat16 where said so."""
    if is_bf16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def line_of(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(_ShortReads(file))
    return shape, fortran, dtype


class _ShortReads:
    """A file for numpy's header readers, which read a header of any length before they find it too long."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= _MAX_NPY_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        data: bytes = self._file.read(size)
        return data
