"""Sequential miss counts against libCacheSim, an independent simulator in C by the authors of SIEVE and S3-FIFO.

Its Python wheel exists for x86-64 alone and is GPL: it is an extra of the tests, never a dependency. It knows neither
events nor caches per layer, so one cache is compared, access by access. Defaults of its policies, unless said.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from replayer.caches import Caches, Events
from replayer.policies import KERNELS

libcachesim = pytest.importorskip(
    "libcachesim",
    reason="libcachesim is not installed; on x86-64: pip install -e '.[crosscheck]'",
    exc_type=ImportError,
)

TRACES = Path(__file__).parents[2] / "shared" / "traces"
LAYER_24 = 24
THEIR_NAMES = {
    "lru": "LRU",
    "fifo": "FIFO",
    "clock": "Clock",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "arc": "ARC",
    "lfu_in_cache": "LFU",
    "belady_forced": "Belady",
}
LEAST_OF_S3FIFO = 20
"""libCacheSim's S3-FIFO admits only what is smaller than the small queue's share, floor(c / 10): nothing of size 1 at
10 to 19, and below 10, where the share is 0, it ends the process. Ours admits what fits the cache."""


class Accesses(NamedTuple):
    """Objects in the order they are accessed, and the size of each object; null: all 1."""

    objects: np.ndarray
    sizes: np.ndarray | None = None

    @property
    def num_objects(self) -> int:
        return int(self.objects.max()) + 1


@cache
def accesses_of(name: str) -> Accesses:
    generator = np.random.default_rng(20)
    if name == "skewed":
        return Accesses((generator.zipf(1.1, 20_000) % 300).astype(np.int32))
    if name == "drifting":
        place = np.arange(20_000) // 50 + generator.geometric(0.03, 20_000)
        return Accesses((place % 300).astype(np.int32))
    if name == "cyclic":
        # Layer after layer of 8 of 16 objects, as a decoder walks them: what SIEVE and LFU freeze on.
        layers = np.arange(20_000) // 8 % 12
        return Accesses((16 * layers + generator.zipf(1.3, 20_000) % 16).astype(np.int32))
    if name == "uniform":
        return Accesses(generator.integers(0, 250, 20_000).astype(np.int32))
    if name == "skewed, unequal sizes":
        return accesses_of("skewed")._replace(sizes=generator.integers(1, 10, 300))
    if name == "drifting, unequal sizes":
        return accesses_of("drifting")._replace(sizes=generator.integers(1, 10, 300))
    with np.load(TRACES / "qwen3-30b-code.npz") as dump:
        return Accesses(dump["experts"][LAYER_24].ravel().astype(np.int32))


def next_accesses(objects: np.ndarray) -> np.ndarray:
    """(A,) the number of the next access to the same object, −1 if there is none."""
    upcoming = np.full(len(objects), -1, dtype=np.int64)
    order = np.argsort(objects, kind="stable")
    is_same = objects[order][1:] == objects[order][:-1]
    upcoming[order[:-1][is_same]] = order[1:][is_same]
    return upcoming


def our_misses(policy: str, accesses: Accesses, capacity: int) -> int:
    upcoming = next_accesses(accesses.objects)
    events = Events(
        accesses.objects,
        np.array([0, len(accesses.objects)]),
        np.zeros(1, dtype=np.int32),
        np.zeros(1, dtype=np.int64),
        np.where(upcoming < 0, np.iinfo(np.uint32).max, upcoming).astype(np.uint32)
        if KERNELS[policy].knows_future
        else None,
    )
    caches = Caches(accesses.sizes, np.array([capacity]), np.array([0, accesses.num_objects]))
    was_hit = np.zeros(len(accesses.objects), dtype=np.uint8)
    KERNELS[policy].run(KERNELS[policy].new_state(caches, 0), events, caches, False, was_hit)
    return int(np.count_nonzero(was_hit == 0))


class Theirs:
    """libCacheSim over one walk. It reads files only: here oracleGeneral, 24 bytes an access, ids from 1."""

    def __init__(self, accesses: Accesses, path: Path) -> None:
        self.num_accesses = len(accesses.objects)
        rows = np.empty(self.num_accesses, dtype=[("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
        rows["time"] = np.arange(self.num_accesses)
        rows["id"] = accesses.objects.astype(np.uint64) + 1
        rows["size"] = 1 if accesses.sizes is None else accesses.sizes[accesses.objects]
        upcoming = next_accesses(accesses.objects)
        rows["next"] = np.where(upcoming < 0, -1, upcoming + 1)
        rows.tofile(path)
        options = libcachesim.ReaderInitParam(ignore_obj_size=accesses.sizes is None)
        self.reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE, options)

    def misses(self, policy: str, capacity: int) -> int:
        self.reader.reset()
        theirs = getattr(libcachesim, THEIR_NAMES[policy])(cache_size=capacity, hashpower=12)
        miss_ratio, _ = theirs.process_trace(self.reader)
        misses = miss_ratio * self.num_accesses
        assert abs(misses - round(misses)) < 1e-6
        return round(misses)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    made: dict[str, Theirs] = {}

    def of(name: str) -> Theirs:
        if name not in made:
            made[name] = Theirs(accesses_of(name), tmp_path_factory.mktemp("oracle_general") / f"{name}.bin")
        return made[name]

    return of


@pytest.mark.parametrize("name", ["skewed", "drifting", "cyclic", "uniform"])
@pytest.mark.parametrize("policy", THEIR_NAMES)
def test_misses_equal_on_generated_walks(policy, name, theirs):
    for capacity in (1, 2, 9, 17, 20, 25, 38, 64, 89, 133, 200):
        if policy != "s3fifo" or capacity >= LEAST_OF_S3FIFO:
            found = our_misses(policy, accesses_of(name), capacity)
            assert found == theirs(name).misses(policy, capacity), capacity


@pytest.mark.parametrize("name", ["skewed, unequal sizes", "drifting, unequal sizes"])
@pytest.mark.parametrize("policy", sorted(set(THEIR_NAMES) - {"arc", "belady_forced"}))
def test_misses_equal_with_unequal_sizes(policy, name, theirs):
    """Not ARC, whose paper knows one size: libCacheSim moves its target by bytes as if they were objects, ours by the
    newcomer's size. Not Belady, which is no optimum here and has tie rules of its own."""
    for capacity in (100, 137, 401, 800, 1203):
        found = our_misses(policy, accesses_of(name), capacity)
        assert found == theirs(name).misses(policy, capacity), capacity


@pytest.mark.parametrize("capacity", [10, 17, 19])
def test_s3fifo_of_a_small_queue_of_one_is_the_difference_to_libcachesim(capacity, theirs):
    walk = accesses_of("skewed")
    assert theirs("skewed").misses("s3fifo", capacity) == len(walk.objects)
    lru_misses = theirs("skewed").misses("lru", capacity)
    assert our_misses("s3fifo", walk, capacity) < lru_misses


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"public router dumps are not at {TRACES}")
@pytest.mark.parametrize("policy", THEIR_NAMES)
def test_misses_equal_on_layer_24_of_code(policy, theirs):
    for capacity in (8, 17, 25, 38, 64, 89):
        if policy != "s3fifo" or capacity >= LEAST_OF_S3FIFO:
            found = our_misses(policy, accesses_of("code"), capacity)
            assert found == theirs("code").misses(policy, capacity), capacity
