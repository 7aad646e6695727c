"""Writes the routes a decode took in the open dump format (README, version 1), as JSON lines.

In: header facts and passes. Out: one file, complete or not there. Who decodes does not belong here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.files import publish

FORMAT = "expert-tier-routes"
MOST_ROWS = 4096
"""Of one record, so that a line stays far below the 4 MiB that a reader takes."""


class RoutedLayer(NamedTuple):
    """One layer of one pass: expert_ids (N, K); weights (N, K); predicted: (N, M), null without a prediction."""

    layer_id: int
    expert_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    predicted: npt.NDArray[np.int32] | None


class RoutedPass(NamedTuple):
    """One forward pass over tokens that begin at a position; `phase` is prefill or decode."""

    phase: str
    first_position: int
    layers: Sequence[RoutedLayer]


def write_routes(target: Path, top_k: int, facts: Mapping[str, Any], passes: Iterable[RoutedPass]) -> None:
    """Publishes the dump; `facts` are further keys of its header.

    Raises:
        OSError: it cannot be written; nothing of it is left then.
    """
    records = 0
    with publish(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(_line({"format": FORMAT, "version": 1, "top_k": top_k, **facts}))
        for step_id, one in enumerate(passes):
            for layer in one.layers:
                for begin in range(0, len(layer.expert_ids), MOST_ROWS):
                    rows = slice(begin, begin + MOST_ROWS)
                    count = len(layer.expert_ids[rows])
                    record = {
                        "step_id": step_id,
                        "phase": one.phase,
                        "layer_id": layer.layer_id,
                        "token_position": list(range(one.first_position + begin, one.first_position + begin + count)),
                        "expert_ids": layer.expert_ids[rows].tolist(),
                        "router_weights": [[round(float(weight), 6) for weight in row] for row in layer.weights[rows]],
                    }
                    if layer.predicted is not None:
                        record["predicted_expert_ids"] = layer.predicted[rows].tolist()
                    file.write(_line(record))
                    records += 1
        file.write(_line({"end": True, "records": records}))


def is_routes(path: Path) -> bool:
    """Whether a file begins as `write_routes` begins it.

    Raises:
        OSError: it cannot be read.
    """
    start = _line({"format": FORMAT})[:-2].encode()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"
