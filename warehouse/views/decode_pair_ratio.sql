-- How many times as long does the other owner decode, prompt by prompt, over pairs that decoded the same tokens?
CREATE VIEW decode_pair_ratio AS
WITH counted AS (
    -- After arXiv 2608.12103, Table 3: the median of the per-pair ratios, with their range; a void pair has none.
    SELECT
        *,
        CASE
            WHEN identical AND void_reason IS NULL AND owner_time_valid AND against_time_valid AND owner_decode_ns > 0
            THEN against_decode_ns / owner_decode_ns
        END AS time_ratio
    FROM decode_pair
)
SELECT
    pairs_id, model, model_folder, prompt_name, prompt_sha256, decoded_tokens, owner, against,
    count(*) AS pairs,
    count(*) FILTER (WHERE identical) AS identical_pairs,
    count(*) FILTER (WHERE void_reason IS NOT NULL) AS void_pairs,
    count(time_ratio) AS timed_pairs,
    median(time_ratio) AS time_ratio_median,
    min(time_ratio) AS time_ratio_low,
    max(time_ratio) AS time_ratio_high,
    median(owner_decode_ns) FILTER (WHERE time_ratio IS NOT NULL) AS owner_decode_median_ns,
    median(against_decode_ns) FILTER (WHERE time_ratio IS NOT NULL) AS against_decode_median_ns
FROM counted
GROUP BY ALL
ORDER BY pairs_id, prompt_name, prompt_sha256;
