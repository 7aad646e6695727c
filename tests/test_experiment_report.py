"""The report's section on experiments follows the rows of its tables."""

from typing import Any

from pipeline.experiment_report import experiments
from pipeline.page import Block
from pipeline.report import render_report
from schemas.tables import EXPERIMENT_TABLES, TABLES
from tests.table_rows import ROWS


def blocks(**rows: list[dict[str, Any]]) -> list[Block]:
    given = {name: [ROWS[name]] for name in EXPERIMENT_TABLES} | rows
    return experiments({name: TABLES[name].frame(given[name]) for name in EXPERIMENT_TABLES})


def texts(block: Block) -> list[list[str]]:
    """What the cells of each row of each grid say, notes included."""
    return [[f"{cell.text} {cell.note}".strip() for cell in row] for grid in block.grids for row in grid.rows]


def test_an_experiment_shows_question_paragraph_medians_and_spreads():
    (block,) = blocks()
    assert block.heading == "Experiment equal-memory (equal-memory-0123456789ab)"
    assert block.findings == [
        "who? 2 conditions, 5 repetitions of each; random order, seed 0, sizes fit machine; machine machine-1.",
        "No effect.",
    ]
    conditions, effects = texts(block)
    assert conditions[:2] == ["page cache", "5 of 5"]
    assert "1.80 kB 1.70 kB to 1.88 kB" in conditions[3].replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert conditions[2] == "—"
    assert effects[:4] == ["arena", "page cache", "device bytes", "5"]
    assert effects[4] == "0.750 0.700 to 0.800"


def test_what_is_said_of_each_condition_stands_alone():
    finding = (
        "b against a: device bytes 0.5 times. Measured, b held 1.25 MiB. c against a: no effect. 2 of 2 are valid."
    )
    (block,) = blocks(experiment=[{**ROWS["experiment"], "finding": finding}])
    assert block.findings[1:] == [
        "b against a: device bytes 0.5 times. Measured, b held 1.25 MiB.",
        "c against a: no effect.",
        "2 of 2 are valid.",
    ]


def test_the_verdict_on_an_effect_flips_with_its_row():
    def verdict(**values: Any) -> str:
        (block,) = blocks(experiment_effect=[{**ROWS["experiment_effect"], **values}])
        return texts(block)[-1][-1].replace("\N{NARROW NO-BREAK SPACE}", " ")

    assert verdict() == "-25.0 %"
    assert verdict(outside_spread=False) == "none"
    assert verdict(outside_spread=None) == "too few repetitions"


def test_an_unfinished_experiment_says_so_and_tenants_are_told_apart():
    (block,) = blocks(
        experiment=[{**ROWS["experiment"], "finished": False}],
        experiment_condition=[{**ROWS["experiment_condition"], "tenant": name} for name in ("a", "b")],
        experiment_effect=[],
    )
    assert "5 repetitions of each, not finished; random order" in block.findings[0]
    assert [row[0] for row in texts(block)] == ["page cache, tenant a", "page cache, tenant b"]
    assert blocks(experiment=[], experiment_condition=[], experiment_effect=[]) == []


def test_the_page_has_a_section_on_experiments_where_there_are_some():
    rows = {name: table.frame([ROWS[name]] if name in EXPERIMENT_TABLES else []) for name, table in TABLES.items()}
    page = render_report(rows)
    assert '<section class="page" id="experiments">' in page
    assert "Experiment equal-memory (equal-memory-0123456789ab)" in page
    assert 'id="experiments"' not in render_report({name: table.frame([]) for name, table in TABLES.items()})
