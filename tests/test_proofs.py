"""Each proof against a real run into which its fault was put; and that nothing else is blamed for it."""

import contextlib
import copy
import dataclasses
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayer import replay as supervisor
from replayer.accounting import Recording, account
from replayer.capacity import Group, find_memory_controller, memory_group
from replayer.counters import drop
from replayer.pool import Pool, read_pool
from replayer.proofs import Proof, prove, verdicts
from replayer.simulate import MemoryWalk
from replayer.trace import Trace
from tests.builders import make_trace
from tests.private_disk import on_private_disk
from tests.replays import (
    KIB,
    MIB,
    PAGE,
    balloon_of,
    failed,
    interfered,
    measured_by,
    needs_memory_groups,
    our_groups,
    pool_for,
    proof,
    reader_of,
    replayed,
    routing,
    tampered,
)

EXPERT_BYTES = 64 * KIB
WALL_BYTES = 8 * MIB


@pytest.fixture(scope="module")
def trace() -> Trace:
    """600 events of 4 accesses, on 256 experts of four layers with gaps between."""
    return make_trace(routing(150, experts=64), layer_ids=[1, 2, 5, 9], num_experts=64)


@pytest.fixture(scope="module")
def pool(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """16 MiB in four files."""
    return pool_for(trace, tmp_path_factory.mktemp("proofs") / "pool", EXPERT_BYTES)


@pytest.fixture(scope="module")
def other_file(pool: Pool) -> Path:
    """40 MiB on the pool's device that are none of the pool."""
    file = pool.folder.parent / "other"
    with file.open("wb") as out:
        for _ in range(40):
            out.write(os.urandom(MIB))
        out.flush()
        os.fsync(out.fileno())
    return file


@pytest.fixture
def own_pool(pool: Pool, tmp_path: Path) -> Pool:
    """A copy of the pool that may be spoilt."""
    shutil.copytree(pool.folder, tmp_path / "pool")
    return read_pool(tmp_path / "pool")


def read_all(folder: Path) -> None:
    for file in sorted(folder.rglob("*.safetensors")):
        file.read_bytes()


@contextlib.contextmanager
def beside(program: str, *arguments: object) -> Iterator[None]:
    """A neighbour: a Python program that runs until the block ends, and says a line when it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# What was planned


def test_dropped_event_breaks_conservation(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = supervisor.prepare

    def shortened(*arguments: Any, **named: Any) -> Any:
        resolved = honest(*arguments, **named)
        walk = resolved.walk
        last = int(walk.first_access[-2])
        less = {name: getattr(walk, name)[:-1] for name in ("first_access", "layer", "step", "phase", "selections")}
        return dataclasses.replace(
            resolved, pieces=MemoryWalk(dataclasses.replace(walk, objects=walk.objects[:last], **less))
        )

    monkeypatch.setattr(supervisor, "prepare", shortened)
    run = replayed(trace, pool, warm_pass=False)
    assert failed(run) == {"selections conserved", "reads conserved"}
    assert proof(run, "selections conserved")["found"] == "2,396"
    assert "2,400 = 600 rows × 4" in run.run["bytes_reasons"]


def test_skipped_access_is_missed_by_reads_bytes_and_digest(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skip(arrays: dict[str, Any]) -> None:
        arrays["event_first_access"][-1] -= 1

    tampered(monkeypatch, skip)
    run = replayed(trace, pool, warm_pass=False)
    assert failed(run) == {"reads conserved", "bytes returned", "digest"}
    assert run.run["reads"] == 2399
    assert run.run["returned_bytes"] == run.run["demand_bytes"] - EXPERT_BYTES


def test_short_read_plan_returns_too_little(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def shorten(arrays: dict[str, Any]) -> None:
        arrays["extent_wanted"][arrays["objects"][0]] -= PAGE

    tampered(monkeypatch, shorten)
    run = replayed(trace, pool, warm_pass=False)
    assert {"reads conserved", "bytes returned", "digest"} <= failed(run)
    assert not run.run["bytes_valid"]


def test_another_expert_of_the_same_size_changes_the_digest_alone(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(arrays: dict[str, Any]) -> None:
        event = set(arrays["objects"][:4].tolist())
        arrays["objects"][0] = min(set(range(64)) - event)

    tampered(monkeypatch, exchange)
    run = replayed(trace, pool, warm_pass=False)
    assert failed(run) == {"digest"}


# What the pool holds


@contextlib.contextmanager
def damaged(pool: Pool, obj: int, offset: int) -> Iterator[None]:
    """One byte of an expert is wrong inside the block; the file's time stays."""
    extent = int(pool.object_first_extent[obj])
    file = pool.folder / pool.files[pool.extent_file[extent]]
    place = int(pool.extent_offset_bytes[extent]) + offset

    def flip() -> None:
        before = file.stat()
        with file.open("r+b") as opened:
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 0x10]))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    flip()
    try:
        yield
    finally:
        flip()


def most_used(trace: Trace) -> int:
    """An object that is accessed for certain."""
    return int(trace.expert_ids[0, 0]) + int(trace.layer_first_object[trace.event_layer[0]])


@pytest.mark.parametrize(
    ("offset", "verify", "names"),
    [
        (100, "edges", {"content"}),
        (EXPERT_BYTES - 1, "edges", {"content", "digest"}),
        # What lies between the first and the last page is looked at only where all is.
        (EXPERT_BYTES // 2, "edges", set()),
        (EXPERT_BYTES // 2, "all", {"content"}),
    ],
)
def test_wrong_byte_is_found_where_it_is_looked_for(
    trace: Trace, pool: Pool, offset: int, verify: str, names: set[str]
) -> None:
    obj = most_used(trace)
    if PAGE > EXPERT_BYTES // 4:
        pytest.skip("pages too large for a middle")
    with damaged(pool, obj, offset):
        run = replayed(trace, pool, verify=verify, warm_pass=False, steps=(0, 20))
    assert failed(run) == names
    assert run.run["bytes_valid"] is not bool(names)
    if names:
        used = [event for event in trace.expert_ids[:80:4].tolist() if obj in event]
        assert proof(run, "content")["found"].startswith(f"{len(used)} of ")


def test_pool_file_written_during_the_run(trace: Trace, own_pool: Pool) -> None:
    file = own_pool.folder / own_pool.files[0]
    place = int(own_pool.extent_offset_bytes[0])

    def overwrite(_reader: int) -> None:
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(bytes(EXPERT_BYTES))

    run = interfered(trace, own_pool, overwrite)
    assert failed(run) == {"content", "digest", "pool files unchanged"}
    assert own_pool.files[0] in proof(run, "pool files unchanged")["found"]


def test_pool_files_touched_and_replaced_during_the_run(trace: Trace, pool: Pool, own_pool: Pool) -> None:
    replaced, touched = (own_pool.folder / own_pool.files[file] for file in (1, 2))

    def act(_reader: int) -> None:
        os.utime(touched)
        # The same bytes, size and time: another file all the same.
        before = replaced.stat()
        shutil.copyfile(pool.folder / pool.files[1], replaced.with_name("copy"))
        replaced.with_name("copy").replace(replaced)
        os.utime(replaced, ns=(before.st_atime_ns, before.st_mtime_ns))

    run = interfered(trace, own_pool, act)
    assert failed(run) == {"pool files unchanged"}
    assert "2 changed, first layer_00002.safetensors" in run.run["bytes_reasons"]


def test_pool_that_another_process_holds_mapped_is_not_absent(trace: Trace, pool: Pool) -> None:
    with (pool.folder / pool.files[1]).open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        held = sum(mapping[place] is not None for place in range(0, len(mapping), PAGE))
        run = replayed(trace, pool, warm_pass=False)
        mapping.close()
    assert failed(run) == {"pool absent at the cold start"}
    assert run.run["cold_resident_bytes"] == held * PAGE
    # It read what was missing, and that is less than what it used for the first time.
    assert run.run["device_bytes"] == run.run["missing_bytes"]


# What the device delivered


def test_readahead_breaks_the_identity_of_device_and_missing_bytes(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_by(monkeypatch, "os.posix_fadvise = lambda *_: None")
    run = replayed(trace, pool, warm_pass=False)
    if not (run.machine["read_ahead_bytes"] or 0) > EXPERT_BYTES:
        pytest.skip("the device reads nothing ahead here")
    assert "device bytes" in failed(run)
    assert run.run["raced_pages"] > 0


def test_neighbour_that_drops_pages_between_look_and_read(trace: Trace, pool: Pool) -> None:
    program = """
import os, sys
files = [os.open(name, os.O_RDONLY) for name in sys.argv[1:]]
print(flush=True)
while True:
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
"""
    with beside(program, *(pool.folder / name for name in pool.files)):
        run = replayed(trace, pool)
    assert "device bytes" in failed(run)
    assert run.run["raced_pages"] != 0
    assert "pages apart" in run.run["bytes_reasons"]


def test_neighbour_that_loads_the_pool_gives_free_hits(trace: Trace, pool: Pool) -> None:
    run = interfered(trace, pool, lambda _reader: read_all(pool.folder), share=0.01, warm_pass=False)
    assert "pool loaded by this run alone" in failed(run)
    assert run.run["device_bytes"] < run.run["resident_max_bytes"] == pool.file_bytes.sum() // PAGE * PAGE


def test_pages_dropped_meanwhile_spoil_times_alone(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine does that pages out what is idle: they are missing before they are read again."""
    arrays: dict[str, Any] = {}
    tampered(monkeypatch, arrays.update)

    def page_out(_reader: int) -> None:
        # Not what is being read now: events go through the layers, and each layer has its file.
        now = int(arrays["control"][supervisor.loop.EVENTS_DONE])
        drop(pool.folder / pool.files[(now + 2) % 4])

    run = interfered(trace, pool, page_out)
    assert failed(run) == set()
    assert run.run["device_bytes"] == run.run["missing_bytes"] > 0
    assert "no idle page-out by the machine" in failed(run, "time")


def test_own_faults_are_counted_apart(
    trace: Trace, pool: Pool, other_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the reader causes outside its demand threads are not the pool's."""
    drop(other_file)
    measured_by(
        monkeypatch,
        f"""
run_pass = measure.Measurement.run_pass
def also_reading(self):
    with open({str(other_file)!r}, "rb") as file:
        while file.read(1 << 20):
            pass
    return run_pass(self)
measure.Measurement.run_pass = also_reading
""",
    )
    run = replayed(trace, pool, warm_pass=False)
    assert failed(run) == set()
    assert run.run["own_fault_bytes"] >= 40 * MIB
    assert run.run["device_bytes"] == run.run["missing_bytes"]


def test_neighbour_on_the_same_device_spoils_times_alone(trace: Trace, pool: Pool, other_file: Path) -> None:
    drop(other_file)
    run = interfered(trace, pool, lambda _reader: other_file.read_bytes(), warm_pass=False)
    if run.run["neighbor_bytes"] is None:
        pytest.skip("the pool's device counts nothing here")
    assert failed(run) == set()
    assert "no neighbour on the device" in failed(run, "time")
    assert run.run["neighbor_bytes"] >= 39 * MIB
    assert run.run["bytes_valid"]
    assert not run.run["time_valid"]


# What limits memory


@pytest.fixture
def walls() -> None:
    needs_memory_groups()


WALLED = {"mechanism": "cgroup", "capacity_bytes": WALL_BYTES}


def own_group() -> Group:
    """The group of the run that is going on."""
    (folder,) = [group for group in our_groups() if f"-{os.getpid()}-" in group.name]
    return Group(folder, find_memory_controller().version)


@pytest.mark.usefixtures("walls")
def test_pages_that_another_group_pays_for_are_above_the_wall(trace: Trace, pool: Pool) -> None:
    run = interfered(trace, pool, lambda _reader: read_all(pool.folder), **WALLED)
    assert "resident within the wall" in failed(run)
    assert run.run["resident_max_bytes"] > WALL_BYTES * 1.5
    # The limit was there all the time; that alone would prove nothing.
    assert proof(run, "wall alive")["held"] is True


@pytest.mark.usefixtures("walls")
def test_wall_raised_during_the_run(trace: Trace, pool: Pool) -> None:
    run = interfered(trace, pool, lambda _reader: own_group().set_limit_bytes(512 * MIB), **WALLED)
    assert {"wall alive", "resident within the wall"} <= failed(run)
    assert f"{512 * MIB:,} bytes" in proof(run, "wall alive")["found"]
    assert our_groups() == []


@pytest.mark.usefixtures("walls")
def test_measured_pass_in_a_second_scope(trace: Trace, pool: Pool) -> None:
    with memory_group(find_memory_controller(), "wall") as second:
        run = interfered(trace, pool, lambda reader: second.procs_file.write_text(str(reader)), **WALLED)
        assert {"one scope", "resident within the wall"} <= failed(run)
        assert second.processes() == []
    assert proof(run, "wall alive")["held"] is True


@pytest.mark.usefixtures("walls")
def test_reader_that_outgrows_its_limit_is_killed_and_says_so(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_by(
        monkeypatch,
        """
run_pass = measure.Measurement.run_pass
passes = []
def hoarding(self):
    passes.append(None)
    if len(passes) == 2:
        self.hoard = bytearray(b"x") * (64 << 20)
    return run_pass(self)
measure.Measurement.run_pass = hoarding
""",
    )
    run = replayed(trace, pool, **WALLED)
    assert run.run["status"] == "killed"
    assert "its memory limit did not suffice; allow more --headroom" in run.run["failure"]
    assert {"no out-of-memory kill", "run complete"} <= failed(run)
    assert "group 1" in proof(run, "no out-of-memory kill")["found"]
    # What could not be looked at any more is not blamed.
    assert not {"wall alive", "one scope", "content"} & failed(run)
    assert our_groups() == []


@pytest.fixture(scope="module")
def large_trace() -> Trace:
    return make_trace(routing(100, experts=128, k=8), layer_ids=[0, 1, 2, 3], num_experts=128)


@pytest.fixture(scope="module")
def large_pool(large_trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """32 MiB: a balloon leaves the machine it stands in some 20 MiB at least."""
    return pool_for(large_trace, tmp_path_factory.mktemp("proofs") / "large", EXPERT_BYTES)


@pytest.mark.usefixtures("walls")
def test_balloon_killed_half_way(large_trace: Trace, large_pool: Pool) -> None:
    run = interfered(
        large_trace,
        large_pool,
        lambda _reader: os.kill(balloon_of(os.getpid()), signal.SIGKILL),
        share=0.5,
        mechanism="balloon",
        capacity_bytes=24 * MIB,
        outer_group_bytes=512 * MIB,
    )
    assert run.run["status"] == "complete"
    assert {"balloon alive", "locked memory not lower"} <= failed(run)
    without = int(proof(run, "balloon alive")["found"].split(" of ")[0])
    assert 30 <= without <= 51
    assert our_groups() == []


def test_machine_that_changes_during_the_run(tmp_path: Path) -> None:
    outcome = on_private_disk("read_ahead", tmp_path)
    # A loop device is marked as such.
    assert {one["name"] for one in outcome["proofs"] if one["held"] is False and one["spoils"] == "bytes"} == {
        "machine state unchanged",
        "pool on a device",
    }
    (found,) = [one["found"] for one in outcome["proofs"] if one["name"] == "machine state unchanged"]
    assert found == "read_ahead_bytes 131072 became 65536"
    assert outcome["run"]["bytes_valid"] is False


# What happened at the same time


def test_foreign_load_spoils_times_alone(trace: Trace, pool: Pool) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(-(-(os.cpu_count() or 1) * 3 // 10)):
            stack.enter_context(beside("print(flush=True)\nwhile True: pass"))
        run = interfered(trace, pool, lambda _reader: time.sleep(0.4), warm_pass=False)
    assert failed(run) == set()
    assert "no foreign load" in failed(run, "time")


@pytest.fixture(scope="module")
def recording(trace: Trace, pool: Pool) -> Recording:
    """What a sound run left behind, before it was judged."""
    kept: list[Recording] = []

    def keep(recording: Recording) -> Any:
        arrays = {name: array.copy() for name, array in recording.arrays.items()}
        kept.append(dataclasses.replace(recording, arrays=arrays))
        return account(recording)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervisor, "account", keep)
        replayed(trace, pool)
    return kept[0]


def judged(recording: Recording) -> tuple[dict[str, Any], dict[str, Proof]]:
    run, _, _ = account(recording)
    proofs = prove(recording, run)
    return {**run, **verdicts(proofs)}, {one.name: one for one in proofs}


def altered(recording: Recording, **changes: Any) -> Recording:
    """The recording with what `changes` says; snapshots and arrays are copies that may be written to."""
    mutable = {
        "arrays": {name: array.copy() for name, array in recording.arrays.items()},
        **{
            name: copy.deepcopy(getattr(recording, name))
            for name in ("before", "after", "machine_before", "machine_after")
        },
    }
    return dataclasses.replace(recording, **{**mutable, **changes})


def not_held(proofs: dict[str, Proof], spoils: str) -> set[str]:
    return {name for name, one in proofs.items() if one.held is False and one.spoils == spoils}


def grown(text: str, name: str, by: int) -> str:
    """A counter file's text with one number larger."""
    lines = text.splitlines(keepends=True)
    (at,) = [number for number, line in enumerate(lines) if line.split()[:1] == [name]]
    lines[at] = f"{name} {int(lines[at].split()[1]) + by}\n"
    return "".join(lines)


def test_recording_is_sound_as_it_is(recording: Recording) -> None:
    run, proofs = judged(recording)
    assert run["bytes_valid"]
    assert not_held(proofs, "bytes") == set()


@pytest.mark.parametrize(("counter", "words"), [("pswpin", "1 in, 0 out"), ("pswpout", "0 in, 1 out")])
def test_swap_spoils_the_bytes(recording: Recording, counter: str, words: str) -> None:
    changed = altered(recording)
    changed.after["text"]["vmstat"] = grown(changed.after["text"]["vmstat"], counter, 1)
    run, proofs = judged(changed)
    assert not_held(proofs, "bytes") == {"no swap"}
    assert proofs["no swap"].found.startswith(words)
    assert not run["bytes_valid"]


def test_swapped_reader_spoils_the_bytes(recording: Recording) -> None:
    changed = altered(recording)
    lines = [line for line in changed.after["text"]["status"].splitlines() if not line.startswith("VmSwap:")]
    changed.after["text"]["status"] = "\n".join([*lines, "VmSwap:\t       8 kB"]) + "\n"
    assert not_held(judged(changed)[1], "bytes") == {"no swap"}


def test_kill_for_want_of_memory_anywhere_spoils_the_bytes(recording: Recording) -> None:
    changed = altered(recording)
    changed.after["text"]["vmstat"] = grown(changed.after["text"]["vmstat"], "oom_kill", 1)
    assert not_held(judged(changed)[1], "bytes") == {"no out-of-memory kill"}


def test_step_that_is_too_long_spoils_times_alone(recording: Recording) -> None:
    changed = altered(recording)
    changed.arrays["step_end_ns"][3] += 50_000_000
    changed.arrays["check_end_ns"][3] += 50_000_000
    run, proofs = judged(changed)
    assert "step times sum to the interval" in not_held(proofs, "time")
    assert not_held(proofs, "bytes") == set()
    assert run["bytes_valid"]
    assert not run["time_valid"]


def test_stall_longer_than_its_steps_spoils_times_alone(recording: Recording) -> None:
    changed = altered(recording)
    changed.arrays["end_ns"][7] += 10**12
    _, proofs = judged(changed)
    assert "stalls within their steps" in not_held(proofs, "time")
    assert not_held(proofs, "bytes") == set()


def test_emulated_processor_spoils_times_alone(recording: Recording) -> None:
    changed = altered(recording)
    changed.machine_before["virtualization"] = changed.machine_after["virtualization"] = "qemu tcg"
    run, proofs = judged(changed)
    assert "no emulation" in not_held(proofs, "time")
    assert run["bytes_valid"]


def test_dear_checks_spoil_times_alone(recording: Recording) -> None:
    changed = altered(recording)
    changed.arrays["observe_ns"][0] += 10**12
    run, proofs = judged(changed)
    assert "checks are cheap" in not_held(proofs, "time")
    assert run["bytes_valid"]


def test_wrong_words_and_their_number(recording: Recording) -> None:
    changed = altered(recording)
    changed.arrays["wrong"][1] += 3
    _, proofs = judged(changed)
    assert not_held(proofs, "bytes") == {"content"}
    assert proofs["content"].found.startswith("3 of ")


def test_residency_that_was_not_counted_is_not_within_a_wall(recording: Recording) -> None:
    limits = dataclasses.replace(recording.limits, wall_bytes=512 * MIB)
    sound = altered(recording, limits=limits)
    assert judged(sound)[1]["resident within the wall"].held is True
    unknown = altered(recording, limits=limits)
    unknown.arrays["resident_pages"][5] = supervisor.loop.UNCOUNTED
    assert judged(unknown)[1]["resident within the wall"].held is False


def test_kernel_without_thread_counters_makes_no_device_proof(recording: Recording) -> None:
    changed = altered(recording)
    for snapshot in (changed.before, changed.after):
        for number in range(8):
            snapshot["text"][f"thread_io {number}"] = None
    run, proofs = judged(changed)
    assert run["device_bytes"] is None
    assert proofs["device bytes"].held is None
    assert "CONFIG_TASK_IO_ACCOUNTING" in proofs["device bytes"].found


def test_cut_off_run_blames_nothing_that_it_could_not_look_at(recording: Recording) -> None:
    """As after an interrupt in the third step: the last look was never taken."""
    changed = altered(recording, status="interrupted", failure="interrupted in the measured pass, step 2", after=None)
    changed = dataclasses.replace(changed, span=None)
    for name in ("check_end_ns", "step_end_ns"):
        changed.arrays[name][2:] = 0
    first = int(changed.walk.first_access[changed.step_first_event[2]])
    changed.arrays["returned"][first:] = supervisor.loop.NOT_REACHED
    run, proofs = judged(changed)
    assert not_held(proofs, "bytes") == {"run complete", "reads conserved", "bytes returned"}
    assert "CONFIG_TASK_IO_ACCOUNTING" not in proofs["device bytes"].found
    assert run["replayed_steps"] == 150
    assert run["observed_accesses"] == first
    assert run["device_bytes"] is None and run["interval_ns"] is None and run["consumed_digest"] is None


def test_no_reader_or_balloon_is_left(pool: Pool) -> None:
    """After everything above."""
    assert pool.folder.exists()
    with pytest.raises(ValueError, match="not enough values"):
        reader_of(os.getpid())
    with pytest.raises(ValueError, match="not enough values"):
        balloon_of(os.getpid())
    assert np.all([f"-{os.getpid()}-" not in group.name for group in our_groups()])
