"""Parquet results → one DuckDB file that any client from 1.0 on opens, and the ways of reading it.

Read `tables.sql` (every table and its grain), `views/` (one question a file, to paste and change), then `build`
(load, check, replace; query without access to anything else). Results are never computed here: they come from
`data/results/`, and what they mean is in `schemas`.
"""
