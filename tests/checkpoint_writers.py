"""Writes tiny checkpoints byte by byte, with no code of the readers under test, and reads mapped pools back.

A `Tensors` is name → (dtype of safetensors, shape, bytes); `gguf_file` does the same for GGUF. No test cases live here.
"""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from replayer.pool import Pool, PoolPlan

Tensors = dict[str, tuple[str, list[int], bytes]]
Parts = dict[tuple[int, int], dict[str, bytes]]
"""(layer, expert) → part → its bytes."""

ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}


def filled(dtype: str, shape: list[int], seed: int) -> tuple[str, list[int], bytes]:
    """A tensor of random bytes."""
    length = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return dtype, shape, np.random.default_rng(seed).bytes(length)


def safetensors_file(tensors: Tensors, *, gap: int = 0) -> bytes:
    """The format in its words: 8 bytes of length, JSON, then the tensors one after the other."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content + bytes(gap)
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(header)) + header + data


def write_sharded(folder: Path, tensors: Tensors, shards: int, *, prefix: str = "model") -> list[Path]:
    """Shards with an index, tensors dealt out one by one, so that experts lie in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{prefix}-{one + 1:05}-of-{shards:05}.safetensors" for one in range(shards)]
    held: list[Tensors] = [{} for _ in names]
    weight_map = {}
    for place, (name, tensor) in enumerate(tensors.items()):
        held[place % shards][name] = tensor
        weight_map[name] = names[place % shards]
    for name, own in zip(names, held, strict=True):
        (folder / name).write_bytes(safetensors_file(own))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / name for name in names]


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word.encode())) + word.encode()


def gguf_value(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf_number(key: str, number: int) -> bytes:
    return gguf_value(key, 4, struct.pack("<I", number))


def gguf_file(
    tensors: Iterable[tuple[str, list[int], int, bytes]],
    values: Iterable[bytes] = (),
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """`tensors` are (name, axes with the innermost first, number of the ggml type, bytes)."""
    tensors, values = list(tensors), list(values)
    infos, data = b"", b""
    for name, axes, kind, content in tensors:
        infos += text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, len(data))
        data += content + bytes(-len(content) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + b"".join(values) + infos
    return head + bytes(-len(head) % alignment) + data


def parts_of(pool: Pool | PoolPlan) -> Parts:
    """Every expert's bytes, gathered from the files through the pool's extents alone."""
    found: Parts = {}
    for extent in range(len(pool.extent_file)):
        item = int(pool.extent_object[extent])
        place = (int(pool.object_layer_id[item]), int(pool.object_expert_id[item]))
        with Path(pool.files[pool.extent_file[extent]]).open("rb") as file:
            file.seek(int(pool.extent_offset_bytes[extent]))
            content = file.read(int(pool.extent_length_bytes[extent]))
        part = pool.checkpoint.extent_part[extent]
        assert part not in found.setdefault(place, {})
        found[place][part] = content
    return found
