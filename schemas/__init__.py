"""The contract: every table, every column and the canonical trace, defined once.

Read in this order: `columns` (one definition per column name), `tables` (grain, key and columns of each result
table), `trace` (the canonical trace and its metadata), `documents` (what `--json` prints), `validation` (pandera
schemas made from the definitions; the only module here that loads pandera). Nothing here imports other packages of
this project, touches Dagster or reads files.
"""
