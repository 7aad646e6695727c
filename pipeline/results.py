"""Result frames → files with provenance, rows that come from a trace's metadata, and which results are stale.

A result lies in `data/results/<table>/<partition>/part.parquet`; its Parquet metadata says which trace, parser and
analysis it was made by, so that a change of any of them is seen. Knows nothing of Dagster.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from pipeline.canonical import PARSER_VERSION
from pipeline.ingest import read_stored
from replayer.trace import MalformedTrace
from schemas.files import DataFolder, publish, remove_stale
from schemas.tables import TABLES, Table
from schemas.trace import TraceMetadata
from schemas.validation import ContractViolation, validate_table

ANALYSIS_VERSION = 3
"""Raised whenever the same trace would give other analyses; the nightly schedule then makes them again."""

PER_TRACE_TABLES = (
    "trace",
    "trace_check",
    "trace_locality",
    "hit_rate",
    "hit_rate_layer",
    "reporting_block",
    "miss_ratio_curve",
    "lookahead_recall",
    "lookahead_recall_missed",
    "lookahead_benefit",
)
_PROVENANCE_KEY = b"expert_tier_provenance"


def write_result(data: DataFolder, table: Table, partition: str, frame: pl.DataFrame, inputs: dict[str, str]) -> Path:
    """Validates a result against its table and publishes it; `inputs` names what it was made from.

    Raises:
        ContractViolation: the frame does not keep the table's contract; nothing is written then.
        OSError: it cannot be written; an older result stays as it was.
    """
    validate_table(frame, table)
    target = data.result_file(table.name, partition)
    remove_stale(target.parent)
    provenance = {"analysis_version": ANALYSIS_VERSION, "inputs": inputs}
    arrow = frame.to_arrow()
    arrow = arrow.replace_schema_metadata({_PROVENANCE_KEY: json.dumps(provenance, sort_keys=True).encode()})
    with publish(target) as temporary:
        pq.write_table(arrow, temporary, compression="zstd")
    return target


def read_current(data: DataFolder, table: Table, partition: str, inputs: dict[str, str]) -> pl.DataFrame | None:
    """A stored result that this version would make again from the same inputs; null where there is none."""
    file = data.result_file(table.name, partition)
    if _provenance(file) != {"analysis_version": ANALYSIS_VERSION, "inputs": inputs}:
        return None
    try:
        return validate_table(pl.read_parquet(file), table)
    except (ContractViolation, pl.exceptions.PolarsError, OSError):
        return None


def trace_inputs(metadata: TraceMetadata) -> dict[str, str]:
    """What identifies a trace as an input of an analysis."""
    return {
        "trace_id": metadata.trace_id,
        "source_sha256": metadata.source.sha256,
        "user_metadata": metadata.user_metadata.model_dump_json(exclude_none=True),
        "parser_version": str(metadata.parser_version),
        "schema_version": metadata.schema_version,
    }


@dataclass(frozen=True)
class StaleTrace:
    """A trace whose analyses have to be made, and why."""

    trace_id: str
    reason: str


def stale_traces(data: DataFolder) -> Iterator[StaleTrace]:
    """Traces that are new, changed, parsed by an older parser, or analysed by an older version; unreadable ones too."""
    for trace_id in data.trace_ids():
        try:
            metadata = read_stored(data, trace_id)
        except (MalformedTrace, OSError) as error:
            yield StaleTrace(trace_id, f"unreadable: {error}")
            continue
        if metadata.parser_version < PARSER_VERSION:
            yield StaleTrace(trace_id, f"parsed by version {metadata.parser_version}, now {PARSER_VERSION}")
            continue
        wanted = {"analysis_version": ANALYSIS_VERSION, "inputs": trace_inputs(metadata)}
        for name in PER_TRACE_TABLES:
            found = _provenance(data.result_file(name, trace_id))
            if found != wanted:
                yield StaleTrace(trace_id, f"{name}: {_difference(found, wanted)}")
                break


def _provenance(path: Path) -> dict[str, object] | None:
    try:
        stored = (pq.read_metadata(path).metadata or {}).get(_PROVENANCE_KEY)
        return json.loads(stored) if stored is not None else None
    except (OSError, ValueError):
        return None


def _difference(found: dict[str, object] | None, wanted: dict[str, object]) -> str:
    if found is None:
        return "not made yet"
    if found.get("analysis_version") != wanted["analysis_version"]:
        return f"made by analysis version {found.get('analysis_version')}, now {wanted['analysis_version']}"
    return "made from another state of the trace"


def trace_row(metadata: TraceMetadata) -> pl.DataFrame:
    """Table `trace`: one row."""
    counts, phases = metadata.counts, metadata.counts.rows_by_phase
    layers = range(len(metadata.moe_layer_ids))
    sizes = [size for layer in layers for size in metadata.sizes_of_layer(layer) or []]
    row = {
        **metadata.model_dump(
            include={
                "trace_id", "supersedes", "model", "engine", "domain", "capture_method", "parser_version",
                "schema_version", "id_space", "weight_kind", "rank_known", "pass_boundaries", "layer_base",
                "num_experts_source", "hidden_layers", "top_k_model", "top_k_observed",
            }
        ),
        "source_file": metadata.source.file,
        "source_format": metadata.source.format,
        "source_bytes": metadata.source.bytes,
        "source_sha256": metadata.source.sha256,
        "moe_layers": len(metadata.moe_layer_ids),
        "num_experts": max(metadata.experts_per_layer),
        "pool_experts": sum(metadata.experts_per_layer),
        "pool_bytes": sum(sizes) if sizes else None,
        "expert_bytes_min": min(sizes, default=None),
        "expert_bytes_max": max(sizes, default=None),
        "union_ratio": counts.accesses / counts.selections if counts.selections else None,
        **counts.model_dump(include={
            "rows", "events", "steps", "requests", "selections", "accesses", "accepted_tokens",
        }),
        **{f"{phase}_rows": phases.get(phase, 0) for phase in ("prefill", "decode", "warmup")},
        "unknown_phase_rows": phases.get("unknown", 0),
        "dropped_rows": sum(counts.dropped_rows.values()),
        "unknowns": ", ".join(metadata.unknowns),
    }  # fmt: skip
    return TABLES["trace"].frame([row])


def check_rows(metadata: TraceMetadata) -> pl.DataFrame:
    """Table `trace_check`: one row per check, and one per thing the engine itself observed."""
    checks = [{"trace_id": metadata.trace_id, **check.model_dump()} for check in metadata.checks]
    observed = [
        {
            "trace_id": metadata.trace_id,
            "name": f"engine observation {ordinal}",
            "outcome": "not_applicable",
            "wanted": f"compared, never mixed in: {observation.meaning}",
            "found": f"{observation.hits} hits of {observation.accesses}",
        }
        for ordinal, observation in enumerate(metadata.engine_observations, start=1)
    ]
    return TABLES["trace_check"].frame(checks + observed)
