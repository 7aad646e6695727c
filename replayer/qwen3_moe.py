"""Qwen3-MoE in plain torch: token ids in, logits out, with the routed experts left to a module of the caller.

Formulas, the names of modules and the dtype of every step are those of Hugging Face transformers'
`Qwen3MoeForCausalLM`, so a checkpoint loads by name and both compute the same; this one needs no transformers. Loading
does not belong here (`families`). What it does not compute (rope scaling, sliding windows, other activations) is told
by `Config.not_computed`.

Shapes: T tokens of this pass, P positions with those before it, V vocabulary, D hidden, H query heads, G key/value
heads, C head size, E experts of a layer, K experts chosen per token (top_k).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

KeysValues = tuple[Tensor, Tensor]  # both (1, G, P, C)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What of a config.json the network depends on; a key that is absent has the default of transformers."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    norm_topk_prob: bool
    tie_word_embeddings: bool
    moe_layer_ids: frozenset[int]

    @staticmethod
    def not_computed(stored: Mapping[str, Any]) -> str | None:
        """The first setting that needs transformers, as text; null where there is none."""
        rope = stored.get("rope_parameters") or stored.get("rope_scaling") or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            return "rope scaling"
        if stored.get("use_sliding_window") and stored.get("sliding_window"):
            return "a sliding window"
        if stored.get("hidden_act", "silu") != "silu":
            return f"the activation {str(stored['hidden_act'])[:40]!r}"
        return None

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> "Config":
        """The values of a config.json.

        Raises:
            ValueError: a value has the wrong kind, or heads do not divide; worded as `key value, wanted …`.
        """

        def whole(*keys: str, default: int | None = None) -> int:
            found = next((stored[key] for key in keys if stored.get(key) is not None), default)
            # A bool is an int to Python, not to a config.
            if type(found) is not int or not 0 < found < 2**31:
                raise ValueError(f"{keys[0]} {str(found)[:40]}, wanted a whole number from 1")
            return found

        def number(key: str, found: Any) -> float:
            if type(found) not in (int, float) or not 0 < found < 1e30:
                raise ValueError(f"{key} {str(found)[:40]}, wanted a number above 0")
            return float(found)

        def flag(key: str) -> bool:
            found = stored.get(key) or False
            if type(found) is not bool:
                raise ValueError(f"{key} {str(found)[:40]}, wanted true or false")
            return found

        layers, heads = whole("num_hidden_layers", default=24), whole("num_attention_heads", default=32)
        hidden_size, groups = whole("hidden_size", default=2048), whole("num_key_value_heads", default=4)
        head_dim = whole("head_dim", default=hidden_size // heads)
        if heads % groups or head_dim % 2:
            raise ValueError(
                f"num_attention_heads {heads}, num_key_value_heads {groups} and head_dim {head_dim}, wanted a multiple "
                "of the key/value heads and an even head size"
            )
        dense, step = stored.get("mlp_only_layers") or [], whole("decoder_sparse_step", default=1)
        if not isinstance(dense, list) or not all(type(one) is int for one in dense):
            raise ValueError(f"mlp_only_layers {str(dense)[:40]}, wanted a list of layers")
        experts, top_k = whole("num_experts", "num_local_experts", default=128), whole("num_experts_per_tok", default=8)
        if top_k > experts:
            raise ValueError(f"num_experts_per_tok {top_k}, wanted up to num_experts {experts}")
        rope = stored.get("rope_parameters") or stored.get("rope_scaling") or {}
        return cls(
            vocab_size=whole("vocab_size", default=151936),
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=head_dim,
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=whole("moe_intermediate_size", default=768),
            intermediate_size=whole("intermediate_size", default=6144),
            max_position_embeddings=whole("max_position_embeddings", default=32768),
            rms_norm_eps=number("rms_norm_eps", stored.get("rms_norm_eps", 1e-6)),
            rope_theta=number("rope_theta", rope.get("rope_theta", stored.get("rope_theta", 10_000.0))),
            attention_bias=flag("attention_bias"),
            norm_topk_prob=flag("norm_topk_prob"),
            tie_word_embeddings=flag("tie_word_embeddings"),
            moe_layer_ids=frozenset(range(step - 1, layers, step)) - frozenset(dense),
        )


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and scaled in the dtype of the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding, halves paired (Su et al. 2021, RoFormer, as Hugging Face lays it out)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with an RMS norm on each query and key head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        d, c, bias = config.hidden_size, config.head_dim, config.attention_bias
        h, g = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(d, h * c, bias=bias)
        self.k_proj = nn.Linear(d, g * c, bias=bias)
        self.v_proj = nn.Linear(d, g * c, bias=bias)
        self.o_proj = nn.Linear(h * c, d, bias=bias)
        self.q_norm = RmsNorm(c, config.rms_norm_eps)
        self.k_norm = RmsNorm(c, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        T = x.shape[1]
        heads = (1, T, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)  # (1, H, T, C)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)  # (1, G, T, C)
        v = self.v_proj(x).view(heads).transpose(1, 2)  # (1, G, T, C)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = None
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)  # (1, G, P, C)
            if T > 1:
                P = k.shape[2]
                mask = torch.ones(T, P, dtype=torch.bool, device=x.device).tril(P - T)  # (T, P)
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=past is None and T > 1, enable_gqa=True
        )  # (1, H, T, C)
        return self.o_proj(y.transpose(1, 2).reshape(1, T, -1)), (k, v)


class Router(nn.Module):
    """Scores all experts of a layer in float32 and chooses K a token, largest weight first."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.renormalised = config.num_experts_per_tok, config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, D) → logits (T, E), weights (T, K), expert ids (T, K)."""
        logits = functional.linear(x, self.weight)  # (T, E)
        weights, expert_ids = functional.softmax(logits, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)  # (T, K)
        if self.renormalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), expert_ids


class SparseBlock(nn.Module):
    """Router and routed experts of one layer."""

    def __init__(self, config: Config, experts: nn.Module) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])  # (T, D)
        _, weights, expert_ids = self.gate(flat)
        return self.experts(flat, expert_ids, weights).view_as(x)


class DenseBlock(nn.Module):
    """The feed-forward part of a layer that has no routed experts."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: attention, then the feed-forward part, each on a normalised copy and added to the stream."""

    def __init__(self, config: Config, block: nn.Module) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = block
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        attended, keys_values = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys_values


class Trunk(nn.Module):
    """Everything but the output matrix; transformers gives it a module of its own, and so the names a prefix."""

    def __init__(self, config: Config, experts: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(
                config,
                SparseBlock(config, experts(layer_id)) if layer_id in config.moe_layer_ids else DenseBlock(config),
            )
            for layer_id in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3Moe(nn.Module):
    """The network; `experts` makes the module of a layer's routed experts."""

    def __init__(self, config: Config, experts: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, experts)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_cache(self) -> list[KeysValues | None]:
        return [None] * self.config.num_hidden_layers

    def next_logits(self, token_ids: Tensor, cache: list[KeysValues | None]) -> Tensor:
        """Logits (V,) after the last of `token_ids` (T,), which follow the positions in the cache and join it."""
        past = cache[0]
        start = 0 if past is None else past[0].shape[2]
        x = self.model.embed_tokens(token_ids)[None]  # (1, T, D)
        cos, sin = self._rotary(start, len(token_ids), x)
        for layer_id, layer in enumerate(self.model.layers):
            x, cache[layer_id] = layer(x, cos, sin, cache[layer_id])
        return self.lm_head(self.model.norm(x[:, -1:]))[0, 0]

    def _rotary(self, start: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config.head_dim
        exponent = torch.arange(0, c, 2, dtype=torch.float32, device=like.device) / c  # (C / 2)
        position = torch.arange(start, start + count, dtype=torch.float32, device=like.device)  # (T)
        angle = position[:, None] * (1.0 / self.config.rope_theta**exponent)  # (T, C / 2)
        angle = torch.cat((angle, angle), dim=-1)  # (T, C)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)
