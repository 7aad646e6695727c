"""Megatron-core's router trace, written line by line from known routes as its source documents the layout.

Shares nothing with the parser; no public file exists. A pass is `[token][layer] -> ids`.
"""

import json
import struct

from tests.raw_dumps import Routes, random_routes
from tests.raw_vllm import safetensors_of


def line(step: int, layer: int, ids: list[list[int]], *, rank: int = 0, top_k: int, **more: object) -> dict:
    return {
        "step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank,
        "num_tokens": len(ids), "topk": top_k, "top_indices": ids,
    } | more  # fmt: skip


def rank_trace(
    steps: list[Routes], layers: list[int], *, rank: int = 0, top_k: int = 4, first: int = 0, mtp: bool = False
) -> list[dict]:
    """One rank's lines: a forward pass per step, layer after layer, and, with mtp, an MTP block behind them."""
    lines = []
    for at, routes in enumerate(steps):
        lines += [
            line(first + at, layer, [token[place] for token in routes], rank=rank, top_k=top_k)
            for place, layer in enumerate(layers)
        ]
        if mtp:
            lines.append(
                line(first + at, layers[0], [t[0] for t in routes], rank=rank, top_k=top_k, block="mtp", mtp_idx=0)
            )
    return lines


def jsonl(lines: list[dict]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


_ROUTES = random_routes(24, 3, 16, 4, seed=5)

SEEDS = {
    "megatron_router_trace": {
        f"router_trace_rank{rank}.jsonl": jsonl(
            rank_trace([_ROUTES[12 * rank :][:6], _ROUTES[12 * rank + 6 :][:6]], [1, 2, 3], rank=rank)
        )
        for rank in range(2)
    },
    "tensorrt_llm_token_selected_experts": {
        "meta_info.json": json.dumps({"num_experts": 16, "num_experts_per_token": 4}).encode(),
        "token_selected_experts_rank0.safetensors": safetensors_of(
            {
                f"{step}_{layer}": ((12, 4), "int32", struct.pack("<48i", *(e for token in part for e in token[layer])))
                for step, part in enumerate((_ROUTES[:12], _ROUTES[12:]))
                for layer in range(3)
            }
        ),
    },
}
"""By layout, a small sound dump for whoever damages it: its files by name."""
