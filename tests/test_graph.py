"""The Dagster graph end to end on a tiny dump, in this process, with temporary paths."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import duckdb
import polars as pl
import pytest

from pipeline import assets, automation, results
from pipeline.automation import new_dumps
from pipeline.definitions import defs, materialize_all, materialize_trace
from pipeline.dump_checks import CHECKS
from pipeline.ingest import ingest, read_user_metadata
from pipeline.inversion import PARTITION, SyntheticRouter, inversion_rows, synthetic_trace
from pipeline.results import PER_TRACE_TABLES, stale_traces
from schemas.files import DataFolder
from schemas.tables import DECODE_TABLES, EXPERIMENT_TABLES, LAB_TABLES, REPLAY_TABLES, SWEEP_TABLES, TABLES
from schemas.trace import UserMetadata
from tests.graph_runs import drop, materialize
from tests.raw_dumps import random_routes, tok_layers_dump

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
    "lookahead_recall_missed": {"routing"},
    "lookahead_benefit": {"routing"},
    "domain_overlap": {"routing"},
    "inversion": set(),
    "replay_run": {"routing"},
    "replay_step": {"routing"},
    "replay_reclaim": {"routing"},
    "replay_node": {"routing"},
    "replay_delivery": {"routing"},
    "replay_layer": {"routing"},
    "replay_proof": {"routing"},
    "pool": {"routing"},
    "machine": {"routing"},
    "warehouse": {
        "trace", "trace_check", "trace_locality", "hit_rate", "hit_rate_layer", "reporting_block", "miss_ratio_curve",
        "lookahead_recall", "lookahead_recall_missed", "lookahead_benefit", "domain_overlap", "inversion",
        "replay_run", "replay_step", "replay_reclaim",
        "replay_node", "replay_delivery", "replay_layer", "replay_proof", "pool", "machine",
    },
    "report": {"warehouse"},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_dagster_home", "small_reconstruction")


@pytest.fixture
def data(tmp_path) -> DataFolder:
    return DataFolder(tmp_path / "data")


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
    for name in [
        *(set(TABLES) - set(SWEEP_TABLES) - set(EXPERIMENT_TABLES) - set(LAB_TABLES) - set(DECODE_TABLES)),
        "routing",
    ]:
        node = graph.get(dg.AssetKey(name))
        assert node.description
        specs = [graph.get_check_spec(key) for key in node.check_keys]
        more = {"replay_run": [("proofs_held", False)], "routing": [("dump_sound", False)]}
        wanted = [*more.get(name, []), ("schema", True)]
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
            elsewhere = (*REPLAY_TABLES, *EXPERIMENT_TABLES, *LAB_TABLES, *DECODE_TABLES, *SWEEP_TABLES)
            assert (rows == 0) == (name in elsewhere), name
        assert connection.execute("SELECT count(*) FROM routing").fetchall()[0][0] == 2 * (12 + 120)
    assert list(stale_traces(data)) == []
    assert first in data.report.read_text()
    before = {name: pl.read_parquet(data.result_file(name, first)) for name in PER_TRACE_TABLES}
    assert materialize_trace(data, first) == []
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


def test_the_check_of_a_dump_says_how_it_fared_or_which_check_refused_it(data):
    sound = ingest(drop(data, "a.csv"), data, UserMetadata()).metadata.trace_id
    routes = random_routes(40, 3, 16, 2)
    drop(data, "b.jsonl", content=tok_layers_dump([[token[0], token[1], token[0]] for token in routes]))
    _, cursor, _ = new_dumps(data, None)
    found, _, _ = new_dumps(data, cursor)
    (copied,) = [trace_id for trace_id, name in found if name == "b.jsonl"]
    resources = {"data": assets.DataFolderResource(root=str(data.root))}
    verdicts = {}
    with dg.DagsterInstance.get() as instance:
        instance.add_dynamic_partitions("traces", [sound, copied])
        for trace_id in (sound, copied):
            how = {"partition_key": trace_id, "instance": instance, "resources": resources, "raise_on_error": False}
            result = dg.materialize([assets.routing], **how)
            checks = {check.check_name: check for check in result.get_asset_check_evaluations()}
            verdicts[trace_id] = checks["dump_sound"]
    told = {name: value.value for name, value in verdicts[sound].metadata.items()}
    assert list(told) == [check.name for check in CHECKS]
    assert told["no expert twice in a row"] == "ok: 132 rows looked at"
    assert verdicts[sound].severity == dg.AssetCheckSeverity.WARN
    assert not verdicts[copied].passed
    assert verdicts[copied].metadata["refused by"].value == "layers differ"
    assert "layers [0, 2] are equal" in verdicts[copied].metadata["reason"].value


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
    parser = results.PARSER_VERSION
    monkeypatch.setattr(results, "PARSER_VERSION", parser + 1)
    assert f"parsed by version {parser}, now {parser + 1}" in next(iter(stale_traces(data))).reason
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
