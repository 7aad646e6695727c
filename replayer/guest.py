"""A small virtual machine: kernel, disks and a script in; what the script wrote to the share out, or one clear line.

The guest sees the host's whole file system read-only, so that it runs the very interpreter and packages of the host;
disks are read-only virtio devices; one folder of the host, the share, takes results. The script runs below the host's
root and says on the console where it is. What is run in there and what its results mean is planned in `lab`.

QEMU never outlives this process, and every wait has an end.
"""

import contextlib
import gzip
import io
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replayer.lab_setup import QEMU, find_program
from replayer.quantities import format_bytes

PLACE = "/run/expert-tier"
"""Where the guest keeps what is its own: `disk0` …, `share`, and `own` in its memory."""

MARK = "expert-tier-lab:"
"""Begins every line that the guest says to its supervisor."""

MOST_STARTS = 3
"""QEMU 7.2 without KVM loses one guest in some forty before its kernel is up; such a start is repeated."""

START_LIMIT_S = 90.0
"""What a guest may take until its script runs: 4 s on two idle processors."""

KVM_TRIAL_S = 20.0
"""What a trial guest may take under KVM; where the host itself is a guest, /dev/kvm may be there and boot nothing."""

_TAIL_LINES = 12
_NO_ROOM = re.compile(r"out of memory|oom-kill", re.IGNORECASE)


class GuestFailed(RuntimeError):
    """A guest did not start, or did not end well in its time; the message says where, and nothing of it remains.

    stage: the last thing it said; tail: the last lines of its console.
    """

    def __init__(self, message: str, stage: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.stage = stage
        self.tail = list(tail)


@dataclass(frozen=True)
class Kernel:
    """A kernel that `lab_setup` has put into a folder, its modules in the order they load in."""

    folder: Path
    release: str
    package: str
    version: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """What a guest is given. boot_limit_bytes: `mem=` on its command line, beyond which the kernel sees nothing."""

    memory_bytes: int
    cpus: int = 2
    boot_limit_bytes: int | None = None
    accelerator: str = "tcg"


@dataclass(frozen=True)
class Disk:
    """An image of a file system, mounted read-only below `PLACE`."""

    image: Path
    filesystem: str = "ext4"


@dataclass
class Outcome:
    """What came of a guest that ended well: how often it was started, and the lines it said, without the mark."""

    starts: int
    wall_s: float
    said: list[str] = field(default_factory=list)


def read_kernel(folder: Path) -> Kernel:
    """The kernel in a folder.

    Raises:
        FileNotFoundError: there is none; says how to get one. ValueError: the folder is not what lab_setup wrote.
    """
    file = folder / "kernel.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: no kernel for guests there; run: make lab-setup")
    try:
        said = json.loads(file.read_text())
        return Kernel(folder, said["release"], said["package"], said["version"], tuple(said["modules"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not what lab-setup writes ({error!r}); remove {folder} and run it again") from None


def qemu_version() -> str:
    """First line of what QEMU says of itself.

    Raises:
        FileNotFoundError: it is not installed.
    """
    if shutil.which(QEMU) is None:
        raise FileNotFoundError(f"no {QEMU} here; run: make lab-setup")
    done = subprocess.run([QEMU, "--version"], capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    return done.stdout.splitlines()[0].removeprefix("QEMU emulator version ")


def make_disk(folder: Path, image: Path, filesystem: str = "ext4") -> Disk:
    """Writes a file system with all files of `folder` into `image`, without mounting anything.

    ext4 gets no journal and no reserve: it is only ever mounted read-only. xfs has large folios in its page cache since
    Linux 5.18, which ext4 has not before 6.16.

    Raises:
        OSError: the program that makes it is missing or fails.
    """
    maker, package = _MAKERS[filesystem]
    program = find_program(maker)
    if program is None:
        raise FileNotFoundError(f"no {maker} here, which makes a guest's disk; install it: apt-get install {package}")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    # Inode tables, bitmaps and group descriptors: below 2 % with these options, and 16 MiB for a small one. mkfs.xfs
    # makes none below 300 MiB, and a log of 64 MiB.
    room = size + size // 50 + (len(files) * 8192) + (16 << 20)
    if filesystem == "xfs":
        # A file that mkfs.xfs copies in is written in one piece, over the head of the next allocation group if it does
        # not fit its own (xfsprogs 6.1); so each of two groups has room for all files. What is not written is a hole.
        room = 2 * max(room + (80 << 20), 160 << 20)
    room = -(-room // (1 << 20)) * (1 << 20)
    image.unlink(missing_ok=True)
    with image.open("wb") as opened:
        opened.truncate(room)
    try:
        with tempfile.TemporaryDirectory(prefix=".layout-", dir=image.parent) as work:
            if filesystem == "xfs":
                layout = Path(work) / "layout"
                layout.write_text(_xfs_layout(folder))
                words = ["-q", "-f", "-p", str(layout), "-d", f"file=1,name={image},size={room},agcount=2"]
            else:
                words = [
                    "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-N", str(len(files) + 64), "-O", "^has_journal",
                    "-E", "lazy_itable_init=0,root_owner=0:0", "-d", str(folder), str(image),
                ]  # fmt: skip
            done = subprocess.run(  # noqa: S603 - our own words
                [program, *words], capture_output=True, text=True, timeout=3600, check=False
            )
        if done.returncode:
            raise OSError(
                f"{image}: {maker} of {folder} failed: {done.stderr.strip().splitlines()[-1:]}; see disk space"
            )
    except BaseException:
        image.unlink(missing_ok=True)
        raise
    return Disk(image, filesystem)


_MAKERS = {"ext4": ("mke2fs", "e2fsprogs"), "xfs": ("mkfs.xfs", "xfsprogs")}
_MOUNT_OPTIONS = {"ext4": "ro,noload", "xfs": "ro,norecovery"}
_ONLY_FOR = {"xfs": "xfs"}
"""Modules that are loaded only for disks of a file system."""


def _xfs_layout(folder: Path) -> str:
    """The prototype file of mkfs.xfs(8): names, modes, and where each file's content comes from.

    Raises:
        OSError: a name that the format cannot hold.
    """
    lines = ["/dev/null", "0 0", "d--755 0 0"]

    def add(place: Path) -> None:
        for path in sorted(place.iterdir()):
            if re.search(r"\s", str(path)):
                raise OSError(f"{path}: white space in a name, which mkfs.xfs cannot take; move the pool, or use ext4")
            if path.is_dir():
                lines.append(f"{path.name} d--755 0 0")
                add(path)
            else:
                lines.append(f"{path.name} ---644 0 0 {path.resolve()}")
        lines.append("$")

    add(folder)
    return "\n".join([*lines, ""])


def initramfs(kernel: Kernel, disks: Sequence[Disk]) -> bytes:
    """The first file system of a guest: loads modules, mounts root, disks and share, and starts the share's script."""
    archive = io.BytesIO()
    number = 0

    def add(name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        # The newc format of cpio(5): thirteen hexadecimal fields, everything padded to four bytes.
        nonlocal number
        number += 1
        fields = [number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0]
        head = b"070701" + b"".join(b"%08X" % one for one in fields) + name.encode() + b"\0"
        for part in (head, content):
            archive.write(part + b"\0" * (-len(part) % 4))

    for name in ("bin", "dev", "proc", "sys", "r", "lib"):
        add(name, 0o040755)
    add("dev/console", 0o020600, device=(5, 1))
    add("bin/busybox", 0o100755, (kernel.folder / "busybox").read_bytes())
    kinds = {disk.filesystem for disk in disks}
    modules = [name for name in kernel.modules if name not in _ONLY_FOR or _ONLY_FOR[name] in kinds]
    for module in modules:
        add(f"lib/{module}.ko", 0o100644, (kernel.folder / f"{module}.ko").read_bytes())
    add("init", 0o100755, init_script(modules, disks).encode())
    add("TRAILER!!!", 0)
    return gzip.compress(archive.getvalue(), compresslevel=1)


def init_script(modules: Sequence[str], disks: Sequence[Disk]) -> str:
    """What the guest's kernel starts first, for busybox."""
    loads = "\n".join(f"insmod /lib/{module}.ko || refuse 'module {module} does not load'" for module in modules)
    # Disks have no fixed names; they carry their number as serial.
    mounts = "\n".join(
        f"""\
device=
for try in 1 2 3 4 5 6 7 8 9 10; do
  for block in /sys/block/vd*; do
    [ "$(cat $block/serial 2>/dev/null)" = disk{number} ] && device=/dev/${{block##*/}}
  done
  [ -n "$device" ] && break
  sleep 0.2
done
[ -n "$device" ] || refuse 'disk {number} is not there'
mkdir -p /r{PLACE}/disk{number}
mount -t {disk.filesystem} -o {_MOUNT_OPTIONS[disk.filesystem]} $device /r{PLACE}/disk{number} \\
  || refuse 'disk {number} does not mount'"""
        for number, disk in enumerate(disks)
    )
    return f"""\
#!/bin/busybox sh
/bin/busybox mkdir -p /usr/bin /sbin
/bin/busybox --install -s /bin
export PATH=/bin
say() {{ echo "{MARK} $*"; }}
refuse() {{ say "refused $*"; sync; poweroff -f; sleep 60; }}
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs devtmpfs /dev || refuse 'no /proc or /sys'
say up
{loads}
options=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o ro,cache=loose,$options root /r || refuse 'the root of the host does not mount'
mount -t proc proc /r/proc && mount -t sysfs sysfs /r/sys && mount -t devtmpfs devtmpfs /r/dev \\
  && mount -t tmpfs -o mode=755 tmpfs /r/run || refuse 'the root of the host has no /proc, /sys, /dev or /run'
mkdir -p /r{PLACE}/share /r{PLACE}/own
mount -t 9p -o rw,cache=none,$options share /r{PLACE}/share || refuse 'the share does not mount'
mount -t cgroup2 cgroup2 /r/sys/fs/cgroup || refuse 'no cgroup v2'
{mounts}
say mounted
chroot /r /bin/sh {PLACE}/share/script
say "ended $?"
sync
poweroff -f
sleep 60
"""


def command_line(
    kernel: Kernel, shape: Shape, initrd: Path, disks: Sequence[Disk], share: Path, *, extra: str = ""
) -> list[str]:
    """The words that start QEMU."""
    append = ["console=ttyS0", "quiet", "panic=-1", "no_timer_check", "random.trust_cpu=on"]
    if shape.boot_limit_bytes is not None:
        append.append(f"mem={shape.boot_limit_bytes >> 10}K")
    if extra:
        append.append(extra)
    if shape.accelerator == "kvm":
        processor = ["-accel", "kvm", "-cpu", "host"]
    else:
        processor = ["-accel", "tcg,thread=multi,tb-size=256", "-cpu", "Haswell-v4"]
        # QEMU 7.2 emulates cmpxchg16b wrongly: a kernel that uses it crashes while it starts. The processor keeps it
        # all the same, since wheels of numpy 2.4 refuse one without.
        append.append("clearcpuid=cx16")
    words = [
        QEMU, *processor, "-M", "q35", "-m", f"{shape.memory_bytes >> 20}M", "-smp", str(shape.cpus),
        "-display", "none", "-no-reboot", "-nodefaults", "-no-user-config", "-serial", "stdio", "-monitor", "none",
        "-kernel", str(kernel.folder / "vmlinuz"), "-initrd", str(initrd), "-append", " ".join(append),
        "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
        "-fsdev", f"local,id=share,path={_quoted(share)},security_model=none,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=share,mount_tag=share",
    ]  # fmt: skip
    for number, disk in enumerate(disks):
        # Past the host's page cache: a page that the guest has evicted is read from the host's device again.
        words += [
            "-drive", f"file={_quoted(disk.image)},if=none,id=d{number},format=raw,cache=none,aio=threads,readonly=on",
            "-device", f"virtio-blk-pci,drive=d{number},serial=disk{number}",
        ]  # fmt: skip
    return words


def _quoted(path: Path) -> str:
    return str(path.resolve()).replace(",", ",,")


def run_guest(
    kernel: Kernel,
    shape: Shape,
    *,
    disks: Sequence[Disk],
    share: Path,
    script: str,
    limit_s: float,
    start_limit_s: float = START_LIMIT_S,
    on_start: Callable[[int], None] | None = None,
    on_line: Callable[[str], None] | None = None,
    extra: str = "",
) -> Outcome:
    """Boots a guest that runs `script` (of /bin/sh, below the host's root) and waits until it is off.

    limit_s: for all of it once its kernel is up. A start that does not get that far is tried again, `MOST_STARTS` times
    in all. `on_start` gets the number of each start, `on_line` each line that the script says after MARK.

    Raises:
        GuestFailed: it did not start, refused, hung, died or ended with an exit code. OSError: no QEMU, no kernel.
    """
    (share / "script").write_text(script)
    # In the share, which whoever made it removes, also after a crash.
    initrd = share / "initramfs.gz"
    initrd.write_bytes(initramfs(kernel, disks))
    command = command_line(kernel, shape, initrd, disks, share, extra=extra)
    begin = time.monotonic()
    for starts in range(1, MOST_STARTS + 1):
        if on_start is not None:
            on_start(starts)
        with _Watched(command, on_line) as watched:
            failure = watched.await_end(limit_s, start_limit_s)
        if failure is None:
            return Outcome(starts, time.monotonic() - begin, watched.said)
        if watched.is_up or starts == MOST_STARTS:
            raise GuestFailed(
                f"guest of {format_bytes(shape.memory_bytes)}, kernel {kernel.release}, {shape.accelerator}: "
                f"{failure}{f', in {starts} starts' if starts > 1 else ''}; its last words: {watched.last_words()}",
                watched.stage,
                watched.tail,
            )
    raise AssertionError("a guest starts at least once")


class _Watched:
    """A QEMU process and its console, until the `with` block ends."""

    def __init__(self, command: Sequence[str], on_line: Callable[[str], None] | None) -> None:
        # The kernel ends QEMU with this process, also where that is killed.
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own words
                [*bound, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no {error.filename} here; run: make lab-setup") from None
        self.on_line = on_line
        self.said: list[str] = []
        self.tail: list[str] = []
        self.stage = "before its kernel was up"
        self.is_up = False
        self.exit_code: int | None = None
        self.refusal: str | None = None
        self._text = b""

    def __enter__(self) -> "_Watched":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def await_end(self, limit_s: float, start_limit_s: float) -> str | None:
        """None where the script ended with 0 and the guest is off; else what went wrong."""
        assert self.process.stdout is not None, "stdout is a pipe"
        begin = time.monotonic()
        deadline = begin + start_limit_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                what = "hung" if self.is_up else "did not start"
                allowed = limit_s if self.is_up else start_limit_s
                return f"{what} ({self.stage}), wanted its end within {allowed:.0f} s"
            if not select.select([self.process.stdout], [], [], min(left, 1.0))[0]:
                continue
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return self._end()
            was_up = self.is_up
            self._hear(more)
            if self.is_up and not was_up:
                deadline = time.monotonic() + limit_s

    def _hear(self, more: bytes) -> None:
        *lines, self._text = (self._text + more).split(b"\n")
        for raw in lines:
            line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]", "", raw.decode(errors="replace")).strip()
            _, mark, words = line.partition(MARK)
            words = words.strip()
            if mark:
                self._understand(words)
            elif line:
                self.tail = [*self.tail[1 - _TAIL_LINES :], line]

    def _understand(self, words: str) -> None:
        kind, _, rest = words.partition(" ")
        if kind == "up":
            self.is_up = True
            self.stage = "while it mounted"
        elif kind == "refused":
            self.refusal = rest
        elif kind == "ended":
            self.exit_code = int(rest) if rest.isdigit() else -1
        else:
            self.stage = f"after it said {words[:100]!r}"
            self.said.append(words)
            if self.on_line is not None:
                self.on_line(words)

    def _end(self) -> str | None:
        status = self.process.wait()
        if self.refusal is not None:
            return f"refused to go on: {self.refusal}"
        if self.exit_code == 0 and status == 0:
            return None
        if self.exit_code is not None:
            return f"its script ended with code {self.exit_code} {self.stage}"
        if not self.is_up:
            return f"QEMU ended with code {status} {self.stage}"
        why = " for want of memory" if any(_NO_ROOM.search(line) for line in self.tail) else ""
        return f"died{why} {self.stage}"

    def last_words(self) -> str:
        """The end of the console, in one line."""
        text = " | ".join(self.tail[-3:])
        return text[-300:] or "none"


def works_with_kvm(kernel: Kernel) -> tuple[bool, str]:
    """Whether a guest of this kernel boots with KVM here, and why not."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False, "no /dev/kvm that this user may use"
    with tempfile.TemporaryDirectory(prefix="expert-tier-kvm-") as name:
        share = Path(name)
        (share / "script").write_text("exit 0\n")
        initrd = share / "initramfs.gz"
        initrd.write_bytes(initramfs(kernel, []))
        command = command_line(kernel, Shape(512 << 20, 1, None, "kvm"), initrd, [], share)
        with _Watched(command, None) as watched:
            failure = watched.await_end(KVM_TRIAL_S, KVM_TRIAL_S)
    return failure is None, failure or "a trial guest booted"


def environment_script(environment: Mapping[str, str]) -> str:
    """Lines of a shell that export variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
