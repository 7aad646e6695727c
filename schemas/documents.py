"""What `--json` prints, one model per command; tests check every document against these."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from schemas.trace import TraceMetadata


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class IngestedTrace(_Document):
    """An element of the list that `expert-tier ingest --json` prints."""

    trace_id: str
    path: str
    rows: int
    selections: int
    accesses: int
    steps: int
    warnings: list[str]


class Inspection(_Document):
    """`expert-tier inspect --json`."""

    dump: str
    unknown: list[str]
    metadata: TraceMetadata


class SimulatedResult(_Document):
    """One element of `results`: a row of the table hit_rate."""

    trace_id: str
    policy: str
    scope: Literal["layer", "global"]
    semantics: Literal["event_atomic", "sequential"]
    access_order: Literal["router", "ascending", "descending", "random"]
    dedup: Literal["union", "none"]
    capacity_experts_total: int | None
    capacity_bytes: int | None
    step_begin: int
    step_end: int
    phase: Literal["prefill", "decode", "unknown", "all"]
    warm_fraction: float
    warm_steps: int
    warm_pass: bool
    fit: str | None
    seed: int | None
    scored_steps: int
    selections: int
    accesses: int
    union_ratio: float | None
    hits: int
    misses: int
    hit_rate: float | None
    compulsory_misses: int
    demand_bytes: int | None
    miss_bytes: int | None
    preload_bytes: int | None


class Simulation(_Document):
    """`replayer simulate --json`."""

    trace_id: str
    results: list[SimulatedResult]


class RunSummary(_Document):
    """`expert-tier run --json`."""

    traces: list[str]
    tables: dict[str, int]
    warehouse: str
    report: str


class Relation(_Document):
    """An element of the list that `expert-tier query --list --format json` prints."""

    name: str
    kind: Literal["table", "view"]
    comment: str | None
    rows: int | None
