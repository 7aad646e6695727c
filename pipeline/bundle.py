"""A lab's results as a folder of their own, one Parquet file per table: written from a data folder, added to another.

A machine without QEMU, or without an hour, shows a matrix that was measured elsewhere; the rows name the machines they
were measured on. `FOLDER` holds the bundles that are shipped. A bundle is untrusted input: every table is validated and
held against the others, and the ids that name folders are looked at before a path is made of them.

A run stands once among the results: what is added are the runs that are not there yet, in files of their own, so that a
lab can be measured on one machine, continued on another, and brought back.
"""

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from replayer.lab import asked_bytes, counts
from schemas.files import DataFolder, exclusive, publish
from schemas.tables import TABLES
from schemas.validation import ContractViolation, validate_table

FOLDER = Path(__file__).with_name("bundles")
"""Where the shipped bundles lie."""

PROVENANCE = "provenance.json"

_OF_RUNS = ("replay_proof", "replay_reclaim", "replay_node", "replay_step", "replay_layer")
_BY_ID = {"pool": "pool_id", "machine": "machine_id"}
_MOST_BYTES = 64 << 20
_MOST_PROVENANCE_BYTES = 1 << 16
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_REMEDY = "the bundle is damaged: write it again with expert-tier bundle"
_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
_TOO_LARGE = "those of a lab are a hundredth of that; write the bundle again, or take it from where it was made"


class UnusableBundle(ValueError):
    """The folder is no bundle, or a lab is not there to be one."""


@dataclass(frozen=True)
class Added:
    """What a bundle brought: runs of the lab that were not there, and whether there were others before."""

    lab_id: str
    runs: int
    is_new: bool


def write_bundle(data: DataFolder, lab_id: str, folder: Path, *, made_by: str) -> dict[str, int]:
    """Writes the results of a lab into `folder` and returns the rows of each table.

    made_by: the command that remakes the results, a line of text.

    Raises:
        UnusableBundle: there is no such lab, or no run of it, or nothing made it. OSError: a file cannot be read or
            written.
    """
    if not is_line(made_by):
        raise UnusableBundle(f"--made-by {made_by!r:.60}, wanted the command that remakes the results, as: make lab")
    labs = rows_of(data, "lab").filter(pl.col("lab_id") == lab_id)
    marks = rows_of(data, "lab_run").filter(pl.col("lab_id") == lab_id)
    if not labs.height or not marks.height:
        known = ", ".join(sorted(rows_of(data, "lab")["lab_id"])) or "none"
        raise UnusableBundle(f"{data.root}: no lab {lab_id!r} with runs there; there are: {known}")
    tables = {"lab": labs}
    of_lab = pl.col("run_id").is_in(marks["run_id"].implode())
    tables["replay_run"] = rows_of(data, "replay_run").filter(of_lab)
    # A mark without its run is no run.
    tables["lab_run"] = marks.filter(pl.col("run_id").is_in(tables["replay_run"]["run_id"].implode()))
    if not tables["lab_run"].height:
        raise UnusableBundle(f"{data.root}: of the runs of lab {lab_id!r} none is there; run it again, or another lab")
    for name in _OF_RUNS:
        tables[name] = rows_of(data, name).filter(of_lab)
    for name, key in _BY_ID.items():
        tables[name] = rows_of(data, name).filter(pl.col(key).is_in(tables["replay_run"][key].unique().implode()))
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


def add_bundle(folder: Path, data: DataFolder) -> Added:
    """Adds the runs of a bundle that are not yet among the results of a data folder.

    Raises:
        UnusableBundle: a file is missing, too large or damaged, the tables contradict each other, or what is there.
        OSError: a file cannot be read or written.
    """
    tables = {name: _read(folder, name) for name in ("lab", "lab_run", "replay_run", *_OF_RUNS, *_BY_ID)}
    _check_tables(folder, tables)
    _check_provenance(folder, tables)
    lab_id = str(tables["lab"]["lab_id"].item())
    with exclusive(data.results / "lab"):
        _check_against(folder, tables, data)
        marks = rows_of(data, "lab_run").filter(pl.col("lab_id") == lab_id)
        new = _new(tables, "lab_run", data)
        for name, key in _BY_ID.items():
            for (one,), frame in _new(tables, name, data).group_by(key):
                _write(frame, data.result_file(name, str(one)))
        # The marks last, and the run before them: what is marked is all there, whenever this ends.
        for name in (*_OF_RUNS, "replay_run", "lab_run"):
            rows = _new(tables, name, data)
            if rows.height:
                runs = "\n".join(sorted(rows["run_id"].unique()))
                part = f"bundle-{hashlib.sha256(runs.encode()).hexdigest()[:12]}"
                _write(rows, data.run_file(name, lab_id, part))
        if new.height or not rows_of(data, "lab").filter(pl.col("lab_id") == lab_id).height:
            _write(_lab(tables["lab"], data), data.result_file("lab", lab_id))
    return Added(lab_id, new.height, not marks.height)


def shipped() -> list[Path]:
    """The folders of the bundles that are shipped, sorted."""
    return sorted(file.parent for file in FOLDER.glob(f"*/{PROVENANCE}"))


def is_line(text: object) -> bool:
    """Whether it is text to be shown in one line, and not only blanks."""
    return isinstance(text, str) and bool(text.strip()) and text.isprintable()


def _check_tables(folder: Path, tables: Mapping[str, pl.DataFrame]) -> None:
    """Holds the tables against each other: the runs of one lab, all of each, and nothing else."""
    if tables["lab"].height != 1:
        raise UnusableBundle(f"{folder}: {tables['lab'].height} labs in lab.parquet, wanted 1; {_REMEDY}")
    for name in ("lab_run", "replay_run", *_BY_ID):
        if not tables[name].height:
            raise UnusableBundle(f"{folder / name}.parquet: no rows, wanted those of the lab's runs; {_REMEDY}")
    lab_id = str(tables["lab"]["lab_id"].item())
    keys = dict.fromkeys(("lab_run", "replay_run", *_OF_RUNS), "run_id") | _BY_ID
    ids = [lab_id, *tables["lab_run"]["trace_id"].unique()]
    ids += [str(one) for name, key in keys.items() for one in tables[name][key].unique()]
    for one in sorted(ids):
        if not _ID.fullmatch(one):
            raise UnusableBundle(f"{folder}: id {one!r:.60}, wanted letters, digits, dots, dashes; {_REMEDY}")
    marks, runs = tables["lab_run"], tables["replay_run"]
    for other in marks["lab_id"].unique().sort():
        if other != lab_id:
            raise UnusableBundle(
                f"{folder}: lab_run.parquet has runs of lab {other!r:.60}, wanted those of {lab_id}; {_REMEDY}"
            )
    try:
        asked = asked_bytes(tables["lab"]["definition"].item())
    except ValueError as error:
        raise UnusableBundle(f"{folder}: lab.parquet: {error}; {_REMEDY}") from None
    for condition in marks["condition"].unique().sort():
        if condition not in asked:
            raise UnusableBundle(
                f"{folder}: lab_run.parquet has runs of condition {condition!r:.60}, which the lab's definition has "
                f"not; {_REMEDY}"
            )
    held = {(name, key): set(tables[name][key]) for name, key in keys.items()}
    wanted = [("lab_run", "run_id", "replay_run"), ("replay_run", "run_id", "lab_run")]
    wanted += [(name, "run_id", "replay_run") for name in _OF_RUNS]
    wanted += [("replay_run", key, name) for name, key in _BY_ID.items()]
    wanted += [(name, key, "replay_run") for name, key in _BY_ID.items()]
    for name, key, other in wanted:
        missing = sorted(set(tables[name][key]) - held.get((other, key), set(tables[other][key])))
        if missing:
            raise UnusableBundle(
                f"{folder}: {name}.parquet has {key} {missing[0]}, which {other}.parquet does not have; {_REMEDY}"
            )
    if not marks.select("run_id", "trace_id").sort("run_id").equals(runs.select("run_id", "trace_id").sort("run_id")):
        raise UnusableBundle(f"{folder}: lab_run.parquet and replay_run.parquet name other traces; {_REMEDY}")


def _check_provenance(folder: Path, tables: Mapping[str, pl.DataFrame]) -> None:
    """Holds what the bundle says of itself against what it has."""
    file = folder / PROVENANCE
    _check_file(file, _MOST_PROVENANCE_BYTES)
    try:
        said = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise UnusableBundle(f"{file}: no JSON; {_REMEDY}") from None
    if not isinstance(said, dict) or not is_line(said.get("made_by")):
        raise UnusableBundle(f"{file}: does not say what made the results (made_by); {_REMEDY}")
    lab_id = tables["lab"]["lab_id"].item()
    if said.get("lab_id") != lab_id:
        raise UnusableBundle(
            f"{file}: of lab {said.get('lab_id')!r:.60}, but lab.parquet has {lab_id!r:.60}; {_REMEDY}"
        )
    rows = said.get("rows")
    for name, frame in tables.items():
        count = rows.get(name) if isinstance(rows, dict) else None
        if count != frame.height:
            raise UnusableBundle(
                f"{file}: {count!r:.20} rows of {name}, but {name}.parquet has {frame.height}; {_REMEDY}"
            )


def _check_against(folder: Path, tables: Mapping[str, pl.DataFrame], data: DataFolder) -> None:
    """Refuses what is among the results already as something else."""
    lab_id, definition = tables["lab"].select("lab_id", "definition").row(0)
    there = rows_of(data, "lab").filter((pl.col("lab_id") == lab_id) & (pl.col("definition") != definition))
    if there.height:
        raise UnusableBundle(
            f"{folder}: lab {lab_id} is among the results with another definition, so one of them is not that lab; "
            f"remove {data.result_file('lab', lab_id).relative_to(data.root)} to take this one"
        )
    both = rows_of(data, "lab_run").join(tables["lab_run"], on="run_id", suffix="_here").sort("run_id")
    for run_id, other in both.filter(pl.col("lab_id") != lab_id).select("run_id", "lab_id").head(1).rows():
        raise UnusableBundle(
            f"{folder}: run {run_id} of lab {lab_id} is among the results as one of lab {other}; add either, not both"
        )
    run = rows_of(data, "replay_run")
    same = run.filter(pl.col("run_id").is_in(tables["replay_run"]["run_id"].implode())).sort("run_id")
    here = tables["replay_run"].filter(pl.col("run_id").is_in(same["run_id"].implode())).sort("run_id")
    if not same.equals(here):
        raise UnusableBundle(
            f"{folder}: runs of lab {lab_id} that are among the results have other values there; add the bundle to a "
            "data folder of its own to compare them"
        )


def _new(tables: Mapping[str, pl.DataFrame], name: str, data: DataFolder) -> pl.DataFrame:
    """The rows of a table whose run, or own id, the results do not have in that table."""
    key = _BY_ID.get(name, "run_id")
    return tables[name].filter(~pl.col(key).is_in(rows_of(data, name)[key].unique().implode()))


def _lab(lab: pl.DataFrame, data: DataFolder) -> pl.DataFrame:
    """The lab's row with the runs that are among the results now."""
    (row,) = lab.to_dicts()
    known = rows_of(data, "lab").filter(pl.col("lab_id") == row["lab_id"])
    repetitions = max([row["repetitions"], *known["repetitions"]])
    marks = rows_of(data, "lab_run").filter(pl.col("lab_id") == row["lab_id"])
    runs = marks.join(rows_of(data, "replay_run"), on="run_id", how="inner").to_dicts()
    done = {(run["condition"], run["repetition"]) for run in runs if counts(run)}
    asked = asked_bytes(row["definition"])
    changed = {
        "repetitions": repetitions,
        "runs": len(runs),
        "valid_runs": sum(bool(run["bytes_valid"]) for run in runs),
        "finished": all((label, number) in done for label in asked for number in range(repetitions)),
    }
    return TABLES["lab"].frame([{**row, **changed}])


def rows_of(data: DataFolder, name: str) -> pl.DataFrame:
    """All rows of a table among the results of a data folder.

    Raises:
        UnusableBundle: a file is damaged, or of another version. OSError: it cannot be read.
    """
    files = sorted((data.results / name).glob("*/[!.]*.parquet"))
    return pl.concat([_result(file, name) for file in files]) if files else TABLES[name].frame([])


def _result(file: Path, name: str) -> pl.DataFrame:
    remedy = "remove the file and make it again"
    frame = _frame(file, remedy)
    if dict(frame.schema) != TABLES[name].polars_schema:
        raise UnusableBundle(f"{file}: other columns than table {name} of this version; {remedy}")
    return frame


def _check_file(file: Path, most_bytes: int) -> None:
    try:
        found = file.stat()
    except FileNotFoundError:
        raise UnusableBundle(f"{file}: not there; wanted a folder that expert-tier bundle wrote") from None
    if not stat.S_ISREG(found.st_mode):
        raise UnusableBundle(f"{file}: no file; {_REMEDY}")
    if found.st_size > most_bytes:
        raise UnusableBundle(f"{file}: {found.st_size:,} bytes, wanted at most {most_bytes:,}; {_TOO_LARGE}")


def _read(folder: Path, name: str) -> pl.DataFrame:
    file = folder / f"{name}.parquet"
    _check_file(file, _MOST_BYTES)
    try:
        footer = pq.read_metadata(file)
        size = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
    except _UNREADABLE as error:
        raise _damaged(file, error, _REMEDY) from None
    if size > 4 * _MOST_BYTES:
        raise UnusableBundle(f"{file}: {size:,} bytes once unpacked, wanted at most {4 * _MOST_BYTES:,}; {_TOO_LARGE}")
    try:
        return validate_table(_frame(file, _REMEDY), TABLES[name])
    except ContractViolation as violation:
        first = str(violation).removeprefix(f"{name}: ")
        raise UnusableBundle(f"{file}: {first}; damaged, or of another version: write the bundle again") from None


def _frame(file: Path, remedy: str) -> pl.DataFrame:
    # Damaged pages make polars' own reader panic on other threads, which say so on stderr.
    try:
        table = pq.ParquetFile(file).read()
        table.validate(full=True)
        frame = pl.from_arrow(table)
    except (*_UNREADABLE, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise _damaged(file, error, remedy) from None
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    return frame


def _damaged(file: Path, error: BaseException, remedy: str) -> Exception:
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return UnusableBundle(f"{file}: unreadable ({_words(error)}); {remedy}")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _write(frame: pl.DataFrame, file: Path) -> None:
    with publish(file) as temporary:
        pq.write_table(frame.to_arrow(), temporary, compression="zstd")
