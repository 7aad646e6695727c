"""Counts per layer and expert that llama.cpp's importance matrix holds, as a check of a trace; a trace they are not.

In: an imatrix as GGUF. Out: counts per layer, and how a trace's own counts compare. Only `.counts` are read: the older
`.dat` keeps one call count per tensor, k times the tokens of an expert stack.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from replayer.checkpoints import MalformedCheckpoint, Tensor, read_header
from replayer.trace import read_metadata
from schemas.trace import CheckRecord

_COUNTS = re.compile(r"blk\.([0-9]{1,5})\.ffn_(gate|up|down|gate_up)_exps\.weight\.counts", re.ASCII)
_PARTS = ("gate", "gate_up", "up", "down")
_MAX_EXPERTS = 65535


@dataclass(frozen=True)
class ImatrixCounts:
    """Rows that each expert of a layer was given.

    counts: layer → (E,) whole numbers. fillers: layers of which experts stand at 1, as llama.cpp writes where it saw
    no data, with how many. disagreeing: layers whose gate, up and down counts differ. chunks, chunk_tokens: as the
    file says, null if it does not.
    """

    counts: dict[int, npt.NDArray[np.int64]]
    fillers: dict[int, int]
    disagreeing: list[int]
    chunks: int | None
    chunk_tokens: int | None


def imatrix_counts(path: Path) -> ImatrixCounts:
    """The counts of one of gate, up and down per layer; they are given the same rows.

    Raises:
        RefusedDump: no imatrix, the legacy form, or none of expert stacks. MalformedDump: broken. OSError: unreadable.
    """
    with DumpFile(path) as dump:
        if dump.raw.read(4) != b"GGUF":
            raise RefusedDump(
                f"{path}: no GGUF; a legacy imatrix (.dat) has no counts per expert: make it again with a "
                "llama-imatrix that writes GGUF"
            )
        try:
            header = read_header(path)
        except MalformedCheckpoint as error:
            raise MalformedDump(str(error)) from None
        kind = header.values.get("general.type")
        if kind != "imatrix":
            raise RefusedDump(f"{path}: a GGUF of general.type {kind!r}, wanted 'imatrix'")
        stacks: dict[int, dict[str, npt.NDArray[np.int64]]] = {}
        for tensor in header.tensors:
            match = _COUNTS.fullmatch(tensor.name)
            # A dense tensor has one count.
            if match is None or tensor.length_bytes <= 4:
                continue
            stacks.setdefault(int(match[1]), {})[match[2]] = _read_counts(dump, tensor)
        dump.check_unchanged()
    if not stacks:
        raise RefusedDump(
            f"{path}: no `.counts` of expert stacks (blk.N.ffn_*_exps.weight.counts); is the model a mixture of "
            "experts?"
        )
    counts = {layer: next(parts[part] for part in _PARTS if part in parts) for layer, parts in sorted(stacks.items())}
    sizes = {len(values) for values in counts.values()}
    if len(sizes) != 1:
        raise MalformedDump(f"{path}: layers of {sorted(sizes)[:5]} experts, wanted as many in each")
    chunks, tokens = (header.values.get(f"imatrix.{name}") for name in ("chunk_count", "chunk_size"))
    return ImatrixCounts(
        counts=counts,
        fillers={layer: int((values == 1).sum()) for layer, values in counts.items() if (values == 1).any()},
        disagreeing=[
            layer
            for layer, parts in sorted(stacks.items())
            if any(not np.array_equal(values, counts[layer]) for values in parts.values())
        ],
        chunks=chunks if isinstance(chunks, int) else None,
        chunk_tokens=tokens if isinstance(tokens, int) else None,
    )


def _read_counts(dump: DumpFile, tensor: Tensor) -> npt.NDArray[np.int64]:
    experts = int(np.prod(tensor.shape, dtype=object))
    if not 0 < experts <= _MAX_EXPERTS or tensor.length_bytes != 4 * experts:
        raise MalformedDump(
            f"{dump.path}: {tensor.name} has {tensor.length_bytes} bytes shaped {list(tensor.shape)}, wanted 32-bit "
            f"floats, one per expert, of at most {_MAX_EXPERTS}"
        )
    stream = dump.raw
    stream.seek(tensor.offset_bytes)
    values = np.frombuffer(stream.read(tensor.length_bytes), dtype="<f4")
    if not np.isfinite(values).all() or (values < 0).any() or (values != np.floor(values)).any():
        raise MalformedDump(f"{dump.path}: {tensor.name} holds what is no count: {values[:4].tolist()}")
    return values.astype(np.int64)


def trace_counts(trace: Path) -> dict[int, npt.NDArray[np.int64]]:
    """Selections per layer and expert of a canonical trace, (E,) each, warm-up included as an imatrix includes it.

    Raises:
        MalformedTrace: the file is no canonical trace.
    """
    metadata = read_metadata(trace)
    index = np.zeros(65536, dtype=np.int64)
    index[metadata.moe_layer_ids] = np.arange(len(metadata.moe_layer_ids))
    experts = max(metadata.experts_per_layer)
    counts = np.zeros((len(metadata.moe_layer_ids), experts), dtype=np.int64)
    for batch in pq.ParquetFile(trace).iter_batches(columns=["layer_id", "expert_ids"]):
        layer = np.repeat(index[batch.column("layer_id").to_numpy()], metadata.top_k_observed)
        ids = batch.column("expert_ids").flatten().to_numpy().astype(np.int64)
        counts += np.bincount(layer * experts + ids, minlength=counts.size).reshape(counts.shape)
    return dict(zip(metadata.moe_layer_ids, counts, strict=True))


def compare_counts(imatrix: ImatrixCounts, trace: Mapping[int, npt.NDArray[np.int64]]) -> list[CheckRecord]:
    """Checks of a trace's selections per layer and expert, (E,) each, against an imatrix of the same run.

    A run of the same text gives equal counts; other texts give the same sums per layer only where they are as long.
    """
    ours, theirs = sorted(trace), sorted(imatrix.counts)
    checks = [
        CheckRecord(
            name="imatrix: same layers",
            outcome="ok" if ours == theirs else "warn",
            wanted="the layers of the trace",
            found="as wanted"
            if ours == theirs
            else f"only in the trace: {sorted(set(ours) - set(theirs))[:5]}; only in the imatrix: "
            f"{sorted(set(theirs) - set(ours))[:5]}",
        )
    ]
    differing, worst, total = 0, 0.0, 0
    for layer in sorted(set(ours) & set(theirs)):
        length = max(len(trace[layer]), len(imatrix.counts[layer]))
        mine, other = (np.pad(values, (0, length - len(values))) for values in (trace[layer], imatrix.counts[layer]))
        # A filler of 1 stands for no data.
        other = np.where((other == 1) & (mine == 0), 0, other)
        distance = int(np.abs(mine - other).sum())
        differing += distance > 0
        total += int(mine.sum())
        worst = max(worst, distance / max(int(mine.sum() + other.sum()), 1))
    checks.append(
        CheckRecord(
            name="imatrix: same counts",
            outcome="ok" if not differing and total else "warn",
            wanted="each expert as often as the trace selects it",
            found=f"{differing} of {len(set(ours) & set(theirs))} layers differ, the worst in {worst:.1%} of its "
            "selections",
        )
    )
    doubtful = sum(imatrix.fillers.values())
    checks.append(
        CheckRecord(
            name="imatrix: no fillers",
            outcome="warn" if doubtful or imatrix.disagreeing else "ok",
            wanted="no count of 1, which stands for an expert without data, and equal counts of gate, up and down",
            found=f"{doubtful} experts of {len(imatrix.fillers)} layers stand at 1; gate, up and down differ in layers "
            f"{imatrix.disagreeing[:5]}",
        )
    )
    return checks
