"""A small machine as the limit: what is recognised, what is refused, and with which words."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer import replay as supervisor
from replayer.boot import LARGER_SLACK_BYTES, Calibration, boot_limit, boot_limit_bytes, calibrate
from replayer.capacity import NotEnforceable
from replayer.pool import Pool
from replayer.request import UnusableReplay, check_request
from replayer.trace import Trace
from tests.builders import make_trace, write_trace
from tests.replays import KIB, MIB, called, failed, pool_for, proof, replayed, request, routing

# What a guest with mem=192M says, rounded: 192 − 124 MiB are not available (kernel 6.12).
MEMINFO = b"MemTotal:         156000 kB\nMemFree:          130000 kB\nMemAvailable:     126976 kB\n"
CMDLINE = "console=ttyS0 quiet panic=-1 mem=192M\n"
AVAILABLE = 124 * MIB


@pytest.mark.parametrize(
    ("cmdline", "word", "size_bytes"),
    [
        (CMDLINE, "mem=192M", 192 * MIB),
        ("mem=4g mem=0x40000000", "mem=0x40000000", 1 << 30),
        ("mem=131072k", "mem=131072k", 128 * MIB),
        ("mem=0x100M", "mem=0x100M", 256 * MIB),
        ("mem=99", "mem=99", 99),
        ("mem=nopentium movablecore=768M crashkernel=mem=1G", None, None),
        ("", None, None),
    ],
)
def test_the_boot_limit_is_the_last_size_on_the_command_line(
    cmdline: str, word: str | None, size_bytes: int | None
) -> None:
    assert boot_limit(cmdline) == word
    if word is not None:
        assert boot_limit_bytes(word) == size_bytes


def test_without_a_capacity_the_machine_gives_what_it_has() -> None:
    found = calibrate(MEMINFO, CMDLINE, AVAILABLE, room_bytes=None, pool_bytes=64 * MIB)
    assert (found.room_bytes, found.memory_bytes) == (AVAILABLE, 156000 * 1024)
    assert found.detail == "booted with mem=192M"
    small = calibrate(MEMINFO, "quiet", AVAILABLE, room_bytes=None, pool_bytes=512 * MIB)
    assert small.detail == "a machine of 152.34 MiB"


def test_a_machine_that_holds_the_pool_and_was_not_booted_small_limits_nothing() -> None:
    with pytest.raises(NotEnforceable, match=r"all of the pool's 67,108,864 bytes may stay.*about mem=[0-9]+M"):
        calibrate(MEMINFO, "quiet", AVAILABLE, room_bytes=None, pool_bytes=64 * MIB)


@pytest.mark.parametrize(
    ("room_mib", "refusal"),
    [
        (124, None),
        (101, None),
        (99, "far more than the capacity and headroom of 103,809,024 bytes"),
        (125, "less than the capacity and headroom of 131,072,000 bytes"),
        (1, "far more"),
    ],
)
def test_a_machine_must_have_about_what_was_asked_for(room_mib: int, refusal: str | None) -> None:
    asked = {"room_bytes": room_mib * MIB, "pool_bytes": 1 << 30}
    if refusal is None:
        assert calibrate(MEMINFO, CMDLINE, AVAILABLE, **asked).room_bytes == AVAILABLE
        return
    with pytest.raises(NotEnforceable, match=refusal) as refused:
        calibrate(MEMINFO, CMDLINE, AVAILABLE, **asked)
    assert "\n" not in str(refused.value)


@given(room=st.integers(1 << 20, 1 << 40), taken=st.integers(0, 1 << 36), room_there=st.integers(1 << 20, 1 << 44))
def test_the_machine_that_is_suggested_would_be_taken(room: int, taken: int, room_there: int) -> None:
    """If the kernel takes what is guessed: 64 MiB and a 64th, and everything else as much as now."""
    meminfo = f"MemTotal: {(room_there + taken) // 1024} kB\n".encode()
    try:
        calibrate(meminfo, "quiet", room_there, room_bytes=room, pool_bytes=1 << 50)
    except NotEnforceable as refusal:
        word = refusal.remedy.partition("about ")[2].split()[0].rstrip(",;")
        size = boot_limit_bytes(word)
        assert size is not None
        left = size - size // 64 - (64 << 20) - taken
        assert -KIB <= left - room <= max(LARGER_SLACK_BYTES, room // 4)


def test_meminfo_that_says_nothing_is_refused() -> None:
    with pytest.raises(NotEnforceable, match="does not say MemTotal"):
        calibrate(b"", CMDLINE, AVAILABLE, room_bytes=None, pool_bytes=1)


def test_boot_needs_no_capacity_but_an_owner_that_locks_does() -> None:
    check_request(request(mechanism="boot"))
    check_request(request(mechanism="boot", capacity_bytes=MIB))
    with pytest.raises(UnusableReplay, match="owner arena without --capacity"):
        check_request(request(mechanism="boot", owner="arena"))


# On this machine, which is larger than any pool of the tests


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(routing(20, experts=64), layer_ids=[1, 2, 5, 9], num_experts=64)


@pytest.fixture(scope="module")
def pool(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return pool_for(trace, tmp_path_factory.mktemp("boot") / "pool", 64 * KIB)


def test_the_command_refuses_a_large_machine_in_one_line(trace: Trace, pool: Pool, tmp_path) -> None:
    write_trace(trace, tmp_path / "trace.parquet")
    arguments = ("replay", tmp_path / "trace.parquet", "--pool", pool.folder, "--device", "none", "--wait", 240)
    done = called(*arguments, "--mechanism", "boot", "--capacity", "8MiB", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "far more than the capacity" in done.stderr
    assert "boot it with about mem=" in done.stderr


def small_machine(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """Lets the supervisor take this machine for one that leaves so much."""
    monkeypatch.setattr(supervisor, "available_bytes", lambda _nodes: room_bytes)


def test_a_small_machine_is_the_limit_and_is_held_against_it(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the smallness is real: nothing limits the run, and all of the pool fits into the room it claims."""
    small_machine(monkeypatch, 32 * MIB)
    monkeypatch.setattr(
        supervisor, "calibrate", lambda *given, **asked: calibrate(*given, **{**asked, "pool_bytes": 1 << 40})
    )
    run = replayed(trace, pool, mechanism="boot")
    assert run.run["capacity_bytes"] == run.run["enforced_bytes"] == 32 * MIB
    assert run.run["wall_bytes"] == 32 * MIB + run.run["own_anonymous_bytes"]
    assert run.run["mechanism_detail"].startswith(("a machine of", "booted with"))
    assert proof(run, "resident within the wall")["held"]
    assert proof(run, "machine size unchanged")["held"]
    assert json.dumps(run.run)


def test_more_resident_than_the_machine_is_said_to_leave_is_found(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the machine holds the whole pool of 16 MiB, and 1 MiB was calibrated; reserves excuse 24 MiB."""
    small_machine(monkeypatch, MIB)
    monkeypatch.setattr("replayer.proofs.BALLOON_SLACK_BYTES", MIB)
    run = replayed(trace, pool, mechanism="boot", capacity_bytes=MIB, allow_thrash=True)
    assert proof(run, "resident within the wall")["held"] is False
    assert not run.run["bytes_valid"]


def test_memory_that_came_or_went_since_it_was_calibrated_is_found(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: as calibrated the machine had a block less than it has after every step."""
    small_machine(monkeypatch, 32 * MIB)

    def before_a_block_came(*given: Any, **asked: Any) -> Calibration:
        found = calibrate(*given, **asked)
        return dataclasses.replace(found, memory_bytes=found.memory_bytes - 128 * MIB)

    monkeypatch.setattr(supervisor, "calibrate", before_a_block_came)
    run = replayed(trace, pool, mechanism="boot", capacity_bytes=30 * MIB, warm_pass=False)
    assert failed(run) == {"machine size unchanged"}


class Taken:
    """Stands for blocks that are offline; nothing is."""

    block_bytes, bytes, detail = 128 * MIB, 256 * MIB, "2 blocks of 128.00 MiB offline"

    def __init__(self) -> None:
        self.is_back = False

    def __enter__(self) -> "Taken":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_back = True


def test_blocks_are_offline_until_the_run_ends(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine can be chosen in steps of a block alone, so the run may have nearly a block more than it asked for."""
    taken, asked = Taken(), []

    def take(room_bytes: int, *_: object) -> Taken:
        asked.append(room_bytes)
        return taken

    monkeypatch.setattr(supervisor.OfflineBlocks, "take", take)
    small_machine(monkeypatch, 100 * MIB)
    run = replayed(
        trace, pool, mechanism="offline", offline_memory_blocks=True, capacity_bytes=8 * MIB, headroom_bytes=MIB
    )
    assert asked == [9 * MIB]
    assert taken.is_back
    assert failed(run) == set()
    assert run.run["offline_bytes"] == 256 * MIB
    assert (run.run["capacity_bytes"], run.run["enforced_bytes"]) == (8 * MIB, 100 * MIB)
    assert run.run["mechanism_detail"] == taken.detail
