"""Simulated results: contracts, windows, capacities and fits of every row, and refusals that say what was wanted."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.simulate import (
    Capacity,
    UnusableRequest,
    Window,
    default_order,
    default_phase,
    fitted_counts,
    layer_quotas,
    object_sizes,
    prepare,
    simulate,
)
from replayer.trace import MalformedTrace, Trace
from schemas.columns import DEDUPS, PHASES, POLICIES, SCOPES, SEMANTICS
from schemas.tables import TABLES
from schemas.validation import validate_table
from tests import oracles
from tests.builders import make_trace, write_trace
from tests.strategies import capacities, routing_traces


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


@settings(max_examples=40, deadline=None)
@given(data=st.data(), trace=routing_traces(), dedup=st.sampled_from(DEDUPS), warm_pass=st.booleans())
def test_every_row_keeps_the_contract_of_hit_rate(data, trace, dedup, warm_pass):
    asked = data.draw(st.lists(capacities(trace), min_size=1, max_size=3, unique=True))
    scope = data.draw(st.sampled_from(SCOPES))
    replay = prepare(trace, Window(phase="all", warm_pass=warm_pass), dedup=dedup)
    rows = list(simulate(replay, names=POLICIES, scope=scope, semantics=SEMANTICS, capacities=asked))
    table = TABLES["hit_rate"]
    assert all(set(row) == set(table.column_names) for row in rows)
    validate_table(table.frame(rows), table)
    assert [(row["policy"], row["semantics"]) for row in rows[:: len(asked)]] == [
        (policy, semantics) for policy in POLICIES for semantics in SEMANTICS
    ]
    assert all(row["compulsory_misses"] <= row["misses"] for row in rows)
    assert all(row["miss_bytes"] is None or row["miss_bytes"] <= row["demand_bytes"] for row in rows)


@settings(max_examples=120, deadline=None)
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
    if warm_pass:
        replayed, is_scored = replayed * 2, [False] * len(is_scored) + is_scored
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
    rows = simulate(replay, names=POLICIES, scope=scope, semantics=SEMANTICS, capacities=[capacity])
    for row in rows:

        def decide(mine, row=row, **known):
            return oracles.decide(row["policy"], row["semantics"], mine, fitted_on=mine, **known)

        unit = sizes if capacity.bytes is not None else dict.fromkeys(range(trace.num_objects), 1)
        hits = oracles.each_cache(
            decide, events, [layer if scope == "layer" else 0 for layer, _ in replayed], held, size=unit
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


def test_only_a_static_table_names_its_fit():
    replay = prepare(single_layer(0, 1))
    asked = {"scope": "layer", "semantics": SEMANTICS, "capacities": [Capacity(experts=1)]}
    for row in simulate(replay, names=POLICIES, **asked):
        assert row["fit"] == ("same" if row["policy"] == "static" else None)


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
