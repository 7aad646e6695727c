"""A TOML file → the conditions of a lab, the boots that remain to be made, and how small a guest must boot.

Texts, sizes and rows in, values out: no guest is started here and no file read but the one of the lab. `guest` boots,
`lab_inside` is what runs in there, `lab_cli` reads, runs and writes. The labs that are shipped lie in `labs/`.

A cell is one repetition of one condition; a condition is a replay and where it is made: on this host, or in a guest
with MGLRU on or off. Cells that ask for the same kernel command line share a boot, in an order drawn for it.
"""

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replayer.experiment import StrictModel, UnusableExperiment, combinations, size_of, worded_faults
from replayer.quantities import MAX_BYTES
from replayer.request import Request, UnusableReplay, check_request
from schemas.columns import FADVICES, MGLRU_SETTINGS, OBSERVATIONS, PLACES

FOLDER = Path(__file__).with_name("labs")
"""Where the shipped labs lie."""

BOOT = "boot"
"""The mechanism of a guest whose kernel is told of less memory than it has."""

OWNERS_IN_A_LAB = ("page_cache", "page_cache_mmap", "restream", "uncached")
"""Those that the kernel decides for; what locks memory is decided by us, and needs no kernel of another kind."""

MOST_ATTEMPTS = 3
"""How often a call tries a cell whose runs do not count."""

MOST_CALIBRATIONS = 4
"""Boots that may be spent on finding the `mem=` that leaves the capacity asked for."""

CALIBRATED_WITHIN = Fraction(4, 100)
"""How far the measured residency may be from the capacity, as a share of it."""

MOST_GUEST_BYTES = 8 << 30

FILESYSTEMS = ("ext4", "xfs")
"""What the pool of a guest may lie on; those of xfs are cached in large folios where the kernel reads ahead."""

_BOOT_STEP_BYTES = 1 << 20
_LEAST_BOOT_BYTES = 192 << 20
_LEAST_CAPACITY_BYTES = 4096
_MOST_CELLS = 2_000


class UnusableLab(UnusableExperiment):
    """The file is no lab, or names what is not there: a call to correct. One line per fault."""


class _Asked(StrictModel):
    label: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    place: Literal[PLACES]  # type: ignore[valid-type]
    mechanism: Literal["none", "cgroup", "balloon", "boot"]
    mglru: Literal[MGLRU_SETTINGS] | None = None  # type: ignore[valid-type]
    guest_memory: str | int = "1GiB"
    filesystem: Literal[FILESYSTEMS] = "ext4"  # type: ignore[valid-type]
    owner: Literal[OWNERS_IN_A_LAB] = "page_cache"  # type: ignore[valid-type]
    capacity: str | int | None = None
    headroom: str | int = 0
    machine_bytes: str | int | None = None
    fadvise: Literal[FADVICES] = "random"  # type: ignore[valid-type]
    threads: Annotated[int, Field(ge=1, le=256)] = 8
    observe: Literal[OBSERVATIONS] = "every"  # type: ignore[valid-type]
    steps: Annotated[str, Field(pattern=r"^[0-9]{0,10}:[0-9]{0,10}$")] = ":"
    allow_thrash: bool = False


class _File(StrictModel):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    question: Annotated[str, Field(min_length=10, max_length=500)]
    repeats: Annotated[int, Field(ge=1, le=100)] = 5
    repetitions_per_boot: Annotated[int, Field(ge=1, le=100)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    cpus: Annotated[int, Field(ge=1, le=64)] = 2
    boot_overhead: str | int = "256MiB"
    run_limit_s: Annotated[int, Field(ge=10, le=86_400)] = 300
    common: dict[str, Any] = Field(default_factory=dict)
    condition: Annotated[list[dict[str, Any]], Field(min_length=1)]


class _Defined(BaseModel):
    """Of what `_defined` writes, what is read again; the rest of it is left alone."""

    model_config = ConfigDict(strict=True)


class _DefinedRequest(_Defined):
    capacity_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] | None


class _DefinedCondition(_Defined):
    label: Annotated[str, Field(min_length=1, max_length=1000)]
    request: _DefinedRequest


class _Definition(_Defined):
    conditions: Annotated[list[_DefinedCondition], Field(min_length=1, max_length=_MOST_CELLS)]


@dataclass(frozen=True)
class Condition:
    """One replay and where it is made. mglru: `on`, `off`, or null for what the kernel has."""

    label: str
    place: str
    mglru: str | None
    guest_memory_bytes: int | None
    request: Request
    filesystem: str = "ext4"

    @property
    def boots_small(self) -> bool:
        """Whether the guest's kernel is told of less memory."""
        return self.request.mechanism == BOOT


@dataclass(frozen=True)
class Lab:
    """A file that was made concrete for one pool.

    definition: JSON of what every condition asks for; lab_id names it with trace, pool, seed and replayer, but not the
    number of repetitions, so that more of them continue it. Accelerator, QEMU and kernel belong to each run.
    """

    lab_id: str
    name: str
    question: str
    repeats: int
    repetitions_per_boot: int
    seed: int
    cpus: int
    boot_overhead_bytes: int
    run_limit_s: int
    conditions: tuple[Condition, ...]
    definition: str

    def condition(self, label: str) -> Condition:
        """The condition of that label."""
        return next(one for one in self.conditions if one.label == label)


@dataclass(frozen=True)
class Cell:
    """One repetition of one condition; repetition null: a run to calibrate by, which is no repetition."""

    condition: str
    repetition: int | None


@dataclass(frozen=True)
class Boot:
    """Cells that run in one guest, in this order; guest_memory_bytes null: on the host, one cell.

    boot_capacity_bytes, boot_mglru: of a guest whose kernel is told of less memory, what that is to leave under which
    setting; null for all others. The kernel keeps more back with MGLRU than without, so each setting has its `mem=`.
    """

    guest_memory_bytes: int | None
    boot_capacity_bytes: int | None
    boot_mglru: str | None
    cells: tuple[Cell, ...]


def resolve(
    text: str,
    source: str,
    *,
    trace_id: str,
    pool_id: str,
    pool_bytes: int,
    expert_bytes: int = 0,
    steps: int | None = None,
    replayer_version: str = "",
    repeats: int | None = None,
) -> Lab:
    """The lab that the TOML `text` of the file `source` describes; repeats overrides the file's.

    expert_bytes: of the pool's smallest expert, so that nothing is refused that a replay would make. steps: those of
    the trace without warm-up; null if that is not known.

    Raises:
        UnusableLab: the text is malformed or asks for what does not go together; one line per fault.
    """
    try:
        file = _File.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UnusableLab(f"{source}: no TOML: {error}") from None
    except ValidationError as error:
        raise UnusableLab(worded_faults(error, source, _File)) from None
    conditions = []
    for number, entry in enumerate(file.condition, start=1):
        where = f"{source}: condition {number}"
        keys = {**file.common, **entry}
        # A condition is called by its values in the order of the keys here, whichever the file has.
        known = {key: keys[key] for key in _Asked.model_fields if key in keys}
        listed = combinations({**known, **keys}, where)
        found = [_condition(said, one, pool_bytes, where) for said, one in listed]
        for one in found:
            _check_size(one, pool_bytes, expert_bytes, where)
            _check_steps(one.request.steps, steps, where)
        conditions += found
    twice = {one.label for one in conditions if sum(one.label == other.label for other in conditions) > 1}
    if twice:
        raise UnusableLab(f"{source}: several conditions are called {sorted(twice)[0]!r}; give each a label")
    count = file.repeats if repeats is None else repeats
    if count < 1:
        raise UnusableLab(f"--repeat {count}, wanted at least 1; leave it out for the {file.repeats} of {source}")
    if len(conditions) * count > _MOST_CELLS:
        raise UnusableLab(f"{source}: {len(conditions)} conditions × {count}, wanted at most {_MOST_CELLS} runs")
    overhead = size_of(file.boot_overhead, f"{source}: key boot_overhead").bytes_of(pool_bytes, Fraction(1))
    definition = json.dumps(
        {
            "conditions": [_defined(one) for one in conditions],
            "repetitions_per_boot": file.repetitions_per_boot,
            "cpus": file.cpus,
            "boot_overhead_bytes": overhead,
            "trace_id": trace_id,
            "pool_id": pool_id,
            "seed": file.seed,
            "replayer_version": replayer_version,
        },
        sort_keys=True,
    )
    return Lab(
        lab_id=f"{file.name}-{hashlib.sha256(definition.encode()).hexdigest()[:12]}",
        name=file.name,
        question=file.question,
        repeats=count,
        repetitions_per_boot=file.repetitions_per_boot,
        seed=file.seed,
        cpus=file.cpus,
        boot_overhead_bytes=overhead,
        run_limit_s=file.run_limit_s,
        conditions=tuple(conditions),
        definition=definition,
    )


def _condition(values: list[str], keys: dict[str, Any], pool_bytes: int, where: str) -> Condition:
    said = [one for one in values if one not in MGLRU_SETTINGS]
    try:
        one = _Asked.model_validate(keys)
    except ValidationError as error:
        raise UnusableLab(worded_faults(error, where, _Asked)) from None
    in_guest = one.place == "guest"
    if not in_guest and one.filesystem != _Asked.model_fields["filesystem"].default:
        raise UnusableLab(f"{where}: place host with filesystem, which is a guest's; put the pool elsewhere instead")
    if not in_guest and (one.mglru is not None or one.mechanism == BOOT):
        raise UnusableLab(f"{where}: place host with mglru or mechanism boot, which are set in a guest; leave them out")

    def sized(key: str) -> int | None:
        value = getattr(one, key)
        return None if value is None else size_of(value, f"{where}: key {key}").bytes_of(pool_bytes, Fraction(1))

    memory = sized("guest_memory") or 0
    if in_guest and not _LEAST_BOOT_BYTES <= memory <= MOST_GUEST_BYTES:
        raise UnusableLab(
            f"{where}: guest_memory of {memory:,} bytes, wanted {_LEAST_BOOT_BYTES:,} to {MOST_GUEST_BYTES:,}"
        )
    begin, _, end = one.steps.partition(":")
    request = Request(
        owner=one.owner,
        mechanism=one.mechanism,
        capacity_bytes=sized("capacity"),
        headroom_bytes=sized("headroom") or 0,
        outer_group_bytes=sized("machine_bytes"),
        fadvise=one.fadvise,
        destination="none",
        threads=one.threads,
        observe=one.observe,
        steps=(int(begin) if begin else None, int(end) if end else None),
        allow_thrash=one.allow_thrash,
    )
    if one.mechanism == BOOT and request.capacity_bytes is None:
        raise UnusableLab(f"{where}: mechanism boot without capacity, by which the guest is made small; add it")
    if one.mechanism != "none" and request.capacity_bytes is None:
        raise UnusableLab(f"{where}: mechanism {one.mechanism} without key capacity, which it limits to; add it")
    if one.mechanism == "none" and request.capacity_bytes is not None:
        raise UnusableLab(
            f"{where}: mechanism none with key capacity, to which it limits nothing; leave it out, or choose mechanism "
            "cgroup, balloon or boot"
        )
    try:
        check_request(request)
    except UnusableReplay as error:
        # What a replay calls an option is a key here.
        said_by_key = re.sub(r"--([a-z][a-z-]*)", lambda option: f"key {option[1].replace('-', '_')}", str(error))
        raise UnusableLab(f"{where}: {said_by_key}") from None
    named = [one.label] if one.label else [one.place, one.mechanism]
    switched = [f"MGLRU {one.mglru}"] if one.mglru else []
    label = ", ".join(dict.fromkeys([*named, *said, *switched]))
    if not label.isprintable():
        raise UnusableLab(f"{where}: called {label!r:.80}, wanted one line of characters that can be shown; change it")
    return Condition(label, one.place, one.mglru, memory if in_guest else None, request, one.filesystem)


def _check_size(one: Condition, pool_bytes: int, expert_bytes: int, where: str) -> None:
    """Refuses a capacity that no run could be made at, before a guest is started for it."""
    capacity, threads = one.request.capacity_bytes, one.request.threads
    if capacity is None:
        return
    said = f"{where}: capacity of {capacity:,} bytes"
    if capacity > pool_bytes:
        raise UnusableLab(f"{said}, more than the pool of {pool_bytes:,}, so nothing would be missed; ask for less")
    if one.guest_memory_bytes is not None and capacity >= one.guest_memory_bytes:
        raise UnusableLab(f"{said} in a guest of {one.guest_memory_bytes:,}; ask for less, or more guest_memory")
    if capacity < _LEAST_CAPACITY_BYTES:
        raise UnusableLab(f"{said}, less than a page of {_LEAST_CAPACITY_BYTES:,}; ask for more")
    # Reads past the page cache evict nothing.
    if one.request.owner != "uncached" and not one.request.allow_thrash and capacity < threads * expert_bytes:
        raise UnusableLab(
            f"{said}, but {threads} threads have up to {threads * expert_bytes:,} in flight, so experts would be "
            "evicted while they are read; ask for more, use fewer threads, or set allow_thrash = true"
        )


def _check_steps(asked: tuple[int | None, int | None], steps: int | None, where: str) -> None:
    begin, end = asked[0] or 0, asked[1]
    if end is not None and end <= begin:
        raise UnusableLab(f"{where}: key steps: {begin}:{end} is no step at all; wanted the smaller number first")
    if steps is not None and (begin >= steps or (end or 0) > steps):
        raise UnusableLab(
            f"{where}: key steps: {begin}:{'' if end is None else end}, but the trace has {steps:,} steps without "
            "warm-up; ask for fewer"
        )


def _defined(one: Condition) -> dict[str, Any]:
    # Labs that were begun before there was a choice of file systems go on under their names.
    return {key: value for key, value in asdict(one).items() if key != "filesystem" or value != FILESYSTEMS[0]}


def asked_bytes(definition: str) -> dict[str, int | None]:
    """The capacity that each condition of a lab asks for, by label, in the definition's order.

    Raises:
        ValueError: the text is no definition of a lab; one line.
    """
    try:
        found = _Definition.model_validate_json(definition)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise ValueError("no definition of a lab: no JSON") from None
        raise ValueError(worded_faults(error, "no definition of a lab", _Definition).splitlines()[0]) from None
    asked = {one.label: one.request.capacity_bytes for one in found.conditions}
    if len(asked) < len(found.conditions) or not all(label.isprintable() for label in asked):
        raise ValueError("no definition of a lab: labels of conditions that occur twice, or are no line of text")
    return asked


def command_of(request: Request) -> list[str]:
    """The options of `replayer replay` that ask for the request; trace, pool and data folder come beside it."""
    plain = Request()
    if request.mechanism == BOOT:
        # Booted for the capacity as nearly as was found; what the machine leaves then is measured, not asked for.
        request = replace(request, capacity_bytes=None)
    words = ["--device", request.destination]
    for option, value, usual in (
        ("--owner", request.owner, plain.owner),
        ("--mechanism", request.mechanism, plain.mechanism),
        ("--capacity", request.capacity_bytes, None),
        ("--headroom", request.headroom_bytes, 0),
        ("--machine-bytes", request.outer_group_bytes, None),
        ("--fadvise", request.fadvise, plain.fadvise),
        ("--threads", request.threads, plain.threads),
        ("--observe", request.observe, plain.observe),
    ):
        if value != usual:
            words += [option, str(value)]
    begin, end = request.steps
    if begin is not None or end is not None:
        words += ["--steps", f"{'' if begin is None else begin}:{'' if end is None else end}"]
    return [*words, "--allow-thrash"] if request.allow_thrash else words


def boots(lab: Lab, done: Collection[Cell]) -> list[Boot]:
    """What remains, in the order to run it: blocks of `repetitions_per_boot`, each with every condition.

    The order is drawn by seed and block, before what is done is left out, so that a lab that is continued goes on in
    the order it was begun in.
    """
    found: list[Boot] = []
    for block, first in enumerate(range(0, lab.repeats, lab.repetitions_per_boot)):
        generator = np.random.default_rng([lab.seed, block])
        repetitions = range(first, min(first + lab.repetitions_per_boot, lab.repeats))
        units: list[Boot] = []
        for (memory, capacity, mglru), members in _by_guest(lab.conditions).items():
            # Each repetition holds every condition once, so that neighbours in time are of different conditions.
            ordered = [
                Cell(members[place].label, repetition)
                for repetition in repetitions
                for place in generator.permutation(len(members))
            ]
            together = [ordered] if memory is not None else [[cell] for cell in ordered]
            units += [Boot(memory, capacity, mglru, tuple(cells)) for cells in together]
        for place in generator.permutation(len(units)):
            unit = units[place]
            left = tuple(cell for cell in unit.cells if cell not in done)
            if left:
                found.append(replace(unit, cells=left))
    return found


_Guest = tuple[int | None, int | None, str | None]


def _by_guest(conditions: Sequence[Condition]) -> dict[_Guest, list[Condition]]:
    found: dict[_Guest, list[Condition]] = {}
    for one in conditions:
        found.setdefault(_guest_of(one), []).append(one)
    return found


def _guest_of(one: Condition) -> _Guest:
    return (one.guest_memory_bytes, *((one.request.capacity_bytes, one.mglru) if one.boots_small else (None, None)))


@dataclass(frozen=True)
class BootLimit:
    """`mem=` of a guest; is_settled: it leaves what was asked for, as near as could be found."""

    limit_bytes: int
    is_settled: bool


def boot_limit(lab: Lab, boot: Boot, observed: Sequence[tuple[int, int]]) -> BootLimit:
    """The next `mem=` to try, or to use, for a boot whose kernel is told of less memory.

    observed: (mem=, median residency of experts) of the calibrating runs so far, in their order. What the kernel and
    everything beside the pool's pages take is not known beforehand and is no constant, so it is measured.
    """
    capacity = boot.boot_capacity_bytes
    assert capacity is not None, "a boot with less memory has a capacity"
    if not observed:
        return BootLimit(_rounded(capacity + lab.boot_overhead_bytes, boot), False)
    limit, resident = min(observed, key=lambda one: abs(one[1] - capacity))
    if abs(resident - capacity) <= CALIBRATED_WITHIN * capacity or len(observed) >= MOST_CALIBRATIONS:
        return BootLimit(limit, True)
    proposed = _rounded(limit + capacity - resident, boot)
    # Where the next one was measured already and is worse, the search goes round in a circle.
    return BootLimit(limit, True) if proposed in [one for one, _ in observed] else BootLimit(proposed, False)


def _rounded(size_bytes: int, boot: Boot) -> int:
    most = boot.guest_memory_bytes or size_bytes
    return min(max(size_bytes // _BOOT_STEP_BYTES * _BOOT_STEP_BYTES, _LEAST_BOOT_BYTES), most)


def calibrations(lab: Lab, boot: Boot, runs: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(mem=, median residency) of the calibrating runs of this boot's guest among rows of lab_run and replay_run."""
    labels = {
        one.label
        for one in lab.conditions
        if one.boots_small and _guest_of(one) == (boot.guest_memory_bytes, boot.boot_capacity_bytes, boot.boot_mglru)
    }
    return [
        (int(run["boot_limit_bytes"]), int(run["resident_median_bytes"]))
        for run in runs
        if run["condition"] in labels
        and run["repetition"] is None
        and run["bytes_valid"]
        and run["resident_median_bytes"] is not None
    ]


def counts(run: Mapping[str, Any]) -> bool:
    """Whether a run is a repetition."""
    return run["status"] == "complete" and bool(run["bytes_valid"]) and run["repetition"] is not None


def done_cells(lab: Lab, runs: Iterable[Mapping[str, Any]]) -> set[Cell]:
    """The cells that have a run that counts."""
    known = {one.label for one in lab.conditions}
    return {Cell(run["condition"], run["repetition"]) for run in runs if counts(run) and run["condition"] in known}


def wanted_cells(lab: Lab) -> set[Cell]:
    """All cells of a lab."""
    return {Cell(one.label, number) for one, number in itertools.product(lab.conditions, range(lab.repeats))}
