"""The machine: which storage lies behind a path, on made-up mounts and devices too, and its state as one row."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replayer import machine
from replayer.counters import PAGE_BYTES, parse_block_stat, read_counter_file
from replayer.machine import (
    damon_state,
    describe_mount,
    direct_io_alignment,
    machine_row,
    mglru_state,
    parse_mounts,
    storage_of,
    virtualization,
)
from schemas.tables import TABLES
from schemas.validation import validate_table

ROOT = Path(__file__).parents[1]

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:1 / / rw,relatime - ext4 /dev/root rw,discard
40 27 259:2 / /data rw,noatime shared:7 - xfs /dev/nvme0n1p2 rw,attr2,inode64,noquota
41 27 253:0 / /lv rw - ext4 /dev/mapper/vg-lv rw
42 27 7:3 / /image ro - ext4 /dev/loop3 ro
43 27 0:50 / /merged rw - overlay overlay rw,lowerdir=/a:/b,upperdir=/c
44 27 0:51 / /tank rw - zfs tank/pool rw,xattr
45 27 0:52 / /nfs rw - nfs4 host:/export rw,vers=4.2,addr=192.0.2.1
46 27 0:53 / /box rw - 9p share rw,trans=virtio
47 27 0:54 / /ssh rw - fuse.sshfs host: rw
48 27 0:55 / /dev/shm rw - tmpfs tmpfs rw,size=1k
49 27 253:9 / /compressed\040disk rw - f2fs /dev/sdz rw,compress_algorithm=lz4
50 27 259:2 / /pmem rw - ext4 /dev/nvme0n1p2 rw,dax=always
51 27 1:2 / /ramdisk rw - ext4 /dev/ram2 rw
52 27 8:99 / /gone rw - ext4 /dev/gone rw
53 27 0:60 /sub /b1 rw - btrfs BTRFS rw,space_cache=v2,subvol=/sub
54 27 0:61 / /b2 rw - btrfs BTRFS rw,compress=zstd:3
55 27 0:62 / /b3 rw - btrfs BTRFS rw,compress=no
broken line
"""


@pytest.fixture
def root(tmp_path):
    """A root with a disk nvme0n1 of two partitions, a mapped device over one of them, a loop device, and sdb."""
    devices = tmp_path / "sys/devices"
    write(devices / "nvme0n1/queue/read_ahead_kb", "128\n")
    write(devices / "nvme0n1/queue/scheduler", "[none] mq-deadline kyber\n")
    write(devices / "nvme0n1/queue/rotational", "0\n")
    write(devices / "nvme0n1/queue/max_sectors_kb", "1280\n")
    write(devices / "nvme0n1/queue/logical_block_size", "4096\n")
    write(devices / "nvme0n1/device/model", "Fast Disk 3000   \n")
    for number in (1, 2):
        write(devices / f"nvme0n1/nvme0n1p{number}/partition", f"{number}\n")
    write(devices / "dm-0/queue/scheduler", "none\n")
    write(devices / "dm-0/queue/read_ahead_kb", "256\n")
    link(devices / "dm-0/slaves/nvme0n1p1", devices / "nvme0n1/nvme0n1p1")
    write(devices / "loop3/loop/backing_file", "/images/a.img\n")
    write(devices / "ram2/queue/rotational", "0\n")
    write(devices / "sdb/device/model", "Other\n")
    numbers = {"259:2": "nvme0n1/nvme0n1p2", "253:0": "dm-0", "7:3": "loop3", "1:2": "ram2", "8:16": "sdb"}
    for number, device in numbers.items():
        link(tmp_path / "sys/dev/block" / number, devices / device)
    write(tmp_path / "sys/class/bdi/0:52/read_ahead_kb", "15360\n")
    (tmp_path / "sys/kernel/mm").mkdir(parents=True)
    return tmp_path


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def link(place, target):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def described(point, root, mounts=MOUNTS):
    (mount,) = [mount for mount in parse_mounts(mounts) if mount.mount_point == point]
    return describe_mount(mount, root)


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        ("/data", "disk"),
        ("/lv", "disk"),
        ("/image", "virtual"),
        ("/merged", "overlay"),
        ("/tank", "compressed"),
        ("/nfs", "network"),
        ("/box", "network"),
        ("/ssh", "network"),
        ("/dev/shm", "memory"),
        ("/proc", "virtual"),
        ("/compressed disk", "compressed"),
        ("/pmem", "memory"),
        ("/ramdisk", "memory"),
        ("/gone", "unknown"),
    ],
)
def test_only_a_disk_is_suitable_and_each_kind_says_why(root, point, kind):
    storage = described(point, root)
    assert (storage.kind, storage.suitable) == (kind, kind == "disk")
    assert storage.reason


def test_a_partition_has_the_queue_and_model_of_its_disk_and_its_own_counter(root):
    storage = described("/data", root)
    assert (storage.device, storage.device_number) == ("nvme0n1p2", "259:2")
    assert storage.device_stack == ("nvme0n1p2", "nvme0n1")
    assert (storage.device_model, storage.io_scheduler, storage.rotational) == ("Fast Disk 3000", "none", False)
    assert (storage.read_ahead_bytes, storage.max_io_bytes) == (128 * 1024, 1280 * 1024)
    assert storage.logical_block_bytes == 4096
    assert storage.mount_options == "rw,noatime,attr2,inode64,noquota"
    assert storage.block_stat_file == root / "sys/devices/nvme0n1/nvme0n1p2/stat"


def test_a_mapped_device_names_all_that_lies_below(root):
    storage = described("/lv", root)
    assert storage.device_stack == ("dm-0", "nvme0n1p1", "nvme0n1")
    assert (storage.device, storage.device_model, storage.io_scheduler) == ("dm-0", "Fast Disk 3000", "none")
    assert storage.read_ahead_bytes == 256 * 1024
    assert storage.rotational is None
    assert storage.block_stat_file.name == "stat"


def test_a_loop_device_names_its_file(root):
    assert "/images/a.img" in described("/image", root).reason


def test_a_network_mount_has_readahead_but_no_device(root):
    storage = described("/nfs", root)
    assert storage.read_ahead_bytes == 15360 * 1024
    assert (storage.device, storage.block_stat_file, storage.device_stack) == (None, None, ())


@pytest.fixture
def btrfs(root, monkeypatch):
    """Mounts of a btrfs on nvme0n1p2, whose number is none of a device, and what stat says of its source."""
    source = write(root / "dev/nvme0n1p2", "")
    real = Path.stat

    class Device:
        st_rdev = os.makedev(259, 2)

    monkeypatch.setattr(Path, "stat", lambda self, **options: Device() if self == source else real(self, **options))
    devices = root / "sys/devices"
    link(root / "sys/fs/btrfs/uuid/devices/nvme0n1p2", devices / "nvme0n1/nvme0n1p2")
    write(root / "sys/fs/btrfs/uuid/bdi/read_ahead_kb", "4096\n")
    return MOUNTS.replace("BTRFS", str(source))


def test_btrfs_is_found_by_its_source_and_has_a_readahead_of_its_own(root, btrfs):
    storage = described("/b1", root, btrfs)
    assert (storage.kind, storage.device, storage.read_ahead_bytes) == ("disk", "nvme0n1p2", 4096 * 1024)
    assert storage.block_stat_file is not None
    assert described("/b2", root, btrfs).kind == "compressed"
    assert described("/b3", root, btrfs).kind == "disk"


def test_btrfs_on_two_devices_has_no_one_counter(root, btrfs):
    link(root / "sys/fs/btrfs/uuid/devices/sdb", root / "sys/devices/sdb")
    storage = described("/b1", root, btrfs)
    assert storage.block_stat_file is None
    assert storage.device_stack == ("nvme0n1p2", "nvme0n1", "sdb")
    assert storage.device_model == "Fast Disk 3000, Other"


def test_memory_and_kernel_mounts_of_this_machine():
    assert storage_of(Path("/proc")).kind == "virtual"
    if Path("/dev/shm").is_dir():
        shared = storage_of(Path("/dev/shm"))
        assert (shared.kind, shared.suitable) == ("memory", False)


def test_the_device_of_this_folder_counts(tmp_path):
    storage = storage_of(tmp_path)
    if storage.kind != "disk":
        pytest.skip(f"{storage.filesystem} is no disk")
    assert parse_block_stat(read_counter_file(storage.block_stat_file)) is not None
    assert storage.logical_block_bytes % 512 == 0
    assert storage == storage_of(tmp_path / "..")


def test_a_link_is_followed_to_the_mount_it_leads_to(tmp_path):
    link(tmp_path / "link", Path("/proc/sys"))
    assert storage_of(tmp_path / "link").filesystem == "proc"


def test_a_mount_below_another_is_the_one_that_counts():
    # The same mount point twice: only the kernel's own answer tells which one a path is in.
    done = subprocess.run(
        [
            "unshare", "--mount", "--map-root-user", "sh", "-ec",
            "mount -t tmpfs one /mnt; mount -t ramfs two /mnt; "
            f"{sys.executable} -c 'from pathlib import Path; from replayer.machine import storage_of; "
            'print(storage_of(Path("/mnt")).filesystem)\'',
        ],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"no mount namespace: {done.stderr[-200:]}")
    assert done.stdout.strip() == "ramfs"


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        storage_of(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        direct_io_alignment(tmp_path / "gone")
    link(tmp_path / "loop", Path("loop"))
    with pytest.raises(OSError, match="loop"):
        storage_of(tmp_path / "loop")


def test_reads_aligned_as_told_are_taken(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(2**20))
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip(f"{storage_of(tmp_path).filesystem} takes no O_DIRECT")
    try:
        alignment = direct_io_alignment(file)
        if alignment is None:
            pytest.skip("the kernel does not say, and there is no device")
        memory = memoryview(mmap.mmap(-1, 2**20))
        assert os.preadv(fd, [memory[:alignment]], alignment) == alignment
        assert memory[:alignment] == file.read_bytes()[alignment : 2 * alignment]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("mask", "memory", "offset", "found"), [(0x2000, 4, 4096, 4096), (0x2000, 8, 512, 512), (0x2000, 0, 0, None)]
)
def test_what_statx_says_of_direct_io_is_believed(tmp_path, monkeypatch, mask, memory, offset, found):
    class Libc:
        @staticmethod
        def statx(folder, path, flags, wanted, answer):
            words = (ctypes.c_uint32 * 64).from_buffer(answer)
            words[0], words[38], words[39] = mask, memory, offset
            return 0

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Libc)
    assert direct_io_alignment(tmp_path) == found


@pytest.mark.parametrize("libc", [object(), type("Libc", (), {"statx": lambda *words: -1})()], ids=["none", "refuses"])
def test_where_statx_does_not_say_the_devices_block_is_taken(tmp_path, monkeypatch, libc):
    storage = storage_of(tmp_path)
    if storage.filesystem == "btrfs":
        pytest.skip("btrfs has sectors of its own")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: libc)
    assert direct_io_alignment(tmp_path) == storage.logical_block_bytes


def test_the_row_is_the_tables_and_stays_the_same():
    row = machine_row(storage_of(ROOT))
    table = TABLES["machine"]
    assert list(row) == [*table.key, *table.measures]
    assert all(row[name] is not None for name in row if name not in table.nullable)
    validate_table(table.frame([row, machine_row(None)]), table)
    assert row == machine_row(storage_of(ROOT))
    assert re.fullmatch("machine-[0-9a-f]{12}", row["machine_id"])
    assert row["page_bytes"] == PAGE_BYTES
    assert 0 < row["cpus"] <= os.cpu_count()


def test_another_state_is_another_machine(root):
    write(root / "proc/meminfo", "MemTotal: 1024 kB\n")
    write(root / "proc/sys/vm/swappiness", "60\n")
    before = machine_row(None, root)
    assert before["memory_bytes"] == 2**20
    assert before["swap_bytes"] == 0
    assert before["thp"] is None
    assert before["mglru"] == "absent"
    assert before["filesystem"] is None
    write(root / "proc/sys/vm/swappiness", "10\n")
    assert machine_row(None, root)["machine_id"] != before["machine_id"]
    assert machine_row(described("/data", root), root)["machine_id"] != before["machine_id"]


@pytest.mark.parametrize(
    ("text", "state"), [("0x0007\n", "on 0x0007"), ("0x0000\n", "off 0x0000"), ("0x0006\n", "off 0x0006")]
)
def test_mglru_is_on_by_its_main_switch(root, text, state):
    write(root / "sys/kernel/mm/lru_gen/enabled", text)
    assert mglru_state(root) == state


def test_where_sys_is_hidden_nothing_is_called_absent(tmp_path):
    assert mglru_state(tmp_path).startswith("unknown: ")
    assert damon_state(tmp_path).startswith("unknown: ")


def test_a_plain_user_does_not_take_damon_for_off():
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    program = (
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom replayer.machine import damon_state, machine_row\n"
        "os.setgroups([]), os.setgid(65534), os.setuid(65534)\nprint(damon_state())\nmachine_row(None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split(":")[0].strip() in {damon_state().split(":")[0], "unknown"}


def test_what_cannot_be_read_is_unknown_not_absent(root):
    (root / "sys/kernel/mm/lru_gen/enabled").mkdir(parents=True)
    assert mglru_state(root) == "unknown: is a directory"
    (root / "sys/kernel/mm/damon/admin/kdamonds/0/state").mkdir(parents=True)
    assert damon_state(root) == "unknown: is a directory"
    write(root / "proc/77/comm", "kdamond.0\n")
    assert damon_state(root) == "on: action not readable"


def test_damon_says_what_it_does(root):
    assert damon_state(root) == "absent"
    kdamonds = root / "sys/kernel/mm/damon/admin/kdamonds"
    write(kdamonds / "nr_kdamonds", "1\n")
    assert damon_state(root) == "off"
    write(kdamonds / "0/state", "off\n")
    write(kdamonds / "0/contexts/0/schemes/0/action", "pageout\n")
    assert damon_state(root) == "off"
    write(kdamonds / "0/state", "on\n")
    write(kdamonds / "1/state", "on\n")
    assert damon_state(root) == "on: pageout, no action"
    write(root / "sys/module/damon_reclaim/parameters/enabled", "Y\n")
    assert damon_state(root) == "on: pageout, no action, damon_reclaim"


X86 = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: {}\nflags\t\t: fpu {}\n"
ARM = "processor\t: 0\nCPU implementer\t: {}\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "vendor", "product", "clocks", "expected"),
    [
        (X86.format("QEMU Virtual CPU version 2.5+", "hypervisor"), None, "", "tsc", "tcg"),
        (X86.format("QEMU Virtual CPU version 2.5+", "hypervisor"), "QEMU", "", "kvm-clock tsc", "kvm"),
        (X86.format("QEMU TCG CPU version 2.5+", "hypervisor"), None, "", "kvm-clock", "tcg"),
        (X86.format("Intel Core Processor (Haswell)", "hypervisor"), "QEMU", "Standard PC", "tsc hpet", "tcg"),
        (X86.format("AMD EPYC", "hypervisor"), None, "", "tsc kvm-clock", "kvm"),
        (X86.format("Intel Xeon", "hypervisor"), "VMware, Inc.", "VMware7,1", "tsc", "vmware"),
        (X86.format("Intel Xeon", ""), "Amazon EC2", "c5.metal", "tsc", "none"),
        (X86.format("Intel Xeon", "hypervisor"), "Maker", "", "tsc", "unknown: the processor shows a hypervisor"),
        (X86.format("Intel Xeon", "sse2"), "Maker", "", "tsc hpet", "none"),
        (ARM.format("0x00", "0x051"), "QEMU", "", "arch_sys_counter", "tcg"),
        (ARM.format("0x41", "0xd07"), "QEMU", "", "arch_sys_counter", "unknown: a QEMU machine, emulated or not"),
        (ARM.format("0x41", "0xd4f"), "Maker", "Superchip", "arch_sys_counter", "none"),
        (ARM.format("0x41", "0xd4f"), None, "", "arch_sys_counter", "unknown: the firmware names no maker"),
        (ARM.format("0x41", "0xd40"), "Amazon EC2", "c7g.large", "arch_sys_counter", "kvm"),
    ],
)
def test_emulation_is_told_from_virtualization(root, cpuinfo, vendor, product, clocks, expected):
    write(root / "proc/cpuinfo", cpuinfo)
    write(root / "sys/devices/system/clocksource/clocksource0/available_clocksource", clocks)
    if vendor is not None:
        write(root / "sys/class/dmi/id/sys_vendor", f"{vendor}\n")
        write(root / "sys/class/dmi/id/product_name", f"{product}\n")
    assert virtualization(root) == expected


def test_an_arm_processor_is_named_by_its_numbers(root):
    write(root / "proc/cpuinfo", ARM.format("0x41", "0xd4f"))
    assert machine_row(None, root)["cpu_model"] == "implementer 0x41, part 0xd4f"


def test_a_firmware_table_names_firecracker_to_root(root):
    write(root / "proc/cpuinfo", X86.format("AMD EPYC", "hypervisor"))
    write(root / "sys/firmware/acpi/tables/DSDT", "DSDT1234\x01\x02FIRECK")
    assert virtualization(root) == "firecracker"


def test_nothing_of_the_storage_needs_the_root_of_this_machine(root):
    assert machine._text(root / "nowhere") is None
    assert describe_mount(parse_mounts(MOUNTS)[1], root).kind == "unknown"
