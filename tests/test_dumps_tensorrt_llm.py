"""TensorRT-LLM's statistics: selected experts of forks come out as synthetic files hold them; counts are refused."""

import json
import struct
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dumps import tensorrt_llm
from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from pipeline.dumps.sniff import look
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests import raw_vllm as raw
from tests.command_lines import expert_tier
from tests.raw_dumps import random_routes

LAYERS = [3, 4, 60]
EXPERTS, TOP_K = 16, 4
META = json.dumps({"num_experts": EXPERTS, "num_experts_per_token": TOP_K}).encode()


def steps_of(seed: int = 0, tokens: tuple[int, ...] = (9, 1, 12, 5)) -> list:
    return [random_routes(count, len(LAYERS), EXPERTS, TOP_K, seed=seed * 100 + at) for at, count in enumerate(tokens)]


def tensors(steps: list, dtype: str = "int32", first: int = 100) -> dict[str, raw.Array]:
    """Selected experts as `{iteration}_{layer}` [tokens, k]."""
    found = {}
    for at, routes in enumerate(steps):
        for place, layer in enumerate(LAYERS):
            flat = [expert for token in routes for expert in token[place]]
            payload = struct.pack(f"<{len(flat)}{raw.CODES[dtype][0]}", *flat)
            found[f"{first + at}_{layer}"] = ((len(routes), TOP_K), dtype, payload)
    return found


def counts(steps: list, first: int = 100) -> dict[str, raw.Array]:
    """Counts as `{iteration}_{layer}` [experts]."""
    found = {}
    for at, routes in enumerate(steps):
        for place, layer in enumerate(LAYERS):
            flat = [expert for token in routes for expert in token[place]]
            found[f"{first + at}_{layer}"] = raw.numbers([flat.count(expert) for expert in range(EXPERTS)], "int32")
    return found


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def ingested(path: Path) -> Ingested:
    return ingest(path, DataFolder(path.parent / "data"), UserMetadata())


def refusal(path: Path) -> str:
    data = DataFolder(path.parent / "data")
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingest(path, data, UserMetadata())
    assert data.trace_ids() == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows_of(one: Ingested) -> list[tuple]:
    frame = pl.read_parquet(one.path)
    assert frame["token_position"].null_count() == frame["router_weights"].null_count() == len(frame)
    found = frame.select("step_id", "request_id", "layer_id", "expert_ids").rows()
    return [(step, request, layer, list(ids)) for step, request, layer, ids in found]


def expected(shards: list[list]) -> list[tuple]:
    return [
        (step, request, layer, token[place])
        for step in range(len(shards[0]))
        for place, layer in enumerate(LAYERS)
        for request, steps in enumerate(shards)
        for token in steps[step]
    ]


def check(one: Ingested, name: str) -> tuple[str, str]:
    return next((record.outcome, record.found) for record in one.metadata.checks if record.name == name)


@pytest.mark.parametrize("write_file", [raw.safetensors_of, raw.npz_of])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_synthetic_folder_of_ranks_gives_back_everything(tmp_path, write_file, dtype):
    shards = [steps_of(1), steps_of(2, (3, 1, 1, 2))]
    files = {"meta_info.json": META}
    for rank, steps in enumerate(shards):
        files[f"token_selected_experts_rank{rank}.safetensors"] = write_file(tensors(steps, dtype))
        files[f"rank{rank}.safetensors"] = raw.safetensors_of(counts(steps))
        square = ((EXPERTS, EXPERTS), "int32", b"\0" * 4 * EXPERTS**2)
        files[f"cooccurrence_rank{rank}.safetensors"] = raw.safetensors_of(dict.fromkeys(tensors(steps), square))
    one = ingested(write(tmp_path / "statistic", files))
    assert rows_of(one) == expected(shards)
    assert one.metadata.experts_per_layer == [EXPERTS] * 3
    assert (one.metadata.num_experts_source, one.metadata.top_k_model) == ("declared", TOP_K)
    assert (one.metadata.engine, one.metadata.pass_boundaries) == ("TensorRT-LLM", "recorded")
    assert check(one, "engine's counts equal ours") == ("ok", "24 tensors compared")
    assert "2 different ones joined" in check(one, "ranks are replicas or shards")[1]


@pytest.mark.parametrize("write_file", [raw.safetensors_of, raw.npz_of])
def test_synthetic_single_file_is_read_alone(tmp_path, write_file):
    steps = steps_of()
    one = ingested(write(tmp_path, {"x": write_file(tensors(steps))}) / "x")
    assert rows_of(one) == expected([steps])


def test_equal_ranks_are_kept_once(tmp_path):
    steps = steps_of()
    files = {f"token_selected_experts_rank{rank}": raw.safetensors_of(tensors(steps)) for rank in range(4)}
    one = ingested(write(tmp_path / "s", files | {"meta_info.json": META}))
    assert rows_of(one) == expected([steps])
    assert "3 replicas left out" in check(one, "ranks are replicas or shards")[1]


def test_counts_alone_are_refused(tmp_path):
    files = {"meta_info.json": META, "rank0.safetensors": raw.safetensors_of(counts(steps_of()))}
    assert "counts per iteration, layer and expert" in refusal(write(tmp_path / "folder", files))
    assert "counts per iteration, layer and expert" in refusal(tmp_path / "folder" / "rank0.safetensors")
    assert "ingest the folder" in refusal(tmp_path / "folder" / "meta_info.json")


def test_cooccurrences_alone_are_refused(tmp_path):
    square = ((EXPERTS, EXPERTS), "int32", b"\0" * 4 * EXPERTS**2)
    content = raw.safetensors_of(dict.fromkeys(tensors(steps_of()), square))
    assert "co-occurrences" in refusal(write(tmp_path, {"x": content}) / "x")
    folder = write(tmp_path / "f", {"meta_info.json": META, "cooccurrence_rank0.safetensors": content})
    assert "counts per iteration" in refusal(folder)


def test_a_missing_rank_is_named(tmp_path):
    files = {f"token_selected_experts_rank{rank}": raw.safetensors_of(tensors(steps_of(rank))) for rank in (0, 1, 3)}
    assert "the file of rank 2 is missing" in refusal(write(tmp_path / "a", files))
    del files["token_selected_experts_rank3"]
    files["rank2.safetensors"] = raw.safetensors_of(counts(steps_of(2)))
    assert "the file of rank 2 is missing" in refusal(write(tmp_path / "b", files))
    del files["rank2.safetensors"]
    files["meta_info.json"] = json.dumps({"num_experts": 16, "num_experts_per_token": 4, "ep_size": 4}).encode()
    assert "the file of rank 2, 3 is missing" in refusal(write(tmp_path / "c", files))


def test_counts_that_differ_are_said(tmp_path):
    files = {"token_selected_experts_rank0": raw.safetensors_of(tensors(steps_of(1))), "meta_info.json": META,
             "rank0.safetensors": raw.safetensors_of(counts(steps_of(2)))}  # fmt: skip
    one = ingested(write(tmp_path / "s", files))
    outcome, found = check(one, "engine's counts equal ours")
    assert outcome == "warn"
    assert "rank 0, iteration 100, layer 3 first" in found


def test_meta_info_must_fit(tmp_path):
    files = {"token_selected_experts_rank0": raw.safetensors_of(tensors(steps_of()))}
    few = json.dumps({"num_experts": 8, "num_experts_per_token": 4}).encode()
    assert "ids run 0..7" in refusal(write(tmp_path / "a", files | {"meta_info.json": few}))
    other = json.dumps({"num_experts": 16, "num_experts_per_token": 8}).encode()
    assert "8 experts per token, the tensors hold 4" in refusal(
        write(tmp_path / "b", files | {"meta_info.json": other})
    )
    wrong = b'{"num_experts": -1, "num_experts_per_token": 4}'
    assert "num_experts is '-1'" in refusal(write(tmp_path / "c", files | {"meta_info.json": wrong}))


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"token_selected_experts": raw.safetensors_of(tensors(steps_of()))}, "names no rank"),
        (dict.fromkeys(("rank0", "x_rank0"), raw.safetensors_of(tensors(steps_of()))), "same rank"),
        ({"rank0": raw.safetensors_of(tensors(steps_of())), "note.txt": b"hello\n"}, "keep other files out"),
        ({"rank0": raw.safetensors_of(tensors(steps_of()) | {"100_5": raw.numbers([1])})}, "several kinds"),
    ],
)  # fmt: skip
def test_folders_that_contradict_themselves(tmp_path, files, fault):
    assert fault in refusal(write(tmp_path / "s", files | {"meta_info.json": META}))


def test_a_layer_missing_in_an_iteration_is_refused(tmp_path):
    found = tensors(steps_of())
    del found["102_4"]
    assert "layers [4] are missing" in refusal(write(tmp_path, {"x": raw.safetensors_of(found)}) / "x")


@pytest.mark.parametrize(
    "content",
    [
        raw.safetensors_of({"model.layers.0.mlp.experts.0.w1": raw.numbers([1])}),
        raw.safetensors_of({"routed_experts": raw.array(random_routes(3, 2, 16, 4))}),
        raw.npz_of({"experts": raw.array(random_routes(3, 2, 16, 4))}),
        json.dumps({"num_experts": 8, "model_type": "x"}).encode(),
        json.dumps(dict.fromkeys(["num_experts", "num_experts_per_token", *"abcdefgh"], 1)).encode(),
    ],
)
def test_look_alikes_are_not_claimed(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with DumpFile(tmp_path / "x") as dump:
        assert not tensorrt_llm.LAYOUTS[0].claims(look(dump))


@pytest.mark.parametrize("write_file", [raw.safetensors_of, raw.npz_of])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_damage_ends_in_a_refusal_or_a_valid_trace(tmp_path_factory, write_file, data):
    content = bytearray(write_file(tensors(steps_of())))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damage")
    path = write(folder / "s", {"rank0": bytes(content)})
    try:
        assert ingested(path if data.draw(st.booleans()) else path / "rank0").metadata.counts.rows
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


def test_the_command_line_refuses_in_one_line(tmp_path, capsys):
    files = {"meta_info.json": META, "rank0.safetensors": raw.safetensors_of(counts(steps_of()))}
    status, _, errors = expert_tier(capsys, "ingest", write(tmp_path / "s", files), "--data", tmp_path / "data")
    assert status == 1
    assert len(errors.strip().splitlines()) == 1
