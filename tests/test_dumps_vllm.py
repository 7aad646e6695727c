"""vLLM: routes put into each synthetic layout come out, and what its dumps are known to lie about is refused."""

import base64
import gzip
import json
import struct
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dumps import vllm, vllm_logs
from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from pipeline.dumps.sniff import look
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests import raw_vllm as raw
from tests.command_lines import expert_tier
from tests.raw_dumps import npy_bytes, npz_dump, random_routes, speculative_dump, tok_layers_dump

ROUTES = random_routes(40, 3, 16, 4)


def ingested(folder: Path, content: bytes, **said: object) -> Ingested:
    folder.mkdir(exist_ok=True)
    path = folder / "dump.bin"
    path.write_bytes(content)
    return ingest(path, DataFolder(folder / "data"), UserMetadata(**said))


def rows_of(one: Ingested) -> pl.DataFrame:
    return pl.read_parquet(one.path).with_columns(pl.col("phase", "pass_kind").cast(pl.String))


def routes_of(one: Ingested) -> list[list[list[int]]]:
    by_step = rows_of(one).group_by("step_id", maintain_order=True).agg("expert_ids")
    return [[list(ids) for ids in step] for step in by_step["expert_ids"].to_list()]


def tokens_of(one: Ingested) -> list[tuple]:
    """(step, request, position, phase) of each token."""
    return rows_of(one).select("step_id", "request_id", "token_position", "phase").unique(maintain_order=True).rows()


def check(one: Ingested, name: str) -> tuple[str, str]:
    return next((record.outcome, record.found) for record in one.metadata.checks if record.name == name)


def refusal(folder: Path, content: bytes, **said: object) -> str:
    """The one line of the refused ingest; the data folder must hold nothing afterwards."""
    folder.mkdir(exist_ok=True)
    path = folder / "dump.bin"
    path.write_bytes(content)
    data = DataFolder(folder / "data")
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingest(path, data, UserMetadata(**said))
    assert data.trace_ids() == []
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def holes(routes, where, value):
    return [[[value] * len(ids) for ids in token] if at in where else token for at, token in enumerate(routes)]


# Arrays


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64"])
@pytest.mark.parametrize("write", [raw.npz_of, raw.safetensors_of])
def test_documented_array_with_lengths_gives_back_everything(tmp_path, write, dtype):
    arrays = {"routed_experts": raw.array(ROUTES, dtype), "prompt_length": raw.numbers([25]),
              "lengths": raw.numbers([41])}  # fmt: skip
    one = ingested(tmp_path, write(arrays))
    assert routes_of(one) == ROUTES
    assert tokens_of(one) == [(t, 0, t, "prefill" if t < 25 else "decode") for t in range(40)]
    assert rows_of(one)["layer_id"].to_list() == [0, 1, 2] * 40
    assert rows_of(one)["router_weights"].null_count() == 120
    assert one.metadata.layer_base == "assumed_from_0"
    assert one.metadata.pass_boundaries == "assumed_per_token"
    assert "1 without a row of the last token, 0 with one" in check(one, "token positions known")[1]


def test_documented_array_alone_has_unknown_positions_and_says_so(tmp_path):
    one = ingested(tmp_path, raw.npz_of({"routed_experts": raw.array(ROUTES)}))
    assert routes_of(one) == ROUTES
    assert {token[2:] for token in tokens_of(one)} == {(None, "unknown")}
    assert check(one, "token positions known")[0] == "warn"


def test_an_offset_is_carried_where_the_prefix_is_omitted(tmp_path):
    arrays = {"routed_experts": raw.array(ROUTES), "start": raw.numbers([100]), "prompt_length": raw.numbers([110])}
    one = ingested(tmp_path, raw.safetensors_of(arrays))
    assert [token[2] for token in tokens_of(one)] == list(range(100, 140))
    assert [token[3] for token in tokens_of(one)].count("prefill") == 10


def test_an_omitted_prefix_without_offset_leaves_positions_unknown(tmp_path):
    arrays = {"routed_experts": raw.array(ROUTES), "lengths": raw.numbers([200]), "prompt_length": raw.numbers([180])}
    one = ingested(tmp_path, raw.npz_of(arrays))
    assert {token[2] for token in tokens_of(one)} == {None}
    assert "a prefix may be omitted" in check(one, "token positions known")[1]


@pytest.mark.parametrize("write", [raw.npz_of, raw.safetensors_of])
def test_several_arrays_are_several_requests(tmp_path, write):
    more = random_routes(7, 3, 16, 4, seed=5)
    arrays = {"req-a.routed_experts": raw.array(ROUTES), "req-a.prompt_length": raw.numbers([5]),
              "req-b.routed_experts": raw.array(more), "req-b.prompt_length": raw.numbers([2])}  # fmt: skip
    one = ingested(tmp_path, write(arrays))
    assert routes_of(one) == ROUTES + more
    assert tokens_of(one) == [
        *((t, 0, t, "prefill" if t < 5 else "decode") for t in range(40)),
        *((40 + t, 1, t, "prefill" if t < 2 else "decode") for t in range(7)),
    ]


def test_joined_sequences_are_cut_by_their_lengths(tmp_path):
    arrays = {"routed_experts": raw.array(ROUTES), "lengths": raw.numbers([11, 31]),
              "prompt_lengths": raw.numbers([4, 20])}  # fmt: skip
    one = ingested(tmp_path, raw.npz_of(arrays))
    assert routes_of(one) == ROUTES
    assert [token[1:3] for token in tokens_of(one)] == [(0, t) for t in range(10)] + [(1, t) for t in range(30)]


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    arrays = {"routed_experts": raw.array(ROUTES), "lengths": raw.numbers([11, 12])}
    assert "40 rows, but its 2 lengths add up to 23" in refusal(tmp_path, raw.npz_of(arrays))


def test_a_padded_batch_is_cut_by_length_and_refused_without(tmp_path):
    _, dtype, payload = raw.array(ROUTES)
    batch = ((4, 10, 3, 4), dtype, payload)
    one = ingested(tmp_path / "a", raw.npz_of({"routed_experts": batch, "lengths": raw.numbers([10, 3, 10, 1])}))
    assert routes_of(one) == [*ROUTES[:13], *ROUTES[20:31]]
    assert "save the 4 lengths" in refusal(tmp_path / "b", raw.npz_of({"routed_experts": batch}))


def test_the_prompt_array_of_version_0_21_comes_first(tmp_path):
    arrays = {"prompt_routed_experts": raw.array(ROUTES[:25]), "routed_experts": raw.array(ROUTES[25:])}
    one = ingested(tmp_path, raw.npz_of(arrays, {"num_experts": 16, "model": "tiny"}))
    assert routes_of(one) == ROUTES
    assert tokens_of(one) == [(t, 0, t, "prefill" if t < 25 else "decode") for t in range(40)]
    assert (one.metadata.model, one.metadata.num_experts_source) == ("tiny", "declared")


def test_cached_prefix_and_uncaptured_tokens_stay_holes(tmp_path):
    content = raw.npz_of({"routed_experts": raw.array(holes(ROUTES, {0, 1, 2, 30}, -1))})
    one = ingested(tmp_path, content)
    kept = [t for t in range(40) if t not in {0, 1, 2, 30}]
    assert routes_of(one) == [ROUTES[t] for t in kept]
    assert [token[2] for token in tokens_of(one)] == kept
    found = check(one, "positions captured")[1]
    assert "3: −1, cached prefix" in found
    assert "1: −1, not captured" in found


def test_layers_of_a_token_that_are_half_missing_are_refused(tmp_path):
    routes = [[list(ids) for ids in token] for token in ROUTES]
    routes[17][1] = [-1, -1, -1, -1]
    assert "row 17: layers [1] are −1" in refusal(tmp_path, raw.npz_of({"routed_experts": raw.array(routes)}))


def dense_first(routes, value=0):
    return [[[value] * 4, *token] for token in routes]


def test_dense_layers_are_left_out_only_when_said(tmp_path):
    content = raw.npz_of({"routed_experts": raw.array(dense_first(ROUTES), "uint8")})
    message = refusal(tmp_path / "a", content)
    assert "layers [0] are all zero in every row: dense, or never captured" in message
    assert "moe_layer_ids=[1, 2, 3]" in message
    one = ingested(tmp_path / "b", content, moe_layer_ids=[1, 2, 3])
    assert routes_of(one) == ROUTES
    assert rows_of(one)["layer_id"].unique().sort().to_list() == [1, 2, 3]
    assert one.metadata.hidden_layers == 4
    assert one.metadata.counts.dropped_rows == {"dense layers (not among moe_layer_ids)": 40}
    assert "layers that moe_layer_ids leaves out" in refusal(tmp_path / "c", content, moe_layer_ids=[0, 1, 2])


def test_an_axis_of_moe_layers_takes_their_numbers(tmp_path):
    one = ingested(tmp_path, raw.npz_of({"routed_experts": raw.array(ROUTES)}), moe_layer_ids=[1, 3, 5])
    assert rows_of(one)["layer_id"].unique().sort().to_list() == [1, 3, 5]
    assert one.metadata.layer_base == "declared"


def test_layer_numbers_that_fit_no_axis_are_refused(tmp_path):
    content = raw.npz_of({"routed_experts": raw.array(ROUTES)})
    assert "neither theirs nor that of all layers" in refusal(tmp_path, content, moe_layer_ids=[1, 5])
    assert "you say 4 moe_layer_ids" in refusal(tmp_path, content, moe_layer_ids=[1, 2, 3, 4])


def test_an_unwritten_slot_is_not_expert_0(tmp_path):
    content = raw.npz_of({"routed_experts": raw.array(holes(ROUTES, {8, 9}, 0), "uint8")})
    message = refusal(tmp_path, content)
    assert "row 8: the ids of all layers are 0 (2 such rows)" in message
    assert "not expert 0" in message


def test_an_all_zero_tape_is_refused(tmp_path):
    content = raw.npz_of({"routed_experts": raw.array(holes(ROUTES, range(40), 0), "uint8")})
    assert "never written" in refusal(tmp_path, content)


def test_uint8_of_more_than_256_experts_has_wrapped(tmp_path):
    content = raw.npz_of({"routed_experts": raw.array(ROUTES, "uint8")}, {"num_experts": 384})
    assert "cannot hold id 383 of 384 experts: they wrapped" in refusal(tmp_path, content)
    content = raw.npz_of({"routed_experts": raw.array(ROUTES, "uint8")})
    assert "they wrapped" in refusal(tmp_path, content, num_experts=257)


def test_minus_one_in_uint8_is_seen_and_a_single_255_is_ambiguous(tmp_path):
    message = refusal(tmp_path / "a", raw.npz_of({"routed_experts": raw.array(holes(ROUTES, {3}, 255), "uint8")}))
    assert "row 3: all ids are 255" in message
    routes = [[list(ids) for ids in token] for token in ROUTES]
    routes[3][1][2] = 255
    one = ingested(tmp_path / "b", raw.npz_of({"routed_experts": raw.array(routes, "uint8")}), num_experts=256)
    assert check(one, "255 is an expert") == ("warn", "1 selections of id 255; the dump cannot tell them from −1")


def test_the_device_layout_is_turned_only_where_lengths_show_it(tmp_path):
    many = random_routes(300, 3, 16, 4)
    turned = raw.layer_major(many)
    one = ingested(tmp_path / "a", raw.npz_of({"routed_experts": turned, "lengths": raw.numbers([301])}))
    assert routes_of(one) == many
    assert "device layout" in check(one, "axis order")[1]
    assert "device layout" in refusal(tmp_path / "b", raw.npz_of({"routed_experts": turned}))
    few = {"routed_experts": raw.layer_major(ROUTES), "lengths": raw.numbers([41])}
    assert "say --meta hidden_layers=N" in refusal(tmp_path / "c", raw.npz_of(few))
    said = ingested(tmp_path / "d", raw.npz_of(few), hidden_layers=3)
    assert routes_of(said) == ROUTES


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"routed_experts": ((4, 16), "int64", b"\1" * 512)}, "wanted integer ids shaped [tokens, layers, k]"),
        ({"routed_experts": ((0, 3, 4), "int16", b"")}, "holds no route"),
        ({"routed_experts": raw.array(ROUTES), "lengths": raw.numbers([20])}, "40 rows for 20 tokens"),
        ({"routed_experts": raw.array(ROUTES), "prompt_lengths": raw.numbers([2, 3])}, "2 prompt lengths for 1"),
        (
            {"a_routed_experts": raw.array(ROUTES), "b_routed_experts": raw.array(ROUTES, "int32")},
            "in types int16, int32",
        ),
        ({"a_routed_experts": raw.array(ROUTES), "b_routed_experts": raw.array([t[:2] for t in ROUTES])}, "one model"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("write", [raw.npz_of, raw.safetensors_of])
def test_arrays_that_contradict_themselves(tmp_path, write, arrays, expected):
    assert expected in refusal(tmp_path, write(arrays))


def test_floats_named_routed_experts_are_no_routes(tmp_path):
    header = json.dumps({"routed_experts": {"dtype": "F16", "shape": [2, 2, 2], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(header)) + header + b"\0" * 16
    assert "scores and counts are no trace" in refusal(tmp_path, content)


def test_a_header_that_promises_more_than_there_is_allocates_nothing(tmp_path):
    content = raw.npz_of({"routed_experts": ((2**40, 64, 8), "int16", b"\0" * 64)})
    assert "holds at most" in refusal(tmp_path / "a", content)
    content = raw.safetensors_of({"routed_experts": raw.array(ROUTES)})
    assert "truncated" in refusal(tmp_path / "b", content[:-5])


# JSON


def test_documented_response_of_0_21_gives_back_everything(tmp_path):
    record = raw.response([ROUTES[25:]], prompt=25, completions=[15], prompt_routed=ROUTES[:25])
    one = ingested(tmp_path, raw.lines(record))
    assert routes_of(one) == ROUTES
    assert tokens_of(one) == [(t, 0, t, "prefill" if t < 25 else "decode") for t in range(40)]
    assert (one.metadata.model, one.metadata.engine) == ("tiny/moe", "vllm-0.21.0-tp1-0badcafe")


@pytest.mark.parametrize("with_last", [True, False])
def test_documented_whole_sequence_per_choice_starts_at_0(tmp_path, with_last):
    record = raw.response([ROUTES], prompt=25, completions=[15 if with_last else 16])
    one = ingested(tmp_path, raw.lines(record))
    assert tokens_of(one) == [(t, 0, t, "prefill" if t < 25 else "decode") for t in range(40)]
    assert f"{1 - with_last} without a row of the last token" in check(one, "token positions known")[1]


def test_choices_share_the_prompt_once(tmp_path):
    record = raw.response([ROUTES[25:30], ROUTES[30:]], prompt=25, completions=[5, 10], prompt_routed=ROUTES[:25])
    one = ingested(tmp_path, raw.lines(record))
    assert routes_of(one) == ROUTES
    assert [token[1:3] for token in tokens_of(one)] == [
        *((0, t) for t in range(30)),
        *((1, 25 + t) for t in range(10)),
    ]


def test_lines_and_documents_and_lists_are_the_same(tmp_path):
    records = [
        raw.response([ROUTES[:20]], prompt=5, completions=[16]),
        raw.response([ROUTES[20:]], prompt=4, completions=[17]),
    ]
    frames = [
        rows_of(ingested(tmp_path / name, content))
        for name, content in {
            "lines": raw.lines(*records),
            "list": json.dumps(records).encode(),
            "indented": json.dumps(records, indent=1).encode(),
            "gzip": gzip.compress(raw.lines(*records)),
        }.items()
    ]
    assert frames[0]["request_id"].unique().to_list() == [0, 1]
    assert all(frame.equals(frames[0]) for frame in frames)


def test_an_indented_response_whose_routes_stand_late_is_recognised(tmp_path):
    record = raw.response([ROUTES], prompt=20_000, completions=[30], prompt_token_ids=list(range(20_000)))
    record["choices"][0] = {"text": "w" * 70_000} | record["choices"][0]
    one = ingested(tmp_path, json.dumps(record, indent=1).encode())
    assert {token[2] for token in tokens_of(one)} == {None}


@pytest.mark.parametrize(
    "value",
    [
        raw.encoded(ROUTES, "uint8"), raw.encoded(ROUTES, "int16", bytes_key="b64", spelled="<i2"),
        raw.encoded(ROUTES, "int32", bytes_key="base64", spelled="torch.int32"),
        raw.encoded(ROUTES, "uint16", bytes_key="bytes"), raw.encoded(ROUTES, "uint8", bytes_key="buffer"),
        raw.encoded(ROUTES, "uint8", bytes_key="routed_experts", spelled=None),
        raw.npy_base64(ROUTES, "uint8"), raw.npy_base64(ROUTES, "int16"), ROUTES,
    ],
)  # fmt: skip
def test_synthetic_encodings_all_give_the_same_routes(tmp_path, value):
    one = ingested(tmp_path, raw.lines({"routed_experts": value, "prompt_token_ids": [0] * 9, "token_ids": [0] * 32}))
    assert routes_of(one) == ROUTES
    assert [token[2] for token in tokens_of(one)] == list(range(40))


def test_shape_and_dtype_may_stand_beside(tmp_path):
    value = raw.encoded(ROUTES, "int16")
    record = {"routed_experts": value["data"], "routed_experts_shape": value["shape"], "routed_experts_dtype": "int16",
              "routed_experts_start": 7}  # fmt: skip
    one = ingested(tmp_path, raw.lines(record))
    assert [token[2] for token in tokens_of(one)] == list(range(7, 47))


def test_an_offset_in_the_encoded_array_is_carried(tmp_path):
    record = raw.response([raw.encoded(ROUTES, "uint8", start=64)], prompt=80, completions=[25])
    one = ingested(tmp_path, raw.lines(record))
    assert tokens_of(one) == [(t, 0, 64 + t, "prefill" if t < 16 else "decode") for t in range(40)]


def test_preempted_tokens_and_choices_are_null_and_stay_holes(tmp_path):
    routes = [None if t in (30, 31) else token for t, token in enumerate(ROUTES)]
    records = [raw.response([routes], prompt=25, completions=[16]), raw.response([None], prompt=3, completions=[4])]
    one = ingested(tmp_path, raw.lines(*records))
    kept = [t for t in range(40) if t not in (30, 31)]
    assert [token[2] for token in tokens_of(one)] == kept
    assert check(one, "positions captured")[1].endswith("2: null, preempted")
    assert "1 choices have null" in check(one, "every request has routes")[1]


def test_responses_without_any_routes_are_refused(tmp_path):
    content = raw.lines(raw.response([None], prompt=3, completions=[4], with_prompt_field=True))
    assert "--enable-return-routed-experts" in refusal(tmp_path, content)


BAD = [
    ([[[1, 2], [3, 4]], [[1, 2]]], "ragged lists"),
    ([[[1, 2], [3, None]]], "only whole tokens may be"),
    ([[[1, 2.5], [3, 4]]], "of whole numbers"),
    ([[[1, True], [3, 4]]], "of whole numbers"),
    ([[1, 2], [3, 4]], "of whole numbers"),
    ([[["a"]]], "of whole numbers"),
    ({"data": "AAAA"}, "wanted [tokens, layers, k] beside it"),
    ({"shape": [1, 1, 1]}, "wanted its bytes in base64"),
    ({"data": "A*AA", "shape": [1, 1, 3], "dtype": "uint8"}, "is no base64"),
    ({"data": "AAAA", "shape": [1, 1, 4], "dtype": "uint8"}, "3 bytes, wanted 4"),
    ({"data": "AAAA", "shape": [2**20, 2**20, 2**20], "dtype": "uint8"}, "3 bytes, wanted"),
    ({"data": "AAAA", "shape": [1, 1, 3], "dtype": "float32"}, "wanted an integer type"),
    ({"data": "AAAA", "shape": [1, 1, 3], "dtype": "object"}, "wanted an integer type"),
    ({"data": "/////w==", "shape": [1, 1, 4]}, "has no dtype; add it"),
    ({"data": "AAAA", "shape": [1, 1, 3], "dtype": "uint8", "start": -1}, "wanted a position of 0 or more"),
    ("k05VTVBZAAAA", "damaged npy file"),
]


@pytest.mark.parametrize(("value", "expected"), BAD)
def test_values_that_are_no_routes_are_located(tmp_path, value, expected):
    content = raw.lines(raw.response([ROUTES], prompt=20, completions=[21]), {"routed_experts": value})
    message = refusal(tmp_path, content)
    assert "line 2" in message
    assert expected in message


def test_an_npy_of_objects_in_base64_is_not_unpickled(tmp_path):
    import base64

    text = base64.b64encode(npy_bytes((1, 1, 1), "|O", b"\x80\x04N.")).decode()
    assert "damaged npy file" in refusal(tmp_path, raw.lines({"routed_experts": text}))


def test_more_rows_than_tokens_are_refused(tmp_path):
    content = raw.lines(raw.response([ROUTES], prompt=20, completions=[10]))
    assert "40 rows for 30 tokens; are rejected draft tokens" in refusal(tmp_path, content)


def test_truncated_responses_name_the_line(tmp_path):
    content = raw.lines(*[raw.response([ROUTES], prompt=20, completions=[21]) for _ in range(3)])
    assert "line 3: no JSON" in refusal(tmp_path, content[:-100])
    assert "truncated" in refusal(
        tmp_path, json.dumps(raw.response([ROUTES], prompt=20, completions=[21])).encode()[:-9]
    )


@given(
    tokens=st.integers(1, 9), layers=st.integers(1, 3), experts=st.integers(4, 300), top_k=st.integers(1, 4),
    prompt=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_synthetic_layouts_of_the_same_routes_agree(tmp_path_factory, tokens, layers, experts, top_k, prompt, seed):
    routes = random_routes(tokens, layers, experts, top_k, seed)
    prompt = min(prompt, tokens)
    folder = tmp_path_factory.mktemp("same")
    said = {"num_experts": experts, "tied_routing": True}
    arrays = {"routed_experts": raw.array(routes), "prompt_length": raw.numbers([prompt]),
              "lengths": raw.numbers([tokens])}  # fmt: skip
    record = {"routed_experts": raw.encoded(routes, "int32"), "prompt_token_ids": [0] * prompt,
              "token_ids": [0] * (tokens - prompt)}  # fmt: skip
    try:
        frames = [
            rows_of(ingested(folder / str(at), content, **said))
            for at, content in enumerate([raw.npz_of(arrays), raw.safetensors_of(arrays), raw.lines(record)])
        ]
    except RefusedDump as error:
        # As many layers as tokens, where the axis order is the documented one only by declaration.
        assert "say --meta hidden_layers=N" in str(error)
        return
    assert all(frame.equals(frames[0]) for frame in frames)
    assert frames[0]["expert_ids"].to_list() == [ids for token in routes for ids in token]


# The logging patch


def log(*passes, layers=(0,), experts=16, top_k=4, **meta) -> bytes:
    return raw.lines(raw.meta_line(list(layers), experts, top_k, **meta), *(line for one in passes for line in one))


def test_the_patch_log_gives_back_its_rows_with_weights(tmp_path):
    routes = [[token[0]] for token in ROUTES]
    content = log(raw.pass_lines(routes[:10], [0]), raw.pass_lines(routes[10:], [0]))
    one = ingested(tmp_path, content)
    assert routes_of(one) == routes
    assert [token[:3] for token in tokens_of(one)] == [(t, int(t >= 10), None) for t in range(40)]
    assert [round(weight, 3) for weight in rows_of(one)["router_weights"][0]] == [0.5, 0.333, 0.25, 0.2]
    meta = one.metadata
    assert (meta.model, meta.engine, meta.top_k_model) == ("allenai/OLMoE-1B-7B-0924", "vLLM 0.11.0", 4)
    assert (meta.layer_base, meta.num_experts_source) == ("recorded", "declared")


def test_requests_are_cut_where_token_idx_goes_back_jumps_or_req_id_changes(tmp_path):
    routes = [[token[0]] for token in ROUTES]
    content = log(
        raw.pass_lines(routes[:5], [7]),
        raw.pass_lines(routes[5:9], [7], first=3),  # 4 → 3: goes back, though not to 0
        raw.pass_lines(routes[9:12], [7], first=7),  # 6 → 7: goes on
        raw.pass_lines(routes[12:20], [7], first=50),  # 9 → 50: jumps
        raw.pass_lines(routes[20:30], [7], first=58, request="r1"),  # another req_id
        raw.pass_lines(routes[30:], [7], first=67, request="r1"),  # 67 → 67: stands again
        layers=[7],
    )
    one = ingested(tmp_path, content)
    requests = [token[1] for token in tokens_of(one)]
    assert requests == [0] * 5 + [1] * 7 + [2] * 8 + [3] * 10 + [4] * 10
    found = check(one, "requests of the log")[1]
    assert "5 requests" in found
    assert "goes back (2) or jumps (1)" in found
    assert rows_of(one)["layer_id"].unique().to_list() == [7]


def test_layers_of_a_pass_are_put_token_by_token(tmp_path):
    layers = [1, 4, 9]
    content = log(
        raw.pass_lines(ROUTES[:20], layers), *(raw.pass_lines([token], layers) for token in ROUTES[20:]), layers=layers
    )
    one = ingested(tmp_path, content)
    assert routes_of(one) == ROUTES
    assert rows_of(one)["layer_id"].to_list() == layers * 40
    assert [token[1] for token in tokens_of(one)] == [0] * 20 + list(range(1, 21))


def test_the_log_in_small_batches_gives_the_same_trace(tmp_path, monkeypatch):
    layers = [0, 1, 2]
    multi = log(
        raw.pass_lines(ROUTES[:20], layers), *(raw.pass_lines([one], layers) for one in ROUTES[20:]), layers=layers
    )
    single = log(
        *(raw.pass_lines([[token[0]]], [0], first=at % 7) for at, token in enumerate(random_routes(500, 1, 16, 4)))
    )
    whole = [rows_of(ingested(tmp_path / f"a{at}", content)) for at, content in enumerate((multi, single))]
    monkeypatch.setattr("pipeline.dumps.jsonl.BLOCK_BYTES", 4096)
    monkeypatch.setattr("pipeline.dumps.vllm_logs.ROWS_PER_BLOCK", 40)
    again = [rows_of(ingested(tmp_path / f"b{at}", content)) for at, content in enumerate((multi, single))]
    assert all(frame.equals(other) for frame, other in zip(again, whole, strict=True))


def test_the_leading_dummy_batches_are_tagged_warmup(tmp_path):
    routes = [[token[0]] for token in random_routes(300, 1, 64, 8)]
    content = log(
        raw.pass_lines(raw.warmup(2048, 1, 8), [0]), raw.pass_lines(raw.warmup(512, 1, 8), [0]),
        raw.pass_lines(routes, [0]), experts=64, top_k=8,
    )  # fmt: skip
    one = ingested(tmp_path, content)
    assert one.metadata.counts.rows_by_phase["warmup"] == 2560
    assert rows_of(one).filter(pl.col("phase") == "unknown")["expert_ids"].to_list() == [token[0] for token in routes]


def test_warmup_that_runs_into_the_prompt_without_a_reset_is_still_tagged(tmp_path):
    routes = [[token[0]] for token in random_routes(300, 1, 64, 8)]
    content = log(raw.pass_lines([*raw.warmup(2048, 1, 8), *routes], [0]), experts=64, top_k=8)
    assert ingested(tmp_path, content).metadata.counts.rows_by_phase["warmup"] == 2048


def test_fifteen_garbage_rows_of_sixteen_are_refused_behind_a_warmup(tmp_path):
    garbage = raw.garbage_of_sixteen(320, 64, 8)
    content = log(raw.pass_lines(raw.warmup(2048, 1, 8), [0]), raw.pass_lines(garbage, [0]), experts=64, top_k=8)
    assert "flat copy of a strided top-k view" in refusal(tmp_path, content)


def test_a_log_of_nothing_but_warmup_is_refused(tmp_path):
    content = log(raw.pass_lines(raw.warmup(64, 1, 8), [0]), experts=64, top_k=8)
    assert "warm-up batch, not routes" in refusal(tmp_path, content)


def test_a_second_meta_line_begins_another_run(tmp_path):
    routes = [[token[0]] for token in ROUTES]
    content = log(raw.pass_lines(routes[:10], [0])) + log(raw.pass_lines(routes[10:], [0], first=10))
    assert [token[1] for token in tokens_of(ingested(tmp_path, content))] == [0] * 10 + [1] * 30


def test_a_log_without_meta_and_weights_and_with_numbered_requests_is_read(tmp_path):
    lines = raw.pass_lines([[token[0]] for token in ROUTES], [3], request=12)
    for line in lines:
        del line["topk_weights"]
    one = ingested(tmp_path, raw.lines(*lines))
    assert [step[0] for step in routes_of(one)] == [token[0] for token in ROUTES]
    assert rows_of(one)["router_weights"].null_count() == 40
    assert one.metadata.weight_kind == "absent"


def test_a_truncated_pass_of_several_layers_is_named(tmp_path):
    content = log(raw.pass_lines(ROUTES[:20], [0, 1]), raw.pass_lines(ROUTES[20:], [0, 1]), layers=[0, 1])
    cut = b"".join(content.splitlines(keepends=True)[:-5])
    assert "15 rows, but 20 in the first layer of the pass; it is the last pass: the dump is truncated" in refusal(
        tmp_path, cut
    )


ROUTE = {"type": "route", "req_id": "r0", "token_idx": 1, "layer": 0, "topk_ids": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (ROUTE | {"topk_ids": [1, 2]}, "has 2 ids, the first route 4"),
        (ROUTE | {"token_idx": -1}, "token_idx is '-1'"),
        (ROUTE | {"topk_ids": [1, None, 3, 4]}, "whole numbers"),
        (ROUTE | {"layer": None}, "layer is 'None'"),
        ({"type": "load", "counts": [1]}, "type meta or route"),
        (ROUTE | {"topk_weights": [1]}, "4 numbers"),
        ([1], "type meta or route"),
    ],
)  # fmt: skip
def test_a_wrong_line_of_the_log_is_located(tmp_path, line, expected):
    content = log(raw.pass_lines([[token[0]] for token in ROUTES], [0]))
    message = refusal(tmp_path, content + raw.lines(line) + content)
    assert "line 42" in message
    assert expected in message


def test_the_log_of_a_layer_that_was_not_said_is_refused(tmp_path):
    content = log(raw.pass_lines(ROUTES, [0, 1]), layers=[0])
    assert "is layers_logged wrong" in refusal(tmp_path, content)


# Statistics


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("complete", ": record routed_experts"),
        ("aborted", "says 'aborted', so it is truncated"),
        (None, "no closing summary, so it is truncated"),
    ],
)
def test_statistics_are_refused_and_truncation_is_named_in_the_same_line(tmp_path, status, expected):
    message = refusal(tmp_path, raw.statistics(20, 8, status))
    assert "counts per step, layer and expert" in message
    assert expected in message
    assert ("truncated" in message) == (status != "complete")


def test_a_folder_of_statistics_is_refused(tmp_path):
    folder = tmp_path / "expert-routing-stats"
    folder.mkdir()
    for rank in range(2):
        (folder / f"expert-routing-rank-{rank}-iteration-0.jsonl").write_bytes(raw.statistics(3, 8))
    with pytest.raises(RefusedDump, match="counts per step, layer and expert"):
        ingest(folder, DataFolder(tmp_path / "data"), UserMetadata())


# What stands twice, and shapes of the same size


def bare(routed: object, prompt: int, completion: int, **more: object) -> dict:
    return raw.response([routed], prompt=prompt, completions=[completion], **more)


def test_a_response_that_came_before_is_refused_by_both_places(tmp_path):
    one, two = bare(ROUTES, 25, 16), bare(ROUTES[:30], 20, 11)
    message = refusal(tmp_path, raw.lines(one, two, one))
    assert f", line 3: id '{one['id']}' with the routes" in message
    assert "with the routes of the response, line 1" in message
    piece = bare(ROUTES[:38], 25, 14, id=one["id"])
    assert "as the response, line 1 has, with other routes" in refusal(tmp_path, raw.lines(piece, one))


def test_choices_of_one_response_may_be_equal_and_numbers_may_start_again(tmp_path):
    twins = raw.response([ROUTES, ROUTES], prompt=25, completions=[16, 16])
    assert ingested(tmp_path, raw.lines(twins)).metadata.counts.requests == 2
    offline = [{"request_id": str(n), "routed_experts": part} for n, part in ((0, ROUTES), (0, ROUTES[:30]))]
    assert ingested(tmp_path, raw.lines(*offline)).metadata.counts.requests == 2
    message = refusal(tmp_path / "again", raw.lines(*offline, offline[0]))
    assert "with the routes of the response, line 1" in message


def test_responses_without_ids_that_stand_twice_as_a_whole_are_refused(tmp_path):
    nameless = [{"routed_experts": ROUTES}, {"routed_experts": ROUTES[:30][::-1]}]
    assert ingested(tmp_path, raw.lines(*nameless)).metadata.counts.requests == 2
    message = refusal(tmp_path / "again", raw.lines(*nameless, *nameless))
    assert "140 steps, which are the first 70 of them 2 times over" in message


def other_axes(**beside: object) -> dict:
    """The bytes of 40 tokens of 3 layers of 4, declared as 40 of 4 layers of 3."""
    _, dtype, payload = raw.array(ROUTES)
    text = base64.b64encode(payload).decode()
    return {"data": text, "shape": [40, 4, 3], "dtype": dtype, **beside}


@pytest.mark.parametrize(
    ("beside", "said", "expected"),
    [
        ({"num_layers": 3}, {}, "shaped [40, 4, 3], but num_layers is 3"),
        ({"top_k": 4}, {}, "shaped [40, 4, 3], but top_k is 4"),
        ({}, {"hidden_layers": 3}, "shaped [tokens, 4, 3], but the model has 3 layers"),
        ({}, {"top_k_model": 4}, "shaped [tokens, 4, 3], but the model has 4 experts per token"),
        ({}, {"hidden_layers": 5, "moe_layer_ids": [1, 2, 3]}, "5 layers, 3 MoE layers; wanted [tokens, layers, k]"),
    ],
)
def test_a_declared_shape_of_the_same_size_is_refused(tmp_path, beside, said, expected):
    assert expected in refusal(tmp_path, raw.lines(bare(other_axes(**beside), 25, 16)), **said)


def test_a_shape_of_fewer_tokens_is_refused_where_nothing_was_cached(tmp_path):
    _, dtype, payload = raw.array(ROUTES)
    routed = {"data": base64.b64encode(payload).decode(), "shape": [20, 6, 4], "dtype": dtype}
    usage = {"prompt_tokens": 25, "completion_tokens": 16, "prompt_tokens_details": {"cached_tokens": 0}}
    message = refusal(tmp_path, raw.lines(bare(routed, 25, 16, usage=usage)))
    assert "20 rows for 41 tokens, of which the usage says 0 were cached; wanted 40 rows" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda begin, end: (begin - 2, end - 2), "overlaps"),
        (lambda begin, end: (begin + 2, end + 2), "leaves a gap behind"),
    ],
)
def test_tensors_that_overlap_or_leave_gaps_are_refused(tmp_path, change, expected):
    arrays = {"routed_experts": raw.array(ROUTES), "prompt_length": raw.numbers([25])}
    content = raw.safetensors_of(arrays)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = max((name for name in header if name in arrays), key=lambda name: header[name]["data_offsets"])
    header[name]["data_offsets"] = change(*header[name]["data_offsets"])
    text = json.dumps(header).encode()
    message = refusal(tmp_path, len(text).to_bytes(8, "little") + text + content[8 + length :] + bytes(2))
    assert f"tensor '{name}' begins at byte" in message
    assert expected in message


def test_bytes_behind_the_last_tensor_are_refused(tmp_path):
    content = raw.safetensors_of({"routed_experts": raw.array(ROUTES)}) + bytes(16)
    assert "bytes of data, but the header's tensors end at" in refusal(tmp_path, content)


# Recognition and damage

LOOK_ALIKES = {
    "tokens": tok_layers_dump(ROUTES),
    "npz": npz_dump(ROUTES),
    "passes": speculative_dump(3, 16, 4, ["normal"] * 4)[0],
    "sglang": raw.lines({"text": "a", "meta_info": {"routed_experts": "AAAA", "prompt_tokens": 3}}),
    "trainer npz": raw.npz_of({"routed_experts": raw.array(ROUTES), "attention_mask": raw.numbers([1] * 40)}),
    "trainer": raw.lines({"rollout_id": 1, "samples": [{"rollout_routed_experts": [[[1]]]}]}),
    "rollout tensor": raw.safetensors_of({"rollout_routed_experts": raw.array(ROUTES)}),
    "weights": raw.safetensors_of({"model.layers.0.mlp.experts.weight": raw.array(ROUTES)}),
    "chat": raw.lines(
        {"object": "chat.completion", "choices": [{"message": {"content": '"routed_experts": [[[1]]]'}}]}
    ),
    "metadata": raw.lines({"type": "meta", "note": "x"}),
    "log": raw.lines({"record_type": "metadata", "name": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_not_claimed(tmp_path, name):
    path = tmp_path / "x"
    path.write_bytes(LOOK_ALIKES[name])
    with DumpFile(path) as dump:
        sample = look(dump)
    assert not [layout.name for layout in (*vllm.LAYOUTS, *vllm_logs.LAYOUTS) if layout.claims(sample)]


LOG_LAYERS = [0, 2]
DAMAGED = [
    raw.npz_of({"routed_experts": raw.array(ROUTES), "prompt_length": raw.numbers([9])}),
    raw.safetensors_of({"routed_experts": raw.array(ROUTES), "lengths": raw.numbers([41])}, {"num_experts": "16"}),
    raw.lines(*(raw.response([r], prompt=20, completions=[21]) for r in (ROUTES, raw.encoded(ROUTES)))),
    json.dumps(raw.response([raw.npy_base64(ROUTES)], prompt=20, completions=[21]), indent=1).encode(),
    log(raw.pass_lines(ROUTES[:20], LOG_LAYERS), raw.pass_lines(ROUTES[20:], LOG_LAYERS), layers=LOG_LAYERS),
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_damage_ends_in_a_refusal_or_a_valid_trace(tmp_path_factory, content, data):
    damaged = bytearray(content)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / "dump.bin"
    path.write_bytes(bytes(damaged))
    try:
        found = ingest(path, DataFolder(path.parent / "data"), UserMetadata())
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)
    else:
        assert found.metadata.counts.rows


def test_the_command_line_refuses_in_one_line(tmp_path, capsys):
    for name, content in {
        "zero": raw.npz_of({"routed_experts": raw.array(holes(ROUTES, range(40), 0), "uint8")}),
        "null": raw.lines(raw.response([None], prompt=3, completions=[4])),
        "counts": raw.statistics(3, 8, None),
        "log": log(raw.pass_lines(raw.warmup(64, 1, 8), [0]), experts=64, top_k=8),
    }.items():
        (tmp_path / name).write_bytes(content)
        status, _, errors = expert_tier(capsys, "ingest", tmp_path / name, "--data", tmp_path / "data")
        assert status == 1
        assert len(errors.strip().splitlines()) == 1
