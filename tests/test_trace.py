"""Reading canonical traces: events come back as written, broken files are refused with the reason, walks keep order."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayer.trace import (
    MalformedTrace,
    Trace,
    read_metadata,
    read_trace,
    repeat_twice,
    steps_without_warmup,
    walk,
)
from schemas.columns import DEDUPS
from schemas.trace import METADATA_KEY, PHASE_CODES, TraceMetadata
from schemas.validation import validate_trace
from tests import oracles
from tests.builders import canonical_table, make_trace, write_trace
from tests.strategies import routing_traces


def small_trace(**known) -> Trace:
    """Three steps on layers 1 and 4: a warm-up, a prefill pass of two tokens, one decoded token."""
    return make_trace(
        [
            [[[0, 1]], [[2, 1]]],
            [[[3, 1], [1, 0]], [[2, 0], [2, 0]]],
            [[[0, 2]], [[1, 2]]],
        ],
        phases=["warmup", "prefill", "decode"],
        layer_ids=[1, 4],
        num_experts=[4, 3],
        **known,
    )


def assert_same_trace(found: Trace, wanted: Trace) -> None:
    assert found.metadata == wanted.metadata
    for name in ("event_layer", "event_step", "event_phase", "event_first_row", "expert_ids", "layer_first_object"):
        assert getattr(found, name).dtype == getattr(wanted, name).dtype, name
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name


def test_rows_of_one_event_are_grouped(tmp_path):
    trace = read_trace(write_trace(small_trace(), tmp_path / "tiny.parquet"))
    assert trace.event_first_row.tolist() == [0, 1, 2, 4, 6, 7, 8]
    assert trace.event_layer.tolist() == [0, 1, 0, 1, 0, 1]
    assert trace.event_step.tolist() == [0, 0, 1, 1, 2, 2]
    assert [list(PHASE_CODES)[code] for code in trace.event_phase] == ["warmup"] * 2 + ["prefill"] * 2 + ["decode"] * 2
    assert trace.expert_ids[2:4].tolist() == [[3, 1], [1, 0]]
    assert trace.layer_first_object.tolist() == [0, 4, 7]
    assert (trace.num_objects, trace.top_k) == (7, 2)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=routing_traces())
def test_a_written_trace_keeps_the_contract_and_reads_back_the_same(tmp_path, trace):
    path = write_trace(trace, tmp_path / "tiny.parquet")
    validate_trace([pl.read_parquet(path)], trace.metadata)
    assert_same_trace(read_trace(path), trace)
    assert read_metadata(path) == trace.metadata


def test_many_row_groups_with_dictionaries_of_their_own_read_as_one(tmp_path):
    trace = small_trace()
    table, path = canonical_table(trace), tmp_path / "tiny.parquet"
    with pq.ParquetWriter(path, table.schema) as writer:
        for begin, end in pairwise([0, 2, 6, 8]):
            rows = table.slice(begin, end - begin)
            phase = rows.column("phase").cast(pa.string()).combine_chunks().dictionary_encode()
            phase = phase.cast(table.schema.field("phase").type)
            writer.write_table(
                rows.set_column(rows.schema.get_field_index("phase"), table.schema.field("phase"), phase)
            )
    assert pq.ParquetFile(path).num_row_groups == 3
    assert_same_trace(read_trace(path), trace)


def rewritten(trace: Trace, **columns) -> pa.Table:
    """The canonical table of `trace` with whole columns replaced."""
    table = canonical_table(trace)
    for name, values in columns.items():
        field = table.schema.field(name)
        array = pa.array(values, field.type)
        table = table.set_column(table.schema.get_field_index(name), field.with_nullable(True), array)
    return table


def with_metadata(trace: Trace, **facts) -> pa.Table:
    """The canonical table of `trace` under metadata of which some facts are replaced."""
    stored = TraceMetadata.model_validate({**trace.metadata.model_dump(), **facts}).model_dump_json()
    return canonical_table(trace).replace_schema_metadata({METADATA_KEY: stored.encode()})


def refused(table: pa.Table, path: Path, message: str) -> None:
    pq.write_table(table, path)
    with pytest.raises(MalformedTrace, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("read", [read_trace, read_metadata])
@pytest.mark.parametrize("content", [b"", b"tok,layer\n1,2\n" * 9, b"PAR1 only the beginning"])
def test_a_file_that_is_no_parquet_is_refused(tmp_path, read, content):
    path = tmp_path / "dump.csv"
    path.write_bytes(content)
    with pytest.raises(MalformedTrace, match=r"dump\.csv: .*Parquet.*expert-tier ingest|dump\.csv: .*ingest the dump"):
        read(path)


@pytest.mark.parametrize("read", [read_trace, read_metadata])
def test_a_truncated_file_is_refused(tmp_path, read):
    path = write_trace(small_trace(), tmp_path / "tiny.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MalformedTrace, match=r"tiny\.parquet"):
        read(path)


@pytest.mark.parametrize("read", [read_trace, read_metadata])
def test_a_file_with_a_damaged_footer_is_refused(tmp_path, read):
    path = write_trace(small_trace(), tmp_path / "tiny.parquet")
    content = bytearray(path.read_bytes())
    # A Parquet file ends with its footer, the footer's length in four bytes, and PAR1.
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[footer : footer + 40] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(MalformedTrace, match=r"tiny\.parquet: .*ingest"):
        read(path)


def test_a_file_with_damaged_pages_is_refused(tmp_path):
    path = write_trace(small_trace(), tmp_path / "tiny.parquet")
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    with pytest.raises(MalformedTrace, match=r"tiny\.parquet: not a readable Parquet file"):
        read_trace(path)


@pytest.mark.parametrize("read", [read_trace, read_metadata])
def test_a_missing_file_is_an_os_error(tmp_path, read):
    with pytest.raises(FileNotFoundError, match=r"absent\.parquet"):
        read(tmp_path / "absent.parquet")


@pytest.mark.parametrize("read", [read_trace, read_metadata])
def test_parquet_of_someone_else_is_refused(tmp_path, read):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"layer": [1]}), path)
    with pytest.raises(MalformedTrace, match=r"other\.parquet: Parquet without expert_tier metadata.*ingest DUMP"):
        read(path)


@pytest.mark.parametrize("read", [read_trace, read_metadata])
@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"{not json", "metadata metadata: Invalid JSON"),
        (b"{}", "metadata schema_version: Field required"),
        (b"\xff\xfe", "metadata"),
    ],
)
def test_metadata_of_another_form_is_refused(tmp_path, read, stored, message):
    path = tmp_path / "tiny.parquet"
    pq.write_table(canonical_table(small_trace()).replace_schema_metadata({METADATA_KEY: stored}), path)
    with pytest.raises(MalformedTrace, match=rf"tiny\.parquet: {message}.*ingest the dump again"):
        read(path)


@pytest.mark.parametrize("read", [read_trace, read_metadata])
def test_a_newer_contract_is_refused_and_a_later_minor_version_is_read(tmp_path, read):
    path = tmp_path / "tiny.parquet"
    pq.write_table(with_metadata(small_trace(), schema_version="2.0"), path)
    with pytest.raises(MalformedTrace, match=r"contract 2\.0, this version reads 1\.0; ingest the dump again"):
        read(path)
    pq.write_table(with_metadata(small_trace(), schema_version="1.7"), path)
    read(path)


@pytest.mark.parametrize("name", canonical_table(small_trace()).schema.names)
def test_a_missing_column_is_refused(tmp_path, name):
    refused(canonical_table(small_trace()).drop_columns([name]), tmp_path / "t.parquet", f"column {name} is missing")


@pytest.mark.parametrize(
    ("name", "other_type"), [("event_id", pa.int64()), ("layer_id", pa.uint32()), ("phase", pa.string())]
)
def test_a_column_of_another_type_is_refused(tmp_path, name, other_type):
    table = canonical_table(small_trace())
    other = table.set_column(table.schema.get_field_index(name), name, table.column(name).cast(other_type))
    refused(other, tmp_path / "t.parquet", rf"column {name} is {other_type}, wanted .*; ingest the dump again")


def test_rows_of_another_width_than_top_k_are_refused(tmp_path):
    table = with_metadata(small_trace(), top_k_observed=3)
    refused(
        table, tmp_path / "t.parquet", r"column expert_ids is fixed_size_list.*\[2\], wanted fixed_size_list.*\[3\]"
    )


def test_a_count_of_rows_that_differs_from_the_metadata_is_refused(tmp_path):
    refused(canonical_table(small_trace()).slice(0, 7), tmp_path / "t.parquet", "7 rows, its metadata says 8")


def test_more_objects_than_the_kernels_can_number_are_refused(tmp_path):
    table = with_metadata(small_trace(), moe_layer_ids=list(range(17)), experts_per_layer=[65535] * 17)
    refused(table, tmp_path / "t.parquet", r"1114095 \(layer, expert\) pairs, at most 1048576")


@pytest.mark.parametrize("event_id", [[0, 1, 2, 2, 3, 3, 4, 6], [1, 2, 3, 3, 4, 4, 5, 6], [0, 1, 3, 3, 2, 2, 4, 5]])
def test_event_ids_that_are_not_dense_and_ascending_are_refused(tmp_path, event_id):
    table = rewritten(small_trace(), event_id=event_id)
    refused(table, tmp_path / "t.parquet", "event_id is not dense and ascending")


@pytest.mark.parametrize("layer_id", [0, 2, 5])
def test_a_layer_the_metadata_does_not_name_is_refused(tmp_path, layer_id):
    table = rewritten(small_trace(), layer_id=[1, 4, 1, 1, 4, 4, 1, layer_id])
    refused(table, tmp_path / "t.parquet", "a layer_id that is not in moe_layer_ids")


@pytest.mark.parametrize(("row", "expert"), [(0, 4), (5, 3), (7, 65535)])
def test_an_expert_its_layer_does_not_have_is_refused_with_the_row(tmp_path, row, expert):
    expert_ids = small_trace().expert_ids.tolist()
    expert_ids[row][1] = expert
    table = rewritten(small_trace(), expert_ids=expert_ids)
    refused(table, tmp_path / "t.parquet", f"row {row}: an expert id beyond its layer's experts")


def test_steps_that_descend_are_refused(tmp_path):
    table = rewritten(small_trace(), step_id=[0, 0, 2, 2, 2, 2, 1, 1])
    refused(table, tmp_path / "t.parquet", "step_id descends")


def test_an_unknown_phase_name_is_refused(tmp_path):
    table = rewritten(small_trace(), phase=["warmup"] * 7 + ["verify"])
    refused(table, tmp_path / "t.parquet", "phase outside prefill, decode, warmup, unknown")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("event_id", [0, 1, 2, 2, None, 3, 4, 5]),
        ("step_id", [None, 0, 1, 1, 1, 1, 2, 2]),
        ("phase", ["warmup"] * 7 + [None]),
        ("layer_id", [1, 4, 1, 1, 4, 4, 1, None]),
        ("expert_ids", [[0, 1], [2, 1], [3, 1], [1, 0], [2, 0], [2, 0], [0, 2], None]),
    ],
)
def test_a_missing_value_is_refused(tmp_path, name, values):
    refused(rewritten(small_trace(), **{name: values}), tmp_path / "t.parquet", "ingest the dump again")


def test_a_missing_expert_is_refused_and_never_read_as_expert_0(tmp_path):
    expert_ids = [*small_trace().expert_ids.tolist()[:-1], [1, None]]
    array = pa.array(expert_ids, pa.list_(pa.field("element", pa.uint16()), 2))
    table = canonical_table(small_trace())
    table = table.set_column(table.schema.get_field_index("expert_ids"), pa.field("expert_ids", array.type), array)
    refused(table, tmp_path / "t.parquet", "column expert_ids is .*, wanted .* not null>")


def test_a_trace_without_rows_is_read_as_one_without_events(tmp_path):
    nothing = {"rows": 0, "events": 0, "steps": 0, "accesses": 0}
    counts = {**small_trace().metadata.counts.model_dump(), **nothing}
    pq.write_table(with_metadata(small_trace(), counts=counts).slice(0, 0), tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.event_first_row.tolist() == [0]
    assert len(steps_without_warmup(trace)) == 0


def test_router_order_is_that_of_first_mention_row_by_row():
    trace = make_trace([[[[3, 1], [1, 0], [3, 2]]]])
    assert walk(trace, 0, 1, order="router").objects.tolist() == [3, 1, 0, 2]
    assert walk(trace, 0, 1, order="ascending").objects.tolist() == [0, 1, 2, 3]
    assert walk(trace, 0, 1, order="descending").objects.tolist() == [3, 2, 1, 0]
    assert walk(trace, 0, 1, order="router", dedup="none").objects.tolist() == [3, 1, 1, 0, 3, 2]
    assert walk(trace, 0, 1, order="ascending", dedup="none").objects.tolist() == [0, 1, 1, 2, 3, 3]


def test_objects_number_the_experts_of_all_layers_through():
    trace = small_trace()
    steps = walk(trace, 0, 2, order="router")
    assert steps.objects.tolist() == [3, 1, 0, 6, 4, 0, 2, 5, 6]
    assert steps.first_access.tolist() == [0, 3, 5, 7, 9]
    assert steps.layer.tolist() == [0, 1, 0, 1]
    assert steps.selections.tolist() == [4, 4, 2, 2]


def test_warm_up_counts_as_no_step_and_is_not_walked():
    trace = small_trace()
    assert steps_without_warmup(trace).tolist() == [1, 2]
    first, second = walk(trace, 0, 1, order="router"), walk(trace, 1, 2, order="router")
    assert first.phase.tolist() == [PHASE_CODES["prefill"]] * 2
    assert second.phase.tolist() == [PHASE_CODES["decode"]] * 2
    assert (first.step.tolist(), second.step.tolist()) == ([0, 0], [0, 0])
    assert walk(trace, 0, 0, order="router").num_events == 0


@settings(max_examples=60, deadline=None)
@given(
    trace=routing_traces(), order=st.sampled_from(["router", "ascending", "descending"]), dedup=st.sampled_from(DEDUPS)
)
def test_a_walk_lists_each_event_as_the_oracle_does(trace, order, dedup):
    steps = walk(trace, 0, len(steps_without_warmup(trace)), order=order, dedup=dedup)
    wanted = []
    for event, (begin, end) in enumerate(pairwise(trace.event_first_row.tolist())):
        if trace.event_phase[event] != PHASE_CODES["warmup"]:
            base = int(trace.layer_first_object[trace.event_layer[event]])
            experts = oracles.accessed(trace.expert_ids[begin:end].tolist(), order, dedup)
            wanted.append([base + expert for expert in experts])
    assert [steps.objects[begin:end].tolist() for begin, end in pairwise(steps.first_access)] == wanted


@settings(max_examples=40, deadline=None)
@given(trace=routing_traces(), dedup=st.sampled_from(DEDUPS), seed=st.integers(0, 2**32 - 1))
def test_a_random_walk_shuffles_inside_events_and_repeats_with_its_seed(trace, dedup, seed):
    end = len(steps_without_warmup(trace))
    plain = walk(trace, 0, end, order="ascending", dedup=dedup)
    shuffled, again = (walk(trace, 0, end, order="random", dedup=dedup, seed=seed) for _ in range(2))
    assert shuffled.objects.tolist() == again.objects.tolist()
    assert shuffled.first_access.tolist() == plain.first_access.tolist()
    for begin, end in pairwise(plain.first_access):
        assert sorted(shuffled.objects[begin:end].tolist()) == plain.objects[begin:end].tolist()


def test_every_order_of_an_event_is_about_equally_likely_under_random():
    trace = make_trace(np.tile([[[0, 1, 2]]], (6000, 1, 1)))
    orders = walk(trace, 0, 6000, order="random", seed=7).objects.reshape(-1, 3)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    # Binomial(6000, 1/6): one standard deviation is 29.
    assert len(counts) == 6
    assert counts.min() > 850
    assert counts.max() < 1150


def test_an_order_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="order 'rank', wanted one of router, ascending, descending, random"):
        walk(small_trace(), 0, 1, order="rank")


@settings(max_examples=20, deadline=None)
@given(trace=routing_traces())
def test_a_walk_repeated_twice_is_the_walk_after_itself(trace):
    once = walk(trace, 0, len(steps_without_warmup(trace)), order="router")
    twice = repeat_twice(once)
    assert twice.objects.tolist() == once.objects.tolist() * 2
    assert np.diff(twice.first_access).tolist() == np.diff(once.first_access).tolist() * 2
    for name in ("layer", "step", "phase", "selections"):
        assert getattr(twice, name).tolist() == getattr(once, name).tolist() * 2
