-- Do two mechanisms that limit memory read as much, at equal measured residency and with the same reclaim?
CREATE VIEW mechanism_agreement AS
SELECT
    trace_id, pool_id, machine_kind, owner, policy, scope, fit, admission, seed, arena_fraction, miss_path,
    fadvise, destination, threads, observe, residency_counter, files_stay_open, verify, warm_pass, access_order,
    step_begin, step_end, headroom_bytes, delivery, plan_hash, piece_bytes, hint_slots,
    condition_hash, machine_id, is_mglru, mglru, limited_by, outer_group_bytes, group_stat, kernel_release,
    virtualization, capacity_bytes, valid_runs,
    resident_bytes, resident_low_bytes, resident_high_bytes,
    device_bytes, device_low_bytes, device_high_bytes, relative_spread, demand_bytes,
    scan_per_steal, scan_pages, steal_pages, scan_counter, scans_above_2, locked_share,
    other_limited_by, other_outer_group_bytes, other_group_stat, other_kernel_release, other_virtualization,
    matched_by, matched_runs,
    below_resident_bytes, above_resident_bytes, other_device_bytes, device_over_other, amplification_over_nearest,
    abs(device_over_other - 1) <= 0.1 AS agrees_within_tenth,
    -- Below five repetitions of either a difference says little: runs of one condition differ by that much.
    CASE WHEN matched_by IS NOT NULL THEN least(valid_runs, matched_runs) >= 5 END AS is_repeated_enough
FROM reclaim_pair
WHERE is_mglru = other_is_mglru AND limited_by <> other_limited_by
ORDER BY ALL;
