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
