"""Synthetic SGLang dumps, written as the engine's source documents them, by code that shares nothing with the parsers.

Routes are `[layer][token] -> ids` of one pass here; `-1` marks what the recorder did not see.
"""

import base64
import itertools
import json
import random
import struct
from dataclasses import dataclass, field

EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND = 1, 2, 3, 4, 5, 6
WIDTH = 8


@dataclass
class Engine:
    """Runs passes over requests and remembers what a trace of them must hold.

    `dense` layers hold −1 alone. `records` are plain dicts with lists; `truth` is one tuple per row, in the trace's
    order: (step, request, position, phase, layer, ids).
    """

    layers: int = 4
    experts: int = 16
    top_k: int = 4
    dense: tuple[int, ...] = (0,)
    rank: int = 0
    seed: int = 0
    first_pass: int = 7
    first_request: int = 0
    records: list[dict] = field(default_factory=list)
    truth: list[tuple] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.requests = self.first_request

    def extend(self, *lengths: int, prefix: int = 0) -> list[int]:
        """A prefill pass of new requests, `prefix` tokens of each already cached."""
        new = list(range(self.requests, self.requests + len(lengths)))
        self.requests += len(lengths)
        rows = []
        for request, length in zip(new, lengths, strict=True):
            rows += [(request, prefix + place, "prefill") for place in range(length)]
            self.lengths[request] = prefix + length
        self.record(rows, EXTEND, list(lengths))
        return new

    def decode(self, *requests: int) -> None:
        """One token of each request."""
        self.record([(request, self._next(request), "decode") for request in requests], DECODE, None)

    def mixed(self, length: int, *requests: int) -> int:
        """A new request's prompt and one token of each running one."""
        new = self.requests
        self.requests += 1
        rows = [(new, place, "prefill") for place in range(length)]
        self.lengths[new] = length
        rows += [(request, self._next(request), "decode") for request in requests]
        self.record(rows, MIXED, [length] + [1] * len(requests))
        return new

    def _next(self, request: int) -> int:
        self.lengths[request] += 1
        return self.lengths[request] - 1

    def record(self, rows: list[tuple[int, int, str]], mode: int, lengths: list[int] | None) -> None:
        step = len(self.records)
        routes = [
            [[-1] * self.top_k if layer in self.dense else self._route() for _ in rows] for layer in range(self.layers)
        ]
        for phase in ("prefill", "decode", "unknown"):
            for layer in range(self.layers):
                if layer in self.dense:
                    continue
                for place, (request, position, of_row) in enumerate(rows):
                    if of_row == phase:
                        self.truth.append((step, request, position, phase, layer, routes[layer][place]))
        self.records.append(
            {
                "forward_pass_id": self.first_pass + step,
                "rank": self.rank,
                "gatherer_key": "primary",
                "input_ids": [self.random.randrange(1000) for _ in rows],
                "positions": [position for _, position, _ in rows],
                "extend_seq_lens": lengths,
                "forward_mode": mode,
                "topk_ids_of_layer": [[ids + [-1] * (WIDTH - self.top_k) for ids in layer] for layer in routes],
                "misc_objects": [],
                "global_physical_count": counts(routes, self.experts),
            }
        )

    def _route(self) -> list[int]:
        return self.random.sample(range(self.experts), self.top_k)

    def dump(self) -> dict:
        """The content of the rank's file."""
        identity = [list(range(self.experts)) for _ in range(self.layers)]
        return {"records": self.records, "last_physical_to_logical_map": identity}


def counts(routes: list[list[list[int]]], experts: int) -> list[list[int]]:
    """[layer][expert], −1 not counted."""
    return [[sum(ids.count(expert) for ids in layer) for expert in range(experts)] for layer in routes]


def short_run(**settings: object) -> Engine:
    """Two prompts, decoding, a third request that joins, one that ends, and a mixed pass."""
    engine = Engine(**settings)  # type: ignore[arg-type]
    one, two = engine.extend(5, 3)
    engine.decode(one, two)
    engine.decode(one, two)
    (three,) = engine.extend(9, prefix=2)
    for _ in range(4):
        engine.decode(one, two, three)
    engine.decode(two, three)
    four = engine.mixed(6, two, three)
    for _ in range(8):
        engine.decode(two, three, four)
    return engine


def with_tensors(dump: dict, tensor) -> dict:  # type: ignore[no-untyped-def]
    """The dump with its arrays made by `tensor(values, dtype)`; an empty pass keeps its three axes."""
    layers = len(dump["last_physical_to_logical_map"])

    def of(record: dict) -> dict:
        made = dict(record)
        if "topk_ids_of_layer" in made:
            made["topk_ids_of_layer"] = tensor(made["topk_ids_of_layer"], "int32").reshape(layers, -1, WIDTH)
        made["global_physical_count"] = tensor(made["global_physical_count"], "int32")
        return made

    return {
        "records": [of(record) for record in dump["records"]],
        "last_physical_to_logical_map": tensor(dump["last_physical_to_logical_map"], "int64"),
    }


# Responses of /generate

_ids = itertools.count(1)


def packed(routes: list[list[list[int]]]) -> str:
    """base64 of little-endian int32; routes are [token][layer] -> ids."""
    flat = [expert for token in routes for layer in token for expert in layer]
    return base64.b64encode(struct.pack(f"<{len(flat)}i", *flat)).decode()


def packed_floats(values: list[list[list[float]]]) -> str:
    flat = [value for token in values for layer in token for value in layer]
    return base64.b64encode(struct.pack(f"<{len(flat)}f", *flat)).decode()


def response(
    routes: list[list[list[int]]], prompt: int, completion: int, *, layers_before: int = 0, **meta: object
) -> dict:
    """A response of `/generate`: a row for each token but the last, dense layers first and 0."""
    top_k = len(routes[0][0]) if routes else 0
    planes = [[[0] * top_k for _ in range(layers_before)] + token for token in routes]
    return {
        "text": "some text",
        "output_ids": list(range(completion)),
        "meta_info": {
            "id": f"a{next(_ids):08d}",
            "finish_reason": {"type": "length", "length": completion},
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "cached_tokens": 0,
            "e2e_latency": 0.5,
            "routed_experts": packed(planes),
            **meta,
        },
    }


def partitioned(
    routes: list[list[list[int]]], prompt: int, completion: int, *, dense: int = 0, experts_k: int = 2, **meta: object
) -> dict:
    """A newer response: prompt rows but the last in one field, the others in another, with their schema."""
    planes = [[[0] * experts_k for _ in range(dense)] + token for token in routes]
    layers = len(planes[0])
    before = prompt - 1
    one = response([], prompt, completion)
    del one["meta_info"]["routed_experts"]
    one["meta_info"] |= {
        "input_expert_ids": packed(planes[:before]),
        "output_expert_ids": packed(planes[before:]),
        "expert_ids_schema": {
            "num_layers": layers,
            "top_k": experts_k,
            "moe_layer_ids": list(range(dense, layers)),
            "dtype": "int32",
            "layout": "row_major",
            "id_space": "logical_global",
            "input_num_rows": before,
            "input_start_position": 0,
            "output_num_rows": len(planes) - before,
            "output_start_position": before,
        },
    } | meta
    return one


def lines(values: list[dict]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _seed() -> bytes:
    generator = random.Random(5)
    routes = [[generator.sample(range(16), 2) for _ in range(3)] for _ in range(24)]
    return lines([partitioned(routes[:12], 5, 8), partitioned(routes[12:], 5, 8)])


SEEDS = {"sglang_routed_experts": _seed()}
"""By layout, a small sound dump for whoever damages it."""
