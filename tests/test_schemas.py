"""Every column is described once, every table's checks can fail, and data checks really run."""

import polars as pl
import pytest

from schemas.columns import COLUMNS
from schemas.tables import TABLES
from schemas.trace import TraceMetadata, UserMetadata
from schemas.validation import ContractViolation, validate_table
from tests.table_rows import ROWS

BANNED = ("_mb", "_gb", "_pct", "_percent", "_ms", "_us", "_index")


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_every_column_says_what_it_is_with_a_unit_where_its_name_ends_in_one(column):
    assert len(column.description) >= 10
    assert not column.name.endswith(BANNED)
    if "bytes" in column.name:
        assert column.unit == "byte"
    if column.name.endswith(("_rate", "_ratio", "_share")):
        assert column.ratio is not None
    if column.ratio is not None:
        assert column.dtype == pl.Float64


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_ratio_stands_beside_its_numerator_and_denominator(table):
    for column in table.columns:
        if column.ratio is not None:
            assert set(column.ratio) <= set(table.column_names), column.name


def test_every_column_belongs_to_a_table_or_the_trace():
    used = {name for table in TABLES.values() for name in table.column_names}
    trace = {"event_id", "row_in_event", "step_id", "request_id", "token_position", "pass_kind"}
    assert set(COLUMNS) - used - trace == set()


@pytest.mark.parametrize("name", TABLES)
def test_a_sound_row_passes(name):
    table = TABLES[name]
    assert validate_table(table.frame([ROWS[name]]), table).height == 1
    assert validate_table(table.frame([]), table).height == 0


def _broken_frames(name):
    """(what is broken, frame) for one table: each minimally wrong."""
    table, row = TABLES[name], ROWS[name]
    good = table.frame([row])
    yield "a missing column", good.drop(table.column_names[-1])
    yield "an extra column", good.with_columns(pl.lit(1).alias("extra"))
    yield "another order", good.select(reversed(good.columns))
    yield "a repeated key", pl.concat([good, good])
    for column in table.columns:
        if column.name not in table.nullable and column.ratio is None:
            yield f"null {column.name}", good.with_columns(pl.lit(None, column.dtype).alias(column.name))
        if column.values is not None:
            yield f"unknown {column.name}", good.with_columns(pl.lit("nonsense").alias(column.name))
        if column.minimum is not None:
            yield f"negative {column.name}", good.with_columns(pl.lit(-1, column.dtype).alias(column.name))
        if column.ratio is not None:
            yield f"wrong {column.name}", good.with_columns(pl.lit(0.123456).alias(column.name))
            yield f"NaN {column.name}", good.with_columns(pl.lit(float("nan")).alias(column.name))
        other = pl.lit(1) if column.dtype == pl.Boolean else pl.lit(value=True)
        yield f"type of {column.name}", good.with_columns(other.alias(column.name))
    for total, _ in table.sums:
        yield f"sum {total}", good.with_columns(pl.col(total) + 1)


@pytest.mark.parametrize("name", TABLES)
def test_every_check_of_a_table_can_fail(name):
    for what, frame in _broken_frames(name):
        with pytest.raises(ContractViolation):
            validate_table(frame, TABLES[name])
            raise AssertionError(f"{name} passed with {what}")


def test_metadata_with_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="ascend"):
        UserMetadata(moe_layer_ids=[2, 1])
    assert TraceMetadata.model_fields.keys() >= {"checks", "counts", "source"}
