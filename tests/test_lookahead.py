"""Predictors and their scoring against brute force, by hand, and against the published values of a real trace."""

import csv
import dataclasses
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from math import floor
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.hit_rates import hit_rate
from pipeline.locality import trace_locality
from pipeline.lookahead import lookahead_recall, lookahead_tables, lru_misses, score_misses, score_plan
from pipeline.predictors import Fit, conditional, previous_token
from replayer.simulate import UnusableRequest
from replayer.trace import Trace
from schemas.columns import PHASES
from schemas.tables import TABLES
from schemas.validation import validate_table
from tests.builders import make_trace, plan_of, predictions_of
from tests.lookahead_oracles import (
    COUNTED,
    events_of,
    oracle_conditional,
    oracle_frequency,
    oracle_pairs,
    oracle_previous,
    oracle_score,
    oracle_union,
)
from tests.strategies import routing_traces, single_row_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"real traces are not at {TRACES}")


def first(steps: int) -> Fit:
    """A fit on that many steps of the trace itself."""
    return Fit(f"first {steps} steps", steps)


def several_passes(trace: Trace, passes: int) -> Trace:
    """The trace with every `passes` steps made one step of as many passes."""
    return dataclasses.replace(trace, event_step=trace.event_step // passes)


def check_recall_against_oracles(trace: Trace, fit_fraction: Fraction, depths=(1, 2, 3, 4), width_factors=(1, 2)):
    names = ("previous_token", "frequency", "conditional", "union", "oracle")
    choices = {"fit_fraction": fit_fraction, "depths": depths, "width_factors": width_factors, "names": names}
    frame = validate_table(lookahead_recall(trace, **choices), TABLES["lookahead_recall"])
    events, num_experts = events_of(trace), trace.metadata.experts_per_layer
    steps = sorted({event.step for event in events if event.phase != "warmup"})
    first_scored_step = [*steps, float("inf")][floor(fit_fraction * len(steps))]
    phase = "decode" if any(event.phase == "decode" for event in events) else "all"
    scored = [
        event.step >= first_scored_step and (event.phase == phase or (phase == "all" and event.phase != "warmup"))
        for event in events
    ]
    previous, fit = oracle_previous(events), f"first:{float(fit_fraction)}"
    perfect = [None if event.phase == "warmup" else event.experts for event in events]
    expected = {
        ("previous_token", None, 0, 1, None): previous,
        ("oracle", None, *((1, 0) if len(num_experts) > 1 else (0, 1)), None): perfect,
    }
    for width in (min(factor * trace.top_k, max(num_experts)) for factor in width_factors):
        often = oracle_frequency(events, width, num_experts, first_scored_step)
        expected["frequency", fit, None, None, width] = often
        for depth in depths:
            if depth < len(num_experts):
                named = oracle_conditional(events, depth, width, num_experts, first_scored_step)
                expected["conditional", fit, depth, 0, width] = named
                expected["union", fit, depth, 0, width] = oracle_union(previous, named)
    found = frame.partition_by(
        "predictor", "fit", "lookahead_layers", "lookahead_steps", "width", as_dict=True, maintain_order=True
    )
    assert set(found) == set(expected)
    assert set(frame["phase"]) == {phase}
    for key, rows in found.items():
        assert rows["layer_id"].to_list() == [*trace.metadata.moe_layer_ids, None]
        wanted = oracle_score(events, expected[key], scored, num_experts)
        for row, counts in zip(rows.select(COUNTED).iter_rows(named=True), wanted, strict=True):
            assert row == pytest.approx(counts, rel=1e-12)


fractions = st.sampled_from([Fraction("0.25"), Fraction("0.5"), Fraction("0.6"), Fraction("0.75")])


@settings(deadline=None, max_examples=30)
@given(routing_traces(), st.integers(1, 3), fractions)
def test_recall_is_what_its_columns_describe(trace, passes, fit_fraction):
    check_recall_against_oracles(several_passes(trace, passes), fit_fraction)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.sampled_from([False, False, False, True]),
            st.sampled_from(["decode", "decode", "prefill", "warmup"]),
        ),
        min_size=1,
        max_size=30,
    ),
    fractions,
)
def test_events_in_any_order_pair_up_inside_their_step_and_phase(drawn, fit_fraction):
    # One row per event; layers, phases and step boundaries come as they like, as passes cut short would.
    layers, experts, starts_step, phases = (list(values) for values in zip(*drawn, strict=True))
    events = np.arange(len(drawn))
    trace = dataclasses.replace(
        make_trace(np.zeros((1, 3, 1), dtype=int), num_experts=4),
        event_layer=np.array(layers, dtype=np.int32),
        event_step=np.cumsum([0, *starts_step[1:]]).astype(np.int64),
        event_phase=np.array([PHASES.index(phase) for phase in phases], dtype=np.int8),
        event_first_row=np.arange(len(drawn) + 1),
        expert_ids=np.array(experts, dtype=np.uint16)[events, np.newaxis],
    )
    check_recall_against_oracles(trace, fit_fraction)
    for depth in (1, 2):
        covered = conditional(trace, depth=depth, width=1, fit=first(0)).covered
        assert np.flatnonzero(covered).tolist() == sorted(oracle_pairs(events_of(trace), depth))


@settings(deadline=None, max_examples=50)
@given(routing_traces(), st.integers(1, 3), st.integers(1, 6), st.integers(0, 4))
def test_predictors_name_what_brute_force_names_in_the_same_order(trace, depth, width, fit_steps):
    events = events_of(trace)
    assert predictions_of(previous_token(trace)) == oracle_previous(events)
    steps = sorted({event.step for event in events if event.phase != "warmup"})
    first_scored_step = steps[fit_steps] if fit_steps < len(steps) else float("inf")
    expected = oracle_conditional(events, depth, width, trace.metadata.experts_per_layer, first_scored_step)
    assert predictions_of(conditional(trace, depth=depth, width=width, fit=first(fit_steps))) == expected


@settings(deadline=None, max_examples=50)
@given(routing_traces(all_phases=False))
def test_a_perfect_plan_has_recall_and_precision_1_and_naming_all_experts_recall_1(trace):
    scored = np.ones(len(trace.event_layer), dtype=bool)
    events, num_experts = events_of(trace), trace.metadata.experts_per_layer
    perfect = score_plan(trace, plan_of([event.experts for event in events]), scored)
    assert perfect.predicted_accesses.tolist() == perfect.accesses.tolist() == perfect.predicted_experts.tolist()
    everything = score_plan(trace, plan_of([list(range(num_experts[event.layer])) for event in events]), scored)
    assert everything.predicted_accesses.tolist() == everything.accesses.tolist()
    # Naming everything needs no skill: chance does as well.
    assert everything.chance_predicted_accesses.tolist() == everything.accesses.tolist()


@settings(deadline=None, max_examples=50)
@given(routing_traces(all_phases=False), st.data())
def test_wider_reading_of_a_plan_never_recalls_less_and_repeats_count_once(trace, data):
    events, num_experts = events_of(trace), trace.metadata.experts_per_layer
    predictions = [
        data.draw(st.none() | st.lists(st.integers(0, num_experts[event.layer] - 1), max_size=8)) for event in events
    ]
    scored = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
    scores = [score_plan(trace, plan_of(predictions), np.array(scored), width=width) for width in (0, 1, 3, 8, None)]
    for width, score in zip((0, 1, 3, 8, 8), scores, strict=True):
        cut = [None if named is None else named[:width] for named in predictions]
        for layer, counts in enumerate(oracle_score(events, cut, scored, num_experts)[:-1]):
            assert {name: getattr(score, name)[layer] for name in COUNTED} == pytest.approx(counts)
    for narrow, wide in pairwise(scores):
        assert (narrow.predicted_accesses <= wide.predicted_accesses).all()


@settings(deadline=None, max_examples=50)
@given(routing_traces(), st.integers(1, 3), st.integers(0, 4))
def test_a_prediction_does_not_depend_on_what_comes_later(trace, depth, fit_steps):
    steps = int(trace.event_step.max()) + 1
    for end in range(fit_steps, steps):
        kept = int(np.searchsorted(trace.event_step, end))
        begun = dataclasses.replace(
            trace,
            event_layer=trace.event_layer[:kept],
            event_step=trace.event_step[:kept],
            event_phase=trace.event_phase[:kept],
            event_first_row=trace.event_first_row[: kept + 1],
            expert_ids=trace.expert_ids[: trace.event_first_row[kept]],
        )
        assert predictions_of(previous_token(begun)) == predictions_of(previous_token(trace))[:kept]
        if len(set(begun.event_step[begun.event_phase != PHASES.index("warmup")])) >= fit_steps:
            plans = [conditional(one, depth=depth, width=3, fit=first(fit_steps)) for one in (begun, trace)]
            assert predictions_of(plans[0]) == predictions_of(plans[1])[:kept]


@settings(deadline=None, max_examples=50)
@given(single_row_traces())
def test_previous_token_recalls_lag_1_reuse_where_an_event_is_one_token(trace):
    scored = np.ones(len(trace.event_layer), dtype=bool)
    score = score_plan(trace, previous_token(trace), scored)
    locality = trace_locality(trace).filter(pl.col("layer_id").is_not_null())
    assert score.predicted_accesses.tolist() == locality["w1_reused_selections"].to_list()
    assert score.covered_accesses.tolist() == locality["reuse_selections"].to_list()


def test_by_hand_pairs_are_counted_ranked_and_missed():
    # k = 1, two layers. Fitted on three steps: 0 → 1, 0 → 1, 0 → 2. Scored on two: 0 → 2 and 3 → 0.
    ids = np.array([[[0], [1]], [[0], [1]], [[0], [2]], [[0], [2]], [[3], [0]]])
    trace = make_trace(ids, num_experts=4)
    plan = conditional(trace, depth=1, width=2, fit=first(3))
    # Expert 0 was followed by 1 twice and by 2 once; after 3, never seen, nothing is named but the event is covered.
    assert predictions_of(plan) == [None] * 7 + [[1, 2], None, []]
    rows = lookahead_recall(trace, depths=(1,)).filter(pl.col("predictor") == "conditional", pl.col("layer_id") == 1)
    assert rows["width"].to_list() == [1, 2]
    assert rows["events"].to_list() == rows["covered_events"].to_list() == [2, 2]
    assert rows["predicted_experts"].to_list() == [1, 2]
    assert rows["recall_all"].to_list() == [0, 1 / 2]
    assert rows["precision"].to_list() == [0, 1 / 2]
    assert rows["chance_predicted_accesses"].to_list() == [1 / 4, 2 / 4]


def test_by_hand_layers_a_plan_cannot_reach_count_as_missed():
    trace = make_trace(np.zeros((5, 3, 1), dtype=int), num_experts=2)
    rows = lookahead_recall(trace, depths=(2,), width_factors=(1,)).filter(pl.col("predictor") == "conditional")
    assert rows["covered_events"].to_list() == [0, 0, 2, 2]
    assert rows["recall_covered"].to_list() == [None, None, 1, 1]
    assert rows["recall_all"].to_list() == [0, 0, 1, 1 / 3]
    assert rows["hint_coverage"].to_list() == [0, 0, 1, 1 / 3]


def test_by_hand_shares_of_two_sources_add_up_and_ties_go_to_the_lowest_id():
    # k = 2. Fitted: {0, 1} → {2, 3} and {0, 2} → {1, 3}. Expert 0 spreads over 1, 2, 3, 3; expert 1 over 2, 3.
    ids = np.array([[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[1, 0], [0, 1]]])
    plan = conditional(make_trace(ids, num_experts=5), depth=1, width=5, fit=first(2))
    # Sums at {0, 1}: expert 3 gets 2/4 + 1/2, expert 2 gets 1/4 + 1/2, expert 1 gets 1/4; 0 and 4 were never seen.
    assert predictions_of(plan)[-1] == [3, 2, 1]
    ids = np.array([[[0, 1], [3, 2]], [[0, 1], [0, 1]], [[1, 0], [0, 1]]])
    plan = conditional(make_trace(ids, num_experts=5), depth=1, width=3, fit=first(2))
    assert predictions_of(plan)[-1] == [0, 1, 2]


def test_equal_sums_tie_whatever_the_order_they_were_added_in():
    # Ten pairs from each of the experts 0, 1, 2 give 5 the shares 1/10, 2/10, 3/10 and 3 the shares 3/10, 2/10, 1/10:
    # equal, but not in floating point.
    assert 0.1 + 0.2 + 0.3 > 0.3 + 0.2 + 0.1
    followers = {0: [5] * 1 + [3] * 3 + [6] * 6, 1: [5] * 2 + [3] * 2 + [7] * 6, 2: [5] * 3 + [3] * 1 + [8] * 6}
    fitted = [[[[source]], [[expert]]] for source, experts in followers.items() for expert in experts]
    trace = make_trace([*fitted, [[[0], [1], [2]], [[0]]]], num_experts=9)
    assert predictions_of(conditional(trace, depth=1, width=2, fit=first(30)))[-1] == [3, 5]


def test_passes_of_a_step_do_not_mix():
    # Two passes in one step, the first cut short after layer 0: layer 1 follows the second pass's layer 0.
    trace = several_passes(make_trace([[[[0]], []], [[[1]], [[2]]], [[[0]], [[3]]]], num_experts=4), 2)
    assert trace.event_step.tolist() == [0, 0, 0, 1, 1]
    assert predictions_of(conditional(trace, depth=1, width=1, fit=first(1)))[-1] == []
    seen = dataclasses.replace(trace, expert_ids=np.array([[0], [1], [2], [1], [3]], dtype=np.uint16))
    assert predictions_of(conditional(seen, depth=1, width=1, fit=first(1)))[-1] == [2]


def test_a_source_predicts_only_the_next_event_of_its_target_layer():
    # Layers 0 1 1 in one step: the second pass lost its layer 0, so nothing foresaw its layer 1.
    trace = several_passes(make_trace([[[[0]], [[0]]], [[], [[0]]]]), 2)
    assert conditional(trace, depth=1, width=1, fit=first(0)).covered.tolist() == [False, True, False]


def test_previous_token_is_told_the_whole_prefill_and_nothing_of_warm_up():
    steps = [[[[3], [3]]], [[[0], [1], [0]]], [[[1]]], [[[2]]]]
    trace = make_trace(steps, phases=["warmup", "prefill", "decode", "decode"], num_experts=4)
    assert predictions_of(previous_token(trace)) == [None, None, [0, 1], [1]]


def test_depths_beyond_the_layers_and_widths_beyond_the_experts_are_left_out():
    one_layer = lookahead_recall(make_trace(np.zeros((4, 1, 1), dtype=int)))
    # A layer alone has no layer before it; its oracle speaks at the event before.
    assert set(one_layer["predictor"]) == {"previous_token", "frequency", "oracle", "random", "popularity"}
    two_layers = lookahead_recall(make_trace(np.zeros((4, 2, 1), dtype=int), num_experts=1))
    conditionals = two_layers.filter(pl.col("predictor") == "conditional")
    assert set(conditionals.select("lookahead_layers", "width").iter_rows()) == {(1, 1)}


@pytest.mark.parametrize("fraction", [Fraction(0), Fraction(1), Fraction(-1, 2)])
def test_a_fit_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(UnusableRequest, match="0 < fraction < 1"):
        lookahead_recall(make_trace(np.zeros((2, 1, 1), dtype=int)), fit_fraction=fraction)


@pytest.mark.parametrize("asked", [{"depths": (0,)}, {"width_factors": (0,)}])
def test_a_depth_or_width_below_1_is_refused(asked):
    with pytest.raises(UnusableRequest, match="at least 1"):
        lookahead_recall(make_trace(np.zeros((2, 2, 1), dtype=int)), **asked)


def test_a_plan_of_another_trace_is_refused():
    trace = make_trace(np.zeros((2, 1, 1), dtype=int), num_experts=2)
    scored = np.ones(2, dtype=bool)
    with pytest.raises(ValueError, match="a plan for 1 events, the trace has 2"):
        score_plan(trace, plan_of([[0]]), scored)
    with pytest.raises(ValueError, match="event 1 names an expert beyond"):
        score_plan(trace, plan_of([[0], [2]]), scored)


def test_the_fit_is_named_as_simulate_reads_it():
    trace = make_trace(np.zeros((9, 2, 1), dtype=int))
    assert set(lookahead_recall(trace)["fit"]) == {None, "first:0.6"}
    assert set(lookahead_recall(trace, fit_fraction=Fraction(1, 3))["fit"]) == {None, "first:1/3"}


@needs_traces
def test_recall_of_real_routes_is_what_brute_force_counts():
    experts = np.load(TRACES / "qwen3-30b-code.npz")["experts"]
    trace = make_trace(experts[20:24, :50].transpose(1, 0, 2), num_experts=128, layer_ids=range(20, 24))
    check_recall_against_oracles(trace, Fraction("0.6"))


def qwen3_top6() -> Trace:
    """Route CSV v1: 28 prefill tokens in one pass (layer 47 has the last one only), then 128 decode steps."""
    passes: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with (TRACES / "qwen3-30b-top6.route.csv").open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            step = int(row["step"]) if row["phase"] == "1" else -1
            passes[step][int(row["layer"])][int(row["step"])].append(int(row["expert"]))
    steps = [[list(passes[step][layer].values()) for layer in range(48)] for step in sorted(passes)]
    return make_trace(steps, phases=["prefill"] + ["decode"] * (len(steps) - 1), num_experts=128)


@needs_traces
def test_previous_token_recall_of_decode_is_the_published_one():
    # numbers.md 3.2, "Previous-token predictor 38.0 %" (qwen): all 128 decode steps, the first aside, so coverage is
    # 127 of 128. With the prefill's union as the first step's prediction it is 38.3 %; the last 40 % alone give 37.6 %.
    trace = qwen3_top6()
    is_decode = trace.event_phase == PHASES.index("decode")
    plan = previous_token(trace)
    without_first = score_plan(trace, plan, is_decode & (trace.event_step > 1))
    recall = without_first.predicted_accesses.sum() / without_first.covered_accesses.sum()
    assert recall == pytest.approx(0.380, abs=5e-4)
    assert trace_locality(trace)["w1_reuse_ratio"][-1] == recall
    with_prefill = score_plan(trace, plan, is_decode)
    assert with_prefill.predicted_accesses.sum() / with_prefill.accesses.sum() == pytest.approx(0.3834, abs=5e-5)
    default = lookahead_recall(trace).row(
        by_predicate=(pl.col("predictor") == "previous_token") & pl.col("layer_id").is_null(), named=True
    )
    assert (default["phase"], default["events"]) == ("decode", 52 * 48)
    assert default["recall_all"] == pytest.approx(0.3759, abs=5e-5)


def lru_missed(trace: Trace, capacity: int) -> list[set[int]]:
    """Per event what a list in order of use does not hold when the event begins, over all layers together."""
    stack: list[tuple[int, int]] = []
    missed = []
    for event in events_of(trace):
        experts = [] if event.phase == "warmup" else event.experts
        missed.append({expert for expert in experts if (event.layer, expert) not in stack[:capacity]})
        for expert in experts:
            stack = [(event.layer, expert), *(one for one in stack if one != (event.layer, expert))]
    return missed


@settings(deadline=None, max_examples=40)
@given(routing_traces(), st.integers(1, 12), st.data())
def test_recall_on_misses_is_what_a_list_in_order_of_use_misses(trace, capacity, data):
    events, num_experts = events_of(trace), trace.metadata.experts_per_layer
    missed = lru_missed(trace, capacity)
    predictions = [
        data.draw(st.none() | st.lists(st.integers(0, num_experts[event.layer] - 1), max_size=5, unique=True))
        for event in events
    ]
    scored = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
    cache = lru_misses(trace, capacity_experts_total=capacity)
    found = score_misses(trace, plan_of(predictions), cache, np.array(scored), width=3)
    chosen = [at for at, counts in enumerate(scored) if counts]
    assert found["misses"] == sum(len(missed[at]) for at in chosen)
    named = {at: set((predictions[at] or [])[:3]) for at in chosen}
    assert found["predicted_misses"] == sum(len(missed[at] & named[at]) for at in chosen)
    expected = sum(len(missed[at]) * len(named[at]) / num_experts[events[at].layer] for at in chosen)
    assert found["chance_predicted_misses"] == pytest.approx(expected)


def test_misses_are_those_of_the_table_of_hit_rates():
    generator = np.random.default_rng(3)
    ids = np.array([[generator.permutation(16)[:2] for _ in range(3)] for _ in range(60)])
    trace = make_trace(ids, num_experts=16)
    missed = validate_table(lookahead_tables(trace)[1], TABLES["lookahead_recall_missed"])
    rates = hit_rate(trace)[0].filter(
        pl.col("policy") == "lru", pl.col("scope") == "global", pl.col("semantics") == "event_atomic"
    )
    shared = ["policy", "scope", "semantics", "access_order", "capacity_experts_total", "warm_steps", "phase"]
    joined = missed.join(rates, on=shared, suffix="_of_rates")
    assert joined.height == missed.height > 0
    assert joined.select((pl.col("misses") == pl.col("misses_of_rates")).all()).item()
    assert joined.select((pl.col("accesses") == pl.col("accesses_of_rates")).all()).item()
    # An LRU that holds an event of every layer never misses what the event before named.
    assert joined.filter(predictor="previous_token", capacity_experts_total=24)["predicted_misses"].to_list() == [0]
    assert set(joined.filter(predictor="oracle")["recall_missed"]) == {1}


def test_all_predictors_stand_in_the_table_with_their_nulls():
    ids = np.array([[[step % 4], [(step * 3 + 1) % 4]] for step in range(40)])
    trace = make_trace(ids, num_experts=4)
    everything = [None, *([[0]] * 79)]
    table = validate_table(
        lookahead_recall(trace, recorded_plan=plan_of(everything), seed=5), TABLES["lookahead_recall"]
    )
    totals = table.filter(pl.col("layer_id").is_null())
    assert totals["predictor"].unique(maintain_order=True).to_list() == [
        "previous_token", "frequency", "conditional", "union", "learned", "recorded", "oracle", "random", "popularity",
    ]  # fmt: skip
    assert set(totals["seed"]) == {5}
    told = totals.select("predictor", "fit", "lookahead_layers", "lookahead_steps").unique().rows()
    assert set(told) == {
        ("previous_token", None, 0, 1), ("frequency", "first:0.6", None, None), ("conditional", "first:0.6", 1, 0),
        ("union", "first:0.6", 1, 0), ("learned", "first:0.6", 1, 0), ("recorded", None, None, None),
        ("oracle", None, 1, 0), ("random", None, None, None), ("popularity", "first:0.6", None, None),
    }  # fmt: skip
    # A step tells the next layer all here, and the layer's popularity nothing; a plan that says the same at all times
    # is its own shuffled null.
    by_name = {row["predictor"]: row for row in totals.filter(pl.col("width").fill_null(1) == 1).to_dicts()}
    for name in ("conditional", "learned"):
        assert by_name[name]["recall_covered"] == 1
        assert by_name[name]["shuffled_recall_all"] < 0.5
    assert by_name["recorded"]["shuffled_predicted_accesses"] == by_name["recorded"]["predicted_accesses"] == 8
    assert by_name["random"]["chance_recall_all"] == 1 / 4
