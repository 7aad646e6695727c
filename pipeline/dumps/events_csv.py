"""Conformance events CSV: `event_index,scheduler_step,layer,requested_experts,misses,hits`, one line per event.

Written by hand for the known answer of 2608.07911: the misses and hits it carries are kept beside, never mixed in.
"""

import csv
import io
from collections.abc import Iterator

import numpy as np

from pipeline.dumps.blocks import ROWS_PER_BLOCK, DumpFile, MalformedDump, ParsedDump, RowBlock, read_line
from schemas.trace import PHASE_CODES, EngineObservation

COLUMNS = ("event_index", "scheduler_step", "layer", "requested_experts", "misses", "hits")


def parse(dump: DumpFile) -> ParsedDump:
    """Reads the header and the first event at once, events as they are asked for.

    Raises:
        MalformedDump: a column is missing, a field is no number, events of different widths.
    """
    stream = dump.stream()
    header = read_line(stream, dump.path, 1).decode("utf-8", errors="replace").strip().split(",")
    missing = [name for name in COLUMNS[:4] if name not in header]
    if missing:
        raise MalformedDump(f"{dump.path}, line 1: column {missing[0]} is missing; wanted {','.join(COLUMNS)}")
    first = read_line(stream, dump.path, 2)
    if not first.strip():
        raise MalformedDump(f"{dump.path}: a header and no event: truncated")
    parsed = ParsedDump(
        format="events_csv", blocks=iter(()), top_k=len(_event(dump, header, first, 2)[2]), pass_boundaries="recorded"
    )
    parsed.blocks = _blocks(dump, header, parsed)
    return parsed


def _event(dump: DumpFile, header: list[str], line: bytes, number: int) -> tuple[int, int, list[int], int, int]:
    """(scheduler_step, layer, experts, hits, misses) of a line; counts that are not there are 0."""
    where = f"{dump.path}, line {number}"
    try:
        fields = next(csv.reader(io.StringIO(line.decode("utf-8"))), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise MalformedDump(f"{where}: no CSV ({error})") from None
    if len(fields) != len(header):
        raise MalformedDump(f"{where}: {len(fields)} fields, wanted {len(header)}: truncated?")
    event = dict(zip(header, fields, strict=True))
    try:
        experts = [int(text) for text in event["requested_experts"].split()]
        step, layer = int(event["scheduler_step"]), int(event["layer"])
        hits, misses = int(event.get("hits") or 0), int(event.get("misses") or 0)
    except ValueError:
        raise MalformedDump(f"{where}: {line[:80]!r}, wanted whole numbers") from None
    if not experts or not 0 <= layer < 65536 or not 0 <= step < 2**32 or min(hits, misses) < 0:
        raise MalformedDump(f"{where}: {line[:80]!r}, wanted a step, a layer and at least one expert")
    if max(map(abs, experts)) >= 2**31:
        raise MalformedDump(f"{where}: an expert id beyond 31 bits")
    return step, layer, experts, hits, misses


def _blocks(dump: DumpFile, header: list[str], parsed: ParsedDump) -> Iterator[RowBlock]:
    stream = dump.stream()
    read_line(stream, dump.path, 1)
    held: list[tuple[int, int, int, list[int]]] = []
    number, ordinal, previous_step, previous_layer, passes = 1, -1, -1, -1, 0
    hits = misses = 0
    while line := read_line(stream, dump.path, number + 1):
        number += 1
        if not line.strip():
            continue
        step, layer, experts, event_hits, event_misses = _event(dump, header, line, number)
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
