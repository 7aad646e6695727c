"""One sound row per result table, small enough to check by eye."""

CONTRACT = {
    "trace_id": "tiny", "policy": "lru", "scope": "layer", "semantics": "event_atomic", "access_order": "router",
    "dedup": "union", "capacity_experts_total": 4, "capacity_bytes": None, "step_begin": 0, "step_end": 10,
    "phase": "decode", "warm_fraction": 0.6, "warm_steps": 6, "warm_pass": False, "fit": None, "seed": None,
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
    "trace_check": {"trace_id": "tiny", "name": "layers differ", "outcome": "passed", "wanted": "w", "found": "f"},
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
        **CONTRACT, "scored_steps": 4, "selections": 16, "accesses": 16, "union_ratio": 1.0, "hits": 12, "misses": 4,
        "hit_rate": 0.75, "compulsory_misses": 1, "demand_bytes": None, "miss_bytes": None, "preload_bytes": None,
    },
    "miss_ratio_curve": {
        **CONTRACT, "accesses": 16, "misses": 4, "miss_ratio": 0.25, "demand_bytes": None, "miss_bytes": None,
    },
    "lookahead_recall": {
        "trace_id": "tiny", "predictor": "conditional", "fit": "first:0.6", "lookahead_layers": 1, "lookahead_steps": 0,
        "width": 4, "layer_id": None, "phase": "decode", "step_begin": 0, "step_end": 10, "warm_steps": 6, "events": 8,
        "covered_events": 4, "hint_coverage": 0.5, "accesses": 16, "covered_accesses": 8, "predicted_experts": 16,
        "predicted_accesses": 4, "recall_all": 0.25, "recall_covered": 0.5, "precision": 0.25,
        "chance_predicted_accesses": 2.0, "chance_recall_all": 0.125,
    },
}  # fmt: skip
