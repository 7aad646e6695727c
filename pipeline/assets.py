"""Dagster assets: each reads, calls one pure function, validates, writes, and shows what it wrote.

An asset's key is its table's name. No analysis belongs here; nothing here decides when to run (`automation`).
"""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
from pydantic import Field

from pipeline import report as report_module
from pipeline.benefit import lookahead_benefit as simulate_lookahead_benefit
from pipeline.canonical import PARSER_VERSION
from pipeline.checks import (
    SCHEMA_CHECK,
    dump_check_result,
    dump_check_spec,
    proofs_check_result,
    proofs_check_spec,
    refused_dump_result,
    schema_check_result,
    schema_check_specs,
)
from pipeline.dumps.blocks import UNFINISHED, MalformedDump, RefusedDump
from pipeline.hit_rates import hit_rate as simulate_hit_rate
from pipeline.hit_rates import miss_ratio_curve as simulate_miss_ratio_curve
from pipeline.ingest import ingest, is_pattern, read_stored, read_user_metadata, trace_id_for
from pipeline.inversion import INPUTS, PARTITION, inversion_rows, stored_inversion, synthetic_trace
from pipeline.locality import OVERLAP_TOP_EXPERTS
from pipeline.locality import domain_overlap as measure_domain_overlap
from pipeline.locality import trace_locality as measure_trace_locality
from pipeline.lookahead import lookahead_tables
from pipeline.predictors import recorded
from pipeline.replays import AUTOMATIC, Conditions, pool_of, replay_all, usable_mechanism
from pipeline.reporting import reporting_block as answer_reporting_block
from pipeline.results import check_rows, trace_inputs, trace_row, write_result
from replayer.quantities import format_bytes
from replayer.trace import Trace, read_trace, trace_parts
from schemas.columns import COLUMNS
from schemas.files import ENVIRONMENT_VARIABLE, DataFolder
from schemas.tables import REPLAY_TABLES, TABLES
from schemas.trace import TraceMetadata, arrow_schema
from schemas.validation import ContractViolation, validate_trace
from warehouse.build import build_warehouse

TRACES = dg.DynamicPartitionsDefinition(name="traces")
DUMP_TAG = "expert_tier/dump"
HIT_RATE_TABLES = ("hit_rate", "hit_rate_layer")
RECALL_TABLES = ("lookahead_recall", "lookahead_recall_missed")


class DataFolderResource(dg.ConfigurableResource[DataFolder]):
    """The one configured data folder."""

    root: str = dg.EnvVar(ENVIRONMENT_VARIABLE)

    @property
    def folder(self) -> DataFolder:
        return DataFolder(Path(self.root).expanduser().resolve())


def dump_of(data: DataFolder, trace_id: str) -> Path:
    """The raw dump that becomes `trace_id`: where its trace says it was read, else the one in the dumps folder.

    Raises:
        MalformedDump: there is none.
    """
    if data.trace_file(trace_id).exists():
        source = read_stored(data, trace_id).source
        path = Path(source.folder) / source.file
        if path.exists() or is_pattern(path):
            return path
    for path in sorted(data.dumps.iterdir()) if data.dumps.is_dir() else ():
        if is_dump(path) and trace_id_for(path, data, read_user_metadata(path)) == trace_id:
            return path
    raise MalformedDump(f"{data.dumps}: no dump in it becomes trace {trace_id}; put it back, or delete the partition")


def is_dump(path: Path) -> bool:
    """Whether a file or folder in the dumps folder is meant as a dump: not hidden, not unfinished, no metadata."""
    is_there = path.is_file() or path.is_dir()
    return is_there and not path.name.startswith(".") and path.suffix not in (".toml", *UNFINISHED)


@dg.asset(
    partitions_def=TRACES,
    group_name="expert_tier",
    kinds={"parquet"},
    check_specs=[*schema_check_specs("routing"), dump_check_spec()],
    description="Canonical trace of one raw dump: one row per token position of one pass of one layer, validated.",
)
def routing(context: dg.AssetExecutionContext, data: DataFolderResource) -> Iterator[Any]:
    """Ingests the partition's dump unless its trace is there already."""
    folder, trace_id = data.folder, context.partition_key
    file = folder.trace_file(trace_id)
    if not file.exists() or read_stored(folder, trace_id).parser_version < PARSER_VERSION:
        named = context.run_tags.get(DUMP_TAG)
        dump: Path | None = None
        try:
            dump = folder.dumps / Path(named).name if named else dump_of(folder, trace_id)
            ingest(dump, folder, read_user_metadata(dump), trace_id=trace_id)
        except (ValueError, OSError) as error:
            if dump is not None and isinstance(error, MalformedDump | RefusedDump):
                yield refused_dump_result(error)
            # The reader of the run page needs the sentence, not where in our code it was raised.
            raise dg.Failure(description=str(error), allow_retries=False) from None
    metadata = read_stored(folder, trace_id)
    yield dump_check_result(metadata)
    yield _checked_trace(file, metadata)
    yield dg.MaterializeResult(metadata=_trace_metadata(file, metadata))


def _checked_trace(file: Path, metadata: TraceMetadata) -> dg.AssetCheckResult:
    try:
        validate_trace(trace_parts(file), metadata)
    except ContractViolation as error:
        return dg.AssetCheckResult(passed=False, check_name=SCHEMA_CHECK, metadata={"failures": str(error)})
    return dg.AssetCheckResult(passed=True, check_name=SCHEMA_CHECK, metadata={"rows": metadata.counts.rows})


def _trace_metadata(file: Path, metadata: TraceMetadata) -> dict[str, Any]:
    columns = [
        dg.TableColumn(field.name, str(field.type), COLUMNS[field.name].description if field.name in COLUMNS else None)
        for field in arrow_schema(metadata.top_k_observed)
    ]
    warnings = [f"- {check.name}: {check.found}" for check in metadata.checks if check.outcome == "warn"]
    return {
        "dagster/row_count": metadata.counts.rows,
        "dagster/column_schema": dg.TableSchema(columns),
        "bytes": file.stat().st_size,
        "selections": metadata.counts.selections,
        "accesses": metadata.counts.accesses,
        "steps": metadata.counts.steps,
        "unknown": ", ".join(metadata.unknowns) or "nothing",
        "warnings": dg.MetadataValue.md("\n".join(warnings) or "none"),
    }


@dg.multi_asset(
    name="hit_rates",
    specs=[
        dg.AssetSpec(
            name,
            deps=[routing],
            group_name="expert_tier",
            kinds={"parquet"},
            description=f"{said} {TABLES[name].grain}",
        )
        for name, said in (
            ("hit_rate", "Simulated hit rates at three capacities, with intervals and nulls."),
            ("hit_rate_layer", "The same layer by layer."),
        )
    ],
    partitions_def=TRACES,
    check_specs=[spec for name in HIT_RATE_TABLES for spec in schema_check_specs(name)],
    can_subset=False,
)
def hit_rates(context: dg.AssetExecutionContext, data: DataFolderResource) -> Iterator[Any]:
    """Simulates every policy once for both tables."""
    trace = read_trace(data.folder.trace_file(context.partition_key))
    frames = dict(zip(HIT_RATE_TABLES, simulate_hit_rate(trace), strict=True))
    for name, frame in frames.items():
        show = _show_hit_rates if name == "hit_rate" else _nothing
        partition, inputs = context.partition_key, trace_inputs(trace.metadata)
        yield from _written(data.folder, name, partition, frame, inputs, show, key=name)


@dg.asset(
    partitions_def=TRACES,
    deps=[routing, "hit_rate"],
    group_name="expert_tier",
    kinds={"parquet"},
    check_specs=schema_check_specs("reporting_block"),
    description=f"What a result has to be reported with (arXiv 2608.07911). {TABLES['reporting_block'].grain}",
)
def reporting_block(context: dg.AssetExecutionContext, data: DataFolderResource) -> Iterator[Any]:
    """Answers the block from the stored hit rates."""
    trace = read_trace(data.folder.trace_file(context.partition_key))
    frame = answer_reporting_block(trace, pl.read_parquet(data.folder.result_file("hit_rate", context.partition_key)))
    inputs = trace_inputs(trace.metadata)
    yield from _written(data.folder, "reporting_block", context.partition_key, frame, inputs, _nothing)


def _per_trace(
    name: str,
    compute: Callable[[Trace], pl.DataFrame],
    *,
    description: str,
    show: Callable[[pl.DataFrame], dict[str, Any]],
) -> dg.AssetsDefinition:
    """An asset that computes one table of one trace."""

    @dg.asset(
        name=name,
        partitions_def=TRACES,
        deps=[routing],
        group_name="expert_tier",
        kinds={"parquet"},
        check_specs=schema_check_specs(name),
        description=f"{description} {TABLES[name].grain}",
    )
    def computed(context: dg.AssetExecutionContext, data: DataFolderResource) -> Iterator[Any]:
        trace = read_trace(data.folder.trace_file(context.partition_key))
        frame = compute(trace)
        yield from _written(data.folder, name, context.partition_key, frame, trace_inputs(trace.metadata), show)

    return computed


def _written(
    folder: DataFolder,
    name: str,
    partition: str,
    frame: pl.DataFrame,
    inputs: dict[str, str],
    show: Callable[[pl.DataFrame], dict[str, Any]],
    key: str | None = None,
) -> Iterator[Any]:
    """The check and the result of a table; `key` names the asset where one function makes several."""
    table = TABLES[name]
    result = schema_check_result(frame, table)
    yield result
    if not result.passed:
        raise dg.Failure(description=str(result.metadata["failures"].value), allow_retries=False)
    file = write_result(folder, table, partition, frame, inputs)
    metadata = {**_frame_metadata(name, frame), "bytes": file.stat().st_size, **show(frame)}
    yield dg.MaterializeResult(asset_key=key, metadata=metadata)


def _frame_metadata(name: str, frame: pl.DataFrame) -> dict[str, Any]:
    columns = [dg.TableColumn(column.name, str(column.dtype), column.description) for column in TABLES[name].columns]
    return {"dagster/row_count": frame.height, "dagster/column_schema": dg.TableSchema(columns)}


def _picture(png: bytes) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(f"![plot](data:image/png;base64,{base64.b64encode(png).decode()})")


def _nothing(_frame: pl.DataFrame) -> dict[str, Any]:
    return {}


def _show_checks(checks: pl.DataFrame) -> dict[str, Any]:
    return {f"checks: {outcome.replace('_', ' ')}": rows for outcome, rows in checks["outcome"].value_counts().rows()}


def _show_hit_rates(rates: pl.DataFrame) -> dict[str, Any]:
    """Event-atomic per-layer rates at the middle capacity: numbers that Dagster plots over time."""
    chosen = rates.filter(pl.col("semantics") == "event_atomic", pl.col("scope") == "layer")
    capacities = chosen["capacity_experts_total"].unique().sort()
    middle = capacities[len(capacities) // 2]
    at_middle = chosen.filter(pl.col("capacity_experts_total") == middle)
    shown = {f"hit rate, {row['policy']}": row["hit_rate"] for row in at_middle.iter_rows(named=True)}
    return {"capacity of the hit rates, experts": middle, **shown}


def _show_curve(curve: pl.DataFrame) -> dict[str, Any]:
    return {"plot": _picture(report_module.curve_png(curve))}


def _show_recall(recall: pl.DataFrame) -> dict[str, Any]:
    totals = recall.filter(pl.col("layer_id").is_null(), pl.col("predictor") == "previous_token")
    return {"recall, previous token": totals["recall_all"][0], "plot": _picture(report_module.recall_png(recall))}


def _show_locality(locality: pl.DataFrame) -> dict[str, Any]:
    total = locality.filter(pl.col("layer_id").is_null()).row(0, named=True)
    shown = {"W_1": total["w1_reuse_ratio"], "chance of W_1": total["chance_ratio"]}
    return {**shown, "plot": _picture(report_module.locality_png(locality))}


trace = _per_trace(
    "trace", lambda read: trace_row(read.metadata), description="What a trace is and what is unknown.", show=_nothing
)
trace_check = _per_trace(
    "trace_check",
    lambda read: check_rows(read.metadata),
    description="How its dump fared in every check.",
    show=_show_checks,
)
trace_locality = _per_trace(
    "trace_locality", measure_trace_locality, description="Reuse, skew and coverage with nulls.", show=_show_locality
)
miss_ratio_curve = _per_trace(
    "miss_ratio_curve", simulate_miss_ratio_curve, description="Simulated curves per policy.", show=_show_curve
)

lookahead_benefit = _per_trace(
    "lookahead_benefit",
    lambda read: simulate_lookahead_benefit(read),
    description="What plans would have saved, simulated.",
    show=_nothing,
)


@dg.multi_asset(
    name="lookahead",
    specs=[
        dg.AssetSpec(
            name,
            deps=[routing],
            group_name="expert_tier",
            kinds={"parquet"},
            description=f"{said} {TABLES[name].grain}",
        )
        for name, said in (
            ("lookahead_recall", "Recall of nine predictors beside their nulls."),
            ("lookahead_recall_missed", "The same on the accesses that can pay."),
        )
    ],
    partitions_def=TRACES,
    check_specs=[spec for name in RECALL_TABLES for spec in schema_check_specs(name)],
    can_subset=False,
)
def lookahead(context: dg.AssetExecutionContext, data: DataFolderResource) -> Iterator[Any]:
    """Makes every plan once for both tables."""
    file = data.folder.trace_file(context.partition_key)
    trace = read_trace(file)
    frames = dict(zip(RECALL_TABLES, lookahead_tables(trace, recorded_plan=recorded(file, trace)), strict=True))
    for name, frame in frames.items():
        show = _show_recall if name == "lookahead_recall" else _nothing
        partition, inputs = context.partition_key, trace_inputs(trace.metadata)
        yield from _written(data.folder, name, partition, frame, inputs, show, key=name)


@dg.asset(
    deps=[routing],
    group_name="expert_tier",
    kinds={"parquet"},
    check_specs=schema_check_specs("domain_overlap"),
    description=f"How far traces of one model shape share their top experts. {TABLES['domain_overlap'].grain}",
)
def domain_overlap(data: DataFolderResource) -> Iterator[Any]:
    """Compares every pair of traces of one shape."""
    folder = data.folder
    everything = {trace_id: read_stored(folder, trace_id) for trace_id in folder.trace_ids()}
    superseded = {metadata.supersedes for metadata in everything.values()}
    ids = [trace_id for trace_id in everything if trace_id not in superseded]
    frames = [TABLES["domain_overlap"].frame([])]
    for ordinal, first in enumerate(ids):
        mine = everything[first]
        # The same dump under other metadata says nothing of domains.
        alike = [
            other
            for other in ids[ordinal + 1 :]
            if _shape(everything[other]) == _shape(mine) and everything[other].source.sha256 != mine.source.sha256
        ]
        if alike:
            one = read_trace(folder.trace_file(first))
            # A set of all experts of a layer overlaps with any other by definition.
            sizes = [size for size in OVERLAP_TOP_EXPERTS if size < max(mine.experts_per_layer)]
            frames += [
                measure_domain_overlap(one, read_trace(folder.trace_file(other)), top_experts=sizes) for other in alike
            ]
    yield from _written(folder, "domain_overlap", "all", pl.concat(frames), {"traces": ",".join(ids)}, _nothing)


def _shape(metadata: TraceMetadata) -> tuple[list[int], list[int]]:
    return metadata.moe_layer_ids, metadata.experts_per_layer


@dg.asset(
    group_name="expert_tier",
    kinds={"parquet"},
    check_specs=schema_check_specs("inversion"),
    description=f"Why LRU falls under a static table at tiny budgets, reconstructed. {TABLES['inversion'].grain}",
)
def inversion(data: DataFolderResource) -> Iterator[Any]:
    """Replays a synthetic trace both ways; a result of this version stays as it is."""
    rows = stored_inversion(data.folder)
    if rows is None:
        rows = inversion_rows(synthetic_trace())
    yield from _written(data.folder, "inversion", PARTITION, rows, INPUTS, _nothing)


class ReplayConfig(dg.Config):
    """What to replay natively. Shares are of the pool's bytes; null steps are all."""

    owners: list[str] = Field(default=["page_cache"])
    capacity_shares: list[float] = Field(default=[0.25, 0.5, 0.75])
    mechanism: str = AUTOMATIC
    steps: str | None = None
    device: str = "cpu"
    repeats: int = 1
    pool: str | None = None
    expert_bytes: int | None = None


_REPLAY_DESCRIPTIONS = {
    "replay_run": "Native replays against a pool of files, with memory limited where the machine allows it.",
    "replay_step": "What each step of a native replay read, waited for and left resident.",
    "replay_reclaim": "What the kernel counted of reclaim, faults and pressure in each step and in the whole pass.",
    "replay_delivery": "What became of the hints of a lookahead plan.",
    "replay_node": "What each memory node of the machine held when a native replay ended.",
    "replay_layer": "Measured residency of each layer's accesses, beside the simulated one.",
    "replay_proof": "What each native replay was held against.",
    "pool": "The files that were replayed against.",
    "machine": "What the runs were measured on.",
}


@dg.multi_asset(
    name="native_replay",
    specs=[
        dg.AssetSpec(
            name,
            deps=[routing],
            group_name="expert_tier",
            kinds={"parquet"},
            description=f"{_REPLAY_DESCRIPTIONS[name]} {TABLES[name].grain}",
        )
        for name in REPLAY_TABLES
    ],
    partitions_def=TRACES,
    check_specs=[*(spec for name in REPLAY_TABLES for spec in schema_check_specs(name)), proofs_check_spec()],
    can_subset=False,
    # Exclusive by dagster.yaml: two replays would measure each other.
    pool="replay",
)
def native_replay(context: dg.AssetExecutionContext, data: DataFolderResource, config: ReplayConfig) -> Iterator[Any]:
    """Replays the partition's trace in processes of their own; every run appends, whatever its proofs say."""
    folder, trace_id = data.folder, context.partition_key
    runs: list[dict[str, Any]] = []
    try:
        wanted = Conditions(
            **config.model_dump(include={"owners", "capacity_shares", "mechanism", "steps", "device", "repeats"})
        )
        place = Path(config.pool).expanduser() if config.pool else None
        pool = pool_of(folder, trace_id, folder=place, expert_bytes=config.expert_bytes)
        mechanism, reason = usable_mechanism(wanted.mechanism)
        context.log.info(f"pool {pool.folder}, mechanism {mechanism}{f': {reason}' if reason else ''}")
        for documents in replay_all(folder, trace_id, pool, wanted):
            runs += documents
    except (ValueError, OSError) as error:
        raise dg.Failure(description=str(error), allow_retries=False) from None
    files = {
        name: [folder.run_file(name, trace_id, run["run_id"]) for run in runs]
        for name in REPLAY_TABLES
        if "run_id" in TABLES[name].key
    }
    for name in ("pool", "machine"):
        files[name] = sorted({folder.result_file(name, run[f"{name}_id"]) for run in runs})
    for name, written in files.items():
        frame = pl.concat([pl.read_parquet(file) for file in written])
        result = schema_check_result(frame, TABLES[name])
        yield result
        if not result.passed:
            raise dg.Failure(description=str(result.metadata["failures"].value), allow_retries=False)
        size = sum(file.stat().st_size for file in written)
        shown = _show_runs(runs) if name == "replay_run" else {}
        yield dg.MaterializeResult(asset_key=name, metadata={**_frame_metadata(name, frame), "bytes": size, **shown})
    yield proofs_check_result(runs)


def _show_runs(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Measured beside simulated, a run a line; as a number for Dagster to plot, the runs that are valid."""
    lines = ["| run | owner | capacity | device bytes, measured | LRU miss bytes at its residency, simulated | bytes |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {run['run_id']} | {run['owner']} | {_bytes_text(run['capacity_bytes'])} | "
        f"{_bytes_text(run['device_bytes'])} | {_bytes_text(run['resident_miss_bytes'])} | "
        f"{'valid' if run['bytes_valid'] else 'NOT valid'} |"
        for run in runs
    ]
    return {"valid runs": sum(run["bytes_valid"] for run in runs), "runs": dg.MetadataValue.md("\n".join(lines))}


def _bytes_text(size_bytes: int | None) -> str:
    return "—" if size_bytes is None else format_bytes(size_bytes)


@dg.asset(
    deps=[
        trace,
        trace_check,
        trace_locality,
        *HIT_RATE_TABLES,
        reporting_block,
        miss_ratio_curve,
        *RECALL_TABLES,
        "lookahead_benefit",
        domain_overlap,
        inversion,
        *REPLAY_TABLES,
    ],
    group_name="expert_tier",
    kinds={"duckdb"},
    description="All tables in one DuckDB file, built aside and replaced at once, so readers never block the writer.",
)
def warehouse(data: DataFolderResource) -> dg.MaterializeResult[None]:
    """Builds the DuckDB file."""
    folder = data.folder
    rows = build_warehouse(folder.root)
    return dg.MaterializeResult(metadata={"bytes": folder.warehouse.stat().st_size, **rows})


@dg.asset(
    deps=[warehouse], group_name="expert_tier", kinds={"html"}, description="The answer as one page, made offline."
)
def report(data: DataFolderResource) -> dg.MaterializeResult[None]:
    """Writes the page."""
    file = report_module.write_report(data.folder.root)
    return dg.MaterializeResult(metadata={"bytes": file.stat().st_size, "path": dg.MetadataValue.path(str(file))})


PER_TRACE = (
    routing,
    trace,
    trace_check,
    trace_locality,
    hit_rates,
    reporting_block,
    miss_ratio_curve,
    lookahead,
    lookahead_benefit,
)
REPLAYS = (native_replay,)
OVER_TRACES = (domain_overlap, inversion, warehouse, report)
