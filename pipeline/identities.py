"""The accounting identities of native results and decodes, computed again from the rows that were kept.

In: tables by name. Out: findings, each one identity of one subject with what was wanted and found, or why it cannot be
computed from what is kept. What a trace says again is in `recounts`. Pure: nothing is read or written. The proofs of a
run were made of counters and arrays that no table keeps; here their words are held against the columns that state the
same, their verdicts against the numbers, and the run's against theirs.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from replayer.owners import reads_directly
from replayer.proofs import (
    IDLE_PAGE_OUT_NS,
    NEIGHBOR_SHARE,
    NEIGHBOR_SLACK_BYTES,
    OBSERVATION_SHARE,
    TIME_SHARE,
    TIME_SLACK_NS,
    Proof,
    verdicts,
)
from replayer.quantities import format_bytes
from schemas.tables import TABLES

Row = dict[str, Any]
Tables = Mapping[str, pl.DataFrame]


@dataclass(frozen=True)
class Finding:
    """One identity of one subject. reason: why it cannot be computed here, and then it holds neither way."""

    identity: str
    subject: str
    wanted: Any = None
    found: Any = None
    reason: str | None = None

    @property
    def held(self) -> bool | None:
        return None if self.reason is not None else self.wanted == self.found


_OF_RUN = ("replay_step", "replay_layer", "replay_proof", "replay_reclaim", "replay_node", "replay_delivery",
           "experiment_run", "lab_run")  # fmt: skip
_SUMMED = (
    "events", "accesses", "demand_bytes", "observed_accesses", "native_hits", "native_partial_hits", "native_misses",
    "missing_bytes", "stall_ns",
)  # fmt: skip
_SUMMED_OF_STEPS = (*_SUMMED, "device_bytes", "wall_ns", "check_ns")
_ALWAYS_PROVED = frozenset({
    "pool on a device", "pool absent at the cold start", "machine state unchanged", "pool files unchanged",
    "selections conserved", "reads conserved", "bytes returned", "content", "device bytes", "run complete",
    "pool loaded by this run alone", "no out-of-memory kill", "no swap", "step times sum to the interval",
    "stalls within their steps", "no neighbour on the device", "no foreign load", "no idle page-out by the machine",
    "no emulation",
})  # fmt: skip


_OF_TIMES = frozenset({
    "step times sum to the interval", "stalls within their steps", "no neighbour on the device", "no foreign load",
    "no idle page-out by the machine", "no emulation", "checks are cheap",
})  # fmt: skip


def reference_findings(tables: Tables) -> Iterator[Finding]:
    """Rows that name another row: the other is there."""
    runs = set(tables["replay_run"]["run_id"])
    for name in _OF_RUN:
        lost = sorted(set(tables[name]["run_id"]) - runs)
        yield Finding("every row belongs to a run that is there", name, [], lost)
    decodes = set(tables["decode_run"]["run_id"])
    yield Finding(
        "every row belongs to a run that is there",
        "decode_layer",
        [],
        sorted(set(tables["decode_layer"]["run_id"]) - decodes),
    )
    for name in ("replay_run", "decode_run"):
        for other, key in (("pool", "pool_id"), ("machine", "machine_id")):
            lost = sorted(set(tables[name][key]) - set(tables[other][key]))
            yield Finding(f"every run's {other} is there", name, [], lost)


def machine_findings(tables: Tables) -> Iterator[Finding]:
    """A machine's id is a digest of all that is said of it."""
    for row in tables["machine"].iter_rows(named=True):
        said = {name: value for name, value in row.items() if name != "machine_id"}
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        yield Finding(
            "machine_id is the digest of its row", row["machine_id"], f"machine-{digest[:12]}", row["machine_id"]
        )


def node_findings(tables: Tables) -> Iterator[Finding]:
    """A run has a row for each memory node of its machine, and a node holds no more than it has."""
    machines = dict(tables["machine"].select("machine_id", "numa_nodes").rows())
    of_run = dict(tables["replay_run"].select("run_id", "machine_id").rows())
    for one, rows in sorted(parts_of_runs(tables["replay_node"]).items()):
        nodes = machines.get(of_run.get(one))
        if nodes is not None:
            yield Finding("a row for each memory node of the machine", one, nodes, rows.height)
        held = [
            rows.filter(pl.col(name) > pl.col("node_bytes")).height
            for name in ("node_free_bytes", "node_file_bytes", "node_locked_bytes")
        ]
        yield Finding("a memory node holds no more than it has", one, [0, 0, 0], held)
        both = rows.filter(pl.col("node_free_bytes") + pl.col("node_file_bytes") > pl.col("node_bytes")).height
        yield Finding("free memory and page cache of a node fit it", one, 0, both)


def run_findings(tables: Tables) -> Iterator[Finding]:
    """Identities of native replays from stored rows alone."""
    steps = parts_of_runs(tables["replay_step"])
    layers = parts_of_runs(tables["replay_layer"])
    proofs = parts_of_runs(tables["replay_proof"])
    reclaim = parts_of_runs(tables["replay_reclaim"])
    machines = {row["machine_id"]: row for row in tables["machine"].to_dicts()}
    pools = {row["pool_id"]: row for row in tables["pool"].to_dicts()}
    delivery = {row["run_id"]: row for row in tables["replay_delivery"].to_dicts()}
    for run in tables["replay_run"].sort("run_id").iter_rows(named=True):
        one = run["run_id"]
        lost = lost_columns(run)
        yield Finding("what is counted together is all there", one, [], lost)
        if lost:
            continue
        machine, pool = machines.get(run["machine_id"]), pools.get(run["pool_id"])
        yield from _of_columns(run, machine, pool, delivery.get(one))
        yield from _of_sums(run, steps.get(one), layers.get(one), pool)
        yield from _of_proofs(run, proofs.get(one, []), machine)
        yield from _of_reclaim(run, reclaim.get(one), machine)
        if one in delivery:
            row = delivery[one]
            parts = sum(row[f"hints_{name}"] for name in ("completed", "overwritten", "dropped", "in_flight"))
            yield Finding("hints handed over = what became of them", one, row["hints_submitted"], parts)
            yield Finding("named hits are among named accesses", one, True, row["named_hits"] <= row["named_accesses"])


_TOGETHER = (
    ("wall_ns", ("check_ns", "stall_ns", "observe_ns", "verify_ns", "reads", "returned_bytes", "checked_bytes")),
    ("resident_median_bytes", ("resident_max_bytes",)),
    ("resident_max_bytes", ("resident_median_bytes",)),
    ("stall_median_ns", ("stall_p99_ns", "stall_ns")),
    ("nominal_miss_bytes", ("capacity_bytes",)),
    ("resident_miss_bytes", ("resident_median_bytes",)),
    ("enforced_bytes", ("capacity_bytes",)),
)


def lost_columns(run: Row) -> list[str]:
    """Columns of a run that are null though what is counted with them is not: nothing can be said of such a run."""
    lost = {name for known, names in _TOGETHER if run[known] is not None for name in names if run[name] is None}
    if run["mechanism"] == "cgroup" and run["status"] == "complete":
        lost |= {name for name in ("capacity_bytes", "enforced_bytes", "wall_bytes") if run[name] is None}
    return sorted(lost)


def parts_of_runs(frame: pl.DataFrame) -> dict[str, Any]:
    """The rows of each run: as a frame, but those of proofs as dicts."""
    parts = {str(key[0]): part for key, part in frame.group_by("run_id", maintain_order=True)}
    if "spoils" in frame.columns:
        return {key: part.to_dicts() for key, part in parts.items()}
    return parts


def _of_columns(run: Row, machine: Row | None, pool: Row | None, delivery: Row | None) -> Iterator[Finding]:
    one, complete = run["run_id"], run["status"] == "complete"
    if complete and run["replayed_steps"] is not None:
        yield Finding(
            "steps replayed = steps asked for", one, run["step_end"] - run["step_begin"], run["replayed_steps"]
        )
    if complete and run["observe"] == "every" and run["observed_accesses"] is not None:
        yield Finding("every access was observed", one, run["accesses"], run["observed_accesses"])
    if pool is not None and pool["expert_bytes_min"] == pool["expert_bytes_max"]:
        size = pool["expert_bytes_min"]
        yield Finding("demand = accesses × expert bytes", one, run["accesses"] * size, run["demand_bytes"])
        for name in ("nominal_miss_bytes", "resident_miss_bytes"):
            if run[name] is not None:
                yield Finding(f"{name} is whole experts", one, 0, run[name] % size)
    if pool is not None:
        yield Finding("experts of the pool fill it", one, True, _pool_adds_up(pool))
    known = (run["device_bytes"], run["missing_bytes"], run["direct_bytes"])
    if None not in known and machine is not None and delivery is None:
        device, missing, direct = known
        if reads_directly(run["owner"], run["miss_path"]):
            pass  # The proof `device bytes` says it, below.
        elif direct:
            reason = "which pages were missing of what O_DIRECT read is not kept"
            yield Finding("device bytes = missing + raced + direct", one, reason=reason)
        elif run["raced_pages"] is not None:
            found = missing + run["raced_pages"] * machine["page_bytes"]
            yield Finding("device bytes = missing + raced + direct", one, device, found)
        elif run["overshoot_bytes"] is not None:
            yield Finding("device bytes = missing + overshoot", one, device, missing + run["overshoot_bytes"])
    own = (run["wall_bytes"], run["capacity_bytes"], run["own_anonymous_bytes"])
    # In one wall with others a run's own part is not kept.
    alone = not run["shares_wall"]
    if None not in own and alone and run["owner"] in ("page_cache", "page_cache_mmap"):
        wanted = own[1] + own[2] + (run["own_kernel_bytes"] or 0) + run["headroom_bytes"]
        yield Finding("wall = capacity + the reader's own + headroom", one, wanted, own[0])
    cgroup = run["mechanism"] == "cgroup" and run["owner"] == "page_cache" and run["outer_group_bytes"] is None
    if cgroup and alone and machine is not None:
        # A limit is whole pages.
        less = run["capacity_bytes"] + run["headroom_bytes"] - run["enforced_bytes"]
        yield Finding("a cgroup enforces what was asked for", one, True, 0 <= less < machine["page_bytes"])
    if run["resident_median_bytes"] is not None:
        order = run["resident_median_bytes"] <= run["resident_max_bytes"]
        yield Finding("median residency is at most the largest", one, True, order)
    if run["checked_bytes"] is not None:
        yield Finding("what was checked is whole words", one, 0, run["checked_bytes"] % 8)
    if run["owner"] in ("page_cache", "page_cache_mmap") and run["direct_bytes"] is not None:
        yield Finding("the page cache reads nothing by O_DIRECT", one, 0, run["direct_bytes"])


def _pool_adds_up(pool: Row) -> bool:
    """Between the smallest and the largest expert, and in files that hold at least as much."""
    number = pool["pool_experts"]
    inside = number * pool["expert_bytes_min"] <= pool["pool_bytes"] <= number * pool["expert_bytes_max"]
    return bool(inside and pool["pool_bytes"] <= pool["file_bytes"])


def _of_sums(run: Row, steps: pl.DataFrame | None, layers: pl.DataFrame | None, pool: Row | None) -> Iterator[Finding]:
    """A complete run is the sum of its steps, and of its layers."""
    one = run["run_id"]
    if run["status"] != "complete" or run["wall_ns"] is None:
        yield Finding("Σ steps = run", one, reason=f"a run that is {run['status']} counts what no step row has")
        return
    if steps is None or layers is None:
        yield Finding("a complete run has its steps and layers", one, True, False)
        return
    yield Finding("a complete run has all its steps", one, run["replayed_steps"], steps.height)
    for what, rows, names in (("steps", steps, _SUMMED_OF_STEPS), ("layers", layers, _SUMMED)):
        for name in names:
            if run[name] is not None and not rows[name].null_count():
                yield Finding(f"Σ {what} = run: {name}", one, run[name], int(rows[name].sum()))
    middle = (steps.height - 1) // 2
    yield Finding("step_median_ns is that of its steps", one, steps["wall_ns"].sort()[middle], run["step_median_ns"])
    resident = steps["resident_bytes"].sort()
    yield Finding("resident_median_bytes is that of its steps", one, resident[middle], run["resident_median_bytes"])
    yield Finding("resident_max_bytes is that of its steps", one, resident[-1], run["resident_max_bytes"])
    for what, rows in (("steps", steps), ("layers", layers), ("run", pl.DataFrame([_stalls(run)]))):
        yield Finding(
            f"median and 99th percentile of stalls fit their sum: {what}", one, 0, rows.filter(~_STALLS_FIT).height
        )
    if not steps["simulated_misses"].null_count() and not layers["simulated_misses"].null_count():
        for name in ("simulated_hits", "simulated_misses"):
            yield Finding(f"Σ steps = Σ layers: {name}", one, int(steps[name].sum()), int(layers[name].sum()))
        if run["resident_miss_bytes"] is not None and pool and pool["expert_bytes_min"] == pool["expert_bytes_max"]:
            wanted = int(steps["simulated_misses"].sum()) * pool["expert_bytes_min"]
            yield Finding("Σ simulated misses = resident_miss_bytes", one, wanted, run["resident_miss_bytes"])


_EVENTS = pl.col("events").cast(pl.Int64)
_STALLS_FIT = (
    (pl.col("stall_median_ns") <= pl.col("stall_p99_ns"))
    # At least so many of them are as long.
    & (pl.col("stall_median_ns") * (_EVENTS - (_EVENTS - 1) // 2) <= pl.col("stall_ns"))
    & (pl.col("stall_p99_ns") * (_EVENTS - (99 * _EVENTS + 99) // 100 + 1) <= pl.col("stall_ns"))
)


def _stalls(run: Row) -> Row:
    return {name: run[name] for name in ("events", "stall_ns", "stall_median_ns", "stall_p99_ns")}


_GROWN = tuple(
    name for name in TABLES["replay_reclaim"].column_names
    if name.endswith(("_pages", "_faults", "_refault_bytes", "_some_ns", "_full_ns"))
)  # fmt: skip


def _of_reclaim(run: Row, rows: pl.DataFrame | None, machine: Row | None) -> Iterator[Finding]:
    if rows is None:
        return
    one = run["run_id"]
    for row in rows.filter(pl.col("step_id").is_null()).iter_rows(named=True):
        yield Finding("reclaim of the whole pass: device_bytes", one, run["device_bytes"], row["device_bytes"])
        if machine is not None and row["memory_bytes"] is not None:
            yield Finding("reclaim of the whole pass: memory_bytes", one, machine["memory_bytes"], row["memory_bytes"])
    steps = rows.filter(pl.col("step_id").is_not_null())
    counted = run["device_bytes"] is not None and not steps["device_bytes"].null_count()
    if steps.height and counted and run["status"] == "complete":
        total = int(steps["device_bytes"].sum())
        yield Finding("Σ steps of reclaim = run: device_bytes", one, run["device_bytes"], total)
    sizes = rows["memory_bytes"].drop_nulls().n_unique()
    yield Finding("the machine kept its memory in every step", one, True, sizes <= 1)
    whole = rows.filter(pl.col("step_id").is_null())
    if whole.height == 1 and steps.height:
        more = [
            name for name in _GROWN
            if not whole[name].null_count() and not steps[name].null_count() and steps[name].sum() > whole[name][0]
        ]  # fmt: skip
        yield Finding("counts of the steps are among those of the whole pass", one, [], more)
    for whose in ("group", "machine"):
        for what in ("scan", "steal"):
            parts = [f"{whose}_{by}_{what}_pages" for by in ("kswapd", "direct")]
            both = f"{whose}_{what}_pages"
            # The sum may hold more than both: proactive reclaim counts apart.
            less = rows.filter(pl.sum_horizontal(parts) > pl.col(both)).height
            yield Finding(f"{both} holds its parts", one, 0, less)


# Proofs


def _of_proofs(run: Row, proofs: Sequence[Row], machine: Row | None) -> Iterator[Finding]:
    one = run["run_id"]
    measured = run["wall_ns"] is not None
    if measured and run["status"] == "complete":
        missing = sorted(_ALWAYS_PROVED - {proof["name"] for proof in proofs})
        yield Finding("a complete run has every proof", one, [], missing)
    spoilt = sorted(proof["name"] for proof in proofs if (proof["spoils"] == "time") != (proof["name"] in _OF_TIMES))
    yield Finding("a proof spoils what it always spoils", one, [], spoilt)
    by_name = {proof["name"]: proof for proof in proofs}
    for name, field, wanted in _stated(run, by_name, machine):
        if name in by_name:
            proof = by_name[name]
            yield Finding(f"proof {name!r} says what the columns say ({field})", one, wanted, proof[field])
    for name, held in _judged(run, by_name, machine):
        yield Finding(f"verdict of proof {name!r}", one, held, by_name[name]["held"])
    told = [Proof(**{name: value for name, value in proof.items() if name != "run_id"}) for proof in proofs]
    judged = verdicts(told)
    for kind in ("bytes", "time"):
        yield Finding(f"{kind}_valid follows from the proofs", one, judged[f"{kind}_valid"], run[f"{kind}_valid"])
        wanted, found = judged[f"{kind}_reasons"], run[f"{kind}_reasons"]
        # Rows are sorted by name here, and the reasons stand in the order in which the proofs were made.
        yield Finding(f"{kind}_reasons follow from the proofs", one, sorted(wanted), sorted(found))


def _stated(run: Row, proofs: Mapping[str, Row], machine: Row | None) -> Iterator[tuple[str, str, str]]:
    """(proof, its column, text) wherever the columns of a run tell a proof's words."""
    failure = run["failure"]
    yield "run complete", "found", run["status"] if failure is None else f"{run['status']}: {failure}"
    yield "machine state unchanged", "expected", run["machine_id"]
    if run["cold_resident_bytes"] is not None:
        yield "pool absent at the cold start", "found", f"{run['cold_resident_bytes']:,} bytes"
    if run["wall_ns"] is None:
        return
    yield "selections conserved", "found", f"{run['selections']:,}"
    yield "reads conserved", "expected", f"{run['accesses']:,} accesses of the trace"
    yield "reads conserved", "found", f"{run['reads']:,} reads"
    yield "bytes returned", "expected", f"{run['demand_bytes']:,} bytes"
    yield "bytes returned", "found", f"{run['returned_bytes']:,} bytes"
    content = proofs.get("content")
    if content is not None and content["held"] is not None:
        yield "content", "found", f"{content['found'].split(' of ')[0]} of {run['checked_bytes'] // 8:,}"
    if run["consumed_digest"] is not None:
        yield "digest", "found", run["consumed_digest"]
        if run["bytes_valid"]:
            yield "digest", "expected", run["consumed_digest"]
    yield from _stated_of_device(run, proofs.get("device bytes"))
    wall = proofs.get("resident within the wall")
    if wall is not None and run["resident_max_bytes"] is not None:
        rest = wall["found"].partition(", ")[2]
        yield "resident within the wall", "found", f"at most {format_bytes(run['resident_max_bytes'])}, {rest}"
    times = proofs.get("step times sum to the interval")
    if times is not None and run["interval_ns"] is not None:
        most = "at most " if times["expected"].startswith("at most ") else ""
        yield "step times sum to the interval", "expected", f"{most}{run['interval_ns'] / 1e6:,.1f} ms"
        yield "step times sum to the interval", "found", f"{(run['wall_ns'] + run['check_ns']) / 1e6:,.1f} ms"
    yield "stalls within their steps", "expected", f"at most {run['wall_ns'] / 1e6:,.1f} ms"
    yield "stalls within their steps", "found", f"{run['stall_ns'] / 1e6:,.1f} ms"
    if run["neighbor_bytes"] is not None and run["device_bytes"] is not None and run["together_id"] is None:
        allowed = int(max(NEIGHBOR_SHARE * run["device_bytes"], NEIGHBOR_SLACK_BYTES))
        yield "no neighbour on the device", "found", format_bytes(run["neighbor_bytes"])
        yield "no neighbour on the device", "tolerance", format_bytes(allowed)
    threads_ns = run["wall_ns"] * run["threads"]
    if threads_ns:
        own = run["observe_ns"] + run["verify_ns"]
        yield "checks are cheap", "found", f"{100 * own / threads_ns:.1f} %"
    if machine is not None:
        yield "no emulation", "found", machine["virtualization"]
        if run["mechanism"] != "none":
            yield "no idle page-out by the machine", "found", f"DAMON {machine['damon']}"


def _stated_of_device(run: Row, proof: Row | None) -> Iterator[tuple[str, str, str]]:
    if proof is None or run["device_bytes"] is None or proof["held"] is None:
        return
    raced = run["raced_pages"]
    apart = "" if raced is None or reads_directly(run["owner"], run["miss_path"]) else f", {raced:,} pages apart"
    yield "device bytes", "found", f"{run['device_bytes']:,} bytes{apart}"
    if run["missing_bytes"] is not None and not run["direct_bytes"] and "missing before" in proof["expected"]:
        least = "at least " if proof["expected"].startswith("at least ") else ""
        rest = proof["expected"].partition(" bytes missing before")[2]
        yield "device bytes", "expected", f"{least}{run['missing_bytes']:,} bytes missing before{rest}"
    elif run["direct_bytes"] is not None and proof["expected"].endswith("asked of O_DIRECT"):
        text = f"{run['direct_bytes']:,} bytes asked of O_DIRECT"
        if " and " not in proof["expected"]:
            yield "device bytes", "expected", text


def _judged(run: Row, proofs: Mapping[str, Row], machine: Row | None) -> Iterator[tuple[str, bool]]:
    """(proof, whether it holds) wherever the columns of a run, or the proof's own words, say so."""
    made = {name: proof for name, proof in proofs.items() if proof["held"] is not None}
    rules: dict[str, bool | None] = {
        "run complete": run["status"] == "complete",
        "pool absent at the cold start": _no_less(run["cold_resident_bytes"], 0),
        "selections conserved": _equal_begin(made.get("selections conserved")),
        "reads conserved": run["accesses"] == run["reads"],
        "bytes returned": run["demand_bytes"] == run["returned_bytes"],
        "content": _words(made, "content", r"^0 of ") if run["checked_bytes"] else False,
        "digest": None if "digest" not in made else made["digest"]["expected"] == run["consumed_digest"],
        "device bytes": _device_holds(run, made.get("device bytes")),
        "resident within the wall": _words(made, "resident within the wall", r", 0 of [\d,]+ steps above"),
        "no out-of-memory kill": _words(made, "no out-of-memory kill", r"^0 \("),
        "one scope": _words(made, "one scope", r"^the same$"),
        "balloon alive": _words(made, "balloon alive", r"^0 of "),
        "pool files unchanged": _words(made, "pool files unchanged", r"^unchanged$"),
        "pool on a device": _words(made, "pool on a device", r"^a local disk$"),
        "hints delivered": _words(made, "hints delivered", r"^none$"),
        "decisions as simulated": _words(made, "decisions as simulated", r", 0 decided otherwise$"),
        "machine state unchanged": None
        if "machine state unchanged" not in made
        else made["machine state unchanged"]["found"] == made["machine state unchanged"]["expected"],
    }  # fmt: skip
    for name in ("wall alive", "machine size unchanged", "arena locked"):
        if name in made:
            # One number in each; another, or several, is another limit.
            number = re.search(r"[\d,]+ bytes", made[name]["expected"])
            rules[name] = number is not None and made[name]["found"] == number[0]
    if run["wall_ns"] is not None:
        rules |= _times_judged(run, made, machine)
    yield from ((name, held) for name, held in rules.items() if held is not None and name in made)


def _no_less(found: int | None, wanted: int) -> bool | None:
    return None if found is None else found == wanted


def _equal_begin(proof: Row | None) -> bool | None:
    return None if proof is None else proof["expected"].startswith(f"{proof['found']} = ")


def _words(made: Mapping[str, Row], name: str, pattern: str) -> bool | None:
    return None if name not in made else re.search(pattern, made[name]["found"]) is not None


def _times_judged(run: Row, made: Mapping[str, Row], machine: Row | None) -> dict[str, bool | None]:
    rules: dict[str, bool | None] = {"stalls within their steps": 0 < run["stall_ns"] <= run["wall_ns"]}
    total, interval = run["wall_ns"] + run["check_ns"], run["interval_ns"]
    times = made.get("step times sum to the interval")
    if times is not None and interval is not None:
        slack = int(TIME_SHARE * interval) + TIME_SLACK_NS
        waits = times["expected"].startswith("at most ")
        rules["step times sum to the interval"] = total <= interval if waits else abs(total - interval) <= slack
    if run["neighbor_bytes"] is not None and run["device_bytes"] is not None:
        allowed = int(max(NEIGHBOR_SHARE * run["device_bytes"], NEIGHBOR_SLACK_BYTES))
        rules["no neighbour on the device"] = run["neighbor_bytes"] <= allowed
    own = run["observe_ns"] + run["verify_ns"]
    rules["checks are cheap"] = own <= OBSERVATION_SHARE * run["wall_ns"] * run["threads"]
    if machine is not None:
        rules["no emulation"] = "tcg" not in machine["virtualization"]
        if run["mechanism"] != "none" and interval is not None:
            on = machine["damon"].startswith("on")
            rules["no idle page-out by the machine"] = not (on and interval > IDLE_PAGE_OUT_NS)
    return rules


def _device_holds(run: Row, proof: Row | None) -> bool | None:
    if proof is None or run["device_bytes"] is None:
        return None
    if reads_directly(run["owner"], run["miss_path"]):
        return bool(run["device_bytes"] == run["direct_bytes"])
    if run["overshoot_bytes"] is not None:
        return bool(run["overshoot_bytes"] >= 0)
    allowed = re.match(r"0 to ([\d,]+) pages", proof["tolerance"])
    if run["raced_pages"] is None or "shared by two" in proof["tolerance"]:
        return None
    if allowed is not None:
        return bool(0 <= run["raced_pages"] <= int(allowed[1].replace(",", "")))
    return bool(run["raced_pages"] == 0) if proof["tolerance"] == "to the byte" else None


# Simulated tables and decodes


def simulated_findings(tables: Tables) -> Iterator[Finding]:
    """Layers add up to their contract, curves meet the hit rates, and equal experts make bytes of misses."""
    contract = list(TABLES["hit_rate"].key)
    rates = tables["hit_rate"]
    names = ("accesses", "hits", "misses", "compulsory_misses", "capacity_misses", "miss_bytes")
    layers = tables["hit_rate_layer"].group_by(contract).agg([pl.col(name).sum() for name in names])
    met = rates.join(layers, on=contract, how="left", suffix="_sum", nulls_equal=True)
    for name in names:
        rows = met.filter(pl.col(name).is_not_null(), ~pl.col(name).eq_missing(pl.col(f"{name}_sum")))
        yield Finding(
            f"Σ layers = hit_rate: {name}", "hit_rate", [], [_contract(row) for row in rows.head(1).to_dicts()]
        )
    curve = rates.join(tables["miss_ratio_curve"], on=contract, how="inner", suffix="_curve", nulls_equal=True)
    for name in ("accesses", "misses", "compulsory_misses", "miss_bytes"):
        rows = curve.filter(~pl.col(name).eq_missing(pl.col(f"{name}_curve")))
        yield Finding(
            f"curve = hit_rate: {name}", "miss_ratio_curve", [], [_contract(row) for row in rows.head(1).to_dicts()]
        )
    sizes = tables["trace"].filter(pl.col("expert_bytes_min") == pl.col("expert_bytes_max"))
    for name in ("hit_rate", "hit_rate_layer", "miss_ratio_curve"):
        sized = tables[name].join(sizes.select("trace_id", "expert_bytes_min"), on="trace_id")
        rows = sized.filter(pl.col("misses") * pl.col("expert_bytes_min") != pl.col("miss_bytes"))
        yield Finding(
            "miss_bytes = misses × expert bytes", name, [], [_contract(row) for row in rows.head(1).to_dicts()]
        )


def _contract(row: Row) -> str:
    told = ("trace_id", "policy", "scope", "semantics", "capacity_experts_total", "layer_id")
    return ", ".join(f"{name} {row[name]}" for name in told if row.get(name) is not None)


def decode_findings(tables: Tables) -> Iterator[Finding]:
    """A decode is the sum of its layers, and a pair says what its decodes say."""
    runs = {row["run_id"]: row for row in tables["decode_run"].to_dicts()}
    layers = parts_of_runs(tables["decode_layer"])
    for one, run in sorted(runs.items()):
        if one in layers:
            yield Finding("Σ layers = decode: accesses", one, run["accesses"], int(layers[one]["accesses"].sum()))
        else:
            yield Finding("a decode has its layers", one, True, False)
    for pair in tables["decode_pair"].to_dicts():
        one = pair["decode_pair_id"]
        yield Finding("a pair is named by its decodes", one, f"{pair['owner_run_id']},{pair['against_run_id']}", one)
        same = pair["owner_token_sha256"] == pair["against_token_sha256"]
        yield Finding("identical is whether both say the same tokens", one, same, pair["identical"])
        for side in ("owner", "against"):
            decode = runs.get(pair[f"{side}_run_id"])
            if decode is None:
                yield Finding(
                    "a pair says what its decodes say", one, reason=f"decode {pair[f'{side}_run_id']} is not here"
                )
                continue
            wanted = [decode["owner"], decode["token_sha256"], decode["time_valid"], decode["decode_ns"]]
            told = [pair[side], *(pair[f"{side}_{name}"] for name in ("token_sha256", "time_valid", "decode_ns"))]
            yield Finding("a pair says what its decodes say", one, wanted, told)


def summary_findings(tables: Tables) -> Iterator[Finding]:
    """Experiments and labs count the runs that are there."""
    valid = tables["replay_run"].select("run_id", "bytes_valid")
    for name, of_runs, key in (("experiment", "experiment_run", "experiment_id"), ("lab", "lab_run", "lab_id")):
        for row in tables[name].to_dicts():
            runs = tables[of_runs].filter(pl.col(key) == row[key]).join(valid, on="run_id")
            wanted = [runs.height, int(runs["bytes_valid"].sum())]
            yield Finding(f"{name}: runs and valid runs", row[key], wanted, [row["runs"], row["valid_runs"]])
