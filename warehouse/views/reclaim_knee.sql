-- Does MGLRU read more than the classic lists at equal measured residency, and is that where scans outnumber steals?
CREATE VIEW reclaim_knee AS
SELECT
    here.trace_id, here.pool_id, here.owner, here.policy, here.miss_path, here.fadvise, here.threads, here.warm_pass,
    here.step_begin, here.step_end, here.limited_by, here.group_stat, here.kernel_release, here.virtualization,
    here.is_mglru, here.mglru, here.capacity_bytes, here.valid_runs, here.locked_share,
    here.resident_bytes, here.resident_low_bytes, here.resident_high_bytes,
    here.device_bytes, here.device_low_bytes, here.device_high_bytes, here.relative_spread, here.demand_bytes,
    here.amplification_resident,
    here.scan_per_steal, here.scan_pages, here.steal_pages, here.scan_counter, here.scans_above_2,
    pair.matched_by, pair.matched_runs, pair.other_device_bytes AS classic_device_bytes,
    pair.device_over_other AS device_over_classic
FROM reclaim_condition AS here
LEFT JOIN reclaim_pair AS pair
    ON here.is_mglru AND NOT pair.other_is_mglru
    AND (here.condition_hash, here.machine_id) = (pair.condition_hash, pair.machine_id)
    AND (here.limited_by, here.kernel_release, here.virtualization)
        = (pair.limited_by, pair.kernel_release, pair.virtualization)
    AND (pair.limited_by, pair.kernel_release, pair.virtualization)
        = (pair.other_limited_by, pair.other_kernel_release, pair.other_virtualization)
    AND coalesce(pair.group_stat, 'pass') = pair.other_group_stat
ORDER BY ALL;
