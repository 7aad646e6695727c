-- Which policy comes first under a contract, by how much and how surely, and what is left of it where only popularity is?
CREATE VIEW policy_ranking AS
SELECT
    trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass,
    admission, quota_fit, capacity_experts_total, capacity_bytes,
    policy, fit, pinned_fraction, folios_per_expert, seed,
    hit_rate, hits, accesses, hit_rate_low, hit_rate_high,
    reference_policy, over_reference, over_reference_low, over_reference_high,
    shuffled_hit_rate, shuffled_hits, shuffled_accesses,
    lag1_chance_ratio, lag1_chance_numerator, lag1_chance_denominator,
    lag1_uniform_ratio, lag1_uniform_denominator
FROM hit_rate
ORDER BY trace_id, scope, semantics, capacity_experts_total, capacity_bytes, hits DESC, policy;
