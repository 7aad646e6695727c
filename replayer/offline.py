"""Memory blocks taken offline while a replay runs, and brought back: `mem=` without a reboot, in steps of a block.

It changes the whole machine, so it is done by explicit request alone, and only where every block is known to come back:
`check_machine` says why not, and the first block is taken and brought back on trial. Each block is written down in a
file before it goes. A `with` block brings them back; after SIGKILL `restore_leftovers` does, which every replay calls
first. What happens to a run is `replay`'s business. Everything is below `root`, so that a test can bring its own.
"""

import atexit
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from replayer import capacity
from replayer.capacity import MACHINE_RESERVE_BYTES, NotEnforceable
from replayer.counters import parse_meminfo, read_counter_file
from replayer.nodes import Nodes
from replayer.quantities import format_bytes

_ROOT = Path("/")
_BLOCKS = "sys/devices/system/memory"
_STATE = "run/expert-tier"
"""Lost by a reboot, as the blocks' state is."""

_NAME = re.compile(r"offline-([0-9]+)-([0-9]+)-([0-9]+)-[0-9]+\.json", re.ASCII)
_ONLINE_AGAIN = {"Normal": "online_kernel", "Movable": "online_movable"}
"""Zone of a block → what is written to bring it back to it (Documentation/admin-guide/mm/memory-hotplug.rst)."""

_MANAGED_SHARE = 0.9
"""Of the memory that is present, what the kernel manages at least: page structures and reserves take 2 to 4 %."""

_FOREIGN = ("sys/bus/virtio/drivers/virtio_mem", "sys/bus/vmbus/drivers/hv_balloon")
"""Drivers whose hypervisor plugs and unplugs blocks itself."""

_INSTEAD = "use --mechanism cgroup or balloon, or boot a smaller machine"
_ROUNDS, _PAUSE_S = 3, 0.2
"""How often a block is asked to go that holds something which cannot be moved now, reads in flight for example."""

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Block:
    """A block that may go: its folder's name, and the zone that it belongs to and has to come back to."""

    name: str
    zone: str


def check_machine(root: Path = _ROOT) -> None:
    """Changes nothing.

    Raises:
        NotEnforceable: this machine has no blocks that are known to come back; says why.
    """
    if block_bytes(root) is None:
        raise NotEnforceable(
            f"{root / _BLOCKS}: this kernel takes no memory offline (CONFIG_MEMORY_HOTREMOVE)", _INSTEAD
        )
    deferred = [word for word in _text(root / "proc/cmdline").split() if word.startswith("deferred_init")]
    if deferred:
        raise NotEnforceable(
            f"the kernel was booted with {deferred[0]}, so pages of a block may not be initialised yet, and it is not "
            "known to come back",
            _INSTEAD,
        )
    present, managed = zone_pages(_text(root / "proc/zoneinfo"))
    if managed < _MANAGED_SHARE * present or not present:
        raise NotEnforceable(
            f"/proc/zoneinfo: {managed:,} of {present:,} present pages are managed, so pages of a block may not be "
            "initialised, or belong to a hypervisor, and it is not known to come back",
            _INSTEAD,
        )
    for driver in _FOREIGN:
        if any(entry.is_symlink() and entry.name != "module" for entry in _entries(root / driver)):
            raise NotEnforceable(f"{Path(driver).name} plugs memory here, so blocks are its hypervisor's", _INSTEAD)


def block_bytes(root: Path = _ROOT) -> int | None:
    """Size of a block; null where memory cannot be taken offline."""
    text = _text(root / _BLOCKS / "block_size_bytes").strip()
    return int(text, 16) if re.fullmatch(r"[0-9a-f]+", text) else None


def zone_pages(zoneinfo: str) -> tuple[int, int]:
    """(present, managed) pages of all zones of /proc/zoneinfo."""
    present, managed = (
        sum(int(number) for number in re.findall(rf"^\s+{word}\s+([0-9]+)$", zoneinfo, re.MULTILINE))
        for word in ("present", "managed")
    )
    return present, managed


def removable_blocks(nodes: Nodes, root: Path = _ROOT) -> list[Block]:
    """Blocks that are online, of one known zone, and may go; the movable ones first, then from the highest down.

    Only those of the nodes in use: what is left out is no part of the limit.
    """
    left_out = {f"node{node.node_id}" for node in nodes.left_out}
    found = []
    for folder in _entries(root / _BLOCKS):
        number = folder.name.removeprefix("memory")
        if not number.isdigit() or _text(folder / "state").strip() != "online":
            continue
        # Before Linux 5.9 the file says which may go; since then it says so of all, and the zone does.
        zone = _text(folder / "valid_zones").split()
        if _text(folder / "removable").strip() == "0" or len(zone) != 1 or zone[0] not in _ONLINE_AGAIN:
            continue
        if not left_out & {entry.name for entry in _entries(folder)}:
            found.append((zone[0] != "Movable", -int(number), Block(folder.name, zone[0])))
    return [block for *_, block in sorted(found, key=lambda each: each[:2])]


class OfflineBlocks:
    """Blocks of this machine that are offline; leaving its `with` block brings every one back.

    `bytes` is what they hold together.
    """

    def __init__(self, root: Path, size_bytes: int) -> None:
        self.root, self.block_bytes = root, size_bytes
        self.blocks: list[Block] = []
        name = f"offline-{capacity.pid_namespace()}-{os.getpid()}-{capacity.start_time_ticks(os.getpid())}"
        self.state_file = root / _STATE / f"{name}-{next(_NUMBERS)}.json"
        self._owner_pid = os.getpid()

    @classmethod
    def take(cls, room_bytes: int, available: Callable[[], int], nodes: Nodes, root: Path = _ROOT) -> Self:
        """Takes blocks offline until less than one block more than `room_bytes` is available.

        available: what the machine has, now.

        Raises:
            NotEnforceable: blocks are not known to come back, or not enough of them would go; all are back then.
        """
        check_machine(root)
        size_bytes = block_bytes(root)
        assert size_bytes is not None, "checked"
        if room_bytes < MACHINE_RESERVE_BYTES:
            raise NotEnforceable(
                f"{room_bytes:,} bytes would be left to the machine, which keeps {MACHINE_RESERVE_BYTES:,}",
                "ask for a larger capacity",
            )
        waiting = removable_blocks(nodes, root)
        if waiting and not os.access(root / _BLOCKS / waiting[0].name / "state", os.W_OK):
            raise NotEnforceable(f"{root / _BLOCKS}: this user may take no memory offline", "run as root")
        taken = cls(root, size_bytes)
        _HELD.append(taken)
        try:
            is_tried = False
            stayed: list[Block] = []
            rounds = _ROUNDS
            while available() - size_bytes >= room_bytes and waiting:
                block = waiting.pop(0)
                if not taken._take(block):
                    stayed.append(block)
                elif not is_tried:
                    taken._try_back(block)
                    is_tried = True
                    waiting.insert(0, block)
                if not waiting and stayed and rounds > 1:
                    rounds -= 1
                    time.sleep(_PAUSE_S)
                    waiting, stayed = stayed, []
            left = available()
            if left - size_bytes >= room_bytes:
                raise NotEnforceable(
                    f"{len(taken.blocks)} blocks of {format_bytes(size_bytes)} went offline and no other would, so "
                    f"{left:,} bytes are available where {room_bytes:,} were wanted",
                    f"boot with movablecore=, which keeps blocks free to go, or {_INSTEAD}",
                )
        except BaseException:
            taken.restore()
            raise
        return taken

    @property
    def bytes(self) -> int:
        return len(self.blocks) * self.block_bytes

    @property
    def detail(self) -> str:
        """How the machine is limited, in words."""
        return f"{len(self.blocks)} blocks of {format_bytes(self.block_bytes)} offline"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Brings every block back; may be called again.

        Raises:
            NotEnforceable: a block did not come back; says which, and what to write where.
        """
        # A forked copy of the supervisor runs the same handlers; the blocks are not its to bring back.
        if os.getpid() != self._owner_pid:
            return
        with capacity.Uninterrupted():
            self.blocks = _bring_back(self.blocks, self.state_file, self.root)
            if not self.blocks:
                _HELD[:] = [held for held in _HELD if held is not self]
        if self.blocks:
            raise _lost(self.blocks, self.root)

    def _take(self, block: Block) -> bool:
        """Whether the block went offline: it stays where something in it cannot be moved."""
        with capacity.Uninterrupted():
            # First what would be missed: a crash from here on is mended by whoever reads the file.
            self.blocks.append(block)
            _write_down(self.blocks, self.state_file)
            _switch(block, "offline", self.root)
            if _state(block, self.root) == "offline":
                return True
            self.blocks.pop()
            _write_down(self.blocks, self.state_file)
            return False

    def _try_back(self, block: Block) -> None:
        """Brings the first block back, to know that blocks come back whole, before any other goes."""
        memory_bytes = _memory_bytes(self.root)
        self.blocks = _bring_back(self.blocks, self.state_file, self.root)
        if self.blocks:
            raise _lost(self.blocks, self.root)
        grown = _memory_bytes(self.root) - memory_bytes
        if grown != self.block_bytes:
            raise NotEnforceable(
                f"{block.name}, taken offline and brought back on trial, gave {grown:,} bytes for "
                f"{self.block_bytes:,}, so blocks are not known to come back whole",
                _INSTEAD,
            )


_HELD: list[OfflineBlocks] = []


@atexit.register
def _restore_held() -> None:
    for held in _HELD:
        held.restore()


def restore_leftovers(root: Path = _ROOT) -> list[str]:
    """Brings back blocks whose taker is dead; a sentence for each. Those of other pid namespaces are left alone."""
    said = []
    for file in _entries(root / _STATE):
        match = _NAME.fullmatch(file.name)
        if match is None or not capacity.is_gone(*match.groups()):
            continue
        blocks = _written_down(file)
        try:
            lost = _bring_back(blocks, file, root)
        except OSError as error:
            said.append(f"{file}: memory blocks that a replay left offline could not be brought back: {error}")
            continue
        if lost:
            said.append(str(_lost(lost, root)))
        else:
            said.append(f"brought back {len(blocks)} memory blocks that a replay left offline")
    return said


def _bring_back(blocks: Sequence[Block], state_file: Path, root: Path) -> list[Block]:
    """Those that did not come back, which stay written down; without any the file goes."""
    lost: list[Block] = []
    for block in reversed(blocks):
        if _state(block, root) == "offline":
            _switch(block, _ONLINE_AGAIN[block.zone], root)
        if _state(block, root) != "online":
            lost.insert(0, block)
    if lost:
        _write_down(lost, state_file)
    else:
        state_file.unlink(missing_ok=True)
    return lost


def _lost(blocks: Sequence[Block], root: Path) -> NotEnforceable:
    files = ", ".join(str(root / _BLOCKS / block.name / "state") for block in blocks[:5])
    return NotEnforceable(
        f"{len(blocks)} memory blocks are offline and did not come back ({files}{', …' if len(blocks) > 5 else ''})",
        "as root, write online to each of these files, or reboot",
    )


def _write_down(blocks: Sequence[Block], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".tmp")
    with aside.open("w", encoding="ascii") as out:
        json.dump([[block.name, block.zone] for block in blocks], out)
        out.flush()
        os.fsync(out.fileno())
    aside.replace(file)


def _written_down(file: Path) -> list[Block]:
    """Blocks of a state file; none of what is not one of ours, since what it names is written to as root."""
    try:
        listed = json.loads(file.read_bytes())
        return [
            Block(name, zone)
            for name, zone in listed
            if re.fullmatch(r"memory[0-9]+", name, re.ASCII) and zone in _ONLINE_AGAIN
        ]
    except (OSError, ValueError, TypeError):
        return []


def _switch(block: Block, word: str, root: Path) -> None:
    """Asks the kernel; what came of it is in the block's state (EBUSY and EINVAL are usual)."""
    try:
        capacity.write_word(root / _BLOCKS / block.name / "state", word)
    except OSError:
        return


def _state(block: Block, root: Path) -> str:
    return _text(root / _BLOCKS / block.name / "state").strip()


def _memory_bytes(root: Path) -> int:
    return (parse_meminfo(read_counter_file(root / "proc/meminfo")) or {}).get("MemTotal", 0)


def _text(file: Path) -> str:
    return (read_counter_file(file) or b"").decode(errors="replace")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
