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
