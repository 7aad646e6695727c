"""The answer follows the rows: flip them, and the sentence flips."""

from typing import Any

import pytest

from pipeline.lookahead_report import benefit_blocks
from tests.table_rows import ROWS


def row(predictor: str = "conditional", **said: Any) -> dict[str, Any]:
    """A plan that would save a quarter of the time, but for what is said."""
    usual = {
        **ROWS["lookahead_benefit"], "predictor": predictor, "capacity_experts_total": 40, "accesses": 1000,
        "misses": 400, "events": 250, "covered_events": 200, "hint_coverage": 0.8, "predicted_accesses": 500,
        "recall_all": 0.5, "predicted_misses": 200, "recall_missed": 0.5, "simulated_removed_misses": 150,
        "simulated_misses_with": 260, "simulated_submitted": 300,
        "simulated_displaced": 10, "simulated_used": 150, "simulated_used_late": 30, "late_share": 0.2,
        "simulated_time_without_ns": 2000, "simulated_time_with_ns": 1500,
    }  # fmt: skip
    return {**usual, **said}


TRUTH = row("oracle", simulated_time_with_ns=1000, recall_all=1.0)


def answer(*rows: dict[str, Any]) -> str:
    (block,) = benefit_blocks(rows)
    (said,) = block.findings
    return said.replace("\N{NARROW NO-BREAK SPACE}", " ")


def test_a_plan_that_saves_time_may_pay_beside_what_the_truth_would_save() -> None:
    said = answer(row(), TRUTH)
    assert "With room for 40 experts it may pay: conditional, 1 layer ahead would save 25.0 % of the time" in said
    assert (
        "of the 50.0 % that the truth would, by removing 150 of 400 misses and displacing 10 hits; 1.40 times" in said
    )
    assert "assumed: a link of 1.00 kB a second, 0 µs a read, 8 reads under way and 0.0 ms of compute" in said


COSTS = {"simulated_time_with_ns": 2100}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"hint_coverage": 0.2}, "it has a prediction for 20.0 % of the events only"),
        ({"predicted_misses": 0, "recall_missed": 0.0}, "500 accesses, none was missing, so it fetches nothing"),
        ({"recall_missed": 0.1}, "names 50.0 % of all accesses and 10.0 % of the misses"),
        ({"late_share": 0.9}, "90.0 % of the prefetches that were used came late"),
        ({"simulated_displaced": 120}, "it removes 150 misses and displaces 120 hits"),
        ({}, "it names 50.0 % of the misses, which is too little"),
    ],
)
def test_the_reason_is_the_link_that_breaks(said: dict[str, Any], reason: str) -> None:
    text = answer(row(**COSTS, **said), TRUTH)
    assert "it does not pay: the best of 1 plans, conditional, 1 layer ahead, would cost 5.0 % of the time" in text
    assert reason in text


def test_the_best_plan_speaks_and_a_saving_below_a_hundredth_is_none() -> None:
    text = answer(row("previous_token", lookahead_layers=0, simulated_time_with_ns=1990), row(**COSTS), TRUTH)
    assert "the best of 2 plans, the previous token's experts, would save 0.5 % of the time" in text


def test_where_the_truth_saves_nothing_there_is_nothing_to_gain() -> None:
    text = answer(row(), {**TRUTH, "simulated_time_with_ns": 1995})
    assert (
        "there is nothing to gain: 400 of 1,000 accesses miss, and even the truth would save 0.2 % of the time" in text
    )


def test_without_sizes_misses_are_counted_and_each_cache_has_its_sentence() -> None:
    unbounded = {"bandwidth_bytes_per_s": None, "simulated_time_without_ns": 0, "simulated_time_with_ns": 0}
    rows = [
        {**one, **unbounded, "capacity_experts_total": room, "simulated_misses_with": left}
        for room, left in ((40, 200), (80, 399))
        for one in (row(), {**TRUTH, "simulated_misses_with": 0})
    ]
    for one in rows:
        if one["predictor"] == "oracle":
            one["simulated_misses_with"] = 0
    text = answer(*rows)
    assert "With room for 40 experts it may pay: conditional, 1 layer ahead would save 50.0 % of the misses" in text
    assert "With room for 80 experts it does not pay" in text
    assert "arriving at once, since the trace does not say how large an expert is" in text


def test_rows_with_a_bandwidth_speak_before_those_without_and_the_grid_has_all() -> None:
    unbounded = row(bandwidth_bytes_per_s=None, simulated_time_without_ns=0, simulated_time_with_ns=0)
    (block,) = benefit_blocks([row(), TRUTH, unbounded])
    assert "of the time" in block.findings[0]
    assert "at once" not in block.findings[0]
    assert [line[2].text for line in block.grids[0].rows].count("unbounded") == 1
    assert len(block.grids[0].rows) == 3
    assert benefit_blocks([]) == []
