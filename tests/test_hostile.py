"""Dumps and files made to be taken for what they are not, or to break whoever reads them."""

import io
import itertools
import json
import random
import time
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from pipeline.dumps.blocks import MalformedDump, RefusedDump
from pipeline.ingest import Ingested, WrongMetadata, ingest, inspect, read_stored, read_user_metadata
from replayer import cli as replayer_cli
from replayer.simulate import Capacity, UnusableRequest, prepare, simulate
from replayer.trace import MalformedTrace, read_trace
from schemas.files import DataFolder
from schemas.trace import METADATA_KEY, UserMetadata
from tests.builders import make_trace
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, speculative_dump, tok_layers_dump

ROUTES = random_routes(200, 4, 64, 8, seed=1)
ARRAY = np.array(ROUTES, dtype=np.int16).transpose(1, 0, 2)


def npz(array: np.ndarray, meta: dict | None = None) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, experts=array, **({} if meta is None else {"meta": np.array(json.dumps(meta))}))
    return buffer.getvalue()


def taken(folder: Path, content: bytes, **said: object) -> Ingested:
    path = folder / "dump.bin"
    path.write_bytes(content)
    return ingest(path, DataFolder(folder / "data"), UserMetadata(**said))


def refusal(folder: Path, content: bytes, **said: object) -> str:
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        taken(folder, content, **said)
    return str(caught.value)


def outcome(one: Ingested, name: str) -> str:
    return {check.name: check.outcome for check in one.metadata.checks}[name]


# Ids that wrap


@pytest.mark.parametrize("wrapped", [2**32 + 15, -(2**32) + 15, 2**31])
def test_ids_beyond_31_bits_do_not_wrap(tmp_path, wrapped):
    array = ARRAY.astype(np.int64)
    array[0, 5, 0] = wrapped
    assert "beyond 31 bits" in refusal(tmp_path, npz(array))


def test_more_experts_than_16_bits_name_are_refused_in_every_layout(tmp_path):
    assert "65,535" in refusal(tmp_path, npz(ARRAY.astype("i4"), {"num_experts": 70000}))
    text = route_csv_dump([], ROUTES, experts=70000)
    assert "65,535" in refusal(tmp_path, text)


def test_8_bit_ids_cannot_name_more_than_256_experts_whoever_says_so(tmp_path):
    assert "wrapped" in refusal(tmp_path, npz(ARRAY.astype(np.uint8)), num_experts=512)


def test_255_of_256_experts_in_8_bits_is_named_as_ambiguous(tmp_path):
    array = ARRAY.astype(np.uint8)
    array[:, 30:60, 0] = 255
    one = taken(tmp_path, npz(array), num_experts=256)
    assert outcome(one, "255 is an expert") == "warn"


# Rows that are no routes


@pytest.mark.parametrize("span", [slice(120, None), slice(50, 150)])
def test_frozen_rows_in_all_layers_are_named(tmp_path, span):
    array = ARRAY.copy()
    array[:, span] = array[:, 119:120]
    assert outcome(taken(tmp_path, npz(array)), "no frozen rows") == "warn"


def test_one_frozen_layer_is_named(tmp_path):
    array = ARRAY.copy()
    array[1, 20:] = array[1, 20]
    one = taken(tmp_path, npz(array))
    assert outcome(one, "no frozen rows") == "warn"


def test_sound_routes_have_no_frozen_rows(tmp_path):
    assert outcome(taken(tmp_path, npz(ARRAY)), "no frozen rows") == "ok"


@pytest.mark.parametrize("copy", [lambda layer: layer[:, ::-1], lambda layer: np.sort(layer, axis=1)])
def test_a_layer_that_is_another_in_another_order_is_refused(tmp_path, copy):
    array = ARRAY.copy()
    array[3] = copy(array[1])
    assert "layers [1, 3] are equal" in refusal(tmp_path, npz(array))


def test_strided_copies_of_passes_shorter_than_a_partition_are_refused(tmp_path):
    generator = np.random.default_rng(0)

    def garbage() -> np.ndarray:
        return np.stack([generator.permutation(128) for _ in range(10)]).ravel()[:80].reshape(10, 8)

    array = np.stack([np.concatenate([garbage() for _ in range(20)]) for _ in range(4)])
    assert "strided top-k view" in refusal(tmp_path, npz(array.astype(np.int16)), num_experts=128)


# Tokens lost, repeated, moved


def lines_of(routes=ROUTES) -> list[bytes]:
    return tok_layers_dump(routes).splitlines(keepends=True)


def test_a_token_that_stands_twice_is_refused(tmp_path):
    lines = lines_of()
    assert "stands twice in a row" in refusal(tmp_path, b"".join([*lines[:50], lines[49], *lines[50:]]))


def test_a_decode_step_that_stands_twice_is_refused(tmp_path):
    routes = random_routes(30, 3, 16, 2)
    lines = route_csv_dump([], routes, experts=16).splitlines(keepends=True)
    head, body = lines[:3], lines[3:]
    assert "stands twice in a row" in refusal(tmp_path, b"".join([*head, *body[:60], *body[54:60], *body[60:]]))


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:60] + lines[70:],
        lambda lines: lines + lines[:60],
        lambda lines: lines[::-1],
        lambda lines: [*lines[:10], lines[11], lines[10], *lines[12:]],
    ],
    ids=["missing", "begun again", "reversed", "swapped"],
)
def test_gaps_and_restarts_of_positions_are_named(tmp_path, change):
    one = taken(tmp_path, b"".join(change(lines_of())))
    assert outcome(one, "positions continuous") == "warn"


def test_a_file_that_was_joined_with_itself_is_refused(tmp_path):
    assert "of them 2 times over" in refusal(tmp_path, b"".join(lines_of() * 2))


def test_continuous_positions_of_several_requests_pass(tmp_path):
    first = route_csv_dump(random_routes(3, 2, 16, 2), random_routes(9, 2, 16, 2, seed=3), experts=16)
    second = route_csv_dump(random_routes(4, 2, 16, 2), random_routes(9, 2, 16, 2, seed=4), experts=16, turn=1)
    body = b"".join(line + b"\n" for line in second.splitlines() if line[:1].isdigit())
    assert outcome(taken(tmp_path, first + body), "positions continuous") == "ok"


@pytest.mark.parametrize("number", [0, 2, "x", "1_0", "٣"])
def test_conformance_events_must_be_counted_and_be_whole_numbers(tmp_path, number):
    header = "event_index,scheduler_step,layer,requested_experts\n"
    content = f"{header}0,0,0,0 1\n{number},1,0,0 2\n"
    assert "line 3" in refusal(tmp_path, content.encode())


# Speculation


def pass_lines(records: list[tuple[int, int, int]], seed: int = 0) -> bytes:
    """(iteration, layer, rows) records of k = 4 of 32 experts."""
    generator = random.Random(seed)
    text = ""
    for iteration, layer, rows in records:
        ids = [expert for _ in range(rows) for expert in generator.sample(range(32), 4)]
        text += json.dumps({"iteration": iteration, "layer": layer, "experts": ids}) + "\n"
    return text.encode()


def sweep(iteration: int, layers, rows: int = 1) -> list[tuple[int, int, int]]:
    return [(iteration, layer, rows) for layer in layers]


@pytest.mark.parametrize(
    "second",
    [
        [(1, layer, 1) for layer in range(4) for _ in range(2)],
        [(1, 0, 1), (1, 1, 1), (1, 2, 1), (1, 2, 1), (1, 3, 1), (1, 3, 1)],
        [(1, 0, 1), (1, 1, 1), *sweep(1, range(4))],
        [*sweep(1, range(2), rows=2), *sweep(1, range(4))],
    ],
    ids=["by layer", "upper layers", "cut narrow", "cut wide"],
)
def test_failed_passes_of_the_study_are_read_however_they_are_cut(tmp_path, second):
    content = pass_lines([*sweep(0, range(4)), *second, *sweep(2, range(4), rows=2)])
    one = taken(tmp_path, content)
    assert one.metadata.counts.accepted_tokens == 1 + 1 + 2
    assert "spec_fallback" in pl.read_parquet(one.path)["pass_kind"].cast(pl.String).to_list()


def test_a_hole_inside_a_speculative_sweep_is_no_partial_sweep(tmp_path):
    content = pass_lines([*sweep(0, range(4)), *sweep(1, [0, 1, 3], rows=2), *sweep(1, range(4)), *sweep(2, range(4))])
    assert "layers [2] are missing" in refusal(tmp_path, content)


def test_records_of_one_width_leave_k_in_doubt_and_say_so(tmp_path):
    one = taken(tmp_path, pass_lines([*sweep(0, range(4)), *sweep(1, range(4))]))
    assert outcome(one, "k of the records") == "warn"
    assert "top_k_model=2" in " ".join(one.warnings)
    content, _ = speculative_dump(4, 32, 4, ["normal", "accept"] * 5)
    assert outcome(taken(tmp_path, content), "k of the records") == "ok"


def test_ubatches_without_the_last_layer_are_counted(tmp_path):
    first, second = random_routes(3, 3, 16, 2), random_routes(4, 3, 16, 2, seed=5)
    lines = route_csv_dump(first, [], experts=16).decode().splitlines()
    kept = [line for line in lines if not (line[:1].isdigit() and line.split(",")[3] == "2")]
    again = route_csv_dump(second, random_routes(20, 3, 16, 2, seed=6), experts=16).decode().splitlines()
    moved = [
        ",".join([*fields[:2], str(int(fields[2]) + 3), *fields[3:]])
        for fields in (line.split(",") for line in again if line[:1].isdigit())
    ]
    one = taken(tmp_path, ("\n".join(kept + moved) + "\n").encode())
    assert any("1 passes with fewer rows in the last layer" in warning for warning in one.warnings)


# What is no layout


def test_a_byte_order_mark_is_no_content(tmp_path):
    for content in (tok_layers_dump(ROUTES), route_csv_dump([], ROUTES, experts=64)):
        assert taken(tmp_path, b"\xef\xbb\xbf" + content).metadata.counts.steps == 200


def test_blank_lines_and_comments_around_conformance_events_are_passed_over(tmp_path):
    content = b"# made by hand\n\nevent_index, scheduler_step, layer, requested_experts\n\n0,0,0,0 1\n1,1,0,0 2\n"
    assert taken(tmp_path, content).metadata.counts.events == 2


def test_a_long_first_record_after_a_blank_line_is_read(tmp_path):
    routes = random_routes(3, 200, 512, 128)
    # Longer than what is looked at first.
    assert len(tok_layers_dump(routes[:1])) > 80_000
    assert taken(tmp_path, b"\n" + tok_layers_dump(routes)).metadata.counts.steps == 3


@pytest.mark.parametrize(
    "line", ['{"tok": 1, "tok": 2, "layers": [[1]]}', '{"tok": 1, "layers": [[1]], "x": "\\ud800"}']
)
def test_json_that_two_parsers_read_differently_is_located(tmp_path, line):
    content = b'{"tok": 0, "layers": [[1]]}\n' + line.encode() + b"\n"
    assert "line 2" in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("column", "value"), [(1, "300"), (7, "x"), (5, "+3"), (5, "1_0"), (6, "1_0"), (0, "-1"), (6, "70000")]
)
def test_fields_out_of_range_are_located(tmp_path, column, value):
    lines = route_csv_dump([], ROUTES, experts=64).decode().splitlines()
    for row in range(27, 35):
        fields = lines[row].split(",")
        if column != 6 or row == 27:
            lines[row] = ",".join([*fields[:column], value, *fields[column + 1 :]])
    message = refusal(tmp_path, ("\n".join(lines) + "\n").encode())
    assert "line 2" in message or "step" in message


@pytest.mark.parametrize("said", [0, -5, "64", 64.0, True])
def test_npz_meta_of_the_wrong_kind_is_refused(tmp_path, said):
    assert "wanted a positive whole number" in refusal(tmp_path, npz(ARRAY, {"num_experts": said}))


@pytest.mark.parametrize("shape", [(-2, 3, 4), (True, 3, 4), (-6, -2, 1)])
def test_npz_of_impossible_shape_is_refused(tmp_path, shape):
    from tests.raw_dumps import npy_bytes

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("experts.npy", npy_bytes(shape, "<i2", b"\0" * 24))
    assert "dump.bin" in refusal(tmp_path, buffer.getvalue())


def test_every_flipped_byte_of_an_npz_is_a_trace_or_one_line(tmp_path):
    content = npz_dump(random_routes(12, 2, 16, 2), {"model": "m"})
    generator = random.Random(0)
    for _ in range(400):
        mutated = bytearray(content)
        mutated[generator.randrange(len(mutated))] ^= 1 << generator.randrange(8)
        path = tmp_path / "x.npz"
        path.write_bytes(mutated)
        try:
            inspect(path, UserMetadata(), tmp_path)
        except (MalformedDump, RefusedDump) as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b"# route_trace v1\n# " + b"a" * 400_000 + b"\nturn,phase,step,layer,slot,expert\n0,0,0,0,0,1\n",
        b"ffn_moe_" * 3000 + b"\n",
        b'{"tok":0,"layers":[[' + b",".join(b"%d" % i for i in range(16384)) + b"]]}\n",
        b"# route_trace v1\n"
        + b"# "
        + b" ".join(b"k%d=1" % i for i in range(5000))
        + b"\nturn,phase,step,layer,slot,expert\n",
        b"# layer=\xc2\xb2 expert_bytes=5\n# n_expert="
        + b"9" * 5000
        + b"\nturn,phase,step,layer,slot,expert\n0,0,0,0,0,1\n",
    ],
)
def test_small_files_that_ask_for_much_work_are_refused_quickly(tmp_path, content):
    started = time.monotonic()
    assert refusal(tmp_path, content)
    # Generous: the faults these stand for took minutes and gigabytes.
    assert time.monotonic() - started < 20


# What the user says, and names


@pytest.mark.parametrize(
    "meta",
    [
        "num_experts=true",
        "expert_id_base=true",
        "moe_layer_ids=[true,2]",
        "top_k_model=1.5",
        "expert_bytes=" + "9" * 30,
        "num_experts=" + "[" * 20000,
    ],
)
def test_user_metadata_of_the_wrong_kind_is_one_line(tmp_path, meta):
    with pytest.raises(WrongMetadata) as caught:
        read_user_metadata(tmp_path / "a.npz", [meta])
    assert len(str(caught.value)) < 1000


def test_texts_of_the_user_are_texts(tmp_path):
    assert read_user_metadata(tmp_path / "a.npz", ["model=123", "domain=true"]).model == "123"


@pytest.mark.parametrize("text", ["model = " + "[" * 20000, "num_experts = " + "9" * 5000])
def test_a_hostile_toml_is_one_line(tmp_path, text):
    (tmp_path / "a.npz.toml").write_text(text)
    with pytest.raises(MalformedDump, match="no TOML"):
        read_user_metadata(tmp_path / "a.npz")


def test_layer_lists_that_are_fewer_than_the_layers_need_a_map(tmp_path):
    assert "moe_layer_ids" in refusal(tmp_path, npz(ARRAY), hidden_layers=5)
    assert taken(tmp_path, npz(ARRAY), hidden_layers=5, moe_layer_ids=[1, 2, 3, 4]).metadata.layer_base == "declared"


def test_names_that_are_no_text_are_escaped_in_the_metadata(tmp_path):
    import os

    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.jsonl"))
    path.write_bytes(tok_layers_dump(ROUTES))
    assert ingest(path, DataFolder(tmp_path / "data"), UserMetadata()).metadata.source.file == "\\udcff\\udcfe.jsonl"


def test_inspect_refuses_what_ingest_refuses(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"tok": 99999999999, "layers": [[1, 2]]}\n')
    for work in (
        lambda path: inspect(path, UserMetadata(), tmp_path),
        lambda path: ingest(path, DataFolder(tmp_path), UserMetadata()),
    ):
        with pytest.raises(MalformedDump, match="99999999999"):
            work(tmp_path / "a.jsonl")


# Files in the data folder


def test_a_damaged_trace_is_mended_by_ingesting_its_dump_again(tmp_path):
    one = taken(tmp_path, npz(ARRAY))
    one.path.write_bytes(b"garbage")
    assert taken(tmp_path, npz(ARRAY)).is_new
    assert read_trace(one.path).metadata == one.metadata


def test_a_copied_trace_file_is_refused_by_its_name(tmp_path):
    one = taken(tmp_path, npz(ARRAY))
    data = DataFolder(tmp_path / "data")
    data.trace_file("copy").write_bytes(one.path.read_bytes())
    with pytest.raises(MalformedTrace, match="holds trace dump-"):
        read_stored(data, "copy")
    assert not taken(tmp_path, npz(ARRAY)).is_new


def test_the_source_of_a_linked_dump_is_where_the_link_is(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "real.jsonl").write_bytes(tok_layers_dump(ROUTES))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "sub" / "real.jsonl")
    source = ingest(tmp_path / "link.jsonl", DataFolder(tmp_path / "data"), UserMetadata()).metadata.source
    assert (Path(source.folder) / source.file).is_file()


def _second_rows_elsewhere(rows: pl.DataFrame) -> pl.DataFrame:
    moved = pl.when(pl.col("row_in_event") == 1).then(2).otherwise(pl.col("layer_id"))
    return rows.with_columns(moved.cast(pl.UInt16).alias("layer_id"))


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("layer_id", _second_rows_elsewhere, "within an event"),
        (
            "expert_ids",
            lambda rows: rows.with_columns(pl.col("expert_ids").arr.eval(pl.element() // 9)),
            "or one twice",
        ),
        (
            "step_id",
            lambda rows: rows.with_columns((pl.col("step_id") // 2).cast(pl.UInt32)),
            "steps, its metadata says",
        ),
    ],
)
def test_a_changed_canonical_file_is_refused_by_the_replayer(tmp_path, name, change, expected):
    prefill, decode = random_routes(5, 3, 16, 2, seed=1), random_routes(30, 3, 16, 2, seed=2)
    one = taken(tmp_path, route_csv_dump(prefill, decode, experts=16))
    table = pq.read_table(one.path)
    changed = change(pl.from_arrow(table)).to_arrow()[name]
    place = table.schema.get_field_index(name)
    table = table.set_column(place, table.schema.field(place), changed.cast(table.schema.field(place).type))
    stored = pq.read_metadata(one.path).metadata[METADATA_KEY]
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: stored}), tmp_path / "changed.parquet")
    with pytest.raises(MalformedTrace, match=expected):
        read_trace(tmp_path / "changed.parquet")


def test_every_flipped_byte_of_a_trace_is_read_or_one_line(tmp_path):
    content = taken(tmp_path, npz_dump(random_routes(12, 2, 16, 2))).path.read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        mutated = bytearray(content)
        mutated[generator.randrange(len(mutated))] ^= 1 << generator.randrange(8)
        (tmp_path / "x.parquet").write_bytes(mutated)
        try:
            read_trace(tmp_path / "x.parquet")
        except MalformedTrace as error:
            assert "x.parquet" in str(error)


# Numbers that do not fit


def test_sizes_whose_sums_would_wrap_are_refused():
    trace = make_trace([[[[0, 1]]], [[[1, 2]]]], num_experts=4)
    with pytest.raises(UnusableRequest, match="2\\^62 bytes"):
        list(
            simulate(
                prepare(trace),
                names=["lru"],
                scope="layer",
                semantics=["sequential"],
                capacities=[Capacity(experts=1)],
                expert_bytes=2**61,
            )
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--capacity-experts", "99999999999999999999"],
        ["--capacity", str(10**30)],
        ["--capacity-experts", "3", "--expert-bytes", str(10**30)],
        ["--capacity-experts", "3", "--order", "random", "--seed", "18446744073709551615"],
        ["--capacity-experts", "3", "--warm-fraction", "1e-99999999"],
        ["--capacity-experts", "3", "--policy", "static", "--fit", "first:1e-99999999"],
        ["--capacity-experts", "9" * 5000],
    ],
)
def test_arguments_that_fit_no_machine_are_one_short_line(tmp_path, capsys, arguments):
    path = taken(tmp_path, npz(ARRAY)).path
    try:
        status = replayer_cli.main(["simulate", str(path), *arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert len(error.splitlines()) == 1
    assert len(error) < 500


@pytest.mark.parametrize(
    "arguments",
    [["ingest", "."], ["ingest", "/"], ["inspect", ""], ["run", "--data", "~nosuchuser/x"], ["run", "--data", "a?b"]],
)
def test_paths_that_are_no_dumps_or_folders_are_one_line(tmp_path, capsys, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1


SQL = {
    "INTERVAL": "SELECT INTERVAL 1 DAY AS a",
    "UNION": "SELECT 1::UNION(a INT, b VARCHAR) AS a",
    "struct": "SELECT {'a': 1, 'b': [1, 2]} AS a",
    "map": "SELECT MAP {'a': 1} AS a",
    "blob": "SELECT 'x'::BLOB AS a",
    "nested": "SELECT [[1, 2], [3]] AS a",
    "dates": "SELECT [DATE '2020-01-01'] AS a",
    "nan": "SELECT 'nan'::DOUBLE AS a, 'inf'::DOUBLE AS b",
}


@pytest.fixture(scope="module")
def empty_warehouse(tmp_path_factory) -> Path:
    """A data folder with a warehouse without rows, for questions that need none."""
    from warehouse.build import build_warehouse

    folder = tmp_path_factory.mktemp("empty")
    build_warehouse(folder)
    return folder


@pytest.mark.parametrize(("sql", "form"), list(itertools.product(SQL, ["table", "csv", "json"])))
def test_results_of_any_type_are_printed_or_one_line(empty_warehouse, capsys, sql, form):
    status = cli.main(["query", SQL[sql], "--format", form, "--data", str(empty_warehouse)])
    captured = capsys.readouterr()
    if status == 0 and form == "json":
        json.loads(captured.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if sql == "struct" and form == "csv":
        assert '""b"": [1, 2]' in captured.out
    assert (status, captured.err) == (0, "") or (status == 1 and "CAST it to VARCHAR" in captured.err)
