"""The result tables: grain, key, columns in order, identities that every row keeps.

A table's name is its asset key, its folder under `data/results/`, its DuckDB name and its name in the README. What a
column means is in `columns`; how a frame is checked against a table is in `validation`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from schemas.columns import COLUMNS, Column


@dataclass(frozen=True)
class Table:
    """A result table.

    `key` identifies a row (null is a value of its own there). `nullable` names the columns that may be null; the
    ratios may always be. `sums` holds identities (total, parts): total = Σ parts, row by row.
    """

    name: str
    grain: str
    key: tuple[str, ...]
    measures: tuple[str, ...]
    nullable: frozenset[str] = frozenset()
    sums: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def column_names(self) -> tuple[str, ...]:
        return self.key + self.measures

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(COLUMNS[name] for name in self.column_names)

    @property
    def polars_schema(self) -> dict[str, pl.DataType | type[pl.DataType]]:
        return {column.name: column.dtype for column in self.columns}

    def frame(self, rows: Iterable[dict[str, object]]) -> pl.DataFrame:
        """Rows as a frame with this table's columns, order and dtypes; an empty iterable gives an empty table."""
        return pl.DataFrame(list(rows), schema=self.polars_schema, orient="row")


CONTRACT = (
    "trace_id", "policy", "scope", "semantics", "access_order", "dedup", "capacity_experts_total", "capacity_bytes",
    "step_begin", "step_end", "phase", "warm_fraction", "warm_steps", "warm_pass", "fit", "seed",
)  # fmt: skip
_CONTRACT_NULLABLE = frozenset({"capacity_experts_total", "capacity_bytes", "fit", "seed"})

_TABLES = [
    Table(
        name="trace",
        grain="One row per canonical trace.",
        key=("trace_id",),
        measures=(
            "supersedes", "model", "engine", "domain", "capture_method", "source_file", "source_format", "source_bytes",
            "source_sha256", "parser_version", "schema_version", "id_space", "weight_kind", "rank_known",
            "pass_boundaries", "layer_base", "num_experts_source", "hidden_layers", "moe_layers", "num_experts",
            "pool_experts", "pool_bytes", "expert_bytes_min", "expert_bytes_max", "top_k_model", "top_k_observed",
            "rows", "events", "steps", "requests", "selections", "accesses", "union_ratio", "accepted_tokens",
            "prefill_rows", "decode_rows", "warmup_rows", "unknown_phase_rows", "dropped_rows", "unknowns",
        ),
        nullable=frozenset({
            "supersedes", "model", "engine", "domain", "capture_method", "id_space", "weight_kind", "hidden_layers",
            "pool_bytes", "expert_bytes_min", "expert_bytes_max", "top_k_model",
        }),
        sums=(("rows", ("prefill_rows", "decode_rows", "warmup_rows", "unknown_phase_rows")),),
    ),
    Table(
        name="trace_check",
        grain="One row per canonical trace and check its dump went through.",
        key=("trace_id", "name"),
        measures=("outcome", "wanted", "found"),
    ),
    Table(
        name="trace_locality",
        grain="One row per trace, scored phase and layer, and one for all layers together.",
        key=("trace_id", "phase", "layer_id"),
        measures=(
            "tokens", "selections", "reuse_selections",
            "w1_reused_selections", "w1_reuse_ratio", "w1_shuffled_reused_selections", "w1_shuffled_ratio",
            "chance_numerator", "chance_denominator", "chance_ratio", "uniform_denominator", "uniform_ratio",
            "w8_reused_selections", "w8_reuse_ratio", "w8_shuffled_reused_selections", "w8_shuffled_ratio",
            "w64_reused_selections", "w64_reuse_ratio", "w64_shuffled_reused_selections", "w64_shuffled_ratio",
            "seed", "zipf_alpha", "top8_selections", "top8_share", "distinct_experts", "pool_experts",
            "coverage_ratio", "working_set_95_experts", "working_set_95_ratio",
        ),
        nullable=frozenset({"layer_id", "zipf_alpha"}),
    ),
    Table(
        name="domain_overlap",
        grain="One row per pair of traces of one model shape, set size and layer, and one for all layers together.",
        key=("trace_id", "other_trace_id", "phase", "top_experts", "layer_id"),
        measures=("shared_experts", "joint_experts", "jaccard_ratio", "chance_shared_experts"),
        nullable=frozenset({"layer_id"}),
    ),
    Table(
        name="hit_rate",
        grain="One row per contract: trace, policy, scope, semantics, capacity and what was scored.",
        key=CONTRACT,
        measures=(
            "scored_steps", "selections", "accesses", "union_ratio", "hits", "misses", "hit_rate", "compulsory_misses",
            "demand_bytes", "miss_bytes", "preload_bytes",
        ),
        nullable=_CONTRACT_NULLABLE | {"demand_bytes", "miss_bytes", "preload_bytes"},
        sums=(("accesses", ("hits", "misses")),),
    ),
    Table(
        name="miss_ratio_curve",
        grain="One row per point of a curve: the contract of hit_rate at many capacities.",
        key=CONTRACT,
        measures=("accesses", "misses", "miss_ratio", "demand_bytes", "miss_bytes"),
        nullable=_CONTRACT_NULLABLE | {"demand_bytes", "miss_bytes"},
    ),
    Table(
        name="lookahead_recall",
        grain="One row per trace, predictor, distance, width and target layer, and one for all layers together.",
        key=("trace_id", "predictor", "fit", "lookahead_layers", "lookahead_steps", "width", "layer_id", "phase"),
        measures=(
            "step_begin", "step_end", "warm_steps", "events", "covered_events", "hint_coverage", "accesses",
            "covered_accesses", "predicted_experts", "predicted_accesses", "recall_all", "recall_covered", "precision",
            "chance_predicted_accesses", "chance_recall_all",
        ),
        nullable=frozenset({"fit", "width", "layer_id"}),
    ),
]  # fmt: skip

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}
