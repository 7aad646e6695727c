"""Megatron's router trace: routes put into synthetic files of one rank or several come out, and traps are refused."""

import io
import zipfile
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dumps import megatron
from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from pipeline.dumps.sniff import look
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.command_lines import expert_tier
from tests.raw_dumps import random_routes, tok_layers_dump
from tests.raw_megatron import jsonl, line, rank_trace

LAYERS = [0, 2, 3]
TOKENS = [9, 1, 1, 12, 2, 1]


def steps_of(seed: int = 0, tokens: list[int] = TOKENS, layers: int = 3) -> list:
    return [random_routes(count, layers, 16, 4, seed=seed * 100 + at) for at, count in enumerate(tokens)]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def ingested(path: Path, **said: object) -> Ingested:
    return ingest(path, DataFolder(path.parent / "data"), UserMetadata(**said))


def one_file(folder: Path, lines: list[dict], **said: object) -> Ingested:
    return ingested(write(folder, {"a.jsonl": jsonl(lines)}) / "a.jsonl", **said)


def refusal(path: Path) -> str:
    data = DataFolder(path.parent / "data")
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingest(path, data, UserMetadata())
    assert data.trace_ids() == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows_of(one: Ingested) -> list[tuple]:
    """(step, request, layer, ids) of every row."""
    frame = pl.read_parquet(one.path)
    assert frame["token_position"].null_count() == frame["router_weights"].null_count() == len(frame)
    assert frame["phase"].cast(pl.String).unique().to_list() == ["unknown"]
    found = frame.select("step_id", "request_id", "layer_id", "expert_ids").rows()
    return [(step, request, layer, list(ids)) for step, request, layer, ids in found]


def expected(shards: list[list], layers: list[int] = LAYERS) -> list[tuple]:
    return [
        (step, request, layer, token[place])
        for step in range(len(shards[0]))
        for place, layer in enumerate(layers)
        for request, steps in enumerate(shards)
        for token in steps[step]
    ]


def check(one: Ingested, name: str) -> tuple[str, str]:
    return next((record.outcome, record.found) for record in one.metadata.checks if record.name == name)


def test_synthetic_trace_of_one_rank_gives_back_everything(tmp_path):
    steps = steps_of()
    one = one_file(tmp_path, rank_trace(steps, LAYERS, first=7))
    assert rows_of(one) == expected([steps])
    assert (one.metadata.engine, one.metadata.pass_boundaries) == ("Megatron-core", "recorded")
    assert (one.metadata.layer_base, one.metadata.top_k_model) == ("recorded", 4)
    assert check(one, "layer base") == ("ok", "layers start at 0, kept as recorded")


def test_layers_that_start_at_1_are_kept_and_warned_of(tmp_path):
    one = one_file(tmp_path, rank_trace(steps_of(), [1, 2, 3]))
    assert one.metadata.moe_layer_ids == [1, 2, 3]
    outcome, found = check(one, "layer base")
    assert outcome == "warn"
    assert "layer_number, which counts from 1, or a dense layer 0" in found


def test_mtp_rows_are_left_out_and_counted(tmp_path):
    steps = steps_of()
    one = one_file(tmp_path, rank_trace(steps, LAYERS, mtp=True))
    assert rows_of(one) == expected([steps])
    assert list(one.metadata.counts.dropped_rows.values()) == [sum(TOKENS)]
    assert "MTP block" in check(one, "rows dropped")[1]


def test_micro_batches_of_a_step_are_steps_of_their_own_and_said(tmp_path):
    steps = steps_of()
    lines = [one | {"step": one["step"] // 2} for one in rank_trace(steps, LAYERS)]
    one = one_file(tmp_path, lines)
    assert rows_of(one) == expected([steps])
    assert check(one, "one forward pass per step")[0] == "warn"


def test_a_recomputed_pass_is_refused(tmp_path):
    steps = steps_of()
    path = write(tmp_path, {"a.jsonl": jsonl([*rank_trace(steps[:1], LAYERS), *rank_trace(steps[:1], LAYERS)])})
    assert "layer 0 of step 0 stands again with the same routes" in refusal(path / "a.jsonl")


def test_a_rank_without_tokens_in_a_step_is_read(tmp_path):
    steps = steps_of()
    lines = [*rank_trace(steps[:2], LAYERS), *(line(2, layer, [], top_k=4) for layer in LAYERS)]
    one = one_file(tmp_path, [*lines, *rank_trace(steps[2:], LAYERS, first=3)])
    assert rows_of(one) == expected([steps])


def test_equal_ranks_are_replicas_and_kept_once(tmp_path):
    steps = steps_of()
    files = {f"router_trace_rank{rank}.jsonl": jsonl(rank_trace(steps, LAYERS, rank=rank)) for rank in range(3)}
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("router_state/data.pkl", b"")
    state = buffer.getvalue()
    files |= {"hidden_states_rank0.bin": b"\0", "logits_rank0.bin": b"\0", "router_state_rank0.pt": state}
    one = ingested(write(tmp_path / "trace", files))
    assert rows_of(one) == expected([steps])
    assert "3 ranks: 2 replicas left out, 1 kept" in check(one, "ranks are replicas or shards")[1]


def test_different_ranks_are_shards_and_joined_step_by_step(tmp_path):
    shards = [steps_of(1), steps_of(2, tokens=[3, 1, 5, 1, 1, 2])]
    files = {
        f"{name}.jsonl": jsonl(rank_trace(shards[rank // 2], LAYERS, rank=rank)) for rank, name in enumerate("abcd")
    }
    one = ingested(write(tmp_path / "trace", files))
    assert rows_of(one) == expected(shards)
    assert "4 ranks: 2 replicas left out, 2 different ones joined" in check(one, "ranks are replicas or shards")[1]


def test_shards_in_small_blocks_give_the_same_trace(tmp_path, monkeypatch):
    shards = [steps_of(1), steps_of(2)]
    files = {f"{rank}.jsonl": jsonl(rank_trace(shards[rank], LAYERS, rank=rank)) for rank in range(2)}
    monkeypatch.setattr("pipeline.dumps.ranks.ROWS_PER_BLOCK", 5)
    assert rows_of(ingested(write(tmp_path / "trace", files))) == expected(shards)


def test_stages_of_a_pipeline_are_put_together(tmp_path):
    steps = steps_of(layers=6)
    halves = [[[token[first : first + 3] for token in routes] for routes in steps] for first in (0, 3)]
    files = {
        f"{rank}.jsonl": jsonl(rank_trace(half, [3 * rank + 1, 3 * rank + 2, 3 * rank + 3], rank=rank))
        for rank, half in enumerate(halves)
    }
    one = ingested(write(tmp_path / "trace", files))
    assert rows_of(one) == expected([steps], [1, 2, 3, 4, 5, 6])


def test_stages_of_several_shards_cannot_be_paired(tmp_path):
    files = {}
    for rank in range(4):
        layers = [0, 1, 2] if rank < 2 else [3, 4, 5]
        files[f"{rank}.jsonl"] = jsonl(rank_trace(steps_of(rank), layers, rank=rank))
    assert "which of them hold the same tokens is not in the dump" in refusal(write(tmp_path / "trace", files))


@pytest.mark.parametrize("change", ["cut", "row"])
def test_a_replica_that_is_cut_or_differs_is_refused(tmp_path, change):
    lines = rank_trace(steps_of(), LAYERS)
    other = [one | {"rank": 1} for one in lines]
    if change == "cut":
        other = other[:-6]
    else:
        other[4] = other[4] | {"top_indices": [[15, 14, 13, 12]]}
    files = {"0.jsonl": jsonl(lines), "1.jsonl": jsonl(other)}
    message = refusal(write(tmp_path / "trace", files))
    assert "share records with equal routes, but not all" in message
    assert "rank 1" in message


def test_one_decode_token_that_routes_alike_does_not_make_a_replica(tmp_path):
    shards = [steps_of(1), steps_of(2)]
    shards[1][1] = shards[0][1]
    files = {f"{rank}.jsonl": jsonl(rank_trace(shards[rank], LAYERS, rank=rank)) for rank in range(2)}
    assert rows_of(ingested(write(tmp_path / "trace", files))) == expected(shards)


def test_missing_doubled_and_foreign_members_are_named(tmp_path):
    traces = {rank: jsonl(rank_trace(steps_of(rank), LAYERS, rank=rank)) for rank in range(4)}
    gap = write(tmp_path / "gap", {f"{rank}.jsonl": traces[rank] for rank in (0, 1, 3)})
    assert "the file of rank 2 is missing, there are those of 0, 1, 3" in refusal(gap)
    twice = write(tmp_path / "twice", {"a.jsonl": traces[0], "b.jsonl": traces[0]})
    assert "a.jsonl are both of rank 0" in refusal(twice)
    foreign = write(tmp_path / "foreign", {"a.jsonl": traces[0], "b.txt": b"hello\n"})
    assert "b.txt is no router trace" in refusal(foreign)


STEP = line(2, 0, [[1, 2, 3, 4]], top_k=4)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (STEP | {"num_tokens": 2}, "1 tokens, num_tokens says 2"),
        (STEP | {"top_indices": [[1, 2, 3]]}, "not 4 ids for every token"),
        (STEP | {"top_indices": [[1, 2, 3, 4.5]]}, "of whole numbers"),
        (STEP | {"top_indices": [None]}, "of whole numbers"),
        (STEP | {"top_indices": [[True, 2, 3, 4]]}, "of whole numbers"),
        (STEP | {"topk": 8}, "topk is 8"),
        (STEP | {"stage": "post_dispatch"}, "wanted pre_dispatch"),
        (STEP | {"block": "encoder"}, "wanted decoder or mtp"),
        (STEP | {"layer": -1}, "layer is '-1'"),
        (STEP | {"rank": 1}, "rank 1, the lines before are of rank 0"),
        (STEP | {"step": 0}, "step 0 after step 1"),
    ],
)
def test_a_wrong_line_is_located(tmp_path, wrong, fault):
    path = write(tmp_path, {"a.jsonl": jsonl([*rank_trace(steps_of()[:2], LAYERS), wrong])}) / "a.jsonl"
    message = refusal(path)
    assert "line 7" in message
    assert fault in message


def test_truncation_in_a_line_and_in_a_step_is_named(tmp_path):
    content = jsonl(rank_trace(steps_of(), LAYERS))
    path = write(tmp_path, {"a.jsonl": content[:-20]}) / "a.jsonl"
    assert "line 18: no JSON object" in refusal(path)
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    assert "it is the last step: the dump is truncated" in refusal(path)


def test_dense_expert_repeats_are_refused(tmp_path):
    path = write(tmp_path, {"a.jsonl": jsonl([line(0, 1, [[0, 0, 0, 0]], top_k=4)])}) / "a.jsonl"
    assert "unwritten buffer, not expert 0" in refusal(path)


@given(
    tokens=st.lists(st.integers(1, 5), min_size=1, max_size=4), layers=st.integers(1, 3), top_k=st.integers(1, 4),
    ranks=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_synthetic_ranks_of_any_shape_come_back(tmp_path_factory, tokens, layers, top_k, ranks, seed):
    numbers = list(range(layers))
    shards = [
        [random_routes(count, layers, 200, top_k, seed + 1000 * rank + at) for at, count in enumerate(tokens)]
        for rank in range(ranks)
    ]
    files = {f"r{rank}": jsonl(rank_trace(shards[rank], numbers, rank=rank, top_k=top_k)) for rank in range(ranks)}
    folder = write(tmp_path_factory.mktemp("ranks") / "trace", files)
    assert rows_of(ingested(folder, tied_routing=True)) == expected(shards, numbers)


@pytest.mark.parametrize(
    "content",
    [
        tok_layers_dump(random_routes(3, 2, 16, 4)),
        jsonl([{"step": 0, "layer": 1, "top_indices": [1, 2], "count": 3}]),
        jsonl([{"step": 0, "layer": 1, "rank": 0, "num_tokens": 3, "counts": [1, 2]}]),
    ],
)
def test_look_alikes_are_not_claimed(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with DumpFile(tmp_path / "x") as dump:
        assert not megatron.LAYOUTS[0].claims(look(dump))


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_damage_ends_in_a_refusal_or_a_valid_trace(tmp_path_factory, data):
    content = bytearray(jsonl(rank_trace(steps_of(), LAYERS, mtp=True)))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damage")
    is_folder = data.draw(st.booleans())
    path = write(folder / "trace", {"a": bytes(content)}) if is_folder else write(folder, {"a": bytes(content)}) / "a"
    try:
        assert ingested(path).metadata.counts.rows
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


def test_the_command_line_refuses_in_one_line(tmp_path, capsys):
    folder = write(tmp_path / "trace", {"b": jsonl(rank_trace(steps_of(), LAYERS, rank=1))})
    status, _, errors = expert_tier(capsys, "ingest", folder, "--data", tmp_path / "data")
    assert status == 1
    assert len(errors.strip().splitlines()) == 1
    assert "the file of rank 0 is missing" in errors
