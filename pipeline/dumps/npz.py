"""npz dumps with `experts` [layers, tokens, k] (layer-major) and an optional `meta` JSON string.

The llama.cpp eval-callback scripts write this: prompt tokens, no phases, no pass boundaries, layers in order without
their numbers. Arrays of objects would need pickle and are refused.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.arrays import Npz
from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    is_integer,
)
from schemas.trace import PHASE_CODES


def parse(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Reads header and meta at once, rows as they are asked for.

    Raises:
        MalformedDump: truncated or contradicting itself. RefusedDump: counts, pickles, other arrays.
    """
    archive = Npz(dump)
    header = archive.header("experts")
    shape, dtype = header.shape, header.dtype
    if len(shape) != 3 or dtype.kind not in "iu":
        raise RefusedDump(
            f"{dump.path}: experts is {dtype} shaped {list(shape)}, wanted integers shaped [layers, tokens, k]; "
            "counts per layer and expert, scores and masks are no trace"
        )
    layers, _, top_k = shape
    if 0 in shape:
        raise MalformedDump(f"{dump.path}: experts is shaped {list(shape)}, so it holds no route; record again")
    meta = archive.json("meta") if "meta" in archive.names else {}
    said = {key: _positive(dump.path, meta, key) for key in ("n_moe_layers", "k", "num_experts", "top_k")}
    for key, found in (("n_moe_layers", layers), ("k", top_k)):
        if said[key] not in (None, found):
            raise MalformedDump(
                f"{dump.path}: meta says {key} = {said[key]}, experts is shaped {list(shape)}; wanted "
                "[layers, tokens, k]: is an axis order wrong?"
            )
    source = meta.get("source")
    return ParsedDump(
        format="npz_experts",
        blocks=_blocks(archive, shape, asked.spool_folder),
        top_k=top_k,
        model=meta["model"] if isinstance(meta.get("model"), str) else None,
        capture_method=source if isinstance(source, str) else None,
        num_experts=said["num_experts"],
        top_k_model=said["top_k"],
        largest_storable_id=int(np.iinfo(dtype).max),
        layers_are_ordinals=True,
        pass_boundaries="assumed_per_token",
    )


LAYOUTS = (
    Layout(
        "npz_experts",
        "npz with experts [layers, tokens, k]",
        lambda sample: "experts.npy" in sample.members,
        parse,
    ),
)


def unknown(dump: DumpFile, members: Sequence[str]) -> RefusedDump:
    """The refusal of a zip whose arrays no layout claims."""
    arrays = ", ".join(name.removesuffix(".npy") for name in members[:5])
    return RefusedDump(
        f"{dump.path}: an npz without `experts` (arrays: {arrays}); wanted integer ids shaped "
        "[layers, tokens, k]. Counts per expert are no trace: record the ids of every token"
    )


def _positive(path: Path, meta: dict[str, Any], key: str) -> int | None:
    value = meta.get(key)
    if value is not None and not (is_integer(value) and 0 < value < 2**31):
        raise MalformedDump(f"{path}: meta says {key} = {str(value)[:40]!r}, wanted a positive whole number")
    return value


def _blocks(archive: Npz, shape: tuple[int, ...], spool_folder: Path) -> Iterator[RowBlock]:
    layers, tokens, top_k = shape
    stored = archive.array("experts", spool_folder)
    per_block = max(1, ROWS_PER_BLOCK // layers)
    for begin in range(0, tokens, per_block):
        end = min(begin + per_block, tokens)
        part = stored.values[:, begin:end].transpose(1, 0, 2)
        if part.dtype.itemsize >= 4 and (part.min() < -(2**31) or part.max() >= 2**31):
            raise MalformedDump(f"{archive.path}: an id beyond 31 bits among tokens {begin}..{end - 1}; record again")
        ids = np.ascontiguousarray(part, dtype=np.int32)
        stored.let_go()
        yield _block(ids.reshape(-1, top_k), begin, end, layers)


def _block(ids: npt.NDArray[np.int32], begin: int, end: int, layers: int) -> RowBlock:
    tokens = np.arange(begin, end, dtype=np.int64)
    rows = len(ids)
    return RowBlock(
        step=np.repeat(tokens, layers),
        pass_in_step=np.zeros(rows, dtype=np.int32),
        layer=np.tile(np.arange(layers, dtype=np.int32), len(tokens)),
        request=np.zeros(rows, dtype=np.int64),
        position=np.repeat(tokens, layers),
        phase=np.full(rows, PHASE_CODES["unknown"], dtype=np.int8),
        expert_ids=ids,
    )
