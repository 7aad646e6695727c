"""The checks of assets: per table a blocking one made from its schema, how a raw dump fared, whether native runs proved
their bytes.

What does not keep its contract stops everything after it; so does a dump that is refused, since it leaves no trace. A
dump with warnings and a run whose proofs failed stop nothing: they are kept and marked, and the check says so.
"""

from collections.abc import Sequence
from typing import Any

import dagster as dg
import polars as pl

from pipeline.dump_checks import IDENTITY
from pipeline.dumps.blocks import MalformedDump, RefusedDump
from schemas.tables import Table
from schemas.trace import TraceMetadata
from schemas.validation import ContractViolation, validate_table

SCHEMA_CHECK = "schema"
PROOFS_CHECK = "proofs_held"
DUMP_CHECK = "dump_sound"


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


def dump_check_spec() -> dg.AssetCheckSpec:
    """The spec of the check on the raw dump of a trace."""
    description = "How the dump fared in every check of expert-tier inspect --checks; none warns."
    return dg.AssetCheckSpec(DUMP_CHECK, asset="routing", description=description)


def dump_check_result(metadata: TraceMetadata) -> dg.AssetCheckResult:
    """The outcome and evidence of each check that the dump of a trace went through, in order."""
    return dg.AssetCheckResult(
        passed=all(check.outcome != "warn" for check in metadata.checks),
        severity=dg.AssetCheckSeverity.WARN,
        check_name=DUMP_CHECK,
        asset_key=dg.AssetKey("routing"),
        metadata={check.name: f"{check.outcome.replace('_', ' ')}: {check.found}" for check in metadata.checks},
    )


def refused_dump_result(error: MalformedDump | RefusedDump) -> dg.AssetCheckResult:
    """Which check refused a dump, and the sentence why."""
    return dg.AssetCheckResult(
        passed=False,
        check_name=DUMP_CHECK,
        asset_key=dg.AssetKey("routing"),
        metadata={"refused by": error.check or IDENTITY, "reason": str(error)},
    )


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
