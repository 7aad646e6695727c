-- Views to read, paste and change. The line above each says which question it answers; it becomes the view's COMMENT.
-- `routing` (every row of every trace) is made in build.py, since it needs the path of data/traces.

-- Which policy finds the most accesses resident, side by side under one contract, and how far is each from both Beladys?
CREATE VIEW policy_comparison AS
WITH contract AS (
    SELECT
        trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps,
        warm_pass, admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
        max(hits) FILTER (WHERE policy = 'lru') AS lru_hits,
        max(hits) FILTER (WHERE policy = 'fifo') AS fifo_hits,
        max(hits) FILTER (WHERE policy = 'clock') AS clock_hits,
        max(hits) FILTER (WHERE policy = 'sieve') AS sieve_hits,
        max(hits) FILTER (WHERE policy = 's3fifo') AS s3fifo_hits,
        max(hits) FILTER (WHERE policy = 'arc') AS arc_hits,
        max(hits) FILTER (WHERE policy = 'lfu_gated') AS lfu_gated_hits,
        max(hits) FILTER (WHERE policy = 'lfu_always') AS lfu_always_hits,
        max(hits) FILTER (WHERE policy = 'lfu_in_cache') AS lfu_in_cache_hits,
        max(hits) FILTER (WHERE policy = 'lfru') AS lfru_hits,
        max(hits) FILTER (WHERE policy = 'least_stale') AS least_stale_hits,
        max(hits) FILTER (WHERE policy = 'pinned_lru') AS pinned_lru_hits,
        max(hits) FILTER (WHERE policy = 'two_list') AS two_list_hits,
        max(hits) FILTER (WHERE policy = 'mglru') AS mglru_hits,
        max(hits) FILTER (WHERE policy = 'random') AS random_hits,
        max(hits) FILTER (WHERE policy = 'belady_forced') AS belady_forced_hits,
        max(hits) FILTER (WHERE policy = 'belady_bypass') AS belady_bypass_hits,
        -- One contract can hold several static tables, one per fit: each gets a row of its own below.
        list({'fit': fit, 'hits': hits} ORDER BY fit) FILTER (WHERE policy = 'static') AS static_tables
    FROM hit_rate
    GROUP BY ALL
),
one_static AS (
    SELECT *, unnest(coalesce(static_tables, [NULL])) AS static_table FROM contract
)
SELECT
    trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass,
    admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
    lru_hits / nullif(accesses, 0) AS lru_hit_rate,
    fifo_hits / nullif(accesses, 0) AS fifo_hit_rate,
    clock_hits / nullif(accesses, 0) AS clock_hit_rate,
    sieve_hits / nullif(accesses, 0) AS sieve_hit_rate,
    s3fifo_hits / nullif(accesses, 0) AS s3fifo_hit_rate,
    arc_hits / nullif(accesses, 0) AS arc_hit_rate,
    lfu_gated_hits / nullif(accesses, 0) AS lfu_gated_hit_rate,
    lfu_always_hits / nullif(accesses, 0) AS lfu_always_hit_rate,
    lfu_in_cache_hits / nullif(accesses, 0) AS lfu_in_cache_hit_rate,
    lfru_hits / nullif(accesses, 0) AS lfru_hit_rate,
    least_stale_hits / nullif(accesses, 0) AS least_stale_hit_rate,
    pinned_lru_hits / nullif(accesses, 0) AS pinned_lru_hit_rate,
    two_list_hits / nullif(accesses, 0) AS two_list_hit_rate,
    mglru_hits / nullif(accesses, 0) AS mglru_hit_rate,
    random_hits / nullif(accesses, 0) AS random_hit_rate,
    static_table.fit AS static_fit,
    static_table.hits / nullif(accesses, 0) AS static_hit_rate,
    belady_forced_hits / nullif(accesses, 0) AS belady_forced_hit_rate,
    belady_bypass_hits / nullif(accesses, 0) AS belady_bypass_hit_rate,
    lru_hits, fifo_hits, clock_hits, sieve_hits, s3fifo_hits, arc_hits, lfu_gated_hits, lfu_always_hits,
    lfu_in_cache_hits, lfru_hits, least_stale_hits, pinned_lru_hits, two_list_hits, mglru_hits, random_hits,
    static_table.hits AS static_hits, belady_forced_hits, belady_bypass_hits
FROM one_static
ORDER BY ALL;

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

-- How far is the best policy that does not know the future from Belady, and is it what enters or what leaves that costs?
CREATE VIEW belady_gap AS
WITH told AS (
    SELECT
        *,
        -- Belady knows the future, and so does a table fitted on steps that are scored afterwards.
        policy LIKE 'belady%' OR coalesce(fit = 'same', false) OR coalesce(
            floor(try_cast(nullif(replace(fit, 'first:', ''), fit) AS DECIMAL(18, 9)) * (step_end - step_begin))
            > warm_steps, false
        ) AS knows_the_future
    FROM hit_rate
),
contract AS (
    SELECT
        trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps,
        warm_pass, admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
        min({'misses': misses, 'policy': policy}) FILTER (WHERE NOT knows_the_future) AS best,
        max(misses) FILTER (WHERE policy = 'belady_forced') AS forced_misses,
        max(misses) FILTER (WHERE policy = 'belady_bypass') AS bypass_misses
    FROM told
    GROUP BY ALL
),
gap AS (
    SELECT * EXCLUDE (best), best.policy AS best_policy, best.misses AS best_misses FROM contract
)
SELECT
    *,
    best_misses - bypass_misses AS gap_misses,
    (best_misses - bypass_misses) / nullif(best_misses, 0) AS gap_ratio,
    -- What Belady loses by being forced to admit is the share of admission; the rest is choosing victims.
    forced_misses - bypass_misses AS admission_misses,
    (forced_misses - bypass_misses) / nullif(best_misses - bypass_misses, 0) AS admission_share,
    best_misses - forced_misses AS victim_misses,
    (best_misses - forced_misses) / nullif(best_misses - bypass_misses, 0) AS victim_share
FROM gap
WHERE bypass_misses IS NOT NULL AND best_misses IS NOT NULL
ORDER BY ALL;

-- How many bytes does each iteration have to read if an LRU over all layers holds this much (the study's nominal misses)?
CREATE VIEW nominal_misses AS
SELECT
    trace_id, semantics, access_order, phase, step_begin, step_end, warm_fraction, warm_pass,
    capacity_experts_total, capacity_bytes, scored_steps, scored_accepted_tokens, demand_bytes,
    miss_bytes, miss_bytes_per_step, miss_bytes_per_accepted_token
FROM hit_rate
WHERE policy = 'lru' AND scope = 'global' AND admission IS NULL AND miss_bytes IS NOT NULL
ORDER BY ALL;

-- How much of what the next layers need does a predictor name in time, over all layers, and how much would chance name?
CREATE VIEW lookahead_summary AS
SELECT
    trace_id, phase, step_begin, step_end, warm_steps, predictor, fit, lookahead_layers, lookahead_steps, width,
    recall_all, predicted_accesses, accesses,
    recall_covered, covered_accesses,
    precision, predicted_experts,
    hint_coverage, covered_events, events,
    chance_recall_all, chance_predicted_accesses
FROM lookahead_recall
WHERE layer_id IS NULL
ORDER BY trace_id, phase, predictor, lookahead_layers, lookahead_steps, width, fit;

-- Which facts about a trace does neither its dump nor the user say?
CREATE VIEW trace_unknowns AS
SELECT trace_id, trim(unnest(string_split(unknowns, ','))) AS unknown_fact, model, source_file
FROM trace
WHERE unknowns <> ''
ORDER BY trace_id, unknown_fact;

-- What did each valid native run read from its device, beside what a simulated LRU of the same memory misses?
CREATE VIEW replay_summary AS
SELECT
    trace_id, pool_id, machine_id, owner, mechanism, fadvise, destination, step_begin, step_end, warm_pass,
    condition_hash, repeat, run_id, started_at,
    capacity_bytes, enforced_bytes, resident_median_bytes,
    demand_bytes, device_bytes, device_bytes_counter,
    nominal_miss_bytes, amplification_nominal,
    resident_miss_bytes, amplification_resident,
    native_hit_rate, native_hits, observed_accesses,
    -- Times that are not to be believed are left out; the table replay_run has them.
    time_valid,
    CASE WHEN time_valid THEN stall_median_ns END AS stall_median_ns,
    CASE WHEN time_valid THEN stall_p99_ns END AS stall_p99_ns
FROM replay_run
WHERE bytes_valid
ORDER BY trace_id, pool_id, machine_id, owner, mechanism, capacity_bytes, condition_hash, started_at, run_id;

-- Which native runs are kept but not believed, and which proofs failed?
CREATE VIEW quarantined_runs AS
SELECT
    run_id, started_at, trace_id, owner, mechanism, capacity_bytes, status, failure, bytes_reasons,
    count(*) FILTER (WHERE proof.held = false) AS failed_proofs,
    count(proof.name) AS proofs
FROM replay_run AS run
LEFT JOIN replay_proof AS proof USING (run_id)
WHERE NOT run.bytes_valid
GROUP BY ALL
ORDER BY started_at, run_id;

-- How many accesses of each layer did a valid native run find resident, and a simulated LRU of the same residency?
CREATE VIEW native_vs_simulated AS
SELECT
    run.run_id, run.trace_id, run.owner, run.mechanism, run.capacity_bytes, run.resident_median_bytes,
    layer.layer_id, layer.accesses,
    layer.observed_accesses, layer.native_hits, layer.native_partial_hits, layer.native_misses, layer.native_hit_rate,
    layer.simulated_hits, layer.simulated_misses,
    layer.simulated_hits / nullif(layer.accesses, 0) AS simulated_hit_rate
FROM replay_layer AS layer
JOIN replay_run AS run USING (run_id)
WHERE run.bytes_valid
ORDER BY run.trace_id, run.owner, run.mechanism, run.capacity_bytes, run.started_at, run.run_id, layer.layer_id;
