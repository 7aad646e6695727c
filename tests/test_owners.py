"""Every owner for real: what it served from where, held against oracles that know table or policy; and its refusals."""

import dataclasses
import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import save_file

from replayer import holdings, loop, owners
from replayer import replay as supervisor
from replayer.pool import PACKED, Pool, map_pool, read_pool
from replayer.replay import Run, replay_together
from replayer.replay_cli import write_run
from replayer.request import UnusableReplay
from replayer.simulate import Capacity, Window, outcomes, prepare
from replayer.trace import Trace
from schemas.columns import OWNERS, POLICIES
from schemas.files import DataFolder
from tests.builders import make_trace
from tests.oracles import lru as lru_oracle
from tests.oracles import static as static_oracle
from tests.replays import (
    KIB,
    MIB,
    PAGE,
    WAIT_S,
    failed,
    interfered,
    measured_by,
    needs_memory_groups,
    our_groups,
    pool_for,
    proof,
    replayed,
    request,
    routing,
)

EXPERT_BYTES = 64 * KIB
LAYERS = [1, 2, 5, 9]
EXPERTS, STEPS, K = 64, 150, 4
CAPACITY = 6 * MIB


@pytest.fixture(scope="module")
def trace() -> Trace:
    """600 events of 4 accesses, on 256 experts of 16 MiB in all."""
    return make_trace(routing(STEPS, experts=EXPERTS), layer_ids=LAYERS, num_experts=EXPERTS, phases=["decode"] * STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("owners")


@pytest.fixture(scope="module")
def pool(trace: Trace, folder: Path) -> Pool:
    return pool_for(trace, folder / "pool", EXPERT_BYTES)


@pytest.fixture(scope="module")
def packed(trace: Trace, folder: Path) -> Pool:
    """Slices that start anywhere and share pages, in three pieces an expert."""
    return pool_for(trace, folder / "packed", 3 * 21_848, layout="stacked", align=PACKED)


@pytest.fixture(scope="module")
def walls() -> None:
    needs_memory_groups()


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    return DataFolder(tmp_path / "data")


def events_of(trace: Trace) -> list[list[int]]:
    """Objects of each event in router order: one row each here."""
    first = [int(trace.layer_first_object[layer]) for layer in trace.event_layer]
    return [[begin + int(expert) for expert in row] for begin, row in zip(first, trace.expert_ids, strict=True)]


def recorded(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> tuple[Run, list[int]]:
    """A run, and where each of its accesses got its bytes."""
    found: list[list[int]] = []
    monkeypatch.setattr(
        supervisor, "prove", lambda recording, run, real=supervisor.prove: found.append(
            recording.arrays["path"].tolist()
        ) or real(recording, run)
    )  # fmt: skip
    run = replayed(trace, pool, **asked)
    return run, found[0]


@pytest.fixture(scope="module")
def digest(trace: Trace, pool: Pool) -> str:
    """Of the bytes that whoever replays the whole trace consumes."""
    return replayed(trace, pool, warm_pass=False).run["consumed_digest"]


OWNER_REQUESTS: dict[str, dict[str, Any]] = {
    "page_cache": {},
    "page_cache_mmap": {},
    "restream": {},
    "uncached": {},
    "arena": {},
    "hybrid": {"arena_fraction": 0.5},
    "user_cache": {"policy": "lru"},
    "page_cache_admission": {"admit": "same:top:80"},
}


def test_all_owners_are_tried_here() -> None:
    assert set(OWNER_REQUESTS) == set(OWNERS)


@pytest.mark.parametrize("owner", OWNERS)
def test_every_owner_keeps_every_identity_inside_one_wall(
    walls: None, trace: Trace, pool: Pool, digest: str, data: DataFolder, owner: str
) -> None:
    run = replayed(
        trace, pool, owner=owner, mechanism="cgroup", capacity_bytes=CAPACITY, threads=2, **OWNER_REQUESTS[owner]
    )
    assert failed(run) == set()
    assert run.run["status"] == "complete"
    assert run.run["consumed_digest"] == digest
    assert proof(run, "device bytes")["held"] is True
    assert run.run["wall_bytes"] == run.run["own_anonymous_bytes"] + run.run["own_kernel_bytes"] + CAPACITY
    write_run(data, run)
    stored = pl.read_parquet(data.results / "replay_run", glob=True)
    assert stored["owner"].to_list() == [owner]
    held = run.run["arena_bytes"]
    if owner in ("arena", "hybrid", "user_cache"):
        assert 0 < held <= CAPACITY
        assert run.run["arena_hits"] > 0
        assert {one["name"] for one in run.proofs} >= {"arena locked", "decisions as simulated"}
    else:
        assert held is None
        assert run.run["arena_hits"] is None
    kept = (run.run["resident_max_bytes"] or 0) + (held or 0)
    assert kept <= CAPACITY + run.run["wall_bytes"] // 100


@pytest.mark.parametrize("owner", ["arena", "hybrid", "user_cache", "page_cache_mmap", "page_cache_admission"])
def test_pool_whose_experts_share_pages(trace: Trace, packed: Pool, owner: str) -> None:
    """Without a limit, so that every identity holds to the byte; all content is looked at."""
    capacity = {"capacity_bytes": CAPACITY} if owners.holds_memory(owner) else {}
    for miss_path in {"user_cache": [None], "page_cache_mmap": [None], "page_cache_admission": ["direct"]}.get(
        owner, ["direct", "buffered"]
    ):
        run = replayed(
            trace, packed, owner=owner, verify="all", miss_path=miss_path, steps=(0, 40), **capacity,
            **OWNER_REQUESTS[owner],
        )  # fmt: skip
        assert failed(run) == set(), miss_path
        assert run.run["checked_bytes"] == run.run["demand_bytes"]


def test_arena_serves_what_its_table_names_and_nothing_else(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Access by access against the oracle of a static table, fitted on all steps."""
    run, paths = recorded(trace, pool, monkeypatch, owner="arena", capacity_bytes=CAPACITY)
    events = events_of(trace)
    size = dict.fromkeys(range(len(LAYERS) * EXPERTS), EXPERT_BYTES)
    expected = static_oracle(events, size=size, capacity=CAPACITY, fitted_on=events)
    assert [path == loop.HELD for path in paths] == [bool(hit) for hit in expected]
    assert set(paths) == {loop.HELD, loop.DIRECT}
    assert run.run["arena_hits"] == run.run["native_hits"] == sum(map(bool, expected))
    assert run.run["preload_bytes"] == run.run["arena_bytes"] == CAPACITY
    assert run.run["device_bytes"] == (len(expected) - sum(map(bool, expected))) * EXPERT_BYTES


def test_user_cache_decides_as_the_oracle_of_its_policy(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Access by access, second pass after the first, against event-atomic LRU."""
    run, paths = recorded(trace, pool, monkeypatch, owner="user_cache", policy="lru", capacity_bytes=CAPACITY)
    slots = run.run["arena_bytes"] // EXPERT_BYTES
    assert CAPACITY // EXPERT_BYTES - slots in (0, 1), "the bookkeeping takes a slot at most"
    events = events_of(trace)
    size = dict.fromkeys(range(len(LAYERS) * EXPERTS), 1)
    expected = lru_oracle(events + events, size=size, capacity=slots)[len(paths) :]
    assert [path == loop.HELD for path in paths] == [bool(hit) for hit in expected]
    assert run.run["device_bytes"] == paths.count(loop.DIRECT) * EXPERT_BYTES


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "mglru"])
def test_user_cache_counts_what_simulate_counts(trace: Trace, pool: Pool, policy: str, scope: str) -> None:
    """The public simulator under the same contract: slots as capacity, a warm pass first."""
    steps = (0, 40)
    run = replayed(
        trace, pool, owner="user_cache", policy=policy, scope=scope, capacity_bytes=CAPACITY, steps=steps, threads=4
    )
    assert failed(run) == set()
    assert proof(run, "decisions as simulated")["held"] is True
    replay = prepare(trace, Window(steps, "all", warm_pass=True))
    asked = request(owner="user_cache", policy=policy, scope=scope)
    choice = holdings.choose(replay, asked)
    reads = owners.plan_reads(pool, owners.paths_of("user_cache", "direct", pool.num_objects), 512)
    holding = holdings.hold(choice, reads, pool.object_bytes, replay.walk, CAPACITY, PAGE, asked)
    assert holding.sizes is not None
    assert len(set(holding.sizes.decided.tolist())) == 1
    (outcome,) = outcomes(
        replay,
        names=[policy],
        scope=scope,
        semantics=["event_atomic"],
        capacities=[Capacity(experts=int(holding.sizes.decided[0]))],
        expert_bytes=EXPERT_BYTES,
    )
    assert run.run["arena_hits"] == outcome.row["hits"]


def test_table_from_another_part_of_the_trace_is_no_oracle(trace: Trace, pool: Pool) -> None:
    runs = [
        replayed(trace, pool, owner="arena", fit=fit, scope=scope, capacity_bytes=CAPACITY)
        for fit, scope in itertools.product(["same", "first:0.1"], ["global", "layer"])
    ]
    hits = [run.run["arena_hits"] for run in runs]
    assert hits[0] >= hits[2]
    assert [run.run["fit"] for run in runs] == ["same", "same", "first:0.1", "first:0.1"]
    assert len({run.run["condition_hash"] for run in runs}) == 4


def test_admission_lets_in_what_the_table_names(
    trace: Trace, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pl.DataFrame({"layer_id": [1, 1, 9], "expert_id": [0, 3, 2]})
    table.write_csv(tmp_path / "admitted.csv")
    asked = {"owner": "page_cache_admission", "admit": str(tmp_path / "admitted.csv")}
    for miss_path, other in (("direct", loop.DIRECT), ("uncached", loop.UNCACHED)):
        with monkeypatch.context() as patched:
            run, paths = recorded(trace, pool, patched, miss_path=miss_path, **asked)
        assert failed(run) == set()
        flat = [obj for event in events_of(trace) for obj in event]
        assert paths == [loop.BUFFERED if obj in (0, 3, 3 * EXPERTS + 2) else other for obj in flat]
        assert run.run["resident_max_bytes"] == 3 * EXPERT_BYTES
        assert run.run["admission"] == asked["admit"]


def test_announced_reads_read_no_more(trace: Trace, pool: Pool) -> None:
    for owner in ("page_cache", "page_cache_mmap"):
        run = replayed(trace, pool, owner=owner, fadvise="willneed", warm_pass=False)
        assert failed(run) == set()
        assert run.run["device_bytes"] == run.run["missing_bytes"] > 0


@pytest.mark.parametrize("fadvise", ["normal", "sequential", "noreuse"])
def test_readahead_is_overshoot_under_every_advice_that_leaves_it_on(trace: Trace, pool: Pool, fadvise: str) -> None:
    run = replayed(trace, pool, fadvise=fadvise, warm_pass=False)
    assert failed(run) == set()
    assert run.run["overshoot_bytes"] == run.run["device_bytes"] - run.run["missing_bytes"] >= 0


def test_equal_walls_hold_for_owners_of_unequal_own_memory(walls: None, trace: Trace, pool: Pool) -> None:
    wall = 96 * MIB
    runs = [
        replayed(trace, pool, owner=owner, mechanism="cgroup", wall_bytes=wall, threads=2, **OWNER_REQUESTS[owner])
        for owner in ("page_cache", "arena", "user_cache")
    ]
    for run in runs:
        assert failed(run) == set()
        assert run.run["wall_bytes"] == wall
        own = run.run["own_anonymous_bytes"] + run.run["own_kernel_bytes"]
        assert run.run["capacity_bytes"] == wall - own
    # What a policy and its compiled code take is missing from its slots.
    assert runs[2].run["capacity_bytes"] < runs[0].run["capacity_bytes"]


def test_wall_below_the_own_memory_is_refused(walls: None, trace: Trace, pool: Pool) -> None:
    with pytest.raises(UnusableReplay, match=r"--wall 8,388,608 bytes, but the reader's own memory"):
        replayed(trace, pool, mechanism="cgroup", wall_bytes=8 * MIB)
    assert our_groups() == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"owner": "arena"}, r"owner arena without --capacity or --wall"),
        ({"capacity_bytes": MIB}, r"--mechanism none takes no --capacity"),
        ({"owner": "user_cache", "capacity_bytes": MIB}, r"owner user_cache without --policy; add one"),
        (
            {"owner": "arena", "capacity_bytes": MIB, "policy": "lru"},
            r"--policy with owner arena, wanted owner user",
        ),
        ({"owner": "hybrid", "capacity_bytes": MIB}, r"owner hybrid without --arena-fraction"),
        ({"owner": "hybrid", "capacity_bytes": MIB, "arena_fraction": 1.0}, r"wanted above 0 and below 1"),
        ({"owner": "page_cache_admission"}, r"page_cache_admission without --admit"),
        ({"owner": "page_cache_admission", "admit": "same:top:4", "miss_path": "buffered"}, r"would admit all"),
        ({"miss_path": "direct"}, r"--miss-path with owner page_cache"),
        ({"owner": "user_cache", "policy": "lru", "capacity_bytes": MIB, "miss_path": "buffered"}, r"by O_DIRECT"),
        ({"fit": "same"}, r"--fit with owner page_cache"),
        ({"scope": "layer"}, r"--scope with owner page_cache"),
        ({"wall_bytes": MIB}, r"--wall with mechanism none"),
        ({"mechanism": "cgroup", "wall_bytes": MIB, "capacity_bytes": MIB}, r"say one of them"),
        ({"owner": "page_cache_mmap", "fadvise": "noreuse"}, r"noreuse is advice on reads"),
        ({"owner": "arena", "capacity_bytes": MIB, "fit": "first:0"}, r"wanted same, first:F"),
        ({"owner": "page_cache_admission", "admit": "same:top:x"}, r"wanted a number of experts above 0"),
        ({"owner": "user_cache", "policy": "lru", "capacity_bytes": 3 * EXPERT_BYTES}, r"asks for 4 experts at once"),
    ],
)
def test_what_does_not_belong_together_is_refused(trace: Trace, pool: Pool, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableReplay, match=words):
        replayed(trace, pool, **asked)


def test_buffered_misses_beside_a_full_arena_need_room(walls: None, trace: Trace, pool: Pool) -> None:
    asked = {
        "owner": "arena",
        "miss_path": "buffered",
        "mechanism": "cgroup",
        "capacity_bytes": CAPACITY,
        "threads": 128,
    }
    with pytest.raises(UnusableReplay, match=r"beside its locked memory, but 128 threads have up to"):
        replayed(trace, pool, **asked)
    run = replayed(trace, pool, **{**asked, "threads": 4, "headroom_bytes": 5 * MIB})
    assert failed(run) == set()
    assert run.run["arena_bytes"] == CAPACITY
    assert 0 < run.run["resident_max_bytes"] <= 6 * MIB


def test_memory_that_may_not_be_locked_is_a_wrong_call(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_by(
        monkeypatch,
        "from replayer import device\n"
        "def refuse(size):\n"
        "    raise device.NotLockable(f'{size:,} bytes cannot be locked: no')\n"
        "measure.lock = refuse\n",
    )
    with pytest.raises(UnusableReplay, match=r"6,291,456 bytes cannot be locked"):
        replayed(trace, pool, owner="arena", capacity_bytes=CAPACITY)


def test_file_system_without_uncached_reads(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by(
        monkeypatch,
        "import errno\ndef refuse(*_):\n    raise OSError(errno.EOPNOTSUPP, 'no')\nos.preadv = refuse\n",
    )
    with pytest.raises(UnusableReplay, match=r"refuse RWF_DONTCACHE .*owner uncached was asked to read with"):
        replayed(trace, pool, owner="uncached")


# More files than may be open


def with_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by(monkeypatch, "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n")


@pytest.mark.parametrize(
    ("owner", "residency"),
    [
        *((owner, "cachestat") for owner in OWNERS if owner != "page_cache_mmap"),
        # Asked alike whoever owns; a kernel without cachestat takes this way for all.
        ("page_cache", "mincore"),
    ],
)
def test_files_are_opened_for_each_access_where_too_few_may_stay_open(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch, owner: str, residency: str
) -> None:
    if residency == "cachestat" and supervisor.counters.residency_counter() != "cachestat":
        pytest.skip("this kernel has no cachestat")
    monkeypatch.setattr(supervisor.counters, "residency_counter", lambda: residency)
    asked = {"owner": owner, "threads": 4, **OWNER_REQUESTS[owner]}
    if owner in ("arena", "hybrid", "user_cache"):
        asked["capacity_bytes"] = CAPACITY
    usual = replayed(trace, pool, **asked)
    with_few_descriptors(monkeypatch)
    run = replayed(trace, pool, **asked)
    assert failed(run) == set()
    assert (usual.run["files_stay_open"], run.run["files_stay_open"]) == (True, False)
    # Files of many experts, read in no order: without the advice of random reads there would be readahead.
    for name in ("consumed_digest", "arena_hits", "direct_bytes", "overshoot_bytes"):
        assert run.run[name] == usual.run[name], name
    for name in ("device_bytes", "missing_bytes"):
        # A machine that pages out what lies idle takes a few pages of a cached pool between two passes.
        assert abs(run.run[name] - usual.run[name]) <= 16 * 4096, name


def test_owner_that_maps_needs_its_files_open(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_few_descriptors(monkeypatch)
    with pytest.raises(UnusableReplay, match=r"260 open files needed, at most 64 .*ulimit -Hn.*; raise that limit, or"):
        replayed(trace, pool, owner="page_cache_mmap")


@pytest.mark.parametrize("owner", ["page_cache", "restream"])
def test_file_that_cannot_be_opened_for_an_access_ends_the_run(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    pool = pool_for(trace, tmp_path / "pool", EXPERT_BYTES)
    # Gone once everything was looked at, before anything is read.
    monkeypatch.setattr(supervisor, "_drop", lambda one, real=supervisor._drop: (real(one), one.paths[2].unlink()))
    with_few_descriptors(monkeypatch)
    run = replayed(trace, pool, owner=owner)
    assert run.run["status"] == "failed"
    assert "No such file or directory" in run.run["failure"]


# Faults


def test_arena_that_is_unlocked_during_the_run_fails_its_proof(trace: Trace, pool: Pool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        measured_by(
            patched,
            "import ctypes, threading, time\n"
            "def unlock():\n"
            "    while True:\n"
            "        time.sleep(0.01)\n"
            "        ctypes.CDLL(None).munlockall()\n"
            "threading.Thread(target=unlock, daemon=True).start()\n",
        )
        run = replayed(trace, pool, owner="arena", capacity_bytes=CAPACITY)
    assert "arena locked" in failed(run)
    assert run.run["bytes_valid"] is False


def deciding_by(monkeypatch: pytest.MonkeyPatch, tampers: str) -> None:
    """A statement tampers with each decision of an event, once it is made."""
    measured_by(
        monkeypatch,
        "import ctypes\n"
        "from replayer import user_cache\n"
        "real = user_cache.UserCache.over\n"
        "class Tampering:\n"
        "    def __init__(self, cache, decider, schedule, decisions):\n"
        "        first = schedule.event_first_access\n"
        "        def decide(stage, event):\n"
        "            decider.decide(event)\n"
        "            accesses = slice(first[event], first[event + 1])\n"
        f"            {tampers}\n"
        "            return 1\n"
        "        self.kept = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(decide)\n"
        "        self.function_address = ctypes.cast(self.kept, ctypes.c_void_p).value\n"
        "        self.stage_address, self.decide = 0, decider.decide\n"
        "def over(self, schedule, decisions, *rest):\n"
        "    return Tampering(self, real(self, schedule, decisions, *rest), schedule, decisions)\n"
        "user_cache.UserCache.over = over\n",
    )


def test_slot_that_holds_another_expert_is_found(trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    deciding_by(monkeypatch, "decisions.address[accesses] = cache.slot_address[0]")
    run = replayed(trace, pool, owner="user_cache", policy="lru", capacity_bytes=CAPACITY)
    assert failed(run) >= {"content", "digest"}


def test_decisions_other_than_the_policys_fail_their_proof(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deciding_by(monkeypatch, "decisions.was_hit[accesses.start] = 0")
    run = replayed(trace, pool, owner="user_cache", policy="lru", capacity_bytes=CAPACITY)
    assert failed(run) == {"decisions as simulated"}


@pytest.mark.parametrize("event", [0, 1, 40])
def test_policy_that_contradicts_its_slots_ends_the_run(
    trace: Trace, pool: Pool, monkeypatch: pytest.MonkeyPatch, event: int
) -> None:
    deciding_by(monkeypatch, f"if event == {event}: return 0")
    run = replayed(trace, pool, owner="user_cache", policy="lru", capacity_bytes=CAPACITY)
    assert run.run["status"] == "failed"
    assert re.fullmatch(r"step \d+: the policy holds what no slot does, a fault of this program", run.run["failure"])


def test_table_that_names_another_expert_fails_the_proof_of_decisions(trace: Trace, pool: Pool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        measured_by(
            patched,
            "real = measure.Measurement.hold\n"
            "def hold(self, plan):\n"
            "    place = self.arrays['held_place']\n"
            "    kept = measure.np.flatnonzero(place >= 0)[0]\n"
            "    place[kept] = -1\n"
            "    return real(self, plan)\n"
            "measure.Measurement.hold = hold\n",
        )
        run = replayed(trace, pool, owner="arena", capacity_bytes=CAPACITY)
    # The supervisor's own table is what the run is held against.
    assert failed(run) == {"decisions as simulated"}


def test_interrupt_while_a_policy_decides_ends_the_run(trace: Trace, pool: Pool) -> None:
    run = interfered(
        trace, pool, lambda pid: os.kill(pid, signal.SIGTERM), owner="user_cache", policy="lru", capacity_bytes=CAPACITY
    )
    assert run.run["status"] == "interrupted"
    assert our_groups() == []


# A checkpoint where it lies


@pytest.mark.parametrize("owner", ["page_cache", "restream", "arena", "user_cache"])
def test_checkpoint_is_replayed_in_place(folder: Path, owner: str) -> None:
    """Three tensors an expert, of different sizes, in two files; offsets are where the format puts them."""
    place = folder / "checkpoint"
    if not (place / "map").exists():
        place.mkdir(parents=True)
        generator = np.random.default_rng(0)
        for layer in (0, 1):
            tensors = {
                f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight": generator.integers(
                    0, 255, (size,), dtype=np.uint8
                ).reshape(-1, 7)
                for expert in range(16)
                for part, size in (("w1", 7 * 4001), ("w2", 7 * 3000), ("w3", 7 * 4001))
            }
            save_file(tensors, place / f"model-{layer + 1:05}-of-00002.safetensors")
        map_pool(place, place / "map", allow_unsuitable=True)
    mapped = read_pool(place / "map")
    small = make_trace(routing(40, layers=2), layer_ids=[0, 1], num_experts=16, phases=["decode"] * 40)
    capacity = {"capacity_bytes": MIB} if owners.holds_memory(owner) else {}
    run = replayed(small, mapped, owner=owner, allow_unsuitable=True, **capacity, **OWNER_REQUESTS[owner])
    assert failed(run) - {"pool on a device"} == set()
    assert run.run["returned_bytes"] == run.run["demand_bytes"] == run.run["accesses"] * 7 * 11002
    # Whoever owns, the same bytes are consumed.
    assert run.run["consumed_digest"] == replayed(small, mapped, allow_unsuitable=True).run["consumed_digest"]


# Several at once


@pytest.fixture(scope="module")
def other(folder: Path) -> tuple[Trace, Pool]:
    trace = make_trace(
        routing(STEPS, experts=EXPERTS, seed=7), layer_ids=LAYERS, num_experts=EXPERTS, phases=["decode"] * STEPS
    )
    return trace, pool_for(trace, folder / "other", EXPERT_BYTES)


@pytest.mark.parametrize("shares_wall", [False, True])
def test_two_replays_contend_under_one_lock(
    walls: None, trace: Trace, pool: Pool, other: tuple[Trace, Pool], shares_wall: bool
) -> None:
    asked = request(mechanism="cgroup", capacity_bytes=CAPACITY, threads=2)
    runs = replay_together([(trace, pool, asked), (*other, asked)], shares_wall=shares_wall, wait_s=WAIT_S)
    assert [failed(run) for run in runs] == [set(), set()]
    assert [run.run["tenant_number"] for run in runs] == [0, 1]
    assert len({run.run["together_id"] for run in runs}) == 1
    assert all(run.run["overlap_ns"] > 0 for run in runs)
    walls_bytes = {run.run["wall_bytes"] for run in runs}
    own = sum(run.run["own_anonymous_bytes"] for run in runs)
    if shares_wall:
        assert len(walls_bytes) == 1
        assert walls_bytes.pop() >= own + 2 * CAPACITY
        # Neither has more than both were given.
        assert all(run.run["resident_max_bytes"] <= 2 * CAPACITY + MIB for run in runs)
    else:
        assert all(run.run["resident_max_bytes"] <= CAPACITY + MIB for run in runs)
    assert our_groups() == []


def test_replays_together_of_one_pool_are_refused(trace: Trace, pool: Pool) -> None:
    with pytest.raises(UnusableReplay, match=r"2 replays together, of 1 pools"):
        replay_together([(trace, pool, request()), (trace, pool, request())], shares_wall=False)
    with pytest.raises(UnusableReplay, match=r"1 replays together"):
        replay_together([(trace, pool, request())], shares_wall=False)


@pytest.mark.parametrize("mechanism", ["balloon", "boot"])
def test_replays_together_that_would_take_each_others_memory_are_refused(
    trace: Trace, pool: Pool, other: tuple[Trace, Pool], mechanism: str
) -> None:
    asked = request(mechanism=mechanism, capacity_bytes=CAPACITY)
    with pytest.raises(UnusableReplay, match="would take each other's memory"):
        replay_together([(trace, pool, asked), (*other, asked)], shares_wall=False)


def test_when_one_of_two_replays_dies_the_other_is_stopped(
    walls: None, trace: Trace, pool: Pool, other: tuple[Trace, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_by(
        monkeypatch,
        "real = measure.Measurement.run_pass\n"
        "def run_pass(self):\n"
        "    if 'other' in self.spec['paths'][0]:\n"
        "        os._exit(3)\n"
        "    return real(self)\n"
        "measure.Measurement.run_pass = run_pass\n",
    )
    asked = request(mechanism="cgroup", capacity_bytes=CAPACITY, threads=2)
    runs = replay_together([(trace, pool, asked), (*other, asked)], shares_wall=True, wait_s=WAIT_S)
    assert [run.run["status"] for run in runs] == ["failed", "failed"]
    assert [run.run["bytes_valid"] for run in runs] == [False, False]
    assert "another replay" in runs[0].run["failure"]
    assert "ended with code 3" in runs[1].run["failure"]
    assert our_groups() == []


def test_replays_that_miss_each_other_fail_their_proof(
    walls: None, trace: Trace, pool: Pool, other: tuple[Trace, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them begins its measured pass when the other's is long over."""
    measured_by(
        monkeypatch,
        "import time\n"
        "real = measure.Measurement.run_pass\n"
        "def run_pass(self):\n"
        "    if 'other' in self.spec['paths'][0]:\n"
        "        time.sleep(3)\n"
        "    return real(self)\n"
        "measure.Measurement.run_pass = run_pass\n",
    )
    asked = request(mechanism="cgroup", capacity_bytes=CAPACITY, threads=2, steps=(0, 20))
    runs = replay_together([(trace, pool, asked), (*other, asked)], shares_wall=True, wait_s=WAIT_S)
    assert [failed(run) for run in runs] == [{"measured together"}, {"measured together"}]


def test_interrupt_ends_all_replays_that_run_together(
    walls: None, trace: Trace, pool: Pool, other: tuple[Trace, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_by(
        monkeypatch,
        "import signal\n"
        "real = measure.Measurement.run_pass\n"
        "def run_pass(self):\n"
        "    if 'other' in self.spec['paths'][0]:\n"
        "        os.kill(os.getppid(), signal.SIGINT)\n"
        "    return real(self)\n"
        "measure.Measurement.run_pass = run_pass\n",
    )
    asked = request(mechanism="cgroup", capacity_bytes=CAPACITY, threads=2)
    runs = replay_together([(trace, pool, asked), (*other, asked)], shares_wall=True, wait_s=WAIT_S)
    assert [run.run["status"] for run in runs] == ["interrupted", "interrupted"]
    assert [run.run["bytes_valid"] for run in runs] == [False, False]
    assert our_groups() == []


# Plans


def test_reads_past_the_cache_are_widened_and_others_are_not(packed: Pool) -> None:
    path = np.where(np.arange(packed.num_objects) % 2 == 0, loop.DIRECT, loop.BUFFERED).astype(np.uint8)
    reads = owners.plan_reads(packed, path, 512)
    is_direct = path[packed.extent_object] == loop.DIRECT
    assert np.all(reads.offset[is_direct] % 512 == 0)
    assert np.all(reads.length[is_direct] % 512 == 0)
    assert np.array_equal(reads.offset[~is_direct], packed.extent_offset_bytes[~is_direct])
    assert np.array_equal(reads.offset + reads.skip, packed.extent_offset_bytes)
    assert np.all(reads.skip + reads.wanted <= reads.length)
    # Copies of one expert's extents do not overlap, and fit what is counted for it.
    for obj in range(packed.num_objects):
        extents = slice(packed.object_first_extent[obj], packed.object_first_extent[obj + 1])
        ends = reads.held_offset[extents] + reads.length[extents]
        assert np.all(ends[:-1] <= reads.held_offset[extents][1:])
        assert ends[-1] <= reads.held_bytes[obj]
    ways = owners.ways_of(path, packed, mapped=False)
    assert np.all(ways == [True, True])
    assert dataclasses.is_dataclass(reads)


def test_locked_memory_leaves_what_the_reader_needs() -> None:
    slack = holdings.SLACK_BYTES + 256 * MIB // holdings.SLACK_SHARE
    assert holdings.room_bytes(256 * MIB, None, 0, limited=False) == 256 * MIB
    assert holdings.room_bytes(256 * MIB, None, 0, limited=True) == 256 * MIB - slack
    assert holdings.room_bytes(256 * MIB, None, slack, limited=True) == 256 * MIB
    assert holdings.room_bytes(256 * MIB, 0.5, 0, limited=True) == 128 * MIB
    assert holdings.room_bytes(MIB, None, 0, limited=True) == 0


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert our_groups() == []
