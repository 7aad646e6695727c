"""Assembles the Dagster project, and runs it in this process for the command line."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterExecutionInterruptedError

from pipeline.assets import OVER_TRACES, PER_TRACE, REPLAYS, TRACES, DataFolderResource
from pipeline.automation import (
    dumps_folder,
    nightly,
    over_traces_sensor,
    per_trace_job,
    replay_job,
    replays,
    with_automation,
)
from schemas.files import ENVIRONMENT_VARIABLE, DataFolder

DEFAULT_DATA = "data"


def configured_data() -> Path:
    """The configured data folder: EXPERT_TIER_DATA, else `data` in the current folder."""
    return Path(os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_DATA).resolve()


defs = dg.Definitions(
    assets=with_automation([*PER_TRACE, *REPLAYS, *OVER_TRACES]),
    jobs=[per_trace_job, replay_job],
    sensors=[dumps_folder, over_traces_sensor],
    schedules=[nightly, replays],
    resources={"data": DataFolderResource(root=str(configured_data()))},
    executor=dg.in_process_executor,
)


@dataclass(frozen=True)
class FailedAsset:
    """An asset that did not materialise: its key, its trace (null if it spans all), and why in one sentence."""

    name: str
    trace_id: str | None
    reason: str


def materialize_trace(data: DataFolder, trace_id: str) -> list[FailedAsset]:
    """Materialises one trace's assets; returns what failed.

    Runs are recorded where `dagster dev` in the same folder looks for them.
    """
    with _instance(data) as instance:
        instance.add_dynamic_partitions(TRACES.name or "", [trace_id])
        return _materialize_quietly(PER_TRACE, instance, data, trace_id)


def materialize_all(data: DataFolder) -> list[FailedAsset]:
    """Materialises what spans all traces; returns what failed."""
    with _instance(data) as instance:
        return _materialize_quietly(OVER_TRACES, instance, data, None)


def _materialize_quietly(
    selected: Sequence[dg.AssetsDefinition], instance: dg.DagsterInstance, data: DataFolder, trace_id: str | None
) -> list[FailedAsset]:
    result = _uninterrupted(
        [*PER_TRACE, *REPLAYS, *OVER_TRACES],
        selection=list(selected),
        partition_key=trace_id,
        instance=instance,
        resources={"data": DataFolderResource(root=str(data.root))},
        raise_on_error=False,
        # The events are stored; on a terminal they would bury the answer.
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
    )
    failures = []
    for event in result.all_events:
        if event.is_step_failure:
            data_of_failure = event.step_failure_data
            user = data_of_failure.user_failure_data
            error = data_of_failure.error
            cause = error.cause if error is not None and error.cause is not None else error
            # Dagster stores "module.Class: sentence"; the sentence is what was written for a person.
            sentence = re.sub(r"^[\w.]+: ", "", cause.message) if cause else "unknown"
            if cause is not None and cause.cls_name == "DagsterExecutionInterruptedError":
                sentence = cause.cls_name
            reason = user.description if user and user.description else sentence
            failures.append(FailedAsset(event.step_key or "?", trace_id, " ".join(reason.split())))
    if (not result.success and not failures) or any("DagsterExecutionInterrupted" in one.reason for one in failures):
        # Dagster catches signals itself and ends the run early; what comes after must not run on half the results.
        raise KeyboardInterrupt
    return failures


def _uninterrupted(*arguments: Any, **options: Any) -> dg.ExecuteInProcessResult:
    try:
        return dg.materialize(*arguments, **options)
    except DagsterExecutionInterruptedError:
        raise KeyboardInterrupt from None


def _instance(data: DataFolder) -> dg.DagsterInstance:
    if os.environ.get("DAGSTER_HOME"):
        return dg.DagsterInstance.get()
    if Path("dagster.yaml").is_file():
        return dg.DagsterInstance.from_config(".")
    home = data.root / ".dagster"
    home.mkdir(parents=True, exist_ok=True)
    return dg.DagsterInstance.local_temp(str(home), overrides={"telemetry": {"enabled": False}})
