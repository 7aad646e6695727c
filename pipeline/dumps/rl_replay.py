"""Routes that reinforcement learning keeps to replay them in training: slime, miles, verl, NeMo-RL torch files.

What is read, and nothing else:

- slime, miles `{rollout_id}.pt`: {rollout_id, samples}; of a sample `tokens`, `response_length` and
  `rollout_routed_experts` [T − 1 − start, L, K], `routed_experts_start_len` where there is one. The length is that of
  `tokens`: rows beyond it are padding.
- verl, NeMo-RL and others that save a batch: `routed_experts` [B, total, L, K] (or [total, L, K]), padded on both
  sides, and the length it is padded from: `attention_mask` [B, total] (verl), or `input_lengths` / `seq_lens` [B] for
  rows padded on the right only (NeMo-RL). `response_mask` [B, response] (verl) or `prompt_lengths` [B] tell prompt and
  response.
- miles `routing_replay.pt`: {version, replays}, replays[layer][pass] [T, K] (older: the list alone), MoE layers in
  order. It has no lengths; `seq_lens` [pass], the real tokens of each pass, has to be added beside `replays`.

Padding looks like routes (0, arange modulo E, 0..K − 1), so it is cut by length, never by value, and without a length
the file is refused. A row of −1 (NeMo-RL, miles) is a token without a route; it is left out and counted.

Letters: B sequences, T tokens of one, L layers, K experts per token.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import Asked, DumpFolder, MalformedDump, ParsedDump, RefusedDump, RowBlock, is_integer
from pipeline.dumps.repeats import TELLING_SELECTIONS, digest_of
from pipeline.dumps.sequences import Sequences
from pipeline.dumps.sglang_responses import count, moe_planes
from pipeline.dumps.torch_file import Loaded, Tree, TreeLayout, describe, numbers
from schemas.trace import PHASE_CODES, CheckRecord

NOT_RUN = "the last token, which was sampled and never run"
NO_ROUTE = "rows of −1: no route was recorded"


@dataclass(frozen=True)
class _Sequence:
    """One sequence, padding cut off: ids (T, L, K) as stored, position of the first row, prompt length or null."""

    loaded: Loaded
    where: str
    ids: npt.NDArray[Any]
    start: int
    prompt_tokens: int | None


def parse_samples(loaded: Loaded, asked: Asked) -> ParsedDump:
    """Samples of one rollout (slime, miles).

    Raises:
        RefusedDump: no sample has routes, or a length is not told. MalformedDump: sizes that contradict each other.
    """
    return _parsed("rl_samples", loaded.path, [loaded], _samples, asked)


def parse_samples_folder(loaded: Sequence[Loaded], folder: DumpFolder, asked: Asked) -> ParsedDump:
    """The files of several rollouts, one after the other.

    Raises:
        As `parse_samples`.
    """
    return _parsed("rl_samples", folder.path, loaded, _samples, asked)


def parse_batch(loaded: Loaded, asked: Asked) -> ParsedDump:
    """A padded batch with `routed_experts` (verl, NeMo-RL).

    Raises:
        As `parse_samples`.
    """
    return _parsed("rl_routed_experts", loaded.path, [loaded], _batch, asked)


def parse_batch_folder(loaded: Sequence[Loaded], folder: DumpFolder, asked: Asked) -> ParsedDump:
    """Several padded batches, one after the other.

    Raises:
        As `parse_samples`.
    """
    return _parsed("rl_routed_experts", folder.path, loaded, _batch, asked)


def _parsed(name: str, path: Path, files: Sequence[Loaded], sequences_of: Any, asked: Asked) -> ParsedDump:
    dropped, missing = dict[str, int](), dict[str, int]()
    sequences: list[_Sequence] = []
    for one in files:
        sequences += sequences_of(one, dropped, missing)
    _refuse_copies(sequences)
    if not sequences:
        raise RefusedDump(f"{path}: no sequence has routes; record the rollout with its routed experts")
    first = sequences[0]
    shape = first.ids.shape[1:]
    for each in sequences:
        if each.ids.shape[1:] != shape or each.ids.dtype != first.ids.dtype:
            raise MalformedDump(
                f"{each.loaded.path}{each.where}: {describe(each.ids)}, but the first sequence has {first.ids.dtype} "
                f"[…, {shape[0]}, {shape[1]}] (layers, experts); are two models in one dump?"
            )
    chosen, numbered = _layers(path, shape[0], asked.user.moe_layer_ids)
    is_narrow = first.ids.dtype.itemsize == 1
    checks = []
    if is_narrow and asked.user.num_experts is None:
        checks.append(
            CheckRecord(
                name="ids fit their type",
                outcome="warn",
                wanted="the number of experts, so that ids of 8 bits can be told from wrapped ones",
                found="8-bit ids and no number of experts: of more than 256 experts they wrapped; say "
                "--meta num_experts=E",
            )
        )
    parsed = ParsedDump(
        format=name,
        blocks=iter(()),
        top_k=shape[1],
        capture_method="rollout routing replay",
        hidden_layers=None,
        largest_storable_id=int(np.iinfo(first.ids.dtype).max),
        layers_are_ordinals=numbered is None,
        pass_boundaries="assumed_per_token",
        dropped_rows=dropped,
        missing_positions=missing,
        checks=checks,
    )
    parsed.blocks = _blocks(sequences, chosen, numbered, parsed)
    return parsed


def _refuse_copies(sequences: Sequence[_Sequence]) -> None:
    """Refuses a file whose sequences are all another file's; only files of equal shapes are read for it.

    Raises:
        MalformedDump: there is one.
    """
    of_file: dict[Path, list[_Sequence]] = {}
    for each in sequences:
        of_file.setdefault(each.loaded.path, []).append(each)
    alike: dict[tuple[tuple[int, ...], ...], list[Path]] = {}
    for file, its in of_file.items():
        alike.setdefault(tuple(each.ids.shape for each in its), []).append(file)
    for files in alike.values():
        seen: dict[bytes, Path] = {}
        for file in files if len(files) > 1 else ():
            digest = hashlib.blake2b(digest_size=16)
            for each in of_file[file]:
                digest.update(digest_of([each.ids]))
                each.loaded.let_go()
            other = seen.setdefault(digest.digest(), file)
            if other != file and sum(each.ids.size for each in of_file[file]) >= TELLING_SELECTIONS:
                raise MalformedDump(
                    f"{file}: every sequence has the routes of {other.name}; wanted each rollout once: a copy beside "
                    "the file itself? leave one out",
                    check="no pass twice",
                )


def _layers(path: Path, planes: int, said: list[int] | None) -> tuple[list[int] | None, list[int] | None]:
    """(declared MoE layers among planes of all hidden layers or null, their numbers or null: planes are ordinals)."""
    if said is None or len(said) == planes:
        return None, None
    if not said or max(said) >= planes:
        raise MalformedDump(
            f"{path}: you say {len(said)} moe_layer_ids up to {max(said, default=0)}, the arrays hold {planes} layers: "
            "neither all MoE layers nor all hidden layers; correct them"
        )
    return said, said


def _blocks(
    sequences: Sequence[_Sequence], chosen: list[int] | None, numbered: list[int] | None, parsed: ParsedDump
) -> Iterator[RowBlock]:
    planes = sequences[0].ids.shape[1]
    writer = Sequences(numbered if numbered is not None else list(range(planes)))
    kept = chosen if chosen is not None else list(range(planes))
    rows_without = 0
    for request, each in enumerate(sequences):
        ids = np.asarray(each.ids).astype(np.int32)
        each.loaded.let_go()
        if len(ids) and (each.ids.dtype.itemsize > 4 and (each.ids.max() >= 2**31 or each.ids.min() < -(2**31))):
            raise MalformedDump(f"{each.loaded.path}{each.where}: an id beyond 31 bits; record again")
        without = (ids[:, kept] == -1).all(axis=(1, 2))
        rows_without += int(without.sum())
        if without.any():
            count(parsed.missing_positions, NO_ROUTE, int(without.sum()))
        torn = (ids[:, kept] < 0).any(axis=(1, 2)) & ~without
        if torn.any():
            token = int(np.flatnonzero(torn)[0])
            raise MalformedDump(
                f"{each.loaded.path}{each.where}, token {each.start + token}: some of its ids are negative and some "
                f"not ({int(torn.sum())} such tokens); a −1 marks a token without any route: record again"
            )
        routed = ids[~without]
        moe_planes(each.loaded.path, each.where, routed, chosen)
        yield from writer.blocks(
            routed[:, kept],
            request=request,
            positions=(each.start + np.arange(len(ids)))[~without],
            prompt_tokens=each.prompt_tokens,
        )


def _samples(one: Loaded, dropped: dict[str, int], missing: dict[str, int]) -> Iterator[_Sequence]:
    for number, sample in enumerate(one.tree["samples"]):
        where = f", sample {number}"
        if not isinstance(sample, dict):
            raise MalformedDump(f"{one.path}{where}: {describe(sample)}, wanted a dict")
        tokens = sample.get("tokens")
        length = len(tokens) if isinstance(tokens, list | np.ndarray) and np.ndim(tokens) != 0 else None
        routes = sample.get("rollout_routed_experts")
        if routes is None:
            count(missing, "samples without routes", length or 0)
            continue
        ids = _ids(one.path, where, "rollout_routed_experts", routes, 3)
        if length is None:
            raise _no_length(one.path, where, "tokens (its length is the sequence's)")
        start: Any = sample.get("routed_experts_start_len") or 0
        if not is_integer(start) or not 0 <= start <= length:
            raise MalformedDump(f"{one.path}{where}: routed_experts_start_len is {describe(start)}, wanted 0..{length}")
        if start:
            count(missing, "before routed_experts_start_len: not asked for", start)
        end = start + len(ids)
        if end < length - 1:
            raise MalformedDump(
                f"{one.path}{where}: {len(ids)} rows from position {start} on for {length} tokens; wanted at least "
                f"{length - 1 - start} (each token but the last); where the first row belongs is not told: save "
                "routed_experts_start_len with the sample"
            )
        if end > length:
            count(dropped, "padding beyond the tokens", (end - length) * ids.shape[1])
        response: Any = sample.get("response_length")
        prompt = length - response if is_integer(response) and 0 <= response <= length else None
        yield _Sequence(one, where, ids[: length - start], start, prompt)


def _batch(one: Loaded, dropped: dict[str, int], missing: dict[str, int]) -> Iterator[_Sequence]:
    tree = one.tree
    ids = _ids(one.path, "", "routed_experts", tree["routed_experts"], 4)
    sequences, total = ids.shape[:2]
    spans = _spans(one.path, tree, sequences, total)
    prompts = _prompts(one.path, tree, sequences, spans)
    for number, (begin, end) in enumerate(spans):
        where = f", sequence {number}"
        padding = total - (end - begin)
        if padding:
            count(dropped, "padding outside of the declared length", padding * ids.shape[2])
        rows = ids[number, begin:end]
        # The last token was sampled and never run: its row is padding inside of the length, which two equal ids show.
        if len(rows) and ids.shape[3] > 1 and not rows[-1].any():
            rows = rows[:-1]
            count(missing, NOT_RUN, 1)
        if len(rows):
            yield _Sequence(one, where, rows, 0, prompts[number] if prompts is not None else None)


def _spans(path: Path, tree: dict[Any, Tree], sequences: int, total: int) -> list[tuple[int, int]]:
    """(first, last + 1) real token of each sequence, as the batch declares them."""
    mask = tree.get("attention_mask")
    if mask is not None:
        mask = np.asarray(mask) if isinstance(mask, list | np.ndarray) else mask
        if isinstance(mask, np.ndarray) and mask.ndim == 1 and sequences == 1:
            mask = mask[None]
        if not isinstance(mask, np.ndarray) or mask.shape != (sequences, total) or not np.isin(mask, (0, 1)).all():
            raise MalformedDump(
                f"{path}: attention_mask is {describe(mask)}, wanted 0 and 1 shaped [{sequences}, {total}] as "
                "routed_experts is"
            )
        spans = []
        for number, row in enumerate(mask != 0):
            real = np.flatnonzero(row)
            begin, end = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
            if end - begin != len(real):
                raise MalformedDump(
                    f"{path}, sequence {number}: attention_mask has {end - begin - len(real)} holes between its "
                    "tokens; positions are not told: save the batch unpacked"
                )
            spans.append((begin, end))
        return spans
    for name in ("input_lengths", "seq_lens"):
        if tree.get(name) is None:
            continue
        lengths = numbers(tree[name])
        if lengths is None or lengths.shape != (sequences,) or lengths.dtype.kind not in "iu":
            raise MalformedDump(f"{path}: {name} is {describe(tree[name])}, wanted {sequences} whole numbers")
        if len(lengths) and (lengths.min() < 0 or lengths.max() > total):
            raise MalformedDump(f"{path}: {name} runs {lengths.min()}..{lengths.max()}, wanted 0..{total}")
        return [(0, int(length)) for length in lengths]
    raise _no_length(
        path, "", "attention_mask [sequences, tokens], or input_lengths [sequences] if padded on the right"
    )


def _prompts(path: Path, tree: dict[Any, Tree], sequences: int, spans: list[tuple[int, int]]) -> list[int] | None:
    """Prompt tokens of each sequence, or null where the batch does not say."""
    mask = tree.get("response_mask")
    if isinstance(mask, list | np.ndarray):
        mask = np.asarray(mask)
        if mask.ndim != 2 or len(mask) != sequences:
            raise MalformedDump(f"{path}: response_mask is {describe(mask)}, wanted [{sequences}, response tokens]")
        # A mask over the response alone, right of the prompt: tools' tokens in it are 0, so its width counts.
        total = tree["routed_experts"].shape[-3]
        border = total - mask.shape[1]
        return [max(0, min(border, end) - begin) for begin, end in spans] if border > 0 else None
    lengths = numbers(tree.get("prompt_lengths"))
    if lengths is None:
        return None
    if lengths.shape != (sequences,) or lengths.dtype.kind not in "iu":
        raise MalformedDump(f"{path}: prompt_lengths is {describe(lengths)}, wanted {sequences} whole numbers")
    return [int(length) for length in lengths]


def _ids(path: Path, where: str, name: str, value: Tree, axes: int) -> npt.NDArray[Any]:
    """An array of ids with that many axes; a missing first axis of 1 is added."""
    ids = numbers(value)
    if ids is not None and ids.ndim == axes - 1 and axes == 4:
        ids = ids[None]
    if ids is None or ids.ndim != axes or ids.dtype.kind not in "iu" or 0 in ids.shape[-2:]:
        wanted = "[tokens, layers, k]" if axes == 3 else "[sequences, tokens, layers, k]"
        raise MalformedDump(f"{path}{where}: {name} is {describe(value)}, wanted integers {wanted}")
    return ids


def _no_length(path: Path, where: str, field: str) -> RefusedDump:
    return RefusedDump(
        f"{path}{where}: padded routes without their length; padding looks like routes (0, or experts in turn), so it "
        f"cannot be told by its value: save the field {field} with them"
    )


# Replay of training passes


def parse_replay(loaded: Loaded, asked: Asked) -> ParsedDump:
    """`routing_replay.pt` of miles and slime: what each MoE layer chose in each training pass.

    Each pass is a step; its tokens are of several sequences, and neither which nor where is told: one request, no
    positions, no phase.

    Raises:
        RefusedDump: no lengths beside the routes. MalformedDump: layers of different passes or sizes.
    """
    tree = loaded.tree
    replays = tree["replays"] if isinstance(tree, dict) else tree
    lengths = numbers(tree.get("seq_lens")) if isinstance(tree, dict) else None
    if lengths is None:
        raise _no_length(loaded.path, "", "seq_lens [passes] (real tokens of each pass) beside `replays`, in a dict")
    passes = len(replays[0])
    if any(not isinstance(of_layer, list) or len(of_layer) != passes for of_layer in replays):
        found = sorted({len(of_layer) if isinstance(of_layer, list) else 0 for of_layer in replays})
        raise MalformedDump(f"{loaded.path}: layers have {found[:5]} passes, wanted equally many; record again")
    if lengths.shape != (passes,) or lengths.dtype.kind not in "iu" or (passes and lengths.min() < 0):
        raise MalformedDump(f"{loaded.path}: seq_lens is {describe(lengths)}, wanted {passes} whole numbers")
    top_k = 0
    for layer, of_layer in enumerate(replays):
        for number, ids in enumerate(of_layer):
            rows = len(replays[0][number]) if isinstance(replays[0][number], np.ndarray) else -1
            is_sound = isinstance(ids, np.ndarray) and ids.ndim == 2 and ids.dtype.kind in "iu" and len(ids) == rows
            top_k = top_k or (ids.shape[1] if is_sound else 0)
            if not is_sound or ids.shape[1] != top_k or not top_k:
                raise MalformedDump(
                    f"{loaded.path}, layer list {layer}, pass {number}: {describe(ids)}, wanted integers [{rows}, "
                    f"{top_k}] as in the first layer"
                )
            if lengths[number] > rows:
                raise MalformedDump(
                    f"{loaded.path}, pass {number}: seq_lens says {int(lengths[number])} tokens, there are {rows} rows"
                )
    dtypes = {ids.dtype for of_layer in replays for ids in of_layer}
    parsed = ParsedDump(
        format="rl_routing_replay",
        blocks=iter(()),
        top_k=top_k,
        capture_method="training routing replay",
        largest_storable_id=min((int(np.iinfo(dtype).max) for dtype in dtypes), default=None),
        layers_are_ordinals=True,
    )
    parsed.blocks = _replayed_blocks(loaded, replays, lengths.tolist(), parsed)
    return parsed


def _replayed_blocks(
    loaded: Loaded, replays: list[list[npt.NDArray[Any]]], lengths: list[int], parsed: ParsedDump
) -> Iterator[RowBlock]:
    layers, step = len(replays), 0
    for number, length in enumerate(lengths):
        ids = np.stack([of_layer[number][:length] for of_layer in replays]).astype(np.int32)  # (L, T, K)
        padding = len(replays[0][number]) - length
        if padding:
            count(parsed.dropped_rows, "padding outside of the declared length", padding * layers)
        loaded.let_go()
        without = (ids == -1).all(axis=(0, 2))
        if without.any():
            count(parsed.missing_positions, NO_ROUTE, int(without.sum()))
        ids = ids[:, ~without]
        if (ids < 0).any():
            raise MalformedDump(
                f"{loaded.path}, pass {number}: a token has ids in some layers and −1 in others; record again"
            )
        tokens = ids.shape[1]
        if not tokens:
            continue
        rows = tokens * layers
        yield RowBlock(
            step=np.full(rows, step, dtype=np.int64),
            pass_in_step=np.zeros(rows, dtype=np.int32),
            layer=np.repeat(np.arange(layers, dtype=np.int32), tokens),
            request=np.zeros(rows, dtype=np.int64),
            position=None,
            phase=np.full(rows, PHASE_CODES["unknown"], dtype=np.int8),
            expert_ids=ids.reshape(rows, -1),
        )
        step += 1


def _is_samples(tree: Tree) -> bool:
    return (
        isinstance(tree, dict)
        and "rollout_id" in tree
        and isinstance(tree.get("samples"), list)
        and any(isinstance(sample, dict) and "rollout_routed_experts" in sample for sample in tree["samples"])
    )


def _is_batch(tree: Tree) -> bool:
    return isinstance(tree, dict) and isinstance(tree.get("routed_experts"), np.ndarray)


def _is_replay(tree: Tree) -> bool:
    if isinstance(tree, dict):
        if "version" not in tree or "replays" not in tree:
            return False
        tree = tree["replays"]
    return (
        isinstance(tree, list)
        and bool(tree)
        and all(isinstance(of_layer, list) and bool(of_layer) for of_layer in tree)
        and all(isinstance(ids, np.ndarray) and ids.ndim == 2 and ids.dtype.kind in "iu" for ids in tree[0])
    )


TREE_LAYOUTS = (
    TreeLayout("rl_samples", "slime / miles rollout samples", _is_samples, parse_samples, parse_samples_folder),
    TreeLayout(
        "rl_routed_experts", "verl / NeMo-RL batch with routed_experts", _is_batch, parse_batch, parse_batch_folder
    ),
    TreeLayout("rl_routing_replay", "miles / slime routing_replay", _is_replay, parse_replay),
)
