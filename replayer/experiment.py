"""A TOML file → the conditions of an experiment, the order its cells run in, and which of them remain to run.

Texts, sizes and ids in, values out: no run is made here and no result is read; of files, only the TOML itself. What
came of the runs is judged in `experiment_findings`; `experiment_cli` reads, runs and writes. The experiments that are
shipped lie in `experiments/`.

A condition is what a run, or several started together, is asked for; a cell is one repetition of one condition; a block
holds each condition once. A condition belongs to a group: those that differ only in what [[condition]] says, and among
which comparisons are made.
"""

import hashlib
import itertools
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replayer.experiment_findings import FINDINGS, METRICS, Design, Member
from replayer.quantities import format_bytes, parse_bytes, parse_fraction
from replayer.request import Request
from schemas.columns import (
    DELIVERIES,
    DESTINATIONS,
    FADVICES,
    GROUP_STATS,
    MECHANISMS,
    OBSERVATIONS,
    OWNERS,
    POLICIES,
    READ_PATHS,
    RUN_ORDERS,
    SCOPES,
    VERIFICATIONS,
)

FOLDER = Path(__file__).with_name("experiments")
"""Where the shipped experiments lie."""

MOST_BYTES_HERE = 2**33
"""What `--fit-machine` lets the largest condition have at most: 8 GiB, or half of the machine's memory if that is less.
Of all memory, not of what is available: an experiment keeps its sizes, and its name, until it is finished."""

MOST_ATTEMPTS = 3
"""How often a call tries a cell whose runs do not count."""

_MOST_REPEATS = 10_000
_MOST_CONDITIONS = 1_000
_MOST_FILE_BYTES = 1 << 20
_MOST_SHOWN = 60
_AXES = ("label", "tenants", "streams", "baseline", "shares_wall")
"""Keys whose list is a value of its own, not one condition per item."""

_MEMORY = ("capacity", "wall", "headroom", "machine_bytes")
_TERM = re.compile(r"\s*([0-9./]+)\s*%\s*")
_TRACE_OF_FIT = re.compile(r"@([0-9]{1,4})(?=:|$)")
_TOP_SHARE = re.compile(r":top:([0-9.]{1,12})%$")


class UnusableExperiment(ValueError):
    """The file is none, or names what is not there or does not fit here: a call to correct. One line per fault."""


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
_Label = Annotated[str, Field(min_length=1, max_length=200)]
_TraceName = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]


class _Asked(StrictModel):
    """One condition, every list expanded; what is left out is as `replayer replay` has it."""

    label: _Label | None = None
    baseline: bool = False
    tenants: list[_Label] | None = None
    shares_wall: bool = False
    trace: _TraceName = 0
    streams: list[_TraceName] | None = None
    pool: Annotated[int, Field(ge=0)] = 0
    owner: Literal[OWNERS] = "page_cache"  # type: ignore[valid-type]
    mechanism: Literal[MECHANISMS] = "none"  # type: ignore[valid-type]
    capacity: str | int | None = None
    wall: str | int | None = None
    headroom: str | int = 0
    machine_bytes: str | int | None = None
    miss_path: Literal[READ_PATHS] | None = None  # type: ignore[valid-type]
    arena_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    policy: Literal[POLICIES] | None = None  # type: ignore[valid-type]
    scope: Literal[SCOPES] | None = None  # type: ignore[valid-type]
    fit: str | None = None
    admit: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    fadvise: Literal[FADVICES] = "random"  # type: ignore[valid-type]
    device: Literal[DESTINATIONS] = "cpu"  # type: ignore[valid-type]
    threads: Annotated[int, Field(ge=1, le=256)] = 8
    observe: Literal[OBSERVATIONS] = "every"  # type: ignore[valid-type]
    verify: Literal[VERIFICATIONS] = "edges"  # type: ignore[valid-type]
    group_stat: Literal[GROUP_STATS] = "pass"  # type: ignore[valid-type]
    plan: _Label | None = None
    delivery: Literal[DELIVERIES] = "none"  # type: ignore[valid-type]
    split: str | int = "auto"
    hint_slots: Annotated[int, Field(ge=1)] | None = None
    cold: bool = False
    steps: Annotated[str, Field(pattern=r"^[0-9]{0,10}:[0-9]{0,10}$")] = ":"
    at_most_steps: Annotated[int, Field(ge=1)] | None = None
    accelerator_memory: bool = False
    allow_thrash: bool = False
    allow_unsuitable: bool = False


class _Tenant(StrictModel):
    name: _Label
    trace: _TraceName = 0
    streams: list[_TraceName] | None = None
    pool: Annotated[int, Field(ge=0)] = 0


class _File(StrictModel):
    name: _Name
    question: Annotated[str, Field(min_length=10, max_length=500)]
    finding: Literal[FINDINGS]  # type: ignore[valid-type]
    repeats: Annotated[int, Field(ge=1, le=_MOST_REPEATS)] = 5
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    order: Literal[RUN_ORDERS] = "random"  # type: ignore[valid-type]
    metrics: Annotated[list[Literal[tuple(METRICS)]], Field(min_length=1)] = ["step_median_ns", "device_bytes"]  # type: ignore[valid-type]
    published: dict[str, str] = {}
    tenant: list[_Tenant] = []
    common: dict[str, Any] = {}
    condition: Annotated[list[dict[str, Any]], Field(min_length=1)]


@dataclass(frozen=True)
class GivenTrace:
    """A trace that the call names: steps without warm-up, experts of the largest layer and of all."""

    path: str
    trace_id: str
    steps: int
    experts_per_layer: int
    experts: int


@dataclass(frozen=True)
class Given:
    """What the call and the machine bring. pools: (pool_id, bytes of its experts) each; memory in bytes.

    plans: of each name, (path of the lookahead plan, SHA-256 of it); plan_steps: of a plan's name and the trace that
    these streams make, the half-open range of steps for which it names experts.
    """

    traces: Sequence[GivenTrace]
    pools: Sequence[tuple[str, int]]
    machine_id: str
    memory_bytes: int
    available_bytes: int
    replayer_version: str = ""
    plans: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    plan_steps: Callable[[str, tuple[int, ...]], tuple[int, int] | None] | None = None


@dataclass(frozen=True)
class Part:
    """One replay of a condition: traces by their place in the call, several to be merged as streams."""

    tenant: str | None
    streams: tuple[int, ...]
    pool: int
    request: Request


@dataclass(frozen=True)
class Condition:
    """What is repeated: one part, or several that run at the same time, in one wall or each in its own."""

    label: str
    arm: str
    group: str
    is_baseline: bool
    shares_wall: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Experiment:
    """A file that was made concrete for these traces, these pools and this machine.

    definition: JSON of what every condition asks for, sizes in bytes; experiment_id names it with trace, pools, seed,
    machine and replayer, but not the number of repetitions, so that more of them continue it.
    """

    experiment_id: str
    name: str
    question: str
    finding: str
    metrics: tuple[str, ...]
    order: str
    sizes: str
    seed: int
    repeats: int
    conditions: tuple[Condition, ...]
    definition: str

    @property
    def design(self) -> Design:
        """What a judge of the runs has to know."""
        return Design(
            finding=self.finding,
            metrics=self.metrics,
            order=self.order,
            repeats=self.repeats,
            members=tuple(
                Member(
                    condition=one.label,
                    arm=one.arm,
                    group=one.group,
                    is_baseline=one.is_baseline,
                    tenants=tuple(part.tenant for part in one.parts),
                    has_wall=all(part.request.wall_bytes is not None for part in one.parts),
                    shares_wall=one.shares_wall,
                )
                for one in self.conditions
            ),
        )


@dataclass(frozen=True)
class Cell:
    """One repetition of one condition."""

    condition: str
    repetition: int


def shipped(folder: Path = FOLDER) -> list[str]:
    """Names of the experiments that come with the package, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def find(name: str, option: str = "--experiment", folder: Path = FOLDER) -> Path:
    """The file of what is shipped in `folder` under that name, or the file of that name; `option` asked for it.

    Raises:
        UnusableExperiment: there is neither.
    """
    known = shipped(folder)
    if name in known:
        return folder / f"{name}.toml"
    if name.endswith(".toml"):
        stem = name.removesuffix(".toml")
        if stem in known and not Path(name).exists():
            raise UnusableExperiment(
                f"{option} {name!r}: no such file, and what is shipped is called without suffix; say {option} {stem}"
            )
        return Path(name)
    raise UnusableExperiment(
        f"{option} {name[:80]!r}, wanted one of {', '.join(known)}, or a file whose name ends in .toml"
    )


def read_description(path: Path) -> str:
    """The text of an experiment's or a lab's file, which is a regular file of bounded size.

    Raises:
        UnusableExperiment: it is something else. OSError: it cannot be read.
    """
    # Does not wait for the other end of a pipe.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UnusableExperiment(f"{path}: no regular file, wanted one of TOML")
        text = file.read(_MOST_FILE_BYTES + 1)
    if len(text) > _MOST_FILE_BYTES:
        raise UnusableExperiment(f"{path}: more than {_MOST_FILE_BYTES:,} bytes, wanted a description in TOML")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UnusableExperiment(
            f"{path}: byte {text[error.start]:#04x} at {error.start} is no UTF-8, which TOML is; save it as UTF-8"
        ) from None


def resolve(
    text: str,
    source: str,
    given: Given,
    *,
    sizes: str = "as_written",
    seed: int | None = None,
    repeats: int | None = None,
) -> Experiment:
    """The experiment that the TOML `text` of the file `source` describes.

    sizes: of `schemas.columns.SIZINGS`; seed and repeats override the file's.

    Raises:
        UnusableExperiment: the text is malformed, or does not go together with what is given; one line per fault.
    """
    file = _parsed(text, source)
    raw = [_expanded(entry, file, sizes, source, number) for number, entry in enumerate(file.condition, start=1)]
    listed = list(itertools.chain.from_iterable(raw))
    if len(listed) > _MOST_CONDITIONS:
        raise UnusableExperiment(f"{source}: {len(listed)} conditions, wanted at most {_MOST_CONDITIONS}")
    asked = _validated(listed, source)
    factor = _factor([one for _, one in asked], given, source) if sizes == "fit_machine" else Fraction(1)
    _check_plan_names([one for _, one in asked], given, source)
    common = _common_plan_steps(asked, file, given, source)
    conditions = []
    for labels, one in asked:
        where = f"{source}: condition {labels.label!r}"
        parts = tuple(
            _part(one, tenant, given, factor, where, common, keeps_all_steps=sizes == "as_published")
            for tenant in _tenants_of(one, file, where)
        )
        conditions.append(Condition(*labels, one.baseline, one.shares_wall, parts))
    experiment = _named(file, conditions, given, sizes, seed, repeats)
    _check_whole(experiment, source)
    _check_fits(experiment, given, source)
    return experiment


def _parsed(text: str, source: str) -> _File:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnusableExperiment(f"{source}: no TOML: {error}") from None
    try:
        return _File.model_validate(table)
    except ValidationError as error:
        raise UnusableExperiment(worded_faults(error, source, _File)) from None


def worded_faults(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    """What pydantic found wrong with a table of the file `where`, one line per fault."""
    lines = []
    wanted_of: dict[str, list[str]] = {}
    found_of: dict[str, Any] = {}
    for fault in error.errors():
        # Members of a union are told apart by names that are none of the file's.
        key = ".".join(str(part) for part in fault["loc"] if not re.search(r"[\[(]|^(int|str)$", str(part)))
        if fault["type"] == "extra_forbidden":
            lines.append(f"{where}: key {key} is unknown, wanted one of {', '.join(model.model_fields)}")
        elif fault["type"] == "missing":
            lines.append(f"{where}: key {key} is missing")
        else:
            wanted = fault["msg"]
            for words in ("Input should be ", "a valid ", "String should have ", "String should "):
                wanted = wanted.removeprefix(words)
            # Each member of a union says what it wanted.
            wanted_of.setdefault(key, []).append(wanted)
            found_of[key] = fault["input"]
    for key, members in wanted_of.items():
        place = f"key {key}: " if key else ""
        lines.append(f"{where}: {place}wanted {' or '.join(dict.fromkeys(members))}, found {_shown(found_of[key])}")
    return "\n".join(dict.fromkeys(lines))


def _shown(value: Any) -> str:
    """A value in a sentence: itself where it is short, else what kind of thing it is."""
    if isinstance(value, Mapping | list) and len(repr(value)) > _MOST_SHOWN:
        return f"{'a list' if isinstance(value, list) else 'a table'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(str(value)):,} characters)"


class _Labels(NamedTuple):
    """What a condition is called; arm: its [[condition]] without the values of lists; group: those of [common]."""

    label: str
    arm: str
    group: str


_Listed = tuple[_Labels, dict[str, Any]]


def _expanded(entry: dict[str, Any], file: _File, sizes: str, source: str, number: int) -> list[_Listed]:
    """(labels, keys) of each combination of the lists of a [[condition]] and of [common]."""
    where = f"{source}: condition {number}"
    common = {key: value for key, value in file.common.items() if key not in entry}
    if sizes == "as_published":
        common = _published(common, file, where)
        entry = _published(entry, file, where)
    found = []
    for said, own in combinations(entry, where):
        given = entry.get("label")
        arm = given if isinstance(given, str) else str(own.get("owner", common.get("owner", "page_cache")))
        label = [arm, *said] if isinstance(given, str) or not said else said
        for group, shared in combinations(common, where):
            found.append((_Labels(", ".join([*label, *group]), arm, ", ".join(group)), {**shared, **own}))
    return found


def combinations(table: dict[str, Any], where: str) -> list[tuple[list[str], dict[str, Any]]]:
    """(names of the values chosen, the table with them) of every combination of the values of keys that are lists."""
    axes = {key: value for key, value in table.items() if _is_axis(key, value)}
    empty = [key for key, values in axes.items() if not values]
    count = math.prod(len(values) for values in axes.values())
    if count > _MOST_CONDITIONS:
        raise UnusableExperiment(f"{where}: {count} combinations of its lists, wanted at most {_MOST_CONDITIONS}")
    if empty:
        raise UnusableExperiment(f"{where}: key {empty[0]}: wanted a value or a list of values, found an empty list")
    rest = {key: value for key, value in table.items() if key not in axes}
    chosen = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [([_said(key, value) for key, value in one.items()], {**rest, **one}) for one in chosen]


def _is_axis(key: str, value: Any) -> bool:
    if key == "streams":
        return isinstance(value, list) and any(isinstance(item, list) for item in value)
    return isinstance(value, list) and key not in _AXES


def _said(key: str, value: Any) -> str:
    if key == "streams" and isinstance(value, list):
        return "streams " + "+".join(str(item) for item in value)
    return value if isinstance(value, str) else f"{key} {value}"


def _published(table: dict[str, Any], file: _File, where: str) -> dict[str, Any]:
    """The table with the study's sizes in the place of the file's."""

    def of(size: Any) -> Any:
        if isinstance(size, list):
            return [of(one) for one in size]
        if size not in file.published:
            raise UnusableExperiment(
                f"{where}: size {size!r} has no counterpart in [published] of {file.name}, so there is nothing to run "
                "as published; leave --as-published out, or add one"
            )
        return file.published[size]

    return {key: of(value) if key in _MEMORY else value for key, value in table.items()}


def _validated(listed: Sequence[_Listed], source: str) -> list[tuple[_Labels, _Asked]]:
    asked, faults = [], []
    for labels, keys in listed:
        try:
            one = _Asked.model_validate(keys)
        except ValidationError as error:
            faults.append(worded_faults(error, f"{source}: condition {labels.label!r}", _Asked))
        else:
            if one.streams is not None and "trace" in one.model_fields_set:
                faults.append(f"{source}: condition {labels.label!r}: trace and streams; say one of them")
            asked.append((labels, one))
    if faults:
        raise UnusableExperiment("\n".join(faults))
    return asked


@dataclass(frozen=True)
class Size:
    """A share of the pool's bytes, plus bytes."""

    share: Fraction
    more: int

    def bytes_of(self, pool_bytes: int, factor: Fraction) -> int:
        # What comes beside a share is for the reader, and does not shrink with the pool's part.
        more = self.more if self.share else int(self.more * factor)
        return int(self.share * factor * pool_bytes) + more


def size_of(value: str | int, where: str) -> Size:
    """`40%`, `512MiB`, `40% + 128MiB`, or bytes."""
    share, more = Fraction(0), 0
    for term in str(value).split("+"):
        percent = _TERM.fullmatch(term)
        try:
            if percent:
                share += parse_fraction(percent.group(1)) / 100
            else:
                more += parse_bytes(term)
        except ValueError as error:
            raise UnusableExperiment(
                f"{where}: wanted a size, a share of the pool or their sum, such as 512MiB, 40% or 40% + 128MiB, found "
                f"{str(value)[:60]!r} ({error})"
            ) from None
    return Size(share, more)


def _factor(asked: Iterable[_Asked], given: Given, source: str) -> Fraction:
    """At most 1: how much smaller sizes must be for the largest condition to fit this machine."""
    most = min(MOST_BYTES_HERE, given.memory_bytes // 2)
    factor = Fraction(1)
    for one in asked:
        pool_bytes = max(size for _, size in given.pools)
        parts = len(one.tenants or [None])
        for key in ("capacity", "wall"):
            value = getattr(one, key)
            if value is None:
                continue
            size = size_of(value, f"{source}: key {key}")
            fixed = parts * size.more if size.share else 0
            scaled = parts * size.bytes_of(pool_bytes, Fraction(1)) - fixed
            if fixed >= most:
                raise UnusableExperiment(
                    f"{source}: {value} leaves nothing for experts of the {format_bytes(most)} that --fit-machine may "
                    "use here"
                )
            if scaled > most - fixed:
                factor = min(factor, Fraction(most - fixed, scaled))
    return factor


def _tenants_of(one: _Asked, file: _File, where: str) -> list[_Tenant | None]:
    if one.tenants is None:
        return [None]
    known = {tenant.name: tenant for tenant in file.tenant}
    missing = [name for name in one.tenants if name not in known]
    if missing or not one.tenants or len(set(one.tenants)) < len(one.tenants):
        raise UnusableExperiment(
            f"{where}: key tenants: wanted different names of [[tenant]] ({', '.join(known) or 'there is none'}), "
            f"found {one.tenants}"
        )
    return [known[name] for name in one.tenants]


def _part(
    one: _Asked,
    tenant: _Tenant | None,
    given: Given,
    factor: Fraction,
    where: str,
    common: tuple[int, int] | None,
    *,
    keeps_all_steps: bool,
) -> Part:
    source = one if tenant is None else tenant
    streams = _streams(source, given, where)
    if source.pool >= len(given.pools):
        raise UnusableExperiment(
            f"{where}: pool {source.pool} (from 0), but the call names {len(given.pools)}; give --pool once for each"
        )
    pool_bytes = given.pools[source.pool][1]

    def sized(key: str) -> int | None:
        value = getattr(one, key)
        return None if value is None else size_of(value, f"{where}: key {key}").bytes_of(pool_bytes, factor)

    traces = [given.traces[stream] for stream in streams]
    request = Request(
        owner=one.owner,
        mechanism=one.mechanism,
        capacity_bytes=sized("capacity"),
        wall_bytes=sized("wall"),
        headroom_bytes=sized("headroom") or 0,
        outer_group_bytes=sized("machine_bytes"),
        miss_path=one.miss_path,
        arena_fraction=one.arena_fraction,
        policy=one.policy,
        scope=one.scope,
        fit=_with_paths(one.fit, given, where),
        admit=_with_paths(_with_number(one.admit, one.scope, traces[0]), given, where),
        seed=one.seed,
        fadvise=one.fadvise,
        destination=one.device,
        threads=one.threads,
        observe=one.observe,
        verify=one.verify,
        group_stat=one.group_stat,
        accelerator_memory=one.accelerator_memory,
        plan=None if one.plan is None else _plan_path(one.plan, given, where),
        delivery=one.delivery,
        split=_split(one.split, where),
        hint_slots=one.hint_slots,
        warm_pass=not one.cold,
        steps=_steps(one, min(trace.steps for trace in traces), common, keeps_all_steps),
        allow_thrash=one.allow_thrash,
        allow_unsuitable=one.allow_unsuitable,
    )
    return Part(None if tenant is None else tenant.name, streams, source.pool, request)


def _streams(source: _Asked | _Tenant, given: Given, where: str) -> tuple[int, ...]:
    named = source.streams if source.streams is not None else [source.trace]
    if not named:
        raise UnusableExperiment(f"{where}: key streams: wanted at least one trace, found an empty list")
    return tuple(_trace(name, given, where) for name in named)


def _check_plan_names(asked: Sequence[_Asked], given: Given, source: str) -> None:
    known = {one.plan for one in asked if one.plan is not None}
    unused = sorted(set(given.plans) - known)
    if unused:
        wanted = f"wanted {' or '.join(sorted(known))}" if known else "none has a plan at all; leave it out"
        raise UnusableExperiment(
            f"--plan {unused[0][:80]}=, but no condition of {source} has a plan so named; {wanted}"
        )


def _common_plan_steps(
    asked: Sequence[tuple[_Labels, _Asked]], file: _File, given: Given, source: str
) -> tuple[int, int] | None:
    """The steps for which every plan of the experiment names experts; null where no plan, or nobody, says any."""
    spans: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for labels, one in asked:
        where = f"{source}: condition {labels.label!r}"
        if one.plan is None or given.plan_steps is None:
            continue
        _plan_path(one.plan, given, where)
        for tenant in _tenants_of(one, file, where):
            streams = _streams(one if tenant is None else tenant, given, where)
            span = given.plan_steps(one.plan, streams)
            if span is None:
                raise UnusableExperiment(f"{where}: plan {one.plan!r} names no expert for any step; give another")
            spans[one.plan, streams] = span
    if not spans:
        return None
    begin, end = max(first for first, _ in spans.values()), min(last for _, last in spans.values())
    if begin >= end:
        said = ", ".join(f"{name} {first} to {last - 1}" for (name, _), (first, last) in sorted(spans.items()))
        raise UnusableExperiment(
            f"{source}: its plans have no step in common ({said}), so their conditions cannot be compared; give plans "
            "of the same steps"
        )
    return begin, end


def _plan_path(name: str, given: Given, where: str) -> str:
    if name not in given.plans:
        raise UnusableExperiment(
            f"{where}: plan {name!r}, but the call gives {', '.join(sorted(given.plans)) or 'none'}; "
            f"add --plan {name}=FILE"
        )
    return given.plans[name][0]


def _split(said: str | int, where: str) -> str | int:
    if said in ("auto", "none"):
        return said
    try:
        return parse_bytes(str(said))
    except ValueError as error:
        raise UnusableExperiment(
            f"{where}: key split: wanted auto, none or a size, found {str(said)[:60]!r} ({error})"
        ) from None


def _trace(name: int | str, given: Given, where: str) -> int:
    if isinstance(name, int):
        if name >= len(given.traces):
            raise UnusableExperiment(
                f"{where}: trace {name} (from 0), but the call names {len(given.traces)}; name more traces"
            )
        return name
    found = [place for place, trace in enumerate(given.traces) if trace.trace_id.startswith(name)]
    if len(found) != 1:
        raise UnusableExperiment(
            f"{where}: trace {name!r}, wanted the beginning of exactly one of "
            f"{', '.join(trace.trace_id for trace in given.traces)}"
        )
    return found[0]


def _with_paths(text: str | None, given: Given, where: str) -> str | None:
    """`@1` of a fit or an admission is the second trace of the call."""
    found = _TRACE_OF_FIT.match(text or "")
    if text is None or found is None:
        return text
    return given.traces[_trace(int(found.group(1)), given, where)].path + text[found.end() :]


def _with_number(admit: str | None, scope: str | None, trace: GivenTrace) -> str | None:
    """`…:top:25%` as a number of experts, at least one: of each layer in scope layer, else of all."""
    found = _TOP_SHARE.search(admit or "")
    if admit is None or found is None:
        return admit
    experts = trace.experts_per_layer if scope == "layer" else trace.experts
    return f"{admit[: found.start()]}:top:{max(1, int(parse_fraction(found.group(1)) / 100 * experts))}"


def _steps(
    one: _Asked, available: int, common: tuple[int, int] | None, keeps_all: bool
) -> tuple[int | None, int | None]:
    begin, _, end = one.steps.partition(":")
    first, last = int(begin) if begin else None, int(end) if end else None
    if common is not None and one.steps == ":":
        # Where a plan says nothing a run with it is one without, so all conditions replay what every plan speaks of.
        first, last = common[0], min(common[1], available)
    if one.at_most_steps is None or keeps_all:
        return first, last
    begins = first or 0
    # Nothing is hidden by the shorter of the two: the run's row says which steps it replayed.
    return begins, min(begins + one.at_most_steps, available if last is None else last)


def _named(
    file: _File, conditions: Sequence[Condition], given: Given, sizes: str, seed: int | None, repeats: int | None
) -> Experiment:
    seed = file.seed if seed is None else seed
    repeats = file.repeats if repeats is None else repeats
    paths = {trace.path: f"@{place}" for place, trace in enumerate(given.traces)}
    digests = dict(given.plans.values())
    asked = []
    for one in conditions:
        parts = []
        for part in one.parts:
            request = asdict(part.request)
            for key in ("fit", "admit"):
                request[key] = _without_paths(request[key], paths)
            # By what it says, wherever it lies.
            request["plan"] = None if part.request.plan is None else digests[part.request.plan]
            parts.append({"tenant": part.tenant, "streams": part.streams, "pool": part.pool, "request": request})
        asked.append({"label": one.label, "group": one.group, "is_baseline": one.is_baseline,
                      "shares_wall": one.shares_wall, "parts": parts})  # fmt: skip
    said = {
        "name": file.name,
        "order": file.order,
        "conditions": asked,
        "traces": [trace.trace_id for trace in given.traces],
        "pools": [pool_id for pool_id, _ in given.pools],
    }
    definition = json.dumps(said, sort_keys=True)
    named = json.dumps([definition, seed, given.machine_id, given.replayer_version])
    return Experiment(
        experiment_id=f"{file.name}-{hashlib.sha256(named.encode()).hexdigest()[:12]}",
        name=file.name,
        question=file.question,
        finding=file.finding,
        metrics=tuple(file.metrics),
        order=file.order,
        sizes=sizes,
        seed=seed,
        repeats=repeats,
        conditions=tuple(conditions),
        definition=definition,
    )


def _without_paths(text: str | None, paths: Mapping[str, str]) -> str | None:
    """A trace is what its id says, wherever it lies."""
    for path, place in paths.items():
        if text is not None and (text == path or text.startswith(path + ":")):
            return place + text[len(path) :]
    return text


def _check_whole(experiment: Experiment, source: str) -> None:
    """Refuses conditions among which nothing can be compared."""
    labels = [one.label for one in experiment.conditions]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise UnusableExperiment(f"{source}: two conditions are called {min(twice)!r}; give them different labels")
    if len(labels) < 2:
        raise UnusableExperiment(f"{source}: one condition, wanted at least two to compare")
    if experiment.finding == "tenants" and not any(len(one.parts) > 1 for one in experiment.conditions):
        raise UnusableExperiment(f"{source}: finding tenants, but no condition has two tenants; add [[tenant]]")
    for group, members in _groups(experiment.conditions).items():
        among = f" of group {group!r}" if group else ""
        baselines = [one for one in members if one.is_baseline]
        if experiment.finding == "response":
            sizes = [_memory_of(one) for one in members]
            if baselines or None in sizes or len(set(sizes)) < len(sizes) or len(sizes) < 2:
                raise UnusableExperiment(
                    f"{source}: finding response wants different capacities{among} and no baseline, which is the "
                    f"largest; found {len(members)} conditions of {len(set(sizes))} capacities"
                )
        elif not baselines or len(baselines) == len(members):
            raise UnusableExperiment(
                f"{source}: {len(baselines)} of {len(members)} conditions{among} have baseline = true, wanted one that "
                "the others are compared with"
            )
        if experiment.order == "pairs" and len(members) != 2:
            raise UnusableExperiment(f"{source}: order pairs wants two conditions{among}, found {len(members)}")
    for one in experiment.conditions:
        pools = [part.pool for part in one.parts]
        if len(set(pools)) < len(pools):
            raise UnusableExperiment(
                f"{source}: condition {one.label!r}: tenants share pool {pools[0]}, wanted a pool of its own for each: "
                "what one reads would be a hit of the other"
            )
        if one.shares_wall and len(one.parts) < 2:
            raise UnusableExperiment(f"{source}: condition {one.label!r}: shares_wall of one tenant, wanted several")


def _groups(conditions: Iterable[Condition]) -> dict[str, list[Condition]]:
    groups: dict[str, list[Condition]] = {}
    for one in conditions:
        groups.setdefault(one.group, []).append(one)
    return groups


def _memory_of(one: Condition) -> int | None:
    """What a condition may use, of all its tenants."""
    sizes = [part.request.wall_bytes or part.request.capacity_bytes for part in one.parts]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _check_fits(experiment: Experiment, given: Given, source: str) -> None:
    """Refuses sizes that the machine does not have, or that hold the whole pool under the study's sizes."""
    for one in experiment.conditions:
        wanted = _memory_of(one)
        if wanted is None:
            continue
        headroom = sum(part.request.headroom_bytes for part in one.parts if part.request.wall_bytes is None)
        if wanted + headroom > given.available_bytes:
            remedy = "add --fit-machine" if experiment.sizes == "as_written" else "use a machine with more memory"
            if experiment.sizes == "fit_machine":
                remedy = "end what holds the memory"
            raise UnusableExperiment(
                f"{source}: condition {one.label!r} wants {format_bytes(wanted + headroom)} of memory, but this "
                f"machine has {format_bytes(given.available_bytes)} available; {remedy}"
            )
        for part in one.parts:
            size = part.request.capacity_bytes or part.request.wall_bytes or 0
            if experiment.sizes == "as_published" and size >= given.pools[part.pool][1]:
                raise UnusableExperiment(
                    f"{source}: condition {one.label!r} gives {format_bytes(size)} to a pool of "
                    f"{format_bytes(given.pools[part.pool][1])}, which would fit whole, and nothing would be missed; "
                    "use a pool of the study's size, or --fit-machine"
                )


def blocks(conditions: Sequence[Condition], repeats: int, seed: int, order: str) -> list[list[Cell]]:
    """(repeats,) blocks, each with every condition once, in an order that only its number and the seed decide.

    random: shuffled, and a block does not begin with what the one before ended with. pairs: the two conditions of each
    group follow one another, in block 0, 3, 6 … in the order given, in block 1, 4 … the other way round, in block 2,
    5 … as drawn; so either comes first equally often, and neighbours across blocks may be equal.
    """
    found: list[list[Cell]] = []
    for repetition in range(repeats):
        generator = np.random.default_rng([seed, repetition])
        if order == "pairs":
            pairs = [[one.label for one in members] for members in _groups(conditions).values()]
            turned = [pair[::-1] if repetition % 3 == 1 else pair for pair in pairs]
            if repetition % 3 == 2:
                turned = [[pair[place] for place in generator.permutation(len(pair))] for pair in pairs]
            labels = [label for place in generator.permutation(len(turned)) for label in turned[place]]
        else:
            labels = [conditions[place].label for place in generator.permutation(len(conditions))]
            if found and len(labels) > 1 and labels[0] == found[-1][-1].condition:
                other = int(generator.integers(1, len(labels)))
                labels[0], labels[other] = labels[other], labels[0]
        found.append([Cell(label, repetition) for label in labels])
    return found


def remaining(planned: Sequence[Sequence[Cell]], done: Collection[Cell]) -> list[list[Cell]]:
    """What is left of the blocks, in the same order; blocks with nothing left are gone."""
    left = [[cell for cell in block if cell not in done] for block in planned]
    return [block for block in left if block]


def run_block(block: Sequence[Cell], attempt: Callable[[Cell, int], bool], *, most: int = MOST_ATTEMPTS) -> list[Cell]:
    """Calls `attempt` (cell, how often this call tried it before) for each cell; gives the cells that never counted.

    `attempt` says whether the run counts as a repetition. What does not is tried again after the rest of its block, so
    that repetitions stay close to the conditions they are compared with.
    """
    waiting = [(cell, 0) for cell in block]
    lost = []
    while waiting:
        cell, tried = waiting.pop(0)
        if attempt(cell, tried):
            continue
        if tried + 1 < most:
            waiting.append((cell, tried + 1))
        else:
            lost.append(cell)
    return lost
