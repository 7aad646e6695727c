-- How many tokens a second does each owner decode at each capacity, and how much of a token is waiting for experts?
CREATE VIEW decode_summary AS
WITH counted AS (
    -- One token repeating is no text's routing; other bytes than the file's are no decode of this model.
    SELECT *, bytes_valid AND NOT degenerate AS is_valid, bytes_valid AND NOT degenerate AND time_valid AS is_timed
    FROM decode_run
)
SELECT
    model, model_folder, compute_dtype, machine_id, prompt_name, prompt_sha256, decoded_tokens, owner, policy,
    mechanism, capacity_bytes, wall_bytes, warm_pass, condition_hash,
    count(*) AS runs,
    count(*) FILTER (WHERE is_valid) AS valid_runs,
    count(*) FILTER (WHERE is_timed) AS timed_runs,
    count(DISTINCT token_sha256) FILTER (WHERE is_valid) AS distinct_outputs,
    any_value(decode_passes) AS decode_passes,
    median(decode_ns) FILTER (WHERE is_timed) AS decode_median_ns,
    median(decode_wait_ns) FILTER (WHERE is_timed) AS decode_wait_median_ns,
    median(first_token_ns) FILTER (WHERE is_timed) AS first_token_median_ns,
    any_value(decode_passes) * 1e9 / median(decode_ns) FILTER (WHERE is_timed) AS tokens_per_s,
    min(decode_passes * 1e9 / decode_ns) FILTER (WHERE is_timed) AS tokens_per_s_low,
    max(decode_passes * 1e9 / decode_ns) FILTER (WHERE is_timed) AS tokens_per_s_high,
    median(device_bytes) FILTER (WHERE is_valid) AS device_median_bytes,
    any_value(demand_bytes) AS demand_bytes
FROM counted
GROUP BY ALL
ORDER BY model, model_folder, compute_dtype, machine_id, prompt_name, prompt_sha256, decoded_tokens, owner, policy,
    mechanism, capacity_bytes, wall_bytes, warm_pass, condition_hash;
