-- Views to read, paste and change. The line above each says which question it answers; it becomes the view's COMMENT.
-- `routing` (every row of every trace) is made in build.py, since it needs the path of data/traces.

-- Which policy finds the most accesses resident, side by side under one contract, and how far is each from both Beladys?
CREATE VIEW policy_comparison AS
WITH contract AS (
    SELECT
        trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps,
        warm_pass, admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
        max(hits) FILTER (WHERE policy = 'lru') AS lru_hits,
        max(hits) FILTER (WHERE policy = 'fifo') AS fifo_hits,
        max(hits) FILTER (WHERE policy = 'clock') AS clock_hits,
        max(hits) FILTER (WHERE policy = 'sieve') AS sieve_hits,
        max(hits) FILTER (WHERE policy = 's3fifo') AS s3fifo_hits,
        max(hits) FILTER (WHERE policy = 'arc') AS arc_hits,
        max(hits) FILTER (WHERE policy = 'lfu_gated') AS lfu_gated_hits,
        max(hits) FILTER (WHERE policy = 'lfu_always') AS lfu_always_hits,
        max(hits) FILTER (WHERE policy = 'lfu_in_cache') AS lfu_in_cache_hits,
        max(hits) FILTER (WHERE policy = 'lfru') AS lfru_hits,
        max(hits) FILTER (WHERE policy = 'least_stale') AS least_stale_hits,
        max(hits) FILTER (WHERE policy = 'pinned_lru') AS pinned_lru_hits,
        max(hits) FILTER (WHERE policy = 'two_list') AS two_list_hits,
        max(hits) FILTER (WHERE policy = 'mglru') AS mglru_hits,
        max(hits) FILTER (WHERE policy = 'random') AS random_hits,
        max(hits) FILTER (WHERE policy = 'belady_forced') AS belady_forced_hits,
        max(hits) FILTER (WHERE policy = 'belady_bypass') AS belady_bypass_hits,
        -- One contract can hold several static tables, one per fit: each gets a row of its own below.
        list({'fit': fit, 'hits': hits} ORDER BY fit) FILTER (WHERE policy = 'static') AS static_tables
    FROM hit_rate
    GROUP BY ALL
),
one_static AS (
    SELECT *, unnest(coalesce(static_tables, [NULL])) AS static_table FROM contract
)
SELECT
    trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass,
    admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
    lru_hits / nullif(accesses, 0) AS lru_hit_rate,
    fifo_hits / nullif(accesses, 0) AS fifo_hit_rate,
    clock_hits / nullif(accesses, 0) AS clock_hit_rate,
    sieve_hits / nullif(accesses, 0) AS sieve_hit_rate,
    s3fifo_hits / nullif(accesses, 0) AS s3fifo_hit_rate,
    arc_hits / nullif(accesses, 0) AS arc_hit_rate,
    lfu_gated_hits / nullif(accesses, 0) AS lfu_gated_hit_rate,
    lfu_always_hits / nullif(accesses, 0) AS lfu_always_hit_rate,
    lfu_in_cache_hits / nullif(accesses, 0) AS lfu_in_cache_hit_rate,
    lfru_hits / nullif(accesses, 0) AS lfru_hit_rate,
    least_stale_hits / nullif(accesses, 0) AS least_stale_hit_rate,
    pinned_lru_hits / nullif(accesses, 0) AS pinned_lru_hit_rate,
    two_list_hits / nullif(accesses, 0) AS two_list_hit_rate,
    mglru_hits / nullif(accesses, 0) AS mglru_hit_rate,
    random_hits / nullif(accesses, 0) AS random_hit_rate,
    static_table.fit AS static_fit,
    static_table.hits / nullif(accesses, 0) AS static_hit_rate,
    belady_forced_hits / nullif(accesses, 0) AS belady_forced_hit_rate,
    belady_bypass_hits / nullif(accesses, 0) AS belady_bypass_hit_rate,
    lru_hits, fifo_hits, clock_hits, sieve_hits, s3fifo_hits, arc_hits, lfu_gated_hits, lfu_always_hits,
    lfu_in_cache_hits, lfru_hits, least_stale_hits, pinned_lru_hits, two_list_hits, mglru_hits, random_hits,
    static_table.hits AS static_hits, belady_forced_hits, belady_bypass_hits
FROM one_static
ORDER BY ALL;

-- Which policy comes first under a contract, by how much and how surely, and what is left of it where only popularity is?
CREATE VIEW policy_ranking AS
SELECT
    trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass,
    admission, quota_fit, capacity_experts_total, capacity_bytes,
    policy, fit, pinned_fraction, folios_per_expert, seed,
    hit_rate, hits, accesses, hit_rate_low, hit_rate_high,
    reference_policy, over_reference, over_reference_low, over_reference_high,
    shuffled_hit_rate, shuffled_hits, shuffled_accesses,
    lag1_chance_ratio, lag1_chance_numerator, lag1_chance_denominator,
    lag1_uniform_ratio, lag1_uniform_denominator
FROM hit_rate
ORDER BY trace_id, scope, semantics, capacity_experts_total, capacity_bytes, hits DESC, policy;

-- How far is the best policy that does not know the future from Belady, and is it what enters or what leaves that costs?
CREATE VIEW belady_gap AS
WITH told AS (
    SELECT
        *,
        -- Belady knows the future, and so does a table fitted on steps that are scored afterwards.
        policy LIKE 'belady%' OR coalesce(fit = 'same', false) OR coalesce(
            floor(try_cast(nullif(replace(fit, 'first:', ''), fit) AS DECIMAL(18, 9)) * (step_end - step_begin))
            > warm_steps, false
        ) AS knows_the_future
    FROM hit_rate
),
contract AS (
    SELECT
        trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps,
        warm_pass, admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
        min({'misses': misses, 'policy': policy}) FILTER (WHERE NOT knows_the_future) AS best,
        max(misses) FILTER (WHERE policy = 'belady_forced') AS forced_misses,
        max(misses) FILTER (WHERE policy = 'belady_bypass') AS bypass_misses
    FROM told
    GROUP BY ALL
),
gap AS (
    SELECT * EXCLUDE (best), best.policy AS best_policy, best.misses AS best_misses FROM contract
)
SELECT
    *,
    best_misses - bypass_misses AS gap_misses,
    (best_misses - bypass_misses) / nullif(best_misses, 0) AS gap_ratio,
    -- What Belady loses by being forced to admit is the share of admission; the rest is choosing victims.
    forced_misses - bypass_misses AS admission_misses,
    (forced_misses - bypass_misses) / nullif(best_misses - bypass_misses, 0) AS admission_share,
    best_misses - forced_misses AS victim_misses,
    (best_misses - forced_misses) / nullif(best_misses - bypass_misses, 0) AS victim_share
FROM gap
WHERE bypass_misses IS NOT NULL AND best_misses IS NOT NULL
ORDER BY ALL;

-- How many bytes does each iteration have to read if an LRU over all layers holds this much (the study's nominal misses)?
CREATE VIEW nominal_misses AS
SELECT
    trace_id, semantics, access_order, phase, step_begin, step_end, warm_fraction, warm_pass,
    capacity_experts_total, capacity_bytes, scored_steps, scored_accepted_tokens, demand_bytes,
    miss_bytes, miss_bytes_per_step, miss_bytes_per_accepted_token
FROM hit_rate
WHERE policy = 'lru' AND scope = 'global' AND admission IS NULL AND miss_bytes IS NOT NULL
ORDER BY ALL;

-- How much of what the next layers need does a predictor name in time, over all layers, and how much would chance name?
CREATE VIEW lookahead_summary AS
SELECT
    trace_id, phase, step_begin, step_end, warm_steps, predictor, fit, lookahead_layers, lookahead_steps, width,
    recall_all, predicted_accesses, accesses,
    recall_covered, covered_accesses,
    precision, predicted_experts,
    hint_coverage, covered_events, events,
    chance_recall_all, chance_predicted_accesses
FROM lookahead_recall
WHERE layer_id IS NULL
ORDER BY trace_id, phase, predictor, lookahead_layers, lookahead_steps, width, fit;

-- Where on the way from a prediction to time is a plan's benefit lost, simulated, and what is left of it?
CREATE VIEW lookahead_waterfall AS
SELECT
    trace_id, phase, predictor, fit, lookahead_layers, lookahead_steps, width, capacity_experts_total,
    bandwidth_bytes_per_s, latency_ns, queue_depth, compute_ns,
    selections, accesses, predicted_accesses, misses, predicted_misses,
    simulated_removed_misses - simulated_removed_late AS simulated_removed_in_time, simulated_removed_late,
    simulated_displaced, simulated_wasted, miss_bytes, simulated_removed_bytes, simulated_displaced_bytes,
    -- What was read ahead and used: all that was read, less what was read on demand and what was wasted.
    simulated_device_bytes - (miss_bytes - simulated_removed_bytes + simulated_displaced_bytes)
        - simulated_wasted_bytes AS simulated_used_bytes,
    simulated_wasted_bytes, simulated_device_bytes,
    simulated_device_bytes - miss_bytes AS simulated_more_device_bytes,
    simulated_time_without_ns, simulated_time_with_ns,
    simulated_time_without_ns - simulated_time_with_ns AS simulated_saved_ns, simulated_time_per_time_without,
    simulated_overlap_ns
FROM lookahead_benefit
ORDER BY
    trace_id, phase, capacity_experts_total, bandwidth_bytes_per_s, compute_ns, predictor, lookahead_layers,
    lookahead_steps, width;

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
         'owner': owner, 'fadvise': fadvise, 'destination': destination, 'threads': threads, 'observe': observe,
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
    setting.fadvise AS fadvise, setting.warm_pass AS warm_pass, setting.step_begin AS step_begin,
    setting.step_end AS step_end, capacity_bytes,
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

-- Which facts about a trace does neither its dump nor the user say?
CREATE VIEW trace_unknowns AS
SELECT trace_id, trim(unnest(string_split(unknowns, ','))) AS unknown_fact, model, source_file
FROM trace
WHERE unknowns <> ''
ORDER BY trace_id, unknown_fact;

-- What did each valid native run read from its device, beside what a simulated LRU of the same memory misses?
CREATE VIEW replay_summary AS
SELECT
    trace_id, pool_id, machine_id, owner, mechanism, fadvise, destination, step_begin, step_end, warm_pass,
    condition_hash, repeat, run_id, started_at,
    capacity_bytes, enforced_bytes, resident_median_bytes,
    demand_bytes, device_bytes, device_bytes_counter,
    nominal_miss_bytes, amplification_nominal,
    resident_miss_bytes, amplification_resident,
    native_hit_rate, native_hits, observed_accesses,
    -- Times that are not to be believed are left out; the table replay_run has them.
    time_valid,
    CASE WHEN time_valid THEN stall_median_ns END AS stall_median_ns,
    CASE WHEN time_valid THEN stall_p99_ns END AS stall_p99_ns
FROM replay_run
WHERE bytes_valid
ORDER BY trace_id, pool_id, machine_id, owner, mechanism, capacity_bytes, condition_hash, started_at, run_id;

-- Which native runs are kept but not believed, and which proofs failed?
CREATE VIEW quarantined_runs AS
SELECT
    run_id, started_at, trace_id, owner, mechanism, capacity_bytes, status, failure, bytes_reasons,
    count(*) FILTER (WHERE proof.held = false) AS failed_proofs,
    count(proof.name) AS proofs
FROM replay_run AS run
LEFT JOIN replay_proof AS proof USING (run_id)
WHERE NOT run.bytes_valid
GROUP BY ALL
ORDER BY started_at, run_id;

-- How many accesses of each layer did a valid native run find resident, and a simulated LRU of the same residency?
CREATE VIEW native_vs_simulated AS
SELECT
    run.run_id, run.trace_id, run.owner, run.mechanism, run.capacity_bytes, run.resident_median_bytes,
    layer.layer_id, layer.accesses,
    layer.observed_accesses, layer.native_hits, layer.native_partial_hits, layer.native_misses, layer.native_hit_rate,
    layer.simulated_hits, layer.simulated_misses,
    layer.simulated_hits / nullif(layer.accesses, 0) AS simulated_hit_rate
FROM replay_layer AS layer
JOIN replay_run AS run USING (run_id)
WHERE run.bytes_valid
ORDER BY run.trace_id, run.owner, run.mechanism, run.capacity_bytes, run.started_at, run.run_id, layer.layer_id;

-- What did each native condition, alone on its machine, read, hold and scan: medians and ranges over its repetitions?
CREATE VIEW reclaim_condition AS
WITH measured AS (
    SELECT
        run.*,
        machine.mglru, machine.kernel_release, machine.virtualization,
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
    LEFT JOIN replay_reclaim AS reclaim ON reclaim.run_id = run.run_id AND reclaim.step_id IS NULL
    WHERE run.bytes_valid AND run.together_id IS NULL AND run.device_bytes IS NOT NULL
        AND run.resident_median_bytes IS NOT NULL
        -- Runs that a lab made to find mem= by are no repetitions.
        AND NOT EXISTS (FROM lab_run AS mark WHERE mark.run_id = run.run_id AND mark.repetition IS NULL)
)
SELECT
    -- What two conditions must share to be compared: the same reads, asked for in the same way.
    trace_id, pool_id, owner, policy, scope, fit, admission, arena_fraction, miss_path, fadvise, threads, warm_pass,
    access_order, step_begin, step_end,
    -- What they may differ in.
    mechanism, limited_by, group_stat, is_mglru, mglru, kernel_release, virtualization, machine_id, condition_hash,
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

-- What does each condition read against every other curve of the same replay, at equal measured residency?
CREATE VIEW reclaim_pair AS
WITH paired AS (
    SELECT
        this.*,
        other.mechanism AS other_mechanism, other.limited_by AS other_limited_by, other.is_mglru AS other_is_mglru,
        -- A curve is of one way of reading the group's statistics; without a group nobody reads any.
        coalesce(other.group_stat, 'pass') AS other_group_stat,
        other.kernel_release AS other_kernel_release, other.virtualization AS other_virtualization,
        count(*) AS other_conditions,
        sum(other.valid_runs)::BIGINT AS other_valid_runs,
        max({'resident': other.resident_bytes, 'device': other.device_bytes, 'runs': other.valid_runs})
            FILTER (WHERE other.resident_bytes <= this.resident_bytes) AS below,
        min({'resident': other.resident_bytes, 'device': other.device_bytes, 'runs': other.valid_runs})
            FILTER (WHERE other.resident_bytes >= this.resident_bytes) AS above,
        -- The condition nearest in residency, and how its own simulated counterpart compares.
        arg_min(
            {'resident': other.resident_bytes, 'device': other.device_bytes, 'runs': other.valid_runs,
             'amplification': other.amplification_resident},
            abs(other.resident_bytes - this.resident_bytes)
        ) AS nearest
    FROM reclaim_condition AS this
    JOIN reclaim_condition AS other
        ON (
            this.trace_id, this.pool_id, this.owner, this.fadvise, this.threads, this.warm_pass, this.access_order,
            this.step_begin, this.step_end
        ) = (
            other.trace_id, other.pool_id, other.owner, other.fadvise, other.threads, other.warm_pass,
            other.access_order, other.step_begin, other.step_end
        )
        AND this.policy IS NOT DISTINCT FROM other.policy
        AND this.scope IS NOT DISTINCT FROM other.scope
        AND this.fit IS NOT DISTINCT FROM other.fit
        AND this.admission IS NOT DISTINCT FROM other.admission
        AND this.arena_fraction IS NOT DISTINCT FROM other.arena_fraction
        AND this.miss_path IS NOT DISTINCT FROM other.miss_path
        AND (this.limited_by, this.is_mglru, this.kernel_release, this.virtualization)
            <> (other.limited_by, other.is_mglru, other.kernel_release, other.virtualization)
    GROUP BY ALL
),
matched AS (
    SELECT
        *,
        CASE
            WHEN below.resident = above.resident THEN 'equal'
            WHEN below IS NOT NULL AND above IS NOT NULL THEN 'interpolated'
            -- Outside of the other's curve nothing is made up: 2 % is what one condition's residency itself moves by.
            WHEN abs(nearest.resident - resident_bytes) <= 0.02 * resident_bytes THEN 'nearest'
        END AS matched_by
    FROM paired
)
SELECT
    * EXCLUDE (below, above, nearest),
    CASE matched_by
        WHEN 'equal' THEN below.device
        WHEN 'nearest' THEN nearest.device
        WHEN 'interpolated' THEN below.device + (above.device - below.device)
            * (resident_bytes - below.resident) / (above.resident - below.resident)
    END AS other_device_bytes,
    below.resident AS below_resident_bytes,
    above.resident AS above_resident_bytes,
    -- Of the two conditions interpolated between, the one repeated least.
    CASE matched_by
        WHEN 'nearest' THEN nearest.runs
        WHEN 'equal' THEN below.runs
        WHEN 'interpolated' THEN least(below.runs, above.runs)
    END AS matched_runs,
    device_bytes / nullif(other_device_bytes, 0) AS device_over_other,
    -- Each against the LRU of its own residency: unlike the ratio above, a cliff of the curve between the two leaves it.
    amplification_resident / nullif(nearest.amplification, 0) AS amplification_over_nearest
FROM matched
ORDER BY ALL;

-- Do two mechanisms that limit memory read as much, at equal measured residency and with the same reclaim?
CREATE VIEW mechanism_agreement AS
SELECT
    trace_id, pool_id, owner, policy, miss_path, fadvise, threads, warm_pass, step_begin, step_end,
    is_mglru, mglru, limited_by, group_stat, kernel_release, virtualization, capacity_bytes, valid_runs,
    resident_bytes, resident_low_bytes, resident_high_bytes,
    device_bytes, device_low_bytes, device_high_bytes, relative_spread, demand_bytes,
    scan_per_steal, scan_pages, steal_pages, scan_counter, scans_above_2, locked_share,
    other_limited_by, other_group_stat, other_kernel_release, other_virtualization, matched_by, matched_runs,
    below_resident_bytes, above_resident_bytes, other_device_bytes, device_over_other, amplification_over_nearest,
    abs(device_over_other - 1) <= 0.1 AS agrees_within_tenth,
    -- Below five repetitions of either a difference says little: runs of one condition differ by that much.
    CASE WHEN matched_by IS NOT NULL THEN least(valid_runs, matched_runs) >= 5 END AS is_repeated_enough
FROM reclaim_pair
WHERE is_mglru = other_is_mglru AND limited_by <> other_limited_by
ORDER BY ALL;

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

-- What did each condition of a lab read and hold: medians and ranges over its repetitions, guests and host alike?
CREATE VIEW lab_matrix AS
SELECT
    mark.lab_id, mark.condition, mark.place, run.mechanism, mark.mglru_setting, run.trace_id, run.pool_id, run.owner,
    machine.mglru, machine.kernel_release, machine.virtualization, mark.accelerator, mark.guest_memory_bytes,
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
    machine.mglru, machine.kernel_release, machine.virtualization, mark.accelerator, mark.guest_memory_bytes
ORDER BY ALL;
