"""`expert-tier verify`: a number that was changed, with a manifest that hides it, is found where an identity speaks."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from pipeline.cli import main
from pipeline.condition_hashes import contract_findings
from pipeline.identities import (
    Finding,
    decode_findings,
    machine_findings,
    node_findings,
    reference_findings,
    run_findings,
    simulated_findings,
    summary_findings,
)
from pipeline.pack import write_bundle_file
from pipeline.recounts import pool_findings, trace_run_findings
from pipeline.verify import Check, _simulated_again, verify_bundle
from replayer.simulate import Capacity
from replayer.sweep import Sweep, plan
from replayer.sweep import run as run_sweep
from replayer.trace import Trace, read_trace
from schemas import documents
from schemas.files import DataFolder
from schemas.tables import TABLES
from schemas.validation import ContractViolation, validate_table
from tests.bundles import OF_RUNS, TRACE_ID, measured, set_one, simulated, with_rows
from tests.table_rows import ROWS

SAMPLE = Path(__file__).parents[1] / "pipeline" / "sample" / "code.route.csv.gz"
Tables = dict[str, pl.DataFrame]

UNCOVERED = {
    "replay_run": {
        # What nobody counts twice: names of counters and versions, what was done before the measured pass, and times
        # that no other time holds.
        "started_at", "replayer_version", "thrash", "mechanism_detail", "residency_counter", "files_stay_open",
        "repeat", "device_bytes_counter", "warm_device_bytes", "own_fault_bytes", "cpu_ns", "stall_median_ns",
        "stall_p99_ns", "interval_ns", "observe_ns", "verify_ns", "enforced_bytes",
    },
    "replay_step": {"resident_bytes", "stall_median_ns", "stall_p99_ns"},
    "replay_layer": {"stall_median_ns", "stall_p99_ns"},
    "replay_proof": {"tolerance", "expected", "found", "name"},
    "replay_reclaim": {
        "group_minor_faults", "group_major_faults", "group_cached_bytes", "group_unevictable_bytes",
        "group_limit_bytes", "group_memory_some_ns", "group_memory_full_ns", "group_io_some_ns", "group_io_full_ns",
        "group_refault_activated_pages", "group_activated_pages", "machine_refault_activated_pages",
        "machine_activated_pages", "machine_minor_faults", "machine_major_faults", "machine_free_bytes",
        "machine_available_bytes", "machine_cached_bytes", "machine_locked_bytes", "machine_unevictable_bytes",
        "machine_scan_pages", "machine_steal_pages", "machine_memory_some_ns", "machine_memory_full_ns",
        "machine_io_some_ns", "machine_io_full_ns", "step_id",
    },
    "replay_node": {
        "node_id", "has_processors", "is_counted", "node_bytes", "node_free_bytes", "node_file_bytes",
        "node_locked_bytes", "group_node_file_bytes",
    },
    "pool": {"content"},
    "machine": set(),
}  # fmt: skip
"""Columns in which another value may pass: the README names them. All others are found, whichever row it is in."""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    """Two real runs and their trace."""
    data = measured(tmp_path_factory.mktemp("native") / "data", each=1)
    said = ["--meta", "expert_bytes=1048576", "--trace-id", "lab-sample", "--data", str(data.root)]
    assert main(["ingest", str(SAMPLE), *said]) == 0
    return data


@pytest.fixture(scope="module")
def tables(native: DataFolder) -> Tables:
    found = {name: table.frame([]) for name, table in TABLES.items()}
    for name in (*OF_RUNS, "pool", "machine"):
        found[name] = pl.read_parquet(native.result_file(name, "here")).sort(TABLES[name].key)
    return found


@pytest.fixture(scope="module")
def traces(native: DataFolder) -> dict[str, Trace]:
    return {"lab-sample": read_trace(native.trace_file("lab-sample"))}


def findings(tables: Tables, traces: dict[str, Trace]) -> Iterator[Finding]:
    for make in (
        reference_findings, machine_findings, node_findings, run_findings, simulated_findings, decode_findings,
        summary_findings, contract_findings,
    ):  # fmt: skip
        yield from make(tables)
    yield from pool_findings(tables, traces)
    yield from trace_run_findings(tables, traces)


def found_false(tables: Tables, traces: dict[str, Trace]) -> list[Finding]:
    return [one for one in findings(tables, traces) if one.held is False]


# Native results.


def test_real_runs_hold_in_every_identity(tables: Tables, traces: dict[str, Trace]) -> None:
    assert found_false(tables, traces) == []
    replayed = list(trace_run_findings(tables, traces))
    assert {one.held for one in replayed} == {True}
    assert sum(one.identity.startswith("digest") for one in replayed) == 2


@pytest.mark.parametrize("name", sorted(UNCOVERED))
def test_another_value_is_found_in_every_column_but_those_named(
    tables: Tables, traces: dict[str, Trace], name: str
) -> None:
    missed = set()
    for column in TABLES[name].column_names:
        changed = set_one(tables[name], column, name)
        if changed is None:
            continue
        try:
            validate_table(changed, TABLES[name])
        except ContractViolation:
            continue
        if all(one.held is not False for one in findings({**tables, name: changed}, traces)):
            missed.add(column)
    assert missed <= UNCOVERED[name]


@pytest.mark.parametrize(
    ("name", "column", "identity"),
    [
        ("replay_run", "missing_bytes", "device bytes = missing + raced + direct"),
        ("replay_run", "owner", "condition_hash is the digest of what was asked for"),
        ("replay_run", "consumed_digest", "digest: what the trace says every owner must have read"),
        ("replay_run", "bytes_valid", "bytes_valid follows from the proofs"),
        ("replay_step", "native_misses", None),
        ("replay_step", "wall_ns", "Σ steps = run: wall_ns"),
        ("replay_layer", "stall_ns", "Σ layers = run: stall_ns"),
        ("replay_proof", "held", "bytes_valid follows from the proofs"),
        ("machine", "kernel_release", "machine_id is the digest of its row"),
        ("pool", "files", "a pool is the one that its rule makes"),
        ("replay_reclaim", "device_bytes", None),
    ],
)
def test_a_changed_number_is_found_by_its_identity_through_the_whole_bundle(
    native: DataFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    name: str,
    column: str,
    identity: str | None,
) -> None:
    """The manifest has the hash of what was changed, so that no hash tells."""
    write_bundle_file(native, tmp_path / "whole.zip", made_by="make lab", with_traces=True)

    def change(frame: pl.DataFrame) -> pl.DataFrame:
        changed = set_one(frame, column, name)
        assert changed is not None
        return changed

    spoilt = with_rows(tmp_path / "whole.zip", name, change, tmp_path / "spoilt.zip")
    assert main(["verify", str(spoilt), "--json", "--data", str(tmp_path / "none")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document == documents.Verification.model_validate(document).model_dump()
    failed = [one for one in document["checks"] if one["held"] is False]
    assert not [one for one in failed if one["check"].startswith("member")]
    assert len(failed) == document["failed"] > 0
    if identity is not None:
        assert identity in {one["check"] for one in failed}


def test_a_whole_bundle_holds_and_says_what_is_not_possible(
    native: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = tmp_path / "whole.zip"
    call = ["bundle", "--out", str(target), "--made-by", "make lab", "--data", str(native.root)]
    assert main(call) == 0
    assert "expert-tier verify whole.zip" in capsys.readouterr().out
    assert main([*call, "--json"]) == 0
    document = documents.WrittenBundle.model_validate(json.loads(capsys.readouterr().out))
    assert document.bytes == target.stat().st_size
    assert document.sha256 == hashlib.sha256(target.read_bytes()).hexdigest()
    # Without the trace, its recounts are not possible; with it they hold.
    assert main(["verify", str(target), "--data", str(tmp_path / "none")]) == 0
    text = capsys.readouterr().out
    assert "trace lab-sample is not at hand" in text and "0 failed" in text
    assert "neither packed nor in the data folder" in text
    assert main(["verify", str(target), "--data", str(native.root)]) == 0
    text = capsys.readouterr().out
    assert "digest: what the trace says every owner must have read: 2 of 2" in text
    assert "native results are measured again" in text and "what differs of that machine" in text


def test_a_proof_that_failed_cannot_be_left_out_or_turned(tables: Tables, traces: dict[str, Trace]) -> None:
    run = tables["replay_run"]["run_id"][0]
    one = (pl.col("run_id") == run) & (pl.col("name") == "bytes returned")
    proofs = tables["replay_proof"].with_columns(
        found=pl.when(one).then(pl.lit("1 bytes")).otherwise("found"), held=pl.when(one).then(False).otherwise("held")
    )
    turned = {one.identity for one in found_false({**tables, "replay_proof": proofs}, traces)}
    assert "bytes_valid follows from the proofs" in turned and "verdict of proof 'bytes returned'" in turned
    left_out = {**tables, "replay_proof": tables["replay_proof"].filter(~one)}
    assert "a complete run has every proof" in {each.identity for each in found_false(left_out, traces)}


def test_a_step_more_or_less_is_found(tables: Tables, traces: dict[str, Trace]) -> None:
    less = {**tables, "replay_step": tables["replay_step"][1:]}
    assert "a complete run has all its steps" in {one.identity for one in found_false(less, traces)}
    none = {**tables, "replay_layer": tables["replay_layer"].clear()}
    assert "a complete run has its steps and layers" in {one.identity for one in found_false(none, traces)}
    lost = {**tables, "machine": tables["machine"][1:]}
    assert "every run's machine is there" in {one.identity for one in found_false(lost, traces)}


def test_columns_that_are_missing_are_found_and_stop_nothing(tables: Tables, traces: dict[str, Trace]) -> None:
    """Null is a value that anybody can write: every identity has to do without."""
    runs, tried = tables["replay_run"], 0
    for column in TABLES["replay_run"].nullable:
        without = runs.with_columns(pl.lit(None, runs.schema[column]).alias(column))
        try:
            validate_table(without, TABLES["replay_run"])
        except ContractViolation:
            continue
        tried += 1
        found = found_false({**tables, "replay_run": without}, traces)
        if column in ("reads", "capacity_bytes", "resident_max_bytes", "check_ns"):
            assert "what is counted together is all there" in {one.identity for one in found}, column
    assert tried > 30


# Simulated results.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    return simulated(tmp_path_factory.mktemp("small") / "data")


def again(data: DataFolder, **changed: pl.DataFrame) -> list[Check]:
    tables = {name: table.frame([]) for name, table in TABLES.items()}
    for folder in data.results.iterdir():
        tables[folder.name] = pl.read_parquet(data.result_file(folder.name, "here"))
    file = data.trace_file(TRACE_ID)
    return list(
        _simulated_again({**tables, **changed}, {TRACE_ID: read_trace(file)}, {TRACE_ID: file}, everything=False)
    )


def test_what_is_simulated_is_simulated_again_to_the_bit(small: DataFolder) -> None:
    checks = again(small)
    assert {one.held for one in checks} == {True}
    assert {one.subject.partition(" of ")[0] for one in checks} == {
        folder.name for folder in small.results.iterdir()
    } - {"trace_check"}


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("hit_rate", "hit_rate_low"), ("hit_rate_layer", "hits"), ("miss_ratio_curve", "misses"),
        ("trace_locality", "w8_reused_selections"), ("trace", "unknowns"),
        ("reporting_block", "answer"),
    ],
)  # fmt: skip
def test_a_simulated_value_that_was_changed_is_found_with_both_values(
    small: DataFolder, name: str, column: str
) -> None:
    frame = pl.read_parquet(small.result_file(name, "here"))
    changed = set_one(frame, column, name)
    assert changed is not None
    (failed,) = [one for one in again(small, **{name: changed}) if one.held is False]
    assert failed.subject == f"{name} of {TRACE_ID}"
    assert f"{column} in 1 of {frame.height:,} rows, first wanted" in failed.found
    if frame.height > 1:
        (fewer,) = [one for one in again(small, **{name: frame[1:]}) if one.held is False]
        assert "rows, wanted" in fewer.found


def test_another_trace_under_its_name_fails_and_nothing_is_simulated_on_it(small: DataFolder, tmp_path: Path) -> None:
    write_bundle_file(small, tmp_path / "b.zip", made_by="x")
    other = simulated(tmp_path / "other", seed=1)
    checks = verify_bundle(tmp_path / "b.zip", other).checks
    assert [one.check for one in checks if one.held is False] == ["trace is the one that was measured"]
    assert any("is not at hand" in one.found for one in checks)
    assert not [one for one in checks if one.check == "the same rows are simulated here" and one.held]


def test_cells_of_a_sweep_are_asked_for_again(small: DataFolder) -> None:
    trace = small.trace_file(TRACE_ID)
    asked = Sweep(
        traces=[trace], policies=["lru", "random", "static"], scopes=["layer", "global"],
        semantics=["event_atomic", "sequential"], capacities=[Capacity(experts=3), Capacity(bytes=500)], seeds=[4],
    )  # fmt: skip
    rows = [row for batch in run_sweep(asked, plan(asked)) for row in batch]
    sweep = TABLES["sweep"].frame({name: row[name] for name in TABLES["sweep"].column_names} for row in rows)
    (held,) = [one for one in again(small, sweep=sweep) if one.subject.startswith("sweep")]
    assert held.held, held.found
    wrong = sweep.with_columns(hits=pl.col("hits") + 1)
    (failed,) = [one for one in again(small, sweep=wrong) if one.subject.startswith("sweep")]
    assert failed.held is False and "hits wanted" in failed.found


def test_layers_and_curves_are_held_against_hit_rates_without_a_trace(small: DataFolder) -> None:
    tables = {name: table.frame([]) for name, table in TABLES.items()}
    for name in ("hit_rate", "hit_rate_layer", "miss_ratio_curve", "trace"):
        tables[name] = pl.read_parquet(small.result_file(name, "here"))
    assert {one.held for one in simulated_findings(tables)} == {True}
    for name, column, identity in (
        ("hit_rate_layer", "hits", "Σ layers = hit_rate: hits"),
        ("miss_ratio_curve", "misses", "curve = hit_rate: misses"),
        ("hit_rate", "miss_bytes", "miss_bytes = misses × expert bytes"),
    ):
        changed = tables[name].with_columns(pl.col(column) + 1)
        assert identity in {one.identity for one in simulated_findings({**tables, name: changed}) if not one.held}


# Decodes, experiments.


def decodes(**values: object) -> Tables:
    tables = {name: table.frame([]) for name, table in TABLES.items()}
    run, pair = ROWS["decode_run"], ROWS["decode_pair"]
    sides = {"owner": "decode-a", "against": "decode-b"}
    runs = [
        {**run, "run_id": run_id, "owner": pair[side], "token_sha256": pair[f"{side}_token_sha256"],
         "time_valid": pair[f"{side}_time_valid"], "decode_ns": pair[f"{side}_decode_ns"]}
        for side, run_id in sides.items()
    ]  # fmt: skip
    told = {f"{side}_run_id": run_id for side, run_id in sides.items()}
    layer = {**ROWS["decode_layer"], "accesses": run["accesses"]}
    tables["decode_run"] = TABLES["decode_run"].frame(runs)
    tables["decode_layer"] = TABLES["decode_layer"].frame({**layer, "run_id": one} for one in sides.values())
    tables["decode_pair"] = TABLES["decode_pair"].frame(
        [{**pair, **told, "decode_pair_id": "decode-a,decode-b", **values}]
    )
    return tables


def test_a_pair_says_what_its_decodes_say() -> None:
    assert {one.held for one in decode_findings(decodes())} == {True}
    pair = ROWS["decode_pair"]
    for name, value in {
        "identical": not pair["identical"], "owner_decode_ns": pair["owner_decode_ns"] + 1,
        "against_token_sha256": "f" * 64, "decode_pair_id": "another",
    }.items():  # fmt: skip
        assert [one for one in decode_findings(decodes(**{name: value})) if one.held is False], name
    tables = decodes()
    tables["decode_layer"] = tables["decode_layer"].with_columns(pl.col("accesses") + 1)
    assert [one for one in decode_findings(tables) if one.held is False]


@pytest.mark.parametrize(("name", "of_runs"), [("experiment", "experiment_run"), ("lab", "lab_run")])
def test_an_experiment_counts_the_runs_that_are_there(name: str, of_runs: str) -> None:
    tables = {each: table.frame([]) for each, table in TABLES.items()}
    run, mark = ROWS["replay_run"], ROWS[of_runs]
    tables["replay_run"] = TABLES["replay_run"].frame([run])
    tables[of_runs] = TABLES[of_runs].frame([{**mark, "run_id": run["run_id"]}])
    key = f"{name}_id"
    row = {**ROWS[name], key: mark[key], "runs": 1, "valid_runs": 1}
    tables[name] = TABLES[name].frame([row])
    assert [one.held for one in summary_findings(tables)] == [True]
    tables[name] = TABLES[name].frame([{**row, "valid_runs": 0}])
    assert [one.held for one in summary_findings(tables)] == [False]


def test_every_shipped_run_holds(tmp_path: Path) -> None:
    """Real runs of versions gone by: what verify asks of them is what they were."""
    from pipeline.bundle import add_bundle, rows_of, shipped

    data = DataFolder(tmp_path)
    for folder in shipped():
        add_bundle(folder, data)
    tables = {name: rows_of(data, name) for name in TABLES}
    assert tables["replay_run"].height > 200
    assert found_false(tables, {}) == []
