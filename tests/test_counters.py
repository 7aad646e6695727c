"""Counters: pages of a real file before and after it is read, and the text of counter files, also odd and cut off."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer import counters
from replayer.counters import (
    PAGE_BYTES,
    BlockStat,
    Pressure,
    cached_pages,
    cachestat,
    drop,
    mincore_pages,
    parse_block_stat,
    parse_cpu_stat,
    parse_flat,
    parse_group_io,
    parse_io,
    parse_meminfo,
    parse_pressure,
    parse_single_number,
    parse_status,
    parse_thread_stat,
    read_counter_file,
    resident_bytes,
)
from replayer.machine import storage_of

ROOT = Path(__file__).parents[1]
TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
PAGES = 64

MEMINFO_ARM64_64K = b"""\
MemTotal:       502038208 kB
MemFree:        497713344 kB
MemAvailable:   495000000 kB
Mlocked:            7808 kB
HugePages_Total:       3
Hugepagesize:     524288 kB
"""
STATUS = b"Name:\tpython: x kB\nVmLck:\t 2097152 kB\nRssAnon:\t     112 kB\nVmSwap:\t       0 kB\nThreads:\t1\n"
ZOMBIE = b"Name:\tpython\nState:\tZ (zombie)\nThreads:\t1\n"
MEMORY_EVENTS_V2 = b"low 0\nhigh 0\nmax 63\noom 1\noom_kill 1\noom_group_kill 0\n"
IO_STAT_V2 = b"254:0 rbytes=228597760 wbytes=0 rios=218 wios=0 dbytes=0 dios=0\n7:0 \n"
BLKIO_V1 = b"254:0 Read 114294784\n254:0 Write 0\n254:0 Total 114294784\nTotal 114294784\n"
CPU_STAT = b"cpu  100 20 30 4000 50 6 7 80 90 10\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 5\n"
BLOCK_STAT = b"  481785    51386 25553386   898552  1627527   554023 249802928  1512990        3   269488  2520301\n"
THREAD_STAT = b"4711 (a) b (c)\nd) S 1 4711 4711 0 -1 4194560 12627 5 14 6 19 15 1 2 20 0 9 0 1149482 180000 7 18446\n"


@pytest.fixture
def file(tmp_path):
    """A written-back file of PAGES pages, and a descriptor that only reads, under FADV_RANDOM."""
    if storage_of(tmp_path).kind != "disk":
        pytest.skip(f"{storage_of(tmp_path).filesystem} keeps its pages")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE_BYTES))
    drop(path)
    with opened(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield path, fd


@contextlib.contextmanager
def opened(path, flags=os.O_RDONLY):
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def read_all(fd):
    os.pread(fd, PAGES * PAGE_BYTES, 0)


def by_cachestat(fd, offset_bytes, length_bytes):
    return cachestat(fd, offset_bytes, length_bytes).cached_pages


COUNTS = [mincore_pages, cached_pages, by_cachestat]


@pytest.fixture(params=COUNTS, ids=lambda function: function.__name__)
def count(request):
    if request.param is by_cachestat and counters.residency_counter() != "cachestat":
        pytest.skip("the kernel has no cachestat")
    return request.param


def test_a_dropped_file_has_no_page_a_read_one_all(file, count):
    _, fd = file
    assert count(fd, 0, PAGES * PAGE_BYTES) == 0
    read_all(fd)
    assert count(fd, 0, PAGES * PAGE_BYTES) == PAGES


def test_one_page_dropped_in_the_middle_is_missed(file, count):
    _, fd = file
    read_all(fd)
    os.posix_fadvise(fd, 7 * PAGE_BYTES, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
    assert count(fd, 0, PAGES * PAGE_BYTES) == PAGES - 1
    assert count(fd, 7 * PAGE_BYTES, PAGE_BYTES) == 0
    assert count(fd, 7 * PAGE_BYTES - 1, PAGE_BYTES + 2) == 2


def test_counting_brings_nothing_in(file, count):
    _, fd = file
    for _ in range(3):
        assert count(fd, 0, PAGES * PAGE_BYTES) == 0


def test_a_page_touched_in_part_counts_and_the_end_of_the_file_is_the_end(file, count):
    _, fd = file
    read_all(fd)
    assert count(fd, 0, 0) == 0
    assert count(fd, PAGE_BYTES - 1, 1) == 1
    assert count(fd, PAGE_BYTES - 1, 2) == 2
    assert count(fd, (PAGES - 1) * PAGE_BYTES, 9 * PAGE_BYTES) == 1
    assert count(fd, (PAGES + 5) * PAGE_BYTES, PAGE_BYTES) == 0


def test_the_fallback_agrees_with_cachestat_on_any_range(file):
    if counters.residency_counter() != "cachestat":
        pytest.skip("the kernel has no cachestat")
    _, fd = file
    read_all(fd)
    for page in (0, 3, 4, 31, PAGES - 1):
        os.posix_fadvise(fd, page * PAGE_BYTES, PAGE_BYTES, os.POSIX_FADV_DONTNEED)

    @given(st.integers(0, PAGES * PAGE_BYTES), st.integers(0, (PAGES + 3) * PAGE_BYTES))
    def agree(offset_bytes, length_bytes):
        assert mincore_pages(fd, offset_bytes, length_bytes) == by_cachestat(fd, offset_bytes, length_bytes)

    agree()


def test_the_fallback_is_taken_where_cachestat_is_missing(file, monkeypatch):
    monkeypatch.setattr(counters, "CACHESTAT_SYSCALL", 2**20)
    counters.residency_counter.cache_clear()
    try:
        assert counters.residency_counter() == "mincore"
        _, fd = file
        with pytest.raises(OSError, match="cachestat of descriptor"):
            cachestat(fd, 0, PAGE_BYTES)
        read_all(fd)
        assert cached_pages(fd, 0, PAGES * PAGE_BYTES) == PAGES
    finally:
        counters.residency_counter.cache_clear()


def test_mincore_in_many_mappings_counts_each_page_once(file, monkeypatch):
    monkeypatch.setattr(counters, "_MINCORE_RANGE_BYTES", 5 * PAGE_BYTES)
    _, fd = file
    read_all(fd)
    assert mincore_pages(fd, PAGE_BYTES + 1, 20 * PAGE_BYTES) == 21


def test_mincore_on_a_file_of_someone_else_is_refused_not_believed():
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    program = (
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom replayer.counters import mincore_pages\n"
        "fd = os.open('/etc/passwd', os.O_RDONLY)\nos.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
        "try:\n    print(mincore_pages(fd, 0, 1))\nexcept PermissionError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "calls every page resident" in done.stdout


def test_drop_writes_back_what_is_dirty(file, tmp_path):
    path, fd = file
    with opened(path, os.O_WRONLY) as writing:
        os.pwrite(writing, b"x" * PAGE_BYTES, 0)
        assert cached_pages(fd, 0, PAGES * PAGE_BYTES) == 1
        drop(fd)
        assert cached_pages(fd, 0, PAGES * PAGE_BYTES) == 0
    assert os.pread(fd, 3, 0) == b"xxx"


def test_resident_bytes_add_up_over_paths_and_descriptors(file, tmp_path):
    path, fd = file
    other = tmp_path / "other"
    other.write_bytes(b"y" * (PAGE_BYTES + 1))
    read_all(fd)
    assert resident_bytes([path, fd, other]) == (2 * PAGES + 2) * PAGE_BYTES
    assert resident_bytes([]) == 0


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        resident_bytes([tmp_path / "gone"])
    with pytest.raises(FileNotFoundError, match="gone"):
        drop(tmp_path / "gone")
    assert read_counter_file(tmp_path / "gone") is None


_WORDS = (
    b"7 18446744073709551616 -1 \xff\xfe x) (x cpu kB some Read \n: 254:0 rbytes= rbytes=9 total=x total=9 VmLck: \0"
)
words = st.sampled_from([*_WORDS.split(b" "), b"\n", b"kB\n", b"total=9\n", b"9\n"]) | st.binary(max_size=4)

PARSERS = [
    parse_io,
    parse_status,
    parse_meminfo,
    parse_flat,
    parse_single_number,
    parse_thread_stat,
    parse_cpu_stat,
    parse_block_stat,
    parse_pressure,
    parse_group_io,
]


@pytest.mark.parametrize("parse", PARSERS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("text", [None, b"", b"\n", b"\0\0\0", b"nonsense\n", b"12"])
def test_a_file_that_vanished_or_says_nothing_is_none(parse, text):
    assert parse(text) is None


@pytest.mark.parametrize("parse", PARSERS, ids=lambda function: function.__name__)
@given(text=st.lists(words, max_size=60).map(b" ".join))
def test_any_bytes_are_parsed_or_none(parse, text):
    parse(text)


@pytest.mark.parametrize(
    ("path", "parse", "keys"),
    [
        ("/proc/self/io", parse_io, {"rchar", "read_bytes"}),
        ("/proc/self/status", parse_status, {"VmLck", "VmSwap", "RssAnon", "RssFile", "RssShmem"}),
        ("/proc/meminfo", parse_meminfo, {"MemTotal", "MemAvailable", "Mlocked", "SwapTotal"}),
        ("/proc/vmstat", parse_flat, {"pgmajfault", "nr_mlock", "oom_kill", "workingset_refault_file"}),
    ],
)
def test_this_machines_files_have_what_a_replay_needs(path, parse, keys):
    text = read_counter_file(path)
    if text is None:
        pytest.skip(f"no {path}")
    assert keys <= set(parse(text))


def test_this_process_is_read_as_itself():
    stat = parse_thread_stat(read_counter_file("/proc/self/stat"))
    assert stat.pid == os.getpid()
    assert stat.minor_faults > 0
    assert stat.start_ticks > 0
    cpu = parse_cpu_stat(read_counter_file("/proc/stat"))
    assert 0 < cpu.busy_ns + cpu.stolen_ns <= cpu.total_ns
    storage = storage_of(ROOT)
    if storage.block_stat_file is not None:
        assert parse_block_stat(read_counter_file(storage.block_stat_file)).reads > 0


def test_own_reads_are_counted_to_the_byte():
    with opened("/proc/self/io") as fd, opened("/dev/zero") as zero:
        before = parse_io(os.pread(fd, 4096, 0))
        os.read(zero, 12345)
        after = parse_io(os.pread(fd, 4096, 0))
    assert after["rchar"] - before["rchar"] == 12345 + sum(
        len(b"%s: %d\n" % (k.encode(), v)) for k, v in before.items()
    )


def test_meminfo_of_64_kib_pages_is_in_bytes_without_counts():
    found = parse_meminfo(MEMINFO_ARM64_64K)
    assert found["MemTotal"] == 502038208 * 1024
    assert found["Mlocked"] == 7808 * 1024
    assert "HugePages_Total" not in found
    assert "SwapTotal" not in found


def test_a_zombie_has_no_sizes_and_a_name_does_not_pass_for_one():
    assert parse_status(ZOMBIE) is None
    assert parse_status(STATUS) == {"VmLck": 2**31, "RssAnon": 112 * 1024, "VmSwap": 0}


def test_group_files_of_both_versions():
    assert parse_flat(MEMORY_EVENTS_V2)["oom_kill"] == 1
    assert parse_flat(b"oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")["oom_kill"] == 2
    assert parse_single_number(b"134217728\n") == 134217728
    assert parse_single_number(b"max\n") is None
    assert parse_group_io(IO_STAT_V2) == {"254:0": 228597760}
    assert parse_group_io(BLKIO_V1) == {"254:0": 114294784}


def test_processor_time_keeps_idle_and_stolen_apart_and_counts_guests_once():
    cpu = parse_cpu_stat(CPU_STAT)
    assert cpu.busy_ns == (100 + 20 + 30 + 6 + 7) * TICK_NS
    assert cpu.stolen_ns == 80 * TICK_NS
    assert cpu.total_ns == (100 + 20 + 30 + 4000 + 50 + 6 + 7 + 80) * TICK_NS


def test_a_block_device_counts_sectors_of_512_bytes():
    assert parse_block_stat(BLOCK_STAT) == BlockStat(
        reads=481785,
        read_bytes=25553386 * 512,
        read_ns=898552 * 10**6,
        writes=1627527,
        written_bytes=249802928 * 512,
        in_flight=3,
        active_ns=269488 * 10**6,
    )


def test_a_thread_may_be_named_anything():
    stat = parse_thread_stat(THREAD_STAT)
    assert (stat.pid, stat.name, stat.state) == (4711, "a) b (c)\nd", "S")
    assert (stat.minor_faults, stat.major_faults, stat.start_ticks) == (12627, 14, 1149482)
    assert (stat.user_ns, stat.system_ns) == (19 * TICK_NS, 15 * TICK_NS)


def test_pressure_is_in_ns_and_has_no_full_line_on_older_kernels():
    line = b"some avg10=0.97 avg60=0.37 avg300=0.93 total=3621135894\n"
    assert parse_pressure(line) == Pressure(3621135894000, None)
    assert parse_pressure(line + b"full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n").full_ns == 7000


@pytest.mark.parametrize(
    ("parse", "text", "key"),
    [(parse_io, b"rchar: 12\nread_bytes: 4096\n", "read_bytes"), (parse_flat, b"oom 1\noom_kill 10\n", "oom_kill")],
)
def test_a_number_that_was_cut_off_does_not_count(parse, text, key):
    assert key in parse(text)
    assert key not in parse(text[:-1])
    assert key not in parse(text[:-2] + b"\0\0")
    assert parse_single_number(b"4096") is None
    assert parse_block_stat(BLOCK_STAT[:-1]) is None
    assert parse_thread_stat(THREAD_STAT[:-1]) is None


def test_the_padding_of_a_slot_is_no_text():
    assert parse_flat(b"oom_kill 1\n\0\0oom_kill 2\n") == {"oom_kill": 1}
    assert parse_single_number(b"7\n" + bytes(100)) == 7


names = st.text(st.characters(codec="ascii", categories=("Ll", "Lu", "Nd"), include_characters="_"), min_size=1)
numbers = st.dictionaries(names, st.integers(0, 2**64 - 1), min_size=1)


@given(numbers)
def test_flat_files_come_back(values):
    assert parse_flat("".join(f"{name} {value}\n" for name, value in values.items()).encode()) == values


@given(numbers)
def test_io_files_come_back(values):
    assert parse_io("".join(f"{name}: {value}\n" for name, value in values.items()).encode()) == values


@given(numbers)
def test_kilobytes_come_back_as_bytes(values):
    text = "".join(f"{name}:{value:>9} kB\n" for name, value in values.items()).encode()
    assert parse_meminfo(text) == parse_status(text) == {name: value * 1024 for name, value in values.items()}
