-- Does keeping experts out of the cache help: what is missed and read with a table of what may enter, and without?
-- Simulated and measured have columns of their own. Simulated: one contract with and without --admit. Measured: owner
-- page_cache_admission against page_cache, everything else asked for alike, of equal capacity or in equal walls; an
-- effect inside what either does against itself is none, of fewer than five runs not known.
CREATE VIEW admission_effect AS
WITH contract AS (
    SELECT
        *,
        row(
            trace_id, policy, scope, semantics, access_order, seed, dedup, capacity_experts_total, capacity_bytes,
            step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, fit, pinned_fraction, quota_fit,
            folios_per_expert
        ) AS rest
    FROM simulated
),
by_simulation AS (
    SELECT
        'simulated' AS evidence,
        admitting.* EXCLUDE (
            rest, fit_trace_id, admission_size, order_seed, accesses, hits, misses, demand_bytes, miss_bytes
        ),
        admitting.accesses AS simulated_accesses,
        admitting.misses AS simulated_misses,
        every.misses AS simulated_misses_without,
        every.misses - admitting.misses AS simulated_saved_misses,
        admitting.misses / nullif(every.misses, 0) AS simulated_misses_over_without
    FROM contract AS admitting
    LEFT JOIN (FROM contract WHERE admission IS NULL) AS every ON admitting.rest IS NOT DISTINCT FROM every.rest
    WHERE admitting.admission IS NOT NULL
),
measured AS (
    SELECT
        *,
        row(
            experiment_id, trace_id, pool_id, machine_id, mechanism, limited_by, fadvise, destination, threads, observe,
            residency_counter, files_stay_open, verify, group_stat, step_begin, step_end, access_order, warm_pass,
            headroom_bytes, outer_group_bytes, delivery, plan_hash, piece_bytes, hint_slots
        ) AS setting
    FROM native_condition
    WHERE owner IN ('page_cache', 'page_cache_admission')
),
paired AS (
    SELECT
        here.*,
        base.condition_hash AS condition_hash_without,
        base.repetitions AS measured_repetitions_without,
        base.device_bytes AS measured_device_bytes_without,
        base.device_high_bytes - base.device_low_bytes AS measured_spread_bytes_without,
        base.counted_runs AS counted_runs_without,
        base.timed_runs AS measured_timed_runs_without,
        base.wall_ns AS measured_wall_ns_without,
        base.wall_high_ns - base.wall_low_ns AS measured_spread_ns_without,
        here.device_high_bytes - here.device_low_bytes AS measured_spread_bytes,
        here.wall_high_ns - here.wall_low_ns AS measured_spread_ns,
        base.device_bytes - here.device_bytes AS measured_saved_bytes,
        base.wall_ns - here.wall_ns AS measured_saved_ns
    FROM (FROM measured WHERE owner = 'page_cache_admission') AS here
    LEFT JOIN (FROM measured WHERE owner = 'page_cache') AS base
        ON here.setting IS NOT DISTINCT FROM base.setting
        AND (here.capacity_bytes = base.capacity_bytes OR here.wall_bytes = base.wall_bytes)
),
by_run AS (
    SELECT
        'measured' AS evidence,
        trace_id, experiment_id, pool_id, machine_id, mechanism, limited_by, fadvise, destination, threads, observe,
        residency_counter, files_stay_open, verify, group_stat, headroom_bytes, outer_group_bytes, miss_path, delivery,
        plan_hash, piece_bytes, hint_slots, condition_hash, condition_hash_without,
        scope, fit, seed, access_order, step_begin, step_end, warm_pass, admission, capacity_bytes, wall_bytes,
        repetitions AS measured_repetitions, measured_repetitions_without,
        device_bytes AS measured_device_bytes, measured_device_bytes_without, measured_saved_bytes,
        device_bytes / nullif(measured_device_bytes_without, 0) AS measured_device_over_without,
        measured_spread_bytes, measured_spread_bytes_without,
        CASE
            WHEN counted_runs < 5 OR counted_runs_without < 5 OR measured_saved_bytes IS NULL THEN NULL
            WHEN abs(measured_saved_bytes) <= greatest(measured_spread_bytes, measured_spread_bytes_without) THEN 'none'
            WHEN measured_saved_bytes > 0 THEN 'less'
            ELSE 'more'
        END AS measured_effect_bytes,
        timed_runs AS measured_timed_runs, measured_timed_runs_without,
        wall_ns AS measured_wall_ns, measured_wall_ns_without,
        wall_ns / nullif(measured_wall_ns_without, 0) AS measured_wall_over_without,
        CASE
            WHEN timed_runs < 5 OR measured_timed_runs_without < 5 OR measured_saved_ns IS NULL THEN NULL
            WHEN abs(measured_saved_ns) <= greatest(measured_spread_ns, measured_spread_ns_without) THEN 'none'
            WHEN measured_saved_ns > 0 THEN 'less'
            ELSE 'more'
        END AS measured_effect_time
    FROM paired
)
FROM by_simulation
UNION ALL BY NAME
FROM by_run
ORDER BY ALL;

COMMENT ON COLUMN admission_effect.limited_by
    IS 'what limited memory: the version of the cgroup, what stood for the machine, or boot and offline';
COMMENT ON COLUMN admission_effect.knows_the_future IS 'whether a table saw steps that are scored; of a simulation';
COMMENT ON COLUMN admission_effect.admission_trace_id
    IS 'the other trace that the table was fitted on; null if none was';
COMMENT ON COLUMN admission_effect.evidence IS 'simulated, or measured: the columns of the other are null';
COMMENT ON COLUMN admission_effect.simulated_accesses IS 'accesses scored';
COMMENT ON COLUMN admission_effect.simulated_misses IS 'misses with the table of what may enter';
COMMENT ON COLUMN admission_effect.simulated_misses_without
    IS 'misses of the same contract without it; null if not simulated';
COMMENT ON COLUMN admission_effect.simulated_saved_misses IS 'simulated_misses_without − simulated_misses';
COMMENT ON COLUMN admission_effect.simulated_misses_over_without IS 'simulated_misses ÷ simulated_misses_without';
COMMENT ON COLUMN admission_effect.condition_hash_without IS 'names the condition of the page cache';
COMMENT ON COLUMN admission_effect.measured_repetitions IS 'valid and complete runs with the table';
COMMENT ON COLUMN admission_effect.measured_repetitions_without IS 'of the page cache';
COMMENT ON COLUMN admission_effect.measured_device_bytes IS 'lower median of device bytes with it [byte]';
COMMENT ON COLUMN admission_effect.measured_device_bytes_without
    IS 'the same of the page cache; null where it was not run alike [byte]';
COMMENT ON COLUMN admission_effect.measured_saved_bytes
    IS 'measured_device_bytes_without − measured_device_bytes [byte]';
COMMENT ON COLUMN admission_effect.measured_device_over_without
    IS 'measured_device_bytes ÷ measured_device_bytes_without';
COMMENT ON COLUMN admission_effect.measured_spread_bytes IS 'range of device bytes with it [byte]';
COMMENT ON COLUMN admission_effect.measured_spread_bytes_without IS 'of the page cache [byte]';
COMMENT ON COLUMN admission_effect.measured_effect_bytes
    IS 'less or more device bytes with it; none inside either range; null below five runs of either';
COMMENT ON COLUMN admission_effect.measured_timed_runs IS 'runs with it whose times are valid';
COMMENT ON COLUMN admission_effect.measured_timed_runs_without IS 'of the page cache';
COMMENT ON COLUMN admission_effect.measured_wall_ns IS 'lower median of wall_ns with it [ns]';
COMMENT ON COLUMN admission_effect.measured_wall_ns_without IS 'of the page cache [ns]';
COMMENT ON COLUMN admission_effect.measured_wall_over_without IS 'measured_wall_ns ÷ measured_wall_ns_without';
COMMENT ON COLUMN admission_effect.measured_effect_time
    IS 'as measured_effect_bytes, of wall_ns over runs whose times are valid';
