"""What a trace says again of the native replays of it: accesses, demand, the digest, what an LRU would have missed.

In: tables by name and traces in memory. Out: findings, as in `identities`. Pure: nothing is read or written; nothing is
replayed on a machine.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.identities import Finding, Row, Tables, lost_columns, parts_of_runs
from replayer.accounting import simulated_lru_hits
from replayer.pool import SYNTHETIC, UnusablePlan, plan_pool
from replayer.proofs import expected_digest
from replayer.trace import Trace, steps_without_warmup, walk


def trace_run_findings(tables: Tables, traces: Mapping[str, Trace]) -> Iterator[Finding]:
    """What a replay of these steps accesses, demands, consumes, and would miss, from the trace itself."""
    pools = {row["pool_id"]: row for row in tables["pool"].to_dicts()}
    steps, layers = parts_of_runs(tables["replay_step"]), parts_of_runs(tables["replay_layer"])
    for run in tables["replay_run"].sort("run_id").iter_rows(named=True):
        one, trace, pool = run["run_id"], traces.get(run["trace_id"]), pools.get(run["pool_id"])
        name = "replayed again from its trace"
        if trace is None:
            yield Finding(name, one, reason=f"trace {run['trace_id']} is not at hand")
            continue
        if lost_columns(run):
            yield Finding(name, one, reason="columns of it are missing")
            continue
        sizes = None if pool is None else _sizes(trace, pool)
        if run["status"] != "complete" or run["wall_ns"] is None or run["access_order"] == "random":
            yield Finding(name, one, reason=f"{run['status']}, or in an order whose seed is not kept")
            continue
        if sizes is None:
            yield Finding(name, one, reason="sizes of the pool's experts are not kept")
            continue
        yield from _replayed_again(run, trace, sizes, pool or {}, steps.get(one), layers.get(one))


def pool_findings(tables: Tables, traces: Mapping[str, Trace]) -> Iterator[Finding]:
    """A pool that was built for a trace is the one that its layout, alignment and sizes make."""
    used = tables["replay_run"].select("pool_id", "trace_id").unique().sort("pool_id", "trace_id")
    pools = {row["pool_id"]: row for row in tables["pool"].to_dicts()}
    for pool_id, trace_id in used.rows():
        name, pool, trace = "a pool is the one that its rule makes", pools.get(pool_id), traces.get(trace_id)
        if pool is None or trace is None:
            yield Finding(name, pool_id, reason=f"trace {trace_id} is not at hand")
            continue
        sizes = _sizes(trace, pool)
        if sizes is None or pool["content"] != SYNTHETIC:
            yield Finding(name, pool_id, reason="files of a checkpoint, or of sizes that are not kept")
            continue
        try:
            plan = plan_pool(
                trace.metadata.moe_layer_ids,
                trace.metadata.experts_per_layer,
                sizes,
                layout=pool["layout"],
                alignment_bytes=pool["alignment_bytes"],
            )
        except UnusablePlan as error:
            yield Finding(name, pool_id, "a pool", str(error))
            continue
        wanted = [
            plan.pool_id, len(plan.moe_layer_ids), len(plan.files), int(plan.file_bytes.sum()), int(sizes.sum()),
            int(sizes.min()), int(sizes.max()),
        ]  # fmt: skip
        columns = (
            "pool_id", "moe_layers", "files", "file_bytes", "pool_bytes", "expert_bytes_min", "expert_bytes_max",
        )  # fmt: skip
        told = [pool[column] for column in columns]
        yield Finding(name, pool_id, wanted, told)


def _sizes(trace: Trace, pool: Row) -> npt.NDArray[np.int64] | None:
    """(O,) bytes of each expert of a pool: all equal, or as the trace has them where they fill that pool."""
    if pool["pool_experts"] != trace.num_objects:
        return None
    if pool["expert_bytes_min"] == pool["expert_bytes_max"]:
        return np.full(trace.num_objects, pool["expert_bytes_min"], dtype=np.int64)
    layers = [trace.metadata.sizes_of_layer(layer) for layer in range(len(trace.metadata.moe_layer_ids))]
    sizes = np.array([size for layer in layers for size in layer or []], dtype=np.int64)
    fits = len(sizes) == trace.num_objects and int(sizes.sum()) == pool["pool_bytes"]
    return sizes if fits else None


def _replayed_again(
    run: Row,
    trace: Trace,
    sizes: npt.NDArray[np.int64],
    pool: Row,
    steps: pl.DataFrame | None,
    layers: pl.DataFrame | None,
) -> Iterator[Finding]:
    one, begin, end = run["run_id"], run["step_begin"], run["step_end"]
    ids = steps_without_warmup(trace)[begin:end]
    yield Finding("its steps are those of the trace", one, end - begin, len(ids))
    if len(ids) != end - begin:
        return
    walked = walk(trace, begin, end, order=run["access_order"])
    demanded = sizes[walked.objects]
    for name, wanted in (
        ("events", walked.num_events),
        ("selections", int(walked.selections.sum())),
        ("accesses", len(walked.objects)),
        ("demand_bytes", int(demanded.sum())),
    ):
        yield Finding(f"trace = run: {name}", one, wanted, run[name])
    experts = trace.metadata.experts_per_layer
    seen = SimpleNamespace(
        walk=walked,
        trace=trace,
        step_begin=begin,
        step_end=end,
        access_event=np.repeat(np.arange(walked.num_events), np.diff(walked.first_access)),
        request=SimpleNamespace(warm_pass=run["warm_pass"]),
        pool=SimpleNamespace(
            num_objects=trace.num_objects,
            object_bytes=sizes,
            object_first_extent=np.arange(trace.num_objects + 1),
            extent_length_bytes=sizes,
            object_layer_id=np.repeat(trace.metadata.moe_layer_ids, experts),
            object_expert_id=np.concatenate([np.arange(number) for number in experts]),
        ),
    )
    hits = None
    if run["nominal_miss_bytes"] is not None:
        missed = ~simulated_lru_hits(seen, run["capacity_bytes"])  # type: ignore[arg-type]
        yield Finding(
            "simulated again: nominal_miss_bytes", one, int(demanded[missed].sum()), run["nominal_miss_bytes"]
        )
    if run["resident_miss_bytes"] is not None:
        hits = simulated_lru_hits(seen, run["resident_median_bytes"])  # type: ignore[arg-type]
        yield Finding(
            "simulated again: resident_miss_bytes", one, int(demanded[~hits].sum()), run["resident_miss_bytes"]
        )
    digest = "digest: what the trace says every owner must have read"
    if run["consumed_digest"] is None or not run["bytes_valid"]:
        yield Finding(digest, one, reason="a run without a digest, or whose bytes are not valid")
    elif pool["content"] is None or int(sizes.min()) < 3 * 4096:
        yield Finding(digest, one, reason="the pool's content is not made by a rule, or its experts lie in small parts")
    else:
        yield Finding(digest, one, f"{expected_digest(seen):016x}", run["consumed_digest"])  # type: ignore[arg-type]
    step_of, layer_of = walked.step[seen.access_event], walked.layer[seen.access_event]
    for what, rows, key, names, place, event_place in (
        ("step", steps, "step_id", ids, step_of, walked.step),
        ("layer", layers, "layer_id", np.array(trace.metadata.moe_layer_ids), layer_of, walked.layer),
    ):
        if rows is None:
            continue
        counted = pl.DataFrame(
            {
                key: names,
                "events": np.bincount(event_place, minlength=len(names)),
                "accesses": np.bincount(place, minlength=len(names)),
                "demand_bytes": np.bincount(place, weights=demanded, minlength=len(names)).astype(np.int64),
                "simulated_hits": None if hits is None else np.bincount(place, weights=hits, minlength=len(names)),
            }
        ).filter(pl.col("events") > 0)
        for name in (key, "events", "accesses", "demand_bytes", *([] if hits is None else ["simulated_hits"])):
            there = rows.sort(key)[name].cast(pl.Int64).to_list()
            yield Finding(f"trace = each {what}: {name}", one, counted[name].cast(pl.Int64).to_list(), there)
