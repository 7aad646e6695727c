-- What does each condition read against every other curve of the same replay, at equal measured residency?
CREATE VIEW reclaim_pair AS
WITH shared AS (
    SELECT
        *,
        -- All but what limits memory and how it is reclaimed. A balloon's group stands for the machine, so its limit
        -- belongs to the mechanism.
        row(
            trace_id, pool_id, machine_kind, owner, policy, scope, fit, admission, seed, arena_fraction, miss_path,
            fadvise, destination, threads, observe, residency_counter, files_stay_open, verify, warm_pass, access_order,
            step_begin, step_end, headroom_bytes, delivery, plan_hash, piece_bytes, hint_slots
        ) AS setting
    FROM reclaim_condition
),
paired AS (
    SELECT
        this.* EXCLUDE (setting),
        other.mechanism AS other_mechanism, other.limited_by AS other_limited_by, other.is_mglru AS other_is_mglru,
        other.outer_group_bytes AS other_outer_group_bytes,
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
    FROM shared AS this
    JOIN shared AS other
        ON this.setting IS NOT DISTINCT FROM other.setting
        AND (this.limited_by, this.is_mglru) <> (other.limited_by, other.is_mglru)
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
