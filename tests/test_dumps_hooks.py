"""Dumps of hook scripts and published research: what went in comes out, and each of their traps is refused by name.

Fixtures are synthetic, as documented or as the writing script reads; the strict JSONL is a published file too.
"""

import csv
import io
import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dumps import hook_arrays, hooks
from pipeline.dumps.blocks import Asked, DumpFolder, MalformedDump, RefusedDump
from pipeline.dumps.torch_file import Loaded
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.command_lines import expert_tier
from tests.raw_dumps import Routes, npy_bytes, random_routes
from tests.raw_hooks import (
    SEEDS,
    beyond_csv,
    exp_ids_dump,
    lines,
    routing_selection_dump,
    safetensors_bytes,
    shard_folder,
    strict_records,
)

TRACES = Path(__file__).parents[2] / "shared" / "traces"
EXPERTS, TOP_K, LAYERS = 16, 3, 3
PROMPT = random_routes(6, LAYERS, EXPERTS, TOP_K, seed=1)
AFTER = random_routes(20, LAYERS, EXPERTS, TOP_K, seed=2)


def ingested(folder: Path, content: bytes | dict[str, bytes], **said: object) -> Ingested:
    path = folder / "dump"
    if isinstance(content, dict):
        path.mkdir()
        for name, data in content.items():
            (path / name).write_bytes(data)
    else:
        path.write_bytes(content)
    return ingest(path, DataFolder(folder / "data"), UserMetadata(**said))


def refused(folder: Path, content: bytes | dict[str, bytes], **said: object) -> str:
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingested(folder, content, **said)
    assert not list((folder / "data").glob("traces/*.parquet"))
    message = str(caught.value)
    assert message.startswith(str(folder / "dump"))
    assert "\n" not in message
    return message


def rows_of(one: Ingested) -> pl.DataFrame:
    return pl.read_parquet(one.path).with_columns(pl.col("phase", "pass_kind").cast(pl.String))


def layer_of(rows: pl.DataFrame, layer: int) -> list[list[int]]:
    return [list(ids) for ids in rows.filter(pl.col("layer_id") == layer)["expert_ids"]]


def outcome(one: Ingested, name: str) -> str | None:
    return next((check.outcome for check in one.metadata.checks if check.name == name), None)


def assert_routes(one: Ingested, routes: Routes, layers: list[int] | None = None) -> pl.DataFrame:
    rows = rows_of(one)
    numbers = layers or list(range(len(routes[0])))
    assert one.metadata.moe_layer_ids == numbers
    for place, number in enumerate(numbers):
        assert layer_of(rows, number) == [token[place] for token in routes]
    return rows


# routing_selection records


def test_routing_selections_as_their_script_writes_them(tmp_path):
    one = ingested(tmp_path, routing_selection_dump(PROMPT, AFTER, experts=EXPERTS, top_k=TOP_K))
    rows = assert_routes(one, PROMPT + AFTER)
    assert one.metadata.counts.steps == 1 + len(AFTER)
    assert one.metadata.counts.events == LAYERS * (1 + len(AFTER))
    assert rows.filter(pl.col("phase") == "prefill")["step_id"].unique().to_list() == [0]
    first = rows.filter(pl.col("layer_id") == 1)
    assert first["token_position"].to_list() == list(range(26))
    assert list(first["router_weights"][9]) == pytest.approx([1 / 2, 1 / 3, 1 / 4], abs=1e-3)
    metadata = one.metadata
    assert (metadata.model, metadata.engine) == ("ibm-granite/granite-3.1-1b-a400m", "transformers 5.0.0")
    assert (metadata.num_experts_source, metadata.top_k_model, metadata.layer_base) == ("declared", TOP_K, "recorded")


def test_routing_selections_in_small_batches_give_the_same_trace(tmp_path, monkeypatch):
    content = routing_selection_dump(PROMPT, AFTER, experts=EXPERTS, top_k=TOP_K)
    whole = rows_of(ingested(tmp_path, content))
    monkeypatch.setattr("pipeline.dumps.jsonl.BLOCK_BYTES", 4096)
    monkeypatch.setattr("pipeline.dumps.hooks.ROWS_PER_BLOCK", 20)
    (tmp_path / "again").mkdir()
    assert rows_of(ingested(tmp_path / "again", content)).equals(whole)


def test_routing_selections_without_k_take_it_from_the_first_record(tmp_path):
    content = routing_selection_dump([], AFTER, experts=EXPERTS, top_k=TOP_K, experts_per_token=None, num_experts=None)
    one = ingested(tmp_path, content)
    assert (one.metadata.top_k_observed, one.metadata.num_experts_source) == (TOP_K, "observed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace(b'"format_version": 1', b'"format_version": 2'), "of version 2; wanted version 1"),
        (lambda text: b"".join(text.splitlines(True)[1:]), "no metadata record"),
        (lambda text: text.splitlines(True)[0], "a metadata line and no route"),
        (lambda text: text[:-40], "line 79"),
        (lambda text: text.replace(b'"phase": "generated"', b'"phase": "draft"', 1), "line 20: phase is 'draft'"),
        (lambda text: text.replace(b'"layer": 1', b'"layer": -1', 1), "layer is '-1', wanted a whole number below"),
        (lambda text: text.replace(b'"layer": 1', b'"layer": 1.5', 1), "layer is '1.5'"),
        (lambda text: text.replace(b"routing_selection", b"routing_counts", 1), "wanted a record of record_type"),
        (lambda text: text + text.splitlines(True)[0], "wanted a record of record_type"),
        (lambda text: text + text.splitlines(True)[1], "after generated ones"),
        (lambda text: _swapped(text, 2, 8), "wanted the prompt layer by layer"),
        (lambda text: text.replace(b'"experts_per_token": 3', b'"experts_per_token": 4'), "has 3 ids, wanted 4"),
        (lambda text: text.replace(b"0.25]", b"0.25, 0.1]", 1), "wanted 3 numbers or none"),
    ],
)
def test_routing_selections_that_are_wrong(tmp_path, change, words):
    content = routing_selection_dump(PROMPT, AFTER, experts=EXPERTS, top_k=TOP_K)
    assert words in refused(tmp_path, change(content))


def test_a_weight_that_is_nan_is_unknown(tmp_path):
    content = routing_selection_dump(PROMPT, AFTER, experts=EXPERTS, top_k=TOP_K)
    one = ingested(tmp_path, content.replace(b"0.25]", b"NaN]", 1))
    assert list(rows_of(one)["router_weights"][0]) == pytest.approx([0.5, 1 / 3, None], abs=1e-3)


def _swapped(text: bytes, first: int, second: int) -> bytes:
    records = text.splitlines(True)
    records[first], records[second] = records[second], records[first]
    return b"".join(records)


# Strict JSONL 1.0.0


def test_strict_records_keep_forward_position_phase_and_weights(tmp_path):
    numbers = [0, 2, 5]
    records = strict_records(PROMPT, AFTER, layers=numbers)
    records += strict_records(AFTER[:4], PROMPT, layers=numbers, request="req-002")
    one = ingested(tmp_path, lines(records))
    rows = rows_of(one)
    assert one.metadata.counts.steps == 1 + 20 + 1 + 6
    assert one.metadata.counts.requests == 2
    for request, routes in ((0, PROMPT + AFTER), (1, AFTER[:4] + PROMPT)):
        own = rows.filter(pl.col("request_id") == request)
        for place, number in enumerate(numbers):
            assert layer_of(own, number) == [token[place] for token in routes]
        assert own.filter(pl.col("layer_id") == 2)["token_position"].to_list() == list(range(len(routes)))
    decode = rows.filter(pl.col("phase") == "decode")
    assert list(decode["router_weights"][0]) == pytest.approx([1 / 2, 1 / 3, 1 / 4], abs=1e-3)
    assert rows.filter(pl.col("phase") == "prefill")["router_weights"].null_count() == 10 * 3
    assert outcome(one, "capture left the tokens alone") == "warn"


def test_strict_records_of_a_forward_token_by_token_are_put_together_by_layer(tmp_path):
    records = strict_records(PROMPT, AFTER, layers=[0, 1, 2])
    for record in records:
        record["hook_order"] = record["forward_id"]
    records[:18] = sorted(records[:18], key=lambda record: (record["token_index"], record["layer_id"]))
    one = ingested(tmp_path, lines(records))
    assert_routes(one, PROMPT + AFTER)
    assert one.metadata.counts.events == 3 * 21


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (0, {"schema_version": "2.0.0"}, "schema_version '2.0.0'"),
        (30, {"schema_version": "2.0.0"}, "line 31: schema_version is '2.0.0'"),
        (30, {"phase": "verify"}, "line 31: phase is 'verify'"),
        (30, {"layer_id": "1"}, "line 31: layer_id is '1'"),
        (30, {"token_index": -1}, "token_index is '-1'"),
        (30, {"selected_expert_ids": [1, 2]}, "line 31: selected_expert_ids has 2 ids, wanted 3"),
        (30, {"selected_expert_ids": None}, "wanted a list of whole numbers"),
        (30, {"selected_expert_weights": [0.5]}, "wanted 3 numbers or none"),
        (30, {"forward_id": 1}, "in one turn"),
        (30, {"hook_order": 0}, "hook_order 0 after"),
        (30, {"selected_expert_ids": "a\nb\nc"}, "wanted a list of whole numbers"),
        (30, {"request_id": 7}, "request_id is '7', wanted a text"),
        (30, {"turn_index": -1}, "turn_index is '-1'"),
    ],
)
def test_strict_records_that_are_wrong(tmp_path, number, change, words):
    records = strict_records(PROMPT, AFTER, layers=[0, 1, 2])
    records[number] |= change
    assert words in refused(tmp_path, lines(records))


def test_a_request_whose_name_is_no_text(tmp_path):
    content = lines(strict_records(PROMPT, AFTER, layers=[0, 1, 2]))
    first, rest = content.split(b"\n", 1)
    assert "no UTF-8" in refused(tmp_path, first + b"\n" + rest.replace(b"req-001", b"req-\xff01", 1))


@pytest.mark.skipif(not TRACES.is_dir(), reason="published traces are not here")
def test_the_published_strict_file_and_the_published_counts(tmp_path):
    one = ingested(tmp_path, (TRACES / "expertflow-strict.jsonl").read_bytes())
    assert (one.metadata.counts.rows, one.metadata.counts.steps, one.metadata.top_k_observed) == (8, 8, 8)
    assert one.metadata.counts.rows_by_phase["prefill"] == 8
    assert layer_of(rows_of(one), 0)[0] == [102, 79, 114, 81, 58, 83, 54, 46]
    (tmp_path / "counts").mkdir()
    content = (TRACES / "aggregate-olmoe-routed-sets.jsonl.gz").read_bytes()
    assert "counts per layer and expert" in refused(tmp_path / "counts", content)


# exp_ids of whole sequences


def test_exp_ids_are_read_along_the_axis_that_holds_different_experts(tmp_path):
    sequences = [random_routes(length, 12, 8, 2, seed=length) for length in (40, 25, 40)]
    one = ingested(tmp_path, exp_ids_dump(sequences))
    rows = rows_of(one)
    assert (one.metadata.top_k_observed, one.metadata.counts.requests, one.metadata.counts.steps) == (2, 3, 105)
    for request, routes in enumerate(sequences):
        own = rows.filter(pl.col("request_id") == request)
        for layer in range(12):
            assert layer_of(own, layer) == [token[layer] for token in routes]
        assert own.filter(pl.col("layer_id") == 0)["token_position"].to_list() == list(range(len(routes)))


def test_exp_ids_the_other_way_round_need_the_users_word(tmp_path):
    sequences = [random_routes(40, 12, 8, 2)]
    content = exp_ids_dump(sequences, layers_first=True)
    assert "say --meta top_k_model=2" in refused(tmp_path, content)
    assert_routes(ingested(tmp_path, content, top_k_model=2), sequences[0])


def test_exp_ids_whose_axes_cannot_be_told_apart(tmp_path):
    # Two layers and k = 2, and ids that never repeat along either axis.
    routes = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert "either axis may be k; say --meta top_k_model=K" in refused(tmp_path, exp_ids_dump([routes]))
    routes = [[[0, 1], [2, 3], [4, 5]], [[4, 5], [6, 7], [1, 2]]]
    assert "either axis may be k" in refused(tmp_path, exp_ids_dump([routes]))
    assert "neither axis is top_k_model = 5" in refused(tmp_path, exp_ids_dump([routes]), top_k_model=5)
    assert_routes(ingested(tmp_path, exp_ids_dump([routes]), top_k_model=2), routes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"input_ids":[1,2],"exp_ids":[[[1,2],[3]],[[1,2],[3,4]]]}\n', "exp_ids is ragged"),
        (b'{"input_ids":[1,2],"exp_ids":[[1,2],[3,4]]}\n', "wanted whole numbers [tokens, k, layers]"),
        (b'{"input_ids":[1,2],"exp_ids":[[[0.5,2]],[[1,2]]]}\n', "wanted whole numbers [tokens, k, layers]"),
        (b'{"input_ids":[1,2],"exp_ids":[[[1,1],[2,2]]]}\n', "2 input_ids, but exp_ids of 1 tokens"),
        (b'{"input_ids":[1],"exp_ids":[[[1,1],[1,1]]]}\n', "ids repeat along both axes"),
        (b'{"input_ids":[1],"exp_ids":[[[1,3,1]],[[2,2,2]]]}\n', "1 input_ids, but exp_ids of 2 tokens"),
    ],
)
def test_exp_ids_that_are_wrong(tmp_path, content, words):
    assert words in refused(tmp_path, content)


def test_exp_ids_of_two_models_or_truncated(tmp_path):
    one, other = exp_ids_dump([random_routes(40, 12, 8, 2)]), exp_ids_dump([random_routes(40, 11, 8, 2)])
    assert "line 2: exp_ids is shaped [40, 2, 11]" in refused(tmp_path, one + other)
    message = refused(tmp_path, (one + one)[:-50])
    assert "line 2" in message
    assert "truncated" in message


# moe-beyond CSV


@pytest.mark.parametrize("order", ["batch", "layer", "token"])
def test_beyond_rows_are_put_together_by_their_place_whatever_the_token_reads(tmp_path, order):
    routes = random_routes(57, LAYERS, EXPERTS, TOP_K, seed=5)
    one = ingested(tmp_path, beyond_csv(routes, order=order))
    rows = assert_routes(one, routes, [1, 2, 3])
    assert rows.filter(pl.col("layer_id") == 2)["token_position"].to_list() == list(range(57))
    assert (one.metadata.pass_boundaries, one.metadata.counts.steps) == ("assumed_per_token", 57)
    assert sorted(path.name for path in one.path.parent.iterdir()) == [".lock", one.path.name]


def test_beyond_in_small_blocks_gives_the_same_trace(tmp_path, monkeypatch):
    content = beyond_csv(random_routes(200, LAYERS, EXPERTS, TOP_K), order="layer")
    whole = rows_of(ingested(tmp_path, content))
    monkeypatch.setattr("pipeline.dumps.hooks.BLOCK_BYTES", 700)
    monkeypatch.setattr("pipeline.dumps.hooks.ROWS_PER_BLOCK", 20)
    (tmp_path / "again").mkdir()
    assert rows_of(ingested(tmp_path / "again", content)).equals(whole)


@given(st.lists(st.text(max_size=4).filter(lambda text: "\0" not in text), min_size=3, max_size=12))
@settings(max_examples=25, deadline=None)
def test_beyond_any_token_is_a_token(tmp_path_factory, tokens):
    text = io.StringIO()
    text.write("Layer ID,Batch Number,Token,Activated Expert IDs\n")
    writer = csv.writer(text, lineterminator="\r\n")
    for place, token in enumerate(tokens):
        for layer in (1, 2):
            writer.writerow([layer, 0, token, f"[{place % 9}, {10 + (place * layer) % 5}]"])
    try:
        content = text.getvalue().encode()
    except UnicodeEncodeError:
        return
    one = ingested(tmp_path_factory.mktemp("beyond"), content)
    assert one.metadata.counts.rows == 2 * len(tokens)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-6], "the last line: the dump is truncated"),
        (lambda text: b"\n".join(text.splitlines()[:-1]) + b"\n", "layer 3 has 3 tokens, layer 1 4"),
        (lambda text: text.replace(b"\n2,0,", b"\n2,1,", 1), "of batches [0, 1]"),
        (lambda text: text.replace(b"\n2,0,", b"\ntwo,0,", 1), "Layer ID is 'two'"),
        (lambda text: text.replace(b"\n2,0,", b"\n-2,0,", 1), "Layer ID is '-2'"),
        (lambda text: text.replace(b'"[', b'"(', 1).replace(b']"', b')"', 1), "wanted a list of whole numbers"),
        (lambda text: text.replace(b']"', b', 15]"', 1), "ids"),
        (lambda text: text.replace(b']"', b'.5]"', 1), "wanted a list of whole numbers"),
        (lambda text: text.splitlines(True)[0], "a header and no route"),
    ],
)
def test_beyond_that_is_wrong(tmp_path, change, words):
    assert words in refused(tmp_path, change(beyond_csv(random_routes(4, LAYERS, EXPERTS, TOP_K))))


def test_a_predictors_output_in_the_same_shape_is_refused(tmp_path):
    content = b"Layer ID,Batch Number,Token,Activated Expert IDs,Predicted Expert IDs\n" + b'1,0,a,"[1, 2]","[1, 3]"\n'
    assert "a predictor's output" in refused(tmp_path, content)
    content = b"Layer ID,Batch Number,Token,Predicted Expert IDs\n" + b'1,0,a,"[1, 2]"\n'
    assert "a predictor's output" in refused(tmp_path, content)


def test_dense_scores_that_all_say_layer_0_are_refused(tmp_path):
    names = ",".join(f"expert_{expert}" for expert in range(64))
    content = f"layer_id,token_id,{names}\n" + "0,7," + ",".join(["0.1"] * 64) + "\n"
    assert "layer_id 0 in every file" in refused(tmp_path, content.encode())


# Parquet of a routing collector


def parquet_dump(calls: list[tuple[str, int, int, list[int]]], *, scores: bool = False, **change: pa.Array) -> bytes:
    """Rows (context, layer, position, ids) as the KTransformers collector writes them, 64 rows a row group."""
    rows = len(calls)
    ids = [call[3] for call in calls]
    dense = [[0.9 - row.index(expert) / 8 if expert in row else 0.0 for expert in range(EXPERTS)] for row in ids]
    columns = {
        "token_id": pa.array(range(rows), pa.int64()),
        "context_id": pa.array([call[0] for call in calls], pa.string()),
        "layer_id": pa.array([call[1] for call in calls], pa.int32()),
        "token_position": pa.array([call[2] for call in calls], pa.int32()),
        "expert_ids": pa.array(ids, pa.list_(pa.int32())),
        "expert_weights": pa.array([[1 / (n + 2) for n in range(len(row))] for row in ids], pa.list_(pa.float32())),
        "token_text": pa.nulls(rows, pa.string()),
        "timestamp": pa.array(range(rows), pa.int64()),
        "token_category": pa.array(["user"] * rows, pa.string()),
        "expert_scores_all": pa.array(dense if scores else [None] * rows, pa.list_(pa.float32())).cast(
            pa.list_(pa.float16())
        ),
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns | change), buffer, compression="zstd", row_group_size=64)
    return buffer.getvalue()


def calls_of(context: str, prompt: Routes, after: Routes, *, inside: bool = False) -> list:
    """A call per layer for the prompt, then one per layer and token; positions of the sequence, or inside the call."""
    calls = [(context, layer, place, token[layer]) for layer in range(LAYERS) for place, token in enumerate(prompt)]
    for offset, token in enumerate(after):
        calls += [(context, layer, 0 if inside else len(prompt) + offset, token[layer]) for layer in range(LAYERS)]
    return calls


def test_parquet_passes_end_where_layer_or_context_do(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.hooks.ROWS_PER_BLOCK", 30)
    calls = calls_of("a", PROMPT, AFTER) + calls_of("b", AFTER[:3], PROMPT)
    one = ingested(tmp_path, parquet_dump(calls, scores=True))
    rows = rows_of(one)
    assert (one.metadata.counts.steps, one.metadata.counts.requests) == (1 + 20 + 1 + 6, 2)
    for request, routes in enumerate((PROMPT + AFTER, AFTER[:3] + PROMPT)):
        own = rows.filter(pl.col("request_id") == request)
        assert layer_of(own, 2) == [token[2] for token in routes]
        assert own.filter(pl.col("layer_id") == 2)["token_position"].to_list() == list(range(len(routes)))
    assert rows["phase"].unique().to_list() == ["unknown"]
    assert list(rows["router_weights"][5]) == pytest.approx([1 / 2, 1 / 3, 1 / 4], abs=1e-3)
    assert outcome(one, "ids are the largest scores") == "ok"
    assert (one.metadata.pass_boundaries, one.metadata.layer_base) == ("recorded", "recorded")


def test_parquet_positions_inside_a_call_are_no_positions(tmp_path):
    one = ingested(tmp_path, parquet_dump(calls_of("a", PROMPT, AFTER, inside=True)))
    rows = assert_routes(one, PROMPT + AFTER)
    assert rows["token_position"].null_count() == len(rows)
    assert outcome(one, "positions of the sequence") == "warn"
    assert outcome(one, "ids are the largest scores") is None
    assert one.metadata.counts.steps == 21


def test_parquet_of_one_layer_has_a_step_per_row(tmp_path):
    calls = [call for call in calls_of("a", PROMPT, AFTER) if call[1] == 0]
    one = ingested(tmp_path, parquet_dump(calls))
    assert (one.metadata.counts.steps, one.metadata.pass_boundaries) == (26, "assumed_per_token")


def test_parquet_ids_that_are_not_the_largest_scores_are_named(tmp_path):
    shifted = pa.array([[(n + 1) / 100 for n in range(EXPERTS)]] * 78, pa.list_(pa.float16()))
    one = ingested(tmp_path, parquet_dump(calls_of("a", PROMPT, AFTER), expert_scores_all=shifted))
    assert outcome(one, "ids are the largest scores") == "warn"


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("layer_id", pa.array([None, *[0] * 77], pa.int32()), "row 0: layer_id is null"),
        ("token_position", pa.array([*[0] * 70, -1, *[0] * 7], pa.int32()), "row 70: token_position is -1"),
        ("layer_id", pa.array([0.5] * 78), "column layer_id is 'double'"),
        ("expert_ids", pa.array([1] * 78), "column expert_ids is 'int64'"),
        ("expert_ids", pa.array([[1, 2, 3]] * 77 + [[1, 2]], pa.list_(pa.int32())), "row 77: 2 values in expert_ids"),
        ("expert_ids", pa.array([[1, 2, 2**40]] * 78, pa.list_(pa.int64())), "an id beyond 31 bits"),
        ("expert_weights", pa.array([[0.1]] * 78, pa.list_(pa.float32())), "1 values in expert_weights"),
    ],
)
def test_parquet_that_is_wrong(tmp_path, column, value, words):
    assert words in refused(tmp_path, parquet_dump(calls_of("a", PROMPT, AFTER), **{column: value}))


def test_parquet_of_anything_else_is_not_claimed(tmp_path):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"layer_id": [1], "expert_ids": [[1]], "token_position": [1]}), buffer)
    assert "no known layout" in refused(tmp_path, buffer.getvalue())


# Shards with a manifest

SHARD_SEQUENCES = [random_routes(length, LAYERS, EXPERTS, TOP_K, seed=40 + length) for length in (9, 14, 11, 20, 7)]


@pytest.mark.parametrize("decode", [False, True])
def test_shards_give_back_their_sequences(tmp_path, decode):
    one = ingested(tmp_path, shard_folder(SHARD_SEQUENCES, experts=EXPERTS, decode=decode))
    rows = rows_of(one)
    assert one.metadata.counts.requests == 5
    for request, routes in enumerate(SHARD_SEQUENCES):
        own = rows.filter(pl.col("request_id") == request)
        for layer in range(LAYERS):
            assert layer_of(own, layer) == [token[layer] for token in routes]
        places = own.filter(pl.col("layer_id") == 0)["token_position"].to_list()
        assert places == ([None] * len(routes) if decode else list(range(len(routes))))
    assert rows["phase"].unique().to_list() == ["decode" if decode else "prefill"]
    assert list(rows["router_weights"][3]) == [0.5, 0.25, 0.125]
    padding = (14 - 9) + (20 - 11)
    assert one.metadata.counts.dropped_rows == {"padding beyond sequence_lengths": padding * LAYERS}
    metadata = one.metadata
    assert (metadata.model, metadata.layer_base) == ("allenai/OLMoE-1B-7B-0125", "declared")
    assert (metadata.weight_kind, outcome(one, "shards complete")) == ("softmax", "ok")
    assert metadata.pass_boundaries == ("recorded" if decode else "assumed_per_token")


def test_a_missing_shard_is_named(tmp_path):
    files = shard_folder(SHARD_SEQUENCES, experts=EXPERTS)
    del files["routes-00001.safetensors"]
    assert "'routes-00001.safetensors' is missing, shard 1 of the manifest" in refused(tmp_path, files)


def test_a_damaged_shard_is_found_by_its_checksum(tmp_path):
    files = shard_folder(SHARD_SEQUENCES, experts=EXPERTS)
    damaged = bytearray(files["routes-00001.safetensors"])
    damaged[-1] ^= 1
    files["routes-00001.safetensors"] = bytes(damaged)
    assert "routes-00001.safetensors: its SHA-256 is not the one of the manifest" in refused(tmp_path, files)


def _manifest(**change: object) -> dict[str, bytes]:
    files = shard_folder(SHARD_SEQUENCES, experts=EXPERTS)
    manifest = json.loads(files["manifest.json"])
    for key, value in change.items():
        where = manifest
        *path, last = key.split("__")
        for step in path:
            where = where[int(step) if step.isdigit() else step]
        where[last] = value
    files["manifest.json"] = json.dumps(manifest, indent=1).encode()
    return files


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "in_progress"}, "status is 'in_progress', wanted 'complete'"),
        ({"model__num_layers": 7}, "the manifest says num_layers = 7"),
        ({"model__top_k": 2}, "the manifest says top_k = 2"),
        ({"model__top_k": -2}, "wanted a positive whole number"),
        ({"shards__1__start_sample": 3}, "shard 1 starts at sample 3, wanted 2"),
        ({"shards__1__num_samples": 1, "shards__2__start_sample": 3}, "wanted [1, 3, 'tokens', 3]"),
        ({"shards__1__tensor_file": "../../etc/passwd"}, "'../../etc/passwd' is missing"),
        ({"shards__1__tensor_sha256": None}, "wanted tensor_file, tensor_sha256 and num_samples"),
    ],
)
def test_a_manifest_that_is_wrong(tmp_path, change, words):
    assert words in refused(tmp_path, _manifest(**change))


def test_a_shard_beside_the_manifest_is_named(tmp_path):
    files = shard_folder(SHARD_SEQUENCES, experts=EXPERTS)
    files["routes-00003.safetensors"] = files["routes-00002.safetensors"]
    assert "routes-00003.safetensors: a shard that is not in the manifest" in refused(tmp_path, files)


def test_shards_without_a_manifest_or_alone(tmp_path):
    files = shard_folder(SHARD_SEQUENCES, experts=EXPERTS)
    only = {name: content for name, content in files.items() if name.startswith("routes")}
    assert "without their manifest.json" in refused(tmp_path, only)
    (tmp_path / "alone").mkdir()
    alone = refused(tmp_path / "alone", files["routes-00000.safetensors"])
    assert "one file of a dump of several" in alone
    (tmp_path / "cut").mkdir()
    files["manifest.json"] = files["manifest.json"][:-30]
    assert "is the manifest truncated" in refused(tmp_path / "cut", files)


def test_shards_whose_mask_contradicts_the_lengths(tmp_path):
    import hashlib

    shape = (1, LAYERS, 4, TOP_K)
    ids = [expert for _ in range(LAYERS * 4) for expert in (1, 2, 3)]
    shard = safetensors_bytes(
        {
            "topk_indices": ("I16", shape, ids),
            "topk_probabilities": ("F16", shape, [0.25] * len(ids)),
            "sequence_lengths": ("I32", (1,), [3]),
            "attention_mask": ("BOOL", (1, 4), [True] * 4),
        }
    )
    files = shard_folder([SHARD_SEQUENCES[0]], experts=EXPERTS)
    manifest = json.loads(files["manifest.json"])
    manifest["shards"][0]["tensor_sha256"] = hashlib.sha256(shard).hexdigest()
    files |= {"routes-00000.safetensors": shard, "manifest.json": json.dumps(manifest, indent=1).encode()}
    assert "is not what sequence_lengths say" in refused(tmp_path, files)


@pytest.mark.parametrize("value", [-1.0, 1.5, float("nan")])
def test_a_shard_with_what_is_no_probability_is_located(tmp_path, value):
    import hashlib

    shape = (1, LAYERS, 4, TOP_K)
    ids = [expert for _ in range(LAYERS * 4) for expert in (1, 2, 3)]
    probabilities = [0.25] * len(ids)
    probabilities[(1 * 4 + 2) * TOP_K] = value
    shard = safetensors_bytes(
        {
            "topk_indices": ("I16", shape, ids),
            "topk_probabilities": ("F16", shape, probabilities),
            "sequence_lengths": ("I32", (1,), [4]),
        }
    )
    files = shard_folder([SHARD_SEQUENCES[0]], experts=EXPERTS)
    manifest = json.loads(files["manifest.json"])
    manifest["shards"][0]["tensor_sha256"] = hashlib.sha256(shard).hexdigest()
    files |= {"routes-00000.safetensors": shard, "manifest.json": json.dumps(manifest, indent=1).encode()}
    assert f"sequence 0, token 2, layer 1: topk_probabilities holds {value:.4g}" in refused(tmp_path, files)


def test_a_shard_under_two_names_is_refused(tmp_path):
    files = shard_folder(SHARD_SEQUENCES[:2], experts=EXPERTS, shard_size=2)
    manifest = json.loads(files["manifest.json"])
    copy = manifest["shards"][0] | {"tensor_file": "routes-00001.safetensors"}
    copy.pop("start_sample", None)
    manifest["shards"].append(copy)
    files |= {
        "routes-00001.safetensors": files["routes-00000.safetensors"],
        "manifest.json": json.dumps(manifest, indent=1).encode(),
    }
    assert "shard 1 ('routes-00001.safetensors') has the SHA-256 of routes-00000.safetensors" in refused(
        tmp_path, files
    )


# Torch files per layer (FLAME-MoE) and per pass (MoE-CAP): the trees, and one of each as files


def layer_trees(routes: Routes, positions: list[int] | None = None) -> dict[str, dict]:
    tokens = len(routes)
    return {
        f"layer_{layer + 2}.pt": {
            "samples": np.arange(tokens),
            "scores": np.array([[1 / (rank + 2) for rank in range(TOP_K)]] * tokens, dtype="f4"),
            "indices": np.array([token[layer] for token in routes]),
            "token_position": np.array(positions or range(tokens)),
        }
        for layer in range(len(routes[0]))
    }


def torch_file(tree: object) -> bytes:
    torch = pytest.importorskip("torch")

    def tensors(value: object) -> object:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value.copy())
        if isinstance(value, dict):
            return {key: tensors(inner) for key, inner in value.items()}
        return [tensors(inner) for inner in value] if isinstance(value, list) else value

    buffer = io.BytesIO()
    torch.save(tensors(tree), buffer)
    return buffer.getvalue()


def parsed_layers(folder: Path, trees: dict[str, dict], **said: object):
    for name in trees:
        (folder / name).write_bytes(b"x")
    files = [Loaded(folder / name, tree) for name, tree in sorted(trees.items())]
    return hook_arrays.parse_layer_files(files, DumpFolder(folder), Asked(UserMetadata(**said), folder))


def test_a_folder_of_torch_files_per_layer(tmp_path):
    routes = random_routes(40, LAYERS, EXPERTS, TOP_K)
    one = ingested(tmp_path, {name: torch_file(tree) for name, tree in layer_trees(routes).items()})
    rows = assert_routes(one, routes, [2, 3, 4])
    assert rows.filter(pl.col("layer_id") == 3)["token_position"].to_list() == list(range(40))
    assert list(rows["router_weights"][5]) == pytest.approx([1 / 2, 1 / 3, 1 / 4], abs=1e-3)
    assert (one.metadata.layer_base, one.metadata.pass_boundaries) == ("recorded", "assumed_per_token")


def test_copied_layers_of_a_folder_are_refused(tmp_path):
    trees = layer_trees(random_routes(40, LAYERS, EXPERTS, TOP_K))
    trees["layer_5.pt"] = trees["layer_2.pt"]
    parsed = parsed_layers(tmp_path, trees)
    from pipeline.canonical import Canonical

    rows = Canonical(tmp_path, parsed, UserMetadata())
    for block in rows.blocks():
        rows.number(block)
    with pytest.raises(MalformedDump, match=r"layers \[2, 5\] are equal over 40 rows: one is a copy"):
        rows.metadata((tmp_path, "0" * 64), "x", None, 1)


def test_files_per_layer_that_do_not_belong_together(tmp_path):
    routes = random_routes(40, LAYERS, EXPERTS, TOP_K)
    trees = layer_trees(routes)
    with pytest.raises(MalformedDump, match=r"layers \[3\] are missing between 2 and"):
        parsed_layers(tmp_path, {name: tree for name, tree in trees.items() if name != "layer_3.pt"})
    parsed = parsed_layers(
        tmp_path, {name: tree for name, tree in trees.items() if name != "layer_3.pt"}, moe_layer_ids=[2, 4]
    )
    assert {int(number) for block in parsed.blocks for number in block.layer} == {2, 4}
    short = trees | {"layer_4.pt": {key: value[:-1] for key, value in trees["layer_4.pt"].items()}}
    with pytest.raises(MalformedDump, match="rows of the layers belong together by their place"):
        parsed_layers(tmp_path, short)
    moved = trees | {"layer_4.pt": trees["layer_4.pt"] | {"token_position": np.arange(40)[::-1]}}
    with pytest.raises(MalformedDump, match="row 0: token_position 39"):
        parsed_layers(tmp_path, moved)
    with pytest.raises(RefusedDump, match="do not differ in one number"):
        parsed_layers(tmp_path, {"a.pt": trees["layer_2.pt"], "b.pt": trees["layer_3.pt"]})
    with pytest.raises(MalformedDump, match=r"wanted whole numbers \[tokens, k\]"):
        parsed_layers(tmp_path, {"layer_2.pt": trees["layer_2.pt"] | {"indices": np.zeros(3)}})


def test_positions_of_a_batch_side_by_side_are_left_unknown(tmp_path):
    trees = layer_trees(random_routes(40, LAYERS, EXPERTS, TOP_K), [place // 2 for place in range(40)])
    parsed = parsed_layers(tmp_path, trees)
    assert all(block.position is None for block in parsed.blocks)
    assert [check.outcome for check in parsed.checks] == ["warn"]


def pass_records(passes: list[Routes], *, padded: int = 2, width: int = 5, dense_layer: bool = True) -> list[dict]:
    """MoE-CAP's records: layer 0 is dense, so −1 throughout; rows from num_tokens on and columns from k on are −1."""
    records = []
    for number, routes in enumerate(passes):
        layers = len(routes[0]) + dense_layer
        ids = np.full((layers, len(routes) + padded, width), -1, dtype=np.int32)
        for token, row in enumerate(routes):
            for layer, chosen in enumerate(row):
                ids[layer + dense_layer, token, : len(chosen)] = chosen
        records.append({"forward_pass_id": 7 + number, "rank": 0, "topk_ids": ids, "num_tokens": len(routes)})
    return records


def parsed_records(tree: object):
    return hook_arrays.parse_pass_records(Loaded(Path("a.pt"), tree), Asked(UserMetadata(), Path()))


def test_pass_records_are_passes_without_their_padding():
    passes = [PROMPT, *[[token] for token in AFTER]]
    parsed = parsed_records(pass_records(passes))
    blocks = list(parsed.blocks)
    for routes, block in zip(passes, blocks, strict=True):
        assert block.layer.tolist() == [layer for layer in (1, 2, 3) for _ in routes]
        assert block.expert_ids.tolist() == [token[layer] for layer in range(3) for token in routes]
    assert [int(block.step[0]) for block in blocks] == list(range(21))
    assert parsed.dropped_rows == {"padding beyond num_tokens": 21 * 2 * 4, "layer without routes, all −1": 26}
    assert (parsed.top_k, parsed.hidden_layers, parsed.layers_are_ordinals) == (TOP_K, 4, False)
    assert parsed_records(pass_records(passes, dense_layer=False)).layers_are_ordinals


def test_pass_records_that_are_wrong():
    def changed(number: int, **change: object) -> list[dict]:
        records = pass_records([PROMPT, AFTER[:1], AFTER[1:2]])
        return [record | (change if place == number else {}) for place, record in enumerate(records)]

    assert hook_arrays.TREE_LAYOUTS[1].claims({"records": changed(0)})
    assert hook_arrays.TREE_LAYOUTS[1].claims(changed(0)[0])
    assert not hook_arrays.TREE_LAYOUTS[1].claims([{"forward_pass_id": 1, "topk_ids_of_layer": 2}])
    holes = pass_records([PROMPT])[0]["topk_ids"]
    holes[2, 3] = -1
    for tree, error, words in (
        (changed(1, rank=1), RefusedDump, "records of ranks 0, 1"),
        (changed(1, forward_pass_id=7), MalformedDump, "forward_pass_id 7 after 7"),
        (changed(1, num_tokens=9), MalformedDump, "num_tokens = 9 of 3 rows"),
        (changed(1, topk_ids=np.zeros((2, 3))), MalformedDump, "wanted whole numbers"),
        (changed(1, topk_ids=np.zeros((2, 3, 5), int)), MalformedDump, "wanted [4, 'tokens', 5]"),
        (changed(0, topk_ids=holes), MalformedDump, "layer 2, row 3: ids [-1, -1, -1]"),
        ([changed(0)[0] | {"topk_ids": np.full((4, 8, 5), -1)}], MalformedDump, "nothing was captured"),
    ):
        with pytest.raises(error) as caught:
            list(parsed_records(tree).blocks)
        assert words in str(caught.value)


# What is no trace, and damage


def test_arrays_of_expert_tracers_are_refused(tmp_path):
    content = npy_bytes((2, 3, 8), "<f4", b"\0" * 192)
    assert "a bare npy array" in refused(tmp_path, content)


LOOK_ALIKES = [
    {"record_type": "metadata", "format": "something.else", "format_version": 1},
    {"schema_version": "1.0.0", "request_id": "a", "phase": "prefill"},
    {"input_ids": [1, 2], "predicted_token_ids": [1, 2]},
    {"exp_ids": 3, "input_ids": [1]},
    {"event": "routing_selection", "model": "gpt"},
]


@pytest.mark.parametrize("record", LOOK_ALIKES)
def test_look_alikes_are_not_claimed(tmp_path, record):
    assert "no known layout" in refused(tmp_path, lines([record]))


def test_the_command_line_says_it_in_one_line(tmp_path, capsys):
    (tmp_path / "a.csv").write_bytes(beyond_csv(random_routes(4, LAYERS, EXPERTS, TOP_K))[:-6])
    status, _, error = expert_tier(capsys, "ingest", tmp_path / "a.csv", "--data", tmp_path / "data")
    assert status == 1
    assert len(error.strip().splitlines()) == 1
    assert "truncated" in error


SOUND = {
    "routing_selection": routing_selection_dump(PROMPT, AFTER, experts=EXPERTS, top_k=TOP_K),
    "strict": lines(strict_records(PROMPT, AFTER, layers=[0, 1, 2])),
    "exp_ids": exp_ids_dump([random_routes(20, 6, 8, 2), random_routes(9, 6, 8, 2, seed=1)]),
    "beyond": beyond_csv(random_routes(20, LAYERS, EXPERTS, TOP_K)),
    "parquet": parquet_dump(calls_of("a", PROMPT, AFTER), scores=True),
}


@given(st.sampled_from(sorted(SOUND)), st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_refused_or_a_trace(tmp_path_factory, kind, data):
    content = bytearray(SOUND[kind])
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(1, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        ingested(tmp_path_factory.mktemp("damaged"), bytes(content))
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


@given(st.integers(0, 10**6), st.integers(0, 255))
@settings(max_examples=30, deadline=None)
def test_a_damaged_shard_or_manifest_is_refused(tmp_path_factory, place, flip):
    files = shard_folder(SHARD_SEQUENCES[:2], experts=EXPERTS)
    name = sorted(files)[place % 2]
    content = bytearray(files[name])
    content[place % len(content)] ^= flip
    try:
        ingested(tmp_path_factory.mktemp("damaged"), files | {name: bytes(content)})
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


def test_every_layout_here_is_asked_by_the_registry():
    from pipeline.dumps.sniff import LAYOUTS

    assert set(hooks.LAYOUTS + hook_arrays.LAYOUTS) <= set(LAYOUTS)


@pytest.mark.parametrize("phase", [[3], {"a": 1}, None, 3])
def test_a_phase_that_is_no_text_is_refused_with_its_line(tmp_path, phase):
    for name in ("routing_selection_jsonl", "strict_route_jsonl"):
        content = SEEDS[name].splitlines()
        content[20] = json.dumps({**json.loads(content[20]), "phase": phase}).encode()
        assert "line 21: phase is" in refused(tmp_path, b"\n".join(content) + b"\n")
