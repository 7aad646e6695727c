"""A bundle → what of it holds, what fails, and what cannot be said here, each with the reason.

A bundle is held against itself (hashes, contracts, accounting identities), against traces that are at hand (packed in
it, or in a data folder), and against what the same simulations give here, row by row and bit by bit. Native runs are
not repeated: their identities are computed again, and the machine that they were measured on is named beside this one.
"""

import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipeline import hit_rates
from pipeline.benefit import lookahead_benefit
from pipeline.bundle import UnusableBundle
from pipeline.bundle_file import (
    REPORTING,
    BundleFile,
    Manifest,
    PackedTrace,
    reporting_text,
    rows_sha256,
    seeds_of,
    traces_of,
)
from pipeline.condition_hashes import contract_findings
from pipeline.identities import (
    Finding,
    decode_findings,
    machine_findings,
    node_findings,
    reference_findings,
    run_findings,
    simulated_findings,
    summary_findings,
)
from pipeline.inversion import inversion_rows, synthetic_trace
from pipeline.locality import OVERLAP_TOP_EXPERTS, domain_overlap, trace_locality
from pipeline.lookahead import lookahead_tables
from pipeline.predictors import recorded
from pipeline.recounts import pool_findings, trace_run_findings
from pipeline.reporting import reporting_block
from pipeline.results import check_rows, trace_row
from replayer.machine import machine_row
from replayer.simulate import Capacity, Cell, Choices, UnusableRequest, Window, decide_cells, prepare
from replayer.trace import MalformedTrace, Trace, read_metadata, read_trace, trace_parts
from schemas.files import DataFolder
from schemas.tables import TABLES
from schemas.validation import ContractViolation, validate_trace

Row = dict[str, Any]

MOST_TRACE_BYTES = 256 << 20
"""Of a trace's file: a larger one is hashed, and what was simulated on it is left unsaid, unless all is asked for."""
SAMPLE_CELLS = 64
"""Cells of a sweep that are simulated again, evenly among all of a trace, unless all are asked for."""
_UNPACKED_ROOM_BYTES = 1 << 30
_OUTCOMES = {True: "held", False: "FAILED", None: "not possible here"}


@dataclass(frozen=True)
class Check:
    """One check of a bundle. held is null where it is not possible here, and found says why."""

    check: str
    subject: str
    held: bool | None
    found: str


@dataclass
class Verified:
    """What came of a bundle's checks."""

    manifest: Manifest
    checks: list[Check] = field(default_factory=list)

    def count(self, held: bool | None) -> int:
        """How many checks came out so."""
        return sum(one.held is held for one in self.checks)


def verify_bundle(path: Path, data: DataFolder | None = None, *, everything: bool = False) -> Verified:
    """Checks all of a bundle; traces it does not pack are looked for in `data`.

    everything: also what is sampled otherwise, or too long.

    Raises:
        UnusableBundle: it is no bundle, or of another format version. OSError: it cannot be read.
    """
    with BundleFile(path) as bundle, tempfile.TemporaryDirectory(prefix="expert-tier-verify-") as spool:
        found = Verified(bundle.manifest)
        found.checks += _members(bundle)
        tables, checks = _tables(bundle)
        found.checks += checks
        found.checks += _said(bundle, tables)
        traces: dict[str, Trace] = {}
        files: dict[str, Path] = {}
        for trace in bundle.manifest.traces:
            found.checks += _trace(bundle, trace, data, Path(spool), files)
        for trace_id, file in files.items():
            if everything or file.stat().st_size <= MOST_TRACE_BYTES:
                traces[trace_id] = read_trace(file)
        found.checks += _aggregated(
            (
                *reference_findings(tables),
                *machine_findings(tables),
                *contract_findings(tables),
                *node_findings(tables),
                *run_findings(tables),
                *simulated_findings(tables),
                *decode_findings(tables),
                *summary_findings(tables),
            )
        )
        found.checks += _aggregated((*pool_findings(tables, traces), *trace_run_findings(tables, traces)))
        found.checks += _simulated_again(tables, traces, files, everything)
        found.checks += _machines(tables)
    return found


# The bundle against itself


def _members(bundle: BundleFile) -> Iterator[Check]:
    """Members against the manifest's sizes and hashes: none more, none less."""
    told = bundle.manifest.members
    for name in sorted({*told, *bundle.names}):
        check = "member is what the manifest says"
        if name not in told:
            yield Check(check, name, False, "not in the manifest")
        elif name not in bundle.names:
            yield Check(check, name, False, "not in the bundle")
        else:
            try:
                digest = bundle.sha256(name)
            except UnusableBundle as error:
                yield Check(check, name, False, _reason(bundle, error))
                continue
            same = (bundle.size(name), digest) == (told[name].bytes, told[name].sha256)
            yield Check(check, name, same, f"{bundle.size(name):,} bytes, SHA-256 {digest[:12]}…")


def _tables(bundle: BundleFile) -> tuple[dict[str, pl.DataFrame], list[Check]]:
    """Every table, empty where it breaks its contract, and whether it keeps it."""
    tables, checks = {}, []
    room = _UNPACKED_ROOM_BYTES
    for name, table in TABLES.items():
        member = f"results/{name}.parquet"
        try:
            tables[name] = bundle.table(name, room)
        except UnusableBundle as error:
            tables[name] = table.frame([])
            checks.append(Check("table keeps its contract", name, False, _reason(bundle, error)))
            continue
        room -= int(tables[name].estimated_size())
        if member in bundle.names:
            rows = tables[name].height
            told = bundle.manifest.members.get(member)
            counted = told is not None and told.rows == rows
            found = f"{rows:,} rows, {len(table.columns)} columns"
            found += "" if counted else f", the manifest has {told.rows if told else None}"
            checks.append(Check("table keeps its contract", name, counted, found))
    return tables, checks


def _reason(bundle: BundleFile, error: Exception) -> str:
    return " ".join(str(error).removeprefix(f"{bundle.path}: ").split())


def _said(bundle: BundleFile, tables: Mapping[str, pl.DataFrame]) -> Iterator[Check]:
    """What the manifest sums up of the tables."""
    seeds = seeds_of(tables)
    yield Check(
        "seeds in the manifest are those of the tables", "manifest", bundle.manifest.seeds == seeds,
        ", ".join(f"{name} {_some(values)}" for name, values in seeds.items()) or "none",
    )  # fmt: skip
    named = {trace.trace_id for trace in bundle.manifest.traces}
    lost = sorted(traces_of(tables) - named)
    yield Check(
        "every trace that results are of is in the manifest", "manifest", not lost,
        f"{len(named)} traces" + (f", not {_some(lost)}" if lost else ""),
    )  # fmt: skip
    if REPORTING in bundle.names:
        try:
            same = bundle.read(REPORTING).decode(errors="replace") == reporting_text(tables["reporting_block"])
        except UnusableBundle as error:
            yield Check("reporting.md says what the table says", REPORTING, False, _reason(bundle, error))
            return
        items = tables["reporting_block"].height
        yield Check("reporting.md says what the table says", REPORTING, same, f"{items} items of the reporting block")


# Traces


def _trace(
    bundle: BundleFile, told: PackedTrace, data: DataFolder | None, spool: Path, files: dict[str, Path]
) -> Iterator[Check]:
    """A trace's hash and contract; a file that is what the manifest says is added to `files`."""
    check, one = "trace is the one that was measured", told.trace_id
    is_packed = f"traces/{one}.parquet" in bundle.names
    if told.rows_sha256 is None:
        yield Check(check, one, None, "its file was not there when the bundle was written")
        return
    if is_packed:
        file = spool / f"{one}.parquet"
        try:
            bundle.unpack_trace(one, file)
        except (UnusableBundle, OSError) as error:
            yield Check(check, one, False, _reason(bundle, error))
            return
        where = "packed"
    elif told.packed:
        yield Check(check, one, False, "said to be packed, and is not")
        return
    elif data is not None and data.trace_file(one).is_file():
        file, where = data.trace_file(one), "in the data folder"
    else:
        yield Check(check, one, None, "neither packed nor in the data folder; name one that has it with --data")
        return
    try:
        metadata = read_metadata(file)
        digest, source = rows_sha256(file), metadata.source.sha256
        same = (digest, source, metadata.trace_id) == (told.rows_sha256, told.source_sha256, one)
        yield Check(check, one, same, f"{where}, rows SHA-256 {digest[:12]}…, of a dump {source[:12]}…")
        if not same:
            return
        validate_trace(trace_parts(file), metadata)
    except (MalformedTrace, UnusableBundle, ContractViolation, OSError) as error:
        yield Check("trace keeps its contract", one, False, _reason(bundle, error))
        return
    yield Check("trace keeps its contract", one, True, f"{metadata.counts.rows:,} rows")
    files[one] = file


# Identities


def _aggregated(findings: Iterable[Finding]) -> Iterator[Check]:
    """One check per identity: over all its subjects, with the first that fails."""
    grouped: dict[tuple[str, bool], list[Finding]] = {}
    for one in findings:
        grouped.setdefault((one.identity, one.held is None), []).append(one)
    for (identity, impossible), found in grouped.items():
        if impossible:
            reasons = sorted({str(one.reason) for one in found})
            yield Check(identity, _subjects(found), None, _some(reasons, " and "))
            continue
        failed = [one for one in found if not one.held]
        if not failed:
            yield Check(identity, _subjects(found), True, f"{len(found)} of {len(found)}")
            continue
        first = failed[0]
        yield Check(
            identity, first.subject, False,
            f"{len(found) - len(failed)} of {len(found)}; wanted {_shown(first.wanted, first.found)}, found "
            f"{_shown(first.found, first.wanted)}",
        )  # fmt: skip


def _subjects(found: list[Finding]) -> str:
    return found[0].subject if len(found) == 1 else f"{len(found)} subjects"


def _shown(value: Any, other: Any) -> str:
    """A value for people; of two lists the first entry in which they differ."""
    if isinstance(value, list) and isinstance(other, list):
        if len(value) != len(other):
            return f"{len(value)} entries" + (f", first {value[0]}" if value else "")
        place = next((number for number, pair in enumerate(zip(value, other, strict=True)) if pair[0] != pair[1]), 0)
        return f"{value[place]!r:.80} at place {place}" if value else "nothing"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value!s:.120}"


def _some(texts: Iterable[Any], between: str = ", ") -> str:
    every = [str(one) for one in texts]
    return between.join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


# Simulated again


def _of_trace(trace: Trace, file: Path) -> Iterator[tuple[tuple[str, ...], Callable[[], tuple[pl.DataFrame, ...]]]]:
    """(tables, what computes them) of everything that is computed from one trace."""
    yield ("trace",), lambda: (trace_row(trace.metadata),)
    yield ("trace_check",), lambda: (check_rows(trace.metadata),)
    yield ("trace_locality",), lambda: (trace_locality(trace),)
    # The reporting block is answered from the hit rates in the order in which they are simulated.
    rates = functools.cache(lambda: hit_rates.hit_rate(trace))
    yield ("hit_rate", "hit_rate_layer"), rates
    yield ("reporting_block",), lambda: (reporting_block(trace, rates()[0]),)
    yield ("miss_ratio_curve",), lambda: (hit_rates.miss_ratio_curve(trace),)
    plan = functools.partial(recorded, file, trace)
    yield ("lookahead_recall", "lookahead_recall_missed"), lambda: lookahead_tables(trace, recorded_plan=plan())
    yield ("lookahead_benefit",), lambda: (lookahead_benefit(trace),)


def _simulated_again(
    tables: Mapping[str, pl.DataFrame], traces: Mapping[str, Trace], files: Mapping[str, Path], everything: bool
) -> Iterator[Check]:
    """Every table that is computed from traces, computed again: the same rows to the last bit."""
    check = "the same rows are simulated here"
    names = [
        name
        for name, table in TABLES.items()
        if table.key[0] == "trace_id" and name not in ("inversion", "domain_overlap")
    ]
    for trace_id in sorted({str(one) for name in names for one in tables[name]["trace_id"].unique()}):
        stored = {name: tables[name].filter(pl.col("trace_id") == trace_id) for name in names}
        if trace_id not in traces:
            why = f"trace {trace_id} is not at hand" if trace_id not in files else (
                f"trace {trace_id} is larger than {MOST_TRACE_BYTES:,} bytes; ask with --all"
            )  # fmt: skip
            yield Check(check, trace_id, None, why)
            continue
        for together, compute in _of_trace(traces[trace_id], files[trace_id]):
            if not any(stored[name].height for name in together):
                continue
            try:
                made = compute()
            except (UnusableRequest, ValueError, ArithmeticError) as error:
                yield Check(check, f"{together[0]} of {trace_id}", False, f"{' '.join(str(error).split())[:200]}")
                continue
            for name, frame in zip(together, made, strict=True):
                yield _same(check, f"{name} of {trace_id}", stored[name], frame, name)
    yield from _overlaps(tables["domain_overlap"], traces)
    if tables["inversion"].height:
        made_rows = inversion_rows(synthetic_trace())
        yield _same(check, "inversion", tables["inversion"], made_rows, "inversion")
    yield from _sweeps(tables["sweep"], traces, everything)


def _same(check: str, subject: str, stored: pl.DataFrame, made: pl.DataFrame, name: str) -> Check:
    key = TABLES[name].key
    stored, made = stored.sort(key), made.sort(key)
    if stored.equals(made):
        return Check(check, subject, True, f"{made.height:,} rows, all of them")
    if stored.height != made.height:
        return Check(check, subject, False, f"{stored.height:,} rows, wanted {made.height:,}")
    for column in stored.columns:
        differ = (~stored[column].eq_missing(made[column])).arg_true()
        if len(differ):
            place = int(differ[0])
            wanted, found = made[column][place], stored[column][place]
            return Check(
                check, subject, False,
                f"{column} in {len(differ):,} of {made.height:,} rows, first wanted {_shown(wanted, found)}, found "
                f"{_shown(found, wanted)}",
            )  # fmt: skip
    return Check(check, subject, False, "other rows")


def _overlaps(stored: pl.DataFrame, traces: Mapping[str, Trace]) -> Iterator[Check]:
    for first, other in stored.select("trace_id", "other_trace_id").unique().sort("trace_id", "other_trace_id").rows():
        check, subject = "the same rows are simulated here", f"domain_overlap of {first} and {other}"
        if first not in traces or other not in traces:
            yield Check(check, subject, None, "not both traces are at hand")
            continue
        sizes = [size for size in OVERLAP_TOP_EXPERTS if size < max(traces[first].metadata.experts_per_layer)]
        pair = (pl.col("trace_id") == first) & (pl.col("other_trace_id") == other)
        made = domain_overlap(traces[first], traces[other], top_experts=sizes)
        yield _same(check, subject, stored.filter(pair), made, "domain_overlap")


_RECOUNTED = (
    "selections", "accesses", "hits", "misses", "compulsory_misses", "capacity_misses", "demand_bytes", "miss_bytes",
    "preload_bytes", "warm_steps", "scored_steps", "scored_events", "step_begin", "step_end",
)  # fmt: skip


def _sweeps(stored: pl.DataFrame, traces: Mapping[str, Trace], everything: bool) -> Iterator[Check]:
    """Counts of a sweep's cells; its cells were asked for one by one, so each is asked for again."""
    for (trace_id,), rows in stored.sort("cell_hash").group_by("trace_id", maintain_order=True):
        check, subject = "the same counts are simulated here", f"sweep of {trace_id}"
        if trace_id not in traces:
            yield Check(check, subject, None, f"trace {trace_id} is not at hand")
            continue
        cells = [row for row in rows.to_dicts() if _is_repeatable(row)]
        if not cells:
            yield Check(check, subject, None, f"{rows.height:,} cells with a table of another file")
            continue
        if not everything and len(cells) > SAMPLE_CELLS:
            cells = [cells[place] for place in np.linspace(0, len(cells) - 1, SAMPLE_CELLS).round().astype(int)]
        wrong = []
        for row in cells:
            try:
                again = _again(traces[str(trace_id)], row)
            except (UnusableRequest, ValueError) as error:
                wrong.append(f"{row['cell_hash']}: {error}")
                continue
            wrong += [
                f"{row['cell_hash']}: {name} wanted {again[name]}, found {row[name]}"
                for name in _RECOUNTED
                if again[name] != row[name]
            ][:1]
        said = f"{len(cells) - len(wrong)} of {len(cells)} cells tried, of {rows.height:,}"
        yield Check(check, subject, not wrong, said + (f"; {wrong[0]}" if wrong else ""))


def _is_repeatable(row: Row) -> bool:
    fits = (row["fit"], (row["admission"] or "").partition(":top:")[0] or None, row["quota_fit"])
    return all(one is None or one == "same" or one.startswith("first:") for one in fits)


def _again(trace: Trace, row: Row) -> Row:
    window = Window(
        steps=(row["step_begin"], row["step_end"]), phase=row["phase"],
        warm_fraction=Fraction(str(row["warm_fraction"])), warm_pass=row["warm_pass"],
    )  # fmt: skip
    replay = prepare(trace, window, order=row["access_order"], dedup=row["dedup"], seed=row["seed"] or 0)
    layers = len(trace.metadata.moe_layer_ids)
    total = row["capacity_experts_total"]
    in_experts = total is not None
    experts = None if not in_experts else total // layers if row["scope"] == "layer" else total
    size = None
    if row["demand_bytes"] is not None and trace.metadata.sizes_of_layer(0) is None:
        size = row["demand_bytes"] // row["accesses"]
    choices = Choices(
        fit=row["fit"] or "same",
        admit=row["admission"],
        quota_fit=row["quota_fit"],
        # Null where the policy has none of either; then any value will do.
        pinned_fraction=Fraction(str(row["pinned_fraction"] or 0.5)),
        folios_per_expert=row["folios_per_expert"] or 1,
    )
    capacity = Capacity(experts=experts) if in_experts else Capacity(bytes=row["capacity_bytes"])
    cell = Cell(row["policy"], row["semantics"], capacity)
    (found,) = decide_cells(replay, [cell], scope=row["scope"], expert_bytes=size, choices=choices)
    return found.row


# Native results elsewhere


def _machines(tables: Mapping[str, pl.DataFrame]) -> Iterator[Check]:
    """What differs of the machines that were measured on: their numbers are not expected here."""
    runs = tables["replay_run"].height + tables["decode_run"].height
    if not runs:
        return
    here = machine_row(None)
    for row in tables["machine"].sort("machine_id").iter_rows(named=True):
        differ = [
            f"{name} {row[name]} (here {here[name]})"
            for name in ("architecture", "cpu_model", "cpus", "memory_bytes", "page_bytes", "kernel_release", "mglru",
                         "thp", "swap_bytes", "virtualization")
            if row[name] != here[name]
        ]  # fmt: skip
        of = f"{sum(row['machine_id'] == one for one in tables['replay_run']['machine_id'])} runs"
        said = "; ".join(differ) if differ else "nothing but its device, perhaps"
        yield Check(
            "native results are measured again", row["machine_id"], None,
            f"{of}; not repeated, what differs of that machine: {said}",
        )  # fmt: skip


def verified_text(path: Path, found: Verified) -> list[str]:
    """The checks as lines: those that failed first, then those that are not possible, then those that held."""
    manifest = found.manifest
    git = f", commit {manifest.git_commit}" if manifest.git_commit else ""
    lines = [
        f"{path}: made by {manifest.made_by!r}, expert-tier {manifest.expert_tier_version}{git}",
        "  " + ", ".join(f"{name} {value}" for name, value in manifest.environment.items()),
    ]
    for held in (False, None, True):
        chosen: dict[str, list[Check]] = {}
        for one in found.checks:
            if one.held is held:
                # Each that failed is a line of its own; of those that held, one for all of a kind.
                chosen.setdefault(one.check if held else f"{one.check} [{one.subject}]", []).append(one)
        if chosen:
            lines += ["", f"{_OUTCOMES[held]}: {found.count(held)}"]
            lines += [
                f"  {name}: " + (of[0].found if len(of) == 1 else f"{len(of)} of {len(of)}")
                for name, of in chosen.items()
            ]
    return [*lines, "", f"{found.count(True)} held, {found.count(False)} failed, {found.count(None)} not possible here"]


def verified_document(path: Path, found: Verified) -> Row:
    """The checks as one JSON document."""
    return {
        "bundle": str(path),
        "made_by": found.manifest.made_by,
        "expert_tier_version": found.manifest.expert_tier_version,
        "held": found.count(True),
        "failed": found.count(False),
        "not_possible": found.count(None),
        "checks": [
            {"check": one.check, "subject": one.subject, "held": one.held, "found": one.found} for one in found.checks
        ],
    }
