"""The command `replayer lab`: a kernel fetched, then every cell of a lab run, each kept as soon as it ends.

What is asked for belongs to `lab`, the guest to `guest`, a single run to `replay`; the rows that a guest has written
are read, checked and published here as those of this host are.
"""

import argparse
import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import polars as pl
import pyarrow.parquet as pq

import replayer
from replayer import lab as planning
from replayer.capacity import remove_leftovers
from replayer.command import Parser, count, terminate_as_interrupt
from replayer.experiment import find, read_description
from replayer.guest import (
    PLACE,
    Disk,
    GuestFailed,
    Kernel,
    Shape,
    environment_script,
    make_disk,
    qemu_version,
    read_kernel,
    run_guest,
    works_with_kvm,
)
from replayer.lab import Boot, BootLimit, Cell, Condition, Lab
from replayer.lab_setup import check_architecture, set_up
from replayer.pool import Pool, check_against_trace, read_pool
from replayer.quantities import format_bytes
from replayer.replay import package_version, replay
from replayer.replay_cli import read_marked_runs, write_rows, write_run
from replayer.trace import Trace, read_trace, steps_without_warmup
from schemas.columns import ACCELERATORS
from schemas.files import DataFolder, publish
from schemas.tables import FILE_TABLES, TABLES

_EPILOG = """\
examples:
  replayer lab setup --data data
  replayer lab run data/traces/ID.parquet --pool POOL --data data
  replayer lab run data/traces/ID.parquet --pool POOL --data data --matrix my-lab.toml --repeat 3 --json

A lab replays the same trace and pool on this host and in small virtual machines, whose kernel has cgroup v2, MGLRU to
be switched, and less memory where its command line says so. Guests see this host's files read-only; they have no
network. What is done is kept: the same call goes on where it was stopped. Bytes are its result; the times of emulated
processors say nothing and are marked so.
"""

_OWN = f"{PLACE}/own"
_MIN_FREE_KIB = 8192
_BELOW_THE_GUESTS_OWN = ("/proc", "/sys", "/dev", "/run")
_MOST_FAILED_IN_A_ROW = 3
_BOOT_ALLOWANCE_S = 300
_COMPILE_LIMIT_S = 1800
_SHOWN = ("device_bytes", "resident_median_bytes", "amplification_nominal", "amplification_resident")


def add_lab_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds `lab` to the subparsers of a command line."""
    command = commands.add_parser(
        "lab",
        help="replays inside small virtual machines, for what this kernel cannot do",
        description="Runs the same replay under several mechanisms, with MGLRU on and off, in guests and on this host.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = command.add_subparsers(dest="part", required=True, metavar="PART", parser_class=Parser)
    setup = parts.add_parser("setup", help="fetch a kernel of the distribution, and QEMU where it is missing")
    setup.set_defaults(run=_setup)
    run = parts.add_parser("run", help="run what remains of a lab")
    run.add_argument("trace", type=Path, metavar="TRACE", help="a canonical trace, data/traces/ID.parquet")
    run.add_argument("--pool", type=Path, required=True, metavar="DIR", help="made by: replayer pool build")
    run.add_argument("--matrix", default="mechanisms", metavar="NAME", help="a lab that is shipped, or a TOML file")
    run.add_argument("--repeat", type=count, metavar="N", help="repetitions of each condition (default: what it says)")
    run.add_argument("--accelerator", choices=("auto", *ACCELERATORS), default="auto",
                     help="auto (default): KVM where a trial guest boots with it, else emulation")  # fmt: skip
    run.add_argument("--wait", type=count, default=60, metavar="S", help="seconds to wait for another replay to end")
    run.add_argument("--json", action="store_true", help="print one JSON document")
    run.set_defaults(run=_run)
    for one in (setup, run):
        one.add_argument("--data", type=Path, required=True, metavar="DIR", help="the data folder")
        one.add_argument("--kernel", type=Path, metavar="DIR", help="folder of the kernel (default: DATA/lab/kernel)")
        one.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _kernel_folder(arguments: argparse.Namespace) -> Path:
    return arguments.kernel or DataFolder(arguments.data).root / "lab" / "kernel"


def _setup(arguments: argparse.Namespace) -> int:
    set_up(_kernel_folder(arguments), lambda line: print(f"lab setup: {line}", flush=True))
    return 0


@dataclass
class _Session:
    """One call: the lab, what it reads from and writes to, and the runs there are."""

    lab: Lab
    trace_file: Path
    trace: Trace
    pool: Pool
    data: DataFolder
    kernel: Kernel
    qemu: str
    accelerator: str
    wait_s: float
    disks: dict[str, Disk]
    numba_cache: Path
    runs: list[dict[str, Any]]
    begun: int = 0
    boots: int = 0
    kept_out: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        print(f"lab: {line}", file=sys.stderr, flush=True)

    def run_boot(self, boot: Boot) -> None:
        """Runs the cells of a boot and keeps what came of each.

        Raises:
            GuestFailed: the guest did not end well; what it had finished is kept.
        """
        if boot.guest_memory_bytes is None:
            for cell in boot.cells:
                self._run_here(cell)
            return
        limit: BootLimit | None = None
        if boot.boot_capacity_bytes is not None:
            limit = planning.boot_limit(self.lab, boot, planning.calibrations(self.lab, boot, self.runs))
            while not limit.is_settled:
                trial = replace(boot, cells=(Cell(boot.cells[0].condition, None),))
                known = len(planning.calibrations(self.lab, boot, self.runs))
                self._run_guest(trial, limit.limit_bytes)
                observed = planning.calibrations(self.lab, boot, self.runs)
                if len(observed) == known:
                    self.say(f"{trial.cells[0].condition}: no valid run to find mem= by; left for the next attempt")
                    return
                limit = planning.boot_limit(self.lab, boot, observed)
        self._run_guest(boot, None if limit is None else limit.limit_bytes)

    def _run_here(self, cell: Cell) -> None:
        condition = self.lab.condition(cell.condition)
        self.say(f"{cell.condition}, {_which(cell)}, on this host")
        result = replay(self.trace, self.pool, condition.request, repeat=cell.repetition or 0, wait_s=self.wait_s)
        self.begun += 1
        write_run(self.data, result)
        self._mark(cell, condition, result.run, {})

    def _run_guest(self, boot: Boot, limit_bytes: int | None) -> None:
        memory = boot.guest_memory_bytes
        assert memory is not None, "a guest has memory"
        shape = Shape(memory, self.lab.cpus, limit_bytes, self.accelerator)
        boot_id = f"boot-{os.urandom(4).hex()}"
        told = f", told of {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
        self.say(f"{boot_id}: a guest of {format_bytes(memory)}{told} for {len(boot.cells)} runs")
        self.boots += 1
        folder = self.data.root / "lab"
        with tempfile.TemporaryDirectory(prefix="share-", dir=folder) as name:
            share = Path(name)
            named = {f"run-{place:03d}": cell for place, cell in enumerate(boot.cells)}
            (share / "runs.json").write_text(json.dumps(self._plan(named)))
            marks = {
                "boot_id": boot_id,
                "boot_runs": len(boot.cells),
                "guest_memory_bytes": memory,
                "boot_limit_bytes": limit_bytes,
                "accelerator": self.accelerator,
                "qemu_version": self.qemu,
                "kernel_package": f"{self.kernel.package} {self.kernel.version}",
            }
            starts = [0]
            waiting = {run: (place, cell) for place, (run, cell) in enumerate(named.items())}

            def keep(run: str) -> None:
                place, cell = waiting.pop(run)
                self._keep(share, run, cell, {**marks, "boot_position": place, "boot_starts": starts[0]})

            def hear(line: str) -> None:
                kind, _, rest = line.partition(" ")
                run = rest.partition(",")[0]
                if kind == "run" and run in waiting:
                    _, cell = waiting[run]
                    self.say(f"  {cell.condition}, {_which(cell)}")
                elif kind == "ran" and run in waiting:
                    # At once, so that whatever ends this process costs one run at most.
                    keep(run)
                elif kind == "warm-up":
                    self.say(f"  {line}")

            try:
                run_guest(
                    self.kernel,
                    shape,
                    disks=list(self.disks.values()),
                    share=share,
                    script=self._script(),
                    limit_s=_BOOT_ALLOWANCE_S + self.lab.run_limit_s * len(boot.cells),
                    on_start=lambda number: starts.__setitem__(0, number),
                    on_line=hear,
                )
            finally:
                for run in list(waiting):
                    keep(run)

    def _plan(self, named: dict[str, Cell]) -> dict[str, Any]:
        runs = []
        for name, cell in named.items():
            condition = self.lab.condition(cell.condition)
            place = f"{PLACE}/disk{list(self.disks).index(condition.filesystem)}"
            argv = ["replay", str(self.trace_file), "--pool", place, *planning.command_of(condition.request)]
            runs.append({"name": name, "mglru": condition.mglru, "argv": argv})
        warm_up = ["replay", str(self.trace_file), "--pool", f"{PLACE}/disk0", "--device", "none", "--steps", "0:1"]
        return {"data": f"{_OWN}/data", "numba": f"{_OWN}/numba", "warm_up": warm_up, "runs": runs}

    def _script(self) -> str:
        environment = guest_environment()
        return (
            environment_script(environment)
            # With large pages at hand a kernel keeps 44 MiB free even of 1 GiB, and a balloon cannot know how much of
            # that is used in the end; the machine's row has what is kept.
            + f"echo {_MIN_FREE_KIB} > /proc/sys/vm/min_free_kbytes || exit 1\n"
            + "mount -t debugfs debugfs /sys/kernel/debug || exit 1\n"
            + f"mkdir -p {_OWN}/numba\n"
            # numba takes a cache only where it may write, and the host's is not for guests to write to.
            + f"cp -a {shlex.quote(str(self.numba_cache))}/. {_OWN}/numba/\n"
            + f"exec {shlex.quote(sys.executable)} -P -m replayer.lab_inside {PLACE}/share\n"
        )

    def _keep(self, share: Path, name: str, cell: Cell, marks: dict[str, Any]) -> None:
        """Publishes what a run in a guest left, if it ended."""
        file = share / f"{name}.done.json"
        if not file.is_file():
            return
        done = json.loads(file.read_text())
        self.begun += 1
        rows = publish_results(share / name / "results", self.data)
        if rows is None:
            words = " ".join(str(done["stderr"]).split())[-300:]
            self.say(f"{cell.condition}: no run (exit code {done['exit_code']}): {words or 'nothing was said'}")
            return
        self._mark(cell, self.lab.condition(cell.condition), rows, {**marks, "compiled_files": done["compiled_files"]})

    def _mark(self, cell: Cell, condition: Condition, run: dict[str, Any], marks: dict[str, Any]) -> None:
        earlier = [
            one for one in self.runs if (one["condition"], one["repetition"]) == (cell.condition, cell.repetition)
        ]
        mark = {
            "run_id": run["run_id"],
            "lab_id": self.lab.lab_id,
            "trace_id": run["trace_id"],
            "condition": cell.condition,
            "repetition": cell.repetition,
            "attempt": 1 + max((one["attempt"] for one in earlier), default=-1),
            "position": 1 + max((one["position"] for one in self.runs), default=-1),
            "place": condition.place,
            "mglru_setting": condition.mglru,
            **{name: marks.get(name) for name in _GUEST_COLUMNS},
        }
        # After the run it names: a mark without its run would be a repetition that nobody can look at.
        write_rows(self.data.run_file("lab_run", self.lab.lab_id, mark["run_id"]), "lab_run", [mark])
        self.runs.append({**run, **mark})
        if not run["bytes_valid"]:
            self.say(f"  not counted: {cell.condition}: {run['failure'] or run['bytes_reasons']}")


_GUEST_COLUMNS = (
    "boot_id", "boot_position", "boot_runs", "boot_starts", "guest_memory_bytes", "boot_limit_bytes", "accelerator",
    "qemu_version", "kernel_package", "compiled_files",
)  # fmt: skip


def _which(cell: Cell) -> str:
    return "to find mem= by" if cell.repetition is None else f"repetition {cell.repetition}"


def guest_environment() -> dict[str, str]:
    """Variables of everything that runs in a guest."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": _OWN,
        "TMPDIR": _OWN,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(Path(replayer.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": f"{_OWN}/numba",
        **_GENERIC_PROCESSOR,
    }


# Code for any x86-64, so that what is compiled here is found in a guest, whatever its processor claims to be.
_GENERIC_PROCESSOR = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


def compile_for_guests(session: _Session) -> None:
    """Fills the cache that guests get: one short replay here of each kind that the lab makes.

    Raises:
        OSError: such a replay fails; says how.
    """
    session.numba_cache.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **_GENERIC_PROCESSOR,
        "NUMBA_CACHE_DIR": str(session.numba_cache),
        "PYTHONPATH": str(Path(replayer.__file__).parents[1]),
    }
    kinds = {(one.request.owner, one.request.fadvise, one.request.steps[0] or 0) for one in session.lab.conditions}
    for owner, fadvise, first in sorted(kinds):
        command = [
            sys.executable, "-P", "-m", "replayer", "replay", str(session.trace_file), "--pool",
            str(session.pool.folder.resolve()), "--owner", owner, "--fadvise", fadvise, "--mechanism", "none",
            "--device", "none", "--steps", f"{first}:{first + 1}", "--wait", str(int(session.wait_s)), "--json",
        ]  # fmt: skip
        done = subprocess.run(  # noqa: S603 - our own words
            command, env=environment, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=False
        )
        if not done.stdout:
            raise OSError(f"compiling for guests: replayer replay --owner {owner} failed: {done.stderr.strip()[-300:]}")


def publish_results(results: Path, data: DataFolder) -> dict[str, Any] | None:
    """Checks and publishes the tables of one run that a guest has written; its row of replay_run, or null without one.

    The row that makes the run exist comes last.

    Raises:
        ContractViolation: a row does not keep its table's contract. OSError: it cannot be read or written.
    """
    from schemas.validation import validate_table

    files = sorted(results.glob("*/*/[!.]*.parquet"), key=lambda file: file.parts[-3] == "replay_run")
    row: dict[str, Any] | None = None
    for file in files:
        name, partition = file.parts[-3], file.parts[-2]
        table = TABLES.get(name) or FILE_TABLES[name]
        frame = validate_table(pl.read_parquet(file), table)
        with publish(data.results / name / partition / file.name) as temporary:
            pq.write_table(frame.to_arrow(), temporary, compression="zstd")
        if name == "replay_run":
            (row,) = frame.to_dicts()
    return row


def _run(arguments: argparse.Namespace) -> int:
    """Runs what remains of a lab; returns the exit code, 1 if it is not finished."""
    trace, pool = read_trace(arguments.trace), read_pool(arguments.pool)
    check_against_trace(pool, trace.metadata)
    data = DataFolder(arguments.data.resolve())
    path = find(arguments.matrix, "--matrix", planning.FOLDER)
    lab = planning.resolve(
        read_description(path),
        path.name,
        trace_id=trace.metadata.trace_id,
        pool_id=pool.pool_id,
        pool_bytes=int(pool.object_bytes.sum()),
        expert_bytes=int(pool.object_bytes.min()),
        steps=len(steps_without_warmup(trace)),
        replayer_version=package_version(),
        repeats=arguments.repeat,
    )
    with _session(arguments, lab, trace, pool, data) as session:
        try:
            _run_all(session)
        finally:
            write_rows(data.result_file("lab", lab.lab_id), "lab", [_lab_row(session)])
    if arguments.json:
        print(json.dumps(_document(session)))
    else:
        _print_summary(session)
    return 0 if _is_finished(session) else 1


@contextlib.contextmanager
def _session(arguments: argparse.Namespace, lab: Lab, trace: Trace, pool: Pool, data: DataFolder) -> Iterator[_Session]:
    """All that guests need, made once; the pool's image goes when the lab ends."""
    check_architecture()
    folder = data.root / "lab"
    kernel, version = read_kernel(_kernel_folder(arguments)), qemu_version()
    trace_file = arguments.trace.resolve()
    for seen in (trace_file, Path(sys.prefix), Path(replayer.__file__).resolve()):
        if str(seen).startswith(tuple(f"{one}/" for one in _BELOW_THE_GUESTS_OWN)):
            raise OSError(f"{seen}: a guest has a {seen.parts[1]} of its own and would not see it; move it elsewhere")
    for leftover in remove_leftovers():
        print(f"replayer: {leftover}", file=sys.stderr)
    with _alone(folder), terminate_as_interrupt(), tempfile.TemporaryDirectory(prefix="image-", dir=folder) as name:
        for left in (*folder.glob("share-*"), *folder.glob("image-*")):
            if left != Path(name):
                # Nobody else's: the folder is locked.
                shutil.rmtree(left, ignore_errors=True)
        session = _Session(
            lab=lab,
            trace_file=trace_file,
            trace=trace,
            pool=pool,
            data=data,
            kernel=kernel,
            qemu=version,
            accelerator="tcg",
            wait_s=arguments.wait,
            disks={},
            numba_cache=folder / "numba",
            runs=read_marked_runs(data, "lab_run", lab.lab_id),
        )
        if planning.boots(lab, planning.done_cells(lab, session.runs)) and any(
            one.place == "guest" for one in lab.conditions
        ):
            session.accelerator = _accelerator(arguments.accelerator, kernel, session)
            session.say("compiling for guests, and copying the pool into an image")
            compile_for_guests(session)
            for kind in sorted({one.filesystem for one in lab.conditions if one.place == "guest"}):
                if kind == "xfs" and "xfs" not in kernel.modules:
                    raise OSError(f"{kernel.folder}: a kernel without xfs; remove the folder and run: make lab-setup")
                session.disks[kind] = make_disk(pool.folder, Path(name) / f"pool-{kind}.img", kind)
        yield session


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second lab of the same data folder out."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK, "another lab of this data folder is going on; wait until it has ended", str(folder)
            ) from None
        yield


def _accelerator(asked: str, kernel: Kernel, session: _Session) -> str:
    if asked == "tcg":
        return "tcg"
    works, why = works_with_kvm(kernel)
    if asked == "kvm" and not works:
        raise GuestFailed(f"--accelerator kvm: {why}; leave it out to emulate", "before its kernel was up")
    session.say(f"guests use {'KVM' if works else 'emulation (TCG)'}: {why}")
    return "kvm" if works else "tcg"


def _run_all(session: _Session) -> None:
    """Every boot that remains, cells that did not count again at the end, up to `MOST_ATTEMPTS` times.

    Raises:
        GuestFailed: the first guest of all fails, or several in a row.
    """
    lab = session.lab
    failed_in_a_row = 0
    for attempt in range(planning.MOST_ATTEMPTS):
        left = planning.boots(lab, planning.done_cells(lab, session.runs))
        if not left:
            return
        if attempt or session.runs:
            session.say(f"{sum(len(boot.cells) for boot in left)} runs remain")
        for boot in left:
            try:
                session.run_boot(boot)
                failed_in_a_row = 0
            except GuestFailed as error:
                failed_in_a_row += 1
                if failed_in_a_row >= _MOST_FAILED_IN_A_ROW or session.boots == 1:
                    raise
                session.kept_out.append(str(error))
                session.say(str(error))


def _is_finished(session: _Session) -> bool:
    return planning.wanted_cells(session.lab) <= planning.done_cells(session.lab, session.runs)


def _lab_row(session: _Session) -> dict[str, Any]:
    lab = session.lab
    return {
        "lab_id": lab.lab_id,
        "lab": lab.name,
        "asks": lab.question,
        "order_seed": lab.seed,
        "conditions": len(lab.conditions),
        "repetitions": lab.repeats,
        "definition": lab.definition,
        "runs": len(session.runs),
        "valid_runs": sum(bool(run["bytes_valid"]) for run in session.runs),
        "finished": _is_finished(session),
    }


def _summary(session: _Session) -> list[dict[str, Any]]:
    """One row per condition: medians and range of what counts."""
    rows = []
    for condition in session.lab.conditions:
        counted = [run for run in session.runs if planning.counts(run) and run["condition"] == condition.label]
        row: dict[str, Any] = {"condition": condition.label, "counted_runs": len(counted)}
        for name in _SHOWN:
            values = [run[name] for run in counted if run[name] is not None]
            row[name] = (
                {"median": median_low(values), "lowest": min(values), "highest": max(values)} if values else None
            )
        rows.append(row)
    return rows


def _document(session: _Session) -> dict[str, Any]:
    """What `--json` prints: `schemas.documents.LabOutcome`."""
    return {
        **_lab_row(session),
        "started_runs": session.begun,
        "started_boots": session.boots,
        "accelerator": session.accelerator,
        "qemu_version": session.qemu,
        "kernel_release": session.kernel.release,
        "failures": session.kept_out,
        "by_condition": _summary(session),
        "by_run": [
            {name: run[name] for name in (*TABLES["lab_run"].column_names, "status", "bytes_valid")}
            for run in session.runs
        ],
    }


def _print_summary(session: _Session) -> None:
    lab = session.lab
    print(f"{lab.lab_id}: {lab.question}")
    print(
        f"  {len(lab.conditions)} conditions, {lab.repeats} repetitions each; guests: kernel {session.kernel.release}, "
        f"QEMU {session.qemu}, {session.accelerator}; medians (lowest to highest)"
    )
    print(f"  {'condition':<44}{'runs':>5}{'device MiB':>26}{'resident MiB':>26}{'amplification':>22}")
    for row in _summary(session):
        device, resident, amplification = (
            _ranged(row[name], unit) for name, unit in
            (("device_bytes", 2**20), ("resident_median_bytes", 2**20), ("amplification_resident", 1))
        )  # fmt: skip
        print(f"  {row['condition'][:43]:<44}{row['counted_runs']:>5}{device:>26}{resident:>26}{amplification:>22}")
    for failure in session.kept_out:
        print(f"  {failure}")


def _ranged(value: dict[str, Any] | None, unit: int) -> str:
    if value is None:
        return "-"
    digits = 2 if unit == 1 else 1
    return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(
        *(value[name] / unit for name in ("median", "lowest", "highest")), d=digits
    )
