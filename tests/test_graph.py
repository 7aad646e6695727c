"""The Dagster graph end to end on a tiny dump, in this process, with temporary paths."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import duckdb
import polars as pl
import pytest

from pipeline import assets, automation, results
from pipeline.automation import new_dumps
from pipeline.definitions import FailedAsset, defs, materialize_all, materialize_trace
from pipeline.ingest import ingest, read_user_metadata
from pipeline.inversion import PARTITION, SyntheticRouter, inversion_rows, synthetic_trace
from pipeline.replays import pool_of, unreplayed_traces
from pipeline.results import PER_TRACE_TABLES, stale_traces
from replayer.machine import storage_of
from schemas.files import DataFolder
from schemas.tables import EXPERIMENT_TABLES, LAB_TABLES, REPLAY_TABLES, SWEEP_TABLES, TABLES
from schemas.trace import UserMetadata
from tests.raw_dumps import random_routes, route_csv_dump, tok_layers_dump

ROOT = Path(__file__).parents[1]
GRAPH = {
    "routing": set(),
    "trace": {"routing"},
    "trace_check": {"routing"},
    "trace_locality": {"routing"},
    "hit_rate": {"routing"},
    "hit_rate_layer": {"routing"},
    "reporting_block": {"routing", "hit_rate"},
    "miss_ratio_curve": {"routing"},
    "lookahead_recall": {"routing"},
    "domain_overlap": {"routing"},
    "inversion": set(),
    "replay_run": {"routing"},
    "replay_step": {"routing"},
    "replay_reclaim": {"routing"},
    "replay_node": {"routing"},
    "replay_layer": {"routing"},
    "replay_proof": {"routing"},
    "pool": {"routing"},
    "machine": {"routing"},
    "warehouse": {
        "trace", "trace_check", "trace_locality", "hit_rate", "hit_rate_layer", "reporting_block", "miss_ratio_curve",
        "lookahead_recall", "domain_overlap", "inversion", "replay_run", "replay_step", "replay_reclaim",
        "replay_node", "replay_layer", "replay_proof", "pool", "machine",
    },
    "report": {"warehouse"},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_dagster_home", "small_reconstruction")


@pytest.fixture
def data(tmp_path) -> DataFolder:
    return DataFolder(tmp_path / "data")


def materialize(data: DataFolder, trace_ids: list[str]) -> list[FailedAsset]:
    return [failure for trace_id in trace_ids for failure in materialize_trace(data, trace_id)] + materialize_all(data)


def drop(data: DataFolder, name: str, seed: int = 0, content: bytes | None = None) -> Path:
    data.dumps.mkdir(parents=True, exist_ok=True)
    prefill, decode = random_routes(4, 3, 16, 2, seed), random_routes(40, 3, 16, 2, seed + 1)
    path = data.dumps / name
    path.write_bytes(
        route_csv_dump(prefill, decode, experts=16, expert_bytes=[8192] * 3) if content is None else content
    )
    return path


def test_the_graph_is_what_it_was():
    graph = defs.resolve_asset_graph()
    found = {
        key.to_user_string(): {parent.to_user_string() for parent in graph.get(key).parent_keys}
        for key in graph.get_all_asset_keys()
    }
    assert found == GRAPH


def test_every_table_has_an_asset_of_its_name_with_a_description_and_a_blocking_check():
    graph = defs.resolve_asset_graph()
    # A sweep or an experiment is asked for on the command line; the warehouse loads its folder.
    for name in [*(set(TABLES) - set(SWEEP_TABLES) - set(EXPERIMENT_TABLES) - set(LAB_TABLES)), "routing"]:
        node = graph.get(dg.AssetKey(name))
        assert node.description
        specs = [graph.get_check_spec(key) for key in node.check_keys]
        wanted = [("proofs_held", False), ("schema", True)] if name == "replay_run" else [("schema", True)]
        assert sorted((spec.name, spec.blocking) for spec in specs) == wanted


def test_a_dump_goes_all_the_way_to_warehouse_and_report_and_a_second_run_gives_the_same_tables(data):
    first = ingest(drop(data, "a.csv"), data, UserMetadata(domain="code")).metadata.trace_id
    second = ingest(drop(data, "b.csv", seed=7), data, UserMetadata(domain="math")).metadata.trace_id
    assert materialize(data, [first, second]) == []
    with duckdb.connect(str(data.warehouse), read_only=True) as connection:
        for name, table in TABLES.items():
            columns = [row[0] for row in connection.execute(f"DESCRIBE {name}").fetchall()]
            assert columns == list(table.column_names), name
            # Analyses neither replay natively, nor sweep, nor experiment.
            rows = connection.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0]
            assert (rows == 0) == (name in (*REPLAY_TABLES, *EXPERIMENT_TABLES, *LAB_TABLES, *SWEEP_TABLES)), name
        assert connection.execute("SELECT count(*) FROM routing").fetchall()[0][0] == 2 * (12 + 120)
    assert list(stale_traces(data)) == []
    assert first in data.report.read_text()
    before = {name: pl.read_parquet(data.result_file(name, first)) for name in PER_TRACE_TABLES}
    assert materialize(data, [first]) == []
    assert all(before[name].equals(pl.read_parquet(data.result_file(name, first))) for name in PER_TRACE_TABLES)


def test_a_frame_that_breaks_its_contract_is_never_written_and_stops_the_rest(data, monkeypatch):
    trace_id = ingest(drop(data, "a.csv"), data, UserMetadata()).metadata.trace_id
    simulated = assets.simulate_hit_rate

    def broken(trace):
        rates, by_layer = simulated(trace)
        return rates.with_columns(pl.col("hits") + 1), by_layer

    monkeypatch.setattr(assets, "simulate_hit_rate", broken)
    resources = {"data": assets.DataFolderResource(root=str(data.root))}
    with dg.DagsterInstance.get() as instance:
        instance.add_dynamic_partitions("traces", [trace_id])
        how = {"partition_key": trace_id, "instance": instance, "resources": resources, "raise_on_error": False}
        result = dg.materialize([assets.routing, assets.hit_rates], **how)
    assert not result.success
    verdicts = {check.asset_key.to_user_string(): check for check in result.get_asset_check_evaluations()}
    assert verdicts["routing"].passed
    assert not verdicts["hit_rate"].passed
    assert "accesses = hits + misses" in str(verdicts["hit_rate"].metadata["failures"].value)
    assert not data.result_file("hit_rate", trace_id).exists()


def test_a_refused_dump_fails_its_run_with_one_sentence(data):
    path = drop(data, "bad.csv", content=b"layer_id,expert_id,count\n0,0,1\n")
    failed = materialize(data, ["bad-000000000000"])
    assert failed[0].name == "routing"
    assert "no dump in it becomes trace bad-000000000000" in failed[0].reason
    found, cursor, _ = new_dumps(data, None)
    found, _, _ = new_dumps(data, cursor)
    failed = materialize(data, [found[0][0]])
    assert "counts per layer and expert" in failed[0].reason
    assert str(path) in failed[0].reason


def test_a_refused_dump_does_not_keep_the_others_from_the_warehouse(data):
    drop(data, "bad.csv", content=b"layer_id,expert_id,count\n0,0,1\n")
    good = ingest(drop(data, "a.csv"), data, UserMetadata()).metadata.trace_id
    assert [one.name for one in materialize(data, ["bad-000000000000", good])] == ["routing"]
    with duckdb.connect(str(data.warehouse), read_only=True) as connection:
        assert connection.execute("SELECT trace_id FROM trace").fetchall() == [(good,)]


def test_the_reconstruction_is_made_once_per_version_and_again_where_its_file_is_damaged(data, monkeypatch):
    made = []

    def counted(trace):
        made.append(trace)
        return inversion_rows(trace)

    small = SyntheticRouter(layers=2, steps=20, num_experts=32, top_k=4)
    monkeypatch.setattr(assets, "synthetic_trace", lambda: synthetic_trace(small))
    monkeypatch.setattr(assets, "inversion_rows", counted)
    for times in (1, 1):
        assert materialize_all(data) == []
        assert len(made) == times
    file = data.result_file("inversion", PARTITION)
    before = pl.read_parquet(file)
    monkeypatch.setattr(results, "ANALYSIS_VERSION", results.ANALYSIS_VERSION + 1)
    assert materialize_all(data) == []
    assert len(made) == 2
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)
    assert materialize_all(data) == []
    assert len(made) == 3
    assert pl.read_parquet(file).equals(before)


# When things run


def test_a_dump_is_taken_once_it_has_stopped_changing_and_only_once(data):
    path = drop(data, "a.csv")
    (data.dumps / "a.csv.toml").write_text('domain = "code"\n')
    (data.dumps / ".hidden.csv").write_bytes(path.read_bytes())
    (data.dumps / "b.csv.part").write_bytes(path.read_bytes())
    found, cursor, waiting = new_dumps(data, None)
    assert (found, waiting) == ([], ["a.csv"])
    found, cursor, _ = new_dumps(data, cursor)
    assert [name for _, name in found] == ["a.csv"]
    assert found[0][0] == ingest(path, data, read_user_metadata(path)).metadata.trace_id
    assert new_dumps(data, cursor)[0] == []


def test_a_growing_dump_is_waited_for(data):
    path = drop(data, "a.csv")
    _, cursor, _ = new_dumps(data, None)
    path.write_bytes(path.read_bytes() + b"\n")
    found, cursor, waiting = new_dumps(data, cursor)
    assert (found, waiting) == ([], ["a.csv"])
    assert len(new_dumps(data, cursor)[0]) == 1


def test_a_changed_dump_and_changed_metadata_are_taken_again(data):
    drop(data, "a.csv")
    _, cursor, _ = new_dumps(data, None)
    first, cursor, _ = new_dumps(data, cursor)
    (data.dumps / "a.csv.toml").write_text('domain = "code"\n')
    _, cursor, _ = new_dumps(data, cursor)
    second, cursor, _ = new_dumps(data, cursor)
    assert first[0][0] != second[0][0]


def test_many_dumps_are_spread_over_ticks_and_none_is_lost(data, monkeypatch):
    monkeypatch.setattr(automation, "MAX_NEW_PER_TICK", 2)
    for number in range(5):
        drop(data, f"{number}.jsonl", content=tok_layers_dump(random_routes(20, 2, 16, 2, seed=number)))
    cursor, taken = None, []
    for _ in range(6):
        found, cursor, _ = new_dumps(data, cursor)
        taken += [name for _, name in found]
    assert sorted(taken) == [f"{number}.jsonl" for number in range(5)]


def test_an_unreadable_dump_does_not_stop_the_sensor(data):
    drop(data, "empty.csv", content=b"")
    drop(data, "a.csv")
    _, cursor, _ = new_dumps(data, None)
    found, _, waiting = new_dumps(data, cursor)
    assert [name for _, name in found] == ["a.csv"]
    assert any("empty" in sentence for sentence in waiting)


def test_the_sensor_registers_the_partition_and_requests_its_run(data):
    drop(data, "a.csv")
    resources = {"data": assets.DataFolderResource(root=str(data.root))}
    with dg.DagsterInstance.get() as instance:
        context = dg.build_sensor_context(instance, resources=resources)
        first = automation.dumps_folder(context)
        # Dagster refuses a result with a cursor once the context was given one.
        assert not context.cursor_updated
        assert "a.csv" in first.skip_reason.skip_message
        context = dg.build_sensor_context(instance, cursor=first.cursor, resources=resources)
        second = automation.dumps_folder(context)
        assert not context.cursor_updated
    (request,) = second.run_requests
    assert request.tags["expert_tier/dump"] == "a.csv"
    assert second.dynamic_partitions_requests[0].partition_keys == [request.partition_key]
    assert json.loads(second.cursor)["a.csv"][1] is True


def test_the_nightly_schedule_takes_what_is_new_or_made_by_older_versions(data, monkeypatch):
    trace_id = ingest(drop(data, "a.csv"), data, UserMetadata()).metadata.trace_id
    assert [(one.trace_id, one.reason) for one in stale_traces(data)] == [(trace_id, "trace: not made yet")]
    materialize(data, [trace_id])
    assert list(stale_traces(data)) == []
    version = results.ANALYSIS_VERSION
    monkeypatch.setattr(results, "ANALYSIS_VERSION", version + 1)
    assert f"analysis version {version}, now {version + 1}" in next(iter(stale_traces(data))).reason
    monkeypatch.setattr(results, "ANALYSIS_VERSION", version)
    monkeypatch.setattr(results, "PARSER_VERSION", 2)
    assert "parsed by version 1, now 2" in next(iter(stale_traces(data))).reason
    resources = {"data": assets.DataFolderResource(root=str(data.root))}
    with dg.DagsterInstance.get() as instance:
        context = dg.build_schedule_context(instance, resources=resources, repository_def=defs.get_repository_def())
        tick = automation.nightly.evaluate_tick(context)
    assert [request.partition_key for request in tick.run_requests] == [trace_id]


# Dagster's own tester of conditions uses what Dagster calls beta.
@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")
def test_the_reconstruction_is_asked_for_where_it_is_missing_and_each_night_and_not_in_between(data):
    resources = {"data": assets.DataFolderResource(root=str(data.root))}

    graph = dg.Definitions(automation.with_automation([assets.inversion]), resources=resources)

    def requested(now: datetime, cursor: object = None) -> tuple[int, object]:
        found = dg.evaluate_automation_conditions(graph, instance, cursor=cursor, evaluation_time=now)
        return found.total_requested, found.cursor

    noon = datetime(2026, 12, 2, 12, tzinfo=UTC)
    with dg.DagsterInstance.get() as instance:
        asked, cursor = requested(noon)
        assert asked == 1
        assert dg.materialize([assets.inversion], instance=instance, resources=resources).success
        asked, cursor = requested(noon + timedelta(minutes=1), cursor)
        assert asked == 0
        asked, cursor = requested(noon + timedelta(hours=16), cursor)
        assert asked == 1


def test_results_of_a_trace_that_was_replaced_under_its_id_are_stale(data):
    path = drop(data, "a.csv")
    ingest(path, data, UserMetadata(), trace_id="mine")
    materialize(data, ["mine"])
    data.trace_file("mine").unlink()
    ingest(drop(data, "a.csv", seed=5), data, UserMetadata(), trace_id="mine")
    assert "another state of the trace" in next(iter(stale_traces(data))).reason


def test_the_same_dump_under_two_names_is_one_partition(data):
    drop(data, "a.csv")
    drop(data, "b.csv")
    _, cursor, _ = new_dumps(data, None)
    assert [name for _, name in new_dumps(data, cursor)[0]] == ["a.csv"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_one_line_and_builds_no_warehouse_of_half_the_results(data, number, tmp_path):
    trace_id = ingest(drop(data, "a.csv"), data, UserMetadata()).metadata.trace_id
    program = f"""
import os, sys
from pipeline import assets
from pipeline.cli import main
written = assets.write_result
def interrupted(folder, table, *rest):
    if table.name == "hit_rate":
        os.kill(os.getpid(), {int(number)})
    return written(folder, table, *rest)
assets.write_result = interrupted
sys.exit(main(["run", "--data", {str(data.root)!r}]))
"""
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "expert-tier: interrupted; nothing half-written was kept\n"
    assert not data.warehouse.exists()
    assert materialize(data, [trace_id]) == []


# Native replays


@pytest.fixture
def disk(data) -> DataFolder:
    """The data folder, where it is on a disk."""
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
from tests.test_graph import replay_natively
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
