"""Locality figures against brute force, by hand, and against the published values of real traces."""

import dataclasses
import json
import statistics
from collections import Counter
from fractions import Fraction
from math import log
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pipeline.locality import domain_overlap, events_of_phase, trace_locality
from replayer.trace import Trace
from schemas.tables import TABLES
from schemas.trace import PHASE_CODES
from schemas.validation import validate_table
from tests.builders import make_trace
from tests.strategies import routing_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"real traces are not at {TRACES}")

WINDOWS = (1, 8, 64)
ADDED_UP = [
    column.name
    for column in TABLES["trace_locality"].columns
    if column.ratio is None and column.name not in ("trace_id", "phase", "layer_id", "seed", "zipf_alpha")
]


def total(frame: pl.DataFrame) -> dict[str, object]:
    return frame.row(by_predicate=pl.col("layer_id").is_null(), named=True)


def by_layer(frame: pl.DataFrame) -> list[dict[str, object]]:
    return list(frame.filter(pl.col("layer_id").is_not_null()).iter_rows(named=True))


def tokens_of_layers(trace: Trace) -> tuple[str, list[list[list[int]]]]:
    """The scored phase and, per layer, its tokens' expert ids, in plain lists."""
    names = {code: name for name, code in PHASE_CODES.items()}
    phases = [names[code] for code in trace.event_phase.tolist()]
    phase = "decode" if "decode" in phases else "all"
    layers: list[list[list[int]]] = [[] for _ in trace.metadata.moe_layer_ids]
    for event, layer in enumerate(trace.event_layer.tolist()):
        if phases[event] == phase or (phase == "all" and phases[event] != "warmup"):
            layers[layer] += trace.expert_ids[trace.event_first_row[event] : trace.event_first_row[event + 1]].tolist()
    return phase, layers


def oracle_reused(tokens: list[list[int]], window: int) -> int:
    return sum(
        any(expert in earlier for earlier in tokens[max(0, place - window) : place])
        for place, token in enumerate(tokens)
        for expert in token
    )


def oracle_alpha(counts: list[int]) -> float | None:
    descending = sorted((count for count in counts if count), reverse=True)
    if len(descending) < 2:
        return None
    ranks = range(1, len(descending) + 1)
    return -statistics.linear_regression([log(rank) for rank in ranks], [log(count) for count in descending]).slope


def oracle_layer(tokens: list[list[int]], num_experts: int, seed: int) -> dict[str, object]:
    """The columns that add up over layers, from their descriptions."""
    counts = Counter(expert for token in tokens for expert in token)
    shuffled = [tokens[place] for place in np.random.default_rng(seed).permutation(len(tokens))]
    carried, working_set = 0, 0
    for _, count in counts.most_common():
        if carried < Fraction("0.95") * counts.total():
            carried, working_set = carried + count, working_set + 1
    return {
        "tokens": len(tokens),
        "selections": counts.total(),
        "reuse_selections": sum(len(token) for token in tokens[1:]),
        **{f"w{window}_reused_selections": oracle_reused(tokens, window) for window in WINDOWS},
        **{f"w{window}_shuffled_reused_selections": oracle_reused(shuffled, window) for window in WINDOWS},
        "chance_numerator": float(sum(Fraction(count, len(tokens)) ** 2 for count in counts.values())),
        "chance_denominator": float(sum(Fraction(count, len(tokens)) for count in counts.values())),
        "uniform_denominator": len(tokens) * num_experts,
        "top8_selections": sum(count for _, count in counts.most_common(8)),
        "distinct_experts": len(counts),
        "pool_experts": num_experts,
        "working_set_95_experts": working_set,
    }


@settings(deadline=None, max_examples=30)
@given(routing_traces(), st.integers(0, 3))
def test_locality_is_what_its_columns_describe(trace, seed):
    frame = validate_table(trace_locality(trace, seed=seed), TABLES["trace_locality"])
    phase, layers = tokens_of_layers(trace)
    expected = [
        oracle_layer(tokens, num_experts, seed)
        for tokens, num_experts in zip(layers, trace.metadata.experts_per_layer, strict=True)
    ]
    expected.append({name: sum(layer[name] for layer in expected) for name in expected[0]})
    assert frame["layer_id"].to_list() == [*trace.metadata.moe_layer_ids, None]
    assert set(frame["phase"]) == {phase}
    assert set(frame["seed"]) == {seed}
    for row, wanted in zip(frame.iter_rows(named=True), expected, strict=True):
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    counts = [[sum(expert in token for token in tokens) for expert in range(6)] for tokens in layers]
    alphas = [oracle_alpha(of_layer) for of_layer in counts] + [oracle_alpha([n for one in counts for n in one])]
    assert frame["zipf_alpha"].to_list() == pytest.approx(alphas, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(routing_traces())
def test_the_total_row_adds_up_the_layers_and_wider_windows_reuse_more(trace):
    frame = trace_locality(trace)
    sums = frame.filter(pl.col("layer_id").is_not_null()).select(pl.col(ADDED_UP).sum()).row(0, named=True)
    assert {name: total(frame)[name] for name in ADDED_UP} == pytest.approx(sums)
    for kind in ("reused_selections", "shuffled_reused_selections"):
        assert (frame[f"w1_{kind}"] <= frame[f"w8_{kind}"]).all()
        assert (frame[f"w8_{kind}"] <= frame[f"w64_{kind}"]).all()


def renamed_experts(trace: Trace, random) -> Trace:
    """The trace with the experts of each layer renamed, a permutation of its ids."""
    new_names = [random.sample(range(experts), experts) for experts in trace.metadata.experts_per_layer]
    expert_ids = trace.expert_ids.copy()
    for event, layer in enumerate(trace.event_layer.tolist()):
        rows = slice(trace.event_first_row[event], trace.event_first_row[event + 1])
        expert_ids[rows] = np.array(new_names[layer])[trace.expert_ids[rows]]
    return dataclasses.replace(trace, expert_ids=expert_ids)


@settings(deadline=None, max_examples=50)
@given(routing_traces(), st.randoms(use_true_random=False))
def test_renaming_experts_changes_nothing(trace, random):
    assert_frame_equal(trace_locality(renamed_experts(trace, random)), trace_locality(trace), abs_tol=1e-9)


@settings(deadline=None, max_examples=50)
@given(routing_traces(all_phases=False, max_rows=1, layers_may_rest=False), st.randoms(use_true_random=False))
def test_shuffling_tokens_leaves_popularity_alone(trace, random):
    num_layers = len(trace.metadata.moe_layer_ids)
    steps = trace.expert_ids.reshape(-1, num_layers, trace.top_k)
    shuffled = dataclasses.replace(
        trace, expert_ids=steps[random.sample(range(len(steps)), len(steps))].reshape(-1, trace.top_k)
    )
    unordered = [name for name in trace_locality(trace).columns if not name.startswith(("w1_", "w8_", "w64_"))]
    assert_frame_equal(trace_locality(shuffled).select(unordered), trace_locality(trace).select(unordered))


def test_by_hand_reuse_chance_and_working_set_of_a_b_c_a():
    # One layer of four experts, k = 1, tokens 0 1 2 0: the last 0 was used three tokens before.
    row = total(trace_locality(make_trace(np.array([[[0]], [[1]], [[2]], [[0]]]), num_experts=4)))
    assert (row["tokens"], row["selections"], row["reuse_selections"]) == (4, 4, 3)
    assert (row["w1_reused_selections"], row["w8_reused_selections"], row["w64_reused_selections"]) == (0, 1, 1)
    assert row["chance_ratio"] == (1 / 4 + 1 / 16 + 1 / 16) / 1
    assert row["uniform_ratio"] == 1 / 4
    # 95 % of four selections is 3.8, so all three experts that occur are needed.
    assert (row["working_set_95_experts"], row["working_set_95_ratio"], row["coverage_ratio"]) == (3, 3 / 4, 3 / 4)


def test_95_percent_is_reached_exactly_not_by_rounding():
    for first, second, experts in [(19, 1, 1), (949, 51, 2), (950, 50, 1)]:
        ids = np.array([0] * first + [1] * second).reshape(-1, 1, 1)
        assert total(trace_locality(make_trace(ids)))["working_set_95_experts"] == experts


def test_the_total_alpha_pools_counts_instead_of_averaging_layers():
    # Layer 0 selects one expert only (no slope of its own), layer 1 two experts 3 and 1 times.
    ids = np.array([[[0], [0]], [[0], [0]], [[0], [0]], [[0], [1]]])
    frame = trace_locality(make_trace(ids, num_experts=2))
    assert frame["zipf_alpha"].to_list() == pytest.approx([None, log(3) / log(2), oracle_alpha([4, 3, 1])])


def test_only_decode_rows_count_where_there_are_any_and_warm_up_never_does():
    ids = np.array([[[0]], [[0]], [[1]], [[2]], [[2]]])
    phases = ["warmup", "prefill", "prefill", "decode", "decode"]
    decode = trace_locality(make_trace(ids, phases=phases, num_experts=3))
    assert total(decode)["phase"] == "decode"
    assert (total(decode)["tokens"], total(decode)["w1_reuse_ratio"]) == (2, 1.0)
    prompt = trace_locality(make_trace(ids[:3], phases=phases[:3], num_experts=3))
    assert total(prompt)["phase"] == "all"
    assert (total(prompt)["tokens"], total(prompt)["w1_reuse_ratio"]) == (2, 0.0)


def test_a_layer_without_scored_rows_has_zeros_and_null_ratios():
    trace = make_trace([[[[0]], [[1]]], [[[0]], []]], phases=["prefill", "decode"], num_experts=2)
    row = by_layer(validate_table(trace_locality(trace), TABLES["trace_locality"]))[1]
    assert (row["tokens"], row["selections"], row["distinct_experts"], row["working_set_95_experts"]) == (0, 0, 0, 0)
    assert [row[name] for name in ("w1_reuse_ratio", "chance_ratio", "uniform_ratio", "zipf_alpha")] == [None] * 4
    assert row["coverage_ratio"] == 0.0


def test_an_unknown_phase_is_named():
    with pytest.raises(ValueError, match=r"warmup.*prefill, decode, unknown, all"):
        events_of_phase(make_trace(np.zeros((1, 1, 1), dtype=int)), "warmup")


def oracle_top(tokens: list[list[int]], size: int) -> set[int]:
    counts = Counter(expert for token in tokens for expert in token)
    return set(sorted(counts, key=lambda expert: (-counts[expert], expert))[:size])


@settings(deadline=None, max_examples=30)
@given(routing_traces(all_phases=False), st.randoms(use_true_random=False))
def test_overlap_is_the_jaccard_of_the_top_sets(trace, random):
    metadata = trace.metadata.model_copy(update={"trace_id": "other"})
    other = dataclasses.replace(renamed_experts(trace, random), metadata=metadata)
    sizes = (1, 2, 4)
    frame = validate_table(domain_overlap(trace, other, top_experts=sizes), TABLES["domain_overlap"])
    assert_frame_equal(domain_overlap(other, trace, top_experts=sizes), frame)
    assert set(frame.select("trace_id", "other_trace_id").iter_rows()) == {("other", "tiny")}
    pairs = list(zip(tokens_of_layers(trace)[1], tokens_of_layers(other)[1], strict=True))
    for size in sizes:
        expected = [
            (len(mine & theirs), len(mine | theirs))
            for mine, theirs in ((oracle_top(one, size), oracle_top(two, size)) for one, two in pairs)
        ]
        expected.append((sum(shared for shared, _ in expected), sum(joint for _, joint in expected)))
        rows = frame.filter(pl.col("top_experts") == size)
        assert rows["layer_id"].to_list() == [*trace.metadata.moe_layer_ids, None]
        assert list(rows.select("shared_experts", "joint_experts").iter_rows()) == expected


def test_overlap_by_hand_breaks_ties_to_the_lowest_id_and_never_pads():
    # Counts 1 1 1 against 0 1 1: the top two are {0, 1} and {1, 2}; the top eight {0, 1, 2} and {1, 2}.
    first = make_trace(np.array([[[2]], [[1]], [[0]]]), num_experts=3, trace_id="a")
    second = make_trace(np.array([[[2]], [[1]]]), num_experts=3, trace_id="b")
    rows = domain_overlap(second, first, top_experts=(2, 8)).filter(pl.col("layer_id").is_null())
    assert list(rows.select("trace_id", "top_experts", "shared_experts", "joint_experts").iter_rows()) == [
        ("a", 2, 1, 3),
        ("a", 8, 2, 3),
    ]
    # By chance: 2 of 3 experts against 2 of 3 share 4/3, 3 of 3 against 2 share 2.
    assert rows["chance_shared_experts"].to_list() == [pytest.approx(4 / 3), pytest.approx(2)]


def test_overlap_falls_back_to_all_rows_unless_both_traces_decode():
    ids = np.array([[[0]], [[1]]])
    first = make_trace(ids, phases=["prefill", "decode"], trace_id="a")
    second = make_trace(ids, phases=["prefill", "prefill"], trace_id="b")
    assert set(domain_overlap(first, second)["phase"]) == {"all"}
    third = make_trace(ids, phases=["prefill", "decode"], trace_id="c")
    both = domain_overlap(first, third, top_experts=(1,))
    assert set(both["phase"]) == {"decode"}
    assert total(both)["jaccard_ratio"] == 1.0


@pytest.mark.parametrize(
    "other",
    [
        make_trace(np.zeros((1, 1, 1), dtype=int), num_experts=4, trace_id="b"),
        make_trace(np.zeros((1, 1, 1), dtype=int), num_experts=3, layer_ids=[1], trace_id="b"),
        make_trace(np.zeros((1, 1, 1), dtype=int), num_experts=3, trace_id="a"),
    ],
    ids=["other experts", "other layers", "same trace"],
)
def test_traces_that_do_not_compare_have_no_overlap(other):
    frame = domain_overlap(make_trace(np.zeros((1, 1, 1), dtype=int), num_experts=3, trace_id="a"), other)
    assert frame.is_empty()
    validate_table(frame, TABLES["domain_overlap"])


def qwen3(name: str, num_tokens: int | None = None) -> Trace:
    """npz `experts` int16 (L, T, k), one step per token; its 48 layers have 128 experts each."""
    experts = np.load(TRACES / f"qwen3-30b-{name}.npz")["experts"]
    return make_trace(experts.transpose(1, 0, 2)[:num_tokens], num_experts=128, trace_id=name)


@needs_traces
@pytest.mark.parametrize(
    ("name", "lag_1", "chance", "working_set", "distinct"),
    # numbers.md 3.1, "All 48 layers, full 8,000 tokens"; recomputed there from the public traces.
    [("code", 0.4741, 0.2764, 0.4933, 5727), ("math", 0.3959, 0.1960, 0.5649, 5754)],
)
def test_full_qwen3_traces_show_the_published_locality(name, lag_1, chance, working_set, distinct):
    frame = validate_table(trace_locality(qwen3(name)), TABLES["trace_locality"])
    row = total(frame)
    assert row["w1_reuse_ratio"] == pytest.approx(lag_1, abs=5e-5)
    assert row["chance_ratio"] == pytest.approx(chance, abs=5e-5)
    assert row["working_set_95_ratio"] == pytest.approx(working_set, abs=5e-5)
    assert row["distinct_experts"] == distinct
    assert (row["tokens"], row["pool_experts"], row["uniform_ratio"]) == (48 * 8000, 48 * 128, 8 / 128)
    # Shuffled tokens repeat by chance alone; seeds agree to about 3e-3 (numbers.md 3.1, on shuffling).
    assert row["w1_shuffled_ratio"] == pytest.approx(row["chance_ratio"], abs=3e-3)


@needs_traces
@pytest.mark.parametrize(
    ("name", "w_1", "w_64", "top_8", "alpha"),
    # numbers.md 3.0, the first 400 tokens, printed to these digits.
    [("code", 0.458, 0.952, 0.379, 1.15), ("math", 0.400, 0.946, 0.359, 1.15)],
)
def test_400_tokens_of_qwen3_show_the_published_locality(name, w_1, w_64, top_8, alpha):
    row = total(trace_locality(qwen3(name, 400)))
    assert row["w1_reuse_ratio"] == pytest.approx(w_1, abs=5e-4)
    assert row["w64_reuse_ratio"] == pytest.approx(w_64, abs=5e-4)
    assert row["top8_share"] == pytest.approx(top_8, abs=5e-4)
    assert row["zipf_alpha"] == pytest.approx(alpha, abs=5e-3)


@needs_traces
def test_code_and_math_share_few_hot_experts():
    # numbers.md 3.0, "domain Jaccard": ranges over the pairs of four domains, mean over layers, first 400 tokens.
    frame = validate_table(domain_overlap(qwen3("code", 400), qwen3("math", 400)), TABLES["domain_overlap"])
    means = {
        size: rows["jaccard_ratio"].mean()
        for (size,), rows in frame.filter(pl.col("layer_id").is_not_null()).group_by("top_experts")
    }
    assert 0.003 <= means[8] <= 0.102
    assert 0.025 <= means[16] <= 0.184
    assert means[32] == pytest.approx(0.123, abs=5e-4)


@needs_traces
def test_olmoe_shows_the_published_lag_1_reuse():
    # numbers.md 3.3: 43.5 % published, .4352 recomputed.
    lines = (TRACES / "olmoe-299.jsonl").read_text().splitlines()
    ids = np.array([json.loads(line)["layers"] for line in lines])
    assert total(trace_locality(make_trace(ids, num_experts=64)))["w1_reuse_ratio"] == pytest.approx(0.4352, abs=5e-5)
