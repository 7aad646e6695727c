"""The views on mechanisms and reclaim, on rows whose medians and interpolations were worked out by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.tables import TABLES
from tests.test_warehouse import run_row, valid_row, write_result
from warehouse.build import build_warehouse, query, read_tables

VIEWS = ("reclaim_condition", "reclaim_pair", "mechanism_agreement", "reclaim_knee")
MGLRU = {"classic": "off 0x0000", "gen": "on 0x0007", "bare": "absent", "hidden": "unknown: permission denied"}


def machine_row(name: str, **values: object) -> dict[str, Any]:
    known = {"machine_id": name, "mglru": MGLRU.get(name, name), "kernel_release": "6.12", "virtualization": "tcg"}
    return valid_row(TABLES["machine"], **{**known, **values})


def runs(
    mechanism: str,
    device: Sequence[int],
    resident: int | Sequence[int],
    *,
    machine: str = "classic",
    scans: tuple[int, int] | None = (10, 10),
    detail: str | None = None,
    **values: object,
) -> list[dict[str, Any]]:
    """Runs of one condition, with the reclaim row of each under `reclaim`."""
    of_runs = [resident] * len(device) if isinstance(resident, int) else resident
    name = f"{machine} {mechanism} {detail} {of_runs[0]}"
    found = []
    for number, (device_bytes, resident_bytes) in enumerate(zip(device, of_runs, strict=True)):
        row = run_row(
            f"{name} {number}", mechanism=mechanism, mechanism_detail=detail, machine_id=machine,
            condition_hash=name.removeprefix(machine), device_bytes=device_bytes,
            resident_median_bytes=resident_bytes, resident_miss_bytes=device_bytes // 2, outer_group_bytes=None,
            together_id=None, threads=8, pool_id="pool", step_begin=0, step_end=6, warm_pass=True,
        ) | values  # fmt: skip
        scanned, stolen = scans or (None, None)
        in_group = mechanism == "cgroup"
        row["amplification_resident"] = row["device_bytes"] / row["resident_miss_bytes"]
        row["amplification_nominal"] = row["device_bytes"] / row["nominal_miss_bytes"]
        row["reclaim"] = valid_row(
            TABLES["replay_reclaim"], run_id=row["run_id"], step_id=None,
            group_scan_pages=scanned if in_group else None, group_steal_pages=stolen if in_group else None,
            machine_file_scan_pages=scanned, machine_file_steal_pages=stolen,
            group_limit_bytes=100 if in_group else None, group_unevictable_bytes=0 if in_group else None,
            machine_scan_pages=None if scans is None else 6, machine_locked_bytes=81, memory_bytes=100,
        )  # fmt: skip
        found.append(row)
    return found


def built(folder: Path, *conditions: list[dict[str, Any]], machines: Sequence[dict[str, Any]] = ()) -> Path:
    rows = [row for condition in conditions for row in condition]
    if rows:
        reclaim = [row["reclaim"] for row in rows if "reclaim" in row]
        write_result(folder, "replay_reclaim", "a", reclaim)
        names = TABLES["replay_run"].column_names
        write_result(folder, "replay_run", "a", [{name: row[name] for name in names} for row in rows])
    write_result(folder, "machine", "a", list(machines) or [machine_row(name) for name in MGLRU])
    build_warehouse(folder)
    return folder


CGROUP = {"detail": "cgroup v2"}
BALLOON = {"detail": "balloon on the whole machine"}
CURVE = (
    runs("cgroup", (1040, 980, 990, 1000, 1010), 100, **CGROUP),
    runs("cgroup", (600, 590, 610, 620, 580), 200, **CGROUP),
)


@pytest.mark.parametrize("view", VIEWS)
def test_the_views_are_empty_where_nothing_was_replayed(tmp_path: Path, view: str) -> None:
    assert query(built(tmp_path), f"FROM {view}").height == 0


def test_a_condition_is_the_lower_median_and_range_of_its_runs(tmp_path: Path) -> None:
    data = built(
        tmp_path,
        runs("cgroup", (1040, 980, 990, 1000), (101, 99, 100, 102), scans=(30, 20), **CGROUP),
        runs("cgroup", (5, 5), 7, bytes_valid=False, **CGROUP),
        runs("cgroup", (5, 5), 8, together_id="together", **CGROUP),
    )
    assert query(
        data,
        "SELECT valid_runs, resident_low_bytes, resident_bytes, resident_high_bytes, device_low_bytes, device_bytes, "
        "device_high_bytes, relative_spread, amplification_resident, scan_pages, steal_pages, scan_per_steal, "
        "scans_above_2, scan_counter, locked_share FROM reclaim_condition",
    ).rows() == [(4, 99, 100, 102, 980, 990, 1040, 60 / 990, 2.0, 120, 80, 1.5, False, "group", 0.0)]


def test_mechanisms_are_compared_at_equal_measured_residency(tmp_path: Path) -> None:
    """Between 1000 bytes at 100 and 600 at 200 lie 800 at 150: 820 is 2.5 % more, 900 12.5 %."""
    data = built(
        tmp_path,
        *CURVE,
        runs("balloon", (820, 810, 830, 815, 825), 150, **BALLOON),
        runs("boot", (900, 900, 900, 900), 150, detail="booted with mem=195M"),
        runs("boot", (606,) * 5, 203, detail="booted with mem=245M"),
        runs("offline", (1000,), 50),
    )
    found = query(
        data,
        "SELECT limited_by, resident_bytes, matched_by, matched_runs, other_device_bytes, device_over_other, "
        "agrees_within_tenth, is_repeated_enough FROM mechanism_agreement WHERE other_limited_by = 'cgroup v2' "
        "ORDER BY resident_bytes, limited_by",
    ).rows()
    assert found == [
        ("offline", 50, None, None, None, None, None, None),
        ("balloon on the whole machine", 150, "interpolated", 5, 800.0, 1.025, True, True),
        ("boot", 150, "interpolated", 5, 800.0, 1.125, False, False),
        ("boot", 203, "nearest", 5, 600.0, 1.01, True, True),
    ]
    # And the other way round: the balloon has one point, and 100 and 200 are not near it.
    assert query(
        data,
        "SELECT DISTINCT matched_by FROM mechanism_agreement WHERE limited_by = 'cgroup v2' AND other_limited_by "
        "LIKE 'balloon%'",
    ).rows() == [(None,)]


def test_equal_residency_is_taken_as_it_is(tmp_path: Path) -> None:
    data = built(tmp_path, *CURVE, runs("balloon", (900,) * 5, 100, **BALLOON))
    assert query(
        data,
        "SELECT matched_by, other_device_bytes, device_over_other, below_resident_bytes, above_resident_bytes FROM "
        "mechanism_agreement WHERE limited_by LIKE 'balloon%'",
    ).rows() == [("equal", 1000.0, 0.9, 100, 100)]


def test_other_reads_and_other_reclaim_are_not_compared(tmp_path: Path) -> None:
    """Another owner, another trace's steps, MGLRU on, or a state that is not known: no partner of the balloon."""
    data = built(
        tmp_path,
        runs("balloon", (900,) * 5, 100, **BALLOON),
        runs("cgroup", (900,) * 5, 100, owner="arena", **CGROUP),
        runs("cgroup", (900,) * 5, 101, step_end=7, **CGROUP),
        runs("cgroup", (900,) * 5, 102, machine="gen", **CGROUP),
        runs("cgroup", (900,) * 5, 103, machine="hidden", **CGROUP),
    )
    assert query(data, "FROM mechanism_agreement").height == 0
    data = built(
        tmp_path / "same", runs("balloon", (9,), 100, **BALLOON), runs("cgroup", (9,), 100, machine="bare", **CGROUP)
    )
    # A kernel without MGLRU reclaims as one in which it is off.
    assert query(data, "FROM mechanism_agreement").height == 2


def test_a_curve_is_of_one_way_of_reading_statistics(tmp_path: Path) -> None:
    """The same capacity read after each step is another condition: no point of the other's curve."""
    stepped = runs("cgroup", (500,) * 5, 150, group_stat="step", **CGROUP)
    data = built(tmp_path, *CURVE, stepped, runs("balloon", (800,) * 5, 150, group_stat=None, **BALLOON))
    assert query(
        data,
        "SELECT other_group_stat, matched_by, device_over_other FROM mechanism_agreement WHERE limited_by LIKE "
        "'balloon%' ORDER BY ALL",
    ).rows() == [("pass", "interpolated", 1.0), ("step", "equal", 1.6)]


def test_mglru_is_held_against_the_classic_lists_of_the_same_mechanism(tmp_path: Path) -> None:
    """The study's cell: a balloon at 81 % locked reads 2.4 times as much with MGLRU, and scans 5.5 pages a steal."""
    data = built(
        tmp_path,
        runs("balloon", (336, 340, 330, 338, 334), 64, machine="gen", scans=(55, 10), **BALLOON),
        runs("balloon", (168, 160, 170, 166, 169), 64, scans=(10, 10), **BALLOON),
        runs("cgroup", (165,) * 5, 64, machine="gen", scans=(20, 10), **CGROUP),
        runs("cgroup", (165,) * 5, 64, scans=(10, 10), **CGROUP),
    )
    assert query(
        data,
        "SELECT limited_by, is_mglru, mglru, locked_share, scan_per_steal, scans_above_2, device_bytes, "
        "classic_device_bytes, device_over_classic, matched_by FROM reclaim_knee ORDER BY ALL",
    ).rows() == [
        ("balloon on the whole machine", False, "off 0x0000", 0.81, 1.0, False, 168, None, None, None),
        ("balloon on the whole machine", True, "on 0x0007", 0.81, 5.5, True, 336, 168.0, 2.0, "equal"),
        ("cgroup v2", False, "off 0x0000", 0.0, 1.0, False, 165, None, None, None),
        ("cgroup v2", True, "on 0x0007", 0.0, 2.0, False, 165, 165.0, 1.0, "equal"),
    ]


def test_scans_come_from_the_counter_that_sees_the_run(tmp_path: Path) -> None:
    """A group of v1 counts none, so the machine's files stand for it; its own want of memory never does."""
    v1 = runs("cgroup", (9,), 64, detail="cgroup v1")
    v1[0]["reclaim"] |= {"group_scan_pages": None, "group_steal_pages": None, "group_scan_per_steal": None}
    old = runs("cgroup", (9,), 65, detail="cgroup v1")
    gone = {"machine_file_scan_pages": None, "machine_file_steal_pages": None, "machine_file_scan_per_steal": None}
    old[0]["reclaim"] |= v1[0]["reclaim"] | gone | {"run_id": old[0]["run_id"]}
    whole = runs("balloon", (9,), 66, **BALLOON)
    whole[0]["reclaim"] |= gone | {"machine_scan_pages": 9, "machine_steal_pages": 3, "machine_scan_per_steal": 3.0}
    bare = runs("none", (9,), 67)
    del bare[0]["reclaim"]
    data = built(tmp_path, v1, old, whole, bare)
    assert query(
        data, "SELECT resident_bytes, scan_counter, scan_per_steal FROM reclaim_condition ORDER BY resident_bytes"
    ).rows() == [(64, "all files of the machine", 1.0), (65, None, None), (66, "machine", 3.0), (67, None, None)]


def test_views_are_read_with_the_tables_where_asked(tmp_path: Path) -> None:
    found = read_tables(built(tmp_path, *CURVE), views=("reclaim_knee",))
    assert found["reclaim_knee"].height == 2
    assert set(found) == {*TABLES, "reclaim_knee"}
