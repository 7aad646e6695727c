"""pandera schemas made from the definitions, and the two functions that apply them.

Data checks really run: everything is validated as an eager frame under SCHEMA_AND_DATA (at pandera's default depth a
LazyFrame's values are never looked at), a canonical trace row group by row group.
"""

import json
from collections.abc import Iterable
from functools import cache

import numpy as np
import pandera.polars as pa
import polars as pl
from pandera.config import ValidationDepth, config_context
from pandera.errors import SchemaErrors

from schemas.columns import COLUMNS, PASS_KINDS, PHASES, Column
from schemas.tables import Table
from schemas.trace import TraceMetadata

MAX_FAILURES_SHOWN = 5


class ContractViolation(ValueError):
    """A frame does not keep its table's contract; the message lists the failures, at most five."""


def _column_checks(column: Column) -> list[pa.Check]:
    checks = []
    if column.values is not None:
        checks.append(pa.Check.isin(list(column.values)))
    if column.minimum is not None:
        checks.append(pa.Check.ge(column.minimum))
    if column.ratio is not None:
        checks.append(pa.Check.ge(0) if column.may_exceed_one else pa.Check.in_range(0, 1))
    return checks


def _ratio_holds(column: Column) -> pl.Expr:
    numerator, denominator = column.ratio or ("", "")
    whole = pl.col(denominator)
    expected = pl.when(whole != 0).then(pl.col(numerator) / whole)
    # Of a large ratio the last bit is more than 1e-12, and division of whole columns may round it otherwise.
    same = (pl.col(column.name) - expected).abs() <= 1e-12 * pl.max_horizontal(expected.abs(), 1.0)
    return same.fill_null(value=False) | (pl.col(column.name).is_null() & expected.is_null())


def _sum_holds(total: str, parts: tuple[str, ...]) -> pl.Expr:
    known = pl.all_horizontal(pl.col(name).is_not_null() for name in (total, *parts))
    return (pl.col(total) == pl.sum_horizontal(parts)).fill_null(value=False) | ~known


def _frame_checks(table: Table) -> dict[str, pl.Expr]:
    """What holds of each row across columns, by what it says."""
    ratios = [column for column in table.columns if column.ratio is not None]
    return {
        **{f"{one.name} = {' ÷ '.join(one.ratio or ())}": _ratio_holds(one) for one in ratios},
        **{f"{total} = {' + '.join(parts)}": _sum_holds(total, parts) for total, parts in table.sums},
        f"one row per {', '.join(table.key)}": pl.struct(table.key).is_first_distinct(),
    }


def _frame_check(name: str, holds: pl.Expr) -> pa.Check:
    return pa.Check(lambda data: data.lazyframe.select(holds), name=name, ignore_na=False)


def _may_be_null(column: Column, table: Table) -> bool:
    return column.ratio is not None or column.name in table.nullable


def table_schema(table: Table) -> pa.DataFrameSchema:
    """The pandera schema of a result table: exact columns, order, dtypes, ranges, ratios, sums and key."""
    columns = {
        column.name: pa.Column(
            column.dtype,
            _column_checks(column),
            nullable=_may_be_null(column, table),
            description=column.description,
        )
        for column in table.columns
    }
    checks = [_frame_check(name, holds) for name, holds in _frame_checks(table).items()]
    return pa.DataFrameSchema(columns, checks=checks, name=table.name, strict=True, ordered=True)


@cache
def _all_hold(table: Table) -> pl.Expr:
    """One value: whether every check of `table_schema` on values holds in every row."""
    held = list(_frame_checks(table).values())
    for column in table.columns:
        value = pl.col(column.name)
        if not _may_be_null(column, table):
            held.append(value.is_not_null())
        if column.values is not None:
            held.append(value.is_in(list(column.values)))
        if column.minimum is not None:
            held.append(value >= column.minimum)
        if column.ratio is not None:
            held.append(value >= 0 if column.may_exceed_one else value.is_between(0, 1))
    # A check of a value that is missing says nothing.
    return pl.all_horizontal(one.all(ignore_nulls=True) for one in held)


def keeps_contract(frame: pl.DataFrame, table: Table) -> bool:
    """Whether `frame` has the table's columns, order and dtypes and every check of `table_schema` holds.

    One pass, some tenth of what pandera takes, which runs each check of each column by itself.
    """
    return frame.schema == table.polars_schema and bool(frame.select(_all_hold(table)).item())


def validate_table(frame: pl.DataFrame, table: Table) -> pl.DataFrame:
    """`frame`, if it keeps the contract of `table`; pandera names what does not hold.

    Raises:
        ContractViolation: it does not; all failures are collected, five are shown.
    """
    if keeps_contract(frame, table):
        return frame
    try:
        with config_context(validation_depth=ValidationDepth.SCHEMA_AND_DATA):
            return table_schema(table).validate(frame, lazy=True)
    except SchemaErrors as error:
        raise ContractViolation(_describe(table.name, error, table.key)) from None


def _enum_column(values: tuple[str, ...], description: str) -> pa.Column:
    def holds(data: pa.PolarsData) -> pl.LazyFrame:
        allowed = pl.col(data.key).is_in(pl.Series(values, dtype=pl.Categorical).implode())
        return data.lazyframe.select(allowed.fill_null(value=False))

    check = pa.Check(holds, name=f"one of {', '.join(values)}", ignore_na=False)
    return pa.Column(pl.Categorical, check, nullable=True, description=description)


def trace_schema(metadata: TraceMetadata, *, from_start: bool = True) -> pa.DataFrameSchema:
    """The pandera schema of a canonical trace with this metadata, or of a later part of one.

    Order and density are checked on neighbouring rows, so that no pass over the data needs a hash of it; the first row
    must be the trace's first if `from_start`. Every check is a pass over its columns: null is refused by the checks of
    the values, where a column has one.
    """
    experts = dict(zip(metadata.moe_layer_ids, metadata.experts_per_layer, strict=True))

    def ids_are_sound(data: pa.PolarsData) -> pl.LazyFrame:
        limit = pl.col("layer_id").replace_strict(
            list(experts), list(experts.values()), default=0, return_dtype=pl.UInt32
        )
        highest = pl.col("expert_ids").map_batches(_highest_if_all_differ, return_dtype=pl.UInt32, is_elementwise=True)
        return data.lazyframe.select((highest < limit).fill_null(value=False).alias("expert_ids"))

    def rows_are_in_order(data: pa.PolarsData) -> pl.LazyFrame:
        event, row = pl.col("event_id"), pl.col("row_in_event")
        step = pl.col("step_id").cast(pl.Int64)
        same_event = (event == event.shift(1)) & (row == row.shift(1) + 1)
        for name in ("step_id", "layer_id", "phase", "pass_kind"):
            same_event &= pl.col(name).to_physical() == pl.col(name).to_physical().shift(1)
        next_event = (event == event.shift(1) + 1) & (row == 0) & (step - step.shift(1)).is_between(0, 1)
        is_first = pl.int_range(pl.len()) == 0
        first = is_first & (event == 0) & (row == 0) & (step == 0) if from_start else is_first
        return data.lazyframe.select((same_event | next_event | first).fill_null(value=False).alias("event_id"))

    enum_columns = {
        "phase": _enum_column(PHASES, "prefill, decode, warmup or unknown"),
        "pass_kind": _enum_column(PASS_KINDS, COLUMNS["pass_kind"].description),
    }
    plain = ("event_id", "row_in_event", "step_id", "request_id", "token_position")
    return pa.DataFrameSchema(
        {
            **{name: pa.Column(COLUMNS[name].dtype, nullable=name != "request_id") for name in plain},
            **enum_columns,
            "layer_id": pa.Column(pl.UInt16, pa.Check.isin(list(experts))),
            "expert_ids": pa.Column(
                pl.Array(pl.UInt16, metadata.top_k_observed),
                nullable=True,
                description="routed experts of the row, logical, global, 0-based; in router order if rank_known",
            ),
            "router_weights": pa.Column(
                pl.Array(pl.Float16, metadata.top_k_observed),
                nullable=True,
                description="weights of expert_ids; null if not dumped",
            ),
            "predicted_expert_ids": pa.Column(
                pl.List(pl.UInt16), nullable=True, description="experts a recorded plan named for this event before"
            ),
        },
        checks=[
            pa.Check(ids_are_sound, name="expert_ids below the layer's number of experts, none twice", ignore_na=False),
            pa.Check(
                rows_are_in_order,
                name="event_id, row_in_event, step_id dense and ascending; one step, layer, phase, kind per event",
                ignore_na=False,
            ),
        ],
        name="canonical trace",
        strict=True,
        ordered=True,
    )


def _highest_if_all_differ(rows: pl.Series) -> pl.Series:
    """(R,) the highest id of each row of ids (R, K), null where an id stands twice or the row is null."""
    by_rank = np.ascontiguousarray(rows.to_numpy().T)  # (K, R)
    repeated = np.zeros(len(rows), dtype=bool)
    for rank in range(len(by_rank)):
        for before in range(rank):
            repeated |= by_rank[rank] == by_rank[before]
    highest = pl.Series(by_rank.max(axis=0).astype(np.uint32))
    return highest.set(pl.Series(repeated) | rows.is_null(), None)


def validate_trace(parts: Iterable[pl.DataFrame], metadata: TraceMetadata) -> None:
    """Checks every value of a canonical trace, part after part in order, so that memory is bounded by one part.

    Raises:
        ContractViolation: the trace does not keep the contract.
    """
    last_row: pl.DataFrame | None = None
    rows = 0
    for part in parts:
        rows += part.height
        # Neighbours are compared, so each part but the first starts with the last row of the one before.
        joined = part if last_row is None else pl.concat([last_row, part], how="vertical_relaxed")
        try:
            with config_context(validation_depth=ValidationDepth.SCHEMA_AND_DATA):
                trace_schema(metadata, from_start=last_row is None).validate(joined, lazy=True)
        except SchemaErrors as error:
            raise ContractViolation(_describe(f"trace {metadata.trace_id}", error)) from None
        last_row = part.tail(1)
    if rows != metadata.counts.rows:
        raise ContractViolation(f"trace {metadata.trace_id}: {rows} rows, its metadata says {metadata.counts.rows}")


def _describe(what: str, errors: SchemaErrors, key: tuple[str, ...] = ()) -> str:
    # pandera has one failure case per bad row: the distinct (column, check) pairs say it all.
    cases = errors.failure_cases.select("column", "check", "failure_case").unique(["column", "check"], keep="first")
    shown = [
        f"{row['column']}: {row['check']} (found {_found(row['failure_case'], key)})"
        for row in cases.head(MAX_FAILURES_SHOWN).iter_rows(named=True)
    ]
    rest = cases.height - len(shown)
    return f"{what}: {'; '.join(shown)}" + (f"; and {rest} more" if rest > 0 else "")


def _found(case: str | None, key: tuple[str, ...]) -> str:
    """What a check failed on, in a line: of a whole row, which pandera gives as JSON, the key."""
    if case is not None and case.startswith("{"):
        try:
            row = json.loads(case)
        except ValueError:
            return "a row"
        return ", ".join(f"{name}={row.get(name)!r:.60}" for name in key) or "a row"
    return f"{case!r:.100}"
