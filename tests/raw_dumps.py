"""Raw dumps written byte by byte from known routes, by code that shares nothing with the parsers.

Routes are `[token][layer] -> ids` unless said otherwise.
"""

import io
import json
import random
import struct
import zipfile

Routes = list[list[list[int]]]


def random_routes(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> Routes:
    """Sticky random routes: an expert is likelier if the token before used it, as in real dumps."""
    generator = random.Random(seed)
    previous = [generator.sample(range(experts), top_k) for _ in range(layers)]
    routes = []
    for _ in range(tokens):
        token = []
        for layer in range(layers):
            kept = [expert for expert in previous[layer] if generator.random() < 0.4]
            fresh = [expert for expert in generator.sample(range(experts), experts) if expert not in kept]
            ids = (kept + fresh)[:top_k]
            generator.shuffle(ids)
            token.append(ids)
            previous[layer] = ids
        routes.append(token)
    return routes


def npy_bytes(shape: tuple[int, ...], descr: str, payload: bytes, fortran: bool = False) -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}"
    header += " " * (63 - (10 + len(header)) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + payload


def npz_dump(
    routes: Routes, meta: dict | None = None, *, descr: str = "<i2", code: str = "h", compress: int = 8
) -> bytes:
    """npz with experts [layers, tokens, k] and, if given, a meta JSON string."""
    tokens, layers, top_k = len(routes), len(routes[0]), len(routes[0][0])
    flat = [routes[t][layer][k] for layer in range(layers) for t in range(tokens) for k in range(top_k)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compress) as archive:
        archive.writestr(
            "experts.npy", npy_bytes((layers, tokens, top_k), descr, struct.pack(f"<{len(flat)}{code}", *flat))
        )
        if meta is not None:
            text = json.dumps(meta)
            archive.writestr("meta.npy", npy_bytes((), f"<U{len(text)}", text.encode("utf-32-le")))
    return buffer.getvalue()


def tok_layers_dump(routes: Routes, first: int = 1) -> bytes:
    return b"".join(json.dumps({"tok": first + t, "layers": token}).encode() + b"\n" for t, token in enumerate(routes))


def route_csv_dump(
    prefill: Routes,
    decode: Routes,
    *,
    experts: int,
    turn: int = 0,
    expert_bytes: list[int] | None = None,
    pruned_last_layer: bool = False,
    preamble: bool = True,
) -> bytes:
    """Route CSV v1: prefill layer-major as one pass, then one pass per decode step."""
    any_token = (prefill or decode)[0]
    layers, top_k = len(any_token), len(any_token[0])
    lines = []
    if preamble:
        lines += [
            "# route_trace v1",
            f"# model=/models/tiny.gguf arch=tiny n_layer={layers} n_expert={experts} n_expert_used={top_k}",
        ]
        for layer, size in enumerate(expert_bytes or []):
            lines.append(f"# layer={layer} expert_bytes={size} dense_bytes=1")
    lines.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")

    def rows(phase: int, position: int, layer: int, ids: list[int]) -> None:
        for slot, expert in enumerate(ids):
            lines.append(f"{turn},{phase},{position},{layer},{slot},{expert},{1 / (slot + 2):.4f},{slot % 2},0")

    for layer in range(layers):
        for position, token in enumerate(prefill):
            if pruned_last_layer and layer == layers - 1 and position < len(prefill) - 1:
                continue
            rows(0, position, layer, token[layer])
    for offset, token in enumerate(decode):
        for layer in range(layers):
            rows(1, len(prefill) + offset, layer, token[layer])
    return ("\n".join(lines) + "\n").encode()


def speculative_dump(
    layers: int, experts: int, top_k: int, kinds: list[str], seed: int = 0
) -> tuple[bytes, list[dict]]:
    """The study's JSONL: a record per router pass of one layer, k or 2k ids; and what each record is.

    `kinds` has one entry per engine iteration: normal, accept (one wide sweep), rejected (a wide sweep, then a narrow
    fallback sweep), rejected_by_layer (wide then narrow in each layer), rejected_partial (the fallback covers only the
    upper half of the layers), repeated (two narrow sweeps).
    """
    generator = random.Random(seed)
    records: list[dict] = []
    truth: list[dict] = []

    def emit(iteration: int, layer: int, width: int, kind: str) -> None:
        ids = [expert for _ in range(width) for expert in generator.sample(range(experts), top_k)]
        records.append({"iteration": iteration, "layer": layer, "experts": ids})
        truth.append({"iteration": iteration, "layer": layer, "rows": width, "kind": kind, "ids": ids})

    for iteration, kind in enumerate(kinds):
        if kind == "rejected_by_layer":
            for layer in range(layers):
                emit(iteration, layer, 2, "spec_rejected")
                emit(iteration, layer, 1, "spec_fallback")
            continue
        first = {"normal": (1, "normal"), "accept": (2, "spec_accept"), "repeated": (1, "normal")}
        width, name = first.get(kind, (2, "spec_rejected"))
        for layer in range(layers):
            emit(iteration, layer, width, name)
        if kind in ("rejected", "repeated", "rejected_partial"):
            for layer in range(layers // 2 if kind == "rejected_partial" else 0, layers):
                emit(iteration, layer, 1, "spec_fallback")
    return b"".join(json.dumps(record).encode() + b"\n" for record in records), truth


_SEED_ROUTES = random_routes(24, 3, 16, 2, seed=5)

SEEDS: dict[str, bytes | dict[str, bytes]] = {
    "npz_experts": npz_dump(_SEED_ROUTES, {"num_experts": 16}, compress=zipfile.ZIP_STORED),
    "route_csv_v1": route_csv_dump(_SEED_ROUTES[:6], _SEED_ROUTES[6:], experts=16, expert_bytes=[100, 200, 100]),
    "events_csv": b"event_index,scheduler_step,layer,requested_experts,misses,hits\n"
    + b"".join(
        b"%d,%d,%d,%s,1,1\n" % (step * 3 + layer, step, layer, b" ".join(b"%d" % expert for expert in ids))
        for step, token in enumerate(_SEED_ROUTES)
        for layer, ids in enumerate(token)
    ),
    "jsonl_tok_layers": tok_layers_dump(_SEED_ROUTES),
    "spec_jsonl": speculative_dump(3, 16, 2, ["normal", "accept", "rejected", "repeated"] * 5)[0],
}
"""By layout, a small sound dump for whoever damages it: the bytes of its file, or of its files by name."""
