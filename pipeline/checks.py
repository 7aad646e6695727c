"""The checks of assets: per table a blocking one made from its schema, and whether native runs proved their bytes.

What does not keep its contract stops everything after it. A run whose proofs failed stops nothing: it is kept and
marked, and the check says so.
"""

from collections.abc import Sequence
from typing import Any

import dagster as dg
import polars as pl

from schemas.tables import Table
from schemas.validation import ContractViolation, validate_table

SCHEMA_CHECK = "schema"
PROOFS_CHECK = "proofs_held"


def schema_check_specs(name: str) -> list[dg.AssetCheckSpec]:
    """The spec an asset declares for its own table."""
    description = "Columns, types, ranges, keys and identities are those of schemas/."
    return [dg.AssetCheckSpec(SCHEMA_CHECK, asset=name, blocking=True, description=description)]


def schema_check_result(frame: pl.DataFrame, table: Table) -> dg.AssetCheckResult:
    """The verdict on the rows of a table."""
    key = dg.AssetKey(table.name)
    try:
        validate_table(frame, table)
    except ContractViolation as error:
        return dg.AssetCheckResult(
            passed=False, check_name=SCHEMA_CHECK, asset_key=key, metadata={"failures": str(error)}
        )
    return dg.AssetCheckResult(passed=True, check_name=SCHEMA_CHECK, asset_key=key, metadata={"rows": frame.height})


def proofs_check_spec() -> dg.AssetCheckSpec:
    """The spec of the check on the native runs of one materialisation."""
    description = "Every proof about the bytes of these runs held; runs for which one did not are kept, and marked."
    return dg.AssetCheckSpec(PROOFS_CHECK, asset="replay_run", description=description)


def proofs_check_result(runs: Sequence[dict[str, Any]]) -> dg.AssetCheckResult:
    """The verdict on runs, as the replayer's documents give them."""
    reasons = {run["run_id"]: run["bytes_reasons"] for run in runs if not run["bytes_valid"]}
    return dg.AssetCheckResult(
        passed=not reasons,
        check_name=PROOFS_CHECK,
        asset_key=dg.AssetKey("replay_run"),
        metadata={"runs": len(runs), "runs that are not valid": len(reasons), **reasons},
    )
