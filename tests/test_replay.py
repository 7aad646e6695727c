"""Whole runs: sound ones against slow oracles, bad input, and what is left when a run is stopped at any point."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from replayer import counters
from replayer import replay as supervisor
from replayer.cli import main
from replayer.machine import storage_of
from replayer.pool import (
    PACKED,
    MalformedPool,
    Pool,
    PoolMismatch,
    UnsuitableStorage,
    build_pool,
    plan_pool,
    read_pool,
)
from replayer.replay import ReplayBusy, Run, replay
from replayer.replay_cli import write_run
from replayer.request import UnusableReplay
from replayer.trace import Trace
from schemas.files import DataFolder
from tests.builders import make_trace, write_trace
from tests.oracles import is_sampled
from tests.private_disk import on_private_disk
from tests.replays import (
    ENVIRONMENT,
    KIB,
    MIB,
    PAGE,
    ROOT,
    WAIT_S,
    called,
    children,
    command_line,
    failed,
    interfered,
    needs_memory_groups,
    our_groups,
    pool_for,
    proof,
    reading,
    replayed,
    request,
    routing,
    until,
)

EXPERT_BYTES = 64 * KIB
STOPPED_WITHIN_S = 3.0
SUMMED = (
    "events", "accesses", "demand_bytes", "observed_accesses", "native_hits", "native_partial_hits", "native_misses",
    "missing_bytes", "stall_ns",
)  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> Trace:
    """600 events of 4 accesses, on 256 experts of four layers with gaps between."""
    return make_trace(routing(150, experts=64), layer_ids=[1, 2, 5, 9], num_experts=64, phases=["decode"] * 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="module")
def pool(trace: Trace, folder: Path) -> Pool:
    """16 MiB in four files, aligned."""
    return pool_for(trace, folder / "pool", EXPERT_BYTES)


@pytest.fixture(scope="module")
def data(folder: Path) -> DataFolder:
    return DataFolder(folder / "data")


@pytest.fixture(scope="module")
def cold(trace: Trace, pool: Pool) -> Run:
    """The first pass, with nothing in memory and no limit."""
    used = {obj for _, event in events_of(trace) for obj in event}
    return reading(len(used) * EXPERT_BYTES, lambda: replayed(trace, pool, warm_pass=False))


def events_of(trace: Trace) -> list[tuple[int, list[int]]]:
    """(layer ordinal, objects in order of first mention) of each event, but those of warm-up."""
    events = []
    for event, (begin, end) in enumerate(zip(trace.event_first_row[:-1], trace.event_first_row[1:], strict=True)):
        if trace.event_phase[event] == 2:
            continue
        layer = int(trace.event_layer[event])
        first = int(trace.layer_first_object[layer])
        mentioned = [first + int(expert) for row in trace.expert_ids[begin:end] for expert in row]
        events.append((layer, list(dict.fromkeys(mentioned))))
    return events


def lru_hits(events: list[list[int]], capacity_experts: int) -> list[list[bool]]:
    """Event-atomic LRU over equal experts: what was resident when an event began."""
    stack: list[int] = []
    found = []
    for event in events:
        resident = set(stack[:capacity_experts])
        found.append([obj in resident for obj in event])
        for obj in event:
            if obj in stack:
                stack.remove(obj)
            stack.insert(0, obj)
    return found


def check_rows(run: Run, data: DataFolder) -> None:
    """Keeps the contract of every table, as written and read back; steps and layers add up to the run."""
    write_run(data, run)
    trace_id, run_id = run.run["trace_id"], run.run["run_id"]
    stored = pl.read_parquet(data.results / "replay_run" / trace_id / f"{run_id}.parquet")
    assert stored["consumed_digest"].to_list() == [run.run["consumed_digest"]]
    names = SUMMED if run.run["missing_bytes"] is not None else set(SUMMED) - {"missing_bytes"}
    for rows in (run.steps, run.layers):
        for name in names:
            assert sum(row[name] for row in rows) == run.run[name], name
    assert len({row["step_id"] for row in run.steps}) == len(run.steps) == run.run["replayed_steps"]
    for name in ("wall_ns", "check_ns", "device_bytes"):
        assert sum(row[name] for row in run.steps) == run.run[name], name
    assert max(row["resident_bytes"] for row in run.steps) == run.run["resident_max_bytes"]
    simulated = [row["simulated_misses"] for row in run.layers]
    if run.run["resident_miss_bytes"] is None:
        assert simulated == [None] * len(simulated)
    else:
        assert sum(row["simulated_misses"] for row in run.steps) == sum(simulated)


# Sound runs


def test_cold_run_without_a_limit_reads_each_expert_once(cold: Run, trace: Trace, pool: Pool, data: DataFolder) -> None:
    assert failed(cold) == set()
    assert cold.run["status"] == "complete"
    assert cold.run["failure"] is None
    used = {obj for _, event in events_of(trace) for obj in event}
    once = len(used) * EXPERT_BYTES
    assert cold.run["cold_resident_bytes"] == 0
    assert cold.run["missing_bytes"] == cold.run["device_bytes"] == once
    assert cold.run["native_misses"] == len(used)
    assert cold.run["native_hits"] == 2400 - len(used)
    assert cold.run["native_partial_hits"] == cold.run["raced_pages"] == 0
    assert cold.run["resident_max_bytes"] == once
    assert (cold.run["selections"], cold.run["accesses"], cold.run["reads"]) == (2400, 2400, 2400)
    assert cold.run["demand_bytes"] == cold.run["returned_bytes"] == 2400 * EXPERT_BYTES
    assert cold.run["checked_bytes"] == 2400 * 2 * PAGE
    assert cold.run["warm_device_bytes"] is None
    assert cold.run["wall_bytes"] is None
    # Which access missed is which was the first of its expert.
    seen: set[int] = set()
    for row, begin in zip(cold.steps, range(0, 600, 4), strict=True):
        event = [obj for _, event in events_of(trace)[begin : begin + 4] for obj in event]
        assert row["native_misses"] == len(set(event) - seen)
        seen.update(event)
        assert row["resident_bytes"] == len(seen) * EXPERT_BYTES
    check_rows(cold, data)


def test_warm_run_without_a_limit_reads_nothing(trace: Trace, pool: Pool, cold: Run, data: DataFolder) -> None:
    run = reading(0, lambda: replayed(trace, pool))
    assert failed(run) == set()
    assert run.run["device_bytes"] == run.run["missing_bytes"] == 0
    assert run.run["native_hits"] == 2400
    assert run.run["native_hit_rate"] == 1
    assert run.run["warm_device_bytes"] == cold.run["device_bytes"]
    assert run.run["amplification_resident"] is None
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]
    assert run.run["condition_hash"] != cold.run["condition_hash"]
    assert run.pool == cold.pool
    assert run.run["machine_id"] == run.machine["machine_id"]
    check_rows(run, data)


@pytest.fixture(scope="module")
def walls() -> None:
    needs_memory_groups()


def test_run_within_a_wall_comes_near_the_oracle(
    walls: None, trace: Trace, pool: Pool, cold: Run, data: DataFolder
) -> None:
    run = replayed(trace, pool, mechanism="cgroup", capacity_bytes=8 * MIB)
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]
    assert run.run["mechanism_detail"].startswith("cgroup v")
    # Rounded down to pages; what the reader itself takes lies on top.
    assert 8 * MIB - PAGE < run.run["enforced_bytes"] <= 8 * MIB
    assert run.run["wall_bytes"] - run.run["own_anonymous_bytes"] - (run.run["own_kernel_bytes"] or 0) == 8 * MIB
    assert 6 * MIB < run.run["resident_median_bytes"] <= run.run["resident_max_bytes"] <= 8.2 * MIB
    events = [event for _, event in events_of(trace)]
    found = lru_hits(events * 2, run.run["resident_median_bytes"] // EXPERT_BYTES)[len(events) :]
    misses = sum(not hit for event in found for hit in event)
    assert run.run["resident_miss_bytes"] == misses * EXPERT_BYTES
    nominal = lru_hits(events * 2, 8 * MIB // EXPERT_BYTES)[len(events) :]
    assert run.run["nominal_miss_bytes"] == sum(not hit for event in nominal for hit in event) * EXPERT_BYTES
    for layer, row in enumerate(run.layers):
        mine = [
            hit for (other, _), event in zip(events_of(trace), found, strict=True) if other == layer for hit in event
        ]
        assert (row["simulated_hits"], row["accesses"]) == (sum(mine), len(mine))
    # The kernel's replacement is no exact LRU.
    native = run.run["native_misses"] + run.run["native_partial_hits"]
    assert math.isclose(native, misses, rel_tol=0.25)
    assert math.isclose(run.run["amplification_resident"], 1, rel_tol=0.25)
    assert run.run["device_bytes"] == pytest.approx(run.run["missing_bytes"], rel=0.01)
    assert our_groups() == []


def test_run_beside_a_balloon_in_an_outer_group(walls: None, folder: Path, data: DataFolder) -> None:
    trace = make_trace(routing(60, experts=192, k=8), layer_ids=[0, 1, 2, 3], num_experts=192)
    pool = pool_for(trace, folder / "large", EXPERT_BYTES)
    run = replayed(trace, pool, mechanism="balloon", capacity_bytes=24 * MIB, outer_group_bytes=512 * MIB)
    assert failed(run) == set()
    check_rows(run, data)
    assert "balloon in a cgroup" in run.run["mechanism_detail"]
    assert 320 * MIB < run.run["balloon_bytes"] < 488 * MIB
    assert 16 * MIB < run.run["resident_median_bytes"] <= run.run["enforced_bytes"]
    assert run.run["enforced_bytes"] == pytest.approx(24 * MIB, rel=0.15)
    assert run.run["missing_bytes"] > 0
    assert proof(run, "balloon alive")["found"] == "0 of 60 steps without"
    assert our_groups() == []


def test_restream_reads_the_demand_from_the_device(trace: Trace, pool: Pool, cold: Run, data: DataFolder) -> None:
    run = replayed(trace, pool, owner="restream")
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["device_bytes"] == run.run["warm_device_bytes"] == run.run["demand_bytes"]
    assert run.run["native_misses"] == 2400
    assert run.run["resident_max_bytes"] == 0
    assert run.run["resident_miss_bytes"] is None
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]


def test_readahead_on_request_is_counted_as_overshoot(trace: Trace, pool: Pool, cold: Run, data: DataFolder) -> None:
    run = replayed(trace, pool, fadvise="normal", warm_pass=False)
    assert failed(run) == set()
    check_rows(run, data)
    if (run.machine["read_ahead_bytes"] or 0) > EXPERT_BYTES:
        assert run.run["overshoot_bytes"] > 0
    assert run.run["device_bytes"] == run.run["missing_bytes"] + run.run["overshoot_bytes"]
    assert run.run["raced_pages"] is None
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]


def test_without_cachestat_residency_comes_from_mincore(
    trace: Trace, pool: Pool, cold: Run, data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "residency_counter", lambda: "mincore")
    run = reading(cold.run["device_bytes"], lambda: replayed(trace, pool, warm_pass=False))
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["residency_counter"] == "mincore"
    same = ("missing_bytes", "device_bytes", "native_hits", "native_misses", "resident_max_bytes", "consumed_digest")
    assert {name: run.run[name] for name in same} == {name: cold.run[name] for name in same}


@pytest.mark.parametrize("owner", ["page_cache", "restream"])
def test_pool_that_is_not_aligned(trace: Trace, cold: Run, folder: Path, data: DataFolder, owner: str) -> None:
    pool = pool_for(trace, folder / "packed", EXPERT_BYTES, align=PACKED)
    assert np.any(pool.extent_offset_bytes % PAGE)
    run = replayed(trace, pool, owner=owner, warm_pass=False)
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]
    assert run.run["returned_bytes"] == run.run["demand_bytes"] == cold.run["demand_bytes"]
    if owner == "restream":
        sector = storage_of(pool.folder).logical_block_bytes or PAGE
        begin, end = pool.extent_offset_bytes, pool.extent_offset_bytes + pool.extent_length_bytes
        widened = -(-end // sector) * sector - begin // sector * sector
        objects = np.concatenate([event for _, event in events_of(trace)])
        assert run.run["device_bytes"] == widened[objects].sum()
        assert run.run["device_bytes"] > run.run["demand_bytes"]
    else:
        # Only looks that came before either read can count a shared page twice: a handful, and none once all is there.
        tolerance = proof(run, "device bytes")["tolerance"]
        shared = int(found.group(1)) if (found := re.search(r"(\d+) pages shared", tolerance)) else 0
        assert shared <= run.run["native_partial_hits"] + run.run["native_misses"]
        assert -shared <= run.run["raced_pages"] <= 0
        again = replayed(trace, pool, owner=owner)
        assert proof(again, "device bytes")["tolerance"] == "to the byte"
        # Some machines page out what lies idle: then little is read again.
        assert again.run["device_bytes"] == again.run["missing_bytes"] < run.run["device_bytes"] // 10
        # Neighbours share a page, and whoever comes second finds it there.
        assert run.run["native_partial_hits"] > 0
        assert run.run["device_bytes"] <= pool.file_bytes.sum() + len(pool.files) * PAGE


def test_stacked_pool_with_all_content_checked(trace: Trace, cold: Run, folder: Path, data: DataFolder) -> None:
    pool = pool_for(trace, folder / "stacked", EXPERT_BYTES, layout="stacked")
    asked: dict[str, Any] = {"verify": "all", "observe": "sample", "warm_pass": False}
    run = reading(cold.run["device_bytes"], lambda: replayed(trace, pool, **asked))
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["checked_bytes"] == run.run["demand_bytes"]
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]
    assert run.run["device_bytes"] == cold.run["device_bytes"]
    assert run.run["observed_accesses"] == sum(is_sampled(access, 16) for access in range(run.run["accesses"]))
    assert 0 < run.run["native_hit_rate"] < 1
    assert run.run["missing_bytes"] is None
    assert proof(run, "device bytes")["held"] is None


def test_one_thread_a_file_per_expert_and_no_looks(trace: Trace, cold: Run, folder: Path, data: DataFolder) -> None:
    pool = pool_for(trace, folder / "files", EXPERT_BYTES, layout="per_expert")
    asked: dict[str, Any] = {"observe": "none", "threads": 1, "warm_pass": False}
    run = reading(cold.run["device_bytes"], lambda: replayed(trace, pool, **asked))
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]
    assert run.run["device_bytes"] == cold.run["device_bytes"]
    assert run.run["missing_bytes"] is None
    assert proof(run, "device bytes")["held"] is None
    assert run.run["observed_accesses"] == 0
    assert run.run["native_hit_rate"] is None


def test_tensors_of_torch_take_the_same_bytes(trace: Trace, pool: Pool, cold: Run, data: DataFolder) -> None:
    run = replayed(trace, pool, destination="cpu", warm_pass=False)
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["consumed_digest"] == cold.run["consumed_digest"]


def test_events_of_many_rows_of_unequal_experts_after_a_warm_up_phase(tmp_path: Path, data: DataFolder) -> None:
    """Prefill of 40 rows, a layer without rows, sizes by layer, layer numbers with gaps; the warm-up is left out."""
    generator = np.random.default_rng(5)

    def rows(number: int) -> list[list[int]]:
        return [generator.choice(12, 3, replace=False).tolist() for _ in range(number)]

    steps = [[rows(2), rows(2), rows(2)]] * 2
    steps += [[rows(40), rows(33), rows(40)], [rows(1), [], rows(1)], *([rows(3), rows(1), rows(2)] for _ in range(20))]
    sizes = [24 * KIB, 40 * KIB, 64 * KIB]
    trace = make_trace(
        steps,
        phases=["warmup"] * 2 + ["prefill"] + ["decode"] * 21,
        layer_ids=[3, 4, 11],
        num_experts=[12, 12, 12],
        expert_bytes=sizes,
    )
    pool = pool_for(trace, tmp_path / "pool", np.repeat(sizes, 12))
    events = events_of(trace)
    used = {(layer, obj) for layer, event in events for obj in event}
    once = sum(sizes[layer] for layer, _ in used)
    run = reading(once, lambda: replayed(trace, pool, warm_pass=False))
    assert failed(run) == set()
    check_rows(run, data)
    assert run.run["replayed_steps"] == 22
    assert run.run["events"] == len(events) == 65
    assert run.run["accesses"] == sum(len(event) for _, event in events)
    assert run.run["selections"] == 3 * sum(len(layer) for step in steps[2:] for layer in step)
    assert run.run["demand_bytes"] == sum(len(event) * sizes[layer] for layer, event in events)
    # Sizes that are no multiple of a larger page leave pages that two experts share.
    if all(size % PAGE == 0 for size in sizes):
        assert run.run["device_bytes"] == once
    assert [row["step_id"] for row in run.steps] == list(range(2, 24))
    assert [row["layer_id"] for row in run.layers] == [3, 4, 11]
    part = replayed(trace, pool, warm_pass=False, steps=(1, 3))
    assert failed(part) == set()
    assert [row["step_id"] for row in part.steps] == [3, 4]
    assert (part.run["step_begin"], part.run["step_end"]) == (1, 3)
    assert part.run["events"] == 5


def test_every_run_has_its_own_name_and_conditions_share_theirs(trace: Trace, pool: Pool) -> None:
    names = [supervisor.condition_hash("t", "p", request(threads=threads)) for threads in (1, 1, 2)]
    assert names[0] == names[1] != names[2]


# Bad input


def test_trace_and_pool_that_do_not_match(trace: Trace, pool: Pool, folder: Path) -> None:
    other = make_trace(routing(3, experts=64), layer_ids=[1, 2, 5, 8], num_experts=64)
    with pytest.raises(PoolMismatch, match=r"layer"):
        replay(other, pool, request())
    fewer = make_trace(routing(3, experts=64), layer_ids=[1, 2, 5, 9], num_experts=[64, 64, 65, 64])
    with pytest.raises(PoolMismatch, match=r"5.*65|65.*5|64"):
        replay(fewer, pool, request())
    sized = make_trace(routing(3, experts=64), layer_ids=[1, 2, 5, 9], num_experts=64, expert_bytes=32 * KIB)
    with pytest.raises(PoolMismatch, match=r"65,?536"):
        replay(sized, pool, request())
    assert children(os.getpid()) == {}


def test_mismatch_on_the_command_line_is_a_wrong_call(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(make_trace(routing(3), layer_ids=[0, 1, 2, 3], num_experts=16), tmp_path / "trace.parquet")
    assert main(["replay", str(path), "--pool", str(pool.folder), "--device", "none"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("replayer: ")


@pytest.fixture
def own_pool(pool: Pool, tmp_path: Path) -> Pool:
    """A copy of the pool that may be spoilt."""
    shutil.copytree(pool.folder, tmp_path / "pool")
    return read_pool(tmp_path / "pool")


def test_pool_file_that_shrinks_during_the_run(trace: Trace, own_pool: Pool, data: DataFolder) -> None:
    file = own_pool.folder / own_pool.files[2]
    run = interfered(trace, own_pool, lambda _reader: os.truncate(file, 10 * PAGE), share=0.05, warm_pass=False)
    assert run.run["status"] == "failed"
    words = run.run["failure"]
    assert words.startswith("step ")
    assert "layer 5, expert " in words
    assert f"{file}: the file ended after " in words
    assert "shrank during the run" in words
    assert {"run complete", "pool files unchanged"} <= failed(run)
    assert run.run["replayed_steps"] == 150 > len(run.steps) > 0
    # A part of a run has no counterpart, and is written all the same.
    assert run.run["amplification_resident"] is run.run["consumed_digest"] is run.run["resident_miss_bytes"] is None
    write_run(data, run)


def test_pool_file_that_shrinks_during_the_warm_up(trace: Trace, own_pool: Pool, data: DataFolder) -> None:
    file = own_pool.folder / own_pool.files[0]
    run = interfered(
        trace, own_pool, lambda _reader: os.truncate(file, 0), during="warm-up pass", share=0.05, owner="restream"
    )
    assert run.run["status"] == "failed"
    assert f"{file}: the file ended after 0 of the expert's 65,536 bytes" in run.run["failure"]
    assert run.steps == run.layers == []
    assert run.run["reads"] is None
    write_run(data, run)


def test_pool_file_that_is_gone(trace: Trace, own_pool: Pool, data: DataFolder) -> None:
    (own_pool.folder / own_pool.files[3]).unlink()
    with pytest.raises(OSError, match=own_pool.files[3]) as raised:
        run = replayed(trace, own_pool)
        # Either is fine, but it must be named.
        raise FileNotFoundError(run.run["failure"])
    assert "No such file" in str(raised.value)


def hollowed(file: Path) -> None:
    """Puts a hole between the first and the last page; length and both ends stay."""
    content = file.read_bytes()
    file.unlink()
    with file.open("wb") as out:
        out.write(content[: 2 * PAGE])
        out.seek(len(content) - 2 * PAGE)
        out.write(content[-2 * PAGE :])


def linked(file: Path) -> None:
    file.rename(file.with_suffix(".away"))
    file.symlink_to(file.with_suffix(".away"))


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def emptied(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (hollowed, "a hole at byte"),
        (linked, "no regular file"),
        (piped, "no regular file"),
        (emptied, "no regular file"),
        (lambda file: os.truncate(file, 10 * PAGE), f"{10 * PAGE:,} bytes, wanted"),
    ],
)
@pytest.mark.parametrize("observe", ["every", "sample"])
def test_pool_file_that_is_not_what_it_should_be_is_refused_at_the_start(
    trace: Trace, own_pool: Pool, spoil: Callable[[Path], None], words: str, observe: str
) -> None:
    file = own_pool.folder / own_pool.files[3]
    spoil(file)
    with pytest.raises(MalformedPool, match=words) as raised:
        replayed(trace, own_pool, observe=observe)
    assert str(file) in str(raised.value)


def test_manifest_of_another_making_is_refused(trace: Trace, pool: Pool) -> None:
    with pytest.raises(MalformedPool, match="content evil_v9"):
        replayed(trace, dataclasses.replace(pool, content="evil_v9"))
    with pytest.raises(MalformedPool):
        replayed(trace, dataclasses.replace(pool, alignment_bytes=3))
    with pytest.raises(UnusableReplay, match="leave --verify out"):
        replayed(trace, dataclasses.replace(pool, content=None), verify="all")


def test_pool_folder_that_goes_during_the_run_leaves_a_row(trace: Trace, own_pool: Pool, data: DataFolder) -> None:
    run = interfered(trace, own_pool, lambda _reader: shutil.rmtree(own_pool.folder), share=0.05, warm_pass=False)
    assert {"pool files unchanged", "machine state unchanged"} <= failed(run)
    assert f"{len(own_pool.files)} changed, first {own_pool.files[0]}" in run.run["bytes_reasons"]
    write_run(data, run)


def test_file_with_its_time_set_back_has_changed(trace: Trace, own_pool: Pool) -> None:
    file = own_pool.folder / own_pool.files[1]

    def touch(_reader: int) -> None:
        before = file.stat()
        os.utime(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    run = interfered(trace, own_pool, touch, share=0.05, warm_pass=False)
    assert failed(run) == {"pool files unchanged"}


def test_sampled_accesses_stand_everywhere(trace: Trace, pool: Pool) -> None:
    run = replayed(trace, pool, observe="sample")
    # One of sixteen of 2,400; events of four would give one place only, if every sixteenth were taken.
    assert 100 < run.run["observed_accesses"] < 210
    assert [row["layer_id"] for row in run.layers if row["observed_accesses"]] == [
        row["layer_id"] for row in run.layers
    ]


def test_reader_that_is_asked_to_stop_is_interrupted(trace: Trace, pool: Pool) -> None:
    def ask(reader: int) -> None:
        os.kill(reader, signal.SIGTERM)

    warm = interfered(trace, pool, ask, during="warm-up pass", share=0.1)
    assert warm.run["status"] == "interrupted"
    assert "asked to stop in the warm-up pass, step " in warm.run["failure"]
    measured = interfered(trace, pool, ask, share=0.1, warm_pass=False)
    assert measured.run["status"] == "interrupted"
    assert "asked to stop in the measured pass, step " in measured.run["failure"]


def test_results_that_cannot_be_written_are_said_before_the_run_or_printed_after_it(
    trace: Trace,
    pool: Pool,
    long_trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("")
    asked = ["replay", str(long_trace), "--pool", str(pool.folder), "--device", "none", "--steps", "0:3", "--json"]
    asked += ["--wait", str(WAIT_S), "--repeat", "2"]
    with monkeypatch.context() as before:
        before.setattr("replayer.replay_cli.replay", lambda *_, **__: pytest.fail("it replayed"))
        assert main([*asked, "--data", str(tmp_path / "file")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("replayer.replay_cli.write_run", full)
    assert main([*asked, "--data", str(tmp_path / "data")]) == 1
    said = capsys.readouterr()
    assert [run["status"] for run in json.loads(said.out)] == ["complete"]
    assert "No space left" in said.err


def test_input_output_error_during_the_run(tmp_path: Path) -> None:
    outcome = on_private_disk("input_output_error", tmp_path)
    assert outcome["run"]["status"] == "failed"
    words = outcome["run"]["failure"]
    assert words.startswith("step ")
    assert "layer 3, expert " in words
    assert f"{outcome['file']}: read failed: Input/output error" in words
    assert not outcome["run"]["bytes_valid"]


def test_file_system_without_direct_reads(tmp_path: Path) -> None:
    outcome = on_private_disk("no_direct_reads", tmp_path)
    assert outcome["restream"].startswith("UnusableReplay")
    assert "refuses O_DIRECT, which owner restream needs" in outcome["restream"]
    assert outcome["page_cache"].startswith("UnsuitableStorage")
    # Allowed, it is made and marked; and what lies in memory cannot be dropped from it.
    assert outcome["run"]["status"] == "complete"
    assert not outcome["run"]["bytes_valid"]
    names = {one["name"] for one in outcome["proofs"] if one["held"] is False}
    assert {"pool on a device", "pool absent at the cold start"} <= names


def test_capacity_below_the_reads_in_flight(walls: None, trace: Trace, pool: Pool, data: DataFolder) -> None:
    asked: dict[str, Any] = {"mechanism": "cgroup", "capacity_bytes": 3 * MIB, "threads": 64}
    with pytest.raises(UnusableReplay, match=r"4,194,304 bytes in flight.*--threads.*--allow-thrash"):
        replay(trace, pool, request(**asked))
    run = replayed(trace, pool, **asked, allow_thrash=True, steps=(0, 30))
    assert run.run["thrash"] is True
    # Where it is too tight even for that, the kernel's word is passed on.
    assert run.run["status"] in ("complete", "killed")
    assert run.run["bytes_valid"] or run.run["bytes_reasons"]
    write_run(data, run)


def test_many_threads_leave_the_capacity_what_it_is(walls: None, trace: Trace, pool: Pool) -> None:
    """What the threads touch in their first pass is touched, and measured, before the limit is set."""
    run = replayed(trace, pool, mechanism="cgroup", capacity_bytes=8 * MIB, threads=32, steps=(0, 100))
    assert run.run["thrash"] is False
    assert run.run["resident_max_bytes"] > 6.5 * MIB


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"mechanism": "cgroup"}, "say both or neither"),
        ({"capacity_bytes": MIB}, "say both or neither"),
        ({"mechanism": "cgroup", "capacity_bytes": MIB, "outer_group_bytes": 64 * MIB}, "wanted balloon"),
        ({"outer_group_bytes": 64 * MIB}, "wanted balloon"),
    ],
)
def test_requests_that_contradict_themselves(trace: Trace, pool: Pool, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableReplay, match=words):
        replay(trace, pool, request(**asked))


def test_more_room_than_the_machine_has(walls: None, trace: Trace, pool: Pool) -> None:
    room = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(UnusableReplay, match="bytes available"):
        replayed(trace, pool, mechanism="cgroup", capacity_bytes=room)
    assert children(os.getpid()) == {}
    assert our_groups() == []


def test_more_room_than_the_machine_that_a_group_stands_for(walls: None, trace: Trace, pool: Pool) -> None:
    with pytest.raises(UnusableReplay, match="leave nothing to lock of a machine of"):
        replayed(trace, pool, mechanism="balloon", capacity_bytes=256 * MIB, outer_group_bytes=128 * MIB)
    assert our_groups() == []


def test_second_replay_on_the_machine_is_refused(trace: Trace, pool: Pool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        with contextlib.suppress(OSError):
            # Taken already: then somebody else is the other one.
            other.bind(supervisor._MACHINE_LOCK)
        with pytest.raises(ReplayBusy, match="another replay runs on this machine"):
            replay(trace, pool, request())
    assert children(os.getpid()) == {}


def test_pool_that_is_being_built_is_refused(trace: Trace, own_pool: Pool) -> None:
    descriptor = os.open(own_pool.folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ReplayBusy, match=f"{own_pool.folder}: somebody builds or replays this pool"):
            replayed_at_once(trace, own_pool)
    finally:
        os.close(descriptor)


def replayed_at_once(trace: Trace, pool: Pool) -> None:
    """Waits for the machine, but not for the pool."""
    for _ in range(100):
        try:
            replay(trace, pool, request(), wait_s=0.1)
        except ReplayBusy as busy:
            if "on this machine" not in str(busy):
                raise
    pytest.fail("the machine was never free")


# Without permissions


@pytest.fixture(scope="module")
def as_nobody(trace: Trace) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """(words that start a command without rights, its environment, a folder with trace and pool of its own)."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give its rights up, with setpriv")
    place = Path(tempfile.mkdtemp(prefix="expert-tier-nobody-"))
    try:
        # Compiled code is kept beside the modules, so they must be this user's.
        for package in ("replayer", "schemas"):
            shutil.copytree(ROOT / package, place / package)
        small = make_trace(routing(10), layer_ids=[0, 1, 2, 3], num_experts=16)
        write_trace(small, place / "trace.parquet")
        pool_for(small, place / "pool", EXPERT_BYTES)
        for found in [place, *place.rglob("*")]:
            os.chown(found, 65534, 65534)
        # The interpreter may lie where only its owner can read.
        start = [
            "prlimit", "--memlock=65536:65536",
            "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs",
            "--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search",
            "--bounding-set", "-all,+dac_read_search",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(place), "HOME": str(place)}
        tried = subprocess.run([*start, sys.executable, "-c", ""], env=environment, capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"no interpreter without rights: {tried.stderr.strip()}")
        yield start, environment, place
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("mechanism", ["cgroup", "balloon"])
def test_mechanism_without_permission_is_a_wrong_call(
    as_nobody: tuple[list[str], dict[str, str], Path], mechanism: str
) -> None:
    start, environment, place = as_nobody
    # Nothing can be locked; if it could, 1.5 GiB would be.
    available = (counters.parse_meminfo(Path("/proc/meminfo").read_bytes()) or {})["MemAvailable"]
    done = called(
        "replay", place / "trace.parquet", "--pool", place / "pool", "--device", "none", "--threads", 2, "--mechanism",
        mechanism, "--capacity", available - 1536 * MIB, "--wait", WAIT_S, within=start, env=environment, cwd=place,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert {"cgroup": "no permission to make a cgroup", "balloon": "memlock"}[mechanism] in done.stderr.lower()


# Stopped


@dataclasses.dataclass
class Started:
    """A command line that runs, and what it started."""

    process: "subprocess.Popen[str]"
    data: DataFolder

    @property
    def reader(self) -> int | None:
        found = [pid for pid, command in children(self.process.pid).items() if "replayer.measure" in command]
        return found[0] if found else None

    def device_bytes(self) -> int:
        """What its reader has read so far."""
        text = counters.read_counter_file(f"/proc/{self.reader}/io") if self.reader else None
        return (counters.parse_io(text) or {}).get("read_bytes", 0)

    def row(self) -> dict[str, Any]:
        (file,) = (self.data.results / "replay_run").glob("*/*.parquet")
        (row,) = pl.read_parquet(file).to_dicts()
        return row


@pytest.fixture(scope="module")
def long_trace(folder: Path) -> Path:
    """Some 100,000 accesses: seconds, where a signal comes after tenths of one."""
    ids = np.stack([routing(400, experts=64, k=4, seed=seed) for seed in range(24)], axis=2)
    trace = make_trace(ids.tolist(), layer_ids=[1, 2, 5, 9], num_experts=64, trace_id="long")
    return write_trace(trace, folder / "long.parquet")


@contextlib.contextmanager
def started(trace: Path, pool: Pool, data: Path, *arguments: object) -> Iterator[Started]:
    command = command_line(
        "replay", trace, "--pool", pool.folder, "--device", "none", "--owner", "restream", "--wait", WAIT_S, "--json",
        "--data", data, *arguments,
    )  # fmt: skip
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Started(process, DataFolder(data))
    finally:
        process.kill()
        process.communicate()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("moment", "number", "arguments"),
    [
        ("set-up", signal.SIGINT, ("--mechanism", "cgroup", "--capacity", "64MiB")),
        ("warm-up", signal.SIGTERM, ("--mechanism", "balloon", "--capacity", "64MiB", "--machine-bytes", "256MiB")),
        ("measured", signal.SIGINT, ("--mechanism", "cgroup", "--capacity", "64MiB", "--cold")),
    ],
)
def test_signal_ends_a_run_at_once_and_marks_it(
    walls: None, long_trace: Path, pool: Pool, tmp_path: Path, moment: str, number: int, arguments: tuple[str, ...]
) -> None:
    with started(long_trace, pool, tmp_path / "data", *arguments) as going:
        until(lambda: going.reader, WAIT_S)
        if moment != "set-up":
            until(lambda: going.device_bytes() > 32 * MIB, WAIT_S)
        below = children(going.process.pid)
        assert len(below) == (2 if "balloon" in arguments else 1)
        sent = time.monotonic()
        going.process.send_signal(number)
        stdout, stderr = going.process.communicate(timeout=30)
        took = time.monotonic() - sent
        assert going.process.returncode == 1, stderr
        assert took < STOPPED_WITHIN_S
        assert all(gone(pid) for pid in below)
        assert [group for group in our_groups() if f"-{going.process.pid}-" in group.name] == []
        row = going.row()
    printed = json.loads(stdout)
    assert printed["run_id"] == row["run_id"]
    assert row["status"] == printed["status"] == "interrupted"
    assert row["bytes_valid"] is False
    place = {"set-up": "before the first read", "warm-up": "in the warm-up pass, step ", "measured": "in the measured"}
    assert row["failure"].startswith(f"interrupted {place[moment]}")
    assert len(stderr.splitlines()) == 1
    if moment == "measured":
        assert 0 < row["returned_bytes"] < row["demand_bytes"]
    else:
        assert row["returned_bytes"] is None


def test_signal_to_this_process_ends_its_run(trace: Trace, pool: Pool, data: DataFolder) -> None:
    taken = []

    def act(reader: int) -> None:
        taken.append((reader, time.monotonic()))
        os.kill(os.getpid(), signal.SIGTERM)

    honest = signal.getsignal(signal.SIGTERM)
    run = interfered(trace, pool, act, during="measured pass", share=0.2)
    reader, sent = taken[-1]
    assert time.monotonic() - sent < STOPPED_WITHIN_S
    assert run.run["status"] == "interrupted"
    assert run.run["failure"].startswith("interrupted in the measured pass, step ")
    assert gone(reader)
    assert signal.getsignal(signal.SIGTERM) is honest
    # The steps that had ended are there, and nothing that was not looked at is blamed.
    assert 0 < len(run.steps) < 150
    assert failed(run) <= {"run complete", "reads conserved", "bytes returned"}
    step = int(run.run["failure"].rpartition(" ")[2])
    assert abs(step - len(run.steps)) <= 1
    write_run(data, run)


def test_killed_supervisor_leaves_what_the_next_start_removes(
    walls: None, long_trace: Path, trace: Trace, pool: Pool, tmp_path: Path
) -> None:
    mechanism = ("--mechanism", "balloon", "--capacity", "64MiB", "--machine-bytes", "256MiB")
    with started(long_trace, pool, tmp_path / "data", *mechanism) as going:
        until(lambda: going.device_bytes() > 32 * MIB, WAIT_S)
        below = children(going.process.pid)
        assert len(below) == 2
        going.process.kill()
        going.process.wait()
        until(lambda: all(gone(pid) for pid in below), STOPPED_WITHIN_S)
        mine = f"-{going.process.pid}-"
        assert len([group for group in our_groups() if mine in group.name]) == 1
    run = replayed(trace, pool, warm_pass=False, steps=(0, 5))
    assert failed(run) == set()
    assert [group for group in our_groups() if mine in group.name] == []
    assert not (tmp_path / "data" / "results" / "replay_run").exists()


def test_reader_that_is_killed_is_named_so(trace: Trace, pool: Pool, data: DataFolder) -> None:
    run = interfered(trace, pool, lambda reader: os.kill(reader, signal.SIGKILL))
    assert run.run["status"] == "killed"
    assert "was killed in the measured pass, step " in run.run["failure"]
    assert "by SIGKILL" in run.run["failure"]
    assert 0 < len(run.steps) < 150
    write_run(data, run)


def test_reader_that_cannot_start_is_quoted(
    trace: Trace, pool: Pool, data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MEASURE_COMMAND", (sys.executable, "-c", "raise SystemExit('no such luck')"))
    run = replayed(trace, pool)
    assert run.run["status"] == "failed"
    assert "ended with code 1 before the first read: no such luck" in run.run["failure"]
    assert not run.run["bytes_valid"]
    write_run(data, run)


def test_storage_that_proves_nothing_is_refused(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or storage_of(memory).suitable:
        pytest.skip("no file system in memory here")
    with tempfile.TemporaryDirectory(dir=memory) as place:
        plan = plan_pool([1, 2, 5, 9], [64] * 4, 8 * KIB, layout="per_layer", alignment_bytes=PAGE)
        pool = build_pool(plan, Path(place) / "pool", allow_unsuitable=True)
        with pytest.raises(UnsuitableStorage, match="proves nothing"):
            replayed(trace, pool)
