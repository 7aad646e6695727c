"""Where one asks for events and takes their bytes: slots and two semaphores in memory that two processes share.

The process that asks (`decode`) makes a seat and touches it, so the slots are its own memory and not that of the
limited reader. What is asked for goes through the replay's own schedule, in the arena.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from replayer import loop

_SEMAPHORE_BYTES = 64
"""More than a sem_t takes with glibc (32) or musl (16); one lies on a cache line of its own."""
_POLL_S = 0.2


class NotServed(RuntimeError):
    """The loop ended before the event that was asked for was over; its process says why."""


@dataclass
class Seat:
    """`slots` (M, 1, slot_bytes): slot m takes the bytes of an event's m-th access. Semaphores lie behind them."""

    descriptor: int
    slots: npt.NDArray[np.uint8]
    asked_address: int
    served_address: int
    _mapping: mmap.mmap

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> Self:
        """A new, touched seat of slots of whole pages; the descriptor survives exec where it is passed on.

        Raises:
            OSError: no memory, or semaphores cannot be shared.
        """
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("expert-tier-seat")
        os.ftruncate(descriptor, num_slots * slot_bytes + 2 * _SEMAPHORE_BYTES)
        seat = cls.attach(descriptor, num_slots, slot_bytes)
        seat.slots.fill(0)
        libc = ctypes.CDLL(None, use_errno=True)
        for address in (seat.asked_address, seat.served_address):
            if libc.sem_init(ctypes.c_void_p(address), 1, 0) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"semaphores between processes: {os.strerror(number)}")
        return seat

    @classmethod
    def attach(cls, descriptor: int, num_slots: int, slot_bytes: int) -> Self:
        """A seat that exists."""
        size = num_slots * slot_bytes
        mapping = mmap.mmap(descriptor, size + 2 * _SEMAPHORE_BYTES, flags=mmap.MAP_SHARED)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        address = int(whole.ctypes.data) + size
        slots = whole[:size].reshape(num_slots, 1, slot_bytes)
        return cls(descriptor, slots, address, address + _SEMAPHORE_BYTES, mapping)

    def named(self) -> dict[str, int]:
        """What `attach` of another process needs."""
        num_slots, _, slot_bytes = self.slots.shape
        return {"descriptor": self.descriptor, "num_slots": num_slots, "slot_bytes": slot_bytes}

    def close(self) -> None:
        """Closes the descriptor; the slots stay readable while something refers to them."""
        os.close(self.descriptor)


class Asking:
    """Asks a loop for one event after the other, in the order of its schedule, and waits for their bytes.

    arrays: of the arena. request_ns, served_ns: (N,) CLOCK_MONOTONIC of each event asked for in this pass; what lies
    before `check_end_ns` of the step before is the loop's own time, and none that bytes took. is_alive: of the loop's
    process.
    """

    def __init__(self, seat: Seat, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.seat, self.arrays = seat, arrays
        self.is_alive: Callable[[], bool] = lambda: True
        self._libc = ctypes.CDLL(None, use_errno=True)
        events = len(arrays["event_first_access"]) - 1
        self.request_ns = np.zeros(events, dtype=np.int64)
        self.served_ns = np.zeros(events, dtype=np.int64)
        self.event = 0

    def rewind(self) -> None:
        """Begins with the first event again, for a further pass."""
        self.event = 0

    def ask(self, objects: npt.NDArray[np.int64]) -> None:
        """Asks for the next event, of these objects, each once; returns when the m-th one's bytes are in slot m.

        Raises:
            NotServed: the loop has ended. ValueError: more objects than slots, or more events than were planned.
        """
        first_access, event = self.arrays["event_first_access"], self.event
        if event >= len(first_access) - 1:
            raise ValueError(f"event {event}, planned were {len(first_access) - 1}")
        if len(objects) > len(self.seat.slots):
            raise ValueError(f"{len(objects)} experts in one event, wanted at most {len(self.seat.slots)}")
        begin = int(first_access[event])
        self.arrays["objects"][begin : begin + len(objects)] = objects
        first_access[event + 1] = begin + len(objects)
        self.request_ns[event] = time.monotonic_ns()
        self._libc.sem_post(ctypes.c_void_p(self.seat.asked_address))
        self._wait()
        self.served_ns[event] = time.monotonic_ns()
        self.event += 1

    def release(self) -> None:
        """Wakes a loop that waits to be asked, after it was told to stop."""
        self._libc.sem_post(ctypes.c_void_p(self.seat.asked_address))

    def _wait(self) -> None:
        control, address = self.arrays["control"], ctypes.c_void_p(self.seat.served_address)
        while True:
            until = time.time() + _POLL_S
            moment = _Timespec(int(until), int(until % 1 * 1e9))
            if self._libc.sem_timedwait(address, ctypes.byref(moment)) == 0:
                break
            if not self.is_alive():
                raise NotServed
        if control[loop.STOP]:
            raise NotServed


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))
