"""A data folder's results → one file that `bundle_file` describes, the same bytes for the same data.

Rows are sorted by key, members carry no time, and nothing says when or where they were packed but the versions of what
packed them. The file appears whole or not at all.
"""

import hashlib
import json
import platform
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.bundle import UnusableBundle, is_line, rows_of
from pipeline.bundle_file import (
    FORMAT_VERSION,
    MANIFEST,
    MOST_BYTES,
    MOST_MEMBERS,
    MOST_TABLE_BYTES,
    MOST_UNPACKED_BYTES,
    REPORTING,
    Manifest,
    Member,
    PackedTrace,
    reporting_text,
    rows_sha256,
    seeds_of,
    traces_of,
)
from replayer.replay import package_version
from replayer.trace import read_metadata
from schemas.files import DataFolder, publish
from schemas.tables import EXPERIMENT_TABLES, LAB_TABLES, TABLES
from schemas.trace import TRACE_ID_PATTERN
from schemas.validation import ContractViolation, validate_table

_WHEN = (1980, 1, 1, 0, 0, 0)
_PACKAGES = ("numba", "numpy", "pandera", "polars", "pyarrow", "duckdb", "dagster")


@dataclass(frozen=True)
class Packed:
    """What `write_bundle_file` wrote."""

    bytes: int
    sha256: str
    manifest: Manifest


def write_bundle_file(
    data: DataFolder,
    target: Path,
    *,
    made_by: str,
    trace_ids: Sequence[str] | None = None,
    run_ids: Sequence[str] | None = None,
    with_traces: bool = False,
) -> Packed:
    """Packs the results of a data folder, or those of some traces and runs, into one file that replaces `target`.

    Raises:
        UnusableBundle: a trace or run is not there, there is nothing to pack, it is too large, or a result is damaged.
        OSError: a file cannot be read or written; `target` stays as it was.
    """
    if not is_line(made_by):
        raise UnusableBundle(f"--made-by {made_by!r:.60}, wanted the command that made the results, as: make demo")
    tables = _selected({name: rows_of(data, name) for name in TABLES}, data, trace_ids, run_ids)
    if not any(frame.height for frame in tables.values()):
        raise UnusableBundle(f"{data.root}: no results to pack; make some with: expert-tier run")
    for name, frame in tables.items():
        try:
            tables[name] = validate_table(frame.sort(TABLES[name].key), TABLES[name])
        except ContractViolation as violation:
            raise UnusableBundle(f"{data.results / name}: {violation}; remove the rows and make them again") from None
    used = traces_of(tables) | ({*data.trace_ids()} if trace_ids is None and run_ids is None else {*(trace_ids or ())})
    traces = [_packed_trace(data, trace_id, with_traces) for trace_id in sorted(used)]
    texts: dict[str, bytes] = {}
    members: dict[str, Member] = {}
    for name, frame in sorted(tables.items()):
        if frame.height:
            sink = pa.BufferOutputStream()
            pq.write_table(frame.rechunk().to_arrow(), sink, compression="zstd")
            content = sink.getvalue().to_pybytes()
            _check_fits(name, frame, content)
            texts[f"results/{name}.parquet"] = content
            members[f"results/{name}.parquet"] = _member(content, frame.height)
    texts[REPORTING] = reporting_text(tables["reporting_block"]).encode()
    members[REPORTING] = _member(texts[REPORTING], None)
    for trace in traces:
        if trace.packed and trace.file_sha256 is not None and trace.bytes is not None:
            members[f"traces/{trace.trace_id}.parquet"] = Member(bytes=trace.bytes, sha256=trace.file_sha256, rows=None)
    total = sum(one.bytes for one in members.values())
    if total > MOST_BYTES or len(members) >= MOST_MEMBERS:
        raise UnusableBundle(
            f"{target}: {len(members)} members of {total:,} bytes, wanted fewer than {MOST_MEMBERS} of "
            f"{MOST_BYTES:,}; leave --with-traces out, or choose fewer with --trace"
        )
    manifest = Manifest(
        format="expert-tier bundle",
        format_version=FORMAT_VERSION,
        made_by=made_by,
        expert_tier_version=package_version(),
        git_commit=git_commit(),
        selected_traces=None if trace_ids is None else sorted(set(trace_ids)),
        selected_runs=None if run_ids is None else sorted(set(run_ids)),
        environment=_environment(),
        seeds=seeds_of(tables),
        traces=traces,
        members=members,
    )
    with publish(target) as temporary:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            _put(archive, MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
            for name, content in texts.items():
                _put(archive, name, content)
            for trace in traces:
                if trace.packed:
                    _put_trace(archive, data, trace)
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = temporary.stat().st_size
    return Packed(size, digest, manifest)


def _selected(
    tables: dict[str, pl.DataFrame],
    data: DataFolder,
    trace_ids: Sequence[str] | None,
    run_ids: Sequence[str] | None,
) -> dict[str, pl.DataFrame]:
    """The rows that belong to what was chosen. A run exists once its own row does, as in the warehouse."""
    there = {*tables["replay_run"]["run_id"], *tables["decode_run"]["run_id"]}
    chosen = there
    if trace_ids is not None or run_ids is not None:
        known = {*data.trace_ids(), *tables["trace"]["trace_id"], *tables["replay_run"]["trace_id"]}
        for what, asked, of in (("trace", trace_ids, known), ("run", run_ids, there)):
            for one in asked or ():
                if one not in of:
                    raise UnusableBundle(f"{data.root}: no {what} {one!r:.60}; there are: {', '.join(sorted(of)[:5])}")
        of_traces = tables["replay_run"].filter(pl.col("trace_id").is_in(list(trace_ids or ())))["run_id"]
        chosen = {*(run_ids or ()), *of_traces}
        for name, table in TABLES.items():
            if "trace_id" in table.column_names and "run_id" not in table.key:
                kept = pl.col("trace_id").is_in(list(trace_ids or ()))
                if "other_trace_id" in table.key:
                    kept &= pl.col("other_trace_id").is_in(list(trace_ids or ()))
                tables[name] = tables[name].filter(kept)
    for name, table in TABLES.items():
        if "run_id" in table.key:
            tables[name] = tables[name].filter(pl.col("run_id").is_in(list(chosen)))
    decoded = list(tables["decode_run"]["run_id"])
    pair = pl.col("owner_run_id").is_in(decoded) & pl.col("against_run_id").is_in(decoded)
    tables["decode_pair"] = tables["decode_pair"].filter(pair)
    # What sums up runs is packed where all of them are.
    for summary, of_runs, key in (("experiment", "experiment_run", "experiment_id"), ("lab", "lab_run", "lab_id")):
        counts = dict(tables[of_runs].group_by(key).len().rows())
        whole = [row[key] for row in tables[summary].to_dicts() if counts.get(row[key], 0) == row["runs"]]
        for name in EXPERIMENT_TABLES if summary == "experiment" else LAB_TABLES:
            if name != of_runs:
                tables[name] = tables[name].filter(pl.col(key).is_in(whole))
    for name, key in (("pool", "pool_id"), ("machine", "machine_id")):
        used = {*tables["replay_run"][key], *tables["decode_run"][key]}
        if name == "machine":
            used |= {*tables["experiment"][key]}
        tables[name] = tables[name].filter(pl.col(key).is_in(list(used)))
    return tables


def _packed_trace(data: DataFolder, trace_id: str, with_traces: bool) -> PackedTrace:
    file = data.trace_file(trace_id)
    if not TRACE_ID_PATTERN.fullmatch(trace_id) or not file.is_file():
        nothing: dict[str, Any] = dict.fromkeys(("rows_sha256", "file_sha256", "source_sha256", "bytes"))
        return PackedTrace(trace_id=trace_id, packed=False, **nothing)
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return PackedTrace(
        trace_id=trace_id,
        rows_sha256=rows_sha256(file),
        file_sha256=digest,
        source_sha256=read_metadata(file).source.sha256,
        bytes=file.stat().st_size,
        packed=with_traces,
    )


def git_commit() -> str | None:
    """The commit that the package is of; null where neither its installation nor its folder says."""
    try:
        told = json.loads(distribution("expert-tier").read_text("direct_url.json") or "{}")
        if "vcs_info" in told:
            return str(told["vcs_info"]["commit_id"])
    except (PackageNotFoundError, ValueError, KeyError, TypeError, OSError):
        pass
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(  # noqa: S603 - our own words and folder
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],  # noqa: S607
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _environment() -> dict[str, str]:
    """Versions of what computes here; the machines that were measured on are rows of the table `machine`."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "kernel_release": platform.release(),
        **packages,
    }


def _check_fits(name: str, frame: pl.DataFrame, content: bytes) -> None:
    unpacked = int(frame.estimated_size())
    if len(content) > MOST_TABLE_BYTES or unpacked > MOST_UNPACKED_BYTES // 2:
        raise UnusableBundle(
            f"table {name}: {len(content):,} bytes, {unpacked:,} unpacked, wanted at most {MOST_TABLE_BYTES:,} and "
            f"{MOST_UNPACKED_BYTES // 2:,}; choose fewer traces or runs with --trace or --run"
        )


def _member(content: bytes, rows: int | None) -> Member:
    return Member(bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), rows=rows)


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _WHEN)
    info.create_system, info.external_attr = 3, 0o644 << 16
    return info


def _put(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(_info(name), content)


def _put_trace(archive: zipfile.ZipFile, data: DataFolder, trace: PackedTrace) -> None:
    info = _info(f"traces/{trace.trace_id}.parquet")
    info.file_size = trace.bytes or 0
    digest = hashlib.sha256()
    with data.trace_file(trace.trace_id).open("rb") as source, archive.open(info, "w") as member:
        while block := source.read(1 << 20):
            digest.update(block)
            member.write(block)
    if digest.hexdigest() != trace.file_sha256:
        raise UnusableBundle(f"{data.trace_file(trace.trace_id)}: changed while it was packed; pack it again")
