"""Memory nodes: which count, on machines with one node, several sockets, and an accelerator's memory."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer import capacity
from replayer.capacity import Balloon, NotEnforceable, bind_memory
from replayer.nodes import (
    available_bytes,
    left_out_bytes,
    memory_nodes,
    parse_list,
    parse_node_meminfo,
    parse_numa_stat,
)
from replayer.replay import Run
from tests.builders import make_trace
from tests.replays import KIB, MIB, pool_for, replayed, routing

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


def machine(folder: Path, nodes: dict[int, tuple[bool, int]], *, available: int) -> Path:
    """A tree with these nodes: number → (has processors, free bytes); each has 1 GiB more in page cache."""
    base = folder / "sys/devices/system/node"
    base.mkdir(parents=True)
    (base / "has_memory").write_text(",".join(map(str, nodes)) + "\n")
    (base / "has_cpu").write_text(",".join(str(node) for node, (has, _) in nodes.items() if has) + "\n")
    for node, (_, free) in nodes.items():
        (base / f"node{node}").mkdir()
        (base / f"node{node}" / "meminfo").write_text(
            f"Node {node} MemTotal:       {2 * free // 1024} kB\nNode {node} MemFree:    {free // 1024} kB\n"
            f"Node {node} Active(file):     {GIB // 2048} kB\nNode {node} Inactive(file):   {GIB // 2048} kB\n"
            f"Node {node} FilePages:    {GIB // 1024} kB\nNode {node} KReclaimable:  0 kB\n"
        )
    (folder / "proc").mkdir()
    (folder / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n")
    return folder


def test_the_memory_of_an_accelerator_is_not_counted_unless_asked(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: (True, 400 * GIB), 1: (False, 90 * GIB)}, available=490 * GIB)
    nodes = memory_nodes(root)
    assert [node.node_id for node in nodes.all] == [0, 1]
    assert [node.node_id for node in nodes.used] == nodes.bound_to == [0]
    assert left_out_bytes(nodes) == 91 * GIB
    assert available_bytes(nodes, root) == 399 * GIB
    asked = memory_nodes(root, accelerators=True)
    assert (asked.bound_to, left_out_bytes(asked), available_bytes(asked, root)) == ([], 0, 490 * GIB)


def test_sockets_with_processors_all_count_and_nothing_is_bound(tmp_path: Path) -> None:
    nodes = memory_nodes(machine(tmp_path, {0: (True, GIB), 1: (True, GIB)}, available=3 * GIB))
    assert nodes.used == nodes.all
    assert nodes.bound_to == []


def test_a_kernel_without_numa_has_no_node_to_leave_out(tmp_path: Path) -> None:
    root = machine(tmp_path, {}, available=GIB)
    assert memory_nodes(root).all == ()
    assert available_bytes(memory_nodes(root), root) == GIB
    assert memory_nodes(tmp_path / "nowhere").bound_to == []


def test_where_no_node_is_said_to_have_processors_all_are_used(tmp_path: Path) -> None:
    nodes = memory_nodes(machine(tmp_path, {0: (False, GIB), 1: (False, GIB)}, available=GIB))
    assert nodes.bound_to == []


@given(st.sets(st.integers(0, 300)))
def test_lists_of_the_kernel_are_read(numbers: set[int]) -> None:
    runs, left = [], sorted(numbers)
    while left:
        begin = end = left.pop(0)
        while left and left[0] == end + 1:
            end = left.pop(0)
        runs.append(str(begin) if begin == end else f"{begin}-{end}")
    assert parse_list(",".join(runs) + "\n") == numbers


def test_files_of_nodes_are_in_bytes() -> None:
    assert parse_node_meminfo(b"Node 12 MemFree:  5 kB\nNode 12 FilePages: 7 kB\n") == {
        "MemFree": 5120,
        "FilePages": 7168,
    }
    assert parse_node_meminfo(None) is None
    v1 = b"total=784 N0=784\nfile=9 N0=9\nhierarchical_total=800 N0=800\nhierarchical_file=360 N0=300 N8=60\n"
    assert parse_numa_stat(v1, 65536) == {0: 300 * 65536, 8: 60 * 65536}
    assert parse_numa_stat(b"anon N0=5 N1=6\nfile N0=4096 N1=0\nfile_mapped N0=7 N1=7\n", 65536) == {0: 4096, 1: 0}
    assert parse_numa_stat(b"anon N0=5\n", 4096) is None
    assert parse_numa_stat(None, 4096) is None


def bound_process(nodes: str) -> "subprocess.CompletedProcess[str]":
    """What a process says of its own memory policy after `bind_memory`, from a mapping made and touched after it."""
    program = (
        f"import sys, mmap, re\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from replayer.capacity import bind_memory\nbind_memory({nodes})\n"
        "held = mmap.mmap(-1, 1 << 22)\nheld.write(b'x' * (1 << 22))\n"
        "print(sorted(set(re.findall(r'^[0-9a-f]+ (\\S+)', open('/proc/self/numa_maps').read(), re.M))))"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_memory_is_bound_to_nodes_by_the_kernels_own_account() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("no NUMA in this kernel")
    node = min(parse_list(Path("/sys/devices/system/node/has_memory").read_text()))
    bound = bound_process(f"[{node}]")
    if "Operation not permitted" in bound.stderr:
        pytest.skip("set_mempolicy is filtered here")
    assert bound.stdout == f"['bind:{node}']\n", bound.stderr
    assert bound_process("[]").stdout == "['default']\n"


def test_what_the_kernel_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A call that is none: of nodes that are not there the kernel would take those that are.
    monkeypatch.setattr(capacity, "_SET_MEMPOLICY_SYSCALL", {os.uname().machine: 2**20})
    with pytest.raises(NotEnforceable, match="memory cannot be bound to nodes 0, 1023"):
        bind_memory([0, 1023])


def test_an_architecture_whose_call_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_SET_MEMPOLICY_SYSCALL", {})
    bind_memory([])
    with pytest.raises(NotEnforceable, match="--accelerator-memory"):
        bind_memory([0])


def test_numbers_of_the_call_are_those_of_the_kernels_tables() -> None:
    """arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h, Linux 6.12."""
    assert capacity._SET_MEMPOLICY_SYSCALL == {"x86_64": 238, "aarch64": 237}
    assert ctypes.sizeof(ctypes.c_ulong) == 8


def test_a_balloon_locks_on_the_nodes_it_is_told_and_leaves_out_the_others() -> None:
    try:
        with Balloon.inflate(16 * MIB, nodes=[0]) as balloon:
            policies = Path(f"/proc/{balloon.pid}/numa_maps")
            assert not policies.exists() or "bind:0" in policies.read_text()
    except NotEnforceable as refusal:
        pytest.skip(f"no balloon here: {refusal}")
    with pytest.raises(NotEnforceable, match=r"the machine has -?[0-9,]+ bytes available"):
        Balloon.inflate(16 * MIB, left_out_bytes=1 << 50)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    trace = make_trace(routing(10, experts=64), layer_ids=[1, 2, 5, 9], num_experts=64)
    return replayed(trace, pool_for(trace, tmp_path_factory.mktemp("nodes") / "pool", 64 * KIB), warm_pass=False)


def test_a_run_says_what_each_node_held(run: Run) -> None:
    for row in run.nodes:
        assert row["is_counted"]
        assert 0 < row["node_file_bytes"] < row["node_bytes"]
        assert row["group_node_file_bytes"] is None
    assert len(run.nodes) == (run.machine["numa_nodes"] or 0)
