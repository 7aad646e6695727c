"""`expert-tier lookahead` as its users meet it: one document, a plan that is read again, one line per wrong call."""

import json

import numpy as np
import polars as pl
import pytest

from pipeline.lookahead import TAKES, lookahead_recall
from replayer.plan import read_plan
from replayer.trace import read_trace
from schemas.columns import PREDICTORS
from schemas.documents import LookaheadScore
from schemas.files import DataFolder
from schemas.tables import TABLES
from tests.builders import make_trace, write_trace
from tests.command_lines import expert_tier


@pytest.fixture
def data(tmp_path) -> DataFolder:
    """Traces `one` and `two` of the same shape, and `other` of more experts."""
    folder = DataFolder(tmp_path / "d")
    folder.traces.mkdir(parents=True)
    for seed, (name, experts) in enumerate((("one", 8), ("two", 8), ("other", 9))):
        generator = np.random.default_rng(seed)
        ids = np.array([[generator.permutation(8)[:2] for _ in range(3)] for _ in range(40)])
        write_trace(make_trace(ids, num_experts=experts, trace_id=name), folder.trace_file(name))
    return folder


def test_the_document_is_the_row_of_the_table_over_all_layers():
    named = [name for name in TABLES["lookahead_recall"].column_names if name != "layer_id"]
    assert sorted(LookaheadScore.model_fields) == sorted([*named, "out"])
    assert set(TAKES) == set(PREDICTORS)


@pytest.mark.parametrize("predictor", [name for name in PREDICTORS if name != "recorded"])
def test_a_predictor_is_scored_as_in_the_table_and_its_plan_is_read_again(capsys, data, tmp_path, predictor):
    out = tmp_path / "plan.parquet"
    asked = ("lookahead", "one", "--predictor", predictor, "--out", out, "--data", data.root)
    status, said, err = expert_tier(capsys, *asked, "--json")
    assert (status, err) == (0, "")
    found = LookaheadScore.model_validate_json(said)
    trace = read_trace(data.trace_file("one"))
    plan = read_plan(out, trace)
    assert plan.covered.sum() >= found.covered_events
    if predictor != "oracle":
        width = found.width if found.width is not None else -1
        (row,) = lookahead_recall(trace).filter(
            pl.col("predictor") == predictor, pl.col("layer_id").is_null(), pl.col("width").fill_null(-1) == width,
            pl.col("lookahead_layers").fill_null(1) <= 1,
        ).to_dicts()  # fmt: skip
        document = json.loads(said)
        assert {name: document[name] for name in document if name != "out"} == {
            name: row[name] for name in row if name != "layer_id"
        }
    status, said, err = expert_tier(capsys, *asked)
    assert (status, err) == (0, "")
    assert f"{found.predicted_accesses:,} of {found.accesses:,} accesses" in said
    assert f"plan for {plan.covered.sum():,} events → {out}" in said


def test_a_fit_on_another_trace_is_scored_on_everything(capsys, data):
    asked = ("lookahead", "one", "--predictor", "conditional", "--depth", "2", "--width", "4", "--data", data.root)
    found = LookaheadScore.model_validate_json(expert_tier(capsys, *asked, "--fit", "two", "--json")[1])
    assert (found.fit, found.lookahead_layers, found.width, found.warm_steps) == ("two", 2, 4, 0)
    assert (found.events, found.covered_events) == (120, 40)
    found = LookaheadScore.model_validate_json(expert_tier(capsys, *asked, "--fit", "first:0.5", "--json")[1])
    assert (found.fit, found.warm_steps, found.events) == ("first:0.5", 20, 60)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("nobody --predictor oracle", "no trace 'nobody' in"),
        ("one --predictor psychic", "wanted one of previous_token"),
        ("one --predictor previous_token --width 4", "--width, but predictor previous_token knows none"),
        ("one --predictor oracle --fit first:0.5", "--fit, but predictor oracle knows none"),
        ("one --predictor conditional --depth 3", "depth 3, but trace one has 3 MoE layers; wanted at most 2"),
        ("one --predictor random --width 9", "width 9, but a layer of trace one has at most 8 experts; wanted at most"),
        ("one --predictor learned --width 2147483647", "width 2147483647, but a layer of trace one has at most 8"),
        ("one --predictor oracle --out .", "--out '.', wanted the name of a file"),
        ("one --predictor conditional --depth 0", "--depth 0, wanted at least 1"),
        ("one --predictor frequency --width x", "wanted a whole number"),
        ("one --predictor frequency --fit first:2", "wanted first:F with 0 < F < 1"),
        ("one --predictor frequency --fit nobody", "no trace 'nobody' in"),
        ("one --predictor frequency --fit one", "is the predicted trace itself"),
        ("one --predictor frequency --fit other", "layer 0 has 9 experts, in the trace 8"),
        ("one --predictor recorded", "no recorded predictions, since its dump held none; choose another predictor"),
    ],
)
def test_a_wrong_call_is_one_line_and_exits_2(capsys, data, asked, said):
    status, out, err = expert_tier(capsys, "lookahead", *asked.split(), "--data", data.root)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "place", ["traces/one.parquet", "traces/new.parquet", "results/x/plan.parquet", "warehouse.duckdb", "pools/p/a",
              "dumps/a", "report/index.html", "other/../traces/one.parquet"],
)  # fmt: skip
def test_a_plan_is_not_written_where_the_data_folder_keeps_its_own(capsys, data, place):
    before = data.trace_file("one").read_bytes()
    out = data.root / place
    asked = ("lookahead", "one", "--predictor", "oracle", "--data", data.root, "--out", out)
    status, said, err = expert_tier(capsys, *asked)
    assert (status, said, err.count("\n")) == (2, "", 1)
    assert "which holds what the data folder keeps; choose a place outside of it" in err
    assert data.trace_file("one").read_bytes() == before
    assert not (data.root / "traces" / "new.parquet").exists()


def test_a_plan_is_written_over_a_plan_and_over_nothing_else(capsys, data, tmp_path):
    out = tmp_path / "plan.parquet"
    asked = ("lookahead", "one", "--predictor", "oracle", "--data", data.root, "--out", out)
    assert expert_tier(capsys, *asked)[0] == 0
    assert expert_tier(capsys, *asked)[0] == 0
    # A trace of another data folder is no plan either.
    whole = data.trace_file("two").read_bytes()
    for content in (b"notes", whole):
        out.write_bytes(content)
        status, said, err = expert_tier(capsys, *asked)
        assert (status, said, err.count("\n")) == (2, "", 1)
        assert f"--out {out}: there already, and no lookahead plan; a plan is written over nothing but a plan" in err
        assert out.read_bytes() == content


def test_every_predictor_is_scored_on_the_same_window_and_says_which(capsys, data):
    for predictor in (name for name in PREDICTORS if name != "recorded"):
        status, said, _ = expert_tier(capsys, "lookahead", "one", "--predictor", predictor, "--data", data.root)
        assert status == 0
        assert "  scored: phase all, steps 24:40, 48 events\n" in said


def test_a_damaged_trace_or_an_unwritable_plan_is_one_line_and_exits_1(capsys, data, tmp_path):
    asked = ("lookahead", "one", "--predictor", "oracle", "--data", data.root)
    (tmp_path / "file").touch()
    status, _, err = expert_tier(capsys, *asked, "--out", tmp_path / "file" / "plan.parquet")
    assert (status, err.count("\n")) == (1, 1)
    assert f"{tmp_path / 'file' / 'plan.parquet'}: Not a directory; a part of the path is a file" in err
    data.trace_file("one").write_bytes(b"PAR1")
    status, _, err = expert_tier(capsys, *asked)
    assert (status, err.count("\n")) == (1, 1)
