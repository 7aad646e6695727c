-- Does MGLRU read more than the classic lists at equal measured residency, and is that where scans outnumber steals?
CREATE VIEW reclaim_knee AS
SELECT
    here.trace_id, here.pool_id, here.machine_kind, here.owner, here.policy, here.scope, here.fit, here.admission,
    here.seed, here.arena_fraction, here.miss_path, here.fadvise, here.destination, here.threads, here.observe,
    here.residency_counter, here.files_stay_open, here.verify, here.warm_pass, here.access_order, here.step_begin,
    here.step_end, here.headroom_bytes, here.delivery, here.plan_hash, here.piece_bytes, here.hint_slots,
    here.condition_hash, here.machine_id, here.limited_by, here.outer_group_bytes, here.group_stat, here.kernel_release,
    here.virtualization, here.is_mglru, here.mglru, here.capacity_bytes, here.valid_runs, here.locked_share,
    here.resident_bytes, here.resident_low_bytes, here.resident_high_bytes,
    here.device_bytes, here.device_low_bytes, here.device_high_bytes, here.relative_spread, here.demand_bytes,
    here.amplification_resident,
    here.scan_per_steal, here.scan_pages, here.steal_pages, here.scan_counter, here.scans_above_2,
    pair.matched_by, pair.matched_runs, pair.other_device_bytes AS classic_device_bytes,
    pair.device_over_other AS device_over_classic
FROM reclaim_condition AS here
LEFT JOIN reclaim_pair AS pair
    ON here.is_mglru AND NOT pair.other_is_mglru AND pair.limited_by = pair.other_limited_by
    AND pair.mechanism = pair.other_mechanism
    AND pair.outer_group_bytes IS NOT DISTINCT FROM pair.other_outer_group_bytes
    AND coalesce(pair.group_stat, 'pass') = pair.other_group_stat
    AND row(
        here.trace_id, here.pool_id, here.machine_kind, here.owner, here.policy, here.scope, here.fit, here.admission,
        here.seed, here.arena_fraction, here.miss_path, here.fadvise, here.destination, here.threads, here.observe,
        here.residency_counter, here.files_stay_open, here.verify, here.warm_pass, here.access_order, here.step_begin,
        here.step_end, here.headroom_bytes, here.delivery, here.plan_hash, here.piece_bytes, here.hint_slots,
        here.condition_hash, here.machine_id, here.limited_by, here.outer_group_bytes, here.group_stat
    ) IS NOT DISTINCT FROM row(
        pair.trace_id, pair.pool_id, pair.machine_kind, pair.owner, pair.policy, pair.scope, pair.fit, pair.admission,
        pair.seed, pair.arena_fraction, pair.miss_path, pair.fadvise, pair.destination, pair.threads, pair.observe,
        pair.residency_counter, pair.files_stay_open, pair.verify, pair.warm_pass, pair.access_order, pair.step_begin,
        pair.step_end, pair.headroom_bytes, pair.delivery, pair.plan_hash, pair.piece_bytes, pair.hint_slots,
        pair.condition_hash, pair.machine_id, pair.limited_by, pair.outer_group_bytes, pair.group_stat
    )
ORDER BY ALL;
