"""The command lines where they build pools and replay natively: documents and exit codes."""

import dataclasses
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from pipeline import cli, replays
from replayer.machine import storage_of
from schemas.documents import BuiltPool, Demonstration, ReplayedRun, VerifiedPool
from tests.command_lines import expert_tier, replayer
from tests.readme_questions import questions
from warehouse.build import query

pytestmark = pytest.mark.usefixtures("own_dagster_home", "small_reconstruction")


@pytest.fixture
def pool(capsys, tmp_path, dump) -> tuple[Path, Path]:
    """(a trace, a pool built for it by the command), where the tests' folder is on a disk."""
    storage = storage_of(tmp_path)
    if not storage.suitable:
        pytest.skip(f"{tmp_path} is on {storage.filesystem}: {storage.reason}")
    (one,) = json.loads(expert_tier(capsys, "ingest", dump, "--data", tmp_path / "d", "--json")[1])
    folder = tmp_path / "pool"
    status, out, err = replayer(
        capsys, "pool", "build", "--trace", one["path"], "--layout", "per-layer", "--out", folder, "--json"
    )
    assert (status, err) == (0, "")
    built = BuiltPool.model_validate_json(out)
    assert (built.layout, built.pool_experts, built.pool_bytes) == ("per_layer", 48, 48 * 64)
    assert (built.kept_bytes, built.written_bytes) == (0, built.file_bytes)
    return Path(one["path"]), folder


def test_pool_verify_prints_one_document_whatever_it_finds(capsys, pool):
    _, folder = pool
    status, out, _ = replayer(capsys, "pool", "verify", folder, "--json")
    found = VerifiedPool.model_validate_json(out)
    assert (status, found.holds) == (0, True)
    file = next(folder.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    status, out, _ = replayer(capsys, "pool", "verify", folder, "--content", "all", "--json")
    found = VerifiedPool.model_validate_json(out)
    assert (status, found.holds) == (1, False)
    assert not all(check.held for check in found.checks)


def test_replay_prints_its_row_and_proofs_and_a_list_of_them_when_repeated(capsys, pool, tmp_path):
    trace, folder = pool
    asked = [
        "--pool",
        folder,
        "--device",
        "none",
        "--steps",
        "0:5",
        "--wait",
        "600",
        "--data",
        tmp_path / "d",
        "--json",
    ]
    status, out, err = replayer(capsys, "replay", trace, *asked)
    assert (status, err) == (0, "")
    run = ReplayedRun.model_validate_json(out)
    assert run.bytes_valid
    assert (run.step_begin, run.step_end, run.mechanism, run.capacity_bytes) == (0, 5, "none", None)
    assert {proof.run_id for proof in run.proofs} == {run.run_id}
    status, out, _ = replayer(capsys, "replay", trace, *asked, "--repeat", "2", "--owner", "restream", "--cold")
    twice = TypeAdapter(list[ReplayedRun]).validate_json(out)
    assert [one.repeat for one in twice] == [0, 1]
    assert twice[0].condition_hash == twice[1].condition_hash != run.condition_hash
    assert len(list((tmp_path / "d" / "results" / "replay_run").rglob("*.parquet"))) == 3


def test_the_demo_replays_natively_and_prints_one_document_or_says_why_not(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_DEMO_CONDITIONS", dataclasses.replace(cli._DEMO_CONDITIONS, wait_s=600))
    status, out, err = expert_tier(capsys, "demo", "--data", tmp_path / "d", "--json")
    assert (status, err) == (0, "")
    found = Demonstration.model_validate_json(out)
    assert found.tables["hit_rate"] > 0
    assert found.tables["replay_run"] == len(found.replays)
    assert (found.replay_skipped is None) == storage_of(tmp_path).suitable
    monkeypatch.setenv("COLUMNS", "160")
    # The questions of the README are asked here, since a second demo would cost a minute.
    asked = questions()
    assert len(asked) == 10
    for question in asked:
        status, out, err = expert_tier(capsys, "query", question.sql, "--data", tmp_path / "d")
        assert (status, err) == (0, "")
        assert question.answer is None or out.rstrip("\n") == question.answer, question.sql
        if question.columns is not None:
            assert query(tmp_path / "d", question.sql).columns == question.columns
    monkeypatch.setattr(cli, "_materialize", lambda data, ids, between: between() or {"traces": ids})
    monkeypatch.setattr(cli, "_answer", lambda data, done: [])
    refusal = "a file system in memory"

    def refuse(*_arguments: object, **_options: object) -> None:
        raise replays.ReplayFailed(refusal)

    monkeypatch.setattr(cli, "pool_of", refuse)
    status, out, err = expert_tier(capsys, "demo", "--data", tmp_path / "d")
    assert (status, err) == (0, "")
    assert f"no native replay: {refusal}" in out
