"""The probe: what it says here, that it needs no root and leaves nothing behind, and the bandwidth it reads."""

import fcntl
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from replayer import probe as probing
from replayer.capacity import NotEnforceable
from replayer.cli import main
from replayer.counters import PAGE_BYTES, drop, resident_bytes
from replayer.machine import machine_row, storage_of
from replayer.probe import NothingToRead, probe, read_bandwidth
from schemas.documents import Probe

ROOT = Path(__file__).parents[1]
EXPERT_BYTES = 3 * PAGE_BYTES + 100


@pytest.fixture
def pool(tmp_path):
    """Three files that hold 2 experts each and one that holds none, on a disk."""
    if storage_of(tmp_path).kind != "disk":
        pytest.skip(f"{storage_of(tmp_path).filesystem} is no disk")
    for number in range(3):
        (tmp_path / f"{number}.safetensors").write_bytes(os.urandom(7 * PAGE_BYTES + 100))
    (tmp_path / "small").write_bytes(b"small")
    for file in tmp_path.iterdir():
        drop(file)
    return tmp_path


def named(capabilities, name):
    (found,) = [one for one in capabilities if one.name == name]
    return found


def test_every_answer_has_a_reason_and_names_are_told_once(pool):
    capabilities = probe(pool)
    assert all(one.found for one in capabilities)
    assert len({(one.group, one.name) for one in capabilities}) == len(capabilities)
    groups = list(dict.fromkeys(one.group for one in capabilities))
    assert groups == ["memory limit", "counters", "storage", "read paths", "reclaim", "privileges", "devices"]
    assert named(capabilities, "pread with FADV_RANDOM").available


def test_an_answer_is_about_the_folder(pool):
    here = probe(pool)
    assert named(here, "suitable for a pool").available
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    there = probe(Path("/dev/shm"))
    assert not named(there, "suitable for a pool").available
    assert named(there, "suitable for a pool").remedy
    assert not named(there, "block device").available


def test_without_a_file_read_paths_are_unknown_not_absent(tmp_path):
    direct = named(probe(tmp_path), "O_DIRECT")
    assert direct.available is None
    assert direct.remedy


def test_trials_leave_files_and_their_pages_in_memory_as_they_were(pool):
    before = {file.name: file.stat().st_mtime_ns for file in pool.iterdir()}
    probe(pool)
    assert {file.name: file.stat().st_mtime_ns for file in pool.iterdir()} == before
    assert resident_bytes(pool.iterdir()) == 0
    for file in pool.iterdir():
        file.read_bytes()
    resident = resident_bytes(pool.iterdir())
    probe(pool)
    assert resident_bytes(pool.iterdir()) == resident


def test_files_of_other_mounts_below_the_folder_are_not_tried():
    # Below / lies /proc/kcore, a regular file of 128 TiB.
    device = Path("/").stat().st_dev
    assert all(file.stat().st_dev == device for file in probing._files(Path("/")))


def test_no_descriptor_group_or_lock_stays(pool):
    probe(pool)
    before = len(list(Path("/proc/self/fd").iterdir()))
    state = machine_row(storage_of(pool))
    locked = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")]
    probe(pool)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert machine_row(storage_of(pool)) == state
    assert locked == [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")]


def test_a_refusal_of_the_memory_controller_is_told_with_its_remedy(pool, monkeypatch):
    def refuse():
        raise NotEnforceable("because", "then do")

    monkeypatch.setattr(probing, "find_memory_controller", refuse)
    found = [one for one in probe(pool) if one.name in ("cgroup v1 memory", "cgroup v2 memory")]
    assert [one.available for one in found] == [False, False]
    assert all(one.found and one.remedy for one in found)
    assert any(one.remedy == "then do" for one in found)


def test_the_balloon_is_bounded_by_the_limit_where_the_capability_is_missing(monkeypatch):
    monkeypatch.setattr(probing, "_has_capability", lambda name: False)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    balloon = probing._balloon("memory limit")
    assert not balloon.available
    assert "8.00 MiB" in balloon.found
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert probing._balloon("memory limit").available


@pytest.mark.parametrize(
    "cgroup2", ["0::/\n", "4:memory:/own\n0::/\n", "7:blkio:/\n", "", "1:name=systemd:/a:b\n"], ids=repr
)
def test_any_membership_is_answered(pool, monkeypatch, cgroup2):
    real = probing.read_counter_file
    monkeypatch.setattr(
        probing, "read_counter_file", lambda path: cgroup2.encode() if path == "/proc/self/cgroup" else real(path)
    )
    assert named(probe(pool), "cgroup I/O").found


def test_a_capability_of_another_user_namespace_locks_nothing(monkeypatch):
    answers = {
        "/proc/self/uid_map": b"         0       1000          1\n",
        "/proc/self/status": b"CapEff:\t1ffffffffff\n",
    }
    monkeypatch.setattr(probing, "read_counter_file", lambda path: answers[str(path)])
    assert not probing._has_capability("CAP_IPC_LOCK")
    answers["/proc/self/uid_map"] = b"         0          0 4294967295\n"
    assert probing._has_capability("CAP_IPC_LOCK")


def test_every_extent_is_read_once(pool):
    found = read_bandwidth(pool, EXPERT_BYTES)
    # 7 pages and a bit hold two experts of 3 pages and a bit, each from a page's begin on.
    assert found.reads == 6
    assert found.read_bytes == found.reads * EXPERT_BYTES
    assert found.threads == 6
    assert found.elapsed_ns > 0
    if found.device_bytes is not None:
        assert found.device_bytes >= found.read_bytes


def test_direct_reads_leave_nothing_in_memory(pool):
    if not probing._takes_direct(pool / "0.safetensors"):
        pytest.skip("no O_DIRECT here")
    found = read_bandwidth(pool, PAGE_BYTES)
    assert (found.method, found.reads) == ("O_DIRECT", 21)
    assert resident_bytes(pool.iterdir()) == 0


def test_buffered_reads_are_cold_and_dropped_again(pool, monkeypatch):
    (pool / "0.safetensors").read_bytes()
    monkeypatch.setattr(probing, "_takes_direct", lambda file: False)
    found = read_bandwidth(pool, PAGE_BYTES)
    assert found.reads == 21
    assert "FADV_RANDOM, cold" in found.method
    assert resident_bytes(pool.iterdir()) == 0


def test_no_more_is_read_than_the_limit_and_nothing_after_the_deadline(pool, monkeypatch):
    monkeypatch.setattr(probing, "MAX_BANDWIDTH_BYTES", 5 * PAGE_BYTES)
    assert read_bandwidth(pool, PAGE_BYTES).reads == 5
    monkeypatch.setattr(probing, "BANDWIDTH_SECONDS", 0)
    assert read_bandwidth(pool, PAGE_BYTES).reads == 0


def test_what_holds_no_expert_or_is_sparse_is_refused(pool, tmp_path):
    with pytest.raises(NothingToRead, match=f"the largest has {7 * PAGE_BYTES + 100:,}"):
        read_bandwidth(pool, 1 << 20)
    with pytest.raises(NothingToRead, match="wanted 1 to"):
        read_bandwidth(pool, 1 << 40)
    with (pool / "9.hole").open("wb") as file:
        file.truncate(1 << 22)
    with pytest.raises(NothingToRead, match="sparse"):
        read_bandwidth(pool, 1 << 20)


def test_a_file_that_shrinks_is_an_error_not_a_bandwidth(pool, monkeypatch):
    monkeypatch.setattr(probing, "_extents", lambda folder, size, most: [(pool / "0.safetensors", 1 << 20)])
    with pytest.raises(OSError, match=r"0 bytes at 1,048,576.*0\.safetensors"):
        read_bandwidth(pool, PAGE_BYTES)


def test_extents_lie_apart_and_inside_their_files_and_are_the_same_every_time(pool, monkeypatch):
    extents = probing._extents(pool, PAGE_BYTES, 1000)
    assert extents == probing._extents(pool, PAGE_BYTES, 1000)
    assert sorted(extents) == sorted((pool / f"{n}.safetensors", i * PAGE_BYTES) for n in range(3) for i in range(7))
    monkeypatch.setattr(probing, "_MAX_FILES_READ", 2)
    assert len({file for file, _ in probing._extents(pool, PAGE_BYTES, 1000)}) == 2


def test_a_pool_that_is_replayed_is_left_alone(pool, capsys):
    descriptor = os.open(pool, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="builds or replays"):
            read_bandwidth(pool, PAGE_BYTES)
        assert main(["probe", "--pool", str(pool), "--expert-bytes", "4KiB"]) == 0
        assert "builds or replays" in capsys.readouterr().out
    finally:
        os.close(descriptor)
    assert read_bandwidth(pool, PAGE_BYTES).reads == 21


def test_the_command_prints_lines_and_a_document(pool, capsys):
    assert main(["probe", "--pool", str(pool), "--expert-bytes", str(PAGE_BYTES)]) == 0
    printed = capsys.readouterr().out
    assert "GB/s: 21 reads of" in printed
    assert "cgroup v1 memory" in printed
    assert main(["probe", "--pool", str(pool), "--expert-bytes", "4KiB", "--json"]) == 0
    document = Probe.model_validate_json(capsys.readouterr().out, strict=True)
    assert document.machine == machine_row(storage_of(pool))
    assert document.folder == str(pool)
    assert named(document.capabilities, "bandwidth at expert size").available
    assert document.bandwidth.read_bytes == document.bandwidth.reads * 4096


def test_without_a_pool_the_command_says_how_to_get_the_bandwidth(tmp_path, capsys):
    assert main(["probe", "--folder", str(tmp_path), "--json"]) == 0
    document = Probe.model_validate_json(capsys.readouterr().out, strict=True)
    assert document.bandwidth is None
    bandwidth = named(document.capabilities, "bandwidth at expert size")
    assert bandwidth.available is None
    assert "--pool DIR --expert-bytes B" in bandwidth.remedy


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["probe", "--folder", str(tmp_path / "gone")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "file").write_bytes(b"x")
    assert main(["probe", "--folder", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_name_that_is_no_text_can_be_printed(pool):
    raw = os.fsencode(pool) + b"/\xff\xfe"
    Path(os.fsdecode(raw)).write_bytes(bytes(9 * PAGE_BYTES))
    done = subprocess.run(
        [sys.executable, "-m", "replayer", "probe", "--folder", pool], capture_output=True, cwd=ROOT, check=True
    )
    assert rb"\udcff\udcfe are in memory" in done.stdout


def test_the_probe_needs_no_root(pool):
    if os.geteuid() != 0:
        pytest.skip("the other tests run without root already")
    # Imported first: the interpreter's own folders may be closed to others.
    program = (
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport email.parser\nimport replayer.cli\n"
        "os.chdir('/'), os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
        "sys.exit(replayer.cli.main(['probe', '--folder', '/usr/bin', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    capabilities = [probing.Capability(**one) for one in json.loads(done.stdout)["capabilities"]]
    for name in ("CAP_IPC_LOCK", "CAP_SYS_ADMIN", "pages of a file"):
        assert named(capabilities, name).available is False
        assert named(capabilities, name).remedy
    assert named(capabilities, "pread with FADV_RANDOM").available
    assert not any(one.available for one in capabilities if one.name.startswith("cgroup v"))
