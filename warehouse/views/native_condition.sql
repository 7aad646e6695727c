-- What did each native condition read, hold and take, alone on its machine: medians and ranges over its repetitions?
-- Valid and complete runs only. Left out: replays that ran together, what a lab made to find mem= by, and attempts of
-- an experiment after the first valid one at a repetition. Medians are lower medians; times are of runs whose times
-- are valid.
CREATE VIEW native_condition AS
WITH measured AS (
    SELECT
        run.*, cell.experiment_id, plan.delivery, plan.plan_hash, plan.piece_bytes, plan.hint_slots,
        -- A machine has the size it has, so how it was booted is no other mechanism.
        CASE WHEN mechanism IN ('boot', 'offline') THEN mechanism ELSE coalesce(mechanism_detail, mechanism) END
            AS limited_by,
        CASE WHEN time_valid THEN wall_ns END AS timed_ns,
        CASE WHEN time_valid THEN step_median_ns END AS timed_step_ns,
        CASE WHEN time_valid THEN stall_p99_ns END AS timed_stall_ns
    FROM replay_run AS run
    LEFT JOIN replay_delivery AS plan USING (run_id)
    LEFT JOIN experiment_run AS cell USING (run_id)
    WHERE bytes_valid AND status = 'complete' AND together_id IS NULL
        AND NOT EXISTS (FROM lab_run AS mark WHERE mark.run_id = run.run_id AND mark.repetition IS NULL)
    QUALIFY experiment_id IS NULL
        OR row_number() OVER (PARTITION BY experiment_id, cell.condition, cell.repetition ORDER BY cell.attempt) = 1
)
SELECT
    -- What two conditions share where one is held against the other, but for what the comparison is about. An
    -- experiment's runs were interleaved, so they are compared among themselves.
    experiment_id, trace_id, pool_id, machine_id, owner, policy, scope, fit, admission, seed, arena_fraction, miss_path,
    mechanism, limited_by, fadvise, destination, threads, observe, residency_counter, files_stay_open, verify,
    group_stat, step_begin, step_end, access_order, warm_pass, headroom_bytes, outer_group_bytes,
    delivery, plan_hash, piece_bytes, hint_slots, condition_hash,
    quantile_disc(capacity_bytes, 0.5) AS capacity_bytes,
    quantile_disc(enforced_bytes, 0.5) AS enforced_bytes,
    -- A wall was asked for where it is the same for all runs.
    CASE WHEN min(wall_bytes) = max(wall_bytes) AND count(wall_bytes) = count(*) THEN min(wall_bytes) END AS wall_bytes,
    count(*) AS repetitions,
    count(*) >= 5 AS is_repeated_enough,
    any_value(replayed_steps) AS replayed_steps,
    any_value(accesses) AS accesses,
    any_value(demand_bytes) AS demand_bytes,
    quantile_disc(resident_median_bytes, 0.5) AS resident_bytes,
    quantile_disc(device_bytes, 0.5) AS device_bytes,
    min(device_bytes) AS device_low_bytes,
    max(device_bytes) AS device_high_bytes,
    count(device_bytes) AS counted_runs,
    quantile_disc(nominal_miss_bytes, 0.5) AS nominal_miss_bytes,
    quantile_disc(resident_miss_bytes, 0.5) AS resident_miss_bytes,
    count(timed_ns) AS timed_runs,
    quantile_disc(timed_ns, 0.5) AS wall_ns,
    min(timed_ns) AS wall_low_ns,
    max(timed_ns) AS wall_high_ns,
    quantile_disc(timed_step_ns, 0.5) AS iteration_ns,
    min(timed_step_ns) AS iteration_low_ns,
    max(timed_step_ns) AS iteration_high_ns,
    quantile_disc(timed_stall_ns, 0.5) AS stall_p99_ns,
    sum(observed_accesses)::BIGINT AS observed_accesses,
    sum(native_hits)::BIGINT AS native_hits,
    sum(native_partial_hits)::BIGINT AS native_partial_hits,
    sum(native_misses)::BIGINT AS native_misses
FROM measured
GROUP BY ALL
ORDER BY ALL;
