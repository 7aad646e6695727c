"""Synthetic dumps of reinforcement learning's routing replay, by code that shares nothing with the parsers.

Routes are `[token][layer] -> ids`. `array(values, dtype)` makes whatever the file is saved with.
"""

from collections.abc import Callable
from typing import Any

Routes = list[list[list[int]]]
Array = Callable[[list, str], Any]


def padding(rows: int, layers: int, top_k: int, experts: int) -> Routes:
    """Rows of arange modulo the experts, as slime and miles fill: they look like routes."""
    return [[[(row * top_k + place) % experts for place in range(top_k)] for _ in range(layers)] for row in range(rows)]


def with_dense(routes: Routes, dense: int) -> Routes:
    """Planes of zeros before the MoE layers, as engines store dense layers."""
    return [[[0] * len(token[0])] * dense + token for token in routes]


def sample(routes: Routes | None, prompt: int, response: int, array: Array, **more: object) -> dict:
    """A slime sample: a row for each token but the last."""
    return {
        "index": 3,
        "prompt": "a prompt",
        "tokens": list(range(prompt + response)),
        "response": "a response",
        "response_length": response,
        "loss_mask": [1] * response,
        "reward": 1.0,
        "status": "completed",
        "rollout_routed_experts": None if routes is None else array(routes, "int32"),
        **more,
    }


def rollout(samples: list[dict], rollout_id: int = 4) -> dict:
    return {"rollout_id": rollout_id, "samples": samples}


def batch(
    sequences: list[tuple[Routes, int, int]], widths: tuple[int, int], array: Array, dtype: str = "int32"
) -> dict:
    """A verl batch: (routes of each token but the last, prompt, response) padded left to one width and right to
    another; zeros are the padding, also of each sequence's last token."""
    left, right = widths
    layers, top_k = len(sequences[0][0][0]), len(sequences[0][0][0][0])
    empty = [[0] * top_k for _ in range(layers)]
    rows, mask = [], []
    for routes, prompt, response in sequences:
        before = left - prompt
        real = prompt + response
        rows.append([empty] * before + routes + [empty] * (left + right - before - len(routes)))
        mask.append([0] * before + [1] * real + [0] * (left + right - before - real))
    return {
        "routed_experts": array(rows, dtype),
        "attention_mask": array(mask, "int64"),
        "response_mask": array([[1] * right for _ in sequences], "int64"),
        "prompts": array([[0] * left for _ in sequences], "int64"),
    }


def replay(passes: list[tuple[Routes, int]], layers: int, array: Array) -> dict:
    """miles' routing_replay with lengths added: (routes, real tokens) of each training pass."""
    return {
        "version": 1,
        "replays": [
            [array([token[layer] for token in routes], "int32") for routes, _ in passes] for layer in range(layers)
        ],
        "seq_lens": [length for _, length in passes],
    }
