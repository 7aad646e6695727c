"""The measured loop alone, in this process: what each access leaves behind, who waits for whom, how it stops."""

import ctypes
import dataclasses
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayer import loop
from replayer.content import access_digest, bytes_of, expert_key
from replayer.counters import cachestat, drop, mincore_pages, residency_counter
from tests.oracles import is_sampled

PAGE = os.sysconf("SC_PAGE_SIZE")
LAYER_ID = 7
NUM_OBJECTS = 24
EXPERT_BYTES = 3 * PAGE
RESIDENCY = {"cachestat": loop.RESIDENCY_CACHESTAT, "mincore": loop.RESIDENCY_MINCORE}[residency_counter()]
DIGEST_MASK = 2**64 - 1


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A descriptor of one file with NUM_OBJECTS experts, one after the other."""
    file = tmp_path_factory.mktemp("loop") / "experts"
    file.write_bytes(b"".join(bytes_of(LAYER_ID, expert, 0, EXPERT_BYTES).tobytes() for expert in range(NUM_OBJECTS)))
    descriptor = os.open(file, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@dataclasses.dataclass
class Bench:
    """Everything `loop.work` takes, for one schedule over one file; fields may be changed before `run`."""

    schedule: loop.Schedule
    extents: loop.Extents
    results: loop.Results
    decisions: loop.Decisions
    setting: loop.Setting
    destinations: loop.Destinations
    counters: loop.Counters
    owned: list[Any] = dataclasses.field(default_factory=list)

    @property
    def num_threads(self) -> int:
        return len(self.destinations.slots)

    def work(self, thread: int) -> None:
        loop.work(
            thread, self.schedule, self.extents, self.results, self.decisions, loop.no_hints(), self.setting,
            self.destinations, self.counters,
        )  # fmt: skip

    def start(self, threads: Sequence[int] | None = None) -> list[threading.Thread]:
        numbers = range(self.num_threads) if threads is None else threads
        started = [threading.Thread(target=self.work, args=(number,), daemon=True) for number in numbers]
        for thread in started:
            thread.start()
        return started

    def run(self, seconds: float = 30.0) -> None:
        join(self.start(), seconds)

    @property
    def digest(self) -> int:
        return int(self.results.digest.sum(dtype=np.uint64))


def join(threads: list[threading.Thread], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a demand thread hangs"


def bench(
    descriptor: int,
    steps: Sequence[Sequence[Sequence[int]]],
    *,
    threads: int = 2,
    slots: int = 1,
    counter_files: Sequence[tuple[int, int]] = (),
    **setting: int,
) -> Bench:
    """`steps` → events → objects. `counter_files`: (descriptor, bytes of its slot)."""
    events = [event for step in steps for event in step]
    objects = np.array([obj for event in events for obj in event], dtype=np.int32)
    accesses, num_steps = len(objects), len(steps)
    offsets = np.arange(NUM_OBJECTS, dtype=np.int64) * EXPERT_BYTES
    ones = np.ones(NUM_OBJECTS, dtype=np.int64)
    slot_bytes = 64 * 1024
    memory = mmap.mmap(-1, threads * slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    barrier = loop.Barrier(threads)
    places = np.concatenate([[0], np.cumsum([size for _, size in counter_files])]).astype(np.int64)
    extents = loop.Extents(
        object_first_extent=np.arange(NUM_OBJECTS + 1, dtype=np.int64),
        fd=np.full(NUM_OBJECTS, descriptor, dtype=np.int32),
        offset=offsets,
        length=ones * EXPERT_BYTES,
        skip=ones * 0,
        wanted=ones * EXPERT_BYTES,
        slot_offset=ones * 0,
        first_word=ones * 0,
        map_address=ones * 0,
        held_offset=ones * 0,
        file=np.zeros(NUM_OBJECTS, dtype=np.int32),
        layer_id=ones * LAYER_ID,
        expert_id=np.arange(NUM_OBJECTS, dtype=np.int64),
        key=np.array([expert_key(LAYER_ID, expert) for expert in range(NUM_OBJECTS)], dtype=np.uint64),
        path=np.full(NUM_OBJECTS, loop.BUFFERED, dtype=np.uint8),
        held_address=ones * 0,
        file_fd=np.array([descriptor], dtype=np.int32),
        file_bytes=np.array([NUM_OBJECTS * EXPERT_BYTES], dtype=np.int64),
        file_map_address=np.zeros(1, dtype=np.int64),
        file_name=np.zeros(1, dtype=np.int64),
    )
    results = loop.Results(
        begin_ns=np.zeros(accesses, dtype=np.int64),
        end_ns=np.zeros(accesses, dtype=np.int64),
        returned=np.full(accesses, loop.NOT_REACHED, dtype=np.int64),
        missing_pages=np.full(accesses, loop.NOT_OBSERVED, dtype=np.int32),
        path=np.full(accesses, loop.NOT_SERVED, dtype=np.uint8),
        step_begin_ns=np.zeros(num_steps, dtype=np.int64),
        step_end_ns=np.zeros(num_steps, dtype=np.int64),
        check_end_ns=np.zeros(num_steps, dtype=np.int64),
        resident_pages=np.zeros(num_steps, dtype=np.int64),
        digest=np.zeros(threads, dtype=np.uint64),
        wrong=np.zeros(threads, dtype=np.int64),
        checked_words=np.zeros(threads, dtype=np.int64),
        observe_ns=np.zeros(threads, dtype=np.int64),
        verify_ns=np.zeros(threads, dtype=np.int64),
        counter_text=np.zeros((num_steps, int(places[-1])), dtype=np.uint8),
        counter_length=np.zeros((num_steps, len(counter_files)), dtype=np.int32),
        ticket=np.zeros(max(len(events), 1), dtype=np.int64),
        control=np.zeros(8, dtype=np.int64),
    )
    plain = {
        "barrier": barrier.address, "decide": 0, "decide_on": 0, "page_bytes": PAGE, "residency": RESIDENCY,
        "advice": -1, "observe_every": 1, "announce_bytes": 0, "verify": loop.VERIFY_ALL, "copy": 0, "synchronize": 0,
        "hint_semaphore": 0, "hint_slots": 0,
    }  # fmt: skip
    return Bench(
        schedule=loop.Schedule(
            step_first_event=np.cumsum([0, *(len(step) for step in steps)]).astype(np.int64),
            event_first_access=np.cumsum([0, *(len(event) for event in events)]).astype(np.int64),
            event_id=np.arange(len(events), dtype=np.int64) * 3 + 11,
            objects=objects,
        ),
        extents=extents,
        results=results,
        decisions=loop.Decisions(np.zeros(accesses, dtype=np.int64), np.zeros(accesses, dtype=np.uint8)),
        setting=loop.Setting(**{**plain, **setting}),
        destinations=loop.Destinations(
            slots=np.frombuffer(memory, dtype=np.uint8).reshape(threads, slots, slot_bytes),
            scratch=np.zeros((threads, loop.SCRATCH_BYTES), dtype=np.uint8),
            vector=np.zeros((threads, 64), dtype=np.uint8),
            device_address=np.zeros(threads, dtype=np.int64),
            stream=np.zeros(threads, dtype=np.int64),
        ),
        counters=loop.Counters(np.array([fd for fd, _ in counter_files], dtype=np.int32), places),
        owned=[memory, barrier],
    )


def digest_of(steps: Sequence[Sequence[Sequence[int]]]) -> int:
    """The digest of a schedule, from the content function: every access once."""
    events = [event for step in steps for event in step]
    total = 0
    for number, event in enumerate(events):
        for expert in event:
            edges = bytes_of(LAYER_ID, expert, 0, 64), bytes_of(LAYER_ID, expert, EXPERT_BYTES - 64, 64)
            total += int(access_digest(np.int64(number * 3 + 11), np.int64(LAYER_ID), np.int64(expert), *edges))
    return total & DIGEST_MASK


events_of_a_step = st.lists(
    st.lists(st.integers(0, NUM_OBJECTS - 1), min_size=1, max_size=12, unique=True), min_size=1, max_size=5
)


@given(
    steps=st.lists(events_of_a_step, min_size=1, max_size=5),
    threads=st.integers(1, 8),
    has_barrier=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_access_is_made_exactly_once(pool: int, steps: Any, threads: int, has_barrier: bool) -> None:
    made = bench(pool, steps, threads=threads, **({} if has_barrier else {"barrier": 0}))
    made.run()
    assert (made.results.returned == EXPERT_BYTES).all()
    # A sum over accesses: one made twice, or for another event, would change it.
    assert made.digest == digest_of(steps)
    assert made.results.wrong.sum() == 0
    assert made.results.checked_words.sum() == len(made.schedule.objects) * EXPERT_BYTES // 8
    assert made.results.control[loop.FAILED_ACCESS] == 0


@given(steps=st.lists(events_of_a_step, min_size=2, max_size=6), threads=st.integers(2, 8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_access_begins_before_the_event_before_has_ended(pool: int, steps: Any, threads: int) -> None:
    made = bench(pool, steps, threads=threads)
    made.run()
    first, results = made.schedule.event_first_access, made.results
    for event in range(1, len(first) - 1):
        before, now = slice(first[event - 1], first[event]), slice(first[event], first[event + 1])
        assert results.begin_ns[now].min() >= results.end_ns[before].max()
    # Steps hold their events, follow each other without a gap, and end with their checks.
    step_first = first[made.schedule.step_first_event]
    for step in range(len(steps)):
        mine = slice(step_first[step], step_first[step + 1])
        assert results.step_begin_ns[step] <= results.begin_ns[mine].min()
        assert results.end_ns[mine].max() <= results.step_end_ns[step] <= results.check_end_ns[step]
    assert (results.step_begin_ns[1:] == results.check_end_ns[:-1]).all()
    assert results.control[loop.EVENTS_DONE] == len(first) - 1


def test_content_lies_in_the_slot_as_the_file_has_it(pool: int) -> None:
    made = bench(pool, [[[5]]], threads=1)
    made.run()
    assert (made.destinations.slots[0, 0, :EXPERT_BYTES] == bytes_of(LAYER_ID, 5, 0, EXPERT_BYTES)).all()


@pytest.mark.parametrize(
    ("verify", "place", "wrong"),
    [
        (loop.VERIFY_NONE, 0, 0),
        (loop.VERIFY_EDGES, 0, 1),
        (loop.VERIFY_EDGES, EXPERT_BYTES - 1, 1),
        (loop.VERIFY_EDGES, PAGE + 9, 0),
        (loop.VERIFY_ALL, PAGE + 9, 1),
    ],
)
def test_a_wrong_word_is_seen_where_it_is_looked_for(tmp_path: Path, verify: int, place: int, wrong: int) -> None:
    content = np.concatenate([bytes_of(LAYER_ID, expert, 0, EXPERT_BYTES) for expert in range(NUM_OBJECTS)])
    content[2 * EXPERT_BYTES + place] ^= 1
    (tmp_path / "experts").write_bytes(content.tobytes())
    with (tmp_path / "experts").open("rb") as file:
        made = bench(file.fileno(), [[[1, 2, 3]]], verify=verify)
        made.run()
    assert made.results.wrong.sum() == wrong
    looked_at = {loop.VERIFY_NONE: 0, loop.VERIFY_EDGES: 2 * PAGE, loop.VERIFY_ALL: EXPERT_BYTES}[verify]
    assert made.results.checked_words.sum() * 8 == 3 * looked_at


def with_bad_object(made: Bench, obj: int, **changes: Any) -> None:
    for name, value in changes.items():
        getattr(made.extents, name)[obj] = value


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", ["closed", "folder", "input/output", "misaligned"])
def test_an_error_is_kept_with_its_access_and_ends_the_pass_at_its_event(
    pool: int, tmp_path: Path, kind: str, threads: int
) -> None:
    # Step 0 is sound, the second event of step 1 is not, nothing of step 2 is reached.
    steps = [[[1, 2], [3, 4]], [[5, 6], [7, 8, 9]], [[10]]]
    made = bench(pool, steps, threads=threads)
    # A number that no open file has; −1 would ask for a file to be opened.
    descriptor, number, offset = 10**6, errno.EBADF, 0
    if kind == "folder":
        descriptor, number = os.open(tmp_path, os.O_RDONLY), errno.EISDIR
    elif kind == "input/output":
        # Nothing is mapped at address 0.
        descriptor, number = os.open("/proc/self/mem", os.O_RDONLY), errno.EIO
    elif kind == "misaligned":
        file = tmp_path / "direct"
        file.write_bytes(bytes(2 * EXPERT_BYTES))
        try:
            descriptor, number, offset = os.open(file, os.O_RDONLY | os.O_DIRECT), errno.EINVAL, 1
            os.preadv(descriptor, [mmap.mmap(-1, PAGE)], 1)
        except OSError as error:
            if descriptor == 10**6 or error.errno != errno.EINVAL:
                pytest.skip(f"O_DIRECT here: {error}")
        else:
            pytest.skip("O_DIRECT takes any offset here")
    with_bad_object(made, 7, fd=descriptor, offset=offset)
    made.setting = made.setting._replace(observe_every=0)
    made.run()
    if descriptor != 10**6:
        os.close(descriptor)
    bad = 6
    assert made.results.returned[bad] == -number
    assert made.results.control[loop.FAILED_ACCESS] == bad + 1
    assert (made.results.returned[:bad] == EXPERT_BYTES).all()
    # Others of the event may have been under way.
    assert set(made.results.returned[bad + 1 : 9].tolist()) <= {EXPERT_BYTES, loop.NOT_REACHED}
    assert made.results.returned[9] == loop.NOT_REACHED
    assert np.count_nonzero(made.results.check_end_ns) == 1
    assert made.results.control[loop.EVENTS_DONE] == 4


@pytest.mark.parametrize(("left", "returned"), [(PAGE + 100, PAGE + 100), (0, 0)])
def test_a_file_that_ends_early_returns_what_there_was(tmp_path: Path, left: int, returned: int) -> None:
    content = b"".join(bytes_of(LAYER_ID, expert, 0, EXPERT_BYTES).tobytes() for expert in range(3))
    (tmp_path / "short").write_bytes(content[: 2 * EXPERT_BYTES + left])
    with (tmp_path / "short").open("rb") as file:
        made = bench(file.fileno(), [[[0, 1, 2]], [[0]]], threads=1)
        made.run()
    assert made.results.returned.tolist() == [EXPERT_BYTES, EXPERT_BYTES, returned, loop.NOT_REACHED]
    assert made.results.control[loop.FAILED_ACCESS] == 3


def test_extents_of_one_expert_are_read_in_turn_and_the_first_bad_one_counts(pool: int, tmp_path: Path) -> None:
    """Three extents of a page; of the last expert the second one lies in a file that ends."""
    (tmp_path / "half").write_bytes(bytes(PAGE // 2))
    with (tmp_path / "half").open("rb") as file:
        made = bench(pool, [[[0]], [[1]]], threads=1, verify=loop.VERIFY_ALL)
        count = 6
        ones = np.ones(count, dtype=np.int64)
        page = np.arange(count, dtype=np.int64) % 3
        made.extents = made.extents._replace(
            object_first_extent=np.arange(0, count + 1, 3, dtype=np.int64),
            fd=np.array([pool] * 4 + [file.fileno(), pool], dtype=np.int32),
            offset=np.where(np.arange(count) == 4, 0, np.arange(count) * PAGE),
            length=ones * PAGE,
            skip=ones * 0,
            wanted=ones * PAGE,
            slot_offset=page * 16384 if PAGE <= 16384 else page * PAGE,
            first_word=page * PAGE // 8,
            map_address=ones * 0,
        )
        if 3 * max(PAGE, 16384) > made.destinations.slots.shape[2]:
            pytest.skip("pages larger than this test's slots")
        made.run()
    assert made.results.returned.tolist() == [3 * PAGE, PAGE + PAGE // 2]
    assert made.results.wrong.sum() == 0
    assert made.results.control[loop.FAILED_ACCESS] == 2


def test_what_is_read_around_an_expert_is_neither_counted_nor_checked(pool: int) -> None:
    """As O_DIRECT widens it: a sector before and one behind."""
    made = bench(pool, [[[3, 4]]], threads=1)
    made.extents.offset[:] -= 512
    made.extents.length[:] += 1024
    made.extents.skip[:] = 512
    made.run()
    assert made.results.returned.tolist() == [EXPERT_BYTES, EXPERT_BYTES]
    assert made.results.wrong.sum() == 0
    assert made.digest == digest_of([[[3, 4]]])


@pytest.mark.parametrize("observe_every", [0, 1, 3])
@pytest.mark.parametrize("kind", ["cachestat", "mincore"])
def test_pages_missing_before_each_read(tmp_path: Path, kind: str, observe_every: int) -> None:
    if kind == "cachestat" and residency_counter() != "cachestat":
        pytest.skip("this kernel has no cachestat")
    file = tmp_path / "experts"
    file.write_bytes(b"".join(bytes_of(LAYER_ID, expert, 0, EXPERT_BYTES).tobytes() for expert in range(NUM_OBJECTS)))
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    drop(descriptor)
    if mincore_pages(descriptor, 0, NUM_OBJECTS * EXPERT_BYTES):
        pytest.skip("the file system here keeps its pages")
    os.pread(descriptor, PAGE, 2 * EXPERT_BYTES)
    mapping = mmap.mmap(descriptor, NUM_OBJECTS * EXPERT_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
    # One thread, so that what the first event read is there for certain when the second one looks.
    made = bench(
        descriptor,
        [[[0, 1, 2, 3, 4, 5]], [[2, 1, 6]]],
        threads=1,
        observe_every=observe_every,
        residency={"cachestat": loop.RESIDENCY_CACHESTAT, "mincore": loop.RESIDENCY_MINCORE}[kind],
    )
    made.extents.map_address[:] = address
    made.extents.file_map_address[:] = address
    made.run()
    missing = np.array([3, 3, 2, 3, 3, 3, 0, 0, 3])
    observed = [observe_every > 0 and is_sampled(access, observe_every) for access in range(9)]
    assert made.results.missing_pages.tolist() == np.where(observed, missing, loop.NOT_OBSERVED).tolist()
    assert made.results.resident_pages.tolist() == [18, 21]
    if kind == "cachestat":
        assert cachestat(descriptor, 0, NUM_OBJECTS * EXPERT_BYTES).cached_pages == 21
    del made, mapping
    os.close(descriptor)


def test_residency_that_the_kernel_does_not_tell_is_negative_whatever_the_other_files_hold(pool: int) -> None:
    made = bench(pool, [[[0]], [[1]]], residency=loop.RESIDENCY_CACHESTAT)
    made.extents = made.extents._replace(
        file_fd=np.array([pool, -1, pool], dtype=np.int32),
        file_bytes=np.array([NUM_OBJECTS * EXPERT_BYTES] * 3, dtype=np.int64),
        file_map_address=np.zeros(3, dtype=np.int64),
    )
    made.run()
    assert (made.results.resident_pages < 0).all()


def test_counter_files_are_kept_after_each_step_up_to_their_slots(pool: int, tmp_path: Path) -> None:
    (tmp_path / "counter").write_bytes(b"limit 1234\n")
    short = os.open(tmp_path / "counter", os.O_RDONLY)
    status = os.open("/proc/self/status", os.O_RDONLY)
    made = bench(
        pool, [[[0]], [[1]], [[2]]], counter_files=[(short, 64), (status, 100), (-1, 8)], verify=loop.VERIFY_NONE
    )
    made.run()
    os.close(short)
    os.close(status)
    assert made.results.counter_length.tolist() == [[11, 100, -errno.EBADF]] * 3
    for row in made.results.counter_text:
        assert row[:64].tobytes() == b"limit 1234\n" + bytes(53)
        assert row[64:164].tobytes().startswith(b"Name:\t")
        assert not row[164:].any()


@pytest.mark.parametrize("has_barrier", [True, False])
def test_the_stop_flag_ends_all_threads_at_once(pool: int, has_barrier: bool) -> None:
    steps = [[list(range(16))] * 100] * 500
    made = bench(pool, steps, threads=8, **({} if has_barrier else {"barrier": 0}))
    started = made.start()
    deadline = time.monotonic() + 10
    while not (made.results.returned[:5000] == EXPERT_BYTES).any() and time.monotonic() < deadline:
        time.sleep(0.001)
    made.results.control[loop.STOP] = 1
    begin = time.monotonic()
    join(started)
    assert time.monotonic() - begin < 1
    assert made.results.control[loop.FAILED_ACCESS] == 0
    reached = made.results.returned != loop.NOT_REACHED
    assert 0 < np.count_nonzero(reached) < len(reached)


def test_stopped_before_it_begins_reads_nothing_of_the_second_event(pool: int) -> None:
    made = bench(pool, [[[0, 1], [2, 3]]], threads=3)
    made.results.control[loop.STOP] = 1
    made.run()
    assert (made.results.returned == loop.NOT_REACHED).all()


def test_the_interpreter_goes_on_while_threads_read_and_wait(pool: int) -> None:
    """Thread 0 waits in the barrier for a thread that only this one, going on, can start."""
    made = bench(pool, [[[0]], [[1]]], threads=2)
    first = made.start([0])
    counted = 0
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        counted += 1
    assert first[0].is_alive()
    assert counted > 1000
    join(first + made.start([1]))
    assert (made.results.returned == EXPERT_BYTES).all()


Copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
Synchronize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def with_accelerator(made: Bench, copy: Callable[..., int] | None = None) -> SimpleNamespace:
    """Gives the bench an accelerator of plain memory; what it is called with is kept in order."""
    threads, _, slot_bytes = made.destinations.slots.shape
    seen = SimpleNamespace(calls=[], memory=np.zeros((threads, slot_bytes), dtype=np.uint8))

    def copied(target: int, source: int, size: int, kind: int, stream: int | None) -> int:
        seen.calls.append(("copy", target, source, size, kind, stream))
        ctypes.memmove(target, source, size)
        return 0 if copy is None else copy(target, source, size)

    def synchronized(stream: int | None) -> int:
        seen.calls.append(("synchronize", stream))
        return 0

    seen.functions = Copy(copied), Synchronize(synchronized)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in seen.functions]
    made.setting = made.setting._replace(copy=addresses[0], synchronize=addresses[1])
    made.destinations.device_address[:] = [int(row.ctypes.data) for row in seen.memory]
    made.destinations.stream[:] = 1000 + np.arange(threads)
    return seen


def test_each_expert_is_copied_to_the_accelerator_and_waited_for_per_event(pool: int) -> None:
    steps = [[[4, 5, 6], [7]], [[8, 9]]]
    made = bench(pool, steps, threads=1, slots=2)
    seen = with_accelerator(made)
    made.run()
    slots = [int(made.destinations.slots[0, slot].ctypes.data) for slot in range(2)]
    target = int(made.destinations.device_address[0])

    def copy(slot: int) -> tuple[object, ...]:
        return "copy", target, slots[slot], EXPERT_BYTES, 1, 1000

    wait = ("synchronize", 1000)
    # A slot is written again only after its copy was waited for; every event ends with a wait.
    assert seen.calls == [copy(0), copy(1), wait, copy(0), wait, copy(0), wait, copy(0), copy(1), wait]
    assert (seen.memory[0, :EXPERT_BYTES] == bytes_of(LAYER_ID, 9, 0, EXPERT_BYTES)).all()


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_copy_to_their_own_places_on_their_own_streams(pool: int, threads: int) -> None:
    steps = [[list(range(12))], [list(range(6, 20))]]
    made = bench(pool, steps, threads=threads, slots=2)
    seen = with_accelerator(made)
    made.run()
    copies = [call for call in seen.calls if call[0] == "copy"]
    assert len(copies) == 26
    for _, target, source, size, kind, stream in copies:
        thread = made.destinations.device_address.tolist().index(target)
        own = made.destinations.slots[thread]
        assert source in [int(slot.ctypes.data) for slot in own]
        assert (size, kind, stream) == (EXPERT_BYTES, 1, 1000 + thread)


def test_a_copy_that_fails_ends_the_pass_with_its_number(pool: int) -> None:
    made = bench(pool, [[[0, 1]], [[2]]], threads=1)
    with_accelerator(made, copy=lambda *_: 700)
    made.run()
    assert made.results.returned.tolist() == [-1_000_700, loop.NOT_REACHED, loop.NOT_REACHED]
    assert made.results.control[loop.FAILED_ACCESS] == 1


def test_copying_skips_what_was_read_around_an_expert(pool: int) -> None:
    made = bench(pool, [[[3]]], threads=1)
    made.extents.offset[:] -= 512
    made.extents.length[:] += 1024
    made.extents.skip[:] = 512
    seen = with_accelerator(made)
    made.run()
    (_, target, source, size, _, _), _ = seen.calls
    assert target - int(made.destinations.device_address[0]) == 512
    assert source - int(made.destinations.slots[0, 0].ctypes.data) == 512
    assert size == EXPERT_BYTES
    assert (seen.memory[0, 512 : 512 + size] == bytes_of(LAYER_ID, 3, 0, EXPERT_BYTES)).all()


def test_a_barrier_for_nobody_is_refused() -> None:
    with pytest.raises(OSError, match="pthread_barrier_init"):
        loop.Barrier(0)
