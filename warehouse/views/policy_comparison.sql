-- Which policy finds the most accesses resident, side by side under one contract, and how far is each from both Beladys?
CREATE VIEW policy_comparison AS
WITH contract AS (
    SELECT
        trace_id, scope, semantics, access_order, dedup, step_begin, step_end, phase, warm_fraction, warm_steps,
        warm_pass, admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
        -- A random order of accesses is another contract; the seed of random evictions is not.
        CASE WHEN access_order = 'random' THEN seed END AS order_seed,
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
    order_seed, admission, quota_fit, capacity_experts_total, capacity_bytes, accesses,
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
