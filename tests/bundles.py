"""Data folders to pack, and bundles to spoil. No test cases live here."""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipeline.bundle import shipped
from pipeline.hit_rates import hit_rate, miss_ratio_curve
from pipeline.locality import trace_locality
from pipeline.reporting import reporting_block
from pipeline.results import check_rows, trace_row
from replayer.trace import read_trace
from schemas.files import DataFolder
from schemas.tables import TABLES
from tests.builders import make_trace, write_trace

OF_RUNS = ("replay_run", "replay_step", "replay_layer", "replay_proof", "replay_reclaim", "replay_node")
TRACE_ID = "tiny"


def keep(data: DataFolder, name: str, frame: pl.DataFrame) -> None:
    """Puts rows among the results."""
    file = data.result_file(name, "here")
    file.parent.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(file)


def simulated(root: Path, *, steps: int = 12, seed: int = 0) -> DataFolder:
    """A data folder with a small trace and what is simulated on it."""
    data = DataFolder(root)
    data.traces.mkdir(parents=True)
    routes = np.argsort(np.random.default_rng(seed).random((steps, 2, 8)), axis=-1)[..., :2]
    made = make_trace(routes, phases=["decode"] * steps, num_experts=8, expert_bytes=100, trace_id=TRACE_ID)
    trace = read_trace(write_trace(made, data.trace_file(TRACE_ID)))
    rates, layers = hit_rate(trace)
    for name, frame in {
        "trace": trace_row(trace.metadata), "trace_check": check_rows(trace.metadata),
        "trace_locality": trace_locality(trace), "hit_rate": rates, "hit_rate_layer": layers,
        "miss_ratio_curve": miss_ratio_curve(trace), "reporting_block": reporting_block(trace, rates),
    }.items():  # fmt: skip
        keep(data, name, frame)
    return data


def measured(root: Path, *, mechanisms: tuple[str, ...] = ("cgroup", "boot"), each: int = 2) -> DataFolder:
    """A data folder with real native runs: valid ones of the shipped lab `mechanisms`."""
    data = DataFolder(root)
    (lab,) = [folder for folder in shipped() if folder.name == "mechanisms"]
    runs = pl.read_parquet(lab / "replay_run.parquet").filter(pl.col("bytes_valid"), pl.col("status") == "complete")
    chosen = runs.sort("run_id").filter(
        pl.col("mechanism").is_in(mechanisms), pl.int_range(pl.len()).over("mechanism") < each
    )
    for name in OF_RUNS:
        rows = pl.read_parquet(lab / f"{name}.parquet")
        keep(data, name, rows.filter(pl.col("run_id").is_in(chosen["run_id"].implode())))
    for name, key in (("pool", "pool_id"), ("machine", "machine_id")):
        rows = pl.read_parquet(lab / f"{name}.parquet")
        keep(data, name, rows.filter(pl.col(key).is_in(chosen[key].unique().implode())))
    return data


def members_of(bundle: Path) -> dict[str, bytes]:
    """Every member of a bundle."""
    with zipfile.ZipFile(bundle) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def written(members: Mapping[str, bytes], target: Path, *, told: bool = True) -> Path:
    """A bundle of these members. told: the manifest has their sizes and hashes, as a careful liar would see to."""
    members = dict(members)
    if told:
        manifest = json.loads(members["manifest.json"])
        for name in manifest["members"]:
            content = members.get(name, b"")
            said = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest["members"][name].update(said)
        members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return target


def with_rows(bundle: Path, name: str, change: Callable[[pl.DataFrame], pl.DataFrame], target: Path) -> Path:
    """A bundle whose table was changed, with a manifest that says nothing of it."""
    members = members_of(bundle)
    member = f"results/{name}.parquet"
    scratch = target.with_suffix(".parquet")
    scratch.write_bytes(members[member])
    change(pl.read_parquet(scratch)).write_parquet(scratch)
    members[member] = scratch.read_bytes()
    scratch.unlink()
    return written(members, target)


def another(value: Any, name: str, table: str) -> Any:
    """Another value of a column that its dtype and closed set of words allow."""
    column = next(one for one in TABLES[table].columns if one.name == name)
    if column.values is not None:
        return next(word for word in column.values if word != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 4096
    return value / 2 + 0.01 if isinstance(value, float) else f"{value}x"


def set_one(frame: pl.DataFrame, name: str, table: str) -> pl.DataFrame | None:
    """The frame with another value where the column has one, in the middle; null where it has none."""
    places = frame[name].is_not_null().arg_true()
    if not len(places):
        return None
    place = int(places[len(places) // 2])
    values = frame[name].to_list()
    values[place] = another(values[place], name, table)
    return frame.with_columns(pl.Series(name, values, dtype=frame.schema[name]))
