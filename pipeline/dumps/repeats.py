"""Dumps that hold something twice: a file joined with itself, a request recorded again, a response saved again.

In: blocks of rows, or ids of responses with a digest of their routes. Out: the same blocks, or a refusal that names
both places. What is remembered are hashes, as many as the limits below allow, never rows.

A request that was really run twice has equal routes too, so equal content is evidence only where the dump itself says
that it is the same request, or where nothing tells requests apart and the whole dump is one part several times over.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import MalformedDump, ParsedDump, RowBlock

TELLING_SELECTIONS = 32
"""Selections from which on equal content is no coincidence: 4 tokens of 8 of even 16 experts agree by chance once in
10^16."""

MAX_REQUESTS = 2**18
"""Most requests and responses that are remembered; later ones are not compared."""

MAX_CANDIDATES = 2**20
"""Most steps that are remembered as possible beginnings of a second copy, 16 bytes each."""

_BASE = 0x9E3779B97F4A7C15
"""Base of the polynomial over the steps, odd so that no step is lost modulo 2^64 (the constant of splitmix64)."""
_MASK = 2**64 - 1
_CHECK = "no pass twice"


def watched(path: Path, parsed: ParsedDump) -> Iterator[RowBlock]:
    """The dump's blocks, looked at as they pass.

    Raises:
        MalformedDump: all steps are a first part of them several times over, and nothing rules copies out; or requests
        have names, and one stands twice with the same positions and routes.
    """
    return _looked_at(path, parsed, parsed.blocks)


def _looked_at(path: Path, parsed: ParsedDump, blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
    steps = _Steps(path)
    requests = _Requests(path, parsed.top_k) if parsed.requests_named else None
    for block in blocks:
        if block.rows:
            steps.see(block)
            if requests is not None:
                requests.see(block)
        yield block
    if requests is not None:
        requests.finish()
    elif not parsed.copies_ruled_out:
        # Whether every request of a file has a name is known at its end.
        steps.finish()


@numba.njit(cache=True, nogil=True)
def _row_marks(layer, expert_ids, marks):  # type: ignore[no-untyped-def]
    """Fills `marks` (R,) with a hash of each row's layer and ids in their order (FNV-1a, then splitmix64's mix)."""
    for row in range(len(layer)):
        mark = np.uint64(0xCBF29CE484222325) ^ np.uint64(layer[row] + 1)
        for rank in range(expert_ids.shape[1]):
            mark = (mark ^ np.uint64(expert_ids[row, rank] + 1)) * np.uint64(0x100000001B3)
        mark = (mark ^ (mark >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        marks[row] = mark ^ (mark >> np.uint64(27))


@numba.njit(cache=True, nogil=True)
def _step_marks(step, layer, marks, first_of_layer):  # type: ignore[no-untyped-def]
    """(hash of each step over its rows in order, whether a row differs from the first one of its layer)."""
    found = np.zeros(len(step), dtype=np.uint64)
    steps, varies = -1, False
    for row in range(len(step)):
        if row == 0 or step[row] != step[row - 1]:
            steps += 1
            found[steps] = np.uint64(1)
        found[steps] = (found[steps] ^ marks[row]) * np.uint64(0x9E3779B97F4A7C15)
        found[steps] ^= found[steps] >> np.uint64(29)
        if first_of_layer[layer[row]] == 0:
            first_of_layer[layer[row]] = marks[row]
        elif first_of_layer[layer[row]] != marks[row]:
            varies = True
    return found[: steps + 1], varies


@numba.njit(cache=True, nogil=True)
def _fold(steps, first_step, number, prefix, begins, prefixes, found):  # type: ignore[no-untyped-def]
    """(prefix hash after `steps`, candidates found): a step like the first may begin a copy of what stands before."""
    for step in steps:
        if number > 0 and step == first_step and found < len(begins):
            begins[found], prefixes[found] = number, prefix
            found += 1
        prefix = prefix * np.uint64(0x9E3779B97F4A7C15) + step
        number += 1
    return prefix, found


class _Steps:
    """Whether the steps of a dump are its first ones several times over, found by a polynomial over their hashes.

    The whole is q copies of its first p steps if its hash is that of the first p, taken q times; p is one of the places
    at which a step like the first one stands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = self.selections = self._found = 0
        self._varies = False
        self._first_step = np.uint64(0)
        self._prefix = np.uint64(0)
        self._first_of_layer = np.zeros(65536, dtype=np.uint64)
        self._begins = np.zeros(1024, dtype=np.int64)
        self._prefixes = np.zeros(1024, dtype=np.uint64)

    def see(self, block: RowBlock) -> None:
        # Layers and ids out of range are refused elsewhere, with their place.
        layer = block.layer.astype(np.int64) & 0xFFFF
        marks = np.empty(block.rows, dtype=np.uint64)
        _row_marks(layer, block.expert_ids, marks)
        steps, varies = _step_marks(block.step, layer, marks, self._first_of_layer)
        self._varies |= bool(varies)
        if not self.steps:
            self._first_step = steps[0]
        room = min(self._found + len(steps), MAX_CANDIDATES)
        if room > len(self._begins):
            self._begins = np.resize(self._begins, min(2 * room, MAX_CANDIDATES))
            self._prefixes = np.resize(self._prefixes, len(self._begins))
        prefix, self._found = _fold(
            steps, self._first_step, self.steps, self._prefix, self._begins, self._prefixes, self._found
        )
        self._prefix = np.uint64(prefix)
        self.steps += len(steps)
        self.selections += block.expert_ids.size

    def finish(self) -> None:
        # A dump that never changes is judged by what it repeats, not by how often.
        if not self._varies:
            return
        for begin, prefix in zip(
            self._begins[: self._found].tolist(), self._prefixes[: self._found].tolist(), strict=True
        ):
            copies, rest = divmod(self.steps, begin)
            if rest or self.selections // copies < TELLING_SELECTIONS:
                continue
            if prefix * _geometric(pow(_BASE, begin, 2**64), copies) & _MASK == int(self._prefix):
                raise MalformedDump(
                    f"{self.path}: {self.steps} steps, which are the first {begin} of them {copies} times over (step "
                    f"{begin}, counted from 0, begins again like step 0, and so to the end); wanted each once: a file "
                    "that was joined with itself, or copied beside itself? leave the copies out",
                    check=_CHECK,
                )


def _geometric(ratio: int, terms: int) -> int:
    """1 + ratio + … of so many terms, modulo 2^64."""
    total, power, step = 0, 1, 1
    # Doubling: `step` is the sum of as many terms as the bit stands for, `ratio` its power.
    while terms:
        if terms & 1:
            total = (total + power * step) & _MASK
            power = power * ratio & _MASK
        step = (step + ratio * step) & _MASK
        ratio = ratio * ratio & _MASK
        terms >>= 1
    return total


class _Requests:
    """Whether a named request stands twice: from one place at which its positions go back to the next, all is equal."""

    def __init__(self, path: Path, top_k: int) -> None:
        self.path, self.top_k = path, top_k
        self._layer: int | None = None
        self._running: dict[int, tuple[int, int, int, int, int]] = {}
        """Request → first position, last one, sum of its rows' hashes, rows, first step."""
        self._ended: dict[tuple[int, int, int], int] = {}
        """(request, rows, sum) → first step."""

    def see(self, block: RowBlock) -> None:
        if block.position is None:
            return
        if self._layer is None:
            self._layer = int(block.layer[0])
        marks = np.empty(block.rows, dtype=np.uint64)
        _row_marks(block.layer.astype(np.int64) & 0xFFFF, block.expert_ids, marks)
        place = block.position.astype(np.uint64) * np.uint64(2) + np.uint64(1)
        marks = marks * (place * np.uint64(_BASE) | np.uint64(1))
        order = np.lexsort((block.step, block.request))
        request, step = block.request[order], block.step[order]
        begins = np.flatnonzero((np.diff(request, prepend=request[0] - 1) != 0) | (np.diff(step, prepend=-1) != 0))
        sums = np.add.reduceat(marks[order], begins)
        rows = np.diff(np.append(begins, len(order)))
        # Which positions a step begins and ends with is seen in one layer: a pass goes through them again in each.
        in_layer = block.layer[order] == self._layer
        position = block.position[order]
        low = np.minimum.reduceat(np.where(in_layer, position, 2**62), begins)
        high = np.maximum.reduceat(np.where(in_layer, position, -1), begins)
        request, step = request[begins], step[begins]
        cut = np.ones(len(begins), dtype=bool)
        cut[1:] = (np.diff(request) != 0) | (low[1:] <= high[:-1])
        starts = np.flatnonzero(cut)
        parts = zip(
            request[starts].tolist(), low[starts].tolist(), np.maximum.reduceat(high, starts).tolist(),
            np.add.reduceat(sums, starts).tolist(), np.add.reduceat(rows, starts).tolist(), step[starts].tolist(),
            strict=True,
        )  # fmt: skip
        for one, first, last, total, count, begin in parts:
            before = self._running.get(one)
            if before is not None and first <= before[1]:
                self._end(one, before)
                before = None
            if before is None and len(self._running) >= MAX_REQUESTS:
                continue
            start, _, sum_before, rows_before, at = before or (first, -1, 0, 0, begin)
            self._running[one] = (start, last, (sum_before + total) & _MASK, rows_before + count, at)

    def finish(self) -> None:
        for one, state in self._running.items():
            self._end(one, state)

    def _end(self, request: int, state: tuple[int, int, int, int, int]) -> None:
        first, last, total, rows, begin = state
        # One token that runs again is no copy of a request: speculation that failed does that.
        if first == last or rows * self.top_k < TELLING_SELECTIONS or len(self._ended) >= MAX_REQUESTS:
            return
        before = self._ended.setdefault((request, rows, total), begin)
        if before != begin:
            raise MalformedDump(
                f"{self.path}: request {request} (numbered as in the trace) stands twice with the same positions and "
                f"routes, {rows} rows from step {before} on and again from step {begin} on (counted from 0); wanted it "
                "once: was a file joined with itself, or a part saved again? leave one out",
                check="positions continuous",
            )


class Responses:
    """Ids of responses and hashes of their routes: which came before, and whether all have one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unnamed = 0
        self._seen: dict[bytes, tuple[bytes, str]] = {}

    def see(
        self, name: object, routes: bytes, where: str, *, part: tuple[str, ...] = (), is_unique: bool = True
    ) -> None:
        """A response by its id (null if it has none), or a part of it; `is_unique` where one id never names two.

        Raises:
            MalformedDump: it came before, with the same routes; or with others, though its id is unique.
        """
        if name is None:
            self.unnamed += 1
            return
        key = hashlib.blake2b(repr((name, part)).encode("utf-8", "backslashreplace"), digest_size=12).digest()
        before = self._seen.get(key)
        if before is None:
            if len(self._seen) < MAX_REQUESTS:
                self._seen[key] = (routes, where)
            return
        if before[0] == routes:
            raise MalformedDump(
                f"{self.path}{where}: id {str(name)[:60]!r} with the routes of the response{before[1]}; wanted each "
                "response once: was a file joined with itself, or a response saved again? leave one out",
                check=_CHECK,
            )
        if is_unique:
            raise MalformedDump(
                f"{self.path}{where}: id {str(name)[:60]!r} as the response{before[1]} has, with other routes; wanted "
                "each response once: of a stream save the last piece alone, and ingest two runs apart",
                check=_CHECK,
            )


def digest_of(arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    """A digest of arrays one after the other, with their shapes."""
    whole = hashlib.blake2b(digest_size=16)
    for array in arrays:
        whole.update(repr((array.shape, array.dtype.str)).encode())
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.digest()
