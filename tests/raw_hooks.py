"""Dumps of hook scripts and saved router logits, written from known routes by code that shares nothing with parsers.

No public sample of most of these is at hand: layouts are as documented, or as the script that writes them reads.
Routes are `[token][layer] -> ids`, in router order.
"""

import csv
import hashlib
import io
import json
import math
import random
import struct
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq

from tests.raw_dumps import Routes, npy_bytes, random_routes

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U8": 1, "BOOL": 1}
CODES = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "U8": "B", "BOOL": "?"}
DESCR = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "BOOL": "|b1"}

Tensor = tuple[str, tuple[int, ...], list]
"""Type by its safetensors name, shape, values one after the other."""


def payload(dtype: str, values: list) -> bytes:
    if dtype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)


def safetensors_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    header: dict = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        packed = payload(dtype, values)
        assert len(packed) == math.prod(shape) * SIZES[dtype], name
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def npz_bytes(tensors: dict[str, Tensor], meta: dict | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (dtype, shape, values) in tensors.items():
            archive.writestr(f"{name}.npy", npy_bytes(shape, DESCR[dtype], payload(dtype, values)))
        if meta is not None:
            text = json.dumps(meta)
            archive.writestr("meta.npy", npy_bytes((), f"<U{len(text)}", text.encode("utf-32-le")))
    return buffer.getvalue()


# Router logits


def logits_of(ids: list[int], experts: int, seed: int) -> list[float]:
    """A row whose largest logits are those ids, in their order; all values are multiples of 1/64, exact in float16."""
    generator = random.Random(seed)
    row = [-generator.randrange(64, 512) / 64 for _ in range(experts)]
    for rank, expert in enumerate(ids):
        row[expert] = 4 - rank / 4
    return row


def softmax_at(row: list[float], ids: list[int]) -> list[float]:
    highest = max(row)
    total = sum(math.exp(value - highest) for value in row)
    return [math.exp(row[expert] - highest) / total for expert in ids]


def logit_rows(sequences: list[Routes | None], layer: int, experts: int, length: int, left: bool = True) -> list[float]:
    """[batch·length, experts] of a layer, one row after the other; sequences shorter than length are padded with rows
    that look like routes to expert 0."""
    flat: list[float] = []
    for number, routes in enumerate(sequences):
        rows = [
            logits_of(token[layer], experts, seed=number * 1000 + place * 10 + layer)
            for place, token in enumerate(routes or [])
        ]
        pad = [[9.0 - 0.25 * expert for expert in range(experts)]] * (length - len(rows))
        for row in pad + rows if left else rows + pad:
            flat += row
    return flat


def mask_of(lengths: list[int], length: int, left: bool = True) -> list[int]:
    flat: list[int] = []
    for own in lengths:
        flat += [0] * (length - own) + [1] * own if left else [1] * own + [0] * (length - own)
    return flat


# Records


def routing_selection_dump(prompt: Routes, generated: Routes, *, experts: int, top_k: int, **metadata: object) -> bytes:
    """moe-cache-lab's JSONL version 1: the prompt layer by layer, what was generated token by token."""
    records: list[dict] = [
        {
            "record_type": "metadata", "format": "moe-cache-lab.routing-jsonl", "format_version": 1,
            "model_id": "ibm-granite/granite-3.1-1b-a400m", "num_experts": experts, "experts_per_token": top_k,
            "source_text": "a\nb", "generated_text": None, "capture_method": "model.forward(output_router_logits=True)",
            "created_at": "2026-01-01T00:00:00+00:00", "transformers_version": "5.0.0", "model_revision": None,
        }
        | metadata
    ]  # fmt: skip

    def add(phase: str, position: int, layer: int, ids: list[int]) -> None:
        records.append(
            {
                "record_type": "routing_selection", "phase": phase, "token_position": position, "layer": layer,
                "selected_experts": ids, "token_id": 1000 + position,
                "selected_probabilities": [1 / (rank + 2) for rank in range(len(ids))],
            }
        )  # fmt: skip

    layers = len((prompt or generated)[0])
    for layer in range(layers):
        for position, token in enumerate(prompt):
            add("prompt", position, layer, token[layer])
    for offset, token in enumerate(generated):
        for layer in range(layers):
            add("generated", len(prompt) + offset, layer, token[layer])
    return b"".join(json.dumps(record, sort_keys=True).encode() + b"\n" for record in records)


def strict_records(prompt: Routes, decode: Routes, *, request: str = "req-001", layers: list[int]) -> list[dict]:
    """Expertflow's JSONL 1.0.0: the prompt is forward 0, each token after it a forward of its own."""
    records: list[dict] = []

    def add(phase: str, forward: int, position: int, place: int, ids: list[int], weights: list[float] | None) -> None:
        records.append(
            {
                "schema_version": "1.0.0", "request_id": request, "conversation_id": "conv-001", "turn_index": 0,
                "phase": phase, "forward_id": forward, "hook_order": forward * 30 + place, "token_index": position,
                "token_id": 2 + position, "layer_id": layers[place], "selected_expert_ids": ids,
                "selected_expert_weights": weights, "observed_at_ns": 10**12 + len(records),
            }
        )  # fmt: skip

    for place in range(len(layers)):
        for position, token in enumerate(prompt):
            add("prefill", 0, position, place, token[place], None)
    for offset, token in enumerate(decode):
        for place in range(len(layers)):
            ids = token[place]
            add("decode", 1 + offset, len(prompt) + offset, place, ids, [1 / (rank + 2) for rank in range(len(ids))])
    return records


def lines(records: list[dict]) -> bytes:
    return b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)


def exp_ids_dump(sequences: list[Routes], *, layers_first: bool = False) -> bytes:
    """allenai's JSONL: exp_ids [tokens, k, layers], or wrongly [tokens, layers, k]."""
    records = []
    for routes in sequences:
        if layers_first:
            ids = routes
        else:
            ids = [[[layer[rank] for layer in token] for rank in range(len(token[0]))] for token in routes]
        tokens = list(range(len(routes)))
        records.append({"input_ids": tokens, "predicted_token_ids": tokens, "exp_ids": ids})
    return lines(records)


ODD_TOKENS = [",", '"', "\n", "nan", "NA", "", " 7", "null", '","', "é", "[1, 2]", "\r\n", "'"]


def beyond_csv(
    routes: Routes, *, first_layer: int = 1, order: str = "batch", batch: int = 4, header: str = ""
) -> bytes:
    """moe-beyond's CSV, as csv.writer quotes it; rows by batch then layer, by layer, or by token."""
    tokens, layers = len(routes), len(routes[0])
    places = {
        "batch": [
            (t, layer)
            for begin in range(0, tokens, batch)
            for layer in range(layers)
            for t in range(begin, min(begin + batch, tokens))
        ],
        "layer": [(t, layer) for layer in range(layers) for t in range(tokens)],
        "token": [(t, layer) for t in range(tokens) for layer in range(layers)],
    }[order]
    text = io.StringIO()
    text.write(header or "Layer ID,Batch Number,Token,Activated Expert IDs\n")
    writer = csv.writer(text, lineterminator="\n")
    for token, layer in places:
        writer.writerow(
            [first_layer + layer, token // batch, ODD_TOKENS[token % len(ODD_TOKENS)], str(routes[token][layer])]
        )
    return text.getvalue().encode()


# Shards with a manifest


def shard_folder(
    sequences: list[Routes], *, experts: int, shard_size: int = 2, decode: bool = False
) -> dict[str, bytes]:
    """moe-cache-eval's folder: name → content."""
    layers, top_k = len(sequences[0][0]), len(sequences[0][0][0])
    files: dict[str, bytes] = {}
    shards = []
    for index, begin in enumerate(range(0, len(sequences), shard_size)):
        own = sequences[begin : begin + shard_size]
        length = max(len(routes) for routes in own)
        ids, weights, mask = [], [], []
        for routes in own:
            for layer in range(layers):
                for place in range(length):
                    there = place < len(routes)
                    ids += routes[place][layer] if there else [-1] * top_k
                    weights += [1 / 2 ** (rank + 1) if there else 0.0 for rank in range(top_k)]
            mask += [place < len(routes) for place in range(length)]
        count = len(own)
        shape = (count, layers, length, top_k)
        logits = (count, layers, length, experts)
        name = f"routes-{index:05d}.safetensors"
        files[name] = safetensors_bytes(
            {
                "sample_indices": ("I64", (count,), list(range(begin, begin + count))),
                "input_ids": ("I32", (count, length), [7] * (count * length)),
                "sequence_lengths": ("I32", (count,), [len(routes) for routes in own]),
                "router_logits": ("F16", logits, [0.0] * math.prod(logits)),
                "topk_indices": ("I16", shape, ids),
                "topk_probabilities": ("F16", shape, weights),
                "topk_weights": ("F16", shape, weights),
                "attention_mask": ("BOOL", (count, length), mask),
            }
        )
        text = "".join(json.dumps({"collection_index": begin + row, "text": "x"}) + "\n" for row in range(count))
        files[f"samples-{index:05d}.jsonl"] = text.encode()
        shards.append(
            {
                "index": index, "start_sample": begin, "end_sample_exclusive": begin + count, "num_samples": count,
                "max_sequence_length": length, "tensor_file": name,
                "tensor_sha256": hashlib.sha256(files[name]).hexdigest(), "metadata_file": f"samples-{index:05d}.jsonl",
                "metadata_sha256": "0" * 64,
            }
        )  # fmt: skip
    manifest = {
        "schema_version": 1, "status": "complete", "completed_samples": len(sequences),
        "model": {"id": "allenai/OLMoE-1B-7B-0125", "num_layers": layers, "num_experts": experts, "top_k": top_k},
        "collection": {"kind": "autoregressive_decode"} if decode else {"batch_size": 1},
        "software": {"transformers": "5.0.0"}, "tensor_layout": {"topk_indices": "[sample, layer, token, rank]"},
        "shards": shards,
    }  # fmt: skip
    files["manifest.json"] = json.dumps(manifest, indent=2, sort_keys=True).encode()
    return files


def parquet_of(calls: list[tuple[str, int, int, list[int]]]) -> bytes:
    """Rows (context, layer, position, ids) with the columns that the KTransformers collector needs."""
    table = pa.table(
        {
            "token_id": pa.array(range(len(calls)), pa.int64()),
            "context_id": pa.array([call[0] for call in calls], pa.string()),
            "layer_id": pa.array([call[1] for call in calls], pa.int32()),
            "token_position": pa.array([call[2] for call in calls], pa.int32()),
            "expert_ids": pa.array([call[3] for call in calls], pa.list_(pa.int32())),
            "expert_weights": pa.array([[0.5] * len(call[3]) for call in calls], pa.list_(pa.float32())),
            "token_text": pa.nulls(len(calls), pa.string()),
            "timestamp": pa.array(range(len(calls)), pa.int64()),
            "token_category": pa.array(["user"] * len(calls), pa.string()),
            "expert_scores_all": pa.nulls(len(calls), pa.list_(pa.float16())),
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


_ROUTES = random_routes(24, 3, 16, 4, seed=5)

SEEDS = {
    "router_logits": npz_bytes(
        {f"router_logits.{layer}": ("F32", (24, 16), logit_rows([_ROUTES], layer, 16, 24)) for layer in range(3)}
        | {"attention_mask": ("I64", (1, 24), [1] * 24)},
        {"top_k": 4},
    ),
    "topk_shards": shard_folder([_ROUTES[:10], _ROUTES[10:17], _ROUTES[17:]], experts=16),
    "routing_selection_jsonl": routing_selection_dump(_ROUTES[:10], _ROUTES[10:], experts=16, top_k=4),
    "strict_route_jsonl": lines(strict_records(_ROUTES[:10], _ROUTES[10:], layers=[0, 1, 2])),
    "exp_ids_jsonl": exp_ids_dump([_ROUTES[:10], _ROUTES[10:]]),
    "moe_beyond_csv": beyond_csv(_ROUTES),
    "route_parquet": parquet_of(
        [("a", layer, place, token[layer]) for layer in range(3) for place, token in enumerate(_ROUTES[:10])]
        + [("a", layer, 10 + place, token[layer]) for place, token in enumerate(_ROUTES[10:]) for layer in range(3)]
    ),
}
"""By layout, a small sound dump for whoever damages it."""
