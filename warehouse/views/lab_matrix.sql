-- What did each condition of a lab read and hold: medians and ranges over its repetitions, guests and host alike?
CREATE VIEW lab_matrix AS
SELECT
    mark.lab_id, mark.condition, mark.place, run.mechanism, mark.mglru_setting, run.trace_id, run.pool_id, run.owner,
    machine.mglru, machine.kernel_release, machine.virtualization, mark.accelerator, mark.guest_memory_bytes,
    -- A condition says these; they are here so that rows can be held to them.
    run.policy, run.scope, run.fit, run.admission, run.seed, run.arena_fraction, run.miss_path, run.fadvise,
    run.destination, run.threads, run.observe, run.verify, run.group_stat, run.step_begin, run.step_end,
    run.access_order, run.warm_pass, run.headroom_bytes,
    count(*) AS runs,
    count(*) FILTER (WHERE counts) AS valid_runs,
    count(DISTINCT mark.boot_id) FILTER (WHERE counts) AS boots,
    quantile_disc(mark.boot_limit_bytes, 0.5) FILTER (WHERE counts) AS boot_limit_bytes,
    quantile_disc(run.resident_median_bytes, 0.5) FILTER (WHERE counts) AS resident_bytes,
    min(run.resident_median_bytes) FILTER (WHERE counts) AS resident_low_bytes,
    max(run.resident_median_bytes) FILTER (WHERE counts) AS resident_high_bytes,
    any_value(run.demand_bytes) AS demand_bytes,
    quantile_disc(run.device_bytes, 0.5) FILTER (WHERE counts) AS device_bytes,
    min(run.device_bytes) FILTER (WHERE counts) AS device_low_bytes,
    max(run.device_bytes) FILTER (WHERE counts) AS device_high_bytes,
    -- What the run read ÷ what an LRU of its own measured residency misses: comparable between residencies.
    quantile_disc(run.amplification_resident, 0.5) FILTER (WHERE counts) AS amplification_resident,
    min(run.amplification_resident) FILTER (WHERE counts) AS amplification_low,
    max(run.amplification_resident) FILTER (WHERE counts) AS amplification_high,
    quantile_disc(
        CASE WHEN reclaim.group_limit_bytes IS NOT NULL THEN reclaim.group_locked_share
            ELSE reclaim.machine_locked_share END,
        0.5
    ) FILTER (WHERE counts) AS locked_share
FROM (
    SELECT marked.*, made.bytes_valid AND made.status = 'complete' AS counts
    FROM lab_run AS marked JOIN replay_run AS made USING (run_id)
    -- Runs to find mem= by are no repetitions.
    WHERE marked.repetition IS NOT NULL
) AS mark
JOIN replay_run AS run USING (run_id)
JOIN machine USING (machine_id)
LEFT JOIN replay_reclaim AS reclaim ON reclaim.run_id = run.run_id AND reclaim.step_id IS NULL
GROUP BY
    -- One row per condition even where a guest's memory, and with it the machine's id, differs from boot to boot.
    mark.lab_id, mark.condition, mark.place, run.mechanism, mark.mglru_setting, run.trace_id, run.pool_id, run.owner,
    machine.mglru, machine.kernel_release, machine.virtualization, mark.accelerator, mark.guest_memory_bytes,
    run.policy, run.scope, run.fit, run.admission, run.seed, run.arena_fraction, run.miss_path, run.fadvise,
    run.destination, run.threads, run.observe, run.verify, run.group_stat, run.step_begin, run.step_end,
    run.access_order, run.warm_pass, run.headroom_bytes
ORDER BY ALL;
