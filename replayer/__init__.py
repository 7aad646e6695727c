"""Standalone replay and simulation of canonical traces; runs without Dagster, DuckDB and, to simulate, without torch.

Read in this order: `trace` (canonical Parquet → events), `policies` (numba kernels that decide hit or miss),
`simulate` (contracts, windows and counts over the kernels' decisions), `quantities` (byte sizes as people write them).
`cli` is the command line, `python -m replayer`.
"""
