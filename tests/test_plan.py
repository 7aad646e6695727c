"""Plan files: what is written is read again, others' are read as the format says, a misfit is refused by its first."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayer.plan import BEFORE_ALL, PLAN_SCHEMA, MalformedPlan, first_misfit, read_plan, write_plan
from replayer.trace import Trace
from tests.builders import make_trace, plan_of, predictions_of
from tests.strategies import routing_traces


def three_events() -> Trace:
    """Layers 5 and 7 with 2 and 4 experts, then layer 5 again."""
    return make_trace([[[[0]], [[3]]], [[[1]], []]], layer_ids=[5, 7], num_experts=[2, 4], trace_id="three")


def write_rows(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(routing_traces(), st.data())
def test_a_plan_that_is_written_is_read_again(tmp_path, trace, data):
    experts = [trace.metadata.experts_per_layer[layer] for layer in trace.event_layer]
    predictions = [
        data.draw(st.none() | st.lists(st.integers(0, number - 1), max_size=4, unique=True)) for number in experts
    ]
    plan = plan_of(predictions)
    issued = [data.draw(st.integers(BEFORE_ALL, event - 1)) for event in range(len(experts))]
    plan = dataclasses.replace(plan, issued_after=np.where(plan.covered, issued, BEFORE_ALL))
    path = tmp_path / "plan.parquet"
    write_plan(path, plan, trace)
    assert pq.read_schema(path) == PLAN_SCHEMA
    found = read_plan(path, trace)
    assert predictions_of(found) == predictions
    assert found.issued_after.tolist() == plan.issued_after.tolist()
    # One row per covered event, and a prediction of nothing is a row of its own.
    rows = pq.read_table(path).to_pylist()
    assert [row["event_id"] for row in rows] == np.flatnonzero(plan.covered).tolist()
    assert [row["expert_ids"] for row in rows] == [named for named in predictions if named is not None]


def test_a_plan_of_others_may_leave_out_what_we_write_and_stand_in_any_order(tmp_path):
    path = write_rows(
        tmp_path / "plan.parquet",
        scores=pa.array([[0.5, 0.25], []]),
        expert_ids=pa.array([[3, 0], []], pa.large_list(pa.int64())),
        event_id=pa.array([1, 0], pa.int64()),
        issued_after_event_id=pa.array([0, None], pa.int32()),
    )
    plan = read_plan(path, three_events())
    assert predictions_of(plan) == [[], [3, 0], None]
    assert plan.issued_after.tolist() == [BEFORE_ALL, 0, BEFORE_ALL]


LISTS = pa.list_(pa.uint16())


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"event_id": [0, 3]}, "event 3: the trace has 3 events"),
        ({"event_id": [0, -1]}, "event -1: the trace has 3 events"),
        ({"layer_id": [5, -7]}, "event 1: layer_id -7, in the trace it is of layer 7"),
        ({"layer_id": [5, 5]}, "event 1: layer_id 5, in the trace it is of layer 7"),
        ({"expert_ids": [[2], [9]]}, "event 0: expert 2, wanted below the 2 of layer 5"),
        ({"expert_ids": [[1], [4, 9]]}, "event 1: expert 4, wanted below the 4 of layer 7"),
        ({"expert_ids": [[1], [3, 0, 3]]}, "event 1: expert 3 named twice"),
        ({"issued_after_event_id": [None, 1]}, "event 1: issued after event 1, wanted an event before its target"),
        ({"issued_after_event_id": [0, 2]}, "event 0: issued after event 0, wanted an event before its target"),
        ({"issued_after_event_id": [-2, 0]}, "event 0: issued after event -2, wanted -1 or more"),
        ({"event_id": [1, 1]}, "event 1: two rows, wanted one"),
        ({"event_id": [None, 1]}, "nulls in event_id or expert_ids, wanted none"),
        ({"expert_ids": [None, [1]]}, "nulls in event_id or expert_ids, wanted none"),
        ({"expert_ids": [[0], [None]]}, "nulls in event_id or expert_ids, wanted none"),
    ],
)
def test_a_plan_that_does_not_fit_the_trace_is_refused_with_its_first_mismatch(tmp_path, columns, said):
    sound = {"event_id": [0, 1], "issued_after_event_id": [None, 0], "layer_id": [5, 7], "expert_ids": [[1], [3]]}
    types = {"expert_ids": LISTS}
    rows = {name: pa.array(value, types.get(name, pa.int64())) for name, value in (sound | columns).items()}
    if "event_id" in columns:
        del rows["layer_id"]
    path = write_rows(tmp_path / "plan.parquet", **rows)
    with pytest.raises(MalformedPlan, match=re.escape(said)):
        read_plan(path, three_events())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"expert_ids": None}, "no column expert_ids"),
        ({"issued_after_event_id": None}, "no column issued_after_event_id"),
        ({"event_id": pa.array(["0", "1"])}, "column event_id of string, wanted integers"),
        ({"expert_ids": pa.array([1, 2])}, "column expert_ids of int64, wanted lists of integers"),
        ({"expert_ids": pa.array([[70_000], [1]])}, "event 0: expert 70000, wanted 0 to 65535"),
        ({"expert_ids": pa.array([[0], [-1]])}, "event 1: expert -1, wanted 0 to 65535"),
    ],
)
def test_a_file_of_other_columns_is_refused(tmp_path, changed, said):
    columns = {
        "event_id": pa.array([0, 1]),
        "issued_after_event_id": pa.array([None, 0], pa.int64()),
        "expert_ids": pa.array([[1], [3]], LISTS),
    } | changed
    path = write_rows(tmp_path / "plan.parquet", **{name: one for name, one in columns.items() if one is not None})
    with pytest.raises(MalformedPlan, match=re.escape(said)):
        read_plan(path, three_events())


@pytest.mark.parametrize("name", ["event_id", "issued_after_event_id", "layer_id", "expert_ids"])
def test_a_number_beyond_64_bits_is_refused_with_its_column(tmp_path, name):
    most = pa.array([2**64 - 1, 0], pa.uint64())
    columns = {
        "event_id": pa.array([0, 1]),
        "issued_after_event_id": pa.array([None, 0], pa.int64()),
        "layer_id": pa.array([5, 7]),
        "expert_ids": pa.array([[1], [3]], LISTS),
    }
    columns[name] = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), most) if name == "expert_ids" else most
    path = write_rows(tmp_path / "plan.parquet", **columns)
    said = f"column {name}: {2**64 - 1}, wanted at most {2**63 - 1}"
    with pytest.raises(MalformedPlan, match=re.escape(said)):
        read_plan(path, three_events())


@pytest.mark.parametrize(
    ("lists", "named"),
    [
        (pa.array([[1], [3]], pa.list_(pa.int64(), 1)), [[1], [3], None]),
        (pa.array([[], []]), [[], [], None]),
        (pa.array([[1], []], pa.list_(pa.int8())), [[1], [], None]),
    ],
)
def test_columns_of_nulls_alone_and_lists_of_any_kind_are_read(tmp_path, lists, named):
    path = write_rows(
        tmp_path / "plan.parquet", event_id=pa.array([0, 1]), issued_after_event_id=pa.nulls(2), layer_id=pa.nulls(2),
        expert_ids=lists,
    )  # fmt: skip
    assert predictions_of(read_plan(path, three_events())) == named


def test_a_plan_says_whose_it_is_and_one_of_another_trace_is_refused(tmp_path):
    path = tmp_path / "plan.parquet"
    write_plan(path, plan_of([[0], None, None]), three_events())
    assert pq.read_schema(path).metadata[b"trace_id"] == b"three"
    other = make_trace([[[[0]], [[3]]], [[[1]], []]], layer_ids=[5, 7], num_experts=[2, 4], trace_id="other")
    with pytest.raises(MalformedPlan, match="a plan of trace three, wanted one of other; make a plan for trace other"):
        read_plan(path, other)
    # A plan written by hand says nothing of it.
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    assert predictions_of(read_plan(path, other)) == [[0], None, None]


def test_a_plan_is_written_over_nothing_but_a_plan(tmp_path):
    trace, plan = three_events(), plan_of([[0], None, None])
    path = tmp_path / "plan.parquet"
    path.touch()
    write_plan(path, plan, trace)
    write_plan(path, plan, trace)
    for content in (b"notes", b"PAR1" + bytes(60) + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(MalformedPlan, match="there already, and no lookahead plan"):
            write_plan(path, plan, trace)
        assert path.read_bytes() == content
    write_rows(path, event_id=pa.array([1]))
    with pytest.raises(MalformedPlan, match="there already, and no lookahead plan"):
        write_plan(path, plan, trace)
    with pytest.raises(MalformedPlan, match="a folder, wanted the name of a file"):
        write_plan(tmp_path, plan, trace)
    with pytest.raises(MalformedPlan, match="no regular file"):
        write_plan(Path("/dev/null"), plan, trace)


def test_more_than_a_trace_can_be_told_is_refused_before_it_is_read(tmp_path):
    def claims(rows: int, ids: int) -> Path:
        return write_rows(
            tmp_path / "plan.parquet",
            event_id=pa.array(range(rows)),
            issued_after_event_id=pa.nulls(rows, pa.int64()),
            expert_ids=pa.array([[0] * ids] * rows, LISTS),
        )

    with pytest.raises(MalformedPlan, match=r"4 rows, wanted one per event, of which there are 3"):
        read_plan(claims(4, 1), three_events())
    # Ten million ids are some kilobytes on disk.
    path = claims(2, 5_000_000)
    assert path.stat().st_size < 2**20
    with pytest.raises(MalformedPlan, match=r"10,000,000 expert ids, wanted at most 3 events × 4 experts"):
        read_plan(path, three_events())


def test_a_column_that_stands_twice_is_refused(tmp_path):
    ids = pa.array([0])
    table = pa.Table.from_arrays(
        [ids, ids, pa.nulls(1, pa.int64()), pa.array([[0]], LISTS)],
        names=["event_id", "event_id", "issued_after_event_id", "expert_ids"],
    )
    pq.write_table(table, tmp_path / "plan.parquet")
    with pytest.raises(MalformedPlan, match="column 'event_id' is there twice"):
        read_plan(tmp_path / "plan.parquet", three_events())


def test_what_is_no_parquet_is_refused_and_what_is_not_there_is_an_oserror(tmp_path):
    path = tmp_path / "plan.parquet"
    for content in (b"", b"event_id,expert_ids\n0,1\n", b"PAR1" + bytes(60) + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(MalformedPlan, match="no Parquet file of a lookahead plan"):
            read_plan(path, three_events())
    path.unlink()
    write_plan(path, plan_of([[0], None, None]), three_events())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MalformedPlan, match="no Parquet file of a lookahead plan"):
        read_plan(path, three_events())
    with pytest.raises(FileNotFoundError):
        read_plan(tmp_path / "nothing", three_events())


def test_a_plan_that_does_not_fit_is_not_written_and_an_older_file_stays(tmp_path):
    path = tmp_path / "plan.parquet"
    write_plan(path, plan_of([[0], None, None]), three_events())
    before = path.read_bytes()
    with pytest.raises(MalformedPlan, match="event 0: expert 2, wanted below the 2 of layer 5"):
        write_plan(path, plan_of([[2], None, None]), three_events())
    with pytest.raises(MalformedPlan, match="a plan for 2 events, the trace has 3"):
        write_plan(path, plan_of([[0], None]), three_events())
    assert path.read_bytes() == before


def test_the_first_misfit_is_that_of_the_first_event():
    trace = three_events()
    sound = plan_of([[0], [3], [1]])
    assert first_misfit(sound, trace) is None
    late = dataclasses.replace(sound, issued_after=np.array([-1, 0, 2]))
    assert first_misfit(late, trace) == "event 2: issued after event 2, wanted an event before its target"
    both = dataclasses.replace(late, expert_ids=np.array([0, 4, 1], dtype=np.uint16))
    assert first_misfit(both, trace) == "event 1: expert 4, wanted below the 4 of layer 7"
    silent = dataclasses.replace(sound, covered=np.array([True, False, True]))
    assert first_misfit(silent, trace) == "event 1: experts of an event that is not covered"
    cut = dataclasses.replace(sound, first_id=np.array([0, 1, 2, 2]))
    assert first_misfit(cut, trace) == "offsets that do not divide the ids of the plan among its events"
