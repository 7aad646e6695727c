"""`data/results/` and `data/traces/` → `data/warehouse.duckdb`; reading it: `query`, `list_relations`, `read_tables`.

A warehouse is built aside and renamed over the old one, so readers keep the file they opened and never block a build.
Tables hold copies of the results (small); the view `routing` reads the traces where they lie (large). A native run
exists once its row in `replay_run` does, a decode in `decode_run`, which the replayer writes last: rows of a run that
was killed before are left out of every other table. Nothing is computed here, and no SQL is made of text that came out
of a dump: names come from our own definitions, values and paths travel as parameters or as escaped literals.
"""

import contextlib
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Literal, TypedDict

import duckdb
import polars as pl

from schemas.columns import Column
from schemas.files import DataFolder, hold, publish, remove_stale
from schemas.tables import DECODE_TABLES, EXPERIMENT_TABLES, LAB_TABLES, REPLAY_TABLES, SWEEP_TABLES, TABLES, Table

STORAGE_VERSION = "v1.0.0"
ROUTING_QUESTION = "Which experts did each token of each trace select, row by row as recorded?"

_TABLES_SQL = Path(__file__).with_name("tables.sql")
_VIEWS = Path(__file__).with_name("views")
# A name of traces/ that is a trace: trace ids begin with a letter or digit, temporary files with a dot.
_TRACE_GLOB = "[a-z0-9]*.parquet"
_NO_EXTENSIONS = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
_BUILD_SETTINGS = {"memory_limit": "2GB", "threads": "2", "storage_compatibility_version": STORAGE_VERSION}
_MAX_SHOWN = 5


class MalformedResult(ValueError):
    """A file under `results/` is unreadable, has other columns than its table, or repeats a key of another row."""


class WarehouseNotBuilt(OSError):
    """The machine got in the way of a build (disk full, no permission, out of memory); the old warehouse stands."""


class WarehouseMissing(FileNotFoundError):
    """There is no warehouse yet."""


class QueryFailed(ValueError):
    """A query was refused or failed, or the warehouse cannot be opened."""


class Relation(TypedDict):
    """A table or view of the warehouse; `rows` is null where a view cannot be read any more (traces moved away)."""

    name: str
    kind: Literal["table", "view"]
    rows: int | None
    comment: str


def build_warehouse(data_dir: Path) -> dict[str, int]:
    """Builds `data_dir/warehouse.duckdb` anew from all results and returns the rows of each table.

    Readers of the old file keep it. After an error the old file is untouched.

    Raises:
        MalformedResult: a result file is unreadable, its columns are not the table's, or a key occurs twice.
        WarehouseNotBuilt: disk, permissions or memory stopped the build.
    """
    data = DataFolder(data_dir.absolute())
    try:
        remove_stale(data.root)
        with publish(data.warehouse) as aside:
            # DuckDB opens no empty file, it makes its own.
            aside.unlink()
            with duckdb.connect(str(aside), config={**_BUILD_SETTINGS, **_NO_EXTENSIONS}) as connection, hold(aside):
                _create(connection, data)
                rows = {table.name: _load(connection, data, table) for table in TABLES.values()}
    except (duckdb.Error, OSError) as error:
        raise WarehouseNotBuilt(
            f"{data.warehouse}: not built, {_first_line(error)}; the old one, if any, stands"
        ) from error
    return rows


def query(data_dir: Path, sql: str) -> pl.DataFrame:
    """The result of one SELECT (or FROM, WITH, DESCRIBE, SUMMARIZE, SHOW TABLES …) over the warehouse.

    The SQL is not trusted: it can read the warehouse and `traces/`, nothing else, and write nothing at all.

    Raises:
        WarehouseMissing: nothing was built yet.
        QueryFailed: DuckDB refuses the SQL, or the warehouse cannot be opened.
    """
    with _open(data_dir) as connection:
        # Inside query() DuckDB takes one SELECT and no WITH clause that writes: since 2.0 a SELECT on its own may carry
        # COPY … TO a file there, which the statement's type does not show.
        return _fetch(connection, "FROM query(?)", [sql])


def list_relations(data_dir: Path) -> list[Relation]:
    """Tables, then views, each with what it is and how many rows it has.

    Raises:
        WarehouseMissing: nothing was built yet.
        QueryFailed: the warehouse cannot be opened.
    """
    with _open(data_dir) as connection:
        found = _fetch(
            connection,
            "SELECT table_name AS name, 'table' AS kind, comment FROM duckdb_tables() "
            "WHERE database_name = 'warehouse' UNION ALL "
            "SELECT view_name, 'view', comment FROM duckdb_views() WHERE database_name = 'warehouse' AND NOT internal "
            "ORDER BY kind, name",
        )
        return [
            Relation(name=name, kind=kind, rows=_count_rows_if_readable(connection, name), comment=comment or "")
            for name, kind, comment in found.rows()
        ]


def read_tables(data_dir: Path, views: Sequence[str] = ()) -> dict[str, pl.DataFrame]:
    """Every table of `schemas.tables`, and the views named, whole and from one state of the warehouse.

    Raises:
        WarehouseMissing: nothing was built yet.
        QueryFailed: the warehouse cannot be opened, or an older version built it.
    """
    tables = {}
    with _open(data_dir) as connection:
        for name, table in TABLES.items():
            try:
                tables[name] = _fetch(connection, f"FROM {name}")
            except duckdb.CatalogException:
                tables[name] = pl.DataFrame()
            if dict(tables[name].schema) != table.polars_schema:
                raise QueryFailed(
                    f"{DataFolder(data_dir).warehouse}: table {name} is missing or has other columns than this version "
                    "writes; build it again with: expert-tier run"
                )
        for name in views:
            try:
                tables[name] = _fetch(connection, f"FROM {name}")
            except duckdb.CatalogException:
                raise QueryFailed(
                    f"{DataFolder(data_dir).warehouse}: view {name} is missing; build it again with: expert-tier run"
                ) from None
    return tables


def view_texts() -> dict[str, str]:
    """The SQL of each view but `routing`, views that another reads before it; the first line is its question."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(_VIEWS.glob("*.sql"))}
    reads = {
        name: [other for other in texts if other != name and re.search(rf"\b(FROM|JOIN) {other}\b", text)]
        for name, text in texts.items()
    }
    return {name: texts[name] for name in TopologicalSorter(reads).static_order()}


def _create(connection: duckdb.DuckDBPyConnection, data: DataFolder) -> None:
    # One transaction: each statement on its own would wait for the disk.
    connection.execute("BEGIN")
    connection.execute(_TABLES_SQL.read_text(encoding="utf-8"))
    for table in TABLES.values():
        connection.execute(f"COMMENT ON TABLE {table.name} IS {_literal(table.grain)}")
        for column in table.columns:
            connection.execute(f"COMMENT ON COLUMN {table.name}.{column.name} IS {_literal(_meaning(column))}")
    _create_views(connection, data)
    connection.execute("COMMIT")


def _create_views(connection: duckdb.DuckDBPyConnection, data: DataFolder) -> None:
    questions = []
    for name, text in view_texts().items():
        connection.execute(text)
        questions.append((text.splitlines()[0].removeprefix("-- "), name))
    if any(re.match(r"[a-z0-9]", path.name) and path.suffix == ".parquet" for path in _visible(data.traces)):
        # Lists of different k and traces without weights differ in schema: unite by name. Absolute, since a relative
        # path would be read from wherever the reader stands. Clients before 1.3 cannot read the 16-bit weights.
        pattern = _literal(f"{_glob_escaped(data.traces)}/{_TRACE_GLOB}")
        connection.execute(
            "CREATE VIEW routing AS SELECT parse_filename(filename, true) AS trace_id, * EXCLUDE (filename) "  # noqa: S608
            f"FROM read_parquet({pattern}, union_by_name = true, filename = true)"
        )
        questions.append((ROUTING_QUESTION, "routing"))
    for question, name in questions:
        connection.execute(f"COMMENT ON VIEW {name} IS {_literal(question)}")


def _meaning(column: Column) -> str:
    return column.description if column.unit is None else f"{column.description} [{column.unit}]"


def _load(connection: duckdb.DuckDBPyConnection, data: DataFolder, table: Table) -> int:
    files = _result_files(data, table.name)
    wanted = _columns_of(connection, f"FROM {table.name}")
    for file in files:
        _check_columns(connection, data, file, wanted)
    if files:
        # A table of runs is filled before those of what they did: that is their order in schemas/tables.py.
        runs = _table_of_runs(table)
        of_runs = "" if runs is None else f" WHERE run_id IN (SELECT run_id FROM {runs})"  # noqa: S608 - our own names
        load = f"INSERT INTO {table.name} BY NAME FROM read_parquet(?, union_by_name = true){of_runs}"
        try:
            connection.execute(load, [[_glob_escaped(file) for file in files]])
        except duckdb.Error:
            # DuckDB does not say which of the files it is: try them one by one.
            for file in files:
                _try_file(connection, data, file, load)
            raise
    _check_key(connection, data, table, files)
    return _count_rows(connection, table.name)


def _maker(table: str) -> str:
    """The command that writes results of this table."""
    if table in REPLAY_TABLES:
        return "replayer replay"
    if table in EXPERIMENT_TABLES:
        return "replayer replay --experiment"
    if table in DECODE_TABLES:
        return "replayer decode"
    if table in LAB_TABLES:
        return "replayer lab"
    return "replayer sweep" if table in SWEEP_TABLES else "expert-tier run"


def _table_of_runs(table: Table) -> str | None:
    """The table whose row makes a run of this table exist; null where a row needs none."""
    runs = "decode_run" if table.name in DECODE_TABLES else "replay_run"
    return runs if "run_id" in table.key and table.name != runs else None


def _result_files(data: DataFolder, table: str) -> list[Path]:
    folder = data.results / table
    partitions = [path for path in _visible(folder) if path.is_dir()]
    return [path for partition in partitions for path in _visible(partition) if path.suffix == ".parquet"]


def _visible(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.suffix != ".tmp")


def _columns_of(connection: duckdb.DuckDBPyConnection, sql: str, parameters: object = None) -> dict[str, str]:
    relation = connection.sql(sql, params=parameters)
    return dict(zip(relation.columns, (str(dtype) for dtype in relation.types), strict=True))


def _check_columns(connection: duckdb.DuckDBPyConnection, data: DataFolder, file: Path, wanted: dict[str, str]) -> None:
    try:
        found = _columns_of(connection, "FROM read_parquet(?)", [[_glob_escaped(file)]])
    except duckdb.Error as error:
        raise _unreadable(data, file, error) from None
    if found == wanted:
        return
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [
        f"{name} is {found[name]}, wanted {wanted[name]}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    faults += [f"{name!r} is not a column of the table" for name in found if name not in wanted]
    raise MalformedResult(
        f"{file.relative_to(data.root)}: {_at_most(faults)}; wanted the {len(wanted)} columns of tables.sql; "
        f"delete the file and make it again with: {_maker(file.relative_to(data.results).parts[0])}"
    )


def _try_file(connection: duckdb.DuckDBPyConnection, data: DataFolder, file: Path, load: str) -> None:
    try:
        connection.execute("BEGIN")
        connection.execute(load, [[_glob_escaped(file)]])
    except (duckdb.OutOfMemoryException, duckdb.PermissionException):
        raise
    except duckdb.Error as error:
        raise _unreadable(data, file, error) from None
    finally:
        with contextlib.suppress(duckdb.Error):
            connection.execute("ROLLBACK")


def _unreadable(data: DataFolder, file: Path, error: duckdb.Error) -> MalformedResult:
    return MalformedResult(
        f"{file.relative_to(data.root)}: wanted a readable Parquet file of this table, found: {_first_line(error)}; "
        f"delete the file and make it again with: {_maker(file.relative_to(data.results).parts[0])}"
    )


def _check_key(connection: duckdb.DuckDBPyConnection, data: DataFolder, table: Table, files: Sequence[Path]) -> None:
    key = ", ".join(table.key)
    repeated = connection.execute(
        f"SELECT {key} FROM {table.name} GROUP BY {key} HAVING count(*) > 1 ORDER BY {key}"  # noqa: S608
    ).fetchall()
    if not repeated:
        return
    same = " AND ".join(f"{name} IS NOT DISTINCT FROM ?" for name in table.key)
    holders = connection.execute(
        "SELECT DISTINCT filename FROM read_parquet(?, union_by_name = true, filename = true) "  # noqa: S608
        f"WHERE {same} ORDER BY filename",
        [[_glob_escaped(file) for file in files], *repeated[0]],
    ).fetchall()
    shown = ", ".join(f"{name}={value!r}" for name, value in zip(table.key, repeated[0], strict=True))
    names = _at_most([str(Path(holder).relative_to(data.root)) for (holder,) in holders])
    raise MalformedResult(
        f"results/{table.name}: {len(repeated)} of its keys occur more than once, first {shown} in {names}; "
        f"wanted one row per ({key}); delete the file that does not belong there, or delete both and make them again "
        f"with: {_maker(table.name)}"
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _glob_escaped(path: Path) -> str:
    """A path that DuckDB, which globs every path, takes literally."""
    return re.sub(r"([\[\]*?])", r"[\1]", str(path))


@contextlib.contextmanager
def _open(data_dir: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    data = DataFolder(data_dir.absolute())
    if not data.warehouse.is_file():
        raise WarehouseMissing(f"{data.warehouse}: there is no warehouse yet; make one with: expert-tier run")
    # DuckDB makes this folder when a query outgrows memory, and removes it.
    spill = Path(tempfile.gettempdir()) / f"expert-tier-query-{uuid.uuid4().hex}"
    try:
        # A private instance: connecting to the file itself would share settings, and old data, with whoever has it
        # open in this process.
        with duckdb.connect(":memory:", config={**_NO_EXTENSIONS, "temp_directory": str(spill)}) as connection:
            try:
                connection.execute(f"ATTACH {_literal(str(data.warehouse))} AS warehouse (READ_ONLY)")
                connection.execute("USE warehouse")
            except duckdb.Error as error:
                raise QueryFailed(
                    f"{data.warehouse}: cannot be opened ({_first_line(error)}); build it again with: expert-tier run"
                ) from error
            # As a path, and as the view `routing` writes it: the glob itself has to pass, too.
            connection.execute("SET allowed_directories = ?", [[str(data.traces), _glob_escaped(data.traces)]])
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            yield connection
    except duckdb.PermissionException as error:
        raise QueryFailed(
            f"{_first_line(error)} (a query reads {data.warehouse.name} and traces/, nothing else; if the data folder "
            "was moved, run: expert-tier run)"
        ) from error
    except duckdb.Error as error:
        raise QueryFailed(_first_line(error)) from error


def _fetch(connection: duckdb.DuckDBPyConnection, sql: str, parameters: object = None) -> pl.DataFrame:
    relation = connection.sql(sql, params=parameters)
    try:
        frame: pl.DataFrame = relation.pl()
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise QueryFailed(
            f"the result has a value that cannot be shown ({_first_line(error)}); CAST it to VARCHAR"
        ) from None
    except BaseException as error:
        # Polars panics on values outside its types; a panic derives from BaseException and has no public class.
        if type(error).__name__ != "PanicException":
            raise
        raise QueryFailed("the result has a value that cannot be shown; CAST it to VARCHAR") from None
    return frame.with_columns(_narrowed(column) for column in frame.iter_columns())


def _narrowed(column: pl.Series) -> pl.Series:
    # A sum of integers is a HUGEINT in DuckDB, and a decimal in Arrow: an integer again wherever it fits.
    if column.dtype != pl.Decimal(38, 0):
        return column
    narrow = column.cast(pl.Int64, strict=False)
    return narrow if narrow.null_count() == column.null_count() else column


def _count_rows(connection: duckdb.DuckDBPyConnection, name: str) -> int:
    quoted = name.replace('"', '""')
    return int(connection.execute(f'SELECT count(*) FROM "{quoted}"').fetchall()[0][0])  # noqa: S608


def _count_rows_if_readable(connection: duckdb.DuckDBPyConnection, name: str) -> int | None:
    try:
        return _count_rows(connection, name)
    except duckdb.Error:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _at_most(texts: Sequence[str]) -> str:
    shown, rest = texts[:_MAX_SHOWN], len(texts) - _MAX_SHOWN
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
