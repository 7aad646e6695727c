"""The section on reclaim: its sentences and its matrix follow the views."""

from pathlib import Path
from typing import Any

import polars as pl

from pipeline.reclaim_report import VIEWS, reclaim_blocks
from pipeline.report import render_report, write_report
from tests.test_reclaim_views import BALLOON, CGROUP, CURVE, built, runs
from tests.test_report import SPACE, text_of
from warehouse.build import read_tables


def shown(folder: Path, *conditions: list[dict[str, Any]]) -> str:
    """The whole page, as words."""
    return text_of(render_report(read_tables(built(folder, *conditions), views=VIEWS))).replace(SPACE, " ")


def test_without_runs_or_views_there_is_no_section(tmp_path: Path) -> None:
    assert reclaim_blocks({}) == []
    assert "Reclaim" not in shown(tmp_path)
    assert reclaim_blocks(dict.fromkeys(VIEWS, pl.DataFrame({"trace_id": []}))) == []


def test_mechanisms_that_agree_and_one_that_does_not(tmp_path: Path) -> None:
    page = shown(
        tmp_path,
        *CURVE,
        runs("balloon", (820, 810, 830, 815, 825), 150, **BALLOON),
        runs("boot", (900,) * 5, 150, detail="booted with mem=195M"),
        runs("offline", (800,) * 4, 150),
    )
    assert (
        "At equal measured residency 3 of 4 comparisons of two mechanisms agree within 10 %; 5 more have fewer than "
        "five repetitions and count for nothing."
    ) in page
    assert (
        "page_cache at 400 B, boot with 150 B resident reads 12.5 % more than cgroup v2, but each reads as much as the "
        "other per byte that an LRU of its own residency misses (1.00): the curve is steep there."
    ) in page
    assert "No run was made with MGLRU on (its state: off 0x0000), so nothing is said of it." in page
    assert "In 0 of 5 conditions more than 2 pages were scanned for each page reclaimed" in page
    assert "820 B 810 B to 830 B 800 B interpolated 1.025 1.000 yes" in page


def test_a_difference_that_the_simulation_does_not_have_is_said_to_be_one(tmp_path: Path) -> None:
    boot = runs("boot", (900,) * 5, 150, detail="booted with mem=195M", resident_miss_bytes=300)
    for row in boot:
        row["amplification_resident"] = 3.0
    page = shown(tmp_path, *CURVE, boot)
    assert (
        "12.5 % more than cgroup v2, and 1.50 times as much per byte that an LRU of its own residency misses." in page
    )


def test_mglru_against_the_classic_lists_flips_with_the_rows(tmp_path: Path) -> None:
    def page(folder: str, device: int, scans: int) -> str:
        return shown(
            tmp_path / folder,
            runs("balloon", (device,) * 5, 64, machine="gen", scans=(scans, 10), **BALLOON),
            runs("balloon", (168,) * 5, 64, scans=(10, 10), **BALLOON),
        )

    more = page("more", 336, 55)
    assert "One mechanism alone limited memory here, so it is held against no other." in more
    assert (
        "With MGLRU page_cache at 400 B, balloon on the whole machine at 64 B resident reads 2.00 times what the "
        "classic lists do, 81.0 % of the memory locked, 5.5 pages scanned a page reclaimed."
    ) in more
    assert "In 1 of 2 conditions more than 2 pages were scanned" in more
    assert "5.50, above 2" in more
    less = page("less", 84, 10)
    assert "reads 0.50 times what the classic lists do" in less
    assert "In 0 of 2 conditions" in less


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    page = shown(
        tmp_path,
        runs("balloon", (5,) * 5, 64, machine="gen", scans=None, **BALLOON),
        runs("cgroup", (5,) * 5, 640, machine="gen", scans=None, **CGROUP),
    )
    assert "No two mechanisms left as much of the pool resident with the same reclaim" in page
    assert "MGLRU was on, and no run of the classic lists by the same mechanism left as much resident." in page
    assert "No counter told how many pages were scanned" in page


def test_the_section_is_in_the_report_that_is_written(tmp_path: Path) -> None:
    page = write_report(built(tmp_path, *CURVE)).read_text()
    assert page.count('id="reclaim"') == 1
