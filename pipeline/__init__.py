"""From raw dumps to a report: parsing, typing, checks, analyses, and the Dagster graph that runs them.

Read in this order: `dumps` (one module per layout, `sniff` decides), `canonical` (parsed dump → canonical rows),
`ingest` (files: identity, publishing, what the user says), `hit_rates`, `locality` and `lookahead` (pure analyses),
`report` (warehouse → page), then `assets`, `checks`, `automation`, `definitions` (the only modules that import
Dagster), and `cli`.
"""
