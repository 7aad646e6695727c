"""Packed dumps and dumps of several files: what is in them comes out, and nothing else gets in."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import struct
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import cli
from pipeline.assets import dump_of
from pipeline.automation import new_dumps
from pipeline.dumps import blocks, packing, sniff
from pipeline.dumps.arrays import Npz, Safetensors
from pipeline.dumps.blocks import (
    Asked,
    DumpFile,
    DumpFolder,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    missing_names,
)
from pipeline.dumps.packing import Unpacking
from pipeline.dumps.sequences import Sequences
from pipeline.ingest import ingest, inspect, metadata_file, open_dump, read_user_metadata, slug
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.graph_runs import drop
from tests.raw_dumps import npy_bytes, npz_dump, random_routes, tok_layers_dump

ROUTES = random_routes(60, 3, 16, 4)
JSONL = tok_layers_dump(ROUTES)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def one_zipped(content: bytes) -> bytes:
    return zipped({"a.jsonl": content})


def tarred(content: bytes) -> bytes:
    """One file in a ustar archive."""
    header = bytearray(512)
    header[:6] = b"a.csv\0"
    header[124:136] = b"%011o\0" % len(content)
    header[257:265] = b"ustar\x0000"
    return bytes(header) + content + bytes(-len(content) % 512 + 1024)


PACKERS = {"gzip": gzip.compress, "zstd": zstd, "xz": lzma.compress, "bzip2": bz2.compress, "zip": one_zipped}


def rows_of(path: Path, data: Path) -> pl.DataFrame:
    return pl.read_parquet(ingest(path, DataFolder(data), UserMetadata()).path)


def refusal(path: Path, folder: Path, unpacking: Unpacking = blocks.DEFAULT_UNPACKING) -> str:
    """The one line of the refused ingest; the data folder must hold nothing afterwards."""
    data = DataFolder(folder / "data")
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingest(path, data, UserMetadata(), unpacking=unpacking)
    left = [entry.name for entry in data.traces.iterdir()] if data.traces.is_dir() else []
    assert left in ([], [".lock"]), left
    message = str(caught.value)
    assert message.startswith(str(path)), message
    assert "\n" not in message
    return message


def written(folder: Path, content: bytes, name: str = "dump.bin") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


# One file, packed


@pytest.mark.parametrize("packing_name", PACKERS)
def test_a_packed_dump_is_seen_by_content_and_gives_the_same_rows(tmp_path, packing_name):
    plain = rows_of(written(tmp_path, JSONL, "a.jsonl"), tmp_path / "data")
    packed = rows_of(written(tmp_path, PACKERS[packing_name](JSONL), "b.dat"), tmp_path / "data")
    assert packed.equals(plain)


@pytest.mark.parametrize("packing_name", PACKERS)
def test_an_npz_that_is_packed_is_read_from_an_unnamed_file(tmp_path, packing_name):
    content = npz_dump(ROUTES)
    packed = zipped({"a.npz": content}) if packing_name == "zip" else PACKERS[packing_name](content)
    plain = rows_of(written(tmp_path, content, "a.npz"), tmp_path / "data")
    assert rows_of(written(tmp_path, packed, "b.dat"), tmp_path / "data").equals(plain)
    assert {entry.suffix for entry in (tmp_path / "data" / "traces").iterdir()} == {".parquet", ""}


def test_packed_safetensors_are_mapped_from_an_unnamed_file(tmp_path):
    header = json.dumps({"ids": {"dtype": "I16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    content = struct.pack("<Q", len(header)) + header + struct.pack("<6h", *range(6))
    with DumpFile(written(tmp_path, gzip.compress(content))) as dump:
        assert Safetensors(dump).array("ids").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("packing_name", ["gzip", "zstd", "xz", "bzip2"])
def test_packed_streams_one_after_the_other_are_one_dump(tmp_path, packing_name):
    pack = PACKERS[packing_name]
    half = len(JSONL) // 2
    path = written(tmp_path, pack(JSONL[:half]) + pack(JSONL[half:]))
    with DumpFile(path) as dump:
        assert dump.packing == packing_name
        assert dump.stream().read() == JSONL
        assert dump.raw.read() == JSONL
        assert dump.sha256().hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_xz_padding_between_streams_and_a_skippable_frame_of_zstd_are_no_content(tmp_path):
    padded = lzma.compress(JSONL) + bytes(8) + lzma.compress(JSONL) + bytes(4)
    with DumpFile(written(tmp_path, padded)) as dump:
        assert dump.stream().read() == 2 * JSONL
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"meta" + zstd(JSONL)
    with DumpFile(written(tmp_path, skippable)) as dump:
        assert dump.stream().read() == JSONL


@pytest.mark.parametrize("packing_name", PACKERS)
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_truncated_packing_is_one_line(tmp_path, packing_name, share):
    packed = PACKERS[packing_name](JSONL)
    assert "truncated" in refusal(written(tmp_path, packed[: int(len(packed) * share)]), tmp_path)


@pytest.mark.parametrize("packing_name", PACKERS)
def test_packing_cut_or_flipped_anywhere_is_refused_or_read(tmp_path_factory, packing_name):
    folder = tmp_path_factory.mktemp("damage")
    packed = PACKERS[packing_name](JSONL)
    generator = random.Random(0)
    for _ in range(150):
        content = bytearray(packed[: generator.randint(1, len(packed))] if generator.random() < 0.5 else packed)
        for _ in range(generator.randint(0, 3)):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        try:
            with open_dump(written(folder, bytes(content))) as dump:
                if isinstance(dump, DumpFile):
                    dump.stream().read()
        except (MalformedDump, RefusedDump) as error:
            assert "\n" not in str(error)


def test_damage_is_said_in_one_line_on_the_command_line(tmp_path, capsys):
    packed = bytearray(zstd(JSONL))
    path = written(tmp_path, bytes(packed[:-20]))
    assert cli.main(["ingest", str(path), "--data", str(tmp_path / "data")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the zstd data ends early: truncated" in said


def test_a_dictionary_of_xz_beyond_the_limit_is_not_reserved(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "XZ_MEMORY_BYTES", 1024 * 1024)
    assert "needs more memory to unpack" in refusal(written(tmp_path, lzma.compress(JSONL)), tmp_path)


def test_a_window_of_zstd_beyond_the_limit_is_not_reserved(tmp_path):
    # A frame by hand: no content size, a window of 2^31 bytes (RFC 8878, 3.1.1.1.2), one raw block that is the last.
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + struct.pack("<I", 1 | 5 << 3)[:3] + b"hello"
    assert "needs more memory to unpack" in refusal(written(tmp_path, frame), tmp_path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(gzip.compress(JSONL)), "packed by gzip again"),
        (zstd(lzma.compress(JSONL)), "packed by xz again"),
        (gzip.compress(one_zipped(JSONL)), "packed by zip again"),
        (zipped({"a.gz": gzip.compress(JSONL)}), "packed by gzip again"),
        (zipped({"a.zip": zipped({"a": JSONL, "b": JSONL})}), "packed by zip again"),
        (gzip.compress(tarred(JSONL)), "a tar archive again"),
        (tarred(JSONL), "a tar archive, which is not read"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(40), "a 7z archive"),
        (gzip.compress(b""), "nothing is packed"),
        (zipped({}), "0 files in the zip"),
        (zipped({"folder/": b""}), "0 files in the zip"),
    ],
)
def test_packed_twice_or_unreadably_is_refused(tmp_path, content, what):
    assert what in refusal(written(tmp_path, content), tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up.jsonl", "a/../../up.jsonl", "..\\up.jsonl", "C:\\up.jsonl"])
def test_a_name_that_leads_out_of_a_zip_is_refused(tmp_path, name):
    info = zipfile.ZipInfo("x")
    info.filename = name
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, JSONL)
    assert "leads out of the archive" in refusal(written(tmp_path, buffer.getvalue()), tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) in (["data", "dump.bin"], ["dump.bin"])


def test_links_encrypted_and_oddly_packed_files_of_a_zip_are_refused(tmp_path):
    link = zipfile.ZipInfo("a.jsonl")
    link.create_system, link.external_attr = 3, 0o120777 << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(link, b"/etc/passwd")
    assert "a link or a device" in refusal(written(tmp_path, buffer.getvalue()), tmp_path)
    plain = zipped({"a.jsonl": JSONL}, zipfile.ZIP_STORED)
    directory = plain.rindex(b"PK\x01\x02")
    encrypted, odd = bytearray(plain), bytearray(plain)
    encrypted[directory + 8] |= 1
    odd[directory + 10] = 93
    assert "encrypted" in refusal(written(tmp_path, bytes(encrypted)), tmp_path)
    assert "zip method 93" in refusal(written(tmp_path, bytes(odd)), tmp_path)


def test_a_zip_directory_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "LARGEST_READ_BYTES", 70_000)
    content = zipped({f"{'x' * 200}{number}.npy": b"1" for number in range(500)}, zipfile.ZIP_STORED)
    assert "a directory of over 70000 bytes" in refusal(written(tmp_path, content), tmp_path)


# Limits


@pytest.mark.parametrize("packing_name", PACKERS)
def test_what_unpacks_to_more_than_was_allowed_is_refused(tmp_path, packing_name):
    path = written(tmp_path, PACKERS[packing_name](JSONL))
    assert "raise --max-unpacked" in refusal(path, tmp_path, Unpacking(max_bytes=len(JSONL) - 1))
    assert len(rows_of(path, tmp_path / "data")) == 180


@pytest.mark.parametrize("packing_name", ["zstd", "xz", "bzip2", "zip"])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path, packing_name):
    # Zeros shrink 1,030-fold by deflate, some 10,000-fold by the others.
    path = written(tmp_path, PACKERS[packing_name](bytes(72 * 2**20)))
    with DumpFile(path) as dump, pytest.raises(RefusedDump, match="a decompression bomb"):
        _ = dump.raw
    with DumpFile(path, Unpacking(max_ratio=100_000)) as dump:
        assert len(dump.head()) == blocks.HEAD_BYTES


def test_an_npz_that_is_a_bomb_is_refused_by_what_its_directory_says(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("experts.npy", "w") as file:
        file.write(npy_bytes((1, 2**20 * 70, 1), "|u1", b""))
        for _ in range(70):
            file.write(bytes(2**20))
    path = written(tmp_path, buffer.getvalue())
    assert "a decompression bomb" in refusal(path, tmp_path, Unpacking(max_ratio=900))
    assert "--max-unpacked" in refusal(path, tmp_path, Unpacking(max_bytes=2**20))


def test_limits_are_arguments_of_ingest_and_inspect(tmp_path, capsys):
    path = written(tmp_path, gzip.compress(JSONL))
    for command in ("ingest", "inspect"):
        call = [command, str(path), "--data", str(tmp_path / "data")]
        assert cli.main([*call, "--max-unpacked", "1KiB"]) == 1
        assert "unpacks to more than 1.00 KiB" in capsys.readouterr().err
        assert cli.main([*call, "--max-unpacked", "1GB", "--max-ratio", "5000"]) == 0
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main([*call, "--max-unpacked", "much"])
        assert stopped.value.code == 2


def test_unpacking_stops_before_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_DISK_LEFT_BYTES", 2**60)
    path = written(tmp_path, gzip.compress(npz_dump(ROUTES)))
    with pytest.raises(OSError, match="too little room to unpack"):
        ingest(path, DataFolder(tmp_path / "data"), UserMetadata())


def test_a_header_of_npy_that_is_larger_than_any_is_not_read(tmp_path):
    header = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + bytes(100)
    path = written(tmp_path, zipped({"experts.npy": header}))
    with DumpFile(path) as dump, pytest.raises(MalformedDump, match="a header of 2147483648 bytes"):
        Npz(dump).header("experts")


def test_a_text_of_npz_that_claims_gigabytes_reserves_none(tmp_path):
    path = written(tmp_path, zipped({"meta.npy": npy_bytes((), "<U500000000", b"")}))
    with DumpFile(path) as dump, pytest.raises(MalformedDump, match="at most 1 MiB"):
        Npz(dump).text("meta")


@pytest.mark.parametrize("shape", ["(100000, 100000, 8)", f"({10**400}, 1, 8)", "(-5, 3, 8)", "(1,) * 10**9"])
def test_absurd_shapes_are_refused(tmp_path, shape):
    header = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    refusal(written(tmp_path, zipped({"experts.npy": npy})), tmp_path)


# Dumps of several files: a layout of one file a turn, made for these tests


def _turns(folder: DumpFolder, asked: Asked) -> ParsedDump:
    def blocks_of() -> Iterator[RowBlock]:
        sequences = Sequences([0, 1, 2])
        for request, file in enumerate(folder.files):
            with folder.open(file) as turn:
                lines = turn.stream().read().splitlines()[1:]
            ids = np.array([json.loads(line) for line in lines], dtype=np.int32)
            yield from sequences.blocks(ids, request=request, positions=np.arange(len(ids)), prompt_tokens=2)

    return ParsedDump(format="turns", blocks=blocks_of(), top_k=4)


def _turn(ordinal: int) -> bytes:
    routes = random_routes(20, 3, 16, 4, seed=ordinal)
    return b"turns v1\n" + b"".join(json.dumps(token).encode() + b"\n" for token in routes)


@pytest.fixture
def _turns_layout(monkeypatch):
    toy = Layout("turns", "one file a turn", lambda sample: sample.line == "turns v1", parse_folder=_turns)
    monkeypatch.setattr(sniff, "LAYOUTS", (toy, *sniff.LAYOUTS))


pytestmark = pytest.mark.usefixtures("_turns_layout")


def turns(folder: Path, ordinals: tuple[int, ...] = (0, 1, 2), pattern: str = "turn{}.jsonl") -> Path:
    folder.mkdir(parents=True)
    for ordinal in ordinals:
        (folder / pattern.format(ordinal)).write_bytes(_turn(ordinal))
    return folder


def test_a_folder_is_one_dump_with_the_name_of_the_folder(tmp_path):
    one = ingest(turns(tmp_path / "my run"), DataFolder(tmp_path / "data"), UserMetadata())
    assert one.metadata.trace_id.startswith("my-run-")
    assert one.metadata.counts.requests == 3
    source = one.metadata.source
    assert (source.file, source.folder, source.format) == ("my run", str(tmp_path), "turns")
    assert source.bytes == sum(file.stat().st_size for file in (tmp_path / "my run").iterdir())
    assert {check.name: check.outcome for check in one.metadata.checks}["files complete"] == "ok"
    again = ingest(tmp_path / "my run", DataFolder(tmp_path / "data"), UserMetadata())
    assert not again.is_new


def test_files_are_in_natural_order(tmp_path):
    folder = turns(tmp_path / "run", tuple(range(12)))
    with DumpFolder(folder) as dump:
        assert [file.name for file in dump.files] == [f"turn{ordinal}.jsonl" for ordinal in range(12)]


def test_a_quoted_pattern_is_one_dump_of_its_files_alone(tmp_path, capsys):
    folder = turns(tmp_path / "run")
    (folder / "README.txt").write_text("not a turn")
    data = DataFolder(tmp_path / "data")
    assert cli.main(["ingest", str(folder / "turn*.jsonl"), "--data", str(data.root)]) == 0
    (trace_id,) = data.trace_ids()
    assert trace_id.startswith("run-")
    (folder / "README.txt").unlink()
    assert not ingest(folder, data, UserMetadata()).is_new, "the same files are the same dump"
    assert dump_of(data, trace_id) == folder / "turn*.jsonl"
    assert "matches no file" in refusal(folder / "rank*.jsonl", tmp_path / "other")
    assert "name the folder without wildcards" in refusal(tmp_path / "r*" / "turn*.jsonl", tmp_path / "other")
    capsys.readouterr()


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    assert len(rows_of(written(tmp_path, JSONL, "a[1].jsonl"), tmp_path / "data")) == 180


def test_a_zip_of_several_is_the_dump_that_its_folder_is(tmp_path):
    folder = turns(tmp_path / "run")
    files = {f"run/{file.name}": file.read_bytes() for file in folder.iterdir()}
    content = zipped({**files, "__MACOSX/run/._turn0.jsonl": b"x", "run/.DS_Store": b"x", "run/x.toml": b"x"})
    path = written(tmp_path, content, "run.zip")
    one = ingest(path, DataFolder(tmp_path / "data"), UserMetadata())
    assert pl.read_parquet(one.path).equals(rows_of(folder, tmp_path / "data"))
    assert one.metadata.source.sha256 == hashlib.sha256(content).hexdigest()
    assert "more than" in refusal(path, tmp_path / "other", Unpacking(max_bytes=2 * len(_turn(0))))


def test_a_zip_whose_files_are_in_several_folders_or_stand_twice_is_refused(tmp_path):
    content = zipped({"a/turn0.jsonl": _turn(0), "b/turn0.jsonl": _turn(1)})
    assert "in 2 folders" in refusal(written(tmp_path, content), tmp_path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("turn0.jsonl", _turn(0))
        archive.writestr("turn0.jsonl", _turn(1))
    assert "stands twice" in refusal(written(tmp_path, buffer.getvalue()), tmp_path)


def test_a_damaged_file_of_a_zip_is_named(tmp_path):
    content = bytearray(zipped({"turn0.jsonl": _turn(0), "turn1.jsonl": _turn(1)}, zipfile.ZIP_STORED))
    content[content.rindex(b"[[") + 4] ^= 0x01
    assert "turn1.jsonl: damaged zip data" in refusal(written(tmp_path, bytes(content)), tmp_path)


def test_packed_files_of_a_folder_are_unpacked_within_one_limit(tmp_path):
    plain, packed = turns(tmp_path / "run"), tmp_path / "packed"
    packed.mkdir()
    for ordinal, pack in enumerate([gzip.compress, zstd, one_zipped]):
        (packed / f"turn{ordinal}.dat").write_bytes(pack(_turn(ordinal)))
    assert rows_of(packed, tmp_path / "data").equals(rows_of(plain, tmp_path / "data"))
    assert "more than" in refusal(packed, tmp_path / "other", Unpacking(max_bytes=2 * len(_turn(0))))
    (packed / "turn3.zip").write_bytes(zipped({"a": _turn(4), "b": _turn(5)}))
    assert "an archive of several files inside" in refusal(packed, tmp_path / "other")


def test_links_pipes_and_subfolders_of_a_folder_are_refused_by_name(tmp_path):
    outside = written(tmp_path, _turn(9), "secret.jsonl")
    for name, make in {
        "link.jsonl": lambda path: path.symlink_to(outside),
        "broken.jsonl": lambda path: path.symlink_to("/nowhere"),
        "inside.jsonl": lambda path: path.symlink_to("turn0.jsonl"),
        "pipe": os.mkfifo,
        "below": Path.mkdir,
        "turn3.jsonl.part": Path.touch,
    }.items():
        folder = turns(tmp_path / f"with {name}")
        make(folder / name)
        assert f"{folder / name}: " in refusal(folder, tmp_path / "data")
    assert (tmp_path / "secret.jsonl").exists()


def test_a_link_put_in_the_place_of_a_listed_file_is_not_followed(tmp_path):
    folder = turns(tmp_path / "run")
    with DumpFolder(folder) as dump:
        (folder / "turn1.jsonl").unlink()
        (folder / "turn1.jsonl").symlink_to("/etc/hostname")
        with pytest.raises(OSError, match="symbolic links"):
            dump.open(dump.files[1])


def test_a_file_replaced_added_or_removed_meanwhile_is_seen(tmp_path):
    folder = turns(tmp_path / "run")
    with DumpFolder(folder) as dump:
        (folder / "turn3.jsonl").write_bytes(_turn(3))
        with pytest.raises(MalformedDump, match=r"turn3\.jsonl: added while"):
            dump.check_unchanged()
        (folder / "turn3.jsonl").unlink()
        dump.check_unchanged()
        (folder / "turn1.jsonl").unlink()
        with pytest.raises(MalformedDump, match=r"turn1\.jsonl: changed"):
            dump.check_unchanged()
        (folder / "turn1.jsonl").write_bytes(_turn(3))
        with pytest.raises(MalformedDump, match=r"turn1\.jsonl: changed"):
            dump.open(dump.files[1])


def test_an_empty_folder_and_one_of_too_many_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    assert "0 files, wanted 1 to" in refusal(tmp_path / "run", tmp_path)
    monkeypatch.setattr(blocks, "MAX_MEMBERS", 2)
    assert "3 files, wanted 1 to 2" in refusal(turns(tmp_path / "many"), tmp_path)


@pytest.mark.parametrize(
    ("names", "missing", "is_certain"),
    [
        (["rank0.pt", "rank2.pt"], ["rank1.pt"], False),
        (["rank1.pt", "rank2.pt"], ["rank0.pt"], False),
        (["rank0.pt", "rank2.pt", "rank4.pt", "rank6.pt"], ["rank1.pt", "rank3.pt", "rank5.pt"], False),
        (["x-rank-00.pt", "x-rank-01.pt", "x-rank-03.pt"], ["x-rank-02.pt"], False),
        (["layer_3.pt", "layer_4.pt", "layer_6.pt"], ["layer_5.pt"], False),
        # Every second layer is a model's choice, not a gap.
        (["layer_1.pt", "layer_3.pt", "layer_5.pt", "layer_7.pt"], [], False),
        (["a-00001-of-00003.safetensors", "a-00003-of-00003.safetensors"], ["a-00002-of-00003.safetensors"], True),
        (["a-0-of-3", "a-1-of-3"], ["a-2-of-3"], True),
        (["a-1-of-3"], ["a-2-of-3", "a-3-of-3"], True),
        (["a-1-of-2", "a-2-of-2"], [], True),
        (["a-1-of-99999999999"], [], False),
        (["dump_1700000123.csv", "dump_1700009456.csv"], [], False),
        (["rank0-iteration-5.jsonl", "rank2-iteration-5.jsonl"], ["rank1-iteration-5.jsonl"], False),
        (["rank0-iteration-5.jsonl", "rank2-iteration-6.jsonl"], [], False),
        (["one.pt", "two.pt"], [], False),
        (["alone.pt"], [], False),
        ([f"f{10**17}", f"f{10**17 + 1}", f"f{10**17 + 3}"], [f"f{10**17 + 2}"], False),
    ],
)
def test_missing_files_are_named_by_the_numbers_of_the_others(names, missing, is_certain):
    assert missing_names(names) == (missing, is_certain)


@given(st.lists(st.from_regex(r"[a-z]{0,4}([-_.]?[0-9]{1,4}){0,3}[-_.]?(of|rank)?", fullmatch=True), unique=True))
@settings(max_examples=100, deadline=None)
def test_missing_names_are_few_and_none_of_those_that_are_there(names):
    missing, _ = missing_names(names) if names else ([], False)
    assert not set(missing) & set(names)
    assert len(missing) <= blocks.MAX_MEMBERS


def test_a_gap_is_a_warning_that_names_the_file_and_a_counted_one_a_refusal(tmp_path):
    one = ingest(turns(tmp_path / "gap", (0, 2), "rank{}.jsonl"), DataFolder(tmp_path / "data"), UserMetadata())
    assert "files complete: missing, by the names of the others: rank1.jsonl" in one.warnings
    folder = turns(tmp_path / "counted", (1, 3), "turns-{}-of-3.jsonl")
    assert "turns-2-of-3.jsonl is missing" in refusal(folder, tmp_path / "other")


def test_a_whole_dump_inside_a_folder_or_a_zip_is_named(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    written(folder, JSONL, "a.jsonl")
    written(folder, JSONL, "b.jsonl")
    assert "ingest each file by itself" in refusal(folder, tmp_path)
    path = written(tmp_path, zipped({"a.jsonl": JSONL, "b.jsonl": JSONL}))
    assert "ingest each file by itself" in refusal(path, tmp_path)


def test_metadata_of_a_folder_lie_beside_it_also_for_a_pattern(tmp_path, monkeypatch):
    folder = turns(tmp_path / "run")
    (tmp_path / "run.toml").write_text('domain = "code"\n')
    for path in (folder, folder / "turn*.jsonl", tmp_path / "run" / ".." / "run"):
        assert read_user_metadata(path).domain == "code"
    monkeypatch.chdir(folder)
    for path in (Path(), Path("turn*.jsonl")):
        assert metadata_file(path) == tmp_path / "run.toml"
    one = ingest(Path(), DataFolder(tmp_path / "data"), read_user_metadata(Path()))
    assert one.metadata.source.file == "run"
    assert one.metadata.trace_id.startswith("run-")


def test_a_changed_folder_is_a_new_trace_that_supersedes(tmp_path):
    folder, data = turns(tmp_path / "run"), DataFolder(tmp_path / "data")
    first = ingest(folder, data, UserMetadata()).metadata
    (folder / "turn3.jsonl").write_bytes(_turn(3))
    second = ingest(folder, data, UserMetadata()).metadata
    assert second.supersedes == first.trace_id
    (folder / "turn3.jsonl").rename(folder / "turn4.jsonl")
    third = ingest(folder, data, UserMetadata()).metadata
    assert third.trace_id != second.trace_id, "names are part of a dump's identity: they hold ranks and layers"


def test_a_folder_can_be_inspected(tmp_path):
    metadata = inspect(turns(tmp_path / "run"), UserMetadata(), tmp_path)
    assert (metadata.source.format, metadata.counts.requests) == ("turns", 3)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("a.jsonl.zst", "a"), ("A b.csv.xz", "a-b"), ("run.npz.zip", "run"), ("x.bz2", "x"), ("run", "run")],
)
def test_the_suffix_of_a_packing_is_no_part_of_the_name(name, wanted):
    assert slug(name) == wanted


# The dumps folder


def test_a_folder_is_complete_once_nothing_in_it_changes(tmp_path):
    data = DataFolder(tmp_path)
    folder = data.dumps / "run"
    folder.mkdir(parents=True)
    found, cursor, waiting = new_dumps(data, None)
    assert (found, waiting) == ([], ["run"])
    (folder / "turn0.jsonl").write_bytes(_turn(0))
    _, cursor, _ = new_dumps(data, cursor)
    (folder / "turn1.jsonl.part").write_bytes(_turn(1)[:99])
    found, cursor, waiting = new_dumps(data, cursor)
    assert (found, waiting) == ([], ["run"])
    (folder / "turn1.jsonl.part").rename(folder / "turn1.jsonl")
    assert new_dumps(data, cursor)[0] == []
    _, cursor, _ = new_dumps(data, cursor)
    (folder / "turn1.jsonl").write_bytes(_turn(1))
    found, cursor, _ = new_dumps(data, cursor)
    assert found == []
    found, cursor, _ = new_dumps(data, cursor)
    assert [name for _, name in found] == ["run"]
    trace_id = found[0][0]
    assert new_dumps(data, cursor)[0] == []
    assert dump_of(data, trace_id) == folder
    ingest(folder, data, UserMetadata(), trace_id=trace_id)
    assert dump_of(data, trace_id) == folder
    _, cursor, _ = new_dumps(data, cursor)
    (folder / "turn2.jsonl").write_bytes(_turn(2))
    _, cursor, _ = new_dumps(data, cursor)
    found, _, _ = new_dumps(data, cursor)
    assert [name for _, name in found] == ["run"]
    assert found[0][0] != trace_id


def test_a_folder_that_is_no_dump_is_named_and_keeps_nobody_waiting(tmp_path):
    data = DataFolder(tmp_path)
    (data.dumps / "run" / "below").mkdir(parents=True)
    drop(data, "a.jsonl", content=JSONL)
    _, cursor, _ = new_dumps(data, None)
    found, cursor, waiting = new_dumps(data, cursor)
    assert [name for _, name in found] == ["a.jsonl"]
    assert any("a folder inside a folder" in reason for reason in waiting)
    assert new_dumps(data, cursor)[2] == []


# Progress


def test_progress_says_share_rate_and_end(monkeypatch):
    noon = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    text = cli.reading_text("reading", 2**30, 4 * 2**30, 10, noon)
    assert text == "reading, 25% of 4.00 GiB, 102.40 MiB/s, 30 s left, ends 12:00:30"
    assert cli.reading_text("reading", 0, 2**30, 0.0, noon) == "reading, 1.00 GiB"
    assert cli.reading_text("reading", 2**30, 2**30, 9.0, noon) == "reading, all of 1.00 GiB read, not done yet"


def test_progress_is_shown_on_a_terminal_and_nothing_in_a_pipe(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, tok_layers_dump(random_routes(3000, 3, 16, 4)), "a.jsonl")
    assert cli.main(["ingest", str(path), "--data", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(cli, "PROGRESS_SECONDS", 0.001)
    assert cli.main(["ingest", str(path), "--data", str(tmp_path / "two")]) == 0
    said = capsys.readouterr().err
    assert "ingesting a.jsonl: reading, " in said
    assert said.endswith(" s\x1b[K\n")


def test_bytes_read_of_a_folder_reach_its_size_in_each_pass(tmp_path):
    with DumpFolder(turns(tmp_path / "run")) as dump:
        for _ in range(2):
            dump.read_again()
            assert dump.read_bytes == 0
            dump.sha256()
            assert dump.read_bytes == dump.size_bytes
