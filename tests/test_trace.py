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

from replayer import trace as trace_module
from replayer.trace import (
    MalformedTrace,
    Trace,
    TraceFile,
    Walk,
    open_or_read,
    open_trace,
    part_of_walk,
    read_metadata,
    read_trace,
    steps_without_warmup,
    walk,
    walk_steps,
)
from schemas.columns import ACCESS_ORDERS, DEDUPS, PASS_KINDS, PHASES
from schemas.trace import METADATA_KEY, PHASE_CODES, TraceMetadata
from schemas.validation import validate_trace
from tests import oracles
from tests.builders import canonical_table, make_trace, write_trace
from tests.strategies import routing_traces

READERS = [read_trace, open_trace, open_or_read, read_metadata]


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
    """Both ways of reading refuse the table, and name the file."""
    pq.write_table(table, path)
    for read in (read_trace, open_trace):
        with pytest.raises(MalformedTrace, match=message) as error:
            read(path)
        assert str(path) in str(error.value)


def write_parts(trace: Trace, path: Path, steps_per_part: int, **columns) -> Path:
    """Writes `trace` with so many of its steps in every row group."""
    table = rewritten(trace, **columns).cast(canonical_table(trace).schema)
    row_step = table.column("step_id").to_numpy()
    cuts = np.searchsorted(row_step, np.unique(row_step)[::steps_per_part])
    with pq.ParquetWriter(path, table.schema) as writer:
        for begin, end in pairwise([*cuts.tolist(), table.num_rows]):
            writer.write_table(table.slice(begin, end - begin))
    return path


def events_in(steps: Walk) -> list[list[int]]:
    return [steps.objects[begin:end].tolist() for begin, end in pairwise(steps.first_access.tolist())]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("content", [b"", b"tok,layer\n1,2\n" * 9, b"PAR1 only the beginning"])
def test_a_file_that_is_no_parquet_is_refused(tmp_path, read, content):
    path = tmp_path / "dump.csv"
    path.write_bytes(content)
    with pytest.raises(MalformedTrace, match=r"dump\.csv: .*Parquet.*expert-tier ingest|dump\.csv: .*ingest the dump"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_a_truncated_file_is_refused(tmp_path, read):
    path = write_trace(small_trace(), tmp_path / "tiny.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MalformedTrace, match=r"tiny\.parquet"):
        read(path)


@pytest.mark.parametrize("read", READERS)
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
    for read in (read_trace, open_trace):
        with pytest.raises(MalformedTrace, match=r"tiny\.parquet: not a readable Parquet file"):
            read(path)


@pytest.mark.parametrize("read", READERS)
def test_a_missing_file_is_an_os_error(tmp_path, read):
    with pytest.raises(FileNotFoundError, match=r"absent\.parquet"):
        read(tmp_path / "absent.parquet")


@pytest.mark.parametrize("read", READERS)
def test_parquet_of_someone_else_is_refused(tmp_path, read):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"layer": [1]}), path)
    with pytest.raises(MalformedTrace, match=r"other\.parquet: Parquet without expert_tier metadata.*ingest DUMP"):
        read(path)


@pytest.mark.parametrize("read", READERS)
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


@pytest.mark.parametrize("read", READERS)
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
    refused(table, tmp_path / "t.parquet", "a phase outside prefill, decode, warmup, unknown")


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
    assert (len(open_trace(tmp_path / "t.parquet").steps), open_trace(tmp_path / "t.parquet").phases) == (0, set())


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
    assert events_in(steps) == wanted


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


@settings(max_examples=40, deadline=None)
@given(data=st.data(), trace=routing_traces(), dedup=st.sampled_from(DEDUPS))
def test_a_part_of_a_walk_lists_its_events_alone(data, trace, dedup):
    whole = walk(trace, 0, len(steps_without_warmup(trace)), order="router", dedup=dedup)
    begin = data.draw(st.integers(0, whole.num_events))
    end = data.draw(st.integers(begin, whole.num_events))
    part = part_of_walk(whole, begin, end)
    assert (part.num_events, part.order, part.dedup) == (end - begin, "router", dedup)
    assert part.first_access[0] == 0
    assert events_in(part) == events_in(whole)[begin:end]
    for name in ("layer", "step", "phase", "selections"):
        assert getattr(part, name).tolist() == getattr(whole, name)[begin:end].tolist(), name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    trace=routing_traces(),
    steps_per_part=st.integers(1, 4),
    order=st.sampled_from(ACCESS_ORDERS),
    dedup=st.sampled_from(DEDUPS),
    seed=st.integers(0, 2**64),
)
def test_the_parts_of_a_file_walk_as_the_whole_does(tmp_path, trace, steps_per_part, order, dedup, seed):
    opened = open_trace(write_parts(trace, tmp_path / "tiny.parquet", steps_per_part))
    assert len(opened.part_first_event) == pq.ParquetFile(opened.path).num_row_groups
    assert (opened.metadata, opened.num_objects, opened.top_k) == (trace.metadata, trace.num_objects, trace.top_k)
    assert opened.layer_first_object.tolist() == trace.layer_first_object.tolist()
    assert opened.steps.tolist() == steps_without_warmup(trace).tolist()
    assert opened.phases == set(trace.event_phase.tolist())
    said = {"order": order, "dedup": dedup, "seed": seed}
    whole = walk_steps(trace, opened.steps, **said)
    parts = [walk_steps(opened.part(part), opened.steps, **said) for part in range(len(opened.part_first_event))]
    assert [event for part in parts for event in events_in(part)] == events_in(whole)
    for name in ("layer", "step", "phase", "selections"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole, name).tolist(), name


@settings(max_examples=30, deadline=None)
@given(data=st.data(), trace=routing_traces(), order=st.sampled_from(ACCESS_ORDERS))
def test_the_walk_of_some_steps_is_what_they_are_in_the_walk_of_all(data, trace, order):
    steps = steps_without_warmup(trace)
    begin = data.draw(st.integers(0, len(steps)))
    end = data.draw(st.integers(begin, len(steps)))
    whole, some = walk(trace, 0, len(steps), order=order, seed=3), walk(trace, begin, end, order=order, seed=3)
    is_some = (whole.step >= begin) & (whole.step < end)
    assert events_in(some) == [event for event, is_in in zip(events_in(whole), is_some, strict=True) if is_in]
    assert some.step.tolist() == (whole.step[is_some] - begin).tolist()


def test_a_step_that_a_row_group_cuts_is_refused_in_parts_alone(tmp_path):
    table, path = canonical_table(small_trace()), tmp_path / "tiny.parquet"
    # Rows 2 to 5 are step 1: its events of layer 1, then those of layer 4.
    with pq.ParquetWriter(path, table.schema) as writer:
        for begin, end in pairwise([0, 4, 8]):
            writer.write_table(table.slice(begin, end - begin))
    with pytest.raises(MalformedTrace, match=r"tiny\.parquet: step 1 is cut by a row group; ingest the dump again"):
        open_trace(path)
    assert_same_trace(read_trace(path), small_trace())


def test_an_event_that_a_row_group_cuts_is_refused(tmp_path):
    table, path = canonical_table(small_trace()), tmp_path / "tiny.parquet"
    with pq.ParquetWriter(path, table.schema) as writer:
        for begin, end in pairwise([0, 3, 8]):
            writer.write_table(table.slice(begin, end - begin))
    with pytest.raises(MalformedTrace, match="event_id is not dense and ascending"):
        open_trace(path)


@pytest.mark.parametrize("name", ["rows", "events", "steps", "accesses"])
def test_every_count_of_the_metadata_is_checked(tmp_path, name):
    counts = small_trace().metadata.counts.model_dump()
    table = with_metadata(small_trace(), counts={**counts, name: counts[name] + 1})
    refused(table, tmp_path / "t.parquet", f"{counts[name]} {name}, its metadata says {counts[name] + 1}; ingest")


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path):
    opened = open_trace(write_parts(small_trace(), tmp_path / "tiny.parquet", 1))
    opened.path.write_bytes(opened.path.read_bytes()[:-100])
    with pytest.raises(MalformedTrace, match=r"tiny\.parquet: not a readable Parquet file"):
        opened.part(1)
    opened.path.unlink()
    with pytest.raises(FileNotFoundError, match=r"tiny\.parquet"):
        opened.part(1)


def test_a_trace_is_read_in_parts_only_where_its_rows_take_too_much(tmp_path, monkeypatch):
    path = write_trace(small_trace(), tmp_path / "tiny.parquet")
    # 8 rows of 2 experts: 2 × 2 + 25 bytes each.
    monkeypatch.setattr(trace_module, "READ_BYTES", 8 * 29)
    assert isinstance(open_or_read(path), Trace)
    monkeypatch.setattr(trace_module, "READ_BYTES", 8 * 29 - 1)
    assert isinstance(open_or_read(path), TraceFile)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), trace=routing_traces())
def test_accepted_tokens_are_those_of_the_definition(tmp_path, data, trace):
    rows = len(trace.expert_ids)
    requests = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    kinds = data.draw(st.lists(st.sampled_from(PASS_KINDS), min_size=rows, max_size=rows))
    path = write_parts(trace, tmp_path / "tiny.parquet", len(trace.event_step), request_id=requests, pass_kind=kinds)
    found = read_trace(path).step_accepted
    event_of_row = np.repeat(np.arange(len(trace.event_step)), np.diff(trace.event_first_row))
    said = [
        (int(trace.event_step[event]), PHASES[trace.event_phase[event]], request, kind)
        for event, request, kind in zip(event_of_row, requests, kinds, strict=True)
    ]
    steps = sorted({step for step, *_ in said})
    wanted = [[0] * len(PHASE_CODES) for _ in steps]
    for place, now in enumerate(steps):
        for phase in ("decode", "unknown"):
            for request in range(3):
                passes = {
                    kind for step, its_phase, whose, kind in said if (step, its_phase, whose) == (now, phase, request)
                }
                wanted[place][PHASE_CODES[phase]] += (2 if "spec_accept" in passes else 1) if passes else 0
        for request in range(3):
            prefilled = [step for step, phase, whose, _ in said if (phase, whose) == ("prefill", request)]
            wanted[place][PHASE_CODES["prefill"]] += bool(prefilled) and max(prefilled) == now
    assert found.tolist() == wanted


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=routing_traces(all_phases=False))
def test_accepted_tokens_without_a_prefill_add_up_to_those_of_the_metadata(tmp_path, trace):
    found = read_trace(write_trace(trace, tmp_path / "tiny.parquet")).step_accepted
    assert found.sum() == trace.metadata.counts.accepted_tokens


@pytest.mark.parametrize(("name", "value"), [("pass_kind", "spec_maybe"), ("phase", "verify")])
def test_a_name_outside_its_column_s_is_refused(tmp_path, name, value):
    values = [*canonical_table(small_trace()).column(name).to_pylist()[:-1], value]
    refused(rewritten(small_trace(), **{name: values}), tmp_path / "t.parquet", f"a {name} outside ")
