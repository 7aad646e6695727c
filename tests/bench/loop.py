"""The measured loop against fio and against the same loop in C (`loop.c`), its CPU time per access, and its memory.

Ratios are of speed, ours ÷ theirs, medians of interleaved pairs in random order; the bound beside a median is exceeded
by the true median with 95 % confidence, from order statistics alone. All arms read the same extents of the same files
with FADV_RANDOM; our loop and the C one also share process, descriptors and slots, and both time each access. A run
that others disturbed is made again. Cold means: dropped, and not one page cached before the run.
"""

import ctypes
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from replayer import loop
from replayer.content import expert_key, fill
from replayer.counters import PAGE_BYTES, cached_pages
from replayer.device import allocate

THREADS, READS_PER_EVENT = 8, 16
EXPERT_BYTES = {"1 MiB": 2**20, "3 MiB": 3 * 2**20, "17 MB": 16_998_400}
FILE_BYTES = [16 * 16_998_400] * 7
WARM_PASSES = 2
"""How often a warm run reads everything: one pass takes a tenth of a second, too few ticks to see others in."""

SMALL_BYTES = 4096
SMALL_EVENTS = 40_000
MEMORY_STEPS, MEMORY_EVENTS = 1500, 92
MEMORY_SLACK_BYTES = 2**20
"""What RssAnon may be off by: each CPU keeps a part of the count to itself."""

FOREIGN_SHARE = 0.08
"""Of the CPU time of the machine: a run beside more foreign load is made again."""

TRIES = 3
POINTLESS_ROUNDS = 4
"""Rounds in a row with a disturbed run in each, after which a measurement ends."""


class Run(NamedTuple):
    """One run: seconds from its first read's begin to its last read's end, and the CPU time it spent in user mode."""

    seconds: float
    user_s: float | None = None


class Plan(ctypes.Structure):
    """`struct plan` of loop.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_threads", "num_events", "has_barrier", "slot_bytes")),
        *((name, ctypes.c_void_p) for name in ("event_first_access", "fd", "offset", "length", "source", "slots")),
        *((name, ctypes.c_void_p) for name in ("ticket", "stop", "begin_ns", "end_ns", "returned")),
    )


class Reads:
    """What is read, ready for either loop: files cut into extents of one size, and the order in which they are read.

    objects: (accesses,) extents by number, through all files; all steps have the same number of events.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        objects: np.ndarray,
        extent_bytes: int,
        *,
        steps: int = 1,
        observed: Sequence[int] = (),
        counters: Sequence[int] = (),
    ) -> None:
        sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        extents = sum(size // extent_bytes for size in sizes)
        file = np.repeat(np.arange(len(sizes)), [size // extent_bytes for size in sizes])
        offset = np.concatenate([np.arange(size // extent_bytes) * extent_bytes for size in sizes])
        events = len(objects) // READS_PER_EVENT
        accesses = events * READS_PER_EVENT
        nothing = np.zeros(extents, dtype=np.int64)
        self.files, self.bytes = file, accesses * extent_bytes
        self.schedule = loop.Schedule(
            step_first_event=np.linspace(0, events, steps + 1).astype(np.int64),
            event_first_access=np.arange(events + 1) * READS_PER_EVENT,
            event_id=np.arange(events),
            objects=objects[:accesses].astype(np.int32),
        )
        self.extents = loop.Extents(
            object_first_extent=np.arange(extents + 1),
            fd=np.asarray(descriptors, dtype=np.int32)[file],
            offset=offset,
            length=nothing + extent_bytes,
            skip=nothing,
            wanted=nothing + extent_bytes,
            slot_offset=nothing,
            first_word=offset // 8,
            map_address=nothing,
            held_offset=nothing,
            file=file.astype(np.int32),
            layer_id=file,
            expert_id=nothing,
            key=np.array([expert_key(number, 0) for number in range(len(sizes))], dtype=np.uint64)[file],
            path=np.full(extents, loop.BUFFERED, dtype=np.uint8),
            held_address=np.zeros(extents, dtype=np.int64),
            file_fd=np.asarray(observed, dtype=np.int32),
            file_bytes=np.array([os.fstat(descriptor).st_size for descriptor in observed], dtype=np.int64),
            file_map_address=np.zeros(len(observed), dtype=np.int64),
            file_name=np.zeros(len(observed), dtype=np.int64),
        )
        self.counters = loop.Counters(
            fd=np.asarray(counters, dtype=np.int32), first_byte=np.arange(len(counters) + 1) * 2**14
        )
        by_thread = {name: np.zeros(THREADS, dtype=np.int64) for name in ("wrong", "checked_words", "observe_ns")}
        steps_ns = {name: np.zeros(steps, dtype=np.int64) for name in ("step_begin_ns", "step_end_ns", "check_end_ns")}
        self.results = loop.Results(
            begin_ns=np.zeros(accesses, dtype=np.int64),
            end_ns=np.zeros(accesses, dtype=np.int64),
            returned=np.zeros(accesses, dtype=np.int64),
            missing_pages=np.zeros(accesses, dtype=np.int32),
            path=np.zeros(accesses, dtype=np.uint8),
            resident_pages=np.zeros(steps, dtype=np.int64),
            digest=np.zeros(THREADS, dtype=np.uint64),
            verify_ns=np.zeros(THREADS, dtype=np.int64),
            counter_text=np.zeros((steps, len(counters) * 2**14), dtype=np.uint8),
            counter_length=np.zeros((steps, len(counters)), dtype=np.int32),
            ticket=np.zeros(events, dtype=np.int64),
            control=np.zeros(8, dtype=np.int64),
            **by_thread,
            **steps_ns,
        )
        self.decisions = loop.Decisions(np.zeros(accesses, dtype=np.int64), np.zeros(accesses, dtype=np.uint8))
        # Zeroed memory is not there before it is written to.
        for array in self.results:
            array.fill(1)
        # As owners.plan_reads makes them.
        slot_bytes = -(-(extent_bytes + 2 * 512) // 65536) * 65536
        self.region = allocate("none", THREADS, 1, slot_bytes)
        self.destinations = loop.Destinations(
            slots=self.region.slots,
            scratch=np.zeros((THREADS, loop.SCRATCH_BYTES), dtype=np.uint8),
            vector=np.zeros((THREADS, 1), dtype=np.uint8),
            device_address=self.region.device_address,
            stream=self.region.stream,
        )
        self.barrier = loop.Barrier(THREADS)
        self.fd_of_access = self.extents.fd[self.schedule.objects]
        self.offset_of_access = offset[self.schedule.objects]
        self.length_of_access = self.extents.length[self.schedule.objects]
        self.source_of_access: np.ndarray | None = None
        self.failed = np.ones(accesses, dtype=bool)

    def by_numba(self, *, barrier: bool, observe_every: int = 0, verify: int = loop.VERIFY_NONE) -> Run:
        """Our loop, on Python threads that are there before the clock runs."""
        setting = loop.Setting(
            barrier=self.barrier.address if barrier else 0,
            decide=0,
            decide_on=0,
            page_bytes=PAGE_BYTES,
            residency=loop.RESIDENCY_CACHESTAT,
            advice=-1,
            observe_every=observe_every,
            announce_bytes=0,
            verify=verify,
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

    def by_c(self, program: ctypes.CDLL, *, barrier: bool) -> Run:
        """The loop of loop.c."""
        results = self.results
        plan = Plan(
            THREADS,
            len(self.schedule.event_id),
            barrier,
            self.destinations.slots.shape[2],
            self.schedule.event_first_access.ctypes.data,
            self.fd_of_access.ctypes.data,
            self.offset_of_access.ctypes.data,
            self.length_of_access.ctypes.data,
            None if self.source_of_access is None else self.source_of_access.ctypes.data,
            self.destinations.slots.ctypes.data,
            results.ticket.ctypes.data,
            results.control.ctypes.data + 8 * loop.STOP,
            results.begin_ns.ctypes.data,
            results.end_ns.ctypes.data,
            results.returned.ctypes.data,
        )
        gate = threading.Barrier(2)

        def call() -> None:
            gate.wait()
            failed = program.run(ctypes.byref(plan))
            if failed:
                print(f"the C loop could not start: {os.strerror(failed)}", file=sys.stderr)

        # The main thread stays free for an interrupt.
        return self._run([threading.Thread(target=call)], gate)

    def _run(self, threads: Sequence[threading.Thread], gate: threading.Barrier) -> Run:
        results = self.results
        results.returned.fill(loop.NOT_REACHED)
        for array in (results.ticket, results.control, results.wrong, results.resident_pages):
            array.fill(0)
        try:
            for thread in threads:
                thread.start()
            user_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            gate.wait()
            for thread in threads:
                thread.join()
        except BaseException:
            results.control[loop.STOP] = 1
            gate.abort()
            for thread in threads:
                thread.join()
            raise
        user_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - user_s
        # Into memory that is there: a long run's is watched.
        np.not_equal(results.returned, self.length_of_access, out=self.failed)
        if self.failed.any():
            first = int(self.failed.argmax())
            raise SystemExit(
                f"{self.failed.sum()} of {len(results.returned)} reads failed; the first: access {first} gave "
                f"{results.returned[first]} instead of {self.length_of_access[first]} bytes"
            )
        return Run(float(results.end_ns.max() - results.begin_ns.min()) / 1e9, user_s)


class Fio:
    """fio with psync and one process per thread of ours, each replaying every eighth access."""

    def __init__(self, reads: Reads, paths: Sequence[Path], folder: Path, *, direct: bool = False) -> None:
        self.folder, self.bytes = folder, reads.bytes
        folder.mkdir()
        objects = reads.schedule.objects
        jobs = "[global]\nioengine=psync\nrw=read\niodepth=1\ninvalidate=0\nfadvise_hint=random\n"
        jobs += "direct=1\n" if direct else ""
        for number in range(THREADS):
            lines = ["fio version 2 iolog"]
            for action in ("add", "open"):
                lines += [f"{path} {action}" for path in paths]
            for access in range(number, len(objects), THREADS):
                path = paths[reads.files[objects[access]]]
                lines.append(f"{path} read {reads.offset_of_access[access]} {reads.length_of_access[access]}")
            lines += [f"{path} close" for path in paths]
            (folder / f"{number}.iolog").write_text("\n".join(lines) + "\n")
            jobs += f"[job{number}]\nread_iolog={folder / f'{number}.iolog'}\n"
        (folder / "jobs.fio").write_text(jobs)

    def run(self) -> Run:
        """One run; its seconds are those of the longest job, in milliseconds, so a little less than all took."""
        result = self.folder / "result.json"
        command = ["fio", "--output-format=json", f"--output={result}", str(self.folder / "jobs.fio")]
        with subprocess.Popen(command, cwd=self.folder) as child:
            try:
                status = child.wait()
            except BaseException:
                # Killed outright, it would leave its jobs behind.
                child.send_signal(signal.SIGINT)
                raise
        text = result.read_text()
        jobs = json.loads(text[text.index("{") :])["jobs"]
        read_bytes = sum(job["read"]["io_bytes"] for job in jobs)
        if status or any(job["error"] for job in jobs) or read_bytes != self.bytes:
            raise SystemExit(f"fio exited {status} and read {read_bytes:,} of {self.bytes:,} bytes: {text[:500]}")
        return Run(max(job["read"]["runtime"] for job in jobs) / 1000)


def build_program(folder: Path) -> ctypes.CDLL | None:
    """loop.c as a library; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "loop.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    program = ctypes.CDLL(str(library))
    program.run.argtypes = [ctypes.POINTER(Plan)]
    return program


def write_files(folder: Path, sizes: Sequence[int]) -> list[Path]:
    """Synced files of incompressible content, known to verification."""
    paths = [folder / f"{number}.bin" for number in range(len(sizes))]
    block = np.empty(2**24, dtype=np.uint8)
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        with path.open("wb") as file:
            for begin in range(0, size, len(block)):
                fill(block, np.uint64(expert_key(number, 0)), begin // 8)
                file.write(block[: size - begin])
            file.flush()
            os.fsync(file.fileno())
    return paths


def opened(paths: Sequence[Path], flags: int = 0) -> list[int]:
    """Descriptors as the replay opens them."""
    descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags) for path in paths]
    for descriptor in descriptors:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptors


def cached(descriptors: Sequence[int]) -> int:
    """Pages of the files in memory."""
    return sum(cached_pages(descriptor, 0, os.fstat(descriptor).st_size) for descriptor in descriptors)


def drop(descriptors: Sequence[int]) -> None:
    """Leaves no page of the files in memory."""
    for _ in range(10):
        for descriptor in descriptors:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        left = cached(descriptors)
        if left == 0:
            return
        time.sleep(0.1)
    raise SystemExit(f"{left} pages stay in memory after FADV_DONTNEED: no cold run on this file system")


def warm(descriptors: Sequence[int]) -> None:
    """Reads whatever is not in memory; filled under FADV_RANDOM, as in a replay."""
    buffer = bytearray(2**24)
    for descriptor in descriptors:
        size = os.fstat(descriptor).st_size
        if cached_pages(descriptor, 0, size) < -(-size // PAGE_BYTES):
            for begin in range(0, size, len(buffer)):
                os.preadv(descriptor, [buffer], begin)


def busy_s() -> float:
    """CPU seconds that all processes have taken, and the hypervisor has withheld, interrupts left out."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, _, _, steal = (int(field) for field in fields[:8])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def undisturbed(work: Callable[[], Run]) -> Run | None:
    """A run beside little foreign load; None if there was none in a few tries."""
    for _ in range(TRIES):
        started, busy, own = time.perf_counter(), busy_s(), own_s()
        run = work()
        foreign_s = busy_s() - busy - (own_s() - own)
        if foreign_s <= FOREIGN_SHARE * (time.perf_counter() - started) * (os.cpu_count() or 1):
            return run
        time.sleep(0.5)
    return None


def interleaved(
    works: dict[str, Callable[[], Run]], samples: int, generator: random.Random
) -> dict[str, list[Run | None]]:
    """Runs of each work, in rounds of random order; the first round, which compiles and touches, is not counted.

    Rounds that lack a run are made up for by others, at most as many again, until there is no point in it.
    """
    for work in works.values():
        work()
    runs: dict[str, list[Run | None]] = {name: [] for name in works}
    whole = pointless = 0
    for _ in range(2 * samples):
        for name in generator.sample(list(works), len(works)):
            runs[name].append(undisturbed(works[name]))
        is_whole = all(found[-1] is not None for found in runs.values())
        whole += is_whole
        pointless = 0 if is_whole else pointless + 1
        if whole == samples or pointless == POINTLESS_ROUNDS:
            break
    return runs


def lower_bound(values: Sequence[float]) -> float | None:
    """What the true median exceeds with 95 % confidence or more; None of fewer than five values.

    The k-th smallest of n is above the median only if fewer than k values are below it: Binomial(n, 1/2).
    """
    chance, count = 0.0, len(values)
    bound = None
    term = 0.5**count
    for rank, value in enumerate(sorted(values)):
        chance += term
        if chance > 0.05:
            break
        bound = value
        term *= (count - rank) / (rank + 1)
    return bound


def report(what: str, found: str, wanted: str = "", reached: bool | None = None) -> None:
    """One line per figure; no verdict on a figure without a bar."""
    verdict = {True: "reached", False: "MISSED", None: "unmeasured" if wanted else ""}[reached]
    line = f"{what:<44} {found:<66} {f'wanted {wanted}' if wanted else '':<28} {verdict}"
    print(line.rstrip(), flush=True)


def report_ratio(
    what: str,
    runs: dict[str, list[Run | None]],
    names: tuple[str, str],
    read_bytes: int,
    bar: float | None = None,
    bound_bar: float | None = None,
) -> None:
    """Our speed, names[0], as a part of theirs, names[1], over the rounds in which neither was disturbed."""
    pairs = [pair for pair in zip(*(runs[name] for name in names), strict=True) if None not in pair]
    wanted = "" if bar is None else f"≥ {bar}" + ("" if bound_bar is None else f", bound ≥ {bound_bar:.2f}")
    if not pairs:
        report(what, "every pair was disturbed", wanted)
        return
    ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
    ratio, bound = statistics.median(ratios), lower_bound(ratios)
    ours_speed, their_speed = (
        read_bytes / statistics.median(run.seconds for run in side) / 1e6 for side in zip(*pairs, strict=True)
    )
    found = (
        f"{ratio:.3f} ({'no bound' if bound is None else f'bound {bound:.3f}'}, {len(pairs)} pairs, "
        f"{ours_speed:,.0f} against {their_speed:,.0f} MB/s)"
    )
    reached = None if bar is None else ratio >= bar
    if reached and bound_bar is not None:
        reached = None if bound is None else bound >= bound_bar
    report(what, found, wanted, reached)


def report_price(what: str, runs: dict[str, list[Run | None]], names: tuple[str, str], events: int) -> None:
    """What a barrier adds to an event: runs with one, names[0], less those without, names[1]."""
    pairs = [pair for pair in zip(*(runs[name] for name in names), strict=True) if None not in pair]
    if pairs:
        prices = [(less.seconds, (more.seconds - less.seconds) / events * 1e6) for more, less in pairs]
        price_us = statistics.median(price for _, price in prices)
        event_us = statistics.median(seconds for seconds, _ in prices) / events * 1e6
        report(what, f"{price_us:.1f} µs per event of {event_us:,.1f} µs without")


def loops(reads: Reads, program: ctypes.CDLL | None, prepare: Callable[[], None]) -> dict[str, Callable[[], Run]]:
    """Every way of running the two loops, each after the same preparation."""

    def arm(work: Callable[..., Run], *arguments: Any, barrier: bool) -> Callable[[], Run]:
        def run() -> Run:
            prepare()
            return work(*arguments, barrier=barrier)

        return run

    works = {
        "numba": arm(reads.by_numba, barrier=False),
        "numba, barrier": arm(reads.by_numba, barrier=True),
    }
    if program is not None:
        works["C"] = arm(reads.by_c, program, barrier=False)
        works["C, barrier"] = arm(reads.by_c, program, barrier=True)
    return works


def measure_size(folder: Path, paths: list[Path], size: str, samples: int, program: ctypes.CDLL | None) -> None:
    """Prints all bars of one expert size: cold, O_DIRECT, warm."""
    generator = random.Random(size)
    order = np.random.default_rng(len(size))
    extents = sum(length // EXPERT_BYTES[size] for length in FILE_BYTES)
    buffered = opened(paths)
    try:
        direct = opened(paths, os.O_DIRECT)
    except OSError as error:
        direct = []
        report(f"O_DIRECT, {size}", f"skipped: no O_DIRECT here ({error.strerror})")
    # Speed drifts by a tenth from second to second: what is short is paired more often, which costs little.
    for kind, descriptors, passes, pairs, prepare in (
        ("cold", buffered, 1, samples, drop),
        ("O_DIRECT", direct, 1, 2 * samples, drop),
        ("warm", buffered, WARM_PASSES, 3 * samples, warm),
    ):
        if not descriptors:
            continue
        objects = np.concatenate([order.permutation(extents) for _ in range(passes)])
        reads = Reads(descriptors, objects, EXPERT_BYTES[size])
        works = loops(reads, program, lambda prepare=prepare: prepare(buffered))
        if kind == "cold" and shutil.which("fio"):
            fio = Fio(reads, paths, folder / f"fio {EXPERT_BYTES[size]}")

            def by_fio(fio: Fio = fio) -> Run:
                drop(buffered)
                return fio.run()

            works["fio"] = by_fio
        runs = interleaved(works, pairs, generator)
        label = f"{kind}, {size}"
        if "fio" in works:
            report_ratio(f"no barrier ÷ fio, {label}", runs, ("numba", "fio"), reads.bytes, 0.97, 0.90)
        elif kind == "cold":
            report(f"no barrier ÷ fio, {label}", "skipped: no fio here")
        if program is None:
            report(f"loop ÷ C, {label}", "skipped: no C compiler here")
        else:
            bar = None if kind == "cold" else 0.97
            report_ratio(f"no barrier ÷ C, {label}", runs, ("numba", "C"), reads.bytes, bar)
            report_ratio(f"barrier ÷ C with it, {label}", runs, ("numba, barrier", "C, barrier"), reads.bytes, 0.95)
            if "fio" in works:
                report_ratio(f"C without barrier ÷ fio, {label}", runs, ("C", "fio"), reads.bytes)
        if kind == "warm":
            # Elsewhere it drowns in the device's own spread.
            for name in ("numba", "C"):
                if name in runs:
                    names = (f"{name}, barrier", name)
                    report_price(f"price of the barrier, {name}, {label}", runs, names, len(reads.schedule.event_id))
    for descriptor in (*buffered, *direct):
        os.close(descriptor)


def main(samples: int) -> None:
    """Measures throughput with that many interleaved rounds; needs 2 GB of disk and of memory for the page cache."""
    with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as name:
        folder = Path(name)
        program = build_program(folder)
        paths = write_files(folder, FILE_BYTES)
        for size in EXPERT_BYTES:
            measure_size(folder, paths, size, samples, program)


def measure_cpu(folder: Path, samples: int) -> None:
    """Prints the CPU time in user mode per small warm access, and the barrier's price where reads cost little."""
    program = build_program(folder)
    descriptors = opened(write_files(folder, [2**26]))
    extents = 2**26 // SMALL_BYTES
    objects = np.random.default_rng(0).integers(0, extents, SMALL_EVENTS * READS_PER_EVENT)
    reads = Reads(descriptors, objects, SMALL_BYTES)
    works = loops(reads, program, lambda: warm(descriptors))
    users_us: dict[str, list[float]] = {name: [] for name in works}

    def noting(name: str, work: Callable[[], Run]) -> Callable[[], Run]:
        def noted() -> Run:
            run = work()
            assert run.user_s is not None, "fio is no part of this"
            users_us[name].append(run.user_s / len(objects) * 1e6)
            return run

        return noted

    runs = interleaved({name: noting(name, work) for name, work in works.items()}, samples, random.Random(0))
    for name, found in users_us.items():
        # Others can only add to a process's own time, so disturbed runs count too; the first one compiles.
        users = found[1:]
        user_us = statistics.median(users)
        what = f"user time per access, {name}"
        wanted = "" if name.startswith("C") else "≤ 1 µs"
        text = (
            f"{user_us:.2f} µs ({min(users):.2f} to {max(users):.2f}; {len(users)} runs of {len(objects):,} accesses)"
        )
        report(what, text, wanted, user_us <= 1 if wanted else None)
    for name in ("numba", "C"):
        if name in runs:
            report_price(f"price of the barrier, {name}, 4 KiB", runs, (f"{name}, barrier", name), SMALL_EVENTS)


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, "Linux has told RssAnon since 4.5"
    return int(found[1]) * 1024


def print_growth(file: str) -> None:
    """Prints RssAnon before a long replay and the most there was during it; runs in a process of its own."""
    descriptors = opened([Path(file)])
    counters = [
        os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        for path in ("/proc/self/io", "/proc/self/status", "/proc/meminfo", "/proc/vmstat")
    ]
    extents = 2**26 // SMALL_BYTES
    generator = np.random.default_rng(0)
    setting: dict[str, Any] = {"barrier": True, "observe_every": 1, "verify": loop.VERIFY_EDGES}
    counted: dict[str, Any] = {"observed": descriptors, "counters": counters}
    objects = generator.integers(0, extents, MEMORY_STEPS * MEMORY_EVENTS * READS_PER_EVENT)
    # What a first run leaves, compiled code above all, is no growth.
    few = Reads(descriptors, objects[: 20 * READS_PER_EVENT], SMALL_BYTES, steps=2, **counted)
    few.by_numba(**setting)
    reads = Reads(descriptors, objects, SMALL_BYTES, steps=MEMORY_STEPS, **counted)
    del objects
    before = anonymous_bytes()
    most = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            most.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run = reads.by_numba(**setting)
    finally:
        done.set()
        watcher.join()
    most.append(anonymous_bytes())
    print(
        json.dumps(
            {
                "before": before,
                "after": most[-1],
                "most": max(most),
                "accesses": len(reads.schedule.objects),
                "seconds": run.seconds,
                "wrong": int(reads.results.wrong.sum()),
            }
        )
    )


def measure_memory(folder: Path) -> None:
    """Prints how much anonymous memory a long replay adds, observed, verified and counted at every step."""
    (path,) = write_files(folder, [2**26])
    command = [sys.executable, "-c", f"from tests.bench.loop import print_growth; print_growth({str(path)!r})"]
    root = Path(__file__).parents[2]
    found = json.loads(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)
    growth = found["most"] - found["before"]
    text = (
        f"{growth / 2**10:,.0f} KiB above {found['before'] / 2**20:,.0f} MiB in {found['accesses']:,} accesses, "
        f"{found['seconds']:.0f} s"
    )
    report("growth of anonymous memory", text, "≤ 1 MiB", growth <= MEMORY_SLACK_BYTES and found["wrong"] == 0)


def cpu(samples: int) -> None:
    """Measures the loop's own cost: CPU time per access, a barrier's price, memory."""
    with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
        measure_cpu(Path(folder), samples)
    with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
        measure_memory(Path(folder))
