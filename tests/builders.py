"""Builds small valid traces by hand, in memory and as Parquet files. No test cases live here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from replayer.plan import Plan
from replayer.trace import Trace
from schemas.trace import METADATA_KEY, PHASE_CODES, SCHEMA_VERSION, TraceMetadata, arrow_schema

Routing = npt.NDArray[np.integer[Any]] | Sequence[Sequence[Sequence[Sequence[int]]]]
"""Array [steps, layers, k] of one-row events, or steps → layers → rows → ids (a layer without rows has no event)."""


def make_trace(
    expert_ids: Routing,
    *,
    phases: Sequence[str] | None = None,
    layer_ids: Sequence[int] | None = None,
    num_experts: int | Sequence[int] | None = None,
    expert_bytes: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
    rank_known: bool = True,
    trace_id: str = "tiny",
) -> Trace:
    """A trace in memory with metadata to match.

    `phases` names one phase per step (`unknown`); `layer_ids` the model's layer numbers (0..L−1); `num_experts` is one
    number or one per layer (the largest id + 1); `expert_bytes` one size, one per layer, or one list per layer.
    """
    events = _events_of_array(expert_ids) if isinstance(expert_ids, np.ndarray) else _events_of_lists(expert_ids)
    num_steps, num_layers = len(expert_ids), len(expert_ids[0])
    step_phases = ["unknown"] * num_steps if phases is None else list(phases)
    if len(step_phases) != num_steps:
        raise ValueError(f"{len(step_phases)} phases for {num_steps} steps")
    event_phase = np.array([PHASE_CODES[phase] for phase in step_phases], dtype=np.int8)[events.step]
    rows_of_phase = np.bincount(event_phase, weights=np.diff(events.first_row), minlength=len(PHASE_CODES))
    experts_per_layer = _experts_per_layer(num_experts, int(events.ids.max()) + 1, num_layers)
    metadata = _metadata(
        trace_id=trace_id,
        layer_ids=list(range(num_layers)) if layer_ids is None else list(layer_ids),
        experts_per_layer=experts_per_layer,
        top_k=events.ids.shape[1],
        expert_bytes=[expert_bytes] * num_layers if isinstance(expert_bytes, int) else expert_bytes,
        rank_known=rank_known,
        counts={
            "rows": len(events.ids),
            "events": len(events.step),
            "steps": num_steps,
            "requests": 1,
            "selections": events.ids.size,
            "accesses": events.accesses,
            "accepted_tokens": sum(phase in ("decode", "unknown") for phase in step_phases),
            "rows_by_phase": {name: int(rows_of_phase[code]) for name, code in PHASE_CODES.items()},
            "dropped_rows": {},
        },
    )
    return Trace(
        metadata=metadata,
        event_layer=events.layer.astype(np.int32),
        event_step=events.step.astype(np.int64),
        event_phase=event_phase,
        event_first_row=events.first_row.astype(np.int64),
        expert_ids=events.ids.astype(np.uint16),
        layer_first_object=np.concatenate([[0], np.cumsum(experts_per_layer)]).astype(np.int64),
    )


class _Events(NamedTuple):
    step: npt.NDArray[np.integer[Any]]
    layer: npt.NDArray[np.integer[Any]]
    first_row: npt.NDArray[np.integer[Any]]
    ids: npt.NDArray[np.integer[Any]]
    accesses: int


def _events_of_array(expert_ids: npt.NDArray[np.integer[Any]]) -> _Events:
    num_steps, num_layers, top_k = expert_ids.shape
    step, layer = np.divmod(np.arange(num_steps * num_layers), num_layers)
    return _Events(step, layer, np.arange(len(step) + 1), expert_ids.reshape(-1, top_k), expert_ids.size)


def _events_of_lists(steps: Sequence[Sequence[Sequence[Sequence[int]]]]) -> _Events:
    events = [
        (step, layer, rows) for step, layers in enumerate(steps) for layer, rows in enumerate(layers) if len(rows)
    ]
    return _Events(
        step=np.array([step for step, _, _ in events]),
        layer=np.array([layer for _, layer, _ in events]),
        first_row=np.cumsum([0, *(len(rows) for _, _, rows in events)]),
        ids=np.array([row for _, _, rows in events for row in rows]),
        accesses=sum(len({expert for row in rows for expert in row}) for _, _, rows in events),
    )


def _experts_per_layer(num_experts: int | Sequence[int] | None, observed: int, num_layers: int) -> list[int]:
    if num_experts is None or isinstance(num_experts, int):
        return [num_experts or observed] * num_layers
    return [int(one) for one in num_experts]


def _metadata(
    *,
    trace_id: str,
    layer_ids: list[int],
    experts_per_layer: list[int],
    top_k: int,
    expert_bytes: Any,
    rank_known: bool,
    counts: dict[str, Any],
) -> TraceMetadata:
    return TraceMetadata.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "trace_id": trace_id,
            "supersedes": None,
            "model": "tiny-moe",
            "engine": None,
            "domain": None,
            "capture_method": None,
            "hidden_layers": None,
            "moe_layer_ids": layer_ids,
            "layer_base": "declared",
            "experts_per_layer": experts_per_layer,
            "num_experts_source": "declared",
            "top_k_model": top_k,
            "top_k_observed": top_k,
            "expert_bytes": expert_bytes,
            "id_space": "logical",
            "weight_kind": "absent",
            "rank_known": rank_known,
            "pass_boundaries": "recorded",
            "source": {
                "file": f"{trace_id}.npz",
                "folder": "/dumps",
                "format": "npz_experts",
                "bytes": 1,
                "sha256": "0" * 64,
            },
            "user_metadata": {},
            "parser_version": 1,
            "counts": counts,
            "checks": [],
            "engine_observations": [],
        }
    )


def canonical_table(trace: Trace) -> pa.Table:
    """The rows of `trace` as a canonical Arrow table with its metadata, built without the pipeline's writer."""
    rows_per_event = np.diff(trace.event_first_row)
    phase_names = list(PHASE_CODES)
    layer_ids = np.array(trace.metadata.moe_layer_ids)[trace.event_layer]
    num_rows = len(trace.expert_ids)
    schema = arrow_schema(trace.top_k)
    columns = {
        "event_id": np.repeat(np.arange(len(rows_per_event)), rows_per_event),
        "row_in_event": np.concatenate([np.arange(rows) for rows in rows_per_event]),
        "step_id": np.repeat(trace.event_step, rows_per_event),
        "request_id": np.zeros(num_rows, dtype=np.int64),
        "token_position": [None] * num_rows,
        "phase": [phase_names[code] for code in np.repeat(trace.event_phase, rows_per_event)],
        "pass_kind": ["normal"] * num_rows,
        "layer_id": np.repeat(layer_ids, rows_per_event),
        "expert_ids": trace.expert_ids.tolist(),
        "router_weights": [None] * num_rows,
        "predicted_expert_ids": [None] * num_rows,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    stored = {METADATA_KEY: trace.metadata.model_dump_json().encode()}
    return pa.Table.from_arrays(arrays, schema=schema.with_metadata(stored))


def write_trace(trace: Trace, path: Path) -> Path:
    """Writes `trace` as a canonical Parquet file and gives the path back."""
    pq.write_table(canonical_table(trace), path)
    return path


def plan_of(predictions: list[list[int] | None]) -> Plan:
    """A plan from one list of experts per event; null is not covered."""
    lengths = [len(named or []) for named in predictions]
    return Plan(
        covered=np.array([named is not None for named in predictions]),
        issued_after=np.array([-1 if named is None else event - 1 for event, named in enumerate(predictions)]),
        first_id=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        expert_ids=np.array([expert for named in predictions for expert in named or []], dtype=np.uint16),
    )


def predictions_of(plan: Plan) -> list[list[int] | None]:
    bounds = plan.first_id.tolist()
    return [
        plan.expert_ids[begin:end].tolist() if covered else None
        for covered, begin, end in zip(plan.covered.tolist(), bounds, bounds[1:], strict=False)
    ]
