-- What is a table worth that was fitted on another trace, against the same table of the own trace and against LRU?
-- A table says what a cache holds (static, and the pinned part of pinned_lru) or what may enter it (admission). One
-- row per table of another trace and table of the own one under the same contract; own_knows_the_future marks an own
-- table that has seen what is scored. Null: nothing was simulated under that contract.
CREATE VIEW off_domain AS
WITH contract AS (
    SELECT
        *,
        row(
            trace_id, scope, semantics, access_order, order_seed, dedup, capacity_experts_total, capacity_bytes,
            step_begin, step_end, phase, warm_fraction, warm_steps, warm_pass, quota_fit
        ) AS window_of,
        row(policy, pinned_fraction, folios_per_expert, fit IS NULL, admission_size) AS kind,
        fit_trace_id IS NOT NULL OR admission_trace_id IS NOT NULL AS is_away
    FROM simulated
)
SELECT
    away.trace_id, away.fit_trace_id, away.admission_trace_id, away.policy, away.pinned_fraction, away.scope,
    away.semantics, away.access_order,
    away.order_seed, away.dedup, away.capacity_experts_total, away.capacity_bytes, away.step_begin, away.step_end,
    away.phase, away.warm_fraction, away.warm_steps, away.warm_pass, away.admission, away.quota_fit,
    away.folios_per_expert, away.fit, away.accesses,
    away.hits, away.hits / nullif(away.accesses, 0) AS hit_rate,
    own.fit AS own_fit, own.admission AS own_admission, own.knows_the_future AS own_knows_the_future,
    own.hits AS own_hits, own.hits / nullif(own.accesses, 0) AS own_hit_rate,
    lru.hits AS lru_hits, lru.hits / nullif(lru.accesses, 0) AS lru_hit_rate,
    (own.hits - away.hits) / nullif(away.accesses, 0) AS lost_off_domain,
    (away.hits - lru.hits) / nullif(away.accesses, 0) AS over_lru,
    away.hits > lru.hits AS beats_lru
FROM contract AS away
LEFT JOIN (FROM contract WHERE NOT is_away AND (fit IS NOT NULL OR admission IS NOT NULL)) AS own
    ON away.window_of IS NOT DISTINCT FROM own.window_of AND away.kind IS NOT DISTINCT FROM own.kind
LEFT JOIN (FROM contract WHERE policy = 'lru' AND admission IS NULL) AS lru
    ON away.window_of IS NOT DISTINCT FROM lru.window_of
WHERE away.is_away
ORDER BY ALL;

COMMENT ON COLUMN off_domain.fit_trace_id
    IS 'the other trace that the table of contents was fitted on; null if none was';
COMMENT ON COLUMN off_domain.admission_trace_id
    IS 'the other trace that the table of what may enter was fitted on; null if none was';
COMMENT ON COLUMN off_domain.order_seed IS 'seed of a random order of accesses; null for other orders';
COMMENT ON COLUMN off_domain.own_fit IS 'what the own table of contents was fitted on';
COMMENT ON COLUMN off_domain.own_admission IS 'the own table of what may enter';
COMMENT ON COLUMN off_domain.own_knows_the_future IS 'whether the own table saw steps that are scored';
COMMENT ON COLUMN off_domain.own_hits IS 'hits with the own table; null if not simulated';
COMMENT ON COLUMN off_domain.own_hit_rate IS 'own_hits ÷ accesses';
COMMENT ON COLUMN off_domain.lru_hits IS 'hits of LRU under the same contract; null if not simulated';
COMMENT ON COLUMN off_domain.lru_hit_rate IS 'lru_hits ÷ accesses';
COMMENT ON COLUMN off_domain.lost_off_domain IS '(own_hits − hits) ÷ accesses';
COMMENT ON COLUMN off_domain.over_lru IS '(hits − lru_hits) ÷ accesses';
COMMENT ON COLUMN off_domain.beats_lru IS 'whether hits are more than lru_hits';
