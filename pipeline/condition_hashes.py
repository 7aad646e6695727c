"""What native runs were asked for, against the digest that names it: a contract column that was changed has another.

In: tables by name. Out: findings, as in `identities`. Pure: nothing is read or written.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator

import polars as pl

from pipeline.identities import Finding, Row, Tables
from replayer.replay import condition_hash
from replayer.request import Request, fits_a_table

_ASKED = (
    "trace_id", "pool_id", "owner", "policy", "scope", "admission", "arena_fraction", "miss_path", "mechanism",
    "headroom_bytes", "outer_group_bytes", "fadvise", "destination", "threads", "observe", "verify", "group_stat",
    "warm_pass", "step_begin", "step_end",
)  # fmt: skip


def contract_findings(tables: Tables) -> Iterator[Finding]:
    """What was asked for, against the digest of it; and that the repetitions of a condition were asked for alike."""
    planned = set(tables["replay_delivery"]["run_id"])
    runs = tables["replay_run"].sort("run_id")
    for run in runs.iter_rows(named=True):
        one, begun = run["run_id"], re.sub("[-:]", "", run["started_at"])[:15]
        yield Finding("run_id begins with when it was started", one, begun, one[:15])
        name = "condition_hash is the digest of what was asked for"
        tabled = run["admission"] is not None or fits_a_table(Request(owner=run["owner"], policy=run["policy"]))
        if one in planned or tabled:
            yield Finding(name, one, reason="asked for with a table or a plan, which is not kept")
        else:
            found = next((True for digest in _digests(run) if digest == run["condition_hash"]), False)
            yield Finding(name, one, True, found)
    for (digest,), same in runs.group_by("condition_hash", maintain_order=True):
        if same.height > 1:
            differ = [column for column in _ASKED if same[column].n_unique() > 1]
            yield Finding("repetitions of a condition were asked for alike", str(digest), [], differ)
    for name in ("experiment_run", "lab_run"):
        other = tables[name].join(runs.select("run_id", "trace_id"), on="run_id", suffix="_of_run")
        differ = sorted(other.filter(pl.col("trace_id") != pl.col("trace_id_of_run"))["run_id"])
        yield Finding("a mark names its run's trace", name, [], differ)


_OF_LOOKAHEAD = frozenset({"plan", "delivery", "split", "hint_slots"})
_KNOWN = frozenset({
    "owner", "mechanism", "capacity_bytes", "wall_bytes", "headroom_bytes", "outer_group_bytes", "miss_path",
    "arena_fraction", "policy", "scope", "fit", "admit", "seed", "fadvise", "destination", "threads", "observe",
    "verify", "group_stat", "warm_pass", "steps", "accelerator_memory", "offline_memory_blocks", "allow_thrash",
    "allow_unsuitable",
}) | _OF_LOOKAHEAD  # fmt: skip
"""Fields of a request as of the first versions whose results are shipped; the oldest have none of lookahead."""


def _digests(run: Row) -> Iterator[str]:
    """Every condition_hash that a run of these columns can have, of this version and those before."""
    newer = {field.name for field in dataclasses.fields(Request)} - _KNOWN
    for request in _asked(run):
        yield condition_hash(run["trace_id"], run["pool_id"], request)
        said = dataclasses.asdict(request)
        for unknown in ({*newer}, {*newer, *_OF_LOOKAHEAD}):
            then = {name: value for name, value in said.items() if name not in unknown}
            text = json.dumps([run["trace_id"], run["pool_id"], then], sort_keys=True)
            yield hashlib.sha256(text.encode()).hexdigest()[:12]


def _asked(run: Row) -> Iterator[Request]:
    """Every request that would have given a run these columns: what says nothing in the columns, both ways."""
    names = ("owner", "mechanism", "headroom_bytes", "outer_group_bytes", "arena_fraction", "policy", "fadvise",
             "destination", "threads", "observe", "verify", "warm_pass")  # fmt: skip
    said = {name: run[name] for name in names}
    said |= {
        "seed": run["seed"] or 0,
        "group_stat": run["group_stat"] or "pass",
        "offline_memory_blocks": run["mechanism"] == "offline",
    }
    begins, ends = (run["step_begin"], None), (run["step_end"], None)
    sizes = ((run["capacity_bytes"], None), (None, run["wall_bytes"]), (None, None))
    for steps, size, miss_path, scope, thrash, unsuitable, accelerator in itertools.product(
        itertools.product(begins, ends), dict.fromkeys(sizes), {run["miss_path"], None}, {run["scope"], None},
        (False, True), (False, True), (False, True),
    ):  # fmt: skip
        yield Request(
            **said, steps=steps, capacity_bytes=size[0], wall_bytes=size[1], miss_path=miss_path, scope=scope,
            allow_thrash=thrash, allow_unsuitable=unsuitable, accelerator_memory=accelerator,
        )  # fmt: skip
