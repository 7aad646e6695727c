"""Many simulated cells over many traces, resumable: a cell is named by what it is computed from.

A cell's hash covers the trace's bytes, the contract, the tables fitted elsewhere and the version of the simulator. Here
cells are planned and run; where their rows are kept is the caller's matter.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayer import policies
from replayer.simulate import SIMULATOR_VERSION, Capacity, Cell, Choices, Window, decide_cells, prepare
from replayer.trace import open_or_read

BATCH_CELLS = 64
"""Most cells that share a walk; what an interrupt loses at most."""


@dataclass(frozen=True)
class Sweep:
    """Every combination of the lists, of one window and one set of choices. Capacities in experts are per layer.

    In scope global a capacity of N experts stands for N × layers, so that both scopes hold equally many.
    """

    traces: Sequence[Path]
    policies: Sequence[str]
    scopes: Sequence[str]
    semantics: Sequence[str]
    capacities: Sequence[Capacity]
    seeds: Sequence[int] = (0,)
    window: Window = field(default_factory=Window)
    order: str | None = None
    dedup: str = "union"
    expert_bytes: int | None = None
    choices: Choices = field(default_factory=Choices)


@dataclass(frozen=True)
class PlannedCell:
    """A cell, the part of the sweep it shares a walk with, and its name."""

    trace: Path
    scope: str
    seed: int
    cell: Cell
    cell_hash: str


def plan(sweep: Sweep) -> list[PlannedCell]:
    """All cells, those of one walk together; equal ones (a seed that nothing uses) stand once.

    A semantics that a policy is not defined in gives no cell.

    Raises:
        OSError: a trace or a table cannot be read.
    """
    planned: dict[str, PlannedCell] = {}
    tables = [_digest(Path(part)) for part in _named_files(sweep.choices)]
    for trace in sweep.traces:
        content = _digest(trace)
        for scope, seed, policy, semantics, capacity in itertools.product(
            sweep.scopes, sweep.seeds, sweep.policies, sweep.semantics, sweep.capacities
        ):
            if semantics not in policies.semantics_of(policy):
                continue
            name = _cell_hash(sweep, [content, *tables], scope, seed, Cell(policy, semantics, capacity))
            planned.setdefault(name, PlannedCell(trace, scope, seed, Cell(policy, semantics, capacity), name))
    return list(planned.values())


def run(sweep: Sweep, cells: Sequence[PlannedCell]) -> Iterator[list[dict[str, Any]]]:
    """Batches of rows of the table `sweep`, each as soon as it is known.

    Raises:
        UnusableRequest: as `decide_cells`. MalformedTrace, OSError: a trace cannot be read.
    """
    ordered = sorted(cells, key=lambda each: (str(each.trace), each.seed, each.scope))
    for (path, seed), same_walk in itertools.groupby(ordered, key=lambda each: (each.trace, each.seed)):
        trace = open_or_read(path)
        replay = prepare(trace, sweep.window, order=sweep.order, dedup=sweep.dedup, seed=seed)
        layers = len(trace.metadata.moe_layer_ids)
        for scope, same_scope in itertools.groupby(same_walk, key=lambda each: each.scope):
            waiting = list(same_scope)
            for begin in range(0, len(waiting), BATCH_CELLS):
                batch = waiting[begin : begin + BATCH_CELLS]
                asked = [each.cell if scope == "layer" else _over_all(each.cell, layers) for each in batch]
                found = decide_cells(replay, asked, scope=scope, expert_bytes=sweep.expert_bytes, choices=sweep.choices)
                yield [{"cell_hash": each.cell_hash, **outcome.row} for each, outcome in zip(batch, found, strict=True)]


def _over_all(cell: Cell, layers: int) -> Cell:
    experts = cell.capacity.experts
    return cell if experts is None else cell._replace(capacity=Capacity(experts=experts * layers))


def _cell_hash(sweep: Sweep, contents: Sequence[str], scope: str, seed: int, cell: Cell) -> str:
    choices = sweep.choices
    uses_seed = cell.policy == "random" or sweep.order == "random"
    said = [
        SIMULATOR_VERSION,
        *contents,
        scope,
        cell.policy,
        cell.semantics,
        [cell.capacity.experts, cell.capacity.bytes],
        seed if uses_seed else None,
        [list(sweep.window.steps), sweep.window.phase, str(sweep.window.warm_fraction), sweep.window.warm_pass],
        sweep.order,
        sweep.dedup,
        sweep.expert_bytes,
        choices.fit if cell.policy in policies.FITTED else None,
        str(choices.pinned_fraction) if cell.policy == "pinned_lru" else None,
        choices.folios_per_expert if cell.policy in policies.KERNEL_MODELS else None,
        choices.admit,
        choices.quota_fit if scope == "layer" else None,
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _named_files(choices: Choices) -> list[str]:
    """Files that a choice names: other traces of a fit, an admission table."""
    admit = (choices.admit or "").partition(":top:")[0]
    named = [part.partition(":first:")[0] for part in (choices.fit, admit, choices.quota_fit or "")]
    return [name for name in named if name and name != "same" and not name.startswith("first:")]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without(cells: Sequence[PlannedCell], done: set[str]) -> list[PlannedCell]:
    """The cells that are not among the hashes."""
    return [each for each in cells if each.cell_hash not in done]
