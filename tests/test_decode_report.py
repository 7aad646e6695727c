"""What the report says of decodes follows the rows: flip them, and the sentence flips."""

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

import pipeline.decode_report as reporting
from pipeline.decode_report import VIEWS, decode_blocks
from pipeline.page import Block
from replayer.token_identity import Arm, void
from schemas.files import DataFolder
from schemas.tables import DECODE_TABLES, TABLES
from tests.table_rows import ROWS
from warehouse.build import build_warehouse, query, read_tables


def arms(number: int, owner_ns: int, against_ns: int, **said: Any) -> dict[str, Any]:
    """A pair, by the times of its two sides."""
    usual = {"decode_pair_id": f"pair-{number}", "pair": number, "owner_decode_ns": owner_ns}
    return {**ROWS["decode_pair"], **usual, "against_decode_ns": against_ns, **said}


def run(run_id: str, **said: Any) -> dict[str, Any]:
    return {**ROWS["decode_run"], "run_id": run_id, **said}


def tables_of(folder: Path, **rows: list[dict[str, Any]]) -> dict[str, pl.DataFrame]:
    """The tables and views as the warehouse has them."""
    data = DataFolder(folder)
    for name, of_table in rows.items():
        target = data.run_file(name, "decode", "part")
        target.parent.mkdir(parents=True)
        TABLES[name].frame(of_table).write_parquet(target)
    build_warehouse(folder)
    return read_tables(folder, VIEWS)


def block_of(folder: Path, **rows: list[dict[str, Any]]) -> Block:
    (block,) = decode_blocks(tables_of(folder, **rows))
    return block


def test_without_decodes_there_is_no_block(tmp_path: Path) -> None:
    assert decode_blocks(tables_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((1.06, 1.10, 1.09), "page_cache is faster than restream by a factor of 1.09 [1.06–1.10] in 3 timed pairs."),
        ((0.90, 0.95, 0.80), "page_cache is slower than restream, whose time is 0.90 [0.80–0.95] in 3 timed pairs"),
        ((0.90, 1.02, 1.10), "which of page_cache and restream is faster is open: 1.02 [0.90–1.10]"),
    ],
)
def test_the_verdict_of_pairs_follows_their_ratios(tmp_path: Path, ratios: tuple[float, ...], said: str) -> None:
    """The first: range and median of the study's chat prompt, arXiv 2608.12103, Table 3."""
    pairs = [arms(number, 100, round(100 * ratio)) for number, ratio in enumerate(ratios)]
    (first, *_) = block_of(tmp_path, decode_pair=pairs).findings
    assert "tokens are identical in 3 of 3 pairs" in first
    assert said in first


@pytest.mark.parametrize(
    "spoiled",
    [
        {"identical": False, "void_reason": "the tokens differ"},
        {"void_reason": "one token repeats"},
        {"owner_time_valid": False},
        {"against_time_valid": False},
    ],
)
def test_a_pair_that_says_nothing_about_time_moves_no_ratio(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    tables = tables_of(tmp_path, decode_pair=[arms(0, 100, 110), arms(1, 100, 900, **spoiled), arms(2, 100, 120)])
    (row,) = tables["decode_pair_ratio"].to_dicts()
    assert (row["pairs"], row["timed_pairs"], row["time_ratio_high"]) == (3, 2, 1.2)
    assert row["time_ratio_median"] == pytest.approx(1.15)
    assert row["identical_pairs"] == (2 if "identical" in spoiled else 3)
    assert row["void_pairs"] == ("void_reason" in spoiled)


def test_pairs_without_one_valid_time_say_so(tmp_path: Path) -> None:
    said = block_of(tmp_path, decode_pair=[arms(0, 100, 110, owner_time_valid=False)]).findings[0]
    assert said.endswith("1 of 1 pairs, and no pair says anything about time.")


def test_tokens_a_second_are_of_decodes_with_valid_times(tmp_path: Path) -> None:
    runs = [
        run("a", decode_ns=5_000, decode_wait_ns=2_000, decode_rest_ns=3_000),
        run("b", decode_ns=4_000, decode_wait_ns=1_000, decode_rest_ns=3_000),
        run("c", decode_ns=2_000, decode_wait_ns=1_000, decode_rest_ns=1_000, time_valid=False),
        run("d", decode_ns=1_000, decode_wait_ns=500, decode_rest_ns=500, degenerate=True),
    ]
    tables = tables_of(tmp_path, decode_run=runs)
    (row,) = tables["decode_summary"].to_dicts()
    assert [row[name] for name in ("runs", "valid_runs", "timed_runs", "distinct_outputs")] == [4, 3, 2, 1]
    # 10 passes in 4.5 µs, the median of 4 and 5.
    assert row["tokens_per_s"] == pytest.approx(10 / 4.5e-6)
    assert (row["tokens_per_s_low"], row["tokens_per_s_high"]) == (pytest.approx(2e6), pytest.approx(2.5e6))
    (block,) = decode_blocks(tables)
    assert any(text.startswith("2 of 4 decodes have no time to be believed") for text in block.findings)


def test_repetitions_that_decode_other_tokens_are_told(tmp_path: Path) -> None:
    same, other = run("a"), run("b", token_sha256="2" * 64)
    assert not any("different tokens" in text for text in block_of(tmp_path / "same", decode_run=[same]).findings)
    said = block_of(tmp_path / "other", decode_run=[same, other]).findings
    assert any("different tokens with page_cache on code.txt" in text for text in said)


def test_a_layer_of_a_decode_that_does_not_exist_is_left_out(tmp_path: Path) -> None:
    layers = [{**ROWS["decode_layer"], "run_id": name} for name in ("a", "killed")]
    tables = tables_of(tmp_path, decode_run=[run("a")], decode_layer=layers)
    assert tables["decode_layer"]["run_id"].to_list() == ["a"]


def test_the_query_beside_the_layers_gives_what_they_show(tmp_path: Path) -> None:
    layers = [{**ROWS["decode_layer"], "run_id": name, "layer_id": layer} for name in "ab" for layer in (1, 3)]
    runs = [run("a"), run("b", time_valid=False)]
    tables = tables_of(tmp_path, decode_run=runs, decode_layer=layers)
    wanted = reporting._layers(tables["decode_run"], tables["decode_layer"])
    assert query(tmp_path, reporting._LAYER_QUERY).to_dicts() == wanted
    assert [row["passes"] for row in wanted] == [10, 10]


def test_a_warehouse_of_decodes_can_be_read_by_name(tmp_path: Path) -> None:
    tables_of(tmp_path, **{name: [ROWS[name]] for name in DECODE_TABLES if name != "decode_layer"})
    with duckdb.connect(str(DataFolder(tmp_path).warehouse), read_only=True) as connection:
        assert connection.execute("SELECT time_ratio_median FROM decode_pair_ratio").fetchall() == [(1.1,)]


def test_a_row_of_a_pair_says_what_the_arms_say() -> None:
    from replayer.decode_results import pair_row

    first = Arm("r1", "page_cache", "1" * 64, 11, False, True, True, None, 1, 5_000, 2_000, 0)
    second = Arm("r2", "restream", "2" * 64, 11, False, True, True, None, 1, 5_500, 2_000, 0)
    told = {name: ROWS["decode_pair"][name] for name in ("model", "model_folder", "prompt_name", "prompt_sha256")}
    row = pair_row({**told, "decoded_tokens": 11}, "r1", 0, 0, (first, second), "restream")
    assert set(row) == set(TABLES["decode_pair"].column_names)
    assert (row["identical"], row["void_reason"], row["first_owner"]) == (False, void(first, second), "restream")
