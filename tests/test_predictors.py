"""Each predictor against brute force or by hand, when it speaks, what it learns from, and what a null must not know."""

import dataclasses
import re
import tracemalloc
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.locality import trace_locality
from pipeline.lookahead import score_plan
from pipeline.predictors import (
    Fit,
    _name_likeliest,
    _pair_counts,
    conditional,
    first_part,
    frequency,
    learned,
    narrowed,
    oracle,
    parse_fit,
    popularity,
    previous_token,
    random,
    recorded,
    shuffled,
    union,
)
from replayer.plan import BEFORE_ALL, Plan, first_misfit
from replayer.simulate import UnusableRequest
from replayer.trace import MalformedTrace, Trace, events_of_phase, read_trace
from schemas.columns import PHASES
from tests.builders import canonical_table, make_trace, plan_of, predictions_of, write_trace
from tests.lookahead_oracles import events_of, oracle_frequency, oracle_pairs, oracle_previous, oracle_union
from tests.strategies import routing_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"real traces are not at {TRACES}")

WARMUP = PHASES.index("warmup")


def first(steps: int) -> Fit:
    return Fit(f"first {steps} steps", steps)


def every_plan(trace: Trace, fit: Fit, depth: int, width: int) -> dict[str, Plan]:
    plans = {
        "previous_token": previous_token(trace),
        "frequency": frequency(trace, width=width, fit=fit),
        "conditional": conditional(trace, depth=depth, width=width, fit=fit),
        "learned": learned(trace, depth=depth, width=width, fit=fit),
        "oracle": oracle(trace, depth=depth),
        "random": random(trace, width=width),
        "popularity": popularity(trace, width=width, fit=fit),
    }
    plans["union"] = union(plans["previous_token"], plans["conditional"])
    return plans | {f"{name}, shuffled": shuffled(plan, trace) for name, plan in plans.items()}


@settings(deadline=None, max_examples=24)
@given(routing_traces(), st.integers(0, 5), st.integers(1, 3), st.integers(1, 7))
def test_every_plan_fits_its_trace_and_is_issued_before_its_target(trace, fit_steps, depth, width):
    warm = trace.event_phase == WARMUP
    for name, plan in every_plan(trace, first(fit_steps), depth, width).items():
        assert first_misfit(plan, trace) is None, name
        assert not plan.covered[warm].any(), name
        assert (plan.issued_after[~plan.covered] == BEFORE_ALL).all(), name


@settings(deadline=None, max_examples=24)
@given(routing_traces(), st.integers(0, 5), st.integers(1, 3), st.integers(1, 7))
def test_predictors_speak_at_the_event_they_know(trace, fit_steps, depth, width):
    events = events_of(trace)
    pairs = oracle_pairs(events, depth)
    plans = every_plan(trace, first(fit_steps), depth, width)
    before = [
        max(
            (one for one in range(at) if events[one].layer == event.layer and events[one].phase != "warmup"), default=-1
        )
        for at, event in enumerate(events)
    ]
    for at, event in enumerate(events):
        if event.phase == "warmup":
            continue
        assert plans["previous_token"].issued_after[at] == before[at]
        assert plans["oracle"].issued_after[at] == pairs.get(at, at - 1)
        assert plans["random"].issued_after[at] == BEFORE_ALL
        for name in ("conditional", "learned"):
            assert plans[name].covered[at] == (at in pairs and plans["frequency"].covered[at])
            assert plans[name].issued_after[at] == (pairs[at] if plans[name].covered[at] else BEFORE_ALL)
        later = max(before[at], pairs[at] if plans["conditional"].covered[at] else -1)
        assert plans["union"].issued_after[at] == later


@settings(deadline=None, max_examples=24)
@given(routing_traces(), st.integers(0, 5), st.integers(1, 3), st.integers(1, 7))
def test_frequency_union_and_oracle_are_brute_forces(trace, fit_steps, depth, width):
    events, num_experts = events_of(trace), trace.metadata.experts_per_layer
    steps = sorted({event.step for event in events if event.phase != "warmup"})
    first_scored = steps[fit_steps] if fit_steps < len(steps) else float("inf")
    plan = frequency(trace, width=width, fit=first(fit_steps))
    assert predictions_of(plan) == oracle_frequency(events, width, num_experts, first_scored)
    # Known once the fitted steps are over, and covering only what comes after them.
    fitted = [at for at, event in enumerate(events) if event.step < first_scored]
    assert set(plan.issued_after[plan.covered]) <= {fitted[-1] if fitted else BEFORE_ALL}
    narrow = conditional(trace, depth=depth, width=width, fit=first(fit_steps))
    both = union(previous_token(trace), narrow)
    assert predictions_of(both) == oracle_union(oracle_previous(events), predictions_of(narrow))
    perfect = oracle(trace, depth=depth)
    assert predictions_of(perfect) == [None if event.phase == "warmup" else event.experts for event in events]


@settings(deadline=None, max_examples=24)
@given(routing_traces(), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
def test_a_narrower_plan_is_the_beginning_of_a_wider_one(trace, depth, narrow, more):
    fit = first(1)
    for make in (
        lambda width: frequency(trace, width=width, fit=fit),
        lambda width: conditional(trace, depth=depth, width=width, fit=fit),
        lambda width: popularity(trace, width=width, fit=fit),
        lambda width: random(trace, width=width),
    ):
        assert predictions_of(narrowed(make(narrow + more), width=narrow)) == predictions_of(make(narrow))


@settings(deadline=None, max_examples=24)
@given(routing_traces(), st.integers(1, 7), st.integers(0, 3))
def test_draws_are_an_events_own_and_of_its_layer(trace, width, seed):
    plan = predictions_of(random(trace, width=width, seed=seed))
    counts = [set(range(experts)) for experts in trace.metadata.experts_per_layer]
    for event, named in zip(events_of(trace), plan, strict=True):
        if named is not None:
            assert len(named) == len(set(named)) == min(width, len(counts[event.layer]))
            assert set(named) <= counts[event.layer]
    # What comes later does not change what was drawn.
    kept = len(plan) // 2 + 1
    begun = dataclasses.replace(
        trace,
        event_layer=trace.event_layer[:kept],
        event_step=trace.event_step[:kept],
        event_phase=trace.event_phase[:kept],
        event_first_row=trace.event_first_row[: kept + 1],
    )
    assert predictions_of(random(begun, width=width, seed=seed)) == plan[:kept]


def test_the_nulls_hit_what_chance_expects():
    # 3,000 events of one expert of 8, skewed 8 : 4 : 2 : 1 : 1 in the fitted and in the scored part.
    ids = np.tile(np.repeat([0, 1, 2, 3, 4], [8, 4, 2, 1, 1]), 250)[:, np.newaxis, np.newaxis]
    trace = make_trace(ids, num_experts=8)
    scored = np.ones(len(ids), dtype=bool)
    for width in (1, 3):
        score = score_plan(trace, random(trace, width=width, seed=7), scored)
        assert score.chance_predicted_accesses.sum() == pytest.approx(len(ids) * width / 8)
        assert score.predicted_accesses.sum() == pytest.approx(len(ids) * width / 8, rel=0.1)
    fit = first(1600)
    score = score_plan(trace, popularity(trace, width=1, fit=fit), scored)
    # A draw by popularity meets itself with Σ p²: (64 + 16 + 4 + 1 + 1) ÷ 16².
    assert score.predicted_accesses.sum() / score.covered_accesses.sum() == pytest.approx(86 / 256, rel=0.1)
    named = [named for named in predictions_of(popularity(trace, width=8, fit=fit)) if named is not None]
    assert {frozenset(one) for one in named} == {frozenset(range(5))}
    assert np.mean([one[0] == 0 for one in named]) == pytest.approx(1 / 2, abs=0.04)


@settings(deadline=None, max_examples=24)
@given(routing_traces(), st.integers(0, 3), st.data())
def test_shuffling_permutes_predictions_within_a_layer(trace, seed, data):
    plan = previous_token(trace)
    among = np.array(data.draw(st.lists(st.booleans(), min_size=len(plan.covered), max_size=len(plan.covered))))
    null = shuffled(plan, trace, seed=seed, among=among)
    assert null.covered.tolist() == plan.covered.tolist()
    assert null.issued_after.tolist() == plan.issued_after.tolist()
    before, after = predictions_of(plan), predictions_of(null)
    for layer in range(len(trace.metadata.moe_layer_ids)):
        moved = np.flatnonzero(among & plan.covered & (trace.event_layer == layer))
        assert sorted(before[at] for at in moved) == sorted(after[at] for at in moved)
    assert all(before[at] == after[at] for at in np.flatnonzero(~among))


def test_a_regression_learns_what_a_table_of_shares_cannot():
    # The target is 0 if both 0 and 1 are in the source, else 1: pairs of causes that a sum of shares blurs.
    generator = np.random.default_rng(0)
    sources = np.array([generator.permutation(4)[:2] for _ in range(600)])
    both = np.isin(sources, [0, 1]).all(1)
    targets = np.stack([np.where(both, 0, 1), np.where(both, 2, 3)], axis=1)
    trace = make_trace(np.stack([sources, targets], axis=1), num_experts=4)
    fit = first_part(trace, Fraction(1, 2))
    plan = learned(trace, depth=1, width=2, fit=fit)
    score = score_plan(trace, plan, plan.covered)
    assert score.predicted_accesses.sum() == score.covered_accesses.sum() == 600
    again = learned(trace, depth=1, width=2, fit=fit)
    assert predictions_of(again) == predictions_of(plan)


def test_the_union_names_the_previous_tokens_experts_first_and_each_once():
    both = union(plan_of([None, [3, 1], [2], None]), plan_of([None, [1, 0], None, []]))
    assert predictions_of(both) == [None, [3, 1, 0], [2], []]


def with_predictions(trace: Trace, path: Path, predictions: list[list[int] | None]) -> Path:
    """A trace file with that recorded for each row."""
    table = canonical_table(trace)
    place = table.schema.get_field_index("predicted_expert_ids")
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(predictions, field.type)), path)
    return path


def test_recorded_predictions_are_united_over_the_rows_of_an_event(tmp_path):
    trace = make_trace([[[[0], [1]], [[2]]], [[[3]], [[0], [0]]]], num_experts=4)
    path = with_predictions(trace, tmp_path / "a.parquet", [[3, 1], [1, 0], None, [], [2], None])
    plan = recorded(path, read_trace(path))
    assert predictions_of(plan) == [[3, 1, 0], None, [], [2]]
    assert plan.issued_after.tolist() == [-1, -1, 1, 2]
    assert first_misfit(plan, trace) is None


def test_a_file_without_predictions_has_no_recorded_plan(tmp_path):
    trace = make_trace(np.zeros((3, 2, 1), dtype=int))
    assert recorded(write_trace(trace, tmp_path / "a.parquet"), trace) is None


def test_a_recorded_expert_that_the_layer_does_not_have_is_refused(tmp_path):
    trace = make_trace(np.zeros((2, 2, 1), dtype=int), num_experts=[2, 4], layer_ids=[5, 7])
    path = with_predictions(trace, tmp_path / "a.parquet", [[1], [3], [3], [9]])
    with pytest.raises(MalformedTrace, match=re.escape("event 2: expert 3, wanted below the 2 of layer 5")):
        recorded(path, trace)


def test_a_fit_on_another_trace_covers_everything_and_is_known_before_all():
    mine = make_trace(np.array([[[0], [1]], [[2], [3]]]), num_experts=4)
    other = make_trace(np.array([[[0], [2]], [[0], [2]], [[2], [0]]]), num_experts=4, trace_id="other")
    fit = parse_fit("other", mine, {"other": other}.__getitem__)
    assert (fit.text, fit.steps, fit.other) == ("other", 3, other)
    plan = conditional(mine, depth=1, width=2, fit=fit)
    assert predictions_of(plan) == [None, [2], None, [0]]
    often = frequency(mine, width=1, fit=fit)
    assert predictions_of(often) == [[0], [2], [0], [2]]
    assert set(often.issued_after) == {BEFORE_ALL}
    part = parse_fit("other:first:0.7", mine, {"other": other}.__getitem__)
    assert (part.text, part.steps) == ("other:first:0.7", 2)
    assert predictions_of(conditional(mine, depth=1, width=2, fit=part)) == [None, [2], None, []]
    assert predictions_of(learned(mine, depth=1, width=1, fit=fit)) == [None, [2], None, [0]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("first:0", "wanted first:F with 0 < F < 1"),
        ("first:1", "wanted first:F with 0 < F < 1"),
        ("first:half", "wanted first:F with 0 < F < 1"),
        ("otherfirst:0.5", "wanted first:F with 0 < F < 1"),
        ("first:0.1", "of 2 steps is no step at all"),
        ("tiny", "is the predicted trace itself"),
        ("fewer layers", "1 layers, the trace has 2"),
        ("other layers", "layer 7 where the trace has 1"),
        ("other experts", "layer 1 has 5 experts, in the trace 4"),
    ],
)
def test_a_fit_that_does_not_match_is_refused(text, said):
    trace = make_trace(np.zeros((2, 2, 1), dtype=int), num_experts=4)
    known = {
        "tiny": trace,
        "fewer layers": make_trace(np.zeros((2, 1, 1), dtype=int), num_experts=4, trace_id="a"),
        "other layers": make_trace(np.zeros((2, 2, 1), dtype=int), num_experts=4, layer_ids=[0, 7], trace_id="b"),
        "other experts": make_trace(np.zeros((2, 2, 1), dtype=int), num_experts=[4, 5], trace_id="c"),
    }
    with pytest.raises(UnusableRequest, match=re.escape(said)):
        parse_fit(text, trace, known.__getitem__)


def test_a_width_beyond_all_experts_names_them_all_and_takes_no_more_memory():
    trace = make_trace(np.random.default_rng(0).integers(0, 8, (6, 2, 1)), num_experts=[8, 4])
    wide, all_of_them = every_plan(trace, first(3), 1, 2**31 - 1), every_plan(trace, first(3), 1, 8)
    for name, plan in wide.items():
        assert predictions_of(plan) == predictions_of(all_of_them[name])


@pytest.mark.parametrize("wrong", [{"width": 0}, {"depth": 0}])
def test_a_width_or_depth_below_1_is_refused(wrong):
    trace = make_trace(np.zeros((2, 2, 1), dtype=int))
    asked = {"depth": 1, "width": 1, "fit": first(1)} | wrong
    for predictor in (conditional, learned):
        with pytest.raises(UnusableRequest, match="at least 1"):
            predictor(trace, **asked)


def test_tables_of_92_layers_of_896_experts_stay_within_a_gibibyte():
    ids = np.stack([np.random.default_rng(step).permuted(np.tile(np.arange(896), (92, 1)), axis=1)[:, :8]
                    for step in range(6)])  # fmt: skip
    trace = make_trace(ids, num_experts=896)
    conditional(make_trace(np.zeros((2, 2, 1), dtype=int)), depth=1, width=16, fit=first(1))
    tracemalloc.start()
    plan = conditional(trace, depth=1, width=16, fit=first(4))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.covered.sum() == 2 * 91
    # All tables at once would take 92 × 896² × 4 bytes, 282 MiB of counts; one a thread is 9.6 MB with its shares.
    # Arrays that compiled loops make are not seen by tracemalloc; a thread has one table of each kind at a time.
    table = _pair_counts(np.array([0]), np.array([1]), trace.expert_ids, trace.event_first_row, 896, 896)
    assert table.nbytes == 896 * 896 * 4
    assert peak < 2**25
    assert _name_likeliest.targetoptions["nogil"]


@cache
def qwen3(domain: str) -> Trace:
    experts = np.load(TRACES / f"qwen3-30b-{domain}.npz")["experts"]
    return make_trace(np.ascontiguousarray(experts.transpose(1, 0, 2)), num_experts=128, trace_id=domain)


@needs_traces
@pytest.mark.parametrize("domain", ["code", "math"])
def test_on_real_routes_previous_token_is_w1_the_oracle_is_perfect_and_everything_is_everything(domain):
    trace = qwen3(domain)
    everyone = events_of_phase(trace, "all")
    score = score_plan(trace, previous_token(trace), everyone)
    total = trace_locality(trace).row(-1, named=True)
    found = score.predicted_accesses.sum(), score.covered_accesses.sum()
    assert found == (total["w1_reused_selections"], total["reuse_selections"])
    perfect = score_plan(trace, oracle(trace), everyone)
    assert perfect.predicted_accesses.sum() == perfect.accesses.sum() == perfect.predicted_experts.sum()
    part = events_of_phase(trace, "all") & (trace.event_step < 500)
    everything = score_plan(trace, random(trace, width=128), part)
    assert everything.predicted_accesses.sum() == everything.accesses.sum()


@needs_traces
def test_predictors_of_real_routes_keep_their_order():
    # Recorded from the first version: a tripwire. Ordered as one would think: the more is known, the more is named.
    trace = qwen3("code")
    fit = first_part(trace, Fraction("0.6"))
    plans = {
        "popularity": popularity(trace, width=8, fit=fit),
        "frequency": frequency(trace, width=8, fit=fit),
        "conditional": conditional(trace, depth=1, width=8, fit=fit),
        "learned": learned(trace, depth=1, width=8, fit=fit),
    }
    recalls = []
    for plan in plans.values():
        score = score_plan(trace, plan, trace.event_step >= fit.steps)
        recalls.append(score.predicted_accesses.sum() / score.covered_accesses.sum())
    assert recalls == pytest.approx([0.2471, 0.4101, 0.5456, 0.657], abs=3e-3)
