"""When the graph runs: a sensor on the dumps folder, a nightly schedule, and conditions for what spans all traces.

Native replays need a quiet machine and append, so nothing here starts one unless somebody turns its schedule on.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import dagster as dg

from pipeline.assets import DUMP_TAG, OVER_TRACES, PER_TRACE, REPLAYS, TRACES, DataFolderResource, inversion, is_dump
from pipeline.dumps.blocks import UNFINISHED
from pipeline.ingest import metadata_file, read_user_metadata, trace_id_for
from pipeline.replays import unreplayed_traces
from pipeline.results import stale_traces
from schemas.files import DataFolder

NIGHTLY = "0 3 * * *"
MAX_NEW_PER_TICK = 20
MAX_BYTES_PER_TICK = 10 * 2**30
"""Dumps and bytes hashed per tick (one dump at least), so that a tick ends within the 60 s that Dagster gives it."""

per_trace_job = dg.define_asset_job(
    "per_trace", selection=dg.AssetSelection.assets(*PER_TRACE), partitions_def=TRACES,
    description="One dump, from raw file to its tables.",
)  # fmt: skip
replay_job = dg.define_asset_job(
    "replay", selection=dg.AssetSelection.assets(*REPLAYS), partitions_def=TRACES,
    description="Native replays of one trace: pool, memory limit, measured runs. Wants a quiet machine.",
)  # fmt: skip


def new_dumps(folder: DataFolder, cursor: str | None) -> tuple[list[tuple[str, str]], str, list[str]]:
    """(trace_id, file name) of dumps that are complete and not seen yet, the next cursor, and what is waited for.

    A dump counts as complete once size and time of last change are what they were at the tick before; a folder, which
    is one dump, once that holds for everything in it and nothing in it is named as an unfinished copy.
    """
    seen: dict[str, list[object]] = json.loads(cursor) if cursor else {}
    now: dict[str, list[object]] = {}
    found: list[tuple[str, str]] = []
    hashed_bytes = 0
    waiting: list[str] = []
    for path in sorted(folder.dumps.iterdir()) if folder.dumps.is_dir() else ():
        if not is_dump(path):
            continue
        beside = metadata_file(path)
        watched = [path] if beside is None else [path, beside]
        try:
            state = [_state(file) for file in watched]
        except OSError:
            # Gone since it was listed.
            continue
        if None in state:
            waiting.append(path.name)
            continue
        before = seen.get(path.name)
        if before is None or before[0] != state:
            now[path.name] = [state, False]
            waiting.append(path.name)
        elif before[1] or len(found) >= MAX_NEW_PER_TICK or hashed_bytes >= MAX_BYTES_PER_TICK:
            now[path.name] = before
        else:
            now[path.name] = [state, True]
            try:
                hashed_bytes += _stored_bytes(path)
                trace_id = trace_id_for(path, folder, read_user_metadata(path))
                # Ids end in the hash: the same dump under two names in one tick is still one trace.
                if not any(other.rsplit("-")[-1] == trace_id.rsplit("-")[-1] for other, _ in found):
                    found.append((trace_id, path.name))
            except (ValueError, OSError) as error:
                waiting.append(f"{path.name}: {error}")
    return found, json.dumps(now), waiting


def _state(path: Path) -> list[object] | None:
    """What changes when the dump does; null for a folder that is empty or still being filled."""
    found = path.stat()
    if not path.is_dir():
        return [found.st_size, found.st_mtime_ns]
    digest, files = hashlib.sha256(), 0
    for entry in sorted(path.iterdir()):
        if entry.suffix in UNFINISHED:
            return None
        of_entry = entry.lstat()
        digest.update(f"{entry.name}\0{of_entry.st_size}\0{of_entry.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
        files += 1
    return [files, digest.hexdigest()] if files else None


def _stored_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


@dg.sensor(
    job=per_trace_job,
    minimum_interval_seconds=10,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Dumps dropped into data/dumps become partitions and are carried through.",
)
def dumps_folder(context: dg.SensorEvaluationContext, data: DataFolderResource) -> dg.SensorResult:
    """Requests a run for every new complete dump."""
    found, cursor, waiting = new_dumps(data.folder, context.cursor)
    if not found:
        reason = f"waiting for: {', '.join(waiting)}" if waiting else "no new dump"
        return dg.SensorResult(skip_reason=reason, cursor=cursor)
    return dg.SensorResult(
        dynamic_partitions_requests=[TRACES.build_add_request([trace_id for trace_id, _ in found])],
        run_requests=[
            dg.RunRequest(run_key=f"{trace_id}:{name}", partition_key=trace_id, tags={DUMP_TAG: name})
            for trace_id, name in found
        ],
        cursor=cursor,
    )


@dg.schedule(
    job=per_trace_job,
    cron_schedule=NIGHTLY,
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Re-runs analyses of traces that are new, changed, or made by an older parser or analysis.",
)
def nightly(context: dg.ScheduleEvaluationContext, data: DataFolderResource) -> Iterator[dg.RunRequest]:
    """Requests a run for every stale trace."""
    stale = list(stale_traces(data.folder))
    context.instance.add_dynamic_partitions(TRACES.name or "", [trace.trace_id for trace in stale])
    for trace in stale:
        yield dg.RunRequest(partition_key=trace.trace_id, tags={"expert_tier/reason": trace.reason[:200]})


@dg.schedule(
    job=replay_job,
    cron_schedule="0 4 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Off unless turned on: replays traces natively that never were, where sizes or a pool are there.",
)
def replays(context: dg.ScheduleEvaluationContext, data: DataFolderResource) -> Iterator[dg.RunRequest]:
    """Requests a run for every trace without a native one."""
    waiting = unreplayed_traces(data.folder)
    context.instance.add_dynamic_partitions(TRACES.name or "", waiting)
    for trace_id in waiting:
        yield dg.RunRequest(partition_key=trace_id)


# A refused dump leaves a partition that never materialises; it must not keep the others from the warehouse.
# A native replay may run for hours, and must not keep them all.
_IN_PROGRESS = dg.AutomationCondition.any_deps_in_progress()
_WHEN_UPSTREAM_CHANGES = (
    dg.AutomationCondition.eager()
    .without(~dg.AutomationCondition.any_deps_missing())
    .replace(_IN_PROGRESS, _IN_PROGRESS.ignore(dg.AssetSelection.assets(*REPLAYS)))
)


# It has nothing upstream, and costs nothing while its version is the current one.
_WHEN_MISSING_AND_NIGHTLY = dg.AutomationCondition.on_cron(NIGHTLY) | (
    dg.AutomationCondition.missing()
    & ~dg.AutomationCondition.in_progress()
    & ~dg.AutomationCondition.execution_failed()
)


def with_automation(assets: Sequence[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """The assets that span all traces, made again whenever something upstream is; what has no upstream, each night."""

    def automated(asset: dg.AssetsDefinition) -> dg.AssetsDefinition:
        condition = _WHEN_MISSING_AND_NIGHTLY if asset is inversion else _WHEN_UPSTREAM_CHANGES
        return asset.map_asset_specs(lambda spec: spec.replace_attributes(automation_condition=condition))

    return [automated(asset) if asset in OVER_TRACES else asset for asset in assets]


over_traces_sensor = dg.AutomationConditionSensorDefinition(
    "over_traces",
    target=dg.AssetSelection.assets(*OVER_TRACES),
    minimum_interval_seconds=15,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
