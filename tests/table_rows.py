"""One sound row per result table, small enough to check by eye."""

CONTRACT = {
    "trace_id": "tiny", "policy": "lru", "scope": "layer", "semantics": "event_atomic", "access_order": "router",
    "dedup": "union", "capacity_experts_total": 4, "capacity_bytes": None, "step_begin": 0, "step_end": 10,
    "phase": "decode", "warm_fraction": 0.6, "warm_steps": 6, "warm_pass": False, "fit": None, "seed": None,
    "pinned_fraction": None, "admission": None, "quota_fit": None, "folios_per_expert": None,
}  # fmt: skip

ROWS: dict[str, dict] = {
    "trace": {
        "trace_id": "tiny", "supersedes": None, "model": "m", "engine": None, "domain": "code", "capture_method": None,
        "source_file": "a.npz", "source_format": "npz_experts", "source_bytes": 100, "source_sha256": "0" * 64,
        "parser_version": 1, "schema_version": "1.0", "id_space": None, "weight_kind": "absent", "rank_known": True,
        "pass_boundaries": "recorded", "layer_base": "recorded", "num_experts_source": "declared", "hidden_layers": 2,
        "moe_layers": 2, "num_experts": 8, "pool_experts": 16, "pool_bytes": 1600, "expert_bytes_min": 100,
        "expert_bytes_max": 100, "top_k_model": 2, "top_k_observed": 2, "rows": 20, "events": 20, "steps": 10,
        "requests": 1, "selections": 40, "accesses": 40, "union_ratio": 1.0, "accepted_tokens": 10, "prefill_rows": 0,
        "decode_rows": 20, "warmup_rows": 0, "unknown_phase_rows": 0, "dropped_rows": 0, "unknowns": "engine",
    },
    "trace_check": {"trace_id": "tiny", "name": "layers differ", "outcome": "ok", "wanted": "w", "found": "f"},
    "trace_locality": {
        "trace_id": "tiny", "phase": "decode", "layer_id": None, "tokens": 20, "selections": 40, "reuse_selections": 36,
        "w1_reused_selections": 18, "w1_reuse_ratio": 0.5, "w1_shuffled_reused_selections": 9,
        "w1_shuffled_ratio": 0.25,
        "chance_numerator": 1.0, "chance_denominator": 4.0, "chance_ratio": 0.25, "uniform_denominator": 160,
        "uniform_ratio": 0.25, "w8_reused_selections": 27, "w8_reuse_ratio": 0.75, "w8_shuffled_reused_selections": 27,
        "w8_shuffled_ratio": 0.75, "w64_reused_selections": 36, "w64_reuse_ratio": 1.0,
        "w64_shuffled_reused_selections": 36, "w64_shuffled_ratio": 1.0, "seed": 0, "zipf_alpha": 1.1,
        "top8_selections": 40, "top8_share": 1.0, "distinct_experts": 12, "pool_experts": 16, "coverage_ratio": 0.75,
        "working_set_95_experts": 8, "working_set_95_ratio": 0.5,
    },
    "domain_overlap": {
        "trace_id": "tiny", "other_trace_id": "vast", "phase": "decode", "top_experts": 8, "layer_id": None,
        "shared_experts": 3, "joint_experts": 12, "jaccard_ratio": 0.25, "chance_shared_experts": 4.5,
    },
    "hit_rate": {
        **CONTRACT, "scored_steps": 4, "scored_events": 8, "scored_accepted_tokens": 4, "selections": 16,
        "accesses": 16, "union_ratio": 1.0, "hits": 12, "misses": 4, "hit_rate": 0.75, "hit_rate_low": 0.7,
        "hit_rate_high": 0.8, "block_steps": 2, "reference_policy": None, "over_reference": None,
        "over_reference_low": None, "over_reference_high": None, "compulsory_misses": 1, "capacity_misses": 3,
        "demand_bytes": None, "miss_bytes": None, "miss_bytes_per_step": None, "miss_bytes_per_accepted_token": None,
        "preload_bytes": None, "pressure_mean": 0.5, "pressure_p95": 1.0, "events_above_capacity": 0,
        "shuffled_accesses": 16, "shuffled_hits": 8, "shuffled_hit_rate": 0.5, "lag1_chance_numerator": 1.0,
        "lag1_chance_denominator": 4.0, "lag1_chance_ratio": 0.25, "lag1_uniform_denominator": 64,
        "lag1_uniform_ratio": 0.25,
    },
    "reporting_block": {
        "trace_id": "tiny", "item": "A1", "topic": "execution", "question": "unit?", "answer": "event", "known": True,
    },
    "inversion": {
        "trace_id": "tiny", "capacity_experts_total": 4, "semantics": "sequential", "access_order": "ascending",
        "policy": "lru", "dedup": "union", "fit": None, "seed": None, "step_begin": 0, "step_end": 10,
        "phase": "decode", "warm_fraction": 0.6, "warm_steps": 6, "capture_method": "drawn", "num_experts": 8,
        "moe_layers": 2, "top_k_observed": 2, "scored_steps": 4, "selections": 16, "accesses": 16, "hits": 12,
        "misses": 4, "hit_rate": 0.75,
    },
    "hit_rate_layer": {
        **CONTRACT, "layer_id": 0, "accesses": 8, "hits": 6, "misses": 2, "hit_rate": 0.75, "compulsory_misses": 1,
        "capacity_misses": 1, "miss_bytes": None,
    },
    "miss_ratio_curve": {
        **CONTRACT, "accesses": 16, "misses": 4, "miss_ratio": 0.25, "compulsory_misses": 1, "capacity_misses": 3,
        "demand_bytes": None, "miss_bytes": None,
    },
    "lookahead_recall": {
        "trace_id": "tiny", "predictor": "conditional", "fit": "first:0.6", "lookahead_layers": 1, "lookahead_steps": 0,
        "width": 4, "layer_id": None, "phase": "decode", "step_begin": 0, "step_end": 10, "warm_steps": 6, "events": 8,
        "covered_events": 4, "hint_coverage": 0.5, "accesses": 16, "covered_accesses": 8, "predicted_experts": 16,
        "predicted_accesses": 4, "recall_all": 0.25, "recall_covered": 0.5, "precision": 0.25,
        "chance_predicted_accesses": 2.0, "chance_recall_all": 0.125, "shuffled_predicted_accesses": 3,
        "shuffled_recall_all": 0.1875, "seed": 0,
    },
    "lookahead_recall_missed": {
        "trace_id": "tiny", "predictor": "conditional", "fit": "first:0.6", "lookahead_layers": 1, "lookahead_steps": 0,
        "width": 4, "phase": "decode", "policy": "lru", "scope": "global", "semantics": "event_atomic",
        "access_order": "router", "capacity_experts_total": 4, "step_begin": 0, "step_end": 10, "warm_steps": 6,
        "accesses": 16, "misses": 8, "predicted_misses": 1, "recall_missed": 0.125, "chance_predicted_misses": 2.0,
        "chance_recall_missed": 0.25,
    },
    "lookahead_benefit": {
        "trace_id": "tiny", "predictor": "conditional", "fit": "first:0.6", "lookahead_layers": 1, "lookahead_steps": 0,
        "width": 4, "phase": "decode", "capacity_experts_total": 4, "bandwidth_bytes_per_s": 1000, "latency_ns": 5,
        "queue_depth": 8, "compute_ns": 100, "step_begin": 0, "step_end": 10, "warm_steps": 6, "events": 8,
        "covered_events": 4, "hint_coverage": 0.5, "selections": 16, "accesses": 16, "predicted_experts": 16,
        "predicted_accesses": 4, "recall_all": 0.25, "precision": 0.25, "misses": 8, "predicted_misses": 4,
        "recall_missed": 0.5, "simulated_misses_with": 7, "simulated_removed_misses": 2, "prefetch_coverage": 0.25,
        "simulated_removed_late": 1, "simulated_displaced": 1, "simulated_submitted": 5, "simulated_completed": 5,
        "simulated_used": 2, "prefetch_accuracy": 0.4, "simulated_used_late": 1, "late_share": 0.5,
        "simulated_wasted": 3, "miss_bytes": 800, "simulated_removed_bytes": 200, "simulated_displaced_bytes": 100,
        "simulated_wasted_bytes": 300, "simulated_device_bytes": 1200, "simulated_device_bytes_per_miss_byte": 1.5,
        "simulated_time_without_ns": 2000, "simulated_time_with_ns": 1500, "simulated_time_per_time_without": 0.75,
        "simulated_overlap_ns": 700,
    },
    "replay_run": {
        "run_id": "20261202T033000-0a1b2c3d", "started_at": "2026-12-02T03:30:00.000000Z", "condition_hash":
        "0123456789ab", "trace_id": "tiny", "pool_id": "pool-1", "machine_id": "machine-1", "replayer_version": "0.1.0",
        "status": "complete", "failure": None, "bytes_valid": True, "bytes_reasons": "", "time_valid": True,
        "time_reasons": "", "thrash": False, "owner": "page_cache", "policy": None, "scope": None, "fit": None,
        "admission": None, "seed": None, "arena_fraction": None, "miss_path": None, "mechanism": "cgroup",
        "mechanism_detail": "cgroup v2", "fadvise": "random", "destination": "cpu", "threads": 8, "observe": "every",
        "residency_counter": "cachestat", "files_stay_open": True, "verify": "edges", "group_stat": "pass",
        "repeat": 0, "together_id": None, "tenant_number": None,
        "tenants": None, "shares_wall": None, "step_begin": 0, "step_end": 10, "access_order": "router", "warm_pass":
        True, "capacity_bytes": 400, "headroom_bytes": 0, "own_anonymous_bytes": 1000, "own_kernel_bytes": 100,
        "wall_bytes": 1500, "enforced_bytes": 400, "balloon_bytes": None, "offline_bytes": None,
        "outer_group_bytes": None, "arena_bytes":
        None, "preload_bytes": None, "preload_ns": None, "cold_resident_bytes": 0, "resident_median_bytes": 390,
        "resident_max_bytes": 400, "replayed_steps": 10, "events": 20, "selections": 40, "accesses": 40, "union_ratio":
        1.0, "demand_bytes": 4000, "reads": 40, "returned_bytes": 4000, "observed_accesses": 40, "native_hits": 20,
        "native_partial_hits": 5, "native_misses": 15, "native_hit_rate": 0.5, "arena_hits": None, "missing_bytes":
        1800, "direct_bytes": 0, "device_bytes": 1800, "device_bytes_counter": "c", "warm_device_bytes": 2400,
        "own_fault_bytes": 0, "overshoot_bytes": None, "raced_pages": 0, "neighbor_bytes": 0, "nominal_miss_bytes":
        1500, "amplification_nominal": 1.2, "resident_miss_bytes": 1600, "amplification_resident": 1.125, "interval_ns":
        1000, "overlap_ns": None, "wall_ns": 900, "check_ns": 90, "step_median_ns": 90, "stall_ns": 800,
        "stall_median_ns": 40, "stall_p99_ns": 80, "observe_ns": 10, "verify_ns": 10, "decide_ns": None, "cpu_ns": 500,
        "consumed_digest": "0" * 16, "checked_bytes": 4000,
    },
    "replay_step": {
        "run_id": "20261202T033000-0a1b2c3d", "step_id": 3, "events": 2, "accesses": 4, "demand_bytes": 400,
        "observed_accesses": 4, "native_hits": 2, "native_partial_hits": 1, "native_misses": 1, "native_hit_rate": 0.5,
        "missing_bytes": 150, "device_bytes": 150, "resident_bytes": 390, "simulated_hits": 3, "simulated_misses": 1,
        "wall_ns": 90, "check_ns": 9, "stall_ns": 80, "stall_median_ns": 40, "stall_p99_ns": 40,
    },
    "replay_reclaim": {
        "run_id": "20261202T033000-0a1b2c3d", "step_id": None, "device_bytes": 1800, "group_kswapd_scan_pages": 0,
        "group_direct_scan_pages": 30, "group_scan_pages": 30, "group_kswapd_steal_pages": 0,
        "group_direct_steal_pages": 20, "group_steal_pages": 20, "group_scan_per_steal": 1.5,
        "group_refault_bytes": 900, "group_refault_per_device_byte": 0.5, "group_refault_activated_pages": 3,
        "group_activated_pages": 4, "group_minor_faults": 5, "group_major_faults": 0, "group_cached_bytes": 390,
        "group_unevictable_bytes": 375, "group_limit_bytes": 1500, "group_locked_share": 0.25,
        "group_memory_some_ns": 70, "group_memory_full_ns": 60, "group_io_some_ns": 700, "group_io_full_ns": 600,
        "machine_kswapd_scan_pages": 0, "machine_direct_scan_pages": 0, "machine_scan_pages": 0,
        "machine_kswapd_steal_pages": 0, "machine_direct_steal_pages": 0, "machine_steal_pages": 0,
        "machine_scan_per_steal": None, "machine_file_scan_pages": 30, "machine_file_steal_pages": 20,
        "machine_file_scan_per_steal": 1.5, "machine_refault_bytes": 900, "machine_refault_per_device_byte": 0.5,
        "machine_refault_activated_pages": 3, "machine_activated_pages": 4, "machine_minor_faults": 50,
        "machine_major_faults": 1, "machine_free_bytes": 2**33, "machine_available_bytes": 2**33,
        "machine_cached_bytes": 2**20, "machine_locked_bytes": 2**32, "machine_unevictable_bytes": 2**32,
        "memory_bytes": 2**34, "machine_locked_share": 0.25, "machine_memory_some_ns": 70,
        "machine_memory_full_ns": 60, "machine_io_some_ns": 700, "machine_io_full_ns": 600,
    },
    "replay_node": {
        "run_id": "20261202T033000-0a1b2c3d", "node_id": 0, "has_processors": True, "is_counted": True,
        "node_bytes": 2**34, "node_free_bytes": 2**33, "node_file_bytes": 2**20, "node_locked_bytes": 2**32,
        "group_node_file_bytes": None,
    },
    "replay_delivery": {
        "run_id": "20261202T033000-0a1b2c3d", "delivery": "advice", "plan_hash": "0123456789ab",
        "piece_bytes": 131072, "hint_slots": None, "hints": 10, "hints_submitted": 9, "hints_completed": 6,
        "hints_overwritten": 2, "hints_dropped": 0, "hints_in_flight": 1, "hinted_missing_bytes": 8192,
        "hinted_read_bytes": 4096, "hint_ns": 1000, "named_accesses": 12, "named_hits": 7,
    },
    "replay_layer": {
        "run_id": "20261202T033000-0a1b2c3d", "layer_id": 1, "events": 10, "accesses": 20, "demand_bytes": 2000,
        "observed_accesses": 20, "native_hits": 10, "native_partial_hits": 4, "native_misses": 6,
        "native_hit_rate": 0.5, "missing_bytes": 900, "simulated_hits": 12, "simulated_misses": 8, "stall_ns": 400,
        "stall_median_ns": 40, "stall_p99_ns": 80,
    },
    "replay_proof": {
        "run_id": "20261202T033000-0a1b2c3d", "name": "no swap", "spoils": "bytes", "expected": "0", "found": "0",
        "tolerance": "", "held": True,
    },
    "replay_access": {
        "run_id": "20261202T033000-0a1b2c3d", "access": 7, "step_id": 3, "layer_id": 1, "expert_id": 5,
        "expert_bytes": 100, "missing_bytes": 0,
    },
    "pool": {
        "pool_id": "pool-1", "layout": "per_layer", "content": "synthetic_v1", "alignment_bytes": 4096, "moe_layers": 2,
        "pool_experts": 16, "pool_bytes": 1600, "expert_bytes_min": 100, "expert_bytes_max": 100, "files": 2,
        "file_bytes": 65536,
    },
    "machine": {
        "machine_id": "machine-1", "architecture": "aarch64", "cpu_model": None, "cpus": 2, "memory_bytes": 2**34,
        "page_bytes": 65536, "kernel_release": "6.18.0", "swap_bytes": 0, "mglru": "absent", "thp": "madvise",
        "min_free_bytes": 2**26, "swappiness": 60, "damon": "absent", "virtualization": "none", "numa_nodes": 1,
        "filesystem": "ext4", "mount_options": "rw", "block_device": "nvme0n1", "block_device_model": None,
        "read_ahead_bytes": 131072, "io_scheduler": "none", "rotational": False, "max_io_bytes": 131072,
        "logical_block_bytes": 512,
    },
    "experiment": {
        "experiment_id": "equal-memory-0123456789ab", "experiment": "equal-memory", "asks": "who?",
        "run_order": "random", "sizes": "fit_machine", "order_seed": 0, "conditions": 2, "repetitions": 5,
        "machine_id": "machine-1", "definition": "{}", "runs": 10, "valid_runs": 10, "finished": True,
        "digests_agree": True, "relative_wall_difference": 0.0, "finding": "No effect.",
    },
    "experiment_run": {
        "run_id": "20261202T033000-0a1b2c3d", "experiment_id": "equal-memory-0123456789ab", "trace_id": "tiny",
        "condition": "page cache", "tenant": None, "repetition": 0, "attempt": 0, "position": 3,
    },
    "experiment_condition": {
        "experiment_id": "equal-memory-0123456789ab", "condition": "page cache", "tenant": None,
        "metric": "device_bytes", "runs": 5, "valid_runs": 5, "counted_runs": 5, "median_value": 1800.0,
        "lowest_value": 1700.0, "highest_value": 1880.0, "relative_spread": 0.1,
    },
    "experiment_effect": {
        "experiment_id": "equal-memory-0123456789ab", "condition": "arena", "tenant": None, "metric": "device_bytes",
        "baseline": "page cache", "pairs": 5, "effect": 0.75, "effect_low": 0.7, "effect_high": 0.8, "self_low": 0.9,
        "self_high": 1.1, "outside_spread": True, "inverse_capacity_deviation": None,
        "inverse_residency_deviation": None, "monotone": None,
    },
    "lab": {
        "lab_id": "mechanisms-0123456789ab", "lab": "mechanisms", "asks": "do they agree?", "order_seed": 0,
        "conditions": 12, "repetitions": 5, "definition": "{}", "runs": 60, "valid_runs": 60, "finished": True,
    },
    "lab_run": {
        "run_id": "20261202T033000-0a1b2c3d", "lab_id": "mechanisms-0123456789ab", "trace_id": "tiny",
        "condition": "guest, cgroup, on", "repetition": 0, "attempt": 0, "position": 3, "place": "guest",
        "mglru_setting": "on", "boot_id": "boot-0a1b2c3d", "boot_position": 2, "boot_runs": 8, "boot_starts": 1,
        "guest_memory_bytes": 2**30, "boot_limit_bytes": None, "accelerator": "tcg", "qemu_version": "7.2.22",
        "kernel_package": "linux-image-6.12 6.12-1", "compiled_files": 0,
    },
}  # fmt: skip
ROWS["sweep"] = {"cell_hash": "0123456789abcdef", **ROWS["hit_rate"]}
