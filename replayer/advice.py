"""Lookahead plans delivered: one worker that brings what a plan names into the page cache, beside the demand threads.

A *hint* is what a plan names for one event. The loop hands it over once the event it was issued after has been served;
the worker takes it from one slot that a newer hint overwrites, as in arXiv 2608.12103 §7, or from a queue, and asks the
kernel for its experts: by advice (POSIX_FADV_WILLNEED), by blocking reads, or by reads through io_uring. Whether a plan
is any good belongs to `prefetch`, and what became of hints is judged by `proofs`.

Letters: N replayed events, H hints.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from replayer.loop import (
    COMPLETED,
    HELD,
    HINT_COMPLETED,
    HINT_IN_FLIGHT,
    PUT,
    QUIT,
    SCRATCH_BYTES,
    SLOT,
    TAKEN,
    Extents,
    Hints,
    Setting,
    add_to_word,
    announce,
    c_close,
    c_errno,
    c_syscall,
    exchange,
    load_int,
    load_word,
    missing_pages,
    now_ns,
    opened_to_read,
    read_at,
)
from replayer.owners import NotDeliverable

if TYPE_CHECKING:
    # The measuring process has its hints ready; what reads plans would weigh on its memory.
    from replayer.plan import Plan
    from replayer.trace import Trace

IntArray = npt.NDArray[np.int64]

DELIVERIES = {"advice": 0, "blocking": 1, "uring": 2}
"""How a hint is delivered → `Delivery.kind`."""

URING_DEPTH = 32
"""Reads under way at once, of one hint."""

_ADVICE, _BLOCKING, _URING = range(3)
_VECTOR_PAGES = 4096
_WARMUP = 2
_SEMAPHORE_BYTES = 64
_IO_URING_SETUP, _IO_URING_ENTER = 425, 426  # the same number on every architecture
_IORING_OP_READ, _IORING_ENTER_GETEVENTS = 22, 1
_SQES_AT, _CQ_RING_AT = 0x10000000, 0x8000000

_c_sem_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.int64))


@dataclass(frozen=True)
class Planned:
    """Hints of a plan for the events of a replay; see `loop.Hints`. event: (H,) which replayed event each is for."""

    place_first_hint: IntArray
    hint_first_object: IntArray
    hint_objects: npt.NDArray[np.int32]
    event: IntArray


def hints_of(plan: "Plan", trace: "Trace", event_ids: IntArray) -> Planned:
    """The hints that a replay of the events `event_ids` (N,) hands over.

    Those issued before the first of them come at the beginning, events that are not replayed get none, and neither does
    an event for which nothing is predicted. Hints of one place are in the order of their events.
    """
    counts = np.diff(plan.first_id)[event_ids]
    targets = np.flatnonzero(plan.covered[event_ids] & (counts > 0))
    place = np.searchsorted(event_ids, plan.issued_after[event_ids[targets]], side="right")
    targets = targets[np.argsort(place, kind="stable")]
    sizes = counts[targets]
    first_object = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    from_ids = np.repeat(plan.first_id[event_ids[targets]] - first_object[:-1], sizes) + np.arange(first_object[-1])
    base = trace.layer_first_object[trace.event_layer[event_ids[targets]]]
    return Planned(
        place_first_hint=np.searchsorted(np.sort(place), np.arange(len(event_ids) + 2)).astype(np.int64),
        hint_first_object=first_object,
        hint_objects=(np.repeat(base, sizes) + plan.expert_ids[from_ids]).astype(np.int32),
        event=targets.astype(np.int64),
    )


def named_steps(plan: "Plan", trace: "Trace") -> tuple[int, int] | None:
    """The half-open range of steps, counted without warm-up, with all for which a plan names experts; null if none."""
    is_asked = trace.event_phase != _WARMUP
    named = np.unique(trace.event_step[is_asked & plan.covered & (np.diff(plan.first_id) > 0)])
    if not len(named):
        return None
    first, last = np.searchsorted(np.unique(trace.event_step[is_asked]), [named[0], named[-1]]).tolist()
    return first, last + 1


class Delivery(NamedTuple):
    """How the worker delivers. kind: see DELIVERIES; piece_bytes: largest piece that is asked for at once, 0 for whole
    extents; buffer: (B,) uint8 that reads go to, nobody looks at it; scratch, vector: as in `loop.Destinations`.

    Of io_uring: ring_fd, −1 without; sqes: (D, 8) int64; sq_array, cq_mask …: as mapped by the kernel; cqes: (C, 2).
    failed: (1,) int64, errno of the first hint that could not be delivered.
    """

    kind: int
    piece_bytes: int
    buffer: npt.NDArray[np.uint8]
    scratch: npt.NDArray[np.uint8]
    vector: npt.NDArray[np.uint8]
    ring_fd: int
    sqes: npt.NDArray[np.int64]
    sq_array: npt.NDArray[np.uint32]
    sq_tail: npt.NDArray[np.uint32]
    cq_head: npt.NDArray[np.uint32]
    cq_tail: npt.NDArray[np.uint32]
    cqes: npt.NDArray[np.int64]
    failed: npt.NDArray[np.int64]


@numba.njit(cache=True, nogil=True)
def deliver(extents, hints, setting, delivery):  # type: ignore[no-untyped-def]
    """The worker: takes hints until it is told to quit; what waits or is under way then counts as in flight."""
    clock = np.zeros(2, dtype=np.int64)
    mail = hints.mailbox.ctypes.data
    while True:
        while _c_sem_wait(setting.hint_semaphore) != 0:
            pass
        hint = _taken(hints, setting)
        if load_word(mail + 8 * QUIT) != 0:
            while hint >= 0:
                hints.state[hint] = HINT_IN_FLIGHT
                hint = _taken(hints, setting)
            return
        if hint < 0:
            continue
        hints.hint_begin_ns[hint] = now_ns(clock)
        _deliver_one(hint, extents, hints, setting, delivery)
        hints.hint_end_ns[hint] = now_ns(clock)
        if load_word(mail + 8 * QUIT) != 0:
            hints.state[hint] = HINT_IN_FLIGHT
        else:
            hints.state[hint] = HINT_COMPLETED
            hints.mailbox[COMPLETED] += 1


@numba.njit(cache=True, nogil=True)
def _taken(hints, setting):  # type: ignore[no-untyped-def]
    """The hint that waits longest, which waits no more; −1 where none does."""
    mail = hints.mailbox.ctypes.data
    if setting.hint_slots == 0:
        return exchange(mail + 8 * SLOT, 0) - 1
    taken = load_word(mail + 8 * TAKEN)
    if taken >= load_word(mail + 8 * PUT):
        return np.int64(-1)
    hint = hints.queue[taken % setting.hint_slots] - 1
    add_to_word(mail + 8 * TAKEN, 1)
    return hint


@numba.njit(cache=True, nogil=True)
def _deliver_one(hint, extents, hints, setting, delivery):  # type: ignore[no-untyped-def]
    """Asks for every expert of a hint that is not in locked memory, until told to quit."""
    mail = hints.mailbox.ctypes.data
    missing, left, pending = np.int64(0), np.int64(0), np.int64(0)
    first, end = hints.hint_first_object[hint], hints.hint_first_object[hint + 1]
    asked = first
    for place in range(first, end):
        if load_word(mail + 8 * QUIT) != 0:
            break
        asked = place + 1
        obj = hints.hint_objects[place]
        if extents.path[obj] == HELD:
            continue
        missing += missing_pages(obj, extents, setting, delivery.scratch, delivery.vector)
        for extent in range(extents.object_first_extent[obj], extents.object_first_extent[obj + 1]):
            pending = _ask(extent, extents.path[obj], pending, extents, setting, delivery)
        if delivery.kind != _URING:
            left += missing_pages(obj, extents, setting, delivery.scratch, delivery.vector)
    if delivery.kind == _URING:
        _harvest(pending, delivery)
        for place in range(first, asked):
            obj = hints.hint_objects[place]
            if extents.path[obj] != HELD:
                left += missing_pages(obj, extents, setting, delivery.scratch, delivery.vector)
    hints.hint_missing_pages[hint] = missing
    hints.hint_grown_pages[hint] = missing - left


@numba.njit(cache=True, nogil=True)
def _ask(extent, path, pending, extents, setting, delivery):  # type: ignore[no-untyped-def]
    """Asks for one extent; returns the reads of io_uring that are under way."""
    offset, length = extents.offset[extent] + extents.skip[extent], extents.wanted[extent]
    fd = np.int64(extents.fd[extent])
    is_open = fd >= 0
    if not is_open:
        fd = opened_to_read(extents.file_name[extents.file[extent]], path, setting.advice)
        if fd < 0:
            _note_failure(-fd, delivery)
            return pending
    piece = delivery.piece_bytes if delivery.piece_bytes > 0 else length
    if delivery.kind == _ADVICE:
        announce(fd, offset, length, piece)
    else:
        end = offset + length
        while offset < end:
            size = min(piece, end - offset, len(delivery.buffer))
            if delivery.kind == _BLOCKING:
                got = read_at(np.int32(fd), delivery.buffer.ctypes.data, size, offset, size, 0, delivery.scratch)
                if got < 0:
                    _note_failure(-got, delivery)
                    break
            else:
                if pending == len(delivery.sqes):
                    pending = _harvest(pending, delivery)
                _submit(fd, offset, size, delivery)
                pending += 1
            offset += size
    if not is_open:
        if delivery.kind == _URING:
            pending = _harvest(pending, delivery)
        c_close(np.int32(fd))
    return pending


@numba.njit(cache=True, nogil=True)
def _note_failure(number, delivery):  # type: ignore[no-untyped-def]
    if delivery.failed[0] == 0:
        delivery.failed[0] = number


@numba.njit(cache=True, nogil=True)
def _submit(fd, offset, size, delivery):  # type: ignore[no-untyped-def]
    """One read to io_uring; all go to the same bytes, which nobody looks at."""
    entries = np.uint32(len(delivery.sqes))
    tail = delivery.sq_tail[0]
    place = np.int64(tail & (entries - np.uint32(1)))
    sqe = delivery.sqes[place]
    sqe[:] = 0
    sqe[0] = _IORING_OP_READ | (fd << 32)
    sqe[1] = offset
    sqe[2] = delivery.buffer.ctypes.data
    sqe[3] = size
    delivery.sq_array[place] = np.uint32(place)
    # The call into the kernel that follows orders these writes before its look at them.
    delivery.sq_tail[0] = tail + np.uint32(1)
    # One at a time, so that the device begins while the next expert is looked up.
    if c_syscall(_IO_URING_ENTER, delivery.ring_fd, 1, 0, 0, 0, 0) < 0:
        _note_failure(np.int64(load_int(c_errno())), delivery)


@numba.njit(cache=True, nogil=True)
def _harvest(pending, delivery):  # type: ignore[no-untyped-def]
    """Waits for all reads under way; 0, which are left."""
    entries = np.uint32(len(delivery.cqes))
    tail = delivery.cq_tail.ctypes.data
    # Read anew after each call into the kernel, which moves it.
    while pending > 0:
        head = delivery.cq_head[0]
        ready = np.uint32(load_int(tail)) - head
        if ready == 0:
            waited = c_syscall(_IO_URING_ENTER, delivery.ring_fd, 0, 1, _IORING_ENTER_GETEVENTS, 0, 0)
            if waited < 0 and load_int(c_errno()) != 4:  # EINTR
                _note_failure(np.int64(load_int(c_errno())), delivery)
                return np.int64(0)
            continue
        place = np.int64(head & (entries - np.uint32(1)))
        result = delivery.cqes[place, 1] << 32 >> 32
        if result < 0:
            _note_failure(-result, delivery)
        # Gives the place back to the kernel.
        delivery.cq_head[0] = head + np.uint32(1)
        pending -= 1
    return np.int64(0)


class Worker:
    """What one worker needs beside the loop: semaphore, buffer and, if asked for, an io_uring; kept alive by this.

    Raises:
        NotDeliverable: the kernel gives no io_uring.
    """

    def __init__(self, kind: str, piece_bytes: int, buffer_bytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._semaphore = np.zeros(_SEMAPHORE_BYTES // 8, dtype=np.int64)
        self.reset()
        reads = kind != "advice"
        ring = _Ring(URING_DEPTH) if kind == "uring" else None
        self._ring = ring
        nothing = np.zeros(1, dtype=np.uint32)
        self.delivery = Delivery(
            kind=DELIVERIES[kind],
            piece_bytes=piece_bytes,
            # Touched, so that it is part of the memory that is measured before the limit.
            buffer=np.full(buffer_bytes if reads else 1, 0, dtype=np.uint8),
            scratch=np.full(SCRATCH_BYTES, 0, dtype=np.uint8),
            vector=np.full(_VECTOR_PAGES, 0, dtype=np.uint8),
            ring_fd=-1 if ring is None else ring.descriptor,
            sqes=np.zeros((1, 8), dtype=np.int64) if ring is None else ring.sqes,
            sq_array=nothing if ring is None else ring.sq_array,
            sq_tail=nothing if ring is None else ring.sq_tail,
            cq_head=nothing if ring is None else ring.cq_head,
            cq_tail=nothing if ring is None else ring.cq_tail,
            cqes=np.zeros((1, 2), dtype=np.int64) if ring is None else ring.cqes,
            failed=np.zeros(1, dtype=np.int64),
        )

    @property
    def semaphore(self) -> int:
        """Its address, for `Setting.hint_semaphore`."""
        return int(self._semaphore.ctypes.data)

    def reset(self) -> None:
        """Forgets wake-ups of a pass that has ended; nobody waits then."""
        if self._libc.sem_init(ctypes.c_void_p(self.semaphore), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def run(self, extents: Extents, hints: Hints, setting: Setting) -> None:
        """Delivers until `quit`; in a thread of its own."""
        deliver(extents, hints, setting, self.delivery)

    def rehearse(self, extents: Extents, hints: Hints, setting: Setting) -> None:
        """Compiles the worker, or finds it compiled: one run that is told to quit before it begins."""
        self.quit(hints)
        self.run(extents, hints, setting)
        hints.mailbox[QUIT] = 0

    def quit(self, hints: Hints) -> None:
        """Ends `run` once the hint under way is done."""
        hints.mailbox[QUIT] = 1
        self._libc.sem_post(ctypes.c_void_p(self.semaphore))


class _Ring:
    """An io_uring and its shared memory (io_uring_setup(2)).

    Raises:
        NotDeliverable: the kernel does not give one.
    """

    def __init__(self, depth: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        parameters = (ctypes.c_uint32 * 30)()
        self.descriptor = int(libc.syscall(_IO_URING_SETUP, depth, ctypes.byref(parameters)))
        if self.descriptor < 0:
            raise NotDeliverable(
                f"--delivery uring: the kernel gives no io_uring ({os.strerror(ctypes.get_errno())}); look at "
                "/proc/sys/kernel/io_uring_disabled, or use --delivery advice or blocking"
            )
        sq_entries, cq_entries = parameters[0], parameters[1]
        # head, tail, ring_mask, ring_entries, flags, dropped, array …; head, tail, mask, entries, overflow, cqes …
        sq_offset, cq_offset = list(parameters[10:20]), list(parameters[20:30])
        self._maps = [
            mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=place)
            for size, place in (
                (sq_offset[6] + 4 * sq_entries, 0),
                (cq_offset[5] + 16 * cq_entries, _CQ_RING_AT),
                (64 * sq_entries, _SQES_AT),
            )
        ]
        sq, cq, sqes = self._maps
        self.sqes = np.frombuffer(sqes, dtype=np.int64).reshape(-1, 8)[:sq_entries]
        self.sq_array = np.frombuffer(sq, dtype=np.uint32, count=sq_entries, offset=sq_offset[6])
        self.sq_tail = np.frombuffer(sq, dtype=np.uint32, count=1, offset=sq_offset[1])
        self.cq_head = np.frombuffer(cq, dtype=np.uint32, count=1, offset=cq_offset[0])
        self.cq_tail = np.frombuffer(cq, dtype=np.uint32, count=1, offset=cq_offset[1])
        self.cqes = np.frombuffer(cq, dtype=np.int64, count=2 * cq_entries, offset=cq_offset[5]).reshape(-1, 2)
