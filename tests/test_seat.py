"""Events that are asked for one by one: the same accesses, bytes and proofs as a replay that knows them all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayer.content import bytes_of
from replayer.pool import PACKED, Pool
from replayer.replay import Run, replay_as_asked
from replayer.request import UnusableReplay
from replayer.seat import Asking, NotServed
from replayer.trace import Trace, walk
from tests.builders import make_trace
from tests.replays import KIB, MIB, WAIT_S, failed, needs_memory_groups, pool_for, replayed, request, routing

EXPERT_BYTES = 64 * KIB
STEPS, LAYERS, EXPERTS, TOP_K = 40, 4, 16, 4


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(routing(STEPS), layer_ids=[0, 1, 2, 3], num_experts=EXPERTS)


@pytest.fixture(scope="module")
def pool(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return pool_for(trace, tmp_path_factory.mktemp("seat") / "pool", EXPERT_BYTES)


def asked(trace: Trace, pool: Pool, *, seen: list[int] | None = None, stop_at: int = -1, **said: Any) -> Run:
    """Asks for the events of `trace` one by one, knowing only how many there are, and looks at each expert's bytes."""
    unknown = make_trace(routing(STEPS, seed=9), layer_ids=[0, 1, 2, 3], num_experts=EXPERTS)
    accesses = walk(trace, 0, STEPS, order="router")

    def ask(asking: Asking, reads: Any) -> None:
        for event in range(accesses.num_events):
            if event == stop_at:
                raise KeyboardInterrupt
            objects = accesses.objects[accesses.first_access[event] : accesses.first_access[event + 1]]
            asking.ask(objects)
            for place, obj in enumerate(objects):
                extent = int(pool.object_first_extent[obj])
                begin = int(reads.slot_offset[extent] + reads.skip[extent])
                found = asking.seat.slots[place, 0, begin : begin + EXPERT_BYTES]
                layer, expert = int(pool.object_layer_id[obj]), int(pool.object_expert_id[obj])
                edges = bytes_of(layer, expert, 0, 512), bytes_of(layer, expert, EXPERT_BYTES - 512, 512)
                assert found[:512].tobytes() + found[-512:].tobytes() == edges[0].tobytes() + edges[1].tobytes()
                if seen is not None:
                    seen.append(int(obj))

    run, asking = replay_as_asked(
        unknown, pool, request(**said), event_slots=TOP_K, ask=ask, asked=lambda: trace, wait_s=WAIT_S
    )
    assert np.all(asking.served_ns >= asking.request_ns)
    return run


WALLED = {"mechanism": "cgroup", "capacity_bytes": 2 * MIB}
LOCKED = {"mechanism": "cgroup", "capacity_bytes": 8 * MIB, "owner": "user_cache", "policy": "lru"}


@pytest.mark.parametrize(
    "said",
    [
        {"warm_pass": False},
        {"warm_pass": True},
        {"owner": "restream", "warm_pass": False},
        {"owner": "page_cache_mmap", "warm_pass": False},
        {**WALLED, "warm_pass": False},
        {**LOCKED, "warm_pass": False},
        {**LOCKED, "policy": "sieve", "warm_pass": True},
    ],
    ids=str,
)
def test_what_is_asked_for_is_accounted_for_as_its_replay_would_be(
    trace: Trace, pool: Pool, said: dict[str, Any]
) -> None:
    if "mechanism" in said:
        needs_memory_groups()
    seen: list[int] = []
    run, known = asked(trace, pool, seen=seen, **said), replayed(trace, pool, **said)
    assert failed(run) == failed(known) == set()
    same = ("accesses", "selections", "events", "demand_bytes", "consumed_digest", "arena_hits", "returned_bytes")
    assert {name: run.run[name] for name in same} == {name: known.run[name] for name in same}
    assert len(seen) == run.run["accesses"] * (2 if said["warm_pass"] else 1)
    assert [one["name"] for one in run.proofs] == [one["name"] for one in known.proofs]
    if said.get("owner") in ("restream", "user_cache"):
        assert run.run["device_bytes"] == known.run["device_bytes"]


def test_bytes_that_lie_askew_in_their_files_come_whole(trace: Trace, tmp_path: Path) -> None:
    packed = pool_for(trace, tmp_path / "packed", EXPERT_BYTES, align=PACKED)
    assert failed(asked(trace, packed, owner="restream", warm_pass=False)) == set()


@pytest.mark.parametrize(
    "said",
    [
        {"owner": "user_cache", "policy": "belady_bypass", "capacity_bytes": MIB},
        {"owner": "arena", "capacity_bytes": MIB},
        {"owner": "arena", "capacity_bytes": MIB, "fit": "first:0.5"},
        {"owner": "page_cache_admission", "admit": "same:top:4"},
        {"destination": "cuda"},
    ],
    ids=str,
)
def test_who_must_know_the_future_is_refused(trace: Trace, pool: Pool, said: dict[str, Any]) -> None:
    with pytest.raises(UnusableReplay):
        asked(trace, pool, **said)


def test_an_interrupt_while_asking_ends_the_loop_at_once(trace: Trace, pool: Pool) -> None:
    with pytest.raises(KeyboardInterrupt):
        asked(trace, pool, stop_at=17, warm_pass=False)
    assert failed(asked(trace, pool, warm_pass=False)) == set()


def test_a_file_that_shrinks_while_asking_is_named(trace: Trace, tmp_path: Path) -> None:
    pool = pool_for(trace, tmp_path / "pool", EXPERT_BYTES)
    accesses = walk(trace, 0, STEPS, order="router")

    def ask(asking: Asking, reads: Any) -> None:
        for event in range(accesses.num_events):
            if event == 8:
                for path in pool.paths:
                    with path.open("r+b") as file:
                        file.truncate(4096)
            asking.ask(accesses.objects[accesses.first_access[event] : accesses.first_access[event + 1]])

    with pytest.raises(NotServed, match="shrank during the run"):
        replay_as_asked(
            trace, pool, request(owner="restream", warm_pass=False), event_slots=TOP_K, ask=ask, asked=lambda: trace,
            wait_s=WAIT_S,
        )  # fmt: skip
