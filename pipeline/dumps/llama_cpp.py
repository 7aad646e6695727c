"""What callbacks in llama.cpp and the engines around it write as text and JSON, and how their graphs become passes.

A callback writes one record per layer of one graph (one ubatch): as many rows of ids as the graph has tokens. No layout
here numbers the graphs' tokens in their sequence, so positions stay unknown where the dump does not count them itself,
and a pass ends where the layer number drops. llama.cpp computes the last layer only for tokens whose output is asked
for: a pass of several tokens with fewer rows there, or none, evaluates a prompt. Binary layouts are in
`llama_cpp_binary`; they share `Recorded`.

Letters: R rows, K experts per row.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from pipeline.dumps.blocks import (
    MAX_LINE_BYTES,
    ROWS_PER_BLOCK,
    Asked,
    DumpFile,
    Layout,
    MalformedDump,
    NoTrace,
    ParsedDump,
    RefusedDump,
    RowBlock,
    Sample,
    first_bad_line,
    is_integer,
    json_fault,
)
from schemas.trace import PHASE_CODES, CheckRecord, EngineObservation

MAX_PASS_SELECTIONS = 2**24
"""Most selections of one pass, which is held whole: an ubatch of 8,192 tokens through 94 layers of 8 has a third."""

CALLBACK = "eval callback"
"""How most tools on llama.cpp capture routes: they ask the scheduler for the top-k tensor of each layer."""

PERTURBATION = CheckRecord(
    name="capture leaves tokens alone",
    outcome="not_applicable",
    wanted="the same tokens with and without the capture",
    found="perturbation unchecked: asking for the top-k tensor cuts the graph, which is known to change tokens; the "
    "routes are those of the run that was captured",
)

_CHUNK_BYTES = 2 * 1024 * 1024
_MAX_PREFIX_BYTES = 4 * 1024 * 1024
_UNKNOWN, _PREFILL, _DECODE = PHASE_CODES["unknown"], PHASE_CODES["prefill"], PHASE_CODES["decode"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows in recorded order; a record (one layer of one graph) may go on in the next `Rows`.

    layer (R,); record (R,) a number that changes from record to record; ids (R, K); weights (R, K) or null, NaN where
    unknown; position (R,) or null; run (R,) counts what was appended to one file, or null; graph (R,) the dump's own
    number of the pass, null where the layer numbers tell; phase (R,) codes of PHASES where the dump says them.
    """

    layer: Ints
    record: Ints
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None = None
    position: Ints | None = None
    run: Ints | None = None
    graph: Ints | None = None
    phase: npt.NDArray[np.int8] | None = None

    def where(self, kept: npt.NDArray[np.bool_] | slice) -> "Rows":
        """Only some of the rows."""

        def of(values: Any) -> Any:
            return None if values is None else values[kept]

        return Rows(
            self.layer[kept], self.record[kept], self.ids[kept], of(self.weights), of(self.position), of(self.run),
            of(self.graph), of(self.phase),
        )  # fmt: skip


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows one after the other."""

    def of(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else np.concatenate(values)

    return Rows(*(of(name) for name in ("layer", "record", "ids", "weights", "position", "run", "graph", "phase")))


@dataclass
class _Boundaries:
    """Finds where passes begin, from one `Rows` to the next."""

    passes: int = -1
    layer: int = 2**31
    record: int = -1
    graph: int = -1

    def next(self, rows: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(rows that begin a record, rows that begin a pass)."""
        layer_before = np.concatenate([[self.layer], rows.layer[:-1]])
        new_record = np.diff(rows.record, prepend=self.record) != 0
        if rows.graph is not None:
            begins = np.diff(rows.graph, prepend=self.graph) != 0
            self.graph = int(rows.graph[-1])
        else:
            begins = new_record & (rows.layer <= layer_before)
        self.layer, self.record = int(rows.layer[-1]), int(rows.record[-1])
        return new_record, begins


@dataclass
class Survey:
    """What a first walk over a dump finds: layers, layers that once stand alone in a pass, rows of the first layer."""

    layers: list[int] = field(default_factory=list)
    alone: set[int] = field(default_factory=set)
    first_layer_rows: int = 0


def survey(dump: DumpFile, source: Iterable[Rows]) -> Survey:
    """Walks all rows once.

    Raises:
        MalformedDump: as the source; no rows.
    """
    found, bounds = Survey(), _Boundaries()
    layers: set[int] = set()
    pending: tuple[int, bool] | None = None
    first_layer = -1
    for rows in source:
        if not len(rows.layer):
            continue
        if first_layer < 0:
            first_layer = int(rows.layer[0])
        found.first_layer_rows += int((rows.layer == first_layer).sum())
        new_record, begins = bounds.next(rows)
        layers.update(np.unique(rows.layer).tolist())
        if len(layers) > 65536:
            raise MalformedDump(f"{dump.path}: over 65,536 layer numbers; is another column taken for the layer?")
        at = np.flatnonzero(new_record)
        begun, layer = begins[at], rows.layer[at]
        if pending is not None:
            begun, layer = np.concatenate([[pending[1]], begun]), np.concatenate([[pending[0]], layer])
        found.alone.update(np.unique(layer[:-1][begun[:-1] & begun[1:]]).tolist())
        pending = (int(layer[-1]), bool(begun[-1]))
    if pending is None:
        raise MalformedDump(f"{dump.path}: no route in it: was the recorder stopped before it wrote any?")
    if pending[1]:
        found.alone.add(pending[0])
    found.layers = sorted(layers)
    return found


@dataclass
class Recorded:
    """The rows of a dump as blocks of whole passes; a step is a pass.

    source: walks the rows from the start, as often as it is called. parsed: told what is left out, as it is found.
    draft_from: this layer and those above are a draft block's, left out and counted. prunes: llama.cpp's rule for the
    last layer tells prompt passes. last_may_be_alone: the dump skips graphs of several tokens, of which the last layer
    alone may be one token wide. running_prompt: tokens of one sequence are counted through the file, the first so many
    are its prompt.
    """

    dump: DumpFile
    parsed: ParsedDump
    source: Callable[[], Iterable[Rows]]
    survey: Survey
    draft_from: int | None = None
    prunes: bool = True
    last_may_be_alone: bool = False
    running_prompt: int | None = None
    steps: int = 0
    tokens: int = 0
    several_token_passes: int = 0
    repeated_passes: int = 0
    _first_row: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        self.model_layers = [
            layer for layer in self.survey.layers if self.draft_from is None or layer < self.draft_from
        ]
        if not self.model_layers:
            raise MalformedDump(
                f"{self.dump.path}: only layers {self.survey.layers[:5]}, none below hidden_layers = "
                f"{self.draft_from}; correct hidden_layers"
            )

    def blocks(self) -> Iterator[RowBlock]:
        """Blocks of whole passes."""
        bounds, held, held_rows = _Boundaries(), [], 0
        passes = -1
        for rows in self.source():
            if not len(rows.layer):
                continue
            layer_before, graph_before = bounds.layer, bounds.graph
            new_record, begins = bounds.next(rows)
            self._refuse_repeats(rows, new_record, begins, layer_before, graph_before)
            number = passes + np.cumsum(begins)
            passes = int(number[-1])
            held.append((rows, number))
            held_rows += len(number)
            if held_rows * self.parsed.top_k > MAX_PASS_SELECTIONS and held[0][1][0] == passes:
                raise MalformedDump(
                    f"{self.dump.path}, pass {passes}: over {MAX_PASS_SELECTIONS:,} selections without an end (a pass "
                    "ends where the layer number drops); is another column taken for the layer?"
                )
            if held_rows < ROWS_PER_BLOCK or held[0][1][0] == passes:
                continue
            whole, number = joined([part for part, _ in held]), np.concatenate([one for _, one in held])
            last = int(np.searchsorted(number, passes))
            yield from self._block(whole.where(slice(0, last)), number[:last], is_last=False)
            held, held_rows = [(whole.where(slice(last, None)), number[last:])], len(number) - last
        if held:
            whole, number = joined([part for part, _ in held]), np.concatenate([one for _, one in held])
            yield from self._block(whole, number, is_last=True)

    def drop(self, reason: str, rows: int) -> None:
        """Counts rows that are not in the trace."""
        if rows:
            self.parsed.dropped_rows[reason] = self.parsed.dropped_rows.get(reason, 0) + rows

    def _refuse_repeats(
        self,
        rows: Rows,
        new_record: npt.NDArray[np.bool_],
        begins: npt.NDArray[np.bool_],
        layer_before: int,
        graph_before: int,
    ) -> None:
        before = np.concatenate([[layer_before], rows.layer[:-1]])
        again = new_record & (rows.layer == before)
        if rows.graph is not None:
            again = new_record & ~begins & (rows.layer <= before)
            back = np.diff(rows.graph, prepend=graph_before) < 0
            if back.any():
                at = int(np.flatnonzero(back)[0])
                raise MalformedDump(
                    f"{self.dump.path}: pass {int(rows.graph[at])} stands after a later one; records must stand in "
                    "recorded order: are two dumps in one file?"
                )
        elif len(self.model_layers) == 1:
            return
        if self.draft_from is not None:
            again &= rows.layer < self.draft_from
        if self.last_may_be_alone:
            again &= rows.layer != self.model_layers[-1]
        if again.any():
            at = int(np.flatnonzero(again)[0])
            raise MalformedDump(
                f"{self.dump.path}, record {int(rows.record[at])} (counted from 0): layer {int(rows.layer[at])} stands "
                "again in the same pass; a node executed twice counts twice, record again"
            )

    def _block(self, rows: Rows, number: Ints, *, is_last: bool) -> Iterator[RowBlock]:
        if self.draft_from is not None:
            kept = rows.layer < self.draft_from
            self.drop("a draft block's: layer at or above hidden_layers", int((~kept).sum()))
            rows, number = rows.where(kept), number[kept]
        captured = (rows.ids != -1).any(axis=1)
        if not captured.all():
            self.drop("not captured: all ids are -1", int((~captured).sum()))
            rows, number = rows.where(captured), number[captured]
        if not len(number):
            return
        last_layer = self.model_layers[-1]
        if self.last_may_be_alone and len(self.model_layers) > 1:
            begins = np.flatnonzero(np.diff(number, prepend=-1))
            alone = np.minimum.reduceat(rows.layer, begins) == last_layer
            lengths = np.diff(np.append(begins, len(number)))
            kept = ~np.repeat(alone, lengths)
            self.drop(
                "the last layer of a pass whose other layers were several tokens wide and not recorded",
                int((~kept).sum()),
            )
            rows, number = rows.where(kept), number[kept]
            if not len(number):
                return
        begins = np.flatnonzero(np.diff(number, prepend=-1))
        lengths = np.diff(np.append(begins, len(number)))
        step = self.steps + np.repeat(np.arange(len(begins)), lengths)
        self.steps += len(begins)
        in_first = rows.layer == np.repeat(rows.layer[begins], lengths)
        width = np.add.reduceat(in_first, begins)
        phase = rows.phase
        position = rows.position
        if self.running_prompt is not None:
            start = self.tokens + np.concatenate([[0], np.cumsum(width)[:-1]])
            self.tokens += int(width.sum())
            record_begins = np.flatnonzero((np.diff(number, prepend=-1) != 0) | (np.diff(rows.layer, prepend=-1) != 0))
            within = np.arange(len(number)) - np.repeat(record_begins, np.diff(np.append(record_begins, len(number))))
            position = np.repeat(start, lengths) + within
            phase = np.where(position < self.running_prompt, _PREFILL, _DECODE).astype(np.int8)
        if phase is None:
            pass_phase = np.full(len(begins), _UNKNOWN, dtype=np.int8)
            if self.prunes and len(self.model_layers) > 1:
                in_last = np.add.reduceat(rows.layer == last_layer, begins)
                pruned = (in_last < width) & (width > 1)
                # Nothing would follow a prompt whose output nobody asked for: there the dump was cut off.
                pruned[-1] &= not is_last or in_last[-1] > 0
                pass_phase[pruned] = _PREFILL
            phase = np.repeat(pass_phase, lengths)
        self._note_repeated_passes(rows, begins, width)
        yield RowBlock(
            step=step,
            pass_in_step=np.zeros(len(step), dtype=np.int32),
            layer=rows.layer.astype(np.int32),
            request=np.zeros(len(step), dtype=np.int64) if rows.run is None else rows.run,
            position=position,
            phase=phase,
            expert_ids=np.ascontiguousarray(rows.ids, dtype=np.int32),
            weights=rows.weights,
        )

    def _note_repeated_passes(self, rows: Rows, begins: Ints, width: Ints) -> None:
        self.several_token_passes += int((width > 1).sum())
        first = np.sort(rows.ids[begins], axis=1)
        if self._first_row is not None:
            first = np.concatenate([self._first_row[None], first])
        self.repeated_passes += int((first[1:] == first[:-1]).all(axis=1).sum())
        self._first_row = first[-1]


def recorded(parsed: ParsedDump, rows: Recorded) -> ParsedDump:
    """The dump with its blocks."""
    parsed.blocks = rows.blocks()
    return parsed


def draft_layer(found: Survey, asked: Asked) -> int | None:
    """The lowest layer of a draft block: hidden_layers where the user says it, else a highest layer that stands alone.

    A model's own layer never stands alone, since a pass goes through all of them; a draft block (its layer number is
    the model's number of layers) runs by itself.
    """
    if asked.user.hidden_layers is not None:
        return asked.user.hidden_layers if found.layers[-1] >= asked.user.hidden_layers else None
    if len(found.layers) > 1 and found.layers[-1] in found.alone:
        return found.layers[-1]
    return None


def draft_check(found: Survey, asked: Asked, draft: int | None) -> CheckRecord:
    """What is known of a draft block among the layers."""
    wanted = "the layers of a draft block (numbered from hidden_layers) are told from the model's"
    if draft is not None:
        how = "you say hidden_layers" if asked.user.hidden_layers is not None else "it runs by itself"
        return CheckRecord(
            name="draft block apart", outcome="ok", wanted=wanted, found=f"layer {draft} is a draft block's: {how}"
        )
    if asked.user.hidden_layers is not None:
        return CheckRecord(name="draft block apart", outcome="ok", wanted=wanted, found="no layer of a draft block")
    return CheckRecord(
        name="draft block apart",
        outcome="warn",
        wanted=wanted,
        found=f"hidden_layers is not said: if the model has {found.layers[-1]} layers, layer {found.layers[-1]} is its "
        f"draft block; then say --meta hidden_layers={found.layers[-1]}",
    )


# Text lines


class _Text:
    """A text dump read in chunks of whole lines; words are split and cast by Arrow, and a fault is located afterwards.

    fault_of: what is wrong with a line, or null.
    """

    def __init__(self, dump: DumpFile, fault_of: Callable[[bytes], str | None]) -> None:
        self.dump, self.fault_of = dump, fault_of
        self._may_be_hexadecimal = False

    def chunks(self) -> Iterator[list[str]]:
        """Lines that are not blank, without their ends."""
        stream, rest = self.dump.stream(), b""
        while chunk := stream.read(_CHUNK_BYTES):
            cut = chunk.rfind(b"\n") + 1
            if not cut:
                rest += chunk
                if len(rest) > MAX_LINE_BYTES:
                    raise MalformedDump(f"{self.dump.path}: a line of over {MAX_LINE_BYTES} bytes; is it a text dump?")
                continue
            yield self._split(rest + chunk[:cut])
            rest = chunk[cut:]
        if rest.strip():
            # A number that is cut short reads as another number, and every writer ends its lines.
            fault = self.fault_of(rest)
            raise MalformedDump(
                f"{self.dump.path}: its last line has no end ({fault or 'though it reads well'}): the dump is "
                "truncated, copy or record it again, or end the line if it is whole"
            )

    def _split(self, chunk: bytes) -> list[str]:
        # Arrow reads 0x1f as 31, and 10 in the same column may then be 16.
        self._may_be_hexadecimal = b"0x" in chunk or b"0X" in chunk
        lines = chunk.decode("utf-8", errors="replace").replace("\r\n", "\n").split("\n")
        return [line for line in lines if line and not line.isspace()]

    def words(self, texts: pa.Array, separator: str, count: int) -> pa.Array:
        """(R·count,) words of texts that must all have as many."""
        lists = pc.split_pattern(texts, separator)
        if len(lists) and not bool((lists.value_lengths().to_numpy(zero_copy_only=False) == count).all()):
            raise self.fault()
        return lists.flatten()

    def integers(self, words: pa.Array) -> Ints:
        if self._may_be_hexadecimal and pc.any(pc.match_substring_regex(words, "0[xX]")).as_py():
            raise self.fault()
        try:
            values: Ints = pc.cast(words, pa.int64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            raise self.fault() from None
        return values

    def floats(self, words: pa.Array) -> npt.NDArray[np.float32]:
        try:
            values: npt.NDArray[np.float32] = pc.cast(words, pa.float32()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            raise self.fault() from None
        return values

    def fault(self) -> MalformedDump:
        """The error for the first line that is wrong."""
        return first_bad_line(self.dump, self.fault_of)


def _whole(word: str, limit: int = 2**31, *, least: int = 0) -> bool:
    # As Arrow casts: no signs before plus, no spaces, no underscores.
    return re.fullmatch(r"-?[0-9]{1,18}", word, re.ASCII) is not None and least <= int(word) < limit


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return "_" not in word and word == word.strip()


def _ids(values: Ints, text: _Text) -> npt.NDArray[np.int32]:
    if len(values) and (values.min() < -1 or values.max() >= 2**31):
        raise text.fault()
    return values.astype(np.int32)


def _layers(values: Ints, text: _Text) -> Ints:
    if len(values) and (values.min() < 0 or values.max() >= 65536):
        raise text.fault()
    return values


def _taken(words: pa.Array, places: Ints) -> pa.Array:
    return words.take(pa.array(places.reshape(-1)))


def _first_line(dump: DumpFile, is_route: Callable[[str], bool]) -> str:
    for lines in _Text(dump, lambda line: None).chunks():
        for line in lines:
            if is_route(line):
                return line
    raise MalformedDump(f"{dump.path}: a header and no route: was the recorder stopped before it wrote any?")


# colibri ROUTE_TRACE

_COLIBRI = re.compile(r"[0-9]{1,9} [0-9]{1,9} [0-9]{1,5}( -?[0-9]{1,9}:-?[0-9a-z.+-]{1,24})+\s*", re.ASCII)


def parse_colibri(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`<call> <row> <layer> <expert>:<gate> …`: a call is one layer of one forward batch, a line one row of it.

    Layout: colibri, `docs/routing-telemetry.md` and `c/route_trace.h`. The gates are those the layer applies, rounded
    to four digits. A prediction block (MTP) stands at the model's number of layers.

    Raises:
        MalformedDump: a line that is no such row, rows of a call that are not 0, 1, 2 …, calls that go back.
    """
    top_k = len(_first_line(dump, lambda line: True).split(" ")) - 3

    def fault(line: bytes) -> str | None:
        words = line.decode("utf-8", errors="replace").rstrip("\r\n").split(" ")
        if len(words) != 3 + top_k:
            return f"{len(words) - 3} experts, wanted {top_k} as in the first line"
        if not all(_whole(word) for word in words[:3]) or not _whole(words[2], 65536):
            return f"{' '.join(words[:3])[:60]!r}, wanted <call> <row> <layer> in whole numbers"
        for word in words[3:]:
            expert, colon, gate = word.partition(":")
            if not colon or not _whole(expert, least=-1) or not _number(gate):
                return f"{word[:40]!r}, wanted <expert>:<gate>"
        return None

    text = _Text(dump, fault)

    def source() -> Iterator[Rows]:
        call_before, row_before = -1, -1
        for lines in text.chunks():
            words = text.words(pa.array(lines), " ", 3 + top_k)
            places = np.arange(len(words)).reshape(-1, 3 + top_k)
            heads = text.integers(_taken(words, places[:, :3])).reshape(-1, 3)
            pairs = text.words(_taken(words, places[:, 3:]), ":", 2)
            experts = text.integers(_taken(pairs, np.arange(0, len(pairs), 2)))
            gates = text.floats(_taken(pairs, np.arange(1, len(pairs), 2)))
            call, row, layer = heads[:, 0], heads[:, 1], _layers(heads[:, 2], text)
            same_call = np.diff(call, prepend=call_before) == 0
            wanted = np.where(same_call, np.concatenate([[row_before], row[:-1]]) + 1, 0)
            wrong = (row != wanted) | (np.diff(call, prepend=call_before) < 0)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise MalformedDump(
                    f"{dump.path}: call {int(call[at])} row {int(row[at])}, wanted row {int(wanted[at])} of a call "
                    "that does not go back: is a line missing, or are two traces in one file?"
                )
            call_before, row_before = int(call[-1]), int(row[-1])
            yield Rows(layer, call, _ids(experts, text).reshape(-1, top_k), gates.reshape(-1, top_k).astype(np.float32))

    found = survey(dump, source())
    draft = draft_layer(found, asked)
    parsed = ParsedDump(format="colibri_route_trace", blocks=iter(()), top_k=top_k, engine="colibri")
    parsed.checks.append(draft_check(found, asked, draft))
    if draft is not None:
        parsed.hidden_layers = draft
    return recorded(parsed, Recorded(dump, parsed, source, found, draft_from=draft, prunes=False))


# `route` lines of moe-prefetch

_ROUTE = re.compile(r"route [0-9]{1,9} [0-9]{1,5} [0-9]{1,3} [0-9]{1,6}( -?[0-9]{1,9}:-?[0-9]{1,9})+\s*", re.ASCII)


def parse_route_lines(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`route <step> <layer> <n_used> <n_tokens> <expert>:<slot> …`: one line per layer of a step (moe-prefetch).

    The slot is where the engine's cache holds the expert, −1 where it does not: its own observation, kept beside.
    Steps of several tokens are not recorded but for the last layer, which computes one output token of them.

    Raises:
        MalformedDump: a line that is no such record, or of another n_used.
    """
    top_k = int(_first_line(dump, lambda line: True).split(" ")[3])

    def fault(line: bytes) -> str | None:
        words = line.decode("utf-8", errors="replace").rstrip("\r\n").split(" ")
        if words[0] != "route" or len(words) < 6 or not all(_whole(word) for word in words[1:5]):
            return f"{' '.join(words[:5])[:60]!r}, wanted route <step> <layer> <n_used> <n_tokens> <expert>:<slot> …"
        if int(words[2]) >= 65536 or int(words[3]) != top_k:
            return f"layer {words[2]}, n_used {words[3]}; wanted a layer below 65536 and n_used = {top_k}"
        if len(words) - 5 != top_k * int(words[4]):
            return f"{len(words) - 5} experts, wanted n_used × n_tokens = {top_k * int(words[4])}"
        for word in words[5:]:
            expert, colon, slot = word.partition(":")
            if not colon or not _whole(expert, least=-1) or not _whole(slot, least=-1):
                return f"{word[:40]!r}, wanted <expert>:<slot>"
        return None

    text = _Text(dump, fault)
    observed = {"accesses": 0, "hits": 0}

    def source() -> Iterator[Rows]:
        lines_before = 0
        observed.update(accesses=0, hits=0)
        for lines in text.chunks():
            lists = pc.split_pattern(pa.array(lines), " ")
            lengths = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
            if lengths.min() < 6:
                raise text.fault()
            words = lists.flatten()
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            heads = text.integers(_taken(words, starts[:, None] + np.arange(1, 5))).reshape(-1, 4)
            graph, layer, used, tokens = heads.T
            if (used != top_k).any() or (tokens * top_k != lengths - 5).any():
                raise text.fault()
            is_pair = np.ones(len(words), dtype=bool)
            is_pair[(starts[:, None] + np.arange(5)).reshape(-1)] = False
            pairs = text.words(words.filter(pa.array(is_pair)), ":", 2)
            values = text.integers(pairs).reshape(-1, 2)
            record = lines_before + np.repeat(np.arange(len(lines)), tokens)
            lines_before += len(lines)
            observed["accesses"] += len(values)
            observed["hits"] += int((values[:, 1] >= 0).sum())
            yield Rows(
                np.repeat(_layers(layer, text), tokens), record, _ids(values[:, 0], text).reshape(-1, top_k),
                graph=np.repeat(graph, tokens),
            )  # fmt: skip

    found = survey(dump, source())
    parsed = ParsedDump(format="moe_prefetch_route", blocks=iter(()), top_k=top_k, engine="llama.cpp (moe-prefetch)")
    parsed.observations.append(
        EngineObservation(
            meaning="slots of the dump, per selection, a slot of 0 or more counted as a hit, all lines",
            accesses=observed["accesses"],
            hits=observed["hits"],
            misses=observed["accesses"] - observed["hits"],
        )
    )
    return recorded(parsed, Recorded(dump, parsed, source, found, last_may_be_alone=True))


# GGML_MOE_LOG of moe-prefetch

_GATE_EXPERTS = re.compile(r"blk\.[0-9]{1,5}\.ffn_gate_exps\.weight( -?[0-9]{1,9})+\s*", re.ASCII)


def parse_gate_lines(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`blk.<layer>.ffn_gate_exps.weight <id> <id> …`: one line per token of each gate product (`GGML_MOE_LOG`).

    Raises:
        MalformedDump: a line that is no such row, or of another width.
    """
    top_k = len(_first_line(dump, lambda line: True).rstrip().split(" ")) - 1

    def fault(line: bytes) -> str | None:
        words = line.decode("utf-8", errors="replace").rstrip("\r\n").split(" ")
        if not _GATE_EXPERTS.fullmatch(" ".join(words)):
            return f"{' '.join(words)[:60]!r}, wanted blk.<layer>.ffn_gate_exps.weight and ids"
        return None if len(words) == 1 + top_k else f"{len(words) - 1} ids, wanted {top_k} as in the first line"

    text = _Text(dump, fault)

    def source() -> Iterator[Rows]:
        records, layer_before = -1, -1
        for lines in text.chunks():
            words = text.words(pa.array(lines), " ", 1 + top_k)
            places = np.arange(len(words)).reshape(-1, 1 + top_k)
            names = pc.extract_regex(
                _taken(words, places[:, 0]), r"^blk\.(?P<layer>[0-9]{1,5})\.ffn_gate_exps\.weight$"
            )
            if names.null_count:
                raise text.fault()
            layer = _layers(text.integers(names.field("layer")), text)
            record = records + np.cumsum(np.diff(layer, prepend=layer_before) != 0)
            records, layer_before = int(record[-1]), int(layer[-1])
            ids = _ids(text.integers(_taken(words, places[:, 1:])), text)
            yield Rows(layer, record, ids.reshape(-1, top_k))

    found = survey(dump, source())
    parsed = ParsedDump(format="ggml_moe_log", blocks=iter(()), top_k=top_k, engine="llama.cpp (moe-prefetch)")
    return recorded(parsed, Recorded(dump, parsed, source, found))


# LLAMA_MOE_LOG

_MOE_LOG_COLUMNS = "Layer,Token,ExpertIDs,ExpertWeights"
_MOE_LOG_BANNER = "=== MoE Expert Selection Log ==="


def parse_moe_log(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`<layer>,<token>,"[<id> …]","[<weight> …]"`: one line per token of a graph and layer (`LLAMA_MOE_LOG`).

    A banner and a header come first, and again where another run was appended: each run is a request of its own. Token
    is the row inside the graph. The patch copies a strided view flat, so its ids may be a partition, not routes.

    Raises:
        MalformedDump: a line that is no such row, or rows of a layer that are not 0, 1, 2 …
    """
    first = _first_line(dump, lambda line: line[:1].isdigit())
    top_k = len((first.split('"')[1:2] or [""])[0].strip("[]").split(" "))
    row = re.compile(r'([0-9]{1,9}),([0-9]{1,9}),"\[([^"\]]*)\]","\[([^"\]]*)\]"', re.ASCII)

    def fault(line: bytes) -> str | None:
        words = line.decode("utf-8", errors="replace").strip()
        if words in (_MOE_LOG_BANNER, _MOE_LOG_COLUMNS):
            return None
        match = row.fullmatch(words)
        if match is None:
            return f'{words[:60]!r}, wanted <layer>,<token>,"[ids]","[weights]"'
        ids, weights = match[3].split(" "), match[4].split(" ")
        if len(ids) != top_k or len(weights) != top_k:
            return f"{len(ids)} ids and {len(weights)} weights, wanted {top_k} as in the first row"
        if int(match[1]) >= 65536 or not all(_whole(word, least=-1) for word in ids):
            return f"layer {match[1]}, ids {match[3][:60]!r}; wanted whole numbers"
        if not all(_number(word) for word in weights):
            return f"weights {match[4][:60]!r}, wanted numbers"
        return None

    text = _Text(dump, fault)

    def source() -> Iterator[Rows]:
        runs, records, layer_before, token_before = -1, -1, -1, -1
        for lines in text.chunks():
            heads = np.array([line.strip() in (_MOE_LOG_BANNER, _MOE_LOG_COLUMNS) for line in lines])
            starts = np.array([line.strip() == _MOE_LOG_COLUMNS for line in lines])
            run = runs + np.cumsum(starts)
            runs = int(run[-1])
            run = np.maximum(run[~heads], 0)
            routes = pa.array([line for line, head in zip(lines, heads.tolist(), strict=True) if not head], pa.string())
            if not len(routes):
                continue
            fields = text.words(routes, '"', 5)
            where = np.arange(0, len(fields), 5)
            if not bool(pc.all(pc.equal(_taken(fields, where + 2), ",")).as_py()):
                raise text.fault()
            places = text.integers(text.words(pc.utf8_rtrim(_taken(fields, where), ","), ",", 2)).reshape(-1, 2)
            layer, token = _layers(places[:, 0], text), places[:, 1]
            ids = text.integers(_bracketed(text, _taken(fields, where + 1), top_k))
            weights = text.floats(_bracketed(text, _taken(fields, where + 3), top_k))
            goes_on = (np.diff(layer, prepend=layer_before) == 0) & (token > 0)
            wanted = np.where(goes_on, np.concatenate([[token_before], token[:-1]]) + 1, 0)
            if (token != wanted).any():
                at = int(np.flatnonzero(token != wanted)[0])
                raise MalformedDump(
                    f"{dump.path}: layer {int(layer[at])}, token {int(token[at])}, wanted token {int(wanted[at])}: is "
                    "a line missing, or did two threads write?"
                )
            record = records + np.cumsum(token == 0)
            records, layer_before, token_before = int(record[-1]), int(layer[-1]), int(token[-1])
            yield Rows(
                layer, record, _ids(ids, text).reshape(-1, top_k), weights.reshape(-1, top_k).astype(np.float32),
                run=run,
            )  # fmt: skip

    found = survey(dump, source())
    parsed = ParsedDump(format="llama_moe_log", blocks=iter(()), top_k=top_k, engine="llama.cpp")
    return recorded(parsed, Recorded(dump, parsed, source, found))


def _bracketed(text: _Text, lists: pa.Array, count: int) -> pa.Array:
    """Words of `[a b c]` lists of one length."""
    return text.words(pc.utf8_trim(lists, "[]"), " ", count)


# moepager CSV

_MOEPAGER = ("token", "layer", "expert", "t_ns")


def parse_moepager(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`token,layer,expert,t_ns`: one line per token, layer and expert, tokens counted through the run (moepager).

    A prompt stands layer by layer, decoding token by token: in both a pass ends where the layer drops.

    Raises:
        MalformedDump: a line that is no such row, or tokens of different numbers of experts.
    """

    def fault(line: bytes) -> str | None:
        words = line.decode("utf-8", errors="replace").strip().split(",")
        if words == list(_MOEPAGER) or words[0].startswith("#"):
            return None
        if len(words) != 4 or not all(_whole(word, 2**63) for word in words[:2] + words[3:]):
            return f"{','.join(words)[:60]!r}, wanted token,layer,expert,t_ns in whole numbers"
        if int(words[1]) >= 65536 or not _whole(words[2], least=-1):
            return f"layer {words[1]}, expert {words[2]}; wanted smaller numbers"
        return None

    text = _Text(dump, fault)
    top_k = _moepager_top_k(dump, text)

    def source() -> Iterator[Rows]:
        records, layer_before = -1, -1
        rest = np.zeros((0, 4), dtype=np.int64)
        lines_before = 0
        for lines in text.chunks():
            routes = [line for line in lines if line[:1].isdigit()]
            if len(routes) != len(lines) and not all(
                line[:1].isdigit() or line.startswith("#") or line.strip() == ",".join(_MOEPAGER) for line in lines
            ):
                raise text.fault()
            values = text.integers(text.words(pa.array(routes, pa.string()), ",", 4)).reshape(-1, 4)
            values = np.concatenate([rest, values])
            whole = len(values) // top_k * top_k
            rest, values = values[whole:], values[:whole]
            if not whole:
                continue
            grouped = values.reshape(-1, top_k, 4)
            wrong = (grouped[:, :, :2] != grouped[:, :1, :2]).any(axis=(1, 2))
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise MalformedDump(
                    f"{dump.path}, row {lines_before + at * top_k} (counted from 0): wanted {top_k} rows of one token "
                    f"and layer, as at the start, found tokens and layers {grouped[at, :, :2].tolist()[:4]}: is a row "
                    "missing?"
                )
            lines_before += whole
            token, layer = grouped[:, 0, 0], _layers(grouped[:, 0, 1], text)
            record = records + np.cumsum(np.diff(layer, prepend=layer_before) != 0)
            records, layer_before = int(record[-1]), int(layer[-1])
            yield Rows(layer, record, _ids(grouped[:, :, 2].reshape(-1), text).reshape(-1, top_k), position=token)
        if len(rest):
            raise MalformedDump(
                f"{dump.path}: its last token has {len(rest)} of {top_k} rows: the dump is truncated, copy or record "
                "it again"
            )

    found = survey(dump, source())
    parsed = ParsedDump(
        format="moepager_csv", blocks=iter(()), top_k=top_k, engine="llama.cpp (moepager)", capture_method=CALLBACK
    )
    parsed.checks.append(PERTURBATION)
    return recorded(parsed, Recorded(dump, parsed, source, found))


def _moepager_top_k(dump: DumpFile, text: _Text) -> int:
    first, count = None, 0
    for lines in text.chunks():
        for line in lines:
            words = line.split(",")
            if not line[:1].isdigit():
                continue
            if len(words) != 4:
                raise text.fault()
            if first not in (None, words[:2]):
                return count
            first, count = words[:2], count + 1
        if count > 65536:
            break
    if not count:
        raise MalformedDump(f"{dump.path}: a header and no route: was the recorder stopped before it wrote any?")
    return count


# JSON

_TESY = re.compile(rb'"schema"\s*:\s*"tesy\.llama_moe_topk\.v')
_VFERENCE = re.compile(rb'"format"\s*:\s*"vference\.route-trace\.v')


def parse_tesy(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`tesy.llama_moe_topk.v1` and `.v2` JSONL: `{schema, graph_seq, layer, n_tokens, n_expert_used, experts}`.

    experts is [tokens, K]; version 2 adds phase, prefill or decode. graph_seq counts passes.

    Raises:
        MalformedDump: a line that is no such record, or contradicts itself.
    """
    head = json.loads(_first_line(dump, lambda line: True))
    schema = str(head.get("schema"))
    versions = {"tesy.llama_moe_topk.v1": False, "tesy.llama_moe_topk.v2": True}
    if schema not in versions:
        raise RefusedDump(f"{dump.path}: schema {schema[:60]!r}, wanted {' or '.join(versions)}")
    has_phase, top_k = versions[schema], head.get("n_expert_used")
    if not is_integer(top_k) or not 0 < top_k < 2**31:
        raise MalformedDump(f"{dump.path}, line 1: n_expert_used is {str(top_k)[:40]!r}, wanted a positive number")

    def fault(value: object) -> str | None:
        if not isinstance(value, dict) or value.get("schema") != schema:
            return f"wanted an object with schema {schema!r}"
        for key, limit in (("graph_seq", 2**62), ("layer", 65536), ("n_tokens", 65537)):
            if not is_integer(value.get(key)) or not 0 <= value[key] < limit:
                return f"{key} is {str(value.get(key))[:40]!r}, wanted a whole number below {limit}"
        if value.get("n_expert_used") != top_k:
            return f"n_expert_used is {str(value.get('n_expert_used'))[:40]!r}, the first line has {top_k}"
        if has_phase and value.get("phase") not in ("prefill", "decode"):
            return f"phase is {str(value.get('phase'))[:40]!r}, wanted prefill or decode"
        rows = value.get("experts")
        if not isinstance(rows, list) or len(rows) != value["n_tokens"]:
            return f"experts has {len(rows) if isinstance(rows, list) else 'no'} rows, wanted {value['n_tokens']}"
        for ids in rows:
            if not isinstance(ids, list) or len(ids) != top_k:
                return f"a row of experts is {str(ids)[:60]}, wanted {top_k} ids"
            if not all(is_integer(expert) and -1 <= expert < 2**31 for expert in ids):
                return f"a row of experts is {str(ids)[:60]}, wanted whole numbers"
        return None

    columns = {
        "schema": pa.string(), "graph_seq": pa.int64(), "layer": pa.int64(), "n_tokens": pa.int64(),
        "n_expert_used": pa.int64(), "experts": pa.list_(pa.list_(pa.int64())),
    }  # fmt: skip
    if has_phase:
        columns["phase"] = pa.string()

    def bad() -> MalformedDump:
        return first_bad_line(dump, lambda line: json_fault(line, fault))

    def source() -> Iterator[Rows]:
        records = 0
        for batch in _json_batches(dump.stream(), columns, _longest_line(dump), bad):
            of = {name: batch.column(name) for name in columns}
            if any(column.null_count for column in of.values()):
                raise bad()
            layer, tokens = (of[name].to_numpy() for name in ("layer", "n_tokens"))
            ids = _nested_ids(of["experts"], tokens, top_k)
            is_sound = (
                ids is not None
                and bool((of["n_expert_used"].to_numpy() == top_k).all())
                and bool(pc.all(pc.equal(of["schema"], schema)).as_py())
                and layer.min() >= 0
                and layer.max() < 65536
                and of["graph_seq"].to_numpy().min() >= 0
            )
            if not is_sound or ids is None:
                raise bad()
            phase = None
            if has_phase:
                codes = pc.index_in(of["phase"], pa.array(["prefill", "decode"]))
                if codes.null_count:
                    raise bad()
                phase = np.array([_PREFILL, _DECODE], dtype=np.int8)[np.repeat(codes.to_numpy(), tokens)]
            record = np.repeat(records + np.arange(len(layer)), tokens)
            records += len(layer)
            yield Rows(
                np.repeat(layer, tokens), record, ids, graph=np.repeat(of["graph_seq"].to_numpy(), tokens), phase=phase
            )

    found = survey(dump, source())
    parsed = ParsedDump(format="tesy_moe_topk", blocks=iter(()), top_k=top_k, engine="llama.cpp")
    parsed.capture_method = CALLBACK
    parsed.checks.append(PERTURBATION)
    return recorded(parsed, Recorded(dump, parsed, source, found))


def _nested_ids(lists: pa.ListArray, tokens: Ints, top_k: int) -> npt.NDArray[np.int32] | None:
    """(R, K) ids of [[ids], …] lists, or null where they are not as wide as said."""
    inner = lists.flatten()
    ids = inner.flatten()
    widths = inner.value_lengths().to_numpy(zero_copy_only=False)
    if (
        inner.null_count
        or ids.null_count
        or not bool((lists.value_lengths().to_numpy(zero_copy_only=False) == tokens).all())
        or not bool((widths == top_k).all())
    ):
        return None
    values: Ints = ids.to_numpy()
    if len(values) and (values.min() < -1 or values.max() >= 2**31):
        return None
    narrow: npt.NDArray[np.int32] = values.astype(np.int32).reshape(-1, top_k)
    return narrow


def _longest_line(dump: DumpFile) -> int:
    return len(dump.stream().readline(MAX_LINE_BYTES))


def _json_batches(
    stream: Any, columns: dict[str, pa.DataType], first_line_bytes: int, bad: Callable[[], MalformedDump]
) -> Iterator[pa.RecordBatch]:
    try:
        reader = pajson.open_json(
            pa.PythonFile(stream, mode="r"),
            # Several blocks are read ahead, so they bound memory; a line must fit into one.
            read_options=pajson.ReadOptions(block_size=min(MAX_LINE_BYTES, max(_CHUNK_BYTES, 8 * first_line_bytes))),
            parse_options=pajson.ParseOptions(
                explicit_schema=pa.schema(list(columns.items())), unexpected_field_behavior="ignore"
            ),
        )
        for batch in reader:
            if batch.num_rows:
                yield batch
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise bad() from error


class _RecordLines(io.RawIOBase):
    """The objects of the array `records` of a JSON document, one per line."""

    def __init__(self, dump: DumpFile) -> None:
        self._path, self._stream = dump.path, dump.stream()
        self._prefix, self._rest = b"", b""
        while not (match := _RECORDS.search(self._prefix)):
            chunk = self._stream.read(_CHUNK_BYTES)
            if not chunk or len(self._prefix) > _MAX_PREFIX_BYTES:
                raise MalformedDump(
                    f"{dump.path}: no array `records` in its first {len(self._prefix)} bytes: truncated?"
                )
            self._prefix += chunk
        self._prefix, self._rest = self._prefix[: match.end()], self._prefix[match.end() :]
        self._is_done = False
        self._out = b""

    @property
    def fields(self) -> dict[str, Any]:
        """What stands before the records."""
        try:
            said = json.loads(self._prefix + b"]}")
        except (ValueError, RecursionError) as error:
            raise MalformedDump(f"{self._path}: no JSON before `records` ({str(error).splitlines()[0]})") from None
        return said if isinstance(said, dict) else {}

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        while not self._out and not self._is_done:
            self._fill()
        part = self._out[: len(buffer)]
        buffer[: len(part)] = part
        self._out = self._out[len(part) :]
        return len(part)

    def _fill(self) -> None:
        chunk = self._stream.read(_CHUNK_BYTES)
        held = self._rest + chunk
        end = _RECORDS_END.search(held)
        if end is not None:
            self._finish(held[end.end() - 1 :])
            self._emit(held[: end.start() + end[0].startswith(b"}")])
            return
        if not chunk:
            raise MalformedDump(f"{self._path}: ends inside `records`: truncated, copy or record it again")
        # A separator or the end of the array may lie across two chunks.
        cut = max(held.rfind(b"}"), 0)
        if len(held) - cut > MAX_LINE_BYTES:
            raise MalformedDump(f"{self._path}: a record of over {MAX_LINE_BYTES} bytes")
        self._rest = held[cut:]
        self._emit(held[:cut])

    def _emit(self, text: bytes) -> None:
        self._out = _SEPARATOR.sub(b"}\x00{", text).replace(b"\n", b" ").replace(b"\x00", b"\n")

    def _finish(self, rest: bytes) -> None:
        self._is_done = True
        rest += self._stream.read(_MAX_PREFIX_BYTES)
        try:
            json.loads(self._prefix + rest)
        except (ValueError, RecursionError) as error:
            raise MalformedDump(
                f"{self._path}: no JSON after `records` ({str(error).splitlines()[0]}): truncated?"
            ) from None


_RECORDS = re.compile(rb'"records"\s*:\s*\[')
_RECORDS_END = re.compile(rb"\}\s*\]|\A\s*\]")
_SEPARATOR = re.compile(rb"\}\s*,\s*\{")
_FIRST_IDS = re.compile(rb'"expert_ids"\s*:\s*\[\s*\[([^\[\]]*)\]')


def parse_vference(dump: DumpFile, asked: Asked) -> ParsedDump:
    """`vference.route-trace.v1`: one document `{format, prompt_tokens, output_tokens, records}`, however long.

    A record is one layer of one forward pass, `{layer_id, expert_ids}` with expert_ids [tokens, K]. Tokens are counted
    through the records: where prompt and output tokens add up to them, that tells positions and phases.

    Raises:
        MalformedDump: truncated, or a record that is none. RefusedDump: another version.
    """
    lines = _RecordLines(dump)
    fields = lines.fields
    if fields.get("format") != "vference.route-trace.v1":
        raise RefusedDump(f"{dump.path}: format {str(fields.get('format'))[:60]!r}, wanted vference.route-trace.v1")
    first = _FIRST_IDS.search(lines.read(MAX_LINE_BYTES) or b"")
    if first is None:
        raise MalformedDump(f"{dump.path}: no record with expert_ids: was the recorder stopped before it wrote any?")
    top_k = len(first[1].split(b","))

    def bad() -> MalformedDump:
        return MalformedDump(
            f"{dump.path}: a record among `records` is not {{layer_id: a whole number, expert_ids: [[{top_k} ids], …]}}"
        )

    def source() -> Iterator[Rows]:
        records = 0
        columns = {"layer_id": pa.int64(), "expert_ids": pa.list_(pa.list_(pa.int64()))}
        stream = io.BufferedReader(_RecordLines(dump), _CHUNK_BYTES)
        for batch in _json_batches(stream, columns, MAX_LINE_BYTES // 8, bad):
            layer, lists = batch.column("layer_id"), batch.column("expert_ids")
            if layer.null_count or lists.null_count:
                raise bad()
            numbers = layer.to_numpy()
            tokens = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
            ids = _nested_ids(lists, tokens, top_k)
            if ids is None or numbers.min() < 0 or numbers.max() >= 65536:
                raise bad()
            yield Rows(np.repeat(numbers, tokens), np.repeat(records + np.arange(len(numbers)), tokens), ids)
            records += len(numbers)

    found = survey(dump, source())
    parsed = ParsedDump(format="vference_route_trace", blocks=iter(()), top_k=top_k, engine="vference")
    prompt, output = fields.get("prompt_tokens"), fields.get("output_tokens")
    outputs = len(output) if isinstance(output, list) else output
    counted = None
    if is_integer(prompt) and is_integer(outputs):
        # The last token that is sampled need not be evaluated.
        wanted = (prompt + outputs - 1, prompt + outputs)  # type: ignore[operator]
        counted = prompt if found.first_layer_rows in wanted else None
    parsed.checks.append(
        CheckRecord(
            name="tokens add up",
            outcome="ok" if counted is not None else "warn",
            wanted="prompt_tokens + output_tokens are the tokens of the records, so positions and phases are known",
            found=f"prompt_tokens {str(prompt)[:20]}, {str(outputs)[:20]} output tokens, {found.first_layer_rows} "
            "tokens in the records",
        )
    )
    return recorded(parsed, Recorded(dump, parsed, source, found, prunes=False, running_prompt=counted))


_LINES_OF_COUNTS = re.compile(rb"(?:[0-9]{1,9} [0-9]{1,9} [0-9]{1,20}\r?\n){3}")

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "tesy_moe_topk",
        "tesy.llama_moe_topk JSONL",
        lambda sample: _TESY.search(sample.line.encode()) is not None and isinstance(sample.value, dict),
        parse_tesy,
    ),
    Layout(
        "vference_route_trace",
        "vference.route-trace.v1 JSON",
        lambda sample: sample.head.lstrip().startswith(b"{") and _VFERENCE.search(sample.head) is not None,
        parse_vference,
    ),
    Layout(
        "moepager_csv",
        "moepager CSV token,layer,expert,t_ns",
        lambda sample: tuple(name.strip() for name in sample.header.split(",")) == _MOEPAGER,
        parse_moepager,
    ),
    Layout(
        "llama_moe_log",
        "LLAMA_MOE_LOG CSV",
        lambda sample: sample.header in (_MOE_LOG_BANNER, _MOE_LOG_COLUMNS),
        parse_moe_log,
    ),
    Layout(
        "moe_prefetch_route",
        "route lines of moe-prefetch",
        lambda sample: _ROUTE.fullmatch(sample.line) is not None,
        parse_route_lines,
    ),
    Layout(
        "ggml_moe_log",
        "GGML_MOE_LOG lines",
        lambda sample: _GATE_EXPERTS.fullmatch(sample.line) is not None,
        parse_gate_lines,
    ),
    Layout(
        "colibri_route_trace",
        "colibri ROUTE_TRACE",
        lambda sample: _COLIBRI.fullmatch(sample.line) is not None,
        parse_colibri,
    ),
)

_NO_ORDER = "counts have no order, so no cache can be replayed on them: record the ids of every token"


def _holds(*words: bytes) -> Callable[[Sample], bool]:
    return lambda sample: all(word in sample.head for word in words)


NO_TRACES: tuple[NoTrace, ...] = (
    NoTrace(
        lambda sample: sample.head.startswith(b"# ds4 expert hotlist"),
        f"a ds4 expert hotlist: all pairs of layer and expert sorted by use, not routes; {_NO_ORDER}",
    ),
    NoTrace(
        _holds(b'"layer_records"', b'"expert_used"'),
        f"a ds4 expert profile: counts, the most used experts and a simulated hit rate, not routes; {_NO_ORDER}",
    ),
    NoTrace(
        lambda sample: re.fullmatch(r"-1 [0-9]+ [0-9]+", " ".join(sample.line.split())) is not None,
        f"a colibri expert history (.coli_usage): counts per layer and expert; {_NO_ORDER} (ROUTE_TRACE=path)",
    ),
    NoTrace(
        lambda sample: _LINES_OF_COUNTS.match(sample.head) is not None,
        "lines of three whole numbers, as a colibri expert history without its header has them: counts per layer and "
        f"expert; {_NO_ORDER} (ROUTE_TRACE=path)",
    ),
    NoTrace(
        lambda sample: re.match(rb'\s*\{\s*"[0-9]+,[0-9]+"\s*:\s*[0-9.]+\s*[,}]', sample.head) is not None,
        f"a heat map per layer and expert (Krasis), not routes; {_NO_ORDER}",
    ),
    NoTrace(
        _holds(b'"universal"', b'"layers"'),
        "an expert profile of mlx-moe (flash-moe): experts that most prompts use and in how many, not routes; "
        f"{_NO_ORDER}",
    ),
    NoTrace(
        lambda sample: sample.field("expert_activation") is not None,
        "an activation sheet of MoE-CAP: how many experts a pass woke on average, without their ids; record topk_ids",
    ),
)
"""What engines of this family write that looks like routes and is none."""
