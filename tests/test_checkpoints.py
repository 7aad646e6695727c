"""Checkpoints in place: which bytes of which file are which expert, and what is refused.

The oracle is always another reader: safetensors with torch, gguf's own, or the bytes that the test wrote itself.
"""

import argparse
import dataclasses
import json
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import replayer.pool as pool_module
from replayer.checkpoints import GGML_BLOCKS, INDEX, MalformedCheckpoint, read_header
from replayer.command import Parser, run
from replayer.machine import storage_of
from replayer.pool import (
    MANIFEST,
    PACKED,
    Checkpoint,
    MalformedPool,
    Pool,
    PoolMismatch,
    UnsuitableStorage,
    UnusablePlan,
    check_against_trace,
    check_files,
    map_pool,
    plan_mapped,
    plan_pool,
    pool_storages,
    read_pool,
    verify_pool,
)
from replayer.pool_cli import add_pool_commands
from schemas.documents import MappedPool, VerifiedPool
from tests.builders import make_trace
from tests.checkpoint_writers import (
    Parts,
    Tensors,
    filled,
    gguf_file,
    gguf_number,
    gguf_value,
    parts_of,
    safetensors_file,
    text,
    write_sharded,
)

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def mapped(model: Path, out: Path) -> Pool:
    # The folder of the tests may lie on anything.
    return map_pool(model, out, allow_unsuitable=True)


def failed(pool: Pool) -> dict[str, str]:
    return {one.name: one.found for one in verify_pool(pool, allow_unsuitable=True) if not one.held}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def of_own_tensors(tensors: dict[str, torch.Tensor], layers, experts: int, name: str, parts) -> Parts:
    return {
        (layer, expert): {part: raw(tensors[name.format(layer=layer, expert=expert) + part]) for part in parts}
        for layer in layers
        for expert in range(experts)
    }


COMMON = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
WEIGHTS = tuple(f"{part}.weight" for part in PROJECTIONS)
MLP = "model.layers.{layer}.mlp.experts.{expert}."
# configuration class, its values, MoE layers, experts, how names begin, and the parts of one expert.
MODELS = {
    "mixtral": (
        "MixtralConfig", {"num_local_experts": 3}, [0, 1], 3,
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.", ("w1.weight", "w2.weight", "w3.weight"),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts_per_tok": 2},
        [0, 1], 3, MLP, WEIGHTS,
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig", {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "head_dim": 8},
        [0, 1], 3, MLP, WEIGHTS,
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2}, [0, 1], 5, MLP, WEIGHTS),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"n_group": 1, "topk_group": 1}, [1], 4, MLP, WEIGHTS),
    "deepseek_v3": ("DeepseekV3Config", LATENT | {"n_group": 2, "topk_group": 1}, [1], 4, MLP, WEIGHTS),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
            "head_dim": 8,
        },
        [1], 4, MLP, WEIGHTS,
    ),
}  # fmt: skip


def saved(name: str, values: dict[str, object], folder: Path, **how: object) -> Path:
    import transformers

    config = getattr(transformers, name)(**COMMON, **values)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, **how)
    return folder


@pytest.mark.parametrize("shard", ["10GB", "6KB"])
@pytest.mark.parametrize("name", MODELS)
def test_extents_of_a_model_saved_by_transformers_gather_its_experts(tmp_path, name, shard):
    config, values, layers, experts, prefix, parts = MODELS[name]
    model = saved(config, values, tmp_path / "model", max_shard_size=shard)
    assert (model / INDEX).exists() == (shard == "6KB")
    pool = mapped(model, tmp_path / "pool")
    assert parts_of(pool) == of_own_tensors(loaded(model), layers, experts, prefix, parts)
    assert pool.checkpoint.scheme == f"safetensors {prefix}*"
    assert pool.moe_layer_ids == tuple(layers)
    assert failed(pool) == {}


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_transformers_5_fuses_are_slices_of_their_stacks(tmp_path, name):
    config, values, layers, experts, *_ = MODELS[name]
    model = saved(config, values, tmp_path / "model", save_original_format=False)
    pool = mapped(model, tmp_path / "pool")
    tensors = loaded(model)
    wanted = {
        (layer, expert): {
            part: raw(tensors[f"model.layers.{layer}.mlp.experts.{part}"][expert])
            for part in ("gate_up_proj", "down_proj")
        }
        for layer in layers
        for expert in range(experts)
    }
    assert parts_of(pool) == wanted
    assert failed(pool) == {}


def test_gpt_oss_has_stacks_of_weights_and_biases(tmp_path):
    values = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
    model = saved("GptOssConfig", values, tmp_path / "model")
    tensors = loaded(model)
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    wanted = {
        (layer, expert): {part: raw(tensors[f"model.layers.{layer}.mlp.experts.{part}"][expert]) for part in names}
        for layer in range(2)
        for expert in range(3)
    }
    assert parts_of(mapped(model, tmp_path / "pool")) == wanted


def slices_of(stacks: Tensors, layer: int, experts: int) -> Parts:
    """Equal slices of what the test wrote itself."""
    return {
        (layer, expert): {
            name.rpartition(".experts.")[2]: content[len(content) // experts * expert :][: len(content) // experts]
            for name, (_, _, content) in stacks.items()
        }
        for expert in range(experts)
    }


def test_gpt_oss_as_published_has_blocks_scales_and_biases(tmp_path):
    head = "model.layers.0.mlp.experts."
    stacks = {
        f"{head}gate_up_proj_blocks": filled("U8", [4, 6, 2, 16], 1),
        f"{head}gate_up_proj_scales": filled("U8", [4, 6, 2], 2),
        f"{head}gate_up_proj_bias": filled("BF16", [4, 6], 3),
        f"{head}down_proj_blocks": filled("U8", [4, 5, 1, 16], 4),
        f"{head}down_proj_scales": filled("U8", [4, 5, 1], 5),
        f"{head}down_proj_bias": filled("BF16", [4, 5], 6),
    }
    others = {"model.layers.0.mlp.router.weight": filled("BF16", [4, 64], 7)}
    write_sharded(tmp_path / "model", {**stacks, **others}, 2)
    assert parts_of(mapped(tmp_path / "model", tmp_path / "pool")) == slices_of(stacks, 0, 4)


def own_tensors(layers, experts: int, prefix: str, parts: dict[str, tuple[str, list[int]]]) -> tuple[Tensors, Parts]:
    """Tensors of random bytes for every expert, and what they are wanted as."""
    tensors: Tensors = {}
    wanted: Parts = {}
    for layer in layers:
        for expert in range(experts):
            for part, (dtype, shape) in parts.items():
                tensor = filled(dtype, shape, len(tensors))
                tensors[prefix.format(layer=layer, expert=expert) + part] = tensor
                wanted.setdefault((layer, expert), {})[part] = tensor[2]
    return tensors, wanted


FP8 = {
    part: shape
    for name, axes in (("gate_proj", [3, 5]), ("up_proj", [3, 5]), ("down_proj", [5, 3]))
    for part, shape in ((f"{name}.weight", ("F8_E4M3", axes)), (f"{name}.weight_scale_inv", ("F32", [1, 1])))
}
PACKED_INT4 = {
    part: shape
    for name, axes in (("gate_proj", [3, 8]), ("up_proj", [3, 8]), ("down_proj", [8, 3]))
    for part, shape in (
        (f"{name}.weight_packed", ("I32", axes)),
        (f"{name}.weight_scale", ("BF16", [3, 1])),
        (f"{name}.weight_shape", ("I64", [2])),
    )
}


def test_scales_of_fp8_belong_to_their_expert_and_layers_that_predict_are_left_out(tmp_path):
    tensors, wanted = own_tensors([3, 4, 61], 3, MLP, FP8)
    shared, _ = own_tensors([3, 4, 61], 1, "model.layers.{layer}.mlp.shared_experts.", FP8)
    aside, _ = own_tensors([0], 2, "mtp.layers.{layer}.mlp.experts.{expert}.", FP8)
    write_sharded(tmp_path / "model", {**tensors, **shared, **aside}, 3)
    (tmp_path / "model" / "config.json").write_text('{"num_hidden_layers": 61, "n_routed_experts": 3}')
    pool = mapped(tmp_path / "model", tmp_path / "pool")
    assert parts_of(pool) == {place: parts for place, parts in wanted.items() if place[0] < 61}
    left_out = {one.reason: (one.tensors, one.bytes) for one in pool.checkpoint.left_out}
    each = 3 * (15 + 4)
    assert left_out == {
        "layer 61 predicts further tokens, as config.json has num_hidden_layers 61": (3 * 6, 3 * each),
        "mtp predict further tokens": (2 * 6, 2 * each),
    }
    assert failed(pool) == {}


def test_packed_weights_of_compressed_tensors_lie_with_their_expert_below_any_prefix(tmp_path):
    for number, prefix in enumerate(
        ("language_model.model.layers.{layer}.mlp.experts.{expert}.", "transformer.h.{layer}.moe.experts.{expert}.")
    ):
        tensors, wanted = own_tensors([1, 2], 3, prefix, PACKED_INT4)
        model = tmp_path / str(number)
        write_sharded(model, tensors, 2)
        (model / "config.json").write_text('{"text_config": {"num_hidden_layers": 3, "n_routed_experts": 3}}')
        pool = mapped(model, tmp_path / f"pool{number}")
        assert parts_of(pool) == wanted
        assert pool.checkpoint.scheme == f"safetensors {prefix}*"


def test_a_value_for_all_experts_is_left_out_and_named(tmp_path):
    head = "model.layers.0.feed_forward.experts."
    stacks = {f"{head}gate_up_proj": filled("F8_E4M3", [2, 4, 6], 0), f"{head}down_proj": filled("F32", [2, 3, 4], 1)}
    scale = {f"{head}gate_up_proj_scale": filled("F32", [], 2)}
    (tmp_path / "one.safetensors").write_bytes(safetensors_file({**stacks, **scale}))
    pool = mapped(tmp_path / "one.safetensors", tmp_path / "pool")
    assert parts_of(pool) == slices_of(stacks, 0, 2)
    (left_out,) = pool.checkpoint.left_out
    assert (left_out.tensors, left_out.bytes) == (1, 4)
    assert "gate_up_proj_scale" in left_out.reason
    assert failed(pool) == {}


def test_experts_may_have_any_size_and_place_and_share_pages(tmp_path):
    tensors, wanted = own_tensors([0], 4, MLP, {"w.weight": ("U8", [1]), "v.weight": ("U8", [7])})
    tensors |= {MLP.format(layer=1, expert=0) + "w.weight": filled("U8", [4099], 99)}
    (tmp_path / "odd.safetensors").write_bytes(safetensors_file(tensors))
    mapped(tmp_path / "odd.safetensors", tmp_path / "pool")
    pool = read_pool(tmp_path / "pool")
    assert np.array_equal(pool.object_bytes, [8, 8, 8, 8, 4099])
    assert pool.experts_per_layer == (4, 1)
    assert parts_of(pool) == {**wanted, (1, 0): {"w.weight": tensors[MLP.format(layer=1, expert=0) + "w.weight"][2]}}


def test_links_of_a_hugging_face_cache_are_followed_and_real_paths_are_stored(tmp_path):
    tensors, wanted = own_tensors([0, 1], 3, MLP, {"w.weight": ("BF16", [3, 5])})
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    write_sharded(snapshot, tensors, 2)
    (snapshot / "config.json").write_text('{"num_experts": 3}')
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(Path("../../blobs") / f"{number:064x}")
    pool = mapped(snapshot, tmp_path / "pool")
    assert {path.parent for path in pool.paths} == {blobs.resolve()}
    assert not any(path.is_symlink() for path in pool.paths)
    assert parts_of(pool) == wanted
    assert [path.name for path in (tmp_path / "pool").iterdir()] == [MANIFEST]
    snapshot.rename(tmp_path / "elsewhere")
    assert failed(read_pool(tmp_path / "pool")) == {}


def block_bytes(kind: gguf.GGMLQuantizationType, experts: int, rows: int, columns: int, seed: int) -> np.ndarray:
    elements, length = gguf.GGML_QUANT_SIZES[kind]
    shape = (experts, rows, columns // elements * length)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_gguf(path: Path, *, split: int = 0) -> None:
    """Three layers of another quantisation each and in each part, biases, shared experts, one layer that predicts."""
    q = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "glm4moe", split_max_tensors=split)
    writer.add_block_count(4)
    writer.add_uint32("glm4moe.expert_count", 3)
    writer.add_uint32("glm4moe.nextn_predict_layers", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "", "ü"] * 50)
    writer.add_array("tokenizer.ggml.scores", [0.5] * 200)
    writer.add_string("tokenizer.chat_template", "x" * 70_000)
    kinds = [(q.Q4_K, q.Q4_K, q.Q6_K), (q.Q4_K, q.Q5_K, q.Q8_0), (q.MXFP4, q.IQ2_XXS, q.BF16), (q.Q4_K,) * 3]
    for layer, of_parts in enumerate(kinds):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(5, dtype=np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", np.ones((3, 5), dtype=np.float32))
        writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", np.ones(3, dtype=np.float32))
        for number, (part, kind) in enumerate(zip(("gate", "up", "down"), of_parts, strict=True)):
            content = block_bytes(kind, 3, 2, 512 if part == "down" else 256, layer * 10 + number)
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", content, raw_dtype=kind)
            shared = block_bytes(kind, 1, 2, 256, 0)[0]
            writer.add_tensor(f"blk.{layer}.ffn_{part}_shexp.weight", shared, raw_dtype=kind)
        bias = np.random.default_rng(layer).random((3, 7), dtype=np.float32)
        writer.add_tensor(f"blk.{layer}.ffn_down_exps.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def experts_by_gguf(paths: list[Path], layers: int) -> Parts:
    wanted: Parts = {}
    for path in paths:
        for tensor in gguf.GGUFReader(path).tensors:
            words = tensor.name.split(".")
            if words[0] == "blk" and words[2].endswith("_exps") and int(words[1]) < layers:
                for expert, content in enumerate(tensor.data):
                    wanted.setdefault((int(words[1]), expert), {})[".".join(words[2:])] = content.tobytes()
    return wanted


@pytest.mark.parametrize("split", [0, 7, 1])
def test_stacks_of_gguf_are_cut_into_experts_whatever_their_quantisation(tmp_path, split):
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "tiny.gguf", split=split)
    files = sorted((tmp_path / "model").iterdir())
    assert (len(files) > 1) == (split > 0)
    wanted = experts_by_gguf(files, 3)
    for number, named in enumerate(files[:: max(len(files) // 2, 1)]):
        pool = mapped(named, tmp_path / f"pool{number}")
        assert parts_of(pool) == wanted
        assert len(set(pool.object_bytes.tolist())) == 3
        assert "block_count is 4 and glm4moe.nextn_predict_layers 1" in pool.checkpoint.left_out[0].reason
        assert failed(pool) == {}


def test_split_gguf_is_found_behind_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_gguf(tmp_path / "blobs" / "tiny.gguf", split=7)
    wanted = experts_by_gguf(sorted((tmp_path / "blobs").iterdir()), 3)
    for number, path in enumerate(sorted((tmp_path / "blobs").iterdir())):
        path.rename(tmp_path / "blobs" / f"blob{number}")
        (tmp_path / "snapshot" / path.name).symlink_to(tmp_path / "blobs" / f"blob{number}")
    pool = mapped(next((tmp_path / "snapshot").iterdir()), tmp_path / "pool")
    assert parts_of(pool) == wanted
    assert all(path.name.startswith("blob") for path in pool.paths)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_a_gguf_file_written_by_hand_is_read_fused_and_of_old_names(tmp_path, version, alignment):
    values = [
        gguf_value("general.architecture", 8, text("llama")),
        gguf_number("llama.expert_count", 2),
        gguf_number("llama.block_count", 2),
        gguf_number("general.alignment", alignment),
        gguf_value("flags", 9, struct.pack("<IQ3?", 7, 3, True, False, True)),
        gguf_value("words", 9, struct.pack("<IQ", 8, 2) + text("one") + text("two")),
        gguf_value("ratio", 6, struct.pack("<f", 0.5)),
        gguf_value("big", 10, struct.pack("<Q", 2**63)),
    ]
    fused = np.random.default_rng(0).bytes(2 * 6 * 32 // 32 * 34)
    down = np.random.default_rng(1).bytes(2 * 5 * 3 * 4)
    olds = {name: np.random.default_rng(2).bytes(4 * 3 * 2) for name in ("gate.0", "up.0", "gate.1", "up.1")}
    tensors = [
        ("token_embd.weight", [3, 3], 0, bytes(36)),
        ("blk.0.ffn_gate_up_exps.weight", [32, 6, 2], 8, fused),
        ("blk.0.ffn_down_exps.weight", [3, 5, 2], 0, down),
        ("blk.0.ffn_norm_exps.weight", [4], 0, bytes(16)),
        ("blk.1.ffn_gate.weight", [4, 4], 0, bytes(64)),
        *((f"blk.1.ffn_{name}.weight", [4, 3], 1, content) for name, content in olds.items()),
    ]
    path = tmp_path / "hand.gguf"
    path.write_bytes(gguf_file(tensors, values, alignment=alignment, version=version))
    wanted = {
        **{
            (0, expert): {
                "ffn_gate_up_exps.weight": fused[expert * len(fused) // 2 :][: len(fused) // 2],
                "ffn_down_exps.weight": down[expert * 60 :][:60],
            }
            for expert in range(2)
        },
        **{(1, one): {f"ffn_{part}.weight": olds[f"{part}.{one}"] for part in ("gate", "up")} for one in range(2)},
    }
    pool = mapped(path, tmp_path / "pool")
    assert parts_of(pool) == wanted
    assert failed(pool) == {}


def test_sizes_of_ggml_types_are_those_of_gguf():
    assert {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()} == GGML_BLOCKS


def test_headers_agree_with_the_readers_of_safetensors_and_gguf(tmp_path):
    tensors = {name: torch.rand(axes) for name, axes in (("a", [3, 4]), ("b", [0, 5]), ("c", []), ("d", [7]))}
    save_file(tensors, tmp_path / "a.safetensors")
    found = {one.name: one for one in read_header(tmp_path / "a.safetensors").tensors}
    content = (tmp_path / "a.safetensors").read_bytes()
    assert {name: one.shape for name, one in found.items()} == {name: tuple(one.shape) for name, one in tensors.items()}
    for name, one in found.items():
        assert content[one.offset_bytes :][: one.length_bytes] == raw(tensors[name])
    write_gguf(tmp_path / "a.gguf")
    for one, other in zip(
        read_header(tmp_path / "a.gguf").tensors, gguf.GGUFReader(tmp_path / "a.gguf").tensors, strict=True
    ):
        assert (one.name, one.offset_bytes, one.length_bytes) == (other.name, other.data_offset, other.n_bytes)
        assert one.shape == tuple(reversed(other.shape.tolist()))


def simple(experts: int = 2, layers=(0, 1)) -> Tensors:
    return own_tensors(layers, experts, MLP, {"w.weight": ("U8", [3, 2])})[0]


def header_file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(begin: object, end: object, shape: object = (6,), dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


EXPERT = MLP.format(layer=0, expert=0) + "w.weight"
NEXT = MLP.format(layer=0, expert=1) + "w.weight"
GGUF_STACK = ("blk.0.ffn_up_exps.weight", [4, 3, 2], 0, bytes(96))


def one_file(content: bytes, name: str = "model.safetensors"):
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def json_header(entries: dict[str, object], data: int = 64):
    return one_file(header_file(json.dumps(entries).encode(), bytes(data)))


def folder_of(
    tensors: Tensors, *, shards: int = 2, config: str | None = None, change=None, without: tuple[int, ...] = ()
):
    def write(folder: Path) -> Path:
        paths = write_sharded(folder, tensors, shards)
        if config is not None:
            (folder / "config.json").write_text(config)
        if change is not None:
            index = json.loads((folder / INDEX).read_text())
            changed = change(index)
            (folder / INDEX).write_text(changed if isinstance(changed, str) else json.dumps(changed))
        for one in without:
            paths[one].unlink()
        return folder

    return write


def without_index(writer):
    def write(folder: Path) -> Path:
        model = writer(folder)
        (folder / INDEX).unlink()
        return model

    return write


def split_gguf(numbers: list[tuple[int, int]], missing: tuple[int, ...] = ()):
    def write(folder: Path) -> Path:
        for place, (number, count) in enumerate(numbers):
            values = [gguf_number("split.no", number), gguf_number("split.count", count)]
            stack = (f"blk.{place}.ffn_up_exps.weight", [4, 3, 2], 0, bytes(96))
            if place not in missing:
                (folder / f"a-{place + 1:05}-of-{len(numbers):05}.gguf").write_bytes(gguf_file([stack], values))
        return folder / f"a-00001-of-{len(numbers):05}.gguf"

    return write


def text_file(name: str):
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(b"anything")
        return folder

    return write


def gguf_header(count: int = 0, values: int = 0, rest: bytes = b"", version: int = 3):
    return one_file(b"GGUF" + struct.pack("<IQQ", version, count, values) + rest, "a.gguf")


def changed(index: dict[str, object], tensor: str, file: str | None) -> dict[str, object]:
    names = dict(index["weight_map"])
    names[tensor] = file or "model-00001-of-00002.safetensors"
    return index | {"weight_map": names}


BROKEN = {
    "no such model": (lambda folder: folder / "nowhere", "no such file or folder"),
    "an empty folder": (lambda folder: folder, "holds no safetensors file"),
    "a pickle": (text_file("pytorch_model.bin"), "is a pickle, which is not read"),
    "a folder of gguf": (text_file("a.gguf"), "name one of its GGUF files"),
    "neither format": (one_file(b"{}"), "neither GGUF nor safetensors"),
    "an empty file": (one_file(b""), "neither GGUF nor safetensors"),
    "a header longer than the file": (one_file(struct.pack("<Q", 1000) + b"{}"), "header of up to"),
    "a header beyond the bound": (one_file(struct.pack("<Q", 100_000_001) + b"{}"), "header of up to 100000000"),
    "no JSON": (one_file(header_file(b"{nope}")), "cannot be read"),
    "no UTF-8": (one_file(header_file(b'{"\xff": 1}')), "cannot be read"),
    "JSON of no object": (one_file(header_file(b"[1, 2]")), "is no object"),
    "JSON of great depth": (one_file(header_file(b"[" * 100_000)), "cannot be read"),
    "a number of many digits": (one_file(header_file(b'{"a": 1' + b"0" * 9000 + b"}")), "cannot be read"),
    "a tensor twice": (one_file(header_file(b'{"a": {}, "a": {}}')), "names 'a' twice"),
    "no dtype": (json_header({EXPERT: {"shape": [1], "data_offsets": [0, 1]}}), "has no dtype"),
    "offsets that descend": (json_header({EXPERT: entry(6, 0)}), "ascending data_offsets"),
    "an offset below zero": (json_header({EXPERT: entry(-1, 5)}), "ascending data_offsets"),
    "an offset that is a fraction": (json_header({EXPERT: entry(0.0, 6)}), "ascending data_offsets"),
    "an offset that is true": (json_header({EXPERT: entry(0, True, [1])}), "ascending data_offsets"),
    "a shape below zero": (json_header({EXPERT: entry(0, 6, [-6])}), "ascending data_offsets"),
    "a shape of other bytes": (json_header({EXPERT: entry(0, 6, [7])}), "has 6 bytes, wanted 7"),
    "a shape without end": (json_header({EXPERT: entry(0, 6, [2**60] * 999)}), "has 6 bytes, wanted"),
    "outside of the file": (json_header({EXPERT: entry(0, 65, [65])}), "ends at byte .* the file has"),
    "far outside of the file": (json_header({EXPERT: entry(2**70, 2**70 + 6)}), "ends at byte"),
    "overlapping": (json_header({EXPERT: entry(0, 6), NEXT: entry(5, 11)}), "share bytes"),
    "a part of several": (
        lambda folder: folder_of(simple())(folder) / "model-00002-of-00002.safetensors",
        "one of 2 files of a checkpoint; name their folder",
    ),
    "a dense model": (
        one_file(safetensors_file({"model.layers.0.mlp.up_proj.weight": filled("U8", [2, 2], 0)})),
        "no tensor of a routed expert .* begin with 'model.layers.0.mlp.up_proj.weight'",
    ),
    "no expert 1": (
        one_file(safetensors_file({name: one for name, one in simple(3).items() if "experts.1" not in name})),
        "layer 0 has experts up to 2, but no tensor of expert 1",
    ),
    "no last expert": (folder_of(simple(3), config='{"num_experts": 4}'), "layer 0 has 3 experts, but config.json has"),
    "no last expert of one layer": (
        folder_of(dict(list(simple(3).items())[:-1]), config='{"num_experts": 3}'),
        "layer 1 has 2 experts, but config.json has num_experts 3",
    ),
    "an expert without a part": (
        one_file(safetensors_file({**simple(), EXPERT.replace("w.", "v."): filled("U8", [1], 0)})),
        "layer 0, expert 1 has no v.weight, which expert 0 has",
    ),
    "an expert number without end": (
        one_file(safetensors_file({MLP.format(layer=0, expert=99999) + "w": filled("U8", [1], 0)})),
        "number '99999', wanted 0 to 65534",
    ),
    "a layer number with zeros": (
        one_file(safetensors_file({MLP.format(layer="007", expert=1) + "w": filled("U8", [1], 0)})),
        "number '007'",
    ),
    "a name that is no ASCII": (
        one_file(header_file(json.dumps({EXPERT + "\ud800": entry(0, 6)}).encode(), bytes(6))),
        "of ASCII",
    ),
    "experts of two decoders": (
        one_file(safetensors_file({**simple(), "talker." + EXPERT: filled("U8", [3, 2], 0)})),
        "both experts of the same numbers",
    ),
    "stacks of two numbers": (
        one_file(
            safetensors_file(
                {
                    "model.layers.0.mlp.experts.up_proj": filled("U8", [2, 3, 4], 0),
                    "model.layers.0.mlp.experts.down_proj": filled("U8", [3, 3, 4], 0),
                }
            )
        ),
        "layer 0 has 2 experts, but .*down_proj",
    ),
    "a stack that is none": (
        one_file(safetensors_file({"model.layers.0.mlp.experts.w1": filled("U8", [6, 4], 0)})),
        "is no stack of matrices",
    ),
    "a stack beside other experts": (
        one_file(safetensors_file({**simple(), "model.layers.0.mlp.experts.b": filled("U8", [3, 1], 0)})),
        "layer 0 has 2 experts, but",
    ),
    "an expert of no bytes": (one_file(safetensors_file({EXPERT: ("U8", [0], b"")})), "an expert of 0 bytes"),
    "a missing shard": (folder_of(simple(), without=(1,)), "model-00002-of-00002.safetensors: no such file"),
    "a missing shard without an index": (
        without_index(folder_of(simple(), without=(1,))),
        "is one of 2 files, of which model-00002-of-00002.safetensors is missing",
    ),
    "an index that leaves the folder": (
        folder_of(simple(), change=lambda index: changed(index, EXPERT, "../secret.safetensors")),
        "names the file '../secret.safetensors'",
    ),
    "an index with an absolute path": (
        folder_of(simple(), change=lambda index: changed(index, EXPERT, "/etc/passwd")),
        "names the file '/etc/passwd'",
    ),
    "an index of another shard": (
        folder_of(simple(), change=lambda index: changed(index, NEXT, None)),
        "is not in model-00001-of-00002.safetensors, where the index has it",
    ),
    "an index of a tensor that is nowhere": (
        folder_of(simple(), change=lambda index: changed(index, "lm_head", None)),
        "'lm_head' is not in",
    ),
    "an index of nothing": (folder_of(simple(), change=lambda _: {"weight_map": {}}), "names no tensor"),
    "an index without a map": (folder_of(simple(), change=lambda _: {}), "no weight_map"),
    "an index of numbers": (folder_of(simple(), change=lambda _: {"weight_map": {"a": 1}}), "no weight_map"),
    "an index that is no JSON": (folder_of(simple(), change=lambda _: "{"), "cannot be read"),
    "a config that is no JSON": (folder_of(simple(), config="{"), "config.json: JSON that cannot be read"),
    "a tensor in two shards": (
        without_index(
            lambda folder: [
                write_sharded(folder, simple(), 2),
                (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors_file(simple())),
                folder,
            ][-1]
        ),
        "is in .* as well",
    ),
    "big-endian gguf": (gguf_header(version=3 << 24), "big-endian"),
    "gguf version 1": (gguf_header(version=1), "GGUF version 1"),
    "a gguf that ends": (one_file(b"GGUF\3\0\0\0", "a.gguf"), "does not end within"),
    "tensors without end": (gguf_header(count=2**63), "9223372036854775808 tensors"),
    "values without end": (gguf_header(values=2**63), "does not end within"),
    "a name without end": (gguf_header(values=1, rest=struct.pack("<Q", 2**62)), "a name of"),
    "a text without end": (gguf_header(0, 1, gguf_value("a", 8, struct.pack("<Q", 2**62))), "does not end within"),
    "an array without end": (
        gguf_header(0, 1, gguf_value("a", 9, struct.pack("<IQ", 4, 2**62))),
        "does not end within",
    ),
    "texts without end": (gguf_header(0, 1, gguf_value("a", 9, struct.pack("<IQ", 8, 2**62))), "does not end within"),
    "an array of arrays": (gguf_header(0, 1, gguf_value("a", 9, struct.pack("<IQ", 9, 1))), "an array of type 9"),
    "a value of no type": (gguf_header(0, 1, gguf_value("a", 13, b"")), "a value of type 13"),
    "a type of no size": (
        one_file(gguf_file([("blk.0.ffn_up_exps.weight", [4, 3, 2], 99, b"")]), "a.gguf"),
        "ggml type 99",
    ),
    "rows of half a block": (
        one_file(gguf_file([("blk.0.ffn_up_exps.weight", [48, 3, 2], 2, b"")]), "a.gguf"),
        "rows of 48, wanted blocks of 32",
    ),
    "axes without end": (
        one_file(gguf_file([("blk.0.ffn_up_exps.weight", [2**63] * 4, 0, b"")]), "a.gguf"),
        "an end within",
    ),
    "nine axes": (one_file(gguf_file([("a", [1] * 9, 0, b"")]), "a.gguf"), "of 9 axes"),
    "an alignment of zero": (
        one_file(gguf_file([GGUF_STACK], [gguf_number("general.alignment", 0)]), "a.gguf"),
        "alignment 0",
    ),
    "a gguf cut short": (one_file(gguf_file([GGUF_STACK])[:-1], "a.gguf"), "an end within"),
    "a gguf tensor twice": (one_file(gguf_file([GGUF_STACK, GGUF_STACK]), "a.gguf"), "twice"),
    "gguf of other experts than it says": (
        one_file(
            gguf_file(
                [GGUF_STACK], [gguf_value("general.architecture", 8, text("m")), gguf_number("m.expert_count", 8)]
            ),
            "a.gguf",
        ),
        "layer 0 has 2 experts, but m.expert_count is 8",
    ),
    "gguf without experts": (
        one_file(gguf_file([("blk.0.ffn_up.weight", [4, 3], 0, bytes(48))]), "a.gguf"),
        "no tensor of a routed expert",
    ),
    "a missing part of gguf": (split_gguf([(0, 3), (1, 3), (2, 3)], missing=(1,)), "a-00002-of-00003.gguf: no such"),
    "swapped parts of gguf": (split_gguf([(1, 2), (0, 2)]), "says that it is part 1 of 2"),
    "a part of another gguf": (split_gguf([(0, 2), (1, 3)]), "says that it is part 1 of 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_mapped_is_one_line_and_leaves_nothing(tmp_path, case, capsys):
    write, named = BROKEN[case]
    (tmp_path / "model").mkdir()
    model = write(tmp_path / "model")
    with pytest.raises(MalformedCheckpoint, match=named) as caught:
        mapped(model, tmp_path / "pool")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "pool").exists()
    status, out, err = replayer_pool(capsys, "map", model, "--out", tmp_path / "pool")
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "pool").exists()


def test_numbers_names_and_repeats_without_end_are_one_line(tmp_path, capsys):
    def refused(said):
        status, out, err = replayer_pool(capsys, "map", tmp_path, "--out", tmp_path / "pool")
        assert (status, out, len(err.splitlines())) == (1, "", 1)
        assert said in err
        assert len(err) < 1000

    def write(header):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))

    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    shape = "1" + "0" * 400
    write(f'{{"{name}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,64]}}}}'.encode())
    refused("has 64 bytes, wanted 1180591620717411303424 for U8")
    write(json.dumps({f"{name}\n\x1b[31mX": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode())
    refused(r"'model.layers.0.mlp.experts.0.up_proj.weight\n\x1b[31mX': wanted a name of up to")
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    write(f'{{{keys},"299999":0}}'.encode())
    refused("names '299999' twice")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "\ud800.safetensors"}}))
    refused("a path that is not UTF-8")


def test_overlapping_tensors_of_gguf_are_refused(tmp_path):
    content = bytearray(gguf_file([GGUF_STACK, ("b", [4, 3, 2], 0, bytes(96))]))
    # The second tensor's offset, the last number of its row.
    at = content.index(text("b")) + len(text("b")) + 4 + 24 + 4
    content[at : at + 8] = struct.pack("<Q", 32)
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(MalformedCheckpoint, match="share bytes"):
        read_header(tmp_path / "a.gguf")


def test_a_pipe_or_a_link_in_a_circle_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(MalformedCheckpoint, match="no regular file"):
        plan_mapped(tmp_path)
    (tmp_path / "a.gguf").symlink_to("a.gguf")
    with pytest.raises(MalformedCheckpoint, match=r"a\.gguf: too many levels"):
        plan_mapped(tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@given(data=st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_header_says_it_is_mapped_within_its_file_or_refused(tmp_path, kind, data):
    stack = [("blk.0.ffn_up_exps.weight", [4, 3, 2], 0, bytes(96)), ("a", [5], 1, bytes(10))]
    values = [gguf_number("general.alignment", 32), gguf_value("w", 9, struct.pack("<IQ", 8, 1) + text("one"))]
    content = bytearray(gguf_file(stack, values) if kind == "gguf" else safetensors_file(simple()))
    head = content.index(bytes(30)) if kind == "gguf" else len(content) - 24
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, head - 1))
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    path = tmp_path / f"fuzzed.{kind}"
    path.write_bytes(content)
    try:
        plan = plan_mapped(path)
    except MalformedCheckpoint as error:
        assert str(path) in str(error) or "tensor" in str(error)
    else:
        ends = plan.extent_offset_bytes + plan.extent_length_bytes
        assert np.all(plan.extent_offset_bytes >= 0)
        assert np.all(ends <= len(content))
        order = np.argsort(plan.extent_offset_bytes)
        assert np.all(plan.extent_offset_bytes[order][1:] >= ends[order][:-1])


@given(
    layers=st.lists(st.integers(0, 300), min_size=1, max_size=4, unique=True),
    experts=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shards=st.integers(1, 3),
    data=st.data(),
)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_tensors_and_of_shards_does_not_matter(tmp_path_factory, layers, experts, sizes, shards, data):
    folder = tmp_path_factory.mktemp("shuffled")
    tensors, wanted = own_tensors(layers, experts, MLP, {f"p{n}.w": ("U8", [size]) for n, size in enumerate(sizes)})
    names = data.draw(st.permutations(list(tensors)))
    write_sharded(folder / "model", {name: tensors[name] for name in names}, min(shards, len(names)))
    mapped(folder / "model", folder / "pool")
    pool = read_pool(folder / "pool")
    assert parts_of(pool) == wanted
    assert failed(pool) == {}


def small_model(folder: Path) -> tuple[Path, Parts]:
    tensors, wanted = own_tensors([0, 2], 3, MLP, {"w.weight": ("BF16", [3, 5]), "v.weight": ("U8", [9])})
    write_sharded(folder / "model", tensors, 2)
    return folder / "model", wanted


def test_what_is_read_back_is_what_was_mapped(tmp_path):
    model, wanted = small_model(tmp_path)
    pool = mapped(model, tmp_path / "pool")
    again = read_pool(tmp_path / "pool")
    assert parts_of(again) == wanted
    assert again.paths == tuple(Path(name) for name in pool.files)
    assert (again.pool_id, again.checkpoint, again.content, again.layout) == (
        pool.pool_id,
        pool.checkpoint,
        None,
        "mapped",
    )
    for one in dataclasses.fields(pool):
        assert np.array_equal(getattr(pool, one.name), getattr(again, one.name))


def test_a_mapped_pool_is_left_as_it_is_and_another_is_not_written_over_it(tmp_path):
    model, _ = small_model(tmp_path)
    mapped(model, tmp_path / "pool")
    before = (tmp_path / "pool" / MANIFEST).stat().st_mtime_ns
    mapped(model, tmp_path / "pool")
    assert (tmp_path / "pool" / MANIFEST).stat().st_mtime_ns == before
    model.rename(tmp_path / "moved")
    with pytest.raises(PoolMismatch, match=r"holds a finished pool with file .*model.*, wanted .*moved"):
        mapped(tmp_path / "moved", tmp_path / "pool")
    with pytest.raises(PoolMismatch, match="is no pool"):
        mapped(tmp_path / "moved", tmp_path / "moved")
    assert {path.name for path in (tmp_path / "pool").iterdir()} == {MANIFEST}


def test_damage_to_a_mapped_file_is_found_and_the_file_named(tmp_path):
    model, _ = small_model(tmp_path)
    pool = mapped(model, tmp_path / "pool")
    check_files(pool)
    first, second = pool.paths
    whole = first.read_bytes()
    # One digit of an offset in the header.
    place = whole.index(b"data_offsets") + whole[whole.index(b"data_offsets") :].index(b"[0,") + 1
    first.write_bytes(whole[:place] + b"9" + whole[place + 1 :])
    found = failed(pool)
    assert set(found) == {"header"}
    assert "model-00001-of-00002.safetensors" in found["header"]
    # The same tensors in another order are other places.
    shuffled, _ = own_tensors([0, 2], 3, MLP, {"w.weight": ("BF16", [3, 5]), "v.weight": ("U8", [9])})
    names = list(shuffled)[::2]
    first.write_bytes(safetensors_file({name: shuffled[name] for name in [*names[1:], names[0]]}))
    assert "bytes at byte" in failed(pool)["header"]
    assert "more differ" in failed(pool)["header"]
    first.write_bytes(whole + b"more")
    assert f"{len(whole) + 4} bytes, wanted {len(whole)}" in failed(pool)["length"]
    with pytest.raises(MalformedPool, match="map the checkpoint again"):
        check_files(pool)
    first.write_bytes(whole)
    assert failed(pool) == {}
    second.unlink()
    assert "No such file" in failed(pool)["length"]
    with pytest.raises(OSError, match="No such file"):
        check_files(pool)
    second.symlink_to(first)
    assert "no regular file" in failed(pool)["length"]
    with pytest.raises(MalformedPool, match="no regular file"):
        check_files(pool)


def test_a_link_that_came_on_the_way_to_a_file_is_refused(tmp_path):
    model, _ = small_model(tmp_path)
    pool = mapped(model, tmp_path / "pool")
    model.rename(tmp_path / "other")
    model.symlink_to(tmp_path / "other")
    assert "a link on its way" in failed(pool)["length"]
    with pytest.raises(MalformedPool, match="a link on its way"):
        check_files(pool)


def test_a_hole_in_a_mapped_file_is_found(tmp_path):
    tensors = {EXPERT: filled("U8", [2**18], 0)}
    whole = safetensors_file(tensors)
    path = tmp_path / "one.safetensors"
    with path.open("wb") as file:
        file.write(whole[: 2**12])
        file.truncate(len(whole))
    if path.stat().st_blocks * 512 >= len(whole):
        pytest.skip("this file system makes no holes")
    pool = mapped(path, tmp_path / "pool")
    assert "a hole at byte" in failed(pool)["holes"]
    with pytest.raises(MalformedPool, match="a hole at byte"):
        check_files(pool)


def test_a_checkpoint_on_two_devices_is_judged_file_by_file(tmp_path):
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    model, wanted = small_model(tmp_path)
    first, second = sorted(model.glob("*.safetensors"))
    other = memory / f"expert-tier-test-{os.getpid()}.safetensors"
    try:
        other.write_bytes(second.read_bytes())
        second.unlink()
        second.symlink_to(other)
        with pytest.raises(UnsuitableStorage, match="--allow-unsuitable"):
            map_pool(model, tmp_path / "pool")
        assert not (tmp_path / "pool").exists()
        pool = mapped(model, tmp_path / "pool")
        assert pool.paths == (first.resolve(), other.resolve())
        assert pool_storages(pool) == (storage_of(first), storage_of(other))
        assert "tmpfs" in pool.unsuitable_storage
        assert parts_of(pool) == wanted
        assert failed(pool) == {}
        check_files(pool)
        check_files(pool, *pool_storages(pool))
        with pytest.raises(MalformedPool, match="on another device than the pool's other files"):
            check_files(pool, storage_of(first))
    finally:
        other.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stored: {"files": [one | {"name": "model.safetensors"} for one in stored["files"]]}, "absolute path"),
        (lambda stored: {"files": [one | {"name": "/a/../b"} for one in stored["files"]]}, "'/a/../b'"),
        (lambda stored: {"files": [one | {"name": "//a"} for one in stored["files"]]}, "'//a'"),
        (lambda stored: {"files": [one | {"name": "/a//b"} for one in stored["files"]]}, "'/a//b'"),
        (lambda stored: {"files": [one | {"name": "/a\0"} for one in stored["files"]]}, "as plain as can be"),
        (lambda stored: {"content": "synthetic_v1"}, "content synthetic_v1 in layout mapped"),
        (lambda stored: {"layout": "per_layer"}, "content None in layout per_layer"),
        (lambda stored: {"checkpoint": None}, "content None in layout mapped"),
        (lambda stored: {"alignment_bytes": 4096}, "alignment_bytes 4096 of a mapped pool"),
        (lambda stored: {"checkpoint": {"model": "/m"}}, "metadata checkpoint"),
        (lambda stored: {"pool_id": "pool-0"}, "under the name pool-0"),
    ],
)
def test_a_damaged_manifest_of_a_mapped_pool_is_named_in_one_line(tmp_path, change, named):
    model, _ = small_model(tmp_path)
    mapped(model, tmp_path / "pool")
    table = pq.read_table(tmp_path / "pool" / MANIFEST)
    stored = json.loads(table.schema.metadata[b"expert_tier_pool"])
    pq.write_table(
        table.replace_schema_metadata({"expert_tier_pool": json.dumps(stored | change(stored))}),
        tmp_path / "pool" / MANIFEST,
    )
    with pytest.raises(MalformedPool, match=named) as caught:
        read_pool(tmp_path / "pool")
    assert len(str(caught.value).splitlines()) == 1


def test_a_mapped_pool_fits_the_trace_of_its_model_or_says_to_map_it(tmp_path):
    model, _ = small_model(tmp_path)
    pool = mapped(model, tmp_path / "pool")
    routing = [[[[0, 1]], [[0, 2]]]]
    check_against_trace(pool, make_trace(routing, layer_ids=[0, 2], num_experts=3).metadata)
    check_against_trace(pool, make_trace(routing, layer_ids=[0, 2], num_experts=3, expert_bytes=39).metadata)
    with pytest.raises(PoolMismatch, match="map the checkpoint that the trace was recorded from"):
        check_against_trace(pool, make_trace(routing, layer_ids=[0, 1], num_experts=3).metadata)


LAYERS, EXPERTS, EXPERT_BYTES = 92, 896, 17_547_264


def test_the_arithmetic_of_addresses_holds_for_1_45_terabytes_in_a_file_per_layer(tmp_path):
    """Sparse stand-ins, no data: what is tested is numbers alone."""
    heads = []
    for layer in range(LAYERS):
        names = [MLP.format(layer=layer, expert=expert) + "w.weight" for expert in range(EXPERTS)]
        entries = {
            name: entry(expert * EXPERT_BYTES, (expert + 1) * EXPERT_BYTES, [EXPERT_BYTES])
            for expert, name in enumerate(names)
        }
        heads.append(header_file(json.dumps(entries).encode()))
        with (tmp_path / f"model-{layer + 1:05}-of-{LAYERS:05}.safetensors").open("wb") as file:
            file.write(heads[-1])
            file.truncate(len(heads[-1]) + EXPERTS * EXPERT_BYTES)
    mapped(tmp_path, tmp_path.with_name(f"{tmp_path.name}-pool"))
    pool = read_pool(tmp_path.with_name(f"{tmp_path.name}-pool"))
    assert (pool.num_objects, len(pool.files), len(pool.extent_file)) == (82_432, LAYERS, 82_432)
    assert int(pool.object_bytes.sum()) == 1_446_456_066_048 == LAYERS * EXPERTS * EXPERT_BYTES
    wanted = np.array([len(head) for head in heads])[:, None] + np.arange(EXPERTS) * EXPERT_BYTES
    assert np.array_equal(pool.extent_offset_bytes.reshape(LAYERS, -1), wanted)
    assert wanted.max() > 2**33


def test_a_manifest_of_a_file_per_expert_holds_82432_files(tmp_path):
    """No files: a manifest is written, and read within seconds."""
    plan = plan_pool([*range(LAYERS)], [EXPERTS] * LAYERS, EXPERT_BYTES, layout="per_expert", alignment_bytes=PACKED)
    checkpoint = Checkpoint(model="/m", scheme="none", extent_part=("w",) * plan.num_objects, left_out=())
    files = tuple(f"/m/{name}" for name in plan.files)
    plan = dataclasses.replace(plan, layout="mapped", content=None, checkpoint=checkpoint, files=files)
    pool = pool_module._pool_in(tmp_path, plan, None)
    pool_module._write_manifest(pool)
    again = read_pool(tmp_path)
    assert (again.pool_id, len(again.files)) == (pool.pool_id, 82_432)
    assert int(again.object_bytes.sum()) == 1_446_456_066_048
    assert again.paths[81 * EXPERTS + 7] == Path("/m/layer_00081/expert_00007.safetensors")


def test_places_beyond_two_to_the_40_are_exact(tmp_path):
    """A single sparse file of 1.45 TB, no data: what is tested is numbers alone."""
    stacks = [(f"model.layers.{layer}.mlp.experts.w", layer * EXPERTS * EXPERT_BYTES) for layer in range(LAYERS)]
    length = EXPERTS * EXPERT_BYTES
    entries = {name: entry(begin, begin + length, [EXPERTS, 1024, EXPERT_BYTES // 1024]) for name, begin in stacks}
    head = header_file(json.dumps(entries).encode())
    path = tmp_path / "one.safetensors"
    with path.open("wb") as file:
        file.write(head)
        try:
            file.truncate(len(head) + LAYERS * length)
        except OSError as error:
            pytest.skip(f"no file of 1.45 TB here: {error.strerror}")
        for layer, expert in ((0, 1), (0, 123), (75, 500), (91, 895)):
            file.seek(len(head) + (layer * EXPERTS + expert) * EXPERT_BYTES)
            file.write(f"{layer}/{expert}".encode())
    mapped(path, tmp_path / "pool")
    pool = read_pool(tmp_path / "pool")
    number = np.arange(LAYERS * EXPERTS)
    assert np.array_equal(pool.extent_offset_bytes, len(head) + number * EXPERT_BYTES)
    assert pool.extent_offset_bytes[-1] > 2**40
    with path.open("rb") as file:
        for layer, expert in ((0, 1), (0, 123), (75, 500), (91, 895)):
            file.seek(int(pool.extent_offset_bytes[layer * EXPERTS + expert]))
            assert file.read(9).rstrip(b"\0") == f"{layer}/{expert}".encode()


def replayer_pool(capsys, *arguments: object) -> tuple[int, str, str]:
    def work(argv):
        parser = Parser(prog="replayer")
        add_pool_commands(parser.add_subparsers(required=True, parser_class=Parser))
        parsed: argparse.Namespace = parser.parse_args(argv)
        return parsed.run(parsed)

    try:
        status = run(
            "replayer",
            work,
            ["pool", *map(str, arguments)],
            wrong_call=(UnusablePlan, PoolMismatch, UnsuitableStorage),
            failed=(MalformedPool,),
        )
    except SystemExit as left:
        status = left.code
    done = capsys.readouterr()
    return status, done.out, done.err


def test_the_commands_map_and_verify(capsys, tmp_path):
    tensors, _ = own_tensors([3, 4, 61], 3, MLP, FP8)
    write_sharded(tmp_path / "model", tensors, 2)
    (tmp_path / "model" / "config.json").write_text('{"num_hidden_layers": 61}')
    call = ["map", tmp_path / "model", "--out", tmp_path / "pool", "--allow-unsuitable"]
    status, out, err = replayer_pool(capsys, *call)
    assert (status, err) == (0, "")
    assert "6 experts of 2 layers" in out
    assert "layers 3 to 4, 3 experts each, 57 bytes an expert" in out
    assert "left out: layer 61 predicts further tokens, as config.json has num_hidden_layers 61 (18 tensors" in out
    status, out, err = replayer_pool(capsys, *call, "--json")
    assert (status, err) == (0, "")
    document = MappedPool.model_validate_json(out)
    assert (document.experts_per_layer, document.expert_bytes_min, document.expert_bytes_max) == ([3, 3], 57, 57)
    assert document.parts == sorted(FP8)
    assert document.checkpoint == str(tmp_path / "model")
    status, out, err = replayer_pool(capsys, "verify", tmp_path / "pool", "--allow-unsuitable", "--json")
    assert (status, err) == (0, "")
    found = VerifiedPool.model_validate_json(out)
    assert found.holds
    assert found.content_checked == "none"
    assert [check.name for check in found.checks] == ["storage", "length", "holes", "header"]
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.unlink()
    status, out, _ = replayer_pool(capsys, "verify", tmp_path / "pool", "--allow-unsuitable")
    assert status == 1
    assert "FAILED  length" in out
    assert "its content is not known" in out
    status, _, err = replayer_pool(capsys, "map", tmp_path / "model")
    assert status == 2
    assert "--out" in err
