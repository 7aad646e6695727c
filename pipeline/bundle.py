"""A lab's results as a folder of their own, one Parquet file per table: written from a data folder, added to another.

A machine without QEMU, or without an hour, shows a matrix that was measured elsewhere; the rows name the machines they
were measured on. `FOLDER` holds the bundles that are shipped. A bundle is untrusted input: every table is validated,
and the ids that name folders are looked at before a path is made of them.
"""

import json
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from replayer.lab import asked_bytes
from schemas.files import DataFolder, publish
from schemas.tables import TABLES
from schemas.validation import ContractViolation, validate_table

FOLDER = Path(__file__).with_name("bundles")
"""Where the shipped bundles lie."""

PROVENANCE = "provenance.json"

_OF_RUNS = ("replay_proof", "replay_reclaim", "replay_node", "replay_step", "replay_layer")
_BY_ID = {"pool": "pool_id", "machine": "machine_id"}
_MOST_BYTES = 64 << 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class UnusableBundle(ValueError):
    """The folder is no bundle, or a lab is not there to be one."""


def write_bundle(data: DataFolder, lab_id: str, folder: Path, *, made_by: str) -> dict[str, int]:
    """Writes the results of a lab into `folder` and returns the rows of each table.

    made_by: the command that remakes the results.

    Raises:
        UnusableBundle: there is no such lab, or no run of it. OSError: a file cannot be read or written.
    """
    labs = _of(data, "lab").filter(pl.col("lab_id") == lab_id)
    marks = _of(data, "lab_run").filter(pl.col("lab_id") == lab_id)
    if not labs.height or not marks.height:
        known = ", ".join(sorted(_of(data, "lab")["lab_id"])) or "none"
        raise UnusableBundle(f"{data.root}: no lab {lab_id!r} with runs there; there are: {known}")
    tables = {"lab": labs, "lab_run": marks}
    of_lab = pl.col("run_id").is_in(marks["run_id"].implode())
    tables["replay_run"] = _of(data, "replay_run").filter(of_lab)
    for name in _OF_RUNS:
        tables[name] = _of(data, name).filter(of_lab)
    for name, key in _BY_ID.items():
        tables[name] = _of(data, name).filter(pl.col(key).is_in(tables["replay_run"][key].unique().implode()))
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in tables.items():
        _write(frame.sort(TABLES[name].key), folder / f"{name}.parquet")
    rows = {name: frame.height for name, frame in tables.items()}
    begun = [str(one) for one in tables["replay_run"]["started_at"].sort()]
    provenance = {
        "lab_id": lab_id,
        "made_by": made_by,
        "first_run_at": begun[0],
        "last_run_at": begun[-1],
        "bundled_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "expert_tier_version": version("expert-tier"),
        "kernels": sorted(tables["machine"]["kernel_release"].unique()),
        "rows": rows,
    }
    with publish(folder / PROVENANCE) as temporary:
        temporary.write_text(json.dumps(provenance, indent=2) + "\n")
    return rows


def add_bundle(folder: Path, data: DataFolder) -> str | None:
    """Adds a bundle's rows to the results of a data folder; the lab's id, or null where it is there already.

    Raises:
        UnusableBundle: a file is missing, too large or no Parquet file, or an id is no name for a folder.
        ContractViolation: a table does not keep its contract. OSError: a file cannot be read or written.
    """
    tables = {name: _read(folder, name) for name in ("lab", "lab_run", "replay_run", *_OF_RUNS, *_BY_ID)}
    if tables["lab"].height != 1:
        raise UnusableBundle(f"{folder}: {tables['lab'].height} labs in lab.parquet, wanted 1")
    lab_id = str(tables["lab"]["lab_id"].item())
    ids = [lab_id, *(one for name, key in _BY_ID.items() for one in tables[name][key])]
    for one in ids:
        if not _ID.fullmatch(one):
            raise UnusableBundle(f"{folder}: id {one!r}, wanted letters, digits, dots, dashes; the bundle is damaged")
    try:
        asked_bytes(tables["lab"]["definition"].item())
    except ValueError as error:
        raise UnusableBundle(f"{folder}: {error}; the bundle is damaged") from None
    if data.result_file("lab", lab_id).is_file():
        return None
    for name, key in _BY_ID.items():
        for (one,), frame in tables[name].group_by(key):
            file = data.result_file(name, str(one))
            if not file.is_file():
                _write(frame, file)
    # The lab last: where it is, all of it is.
    for name in (*_OF_RUNS, "replay_run", "lab_run", "lab"):
        _write(tables[name], data.result_file(name, lab_id))
    return lab_id


def shipped() -> list[Path]:
    """The folders of the bundles that are shipped, sorted."""
    return sorted(file.parent for file in FOLDER.glob(f"*/{PROVENANCE}"))


def _of(data: DataFolder, name: str) -> pl.DataFrame:
    """All rows of a table among the results."""
    files = sorted((data.results / name).glob("*/[!.]*.parquet"))
    return pl.concat([_frame(file) for file in files]) if files else TABLES[name].frame([])


def _read(folder: Path, name: str) -> pl.DataFrame:
    file = folder / f"{name}.parquet"
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UnusableBundle(f"{file}: {file.stat().st_size:,} bytes, wanted at most {_MOST_BYTES:,}")
        footer = pq.read_metadata(file)
        size = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
        if size > 4 * _MOST_BYTES:
            raise UnusableBundle(f"{file}: {size:,} bytes once unpacked, wanted at most {4 * _MOST_BYTES:,}")
    except FileNotFoundError:
        raise UnusableBundle(f"{file}: not there; wanted a folder that expert-tier bundle wrote") from None
    except pa.ArrowInvalid as error:
        raise UnusableBundle(f"{file}: unreadable ({_words(error)}); write it again") from None
    try:
        return validate_table(_frame(file), TABLES[name])
    except ContractViolation as violation:
        raise UnusableBundle(
            f"{file}: {str(violation)[:300]}; damaged, or of another version: write the bundle again"
        ) from None


def _frame(file: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(file)
    except pl.exceptions.PolarsError as error:
        raise UnusableBundle(f"{file}: unreadable ({_words(error)}); write it again") from None


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _write(frame: pl.DataFrame, file: Path) -> None:
    with publish(file) as temporary:
        pq.write_table(frame.to_arrow(), temporary, compression="zstd")
