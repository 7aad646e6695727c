"""A machine whose memory goes offline in blocks, as a tree of files with a kernel behind it. No test cases here."""

import errno
import os
from collections.abc import Collection
from pathlib import Path

from replayer import capacity
from replayer.nodes import Nodes, memory_nodes

MIB = 2**20
BLOCK_BYTES = 128 * MIB
TAKEN_BYTES = 50 * MIB
"""Of MemTotal, what is not available."""


class MachineWithBlocks:
    """Answers writes to a block's state as the kernel does, in place of `capacity.write_word`.

    busy: numbers of blocks that do not go; shy: that go when asked a second time; lost: those that do not come back;
    halved: those that come back in part.
    """

    def __init__(
        self,
        root: Path,
        *,
        busy: Collection[int] = (),
        shy: Collection[int] = (),
        lost: Collection[int] = (),
        halved: Collection[int] = (),
    ) -> None:
        self.root, self.busy, self.shy, self.lost, self.halved = root, busy, set(shy), lost, halved
        self.written: list[tuple[str, str]] = []
        self.seen: list[str] = []

    @classmethod
    def make(cls, root: Path, zones: list[str], **refusing: Collection[int]) -> "MachineWithBlocks":
        """A tree with a block for each zone, all online, of one node."""
        base = root / "sys/devices/system/memory"
        base.mkdir(parents=True)
        (base / "block_size_bytes").write_text("8000000\n")
        for number, zone in enumerate(zones):
            folder = base / f"memory{number}"
            folder.mkdir()
            (folder / "state").write_text("online\n")
            (folder / "removable").write_text("1\n")
            (folder / "valid_zones").write_text(zone + "\n")
            (folder / "node0").mkdir()
        (root / "proc").mkdir()
        (root / "proc/cmdline").write_text("quiet\n")
        present = len(zones) * BLOCK_BYTES // 4096
        (root / "proc/zoneinfo").write_text(
            f"Node 0, zone   Normal\n  pages free     9\n        present  {present}\n"
            f"        managed  {present * 98 // 100}\n"
        )
        (root / "proc/meminfo").write_text(f"MemTotal: {len(zones) * BLOCK_BYTES // 1024} kB\n")
        return cls(root, **refusing)

    @property
    def memory_bytes(self) -> int:
        return int((self.root / "proc/meminfo").read_text().split()[1]) * 1024

    def available(self) -> int:
        return self.memory_bytes - TAKEN_BYTES

    @property
    def nodes(self) -> Nodes:
        return memory_nodes(self.root)

    def states(self) -> str:
        """A letter a block: o or - for online or offline."""
        folders = sorted((self.root / "sys/devices/system/memory").glob("memory*"), key=lambda each: int(each.name[6:]))
        return "".join("o" if (folder / "state").read_text() == "online\n" else "-" for folder in folders)

    def write_word(self, file: Path, word: str) -> None:
        number = int(file.parent.name.removeprefix("memory"))
        self.written.append((file.parent.name, word))
        self.seen.append("".join(state.read_text() for state in (self.root / "run/expert-tier").glob("*.json")))
        if word == "offline" and number in self.shy:
            self.shy.remove(number)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if word == "offline" and number in self.busy:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if word != "offline" and number in self.lost:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        file.write_text("offline\n" if word == "offline" else "online\n")
        size = BLOCK_BYTES // 2 if word != "offline" and number in self.halved else BLOCK_BYTES
        total = self.memory_bytes + (-size if word == "offline" else size)
        (self.root / "proc/meminfo").write_text(f"MemTotal: {total // 1024} kB\n")

    def install(self) -> None:
        """For a process of its own, which no fixture tidies up after."""
        capacity.write_word = self.write_word
