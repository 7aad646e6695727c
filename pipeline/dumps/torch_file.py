"""Torch files (`torch.save`, zip and legacy form) as trees of plain values, and the layouts that are kept in them.

A torch file is a pickle, and a pickle can run code. So it is loaded by `torch_sandbox`, a child process with limits,
which hands back plain values through two unnamed files; nothing is unpickled here and torch is never imported. A module
that knows a layout of such files exports `TREE_LAYOUTS`; `layouts` makes of all of them the one that `sniff` asks.
"""

import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline.dumps import torch_sandbox
from pipeline.dumps.arrays import DAMAGE, line_of
from pipeline.dumps.blocks import (
    Asked,
    DumpFile,
    DumpFolder,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    Sample,
)
from pipeline.dumps.packing import open_zip

NAME = "torch_file"
"""The layout of all torch files; what lies in one has a name of its own in the trace."""

MEMORY_BYTES = 1024**3
"""Private memory of a loader beside torch itself and the mapped file."""

SECONDS, BYTES_PER_SECOND = 120, 10 * 1024 * 1024
"""A loader is given so many seconds, and one more per so many bytes of the file."""

GROWTH, GROWTH_BYTES = 4, 64 * 1024 * 1024
"""A file may unfold to so many times its size, and so many bytes more: bfloat16 doubles, views may share storage."""

FILES_AT_ONCE = 128
"""Files of a folder that one loader reads; each is an open descriptor."""

LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of torch's form before 1.6: protocol 2 and torch's own number. A bare pickle starts otherwise."""

_MAX_TREE_BYTES = 128 * 1024 * 1024
_ARRAY_TYPE = re.compile(r"[<|](?:b1|[iu][1248]|f[248])")

Tree = Any
"""null, bool, int, float, str, list, dict with str and int keys, numpy array (read only), or `Unreadable`."""


@dataclass(frozen=True)
class Unreadable:
    """A value of a torch file that has no plain form; `name` says what it is."""

    name: str


@dataclass(frozen=True)
class Loaded:
    """A torch file's content. Lists of 16 numbers or more, also nested ones of equal lengths, are arrays."""

    path: Path
    tree: Tree
    _memory: mmap.mmap | None = field(default=None, repr=False)

    def let_go(self) -> None:
        """Gives back the memory of the arrays' pages that were looked at; they are read again when needed."""
        if self._memory is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class TreeLayout:
    """A layout kept in torch files: like `Layout`, but what it is asked about is the loaded tree.

    parse gets one file; parse_folder the files of a folder, all of which it claims, in the order of their names.
    """

    name: str
    description: str
    claims: Callable[[Tree], bool]
    parse: Callable[[Loaded, Asked], ParsedDump] | None = None
    parse_folder: Callable[[Sequence[Loaded], DumpFolder, Asked], ParsedDump] | None = None


@dataclass(frozen=True)
class TreeNoTrace:
    """Content of a torch file that can be no trace: how it is recognised, and why it is refused."""

    claims: Callable[[Tree], bool]
    reason: str


def is_torch(sample: Sample) -> bool:
    """Whether a file is a torch file, in zip or legacy form."""
    if sample.head.startswith(b"PK"):
        return any(name == "data.pkl" or name.endswith("/data.pkl") for name in sample.members)
    return sample.head.startswith(LEGACY_MAGIC)


def layouts(known: Sequence[TreeLayout], no_traces: Sequence[TreeNoTrace] = ()) -> tuple[Layout, ...]:
    """The layout of all torch files: loads one, and gives it to the first of `known` that claims its tree."""

    def chosen(loaded: Loaded) -> TreeLayout:
        for layout in known:
            if layout.claims(loaded.tree):
                return layout
        for kind in no_traces:
            if kind.claims(loaded.tree):
                raise RefusedDump(f"{loaded.path}: {kind.reason}")
        descriptions = "; ".join(layout.description for layout in known)
        raise RefusedDump(
            f"{loaded.path}: a torch file of no known layout: {describe(loaded.tree)}. Known: {descriptions}"
        )

    def parse(dump: DumpFile, asked: Asked) -> ParsedDump:
        loaded = load(dump, asked)
        layout = chosen(loaded)
        if layout.parse is None:
            raise RefusedDump(
                f"{dump.path}: one file of a dump of several ({layout.description}); put all of them into one folder "
                "and ingest the folder"
            )
        return layout.parse(loaded, asked)

    def parse_folder(folder: DumpFolder, asked: Asked) -> ParsedDump:
        loaded = load_folder(folder, asked)
        chosen_for = [chosen(one) for one in loaded]
        first = chosen_for[0]
        for one, layout in zip(loaded, chosen_for, strict=True):
            if layout is not first:
                raise RefusedDump(
                    f"{one.path}: {layout.description}, but {loaded[0].path.name} is {first.description}; a folder is "
                    "one dump, ingest them apart"
                )
        if first.parse_folder is None:
            raise RefusedDump(
                f"{folder.path}: {loaded[0].path.name} is a whole dump of its own ({first.description}); ingest each "
                "file by itself"
            )
        return first.parse_folder(loaded, folder, asked)

    description = "torch files: " + ", ".join(layout.description for layout in known)
    return (Layout(NAME, description, is_torch, parse, parse_folder),)


def load(dump: DumpFile, asked: Asked) -> Loaded:
    """The content of a torch file.

    Raises:
        RefusedDump: the pickle wants more than plain values, or more memory or time than is given; torch is missing.
        MalformedDump: truncated or damaged.
    """
    return next(_load([dump], asked))


def load_folder(folder: DumpFolder, asked: Asked) -> list[Loaded]:
    """The contents of a folder's torch files, in order; any other file among them is refused.

    Raises:
        As `load`.
    """
    loaded: list[Loaded] = []
    for begin in range(0, len(folder.files), FILES_AT_ONCE):
        with ExitStack() as stack:
            dumps = [stack.enter_context(folder.open(file)) for file in folder.files[begin : begin + FILES_AT_ONCE]]
            loaded += _load(dumps, asked)
    return loaded


def numbers(value: Tree) -> npt.NDArray[Any] | None:
    """An array, or a list of numbers (or of equally long lists of them), as an array; null if it is neither."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, list) or not value:
        return None
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "iuf" else None


def describe(tree: Tree) -> str:
    """What a tree is at its top, for a person, on one line."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return f"{tree!r:.60}"
    if isinstance(tree, dict):
        fields = ", ".join(str(key)[:40] for key in list(tree)[:8])
        return f"a dict of {fields}{' …' if len(tree) > 8 else ''}" if tree else "an empty dict"
    if isinstance(tree, np.ndarray):
        return f"{tree.dtype} numbers shaped {list(tree.shape)}"
    if isinstance(tree, list):
        return f"a list of {len(tree)}" + (f", the first {describe(tree[0])}" if tree and tree[0] is not tree else "")
    return tree.name if isinstance(tree, Unreadable) else type(tree).__name__


def _load(dumps: Sequence[DumpFile], asked: Asked) -> Iterator[Loaded]:
    sizes = sum(os.fstat(dump.raw.fileno()).st_size for dump in dumps)
    seconds = SECONDS + sizes // BYTES_PER_SECOND
    asked.spool_folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryFile(dir=asked.spool_folder) as tree_file,
        tempfile.TemporaryFile(dir=asked.spool_folder) as data_file,
    ):
        files = [(dump.raw.fileno(), _is_sound_zip(dump)) for dump in dumps]
        given = [tree_file.fileno(), data_file.fileno(), *(descriptor for descriptor, _ in files)]
        command = [
            sys.executable, "-P", "-E", str(Path(torch_sandbox.__file__)), str(given[0]), str(given[1]),
            str(MEMORY_BYTES), str(seconds), str(GROWTH * sizes + GROWTH_BYTES),
            *(f"{descriptor}:{int(is_zip)}" for descriptor, is_zip in files),
        ]  # fmt: skip
        # Nothing of the user's environment steers torch; a library path may be needed to load it.
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        nothing = subprocess.DEVNULL
        try:
            done = subprocess.run(  # noqa: S603 - our own program
                command, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=given, timeout=seconds, check=False,
                cwd="/", env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
            code = done.returncode
        except subprocess.TimeoutExpired:
            raise RefusedDump(
                f"{dumps[0].path}: a torch file that does not load within {seconds} s; save only the routes in it"
            ) from None
        data_bytes = os.fstat(data_file.fileno()).st_size
        memory = mmap.mmap(data_file.fileno(), data_bytes, access=mmap.ACCESS_READ) if data_bytes else None
        yield from _read(dumps, tree_file, memory, code)


def _is_sound_zip(dump: DumpFile) -> bool:
    head = dump.raw.read(len(LEGACY_MAGIC))
    if head == LEGACY_MAGIC:
        return False
    if not head.startswith(b"PK"):
        raise RefusedDump(
            f"{dump.path}: not a torch file, but others of its folder are; a folder is one dump, put it elsewhere"
        )
    try:
        with open_zip(dump.raw) as archive:
            members = archive.infolist()
    except DAMAGE as error:
        raise MalformedDump(
            f"{dump.path}: a truncated or damaged torch file ({line_of(error)}); copy the dump again"
        ) from None
    # torch.save never compresses; a packed member could unfold to any size, and a mapped file has to lie there as is.
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise RefusedDump(
            f"{dump.path}: a torch file with compressed members, which torch never writes: it was packed again or "
            "made up; ingest the file as torch.save wrote it"
        )
    return True


def _read(dumps: Sequence[DumpFile], file: BinaryIO, memory: mmap.mmap | None, code: int) -> Iterator[Loaded]:
    """What the loader wrote, held against the bytes that are there: it may have been taken over by what it read."""
    file.seek(0)
    if os.fstat(file.fileno()).st_size > _MAX_TREE_BYTES:
        raise RefusedDump(f"{dumps[0].path}: a torch file of more values than {_MAX_TREE_BYTES} bytes hold")

    def value_of(said: dict[str, Any]) -> Any:
        if "d" in said:
            return {key: value for key, value in said["d"]}  # noqa: C416 - pairs are lists, checked by unpacking
        if "a" in said:
            return _array(memory, *said["a"])
        return Unreadable(_plain(said["o"])) if "o" in said else said

    for dump in dumps:
        line = file.readline()
        try:
            said = json.loads(line, object_hook=value_of) if line.endswith(b"\n") else {}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise RefusedDump(f"{dump.path}: a torch file with no plain content ({line_of(error)})") from None
        if not isinstance(said, dict):
            said = {}
        if "missing" in said:
            raise RefusedDump(
                f"{dump.path}: a torch file, and torch cannot be imported here ({_plain(said['missing'])}); install "
                "torch, or save npz instead"
            )
        if "refused" in said:
            raise RefusedDump(
                f"{dump.path}: a torch file that is not loaded: {_plain(said['refused'])}. Only tensors, numpy arrays "
                "of numbers, dicts, lists, numbers and texts are unpickled, since a pickle could run code; save those "
                "alone with torch.save"
            )
        if "malformed" in said:
            raise MalformedDump(
                f"{dump.path}: a truncated or damaged torch file, or no pickle of one ({_plain(said['malformed'])}); "
                "copy the dump again"
            )
        if "tree" not in said:
            how = f"was stopped by signal {-code}" if code < 0 else f"ended with code {code}"
            raise RefusedDump(
                f"{dump.path}: a torch file whose loader {how}: out of memory or time, or the file is damaged; save "
                "only the routes in it"
            )
        yield Loaded(dump.path, said["tree"], memory)


def _array(memory: mmap.mmap | None, dtype: str, shape: list[int], offset: int) -> npt.NDArray[Any]:
    if not _ARRAY_TYPE.fullmatch(dtype) or not all(type(length) is int and length >= 0 for length in [*shape, offset]):
        raise ValueError("an array of an unknown form")
    count = prod(shape)
    if not count:
        return np.zeros(shape, dtype=dtype)
    if memory is None or offset + count * np.dtype(dtype).itemsize > len(memory):
        raise ValueError("an array beyond its bytes")
    return np.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)


def _plain(text: object) -> str:
    return re.sub(r"[^ -~]", "?", str(text))[:200]
