"""The answer follows the rows: flip them, and the sentence flips."""

import html
from typing import Any

import pytest

from pipeline.lookahead_report import benefit_blocks
from pipeline.plots import Plots
from schemas.tables import TABLES
from tests.table_rows import ROWS

SPACE = "\N{NARROW NO-BREAK SPACE}"


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
    (block,) = benefit_blocks(rows, Plots())
    (said,) = block.findings
    return said.replace(SPACE, " ")


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
        ({"predicted_misses": 0, "recall_missed": 0.0}, "500 accesses, none was missing when it was accessed"),
        ({"recall_missed": 0.1}, "names 50.0 % of all accesses and 10.0 % of the misses"),
        ({"late_share": 0.9}, "90.0 % of the prefetches that were used came late"),
        ({"simulated_displaced": 120}, "it removes 150 misses and displaces 120 hits"),
        ({}, "it names 50.0 % of the misses, which is too little"),
    ],
)
def test_the_reason_is_the_link_that_breaks(said: dict[str, Any], reason: str) -> None:
    text = answer(row(**COSTS, **said), TRUTH)
    assert (
        "it does not pay: the best of 1 plan that prefetches anything, conditional, 1 layer ahead, would cost 5.0 % of "
        "the time" in text
    )
    assert reason in text


def test_the_best_plan_speaks_and_a_saving_below_a_hundredth_is_none() -> None:
    text = answer(row("previous_token", lookahead_layers=0, simulated_time_with_ns=1990), row(**COSTS), TRUTH)
    assert (
        "the best of 2 plans that prefetch anything, the previous token's experts, would save 0.5 % of the time" in text
    )


def test_a_plan_that_prefetches_nothing_is_not_the_best_one_and_not_drawn() -> None:
    idle = {"simulated_submitted": 0, "simulated_removed_misses": 0, "simulated_time_with_ns": 2000}
    still = row("previous_token", lookahead_layers=0, **idle)
    text = answer(still, row(**COSTS), TRUTH)
    assert "the best of 1 plan that prefetches anything, conditional, 1 layer ahead, would cost 5.0 % of" in text
    assert "room for 40 experts, conditional, 1 layer ahead" in drawn(still, row(**COSTS), TRUTH)
    text = answer(still, TRUTH)
    assert (
        "it does not pay: the one plan that was tried does not prefetch anything, since what it names is there" in text
    )
    assert "where the truth would save 50.0 % of the time" in text
    text = answer(still, row("frequency", lookahead_layers=0, **idle), TRUTH)
    assert "it does not pay: none of 2 plans prefetches anything, since what they name is there" in text
    (block,) = benefit_blocks([still, TRUTH], Plots(), waterfalls=[waterfall(still), waterfall(TRUTH)])
    assert block.pictures == []
    assert "A miss that was named may remain" in block.grids[0].caption


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
    (block,) = benefit_blocks([row(), TRUTH, unbounded], Plots())
    assert "of the time" in block.findings[0]
    assert "at once" not in block.findings[0]
    assert [line[2].text for line in block.grids[0].rows].count("unbounded") == 1
    assert len(block.grids[0].rows) == 3
    assert benefit_blocks([], Plots()) == []


def waterfall(one: dict[str, Any], **said: Any) -> dict[str, Any]:
    """The view's row of a row of the table."""
    known = {name: one.get(name) for name in TABLES["lookahead_benefit"].column_names}
    late = known["simulated_removed_late"]
    return {
        **known, "simulated_removed_in_time": known["simulated_removed_misses"] - late, "simulated_used_bytes": 300,
        "simulated_saved_ns": known["simulated_time_without_ns"] - known["simulated_time_with_ns"], **said,
    }  # fmt: skip


def drawn(*rows: dict[str, Any], **said: Any) -> str:
    (block,) = benefit_blocks(rows, Plots(), waterfalls=[waterfall(one, **said) for one in rows])
    (picture,) = block.pictures
    assert "Simulated, not measured, from trace tiny" in picture.caption
    return " ".join(html.unescape(plot) for plot in picture.plots).replace(SPACE, " ")


def test_the_chain_is_drawn_of_the_plan_that_the_sentence_names_with_its_numbers() -> None:
    svg = drawn(row(), row("frequency", simulated_time_with_ns=1900), TRUTH)
    assert svg.count("<svg") == 1
    assert "room for 40 experts, conditional, 1 layer ahead" in svg
    assert (
        "accesses (400 miss without the plan): selections 16, accesses 1,000, named beforehand 500, named and "
        "missing 200, arrived in time 149, arrived late 1 and hits displaced 10." in svg
    )
    assert (
        "bytes read: without the plan 800 B, saved \N{MINUS SIGN}200 B, displaced +100 B, read ahead, used +300 B, "
        "read ahead, wasted +300 B and with the plan 1.30 kB." in svg
    )
    assert "time: without the plan 0.002 ms, saved \N{MINUS SIGN}0.001 ms and with the plan 0.002 ms." in svg


def test_the_drawing_flips_with_the_rows_and_shows_what_is_known_alone() -> None:
    assert "room for 40 experts, the most frequent experts" in drawn(
        row("frequency", lookahead_layers=0, simulated_time_with_ns=1000), row(), TRUTH
    )
    assert "time: without the plan 0.002 ms, lost +0.001 ms" in drawn(row(simulated_time_with_ns=3000), TRUTH)
    assert "bytes read" not in drawn(row(simulated_device_bytes=None), TRUTH)
    unbounded = {"bandwidth_bytes_per_s": None, "simulated_time_without_ns": 0, "simulated_time_with_ns": 0}
    assert "time: " not in drawn(row(**unbounded), {**TRUTH, **unbounded})
    assert drawn(row(), row(capacity_experts_total=80)).count("<svg") == 2
    (block,) = benefit_blocks([row()], Plots())
    assert block.pictures == []


def effect(**said: Any) -> dict[str, Any]:
    """A plan that reads a tenth less, of which nothing is due to chance, and takes as long as none."""
    return {
        "condition": "oracle, advice", "plan_hash": "0123456789ab", "delivery": "advice", "owner": "page_cache",
        "limited_by": "cgroup v2", "machine_id": "m", "capacity_bytes": 400, "plan_runs": 5, "none_runs": 10,
        "plan_device_bytes": 900, "plan_device_low_bytes": 890, "plan_device_high_bytes": 905,
        "none_device_bytes": 1000, "none_device_low_bytes": 990, "none_device_high_bytes": 1020,
        "saved_device_bytes": 100, "none_spread_bytes": 30, "plan_spread_bytes": 15, "effect_bytes": "less",
        "plan_timed_runs": 5, "none_timed_runs": 10, "plan_wall_ns": 5_100_000, "plan_wall_low_ns": 5_000_000,
        "plan_wall_high_ns": 5_300_000, "none_wall_ns": 5_000_000, "none_wall_low_ns": 4_800_000,
        "none_wall_high_ns": 5_200_000, "saved_ns": -100_000, "none_spread_ns": 400_000, "plan_spread_ns": 300_000,
        "effect_time": "none", "completed_share": 0.8, "hints_completed": 40, "hints": 50, "named_hit_rate": 0.75,
        "named_hits": 75, "named_accesses": 100, "hints_submitted": 45, "hinted_share": 0.5, "plan_events": 100, **said,
    }  # fmt: skip


def measured(*effects: dict[str, Any]) -> list[str]:
    (block,) = benefit_blocks([row(), TRUTH], Plots(), effects=effects)
    return [said.replace(SPACE, " ") for said in block.findings[1:]]


def test_what_native_runs_measured_stands_beside_what_is_simulated_and_flips_with_the_view() -> None:
    assert measured(effect()) == [
        "Measured, oracle, advice, page_cache with 400 B: bytes from the device 10.0 % less (900 B against 1.00 kB; 5 "
        "runs with it, 10 without; runs of one condition differ by up to 30 B); no effect on time (2.0 % more, 5.100 "
        "ms against 5.000 ms; 5 timed runs with it, 10 without; timed runs of one condition differ by up to 0.400 ms); "
        "hints for 50.0 % of the events (50 of 100)."
    ]
    costs = {"plan_device_bytes": 1200, "saved_device_bytes": -200, "effect_bytes": "more"}
    quick = {"plan_wall_ns": 4_000_000, "saved_ns": 1_000_000, "effect_time": "less"}
    (said,) = measured(effect(**costs, **quick))
    assert "bytes from the device 20.0 % more (1.20 kB against 1.00 kB; 5 runs" in said
    assert "time 20.0 % less (4.000 ms against 5.000 ms; 5 timed runs" in said


def test_a_figure_of_one_run_has_no_spread_and_counts_are_those_of_its_own_kind() -> None:
    once = {"plan_runs": 5, "plan_timed_runs": 1, "none_timed_runs": 1, "effect_time": None}
    (said,) = measured(effect(**once, none_spread_ns=0, plan_spread_ns=0))
    assert "(2.0 % more, 5.100 ms against 5.000 ms; one timed run each); hints" in said
    assert "1.00 kB; 5 runs with it, 10 without; runs of one condition differ by up to 30 B)" in said
    (said,) = measured(effect(plan_timed_runs=1, none_timed_runs=3, plan_spread_ns=0, effect_time=None))
    assert "; 1 timed run with it, 3 without; timed runs of one condition differ by up to 0.400 ms)" in said
    (block,) = benefit_blocks([], Plots(), effects=[effect(plan_timed_runs=1)])
    assert block.grids[0].rows[0][5].note.startswith("1 timed run, ")


def test_where_nothing_was_delivered_the_sentence_says_so_and_tells_no_effect() -> None:
    nothing = {"hints_submitted": 0, "hints": 0, "hinted_share": 0.0, "effect_bytes": None, "effect_time": None}
    (said,) = measured(effect(**nothing))
    assert said.endswith(
        "nothing of the plan was delivered, so bytes and times say nothing of it; it has hints for 0.0 % of the events "
        "(0 of 100)."
    )
    assert "effect" not in said


def test_without_enough_repetitions_valid_times_or_a_counterpart_the_sentence_says_so() -> None:
    untimed = {"plan_wall_ns": None, "saved_ns": None, "effect_time": None}
    (said,) = measured(effect(plan_runs=1, effect_bytes=None, condition=None, **untimed))
    assert "plan 0123456789ab, advice, page_cache with 400 B: too few valid repetitions to tell of bytes from" in said
    assert "(10.0 % less, 900 B against 1.00 kB; 1 run with it, 10 without; runs of one condition" in said
    assert "no valid time of both; hints for" in said
    (said,) = measured(effect(none_runs=0))
    assert said.startswith("Measured, but held against nothing: 1 condition with a plan")
    assert measured() == ["Measured: nothing, since no native run of this trace delivered a plan."]


def test_the_largest_savings_have_sentences_and_the_table_has_all() -> None:
    rows = [effect(condition=f"plan {saved}", saved_device_bytes=saved) for saved in (10, 60, 20, 50, 30, 40)]
    said = measured(*rows)
    assert [one.split(",")[1] for one in said[:4]] == [" plan 60", " plan 50", " plan 40", " plan 30"]
    assert said[4:] == ["The table has 2 more conditions with a plan."]
    (block,) = benefit_blocks([row(), TRUTH], Plots(), effects=rows)
    assert len(block.grids[1].rows) == 6


def test_native_runs_alone_have_a_block_too() -> None:
    (block,) = benefit_blocks([], Plots(), effects=[effect()])
    assert (len(block.findings), len(block.grids), block.pictures) == (1, 1, [])
    assert benefit_blocks([], Plots(), effects=[]) == []
