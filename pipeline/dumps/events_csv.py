"""Conformance events CSV: `event_index,scheduler_step,layer,requested_experts,misses,hits`, one line per event.

Written by hand for the known answer of 2608.07911: the misses and hits it carries are kept beside, never mixed in.
"""

import csv
import io
import re
from collections.abc import Iterator

import numpy as np

from pipeline.dumps.blocks import (
    ROWS_PER_BLOCK,
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    ParsedDump,
    RowBlock,
    read_line,
)
from schemas.trace import PHASE_CODES, EngineObservation

COLUMNS = ("event_index", "scheduler_step", "layer", "requested_experts", "misses", "hits")


def parse(dump: DumpFile, asked: Asked) -> ParsedDump:
    """Reads the header and the first event at once, events as they are asked for.

    Raises:
        MalformedDump: a column is missing, a field is no number, events of different widths.
    """
    lines = _lines(dump)
    number, line = next(lines)
    header = [name.strip() for name in line.decode("utf-8", errors="replace").split(",")]
    missing = [name for name in COLUMNS[:4] if name not in header]
    if missing or len(set(header)) != len(header):
        what = f"column {missing[0]} is missing" if missing else "a column stands twice"
        raise MalformedDump(f"{dump.path}, line {number}: {what}; wanted {','.join(COLUMNS)}")
    number, line = next(lines, (0, b""))
    if not line:
        raise MalformedDump(f"{dump.path}: a header and no event: truncated")
    top_k = len(_event(dump, header, line, number)[2])
    parsed = ParsedDump(format="events_csv", blocks=iter(()), top_k=top_k, copies_ruled_out=True)
    parsed.blocks = _blocks(dump, header, parsed)
    return parsed


LAYOUTS = (
    Layout(
        "events_csv",
        "conformance events CSV",
        lambda sample: sample.columns >= {"scheduler_step", "layer", "requested_experts"},
        parse,
    ),
)


def _lines(dump: DumpFile) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, blank ones and comments aside."""
    stream, number = dump.stream(), 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if line.strip() and not line.lstrip().startswith(b"#"):
            yield number, line


def _event(dump: DumpFile, header: list[str], line: bytes, number: int) -> tuple[int, int, list[int], int, int, int]:
    """(scheduler_step, layer, experts, hits, misses, event_index) of a line; counts that are not there are 0."""
    where = f"{dump.path}, line {number}"
    try:
        fields = next(csv.reader(io.StringIO(line.decode("utf-8"))), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise MalformedDump(f"{where}: no CSV ({error})") from None
    if len(fields) != len(header):
        raise MalformedDump(f"{where}: {len(fields)} fields, wanted {len(header)}: truncated?")
    event = dict(zip(header, fields, strict=True))
    experts = [_whole(text, where) for text in event["requested_experts"].split(" ") if text]
    step, layer, index = (_whole(event[name], where) for name in ("scheduler_step", "layer", "event_index"))
    hits, misses = (_whole(event.get(name) or "0", where) for name in ("hits", "misses"))
    if not experts or not 0 <= layer < 65536 or not 0 <= step < 2**32 or min(hits, misses) < 0:
        raise MalformedDump(f"{where}: {line[:80]!r}, wanted a step, a layer and at least one expert")
    return step, layer, experts, hits, misses, index


def _whole(text: str, where: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text.strip(), re.ASCII):
        raise MalformedDump(f"{where}: {text[:40]!r}, wanted a whole number")
    return int(text)


def _blocks(dump: DumpFile, header: list[str], parsed: ParsedDump) -> Iterator[RowBlock]:
    lines = _lines(dump)
    next(lines)
    held: list[tuple[int, int, int, list[int]]] = []
    ordinal, previous_step, previous_layer, passes = -1, -1, -1, 0
    hits = misses = 0
    for expected, (number, line) in enumerate(lines):
        step, layer, experts, event_hits, event_misses, index = _event(dump, header, line, number)
        if index != expected:
            raise MalformedDump(
                f"{dump.path}, line {number}: event_index {index}, wanted {expected}: is an event missing or repeated?"
            )
        hits, misses = hits + event_hits, misses + event_misses
        if len(experts) != parsed.top_k:
            raise MalformedDump(
                f"{dump.path}, line {number}: {len(experts)} experts, the first event has {parsed.top_k}; an event of "
                "several tokens is a union and does not say which token chose what: dump the ids of every token"
            )
        if step < previous_step:
            raise MalformedDump(f"{dump.path}, line {number}: scheduler_step {step} after {previous_step}")
        if step != previous_step:
            if len(held) >= ROWS_PER_BLOCK:
                yield _block(held)
                held = []
            ordinal, passes = ordinal + 1, 0
        elif layer <= previous_layer:
            passes += 1
        previous_step, previous_layer = step, layer
        held.append((ordinal, passes, layer, experts))
    if held:
        yield _block(held)
    if "hits" in header and "misses" in header:
        meaning = "hits and misses columns of the conformance file, event-atomic per-layer LRU of 2"
        parsed.observations.append(EngineObservation(meaning=meaning, accesses=hits + misses, hits=hits, misses=misses))


def _block(events: list[tuple[int, int, int, list[int]]]) -> RowBlock:
    rows = len(events)
    return RowBlock(
        step=np.array([event[0] for event in events], dtype=np.int64),
        pass_in_step=np.array([event[1] for event in events], dtype=np.int32),
        layer=np.array([event[2] for event in events], dtype=np.int32),
        request=np.zeros(rows, dtype=np.int64),
        position=None,
        phase=np.full(rows, PHASE_CODES["unknown"], dtype=np.int8),
        expert_ids=np.array([event[3] for event in events], dtype=np.int32),
    )
