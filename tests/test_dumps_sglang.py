"""SGLang's dumps, synthetic and as its source documents them: routes come back, and what cannot be told is refused."""

import copy
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.canonical import Canonical
from pipeline.cli import main
from pipeline.dumps import sglang, sglang_responses, sniff, torch_file
from pipeline.dumps.blocks import Asked, DumpFile, DumpFolder, MalformedDump, ParsedDump, RefusedDump
from pipeline.dumps.torch_file import Loaded
from pipeline.ingest import ingest
from schemas.columns import PHASES
from schemas.files import DataFolder
from schemas.trace import TraceMetadata, UserMetadata
from tests.raw_dumps import random_routes
from tests.raw_sglang import (
    DECODE,
    DRAFT_EXTEND,
    EXTEND,
    IDLE,
    TARGET_VERIFY,
    Engine,
    lines,
    packed,
    packed_floats,
    partitioned,
    response,
    short_run,
    with_tensors,
)


def array(values: list, dtype: str) -> np.ndarray:
    return np.array(values, dtype=dtype)


def as_tensor(values: list, dtype: str) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype))


def walked(parsed: ParsedDump, path: Path, **said: object) -> tuple[list[tuple], TraceMetadata]:
    """(rows of the trace, its metadata): every check of a dump runs, and no file is written."""
    canonical = Canonical(path, parsed, UserMetadata(**said))
    rows = []
    for numbered in canonical.blocks():
        canonical.number(numbered)
        block = numbered.block
        columns = (block.step, block.request, block.position, numbered.phase, block.layer)
        rows += [
            (step, request, position, PHASES[phase], layer, ids)
            for step, request, position, phase, layer, ids in zip(
                *(column.tolist() for column in columns), block.expert_ids.tolist(), strict=True
            )
        ]
    return rows, canonical.metadata((path, "0" * 64), "a", None, 1)


def read(*dumps: dict, **said: object) -> tuple[list[tuple], TraceMetadata]:
    """Recordings of one or several ranks as they come out of the loader."""
    folder = Path("recording")
    asked = Asked(UserMetadata(**said), folder)
    files = [Loaded(folder / f"rank{n}.pt", with_tensors(dump, array)) for n, dump in enumerate(dumps)]
    if len(files) == 1:
        return walked(sglang.parse_recorder(files[0], asked), files[0].path, **said)
    unread: DumpFolder = None  # type: ignore[assignment]
    unread = type("Folder", (), {"path": folder})()
    return walked(sglang.parse_recorder_folder(files, unread, asked), folder, **said)


def refused(*dumps: dict, **said: object) -> str:
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        read(*dumps, **said)
    message = str(caught.value)
    assert message.startswith("recording")
    assert "\n" not in message
    return message


def check(metadata: TraceMetadata, name: str) -> tuple[str, str]:
    return next((one.outcome, one.found) for one in metadata.checks if one.name == name)


# The recorder, through a real torch file


def test_a_synthetic_recording_gives_back_every_field(tmp_path):
    engine = short_run()
    torch.save(with_tensors(engine.dump(), as_tensor), tmp_path / "rank0.pt")
    one = ingest(tmp_path / "rank0.pt", DataFolder(tmp_path / "data"), UserMetadata())
    rows = pl.read_parquet(one.path).with_columns(pl.col("phase").cast(pl.String))
    columns = ("step_id", "request_id", "token_position", "phase", "layer_id", "expert_ids")
    assert rows.select(columns).rows() == engine.truth
    assert one.metadata.source.format == "sglang_recorder"
    assert (one.metadata.hidden_layers, one.metadata.moe_layer_ids) == (4, [1, 2, 3])
    assert (one.metadata.id_space, one.metadata.top_k_observed) == ("logical", 4)
    assert one.metadata.pass_boundaries == "recorded"
    assert check(one.metadata, "engine's counts agree")[0] == "ok"
    # A run of the loader leaves nothing behind.
    assert sorted(entry.name for entry in (tmp_path / "data" / "traces").iterdir() if entry.name != ".lock") == [
        one.path.name
    ]


def test_a_folder_of_ranks_in_both_torch_formats_is_one_dump(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    engine, other = short_run(), short_run(rank=1, seed=5)
    torch.save(with_tensors(engine.dump(), as_tensor), folder / "r0.pt")
    torch.save(with_tensors(other.dump(), as_tensor), folder / "r1.pt", _use_new_zipfile_serialization=False)
    one = ingest(folder, DataFolder(tmp_path / "data"), UserMetadata())
    assert one.metadata.counts.rows == len(engine.truth) + len(other.truth)
    assert one.metadata.counts.requests == 8


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_the_command_line_refuses_a_torch_file_that_wants_code_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    torch.save({"records": [_Bomb()], "last_physical_to_logical_map": None}, tmp_path / "a.pt")
    assert main(["ingest", str(tmp_path / "a.pt"), "--data", str(tmp_path / "data")]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "its pickle wants posix.mkdir" in error
    assert not (tmp_path / "exploded").exists()


def loaded_refusal(folder: Path, content: object, **options: object) -> str:
    torch.save(content, folder / "x.pt", **options)
    asked = Asked(UserMetadata(), folder / "spool")
    with DumpFile(folder / "x.pt") as dump, pytest.raises((RefusedDump, MalformedDump)) as caught:
        torch_file.load(dump, asked)
    assert list((folder / "spool").iterdir()) == []
    return str(caught.value)


def test_a_tensor_that_unfolds_to_terabytes_is_stopped(tmp_path):
    assert "many times larger than the file" in loaded_refusal(tmp_path, {"x": torch.zeros(1).expand(2**40)})


def test_a_loader_is_stopped_by_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.torch_file.MEMORY_BYTES", 8 * 2**20)
    content = {"x": torch.zeros(64 * 2**20, dtype=torch.uint8)}
    assert "more memory" in loaded_refusal(tmp_path, content, _use_new_zipfile_serialization=False)


def test_a_loader_is_stopped_by_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.torch_file.SECONDS", 0)
    assert "does not load within 0 s" in loaded_refusal(tmp_path, {"x": 1})


def test_packed_members_are_refused_before_anything_is_unpacked(tmp_path):
    torch.save({"x": torch.zeros(1000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(RefusedDump, match="compressed members"):
        ingest(tmp_path / "b.pt", DataFolder(tmp_path / "data"), UserMetadata())


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_truncated_torch_file_is_named(tmp_path, share):
    torch.save(with_tensors(short_run().dump(), as_tensor), tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(MalformedDump, match="truncated"):
        ingest(tmp_path / "a.pt", DataFolder(tmp_path / "data"), UserMetadata())


def test_a_damaged_pickle_ends_in_a_sentence(tmp_path):
    torch.save(with_tensors(short_run().dump(), as_tensor), tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    begin = content.index(b"forward_pass_id")
    content[begin - 5 : begin] = b"\xff" * 5
    (tmp_path / "a.pt").write_bytes(content)
    with DumpFile(tmp_path / "a.pt") as dump, pytest.raises((RefusedDump, MalformedDump)) as caught:
        torch_file.load(dump, Asked(UserMetadata(), tmp_path / "spool"))
    assert "\n" not in str(caught.value)


WHAT_A_LOADER_COULD_WRITE = [
    b"",
    b'{"tree": ',
    b"5\n",
    b'{"nothing": 1}\n',
    b'{"tree": {"d": 5}}\n',
    b'{"tree": {"d": [[{"d": []}, 1]]}}\n',
    b'{"tree": {"a": ["|O", [1], 0]}}\n',
    b'{"tree": {"a": ["<i8", [1000000], 0]}}\n',
    b'{"tree": {"a": ["<i8", [0, 99999999999999999999999], 0]}}\n',
    b'{"tree": {"a": ["<i8", [1], -8]}}\n',
    b'{"refused": "two\\nlines"}\n',
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("written", WHAT_A_LOADER_COULD_WRITE)
def test_what_a_loader_that_was_taken_over_writes_is_not_trusted(tmp_path, written):
    (tmp_path / "x.pt").write_bytes(b"x")
    (tmp_path / "tree").write_bytes(written)
    with (
        DumpFile(tmp_path / "x.pt") as dump,
        (tmp_path / "tree").open("rb") as file,
        pytest.raises(RefusedDump) as caught,
    ):
        list(torch_file._read([dump], file, None, -9))
    assert "\n" not in str(caught.value)


def test_what_the_loader_hands_over(tmp_path):
    content = {
        "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "turned": torch.arange(6).reshape(2, 3).T,
        "np": np.arange(5, dtype=np.int16),
        "big": np.array([1, 2], dtype=">i4"),
        "number": np.float32(2.5),
        "short": [1, 2, 3],
        "long": list(range(40)),
        "nested": [[1, 2], [3, 4]] * 10,
        "ragged": [[1], [2, 3]],
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "sparse": torch.eye(2).to_sparse(),
        3: ("é", None, True, 1.25),
    }
    torch.save(content, tmp_path / "a.pt")
    with DumpFile(tmp_path / "a.pt") as dump:
        tree = torch_file.load(dump, Asked(UserMetadata(), tmp_path / "spool")).tree
    assert (tree["b"].dtype, tree["b"].tolist()) == (np.float32, [1.5, -2.0])
    assert tree["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (tree["np"].dtype, tree["np"].tolist()) == (np.int16, [0, 1, 2, 3, 4])
    assert tree["big"].tolist() == [1, 2]
    assert tree["number"] == 2.5
    assert tree["short"] == [1, 2, 3]
    assert tree["long"].tolist() == list(range(40))
    assert tree["nested"].tolist() == [[1, 2], [3, 4]] * 10
    assert tree["ragged"] == [[1], [2, 3]]
    assert tree["flags"].tolist() == [True, False]
    assert tree["empty"].shape == (0, 3)
    assert isinstance(tree["sparse"], torch_file.Unreadable)
    assert tree[3] == ["é", None, True, 1.25]
    assert not tree["np"].flags.writeable


# The recorder, from trees


def test_dense_layers_and_the_tail_of_the_axis_are_left_out():
    rows, metadata = read(short_run(dense=(0, 2)).dump())
    assert metadata.moe_layer_ids == [1, 3]
    assert metadata.top_k_observed == 4
    assert len({row[0] for row in rows}) == 18


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(1, 4),
    top_k=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    decodes=st.integers(0, 6),
)
def test_any_synthetic_recording_gives_back_its_routes(layers, top_k, seed, prompts, decodes):
    engine = Engine(layers=layers + 1, experts=64, top_k=top_k, seed=seed)
    requests = engine.extend(*prompts)
    for _ in range(decodes):
        engine.decode(*requests)
    engine.extend(12, prefix=40)
    if top_k == 1 and layers > 1:
        return  # Short one-expert layers may be equal by chance.
    try:
        rows, _ = read(engine.dump(), num_experts=64)
    except MalformedDump as error:
        assert "partition the 64 experts" in str(error) or "same experts in every row" in str(error)
        return
    assert rows == engine.truth


def test_k_is_the_users_or_the_datas_and_they_must_agree():
    assert "the recorder stores 8 ids per token" in refused(short_run().dump(), top_k_model=10)
    assert "you say top_k_model = 6, the rows hold 4 ids" in refused(short_run().dump(), top_k_model=6)
    assert read(short_run().dump(), top_k_model=4)[1].top_k_model == 4


def test_equal_ranks_are_replicas_and_one_is_kept():
    engine = short_run()
    copy_ = copy.deepcopy(engine.dump())
    for record in copy_["records"]:
        record["rank"] = 1
    rows, metadata = read(engine.dump(), copy_)
    assert rows == engine.truth
    assert check(metadata, "ranks agree") == ("ok", "2 ranks: 1 equal to another and left out, ranks [0] kept")


def test_ranks_with_other_tokens_are_shards_and_joined():
    engine, other = short_run(), short_run(rank=1, seed=5)
    rows, metadata = read(engine.dump(), other.dump())
    assert sorted(row[2:] for row in rows) == sorted(row[2:] for row in engine.truth + other.truth)
    assert metadata.counts.steps == 36
    assert metadata.counts.requests == 8
    assert "ranks [0, 1] kept" in check(metadata, "ranks agree")[1]


def test_ranks_that_are_equal_in_part_are_refused_and_named():
    engine = short_run()
    cut = copy.deepcopy(engine.dump())
    for record in cut["records"]:
        record["rank"] = 1
    del cut["records"][-3:]
    assert "ranks 0 and 1 are equal in 15 passes (first 7) of 18" in refused(engine.dump(), cut)


def test_replicas_with_other_routes_are_refused():
    engine = short_run()
    torn = copy.deepcopy(engine.dump())
    for record in torn["records"]:
        record["rank"] = 1
    torn["records"][3]["topk_ids_of_layer"][2][1][:2] = torn["records"][3]["topk_ids_of_layer"][2][1][:2][::-1]
    assert "same tokens with different routes in 1 of 18 passes, first in pass 10" in refused(engine.dump(), torn)


def coinciding(engine: Engine, passes: int, *, routes: bool) -> dict:
    """Another rank of the same passes with other tokens, but for so many, whose routes are the same too or not."""
    other = copy.deepcopy(engine.dump())
    generator = np.random.default_rng(0)
    for place, record in enumerate(other["records"]):
        record["rank"] = 1
        if place >= passes:
            record["input_ids"] = [number + 1000 for number in record["input_ids"]]
        if place >= passes or not routes:
            record["topk_ids_of_layer"] = [
                layer if layer[0][0] < 0 else [[*generator.permutation(16)[:4].tolist(), -1, -1, -1, -1] for _ in layer]
                for layer in record["topk_ids_of_layer"]
            ]
    return other


@pytest.mark.parametrize("routes", [True, False])
def test_a_lone_coincidence_of_shards_makes_them_no_replicas(routes):
    engine = short_run()
    _, metadata = read(engine.dump(), coinciding(engine, 1, routes=routes))
    assert metadata.counts.steps == 36
    outcome, found = check(metadata, "ranks agree")
    assert outcome == "warn"
    assert "ranks [0, 1] kept" in found
    assert "1 passes with the tokens of another rank's by chance" in found


@pytest.mark.parametrize("passes", [2, 9, 17])
def test_ranks_that_coincide_more_often_than_by_chance_are_refused(passes):
    engine = short_run()
    message = refused(engine.dump(), coinciding(engine, passes, routes=True))
    assert f"ranks 0 and 1 are equal in {passes} passes (first 7) of 18, wanted all of them (replicas)" in message


def test_shards_without_tokens_are_told_by_their_routes():
    engine = short_run()
    one, other = engine.dump(), coinciding(engine, 0, routes=False)
    for record in one["records"] + other["records"]:
        record["input_ids"] = None
    assert "ranks [0, 1] kept" in check(read(one, other)[1], "ranks agree")[1]


def test_a_missing_rank_is_named():
    assert "the file of rank 1 is missing" in refused(short_run().dump(), short_run(rank=2, seed=1).dump())


def test_two_files_of_one_rank_are_two_recordings():
    assert "rank 0, as rank0.pt is" in refused(short_run().dump(), short_run(seed=1).dump())


def test_physical_ids_without_a_map_of_every_pass_are_refused_unless_said():
    dump = short_run().dump()
    dump["last_physical_to_logical_map"][2] = [1, 0, *range(2, 16)]
    message = refused(dump)
    assert "nothing shows that it held in earlier passes" in message
    assert "--meta id_space=physical" in message
    rows, metadata = read(dump, id_space="physical")
    assert rows == short_run().truth
    assert metadata.id_space == "physical"


def test_redundant_experts_are_physical_too():
    engine = short_run(experts=18)
    dump = engine.dump()
    dump["last_physical_to_logical_map"] = [[*range(16), 0, 1]] * 4
    assert "18 physical experts, 16 logical ones" in refused(dump)


def test_the_engines_counts_are_compared():
    dump = short_run().dump()
    dump["records"][4]["global_physical_count"][1][3] += 1
    outcome, found = check(read(dump)[1], "engine's counts agree")
    assert outcome == "warn"
    assert "17 of 18 passes agree; first that does not: pass 11 of rank 0" in found


def test_counts_of_passes_are_no_trace():
    dump = short_run().dump()
    for record in dump["records"]:
        del record["topk_ids_of_layer"]
    assert "recorder mode per_pass" in refused(dump)
    assert "record with --expert-distribution-recorder-mode per_token" in refused(dump)


def test_the_buffer_of_counts_is_no_trace():
    stat = {"rank": 0, "logical_count": np.ones((5, 3, 16)), "average_utilization_rate_over_window": None}
    assert [kind.claims(stat) for kind in sglang.TREE_NO_TRACES] == [True]
    assert "recorder mode stat" in sglang.TREE_NO_TRACES[0].reason


def with_minus_ones(engine: Engine, step: int, tokens: slice, layers: slice) -> dict:
    dump = engine.dump()
    for layer in dump["records"][step]["topk_ids_of_layer"][layers]:
        for ids in layer[tokens]:
            ids[:] = [-1] * 8
    return dump


def test_a_pass_of_minus_ones_was_not_captured():
    engine = short_run()
    rows, metadata = read(with_minus_ones(engine, 4, slice(None), slice(None)))
    assert [row[1:] for row in rows] == [row[1:] for row in engine.truth if row[0] != 4]
    assert "3: passes that hold −1 alone: not captured" in check(metadata, "positions captured")[1]


def test_padding_rows_of_minus_ones_are_dropped_and_counted():
    engine = short_run()
    rows, metadata = read(with_minus_ones(engine, 0, slice(7, None), slice(None)))
    assert rows == [row for row in engine.truth if row[:3] != (0, 1, 2)]
    assert metadata.counts.dropped_rows == {"tokens of −1 in every layer: padding": 3}


def test_a_layer_that_was_not_captured_in_one_pass_is_named():
    message = refused(with_minus_ones(short_run(), 4, slice(None), slice(2, 3)))
    assert "forward pass 11 of rank 0, layer 2, token 0: −1 alone" in message


def test_a_route_that_ends_early_is_named():
    dump = short_run().dump()
    dump["records"][2]["topk_ids_of_layer"][1][0][3] = -1
    assert "ends before the 4 ids of other rows" in refused(dump)


def test_nothing_but_minus_ones_is_refused():
    engine = short_run(dense=(0, 1, 2, 3))
    assert "every id is −1" in refused(engine.dump())


def test_an_appended_shared_expert_is_refused():
    engine = short_run()
    dump = engine.dump()
    for record in dump["records"]:
        for layer in record["topk_ids_of_layer"][1:]:
            for ids in layer:
                ids[4] = 16
    assert "--disable-shared-experts-fusion" in refused(dump)


def test_ids_below_minus_one_and_gaps_in_the_axis_are_refused():
    dump = short_run().dump()
    dump["records"][0]["topk_ids_of_layer"][1][0][0] = -2
    assert "wanted −1 or 0..15" in refused(dump)
    dump = short_run().dump()
    for record in dump["records"]:
        for layer in record["topk_ids_of_layer"]:
            for ids in layer:
                ids[5], ids[3] = ids[3], -1
    assert "slot 3 of the 8 ids is −1 in every row" in refused(dump)


def test_idle_passes_and_drafts():
    engine = short_run()
    engine.record([(90, 5, "unknown")], IDLE, None)
    rows, metadata = read(engine.dump())
    assert metadata.counts.dropped_rows == {"passes of an idle rank": 3}
    engine = short_run()
    engine.record([(4, 50, "unknown"), (4, 51, "unknown"), (5, 70, "unknown")], TARGET_VERIFY, None)
    engine.record([], DRAFT_EXTEND, None)
    rows, metadata = read(engine.dump())
    assert rows == engine.truth
    assert check(metadata, "forward modes known")[0] == "warn"


def test_an_unknown_mode_leaves_the_phase_unknown():
    engine = short_run()
    engine.record([(4, 50, "unknown"), (4, 51, "unknown")], 9, [2])
    assert read(engine.dump())[0] == engine.truth


@pytest.mark.parametrize(
    ("step", "change", "expected"),
    [
        (0, {"extend_seq_lens": [5, 4]}, "extend_seq_lens adds up to 9 tokens, topk_ids_of_layer holds 8"),
        (0, {"extend_seq_lens": None}, "an extend pass without extend_seq_lens"),
        (1, {"positions": [1, 2, 3]}, "positions is a list of 3"),
        (1, {"positions": [1, -2]}, "wanted 2 whole numbers of 0 or more"),
        (1, {"rank": None}, "rank None"),
        (1, {"gatherer_key": "child_a"}, "two-batch overlap"),
        (5, {"forward_pass_id": 9}, "stands after pass 11"),
    ],
)
def test_records_that_contradict_themselves_are_named(step, change, expected):
    dump = short_run().dump()
    dump["records"][step] |= change
    assert expected in refused(dump)


def test_no_record_is_told():
    dump = short_run().dump()
    dump["records"] = []
    assert "was the recorder started" in refused(dump)


def test_decoded_tokens_that_could_be_of_several_requests_are_counted():
    engine = Engine()
    requests = engine.extend(6, 6, 6)
    for _ in range(20):
        engine.decode(*requests)
    rows, metadata = read(engine.dump())
    assert rows == engine.truth
    assert "3 requests pieced together" in check(metadata, "requests known")[1]
    assert check(metadata, "requests known")[0] == "warn"


WRONG = st.sampled_from([None, True, -1, 2**70, "x", [], [1], {}, [[1]], 1.5, np.zeros((2, 2)), np.zeros((4, 2, 8))])
RECORD_FIELDS = tuple(short_run().records[0])


@settings(max_examples=50, deadline=None)
@given(
    step=st.integers(0, 17),
    name=st.sampled_from(RECORD_FIELDS),
    wrong=WRONG,
    is_removed=st.booleans(),
    at_top=st.sampled_from([None, None, None, "records", "last_physical_to_logical_map"]),
)
def test_any_wrong_field_ends_in_a_sentence_or_a_trace(step, name, wrong, is_removed, at_top):
    tree = with_tensors(short_run().dump(), array)
    if at_top:
        tree[at_top] = wrong
    elif is_removed:
        del tree["records"][step][name]
    else:
        tree["records"][step][name] = wrong
    one = Loaded(Path("recording"), tree)
    try:
        walked(sglang.parse_recorder(one, Asked(UserMetadata(), Path())), one.path)
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_wrong_id_ends_in_a_sentence_or_a_trace(data):
    tree = with_tensors(short_run().dump(), array)
    ids = tree["records"][data.draw(st.integers(0, 17))]["topk_ids_of_layer"]
    for _ in range(data.draw(st.integers(1, 4))):
        ids.flat[data.draw(st.integers(0, ids.size - 1))] = data.draw(st.integers(-(2**31), 2**31 - 1))
    one = Loaded(Path("recording"), tree)
    try:
        walked(sglang.parse_recorder(one, Asked(UserMetadata(), Path())), one.path)
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


# Responses of /generate

ROUTES = random_routes(60, 3, 16, 2, seed=3)
SHAPE = {"hidden_layers": 4, "top_k_model": 2, "moe_layer_ids": [1, 2, 3]}


def ingested(folder: Path, content: bytes, **said: object) -> tuple[list[tuple], TraceMetadata]:
    path = folder / "responses"
    path.write_bytes(content)
    one = ingest(path, DataFolder(folder / "data"), UserMetadata(**said))
    rows = pl.read_parquet(one.path).with_columns(pl.col("phase").cast(pl.String))
    columns = ("step_id", "request_id", "token_position", "phase", "layer_id", "expert_ids")
    return rows.select(columns).rows(), one.metadata


def refusal(folder: Path, content: bytes, **said: object) -> str:
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingested(folder, content, **said)
    message = str(caught.value)
    assert message.startswith(str(folder / "responses"))
    assert "\n" not in message
    return message


def truth(spans: list[tuple[int, int, int]], *, first_layer: int = 1, start: int = 0) -> list[tuple]:
    """Rows of requests that each run ROUTES[begin:end] and have so many prompt tokens."""
    rows, step = [], 0
    for request, (begin, end, prompt) in enumerate(spans):
        for position, token in enumerate(ROUTES[begin:end], start):
            phase = "prefill" if position < prompt else "decode"
            rows += [(step, request, position, phase, first_layer + layer, ids) for layer, ids in enumerate(token)]
            step += 1
    return rows


@pytest.mark.parametrize("form", ["lines", "document", "indented", "list", "indented list"])
def test_synthetic_responses_give_back_their_routes(tmp_path, form):
    one = response(ROUTES[:30], 20, 11, layers_before=1)
    two = response(ROUTES[30:], 5, 26, layers_before=1)
    content = {
        "lines": lines([one, two]),
        "document": json.dumps(one).encode(),
        "indented": json.dumps(one, indent=2).encode(),
        "list": json.dumps([one, two]).encode(),
        "indented list": json.dumps([one, two], indent=1).encode(),
    }[form]
    rows, metadata = ingested(tmp_path, content, **SHAPE)
    spans = [(0, 30, 20), (30, 60, 5)]
    assert rows == truth(spans if len(content) > 6000 or "lines" in form or "list" in form else spans[:1])
    assert metadata.source.format == "sglang_routed_experts"
    assert metadata.pass_boundaries == "assumed_per_token"
    assert metadata.layer_base == "recorded"


def test_newer_responses_bring_their_shape(tmp_path):
    rows, metadata = ingested(tmp_path, lines([partitioned(ROUTES[:30], 20, 11, dense=1)]))
    assert rows == truth([(0, 30, 20)])
    assert (metadata.hidden_layers, metadata.moe_layer_ids, metadata.id_space) == (4, [1, 2, 3], "logical")


def test_weights_come_with_the_ids(tmp_path):
    weights = [[[0.75, 0.25]] * 4 for _ in range(30)]
    path = tmp_path / "responses"
    path.write_bytes(lines([partitioned(ROUTES[:30], 20, 11, dense=1, expert_logits=packed_floats(weights))]))
    one = ingest(path, DataFolder(tmp_path / "data"), UserMetadata())
    assert pl.read_parquet(one.path)["router_weights"].to_list() == [[0.75, 0.25]] * 90
    one = partitioned(ROUTES[:30], 20, 11, dense=1, expert_logits=packed_floats(weights[1:]))
    assert "expert_logits holds 232 numbers for 240 ids" in refusal(tmp_path, lines([one]))


def test_null_is_not_asked_for_and_empty_is_no_row(tmp_path):
    asked_not = response(ROUTES[:30], 20, 11, layers_before=1, routed_experts=None)
    one_token = partitioned(ROUTES[:20], 1, 20, dense=1)
    assert one_token["meta_info"]["input_expert_ids"] == ""
    rows, metadata = ingested(tmp_path, lines([asked_not, one_token]), **SHAPE)
    assert rows == truth([(0, 20, 1)])
    assert "31: responses that were not asked for routes" in check(metadata, "positions captured")[1]
    assert "responses without routes" in refusal(tmp_path, lines([asked_not]), **SHAPE)


def test_only_the_output_may_be_asked_for(tmp_path):
    one = partitioned(ROUTES[:30], 20, 11, dense=1, input_expert_ids=None)
    one["meta_info"]["expert_ids_schema"] |= {"input_num_rows": None, "input_start_position": None}
    rows, metadata = ingested(tmp_path, lines([one]))
    assert rows == truth([(19, 30, 20)], start=19)
    assert "input_expert_ids was not asked for" in check(metadata, "positions captured")[1]


def test_both_payloads_must_agree(tmp_path):
    planes = [[[0, 0], *token] for token in ROUTES[:30]]
    one = partitioned(ROUTES[:30], 20, 11, dense=1, routed_experts=packed(planes))
    assert check(ingested(tmp_path, lines([one]))[1], "both payloads agree")[0] == "ok"
    planes[3][1] = [9, 10]
    one["meta_info"]["routed_experts"] = packed(planes)
    assert "routed_experts differs" in refusal(tmp_path, lines([one]))


def test_the_last_tokens_row_is_reported(tmp_path):
    one, two = response(ROUTES[:30], 20, 11, layers_before=1), response(ROUTES[30:], 30, 0, layers_before=1)
    _, metadata = ingested(tmp_path, lines([one, two]), **SHAPE)
    assert check(metadata, "rows fit the tokens") == (
        "warn",
        "1 responses with one row less than tokens, 1 with a row each",
    )


def test_fewer_rows_than_tokens_are_refused(tmp_path):
    message = refusal(tmp_path, lines([response(ROUTES[:30], 60, 11, layers_before=1)]), **SHAPE)
    assert "30 rows from position 0 on, but 60 prompt and 11 completion tokens; wanted 70 rows" in message
    assert "capture buffer" in message


def test_a_declared_start_shifts_the_positions(tmp_path):
    one = response(ROUTES[:30], 20, 16, layers_before=1) | {"routed_experts_start_len": 5}
    rows, metadata = ingested(tmp_path, lines([one]), **SHAPE)
    assert rows == truth([(0, 30, 20)], start=5)
    assert "5: before routed_experts_start_len" in check(metadata, "positions captured")[1]


def test_a_cached_prefix_was_not_run_in_this_request(tmp_path):
    rows, metadata = ingested(
        tmp_path, lines([response(ROUTES[:30], 20, 11, layers_before=1, cached_tokens=8)]), **SHAPE
    )
    assert rows == truth([(8, 30, 20)], start=8)
    assert metadata.counts.dropped_rows == {"cached prefix: run in an earlier request, not in this": 24}


def test_the_shape_must_be_said(tmp_path):
    content = lines([response(ROUTES[:30], 20, 11, layers_before=1)])
    assert "say --meta hidden_layers=L and --meta top_k_model=K" in refusal(tmp_path, content)
    assert "no multiple of 7 layers × 2" in refusal(tmp_path, content, hidden_layers=7, top_k_model=2)


def test_dense_layers_are_only_dense_if_declared(tmp_path):
    content = lines([response(ROUTES[:30], 20, 11, layers_before=1)])
    message = refusal(tmp_path, content, hidden_layers=4, top_k_model=2)
    assert "layers [0] hold 0 alone" in message
    assert "--meta moe_layer_ids" in message
    assert "layer 1 is declared dense, but holds ids" in refusal(tmp_path, content, **SHAPE | {"moe_layer_ids": [2, 3]})
    assert "are declared, but the planes are 0..3" in refusal(tmp_path, content, **SHAPE | {"moe_layer_ids": [2, 4]})


def test_an_all_zero_tape_is_refused(tmp_path):
    zeros = [[[0, 0]] * 4 for _ in range(30)]
    assert "not expert 0" in refusal(tmp_path, lines([response(zeros, 20, 11)]), **SHAPE)


def test_rows_that_nobody_wrote_are_refused(tmp_path):
    routes = ROUTES[:25] + [[[0, 0]] * 3 for _ in range(5)]
    message = refusal(tmp_path, lines([response(routes, 20, 11, layers_before=1)]), **SHAPE)
    assert "5 of 30 tokens, first token 25, hold 0 in every layer" in message


def test_a_response_that_came_before_is_refused_by_both_places(tmp_path):
    one, two = response(ROUTES[:30], 20, 11, layers_before=1), response(ROUTES[30:], 5, 26, layers_before=1)
    name = one["meta_info"]["id"]
    message = refusal(tmp_path, lines([one, two, one]), **SHAPE)
    assert f", line 3: id '{name}' with the routes of the response, line 1; wanted each response once" in message
    assert "line 3: id" in refusal(tmp_path, lines([one, two] * 2), **SHAPE)
    # Pieces of a stream have one id, and each holds the routes of those before.
    piece = response(ROUTES[:28], 20, 9, layers_before=1, id=name)
    assert f"line 2: id '{name}' as the response, line 1 has, with other routes" in refusal(
        tmp_path, lines([piece, one]), **SHAPE
    )


def test_equal_responses_are_two_requests_by_their_ids_and_a_copy_without(tmp_path):
    one, two = (response(ROUTES[:30], 20, 11, layers_before=1) for _ in range(2))
    assert ingested(tmp_path, lines([one, two]), **SHAPE)[1].counts.requests == 2
    other = response(ROUTES[30:], 5, 26, layers_before=1)
    for each in (one, other):
        del each["meta_info"]["id"]
    message = refusal(tmp_path, lines([one, other] * 3), **SHAPE)
    assert "180 steps, which are the first 60 of them 3 times over" in message
    assert ingested(tmp_path, lines([one, other]), **SHAPE)[1].counts.requests == 2


@pytest.mark.parametrize(
    ("changed", "said", "expected"),
    [
        ({"num_layers": 2, "top_k": 4, "moe_layer_ids": [1]}, {}, "2 and top_k 4, the model has 4 layers"),
        ({"num_layers": 2, "top_k": 4, "moe_layer_ids": [1]}, {"top_k_model": 2}, "(the two are swapped)"),
        ({"shape": [7, 2, 4]}, {}, "has shape [7, 2, 4], wanted [rows, 4, 2]"),
    ],
)
def test_a_schema_with_other_axes_of_the_same_size_is_refused(tmp_path, changed, said, expected):
    one = partitioned(ROUTES[:12], 5, 8, dense=1)
    one["meta_info"]["expert_ids_schema"] |= changed
    assert expected in refusal(tmp_path, lines([one]), hidden_layers=4, **said)


def test_a_shape_beside_routed_experts_is_held_against_the_model(tmp_path):
    one = response(ROUTES[:30], 20, 11, layers_before=1, routed_experts_shape=[30, 2, 4])
    assert "routed_experts_shape is [30, 2, 4], wanted [30, 4, 2]" in refusal(tmp_path, lines([one]), **SHAPE)
    one["meta_info"]["routed_experts_shape"] = [30, 4, 2]
    assert ingested(tmp_path, lines([one]), **SHAPE)[1].counts.rows == 90


def test_speculative_responses_are_marked(tmp_path):
    content = lines([response(ROUTES[:30], 20, 11, layers_before=1, spec_verify_ct=4)])
    assert check(ingested(tmp_path, content, **SHAPE)[1], "routes of accepted tokens")[0] == "warn"


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"routed_experts": "AAA"}, "is no base64"),
        ({"routed_experts": "AAAA"}, "has 3 bytes, wanted 4 a number"),
        ({"routed_experts": [1, 2]}, "skip_tokenizer_init"),
        ({"prompt_tokens": None}, "meta_info.prompt_tokens is None"),
        ({"completion_tokens": -1}, "meta_info.completion_tokens is -1"),
    ],
)
def test_broken_fields_are_named(tmp_path, meta, expected):
    content = lines([response(ROUTES[:30], 20, 11, layers_before=1, **meta)])
    assert expected in refusal(tmp_path, content, **SHAPE)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"num_layers": 5}, "input_expert_ids holds 152 ids, wanted 19 rows × 5 layers × 2"),
        ({"top_k": 0}, "wanted positive whole numbers"),
        ({"moe_layer_ids": [3, 1]}, "wanted ascending ones"),
        ({"moe_layer_ids": [1, 2]}, "layer 3 is declared dense"),
        ({"id_space": "physical"}, "only 'logical_global' is read"),
        ({"output_start_position": 20}, "input rows end at position 19, output rows start at 20"),
        ({"output_num_rows": None}, "output_num_rows None"),
    ],
)
def test_schemas_that_contradict_their_rows_are_named(tmp_path, schema, expected):
    one = partitioned(ROUTES[:30], 20, 11, dense=1)
    one["meta_info"]["expert_ids_schema"] |= schema
    assert expected in refusal(tmp_path, lines([one]))


def test_the_command_line_refuses_responses_in_one_line(tmp_path, capfd):
    (tmp_path / "a.json").write_bytes(lines([response(ROUTES[:30], 20, 11)]))
    assert main(["ingest", str(tmp_path / "a.json"), "--data", str(tmp_path / "data")]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "hidden_layers" in error


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_damaged_responses_end_in_a_sentence_or_a_trace(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(lines([response(ROUTES[:30], 20, 11, layers_before=1), partitioned(ROUTES[:9], 4, 6, dense=1)]))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(1, len(content) - 1))]
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x").write_bytes(content)
    asked = Asked(UserMetadata(**SHAPE), folder)
    try:
        with DumpFile(folder / "x") as dump:
            walked(sniff.parse(dump, asked), folder / "x", **SHAPE)
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "x", "meta_info": {"prompt_tokens": 3}}\n',
        b'{"routed_experts": [[[1, 2]]], "prompt_tokens": 1}\n',
        b'{"note": "a \\"meta_info\\" with \\"routed_experts\\" is what SGLang returns"}\n',
        b'{"meta_info": "routed_experts"}\n',
        b'[{"meta_info": {}}]\n',
    ],
)
def test_look_alikes_are_not_claimed(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with DumpFile(tmp_path / "x") as dump:
        sample = sniff.look(dump)
    assert not any(layout.claims(sample) for layout in sglang_responses.LAYOUTS)


@pytest.mark.parametrize("tree", [None, [], {}, {"records": []}, {"last_physical_to_logical_map": 1}, [{"records": 1}]])
def test_other_torch_files_are_not_claimed(tree):
    assert not any(layout.claims(tree) for layout in sglang.TREE_LAYOUTS)


def test_modes_are_the_engines():
    assert (sglang.EXTEND, sglang.DECODE, sglang.IDLE) == (EXTEND, DECODE, IDLE)


@pytest.mark.parametrize("cached", ["6", 3.7, -6, True, 600])
def test_cached_tokens_that_are_no_count_of_prompt_tokens_are_refused(tmp_path, cached):
    routes = random_routes(12, 3, 16, 2)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([partitioned(routes, 5, 8, cached_tokens=cached)]))
    with pytest.raises(MalformedDump, match=r"cached_tokens is .*, wanted a whole number of at most 5 prompt tokens"):
        ingest(path, DataFolder(tmp_path / "data"), UserMetadata())
