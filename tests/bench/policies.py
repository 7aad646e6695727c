"""Policy kernels and the LRU curve against libCacheSim, event-atomic against sequential, memory, growth with length.

One synthetic trace: 20,000 tokens through 60 layers of 384 experts, 8 each; Zipf 0.7 popularity, experts that drift in
and out of favour, and noise (`routes`). Figures are of CPU time, since each run is one thread that waits for nothing:
ours and theirs in one process, on one and the same core, one after the other; medians of the pairs' ratios, with
their extremes. libCacheSim is given the best of four hash powers. It is an extra for x86-64, left out where missing.
"""

import contextlib
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

from replayer.caches import Caches, Events
from replayer.curves import LruCurve
from replayer.policies import KERNELS
from replayer.priorities import next_times

try:
    import libcachesim
except ImportError:
    libcachesim = None

LAYERS, EXPERTS, TOP_K, TOKENS = 60, 384, 8, 20_000
OBJECTS = LAYERS * EXPERTS
DRIFT, DRIFT_SCALE, NOISE_SCALE = 0.965, 1.6, 0.64
"""Give the trace the locality the targets are stated for: 37 % of a token's experts served the token before, and the
64, 128, 192 most popular of a layer take 55, 72, 82 % (asked for: 36; 54, 73, 86)."""

SHARES = (0.1, 0.25, 0.5)
HASHPOWERS = (14, 16, 18, 20)
PAIRS = {
    "lru": ("LRU", 5),
    "sieve": ("Sieve", 5),
    "lfu_in_cache": ("LFU", 3),
    "belady_forced": ("Belady", 3),
    "arc": ("ARC", 3),
    "s3fifo": ("S3FIFO", 3),
    "fifo": ("FIFO", None),
}
"""Our name → libCacheSim's, and how much faster we want to be."""

CHUNK_ACCESSES = LAYERS * TOP_K * 2000
GROWTH_ACCESSES = (10**6, 10**7, 10**8)
SCALE_ACCESSES = 10**9
SCALE_BYTES = 4 * 2**30


class Run(NamedTuple):
    """CPU seconds of one run over the whole trace, and its misses."""

    seconds: float
    misses: int


@numba.njit(cache=True)
def routes(normal, gumbel, popularity, tokens, seed):  # type: ignore[no-untyped-def]
    """(tokens, layers, k) objects, the highest score first.

    An expert's score = log popularity + a drift (AR(1), each expert its own) + Gumbel noise: the top k by it. Random
    values are drawn from the tables `normal` and `gumbel`, both of 2**14 values.
    """
    layers, experts = popularity.shape
    chosen = np.empty((tokens, layers, TOP_K), dtype=np.int32)
    drift = np.empty(experts, dtype=np.float32)
    best = np.empty(TOP_K + 1, dtype=np.float32)
    step = np.float32(np.sqrt(1 - DRIFT**2))
    word = np.uint64(seed)
    for layer in range(layers):
        for expert in range(experts):
            word = word * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            drift[expert] = normal[word >> np.uint64(50)]
        for token in range(tokens):
            top = chosen[token, layer]
            best[:] = -np.inf
            for expert in range(experts):
                # Knuth's linear congruential generator; its upper bits choose both values.
                word = word * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
                drift[expert] = np.float32(DRIFT) * drift[expert] + step * normal[word >> np.uint64(50)]
                score = popularity[layer, expert] + np.float32(DRIFT_SCALE) * drift[expert]
                score += np.float32(NOISE_SCALE) * gumbel[(word >> np.uint64(36)) & np.uint64(2**14 - 1)]
                if score > best[TOP_K - 1]:
                    place = TOP_K - 1
                    while place > 0 and score > best[place - 1]:
                        best[place] = best[place - 1]
                        top[place] = top[place - 1]
                        place -= 1
                    best[place] = score
                    top[place] = layer * experts + expert
    return chosen


def synthetic_routes(tokens: int = TOKENS, seed: int = 0) -> np.ndarray:
    """(tokens, layers, k) int32 objects, always the same for a seed."""
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal(2**14, dtype=np.float32)
    gumbel = generator.gumbel(size=2**14).astype(np.float32)
    ranks = generator.permuted(np.tile(np.arange(1, EXPERTS + 1), (LAYERS, 1)), axis=1)
    chosen: np.ndarray = routes(normal, gumbel, (-0.7 * np.log(ranks)).astype(np.float32), tokens, seed)
    return chosen


def events_of(objects: np.ndarray, scope: str, next_time: np.ndarray | None = None) -> Events:
    """One token after the other, layer by layer; `objects` (A,) begins with layer 0."""
    num_events = len(objects) // TOP_K
    layer = np.resize(np.arange(LAYERS, dtype=np.int32), num_events)
    return Events(
        objects,
        TOP_K * np.arange(num_events + 1),
        layer if scope == "layer" else np.zeros_like(layer),
        np.arange(num_events) // LAYERS,
        next_time,
    )


def caches_of(scope: str, share: float) -> Caches:
    """Caches of that share of all experts together, in experts."""
    num_caches = LAYERS if scope == "layer" else 1
    per_cache = OBJECTS // num_caches
    capacities = np.full(num_caches, int(per_cache * share), dtype=np.int64)
    return Caches(None, capacities, per_cache * np.arange(num_caches + 1))


def next_of(objects: np.ndarray, *, atomic: bool) -> np.ndarray:
    """(A,) uint32 when each access's object is accessed next."""
    result = np.empty(len(objects), dtype=np.uint32)
    upcoming = np.full(OBJECTS, np.iinfo(np.uint32).max, dtype=np.uint32)
    next_times(objects, TOP_K * np.arange(len(objects) // TOP_K + 1), upcoming, 0, atomic, result)
    return result


def run_kernel(name: str, events: Events, caches: Caches, atomic: bool) -> Run:
    """A policy's whole run, its state and the count of its misses included."""
    started = time.thread_time()
    was_hit = np.empty(len(events.objects), dtype=np.uint8)
    policy = KERNELS[name]
    policy.run(policy.new_state(caches, 0), events, caches, atomic, was_hit)
    misses = len(was_hit) - int(np.count_nonzero(was_hit))
    return Run(time.thread_time() - started, misses)


def run_curve(events: Events, capacities: np.ndarray, scope: str = "global", atomic: bool = False) -> Run:
    """The whole LRU curve, read for the first cache at some capacities; the misses are its own at the last."""
    started = time.thread_time()
    curve = LruCurve(caches_of(scope, 1.0), atomic)
    curve.add(events, np.ones(len(events.cache), dtype=bool))
    found = curve.curve()
    misses = found.accesses[0] - found.hits[0][capacities]
    return Run(time.thread_time() - started, int(misses[-1]))


class Theirs:
    """libCacheSim over a binary file of the same accesses."""

    def __init__(self, folder: Path, objects: np.ndarray, next_time: np.ndarray) -> None:
        self._accesses = len(objects)
        record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
        records = np.memmap(folder / "oracle_general.bin", dtype=record, mode="w+", shape=len(objects))
        records["time"] = np.arange(len(objects)) // TOP_K
        records["id"] = objects.astype(np.uint64) + 1
        records["size"] = 1
        records["next"] = np.where(next_time == np.iinfo(next_time.dtype).max, -1, next_time.astype(np.int64))
        records.flush()
        self._reader = libcachesim.TraceReader(
            str(folder / "oracle_general.bin"),
            libcachesim.TraceType.ORACLE_GENERAL_TRACE,
            libcachesim.ReaderInitParam(ignore_obj_size=True),
        )

    def run(self, name: str, experts: int, hashpower: int) -> Run:
        """A policy's whole run, from the construction of its cache."""
        self._reader.reset()
        started = time.thread_time()
        cache = getattr(libcachesim, name)(cache_size=experts, hashpower=hashpower)
        miss_ratio = cache.process_trace(self._reader)[0]
        return Run(time.thread_time() - started, round(miss_ratio * self._accesses))

    def best_hashpower(self, name: str, experts: int) -> int:
        """The fastest of those tried, each the better of two runs."""
        return min(HASHPOWERS, key=lambda hashpower: min(self.run(name, experts, hashpower).seconds for _ in range(2)))


def interleaved(samples: int, *works: Callable[[], Run]) -> list[list[Run]]:
    """Runs of each work, one after the other in every round; the first round is not counted."""
    rounds = [[work() for work in works] for _ in range(samples + 1)]
    return [list(runs) for runs in zip(*rounds[1:], strict=True)]


def spread(values: list[float], form: str = ".2f") -> str:
    """Median (least to most)."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(numerators: list[Run], denominators: list[Run]) -> list[float]:
    """Of the seconds of each pair."""
    return [above.seconds / below.seconds for above, below in zip(numerators, denominators, strict=True)]


def speed(runs: list[Run], accesses: int) -> str:
    """M accesses/s."""
    return f"{accesses / statistics.median(run.seconds for run in runs) / 1e6:.1f}"


def report(what: str, found: str, wanted: str = "", *, reached: bool = True) -> None:
    """One line per figure."""
    judged = f"  wanted {wanted}  {'reached' if reached else 'MISSED'}" if wanted else ""
    print(f"{what:<34} {found}{judged}", flush=True)


def report_locality(chosen: np.ndarray) -> None:
    """What the trace is like, for whoever compares figures across machines."""
    sampled = np.arange(0, len(chosen) - 1, 20)
    overlap = (chosen[sampled + 1][..., :, None] == chosen[sampled][..., None, :]).any(axis=3).mean()
    counts = np.sort(np.bincount(chosen.ravel(), minlength=OBJECTS).reshape(LAYERS, EXPERTS), axis=1)[:, ::-1]
    tops = "/".join(f"{counts[:, :top].sum() / counts.sum():.0%}" for top in (64, 128, 192))
    report("trace", f"{chosen.size:,} accesses; {overlap:.0%} as the token before; top 64/128/192 take {tops}")


def bench_points(samples: int, objects: np.ndarray, theirs: Theirs | None) -> None:
    """Every policy at every capacity, sequential, global: M accesses/s, ratio of CPU times, misses."""
    started = time.thread_time()
    next_time = next_of(objects, atomic=False)
    report("next accesses, once for Belady", f"{len(objects) / (time.thread_time() - started) / 1e6:.0f} M/s")
    for ours, (name, wanted) in PAIRS.items():
        events = events_of(objects, "global", next_time if KERNELS[ours].knows_future else None)
        hashpower = theirs.best_hashpower(name, int(OBJECTS * SHARES[1])) if theirs else None
        for share in SHARES:
            caches = caches_of("global", share)
            experts = int(caches.capacities[0])
            what = f"{ours} at {share:.0%}"
            if theirs is None or hashpower is None:
                (own,) = interleaved(samples, partial(run_kernel, ours, events, caches, False))
                report(what, f"{speed(own, len(objects))} M/s, {own[0].misses:,} misses")
                continue
            own, other = interleaved(
                samples,
                partial(run_kernel, ours, events, caches, False),
                partial(theirs.run, name, experts, hashpower),
            )
            found = ratios(other, own)
            misses = f"misses equal ({own[0].misses:,})"
            if own[0].misses != other[0].misses:
                misses = f"misses differ: {own[0].misses:,} against {other[0].misses:,}"
            report(
                what,
                f"{spread(found)}: {speed(own, len(objects))} against {speed(other, len(objects))} M/s, "
                f"hashpower {hashpower}; {misses}",
                f"≥ {wanted}" if wanted else "",
                reached=wanted is None or statistics.median(found) >= wanted,
            )


def bench_curve(samples: int, objects: np.ndarray, theirs: Theirs | None) -> None:
    """The whole LRU curve against one and two points of theirs, and read at one capacity and at a thousand."""
    events = events_of(objects, "global")
    one = np.array([OBJECTS // 4])
    many = np.linspace(1, OBJECTS // 4, 1000).astype(np.int64)
    single, thousand = interleaved(samples, partial(run_curve, events, one), partial(run_curve, events, many))
    report("curve, M accesses/s", speed(single, len(objects)))
    found = ratios(thousand, single)
    reached = statistics.median(found) <= 1.1
    report("curve at 1,000 ÷ at 1 capacity", spread(found), "≤ 1.1", reached=reached)
    if theirs is None:
        return
    experts = [int(OBJECTS * share) for share in SHARES[:2]]
    hashpower = theirs.best_hashpower("LRU", experts[1])
    curves, first, second = interleaved(
        samples, partial(run_curve, events, one), *[partial(theirs.run, "LRU", held, hashpower) for held in experts]
    )
    both = [Run(tenth.seconds + quarter.seconds, 0) for tenth, quarter in zip(first, second, strict=True)]
    for what, points in (("two of their points", both), ("one of their points (goal)", second)):
        found = ratios(curves, points)
        report(f"curve ÷ {what}", spread(found), "< 1", reached=statistics.median(found) < 1)
    same = "equal" if curves[0].misses == second[0].misses else "DIFFERENT"
    report("curve and their point at 25%", f"{same} misses")


def bench_semantics(samples: int, objects: np.ndarray) -> None:
    """Event-atomic ÷ sequential, one cache a layer, for every policy."""
    future = {atomic: next_of(objects, atomic=atomic) for atomic in (True, False)}
    for name, policy in KERNELS.items():
        events = {
            atomic: events_of(objects, "layer", future[atomic] if policy.knows_future else None)
            for atomic in (True, False)
        }
        found = []
        for share in SHARES:
            caches = caches_of("layer", share)
            at_once, one_by_one = interleaved(
                samples,
                partial(run_kernel, name, events[True], caches, True),
                partial(run_kernel, name, events[False], caches, False),
            )
            found.append((spread(ratios(at_once, one_by_one)), statistics.median(ratios(at_once, one_by_one))))
        text = ", ".join(text for text, _ in found)
        report(f"event-atomic ÷ sequential, {name}", text, "≤ 2", reached=max(ratio for _, ratio in found) <= 2)
    layered, one = events_of(objects, "layer"), np.array([EXPERTS // 4])
    curves = [partial(run_curve, layered, one, "layer", atomic) for atomic in (True, False)]
    ratio = ratios(*interleaved(samples, *curves))
    report("event-atomic ÷ sequential, curve", spread(ratio), "≤ 2", reached=statistics.median(ratio) <= 2)


def peak_bytes(work: Callable[[], object]) -> int:
    """How far a run raises the resident memory of this process above what it was, as the kernel counts it."""
    # What earlier runs freed must not serve this one unseen; where the C library cannot give it back, less is counted.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def bench_memory(objects: np.ndarray) -> None:
    """Bytes per access beside the 4 of its object: events, the future where it is known, state and decisions."""
    for name, policy in KERNELS.items():

        def work(name: str = name, knows_future: bool = policy.knows_future) -> None:
            next_time = next_of(objects, atomic=False) if knows_future else None
            events = events_of(objects, "global", next_time)
            run_kernel(name, events, caches_of("global", SHARES[1]), False)

        per_access = peak_bytes(work) / len(objects)
        report(f"memory, {name}", f"{per_access:.1f} bytes an access", "≤ 12", reached=per_access <= 12)
    per_access = peak_bytes(lambda: run_curve(events_of(objects, "global"), np.array([1]))) / len(objects)
    report("memory, curve", f"{per_access:.1f} bytes an access", "≤ 12", reached=per_access <= 12)


def chunks(objects: np.ndarray, accesses: int) -> Iterator[Events]:
    """That many accesses: the trace again and again, its experts renamed each time as by a change of domain."""
    turn = 0
    while accesses:
        for begin in range(0, min(accesses, len(objects)), CHUNK_ACCESSES):
            chunk = objects[begin : begin + min(accesses, CHUNK_ACCESSES)]
            layer = chunk // EXPERTS * EXPERTS
            yield events_of((layer + (chunk - layer + 37 * turn) % EXPERTS).astype(np.int32), "global")
            accesses -= len(chunk)
        turn += 1


def bench_growth(objects: np.ndarray, lengths: tuple[int, ...]) -> None:
    """ns per access of streamed runs of growing length, and how far they raise this process's memory."""
    whole = objects[: len(objects) // (LAYERS * TOP_K) * LAYERS * TOP_K]
    for name in ("curve", "lru", "sieve", "lfu_in_cache"):
        per_access = []
        streamed_seconds(name, whole, LAYERS * TOP_K)  # compiles
        for accesses in lengths:
            rounded = accesses // (LAYERS * TOP_K) * LAYERS * TOP_K
            taken: list[float] = []
            raised = peak_bytes(lambda: taken.append(streamed_seconds(name, whole, rounded)))  # noqa: B023
            per_access.append(taken[0] / rounded * 1e9)
            report(
                f"growth, {name}",
                f"{accesses:>13,} accesses: {per_access[-1]:6.2f} ns an access, {raised / 2**20:,.0f} MiB more",
                f"≤ {SCALE_BYTES >> 30} GiB",
                reached=_status_bytes("VmHWM") <= SCALE_BYTES,
            )
        # Short runs lie in the caches of the core and see few evictions; linear means no growth once that is over.
        growth = per_access[-1] / per_access[-2]
        report(
            f"growth, {name}",
            f"the longest ÷ the one before, per access: {growth:.2f}",
            "≤ 1.25",
            reached=growth <= 1.25,
        )


def streamed_seconds(name: str, objects: np.ndarray, accesses: int) -> float:
    """CPU seconds of a policy or the curve alone, making the chunks left out."""
    caches = caches_of("global", SHARES[1])
    curve = LruCurve(caches, False)
    state = None if name == "curve" else KERNELS[name].new_state(caches, 0)
    seconds = 0.0
    for events in chunks(objects, accesses):
        scored = np.ones(len(events.cache), dtype=bool)
        was_hit = np.empty(len(events.objects), dtype=np.uint8)
        started = time.thread_time()
        if state is None:
            curve.add(events, scored)
        else:
            KERNELS[name].run(state, events, caches, False, was_hit)
        seconds += time.thread_time() - started
    return seconds


def pinned(work: Callable[[], Any]) -> None:
    """Runs a work on one of this process's cores, the last."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        work()
    finally:
        os.sched_setaffinity(0, cores)


def main(samples: int) -> None:
    """All of it with that many pairs a median, growth to 100 M accesses; 230 MB of disk, removed afterwards."""
    pinned(lambda: _measure(samples))


def scale(samples: int) -> None:
    """Growth from 1 M to 1,000 M accesses, within 4 GiB; once, whatever the samples."""
    del samples
    objects = synthetic_routes().ravel()
    pinned(lambda: bench_growth(objects, (*GROWTH_ACCESSES, SCALE_ACCESSES)))


def _measure(samples: int) -> None:
    chosen = synthetic_routes()
    report_locality(chosen)
    objects = chosen.ravel()
    with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
        theirs, next_time = None, next_of(objects, atomic=False)
        if libcachesim is None:
            print("libcachesim is not installed (x86-64 only: pip install libcachesim): our figures alone")
        else:
            theirs = Theirs(Path(folder), objects, next_time)
        bench_points(samples, objects, theirs)
        bench_curve(samples, objects, theirs)
        del theirs
    bench_semantics(samples, objects)
    bench_memory(objects)
    bench_growth(objects, GROWTH_ACCESSES)
