"""What this machine can do for a replay: each mechanism, counter and read path, why, and what would enable it.

Every answer comes from looking or from a trial that reads one page, which is dropped again if it was not in memory:
nothing is created, locked or set, and nothing needs root.
The state of the machine as a row is in `machine`. `probe` answers in well under a second; `read_bandwidth` reads.
"""

import bisect
import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import importlib.metadata
import mmap
import os
import random
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from replayer import machine
from replayer.boot import boot_limit
from replayer.capacity import MemoryController, NotEnforceable, find_memory_controller
from replayer.counters import (
    PAGE_BYTES,
    cached_pages,
    cachestat,
    drop,
    mincore_pages,
    parse_block_stat,
    parse_flat,
    parse_io,
    parse_pressure,
    read_counter_file,
    residency_counter,
)
from replayer.device import allocate
from replayer.machine import Storage, direct_io_alignment, storage_of
from replayer.nodes import memory_nodes
from replayer.offline import block_bytes, check_machine, removable_blocks
from replayer.quantities import format_bytes

MAX_BANDWIDTH_BYTES = 2 << 30
"""Most that `read_bandwidth` reads."""

BANDWIDTH_SECONDS = 2.5
"""No read is started later than this."""

_MAX_BUFFER_BYTES = 1 << 30
_MAX_FILES_LOOKED_AT = 2000
_MAX_FILES_READ = 500
"""Below the usual limit of 1,024 descriptors."""
_IO_URING_SETUP_SYSCALL = 425
_IO_URING_PARAMS_BYTES = 120
_RWF_DONTCACHE = 0x80
_MADV_POPULATE_READ = 22
_CAPABILITIES = {
    "CAP_IPC_LOCK": (14, "locks any amount of memory: the balloon"),
    "CAP_SYS_RESOURCE": (24, "raises limits and lowers oom_score_adj; the replayer needs neither"),
    "CAP_SYS_ADMIN": (21, "mounts, and reads DAMON's state"),
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Capability:
    """One answer: `available` null means unknown; `found` says why, `remedy` what would enable it, null if nothing."""

    group: str
    name: str
    available: bool | None
    found: str
    remedy: str | None = None


class NothingToRead(ValueError):
    """A folder without a file that a bandwidth could be measured on."""


@dataclass(frozen=True)
class Bandwidth:
    """What `read_bandwidth` reached; `method` says how, and whether the reads were cold.

    device_bytes: what the kernel fetched from a device for it (read_bytes of /proc/self/io); less than `read_bytes`
    where memory served a part, null where it is not counted.
    """

    read_bytes: int
    device_bytes: int | None
    elapsed_ns: int
    reads: int
    threads: int
    method: str

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of wall time."""
        return self.read_bytes * 1e9 / self.elapsed_ns


def probe(folder: Path) -> list[Capability]:
    """What a replay of a pool in `folder` could use here; the order is that of the groups.

    Raises:
        OSError: the folder is not there, not readable, or no folder.
    """
    storage = storage_of(folder)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "wanted the folder that a pool lies in, or would lie in", str(folder))
    sample = _largest_file(folder)
    return [
        *_memory_limits(),
        *_counters(storage, sample),
        *_storage(storage),
        *_read_paths(folder, storage, sample),
        *_reclaim(),
        *_privileges(),
        *_devices(),
    ]


def _memory_limits() -> Iterator[Capability]:
    group = "memory limit"
    controller: MemoryController | None = None
    refusal: NotEnforceable | None = None
    try:
        controller = find_memory_controller()
    except NotEnforceable as error:
        refusal = error
    mounts = machine.parse_mounts((read_counter_file("/proc/self/mountinfo") or b"").decode(errors="replace"))
    for version in (2, 1):
        found, remedy = _memory_controller(version, mounts, refusal)
        available = controller is not None and controller.version == version
        if controller is not None and available:
            found, remedy = f"groups can be made below {controller.parent}", None
        yield Capability(group, f"cgroup v{version} memory", available, found, remedy)
    yield _balloon(group)
    size = boot_limit(" ".join(_words("/proc/cmdline")))
    if size is not None:
        yield Capability(group, "boot limit", True, f"booted with {size}; replay with --mechanism boot")
    else:
        found = "the kernel's command line has no mem=, and the replayer boots nothing; a small machine may be one"
        yield Capability(group, "boot limit", False, found, "boot with mem=SIZE, then replay with --mechanism boot")
    yield _memory_offline(group)
    yield from _memory_nodes()


def _memory_controller(
    version: int, mounts: list[machine.Mount], refusal: NotEnforceable | None
) -> tuple[str, str | None]:
    """Why the memory controller of a cgroup version cannot be used, and what would enable it."""
    if version == 2:
        points = [Path(mount.mount_point) for mount in mounts if mount.filesystem == "cgroup2"]
        if points and "memory" not in (controllers := _words(points[0] / "cgroup.controllers")):
            has = ", ".join(controllers) or "none"
            found = f"{points[0]} has no memory controller (it has: {has})"
            return found, "boot with cgroup_no_v1=memory and without cgroup_disable=memory"
    else:
        points = [
            Path(mount.mount_point) for mount in mounts if mount.filesystem == "cgroup" and "memory" in mount.options
        ]
    if refusal is not None and points:
        return refusal.reason, refusal.remedy
    if points:
        return f"mounted at {points[0]}, but the other version holds the memory controller", None
    return "not mounted", refusal.remedy if refusal is not None else None


def _memory_nodes() -> Iterator[Capability]:
    """One answer where the machine has memory without processors, which a replay leaves out."""
    nodes = memory_nodes()
    if nodes.left_out:
        listed = ", ".join(str(node.node_id) for node in nodes.left_out)
        found = f"nodes {listed} have no processors (an accelerator's memory): neither counted nor used"
        yield Capability("memory limit", "accelerator memory", False, found, "replay with --accelerator-memory")


def _balloon(group: str) -> Capability:
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _has_capability("CAP_IPC_LOCK"):
        return Capability(group, "balloon", True, "CAP_IPC_LOCK: any amount of memory can be locked")
    if soft_bytes == resource.RLIM_INFINITY:
        return Capability(group, "balloon", True, "RLIMIT_MEMLOCK is unlimited")
    found = f"RLIMIT_MEMLOCK lets {format_bytes(soft_bytes)} be locked, and CAP_IPC_LOCK is missing"
    return Capability(group, "balloon", False, found, "as root, or after: ulimit -l unlimited")


def _memory_offline(group: str) -> Capability:
    name = "memory offline"
    try:
        check_machine()
    except NotEnforceable as refusal:
        return Capability(group, name, False, refusal.reason, refusal.remedy)
    blocks = removable_blocks(memory_nodes())
    folder = Path("/sys/devices/system/memory")
    found = f"{len(blocks)} blocks of {format_bytes(block_bytes() or 0)} may go and are known to come back"
    if blocks and os.access(folder / blocks[0].name / "state", os.W_OK):
        return Capability(group, name, True, f"{found}; only with --mechanism offline --offline-memory-blocks")
    return Capability(group, name, False, f"{found}, but not by this user", "run as root")


def _counters(storage: Storage, sample: Path | None) -> Iterator[Capability]:
    group = "counters"
    yield _tried(group, "cachestat", _ask_cachestat, "Linux 6.5; until then mincore does")
    yield _tried(group, "mincore", _ask_mincore, None)
    if sample is not None:
        yield _residency(group, sample)
    counted = parse_io(read_counter_file("/proc/self/io")) or {}
    yield _present(group, "/proc/self/io", "read_bytes" in counted, "a kernel with CONFIG_TASK_IO_ACCOUNTING")
    if storage.block_stat_file is None:
        found = f"no single block device is known behind {storage.filesystem}"
        yield Capability(group, "block device", False, found, "put the pool on a file system with a disk of its own")
    else:
        counts = parse_block_stat(read_counter_file(storage.block_stat_file)) is not None
        found = f"{storage.block_stat_file}: every process's reads"
        yield Capability(group, "block device", counts, found)
    yield _group_io(group)
    refaults = "workingset_refault_file" in (parse_flat(read_counter_file("/proc/vmstat")) or {})
    yield _present(group, "/proc/vmstat refaults", refaults, "a kernel since Linux 5.9")
    pressure = parse_pressure(read_counter_file("/proc/pressure/io")) is not None
    yield _present(group, "/proc/pressure", pressure, "boot with psi=1")


def _ask_cachestat(fd: int) -> str:
    cachestat(fd, 0, PAGE_BYTES)
    return "works"


def _ask_mincore(fd: int) -> str:
    mincore_pages(fd, 0, PAGE_BYTES)
    return "works"


def _residency(group: str, sample: Path) -> Capability:
    name = "pages of a file"
    try:
        fd = os.open(sample, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            cached = cached_pages(fd, 0, size)
        finally:
            os.close(fd)
    except OSError as error:
        return Capability(group, name, False, _said(error), "own the pool's files, or let this user write to them")
    found = f"{cached:,} of {-(-size // PAGE_BYTES):,} of {sample} are in memory, says {residency_counter()}"
    return Capability(group, name, True, found)


def _group_io(group: str) -> Capability:
    """Whether the own cgroup counts the device's bytes; the group's folder is looked for under its own path."""
    mounts = machine.parse_mounts((read_counter_file("/proc/self/mountinfo") or b"").decode(errors="replace"))
    memberships = (read_counter_file("/proc/self/cgroup") or b"").decode(errors="replace").splitlines()
    for mount in mounts:
        for membership in memberships:
            _, controllers, path = membership.split(":", 2)
            folder = Path(mount.mount_point) / path.lstrip("/")
            if mount.filesystem == "cgroup2" and controllers == "" and (folder / "io.stat").exists():
                return Capability(group, "cgroup I/O", True, f"{folder}/io.stat")
            rule = folder / "blkio.throttle.read_bps_device"
            if mount.filesystem == "cgroup" and "blkio" in controllers.split(",") and rule.exists():
                found = f"{folder}/blkio.throttle.io_service_bytes counts a device once a throttle rule is set for it"
                if path == "/":
                    found += "; the own group is the root, so it counts everybody"
                return Capability(
                    group, "cgroup I/O", os.access(rule, os.W_OK), found, f"write permission on {rule.name}"
                )
    return Capability(group, "cgroup I/O", False, "no io or blkio controller in the own group", "enable +io or blkio")


def _storage(storage: Storage) -> Iterator[Capability]:
    group = "storage"
    device = ", on ".join(storage.device_stack) or "no device"
    model = f" ({storage.device_model})" if storage.device_model else ""
    found = storage.reason if storage.suitable else f"{storage.filesystem} on {device}: {storage.reason}"
    remedy = None if storage.suitable else "put the pool on a file system of a disk of this machine"
    yield Capability(group, "suitable for a pool", storage.suitable, f"{found}{model}", remedy)
    if storage.read_ahead_bytes is None:
        yield Capability(group, "readahead", None, "the kernel shows none for this file system")
        return
    zero = storage.read_ahead_bytes == 0
    found = format_bytes(storage.read_ahead_bytes)
    if zero:
        found += ": reads under FADV_RANDOM come in single pages"
    yield Capability(group, "readahead", not zero, found, "set read_ahead_kb of the device above 0" if zero else None)


def _read_paths(folder: Path, storage: Storage, sample: Path | None) -> Iterator[Capability]:
    group = "read paths"
    if sample is None:
        found, remedy = f"no readable file in {folder} to try it on", "name a folder that holds a file"
        for name in ("pread with FADV_RANDOM", "O_DIRECT", "RWF_NOWAIT", "RWF_DONTCACHE", "MADV_POPULATE_READ"):
            yield Capability(group, name, None, found, remedy)
    else:
        buffered = _opened_quietly(sample)
        was_absent = _first_page_is_absent(buffered)
        try:
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
            yield _tried(group, "pread with FADV_RANDOM", lambda fd: _read_page(fd, 0), None, buffered)
            yield _direct(group, storage, sample)
            yield _tried(group, "RWF_NOWAIT", lambda fd: _read_page(fd, os.RWF_NOWAIT), "Linux 4.14", buffered)
            yield _tried(group, "RWF_DONTCACHE", lambda fd: _read_page(fd, _RWF_DONTCACHE), "Linux 6.14", buffered)
            yield _tried(group, "MADV_POPULATE_READ", _populate_page, "Linux 5.14", buffered)
        finally:
            if was_absent:
                os.posix_fadvise(buffered, 0, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
            os.close(buffered)
    yield _tried(group, "io_uring", lambda fd: _set_up_io_uring(), "kernel.io_uring_disabled=0, and no seccomp filter")


def _opened_quietly(file: Path, flags: int = 0) -> int:
    """A descriptor whose reads leave the time of last access alone, where that is ours to say."""
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME | flags)
    except PermissionError:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | flags)


def _first_page_is_absent(fd: int) -> bool:
    try:
        return cached_pages(fd, 0, PAGE_BYTES) == 0
    except OSError:
        return False


def _read_page(fd: int, flags: int) -> str:
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            got = os.preadv(fd, [page], 0, flags)
        except BlockingIOError:
            return "works (the first page is not in memory, so nothing was returned)"
    return f"works ({got:,} bytes read)"


def _populate_page(fd: int) -> str:
    with mmap.mmap(fd, min(PAGE_BYTES, os.fstat(fd).st_size), prot=mmap.PROT_READ) as page:
        page.madvise(_MADV_POPULATE_READ)
    return "works"


def _set_up_io_uring() -> str:
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = _libc.syscall(ctypes.c_long(_IO_URING_SETUP_SYSCALL), ctypes.c_long(1), parameters)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(fd)
    return "a ring can be set up; the replayer does not use it"


def _direct(group: str, storage: Storage, sample: Path) -> Capability:
    try:
        alignment = direct_io_alignment(sample)
        fd = _opened_quietly(sample, os.O_DIRECT)
        try:
            with mmap.mmap(-1, max(alignment or 0, PAGE_BYTES)) as block:
                got = os.preadv(fd, [block], 0)
        finally:
            os.close(fd)
    except OSError as error:
        found = f"{storage.filesystem}: {_said(error)}"
        return Capability(group, "O_DIRECT", False, found, "put the pool on a file system with O_DIRECT: ext4, xfs")
    wanted = "to what, the kernel does not say" if alignment is None else f"to {alignment:,} bytes"
    return Capability(
        group, "O_DIRECT", True, f"works ({got:,} bytes read); offset, length and memory aligned {wanted}"
    )


def _reclaim() -> Iterator[Capability]:
    group = "reclaim"
    mglru = machine.mglru_state()
    remedy = {"absent": "a kernel with CONFIG_LRU_GEN", "off": "echo y > /sys/kernel/mm/lru_gen/enabled"}
    yield Capability(group, "MGLRU", _is_on(mglru), mglru, remedy.get(mglru.split()[0]))
    damon = machine.damon_state()
    # Here yes is the worse answer, so what it means is said, and nothing is offered to enable it.
    meaning = "; idle file pages may leave memory although there is room" if damon.startswith("on") else ""
    yield Capability(group, "DAMON", _is_on(damon), damon + meaning)
    row = machine.machine_row(None)
    thp = row["thp"]
    has_huge_pages = thp in ("always", "madvise")
    remedy_of_thp = None if has_huge_pages else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield Capability(group, "transparent huge pages", has_huge_pages, str(thp or "absent"), remedy_of_thp)
    swap = row["swap_bytes"]
    meaning = "; a balloon is locked, but other memory may be swapped out" if swap else ""
    yield Capability(group, "swap", swap > 0, (format_bytes(swap) if swap else "none") + meaning)
    hypervisor = row["virtualization"]
    emulated = None if hypervisor.startswith("unknown") else "tcg" not in hypervisor
    yield Capability(group, "processor not emulated", emulated, hypervisor, "a machine with KVM, or a real one")


def _is_on(state: str) -> bool | None:
    return None if state.startswith("unknown") else state.startswith("on")


def _privileges() -> Iterator[Capability]:
    for name, (_, meaning) in _CAPABILITIES.items():
        held = _has_capability(name)
        remedy = "run as root" if os.geteuid() else "have the container or service that this runs in keep it"
        yield Capability("privileges", name, held, meaning, None if held else remedy)


def _has_capability(name: str) -> bool:
    # Inside a user namespace capabilities count only for what belongs to it, which memory and limits do not.
    if _words("/proc/self/uid_map")[:3] not in ([], ["0", "0", "4294967295"]):
        return False
    bit, _ = _CAPABILITIES[name]
    for line in (read_counter_file("/proc/self/status") or b"").splitlines():
        if line.startswith(b"CapEff:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def _devices() -> Iterator[Capability]:
    group = "devices"
    try:
        # Asking for the version does not import it, which takes seconds.
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Capability(group, "torch", False, "not installed", "pip install torch, or replay with --device none")
    else:
        yield Capability(group, "torch", True, version)
    node = next((path for path in (Path("/dev/nvidia0"), Path("/dev/dxg")) if path.exists()), None)
    if node is None:
        yield Capability(group, "CUDA", False, "no /dev/nvidia0", "a machine with an NVIDIA GPU and its driver")
        return
    usable = os.access(node, os.R_OK | os.W_OK)
    found = f"{node} is there; torch is asked when a replay starts" if usable else f"{node}: no permission"
    yield Capability(group, "CUDA", usable, found, None if usable else f"read and write permission on {node}")


def _tried(group: str, name: str, trial: Callable[[int], str], remedy: str | None, fd: int | None = None) -> Capability:
    """What a trial on `fd` says; without one it gets an empty file in memory."""
    own = os.memfd_create("probe-trial") if fd is None else None
    try:
        return Capability(group, name, True, trial(own if fd is None else fd))  # type: ignore[arg-type]
    except OSError as error:
        return Capability(group, name, False, _said(error), remedy)
    finally:
        if own is not None:
            os.close(own)


def _present(group: str, name: str, available: bool, remedy: str) -> Capability:
    return Capability(
        group, name, available, "readable" if available else "absent or closed", None if available else remedy
    )


def _said(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error} ({code})" if code else str(error)


def _words(file: str | Path) -> list[str]:
    return (read_counter_file(file) or b"").decode(errors="replace").split()


def _largest_file(folder: Path) -> Path | None:
    """The largest file of ours to read among the first in a folder and below it."""
    best: tuple[int, Path] | None = None
    for file in _files(folder):
        size = file.stat().st_size
        if size > (best[0] if best else 0) and os.access(file, os.R_OK):
            best = (size, file)
    return best[1] if best else None


def _files(folder: Path) -> Iterator[Path]:
    """Regular files below a folder in the order of their names, links and other mounts left out, up to a limit."""
    seen = 0
    device = folder.stat().st_dev
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = Path(parent) / name
            try:
                status = file.lstat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_dev == device:
                yield file
            seen += 1
            if seen == _MAX_FILES_LOOKED_AT:
                return


def read_bandwidth(folder: Path, expert_bytes: int, threads: int = 8) -> Bandwidth:
    """Reads extents of one expert's size from the files in a folder, each at most once, in random order.

    By O_DIRECT where the file system takes it; else buffered, after dropping those files' own pages, which are dropped
    again afterwards. At most MAX_BANDWIDTH_BYTES are read, and no read is started after BANDWIDTH_SECONDS. A cache
    behind the device (of a host, of a controller) is not seen, nor is what others read meanwhile.

    Raises:
        NothingToRead: no file holds an expert, or one is sparse, so that its holes are read from nowhere.
        OSError: a file cannot be read, or is shorter than it was; the pool is being built or replayed.
    """
    if not 0 < expert_bytes <= _MAX_BUFFER_BYTES:
        raise NothingToRead(f"experts of {expert_bytes:,} bytes; wanted 1 to {_MAX_BUFFER_BYTES:,}")
    storage = storage_of(folder)
    step_bytes = -(-expert_bytes // PAGE_BYTES) * PAGE_BYTES
    extents = _extents(folder, expert_bytes, max(MAX_BANDWIDTH_BYTES // step_bytes, 1))
    threads = max(min(threads, len(extents), _MAX_BUFFER_BYTES // step_bytes), 1)
    files = sorted({file for file, _ in extents})
    direct = _takes_direct(files[0])
    with contextlib.ExitStack() as stack:
        stack.enter_context(_undisturbed(folder))
        opened: dict[Path, int] = {}
        for file in files:
            opened[file] = _opened_quietly(file, os.O_DIRECT if direct else 0)
            stack.callback(os.close, opened[file])
        method = "O_DIRECT" if direct else _drop_before(opened, storage)
        before_bytes = _device_bytes()
        reads, elapsed_ns = _read_all(extents, opened, expert_bytes, threads)
        after_bytes = _device_bytes()
        if not direct:
            for fd in opened.values():
                drop(fd)
    device_bytes = None if before_bytes is None or after_bytes is None else after_bytes - before_bytes
    return Bandwidth(reads * expert_bytes, device_bytes, elapsed_ns, reads, threads, method)


@contextlib.contextmanager
def _undisturbed(folder: Path) -> Iterator[None]:
    """Keeps a replay of this pool out while it is read, and stays out of one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK, "somebody builds or replays this pool; wait until it has ended", str(folder)
            ) from None
        yield
    finally:
        os.close(descriptor)


def _device_bytes() -> int | None:
    return (parse_io(read_counter_file("/proc/self/io")) or {}).get("read_bytes")


def _extents(folder: Path, expert_bytes: int, most: int) -> list[tuple[Path, int]]:
    """(file, page-aligned offset) of up to `most` extents without overlap, shuffled in the same way every time."""
    step_bytes = -(-expert_bytes // PAGE_BYTES) * PAGE_BYTES
    fitting: list[tuple[Path, int]] = []
    largest = 0
    for file in _files(folder):
        status = file.stat()
        largest = max(largest, status.st_size)
        if status.st_size < expert_bytes:
            continue
        if status.st_blocks * 512 < status.st_size:
            raise NothingToRead(f"{file}: sparse, so its holes are read from nowhere; wanted the files of a real pool")
        fitting.append((file, (status.st_size - expert_bytes) // step_bytes + 1))
    if not fitting:
        raise NothingToRead(
            f"{folder}: no file holds an expert of {expert_bytes:,} bytes (the largest has {largest:,}); build one "
            "with replayer pool build, or give a smaller --expert-bytes"
        )
    choice = random.Random(0)  # noqa: S311
    fitting = choice.sample(fitting, min(len(fitting), _MAX_FILES_READ))
    ends: list[int] = []
    for _, count in fitting:
        ends.append(count + (ends[-1] if ends else 0))
    extents = []
    for number in choice.sample(range(ends[-1]), min(most, ends[-1])):
        place = bisect.bisect_right(ends, number)
        file, count = fitting[place]
        extents.append((file, (number - ends[place] + count) * step_bytes))
    return extents


def _takes_direct(file: Path) -> bool:
    try:
        fd = _opened_quietly(file, os.O_DIRECT)
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _drop_before(opened: dict[Path, int], storage: Storage) -> str:
    left = 0
    for fd in opened.values():
        drop(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        left += cached_pages(fd, 0, os.fstat(fd).st_size)
    cold = f"{left:,} pages could not be dropped, so it is not cold" if left else "cold"
    return f"buffered with FADV_RANDOM, {cold}; {storage.filesystem} takes no O_DIRECT"


def _read_all(
    extents: list[tuple[Path, int]], opened: dict[Path, int], expert_bytes: int, threads: int
) -> tuple[int, int]:
    """Number of reads that were done, and the wall time of all, buffers already touched."""
    size = -(-expert_bytes // PAGE_BYTES) * PAGE_BYTES
    slots = allocate("none", threads, 1, size).slots
    waiting = list(extents)
    gate = threading.Barrier(threads + 1)
    deadline_ns = 0

    def read(thread: int) -> int:
        slot = slots[thread, 0]
        done = 0
        gate.wait()
        while time.monotonic_ns() < deadline_ns:
            try:
                # Taking from a list is atomic.
                file, begin = waiting.pop()
            except IndexError:
                break
            try:
                got = os.preadv(opened[file], [slot], begin)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror} at {begin:,}", str(file)) from None
            if got < expert_bytes:
                wanted = f"{got:,} bytes at {begin:,} where {expert_bytes:,} were"
                raise OSError(errno.EIO, wanted, str(file))
            done += 1
        return done

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(read, thread) for thread in range(threads)]
        begin_ns = time.monotonic_ns()
        deadline_ns = begin_ns + int(BANDWIDTH_SECONDS * 1e9)
        gate.wait()
        reads = sum(one.result() for one in running)
        elapsed_ns = time.monotonic_ns() - begin_ns
    return reads, elapsed_ns
