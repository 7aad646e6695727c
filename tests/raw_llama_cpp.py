"""Dumps of the llama.cpp family written byte by byte from known routes, by code that shares nothing with the parsers.

A `Passes` is a list of graphs, each a dict of layer → rows of ids. No test cases live here.
"""

import json
import random
import struct

Rows = list[list[int]]
Passes = list[dict[int, Rows]]


def graphs(
    widths: list[int],
    layers: list[int],
    experts: int,
    top_k: int,
    *,
    seed: int = 0,
    pruned: bool = False,
) -> Passes:
    """Random graphs of so many tokens each; `pruned` gives the last layer of wide graphs one row, as llama.cpp does."""
    generator = random.Random(seed)
    return [
        {
            layer: [
                generator.sample(range(experts), top_k)
                for _ in range(1 if pruned and layer == layers[-1] and width > 1 else width)
            ]
            for layer in layers
        }
        for width in widths
    ]


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def flat(rows: Rows) -> list[int]:
    return [expert for ids in rows for expert in ids]


def llama_moe_trace_dump(passes: Passes, top_k: int) -> bytes:
    """i32 layer, T, k, ids."""
    return b"".join(ints(layer, len(rows), top_k, *flat(rows)) for one in passes for layer, rows in one.items())


def mtsp_dump(passes: Passes, top_k: int) -> bytes:
    """u32 'MTSP', layer, T, k, i32 ids."""
    return b"".join(
        b"MTSP" + ints(layer, len(rows), top_k, *flat(rows)) for one in passes for layer, rows in one.items()
    )


def moetrace_dump(
    chunks: Passes,
    *,
    layers: int,
    experts: int,
    top_k: int,
    version: int = 2,
    streams: int = 0,
    hashed: int = 0,
    weights: bool = True,
) -> bytes:
    """Rows that are not there are written as the tool does: 0xFFFF in version 2, 0 in version 1, weights 0."""
    out = b"MOETRACE" + struct.pack("<7I", version, layers, experts, top_k, streams, hashed, 0)
    code, none = ("H", 0xFFFF) if version == 2 else ("B", 0)
    for chunk in chunks:
        tokens = max(len(rows) for rows in chunk.values())
        out += struct.pack("<2I", 0xC0A1E5CE, tokens) + ints(*range(1000, 1000 + tokens))
        for layer in range(layers):
            ids = flat(chunk.get(layer, []))
            missing = tokens * top_k - len(ids)
            out += struct.pack(f"<{tokens * top_k}{code}", *ids, *[none] * missing)
            gates = [1 / (place % top_k + 2) if weights else 0.0 for place in range(len(ids))]
            out += struct.pack(f"<{tokens * top_k}e", *gates, *[0.0] * missing)
            out += struct.pack(f"<{tokens * streams}e", *[0.25] * (tokens * streams))
    return out


def flash_moe_dump(passes: Passes, top_k: int, hidden: int, *, seed: int = 0) -> bytes:
    """i32 layer, K, f32 hidden, i32 ids; a record per token and layer."""
    generator = random.Random(seed)
    out = b""
    for one in passes:
        for layer, rows in one.items():
            for ids in rows:
                state = [generator.gauss(0, 1) for _ in range(hidden)]
                out += ints(layer, top_k) + struct.pack(f"<{hidden}f", *state) + ints(*ids)
    return out


def tesy_dump(passes: Passes, top_k: int, *, phases: list[str] | None = None) -> bytes:
    lines = []
    for number, one in enumerate(passes):
        for layer, rows in one.items():
            record: dict = {
                "schema": f"tesy.llama_moe_topk.v{2 if phases else 1}",
                "graph_seq": number,
                "layer": layer,
                "n_tokens": len(rows),
                "n_expert_used": top_k,
                "experts": rows,
            }
            if phases:
                record["phase"] = phases[number]
            lines.append(json.dumps(record))
    return ("\n".join(lines) + "\n").encode()


def moepager_dump(passes: Passes) -> bytes:
    """token,layer,expert,t_ns with tokens counted through the run."""
    lines, token = ["token,layer,expert,t_ns"], 0
    for one in passes:
        for layer, rows in one.items():
            for row, ids in enumerate(rows):
                lines += [f"{token + row},{layer},{expert},{10**9 + len(lines)}" for expert in ids]
        token += max(len(rows) for rows in one.values())
    return ("\n".join(lines) + "\n").encode()


def moe_log_dump(passes: Passes, *, banner: bool = True) -> bytes:
    lines = ["=== MoE Expert Selection Log ==="] if banner else []
    lines.append("Layer,Token,ExpertIDs,ExpertWeights")
    for one in passes:
        for layer, rows in one.items():
            for token, ids in enumerate(rows):
                gates = " ".join(f"{1 / (slot + 2):.4g}" for slot in range(len(ids)))
                lines.append(f'{layer},{token},"[{" ".join(map(str, ids))}]","[{gates}]"')
    return ("\n".join(lines) + "\n").encode()


def route_dump(passes: Passes, *, first_step: int = 0) -> bytes:
    """moe-prefetch's lines; every third expert is resident."""
    lines = []
    for step, one in enumerate(passes, first_step):
        for layer, rows in one.items():
            pairs = " ".join(f"{expert}:{-1 if expert % 3 else expert // 3}" for expert in flat(rows))
            lines.append(f"route {step} {layer} {len(rows[0])} {len(rows)} {pairs}")
    return ("\n".join(lines) + "\n").encode()


def gate_dump(passes: Passes) -> bytes:
    lines = [
        f"blk.{layer}.ffn_gate_exps.weight {' '.join(map(str, ids))}"
        for one in passes
        for layer, rows in one.items()
        for ids in rows
    ]
    return ("\n".join(lines) + "\n").encode()


def colibri_dump(passes: Passes) -> bytes:
    lines, call = [], 0
    for one in passes:
        for layer, rows in one.items():
            for row, ids in enumerate(rows):
                pairs = " ".join(f"{expert}:{1 / (slot + 2):.4f}" for slot, expert in enumerate(ids))
                lines.append(f"{call} {row} {layer} {pairs}")
            call += 1
    return ("\n".join(lines) + "\n").encode()


def vference_dump(passes: Passes, *, prompt_tokens: int, output_tokens: int, indent: int | None = None) -> bytes:
    records = [{"layer_id": layer, "expert_ids": rows} for one in passes for layer, rows in one.items()]
    document = {
        "format": "vference.route-trace.v1",
        "artifact": "/models/tiny",
        "prompt_tokens": prompt_tokens,
        "output_tokens": list(range(output_tokens)),
        "records": records,
    }
    separators = (",", ":") if indent is None else None
    return json.dumps(document, separators=separators, indent=indent).encode()


def gguf_text(word: str) -> bytes:
    return struct.pack("<Q", len(word.encode())) + word.encode()


def imatrix_dump(
    counts: dict[int, list[float]], *, kind: str = "imatrix", parts: tuple[str, ...] = ("gate", "up", "down")
) -> bytes:
    """A GGUF of version 3 with `.in_sum2` and `.counts` per expert stack, and one dense tensor."""
    values = gguf_text("general.type") + struct.pack("<I", 8) + gguf_text(kind)
    values += gguf_text("imatrix.chunk_count") + struct.pack("<II", 4, 7)
    values += gguf_text("imatrix.chunk_size") + struct.pack("<II", 4, 512)
    tensors: list[tuple[str, list[int], list[float]]] = [("blk.0.attn_q.weight.counts", [1, 1], [32.0])]
    for layer, of_layer in counts.items():
        for part in parts:
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            tensors.append((f"{name}.in_sum2", [4, len(of_layer)], [0.5] * (4 * len(of_layer))))
            tensors.append((f"{name}.counts", [1, len(of_layer)], of_layer))
    infos, data = b"", b""
    for name, axes, numbers in tensors:
        infos += gguf_text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, 0, len(data))
        content = struct.pack(f"<{len(numbers)}f", *numbers)
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 3) + values + infos
    return head + bytes(-len(head) % 32) + data


_PASSES = graphs([5, 1, 1, 4, 1, 1, 1, 1], [1, 2, 3], 32, 4, seed=1)
_SINGLE = graphs([1] * 8, [1, 2, 3], 32, 4, seed=2)

SEEDS = {
    "llama_moe_trace": llama_moe_trace_dump(_PASSES, 4),
    "mtsp": mtsp_dump([*_PASSES, *({3: one[3]} for one in _SINGLE[:1])], 4),
    "moetrace": moetrace_dump(_PASSES, layers=4, experts=32, top_k=4, streams=2),
    "flash_moe_routing": flash_moe_dump(_SINGLE, 4, 48),
    "tesy_moe_topk": tesy_dump(_PASSES, 4),
    "moepager_csv": moepager_dump(_PASSES),
    "llama_moe_log": moe_log_dump(_PASSES),
    "moe_prefetch_route": route_dump(_PASSES),
    "ggml_moe_log": gate_dump(_PASSES),
    "colibri_route_trace": colibri_dump(_PASSES),
    "vference_route_trace": vference_dump(_PASSES, prompt_tokens=5, output_tokens=11),
}
"""By layout, a small sound dump for whoever damages it."""
