"""The view on native runs with a plan against those without, on rows whose medians and spreads are seen at a glance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.tables import TABLES
from tests.test_warehouse import run_row, valid_row, write_result
from warehouse.build import build_warehouse, query

NONE = (1000, 1010, 1020, 990, 1005)
NEVER_TOGETHER = {"together_id": None, "tenant_number": None, "tenants": None, "shares_wall": None}


def runs(
    name: str,
    device: Sequence[int],
    wall: Sequence[int] | None = None,
    *,
    plan: str | None = None,
    hinted: dict[str, int] | None = None,
    **values: Any,
) -> list[dict[str, Any]]:
    """Runs of one condition; with `plan` their rows of replay_delivery under `delivery`, where asked their cell's."""
    said = {"experiment_id": None, **values}
    experiment_id = said.pop("experiment_id")
    attempts = said.pop("attempts", [0] * len(device))
    found = []
    for number, device_bytes in enumerate(device):
        row = run_row(
            f"{name} {number}", condition_hash=name, device_bytes=device_bytes, outer_group_bytes=None,
            wall_ns=device_bytes if wall is None else wall[number],
            **{**NEVER_TOGETHER, "wall_bytes": 7000 + number, **said},
        )  # fmt: skip
        key = {"run_id": row["run_id"]}
        if plan is not None:
            row["delivery"] = valid_row(
                TABLES["replay_delivery"], **key, delivery="advice", plan_hash=plan,
                named_accesses=20, named_hits=15, hinted_missing_bytes=300, hinted_read_bytes=200,
                **({"hints": 10, "hints_completed": 8} | (hinted or {})),
            )  # fmt: skip
        if experiment_id is not None:
            row["cell"] = valid_row(
                TABLES["experiment_run"], **key, experiment_id=experiment_id, condition=name,
                repetition=number - attempts[number], attempt=attempts[number],
            )  # fmt: skip
        found.append(row)
    return found


def effects(folder: Path, columns: str, *conditions: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    rows = [row for condition in conditions for row in condition]
    for table, of_run in (("replay_delivery", "delivery"), ("experiment_run", "cell")):
        beside = [row.pop(of_run) for row in rows if of_run in row]
        if beside:
            write_result(folder, table, "a", beside)
    write_result(folder, "replay_run", "a", rows)
    build_warehouse(folder)
    return query(folder, f"SELECT {columns} FROM lookahead_effect").rows()


def verdicts(folder: Path, *conditions: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return effects(folder, "plan_runs, none_runs, effect_bytes, effect_time", *conditions)


def test_a_plan_is_held_against_runs_without_one_by_lower_medians_and_spreads(tmp_path: Path) -> None:
    plan = runs("planned", (900, 910, 905, 920, 915), (1, 2, 3, 4, 2000), plan="p", resident_median_bytes=380)
    columns = (
        "condition_hash, delivery, plan_hash, plan_runs, none_runs, plan_device_bytes, none_device_bytes, "
        "none_device_low_bytes, none_device_high_bytes, saved_device_bytes, none_spread_bytes, plan_spread_bytes, "
        "device_over_none, effect_bytes, plan_wall_ns, none_wall_ns, saved_ns, none_spread_ns, plan_spread_ns, "
        "wall_over_none, effect_time, plan_resident_bytes, none_resident_bytes"
    )
    (found,) = effects(tmp_path, columns, runs("bare", NONE), plan)
    bytes_found = ("planned", "advice", "p", 5, 5, 910, 1005, 990, 1020, 95, 30, 20, 910 / 1005, "less")
    # One slow run: the saving of 1002 lies inside what the plan does against itself.
    assert found == (*bytes_found, 3, 1005, 1002, 30, 1999, 3 / 1005, "none", 380, 390)
    shares = (
        "plan_hits, plan_observed_accesses, plan_hit_rate, none_hits, none_observed_accesses, none_hit_rate, "
        "hints_completed, hints, completed_share, named_hits, named_accesses, named_hit_rate, hinted_read_bytes, "
        "hinted_missing_bytes"
    )
    assert query(tmp_path, f"SELECT {shares} FROM lookahead_effect").rows() == [
        (100, 200, 0.5, 100, 200, 0.5, 40, 50, 0.8, 75, 100, 0.75, 1000, 1500)
    ]


@pytest.mark.parametrize(
    ("device", "effect"),
    [
        ((900,) * 5, "less"), ((975,) * 5, "none"), ((974,) * 5, "less"), ((1035,) * 5, "none"), ((1036,) * 5, "more"),
        ((800, 800, 900, 900, 950), "none"), ((900,) * 4, None),
    ],
)  # fmt: skip
def test_an_effect_inside_the_spread_is_none_and_of_too_few_runs_unknown(
    tmp_path: Path, device: tuple[int, ...], effect: str | None
) -> None:
    assert verdicts(tmp_path, runs("bare", NONE), runs("planned", device, plan="p")) == [
        (len(device), 5, effect, effect)
    ]


def test_a_plan_of_which_nothing_was_handed_over_has_no_effect_and_says_of_how_many_events_it_spoke(
    tmp_path: Path,
) -> None:
    columns = "effect_bytes, effect_time, hints, hints_submitted, plan_events, hinted_share, completed_share"
    silent = {"hints": 0, "hints_submitted": 0, "hints_completed": 0}
    for place, (hinted, found) in enumerate((
        (silent, (None, None, 0, 0, 2000, 0.0, None)),
        ({**silent, "hints": 4}, (None, None, 20, 0, 2000, 0.01, 0.0)),
        ({"hints": 4, "hints_submitted": 1, "hints_completed": 1}, ("less", "less", 20, 5, 2000, 0.01, 0.25)),
    )):  # fmt: skip
        planned = runs("planned", (500,) * 5, plan="p", hinted=hinted, events=400)
        assert effects(tmp_path / str(place), columns, runs("bare", NONE), planned) == [found]


def test_two_conditions_of_an_experiment_with_the_same_plan_are_not_pooled(tmp_path: Path) -> None:
    of = {"experiment_id": "lookahead-1"}
    oracle, fitted = (runs(name, (900,) * 5, plan="p", **of) for name in ("oracle", "fitted"))
    for row in (*oracle, *fitted):
        row["condition_hash"] = "same"
    found = effects(tmp_path, "condition, plan_runs, none_runs", runs("no plan", NONE, **of), oracle, fitted)
    assert sorted(found) == [("fitted", 5, 5), ("oracle", 5, 5)]


def test_runs_that_read_nothing_are_compared_as_well(tmp_path: Path) -> None:
    columns = "device_over_none, effect_bytes"
    planned = runs("planned", (500,) * 5, plan="p")
    assert effects(tmp_path / "more", columns, runs("bare", (0,) * 5), planned) == [(None, "more")]
    planned = runs("planned", (0,) * 5, plan="p")
    assert effects(tmp_path / "none", columns, runs("bare", (0,) * 5), planned) == [(None, "none")]


def test_what_is_not_valid_counts_nowhere_and_times_need_their_own_verdict(tmp_path: Path) -> None:
    found = effects(
        tmp_path,
        "plan_runs, none_runs, plan_timed_runs, none_timed_runs, effect_bytes, effect_time, none_wall_ns",
        runs("bare", NONE, time_valid=False),
        runs("bad", (5,) * 5, bytes_valid=False, time_valid=False),
        runs("stopped", (5,) * 5, status="interrupted"),
        runs("together", (5,) * 5, together_id="pair"),
        runs("planned", (900,) * 5, plan="p"),
        runs("bad plan", (5,) * 5, plan="p", bytes_valid=False, time_valid=False),
    )
    assert found == [(5, 5, 5, 0, "less", None, None)]


@pytest.mark.parametrize(
    "other",
    [
        {"capacity_bytes": 500}, {"trace_id": "b"}, {"pool_id": "other"}, {"machine_id": "other"},
        {"owner": "page_cache_mmap"}, {"mechanism": "balloon"}, {"mechanism_detail": "cgroup v1"},
        {"fadvise": "normal"}, {"step_begin": 1}, {"warm_pass": False}, {"threads": 4}, {"headroom_bytes": 1},
        {"experiment_id": "lookahead-1"}, {"capacity_bytes": None},
    ],
)  # fmt: skip
def test_other_conditions_are_no_baseline(tmp_path: Path, other: dict[str, Any]) -> None:
    bare, planned = runs("bare", NONE, **other), runs("planned", (900,) * 5, plan="p")
    assert verdicts(tmp_path, bare, planned) == [(5, 0, None, None)]


def test_without_a_plan_or_without_a_run_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert verdicts(tmp_path, runs("bare", NONE)) == []
    assert effects(tmp_path / "b", "none_device_bytes, device_over_none", runs("planned", (900,) * 5, plan="p")) == [
        (None, None)
    ]


def test_no_limit_is_a_condition_too_and_walls_are_equal_where_capacities_are_what_they_leave(tmp_path: Path) -> None:
    free = {"mechanism": "none", "mechanism_detail": None, "capacity_bytes": None, "wall_bytes": None}
    found = verdicts(tmp_path / "free", runs("bare", NONE, **free), runs("planned", (900,) * 5, plan="p", **free))
    assert found == [(5, 5, "less", "less")]
    bare = [row for one in range(5) for row in runs(f"bare{one}", NONE[one : one + 1], capacity_bytes=400 + one)]
    planned = [
        row for one in range(5) for row in runs(f"planned {one}", (900,), plan="p", capacity_bytes=300 + one)
    ]  # fmt: skip
    for row in (*bare, *planned):
        row |= {"wall_bytes": 9000, "condition_hash": row["condition_hash"].rstrip("01234 ")}
    assert verdicts(tmp_path / "walled", bare, planned) == [(5, 5, "less", "less")]


def test_both_conditions_without_a_plan_are_one_baseline_and_repetitions_count_once(tmp_path: Path) -> None:
    of = {"experiment_id": "lookahead-1"}
    again = runs("no plan", NONE, **of)
    once_more = runs("no plan, again", NONE, **of)
    # The sixth is a second attempt at the fifth repetition: one of its tries was valid already.
    planned = runs("oracle, advice", (900,) * 6, plan="p", attempts=[0, 0, 0, 0, 0, 1], **of)
    found = effects(
        tmp_path, "experiment_id, condition, plan_runs, none_runs, effect_bytes", again, once_more, planned
    )  # fmt: skip
    assert found == [("lookahead-1", "oracle, advice", 5, 10, "less")]


def test_each_plan_and_delivery_has_a_row(tmp_path: Path) -> None:
    found = effects(
        tmp_path, "condition_hash, plan_hash, effect_bytes", runs("bare", NONE),
        runs("oracle", (500,) * 5, plan="p"), runs("fitted", (1500,) * 5, plan="q"),
    )  # fmt: skip
    assert sorted(found) == [("fitted", "q", "more"), ("oracle", "p", "less")]


def test_the_waterfall_s_bytes_add_up_to_what_was_read_with_the_plan(tmp_path: Path) -> None:
    row = valid_row(
        TABLES["lookahead_benefit"], simulated_removed_misses=5, simulated_removed_late=2, miss_bytes=800,
        simulated_removed_bytes=200, simulated_displaced_bytes=100, simulated_wasted_bytes=300,
        simulated_device_bytes=1200, simulated_time_without_ns=2000, simulated_time_with_ns=1500,
    )  # fmt: skip
    write_result(tmp_path, "lookahead_benefit", "a", [row])
    build_warehouse(tmp_path)
    assert query(
        tmp_path,
        "SELECT simulated_removed_in_time, miss_bytes - simulated_removed_bytes + simulated_displaced_bytes + "
        "simulated_used_bytes + simulated_wasted_bytes, simulated_used_bytes, simulated_more_device_bytes, "
        "simulated_saved_ns FROM lookahead_waterfall",
    ).rows() == [(3, 1200, 200, 400, 500)]
