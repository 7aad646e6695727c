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
