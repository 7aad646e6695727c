-- Which facts about a trace does neither its dump nor the user say?
CREATE VIEW trace_unknowns AS
SELECT trace_id, trim(unnest(string_split(unknowns, ','))) AS unknown_fact, model, source_file
FROM trace
WHERE unknowns <> ''
ORDER BY trace_id, unknown_fact;
