"""Labs: what is asked for, what remains, how guests are watched; and, where QEMU and a kernel are, guests themselves.

Three guests run replays or walls, some more only fail. They skip with the reason where they cannot run.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import polars as pl
import pytest

from replayer import guest, lab_cli, lab_setup
from replayer.cli import _parser
from replayer.cli import main as replayer_main
from replayer.experiment import UnusableExperiment, find, shipped
from replayer.guest import PLACE, Disk, GuestFailed, Kernel, Shape, _Watched
from replayer.lab import (
    FILESYSTEMS,
    FOLDER,
    MOST_CALIBRATIONS,
    BootLimit,
    Cell,
    asked_bytes,
    boot_limit,
    boots,
    calibrations,
    command_of,
    done_cells,
    resolve,
    wanted_cells,
)
from replayer.replay_cli import read_marked_runs
from replayer.request import Request
from schemas.documents import LabOutcome
from schemas.files import DataFolder
from schemas.tables import TABLES
from schemas.validation import ContractViolation
from tests.builders import make_trace, write_trace
from tests.replays import ENVIRONMENT, KIB, MIB, ROOT, pool_for, routing
from tests.table_rows import ROWS

KERNEL = Path(os.environ.get("EXPERT_TIER_LAB_KERNEL", ROOT / "data/lab/kernel"))
SMALL = """
name = "small"
question = "Does anything at all happen in here?"
repeats = 2
seed = 7
[common]
capacity = "50%"
steps = "0:4"
[[condition]]
place = "guest"
mechanism = ["cgroup", "balloon"]
mglru = ["on", "off"]
[[condition]]
place = "guest"
mechanism = "boot"
mglru = ["on", "off"]
capacity = ["50%", "25%"]
[[condition]]
place = "host"
mechanism = "cgroup"
"""


def small(text=SMALL, **more):
    return resolve(text, "small.toml", trace_id="t", pool_id="p", pool_bytes=256 * MIB, **more)


def run_row(condition, repetition, **more):
    return {
        "condition": condition, "repetition": repetition, "status": "complete", "bytes_valid": True,
        "resident_median_bytes": 100 * MIB, "boot_limit_bytes": None, **more,
    }  # fmt: skip


def test_a_lab_is_every_combination_of_place_mechanism_mglru_and_capacity():
    lab = small()
    labels = [one.label for one in lab.conditions]
    assert len(labels) == len(set(labels)) == 4 + 4 + 1
    assert "guest, balloon, MGLRU off" in labels
    assert "guest, boot, 25%, MGLRU on" in labels
    host = lab.condition("host, cgroup")
    assert (host.guest_memory_bytes, host.mglru, host.request.destination) == (None, None, "none")
    assert host.request == lab.condition("guest, cgroup, MGLRU on").request
    assert lab.condition("guest, boot, 25%, MGLRU on").request.capacity_bytes == 64 * MIB


def test_the_id_of_a_lab_leaves_repetitions_out_and_has_everything_else():
    assert small().lab_id == small(repeats=9).lab_id
    changed = [SMALL.replace("seed = 7", "seed = 8"), SMALL.replace('"50%"', '"51%"'), SMALL.replace("0:4", "0:5")]
    assert len({small(text).lab_id for text in [SMALL, *changed]}) == 4
    assert small(replayer_version="2").lab_id != small().lab_id


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("repeats = 2", "repeats = 0"), "key repeats"),
        (("[common]", "[common]\nwhat = 1"), "key what is unknown, wanted one of"),
        (('mechanism = "cgroup"', 'mechanism = "boot"'), "place host with mglru or mechanism boot"),
        (
            ('mechanism = "cgroup"', 'mechanism = "none"'),
            "mechanism none with key capacity, to which it limits nothing",
        ),
        (('capacity = "50%"\n', 'capacity = "50%"\nguest_memory = "1MiB"\n'), "guest_memory of 1,048,576 bytes"),
        (('capacity = "50%"\n', 'capacity = "half"\n'), "wanted a size"),
        (('place = "host"', 'place = "moon"'), "key place"),
        (("name =", "name ="), "several conditions are called"),
        (("seed = 7", "seed = ="), "no TOML"),
        (("repeats = 2", "repeats = 100\nrepetitions_per_boot = 101"), "repetitions_per_boot"),
        (('mechanism = "boot"', 'mechanism = "boot"\nheadroom = 1.5'), "headroom: wanted string or integer, found 1.5"),
        (
            ('[common]\ncapacity = "50%"\n', "[common]\n"),
            "mechanism cgroup without key capacity, which it limits to; add",
        ),
        (
            ('capacity = "50%"\n', 'capacity = "50%"\nmachine_bytes = "1GiB"\n'),
            "key machine_bytes with mechanism cgroup",
        ),
        (
            ('capacity = "50%"\n', 'capacity = "50%"\nfadvise = "noreuse"\nowner = "page_cache_mmap"\n'),
            "key fadvise nor",
        ),
        (('capacity = "50%"\n', 'capacity = "0%"\n'), "condition 1: capacity of 0 bytes, less than a page of 4,096"),
        (
            ('capacity = "50%"\n', 'capacity = "300%"\n'),
            "more than the pool of 268,435,456, so nothing would be missed",
        ),
        (('"50%"\n', '"90%"\nguest_memory = "192MiB"\n'), "in a guest of 201,326,592; ask for less, or more guest"),
        (
            ('capacity = "50%"\n', 'capacity = "900KiB"\n'),
            "8 threads have up to 8,388,608 in flight.*allow_thrash = true",
        ),
        (('"0:4"', '"5:1"'), "key steps: 5:1 is no step at all; wanted the smaller number first"),
        (('"0:4"', '"3:"\nlabel = "a\\u0000b"'), r"called 'a\\x00b, .*', wanted one line of characters"),
        (('"0:4"', '"3:"\nlabel = "a\\nb"'), "wanted one line of characters that can be shown; change it"),
        (('"0:4"', '"0:11"'), "key steps: 0:11, but the trace has 10 steps without warm-up; ask for fewer"),
        (('"0:4"', '"10:"'), "key steps: 10:, but the trace has 10 steps"),
    ],
)
def test_a_malformed_lab_is_refused_by_what_is_wrong(change, words):
    text = SMALL.replace(*change)
    if words.startswith("several"):
        text += '[[condition]]\nplace = "host"\nmechanism = "cgroup"\n'
    with pytest.raises(UnusableExperiment, match=words) as refused:
        small(text, expert_bytes=MIB, steps=10)
    assert "--" not in str(refused.value)


def test_no_repetition_at_all_is_refused():
    with pytest.raises(
        UnusableExperiment, match=r"--repeat 0, wanted at least 1; leave it out for the 2 of small.toml"
    ):
        small(repeats=0)


def test_what_a_replay_would_make_is_not_refused():
    assert small(SMALL.replace('"0:4"', '"0:10"'), steps=10, expert_bytes=MIB).conditions
    thrashing = SMALL.replace('capacity = "50%"', 'capacity = "900KiB"\nallow_thrash = true')
    assert small(thrashing, expert_bytes=MIB).conditions
    assert small(
        SMALL.replace('capacity = "50%"', 'capacity = "900KiB"\nowner = "uncached"'), expert_bytes=MIB
    ).conditions


def test_a_pool_of_another_trace_is_refused_before_a_kernel_is_looked_for(tmp_path, capsys):
    trace = make_trace(routing(6))
    write_trace(trace, tmp_path / "trace.parquet")
    other = pool_for(make_trace(routing(6, experts=4)), tmp_path / "pool", KIB)
    call = [
        "lab",
        "run",
        str(tmp_path / "trace.parquet"),
        "--pool",
        str(other.folder),
        "--data",
        str(tmp_path / "data"),
    ]
    assert replayer_main([*call, "--kernel", str(tmp_path / "none")]) == 2
    assert "does not fit trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("", "no definition of a lab: no JSON"),
        ("{}", "no definition of a lab: key conditions is missing"),
        ("7", "no definition of a lab: wanted"),
        ('{"conditions": []}', "key conditions: "),
        ('{"conditions": 7}', "key conditions: wanted array, found 7"),
        (
            '{"conditions": [{"label": 3, "request": {"capacity_bytes": 1}}]}',
            "conditions.0.label: wanted string, found 3",
        ),
        ('{"conditions": [{"label": "a", "request": {"capacity_bytes": "y"}}]}', "wanted integer, found 'y'"),
        ('{"conditions": [{"label": "a", "request": {"capacity_bytes": true}}]}', "wanted integer, found True"),
        ('{"conditions": [{"label": "a", "request": {"capacity_bytes": -1}}]}', "greater than or equal to 0"),
        ('{"conditions": [{"label": "a", "request": {}}]}', "capacity_bytes is missing"),
        ('{"conditions": [{"label": "a\\u0000", "request": {"capacity_bytes": 1}}]}', "no line of text"),
        ("[" * 100_000, "no definition of a lab: no JSON"),
    ],
)
def test_a_definition_is_read_only_if_every_capacity_is_one(definition, words):
    with pytest.raises(ValueError, match=words) as refused:
        asked_bytes(definition)
    assert "\n" not in str(refused.value)


def test_capacities_are_read_again_from_what_a_lab_writes():
    lab = small()
    assert asked_bytes(lab.definition) == {one.label: one.request.capacity_bytes for one in lab.conditions}


def test_shipped_labs_resolve_and_unknown_ones_are_refused():
    for name in shipped(FOLDER):
        assert small(find(name, "--matrix", FOLDER).read_text()).name == name
    with pytest.raises(UnusableExperiment, match=r"--matrix 'mechanism', wanted one of .*mechanisms"):
        find("mechanism", "--matrix", FOLDER)
    with pytest.raises(UnusableExperiment, match=r"no such file, and .* without suffix; say --matrix mechanisms$"):
        find("mechanisms.toml", "--matrix", FOLDER)
    assert find("mine.toml", "--matrix", FOLDER) == Path("mine.toml")


def test_cells_that_need_the_same_command_line_share_a_boot_and_all_cells_are_planned_once():
    lab = small()
    planned = boots(lab, set())
    cells = [cell for boot in planned for cell in boot.cells]
    assert len(cells) == len(set(cells))
    assert set(cells) == wanted_cells(lab)
    for boot in planned:
        conditions = [lab.condition(cell.condition) for cell in boot.cells]
        assert len({one.place for one in conditions}) == 1
        assert {one.guest_memory_bytes for one in conditions} == {boot.guest_memory_bytes}
        small_ones = {
            (one.request.capacity_bytes, one.mglru) if one.boots_small else (None, None) for one in conditions
        }
        assert small_ones == {(boot.boot_capacity_bytes, boot.boot_mglru)}
        # A repetition of its own boot each, unless the lab says otherwise.
        assert len({cell.repetition for cell in boot.cells}) == 1
    assert [len(boot.cells) for boot in planned if boot.boot_capacity_bytes is None and boot.guest_memory_bytes] == [
        4,
        4,
    ]


def test_repetitions_share_boots_where_the_lab_says_so_each_with_every_condition():
    planned = boots(small(SMALL.replace("seed = 7", "seed = 7\nrepetitions_per_boot = 2")), set())
    (shared,) = [boot for boot in planned if boot.boot_capacity_bytes is None and boot.guest_memory_bytes is not None]
    assert [cell.repetition for cell in shared.cells] == [0] * 4 + [1] * 4


def test_a_lab_that_is_continued_keeps_its_order_and_runs_nothing_twice():
    lab = small()
    whole = [cell for boot in boots(lab, set()) for cell in boot.cells]
    for number in range(len(whole) + 1):
        left = [cell for boot in boots(lab, set(whole[:number])) for cell in boot.cells]
        assert left == whole[number:]
    assert boots(small(repeats=3), set(whole))
    assert {cell.repetition for boot in boots(small(repeats=3), set(whole)) for cell in boot.cells} == {2}


def test_only_complete_and_valid_repetitions_count():
    lab = small()
    rows = [
        run_row("host, cgroup", 0),
        run_row("host, cgroup", 1, bytes_valid=False),
        run_row("guest, cgroup, MGLRU on", 0, status="killed"),
        run_row("guest, boot, 25%, MGLRU on", None),
        run_row("of an older lab", 0),
    ]
    assert done_cells(lab, rows) == {Cell("host, cgroup", 0)}


def test_the_limit_of_a_small_boot_is_found_by_measuring():
    lab = small()
    boot = next(one for one in boots(lab, set()) if one.boot_capacity_bytes == 128 * MIB)
    first = boot_limit(lab, boot, [])
    assert first == BootLimit((128 + 256) * MIB, False)
    # 300 MiB were resident of 128 asked for, so 172 less are given; then it is near enough.
    assert boot_limit(lab, boot, [(500 * MIB, 300 * MIB)]) == BootLimit(328 * MIB, False)
    assert boot_limit(lab, boot, [(500 * MIB, 300 * MIB), (328 * MIB, 130 * MIB)]) == BootLimit(328 * MIB, True)
    far = [((500 + number) * MIB, (300 + number) * MIB) for number in range(MOST_CALIBRATIONS)]
    assert boot_limit(lab, boot, far) == BootLimit(500 * MIB, True)
    # The least that boots, and the same proposal again, end the search.
    assert boot_limit(lab, boot, [(193 * MIB, 400 * MIB)]).limit_bytes == 192 * MIB
    assert boot_limit(lab, boot, [(192 * MIB, 400 * MIB)]) == BootLimit(192 * MIB, True)


def test_a_search_for_the_limit_that_goes_round_ends_at_the_nearest_it_has_seen():
    lab = small()
    boot = next(one for one in boots(lab, set()) if one.boot_capacity_bytes == 128 * MIB)
    # More memory left less: the next to try is the one that was worse.
    observed = [(400 * MIB, 115 * MIB), (413 * MIB, 100 * MIB)]
    assert boot_limit(lab, boot, observed) == BootLimit(400 * MIB, True)


def test_calibrating_runs_are_those_of_the_same_guest_that_are_valid():
    lab = small()
    boot = next(one for one in boots(lab, set()) if (one.boot_capacity_bytes, one.boot_mglru) == (64 * MIB, "on"))
    rows = [
        run_row("guest, boot, 25%, MGLRU on", None, boot_limit_bytes=300 * MIB, resident_median_bytes=70 * MIB),
        run_row("guest, boot, 25%, MGLRU off", None, boot_limit_bytes=310 * MIB, resident_median_bytes=63 * MIB),
        run_row("guest, boot, 25%, MGLRU on", None, boot_limit_bytes=290 * MIB, resident_median_bytes=65 * MIB),
        run_row("guest, boot, 25%, MGLRU on", 0, boot_limit_bytes=290 * MIB),
        run_row("guest, boot, 50%, MGLRU on", None, boot_limit_bytes=400 * MIB),
        run_row("guest, boot, 25%, MGLRU on", None, boot_limit_bytes=280 * MIB, bytes_valid=False),
    ]
    assert calibrations(lab, boot, rows) == [(300 * MIB, 70 * MIB), (290 * MIB, 65 * MIB)]


@pytest.mark.parametrize(
    "request_",
    [
        Request(destination="none"),
        Request(owner="page_cache_mmap", mechanism="cgroup", capacity_bytes=5 * MIB, destination="none",
                fadvise="normal", threads=2, observe="sample", steps=(3, None), headroom_bytes=7, allow_thrash=True),
        Request(mechanism="balloon", capacity_bytes=MIB, outer_group_bytes=64 * MIB, destination="none",
                steps=(None, 4)),
    ],
)  # fmt: skip
def test_the_command_asks_for_exactly_the_request(request_):
    said = _parser().parse_args(["replay", "T", "--pool", "P", *command_of(request_)])
    asked = Request(
        owner=said.owner, mechanism=said.mechanism, capacity_bytes=said.capacity, headroom_bytes=said.headroom,
        outer_group_bytes=said.machine_bytes, fadvise=said.fadvise, destination=said.device, threads=said.threads,
        observe=said.observe, steps=said.steps, allow_thrash=said.allow_thrash,
    )  # fmt: skip
    assert asked == request_


def test_a_guest_made_small_is_asked_for_what_it_has():
    words = command_of(Request(mechanism="boot", capacity_bytes=MIB, destination="none"))
    said = _parser().parse_args(["replay", "T", "--pool", "P", *words])
    assert (said.mechanism, said.capacity) == ("boot", None)


def watched(code: str, limit_s=5.0, start_limit_s=5.0):
    """What a supervisor makes of a console that a shell writes in QEMU's place, and the shell's process."""
    heard: list[str] = []
    with _Watched(["/bin/sh", "-c", code], heard.append) as one:
        failure = one.await_end(limit_s, start_limit_s)
    assert one.process.returncode is not None
    # What was killed stays in its group until init has taken it in.
    deadline = time.monotonic() + 5
    while is_group(one.process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_group(one.process.pid)
    return failure, one, heard


def is_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_guest_that_ends_well_is_heard():
    failure, one, heard = watched(
        "printf 'SeaBIOS\\033[2J\\r\\nexpert-tier-lab: up\\r\\nxx expert-tier-lab: run a\\n'; "
        "echo 'expert-tier-lab: ended 0'"
    )
    assert (failure, heard, one.is_up) == (None, ["run a"], True)
    assert one.tail == ["SeaBIOS"]


@pytest.mark.parametrize(
    ("code", "words", "is_up"),
    [
        ("echo Booting; exec sleep 60", "did not start .before its kernel was up., wanted its end within 0 s", False),
        ("echo 'expert-tier-lab: up'; (sleep 60) & wait", "hung .while it mounted., wanted its end within 0 s", True),
        ("echo Kernel panic; exit 1", "QEMU ended with code 1 before its kernel was up", False),
        ("echo 'expert-tier-lab: up'; echo 'expert-tier-lab: mounted'", "died after it said 'mounted'", True),
        ("echo 'expert-tier-lab: up'; echo Out of memory: Killed", "died for want of memory while it mounted", True),
        ("echo 'expert-tier-lab: up'; echo 'expert-tier-lab: refused disk 0'", "refused to go on: disk 0", True),
        ("echo 'expert-tier-lab: up'; echo 'expert-tier-lab: ended 3'", "its script ended with code 3", True),
    ],
)  # fmt: skip
def test_a_guest_that_fails_is_one_sentence_and_nothing_of_it_remains(code, words, is_up):
    failure, one, _ = watched(code, 0.4, 0.4)
    assert failure is not None
    assert re.search(words, failure), failure
    assert one.is_up == is_up


def kernel_in(folder: Path) -> Kernel:
    """A kernel's folder of nothing but names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "busybox").write_bytes(b"#!")
    (folder / "one.ko").write_bytes(b"ELF1")
    return Kernel(folder, "6.12-test", "linux-image", "1", ("one",))


def test_the_first_file_system_holds_what_the_script_uses(tmp_path):
    archive = gzip.decompress(guest.initramfs(kernel_in(tmp_path), [Disk(tmp_path / "a"), Disk(tmp_path / "b", "xfs")]))
    listed = subprocess.run(["cpio", "-itv"], input=archive, capture_output=True) if shutil.which("cpio") else None
    if listed is not None:
        assert listed.returncode == 0, listed.stderr
    names, place = [], 0
    while place < len(archive):
        assert archive[place : place + 6] == b"070701"
        fields = [int(archive[place + 6 + 8 * one : place + 14 + 8 * one], 16) for one in range(13)]
        begin = place + 110
        names.append(archive[begin : begin + fields[11] - 1].decode())
        place = -(-(begin + fields[11]) // 4) * 4
        content = archive[place : place + fields[6]]
        place += -(-fields[6] // 4) * 4
        if names[-1] == "init":
            assert b"insmod /lib/one.ko" in content
            assert content.count(b"mount -t ext4 -o ro,noload") == content.count(b"mount -t xfs -o ro,norecovery") == 1
            assert subprocess.run(["/bin/sh", "-n"], input=content, check=False).returncode == 0
    assert names[-1] == "TRAILER!!!"
    assert {"init", "bin/busybox", "lib/one.ko", "dev/console"} <= set(names)


def test_the_root_and_disks_are_read_only_and_there_is_no_network(tmp_path):
    words = guest.command_line(
        kernel_in(tmp_path), Shape(1 << 30, 2, 300 * MIB), tmp_path / "i", [Disk(tmp_path / "a,b.img")], tmp_path
    )
    line = " ".join(words)
    assert "id=root,path=/,security_model=none,readonly=on" in line
    assert "a,,b.img,if=none,id=d0,format=raw,cache=none,aio=threads,readonly=on" in line
    assert f"mem={300 * KIB}K" in line
    assert not any(word.startswith(("-net", "-nic", "virtio-net")) for word in words)
    assert "-nodefaults" in words


def test_a_kernel_that_is_not_there_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="make lab-setup"):
        guest.read_kernel(tmp_path)
    (tmp_path / "kernel.json").write_text("{}")
    with pytest.raises(ValueError, match="not what lab-setup writes"):
        guest.read_kernel(tmp_path)


PARAGRAPHS = """\
Types: deb
# a comment
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Types: deb
URIs: http://mirror.test/security
Suites: bookworm-security
Components: main

Types: deb
Enabled: no
URIs: http://off.test/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.test/debian
Suites: bookworm
Components: main
"""


def test_the_mirror_is_the_machines_own():
    signed = "[signed-by=/usr/share/keyrings/k.gpg] "
    assert lab_setup.source_lines([PARAGRAPHS], "bookworm", "debian") == [
        f"deb {signed}http://mirror.test/debian bookworm main",
        f"deb {signed}http://mirror.test/debian bookworm-backports main",
    ]
    lines = (
        "# deb http://old.test x main\ndeb [arch=amd64 signed-by=/k] http://m.test/u noble main universe\n"
        "deb-src http://m.test/u noble main\n"
    )
    assert lab_setup.source_lines([lines], "noble", "ubuntu") == [
        "deb [signed-by=/k] http://m.test/u noble main",
        "deb [signed-by=/k] http://m.test/u noble-updates main",
    ]
    assert lab_setup.source_lines(["deb http://vendor.test stable main"], "bookworm", "debian") == []


def test_modules_come_after_those_they_need_and_built_in_ones_not_at_all(tmp_path):
    def module(name, *needs):
        return b"\x7fELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=" + name.encode() + b"\0"

    (tmp_path / "kernel").mkdir()
    (tmp_path / "modules.builtin").write_text("kernel/drivers/virtio/virtio_pci.ko\n")
    import lzma

    (tmp_path / "kernel/ext4.ko.xz").write_bytes(lzma.compress(module("ext4", "mbcache", "jbd2")))
    (tmp_path / "kernel/jbd2.ko").write_bytes(module("jbd2"))
    (tmp_path / "kernel/mbcache.ko.gz").write_bytes(gzip.compress(module("mbcache")))
    names = [name for name, _ in lab_setup.modules_in_order(tmp_path, ["virtio-pci", "ext4"])]
    assert names == ["mbcache", "jbd2", "ext4"]
    with pytest.raises(lab_setup.SetupRefused, match="no module 9p"):
        lab_setup.modules_in_order(tmp_path, ["9p"])


def test_an_old_kernel_is_refused(tmp_path):
    (tmp_path / "in/boot").mkdir(parents=True)
    (tmp_path / "in/boot/vmlinuz-6.1.0-57-amd64").write_bytes(b"")
    with pytest.raises(lab_setup.SetupRefused, match=r"wanted 6\.5 or newer"):
        lab_setup.gather(tmp_path / "in", tmp_path, {})


def test_another_architecture_is_told_so(monkeypatch):
    monkeypatch.setattr(lab_setup.platform, "machine", lambda: "aarch64")
    with pytest.raises(lab_setup.SetupRefused, match="x86-64 only"):
        lab_setup.check_architecture()


def test_rows_of_a_guest_are_checked_before_they_are_published(tmp_path):
    data = DataFolder(tmp_path / "data")
    results = tmp_path / "results"
    for name, file in (
        ("replay_run", "tiny/r.parquet"),
        ("replay_proof", "tiny/r.parquet"),
        ("pool", "p/part.parquet"),
    ):
        (results / name / file).parent.mkdir(parents=True)
        TABLES[name].frame([ROWS[name]]).write_parquet(results / name / file)
    row = lab_cli.publish_results(results, data)
    assert row == ROWS["replay_run"]
    assert (data.results / "replay_proof/tiny/r.parquet").is_file()
    assert lab_cli.publish_results(tmp_path / "nothing", data) is None
    broken = {**ROWS["replay_run"], "status": "splendid"}
    TABLES["replay_run"].frame([broken]).write_parquet(results / "replay_run/tiny/r.parquet")
    with pytest.raises(ContractViolation):
        lab_cli.publish_results(results, DataFolder(tmp_path / "other"))
    assert not (tmp_path / "other/results/replay_run").exists()


def test_a_second_lab_of_a_data_folder_is_kept_out(tmp_path):
    with lab_cli._alone(tmp_path), pytest.raises(BlockingIOError, match="another lab"), lab_cli._alone(tmp_path):
        pass


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """A kernel to boot; skips with the reason where there is none."""
    try:
        lab_setup.check_architecture()
        guest.qemu_version()
        return guest.read_kernel(KERNEL)
    except (FileNotFoundError, lab_setup.SetupRefused) as reason:
        pytest.skip(f"no guests here: {reason}")


def run(kernel, folder, script, *, disks=(), memory=512 * MIB, limit_s=400, **more):
    share = folder / "share"
    share.mkdir()
    environment = {**lab_cli.guest_environment(), "PYTHONPATH": str(ROOT)}
    script = guest.environment_script(environment) + f"cd {ROOT}\n" + script
    outcome = guest.run_guest(
        kernel, Shape(memory, **more), disks=list(disks), share=share, script=script, limit_s=limit_s
    )
    return outcome, share


def qemus() -> set[int]:
    """Running QEMU processes that this one started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.joinpath("comm").read_text().startswith("qemu-system") and (
                f"PPid:\t{os.getpid()}\n" in folder.joinpath("status").read_text()
            ):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_a_disk_of_either_file_system_has_every_file_of_the_folder(kernel, tmp_path, filesystem):
    (tmp_path / "files/layers").mkdir(parents=True)
    content = {name: os.urandom(size) for name, size in (("a", 3 * MIB + 5), ("layers/b", 1), ("layers/c", 0))}
    for name, part in content.items():
        (tmp_path / "files" / name).write_bytes(part)
    disk = guest.make_disk(tmp_path / "files", tmp_path / "disk", filesystem)
    place = f"{PLACE}/disk0"
    script = f"cd {place} && sha256sum a layers/b layers/c > {PLACE}/share/sums && grep {place} /proc/mounts > "
    _, share = run(kernel, tmp_path, f"{script}{PLACE}/share/mounts", disks=[disk])
    sums = dict(reversed(line.split()) for line in (share / "sums").read_text().splitlines())
    assert sums == {name: hashlib.sha256(part).hexdigest() for name, part in content.items()}
    assert (share / "mounts").read_text().split()[2] == filesystem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "files", "share"]


def test_files_larger_than_a_part_of_an_xfs_disk_damage_none_of_it(tmp_path):
    (tmp_path / "files").mkdir()
    for name in ("a", "b", "c", "d"):
        (tmp_path / "files" / name).write_bytes(os.urandom(MIB) * 60)
    repair = lab_setup.find_program("xfs_repair")
    if repair is None or lab_setup.find_program("mkfs.xfs") is None:
        pytest.skip("no xfsprogs here; make lab-setup installs it")
    disk = guest.make_disk(tmp_path / "files", tmp_path / "disk", "xfs")
    checked = subprocess.run([repair, "-n", "-f", disk.image], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "CRC" not in checked.stderr + checked.stdout


def test_a_name_that_an_xfs_layout_cannot_hold_is_refused(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a b").write_bytes(b"x")
    if lab_setup.find_program("mkfs.xfs") is None:
        pytest.skip("no mkfs.xfs here; make lab-setup installs it")
    with pytest.raises(OSError, match="white space in a name"):
        guest.make_disk(tmp_path / "files", tmp_path / "disk", "xfs")
    assert not (tmp_path / "disk").exists()


def test_a_wall_on_a_real_v2_kernel_limits_counts_releases_and_can_be_delegated(kernel, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/file").write_bytes(os.urandom(40 * MIB))
    disk = guest.make_disk(tmp_path / "files", tmp_path / "disk")
    _, share = run(
        kernel,
        tmp_path,
        f"{sys.executable} -P -m tests.v2_in_a_guest main > {PLACE}/share/told",
        disks=[disk],
    )
    told = json.loads((share / "told").read_text())
    assert told["root"] == ["2", "/sys/fs/cgroup"]
    filled = told["filled"]
    assert filled["limit"] == 16 * MIB
    assert filled["swap"] in (None, "0")
    assert filled["usage"] <= 16 * MIB
    assert filled["peak"] <= 16 * MIB
    assert 12 * MIB < filled["cache"] <= 16 * MIB
    assert filled["kernel"] is not None
    assert filled["lowered"] == 8 * MIB
    assert filled["cache_lowered"] <= 8 * MIB
    assert (filled["oom_kills"], filled["eater"], filled["oom_kills_after"]) == (0, -9, 1)
    assert filled["is_gone"]
    assert told["ballooned"]["locked"] == 48 * MIB
    assert told["ballooned"]["charged"] >= 48 * MIB
    assert "has room for" in told["ballooned"]["too_large"]
    assert len(told["left"]) == 1
    assert "removed leftover group" in told["left"][0]
    assert "memory" in told["controllers_before"]
    delegated = told["delegated"]
    assert delegated["limit"] == 8 * MIB
    assert Path(delegated["folder"]).parent == Path("/sys/fs/cgroup/given")
    assert Path(delegated["folder"]).name in delegated["inside"]
    assert delegated["is_gone"]
    for refused in ("not_delegated", "not_given"):
        assert told[refused][0] == "refused", told[refused]
        assert "no cgroup v2 group from" in told[refused][1]
        assert "as root: make a group" in told[refused][2] or "systemd-run" in told[refused][2]
    assert told["left_in_root"] == []


def test_apt_finds_its_folders_however_the_kernels_folder_is_said(tmp_path, monkeypatch):
    asked = []

    def run(command, folder, environment=None):
        asked.append(command)
        raise lab_setup.SetupRefused("no network in this test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab_setup, "check_architecture", lambda: None)
    monkeypatch.setattr(lab_setup.shutil, "which", lambda program, path=None: f"/bin/{program}")
    monkeypatch.setattr(lab_setup, "_os_release", lambda: {"ID": "debian", "VERSION_CODENAME": "bookworm"})
    monkeypatch.setattr(lab_setup, "_source_texts", lambda: ["deb http://mirror.example/debian bookworm main\n"])
    monkeypatch.setattr(lab_setup, "_run", run)
    with pytest.raises(lab_setup.SetupRefused, match="no network"):
        lab_setup.set_up(Path("data/lab/kernel"), lambda line: None)
    folders = [word.partition("=")[2] for word in asked[0] if word.startswith("Dir::")]
    assert len(folders) == 4
    assert all(Path(folder).is_absolute() for folder in folders)
    assert list((tmp_path / "data" / "lab").iterdir()) == []


def test_a_lab_with_mglru_on_and_off_in_a_guest_and_on_the_host_is_replayed_and_kept(kernel, tmp_path, capsys):
    data = tmp_path / "data"
    trace = make_trace(routing(6))
    file = DataFolder(data).trace_file(trace.metadata.trace_id)
    file.parent.mkdir(parents=True)
    write_trace(trace, file)
    pool = pool_for(trace, tmp_path / "pool", 1 * MIB)
    lab = tmp_path / "tiny.toml"
    lab.write_text(
        """
name = "tiny"
question = "Does a guest replay as the host does?"
repeats = 1
[common]
capacity = "50%"
threads = 4
guest_memory = "768MiB"
[[condition]]
place = "guest"
mechanism = ["cgroup"]
mglru = ["on", "off"]
[[condition]]
place = "host"
mechanism = "cgroup"
"""
    )
    call = ["lab", "run", str(file), "--pool", str(pool.folder), "--data", str(data), "--matrix", str(lab),
            "--kernel", str(KERNEL), "--accelerator", "tcg", "--wait", "240", "--json"]  # fmt: skip
    status = replayer_main(call)
    said = capsys.readouterr()
    outcome = LabOutcome.model_validate_json(said.out)
    assert (status, outcome.finished, outcome.valid_runs) == (0, True, 3), said.err
    assert "warm-up" not in said.err
    assert {run.compiled_files for run in outcome.by_run if run.place == "guest"} == {0}
    assert len({run.boot_id for run in outcome.by_run if run.place == "guest"}) == 1
    rows = {row["condition"]: row for row in read_marked_runs(DataFolder(data), "lab_run", outcome.lab_id)}
    states = {}
    for label, row in rows.items():
        machine = pl.read_parquet(DataFolder(data).result_file("machine", row["machine_id"])).to_dicts()[0]
        states[label] = machine["mglru"].split()[0]
        if label.startswith("guest"):
            assert machine["kernel_release"] == kernel.release
            assert machine["virtualization"] == "tcg"
            assert row["mechanism_detail"] == "cgroup v2"
            assert "no emulation" in row["time_reasons"]
    assert states["guest, cgroup, MGLRU on"] == "on"
    assert states["guest, cgroup, MGLRU off"] == "off"
    assert len({row["condition_hash"] for row in rows.values()}) == 1
    assert len({row["consumed_digest"] for row in rows.values()}) == 1
    # What is finished is not run again, and needs no guest.
    assert replayer_main(call) == 0
    again = LabOutcome.model_validate_json(capsys.readouterr().out)
    assert (again.started_runs, again.started_boots, again.runs) == (0, 0, 3)
    assert sorted(path.name for path in (data / "lab").iterdir()) == [".lock", "numba"]


def test_a_kernel_that_is_told_of_less_memory_sees_less(kernel, tmp_path):
    _, share = run(kernel, tmp_path, f"cp /proc/meminfo {PLACE}/share/meminfo", boot_limit_bytes=300 * MIB)
    total = int((share / "meminfo").read_text().split()[1]) * KIB
    assert 180 * MIB < total < 300 * MIB


def test_a_guest_without_its_disk_is_one_line(kernel, tmp_path, monkeypatch):
    whole = guest.init_script
    monkeypatch.setattr(guest, "init_script", lambda modules, disks: whole(modules, [*disks, Disk(tmp_path / "none")]))
    with pytest.raises(GuestFailed, match="refused to go on: disk 0 is not there"):
        run(kernel, tmp_path, "true", limit_s=60)
    assert qemus() == set()


def test_a_guest_that_hangs_ends_within_its_limit_and_nothing_of_it_remains(kernel, tmp_path):
    begin = time.monotonic()
    with pytest.raises(GuestFailed, match=r"hung \(after it said 'mounted'\), wanted its end within 12 s"):
        run(kernel, tmp_path, "sleep 1000", limit_s=12)
    assert time.monotonic() - begin < 12 + 2 * guest.START_LIMIT_S
    assert qemus() == set()


def test_a_kernel_that_does_not_boot_is_tried_a_few_times(kernel, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    shutil.copytree(kernel.folder, broken)
    (broken / "vmlinuz").write_bytes(b"no kernel")
    monkeypatch.setattr(guest, "MOST_STARTS", 2)
    starts = []
    with pytest.raises(GuestFailed, match="in 2 starts; its last words"):
        guest.run_guest(
            guest.read_kernel(broken), Shape(256 * MIB), disks=[], share=tmp_path, script="true", limit_s=20,
            start_limit_s=3, on_start=starts.append,
        )  # fmt: skip
    assert starts == [1, 2]
    assert qemus() == set()


def test_a_guest_dies_with_its_supervisor(kernel, tmp_path):
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv here, which ties QEMU to its parent")
    code = (
        "import sys; from pathlib import Path; from replayer.guest import *; "
        "run_guest(read_kernel(Path(sys.argv[1])), Shape(256 << 20), disks=[], share=Path(sys.argv[2]), "
        "script='sleep 1000', limit_s=60, on_start=lambda number: print(number, flush=True))"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(kernel.folder), str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == b"1\n"
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
    deadline = time.monotonic() + 20
    while not (found := children.read_text().split()) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    # Until it is QEMU, and bound to its parent.
    while "qemu" not in Path(f"/proc/{found[0]}/comm").read_text() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    supervisor.kill()
    supervisor.communicate()
    while Path(f"/proc/{found[0]}").exists() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert not Path(f"/proc/{found[0]}").exists()
