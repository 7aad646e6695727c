"""Identity of traces, what survives a crash or a full disk, and the typing of passes."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import canonical
from pipeline.canonical import type_passes
from pipeline.dumps.blocks import MalformedDump
from pipeline.ingest import ingest, inspect
from replayer.trace import MalformedTrace, read_metadata, read_trace, trace_parts
from schemas.columns import PASS_KINDS
from schemas.files import DataFolder, publish, remove_stale
from schemas.trace import METADATA_KEY, UserMetadata
from schemas.validation import ContractViolation, validate_trace
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, tok_layers_dump

ROOT = Path(__file__).parents[1]
ROUTES = random_routes(60, 3, 16, 4)
NOBODY = UserMetadata()


def dump_at(folder: Path, name: str = "a.jsonl", routes=ROUTES) -> Path:
    path = folder / name
    path.write_bytes(tok_layers_dump(routes))
    return path


def files_in(data: DataFolder) -> list[str]:
    return sorted(path.name for path in data.traces.iterdir() if path.name != ".lock")


def test_the_id_is_a_slug_and_twelve_digits_of_the_hash(tmp_path):
    import hashlib

    path = dump_at(tmp_path, "My Model (v2).route.JSONL")
    found = ingest(path, DataFolder(tmp_path / "data"), NOBODY)
    assert found.metadata.trace_id == f"my-model-v2-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def test_the_same_dump_twice_is_one_trace_also_under_another_name(tmp_path):
    data = DataFolder(tmp_path / "data")
    first = ingest(dump_at(tmp_path), data, NOBODY)
    before = first.path.stat().st_mtime_ns
    again = ingest(dump_at(tmp_path, "other.jsonl"), data, NOBODY)
    assert not again.is_new
    assert again.metadata.trace_id == first.metadata.trace_id
    assert first.path.stat().st_mtime_ns == before
    assert "already ingested" in again.warnings[0]
    assert files_in(data) == [first.path.name]


def test_other_user_metadata_make_another_trace_that_supersedes_the_first(tmp_path):
    data = DataFolder(tmp_path / "data")
    first = ingest(dump_at(tmp_path), data, NOBODY)
    second = ingest(tmp_path / "a.jsonl", data, UserMetadata(domain="code"))
    assert second.metadata.trace_id != first.metadata.trace_id
    assert second.metadata.supersedes == first.metadata.trace_id


def test_a_changed_dump_supersedes_the_trace_of_its_path(tmp_path):
    data = DataFolder(tmp_path / "data")
    first = ingest(dump_at(tmp_path), data, NOBODY)
    second = ingest(dump_at(tmp_path, routes=ROUTES[:-1]), data, NOBODY)
    (tmp_path / "elsewhere").mkdir()
    third = ingest(dump_at(tmp_path / "elsewhere", routes=ROUTES[:-2]), data, NOBODY)
    assert second.metadata.supersedes == first.metadata.trace_id
    assert third.metadata.supersedes is None


def test_two_dumps_under_one_trace_id_are_refused_and_the_first_stays(tmp_path):
    data = DataFolder(tmp_path / "data")
    first = ingest(dump_at(tmp_path), data, NOBODY, trace_id="mine")
    content = first.path.read_bytes()
    with pytest.raises(MalformedDump, match="trace id mine already names another dump"):
        ingest(dump_at(tmp_path, "b.jsonl", ROUTES[:-1]), data, NOBODY, trace_id="mine")
    assert first.path.read_bytes() == content
    assert files_in(data) == ["mine.parquet"]


@pytest.mark.parametrize("trace_id", ["../evil", "a/b", "", "A", "x" * 200, ".hidden", "a b"])
def test_a_trace_id_cannot_leave_the_folder(tmp_path, trace_id):
    with pytest.raises(MalformedDump, match="--trace-id"):
        ingest(dump_at(tmp_path), DataFolder(tmp_path / "data"), NOBODY, trace_id=trace_id)


def test_a_dump_parsed_by_an_older_parser_is_parsed_again_under_its_id(tmp_path, monkeypatch):
    data = DataFolder(tmp_path / "data")
    monkeypatch.setattr(canonical, "PARSER_VERSION", 0)
    old = ingest(dump_at(tmp_path), data, NOBODY, trace_id="mine")
    monkeypatch.setattr(canonical, "PARSER_VERSION", 1)
    new = ingest(tmp_path / "a.jsonl", data, NOBODY)
    assert (old.metadata.parser_version, new.metadata.parser_version) == (0, 1)
    assert new.is_new
    assert files_in(data) == ["mine.parquet"]


def test_inspect_finds_what_ingest_writes_and_keeps_nothing(tmp_path):
    found = inspect(dump_at(tmp_path), NOBODY, tmp_path / "spool")
    written = ingest(tmp_path / "a.jsonl", DataFolder(tmp_path / "data"), NOBODY).metadata
    assert found == written
    assert not (tmp_path / "spool").exists() or not list((tmp_path / "spool").iterdir())


def test_counts_of_the_metadata_are_those_of_the_rows(tmp_path):
    prefill, decode = random_routes(5, 3, 16, 2, seed=1), random_routes(30, 3, 16, 2, seed=2)
    (tmp_path / "a.csv").write_bytes(route_csv_dump(prefill, decode, experts=16))
    found = ingest(tmp_path / "a.csv", DataFolder(tmp_path / "data"), NOBODY)
    rows = pl.read_parquet(found.path)
    counts = found.metadata.counts
    unions = rows.explode("expert_ids").group_by("event_id").agg(pl.col("expert_ids").n_unique())
    assert counts.rows == rows.height
    assert counts.events == rows["event_id"].n_unique() == rows["event_id"].max() + 1
    assert counts.steps == rows["step_id"].n_unique()
    assert counts.accesses == unions["expert_ids"].sum()
    assert counts.rows_by_phase["prefill"] == 15
    assert counts.accepted_tokens == 30 + 1


def test_row_groups_hold_whole_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.npz.ROWS_PER_BLOCK", 25)
    monkeypatch.setattr("pipeline.ingest.ROWS_PER_BLOCK", 40)
    (tmp_path / "a.npz").write_bytes(npz_dump(ROUTES))
    found = ingest(tmp_path / "a.npz", DataFolder(tmp_path / "data"), NOBODY)
    with pq.ParquetFile(found.path) as file:
        steps = [set(file.read_row_group(group)["step_id"].to_pylist()) for group in range(file.num_row_groups)]
    assert len(steps) > 1
    assert all(not one & other for one, other in itertools.pairwise(steps))


def test_the_file_stores_ids_as_packed_dictionaries_and_weights_plain(tmp_path):
    (tmp_path / "a.csv").write_bytes(route_csv_dump([], ROUTES, experts=16))
    found = ingest(tmp_path / "a.csv", DataFolder(tmp_path / "data"), NOBODY)
    with pq.ParquetFile(found.path) as file:
        group = file.metadata.row_group(0)
        columns = {group.column(place).path_in_schema: group.column(place) for place in range(group.num_columns)}
    assert "RLE_DICTIONARY" in columns["expert_ids.list.element"].encodings
    # DuckDB cannot read float16 in any other encoding.
    assert "RLE_DICTIONARY" not in columns["router_weights.list.element"].encodings
    assert "BYTE_STREAM_SPLIT" not in columns["router_weights.list.element"].encodings


# What is left after a crash


def _ingest_in_child(dump: Path, data: Path, prelude: str = "") -> subprocess.Popen:
    code = (
        f"{prelude}\nimport sys\nfrom pathlib import Path\nfrom pipeline.cli import main\n"
        f"sys.exit(main(['ingest', {str(dump)!r}, '--data', {str(data)!r}]))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **pipes, cwd=ROOT)


SLOW = """
import time
from pipeline import canonical
original = canonical.Canonical.table
def slow(self, block, schema):
    print('writing', flush=True)
    time.sleep(0.3)
    return original(self, block, schema)
canonical.Canonical.table = slow
from pipeline.dumps import npz
npz.ROWS_PER_BLOCK = 30
"""


@pytest.mark.parametrize("blocks_before_kill", [1, 3])
def test_a_killed_ingest_leaves_nothing_that_counts_and_the_next_completes(tmp_path, blocks_before_kill):
    dump = tmp_path / "a.npz"
    dump.write_bytes(npz_dump(ROUTES))
    data = DataFolder(tmp_path / "data")
    child = _ingest_in_child(dump, data.root, SLOW)
    for _ in range(blocks_before_kill):
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
    child.kill()
    child.communicate()
    assert data.trace_ids() == []
    assert [name for name in files_in(data) if name.endswith(".tmp")], "the kill came too late to show anything"
    found = ingest(dump, data, NOBODY)
    assert files_in(data) == [found.path.name]
    assert read_trace(found.path).metadata.counts.rows == 180


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_ingest_says_so_in_one_line_and_leaves_nothing(tmp_path, number):
    dump = tmp_path / "a.npz"
    dump.write_bytes(npz_dump(ROUTES))
    data = DataFolder(tmp_path / "data")
    child = _ingest_in_child(dump, data.root, SLOW)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(number)
    _, stderr = child.communicate(timeout=20)
    assert child.returncode == 1
    assert stderr == "expert-tier: interrupted; nothing half-written was kept\n"
    assert files_in(data) == []


def test_a_living_writers_temporary_is_not_taken_for_a_leftover(tmp_path):
    target = tmp_path / "x.parquet"
    with publish(target) as temporary:
        temporary.write_bytes(b"half")
        assert remove_stale(tmp_path) == []
        assert temporary.exists()
    assert target.read_bytes() == b"half"


def test_a_file_size_limit_like_a_full_disk_fails_cleanly_and_keeps_the_old_file(tmp_path):
    target = tmp_path / "x.bin"
    target.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with (
            pytest.raises(OSError, match="File too large"),
            publish(target) as temporary,
            temporary.open("wb") as file,
        ):
            file.write(b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def _can_mount() -> bool:
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _can_mount(), reason="a full disk needs a private mount namespace (root and unshare)")
def test_a_full_disk_is_one_clear_line_and_nothing_is_left(tmp_path):
    dump = tmp_path / "a.npz"
    dump.write_bytes(npz_dump(random_routes(1500, 3, 200, 4)))
    # The mount lives in a namespace of its own and ends with the shell, whatever happens to it.
    script = (
        f"mount -t tmpfs -o size=16k none {tmp_path}/data && {sys.executable} -m pipeline ingest {dump} "
        f"--data {tmp_path}/data; echo rc=$?; ls -A {tmp_path}/data/traces"
    )
    (tmp_path / "data").mkdir()
    command = ["unshare", "-m", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "rc=1" in done.stdout
    assert done.stdout.split("rc=1")[1].split() in ([], [".lock"])
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_two_ingests_of_one_dump_at_once_make_one_sound_trace(tmp_path):
    dump = tmp_path / "a.npz"
    dump.write_bytes(npz_dump(ROUTES))
    data = DataFolder(tmp_path / "data")
    children = [_ingest_in_child(dump, data.root, SLOW) for _ in range(2)]
    assert [child.communicate(timeout=60) and child.returncode for child in children] == [0, 0]
    assert len(files_in(data)) == 1
    assert read_trace(data.trace_file(data.trace_ids()[0])).metadata.counts.rows == 180


# The contract of the file


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda rows: rows.with_columns(pl.lit(99, pl.UInt16).alias("layer_id")), "layer_id"),
        (lambda rows: rows.with_columns(pl.lit("later").cast(pl.Categorical).alias("phase")), "phase"),
        (lambda rows: rows.reverse(), "event_id"),
        (lambda rows: rows.with_columns(pl.col("step_id") * 2), "step_id"),
        (lambda rows: rows.with_columns(pl.col("expert_ids").arr.eval(pl.element() + 9, as_list=False)), "expert_ids"),
        (lambda rows: rows.with_columns(pl.col("expert_ids").arr.eval(pl.element() // 9, as_list=False)), "twice"),
        *[
            (lambda rows, name=name: rows.with_columns(pl.when(pl.col("event_id") != 7).then(name).alias(name)), name)
            for name in (
                "event_id",
                "row_in_event",
                "step_id",
                "request_id",
                "layer_id",
                "phase",
                "pass_kind",
                "expert_ids",
            )
        ],
        (lambda rows: rows.with_columns(pl.lit("decode").cast(pl.Categorical).alias("phase"))[1:], "event_id"),
        (
            lambda rows: rows.with_columns(
                pl.when(pl.col("event_id") == 7).then(pl.lit("decode")).otherwise(pl.lit("unknown")).alias("phase")
            ).with_columns(pl.col("phase").cast(pl.Categorical), pl.col("event_id").clip(0, 6)),
            "one step, layer, phase, kind per event",
        ),
        (lambda rows: rows.drop("request_id"), "request_id"),
        (lambda rows: rows.with_columns(pl.col("request_id").cast(pl.Int64)), "request_id"),
    ],
)
def test_every_broken_trace_fails_its_schema(tmp_path, break_it, named):
    (tmp_path / "a.npz").write_bytes(npz_dump(ROUTES, {"num_experts": 16}))
    found = ingest(tmp_path / "a.npz", DataFolder(tmp_path / "data"), NOBODY)
    rows = pl.read_parquet(found.path)
    validate_trace([rows], found.metadata)
    with pytest.raises(ContractViolation, match=named):
        validate_trace([break_it(rows)], found.metadata)


def test_a_parquet_of_somebody_else_is_no_trace(tmp_path):
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(MalformedTrace, match="without expert_tier metadata"):
        read_metadata(tmp_path / "x.parquet")


def test_the_metadata_are_checked_json_under_one_key(tmp_path):
    found = ingest(dump_at(tmp_path), DataFolder(tmp_path / "data"), NOBODY)
    stored = json.loads(pq.read_metadata(found.path).metadata[METADATA_KEY])
    assert stored["trace_id"] == found.metadata.trace_id
    assert stored["source"]["file"] == "a.jsonl"


# Typing of passes


@given(st.lists(st.sampled_from(["normal", "accept", "rejected", "repeated"]), min_size=1, max_size=30))
def test_types_follow_from_width_and_repetition(kinds):
    layers = 3
    records, expected = [], []
    for step, kind in enumerate(kinds):
        width, name = {"normal": (1, "normal"), "repeated": (1, "normal"), "accept": (2, "spec_accept")}.get(
            kind, (2, "spec_rejected")
        )
        records += [(step, 0, width)] * layers
        expected += [name] * layers
        if kind in ("rejected", "repeated"):
            records += [(step, 1, 1)] * layers
            expected += ["spec_fallback"] * layers
    step, which, rows = (np.array(column) for column in zip(*records, strict=True))
    found, wrong = type_passes(step.astype(np.int64), which.astype(np.int32), rows.astype(np.int64))
    assert wrong is None
    assert [PASS_KINDS[code] for code in found] == expected


@pytest.mark.parametrize(
    "records",
    [
        [(0, 0, 1), (0, 0, 2)],
        [(0, 0, 2), (0, 1, 2)],
        [(0, 0, 1), (0, 1, 1), (0, 2, 1)],
        [(0, 0, 1), (0, 0, 2), (0, 1, 1)],
    ],
)
def test_steps_that_fit_no_rule_are_named(records):
    both = [(5, 0, 1), *[(7, which, rows) for _, which, rows in records]]
    step, which, rows = (np.array(column) for column in zip(*both, strict=True))
    assert type_passes(step.astype(np.int64), which.astype(np.int32), rows.astype(np.int64))[1] == 7


def test_stale_temporaries_of_dead_writers_are_removed(tmp_path):
    leftover = tmp_path / ".x.parquet.abc.tmp"
    leftover.write_bytes(b"half")
    os.utime(leftover, (time.time(), time.time()))
    assert remove_stale(tmp_path) == [leftover]
    assert not leftover.exists()


def test_parts_of_a_trace_must_follow_each_other_and_add_up(tmp_path):
    (tmp_path / "a.npz").write_bytes(npz_dump(ROUTES))
    found = ingest(tmp_path / "a.npz", DataFolder(tmp_path / "data"), NOBODY)
    rows = pl.read_parquet(found.path)
    validate_trace([rows[:90], rows[90:]], found.metadata)
    validate_trace(trace_parts(found.path), found.metadata)
    with pytest.raises(ContractViolation, match="event_id"):
        validate_trace([rows[:90], rows[93:]], found.metadata)
    with pytest.raises(ContractViolation, match="its metadata says 180"):
        validate_trace([rows[:90]], found.metadata)


@pytest.mark.parametrize("name", ["x" * 250, "folder"])
def test_an_error_of_publishing_names_the_file_that_was_meant(tmp_path, name):
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError) as caught, publish(tmp_path / name) as temporary:
        temporary.write_bytes(b"x")
    assert caught.value.filename == str(tmp_path / name)
    assert ".tmp" not in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]
