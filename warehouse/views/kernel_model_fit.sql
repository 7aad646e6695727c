-- How many accesses of the page cache do LRU, the two lists and MGLRU, each simulated, get wrong, and which is nearest?
-- One row per native condition, way of simulating and model, at the simulated capacity nearest to the measured
-- residency. A model stands beside runs that it simulated alike: a cache over all layers, the same steps and warm
-- pass, the same number of accesses. Where no capacity is within 2 % of the residency, by which one condition's own
-- residency moves, or nothing was simulated, there is one row without a model.
CREATE VIEW kernel_model_fit AS
WITH native AS (
    SELECT * FROM native_condition
    -- Of the accesses only those are counted whose residency was asked for; a share of them is no count of all.
    WHERE owner = 'page_cache' AND delivery IS NULL AND observed_accesses = accesses * repetitions
        AND resident_bytes IS NOT NULL
),
model AS (
    SELECT * FROM simulated
    WHERE policy IN ('lru', 'two_list', 'mglru') AND scope = 'global' AND dedup = 'union' AND warm_steps = 0
        AND admission IS NULL AND quota_fit IS NULL AND capacity_bytes IS NOT NULL
),
capacity AS (
    -- The nearest capacity of each way of simulating, the smaller of two.
    SELECT
        native.condition_hash, native.machine_id, native.experiment_id, native.trace_id, native.step_begin,
        native.step_end, native.warm_pass, native.access_order, native.accesses, native.resident_bytes,
        size.semantics, size.order_seed, size.phase, size.warm_fraction,
        min({'distance': abs(size.capacity_bytes - native.resident_bytes), 'bytes': size.capacity_bytes}).bytes
            AS capacity_bytes
    FROM native
    JOIN (
        SELECT DISTINCT
            trace_id, step_begin, step_end, warm_pass, access_order, accesses, semantics, order_seed, phase,
            warm_fraction, capacity_bytes
        FROM model
    ) AS size USING (trace_id, step_begin, step_end, warm_pass, access_order, accesses)
    WHERE abs(size.capacity_bytes - native.resident_bytes) <= 0.02 * native.resident_bytes
    GROUP BY ALL
),
matched AS (
    SELECT
        native.* EXCLUDE (
            delivery, plan_hash, piece_bytes, hint_slots, owner, policy, scope, fit, admission, seed, arena_fraction,
            miss_path
        ),
        capacity.semantics, capacity.order_seed, capacity.phase, capacity.warm_fraction,
        model.policy, model.folios_per_expert, model.capacity_bytes AS simulated_capacity_bytes,
        model.hits AS simulated_hits, model.misses AS simulated_misses,
        -- Sums over the repetitions, as the counts of the native runs are.
        native_partial_hits + native_misses AS native_not_whole,
        abs(model.misses * repetitions - native_not_whole) AS distance
    FROM native
    LEFT JOIN capacity
        ON native.condition_hash = capacity.condition_hash
        AND row(native.machine_id, native.experiment_id, native.trace_id, native.step_begin, native.step_end,
                native.warm_pass, native.access_order, native.accesses, native.resident_bytes)
            IS NOT DISTINCT FROM row(capacity.machine_id, capacity.experiment_id, capacity.trace_id,
                capacity.step_begin, capacity.step_end, capacity.warm_pass, capacity.access_order, capacity.accesses,
                capacity.resident_bytes)
    LEFT JOIN model
        ON row(capacity.trace_id, capacity.step_begin, capacity.step_end, capacity.warm_pass, capacity.access_order,
               capacity.accesses, capacity.semantics, capacity.order_seed, capacity.phase, capacity.warm_fraction,
               capacity.capacity_bytes)
            IS NOT DISTINCT FROM row(model.trace_id, model.step_begin, model.step_end, model.warm_pass,
                model.access_order, model.accesses, model.semantics, model.order_seed, model.phase,
                model.warm_fraction, model.capacity_bytes)
        AND capacity.capacity_bytes IS NOT NULL
)
SELECT
    trace_id, pool_id, machine_id, experiment_id, mechanism, limited_by, fadvise, destination, threads, observe,
    residency_counter, files_stay_open, verify, group_stat, step_begin, step_end, access_order, warm_pass,
    headroom_bytes, outer_group_bytes, condition_hash, capacity_bytes, repetitions, is_repeated_enough, resident_bytes,
    semantics, order_seed, phase, warm_fraction, policy, folios_per_expert, simulated_capacity_bytes,
    CASE WHEN policy IS NOT NULL THEN 'capacity within 2 % of the measured residency' END AS matched_by,
    simulated_capacity_bytes / nullif(resident_bytes, 0) AS capacity_over_resident,
    accesses, observed_accesses, native_hits, native_partial_hits, native_misses,
    simulated_hits, simulated_misses,
    native_hits / nullif(observed_accesses, 0) AS native_hit_rate,
    simulated_hits / nullif(accesses, 0) AS simulated_hit_rate,
    -- An access of which a page was missing had to be read, so it counts as no hit of the kernel.
    simulated_misses * repetitions / nullif(native_not_whole, 0) - 1 AS miss_error,
    -- The least error at one capacity, all ways of simulating apart; several where they are equally far.
    CASE WHEN policy IS NOT NULL THEN distance = min(distance) OVER (
        PARTITION BY condition_hash, machine_id, experiment_id, trace_id, pool_id, resident_bytes, semantics,
            order_seed, phase, warm_fraction, mechanism, limited_by, fadvise, destination, threads, observe,
            residency_counter, files_stay_open, verify, group_stat, step_begin, step_end, access_order, warm_pass,
            headroom_bytes, outer_group_bytes
    ) END AS fits_best
FROM matched
ORDER BY ALL;

COMMENT ON COLUMN kernel_model_fit.limited_by
    IS 'what limited memory: the version of the cgroup, what stood for the machine, or boot and offline';
COMMENT ON COLUMN kernel_model_fit.is_repeated_enough
    IS 'whether there are at least five repetitions (of both, where two are compared); null without a partner';
COMMENT ON COLUMN kernel_model_fit.repetitions
    IS 'valid and complete runs of the condition, over which native counts are summed';
COMMENT ON COLUMN kernel_model_fit.order_seed IS 'seed of a random order of accesses; null for other orders';
COMMENT ON COLUMN kernel_model_fit.simulated_capacity_bytes
    IS 'capacity that was simulated, the nearest to the measured residency [byte]';
COMMENT ON COLUMN kernel_model_fit.matched_by
    IS 'how it was matched; null where no capacity is near, or nothing was simulated alike';
COMMENT ON COLUMN kernel_model_fit.capacity_over_resident IS 'simulated_capacity_bytes ÷ resident_bytes';
COMMENT ON COLUMN kernel_model_fit.simulated_hit_rate IS 'simulated_hits ÷ accesses';
COMMENT ON COLUMN kernel_model_fit.miss_error
    IS 'simulated_misses × repetitions ÷ (native_partial_hits + native_misses) − 1';
COMMENT ON COLUMN kernel_model_fit.fits_best
    IS 'whether no model of this row''s contract has a smaller error; null without a model';
