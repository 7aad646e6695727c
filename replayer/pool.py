"""Where each expert's bytes lie: a pool of safetensors files, planned, built or mapped, read back and verified.

`plan_pool` decides names, headers and extents of a synthetic pool and `build_pool` writes them; `map_pool` makes a pool
of a checkpoint's files where they lie. `read_pool` takes the manifest that was published last; `verify_pool` holds the
files against it. What synthetic bytes are is in `content`, how checkpoints are read in `checkpoints`; reading experts
during a replay does not belong here.

Letters: L layers, O experts of all layers, X extents, F files. An *object* is a (layer, expert) numbered
`layer_first_object[layer ordinal] + expert`, as in `trace`.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replayer.checkpoints import LeftOut, find_experts, slices_in_file
from replayer.content import CONTENT_VERSION, bytes_of, expert_key, fill, wrong_words
from replayer.machine import Storage, storage_of
from replayer.quantities import format_bytes
from schemas.files import publish, remove_stale
from schemas.trace import ExpertBytes, LayerId, NumExperts, TraceMetadata

IntArray = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

POOL_LAYOUTS = ("per_expert", "per_layer", "stacked")
"""What can be built."""
MAPPED = "mapped"
"""The layout of a pool whose files are a checkpoint's, in place."""
CONTENT_CHECKS = ("none", "sampled", "all")
SYNTHETIC = f"synthetic_v{CONTENT_VERSION}"
MANIFEST = "pool.parquet"
METADATA_KEY = b"expert_tier_pool"
SCHEMA_VERSION = "1.1"
PARTS = ("gate_proj", "up_proj", "down_proj")
PACKED = 1
"""The alignment of a pool whose experts follow one another and start at no page on purpose."""
MAX_ALIGNMENT_BYTES = 2**20
MIN_EXPERT_BYTES = 24
"""Three slices of one word each."""

_ID_VERSION = "1.0"
"""Of what a pool's id is made of; a later format of the manifest leaves ids as they are."""
_REQUEST = ".request.json"
_WORD_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""What safetensors reads at most."""
_WRITERS = 4
_BUFFER_BYTES = 8 * 2**20
_BUFFERS_IN_FLIGHT = 3
"""Buffers of one file whose write-back may be under way while the next one is filled."""
_BATCH_BYTES = 64 * 2**20
_BATCH_FILES = 96
"""Most files a writer holds open; four writers stay below the usual limit of 1,024 descriptors."""
_READ_BYTES = 4 * 2**20
_NAMED = 3
MAX_FILE_BYTES = 2**50
"""Largest file of a pool: places in it stay far within 64 bits."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Progress = Callable[[int, int], None]
"""Called with (bytes that are complete, bytes of all files); the first call says what was there already."""


class UnusablePlan(ValueError):
    """No pool can be laid out as asked: a call to correct."""


class PoolMismatch(ValueError):
    """The pool is another than the one that is wanted: that of another trace, or of another request."""


class UnsuitableStorage(ValueError):
    """The file system would serve the pool without the device, or in a way that cannot be counted."""


class MalformedPool(ValueError):
    """A folder that should be a finished pool is none, or its manifest contradicts itself."""


class NoRoom(OSError):
    """The device does not hold the pool. Complete files are kept."""


class PoolBusy(OSError):
    """Another process builds in the folder, or replays the pool."""


class _Stopped(Exception):
    """Ends a thread early because another failed; never leaves this module."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a pool was mapped from.

    `model` is the path that was named, `scheme` the format and how names of experts are made; extent_part: (X,) the
    tensor of an extent, as it is called below its expert; `left_out` are tensors that the pool leaves out on purpose.
    """

    model: str
    scheme: str
    extent_part: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolPlan:
    """The files of a pool and the extents of each expert in them.

    `files` are names below the pool's folder, or absolute paths where the pool is mapped. file_bytes: (F,). Object o
    has the extents `[object_first_extent[o], object_first_extent[o + 1])`, in the order of its bytes;
    layer_first_object: (L + 1,), object_first_extent: (O + 1,), extent_file, extent_offset_bytes and
    extent_length_bytes: (X,). `content` names the function the bytes come from, null if they come from a `checkpoint`.
    Every extent starts at a multiple of `alignment_bytes` (PACKED: at any).
    """

    layout: str
    content: str | None
    alignment_bytes: int
    moe_layer_ids: tuple[int, ...]
    experts_per_layer: tuple[int, ...]
    files: tuple[str, ...]
    file_bytes: IntArray
    layer_first_object: IntArray
    object_first_extent: IntArray
    extent_file: npt.NDArray[np.int32]
    extent_offset_bytes: IntArray
    extent_length_bytes: IntArray
    checkpoint: Checkpoint | None = None

    @cached_property
    def pool_id(self) -> str:
        """Names what the pool is, wherever it lies; a mapped pool is known by nothing but where its files lie."""
        said = [_ID_VERSION, self.layout, self.content, self.alignment_bytes, self.moe_layer_ids]
        digest = hashlib.sha256(json.dumps([*said, self.experts_per_layer, self.files]).encode())
        for numbers in (
            self.file_bytes,
            self.object_first_extent,
            self.extent_file,
            self.extent_offset_bytes,
            self.extent_length_bytes,
        ):
            digest.update(numbers.astype("<i8").tobytes())
        return f"pool-{digest.hexdigest()[:12]}"

    @property
    def num_objects(self) -> int:
        return len(self.object_first_extent) - 1

    @cached_property
    def object_bytes(self) -> IntArray:
        """(O,) bytes of each expert."""
        return np.add.reduceat(self.extent_length_bytes, self.object_first_extent[:-1])

    @cached_property
    def object_layer_id(self) -> IntArray:
        """(O,) the model's own number of each expert's layer."""
        return np.repeat(np.array(self.moe_layer_ids, dtype=np.int64), self.experts_per_layer)

    @cached_property
    def object_expert_id(self) -> IntArray:
        """(O,) number of each expert within its layer."""
        return np.arange(self.num_objects) - np.repeat(self.layer_first_object[:-1], self.experts_per_layer)

    @cached_property
    def extent_object(self) -> IntArray:
        """(X,) the object an extent belongs to."""
        return np.repeat(np.arange(self.num_objects), np.diff(self.object_first_extent))

    @cached_property
    def extent_begin_bytes(self) -> IntArray:
        """(X,) offset within the expert of an extent's first byte."""
        ends = np.cumsum(self.extent_length_bytes)
        begins: IntArray = ends - self.extent_length_bytes
        return begins - begins[self.object_first_extent[:-1]][self.extent_object]

    @cached_property
    def _by_place(self) -> tuple[IntArray, IntArray]:
        """((X,) extents by file and offset, (F + 1,) where each file's begin among them)."""
        order = np.lexsort((self.extent_offset_bytes, self.extent_file))
        return order, np.searchsorted(self.extent_file[order], np.arange(len(self.files) + 1))

    def extents_of(self, file: int) -> IntArray:
        """Extents in the `file`-th file, by offset."""
        order, first = self._by_place
        return order[first[file] : first[file + 1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool(PoolPlan):
    """A finished pool. `unsuitable_storage` says why its storage was so when it was built; null if it was suitable."""

    folder: Path
    unsuitable_storage: str | None

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """(F,) where each file lies."""
        # An absolute name, as mapped pools have, stands for itself.
        return tuple(self.folder / name for name in self.files)


@dataclass(frozen=True)
class CheckOutcome:
    """One thing that must be true of a pool, in words for people."""

    name: str
    wanted: str
    found: str
    held: bool


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Request(_Model):
    """What a build was asked for, kept beside an unfinished pool."""

    schema_version: str
    content: str
    layout: Literal["per_expert", "per_layer", "stacked"]
    alignment_bytes: Annotated[int, Field(ge=1, le=MAX_ALIGNMENT_BYTES, strict=True)]
    moe_layer_ids: list[LayerId]
    experts_per_layer: list[NumExperts]
    expert_bytes: list[ExpertBytes]


class _File(_Model):
    name: Annotated[str, Field(max_length=4096)]
    bytes: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES, strict=True)]


class _LeftOut(_Model):
    reason: Annotated[str, Field(max_length=4096)]
    tensors: Annotated[int, Field(ge=1, strict=True)]
    bytes: Annotated[int, Field(ge=0, strict=True)]


class _Checkpoint(_Model):
    model: Annotated[str, Field(max_length=4096)]
    scheme: Annotated[str, Field(max_length=4096)]
    left_out: list[_LeftOut]


class _Metadata(_Model):
    """The JSON in the manifest's Parquet metadata; the rows hold the extents. `checkpoint` came with format 1.1."""

    schema_version: str
    pool_id: str
    layout: Literal["per_expert", "per_layer", "stacked", "mapped"]
    content: str | None
    alignment_bytes: Annotated[int, Field(ge=1, le=MAX_ALIGNMENT_BYTES, strict=True)]
    moe_layer_ids: list[LayerId]
    experts_per_layer: list[NumExperts]
    files: list[_File]
    unsuitable_storage: str | None
    checkpoint: _Checkpoint | None = None


def plan_pool(
    moe_layer_ids: Sequence[int],
    experts_per_layer: Sequence[int],
    expert_bytes: int | npt.ArrayLike,
    *,
    layout: str,
    alignment_bytes: int,
) -> PoolPlan:
    """Lays out a synthetic pool; touches no file.

    `expert_bytes` is one size, or (O,) sizes. In layout `stacked` all experts of a layer are equal, and a multiple of
    the alignment, because no padding fits inside a tensor.

    Raises:
        UnusablePlan: no pool can be laid out like that.
    """
    if layout not in POOL_LAYOUTS:
        raise UnusablePlan(f"layout {layout!r}, wanted one of {', '.join(POOL_LAYOUTS)}")
    if not 1 <= alignment_bytes <= MAX_ALIGNMENT_BYTES or alignment_bytes & (alignment_bytes - 1):
        raise UnusablePlan(f"alignment {alignment_bytes} bytes, wanted a power of two up to {MAX_ALIGNMENT_BYTES}")
    if not moe_layer_ids or len(moe_layer_ids) != len(experts_per_layer) or min(experts_per_layer) < 1:
        raise UnusablePlan(
            f"{len(moe_layer_ids)} layers and {len(experts_per_layer)} numbers of experts, wanted one or more experts "
            "for each of one or more layers"
        )
    first_object = np.concatenate([[0], np.cumsum(experts_per_layer)]).astype(np.int64)
    num_objects = int(first_object[-1])
    sizes = np.asarray(expert_bytes, dtype=np.int64)
    if sizes.ndim and sizes.shape != (num_objects,):
        raise UnusablePlan(f"{sizes.size} expert sizes, wanted one for each of {num_objects} experts")
    sizes = np.broadcast_to(sizes, (num_objects,))
    if sizes.min() < MIN_EXPERT_BYTES:
        raise UnusablePlan(
            f"an expert of {sizes.min()} bytes, wanted at least {MIN_EXPERT_BYTES}: three slices of a word each"
        )
    files: list[str] = []
    file_bytes: list[int] = []
    # Per layer, each (experts of the layer × extents of one).
    extent_file: list[npt.NDArray[np.int32]] = []
    offsets: list[IntArray] = []
    lengths: list[IntArray] = []
    for layer, layer_id in enumerate(moe_layer_ids):
        own = sizes[first_object[layer] : first_object[layer + 1]]
        first_file = len(files)
        if layout == "per_expert":
            different, which = np.unique(own, return_inverse=True)
            headers = [len(_header(layer_id, layout, size.reshape(1), alignment_bytes)) for size in different]
            offset = np.array(headers, dtype=np.int64)[which]
            files += [f"layer_{layer_id:05}/expert_{expert:05}.safetensors" for expert in range(len(own))]
            file_bytes += (offset + own).tolist()
            extent_file.append(np.arange(first_file, len(files), dtype=np.int32))
            length = own
        else:
            if layout == "stacked":
                _check_stackable(layer_id, own, alignment_bytes)
                slices = np.array(_slices(int(own[0]), layout, alignment_bytes), dtype=np.int64)
                tensor_begin = np.cumsum(slices * len(own)) - slices * len(own)
                length = np.broadcast_to(slices, (len(own), len(slices)))
                offset = tensor_begin + slices * np.arange(len(own))[:, None]
            else:
                length = own
                padded = -(-own // alignment_bytes) * alignment_bytes
                offset = np.cumsum(padded) - padded
            offset = offset + len(_header(layer_id, layout, own, alignment_bytes))
            files.append(f"layer_{layer_id:05}.safetensors")
            file_bytes.append(int((offset + length).max()))
            extent_file.append(np.full(length.size, first_file, dtype=np.int32))
        offsets.append(offset.reshape(-1))
        lengths.append(length.reshape(-1))
    extents_each = len(PARTS) if layout == "stacked" else 1
    return PoolPlan(
        layout=layout,
        content=SYNTHETIC,
        alignment_bytes=alignment_bytes,
        moe_layer_ids=tuple(int(layer_id) for layer_id in moe_layer_ids),
        experts_per_layer=tuple(int(number) for number in experts_per_layer),
        files=tuple(files),
        file_bytes=np.array(file_bytes, dtype=np.int64),
        layer_first_object=first_object,
        object_first_extent=np.arange(num_objects + 1, dtype=np.int64) * extents_each,
        extent_file=np.concatenate(extent_file),
        extent_offset_bytes=np.concatenate(offsets),
        extent_length_bytes=np.concatenate(lengths),
    )


def _check_stackable(layer_id: int, sizes: IntArray, alignment_bytes: int) -> None:
    if sizes.min() != sizes.max():
        raise UnusablePlan(
            f"layer {layer_id}: experts of {sizes.min()} to {sizes.max()} bytes cannot be stacked in one tensor; use "
            "--layout per-layer or per-expert"
        )
    size = int(sizes[0])
    if size % alignment_bytes or size < len(PARTS) * alignment_bytes:
        raise UnusablePlan(
            f"layer {layer_id}: three slices of an expert of {size} bytes cannot all start at a multiple of "
            f"{alignment_bytes}, as a stacked tensor holds no padding; wanted a size that is a multiple of it and at "
            "least three times as large, a smaller --align, or --align none"
        )


def _slices(size: int, layout: str, alignment_bytes: int) -> tuple[int, int, int]:
    # Whole words, so that the content of every slice begins at a word; whole alignments where slices lie apart.
    step = max(_WORD_BYTES, alignment_bytes) if layout == "stacked" else _WORD_BYTES
    third = size // 3 // step * step
    return third, third, size - 2 * third


def _tensors(layout: str, sizes: IntArray, alignment_bytes: int) -> Iterator[tuple[str, list[int]]]:
    """(name, shape) of the bytes tensors of a file that holds experts of those sizes, in the order they lie."""
    if layout == "stacked":
        for part, length in zip(PARTS, _slices(int(sizes[0]), layout, alignment_bytes), strict=True):
            yield part, [len(sizes), length]
        return
    for expert, size in enumerate(sizes.tolist()):
        prefix = f"experts.{expert}." if layout == "per_layer" else ""
        for part, length in zip(PARTS, _slices(size, layout, alignment_bytes), strict=True):
            yield prefix + part, [length]
        padding = -size % alignment_bytes
        if padding and expert < len(sizes) - 1:
            # The format allows no bytes that belong to no tensor.
            yield f"padding.{expert}", [padding]


def _header(layer_id: int, layout: str, sizes: IntArray, alignment_bytes: int) -> bytes:
    """What precedes the tensors in a file, padded with spaces so that they start where they should."""
    entries: dict[str, object] = {"__metadata__": {"content": SYNTHETIC, "layer_id": str(layer_id)}}
    end = 0
    for name, shape in _tensors(layout, sizes, alignment_bytes):
        begin, end = end, end + math.prod(shape)
        entries[name] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise UnusablePlan(
            f"layer {layer_id}: {len(sizes)} experts need a header of {len(text)} bytes, safetensors reads at most "
            f"{_MAX_HEADER_BYTES}; use --layout stacked or per-expert"
        )
    length = _WORD_BYTES + len(text)
    if alignment_bytes == PACKED:
        # An odd multiple of eight, so that no page, sector or cache line starts with the first expert.
        length += (_WORD_BYTES - length) % (2 * _WORD_BYTES)
    else:
        length += -length % max(_WORD_BYTES, alignment_bytes)
    return (length - _WORD_BYTES).to_bytes(_WORD_BYTES, "little") + text.ljust(length - _WORD_BYTES)


def _header_of(plan: PoolPlan, file: int) -> bytes:
    if plan.layout == "per_expert":
        objects = slice(file, file + 1)
    else:
        objects = slice(plan.layer_first_object[file], plan.layer_first_object[file + 1])
    layer_id = int(plan.object_layer_id[objects.start])
    return _header(layer_id, plan.layout, plan.object_bytes[objects], plan.alignment_bytes)


def build_pool(plan: PoolPlan, out: Path, *, progress: Progress | None = None, allow_unsuitable: bool = False) -> Pool:
    """Writes the pool to the folder `out`, or goes on with what an earlier build of the same pool left there.

    A file that carries its final name is complete and on the device; the manifest comes last. Written pages are
    dropped, so that memory stays bounded (four writers, each of up to 100 MiB) and the pool is cold afterwards. A
    finished pool is left as it is.

    Raises:
        UnsuitableStorage: the file system is unsuitable, and that is not allowed.
        PoolMismatch: the folder holds another pool, or something else.
        MalformedPool: the folder holds a damaged manifest or request.
        PoolBusy: another process builds or replays there.
        NoRoom: the pool does not fit, or the device was full half-way.
        OSError: it cannot be written.
    """
    assert plan.checkpoint is None, "a checkpoint is mapped, not built"
    storage = storage_of(_nearest_existing(out))
    unsuitable = _refuse_unsuitable(out, storage, allow_unsuitable)
    with _made_by_one(out) as made:
        finished = _held_already(plan, out)
        _remove_leftovers(plan, out)
        missing = [file for file in range(len(plan.files)) if not _is_complete(plan, out, file)]
        if finished is not None and not missing:
            if progress:
                progress(int(plan.file_bytes.sum()), int(plan.file_bytes.sum()))
            return finished
        _check_room(plan, out, missing)
        with publish(out / _REQUEST) as temporary:
            temporary.write_text(_request_of(plan).model_dump_json())
        (out / MANIFEST).unlink(missing_ok=True)
        folders = {(out / plan.files[file]).parent for file in missing}
        for folder in folders:
            folder.mkdir(exist_ok=True)
        _write_files(plan, out, missing, progress)
        for folder in {*folders, out, *(folder.parent for folder in made)}:
            _sync_folder(folder)
        pool = _pool_in(out, plan, unsuitable)
        _write_manifest(pool)
        (out / _REQUEST).unlink()
    return pool


def map_pool(model: Path, out: Path, *, allow_unsuitable: bool = False) -> Pool:
    """Makes a pool in the folder `out` of the routed experts of a checkpoint, whose files stay where they are.

    `model` is a folder of safetensors files, one such file, or a GGUF file (any part of a split one). Only headers are
    read, and only the manifest is written; it names the real paths of the files. A pool of the same files that is there
    already is left as it is.

    Raises:
        MalformedCheckpoint: the checkpoint cannot be taken as it is.
        UnsuitableStorage: a file of it is on an unsuitable file system, and that is not allowed.
        PoolMismatch: the folder holds another pool, or something else. MalformedPool: it holds a damaged manifest.
        PoolBusy: another process builds or replays there. OSError: a file cannot be read, or the manifest not written.
    """
    plan = plan_mapped(model)
    reasons = []
    for storage, path in _places_of_paths([Path(name) for name in plan.files]).values():
        if reason := _refuse_unsuitable(path, storage, allow_unsuitable):
            reasons.append(reason)
    with _made_by_one(out) as made:
        finished = _held_already(plan, out)
        if finished is not None:
            return finished
        pool = _pool_in(out, plan, "; ".join(dict.fromkeys(reasons)) or None)
        _write_manifest(pool)
        for folder in {folder.parent for folder in made}:
            _sync_folder(folder)
    return pool


def plan_mapped(model: Path) -> PoolPlan:
    """Where the routed experts of a checkpoint lie; reads headers and writes nothing.

    Raises:
        MalformedCheckpoint: the checkpoint cannot be taken as it is. OSError: a file cannot be read.
    """
    experts = find_experts(model)
    slices = experts.slices
    numbers = np.array([(one.layer_id, one.expert_id, one.file, *one[4:]) for one in slices], dtype=np.int64)  # (X, 5)
    layer, expert, file, offset, length = (np.ascontiguousarray(column) for column in numbers.T)
    per_layer = tuple(experts.experts_per_layer.values())
    first_object = np.concatenate([[0], np.cumsum(per_layer)]).astype(np.int64)
    extent_object = first_object[np.searchsorted(np.array(list(experts.experts_per_layer)), layer)] + expert
    return PoolPlan(
        layout=MAPPED,
        content=None,
        alignment_bytes=PACKED,
        moe_layer_ids=tuple(experts.experts_per_layer),
        experts_per_layer=per_layer,
        files=tuple(str(path) for path in experts.files),
        file_bytes=np.array(experts.file_bytes, dtype=np.int64),
        layer_first_object=first_object,
        object_first_extent=np.searchsorted(extent_object, np.arange(first_object[-1] + 1)).astype(np.int64),
        extent_file=file.astype(np.int32),
        extent_offset_bytes=offset,
        extent_length_bytes=length,
        checkpoint=Checkpoint(
            model=os.fsencode(model.absolute()).decode(errors="backslashreplace"),
            scheme=experts.scheme,
            extent_part=tuple(one.part for one in slices),
            left_out=experts.left_out,
        ),
    )


def _pool_in(folder: Path, plan: PoolPlan, unsuitable_storage: str | None) -> Pool:
    values = {field.name: getattr(plan, field.name) for field in fields(PoolPlan)}
    return Pool(**values, folder=folder, unsuitable_storage=unsuitable_storage)


@contextlib.contextmanager
def _made_by_one(out: Path) -> Iterator[list[Path]]:
    """The folder, made and locked; yields the folders that were made, which go again if nothing comes to lie there."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    with _only_builder(out):
        try:
            remove_stale(out)
            yield made
        except BaseException:
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _refuse_unsuitable(path: Path, storage: Storage, allow_unsuitable: bool) -> str | None:
    """Why the storage is unsuitable, where that is allowed; null if it is suitable."""
    if storage.suitable:
        return None
    if not allow_unsuitable:
        raise UnsuitableStorage(
            f"{path}: {storage.filesystem} ({storage.reason}); wanted a file system on a disk of this machine, or "
            "--allow-unsuitable to go on with a mark"
        )
    return f"{storage.filesystem}: {storage.reason}"


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PoolBusy(
                f"{folder}: another process builds or replays this pool; wait for it or use another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _request_of(plan: PoolPlan) -> _Request:
    return _Request.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "content": plan.content,
            "layout": plan.layout,
            "alignment_bytes": plan.alignment_bytes,
            "moe_layer_ids": list(plan.moe_layer_ids),
            "experts_per_layer": list(plan.experts_per_layer),
            "expert_bytes": plan.object_bytes.tolist(),
        }
    )


def _held_already(plan: PoolPlan, out: Path) -> Pool | None:
    """The finished pool in the folder, null if there is none. Anything but (a part of) this very pool is refused."""
    finished = None
    if (out / MANIFEST).exists():
        finished = read_pool(out)
        held: PoolPlan = finished
    elif (out / _REQUEST).exists():
        held = _read_request(out / _REQUEST)
    else:
        # A fresh file system has a lost+found of its own.
        strange = sorted(path.name for path in out.iterdir() if path.name != "lost+found")
        if strange:
            raise PoolMismatch(
                f"{out}: holds {strange[0]!r} and is no pool; wanted an empty folder, a new one or a pool to go on with"
            )
        return None
    if held.pool_id != plan.pool_id:
        raise PoolMismatch(
            f"{out}: holds {'a finished' if finished else 'an unfinished'} pool with {_first_difference(held, plan)}; "
            "use another folder or remove this one"
        )
    return finished


def _read_request(path: Path) -> PoolPlan:
    try:
        request = _Request.model_validate_json(path.read_bytes())
        # Formats of one major number ask for a build in the same words.
        same_format = request.schema_version.split(".")[0] == SCHEMA_VERSION.split(".")[0]
        if not same_format or request.content != SYNTHETIC:
            raise PoolMismatch(
                f"{path.parent}: holds an unfinished pool of format {request.schema_version} and content "
                f"{request.content}, this version writes {SCHEMA_VERSION} and {SYNTHETIC}; remove the folder"
            )
        return plan_pool(
            request.moe_layer_ids,
            request.experts_per_layer,
            request.expert_bytes,
            layout=request.layout,
            alignment_bytes=request.alignment_bytes,
        )
    except (ValidationError, UnusablePlan) as error:
        raise MalformedPool(f"{path}: a damaged request ({_first_line(error)}); remove the folder") from None


def _first_difference(held: PoolPlan, wanted: PoolPlan) -> str:
    for name in ("layout", "content", "alignment_bytes"):
        if getattr(held, name) != getattr(wanted, name):
            return f"{name} {getattr(held, name)}, wanted {getattr(wanted, name)}"
    shape = _first_difference_of_experts(held, wanted.moe_layer_ids, wanted.experts_per_layer, wanted.object_bytes)
    if shape is not None:
        return shape
    for own, other in zip(held.files, wanted.files, strict=False):
        if own != other:
            return f"file {own}, wanted {other}"
    return f"pool_id {held.pool_id}, wanted {wanted.pool_id}"


def _first_difference_of_experts(
    held: PoolPlan, moe_layer_ids: Sequence[int], experts_per_layer: Sequence[int], object_bytes: IntArray | None
) -> str | None:
    for ordinal, (own, other) in enumerate(zip(held.moe_layer_ids, moe_layer_ids, strict=False)):
        if own != other:
            return f"layer {own} as MoE layer number {ordinal}, wanted layer {other}"
    if len(held.moe_layer_ids) != len(moe_layer_ids):
        return f"{len(held.moe_layer_ids)} MoE layers, wanted {len(moe_layer_ids)}"
    for layer_id, own, other in zip(moe_layer_ids, held.experts_per_layer, experts_per_layer, strict=True):
        if own != other:
            return f"{own} experts in layer {layer_id}, wanted {other}"
    if object_bytes is not None and (differs := np.flatnonzero(held.object_bytes != object_bytes)).size:
        worst = int(differs[0])
        return (
            f"{held.object_bytes[worst]} bytes in layer {held.object_layer_id[worst]}, expert "
            f"{held.object_expert_id[worst]}, wanted {object_bytes[worst]}"
        )
    return None


def _temporary_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


def _remove_leftovers(plan: PoolPlan, out: Path) -> None:
    # The folder is locked: whoever wrote these is dead.
    for name in plan.files:
        _temporary_of(out / name).unlink(missing_ok=True)


def _is_complete(plan: PoolPlan, out: Path, file: int) -> bool:
    try:
        found = (out / plan.files[file]).lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == plan.file_bytes[file]


def _check_room(plan: PoolPlan, out: Path, missing: list[int]) -> None:
    system = os.statvfs(out)
    block = system.f_frsize
    free_bytes = system.f_bavail * block
    # Per file one block for what the file system keeps of it, and one for the manifest.
    wanted_bytes = int((-(-plan.file_bytes[missing] // block) + 1).sum() + 1) * block
    if wanted_bytes > free_bytes:
        there_bytes = int(plan.file_bytes.sum() - plan.file_bytes[missing].sum())
        raise NoRoom(
            f"{out}: {format_bytes(wanted_bytes)} more are wanted ({format_bytes(there_bytes)} of the pool are there), "
            f"{format_bytes(free_bytes)} are free; make room or use another folder"
        )


def _write_files(plan: PoolPlan, out: Path, missing: list[int], progress: Progress | None) -> None:
    total_bytes = int(plan.file_bytes.sum())
    done_bytes = total_bytes - int(plan.file_bytes[missing].sum())
    if progress:
        progress(done_bytes, total_bytes)
    stop = threading.Event()
    buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    for _ in range(_WRITERS):
        buffers.put(_page_aligned(min(_BUFFER_BYTES, int(plan.file_bytes.max()))))

    def write(batch: list[int]) -> int:
        buffer = buffers.get()
        try:
            _write_batch(plan, out, batch, buffer, stop)
        finally:
            buffers.put(buffer)
        return int(plan.file_bytes[batch].sum())

    try:
        for written_bytes in _in_threads(write, _batches(plan, missing), stop):
            done_bytes += written_bytes
            if progress:
                progress(done_bytes, total_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoRoom(
            f"{out}: {os.strerror(error.errno)} after {format_bytes(done_bytes)} of {format_bytes(total_bytes)}; "
            "complete files are kept: make room and start the same build again"
        ) from None


def _in_threads(work: Callable[[_Item], _Result], items: list[_Item], stop: threading.Event) -> Iterator[_Result]:
    """Results as they come. The first failure, or an interrupt here, sets `stop` and is raised when all have ended."""
    with ThreadPoolExecutor(_WRITERS) as threads:
        futures = [threads.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _batches(plan: PoolPlan, missing: list[int]) -> list[list[int]]:
    """Files that one writer writes before it waits for the device; waiting for each costs more than its bytes."""
    batches: list[list[int]] = []
    size_bytes = _BATCH_BYTES
    for file in missing:
        if size_bytes >= _BATCH_BYTES or len(batches[-1]) >= _BATCH_FILES:
            batches.append([])
            size_bytes = 0
        batches[-1].append(file)
        size_bytes += int(plan.file_bytes[file])
    return batches


def _page_aligned(length_bytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, length_bytes), dtype=np.uint8)


def _write_batch(plan: PoolPlan, out: Path, batch: list[int], buffer: Bytes, stop: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        opened: list[tuple[int, Path]] = []
        try:
            for file in batch:
                target = out / plan.files[file]
                descriptor = os.open(_temporary_of(target), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                stack.callback(os.close, descriptor)
                opened.append((descriptor, target))
                _write_file(plan, file, descriptor, buffer, stop)
            # Three loops: once all data have left, the first fsync commits the journal for the whole batch, and no
            # rename makes it commit again.
            for descriptor, _ in opened:
                _write_back(descriptor, 0, 0, wait=True)
            for descriptor, _ in opened:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for _, target in opened:
                _temporary_of(target).replace(target)
        except BaseException:
            for _, target in opened:
                _temporary_of(target).unlink(missing_ok=True)
            raise


def _write_file(plan: PoolPlan, file: int, descriptor: int, buffer: Bytes, stop: threading.Event) -> None:
    bytes_at = _file_content(plan, file)
    size_bytes, step = int(plan.file_bytes[file]), len(buffer)
    for begin in range(0, size_bytes, step):
        if stop.is_set():
            raise _Stopped
        part = buffer[: min(step, size_bytes - begin)]
        bytes_at(begin, part)
        written = 0
        while written < len(part):
            written += os.pwrite(descriptor, part[written:].data, begin + written)
        _write_back(descriptor, begin, len(part), wait=False)
        behind = begin - _BUFFERS_IN_FLIGHT * step
        if behind >= 0:
            _write_back(descriptor, behind, step, wait=True)
            os.posix_fadvise(descriptor, behind, step, os.POSIX_FADV_DONTNEED)


def _file_content(plan: PoolPlan, file: int) -> Callable[[int, Bytes], None]:
    """A function (offset in the file, out) that writes the file's bytes from that offset on into `out`."""
    header = np.frombuffer(_header_of(plan, file), dtype=np.uint8)
    extents = plan.extents_of(file)
    begins = plan.extent_offset_bytes[extents]
    # Padding goes on with the expert before it, so that no block of the pool is zeros.
    ends = np.append(begins[1:], plan.file_bytes[file])

    def bytes_at(offset: int, out: Bytes) -> None:
        head = header[offset : offset + len(out)]
        out[: len(head)] = head
        first = max(int(np.searchsorted(begins, offset, side="right")) - 1, 0)
        last = int(np.searchsorted(begins, offset + len(out), side="left"))
        for piece in range(first, last):
            extent = int(extents[piece])
            begin = max(int(begins[piece]), offset)
            part = out[begin - offset : int(ends[piece]) - offset]
            place = int(plan.extent_begin_bytes[extent]) + begin - int(begins[piece])
            layer_id, expert_id = _expert_of(plan, extent)
            if place % _WORD_BYTES or (begin - offset) % _WORD_BYTES:
                part[:] = bytes_of(layer_id, expert_id, place, len(part))
            else:
                fill(part, np.uint64(expert_key(layer_id, expert_id)), place // _WORD_BYTES)

    return bytes_at


def _expert_of(plan: PoolPlan, extent: int) -> tuple[int, int]:
    which = plan.extent_object[extent]
    return int(plan.object_layer_id[which]), int(plan.object_expert_id[which])


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


def _write_back(descriptor: int, offset: int, length_bytes: int, *, wait: bool) -> None:
    """Starts writing the range to the device, or waits until it is there. Not durable before fsync."""
    flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER if wait else _WRITE
    if _sync_file_range is not None:
        if _sync_file_range(descriptor, offset, length_bytes, flags) == 0:
            return
        number = ctypes.get_errno()
        # An error of the device is told once: the fsync that follows would not repeat it.
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM):
            raise OSError(number, os.strerror(number))
    if wait:
        os.fdatasync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("layer_id", pa.uint16(), nullable=False),
        pa.field("expert_id", pa.uint16(), nullable=False),
        pa.field("part", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("offset_bytes", pa.int64(), nullable=False),
        pa.field("length_bytes", pa.int64(), nullable=False),
    ]
)


def _parts_of(plan: PoolPlan) -> list[str]:
    """(X,) what an extent holds of its expert."""
    if plan.checkpoint is not None:
        return list(plan.checkpoint.extent_part)
    return list(PARTS) * plan.num_objects if plan.layout == "stacked" else ["expert"] * plan.num_objects


def _write_manifest(pool: Pool) -> None:
    metadata = _Metadata.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "pool_id": pool.pool_id,
            "layout": pool.layout,
            "content": pool.content,
            "alignment_bytes": pool.alignment_bytes,
            "moe_layer_ids": list(pool.moe_layer_ids),
            "experts_per_layer": list(pool.experts_per_layer),
            "files": [
                {"name": name, "bytes": size} for name, size in zip(pool.files, pool.file_bytes.tolist(), strict=True)
            ],
            "unsuitable_storage": pool.unsuitable_storage,
            "checkpoint": pool.checkpoint
            and {
                "model": pool.checkpoint.model,
                "scheme": pool.checkpoint.scheme,
                "left_out": [asdict(one) for one in pool.checkpoint.left_out],
            },
        }
    )
    table = pa.table(
        {
            "layer_id": pool.object_layer_id[pool.extent_object],
            "expert_id": pool.object_expert_id[pool.extent_object],
            "part": _parts_of(pool),
            "file": pa.array(pool.files).take(pa.array(pool.extent_file)),
            "offset_bytes": pool.extent_offset_bytes,
            "length_bytes": pool.extent_length_bytes,
        }
    ).cast(_MANIFEST_SCHEMA)
    with publish(pool.folder / MANIFEST) as temporary:
        pq.write_table(table.replace_schema_metadata({METADATA_KEY: metadata.model_dump_json().encode()}), temporary)


def read_pool(folder: Path) -> Pool:
    """The pool whose manifest lies in `folder`; its files are not looked at.

    Raises:
        MalformedPool: there is no manifest, or it contradicts itself. OSError: it cannot be read.
    """
    path = folder / MANIFEST
    if not path.exists():
        why = "an unfinished pool: start the same build again" if (folder / _REQUEST).exists() else "no pool"
        raise MalformedPool(
            f"{folder}: holds no {MANIFEST}, so this is {why}; wanted a folder of replayer pool build or map"
        )
    try:
        table = pq.read_table(path, schema=None)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _damaged(path, f"no readable Parquet file ({_first_line(error)})") from None
    stored = (table.schema.metadata or {}).get(METADATA_KEY)
    if stored is None:
        raise _damaged(path, "no metadata of a pool")
    try:
        metadata = _Metadata.model_validate_json(stored)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "metadata"
        raise _damaged(path, f"metadata {where}: {first['msg']}") from None
    if metadata.schema_version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise MalformedPool(
            f"{path}: a pool of format {metadata.schema_version}, this version reads {SCHEMA_VERSION}; build it again"
        )
    if not table.schema.remove_metadata().equals(_MANIFEST_SCHEMA):
        raise _damaged(path, f"columns {', '.join(table.column_names)}, wanted {', '.join(_MANIFEST_SCHEMA.names)}")
    if fault := _fault_of_metadata(metadata):
        raise _damaged(path, fault)
    return _pool_of(folder, metadata, table)


def _fault_of_metadata(metadata: _Metadata) -> str | None:
    layers = metadata.moe_layer_ids
    if not layers or sorted(set(layers)) != layers or len(metadata.experts_per_layer) != len(layers):
        return "moe_layer_ids that do not ascend or have no number of experts each"
    is_mapped = metadata.content is None
    if is_mapped != (metadata.layout == MAPPED) or is_mapped != (metadata.checkpoint is not None):
        return f"content {metadata.content} in layout {metadata.layout}, wanted content exactly where none is mapped"
    if is_mapped and metadata.alignment_bytes != PACKED:
        return f"alignment_bytes {metadata.alignment_bytes} of a mapped pool, wanted {PACKED}"
    names = [file.name for file in metadata.files]
    for name in names:
        parts = PurePosixPath(name)
        # Two slashes in front are a root of their own to POSIX.
        plain = parts.parts and "\0" not in name and ".." not in parts.parts and str(parts) == name
        if not plain or parts.is_absolute() != is_mapped or name.startswith("//"):
            wanted = "an absolute path" if is_mapped else "a name below the folder"
            return f"file {name!r}, wanted {wanted}, as plain as can be"
    if len(set(names)) != len(names):
        return "a file that is named twice"
    return None


def _pool_of(folder: Path, metadata: _Metadata, table: pa.Table) -> Pool:
    path = folder / MANIFEST
    first_object = np.concatenate([[0], np.cumsum(metadata.experts_per_layer)]).astype(np.int64)
    num_objects = int(first_object[-1])
    layer_of_row, expert_of_row = (table.column(name).to_numpy().astype(np.int64) for name in ("layer_id", "expert_id"))
    layers = np.array(metadata.moe_layer_ids, dtype=np.int64)
    ordinal = np.minimum(np.searchsorted(layers, layer_of_row), len(layers) - 1)
    row_object = first_object[ordinal] + expert_of_row
    in_order = np.all(np.diff(row_object, prepend=0) >= 0) and len(np.unique(row_object)) == num_objects
    belongs = np.all(layers[ordinal] == layer_of_row) and np.all(row_object < first_object[ordinal + 1])
    if not (len(row_object) and in_order and belongs):
        raise _damaged(path, f"rows that are not the {num_objects} experts of its metadata, one after the other")
    file_bytes = np.array([file.bytes for file in metadata.files], dtype=np.int64)
    places = {file.name: place for place, file in enumerate(metadata.files)}
    extent_file = np.array([places.get(name, -1) for name in table.column("file").to_pylist()], dtype=np.int32)
    if extent_file.min() < 0:
        raise _damaged(path, "an extent in a file that its metadata does not name")
    offsets, lengths = (table.column(name).to_numpy() for name in ("offset_bytes", "length_bytes"))
    if np.any(offsets < 0) or np.any(lengths <= 0) or np.any(lengths > file_bytes[extent_file] - offsets):
        raise _damaged(path, "an extent that leaves its file")
    checkpoint = None
    if metadata.checkpoint is not None:
        checkpoint = Checkpoint(
            model=metadata.checkpoint.model,
            scheme=metadata.checkpoint.scheme,
            extent_part=tuple(table.column("part").to_pylist()),
            left_out=tuple(LeftOut(one.reason, one.tensors, one.bytes) for one in metadata.checkpoint.left_out),
        )
    pool = Pool(
        layout=metadata.layout,
        content=metadata.content,
        alignment_bytes=metadata.alignment_bytes,
        moe_layer_ids=tuple(metadata.moe_layer_ids),
        experts_per_layer=tuple(metadata.experts_per_layer),
        files=tuple(file.name for file in metadata.files),
        file_bytes=file_bytes,
        layer_first_object=first_object,
        object_first_extent=np.searchsorted(row_object, np.arange(num_objects + 1)),
        extent_file=extent_file,
        extent_offset_bytes=offsets,
        extent_length_bytes=lengths,
        checkpoint=checkpoint,
        folder=folder,
        unsuitable_storage=metadata.unsuitable_storage,
    )
    if pool.content is not None and np.any(pool.extent_begin_bytes % 8):
        raise _damaged(path, "an extent that starts at a place in its expert that is no multiple of 8 bytes")
    order = np.lexsort((offsets, extent_file))
    follows = extent_file[order][1:] == extent_file[order][:-1]
    if np.any(follows & (offsets[order][1:] < (offsets + lengths)[order][:-1])):
        raise _damaged(path, "two extents that share bytes of a file")
    if metadata.content is not None and table.column("part").to_pylist() != _parts_of(pool):
        raise _damaged(path, f"parts that are not those of layout {metadata.layout}")
    if pool.pool_id != metadata.pool_id:
        raise _damaged(path, f"extents of {pool.pool_id} under the name {metadata.pool_id}")
    return pool


def _damaged(path: Path, what: str) -> MalformedPool:
    return MalformedPool(f"{path}: {what}; remove the file and start the same build or map again")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def check_against_trace(pool: PoolPlan, metadata: TraceMetadata) -> None:
    """Holds the pool's layers, experts and sizes against those of a trace; sizes only where the trace has them.

    Raises:
        PoolMismatch: they differ; names the first difference.
    """
    sizes = None
    if metadata.expert_bytes is not None:
        layers = range(len(metadata.moe_layer_ids))
        sizes = np.array([size for layer in layers for size in metadata.sizes_of_layer(layer) or []], dtype=np.int64)
    difference = _first_difference_of_experts(pool, metadata.moe_layer_ids, metadata.experts_per_layer, sizes)
    if difference is not None:
        where = f"{pool.folder}: " if isinstance(pool, Pool) else ""
        remedy = "build one with replayer pool build --trace"
        if pool.checkpoint is not None:
            remedy = f"map the checkpoint that the trace was recorded from, or {remedy}"
        raise PoolMismatch(f"{where}{pool.pool_id} does not fit trace {metadata.trace_id}: {difference}; {remedy}")


def pool_storages(pool: Pool) -> tuple[Storage, ...]:
    """The storage of the pool's files, one per device, in the order of the first file on each.

    A file that is missing lies on no device; where all are, it is the storage they would lie on.

    Raises:
        OSError: a path is not reachable, or the kernel does not tell its mount.
    """
    return tuple(storage for storage, _ in _places_of(pool).values())


def _places_of(pool: Pool) -> dict[int, tuple[Storage, Path]]:
    """st_dev → its storage, and a path on it. All files of a synthetic pool belong on the device of its folder."""
    if pool.checkpoint is None:
        return _places_of_paths([pool.folder])
    return _places_of_paths(pool.paths)


def _places_of_paths(paths: Sequence[Path]) -> dict[int, tuple[Storage, Path]]:
    first: dict[int, Path] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            first.setdefault(path.lstat().st_dev, path)
    if not first:
        nearest = _nearest_existing(paths[0])
        return {nearest.stat().st_dev: (storage_of(nearest), paths[0])}
    return {device: (storage_of(path), path) for device, path in first.items()}


def verify_pool(
    pool: Pool,
    *,
    content: str = "sampled",
    seed: int = 0,
    allow_unsuitable: bool = False,
    progress: Progress | None = None,
) -> list[CheckOutcome]:
    """Holds every file of the pool against the manifest: storage, length, holes, header, content.

    Each file is judged by the device it lies on. Of a mapped pool the header is read afresh, and experts' tensors must
    lie where the manifest says; what they must hold is not known, so content is not checked.

    `content` is `none`, `sampled` (first and last page of every extent and one page between, chosen by `seed`) or
    `all`. Files are dropped from the page cache first, so that content is what the device holds, and again afterwards;
    those of a mapped pool are left there, since others may be using them. Needs 4 MiB a thread.

    Raises:
        UnsuitableStorage: the file system is unsuitable, and that is not allowed.
        MalformedPool: the manifest is not that of a pool this version builds, so files cannot be held against it.
        ValueError: content is none of those.
    """
    if content not in CONTENT_CHECKS:
        raise ValueError(f"content {content!r}, wanted one of {', '.join(CONTENT_CHECKS)}")
    if pool.content is not None:
        check_planned(pool)
    else:
        content = "none"
    places = _places_of(pool)
    marks = [_refuse_unsuitable(path, storage, allow_unsuitable) for storage, path in places.values()]
    devices = {device: storage for device, (storage, _) in places.items()}
    stop = threading.Event()
    buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    for _ in range(_WRITERS):
        buffers.put(_page_aligned(_READ_BYTES))

    def verify(file: int) -> tuple[int, dict[str, str]]:
        buffer = buffers.get()
        try:
            return file, _faults_of_file(pool, file, devices, content, seed, buffer, stop)
        finally:
            buffers.put(buffer)

    faults: dict[str, dict[int, str]] = {name: {} for name in ("length", "holes", "header", "content")}
    done_bytes, total_bytes = 0, int(pool.file_bytes.sum())
    for file, found in _in_threads(verify, list(range(len(pool.files))), stop):
        for name, fault in found.items():
            faults[name][file] = fault
        done_bytes += int(pool.file_bytes[file])
        if progress:
            progress(done_bytes, total_bytes)
    where = [
        f"{storage.filesystem} on {storage.device or 'no device'}" + (f": {storage.reason}" if mark else "")
        for storage, mark in zip(devices.values(), marks, strict=True)
    ]
    outcomes = [
        CheckOutcome(
            "storage",
            "a file system on a disk of this machine" + (", or any (--allow-unsuitable)" if allow_unsuitable else ""),
            "; ".join(where),
            True,
        )
    ]
    compressed = any(storage.kind == "compressed" for storage in devices.values())
    wanted = {
        "length": f"{len(pool.files)} files of {int(pool.file_bytes.sum())} bytes in all",
        "holes": "every byte allocated" + (_COMPRESSED if compressed else ""),
        "header": "safetensors headers that agree with the manifest"
        if pool.content is not None
        else "tensors of experts where the manifest says",
    }
    if content != "none":
        wanted["content"] = f"{pool.content} in {'every byte' if content == 'all' else 'the sampled pages'}"
    for name, what in wanted.items():
        outcomes.append(CheckOutcome(name, what, _in_words(pool, faults[name]), not faults[name]))
    return outcomes


def check_planned(pool: Pool) -> None:
    """Holds a synthetic pool's manifest against what this version would build of the same experts.

    Raises:
        MalformedPool: it is another, so its content is not known.
    """
    path = pool.folder / MANIFEST
    if pool.content != SYNTHETIC:
        raise MalformedPool(f"{path}: content {pool.content}, this version makes {SYNTHETIC}; build the pool again")
    try:
        plan = plan_pool(
            pool.moe_layer_ids,
            pool.experts_per_layer,
            pool.object_bytes,
            layout=pool.layout,
            alignment_bytes=pool.alignment_bytes,
        )
    except UnusablePlan as error:
        raise _damaged(path, str(error)) from None
    if plan.pool_id != pool.pool_id:
        raise _damaged(path, f"extents other than those of layout {pool.layout} ({pool.pool_id}, not {plan.pool_id})")


def check_files(pool: Pool, *storages: Storage) -> None:
    """Looks at every file of the pool, not at its content: regular, whole, without holes, and on a device that counts.

    `storages` are the pool's, as `pool_storages` gives them; asked for if left out. A file of a synthetic pool must lie
    on the device of the folder, and none of a mapped pool may have a link on its way.

    Raises:
        MalformedPool: a file is something else; names the first. OSError: one is missing or cannot be opened.
    """
    places = _places_of(pool)
    devices = {device: storage for device, (storage, _) in places.items()}
    if storages:
        devices = dict(zip(devices, storages, strict=False))
    for file, path in enumerate(pool.paths):
        descriptor, storage = _opened_regular(pool, path, devices)
        try:
            size = os.fstat(descriptor).st_size
            if size != pool.file_bytes[file]:
                fault: str | None = f"{size:,} bytes, wanted {pool.file_bytes[file]:,}"
            else:
                fault = _fault_of_allocation(descriptor, judge_blocks=storage.kind != "compressed")
        finally:
            os.close(descriptor)
        if fault is not None:
            remedy = "remove the file and start the same build again"
            if pool.checkpoint is not None:
                remedy = "put the file back as it was, or remove the manifest and map the checkpoint again"
            raise MalformedPool(f"{path}: {fault}; {remedy}")


def _opened_regular(pool: Pool, path: Path, devices: Mapping[int, Storage]) -> tuple[int, Storage]:
    """A descriptor of a regular file, and its storage; neither follows a link nor waits for the other end of a pipe."""
    if fault := _fault_of_place(pool, path, devices):
        raise MalformedPool(f"{path}: {fault}; put the file itself there")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    storage = devices.get(os.fstat(descriptor).st_dev)
    if storage is None:
        os.close(descriptor)
        raise MalformedPool(f"{path}: replaced while it was opened; leave the pool alone while it is used")
    return descriptor, storage


def _fault_of_place(pool: Pool, path: Path, devices: Mapping[int, Storage]) -> str | None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return "no regular file"
    # Links were followed when the pool was mapped; one that came later may lead elsewhere.
    if pool.checkpoint is not None and os.path.realpath(path) != str(path):
        return "a link on its way"
    if found.st_dev not in devices:
        return "on another device than the pool's " + ("folder" if pool.checkpoint is None else "other files")
    return None


_COMPRESSED = " (the allocated size is not judged: the file system compresses)"


def _in_words(pool: Pool, faults: dict[int, str]) -> str:
    if not faults:
        return f"so in all {len(pool.files)} files"
    named = [f"{pool.files[file]}: {faults[file]}" for file in sorted(faults)[:_NAMED]]
    if len(faults) > _NAMED:
        named.append(f"and {len(faults) - _NAMED} more files")
    return "; ".join(named)


def _faults_of_file(
    pool: Pool,
    file: int,
    devices: Mapping[int, Storage],
    content: str,
    seed: int,
    buffer: Bytes,
    stop: threading.Event,
) -> dict[str, str]:
    """Check → what is wrong with the file; an unreadable file is a fault of the check that could not read it."""
    path = pool.paths[file]
    faults: dict[str, str] = {}
    check = "length"
    descriptor = None
    try:
        if fault := _fault_of_place(pool, path, devices):
            return {"length": fault}
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        found = os.fstat(descriptor)
        if found.st_size != pool.file_bytes[file]:
            faults["length"] = f"{found.st_size} bytes, wanted {pool.file_bytes[file]}"
        if pool.checkpoint is None:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        check = "holes"
        storage = devices.get(found.st_dev)
        if fault := _fault_of_allocation(descriptor, judge_blocks=storage is None or storage.kind != "compressed"):
            faults["holes"] = fault
        check = "header"
        if fault := _fault_of_header(pool, file, descriptor):
            faults["header"] = fault
        check = "content"
        if content != "none" and (fault := _fault_of_content(pool, file, descriptor, content, seed, buffer, stop)):
            faults["content"] = fault
    except OSError as error:
        faults[check] = error.strerror or str(error)
    finally:
        if descriptor is not None:
            if pool.checkpoint is None:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    return faults


def _fault_of_allocation(descriptor: int, *, judge_blocks: bool) -> str | None:
    found = os.fstat(descriptor)
    if found.st_size == 0:
        return None
    try:
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        hole = found.st_size
    if hole < found.st_size:
        return f"a hole at byte {hole} of {found.st_size}"
    # File systems may keep the tail of a file beside its inode.
    allocated_bytes = found.st_blocks * 512
    if judge_blocks and allocated_bytes < found.st_size - found.st_blksize:
        return f"{allocated_bytes} bytes allocated of {found.st_size}"
    return None


def _fault_of_header(pool: Pool, file: int, descriptor: int) -> str | None:
    if pool.checkpoint is not None:
        return _fault_of_tensors(pool, pool.checkpoint, file)
    wanted = _header_of(pool, file)
    found = os.pread(descriptor, len(wanted), 0)
    if found == wanted:
        return None
    differs = next((place for place, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
    if differs is None:
        return f"ends after {len(found)} bytes, wanted {len(wanted)}"
    return f"other than planned from byte {differs} on"


def _fault_of_tensors(pool: Pool, checkpoint: Checkpoint, file: int) -> str | None:
    """What a fresh reading of a checkpoint file's header says that the manifest does not."""
    experts_per_layer = dict(zip(pool.moe_layer_ids, pool.experts_per_layer, strict=True))
    found = slices_in_file(pool.paths[file], experts_per_layer)
    wanted = {
        (*_expert_of(pool, extent), checkpoint.extent_part[extent]): (
            int(pool.extent_offset_bytes[extent]),
            int(pool.extent_length_bytes[extent]),
        )
        for extent in pool.extents_of(file).tolist()
    }
    differs = [place for place in wanted.keys() | found.keys() if wanted.get(place) != found.get(place)]
    if not differs:
        return None
    layer_id, expert_id, part = first = min(differs)
    own, other = (
        "no such tensor" if one is None else f"{one[1]} bytes at byte {one[0]}"
        for one in (found.get(first), wanted.get(first))
    )
    more = f", and {len(differs) - 1} more differ" if len(differs) > 1 else ""
    return f"layer {layer_id}, expert {expert_id}, {part}: {own}, the manifest has {other}{more}"


def _fault_of_content(
    pool: Pool, file: int, descriptor: int, content: str, seed: int, buffer: Bytes, stop: threading.Event
) -> str | None:
    advice = os.POSIX_FADV_SEQUENTIAL if content == "all" else os.POSIX_FADV_RANDOM
    os.posix_fadvise(descriptor, 0, 0, advice)
    generator = np.random.default_rng([seed, file])
    for extent in pool.extents_of(file).tolist():
        length_bytes = int(pool.extent_length_bytes[extent])
        key = np.uint64(expert_key(*_expert_of(pool, extent)))
        for begin, end in _parts_to_read(length_bytes, content, generator):
            if stop.is_set():
                raise _Stopped
            part = buffer[: end - begin]
            place = int(pool.extent_begin_bytes[extent]) + begin
            where = "layer {}, expert {}, byte {}".format(*_expert_of(pool, extent), place)
            if not _read_whole(descriptor, part, int(pool.extent_offset_bytes[extent]) + begin):
                return f"ends within {where} to {place + len(part)}"
            if wrong := int(wrong_words(part, key, place // _WORD_BYTES)):
                words = -(-len(part) // _WORD_BYTES)
                return f"{wrong} of {words} words wrong in {where} to {place + len(part)}"
    return None


def _parts_to_read(length_bytes: int, content: str, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Ranges of an extent, each beginning at a word and at most as large as a buffer."""
    if content == "all":
        return [(begin, min(begin + _READ_BYTES, length_bytes)) for begin in range(0, length_bytes, _READ_BYTES)]
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    if length_bytes <= page_bytes:
        return [(0, length_bytes)]
    between = int(generator.integers(0, length_bytes // page_bytes)) * page_bytes
    last = (length_bytes - page_bytes) // _WORD_BYTES * _WORD_BYTES
    return [(0, page_bytes), (between, min(between + page_bytes, length_bytes)), (last, length_bytes)]


def _read_whole(descriptor: int, out: Bytes, offset: int) -> bool:
    done = 0
    while done < len(out):
        read = os.preadv(descriptor, [out[done:].data], offset + done)
        if read == 0:
            return False
        done += read
    return True
