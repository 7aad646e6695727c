"""What the bundled sample claims, recomputed from its committed files: a real model, and its own routing.

The dumps are read with gzip and csv alone, and figures in `sample.json` are not believed: of that file only the
prompts are used. Text comes from the standard library of the Python that runs the tests, so limits leave room for the
differences between Python versions.
"""

import csv
import functools
import gzip
import json
import math
import re
import subprocess
import sys
import sysconfig
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.sample import corpus
from pipeline.sample.model import SampleModel, checkpoint_tensors, decode_greedily, held_out_bits, load_checkpoint

SAMPLE = Path(__file__).parents[1] / "pipeline" / "sample"
LAYERS, EXPERTS, TOP_K = 8, 32, 4
DOMAINS = ("code", "docs")
# Present in every Python from 3.11 on, and never trained on.
HELD_OUT_FILES = ("calendar.py", "enum.py", "json/encoder.py", "subprocess.py", "timeit.py", "trace.py")


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    # The products are so small that two threads mostly wait for each other, badly so on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def model() -> SampleModel:
    return load_checkpoint(SAMPLE)


@functools.cache
def source_of(relative_path: str) -> str:
    with tokenize.open(Path(sysconfig.get_path("stdlib")) / relative_path) as file:
        return file.read()


@functools.cache
def dump_lines(domain: str) -> tuple[str, ...]:
    with gzip.open(SAMPLE / f"{domain}.route.csv.gz", "rt", encoding="ascii") as file:
        return tuple(file.read().splitlines())


@functools.cache
def dump_rows(domain: str) -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in dump_lines(domain) if not line.startswith("#")))


@functools.cache
def experts_by_layer(domain: str) -> dict[int, dict[int, dict[int, list[int]]]]:
    """Expert ids, largest weight first, as `[layer][turn][step]`."""
    chosen: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in dump_rows(domain):
        chosen[int(row["layer"])][int(row["turn"])][int(row["step"])].append(int(row["expert"]))
    return chosen


def tokens_of_layer(domain: str, layer_id: int) -> list[list[int]]:
    return [ids for turn in experts_by_layer(domain)[layer_id].values() for ids in turn.values()]


def prompt_and_continuation(domain: str, turn: int) -> tuple[bytes, bytes]:
    record = json.loads((SAMPLE / "sample.json").read_text())["domains"][domain]
    return record["prompts"][turn].encode("latin-1"), record["continuations"][turn].encode("latin-1")


@functools.cache
def held_out_text(domain: str) -> bytes:
    """A few kilobytes from the start of each held-out file."""
    extract = {"code": corpus.code_text, "docs": corpus.docs_text}[domain]
    return "\n\n".join(extract(source_of(path))[:1000] for path in HELD_OUT_FILES).encode()


def unigram_bits_per_byte(text: bytes) -> float:
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def test_files_are_within_their_size_limits() -> None:
    assert (SAMPLE / "model.safetensors").stat().st_size <= 12_000_000
    assert sum((SAMPLE / f"{domain}.route.csv.gz").stat().st_size for domain in DOMAINS) <= 300_000


@pytest.mark.parametrize("domain", DOMAINS)
def test_held_out_text_costs_far_fewer_bits_than_its_byte_frequencies_give(domain: str) -> None:
    text = held_out_text(domain)
    bits, predicted_bytes = held_out_bits(model(), text)
    assert predicted_bytes > 3000
    assert bits / predicted_bytes < 0.75 * unigram_bits_per_byte(text)


def test_the_same_bytes_out_of_order_are_not_predicted() -> None:
    text = held_out_text("code")[:2048]
    shuffled = bytes(text[i] for i in torch.randperm(len(text), generator=torch.Generator().manual_seed(0)))
    bits, predicted_bytes = held_out_bits(model(), shuffled)
    assert bits / predicted_bytes > unigram_bits_per_byte(shuffled)


def test_text_of_the_tests_was_never_trained_on() -> None:
    assert all(corpus.is_held_out(relative_path) for relative_path in HELD_OUT_FILES)
    assert not corpus.is_held_out("textwrap.py")


def test_checkpoint_has_the_tensors_of_qwen3_moe_in_bfloat16() -> None:
    stored = load_file(SAMPLE / "model.safetensors")
    config = json.loads((SAMPLE / "config.json").read_text())
    assert (config["model_type"], config["norm_topk_prob"], config["tie_word_embeddings"]) == ("qwen3_moe", True, True)
    per_layer = [
        *("input_layernorm", "post_attention_layernorm", "mlp.gate"),
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.experts.{e}.{name}" for e in range(EXPERTS) for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    expected = {f"model.layers.{layer_id}.{name}.weight" for layer_id in range(LAYERS) for name in per_layer}
    assert stored.keys() == expected | {"model.embed_tokens.weight", "model.norm.weight"}
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    written_again = checkpoint_tensors(model())
    assert all(torch.equal(tensor, written_again[name]) for name, tensor in stored.items())


@pytest.mark.parametrize("domain", DOMAINS)
def test_preamble_gives_the_sizes_of_the_stored_tensors(domain: str) -> None:
    preamble = [line for line in dump_lines(domain) if line.startswith("#")]
    assert preamble[0] == "# route_trace v1"
    assert re.fullmatch(r"# model=\S+ arch=qwen3moe n_layer=8 n_expert=32 n_expert_used=4", preamble[1])
    stored = {name: tensor.nbytes for name, tensor in load_file(SAMPLE / "model.safetensors").items()}
    for layer_id, line in enumerate(preamble[2:]):
        in_layer = {name: size for name, size in stored.items() if name.startswith(f"model.layers.{layer_id}.")}
        one_expert = sum(size for name, size in in_layer.items() if ".experts.7." in name)
        dense = sum(size for name, size in in_layer.items() if ".experts." not in name)
        assert line == f"# layer={layer_id} expert_bytes={one_expert} dense_bytes={dense}"
        assert {int(row["expert_bytes"]) for row in dump_rows(domain) if int(row["layer"]) == layer_id} == {one_expert}
    assert len(preamble) == 2 + LAYERS


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_token_has_four_different_experts_per_layer_by_falling_weight(domain: str) -> None:
    rows = dump_rows(domain)
    for first in range(0, len(rows), TOP_K):
        token = rows[first : first + TOP_K]
        weights = [float(row["weight"]) for row in token]
        assert len({(row["turn"], row["step"], row["layer"]) for row in token}) == 1
        assert [int(row["slot"]) for row in token] == list(range(TOP_K))
        assert len({row["expert"] for row in token}) == TOP_K
        assert all(0 <= int(row["expert"]) < EXPERTS for row in token)
        assert weights == sorted(weights, reverse=True)
        assert sum(weights) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("domain", DOMAINS)
def test_rows_are_one_prefill_pass_layer_by_layer_then_a_pass_per_decoded_token(domain: str) -> None:
    order = [tuple(int(row[key]) for key in ("turn", "phase", "step", "layer")) for row in dump_rows(domain)[::TOP_K]]
    expected = []
    for turn in range(len(experts_by_layer(domain)[0])):
        prompt, continuation = prompt_and_continuation(domain, turn)
        expected += [(turn, 0, step, layer_id) for layer_id in range(LAYERS) for step in range(len(prompt))]
        # The prefill pass gives the first byte, and the last one is never read.
        decoded = range(len(prompt), len(prompt) + len(continuation) - 1)
        expected += [(turn, 1, step, layer_id) for step in decoded for layer_id in range(LAYERS)]
    assert order == expected


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_expert_dominates_a_layer(domain: str) -> None:
    for layer_id in range(LAYERS):
        tokens = tokens_of_layer(domain, layer_id)
        selections = Counter(expert_id for ids in tokens for expert_id in ids)
        assert max(selections.values()) <= 0.5 * selections.total()
        # With four different experts a token the line above holds by construction; these two need a balanced router.
        assert max(selections.values()) <= 0.75 * len(tokens)
        assert len(selections) >= EXPERTS // 2


@pytest.mark.parametrize("domain", DOMAINS)
def test_next_token_reuses_experts_more_often_than_their_popularity_explains(domain: str) -> None:
    reused = followed = 0
    sum_p2 = sum_p = 0.0
    for layer_id in range(LAYERS):
        tokens = tokens_of_layer(domain, layer_id)
        for n in Counter(expert_id for ids in tokens for expert_id in ids).values():
            sum_p2 += (n / len(tokens)) ** 2
            sum_p += n / len(tokens)
        for turn in experts_by_layer(domain)[layer_id].values():
            for step, after in list(turn.items())[1:]:
                reused += len(set(after) & set(turn[step - 1]))
                followed += TOP_K
    assert reused / followed > sum_p2 / sum_p


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_two_layers_route_alike(domain: str) -> None:
    by_layer = [tokens_of_layer(domain, layer_id) for layer_id in range(LAYERS)]
    assert all(by_layer[a] != by_layer[b] for a in range(LAYERS) for b in range(a))
    stored = load_file(SAMPLE / "model.safetensors")
    routers = [stored[f"model.layers.{layer_id}.mlp.gate.weight"] for layer_id in range(LAYERS)]
    assert not any(torch.equal(routers[a], routers[b]) for a in range(LAYERS) for b in range(a))


@pytest.mark.parametrize("domain", DOMAINS)
def test_greedy_decode_from_the_weights_gives_the_recorded_routing(domain: str) -> None:
    prompt, continuation = prompt_and_continuation(domain, turn=3)
    text, passes = decode_greedily(model(), prompt, decode_passes=len(continuation) - 1)
    assert text == continuation
    same = total = 0
    for one_pass in passes:
        for layer_id, routing in enumerate(one_pass.routing):
            recorded = experts_by_layer(domain)[layer_id][3]
            for offset, ids in enumerate(routing.expert_ids.tolist()):
                same += set(ids) == set(recorded[one_pass.first_position + offset])
                total += 1
    assert total == LAYERS * (len(prompt) + len(continuation) - 1)
    # Sums in float32 differ in the last digits between machines, and a near-tie at the fourth place may then flip.
    assert same >= 0.97 * total


@torch.inference_mode()
def test_one_pass_over_the_whole_text_routes_like_cached_decoding() -> None:
    prompt, continuation = prompt_and_continuation("code", turn=0)
    tokens = prompt + continuation[:-1]
    _, routing, _ = model()(torch.tensor([list(tokens)]))
    same = sum(
        set(ids) == set(experts_by_layer("code")[layer_id][0][step])
        for layer_id, layer in enumerate(routing)
        for step, ids in enumerate(layer.expert_ids.tolist())
    )
    assert same >= 0.97 * LAYERS * len(tokens)  # near-ties, as above


@pytest.mark.parametrize("domain", DOMAINS)
def test_continuations_are_not_one_greedy_loop(domain: str) -> None:
    record = json.loads((SAMPLE / "sample.json").read_text())["domains"][domain]
    windows = [text[i : i + 8] for text in record["continuations"] for i in range(len(text) - 7)]
    assert len(set(windows)) >= len(windows) // 3


@pytest.mark.parametrize("domain", DOMAINS)
def test_dump_is_compressed_without_time_or_name_and_described_beside_it(domain: str) -> None:
    header = (SAMPLE / f"{domain}.route.csv.gz").read_bytes()[:10]
    assert header[:4] == b"\x1f\x8b\x08\x00"  # deflate, no optional fields such as a file name
    assert header[4:8] == bytes(4)  # modification time
    metadata = tomllib.loads((SAMPLE / f"{domain}.route.csv.gz.toml").read_text())
    assert metadata.pop("capture_method")
    assert metadata == {
        "model": "expert-tier-sample, a toy of 5 million parameters",
        "engine": "expert-tier sample (torch)",
        "domain": domain,
        "hidden_layers": LAYERS,
        "id_space": "logical",
        "moe_layer_ids": list(range(LAYERS)),
        "weight_kind": "renormalised",
        "top_k_model": TOP_K,
    }


def test_code_text_loses_comments_and_docstrings_only() -> None:
    source = (
        '"""Module."""\nx = "# no comment"  # comment\n\n\n'
        'def f():\n    """Doc é."""; y = 1\n    # gone\n    return y\n'
    )
    assert corpus.code_text(source) == 'x = "# no comment"\n\n\ndef f():\n    ; y = 1\n    return y'
    assert corpus.docs_text(source) == "Module.\n\nDoc é."


def test_code_of_a_file_keeps_its_definitions_and_not_its_docstring() -> None:
    source = source_of("timeit.py")
    code = corpus.code_text(source)
    names = re.findall(r"^(?:def|class) (\w+)", source, flags=re.MULTILINE)
    assert re.findall(r"^(?:def|class) (\w+)", code, flags=re.MULTILINE) == names
    assert corpus.docs_text(source).startswith("Tool for measuring execution time")
    assert "Tool for measuring execution time" not in code


def test_package_imports_without_torch() -> None:
    program = "import sys, pipeline.sample; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=SAMPLE.parents[1], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"
