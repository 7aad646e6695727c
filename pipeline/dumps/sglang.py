"""SGLang's expert distribution recorder: what mode per_token saves (`.pt`), one file per rank.

From sglang `python/sglang/srt/eplb/expert_distribution.py`: {records, last_physical_to_logical_map [L, P]}; a record is
one forward pass of one rank: forward_pass_id, rank, gatherer_key, forward_mode, input_ids [T], positions [T],
extend_seq_lens, topk_ids_of_layer int32 [L, T, 8], global_physical_count [L, P]. Every hidden layer has a plane, dense
ones hold −1 alone; a router of fewer than 8 experts leaves a tail of −1. Ids are physical, and only the last map from
physical to logical experts is stored. There are no request ids. Modes per_pass and stat save counts.

Letters: L hidden layers, T tokens of a pass, K experts per token, P physical experts, W width of the axis.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    Asked,
    DumpFolder,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    is_integer,
)
from pipeline.dumps.torch_file import Loaded, Tree, TreeLayout, TreeNoTrace, describe, numbers
from schemas.trace import PHASE_CODES, CheckRecord, IdSpace

EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND = 1, 2, 3, 4, 5, 6
"""Values of SGLang's ForwardMode (`srt/model_executor/forward_batch_info.py`), the same in all versions seen; larger
ones changed their meaning between versions, so such passes have an unknown phase."""

LONE_SHARE = 0.1
"""Largest share of the passes two ranks have in common that may hold the same tokens by chance: shards that decode one
sequence each meet at a position with the same token, and a health check goes to all of them. More is a majority of
neither, and refused."""

_SCAN_VALUES = 2 * 1024 * 1024
_PREFILL, _DECODE, _UNKNOWN = (PHASE_CODES[name] for name in ("prefill", "decode", "unknown"))


@dataclass(frozen=True)
class _Pass:
    """One forward pass of one rank; ids (L, T, W) as stored, lengths of the sequences of an extend pass or null."""

    loaded: Loaded
    rank: int
    number: int
    mode: int | None
    ids: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any] | None
    lengths: list[int] | None
    counts: npt.NDArray[Any] | None

    @property
    def where(self) -> str:
        return f"{self.loaded.path}, forward pass {self.number} of rank {self.rank}"


@dataclass
class _Scan:
    """What one walk over all passes of a recording finds, before any row is made."""

    layers: npt.NDArray[np.bool_]
    columns: npt.NDArray[np.bool_]
    captured: list[bool] = field(default_factory=list)
    digests: list[tuple[bytes, bytes]] = field(default_factory=list)
    counted: int = 0
    uncounted: list[str] = field(default_factory=list)


def parse_recorder(loaded: Loaded, asked: Asked) -> ParsedDump:
    """One rank's file of a per_token recording.

    Raises:
        RefusedDump: counts (per_pass), physical ids without a map, more experts per token than the recorder stores.
        MalformedDump: fields that contradict each other.
    """
    return _recording([loaded], loaded.path, asked)


def parse_recorder_folder(loaded: Sequence[Loaded], folder: DumpFolder, asked: Asked) -> ParsedDump:
    """The files of all ranks of one recording.

    Ranks that hold the same tokens (tensor parallelism) must hold the same routes, and one of them is kept; ranks that
    hold different tokens (data parallelism) are joined, each pass of each as a step of its own.

    Raises:
        As `parse_recorder`; also where ranks are equal in part, or one is missing.
    """
    return _recording(loaded, folder.path, asked)


def _recording(files: Sequence[Loaded], path: Path, asked: Asked) -> ParsedDump:
    passes: list[_Pass] = []
    file_of_rank: dict[int, Path] = {}
    for one in files:
        found = _passes_of(one)
        for rank in sorted({each.rank for each in found}):
            if rank in file_of_rank:
                raise RefusedDump(
                    f"{one.path}: rank {rank}, as {file_of_rank[rank].name} is: two recordings, or stages of a "
                    "pipeline; a folder holds one file per rank of one recording, ingest them apart"
                )
            file_of_rank[rank] = one.path
        passes += found
    missing = sorted(set(range(max(file_of_rank) + 1)) - set(file_of_rank)) if len(file_of_rank) > 1 else []
    if missing:
        raise MalformedDump(
            f"{path}: the file of rank {missing[0]} is missing (ranks {sorted(file_of_rank)} are there, "
            f"{len(missing)} are not); add expert_distribution_recorder_*_{missing[0]}.pt"
        )
    shape = (passes[0].ids.shape[0], passes[0].ids.shape[2])
    for each in passes:
        if (each.ids.shape[0], each.ids.shape[2]) != shape:
            raise MalformedDump(
                f"{each.where}: topk_ids_of_layer is shaped {list(each.ids.shape)}, wanted [{shape[0]}, tokens, "
                f"{shape[1]}] as in the first pass"
            )
    layers, width = shape
    slots, id_space = _map_of(files, layers, asked)
    scan = _scan(passes, layers, width, slots, is_compared=len(file_of_rank) > 1)
    top_k = _top_k(path, scan, width, asked.user.top_k_model)
    checks = [_rank_check(path, passes, scan), _count_check(passes, scan), *_gap_checks(passes)]
    keep = _kept_ranks(passes, scan)
    order = sorted(
        (index for index, each in enumerate(passes) if each.rank in keep),
        key=lambda index: (passes[index].number, passes[index].rank),
    )
    parsed = ParsedDump(
        format="sglang_recorder",
        blocks=iter(()),
        top_k=top_k,
        engine="SGLang",
        capture_method="expert distribution recorder, per_token",
        hidden_layers=layers,
        num_experts=slots,
        id_space=id_space,
        checks=checks,
    )
    parsed.blocks = _recorded_blocks([(passes[index], scan.captured[index]) for index in order], scan, top_k, parsed)
    return parsed


def _passes_of(one: Loaded) -> list[_Pass]:
    records = one.tree["records"]
    if not isinstance(records, list) or not records:
        raise MalformedDump(
            f"{one.path}: no record; was the recorder started (start_expert_distribution_record) before the requests?"
        )
    passes = [_pass_of(one, number, record) for number, record in enumerate(records)]
    last: dict[int, int] = {}
    for each in passes:
        if each.number <= last.get(each.rank, -1):
            raise MalformedDump(
                f"{each.where}: stands after pass {last[each.rank]}; a pass recorded twice counts twice: remove the "
                "repetition, or record again"
            )
        last[each.rank] = each.number
    return passes


def _pass_of(one: Loaded, index: int, record: Tree) -> _Pass:
    where = f"{one.path}, record {index}"
    if not isinstance(record, dict):
        raise MalformedDump(f"{where}: {describe(record)}, wanted a dict per forward pass")
    if "topk_ids_of_layer" not in record:
        if "global_physical_count" in record:
            raise RefusedDump(
                f"{one.path}: counts per layer and expert of each pass (recorder mode per_pass), not the routes of "
                "tokens; record with --expert-distribution-recorder-mode per_token"
            )
        raise MalformedDump(f"{where}: no topk_ids_of_layer ({describe(record)}); record with mode per_token")
    ids: Any = record["topk_ids_of_layer"]
    rank: Any = record.get("rank")
    number: Any = record.get("forward_pass_id")
    if (
        not isinstance(ids, np.ndarray)
        or ids.dtype.kind not in "iu"
        or ids.ndim != 3
        or 0 in (ids.shape[0], ids.shape[2])
    ):
        raise MalformedDump(f"{where}: topk_ids_of_layer is {describe(ids)}, wanted integers [layers, tokens, 8]")
    if not is_integer(rank) or not is_integer(number) or not 0 <= rank < 2**16 or not 0 <= number < 2**62:
        raise MalformedDump(
            f"{where}: rank {describe(rank)}, forward_pass_id {describe(number)}; wanted whole numbers of 0 or more"
        )
    key = record.get("gatherer_key", "primary")
    if not isinstance(key, str) or key != "primary":
        raise RefusedDump(
            f"{where}: gatherer_key {describe(key)}: half a pass (two-batch overlap), wanted "
            "primary; record with it off"
        )
    tokens = ids.shape[1]
    lists: dict[str, npt.NDArray[Any] | None] = {}
    for name in ("positions", "input_ids", "extend_seq_lens"):
        value = record.get(name)
        lists[name] = np.zeros(0, dtype=np.int64) if isinstance(value, list) and not value else numbers(value)
        found = lists[name]
        is_sound = (
            found is not None and found.ndim == 1 and found.dtype.kind in "iu" and (not len(found) or found.min() >= 0)
        )
        if value is None and name != "positions":
            continue
        if not is_sound or (name != "extend_seq_lens" and len(found) != tokens):  # type: ignore[arg-type]
            raise MalformedDump(
                f"{where}: {name} is {describe(value)}, wanted {tokens} whole numbers of 0 or more, one a token"
                if name != "extend_seq_lens"
                else f"{where}: extend_seq_lens is {describe(value)}, wanted the lengths of the pass's sequences"
            )
    counts, lengths = record.get("global_physical_count"), lists["extend_seq_lens"]
    mode: int | None = record["forward_mode"] if is_integer(record.get("forward_mode")) else None
    if lengths is not None and mode != DECODE and int(lengths.sum()) != tokens:
        raise MalformedDump(
            f"{where}: extend_seq_lens adds up to {int(lengths.sum())} tokens, topk_ids_of_layer holds {tokens}"
        )
    if mode == EXTEND and lengths is None and tokens:
        raise MalformedDump(
            f"{where}: an extend pass without extend_seq_lens, so where one request ends is not told; record again"
        )
    positions = lists["positions"]
    assert positions is not None  # checked above
    return _Pass(
        one, rank, number, mode, ids, positions.astype(np.int64), lists["input_ids"],
        None if lengths is None or mode == DECODE else lengths.tolist(),
        counts if isinstance(counts, np.ndarray) else None,
    )  # fmt: skip


def _map_of(files: Sequence[Loaded], layers: int, asked: Asked) -> tuple[int, IdSpace]:
    """(experts per layer in the id space of the dump, that id space): logical where the map says nothing moved."""
    maps = [one.tree["last_physical_to_logical_map"] for one in files]
    first = maps[0]
    for one, each in zip(files, maps, strict=True):
        if not isinstance(each, np.ndarray) or each.dtype.kind not in "iu" or each.ndim != 2 or len(each) != layers:
            raise MalformedDump(
                f"{one.path}: last_physical_to_logical_map is {describe(each)}, wanted integers [{layers} layers, "
                "physical experts]"
            )
        if not np.array_equal(each, first):
            raise RefusedDump(
                f"{one.path}: its map of physical experts differs from {files[0].path.name}'s: not one recording, or "
                "experts were moved meanwhile; record all ranks together, with EPLB off"
            )
    slots = first.shape[1]
    if asked.user.id_space == "physical":
        return slots, "physical"
    if (first == np.arange(slots)).all():
        return slots, "logical"
    layer = int(np.flatnonzero((first != np.arange(slots)).any(axis=1))[0])
    experts = int(first.max()) + 1
    raise RefusedDump(
        f"{files[0].path}: ids are of {slots} physical experts, {experts} logical ones, moved in layer {layer} and "
        "others; the file holds the last map only, and nothing shows that it held in earlier passes. Record with EPLB "
        "and redundant experts off, or say --meta id_space=physical to take each physical copy for an expert"
    )


def _scan(passes: Sequence[_Pass], layers: int, width: int, slots: int, *, is_compared: bool) -> _Scan:
    scan = _Scan(np.zeros(layers, dtype=np.bool_), np.zeros(width, dtype=np.bool_))
    looked_at = 0
    for each in passes:
        tokens, is_captured, differs = each.ids.shape[1], False, False
        routes = hashlib.blake2b(digest_size=16)
        per_part = max(1, _SCAN_VALUES // max(tokens * width, 1))
        for begin in range(0, layers, per_part):
            part = np.ascontiguousarray(each.ids[begin : begin + per_part])
            if is_compared:
                routes.update(part.data if part.size else b"")
            if not part.size:
                continue
            low, high = int(part.min()), int(part.max())
            if low < -1 or high >= slots:
                layer = begin + int(np.flatnonzero(((part < -1) | (part >= slots)).any(axis=(1, 2)))[0])
                raise MalformedDump(
                    f"{each.where}, layer {layer}: expert id {high if high >= slots else low}, wanted −1 or "
                    f"0..{slots - 1}; is a fused shared expert among the ids? record with "
                    "--disable-shared-experts-fusion"
                )
            used = part >= 0
            scan.columns |= used.any(axis=(0, 1))
            of_layer = used.any(axis=(1, 2))
            scan.layers[begin : begin + len(part)] |= of_layer
            is_captured |= bool(of_layer.any())
            if each.counts is not None and each.counts.shape == (layers, slots):
                place = part.astype(np.int64) + slots * np.arange(len(part))[:, None, None]
                ours = np.bincount(place[used], minlength=len(part) * slots).reshape(len(part), slots)
                differs |= not np.array_equal(ours, each.counts[begin : begin + len(part)])
        scan.captured.append(is_captured)
        if each.counts is not None and each.counts.shape == (layers, slots):
            scan.counted += 1
            if differs:
                scan.uncounted.append(f"pass {each.number} of rank {each.rank}")
        if is_compared:
            tokens_digest = hashlib.blake2b(each.positions.tobytes(), digest_size=16)
            if each.tokens is not None:
                tokens_digest.update(each.tokens.astype(np.int64).tobytes())
            else:
                # Shards of one batch size decode at the same positions; without the tokens, only routes tell.
                tokens_digest.update(routes.digest())
            scan.digests.append((tokens_digest.digest(), routes.digest()))
        looked_at += each.ids.nbytes
        if looked_at > 64 * 1024 * 1024:
            each.loaded.let_go()
            looked_at = 0
    return scan


def _top_k(path: Path, scan: _Scan, width: int, said: int | None) -> int:
    used = int(scan.columns.sum())
    if said is not None and said > width:
        raise RefusedDump(
            f"{path}: you say top_k_model = {said}, but the recorder stores {width} ids per token: the others are "
            "lost; record with a version that stores all"
        )
    if not used:
        raise RefusedDump(
            f"{path}: every id is −1: no routes were captured (a draft model, or a path that does not go through the "
            "recorder's hook); record again"
        )
    if not scan.columns[:used].all():
        raise MalformedDump(
            f"{path}: slot {int(np.flatnonzero(~scan.columns)[0])} of the {width} ids is −1 in every row, but a later "
            "one is not; wanted a tail of −1 only"
        )
    if said is not None and said != used:
        raise MalformedDump(
            f"{path}: you say top_k_model = {said}, the rows hold {used} ids; correct it, or is a fused shared expert "
            "among the ids?"
        )
    return used


def _ranks(passes: Sequence[_Pass], scan: _Scan) -> dict[int, dict[int, tuple[bytes, bytes]]]:
    """rank → pass → digests of its tokens and routes, of passes with tokens."""
    by_rank: dict[int, dict[int, tuple[bytes, bytes]]] = {}
    for index, each in enumerate(passes):
        of_rank = by_rank.setdefault(each.rank, {})
        if scan.digests and each.ids.shape[1]:
            of_rank[each.number] = scan.digests[index]
    return by_rank


def _kept_ranks(passes: Sequence[_Pass], scan: _Scan) -> set[int]:
    """The first rank of each group of equal ones."""
    by_rank = _ranks(passes, scan)
    kept: list[int] = []
    for rank in sorted(by_rank):
        if not by_rank[rank] or all(by_rank[rank] != by_rank[other] for other in kept):
            kept.append(rank)
    return set(kept)


def _rank_check(path: Path, passes: Sequence[_Pass], scan: _Scan) -> CheckRecord:
    """Whether ranks are copies or shards of each other.

    Raises:
        MalformedDump: they are neither: the same tokens in more passes than chance allows and not in all, or in all
            with different routes.
    """
    wanted = "ranks hold the same tokens and routes in all passes (replicas) or, chance aside, different ones (shards)"
    by_rank = _ranks(passes, scan)
    if len(by_rank) == 1:
        found = "one rank; whether others hold other tokens (data parallelism) is not in its file"
        return CheckRecord(name="ranks agree", outcome="not_applicable", wanted=wanted, found=found)
    ranks = sorted(by_rank)
    replicas = lone = 0
    for index, rank in enumerate(ranks):
        for other in ranks[:index]:
            mine, theirs = by_rank[rank], by_rank[other]
            common = sorted(set(mine) & set(theirs))
            same_tokens = [number for number in common if mine[number][0] == theirs[number][0]]
            torn = [number for number in same_tokens if mine[number][1] != theirs[number][1]]
            if same_tokens and len(same_tokens) <= LONE_SHARE * len(common):
                # Tokens of the same name and place have other routes where what stands before them differs.
                lone += len(same_tokens)
                continue
            if torn and len(same_tokens) == len(common):
                raise MalformedDump(
                    f"{path}: ranks {other} and {rank} hold the same tokens with different routes in {len(torn)} "
                    f"of {len(common)} passes, first in pass {torn[0]}; replicas must be equal: record again"
                )
            if same_tokens and (len(same_tokens) < len(common) or set(mine) != set(theirs)):
                raise MalformedDump(
                    f"{path}: ranks {other} and {rank} are equal in {len(same_tokens)} passes (first {same_tokens[0]}) "
                    f"of {len(set(mine) | set(theirs))}, wanted all of them (replicas) or at most {LONE_SHARE:.0%} "
                    "(shards): they are neither; is a file cut short or of another recording? ingest one rank by itself"
                )
        replicas += any(by_rank[rank] and by_rank[rank] == by_rank[other] for other in ranks[:index])
    kept = sorted(_kept_ranks(passes, scan))
    found = f"{len(ranks)} ranks: {replicas} equal to another and left out, ranks {kept[:8]} kept" + (
        "; each pass of each rank is a step of its own" if len(kept) > 1 else ""
    )
    if lone:
        found += f"; {lone} passes with the tokens of another rank's by chance"
    return CheckRecord(name="ranks agree", outcome="warn" if lone else "ok", wanted=wanted, found=found)


def _count_check(passes: Sequence[_Pass], scan: _Scan) -> CheckRecord:
    wanted = "global_physical_count of each pass is the sum of its routes"
    if not scan.counted:
        found = "the records hold no such counts"
        return CheckRecord(name="engine's counts agree", outcome="not_applicable", wanted=wanted, found=found)
    found = f"{scan.counted - len(scan.uncounted)} of {scan.counted} passes agree" + (
        f"; first that does not: {scan.uncounted[0]}" if scan.uncounted else ""
    )
    outcome = "warn" if scan.uncounted else "ok"
    return CheckRecord(name="engine's counts agree", outcome=outcome, wanted=wanted, found=found)


def _gap_checks(passes: Sequence[_Pass]) -> Iterator[CheckRecord]:
    last: dict[int, int] = {}
    gaps = 0
    for each in passes:
        gaps += each.number - last.get(each.rank, each.number - 1) > 1
        last[each.rank] = each.number
    yield CheckRecord(
        name="forward passes consecutive",
        outcome="warn" if gaps else "ok",
        wanted="forward_pass_id goes up by one",
        found=f"{gaps} gaps; passes were not recorded" if gaps else "as wanted",
    )
    modes = [each.mode for each in passes if each.ids.shape[1]]
    speculative = sum(mode in (TARGET_VERIFY, DRAFT_EXTEND) for mode in modes)
    unknown = sum(mode is None or mode > DRAFT_EXTEND or mode < EXTEND for mode in modes)
    if speculative or unknown:
        yield CheckRecord(
            name="forward modes known",
            outcome="warn",
            wanted="passes that extend or decode",
            found=f"{speculative} passes verify or extend drafts: which of their tokens were accepted is not told; "
            f"{unknown} of an unknown mode; the phase of all of them is unknown",
        )


@dataclass
class _Requests:
    """Pieces requests together: the recorder stores no ids.

    A sequence of an extend pass is a new request. A decoded token continues the earliest request, in batch order, whose
    last position is one before its own; what a decode pass leaves out has ended.
    """

    number: int = 0
    doubtful: int = 0
    waiting: dict[int, dict[int, deque[int]]] = field(default_factory=dict)

    def assign(self, each: _Pass) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """(request, phase) of each token of a pass."""
        tokens = len(each.positions)
        waiting = self.waiting.setdefault(each.rank, {})
        request = np.empty(tokens, dtype=np.int64)
        phase = np.full(tokens, _UNKNOWN, dtype=np.int8)
        lengths = self._lengths(each)
        begin, ends = 0, []
        for length in lengths:
            if not length:
                continue
            first = int(each.positions[begin])
            earlier = waiting.get(first) if each.mode != EXTEND and (length == 1 or each.mode != MIXED) else None
            if earlier:
                self.doubtful += len(earlier) > 1
                one = earlier.popleft()
            else:
                one = self.number
                self.number += 1
            request[begin : begin + length] = one
            if each.mode == EXTEND or (each.mode == MIXED and length > 1):
                phase[begin : begin + length] = _PREFILL
            elif each.mode == DECODE or (each.mode == MIXED and earlier is not None and length == 1):
                phase[begin] = _DECODE
            begin += length
            ends.append((int(each.positions[begin - 1]) + 1, one))
        if each.mode == DECODE:
            waiting.clear()
        for position, one in ends:
            waiting.setdefault(position, deque()).append(one)
        return request, phase

    @staticmethod
    def _lengths(each: _Pass) -> list[int]:
        if each.mode == DECODE:
            return [1] * len(each.positions)
        if each.lengths is not None:
            return each.lengths
        # Tokens of one sequence stand together and their positions go up by one.
        starts = np.flatnonzero(np.diff(each.positions, prepend=-2) != 1)
        return np.diff(np.append(starts, len(each.positions))).tolist()  # type: ignore[no-any-return]


def _recorded_blocks(
    passes: Sequence[tuple[_Pass, bool]], scan: _Scan, top_k: int, parsed: ParsedDump
) -> Iterator[RowBlock]:
    layers = np.flatnonzero(scan.layers).astype(np.int32)
    requests = _Requests()
    parts: list[RowBlock] = []
    step = gathered = 0
    for each, is_captured in passes:
        tokens = each.ids.shape[1]
        if not tokens:
            continue
        if each.mode != IDLE:
            request, phase = requests.assign(each)
        if not is_captured:
            _count(parsed.missing_positions, "passes that hold −1 alone: not captured", tokens)
            continue
        if each.mode == IDLE:
            _count(parsed.dropped_rows, "passes of an idle rank", tokens * len(layers))
            continue
        ids = each.ids[layers, :, :top_k].astype(np.int32)  # (layers, T, K)
        gone = _uncaptured(each, ids, layers)
        if gone.any():
            _count(parsed.dropped_rows, "tokens of −1 in every layer: padding", int(gone.sum()) * len(layers))
        for code in (_PREFILL, _DECODE, _UNKNOWN):
            rows = np.flatnonzero((phase == code) & ~gone)
            if not len(rows):
                continue
            count = len(rows) * len(layers)
            gathered += count
            parts.append(
                RowBlock(
                    step=np.full(count, step, dtype=np.int64),
                    pass_in_step=np.zeros(count, dtype=np.int32),
                    layer=np.repeat(layers, len(rows)),
                    request=np.tile(request[rows], len(layers)),
                    position=np.tile(each.positions[rows], len(layers)),
                    phase=np.full(count, code, dtype=np.int8),
                    expert_ids=ids[:, rows].reshape(count, top_k),
                )
            )
        if not gone.all():
            step += 1
        if gathered >= ROWS_PER_BLOCK:
            yield _joined(parts)
            each.loaded.let_go()
            parts, gathered = [], 0
    if parts:
        yield _joined(parts)
    parsed.checks.append(
        CheckRecord(
            name="requests known",
            outcome="warn",
            wanted="a request id with every token",
            found=f"the recorder stores none: {requests.number} requests pieced together from extend_seq_lens and "
            f"positions, {requests.doubtful} decoded tokens could belong to several",
        )
    )


def _uncaptured(each: _Pass, ids: npt.NDArray[np.int32], layers: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """(T,) whether a token has no route in any layer; a route that is there in part is refused."""
    without = (ids < 0).all(axis=2)
    ragged = (ids < 0).any(axis=2) != without
    if ragged.any():
        layer, token = (int(index) for index in np.argwhere(ragged)[0])
        raise MalformedDump(
            f"{each.where}, layer {layers[layer]}, token {token}: {ids[layer, token].tolist()} ends before the "
            f"{ids.shape[2]} ids of other rows; a −1 is no expert: was the route written in part?"
        )
    gone: npt.NDArray[np.bool_] = np.asarray(without.all(axis=0))
    torn = without & ~gone
    if torn.any():
        layer, token = (int(index) for index in np.argwhere(torn)[0])
        raise MalformedDump(
            f"{each.where}, layer {layers[layer]}, token {token}: −1 alone, but other layers hold this token's "
            f"experts ({int(torn.sum())} such rows in the pass); the layer was not captured: record again"
        )
    return gone


def _joined(parts: Sequence[RowBlock]) -> RowBlock:
    def of(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    return RowBlock(
        of("step"), of("pass_in_step"), of("layer"), of("request"), of("position"), of("phase"), of("expert_ids")
    )


def _count(counts: dict[str, int], reason: str, number: int) -> None:
    counts[reason] = counts.get(reason, 0) + number


TREE_LAYOUTS = (
    TreeLayout(
        "sglang_recorder",
        "SGLang expert distribution recorder (per_token)",
        lambda tree: isinstance(tree, dict) and {"records", "last_physical_to_logical_map"} <= set(tree),
        parse_recorder,
        parse_recorder_folder,
    ),
)

TREE_NO_TRACES = (
    TreeNoTrace(
        lambda tree: isinstance(tree, dict) and "logical_count" in tree,
        "counts per layer and expert (recorder mode stat), not the routes of tokens; a count has no order, so no cache "
        "can be replayed on it: record with --expert-distribution-recorder-mode per_token",
    ),
)
