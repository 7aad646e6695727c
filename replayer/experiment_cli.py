"""`replayer replay --experiment`: cells of an experiment run one after the other, each kept at once, judged at the end.

What is asked for belongs to `experiment`, what the runs show to `experiment_findings`, a single run to `replay`.
"""

import argparse
import functools
import hashlib
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from replayer import counters, experiment_findings
from replayer.advice import named_steps
from replayer.capacity import remove_leftovers
from replayer.experiment import (
    Cell,
    Condition,
    Experiment,
    Given,
    GivenTrace,
    Part,
    blocks,
    find,
    read_description,
    remaining,
    resolve,
    run_block,
)
from replayer.experiment_findings import METRICS, Evidence
from replayer.machine import machine_row
from replayer.plan import read_plan
from replayer.pool import Pool, pool_storages, read_pool
from replayer.replay import Run, check_plan_is_heard, package_version, replay, replay_together
from replayer.replay_cli import read_marked_runs, write_rows, write_run
from replayer.request import UnusableReplay
from replayer.streams import merged
from replayer.trace import Trace, read_trace, steps_without_warmup
from schemas.files import DataFolder
from schemas.tables import TABLES

_SHOWN = ("step_median_ns", "device_bytes", "amplification_nominal", "held_bytes", "own_anonymous_bytes")


class _Stop(Exception):
    """An interrupt during a run, which is kept and marked."""


@dataclass
class _Session:
    """One call: the experiment, what it reads from and writes to, and the attempts there are."""

    experiment: Experiment
    traces: Sequence[Trace]
    pools: Sequence[Pool]
    data: DataFolder
    wait_s: float
    is_told: bool
    runs: list[dict[str, Any]]
    begun: int = 0
    batches: dict[tuple[int, ...], Trace] = field(default_factory=dict)

    def trace_of(self, part: Part) -> Trace:
        """The part's trace; streams are merged once."""
        if len(part.streams) == 1:
            return self.traces[part.streams[0]]
        if part.streams not in self.batches:
            self.batches[part.streams] = merged([self.traces[stream] for stream in part.streams])
        return self.batches[part.streams]

    def attempt(self, cell: Cell, _tried: int) -> bool:
        """Runs a cell once, keeps what came of it, and says whether it counts as a repetition."""
        (condition,) = [one for one in self.experiment.conditions if one.label == cell.condition]
        position = 1 + max((run["position"] for run in self.runs), default=-1)
        earlier = [
            run for run in self.runs if (run["condition"], run["repetition"]) == (cell.condition, cell.repetition)
        ]
        attempt = 1 + max((run["attempt"] for run in earlier), default=-1)
        self._tell(cell)
        results = self._replay(condition, cell.repetition)
        self.begun += 1
        for part, result in zip(condition.parts, results, strict=True):
            mark = {
                "run_id": result.run["run_id"],
                "experiment_id": self.experiment.experiment_id,
                "trace_id": result.run["trace_id"],
                "condition": condition.label,
                "tenant": part.tenant,
                "repetition": cell.repetition,
                "attempt": attempt,
                "position": position,
            }
            write_run(self.data, result)
            # After the run it names: a mark without its run would be a repetition that nobody can look at.
            write_rows(self.data.run_file("experiment_run", self.experiment.experiment_id, mark["run_id"]),
                        "experiment_run", [mark])  # fmt: skip
            self.runs.append({**result.run, **mark})
            if not result.run["bytes_valid"] and result.run["status"] != "interrupted":
                why = result.run["failure"] or result.run["bytes_reasons"]
                self._say(f"replayer: {cell.condition}, repetition {cell.repetition}: not counted: {why}")
        ends = {result.run["status"] for result in results}
        # A tenant that fails has the others stopped, too: that is no wish to end the experiment.
        if "interrupted" in ends and not ends & {"failed", "killed"}:
            raise _Stop
        return ends == {"complete"} and all(result.run["bytes_valid"] for result in results)

    def _replay(self, condition: Condition, repetition: int) -> list[Run]:
        if len(condition.parts) == 1:
            (part,) = condition.parts
            return [
                replay(self.trace_of(part), self.pools[part.pool], part.request, repeat=repetition, wait_s=self.wait_s)
            ]
        tenants = [(self.trace_of(part), self.pools[part.pool], part.request) for part in condition.parts]
        return replay_together(tenants, shares_wall=condition.shares_wall, repeat=repetition, wait_s=self.wait_s)

    def _tell(self, cell: Cell) -> None:
        if self.is_told:
            done = len(experiment_findings.counts(self.experiment.design, self.runs))
            total = len(self.experiment.conditions) * self.experiment.repeats
            said = f"{done} of {total} repetitions; {cell.condition}, repetition {cell.repetition}"
            print(f"\r\033[K{self.experiment.name}: {said}", end="", file=sys.stderr, flush=True)

    def _say(self, line: str) -> None:
        print(f"\r\033[K{line}" if self.is_told else line, file=sys.stderr)


def run_experiment(arguments: argparse.Namespace) -> int:
    """Runs what remains of an experiment and judges all of it; returns the exit code, 1 if it is not finished.

    arguments: trace and pool (lists of paths), experiment, fit_machine, as_published, experiment_seed, repeat (null: as
    the file says), data, wait, json.

    Raises:
        UnusableExperiment, UnusableReplay: the call does not go together. What replay raises. OSError: a file cannot be
        read or written.
    """
    if arguments.data is None:
        raise UnusableReplay("--experiment without --data: name the data folder that keeps its runs, to go on from")
    if arguments.fit_machine and arguments.as_published:
        raise UnusableReplay("--fit-machine with --as-published, which ask for different sizes; leave one out")
    path = find(arguments.experiment)
    text = read_description(path)
    traces = [read_trace(one) for one in arguments.trace]
    pools = [read_pool(one) for one in arguments.pool]
    plans = _plans(arguments.plan or [])

    def plan_steps(name: str, streams: tuple[int, ...]) -> tuple[int, int] | None:
        named = [traces[stream] for stream in streams]
        trace = named[0] if len(named) == 1 else merged(named)
        return named_steps(read_plan(Path(plans[name][0]), trace), trace)

    given = replace(
        _given(arguments.trace, traces, pools), plans=plans, plan_steps=functools.cache(plan_steps) if plans else None
    )
    sizes = "fit_machine" if arguments.fit_machine else "as_published" if arguments.as_published else "as_written"
    experiment = resolve(text, path.name, given, sizes=sizes, seed=arguments.experiment_seed, repeats=arguments.repeat)
    for condition in experiment.conditions:
        for part in condition.parts:
            # Not in the middle of an hour of runs.
            check_plan_is_heard(
                traces[part.streams[0]] if len(part.streams) == 1 else merged([traces[one] for one in part.streams]),
                part.request,
            )
    data = DataFolder(arguments.data)
    data.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=data.results):
        pass
    for leftover in remove_leftovers():
        print(f"replayer: {leftover}", file=sys.stderr)
    session = _Session(
        experiment,
        traces,
        pools,
        data,
        arguments.wait,
        sys.stderr.isatty(),
        read_marked_runs(data, "experiment_run", experiment.experiment_id),
    )
    if session.runs and not arguments.json:
        done = experiment_findings.counts(experiment.design, session.runs)
        print(f"{experiment.experiment_id}: goes on after {len(done)} repetitions that are there")
    was_stopped, lost = _run_all(session)
    evidence = Evidence.of(experiment.design, session.runs)
    summary = _summarise(experiment, evidence, given.machine_id)
    for name, rows in summary.items():
        write_rows(data.result_file(name, experiment.experiment_id), name, rows)
    if arguments.json:
        print(json.dumps(document(summary, session)))
    else:
        _print_summary(experiment, evidence, summary)
    if was_stopped or lost:
        _print_how_to_resume(arguments, was_stopped, lost)
    return 0 if experiment_findings.is_finished(evidence) and not was_stopped else 1


def _run_all(session: _Session) -> tuple[bool, list[Cell]]:
    """(whether an interrupt ended it, cells that never counted)."""
    experiment = session.experiment
    done = {Cell(*key) for key in experiment_findings.counts(experiment.design, session.runs)}
    planned = blocks(experiment.conditions, experiment.repeats, experiment.seed, experiment.order)
    lost: list[Cell] = []
    try:
        for block in remaining(planned, done):
            lost += run_block(block, session.attempt)
    except (_Stop, KeyboardInterrupt):
        return True, lost
    finally:
        if session.is_told:
            print("\r\033[K", end="", file=sys.stderr)
    return False, lost


def _plans(said: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Of each NAME=FILE, the name → the file's path and the SHA-256 of its content.

    Raises:
        UnusableReplay: one is written otherwise, or two have one name. OSError: a file cannot be read.
    """
    plans: dict[str, tuple[str, str]] = {}
    for one in said:
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise UnusableReplay(f"--plan {one!r}, wanted NAME=FILE, by the names that the experiment's file has")
        if name in plans:
            raise UnusableReplay(f"--plan {name}= twice, wanted one file for each name")
        with Path(path).open("rb") as file:
            plans[name] = path, hashlib.file_digest(file, "sha256").hexdigest()
    return plans


def _given(paths: Sequence[Path], traces: Sequence[Trace], pools: Sequence[Pool]) -> Given:
    memory = counters.parse_meminfo(Path("/proc/meminfo").read_bytes()) or {}
    return Given(
        traces=[
            GivenTrace(
                str(path),
                trace.metadata.trace_id,
                len(steps_without_warmup(trace)),
                max(trace.metadata.experts_per_layer),
                trace.num_objects,
            )
            for path, trace in zip(paths, traces, strict=True)
        ],
        pools=[(pool.pool_id, int(pool.object_bytes.sum())) for pool in pools],
        machine_id=str(machine_row(pool_storages(pools[0])[0])["machine_id"]),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        replayer_version=package_version(),
    )


def _summarise(experiment: Experiment, evidence: Evidence, machine_id: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of the tables that are made anew of all runs at the end of each call."""
    name = experiment.experiment_id
    row = {
        "experiment_id": name,
        "experiment": experiment.name,
        "asks": experiment.question,
        "run_order": experiment.order,
        "sizes": experiment.sizes,
        "order_seed": experiment.seed,
        "conditions": len(experiment.conditions),
        "repetitions": experiment.repeats,
        "machine_id": machine_id,
        "definition": experiment.definition,
        "runs": len(evidence.runs),
        "valid_runs": sum(bool(run["bytes_valid"]) for run in evidence.runs),
        "finished": experiment_findings.is_finished(evidence),
        "digests_agree": experiment_findings.digests_agree(evidence),
        "relative_wall_difference": experiment_findings.wall_difference(evidence),
        "finding": experiment_findings.paragraph(evidence),
    }
    return {
        "experiment": [row],
        "experiment_condition": experiment_findings.condition_rows(name, evidence),
        "experiment_effect": experiment_findings.effect_rows(name, evidence),
    }


def document(summary: dict[str, list[dict[str, Any]]], session: _Session) -> dict[str, Any]:
    """What `--json` prints: `schemas.documents.ExperimentOutcome`."""
    return {
        **summary["experiment"][0],
        "started_runs": session.begun,
        "by_run": [
            {
                name: run[name]
                for name in (*TABLES["experiment_run"].column_names, "status", "bytes_valid", "time_valid")
            }
            for run in session.runs
        ],
        "by_condition": summary["experiment_condition"],
        "effects": summary["experiment_effect"],
    }


def _print_summary(experiment: Experiment, evidence: Evidence, summary: dict[str, list[dict[str, Any]]]) -> None:
    print(f"{experiment.experiment_id}: {experiment.question}")
    print(
        f"  {len(experiment.conditions)} conditions, {experiment.repeats} repetitions each, {experiment.order} order, "
        f"seed {experiment.seed}, sizes {experiment.sizes.replace('_', ' ')}; medians (lowest to highest)"
    )
    by_metric = {(row["condition"], row["tenant"], row["metric"]): row for row in summary["experiment_condition"]}
    for member in evidence.design.members:
        for tenant in member.tenants:
            print(f"  {member.condition if tenant is None else f'{member.condition}, tenant {tenant}'}")
            for metric in (*_SHOWN, *(one for one in experiment.metrics if one not in _SHOWN)):
                row = by_metric[member.condition, tenant, metric]
                if row["median_value"] is not None:
                    text = METRICS[metric].text
                    print(
                        f"    {metric:<28} {text(row['median_value']):>14} ({text(row['lowest_value'])} to "
                        f"{text(row['highest_value'])}), {row['counted_runs']} of {row['runs']} runs"
                    )
    print(summary["experiment"][0]["finding"])


def _print_how_to_resume(arguments: argparse.Namespace, was_stopped: bool, lost: Sequence[Cell]) -> None:
    again = ["replayer", "replay", *map(str, arguments.trace)]
    for pool in arguments.pool:
        again += ["--pool", str(pool)]
    for plan in arguments.plan or []:
        again += ["--plan", plan]
    again += ["--experiment", arguments.experiment, "--data", str(arguments.data)]
    again += ["--fit-machine"] if arguments.fit_machine else ["--as-published"] if arguments.as_published else []
    again += [] if arguments.experiment_seed is None else ["--experiment-seed", str(arguments.experiment_seed)]
    again += [] if arguments.repeat is None else ["--repeat", str(arguments.repeat)]
    why = "interrupted" if was_stopped else f"{len(lost)} repetitions did not count in any attempt"
    print(f"replayer: {why}; what is done is kept, go on with: {shlex.join(again)}", file=sys.stderr)
