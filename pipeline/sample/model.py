"""The sample model: a byte-level mixture-of-experts decoder with the architecture and tensor names of Qwen3-MoE.

In: bytes, and a folder with `config.json` and `model.safetensors`. Out: logits, and which experts each layer chose.
Training, text and dump files do not belong here (`train.py`, `corpus.py`). The checkpoint is the one that Hugging Face
transformers reads as `Qwen3MoeForCausalLM`; that implementation is the reference for every formula below.

Shapes: B sequences, T positions in this pass, P positions with those already cached, N = B * T tokens, V vocabulary
(256 bytes), D hidden, H query heads, G key/value heads, C head size, E experts of a layer, K experts chosen per token
(top_k), I inner size of one expert.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

# The usual 0.02 suits widths near 1,000; at 128 a product of three expert matrices would start near zero.
INITIAL_STD = 0.06


@dataclass(frozen=True)
class Config:
    """Sizes of the model, under the names that `config.json` uses."""

    vocab_size: int = 256
    hidden_size: int = 128  # D
    num_hidden_layers: int = 8
    num_attention_heads: int = 4  # H
    num_key_value_heads: int = 2  # G
    head_dim: int = 32  # C
    num_experts: int = 32  # E
    num_experts_per_tok: int = 4  # K
    moe_intermediate_size: int = 48  # I
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 128  # positions seen in training


class LayerRouting(NamedTuple):
    """What one layer's router decided in one pass, tokens in order of sequence, then position."""

    probabilities: Tensor  # (N, E), softmax over all experts of the layer
    expert_ids: Tensor  # (N, K), largest weight first
    weights: Tensor  # (N, K), probabilities of the chosen, renormalised to sum to 1


KeysValues = tuple[Tensor, Tensor]  # both (B, G, P, C)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding, halves paired (Su et al. 2021, RoFormer, as Hugging Face lays it out)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with an RMS norm on each query and key head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        d, h, g, c = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(d, h * c, bias=False)
        self.k_proj = nn.Linear(d, g * c, bias=False)
        self.v_proj = nn.Linear(d, g * c, bias=False)
        self.o_proj = nn.Linear(h * c, d, bias=False)
        self.q_norm = nn.RMSNorm(c, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        B, T, _ = x.shape
        heads = (B, T, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)  # (B, H, T, C)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)  # (B, G, T, C)
        v = self.v_proj(x).view(heads).transpose(1, 2)  # (B, G, T, C)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            assert T == 1, "a pass on top of cached positions is one token, so it needs no mask"
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)  # (B, G, P, C)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None, enable_gqa=True)  # (B, H, T, C)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1)), (k, v)


class SparseExperts(nn.Module):
    """Router and experts of one layer; each token is computed by its K chosen experts only."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        e, d, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(d, e, bias=False)
        # One tensor for all experts of the layer; the checkpoint keeps each expert's three matrices apart.
        self.gate_up = nn.Parameter(torch.empty(e, 2 * i, d))
        self.down = nn.Parameter(torch.empty(e, d, i))

    def forward(self, x: Tensor) -> tuple[Tensor, LayerRouting]:
        E = self.gate.out_features
        probabilities = functional.softmax(self.gate(x), dim=-1)  # x (N, D) -> (N, E)
        chosen, expert_ids = probabilities.topk(self.top_k, dim=-1)  # (N, K)
        weights = chosen / chosen.sum(dim=-1, keepdim=True)

        # Sorted by expert, each expert's tokens are one contiguous block of rows. On two CPU cores with 4,096 tokens,
        # this took 27 ms forward and backward; padded bmm 32 ms, a loop over experts 35 ms, all experts dense 142 ms.
        order = expert_ids.flatten().argsort(stable=True)  # (N * K)
        ends = torch.bincount(expert_ids.flatten(), minlength=E).cumsum(0).int()  # (E)
        token = order // self.top_k  # (N * K)
        x_sorted = x.index_select(0, token)  # (N * K, D)
        gate, up = functional.grouped_mm(x_sorted, self.gate_up.transpose(1, 2), offs=ends).chunk(
            2, dim=-1
        )  # (N * K, I)
        y = functional.grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)  # (N * K, D)
        weighted = y * weights.flatten().index_select(0, order)[:, None]
        mixed = torch.zeros_like(x).index_add(0, token, weighted)  # (N, D)
        return mixed, LayerRouting(probabilities, expert_ids, weights)


class Layer(nn.Module):
    """One decoder layer: attention, then experts, each on a normalised copy and added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SparseExperts(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: KeysValues | None
    ) -> tuple[Tensor, LayerRouting, KeysValues]:
        attended, keys_values = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + attended  # (B, T, D)
        mixed, routing = self.mlp(self.post_attention_layernorm(x).flatten(0, 1))  # (N, D)
        return x + mixed.view_as(x), routing, keys_values


class SampleModel(nn.Module):
    """The whole network; the output matrix is the embedding (tied)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # norm gains start at 1
                is_small = name.endswith(("embed_tokens.weight", "gate.weight"))
                nn.init.normal_(parameter, std=0.02 if is_small else INITIAL_STD)

    def forward(
        self, tokens: Tensor, cache: list[KeysValues] | None = None
    ) -> tuple[Tensor, list[LayerRouting], list[KeysValues]]:
        """Run one pass over `tokens` (B, T), which follow the cached positions if a cache is given.

        Returns logits (B, T, V), one `LayerRouting` per layer, and the cache for the next pass.
        """
        start = cache[0][0].shape[2] if cache else 0
        cos, sin = self._rotary(start, tokens.shape[1])
        x = self.embed_tokens(tokens)  # (B, T, D)
        routing, keys_values = [], []
        for layer_id, layer in enumerate(self.layers):
            x, chosen, kept = layer(x, cos, sin, cache[layer_id] if cache else None)
            routing.append(chosen)
            keys_values.append(kept)
        return functional.linear(self.norm(x), self.embed_tokens.weight), routing, keys_values

    def _rotary(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        c = self.config.head_dim
        frequency = self.config.rope_theta ** (-torch.arange(0, c, 2).float() / c)  # (C / 2)
        angle = torch.arange(start, start + count).float()[:, None] * frequency  # (T, C / 2)
        angle = torch.cat((angle, angle), dim=-1)  # (T, C)
        return angle.cos(), angle.sin()


class Pass(NamedTuple):
    """Routing of one forward pass: the prompt as a whole (prefill) or one generated token (decode)."""

    first_position: int  # of the tokens of this pass, in the sequence, from 0
    routing: list[LayerRouting]  # one per layer


@torch.inference_mode()
def decode_greedily(model: SampleModel, prompt: bytes, *, decode_passes: int) -> tuple[bytes, list[Pass]]:
    """Continue the prompt with the likeliest byte each time, and return the continuation and the routing of each pass.

    The prefill pass already yields the first byte, so the continuation is `decode_passes + 1` bytes long and its last
    byte is never read by the model.
    """
    logits, routing, cache = model(torch.tensor([list(prompt)]))
    passes = [Pass(0, routing)]
    continuation = [int(logits[0, -1].argmax())]
    for position in range(len(prompt), len(prompt) + decode_passes):
        logits, routing, cache = model(torch.tensor([[continuation[-1]]]), cache)
        passes.append(Pass(position, routing))
        continuation.append(int(logits[0, -1].argmax()))
    return bytes(continuation), passes


@torch.inference_mode()
def held_out_bits(model: SampleModel, text: bytes, *, window: int = 128, batch: int = 16) -> tuple[float, int]:
    """Return the bits the model needs for the text and the number of bytes predicted (all but the first).

    The text is cut into windows without overlap; a byte is predicted from those before it in its window, so from
    between 1 and `window` bytes. The end of the text that does not fill a window is left out.
    """
    count = (len(text) - 1) // window
    tokens = torch.tensor(list(text[: count * window + 1]))
    inputs, targets = tokens[:-1].view(count, window), tokens[1:].view(count, window)
    nats = 0.0
    for i in range(0, count, batch):
        logits, _, _ = model(inputs[i : i + batch])
        nats += functional.cross_entropy(logits.flatten(0, 1), targets[i : i + batch].flatten(), reduction="sum").item()
    return nats / math.log(2), count * window


def checkpoint_tensors(model: SampleModel) -> dict[str, Tensor]:
    """Return the weights in bfloat16 under the names of a Qwen3-MoE checkpoint, each expert's matrices apart."""
    tensors = {}
    for name, weight in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        for expert_id in range(model.config.num_experts if last in ("gate_up", "down") else 0):
            expert = f"model.{prefix}.experts.{expert_id}"
            if last == "down":
                tensors[f"{expert}.down_proj.weight"] = weight[expert_id]
            else:
                tensors[f"{expert}.gate_proj.weight"], tensors[f"{expert}.up_proj.weight"] = weight[expert_id].chunk(2)
        if last not in ("gate_up", "down"):
            tensors[f"model.{name}"] = weight
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def write_checkpoint(model: SampleModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` (bfloat16) as transformers expects them."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **asdict(model.config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": None,
        "hidden_act": "silu",
        "initializer_range": INITIAL_STD,
        "intermediate_size": model.config.moe_intermediate_size,  # of a dense layer; there is none
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Renamed into place, so that a half-written file never looks like a checkpoint.
    unfinished = folder / "model.safetensors.part"
    save_file(checkpoint_tensors(model), unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors makes it readable by its owner only
    unfinished.replace(folder / "model.safetensors")


def load_checkpoint(folder: Path) -> SampleModel:
    """Load the model to compute in float32 on the CPU from its bfloat16 weights."""
    stored = json.loads((folder / "config.json").read_text())
    config = Config(**{name: stored[name] for name in Config.__dataclass_fields__})
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = SampleModel(config)
    weights = {}
    for name in model.state_dict():
        prefix, _, last = name.rpartition(".")
        experts = [f"model.{prefix}.experts.{expert_id}" for expert_id in range(config.num_experts)]
        if last == "gate_up":
            weights[name] = torch.stack(
                [torch.cat([tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]]) for e in experts]
            )
        elif last == "down":
            weights[name] = torch.stack([tensors[f"{e}.down_proj.weight"] for e in experts])
        else:
            weights[name] = tensors[f"model.{name}"]
    model.load_state_dict(weights)
    return model.eval()
