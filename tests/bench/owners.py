"""What owners that lock memory cost: hits against a copy loop in C, misses of a user-space cache against fio.

Arms, pairs and bounds are those of `loop`. The C loop copies from the same locked memory into the same slots with the
same threads, tickets and barriers; fio reads the same extents in the same order with O_DIRECT, but into small pages, so
the C loop with O_DIRECT, which has our huge pages, stands beside it.
"""

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from replayer import loop
from replayer.device import Locked, lock
from replayer.user_cache import UserCache, plan_slots
from tests.bench.loop import (
    FILE_BYTES,
    READS_PER_EVENT,
    THREADS,
    Fio,
    Reads,
    Run,
    build_program,
    drop,
    interleaved,
    opened,
    report,
    report_ratio,
    write_files,
)

SIZES = {"256 KiB": 2**18, "1 MiB": 2**20, "3 MiB": 3 * 2**20}
HIT_PASSES = 2


class Held(Reads):
    """Reads whose extents lie in locked memory."""

    def hold(self) -> Locked:
        """Locks memory for all extents and says so to both loops."""
        size = int(self.extents.length[0])
        objects = len(self.extents.path)
        memory = lock(objects * size)
        address = memory.address + np.arange(objects) * size
        self.extents = self.extents._replace(
            path=np.full(objects, loop.HELD, dtype=np.uint8), held_address=address.astype(np.int64)
        )
        self.source_of_access = address[self.schedule.objects].astype(np.int64)
        return memory

    def by_policy(self, cache_of: Callable[[], UserCache]) -> Callable[[], Run]:
        """Our loop with an LRU over locked slots, which the last thread of an event asks about the next."""

        def run() -> Run:
            barrier = loop.Barrier(THREADS)
            decider = cache_of().over(self.schedule, self.decisions, *self.one_cache, None)
            setting = loop.Setting(
                barrier=barrier.address,
                decide=decider.function_address,
                decide_on=decider.stage_address,
                page_bytes=os.sysconf("SC_PAGE_SIZE"),
                residency=loop.RESIDENCY_CACHESTAT,
                advice=-1,
                observe_every=0,
                announce_bytes=0,
                verify=loop.VERIFY_NONE,
                copy=0,
                synchronize=0,
                hint_semaphore=0,
                hint_slots=0,
            )
            gate = threading.Barrier(THREADS + 1)

            def demand(number: int) -> None:
                gate.wait()
                loop.work(
                    number, self.schedule, self.extents, self.results, self.decisions, loop.no_hints(), setting,
                    self.destinations, self.counters,
                )  # fmt: skip

            return self._run([threading.Thread(target=demand, args=(number,)) for number in range(THREADS)], gate)

        return run

    @property
    def one_cache(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """(cache, step) of each event: all of one cache and step."""
        nothing = np.zeros(len(self.schedule.event_id), dtype=np.int64)
        return nothing.astype(np.int32), nothing


def cache_of(region: Locked, objects: int, slot_bytes: int, slots: int, *, filled: bool) -> UserCache:
    """An LRU over `slots` slots in locked memory; filled: it holds every object already."""
    sizes = plan_slots(
        "lru", slots * slot_bytes, np.array([0, objects]), np.full(objects, slot_bytes), np.array([READS_PER_EVENT])
    )
    cache = UserCache("lru", sizes, region_address=region.address)
    if filled:
        each, zeros = np.arange(objects), np.zeros(objects, dtype=np.int64)
        schedule = loop.Schedule(np.array([0, objects]), np.arange(objects + 1), each, each.astype(np.int32))
        decider = cache.over(
            schedule, loop.Decisions(zeros, zeros.astype(np.uint8)), zeros.astype(np.int32), zeros, None
        )
        for event in range(objects):
            decider.decide(event)
    return cache


def measure_hits(paths: list[Path], label: str, samples: int, folder: Path) -> None:
    """Prints the hits of an arena and of a user-space cache against the copy loop."""
    program = build_program(folder)
    if program is None:
        report(f"hits ÷ copy loop in C, {label}", "skipped: no C compiler here")
        return
    size = SIZES[label]
    descriptors = opened(paths)
    extents = sum(length // size for length in FILE_BYTES)
    order = np.random.default_rng(len(label))
    objects = np.concatenate([order.permutation(extents) for _ in range(HIT_PASSES)])
    reads = Held(descriptors, objects, size)
    memory = reads.hold()
    works = {
        "arena": lambda: reads.by_numba(barrier=True),
        "user cache": reads.by_policy(lambda: cache_of(memory, extents, size, extents, filled=True)),
        "C": lambda: reads.by_c(program, barrier=True),
    }
    runs = interleaved(works, 3 * samples, random.Random(label))
    for name in ("arena", "user cache"):
        report_ratio(f"{name} hits ÷ copy loop in C, {label}", runs, (name, "C"), reads.bytes, 0.95)
    for descriptor in descriptors:
        os.close(descriptor)


def measure_misses(paths: list[Path], label: str, samples: int, folder: Path) -> None:
    """Prints the misses of a user-space cache, each read by O_DIRECT into a slot, against fio and the C loop."""
    program = build_program(folder)
    size = SIZES[label]
    buffered = opened(paths)
    try:
        direct = opened(paths, os.O_DIRECT)
    except OSError as error:
        report(f"user cache misses, {label}", f"skipped: no O_DIRECT here ({error.strerror})")
        return
    extents = sum(length // size for length in FILE_BYTES)
    reads = Held(direct, np.random.default_rng(len(label)).permutation(extents), size)
    reads.extents = reads.extents._replace(path=np.full(extents, loop.DIRECT, dtype=np.uint8))
    slots = min(extents // 4, 2**29 // size)
    memory = lock(slots * size)
    # Each extent is accessed once, so all are misses, and all but the first few take the slot of another.
    missing = reads.by_policy(lambda: cache_of(memory, extents, size, slots, filled=False))

    def ours() -> Run:
        drop(buffered)
        return missing()

    works = {"user cache": ours}
    if program is not None:
        works["C"] = lambda: reads.by_c(program, barrier=True)
    if shutil.which("fio"):
        fio = Fio(reads, paths, folder / f"fio direct {size}", direct=True)

        def by_fio() -> Run:
            drop(buffered)
            return fio.run()

        works["fio"] = by_fio
    runs = interleaved(works, samples, random.Random(label))
    if "fio" in works:
        report_ratio(f"user cache misses ÷ fio, O_DIRECT, {label}", runs, ("user cache", "fio"), reads.bytes, 0.95)
    else:
        report(f"user cache misses ÷ fio, O_DIRECT, {label}", "skipped: no fio here")
    if program is not None:
        report_ratio(f"user cache misses ÷ C with barrier, {label}", runs, ("user cache", "C"), reads.bytes)
    for descriptor in (*buffered, *direct):
        os.close(descriptor)


def main(samples: int) -> None:
    """Measures hits and misses; needs 2 GB of disk and locks 2 GB at most."""
    with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as name:
        folder = Path(name)
        paths = write_files(folder, FILE_BYTES)
        for label in SIZES:
            measure_hits(paths, label, samples, folder)
        for label in SIZES:
            measure_misses(paths, label, samples, folder)
