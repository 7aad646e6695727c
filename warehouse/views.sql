-- Views to read, paste and change. The line above each says which question it answers; it becomes the view's COMMENT.
-- `routing` (every row of every trace) is made in build.py, since it needs the path of data/traces.

-- Which policy finds the most accesses resident, side by side under one contract, and how far is each from both Beladys?
CREATE VIEW policy_comparison AS
WITH contract AS (
    SELECT
        trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps,
        warm_pass, seed, capacity_experts_total, capacity_bytes, accesses,
        max(hits) FILTER (WHERE policy = 'lru') AS lru_hits,
        max(hits) FILTER (WHERE policy = 'lfu_gated') AS lfu_gated_hits,
        max(hits) FILTER (WHERE policy = 'lfu_always') AS lfu_always_hits,
        max(hits) FILTER (WHERE policy = 'belady_bypass') AS belady_bypass_hits,
        max(hits) FILTER (WHERE policy = 'belady_forced') AS belady_forced_hits,
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
    seed, capacity_experts_total, capacity_bytes, accesses,
    lru_hits / nullif(accesses, 0) AS lru_hit_rate,
    lfu_gated_hits / nullif(accesses, 0) AS lfu_gated_hit_rate,
    lfu_always_hits / nullif(accesses, 0) AS lfu_always_hit_rate,
    static_table.fit AS static_fit,
    static_table.hits / nullif(accesses, 0) AS static_hit_rate,
    belady_forced_hits / nullif(accesses, 0) AS belady_forced_hit_rate,
    belady_bypass_hits / nullif(accesses, 0) AS belady_bypass_hit_rate,
    lru_hits, lfu_gated_hits, lfu_always_hits, static_table.hits AS static_hits, belady_forced_hits, belady_bypass_hits
FROM one_static
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
