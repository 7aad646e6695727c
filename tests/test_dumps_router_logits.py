"""Saved router logits: the top k of known rows come out, padding does not, and what cannot be told is refused.

Fixtures are synthetic, named as scripts name the tuples of `output_router_logits`; one is a real (random, tiny) model.
"""

import io
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dumps.blocks import Asked, MalformedDump, RefusedDump
from pipeline.dumps.router_logits import TIED_SHARE, claims_tree, parse_tree, top_k_of
from pipeline.dumps.torch_file import Loaded
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.command_lines import expert_tier
from tests.raw_dumps import npz_dump, random_routes
from tests.raw_hooks import Tensor, logit_rows, logits_of, mask_of, npz_bytes, safetensors_bytes, softmax_at

EXPERTS, TOP_K, LAYERS = 16, 3, 2
LENGTHS = [5, 8, 3]
SEQUENCES = [random_routes(length, LAYERS, EXPERTS, TOP_K, seed=length) for length in LENGTHS]
ROWS = len(LENGTHS) * 8
MASK: Tensor = ("I64", (3, 8), mask_of(LENGTHS, 8))


def ingested(folder, content: bytes, **said: object) -> Ingested:
    (folder / "dump").write_bytes(content)
    return ingest(folder / "dump", DataFolder(folder / "data"), UserMetadata(**said))


def refused(folder, content: bytes, **said: object) -> str:
    (folder / "dump").write_bytes(content)
    data = DataFolder(folder / "data")
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingest(folder / "dump", data, UserMetadata(**said))
    assert not list(data.traces.glob("*.parquet"))
    message = str(caught.value)
    assert message.startswith(str(folder / "dump"))
    assert "\n" not in message
    return message


def rows_of(one: Ingested) -> pl.DataFrame:
    return pl.read_parquet(one.path).with_columns(pl.col("phase", "pass_kind").cast(pl.String))


def outcome(one: Ingested, name: str) -> str:
    return next(check.outcome for check in one.metadata.checks if check.name == name)


def per_layer(dtype: str = "F32", left: bool = True) -> dict[str, Tensor]:
    return {
        f"router_logits.{layer}": (dtype, (ROWS, EXPERTS), logit_rows(SEQUENCES, layer, EXPERTS, 8, left))
        for layer in range(LAYERS)
    }


def assert_is_the_batch(one: Ingested) -> None:
    rows = rows_of(one)
    assert one.metadata.counts.steps == 1
    assert one.metadata.counts.events == LAYERS
    assert one.metadata.counts.dropped_rows == {"padding by attention_mask": (ROWS - sum(LENGTHS)) * LAYERS}
    assert rows["phase"].unique().to_list() == ["prefill"]
    for number, routes in enumerate(SEQUENCES):
        for layer in range(LAYERS):
            own = rows.filter((pl.col("request_id") == number) & (pl.col("layer_id") == layer))
            assert own["token_position"].to_list() == list(range(len(routes)))
            assert [list(ids) for ids in own["expert_ids"]] == [token[layer] for token in routes]
            for place, weights in enumerate(own["router_weights"].to_list()):
                row = logits_of(routes[place][layer], EXPERTS, seed=number * 1000 + place * 10 + layer)
                assert list(weights) == pytest.approx(softmax_at(row, routes[place][layer]), abs=1e-3)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
def test_safetensors_gives_the_top_k_without_padding(tmp_path, dtype, left):
    mask = ("BOOL", (3, 8), [bool(value) for value in mask_of(LENGTHS, 8, left)])
    content = safetensors_bytes(per_layer(dtype, left) | {"attention_mask": mask}, {"top_k": "3", "model": "m"})
    one = ingested(tmp_path, content)
    assert_is_the_batch(one)
    metadata = one.metadata
    assert (metadata.source.format, metadata.model, metadata.top_k_model) == ("router_logits", "m", TOP_K)
    assert (metadata.weight_kind, metadata.rank_known, metadata.layer_base) == ("softmax", True, "assumed_from_0")
    assert (metadata.experts_per_layer, metadata.pass_boundaries) == ([EXPERTS] * LAYERS, "recorded")
    assert outcome(one, "padding ruled out") == outcome(one, "top k is unique") == "ok"


@pytest.mark.parametrize("shape", [(LAYERS, ROWS, EXPERTS), (LAYERS, 3, 8, EXPERTS)])
def test_npz_of_one_stacked_array_is_read_in_small_chunks_and_through_a_file(tmp_path, monkeypatch, shape):
    monkeypatch.setattr("pipeline.dumps.router_logits.CHUNK_VALUES", 5 * EXPERTS)
    monkeypatch.setattr("pipeline.dumps.arrays.IN_MEMORY_BYTES", 64)
    stacked = [value for layer in range(LAYERS) for value in logit_rows(SEQUENCES, layer, EXPERTS, 8)]
    content = npz_bytes({"router_logits": ("F32", shape, stacked), "attention_mask": MASK}, {"num_experts_per_tok": 3})
    assert_is_the_batch(ingested(tmp_path, content))


def generation(names: str, steps: int = 4) -> tuple[dict[str, Tensor], list]:
    """Two sequences of 5 and 3 prompt tokens, and `steps` − 1 tokens generated after each."""
    prompts = [random_routes(length, LAYERS, EXPERTS, TOP_K, seed=20 + length) for length in (5, 3)]
    after = [random_routes(steps - 1, LAYERS, EXPERTS, TOP_K, seed=30 + number) for number in range(2)]
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        name = names.format(step=0, layer=layer)
        tensors[name] = ("F32", (10, EXPERTS), logit_rows(prompts, layer, EXPERTS, 5))
        for step in range(1, steps):
            one = [[routes[step - 1]] for routes in after]
            tensors[names.format(step=step, layer=layer)] = ("F32", (2, EXPERTS), logit_rows(one, layer, EXPERTS, 1))
    whole = [prompt + rest for prompt, rest in zip(prompts, after, strict=True)]
    return tensors, whole


@pytest.mark.parametrize(
    "names", ["router_logits.{step}.{layer}", "step_{step}.layer_{layer}", "router_logits/step{step}/layer{layer}"]
)
def test_a_generation_is_one_pass_per_step(tmp_path, names):
    tensors, whole = generation(names)
    tensors["attention_mask"] = ("I64", (2, 8), [1] * 8 + [0, 0, *[1] * 6])
    one = ingested(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)
    rows = rows_of(one)
    assert one.metadata.counts.steps == 4
    assert one.metadata.counts.rows_by_phase == {"prefill": 16, "decode": 12, "warmup": 0, "unknown": 0}
    for number, routes in enumerate(whole):
        for layer in range(LAYERS):
            own = rows.filter((pl.col("request_id") == number) & (pl.col("layer_id") == layer))
            assert own["token_position"].to_list() == list(range(len(routes)))
            assert [list(ids) for ids in own["expert_ids"]] == [token[layer] for token in routes]


def test_a_sequence_that_ended_early_is_left_out_of_later_steps(tmp_path):
    tensors, _ = generation("step_{step}.layer_{layer}")
    tensors["attention_mask"] = ("I64", (2, 8), [*[1] * 6, 0, 0, 0, 0, *[1] * 6])
    one = ingested(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)
    assert rows_of(one).filter(pl.col("step_id") >= 2)["request_id"].unique().to_list() == [1]
    assert one.metadata.counts.dropped_rows == {"padding by attention_mask": (2 + 2) * LAYERS}


def test_one_sequence_needs_no_mask_but_says_so(tmp_path):
    routes = random_routes(20, LAYERS, EXPERTS, TOP_K)
    tensors = {f"layer_{n}": ("F32", (20, EXPERTS), logit_rows([routes], n, EXPERTS, 20)) for n in range(LAYERS)}
    one = ingested(tmp_path, npz_bytes(tensors | {"input_ids": ("I64", (1, 20), [5] * 20)}), top_k_model=TOP_K)
    assert one.metadata.counts.rows == 20 * LAYERS
    assert outcome(one, "padding ruled out") == "warn"


def test_layers_with_gaps_keep_their_numbers(tmp_path):
    routes = random_routes(20, 3, EXPERTS, TOP_K)
    numbers = [1, 3, 5]
    tensors = {
        f"router_logits_{number}": ("F32", (20, EXPERTS), logit_rows([routes], place, EXPERTS, 20))
        for place, number in enumerate(numbers)
    }
    one = ingested(tmp_path, npz_bytes(tensors | {"input_ids": ("I64", (20,), [5] * 20)}), top_k_model=TOP_K)
    assert (one.metadata.moe_layer_ids, one.metadata.layer_base) == (numbers, "recorded")


def test_stored_probabilities_are_weights_as_they_are(tmp_path):
    routes = random_routes(20, LAYERS, EXPERTS, TOP_K)
    tensors: dict[str, Tensor] = {"input_ids": ("I64", (1, 20), [5] * 20)}
    rows = {}
    for layer in range(LAYERS):
        rows[layer] = [
            softmax_at(logits_of(token[layer], EXPERTS, seed=place), list(range(EXPERTS)))
            for place, token in enumerate(routes)
        ]
        tensors[f"router_logits.{layer}"] = ("F32", (20, EXPERTS), [value for row in rows[layer] for value in row])
    one = ingested(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)
    assert outcome(one, "logits before the softmax") == "warn"
    first = rows_of(one).filter(pl.col("layer_id") == 1)["router_weights"].to_list()[7]
    assert list(first) == pytest.approx([rows[1][7][expert] for expert in routes[7][1]], abs=1e-3)


def test_ties_go_to_the_lower_id_and_are_counted(tmp_path):
    tensors: dict[str, Tensor] = {"input_ids": ("I64", (1, 20), [5] * 20)}
    rows = [[float((expert * 7 + place) % 23) for expert in range(EXPERTS)] for place in range(20)]
    for place in (3, 11):
        # As bfloat16 stores two close logits: the fourth place could be either's.
        order = sorted(range(EXPERTS), key=rows[place].__getitem__, reverse=True)
        rows[place][order[4]] = rows[place][order[3]]
    tensors["router_logits.0"] = ("F32", (20, EXPERTS), [value for row in rows for value in row])
    one = ingested(tmp_path, npz_bytes(tensors), top_k_model=4)
    wanted = [sorted(range(EXPERTS), key=lambda expert, row=row: (-row[expert], expert))[:4] for row in rows]
    assert [list(ids) for ids in rows_of(one)["expert_ids"]] == wanted
    assert outcome(one, "top k is unique") == "warn"
    found = next(check.found for check in one.metadata.checks if check.name == "top k is unique")
    assert found.startswith("2 of 20 rows tie there, which leaves 2 of 80 selections open")


def test_logits_whose_ties_leave_many_experts_open_are_refused(tmp_path):
    tensors: dict[str, Tensor] = {"input_ids": ("I64", (1, 20), [5] * 20)}
    rows = [[float((expert * 7 + place) % 5) for expert in range(EXPERTS)] for place in range(20)]
    tensors["router_logits.0"] = ("F32", (20, EXPERTS), [value for row in rows for value in row])
    message = refused(tmp_path, npz_bytes(tensors), top_k_model=4)
    assert "step 0, layer 0, row 0: equal logits at the place of the 4-th expert" in message
    assert "wanted at most 5%" in message


def test_honest_logits_in_bfloat16_tie_less_than_is_refused():
    logits = np.random.default_rng(0).normal(size=(4000, 256)).astype(np.float32)
    stored = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    _, tied, undetermined = top_k_of(stored, 8)
    assert 200 < len(tied) <= undetermined
    assert undetermined < TIED_SHARE * 4000 * 8 / 4


@given(st.integers(1, 6), st.integers(1, 6), st.data())
@settings(max_examples=50, deadline=None)
def test_top_k_is_that_of_a_sorted_row(rows, experts, data):
    top_k = data.draw(st.integers(1, experts))
    values = data.draw(st.lists(st.integers(-3, 3), min_size=rows * experts, max_size=rows * experts))
    logits = np.array(values, dtype=np.float32).reshape(rows, experts)
    ids, tied, undetermined = top_k_of(logits, top_k)
    assert ids.tolist() == [
        sorted(range(experts), key=lambda expert, row=row: (-row[expert], expert))[:top_k] for row in logits.tolist()
    ]
    least = [sorted(row)[-top_k] for row in logits.tolist()]
    pairs = list(zip(logits.tolist(), least, strict=True))
    tying = [row for row, (values, low) in enumerate(pairs) if sum(value >= low for value in values) > top_k]
    assert tied.tolist() == tying
    assert undetermined == sum(top_k - sum(value > pairs[row][1] for value in pairs[row][0]) for row in tying)


# Torch files


def torch_bytes(tree: object) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def test_a_torch_file_keeps_the_tuples_of_a_generation(tmp_path):
    import torch

    tensors, whole = generation("step_{step}.layer_{layer}")
    as_torch = {
        name: torch.tensor(values, dtype=torch.float32).reshape(shape).to(torch.bfloat16)
        for name, (_, shape, values) in tensors.items()
    }
    tuples = tuple(tuple(as_torch[f"step_{step}.layer_{layer}"] for layer in range(LAYERS)) for step in range(4))
    mask = torch.tensor([1] * 8 + [0, 0, *[1] * 6]).reshape(2, 8)
    content = torch_bytes({"router_logits": tuples, "attention_mask": mask, "top_k": TOP_K, "model": "m"})
    one = ingested(tmp_path, content)
    own = rows_of(one).filter((pl.col("request_id") == 1) & (pl.col("layer_id") == 0))
    assert [list(ids) for ids in own["expert_ids"]] == [token[0] for token in whole[1]]
    assert one.metadata.source.format == "router_logits"


def test_a_torch_tree_may_stack_its_layers_or_name_them(tmp_path):
    one_pass = {name: np.array(values, "f4").reshape(shape) for name, (_, shape, values) in per_layer().items()}
    mask = np.array(MASK[2]).reshape(3, 8)
    stacked = {"router_logits": np.stack(list(one_pass.values())), "attention_mask": mask, "meta": {"top_k": TOP_K}}
    for tree in (stacked, {**one_pass, "attention_mask": mask, "top_k": TOP_K}, {**stacked, "input_ids": mask}):
        assert claims_tree(tree)
        parsed = parse_tree(Loaded(tmp_path / "a.pt", tree), Asked(UserMetadata(), tmp_path))
        (block,) = parsed.blocks
        assert block.expert_ids[: LENGTHS[0]].tolist() == [token[0] for token in SEQUENCES[0]]
    assert not claims_tree({"experts": 1, "router_logits": 2})
    assert not claims_tree([1, 2])
    for wrong in ([], [1.5], [[]], ["a"], [[np.zeros((2, 2)), 3]]):
        with pytest.raises(MalformedDump, match="wanted a tuple of tensors"):
            parse_tree(Loaded(tmp_path / "a.pt", {"router_logits": wrong}), Asked(UserMetadata(), tmp_path))


def test_a_real_models_own_choice_comes_out(tmp_path):
    """OLMoE of random weights: what its routers picked is what is recomputed from the logits it returns."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(
        vocab_size=50, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.OlmoeForCausalLM(config).eval()
    picked: list[list] = [[], []]
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.register_forward_hook(lambda _m, _i, out, layer=layer: picked[layer].append(out[-1]))
    ids = torch.randint(1, 50, (3, 8))
    mask = torch.tensor(mask_of(LENGTHS, 8)).reshape(3, 8)
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    if len(picked[0]) != 1 or picked[0][0].shape != (24, 2):
        pytest.skip("this transformers keeps its routers elsewhere")
    tensors: dict[str, Tensor] = {"attention_mask": ("I64", (3, 8), mask.reshape(-1).tolist())}
    for layer, logits in enumerate(out.router_logits):
        tensors[f"router_logits.{layer}"] = ("F32", tuple(logits.shape), logits.reshape(-1).tolist())
    rows = rows_of(ingested(tmp_path, npz_bytes(tensors), top_k_model=2))
    for layer in range(2):
        wanted = picked[layer][0][mask.reshape(-1).bool()].tolist()
        assert [list(one) for one in rows.filter(pl.col("layer_id") == layer)["expert_ids"]] == wanted


# Refusals


def test_without_k_it_is_refused_and_names_the_option(tmp_path):
    content = npz_bytes(per_layer() | {"attention_mask": MASK})
    assert "--meta top_k_model=K" in refused(tmp_path, content)


def test_k_of_user_and_dump_must_agree(tmp_path):
    content = npz_bytes(per_layer() | {"attention_mask": MASK}, {"top_k": 4})
    assert "you say top_k_model = 3, the dump says 4" in refused(tmp_path, content, top_k_model=3)
    assert "top_k_model = 17 of 16 experts" in refused(tmp_path, npz_bytes(per_layer()), top_k_model=17)


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({}, "no attention_mask or input_ids"),
        ({"input_ids": ("I64", (3, 8), [1] * 24)}, "a batch of 3 sequences and no attention_mask"),
        ({"attention_mask": ("I64", (3, 7), [1] * 21)}, "covers 7 positions, the logits of the prompt 8"),
        ({"attention_mask": ("I64", (5, 8), [1] * 40)}, "wanted [batch, seq] with batch · seq rows"),
        ({"attention_mask": ("I64", (3, 8), [2] * 24)}, "other values than 0 and 1"),
    ],
)
def test_padding_that_is_possible_needs_a_mask(tmp_path, beside, words):
    assert words in refused(tmp_path, npz_bytes(per_layer() | beside), top_k_model=TOP_K)


def test_later_steps_of_a_batch_need_the_mask_too(tmp_path):
    tensors, _ = generation("step_{step}.layer_{layer}")
    tensors["attention_mask"] = ("I64", (2, 5), [1] * 5 + [0, 0, 1, 1, 1])
    assert "the mask of prompt and generated tokens" in refused(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_no_number_is_located_unless_it_is_padding(tmp_path, value):
    tensors = per_layer() | {"attention_mask": MASK}
    tensors["router_logits.1"][2][0] = value
    (tmp_path / "padded").mkdir()
    assert ingested(tmp_path / "padded", npz_bytes(tensors), top_k_model=TOP_K).is_new
    tensors["router_logits.1"][2][10 * EXPERTS + 5] = value
    message = refused(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)
    assert "step 0, layer 1, row 10: a logit that is no finite number (1 such rows)" in message


def test_an_unwritten_layer_is_no_choice_of_experts_0_to_k(tmp_path):
    tensors = per_layer() | {"attention_mask": MASK}
    tensors["router_logits.1"] = ("F32", (ROWS, EXPERTS), [0.0] * (ROWS * EXPERTS))
    assert "all logits of a row are equal (16 such rows)" in refused(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)


def test_ids_under_the_name_of_logits(tmp_path):
    tensors = {"router_logits.0": ("I64", (20, TOP_K), [1] * 60), "input_ids": ("I64", (1, 20), [1] * 20)}
    assert "wanted logits, which are floats" in refused(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)


def test_a_missing_step_and_a_missing_layer_are_named(tmp_path):
    tensors, _ = generation("step_{step}.layer_{layer}")
    tensors["attention_mask"] = ("I64", (2, 8), [1] * 16)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("step_2")}
    assert "steps [2] are missing of 4" in refused(tmp_path, npz_bytes(kept), top_k_model=TOP_K)
    del tensors["step_2.layer_1"]
    assert "layers [1] stand in some steps and not in others (step 2" in refused(
        tmp_path, npz_bytes(tensors), top_k_model=TOP_K
    )


def test_two_bare_numbers_are_ambiguous_when_every_pass_is_as_long(tmp_path):
    tensors: dict[str, Tensor] = {"input_ids": ("I64", (1, 1), [1])}
    for step in range(3):
        for layer in range(LAYERS):
            row = logits_of([step, 5, 9], EXPERTS, seed=step)
            tensors[f"router_logits.{step}.{layer}"] = ("F32", (1, EXPERTS), row)
    assert "router_logits.step_<step>.layer_<layer>" in refused(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)


def test_generation_without_a_cache_routes_tokens_again(tmp_path):
    tensors, _ = generation("step_{step}.layer_{layer}")
    for layer in range(LAYERS):
        tensors[f"step_1.layer_{layer}"] = ("F32", (12, EXPERTS), [float(n % 7) for n in range(12 * EXPERTS)])
    tensors["attention_mask"] = ("I64", (2, 8), [1] * 16)
    assert "12 rows in step 1 for 2 sequences" in refused(tmp_path, npz_bytes(tensors), top_k_model=TOP_K)


@pytest.mark.parametrize("shape", [(2**40, EXPERTS), (3, 2**40, EXPERTS), (2**30, 8, EXPERTS), (2**20, 2**20, 2**20)])
def test_shapes_that_only_the_header_says_reserve_nothing(tmp_path, shape):
    from tests.raw_dumps import npy_bytes

    tensors = {"router_logits.0": ("F32", (ROWS, EXPERTS), per_layer()["router_logits.0"][2])}
    content = npz_bytes(tensors | {"attention_mask": MASK})
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(buffer, "w") as after:
        after.writestr("attention_mask.npy", before.read("attention_mask.npy"))
        after.writestr("router_logits.0.npy", npy_bytes(shape, "<f4", b"\0" * 64))
    refused(tmp_path, buffer.getvalue(), top_k_model=TOP_K)


def test_the_command_line_says_it_in_one_line(tmp_path, capsys):
    (tmp_path / "a.npz").write_bytes(npz_bytes(per_layer()))
    status, _, error = expert_tier(capsys, "ingest", tmp_path / "a.npz", "--data", tmp_path / "data")
    assert status == 1
    assert len(error.strip().splitlines()) == 1
    assert "top_k_model=K" in error


def test_ids_beside_logits_are_read_by_the_ids(tmp_path):
    routes = random_routes(40, LAYERS, EXPERTS, TOP_K)
    assert ingested(tmp_path, npz_dump(routes)).metadata.source.format == "npz_experts"


def test_tensors_named_like_layers_alone_are_no_logits(tmp_path):
    tensors = {"layer_0": ("F32", (20, 4), [1.0] * 80)}
    assert "no known layout" in refused(tmp_path, safetensors_bytes(tensors))


SOUND = {
    "npz": npz_bytes(per_layer() | {"attention_mask": MASK}, {"top_k": TOP_K}),
    "safetensors": safetensors_bytes(per_layer() | {"attention_mask": MASK}, {"top_k": "3"}),
}


@given(st.sampled_from(sorted(SOUND)), st.data())
@settings(max_examples=50, deadline=None)
def test_a_damaged_file_is_refused_or_a_trace(tmp_path_factory, kind, data):
    content = bytearray(SOUND[kind])
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(1, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, min(len(content), 700) - 1))] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.mktemp("damaged")
    try:
        ingested(folder, bytes(content))
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)
