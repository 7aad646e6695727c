"""Which bytes of a checkpoint's files are which routed expert: headers of safetensors or GGUF files in, slices out.

Reads headers alone and no tensor; headers are untrusted. A tensor's name decides whether it belongs to an expert, and
to which: `…layers.L.….experts.E.PART` is expert E's alone, `…layers.L.….experts.PART` (and `blk.L.ffn_…_exps.PART` of
GGUF) is a stack of one slice an expert. Shared experts are no routed ones. Pools are made of slices in `pool`.
"""

import json
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

INDEX = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000
"""What safetensors reads at most; far more than a GGUF file's vocabulary takes."""
_MAX_TENSORS = 1_000_000
_MAX_TEXT_BYTES = 65535
_MAX_NAME = 1000
_MAX_NUMBER = 65535
_NAMED = 3
_DOWNLOAD = "download the file again"

# Bits an element takes, by the names of safetensors; a name it does not know is taken at its length.
_ELEMENT_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

GGML_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
"""ggml's number of a type → (elements of a block, bytes of a block), as in ggml.c."""

_GGUF_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_STACKED = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"})
_GGUF_SINGLE = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
_MAX_DIMENSIONS = 4
"""GGML_MAX_DIMS."""

_LAYER_WORDS = frozenset({"layers", "layer", "blocks", "h"})
_HIDDEN_LAYERS = ("num_hidden_layers", "n_layers", "n_layer")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
    "num_selected_experts",
)  # fmt: skip
_NESTED_CONFIGS = ("text_config", "language_config", "llm_config")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)", re.ASCII)


class MalformedCheckpoint(OSError):
    """A checkpoint contradicts itself, lacks a part, or keeps its experts in a way that is not known.

    An OSError like gzip.BadGzipFile: to its reader a file that cannot be understood cannot be read.
    """


class Tensor(NamedTuple):
    """Where a tensor lies in its file; `shape` has the outermost axis first."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


class Slice(NamedTuple):
    """Bytes of one expert in one file. `part` is the tensor's name below the expert, or below all experts."""

    layer_id: int
    expert_id: int
    part: str
    file: int
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class LeftOut:
    """Tensors that look like a routed expert's and are none of the pool's, and why."""

    reason: str
    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The routed experts of a checkpoint.

    `scheme` is the format and the pattern of the names. `files` are real paths, each with at least one slice.
    experts_per_layer: layer → experts, by layer. `slices` are sorted by layer, expert, file and offset. hidden_layers,
    predicting_layers (those behind them that predict further tokens) and top_k are what the checkpoint says of itself,
    null or 0 where it does not.
    """

    scheme: str
    files: tuple[Path, ...]
    file_bytes: tuple[int, ...]
    experts_per_layer: dict[int, int]
    slices: list[Slice]
    left_out: tuple[LeftOut, ...]
    hidden_layers: int | None = None
    predicting_layers: int = 0
    top_k: int | None = None


class _Header(NamedTuple):
    kind: str
    file_bytes: int
    tensors: list[Tensor]
    values: dict[str, int | str]


class _Place(NamedTuple):
    """What a name says: `before` names the decoder, `pattern` the way names are made. A stack has no expert."""

    before: str
    pattern: str
    layer_id: int
    expert_id: int | None
    part: str


@dataclass
class _Layer:
    # Each part with the number of its file.
    single: dict[int, dict[str, tuple[int, Tensor]]] = field(default_factory=dict)
    stacked: dict[str, tuple[int, Tensor]] = field(default_factory=dict)


class _Declared(NamedTuple):
    """What the checkpoint says of itself, each with the words that name the place."""

    layers: tuple[int, str] | None
    experts: tuple[int, str] | None
    top_k: int | None = None
    predicting_layers: int = 0


def find_experts(model: Path) -> Experts:
    """Reads the headers of all files of a checkpoint and finds every expert of every layer in them.

    `model` is a folder of safetensors files, one such file, or a GGUF file (any part of a split one). Links are
    followed. Time and memory grow with the number of tensors.

    Raises:
        MalformedCheckpoint: the checkpoint cannot be taken as it is; one line on the first thing that is wrong.
        OSError: a file cannot be read.
    """
    if not os.path.lexists(model):
        raise MalformedCheckpoint(
            f"{model}: no such file or folder; wanted a folder of safetensors files, one such file, or a GGUF file"
        )
    names = files_of(model)
    paths = [_real(path) for path in names]
    headers = [read_header(path) for path in paths]
    declared = _declared_by_gguf(headers) if headers[0].kind == "gguf" else _declared_by_config(names[0].parent)
    _check_parts(model, names, headers)
    _check_distinct(paths, headers)
    if model.is_dir() and (model / INDEX).exists():
        _check_index(model / INDEX, headers)
    layers, patterns, left_out = _sorted_into_layers(model, headers, declared)
    experts_per_layer = {
        layer_id: _count_experts(model, layer_id, layers[layer_id], declared) for layer_id in sorted(layers)
    }
    slices: list[Slice] = []
    shared = _LeftOutCounts()
    for layer_id, experts in experts_per_layer.items():
        slices += _slices_of_layer(paths, layer_id, layers[layer_id], experts, shared)
    # Files without an expert are no files of a pool.
    used = sorted({one.file for one in slices})
    place = {file: number for number, file in enumerate(used)}
    slices = [one._replace(file=place[one.file]) for one in slices]
    slices.sort(key=lambda one: (one.layer_id, one.expert_id, one.file, one.offset_bytes))
    return Experts(
        scheme=f"{headers[0].kind} {', '.join(sorted(patterns)[:_NAMED])}",
        files=tuple(paths[file] for file in used),
        file_bytes=tuple(headers[file].file_bytes for file in used),
        experts_per_layer=experts_per_layer,
        slices=slices,
        left_out=(*left_out.all(), *shared.all()),
        hidden_layers=None if declared.layers is None else declared.layers[0],
        predicting_layers=declared.predicting_layers,
        top_k=declared.top_k,
    )


def slices_in_file(path: Path, experts_per_layer: Mapping[int, int]) -> dict[tuple[int, int, str], tuple[int, int]]:
    """(layer, expert, part) → (offset, length) in bytes of every expert of those layers that the file holds part of.

    Raises:
        MalformedCheckpoint: the file is no checkpoint file, or stacks another number of experts.
        OSError: it cannot be read.
    """
    header = read_header(path)
    found: dict[tuple[int, int, str], tuple[int, int]] = {}
    for tensor in header.tensors:
        place = _place_of(header.kind, tensor.name)
        if place is None or _is_prediction(place) or place.layer_id not in experts_per_layer:
            continue
        layer_id, part = place.layer_id, place.part
        if place.expert_id is not None:
            slices = [Slice(layer_id, place.expert_id, part, 0, tensor.offset_bytes, tensor.length_bytes)]
        elif _elements(tensor) <= 1:
            continue
        else:
            slices = _slices_of_stack(path, layer_id, part, 0, tensor, experts_per_layer[layer_id])
        found |= {(one.layer_id, one.expert_id, one.part): one[4:] for one in slices if one.length_bytes}
    return found


def files_of(model: Path) -> list[Path]:
    """The files of a checkpoint in their order, by the names they have there and not by those they link to."""
    if not model.is_dir():
        match = _NUMBERED.fullmatch(model.name)
        if match is None or match[4] not in (".gguf", ".safetensors"):
            return [model]
        if match[4] == ".safetensors" and int(match[3]) > 1:
            raise MalformedCheckpoint(f"{model}: one of {int(match[3])} files of a checkpoint; name their folder")
        return _numbered(model.parent, match)
    if (model / INDEX).exists():
        return _files_of_index(model / INDEX)
    if (model / "model.safetensors").exists():
        return [model / "model.safetensors"]
    found = sorted(path for path in model.glob("*.safetensors") if not path.name.startswith("."))
    if not found:
        raise MalformedCheckpoint(f"{model}: holds no safetensors file; {_instead(model)}")
    matches = [match for path in found if (match := _NUMBERED.fullmatch(path.name))]
    # One of each set of files that were numbered together.
    for match in {(match[1], match[3]): match for match in matches}.values():
        wanted = _numbered(model, match)
        if missing := sorted(set(wanted) - set(found)):
            raise MalformedCheckpoint(
                f"{model}: {match[0]} is one of {len(wanted)} files, of which {_listed(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; download the checkpoint again"
            )
    return found


def _instead(model: Path) -> str:
    if gguf := sorted(model.glob("*.gguf")):
        return f"name one of its GGUF files, for example {gguf[0]}"
    for path in sorted(model.iterdir()):
        if path.suffix in (".bin", ".pt", ".pth"):
            return f"{path.name} is a pickle, which is not read: save the checkpoint as safetensors"
    return "wanted a folder of safetensors files, one such file, or a GGUF file"


def _numbered(folder: Path, match: "re.Match[str]") -> list[Path]:
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise MalformedCheckpoint(f"{folder / match[0]}: file {number} of {count}; rename it as it was published")
    return [folder / f"{match[1]}-{one:05}-of-{count:05}{match[4]}" for one in range(1, count + 1)]


def _listed(paths: Iterable[Path]) -> str:
    names = [path.name for path in paths]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _files_of_index(path: Path) -> list[Path]:
    names = sorted(set(_weight_map(path).values()))
    for name in names:
        plain = PurePosixPath(name)
        # Names that leave the folder would have the checkpoint's maker choose files of this machine.
        if not plain.parts or plain.is_absolute() or ".." in plain.parts or "\0" in name or str(plain) != name:
            raise MalformedCheckpoint(f"{path}: names the file {name[:80]!r}, wanted one in its own folder")
    if not names:
        raise MalformedCheckpoint(f"{path}: names no tensor; download the checkpoint again")
    return [path.parent / name for name in names]


def _weight_map(path: Path) -> dict[str, str]:
    index = _read_json(path)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise MalformedCheckpoint(f"{path}: has no weight_map of tensors to files; download the checkpoint again")
    return names


def _real(path: Path) -> Path:
    try:
        real = Path(os.path.realpath(path, strict=True))
    except UnicodeEncodeError:
        raise MalformedCheckpoint(f"{str(path)!r}: a path that is not UTF-8; rename it") from None
    except OSError as error:
        raise MalformedCheckpoint(
            f"{path}: {(error.strerror or 'unreachable').lower()}; wanted the file itself or a link to it, so download "
            "the checkpoint again"
        ) from None
    try:
        str(real).encode()
    except UnicodeEncodeError:
        raise MalformedCheckpoint(f"{str(real)!r}: a path that is not UTF-8; rename it") from None
    return real


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of bounded size."""
    with _opened(_real(path)) as file:
        text = file.read(_MAX_HEADER_BYTES + 1)
    if len(text) > _MAX_HEADER_BYTES:
        raise MalformedCheckpoint(f"{path}: more than {_MAX_HEADER_BYTES} bytes of JSON; wanted a checkpoint's own")
    return _parsed(path, text, "JSON")


def _parsed(path: Path, text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        held = dict(pairs)
        if len(held) != len(pairs):
            twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            raise MalformedCheckpoint(f"{path}: {what} names {twice[:80]!r} twice; {_DOWNLOAD}")
        return held

    try:
        found = json.loads(text, object_pairs_hook=unique)
    # Depth has no bound of its own, and neither has a number.
    except (ValueError, RecursionError) as error:
        raise MalformedCheckpoint(f"{path}: {what} that cannot be read ({str(error)[:80]}); {_DOWNLOAD}") from None
    if not isinstance(found, dict):
        raise MalformedCheckpoint(f"{path}: {what} is no object; {_DOWNLOAD}")
    return found


def _opened(path: Path) -> BinaryIO:
    """A regular file; does not wait for the other end of a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MalformedCheckpoint(f"{path}: no regular file; wanted a safetensors or GGUF file")
    # Nothing is read ahead: behind most headers lies a tensor.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return open(descriptor, "rb", buffering=4096)  # noqa: PTH123


def read_header(path: Path) -> _Header:
    """The tensors of a safetensors or GGUF file, which one is decided by its first bytes.

    Raises:
        MalformedCheckpoint: it is neither, or its tensors overlap or leave it. OSError: it cannot be read.
    """
    with _opened(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if start[:4] == b"GGUF":
            # Vocabularies of tens of megabytes are walked word by word.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            header = _GgufReader(path, file, size_bytes).read()
        else:
            header = _read_safetensors(path, file, size_bytes, start)
    _check_places(path, header)
    return header


def _read_safetensors(path: Path, file: BinaryIO, size_bytes: int, start: bytes) -> _Header:
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise MalformedCheckpoint(
            f"{path}: neither GGUF nor safetensors with a header of up to {_MAX_HEADER_BYTES} bytes (found "
            f"{size_bytes} bytes that begin with {start!r}); {_DOWNLOAD}"
        )
    entries = _parsed(path, file.read(length), "a safetensors header")
    entries.pop("__metadata__", None)
    data_bytes = size_bytes - 8 - length
    tensors = []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
                # A bool is an int to Python, not to a format.
                if all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and begin <= end:
                    tensor = Tensor(name, tuple(shape), 8 + length + begin, end - begin)
                    if end > data_bytes:
                        raise MalformedCheckpoint(
                            f"{path}: tensor {name[:80]!r} ends at byte {8 + length + end}, the file has {size_bytes}; "
                            f"{_DOWNLOAD}"
                        )
                    _check_length(path, tensor, dtype)
                    tensors.append(tensor)
                    continue
        raise MalformedCheckpoint(
            f"{path}: tensor {name[:80]!r} has no dtype, shape and ascending data_offsets; {_DOWNLOAD}"
        )
    return _Header("safetensors", size_bytes, tensors, {})


def _check_length(path: Path, tensor: Tensor, dtype: str) -> None:
    bits = _ELEMENT_BITS.get(dtype)
    if bits is not None and _elements(tensor) * bits != 8 * tensor.length_bytes:
        raise MalformedCheckpoint(
            f"{path}: tensor {tensor.name[:80]!r} has {tensor.length_bytes} bytes, wanted "
            f"{-(-_elements(tensor) * bits // 8)} for {dtype} of shape {str(list(tensor.shape))[:80]}; {_DOWNLOAD}"
        )


def _elements(tensor: Tensor) -> int:
    elements = 1
    for axis in tensor.shape:
        elements *= axis
        # Nothing that long fits a file; more digits would cost time, and a line of their own.
        if elements > 2**70:
            return 2**70
    return elements


class _GgufReader:
    """The header of a GGUF file, versions 2 and 3, little-endian (ggml/docs/gguf.md); values in arrays are skipped."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self._path, self._file, self._size_bytes = path, file, size_bytes
        self._limit_bytes = min(_MAX_HEADER_BYTES, size_bytes)
        file.seek(4)

    def read(self) -> _Header:
        version, tensor_count, value_count = self._unpack("<IQQ")
        if version not in (2, 3):
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in (2, 3)
            raise self._bad(
                "GGUF in big-endian order" if swapped else f"GGUF version {version}",
                "wanted version 2 or 3, little-endian: convert the model again",
            )
        if tensor_count > _MAX_TENSORS:
            raise self._bad(f"{tensor_count} tensors, wanted up to {_MAX_TENSORS}", _DOWNLOAD)
        values: dict[str, int | str] = {}
        for _ in range(value_count):
            key = self._text()
            value = self._value(*self._unpack("<I"))
            if value is not None:
                values[key] = value
        rows = [self._tensor() for _ in range(tensor_count)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise self._bad(f"general.alignment {alignment!r}, wanted up to {2**20}", _DOWNLOAD)
        begin = -(-self._file.tell() // alignment) * alignment
        tensors = [tensor._replace(offset_bytes=begin + tensor.offset_bytes) for tensor in rows]
        for tensor in tensors:
            end = tensor.offset_bytes + tensor.length_bytes
            if end > self._size_bytes or (tensor.offset_bytes - begin) % alignment:
                raise self._bad(
                    f"tensor {tensor.name[:80]!r} lies from byte {tensor.offset_bytes} to {end}, wanted a multiple of "
                    f"{alignment} after byte {begin} and an end within {self._size_bytes}",
                    _DOWNLOAD,
                )
        return _Header("gguf", self._size_bytes, tensors, values)

    def _bad(self, what: str, remedy: str) -> MalformedCheckpoint:
        return MalformedCheckpoint(f"{self._path}: {what}; {remedy}")

    def _need(self, length_bytes: int) -> None:
        if length_bytes > self._limit_bytes - self._file.tell():
            raise self._bad(f"a GGUF header that does not end within {self._limit_bytes} bytes", _DOWNLOAD)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        length_bytes = struct.calcsize(form)
        self._need(length_bytes)
        return struct.unpack(form, self._file.read(length_bytes))

    def _text(self) -> str:
        (length_bytes,) = self._unpack("<Q")
        if length_bytes > _MAX_TEXT_BYTES:
            raise self._bad(f"a name of {length_bytes} bytes, wanted up to {_MAX_TEXT_BYTES}", _DOWNLOAD)
        self._need(length_bytes)
        return self._file.read(length_bytes).decode(errors="replace")

    def _skip(self, length_bytes: int) -> None:
        self._need(length_bytes)
        self._file.seek(length_bytes, os.SEEK_CUR)

    def _value(self, kind: int) -> int | str | None:
        """A whole number or a short text; null for all else."""
        if kind == _GGUF_STRING:
            (length_bytes,) = self._unpack("<Q")
            if length_bytes > _MAX_TEXT_BYTES:
                self._skip(length_bytes)
                return None
            self._need(length_bytes)
            return self._file.read(length_bytes).decode(errors="replace")
        if kind == _GGUF_ARRAY:
            element, count = self._unpack("<IQ")
            if element == _GGUF_STRING:
                for _ in range(count):
                    self._skip(*self._unpack("<Q"))
            elif element in _GGUF_SCALARS:
                self._skip(count * struct.calcsize(_GGUF_SCALARS[element]))
            else:
                raise self._bad(f"an array of type {element}", _DOWNLOAD)
            return None
        if kind not in _GGUF_SCALARS:
            raise self._bad(f"a value of type {kind}, wanted 0 to 12", _DOWNLOAD)
        (value,) = self._unpack(_GGUF_SCALARS[kind])
        return value if type(value) is int else None

    def _tensor(self) -> Tensor:
        """A tensor, with its offset counted from where tensors begin."""
        name = self._text()
        (dimensions,) = self._unpack("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise self._bad(f"tensor {name[:80]!r} of {dimensions} axes, wanted up to {_MAX_DIMENSIONS}", _DOWNLOAD)
        # The innermost axis comes first.
        axes = self._unpack(f"<{dimensions}Q")
        kind, offset_bytes = self._unpack("<IQ")
        if kind not in GGML_BLOCKS:
            raise self._bad(
                f"tensor {name[:80]!r} has ggml type {kind}, whose size this version does not know",
                "use a quantisation that it knows, or a newer version",
            )
        elements, block_bytes = GGML_BLOCKS[kind]
        tensor = Tensor(name, tuple(reversed(axes)), offset_bytes, 0)
        if axes and axes[0] % elements:
            raise self._bad(f"tensor {name[:80]!r} has rows of {axes[0]}, wanted blocks of {elements}", _DOWNLOAD)
        return tensor._replace(length_bytes=_elements(tensor) // elements * block_bytes)


def _check_places(path: Path, header: _Header) -> None:
    """No two tensors share bytes, and no two a name."""
    names = {tensor.name for tensor in header.tensors}
    if len(names) != len(header.tensors):
        seen: set[str] = set()
        twice = next(one.name for one in header.tensors if one.name in seen or seen.add(one.name))  # type: ignore[func-returns-value]
        raise MalformedCheckpoint(f"{path}: names tensor {twice[:80]!r} twice; {_DOWNLOAD}")
    filled = [tensor for tensor in header.tensors if tensor.length_bytes]
    begins = np.array([tensor.offset_bytes for tensor in filled], dtype=np.int64)
    ends = begins + np.array([tensor.length_bytes for tensor in filled], dtype=np.int64)
    order = np.argsort(begins, kind="stable")
    overlap = np.flatnonzero(begins[order][1:] < ends[order][:-1])
    if overlap.size:
        first, second = (filled[order[overlap[0] + step]].name[:80] for step in (0, 1))
        raise MalformedCheckpoint(f"{path}: tensors {first!r} and {second!r} share bytes; {_DOWNLOAD}")


def _check_parts(model: Path, names: list[Path], headers: list[_Header]) -> None:
    """All files have one format, and the parts of a split GGUF file say what their names say."""
    for path, header in zip(names, headers, strict=True):
        if header.kind != headers[0].kind:
            raise MalformedCheckpoint(
                f"{path}: {header.kind} beside {names[0].name}, which is {headers[0].kind}; wanted one format"
            )
    for number, (path, header) in enumerate(zip(names, headers, strict=True)):
        count = header.values.get("split.count", 1)
        if header.kind == "gguf" and (count or 1, header.values.get("split.no", 0)) != (len(names), number):
            raise MalformedCheckpoint(
                f"{path}: says that it is part {header.values.get('split.no', 0)} of {count}, counted from 0; wanted "
                f"part {number} of {len(names)}, so give the parts of {model.name} the names they were published under"
            )


def _check_distinct(paths: list[Path], headers: list[_Header]) -> None:
    held: dict[str, Path] = {}
    for path, header in zip(paths, headers, strict=True):
        for tensor in header.tensors:
            if held.setdefault(tensor.name, path) is not path:
                raise MalformedCheckpoint(
                    f"{path}: tensor {tensor.name[:80]!r} is in {held[tensor.name]} as well; keep one checkpoint a "
                    "folder"
                )


def _check_index(index: Path, headers: list[_Header]) -> None:
    weight_map = _weight_map(index)
    # The headers are in the order of the names.
    held = {
        file: {tensor.name for tensor in header.tensors}
        for file, header in zip(sorted(set(weight_map.values())), headers, strict=True)
    }
    absent = [(name, file) for name, file in weight_map.items() if name not in held[file]]
    if absent:
        name, file = absent[0]
        more = f"; {len(absent) - 1} more are absent as well" if len(absent) > 1 else ""
        raise MalformedCheckpoint(
            f"{index}: tensor {name[:80]!r} is not in {file}, where the index has it{more}; download both again"
        )


class Config:
    """A config.json: its own values, and those of the text model that it nests.

    Raises:
        MalformedCheckpoint: no JSON object. OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = _read_json(path)
        nested = [whole.get(name) for name in _NESTED_CONFIGS]
        self.texts: list[dict[str, Any]] = [whole, *(one for one in nested if isinstance(one, dict))]

    def first(self, *keys: str) -> tuple[int, str] | None:
        """The first of the keys that holds a positive whole number, and that key."""
        for text in self.texts:
            for key in keys:
                if type(text.get(key)) is int and text[key] > 0:
                    return text[key], key
        return None

    def check(self) -> None:
        """Raises MalformedCheckpoint if a fact is no number, is said twice and differently, or excludes another."""
        for text in self.texts:
            for keys in (_HIDDEN_LAYERS, _EXPERTS, _TOP_K):
                said = {key: text[key] for key in keys if text.get(key) not in (None, 0)}
                for key, value in said.items():
                    # Some models have a list with a number for each layer, which says nothing of all.
                    if not isinstance(value, list) and (type(value) is not int or value < 0):
                        raise MalformedCheckpoint(
                            f"{self.path}: {key} is {value!r:.40}, wanted a whole number; correct it, or {_DOWNLOAD}"
                        )
                numbers = {key: value for key, value in said.items() if type(value) is int}
                if len(set(numbers.values())) > 1:
                    first, *others = numbers
                    other = next(key for key in others if numbers[key] != numbers[first])
                    raise MalformedCheckpoint(
                        f"{self.path}: {first} is {numbers[first]}, but {other} is {numbers[other]}; both name the "
                        f"same, so one is wrong: correct it, or {_DOWNLOAD}"
                    )
        experts, top_k = self.experts, self.top_k
        if experts is not None and top_k is not None and top_k[0] > experts[0]:
            raise MalformedCheckpoint(
                f"{self.path}: {top_k[1]} is {top_k[0]}, but {experts[1]} is only {experts[0]}; a token cannot choose "
                f"more experts than there are: correct one, or {_DOWNLOAD}"
            )

    @property
    def hidden_layers(self) -> tuple[int, str] | None:
        return self.first(*_HIDDEN_LAYERS)

    @property
    def experts(self) -> tuple[int, str] | None:
        return self.first(*_EXPERTS)

    @property
    def top_k(self) -> tuple[int, str] | None:
        return self.first(*_TOP_K)


def _declared_by_config(folder: Path) -> _Declared:
    """What config.json beside the files says; nothing where there is none."""
    path = folder / "config.json"
    if not path.exists():
        return _Declared(None, None)
    config = Config(path)
    config.check()

    def worded(found: tuple[int, str] | None) -> tuple[int, str] | None:
        return None if found is None else (found[0], f"{path.name} has {found[1]} {found[0]}")

    return _Declared(
        worded(config.hidden_layers), worded(config.experts), None if config.top_k is None else config.top_k[0]
    )


def _declared_by_gguf(headers: list[_Header]) -> _Declared:
    # The first part of a split file has the model's values.
    values = headers[0].values
    name = values.get("general.architecture")
    experts, blocks = (values.get(f"{name}.{key}") for key in ("expert_count", "block_count"))
    predicting = values.get(f"{name}.nextn_predict_layers", 0)
    layers = None
    if isinstance(blocks, int) and isinstance(predicting, int) and 0 < predicting < blocks:
        layers = (
            blocks - predicting,
            f"{name}.block_count is {blocks} and {name}.nextn_predict_layers {predicting}",
        )
    elif isinstance(blocks, int) and blocks > 0:
        layers = (blocks, f"{name}.block_count is {blocks}")
    top_k = values.get(f"{name}.expert_used_count")
    return _Declared(
        layers,
        (experts, f"{name}.expert_count is {experts}") if isinstance(experts, int) and experts > 0 else None,
        top_k if isinstance(top_k, int) and top_k > 0 else None,
        predicting if isinstance(blocks, int) and isinstance(predicting, int) and 0 < predicting < blocks else 0,
    )


class _LeftOutCounts:
    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def add(self, reason: str, tensor: Tensor) -> None:
        counts = self._counts.setdefault(reason, [0, 0])
        counts[0] += 1
        counts[1] += tensor.length_bytes

    def all(self) -> list[LeftOut]:
        return [LeftOut(reason, *counts) for reason, counts in self._counts.items()]


def _sorted_into_layers(
    model: Path, headers: list[_Header], declared: _Declared
) -> tuple[dict[int, _Layer], set[str], _LeftOutCounts]:
    layers: dict[int, _Layer] = {}
    patterns: set[str] = set()
    left_out = _LeftOutCounts()
    decoders: dict[str, str] = {}
    for file, header in enumerate(headers):
        for tensor in header.tensors:
            place = _place_of(header.kind, tensor.name)
            if place is None:
                continue
            if _is_prediction(place):
                left_out.add(f"{place.before or 'layers'} predict further tokens", tensor)
                continue
            if declared.layers is not None and place.layer_id >= declared.layers[0]:
                left_out.add(f"layer {place.layer_id} predicts further tokens, as {declared.layers[1]}", tensor)
                continue
            patterns.add(place.pattern)
            decoders.setdefault(place.before, tensor.name)
            layer = layers.setdefault(place.layer_id, _Layer())
            parts = layer.stacked if place.expert_id is None else layer.single.setdefault(place.expert_id, {})
            if len(decoders) > 1 or place.part in parts:
                others = list(decoders.values())[:2] if len(decoders) > 1 else [parts[place.part][1].name, tensor.name]
                raise MalformedCheckpoint(
                    f"{model}: {others[0][:80]!r} and {others[1][:80]!r} are both experts of the same numbers; wanted "
                    "the experts of one decoder, so name a folder or file that has only that"
                )
            parts[place.part] = (file, tensor)
    if not layers:
        names = [repr(tensor.name[:80]) for header in headers for tensor in header.tensors][:_NAMED]
        kind = "blk.N.ffn_…_exps" if headers[0].kind == "gguf" else "…layers.N.….experts.…"
        raise MalformedCheckpoint(
            f"{model}: no tensor of a routed expert ({kind}) among {sum(len(one.tensors) for one in headers)}, which "
            f"begin with {', '.join(names) or 'none'}; wanted a mixture-of-experts model"
        )
    return layers, patterns, left_out


def _place_of(kind: str, name: str) -> _Place | None:
    """What the name of a tensor says of a routed expert; null where it is none's."""
    words = name.split(".")
    place = _place_of_gguf(name, words) if kind == "gguf" else _place_of_safetensors(name, words)
    if place is not None and (len(name) > _MAX_NAME or not (name.isascii() and name.isprintable())):
        raise MalformedCheckpoint(
            f"tensor {name[:80]!r}: wanted a name of up to {_MAX_NAME} printable characters of ASCII"
        )
    return place


def _place_of_safetensors(name: str, words: list[str]) -> _Place | None:
    if "experts" not in words:
        return None
    at = words.index("experts")
    before = next((i for i in range(at - 2, -1, -1) if words[i] in _LAYER_WORDS and words[i + 1].isdigit()), None)
    rest = words[at + 1 :]
    if before is None or not rest:
        return None
    expert_id = None
    if rest[0].isdigit():
        expert_id = _number(name, rest.pop(0), _MAX_NUMBER - 1)
    head = ".".join([*words[: before + 1], "{layer}", *words[before + 2 : at + 1]])
    return _Place(
        before=".".join(words[:before]),
        pattern=f"{head}.{{expert}}.*" if expert_id is not None else f"{head}.*",
        layer_id=_number(name, words[before + 1], _MAX_NUMBER),
        expert_id=expert_id,
        part=".".join(rest),
    )


def _place_of_gguf(name: str, words: list[str]) -> _Place | None:
    match words:
        case ["blk", layer, stack, part] if layer.isdigit() and stack in _GGUF_STACKED:
            layer_id = _number(name, layer, _MAX_NUMBER)
            return _Place("", "blk.{layer}.ffn_*_exps.*", layer_id, None, f"{stack}.{part}")
        case ["blk", layer, stack, expert, part] if layer.isdigit() and expert.isdigit() and stack in _GGUF_SINGLE:
            layer_id, expert_id = _number(name, layer, _MAX_NUMBER), _number(name, expert, _MAX_NUMBER - 1)
            return _Place("", "blk.{layer}.ffn_*.{expert}.*", layer_id, expert_id, f"{stack}.{part}")
    return None


def _number(name: str, word: str, most: int) -> int:
    if not word.isascii() or len(word) > 5 or str(int(word)) != word or int(word) > most:
        raise MalformedCheckpoint(f"tensor {name[:80]!r}: number {word[:20]!r}, wanted 0 to {most}")
    return int(word)


def _is_prediction(place: _Place) -> bool:
    # Qwen3-Next and others keep these beside the decoder, with layers of their own numbers.
    return "mtp" in place.before.split(".")


def _count_experts(model: Path, layer_id: int, layer: _Layer, declared: _Declared) -> int:
    """Experts of a layer; every one has all parts that one of them has."""
    if layer.single:
        experts = max(layer.single) + 1
        missing = sorted(set(range(experts)) - set(layer.single))[:_NAMED]
        if missing:
            raise MalformedCheckpoint(
                f"{model}: layer {layer_id} has experts up to {experts - 1}, but no tensor of expert {missing[0]}; "
                "download the checkpoint again, or name the folder that has all of it"
            )
        parts = dict.fromkeys(part for own in layer.single.values() for part in own)
        for expert_id in range(experts):
            if lacking := [part for part in parts if part not in layer.single[expert_id]]:
                other = next(one for one, own in sorted(layer.single.items()) if lacking[0] in own)
                raise MalformedCheckpoint(
                    f"{model}: layer {layer_id}, expert {expert_id} has no {lacking[0]}, which expert {other} has; "
                    "download the checkpoint again, or name the folder that has all of it"
                )
    else:
        # One slice an expert is known of a stack of matrices only: rows of all experts may follow one another in two
        # axes.
        stacks = [tensor for _, tensor in layer.stacked.values() if len(tensor.shape) > 2]
        if not stacks:
            tensor = next(iter(layer.stacked.values()))[1]
            raise MalformedCheckpoint(
                f"{model}: {tensor.name[:80]!r} of shape {list(tensor.shape)} is no stack of matrices, one an expert; "
                "wanted the expert as the first of three axes or more, or tensors of their own"
            )
        experts = stacks[0].shape[0]
    for _, tensor in layer.stacked.values():
        if _elements(tensor) > 1 and tensor.shape[0] != experts:
            raise MalformedCheckpoint(
                f"{model}: layer {layer_id} has {experts} experts, but {tensor.name[:80]!r} has shape "
                f"{list(tensor.shape)}; wanted the expert as its first axis"
            )
    if not 1 <= experts <= _MAX_NUMBER:
        raise MalformedCheckpoint(f"{model}: layer {layer_id} has {experts} experts, wanted 1 to {_MAX_NUMBER}")
    if declared.experts is not None and experts != declared.experts[0]:
        raise MalformedCheckpoint(
            f"{model}: layer {layer_id} has {experts} experts, but {declared.experts[1]}; download the checkpoint "
            "again, or name the folder that has all of it"
        )
    return experts


def _slices_of_layer(
    paths: list[Path], layer_id: int, layer: _Layer, experts: int, shared: _LeftOutCounts
) -> list[Slice]:
    slices = [
        Slice(layer_id, expert_id, part, file, tensor.offset_bytes, tensor.length_bytes)
        for expert_id, parts in layer.single.items()
        for part, (file, tensor) in parts.items()
    ]
    for part, (file, tensor) in layer.stacked.items():
        if _elements(tensor) <= 1:
            shared.add(f"*.{part}: one value for all experts of a layer", tensor)
        else:
            slices += _slices_of_stack(paths[file], layer_id, part, file, tensor, experts)
    # An empty tensor has nothing to read.
    slices = [one for one in slices if one.length_bytes]
    if len({one.expert_id for one in slices}) != experts:
        files = [file for parts in (*layer.single.values(), layer.stacked) for file, _ in parts.values()]
        raise MalformedCheckpoint(f"{paths[files[0]]}: layer {layer_id} has an expert of 0 bytes; {_DOWNLOAD}")
    return slices


def _slices_of_stack(path: Path, layer_id: int, part: str, file: int, tensor: Tensor, experts: int) -> list[Slice]:
    length_bytes, rest = divmod(tensor.length_bytes, experts)
    if rest or not tensor.shape or tensor.shape[0] != experts:
        raise MalformedCheckpoint(
            f"{path}: {tensor.name[:80]!r} of shape {list(tensor.shape)} has {tensor.length_bytes} bytes, wanted "
            f"{experts} equal slices, one an expert"
        )
    return [
        Slice(layer_id, expert_id, part, file, tensor.offset_bytes + expert_id * length_bytes, length_bytes)
        for expert_id in range(experts)
    ]
