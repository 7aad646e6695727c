"""Every column is described once, every table's checks can fail, and data checks really run."""

import polars as pl
import pytest
from pandera.config import ValidationDepth, config_context
from pandera.errors import SchemaErrors

from schemas import validation
from schemas.columns import COLUMNS
from schemas.tables import FILE_TABLES, TABLES
from schemas.trace import TraceMetadata, UserMetadata
from schemas.validation import ContractViolation, keeps_contract, validate_table
from tests.table_rows import ROWS

EVERY_TABLE = {**TABLES, **FILE_TABLES}
BANNED = ("_mb", "_gb", "_pct", "_percent", "_ms", "_us", "_index")


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_every_column_says_what_it_is_with_a_unit_where_its_name_ends_in_one(column):
    assert len(column.description) >= 10
    assert not column.name.endswith(BANNED)
    if "bytes" in column.name and column.dtype == pl.Int64:
        assert column.unit == ("byte/s" if column.name.endswith("_per_s") else "byte")
    if column.name.endswith("_ns"):
        assert column.unit == "ns"
    if column.name.endswith(("_rate", "_ratio", "_share")):
        assert column.ratio is not None
    if column.ratio is not None:
        assert column.dtype == pl.Float64
        # Shares never exceed 1; bytes per step or token, and measured over simulated bytes, may.
        assert (column.name.startswith("amplification_") or "_per_" in column.name) == column.may_exceed_one


@pytest.mark.parametrize("table", EVERY_TABLE.values(), ids=EVERY_TABLE)
def test_every_ratio_stands_beside_its_numerator_and_denominator(table):
    for column in table.columns:
        if column.ratio is not None:
            assert set(column.ratio) <= set(table.column_names), column.name


def test_a_ratio_of_measured_to_simulated_bytes_may_exceed_one_and_no_share_may():
    run = ROWS["replay_run"]
    twice = {**run, "device_bytes": 3000, "amplification_nominal": 2.0, "amplification_resident": 1.875}
    assert validate_table(TABLES["replay_run"].frame([twice]), TABLES["replay_run"]).height == 1
    step = {**ROWS["replay_step"], "native_hits": 8, "native_partial_hits": -3, "native_misses": -1}
    with pytest.raises(ContractViolation, match="native_hit_rate"):
        validate_table(TABLES["replay_step"].frame([{**step, "native_hit_rate": 2.0}]), TABLES["replay_step"])


def test_sums_are_held_only_where_all_parts_are_known():
    step = TABLES["replay_step"]
    unknown = {**ROWS["replay_step"], "simulated_hits": None, "simulated_misses": None}
    assert validate_table(step.frame([unknown]), step).height == 1
    with pytest.raises(ContractViolation, match="simulated_hits"):
        validate_table(step.frame([{**ROWS["replay_step"], "simulated_hits": 4}]), step)


def test_every_column_belongs_to_a_table_or_the_trace():
    used = {name for table in EVERY_TABLE.values() for name in table.column_names}
    trace = {"event_id", "row_in_event", "step_id", "request_id", "token_position", "pass_kind"}
    assert set(COLUMNS) - used - trace == set()


@pytest.mark.parametrize("name", EVERY_TABLE)
def test_a_sound_row_passes(name):
    table = EVERY_TABLE[name]
    assert validate_table(table.frame([ROWS[name]]), table).height == 1
    assert validate_table(table.frame([]), table).height == 0


def _minimally_broken(name):
    """(what is broken, frame) for one table: each wrong in one thing."""
    table = EVERY_TABLE[name]
    good = table.frame([ROWS[name]])
    yield "a missing column", good.drop(table.column_names[-1])
    yield "an extra column", good.with_columns(pl.lit(1).alias("extra"))
    yield "another order", good.select(reversed(good.columns))
    yield "a repeated key", pl.concat([good, good])
    for total, _ in table.sums:
        yield f"sum {total}", good.with_columns(pl.col(total) + 1)


@pytest.mark.parametrize("name", EVERY_TABLE)
def test_every_check_of_a_whole_table_can_fail(name):
    for what, frame in _minimally_broken(name):
        with pytest.raises(ContractViolation):
            validate_table(frame, EVERY_TABLE[name])
            raise AssertionError(f"{name} passed with {what}")


def _breaks(column, nullable):
    """(what is broken, value) for one column."""
    if not nullable:
        yield "null", pl.lit(None, column.dtype)
    if column.values is not None:
        yield "unknown", pl.lit("nonsense")
    if column.minimum is not None:
        yield "negative", pl.lit(-1, column.dtype)
    if column.ratio is not None:
        yield "wrong", pl.lit(0.123456)
        yield "NaN", pl.lit(float("nan"))
    yield "type", pl.lit(1) if column.dtype == pl.Boolean else pl.lit(value=True)


@pytest.mark.parametrize("name", EVERY_TABLE)
def test_every_check_of_a_column_can_fail(name, monkeypatch):
    # All columns are broken in one way at once, for speed: each has to be named, with what is wrong.
    monkeypatch.setattr(validation, "MAX_FAILURES_SHOWN", 10_000)
    table = EVERY_TABLE[name]
    breaks = {}
    for column in table.columns:
        for what, value in _breaks(column, column.ratio is not None or column.name in table.nullable):
            breaks.setdefault(what, {})[column.name] = value
    for what, values in breaks.items():
        with pytest.raises(ContractViolation) as raised:
            validate_table(table.frame([ROWS[name]]).with_columns(**values), table)
        faults = [fault.partition(": ") for fault in str(raised.value).removeprefix(f"{name}: ").split("; ")]
        of_columns = {column for column, _, _ in faults}
        of_ratios = {check.split(" = ")[0] for _, _, check in faults}
        assert set(values) <= (of_ratios if what == "wrong" else of_columns | of_ratios), what


@pytest.mark.parametrize("name", EVERY_TABLE)
def test_the_one_pass_that_stands_before_pandera_sees_each_fault_alone(name):
    table = EVERY_TABLE[name]
    good = table.frame([ROWS[name]])
    assert keeps_contract(good, table)
    for column in table.columns:
        for what, value in _breaks(column, column.ratio is not None or column.name in table.nullable):
            assert not keeps_contract(good.with_columns(value.alias(column.name)), table), (column.name, what)
    for what, frame in _minimally_broken(name):
        assert not keeps_contract(frame, table), what


@pytest.mark.parametrize("name", EVERY_TABLE)
def test_the_one_pass_and_pandera_agree_on_what_is_missing(name):
    table = EVERY_TABLE[name]
    maybe = [column for column in table.columns if column.ratio is not None or column.name in table.nullable]
    missing = table.frame([ROWS[name]]).with_columns(pl.lit(None, one.dtype).alias(one.name) for one in maybe)
    with config_context(validation_depth=ValidationDepth.SCHEMA_AND_DATA):
        try:
            validation.table_schema(table).validate(missing, lazy=True)
            held = True
        except SchemaErrors:
            held = False
    assert keeps_contract(missing, table) == held


def test_a_large_ratio_may_differ_in_its_last_bit_and_no_more():
    table = TABLES["decode_run"]
    one = table.frame([{**ROWS["decode_run"], "decode_ns": 287767738, "decode_wait_ns": 0, "decode_rest_ns": 287767738,
                        "decode_passes": 11, "decode_ns_per_token": 287767738 / 11}])  # fmt: skip
    for factor, held in ((1, True), (1 + 2**-52, True), (1 - 2**-52, True), (1 + 1e-9, False)):
        assert keeps_contract(one.with_columns(pl.col("decode_ns_per_token") * factor), table) is held


def test_metadata_with_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="ascend"):
        UserMetadata(moe_layer_ids=[2, 1])
    assert TraceMetadata.model_fields.keys() >= {"checks", "counts", "source"}
