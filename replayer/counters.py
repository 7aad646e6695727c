"""What the kernel counts: pages of a file in memory, and the text of counter files in /proc, /sys and cgroups.

Parsers take raw bytes as `pread` gives them from a long-lived descriptor. Empty bytes (the file has gone, or never was)
give None, an absent line is an absent key, and a last line without its newline was cut off and does not count. Nothing
here decides anything; what the numbers mean for a run is the proofs' business.
"""

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
"""Size of a page here: 4, 16 or 64 KiB."""

CACHESTAT_SYSCALL = 451
"""Number of cachestat(2), Linux 6.5: one number for x86_64, aarch64 and every architecture with the shared table."""

SECTOR_BYTES = 512
"""Unit of the sector counts in block statistics, whatever the device's own block is (Documentation/block/stat.rst)."""

_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")
_MINCORE_RANGE_BYTES = 2**30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class _Range(ctypes.Structure):
    _fields_ = (("offset_bytes", ctypes.c_uint64), ("length_bytes", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


@dataclass(frozen=True)
class PageCounts:
    """What cachestat(2) says of a range of a file, in pages.

    Evicted pages have left memory and left a shadow entry behind; recently evicted ones would count as refaults. The
    kernel forgets shadows under pressure, so both are lower bounds.
    """

    cached_pages: int
    dirty_pages: int
    writeback_pages: int
    evicted_pages: int
    recently_evicted_pages: int


def _raise_errno(number: int, what: str) -> None:
    raise OSError(number, f"{what}: {os.strerror(number)}")


def cachestat(fd: int, offset_bytes: int, length_bytes: int) -> PageCounts:
    """Counts the pages that overlap the range; it brings nothing in and marks nothing as used.

    Raises:
        OSError: ENOSYS before Linux 6.5; EPERM where the file is neither ours nor writable by us.
    """
    if length_bytes <= 0:
        return PageCounts(0, 0, 0, 0, 0)
    wanted = _Range(offset_bytes, length_bytes)
    counts = _Counts()
    status = _libc.syscall(
        ctypes.c_long(CACHESTAT_SYSCALL),
        ctypes.c_long(fd),
        ctypes.byref(wanted),
        ctypes.byref(counts),
        ctypes.c_long(0),
    )
    if status != 0:
        _raise_errno(ctypes.get_errno(), f"cachestat of descriptor {fd} at {offset_bytes:,} + {length_bytes:,} bytes")
    return PageCounts(counts.cached, counts.dirty, counts.writeback, counts.evicted, counts.recently)


def _may_ask_mincore(fd: int) -> bool:
    # Of a file that is neither owned nor writable by the caller, mincore calls every page resident (Linux 5.2).
    if os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def mincore_pages(fd: int, offset_bytes: int, length_bytes: int) -> int:
    """Pages in memory among those that overlap the range, through a mapping that is never touched, so never faults.

    Raises:
        PermissionError: the file is neither ours nor writable by us, so that the kernel would call all of it resident.
        OSError: it cannot be mapped.
    """
    if length_bytes <= 0:
        return 0
    if not _may_ask_mincore(fd):
        raise PermissionError(
            errno.EPERM,
            f"mincore of descriptor {fd}: the file is neither ours nor writable by us, and then the kernel calls every "
            "page resident; own the file, or make it writable",
        )
    cached = 0
    begin = offset_bytes // PAGE_BYTES * PAGE_BYTES
    end = offset_bytes + length_bytes
    while begin < end:
        size = min(end - begin, _MINCORE_RANGE_BYTES)
        pages = -(-size // PAGE_BYTES)
        resident = np.empty(pages, dtype=np.uint8)
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, begin)
        if address == ctypes.c_void_p(-1).value:
            _raise_errno(ctypes.get_errno(), f"mapping descriptor {fd} at {begin:,} + {size:,} bytes")
        try:
            if _libc.mincore(address, size, resident.ctypes.data) != 0:
                _raise_errno(ctypes.get_errno(), f"mincore of descriptor {fd} at {begin:,} + {size:,} bytes")
        finally:
            _libc.munmap(address, size)
        # Only the lowest bit is defined.
        cached += int(np.count_nonzero(resident & 1))
        begin += size
    return cached


@functools.cache
def residency_counter() -> str:
    """`cachestat` where the kernel has it and lets us call it, else `mincore`."""
    trial = os.memfd_create("cachestat-trial")
    try:
        cachestat(trial, 0, PAGE_BYTES)
    except OSError:
        return "mincore"
    finally:
        os.close(trial)
    return "cachestat"


def cached_pages(fd: int, offset_bytes: int, length_bytes: int) -> int:
    """Pages in memory among those that overlap the range of an open file; the range may pass the end of the file.

    The answer is of one moment: reclaim, other readers and writers may change it before the call returns.

    Raises:
        PermissionError: the file is neither ours nor writable by us, where the kernel asks for that.
    """
    if residency_counter() == "cachestat":
        return cachestat(fd, offset_bytes, length_bytes).cached_pages
    return mincore_pages(fd, offset_bytes, length_bytes)


@contextmanager
def _opened(file: int | str | os.PathLike[str]) -> Iterator[int]:
    if isinstance(file, int):
        yield file
        return
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def resident_bytes(files: Iterable[int | str | os.PathLike[str]]) -> int:
    """Bytes of the files (paths or descriptors) that are in memory, in whole pages: a last page in part counts whole.

    Raises:
        OSError: a file cannot be opened or asked about.
    """
    pages = 0
    for file in files:
        with _opened(file) as fd:
            pages += cached_pages(fd, 0, os.fstat(fd).st_size)
    return pages * PAGE_BYTES


def drop(file: int | str | os.PathLike[str]) -> None:
    """Writes a file (path or descriptor, read-only is enough) back and asks the kernel to drop its pages.

    Advice only: pages that someone has mapped stay, and readers may bring pages back at once. Ask `cached_pages` after.

    Raises:
        OSError: the file cannot be opened or written back.
    """
    with _opened(file) as fd:
        # Dirty pages are not dropped; where nothing is dirty this writes nothing.
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_counter_file(path: str | os.PathLike[str]) -> bytes | None:
    """A counter file's text; None where there is none or it may not be read."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def _lines(text: bytes | None) -> list[bytes]:
    """Whole lines, up to the padding of a fixed slot."""
    if not text:
        return []
    return text.split(b"\0", 1)[0].split(b"\n")[:-1]


def _name(word: bytes) -> str:
    return word.decode(errors="replace")


def _number(word: bytes) -> int | None:
    return int(word) if word.isdigit() else None


def parse_flat(text: bytes | None) -> dict[str, int] | None:
    """`name value` lines: /proc/vmstat, memory.stat, memory.events, memory.oom_control. Units as the kernel has them.

    A value that is no number (`max`) leaves its name out.
    """
    found: dict[str, int] = {}
    for line in _lines(text):
        name, _, value = line.partition(b" ")
        number = _number(value.strip())
        if number is not None:
            found[_name(name)] = number
    return found or None


def parse_io(text: bytes | None) -> dict[str, int] | None:
    """/proc/PID/io: `rchar`, `wchar`, `read_bytes`, `write_bytes`, `cancelled_write_bytes` in bytes, `syscr`, `syscw`.

    `read_bytes` counts what the process caused to be fetched from a device, at submission, its readahead included.
    """
    found: dict[str, int] = {}
    for line in _lines(text):
        name, _, value = line.partition(b":")
        number = _number(value.strip())
        if number is not None:
            found[_name(name)] = number
    return found or None


def _kilobytes(text: bytes | None) -> dict[str, int] | None:
    found: dict[str, int] = {}
    for line in _lines(text):
        name, _, value = line.partition(b":")
        words = value.split()
        if len(words) == 2 and words[1] == b"kB" and words[0].isdigit():
            found[_name(name)] = int(words[0]) * 1024
    return found or None


def parse_status(text: bytes | None) -> dict[str, int] | None:
    """The sizes of /proc/PID/status (`VmLck`, `VmSwap`, `RssAnon`, `RssFile`, `RssShmem`, …) in bytes.

    A zombie has none of them: None.
    """
    return _kilobytes(text)


def parse_meminfo(text: bytes | None) -> dict[str, int] | None:
    """The sizes of /proc/meminfo (`MemTotal`, `MemAvailable`, `Mlocked`, …) in bytes; counts of huge pages left out."""
    return _kilobytes(text)


def parse_single_number(text: bytes | None) -> int | None:
    """A file that holds one number; `max` (no limit) is None, as is a missing file."""
    lines = _lines(text)
    return _number(lines[0].strip()) if lines else None


@dataclass(frozen=True)
class ThreadStat:
    """/proc/PID/stat or /proc/PID/task/TID/stat of one process or thread.

    `start_ticks` (since boot) tells a process from a later one with the same id. Times advance by the kernel's tick
    where it accounts by tick.
    """

    pid: int
    name: str
    state: str
    minor_faults: int
    major_faults: int
    user_ns: int
    system_ns: int
    start_ticks: int


def parse_thread_stat(text: bytes | None) -> ThreadStat | None:
    """The one line of a `stat` file; a name may hold blanks and brackets."""
    lines = _lines(text)
    if not lines:
        return None
    # The name may hold newlines as well, so the file is taken as a whole.
    head, _, tail = b"\n".join(lines).rpartition(b") ")
    pid, _, name = head.partition(b" (")
    words = tail.split()
    if len(words) < 20 or not all(
        word.isdigit() for word in (pid, words[7], words[9], words[11], words[12], words[19])
    ):
        return None
    return ThreadStat(
        pid=int(pid),
        name=_name(name),
        state=_name(words[0]),
        minor_faults=int(words[7]),
        major_faults=int(words[9]),
        user_ns=int(words[11]) * _NS_PER_TICK,
        system_ns=int(words[12]) * _NS_PER_TICK,
        start_ticks=int(words[19]),
    )


@dataclass(frozen=True)
class CpuTime:
    """Processor time of the whole machine since boot, summed over processors.

    total = busy + idle (with iowait) + stolen; guests' time is inside busy. Idle time is known to step back a little,
    so differences may be off by a few ticks.
    """

    busy_ns: int
    stolen_ns: int
    total_ns: int


def parse_cpu_stat(text: bytes | None) -> CpuTime | None:
    """The line `cpu` of /proc/stat."""
    for line in _lines(text):
        words = line.split()
        # user nice system idle iowait irq softirq steal; guest and guest_nice are inside user and nice.
        if words[:1] == [b"cpu"] and len(words) >= 9 and all(word.isdigit() for word in words[1:9]):
            ticks = [int(word) for word in words[1:9]]
            stolen = ticks[7]
            busy = sum(ticks) - ticks[3] - ticks[4] - stolen
            return CpuTime(busy * _NS_PER_TICK, stolen * _NS_PER_TICK, sum(ticks) * _NS_PER_TICK)
    return None


@dataclass(frozen=True)
class BlockStat:
    """/sys/block/*/stat: what a device has completed since boot, for every process of the machine."""

    reads: int
    read_bytes: int
    read_ns: int
    writes: int
    written_bytes: int
    in_flight: int
    active_ns: int


def parse_block_stat(text: bytes | None) -> BlockStat | None:
    """The one line of a block device's or partition's `stat`."""
    lines = _lines(text)
    words = lines[0].split() if lines else []
    if len(words) < 11 or not all(word.isdigit() for word in words):
        return None
    reads, _, read_sectors, read_ms, writes, _, written_sectors, _, in_flight, active_ms = map(int, words[:10])
    return BlockStat(
        reads=reads,
        read_bytes=read_sectors * SECTOR_BYTES,
        read_ns=read_ms * 10**6,
        writes=writes,
        written_bytes=written_sectors * SECTOR_BYTES,
        in_flight=in_flight,
        active_ns=active_ms * 10**6,
    )


@dataclass(frozen=True)
class Pressure:
    """Stall time since boot, or since the group was made; null where the kernel has no such line."""

    some_ns: int | None
    full_ns: int | None


def parse_pressure(text: bytes | None) -> Pressure | None:
    """/proc/pressure/{cpu,io,memory} or a cgroup's *.pressure."""
    totals: dict[bytes, int] = {}
    for line in _lines(text):
        words = line.split()
        if words and words[-1].startswith(b"total="):
            number = _number(words[-1].removeprefix(b"total="))
            if number is not None:
                totals[words[0]] = number * 1000
    if not totals:
        return None
    return Pressure(totals.get(b"some"), totals.get(b"full"))


def parse_group_io(text: bytes | None) -> dict[str, int] | None:
    """Bytes read by a cgroup, by device number (`254:0`): io.stat of v2 or blkio.throttle.io_service_bytes of v1.

    v1 lists a device only once a throttle rule was set for it, v2 once the group has used it.
    """
    found: dict[str, int] = {}
    for line in _lines(text):
        device, _, rest = line.partition(b" ")
        words = rest.split()
        number = None
        if len(words) == 2 and words[0] == b"Read":
            number = _number(words[1])
        for word in words:
            if word.startswith(b"rbytes="):
                number = _number(word.removeprefix(b"rbytes="))
        if number is not None:
            found[_name(device)] = number
    return found or None
