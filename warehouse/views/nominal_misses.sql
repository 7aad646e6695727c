-- How many bytes does each iteration have to read if an LRU over all layers holds this much (the study's nominal misses)?
CREATE VIEW nominal_misses AS
SELECT
    trace_id, semantics, access_order, seed, dedup, phase, step_begin, step_end, warm_fraction, warm_steps, warm_pass,
    quota_fit, capacity_experts_total, capacity_bytes, scored_steps, scored_accepted_tokens, demand_bytes,
    miss_bytes, miss_bytes_per_step, miss_bytes_per_accepted_token
FROM hit_rate
WHERE policy = 'lru' AND scope = 'global' AND admission IS NULL AND miss_bytes IS NOT NULL
ORDER BY ALL;
