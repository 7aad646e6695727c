"""Memory blocks: refused where they are not known to come back, written down before they go, back after every end.

All on a tree of files with a kernel behind it; this machine's own memory is only asked whether it would be refused.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from replayer import capacity, offline
from replayer.capacity import NotEnforceable, remove_leftovers
from replayer.nodes import memory_nodes
from replayer.offline import (
    Block,
    OfflineBlocks,
    check_machine,
    removable_blocks,
    restore_leftovers,
    zone_pages,
)
from replayer.request import UnusableReplay, check_request
from tests.builders import make_trace, write_trace
from tests.machine_with_blocks import BLOCK_BYTES, MIB, TAKEN_BYTES, MachineWithBlocks
from tests.replays import ENVIRONMENT, KIB, called, pool_for, request, routing, until

EIGHT = ["Normal"] * 8
ROOM = 4 * BLOCK_BYTES - TAKEN_BYTES
"""What four blocks of eight leave available."""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def made(zones: list[str] = EIGHT, **refusing: Any) -> MachineWithBlocks:
        machine = MachineWithBlocks.make(tmp_path / "root", zones, **refusing)
        monkeypatch.setattr(capacity, "write_word", machine.write_word)
        return machine

    return made


def take(machine: MachineWithBlocks, room_bytes: int = ROOM) -> OfflineBlocks:
    return OfflineBlocks.take(room_bytes, machine.available, machine.nodes, machine.root)


def state_files(machine: MachineWithBlocks) -> list[Path]:
    return sorted((machine.root / "run/expert-tier").glob("*"))


def test_blocks_go_from_the_highest_down_and_come_back_to_their_zone(make) -> None:
    machine = make()
    with take(machine) as blocks:
        assert machine.states() == "oooo----"
        assert (blocks.bytes, blocks.block_bytes) == (4 * BLOCK_BYTES, BLOCK_BYTES)
        assert blocks.detail == "4 blocks of 128.00 MiB offline"
        assert machine.available() == ROOM
        (file,) = state_files(machine)
        assert [name for name, _ in json.loads(file.read_text())] == ["memory7", "memory6", "memory5", "memory4"]
    assert machine.states() == "oooooooo"
    assert state_files(machine) == []
    # The first goes twice: it was brought back on trial before any other went.
    assert machine.written[:4] == [
        ("memory7", "offline"), ("memory7", "online_kernel"), ("memory7", "offline"), ("memory6", "offline"),
    ]  # fmt: skip


def test_movable_blocks_go_first_and_come_back_movable(make) -> None:
    machine = make(["Normal", "Movable", "Normal", "Movable"])
    with take(machine, 2 * BLOCK_BYTES - TAKEN_BYTES):
        assert machine.states() == "o-o-"
    assert {word for name, word in machine.written if word != "offline"} == {"online_movable"}


def test_less_than_a_block_more_than_asked_is_left(make) -> None:
    machine = make()
    with take(machine, ROOM + 1):
        assert machine.states() == "ooooo---"
        assert machine.available() - BLOCK_BYTES < ROOM + 1 <= machine.available()
    with take(machine, 8 * BLOCK_BYTES):
        assert machine.states() == "oooooooo"


def test_a_block_is_written_down_before_it_goes(make) -> None:
    machine = make(busy={6})
    with take(machine):
        pass
    for (name, word), written in zip(machine.written, machine.seen, strict=True):
        if word == "offline":
            assert f'"{name}"' in written
    # One that stays is not owed.
    assert '"memory6"' not in machine.seen[-1]


def test_blocks_that_do_not_go_are_passed_over(make) -> None:
    machine = make(busy={7, 5, 0})
    with take(machine):
        assert machine.states() == "oo---o-o"


def test_a_block_that_is_busy_for_a_moment_is_asked_again(make) -> None:
    machine = make(busy={3}, shy={7, 6, 5, 2})
    with take(machine, 3 * BLOCK_BYTES - TAKEN_BYTES):
        assert machine.states() == "--oo-o--"


def test_too_few_blocks_that_go_are_refused_and_all_are_back(make) -> None:
    machine = make(busy={0, 1, 2, 3, 4})
    with pytest.raises(NotEnforceable, match=r"3 blocks of 128\.00 MiB went offline and no other would.*movablecore="):
        take(machine)
    assert machine.states() == "oooooooo"
    assert state_files(machine) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("proc/cmdline", "quiet deferred_init=lazy\n"), "booted with deferred_init=lazy"),
        (
            ("proc/zoneinfo", "  present  5505024\n  managed  2654208\n"),
            "2,654,208 of 5,505,024 present pages are",
        ),
        (("proc/zoneinfo", ""), "0 of 0 present pages"),
        (("sys/devices/system/memory/block_size_bytes", ""), "takes no memory offline"),
    ],
)
def test_a_machine_whose_blocks_may_stay_away_is_refused_untouched(make, change: tuple[str, str], words: str) -> None:
    machine = make()
    (machine.root / change[0]).write_text(change[1])
    with pytest.raises(NotEnforceable, match=words) as refusal:
        take(machine)
    assert "use --mechanism cgroup or balloon" in refusal.value.remedy
    assert machine.written == []


def test_a_driver_that_plugs_memory_itself_is_refused(make) -> None:
    machine = make()
    driver = machine.root / "sys/bus/virtio/drivers/virtio_mem"
    driver.mkdir(parents=True)
    (driver / "module").symlink_to(machine.root)
    check_machine(machine.root)
    (driver / "virtio3").symlink_to(machine.root)
    with pytest.raises(NotEnforceable, match="virtio_mem plugs memory here"):
        check_machine(machine.root)


def test_a_machine_is_not_left_without_memory(make) -> None:
    machine = make()
    with pytest.raises(NotEnforceable, match="ask for a larger capacity"):
        take(machine, 127 * MIB)
    assert machine.written == []


def test_blocks_of_no_known_zone_or_of_an_accelerator_stay(make) -> None:
    machine = make(["DMA32", "Normal", "none", "Normal Movable", "Normal", "Normal"])
    base = machine.root / "sys/devices/system/memory"
    (base / "memory4/removable").write_text("0\n")
    (base / "memory5/node0").rmdir()
    (base / "memory5/node1").mkdir()
    nodes = machine.root / "sys/devices/system/node"
    for node in (0, 1):
        (nodes / f"node{node}").mkdir(parents=True)
    (nodes / "has_memory").write_text("0-1\n")
    (nodes / "has_cpu").write_text("0\n")
    assert removable_blocks(machine.nodes, machine.root) == [Block("memory1", "Normal")]
    assert removable_blocks(memory_nodes(machine.root, accelerators=True), machine.root)[0] == Block(
        "memory5", "Normal"
    )


def test_the_first_block_that_does_not_come_back_whole_ends_it(make) -> None:
    machine = make(halved={7})
    with pytest.raises(NotEnforceable, match="gave 67,108,864 bytes for 134,217,728"):
        take(machine)
    assert machine.states() == "oooooooo"
    assert [name for name, _ in machine.written] == ["memory7", "memory7"]


def test_a_block_that_does_not_come_back_stays_written_down_and_is_named(make) -> None:
    machine = make()
    blocks = take(machine)
    machine.lost = {5}
    with pytest.raises(NotEnforceable, match=r"1 memory blocks are offline.*memory5/state.*write online to each"):
        blocks.restore()
    assert machine.states() == "ooooo-oo"
    (file,) = state_files(machine)
    assert json.loads(file.read_text()) == [["memory5", "Normal"]]
    machine.lost = set()
    blocks.restore()
    assert machine.states() == "oooooooo"
    assert state_files(machine) == []


def test_an_error_inside_brings_all_back(make) -> None:
    machine = make()
    with pytest.raises(KeyboardInterrupt), take(machine):
        raise KeyboardInterrupt
    assert machine.states() == "oooooooo"
    assert offline._HELD == []


CRASHING = """
    import os, sys, time
    from pathlib import Path
    from replayer.offline import OfflineBlocks
    from tests.machine_with_blocks import BLOCK_BYTES, TAKEN_BYTES, MachineWithBlocks

    machine = MachineWithBlocks(Path(sys.argv[1]))
    stop_before = int(sys.argv[2])
    honest = machine.write_word

    def write_word(file, word):
        if len(machine.written) == stop_before:
            print("there", flush=True)
            time.sleep(60)
        honest(file, word)

    machine.write_word = write_word
    machine.install()
    with OfflineBlocks.take(4 * BLOCK_BYTES - TAKEN_BYTES, machine.available, machine.nodes, machine.root):
        print("there", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("stop_before", "states"),
    [(0, "oooooooo"), (1, "ooooooo-"), (3, "ooooooo-"), (4, "oooooo--"), (99, "oooo----")],
)
def test_blocks_come_back_after_the_taker_was_killed_at_any_point(make, stop_before: int, states: str) -> None:
    machine = make()
    taker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CRASHING), str(machine.root), str(stop_before)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert taker.stdout is not None
        assert taker.stdout.readline() == "there\n"
        # While the taker lives nobody takes its blocks for left.
        assert restore_leftovers(machine.root) == []
        assert machine.states() == states
        taker.send_signal(signal.SIGKILL)
        assert taker.wait(10) == -signal.SIGKILL
    finally:
        taker.kill()
        taker.wait()
        taker.stdout.close()
    said = restore_leftovers(machine.root)
    assert machine.states() == "oooooooo"
    assert machine.memory_bytes == 8 * BLOCK_BYTES
    assert state_files(machine) == []
    assert len(said) == 1
    assert said[0].endswith("memory blocks that a replay left offline")
    assert restore_leftovers(machine.root) == []


def test_an_interrupt_between_two_blocks_brings_all_back(make) -> None:
    machine = make()
    taker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CRASHING), str(machine.root), "99"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert taker.stdout is not None
    assert taker.stdout.readline() == "there\n"
    taker.send_signal(signal.SIGINT)
    taker.wait(10)
    taker.stdout.close()
    assert machine.states() == "oooooooo"
    assert state_files(machine) == []


def test_what_is_no_state_file_of_a_dead_taker_is_left_alone(make) -> None:
    machine = make()
    folder = machine.root / "run/expert-tier"
    folder.mkdir(parents=True)
    here = f"{capacity.pid_namespace()}"
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    alive = f"offline-{here}-{os.getpid()}-{capacity.start_time_ticks(os.getpid())}-0.json"
    for name in ("offline.json", f"offline-1-{dead.pid}-1-0.json", alive, "notes"):
        (folder / name).write_text('[["memory7", "Normal"]]')
    (machine.root / "sys/devices/system/memory/memory7/state").write_text("offline\n")
    assert restore_leftovers(machine.root) == []
    assert machine.written == []
    # What a file of ours names is written to as root: nothing but blocks and their zones is.
    hostile = folder / f"offline-{here}-{dead.pid}-1-0.json"
    for text in ('[["../../../../etc/passwd", "Normal"], ["memory7", "online"]]', "{", "[[[]]]", '{"a": 1}'):
        hostile.write_text(text)
        restore_leftovers(machine.root)
        assert machine.written == []
        assert not hostile.exists()


def test_leftovers_that_may_not_be_mended_are_told(make, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make()
    folder = machine.root / "run/expert-tier"
    folder.mkdir(parents=True)
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    file = folder / f"offline-{capacity.pid_namespace()}-{dead.pid}-1-0.json"
    file.write_text('[["memory7", "Normal"]]')

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    (said,) = restore_leftovers(machine.root)
    assert "could not be brought back: [Errno 13] Permission denied" in said


def test_zones_are_summed() -> None:
    text = "Node 0, zone DMA\n        present  3998\n        managed  3840\n  nr_present 7\nNode 1, zone Normal\n"
    assert zone_pages(text + "        present  100\n        managed  50\n") == (4098, 3890)


def test_it_needs_its_own_word_and_a_size() -> None:
    asked = {"mechanism": "offline", "capacity_bytes": 1 << 30}
    check_request(request(**asked, offline_memory_blocks=True))
    with pytest.raises(UnusableReplay, match="mechanism offline without --offline-memory-blocks"):
        check_request(request(**asked))
    with pytest.raises(UnusableReplay, match="mechanism none with --offline-memory-blocks"):
        check_request(request(offline_memory_blocks=True))
    with pytest.raises(UnusableReplay, match="say both or neither"):
        check_request(request(mechanism="offline", offline_memory_blocks=True))


def test_the_command_refuses_this_machine_in_one_line_if_its_blocks_may_not_come_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Only asked where it is refused: where it is not, memory of a machine that others use would go."""
    try:
        check_machine()
    except NotEnforceable as refusal:
        reason = refusal.reason
    else:
        pytest.skip("this machine would take memory offline")
    folder = tmp_path_factory.mktemp("offline")
    trace = make_trace(routing(5, experts=64), layer_ids=[1, 2, 5, 9], num_experts=64)
    pool = pool_for(trace, folder / "pool", 64 * KIB)
    write_trace(trace, folder / "trace.parquet")
    done = called(
        "replay", folder / "trace.parquet", "--pool", pool.folder, "--device", "none", "--wait", 240, "--mechanism",
        "offline", "--offline-memory-blocks", "--capacity", "1GiB", "--json",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr


def test_leftover_groups_and_blocks_are_removed_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "restore_leftovers", lambda: ["brought back"])
    assert until(lambda: remove_leftovers()[-1:] == ["brought back"])
