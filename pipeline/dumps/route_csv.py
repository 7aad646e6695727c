"""Route CSV v1: a `#` preamble, then one line per (token, layer, slot), columns read by name.

Phase 0 is prefill, 1 decode. In prefill `step` is the token position and rows stand layer-major: a pass ends where the
layer number drops. In decode every `step` is a pass. The engine's own residency column is kept beside, never mixed in.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    ParsedDump,
    RefusedDump,
    RowBlock,
    first_bad_line,
    read_line,
)
from schemas.trace import MAX_EXPERT_BYTES, PHASE_CODES, EngineObservation

REQUIRED = ("turn", "phase", "step", "layer", "slot", "expert")
_TYPES = {
    "turn": pa.int64(), "phase": pa.int64(), "step": pa.int64(), "layer": pa.int64(), "slot": pa.int64(),
    "expert": pa.int64(), "weight": pa.float32(), "residency": pa.int64(),
}  # fmt: skip
_BLOCK_BYTES = 4 * 1024 * 1024
_MAX_PREAMBLE_LINES = 70_000
_MAX_PREAMBLE_LINE_BYTES = 64 * 1024
_MAX_FACTS = 1000
_WHOLE = re.compile(rb"\s*-?[0-9]{1,18}\s*", re.ASCII)
_HEXADECIMAL = re.compile(rb"(?:^|,)\s*-?0[xX]")
_RESIDENCY = (-1, 0, 1, 2)
"""Unknown, miss, hit, prefetch hit; the published files use no other value."""


@dataclass(frozen=True)
class _Preamble:
    facts: dict[str, str]
    expert_bytes: dict[int, int]
    columns: list[str]
    lines: int


def parse(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Reads the preamble at once, rows as they are asked for.

    Raises:
        MalformedDump: no header, a missing column, a line that does not parse, rows that are not whole. RefusedDump:
            another version.
    """
    version = re.match(rb"# *route_trace v([0-9]{1,9})\b", dump.head())
    if version is not None and int(version[1]) != 1:
        raise RefusedDump(f"{dump.path}: route CSV version {int(version[1])}, wanted 1; record with another version")
    preamble = _preamble(dump)
    top_k = _fact(dump, preamble, "n_expert_used")
    first = _first_group(dump, preamble) if top_k is None else top_k
    parsed = ParsedDump(
        format="route_csv_v1",
        blocks=iter(()),
        top_k=first,
        model=_model_name(preamble.facts.get("model")),
        engine=preamble.facts.get("engine"),
        hidden_layers=_fact(dump, preamble, "n_layer"),
        num_experts=_fact(dump, preamble, "n_expert"),
        layer_expert_bytes=preamble.expert_bytes or None,
        requests_named=True,
    )
    parsed.blocks = _blocks(dump, preamble, parsed)
    return parsed


LAYOUTS = (
    Layout(
        "route_csv_v1",
        "route CSV v1",
        lambda sample: sample.head.startswith(b"# route_trace") or sample.columns >= {"layer", "slot", "expert"},
        parse,
    ),
)


def _model_name(value: str | None) -> str | None:
    # Engines write the path of the model file; its name is what identifies the model.
    return value.rsplit("/", 1)[-1].removesuffix(".gguf") if value else None


def _fact(dump: DumpFile, preamble: _Preamble, name: str) -> int | None:
    value = preamble.facts.get(name)
    if value is None:
        return None
    if not _is_count(value) or not 0 < int(value) < 2**31:
        raise MalformedDump(f"{dump.path}: the preamble says {name}={value[:40]!r}, wanted a positive whole number")
    return int(value)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _preamble(dump: DumpFile) -> _Preamble:
    stream = dump.stream()
    facts: dict[str, str] = {}
    expert_bytes: dict[int, int] = {}
    for number in range(1, _MAX_PREAMBLE_LINES):
        line = read_line(stream, dump.path, number)
        if not line:
            raise MalformedDump(f"{dump.path}: ends in its preamble, after {number - 1} lines: truncated")
        text = line.decode("utf-8", errors="replace").strip()
        if not text:
            continue
        if not text.startswith("#"):
            columns = [name.strip() for name in text.split(",")]
            missing = [name for name in REQUIRED if name not in columns]
            if missing:
                raise MalformedDump(
                    f"{dump.path}, line {number}: column {missing[0]} is missing; wanted {', '.join(REQUIRED)}, "
                    f"found {text[:200]!r}"
                )
            if len(set(columns)) != len(columns):
                raise MalformedDump(f"{dump.path}, line {number}: a column stands twice in {text[:200]!r}")
            return _Preamble(facts, expert_bytes, columns, number)
        if len(line) > _MAX_PREAMBLE_LINE_BYTES:
            raise MalformedDump(f"{dump.path}, line {number}: a preamble line of {len(line)} bytes, at most 64 KiB")
        pairs = {key: value for key, _, value in (word.partition("=") for word in text.split()) if value}
        layer, size = pairs.get("layer", ""), pairs.get("expert_bytes", "")
        if _is_count(layer) and _is_count(size) and int(layer) < 2**16 and 0 < int(size) <= MAX_EXPERT_BYTES:
            expert_bytes[int(layer)] = int(size)
        elif "layer" not in pairs:
            facts |= pairs
        if len(facts) > _MAX_FACTS:
            raise MalformedDump(f"{dump.path}, line {number}: over {_MAX_FACTS} different facts in the preamble")
    raise MalformedDump(f"{dump.path}: {_MAX_PREAMBLE_LINES} preamble lines and no header; wanted {','.join(REQUIRED)}")


def _first_group(dump: DumpFile, preamble: _Preamble) -> int:
    """k by the slots of the first token and layer, where the preamble does not say n_expert_used."""
    slot_column = preamble.columns.index("slot")
    stream = dump.stream()
    slots = 0
    for number in range(1, preamble.lines + 4096):
        line = read_line(stream, dump.path, number)
        if number <= preamble.lines:
            continue
        fields = line.split(b",")
        if len(fields) <= slot_column or fields[slot_column].strip() != b"%d" % slots:
            break
        slots += 1
    if slots == 0:
        raise MalformedDump(f"{dump.path}, line {preamble.lines + 1}: the first row has no slot 0, so k is unknown")
    return slots


def _blocks(dump: DumpFile, preamble: _Preamble, parsed: ParsedDump) -> Iterator[RowBlock]:
    wanted = [name for name in _TYPES if name in preamble.columns]
    # Arrow reads 0x1f as 31; of the known columns none has an x, another one may.
    others = set(preamble.columns) - set(_TYPES) - {"expert_bytes"}
    if others:
        _refuse_hexadecimal(dump, preamble, wanted)
    stream = dump.stream()
    for number in range(1, preamble.lines + 1):
        read_line(stream, dump.path, number)
    if not stream.peek(1):
        return
    residency_hits, residency_rows = 0, 0
    rows = _Rows(dump, parsed.top_k)
    lines_before = preamble.lines
    source = _Watched(stream)
    try:
        reader = pacsv.open_csv(
            pa.PythonFile(io.BufferedReader(source, _BLOCK_BYTES), mode="r"),
            read_options=pacsv.ReadOptions(column_names=preamble.columns, block_size=_BLOCK_BYTES),
            parse_options=pacsv.ParseOptions(quote_char=False, ignore_empty_lines=True),
            convert_options=pacsv.ConvertOptions(
                column_types={name: _TYPES[name] for name in wanted}, include_columns=wanted, null_values=[]
            ),
        )
        for batch in reader:
            if source.has_x and not others:
                raise _bad_line(dump, preamble, wanted)
            columns = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in wanted}
            if "weight" in columns and (columns["weight"] < 0).any():
                raise _bad_line(dump, preamble, wanted)
            if "residency" in columns:
                if not np.isin(columns["residency"], _RESIDENCY).all():
                    raise _bad_line(dump, preamble, wanted)
                residency_rows += int((columns["residency"] >= 0).sum())
                residency_hits += int((columns["residency"] >= 1).sum())
            yield from rows.take(columns, lines_before, parsed.dropped_rows)
            lines_before += batch.num_rows
    except pa.ArrowInvalid as error:
        raise _bad_line(dump, preamble, wanted) from error
    yield from rows.finish()
    if residency_rows:
        parsed.observations.append(
            EngineObservation(
                meaning="residency column of the dump, per selection, prefetch hits counted as hits, all phases",
                accesses=residency_rows,
                hits=residency_hits,
                misses=residency_rows - residency_hits,
            )
        )


class _Watched(io.RawIOBase):
    """A stream that remembers whether an x was in it."""

    def __init__(self, inner: io.BufferedReader) -> None:
        self._inner, self.has_x = inner, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        count = self._inner.readinto(buffer)
        part = bytes(buffer[:count])
        self.has_x |= b"x" in part or b"X" in part
        return count


def _refuse_hexadecimal(dump: DumpFile, preamble: _Preamble, wanted: list[str]) -> None:
    """Raises MalformedDump if a column of numbers has one that is hexadecimal; a walk of its own over the file."""
    fault_of = _fault_of(preamble, wanted)
    stream, number = dump.stream(), 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if number > preamble.lines and _HEXADECIMAL.search(line) and fault_of(line) is not None:
            raise _bad_line(dump, preamble, wanted)


def _bad_line(dump: DumpFile, preamble: _Preamble, wanted: list[str]) -> MalformedDump:
    return first_bad_line(dump, _fault_of(preamble, wanted), skip_lines=preamble.lines)


def _fault_of(preamble: _Preamble, wanted: list[str]) -> Callable[[bytes], str | None]:
    places = {name: preamble.columns.index(name) for name in wanted}
    width = len(preamble.columns)

    def fault(line: bytes) -> str | None:
        fields = line.rstrip(b"\r\n").split(b",")
        if len(fields) != width:
            return f"{len(fields)} fields, wanted {width} ({','.join(preamble.columns)})"
        for name, place in places.items():
            field = fields[place]
            if not (_is_weight(field) if name == "weight" else _WHOLE.fullmatch(field)):
                kind = "a number" if name == "weight" else "a whole number"
                return f"{name} is {field[:40].decode('utf-8', 'replace')!r}, wanted {kind}"
            if name == "residency" and int(field) not in _RESIDENCY:
                return (
                    f"residency is {int(field)}, wanted 0 (miss), 1 (hit), 2 (prefetch hit) or -1 (unknown); is "
                    "another column meant?"
                )
            if name == "weight" and float(field) < 0:
                return f"weight is {float(field):.4g}, wanted 0 or more, or nan where it is unknown"
        return None

    return fault


def _is_weight(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field


class _Rows:
    """Groups lines into (token, layer) rows and rows into steps, holding back what may still go on."""

    def __init__(self, dump: DumpFile, top_k: int) -> None:
        self.dump = dump
        self.top_k = top_k
        self.held: dict[str, npt.NDArray[Any]] = {}
        self.steps = 0

    def take(
        self, columns: dict[str, npt.NDArray[Any]], lines_before: int, dropped: dict[str, int]
    ) -> Iterator[RowBlock]:
        held_lines = len(self.held["slot"]) if self.held else 0
        columns["line"] = np.arange(lines_before + 1, lines_before + 1 + len(columns["slot"]))
        unattributable = columns["step"] < 0
        if unattributable.any():
            # The engine itself says it cannot tell which token these routes belong to.
            reason = "unattributable: negative step"
            dropped[reason] = dropped.get(reason, 0) + int((columns["slot"][unattributable] == 0).sum())
            columns = {name: values[~unattributable] for name, values in columns.items()}
        if held_lines:
            columns = {name: np.concatenate([self.held[name], values]) for name, values in columns.items()}
        whole = len(columns["slot"]) // self.top_k * self.top_k
        grouped = {name: values[:whole].reshape(-1, self.top_k) for name, values in columns.items()}
        if not whole:
            self.held = columns
            return
        starts = self._step_starts(grouped)
        # The last step may go on in the next batch, and an incomplete row certainly does.
        last = int(starts[-1])
        if last > 0:
            yield from self._emit({name: values[:last] for name, values in grouped.items()}, starts[:-1])
        keep = last * self.top_k
        self.held = {name: values[keep:] for name, values in columns.items()}

    def finish(self) -> Iterator[RowBlock]:
        lines = len(self.held["slot"]) if self.held else 0
        if lines % self.top_k:
            raise MalformedDump(
                f"{self.dump.path}, line {int(self.held['line'][-1])} (the last): its token has "
                f"{lines % self.top_k} of {self.top_k} slots: the dump is truncated, copy or record it again"
            )
        if lines:
            grouped = {name: values.reshape(-1, self.top_k) for name, values in self.held.items()}
            yield from self._emit(grouped, self._step_starts(grouped))

    def _step_starts(self, grouped: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
        """First rows of the steps; checks on the way that every row is whole."""
        wrong = (grouped["slot"] != np.arange(self.top_k)).any(axis=1)
        for name in ("turn", "phase", "step", "layer"):
            wrong |= (grouped[name] != grouped[name][:, :1]).any(axis=1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            line = int(grouped["line"][row, 0])
            raise MalformedDump(
                f"{self.dump.path}, line {line}: wanted {self.top_k} lines with slots 0..{self.top_k - 1} of one token "
                f"and layer, found slots {grouped['slot'][row].tolist()} at layers {grouped['layer'][row].tolist()}; "
                "is a line missing, or is n_expert_used of the preamble wrong?"
            )
        for name, limit in (("turn", 2**32), ("step", 2**32), ("layer", 2**16), ("expert", 2**31)):
            outside = ((grouped[name] < -(2**31)) | (grouped[name] >= limit)).any(axis=1)
            if name == "turn":
                outside |= grouped[name][:, 0] < 0
            if outside.any():
                row = int(np.flatnonzero(outside)[0])
                raise MalformedDump(
                    f"{self.dump.path}, line {int(grouped['line'][row, 0])}: {name} {grouped[name][row].tolist()[:4]}, "
                    f"wanted whole numbers below {limit}"
                )
        turn, phase, step, layer = (grouped[name][:, 0].astype(np.int64) for name in ("turn", "phase", "step", "layer"))
        if not np.isin(phase, (0, 1)).all():
            row = int(np.flatnonzero(~np.isin(phase, (0, 1)))[0])
            line = int(grouped["line"][row, 0])
            raise MalformedDump(f"{self.dump.path}, line {line}: phase {phase[row]}, wanted 0 (prefill) or 1 (decode)")
        begins = np.ones(len(turn), dtype=bool)
        begins[1:] = (np.diff(turn) != 0) | (np.diff(phase) != 0) | (np.diff(layer) < 0)
        begins[1:] |= (phase[1:] == 1) & (np.diff(step) != 0)
        again = ~begins[1:] & (np.diff(layer) == 0) & (np.diff(step) <= 0)
        if again.any():
            row = int(np.flatnonzero(again)[0]) + 1
            line = int(grouped["line"][row, 0])
            raise MalformedDump(
                f"{self.dump.path}, line {line}: layer {layer[row]} of step {step[row]} stands again or goes back in "
                "the same pass; a node executed twice counts twice, record again"
            )
        return np.flatnonzero(begins)

    def _emit(self, grouped: dict[str, npt.NDArray[Any]], starts: npt.NDArray[np.int64]) -> Iterator[RowBlock]:
        rows = len(grouped["slot"])
        ordinal = np.zeros(rows, dtype=np.int64)
        ordinal[starts] = 1
        step = self.steps + np.cumsum(ordinal) - 1
        self.steps += len(starts)
        phase_code = np.array([PHASE_CODES["prefill"], PHASE_CODES["decode"]], dtype=np.int8)
        weights = grouped.get("weight")
        # Cut at step starts into blocks of the size that parsers aim at.
        cuts = [0]
        for start in [*starts.tolist(), rows]:
            if start - cuts[-1] >= ROWS_PER_BLOCK or start == rows:
                cuts.append(start)
        for begin, end in itertools.pairwise(cuts):
            part = slice(begin, end)
            yield RowBlock(
                step=step[part],
                pass_in_step=np.zeros(end - begin, dtype=np.int32),
                layer=grouped["layer"][part, 0].astype(np.int32),
                request=grouped["turn"][part, 0].astype(np.int64),
                position=grouped["step"][part, 0].astype(np.int64),
                phase=phase_code[grouped["phase"][part, 0].astype(np.int64)],
                expert_ids=np.ascontiguousarray(grouped["expert"][part], dtype=np.int32),
                weights=None if weights is None else np.ascontiguousarray(weights[part], dtype=np.float32),
            )
