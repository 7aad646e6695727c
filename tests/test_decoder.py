"""Decoding with experts from a source: equal to transformers and to the sample's own code, in order, refused by name.

Tiny checkpoints of random weights are written by transformers' `save_pretrained`, and its own model of the same folder
is the oracle; without transformers those tests skip. The source holds experts read by safetensors alone, and spoils
what it gave before, as a source that reuses its buffers does.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.sample.model import decode_greedily, load_checkpoint
from replayer.decoder import Decoded, Decoder, Pass, UnusableCheckpoint, load_decoder, read_prompt, text_of

SAMPLE = Path(__file__).parents[1] / "pipeline" / "sample"
PROMPT = [3, 41, 7, 7, 60, 12, 0, 33, 25, 9, 18]

TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24, "intermediate_size": 40,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "n_shared_experts": 2, "routed_scaling_factor": 1.5, "num_experts_per_tok": 3,
}  # fmt: skip
QWEN3 = {
    "num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 24, "head_dim": 16, "intermediate_size": 40,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 6, "intermediate_size": 24}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 24, "intermediate_size": 40,
         "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN3 | {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe, tied, biased, every second layer": (
        "Qwen3Moe", QWEN3 | {"tie_word_embeddings": True, "attention_bias": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe, yarn": ("Qwen3Moe", QWEN3 | {"rope_parameters": YARN}),
    "olmoe": ("Olmoe", {"num_key_value_heads": 4, "num_experts": 6, "intermediate_size": 24, "clip_qkv": 4.0}),
    "deepseek_v2": (
        "DeepseekV2", LATENT | {"topk_method": "group_limited_greedy", "num_key_value_heads": 4, "q_lora_rank": None},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | {"num_key_value_heads": 4, "q_lora_rank": 16, "rope_parameters": YARN | {"mscale_all_dim": 1.0}},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    # The products are so small that two threads mostly wait for each other, badly so on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class MemorySource:
    """Experts in memory. `calls` is what was asked for; what one call gave is spoilt by the next."""

    def __init__(self, folder: Path) -> None:
        self.experts: dict[tuple[int, int], dict[str, Tensor]] = {}
        for path in folder.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                match name.split("."):
                    case ["model", "layers", layer, _, "experts", expert, *part]:
                        own = self.experts.setdefault((int(layer), int(expert)), {})
                        own[".".join(part)] = tensor.clone()
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self._given: list[dict[str, Tensor]] = []

    def serve(self, layer_id: int, expert_ids: Sequence[int]) -> Sequence[Mapping[str, Tensor]]:
        self.calls.append((layer_id, tuple(expert_ids)))
        for one in self._given:
            for tensor in one.values():
                tensor.fill_(torch.nan)
        self._given = [
            {part: tensor.clone() for part, tensor in self.experts[layer_id, expert_id].items()}
            for expert_id in expert_ids
        ]
        return self._given


def written_by_transformers(folder: Path, case: str) -> Path:
    transformers = pytest.importorskip("transformers", reason="transformers writes these checkpoints and is the oracle")
    classes, sizes = FAMILIES[case]
    torch.manual_seed(7)
    model = getattr(transformers, f"{classes}ForCausalLM")(getattr(transformers, f"{classes}Config")(**(TINY | sizes)))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand_like(buffer))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def qwen3_tensors(layers: int = 2, experts: int = 4, width: int = 8, inner: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"model.embed_tokens.weight": random(16, width), "model.norm.weight": torch.ones(width)}
    for layer in (f"model.layers.{number}" for number in range(layers)):
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(width),
            f"{layer}.post_attention_layernorm.weight": torch.ones(width),
            f"{layer}.self_attn.q_norm.weight": torch.ones(4),
            f"{layer}.self_attn.k_norm.weight": torch.ones(4),
            f"{layer}.mlp.gate.weight": random(experts, width),
        }
        tensors |= {f"{layer}.self_attn.{one}_proj.weight": random(8, width) for one in "qk"}
        tensors |= {f"{layer}.self_attn.v_proj.weight": random(8, width)}
        tensors |= {f"{layer}.self_attn.o_proj.weight": random(width, 8)}
        for expert in (f"{layer}.mlp.experts.{number}" for number in range(experts)):
            tensors |= {f"{expert}.{one}_proj.weight": random(inner, width) for one in ("gate", "up")}
            tensors |= {f"{expert}.down_proj.weight": random(width, inner)}
    return tensors


def qwen3_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 6, "norm_topk_prob": True, "tie_word_embeddings": True, "max_position_embeddings": 32,
    }  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def routing(decoded: Decoded) -> dict[tuple[int, int], list[list[int]]]:
    """(layer, position) → experts."""
    return {
        (event.layer_id, one.first_position + row): experts
        for one in decoded.passes
        for event in one.events
        for row, experts in enumerate(event.expert_ids.tolist())
    }


def first_mentions(rows: np.ndarray) -> tuple[int, ...]:
    seen: list[int] = []
    for row in rows.tolist():
        for expert_id in row:
            if expert_id not in seen:
                seen.append(expert_id)
    return tuple(seen)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_family_computes_what_transformers_computes(case, tmp_path):
    folder = written_by_transformers(tmp_path / "model", case)
    import transformers

    decoder, source = load_decoder(folder), MemorySource(folder)
    with_transformers = not case.startswith("qwen3_moe") or "yarn" in case
    assert decoder.computed_by == (f"transformers {transformers.__version__}" if with_transformers else "expert-tier")
    assert decoder.dtype == decoder.expert_dtype == torch.bfloat16
    assert set(decoder.part_shapes) == set(source.experts[decoder.moe_layer_ids[0], 0])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
    )
    decoded = decoder.decode(PROMPT, 12, source)
    sequence = decoder.begin(MemorySource(folder))
    cache, fed, expected = transformers.DynamicCache(config=oracle.config), PROMPT, []
    while len(expected) < 12:
        with torch.inference_mode():
            logits = oracle(input_ids=torch.tensor([fed]), cache=cache, use_cache=True).logits[0, -1].float()
        ours, _ = sequence.feed(fed, "decode")
        # A product of bfloat16 keeps 8 bits; three layers of them, and gate and up in one product or two.
        torch.testing.assert_close(ours, logits, rtol=0.03, atol=0.03 * logits.abs().max().item())
        expected.append(int(logits.argmax()))
        fed = expected[-1:]
    assert list(decoded.token_ids) == expected
    assert len(set(expected)) > 2, "a model that repeats one token would show little"


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_moe, tied, biased, every second layer"])
def test_own_qwen3_moe_equals_transformers_in_float32(case, tmp_path):
    folder = written_by_transformers(tmp_path / "model", case)
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    found, _ = load_decoder(folder, dtype="float32").begin(MemorySource(folder)).feed(PROMPT, "prefill")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt", [b'    print("Hello', b"def len_b(bstrin"])
def test_the_sample_decodes_as_its_own_code_does_without_transformers(prompt, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    decoder = load_decoder(SAMPLE, dtype="float32")
    assert (decoder.family, decoder.moe_layer_ids, decoder.top_k) == ("qwen3_moe", tuple(range(8)), 4)
    assert decoder.experts_per_layer == dict.fromkeys(range(8), 32)
    assert decoder.part_shapes == {
        "gate_proj.weight": (48, 128), "up_proj.weight": (48, 128), "down_proj.weight": (128, 48),
    }  # fmt: skip
    source = MemorySource(SAMPLE)
    decoded = decoder.decode(list(prompt), 20, source)
    continuation, passes = decode_greedily(load_checkpoint(SAMPLE), prompt, decode_passes=19)
    assert bytes(decoded.token_ids) == continuation
    assert text_of(decoded.token_ids, decoder) == continuation.decode()
    assert [one.first_position for one in decoded.passes] == [one.first_position for one in passes]
    assert [one.phase for one in decoded.passes] == ["prefill"] + ["decode"] * 19
    for ours, theirs in zip(decoded.passes, passes, strict=True):
        for layer_id, (event, expected) in enumerate(zip(ours.events, theirs.routing, strict=True)):
            assert event.layer_id == layer_id
            assert event.expert_ids.tolist() == expected.expert_ids.tolist()
            assert (event.expert_ids.dtype, event.weights.dtype) == (np.int32, np.float32)
            np.testing.assert_allclose(event.weights, expected.weights, rtol=1e-3, atol=1e-5)
    assert source.calls == [(event.layer_id, event.asked) for one in decoded.passes for event in one.events]


@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v3"])
def test_each_event_asks_for_its_union_in_order_of_first_mention(case, tmp_path):
    folder = written_by_transformers(tmp_path / "model", case)
    decoder, source = load_decoder(folder), MemorySource(folder)
    decoded = decoder.decode(PROMPT, 4, source)
    events = [event for one in decoded.passes for event in one.events]
    assert [layer_id for layer_id, _ in source.calls] == list(decoder.moe_layer_ids) * 4
    assert source.calls == [(event.layer_id, first_mentions(event.expert_ids)) for event in events]
    for event in events:
        assert event.expert_ids.shape == event.weights.shape == (len(event.expert_ids), decoder.top_k)
        assert (np.diff(event.weights, axis=1) <= 0).all(), "largest weight first"


def test_a_prompt_in_chunks_gives_the_same_tokens_and_routing():
    prompt = b"        self.assertEqual(len("
    decoder = load_decoder(SAMPLE, dtype="float32")
    whole = decoder.decode(prompt, 12, MemorySource(SAMPLE))
    seen: list[Pass] = []
    chunked = decoder.decode(prompt, 12, MemorySource(SAMPLE), prefill_chunk=7, on_pass=seen.append)
    assert seen == list(chunked.passes)
    assert [one.first_position for one in chunked.passes[:5]] == [0, 7, 14, 21, 28]
    assert [len(one.events[0].expert_ids) for one in chunked.passes[:6]] == [7, 7, 7, 7, len(prompt) - 28, 1]
    assert [one.phase for one in chunked.passes[:6]] == ["prefill"] * 5 + ["decode"]
    assert chunked.token_ids == whole.token_ids
    assert routing(chunked) == routing(whole)


def test_a_prompt_in_chunks_gives_the_same_through_transformers(tmp_path):
    folder = written_by_transformers(tmp_path / "model", "deepseek_v3")
    decoder = load_decoder(folder, dtype="float32")
    whole = decoder.decode(PROMPT, 6, MemorySource(folder))
    chunked = decoder.decode(PROMPT, 6, MemorySource(folder), prefill_chunk=4)
    assert (chunked.token_ids, routing(chunked)) == (whole.token_ids, routing(whole))


def test_the_same_prompt_gives_the_same_tokens_and_their_digest():
    decoder = load_decoder(SAMPLE)
    first, second = (decoder.decode(b"import os\n", 10, MemorySource(SAMPLE)) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert routing(first) == routing(second)
    assert first.sha256 == hashlib.sha256(struct.pack("<10I", *first.token_ids)).hexdigest()


def test_times_add_up_to_the_pass():
    decoder = load_decoder(SAMPLE)
    for one in decoder.decode(b"import", 3, MemorySource(SAMPLE), lookahead=True).passes:
        parts = [(own.before_ns, own.lookahead_ns, own.wait_ns, own.experts_ns) for own in one.events]
        assert all(part >= 0 for own in parts for part in own)
        assert one.after_ns > 0
        assert one.pass_ns == sum(map(sum, parts)) + one.after_ns


def test_the_spine_is_in_memory_and_no_expert_is(tmp_path):
    """Neither the mapped file nor its experts have a part in a run: zeros take their place once it is loaded."""
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "*.gz*")))
    source = MemorySource(folder)
    decoder = load_decoder(folder)
    expected = decoder.decode(b"import os", 8, MemorySource(SAMPLE)).token_ids
    with (folder / "model.safetensors").open("r+b") as file:
        length = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(length))
    assert decoder.decode(b"import os", 8, source).token_ids == expected


def hand_made(folder: Path) -> Path:
    """Width 4, a token for each axis. No attention, so layer 0 sees axis i for token i.

    Both routers choose the expert of the axis they see. Every expert adds a large part of the axis after the one it
    sees, so layer 1 sees axis i + 1, and its router would have chosen expert i by what layer 0 saw. Layer 1 adds twice
    as much, so the likeliest token after i is i + 2.
    """
    eye, next_axis = torch.eye(4), torch.eye(4).roll(1, dims=0)
    tensors = {"model.embed_tokens.weight": 2 * eye, "model.norm.weight": torch.ones(4)}
    for layer_id in range(2):
        layer = f"model.layers.{layer_id}"
        tensors |= {f"{layer}.{one}_layernorm.weight": torch.ones(4) for one in ("input", "post_attention")}
        tensors |= {f"{layer}.self_attn.{one}_proj.weight": torch.zeros(4, 4) for one in "qkvo"}
        tensors |= {f"{layer}.self_attn.{one}_norm.weight": torch.ones(4) for one in "qk"}
        tensors[f"{layer}.mlp.gate.weight"] = eye.clone()
        for expert in (f"{layer}.mlp.experts.{number}" for number in range(4)):
            tensors |= {
                f"{expert}.gate_proj.weight": 10 * eye,
                f"{expert}.up_proj.weight": (1 + layer_id) * eye,
                f"{expert}.down_proj.weight": next_axis.clone(),
            }
    config = qwen3_config() | {
        "vocab_size": 4, "hidden_size": 4, "moe_intermediate_size": 4, "num_attention_heads": 1,
        "num_key_value_heads": 1, "num_experts_per_tok": 1,
    }  # fmt: skip
    return write(folder, config, tensors)


def test_lookahead_applies_the_next_router_to_the_current_hidden_state(tmp_path):
    folder = hand_made(tmp_path / "model")
    decoded = load_decoder(folder).decode([0, 2, 3], 2, MemorySource(folder), lookahead=True)
    first, second = decoded.passes[0].events
    assert first.predicted_expert_ids is None
    assert first.expert_ids.tolist() == [[0], [2], [3]]
    assert second.predicted_expert_ids is not None
    assert second.predicted_expert_ids.tolist() == [[0], [2], [3]]
    assert second.expert_ids.tolist() == [[1], [3], [0]]
    assert decoded.token_ids[0] == 1
    assert decoded.passes[1].events[1].predicted_expert_ids.tolist() == [[1]]
    without = load_decoder(folder).decode([0, 2, 3], 2, MemorySource(folder))
    assert all(event.predicted_expert_ids is None for one in without.passes for event in one.events)
    assert without.token_ids == decoded.token_ids


def test_lookahead_of_transformers_is_ranked_like_the_choice(tmp_path):
    folder = written_by_transformers(tmp_path / "model", "deepseek_v3")
    decoded = load_decoder(folder).decode(PROMPT, 2, MemorySource(folder), lookahead=True)
    first, second = decoded.passes[0].events
    assert first.predicted_expert_ids is None
    assert second.predicted_expert_ids.shape == second.expert_ids.shape
    assert (second.predicted_expert_ids != second.expert_ids).any()


def test_the_lowest_token_wins_a_tie(tmp_path):
    tensors = qwen3_tensors()
    tensors["lm_head.weight"] = torch.zeros(16, 8)
    folder = write(tmp_path / "model", qwen3_config() | {"tie_word_embeddings": False}, tensors)
    assert load_decoder(folder).decode([5], 3, MemorySource(folder)).token_ids == (0, 0, 0)


def test_several_files_and_layers_that_predict_further_tokens(tmp_path):
    tensors = qwen3_tensors()
    expected_folder = write(tmp_path / "one", qwen3_config(), tensors)
    expected = load_decoder(expected_folder).decode([5, 9], 6, MemorySource(expected_folder))
    folder = tmp_path / "several"
    folder.mkdir()
    extra = {"model.layers.2.eh_proj.weight": torch.ones(2, 2), "model.layers.2.mlp.gate.weight": torch.ones(4, 8)}
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        own = {name: tensors[name] for name in names[number::3]} | (extra if number == 2 else {})
        save_file(own, folder / f"model-0000{number + 1}-of-00003.safetensors")
        weight_map |= dict.fromkeys(own, f"model-0000{number + 1}-of-00003.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(qwen3_config()))
    decoded = load_decoder(folder).decode([5, 9], 6, MemorySource(expected_folder))
    assert (decoded.token_ids, routing(decoded)) == (expected.token_ids, routing(expected))


def without(*ends: str) -> Any:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(ends)]:
            del tensors[name]

    return change


def tensor_is(name: str, tensor: Tensor) -> Any:
    return lambda config, tensors: tensors.update({name: tensor})


def config_is(**values: Any) -> Any:
    return lambda config, tensors: config.update(values)


REFUSED = {
    "unknown family": (config_is(model_type="gpt_oss"), r"config.json: model_type 'gpt_oss' .* qwen3_moe, olmoe"),
    "no family": (config_is(model_type=["qwen3_moe"]), r"config.json: model_type "),
    "missing experts": (
        without("layers.0.mlp.experts.1.up_proj.weight", "layers.1.mlp.experts.3.down_proj.weight"),
        r"wanted 24 .* 2 are missing: layer 0 expert 1, layer 1 expert 3; download",
    ),
    "missing last expert": (
        without(*(f"experts.3.{one}_proj.weight" for one in ("gate", "up", "down"))),
        r"6 are missing: layer 0 expert 3, layer 1 expert 3;",
    ),
    "missing spine": (
        without("1.self_attn.q_norm.weight", "model.norm.weight"),
        r"no tensor 'model.layers.1.self_attn.q_norm.weight', 'model.norm.weight', wanted by config.json; download",
    ),
    "missing head": (config_is(tie_word_embeddings=False), r"no tensor 'lm_head.weight', wanted by config.json;"),
    "wrong expert shape": (
        tensor_is("model.layers.1.mlp.experts.2.up_proj.weight", torch.ones(7, 8)),
        r"experts.2.up_proj.weight' has shape \[7, 8\], wanted \[6, 8\] by config.json;",
    ),
    "wrong spine shape": (
        tensor_is("model.layers.1.mlp.gate.weight", torch.ones(5, 8)), r"gate.weight' has shape \[5, 8\], wanted \[4"
    ),
    "more experts than the config says": (
        tensor_is("model.layers.1.mlp.experts.4.up_proj.weight", torch.ones(6, 8)), r"no place for .*experts.4.up"
    ),
    "a bias that the config denies": (
        tensor_is("model.layers.1.self_attn.q_proj.bias", torch.ones(8)), r"json: its model has no place for .*bias'"
    ),
    "float8": (
        tensor_is("model.layers.0.mlp.experts.0.up_proj.weight", torch.ones(6, 8).to(torch.float8_e4m3fn)),
        r"safetensors: tensor 'model.layers.0.mlp.experts.0.up_proj.weight' is F8_E4M3, .* copy of the model in BF16",
    ),
    "packed integers": (
        tensor_is("model.layers.0.mlp.experts.0.up_proj.qweight", torch.ones(3, 8, dtype=torch.int32)),
        r"tensor 'model.layers.0.mlp.experts.0.up_proj.qweight' is I32",
    ),
    "quantised by its config": (config_is(quantization_config={"quant_method": "awq"}), r"config says 'awq',"),
    "experts of two dtypes": (
        tensor_is("model.layers.0.mlp.experts.0.up_proj.weight", torch.ones(6, 8).half()), r"is F16 and .* is F32;"
    ),
    "absurd layers": (config_is(num_hidden_layers=10**12), r"num_hidden_layers 1000000000000, .* tensors of 2 layers"),
    "no layers": (config_is(num_hidden_layers=None), r"config.json: no num_hidden_layers, "),
    "absurd experts": (config_is(num_experts=10**12), r"num_experts 1000000000000, but the files hold \d+ tensors"),
    "two numbers of experts": (
        config_is(num_local_experts=4, num_experts=2**30), r"gate.weight' has shape .*, wanted \[1073741824, 8\]"
    ),
    "absurd width": (config_is(hidden_size=2**30), r"has shape .*, wanted .* by config.json"),
    "absurd vocabulary": (config_is(vocab_size=2**30), r"embed_tokens.weight' has .*, wanted \[1073741824, 8\]"),
    "absurd positions in a head": (
        config_is(rope_parameters={"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 1e12}),
        r"partial_rotary_factor 1000000000000.0, wanted",
    ),
    "text for a number": (config_is(hidden_size="8"), r"config.json: hidden_size 8, wanted a whole number"),
    "top_k beyond the experts": (config_is(num_experts_per_tok=5), r"num_experts_per_tok 5, wanted up to num_exp"),
    "heads that do not divide": (config_is(num_key_value_heads=3), r"config.json: num_attention_heads 2, "),
    "dense layers only": (config_is(mlp_only_layers=[0, 1]), r"config.json: no layer with routed experts"),
    "a dense layer with experts": (config_is(mlp_only_layers=[1]), r"no tensor 'model.layers.1.mlp.gate_proj.weight'"),
    "a norm of nothing": (config_is(rms_norm_eps=float("nan")), r"rms_norm_eps nan, wanted a number above 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_checkpoint_is_refused_in_one_line(case, tmp_path):
    change, message = REFUSED[case]
    config, tensors = qwen3_config(), qwen3_tensors()
    change(config, tensors)
    with pytest.raises(UnusableCheckpoint, match=message) as refused:
        load_decoder(write(tmp_path / "model", config, tensors))
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        ("deepseek_v3", {"n_group": 3}, r"config.json: a token through its model fails \(RuntimeError"),
        (
            "deepseek_v3",
            {"num_hidden_layers": 2, "first_k_dense_replace": 2},
            r"no layer with routed experts|no tensor",
        ),
        ("mixtral", {"hidden_size": "wide"}, r"config.json: transformers [\d.]+ builds no model of it \(Strict"),
        ("mixtral", {"hidden_act": "nonsense"}, r"config.json: transformers [\d.]+ builds no model of it"),
        ("mixtral", {"num_attention_heads": -4}, r"config.json|has shape"),
        ("mixtral", {"num_experts_per_tok": 0}, r"config.json: no experts chosen per token"),
        (
            "mixtral",
            {"num_experts_per_tok": 7},
            r"config.json: num_experts_per_tok 7, wanted up to num_local_experts 6",
        ),
        ("olmoe", {"intermediate_size": 25}, r"has shape \[24, 32\], wanted \[25, 32\]"),
    ],
)
def test_what_transformers_cannot_make_of_a_config_is_refused(case, changed, message, tmp_path):
    folder = written_by_transformers(tmp_path / "model", case)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(UnusableCheckpoint, match=message) as refused:
        load_decoder(folder)
    assert "\n" not in str(refused.value)


def test_a_config_chooses_no_code(tmp_path):
    """Such keys have transformers fetch code from a hub, or import what is installed."""
    folder = written_by_transformers(tmp_path / "model", "olmoe")
    expected = load_decoder(folder).decode(PROMPT, 4, MemorySource(folder)).token_ids
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}, "attn_implementation": "kernels-community/flash-attn",
        "_attn_implementation": "kernels-community/flash-attn", "_experts_implementation": "deepgemm",
        "experts_implementation": "deepgemm", "return_dict": False, "output_attentions": True, "use_cache": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert load_decoder(folder).decode(PROMPT, 4, MemorySource(folder)).token_ids == expected


def test_without_transformers_its_families_are_refused(tmp_path, monkeypatch):
    tensors, config = qwen3_tensors(), qwen3_config() | {"model_type": "olmoe"}
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnusableCheckpoint, match=r"olmoe is computed by transformers 5.24 .* 'expert-tier\[decode\]'"):
        load_decoder(write(tmp_path / "model", config, tensors))
    config = qwen3_config() | {"hidden_act": "gelu"}
    with pytest.raises(UnusableCheckpoint, match=r"qwen3_moe with the activation 'gelu' is computed by transformers"):
        load_decoder(write(tmp_path / "model", config, tensors))


def test_folders_that_hold_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(UnusableCheckpoint, match=r"no folder with a config.json"):
        load_decoder(tmp_path / "absent")
    folder = write(tmp_path / "model", qwen3_config(), qwen3_tensors())
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    with pytest.raises(UnusableCheckpoint, match="ends at byte"):
        load_decoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnusableCheckpoint, match="holds no safetensors file"):
        load_decoder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnusableCheckpoint, match="is a pickle, which is not read"):
        load_decoder(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(UnusableCheckpoint, match=r"model-1.safetensors: no such file"):
        load_decoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UnusableCheckpoint, match="JSON that cannot be read"):
        load_decoder(folder)


@pytest.fixture
def tiny(tmp_path) -> Decoder:
    return load_decoder(write(tmp_path / "model", qwen3_config(), qwen3_tensors()))


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ([], 1, "the prompt has no tokens"),
        ([3, 16, 17], 1, r"token id 16 of the prompt, and 1 more; wanted 0 to 15"),
        ([-1], 1, "token id -1 of the prompt"),
        ([1] * 33, 1, r"33 tokens and 1 generated take 33 positions, wanted up to 32"),
        ([1] * 30, 4, r"30 tokens and 4 generated take 33 positions"),
    ],
)
def test_an_unusable_prompt_is_refused_before_anything_is_served(tiny, prompt, tokens, message):
    source = MemorySource(tiny.folder)
    with pytest.raises(UnusableCheckpoint, match=message):
        tiny.decode(prompt, tokens, source)
    assert source.calls == []


def test_a_prompt_up_to_the_last_position_is_decoded(tiny):
    assert len(tiny.decode([1] * 30, 3, MemorySource(tiny.folder)).token_ids) == 3


def test_logits_that_are_no_numbers_are_refused(tiny):
    source = MemorySource(tiny.folder)
    for expert in source.experts.values():
        expert["down_proj.weight"].fill_(torch.inf)
    with pytest.raises(UnusableCheckpoint, match="logits after position 0 are not numbers"):
        tiny.decode([1], 2, source)


def test_a_prompt_is_bytes_for_the_sample(tmp_path):
    decoder = load_decoder(SAMPLE)
    (tmp_path / "prompt").write_bytes(b"a\n\xff")
    assert read_prompt(tmp_path / "prompt", decoder) == [97, 10, 255]
    with pytest.raises(UnusableCheckpoint, match="is longer; wanted a prompt of 1 to 2 bytes"):
        read_prompt(tmp_path / "prompt", decoder, max_bytes=2)
    (tmp_path / "prompt").write_bytes(b"")
    with pytest.raises(UnusableCheckpoint, match="is empty"):
        read_prompt(tmp_path / "prompt", decoder)


def test_a_prompt_goes_through_the_models_tokenizer(tiny, tmp_path):
    (tmp_path / "prompt").write_text("b a c")
    with pytest.raises(UnusableCheckpoint, match=r"no tokenizer.json, and a vocabulary of 16 is not one of bytes"):
        read_prompt(tmp_path / "prompt", tiny)
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers reads a model's tokenizer.json")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 4, "?": 5}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tiny.folder / "tokenizer.json"))
    assert read_prompt(tmp_path / "prompt", tiny) == [4, 3, 5]
    assert text_of([4, 3], tiny) == "b a"
    (tmp_path / "prompt").write_bytes(b"a\xff")
    with pytest.raises(UnusableCheckpoint, match="byte 1 is no UTF-8"):
        read_prompt(tmp_path / "prompt", tiny)
    (tiny.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UnusableCheckpoint, match="no tokenizer that can be read"):
        read_prompt(tmp_path / "prompt", tiny)
    (tiny.folder / "tokenizer.json").unlink()
    os.mkfifo(tiny.folder / "tokenizer.json")
    with pytest.raises(UnusableCheckpoint, match="no regular file"):
        read_prompt(tmp_path / "prompt", tiny)
