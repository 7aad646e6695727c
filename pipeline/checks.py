"""One blocking check per table, made from its schema: what does not keep its contract stops everything after it."""

import dagster as dg
import polars as pl

from schemas.tables import Table
from schemas.validation import ContractViolation, validate_table

SCHEMA_CHECK = "schema"


def schema_check_specs(name: str) -> list[dg.AssetCheckSpec]:
    """The spec an asset declares for its own table."""
    description = "Columns, types, ranges, keys and identities are those of schemas/."
    return [dg.AssetCheckSpec(SCHEMA_CHECK, asset=name, blocking=True, description=description)]


def schema_check_result(frame: pl.DataFrame, table: Table) -> dg.AssetCheckResult:
    """The verdict on a frame that is not written yet."""
    try:
        validate_table(frame, table)
    except ContractViolation as error:
        return dg.AssetCheckResult(passed=False, check_name=SCHEMA_CHECK, metadata={"failures": str(error)})
    return dg.AssetCheckResult(passed=True, check_name=SCHEMA_CHECK, metadata={"rows": frame.height})
