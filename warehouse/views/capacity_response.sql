-- What does each capacity cost, in time and device bytes, and how far is it from a line that falls with 1 ÷ capacity?
-- One row per condition; a curve is of conditions that differ in capacity alone. The line goes through the largest
-- capacity of the curve and has no other parameter (2608.12103, Table 2): anchor bytes × anchor capacity ÷ capacity.
CREATE VIEW capacity_response AS
WITH curve AS (
    SELECT
        *,
        row(
            experiment_id, trace_id, pool_id, machine_id, owner, policy, scope, fit, admission, seed, arena_fraction,
            miss_path, mechanism, limited_by, fadvise, destination, threads, observe, residency_counter,
            files_stay_open, verify, group_stat, step_begin, step_end, access_order, warm_pass, headroom_bytes,
            outer_group_bytes, delivery, plan_hash, piece_bytes, hint_slots, capacity_bytes IS NULL
        ) AS of_curve
    FROM native_condition
),
anchored AS (
    SELECT
        *,
        max(capacity_bytes) OVER every AS anchor_capacity_bytes,
        -- Where several conditions have the largest capacity, what they read is no one number.
        CASE WHEN max(device_bytes) OVER same = min(device_bytes) OVER same THEN device_bytes END AS one_device_bytes,
        -- Of equal capacities the one that read most comes first, so that it counts as no rise.
        device_bytes - lag(device_bytes) OVER (PARTITION BY of_curve ORDER BY capacity_bytes, device_bytes DESC)
            AS rise_bytes,
        count(DISTINCT capacity_bytes) OVER every AS capacities,
        count(*) OVER every = count(device_bytes) OVER every AS are_counted
    FROM curve
    WINDOW every AS (PARTITION BY of_curve), same AS (PARTITION BY of_curve, capacity_bytes)
),
lined AS (
    SELECT
        *,
        max(one_device_bytes) FILTER (WHERE capacity_bytes = anchor_capacity_bytes) OVER (PARTITION BY of_curve)
            AS anchor_device_bytes,
        coalesce(max(rise_bytes) OVER (PARTITION BY of_curve), 0) > 0 AS rises
    FROM anchored
)
SELECT
    trace_id, pool_id, machine_id, experiment_id, owner, policy, scope, fit, admission, seed, arena_fraction, miss_path,
    mechanism, limited_by, fadvise, destination, threads, observe, residency_counter, files_stay_open, verify,
    group_stat, step_begin, step_end, access_order, warm_pass, headroom_bytes, outer_group_bytes, delivery, plan_hash,
    piece_bytes, hint_slots, condition_hash, capacity_bytes, enforced_bytes, resident_bytes,
    repetitions, is_repeated_enough,
    timed_runs, iteration_ns, iteration_low_ns, iteration_high_ns,
    (iteration_high_ns - iteration_low_ns) / nullif(iteration_ns, 0) AS iteration_spread,
    stall_p99_ns,
    counted_runs, device_bytes, device_low_bytes, device_high_bytes,
    (device_high_bytes - device_low_bytes) / nullif(device_bytes, 0) AS device_spread,
    device_bytes / nullif(replayed_steps, 0) AS device_bytes_per_step, replayed_steps, demand_bytes,
    nominal_miss_bytes, device_bytes / nullif(nominal_miss_bytes, 0) AS amplification_nominal,
    resident_miss_bytes, device_bytes / nullif(resident_miss_bytes, 0) AS amplification_resident,
    anchor_capacity_bytes, anchor_device_bytes,
    device_bytes * capacity_bytes / nullif(anchor_device_bytes * anchor_capacity_bytes, 0) - 1
        AS inverse_capacity_deviation,
    -- Null where there is no second capacity, or where a condition's bytes were not counted.
    capacities,
    CASE WHEN capacities > 1 AND are_counted THEN NOT rises END AS falls_monotonically
FROM lined
ORDER BY ALL;

COMMENT ON COLUMN capacity_response.limited_by
    IS 'what limited memory: the version of the cgroup, what stood for the machine, or boot and offline';
COMMENT ON COLUMN capacity_response.is_repeated_enough
    IS 'whether there are at least five repetitions (of both, where two are compared); null without a partner';
COMMENT ON COLUMN capacity_response.repetitions IS 'valid and complete runs of the condition';
COMMENT ON COLUMN capacity_response.timed_runs IS 'of these, runs whose times are valid';
COMMENT ON COLUMN capacity_response.iteration_ns
    IS 'lower median over runs with valid times of their median step time [ns]';
COMMENT ON COLUMN capacity_response.iteration_low_ns IS 'the shortest of them [ns]';
COMMENT ON COLUMN capacity_response.iteration_high_ns IS 'the longest of them [ns]';
COMMENT ON COLUMN capacity_response.iteration_spread IS '(iteration_high_ns − iteration_low_ns) ÷ iteration_ns';
COMMENT ON COLUMN capacity_response.counted_runs IS 'runs whose device bytes were counted';
COMMENT ON COLUMN capacity_response.device_low_bytes IS 'least device bytes of a run [byte]';
COMMENT ON COLUMN capacity_response.device_high_bytes IS 'most device bytes of a run [byte]';
COMMENT ON COLUMN capacity_response.device_spread IS '(device_high_bytes − device_low_bytes) ÷ device_bytes';
COMMENT ON COLUMN capacity_response.device_bytes_per_step IS 'device_bytes ÷ replayed_steps [byte]';
COMMENT ON COLUMN capacity_response.anchor_capacity_bytes IS 'largest capacity of the curve [byte]';
COMMENT ON COLUMN capacity_response.anchor_device_bytes
    IS 'device bytes at it; null where its conditions disagree [byte]';
COMMENT ON COLUMN capacity_response.inverse_capacity_deviation
    IS 'device_bytes × capacity_bytes ÷ (anchor_device_bytes × anchor_capacity_bytes) − 1: 0 is on the line';
COMMENT ON COLUMN capacity_response.capacities IS 'different capacities of the curve';
COMMENT ON COLUMN capacity_response.falls_monotonically
    IS 'whether device bytes never rise as the capacity does; null with one capacity, or bytes not counted';
