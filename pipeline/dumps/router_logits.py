"""Router logits of Hugging Face models, as `output_router_logits` gives them and scripts save them: npz or safetensors.

One forward pass gives a tuple over the MoE layers of [batch·seq, experts] before the softmax, rows of padding tokens
included; `generate` gives such a tuple per step (`_maybe_record` hooks of transformers, `modeling_outputs`). Names that
are read: `router_logits` [L, N, E]; `router_logits.<layer>` or `layer_<layer>` [N, E]; and both below `step_<step>.`;
instead of N also batch, seq. Beside them `attention_mask` and `input_ids` [batch, seq], and in `meta` (npz: one JSON
string) or the metadata (safetensors) `top_k`, `num_experts_per_tok` or `k`, and `model`.

The ids are not in such a dump. They are recomputed: the k largest logits of a row, the lower id first where two are
equal; weights are the softmax over all experts, not renormalised. A router that adds a bias, masks groups of experts or
jitters chooses otherwise, so its logits are no record of its routes. Some versions of transformers store probabilities
under the same name; they are used as they are.

Letters: L layers, N rows of a pass (batch · seq), B sequences, S positions, E experts, K experts per token.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.arrays import Header, Npz, Safetensors, Spooled, as_float32
from pipeline.dumps.blocks import (
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    Sample,
)
from pipeline.dumps.torch_file import Loaded, Tree, TreeLayout, describe, numbers
from schemas.trace import MAX_TOP_K, PHASE_CODES, CheckRecord

CHUNK_VALUES = 4 * 1024 * 1024
"""Logits looked at at once."""

MAX_STEP_SELECTIONS = 2**25
"""Most selections of one pass, which stays whole in memory: 48 layers · top 8 · 87,000 tokens."""

SUM_TOLERANCE = 0.01
"""How far a row of probabilities may sum from 1: they may be stored as bfloat16."""

TIED_SHARE = 0.05
"""Largest share of selections that ties may leave undetermined. Logits stored as bfloat16 tie honestly: of 256 normal
ones with k = 8 one row in thirteen, 1 % of the selections; the model's own choice among equals is not in the dump.
More ties are of logits that were rounded, and the ids would be made up."""

_TOP_K_KEYS = ("top_k", "num_experts_per_tok", "k")
_NAMES = (
    re.compile(r"router_logits"),
    re.compile(r"(?:router_logits[._/])?step[._]?(?P<step>[0-9]{1,6})"),
    re.compile(r"router_logits[._/](?P<layer>[0-9]{1,5})"),
    re.compile(r"(?:router_logits[._/])?(?:step[._]?(?P<step>[0-9]{1,6})[._/])?layer[._]?(?P<layer>[0-9]{1,5})"),
    re.compile(r"router_logits[._/](?P<step>[0-9]{1,6})[._/](?P<layer>[0-9]{1,5})"),
)
_TENSOR_NAME = re.compile(rb'"([^"\\]{1,200})"\s*:\s*\{\s*"dtype"')


@dataclass(frozen=True)
class _Name:
    step: int
    layer: int | None
    is_bare: bool
    """Both numbers stand without a word, so which is which is only known from the shapes."""


def _parsed_name(name: str) -> _Name | None:
    for pattern in _NAMES:
        found = pattern.fullmatch(name)
        if found is not None:
            parts = found.groupdict()
            layer = None if parts.get("layer") is None else int(parts["layer"])
            return _Name(int(parts.get("step") or 0), layer, pattern is _NAMES[-1])
    return None


@dataclass
class Arrays:
    """The arrays of a dump, whatever its container: headers by name, and a reader that keeps the last array."""

    path: Path
    headers: dict[str, Header]
    read: Callable[[str], npt.NDArray[Any]]
    said: dict[str, Any]
    let_go: Callable[[], None] = lambda: None


def npz_arrays(dump: DumpFile, spool_folder: Path) -> Arrays:
    """The arrays of an npz; a large one is unpacked to an unnamed file, one at a time."""
    archive = Npz(dump)
    said = archive.json("meta") if "meta" in archive.names else {}
    headers = {}
    for name in archive.names:
        if _is_ours(name):
            try:
                headers[name] = archive.header(name)
            except KeyError:
                raise MalformedDump(
                    f"{dump.path}: member {name:.60} of the zip is no npy; save with np.savez"
                ) from None
    kept: dict[str, Spooled] = {}

    def read(name: str) -> npt.NDArray[Any]:
        if name not in kept:
            kept.clear()
            kept[name] = archive.array(name, spool_folder)
        return kept[name].values

    def let_go() -> None:
        for stored in kept.values():
            stored.let_go()

    return Arrays(dump.path, headers, read, said, let_go)


def safetensors_arrays(dump: DumpFile) -> Arrays:
    """The tensors of a safetensors file, mapped anew at each reading so that pages looked at do not pile up."""
    file = Safetensors(dump)
    headers = {name: header for name, header in file.headers.items() if _is_ours(name)}
    return Arrays(dump.path, headers, file.array, dict(file.metadata))


def _is_ours(name: str) -> bool:
    return name in ("attention_mask", "input_ids") or _parsed_name(name) is not None


def parse(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Reads headers, mask and metadata at once, logits pass by pass as rows are asked for.

    Raises:
        RefusedDump: k or the padding is unknown, or the arrays are no logits. MalformedDump: truncated, or shapes that
        contradict each other; while rows are read also logits that are no numbers, or all equal.
    """
    packed = dump.head()[:2] == b"PK"
    return logits_dump(npz_arrays(dump, asked.spool_folder) if packed else safetensors_arrays(dump), asked)


def logits_dump(arrays: Arrays, asked: Asked) -> ParsedDump:
    """The dump of any container's arrays, as `parse`."""
    passes = _passes(arrays)
    layers = passes[0].layers
    experts = passes[0].experts
    top_k = _top_k(arrays, asked, experts)
    batch = _batch(arrays, passes)
    model = arrays.said.get("model")
    parsed = ParsedDump(
        format="router_logits",
        blocks=iter(()),
        top_k=top_k,
        model=model if isinstance(model, str) else None,
        capture_method="output_router_logits, ids recomputed as the top k of each row",
        num_experts=experts,
        top_k_model=top_k,
        # 0..L−1 may be positions in the tuple as well as the model's own numbers.
        layers_are_ordinals=layers == list(range(len(layers))),
        weight_kind="softmax",
        rank_known=True,
    )
    parsed.blocks = _blocks(arrays, passes, batch, parsed)
    return parsed


def claims(sample: Sample) -> bool:
    """Named logits, and no ids beside them: a dump that has both is read by its ids."""
    names = array_names(sample)
    if not names or names & {"experts", "topk_indices"}:
        return False
    found = [name for name in names if _parsed_name(name) is not None]
    return any("router_logits" in name for name in found) or (
        bool(found) and bool(names & {"attention_mask", "input_ids"})
    )


def array_names(sample: Sample) -> set[str]:
    """Names of the arrays of an npz, or of a safetensors file as far as its head shows them."""
    if sample.members:
        return {name.removesuffix(".npy") for name in sample.members if name.endswith(".npy")}
    return header_names(sample.head)


def header_names(head: bytes) -> set[str]:
    """Names of the tensors of a safetensors file, as far as its head shows them; none of another file."""
    if head[8:9] != b"{":
        return set()
    return {name.decode("utf-8", "replace") for name in _TENSOR_NAME.findall(head)}


LAYOUTS = (Layout("router_logits", "npz or safetensors with router_logits per layer", claims, parse),)


# The same in a torch file, where the tuples can be kept as they are


def parse_tree(loaded: Loaded, asked: Asked) -> ParsedDump:
    """A torch file of a dict with `router_logits` and what else `parse` reads.

    router_logits: [L, N, E], a tuple over the layers, a tuple over the steps of such tuples, or named as above.

    Raises:
        As `parse`.
    """
    tree = loaded.tree
    said = {key: tree[key] for key in (*_TOP_K_KEYS, "model") if isinstance(tree.get(key), int | str)}
    meta = tree.get("meta")
    if isinstance(meta, dict):
        said = {key: value for key, value in meta.items() if isinstance(value, int | str)} | said
    found: dict[str, npt.NDArray[Any]] = {}
    for name, value in tree.items():
        if name == "router_logits" and isinstance(value, list | tuple):
            found |= _tuples(loaded.path, value)
        elif isinstance(name, str) and _is_ours(name):
            array = numbers(value)
            if array is None:
                raise MalformedDump(f"{loaded.path}: {name:.60} is {describe(value)}, wanted a tensor")
            found[name] = array
    headers = {name: Header(array.shape, array.dtype) for name, array in found.items()}
    return logits_dump(Arrays(loaded.path, headers, found.__getitem__, said, loaded.let_go), asked)


def _tuples(path: Path, value: Tree) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    is_steps = isinstance(value[0], list) if value else False
    for step, layers in enumerate(value if is_steps else [value]):
        if not isinstance(layers, list) or not all(isinstance(layer, np.ndarray) for layer in layers) or not layers:
            raise MalformedDump(
                f"{path}: router_logits is {describe(value)}, wanted a tuple of tensors, one a layer, or a tuple of "
                "such tuples, one a step"
            )
        for layer, array in enumerate(layers):
            found[f"step_{step}.layer_{layer}"] = array
    return found


def claims_tree(tree: Tree) -> bool:
    """As `claims`."""
    if not isinstance(tree, dict) or {"experts", "topk_indices"} & set(tree):
        return False
    found = [name for name in tree if isinstance(name, str) and _parsed_name(name) is not None]
    return any("router_logits" in name for name in found) or (
        bool(found) and bool({"attention_mask", "input_ids"} & set(tree))
    )


TREE_LAYOUTS = (TreeLayout("router_logits", "dict with router_logits per layer", claims_tree, parse_tree),)


# What the arrays are


@dataclass(frozen=True)
class _Pass:
    """One forward pass: the array and its index of each layer, ascending; rows and experts of each."""

    step: int
    layers: list[int]
    places: list[tuple[str, int | None]]
    rows: int
    experts: int
    shape: tuple[int, int] | None
    """(batch, seq) where the arrays have both axes."""


def _passes(arrays: Arrays) -> list[_Pass]:
    found: dict[int, dict[int, tuple[str, int | None]]] = {}
    bare = False
    for name, header in arrays.headers.items():
        parsed = _parsed_name(name)
        if parsed is None:
            continue
        bare |= parsed.is_bare
        if header.dtype.kind != "f" and not header.is_bf16:
            raise RefusedDump(
                f"{arrays.path}: {name:.60} is {header.dtype} shaped {list(header.shape)}, wanted logits, which are "
                "floats; if they are ids, save them as `experts` [layers, tokens, k]"
            )
        wanted = (2, 3) if parsed.layer is not None else (3, 4)
        if len(header.shape) not in wanted or 0 in header.shape:
            raise MalformedDump(
                f"{arrays.path}: {name:.60} is shaped {list(header.shape)}, wanted "
                + ("[rows, experts]" if parsed.layer is not None else "[layers, rows, experts]")
                + " with batch and seq as one axis or two"
            )
        rows = prod(header.shape[-3 if len(header.shape) - (parsed.layer is None) == 3 else -2 : -1])
        if rows > MAX_STEP_SELECTIONS or (parsed.layer is None and header.shape[0] > 65536):
            raise MalformedDump(
                f"{arrays.path}: {name:.60} is shaped {list(header.shape)}; wanted at most 65,536 layers and "
                f"{MAX_STEP_SELECTIONS:,} rows a pass"
            )
        of_step = found.setdefault(parsed.step, {})
        numbered = [(parsed.layer, None)] if parsed.layer is not None else [(i, i) for i in range(header.shape[0])]
        for layer, index in numbered:
            if layer in of_step:
                raise MalformedDump(
                    f"{arrays.path}: layer {layer} of step {parsed.step} stands in {of_step[layer][0]:.60} and in "
                    f"{name:.60}; which one is meant is unknown"
                )
            of_step[layer] = (name, index)
    steps = sorted(found)
    missing = sorted(set(range(steps[-1] + 1)) - set(steps))[:5] if steps[-1] < 10**6 else steps
    if missing:
        raise MalformedDump(
            f"{arrays.path}: steps {missing} are missing of {steps[-1] + 1}; the passes of a generation follow one "
            "another, save all of them"
        )
    passes = [_pass(arrays, step, found[step]) for step in steps]
    for one in passes:
        absent = sorted(set(passes[0].layers) ^ set(one.layers))
        if absent:
            raise MalformedDump(
                f"{arrays.path}: layers {absent[:5]} stand in some steps and not in others (step {one.step} against "
                "step 0); was a layer not saved?"
            )
        if one.experts != passes[0].experts:
            raise MalformedDump(
                f"{arrays.path}: {one.experts} experts in step {one.step}, {passes[0].experts} in step 0; wanted "
                "[rows, experts]: is an axis order wrong?"
            )
    if bare and len(passes) > 1 and passes[0].rows == passes[1].rows:
        raise RefusedDump(
            f"{arrays.path}: names like router_logits.<a>.<b> do not say which number is the step and which the layer, "
            "and every array has as many rows; name them router_logits.step_<step>.layer_<layer>"
        )
    return passes


def _pass(arrays: Arrays, step: int, places: dict[int, tuple[str, int | None]]) -> _Pass:
    layers = sorted(places)
    shapes = [_row_shape(arrays.headers[places[layer][0]], places[layer][1]) for layer in layers]
    if len(set(shapes)) > 1:
        other = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
        raise MalformedDump(
            f"{arrays.path}: layer {layers[other]} of step {step} is shaped {list(shapes[other])}, layer {layers[0]} "
            f"{list(shapes[0])}; wanted the same rows and experts in every layer of a pass"
        )
    *rows, experts = shapes[0]
    shape = (rows[0], rows[1]) if len(rows) == 2 else None
    return _Pass(step, layers, [places[layer] for layer in layers], prod(rows), experts, shape)


def _row_shape(header: Header, index: int | None) -> tuple[int, ...]:
    return header.shape if index is None else header.shape[1:]


def _top_k(arrays: Arrays, asked: Asked, experts: int) -> int:
    said: int | None = None
    for key in _TOP_K_KEYS:
        value = arrays.said.get(key)
        if value is None:
            continue
        if not re.fullmatch(r"[0-9]{1,4}", str(value)) or int(str(value)) == 0:
            raise MalformedDump(
                f"{arrays.path}: its metadata say {key} = {str(value)[:40]!r}, wanted a positive whole number"
            )
        said = int(str(value))
        break
    user = asked.user.top_k_model
    if user is not None and said is not None and user != said:
        raise MalformedDump(f"{arrays.path}: you say top_k_model = {user}, the dump says {said}; correct yours")
    top_k = user or said
    if top_k is None:
        raise RefusedDump(
            f"{arrays.path}: router logits do not say how many experts a token went to; say --meta top_k_model=K "
            "(num_experts_per_tok in the model's config.json)"
        )
    if top_k > min(experts, MAX_TOP_K):
        raise MalformedDump(
            f"{arrays.path}: top_k_model = {top_k} of {experts} experts (the last axis); correct it, or is an axis "
            "order wrong?"
        )
    return top_k


# Padding


@dataclass(frozen=True)
class _Batch:
    """size: sequences B. kept, position: (B, columns), null where padding is impossible."""

    size: int
    prompt: int
    kept: npt.NDArray[np.bool_] | None
    position: npt.NDArray[np.int64] | None

    def rows(self, step: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(kept, request, position), each (N,), of the rows of a pass, sequence by sequence."""
        columns = slice(0, self.prompt) if step == 0 else slice(self.prompt + step - 1, self.prompt + step)
        width = columns.stop - columns.start
        request = np.repeat(np.arange(self.size, dtype=np.int64), width)
        if self.kept is None or self.position is None:
            position = np.tile(np.arange(columns.start, columns.stop, dtype=np.int64), self.size)
            return np.ones(len(request), dtype=np.bool_), request, position
        return self.kept[:, columns].reshape(-1), request, self.position[:, columns].reshape(-1)


def _batch(arrays: Arrays, passes: Sequence[_Pass]) -> _Batch:
    first = passes[0]
    known: dict[str, tuple[int, ...]] = {}
    for name in ("attention_mask", "input_ids"):
        if name in arrays.headers:
            shape = arrays.headers[name].shape
            if len(shape) not in (1, 2) or 0 in shape:
                raise MalformedDump(f"{arrays.path}: {name} is shaped {list(shape)}, wanted [batch, seq]")
            known[name] = shape if len(shape) == 2 else (1, *shape)
    if first.shape is not None:
        known["the logits"] = first.shape
    if not known:
        raise RefusedDump(
            f"{arrays.path}: {first.rows} rows and no attention_mask or input_ids [batch, seq], so how many sequences "
            "were padded to one length is unknown; save attention_mask beside the logits"
        )
    sizes = {shape[0] for shape in known.values()}
    if len(sizes) > 1 or first.rows % min(sizes):
        raise MalformedDump(
            f"{arrays.path}: {first.rows} rows in a pass, but "
            + ", ".join(f"{name} is shaped {list(shape)}" for name, shape in known.items())
            + "; wanted [batch, seq] with batch · seq rows"
        )
    size = min(sizes)
    prompt = first.rows // size
    _check_decode(arrays, passes, size)
    if "attention_mask" not in known:
        if size > 1:
            raise RefusedDump(
                f"{arrays.path}: a batch of {size} sequences and no attention_mask: rows of padding tokens cannot be "
                "told from routes; save attention_mask beside the logits"
            )
        _check_width(arrays, known, prompt, len(passes))
        return _Batch(1, prompt, None, None)
    columns = known["attention_mask"][1]
    _check_width(arrays, {"attention_mask": known["attention_mask"]}, prompt, len(passes))
    mask = np.array(arrays.read("attention_mask")).reshape(size, columns)
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise MalformedDump(f"{arrays.path}: attention_mask holds other values than 0 and 1; wanted the padding mask")
    kept = mask.astype(np.bool_)
    needed = prompt + len(passes) - 1
    if columns < needed:
        if size > 1:
            raise RefusedDump(
                f"{arrays.path}: attention_mask covers {columns} positions, the passes {needed}: sequences of a batch "
                "that ended early are padded; save the mask of prompt and generated tokens"
            )
        kept = np.concatenate([kept, np.ones((1, needed - columns), dtype=np.bool_)], axis=1)
    # As transformers counts positions: padding on the left shifts nothing.
    return _Batch(size, prompt, kept, np.cumsum(kept, axis=1) - 1)


def _check_width(arrays: Arrays, known: dict[str, tuple[int, ...]], prompt: int, passes: int) -> None:
    for name, shape in known.items():
        if name == "the logits" or shape[1] == prompt or (passes > 1 and prompt <= shape[1] <= prompt + passes):
            continue
        raise MalformedDump(
            f"{arrays.path}: {name} covers {shape[1]} positions, the logits of the prompt {prompt}; wanted the mask "
            "and the ids of the same batch"
        )


def _check_decode(arrays: Arrays, passes: Sequence[_Pass], size: int) -> None:
    for one in passes[1:]:
        if one.rows != size:
            raise RefusedDump(
                f"{arrays.path}: {one.rows} rows in step {one.step} for {size} sequences; wanted one token of each. "
                "Without a KV cache or with assisted generation, tokens are routed again: record plain generation"
            )


# Rows


@dataclass
class _Findings:
    rows: int = 0
    tied: int = 0
    undetermined: int = 0
    """Selections among logits equal to the k-th largest, where more are equal than there are places."""
    first_tied: str | None = None
    are_probabilities: bool | None = None
    reasons: dict[str, int] = field(default_factory=dict)


def _blocks(arrays: Arrays, passes: Sequence[_Pass], batch: _Batch, parsed: ParsedDump) -> Iterator[RowBlock]:
    findings = _Findings()
    steps = 0
    for one in passes:
        kept, request, position = batch.rows(one.step)
        dropped = int(len(kept) - kept.sum()) * len(one.layers)
        if dropped:
            reason = "padding by attention_mask"
            parsed.dropped_rows[reason] = parsed.dropped_rows.get(reason, 0) + dropped
        rows = int(kept.sum())
        if not rows:
            continue
        layers = len(one.layers)
        if rows * layers * parsed.top_k > MAX_STEP_SELECTIONS:
            raise MalformedDump(
                f"{arrays.path}, step {one.step}: {rows} tokens · {layers} layers · {parsed.top_k} in one pass, at "
                f"most {MAX_STEP_SELECTIONS:,} selections; save the passes one by one"
            )
        ids = np.empty((layers, rows, parsed.top_k), dtype=np.int32)
        weights = np.empty((layers, rows, parsed.top_k), dtype=np.float32)
        for index, place in enumerate(one.places):
            where = f"{arrays.path}, step {one.step}, layer {one.layers[index]}"
            _select(arrays, place, one, kept, ids[index], weights[index], findings, where)
        yield RowBlock(
            step=np.full(layers * rows, steps, dtype=np.int64),
            pass_in_step=np.zeros(layers * rows, dtype=np.int32),
            layer=np.repeat(np.asarray(one.layers, dtype=np.int32), rows),
            request=np.tile(request[kept], layers),
            position=np.tile(position[kept], layers),
            phase=np.full(layers * rows, PHASE_CODES["prefill" if one.step == 0 else "decode"], dtype=np.int8),
            expert_ids=ids.reshape(-1, parsed.top_k),
            weights=weights.reshape(-1, parsed.top_k),
        )
        steps += 1
    selections = findings.rows * parsed.top_k
    if findings.undetermined > TIED_SHARE * selections:
        raise RefusedDump(
            f"{findings.first_tied}: equal logits at the place of the {parsed.top_k}-th expert, the first of "
            f"{findings.tied} such rows of {findings.rows}; {findings.undetermined} of {selections} selections could "
            f"be other experts, wanted at most {TIED_SHARE:.0%}: were the logits rounded? save the ids that the router "
            "chose (`experts` [layers, tokens, k]), or unrounded logits"
        )
    parsed.checks += _checks(findings, parsed, batch)


def _select(
    arrays: Arrays,
    place: tuple[str, int | None],
    one: _Pass,
    kept: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    findings: _Findings,
    where: str,
) -> None:
    """Fills ids and weights (kept rows, K) of one layer."""
    name, index = place
    is_bf16 = arrays.headers[name].is_bf16
    chunk, done = max(1, CHUNK_VALUES // one.experts), 0
    for begin in range(0, one.rows, chunk):
        chosen = kept[begin : begin + chunk]
        stored = arrays.read(name)
        stored = (stored if index is None else stored[index]).reshape(one.rows, one.experts)[begin : begin + chunk]
        # float16 and float64 have one value in float32 that sorts alike, but for the last bits of float64.
        logits = as_float32(stored[chosen], is_bf16)  # (R, E)
        del stored
        arrays.let_go()
        rows = len(logits)
        if not rows:
            continue
        bad = ~np.isfinite(logits).all(axis=1)
        flat = logits.max(axis=1) == logits.min(axis=1) if one.experts > 1 else bad
        for wrong, what in ((bad, "a logit that is no finite number"), (flat & ~bad, "all logits of a row are equal")):
            if wrong.any():
                row = begin + int(np.flatnonzero(chosen)[np.flatnonzero(wrong)[0]])
                hint = "an overflow of the capture" if wrong is bad else "an unwritten buffer, not a choice of experts"
                raise MalformedDump(f"{where}, row {row}: {what} ({int(wrong.sum())} such rows): {hint}; record again")
        _find_probabilities(logits, findings, where)
        part = slice(done, done + rows)
        ids[part], tied, undetermined = top_k_of(logits, ids.shape[1])
        findings.tied += len(tied)
        findings.undetermined += undetermined
        if len(tied) and findings.first_tied is None:
            findings.first_tied = f"{where}, row {begin + int(np.flatnonzero(chosen)[tied[0]])}"
        findings.rows += rows
        values = np.take_along_axis(logits, ids[part].astype(np.int64), axis=1)
        if findings.are_probabilities:
            if values.min() <= 0:
                raise MalformedDump(
                    f"{where}: fewer than {ids.shape[1]} experts of a row have a probability, so they are scores of a "
                    "smaller k; say --meta top_k_model=K as the dump was recorded"
                )
            weights[part] = values
        else:
            highest = logits.max(axis=1, keepdims=True)
            weights[part] = np.exp(values - highest) / np.exp(logits - highest).sum(axis=1, keepdims=True)
        done += rows


def _find_probabilities(logits: npt.NDArray[np.float32], findings: _Findings, where: str) -> None:
    are = (logits >= 0).all(axis=1) & (np.abs(logits.sum(axis=1) - 1) < SUM_TOLERANCE)
    if findings.are_probabilities is None:
        findings.are_probabilities = bool(are.all())
    elif findings.are_probabilities and not are.all():
        raise MalformedDump(
            f"{where}: rows before are probabilities (they sum to 1), {int((~are).sum())} rows here are not; are these "
            "two kinds of capture in one file?"
        )


def top_k_of(logits: npt.NDArray[np.float32], top_k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], int]:
    """(the k largest of each row, largest first and lower ids first among equals; the rows that tie at the k-th; how
    many selections of theirs could be others).

    `logits`: (R, E), finite.
    """
    undetermined = 0
    if top_k < logits.shape[1]:
        ids = np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k]
        least = np.take_along_axis(logits, ids, axis=1).min(axis=1, keepdims=True)
        tied = np.flatnonzero((logits >= least).sum(axis=1) > top_k)
        if len(tied):
            undetermined = int((np.take_along_axis(logits[tied], ids[tied], axis=1) == least[tied]).sum())
            ids[tied] = np.argsort(-logits[tied], axis=1, kind="stable")[:, :top_k]
    else:
        ids, tied = np.tile(np.arange(top_k), (len(logits), 1)), np.zeros(0, dtype=np.int64)
    ids.sort(axis=1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1).astype(np.int32), tied, undetermined


def _checks(findings: _Findings, parsed: ParsedDump, batch: _Batch) -> list[CheckRecord]:
    return [
        CheckRecord(
            name="top k is unique",
            outcome="warn" if findings.tied else "ok",
            wanted=f"no two equal logits at the place of the {parsed.top_k}-th expert",
            found=f"{findings.tied} of {findings.rows} rows tie there, which leaves {findings.undetermined} of "
            f"{findings.rows * parsed.top_k} selections open; the lower id is taken, the model may have taken the other"
            if findings.tied
            else f"{findings.rows} rows looked at",
        ),
        CheckRecord(
            name="logits before the softmax",
            outcome="warn" if findings.are_probabilities else "ok",
            wanted="router logits, as the model's documentation says",
            found="probabilities that sum to 1; taken as weights as they are"
            if findings.are_probabilities
            else "logits",
        ),
        CheckRecord(
            name="padding ruled out",
            outcome="ok" if batch.kept is not None else "warn",
            wanted="an attention_mask that says which rows are padding",
            found="attention_mask applied"
            if batch.kept is not None
            else "no mask, but one sequence alone; one padded to a fixed length would not be seen",
        ),
    ]
