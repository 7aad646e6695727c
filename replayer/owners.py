"""Who holds the experts' bytes, as far as reading them differs: how files are opened, and which bytes are asked for.

All owners are fed by the same loop, buffers and pool; only what is said here differs.
"""

import mmap
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    # The measuring process opens files only; what reads manifests would weigh on its memory.
    from replayer.pool import Pool

_SLOT_ALIGNMENT_BYTES = 65536
"""Of a slot and of each extent in it: a multiple of every page size and of what O_DIRECT asks for."""

_OTHER_DESCRIPTORS = 256
"""Counter files, libraries, pipes."""


class ReadPathRefused(RuntimeError):
    """The file system does not take the way of reading that an owner needs."""


@dataclass(frozen=True)
class ReadPlan:
    """What is asked of pread for each extent. Arrays (X,): see `loop.Extents`."""

    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    skip: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.int64]
    slot_offset: npt.NDArray[np.int64]
    first_word: npt.NDArray[np.int64]
    slot_bytes: int


def reads_directly(owner: str) -> bool:
    """Whether an owner reads past the page cache."""
    return owner == "restream"


def plan_reads(pool: "Pool", owner: str, direct_alignment_bytes: int) -> ReadPlan:
    """Where each extent is read from and to; O_DIRECT widens a read to the alignment the device asks for.

    A slot is the same for every owner: room for the widened reads of the largest expert.
    """
    begin, wanted = pool.extent_offset_bytes, pool.extent_length_bytes
    end = begin + wanted
    offset, length = begin, wanted
    if reads_directly(owner):
        offset = begin // direct_alignment_bytes * direct_alignment_bytes
        length = -(-end // direct_alignment_bytes) * direct_alignment_bytes - offset
    room = -(-(wanted + 2 * direct_alignment_bytes) // _SLOT_ALIGNMENT_BYTES) * _SLOT_ALIGNMENT_BYTES
    first = pool.object_first_extent
    start = np.cumsum(room) - room
    of_object = np.repeat(start[first[:-1]], np.diff(first))
    words = np.cumsum(wanted) - wanted
    before = words - np.repeat(words[first[:-1]], np.diff(first))
    if np.any(before % 8):
        raise ValueError("an extent inside an expert starts at a place that is no multiple of 8 bytes")
    return ReadPlan(
        offset=offset.astype(np.int64),
        length=length.astype(np.int64),
        skip=(begin - offset).astype(np.int64),
        wanted=wanted.astype(np.int64),
        slot_offset=(start - of_object).astype(np.int64),
        first_word=(before // 8).astype(np.int64),
        slot_bytes=int(np.add.reduceat(room, first[:-1]).max()),
    )


def open_files(folder: Path, files: Sequence[str], owner: str, fadvise: str) -> list[int]:
    """One descriptor per file, read-only, as the owner reads it.

    Raises:
        ReadPathRefused: no O_DIRECT here, or too few descriptors. OSError: a file cannot be opened.
    """
    _allow_descriptors(len(files) + _OTHER_DESCRIPTORS)
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if reads_directly(owner) else 0)
    descriptors = []
    for name in files:
        try:
            descriptor = os.open(folder / name, flags)
        except OSError as error:
            if reads_directly(owner) and error.errno == 22:
                raise ReadPathRefused(
                    f"{folder / name}: its file system refuses O_DIRECT, which owner {owner} needs; put the pool on a "
                    "local disk, or choose owner page_cache"
                ) from None
            raise
        if not reads_directly(owner) and fadvise == "random":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        descriptors.append(descriptor)
    return descriptors


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ReadPathRefused(
            f"{wanted:,} open files needed, at most {hard:,} are allowed here (ulimit -Hn); raise the limit, or build "
            "the pool with --layout per-layer or stacked"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def map_files(descriptors: Sequence[int], sizes: Sequence[int]) -> tuple[list[mmap.mmap], list[int]]:
    """Mappings of whole files for mincore, which touches no page of them, and their addresses."""
    mappings = [
        mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        for descriptor, size in zip(descriptors, sizes, strict=True)
    ]
    return mappings, [int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data) for mapping in mappings]
