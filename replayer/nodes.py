"""Memory nodes: which of them are a processor's own, what they hold, and what of the machine's memory is theirs.

The memory of an accelerator (the HBM of a GH200) may appear as a node without processors. Unless asked, a replay
neither counts it, nor locks it, nor lets its reader allocate there: it is not the DRAM in question. Everything is read
below `root`, so that a test can bring its own; without NUMA in the kernel there is no node to leave out.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from replayer.counters import parse_meminfo, read_counter_file

_ROOT = Path("/")
_FOLDER = "sys/devices/system/node"
_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "KReclaimable")
"""What MemAvailable adds up of a node, before it takes reserves off; KReclaimable is SReclaimable and a little more."""


@dataclass(frozen=True)
class Node:
    """One node that has memory. has_processors: those of an accelerator have none."""

    node_id: int
    has_processors: bool
    meminfo_file: Path


@dataclass(frozen=True)
class Nodes:
    """The nodes with memory, by id; `used` are those whose memory a replay counts and takes."""

    all: tuple[Node, ...]
    used: tuple[Node, ...]

    @property
    def left_out(self) -> tuple[Node, ...]:
        return tuple(node for node in self.all if node not in self.used)

    @property
    def bound_to(self) -> list[int]:
        """Ids of the nodes that memory has to come from; empty where it may come from anywhere."""
        return [node.node_id for node in self.used] if self.left_out else []


def memory_nodes(root: Path = _ROOT, *, accelerators: bool = False) -> Nodes:
    """The nodes of this machine; with `accelerators` those without processors are used as well.

    Memory without processors that is no accelerator's (CXL, a socket whose processors are off) looks the same and is
    left out, too.
    """
    folder = root / _FOLDER
    with_processors = parse_list(_text(folder / "has_cpu"))
    found = tuple(
        Node(node_id, node_id in with_processors, folder / f"node{node_id}" / "meminfo")
        for node_id in sorted(parse_list(_text(folder / "has_memory")))
    )
    own = tuple(node for node in found if node.has_processors)
    return Nodes(found, found if accelerators or not own else own)


def available_bytes(nodes: Nodes, root: Path = _ROOT) -> int:
    """MemAvailable, less what it counts of nodes that are left out: never more than the used nodes have to give."""
    available = (parse_meminfo(read_counter_file(root / "proc/meminfo")) or {}).get("MemAvailable", 0)
    return max(available - left_out_bytes(nodes), 0)


def left_out_bytes(nodes: Nodes) -> int:
    """What MemAvailable counts of the nodes that are left out, or a little more: the kernel takes reserves off."""
    total = 0
    for node in nodes.left_out:
        meminfo = parse_node_meminfo(read_counter_file(node.meminfo_file)) or {}
        total += sum(meminfo.get(name, 0) for name in _RECLAIMABLE)
    return total


def parse_list(text: str) -> set[int]:
    """Numbers of a kernel list, `0-2,7`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if match:
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def parse_node_meminfo(text: bytes | None) -> dict[str, int] | None:
    """Sizes in a node's `meminfo` in bytes: the lines of /proc/meminfo behind `Node 0 `."""
    return parse_meminfo(None if text is None else re.sub(rb"^Node [0-9]+ ", b"", text, flags=re.MULTILINE))


def parse_numa_stat(text: bytes | None, page_bytes: int) -> dict[int, int] | None:
    """Bytes of page cache of a cgroup by node: the line `file N0=bytes` of v2, `hierarchical_file=… N0=pages` of v1."""
    for pattern, unit in ((rb"^hierarchical_file=[0-9]+(.*)$", page_bytes), (rb"^file((?: N[0-9]+=[0-9]+)+)$", 1)):
        line = re.search(pattern, text or b"", re.MULTILINE)
        if line:
            return {int(node): int(size) * unit for node, size in re.findall(rb" N([0-9]+)=([0-9]+)", line[1])}
    return None


def _text(file: Path) -> str:
    return (read_counter_file(file) or b"").decode(errors="replace")
