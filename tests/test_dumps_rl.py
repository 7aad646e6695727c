"""Routing replay of reinforcement learning, synthetic and as its frameworks document it: padding is cut by length."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.canonical import Canonical
from pipeline.cli import main
from pipeline.dumps import rl_replay, sglang
from pipeline.dumps.blocks import Asked, MalformedDump, RefusedDump
from pipeline.dumps.torch_file import Loaded
from pipeline.ingest import ingest
from schemas.columns import PHASES
from schemas.files import DataFolder
from schemas.trace import TraceMetadata, UserMetadata
from tests.raw_dumps import random_routes
from tests.raw_rl import batch, padding, replay, rollout, sample, with_dense

ROUTES = random_routes(60, 3, 16, 2, seed=4)


def array(values: list, dtype: str) -> np.ndarray:
    return np.array(values, dtype=dtype)


def as_tensor(values: list, dtype: str) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype))


def read(tree: object, **said: object) -> tuple[list[tuple], TraceMetadata]:
    """(rows, metadata) of a torch file with that content, as it comes out of the loader."""
    user = UserMetadata(**said)
    one = Loaded(Path("rollout.pt"), tree)
    layout = next(layout for layout in rl_replay.TREE_LAYOUTS if layout.claims(tree))
    parsed = layout.parse(one, Asked(user, Path()))
    canonical = Canonical(one.path, parsed, user)
    rows = []
    for numbered in canonical.blocks():
        canonical.number(numbered)
        block = numbered.block
        places = [None] * block.rows if block.position is None else block.position.tolist()
        rows += [
            (step, request, position, PHASES[phase], layer, ids)
            for step, request, position, phase, layer, ids in zip(
                block.step.tolist(), block.request.tolist(), places, numbered.phase.tolist(), block.layer.tolist(),
                block.expert_ids.tolist(), strict=True,
            )
        ]  # fmt: skip
    return rows, canonical.metadata((one.path, "0" * 64), "a", None, 1)


def refused(tree: object, **said: object) -> str:
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        read(tree, **said)
    message = str(caught.value)
    assert message.startswith("rollout.pt")
    assert "\n" not in message
    return message


def check(metadata: TraceMetadata, name: str) -> tuple[str, str]:
    return next((one.outcome, one.found) for one in metadata.checks if one.name == name)


def test_a_rollout_and_its_copy_are_refused_in_one_folder():
    own = [sample(ROUTES[:20], 8, 13, array), sample(ROUTES[20:45], 10, 16, array)]
    other = [sample(ROUTES[40:60], 8, 13, array), sample(ROUTES[20:45], 10, 16, array)]
    user = UserMetadata()
    layout = next(layout for layout in rl_replay.TREE_LAYOUTS if layout.name == "rl_samples")
    folder = type("Folder", (), {"path": Path("rollouts")})()

    def parse(*trees: dict) -> object:
        files = [Loaded(Path("rollouts") / f"{n}.pt", tree) for n, tree in enumerate(trees)]
        return layout.parse_folder(files, folder, Asked(user, Path()))

    parse(rollout(own, 1), rollout(other, 2))
    with pytest.raises(MalformedDump, match=r"2\.pt: every sequence has the routes of 0\.pt"):
        parse(rollout(own, 1), rollout(other, 2), rollout(own, 3))


def truth(sequences: list[tuple[int, int, int | None]], *, first_layer: int = 0, start: int = 0) -> list[tuple]:
    """Rows of sequences that each run ROUTES[begin:end] and have so many prompt tokens (null: phase unknown)."""
    rows, step = [], 0
    for request, (begin, end, prompt) in enumerate(sequences):
        for position, token in enumerate(ROUTES[begin:end], start):
            phase = "unknown" if prompt is None else "prefill" if position < prompt else "decode"
            rows += [(step, request, position, phase, first_layer + layer, ids) for layer, ids in enumerate(token)]
            step += 1
    return rows


# slime and miles samples


def test_synthetic_slime_samples_give_back_their_routes_through_a_torch_file(tmp_path):
    # numpy arrays inside the pickle, as slime keeps them.
    tree = rollout([sample(ROUTES[:30], 20, 11, array), sample(ROUTES[30:], 5, 26, as_tensor)])
    torch.save(tree, tmp_path / "4.pt")
    one = ingest(tmp_path / "4.pt", DataFolder(tmp_path / "data"), UserMetadata())
    rows = pl.read_parquet(one.path).with_columns(pl.col("phase").cast(pl.String))
    columns = ("step_id", "request_id", "token_position", "phase", "layer_id", "expert_ids")
    assert rows.select(columns).rows() == truth([(0, 30, 20), (30, 60, 5)])
    assert one.metadata.source.format == "rl_samples"
    assert one.metadata.layer_base == "assumed_from_0"


def test_the_command_line_refuses_a_padded_batch_without_lengths_in_one_line(tmp_path, capfd):
    torch.save({"routed_experts": torch.zeros(1, 40, 3, 2, dtype=torch.int32)}, tmp_path / "a.pt")
    assert main(["ingest", str(tmp_path / "a.pt"), "--data", str(tmp_path / "data")]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "save the field attention_mask" in error


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.integers(1, 12),
    response=st.integers(1, 12),
    layers=st.integers(1, 4),
    beyond=st.integers(0, 5),
    seed=st.integers(0, 10**6),
)
def test_padding_beyond_the_tokens_is_dropped_by_length(prompt, response, layers, beyond, seed):
    routes = random_routes(prompt + response, layers, 16, 2, seed=seed)
    padded = routes + padding(beyond, layers, 2, 16)
    try:
        rows, metadata = read(rollout([sample(padded, prompt, response, array)]))
    except MalformedDump as error:
        assert "same experts in every row" in str(error)
        return
    assert [row[5] for row in rows] == [ids for token in routes for ids in token]
    assert sum(metadata.counts.dropped_rows.values()) == beyond * layers


def test_rows_of_minus_one_are_holes():
    routes = ROUTES[:20] + [[[-1, -1]] * 3] * 4 + ROUTES[24:30]
    rows, metadata = read(rollout([sample(routes, 20, 11, array)]))
    assert rows == [
        (step, *row[1:])
        for row in truth([(0, 30, 20)])
        if not 20 <= row[2] < 24
        for step in [row[0] - 4 * (row[2] > 23)]
    ]
    assert "4: rows of −1: no route was recorded" in check(metadata, "positions captured")[1]
    routes[5] = [[-1, -1], *ROUTES[5][1:]]
    assert "token 5: some of its ids are negative" in refused(rollout([sample(routes, 20, 11, array)]))


def test_dense_layers_need_a_map():
    tree = rollout([sample(with_dense(ROUTES[:30], 1), 20, 11, array)])
    assert "layers [0] hold 0 alone" in refused(tree)
    rows, metadata = read(tree, moe_layer_ids=[1, 2, 3])
    assert rows == truth([(0, 30, 20)], first_layer=1)
    assert metadata.layer_base == "recorded"
    assert "neither all MoE layers nor all hidden layers" in refused(tree, moe_layer_ids=[1, 2, 4])
    assert "layer 1 is declared dense" in refused(tree, moe_layer_ids=[2, 3])


def test_a_list_of_moe_layers_is_numbered_by_the_user_only():
    tree = rollout([sample(ROUTES[:30], 20, 11, array)])
    assert "which are they? say --meta moe_layer_ids" in refused(tree, hidden_layers=4)
    _, metadata = read(tree, moe_layer_ids=[1, 2, 3], hidden_layers=4)
    assert (metadata.moe_layer_ids, metadata.layer_base) == ([1, 2, 3], "declared")


def test_samples_without_routes_are_counted():
    tree = rollout([sample(None, 4, 4, array), sample(ROUTES[:30], 20, 11, array)])
    assert "8: samples without routes" in check(read(tree)[1], "positions captured")[1]
    assert "no sequence has routes" in refused(rollout([sample(None, 4, 4, array)]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokens": None}, "save the field tokens"),
        ({"tokens": list(range(60))}, "30 rows from position 0 on for 60 tokens; wanted at least 59"),
        ({"routed_experts_start_len": 99}, "routed_experts_start_len is 99"),
        ({"rollout_routed_experts": np.zeros((3, 4))}, "wanted integers [tokens, layers, k]"),
        ({"rollout_routed_experts": np.zeros((30, 3, 2), dtype=np.int32)}, "not expert 0"),
    ],
)
def test_samples_that_contradict_themselves_are_named(change, expected):
    assert expected in refused(rollout([sample(ROUTES[:30], 20, 11, array) | change]))


def test_a_declared_start_shifts_the_positions():
    rows, metadata = read(rollout([sample(ROUTES[:30], 20, 16, array, routed_experts_start_len=5)]))
    assert rows == truth([(0, 30, 20)], start=5)
    assert "5: before routed_experts_start_len" in check(metadata, "positions captured")[1]


def test_without_a_response_length_the_phase_is_unknown():
    rows, _ = read(rollout([sample(ROUTES[:30], 20, 11, array, response_length=None)]))
    assert rows == truth([(0, 30, None)])


def test_models_do_not_mix():
    tree = rollout([sample(ROUTES[:30], 20, 11, array), sample([token[:2] for token in ROUTES[:30]], 20, 11, array)])
    assert "are two models in one dump?" in refused(tree)


# verl and NeMo-RL batches


def test_a_synthetic_verl_batch_is_cut_on_both_sides():
    tree = batch([(ROUTES[:30], 20, 11), (ROUTES[30:], 5, 26)], (24, 32), array)
    rows, metadata = read(tree)
    assert rows == truth([(0, 30, 20), (30, 60, 5)])
    assert metadata.counts.dropped_rows == {"padding outside of the declared length": 3 * (56 - 31 + 56 - 31)}
    assert "2: the last token, which was sampled and never run" in check(metadata, "positions captured")[1]


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.integers(1, 20),
    response=st.integers(1, 20),
    left=st.integers(0, 9),
    right=st.integers(0, 9),
    dtype=st.sampled_from(["uint8", "int16", "int32", "int64"]),
)
def test_any_padding_is_cut_by_the_mask(prompt, response, left, right, dtype):
    end = prompt + response - 1
    if not end:
        return
    tree = batch([(ROUTES[:end], prompt, response)], (prompt + left, response + right), array, dtype)
    try:
        rows, _ = read(tree, num_experts=16)
    except MalformedDump as error:
        assert "partition the 16 experts" in str(error)
        return
    assert rows == truth([(0, end, prompt)])


def test_padding_is_never_told_by_its_value():
    # Two real tokens look like padding, and padding looks like routes.
    tree = batch([(padding(2, 3, 2, 16) + ROUTES[2:30], 20, 11)], (24, 32), array)
    tree["routed_experts"][0, :4] = np.array(padding(4, 3, 2, 16))
    rows, _ = read(tree)
    assert len(rows) == 90
    assert rows[0][5] == [0, 1]


def test_a_batch_padded_on_the_right_needs_its_lengths():
    ids = np.full((1, 40, 3, 2), -1, dtype=np.int32)
    ids[0, :30] = ROUTES[:30]
    tree = {"routed_experts": ids, "input_lengths": [31], "prompt_lengths": [20]}
    rows, metadata = read(tree)
    assert rows == truth([(0, 30, 20)])
    assert "1: rows of −1" in check(metadata, "positions captured")[1]
    assert "padded routes without their length" in refused({"routed_experts": ids})
    assert "input_lengths runs 99..99, wanted 0..40" in refused(tree | {"input_lengths": [99]})


def test_eight_bits_cannot_hold_more_than_256_experts():
    tree = batch([(ROUTES[:30], 20, 11)], (20, 11), array, "uint8")
    assert "they wrapped" in refused(tree, num_experts=384)
    assert check(read(tree)[1], "ids fit their type")[0] == "warn"
    assert check(read(tree, num_experts=256)[1], "255 is an expert")[0] == "ok"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attention_mask": np.ones((1, 7))}, "wanted 0 and 1 shaped [1, 56]"),
        ({"attention_mask": np.full((1, 56), 2)}, "wanted 0 and 1"),
        ({"attention_mask": np.array([[1, 0] * 28])}, "holes between its tokens"),
        ({"attention_mask": np.zeros((1, 56))}, "no sequence has routes"),
        ({"response_mask": np.ones((2, 9))}, "response_mask is"),
        ({"routed_experts": np.zeros((4, 4))}, "wanted integers [sequences, tokens, layers, k]"),
    ],
)
def test_batches_that_contradict_themselves_are_named(change, expected):
    assert expected in refused(batch([(ROUTES[:30], 20, 11)], (24, 32), array) | change)


# Replay of training passes


def test_a_synthetic_routing_replay_is_read_by_passes():
    passes = [(ROUTES[:20] + padding(4, 3, 2, 16), 20), (ROUTES[20:60], 40)]
    rows, metadata = read(replay(passes, 3, array))
    assert [row[5] for row in rows] == [
        token[layer] for part in (ROUTES[:20], ROUTES[20:]) for layer in range(3) for token in part
    ]
    assert {row[:4] for row in rows} == {(0, 0, None, "unknown"), (1, 0, None, "unknown")}
    assert metadata.counts.dropped_rows == {"padding outside of the declared length": 12}
    assert metadata.pass_boundaries == "recorded"


def test_a_routing_replay_without_lengths_is_refused():
    tree = replay([(ROUTES[:20], 20), (ROUTES[20:], 40)], 3, array)
    del tree["seq_lens"]
    assert "save the field seq_lens" in refused(tree)
    assert "save the field seq_lens" in refused(tree["replays"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seq_lens": [20]}, "wanted 2 whole numbers"),
        ({"seq_lens": [20, 41]}, "seq_lens says 41 tokens, there are 40 rows"),
    ],
)
def test_replays_that_contradict_themselves_are_named(change, expected):
    tree = replay([(ROUTES[:20], 20), (ROUTES[20:], 40)], 3, array)
    assert expected in refused(tree | change)
    tree["replays"][1].pop()
    assert "layers have [1, 2] passes" in refused(tree)


WRONG = st.sampled_from([None, True, -1, 2**70, "x", [], [1], {}, [[1]], 1.5, np.zeros((2, 2)), np.zeros((1, 4, 2, 8))])
TREES = (
    lambda: rollout([sample(ROUTES[:30], 20, 11, array)]),
    lambda: batch([(ROUTES[:30], 20, 11)], (24, 32), array),
    lambda: replay([(ROUTES[:20], 20), (ROUTES[20:], 40)], 3, array),
    lambda: {"routed_experts": array([ROUTES[:30]], "int32"), "input_lengths": [30], "prompt_lengths": [3]},
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_wrong_field_ends_in_a_sentence_or_a_trace(data):
    tree = data.draw(st.sampled_from(TREES))()
    place = tree["samples"][0] if "samples" in tree and data.draw(st.booleans()) else tree
    name = data.draw(st.sampled_from(sorted(place)))
    if data.draw(st.booleans()):
        place[name] = data.draw(WRONG)
    elif isinstance(place[name], np.ndarray):
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, place[name].size - 1))
            place[name].flat[at] = data.draw(st.integers(-(2**31), 2**31 - 1))
    else:
        del place[name]
    if not any(layout.claims(tree) for layout in rl_replay.TREE_LAYOUTS):
        return
    try:
        read(tree)
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        {"samples": []},
        {"rollout_id": 1, "samples": [{"tokens": [1]}]},
        {"routed_experts": "text"},
        [[1, 2], [3, 4]],
        [[np.zeros((3, 2))]],
        {"replays": [[np.zeros((3, 2), dtype=int)]]},
        {"samples": [1], "scores": [2], "indices": [3], "token_position": [4]},
    ],
)
def test_look_alikes_are_not_claimed(tree):
    assert not any(layout.claims(tree) for layout in (*rl_replay.TREE_LAYOUTS, *sglang.TREE_LAYOUTS))
