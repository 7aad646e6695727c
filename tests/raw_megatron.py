"""Megatron-core's router trace, written line by line from known routes as its source documents the layout.

Shares nothing with the parser; no public file exists. A pass is `[token][layer] -> ids`.
"""

import json

from tests.raw_dumps import Routes


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
