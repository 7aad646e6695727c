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
    ratios may always be. `sums` holds identities (total, parts): total = Σ parts, row by row, where all are known.
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
    "step_begin", "step_end", "phase", "warm_fraction", "warm_steps", "warm_pass", "fit", "seed", "pinned_fraction",
    "admission", "quota_fit", "folios_per_expert",
)  # fmt: skip
_CONTRACT_NULLABLE = frozenset({
    "capacity_experts_total", "capacity_bytes", "fit", "seed", "pinned_fraction", "admission", "quota_fit",
    "folios_per_expert",
})  # fmt: skip
_HIT_RATE = (
    "scored_steps", "scored_events", "scored_accepted_tokens", "selections", "accesses", "union_ratio", "hits",
    "misses", "hit_rate", "hit_rate_low", "hit_rate_high", "block_steps", "reference_policy", "over_reference",
    "over_reference_low", "over_reference_high", "compulsory_misses", "capacity_misses", "demand_bytes",
    "miss_bytes", "miss_bytes_per_step", "miss_bytes_per_accepted_token", "preload_bytes", "pressure_mean",
    "pressure_p95", "events_above_capacity", "shuffled_accesses", "shuffled_hits", "shuffled_hit_rate",
    "lag1_chance_numerator", "lag1_chance_denominator", "lag1_chance_ratio", "lag1_uniform_denominator",
    "lag1_uniform_ratio",
)  # fmt: skip
_HIT_RATE_NULLABLE = frozenset({
    "demand_bytes", "miss_bytes", "preload_bytes", "scored_accepted_tokens", "pressure_mean", "pressure_p95",
    "events_above_capacity", "hit_rate_low", "hit_rate_high", "block_steps", "shuffled_accesses", "shuffled_hits",
    "reference_policy", "over_reference", "over_reference_low", "over_reference_high",
})  # fmt: skip
_RECLAIM = (
    "group_kswapd_scan_pages", "group_direct_scan_pages", "group_scan_pages", "group_kswapd_steal_pages",
    "group_direct_steal_pages", "group_steal_pages", "group_scan_per_steal", "group_refault_bytes",
    "group_refault_per_device_byte", "group_refault_activated_pages", "group_activated_pages", "group_minor_faults",
    "group_major_faults", "group_cached_bytes", "group_unevictable_bytes", "group_limit_bytes", "group_locked_share",
    "group_memory_some_ns", "group_memory_full_ns", "group_io_some_ns", "group_io_full_ns",
    "machine_kswapd_scan_pages", "machine_direct_scan_pages", "machine_scan_pages", "machine_kswapd_steal_pages",
    "machine_direct_steal_pages", "machine_steal_pages", "machine_scan_per_steal", "machine_file_scan_pages",
    "machine_file_steal_pages", "machine_file_scan_per_steal", "machine_refault_bytes",
    "machine_refault_per_device_byte", "machine_refault_activated_pages", "machine_activated_pages",
    "machine_minor_faults", "machine_major_faults",
    "machine_free_bytes", "machine_available_bytes", "machine_cached_bytes", "machine_locked_bytes",
    "machine_unevictable_bytes", "memory_bytes", "machine_locked_share", "machine_memory_some_ns",
    "machine_memory_full_ns", "machine_io_some_ns", "machine_io_full_ns",
)  # fmt: skip

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
        measures=_HIT_RATE,
        nullable=_CONTRACT_NULLABLE | _HIT_RATE_NULLABLE,
        sums=(("accesses", ("hits", "misses")), ("misses", ("compulsory_misses", "capacity_misses"))),
    ),
    Table(
        name="sweep",
        grain="One row per cell of a sweep: hit_rate, named by the content it was computed from.",
        key=("cell_hash",),
        measures=(*CONTRACT, *_HIT_RATE),
        nullable=_CONTRACT_NULLABLE | _HIT_RATE_NULLABLE,
        sums=(("accesses", ("hits", "misses")), ("misses", ("compulsory_misses", "capacity_misses"))),
    ),
    Table(
        name="hit_rate_layer",
        grain="One row per contract of hit_rate and layer.",
        key=(*CONTRACT, "layer_id"),
        measures=("accesses", "hits", "misses", "hit_rate", "compulsory_misses", "capacity_misses", "miss_bytes"),
        nullable=_CONTRACT_NULLABLE | {"miss_bytes"},
        sums=(("accesses", ("hits", "misses")), ("misses", ("compulsory_misses", "capacity_misses"))),
    ),
    Table(
        name="miss_ratio_curve",
        grain="One row per point of a curve: the contract of hit_rate at many capacities.",
        key=CONTRACT,
        measures=(
            "accesses", "misses", "miss_ratio", "compulsory_misses", "capacity_misses", "demand_bytes", "miss_bytes",
        ),
        nullable=_CONTRACT_NULLABLE | {"demand_bytes", "miss_bytes"},
        sums=(("misses", ("compulsory_misses", "capacity_misses")),),
    ),
    Table(
        name="reporting_block",
        grain="One row per trace and item of the reporting block, answered from hit_rate in scope layer.",
        key=("trace_id", "item"),
        measures=("topic", "question", "answer", "known"),
    ),
    Table(
        name="inversion",
        grain="One row per policy, semantics, order and tiny capacity of a synthetic trace: LRU against a table.",
        key=(
            "trace_id", "capacity_experts_total", "semantics", "access_order", "policy", "dedup", "fit", "seed",
            "step_begin", "step_end", "phase", "warm_fraction", "warm_steps",
        ),
        measures=(
            "capture_method", "num_experts", "moe_layers", "top_k_observed", "scored_steps", "selections", "accesses",
            "hits", "misses", "hit_rate",
        ),
        nullable=frozenset({"capture_method", "fit", "seed"}),
        sums=(("accesses", ("hits", "misses")),),
    ),
    Table(
        name="lookahead_recall",
        grain="One row per trace, predictor, distance, width and target layer, and one for all layers together.",
        key=("trace_id", "predictor", "fit", "lookahead_layers", "lookahead_steps", "width", "layer_id", "phase"),
        measures=(
            "step_begin", "step_end", "warm_steps", "events", "covered_events", "hint_coverage", "accesses",
            "covered_accesses", "predicted_experts", "predicted_accesses", "recall_all", "recall_covered", "precision",
            "chance_predicted_accesses", "chance_recall_all", "shuffled_predicted_accesses", "shuffled_recall_all",
            "seed",
        ),
        nullable=frozenset({"fit", "lookahead_layers", "lookahead_steps", "width", "layer_id"}),
    ),
    Table(
        name="lookahead_recall_missed",
        grain="One row per total of lookahead_recall and capacity: its recall on what an LRU of that size missed.",
        key=(
            "trace_id", "predictor", "fit", "lookahead_layers", "lookahead_steps", "width", "phase", "policy", "scope",
            "semantics", "access_order", "capacity_experts_total",
        ),
        measures=(
            "step_begin", "step_end", "warm_steps", "accesses", "misses", "predicted_misses", "recall_missed",
            "chance_predicted_misses", "chance_recall_missed",
        ),
        nullable=frozenset({"fit", "lookahead_layers", "lookahead_steps", "width"}),
    ),
    Table(
        name="lookahead_benefit",
        grain="One row per plan, capacity of an LRU over all layers (event-atomic) and link: what it would have saved.",
        key=(
            "trace_id", "predictor", "fit", "lookahead_layers", "lookahead_steps", "width", "phase",
            "capacity_experts_total", "bandwidth_bytes_per_s", "latency_ns", "queue_depth", "compute_ns",
        ),
        measures=(
            "step_begin", "step_end", "warm_steps", "events", "covered_events", "hint_coverage", "selections",
            "accesses", "predicted_experts", "predicted_accesses", "recall_all", "precision", "misses",
            "predicted_misses", "recall_missed", "simulated_misses_with", "simulated_removed_misses",
            "prefetch_coverage", "simulated_removed_late", "simulated_displaced", "simulated_submitted",
            "simulated_completed", "simulated_used", "prefetch_accuracy", "simulated_used_late", "late_share",
            "simulated_wasted", "miss_bytes", "simulated_removed_bytes", "simulated_displaced_bytes",
            "simulated_wasted_bytes", "simulated_device_bytes", "simulated_device_bytes_per_miss_byte",
            "simulated_time_without_ns",
            "simulated_time_with_ns", "simulated_time_per_time_without", "simulated_overlap_ns",
        ),
        nullable=frozenset({
            "fit", "lookahead_layers", "lookahead_steps", "width", "bandwidth_bytes_per_s", "queue_depth", "miss_bytes",
            "simulated_removed_bytes", "simulated_displaced_bytes", "simulated_wasted_bytes", "simulated_device_bytes",
        }),
    ),
    Table(
        name="replay_run",
        grain="One row per native replay that was started, whatever came of it.",
        key=("run_id",),
        measures=(
            "started_at", "condition_hash", "trace_id", "pool_id", "machine_id", "replayer_version", "status",
            "failure", "bytes_valid", "bytes_reasons", "time_valid", "time_reasons", "thrash", "owner", "policy",
            "scope", "fit", "admission", "seed", "arena_fraction", "miss_path", "mechanism", "mechanism_detail",
            "fadvise", "destination", "threads", "observe", "residency_counter", "files_stay_open", "verify",
            "group_stat", "repeat",
            "together_id", "tenant_number", "tenants", "shares_wall", "step_begin", "step_end", "access_order",
            "warm_pass", "capacity_bytes", "headroom_bytes", "own_anonymous_bytes", "own_kernel_bytes", "wall_bytes",
            "enforced_bytes", "balloon_bytes", "offline_bytes", "outer_group_bytes", "arena_bytes", "preload_bytes",
            "preload_ns", "cold_resident_bytes", "resident_median_bytes", "resident_max_bytes", "replayed_steps",
            "events", "selections", "accesses", "union_ratio", "demand_bytes", "reads", "returned_bytes",
            "observed_accesses", "native_hits", "native_partial_hits", "native_misses", "native_hit_rate", "arena_hits",
            "missing_bytes", "direct_bytes", "device_bytes", "device_bytes_counter", "warm_device_bytes",
            "own_fault_bytes", "overshoot_bytes", "raced_pages", "neighbor_bytes", "nominal_miss_bytes",
            "amplification_nominal", "resident_miss_bytes", "amplification_resident", "interval_ns", "overlap_ns",
            "wall_ns", "check_ns", "step_median_ns", "stall_ns", "stall_median_ns", "stall_p99_ns", "observe_ns",
            "verify_ns", "decide_ns", "cpu_ns", "consumed_digest", "checked_bytes",
        ),
        nullable=frozenset({
            "failure", "policy", "scope", "fit", "admission", "seed", "arena_fraction", "miss_path", "arena_bytes",
            "preload_bytes", "preload_ns", "arena_hits", "direct_bytes", "decide_ns", "mechanism_detail",
            "residency_counter", "files_stay_open", "capacity_bytes", "own_anonymous_bytes", "own_kernel_bytes",
            "wall_bytes",
            "enforced_bytes", "balloon_bytes", "outer_group_bytes", "cold_resident_bytes", "resident_median_bytes",
            "resident_max_bytes", "reads", "returned_bytes", "observed_accesses", "native_hits", "native_partial_hits",
            "native_misses", "missing_bytes", "device_bytes", "device_bytes_counter", "warm_device_bytes",
            "own_fault_bytes", "overshoot_bytes", "raced_pages", "neighbor_bytes", "nominal_miss_bytes",
            "resident_miss_bytes", "interval_ns", "wall_ns", "check_ns", "step_median_ns", "stall_ns",
            "stall_median_ns", "stall_p99_ns", "observe_ns", "verify_ns", "cpu_ns", "consumed_digest", "checked_bytes",
            "together_id", "overlap_ns", "tenant_number", "tenants", "shares_wall", "group_stat", "offline_bytes",
        }),
        sums=(("observed_accesses", ("native_hits", "native_partial_hits", "native_misses")),),
    ),
    Table(
        name="replay_step",
        grain="One row per native replay and measured step that ended.",
        key=("run_id", "step_id"),
        measures=(
            "events", "accesses", "demand_bytes", "observed_accesses", "native_hits", "native_partial_hits",
            "native_misses", "native_hit_rate", "missing_bytes", "device_bytes", "resident_bytes", "simulated_hits",
            "simulated_misses", "wall_ns", "check_ns", "stall_ns", "stall_median_ns", "stall_p99_ns",
        ),
        nullable=frozenset({"missing_bytes", "device_bytes", "simulated_hits", "simulated_misses"}),
        sums=(
            ("observed_accesses", ("native_hits", "native_partial_hits", "native_misses")),
            ("accesses", ("simulated_hits", "simulated_misses")),
        ),
    ),
    Table(
        name="replay_reclaim",
        grain="One row per native replay and measured step that ended, and one (step_id null) for the whole pass.",
        key=("run_id", "step_id"),
        measures=("device_bytes", *_RECLAIM),
        nullable=frozenset({"step_id", "device_bytes", *_RECLAIM}),
    ),
    Table(
        name="replay_node",
        grain="One row per native replay and memory node of the machine, as it was when the measured pass ended.",
        key=("run_id", "node_id"),
        measures=(
            "has_processors", "is_counted", "node_bytes", "node_free_bytes", "node_file_bytes", "node_locked_bytes",
            "group_node_file_bytes",
        ),
        nullable=frozenset({
            "node_bytes", "node_free_bytes", "node_file_bytes", "node_locked_bytes", "group_node_file_bytes",
        }),
    ),
    Table(
        name="replay_delivery",
        grain="One row per native replay that delivered a lookahead plan, of its measured pass.",
        key=("run_id",),
        measures=(
            "delivery", "plan_hash", "piece_bytes", "hint_slots", "hints", "hints_submitted", "hints_completed",
            "hints_overwritten", "hints_dropped", "hints_in_flight", "hinted_missing_bytes", "hinted_read_bytes",
            "hint_ns", "named_accesses", "named_hits",
        ),
        nullable=frozenset({"piece_bytes", "hint_slots"}),
    ),
    Table(
        name="replay_layer",
        grain="One row per native replay and layer, over its measured steps that ended.",
        key=("run_id", "layer_id"),
        measures=(
            "events", "accesses", "demand_bytes", "observed_accesses", "native_hits", "native_partial_hits",
            "native_misses", "native_hit_rate", "missing_bytes", "simulated_hits", "simulated_misses", "stall_ns",
            "stall_median_ns", "stall_p99_ns",
        ),
        nullable=frozenset({"missing_bytes", "simulated_hits", "simulated_misses"}),
        sums=(
            ("observed_accesses", ("native_hits", "native_partial_hits", "native_misses")),
            ("accesses", ("simulated_hits", "simulated_misses")),
        ),
    ),
    Table(
        name="replay_proof",
        grain="One row per native replay and accounting identity it was held against.",
        key=("run_id", "name"),
        measures=("spoils", "expected", "found", "tolerance", "held"),
        nullable=frozenset({"held"}),
    ),
    Table(
        name="pool",
        grain="One row per pool that was replayed against.",
        key=("pool_id",),
        measures=(
            "layout", "content", "alignment_bytes", "moe_layers", "pool_experts", "pool_bytes", "expert_bytes_min",
            "expert_bytes_max", "files", "file_bytes",
        ),
        nullable=frozenset({"content"}),
    ),
    Table(
        name="machine",
        grain="One row per state of a machine, with the device that held the pool, that a run was measured in.",
        key=("machine_id",),
        measures=(
            "architecture", "cpu_model", "cpus", "memory_bytes", "page_bytes", "kernel_release", "swap_bytes", "mglru",
            "thp", "min_free_bytes", "swappiness", "damon", "virtualization", "numa_nodes", "filesystem",
            "mount_options", "block_device", "block_device_model", "read_ahead_bytes", "io_scheduler", "rotational",
            "max_io_bytes", "logical_block_bytes",
        ),
        nullable=frozenset({
            "cpu_model", "thp", "min_free_bytes", "swappiness", "numa_nodes", "filesystem", "mount_options",
            "block_device", "block_device_model", "read_ahead_bytes", "io_scheduler", "rotational", "max_io_bytes",
            "logical_block_bytes",
        }),
    ),
    Table(
        name="experiment",
        grain="One row per experiment: what was asked for, and what its runs show so far.",
        key=("experiment_id",),
        measures=(
            "experiment", "asks", "run_order", "sizes", "order_seed", "conditions", "repetitions", "machine_id",
            "definition", "runs", "valid_runs", "finished", "digests_agree", "relative_wall_difference", "finding",
        ),
        nullable=frozenset({"digests_agree", "relative_wall_difference"}),
    ),
    Table(
        name="experiment_run",
        grain="One row per native replay that an experiment started.",
        key=("run_id",),
        measures=("experiment_id", "trace_id", "condition", "tenant", "repetition", "attempt", "position"),
        nullable=frozenset({"tenant"}),
    ),
    Table(
        name="experiment_condition",
        grain="One row per experiment, condition, tenant and metric.",
        key=("experiment_id", "condition", "tenant", "metric"),
        measures=(
            "runs", "valid_runs", "counted_runs", "median_value", "lowest_value", "highest_value", "relative_spread",
        ),
        nullable=frozenset({"tenant", "median_value", "lowest_value", "highest_value", "relative_spread"}),
    ),
    Table(
        name="experiment_effect",
        grain="One row per experiment, condition that is no baseline, tenant and metric.",
        key=("experiment_id", "condition", "tenant", "metric"),
        measures=(
            "baseline", "pairs", "effect", "effect_low", "effect_high", "self_low", "self_high", "outside_spread",
            "inverse_capacity_deviation", "inverse_residency_deviation", "monotone",
        ),
        nullable=frozenset({
            "tenant", "effect", "effect_low", "effect_high", "self_low", "self_high", "outside_spread",
            "inverse_capacity_deviation", "inverse_residency_deviation", "monotone",
        }),
    ),
    Table(
        name="lab",
        grain="One row per lab: replays in guests and on the host that were asked for, and how far they are.",
        key=("lab_id",),
        measures=(
            "lab", "asks", "order_seed", "conditions", "repetitions", "definition", "runs", "valid_runs", "finished",
        ),
    ),
    Table(
        name="lab_run",
        grain="One row per native replay that a lab made; repetition is null where it was made to find mem= by.",
        key=("run_id",),
        measures=(
            "lab_id", "trace_id", "condition", "repetition", "attempt", "position", "place", "mglru_setting", "boot_id",
            "boot_position", "boot_runs", "boot_starts", "guest_memory_bytes", "boot_limit_bytes", "accelerator",
            "qemu_version", "kernel_package", "compiled_files",
        ),
        nullable=frozenset({
            "repetition", "mglru_setting", "boot_id", "boot_position", "boot_runs", "boot_starts", "guest_memory_bytes",
            "boot_limit_bytes", "accelerator", "qemu_version", "kernel_package", "compiled_files",
        }),
    ),
    Table(
        name="decode_run",
        grain="One row per decode that was measured, its experts served through the tier.",
        key=("run_id",),
        measures=(
            "started_at", "condition_hash", "pool_id", "machine_id", "replayer_version", "model", "model_folder",
            "computed_by", "compute_dtype", "prompt_name", "prompt_sha256", "prompt_tokens", "decoded_tokens",
            "bytes_valid", "bytes_reasons", "time_valid", "time_reasons", "degenerate", "owner", "policy", "mechanism",
            "threads", "warm_pass", "capacity_bytes", "wall_bytes", "accesses", "demand_bytes", "device_bytes",
            "token_sha256", "warm_token_sha256", "warm_up_ns", "first_token_ns", "first_token_wait_ns", "decode_ns",
            "decode_wait_ns", "decode_rest_ns", "decode_passes", "decode_ns_per_token",
        ),
        nullable=frozenset({
            "policy", "capacity_bytes", "wall_bytes", "device_bytes", "warm_token_sha256", "warm_up_ns",
        }),
        sums=(("decode_ns", ("decode_wait_ns", "decode_rest_ns")),),
    ),
    Table(
        name="decode_layer",
        grain="One row per decode, MoE layer and phase.",
        key=("run_id", "decode_phase", "layer_id"),
        measures=("events", "accesses", "layer_wait_ns", "layer_compute_ns", "layer_lookahead_ns"),
    ),
    Table(
        name="decode_pair",
        grain="One row per pair of decodes of one prompt by two owners.",
        key=("decode_pair_id",),
        measures=(
            "pairs_id", "model", "model_folder", "prompt_name", "prompt_sha256", "decoded_tokens", "pair", "order_seed",
            "owner", "against", "first_owner", "owner_run_id", "against_run_id", "owner_token_sha256",
            "against_token_sha256", "identical", "void_reason", "owner_time_valid", "against_time_valid",
            "owner_decode_ns", "against_decode_ns",
        ),
        nullable=frozenset({"void_reason"}),
    ),
]  # fmt: skip

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}

FILE_TABLES: dict[str, Table] = {
    "replay_access": Table(
        name="replay_access",
        grain="One row per native replay, where it was asked for, and access of its measured steps that ended.",
        key=("run_id", "access"),
        measures=("step_id", "layer_id", "expert_id", "expert_bytes", "missing_bytes"),
    ),
}
"""Tables that stay Parquet files: a row per access is too much for the warehouse."""

REPLAY_TABLES = (
    "replay_run", "replay_step", "replay_reclaim", "replay_node", "replay_delivery", "replay_layer", "replay_proof",
    "pool", "machine",
)  # fmt: skip
"""What a native replay writes, the row that makes a run exist among them."""

EXPERIMENT_TABLES = ("experiment", "experiment_run", "experiment_condition", "experiment_effect")
"""What `replayer replay --experiment` writes beside the runs themselves."""

LAB_TABLES = ("lab", "lab_run")
"""What `replayer lab` writes beside the runs themselves."""

DECODE_TABLES = ("decode_run", "decode_layer", "decode_pair")
"""What `replayer decode` writes, beside the pool and the machine; a decode exists once its row in decode_run does."""

SWEEP_TABLES = ("sweep",)
"""What `replayer sweep` writes; all other tables come from analyses."""
