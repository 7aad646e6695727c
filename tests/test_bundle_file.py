"""Bundles of whole data folders: the same bytes for the same data, and untrusted ones end in one line."""

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.bundle import UnusableBundle
from pipeline.bundle_file import BundleFile, rows_sha256
from pipeline.cli import main
from pipeline.pack import write_bundle_file
from pipeline.verify import verify_bundle
from replayer.trace import read_trace
from schemas.files import DataFolder
from schemas.tables import TABLES
from tests.builders import make_trace, write_trace
from tests.bundles import TRACE_ID, keep, measured, members_of, simulated, written
from tests.table_rows import ROWS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    """Simulated and native results side by side."""
    folder = simulated(tmp_path_factory.mktemp("both") / "data")
    native = measured(folder.root)
    assert native.root == folder.root
    return folder


@pytest.fixture(scope="module")
def bundle(data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / "results.zip"
    write_bundle_file(data, target, made_by="make demo", with_traces=True)
    return target


# Packing.


def test_the_same_data_is_the_same_bytes_whatever_the_order_of_rows_and_files(data: DataFolder, tmp_path: Path) -> None:
    first = write_bundle_file(data, tmp_path / "first.zip", made_by="make demo", with_traces=True)
    other = DataFolder(tmp_path / "other")
    for table in data.results.iterdir():
        frame = pl.read_parquet(table / "here" / "part.parquet").reverse()
        half = frame.height // 2
        keep(other, table.name, frame[:half])
        frame[half:].write_parquet(other.result_file(table.name, "here").with_name("rest.parquet"))
    other.traces.mkdir()
    other.trace_file(TRACE_ID).write_bytes(data.trace_file(TRACE_ID).read_bytes())
    second = write_bundle_file(other, tmp_path / "second.zip", made_by="make demo", with_traces=True)
    assert first.sha256 == second.sha256
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()


def test_what_is_packed_is_what_is_there(data: DataFolder, bundle: Path, tmp_path: Path) -> None:
    with BundleFile(bundle) as found:
        for name, table in TABLES.items():
            file = data.result_file(name, "here")
            here = pl.read_parquet(file).sort(table.key) if file.exists() else table.frame([])
            assert found.table(name).equals(here)
        found.unpack_trace(TRACE_ID, tmp_path / "trace.parquet")
        manifest = found.manifest
    assert (tmp_path / "trace.parquet").read_bytes() == data.trace_file(TRACE_ID).read_bytes()
    assert {trace.trace_id: trace.packed for trace in manifest.traces} == {TRACE_ID: True, "lab-sample": False}
    assert manifest.seeds["hit_rate.seed"] == [0]
    assert manifest.environment["polars"] == pl.__version__
    assert manifest.expert_tier_version and manifest.environment["kernel_release"]
    assert "## tiny" in members_of(bundle)["reporting.md"].decode()


def test_some_traces_or_runs_alone_are_packed(data: DataFolder, tmp_path: Path) -> None:
    run = str(pl.read_parquet(data.result_file("replay_run", "here"))["run_id"].sort()[0])
    write_bundle_file(data, tmp_path / "run.zip", made_by="x", run_ids=[run])
    with BundleFile(tmp_path / "run.zip") as found:
        assert found.table("replay_run")["run_id"].to_list() == [run]
        assert set(found.table("replay_step")["run_id"]) == {run}
        assert found.table("machine").height == 1
        assert not found.table("hit_rate").height
    write_bundle_file(data, tmp_path / "trace.zip", made_by="x", trace_ids=[TRACE_ID])
    with BundleFile(tmp_path / "trace.zip") as found:
        assert found.table("hit_rate").height and not found.table("replay_run").height
        assert not found.table("machine").height


def test_rows_without_their_run_stay_behind(tmp_path: Path) -> None:
    data = measured(tmp_path / "data")
    file = data.result_file("replay_run", "here")
    pl.read_parquet(file).sort("run_id")[1:].write_parquet(file)
    write_bundle_file(data, tmp_path / "b.zip", made_by="x")
    with BundleFile(tmp_path / "b.zip") as found:
        runs = set(found.table("replay_run")["run_id"])
        assert set(found.table("replay_step")["run_id"]) == runs == set(found.table("replay_proof")["run_id"])


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        (["--trace", "nobody"], 1, "no trace 'nobody'"),
        (["--run", "nobody"], 1, "no run 'nobody'"),
        (["--made-by", " "], 2, "wanted the command that remakes the results"),
        (["a-lab", "--with-traces"], 2, "a lab's bundle is all of its runs"),
        (["a-lab"], 1, "no lab 'a-lab' with runs there"),
        (["--out", "{data}/results/x.zip"], 2, "which holds what the data folder keeps"),
        (["--out", "{data}/nowhere/x.zip"], 2, "there is no folder"),
    ],
)
def test_a_call_that_cannot_be_is_one_line_and_writes_nothing(
    data: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture, call: list[str], code: int, said: str
) -> None:
    defaults = {"--out": str(tmp_path / "x.zip"), "--made-by": "make demo", "--data": str(data.root)}
    told = [part.format(data=data.root) for part in call]
    told += [part for name, value in defaults.items() if name not in call for part in (name, value)]
    assert main(["bundle", *told]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_damaged_result_is_named_and_the_old_bundle_stays(tmp_path: Path) -> None:
    data = measured(tmp_path / "data")
    target = tmp_path / "b.zip"
    target.write_bytes(b"the old one")
    file = data.result_file("replay_layer", "here")
    pl.read_parquet(file).with_columns(accesses=pl.lit(-1, pl.Int64)).write_parquet(file)
    with pytest.raises(UnusableBundle, match="replay_layer"):
        write_bundle_file(data, target, made_by="x")
    file.write_bytes(b"PAR1 cut")
    with pytest.raises(UnusableBundle, match="unreadable"):
        write_bundle_file(data, target, made_by="x")
    assert target.read_bytes() == b"the old one"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["b.zip"]


def test_nothing_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(UnusableBundle, match="no results to pack"):
        write_bundle_file(DataFolder(tmp_path), tmp_path / "b.zip", made_by="x")


# Hashes of rows.


def test_the_rows_hash_is_of_the_rows_and_not_of_the_file(tmp_path: Path) -> None:
    routes = np.argsort(np.random.default_rng(1).random((40, 2, 8)), axis=-1)[..., :3]
    first = write_trace(make_trace(routes, phases=["prefill"] * 20 + ["decode"] * 20), tmp_path / "a.parquet")
    table = pq.read_table(first)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7, compression="none")
    assert first.read_bytes() != (tmp_path / "b.parquet").read_bytes()
    assert rows_sha256(first) == rows_sha256(tmp_path / "b.parquet")
    digests = {rows_sha256(first)}
    for name in table.schema.names:
        column = table.column(name)
        values = column.to_pylist()
        if values[5] is None:
            values[5] = [1] if pa.types.is_nested(column.type) else 1
        elif name in ("phase", "pass_kind"):
            values[5] = next(one for one in ("decode", "spec_accept") if one != values[5])
        else:
            values[5] = [one + 1 for one in values[5]] if isinstance(values[5], list) else values[5] + 1
        try:
            changed = table.set_column(table.schema.get_field_index(name), name, pa.array(values, column.type))
        except (pa.ArrowException, TypeError):
            continue
        pq.write_table(changed, tmp_path / "c.parquet")
        digests.add(rows_sha256(tmp_path / "c.parquet"))
    assert len(digests) >= len(table.schema.names) - 2
    assert read_trace(first).metadata.trace_id == "tiny"


# Untrusted bundles.


def replaced(name: str, content: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda members: {**members, name: content}


def told(**values: object) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    def change(members: dict[str, bytes]) -> dict[str, bytes]:
        manifest = {**json.loads(members["manifest.json"]), **values}
        return {**members, "manifest.json": json.dumps(manifest).encode()}

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replaced("../escaped", b"x"), "a member '../escaped', which no bundle has"),
        (replaced("/escaped", b"x"), "a member '/escaped'"),
        (replaced("traces/../../escaped.parquet", b"x"), "which no bundle has"),
        (replaced("results/../escaped.parquet", b"x"), "which no bundle has"),
        (replaced("results/nobody.parquet", b"x"), "which no bundle has"),
        (replaced("manifest.json", b"{"), "manifest.json is no JSON"),
        (replaced("manifest.json", b"[" * 100_000), "manifest.json is no JSON"),
        (replaced("manifest.json", b'"a"'), "manifest.json is of no bundle"),
        (replaced("manifest.json", b" " * (5 << 20)), "wanted at most"),
        (lambda members: {"reporting.md": b""}, "no manifest.json"),
        (told(format="a zip of something"), "manifest.json is of no bundle"),
        (told(format_version=2), "format version 2, wanted 1; read it with the version that wrote it"),
        (told(format_version="1"), "format version '1', wanted 1"),
        (told(more=1), "manifest.json: more"),
        (told(made_by="two\nlines"), "does not say in a line what made the results"),
        (told(seeds={"a": ["b"]}), "manifest.json: seeds"),
        (
            told(traces=[{"trace_id": "../up", "rows_sha256": None, "file_sha256": None, "source_sha256": None,
                          "bytes": None, "packed": False}]),
            "trace id '../up'",
        ),
    ],
)  # fmt: skip
def test_what_is_no_bundle_is_one_line(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
    said: str,
) -> None:
    spoilt = written(change(members_of(bundle)), tmp_path / "spoilt.zip", told=False)
    assert main(["verify", str(spoilt), "--data", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["spoilt.zip"]
    assert not (tmp_path.parent / "escaped").exists()


def test_members_that_come_twice_or_packed_are_refused(bundle: Path, tmp_path: Path) -> None:
    members = members_of(bundle)
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for name, content in [*members.items(), ("reporting.md", b"another")]:
            archive.writestr(name, content)
    with pytest.raises(UnusableBundle, match=r"two members 'reporting\.md'"):
        verify_bundle(tmp_path / "twice.zip")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", members["manifest.json"])
        archive.writestr("results/replay_run.parquet", b"\0" * (64 << 20))
    assert (tmp_path / "bomb.zip").stat().st_size < 100_000
    with pytest.raises(UnusableBundle, match="packed or encrypted, wanted stored"):
        verify_bundle(tmp_path / "bomb.zip")


def test_a_name_that_ends_early_is_the_whole_name(bundle: Path, tmp_path: Path) -> None:
    """zipfile itself cuts a name at a null byte, and would take it for another."""
    written({**members_of(bundle), "results/lab.parquetX.txt": b"x"}, tmp_path / "a.zip", told=False)
    content = (tmp_path / "a.zip").read_bytes().replace(b"lab.parquetX.txt", b"lab.parquet\0.txt")
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UnusableBundle, match="which no bundle has"):
        verify_bundle(tmp_path / "a.zip")


def test_members_that_lie_over_each_other_are_refused(bundle: Path, tmp_path: Path) -> None:
    content = bytearray(bundle.read_bytes())
    end = len(content) - 22
    count, _, begin = struct.unpack_from("<HLL", content, end + 10)
    place, sizes = begin, []
    for _ in range(count):
        names = struct.unpack_from("<3H", content, place + 28)
        sizes.append((place, struct.unpack_from("<L", content, place + 20)[0]))
        place += 46 + sum(names)
    for where, _ in sizes:
        struct.pack_into("<LL", content, where + 20, max(size for _, size in sizes), max(size for _, size in sizes))
    (tmp_path / "over.zip").write_bytes(content)
    with pytest.raises(UnusableBundle, match="lie over each other"):
        verify_bundle(tmp_path / "over.zip")


def test_a_directory_that_is_too_large_is_not_read(bundle: Path, tmp_path: Path) -> None:
    content = bytearray(bundle.read_bytes())
    struct.pack_into("<H", content, len(content) - 12, 60_000)
    (tmp_path / "many.zip").write_bytes(content)
    with pytest.raises(UnusableBundle, match="a directory of 60,000 members"):
        verify_bundle(tmp_path / "many.zip")
    locator = b"PK\x06\x07" + bytes(16)
    (tmp_path / "64.zip").write_bytes(bundle.read_bytes()[:-22] + locator + bundle.read_bytes()[-22:])
    with pytest.raises(UnusableBundle, match="a directory of"):
        verify_bundle(tmp_path / "64.zip")


def failures(bundle: Path) -> list[str]:
    return [f"{one.check} [{one.subject}]: {one.found}" for one in verify_bundle(bundle).checks if one.held is False]


def parquet(frame: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(frame, sink, compression="zstd")
    return sink.getvalue()


def test_tables_that_unpack_to_more_than_memory_are_not_unpacked(bundle: Path, tmp_path: Path) -> None:
    """A dictionary names one long text a million times, and a run of one value a hundred million."""
    columns = TABLES["trace_check"].frame([ROWS["trace_check"]]).to_arrow().schema
    million = 1_000_000
    index = pa.array(np.zeros(million, dtype=np.int32))
    long = pa.DictionaryArray.from_arrays(index, pa.array(["x" * 100_000]))
    texts = pa.table(dict.fromkeys(columns.names, long))
    plain = texts.cast(pa.schema([pa.field(name, pa.dictionary(pa.int32(), pa.string())) for name in columns.names]))
    content = parquet(plain.replace_schema_metadata(None))
    assert len(content) < 1_000_000
    spoilt = written({**members_of(bundle), "results/trace_check.parquet": content}, tmp_path / "a.zip")
    (found,) = [one for one in failures(spoilt) if one.startswith("table keeps its contract")]
    assert "trace_check" in found and ("other columns" in found or "texts of" in found)


def test_texts_are_measured_before_they_leave_their_dictionary(bundle: Path, tmp_path: Path) -> None:
    """As the columns should be, so that nothing but the measure stands before half a terabyte."""
    schema = TABLES["trace_check"].frame([ROWS["trace_check"]]).to_arrow().schema
    part = pa.table({name: pa.array(["x" * 100_000] * 20, pa.large_string()) for name in schema.names})
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, part.schema, compression="zstd", use_dictionary=True) as writer:
        for _ in range(120):
            writer.write_table(part)
    content = sink.getvalue()
    spoilt = written({**members_of(bundle), "results/trace_check.parquet": content}, tmp_path / "a.zip")
    with BundleFile(spoilt) as opened, pytest.raises(UnusableBundle, match=r"texts of [\d,]+ bytes"):
        opened.table("trace_check", room_bytes=100 << 20)


def test_rows_beyond_the_room_are_not_unpacked(bundle: Path, tmp_path: Path) -> None:
    row = TABLES["pool"].frame([ROWS["pool"]])
    content = io.BytesIO()
    pl.concat([row] * 40_000).write_parquet(content)
    spoilt = written({**members_of(bundle), "results/pool.parquet": content.getvalue()}, tmp_path / "a.zip")
    with BundleFile(spoilt) as opened, pytest.raises(UnusableBundle, match="40,000 rows"):
        opened.table("pool", room_bytes=1 << 20)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 40 + b"\x28\x00\x00\x00PAR1"])
def test_a_damaged_member_is_a_failed_check(bundle: Path, tmp_path: Path, content: bytes) -> None:
    for name in ("results/replay_run.parquet", f"traces/{TRACE_ID}.parquet"):
        spoilt = written({**members_of(bundle), name: content}, tmp_path / "a.zip")
        assert any("unreadable" in one or "trace" in one for one in failures(spoilt))


def test_a_member_that_the_manifest_lacks_or_has_more_fails(bundle: Path, tmp_path: Path) -> None:
    members = members_of(bundle)
    del members["results/replay_node.parquet"]
    missing = failures(written(members, tmp_path / "a.zip"))
    assert any("results/replay_node.parquet]: not in the bundle" in one for one in missing)
    more = {**members_of(bundle), "results/lab.parquet": parquet(TABLES["lab"].frame([ROWS["lab"]]).to_arrow())}
    found = failures(written(more, tmp_path / "b.zip"))
    assert any("results/lab.parquet]: not in the manifest" in one for one in found)


@settings(max_examples=25, deadline=None)
@given(drawn=st.data())
def test_a_bundle_that_is_cut_or_changed_anywhere_ends_in_words(drawn: st.DataObject, small: tuple[Path, Path]) -> None:
    """No fault of a file is an exception of ours; what verifies still has every member as it was."""
    whole, spoilt = small
    content = bytearray(whole.read_bytes())
    if drawn.draw(st.booleans()):
        content = content[: drawn.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(drawn.draw(st.integers(1, 3))):
            content[drawn.draw(st.integers(0, len(content) - 1))] ^= drawn.draw(st.integers(1, 255))
    spoilt.write_bytes(content)
    try:
        found = verify_bundle(spoilt)
    except UnusableBundle as error:
        assert str(spoilt) in str(error)
        return
    if not found.count(False):
        changed = {name: one for name, one in members_of(spoilt).items() if name != "manifest.json"}
        assert changed == {name: one for name, one in members_of(whole).items() if name != "manifest.json"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("small")
    write_bundle_file(measured(root / "data", mechanisms=("cgroup",), each=1), root / "whole.zip", made_by="x")
    return root / "whole.zip", root / "spoilt.zip"


def test_a_folder_or_nothing_is_no_bundle_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", str(tmp_path), "--data", str(tmp_path)]) == 1
    assert "a folder, as a lab's bundle is" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "none.zip"), "--data", str(tmp_path)]) == 1
    assert "No such file" in capsys.readouterr().err
