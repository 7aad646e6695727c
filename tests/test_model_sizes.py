"""Sizes and numbers of experts from a model file: as a byte-level writer put them there, filled in if nobody says."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.dumps.blocks import MalformedDump
from pipeline.ingest import ingest, judge, trace_id_for
from pipeline.model_sizes import read_model
from replayer.checkpoints import MalformedCheckpoint
from replayer.trace import read_metadata
from schemas.files import DataFolder
from schemas.trace import ModelFile, UserMetadata
from tests.checkpoint_writers import filled, gguf_file, gguf_number, gguf_value, safetensors_file, text, write_sharded
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, tok_layers_dump
from tests.raw_open_format import open_jsonl

EXPERTS, HIDDEN, WIDE = 8, 32, 64
F16, Q8_0, Q4_0 = (1, 1, 2), (8, 32, 34), (2, 32, 18)
"""(ggml's number of a type, elements of a block, bytes of a block), as in the documents of GGUF."""


def gguf_model(down: list[tuple[int, int, int]], first: int = 1, experts: int = EXPERTS, nextn: int = 0) -> bytes:
    """Layers `first`.. with stacks of experts, gate and up in Q8_0, down as said; block_count counts dense ones too."""
    tensors = []
    for place, of_layer in enumerate(down):
        for part, (kind, block, size), axes in (
            ("gate", Q8_0, [HIDDEN, WIDE, experts]),
            ("up", Q8_0, [HIDDEN, WIDE, experts]),
            ("down", of_layer, [WIDE, HIDDEN, experts]),
        ):
            content = bytes(int(np.prod(axes)) // block * size)
            tensors.append((f"blk.{first + place}.ffn_{part}_exps.weight", axes, kind, content))
    tensors.append(("blk.0.ffn_gate.weight", [HIDDEN, WIDE], 1, bytes(2 * HIDDEN * WIDE)))
    values = [
        gguf_value("general.architecture", 8, text("tiny")),
        gguf_number("tiny.expert_count", experts),
        gguf_number("tiny.expert_used_count", 2),
        gguf_number("tiny.block_count", first + len(down) + nextn),
        *([gguf_number("tiny.nextn_predict_layers", nextn)] if nextn else []),
    ]
    return gguf_file(tensors, values)


def size_of(down: tuple[int, int, int]) -> int:
    """Bytes of one expert of `gguf_model`."""
    matrix = HIDDEN * WIDE
    return 2 * matrix // Q8_0[1] * Q8_0[2] + matrix // down[1] * down[2]


CONFIG = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 4, "first_k_dense_replace": 1,
    "hidden_size": HIDDEN, "moe_intermediate_size": WIDE, "intermediate_size": 999, "torch_dtype": "bfloat16",
}  # fmt: skip


def config(folder: Path, **changes: Any) -> Path:
    said = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said))
    return folder / "config.json"


def dump(folder: Path, layers: tuple[int, ...] = (1, 2, 3), **header: Any) -> Path:
    """An open dump that leaves everything open but what `header` says."""
    routes = random_routes(20, len(layers), EXPERTS, 2)
    records = [
        {"step_id": token, "layer_id": layer, "expert_ids": [routes[token][place]]}
        for token in range(20)
        for place, layer in enumerate(layers)
    ]
    (folder / "dump.jsonl").write_bytes(open_jsonl({"top_k": 2, **header}, records))
    return folder / "dump.jsonl"


def ingested(path: Path, model: ModelFile | None, **said: Any):
    return ingest(path, DataFolder(path.parent / "data"), UserMetadata(**said), model=model).metadata


# Reading


def test_gguf_is_measured_by_type_and_shape(tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0, F16, Q4_0]))
    model = read_model(tmp_path / "x.gguf")
    assert model.expert_bytes == [size_of(Q8_0), size_of(F16), size_of(Q4_0)]
    assert (model.kind, model.moe_layer_ids, model.num_experts, model.top_k_model) == ("gguf", [1, 2, 3], EXPERTS, 2)
    assert (model.hidden_layers, model.sizes_from) == (4, "tensors")


def shards(folder: Path, experts_of: dict[int, int], unequal: bool = False) -> Path:
    tensors = {}
    for layer, experts in experts_of.items():
        for expert in range(experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                # As mixed quantisation leaves it: one expert's matrices in 8 bits.
                dtype = "F8_E4M3" if unequal and expert == 1 else "BF16"
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                tensors[name] = filled(dtype, [HIDDEN, WIDE], expert)
        tensors[f"model.layers.{layer}.mlp.shared_experts.up_proj.weight"] = filled("BF16", [HIDDEN, WIDE], 0)
    write_sharded(folder, tensors, 3)
    return folder / "model.safetensors.index.json"


def test_safetensors_are_measured_through_their_index(tmp_path):
    index = shards(tmp_path, {1: EXPERTS, 2: EXPERTS, 3: EXPERTS})
    model = read_model(index)
    assert model.expert_bytes == [3 * HIDDEN * WIDE * 2] * 3
    assert (model.kind, model.hidden_layers, model.top_k_model) == ("safetensors", None, None)
    config(tmp_path)
    assert read_model(index) == read_model(tmp_path)
    assert (read_model(index).hidden_layers, read_model(index).top_k_model) == (4, 2)


def test_unequal_experts_have_a_size_each(tmp_path):
    model = read_model(shards(tmp_path, {1: EXPERTS, 3: EXPERTS}, unequal=True))
    whole = 3 * HIDDEN * WIDE * 2
    assert model.expert_bytes == [[whole, whole // 2] + [whole] * (EXPERTS - 2)] * 2
    metadata = ingested(dump(tmp_path, (1, 3)), model)
    assert metadata.expert_bytes == model.expert_bytes


def test_one_safetensors_file(tmp_path):
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": filled("BF16", [EXPERTS, HIDDEN, WIDE], 0)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(tensors))
    assert read_model(tmp_path / "model.safetensors").expert_bytes == [HIDDEN * WIDE * 2]


def test_a_safetensors_file_whose_length_looks_like_json_is_none(tmp_path):
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": filled("BF16", [EXPERTS, HIDDEN, WIDE], 0)}
    content = safetensors_file(tensors)
    header = content[8 : 8 + struct.unpack("<Q", content[:8])[0]]
    # Headers may end in blanks: a length that begins with the byte `{`.
    header = header.ljust(0x17B)
    (tmp_path / "m.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + content[8 + struct.unpack("<Q", content[:8])[0] :]
    )
    assert (tmp_path / "m.safetensors").read_bytes()[:1] == b"{"
    assert read_model(tmp_path / "m.safetensors").num_experts == EXPERTS


def test_config_gives_sizes_by_a_formula_and_says_so(tmp_path):
    model = read_model(config(tmp_path))
    assert model.expert_bytes == 3 * HIDDEN * WIDE * 2
    assert model.sizes_from == "formula: 3 × hidden_size 32 × moe_intermediate_size 64 × 2 bytes (bfloat16)"
    assert (model.moe_layer_ids, model.num_experts, model.top_k_model, model.hidden_layers) == ([1, 2, 3], 8, 2, 4)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [1, 2, 3]),
        ({"first_k_dense_replace": None}, [0, 1, 2, 3]),
        ({"moe_layer_freq": 2}, [2]),
        ({"moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
        ({"first_k_dense_replace": None, "decoder_sparse_step": 2}, [1, 3]),
        ({"first_k_dense_replace": None, "decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, [1, 3]),
        ({"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, [1, 2]),
        ({"interleave_moe_layer_step": 2}, None),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, None),
        ({"num_hidden_layers": None}, None),
    ],
)
def test_layers_with_experts_by_config(tmp_path, changes, layers):
    assert read_model(config(tmp_path, **changes)).moe_layer_ids == layers


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"moe_intermediate_size": None}, 3 * HIDDEN * 999 * 2),
        ({"torch_dtype": None, "dtype": "float32"}, 3 * HIDDEN * WIDE * 4),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "int3"}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, None),
        ({"hidden_size": "many"}, None),
    ],
)
def test_sizes_by_config(tmp_path, changes, size):
    model = read_model(config(tmp_path, **changes))
    assert model.expert_bytes == size
    assert model.sizes_from.startswith("unknown:" if size is None else "formula:")


def test_the_text_model_of_a_nested_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": CONFIG, "vision_config": {"num_hidden_layers": 9}})
    )
    assert read_model(tmp_path / "config.json") == read_model(config(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}", "no number of routed experts"),
        (b"{", "cannot be read"),
        (json.dumps(CONFIG | {"moe_layer_freq": [1]}).encode(), "no list of 4"),
        (json.dumps(CONFIG | {"num_hidden_layers": 10**9}).encode(), "1000000000 layers"),
        (
            json.dumps(CONFIG | {"num_experts_per_tok": 600, "n_routed_experts": 900}).encode(),
            "top_k_model: Input should be less",
        ),
        (json.dumps({"weight_map": {"a": "b"}}).encode(), "wanted under the name model.safetensors.index.json"),
        (gguf_model([Q8_0])[:60], "does not end within"),
        (b"something else", "neither GGUF nor safetensors"),
        (b"", "neither GGUF nor safetensors"),
    ],
)
def test_what_is_no_model_file(tmp_path, content, reason):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(MalformedCheckpoint) as caught:
        read_model(tmp_path / "x")
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 9}, ("n_routed_experts is 8", "num_experts is 9")),
        ({"num_local_experts": 16}, ("n_routed_experts is 8", "num_local_experts is 16")),
        ({"num_experts": 8}, ()),
        ({"num_experts": None, "num_local_experts": 0}, ()),
        ({"moe_topk": 3}, ("num_experts_per_tok is 2", "moe_topk is 3")),
        ({"moe_topk": [2, 2, 2]}, ()),
        ({"n_layer": 5}, ("num_hidden_layers is 4", "n_layer is 5")),
        ({"num_experts_per_tok": 9}, ("num_experts_per_tok is 9", "n_routed_experts is only 8")),
        ({"first_k_dense_replace": 4}, ("first_k_dense_replace is 4", "4 hidden layers")),
        ({"first_k_dense_replace": 61}, ("first_k_dense_replace is 61", "4 hidden layers")),
        ({"mlp_only_layers": [7]}, ("mlp_only_layers names 7", "4 hidden layers")),
        ({"mlp_only_layers": [1, 2, 3]}, ("first_k_dense_replace, mlp_only_layers leave none",)),
        ({"n_routed_experts": "8"}, ("n_routed_experts is '8'", "whole number")),
        ({"num_hidden_layers": -4}, ("num_hidden_layers is -4", "whole number")),
        ({"num_experts_per_tok": 2.0}, ("num_experts_per_tok is 2.0", "whole number")),
        ({"num_experts_per_tok": True}, ("num_experts_per_tok is True", "whole number")),
    ],
)
def test_a_config_that_contradicts_itself_names_both_fields(tmp_path, changes, words):
    path = config(tmp_path, **changes)
    if not words:
        assert read_model(path).num_experts == EXPERTS
        return
    with pytest.raises(MalformedCheckpoint) as caught:
        read_model(path)
    message = str(caught.value)
    assert all(word in message for word in (str(path), *words)), message
    assert "download the file again" in message


def test_a_config_beside_safetensors_that_contradicts_itself(tmp_path):
    index = shards(tmp_path, {1: EXPERTS, 2: EXPERTS, 3: EXPERTS})
    config(tmp_path, num_experts=9)
    with pytest.raises(MalformedCheckpoint, match="n_routed_experts is 8, but num_experts is 9"):
        read_model(index)
    config(tmp_path, num_experts_per_tok=9)
    with pytest.raises(MalformedCheckpoint, match="num_experts_per_tok is 9, but n_routed_experts is only 8"):
        read_model(index)


def test_more_experts_per_token_than_the_tensors_have(tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0], experts=1))
    with pytest.raises(MalformedCheckpoint, match="2 experts per token, but the layers have only 1"):
        read_model(tmp_path / "x.gguf")


def test_an_index_without_its_shards(tmp_path):
    index = shards(tmp_path, {0: 2})
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MalformedCheckpoint, match="model-00002-of-00003"):
        read_model(index)


def test_layers_with_different_numbers_of_experts(tmp_path):
    with pytest.raises(MalformedCheckpoint, match="layers of 2 to 4 experts"):
        read_model(shards(tmp_path, {0: 2, 1: 4}))


# Filling


def test_what_the_dump_leaves_open_is_filled_and_recorded(tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0, F16, Q4_0]))
    model = read_model(tmp_path / "x.gguf")
    path = dump(tmp_path)
    bare = ingested(path, None)
    assert {"num_experts", "expert_bytes", "top_k_model", "hidden_layers"} <= set(bare.unknowns)
    (tmp_path / "filled").mkdir()
    full = ingested(dump(tmp_path / "filled"), model)
    assert (full.experts_per_layer, full.num_experts_source) == ([EXPERTS] * 3, "declared")
    assert full.expert_bytes == [size_of(Q8_0), size_of(F16), size_of(Q4_0)]
    assert (full.top_k_model, full.hidden_layers) == (2, 4)
    assert full.model_file == model and full.user_metadata == UserMetadata()
    assert full.trace_id != bare.trace_id and full.source.sha256 == bare.source.sha256
    stored = read_metadata(DataFolder(tmp_path / "filled" / "data").trace_file(full.trace_id))
    assert stored == full
    check = next(check for check in full.checks if check.name == "model file agrees")
    assert (check.outcome, check.found) == ("ok", "gguf: 3 layers × 8 experts, sizes from tensors")
    assert str(tmp_path) not in full.model_file.model_dump_json()


def test_the_same_content_elsewhere_is_the_same_trace_and_other_content_another(tmp_path):
    path = dump(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.gguf").write_bytes(gguf_model([Q8_0] * 3))
    (tmp_path / "c.gguf").write_bytes(gguf_model([F16] * 3))
    models = [read_model(tmp_path / name) for name in ("a/x.gguf", "b/x.gguf", "c.gguf")]
    first, second, third = (ingested(path, model).trace_id for model in models)
    assert first == second != third
    assert first == ingest(path, DataFolder(tmp_path / "data"), UserMetadata(), model=models[0]).metadata.trace_id


def test_without_the_model_file_the_trace_made_with_it_is_found_and_parsed_again(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0] * 3))
    path, data = dump(tmp_path), DataFolder(tmp_path / "data")
    made = ingested(path, read_model(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").unlink()
    assert trace_id_for(path, data, UserMetadata()) == made.trace_id
    assert not ingest(path, data, UserMetadata()).is_new
    monkeypatch.setattr("pipeline.canonical.PARSER_VERSION", 99)
    again = ingest(path, data, UserMetadata(), trace_id=made.trace_id)
    assert again.is_new and again.metadata.model_file == made.model_file
    assert again.metadata.expert_bytes == made.expert_bytes


def test_layers_without_numbers_get_the_models(tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0, F16, Q4_0]))
    model = read_model(tmp_path / "x.gguf")
    for name, content in (
        ("a.npz", npz_dump(random_routes(20, 3, EXPERTS, 2))),
        ("a.jsonl", tok_layers_dump(random_routes(20, 3, EXPERTS, 2))),
    ):
        (tmp_path / name).write_bytes(content)
        metadata = ingested(tmp_path / name, model)
        assert (metadata.moe_layer_ids, metadata.layer_base) == ([1, 2, 3], "declared")
        assert metadata.expert_bytes == [size_of(Q8_0), size_of(F16), size_of(Q4_0)]
    (tmp_path / "four.npz").write_bytes(npz_dump(random_routes(20, 4, EXPERTS, 2)))
    with pytest.raises(MalformedDump, match="3 moe_layer_ids, the dump has 4 layers"):
        ingested(tmp_path / "four.npz", model)


def test_the_users_word_goes_first_and_differences_are_named(tmp_path):
    model = read_model(config(tmp_path))
    metadata = ingested(dump(tmp_path), model, num_experts=9, expert_bytes=77, top_k_model=4)
    assert (metadata.experts_per_layer[0], metadata.expert_bytes, metadata.top_k_model) == (9, [77] * 3, 4)
    check = next(check for check in metadata.checks if check.name == "model file agrees")
    assert check.outcome == "warn"
    assert "you say num_experts = 9, the model file 8" in check.found
    assert "you say top_k_model = 4, the model file 2" in check.found
    assert "sizes are those that you say" in check.found


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"num_experts": 16}, ("the dump has num_experts = 16", "the model file has num_experts = 8")),
        ({"hidden_layers": 5}, ("hidden_layers = 5", "hidden_layers = 4")),
        ({"top_k_model": 3}, ("top_k_model = 3", "top_k_model = 2")),
        ({"expert_bytes": 7}, ("experts of 7 bytes in layer 1", f"experts of {size_of(Q8_0)} bytes in layer 1")),
        ({"moe_layer_ids": [1, 2, 3], "expert_bytes": [size_of(Q8_0), 9, 9]},
         ("experts of 9 bytes in layer 2", f"experts of {size_of(F16)} bytes in layer 2")),
    ],
)  # fmt: skip
def test_a_contradiction_names_both(tmp_path, header, words):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0, F16, Q4_0]))
    with pytest.raises(MalformedDump) as caught:
        ingested(dump(tmp_path, **header), read_model(tmp_path / "x.gguf"))
    assert all(word in str(caught.value) for word in words), caught.value


def test_layers_that_the_model_has_no_experts_in(tmp_path):
    model = read_model(config(tmp_path))
    with pytest.raises(MalformedDump, match=r"routes of layers \[0\], the model file has experts in 3 layers, 1 to 3"):
        ingested(dump(tmp_path, (0, 1, 2)), model)


def test_some_layers_of_the_model_are_enough(tmp_path):
    assert ingested(dump(tmp_path, (2,)), read_model(config(tmp_path))).moe_layer_ids == [2]


def test_ids_beyond_the_models_experts(tmp_path):
    model = read_model(config(tmp_path, n_routed_experts=4))
    with pytest.raises(MalformedDump, match=r"ids run 0\.\.3"):
        ingested(dump(tmp_path), model)


def test_sizes_of_a_formula_give_way_to_those_of_the_dump(tmp_path):
    metadata = ingested(dump(tmp_path, expert_bytes=7), read_model(config(tmp_path)))
    assert metadata.expert_bytes == [7] * 3
    check = next(check for check in metadata.checks if check.name == "model file agrees")
    assert check.outcome == "warn"
    assert "the dump says experts of 7 bytes in layer 0, which are kept; by formula: 3 × hidden_size" in check.found


def test_engines_that_count_predicting_layers_agree(tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0] * 3, nextn=1))
    model = read_model(tmp_path / "x.gguf")
    assert (model.hidden_layers, model.predicting_layers) == (4, 1)
    assert ingested(dump(tmp_path, hidden_layers=5), model).hidden_layers == 5


def test_route_csv_and_gguf_of_one_model_agree(tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf_model([Q8_0, F16, Q4_0], first=0))
    sizes = [size_of(Q8_0), size_of(F16), size_of(Q4_0)]
    content = route_csv_dump([], random_routes(30, 3, EXPERTS, 2), experts=EXPERTS, expert_bytes=sizes)
    (tmp_path / "a.csv").write_bytes(content)
    metadata = ingested(tmp_path / "a.csv", read_model(tmp_path / "x.gguf"))
    assert next(check for check in metadata.checks if check.name == "model file agrees").outcome == "ok"


def test_the_command_line(tmp_path, capsys):
    path, model = dump(tmp_path), config(tmp_path)
    assert main(["inspect", str(path), "--model", str(model), "--json"]) == 0
    metadata = json.loads(capsys.readouterr().out)["metadata"]
    assert metadata["model_file"]["sizes_from"].startswith("formula:")
    assert metadata == judge(path, UserMetadata(), tmp_path, model=read_model(model)).metadata.model_dump(mode="json")
    data = ["--data", str(tmp_path / "data")]
    assert main(["ingest", str(path), "--model", str(tmp_path / "nothing"), *data]) == 1
    error = capsys.readouterr().err
    assert "no such file" in error and error.count("\n") == 1
    assert main(["ingest", str(dump(tmp_path, num_experts=16)), "--model", str(model), *data]) == 1
    error = capsys.readouterr().err
    assert "the model file has num_experts = 8" in error and error.count("\n") == 1
    assert main(["ingest", str(dump(tmp_path)), "--model", str(model), *data]) == 0
