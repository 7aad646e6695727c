"""Two results side by side: every contract column in which they differ first, then what was measured or simulated.

A result is a native replay, a decode, a row of a simulation, or a condition (medians over its repetitions), read from
the warehouse. A comparison stays within one contract: results that differ in more than one kind of contract column are
shown, and marked as not comparable. Pure but for `find_result`, which asks the warehouse.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from schemas.columns import COLUMNS
from schemas.tables import TABLES

Row = dict[str, Any]
Kinds = Mapping[str, tuple[str, ...]]

MACHINE = tuple(name for name in TABLES["machine"].column_names if name != "machine_id")
_BOOTED_SMALLER = frozenset({"machine_id", "memory_bytes", "min_free_bytes", "numa_nodes"})
"""What differs of one machine that was booted with less memory: the limit itself, not another machine."""

NATIVE: Kinds = {
    "trace": ("trace_id",),
    "pool": ("pool_id",),
    "machine": ("machine_id", *MACHINE),
    "owner": ("owner", "policy", "scope", "fit", "admission", "seed", "arena_fraction", "miss_path"),
    "wall": ("mechanism", "limited_by", "group_stat", "outer_group_bytes", "headroom_bytes"),
    "capacity": ("capacity_bytes", "wall_bytes"),
    "semantics": ("access_order",),
    "window": ("step_begin", "step_end", "warm_pass"),
    "reading": ("fadvise", "destination", "threads"),
    "observation": ("observe", "residency_counter", "files_stay_open", "verify"),
    "plan": ("delivery", "plan_hash", "piece_bytes", "hint_slots"),
    "company": ("tenants", "tenant_number", "shares_wall"),
    "experiment": ("experiment_id",),
}
DECODED: Kinds = {
    "model": ("model", "model_folder", "compute_dtype"),
    "prompt": ("prompt_name", "prompt_sha256"),
    "pool": ("pool_id",),
    "machine": ("machine_id", *MACHINE),
    "owner": ("owner", "policy"),
    "wall": ("mechanism",),
    "capacity": ("capacity_bytes", "wall_bytes"),
    "window": ("decoded_tokens", "warm_pass"),
    "reading": ("threads",),
}
SIMULATED: Kinds = {
    "trace": ("trace_id",),
    "policy": ("policy", "fit", "seed", "pinned_fraction", "admission", "folios_per_expert"),
    "scope": ("scope", "quota_fit"),
    "capacity": ("capacity_experts_total", "capacity_bytes"),
    "semantics": ("semantics", "access_order", "dedup"),
    "window": ("step_begin", "step_end", "warm_fraction", "warm_steps", "warm_pass"),
    "phase": ("phase",),
}
_SHARED = ("trace", "capacity", "window", "semantics")
"""Kinds that a measured and a simulated result both answer; who serves is what is asked of such a pair."""

NO_QUESTION = frozenset({"experiment", "observation"})
"""What nobody asks of two results: that they were not interleaved, or not observed alike."""

NOT_SET, UNKNOWN, NO_COLUMN = "not set", "unknown", "no such column"


class UnknownResult(ValueError):
    """No result is named so, or several are."""


@dataclass(frozen=True)
class Source:
    """A relation of the warehouse that results are rows of. `id_column` null: rows are named by their columns."""

    relation: str
    noun: str
    evidence: str
    kinds: Kinds
    id_column: str | None
    repetitions: str | None = None
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)


SOURCES = (
    Source("replay_run", "replay run", "measured", NATIVE, "run_id"),
    Source("decode_run", "decode run", "decoded", DECODED, "run_id"),
    Source("sweep", "simulated cell", "simulated", SIMULATED, "cell_hash"),
    Source(
        "native_condition", "condition", "measured", NATIVE, "condition_hash", "repetitions",
        {
            "device_bytes": ("device_low_bytes", "device_high_bytes"), "wall_ns": ("wall_low_ns", "wall_high_ns"),
            "iteration_ns": ("iteration_low_ns", "iteration_high_ns"),
        },
    ),
    Source(
        "decode_summary", "condition of decodes", "decoded", DECODED, "condition_hash", "valid_runs",
        {"tokens_per_s": ("tokens_per_s_low", "tokens_per_s_high")},
    ),
    Source("hit_rate", "simulated row", "simulated", SIMULATED, None),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One side of a comparison. faults: why its bytes are not believed; timed: whether its times are."""

    source: Source
    row: Row
    faults: tuple[str, ...] = ()
    timed: bool = True

    @property
    def name(self) -> str:
        if self.source.id_column is not None:
            return str(self.row[self.source.id_column])
        told = ("trace_id", "policy", "scope", "semantics", "capacity_experts_total", "capacity_bytes")
        return ",".join(f"{name}={self.row[name]}" for name in told if self.row[name] is not None)

    @property
    def repetitions(self) -> int | None:
        return None if self.source.repetitions is None else int(self.row[self.source.repetitions])

    @property
    def standing(self) -> str:
        """What the numbers are, and whether they are believed."""
        if self.source.evidence == "simulated":
            return "simulated"
        if self.repetitions is not None:
            return "a single repetition" if self.repetitions == 1 else f"medians of {self.repetitions} repetitions"
        if self.faults:
            return f"QUARANTINED, its bytes are not valid: {'; '.join(self.faults)}"
        return "a single run, bytes valid, " + ("times valid" if self.timed else "times NOT valid")


@dataclass(frozen=True)
class Difference:
    """A contract column in which two results differ. counted: whether it makes them differ in its kind."""

    kind: str
    column: str
    a: Any
    b: Any
    counted: bool
    why: str = ""


@dataclass(frozen=True)
class Quantity:
    """A quantity of both results; a ratio with its (numerator, denominator), a median with its (least, most)."""

    column: str
    a: Any
    b: Any
    a_parts: tuple[Any, Any] | None = None
    b_parts: tuple[Any, Any] | None = None
    a_range: tuple[Any, Any] | None = None
    b_range: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """Two results, what their contracts differ in, and their quantities."""

    a: Result
    b: Result
    differences: list[Difference]
    quantities: list[Quantity]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(one.kind for one in self.differences if one.counted))

    @property
    def comparable(self) -> bool:
        believed = not self.a.faults and not self.b.faults
        return believed and len(self.kinds) <= 1 and not NO_QUESTION.intersection(self.kinds)

    @property
    def verdict(self) -> str:
        faulty = " and ".join(letter for letter, one in (("A", self.a), ("B", self.b)) if one.faults)
        if faulty:
            return f"not comparable: {faulty} quarantined" + (
                f"; differs in {_named(self.kinds)} besides" if self.kinds else ""
            )
        if not self.kinds:
            return "comparable: one contract"
        if self.comparable:
            return f"comparable: differs in {self.kinds[0]} alone"
        return f"not comparable: differs in {_named(self.kinds)}, which is not a question"


def compare(a: Result, b: Result) -> Comparison:
    """What two results differ in, and what each of them counted."""
    return Comparison(a, b, _differences(a, b), _quantities(a, b))


def _differences(a: Result, b: Result) -> list[Difference]:
    crossed = a.source.evidence != b.source.evidence
    found = []
    if crossed:
        found.append(Difference("evidence", "evidence", a.source.evidence, b.source.evidence, counted=True))
    for kind in dict.fromkeys((*a.source.kinds, *b.source.kinds)):
        columns = dict.fromkeys((*a.source.kinds.get(kind, ()), *b.source.kinds.get(kind, ())))
        for column in columns:
            mine, other = a.row.get(column, NO_COLUMN), b.row.get(column, NO_COLUMN)
            if NO_COLUMN in (mine, other):
                # What one of them does not know of is named where it is set, and makes no difference in kind.
                if mine != other and {mine, other} != {NO_COLUMN, None}:
                    found.append(Difference(kind, column, mine, other, counted=False, why="a column of one of them"))
            elif mine != other:
                asked = not crossed or kind in _SHARED
                found.append(Difference(kind, column, mine, other, counted=asked, why="" if asked else "as evidence"))
    return _capacities_judged(_boots_judged(found, a.row, b.row), a.row, b.row)


def _boots_judged(found: list[Difference], a: Row, b: Row) -> list[Difference]:
    """A machine that was booted smaller is what limits memory, not another machine."""
    columns = {one.column for one in found if one.kind == "machine"}
    booted = {"boot", "offline"}.intersection((a.get("mechanism"), b.get("mechanism")))
    if not booted or not columns or not columns <= _BOOTED_SMALLER:
        return found
    return [
        Difference("wall", one.column, one.a, one.b, one.counted) if one.kind == "machine" else one for one in found
    ]


def _capacities_judged(found: list[Difference], a: Row, b: Row) -> list[Difference]:
    """Either the capacity or the wall was asked for, and the other follows; between owners equal means equal walls."""
    if "wall_bytes" not in a or "wall_bytes" not in b:
        return found
    walls = a["wall_bytes"], b["wall_bytes"]
    equal_walls = None not in walls and walls[0] == walls[1]
    equal_capacities = a["capacity_bytes"] == b["capacity_bytes"]
    by_wall = any(one.kind == "owner" for one in found) and None not in walls
    if equal_walls or (equal_capacities and not by_wall):
        why = "equal walls" if equal_walls else "equal capacities: a wall follows from a reader's own memory"
        return [
            Difference(one.kind, one.column, one.a, one.b, counted=False, why=why) if one.kind == "capacity" else one
            for one in found
        ]
    return found


_NO_QUANTITY = frozenset({
    "run_id", "cell_hash", "condition_hash", "started_at", "repeat", "failure", "bytes_valid", "bytes_reasons",
    "time_valid", "time_reasons", "together_id", "mechanism_detail", "computed_by", "is_repeated_enough",
})  # fmt: skip


def _quantities(a: Result, b: Result) -> list[Quantity]:
    contract = {name for one in (a, b) for columns in one.source.kinds.values() for name in columns}
    ends = {name for one in (a, b) for pair in one.source.ranges.values() for name in pair}
    names = [
        name for name in dict.fromkeys((*a.row, *b.row)) if name not in contract | ends and name not in _NO_QUANTITY
    ]
    found = []
    for name in names:
        sides = [_side(one, name) for one in (a, b)]
        if all(value in (None, NO_COLUMN) for value, _, _ in sides):
            continue
        (mine, mine_parts, mine_range), (other, other_parts, other_range) = sides
        found.append(Quantity(name, mine, other, mine_parts, other_parts, mine_range, other_range))
    return found


def _side(one: Result, name: str) -> tuple[Any, tuple[Any, Any] | None, tuple[Any, Any] | None]:
    if name not in one.row:
        return NO_COLUMN, None, None
    if name.endswith("_ns") and not one.timed:
        return "not valid", None, None
    column, ends = COLUMNS.get(name), one.source.ranges.get(name)
    parts = None
    if column is not None and column.ratio is not None and set(column.ratio) <= set(one.row):
        parts = one.row[column.ratio[0]], one.row[column.ratio[1]]
    return one.row[name], parts, None if ends is None else (one.row[ends[0]], one.row[ends[1]])


# Finding results


def find_result(text: str, read: Callable[[str], pl.DataFrame]) -> Result:
    """The result that `text` names: the begin of an id, or `[RELATION:]COLUMN=VALUE,…` that one row answers.

    read: gives a relation of the warehouse, whole.

    Raises:
        UnknownResult: none is named so, or several are.
    """
    source, row = _selected(text, read) if "=" in text else _by_id(text, read)
    return _result(source, row, read)


def _by_id(text: str, read: Callable[[str], pl.DataFrame]) -> tuple[Source, Row]:
    if not text:
        raise UnknownResult(f"'', wanted {_WANTED}")
    found: list[tuple[Source, Row]] = []
    for source in SOURCES:
        if source.id_column is not None:
            rows = read(source.relation).filter(pl.col(source.id_column).str.starts_with(text))
            found += [(source, row) for row in rows.to_dicts()]
    exact = [(source, row) for source, row in found if row[str(source.id_column)] == text]
    found = exact or found
    if len(found) == 1:
        return found[0]
    if not found:
        spoilt = read("replay_run").filter(pl.col("condition_hash").str.starts_with(text))
        if spoilt.height:
            raise UnknownResult(
                f"{text!r:.60}: a condition without a valid and complete run of its own; compare its runs: "
                f"{_some(sorted(spoilt['run_id']))}"
            )
        raise UnknownResult(f"{text!r:.60}: no such result in the warehouse, wanted {_WANTED}")
    if exact:
        source = exact[0][0]
        raise UnknownResult(
            f"{text!r:.60}: {len(found)} rows of {source.relation}, which differ in "
            f"{_some(_varying([row for _, row in found], source))}; name one as "
            f"{source.relation}:{source.id_column}={text},COLUMN=VALUE"
        )
    names = sorted({str(row[str(source.id_column)]) for source, row in found})
    raise UnknownResult(f"{text!r:.60}: {len(found)} results begin so, {_some(names)}; give more of it")


_WANTED = (
    "a run_id, condition_hash or cell_hash (or its first characters), or COLUMN=VALUE,… of a row of hit_rate, "
    "see: expert-tier query 'FROM simulated'"
)


def _selected(text: str, read: Callable[[str], pl.DataFrame]) -> tuple[Source, Row]:
    relation, colon, rest = text.partition(":")
    if not colon or "=" in relation:
        relation, rest = "hit_rate", text
    source = next((one for one in SOURCES if one.relation == relation), None)
    if source is None:
        raise UnknownResult(
            f"{text!r:.60}: no relation {relation!r:.40} to compare; wanted one of "
            f"{', '.join(one.relation for one in SOURCES)}"
        )
    rows = read(relation)
    for part in rest.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in rows.columns:
            raise UnknownResult(f"{text!r:.60}: {part!r:.60} in it, wanted COLUMN=VALUE with a column of {relation}")
        # As it is printed: a selection is typed off what a query showed.
        shown = rows[name].cast(pl.String)
        wanted = pl.lit(value.lower() if rows.schema[name] == pl.Boolean else value)
        rows = rows.filter(shown.is_null() if value in ("null", NOT_SET) else (pl.lit(shown) == wanted))
    if rows.height == 1:
        return source, rows.row(0, named=True)
    if not rows.height:
        raise UnknownResult(f"{text!r:.200}: no row of {relation} is so; see: expert-tier query 'FROM {relation}'")
    raise UnknownResult(
        f"{text!r:.200}: {rows.height} rows of {relation}, which differ in {_some(_varying(rows.to_dicts(), source))}; "
        "add those as COLUMN=VALUE"
    )


def _varying(rows: Sequence[Row], source: Source) -> list[str]:
    columns = [name for names in source.kinds.values() for name in names if name in rows[0]]
    return [name for name in columns if len({row[name] for row in rows}) > 1]


def _result(source: Source, row: Row, read: Callable[[str], pl.DataFrame]) -> Result:
    row = dict(row)
    if source.relation == "replay_run":
        own = pl.col("run_id") == row["run_id"]
        plan = _one_row(read("replay_delivery").filter(own))
        row |= {name: plan.get(name) for name in NATIVE["plan"]}
        row["experiment_id"] = _one_row(read("experiment_run").filter(own)).get("experiment_id")
        booted = row["mechanism"] in ("boot", "offline")
        row["limited_by"] = row["mechanism"] if booted else row["mechanism_detail"] or row["mechanism"]
    if "machine_id" in row:
        machine = _one_row(read("machine").filter(pl.col("machine_id") == row["machine_id"]))
        row |= {name: machine.get(name) for name in MACHINE}
    return Result(source, row, tuple(_faults(source, row, read)), timed=bool(row.get("time_valid", True)))


def _faults(source: Source, row: Row, read: Callable[[str], pl.DataFrame]) -> Iterator[str]:
    """Why a run is kept but not believed: the proofs that failed."""
    if row.get("degenerate"):
        yield "degenerate, one token repeats"
    if row.get("bytes_valid", True):
        return
    proofs = pl.DataFrame()
    if source.relation == "replay_run":
        proofs = read("replay_proof").filter(pl.col("run_id") == row["run_id"], ~pl.col("held"))
        proofs = proofs.filter(pl.col("spoils") == "bytes")
    for proof in proofs.iter_rows(named=True):
        yield f"proof {proof['name']!r} failed: expected {proof['expected']}, found {proof['found']}"
    if not proofs.height:
        yield str(row["bytes_reasons"]) or "no reason is kept"


def _one_row(rows: pl.DataFrame) -> Row:
    return rows.row(0, named=True) if rows.height else {}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _named(kinds: Sequence[str]) -> str:
    return " and ".join((", ".join(kinds[:-1]), kinds[-1])) if len(kinds) > 1 else "".join(kinds)


# Showing


def comparison_text(found: Comparison) -> list[str]:
    """The comparison as lines of text."""
    lines = [
        f"A: {found.a.source.noun} {found.a.name}: {found.a.standing}",
        f"B: {found.b.source.noun} {found.b.name}: {found.b.standing}",
        "",
    ]
    if not found.differences:
        lines.append("contract: no column differs")
    else:
        lines.append("contract, the columns that differ:")
        rows = [
            (
                f"{one.kind}: {one.column}",
                _contract(one.a, one.kind),
                _contract(one.b, one.kind),
                f"({one.why})" if one.why else "",
            )
            for one in found.differences
        ]
        lines += _aligned([("", "A", "B", ""), *rows])
    lines += [found.verdict, "", "quantities" + ("" if found.comparable else ", NOT comparable") + ":"]
    head = ("", "A", "B", "B ÷ A" if found.comparable else "")
    shown = [
        (
            one.column,
            _quantity(one.a, one.a_parts, one.a_range),
            _quantity(one.b, one.b_parts, one.b_range),
            _over(one) if found.comparable else "",
        )
        for one in found.quantities
    ]
    return [*lines, *_aligned([head, *shown])]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]


def _contract(value: Any, kind: str) -> str:
    if value is None:
        return UNKNOWN if kind == "machine" else NOT_SET
    return _value(value)


def _value(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _quantity(value: Any, parts: tuple[Any, Any] | None, ends: tuple[Any, Any] | None) -> str:
    text = _value(value)
    if parts is not None:
        text += f" = {_value(parts[0])} ÷ {_value(parts[1])}"
    if ends is not None:
        text += f" ({_value(ends[0])} … {_value(ends[1])})"
    return text


def _over(one: Quantity) -> str:
    """B over A of counts, whose parts stand beside it; a ratio of ratios would not say of what."""
    numbers = [value for value in (one.a, one.b) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < 2 or not numbers[0] or one.a_parts is not None:
        return ""
    return f"{numbers[1] / numbers[0]:.4g}"


def comparison_document(found: Comparison) -> dict[str, Any]:
    """The comparison as one JSON document; unknown is null, what a result has no column for is left out."""

    def side(value: Any, parts: tuple[Any, Any] | None, ends: tuple[Any, Any] | None) -> dict[str, Any] | None:
        if value == NO_COLUMN:
            return None
        believed = value != "not valid"
        return {
            "value": value if believed else None,
            "valid": believed,
            "numerator": None if parts is None else parts[0],
            "denominator": None if parts is None else parts[1],
            "lowest": None if ends is None else ends[0],
            "highest": None if ends is None else ends[1],
        }

    results = [
        {
            "relation": one.source.relation, "name": one.name, "evidence": one.source.evidence,
            "repetitions": one.repetitions, "quarantined": bool(one.faults), "failed_proofs": list(one.faults),
            "times_valid": one.timed,
        }
        for one in (found.a, found.b)
    ]  # fmt: skip
    return {
        "results": results,
        "differences": [
            {
                "kind": one.kind, "column": one.column, "a": None if one.a == NO_COLUMN else one.a,
                "b": None if one.b == NO_COLUMN else one.b, "counted": one.counted, "note": one.why,
            }
            for one in found.differences
        ],
        "comparable": found.comparable,
        "verdict": found.verdict,
        "quantities": [
            {
                "column": one.column, "unit": COLUMNS[one.column].unit if one.column in COLUMNS else None,
                "a": side(one.a, one.a_parts, one.a_range), "b": side(one.b, one.b_parts, one.b_range),
            }
            for one in found.quantities
        ],
    }  # fmt: skip


def read_warehouse(data_dir: Path) -> Callable[[str], pl.DataFrame]:
    """Gives relations of a warehouse, each read once.

    Raises (the function given): WarehouseMissing, QueryFailed.
    """
    from warehouse.build import query

    known: dict[str, pl.DataFrame] = {}

    def read(relation: str) -> pl.DataFrame:
        if relation not in known:
            known[relation] = query(data_dir, f"FROM {relation}")
        return known[relation]

    return read
