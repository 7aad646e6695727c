"""Plan files: what is written comes back, and what does not fit the trace is refused with what is first wrong."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayer.plan import BEFORE_ALL, MalformedPlan, Plan, read_plan, write_plan
from replayer.trace import Trace
from tests.builders import make_trace
from tests.replays import routing

STEPS, LAYERS, EXPERTS = 6, 3, 16
EVENTS = STEPS * LAYERS


@pytest.fixture(scope="module")
def trace() -> Trace:
    """18 events of 4 experts, one after the other, on layers 2, 3 and 7 of 16 experts each."""
    return make_trace(routing(STEPS, layers=LAYERS, experts=EXPERTS), layer_ids=[2, 3, 7], num_experts=EXPERTS)


named = st.none() | st.tuples(st.lists(st.integers(0, EXPERTS - 1), max_size=6, unique=True), st.integers(0, EVENTS))


def plan_of(said: list[tuple[list[int], int] | None]) -> Plan:
    """A plan that says so of each event: experts, and how long before it that was known, all along if longer."""
    lengths = [0 if one is None else len(one[0]) for one in said]
    ids = [expert for one in said if one is not None for expert in one[0]]
    after = [BEFORE_ALL if one is None else max(event - 1 - one[1], BEFORE_ALL) for event, one in enumerate(said)]
    return Plan(
        np.array([one is not None for one in said]),
        np.array(after, dtype=np.int64),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array(ids, dtype=np.uint16),
    )


@given(said=st.lists(named, min_size=EVENTS, max_size=EVENTS))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_comes_back(said: Any, trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "plan.parquet"
    plan = plan_of(said)
    write_plan(file, plan, trace)
    for name, values in vars(read_plan(file, trace)).items():
        np.testing.assert_array_equal(values, getattr(plan, name))
    rows = pq.read_table(file).to_pylist()
    assert [row["event_id"] for row in rows] == [event for event, one in enumerate(said) if one is not None]
    assert [row["layer_id"] for row in rows] == [[2, 3, 7][row["event_id"] % LAYERS] for row in rows]


def written(file: Path, **columns: Any) -> Path:
    """A plan file by somebody else: rows for events 5, 4 and 9, but for what is said otherwise."""
    usual = {
        "event_id": pa.array([5, 4, 9], pa.int64()),
        "issued_after_event_id": pa.array([4, None, 2], pa.int32()),
        "expert_ids": pa.array([[1, 0], [], [3]], pa.list_(pa.int64())),
    }
    chosen = {name: values for name, values in {**usual, **columns}.items() if values is not None}
    pq.write_table(pa.table(chosen), file)
    return file


def test_files_of_others_are_read_in_any_order_and_type(trace: Trace, tmp_path: Path) -> None:
    scores = pa.array([[0.5, 0.25], [], [1.0]], pa.list_(pa.float32()))
    plan = read_plan(written(tmp_path / "plan", scores=scores, note=pa.array(["a", "b", "c"])), trace)
    assert np.flatnonzero(plan.covered).tolist() == [4, 5, 9]
    assert plan.issued_after[[4, 5, 9]].tolist() == [BEFORE_ALL, 4, 2]
    assert plan.first_id[[4, 5, 6, 9, 10]].tolist() == [0, 0, 2, 2, 3]
    assert plan.expert_ids.tolist() == [1, 0, 3]


REFUSALS = [
    ({"event_id": pa.array([5, 4, 18], pa.int64())}, "event 18: the trace has 18 events"),
    ({"event_id": pa.array([5, 4, -1], pa.int64())}, "event -1: the trace has 18 events"),
    ({"event_id": pa.array([5, 4, 5], pa.int64())}, "event 5: two rows, wanted one"),
    ({"event_id": pa.array([5, None, 9], pa.int64())}, "nulls in event_id or expert_ids"),
    ({"event_id": pa.array(["5", "4", "9"])}, "column event_id of string, wanted integers"),
    ({"event_id": None}, "no column event_id"),
    ({"issued_after_event_id": pa.array([4, None, 9], pa.int64())}, "event 9: issued after event 9, wanted an event"),
    ({"issued_after_event_id": pa.array([4, -7, 9], pa.int64())}, "event 4: issued after event -7"),
    ({"layer_id": pa.array([7, 2, 2], pa.int64())}, "event 4: layer_id 2, in the trace it is of layer 3"),
    ({"expert_ids": pa.array([[1], [], [16]], pa.list_(pa.int64()))}, "event 9: expert 16, wanted below the 16 of "),
    ({"expert_ids": pa.array([[1], [-1], [3]], pa.list_(pa.int64()))}, "event 4: expert -1, wanted 0 to 65535"),
    ({"expert_ids": pa.array([[1], [70000], []], pa.list_(pa.int64()))}, "event 4: expert 70000, wanted 0 to 65535"),
    ({"expert_ids": pa.array([[3, 1, 3], [], [3]], pa.list_(pa.int64()))}, "event 5: expert 3 named twice"),
    ({"expert_ids": pa.array([[1], None, [3]], pa.list_(pa.int64()))}, "nulls in event_id or expert_ids"),
    ({"expert_ids": pa.array([[1], [None], [3]], pa.list_(pa.int64()))}, "nulls in event_id or expert_ids"),
    ({"expert_ids": pa.array([1, 2, 3])}, "column expert_ids of int64, wanted lists of integers"),
    ({"expert_ids": pa.array([[1.5], [], []])}, "column expert_ids of list<item: double>|list<element: double>"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "said"), REFUSALS, ids=[said[:40] for _, said in REFUSALS])
def test_what_does_not_fit_is_refused(columns: dict[str, Any], said: str, trace: Trace, tmp_path: Path) -> None:
    file = written(tmp_path / "plan", **columns)
    pattern = "|".join(re.escape(part) for part in said.split("|"))
    with pytest.raises(MalformedPlan, match=pattern) as caught:
        read_plan(file, trace)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_the_first_mismatch_in_the_order_of_events_is_named(trace: Trace, tmp_path: Path) -> None:
    ids = pa.array([[1, 1], [40], [3]], pa.list_(pa.int64()))
    late = pa.array([4, None, 11], pa.int64())
    with pytest.raises(MalformedPlan, match=r"event 4: expert 40"):
        read_plan(written(tmp_path / "plan", expert_ids=ids, issued_after_event_id=late), trace)


def test_huge_claims_are_refused_before_anything_is_decoded(trace: Trace, tmp_path: Path) -> None:
    many = pa.array([[0] * 100_000] * 3, pa.list_(pa.int64()))
    with pytest.raises(MalformedPlan, match=r"300,000 expert ids, wanted at most 18 events × 16 experts"):
        read_plan(written(tmp_path / "plan", expert_ids=many), trace)
    rows = {
        "event_id": pa.array(range(19), pa.int64()),
        "issued_after_event_id": pa.array([None] * 19, pa.int64()),
        "expert_ids": pa.array([[]] * 19, pa.list_(pa.int64())),
    }
    with pytest.raises(MalformedPlan, match=r"19 rows, wanted one per event, of which there are 18"):
        read_plan(written(tmp_path / "rows", **rows), trace)


def test_what_is_no_parquet_is_refused_and_a_plan_for_another_trace_is_not_written(
    trace: Trace, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("event_id,expert_ids\n")
    with pytest.raises(MalformedPlan, match=r"no Parquet file of a lookahead plan"):
        read_plan(tmp_path / "text", trace)
    with pytest.raises(FileNotFoundError):
        read_plan(tmp_path / "none", trace)
    with pytest.raises(MalformedPlan, match=r"a plan for 1 events, the trace has 18"):
        write_plan(tmp_path / "plan", plan_of([([1], 0)]), trace)
    assert not (tmp_path / "plan").exists()
