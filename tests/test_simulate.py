"""Simulated results: contracts, windows, capacities and fits of every row, and refusals that say what was wanted."""

import math
import os
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.locality import trace_locality
from replayer import simulate as simulate_module
from replayer.intervals import difference_interval, hit_rate_interval
from replayer.simulate import (
    Capacity,
    Cell,
    Choices,
    MemoryWalk,
    Replay,
    UnusableRequest,
    Window,
    admission_table,
    decide_cells,
    default_order,
    default_phase,
    fitted_counts,
    layer_quotas,
    layer_rows,
    object_sizes,
    outcomes,
    phase_rows,
    prepare,
    shuffled_replay,
    simulate,
    step_rows,
    with_intervals,
    with_nulls,
)
from replayer.streams import shuffled
from replayer.trace import MalformedTrace, Trace, TraceFile, open_trace, read_trace
from schemas.columns import ACCESS_ORDERS, DEDUPS, PHASES, POLICIES, SCOPES
from schemas.tables import CONTRACT, TABLES
from schemas.validation import validate_table
from tests import oracles
from tests.builders import make_trace, write_trace
from tests.strategies import capacities, routing_traces, single_row_traces
from tests.test_trace import write_parts

ATOMIC_OR_NOT = ("event_atomic", "sequential")


def one_row(
    trace: Trace, policy: str = "lru", *, window: Window | None = None, dedup: str = "union", **request
) -> dict:
    """The single row of a request; by default event-atomic LRU per layer of two experts."""
    asked = {"scope": "layer", "semantics": ["event_atomic"], "capacities": [Capacity(experts=2)], **request}
    (row,) = simulate(prepare(trace, window, dedup=dedup), names=[policy], **asked)
    return row


def single_layer(*experts: int, phases=None, **known) -> Trace:
    """One layer, one expert per step."""
    return make_trace([[[[expert]]] for expert in experts], phases=phases, num_experts=4, **known)


def toy_trace() -> Trace:
    """shijiuzhang/moe-cache-eval, event-atomic-toy-trace-v1: the same five sets on each of three layers."""
    sets = [[0, 1], [0, 2], [0, 1], [0, 3], [0, 1]]
    return make_trace([[[chosen]] * 3 for chosen in sets], num_experts=4)


def test_toy_conformance_trace_has_its_published_counts():
    row = one_row(toy_trace())
    assert (row["accesses"], row["hits"], row["misses"], row["compulsory_misses"]) == (30, 12, 18, 12)


@settings(max_examples=24, deadline=None)
@given(data=st.data(), trace=routing_traces(), dedup=st.sampled_from(DEDUPS), warm_pass=st.booleans())
def test_every_row_keeps_the_contract_of_hit_rate(data, trace, dedup, warm_pass):
    asked = data.draw(st.lists(capacities(trace), min_size=1, max_size=3, unique=True))
    scope = data.draw(st.sampled_from(SCOPES))
    replay = prepare(trace, Window(phase="all", warm_pass=warm_pass), dedup=dedup)
    rows = list(simulate(replay, names=POLICIES, scope=scope, semantics=ATOMIC_OR_NOT, capacities=asked))
    table = TABLES["hit_rate"]
    assert all(set(row) == set(table.column_names) for row in rows)
    validate_table(table.frame(rows), table)
    assert [(row["policy"], row["semantics"]) for row in rows[:: len(asked)]] == [
        (policy, semantics) for policy in POLICIES for semantics in ATOMIC_OR_NOT
    ]
    assert all(row["compulsory_misses"] <= row["misses"] for row in rows)
    assert all(row["miss_bytes"] is None or row["miss_bytes"] <= row["demand_bytes"] for row in rows)


@settings(max_examples=72, deadline=None)
@given(
    data=st.data(),
    trace=routing_traces(),
    dedup=st.sampled_from(DEDUPS),
    scope=st.sampled_from(SCOPES),
    warm_pass=st.booleans(),
    warm_percent=st.integers(0, 90),
)
def test_counts_equal_those_of_the_oracle_over_the_whole_contract(data, trace, dedup, scope, warm_pass, warm_percent):
    steps = sorted({step for step, _, phase, _ in events_of(trace) if phase != "warmup"})
    begin = data.draw(st.integers(0, len(steps) - 1))
    end = data.draw(st.integers(begin + 1, len(steps)))
    warm = steps[begin:end][: warm_percent * (end - begin) // 100]
    selected = [event for event in events_of(trace) if event[0] in steps[begin:end] and event[2] != "warmup"]
    phase = data.draw(st.sampled_from([event[2] for event in selected if event[0] not in warm] or ["all"]))
    capacity = data.draw(capacities(trace))
    sizes = dict(enumerate(object_sizes(trace).tolist())) if trace.metadata.expert_bytes else None

    replayed = [(layer, oracles.accessed(rows, "router", dedup)) for _, layer, _, rows in selected]
    is_scored = [step not in warm and phase in (its_phase, "all") for step, _, its_phase, _ in selected]
    step_of_event = [steps.index(step) for step, _, _, _ in selected]
    if warm_pass:
        replayed, is_scored, step_of_event = replayed * 2, [False] * len(is_scored) + is_scored, step_of_event * 2
    first_objects = trace.layer_first_object.tolist()
    events = [[first_objects[layer] + expert for expert in experts] for layer, experts in replayed]
    scored = [is_scored[number] for number, event in enumerate(events) for _ in event]
    accesses = [thing for event in events for thing in event]
    num_layers = len(first_objects) - 1
    caches = list(range(num_layers)) if scope == "layer" else [0]
    held = dict.fromkeys(caches, capacity.experts)
    if capacity.bytes is not None:
        held = {cache: capacity.bytes // len(caches) for cache in caches}
        held[0] += capacity.bytes % len(caches)
    replay = prepare(
        trace, Window((begin, end), phase, Fraction(warm_percent, 100), warm_pass), order="router", dedup=dedup
    )
    rows = simulate(replay, names=oracles.POLICIES, scope=scope, semantics=ATOMIC_OR_NOT, capacities=[capacity])
    for row in rows:

        def decide(mine, row=row, **known):
            return oracles.decide(row["policy"], row["semantics"], mine, fitted_on=mine, **known)

        unit = sizes if capacity.bytes is not None else dict.fromkeys(range(trace.num_objects), 1)
        hits = oracles.each_cache(
            decide,
            events,
            [layer if scope == "layer" else 0 for layer, _ in replayed],
            held,
            step_of_event=step_of_event,
            size=unit,
        )
        missed = [now for now, hit in enumerate(hits) if scored[now] and not hit]
        assert row["accesses"] == sum(scored)
        assert row["misses"] == len(missed), row
        assert row["compulsory_misses"] == sum(accesses[now] not in accesses[:now] for now in missed)
        assert row["miss_bytes"] == (sum(sizes[accesses[now]] for now in missed) if sizes else None)


def events_of(trace: Trace) -> list[tuple[int, int, str, list[list[int]]]]:
    """(step_id, layer ordinal, phase, rows) of each event in plain Python."""
    return [
        (step, layer, PHASES[phase], trace.expert_ids[begin:end].tolist())
        for step, layer, phase, (begin, end) in zip(
            trace.event_step.tolist(),
            trace.event_layer.tolist(),
            trace.event_phase.tolist(),
            pairwise(trace.event_first_row.tolist()),
            strict=True,
        )
    ]


def test_a_row_says_what_was_asked():
    trace = single_layer(0, 1, 2, 3, expert_bytes=10, trace_id="four")
    window = Window((1, 4), "unknown", Fraction("0.4"), warm_pass=True)
    row = one_row(trace, "static", window=window, scope="global", semantics=["sequential"], fit="first:0.5")
    contract = {name: row[name] for name in TABLES["hit_rate"].key}
    assert contract == {
        "trace_id": "four",
        "policy": "static",
        "scope": "global",
        "semantics": "sequential",
        "access_order": "router",
        "dedup": "union",
        "capacity_experts_total": 2,
        "capacity_bytes": 20,
        "step_begin": 1,
        "step_end": 4,
        "phase": "unknown",
        "warm_fraction": 0.4,
        "warm_steps": 1,
        "warm_pass": True,
        "fit": "first:0.5",
        "seed": None,
        "pinned_fraction": None,
        "admission": None,
        "quota_fit": None,
        "folios_per_expert": None,
    }
    assert (row["scored_steps"], row["selections"], row["accesses"], row["demand_bytes"]) == (2, 2, 2, 20)


def test_steps_are_half_open_and_earlier_steps_are_not_replayed():
    row = one_row(single_layer(0, 0, 0, 1), window=Window((1, 3)))
    assert (row["step_begin"], row["step_end"], row["scored_steps"]) == (1, 3, 2)
    assert (row["accesses"], row["hits"], row["compulsory_misses"]) == (2, 1, 1)


def test_steps_are_counted_without_warm_up_steps():
    trace = single_layer(3, 3, 0, 1, 0, phases=["warmup", "warmup", "decode", "decode", "decode"])
    row = one_row(trace)
    assert (row["step_begin"], row["step_end"], row["accesses"], row["hits"]) == (0, 3, 3, 1)
    assert one_row(trace, window=Window((0, 1)))["compulsory_misses"] == 1


def test_an_expert_seen_only_in_warm_up_is_still_a_compulsory_miss():
    row = one_row(single_layer(0, 0, phases=["warmup", "decode"]))
    assert (row["hits"], row["compulsory_misses"]) == (0, 1)


@pytest.mark.parametrize(
    ("steps", "fraction", "warm", "scored"),
    [(100, "0.29", 29, 71), (400, "0.6", 240, 160), (7, "0.5", 3, 4), (3, "0.99", 2, 1), (5, "0", 0, 5)],
)
def test_warm_steps_are_the_floor_of_a_decimal_fraction(steps, fraction, warm, scored):
    # In binary floating point 0.29 × 100 is 28.999….
    row = one_row(single_layer(*[0] * steps), window=Window(warm_fraction=Fraction(fraction)))
    assert (row["warm_steps"], row["scored_steps"], row["accesses"]) == (warm, scored, scored)


def test_warm_steps_are_a_share_of_the_selected_steps():
    row = one_row(single_layer(*[0] * 10), window=Window((4, 10), warm_fraction=Fraction("0.5")))
    assert (row["warm_steps"], row["scored_steps"]) == (3, 3)


def test_warm_steps_are_replayed_but_not_scored():
    row = one_row(single_layer(0, 1, 0, 2), window=Window(warm_fraction=Fraction("0.5")))
    assert (row["hits"], row["misses"], row["compulsory_misses"]) == (1, 1, 1)


def test_a_warm_pass_scores_the_second_of_two_replays():
    row = one_row(single_layer(0, 1, 0, 1), window=Window(warm_pass=True))
    assert (row["accesses"], row["hits"], row["compulsory_misses"], row["scored_steps"]) == (4, 4, 0, 4)
    thrashed = one_row(single_layer(0, 1, 2), window=Window(warm_pass=True))
    assert (thrashed["accesses"], thrashed["hits"], thrashed["compulsory_misses"]) == (3, 0, 0)


def test_the_first_of_two_replays_foresees_the_second():
    # At the end of the first pass Belady keeps 0 for the start of the second.
    trace, one_expert = single_layer(0, 1), [Capacity(experts=1)]
    row = one_row(trace, "belady_bypass", window=Window(warm_pass=True), capacities=one_expert)
    assert row["hits"] == 1
    assert one_row(trace, "lru", window=Window(warm_pass=True), capacities=one_expert)["hits"] == 0


def test_warm_steps_apply_to_the_scored_pass():
    window = Window(warm_fraction=Fraction("0.5"), warm_pass=True)
    row = one_row(single_layer(0, 1, 2, 3), window=window, capacities=[Capacity(experts=4)])
    assert (row["accesses"], row["hits"], row["scored_steps"]) == (2, 2, 2)


def test_decode_is_scored_where_there_is_any_and_everything_is_replayed():
    trace = single_layer(0, 1, 0, phases=["prefill", "prefill", "decode"])
    row = one_row(trace)
    assert (default_phase(trace), row["phase"]) == ("decode", "decode")
    assert (row["scored_steps"], row["accesses"], row["hits"]) == (1, 1, 1)


@pytest.mark.parametrize("phase", ["prefill", "unknown"])
def test_all_is_scored_where_nothing_is_decode(phase):
    trace = single_layer(0, 1, 0, phases=[phase] * 3)
    assert (one_row(trace)["phase"], one_row(trace)["accesses"]) == ("all", 3)


@pytest.mark.parametrize(("phase", "accesses"), [("prefill", 2), ("decode", 1), ("unknown", 1), ("all", 4)])
def test_a_phase_chooses_what_is_scored(phase, accesses):
    trace = single_layer(0, 1, 0, 1, 1, phases=["prefill", "prefill", "decode", "unknown", "warmup"])
    row = one_row(trace, window=Window(phase=phase))
    assert (row["phase"], row["accesses"]) == (phase, accesses)


def test_an_event_accesses_each_expert_once_unless_every_selection_is_walked():
    trace = make_trace([[[[0, 1], [1, 2]]], [[[0, 1], [0, 1]]]], expert_bytes=10)
    united = one_row(trace)
    assert (united["selections"], united["accesses"], united["union_ratio"], united["demand_bytes"]) == (
        8,
        5,
        5 / 8,
        50,
    )
    every = one_row(trace, dedup="none")
    assert (every["selections"], every["accesses"], every["union_ratio"], every["demand_bytes"]) == (8, 8, 1.0, 80)


def test_repeats_in_an_event_share_the_class_of_its_start():
    trace = make_trace([[[[0], [0], [0]]], [[[0], [1], [0]]]])
    atomic = one_row(trace, dedup="none")
    assert (atomic["hits"], atomic["misses"], atomic["compulsory_misses"]) == (2, 4, 2)
    sequential = one_row(trace, dedup="none", semantics=["sequential"])
    assert (sequential["hits"], sequential["misses"], sequential["compulsory_misses"]) == (4, 2, 2)


def test_the_default_order_is_the_router_s_where_it_is_known():
    assert default_order(toy_trace()) == "router"
    assert one_row(toy_trace())["access_order"] == "router"
    sorted_ids = single_layer(0, 1, rank_known=False)
    assert one_row(sorted_ids)["access_order"] == "ascending"


def test_router_order_is_refused_where_ids_arrived_sorted():
    with pytest.raises(UnusableRequest, match=r"order router, but .* trace sorted-ids .*use --order ascending, desc"):
        prepare(single_layer(0, 1, rank_known=False, trace_id="sorted-ids"), order="router")


def test_random_order_repeats_with_its_seed_and_only_then_is_the_seed_said():
    trace = make_trace(np.tile([[[0, 1, 2, 3]]], (64, 1, 1)))

    def row(seed: int) -> dict:
        replay = prepare(trace, order="random", seed=seed)
        (found,) = simulate(
            replay, names=["lru"], scope="layer", semantics=["sequential"], capacities=[Capacity(experts=2)]
        )
        return found

    assert row(7) == row(7)
    assert row(7)["seed"] == 7
    assert len({row(seed)["hits"] for seed in range(8)}) > 1
    assert one_row(trace)["seed"] is None


def test_a_capacity_in_experts_is_per_layer_or_total():
    layered = one_row(toy_trace(), scope="layer", capacities=[Capacity(experts=4)])
    at_once = one_row(toy_trace(), scope="global", capacities=[Capacity(experts=4)])
    assert (layered["capacity_experts_total"], layered["hits"]) == (12, 30 - 12)
    assert (at_once["capacity_experts_total"], at_once["hits"]) == (4, 0)


@pytest.mark.parametrize(
    ("total", "quotas"), [(0, [0, 0, 0]), (2, [2, 0, 0]), (9, [3, 3, 3]), (10, [4, 3, 3]), (11, [5, 3, 3])]
)
def test_layers_share_bytes_equally_and_the_lowest_takes_the_remainder(total, quotas):
    assert layer_quotas(total, 3).tolist() == quotas


def test_a_byte_quota_of_a_layer_holds_whole_experts():
    # 5 experts of 10 bytes fit in 59; a layer gets 19 + 2 = 21 or 19 bytes: 2, 1 and 1 experts.
    trace = make_trace([[[[0]], [[0]], [[0]]], [[[1]], [[1]], [[1]]], [[[0]], [[0]], [[0]]]], expert_bytes=10)
    assert one_row(trace, capacities=[Capacity(bytes=59)])["hits"] == 1
    assert one_row(trace, capacities=[Capacity(bytes=60)])["hits"] == 3


def test_a_layer_without_events_keeps_its_share_of_the_bytes():
    # Layer 0 of the metadata never runs in this trace; the remainder is its own all the same.
    trace = make_trace([[[], [[0]]], [[], [[0]]]], expert_bytes=10)
    assert one_row(trace, capacities=[Capacity(bytes=19)])["hits"] == 0
    assert one_row(trace, capacities=[Capacity(bytes=20)])["hits"] == 1


def test_unequal_sizes_are_honoured_in_bytes():
    trace = single_layer(0, 3, 0, 3, expert_bytes=[[1, 2, 3, 40]])
    row = one_row(trace, capacities=[Capacity(bytes=40)])
    assert (row["hits"], row["demand_bytes"], row["miss_bytes"]) == (0, 82, 82)
    row = one_row(trace, capacities=[Capacity(bytes=41)])
    assert (row["hits"], row["demand_bytes"], row["miss_bytes"]) == (2, 82, 41)


@pytest.mark.parametrize(
    ("expert_bytes", "scope", "capacity_bytes"),
    [
        (None, "layer", None),
        (None, "global", None),
        (10, "layer", 2 * 2 * 10),
        (10, "global", 2 * 10),
        ([10, 30], "layer", 2 * 10 + 2 * 30),
        ([10, 30], "global", None),
        ([[10, 10], [10, 11]], "layer", None),
        ([[10, 10], [10, 10]], "global", 2 * 10),
    ],
)
def test_a_capacity_in_experts_is_priced_only_where_sizes_are_known_and_equal(expert_bytes, scope, capacity_bytes):
    trace = make_trace([[[[0]], [[1]]]], num_experts=2, expert_bytes=expert_bytes)
    row = one_row(trace, scope=scope)
    assert row["capacity_bytes"] == capacity_bytes
    assert row["capacity_experts_total"] == (4 if scope == "layer" else 2)
    known = expert_bytes is not None
    assert (row["demand_bytes"] is not None, row["miss_bytes"] is not None) == (known, known)


def test_a_capacity_in_bytes_is_stored_as_such():
    row = one_row(single_layer(0, 1, expert_bytes=10), capacities=[Capacity(bytes=15)])
    assert (row["capacity_experts_total"], row["capacity_bytes"]) == (None, 15)


def test_sizes_said_with_the_request_stand_in_for_unknown_ones_and_never_replace_known_ones():
    with pytest.raises(UnusableRequest, match="has its own expert sizes"):
        one_row(single_layer(0, 1, 0, expert_bytes=10), capacities=[Capacity(bytes=40)], expert_bytes=40)
    row = one_row(single_layer(0, 1, 0), expert_bytes=7)
    assert (row["hits"], row["capacity_bytes"], row["miss_bytes"]) == (1, 14, 14)


@pytest.mark.parametrize("given_capacity", [{}, {"experts": 1, "bytes": 1}, {"experts": -1}, {"bytes": -1}])
def test_a_capacity_is_one_number_that_is_not_negative(given_capacity):
    with pytest.raises(ValueError, match="a capacity is a number of experts or of bytes, not negative"):
        Capacity(**given_capacity)


def test_compulsory_misses_are_those_on_experts_not_accessed_before_in_the_replay():
    row = one_row(single_layer(0, 1, 2, 0, 3, 0), window=Window((1, 6)), capacities=[Capacity(experts=1)])
    assert (row["misses"], row["compulsory_misses"]) == (5, 4)
    warm = one_row(single_layer(0, 1, 2, 0), window=Window(warm_fraction=Fraction("0.5")))
    assert (warm["misses"], warm["compulsory_misses"]) == (2, 1)


def test_a_static_table_is_fitted_on_all_replayed_steps_by_default():
    trace = single_layer(0, 1, 1, 2, 2, expert_bytes=10)
    row = one_row(trace, "static")
    assert (row["fit"], row["hits"], row["preload_bytes"]) == ("same", 4, 20)
    # Steps outside the selection do not count; warm ones do.
    row = one_row(
        trace, "static", window=Window((0, 3), warm_fraction=Fraction("0.5")), capacities=[Capacity(experts=1)]
    )
    assert (row["warm_steps"], row["accesses"], row["hits"]) == (1, 2, 2)


def test_a_static_table_breaks_ties_to_the_lowest_layer_and_expert():
    trace = make_trace([[[[1, 2]], [[1, 0]]], [[[2, 1]], [[0, 1]]]], num_experts=3)
    table = one_row(trace, "static", scope="global", capacities=[Capacity(experts=3)])
    # Of (0, 1), (0, 2), (1, 0), (1, 1), all with two accesses, the first three are held.
    assert table["hits"] == 6
    replay = prepare(trace)
    assert fitted_counts(replay, "same").tolist() == [0, 2, 2, 2, 2, 0]


def test_a_static_table_may_be_fitted_on_the_first_steps():
    trace = single_layer(3, 3, 3, 0, 1, 1, 0, 1)
    asked = {"window": Window((3, 8)), "capacities": [Capacity(experts=1)]}
    assert one_row(trace, "static", fit="same", **asked)["hits"] == 3
    # floor(0.3 × 5) = 1 step of the selection: expert 0.
    row = one_row(trace, "static", fit="first:0.3", **asked)
    assert (row["fit"], row["hits"], row["accesses"]) == ("first:0.3", 2, 5)


def test_the_fraction_of_a_fit_is_read_as_a_decimal():
    trace = single_layer(*[0] * 28, 1, *[2] * 71)
    replay = prepare(trace)
    assert fitted_counts(replay, "first:0.29").tolist() == [28, 1, 0, 0]
    assert fitted_counts(replay, "first:1").tolist() == [28, 1, 71, 0]


def test_a_fit_counts_one_pass_of_a_warm_pass():
    replay = prepare(single_layer(0, 1, 1, 0, 2), Window(warm_pass=True))
    assert fitted_counts(replay, "first:0.6").tolist() == [1, 2, 0, 0]
    assert fitted_counts(replay, "same").tolist() == [2, 2, 1, 0]


def test_a_static_table_may_be_fitted_on_another_trace(tmp_path):
    other = single_layer(3, 3, 0, 2, 2, phases=["warmup", "warmup", "prefill", "decode", "decode"])
    path = write_trace(other, tmp_path / "other.parquet")
    trace, one_expert = single_layer(0, 1, 2, 0, 3, expert_bytes=10), [Capacity(experts=1)]
    row = one_row(trace, "static", fit=str(path), capacities=one_expert)
    assert (row["fit"], row["hits"], row["preload_bytes"]) == (str(path), 1, 10)
    # floor(0.5 × 3) = 1: of the other trace's steps without warm-up the first, expert 0.
    row = one_row(trace, "static", fit=f"{path}:first:0.5", capacities=one_expert)
    assert (row["fit"], row["hits"]) == (f"{path}:first:0.5", 2)


def test_a_fit_of_another_shape_is_refused_with_both_shapes(tmp_path):
    other = make_trace([[[[0]], [[1]]]], layer_ids=[1, 5], num_experts=[4, 6])
    path = write_trace(other, tmp_path / "other.parquet")
    with pytest.raises(UnusableRequest, match=r"layers \[1, 5\] with \[4, 6\] experts, the trace has \[0\] with \[4\]"):
        one_row(single_layer(0, 1), "static", fit=str(path))


def test_a_fit_on_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "counts.csv"
    path.write_text("expert,count\n0,1\n")
    with pytest.raises(MalformedTrace, match=r"counts\.csv: "):
        one_row(single_layer(0, 1), "static", fit=str(path))


@pytest.mark.parametrize(
    "fit", ["first:0", "first:1.5", "first:-0.5", "first:", "first:half", "first:1/0", "xfirst:0.5"]
)
def test_a_malformed_fit_is_refused(fit):
    with pytest.raises(UnusableRequest, match=r"wanted same, first:F with 0 < F ≤ 1, TRACE or TRACE:first:F") as error:
        one_row(single_layer(0, 1), "static", fit=fit)
    assert repr(fit) in str(error.value)


def test_preload_is_counted_apart_and_only_for_a_static_table_of_known_sizes():
    trace = single_layer(0, 1, 2, expert_bytes=[[1, 2, 4, 8]])
    row = one_row(trace, "static", capacities=[Capacity(bytes=3)])
    assert (row["preload_bytes"], row["hits"], row["misses"], row["miss_bytes"]) == (3, 2, 1, 4)
    assert one_row(trace, "lru")["preload_bytes"] is None
    assert one_row(single_layer(0, 1, 2), "static")["preload_bytes"] is None


def test_a_row_names_the_choices_that_its_policy_uses_and_no_others():
    replay = prepare(single_layer(0, 1))
    asked = {"scope": "layer", "semantics": ATOMIC_OR_NOT, "capacities": [Capacity(experts=1)]}
    for row in simulate(replay, names=POLICIES, choices=Choices(pinned_fraction=Fraction(1, 4)), **asked):
        policy = row["policy"]
        assert row["fit"] == ("same" if policy in ("static", "pinned_lru") else None)
        assert row["pinned_fraction"] == (0.25 if policy == "pinned_lru" else None)
        assert row["folios_per_expert"] == (1 if policy in ("two_list", "mglru") else None)
        assert row["seed"] == (0 if policy == "random" else None)


@pytest.mark.parametrize("steps", [(0, 4), (3, 4), (-1, 2), (2, 2), (2, 1), (5, None), (None, 9)])
def test_steps_outside_the_trace_are_refused_with_the_range_there_is(steps):
    begin, end = 0 if steps[0] is None else steps[0], 3 if steps[1] is None else steps[1]
    wanted = f"steps {begin}:{end} of trace tiny, which has 3 steps without warm-up; wanted a range inside 0:3 "
    with pytest.raises(UnusableRequest, match=wanted):
        prepare(single_layer(0, 1, 2), Window(steps))


@pytest.mark.parametrize("fraction", [Fraction(1), Fraction(3, 2), Fraction(-1, 10)])
def test_a_warm_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(UnusableRequest, match=rf"warm fraction {float(fraction)}, wanted 0 ≤ fraction < 1"):
        prepare(single_layer(0, 1), Window(warm_fraction=fraction))


@pytest.mark.parametrize("phase", ["decoding", "warmup"])
def test_a_phase_that_is_not_scored_is_refused(phase):
    with pytest.raises(UnusableRequest, match=f"phase '{phase}', wanted prefill, decode, unknown or all"):
        prepare(single_layer(0, 1), Window(phase=phase))


def test_a_window_without_events_to_score_is_refused():
    trace = single_layer(0, 1, 2, phases=["decode", "prefill", "prefill"])
    with pytest.raises(UnusableRequest, match=r"steps 1:3 of trace tiny have no event of phase decode .* 0 warm steps"):
        prepare(trace, Window((1, 3)))
    with pytest.raises(UnusableRequest, match=r"no event of phase decode to score after 1 warm steps; wanted another"):
        prepare(trace, Window(warm_fraction=Fraction("0.5")))


def test_bytes_without_sizes_are_refused_with_both_ways_out():
    ways_out = "trace tiny has no expert sizes; add --expert-bytes, or say --capacity-experts"
    with pytest.raises(UnusableRequest, match=ways_out):
        one_row(single_layer(0, 1), capacities=[Capacity(bytes=10)])


@pytest.mark.parametrize(
    ("request_part", "message"),
    [
        ({"policy": "fifi"}, f"policy 'fifi', wanted one of {', '.join(POLICIES)}"),
        ({"scope": "model"}, "scope 'model', wanted one of layer, global"),
        ({"semantics": ["atomic"]}, "semantics 'atomic', wanted one of event_atomic, sequential"),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(request_part, message):
    with pytest.raises(UnusableRequest, match=message):
        one_row(single_layer(0, 1), **request_part)


def test_a_policy_that_is_not_asked_for_needs_no_fit():
    assert one_row(single_layer(0, 0), "lru", fit="no such file")["hits"] == 1


def test_a_static_table_of_all_experts_holds_also_those_that_its_fit_never_saw():
    trace = make_trace([[[[0, 1]]], [[[0, 2]]], [[[3, 1]]], [[[2, 3]]]], num_experts=4)
    replay = prepare(trace, Window(warm_fraction=Fraction("0.5")))
    (row,) = simulate(
        replay,
        names=["static"],
        scope="layer",
        semantics=["event_atomic"],
        capacities=[Capacity(experts=4)],
        fit="first:0.5",
    )
    assert (row["hits"], row["accesses"]) == (4, 4)


# The same replay cut, streamed, spilt and spread over threads


def every_cell(capacity: Capacity) -> list[Cell]:
    """All policies in all semantics that they are defined in."""
    cells = [Cell(policy, semantics, capacity) for policy in POLICIES for semantics in ATOMIC_OR_NOT]
    return [*cells, Cell("lru", "token_clock", capacity)]


def decided(replay: Replay, capacity: Capacity, scope: str) -> list[tuple]:
    """All that is known of every cell."""
    found = decide_cells(replay, every_cell(capacity), scope=scope)
    return [(one.row, one.step_hits.tolist(), one.counts.tolist()) for one in found]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Trace, dict, Capacity, str]:
    """(a trace, what `prepare` takes beside it, a capacity, a scope)."""
    trace = draw(routing_traces())
    window = Window(phase="all", warm_pass=draw(st.booleans()))
    said = {
        "window": window,
        "order": draw(st.sampled_from(ACCESS_ORDERS)),
        "dedup": draw(st.sampled_from(DEDUPS)),
        "seed": draw(st.integers(0, 2**31)),
    }
    return trace, said, draw(capacities(trace)), draw(st.sampled_from(SCOPES))


@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=requests(), steps_per_part=st.integers(1, 4), warm_percent=st.sampled_from([0, 30]))
def test_a_trace_on_disk_gives_what_it_gives_in_memory(tmp_path, asked, steps_per_part, warm_percent):
    trace, said, capacity, scope = asked
    said = {**said, "window": replace(said["window"], warm_fraction=Fraction(warm_percent, 100))}
    path = write_parts(trace, tmp_path / "tiny.parquet", steps_per_part)
    opened, whole = open_trace(path), read_trace(path)
    assert (default_phase(opened), default_order(opened)) == (default_phase(trace), default_order(trace))
    assert decided(prepare(opened, **said), capacity, scope) == decided(prepare(whole, **said), capacity, scope)


def test_a_prefill_over_several_parts_accepts_its_token_in_the_last(tmp_path):
    trace = single_layer(0, 1, 0, 2, phases=["prefill", "prefill", "prefill", "decode"], expert_bytes=10)
    path = write_parts(trace, tmp_path / "tiny.parquet", 1)
    for phase, accepted in (("prefill", 1), ("decode", 1), ("all", 2)):
        for one in (open_trace(path), read_trace(path)):
            assert one_row(one, window=Window(phase=phase))["scored_accepted_tokens"] == accepted
    assert open_trace(path).step_accepted.sum(axis=1).tolist() == [0, 0, 1, 1]


@settings(max_examples=18, deadline=None)
@given(asked=requests(), piece_accesses=st.integers(1, 5))
def test_a_walk_in_small_pieces_gives_what_the_whole_gives(asked, piece_accesses):
    trace, said, capacity, scope = asked
    whole = decided(prepare(trace, **said), capacity, scope)

    class SmallPieces(MemoryWalk):
        def __init__(self, whole) -> None:
            super().__init__(whole, piece_accesses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate_module, "MemoryWalk", SmallPieces)
        replay = prepare(trace, **said)
        assert len(replay.pieces) >= min(replay.walk.num_events, len(replay.walk.objects) // (piece_accesses + 18))
        assert decided(replay, capacity, scope) == whole


@settings(max_examples=12, deadline=None)
@given(data=st.data(), trace=routing_traces(), piece_accesses=st.integers(1, 9))
def test_the_pieces_of_a_walk_hold_every_event_once_and_whole(data, trace, piece_accesses):
    whole = prepare(trace, Window(phase="all"), dedup=data.draw(st.sampled_from(DEDUPS))).walk
    pieces = MemoryWalk(whole, piece_accesses)
    found = [pieces[number] for number in range(len(pieces))]
    assert sum(piece.num_events for piece in found) == whole.num_events
    assert np.concatenate([piece.objects for piece in found]).tolist() == whole.objects.tolist()
    widest = max(np.diff(whole.first_access))
    assert all(len(piece.objects) < piece_accesses + widest for piece in found)


@settings(max_examples=12, deadline=None)
@given(asked=requests())
def test_next_accesses_in_a_file_are_those_in_memory(asked):
    trace, said, capacity, scope = asked
    replay = prepare(trace, **said)
    in_memory = decided(replay, capacity, scope)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate_module, "SPILL_BYTES", 0)
        assert decided(replay, capacity, scope) == in_memory


@settings(max_examples=10, deadline=None)
@given(asked=requests(), cpus=st.sampled_from([2, 5]))
def test_the_number_of_threads_changes_nothing(asked, cpus):
    trace, said, capacity, scope = asked
    found = []
    for number in (1, cpus):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _process, number=number: set(range(number)))
            found.append(decided(prepare(trace, **said), capacity, scope))
    assert found[0] == found[1]


@settings(max_examples=12, deadline=None)
@given(asked=requests())
def test_a_cell_counts_the_same_alone_as_among_others(asked):
    trace, said, capacity, scope = asked
    replay = prepare(trace, **said)
    together = decide_cells(replay, every_cell(capacity), scope=scope)
    for one, cell in zip(together, every_cell(capacity), strict=True):
        (alone,) = decide_cells(replay, [cell], scope=scope)
        assert alone.row == one.row


def test_a_streamed_walk_exists_in_pieces_only(tmp_path):
    replay = prepare(open_trace(write_parts(toy_trace(), tmp_path / "toy.parquet", 2)))
    assert isinstance(replay.trace, TraceFile)
    assert len(replay.pieces) == 3
    with pytest.raises(TypeError, match="exists in pieces only"):
        _ = replay.walk
    with pytest.raises(TypeError, match="not shuffled"):
        shuffled_replay(replay)


# Choices


@settings(max_examples=36, deadline=None)
@given(
    data=st.data(),
    trace=routing_traces(),
    scope=st.sampled_from(SCOPES),
    semantics=st.sampled_from([*ATOMIC_OR_NOT, "token_clock"]),
    dedup=st.sampled_from(DEDUPS),
)
def test_lru_behind_an_admission_table_equals_the_oracle(data, trace, scope, semantics, dedup):
    top = data.draw(st.integers(1, 4))
    held = data.draw(st.integers(0, trace.num_objects))
    replay = prepare(trace, Window(phase="all"), order="router", dedup=dedup)
    walked = [
        (step, layer, [int(trace.layer_first_object[layer]) + one for one in oracles.accessed(rows, "router", dedup)])
        for step, layer, phase, rows in events_of(trace)
        if phase != "warmup"
    ]
    events = [event for _, _, event in walked]
    accesses = [thing for event in events for thing in event]
    bounds = trace.layer_first_object.tolist() if scope == "layer" else [0, trace.num_objects]
    admitted = set()
    for begin, end in pairwise(bounds):
        admitted |= set(sorted(range(begin, end), key=lambda thing: (-accesses.count(thing), thing))[:top])
    assert set(np.flatnonzero(admission_table(replay, scope, f"same:top:{top}")).tolist()) == admitted

    def decide(mine, **known):
        return oracles.decide("lru", semantics, mine, admitted=admitted, **known)

    hits = oracles.each_cache(
        decide,
        events,
        [layer if scope == "layer" else 0 for _, layer, _ in walked],
        dict.fromkeys(range(len(bounds) - 1), held),
        step_of_event=[step for step, _, _ in walked],
        size=dict.fromkeys(range(trace.num_objects), 1),
    )
    asked = {"scope": scope, "semantics": [semantics], "capacities": [Capacity(experts=held)]}
    choices = Choices(admit=f"same:top:{top}")
    (row,) = simulate(replay, names=["lru"], choices=choices, **asked)
    assert (row["hits"], row["admission"]) == (sum(hits), f"same:top:{top}")


@settings(max_examples=10, deadline=None)
@given(asked=requests(), top=st.integers(1, 3))
def test_what_may_not_enter_is_never_hit(asked, top):
    trace, said, capacity, scope = asked
    replay = prepare(trace, **said)
    admitted = admission_table(replay, scope, f"same:top:{top}")
    # Static and pinned tables hold what they were told to before anything asks to enter.
    cells = [cell for cell in every_cell(capacity) if cell.policy not in ("static", "pinned_lru")]
    most = int(replay.survey.named[admitted].sum())
    for one in decide_cells(replay, cells, scope=scope, choices=Choices(admit=f"same:top:{top}")):
        assert one.row["hits"] <= most, one.row["policy"]


def test_an_admission_table_may_be_fitted_on_the_first_steps_or_on_another_trace(tmp_path):
    trace = single_layer(0, 0, 0, 1, 1, 1, 1)
    path = write_trace(single_layer(3, 3, 2, 2, 2), tmp_path / "other.parquet")
    for admit, wanted in [
        ("same:top:1", [1]),
        ("first:0.4:top:1", [0]),
        (f"{path}:top:1", [2]),
        (f"{path}:first:0.4:top:1", [3]),
        ("same:top:9999999999999999999", [0, 1, 2, 3]),
    ]:
        assert np.flatnonzero(admission_table(prepare(trace), "layer", admit)).tolist() == wanted
        assert one_row(trace, choices=Choices(admit=admit))["hits"] == sum(
            {0: 2, 1: 3}.get(expert, 0) for expert in wanted
        )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_admission_table_is_a_file_of_the_model_s_own_numbers(tmp_path, suffix):
    trace = make_trace([[[[0, 1]], [[0, 1]]]] * 3, layer_ids=[3, 7], num_experts=4)
    table = pl.DataFrame({"expert_id": [1, 0, 3], "layer_id": [3, 7, 7], "why": ["hot", "hot", "liked"]})
    path = tmp_path / f"hot.{suffix}"
    table.write_csv(path) if suffix == "csv" else table.write_parquet(path)
    assert np.flatnonzero(admission_table(prepare(trace), "layer", str(path))).tolist() == [1, 4, 7]
    row = one_row(trace, choices=Choices(admit=str(path)))
    assert (row["hits"], row["accesses"], row["admission"]) == (4, 12, str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("layer_id,expert_id\n3,9\n", r"layer 3, expert 9 is not in the trace, whose layers are \[3\]"),
        ("layer_id,expert_id\n0,1\n", r"layer 0, expert 1 is not in the trace"),
        ("layer_id,expert_id\n3,-1\n", r"layer 3, expert -1 is not in the trace"),
        ("layer_id,expert_id\n3,\n", r"layer 3, expert None is not in the trace"),
        ("layer_id,expert_id\n3,first\n", r"hot\.csv: "),
        ("layer,expert\n3,1\n", r"hot\.csv: "),
        ("", r"hot\.csv: "),
    ],
)
def test_an_admission_file_that_does_not_fit_is_refused(tmp_path, content, message):
    path = tmp_path / "hot.csv"
    path.write_text(content)
    trace = make_trace([[[[0]]], [[[1]]]], layer_ids=[3])
    with pytest.raises(UnusableRequest, match=message) as error:
        one_row(trace, choices=Choices(admit=str(path)))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("admit", ["hot.txt", "absent.csv", "same", "same:top", "3"])
def test_an_admission_that_is_no_table_is_refused_with_the_forms_there_are(admit):
    with pytest.raises(UnusableRequest, match=r"wanted FIT:top:N .* with the columns layer_id and expert_id"):
        one_row(single_layer(0, 1), choices=Choices(admit=admit))


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "", "all", "²", "9" * 5000])
def test_an_admission_of_no_number_of_experts_is_refused(number):
    with pytest.raises(UnusableRequest, match="wanted a number of experts above 0"):
        one_row(single_layer(0, 1), choices=Choices(admit=f"same:top:{number}"))


def test_an_admission_file_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "hot.parquet"
    path.write_bytes(b"PAR1 only the beginning")
    with pytest.raises(UnusableRequest, match=r"admission table .*hot\.parquet: "):
        one_row(single_layer(0, 1), choices=Choices(admit=str(path)))


@settings(max_examples=24, deadline=None)
@given(data=st.data(), trace=routing_traces(layers_may_rest=False), semantics=st.sampled_from(ATOMIC_OR_NOT))
def test_fitted_quotas_are_the_best_split_of_the_same_total(data, trace, semantics):
    held = data.draw(st.integers(0, 3))
    replay = prepare(trace, Window(phase="all"), order="router")
    asked = {"scope": "layer", "semantics": [semantics], "capacities": [Capacity(experts=held)]}
    (equal,) = simulate(replay, names=["lru"], **asked)
    (fitted,) = simulate(replay, names=["lru"], choices=Choices(quota_fit="same"), **asked)
    size, per_layer = dict.fromkeys(range(6), 1), []
    for layer in range(len(trace.layer_first_object) - 1):
        events = [
            oracles.accessed(rows, "router", "union")
            for _, its_layer, phase, rows in events_of(trace)
            if its_layer == layer and phase != "warmup"
        ]
        per_layer.append(
            [sum(oracles.decide("lru", semantics, events, size=size, capacity=c)) for c in range(trace.num_objects + 1)]
        )
    total = held * len(per_layer)
    splits = (split for split in product(range(total + 1), repeat=len(per_layer)) if sum(split) == total)
    best = max(sum(hits[min(c, len(hits) - 1)] for hits, c in zip(per_layer, split, strict=True)) for split in splits)
    assert fitted["hits"] == best >= equal["hits"]
    assert (fitted["quota_fit"], equal["quota_fit"]) == ("same", None)
    assert fitted["capacity_experts_total"] == equal["capacity_experts_total"] == total


def test_quotas_may_be_fitted_on_another_trace_and_give_all_slots_away(tmp_path):
    # The other trace repeats in layer 0 alone: with one expert a layer, layer 0 gets both.
    other = make_trace([[[[0]], [[0]]], [[[1]], [[1]]], [[[0]], [[2]]]], num_experts=3, trace_id="other")
    path = write_trace(other, tmp_path / "other.parquet")
    trace = make_trace([[[[0]], [[0]]], [[[1]], [[0]]], [[[0]], [[0]]]], num_experts=3)
    one_each = [Capacity(experts=1)]
    assert one_row(trace, capacities=one_each)["hits"] == 2
    row = one_row(trace, capacities=one_each, choices=Choices(quota_fit=str(path)))
    assert (row["hits"], row["quota_fit"], row["capacity_experts_total"]) == (1, str(path), 2)


def test_a_capacity_in_bytes_or_over_all_layers_has_no_fitted_quotas():
    trace = make_trace([[[[0]], [[0]]], [[[1]], [[0]]], [[[0]], [[0]]]], num_experts=2, expert_bytes=10)
    in_all = {"scope": "global", "capacities": [Capacity(experts=2)]}
    fitted = one_row(trace, choices=Choices(quota_fit="same"), **in_all)
    assert (fitted["quota_fit"], fitted["hits"]) == (None, one_row(trace, **in_all)["hits"])


def test_a_pinned_part_is_the_floor_of_its_share():
    # Of three slots a quarter is none and .4 is one: expert 2, asked most.
    trace = single_layer(2, 0, 1, 3, 2, 0, 1, 3, 2, expert_bytes=10)
    three = [Capacity(experts=3)]
    for fraction, pinned in [("0.25", 0), ("0.4", 10), ("0.9", 20)]:
        row = one_row(trace, "pinned_lru", capacities=three, choices=Choices(pinned_fraction=Fraction(fraction)))
        assert (row["pinned_fraction"], row["preload_bytes"]) == (float(fraction), pinned)
    plain = one_row(trace, "lru", capacities=three)
    none_pinned = one_row(trace, "pinned_lru", capacities=three, choices=Choices(pinned_fraction=Fraction(0)))
    assert none_pinned["hits"] == plain["hits"]


@settings(max_examples=12, deadline=None)
@given(data=st.data(), trace=routing_traces(all_phases=False))
def test_one_folio_per_expert_is_the_default_and_more_are_said(data, trace):
    asked = {
        "scope": data.draw(st.sampled_from(SCOPES)),
        "semantics": ATOMIC_OR_NOT,
        "capacities": [data.draw(capacities(trace))],
    }
    replay, kernels = prepare(trace), ["two_list", "mglru"]
    plain = list(simulate(replay, names=kernels, **asked))
    assert plain == list(simulate(replay, names=kernels, choices=Choices(folios_per_expert=1), **asked))
    for row in simulate(replay, names=kernels, choices=Choices(folios_per_expert=4), **asked):
        assert row["folios_per_expert"] == 4
        assert row["hits"] + row["misses"] == row["accesses"]


def test_a_token_clock_is_defined_for_lru_alone():
    with pytest.raises(UnusableRequest, match="token_clock is defined for lru alone; leave it out, or leave out sieve"):
        one_row(single_layer(0, 1), "sieve", semantics=["token_clock"])


# What a row says beside its hits


@settings(max_examples=24, deadline=None)
@given(data=st.data(), trace=routing_traces(), scope=st.sampled_from(SCOPES), dedup=st.sampled_from(DEDUPS))
def test_pressure_is_that_of_every_scored_event(data, trace, scope, dedup):
    held = data.draw(st.integers(0, 4))
    row = one_row(trace, window=Window(phase="all"), scope=scope, dedup=dedup, capacities=[Capacity(experts=held)])
    unions = [
        len({expert for one in rows for expert in one}) for _, _, phase, rows in events_of(trace) if phase != "warmup"
    ]
    assert row["scored_events"] == len(unions)
    assert row["events_above_capacity"] == sum(union > held for union in unions)
    if held == 0:
        assert (row["pressure_mean"], row["pressure_p95"]) == (None, None)
        return
    ratios = sorted(union / held for union in unions)
    assert row["pressure_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-12)
    assert row["pressure_p95"] == ratios[math.ceil(Fraction(95, 100) * len(ratios)) - 1]


def test_a_capacity_in_bytes_has_no_pressure():
    row = one_row(single_layer(0, 1, expert_bytes=10), capacities=[Capacity(bytes=15)])
    assert (row["pressure_mean"], row["pressure_p95"], row["events_above_capacity"]) == (None, None, None)


@settings(max_examples=24, deadline=None)
@given(trace=routing_traces(), single=single_row_traces())
def test_chance_is_that_of_trace_locality(trace, single):
    for one, dedup in ((trace, "none"), (single, "none"), (single, "union")):
        row, wanted = one_row(one, dedup=dedup), trace_locality(one).row(-1, named=True)
        for ours, theirs in [
            ("lag1_chance_numerator", "chance_numerator"),
            ("lag1_chance_denominator", "chance_denominator"),
            ("lag1_chance_ratio", "chance_ratio"),
            ("lag1_uniform_denominator", "uniform_denominator"),
            ("lag1_uniform_ratio", "uniform_ratio"),
        ]:
            assert row[ours] == pytest.approx(wanted[theirs], rel=1e-12), ours
        assert row["accesses"] == wanted["selections"]


def test_under_union_an_event_of_several_rows_is_one_token():
    """Two events, {0, 1} of two rows and {0}: p = 1 and 1/2 of three experts."""
    row = one_row(make_trace([[[[0], [1]]], [[[0]]]], num_experts=3))
    found = [row[f"lag1_{name}"] for name in ("chance_numerator", "chance_denominator", "uniform_denominator")]
    assert found == [1.25, 1.5, 6]
    assert (row["lag1_chance_ratio"], row["lag1_uniform_ratio"]) == (1.25 / 1.5, 3 / 6)


@settings(max_examples=18, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=routing_traces(known_sizes=True))
def test_bytes_missed_are_said_per_step_and_per_accepted_token(tmp_path, trace):
    row = one_row(read_trace(write_trace(trace, tmp_path / "tiny.parquet")))
    scored = {(step, phase) for step, _, phase, _ in events_of(trace) if phase in ("decode", "unknown", "prefill")}
    scored = {(step, phase) for step, phase in scored if row["phase"] in ("all", phase)}
    # One request: every decoded step accepts a token, the prefill one in its last step.
    prefilled = [step for step, phase in scored if phase == "prefill"]
    accepted = sum(phase != "prefill" for _, phase in scored) + bool(prefilled)
    assert row["scored_accepted_tokens"] == accepted
    assert row["miss_bytes_per_step"] == row["miss_bytes"] / row["scored_steps"]
    assert row["miss_bytes_per_accepted_token"] == row["miss_bytes"] / accepted
    unknown = one_row(trace)
    assert (unknown["scored_accepted_tokens"], unknown["miss_bytes_per_accepted_token"]) == (None, None)


# Intervals and nulls


def long_trace(steps: int = 60, **known) -> Trace:
    """Two layers of eight experts, two of them each step, some far more popular."""
    experts = np.random.default_rng(5).permuted(np.tile([0, 1, 2, 3, 4, 5, 6, 7], (steps, 2, 1)), axis=-1)
    popular = np.sort(experts.reshape(steps, 2, 4, 2).min(axis=2), axis=-1)
    popular[..., 1] = np.where(popular[..., 0] == popular[..., 1], popular[..., 1] + 1, popular[..., 1])
    return make_trace(popular, num_experts=9, **known)


def test_intervals_are_those_of_the_scored_steps_and_paired_with_the_reference():
    replay = prepare(long_trace(), Window(warm_fraction=Fraction(1, 4)))
    asked = {"semantics": ATOMIC_OR_NOT, "capacities": [Capacity(experts=2), Capacity(experts=4)]}
    found = outcomes(replay, names=["sieve", "lru", "static"], scope="layer", **asked)
    accesses = replay.survey.step_accesses[15:]
    assert (accesses > 0).all()
    said = with_intervals(replay, found, "lru", seed=3)
    table = TABLES["hit_rate"]
    validate_table(table.frame([one.row for one in said]), table)
    for plain, one in zip(found, said, strict=True):
        row, hits = one.row, one.step_hits[15:]
        alone = hit_rate_interval(hits, accesses, seed=3)
        assert (row["hit_rate_low"], row["hit_rate_high"], row["block_steps"]) == alone[:3]
        assert row["hit_rate_low"] <= row["hit_rate"] <= row["hit_rate_high"]
        (reference,) = (
            other
            for other in found
            if other.row["policy"] == "lru"
            and other.row["semantics"] == row["semantics"]
            and other.row["capacity_experts_total"] == row["capacity_experts_total"]
        )
        compared = [row[f"over_reference{end}"] for end in ("", "_low", "_high")]
        if row["policy"] == "lru":
            assert (row["reference_policy"], compared) == (None, [None] * 3)
        else:
            both = difference_interval(hits, accesses, reference.step_hits[15:], accesses, seed=3)
            assert (row["reference_policy"], compared[1:]) == ("lru", list(both[:2]))
            assert compared[0] == row["hit_rate"] - reference.row["hit_rate"]
        unchanged = set(row) - {"hit_rate_low", "hit_rate_high", "block_steps", "reference_policy", "over_reference"}
        unchanged -= {"over_reference_low", "over_reference_high"}
        assert all(row[name] == plain.row[name] for name in unchanged)


def test_a_reference_that_was_not_simulated_leaves_no_difference():
    replay = prepare(long_trace())
    found = outcomes(replay, names=["sieve"], scope="layer", semantics=["sequential"], capacities=[Capacity(experts=2)])
    (one,) = with_intervals(replay, found, "arc")
    assert (one.row["reference_policy"], one.row["over_reference"]) == (None, None)
    assert one.row["hit_rate_low"] is not None


def test_too_few_steps_have_a_difference_and_no_interval():
    replay = prepare(single_layer(0))
    found = outcomes(replay, names=["lru", "fifo"], scope="layer", semantics=["sequential"], capacities=[Capacity(1)])
    row = with_intervals(replay, found)[1].row
    assert (row["hit_rate_low"], row["block_steps"], row["over_reference"], row["over_reference_low"]) == (
        None, None, 0.0, None,
    )  # fmt: skip


@settings(max_examples=18, deadline=None)
@given(data=st.data(), trace=routing_traces(), dedup=st.sampled_from(DEDUPS), seed=st.integers(0, 9))
def test_nulls_are_the_same_requests_on_the_shuffled_trace(data, trace, dedup, seed):
    replay = prepare(trace, dedup=dedup, order="ascending")
    asked = {"names": ["lru", "belady_forced"], "scope": "layer", "semantics": ATOMIC_OR_NOT}
    asked["capacities"] = [data.draw(capacities(trace))]
    found = outcomes(replay, **asked)
    without_order = shuffled_replay(replay, seed)
    said = with_nulls(found, without_order, outcomes(without_order, **asked))
    again = prepare(shuffled(trace, seed), Window(phase=replay.phase), dedup=dedup, order="ascending")
    for one, wanted in zip(said, simulate(again, **asked), strict=True):
        row = one.row
        assert (row["shuffled_accesses"], row["shuffled_hits"]) == (wanted["accesses"], wanted["hits"])
        assert row["shuffled_hit_rate"] == wanted["hit_rate"]


@settings(max_examples=18, deadline=None)
@given(data=st.data(), trace=single_row_traces(), scope=st.sampled_from(SCOPES))
def test_a_table_fitted_on_all_steps_hits_as_often_without_order(data, trace, scope):
    replay = prepare(trace)
    asked = {"names": ["static"], "scope": scope, "semantics": ["sequential"]}
    asked["capacities"] = [data.draw(capacities(trace))]
    without_order = shuffled_replay(replay, 4)
    (one,) = with_nulls(outcomes(replay, **asked), without_order, outcomes(without_order, **asked))
    assert one.row["shuffled_hits"] == one.row["hits"]


# Breakdowns


@settings(max_examples=18, deadline=None)
@given(asked=requests(), warm_percent=st.sampled_from([0, 40]))
def test_layers_phases_and_steps_add_up_to_the_row(asked, warm_percent):
    trace, said, capacity, scope = asked
    replay = prepare(trace, **{**said, "window": replace(said["window"], warm_fraction=Fraction(warm_percent, 100))})
    table, summed = TABLES["hit_rate_layer"], ("accesses", "hits", "misses", "compulsory_misses", "capacity_misses")
    found = decide_cells(replay, every_cell(capacity), scope=scope)
    validate_table(table.frame([row for one in found for row in layer_rows(replay, one)]), table)
    for one in found:
        by_layer, by_phase, by_step = layer_rows(replay, one), phase_rows(one), step_rows(replay, one)
        assert [row["layer_id"] for row in by_layer] == trace.metadata.moe_layer_ids
        assert all(row[name] == one.row[name] for row in by_layer for name in CONTRACT)
        for name in summed:
            assert sum(row[name] for row in by_layer) == sum(row[name] for row in by_phase) == one.row[name], name
        if one.row["miss_bytes"] is not None:
            assert sum(row["miss_bytes"] for row in by_layer) == one.row["miss_bytes"]
        else:
            assert {row["miss_bytes"] for row in by_layer + by_phase} == {None}
        assert len(by_step) == one.row["scored_steps"]
        assert sum(row["hits"] for row in by_step) == one.row["hits"]
        assert sum(row["accesses"] for row in by_step) == one.row["accesses"]
        assert min(row["step"] for row in by_step) >= replay.warm_steps


def test_a_capacity_beyond_every_expert_is_no_more_than_all():
    trace = make_trace([[[[0]], [[0]]], [[[1]], [[0]]], [[[0]], [[0]]]], num_experts=2, expert_bytes=10)
    replay = prepare(trace)
    for scope, many, few in [
        ("layer", Capacity(experts=2**31 - 1), Capacity(experts=2)),
        ("global", Capacity(experts=2**31 - 1), Capacity(experts=4)),
        ("global", Capacity(bytes=2**61), Capacity(bytes=40)),
    ]:
        vast = decide_cells(replay, every_cell(many), scope=scope)
        for one, other in zip(vast, decide_cells(replay, every_cell(few), scope=scope), strict=True):
            # A pinned part is a share of what was asked for, whatever there is to hold.
            if one.row["policy"] != "pinned_lru":
                assert one.row["hits"] == other.row["hits"], one.row["policy"]
