"""Hold memory to a size: a memory cgroup (the wall) or a locked balloon; prove both alive, and release them.

In: bytes. Out: `Group` and `Balloon`, context managers with the paths of the counter files that a measuring process
reads. What these counters say about a run is in `proofs`; no trace, no pool and no reading of experts here.

Release: a `with` block ends in it, also by an exception; what an interrupt leaves between two lines ends at exit of the
interpreter; after SIGKILL the processes die with their parent and `remove_leftovers` finds the empty groups.
The balloon runs this file as a script, so it imports nothing but the standard library.
"""

import atexit
import ctypes
import errno
import itertools
import mmap
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MACHINE_RESERVE_BYTES = 128 * 2**20
"""A balloon that would leave the machine less available memory than this is refused; on machines below 2 GiB, a
sixteenth of their memory."""

GROUP_RESERVE_BYTES = 32 * 2**20
"""A balloon that would leave a limited group, its own or one above, less room than this is refused."""

_NAME = re.compile(r"expert-tier-(wall|machine)-([0-9]+)-([0-9]+)-([0-9]+)-([0-9]+)", re.ASCII)
_SLICE_BYTES = 256 * 2**20
# An emulated guest on a busy machine locks some 20 MiB/s.
_SLOWEST_BYTES_PER_S = 8 * 2**20
_PATIENCE_S = 30.0
_NOT_IN_GROUP = 125
_MAX_DEPTH = 24
_MAX_FOLDERS = 50_000
# A v1 group without a limit reads as 2^63 less a page.
_UNLIMITED_BYTES = 2**62
_CAP_IPC_LOCK = 14
_PR_SET_PDEATHSIG = 1
_MPOL_BIND = 2
# Numbers of set_mempolicy(2): there is no wrapper in the C library.
_SET_MEMPOLICY_SYSCALL = {"x86_64": 238, "aarch64": 237}


class NotEnforceable(RuntimeError):
    """This machine, or these permissions, cannot hold memory to the size asked for."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


class Uninterrupted:
    """Holds SIGINT and SIGTERM back until the block is done; a no-op in other threads, which get neither.

    Handlers are swapped, not the signal mask: another thread of the process would take a masked signal.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._held: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    before = signal.getsignal(number)
                    if before is not None and before is not signal.SIG_IGN:
                        self._before[number] = before
                        signal.signal(number, self._hold)
            except BaseException:
                self._restore()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()
        for number in self._held:
            signal.raise_signal(number)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append(number)

    def _restore(self) -> None:
        try:
            while self._before:
                number = next(iter(self._before))
                signal.signal(number, self._before[number])
                del self._before[number]
        finally:
            if self._before:
                self._restore()


@dataclass(frozen=True)
class MemoryController:
    """A mounted cgroup hierarchy that limits memory. parent: the folder in which our groups are made."""

    version: Literal[1, 2]
    mount: Path
    parent: Path


@dataclass(frozen=True)
class _Mount:
    version: Literal[1, 2]
    root: str
    point: Path


def find_memory_controller(proc: Path = Path("/proc")) -> MemoryController:
    """The memory controller that this process may make groups under; changes nothing.

    Under v1 groups are made in the own group. Under v2 a group that holds processes cannot have groups with a memory
    limit in it, so they are made in the nearest group above that gives memory to its groups, or that can.

    Raises:
        NotEnforceable: there is none, or it is not ours to use; with what would enable it.
    """
    refusals: list[NotEnforceable] = []
    for version, mount, own in _own_folders(proc):
        try:
            parent = own if version == 1 else _delegating_folder(mount, own)
            if not os.access(parent, os.W_OK | os.X_OK):
                raise _not_ours(version, parent)
            return MemoryController(version, mount, parent)
        except NotEnforceable as refusal:
            refusals.append(refusal)
    raise refusals[0] if refusals else _no_controller(proc)


def _own_folders(proc: Path) -> Iterator[tuple[Literal[1, 2], Path, Path]]:
    """(version, mount point, folder of this process) for each mount through which the own memory group is seen."""
    version, own = _own_group(proc)
    if version is None:
        return
    for mount in _mounts(proc):
        if mount.version != version:
            continue
        inner = _below(own, mount.root)
        if inner is None:
            continue
        folder = mount.point.joinpath(*inner)
        if _lists_this_process(folder):
            yield version, mount.point, folder


def _own_group(proc: Path) -> tuple[Literal[1, 2] | None, str]:
    """The version that controls memory and the own group's path there; in a hybrid set-up v1 where v1 has memory."""
    unified: str | None = None
    for line in _text(proc / "self" / "cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if "memory" in parts[1].split(","):
            return 1, parts[2]
        if parts[0] == "0" and parts[1] == "":
            unified = parts[2]
    return (None, "") if unified is None else (2, unified)


def _mounts(proc: Path) -> list[_Mount]:
    """Mounts of cgroup hierarchies that may control memory, in the order of mountinfo."""
    found: list[_Mount] = []
    for line in _text(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(kind) < 3:
            continue
        root, point = _unescaped(fields[3]), Path(_unescaped(fields[4]))
        if kind[0] == "cgroup2":
            found.append(_Mount(2, root, point))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            found.append(_Mount(1, root, point))
    return found


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _below(path: str, root: str) -> list[str] | None:
    """The names that lead from `root` to `path`; None if `path` is not below it.

    Both are relative to the cgroup namespace and may climb out of it (`/../other`); names outside are unknown, so a
    path that climbs above `root` is not below it.
    """
    names = [name for name in path.split("/") if name]
    above = [name for name in root.split("/") if name]
    if names[: len(above)] != above or ".." in names[len(above) :]:
        return None
    return names[len(above) :]


def _lists_this_process(folder: Path) -> bool:
    try:
        return str(os.getpid()) in _text(folder / "cgroup.procs").split()
    except FileNotFoundError:
        return False
    except OSError:
        # A threaded v2 group does not list its processes; the path alone then has to do.
        return folder.is_dir()


def _delegating_folder(mount: Path, own: Path) -> Path:
    """The nearest v2 group, from `own` up to `mount`, that can hold groups with a memory limit of ours."""
    folders = [own, *(folder for folder in own.parents if folder == mount or mount in folder.parents)]
    for folder in folders:
        if "memory" in _words(folder / "cgroup.subtree_control") and _may_hold_ours(folder):
            return folder
    for folder in folders:
        # Only the root of the whole hierarchy, which has no cgroup.type, may hold processes beside such groups.
        is_empty = not _words(folder / "cgroup.procs")
        if (
            "memory" in _words(folder / "cgroup.controllers")
            and (is_empty or not (folder / "cgroup.type").exists())
            and os.access(folder / "cgroup.subtree_control", os.W_OK)
            and _may_hold_ours(folder)
        ):
            return folder
    if "memory" not in _words(mount / "cgroup.controllers"):
        raise NotEnforceable(
            f"{mount}: cgroup v2 without the memory controller (it has: {_listed(mount / 'cgroup.controllers')})",
            "boot with cgroup_no_v1=memory and without cgroup_disable=memory, or have memory enabled for this subtree",
        )
    raise NotEnforceable(
        f"{own}: no cgroup v2 group from here up to {mount} gives memory to groups that this user may make",
        _delegation(),
    )


def _may_hold_ours(folder: Path) -> bool:
    # A process moves between two groups only if the nearest group above both lets its mover write to cgroup.procs.
    return os.access(folder, os.W_OK | os.X_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _delegation() -> str:
    user = "" if os.geteuid() == 0 else "--user "
    if Path("/run/systemd/system").exists():
        return f"start it with: systemd-run {user}--scope -p Delegate=yes replayer …"
    return (
        "as root: make a group with a leaf in it, move this shell into the leaf, write +memory to the group's "
        "cgroup.subtree_control and give both to this user"
    )


def _not_ours(version: int, folder: Path) -> NotEnforceable:
    return NotEnforceable(
        f"{folder}: no permission to make a cgroup v{version} memory group there, or it is mounted read-only",
        "run as root, have the folder given to this user, or in a container mount /sys/fs/cgroup writable",
    )


def _no_controller(proc: Path) -> NotEnforceable:
    version, own = _own_group(proc)
    mounts = [mount for mount in _mounts(proc) if mount.version == version]
    if version is None:
        return NotEnforceable(
            f"{proc}/self/cgroup names no memory cgroup",
            "boot a kernel with CONFIG_MEMCG and without cgroup_disable=memory",
        )
    if not mounts:
        kind = "cgroup -o memory" if version == 1 else "cgroup2"
        return NotEnforceable(
            f"memory is controlled by cgroup v{version}, which is mounted nowhere", f"as root: mount -t {kind} …"
        )
    return NotEnforceable(
        f"own group {own} is not below what is mounted at {', '.join(str(mount.point) for mount in mounts)}",
        "mount the cgroup hierarchy in this namespace, or start in a group that is seen there",
    )


class Group:
    """One memory cgroup of ours, empty until `launch_in`; leaving its `with` block kills what is in it and removes it.

    The files can be read by pread at offset 0 through descriptors that stay open. All counts include groups inside,
    except `oom_kills` under v1, which counts the victims of this very group. Page cache that its processes were the
    first to touch stays in memory after removal, charged to the groups above.
    """

    def __init__(self, folder: Path, version: Literal[1, 2]) -> None:
        self.folder = folder
        self.version = version
        first = version == 1
        self.limit_file = folder / ("memory.limit_in_bytes" if first else "memory.max")
        self.usage_file = folder / ("memory.usage_in_bytes" if first else "memory.current")
        self.events_file = folder / ("memory.oom_control" if first else "memory.events")
        self.stat_file = folder / "memory.stat"
        self.procs_file = folder / "cgroup.procs"
        self.cache_key = "total_cache" if first else "file"
        self.anonymous_key = "total_rss" if first else "anon"
        self._owner_pid = os.getpid()

    @property
    def peak_file(self) -> Path | None:
        """None where the kernel keeps no peak (v2 before 5.19)."""
        file = self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return file if file.exists() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release()

    def _release(self) -> None:
        # A forked copy of the supervisor runs the same handlers; the group is not its to remove.
        if os.getpid() == self._owner_pid:
            self.remove()

    def set_limit_bytes(self, limit_bytes: int) -> int:
        """Puts the limit in force, with no swap, and returns what the kernel holds: whole pages, rounded down.

        Lowering reclaims page cache at once. Memory that cannot be reclaimed is refused under v1 and killed under v2.

        Raises:
            NotEnforceable: the kernel did not take it. ValueError: less than a page.
        """
        if limit_bytes < PAGE_BYTES:
            raise ValueError(f"limit of {limit_bytes} bytes, wanted at least a page of {PAGE_BYTES}")
        try:
            if self.version == 1:
                self._set_limit_v1(limit_bytes)
            else:
                self._set_limit_v2(limit_bytes)
        except OSError as error:
            raise NotEnforceable(
                f"{self.folder}: limit of {limit_bytes:,} bytes refused ({error.strerror}) at a usage of "
                f"{self.usage_bytes():,} bytes",
                "ask for more, or free memory in the group first",
            ) from None
        wanted, found = limit_bytes // PAGE_BYTES * PAGE_BYTES, self.limit_bytes()
        if found != wanted:
            raise NotEnforceable(
                f"{self.limit_file}: wrote {wanted:,} bytes, reads back {found}",
                "use another mechanism, or see who else changes this group",
            )
        return found

    def _set_limit_v1(self, limit_bytes: int) -> None:
        write_word(self.folder / "memory.swappiness", "0")
        with_swap = self.folder / "memory.memsw.limit_in_bytes"
        if not with_swap.exists():
            write_word(self.limit_file, str(limit_bytes))
            return
        # Memory and swap together may never be limited below memory alone, so the order depends on the direction.
        if limit_bytes > int(_text(with_swap)):
            write_word(with_swap, str(limit_bytes))
        write_word(self.limit_file, str(limit_bytes))
        write_word(with_swap, str(limit_bytes))

    def _set_limit_v2(self, limit_bytes: int) -> None:
        swap = self.folder / "memory.swap.max"
        if swap.exists():
            write_word(swap, "0")
        elif len(_text(Path("/proc/swaps")).splitlines()) > 1:
            raise NotEnforceable(
                f"{self.folder}: the machine swaps and this kernel keeps no swap limit per group",
                "swapoff -a, or boot with swapaccount=1",
            )
        write_word(self.limit_file, str(limit_bytes))

    def limit_bytes(self) -> int | None:
        """None: no limit."""
        return limit_of(self.limit_file.read_bytes())

    def usage_bytes(self) -> int:
        return int(_text(self.usage_file))

    def peak_bytes(self) -> int | None:
        """Highest usage since the group was made; None where the kernel keeps no peak."""
        file = self.peak_file
        return None if file is None else int(_text(file))

    def oom_kills(self) -> int | None:
        """Processes the kernel killed here for want of memory; None where it does not count them (v1 before 4.13)."""
        return keyed_value(self.events_file.read_bytes(), "oom_kill")

    def cache_bytes(self) -> int | None:
        """Page cache charged here, shared memory included."""
        return keyed_value(self.stat_file.read_bytes(), self.cache_key)

    def anonymous_bytes(self) -> int | None:
        return keyed_value(self.stat_file.read_bytes(), self.anonymous_key)

    def kernel_bytes(self) -> int | None:
        """Kernel memory charged here; None where the kernel does not say (v2 before 5.18, or accounting off)."""
        if self.version == 2:
            return keyed_value(self.stat_file.read_bytes(), "kernel")
        try:
            return int(_text(self.folder / "memory.kmem.usage_in_bytes"))
        except FileNotFoundError:
            return None

    def processes(self) -> list[int]:
        """Process ids in this very group, without those of pid namespaces that are not seen from here."""
        return _processes(self.folder)

    def kill(self) -> None:
        """Kills what is in the group and in groups inside, and waits for it to be gone.

        Raises:
            OSError: something in it does not die.
        """
        with Uninterrupted():
            _kill_all(self.folder)

    def remove(self) -> None:
        """Kills what is in the group and removes it; nothing happens if it is gone.

        Raises:
            OSError: something in it does not die, or the kernel keeps the folder busy.
        """
        with Uninterrupted():
            _remove_tree(self.folder)
            _HELD.pop(self.folder, None)


_HELD: dict[Path, Group] = {}
_NUMBERS = itertools.count()


@atexit.register
def _release_held() -> None:
    for group in list(_HELD.values()):
        group._release()


def memory_group(
    controller: MemoryController, purpose: Literal["wall", "machine"], parent: Path | None = None
) -> Group:
    """Makes an empty group without a limit, to be used in a `with` statement.

    `wall` holds the measuring process; `machine` stands for a smaller machine. `parent`: folder of a group of ours to
    nest in. Under v2 a group has processes or groups in it, never both.

    Raises:
        NotEnforceable: the group cannot be made, or has no memory limit.
    """
    inside = controller.parent if parent is None else parent
    maker = f"{pid_namespace()}-{os.getpid()}-{start_time_ticks(os.getpid())}"
    name = f"expert-tier-{purpose}-{maker}-{next(_NUMBERS)}"
    group = Group(inside / name, controller.version)
    with Uninterrupted():
        try:
            if controller.version == 2 and "memory" not in _words(inside / "cgroup.subtree_control"):
                # Not taken back: others may have come to rely on it by then.
                write_word(inside / "cgroup.subtree_control", "+memory")
            group.folder.mkdir()
            _HELD[group.folder] = group
            if controller.version == 1:
                _settle_v1(group.folder)
        except OSError as error:
            group.remove()
            raise NotEnforceable(
                f"{inside}: no memory group can be made there ({error.strerror})",
                _delegation() if controller.version == 2 else "run as root, or have the folder given to this user",
            ) from None
        if not group.limit_file.exists():
            group.remove()
            raise NotEnforceable(f"{group.folder}: a group there has no {group.limit_file.name}", _delegation())
    return group


def _settle_v1(folder: Path) -> None:
    """Undoes what a v1 group may inherit: a limit that its groups escape, and hanging instead of an OOM kill."""
    hierarchy = folder / "memory.use_hierarchy"
    if hierarchy.exists() and _text(hierarchy).strip() == "0":
        write_word(hierarchy, "1")
    if keyed_value((folder / "memory.oom_control").read_bytes(), "oom_kill_disable") == 1:
        write_word(folder / "memory.oom_control", "0")


def launch_in(group: Group | None, command: list[str], **popen_kwargs: Any) -> subprocess.Popen[bytes]:
    """Starts `command` inside the group: it is there before it is executed, so all it touches is charged there.

    Only the new process moves. Call from the main thread: what the child asks for by `die_with_parent` ends it with
    the *thread* that started it.

    Raises:
        NotEnforceable: it could not be put into the group. OSError: there is no such program (without a group; in one
            the exit code is 127). RuntimeError: called from another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("launch_in outside the main thread: the child would die with that thread")
    if group is not None:
        moved = f'{{ echo $$ > "$0"; }} 2>/dev/null || exit {_NOT_IN_GROUP}; exec "$@"'
        command = ["/bin/sh", "-c", moved, str(group.procs_file), *command]
    process: subprocess.Popen[bytes] | None = None
    try:
        with Uninterrupted():
            process = subprocess.Popen(command, **popen_kwargs)  # noqa: S603 - no shell reads the caller's words
            if group is not None:
                _await_membership(process, group)
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        raise
    return process


def _await_membership(process: subprocess.Popen[bytes], group: Group) -> None:
    """Returns once the process was seen in the group, or has ended after it got there."""
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        if process.pid in group.processes():
            return
        time.sleep(0.001)
    if process.returncode is None or process.returncode == _NOT_IN_GROUP:
        raise NotEnforceable(
            f"{group.folder}: a process could not be moved into the group",
            "give this user the cgroup.procs of the nearest group above both; under v2 the group may hold no groups",
        )


def remove_leftovers() -> list[str]:
    """Removes groups of ours whose maker is dead, with what still runs in them, and brings memory back that such a one
    left offline; a sentence for each.

    Looks through the whole memory hierarchy that is seen here, up to a bound. Groups made in another pid namespace are
    left alone: whether their maker lives cannot be known here.
    """
    said: list[str] = []
    seen: set[Path] = set()
    for _, mount, own in _own_folders(Path("/proc")):
        for folder in _groups_below(mount):
            if folder in seen or not _is_leftover(folder.name) or folder == own or folder in own.parents:
                continue
            seen.add(folder)
            inside = len(_processes_below(folder))
            try:
                _remove_tree(folder)
                said.append(f"removed leftover group {folder} with {inside} processes in it")
            except OSError as error:
                said.append(f"leftover group {folder} could not be removed: {error}")
    # Imported here: the balloon runs this file without the package.
    from replayer.offline import restore_leftovers

    return said + restore_leftovers()


def _groups_below(mount: Path) -> list[Path]:
    """Outermost folders below `mount` that carry a name of ours."""
    found: list[Path] = []
    visited = 0
    waiting = [(mount, 0)]
    while waiting and visited < _MAX_FOLDERS:
        folder, depth = waiting.pop()
        visited += 1
        for inner in _subfolders(folder):
            if _NAME.fullmatch(inner.name):
                found.append(inner)
            elif depth < _MAX_DEPTH:
                waiting.append((inner, depth + 1))
    return found


def _is_leftover(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and is_gone(*match.groups()[1:4])


def is_gone(namespace: str, pid_text: str, ticks_text: str) -> bool:
    """Whether the process of that number and start time in this pid namespace is dead; false of another namespace."""
    if namespace != str(pid_namespace()):
        return False
    pid, began = int(pid_text), int(ticks_text)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        # Somebody else's process, which /proc may hide: taken for the maker.
        return start_time_ticks(pid) not in (None, began)
    return start_time_ticks(pid) != began


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _processes(folder: Path) -> list[int]:
    # A process of a pid namespace that is not seen from here reads as 0.
    return [int(word) for word in _words(folder / "cgroup.procs") if word != "0"]


def _processes_below(folder: Path) -> list[int]:
    return _processes(folder) + [pid for inner in _subfolders(folder) for pid in _processes_below(inner)]


def _kill_all(folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while pids := _processes_below(folder):
        if os.getpid() in pids:
            raise OSError(f"{folder}: this very process is inside; nothing was killed")
        with suppress(OSError):
            # v2 since 5.14: kills the whole tree at once, whatever forks meanwhile.
            write_word(folder / "cgroup.kill", "1")
        for pid in pids:
            _kill_member(folder, pid)
        if time.monotonic() > deadline:
            raise OSError(
                f"{folder}: processes {pids[:5]} do not die {_PATIENCE_S:.0f} s after SIGKILL; see ps -o stat"
            )
        time.sleep(0.002)


def _kill_member(folder: Path, pid: int) -> None:
    """Kills the process if it is in the group, and never one that got its number since."""
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        # A kernel before 5.3, or a Python built for one.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return
    try:
        if pid in _processes_below(folder):
            signal.pidfd_send_signal(held, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(held)


def _remove_tree(folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while folder.exists():
        _kill_all(folder)
        for inner in _subfolders(folder):
            _remove_tree(inner)
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def raise_own_oom_score() -> None:
    """Makes this process the first to be killed when memory runs out, so that a shortage never kills the balloon.

    Raises:
        NotEnforceable: /proc is read-only.
    """
    try:
        write_word(Path("/proc/self/oom_score_adj"), "1000")
    except OSError as error:
        raise NotEnforceable(
            f"/proc/self/oom_score_adj cannot be raised ({error.strerror})", "mount /proc writable"
        ) from None


def die_with_parent(parent_pid: int) -> None:
    """Lets the kernel kill this process when its parent dies, and does so itself if the parent is dead already.

    The kernel goes by the *thread* that started this process, so the parent must start it from its main thread.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def bind_memory(nodes: Sequence[int]) -> None:
    """Has this thread, and what it starts from then on, take memory from these nodes alone; from any if empty.

    Page cache that it brings in comes from there as well; what lies in memory already stays where it is.

    Raises:
        NotEnforceable: the kernel refuses, or its number of the call is not known here.
    """
    if not nodes:
        return
    number = _SET_MEMPOLICY_SYSCALL.get(os.uname().machine)
    remedy = "let accelerators' memory count: --accelerator-memory"
    if number is None:
        raise NotEnforceable(f"no call is known here that binds memory to nodes on {os.uname().machine}", remedy)
    words = [0] * (max(nodes) // 64 + 1)
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    mask = (ctypes.c_uint64 * len(words))(*words)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told of.
    bits = ctypes.c_ulong(64 * len(words) + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(_MPOL_BIND), mask, bits) != 0:
        listed = ", ".join(map(str, nodes))
        raise NotEnforceable(f"memory cannot be bound to nodes {listed} ({os.strerror(ctypes.get_errno())})", remedy)


def start_time_ticks(pid: int) -> int | None:
    """When a process began, since boot; None if there is no such process, or it is dead and only waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()
    return None if not fields or fields[0] in (b"Z", b"X") else balloon_state(b"", text)[1]


def pid_namespace() -> int:
    """Number of the pid namespace that this process is in."""
    return Path("/proc/self/ns/pid").stat().st_ino


class Balloon:
    """A child process that holds locked, unreclaimable memory; leaving its `with` block ends it.

    The child dies with this process. `machine_locked_bytes` is what the whole machine had locked (Mlocked of
    /proc/meminfo) once the balloon was ready; None where the kernel does not say. It may lag by a few pages.
    """

    def __init__(self, process: subprocess.Popen[bytes], size_bytes: int) -> None:
        self._process = process
        self.pid = process.pid
        self.size_bytes = size_bytes
        self.start_time_ticks = start_time_ticks(process.pid)
        self.status_file = Path(f"/proc/{process.pid}/status")
        self.stat_file = Path(f"/proc/{process.pid}/stat")
        self.machine_locked_bytes: int | None = None

    @classmethod
    def inflate(
        cls,
        size_bytes: int,
        group: Group | None = None,
        timeout_s: float | None = None,
        *,
        nodes: Sequence[int] = (),
        left_out_bytes: int = 0,
    ) -> "Balloon":
        """Starts a balloon of `size_bytes`, rounded up to pages, and returns once all of it is locked.

        `group`: the child lives there and its memory is charged there. By default it may take 30 s and 1 s per 8 MiB.
        `nodes`: memory nodes to take it from, any if empty; `left_out_bytes`: what MemAvailable counts of the others.
        Call from the main thread.

        Raises:
            NotEnforceable: too little would be left, the memory may not be locked, or the child died of it.
            ValueError: `size_bytes` is not positive.
        """
        if size_bytes <= 0:
            raise ValueError(f"balloon of {size_bytes} bytes, wanted more than 0")
        size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        _refuse_too_large(size_bytes, group, left_out_bytes)
        if timeout_s is None:
            timeout_s = _PATIENCE_S + size_bytes / _SLOWEST_BYTES_PER_S
        # By path and isolated: starts faster, and no module beside this file or in the current folder gets in the way.
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(size_bytes), str(os.getpid())]
        command += [str(node) for node in nodes]
        # A group of its own, so that Ctrl-C at the terminal ends the run first and the balloon after it.
        process = launch_in(
            group,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        balloon = cls(process, size_bytes)
        try:
            balloon._await_ready(timeout_s)
            balloon._verify()
        except BaseException:
            balloon.deflate()
            raise
        return balloon

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.deflate()

    def locked_bytes(self) -> int | None:
        """What the child holds locked; None if it is dead, also if its number belongs to another process by now."""
        try:
            locked_bytes, start_time_ticks = balloon_state(self.status_file.read_bytes(), self.stat_file.read_bytes())
        except OSError:
            return None
        return locked_bytes if start_time_ticks == self.start_time_ticks else None

    def alive(self) -> bool:
        """Whether the same process still holds every byte."""
        return self.start_time_ticks is not None and self.locked_bytes() == self.size_bytes

    def deflate(self) -> None:
        """Ends the child and waits until its memory is free again; may be called again."""
        with Uninterrupted():
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _await_ready(self, timeout_s: float) -> None:
        said = self._first_line(timeout_s)
        if said == "ready":
            return
        if said.startswith("error\t"):
            reason, remedy = said.split("\t")[1:3]
            raise NotEnforceable(f"balloon of {self.size_bytes:,} bytes: {reason}", remedy)
        self._process.kill()
        status = self._process.wait()
        how = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
        raise NotEnforceable(
            f"balloon of {self.size_bytes:,} bytes: its process ended before all was locked ({how})",
            "there is less memory free than its size: ask for a larger capacity",
        )

    def _first_line(self, timeout_s: float) -> str:
        """What the child says, empty if it ends without a word."""
        assert self._process.stdout is not None
        said = b""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not said.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise NotEnforceable(
                        f"balloon of {self.size_bytes:,} bytes: not locked within {timeout_s:.0f} s",
                        "ask for a larger capacity, or allow more time",
                    )
                more = os.read(self._process.stdout.fileno(), 4096)
                if not more:
                    return ""
                said += more
        return said.decode().rstrip("\n")

    def _verify(self) -> None:
        locked_bytes = self.locked_bytes()
        resident_bytes = _kilobytes(self.status_file.read_bytes(), "VmRSS")
        if locked_bytes != self.size_bytes or resident_bytes is None or resident_bytes < self.size_bytes:
            raise NotEnforceable(
                f"{self.status_file}: wanted {self.size_bytes:,} bytes locked and resident, found {locked_bytes} and "
                f"{resident_bytes}",
                "ask for a larger capacity, or use another mechanism",
            )
        self.machine_locked_bytes = machine_locked_bytes(Path("/proc/meminfo").read_bytes())
        # Each processor counts newly locked small pages in batches.
        slack_bytes = 64 * (os.cpu_count() or 1) * PAGE_BYTES
        if self.machine_locked_bytes is not None and self.machine_locked_bytes < self.size_bytes - slack_bytes:
            raise NotEnforceable(
                f"/proc/meminfo: Mlocked is {self.machine_locked_bytes:,} bytes, less than the balloon's "
                f"{self.size_bytes:,}",
                "use another mechanism: this kernel or container does not show what is locked",
            )


def balloon_state(status_text: bytes, stat_text: bytes) -> tuple[int | None, int | None]:
    """(locked bytes, start time in clock ticks since boot) from /proc/PID/status and /proc/PID/stat.

    Each is None where the text does not say: of a dead process it is empty or, until it is waited for, without VmLck.
    """
    # The name, the second field, may hold spaces and brackets; the start time is field 22.
    fields = stat_text.rpartition(b")")[2].split()
    start_time_ticks = int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None
    return _kilobytes(status_text, "VmLck"), start_time_ticks


def machine_locked_bytes(meminfo_text: bytes) -> int | None:
    """Mlocked of /proc/meminfo."""
    return _kilobytes(meminfo_text, "Mlocked")


def _refuse_too_large(size_bytes: int, group: Group | None, left_out_bytes: int) -> None:
    meminfo = Path("/proc/meminfo").read_bytes()
    available_bytes = _kilobytes(meminfo, "MemAvailable")
    if available_bytes is not None:
        available_bytes -= left_out_bytes
    reserve_bytes = min(MACHINE_RESERVE_BYTES, (_kilobytes(meminfo, "MemTotal") or MACHINE_RESERVE_BYTES * 16) // 16)
    if available_bytes is None or available_bytes - size_bytes < reserve_bytes:
        raise NotEnforceable(
            f"balloon of {size_bytes:,} bytes: the machine has {available_bytes:,} bytes available and keeps "
            f"{reserve_bytes:,}",
            "ask for a larger capacity, or free memory",
        )
    if group is not None:
        version, folder = group.version, group.folder
    else:
        own = next(_own_folders(Path("/proc")), None)
        if own is None:
            return
        version, _, folder = own
    for above in (folder, *folder.parents):
        at = Group(above, version)
        try:
            limit_bytes = at.limit_bytes()
            stat = at.stat_file.read_bytes()
            usage_bytes = at.usage_bytes()
        except OSError:
            # The root of v2 has no limit file, and above the mount there are no groups.
            return
        if limit_bytes is None:
            continue
        shared_bytes = keyed_value(stat, "total_shmem" if version == 1 else "shmem") or 0
        reclaimable_bytes = max(0, (keyed_value(stat, at.cache_key) or 0) - shared_bytes)
        room_bytes = limit_bytes - usage_bytes + reclaimable_bytes
        if room_bytes - size_bytes < GROUP_RESERVE_BYTES:
            raise NotEnforceable(
                f"balloon of {size_bytes:,} bytes: {above} has room for {room_bytes:,} bytes and keeps "
                f"{GROUP_RESERVE_BYTES:,}",
                "ask for a larger capacity",
            )


def keyed_value(text: bytes, key: str) -> int | None:
    """The number on the line `key number`, as in memory.stat, memory.oom_control and memory.events; None if absent."""
    match = re.search(rb"^%s ([0-9]+)$" % re.escape(key.encode()), text, re.MULTILINE)
    return int(match.group(1)) if match else None


def limit_of(text: bytes) -> int | None:
    """The limit from the text of `Group.limit_file`; None: no limit, under v1 a number that no memory reaches."""
    word = text.strip()
    if word == b"max":
        return None
    limit_bytes = int(word)
    return None if limit_bytes >= _UNLIMITED_BYTES else limit_bytes


def _kilobytes(text: bytes, key: str) -> int | None:
    match = re.search(rb"^%s:\s*([0-9]+) kB$" % re.escape(key.encode()), text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="surrogateescape")


def _words(file: Path) -> list[str]:
    """Words of a cgroup file; none if it cannot be read."""
    try:
        return _text(file).split()
    except OSError:
        return []


def _listed(file: Path) -> str:
    return ", ".join(_words(file)) or "none"


def write_word(file: Path, text: str) -> None:
    """Writes to a file of the kernel's.

    Raises:
        OSError: with the kernel's own error.
    """
    # Unbuffered and without O_CREAT: one write that carries the kernel's own error.
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _hold(size_bytes: int, parent_pid: int, nodes: Sequence[int]) -> str | None:
    """Locks `size_bytes` until the parent dies or closes our standard input; what went wrong, for `_await_ready`."""
    die_with_parent(parent_pid)
    try:
        bind_memory(nodes)
    except NotEnforceable as refusal:
        return f"error\t{refusal.reason}\t{refusal.remedy}"
    try:
        region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        return f"error\tno address space ({error.strerror})\tsee vm.overcommit_memory and ulimit -v"
    with suppress(OSError, AttributeError):
        # Large pages lock and free many times faster; a kernel without them says EINVAL.
        region.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for offset in range(0, size_bytes, _SLICE_BYTES):
        if libc.mlock(address + offset, min(_SLICE_BYTES, size_bytes - offset)) != 0:
            return f"error\t{_lock_error(ctypes.get_errno(), offset)}"
    locked_bytes = balloon_state(Path("/proc/self/status").read_bytes(), b"")[0]
    if locked_bytes != size_bytes:
        return f"error\t{locked_bytes} bytes are locked\tuse another mechanism"
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while os.read(0, 1):
        pass
    return None


def _lock_error(number: int, locked_bytes: int) -> str:
    """Reason and remedy, apart by a tab."""
    capabilities = re.search(rb"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
    may_lock = capabilities is not None and int(capabilities.group(1), 16) >> _CAP_IPC_LOCK & 1 == 1
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    reason = f"mlock stopped after {locked_bytes:,} bytes ({os.strerror(number)})"
    if may_lock or limit == resource.RLIM_INFINITY:
        return f"{reason}\tthere is less memory free than its size: ask for a larger capacity"
    return (
        f"{reason}; RLIMIT_MEMLOCK is {limit:,} bytes and CAP_IPC_LOCK is missing\t"
        "raise the limit (ulimit -l, LimitMEMLOCK=infinity) or run with CAP_IPC_LOCK"
    )


def main() -> int:
    """The balloon's own process: `capacity.py BYTES PARENT_PID [NODE…]`."""
    problem = _hold(int(sys.argv[1]), int(sys.argv[2]), [int(node) for node in sys.argv[3:]])
    if problem is None:
        return 0
    print(problem)
    return 1


if __name__ == "__main__":
    sys.exit(main())
