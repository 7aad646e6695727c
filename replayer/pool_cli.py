"""The commands `replayer pool …`: arguments in, lines or one JSON document out."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replayer.command import Parser, byte_size, count
from replayer.machine import Storage
from replayer.pool import (
    CONTENT_CHECKS,
    PACKED,
    POOL_LAYOUTS,
    Pool,
    UnusablePlan,
    build_pool,
    map_pool,
    plan_pool,
    pool_storages,
    read_pool,
    verify_pool,
)
from replayer.quantities import format_bytes
from replayer.trace import read_metadata
from schemas.trace import TraceMetadata

_BUILD_EPILOG = """\
examples:
  replayer pool build --trace data/traces/ID.parquet --expert-bytes 256KiB --layout per-expert --out POOL
  replayer pool build --trace data/traces/ID.parquet --layout stacked --align none --out POOL

A build that was stopped goes on when it is started again with the same arguments.
"""
_MAP_EPILOG = """\
examples:
  replayer pool map models/OLMoE-1B-7B --out POOL
  replayer pool map ~/.cache/huggingface/hub/models--ORG--NAME/snapshots/COMMIT --out POOL
  replayer pool map models/model-Q4_K_M-00001-of-00003.gguf --out POOL

Only headers are read, and only POOL/pool.parquet is written. The checkpoint must stay where it is.
"""
_VERIFY_EPILOG = """\
examples:
  replayer pool verify POOL
  replayer pool verify POOL --content all --json

Exits 1 when a check does not hold.
"""


def add_pool_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds `pool build`, `pool map` and `pool verify` to the subparsers of a command line."""
    pool = commands.add_parser("pool", help="build, map and verify the files that a replay reads")
    leaves = pool.add_subparsers(dest="pool_command", required=True, metavar="COMMAND", parser_class=Parser)
    build = leaves.add_parser(
        "build",
        help="write a synthetic pool for the experts of a trace",
        description="Writes incompressible safetensors files that hold every expert of a trace.",
        epilog=_BUILD_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("--trace", type=Path, required=True, metavar="TRACE", help="a canonical trace")
    build.add_argument(
        "--expert-bytes", type=byte_size, metavar="B", help="size of every expert, if the trace has none"
    )
    build.add_argument(
        "--layout",
        choices=[name.replace("_", "-") for name in POOL_LAYOUTS],
        default="per-expert",
        help="a file per expert (default), a file per layer, or a file per layer with three stacked tensors",
    )
    build.add_argument(
        "--align",
        type=_alignment,
        default=os.sysconf("SC_PAGE_SIZE"),
        metavar="B",
        help="a power of two up to 1MiB that each expert starts at a multiple of (default: the page size), or none: "
        "packed, across pages",
    )
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the pool")
    _add_shared(build)
    build.set_defaults(run=_build)
    mapped = leaves.add_parser(
        "map",
        help="make a pool of a checkpoint's files, in place",
        description="Finds the routed experts of a safetensors or GGUF checkpoint and notes where they lie.",
        epilog=_MAP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mapped.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a folder of safetensors files, one such file, or a GGUF file (any part of a split one)",
    )
    mapped.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the pool, not the model's")
    _add_shared(mapped)
    mapped.set_defaults(run=_map)
    verify = leaves.add_parser(
        "verify",
        help="hold the files of a pool against its manifest",
        description="Checks storage, length, holes, headers and content of a pool.",
        epilog=_VERIFY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("pool", type=Path, metavar="DIR", help="folder of the pool")
    verify.add_argument(
        "--content",
        choices=CONTENT_CHECKS,
        default="sampled",
        help="sampled (default): first, last and one page between of every extent; all; none; what a mapped pool must "
        "hold is not known, so there it is none",
    )
    verify.add_argument("--seed", type=count, default=0, help="chooses the page between")
    _add_shared(verify)
    verify.set_defaults(run=_verify)


def _add_shared(leaf: argparse.ArgumentParser) -> None:
    leaf.add_argument(
        "--allow-unsuitable",
        action="store_true",
        help="go on, with a mark, on a file system in memory, compressed, layered or remote",
    )
    leaf.add_argument("--json", action="store_true", help="print one JSON document")
    leaf.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _alignment(text: str) -> int:
    return PACKED if text == "none" else byte_size(text)


def _build(arguments: argparse.Namespace) -> int:
    metadata = read_metadata(arguments.trace)
    plan = plan_pool(
        metadata.moe_layer_ids,
        metadata.experts_per_layer,
        _sizes(metadata, arguments.expert_bytes),
        layout=arguments.layout.replace("-", "_"),
        alignment_bytes=arguments.align,
    )
    progress = _Progress("written")
    try:
        pool = build_pool(plan, arguments.out, progress=progress, allow_unsuitable=arguments.allow_unsuitable)
    finally:
        progress.end()
    file_bytes = int(pool.file_bytes.sum())
    storages = pool_storages(pool)
    if arguments.json:
        document = _identity(pool, storages)
        document["kept_bytes"] = progress.first_bytes
        document["written_bytes"] = file_bytes - progress.first_bytes
        print(json.dumps(document))
        return 0
    if progress.first_bytes == file_bytes:
        what = "was complete already; nothing was written"
    elif progress.first_bytes:
        what = f"complete; {format_bytes(progress.first_bytes)} were there from an earlier build"
    else:
        what = "complete"
    print(f"{_described(pool)}, {what}")
    _print_places(storages)
    return 0


def _map(arguments: argparse.Namespace) -> int:
    pool = map_pool(arguments.model, arguments.out, allow_unsuitable=arguments.allow_unsuitable)
    storages = pool_storages(pool)
    checkpoint = pool.checkpoint
    assert checkpoint is not None, "a pool in that layout was mapped"
    if arguments.json:
        document = _identity(pool, storages)
        document["checkpoint"] = checkpoint.model
        document["scheme"] = checkpoint.scheme
        document["parts"] = sorted(set(checkpoint.extent_part))
        document["moe_layer_ids"] = list(pool.moe_layer_ids)
        document["experts_per_layer"] = list(pool.experts_per_layer)
        document["expert_bytes_min"] = int(pool.object_bytes.min())
        document["expert_bytes_max"] = int(pool.object_bytes.max())
        document["left_out"] = [dataclasses.asdict(one) for one in checkpoint.left_out]
        print(json.dumps(document))
        return 0
    print(_described(pool))
    print(f"  {checkpoint.scheme}: {', '.join(sorted(set(checkpoint.extent_part)))}")
    layers, experts = pool.moe_layer_ids, pool.experts_per_layer
    which = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    print(
        f"  {which}, {_range(min(experts), max(experts), str)} experts each, "
        f"{_range(int(pool.object_bytes.min()), int(pool.object_bytes.max()), format_bytes)} an expert"
    )
    for one in checkpoint.left_out:
        print(f"  left out: {one.reason} ({one.tensors} tensors, {format_bytes(one.bytes)})")
    _print_places(storages)
    return 0


def _range(least: int, most: int, shown: Callable[[int], str]) -> str:
    return shown(least) if least == most else f"{shown(least)} to {shown(most)}"


def _sizes(metadata: TraceMetadata, expert_bytes: int | None) -> int | npt.NDArray[np.int64]:
    if metadata.expert_bytes is None:
        if expert_bytes is None:
            raise UnusablePlan(
                f"trace {metadata.trace_id} does not say how large an expert is; wanted --expert-bytes B"
            )
        return expert_bytes
    layers = range(len(metadata.moe_layer_ids))
    sizes = np.array([size for layer in layers for size in metadata.sizes_of_layer(layer) or []], dtype=np.int64)
    if expert_bytes is not None and (other := sizes[sizes != expert_bytes]).size:
        raise UnusablePlan(
            f"--expert-bytes {expert_bytes}, but trace {metadata.trace_id} has an expert of {other[0]} bytes; leave it "
            "out to build the sizes of the trace"
        )
    return sizes


def _verify(arguments: argparse.Namespace) -> int:
    pool = read_pool(arguments.pool)
    progress = _Progress("verified")
    try:
        checks = verify_pool(
            pool,
            content=arguments.content,
            seed=arguments.seed,
            allow_unsuitable=arguments.allow_unsuitable,
            progress=progress,
        )
    finally:
        progress.end()
    holds = all(check.held for check in checks)
    storages = pool_storages(pool)
    if arguments.json:
        document = _identity(pool, storages)
        document["content_checked"] = "none" if pool.content is None else arguments.content
        document["seed"] = arguments.seed
        document["holds"] = holds
        document["checks"] = [dataclasses.asdict(check) for check in checks]
        print(json.dumps(document))
    else:
        print(_described(pool))
        _print_places(storages)
        if pool.checkpoint is not None:
            print(f"  of {pool.checkpoint.model}; its content is not known, so it is not checked")
        for check in checks:
            print(
                f"  {'held' if check.held else 'FAILED':<7} {check.name:<8} wanted {check.wanted}; found {check.found}"
            )
    return 0 if holds else 1


def _identity(pool: Pool, storages: Sequence[Storage]) -> dict[str, Any]:
    # One that is unsuitable decides what the pool is good for.
    worst = next((storage for storage in storages if not storage.suitable), storages[0])
    return {
        "pool_id": pool.pool_id,
        "folder": str(pool.folder),
        "layout": pool.layout,
        "content": pool.content,
        "alignment_bytes": pool.alignment_bytes,
        "moe_layers": len(pool.moe_layer_ids),
        "pool_experts": pool.num_objects,
        "pool_bytes": int(pool.object_bytes.sum()),
        "files": len(pool.files),
        "file_bytes": int(pool.file_bytes.sum()),
        "filesystem": worst.filesystem,
        "device": worst.device,
        "storage_kind": worst.kind,
        "suitable_storage": worst.suitable,
        "storage_reason": worst.reason,
        "devices": [storage.device for storage in storages],
        "unsuitable_storage_when_built": pool.unsuitable_storage,
    }


def _described(pool: Pool) -> str:
    place = f"aligned to {pool.alignment_bytes} bytes"
    if pool.alignment_bytes == PACKED:
        place = "packed" if pool.checkpoint is None else "in place"
    return (
        f"{pool.pool_id}: {pool.num_objects:,} experts of {len(pool.moe_layer_ids)} layers, "
        f"{format_bytes(int(pool.object_bytes.sum()))} in {len(pool.files):,} files, "
        f"{pool.layout.replace('_', '-')}, {place}"
    )


def _print_places(storages: Sequence[Storage]) -> None:
    for storage in storages:
        mark = "" if storage.suitable else f", UNSUITABLE: {storage.reason}"
        print(f"  {storage.filesystem} on {storage.device or 'no device'}{mark}")


class _Progress:
    """One line on a terminal that is written again and again; silent in a pipe."""

    def __init__(self, verb: str) -> None:
        self.first_bytes = 0
        self._verb = verb
        self._calls = 0
        self._shown = sys.stderr.isatty()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if not self._calls:
            self.first_bytes = done_bytes
        self._calls += 1
        if self._shown:
            line = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)} {self._verb}"
            print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown and self._calls:
            print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)
