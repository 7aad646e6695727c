"""How the bytes of experts get from host slots to the device that computes: copied beside the computing, or adopted.

`copy` stages in pinned memory and copies on a stream of its own, the next expert while one is computed. `adopt` lets
the device read the slots where they lie, which is only sound where it follows the host's page tables. The order of
copies is in `Copied`, which knows no CUDA; what CUDA does is in `CudaLane`.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from replayer.device import NoAccelerator, cuda_runtime

PLACEMENTS = ("copy", "adopt")
_BUFFERS = 2
# cudaDeviceAttr of driver_types.h.
_PAGEABLE_ACCESS, _HOST_PAGE_TABLES = 88, 100
# DLDeviceType of dlpack.h.
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_DLPACK_UNSIGNED = 1


class Lane(Protocol):
    """Two buffers on the device. `copy` may begin once what was asked to be computed before it is done."""

    def copy(self, buffer: int, slot: torch.Tensor) -> None:
        """Starts to copy the bytes of a slot; the slot may change when this returns."""

    def arrive(self, buffer: int) -> torch.Tensor:
        """The buffer, for work that is asked for from now on: it waits for the copy."""


class CudaLane:
    """Pinned staging, and a stream beside the one that computes."""

    def __init__(self, slot_bytes: int) -> None:
        self._staging = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
        self._device = [torch.empty(slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._side = torch.cuda.Stream()

    def copy(self, buffer: int, slot: torch.Tensor) -> None:
        """Starts the copy behind all that computes from the buffer; waits for the copy that last left its staging."""
        self._copied[buffer].synchronize()
        staging, target = self._staging[buffer][: len(slot)], self._device[buffer][: len(slot)]
        staging.copy_(slot)
        free = torch.cuda.Event()
        free.record(torch.cuda.current_stream())
        self._side.wait_event(free)
        with torch.cuda.stream(self._side):
            target.copy_(staging, non_blocking=True)
            self._copied[buffer].record(self._side)

    def arrive(self, buffer: int) -> torch.Tensor:
        """The buffer; the computing stream waits for its copy, this thread does not."""
        torch.cuda.current_stream().wait_event(self._copied[buffer])
        return self._device[buffer]


class Copied:
    """The experts of one event on the device, in two buffers: when one is first used, the next is on its way.

    slots: the bytes of each; view: tensors over the bytes of the i-th. Of one expert all tensors are taken before those
    of another: its buffer is the next but one's.
    """

    def __init__(
        self, lane: Lane, slots: Sequence[torch.Tensor], view: Callable[[int, torch.Tensor], dict[str, torch.Tensor]]
    ) -> None:
        self._lane, self._slots, self._view = lane, slots, view
        self._now, self._using, self._coming = 0, -1, -1
        self._tensors: dict[str, torch.Tensor] = {}
        if slots:
            lane.copy(1, slots[0])
            self._coming = 0

    def use(self, place: int) -> dict[str, torch.Tensor]:
        """Tensors of an expert, for work that is asked for before another's are used."""
        if place == self._using:
            return self._tensors
        following = 1 - self._now
        if self._coming != place:
            self._lane.copy(following, self._slots[place])
        self._tensors = self._view(place, self._lane.arrive(following))
        old, self._now, self._using = self._now, following, place
        self._coming = place + 1 if place + 1 < len(self._slots) else -1
        if self._coming >= 0:
            self._lane.copy(old, self._slots[self._coming])
        return self._tensors

    def experts(self) -> list[Mapping[str, torch.Tensor]]:
        """One mapping for each slot."""
        return [_Expert(self, place) for place in range(len(self._slots))]


class _Expert(Mapping[str, torch.Tensor]):
    """The tensors of one expert, which come when they are asked for."""

    def __init__(self, event: Copied, place: int) -> None:
        self._event, self._place = event, place

    def __getitem__(self, part: str) -> torch.Tensor:
        return self._event.use(self._place)[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._event.use(self._place))

    def __len__(self) -> int:
        return len(self._event.use(self._place))


def check_placement(placement: str, attribute: Callable[[int], int] | None = None) -> None:
    """Refuses what this machine's device cannot do. attribute: value of a cudaDeviceAttr, asked of the runtime if null.

    Raises:
        NoAccelerator: no device; or it does not read pageable memory through the host's page tables.
    """
    if not torch.cuda.is_available():
        raise NoAccelerator(f"--placement {placement}, but torch {torch.__version__} sees no CUDA device; use cpu")
    if placement != "adopt":
        return
    asked = attribute or _device_attribute
    for name, number in (
        ("pageableMemoryAccess", _PAGEABLE_ACCESS),
        ("pageableMemoryAccessUsesHostPageTables", _HOST_PAGE_TABLES),
    ):
        found = asked(number)
        if found != 1:
            raise NoAccelerator(
                f"--placement adopt, but {name} of the CUDA device is {found}, wanted 1: it cannot read the page "
                "cache's pages in place, as a GH200 can; use --placement copy"
            )


def _device_attribute(number: int) -> int:
    runtime = ctypes.CDLL(cuda_runtime())
    value = ctypes.c_int(0)
    code = runtime.cudaDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(number), torch.cuda.current_device())
    if code != 0:
        raise NoAccelerator(f"attribute {number} of the CUDA device: error {code} of cudaDeviceGetAttribute; use copy")
    return value.value


def adopted(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same bytes as a tensor of `device`, not copied. memory: contiguous uint8 on the host, kept by the caller.

    By DLPack, since torch's other ways ask CUDA whose the address is, and it knows none of pageable memory.
    """
    described = _Managed()
    shape = (ctypes.c_int64 * memory.dim())(*memory.shape)
    strides = (ctypes.c_int64 * memory.dim())(*memory.stride())
    kind = _DLPACK_CUDA if device.type == "cuda" else _DLPACK_CPU
    described.data = memory.data_ptr()
    described.device_type, described.device_id = kind, torch.cuda.current_device() if kind == _DLPACK_CUDA else 0
    described.ndim, described.code, described.bits, described.lanes = memory.dim(), _DLPACK_UNSIGNED, 8, 1
    described.shape = ctypes.cast(shape, ctypes.c_void_p).value
    described.strides = ctypes.cast(strides, ctypes.c_void_p).value
    # torch reads the description when it lets go of the tensor, at an unknown time.
    _KEPT.append((described, shape, strides))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor: torch.Tensor = from_dlpack(make(ctypes.addressof(described), _CAPSULE_NAME, None))
    return tensor


_CAPSULE_NAME = b"dltensor"
_KEPT: list[Any] = []


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h, without a deleter."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )
