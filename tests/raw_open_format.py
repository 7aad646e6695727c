"""The open dump format written by code that shares nothing with its reader: README's specification in its words."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.raw_dumps import random_routes

HEADER = {"format": "expert-tier-routes", "version": 1}


def open_jsonl(header: dict, records: list[dict], *, end: dict | None = None) -> bytes:
    """Header, records, closing line."""
    lines = [{**HEADER, **header}, *records, {"end": True, "records": len(records)} if end is None else end]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def open_parquet(header: dict, records: list[dict], **types: pa.DataType) -> bytes:
    """A row per row of the records (those of JSON lines); `types` in the place of the widest ones."""
    kinds = {
        "step_id": pa.int64(), "pass_id": pa.int64(), "request_id": pa.int64(), "token_position": pa.int64(),
        "phase": pa.string(), "pass_kind": pa.string(), "layer_id": pa.int64(), "expert_ids": pa.list_(pa.int64()),
        "router_weights": pa.list_(pa.float64()), "predicted_expert_ids": pa.list_(pa.int64()), **types,
    }  # fmt: skip
    rows = []
    for record in records:
        for number in range(len(record["expert_ids"])):
            rows.append(
                {
                    name: value[number] if isinstance(value, list) else value
                    for name, value in record.items()
                    if value is not None
                }
            )
    names = [name for name in kinds if any(name in row for row in rows)]
    columns = [pa.array([row.get(name) for row in rows]).cast(kinds[name]) for name in names]
    metadata = {"expert_tier_routes": json.dumps({**HEADER, **header})}
    table = pa.Table.from_arrays(columns, names=names).replace_schema_metadata(metadata)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=7)
    return buffer.getvalue()


_RECORDS = [
    {
        "step_id": step, "layer_id": layer, "phase": "decode", "request_id": [0], "token_position": [step],
        "expert_ids": [ids], "router_weights": [[0.5, 0.25]],
    }
    for step, token in enumerate(random_routes(24, 3, 16, 2, seed=5))
    for layer, ids in enumerate(token)
]  # fmt: skip

SEEDS = {
    "open_jsonl": open_jsonl({"top_k": 2, "num_experts": 16}, _RECORDS),
    "open_parquet": open_parquet({"top_k": 2, "num_experts": 16}, _RECORDS),
}
"""By layout, a small sound dump for whoever damages it."""
