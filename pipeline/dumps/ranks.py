"""Several ranks of one dump: which are replicas of each other and which shards, and their rows put together.

Letters: T tokens of a record, K experts per token.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    MalformedDump,
    RowBlock,
)
from schemas.trace import PHASE_CODES, CheckRecord

MAX_EVENT_ROWS = 65_536
"""Most rows of one layer in one step; more cannot be numbered in a trace."""

TELLING_SELECTIONS = 32
"""Selections from which on equal content of two ranks is no coincidence: 4 tokens of 8 of even 16 experts agree by
chance once in 10^16."""


class Rank:
    """What is remembered of one rank: a digest of all it holds, hashes of the records that tell, and its layers.

    A record is told from others where it has TELLING_SELECTIONS or more; eight bytes are kept of each.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.records = 0
        self.layers: set[int] = set()
        self.telling = array("Q")
        self._whole = hashlib.blake2b(digest_size=16)

    def add(self, key: tuple[int, ...], ids: npt.NDArray[np.int32]) -> None:
        """Remembers a record, its layer the last of its key; `ids` (T, K)."""
        content = hashlib.blake2b(repr((key, ids.shape)).encode() + ids.tobytes(), digest_size=8).digest()
        self._whole.update(content)
        self.records += 1
        self.layers.add(key[-1])
        if ids.size >= TELLING_SELECTIONS:
            self.telling.append(int.from_bytes(content, "little"))

    @property
    def digest(self) -> bytes:
        return self._whole.digest()


def shards(where: Path, ranks: Sequence[Rank]) -> tuple[list[int], list[int], CheckRecord]:
    """(indices of the ranks to read, the request of each, the check that says why).

    A rank whose every record another one has is a replica. Ranks with other layers are stages of a pipeline.

    Raises:
        MalformedDump: two ranks share some records that cannot agree by chance, but not all; or ranks have different
            layers, and which of them hold the same tokens is not in the dump.
    """
    groups: dict[bytes, int] = {}
    for index, rank in enumerate(ranks):
        groups.setdefault(rank.digest, index)
    kept = sorted(groups.values())
    every = np.sort(np.concatenate([np.frombuffer(ranks[index].telling, dtype=np.uint64) for index in kept]))
    twice = every[1:][every[1:] == every[:-1]]
    if len(twice):
        shared = [
            (int(np.isin(np.frombuffer(ranks[index].telling, dtype=np.uint64), twice).sum()), index) for index in kept
        ]
        said = ", ".join(f"{count} of the {ranks[index].records} of {ranks[index].name}" for count, index in shared[:4])
        raise MalformedDump(
            f"{where}: ranks share records with equal routes, but not all ({said} stand in another rank too): replicas "
            "must be equal and shards must not; is a file truncated?"
        )
    layers = {frozenset(ranks[index].layers) for index in kept}
    are_stages = len(layers) > 1
    if are_stages and (len(layers) < len(kept) or sum(map(len, layers)) != len(frozenset[int]().union(*layers))):
        listed = "; ".join(f"{ranks[index].name}: {_few(ranks[index].layers)}" for index in kept[:4])
        raise MalformedDump(
            f"{where}: ranks have different layers ({listed}), and which of them hold the same tokens is not in the "
            "dump; ingest the ranks of one data-parallel group alone"
        )
    replicas = len(ranks) - len(kept)
    how = (
        "stages with layers of their own, put together"
        if are_stages
        else "different ones joined as shards, one request each"
        if len(kept) > 1
        else "kept"
    )
    return (
        kept,
        [0] * len(kept) if are_stages else list(range(len(kept))),
        CheckRecord(
            name="ranks are replicas or shards",
            outcome="ok",
            wanted="every rank equals another one in all records (a replica, kept once) or in none (a shard, joined)",
            found=f"{len(ranks)} ranks: {replicas} replicas left out, {len(kept)} {how}",
        ),
    )


def _few(layers: set[int]) -> str:
    listed = sorted(layers)
    return f"{listed[:3]}{f' and {len(listed) - 3} more' if len(listed) > 3 else ''}"


def missing_ranks(where: Path, ranks: Iterable[int], wanted: int | None = None) -> None:
    """Refuses a set of ranks with a gap, or with fewer than `wanted`.

    Raises:
        MalformedDump: it names the missing ones.
    """
    there = set(ranks)
    gone = [rank for rank in range(max(wanted or 0, max(there) + 1)) if rank not in there]
    if gone:
        more = f" and {len(gone) - 5} more" if len(gone) > 5 else ""
        raise MalformedDump(
            f"{where}: the file of rank {', '.join(map(str, gone[:5]))}{more} is missing, there are those of "
            f"{', '.join(map(str, sorted(there)[:8]))}; copy all of them into the folder"
        )


def joined_step(
    step: int, layers: Mapping[int, Sequence[npt.NDArray[np.int32]]], requests: Sequence[int]
) -> RowBlock | None:
    """One step of several shards: per layer the rows of each, in the order of `requests`; null if there are none."""
    numbers = [number for number in sorted(layers) if sum(len(part) for part in layers[number])]
    if not numbers:
        return None
    parts = [
        (number, request, ids) for number in numbers for request, ids in zip(requests, layers[number], strict=True)
    ]
    counts = [len(ids) for _, _, ids in parts]
    rows = sum(counts)
    return RowBlock(
        step=np.full(rows, step, dtype=np.int64),
        pass_in_step=np.zeros(rows, dtype=np.int32),
        layer=np.repeat(np.array([number for number, _, _ in parts], dtype=np.int32), counts),
        request=np.repeat(np.array([request for _, request, _ in parts], dtype=np.int64), counts),
        position=None,
        phase=np.full(rows, PHASE_CODES["unknown"], dtype=np.int8),
        expert_ids=np.concatenate([ids for _, _, ids in parts]),
    )


def gathered(blocks: Iterable[RowBlock]) -> Iterator[RowBlock]:
    """Small blocks of whole steps, without positions and weights, joined to blocks of about ROWS_PER_BLOCK rows."""
    held: list[RowBlock] = []
    for block in blocks:
        held.append(block)
        if sum(part.rows for part in held) >= ROWS_PER_BLOCK or len(held) >= 4096:
            yield _one(held)
            held = []
    if held:
        yield _one(held)


def _one(blocks: list[RowBlock]) -> RowBlock:
    return RowBlock(
        step=np.concatenate([block.step for block in blocks]),
        pass_in_step=np.concatenate([block.pass_in_step for block in blocks]),
        layer=np.concatenate([block.layer for block in blocks]),
        request=np.concatenate([block.request for block in blocks]),
        position=None,
        phase=np.concatenate([block.phase for block in blocks]),
        expert_ids=np.concatenate([block.expert_ids for block in blocks]),
    )
