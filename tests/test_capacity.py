"""Walls and balloons: which groups can be used, what is enforced, and that nothing of them outlives a run.

Tests that make groups or lock memory skip with the reason where this machine does not let them; at most 1 GiB is asked
for and 300 MiB locked.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.capacity import (
    PAGE_BYTES,
    Balloon,
    Group,
    MemoryController,
    NotEnforceable,
    balloon_state,
    find_memory_controller,
    keyed_value,
    launch_in,
    limit_of,
    machine_locked_bytes,
    memory_group,
    remove_leftovers,
)

MIB = 2**20
REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def controller() -> MemoryController:
    """The memory controller of this machine, proven to make groups."""
    try:
        found = find_memory_controller()
        with memory_group(found, "wall"):
            return found
    except NotEnforceable as refusal:
        pytest.skip(f"no memory cgroup can be made here: {refusal}")


@pytest.fixture
def wall(controller: MemoryController) -> Iterator[Group]:
    with memory_group(controller, "wall") as group:
        yield group


@pytest.fixture(scope="module")
def locking() -> None:
    """Skips where memory cannot be locked."""
    try:
        with Balloon.inflate(16 * MIB):
            pass
    except NotEnforceable as refusal:
        pytest.skip(f"no balloon here: {refusal}")


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def run_script(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def fake_proc(folder: Path, cgroup: str, mountinfo: str) -> Path:
    """A /proc with these two files of this process."""
    own = folder / "proc" / "self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(textwrap.dedent(cgroup))
    (own / "mountinfo").write_text(textwrap.dedent(mountinfo))
    return folder / "proc"


def fake_group(
    folder: Path, *, holds_us: bool = False, controllers: str = "", gives: str = "", is_root: bool = False
) -> Path:
    """A cgroup v2 folder; `gives` is its cgroup.subtree_control."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(f"{os.getpid()}\n" if holds_us else "")
    (folder / "cgroup.controllers").write_text(controllers + "\n")
    (folder / "cgroup.subtree_control").write_text(gives + "\n")
    if not is_root:
        (folder / "cgroup.type").write_text("domain\n")
    return folder


def unified(mount: Path, root: str = "/") -> str:
    return f"30 23 0:26 {root} {mount} rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate\n"


def memory_v1(mount: Path | str, root: str = "/") -> str:
    return f"35 31 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory\n"


def test_v1_makes_groups_in_the_own_group(tmp_path: Path) -> None:
    own = fake_group(tmp_path / "mem" / "a" / "b", holds_us=True)
    proc = fake_proc(tmp_path, "4:memory:/a/b\n0::/\n", memory_v1(tmp_path / "mem"))
    assert find_memory_controller(proc) == MemoryController(1, tmp_path / "mem", own)


def test_in_a_hybrid_hierarchy_v1_is_used_where_v1_has_memory(tmp_path: Path) -> None:
    own = fake_group(tmp_path / "mem" / "a", holds_us=True)
    fake_group(tmp_path / "unified", holds_us=True, controllers="hugetlb", is_root=True)
    proc = fake_proc(
        tmp_path,
        "9:name=systemd:/\n4:cpu,memory:/a\n0::/\n",
        unified(tmp_path / "unified") + memory_v1(tmp_path / "mem"),
    )
    assert find_memory_controller(proc) == MemoryController(1, tmp_path / "mem", own)


def test_v2_uses_the_nearest_group_above_that_gives_memory(tmp_path: Path) -> None:
    mount = fake_group(tmp_path / "cg", controllers="cpu memory", gives="cpu memory", is_root=True)
    slice_ = fake_group(mount / "user.slice", controllers="cpu memory", gives="memory pids")
    fake_group(slice_ / "run.scope", holds_us=True, controllers="memory pids")
    proc = fake_proc(tmp_path, "0::/user.slice/run.scope\n", unified(mount))
    assert find_memory_controller(proc) == MemoryController(2, mount, slice_)


def test_v2_passes_over_groups_that_are_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = fake_group(tmp_path / "cg", controllers="memory", gives="memory", is_root=True)
    slice_ = fake_group(mount / "a", controllers="memory", gives="memory")
    fake_group(slice_ / "b", holds_us=True, controllers="memory")
    proc = fake_proc(tmp_path, "0::/a/b\n", unified(mount))
    monkeypatch.setattr(os, "access", lambda path, mode: path != slice_)
    assert find_memory_controller(proc).parent == mount
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(NotEnforceable, match="no cgroup v2 group from here") as refusal:
        find_memory_controller(proc)
    assert refusal.value.reason in str(refusal.value)
    assert refusal.value.remedy in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_v2_root_of_the_whole_hierarchy_may_hold_processes_beside_groups(tmp_path: Path) -> None:
    mount = fake_group(tmp_path / "cg", holds_us=True, controllers="memory", is_root=True)
    proc = fake_proc(tmp_path, "0::/\n", unified(mount))
    assert find_memory_controller(proc) == MemoryController(2, mount, mount)


def test_v2_root_of_a_container_that_holds_processes_is_refused(tmp_path: Path) -> None:
    mount = fake_group(tmp_path / "cg", holds_us=True, controllers="memory")
    proc = fake_proc(tmp_path, "0::/\n", unified(mount))
    with pytest.raises(NotEnforceable, match="no cgroup v2 group from here"):
        find_memory_controller(proc)


def test_v2_group_above_without_processes_can_be_made_to_give_memory(tmp_path: Path) -> None:
    mount = fake_group(tmp_path / "cg", controllers="memory")
    fake_group(mount / "leaf", holds_us=True)
    proc = fake_proc(tmp_path, "0::/leaf\n", unified(mount))
    assert find_memory_controller(proc).parent == mount


def test_v2_without_the_memory_controller_names_the_boot_parameter(tmp_path: Path) -> None:
    mount = fake_group(tmp_path / "cg", holds_us=True, controllers="hugetlb", is_root=True)
    proc = fake_proc(tmp_path, "0::/\n", unified(mount))
    with pytest.raises(NotEnforceable, match=r"it has: hugetlb\).*cgroup_no_v1=memory"):
        find_memory_controller(proc)


@pytest.mark.parametrize(
    ("own", "root", "inner"),
    [
        ("/docker/ab", "/docker/ab", ""),
        ("/docker/ab/x/y", "/docker/ab", "x/y"),
        ("/x", "/", "x"),
        ("/../b/c", "/..", "b/c"),
        ("/../../b", "/../../b", ""),
    ],
)
def test_own_group_is_found_below_a_mount_of_a_part_of_the_hierarchy(
    tmp_path: Path, own: str, root: str, inner: str
) -> None:
    mount = tmp_path / "mem"
    folder = fake_group(mount / inner, holds_us=True)
    proc = fake_proc(tmp_path, f"4:memory:{own}\n", memory_v1(mount, root))
    assert find_memory_controller(proc) == MemoryController(1, mount, folder)


@pytest.mark.parametrize(
    ("own", "root"), [("/docker/abc", "/docker/ab"), ("/", "/.."), ("/../b", "/"), ("/a", "/a/b"), ("/../../b", "/..")]
)
def test_own_group_outside_of_what_is_mounted_is_refused(tmp_path: Path, own: str, root: str) -> None:
    mount = fake_group(tmp_path / "mem", holds_us=True)
    fake_group(mount / "b", holds_us=True)
    proc = fake_proc(tmp_path, f"4:memory:{own}\n", memory_v1(mount, root))
    with pytest.raises(NotEnforceable, match="is not below what is mounted at"):
        find_memory_controller(proc)


def test_a_folder_that_does_not_list_this_process_is_not_the_own_group(tmp_path: Path) -> None:
    """Two mounts show the same path; the first is another container's."""
    fake_group(tmp_path / "one" / "a")
    own = fake_group(tmp_path / "two" / "a", holds_us=True)
    proc = fake_proc(tmp_path, "4:memory:/a\n", memory_v1(tmp_path / "one") + memory_v1(tmp_path / "two"))
    assert find_memory_controller(proc).parent == own


def test_mount_points_with_spaces_and_paths_with_colons_are_read(tmp_path: Path) -> None:
    own = fake_group(tmp_path / "my cg" / "a:b", holds_us=True)
    proc = fake_proc(tmp_path, "4:memory:/a:b\n", memory_v1(str(tmp_path / "my cg").replace(" ", "\\040")))
    assert find_memory_controller(proc).parent == own


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "words"),
    [
        ("3:cpu:/\n", "", "names no memory cgroup"),
        ("", "", "names no memory cgroup"),
        ("4:memory:/\n", "", "v1, which is mounted nowhere"),
        ("0::/\n", "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\nnonsense\n", "v2, which is mounted nowhere"),
        ("4:memory:/a (deleted)\n", memory_v1("/nowhere"), "is not below what is mounted"),
    ],
)
def test_no_controller_is_refused_with_its_reason(tmp_path: Path, cgroup: str, mountinfo: str, words: str) -> None:
    with pytest.raises(NotEnforceable, match=words):
        find_memory_controller(fake_proc(tmp_path, cgroup, mountinfo))


@given(
    name=st.text(st.characters(codec="ascii", exclude_characters="\0\n"), max_size=15),
    start_time_ticks=st.integers(0, 2**63),
    locked_kib=st.integers(0, 2**40),
)
def test_balloon_state_reads_any_process_name(name: str, start_time_ticks: int, locked_kib: int) -> None:
    before, after = " ".join(["1"] * 18), " ".join(["7"] * 30)
    stat = f"42 ({name}) S {before} {start_time_ticks} {after}\n".encode()
    status = f"Name:\tpython\nVmPin:\t       3 kB\nVmLck:\t{locked_kib:8d} kB\nVmRSS:\t 9 kB\n".encode()
    assert balloon_state(status, stat) == (locked_kib * 1024, start_time_ticks)


def test_balloon_state_of_a_dead_process_is_none() -> None:
    assert balloon_state(b"", b"") == (None, None)
    assert balloon_state(b"Name:\tpython\nState:\tZ (zombie)\n", b"42 (python) Z 1 2") == (None, None)


def test_keyed_value_takes_the_whole_key() -> None:
    text = b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\ntotal_cache 8192\n"
    assert keyed_value(text, "oom_kill") == 3
    assert keyed_value(text, "cache") is None
    assert keyed_value(b"", "oom_kill") is None


def test_no_limit_is_none() -> None:
    assert limit_of(b"max\n") is None
    assert limit_of(b"9223372036854771712\n") is None
    assert limit_of(b"8192\n") == 8192


def test_locked_memory_of_the_machine_is_read_in_bytes() -> None:
    assert machine_locked_bytes(b"Unevictable:  14088 kB\nMlocked:  13096 kB\n") == 13096 * 1024
    assert machine_locked_bytes(b"MemTotal: 1 kB\n") is None


def test_v2_group_reads_and_writes_its_own_files(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "",
        "memory.swap.max": "",
        "memory.current": "4096\n",
        "memory.events": "low 0\noom 2\noom_kill 1\n",
        "memory.stat": "anon 10\nfile 20\nkernel 30\n",
        "cgroup.procs": "0\n7\n",
    }.items():
        (tmp_path / name).write_text(text)
    group = Group(tmp_path, 2)
    assert group.set_limit_bytes(4 * PAGE_BYTES) == group.limit_bytes() == 4 * PAGE_BYTES
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert (group.usage_bytes(), group.oom_kills(), group.peak_bytes()) == (4096, 1, None)
    assert (group.anonymous_bytes(), group.cache_bytes(), group.kernel_bytes()) == (10, 20, 30)
    assert group.processes() == [7]
    (tmp_path / "memory.peak").write_text("8192\n")
    assert group.peak_bytes() == 8192
    (tmp_path / "memory.stat").write_text("anon 10\n")
    assert group.cache_bytes() is None
    assert group.kernel_bytes() is None


def test_limit_is_rounded_down_to_pages_and_can_move_both_ways(wall: Group) -> None:
    assert wall.limit_bytes() is None
    for pages in (4096, 1024, 8192):
        assert wall.set_limit_bytes(pages * PAGE_BYTES + PAGE_BYTES // 2) == pages * PAGE_BYTES == wall.limit_bytes()
    with pytest.raises(ValueError, match="at least a page"):
        wall.set_limit_bytes(PAGE_BYTES - 1)


def test_process_is_in_the_group_before_it_is_executed_and_only_it(wall: Group) -> None:
    child = launch_in(wall, ["cat", "/proc/self/cgroup"], stdout=subprocess.PIPE)
    said, _ = child.communicate(timeout=10)
    assert wall.folder.name in said.decode()
    assert wall.folder.name not in Path("/proc/self/cgroup").read_text()
    child = launch_in(wall, ["sleep", "60"])
    assert wall.processes() == [child.pid]
    wall.kill()
    assert child.wait(timeout=10) == -signal.SIGKILL
    assert wall.processes() == []


def test_command_with_blanks_and_quotes_arrives_unchanged(wall: Group) -> None:
    child = launch_in(wall, ["printf", "%s|", "a b", "$HOME", "'\""], stdout=subprocess.PIPE)
    assert child.communicate(timeout=10)[0] == b"a b|$HOME|'\"|"


def test_program_that_is_not_there(wall: Group) -> None:
    assert launch_in(wall, ["/no/such/program"], stderr=subprocess.DEVNULL).wait(timeout=10) == 127
    with pytest.raises(FileNotFoundError):
        launch_in(None, ["/no/such/program"])


def test_launch_into_a_group_that_is_gone_is_refused(controller: MemoryController) -> None:
    with memory_group(controller, "wall") as group:
        pass
    with pytest.raises(NotEnforceable, match="could not be moved into the group"):
        launch_in(group, ["true"])


def test_launch_from_another_thread_is_refused() -> None:
    seen: list[BaseException] = []

    def launch() -> None:
        try:
            launch_in(None, ["true"])
        except RuntimeError as error:
            seen.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert "main thread" in str(seen[0])


def test_a_limit_too_small_kills_what_is_inside_and_is_counted(wall: Group) -> None:
    wall.set_limit_bytes(24 * MIB)
    assert wall.oom_kills() == 0
    child = launch_in(wall, python("held = bytearray(b'x') * (64 << 20)"))
    assert child.wait(timeout=20) == -signal.SIGKILL
    assert wall.oom_kills() == 1
    assert wall.limit_bytes() == 24 * MIB
    peak_bytes = wall.peak_bytes()
    assert peak_bytes is None or 20 * MIB < peak_bytes <= 24 * MIB


READ = """
    import os, sys
    descriptor = os.open(sys.argv[1], os.O_RDONLY)
    while os.read(descriptor, 1 << 20):
        pass
"""


def test_page_cache_is_charged_to_who_touches_it_first_and_lowering_the_limit_reclaims_it(
    wall: Group, tmp_path: Path
) -> None:
    """Why a pool must be dropped and proven absent before a run: what others cached is outside of the wall."""
    file = tmp_path / "bytes"
    file.write_bytes(os.urandom(24 * MIB))
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    assert launch_in(wall, [*python(READ), str(file)]).wait(timeout=20) == 0
    others = wall.cache_bytes()
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    assert launch_in(wall, [*python(READ), str(file)]).wait(timeout=20) == 0
    os.close(descriptor)
    own = wall.cache_bytes()
    assert others is not None
    assert own is not None
    if own < 24 * MIB and others < 8 * MIB:
        pytest.skip("the file system here keeps its pages")
    assert others < 8 * MIB
    assert own - others >= 23 * MIB
    assert wall.set_limit_bytes(8 * MIB) == 8 * MIB
    assert wall.usage_bytes() <= 8 * MIB


def test_counter_files_can_be_read_again_through_one_descriptor(wall: Group) -> None:
    files = [wall.limit_file, wall.usage_file, wall.events_file, wall.stat_file, wall.procs_file]
    descriptors = [os.open(file, os.O_RDONLY) for file in (*files, *([wall.peak_file] if wall.peak_file else []))]
    try:
        before = [os.pread(descriptor, 65536, 0) for descriptor in descriptors]
        wall.set_limit_bytes(64 * MIB)
        child = launch_in(wall, ["sleep", "60"])
        after = [os.pread(descriptor, 65536, 0) for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert limit_of(before[0]) is None
    assert limit_of(after[0]) == 64 * MIB
    assert keyed_value(after[2], "oom_kill") == 0
    assert keyed_value(after[3], wall.cache_key) is not None
    assert keyed_value(after[3], wall.anonymous_key) is not None
    assert (before[4], after[4].split()) == (b"", [str(child.pid).encode()])


def test_leaving_the_block_kills_and_removes_also_after_an_error(controller: MemoryController) -> None:
    with (
        pytest.raises(KeyError),
        memory_group(controller, "machine") as machine,
        memory_group(controller, "wall", machine.folder) as wall,
    ):
        child = launch_in(wall, ["sh", "-c", "for i in 1 2 3 4; do sleep 60 & done; wait"])
        assert until(lambda: len(wall.processes()) == 5)
        raise KeyError
    assert child.wait(timeout=10) == -signal.SIGKILL
    assert not machine.folder.exists()
    machine.remove()


def test_removing_the_outer_group_removes_the_inner_one(controller: MemoryController) -> None:
    machine = memory_group(controller, "machine")
    wall = memory_group(controller, "wall", machine.folder)
    child = launch_in(wall, ["sleep", "60"])
    machine.remove()
    assert child.wait(timeout=10) == -signal.SIGKILL
    assert not machine.folder.exists()
    wall.remove()


def test_a_limit_outside_holds_inside(controller: MemoryController) -> None:
    with (
        memory_group(controller, "machine") as machine,
        memory_group(controller, "wall", machine.folder) as wall,
    ):
        machine.set_limit_bytes(24 * MIB)
        wall.set_limit_bytes(128 * MIB)
        child = launch_in(wall, python("held = bytearray(b'x') * (64 << 20)"))
        assert child.wait(timeout=20) == -signal.SIGKILL
        assert wall.oom_kills() == 1


def test_group_where_none_can_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotEnforceable, match="no memory group can be made there"):
        memory_group(MemoryController(1, tmp_path, tmp_path / "gone"), "wall")
    fake_group(tmp_path / "plain", gives="memory")
    with pytest.raises(NotEnforceable, match=r"has no memory\.max"):
        memory_group(MemoryController(2, tmp_path, tmp_path / "plain"), "wall")
    assert [path for path in (tmp_path / "plain").iterdir() if path.is_dir()] == []


def test_leftovers_of_the_dead_go_and_those_of_the_living_and_of_strangers_stay(
    controller: MemoryController, wall: Group
) -> None:
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftover = controller.parent / f"expert-tier-wall-{namespace}-{dead.pid}-1-0"
    reused = controller.parent / f"expert-tier-machine-{namespace}-{os.getpid()}-1-0"
    foreign = controller.parent / f"expert-tier-wall-{namespace + 1}-{dead.pid}-1-0"
    other = controller.parent / f"expert-tier-notes-{dead.pid}"
    made = [leftover, leftover / "inner", reused, foreign, other]
    for folder in made:
        folder.mkdir()
    try:
        inside = launch_in(Group(leftover / "inner", controller.version), ["sleep", "60"])
        said = remove_leftovers()
        assert inside.wait(timeout=10) == -signal.SIGKILL
        assert not leftover.exists()
        assert not reused.exists()
        assert any(str(leftover) in sentence and "1 processes" in sentence for sentence in said)
        assert foreign.is_dir()
        assert other.is_dir()
        assert wall.folder.is_dir()
        assert not any(str(kept) in sentence for sentence in remove_leftovers() for kept in (foreign, other))
    finally:
        for folder in reversed(made):
            if folder.exists():
                folder.rmdir()


def test_a_forked_copy_of_the_supervisor_leaves_the_group_alone(controller: MemoryController) -> None:
    script = """
        import os, sys
        from replayer.capacity import find_memory_controller, memory_group
        group = memory_group(find_memory_controller(), "wall")
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        print(group.folder.exists(), group.folder)
    """
    done = run_script(script)
    existed, folder = done.stdout.split()
    assert existed == "True"
    assert not Path(folder).exists()


def test_balloon_is_locked_alive_and_gone(locking: None) -> None:
    before = machine_locked_bytes(Path("/proc/meminfo").read_bytes())
    with Balloon.inflate(64 * MIB + 1) as balloon:
        assert balloon.size_bytes == 64 * MIB + PAGE_BYTES
        assert balloon.alive()
        assert balloon.locked_bytes() == balloon.size_bytes
        status, stat = balloon.status_file.read_bytes(), balloon.stat_file.read_bytes()
        assert balloon_state(status, stat) == (balloon.size_bytes, balloon.start_time_ticks)
        assert before is None or (balloon.machine_locked_bytes or 0) >= 64 * MIB
    assert not balloon.alive()
    assert balloon.locked_bytes() is None
    assert not balloon.status_file.exists()
    balloon.deflate()


def test_killed_balloon_is_seen_dead_also_through_open_descriptors(locking: None) -> None:
    with Balloon.inflate(16 * MIB) as balloon:
        descriptor = os.open(balloon.status_file, os.O_RDONLY)
        assert balloon_state(os.pread(descriptor, 65536, 0), b"")[0] == 16 * MIB
        os.kill(balloon.pid, signal.SIGKILL)
        # It is not waited for: a zombie has no memory to speak of.
        assert until(lambda: not balloon.alive())
        assert balloon_state(os.pread(descriptor, 65536, 0), b"")[0] is None
        balloon.deflate()
        with pytest.raises(ProcessLookupError):
            os.pread(descriptor, 65536, 0)
        os.close(descriptor)


def test_another_process_with_the_number_of_the_balloon_is_not_the_balloon(locking: None) -> None:
    with Balloon.inflate(16 * MIB) as balloon:
        assert balloon.start_time_ticks is not None
        balloon.start_time_ticks += 1
        assert not balloon.alive()
        assert balloon.locked_bytes() is None


def test_balloon_in_a_group_is_charged_there(locking: None, controller: MemoryController) -> None:
    with memory_group(controller, "machine") as machine:
        machine.set_limit_bytes(256 * MIB)
        with Balloon.inflate(128 * MIB, machine) as balloon:
            assert machine.processes() == [balloon.pid]
            assert (machine.anonymous_bytes() or 0) >= 128 * MIB
        assert machine.processes() == []
        assert (machine.anonymous_bytes() or 0) < 16 * MIB
        with pytest.raises(NotEnforceable, match="has room for"):
            Balloon.inflate(240 * MIB, machine)
        assert machine.oom_kills() == 0


def test_balloon_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(NotEnforceable, match="bytes available and keeps") as refusal:
        Balloon.inflate(2**50)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="more than 0"):
        Balloon.inflate(0)


def test_balloon_killed_while_it_fills_is_refused(locking: None, controller: MemoryController) -> None:
    with memory_group(controller, "machine") as machine:

        def kill() -> None:
            until(lambda: (machine.anonymous_bytes() or 0) > 32 * MIB)
            machine.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            with pytest.raises(NotEnforceable, match="killed by signal 9"):
                Balloon.inflate(1024 * MIB, machine)
        finally:
            thread.join()


def test_balloon_that_takes_too_long_is_refused_and_gone(locking: None, controller: MemoryController) -> None:
    with memory_group(controller, "machine") as machine:
        with pytest.raises(NotEnforceable, match="not locked within"):
            Balloon.inflate(256 * MIB, machine, timeout_s=0.0)
        assert machine.processes() == []


def test_without_the_right_to_lock_the_limit_is_named() -> None:
    script = """
        import ctypes, os, resource
        from replayer.capacity import Balloon, NotEnforceable
        if os.geteuid() == 0:
            # PR_CAPBSET_DROP of CAP_IPC_LOCK: what is executed from here on does not have it.
            assert ctypes.CDLL(None).prctl(24, 14, 0, 0, 0) == 0
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
        try:
            Balloon.inflate(8 << 20)
        except NotEnforceable as refusal:
            print(refusal)
    """
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_MEMLOCK is 1,048,576 bytes and CAP_IPC_LOCK is missing" in done.stdout
    assert "ulimit -l" in done.stdout
    assert done.stdout.count("\n") == 1


def test_balloon_dies_with_its_parent(locking: None) -> None:
    script = """
        import time
        from replayer.capacity import Balloon
        balloon = Balloon.inflate(16 << 20)
        print(balloon.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=ENVIRONMENT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not is_running(pid), 5.0)


def test_balloon_whose_parent_is_already_gone_kills_itself() -> None:
    script = REPOSITORY / "replayer" / "capacity.py"
    orphan = subprocess.run([sys.executable, "-I", "-S", script, "65536", "1"], stdin=subprocess.DEVNULL, timeout=20)
    assert os.getpid() != 1
    assert orphan.returncode == -signal.SIGKILL


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


SUPERVISOR = """
    import os, signal, sys
    from contextlib import ExitStack
    from replayer.capacity import Balloon, find_memory_controller, launch_in, memory_group
    CHILD = "import os, sys, time; from replayer.capacity import die_with_parent; "
    CHILD += "die_with_parent(int(sys.argv[1])); time.sleep(60)"
    def stop(number, frame):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, stop)
    controller = find_memory_controller()
    print("go", flush=True)
    while True:
        with ExitStack() as held:
            machine = held.enter_context(memory_group(controller, "machine"))
            machine.set_limit_bytes(256 << 20)
            balloon = held.enter_context(Balloon.inflate(16 << 20, machine))
            wall = held.enter_context(memory_group(controller, "wall"))
            wall.set_limit_bytes(64 << 20)
            launch_in(wall, [sys.executable, "-c", CHILD, str(os.getpid())])
            assert balloon.alive()
"""


def stopped_supervisor(number: int, after_s: float) -> int:
    """Pid of a supervisor that was sent `number` so long after it began to make and release things."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SUPERVISOR)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == b"go\n"
    time.sleep(after_s)
    supervisor.send_signal(number)
    _, said = supervisor.communicate(timeout=20)
    if number != signal.SIGKILL:
        assert b"KeyboardInterrupt" in said, said
        assert b"Error" not in said, said
    return supervisor.pid


def groups_of(controller: MemoryController, pid: int) -> list[Path]:
    return [folder for folder in controller.parent.rglob("expert-tier-*") if f"-{pid}-" in folder.name]


def children_of(pid: int) -> list[int]:
    """Running processes that were started with the supervisor's pid as their last argument."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if len(words) > 2 and words[-2] == str(pid).encode() and is_running(int(folder.name)):
                found.append(int(folder.name))
    return found


def test_sigkill_at_any_point_leaves_only_what_the_next_start_removes(
    locking: None, controller: MemoryController
) -> None:
    drawn = random.Random(3)
    had_leftovers = 0
    for _ in range(8):
        pid = stopped_supervisor(signal.SIGKILL, drawn.uniform(0.0, 0.5))
        had_leftovers += bool(groups_of(controller, pid))
        remove_leftovers()
        assert groups_of(controller, pid) == []
        assert until(lambda pid=pid: children_of(pid) == [], 5.0)
    assert had_leftovers > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_at_any_point_leaves_nothing(
    locking: None, controller: MemoryController, number: signal.Signals
) -> None:
    drawn = random.Random(number)
    for _ in range(8):
        pid = stopped_supervisor(number, drawn.uniform(0.0, 0.5))
        assert groups_of(controller, pid) == []
        assert until(lambda pid=pid: children_of(pid) == [], 5.0)


def test_reader_becomes_the_first_to_be_killed() -> None:
    done = run_script(
        """
        from replayer.capacity import raise_own_oom_score
        raise_own_oom_score()
        print(open("/proc/self/oom_score_adj").read())
        """
    )
    assert done.stdout.split() == ["1000"]


def test_module_loads_nothing_but_the_standard_library() -> None:
    done = run_script(
        """
        import sys
        before = set(sys.modules)
        import replayer.capacity
        loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*loaded - sys.stdlib_module_names)
        """
    )
    assert done.stdout.split() == ["replayer"]
