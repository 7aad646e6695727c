"""What unpickles a torch file: a program of its own, started by `torch_file` and by nothing else.

In: open torch files. Out: a line of JSON per file with its dicts, lists, numbers and texts, and one file with the bytes
of all arrays. `torch.load` runs with `weights_only=True`, under limits on memory, time and output that are set before
the first byte is read. It imports nothing of the project, so a file that finds a way to run code finds nothing here.

A node of the tree is null, true, false, a number, a text, a list (also for tuples), `{"d": [[key, node], …]}` a dict,
`{"a": [type, shape, offset]}` an array, `{"o": name}` an object that has no plain form.
"""

import json
import os
import re
import resource
import sys
import warnings
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

MAX_DEPTH = 32
MAX_NODES = 4_000_000
MAX_TEXT_BYTES = 64 * 1024 * 1024
FEWEST_NUMBERS = 16
"""A list (or list of lists) of at least so many numbers becomes an array."""

CHUNK_BYTES = 8 * 1024 * 1024
ALIGNMENT = 64


class Unfit(Exception):
    """The content has no plain form within the limits."""


class PlainType:
    """Stands for numpy.dtype, which would accept more than numbers: only their type codes."""

    def __init__(self, code: object, align: object = False, copy: object = True) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?(?:b1|[iu][1248]|f[248])", code):
            raise Unfit(f"a numpy array of {code!r:.40}, wanted numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise Unfit("a numpy type of an unknown form")
        self.dtype = self.dtype.newbyteorder(state[1])


class PlainArray:
    """Stands for numpy.ndarray: its bytes are held against its shape here, not by numpy's own unpickling."""

    def __init__(self) -> None:
        self.values: Any = np.zeros(0)

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], PlainType):
            raise Unfit("a numpy array of an unknown form")
        _, shape, plain, is_fortran, data = state
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            raise Unfit("a numpy array without a shape")
        if not isinstance(data, bytes | bytearray):
            raise Unfit("a numpy array that is not stored as bytes")
        flat = np.frombuffer(data, dtype=plain.dtype)
        self.values = flat.reshape(shape, order="F" if is_fortran is True else "C")


def reconstruct(*_: object) -> PlainArray:
    """Stands for numpy's function of that name: an empty array, filled by its state."""
    return PlainArray()


def scalar(plain: object, data: object = b"") -> object:
    """Stands for numpy's function of that name: one number."""
    if not isinstance(plain, PlainType) or not isinstance(data, bytes) or len(data) != plain.dtype.itemsize:
        raise Unfit("a numpy number of an unknown form")
    return np.frombuffer(data, dtype=plain.dtype)[0].item()


STAND_INS: list[Any] = [
    (PlainType, "numpy.dtype"),
    (PlainArray, "numpy.ndarray"),
    *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


class Writer:
    """Writes trees, and the bytes of their arrays one after the other."""

    def __init__(self, tree: BinaryIO, data: BinaryIO, max_bytes: int, torch: Any) -> None:
        self.tree, self.data, self.torch = tree, data, torch
        self.bytes_left, self.nodes_left, self.text_left = max_bytes, MAX_NODES, MAX_TEXT_BYTES
        self.offset = 0

    def write(self, value: object) -> None:
        self.line({"tree": self.node(value, MAX_DEPTH)})

    def line(self, value: object) -> None:
        self.tree.write(json.dumps(value).encode() + b"\n")

    def node(self, value: Any, depth: int) -> object:
        self.nodes_left -= 1
        if depth < 0:
            raise Unfit(f"nested deeper than {MAX_DEPTH}")
        if self.nodes_left < 0:
            raise Unfit(f"more than {MAX_NODES:,} values outside of arrays")
        if value is None or type(value) in (bool, int, float):
            return value
        if type(value) is str:
            self.text_left -= len(value)
            if self.text_left < 0:
                raise Unfit(f"more than {MAX_TEXT_BYTES} bytes of text")
            return value
        if isinstance(value, dict):
            pairs = []
            for key, inner in value.items():
                if type(key) not in (str, int):
                    return {"o": f"dict with a key of type {type(key).__name__}"[:80]}
                pairs.append([self.node(key, depth - 1), self.node(inner, depth - 1)])
            return {"d": pairs}
        if isinstance(value, list | tuple):
            numbers = self.numbers(value)
            return [self.node(inner, depth - 1) for inner in value] if numbers is None else self.array(numbers)
        if isinstance(value, PlainArray):
            return self.array(value.values)
        if isinstance(value, self.torch.Tensor):
            return self.tensor(value)
        return {"o": type(value).__name__[:80]}

    def numbers(self, value: Any) -> Any:
        """A list of numbers, or of equally long lists of them, as an array; null if it is none or short."""
        flat, shape = list(value), [len(value)]
        for _ in range(8):
            types = set(map(type, flat))
            if types and types <= {int, float}:
                if len(flat) < FEWEST_NUMBERS:
                    return None
                try:
                    return np.array(flat, dtype=np.float64 if float in types else np.int64).reshape(shape)
                except OverflowError:
                    return None
            if not types or not types <= {list, tuple}:
                return None
            lengths = set(map(len, flat))
            length = lengths.pop()
            if lengths or not length or len(flat) * length * 8 > self.bytes_left:
                return None
            flat = list(chain.from_iterable(flat))
            shape.append(length)
        return None

    def tensor(self, value: Any) -> object:
        torch = self.torch
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
            return {"o": "tensor that is sparse, quantised, nested or without data"}
        value = value.detach()
        self.afford(value.numel() * max(value.element_size(), 4 if value.dtype.is_floating_point else 1))
        if value.dtype.is_floating_point and value.dtype not in (torch.float16, torch.float32, torch.float64):
            # numpy has no bfloat16 and no 8-bit floats; each of their values is a float32 too.
            value = value.float()
        if value.dtype.is_complex:
            return {"o": "tensor of complex numbers"}
        return self.array(value.resolve_conj().resolve_neg().numpy(), is_afforded=True)

    def afford(self, size_bytes: int) -> None:
        self.bytes_left -= size_bytes
        if self.bytes_left < 0:
            raise Unfit("its arrays are many times larger than the file")

    def array(self, values: Any, is_afforded: bool = False) -> object:
        if not is_afforded:
            self.afford(values.nbytes)
        dtype = values.dtype.newbyteorder("<")
        padding = -self.offset % ALIGNMENT
        self.data.write(bytes(padding))
        begin = self.offset + padding
        self.offset = begin + values.nbytes
        self.pour(values, dtype)
        return {"a": [dtype.str, list(values.shape), begin]}

    def pour(self, values: Any, dtype: Any) -> None:
        """The values in C order, a part at a time: what is mapped must not all come to memory at once."""
        if not values.size:
            return
        if values.flags.c_contiguous:
            flat = values.reshape(-1)
            step = CHUNK_BYTES // values.itemsize
            for begin in range(0, len(flat), step):
                self.data.write(np.ascontiguousarray(flat[begin : begin + step], dtype=dtype).data)
        elif values.nbytes <= CHUNK_BYTES:
            self.data.write(np.ascontiguousarray(values, dtype=dtype).data)
        else:
            for part in values:
                self.pour(part, dtype)


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123 - one line of a small program
        found = re.search(r"^VmData:\s+([0-9]+) kB", status.read(), flags=re.MULTILINE)
    return int(found[1]) * 1024 if found else 1024**3


def fault_of(error: BaseException) -> tuple[str, str]:
    """(refused or malformed, one line) for what the loading of a file raised."""
    text = str(error)
    wanted = re.search(r"GLOBAL ([\w.]{1,120})", text)
    if wanted:
        return "refused", f"its pickle wants {wanted[1]}"
    if isinstance(error, Unfit):
        return "refused", text
    if isinstance(error, MemoryError) or "allocate memory" in text or "Cannot allocate" in text:
        return "refused", "it needs more memory than a loader is given"
    pickled = re.search(r"(Unsupported (?:operand|class)[^\n]{0,60}|Can only [^\n]{0,80}|Trying to [^\n]{0,80})", text)
    if pickled:
        return "refused", f"its pickle is not of the plain kind ({pickled[1].strip()})"
    if "TorchScript" in text:
        return "refused", "it is a TorchScript program"
    first = (text or type(error).__name__).splitlines()[0][:120]
    return "malformed", f"{type(error).__name__}: {first}"


def main(arguments: list[str]) -> int:
    """Arguments: descriptors of the tree and the data file, bytes of memory, seconds, bytes of output, then
    `descriptor:is_zip` of each file to read."""
    tree_fd, data_fd, memory_bytes, seconds, output_bytes = map(int, arguments[:5])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with os.fdopen(tree_fd, "wb") as tree, os.fdopen(data_fd, "wb") as data:
        try:
            import torch
        except Exception as error:
            tree.write(json.dumps({"missing": f"{type(error).__name__}: {error}"[:200]}).encode() + b"\n")
            return 1
        torch.set_num_threads(1)
        torch.serialization.add_safe_globals(STAND_INS)
        warnings.simplefilter("ignore")
        base = data_bytes()
        writer = Writer(tree, data, output_bytes, torch)
        for argument in arguments[5:]:
            descriptor, is_zip = map(int, argument.split(":"))
            mapped = os.fstat(descriptor).st_size if is_zip else 0
            limit = base + memory_bytes + mapped
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
            loaded = None
            try:
                loaded = torch.load(
                    f"/proc/self/fd/{descriptor}", map_location="cpu", weights_only=True, mmap=bool(is_zip)
                )
                writer.write(loaded)
            except Exception as error:
                kind, text = fault_of(error)
                writer.line({kind: text})
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
