"""Arrays that two processes share: one anonymous file in memory, laid out by a list of names, types and shapes.

The process that makes an arena touches all of it, so that its memory is charged to it and not to a limited reader.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_ALIGNMENT_BYTES = 64

Layout = Mapping[str, tuple[str, Sequence[int]]]
"""Name → (numpy dtype name, shape)."""


@dataclass
class Arena:
    """Named arrays over one shared mapping; `descriptor` is what another process attaches to."""

    descriptor: int
    layout: dict[str, tuple[str, tuple[int, ...]]]
    arrays: dict[str, npt.NDArray[Any]]

    @classmethod
    def create(cls, layout: Layout) -> Self:
        """Zeroed, touched arrays in a new anonymous file; the descriptor survives exec where it is passed on.

        Raises:
            OSError: no memory, or no memfd_create.
        """
        descriptor = os.memfd_create("expert-tier-replay")
        size = _size(layout)
        os.ftruncate(descriptor, size)
        arena = cls.attach(descriptor, layout)
        for array in arena.arrays.values():
            array.fill(0)
        return arena

    @classmethod
    def attach(cls, descriptor: int, layout: Layout) -> Self:
        """The arrays of an arena that exists."""
        mapping = mmap.mmap(descriptor, _size(layout), flags=mmap.MAP_SHARED)
        arrays: dict[str, npt.NDArray[Any]] = {}
        place = 0
        for name, (dtype, shape) in layout.items():
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(mapping, dtype=dtype, count=count, offset=place).reshape(shape)
            place += _padded(count * np.dtype(dtype).itemsize)
        return cls(descriptor, {name: (dtype, tuple(shape)) for name, (dtype, shape) in layout.items()}, arrays)

    def close(self) -> None:
        """Closes the descriptor; the arrays stay readable while something refers to them."""
        os.close(self.descriptor)


def _size(layout: Layout) -> int:
    sizes = (int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for dtype, shape in layout.values())
    return sum(_padded(size) for size in sizes) or _ALIGNMENT_BYTES


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
