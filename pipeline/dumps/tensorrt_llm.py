"""TensorRT-LLM's expert statistics: a folder of `meta_info.json` and, per rank, tensors named `{iteration}_{layer}`.

`rank{r}.safetensors` holds counts [experts], forks add co-occurrences [experts, experts]: no routes. Some forks also
write `token_selected_experts_rank{r}` [tokens, k] (safetensors or npz), which are: an iteration is a step. What a file
holds is told by its tensors' shapes; its name gives the rank alone, which stands nowhere else.

Layout after examples/ep_load_balancer and forks of it. Letters: T tokens, K experts per token, E experts.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dumps.arrays import Header, Npz, Safetensors
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
)
from pipeline.dumps.jsonl import loads
from pipeline.dumps.ranks import MAX_EVENT_ROWS, Rank, gathered, joined_step, missing_ranks, shards
from schemas.trace import CheckRecord

_KEY = re.compile(r"(\d{1,12})_(\d{1,5})", re.ASCII)
_RANK = re.compile(r"rank_?(\d{1,5})(?!\d)", re.ASCII)
_TENSOR = re.compile(rb'"([^"\\]{0,200})"\s*:\s*\{\s*"(?:dtype|shape|data_offsets)"')
_MAX_META_BYTES = 1024 * 1024
_NO_TRACE = (
    "counts per iteration, layer and expert (TensorRT-LLM's expert statistics), not the routes of tokens; a count has "
    "no order, so no cache can be replayed on it: record token_selected_experts"
)


@dataclass(frozen=True)
class _Meta:
    num_experts: int | None = None
    top_k: int | None = None
    ranks: int | None = None


@dataclass(frozen=True)
class _Tensors:
    """An open file's tensors by (iteration, layer)."""

    path: Path
    headers: Mapping[tuple[int, int], Header]
    names: Mapping[tuple[int, int], str]
    source: Npz | Safetensors
    spool_folder: Path

    def read(self, key: tuple[int, int]) -> npt.NDArray[Any]:
        name = self.names[key]
        if isinstance(self.source, Npz):
            return self.source.array(name, self.spool_folder).values
        return self.source.array(name)

    def kind(self, num_experts: int | None) -> str:
        """What the shapes say: routes, counts, cooccurrence; or mixed."""
        shapes = {header.shape for header in self.headers.values()}
        if all(len(shape) == 1 for shape in shapes):
            return "counts"
        if len(shapes) == 1 and all(len(shape) == 2 and shape[0] == shape[1] for shape in shapes):
            if num_experts is not None:
                return "cooccurrence" if shapes == {(num_experts, num_experts)} else "routes"
            # Square in every layer and step: experts against experts, or, if hardly, k tokens each time.
            return "cooccurrence"
        return "routes" if all(len(shape) == 2 for shape in shapes) else "mixed"


def parse(dump: DumpFile, asked: Asked) -> ParsedDump:
    """The routes of one rank's file.

    Raises:
        RefusedDump: counts, co-occurrences, or the meta_info alone.
    """
    if dump.head().lstrip().startswith(b"{"):
        raise RefusedDump(
            f"{dump.path}: meta_info of TensorRT-LLM's expert statistics; ingest the folder that holds the ranks' files"
        )
    tensors = _open(dump, asked)
    _refuse_counts(dump.path, tensors)
    return _parsed(dump.path, _Meta(), [tensors], [0], None, [])


def parse_folder(folder: DumpFolder, asked: Asked) -> ParsedDump:
    """The routes of all ranks: equal ranks are kept once, different ones joined, each as its own request.

    Raises:
        RefusedDump: only counts. MalformedDump: a rank is missing, or ranks or meta_info contradict each other.
    """
    meta = _Meta()
    routes: dict[int, Path] = {}
    counts: dict[int, Path] = {}
    members: list[Path] = []
    for file in folder.files:
        with folder.open(file) as dump:
            if dump.head().lstrip().startswith(b"{"):
                meta = _meta(dump)
            else:
                members.append(file)
    for file in members:
        with folder.open(file) as dump:
            tensors = _open(dump, asked)
        kind = tensors.kind(meta.num_experts)
        rank = _RANK.search(file.name)
        if rank is None:
            raise MalformedDump(
                f"{folder.path}: {file.name} names no rank (rank0, rank1, …), which stands nowhere else"
            )
        group = {"routes": routes, "counts": counts}.get(kind)
        if kind == "mixed":
            raise MalformedDump(f"{file}: tensors of several kinds; wanted [tokens, k] or [experts] in all")
        if group is not None:
            if int(rank[1]) in group:
                raise MalformedDump(f"{folder.path}: {file.name} and {group[int(rank[1])].name} are of the same rank")
            group[int(rank[1])] = file
    if not routes:
        raise RefusedDump(f"{folder.path}: {_NO_TRACE}")
    missing_ranks(folder.path, routes, max([meta.ranks or 0, *(rank + 1 for rank in counts)]))
    kept, requests, check = shards(folder.path, [_rank(folder, routes[rank], rank, asked) for rank in sorted(routes)])
    files = [routes[sorted(routes)[index]] for index in kept]
    checks = [check]
    if counts:
        checks.append(_counts_check(folder, routes, counts, meta, asked))
    stack = ExitStack()
    try:
        opened = [_open(stack.enter_context(folder.open(file)), asked) for file in files]
        return _parsed(folder.path, meta, opened, requests, stack, checks)
    except BaseException:
        stack.close()
        raise


def _meta(dump: DumpFile) -> _Meta:
    text = dump.stream().read(_MAX_META_BYTES + 1)
    try:
        value = loads(text) if len(text) <= _MAX_META_BYTES else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise MalformedDump(f"{dump.path}: no JSON object of at most 1 MiB; is meta_info.json truncated?")
    said: dict[str, int | None] = {}
    for key in ("num_experts", "num_experts_per_token", "ep_size"):
        said[key] = value.get(key)
        if said[key] is not None and not (is_integer(said[key]) and 0 < (said[key] or 0) < 2**16):
            raise MalformedDump(f"{dump.path}: {key} is {str(said[key])[:40]!r}, wanted a positive whole number")
    return _Meta(said["num_experts"], said["num_experts_per_token"], said["ep_size"])


def _open(dump: DumpFile, asked: Asked) -> _Tensors:
    head = dump.head()
    source: Npz | Safetensors
    if head.startswith(b"PK"):
        source = Npz(dump)
        try:
            headers = {name: source.header(name) for name in source.names}
        except KeyError as error:
            raise MalformedDump(f"{dump.path}: a member that is no npy array ({str(error)[:80]})") from None
    elif head[8:9] == b"{":
        source = Safetensors(dump)
        headers = dict(source.headers)
    else:
        raise RefusedDump(
            f"{dump.path}: no safetensors or npz of expert statistics; keep other files out of the folder"
        )
    by_key: dict[tuple[int, int], Header] = {}
    names: dict[tuple[int, int], str] = {}
    for name, header in headers.items():
        match = _KEY.fullmatch(name)
        if match is None or header.dtype.kind not in "iu" or header.is_bf16:
            raise RefusedDump(
                f"{dump.path}: tensor {name!r:.60} is {header.dtype} shaped {list(header.shape)[:4]}, wanted integers "
                "named {iteration}_{layer}"
            )
        key = int(match[1]), int(match[2])
        if key in by_key or key[1] >= 2**16:
            raise MalformedDump(f"{dump.path}: tensor {name!r:.60} stands twice, or its layer is beyond 65,535")
        by_key[key], names[key] = header, name
    if not by_key:
        raise MalformedDump(f"{dump.path}: no tensors; was the recorder stopped before it wrote any?")
    return _Tensors(dump.path, by_key, names, source, asked.spool_folder)


def _refuse_counts(path: Path, tensors: _Tensors) -> None:
    kind = tensors.kind(num_experts=None)
    if kind == "counts":
        raise RefusedDump(f"{path}: {_NO_TRACE}")
    if kind == "cooccurrence":
        raise RefusedDump(
            f"{path}: square tensors, so co-occurrences [experts, experts], not the routes of tokens; if they are, "
            "ingest the folder with its meta_info.json"
        )
    if kind == "mixed":
        raise MalformedDump(f"{path}: tensors of several kinds; wanted [tokens, k] in all")


def _ids(tensors: _Tensors, key: tuple[int, int]) -> npt.NDArray[np.int32]:
    header = tensors.headers[key]
    if header.shape[0] > MAX_EVENT_ROWS:
        raise MalformedDump(
            f"{tensors.path}: {header.shape[0]} tokens in iteration {key[0]}, layer {key[1]}, at most {MAX_EVENT_ROWS}"
        )
    values = tensors.read(key)
    if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
        raise MalformedDump(f"{tensors.path}: an id beyond 31 bits in iteration {key[0]}, layer {key[1]}")
    return np.ascontiguousarray(values, dtype=np.int32)


def _rank(folder: DumpFolder, file: Path, number: int, asked: Asked) -> Rank:
    rank = Rank(f"rank {number}")
    with folder.open(file) as dump:
        tensors = _open(dump, asked)
        for key in sorted(tensors.headers):
            rank.add(key, _ids(tensors, key))
    return rank


def _counts_check(
    folder: DumpFolder, routes: dict[int, Path], counts: dict[int, Path], meta: _Meta, asked: Asked
) -> CheckRecord:
    """Whether the engine's own counts are those of the routes, rank by rank."""
    compared, wrong = 0, ""
    for rank in sorted(set(routes) & set(counts)):
        with folder.open(routes[rank]) as ours, folder.open(counts[rank]) as theirs:
            tensors, counted = _open(ours, asked), _open(theirs, asked)
            for key in sorted(set(tensors.headers) | set(counted.headers)):
                compared += 1
                if key in tensors.headers and key in counted.headers:
                    ids, said = _ids(tensors, key), counted.read(key)
                    inside = ids[(ids >= 0) & (ids < len(said))]
                    if len(inside) == ids.size and (np.bincount(inside, minlength=len(said)) == said).all():
                        continue
                wrong = wrong or f"rank {rank}, iteration {key[0]}, layer {key[1]} first"
    return CheckRecord(
        name="engine's counts equal ours",
        outcome="warn" if wrong else "ok" if compared else "not_applicable",
        wanted="rank{r}.safetensors counts the selections of token_selected_experts_rank{r}",
        found=f"they differ: {wrong}" if wrong else f"{compared} tensors compared",
    )


def _parsed(
    path: Path,
    meta: _Meta,
    files: list[_Tensors],
    requests: list[int],
    stack: ExitStack | None,
    checks: list[CheckRecord],
) -> ParsedDump:
    widths = {header.shape[1] for tensors in files for header in tensors.headers.values()}
    types = {header.dtype for tensors in files for header in tensors.headers.values()}
    if len(widths) != 1 or 0 in widths:
        raise MalformedDump(f"{path}: tensors of {sorted(widths)} ids per token; wanted the same k in all")
    top_k = widths.pop()
    if meta.top_k not in (None, top_k):
        raise MalformedDump(
            f"{path}: meta_info says {meta.top_k} experts per token, the tensors hold {top_k}; are they of one run?"
        )
    parsed = ParsedDump(
        format="tensorrt_llm_token_selected_experts",
        blocks=iter(()),
        top_k=top_k,
        engine="TensorRT-LLM",
        capture_method="expert statistics, token_selected_experts",
        num_experts=meta.num_experts,
        top_k_model=meta.top_k,
        largest_storable_id=min(int(np.iinfo(dtype).max) for dtype in types),
        checks=checks,
    )
    parsed.blocks = gathered(_steps(path, files, requests, stack))
    return parsed


def _steps(path: Path, files: list[_Tensors], requests: list[int], stack: ExitStack | None) -> Iterator[RowBlock]:
    with stack or ExitStack():
        number = 0
        top_k = next(iter(files[0].headers.values())).shape[1]
        keys = sorted({key for tensors in files for key in tensors.headers})
        layers_of: dict[int, list[int]] = {}
        for iteration, layer in keys:
            layers_of.setdefault(iteration, []).append(layer)
        for iteration, layers in layers_of.items():
            parts: dict[int, list[npt.NDArray[np.int32]]] = {}
            empty = np.zeros((0, top_k), dtype=np.int32)
            for layer in layers:
                key = iteration, layer
                parts[layer] = [_ids(tensors, key) if key in tensors.headers else empty for tensors in files]
                rows = sum(len(part) for part in parts[layer])
                if rows > MAX_EVENT_ROWS:
                    raise MalformedDump(
                        f"{path}, iteration {iteration}: {rows} rows of a layer in all ranks, at most {MAX_EVENT_ROWS}"
                    )
            block = joined_step(number, parts, requests)
            if block is not None:
                number += 1
                yield block


def _is_statistics(sample: Sample) -> bool:
    if sample.members:
        return all(_KEY.fullmatch(name.removesuffix(".npy")) for name in sample.members)
    if isinstance(sample.value, dict):
        return {"num_experts", "num_experts_per_token"} <= set(sample.value) and len(sample.value) <= 8
    names = [name.decode("utf-8", "replace") for name in _TENSOR.findall(sample.head[8:])]
    return sample.head[8:9] == b"{" and bool(names) and all(_KEY.fullmatch(name) for name in names)


LAYOUTS = (
    Layout(
        "tensorrt_llm_token_selected_experts",
        "TensorRT-LLM token_selected_experts (a file, or a folder with meta_info.json; counts are refused)",
        _is_statistics,
        parse,
        parse_folder,
    ),
)
