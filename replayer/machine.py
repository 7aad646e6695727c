"""What a machine is while a run is measured: kernel, memory, and the storage behind a folder.

Reads /proc and /sys, changes nothing. What of it a run may rely on is decided in `proofs`; what the machine could do
besides is told by `probe`.
"""

import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayer.counters import parse_meminfo, read_counter_file

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_OVERLAY = frozenset({"overlay", "overlayfs", "aufs", "unionfs"})
_COMPRESSED = frozenset({"zfs", "squashfs", "erofs", "bcachefs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "gpfs", "afs", "beegfs", "glusterfs"}
)
_VIRTUAL = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "devpts", "bpf", "securityfs", "configfs"}
)
_DISK = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "reiserfs", "vfat", "exfat", "ntfs3", "nilfs2"}
)

_REASONS = {
    "memory": "it lies in memory, so reads never reach a device",
    "overlay": "an overlay may serve pages of another file, and copies it when written",
    "compressed": "it may store bytes compressed, so device bytes are not the bytes read",
    "network": "reads go over a network or through a server, and are not counted as device bytes",
    "virtual": "it holds no data",
    "unknown": "it is not known to this program, so it is not known what its reads cost",
}


@dataclass(frozen=True)
class Storage:
    """The file system of a folder and the block device behind it; what cannot be read is null.

    kind: disk, memory, overlay, compressed, network, virtual or unknown; suitable: whether device bytes can be counted
    there, and `reason` why not (empty where they can). block_stat_file counts what the device has read for everybody.
    """

    filesystem: str
    mount_options: str | None
    kind: str
    suitable: bool
    reason: str
    device: str | None = None
    device_number: str | None = None
    device_model: str | None = None
    read_ahead_bytes: int | None = None
    io_scheduler: str | None = None
    rotational: bool | None = None
    max_io_bytes: int | None = None
    logical_block_bytes: int | None = None
    block_stat_file: Path | None = None


@dataclass(frozen=True)
class _Mount:
    number: str
    point: Path
    filesystem: str
    source: str
    options: str


def storage_of(path: Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Storage:
    """The storage behind `path`, which must exist.

    Raises:
        OSError: `path` does not exist.
    """
    resolved = path.resolve(strict=True)
    mount = _mount_of(resolved, proc)
    if mount is None:
        return Storage("unknown", None, "unknown", suitable=False, reason=_REASONS["unknown"])
    kind = _kind_of(mount)
    device = _block_device(resolved, mount, sys)
    plain = {
        "filesystem": mount.filesystem,
        "mount_options": mount.options,
        "kind": kind,
        "suitable": kind == "disk",
        "reason": _REASONS.get(kind, ""),
    }
    if device is None:
        return Storage(**plain)
    queue = _queue_of(device)
    scheduler = re.search(r"\[([^]]+)]", _text(queue / "scheduler") or "")
    rotational = _number(queue / "rotational")
    read_ahead, max_io = _number(queue / "read_ahead_kb"), _number(queue / "max_sectors_kb")
    stat = device / "stat"
    return Storage(
        **plain,
        device=device.resolve().name,
        device_number=_text(device / "dev"),
        device_model=_text(queue.parent / "device" / "model"),
        read_ahead_bytes=None if read_ahead is None else read_ahead * 1024,
        io_scheduler=scheduler.group(1) if scheduler else _text(queue / "scheduler"),
        rotational=None if rotational is None else rotational == 1,
        max_io_bytes=None if max_io is None else max_io * 1024,
        logical_block_bytes=_number(queue / "logical_block_size"),
        block_stat_file=stat if stat.exists() else None,
    )


def _mount_of(path: Path, proc: Path) -> _Mount | None:
    """The mount that `path` lies in: the deepest mount point above it, the last one mounted there."""
    found = None
    for line in (_text(proc / "self" / "mountinfo") or "").splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        point = Path(_unescaped(fields[4]))
        if (path == point or point in path.parents) and (found is None or len(point.parts) >= len(found.point.parts)):
            options = ",".join(dict.fromkeys([*fields[5].split(","), *rest[2].split(",")]))
            found = _Mount(fields[2], point, rest[0], _unescaped(rest[1]), options)
    return found


def _kind_of(mount: _Mount) -> str:
    name = mount.filesystem
    if name == "btrfs" and re.search(r"\bcompress(-force)?(=(?!no\b)|,|$)", mount.options):
        return "compressed"
    if name.startswith("fuse"):
        # fuseblk is a driver of a local disk in a process of its own; it is slower, and its reads are that process's.
        return "network"
    for kind, names in (
        ("memory", _MEMORY),
        ("overlay", _OVERLAY),
        ("compressed", _COMPRESSED),
        ("network", _NETWORK),
        ("virtual", _VIRTUAL),
        ("disk", _DISK),
    ):
        if name in names:
            return kind
    return "unknown"


def _block_device(path: Path, mount: _Mount, sys: Path) -> Path | None:
    """Folder of the block device in /sys; btrfs shows an anonymous number, but names the device it was mounted from."""
    candidates = [mount.number]
    try:
        number = path.stat().st_dev
        candidates.append(f"{os.major(number)}:{os.minor(number)}")
    except OSError:
        pass
    for candidate in candidates:
        folder = sys / "dev" / "block" / candidate
        if folder.exists():
            return folder
    named = sys / "class" / "block" / Path(mount.source).name
    return named if mount.source.startswith("/dev/") and named.exists() else None


def _queue_of(device: Path) -> Path:
    """A partition has its disk's queue."""
    own = device / "queue"
    return own if own.exists() else device.resolve().parent / "queue"


def machine_row(storage: Storage | None, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> dict[str, Any]:
    """One row of the table `machine`; two calls are equal as long as nothing that it tells of changed."""
    meminfo = parse_meminfo(read_counter_file(proc / "meminfo")) or {}
    thp = re.search(r"\[(\w+)]", _text(sys / "kernel/mm/transparent_hugepage/enabled") or "")
    min_free_kb = _number(proc / "sys/vm/min_free_kbytes")
    row: dict[str, Any] = {
        "architecture": platform.machine(),
        "cpu_model": _cpu_model(proc),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": meminfo.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "kernel_release": platform.release(),
        "swap_bytes": meminfo.get("SwapTotal", 0),
        "mglru": mglru_state(sys),
        "thp": thp.group(1) if thp else None,
        "min_free_bytes": None if min_free_kb is None else min_free_kb * 1024,
        "swappiness": _number(proc / "sys/vm/swappiness"),
        "damon": damon_state(sys),
        "virtualization": virtualization(proc, sys),
        "numa_nodes": len(list((sys / "devices/system/node").glob("node[0-9]*"))) or None,
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


def mglru_state(sys: Path = Path("/sys")) -> str:
    """`absent` from the kernel, `off 0x0000`, or `on` with its bits; never off where it is absent."""
    file = sys / "kernel/mm/lru_gen/enabled"
    if not file.exists():
        return "absent"
    text = _text(file)
    if text is None:
        return "unknown: not readable"
    return f"{'on' if int(text, 16) & 1 else 'off'} {text}"


def damon_state(sys: Path = Path("/sys")) -> str:
    """`absent`, `off`, or `on` with the actions of its schemes: `on: pageout` takes idle pages away."""
    folder = sys / "kernel/mm/damon/admin/kdamonds"
    if not folder.exists():
        return "absent"
    actions = set()
    unreadable = False
    for kdamond in sorted(folder.glob("[0-9]*")):
        state = _text(kdamond / "state")
        unreadable |= state is None
        if state == "on":
            actions |= {_text(file) or "unknown" for file in kdamond.glob("contexts/*/schemes/*/action")} or {
                "no action"
            }
    if actions:
        return f"on: {', '.join(sorted(actions))}"
    return "unknown: not readable" if unreadable else "off"


def virtualization(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> str:
    """Hypervisor or emulator as far as it shows: tcg, kvm, xen, firecracker …, or none."""
    cpuinfo = _text(proc / "cpuinfo") or ""
    product = " ".join(filter(None, (_text(sys / "class/dmi/id/sys_vendor"), _text(sys / "class/dmi/id/product_name"))))
    if "QEMU Virtual CPU" in cpuinfo or "TCG" in cpuinfo:
        return "qemu tcg"
    hypervisor = _text(sys / "hypervisor/type")
    if hypervisor:
        return hypervisor
    for name in ("Firecracker", "KVM", "QEMU", "VMware", "VirtualBox", "Xen", "Microsoft", "Google", "Amazon"):
        if name.lower() in product.lower():
            return name.lower()
    command_line = _text(proc / "cmdline") or ""
    if "virtio_mmio.device" in command_line or "pci=off" in command_line:
        return "firecracker or another micro virtual machine"
    return "virtual machine" if re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo, re.MULTILINE) else "none"


def _cpu_model(proc: Path) -> str | None:
    """x86 names a model; Arm gives numbers for implementer and part."""
    text = _text(proc / "cpuinfo") or ""
    fields = dict(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    if "model name" in fields:
        return fields["model name"]
    parts = [f"{name} {fields[name]}" for name in ("CPU implementer", "CPU part") if name in fields]
    return ", ".join(parts) or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _unescaped(field: str) -> str:
    """mountinfo writes blanks and the like as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
