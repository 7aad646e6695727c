"""Layouts of the llama.cpp family; all fixtures are synthetic, written as documented by code independent of parsers."""

import gzip
import json
import random
import re
import struct

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dumps import llama_cpp, llama_cpp_binary, sniff
from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from pipeline.dumps.imatrix import compare_counts, imatrix_counts, trace_counts
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests import raw_llama_cpp as raw
from tests.command_lines import expert_tier
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, tok_layers_dump

LAYERS = [1, 2, 3]
K = 4
PASSES = raw.graphs([5, 1, 1, 4, 1, 1, 1, 1], LAYERS, 32, K, seed=1)
SINGLE = raw.graphs([1] * 8, LAYERS, 32, K, seed=2)
PRUNED = raw.graphs([5, 1, 1, 4, 1, 1, 1, 1], LAYERS, 32, K, seed=3, pruned=True)
DRAFT = 4


def with_draft(passes: raw.Passes) -> raw.Passes:
    """Each pass of the target, its draft block over the same tokens, then two drafts by itself."""
    generator = random.Random(0)
    ids = [generator.sample(range(32), K) for _ in range(64)]
    out: raw.Passes = []
    for one in passes:
        out.append(one | {DRAFT: [generator.choice(ids) for _ in one[LAYERS[0]]]})
        out += [{DRAFT: [generator.choice(ids)]} for _ in range(2)]
    return out


CONTENTS = {
    "llama_moe_trace": raw.llama_moe_trace_dump(PASSES, K),
    "mtsp": raw.mtsp_dump(with_draft(PASSES), K),
    "moetrace": raw.moetrace_dump(PASSES, layers=4, experts=32, top_k=K, streams=2),
    "flash_moe_routing": raw.flash_moe_dump(SINGLE, K, 48),
    "tesy_moe_topk": raw.tesy_dump(PASSES, K),
    "moepager_csv": raw.moepager_dump(PASSES),
    "llama_moe_log": raw.moe_log_dump(PASSES),
    "moe_prefetch_route": raw.route_dump(PASSES),
    "ggml_moe_log": raw.gate_dump(PASSES),
    "colibri_route_trace": raw.colibri_dump(PASSES),
    "vference_route_trace": raw.vference_dump(PASSES, prompt_tokens=5, output_tokens=11),
}
WEIGHTED = ("moetrace", "llama_moe_log", "colibri_route_trace")


def ingested(folder, content: bytes, **said) -> Ingested:
    path = folder / "dump.bin"
    path.write_bytes(content)
    return ingest(path, DataFolder(folder / "data"), UserMetadata(**{"num_experts": 32, **said}))


def refusal(folder, content: bytes, **said) -> str:
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingested(folder, content, **said)
    message = str(caught.value)
    assert message.startswith(str(folder / "dump.bin"))
    assert "\n" not in message
    return message


def rows_of(one: Ingested) -> pl.DataFrame:
    return pl.read_parquet(one.path).with_columns(pl.col("phase", "pass_kind").cast(pl.String))


def passes_of(one: Ingested) -> raw.Passes:
    found: raw.Passes = [{} for _ in range(one.metadata.counts.steps)]
    for step, layer, ids in rows_of(one).select("step_id", "layer_id", "expert_ids").iter_rows():
        found[step].setdefault(layer, []).append(list(ids))
    return found


def claimed(folder, content: bytes) -> list[str]:
    path = folder / "look.bin"
    path.write_bytes(content)
    with DumpFile(path) as dump:
        sample = sniff.look(dump)
    return [one.name for one in (*llama_cpp_binary.LAYOUTS, *llama_cpp.LAYOUTS) if one.claims(sample)]


def check_of(one: Ingested, name: str):
    return next(check for check in one.metadata.checks if check.name == name)


# What goes in comes out


@pytest.mark.parametrize("name", CONTENTS)
def test_synthetic_dumps_give_back_their_passes_and_one_layout_claims_each(tmp_path, name):
    assert claimed(tmp_path, CONTENTS[name]) == [name]
    one = ingested(tmp_path, CONTENTS[name])
    assert passes_of(one) == (SINGLE if name == "flash_moe_routing" else PASSES)
    assert one.metadata.source.format == name
    assert one.metadata.pass_boundaries == "recorded"
    rows = rows_of(one)
    assert set(rows["request_id"]) == {0}
    assert set(rows["pass_kind"]) == {"normal"}
    assert (rows["router_weights"].null_count() == 0) == (name in WEIGHTED)
    if name in WEIGHTED:
        assert list(rows["router_weights"][0]) == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5], abs=1e-3)
    known_phase = {"moetrace": {"prefill"}, "vference_route_trace": {"prefill", "decode"}}
    assert set(rows["phase"]) == known_phase.get(name, {"unknown"})


@pytest.mark.parametrize("name", ["llama_moe_trace", "colibri_route_trace", "vference_route_trace", "moetrace"])
def test_gzip_and_small_chunks_give_the_same_passes(tmp_path, monkeypatch, name):
    monkeypatch.setattr("pipeline.dumps.llama_cpp._CHUNK_BYTES", 100)
    monkeypatch.setattr("pipeline.dumps.llama_cpp_binary._CHUNK_WORDS", 16)
    monkeypatch.setattr("pipeline.dumps.llama_cpp.ROWS_PER_BLOCK", 4)
    assert passes_of(ingested(tmp_path, gzip.compress(CONTENTS[name]))) == PASSES


@pytest.mark.parametrize("name", CONTENTS)
def test_every_layout_reads_in_small_chunks(tmp_path, monkeypatch, name):
    monkeypatch.setattr("pipeline.dumps.llama_cpp._CHUNK_BYTES", 64)
    monkeypatch.setattr("pipeline.dumps.llama_cpp_binary._CHUNK_WORDS", 9)
    monkeypatch.setattr("pipeline.dumps.llama_cpp.ROWS_PER_BLOCK", 7)
    assert passes_of(ingested(tmp_path, CONTENTS[name])) == (SINGLE if name == "flash_moe_routing" else PASSES)


@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=8), layers=st.integers(2, 4), top_k=st.integers(1, 5),
    seed=st.integers(0, 99), name=st.sampled_from([name for name in CONTENTS if name != "flash_moe_routing"]),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_any_shape_comes_back(tmp_path_factory, widths, layers, top_k, seed, name):
    passes = raw.graphs(widths, list(range(layers)), 200, top_k, seed=seed)
    content = {
        "llama_moe_trace": lambda: raw.llama_moe_trace_dump(passes, top_k),
        "mtsp": lambda: raw.mtsp_dump(passes, top_k),
        "moetrace": lambda: raw.moetrace_dump(passes, layers=layers, experts=200, top_k=top_k),
        "tesy_moe_topk": lambda: raw.tesy_dump(passes, top_k),
        "moepager_csv": lambda: raw.moepager_dump(passes),
        "llama_moe_log": lambda: raw.moe_log_dump(passes),
        "moe_prefetch_route": lambda: raw.route_dump(passes),
        "ggml_moe_log": lambda: raw.gate_dump(passes),
        "colibri_route_trace": lambda: raw.colibri_dump(passes),
        "vference_route_trace": lambda: raw.vference_dump(
            passes, prompt_tokens=widths[0], output_tokens=sum(widths[1:]) + 1, indent=seed % 2 or None
        ),
    }[name]()
    said = {"num_experts": 200, "tied_routing": True, "hidden_layers": layers}
    assert passes_of(ingested(tmp_path_factory.mktemp("any"), content, **said)) == passes


@given(width=st.integers(40, 300), top_k=st.integers(1, 8), tokens=st.integers(2, 5), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_flash_moe_finds_any_width_of_the_hidden_state(tmp_path_factory, width, top_k, tokens, seed):
    passes = raw.graphs([1] * tokens, [0, 1, 2], 200, top_k, seed=seed)
    one = ingested(
        tmp_path_factory.mktemp("any"), raw.flash_moe_dump(passes, top_k, width, seed=seed), num_experts=200,
        tied_routing=True,
    )  # fmt: skip
    assert passes_of(one) == passes
    assert check_of(one, "width of the hidden state").found.startswith(f"{width} numbers")


# Passes, phases, the last layer


@pytest.mark.parametrize("name", ["llama_moe_trace", "tesy", "llama_moe_log", "mtsp"])
def test_a_pass_without_all_rows_of_the_last_layer_evaluates_a_prompt(tmp_path, name):
    content = {
        "llama_moe_trace": raw.llama_moe_trace_dump(PRUNED, K),
        "tesy": raw.tesy_dump(PRUNED, K),
        "llama_moe_log": raw.moe_log_dump(PRUNED),
        "mtsp": raw.mtsp_dump(PRUNED, K),
    }[name]
    one = ingested(tmp_path, content, hidden_layers=4)
    assert passes_of(one) == PRUNED
    phases = dict(rows_of(one).select("step_id", "phase").iter_rows())
    assert [phases[step] for step in range(8)] == ["prefill", "unknown", "unknown", "prefill", *["unknown"] * 4]
    assert check_of(one, "every pass has every layer").outcome == "warn"


def test_a_prompt_whose_last_layer_is_not_computed_at_all_is_read(tmp_path):
    prompt = [{layer: rows for layer, rows in one.items() if layer < 3} for one in raw.graphs([6], LAYERS, 32, K)]
    one = ingested(tmp_path, raw.llama_moe_trace_dump(prompt + PASSES, K))
    assert passes_of(one) == prompt + PASSES
    assert rows_of(one).filter(pl.col("step_id") == 0)["phase"].unique().to_list() == ["prefill"]


def test_a_decoding_pass_without_its_last_layer_is_refused(tmp_path):
    passes = [dict(one) for one in SINGLE]
    del passes[4][3]
    assert "step 4: layers [3] are missing" in refusal(tmp_path, raw.llama_moe_trace_dump(passes, K))


def test_a_dump_cut_off_before_the_last_layer_of_a_wide_pass_is_truncated(tmp_path):
    passes = [*SINGLE, {1: PASSES[0][1], 2: PASSES[0][2]}]
    assert "the dump is truncated" in refusal(tmp_path, raw.llama_moe_trace_dump(passes, K))


def test_an_ubatch_split_makes_passes_of_its_own(tmp_path):
    one = ingested(tmp_path, raw.llama_moe_trace_dump(raw.graphs([512, 512, 100], LAYERS, 200, 4), K), num_experts=200)
    assert one.metadata.counts.steps == 3
    assert one.metadata.counts.events == 9


def test_a_layer_executed_twice_is_refused(tmp_path):
    record = raw.llama_moe_trace_dump([{2: SINGLE[1][2]}], K)
    head = raw.llama_moe_trace_dump([SINGLE[0], {1: SINGLE[1][1], 2: SINGLE[1][2]}], K)
    message = refusal(tmp_path, head + record + raw.llama_moe_trace_dump([{3: SINGLE[1][3]}], K))
    assert "layer 2 stands again in the same pass" in message


def test_rows_of_minus_one_are_not_captured_and_counted(tmp_path):
    passes = [dict(one) for one in SINGLE]
    del passes[2][1], passes[2][2], passes[2][3]
    gone = raw.llama_moe_trace_dump([{layer: [[-1] * K] for layer in LAYERS}], K)
    content = raw.llama_moe_trace_dump(SINGLE[:2], K) + gone + raw.llama_moe_trace_dump(SINGLE[3:], K)
    one = ingested(tmp_path, content)
    assert one.metadata.counts.dropped_rows == {"not captured: all ids are -1": 3}
    assert passes_of(one) == SINGLE[:2] + SINGLE[3:]


@pytest.mark.parametrize("name", ["llama_moe_trace", "llama_moe_log", "tesy", "moetrace"])
def test_the_flat_copy_of_a_strided_view_is_refused(tmp_path, name):
    generator = np.random.default_rng(0)
    passes = [
        {layer: generator.permutation(64).reshape(8, 8).tolist() for layer in LAYERS} for _ in range(40)
    ]  # a row of the argsort after the other: every 8 rows partition the experts
    content = {
        "llama_moe_trace": lambda: raw.llama_moe_trace_dump(passes, 8),
        "llama_moe_log": lambda: raw.moe_log_dump(passes),
        "tesy": lambda: raw.tesy_dump(passes, 8),
        "moetrace": lambda: raw.moetrace_dump(passes, layers=4, experts=64, top_k=8),
    }[name]()
    message = refusal(tmp_path, content, num_experts=64)
    assert "partition the 64 experts" in message
    assert "strided top-k view" in message


# MTSP


def test_mtsp_leaves_the_draft_block_out_and_counts_it(tmp_path):
    one = ingested(tmp_path, CONTENTS["mtsp"])
    assert one.metadata.moe_layer_ids == LAYERS
    assert one.metadata.hidden_layers == DRAFT
    tokens = sum(len(each[1]) for each in PASSES)
    assert one.metadata.counts.dropped_rows == {
        "a draft block's: layer at or above hidden_layers": tokens + 2 * len(PASSES)
    }
    assert check_of(one, "draft block apart").outcome == "ok"


def test_mtsp_says_that_acceptance_is_not_recorded_and_counts_passes_evaluated_again(tmp_path):
    again = [{layer: rows[:2] for layer, rows in PASSES[3].items()}]
    one = ingested(tmp_path, raw.mtsp_dump(with_draft(PASSES[:4] + again + PASSES[4:]), K))
    check = check_of(one, "speculation verified")
    assert check.outcome == "warn"
    assert "3 passes of several tokens" in check.found
    assert "1 passes begin with the routes of the pass before" in check.found


def test_mtsp_whose_draft_block_cannot_be_told_is_refused_and_read_when_said(tmp_path):
    content = raw.mtsp_dump(PASSES, K)
    message = refusal(tmp_path, content)
    assert "--meta hidden_layers=3 if it is the draft block, --meta hidden_layers=4 if not" in message
    assert passes_of(ingested(tmp_path, content, hidden_layers=4)) == PASSES
    (tmp_path / "other").mkdir()
    without = ingested(tmp_path / "other", content, hidden_layers=3)
    assert without.metadata.moe_layer_ids == [1, 2]


def test_hidden_layers_below_all_layers_is_refused(tmp_path):
    assert "none below hidden_layers = 1" in refusal(tmp_path, CONTENTS["mtsp"], hidden_layers=1)


def test_mtsp_of_another_k_or_without_its_magic_names_the_record(tmp_path):
    content = bytearray(raw.mtsp_dump(PASSES, K))
    struct.pack_into("<i", content, 16 + 4 * 5 * K + 12, 5)
    assert "record 1 (counted from 0): [" in refusal(tmp_path, bytes(content), hidden_layers=4)
    content = bytearray(raw.mtsp_dump(PASSES, K))
    content[16 + 4 * 5 * K] ^= 1
    assert "is no record; wanted [MTSP, layer, tokens, k, ids]" in refusal(tmp_path, bytes(content), hidden_layers=4)


# MOETRACE


@pytest.mark.parametrize("version", [1, 2])
def test_moetrace_of_both_versions_gives_back_its_routes(tmp_path, version):
    content = raw.moetrace_dump(
        raw.graphs([5, 4, 6], [0, 1, 2], 32, K), layers=3, experts=32, top_k=K, version=version, hashed=1
    )
    one = ingested(tmp_path, content)
    assert passes_of(one) == raw.graphs([5, 4, 6], [0, 1, 2], 32, K)
    assert (one.metadata.hidden_layers, one.metadata.top_k_model) == (3, K)
    assert one.metadata.weight_kind == "renormalised"
    assert check_of(one, "routes of a router").found.startswith("layers 0..0 choose by the token's id")
    assert rows_of(one)["token_position"].null_count() == one.metadata.counts.rows


def test_moetrace_no_id_is_left_out_and_counted(tmp_path):
    one = ingested(tmp_path, raw.moetrace_dump(PRUNED, layers=5, experts=32, top_k=K))
    tokens = sum(len(each[1]) for each in PRUNED)
    assert passes_of(one) == PRUNED
    assert one.metadata.counts.dropped_rows == {
        "no id (0xFFFF): dense, or the last layer but for its output tokens": 2 * tokens + 4 + 3
    }


def test_moetrace_version_1_dense_layer_is_no_expert_0_and_left_out_when_said(tmp_path):
    content = raw.moetrace_dump(PASSES, layers=4, experts=32, top_k=K, version=1)
    assert "not expert 0" in refusal(tmp_path, content)
    one = ingested(tmp_path, content, moe_layer_ids=LAYERS)
    assert passes_of(one) == PASSES
    assert one.metadata.counts.dropped_rows == {"a layer that you do not list in moe_layer_ids": 15}
    assert "header says 4 layers" in refusal(tmp_path, content, moe_layer_ids=[1, 9])


def test_moetrace_without_weights_leaves_them_unknown(tmp_path):
    one = ingested(tmp_path, raw.moetrace_dump(PASSES, layers=4, experts=32, top_k=K, weights=False))
    assert rows_of(one)["router_weights"].null_count() == one.metadata.counts.rows
    assert one.metadata.weight_kind == "absent"


def test_moetrace_that_is_broken_says_where(tmp_path):
    whole = raw.moetrace_dump(PASSES, layers=4, experts=32, top_k=K)
    assert "wanted 1 or 2" in refusal(tmp_path, whole[:8] + struct.pack("<I", 3) + whole[12:])
    assert "chunk 0" in refusal(tmp_path, whole[:36] + b"\0\0\0\0" + whole[40:])
    huge = refusal(tmp_path, whole[:40] + struct.pack("<I", 2**32 - 1) + whole[44:])
    assert "4294967295 tokens" in huge
    wide = raw.moetrace_dump(PASSES[:1], layers=4, experts=32, top_k=K, streams=60000)
    assert "wanted at most 268,435,456" in refusal(tmp_path, wide[:40] + struct.pack("<I", 5000) + wide[44:])
    torn = bytearray(whole)
    struct.pack_into("<H", torn, 36 + 8 + 4 * 5 + 4 * 5 * K, 0xFFFF)
    torn_at = refusal(tmp_path, bytes(torn), moe_layer_ids=LAYERS)
    assert "chunk 0, layer 1, row 0" in torn_at
    assert "wrapped" in refusal(
        tmp_path, raw.moetrace_dump(PASSES, layers=4, experts=300, top_k=K, version=1), num_experts=300
    )


# flash-moe


def test_flash_moe_of_a_single_record_cannot_be_told(tmp_path):
    content = raw.flash_moe_dump([{0: [[3, 1, 2, 5]]}], K, 48)
    assert claimed(tmp_path, content) == []
    path = tmp_path / "dump.bin"
    path.write_bytes(content)
    with DumpFile(path) as dump, pytest.raises(RefusedDump, match="cannot be told"):
        llama_cpp_binary._flash_moe_shape(dump)


def test_flash_moe_damaged_in_the_middle_names_the_record(tmp_path):
    content = bytearray(CONTENTS["flash_moe_routing"])
    record = 8 + 4 * 48 + 4 * K
    content[10 * record + 4] = 9
    assert "record 10 (counted from 0)" in refusal(tmp_path, bytes(content))


# moe-prefetch, colibri, vference, tesy, LLAMA_MOE_LOG, moepager


def test_route_lines_keep_residency_beside_and_drop_prompts_of_which_only_the_last_layer_is_there(tmp_path):
    first = [{3: [[30, 1, 2, 5]]}]
    middle = [{3: [[7, 8, 1, 2]]}]
    one = ingested(tmp_path, raw.route_dump(first + SINGLE[:4] + middle + SINGLE[4:]))
    assert passes_of(one) == SINGLE
    assert list(one.metadata.counts.dropped_rows.values()) == [2]
    seen = one.metadata.engine_observations[0]
    picks = raw.flat([ids for each in first + SINGLE + middle for rows in each.values() for ids in rows])
    assert (seen.accesses, seen.hits) == (len(picks), sum(expert % 3 == 0 for expert in picks))


def test_route_lines_whose_first_step_lacks_another_layer_are_refused(tmp_path):
    first = [{layer: rows for layer, rows in SINGLE[0].items() if layer != 2}]
    assert "layers [2] are missing" in refusal(tmp_path, raw.route_dump(first + SINGLE[1:]))


def test_colibri_draft_block_that_runs_alone_is_left_out(tmp_path):
    one = ingested(tmp_path, raw.colibri_dump(with_draft(PASSES)))
    assert passes_of(one) == PASSES
    assert one.metadata.hidden_layers == DRAFT


def test_colibri_draft_block_inside_every_pass_is_named_as_a_doubt_and_left_out_when_said(tmp_path):
    passes = [one | {DRAFT: [[1, 2, 3, number]]} for number, one in enumerate(SINGLE, 4)]
    one = ingested(tmp_path, raw.colibri_dump(passes))
    assert any("then say --meta hidden_layers=4" in warning for warning in one.warnings)
    (tmp_path / "said").mkdir()
    assert passes_of(ingested(tmp_path / "said", raw.colibri_dump(passes), hidden_layers=DRAFT)) == SINGLE


def test_colibri_with_a_missing_row_is_refused(tmp_path):
    lines = raw.colibri_dump(PASSES).splitlines(keepends=True)
    assert "call 0 row 3, wanted row 2" in refusal(tmp_path, b"".join(lines[:2] + lines[3:]))
    lines[7] = b"1 2 2 3:0.5 4:x 5:0.1 6:0.1\n"
    assert "line 8: '4:x', wanted <expert>:<gate>" in refusal(tmp_path, b"".join(lines))


def test_vference_counts_tokens_where_prompt_and_output_add_up(tmp_path):
    one = ingested(tmp_path, CONTENTS["vference_route_trace"])
    by_step = rows_of(one).group_by("step_id", maintain_order=True).agg("token_position", "phase")
    assert by_step["token_position"][0].to_list() == [0, 1, 2, 3, 4] * 3
    assert by_step["token_position"][3].to_list() == [7, 8, 9, 10] * 3
    assert by_step["phase"][0].unique().to_list() == ["prefill"]
    assert set(rows_of(one).filter(pl.col("step_id") > 0)["phase"]) == {"decode"}
    (tmp_path / "other").mkdir()
    other = ingested(tmp_path / "other", raw.vference_dump(PASSES, prompt_tokens=5, output_tokens=99))
    assert check_of(other, "tokens add up").outcome == "warn"
    assert set(rows_of(other)["phase"]) == {"unknown"}


def test_vference_of_another_version_or_without_records_is_refused(tmp_path):
    text = CONTENTS["vference_route_trace"]
    assert "wanted vference.route-trace.v1" in refusal(tmp_path, text.replace(b"trace.v1", b"trace.v2"))
    assert "no record" in refusal(tmp_path, raw.vference_dump([], prompt_tokens=1, output_tokens=1))
    assert "truncated" in refusal(tmp_path, text[:-40])


def test_tesy_version_2_brings_phases_and_an_unknown_version_is_refused(tmp_path):
    one = ingested(tmp_path, raw.tesy_dump(PASSES, K, phases=["prefill"] + ["decode"] * 7))
    assert set(rows_of(one).filter(pl.col("step_id") > 0)["phase"]) == {"decode"}
    assert "tesy.llama_moe_topk.v3" in refusal(tmp_path, raw.tesy_dump(PASSES, K).replace(b"topk.v1", b"topk.v3"))


def test_tesy_whose_rows_are_fewer_than_it_says_names_the_line(tmp_path):
    lines = raw.tesy_dump(PASSES, K).splitlines()
    record = json.loads(lines[1])
    record["experts"].pop()
    lines[1] = json.dumps(record).encode()
    assert "line 2: experts has 4 rows, wanted 5" in refusal(tmp_path, b"\n".join(lines) + b"\n")


def test_tesy_that_goes_back_is_refused(tmp_path):
    lines = raw.tesy_dump(PASSES, K).splitlines(keepends=True)
    assert "stands after a later one" in refusal(tmp_path, b"".join(lines[6:] + lines[:6]))


def test_moe_log_makes_each_appended_run_a_request(tmp_path):
    one = ingested(tmp_path, raw.moe_log_dump(PASSES[:4]) + raw.moe_log_dump(PASSES[4:]))
    assert passes_of(one) == PASSES
    assert rows_of(one).group_by("step_id").first().sort("step_id")["request_id"].to_list() == [0] * 4 + [1] * 4
    (tmp_path / "bare").mkdir()
    assert passes_of(ingested(tmp_path / "bare", raw.moe_log_dump(PASSES, banner=False))) == PASSES


def test_moe_log_with_a_missing_or_broken_line_says_where(tmp_path):
    lines = raw.moe_log_dump(PASSES).splitlines(keepends=True)
    assert "layer 1, token 2, wanted token 1" in refusal(tmp_path, b"".join(lines[:3] + lines[4:]))
    lines[4] = b'1,2,"[1 2 3]","[0.5 0.3 0.2]"\n'
    assert "line 5: 3 ids and 3 weights, wanted 4" in refusal(tmp_path, b"".join(lines))


def test_moepager_counts_tokens_and_refuses_a_missing_row(tmp_path):
    one = ingested(tmp_path, CONTENTS["moepager_csv"])
    assert rows_of(one)["token_position"].unique().to_list() == list(range(15))
    lines = CONTENTS["moepager_csv"].splitlines(keepends=True)
    assert "is a row missing" in refusal(tmp_path, b"".join(lines[:10] + lines[11:]))
    assert "3 of 4 rows: the dump is truncated" in refusal(tmp_path, b"".join(lines[:-1]))


def test_route_csv_of_another_version_is_refused(tmp_path):
    content = route_csv_dump([], random_routes(20, 2, 32, 2), experts=32).replace(b"route_trace v1", b"route_trace v2")
    assert "route CSV version 2, wanted 1" in refusal(tmp_path, content)


@pytest.mark.parametrize("name", ["llama_moe_trace", "mtsp", "moetrace", "tesy_moe_topk", "moepager_csv"])
def test_what_an_eval_callback_captured_is_marked_perturbation_unchecked(tmp_path, name):
    one = ingested(tmp_path, CONTENTS[name])
    assert one.metadata.capture_method.startswith("eval callback")
    assert "perturbation unchecked" in check_of(one, "capture leaves tokens alone").found


# Refused as what they are


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"# ds4 expert hotlist v1\n# model x\n# layers 3\n# experts 4\n0 1 200 0.3\n1 2 150 0.2\n", "expert hotlist"),
        (b'{\n "source": "x", "expert_used": 8,\n "layer_records": 5, "selections": 40\n}\n', "ds4 expert profile"),
        (b"-1 78 256\n-2 1 3815245270\n3 2 5\n3 7 12\n", "colibri expert history"),
        (b"3 2 5\n3 7 12\n4 1 8\n4 2 8\n", "colibri expert history"),
        (b"IKU1" + struct.pack("<10I", 2, 4, *range(8)), "IKU1"),
        (b"EXPHIST1" + struct.pack("<4I", 1, 0, 0, 7), "EXPHIST1"),
        (b'{"0,0": 12, "0,1": 7, "1,0": 3}', "heat map"),
        (b'{\n  "0,0": 12,\n  "0,1": 7\n}\n', "heat map"),
        (b'{"model": "m", "layers": {"0": {"universal": [1, 2], "activation_counts": {"1": 6}}}}', "mlx-moe"),
        (b'{"forward_pass_id": 1, "batch_size": 2, "expert_activation": 5.5}\n', "MoE-CAP"),
        (struct.pack("<2i", 3, 26) + b"blk.0.ffn_down_exps.weight" + bytes(64), "importance matrix"),
        (raw.imatrix_dump({0: [3.0, 4.0]}), "GGUF"),
        (b"ffn_moe_topk-0 = (i32) TOPK\n [ 12.0000, 45.0000, 3.0000, ..., 7.0000 ]\n", "shortened"),
        (b"layer,expert,hits,layer_rows,weight\n0,1,5,9,0.5\n", "counts per layer and expert"),
    ],
)  # fmt: skip
def test_counts_hot_lists_and_elided_text_are_refused_by_name(tmp_path, content, name):
    assert claimed_or_refused(tmp_path, content) == []
    assert name in refusal(tmp_path, content)


def claimed_or_refused(folder, content: bytes) -> list[str]:
    try:
        return claimed(folder, content)
    except RefusedDump:
        return []


def joined_with_itself(name: str) -> bytes:
    content = CONTENTS[name]
    # What heads a file stands once where two are put together; a run that is appended writes its own.
    header = {"moetrace": 36, "moepager_csv": content.find(b"\n") + 1}.get(name, 0)
    return content + content[header:]


NUMBERED = ("tesy_moe_topk", "moe_prefetch_route", "colibri_route_trace")
"""Layouts that number their passes, so that a second copy goes back."""


@pytest.mark.parametrize("name", [name for name in CONTENTS if name != "vference_route_trace"])
def test_a_file_joined_with_itself_is_refused(tmp_path, name):
    message = refusal(tmp_path, joined_with_itself(name), **({"hidden_layers": DRAFT} if name == "mtsp" else {}))
    if name in NUMBERED:
        assert "later one" in message or "does not go back" in message
    else:
        assert re.search(r"(\d+) steps, which are the first (\d+) of them 2 times over", message)
        assert "leave the copies out" in message


def test_records_joined_with_themselves_in_one_document_are_refused(tmp_path):
    content = raw.vference_dump(PASSES * 2, prompt_tokens=5, output_tokens=26)
    assert "16 steps, which are the first 8 of them 2 times over" in refusal(tmp_path, content)


@pytest.mark.parametrize("weight", [-1.0, 1.5, float("nan"), float("inf")])
def test_a_weight_that_is_no_probability_is_located(tmp_path, weight):
    content = bytearray(CONTENTS["moetrace"])
    # Header, chunk of 5 tokens, layer 0 without ids (u16 and f16 each, and two gates), ids of layer 1.
    place = 36 + 8 + 4 * 5 + 5 * (4 * K + 2 * 2) + 5 * 2 * K + 2 * (2 * K + 1)
    content[place : place + 2] = struct.pack("<e", weight)
    message = refusal(tmp_path, bytes(content))
    assert f"chunk 0, layer 1, row 2: weight {weight:.4g} of expert" in message
    assert "wanted 0 to 1" in message


def test_a_hexadecimal_id_is_located(tmp_path):
    lines = CONTENTS["moepager_csv"].split(b"\n")
    words = lines[5].split(b",")
    lines[5] = b",".join([*words[:2], b"0x1f", *words[3:]])
    message = refusal(tmp_path, b"\n".join(lines))
    assert "line 6: layer" in message
    assert "expert 0x1f" in message


@pytest.mark.parametrize(
    "content",
    [
        npz_dump(random_routes(20, 2, 32, 2)),
        tok_layers_dump(random_routes(20, 2, 32, 2)),
        route_csv_dump([], random_routes(20, 2, 32, 2), experts=32),
        b"route 1 2 of the tour\nroute 2 3\n",
        b"token,layer,expert\n1,2,3\n",
        b"token,layer,expert,t_ns,predicted\n1,2,3,4,5\n",
        b"1 2 3 4:5 6\n",
        b'{"schema": "tesy.other.v1", "experts": [[1]], "layer": 0}\n',
        b'{"iteration": 0, "layer": 0, "experts": [1, 2]}\n',
        bytes(4096),
        b"\x01\x00\x00\x00" * 1024,
        np.arange(4096, dtype="<i4").tobytes(),
        np.random.default_rng(0).bytes(65536),
        np.random.default_rng(0).normal(size=8192).astype("<f4").tobytes(),
        np.random.default_rng(0).integers(0, 64, 8192).astype("<i4").tobytes(),
        (np.random.default_rng(0).integers(0, 4, 8192)).astype("<i4").tobytes(),
    ],
)
def test_look_alikes_are_not_claimed(tmp_path, content):
    assert claimed(tmp_path, content) == []


@pytest.mark.parametrize("name", ["mtsp", "llama_moe_trace", "moetrace", "colibri_route_trace"])
def test_a_refused_dump_is_one_line_and_exit_code_1_on_the_command_line(tmp_path, capsys, name):
    path = tmp_path / "cut.bin"
    path.write_bytes(CONTENTS[name][:-3])
    status, out, err = expert_tier(capsys, "ingest", path, "--data", tmp_path / "data")
    assert status == 1
    assert "Traceback" not in err + out
    assert len((err + out).strip().splitlines()) == 1


# Untrusted input


def only_ends_as_it_may(folder, content: bytes) -> None:
    try:
        one = ingested(folder, content)
    except (MalformedDump, RefusedDump) as error:
        assert "\n" not in str(error)
    else:
        assert rows_of(one).height == one.metadata.counts.rows


@given(data=st.data(), name=st.sampled_from(sorted(CONTENTS)))
@settings(max_examples=50, deadline=None)
def test_truncation_anywhere_is_refused_or_a_valid_trace(tmp_path_factory, data, name):
    cut = data.draw(st.integers(1, len(CONTENTS[name]) - 1))
    only_ends_as_it_may(tmp_path_factory.mktemp("cut"), CONTENTS[name][:cut])


@given(data=st.data(), name=st.sampled_from(sorted(CONTENTS)))
@settings(max_examples=50, deadline=None)
def test_flipped_bytes_are_refused_or_a_valid_trace(tmp_path_factory, data, name):
    content = bytearray(CONTENTS[name])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    only_ends_as_it_may(tmp_path_factory.mktemp("flip"), bytes(content))


@pytest.mark.parametrize("name", ["colibri_route_trace", "moepager_csv", "moe_prefetch_route", "ggml_moe_log"])
def test_a_last_line_without_its_end_is_truncated_even_where_it_reads_well(tmp_path, name):
    content = CONTENTS[name].rstrip(b"\n")
    assert "its last line has no end (though it reads well)" in refusal(tmp_path, content)


def test_a_pass_without_end_is_refused_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.llama_cpp.MAX_PASS_SELECTIONS", 1000)
    monkeypatch.setattr("pipeline.dumps.llama_cpp_binary._CHUNK_WORDS", 64)
    passes = [{layer: [[1, 2, 3, layer + 4]] for layer in range(1000)}]
    assert "without an end" in refusal(tmp_path, raw.llama_moe_trace_dump(passes, K), num_experts=2000)


# imatrix


def test_imatrix_counts_are_read_from_one_of_gate_up_and_down(tmp_path):
    path = tmp_path / "i.gguf"
    path.write_bytes(raw.imatrix_dump({1: [3.0, 0.0, 5.0, 1.0], 2: [4.0, 2.0, 2.0, 0.0]}))
    found = imatrix_counts(path)
    assert {layer: values.tolist() for layer, values in found.counts.items()} == {1: [3, 0, 5, 1], 2: [4, 2, 2, 0]}
    assert (found.fillers, found.disagreeing, found.chunks, found.chunk_tokens) == ({1: 1}, [], 7, 512)


def test_imatrix_counts_are_compared_with_a_traces_own(tmp_path):
    path = tmp_path / "i.gguf"
    one = ingested(tmp_path, CONTENTS["llama_moe_trace"])
    trace = trace_counts(one.path)
    assert {layer: values.sum() for layer, values in trace.items()} == dict.fromkeys(LAYERS, 15 * K)
    assert (
        trace[2].tolist() == np.bincount(raw.flat([ids for each in PASSES for ids in each[2]]), minlength=32).tolist()
    )
    path.write_bytes(raw.imatrix_dump({layer: counts.astype(float).tolist() for layer, counts in trace.items()}))
    outcomes = {check.name: check.outcome for check in compare_counts(imatrix_counts(path), trace)}
    assert outcomes["imatrix: same layers"] == outcomes["imatrix: same counts"] == "ok"
    trace[1] = trace[1] + 1
    del trace[3]
    outcomes = {check.name: check for check in compare_counts(imatrix_counts(path), trace)}
    assert "only in the imatrix: [3]" in outcomes["imatrix: same layers"].found
    assert outcomes["imatrix: same counts"].outcome == "warn"


def test_inspect_holds_a_dump_against_an_imatrix(tmp_path, capsys):
    (tmp_path / "dump").write_bytes(raw.llama_moe_trace_dump(PASSES, K))
    counts = {layer: [0.0] * 32 for layer in LAYERS}
    for one in PASSES:
        for layer, rows in one.items():
            for expert in raw.flat(rows):
                counts[layer][expert] += 1
    for wrong, verdict in ((0, "ok"), (5, "warn")):
        counts[2][3] += wrong
        (tmp_path / "imatrix").write_bytes(raw.imatrix_dump(counts))
        call = ["inspect", tmp_path / "dump", "--imatrix", tmp_path / "imatrix", "--meta", "num_experts=32", "--json"]
        status, out, err = expert_tier(capsys, *call)
        assert (status, err) == (0, "")
        document = json.loads(out)
        assert {one["name"]: one["outcome"] for one in document["checks"]}["imatrix: same counts"] == verdict
    assert not list(tmp_path.glob("data*"))


def test_imatrix_fillers_of_1_and_disagreeing_parts_are_named(tmp_path):
    path = tmp_path / "i.gguf"
    content = raw.imatrix_dump({1: [3.0, 1.0, 4.0]})
    at = content.rfind(struct.pack("<3f", 3.0, 1.0, 4.0))
    path.write_bytes(content[:at] + struct.pack("<f", 9.0) + content[at + 4 :])
    check = compare_counts(imatrix_counts(path), {1: np.array([3, 0, 4])})
    assert [one.outcome for one in check] == ["ok", "ok", "warn"]
    assert "1 experts of 1 layers stand at 1; gate, up and down differ in layers [1]" in check[2].found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<2i", 3, 26) + b"blk.0.ffn_down_exps.weight" + bytes(64), "legacy imatrix"),
        (raw.imatrix_dump({1: [3.0, 2.0]}, kind="model"), "general.type 'model'"),
        (raw.imatrix_dump({}), "no `.counts` of expert stacks"),
        (raw.imatrix_dump({1: [3.0, 2.5]}), "no count"),
        (raw.imatrix_dump({1: [3.0, 2.0], 2: [1.0, 2.0, 3.0]}), "wanted as many in each"),
        (raw.imatrix_dump({1: [3.0, 2.0]})[:-40], "i.gguf"),
    ],
)
def test_what_is_no_imatrix_with_counts_is_refused(tmp_path, content, words):
    path = tmp_path / "i.gguf"
    path.write_bytes(content)
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        imatrix_counts(path)
    assert words in str(caught.value)
