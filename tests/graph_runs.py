"""What the tests of the graph do with it: a dump dropped, its partition and everything materialised."""

from pathlib import Path

from pipeline.definitions import FailedAsset, materialize_all, materialize_trace
from schemas.files import DataFolder
from tests.raw_dumps import random_routes, route_csv_dump


def materialize(data: DataFolder, trace_ids: list[str]) -> list[FailedAsset]:
    return [failure for trace_id in trace_ids for failure in materialize_trace(data, trace_id)] + materialize_all(data)


def drop(data: DataFolder, name: str, seed: int = 0, content: bytes | None = None) -> Path:
    data.dumps.mkdir(parents=True, exist_ok=True)
    prefill, decode = random_routes(4, 3, 16, 2, seed), random_routes(40, 3, 16, 2, seed + 1)
    path = data.dumps / name
    path.write_bytes(
        route_csv_dump(prefill, decode, experts=16, expert_bytes=[8192] * 3) if content is None else content
    )
    return path
