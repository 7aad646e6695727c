-- What did each native condition, alone on its machine, read, hold and scan: medians and ranges over its repetitions?
CREATE VIEW reclaim_condition AS
WITH measured AS (
    SELECT
        run.*,
        machine.mglru, machine.kernel_release, machine.virtualization,
        plan.delivery, plan.plan_hash, plan.piece_bytes, plan.hint_slots,
        -- The machine whatever memory it was booted with; without it, and with its other settings, it is another one.
        ({
            'architecture': machine.architecture, 'cpu_model': machine.cpu_model, 'cpus': machine.cpus,
            'page_bytes': machine.page_bytes, 'kernel_release': machine.kernel_release,
            'virtualization': machine.virtualization, 'swap_bytes': machine.swap_bytes, 'thp': machine.thp,
            'swappiness': machine.swappiness, 'damon': machine.damon, 'filesystem': machine.filesystem,
            'mount_options': machine.mount_options, 'block_device_model': machine.block_device_model,
            'read_ahead_bytes': machine.read_ahead_bytes, 'io_scheduler': machine.io_scheduler,
            'rotational': machine.rotational, 'max_io_bytes': machine.max_io_bytes,
            'logical_block_bytes': machine.logical_block_bytes
        })::VARCHAR AS machine_kind,
        CASE WHEN machine.mglru NOT LIKE 'unknown%' THEN machine.mglru LIKE 'on%' END AS is_mglru,
        -- A machine has the size it has, so how it was booted is no other mechanism.
        CASE WHEN mechanism IN ('boot', 'offline') THEN mechanism ELSE coalesce(mechanism_detail, mechanism) END
            AS limited_by,
        -- A group that limits the run tells of its own reclaim under v2; under v1 only the machine's files do.
        CASE
            WHEN reclaim.group_scan_pages IS NOT NULL THEN 'group'
            WHEN reclaim.machine_file_scan_pages IS NOT NULL THEN 'all files of the machine'
            WHEN run.mechanism <> 'cgroup' AND run.outer_group_bytes IS NULL
                AND reclaim.machine_scan_pages IS NOT NULL THEN 'machine'
        END AS scan_counter,
        CASE scan_counter
            WHEN 'group' THEN reclaim.group_scan_pages
            WHEN 'machine' THEN reclaim.machine_scan_pages
            ELSE reclaim.machine_file_scan_pages
        END AS scan_pages,
        CASE scan_counter
            WHEN 'group' THEN reclaim.group_steal_pages
            WHEN 'machine' THEN reclaim.machine_steal_pages
            ELSE reclaim.machine_file_steal_pages
        END AS steal_pages,
        CASE
            WHEN reclaim.group_limit_bytes IS NOT NULL THEN reclaim.group_locked_share
            ELSE reclaim.machine_locked_share
        END AS locked_share
    FROM replay_run AS run
    JOIN machine USING (machine_id)
    LEFT JOIN replay_delivery AS plan USING (run_id)
    LEFT JOIN replay_reclaim AS reclaim ON reclaim.run_id = run.run_id AND reclaim.step_id IS NULL
    WHERE run.bytes_valid AND run.status = 'complete' AND run.together_id IS NULL AND run.device_bytes IS NOT NULL
        AND run.resident_median_bytes IS NOT NULL
        -- Runs that a lab made to find mem= by are no repetitions.
        AND NOT EXISTS (FROM lab_run AS mark WHERE mark.run_id = run.run_id AND mark.repetition IS NULL)
)
SELECT
    -- What two conditions must share to be compared: the same reads, asked for in the same way.
    trace_id, pool_id, machine_kind, owner, policy, scope, fit, admission, seed, arena_fraction, miss_path, fadvise,
    destination, threads, observe, residency_counter, files_stay_open, verify, warm_pass, access_order, step_begin,
    step_end, headroom_bytes, delivery, plan_hash, piece_bytes, hint_slots,
    -- What they may differ in.
    mechanism, limited_by, outer_group_bytes, group_stat, is_mglru, mglru, kernel_release, virtualization, machine_id,
    condition_hash,
    quantile_disc(capacity_bytes, 0.5) AS capacity_bytes,
    quantile_disc(enforced_bytes, 0.5) AS enforced_bytes,
    count(*) AS valid_runs,
    quantile_disc(resident_median_bytes, 0.5) AS resident_bytes,
    min(resident_median_bytes) AS resident_low_bytes,
    max(resident_median_bytes) AS resident_high_bytes,
    quantile_disc(device_bytes, 0.5) AS device_bytes,
    min(device_bytes) AS device_low_bytes,
    max(device_bytes) AS device_high_bytes,
    (max(device_bytes) - min(device_bytes)) / nullif(quantile_disc(device_bytes, 0.5), 0) AS relative_spread,
    any_value(demand_bytes) AS demand_bytes,
    sum(device_bytes) FILTER (WHERE resident_miss_bytes IS NOT NULL) / nullif(sum(resident_miss_bytes), 0)
        AS amplification_resident,
    quantile_disc(locked_share, 0.5) AS locked_share,
    any_value(scan_counter) AS scan_counter,
    sum(scan_pages)::BIGINT AS scan_pages,
    sum(steal_pages)::BIGINT AS steal_pages,
    sum(scan_pages) / nullif(sum(steal_pages), 0) AS scan_per_steal,
    -- The study's mark of reclaim that amplifies.
    sum(scan_pages) / nullif(sum(steal_pages), 0) > 2 AS scans_above_2
FROM measured
GROUP BY ALL
ORDER BY ALL;
