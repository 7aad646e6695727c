"""Where the data lies, and the one way a file becomes a result: temporary sibling, fsync, rename.

A reader never sees half a file: what carries its final name is complete. What a killed process leaves behind is hidden
(`.name.….tmp`), locked by nobody, and removed by `remove_stale`.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "EXPERT_TIER_DATA"
_SUFFIX = ".tmp"


@dataclass(frozen=True)
class DataFolder:
    """The layout of one data folder."""

    root: Path

    @property
    def dumps(self) -> Path:
        return self.root / "dumps"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def pools(self) -> Path:
        return self.root / "pools"

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def warehouse(self) -> Path:
        return self.root / "warehouse.duckdb"

    @property
    def report(self) -> Path:
        return self.root / "report" / "index.html"

    def trace_file(self, trace_id: str) -> Path:
        return self.traces / f"{trace_id}.parquet"

    def result_file(self, table: str, partition: str) -> Path:
        """`partition` is a trace_id, or `all` for a table over several traces."""
        return self.results / table / partition / "part.parquet"

    def pool_folder(self, trace_id: str) -> Path:
        """Where the pool of a trace is built unless somebody names another place."""
        return self.pools / trace_id

    def run_file(self, table: str, trace_id: str, run_id: str) -> Path:
        """Rows of one native replay; those of `pool` and `machine` are a `result_file` by their own id."""
        return self.results / table / trace_id / f"{run_id}.parquet"

    def owner_of(self, path: Path) -> Path | None:
        """What of this folder's own layout a path is or lies in, however it is written; null if nothing."""
        wanted = path.resolve()
        for own in (self.dumps, self.traces, self.pools, self.results, self.warehouse, self.report.parent):
            if wanted.is_relative_to(own.resolve()):
                return own
        return None

    def trace_ids(self) -> list[str]:
        """Ids of the canonical traces that are here, sorted."""
        return sorted(path.stem for path in self.traces.glob("*.parquet") if not path.name.startswith("."))


@contextlib.contextmanager
def publish(target: Path, *, claim: Callable[[], None] | None = None) -> Iterator[Path]:
    """A temporary sibling of `target` to write to; on success it replaces `target`, on any failure it is removed.

    The temporary file is locked while its writer lives, so that `remove_stale` can tell it from a leftover (a writer
    that must make the file itself removes it first and calls `hold` on its own). `claim`
    runs right before the rename, both under the folder's lock; by raising it keeps `target` as it is.

    Raises:
        OSError: it cannot be written; `target` is untouched then.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent)
    except OSError as error:
        if _is_temporary(error.filename, target):
            error.filename = str(target)
        raise
    temporary = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.fchmod(descriptor, 0o666 & ~_umask())
        yield temporary
        _fsync(temporary)
        with exclusive(target.parent) if claim else contextlib.nullcontext():
            if claim:
                claim()
            temporary.replace(target)
        _fsync(target.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # Nobody knows the temporary file by its name.
        if isinstance(error, OSError) and _is_temporary(error.filename, target):
            error.filename, error.filename2 = str(target), None
        raise
    finally:
        os.close(descriptor)


def _is_temporary(filename: object, target: Path) -> bool:
    if not isinstance(filename, str | bytes):
        return False
    name = Path(os.fsdecode(filename)).name
    return name.startswith(f".{target.name}.") and name.endswith(_SUFFIX)


def remove_stale(folder: Path) -> list[Path]:
    """Removes temporaries in `folder` (not below it) whose writer is dead; returns what it removed."""
    removed = []
    for path in folder.glob(f".*{_SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            path.with_name(path.name + ".wal").unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Marks a temporary file that its writer made itself as being written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds the folder's lock: one process at a time decides here what a name means."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
