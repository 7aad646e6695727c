"""npz dumps with `experts` [layers, tokens, k] (layer-major) and an optional `meta` JSON string.

The llama.cpp eval-callback scripts write this: prompt tokens, no phases, no pass boundaries, layers in order without
their numbers. Arrays of objects would need pickle and are refused.
"""

import json
import lzma
import mmap
import os
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    DumpFile,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    is_integer,
)
from schemas.trace import PHASE_CODES

IN_MEMORY_BYTES = 128 * 1024 * 1024
"""Larger arrays are unpacked to an unnamed file, since they are stored layer by layer and needed token by token."""

_MAX_META_BYTES = 1024 * 1024

# What zipfile, its decompressors, numpy's header parser and json raise on damaged content.
_DAMAGE = (
    ValueError, EOFError, OSError, RecursionError, RuntimeError, SyntaxError, NotImplementedError, TypeError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError,
)  # fmt: skip


def parse(dump: DumpFile, spool_folder: Path) -> ParsedDump:
    """Reads header and meta at once, rows as they are asked for.

    Raises:
        MalformedDump: truncated or contradicting itself. RefusedDump: counts, pickles, other arrays.
    """
    try:
        archive = zipfile.ZipFile(dump.raw)
    except _DAMAGE as error:
        raise MalformedDump(f"{dump.path}: a truncated or damaged npz ({error}); copy the dump again") from None
    members = archive.namelist()
    if len(set(members)) != len(members):
        raise MalformedDump(
            f"{dump.path}: an array stands twice in the npz, so which one is meant is unknown; save again"
        )
    if "experts.npy" not in members:
        arrays = ", ".join(name.removesuffix(".npy") for name in members[:5]) or "none"
        raise RefusedDump(
            f"{dump.path}: an npz without `experts` (arrays: {arrays}); wanted integer ids shaped "
            "[layers, tokens, k]. Counts per expert are no trace: record the ids of every token"
        )
    shape, dtype, fortran = _header(archive, "experts.npy", dump.path)
    if len(shape) != 3 or dtype.kind not in "iu":
        raise RefusedDump(
            f"{dump.path}: experts is {dtype} shaped {list(shape)}, wanted integers shaped [layers, tokens, k]; "
            "counts per layer and expert, scores and masks are no trace"
        )
    if any(isinstance(length, bool) or not isinstance(length, int) or length < 0 for length in shape):
        raise MalformedDump(f"{dump.path}: experts is shaped {list(shape)}, wanted whole numbers; copy the dump again")
    layers, _, top_k = shape
    if 0 in shape:
        raise MalformedDump(f"{dump.path}: experts is shaped {list(shape)}, so it holds no route; record again")
    meta = _meta(archive, dump.path) if "meta.npy" in members else {}
    said = {key: _positive(dump.path, meta, key) for key in ("n_moe_layers", "k", "num_experts", "top_k")}
    for key, found in (("n_moe_layers", layers), ("k", top_k)):
        if said[key] not in (None, found):
            raise MalformedDump(
                f"{dump.path}: meta says {key} = {said[key]}, experts is shaped {list(shape)}; wanted "
                "[layers, tokens, k]: is an axis order wrong?"
            )
    source = meta.get("source")
    return ParsedDump(
        format="npz_experts",
        blocks=_blocks(archive, dump, shape, dtype, fortran, spool_folder),
        top_k=top_k,
        model=meta["model"] if isinstance(meta.get("model"), str) else None,
        capture_method=source if isinstance(source, str) else None,
        num_experts=said["num_experts"],
        top_k_model=said["top_k"],
        largest_storable_id=int(np.iinfo(dtype).max),
        layers_are_ordinals=True,
        pass_boundaries="assumed_per_token",
    )


def _positive(path: Path, meta: dict[str, Any], key: str) -> int | None:
    value = meta.get(key)
    if value is not None and not (is_integer(value) and 0 < value < 2**31):
        raise MalformedDump(f"{path}: meta says {key} = {str(value)[:40]!r}, wanted a positive whole number")
    return value


def _header(archive: zipfile.ZipFile, member: str, path: Path) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    try:
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
    except _DAMAGE as error:
        raise MalformedDump(f"{path}: {member} has no readable npy header ({error}); copy the dump again") from None
    if dtype.hasobject:
        raise RefusedDump(
            f"{path}: {member} holds pickled Python objects, which are never loaded; save plain integer arrays"
        )
    return shape, dtype, fortran


def _meta(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    shape, dtype, _ = _header(archive, "meta.npy", path)
    if archive.getinfo("meta.npy").file_size > _MAX_META_BYTES or shape not in ((), (1,)) or dtype.kind not in "US":
        raise MalformedDump(f"{path}: meta is {dtype} shaped {list(shape)}, wanted one JSON string of at most 1 MiB")
    try:
        with archive.open("meta.npy") as file:
            text = str(np.lib.format.read_array(file, allow_pickle=False).reshape(())[()])
        value = json.loads(text)
    except _DAMAGE as error:
        raise MalformedDump(f"{path}: meta is no JSON ({_line_of(error)}); record again") from None
    if not isinstance(value, dict):
        raise MalformedDump(f"{path}: meta is a JSON {type(value).__name__}, wanted an object")
    return value


def _blocks(
    archive: zipfile.ZipFile,
    dump: DumpFile,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    fortran: bool,
    spool_folder: Path,
) -> Iterator[RowBlock]:
    layers, tokens, top_k = shape
    size_bytes = layers * tokens * top_k * dtype.itemsize
    # Before anything of that size is reserved: the header is somebody's word.
    declared = archive.getinfo("experts.npy").file_size
    if size_bytes > declared:
        raise MalformedDump(
            f"{dump.path}: experts is shaped {list(shape)} ({size_bytes} bytes), but holds at most {declared}; "
            "copy the dump again"
        )
    spool_folder.mkdir(parents=True, exist_ok=True)
    # An unnamed file: nothing of it can be left behind.
    with tempfile.TemporaryFile(dir=spool_folder) as spool:
        if size_bytes <= IN_MEMORY_BYTES:
            memory = mmap.mmap(-1, size_bytes)
        else:
            # Reserved, not truncated: a full disk is an error here, and a SIGBUS on a hole of a mapping.
            os.posix_fallocate(spool.fileno(), 0, size_bytes)
            memory = mmap.mmap(spool.fileno(), size_bytes)
        _unpack(archive, dump.path, memory, size_bytes)
        stored = np.frombuffer(memory, dtype=dtype).reshape(shape, order="F" if fortran else "C")
        per_block = max(1, ROWS_PER_BLOCK // layers)
        for begin in range(0, tokens, per_block):
            end = min(begin + per_block, tokens)
            part = stored[:, begin:end].transpose(1, 0, 2)
            if dtype.itemsize >= 4 and (part.min() < -(2**31) or part.max() >= 2**31):
                raise MalformedDump(f"{dump.path}: an id beyond 31 bits among tokens {begin}..{end - 1}; record again")
            ids = np.ascontiguousarray(part, dtype=np.int32)
            if size_bytes > IN_MEMORY_BYTES:
                memory.madvise(mmap.MADV_DONTNEED)
            yield _block(ids.reshape(-1, top_k), begin, end, layers)


def _unpack(archive: zipfile.ZipFile, path: Path, memory: mmap.mmap, size_bytes: int) -> None:
    chunk_bytes = 8 * 1024 * 1024
    try:
        with archive.open("experts.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            read(file)
            done = 0
            while chunk := file.read(min(chunk_bytes, size_bytes - done + 1)):
                if done + len(chunk) > size_bytes:
                    raise MalformedDump(f"{path}: experts holds more data than its header says; record again")
                memory[done : done + len(chunk)] = chunk
                done += len(chunk)
                if size_bytes > IN_MEMORY_BYTES:
                    # Written pages of a shared mapping count as memory of the process until they are let go.
                    memory.madvise(mmap.MADV_DONTNEED)
    except MalformedDump:
        raise
    except _DAMAGE as error:
        raise MalformedDump(f"{path}: experts is truncated or damaged ({error}); copy the dump again") from None
    if done != size_bytes:
        raise MalformedDump(f"{path}: experts ends after {done} of {size_bytes} bytes; copy the dump again")


def _line_of(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _block(ids: npt.NDArray[np.int32], begin: int, end: int, layers: int) -> RowBlock:
    tokens = np.arange(begin, end, dtype=np.int64)
    rows = len(ids)
    return RowBlock(
        step=np.repeat(tokens, layers),
        pass_in_step=np.zeros(rows, dtype=np.int32),
        layer=np.tile(np.arange(layers, dtype=np.int32), len(tokens)),
        request=np.zeros(rows, dtype=np.int64),
        position=np.repeat(tokens, layers),
        phase=np.full(rows, PHASE_CODES["unknown"], dtype=np.int8),
        expert_ids=ids,
    )
