"""The command lines as their users meet them: documents, exit codes, one line per error."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import polars as pl
import pytest
from pydantic import TypeAdapter

from pipeline import cli, inversion
from schemas.documents import (
    IngestedTrace,
    Inspection,
    Relation,
    ReplayedRun,
    RunSummary,
    Simulation,
)
from schemas.tables import TABLES
from schemas.validation import validate_table
from tests.command_lines import expert_tier, replayer
from tests.raw_dumps import npz_dump, random_routes

ROOT = Path(__file__).parents[1]
TRACES = ROOT.parent / "shared" / "traces"


pytestmark = pytest.mark.usefixtures("own_dagster_home", "small_reconstruction")


def test_ingest_prints_one_document(capsys, tmp_path, dump):
    status, out, err = expert_tier(capsys, "ingest", dump, "--data", tmp_path / "d", "--json", "--meta", "domain=code")
    assert (status, err) == (0, "")
    (one,) = TypeAdapter(list[IngestedTrace]).validate_json(out)
    assert Path(one.path).is_file()
    assert (one.rows, one.steps, one.selections) == (12 + 120, 41, 264)


def test_inspect_prints_one_document_and_keeps_nothing(capsys, tmp_path, dump):
    status, out, _ = expert_tier(capsys, "inspect", dump, "--data", tmp_path / "d", "--json")
    assert status == 0
    found = Inspection.model_validate_json(out)
    assert "domain" in found.unknown
    assert not (tmp_path / "d").exists()
    status, out, _ = expert_tier(capsys, "inspect", dump)
    assert "unknown: engine, domain" in out
    assert "the engine's own: " in out


@pytest.fixture(scope="module")
def sessions() -> list[tuple[Path, RunSummary]]:
    """At most one: the session that the tests share which change nothing in it."""
    return []


@pytest.fixture
def session(capsys, sessions, tmp_path_factory, dump) -> tuple[Path, RunSummary]:
    """A data folder with one trace that has been run, and what the run printed."""
    if not sessions:
        data = tmp_path_factory.mktemp("session") / "d"
        assert expert_tier(capsys, "ingest", dump, "--data", data)[0] == 0
        status, out, err = expert_tier(capsys, "run", "--data", data, "--json")
        assert (status, err) == (0, "")
        sessions.append((data, RunSummary.model_validate_json(out)))
    return sessions[0]


def test_the_whole_session_of_the_help_works(capsys, session):
    data, summary = session
    assert summary.tables["hit_rate"] > 0
    assert Path(summary.report).is_file()
    _, out, _ = expert_tier(capsys, "query", "--list", "--format", "json", "--data", data)
    names = {relation.name for relation in TypeAdapter(list[Relation]).validate_json(out)}
    assert {"trace", "hit_rate", "routing"} <= names
    sql = "SELECT policy, hits + misses = accesses AS adds_up FROM hit_rate LIMIT 3"
    _, out, _ = expert_tier(capsys, "query", sql, "--format", "json", "--data", data)
    assert [row["adds_up"] for row in json.loads(out)] == [True] * 3
    _, out, _ = expert_tier(capsys, "query", "SELECT 1 AS a, 'x' AS b", "--format", "csv", "--data", data)
    assert out.splitlines() == ["a,b", "1,x"]
    _, out, _ = expert_tier(capsys, "report", "--json", "--data", data)
    assert Path(json.loads(out)["report"]).is_file()


def test_inversion_prints_its_table_or_one_document_and_keeps_the_rows(capsys, tmp_path, monkeypatch):
    data = tmp_path / "d"
    status, out, err = expert_tier(capsys, "inversion", "--data", data, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    table = TABLES["inversion"]
    rows = table.frame(found["results"])
    assert validate_table(rows, table).height > 0
    assert rows.equals(pl.read_parquet(data / "results" / "inversion" / "synthetic" / "part.parquet"))
    monkeypatch.setattr(inversion, "synthetic_trace", None)
    status, out, err = expert_tier(capsys, "inversion", "--data", data)
    assert (status, err) == (0, "")
    assert "Trace synthetic-" in out
    assert all(sentence in out for sentence in found["findings"])


def test_simulate_prints_one_document_whose_rows_carry_their_contract(capsys, tmp_path, dump):
    (one,) = json.loads(expert_tier(capsys, "ingest", dump, "--data", tmp_path / "d", "--json")[1])
    asked = "--policy lru,static,belady_forced --semantics event_atomic,sequential --capacity-experts 2,4"
    window = "--warm-fraction 0.6 --fit first:0.6 --json"
    status, out, err = replayer(capsys, "simulate", one["path"], *asked.split(), *window.split())
    assert (status, err) == (0, "")
    document = Simulation.model_validate_json(out)
    assert len(document.results) == 3 * 2 * 2
    assert {row.phase for row in document.results} == {"decode"}
    assert {row.warm_steps for row in document.results} == {24}
    assert {row.capacity_bytes for row in document.results} == {2 * 3 * 64, 4 * 3 * 64}
    status, out, _ = replayer(capsys, "simulate", one["path"], "--capacity", "1KiB", "--scope", "global")
    assert "1.00 KiB" in out


def test_the_document_of_a_run_is_its_row_with_the_proofs():
    table = TABLES["replay_run"]
    assert list(ReplayedRun.model_fields) == [*table.column_names, "reclaim", "delivered", "proofs"]
    assert tuple(ReplayedRun.Reclaim.model_fields) == TABLES["replay_reclaim"].column_names
    for column in table.columns:
        annotation = ReplayedRun.model_fields[column.name].annotation
        nullable = column.ratio is not None or column.name in table.nullable
        assert (type(None) in get_args(annotation)) == nullable, column.name
        if column.values is not None:
            literal = next(one for one in (annotation, *get_args(annotation)) if get_origin(one) is Literal)
            assert get_args(literal) == column.values, column.name
    assert list(ReplayedRun.Proof.model_fields) == list(TABLES["replay_proof"].column_names)


ERRORS = [
    (["simulate", "{trace}"], 2, "--capacity-experts"),
    (["simulate", "{trace}", "--capacity-experts", "-3"], 2, "not negative"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--capacity", "1G"], 2, "not allowed with"),
    (["simulate", "{trace}", "--capacity", "1XB"], 2, "is no size"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--policy", "lru,best"], 2, "'best'"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--steps", "5"], 2, "wanted a:b"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--steps", "9:5"], 2, "wanted a range inside 0:41"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--phase", "unknown"], 2, "no event of phase unknown"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--warm-fraction", "1"], 2, "from 0 to below 1"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--policy", "static", "--fit", "first:2"], 2, "first:F"),
    (["simulate", "{trace}", "--capacity-experts", "3", "--policy", "static", "--fit", "no.parquet"], 1, "no.parquet"),
    (
        ["simulate", "missing.parquet", "--capacity-experts", "3"],
        1,
        "missing.parquet: No such file or directory; check",
    ),
    (["simulate", "{dump}", "--capacity-experts", "3"], 1, "not a readable Parquet file"),
    ([], 2, "COMMAND"),
    (["dance"], 2, "dance"),
]


@pytest.mark.parametrize(("arguments", "status", "named"), ERRORS, ids=[" ".join(case[0])[:60] for case in ERRORS])
def test_a_wrong_call_of_the_replayer_is_one_line_and_its_exit_code(capsys, tmp_path, dump, arguments, status, named):
    (one,) = json.loads(expert_tier(capsys, "ingest", dump, "--data", tmp_path / "d", "--json")[1])
    filled = [argument.format(trace=one["path"], dump=dump) for argument in arguments]
    found, out, err = replayer(capsys, *filled)
    assert (found, out) == (status, "")
    assert len(err.splitlines()) == 1, err
    assert named in err


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["ingest", "missing.npz"], 1, "missing.npz: No such file or directory; check the path"),
        (["ingest", "{dump}", "{dump}", "--trace-id", "x"], 2, "pass one dump"),
        (["ingest", "{dump}", "--meta", "colour=red"], 2, "colour: no such key"),
        (["ingest", ""], 2, "DUMP: '', wanted a path"),
        (["ingest", "{dump}", "--meta", "=3"], 2, "--meta '=3': wanted key=value"),
        (["ingest", "{dump}", "--meta", "num_experts=many"], 2, "(found 'many'); correct it, or leave it out"),
        (["ingest", "{dump}", "--trace-id", "A/b"], 2, "--trace-id 'A/b': wanted lower-case letters"),
        (["ingest", "{dump}", "--layer-map", "4,3"], 2, "--layer-map: '4,3', wanted layer numbers"),
        (["ingest", "{dump}", "--sequence-lengths", "-1"], 2, "--sequence-lengths"),
        (["ingest", "{dump}", "--sequence-lengths", "0"], 1, "[0], which leave no token"),
        (["ingest", "{dump}", "--strip-shared-experts", "17"], 2, "--strip-shared-experts: '17', wanted 1 to 16"),
        (["ingest", "{dump}", "--max-ratio", "0"], 2, "--max-ratio: '0', wanted at least 1"),
        (["ingest", "{dump}", "--model", "missing"], 1, "wanted a GGUF file, safetensors files"),
        (["ingest", "{dump}", "--model", "tests"], 1, "a folder without safetensors files; wanted a GGUF file"),
        (["inspect", "{dump}", "--imatrix", "tests"], 1, "wanted the GGUF that llama-imatrix wrote"),
        (["ingest", "*.nothing"], 1, "matches no file, wanted the files of one dump"),
        (["run"], 1, "expert-tier ingest DUMP"),
        (["run", "--trace", "nobody"], 1, "no trace in"),
        (["query"], 2, "either SQL or --list"),
        (["query", "SELECT 1"], 1, "expert-tier run"),
        (["report"], 1, "expert-tier run"),
        (["fly"], 2, "fly"),
    ],
)
def test_a_wrong_call_of_expert_tier_is_one_line_and_its_exit_code(capsys, tmp_path, dump, arguments, status, named):
    filled = [argument.format(dump=dump) for argument in arguments]
    found, out, err = expert_tier(capsys, *filled, *(["--data", tmp_path / "d"] if arguments != ["fly"] else []))
    assert (found, out) == (status, "")
    assert len(err.splitlines()) == 1, err
    assert named in err


def test_a_data_folder_that_is_a_file_is_a_wrong_call(capsys, tmp_path, dump):
    (tmp_path / "file").touch()
    status, out, err = expert_tier(capsys, "ingest", dump, "--data", tmp_path / "file")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "a file, wanted a folder; choose another --data" in err


def test_one_bad_dump_of_several_is_named_and_the_others_are_ingested(capsys, tmp_path, dump):
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"")
    status, out, err = expert_tier(capsys, "ingest", bad, dump, "--data", tmp_path / "d", "--json")
    assert status == 1
    assert len(json.loads(out)) == 1
    assert "bad.npz" in err


def test_a_bad_query_is_one_line(capsys, session):
    status, out, err = expert_tier(capsys, "query", "SELEC 1", "--data", session[0])
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command", [[], ["ingest"], ["inspect"], ["run"], ["inversion"], ["query"], ["report"], ["demo"]]
)
def test_every_command_of_expert_tier_explains_itself(capsys, command):
    status, out, _ = expert_tier(capsys, *command, "--help")
    assert status == 0
    assert "usage: expert-tier" in out


def test_simulate_help_has_examples_that_run(capsys):
    status, out, _ = replayer(capsys, "simulate", "--help")
    assert status == 0
    assert "examples:" in out


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.main(["ingest", str(tmp_path / "missing"), "--data", str(tmp_path), "--debug"])


def test_a_closed_pipe_is_quiet(tmp_path):
    (tmp_path / "a.npz").write_bytes(npz_dump(random_routes(40, 3, 16, 2)))
    command = f"{sys.executable} -m pipeline inspect {tmp_path}/a.npz | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.skipif(not TRACES.is_dir(), reason="published traces are not here")
def test_the_toy_trace_gives_twelve_hits_and_eighteen_misses(capsys, tmp_path):
    # numbers.md 3.4 and traces/README.md: conformance trace of 2608.07911.
    (one,) = json.loads(expert_tier(capsys, "ingest", TRACES / "toy-events.csv", "--data", tmp_path, "--json")[1])
    _, out, _ = replayer(capsys, "simulate", one["path"], "--capacity-experts", "2", "--json")
    (row,) = Simulation.model_validate_json(out).results
    assert (row.accesses, row.hits, row.misses, row.compulsory_misses) == (30, 12, 18, 12)


def test_run_takes_what_is_stale_and_says_what_is_not(capsys, tmp_path, dump):
    data = tmp_path / "d"
    expert_tier(capsys, "ingest", dump, "--data", data, "--trace-id", "one")
    assert "1 traces analysed, 0 unchanged" in expert_tier(capsys, "run", "--data", data)[1]
    assert "0 traces analysed, 1 unchanged" in expert_tier(capsys, "run", "--data", data)[1]
    assert "1 traces analysed, 0 unchanged" in expert_tier(capsys, "run", "--data", data, "--trace", "one")[1]
    status, out, err = expert_tier(capsys, "run", "--data", data, "--trace", "nobody")
    assert (status, out) == (2, "")
    assert "no trace 'nobody'" in err


def test_results_without_a_trace_are_shown_too(capsys, tmp_path):
    data = ("--data", tmp_path / "d")
    assert expert_tier(capsys, "unbundle", *data)[0] == 0
    status, out, err = expert_tier(capsys, "run", *data, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["tables"]["lab_run"] > 0
    assert expert_tier(capsys, "run", "--trace", "nobody", *data)[0] == 2


def test_a_wide_result_is_printed_row_by_row_and_a_narrow_one_as_a_table(capsys, session):
    data, _ = session
    out = expert_tier(capsys, "query", "SELECT * FROM trace", "--data", data)[1]
    assert "── row 1 of 1" in out
    assert "source_file" in out
    assert "│" in expert_tier(capsys, "query", "SELECT trace_id, rows FROM trace", "--data", data)[1]
