"""Whole curves of a replay against `simulate` at every capacity: they are one result, found in two ways."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.hit_curves import HitCurve, curve_rows, cycle_floor, lru_curve, static_curve
from replayer.simulate import Capacity, Choices, Replay, Window, prepare, simulate
from replayer.trace import open_trace
from schemas.columns import ACCESS_ORDERS, DEDUPS, SCOPES
from schemas.tables import CONTRACT, TABLES
from schemas.validation import validate_table
from tests.builders import make_trace
from tests.strategies import routing_traces
from tests.test_trace import write_parts

ATOMIC_OR_NOT = ("event_atomic", "sequential")
MOST_PER_CACHE = 20  # of the generated traces: three layers of at most six experts


@st.composite
def replays(draw: st.DrawFn) -> Replay:
    """Replays of small traces in every window and order."""
    trace = draw(routing_traces())
    window = Window(phase="all", warm_pass=draw(st.booleans()))
    order, dedup = draw(st.sampled_from(ACCESS_ORDERS)), draw(st.sampled_from(DEDUPS))
    replay = prepare(trace, window, order=order, dedup=dedup)
    warm = Fraction(draw(st.integers(0, replay.num_steps - 1)), replay.num_steps)
    phases = [name for name, code in (("prefill", 0), ("decode", 1), ("unknown", 3)) if code in trace.event_phase]
    phase = draw(st.sampled_from(["all", *phases]))
    try:
        return prepare(trace, replace(window, warm_fraction=warm, phase=phase), order=order, dedup=dedup, seed=2)
    except ValueError:
        return replay


def points(replay: Replay, policy: str, scope: str, semantics: str, capacities: range, **known) -> list[dict]:
    asked = [Capacity(experts=experts) for experts in capacities]
    return list(simulate(replay, names=[policy], scope=scope, semantics=[semantics], capacities=asked, **known))


def assert_curve_is(curve: HitCurve, rows: list[dict]) -> None:
    assert curve.capacity_experts_total.tolist() == [row["capacity_experts_total"] for row in rows]
    assert curve.hits.tolist() == [row["hits"] for row in rows]
    assert curve.compulsory_misses.tolist() == [row["compulsory_misses"] for row in rows]
    if rows[0]["miss_bytes"] is None:
        assert curve.hit_bytes is None
    else:
        assert curve.hit_bytes.tolist() == [row["demand_bytes"] - row["miss_bytes"] for row in rows]


@settings(max_examples=40, deadline=None)
@given(replay=replays(), scope=st.sampled_from(SCOPES), semantics=st.sampled_from(ATOMIC_OR_NOT))
def test_the_lru_curve_is_simulate_at_every_capacity(replay, scope, semantics):
    curve = lru_curve(replay, scope=scope, semantics=semantics)
    assert_curve_is(curve, points(replay, "lru", scope, semantics, range(len(curve.hits))))
    (beyond,) = points(replay, "lru", scope, semantics, range(len(curve.hits), len(curve.hits) + 1))
    assert beyond["hits"] == curve.hits[-1]


@settings(max_examples=40, deadline=None)
@given(replay=replays(), scope=st.sampled_from(SCOPES), fit=st.sampled_from(["same", "first:1", "first:0.9999"]))
def test_the_static_curve_is_simulate_at_every_capacity(replay, scope, fit):
    if replay.num_steps == 1 and fit == "first:0.9999":
        fit = "same"
    curve = static_curve(replay, scope=scope, fit=fit)
    rows = points(replay, "static", scope, "sequential", range(len(curve.hits)), choices=Choices(fit=fit))
    assert_curve_is(curve, rows)


@pytest.mark.parametrize("scope", SCOPES)
def test_sizes_said_with_the_request_count_bytes(scope):
    replay = prepare(make_trace([[[[0, 1]], [[1, 2]]], [[[0, 2]], [[2, 1]]]], num_experts=3))
    for curve in (
        lru_curve(replay, scope=scope, semantics="sequential", expert_bytes=7),
        static_curve(replay, scope=scope, expert_bytes=7),
    ):
        assert curve.hit_bytes.tolist() == [7 * hits for hits in curve.hits.tolist()]


@settings(max_examples=15, deadline=None)
@given(replay=replays(), scope=st.sampled_from(SCOPES), semantics=st.sampled_from(ATOMIC_OR_NOT))
def test_rows_of_a_curve_keep_the_contract_and_are_those_of_simulate(replay, scope, semantics):
    table, capacities = TABLES["miss_ratio_curve"], range(MOST_PER_CACHE)
    found = []
    for curve in (lru_curve(replay, scope=scope, semantics=semantics), static_curve(replay, scope=scope)):
        rows = curve_rows(replay, curve, scope=scope, per_cache=capacities, fit="same")
        assert all(set(row) == set(table.column_names) for row in rows)
        for row, one in zip(rows, points(replay, curve.policy, scope, semantics, capacities), strict=True):
            same = {*CONTRACT, *table.measures} - {"miss_ratio"}
            # A table's curve holds in either semantics, so it names none.
            same -= {"semantics"} if curve.policy == "static" else set()
            assert {name: row[name] for name in same} == {name: one[name] for name in same}
            assert row["miss_ratio"] == row["misses"] / row["accesses"]
        found += [{**row, "semantics": semantics} for row in rows]
    validate_table(table.frame(found), table)


@settings(max_examples=20, deadline=None)
@given(replay=replays(), scope=st.sampled_from(SCOPES))
def test_a_curve_of_a_trace_on_disk_is_that_in_memory(tmp_path_factory, replay, scope):
    path = write_parts(replay.trace, tmp_path_factory.mktemp("parts") / "tiny.parquet", 2)
    window = replace(replay.window, phase=replay.phase)
    on_disk = prepare(open_trace(path), window, order=replay.order, dedup=replay.dedup, seed=replay.seed)
    for one in (on_disk, replay):
        assert cycle_floor(one) == cycle_floor(replay)
        assert static_curve(one, scope=scope).hits.tolist() == static_curve(replay, scope=scope).hits.tolist()
        found, wanted = (lru_curve(each, scope=scope, semantics="event_atomic") for each in (one, replay))
        assert found.hits.tolist() == wanted.hits.tolist()


@settings(max_examples=60, deadline=None)
@given(replay=replays(), semantics=st.sampled_from(ATOMIC_OR_NOT))
def test_a_global_lru_at_or_below_the_floor_hits_nothing(replay, semantics):
    floor = cycle_floor(replay)
    # An event that names an expert twice hits it itself, sequentially.
    if floor is not None and (replay.dedup == "union" or semantics == "event_atomic"):
        assert not lru_curve(replay, scope="global", semantics=semantics).hits[: floor + 1].any()


def test_the_floor_of_whole_steps_is_the_experts_of_the_other_layers():
    trace = make_trace([[[[0, 1]], [[0, 1]], [[2, 1]]]] * 3, num_experts=3)
    replay = prepare(trace)
    assert cycle_floor(replay) == 4
    assert lru_curve(replay, scope="global", semantics="event_atomic").hits.tolist() == [0] * 5 + [2 * 3, *[12] * 4]


def test_a_trace_of_one_visit_has_no_floor():
    assert cycle_floor(prepare(make_trace([[[[0, 1]], [[1, 0]]]]))) is None


def test_the_floor_of_a_warm_pass_sees_the_second_pass_follow_the_first():
    """Layer 0 ends the trace and begins it: in the second pass nothing lies between."""
    trace = make_trace([[[[0]], [[0]]], [[[0]], []]], num_experts=1)
    once, twice = (prepare(trace, Window(warm_pass=warm)) for warm in (False, True))
    assert (cycle_floor(once), cycle_floor(twice)) == (1, 0)
    assert lru_curve(twice, scope="global", semantics="event_atomic").hits.tolist()[1] == 1
