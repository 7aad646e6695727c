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
        -- A random order of accesses is another contract; the seed of random evictions is not.
        CASE WHEN access_order = 'random' THEN seed END AS order_seed,
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
