"""The measured loop: what touches each access, compiled, without the interpreter lock and without allocation.

Every demand thread makes one call of `work` per pass. An event's accesses are handed out by an atomic ticket; one
barrier ends the event, another one the step, between which thread 0 notes residency and counters. Arrays in, arrays
filled: files, processes and verdicts do not belong here.

Letters: N events, A accesses, S steps, O objects (layer, expert), X extents, F files, T threads, C counter files.
"""

import ctypes
import errno
import os
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from replayer.content import EDGE_BYTES, access_digest, mix, wrong_words

NOT_REACHED = -(2**31)
"""`returned` of an access that no thread came to."""

NOT_OBSERVED = -1
"""`missing_pages` of an access whose residency was not asked for."""

UNCOUNTED = -(2**50)
"""Makes `resident_pages` of a step negative where the kernel did not say."""

SCRATCH_BYTES = 65536
BARRIER_BYTES = 128
"""More than a pthread_barrier_t takes with glibc (32) or musl (32) on any 64-bit machine."""

RESIDENCY_NONE, RESIDENCY_CACHESTAT, RESIDENCY_MINCORE = range(3)
BUFFERED, DIRECT, UNCACHED, MAPPED, HELD = range(5)
"""Where an access gets its bytes: pread through the page cache, pread past it (O_DIRECT), preadv2 that drops the pages
again (RWF_DONTCACHE), a copy out of mapped files, a copy out of locked memory."""
NOT_SERVED = 255
"""`path` of an access that no thread came to."""
VERIFY_NONE, VERIFY_EDGES, VERIFY_ALL = range(3)
STOP, QUIT_EVEN, QUIT_ODD, EVENTS_DONE, FAILED_ACCESS, ARRIVED, FAILED_DECISION = range(7)
"""Slots of `control`: STOP is set from outside, EVENTS_DONE, FAILED_ACCESS (access + 1) and FAILED_DECISION (event + 1)
by the loop; ARRIVED counts threads that ended an event, where the last of them decides the next one."""
SLOT, TAKEN, PUT, QUIT, SUBMITTED, OVERWRITTEN, DROPPED, COMPLETED = range(8)
"""Slots of `mailbox`: SLOT holds a hint + 1, or 0; TAKEN and PUT count hints out of and into the queue; QUIT tells the
worker to end; the others count hints: the first three by the thread that hands them over, COMPLETED by the worker."""
NOT_ISSUED, HINT_COMPLETED, HINT_OVERWRITTEN, HINT_DROPPED, HINT_IN_FLIGHT = range(5)
"""What became of a hint."""
DECIDED = 1
"""What a decider gives; not 0, which it gives when its code raises."""

_EINTR, _EINVAL = errno.EINTR, errno.EINVAL
_OPEN_FLAGS, _O_DIRECT = os.O_RDONLY | os.O_CLOEXEC, os.O_DIRECT
_CACHESTAT = 451  # the same number on every architecture
RWF_DONTCACHE = 0x80
_WILLNEED = 3
_VECTOR_AT = 64  # behind what cachestat takes of the scratch memory

_c_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))
_c_preadv2: Any = types.ExternalFunction(
    "preadv2", types.int64(types.int32, types.int64, types.int32, types.int64, types.int32)
)
_c_open: Any = types.ExternalFunction("open", types.int32(types.int64, types.int32))
c_close: Any = types.ExternalFunction("close", types.int32(types.int32))
_c_mmap: Any = types.ExternalFunction(
    "mmap", types.int64(types.int64, types.int64, types.int32, types.int32, types.int32, types.int64)
)
_c_munmap: Any = types.ExternalFunction("munmap", types.int32(types.int64, types.int64))
_c_memcpy: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
_c_fadvise: Any = types.ExternalFunction(
    "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
)
_c_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
c_errno: Any = types.ExternalFunction("__errno_location", types.int64())
c_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_c_mincore: Any = types.ExternalFunction("mincore", types.int32(types.int64, types.int64, types.int64))
_c_barrier_wait: Any = types.ExternalFunction("pthread_barrier_wait", types.int32(types.int64))
c_sem_post: Any = types.ExternalFunction("sem_post", types.int32(types.int64))
_c_sem_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.int64))


class Schedule(NamedTuple):
    """What is read, in order: the same for every owner.

    step_first_event: (S + 1,); event_first_access: (N + 1,); event_id: (N,) as in the trace; objects: (A,) int32.
    """

    step_first_event: npt.NDArray[np.int64]
    event_first_access: npt.NDArray[np.int64]
    event_id: npt.NDArray[np.int64]
    objects: npt.NDArray[np.int32]


class Extents(NamedTuple):
    """Where an object's bytes lie and how they are read.

    object_first_extent: (O + 1,); of each extent (X,): fd; offset and length, as asked of pread (widened for O_DIRECT);
    skip: bytes read before the wanted ones; wanted: bytes of the expert; slot_offset: where in a slot they go;
    first_word: its place in the expert ÷ 8; map_address: where mincore finds its file, 0 without. held_offset: where
    in the locked copy of its expert a read of `length` goes; file: int32, its file. layer_id, expert_id, key: (O,).
    path: (O,) uint8, where an object's bytes come from; held_address: (O,) of an object's locked copy, 0 without.
    file_fd, file_bytes, file_map_address: (F,), every file of the pool, opened to ask for residency; file_name: (F,)
    address of its path, zero-terminated. Where there are more files than may be open, fd and file_fd are −1 and each
    use opens the file by its name and closes it.
    """

    object_first_extent: npt.NDArray[np.int64]
    fd: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    skip: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.int64]
    slot_offset: npt.NDArray[np.int64]
    first_word: npt.NDArray[np.int64]
    map_address: npt.NDArray[np.int64]
    held_offset: npt.NDArray[np.int64]
    file: npt.NDArray[np.int32]
    layer_id: npt.NDArray[np.int64]
    expert_id: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    path: npt.NDArray[np.uint8]
    held_address: npt.NDArray[np.int64]
    file_fd: npt.NDArray[np.int32]
    file_bytes: npt.NDArray[np.int64]
    file_map_address: npt.NDArray[np.int64]
    file_name: npt.NDArray[np.int64]


class Results(NamedTuple):
    """What a pass leaves behind.

    Of each access (A,): begin_ns, end_ns (CLOCK_MONOTONIC), returned (bytes of the expert, or −errno, or NOT_REACHED),
    missing_pages (before the read, or NOT_OBSERVED; 0 of what is held), path (uint8, see BUFFERED). Of each step (S,):
    step_begin_ns, step_end_ns, check_end_ns, resident_pages. Of each thread (T,): digest, wrong, checked_words,
    observe_ns, verify_ns. counter_text: (S, B) uint8, counter_length: (S, C). ticket: (N,), zeroed before each pass.
    control: see STOP.
    """

    begin_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    returned: npt.NDArray[np.int64]
    missing_pages: npt.NDArray[np.int32]
    path: npt.NDArray[np.uint8]
    step_begin_ns: npt.NDArray[np.int64]
    step_end_ns: npt.NDArray[np.int64]
    check_end_ns: npt.NDArray[np.int64]
    resident_pages: npt.NDArray[np.int64]
    digest: npt.NDArray[np.uint64]
    wrong: npt.NDArray[np.int64]
    checked_words: npt.NDArray[np.int64]
    observe_ns: npt.NDArray[np.int64]
    verify_ns: npt.NDArray[np.int64]
    counter_text: npt.NDArray[np.uint8]
    counter_length: npt.NDArray[np.int32]
    ticket: npt.NDArray[np.int64]
    control: npt.NDArray[np.int64]


class Decisions(NamedTuple):
    """What the policy of a user-space cache said of each access (A,), before its event was served.

    address: of the object's locked copy, 0 where it is not admitted; was_hit: uint8, whether the copy is there already.
    """

    address: npt.NDArray[np.int64]
    was_hit: npt.NDArray[np.uint8]


class Hints(NamedTuple):
    """What a lookahead plan says, in the order of its issue, and what became of it. H hints, Q places of the queue.

    place_first_hint: (N + 2,), hints issued before the first event, then after each event; hint_first_object: (H + 1,);
    hint_objects: objects named, most wanted first. state: (H,) uint8, NOT_ISSUED …; missing_pages, grown_pages: (H,)
    of the objects before delivery, and how many more of them were resident after it; hint_begin_ns, hint_end_ns: (H,).
    queue: (Q,) int64 of a ring; mailbox: see SLOT.
    """

    place_first_hint: npt.NDArray[np.int64]
    hint_first_object: npt.NDArray[np.int64]
    hint_objects: npt.NDArray[np.int32]
    state: npt.NDArray[np.uint8]
    hint_missing_pages: npt.NDArray[np.int64]
    hint_grown_pages: npt.NDArray[np.int64]
    hint_begin_ns: npt.NDArray[np.int64]
    hint_end_ns: npt.NDArray[np.int64]
    queue: npt.NDArray[np.int64]
    mailbox: npt.NDArray[np.int64]


class Setting(NamedTuple):
    """How the loop runs; whole numbers, so that one compiled function serves every setting.

    barrier: address of a pthread barrier of T threads, 0 for none (then one ticket runs through all accesses and no
    step is checked); decide, decide_on: addresses of int64 decide(void *decide_on, int64 event), which fills the
    decisions of an event and gives DECIDED, 0 where no policy decides; page_bytes; residency: RESIDENCY_…;
    advice: POSIX_FADV_… of a file that is opened by name, −1 for none; observe_every: 1 = each access, 0 = none;
    announce_bytes: pieces in which a read is announced (POSIX_FADV_WILLNEED) right before it, 0 = not; verify:
    VERIFY_…; copy, synchronize: addresses of cudaMemcpyAsync and cudaStreamSynchronize or the like, 0 for none;
    hint_semaphore: address of the sem_t that wakes the worker who delivers hints, 0 for none; hint_slots: places of
    its queue, 0 for one slot that a newer hint overwrites; asked, served: addresses of the sem_t that says that the
    schedule has a further event, and of the one that is told when it is over, 0 where the whole schedule is known.
    """

    barrier: int
    decide: int
    decide_on: int
    page_bytes: int
    residency: int
    advice: int
    observe_every: int
    announce_bytes: int
    verify: int
    copy: int
    synchronize: int
    hint_semaphore: int
    hint_slots: int
    asked: int = 0
    served: int = 0


class Destinations(NamedTuple):
    """Where the bytes go. slots: (T, slots of a thread, bytes) uint8, or (accesses of an event, 1, bytes) where events
    are asked for and their bytes taken; scratch: (T, SCRATCH_BYTES) uint8, aligned.

    vector: (T, V) uint8 for mincore; device_address, stream: (T,) of the accelerator, unused without one.
    """

    slots: npt.NDArray[np.uint8]
    scratch: npt.NDArray[np.uint8]
    vector: npt.NDArray[np.uint8]
    device_address: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]


class Counters(NamedTuple):
    """Files whose text is kept after each step. fd: (C,); first_byte: (C + 1,) places in a row of counter_text."""

    fd: npt.NDArray[np.int32]
    first_byte: npt.NDArray[np.int64]


def _type_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomic fetch-and-add of the int64 at `address`; the value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


def _type_exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically stores the int64 at `address`; the value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


def _type_load(typingctx: Any, address: Any) -> Any:
    """Atomic load of the int64 at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


def _type_load32(typingctx: Any, address: Any) -> Any:
    """The int32 at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.load(pointer)

    return types.int32(types.int64), generate


def _type_call_copy(typingctx: Any, function: Any, target: Any, source: Any, size: Any, kind: Any, stream: Any) -> Any:
    """Calls int function(void *target, const void *source, size_t size, int kind, void *stream)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, whole = ir.IntType(64), ir.IntType(32)
        called = ir.FunctionType(whole, [word, word, word, whole, word]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], called), arguments[1:])

    word = types.int64
    return types.int32(word, word, word, word, types.int32, word), generate


def _type_call_synchronize(typingctx: Any, function: Any, stream: Any) -> Any:
    """Calls int function(void *stream)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        called = ir.FunctionType(ir.IntType(32), [ir.IntType(64)]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], called), arguments[1:])

    return types.int32(types.int64, types.int64), generate


def _type_call_decide(typingctx: Any, function: Any, stage: Any, event: Any) -> Any:
    """Calls int64 function(void *stage, int64 event)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        called = ir.FunctionType(word, [word, word]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], called), arguments[1:])

    return types.int64(types.int64, types.int64, types.int64), generate


# Called in compiled code with values where the definitions name types.
add_to_word: Any = intrinsic(_type_add)
exchange: Any = intrinsic(_type_exchange)
load_word: Any = intrinsic(_type_load)
load_int: Any = intrinsic(_type_load32)
_call_copy: Any = intrinsic(_type_call_copy)
_call_synchronize: Any = intrinsic(_type_call_synchronize)
_call_decide: Any = intrinsic(_type_call_decide)


@numba.njit(cache=True, nogil=True)
def now_ns(clock):  # type: ignore[no-untyped-def]
    """CLOCK_MONOTONIC; clock: (2,) int64 scratch."""
    _c_clock(1, clock.ctypes.data)  # 1 = CLOCK_MONOTONIC
    return clock[0] * 1_000_000_000 + clock[1]


@numba.njit(cache=True, nogil=True)
def _opened(name, flags):  # type: ignore[no-untyped-def]
    """Descriptor of the file whose path lies at `name`, or a negative errno."""
    while True:
        fd = _c_open(name, np.int32(_OPEN_FLAGS | flags))
        if fd >= 0:
            return np.int64(fd)
        number = np.int64(load_int(c_errno()))
        if number != _EINTR:
            return -number


@numba.njit(cache=True, nogil=True)
def _cached(fd, offset, length, map_address, residency, page_bytes, scratch, vector):  # type: ignore[no-untyped-def]
    """Resident pages of [offset, offset + length) of a file; negative errno if the kernel cannot say."""
    first = offset // page_bytes * page_bytes
    end = -(-(offset + length) // page_bytes) * page_bytes
    if residency == RESIDENCY_CACHESTAT:
        words = scratch[:56].view(np.int64)
        words[0] = first
        words[1] = end - first
        address = scratch.ctypes.data
        if c_syscall(_CACHESTAT, np.int64(fd), address, address + 16, 0, 0, 0) != 0:
            return -np.int64(load_int(c_errno()))
        return words[2]
    resident = np.int64(0)
    while first < end:
        pages = min(len(vector), (end - first) // page_bytes)
        if _c_mincore(map_address + first, pages * page_bytes, vector.ctypes.data) != 0:
            return -np.int64(load_int(c_errno()))
        for page in range(pages):
            resident += vector[page] & 1
        first += pages * page_bytes
    return resident


@numba.njit(cache=True, nogil=True)
def _cached_in(file, offset, length, extents, residency, page_bytes, scratch, vector):  # type: ignore[no-untyped-def]
    """As `_cached`, of a file of the pool by number."""
    fd, map_address = np.int64(extents.file_fd[file]), extents.file_map_address[file]
    if fd >= 0:
        return _cached(fd, offset, length, map_address, residency, page_bytes, scratch, vector)
    fd = _opened(extents.file_name[file], 0)
    if fd < 0:
        return fd
    size = extents.file_bytes[file]
    if residency == RESIDENCY_MINCORE:
        # 1, 1: PROT_READ, MAP_SHARED
        map_address = _c_mmap(0, size, np.int32(1), np.int32(1), np.int32(fd), 0)
    if map_address == -1:
        found = -np.int64(load_int(c_errno()))
    else:
        found = _cached(fd, offset, length, map_address, residency, page_bytes, scratch, vector)
        if residency == RESIDENCY_MINCORE:
            _c_munmap(map_address, size)
    c_close(np.int32(fd))
    return found


@numba.njit(cache=True, nogil=True)
def resident_pages(extents, first, stride, residency, page_bytes, scratch, vector):  # type: ignore[no-untyped-def]
    """Resident pages of files `first`, `first` + `stride`, … of the pool, or a negative errno."""
    total = np.int64(0)
    if residency == RESIDENCY_NONE:
        return total
    for file in range(first, len(extents.file_fd), stride):
        if extents.file_bytes[file] == 0:
            continue
        found = _cached_in(file, 0, extents.file_bytes[file], extents, residency, page_bytes, scratch, vector)
        if found < 0:
            return found
        total += found
    return total


@numba.njit(cache=True, nogil=True)
def read_at(fd, address, length, offset, needed, flags, scratch):  # type: ignore[no-untyped-def]
    """Bytes read of `length`, at least `needed` unless the file ends before; negative errno on failure."""
    got = np.int64(0)
    while got < needed:
        if flags == 0:
            count = _c_pread(fd, address + got, length - got, offset + got)
        else:
            vector = scratch[_VECTOR_AT : _VECTOR_AT + 16].view(np.int64)
            vector[0] = address + got
            vector[1] = length - got
            count = _c_preadv2(fd, vector.ctypes.data, np.int32(1), offset + got, np.int32(flags))
        if count < 0:
            number = np.int64(load_int(c_errno()))
            if number == _EINTR:
                continue
            if number == _EINVAL and got > 0:
                # A short O_DIRECT read leaves an offset that is not aligned: the file ends there.
                break
            return -number
        if count == 0:
            break
        got += count
    return got


@numba.njit(cache=True, nogil=True)
def _wrong(slot, begin, end, first_word, key, scratch):  # type: ignore[no-untyped-def]
    """Wrong words of slot[begin:end], copied to an aligned place first; (wrong, checked)."""
    wrong = np.int64(0)
    while begin < end:
        size = min(end - begin, SCRATCH_BYTES)
        scratch[:size] = slot[begin : begin + size]
        wrong += wrong_words(scratch[:size], key, first_word)
        begin += size
        first_word += size // 8
    return wrong


@numba.njit(cache=True, nogil=True)
def _verify(thread, event, obj, slot, extents, schedule, results, setting, scratch):  # type: ignore[no-untyped-def]
    """Checks what was read against what the pool must hold, and adds the access to the digest."""
    first = extents.object_first_extent[obj]
    last = extents.object_first_extent[obj + 1] - 1
    key = extents.key[obj]
    page = setting.page_bytes
    for extent in range(first, last + 1):
        begin = extents.slot_offset[extent] + extents.skip[extent]
        size = extents.wanted[extent]
        word = extents.first_word[extent]
        if setting.verify == VERIFY_ALL or size <= 2 * page:
            results.wrong[thread] += _wrong(slot, begin, begin + size, word, key, scratch)
            results.checked_words[thread] += -(-size // 8)
        elif setting.verify == VERIFY_EDGES:
            tail = (size - page) // 8 * 8
            results.wrong[thread] += _wrong(slot, begin, begin + page, word, key, scratch)
            results.wrong[thread] += _wrong(slot, begin + tail, begin + size, word + tail // 8, key, scratch)
            results.checked_words[thread] += page // 8 + -(-(size - tail) // 8)
    head = extents.slot_offset[first] + extents.skip[first]
    tail = extents.slot_offset[last] + extents.skip[last] + extents.wanted[last]
    edge = min(np.int64(EDGE_BYTES), extents.wanted[first], extents.wanted[last])
    results.digest[thread] += access_digest(
        schedule.event_id[event],
        extents.layer_id[obj],
        extents.expert_id[obj],
        slot[head : head + edge],
        slot[tail - edge : tail],
    )


@numba.njit(cache=True, nogil=True)
def missing_pages(obj, extents, setting, scratch, vector):  # type: ignore[no-untyped-def]
    """How many pages of an object are not resident; all of them where the kernel does not say."""
    missing = np.int64(0)
    for extent in range(extents.object_first_extent[obj], extents.object_first_extent[obj + 1]):
        offset = extents.offset[extent] + extents.skip[extent]
        pages = -(-(offset + extents.wanted[extent]) // setting.page_bytes) - offset // setting.page_bytes
        cached = _cached_in(
            extents.file[extent],
            offset,
            extents.wanted[extent],
            extents,
            setting.residency,
            setting.page_bytes,
            scratch,
            vector,
        )
        missing += pages - max(cached, 0)
    return missing


@numba.njit(cache=True, nogil=True)
def _observe(thread, access, obj, extents, results, setting, destinations, clock):  # type: ignore[no-untyped-def]
    """Notes how many pages of an object are not resident."""
    begin_ns = now_ns(clock)
    results.missing_pages[access] = missing_pages(
        obj, extents, setting, destinations.scratch[thread], destinations.vector[thread]
    )
    results.observe_ns[thread] += now_ns(clock) - begin_ns


@numba.njit(cache=True, nogil=True)
def announce(fd, offset, length, piece):  # type: ignore[no-untyped-def]
    """Asks for a range ahead; the kernel reads no more of one call than its readahead or its largest request."""
    end = offset + length
    while offset < end:
        size = min(piece, end - offset)
        _c_fadvise(np.int32(fd), offset, size, np.int32(_WILLNEED))
        offset += size


@numba.njit(cache=True, nogil=True)
def opened_to_read(name, path, advice):  # type: ignore[no-untyped-def]
    """Descriptor of a file that is read once, advised as one that stays open would be; or a negative errno."""
    if path == DIRECT:
        return _opened(name, _O_DIRECT)
    fd = _opened(name, 0)
    if fd >= 0 and advice >= 0:
        _c_fadvise(np.int32(fd), 0, 0, np.int32(advice))
    return fd


@numba.njit(cache=True, nogil=True)
def _fetch(obj, base, path, address, is_there, extents, setting, scratch):  # type: ignore[no-untyped-def]
    """Brings an object's bytes to the slot at `base`; bytes of the expert, fewer if a file ends before, or −errno.

    Through `address`, its locked copy, unless that is 0; the copy is filled first unless it `is_there`.
    """
    returned = np.int64(0)
    flags = 0
    if path == UNCACHED:
        flags = RWF_DONTCACHE
    for extent in range(extents.object_first_extent[obj], extents.object_first_extent[obj + 1]):
        wanted, skip = extents.wanted[extent], extents.skip[extent]
        slot = base + extents.slot_offset[extent]
        source = np.int64(0)
        got = skip + wanted
        if address != 0:
            source = address + extents.held_offset[extent] + skip
        elif path == MAPPED:
            source = extents.map_address[extent] + extents.offset[extent] + skip
        if path != MAPPED and not is_there:
            into = slot
            if address != 0:
                into = source - skip
            fd = np.int64(extents.fd[extent])
            if fd < 0:
                fd = opened_to_read(extents.file_name[extents.file[extent]], path, setting.advice)
                if fd < 0:
                    return fd
            if setting.announce_bytes > 0 and path == BUFFERED:
                announce(fd, extents.offset[extent], extents.length[extent], setting.announce_bytes)
            got = read_at(
                np.int32(fd), into, extents.length[extent], extents.offset[extent], skip + wanted, flags, scratch
            )
            if extents.fd[extent] < 0:
                c_close(np.int32(fd))
            if got < 0:
                return got
        elif path == MAPPED and setting.announce_bytes > 0:
            announce(extents.fd[extent], extents.offset[extent], extents.length[extent], setting.announce_bytes)
        got = min(got - skip, wanted)
        if source != 0 and got == wanted:
            _c_memcpy(slot + skip, source, wanted)
        returned += max(got, 0)
        if got < wanted:
            break
    return returned


@numba.njit(cache=True, nogil=True)
def _access(  # type: ignore[no-untyped-def]
    thread, event, access, turn, schedule, extents, results, decisions, setting, destinations, clock
):
    """One access: residency, bytes from where the owner has them, copy to the accelerator, verification.

    False if it failed.
    """
    obj = schedule.objects[access]
    if setting.asked != 0:
        slot = destinations.slots[access - schedule.event_first_access[event], 0]
    else:
        slot = destinations.slots[thread, turn % destinations.slots.shape[1]]
    scratch = destinations.scratch[thread]
    first, end = extents.object_first_extent[obj], extents.object_first_extent[obj + 1]
    path = np.int64(extents.path[obj])
    address, is_there = extents.held_address[obj], path == HELD
    if setting.decide != 0:
        address, is_there = decisions.address[access], decisions.was_hit[access] != 0
    if is_there:
        path = np.int64(HELD)
    # Chosen by a hash: every sixteenth access would always be the same place in an event of eight.
    if setting.observe_every > 0 and mix(np.uint64(access)) % np.uint64(setting.observe_every) == 0:
        if is_there:
            results.missing_pages[access] = 0
        else:
            _observe(thread, access, obj, extents, results, setting, destinations, clock)
    base = slot.ctypes.data
    results.begin_ns[access] = now_ns(clock)
    returned = _fetch(obj, base, path, address, is_there, extents, setting, scratch)
    results.end_ns[access] = now_ns(clock)
    results.returned[access] = returned
    results.path[access] = path
    wanted = np.int64(0)
    for extent in range(first, end):
        wanted += extents.wanted[extent]
    if returned < wanted:
        return False
    if setting.copy != 0:
        for extent in range(first, end):
            place = extents.slot_offset[extent] + extents.skip[extent]
            failed = _call_copy(
                setting.copy,
                destinations.device_address[thread] + place,
                base + place,
                extents.wanted[extent],
                np.int32(1),  # cudaMemcpyHostToDevice
                destinations.stream[thread],
            )
            if failed != 0:
                results.returned[access] = -np.int64(failed) - 1_000_000
                return False
    if setting.verify != VERIFY_NONE:
        begin_ns = now_ns(clock)
        _verify(thread, event, obj, slot, extents, schedule, results, setting, scratch)
        results.verify_ns[thread] += now_ns(clock) - begin_ns
    return True


@numba.njit(cache=True, nogil=True)
def preload(thread, threads, objects, extents, setting, destinations):  # type: ignore[no-untyped-def]
    """Fills the locked copies of every `threads`-th of `objects`; −1, or the place of the first that could not be."""
    scratch = destinations.scratch[thread]
    base = destinations.slots[thread, 0].ctypes.data
    for place in range(thread, len(objects), threads):
        obj = objects[place]
        wanted = np.int64(0)
        for extent in range(extents.object_first_extent[obj], extents.object_first_extent[obj + 1]):
            wanted += extents.wanted[extent]
        path = np.int64(extents.path[obj])
        if _fetch(obj, base, path, extents.held_address[obj], False, extents, setting, scratch) != wanted:
            return place
    return -1


@numba.njit(cache=True, nogil=True)
def _note_counters(step, results, counters):  # type: ignore[no-untyped-def]
    """Keeps the text of the counter files after a step; thread 0, while the others wait."""
    row = results.counter_text[step]
    for counter in range(len(counters.fd)):
        place = counters.first_byte[counter]
        size = counters.first_byte[counter + 1] - place
        results.counter_length[step, counter] = read_at(
            counters.fd[counter], row.ctypes.data + place, size, 0, size, 0, row
        )


@numba.njit(cache=True, nogil=True)
def _decide(event, setting, results):  # type: ignore[no-untyped-def]
    """Has the policy decide an event; False, and the pass stops, if it could not."""
    if _call_decide(setting.decide, setting.decide_on, event) == DECIDED:
        return True
    results.control[FAILED_DECISION] = event + 1
    results.control[STOP] = 1
    return False


@numba.njit(cache=True, nogil=True)
def _hand_over(place, hints, setting):  # type: ignore[no-untyped-def]
    """Gives the worker the hints of a place, 0 for before all, else an event + 1; thread 0 alone."""
    mail = hints.mailbox.ctypes.data
    for hint in range(hints.place_first_hint[place], hints.place_first_hint[place + 1]):
        hints.mailbox[SUBMITTED] += 1
        if setting.hint_slots == 0:
            before = exchange(mail + 8 * SLOT, hint + 1)
            if before != 0:
                # Its wake-up is still under way and will find this one.
                hints.state[before - 1] = HINT_OVERWRITTEN
                hints.mailbox[OVERWRITTEN] += 1
                continue
        elif hints.mailbox[PUT] - load_word(mail + 8 * TAKEN) >= setting.hint_slots:
            hints.state[hint] = HINT_DROPPED
            hints.mailbox[DROPPED] += 1
            continue
        else:
            hints.queue[hints.mailbox[PUT] % setting.hint_slots] = hint + 1
            add_to_word(mail + 8 * PUT, 1)
        c_sem_post(setting.hint_semaphore)


@numba.njit(cache=True, nogil=True)
def _begin(step, schedule, setting, results):  # type: ignore[no-untyped-def]
    """A step begins with its first decision; thread 0, while the others wait."""
    first = schedule.step_first_event[step]
    if setting.decide != 0 and setting.asked == 0 and first < schedule.step_first_event[step + 1]:
        _decide(first, setting, results)


@numba.njit(cache=True, nogil=True)
def _await(step, event, schedule, setting, results, clock):  # type: ignore[no-untyped-def]
    """Waits until an event is asked for; thread 0, while the others wait. A step begins when its first event is."""
    while _c_sem_wait(setting.asked) != 0:
        pass
    if event == schedule.step_first_event[step]:
        results.step_begin_ns[step] = now_ns(clock)
    if setting.decide != 0 and results.control[STOP] == 0:
        _decide(event, setting, results)


@numba.njit(cache=True, nogil=True)
def work(  # type: ignore[no-untyped-def]
    thread, schedule, extents, results, decisions, hints, setting, destinations, counters
):
    """Runs one demand thread through a pass; returns when the pass is over, was stopped, or an access failed."""
    clock = np.zeros(2, dtype=np.int64)
    stop = results.control.ctypes.data + 8 * STOP
    tickets = results.ticket.ctypes.data
    turn = 0
    if setting.barrier == 0:
        # One ticket runs through the whole schedule; an access knows its event for the digest only.
        event = 0
        while load_word(stop) == 0:
            access = add_to_word(tickets, 1)
            if access >= len(schedule.objects):
                break
            while schedule.event_first_access[event + 1] <= access:
                event += 1
            if setting.copy != 0 and turn >= destinations.slots.shape[1]:
                _call_synchronize(setting.synchronize, destinations.stream[thread])
            if not _access(
                thread, event, access, turn, schedule, extents, results, decisions, setting, destinations, clock
            ):
                results.control[FAILED_ACCESS] = access + 1
                results.control[STOP] = 1
            turn += 1
        return
    if len(schedule.step_first_event) > 1:
        if thread == 0:
            results.step_begin_ns[0] = now_ns(clock)
            _begin(0, schedule, setting, results)
            if setting.hint_semaphore != 0:
                _hand_over(0, hints, setting)
        # Nobody reads before the first step has begun.
        _c_barrier_wait(setting.barrier)
    for step in range(len(schedule.step_first_event) - 1):
        for event in range(schedule.step_first_event[step], schedule.step_first_event[step + 1]):
            turn = 0
            quit_slot = QUIT_EVEN + event % 2
            if setting.asked != 0:
                if thread == 0:
                    _await(step, event, schedule, setting, results, clock)
                _c_barrier_wait(setting.barrier)
            while True:
                access = schedule.event_first_access[event] + add_to_word(tickets + 8 * event, 1)
                if access >= schedule.event_first_access[event + 1]:
                    break
                if load_word(stop) != 0:
                    results.control[quit_slot] = 1
                    continue
                if setting.copy != 0 and turn >= destinations.slots.shape[1]:
                    _call_synchronize(setting.synchronize, destinations.stream[thread])
                if not _access(
                    thread, event, access, turn, schedule, extents, results, decisions, setting, destinations, clock
                ):
                    results.control[FAILED_ACCESS] = access + 1
                    results.control[quit_slot] = 1
                    results.control[STOP] = 1
                turn += 1
            if setting.copy != 0 and turn > 0:
                _call_synchronize(setting.synchronize, destinations.stream[thread])
            # Whoever left an access of the event undone has said so before the barrier, so all threads leave at the
            # same one, and the event does not count as ended. The next event has another slot: a slow thread may still
            # read this one.
            if thread == 0:
                if load_word(stop) != 0:
                    results.control[quit_slot] = 1
                results.control[EVENTS_DONE] = event + 1
            if setting.decide != 0 and setting.asked == 0 and event + 1 < schedule.step_first_event[step + 1]:
                # The last to arrive decides the next event; the others sleep once, as without a policy.
                arrived = add_to_word(results.control.ctypes.data + 8 * ARRIVED, 1)
                is_last = arrived % len(results.digest) == len(results.digest) - 1
                if is_last and results.control[quit_slot] == 0 and not _decide(event + 1, setting, results):
                    results.control[quit_slot] = 1
            _c_barrier_wait(setting.barrier)
            if setting.served != 0 and thread == 0:
                c_sem_post(setting.served)
            if results.control[quit_slot] != 0:
                return
            if setting.hint_semaphore != 0 and thread == 0:
                _hand_over(event + 1, hints, setting)
        if thread == 0:
            results.step_end_ns[step] = now_ns(clock)
        # All threads count, each its share of the files: a large pool has millions of pages.
        pages = resident_pages(
            extents, thread, len(results.digest), setting.residency, setting.page_bytes,
            destinations.scratch[thread], destinations.vector[thread],
        )  # fmt: skip
        add_to_word(results.resident_pages.ctypes.data + 8 * step, pages if pages >= 0 else np.int64(UNCOUNTED))
        _c_barrier_wait(setting.barrier)
        if thread == 0:
            _note_counters(step, results, counters)
            now = now_ns(clock)
            results.check_end_ns[step] = now
            if step + 1 < len(results.step_begin_ns):
                results.step_begin_ns[step + 1] = now
                _begin(step + 1, schedule, setting, results)
        _c_barrier_wait(setting.barrier)


class Barrier:
    """A pthread barrier of `num_threads`, kept alive by this object."""

    def __init__(self, num_threads: int) -> None:
        self._memory = np.zeros(BARRIER_BYTES // 8, dtype=np.uint64)
        self._libc = ctypes.CDLL(None)
        failed = self._libc.pthread_barrier_init(ctypes.c_void_p(self.address), None, ctypes.c_uint(num_threads))
        if failed:
            raise OSError(failed, "pthread_barrier_init failed")

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)


def no_hints() -> Hints:
    """For a loop that nobody hints."""
    longs = np.zeros(8, dtype=np.int64)
    return Hints(
        place_first_hint=longs, hint_first_object=longs, hint_objects=longs[:1].astype(np.int32),
        state=longs[:1].astype(np.uint8), hint_missing_pages=longs, hint_grown_pages=longs, hint_begin_ns=longs,
        hint_end_ns=longs, queue=longs, mailbox=longs,
    )  # fmt: skip


def compile_ahead() -> None:
    """Compiles the loop, or finds it compiled, in this process: its memory is not charged to a limited one then."""
    longs, ints, bytes_ = np.zeros(8, dtype=np.int64), np.zeros(1, dtype=np.int32), np.zeros((1, 64), dtype=np.uint8)
    words, page_bytes = np.zeros(1, dtype=np.uint64), 4096
    schedule = Schedule(step_first_event=longs[:1], event_first_access=longs, event_id=longs, objects=ints)
    extents = Extents(
        object_first_extent=longs, fd=ints, offset=longs, length=longs, skip=longs, wanted=longs, slot_offset=longs,
        first_word=longs, map_address=longs, held_offset=longs, file=ints, layer_id=longs, expert_id=longs, key=words,
        path=bytes_[0], held_address=longs, file_fd=ints[:0], file_bytes=longs[:0], file_map_address=longs[:0],
        file_name=longs[:0],
    )  # fmt: skip
    results = Results(
        begin_ns=longs, end_ns=longs, returned=longs, missing_pages=ints, path=bytes_[0], step_begin_ns=longs,
        step_end_ns=longs, check_end_ns=longs, resident_pages=longs, digest=words, wrong=longs, checked_words=longs,
        observe_ns=longs, verify_ns=longs, counter_text=bytes_, counter_length=ints.reshape(1, 1), ticket=longs,
        control=longs,
    )  # fmt: skip
    setting = Setting(
        barrier=1, decide=0, decide_on=0, page_bytes=page_bytes, residency=RESIDENCY_NONE, advice=-1, observe_every=0,
        announce_bytes=0, verify=VERIFY_NONE, copy=0, synchronize=0, hint_semaphore=0, hint_slots=0, asked=0, served=0,
    )  # fmt: skip
    destinations = Destinations(
        slots=bytes_.reshape(1, 1, 64), scratch=bytes_, vector=bytes_, device_address=longs, stream=longs
    )
    decisions = Decisions(address=longs, was_hit=bytes_[0])
    counters = Counters(fd=ints, first_byte=longs)
    work(0, schedule, extents, results, decisions, no_hints(), setting, destinations, counters)
    preload(0, 1, longs[:0], extents, setting, destinations)
    resident_pages(extents, 0, 1, RESIDENCY_NONE, page_bytes, bytes_[0], bytes_[0])
