-- Within equal walls, what does each owner of the cache read and take against the page cache?
-- A pair shares all that was asked for but the owner and what only that owner takes; fadvise is shared, so a page
-- cache with readahead is no baseline of reads without. Runs with a lookahead plan are the view lookahead_effect's.
-- An effect inside what either does against itself is none; with fewer than five runs of either it is not known.
CREATE VIEW owner_comparison AS
WITH walled AS (
    SELECT
        *,
        row(
            experiment_id, trace_id, pool_id, machine_id, mechanism, limited_by, fadvise, destination, threads, observe,
            residency_counter, files_stay_open, verify, group_stat, step_begin, step_end, access_order, warm_pass,
            headroom_bytes, outer_group_bytes, wall_bytes
        ) AS setting
    FROM native_condition
    WHERE wall_bytes IS NOT NULL AND delivery IS NULL
),
paired AS (
    SELECT
        here.*,
        base.capacity_bytes AS page_cache_capacity_bytes,
        base.resident_bytes AS page_cache_resident_bytes,
        base.condition_hash AS page_cache_condition_hash,
        base.repetitions AS page_cache_repetitions,
        base.counted_runs AS page_cache_counted_runs,
        base.device_bytes AS page_cache_device_bytes,
        base.device_high_bytes - base.device_low_bytes AS page_cache_spread_bytes,
        base.timed_runs AS page_cache_timed_runs,
        base.wall_ns AS page_cache_wall_ns,
        base.wall_high_ns - base.wall_low_ns AS page_cache_spread_ns,
        here.device_high_bytes - here.device_low_bytes AS spread_bytes,
        here.wall_high_ns - here.wall_low_ns AS spread_ns,
        base.device_bytes - here.device_bytes AS saved_device_bytes,
        base.wall_ns - here.wall_ns AS saved_ns
    FROM walled AS here
    LEFT JOIN (FROM walled WHERE owner = 'page_cache') AS base
        ON here.setting IS NOT DISTINCT FROM base.setting AND here.owner <> 'page_cache'
)
SELECT
    trace_id, pool_id, machine_id, experiment_id, mechanism, limited_by, step_begin, step_end, access_order, warm_pass,
    threads, fadvise, destination, observe, residency_counter, files_stay_open, verify, group_stat, headroom_bytes,
    outer_group_bytes, wall_bytes, owner, policy, scope, fit, admission, seed, arena_fraction, miss_path,
    condition_hash, page_cache_condition_hash,
    capacity_bytes, page_cache_capacity_bytes, resident_bytes, page_cache_resident_bytes,
    repetitions, page_cache_repetitions,
    least(repetitions, page_cache_repetitions) >= 5 AS is_repeated_enough,
    demand_bytes, device_bytes, device_low_bytes, device_high_bytes,
    -- Below 0 where more was read than was asked for.
    1 - device_bytes / nullif(demand_bytes, 0) AS served_without_device,
    page_cache_device_bytes,
    1 - page_cache_device_bytes / nullif(demand_bytes, 0) AS page_cache_served_without_device,
    device_bytes / nullif(page_cache_device_bytes, 0) AS device_over_page_cache,
    saved_device_bytes, spread_bytes, page_cache_spread_bytes,
    CASE
        WHEN counted_runs < 5 OR page_cache_counted_runs < 5 OR saved_device_bytes IS NULL THEN NULL
        WHEN abs(saved_device_bytes) <= greatest(spread_bytes, page_cache_spread_bytes) THEN 'none'
        WHEN saved_device_bytes > 0 THEN 'less'
        ELSE 'more'
    END AS effect_bytes,
    timed_runs, page_cache_timed_runs, wall_ns, wall_low_ns, wall_high_ns, page_cache_wall_ns,
    wall_ns / nullif(page_cache_wall_ns, 0) AS wall_over_page_cache,
    saved_ns, spread_ns, page_cache_spread_ns,
    CASE
        WHEN timed_runs < 5 OR page_cache_timed_runs < 5 OR saved_ns IS NULL THEN NULL
        WHEN abs(saved_ns) <= greatest(spread_ns, page_cache_spread_ns) THEN 'none'
        WHEN saved_ns > 0 THEN 'less'
        ELSE 'more'
    END AS effect_time
FROM paired
ORDER BY ALL;

COMMENT ON COLUMN owner_comparison.limited_by
    IS 'what limited memory: the version of the cgroup, what stood for the machine, or boot and offline';
COMMENT ON COLUMN owner_comparison.is_repeated_enough
    IS 'whether there are at least five repetitions (of both, where two are compared); null without a partner';
COMMENT ON COLUMN owner_comparison.repetitions IS 'valid and complete runs of the owner';
COMMENT ON COLUMN owner_comparison.page_cache_repetitions
    IS 'the same of the page cache; null where it was not run alike';
COMMENT ON COLUMN owner_comparison.page_cache_condition_hash IS 'names the condition of the page cache';
COMMENT ON COLUMN owner_comparison.page_cache_capacity_bytes IS 'capacity_bytes of the page cache [byte]';
COMMENT ON COLUMN owner_comparison.page_cache_resident_bytes IS 'its median measured residency [byte]';
COMMENT ON COLUMN owner_comparison.device_low_bytes IS 'least device bytes of a run [byte]';
COMMENT ON COLUMN owner_comparison.device_high_bytes IS 'most device bytes of a run [byte]';
COMMENT ON COLUMN owner_comparison.served_without_device
    IS '1 − device_bytes ÷ demand_bytes; below 0 where more was read than asked for';
COMMENT ON COLUMN owner_comparison.page_cache_device_bytes IS 'lower median of the page cache''s device bytes [byte]';
COMMENT ON COLUMN owner_comparison.page_cache_served_without_device IS '1 − page_cache_device_bytes ÷ demand_bytes';
COMMENT ON COLUMN owner_comparison.device_over_page_cache IS 'device_bytes ÷ page_cache_device_bytes';
COMMENT ON COLUMN owner_comparison.saved_device_bytes IS 'page_cache_device_bytes − device_bytes [byte]';
COMMENT ON COLUMN owner_comparison.spread_bytes IS 'range of the owner''s device bytes [byte]';
COMMENT ON COLUMN owner_comparison.page_cache_spread_bytes IS 'range of the page cache''s [byte]';
COMMENT ON COLUMN owner_comparison.effect_bytes
    IS 'less or more device bytes than the page cache; none inside either range; null below five runs of either';
COMMENT ON COLUMN owner_comparison.timed_runs IS 'runs whose times are valid';
COMMENT ON COLUMN owner_comparison.page_cache_timed_runs IS 'the same of the page cache';
COMMENT ON COLUMN owner_comparison.wall_low_ns IS 'shortest wall_ns of a run [ns]';
COMMENT ON COLUMN owner_comparison.wall_high_ns IS 'longest wall_ns of a run [ns]';
COMMENT ON COLUMN owner_comparison.page_cache_wall_ns IS 'lower median of the page cache''s wall_ns [ns]';
COMMENT ON COLUMN owner_comparison.wall_over_page_cache IS 'wall_ns ÷ page_cache_wall_ns';
COMMENT ON COLUMN owner_comparison.saved_ns IS 'page_cache_wall_ns − wall_ns [ns]';
COMMENT ON COLUMN owner_comparison.spread_ns IS 'range of the owner''s wall_ns [ns]';
COMMENT ON COLUMN owner_comparison.page_cache_spread_ns IS 'range of the page cache''s [ns]';
COMMENT ON COLUMN owner_comparison.effect_time IS 'as effect_bytes, of wall_ns over runs whose times are valid';
