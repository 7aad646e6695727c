"""What decodes leave in a data folder: rows of `decode_run`, `decode_layer` and `decode_pair`, made and written.

A decode's time holds compute, so it is no row of `replay_run`. Who decodes, and what a pair says, do not belong here.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replayer.replay_cli import write_rows
from replayer.token_identity import Arm, void
from schemas.files import DataFolder

if TYPE_CHECKING:
    from replayer.decode import DecodeRun
    from replayer.decoder import Decoder

_OF_THE_RUN = (
    "run_id", "started_at", "condition_hash", "pool_id", "machine_id", "replayer_version", "bytes_valid",
    "bytes_reasons", "time_valid", "time_reasons", "owner", "policy", "mechanism", "threads", "warm_pass",
    "capacity_bytes", "wall_bytes", "accesses", "demand_bytes", "device_bytes",
)  # fmt: skip


def told_of(model: Path, prompt: Path, prompt_ids: Sequence[int], tokens: int, family: str) -> dict[str, Any]:
    """Columns that say what was decoded, of runs and pairs alike; only names of places, not the places."""
    return {
        "model": family,
        "model_folder": _name(model.resolve()),
        "prompt_name": _name(prompt),
        "prompt_sha256": hashlib.sha256(np.array(prompt_ids, dtype="<u4").tobytes()).hexdigest(),
        "decoded_tokens": tokens,
    }


def run_row(told: dict[str, Any], decoder: "Decoder", one: "DecodeRun", prompt_tokens: int) -> dict[str, Any]:
    """The row of `decode_run`."""
    passes = len(one.decoded.token_ids) - 1
    return {
        **{name: one.run.run[name] for name in _OF_THE_RUN},
        **told,
        "computed_by": decoder.computed_by,
        "compute_dtype": str(decoder.dtype).removeprefix("torch."),
        "prompt_tokens": prompt_tokens,
        "degenerate": one.degenerate,
        "token_sha256": one.decoded.sha256,
        "warm_token_sha256": one.warm_sha256,
        "warm_up_ns": one.warm_up_ns,
        "first_token_ns": one.prefill_ns,
        "first_token_wait_ns": one.prefill_wait_ns,
        "decode_ns": one.decode_ns,
        "decode_wait_ns": one.decode_wait_ns,
        "decode_rest_ns": one.decode_ns - one.decode_wait_ns,
        "decode_passes": passes,
        "decode_ns_per_token": one.decode_ns / passes if passes else None,
    }


def layer_rows(run_id: str, layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `decode_layer`."""
    return [
        {
            "run_id": run_id,
            "decode_phase": row["phase"],
            "layer_id": row["layer_id"],
            "events": row["events"],
            "accesses": row["accesses"],
            "layer_wait_ns": row["wait_ns"],
            "layer_compute_ns": row["compute_ns"],
            "layer_lookahead_ns": row["lookahead_ns"],
        }
        for row in layers
    ]


def pair_row(
    told: dict[str, Any], pairs_id: str, pair: int, order_seed: int, arms: tuple[Arm, Arm], first_owner: str
) -> dict[str, Any]:
    """The row of `decode_pair`; arms: of the owner, and of the one against it."""
    owner, against = arms
    return {
        **told,
        "decode_pair_id": f"{owner.run_id},{against.run_id}",
        "pairs_id": pairs_id,
        "pair": pair,
        "order_seed": order_seed,
        "owner": owner.owner,
        "against": against.owner,
        "first_owner": first_owner,
        "owner_run_id": owner.run_id,
        "against_run_id": against.run_id,
        "owner_token_sha256": owner.token_sha256,
        "against_token_sha256": against.token_sha256,
        "identical": owner.token_sha256 == against.token_sha256,
        "void_reason": void(owner, against),
        "owner_time_valid": owner.time_valid,
        "against_time_valid": against.time_valid,
        "owner_decode_ns": owner.decode_ns,
        "against_decode_ns": against.decode_ns,
    }


def write_decode(data: DataFolder, row: dict[str, Any], one: "DecodeRun") -> None:
    """Appends a decode to the results: the row that says it exists last.

    Raises:
        ContractViolation: a row does not keep its table's contract. OSError: it cannot be written.
    """
    run, run_id = one.run, row["run_id"]
    write_rows(data.results / "pool" / run.pool["pool_id"] / "part.parquet", "pool", [run.pool])
    write_rows(data.results / "machine" / run.machine["machine_id"] / "part.parquet", "machine", [run.machine])
    write_rows(data.run_file("decode_layer", _PARTITION, run_id), "decode_layer", layer_rows(run_id, one.layers))
    write_rows(data.run_file("decode_run", _PARTITION, run_id), "decode_run", [row])


def write_pair(data: DataFolder, row: dict[str, Any]) -> None:
    """Appends a pair, whose two decodes are written.

    Raises:
        ContractViolation: the row does not keep its table's contract. OSError: it cannot be written.
    """
    write_rows(data.run_file("decode_pair", _PARTITION, row["owner_run_id"]), "decode_pair", [row])


_PARTITION = "decode"


def _name(path: Path) -> str:
    # A name may hold bytes that are no text.
    return path.name.encode(errors="backslashreplace").decode()
