"""From raw dumps to a report: parsing, typing, checks, analyses, and the Dagster graph that runs them.

Read in this order: `dumps` (one module per layout, `sniff` decides), `canonical` (parsed dump → canonical rows),
`ingest` (files: identity, publishing, what the user says), `hit_rates`, `locality` and `lookahead` (pure analyses),
`replays` (native replays, each in a process of its own), `report` and `replay_report` (warehouse → page, made of `page`
and `plots`), then `assets`, `checks`, `automation`, `definitions` (the only modules that import Dagster), and `cli`.
"""
