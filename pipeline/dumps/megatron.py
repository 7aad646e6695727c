"""Megatron-core's router trace: `router_trace_rank{r}.jsonl`, a line per step, layer and rank; one file, or all ranks.

A line holds step, stage, block, layer, rank, num_tokens, topk and top_indices [tokens][k]. Which layer base it counts
with cannot be told from it: the module's name gives 0-based numbers, `layer_number` 1-based ones. MTP blocks number
their layers anew and are left out. Sidecars (hidden states, logits, router state) are passed over, never opened.

Layout after megatron/core/transformer/moe/router_trace.py. Letters: T tokens of a line, K experts per token.
"""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import (
    Asked,
    DumpFile,
    DumpFolder,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    Sample,
    is_integer,
    read_line,
)
from pipeline.dumps.jsonl import integers_of, loads
from pipeline.dumps.ranks import MAX_EVENT_ROWS, TELLING_SELECTIONS, Rank, gathered, joined_step, missing_ranks, shards
from schemas.trace import CheckRecord

MAX_PASS_ROWS = 16 * 1024 * 1024
"""Most rows of one pass of a rank, which is put together before it is handed on."""

_SIDECARS = re.compile(r"(hidden_states|logits)_rank\d+\.bin|router_state_rank\d+\.pt", re.ASCII)


@dataclass(frozen=True)
class _Line:
    """A record of a decoder layer: ids (T, K)."""

    number: int
    step: int
    layer: int
    rank: int
    ids: npt.NDArray[np.int32]


@dataclass
class _Seen:
    """What a walk over lines leaves behind, beside the lines."""

    mtp_rows: int = 0
    repeated_sweeps: int = 0


@dataclass(frozen=True)
class _Sweep:
    """One forward pass of a rank: ids (T, K) by layer, ascending. `ordinal` counts the sweeps of a step."""

    step: int
    ordinal: int
    layers: Mapping[int, npt.NDArray[np.int32]]


# Lines


def parse(dump: DumpFile, asked: Asked) -> ParsedDump:
    """The trace of one rank. Every forward pass is a step: where `step` changes, or a layer comes again.

    Raises:
        MalformedDump: a line that is no such record, or lines out of order.
    """
    top_k, _ = _first(dump)
    parsed = _parsed(top_k)
    seen = _Seen()

    def blocks() -> Iterator[RowBlock]:
        lowest: list[int] = []
        step = 0
        for sweep in _sweeps(dump, top_k, seen):
            block = joined_step(step, {layer: [ids] for layer, ids in sweep.layers.items()}, [0])
            if block is not None:
                step += 1
                lowest = [min([*lowest, *sweep.layers])]
                yield block
        _sum_up(parsed, [seen], lowest)

    parsed.blocks = gathered(blocks())
    return parsed


def parse_folder(folder: DumpFolder, asked: Asked) -> ParsedDump:
    """The trace of all ranks: equal ones are kept once, different ones joined step by step, each as its own request.

    Raises:
        MalformedDump: a rank is missing, twice there, or neither replica nor shard. RefusedDump: a foreign file.
    """
    files: dict[int, Path] = {}
    ranks: dict[int, Rank] = {}
    top_ks: dict[int, str] = {}
    for file in folder.files:
        if _SIDECARS.fullmatch(file.name):
            continue
        with folder.open(file) as dump:
            if b'"top_indices"' not in dump.head():
                raise RefusedDump(
                    f"{folder.path}: {file.name} is no router trace; a folder holds the files of one run's ranks alone"
                )
            top_k, number = _first(dump)
            if number in files:
                raise MalformedDump(
                    f"{folder.path}: {file.name} and {files[number].name} are both of rank {number}; keep one run"
                )
            files[number], top_ks[top_k] = file, file.name
            rank = ranks[number] = Rank(f"rank {number}")
            for sweep in _sweeps(dump, top_k, _Seen()):
                for layer, ids in sweep.layers.items():
                    rank.add((sweep.step, sweep.ordinal, layer), ids)
    if not files:
        raise RefusedDump(
            f"{folder.path}: sidecars of a router trace alone; the routes are in router_trace_rank*.jsonl"
        )
    if len(top_ks) > 1:
        raise MalformedDump(
            f"{folder.path}: topk is {' and '.join(f'{top_k} in {name}' for top_k, name in top_ks.items())}; one dump "
            "is of one model"
        )
    missing_ranks(folder.path, files)
    numbers = sorted(files)
    kept, requests, check = shards(folder.path, [ranks[number] for number in numbers])
    top_k = next(iter(top_ks))
    parsed = _parsed(top_k)
    parsed.checks.append(check)
    parsed.blocks = gathered(_joined(folder, parsed, [files[numbers[index]] for index in kept], requests, top_k))
    return parsed


def _joined(
    folder: DumpFolder, parsed: ParsedDump, files: list[Path], requests: list[int], top_k: int
) -> Iterator[RowBlock]:
    """Steps of all shards: those of the same step and sweep run together."""
    seen = [_Seen() for _ in files]
    lowest: list[int] = []
    number = 0
    empty = np.zeros((0, top_k), dtype=np.int32)
    with ExitStack() as stack:
        dumps = [stack.enter_context(folder.open(file)) for file in files]
        walks = [_keyed(_sweeps(dump, top_k, seen[at]), at) for at, dump in enumerate(dumps)]
        together: dict[int, _Sweep] = {}
        now: tuple[int, int] | None = None
        for step, ordinal, at, sweep in heapq.merge(*walks, key=lambda one: one[:3]):
            if now is not None and (step, ordinal) != now:
                number, lowest, block = _together(folder.path, number, lowest, together, requests, empty)
                if block is not None:
                    yield block
                together = {}
            now = (step, ordinal)
            together[at] = sweep
        number, lowest, block = _together(folder.path, number, lowest, together, requests, empty)
        if block is not None:
            yield block
    _sum_up(parsed, seen, lowest)


def _keyed(sweeps: Iterator[_Sweep], at: int) -> Iterator[tuple[int, int, int, _Sweep]]:
    for sweep in sweeps:
        yield sweep.step, sweep.ordinal, at, sweep


def _together(
    path: Path,
    number: int,
    lowest: list[int],
    sweeps: Mapping[int, _Sweep],
    requests: list[int],
    empty: npt.NDArray[np.int32],
) -> tuple[int, list[int], RowBlock | None]:
    """(steps so far, lowest layer so far, the step's block)."""
    layers = {layer for sweep in sweeps.values() for layer in sweep.layers}
    if not layers:
        return number, lowest, None
    parts = {layer: [sweeps[at].layers.get(layer, empty) for at in sorted(sweeps)] for layer in layers}
    rows = max(sum(len(part) for part in listed) for listed in parts.values())
    if rows > MAX_EVENT_ROWS:
        step = next(iter(sweeps.values())).step
        raise MalformedDump(
            f"{path}, step {step}: {rows} rows of one layer in all ranks, at most {MAX_EVENT_ROWS}; ingest ranks apart"
        )
    block = joined_step(number, parts, [requests[at] for at in sorted(sweeps)])
    return number + (block is not None), [min([*lowest, *layers])], block


def _parsed(top_k: int) -> ParsedDump:
    return ParsedDump(
        format="megatron_router_trace",
        blocks=iter(()),
        top_k=top_k,
        engine="Megatron-core",
        capture_method="moe-routing-trace, before dispatch",
        top_k_model=top_k,
    )


def _sum_up(parsed: ParsedDump, seen: Sequence[_Seen], lowest: list[int]) -> None:
    mtp = sum(one.mtp_rows for one in seen)
    if mtp:
        parsed.dropped_rows["MTP block: a predictor of its own with layer numbers of its own"] = mtp
    base_is_open = lowest == [1]
    parsed.checks.append(
        CheckRecord(
            name="layer base",
            outcome="warn" if base_is_open else "ok",
            wanted="layers counted from 0",
            found="layers start at 1: layer_number, which counts from 1, or a dense layer 0? the numbers are kept as "
            "recorded"
            if base_is_open
            else f"layers start at {lowest[0] if lowest else 'none'}, kept as recorded",
        )
    )
    again = sum(one.repeated_sweeps for one in seen)
    parsed.checks.append(
        CheckRecord(
            name="one forward pass per step",
            outcome="warn" if again else "ok",
            wanted="every layer once in a step of a rank",
            found=f"{again} further passes in the same step (micro-batches), each a step of the trace"
            if again
            else "as wanted",
        )
    )


def _first(dump: DumpFile) -> tuple[int, int]:
    """(k, rank) of the first record that has tokens."""
    rank = 0
    for line in _lines(dump, None, _Seen()):
        rank = line.rank
        if len(line.ids):
            return line.ids.shape[1], rank
    raise MalformedDump(f"{dump.path}: no decoder layer with tokens; was the recorder stopped before it wrote any?")


def _sweeps(dump: DumpFile, top_k: int, seen: _Seen) -> Iterator[_Sweep]:
    layers: dict[int, npt.NDArray[np.int32]] = {}
    before: dict[int, npt.NDArray[np.int32]] = {}
    step, ordinal, rank, rows = -1, 0, None, 0
    for line in _lines(dump, top_k, seen):
        where = f"{dump.path}, line {line.number}"
        if rank is not None and line.rank != rank:
            raise MalformedDump(f"{where}: rank {line.rank}, the lines before are of rank {rank}; one file per rank")
        rank = line.rank
        if line.step < step:
            raise MalformedDump(
                f"{where}: step {line.step} after step {step}: steps must not go back; are two runs in one file?"
            )
        if line.step != step or (layers and line.layer <= max(layers)):
            if layers:
                yield _Sweep(step, ordinal, layers)
            if line.step == step:
                ordinal += 1
                seen.repeated_sweeps += 1
                before = layers
            else:
                ordinal, before = 0, {}
            step, layers, rows = line.step, {}, 0
        same = before.get(line.layer)
        if same is not None and line.ids.size >= TELLING_SELECTIONS and np.array_equal(same, line.ids):
            raise MalformedDump(
                f"{where}: layer {line.layer} of step {step} stands again with the same routes: a pass recorded twice "
                "(recomputed activations?) counts twice; record without recomputation"
            )
        layers[line.layer] = line.ids
        rows += len(line.ids)
        if rows > MAX_PASS_ROWS:
            raise MalformedDump(f"{where}: a pass of more than {MAX_PASS_ROWS} rows; is layer no layer number?")
        if len(line.ids) > MAX_EVENT_ROWS:
            raise MalformedDump(f"{where}: {len(line.ids)} tokens in one layer of a step, at most {MAX_EVENT_ROWS}")
    if layers:
        yield _Sweep(step, ordinal, layers)


def _lines(dump: DumpFile, top_k: int | None, seen: _Seen) -> Iterator[_Line]:
    """Decoder records; those of MTP blocks are counted."""
    stream, number = dump.stream(), 0
    while text := read_line(stream, dump.path, number + 1):
        number += 1
        if not text.strip():
            continue
        try:
            value = loads(text)
        except (ValueError, RecursionError) as error:
            fault = f"no JSON object ({str(error).splitlines()[0][:100]})"
            line: _Line | str = fault
        else:
            line = _line(value, number, top_k)
        if isinstance(line, str):
            hint = "" if stream.peek(1) else "; it is the last line: the dump is truncated, copy or record it again"
            raise MalformedDump(f"{dump.path}, line {number}: {line}{hint}")
        if value.get("block") == "mtp":
            seen.mtp_rows += len(line.ids)
            continue
        top_k = top_k or (line.ids.shape[1] if len(line.ids) else None)
        yield line


def _line(value: object, number: int, top_k: int | None) -> _Line | str:
    if not isinstance(value, dict):
        return "wanted an object"
    for key, limit in (("step", 2**62), ("layer", 2**16), ("num_tokens", 2**31), ("rank", 2**20)):
        if not is_integer(value.get(key)) or not 0 <= value[key] < limit:
            return f"{key} is {str(value.get(key))[:40]!r}, wanted a whole number of 0 or more"
    if value.get("block") not in (None, "decoder", "mtp"):
        return f"block is {str(value['block'])[:40]!r}, wanted decoder or mtp"
    if value.get("stage") not in (None, "pre_dispatch"):
        return f"stage is {str(value['stage'])[:40]!r}, wanted pre_dispatch: later stages hold dispatched copies"
    tokens, said = value["num_tokens"], value.get("topk")
    if said is not None and not (is_integer(said) and 0 < said < 2**31):
        return f"topk is {str(said)[:40]!r}, wanted a positive whole number"
    lists = integers_of(value.get("top_indices"), 2)
    if lists is None or lists.null_count or lists.flatten().null_count:
        return f"top_indices is {str(value.get('top_indices'))[:60]}, wanted lists [token][k] of whole numbers"
    if len(lists) != tokens:
        return f"top_indices has {len(lists)} tokens, num_tokens says {tokens}"
    flat = np.asarray(lists.flatten())
    is_mtp = value.get("block") == "mtp"
    wanted = said if is_mtp else top_k or said
    if tokens and wanted is None:
        wanted = len(flat) // tokens
    if not tokens:
        return _Line(number, value["step"], value["layer"], value["rank"], np.zeros((0, wanted or 1), dtype=np.int32))
    if not wanted or (np.asarray(lists.value_lengths()) != wanted).any() or said not in (None, wanted):
        return f"top_indices is not {wanted} ids for every token (topk is {said})"
    if flat.min() < -(2**31) or flat.max() >= 2**31:
        return "an id beyond 31 bits"
    ids = flat.astype(np.int32).reshape(tokens, wanted)
    return _Line(number, value["step"], value["layer"], value["rank"], ids)


def _is_trace(sample: Sample) -> bool:
    fields = {"step", "layer", "num_tokens", "rank"}
    return isinstance(sample.field("top_indices"), list) and fields <= set(sample.value or ())  # type: ignore[call-overload]


LAYOUTS = (
    Layout(
        "megatron_router_trace",
        "Megatron-core router_trace JSONL (a file, or a folder of ranks)",
        _is_trace,
        parse,
        parse_folder,
    ),
)
