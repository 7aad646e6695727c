"""`expert-tier compare`: what two results differ in comes first, and only one kind of difference is a question."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.cli import main
from pipeline.compare import (
    DECODED,
    MACHINE,
    NATIVE,
    SIMULATED,
    Comparison,
    UnknownResult,
    compare,
    comparison_document,
    comparison_text,
    find_result,
)
from schemas import documents
from schemas.files import DataFolder
from schemas.tables import CONTRACT, TABLES
from tests.table_rows import ROWS
from tests.test_answer_views import OTHERWISE, SIMULATED_OTHERWISE, Views
from warehouse.build import build_warehouse

Row = dict[str, Any]

KIND_OF = {column: kind for kind, columns in NATIVE.items() for column in columns}
SIMULATED_KIND_OF = {column: kind for kind, columns in SIMULATED.items() for column in columns}
BESIDE = {"delivery": "replay_delivery", "plan_hash": "replay_delivery", "piece_bytes": "replay_delivery",
          "hint_slots": "replay_delivery", "experiment_id": "experiment_run"}  # fmt: skip


def run(run_id: str, **values: Any) -> Row:
    return {**ROWS["replay_run"], "run_id": run_id, **values}


def reading(**rows: list[Row]) -> Callable[[str], pl.DataFrame]:
    """A warehouse of these rows; machines are there unless they are given."""
    rows.setdefault("machine", [{**ROWS["machine"], "machine_id": name} for name in ("machine-1", "elsewhere")])

    def read(relation: str) -> pl.DataFrame:
        if relation in TABLES:
            return TABLES[relation].frame(rows.get(relation, []))
        return pl.DataFrame(rows.get(relation, [{"condition_hash": "none of these"}]))

    return read


def compared(a: Row, b: Row, **rows: list[Row]) -> Comparison:
    read = reading(replay_run=[a, b], **rows)
    return compare(find_result(a["run_id"], read), find_result(b["run_id"], read))


def counted(found: Comparison) -> set[tuple[str, str]]:
    return {(one.kind, one.column) for one in found.differences if one.counted}


# Every contract column is known.


def test_every_contract_column_has_a_kind() -> None:
    """A column that joins the contract of the views is one that a comparison has to name."""
    views = Views()
    native, decoded = views.columns("native_condition"), views.columns("decode_summary")
    views.connection.close()
    assert set(native[: native.index("condition_hash")]) <= set(KIND_OF)
    known = {column for columns in DECODED.values() for column in columns}
    assert set(decoded[: decoded.index("condition_hash")]) <= known
    assert set(SIMULATED_KIND_OF) == set(CONTRACT)
    assert {"machine_id", *MACHINE} == set(TABLES["machine"].column_names)


@pytest.mark.parametrize("column", sorted(OTHERWISE))
def test_a_contract_column_that_differs_is_named_with_both_values(column: str) -> None:
    a, b = run("run-a"), run("run-b")
    beside: dict[str, list[Row]] = {}
    if column in BESIDE:
        table = BESIDE[column]
        beside[table] = [{**ROWS[table], "run_id": "run-a"}, {**ROWS[table], "run_id": "run-b"}]
        if table == "replay_delivery":
            beside[table][1][column] = "blocking" if column == "delivery" else OTHERWISE[column]
        else:
            beside[table][1][column] = OTHERWISE[column]
    else:
        b["mechanism_detail" if column == "limited_by" else column] = OTHERWISE[column]
    found = compared(a, b, **beside)
    # A mechanism without a detail is its own detail.
    assert counted(found) == {(KIND_OF[column], column)}
    (one,) = [each for each in found.differences if each.column == column]
    assert one.a != one.b and one.b == OTHERWISE[column]
    lines = comparison_text(found)
    place = next(number for number, line in enumerate(lines) if f"{KIND_OF[column]}: {column}" in line)
    assert place < next(number for number, line in enumerate(lines) if line.startswith("quantities"))
    asked = KIND_OF[column] not in ("experiment", "observation")
    assert found.comparable is asked
    assert found.verdict == (
        f"comparable: differs in {KIND_OF[column]} alone"
        if asked
        else f"not comparable: differs in {KIND_OF[column]}, which is not a question"
    )


@pytest.mark.parametrize("column", sorted(SIMULATED_OTHERWISE))
def test_a_simulated_contract_column_that_differs_is_named(column: str) -> None:
    first = {**ROWS["sweep"], "cell_hash": "aa"}
    read = reading(sweep=[first, {**first, "cell_hash": "bb", column: SIMULATED_OTHERWISE[column]}])
    found = compare(find_result("aa", read), find_result("bb", read))
    assert counted(found) == {(SIMULATED_KIND_OF[column], column)}
    assert found.comparable


def test_two_kinds_are_no_question_and_are_still_shown() -> None:
    found = compared(run("a"), run("b", owner="arena", policy="static", threads=4, device_bytes=900))
    text = "\n".join(comparison_text(found))
    assert "not comparable: differs in owner and reading, which is not a question" in text
    assert "quantities, NOT comparable:" in text and "B ÷ A" not in text
    assert "device_bytes" in text


def test_repetitions_of_one_condition_are_one_contract() -> None:
    found = compared(run("a"), run("b", repeat=1, device_bytes=900, own_anonymous_bytes=1100, wall_bytes=1600))
    assert found.verdict == "comparable: one contract"
    (wall,) = found.differences
    assert (wall.column, wall.counted) == ("wall_bytes", False)
    (line,) = [line for line in comparison_text(found) if line.lstrip().startswith("device_bytes ")]
    assert line.split() == ["device_bytes", "1,800", "900", "0.5"]


def test_owners_are_equal_in_memory_where_their_walls_are() -> None:
    equal = compared(run("a"), run("b", owner="user_cache", capacity_bytes=300))
    assert equal.verdict == "comparable: differs in owner alone"
    other = compared(run("a"), run("b", owner="user_cache", wall_bytes=1600))
    assert other.verdict == "not comparable: differs in owner and capacity, which is not a question"


def test_a_machine_that_was_booted_smaller_is_a_limit_and_another_machine_is_not() -> None:
    small = {**ROWS["machine"], "machine_id": "small", "memory_bytes": 2**30}
    machines = [{**ROWS["machine"], "machine_id": "machine-1"}, small]
    here, there = run("a"), run("b", mechanism="boot", machine_id="small")
    assert compared(here, there, machine=machines).verdict == "comparable: differs in wall alone"
    found = compared(here, there, machine=[machines[0], {**small, "cpu_model": "another"}])
    assert found.verdict == "not comparable: differs in machine and wall, which is not a question"
    assert ("machine", "cpu_model") in counted(found)


# What is said of each result.


def test_a_ratio_stands_beside_its_parts_and_unknown_stays_unknown() -> None:
    text = comparison_text(compared(run("a"), run("b", device_bytes=None, amplification_nominal=None)))
    (rate,) = [line for line in text if "native_hit_rate" in line]
    assert rate.count("0.5 = 20 ÷ 40") == 2
    (device,) = [line for line in text if line.lstrip().startswith("device_bytes ")]
    assert device.split() == ["device_bytes", "1,800", "unknown"]
    (ratio,) = [line for line in text if "amplification_nominal" in line]
    assert "1.2 = 1,800 ÷ 1,500" in ratio and "unknown = unknown ÷ 1,500" in ratio


def test_a_quarantined_run_is_named_with_the_proof_that_failed() -> None:
    proof = {**ROWS["replay_proof"], "run_id": "b", "name": "device bytes", "spoils": "bytes", "expected": "10 bytes",
             "found": "9 bytes", "held": False}  # fmt: skip
    found = compared(run("a"), run("b", bytes_valid=False, bytes_reasons="x"), replay_proof=[proof])
    text = comparison_text(found)
    assert "B: replay run b: QUARANTINED" in text[1]
    assert "proof 'device bytes' failed: expected 10 bytes, found 9 bytes" in text[1]
    assert not found.comparable
    assert found.verdict == "not comparable: B quarantined"


def test_times_that_are_not_valid_are_not_shown() -> None:
    found = compared(run("a"), run("b", time_valid=False, time_reasons="load"))
    (line,) = [line for line in comparison_text(found) if line.lstrip().startswith("wall_ns")]
    assert line.split() == ["wall_ns", "900", "not", "valid"]
    assert "times NOT valid" in comparison_text(found)[1]


def test_a_condition_is_medians_with_ranges_and_a_single_repetition_says_so() -> None:
    views = Views()
    from tests.test_answer_views import runs

    views.build(runs((1000, 1004, 1002)), runs((900,), owner="user_cache", policy="sieve", condition_hash="d"))
    frame = pl.DataFrame(views.rows("native_condition"))
    views.connection.close()
    empty = reading(machine=[])

    def read(relation: str) -> pl.DataFrame:
        return frame if relation == "native_condition" else empty(relation)

    text = comparison_text(compare(find_result("c", read), find_result("d", read)))
    assert text[0].endswith("condition c: medians of 3 repetitions")
    assert text[1].endswith("condition d: a single repetition")
    (line,) = [line for line in text if line.lstrip().startswith("device_bytes ")]
    assert "1,002 (1,000 … 1,004)" in line and "900 (900 … 900)" in line


def test_measured_beside_simulated_differs_in_evidence() -> None:
    cell = {**ROWS["sweep"], "cell_hash": "ce11", "capacity_bytes": 400, "warm_pass": True}
    read = reading(replay_run=[run("a")], sweep=[cell])
    found = compare(find_result("a", read), find_result("ce11", read))
    assert found.verdict == "comparable: differs in evidence alone"
    assert ("evidence", "evidence") in counted(found)
    # One pass cold, the other warm: that is another window.
    read = reading(replay_run=[run("a")], sweep=[{**cell, "warm_pass": False}])
    other = compare(find_result("a", read), find_result("ce11", read))
    assert other.verdict == "not comparable: differs in evidence and window, which is not a question"


# Names of results.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "wanted a run_id"),
        ("nothing", "no such result in the warehouse"),
        ("run-", "2 results begin so, run-a, run-b; give more of it"),
        ("policy=lru", "2 rows of hit_rate, which differ in capacity_experts_total; add those"),
        ("policy=arc", "no row of hit_rate is so"),
        ("colour=red", "wanted COLUMN=VALUE with a column of hit_rate"),
        ("policy=lru,", "wanted COLUMN=VALUE"),
        ("nowhere:policy=lru", "no relation 'nowhere' to compare; wanted one of replay_run"),
        ("0123456789ab", "a condition without a valid and complete run of its own; compare its runs: run-a, run-b"),
    ],
)
def test_a_name_that_is_not_one_result_is_refused(text: str, said: str) -> None:
    rates = [ROWS["hit_rate"], {**ROWS["hit_rate"], "capacity_experts_total": 8}]
    read = reading(replay_run=[run("run-a"), run("run-b")], hit_rate=rates)
    with pytest.raises(UnknownResult) as refused:
        find_result(text, read)
    assert said in str(refused.value)


def test_a_row_is_named_by_its_columns_and_a_whole_id_wins_over_longer_ones() -> None:
    rates = [ROWS["hit_rate"], {**ROWS["hit_rate"], "capacity_experts_total": 8}]
    read = reading(replay_run=[run("run"), run("run-b")], hit_rate=rates)
    found = find_result("capacity_experts_total=8,warm_pass=false,seed=null,warm_fraction=0.6", read)
    assert found.row["capacity_experts_total"] == 8
    assert find_result("run", read).row["run_id"] == "run"
    assert find_result("replay_run:run_id=run-b", read).row["run_id"] == "run-b"


def test_the_command_prints_and_its_json_keeps_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = DataFolder(tmp_path)
    for name, rows in {
        "replay_run": [run("run-a"), run("run-b", owner="arena", device_bytes=None, amplification_nominal=None,
                                         amplification_resident=None)],
        "machine": [ROWS["machine"]],
    }.items():  # fmt: skip
        file = data.result_file(name, "here")
        file.parent.mkdir(parents=True)
        TABLES[name].frame(rows).write_parquet(file)
    build_warehouse(tmp_path)
    assert main(["compare", "run-a", "run-b", "--data", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "contract, the columns that differ:" and "owner: owner" in lines[5]
    assert main(["compare", "run-a", "run-b", "--json", "--data", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == documents.Comparison.model_validate(document).model_dump()
    (device,) = [one for one in document["quantities"] if one["column"] == "device_bytes"]
    assert (device["a"]["value"], device["b"]["value"], device["unit"]) == (1800, None, "byte")
    assert main(["compare", "run-a", "nobody", "--data", str(tmp_path)]) == 1
    assert "no such result" in capsys.readouterr().err
    assert comparison_document(compared(run("a"), run("b")))["comparable"]
