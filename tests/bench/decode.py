"""A decode of random weights through the tier: its device bytes against its replay, its time against plain tensors.

The checkpoint is a Qwen3-MoE of 512 experts of 1.5 MiB, made in a temporary folder on the disk of this repository and
removed; torch's threads sleep between products, as in the command. Bytes: decode and replay of the captured routes
inside one wall. Time: all experts cached, against the same decoder fed from plain tensors in memory, and a bare copy
loop of the same bytes beside it.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from replayer.decode import DecodeRun, decode
from replayer.decoder import Decoder, load_decoder
from replayer.pool import Pool, map_pool
from replayer.replay import replay
from replayer.request import Request
from tests.bench.policies import report

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 4, 128, 8, 512, 512
CAPACITY_BYTES = 256 << 20
PROMPT = list(range(7, 39))
TOKENS = 48
WAIT_S = 120


def main(samples: int) -> None:
    """Compares in a process of its own: how torch's threads wait is settled when it is imported."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    subprocess.run([sys.executable, "-m", "tests.bench.decode", str(samples)], env=environment, check=True)


def compare(samples: int) -> None:
    """Prints both ratios; the time's is the median of so many pairs, the two taken in turns."""
    with _checkpoint() as folder:
        decoder, pool = load_decoder(folder), map_pool(folder, folder / "pool")
        _bytes(decoder, pool)
        _time(decoder, pool, samples)


def _bytes(decoder: Decoder, pool: Pool) -> None:
    request = Request(mechanism="cgroup", capacity_bytes=CAPACITY_BYTES, destination="none")
    one = decode(decoder, pool, request, PROMPT, TOKENS, wait_s=WAIT_S)
    again = replay(one.trace, pool, request, wait_s=WAIT_S)
    decoded, replayed = one.run.run["device_bytes"], again.run["device_bytes"]
    ratio = decoded / replayed
    report(
        f"device bytes, {CAPACITY_BYTES >> 20} of {int(pool.object_bytes.sum()) >> 20} MiB in a cgroup",
        f"decode {decoded / 2**20:,.0f} MiB, its replay {replayed / 2**20:,.0f} MiB, ratio {ratio:.3f}",
        "0.9 to 1.1",
        reached=0.9 <= ratio <= 1.1,
    )


def _time(decoder: Decoder, pool: Pool, samples: int) -> None:
    request = Request(destination="none", observe="none", verify="edges")
    experts = _in_memory(pool, decoder)
    buffer = np.empty(int(pool.object_bytes.max()), dtype=np.uint8)
    ratios, waits = [], []
    for _ in range(max(samples, 3)):
        one = decode(decoder, pool, request, PROMPT, TOKENS, wait_s=WAIT_S)
        plain = decoder.decode(PROMPT, TOKENS, _Plain(experts))
        plain_ns = sum(each.pass_ns for each in plain.passes if each.phase == "decode")
        assert plain.sha256 == one.decoded.sha256, "the same bytes give the same tokens"
        copy_ns = _copies(one, experts, buffer)
        ratios.append(one.decode_ns / (plain_ns + copy_ns))
        waits.append(one.decode_wait_ns / copy_ns)
    median = statistics.median(ratios)
    report(
        f"decode, all cached, experts of {int(pool.object_bytes.max()) / 2**20:.1f} MiB",
        f"{median:.3f} times plain tensors and a copy loop ({min(ratios):.3f} to {max(ratios):.3f}); waits "
        f"{statistics.median(waits):.2f} times the copies",
        "≤ 1.05",
        reached=median <= 1.05,
    )


class _Plain:
    def __init__(self, experts: Mapping[tuple[int, int], Mapping[str, torch.Tensor]]) -> None:
        self._experts = experts

    def serve(self, layer_id: int, expert_ids: Sequence[int]) -> list[Mapping[str, torch.Tensor]]:
        return [self._experts[layer_id, expert_id] for expert_id in expert_ids]


def _in_memory(pool: Pool, decoder: Decoder) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    assert pool.checkpoint is not None
    whole = [np.fromfile(path, dtype=np.uint8) for path in pool.paths]
    experts: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for obj in range(pool.num_objects):
        parts = experts.setdefault((int(pool.object_layer_id[obj]), int(pool.object_expert_id[obj])), {})
        for extent in range(int(pool.object_first_extent[obj]), int(pool.object_first_extent[obj + 1])):
            begin = int(pool.extent_offset_bytes[extent])
            part = pool.checkpoint.extent_part[extent]
            found = whole[pool.extent_file[extent]][begin : begin + int(pool.extent_length_bytes[extent])].copy()
            parts[part] = torch.from_numpy(found).view(decoder.expert_dtype).view(decoder.part_shapes[part])
    return experts


def _copies(one: DecodeRun, experts: Mapping[tuple[int, int], Mapping[str, torch.Tensor]], buffer: np.ndarray) -> int:
    """ns that copying what the decoded tokens asked for takes, one after the other."""
    sources = {
        key: [tensor.view(torch.uint8).numpy().reshape(-1) for tensor in parts.values()]
        for key, parts in experts.items()
    }
    events = [event for each in one.decoded.passes if each.phase == "decode" for event in each.events]
    begin = time.perf_counter_ns()
    for event in events:
        for expert_id in event.asked:
            place = 0
            for source in sources[event.layer_id, expert_id]:
                np.copyto(buffer[place : place + len(source)], source)
                place += len(source)
    return time.perf_counter_ns() - begin


@contextlib.contextmanager
def _checkpoint() -> Iterator[Path]:
    """A Qwen3-MoE of random weights in bfloat16, some 0.8 GB."""
    with tempfile.TemporaryDirectory(prefix=".bench-decode-", dir=Path(__file__).parents[2]) as place:
        folder = Path(place)
        config = {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256,
            "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": INNER,
            "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "attention_bias": False,
            "decoder_sparse_step": 1, "hidden_act": "silu", "intermediate_size": INNER, "mlp_only_layers": [],
            "norm_topk_prob": True, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * 0.05).to(torch.bfloat16)

        tensors = {"model.embed_tokens.weight": random(256, HIDDEN), "model.norm.weight": torch.ones(HIDDEN).bfloat16()}
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            for name, shape in (("q", (512, HIDDEN)), ("k", (256, HIDDEN)), ("v", (256, HIDDEN)), ("o", (HIDDEN, 512))):
                tensors[f"{at}.self_attn.{name}_proj.weight"] = random(*shape)
            for name, size in (("self_attn.q_norm", 64), ("self_attn.k_norm", 64), ("input_layernorm", HIDDEN),
                               ("post_attention_layernorm", HIDDEN)):  # fmt: skip
                tensors[f"{at}.{name}.weight"] = torch.ones(size).bfloat16()
            tensors[f"{at}.mlp.gate.weight"] = random(EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                    tensors[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] = random(*shape)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        yield folder


if __name__ == "__main__":
    compare(int(sys.argv[1]))
