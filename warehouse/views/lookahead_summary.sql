-- How much of what the next layers need does a predictor name in time, over all layers, and how much would chance name?
CREATE VIEW lookahead_summary AS
SELECT
    trace_id, phase, step_begin, step_end, warm_steps, predictor, fit, lookahead_layers, lookahead_steps, width,
    recall_all, predicted_accesses, accesses,
    recall_covered, covered_accesses,
    precision, predicted_experts,
    hint_coverage, covered_events, events,
    chance_recall_all, chance_predicted_accesses
FROM lookahead_recall
WHERE layer_id IS NULL
ORDER BY trace_id, phase, predictor, lookahead_layers, lookahead_steps, width, fit;
