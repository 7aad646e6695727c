-- What did each simulated contract find resident, whether it was part of the graph or of a sweep?
-- One row per contract and outcome of hit_rate and sweep. fit_trace_id and admission_trace_id name the other trace
-- that a table of contents, or of what may enter, was fitted on; null where it is the trace itself, or a file that
-- does not say. admission_size is what is left of such a table without its fit. knows_the_future: a table saw steps
-- that are scored.
CREATE VIEW simulated AS
WITH told AS (
    SELECT * FROM hit_rate
    UNION ALL BY NAME
    SELECT * EXCLUDE (cell_hash) FROM sweep
),
parted AS (
    -- A fit is same, first:f, or another trace's file with first:f behind it or not; admission is a fit and top:n.
    SELECT
        *,
        regexp_extract(admission, '^(.*):top:[0-9]+$', 1) AS admission_fit,
        coalesce(nullif(regexp_extract(admission, '(top:[0-9]+)$', 1), ''), admission) AS admission_size,
        [fit, nullif(admission_fit, '')] AS fits
    FROM told
),
placed AS (
    SELECT
        *,
        list_transform(fits, lambda one: CASE WHEN one <> 'same' AND NOT starts_with(one, 'first:')
            THEN regexp_extract(regexp_replace(one, ':first:[^:]*$', ''), '([^/]*?)(\.parquet)?$', 1) END) AS files,
        list_transform(fits, lambda one: CASE WHEN one IS NOT NULL
            THEN coalesce(nullif(regexp_extract(one, '(?:^|:)first:([^:]*)$', 1), ''), '1') END) AS shares
    FROM parted
),
judged AS (
    SELECT
        *,
        list_transform([1, 2], lambda number: (files[number] IS NULL OR files[number] = trace_id)
            AND floor(try_cast(shares[number] AS DECIMAL(18, 9)) * (step_end - step_begin)) > warm_steps) AS futures
    FROM placed
)
SELECT
    trace_id, policy, scope, semantics, access_order, dedup, capacity_experts_total, capacity_bytes,
    step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, fit, nullif(files[1], trace_id) AS fit_trace_id,
    seed,
    -- A random order of accesses is another contract; the seed of random evictions is not.
    CASE WHEN access_order = 'random' THEN seed END AS order_seed,
    pinned_fraction, admission, nullif(files[2], trace_id) AS admission_trace_id, admission_size,
    coalesce(futures[1], false) OR coalesce(futures[2], false) AS knows_the_future,
    quota_fit, folios_per_expert, accesses, hits, misses, demand_bytes, miss_bytes
FROM judged
GROUP BY ALL
ORDER BY ALL;
