"""What a run is measured on: the storage behind a path, and the state of the machine as one row of table `machine`.

Everything is read from /proc and /sys, nothing is changed and nothing needs root; what a plain user may not read comes
out as `unknown: reason`, so the row of root and that of a plain user may differ. Counters are in `counters`; what the
machine could do for a replay is asked in `probe`. Paths are taken below `root`, so that a test can bring its own.
"""

import ctypes
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from replayer.counters import PAGE_BYTES, parse_meminfo, parse_single_number, read_counter_file

StorageKind = Literal["disk", "memory", "overlay", "compressed", "network", "virtual", "unknown"]

_ROOT = Path("/")
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000

_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_OVERLAY_FILESYSTEMS = frozenset({"overlay", "overlayfs", "aufs", "unionfs", "ecryptfs", "fuse.fuse-overlayfs"})
_COMPRESSED_FILESYSTEMS = frozenset({"squashfs", "erofs", "cramfs", "zfs"})
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "afs", "lustre", "gpfs", "beegfs", "orangefs", "fuseblk"}
)
_KERNEL_FILESYSTEMS = frozenset(
    {
        "proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "bpf", "mqueue",
        "pstore", "binfmt_misc", "autofs", "efivarfs", "fusectl", "nsfs", "rpc_pipefs", "selinuxfs",
    }
)  # fmt: skip

# Names of block devices that are no disk, by their letters.
_NO_DISKS: dict[str, tuple[StorageKind, str]] = {
    "loop": ("virtual", "a loop device: its file is cached a second time, below"),
    "zram": ("memory", "compressed memory"),
    "ram": ("memory", "memory"),
    "nbd": ("network", "a network block device"),
    "rbd": ("network", "a network block device"),
    "drbd": ("network", "a disk mirrored over a network"),
}

# sys_vendor of DMI; a machine of QEMU is told apart further.
_HYPERVISORS = {
    "Amazon EC2": "kvm",
    "Google": "kvm",
    "Microsoft Corporation": "hyperv",
    "VMware, Inc.": "vmware",
    "Xen": "xen",
    "innotek GmbH": "virtualbox",
    "Parallels Software International Inc.": "parallels",
}


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo (proc_pid_mountinfo(5)), with blanks in paths decoded."""

    mount_id: int
    device_number: str
    mount_point: str
    filesystem: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Storage:
    """What holds a path: its file system and the block device below it, as far as the kernel shows it.

    device: the block device that the file system is on (a partition, a mapped device), or null; device_stack: that
    device and all below it. Queue values are those of the whole device. `suitable` is whether a replay's counts of
    device bytes mean a disk of this machine; `reason` says why or why not. block_stat_file counts what the device has
    read for everybody.
    """

    filesystem: str
    mount_options: str
    kind: StorageKind
    suitable: bool
    reason: str
    device: str | None = None
    device_number: str | None = None
    device_stack: tuple[str, ...] = ()
    device_model: str | None = None
    read_ahead_bytes: int | None = None
    io_scheduler: str | None = None
    rotational: bool | None = None
    max_io_bytes: int | None = None
    logical_block_bytes: int | None = None
    block_stat_file: Path | None = None


def storage_of(path: Path) -> Storage:
    """The storage behind an existing path.

    Raises:
        OSError: the path is not there or not reachable, or the kernel does not tell its mount.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        # The kernel's own answer: right under bind mounts, mounts on mounts and links, where prefixes are not.
        fdinfo = Path(f"/proc/self/fdinfo/{fd}").read_text()
    finally:
        os.close(fd)
    found = re.search(r"^mnt_id:\s*(\d+)$", fdinfo, re.MULTILINE)
    for mount in parse_mounts(Path("/proc/self/mountinfo").read_text(errors="surrogateescape")):
        if found and mount.mount_id == int(found[1]):
            return describe_mount(mount)
    raise OSError(f"{path}: its mount is not in /proc/self/mountinfo; run where /proc shows the own mounts")


def direct_io_alignment(path: Path) -> int | None:
    """What O_DIRECT asks of offset, length and memory for a file, in bytes; null where the file system refuses it.

    statx(2) says it of a file (Linux 6.1; not every file system answers); else, and for a folder, it is the logical
    block of the device, and null without a device. Where it is too small, reads fail or are served by the page cache.

    Raises:
        OSError: the path is not there or not reachable.
    """
    # struct statx: stx_mask first, stx_dio_mem_align and stx_dio_offset_align at 152.
    found = ctypes.create_string_buffer(256)
    ask = getattr(ctypes.CDLL(None), "statx", None)
    if ask is not None and ask(_AT_FDCWD, os.fsencode(path), 0, ctypes.c_uint(_STATX_DIOALIGN), found) == 0:
        (mask,) = struct.unpack_from("=I", found, 0)
        memory_alignment, offset_alignment = struct.unpack_from("=II", found, 152)
        if mask & _STATX_DIOALIGN:
            return max(memory_alignment, offset_alignment) if offset_alignment else None
    storage = storage_of(path)
    block = storage.logical_block_bytes
    # btrfs aligns by its own sectors, and serves smaller reads from the page cache.
    return max(block, os.statvfs(path).f_bsize) if block and storage.filesystem == "btrfs" else block


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The mounts of a mountinfo file, in its order."""
    found = []
    for line in mountinfo.split("\n"):
        before, dash, after = line.partition(" - ")
        words, rest = before.split(" "), after.split(" ")
        if not dash or len(words) < 6 or len(rest) < 2 or not words[0].isdigit():
            continue
        # The mount's options first, then the file system's, each once.
        options = dict.fromkeys([*words[5].split(","), *(rest[2].split(",") if len(rest) > 2 else [])])
        found.append(
            Mount(
                mount_id=int(words[0]),
                device_number=words[2],
                mount_point=_unescaped(words[4]),
                filesystem=rest[0],
                source=_unescaped(rest[1]),
                options=tuple(options),
            )
        )
    return found


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def describe_mount(mount: Mount, root: Path = _ROOT) -> Storage:
    """The storage that a mount stands for."""
    options = ",".join(mount.options)
    unsuitable = _unsuitable_filesystem(mount)
    number = _block_number(mount)
    folder = root / "sys/dev/block" / number if number else None
    if folder is None or not folder.is_dir():
        kind, reason = unsuitable or ("unknown", f"no block device is known behind {mount.source}")
        read_ahead_bytes = _kilobytes(root / "sys/class/bdi" / mount.device_number / "read_ahead_kb")
        return Storage(mount.filesystem, options, kind, False, reason, read_ahead_bytes=read_ahead_bytes)
    folder = folder.resolve()
    members = _btrfs_members(folder, root) if mount.filesystem == "btrfs" else [folder]
    stack = list(dict.fromkeys(lower for member in members for lower in _stack(member)))
    queue = (folder.parent if (folder / "partition").exists() else folder) / "queue"
    kind, reason = unsuitable or _kind_of_devices(stack) or ("disk", f"{mount.filesystem} on {folder.name}")
    rotational = parse_single_number(read_counter_file(queue / "rotational"))
    return Storage(
        mount.filesystem,
        options,
        kind,
        kind == "disk",
        reason,
        device=folder.name,
        device_number=number,
        device_stack=tuple(lower.name for lower in stack),
        device_model=_model(stack),
        read_ahead_bytes=_read_ahead_bytes(mount, folder, queue, root),
        io_scheduler=_chosen(queue / "scheduler"),
        rotational=None if rotational is None else rotational != 0,
        max_io_bytes=_kilobytes(queue / "max_sectors_kb"),
        logical_block_bytes=parse_single_number(read_counter_file(queue / "logical_block_size")),
        # One of several devices would count only its share.
        block_stat_file=folder / "stat" if len(members) == 1 else None,
    )


def _unsuitable_filesystem(mount: Mount) -> tuple[StorageKind, str] | None:
    name = mount.filesystem
    if name in _MEMORY_FILESYSTEMS:
        return "memory", "its files are memory, so no read reaches a device"
    if name in _OVERLAY_FILESYSTEMS:
        return "overlay", "files lie in another file system below, where the pages are cached"
    if name in _COMPRESSED_FILESYSTEMS:
        return "compressed", "it may store fewer bytes than a file has, so device bytes are not file bytes"
    if name in _NETWORK_FILESYSTEMS or name == "fuse" or name.startswith("fuse."):
        return "network", "another machine or program answers the reads, and may cache them"
    if name in _KERNEL_FILESYSTEMS:
        return "virtual", "the kernel makes its files up"
    for option in mount.options:
        key, _, value = option.partition("=")
        if key.startswith("compress") and value not in ("no", "none", "off"):
            return "compressed", f"mounted with {option}, so device bytes are not file bytes"
        if option in ("dax", "dax=always"):
            return "memory", f"mounted with {option}, so reads bypass the page cache"
    return None


def _block_number(mount: Mount) -> str | None:
    """`major:minor` of the device a file system is on; btrfs shows a number of its own, but names the device."""
    if not mount.device_number.startswith("0:"):
        return mount.device_number
    if not mount.source.startswith("/"):
        return None
    try:
        status = Path(mount.source).stat()
    except OSError:
        return None
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" if status.st_rdev else None


def _stack(folder: Path) -> Iterator[Path]:
    """A block device's folder and those of all devices below it: its disk, or what it is mapped to."""
    yield folder
    lower = [folder.parent] if (folder / "partition").exists() else _entries(folder / "slaves")
    for one in lower:
        yield from _stack(one.resolve())


def _btrfs_members(folder: Path, root: Path) -> list[Path]:
    for filesystem in _entries(root / "sys/fs/btrfs"):
        members = [member.resolve() for member in _entries(filesystem / "devices")]
        if folder in members:
            return members
    return [folder]


def _read_ahead_bytes(mount: Mount, folder: Path, queue: Path, root: Path) -> int | None:
    if mount.filesystem != "btrfs":
        return _kilobytes(queue / "read_ahead_kb")
    # btrfs reads ahead by a setting of its own.
    for filesystem in _entries(root / "sys/fs/btrfs"):
        if (filesystem / "devices" / folder.name).exists():
            return _kilobytes(filesystem / "bdi/read_ahead_kb")
    return None


def _kind_of_devices(stack: list[Path]) -> tuple[StorageKind, str] | None:
    for folder in stack:
        found = _NO_DISKS.get(folder.name.rstrip("0123456789"))
        if found is not None:
            backing = _text(folder / "loop/backing_file")
            return found[0], f"{folder.name} is {found[1]}" + (f" ({backing})" if backing else "")
    return None


def _model(stack: list[Path]) -> str | None:
    models = dict.fromkeys(filter(None, (_text(folder / "device/model") for folder in stack)))
    return ", ".join(models) or None


def machine_row(storage: Storage | None, root: Path = _ROOT) -> dict[str, Any]:
    """One row of table `machine`: equal for two calls between which nothing was changed, hence no free memory, no load.

    Its columns of storage repeat `storage` as it was found; ask `storage_of` again to see a change. Missing is null.
    """
    memory = parse_meminfo(read_counter_file(root / "proc/meminfo")) or {}
    uname = os.uname()
    row: dict[str, Any] = {
        "architecture": uname.machine,
        "cpu_model": _cpu_model(root),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.get("MemTotal", PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")),
        "page_bytes": PAGE_BYTES,
        "kernel_release": uname.release,
        # A kernel without swap may have no such line.
        "swap_bytes": memory.get("SwapTotal", 0),
        "mglru": mglru_state(root),
        "thp": _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        "min_free_bytes": _kilobytes(root / "proc/sys/vm/min_free_kbytes"),
        "swappiness": parse_single_number(read_counter_file(root / "proc/sys/vm/swappiness")),
        "damon": damon_state(root),
        "virtualization": virtualization(root),
        "numa_nodes": len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None,
        "filesystem": storage.filesystem if storage else None,
        "mount_options": storage.mount_options if storage else None,
        "block_device": storage.device if storage else None,
        "block_device_model": storage.device_model if storage else None,
        "read_ahead_bytes": storage.read_ahead_bytes if storage else None,
        "io_scheduler": storage.io_scheduler if storage else None,
        "rotational": storage.rotational if storage else None,
        "max_io_bytes": storage.max_io_bytes if storage else None,
        "logical_block_bytes": storage.logical_block_bytes if storage else None,
    }
    digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
    return {"machine_id": f"machine-{digest[:12]}", **row}


def mglru_state(root: Path = _ROOT) -> str:
    """The multi-generational LRU: `absent` from the kernel, or `off 0x0000`, `on 0x0007` and the like."""
    try:
        bits = int((root / "sys/kernel/mm/lru_gen/enabled").read_text(), 16)
    except FileNotFoundError:
        return _absent(root)
    except (OSError, ValueError) as error:
        return _unknown(error)
    # Bit 0 is the main switch; the others do nothing without it (Documentation/admin-guide/mm/multigen_lru.rst).
    return f"{'on' if bits & 1 else 'off'} 0x{bits:04x}"


def damon_state(root: Path = _ROOT) -> str:
    """DAMON, which may page out idle memory: `absent`, `off`, `on: ACTION, …`, or `unknown: reason`.

    Without root its files are closed, but its kernel threads may be seen: `on: action not readable`.
    """
    admin = root / "sys/kernel/mm/damon/admin/kdamonds"
    modules = [root / "sys/module" / name / "parameters/enabled" for name in ("damon_reclaim", "damon_lru_sort")]
    actions: list[str] = []
    try:
        if not any(file.exists() for file in (admin, *modules)):
            return _absent(root)
        for kdamond in _entries(admin):
            state = kdamond / "state"
            if state.exists() and state.read_text().strip() == "on":
                schemes = [file.read_text().strip() for file in sorted(kdamond.glob("contexts/*/schemes/*/action"))]
                actions += schemes or ["no action"]
        actions += [file.parts[-3] for file in modules if file.exists() and file.read_text().strip() == "Y"]
    except OSError as error:
        return "on: action not readable" if _kernel_thread("kdamond", root) else _unknown(error)
    return f"on: {', '.join(dict.fromkeys(actions))}" if actions else "off"


def _kernel_thread(name: str, root: Path) -> bool:
    return any((_text(file) or "").startswith(name) for file in root.glob("proc/[0-9]*/comm"))


def virtualization(root: Path = _ROOT) -> str:
    """The hypervisor as far as it shows: `kvm`, `firecracker`, `tcg`, `xen`, …, `none` or `unknown: what shows`.

    TCG, QEMU's emulation, has no mark of its own in /proc: a QEMU machine on x86 that does not offer KVM's clock is
    taken for it, so a KVM guest whose clock was switched off is called `tcg` as well. On other architectures only the
    processor that TCG makes up shows it; a QEMU machine with another one is `unknown`.
    """
    cpuinfo = _text(root / "proc/cpuinfo") or ""
    dmi = root / "sys/class/dmi/id"
    vendor, product = _text(dmi / "sys_vendor"), _text(dmi / "product_name") or ""
    x86 = re.search(r"^vendor_id\s*:", cpuinfo, re.MULTILINE) is not None
    # QEMU's processor "max" of aarch64 calls itself implementer 0, part 0x51 ("Q").
    if "TCG" in cpuinfo or re.search(r"^CPU implementer\s*: 0x0+\n(.+\n)*?CPU part\s*: 0x0*51$", cpuinfo, re.MULTILINE):
        return "tcg"
    # The maker of an ACPI table, which only root may read.
    if (read_counter_file(root / "sys/firmware/acpi/tables/DSDT") or b"")[10:16] == b"FIRECK":
        return "firecracker"
    if "kvm-clock" in (_text(root / "sys/devices/system/clocksource/clocksource0/available_clocksource") or ""):
        return "kvm"
    if "QEMU Virtual CPU" in cpuinfo or vendor == "QEMU":
        return "tcg" if x86 else "unknown: a QEMU machine, emulated or not"
    named = _text(root / "sys/hypervisor/type")
    if named:
        return named
    if vendor in _HYPERVISORS and not product.endswith(".metal") and (not x86 or _has_hypervisor_flag(cpuinfo)):
        return _HYPERVISORS[vendor]
    if x86:
        return "unknown: the processor shows a hypervisor" if _has_hypervisor_flag(cpuinfo) else "none"
    if "linux,dummy-virt" in (_text(root / "proc/device-tree/compatible") or ""):
        return "unknown: a virtual machine, emulated or not"
    return "none" if vendor else "unknown: the firmware names no maker"


def _has_hypervisor_flag(cpuinfo: str) -> bool:
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and "hypervisor" in flags[1].split()


def _cpu_model(root: Path) -> str | None:
    """x86 names a model; Arm gives numbers for implementer and part."""
    fields: dict[str, str] = {}
    for line in (_text(root / "proc/cpuinfo") or "").split("\n"):
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if fields.get("model name"):
        return fields["model name"]
    if "CPU part" in fields:
        return f"implementer {fields.get('CPU implementer', 'unnamed')}, part {fields['CPU part']}"
    return _text(root / "proc/device-tree/model")


def _text(file: Path) -> str | None:
    """A file's text without blanks and zeros around it; null where there is none."""
    content = read_counter_file(file)
    return None if content is None else content.decode(errors="replace").strip(" \t\n\0") or None


def _chosen(file: Path) -> str | None:
    """The word in brackets; a file of one word is its own choice."""
    text = _text(file)
    found = re.search(r"\[(.+?)\]", text or "")
    return found[1] if found else text


def _kilobytes(file: Path) -> int | None:
    number = parse_single_number(read_counter_file(file))
    return None if number is None else number * 1024


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _absent(root: Path) -> str:
    """A container may hide /sys, which must not read as a kernel without the thing."""
    return "absent" if (root / "sys/kernel/mm").is_dir() else "unknown: there is no /sys/kernel/mm here"


def _unknown(error: Exception) -> str:
    return f"unknown: {(error.strerror if isinstance(error, OSError) else None) or error}".lower()
