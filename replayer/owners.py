"""Who holds the experts' bytes, as far as reading them differs: where an expert comes from, and how files are opened.

All owners are fed by the same loop, buffers and pool; only what is said here differs. Which experts locked memory
holds is decided elsewhere (`replay` for tables, `user_cache` for policies).
"""

import errno
import mmap
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replayer.loop import BUFFERED, DIRECT, MAPPED, RWF_DONTCACHE, UNCACHED

if TYPE_CHECKING:
    # The measuring process opens files only; what reads manifests would weigh on its memory.
    from replayer.pool import Pool

IntArray = npt.NDArray[np.int64]

_SLOT_ALIGNMENT_BYTES = 65536
"""Of a slot and of each extent in it: a multiple of every page size and of what O_DIRECT asks for."""

_HELD_ALIGNMENT_BYTES = 64
"""Of each extent in a locked copy that is not filled by O_DIRECT."""

_OTHER_DESCRIPTORS = 256
"""Counter files, libraries, pipes."""

_OTHER_MAPPINGS = 4096
"""Libraries, buffers, stacks of threads."""

_PATHS = {"buffered": BUFFERED, "direct": DIRECT, "uncached": UNCACHED}
_ALONE = {"page_cache": BUFFERED, "page_cache_mmap": MAPPED, "restream": DIRECT, "uncached": UNCACHED}
"""Owners that get every expert in one way."""

_MISSES = {"arena": "direct", "hybrid": "buffered", "user_cache": "direct", "page_cache_admission": "direct"}
"""How each of the others gets what it does not hold or admit, unless told otherwise."""

_ADVICE = {
    "random": os.POSIX_FADV_RANDOM,
    "willneed": os.POSIX_FADV_RANDOM,
    "sequential": os.POSIX_FADV_SEQUENTIAL,
    "noreuse": os.POSIX_FADV_NOREUSE,
}
_MAP_ADVICE = {"random": mmap.MADV_RANDOM, "willneed": mmap.MADV_RANDOM, "sequential": mmap.MADV_SEQUENTIAL}


class ReadPathRefused(RuntimeError):
    """The file system does not take the way of reading that an owner needs."""


class NotDeliverable(RuntimeError):
    """This machine does not deliver hints so; says why."""


@dataclass(frozen=True)
class ReadPlan:
    """Where bytes come from and what is asked of pread for each extent.

    path: (O,) of `loop.BUFFERED` and the like, DIRECT or BUFFERED for what may be held; held_bytes: (O,) what a locked
    copy takes. All others (X,), see `loop.Extents`.
    """

    path: npt.NDArray[np.uint8]
    held_bytes: IntArray
    offset: IntArray
    length: IntArray
    skip: IntArray
    wanted: IntArray
    slot_offset: IntArray
    held_offset: IntArray
    first_word: IntArray
    slot_bytes: int


def holds_memory(owner: str) -> bool:
    """Whether an owner keeps experts in locked memory."""
    return owner in ("arena", "hybrid", "user_cache")


def has_table(owner: str) -> bool:
    """Whether a table says what an owner holds or admits."""
    return owner in ("arena", "hybrid", "page_cache_admission")


def default_miss_path(owner: str) -> str | None:
    """How an owner reads what it does not hold or admit; null where all is read alike."""
    return _MISSES.get(owner)


def fills_page_cache(owner: str, miss_path: str | None) -> bool:
    """Whether an owner may leave experts in the page cache."""
    return owner in ("page_cache", "page_cache_mmap", "page_cache_admission") or (
        owner in ("arena", "hybrid") and miss_path == "buffered"
    )


def reads_directly(owner: str, miss_path: str | None) -> bool:
    """Whether an owner reads past the page cache, whatever it reads."""
    return owner == "restream" or (holds_memory(owner) and miss_path == "direct")


def paths_of(
    owner: str, miss_path: str | None, num_objects: int, table: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.uint8]:
    """(O,) where each expert comes from unless it is held; `table` (O,) is what page_cache_admission admits."""
    if owner in _ALONE:
        return np.full(num_objects, _ALONE[owner], dtype=np.uint8)
    assert miss_path is not None, "these owners have one"
    paths = np.full(num_objects, _PATHS[miss_path], dtype=np.uint8)
    if owner == "page_cache_admission":
        assert table is not None, "it admits by a table"
        paths[table] = BUFFERED
    return paths


def plan_reads(pool: "Pool", path: npt.NDArray[np.uint8], direct_alignment_bytes: int) -> ReadPlan:
    """Where each extent is read from and to; O_DIRECT widens a read to the alignment the device asks for.

    A slot is the same for every owner: room for the widened reads of the largest expert.
    """
    begin, wanted = pool.extent_offset_bytes, pool.extent_length_bytes
    end, unit = begin + wanted, direct_alignment_bytes
    is_direct = path[pool.extent_object] == DIRECT
    offset = np.where(is_direct, begin // unit * unit, begin)
    length = np.where(is_direct, -(-end // unit) * unit, end) - offset
    room = -(-(wanted + 2 * unit) // _SLOT_ALIGNMENT_BYTES) * _SLOT_ALIGNMENT_BYTES
    step = np.where(is_direct, unit, _HELD_ALIGNMENT_BYTES)
    held = -(-length // step) * step
    first = pool.object_first_extent
    before = _within_object(wanted, first)
    if pool.content is not None and np.any(before % 8):
        raise ValueError("an extent inside an expert starts at a place that is no multiple of 8 bytes")
    return ReadPlan(
        path=path,
        held_bytes=np.add.reduceat(held, first[:-1]),
        offset=offset.astype(np.int64),
        length=length.astype(np.int64),
        skip=(begin - offset).astype(np.int64),
        wanted=wanted.astype(np.int64),
        slot_offset=_within_object(room, first),
        held_offset=_within_object(held, first),
        first_word=before // 8,
        slot_bytes=int(np.add.reduceat(room, first[:-1]).max()),
    )


def _within_object(sizes: IntArray, first: IntArray) -> IntArray:
    """(X,) where each extent begins if those of an object follow one another in so many bytes each."""
    begins = np.cumsum(sizes) - sizes
    within: IntArray = (begins - np.repeat(begins[first[:-1]], np.diff(first))).astype(np.int64)
    return within


@dataclass(frozen=True)
class OpenFiles:
    """Descriptors of the pool's files, −1 where a file is not read so: (F,) through the page cache and past it.

    stay_open: False where there are more files than may be open; then all are −1, and each use opens and closes its
    file. is_mapped: whether all are to be mapped as well.
    """

    buffered: list[int]
    direct: list[int]
    stay_open: bool
    is_mapped: bool

    @property
    def any(self) -> list[int]:
        """(F,) one of each file, to ask for residency."""
        return [first if first >= 0 else second for first, second in zip(self.buffered, self.direct, strict=True)]


def open_files(
    paths: Sequence[Path], ways: npt.NDArray[np.bool_], fadvise: str, uncached: bool, owner: str, *, is_mapped: bool
) -> OpenFiles:
    """One descriptor per file and way it is read, read-only; ways: (F, 2) through the page cache, past it.

    is_mapped: the files are to be mapped, to be read or to ask for residency.

    Raises:
        ReadPathRefused: no O_DIRECT or RWF_DONTCACHE here, or an owner that maps and has more files than may be open.
        OSError: a file cannot be opened.
    """
    refusal = _too_many(int(np.count_nonzero(ways)) + _OTHER_DESCRIPTORS, len(paths) if is_mapped else 0)
    if refusal is not None and owner == "page_cache_mmap":
        raise ReadPathRefused(f"{refusal}; raise that limit, or build the pool with --layout per-layer or stacked")
    if refusal is not None:
        _try_ways(paths, ways, fadvise, uncached, owner)
        nothing = [-1] * len(paths)
        return OpenFiles(nothing, nothing, stay_open=False, is_mapped=False)
    found = OpenFiles([], [], stay_open=True, is_mapped=is_mapped)
    for path, (is_buffered, is_direct) in zip(paths, ways.tolist(), strict=True):
        found.buffered.append(_opened(path, fadvise, owner) if is_buffered else -1)
        found.direct.append(_opened_direct(path, owner) if is_direct else -1)
    if uncached:
        _check_uncached(
            next((place, path) for place, path in zip(found.buffered, paths, strict=True) if place >= 0), owner
        )
    return found


def _try_ways(paths: Sequence[Path], ways: npt.NDArray[np.bool_], fadvise: str, uncached: bool, owner: str) -> None:
    """Opens one file in each way, so that a way that is refused here is known before the run."""
    for path in (paths[place] for place in np.flatnonzero(ways[:, 0])[:1]):
        descriptor = _opened(path, fadvise, owner)
        try:
            if uncached:
                _check_uncached((descriptor, path), owner)
        finally:
            os.close(descriptor)
    for path in (paths[place] for place in np.flatnonzero(ways[:, 1])[:1]):
        os.close(_opened_direct(path, owner))


def _opened(path: Path, fadvise: str, owner: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if fadvise in _ADVICE:
        os.posix_fadvise(descriptor, 0, 0, _ADVICE[fadvise])
    return descriptor


def _opened_direct(path: Path, owner: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ReadPathRefused(
            f"{path}: its file system refuses O_DIRECT, which owner {owner} needs; put the pool on a local disk, or "
            "choose owner page_cache"
        ) from None


def _check_uncached(place: tuple[int, Path], owner: str) -> None:
    descriptor, path = place
    try:
        os.preadv(descriptor, [bytearray(1)], 0, RWF_DONTCACHE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        raise ReadPathRefused(
            f"{path}: kernel or file system refuse RWF_DONTCACHE (Linux 6.14 and ext4, xfs or btrfs have it), which "
            f"owner {owner} was asked to read with; choose owner restream, or --miss-path direct"
        ) from None


def _too_many(descriptors: int, mappings: int) -> str | None:
    """Why so many files cannot be open and mapped at once, null if they can; raises the soft limit where it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < descriptors:
        return f"{descriptors:,} open files needed, at most {hard:,} are allowed here (ulimit -Hn)"
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        most = _OTHER_MAPPINGS + mappings
    if most < _OTHER_MAPPINGS + mappings:
        return f"{mappings:,} mapped files needed, {most:,} mappings are allowed here (vm.max_map_count)"
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    return None


def advice_of(fadvise: str) -> int:
    """POSIX_FADV_… that a file is opened with, −1 for none."""
    return _ADVICE.get(fadvise, -1)


def map_files(descriptors: Sequence[int], sizes: Sequence[int], fadvise: str) -> tuple[list[mmap.mmap], list[int]]:
    """Mappings of whole files, of which no page is touched here, and their addresses."""
    mappings = [
        mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        for descriptor, size in zip(descriptors, sizes, strict=True)
    ]
    if fadvise in _MAP_ADVICE:
        for mapping in mappings:
            mapping.madvise(_MAP_ADVICE[fadvise])
    return mappings, [int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data) for mapping in mappings]


def ways_of(path: npt.NDArray[np.uint8], pool: "Pool", *, mapped: bool) -> npt.NDArray[np.bool_]:
    """(F, 2) whether a file is read through the page cache, and past it; a file of no expert counts as the former.

    mapped: every file is mapped, to ask for residency.
    """
    ways = np.zeros((len(pool.files), 2), dtype=np.bool_)
    for way, chosen in enumerate((path != DIRECT, path == DIRECT)):
        ways[pool.extent_file[chosen[pool.extent_object]], way] = True
    if mapped:
        ways[:, 0] = True
    ways[~ways.any(axis=1), 0] = True
    return ways
