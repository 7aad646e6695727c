"""Pools: what is laid out, what lies on the disk, what goes on after a kill, and what damage is named."""

import argparse
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from replayer.command import Parser, run
from replayer.counters import resident_bytes
from replayer.machine import storage_of
from replayer.pool import (
    MANIFEST,
    MAX_ALIGNMENT_BYTES,
    PACKED,
    PARTS,
    POOL_LAYOUTS,
    MalformedPool,
    NoRoom,
    Pool,
    PoolBusy,
    PoolMismatch,
    PoolPlan,
    UnsuitableStorage,
    UnusablePlan,
    build_pool,
    check_against_trace,
    plan_pool,
    read_pool,
    verify_pool,
)
from replayer.pool_cli import add_pool_commands
from replayer.trace import MalformedTrace
from tests.builders import make_trace, write_trace

ROOT = Path(__file__).parents[1]
PAGE = os.sysconf("SC_PAGE_SIZE")
WORDS = 2**64


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORDS
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORDS
    return word ^ (word >> 31)


def bytes_by_definition(layer_id: int, expert_id: int, length: int) -> bytes:
    key = mixed((layer_id << 32) ^ expert_id ^ 0x9E3779B97F4A7C15)
    words = (mixed((key + index * 0x9E3779B97F4A7C15) % WORDS) for index in range(-(-length // 8)))
    return b"".join(word.to_bytes(8, "little") for word in words)[:length]


def built(plan: PoolPlan, folder: Path) -> Pool:
    # The folder of the tests may lie on anything.
    return build_pool(plan, folder, allow_unsuitable=True)


def small(layout: str = "per_layer", expert_bytes: int = 3 * PAGE, alignment_bytes: int = PAGE) -> PoolPlan:
    return plan_pool([3, 7], [3, 2], expert_bytes, layout=layout, alignment_bytes=alignment_bytes)


def failed(pool: Pool, content: str = "all") -> dict[str, str]:
    return {one.name: one.found for one in verify_pool(pool, content=content, allow_unsuitable=True) if not one.held}


@pytest.mark.parametrize("alignment", [PACKED, PAGE])
@pytest.mark.parametrize("layout", POOL_LAYOUTS)
def test_every_expert_lies_at_its_extents_and_safetensors_reads_its_parts(tmp_path, layout, alignment):
    size = 3 * PAGE if alignment > 1 else 3 * PAGE + 40
    pool = built(small(layout, size, alignment), tmp_path / "pool")
    for item in range(pool.num_objects):
        layer_id, expert_id = int(pool.object_layer_id[item]), int(pool.object_expert_id[item])
        wanted = bytes_by_definition(layer_id, expert_id, size)
        extents = range(pool.object_first_extent[item], pool.object_first_extent[item + 1])
        assert len(extents) == (3 if layout == "stacked" else 1)
        found = b""
        for extent in extents:
            begin, length = int(pool.extent_offset_bytes[extent]), int(pool.extent_length_bytes[extent])
            assert pool.extent_begin_bytes[extent] == len(found)
            found += (pool.folder / pool.files[pool.extent_file[extent]]).read_bytes()[begin : begin + length]
        assert found == wanted
        with safe_open(pool.folder / pool.files[pool.extent_file[extents[0]]], framework="numpy") as tensors:
            if layout == "stacked":
                parts = [tensors.get_slice(part)[expert_id : expert_id + 1] for part in PARTS]
            else:
                prefix = f"experts.{expert_id}." if layout == "per_layer" else ""
                parts = [tensors.get_tensor(prefix + part) for part in PARTS]
            assert {part.dtype for part in parts} == {np.dtype(np.uint8)}
            assert all(part.size % 8 == 0 for part in parts[:2])
            assert b"".join(part.tobytes() for part in parts) == wanted


@pytest.mark.parametrize("layout", POOL_LAYOUTS)
def test_what_is_read_back_is_what_was_built(tmp_path, layout):
    pool = built(small(layout), tmp_path / "pool")
    again = read_pool(tmp_path / "pool")
    assert (again.pool_id, again.files, again.alignment_bytes) == (pool.pool_id, pool.files, PAGE)
    assert again.pool_id == small(layout).pool_id
    assert np.array_equal(again.object_bytes, [3 * PAGE] * 5)
    assert np.array_equal(again.extent_begin_bytes, pool.extent_begin_bytes)
    assert failed(again) == {}
    assert len({small(name).pool_id for name in POOL_LAYOUTS}) == 3


@pytest.mark.parametrize("layout", POOL_LAYOUTS)
def test_packed_experts_straddle_pages_on_purpose(layout):
    size = 4 * PAGE
    plan = plan_pool([0, 1], [8, 8], size, layout=layout, alignment_bytes=PACKED)
    assert np.all(plan.extent_offset_bytes % 8 == 0)
    # A multiple of the page that starts inside a page touches one page more than it fills.
    first, last = plan.extent_offset_bytes // PAGE, (plan.extent_offset_bytes + plan.extent_length_bytes - 1) // PAGE
    pages_touched, pages_filled = last - first + 1, -(-plan.extent_length_bytes // PAGE)
    if layout == "stacked":
        assert np.mean(plan.extent_offset_bytes % PAGE != 0) > 0.9
        assert pages_touched.sum() > pages_filled.sum()
    else:
        assert np.all(plan.extent_offset_bytes % PAGE != 0)
        assert np.all(pages_touched == pages_filled + 1)


@given(
    layout=st.sampled_from(POOL_LAYOUTS),
    alignment=st.integers(0, 20).map(lambda power: 2**power),
    experts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_extents_are_aligned_disjoint_whole_and_inside_their_files(layout, alignment, experts, data):
    if layout == "stacked":
        sizes = np.repeat(
            [max(24, alignment * data.draw(st.integers(3, 5))) // alignment * alignment for _ in experts], experts
        )
        sizes = np.maximum(sizes, 32)
    else:
        sizes = np.array(data.draw(st.lists(st.integers(24, 3000), min_size=sum(experts), max_size=sum(experts))))
    plan = plan_pool(range(len(experts)), experts, sizes, layout=layout, alignment_bytes=alignment)
    assert np.array_equal(plan.object_bytes, sizes)
    assert np.all(plan.extent_offset_bytes % alignment == 0)
    for file in range(len(plan.files)):
        extents = plan.extents_of(file)
        begins = plan.extent_offset_bytes[extents]
        ends = begins + plan.extent_length_bytes[extents]
        assert begins[0] > 8
        assert np.all(begins[1:] >= ends[:-1])
        assert ends[-1] == plan.file_bytes[file]


def test_unequal_odd_sizes_are_written_and_verified_packed_and_padded(tmp_path):
    sizes = [100, 24, 8195, 33, 70001]
    for alignment in (PACKED, 64, PAGE):
        plan = plan_pool([0, 1], [3, 2], sizes, layout="per_layer", alignment_bytes=alignment)
        pool = built(plan, tmp_path / str(alignment))
        assert failed(pool) == {}
        extent = 2
        begin = int(pool.extent_offset_bytes[extent])
        found = (pool.folder / pool.files[0]).read_bytes()[begin : begin + 8195]
        assert found == bytes_by_definition(0, 2, 8195)
        with safe_open(pool.folder / pool.files[1], framework="numpy") as tensors:
            assert ("padding.0" in tensors.keys()) == (alignment > 1)  # noqa: SIM118


def test_files_larger_than_a_buffer_are_whole(tmp_path):
    plan = plan_pool([0], [5], 9_000_000, layout="per_layer", alignment_bytes=PACKED)
    pool = built(plan, tmp_path / "pool")
    assert failed(pool) == {}
    begin = int(pool.extent_offset_bytes[4]) + 8_999_000
    assert (pool.folder / pool.files[0]).read_bytes()[begin:] == bytes_by_definition(0, 4, 9_000_000)[-1000:]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"alignment_bytes": 3}, "power of two"),
        ({"alignment_bytes": 2 * MAX_ALIGNMENT_BYTES}, "power of two"),
        ({"layout": "per-file"}, "layout 'per-file'"),
        ({"expert_bytes": 23}, "at least 24"),
        ({"expert_bytes": [100, 100]}, "2 expert sizes"),
        ({"layout": "stacked", "expert_bytes": 3 * PAGE + 8}, "--align none"),
        ({"layout": "stacked", "expert_bytes": 2 * PAGE}, "--align none"),
        ({"layout": "stacked", "expert_bytes": [3 * PAGE, 6 * PAGE, 3 * PAGE, PAGE, PAGE]}, "layer 3: experts of"),
    ],
)
def test_a_pool_that_cannot_be_laid_out_is_refused(change, named):
    asked = {"layout": "per_layer", "alignment_bytes": PAGE, "expert_bytes": 3 * PAGE} | change
    with pytest.raises(UnusablePlan, match=named):
        plan_pool([3, 7], [3, 2], asked.pop("expert_bytes"), **asked)


def test_a_built_pool_is_cold_and_leaves_nothing_but_its_files(tmp_path):
    pool = built(small("per_expert"), tmp_path / "pool")
    found = {str(path.relative_to(pool.folder)) for path in pool.folder.rglob("*") if path.is_file()}
    assert found == {*pool.files, MANIFEST}
    if storage_of(tmp_path).kind != "disk":
        pytest.skip(f"{storage_of(tmp_path).filesystem} keeps its pages")
    assert resident_bytes(pool.folder / name for name in pool.files) == 0


def test_a_finished_pool_is_left_as_it_is_and_a_lost_file_comes_back(tmp_path):
    pool = built(small(), tmp_path / "pool")
    before = {path: path.stat().st_mtime_ns for path in pool.folder.iterdir()}
    calls = []
    again = build_pool(small(), pool.folder, allow_unsuitable=True, progress=lambda *call: calls.append(call))
    assert again.pool_id == pool.pool_id
    total = int(pool.file_bytes.sum())
    assert calls == [(total, total)]
    assert {path: path.stat().st_mtime_ns for path in pool.folder.iterdir()} == before
    (pool.folder / pool.files[1]).unlink()
    os.truncate(pool.folder / pool.files[0], 100)
    assert failed(built(small(), pool.folder)) == {}


def slow_build(folder: Path, files: int) -> "subprocess.Popen[str]":
    """A build in a process of its own that says a line for every batch and goes no faster than it is read."""
    code = f"""
import sys
from pathlib import Path
import replayer.pool as pool
pool._WRITERS, pool._BATCH_FILES = 1, 1
plan = pool.plan_pool([0], [{files}], {2**20}, layout="per_expert", alignment_bytes={PAGE})
def show(done, total):
    print(done, flush=True)
    sys.stdin.readline()
pool.build_pool(plan, Path({str(folder)!r}), allow_unsuitable=True, progress=show)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


@pytest.mark.parametrize("lines", [1, 2, 6])
def test_a_killed_build_goes_on_with_what_is_complete(tmp_path, lines):
    folder = tmp_path / "pool"
    with slow_build(folder, 40) as child:
        for _ in range(lines):
            assert child.stdout.readline()
            child.stdin.write("\n")
            child.stdin.flush()
        child.send_signal(signal.SIGKILL)
    (folder / "layer_00000" / ".expert_00039.safetensors.tmp").write_bytes(b"half")
    with pytest.raises(MalformedPool, match="unfinished"):
        read_pool(folder)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors") if not path.name.startswith(".")}
    plan = plan_pool([0], [40], 2**20, layout="per_expert", alignment_bytes=PAGE)
    other = plan_pool([0], [41], 2**20, layout="per_expert", alignment_bytes=PAGE)
    with pytest.raises(PoolMismatch, match="unfinished pool with 40 experts in layer 0, wanted 41"):
        built(other, folder)
    calls = []
    pool = build_pool(plan, folder, allow_unsuitable=True, progress=lambda *call: calls.append(call))
    assert calls[0][0] == sum(path.stat().st_size for path in kept)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert failed(pool) == {}
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_build_removes_what_is_half_written(tmp_path, call):
    # 96 files make a batch of their own, after which progress is told.
    plan = plan_pool([0], [500], PAGE, layout="per_expert", alignment_bytes=PAGE)
    with pytest.raises(KeyboardInterrupt):
        build_pool(plan, tmp_path / "pool", allow_unsuitable=True, progress=interrupted_on_call(call))
    assert not list((tmp_path / "pool").rglob(".*.tmp"))
    assert failed(built(plan, tmp_path / "pool")) == {}


def interrupted_on_call(number: int):
    calls = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == number:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (small("per_expert"), "layout per_layer, wanted per_expert"),
        (small(alignment_bytes=PACKED), f"alignment_bytes {PAGE}, wanted 1"),
        (small(expert_bytes=PAGE), f"{3 * PAGE} bytes in layer 3, expert 0, wanted {PAGE}"),
        (plan_pool([3, 8], [3, 2], 3 * PAGE, layout="per_layer", alignment_bytes=PAGE), "layer 7 .* wanted layer 8"),
        (plan_pool([3], [3], 3 * PAGE, layout="per_layer", alignment_bytes=PAGE), "2 MoE layers, wanted 1"),
    ],
)
def test_another_pool_is_not_built_over_one(tmp_path, other, named):
    pool = built(small(), tmp_path / "pool")
    with pytest.raises(PoolMismatch, match=named):
        built(other, pool.folder)
    assert failed(pool) == {}


def test_a_folder_of_other_things_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis").write_text("years")
    with pytest.raises(PoolMismatch, match="holds 'thesis'"):
        built(small(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_one_builder_at_a_time(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(PoolBusy, match="another process builds or replays"):
            built(small(), tmp_path)
    finally:
        os.close(descriptor)


def test_no_room_is_said_before_anything_is_written(tmp_path):
    free = os.statvfs(tmp_path)
    huge = free.f_bavail * free.f_frsize // 4
    plan = plan_pool([0], [5], huge, layout="per_expert", alignment_bytes=PAGE)
    with pytest.raises(NoRoom, match="are free"):
        built(plan, tmp_path / "a" / "pool")
    assert not (tmp_path / "a").exists()


def test_a_device_that_fills_up_half_way_is_one_line_and_the_build_goes_on_later(tmp_path):
    code = f"""
import os
from pathlib import Path
import replayer.pool as pool
folder = Path({str(tmp_path)!r})
pool._WRITERS, pool._BATCH_FILES = 2, 1
plan = pool.plan_pool([0], [12], 2**20, layout="per_expert", alignment_bytes=4096)
def fill(done, total):
    if done == 0:
        free = os.statvfs(folder)
        (folder / "neighbour").write_bytes(bytes(free.f_bavail * free.f_frsize - 5 * 2**20))
try:
    pool.build_pool(plan, folder / "pool", allow_unsuitable=True, progress=fill)
except pool.NoRoom as error:
    print(error)
(folder / "neighbour").unlink()
kept = len(list((folder / "pool").rglob("expert_*")))
assert not list((folder / "pool").rglob(".expert*"))
built = pool.build_pool(plan, folder / "pool", allow_unsuitable=True)
print(kept, all(check.held for check in pool.verify_pool(built, content="all", allow_unsuitable=True)))
print(built.unsuitable_storage)
"""
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=16m none {tmp_path} && exec "$@"', "sh"]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a mount of its own (root, unshare)")
    done = subprocess.run([*mounted, sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    message, outcome, mark = done.stdout.splitlines()
    assert "No space left" in message
    assert "complete files are kept" in message
    kept, holds = outcome.split()
    assert 1 <= int(kept) <= 5
    assert holds == "True"
    assert mark.startswith("tmpfs")


def test_memory_is_no_storage_unless_asked_for_and_then_marked():
    if not Path("/dev/shm").is_dir() or storage_of(Path("/dev/shm")).suitable:
        pytest.skip("no tmpfs at /dev/shm")
    folder = Path("/dev/shm") / f"expert-tier-test-{os.getpid()}"
    try:
        with pytest.raises(UnsuitableStorage, match="--allow-unsuitable"):
            build_pool(small(), folder)
        assert not folder.exists()
        pool = built(small(), folder)
        assert read_pool(folder).unsuitable_storage.startswith("tmpfs")
        with pytest.raises(UnsuitableStorage):
            verify_pool(pool)
        (storage,) = [one for one in verify_pool(pool, allow_unsuitable=True) if one.name == "storage"]
        assert storage.held
        assert "tmpfs" in storage.found
    finally:
        for path in folder.glob("*"):
            path.unlink()
        if folder.exists():
            folder.rmdir()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_damage_is_found_and_its_file_named(tmp_path):
    pool = built(small("per_expert", 40 * PAGE), tmp_path / "pool")
    assert failed(pool) == {}
    paths = [pool.folder / name for name in pool.files]
    head = int(pool.extent_offset_bytes[0])
    flip(paths[0], head + 40 * PAGE - 1)
    found = failed(pool, "sampled")
    assert set(found) == {"content"}
    assert "layer_00003/expert_00000.safetensors: 1 of" in found["content"]
    flip(paths[0], head + 40 * PAGE - 1)
    flip(paths[1], head)
    assert "expert_00001" in failed(pool, "sampled")["content"]
    assert failed(pool, "none") == {}
    flip(paths[1], head)
    flip(paths[2], 12)
    assert "byte 12" in failed(pool)["header"]
    flip(paths[2], 12)
    os.truncate(paths[3], head + 8)
    found = failed(pool)
    assert f"{head + 8} bytes, wanted" in found["length"]
    assert "ends within layer 7, expert 0" in found["content"]
    paths[4].unlink()
    paths[4].mkdir()
    assert "expert_00001.safetensors: no regular file" in failed(pool, "none")["length"]
    paths[4].rmdir()
    assert "No such file" in failed(pool, "none")["length"]


def test_one_wrong_byte_anywhere_is_found_when_all_is_read(tmp_path):
    for layout in POOL_LAYOUTS:
        pool = built(small(layout, 12 * PAGE, PACKED), tmp_path / layout)
        extent = len(pool.extent_file) - 1
        place = int(pool.extent_offset_bytes[extent]) + int(pool.extent_length_bytes[extent]) // 2
        flip(pool.folder / pool.files[pool.extent_file[extent]], place)
        assert "1 of" in failed(pool)["content"]


def test_many_faults_are_named_in_part_and_counted(tmp_path):
    plan = plan_pool([0], [9], PAGE, layout="per_expert", alignment_bytes=PAGE)
    pool = built(plan, tmp_path / "pool")
    for name in pool.files:
        (pool.folder / name).unlink()
    found = failed(pool, "none")["length"]
    assert found.count("expert_") == 3
    assert found.endswith("and 6 more files")


def test_a_hole_is_found_without_reading_content(tmp_path):
    pool = built(small(expert_bytes=64 * PAGE), tmp_path / "pool")
    path = pool.folder / pool.files[0]
    whole = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.write(whole[: len(whole) // 2])
        file.truncate(len(whole))
    assert path.stat().st_size == len(whole)
    if path.stat().st_blocks * 512 >= len(whole):
        pytest.skip("this file system makes no holes")
    assert "layer_00003.safetensors: a hole at byte" in failed(pool, "none")["holes"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stored, table: (stored | {"pool_id": "pool-0"}, table), "under the name pool-0"),
        (lambda stored, table: (stored | {"layout": "stacked"}, table), "parts"),
        (lambda stored, table: (stored | {"layout": "heap"}, table), "layout"),
        (lambda stored, table: (stored | {"content": None}, table), "content None in layout per_layer"),
        (lambda stored, table: (stored | {"layout": "mapped"}, table), "in layout mapped"),
        (lambda stored, table: (stored | {"schema_version": "9.0"}, table), "format 9.0"),
        (lambda stored, table: (stored | {"alignment_bytes": "4096"}, table), "alignment_bytes"),
        (lambda stored, table: (stored | {"experts_per_layer": [3, 3]}, table), "6 experts"),
        (lambda stored, table: (stored | {"moe_layer_ids": [7, 3]}, table), "ascend"),
        (lambda stored, table: (stored | {"files": [{"name": "../x", "bytes": 1}]}, table), "'../x'"),
        (lambda stored, table: (stored | {"files": stored["files"][:1]}, table), "does not name"),
        (lambda stored, table: (stored, table.slice(1)), "5 experts"),
        (lambda stored, table: (stored, table.slice(0, 0)), "5 experts"),
        (lambda stored, table: (stored, table.take([1, 0, 2, 3, 4])), "one after the other"),
        (lambda stored, table: (stored, table.drop_columns("part")), "columns"),
        (
            lambda stored, table: (stored | {"files": [one | {"bytes": 5} for one in stored["files"]]}, table),
            "leaves its file",
        ),
        (
            lambda stored, table: (stored | {"files": [one | {"bytes": 2**63 - 1} for one in stored["files"]]}, table),
            "files.0.bytes",
        ),
        (
            lambda stored, table: (
                stored | {"files": [one | {"name": f"./{one['name']}"} for one in stored["files"]]},
                table,
            ),
            "as plain as can be",
        ),
        (
            lambda stored, table: (
                stored,
                table.set_column(4, table.schema.field(4), pa.array(table["offset_bytes"].to_pylist()[:1] * 5)),
            ),
            "share bytes of a file",
        ),
    ],
)
def test_a_damaged_manifest_is_named_in_one_line(tmp_path, change, named):
    pool = built(small(), tmp_path / "pool")
    table = pq.read_table(pool.folder / MANIFEST)
    stored, rows = change(json.loads(table.schema.metadata[b"expert_tier_pool"]), table)
    pq.write_table(
        rows.replace_schema_metadata({"expert_tier_pool": json.dumps(stored)}),
        pool.folder / MANIFEST,
    )
    with pytest.raises(MalformedPool, match=named) as caught:
        read_pool(pool.folder)
    assert len(str(caught.value).splitlines()) == 1


def test_manifests_and_builds_of_format_1_0_are_read_and_go_on(tmp_path):
    pool = built(small(), tmp_path / "pool")
    path = pool.folder / MANIFEST
    table = pq.read_table(path)
    stored = json.loads(table.schema.metadata[b"expert_tier_pool"])
    assert stored.pop("checkpoint") is None
    old = stored | {"schema_version": "1.0"}
    pq.write_table(table.replace_schema_metadata({"expert_tier_pool": json.dumps(old)}), path)
    again = read_pool(pool.folder)
    # Recorded from the version that wrote format 1.0: an id outlives the format.
    assert plan_pool([3, 7], [3, 2], 12288, layout="stacked", alignment_bytes=4096).pool_id == "pool-ebb1f67e478d"
    assert (again.pool_id, again.checkpoint) == (pool.pool_id, None)
    assert failed(again) == {}
    path.unlink()
    request = {
        "schema_version": "1.0", "content": "synthetic_v1", "layout": "per_layer", "alignment_bytes": PAGE,
        "moe_layer_ids": [3, 7], "experts_per_layer": [3, 2], "expert_bytes": [3 * PAGE] * 5,
    }  # fmt: skip
    (pool.folder / ".request.json").write_text(json.dumps(request))
    assert failed(built(small(), pool.folder)) == {}


def test_files_are_not_held_against_a_manifest_of_another_making(tmp_path):
    pool = built(small(), tmp_path / "pool")
    moved = dataclasses.replace(pool, extent_offset_bytes=pool.extent_offset_bytes[[0, 2, 1, 3, 4]])
    with pytest.raises(MalformedPool, match="extents other than those of layout per_layer"):
        verify_pool(moved, allow_unsuitable=True)
    later = dataclasses.replace(pool, content="synthetic_v99")
    with pytest.raises(MalformedPool, match="content synthetic_v99"):
        verify_pool(later, allow_unsuitable=True)


def test_what_is_no_pool_is_said_so(tmp_path):
    with pytest.raises(MalformedPool, match="no pool"):
        read_pool(tmp_path / "nowhere")
    (tmp_path / MANIFEST).write_bytes(b"PAR1")
    with pytest.raises(MalformedPool, match="no readable Parquet"):
        read_pool(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".request.json").write_text("{")
    with pytest.raises(MalformedPool, match="damaged request"):
        built(small(), tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_ids": [3, 8]}, "layer 7 as MoE layer number 1, wanted layer 8"),
        ({"num_experts": [3, 4]}, "2 experts in layer 7, wanted 4"),
        ({"expert_bytes": 3 * PAGE + 1}, f"{3 * PAGE} bytes in layer 3, expert 0, wanted {3 * PAGE + 1}"),
        ({"expert_bytes": [[3 * PAGE] * 3, [3 * PAGE, 99]]}, "layer 7, expert 1, wanted 99"),
        ({"expert_bytes": [3 * PAGE, 3 * PAGE]}, None),
        ({}, None),
    ],
)
def test_a_pool_fits_a_trace_or_the_first_mismatch_is_named(change, named):
    asked = {"layer_ids": [3, 7], "num_experts": [3, 2]} | change
    trace = make_trace([[[[0, 1]], [[0, 1]]]], **asked)
    if named is None:
        check_against_trace(small(), trace.metadata)
    else:
        with pytest.raises(PoolMismatch, match=named):
            check_against_trace(small(), trace.metadata)


def replayer_pool(capsys, *arguments: object) -> tuple[int, str, str]:
    def work(argv):
        parser = Parser(prog="replayer")
        add_pool_commands(parser.add_subparsers(required=True, parser_class=Parser))
        parsed: argparse.Namespace = parser.parse_args(argv)
        return parsed.run(parsed)

    try:
        status = run(
            "replayer",
            work,
            ["pool", *map(str, arguments)],
            wrong_call=(UnusablePlan, PoolMismatch, UnsuitableStorage),
            failed=(MalformedPool, MalformedTrace),
        )
    except SystemExit as left:
        status = left.code
    done = capsys.readouterr()
    return status, done.out, done.err


def test_the_commands_build_and_verify(capsys, tmp_path):
    trace = write_trace(make_trace([[[[0, 1]], [[0, 1]]]], num_experts=4), tmp_path / "tiny.parquet")
    build = ["build", "--trace", trace, "--out", tmp_path / "pool", "--layout", "per-layer", "--allow-unsuitable"]
    status, out, err = replayer_pool(capsys, *build)
    assert (status, out) == (2, "")
    assert "--expert-bytes" in err
    status, out, err = replayer_pool(capsys, *build, "--expert-bytes", "16KiB", "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert (document["pool_experts"], document["pool_bytes"], document["files"]) == (8, 8 * 2**14, 2)
    assert (document["kept_bytes"], document["written_bytes"]) == (0, document["file_bytes"])
    status, out, _ = replayer_pool(capsys, *build, "--expert-bytes", "16KiB")
    assert status == 0
    assert "complete already" in out
    status, _, err = replayer_pool(capsys, *build, "--expert-bytes", "16KiB", "--align", "none")
    assert status == 2
    assert "wanted 1" in err
    verify = ["verify", tmp_path / "pool", "--allow-unsuitable"]
    status, out, err = replayer_pool(capsys, *verify, "--content", "all", "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["holds"] is True
    assert [check["name"] for check in document["checks"]] == ["storage", "length", "holes", "header", "content"]
    os.truncate(tmp_path / "pool" / "layer_00001.safetensors", 9)
    status, out, _ = replayer_pool(capsys, *verify)
    assert status == 1
    assert "FAILED  length" in out
    assert "layer_00001.safetensors: 9 bytes" in out


def test_sizes_of_the_trace_and_of_the_call_must_agree(capsys, tmp_path):
    made = make_trace([[[[0, 1]], [[0, 1]]]], num_experts=2, expert_bytes=[4096, 8192])
    trace = write_trace(made, tmp_path / "sized.parquet")
    build = ["build", "--trace", trace, "--out", tmp_path / "pool", "--allow-unsuitable", "--align", "none"]
    status, _, err = replayer_pool(capsys, *build, "--expert-bytes", "4096")
    assert status == 2
    assert "an expert of 8192 bytes" in err
    status, out, _ = replayer_pool(capsys, *build, "--json")
    assert status == 0
    assert json.loads(out)["pool_bytes"] == 2 * (4096 + 8192)
