"""vLLM's dumps written byte by byte from known routes, by code that shares nothing with the parsers.

No public file of most of them exists; the layouts are those of vLLM's documentation and of the published logs of the
VLLM_LOG_MOE patches. Routes are `[token][layer] -> ids`; a token may be None.
"""

import base64
import io
import itertools
import json
import random
import struct
import zipfile

from tests.raw_dumps import Routes, npy_bytes, random_routes

CODES = {"uint8": ("B", "|u1", "U8"), "int8": ("b", "|i1", "I8"), "int16": ("h", "<i2", "I16"),
         "uint16": ("H", "<u2", "U16"), "int32": ("i", "<i4", "I32"), "int64": ("q", "<i8", "I64")}  # fmt: skip

Array = tuple[tuple[int, ...], str, bytes]
"""(shape, type, little-endian bytes)."""


def array(routes: Routes, dtype: str = "int16") -> Array:
    """Routes as one array [tokens, layers, k]."""
    flat = [expert for token in routes for ids in token for expert in ids]
    shape = (len(routes), len(routes[0]), len(routes[0][0]))
    return shape, dtype, struct.pack(f"<{len(flat)}{CODES[dtype][0]}", *flat)


def numbers(values: list[int], dtype: str = "int64") -> Array:
    return (len(values),), dtype, struct.pack(f"<{len(values)}{CODES[dtype][0]}", *values)


def layer_major(routes: Routes, dtype: str = "int16") -> Array:
    """Routes in the device layout [layers, tokens, k]."""
    turned = [[token[layer] for token in routes] for layer in range(len(routes[0]))]
    return array(turned, dtype)


def npz_of(arrays: dict[str, Array], meta: dict | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (shape, dtype, payload) in arrays.items():
            archive.writestr(f"{name}.npy", npy_bytes(shape, CODES[dtype][1], payload))
        if meta is not None:
            text = json.dumps(meta)
            archive.writestr("meta.npy", npy_bytes((), f"<U{len(text)}", text.encode("utf-32-le")))
    return buffer.getvalue()


def safetensors_of(arrays: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    header: dict = {"__metadata__": metadata} if metadata is not None else {}
    body = b""
    for name, (shape, dtype, payload) in arrays.items():
        offsets = [len(body), len(body) + len(payload)]
        header[name] = {"dtype": CODES[dtype][2], "shape": list(shape), "data_offsets": offsets}
        body += payload
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def encoded(
    routes: Routes, dtype: str = "uint8", *, bytes_key: str = "data", spelled: str | None = "", **beside: int
) -> dict:
    """An array as base64 with shape and, unless `spelled` is None, its dtype."""
    shape, _, payload = array(routes, dtype)
    value: dict = {bytes_key: base64.b64encode(payload).decode(), "shape": list(shape), **beside}
    if spelled is not None:
        value["dtype"] = spelled or dtype
    return value


def npy_base64(routes: Routes, dtype: str = "uint8") -> str:
    """An array as base64 of a whole npy file."""
    shape, _, payload = array(routes, dtype)
    return base64.b64encode(npy_bytes(shape, CODES[dtype][1], payload)).decode()


_ids = itertools.count(1)


def response(
    choices: list[object],
    *,
    prompt: int,
    completions: list[int],
    prompt_routed: object = None,
    with_prompt_field: bool = False,
    **more: object,
) -> dict:
    """A completion response: `choices` holds routed_experts of each, `completions` the tokens of each."""
    record: dict = {
        "id": f"cmpl-{next(_ids):08d}",
        "object": "text_completion",
        "model": "tiny/moe",
        "system_fingerprint": "vllm-0.21.0-tp1-0badcafe",
        "choices": [
            {"index": index, "text": "word", "finish_reason": "length", "logprobs": None, "routed_experts": routed,
             "token_ids": list(range(count))}
            for index, (routed, count) in enumerate(zip(choices, completions, strict=True))
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sum(completions), "total_tokens": 0},
    }  # fmt: skip
    if prompt_routed is not None or with_prompt_field:
        record["prompt_routed_experts"] = prompt_routed
    return record | more


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


# The logging patch


def meta_line(layers: list[int], experts: int, top_k: int, **more: object) -> dict:
    line = {
        "type": "meta", "model_id": "allenai/OLMoE-1B-7B-0924", "vllm_version": "0.11.0", "torch_version": "2.8",
        "device": "cpu", "seed": 1234, "layers_logged": layers, "top_k": top_k, "num_experts": experts,
    }  # fmt: skip
    return line | more


def route_line(request: object, token: int, layer: int, ids: list[int], weights: list[float] | None = None) -> dict:
    line = {"type": "route", "req_id": request, "token_idx": token, "layer": layer, "topk_ids": ids}
    if weights is None:
        weights = [round(1 / (2 + rank), 4) for rank in range(len(ids))]
    return line | {"topk_weights": weights}


def pass_lines(routes: Routes, layers: list[int], *, request: object = "r0", first: int = 0) -> list[dict]:
    """One forward pass: the rows of a layer, then those of the next, as the hook is called."""
    return [
        route_line(request, first + row, layer, token[place])
        for place, layer in enumerate(layers)
        for row, token in enumerate(routes)
    ]


def warmup(tokens: int, layers: int, top_k: int) -> Routes:
    """A dummy batch: one row again and again."""
    return [[list(range(top_k)) for _ in range(layers)] for _ in range(tokens)]


def garbage_of_sixteen(tokens: int, experts: int, top_k: int, seed: int = 0) -> Routes:
    """One sound row, then 15 rows of a flat copy of the argsort: exact partitions of the experts, again and again."""
    generator = random.Random(seed)
    rows: Routes = []
    while len(rows) < tokens:
        rows.append([generator.sample(range(experts), top_k)])
        flat: list[int] = []
        while len(flat) < 15 * top_k:
            flat += generator.sample(range(experts), experts)
        rows += [[flat[row * top_k : (row + 1) * top_k]] for row in range(15)]
    return rows[:tokens]


# Statistics of the expert-routing recorder


def statistics(steps: int, experts: int, status: str | None = "complete") -> bytes:
    counts = [1] * experts
    layer = {
        "layer_id": 0, "capture_backend": "vllm_router", "useful_local_assignments_per_expert": counts,
        "physical_local_assignments_per_expert": counts, "padding_local_assignments_per_expert": [0] * experts,
    }  # fmt: skip
    records: list[dict] = [
        {"record_type": "metadata", "schema_version": 2, "iteration": 0, "global_rank": 0, "top_k": 2,
         "capture_backend": "vllm_router",
         "layers": [{"layer_id": 0, "global_num_experts": experts, "local_expert_ids": list(range(experts))}]}
    ]  # fmt: skip
    records += [{"record_type": "decode_step", "decode_step": step, "layers": [layer]} for step in range(steps)]
    if status is not None:
        records.append({"record_type": "summary", "status": status, "decode_steps": steps})
    return lines(*records)


_ROUTES = random_routes(24, 3, 16, 2, seed=5)

SEEDS = {
    "vllm_routed_experts_npz": npz_of({"routed_experts": array(_ROUTES)}),
    "vllm_routed_experts_safetensors": safetensors_of({"routed_experts": array(_ROUTES)}),
    "vllm_routed_experts": lines(
        response([encoded(_ROUTES[:12])], prompt=5, completions=[8]),
        response([_ROUTES[12:]], prompt=5, completions=[8]),
    ),
    "vllm_moe_routes": lines(meta_line([0, 1, 2], 16, 2), *pass_lines(_ROUTES, [0, 1, 2])),
    "vllm_expert_stats": statistics(3, 16),
}
"""By layout, a small dump for whoever damages it; sound, the statistics aside, which are always refused."""
