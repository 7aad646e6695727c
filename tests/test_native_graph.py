"""Native replays through the Dagster graph, on a tiny dump, in this process, with temporary paths."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import duckdb
import polars as pl
import pytest

from pipeline import assets, automation
from pipeline.definitions import defs, materialize_all
from pipeline.ingest import ingest
from pipeline.replays import pool_of, unreplayed_traces
from replayer.machine import storage_of
from schemas.files import DataFolder
from schemas.tables import REPLAY_TABLES
from schemas.trace import UserMetadata
from tests.graph_runs import drop, materialize
from tests.raw_dumps import random_routes, tok_layers_dump

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("own_dagster_home", "small_reconstruction")


@pytest.fixture
def disk(tmp_path) -> DataFolder:
    """A data folder, where it is on a disk."""
    data = DataFolder(tmp_path / "data")
    data.root.mkdir()
    storage = storage_of(data.root)
    if not storage.suitable:
        pytest.skip(f"the folder of the tests is on {storage.filesystem}: {storage.reason}")
    return data


def replay_natively(data: DataFolder, trace_id: str, **config: object) -> dg.ExecuteInProcessResult:
    resources = {"data": assets.DataFolderResource(root=str(data.root))}
    with dg.DagsterInstance.get() as instance:
        instance.add_dynamic_partitions("traces", [trace_id])
        return dg.materialize(
            [assets.routing, assets.native_replay],
            selection=[assets.native_replay],
            partition_key=trace_id,
            instance=instance,
            resources=resources,
            raise_on_error=False,
            run_config={"ops": {"native_replay": {"config": {"device": "none", "steps": "0:20", **config}}}},
        )


def checks_of(result: dg.ExecuteInProcessResult) -> dict[tuple[str, str], dg.AssetCheckEvaluation]:
    return {(one.asset_key.to_user_string(), one.check_name): one for one in result.get_asset_check_evaluations()}


def sentence_of(result: dg.ExecuteInProcessResult) -> str:
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    return failure.step_failure_data.user_failure_data.description


def test_a_native_replay_goes_all_the_way_to_warehouse_and_report_and_every_run_appends(disk):
    trace_id = ingest(drop(disk, "a.csv"), disk, UserMetadata()).metadata.trace_id
    assert unreplayed_traces(disk) == [trace_id]
    for owners in (["page_cache"], ["page_cache", "restream"]):
        result = replay_natively(disk, trace_id, mechanism="none", owners=owners)
        assert result.success
    assert unreplayed_traces(disk) == []
    materialized = {event.asset_key.to_user_string() for event in result.get_asset_materialization_events()}
    assert materialized == set(REPLAY_TABLES)
    assert {(name, check) for name, check in checks_of(result)} == {
        *((name, "schema") for name in REPLAY_TABLES),
        ("replay_run", "proofs_held"),
    }
    assert all(check.passed for check in checks_of(result).values())
    assert materialize(disk, [trace_id]) == []
    with duckdb.connect(str(disk.warehouse), read_only=True) as connection:
        assert connection.execute(
            "SELECT owner, count(*), sum(steps), count(DISTINCT pool_id) FROM replay_run JOIN "
            "(SELECT run_id, count(*) AS steps FROM replay_step GROUP BY run_id) USING (run_id) "
            "GROUP BY owner ORDER BY owner"
        ).fetchall() == [("page_cache", 2, 40, 1), ("restream", 1, 20, 1)]
    assert "3 native runs, 0 of them quarantined" in disk.report.read_text()


def test_runs_whose_proofs_failed_are_kept_and_fail_the_check_but_not_the_asset(disk):
    trace_id = ingest(drop(disk, "a.csv"), disk, UserMetadata()).metadata.trace_id
    pool_of(disk, trace_id)
    for file in disk.pool_folder(trace_id).rglob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-8192:] = bytes(8192)
        file.write_bytes(content)
    result = replay_natively(disk, trace_id, mechanism="none")
    assert result.success
    verdict = checks_of(result)["replay_run", "proofs_held"]
    assert not verdict.passed
    assert verdict.metadata["runs that are not valid"].value == 1
    assert any("content: expected 0 wrong words" in str(one.value) for one in verdict.metadata.values())
    assert materialize_all(disk) == []
    with duckdb.connect(str(disk.warehouse), read_only=True) as connection:
        assert connection.execute("SELECT bytes_valid FROM replay_run").fetchall() == [(False,)]
        assert connection.execute("SELECT failed_proofs > 0 FROM quarantined_runs").fetchall() == [(True,)]
    assert "1 native run, 1 of them quarantined" in disk.report.read_text()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "does not say how large an expert is, so no pool can be built for it; give expert_bytes"),
        ({"expert_bytes": 8192, "capacity_shares": [1.5]}, "capacity share 1.5, wanted above 0 and at most 1"),
        ({"expert_bytes": 8192, "owners": []}, "nothing to replay"),
        ({"expert_bytes": 8192, "mechanism": "wish"}, "mechanism 'wish', wanted one of auto, cgroup, balloon, boot"),
        ({"expert_bytes": 8192, "mechanism": "none", "owners": ["me"]}, "invalid choice: 'me'"),
        ({"expert_bytes": 8192, "mechanism": "none", "steps": "90:99"}, "wanted a range inside"),
    ],
)
def test_a_replay_that_cannot_be_made_fails_with_one_sentence(disk, config, sentence):
    dump = drop(disk, "a.jsonl", content=tok_layers_dump(random_routes(20, 2, 16, 2)))
    trace_id = ingest(dump, disk, UserMetadata()).metadata.trace_id
    result = replay_natively(disk, trace_id, **config)
    assert not result.success
    assert sentence in sentence_of(result)
    assert "\n" not in sentence_of(result)
    assert not (disk.results / "replay_run").exists()


def test_a_trace_without_sizes_or_pool_is_not_scheduled_and_one_with_a_pool_is(disk):
    dump = drop(disk, "a.jsonl", content=tok_layers_dump(random_routes(20, 2, 16, 2)))
    trace_id = ingest(dump, disk, UserMetadata()).metadata.trace_id
    assert unreplayed_traces(disk) == []
    assert replay_natively(disk, trace_id, mechanism="none", expert_bytes=8192, repeats=2).success
    assert len(list((disk.results / "replay_run" / trace_id).glob("*.parquet"))) == 2
    for file in (disk.results / "replay_run" / trace_id).glob("*.parquet"):
        file.unlink()
    assert unreplayed_traces(disk) == [trace_id]
    resources = {"data": assets.DataFolderResource(root=str(disk.root))}
    with dg.DagsterInstance.get() as instance:
        context = dg.build_schedule_context(instance, resources=resources, repository_def=defs.get_repository_def())
        tick = automation.replays.evaluate_tick(context)
    assert [request.partition_key for request in tick.run_requests] == [trace_id]


def test_nothing_replays_unless_somebody_asks_and_two_replays_never_run_together():
    assert automation.replays.default_status is dg.DefaultScheduleStatus.STOPPED
    repository = defs.get_repository_def()
    replaying = {dg.AssetKey(name) for name in REPLAY_TABLES}
    for job in ("per_trace", "replay"):
        selected = set(repository.get_job(job).asset_layer.executable_asset_keys)
        assert replaying & selected == (replaying if job == "replay" else set())
    assert assets.native_replay.op.pool == "replay"
    assert "pools: {granularity: op, default_limit: 1}" in (ROOT / "dagster.yaml").read_text()


def test_an_interrupted_run_ends_its_replayer_and_leaves_no_process(disk, tmp_path):
    trace_id = ingest(drop(disk, "a.csv"), disk, UserMetadata()).metadata.trace_id
    program = f"""
from pathlib import Path
from schemas.files import DataFolder
from tests.test_native_graph import replay_natively
replay_natively(DataFolder(Path({str(disk.root)!r})), {trace_id!r}, mechanism="none", steps="0:40", repeats=10_000)
"""
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home")}
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        done = disk.results / "replay_run" / trace_id
        deadline = time.monotonic() + 120
        while run.poll() is None and not list(done.glob("[!.]*.parquet")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_naming(disk.root)
        run.terminate()
        run.wait(60)
    finally:
        run.kill()
        run.wait()
    assert processes_naming(disk.root) == []
    statuses = {pl.read_parquet(file)["status"].item() for file in done.glob("[!.]*.parquet")}
    assert statuses <= {"complete", "interrupted"}


def processes_naming(folder: Path) -> list[str]:
    """Command lines of the replayers that work on a data folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "replayer" in line and str(folder) in line and "-c" not in line.split():
                found.append(line)
    return found
