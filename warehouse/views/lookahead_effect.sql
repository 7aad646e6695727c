-- Did native runs that delivered a lookahead plan read less and take less time than the same runs without a plan?
CREATE VIEW lookahead_effect AS
WITH counted AS (
    SELECT
        run.*,
        cell.experiment_id, cell.condition, delivery.* EXCLUDE (run_id),
        CASE WHEN time_valid THEN wall_ns END AS timed_ns,
        -- A machine has the size it has, so how it was booted is no other mechanism.
        CASE WHEN mechanism IN ('boot', 'offline') THEN mechanism ELSE coalesce(mechanism_detail, mechanism) END
            AS limited_by,
        -- What two runs must share to be compared, nulls included; within an experiment, its own runs alone.
        {'experiment_id': experiment_id, 'trace_id': run.trace_id, 'pool_id': pool_id, 'machine_id': machine_id,
         'owner': owner, 'policy': policy, 'scope': scope, 'fit': fit, 'admission': admission, 'seed': seed,
         'arena_fraction': arena_fraction, 'miss_path': miss_path, 'residency_counter': residency_counter,
         'files_stay_open': files_stay_open, 'fadvise': fadvise, 'destination': destination, 'threads': threads,
         'observe': observe,
         'verify': verify, 'group_stat': group_stat, 'step_begin': step_begin, 'step_end': step_end,
         'access_order': access_order, 'warm_pass': warm_pass, 'mechanism': mechanism, 'limited_by': limited_by,
         'headroom_bytes': headroom_bytes, 'outer_group_bytes': outer_group_bytes} AS setting
    FROM replay_run AS run
    LEFT JOIN replay_delivery AS delivery USING (run_id)
    LEFT JOIN experiment_run AS cell USING (run_id)
    WHERE bytes_valid AND status = 'complete' AND together_id IS NULL AND device_bytes IS NOT NULL
        -- Runs that a lab made to find mem= by are no repetitions.
        AND NOT EXISTS (FROM lab_run AS mark WHERE mark.run_id = run.run_id AND mark.repetition IS NULL)
    -- An experiment counts the first attempt at a repetition that is valid.
    QUALIFY experiment_id IS NULL
        OR row_number() OVER (PARTITION BY experiment_id, cell.condition, cell.repetition ORDER BY cell.attempt) = 1
),
planned AS (
    SELECT
        -- Two conditions of an experiment may ask for the same and stay two.
        setting, condition_hash, condition, delivery, plan_hash, piece_bytes, hint_slots,
        quantile_disc(capacity_bytes, 0.5) AS capacity_bytes,
        -- A wall was asked for where it is the same for all runs.
        CASE WHEN count(*) > 1 AND min(wall_bytes) = max(wall_bytes) THEN min(wall_bytes) END AS wall_bytes,
        count(*) AS plan_runs,
        quantile_disc(resident_median_bytes, 0.5) AS plan_resident_bytes,
        quantile_disc(device_bytes, 0.5) AS plan_device_bytes,
        min(device_bytes) AS plan_device_low_bytes,
        max(device_bytes) AS plan_device_high_bytes,
        count(timed_ns) AS plan_timed_runs,
        quantile_disc(timed_ns, 0.5) AS plan_wall_ns,
        min(timed_ns) AS plan_wall_low_ns,
        max(timed_ns) AS plan_wall_high_ns,
        sum(native_hits)::BIGINT AS plan_hits,
        sum(observed_accesses)::BIGINT AS plan_observed_accesses,
        sum(events)::BIGINT AS plan_events,
        sum(hints)::BIGINT AS hints,
        sum(hints_submitted)::BIGINT AS hints_submitted,
        sum(hints_completed)::BIGINT AS hints_completed,
        sum(named_accesses)::BIGINT AS named_accesses,
        sum(named_hits)::BIGINT AS named_hits,
        sum(hinted_missing_bytes)::BIGINT AS hinted_missing_bytes,
        sum(hinted_read_bytes)::BIGINT AS hinted_read_bytes
    FROM counted
    WHERE delivery IS NOT NULL
    GROUP BY ALL
),
compared AS (
    SELECT
        planned.*,
        count(bare.run_id) AS none_runs,
        quantile_disc(bare.resident_median_bytes, 0.5) AS none_resident_bytes,
        quantile_disc(bare.device_bytes, 0.5) AS none_device_bytes,
        min(bare.device_bytes) AS none_device_low_bytes,
        max(bare.device_bytes) AS none_device_high_bytes,
        count(bare.timed_ns) AS none_timed_runs,
        quantile_disc(bare.timed_ns, 0.5) AS none_wall_ns,
        min(bare.timed_ns) AS none_wall_low_ns,
        max(bare.timed_ns) AS none_wall_high_ns,
        sum(bare.native_hits)::BIGINT AS none_hits,
        sum(bare.observed_accesses)::BIGINT AS none_observed_accesses
    FROM planned
    LEFT JOIN (FROM counted WHERE delivery IS NULL) AS bare
        ON bare.setting IS NOT DISTINCT FROM planned.setting
        -- Of equal capacity, or in equal walls; a booted machine has the size it has.
        AND (
            bare.capacity_bytes IS NOT DISTINCT FROM planned.capacity_bytes
            OR bare.wall_bytes = planned.wall_bytes OR bare.mechanism = 'boot'
        )
    GROUP BY ALL
),
spread AS (
    SELECT
        *,
        none_device_bytes - plan_device_bytes AS saved_device_bytes,
        none_device_high_bytes - none_device_low_bytes AS none_spread_bytes,
        plan_device_high_bytes - plan_device_low_bytes AS plan_spread_bytes,
        none_wall_ns - plan_wall_ns AS saved_ns,
        none_wall_high_ns - none_wall_low_ns AS none_spread_ns,
        plan_wall_high_ns - plan_wall_low_ns AS plan_spread_ns
    FROM compared
)
SELECT
    setting.trace_id AS trace_id, setting.pool_id AS pool_id, setting.machine_id AS machine_id,
    setting.experiment_id AS experiment_id, condition, condition_hash, delivery, plan_hash, piece_bytes, hint_slots,
    setting.owner AS owner, setting.mechanism AS mechanism, setting.limited_by AS limited_by,
    setting.fadvise AS fadvise, setting.destination AS destination, setting.threads AS threads,
    setting.observe AS observe, setting.residency_counter AS residency_counter,
    setting.files_stay_open AS files_stay_open, setting.verify AS verify, setting.group_stat AS group_stat,
    setting.access_order AS access_order, setting.warm_pass AS warm_pass, setting.step_begin AS step_begin,
    setting.step_end AS step_end, setting.headroom_bytes AS headroom_bytes,
    setting.outer_group_bytes AS outer_group_bytes, capacity_bytes,
    plan_runs, none_runs, plan_resident_bytes, none_resident_bytes,
    plan_device_bytes, plan_device_low_bytes, plan_device_high_bytes,
    none_device_bytes, none_device_low_bytes, none_device_high_bytes,
    saved_device_bytes, none_spread_bytes, plan_spread_bytes,
    plan_device_bytes / nullif(none_device_bytes, 0) AS device_over_none,
    -- None inside what either does against itself. Below five runs of either chance alone leaves the range too often.
    -- A plan of which nothing was handed over has no effect to speak of.
    CASE
        WHEN plan_runs < 5 OR none_runs < 5 OR hints_submitted = 0 THEN NULL
        WHEN abs(saved_device_bytes) <= greatest(none_spread_bytes, plan_spread_bytes) THEN 'none'
        WHEN saved_device_bytes > 0 THEN 'less'
        ELSE 'more'
    END AS effect_bytes,
    plan_timed_runs, none_timed_runs,
    plan_wall_ns, plan_wall_low_ns, plan_wall_high_ns, none_wall_ns, none_wall_low_ns, none_wall_high_ns,
    saved_ns, none_spread_ns, plan_spread_ns,
    plan_wall_ns / nullif(none_wall_ns, 0) AS wall_over_none,
    CASE
        WHEN plan_timed_runs < 5 OR none_timed_runs < 5 OR hints_submitted = 0 THEN NULL
        WHEN abs(saved_ns) <= greatest(none_spread_ns, plan_spread_ns) THEN 'none'
        WHEN saved_ns > 0 THEN 'less'
        ELSE 'more'
    END AS effect_time,
    plan_hits / nullif(plan_observed_accesses, 0) AS plan_hit_rate, plan_hits, plan_observed_accesses,
    none_hits / nullif(none_observed_accesses, 0) AS none_hit_rate, none_hits, none_observed_accesses,
    hints / nullif(plan_events, 0) AS hinted_share, plan_events, hints_submitted,
    hints_completed / nullif(hints, 0) AS completed_share, hints_completed, hints,
    named_hits / nullif(named_accesses, 0) AS named_hit_rate, named_hits, named_accesses,
    hinted_read_bytes, hinted_missing_bytes
FROM spread
ORDER BY ALL;
