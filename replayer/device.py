"""Where the bytes of an expert go: plain memory, a torch tensor, or pinned memory with a copy to the accelerator.

Every destination is a touched, page-aligned region of huge pages where the kernel gives them, of the same size for
every owner: huge pages alone make O_DIRECT reads almost twice as fast, so an arm without them would not compare.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23


class NoAccelerator(RuntimeError):
    """`--device cuda` where no CUDA device answers."""


class NotLockable(RuntimeError):
    """Memory that an owner needs locked cannot be."""


@dataclass
class Region:
    """Memory for the demand threads.

    slots: (threads, slots, slot_bytes) uint8. device_address, stream: (threads,) int64, 0 without an accelerator; copy
    and synchronize are addresses of C functions, 0 without. `owned` keeps what owns the memory alive.
    """

    slots: npt.NDArray[np.uint8]
    device_address: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]
    copy: int = 0
    synchronize: int = 0
    owned: list[Any] = field(default_factory=list)


def allocate(kind: str, num_threads: int, num_slots: int, slot_bytes: int) -> Region:
    """Touched memory for `num_threads` × `num_slots` slots of kind `none`, `cpu` or `cuda`.

    Raises:
        NoAccelerator: kind `cuda`, but torch sees no CUDA device.
    """
    size = _whole_huge_pages(num_threads * num_slots * slot_bytes)
    nothing = np.zeros(num_threads, dtype=np.int64)
    if kind == "none":
        # MAP_SHARED, the default, would be charged as shared memory.
        memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(memory, dtype=np.uint8)
        return Region(_slots(whole, num_threads, num_slots, slot_bytes), nothing, nothing.copy(), owned=[memory])
    # Two seconds of import, not needed by the other kind.
    import torch

    if kind == "cpu":
        tensor = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8)
        return Region(
            _slots(tensor.numpy(), num_threads, num_slots, slot_bytes), nothing, nothing.copy(), owned=[tensor]
        )
    if not torch.cuda.is_available():
        raise NoAccelerator(
            f"--device cuda, but torch {torch.__version__} sees no CUDA device; use --device cpu or none, or install a "
            "CUDA build of torch on a machine with a GPU"
        )
    tensor = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    targets = [torch.empty(slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(num_threads)]
    streams = [torch.cuda.Stream() for _ in range(num_threads)]
    runtime = ctypes.CDLL(cuda_runtime())
    return Region(
        _slots(tensor.numpy(), num_threads, num_slots, slot_bytes),
        np.array([target.data_ptr() for target in targets], dtype=np.int64),
        np.array([stream.cuda_stream for stream in streams], dtype=np.int64),
        copy=_address(runtime.cudaMemcpyAsync),
        synchronize=_address(runtime.cudaStreamSynchronize),
        owned=[tensor, targets, streams, runtime],
    )


def nowhere(slots: npt.NDArray[np.uint8], num_threads: int) -> Region:
    """Slots of somebody else, who copies from them what is wanted elsewhere."""
    nothing = np.zeros(num_threads, dtype=np.int64)
    return Region(slots, nothing, nothing.copy())


def _slots(whole: npt.NDArray[np.uint8], num_threads: int, num_slots: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
    """The aligned part of `whole` as (threads, slots, bytes), backed by huge pages where possible, touched."""
    address = whole.ctypes.data
    skip = -address % HUGE_PAGE_BYTES
    size = num_threads * num_slots * slot_bytes
    # Up to the last huge page's end: a part of one would be small pages.
    begin, length = ctypes.c_void_p(address + skip), ctypes.c_size_t(_whole_huge_pages(size))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(begin, length, mmap.MADV_HUGEPAGE)
    part = whole[skip : skip + size]
    if libc.madvise(begin, length, _MADV_POPULATE_WRITE) != 0:
        part[:: mmap.PAGESIZE] = 0
    return part.reshape(num_threads, num_slots, slot_bytes)


@dataclass
class Locked:
    """Memory that stays: its address, its size in whole pages, and what owns it."""

    address: int
    size_bytes: int
    owned: Any


def lock(size_bytes: int) -> Locked:
    """Locked private memory of at least `size_bytes`, rounded up to whole pages; huge ones where the kernel has them.

    Raises:
        NotLockable: this process may not lock so much.
    """
    size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    address += -address % HUGE_PAGE_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    begin, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    libc.madvise(begin, length, mmap.MADV_HUGEPAGE)
    if size and libc.mlock(begin, length) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NotLockable(
            f"{size:,} bytes cannot be locked: {why}; raise the limit (ulimit -l), grant CAP_IPC_LOCK, or ask for less"
        )
    return Locked(address, size, memory)


def _whole_huge_pages(size: int) -> int:
    return -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def cuda_runtime() -> str:
    """Path of the CUDA runtime that torch has loaded: a second copy would have contexts of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition(" ")[2]
        if "libcudart" in name:
            return name
    return "libcudart.so"


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
