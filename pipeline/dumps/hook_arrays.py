"""Routes as research scripts write them, array by array: shards of safetensors with a manifest, torch files per layer,
and the records of a hook on a serving engine.

Letters: S sequences of a shard, L layers, T token positions, K experts per token.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.arrays import DAMAGE, Safetensors, as_float32, line_of
from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
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
)
from pipeline.dumps.hooks import PROBABILITY_TOLERANCE
from pipeline.dumps.router_logits import array_names, header_names
from pipeline.dumps.sequences import Sequences
from pipeline.dumps.torch_file import Loaded, Tree, TreeLayout, describe, numbers
from schemas.trace import MAX_TOP_K, PHASE_CODES, CheckRecord

MAX_MANIFEST_BYTES = 64 * 1024 * 1024

_SHARD_ARRAYS = {"topk_indices", "topk_probabilities", "sequence_lengths"}


# Shards with a checksummed manifest: moe-cache-eval


def parse_shards(folder: DumpFolder, asked: Asked) -> ParsedDump:
    """A folder of `routes-<n>.safetensors` and the manifest.json that names them with their SHA-256.

    Each shard holds topk_indices int16 and topk_probabilities (softmax over all experts) [S, L, T, K], −1 and 0 beyond
    sequence_lengths [S], which attention_mask [S, T] repeats. The manifest says the model, its experts, and whether the
    sequences are texts read at once or decoding, one forward pass per token.

    Raises:
        RefusedDump: no manifest. MalformedDump: it is not complete, a shard is missing or not the one it names, or
        shapes disagree.
    """
    manifest_path, manifest = _manifest(folder)
    shards = _shards(folder, manifest_path, manifest)
    model = manifest.get("model")
    model = model if isinstance(model, dict) else {}
    counts: dict[str, int | None] = {}
    for key in ("num_layers", "num_experts", "top_k"):
        value = model.get(key)
        if value is not None and not (is_integer(value) and 0 < value < 2**31):
            raise MalformedDump(f"{manifest_path}: {key} is {str(value)[:40]!r}, wanted a positive whole number")
        counts[key] = value
    with folder.open(shards[0][0]) as dump:
        shape = Safetensors(dump).headers["topk_indices"].shape if _is_shard(dump) else ()
    if len(shape) != 4 or 0 in shape[1:]:
        raise MalformedDump(
            f"{shards[0][0]}: topk_indices is shaped {list(shape)}, wanted [sequences, layers, tokens, k]"
        )
    _, layers, _, top_k = shape
    for key, found in (("num_layers", layers), ("top_k", top_k)):
        if counts[key] not in (None, found):
            raise MalformedDump(
                f"{shards[0][0]}: topk_indices is shaped {list(shape)}, but the manifest says {key} = {counts[key]}; "
                "wanted [sequences, layers, tokens, k]: is an axis order wrong?"
            )
    if top_k > MAX_TOP_K or layers > 2**16:
        raise MalformedDump(f"{shards[0][0]}: {top_k} experts per token in {layers} layers; are they scores?")
    collection = manifest.get("collection")
    decodes = isinstance(collection, dict) and collection.get("kind") == "autoregressive_decode"
    software = manifest.get("software")
    version = software.get("transformers") if isinstance(software, dict) else None
    parsed = ParsedDump(
        format="topk_shards",
        blocks=iter(()),
        top_k=top_k,
        model=model["id"] if isinstance(model.get("id"), str) else None,
        engine=f"transformers {version}" if isinstance(version, str) else None,
        capture_method="output_router_logits, top k taken when recording",
        # The script stores every hidden layer, and its models have a router in each.
        hidden_layers=counts["num_layers"],
        num_experts=counts["num_experts"],
        top_k_model=counts["top_k"],
        largest_storable_id=2**15 - 1,
        layers_are_ordinals=True,
        pass_boundaries="recorded" if decodes else "assumed_per_token",
        weight_kind="softmax",
        rank_known=True,
    )
    parsed.blocks = _shard_blocks(folder, shards, (layers, top_k), decodes, parsed)
    return parsed


def _manifest(folder: DumpFolder) -> tuple[Path, dict[str, Any]]:
    for file in folder.files:
        with folder.open(file) as dump:
            if not _is_manifest_head(dump.head()):
                continue
            if dump.size_bytes > MAX_MANIFEST_BYTES:
                raise MalformedDump(f"{file}: a manifest of {dump.size_bytes} bytes, at most {MAX_MANIFEST_BYTES}")
            try:
                manifest = json.loads(dump.stream().read(MAX_MANIFEST_BYTES + 1))
            except DAMAGE as error:
                raise MalformedDump(
                    f"{file}: no JSON ({line_of(error)}): is the manifest truncated? copy it again"
                ) from None
        if not isinstance(manifest, dict) or not isinstance(manifest.get("shards"), list) or not manifest["shards"]:
            raise MalformedDump(f"{file}: a manifest that lists no shards; was the collection stopped at its start?")
        if manifest.get("status") != "complete":
            raise MalformedDump(
                f"{file}: the collection's status is {str(manifest.get('status'))[:40]!r}, wanted 'complete'; finish "
                "it (--resume), then ingest again"
            )
        return file, manifest
    raise RefusedDump(
        f"{folder.path}: shards of topk_indices without their manifest.json, so whether all are here is unknown; copy "
        "it into the folder"
    )


def _shards(folder: DumpFolder, manifest_path: Path, manifest: dict[str, Any]) -> list[tuple[Path, str, int]]:
    """(file, SHA-256, sequences) of each shard in order; names are looked up among the folder's, never opened."""
    there = {file.name: file for file in folder.files}
    shards: list[tuple[Path, str, int]] = []
    next_sample = 0
    for place, shard in enumerate(manifest["shards"]):
        said = shard if isinstance(shard, dict) else {}
        name, digest, count = said.get("tensor_file"), said.get("tensor_sha256"), said.get("num_samples")
        if (
            not isinstance(name, str)
            or not isinstance(digest, str)
            or not re.fullmatch("[0-9a-f]{64}", digest)
            or not isinstance(count, int)
            or count < 0
        ):
            raise MalformedDump(
                f"{manifest_path}: shard {place} is {str(shard)[:80]!r}, wanted tensor_file, tensor_sha256 and "
                "num_samples"
            )
        if said.get("start_sample", next_sample) != next_sample:
            raise MalformedDump(
                f"{manifest_path}: shard {place} starts at sample {said['start_sample']!r:.20}, wanted "
                f"{next_sample}: is a shard missing from the manifest?"
            )
        next_sample += count
        if name not in there:
            raise MalformedDump(
                f"{folder.path}: {name[:120]!r} is missing, shard {place} of the manifest; copy it again"
            )
        twin = next((file for file, known, held in shards if known == digest and held and count), None)
        if twin is not None:
            raise MalformedDump(
                f"{manifest_path}: shard {place} ({name[:80]!r}) has the SHA-256 of {twin.name}; wanted each shard "
                "once: a copy under another name? leave one out"
            )
        shards.append((there[name], digest, count))
    listed = {file for file, _, _ in shards}
    for file in folder.files:
        if file in listed or file == manifest_path:
            continue
        with folder.open(file) as dump:
            if header_names(dump.head()) >= _SHARD_ARRAYS:
                raise MalformedDump(
                    f"{file}: a shard that is not in the manifest; is {manifest_path.name} an older one?"
                )
    return shards


def _is_shard(dump: DumpFile) -> bool:
    return set(Safetensors(dump).headers) >= _SHARD_ARRAYS


def _shard_blocks(
    folder: DumpFolder,
    shards: list[tuple[Path, str, int]],
    wanted: tuple[int, int],
    decodes: bool,
    parsed: ParsedDump,
) -> Iterator[RowBlock]:
    layers, top_k = wanted
    sequences = Sequences(range(layers))
    request = 0
    for file, digest, count in shards:
        with folder.open(file) as dump:
            if dump.sha256().hexdigest() != digest:
                raise MalformedDump(
                    f"{file}: its SHA-256 is not the one of the manifest: damaged or another file; copy it again"
                )
            if not _is_shard(dump):
                raise MalformedDump(f"{file}: wanted safetensors with {', '.join(sorted(_SHARD_ARRAYS))}")
            tensors = Safetensors(dump)
            lengths = _checked_shapes(tensors, (count, layers, top_k))
            tokens = tensors.headers["topk_indices"].shape[2]
            padding = int((tokens - lengths).sum()) * layers
            if padding:
                reason = "padding beyond sequence_lengths"
                parsed.dropped_rows[reason] = parsed.dropped_rows.get(reason, 0) + padding
            is_bf16 = tensors.headers["topk_probabilities"].is_bf16
            for row, length in enumerate(lengths.tolist()):
                # Mapped anew for each sequence, so that pages looked at do not pile up.
                ids = tensors.array("topk_indices")[row, :, :length].transpose(1, 0, 2).astype(np.int32)
                weights = as_float32(tensors.array("topk_probabilities")[row, :, :length].transpose(1, 0, 2), is_bf16)
                wrong = ~((weights >= 0) & (weights <= 1 + PROBABILITY_TOLERANCE))
                if wrong.any():
                    token, layer, rank = np.argwhere(wrong)[0].tolist()
                    raise MalformedDump(
                        f"{file}, sequence {row}, token {token}, layer {layer}: topk_probabilities holds "
                        f"{weights[token, layer, rank]:.4g} ({int(wrong.sum())} such values of the sequence), wanted "
                        "probabilities of 0 to 1; is sequence_lengths wrong? record again"
                    )
                for block in sequences.blocks(
                    ids,
                    request=request,
                    # Of decoding the prompt's length, and so the place in the sequence, is in the text files only.
                    positions=None if decodes else np.arange(length, dtype=np.int64),
                    prompt_tokens=None if decodes else length,
                    weights=weights,
                ):
                    if decodes:
                        block.phase.fill(PHASE_CODES["decode"])
                    yield block
                request += 1
    parsed.checks.append(
        CheckRecord(
            name="shards complete",
            outcome="ok",
            wanted="every shard of the manifest, with its SHA-256",
            found=f"{len(shards)} shards, {request} sequences",
        )
    )


def _checked_shapes(tensors: Safetensors, wanted: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """sequence_lengths (S,), held against the other arrays."""
    count, layers, top_k = wanted
    headers = tensors.headers
    shape = headers["topk_indices"].shape
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (count, layers, top_k):
        raise MalformedDump(
            f"{tensors.path}: topk_indices is shaped {list(shape)}, wanted {[count, layers, 'tokens', top_k]} by the "
            "manifest and the first shard"
        )
    if headers["topk_indices"].dtype.kind not in "iu" or headers["topk_indices"].dtype.itemsize > 4:
        raise MalformedDump(f"{tensors.path}: topk_indices is {headers['topk_indices'].dtype}, wanted int16")
    probabilities = headers["topk_probabilities"]
    if probabilities.shape != shape or not (probabilities.dtype.kind == "f" or probabilities.is_bf16):
        raise MalformedDump(
            f"{tensors.path}: topk_probabilities is {probabilities.dtype} shaped {list(probabilities.shape)}, wanted "
            f"floats shaped {list(shape)}"
        )
    lengths = tensors.array("sequence_lengths")
    if lengths.shape != (count,) or lengths.dtype.kind not in "iu":
        raise MalformedDump(
            f"{tensors.path}: sequence_lengths is {lengths.dtype} shaped {list(lengths.shape)}, wanted {count} whole "
            "numbers"
        )
    if ((lengths < 0) | (lengths > shape[2])).any():
        row = int(np.flatnonzero((lengths < 0) | (lengths > shape[2]))[0])
        raise MalformedDump(
            f"{tensors.path}: sequence {row} is {lengths[row]} tokens long, but topk_indices has {shape[2]} positions"
        )
    lengths = lengths.astype(np.int64)
    if "attention_mask" in headers:
        mask = tensors.array("attention_mask")
        wanted_mask = np.arange(shape[2]) < lengths[:, None]
        if mask.shape != wanted_mask.shape or mask.dtype.kind not in "biu" or (mask.astype(bool) != wanted_mask).any():
            raise MalformedDump(
                f"{tensors.path}: attention_mask {list(mask.shape)} is not what sequence_lengths say; which rows are "
                "padding is unknown, record again"
            )
    return lengths


def _is_manifest_head(head: bytes) -> bool:
    return head.lstrip()[:1] == b"{" and b'"tensor_file"' in head and b'"tensor_sha256"' in head


def _claims_shards(sample: Sample) -> bool:
    return _is_manifest_head(sample.head) or array_names(sample) >= _SHARD_ARRAYS


LAYOUTS = (
    Layout(
        "topk_shards",
        "folder of safetensors shards with topk_indices and a manifest",
        _claims_shards,
        parse_folder=parse_shards,
    ),
)


# A torch file per layer: FLAME-MoE

_LAYER_ARRAYS = {"samples", "scores", "indices", "token_position"}


def parse_layer_files(files: Sequence[Loaded], folder: DumpFolder, asked: Asked) -> ParsedDump:
    """A folder of torch files, one a layer, each a dict of samples, scores, indices [T, K] and token_position [T].

    Which layer a file is of stands in its name alone: the number in which the names differ. Rows are of the same token
    by their place only, so token_position must agree between all files.

    Raises:
        MalformedDump: a layer is missing, or the files are not of the same tokens. RefusedDump: the names do not say
        the layers.
    """
    layers = _layers_by_name(files, asked.user.moe_layer_ids)
    ids: list[npt.NDArray[Any]] = []
    scores: list[npt.NDArray[Any] | None] = []
    first_positions: npt.NDArray[Any] | None = None
    for one in files:
        found, positions, score = _layer_arrays(one)
        if ids and found.shape != ids[0].shape:
            raise MalformedDump(
                f"{one.path}: indices is shaped {list(found.shape)}, {files[0].path.name} has {list(ids[0].shape)}; "
                "rows of the layers belong together by their place alone: is the file truncated, or of another run?"
            )
        if first_positions is None:
            first_positions = positions
        elif not np.array_equal(positions, first_positions):
            row = int(np.flatnonzero(positions != first_positions)[0])
            raise MalformedDump(
                f"{one.path}, row {row}: token_position {positions[row]}, {files[0].path.name} has "
                f"{first_positions[row]}; the files are not of the same tokens in the same order"
            )
        ids.append(found)
        scores.append(score)
        one.let_go()
    if first_positions is None:
        raise MalformedDump(f"{folder.path}: no file; wanted one per layer")
    places = first_positions.astype(np.int64)
    repeats = int(np.count_nonzero(np.diff(places) == 0))
    parsed = ParsedDump(
        format="layer_torch_files",
        blocks=iter(()),
        top_k=int(ids[0].shape[1]),
        pass_boundaries="assumed_per_token",
    )
    if repeats:
        # Sequences of a batch stand side by side, and which row is of which is not in the dump.
        parsed.checks.append(
            CheckRecord(
                name="positions of the sequence",
                outcome="warn",
                wanted="rows of one sequence after the other",
                found=f"{repeats} rows have the token_position of the row before: sequences of a batch stand side by "
                "side; positions are left unknown",
            )
        )
    parsed.blocks = _layer_blocks(files, layers, ids, scores, None if repeats else places)
    return parsed


def _layer_arrays(one: Loaded) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]:
    """(indices [T, K], token_position [T], scores [T, K] or null) of a file."""
    indices, positions, scores = (numbers(one.tree[key]) for key in ("indices", "token_position", "scores"))
    if indices is None or indices.ndim != 2 or indices.dtype.kind not in "iu" or 0 in indices.shape:
        raise MalformedDump(f"{one.path}: indices is {_shape(one.tree['indices'])}, wanted whole numbers [tokens, k]")
    if indices.shape[1] > MAX_TOP_K or indices.min() < -(2**31) or indices.max() >= 2**31:
        raise MalformedDump(
            f"{one.path}: indices {list(indices.shape)} of {indices.min()}..{indices.max()}; wanted the ids of at most "
            f"{MAX_TOP_K} experts per token"
        )
    if positions is None or positions.dtype.kind not in "iu" or positions.size != len(indices):
        raise MalformedDump(
            f"{one.path}: token_position is {_shape(one.tree['token_position'])}, wanted {len(indices)} whole numbers"
        )
    weights = scores if scores is not None and scores.dtype.kind == "f" and scores.shape == indices.shape else None
    return indices, positions.reshape(-1), weights


def _shape(value: Tree) -> str:
    array = numbers(value)
    return describe(value) if array is None else f"{array.dtype} shaped {list(array.shape)}"


def _layers_by_name(files: Sequence[Loaded], declared: list[int] | None) -> list[int]:
    parts = [re.split(r"([0-9]{1,9})", one.path.name) for one in files]
    alike = len({(len(part), tuple(part[::2])) for part in parts}) == 1
    varying = (
        [place for place in range(1, len(parts[0]), 2) if len({part[place] for part in parts}) > 1] if alike else []
    )
    if len(files) == 1 and alike and len(parts[0]) == 3:
        varying = [1]
    if len(varying) != 1:
        names = ", ".join(one.path.name[:40] for one in files[:3])
        raise RefusedDump(
            f"{files[0].path.parent}: files of one layer each, and their names ({names} …) do not differ in one "
            "number, so the layers are unknown; name them layer_<n>.pt by the model's own numbers"
        )
    layers = [int(part[varying[0]]) for part in parts]
    if sorted(set(layers)) != layers or layers[-1] > 65535:
        raise MalformedDump(
            f"{files[0].path.parent}: layers {layers[:8]} by the files' names, wanted each once, below 65536"
        )
    missing = sorted(set(range(layers[0], layers[-1] + 1)) - set(layers))
    if missing and declared != layers:
        raise MalformedDump(
            f"{files[0].path.parent}: the files of layers {missing[:5]} are missing between {layers[0]} and "
            f"{layers[-1]}; copy them again, or if those layers are dense say --meta "
            f"moe_layer_ids={str(layers)[:200].replace(' ', '')}"
        )
    return layers


def _layer_blocks(
    files: Sequence[Loaded],
    layers: list[int],
    ids: list[npt.NDArray[Any]],
    scores: list[npt.NDArray[Any] | None],
    positions: npt.NDArray[np.int64] | None,
) -> Iterator[RowBlock]:
    sequences = Sequences(layers)
    per_block = max(1, ROWS_PER_BLOCK // len(layers))
    has_scores = all(score is not None for score in scores)
    for begin in range(0, len(ids[0]), per_block):
        part = slice(begin, min(begin + per_block, len(ids[0])))
        routes = np.stack([layer[part] for layer in ids], axis=1).astype(np.int32)
        weights = None
        if has_scores:
            weights = np.stack([score[part] for score in scores if score is not None], axis=1).astype(np.float32)
            if not np.isfinite(weights).all():
                raise MalformedDump(
                    f"{files[0].path.parent}: a score among rows {begin}.. is no finite number; record again"
                )
        for one in files:
            one.let_go()
        yield from sequences.blocks(
            routes, request=0, positions=None if positions is None else positions[part], weights=weights
        )


# Records of a hook on vLLM: MoE-CAP


def parse_pass_records(loaded: Loaded, asked: Asked) -> ParsedDump:
    """Records {forward_pass_id, rank, topk_ids [L, T, K], num_tokens}, one a forward pass, one file.

    Rows from num_tokens on are padding; K is at least the model's k, and the columns behind it are −1; a layer that is
    −1 in every pass is dense or was not captured.

    Raises:
        RefusedDump: records of several ranks. MalformedDump: shapes that disagree, passes out of order, or holes.
    """
    return _pass_records([loaded])


def parse_pass_record_files(files: Sequence[Loaded], folder: DumpFolder, asked: Asked) -> ParsedDump:
    """The same, a file or several passes each, in the order of their names."""
    return _pass_records(files)


def _records_of(tree: Tree) -> list[dict[str, Any]] | None:
    listed = [tree] if isinstance(tree, dict) and "topk_ids" in tree else tree
    if isinstance(tree, dict) and isinstance(tree.get("records"), list):
        listed = tree["records"]
    wanted = {"forward_pass_id", "topk_ids", "num_tokens"}
    if not isinstance(listed, list) or not listed:
        return None
    if not all(isinstance(record, dict) and wanted <= set(record) for record in listed):
        return None
    return listed


def _pass_records(files: Sequence[Loaded]) -> ParsedDump:
    records: list[tuple[str, int, npt.NDArray[Any]]] = []
    ranks: set[str] = set()
    shape: tuple[int, int] | None = None
    padding = 0
    for one in files:
        for place, record in enumerate(_records_of(one.tree) or []):
            where = f"{one.path}, record {place}"
            number, ids, count = record["forward_pass_id"], numbers(record["topk_ids"]), record["num_tokens"]
            ranks.add(str(record["rank"]) if is_integer(record.get("rank")) else describe(record.get("rank")))
            if not is_integer(number) or not is_integer(count):
                raise MalformedDump(f"{where}: forward_pass_id and num_tokens must be whole numbers")
            if ids is None or ids.ndim != 3 or ids.dtype.kind not in "iu":
                raise MalformedDump(
                    f"{where}: topk_ids is {_shape(record['topk_ids'])}, wanted whole numbers [layers, tokens, k]"
                )
            shape = shape or (ids.shape[0], ids.shape[2])
            if (ids.shape[0], ids.shape[2]) != shape or 0 in shape or shape[1] > MAX_TOP_K or shape[0] > 2**16:
                raise MalformedDump(
                    f"{where}: topk_ids is shaped {list(ids.shape)}, wanted {[shape[0], 'tokens', shape[1]]}"
                )
            if not 0 <= count <= ids.shape[1]:
                raise MalformedDump(f"{where}: num_tokens = {count} of {ids.shape[1]} rows; record again")
            if records and number <= records[-1][1]:
                raise MalformedDump(
                    f"{where}: forward_pass_id {number} after {records[-1][1]}; a pass recorded twice counts twice, "
                    "and passes must stand in their order"
                )
            padding += (ids.shape[1] - count) * shape[0]
            if ids.size and (ids.min() < -1 or ids.max() >= 2**31):
                raise MalformedDump(f"{where}: ids {ids.min()}..{ids.max()}, wanted −1 or the id of an expert")
            records.append((where, number, ids[:, :count]))
            one.let_go()
    if len(ranks) > 1:
        raise RefusedDump(
            f"{files[0].path}: records of ranks {', '.join(sorted(ranks)[:8])}; whether ranks hold the same tokens or "
            "different ones is not in the dump: ingest the records of one rank"
        )
    if shape is None:
        raise MalformedDump(f"{files[0].path}: no record; was the recorder stopped before it wrote any?")
    captured = np.zeros(shape[0], dtype=np.bool_)
    columns = 0
    for _, _, ids in records:
        routed = ids >= 0
        captured |= routed.any(axis=(1, 2))
        if routed.any():
            columns = max(columns, int(np.flatnonzero(routed.any(axis=(0, 1)))[-1]) + 1)
        files[0].let_go()
    if not columns:
        raise MalformedDump(f"{files[0].path}: every id is −1: nothing was captured; record again")
    layers = np.flatnonzero(captured).tolist()
    parsed = ParsedDump(
        format="pass_records",
        blocks=iter(()),
        top_k=columns,
        layers_are_ordinals=len(layers) == shape[0],
        # With layers that route nothing among them, the axis counts the model's layers.
        hidden_layers=shape[0] if len(layers) < shape[0] else None,
    )
    if padding:
        parsed.dropped_rows["padding beyond num_tokens"] = padding
    lost = (shape[0] - len(layers)) * sum(ids.shape[1] for _, _, ids in records)
    if lost:
        parsed.dropped_rows["layer without routes, all −1"] = lost
    parsed.blocks = _record_blocks(files, records, layers, columns)
    return parsed


def _record_blocks(
    files: Sequence[Loaded], records: list[tuple[str, int, npt.NDArray[Any]]], layers: list[int], top_k: int
) -> Iterator[RowBlock]:
    steps = 0
    for where, _, ids in records:
        tokens = ids.shape[1]
        if not tokens:
            continue
        routes = ids[layers, :, :top_k].astype(np.int32).reshape(-1, top_k)
        holes = np.flatnonzero((routes < 0).any(axis=1))
        if len(holes):
            layer, token = divmod(int(holes[0]), tokens)
            raise MalformedDump(
                f"{where}, layer {layers[layer]}, row {token}: ids {routes[holes[0]].tolist()} ({len(holes)} such rows)"
                ": a route that was not captured inside num_tokens; record again without graphs"
            )
        for one in files:
            one.let_go()
        rows = len(routes)
        yield RowBlock(
            step=np.full(rows, steps, dtype=np.int64),
            pass_in_step=np.zeros(rows, dtype=np.int32),
            layer=np.repeat(np.asarray(layers, dtype=np.int32), tokens),
            request=np.zeros(rows, dtype=np.int64),
            position=None,
            phase=np.full(rows, PHASE_CODES["unknown"], dtype=np.int8),
            expert_ids=routes,
        )
        steps += 1


TREE_LAYOUTS = (
    TreeLayout(
        "layer_torch_files",
        "folder with a file per layer of samples, scores, indices, token_position",
        lambda tree: isinstance(tree, dict) and set(tree) >= _LAYER_ARRAYS,
        parse_folder=parse_layer_files,
    ),
    TreeLayout(
        "pass_records",
        "records of forward_pass_id, topk_ids [layers, tokens, k], num_tokens",
        lambda tree: _records_of(tree) is not None,
        parse_pass_records,
        parse_pass_record_files,
    ),
)
