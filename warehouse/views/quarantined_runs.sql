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
