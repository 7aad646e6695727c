"""Counters of reclaim: text of every kind of kernel, differences between moments, and whole runs."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer import reclaim
from replayer.pool import Pool
from replayer.reclaim import RATIOS, read
from replayer.replay_cli import write_run
from replayer.request import UnusableReplay, check_request
from replayer.trace import Trace
from schemas.columns import COLUMNS
from schemas.documents import ReplayedRun
from schemas.files import DataFolder
from schemas.tables import TABLES
from tests.builders import make_trace
from tests.replays import KIB, MIB, failed, needs_memory_groups, pool_for, replayed, request, routing

EXPERT_BYTES = 64 * KIB

# Lines as Debian's 6.12 prints them, in its order, others left out.
STAT_V2 = b"""\
anon 25096192
file 63963136
kernel 1150976
unevictable 4096
pgscan 700
pgscan_kswapd 10
pgscan_direct 650
pgscan_khugepaged 0
pgscan_proactive 40
pgsteal 300
pgsteal_kswapd 5
pgsteal_direct 275
pgsteal_khugepaged 0
pgsteal_proactive 20
pgfault 9000
pgmajfault 30
pgrefill 12
pgactivate 44
workingset_refault_anon 0
workingset_refault_file 256
workingset_activate_file 64
"""
STAT_V2_BEFORE_TOTALS = b"file 1\npgscan_kswapd 10\npgscan_direct 20\npgsteal_kswapd 3\npgsteal_direct 4\n"
STAT_V1 = b"""\
cache 100
pgfault 1
workingset_refault_file 2
unevictable 3
total_cache 1470464
total_workingset_refault_file 362
total_pgfault 91570
total_pgmajfault 26
total_unevictable 8192
"""
VMSTAT = b"""\
workingset_refault_file 512
workingset_activate_file 96
pgactivate 77
pgfault 1000
pgmajfault 100
pgsteal_kswapd 30
pgsteal_direct 5
pgsteal_khugepaged 1
pgsteal_proactive 2
pgscan_kswapd 33
pgscan_direct 6
pgscan_khugepaged 3
pgscan_proactive 4
pgscan_direct_throttle 1000000
pgscan_file 5000
pgsteal_file 2000
"""
MEMINFO = b"""\
MemTotal: 1000 kB
MemFree: 10 kB
MemAvailable: 20 kB
Cached: 30 kB
Unevictable: 810 kB
Mlocked: 800 kB
"""
PRESSURE = b"some avg10=0.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=5\n"


def reading(page_bytes: int = 4096, **texts: bytes) -> reclaim.Reading:
    return read(texts.get, page_bytes)


def test_a_group_of_v2_is_read_by_its_own_names() -> None:
    found = reading(memory_stat=STAT_V2, limit=b"67108864\n", group_memory_pressure=PRESSURE, page_bytes=65536)
    counts = {name: value for name, value in found.counts.items() if name.startswith("group_")}
    assert counts == {
        "group_kswapd_scan_pages": 10, "group_direct_scan_pages": 650, "group_scan_pages": 700,
        "group_kswapd_steal_pages": 5, "group_direct_steal_pages": 275, "group_steal_pages": 300,
        "group_refault_bytes": 256 * 65536, "group_refault_activated_pages": 64, "group_activated_pages": 44,
        "group_minor_faults": 8970, "group_major_faults": 30, "group_memory_some_ns": 7000,
        "group_memory_full_ns": 5000, "group_io_some_ns": None, "group_io_full_ns": None,
    }  # fmt: skip
    assert found.levels["group_cached_bytes"] == 63963136
    assert found.levels["group_unevictable_bytes"] == 4096
    assert found.levels["group_limit_bytes"] == 67108864


def test_where_the_kernel_keeps_no_total_of_a_group_it_is_the_sum_of_the_parts() -> None:
    counts = reading(memory_stat=STAT_V2_BEFORE_TOTALS).counts
    assert (counts["group_scan_pages"], counts["group_steal_pages"]) == (30, 7)


def test_a_group_of_v1_counts_with_the_groups_inside_and_no_scans() -> None:
    """Its lines without `total_` are of the very group, and it has no counter of reclaim: null, not 0."""
    found = reading(memory_stat=STAT_V1)
    assert found.counts["group_refault_bytes"] == 362 * 4096
    assert found.counts["group_minor_faults"] == 91570 - 26
    assert found.levels["group_cached_bytes"] == 1470464
    assert found.levels["group_unevictable_bytes"] == 8192
    for name in ("group_scan_pages", "group_direct_steal_pages", "group_activated_pages"):
        assert found.counts[name] is None


def test_the_machine_counts_its_own_want_apart_from_that_of_groups() -> None:
    """pgscan_direct_throttle counts no pages; pgscan_file has what groups reclaim, the others do not."""
    found = reading(vmstat=VMSTAT, meminfo=MEMINFO, memory_pressure=PRESSURE, io_pressure=PRESSURE)
    counts = {name: value for name, value in found.counts.items() if name.startswith("machine_")}
    assert counts == {
        "machine_kswapd_scan_pages": 33, "machine_direct_scan_pages": 6, "machine_scan_pages": 46,
        "machine_kswapd_steal_pages": 30, "machine_direct_steal_pages": 5, "machine_steal_pages": 38,
        "machine_file_scan_pages": 5000, "machine_file_steal_pages": 2000, "machine_refault_bytes": 512 * 4096,
        "machine_refault_activated_pages": 96, "machine_activated_pages": 77, "machine_minor_faults": 900,
        "machine_major_faults": 100, "machine_memory_some_ns": 7000, "machine_memory_full_ns": 5000,
        "machine_io_some_ns": 7000, "machine_io_full_ns": 5000,
    }  # fmt: skip
    assert {name: found.levels[name] for name in found.levels if not name.startswith("group_")} == {
        "machine_free_bytes": 10240, "machine_available_bytes": 20480, "machine_cached_bytes": 30720,
        "machine_locked_bytes": 819200, "machine_unevictable_bytes": 829440, "memory_bytes": 1024000,
    }  # fmt: skip


def test_nothing_read_is_null_and_never_zero() -> None:
    found = read(lambda _name: None, 4096)
    assert set(found.counts.values()) == set(found.levels.values()) == {None}
    assert {*found.counts, *found.levels, *RATIOS, "device_bytes", "run_id", "step_id"} == set(
        TABLES["replay_reclaim"].column_names
    )


def test_ratios_are_those_that_the_columns_name() -> None:
    table = TABLES["replay_reclaim"]
    assert {column.name: column.ratio for column in table.columns if column.ratio} == RATIOS
    assert all(COLUMNS[name].description for name in table.column_names)


@given(
    begin=st.integers(0, 2**40),
    grown=st.none() | st.integers(-(2**20), 2**40),
)
def test_a_counter_that_went_back_or_away_is_null(begin: int, grown: int | None) -> None:
    name = "pgscan_file"
    end = None if grown is None else max(begin + grown, 0)
    first = reading(vmstat=f"{name} {begin}\n".encode())
    last = reading(vmstat=b"" if end is None else f"{name} {end}\n".encode())
    row = reclaim._row(first, last, last.levels, None)
    assert row["machine_file_scan_pages"] == (end - begin if end is not None and end >= begin else None)
    assert row["machine_file_scan_per_steal"] is None


def test_a_ratio_is_of_what_grew_and_null_of_nothing() -> None:
    first = reading(memory_stat=b"pgscan 100\npgsteal 100\n")
    last = reading(memory_stat=b"pgscan 130\npgsteal 110\n")
    assert reclaim._row(first, last, last.levels, None)["group_scan_per_steal"] == 3
    assert reclaim._row(first, first, first.levels, 0)["group_scan_per_steal"] is None


def test_statistics_after_each_step_need_a_group() -> None:
    with pytest.raises(UnusableReplay, match="--group-stat step with mechanism none"):
        check_request(request(group_stat="step"))
    check_request(request(group_stat="step", mechanism="cgroup", capacity_bytes=MIB))
    check_request(request(group_stat="step", mechanism="balloon", capacity_bytes=MIB, outer_group_bytes=MIB))


# Whole runs


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(routing(40, experts=64), layer_ids=[1, 2, 5, 9], num_experts=64)


@pytest.fixture(scope="module")
def pool(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """16 MiB in four files."""
    return pool_for(trace, tmp_path_factory.mktemp("reclaim") / "pool", EXPERT_BYTES)


def summed(steps: list[dict[str, Any]], name: str) -> int | None:
    values = [row[name] for row in steps]
    return None if None in values else sum(values)


@pytest.mark.parametrize("group_stat", ["pass", "step"])
def test_reclaim_at_a_wall_is_counted_for_the_pass_and_for_each_step(
    trace: Trace, pool: Pool, tmp_path, group_stat: str
) -> None:
    needs_memory_groups()
    run = replayed(trace, pool, mechanism="cgroup", capacity_bytes=8 * MIB, group_stat=group_stat)
    assert failed(run) == set()
    assert run.run["group_stat"] == group_stat
    whole, *steps = run.reclaim
    assert whole["step_id"] is None
    assert [row["step_id"] for row in steps] == [row["step_id"] for row in run.steps]
    assert whole["device_bytes"] == run.run["device_bytes"] == summed(steps, "device_bytes")
    # What is evicted and read again: nearly all of a second pass over more than fits.
    assert whole["group_refault_bytes"] > 0.5 * whole["device_bytes"]
    assert whole["machine_file_steal_pages"] is None or whole["machine_file_steal_pages"] > 0
    assert whole["group_limit_bytes"] == run.run["wall_bytes"] // 4096 * 4096
    assert 0 < whole["machine_available_bytes"] < whole["memory_bytes"] == run.machine["memory_bytes"]
    of_steps = summed(steps, "group_refault_bytes")
    if group_stat == "pass":
        assert of_steps is None
    else:
        assert 0 < of_steps <= whole["group_refault_bytes"]
    for name in ("machine_file_scan_pages", "machine_memory_some_ns", "machine_major_faults"):
        known = summed(steps, name)
        assert known is None or known <= whole[name], name
    write_run(DataFolder(tmp_path), run)
    document = {**run.run, "reclaim": whole, "delivered": None, "proofs": run.proofs}
    ReplayedRun.model_validate_json(json.dumps(document), strict=True)


def test_a_run_without_a_group_has_none_of_its_counters(trace: Trace, pool: Pool) -> None:
    run = replayed(trace, pool, warm_pass=False, steps=(0, 5))
    assert run.run["group_stat"] is None
    assert len(run.reclaim) == 6
    for row in run.reclaim:
        assert {row[name] for name in row if name.startswith("group_")} == {None}
        assert row["machine_minor_faults"] is not None
