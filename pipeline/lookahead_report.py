"""The report's answer to whether lookahead is worth it, and the chain behind it: from what is named to time.

The chain is of `lookahead_benefit` and drawn from the view `lookahead_waterfall`: simulated, over links that are
assumed. What native runs with a plan did is of the view `lookahead_effect`, in sentences and a table of its own.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from pipeline.page import Block, Cell, Grid, Picture, Row, amount, listed, percent, plural, sized
from pipeline.plots import Bar, Line, Plots, drawing_bars
from schemas.tables import TABLES

EFFECT_VIEW, WATERFALL_VIEW = VIEWS = ("lookahead_effect", "lookahead_waterfall")

WORTH = 0.01
"""A plan pays if it saves so much of the time, or of the misses where no time is known."""

MOSTLY = 0.5
"""What makes a link of the chain the one that breaks: less than so much covered, on time, or left after displacing."""

MOST_MEASURED = 4
"""Conditions with a plan that have a sentence; the table has all."""

_NAMES = {"previous_token": "the previous token's experts", "frequency": "the most frequent experts"}


def benefit_blocks(
    rows: Sequence[Row],
    plots: Plots,
    *,
    waterfalls: Sequence[Row] = (),
    effects: Sequence[Row] | None = None,
) -> list[Block]:
    """One block for the rows of one trace; nothing without any.

    waterfalls, effects: rows of the two views; without `effects` nothing is said of native runs, with none that there
    are none.
    """
    if not rows and not effects:
        return []
    judged = _judged(rows)
    measured = [] if effects is None else _measured(effects)
    answers = [_answer(capacity, members) for capacity, members in judged.items()]
    simulated = [" ".join([*answers, _assumption(next(iter(judged.values()))[0])])] if judged else []
    return [
        Block(
            heading="Is lookahead worth it here?",
            findings=[*simulated, *measured],
            pictures=_pictures(judged, waterfalls, plots),
            grids=[*([_grid(rows)] if rows else []), *([_effects_grid(effects)] if effects else [])],
        )
    ]


def _judged(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows that answer, by capacity: over links where time is known, if there are any, since it is asked about."""
    bounded = [row for row in rows if row["bandwidth_bytes_per_s"] is not None]
    chosen = sorted(bounded or rows, key=lambda row: row["capacity_experts_total"])
    return {capacity: list(members) for capacity, members in groupby(chosen, lambda row: row["capacity_experts_total"])}


def _best(rows: Sequence[Row]) -> Row | None:
    """Of the plans that could be made in advance and prefetch anything the one that gains most."""
    fetching = (row for row in rows if row["predictor"] != "oracle" and row["simulated_submitted"])
    return max(fetching, key=_gain, default=None)


def _answer(capacity: int, rows: Sequence[Row]) -> str:
    """What one cache gains, and which link of the chain breaks where it gains nothing."""
    where = f"With room for {amount(capacity)} experts"
    oracle = max((row for row in rows if row["predictor"] == "oracle"), key=_gain, default=None)
    fitted = [row for row in rows if row["predictor"] != "oracle"]
    most = 0.0 if oracle is None else _gain(oracle)
    missed = f"{amount(rows[0]['misses'])} of {amount(rows[0]['accesses'])} accesses miss"
    if most < WORTH:
        return (
            f"{where} there is nothing to gain: {missed}, and even the truth would save {percent(most)} of "
            f"{_what(rows[0])}."
        )
    best = _best(rows)
    if not fitted:
        return f"{where} the truth would save {percent(most)} of {_what(rows[0])}; no predictor was tried."
    if best is None:
        return (
            f"{where} it does not pay: {_idle(len(fitted))}, "
            f"where the truth would save {percent(most)} of {_what(rows[0])}."
        )
    if _gain(best) >= WORTH:
        return (
            f"{where} it may pay: {_name(best)} would save {percent(_gain(best))} of {_what(best)}, of the "
            f"{percent(most)} that the truth would, by removing {amount(best['simulated_removed_misses'])} of "
            f"{amount(best['misses'])} misses and displacing {amount(best['simulated_displaced'])} hits; "
            f"{(best['simulated_misses_with'] + best['simulated_submitted']) / best['misses']:.2f} times as many "
            "experts are read in all."
        )
    fetching = sum(row["simulated_submitted"] > 0 for row in fitted)
    change = f"would save {percent(_gain(best))}" if _gain(best) >= 0 else f"would cost {percent(-_gain(best))}"
    return (
        f"{where} it does not pay: the best of {amount(fetching)} {plural('plan', fetching)} that "
        f"{'prefetches' if fetching == 1 else 'prefetch'} anything, {_name(best)}, {change} of {_what(best)}, "
        f"where the truth would save {percent(most)}: {_broken_link(best)}."
    )


def _idle(number: int) -> str:
    """That so many plans prefetch nothing."""
    if number == 1:
        return "the one plan that was tried does not prefetch anything, since what it names is there"
    return f"none of {amount(number)} plans prefetches anything, since what they name is there"


def _gain(row: Row) -> float:
    """Share of the time saved; where no time passes, of the misses."""
    if row["simulated_time_without_ns"]:
        saved = row["simulated_time_without_ns"] - row["simulated_time_with_ns"]
        return float(saved / row["simulated_time_without_ns"])
    return float((row["misses"] - row["simulated_misses_with"]) / row["misses"]) if row["misses"] else 0.0


def _what(row: Row) -> str:
    return "the time" if row["simulated_time_without_ns"] else "the misses"


def _broken_link(row: Row) -> str:
    """The first link of the chain, from prediction to time, at which most is lost."""
    if (row["hint_coverage"] or 0) < MOSTLY:
        return f"it has a prediction for {percent(row['hint_coverage'])} of the events only"
    if not row["predicted_misses"]:
        return f"of what it names, {amount(row['predicted_accesses'])} accesses, none was missing when it was accessed"
    if (row["recall_missed"] or 0) < MOSTLY * (row["recall_all"] or 0):
        return (
            f"it names {percent(row['recall_all'])} of all accesses and {percent(row['recall_missed'])} of the misses; "
            "the cache holds most of what it knows"
        )
    if (row["late_share"] or 0) > 1 - MOSTLY:
        return f"{percent(row['late_share'])} of the prefetches that were used came late"
    if row["simulated_displaced"] > MOSTLY * row["simulated_removed_misses"]:
        return (
            f"it removes {amount(row['simulated_removed_misses'])} misses and displaces "
            f"{amount(row['simulated_displaced'])} hits"
        )
    return f"it names {percent(row['recall_missed'])} of the misses, which is too little"


def _name(row: Row) -> str:
    said = _NAMES.get(row["predictor"], row["predictor"])
    ahead = f", {amount(row['lookahead_layers'])} layers ahead" if row["lookahead_layers"] else ""
    return f"{said}{ahead}".replace(", 1 layers", ", 1 layer")


def _assumption(row: Row) -> str:
    if row["bandwidth_bytes_per_s"] is None:
        return "Simulated with everything named arriving at once, since the trace does not say how large an expert is."
    parts = [f"a link of {sized(row['bandwidth_bytes_per_s'])} a second", f"{row['latency_ns'] / 1000:,.0f} µs a read"]
    if row["queue_depth"] is not None:
        parts.append(f"{amount(row['queue_depth'])} reads under way")
    parts.append(f"{row['compute_ns'] / 1e6:,.1f} ms of compute in each layer to hide behind")
    return f"Simulated, and assumed: {listed(parts)}."


_LEGEND = [
    Line("all, or what remains", ("blue", "", "s"), [], []),
    Line("saved", ("green", "", "s"), [], []),
    Line("what the plan costs, or comes late", ("vermillion", "", "s"), [], []),
]


def _pictures(judged: dict[int, list[Row]], waterfalls: Sequence[Row], plots: Plots) -> list[Picture]:
    """The chain of the plan that each answer speaks of; nothing where the view has no row of it."""
    key = TABLES["lookahead_benefit"].key
    by_key = {tuple(row[name] for name in key): row for row in waterfalls}
    shown = [best for rows in judged.values() for best in [_best(rows)] if best is not None]
    chains = [by_key[place] for row in shown for place in [tuple(row[name] for name in key)] if place in by_key]
    if not chains:
        return []
    caption = (
        f"Simulated, not measured, from trace {chains[0]['trace_id']}: for each cache, an LRU over all layers, the "
        f"chain of the best plan that does not know the future. {_assumption(chains[0])} Saved: accesses that a "
        "prefetch served instead of a read on demand, be it a later one than it was meant for. Displaced: hits that "
        "prefetches pushed out. Wasted: read ahead, not used. Each group of bars has a scale of its own, from 0."
    )
    return [Picture([_drawn(row, plots) for row in chains], _LEGEND, caption)]


def _drawn(row: Row, plots: Plots) -> Markup:
    title = f"room for {amount(row['capacity_experts_total'])} experts\n{_name(row)}"
    panels = _panels(row)
    said = [f"{name}: {listed([f'{bar.label} {bar.number}' for bar in bars])}." for name, bars in panels]
    with drawing_bars(title, panels) as figure:
        return plots.svg(figure, f"From selections to time, {title.replace(chr(10), ', ')}", " ".join(said))


def _panels(row: Row) -> list[tuple[str, list[Bar]]]:
    """The links of the chain: accesses, and where sizes and a link are known bytes and time."""
    counts = {
        "selections": ("selections", "blue"),
        "accesses": ("accesses", "blue"),
        "named beforehand": ("predicted_accesses", "blue"),
        "named and missing": ("predicted_misses", "blue"),
        "arrived in time": ("simulated_removed_in_time", "green"),
        "arrived late": ("simulated_removed_late", "vermillion"),
        "hits displaced": ("simulated_displaced", "vermillion"),
    }
    bars = [Bar(label, 0, row[name], colour, amount(row[name])) for label, (name, colour) in counts.items()]
    panels = [(f"accesses ({amount(row['misses'])} miss without the plan)", bars)]
    if row["simulated_device_bytes"] is not None:
        steps = [
            ("saved", -row["simulated_removed_bytes"]), ("displaced", row["simulated_displaced_bytes"]),
            ("read ahead, used", row["simulated_used_bytes"]), ("read ahead, wasted", row["simulated_wasted_bytes"]),
        ]  # fmt: skip
        panels.append(("bytes read", _waterfall(row["miss_bytes"], steps, sized)))
    if row["simulated_time_without_ns"]:
        steps = [("saved" if row["simulated_saved_ns"] >= 0 else "lost", -row["simulated_saved_ns"])]
        panels.append(("time", _waterfall(row["simulated_time_without_ns"], steps, _milliseconds)))
    return panels


def _waterfall(begin: int, steps: Sequence[tuple[str, int]], text: Callable[[float], str]) -> list[Bar]:
    """What there is without the plan, what changes it in turn, and what there is with the plan."""
    bars = [Bar("without the plan", 0, begin, "blue", text(begin))]
    level = begin
    for label, change in steps:
        sign = "\N{MINUS SIGN}" if change < 0 else "+" if change > 0 else ""
        bars.append(
            Bar(label, level, level + change, "green" if change < 0 else "vermillion", f"{sign}{text(abs(change))}")
        )
        level += change
    return [*bars, Bar("with the plan", 0, level, "blue", text(level))]


class _Measure(NamedTuple):
    """Columns of `lookahead_effect` that belong together, and how they read."""

    words: str
    verdict: str
    plan: str
    none: str
    saved: str
    spreads: tuple[str, str]
    counts: tuple[str, str]
    text: Callable[[float], str]
    run: str

    def share(self, row: Row) -> float | None:
        """Saved ÷ what runs without a plan have; null where they have nothing, or nothing is known."""
        return None if not row[self.none] or row[self.saved] is None else row[self.saved] / row[self.none]


def _measured(effects: Sequence[Row]) -> list[str]:
    """What native runs with a plan did, a sentence per condition, the largest saving of bytes first."""
    if not effects:
        return ["Measured: nothing, since no native run of this trace delivered a plan."]
    compared = sorted((row for row in effects if row["none_runs"]), key=lambda row: -(_BYTES.share(row) or 0))
    said = [f"Measured, {_condition(row)}: {_told(row)}." for row in compared[:MOST_MEASURED]]
    if len(compared) > MOST_MEASURED:
        said.append(f"The table has {amount(len(compared) - MOST_MEASURED)} more conditions with a plan.")
    alone = len(effects) - len(compared)
    if alone:
        said.append(
            f"Measured, but held against nothing: {amount(alone)} {plural('condition', alone)} with a plan, since no "
            "valid run without one is like it."
        )
    return said


def _effect(row: Row, measure: _Measure) -> str:
    if row[measure.plan] is None or row[measure.none] is None:
        return f"no valid {measure.words} of both"
    here, there = measure.text(row[measure.plan]), measure.text(row[measure.none])
    share, verdict = measure.share(row), row[measure.verdict]
    change = "" if share is None else f"{percent(abs(share))} {'more' if share < 0 else 'less'}"
    numbers = f"{here} against {there}; {_repeated(row, measure)}"
    if verdict in ("less", "more"):
        return f"{measure.words} {change or verdict} ({numbers})"
    claim = "no effect on" if verdict == "none" else "too few valid repetitions to tell of"
    return f"{claim} {measure.words} ({', '.join(one for one in (change, numbers) if one)})"


def _repeated(row: Row, measure: _Measure) -> str:
    """How many runs a figure is of, and how far those of one condition are apart; one run says nothing of that."""
    with_plan, without = (row[name] for name in measure.counts)
    if max(with_plan, without) == 1:
        return f"one {measure.run} each"
    runs = f"{amount(with_plan)} {plural(measure.run, with_plan)} with it, {amount(without)} without"
    spreads = [row[name] for name, number in zip(measure.spreads, (with_plan, without), strict=True) if number > 1]
    return f"{runs}; {measure.run}s of one condition differ by up to {measure.text(max(spreads))}"


def _told(row: Row) -> str:
    """The effects of a plan, if anything of it was delivered, and of how many events it spoke."""
    hinted = f"hints for {percent(row['hinted_share'])} of the events"
    hinted += f" ({amount(row['hints'])} of {amount(row['plan_events'])})"
    if not row["hints_submitted"]:
        return f"nothing of the plan was delivered, so bytes and times say nothing of it; it has {hinted}"
    return f"{_effect(row, _BYTES)}; {_effect(row, _TIME)}; {hinted}"


def _condition(row: Row) -> str:
    plan = row["condition"] or f"plan {row['plan_hash']}, {row['delivery']}"
    room = "without a limit" if row["capacity_bytes"] is None else f"with {sized(row['capacity_bytes'])}"
    return f"{plan}, {row['owner']} {room}"


def _milliseconds(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:,.3f}\N{NARROW NO-BREAK SPACE}ms"


_BYTES = _Measure(
    "bytes from the device", "effect_bytes", "plan_device_bytes", "none_device_bytes", "saved_device_bytes",
    ("plan_spread_bytes", "none_spread_bytes"), ("plan_runs", "none_runs"), sized, "run",
)  # fmt: skip
_TIME = _Measure(
    "time", "effect_time", "plan_wall_ns", "none_wall_ns", "saved_ns", ("plan_spread_ns", "none_spread_ns"),
    ("plan_timed_runs", "none_timed_runs"), _milliseconds, "timed run",
)  # fmt: skip


def _effects_grid(rows: Sequence[Row]) -> Grid:
    return Grid(
        caption="Measured, of valid runs: lower medians with the plan and without, below them the ranges. The effect "
        "is none where the medians differ by no more than runs of either do, unknown below five runs of either and "
        "where nothing was delivered. Times: of runs whose times are valid, whose number stands with the range.",
        summary="What native runs with a plan did against those without",
        head=[
            [
                Cell("condition", is_text=True),
                *(Cell(text) for text in ("runs", "bytes with", "bytes without", "effect")),
                *(Cell(text) for text in ("time with", "time without", "effect")),
                *(Cell(text) for text in ("events with a hint", "hints delivered", "named and there")),
            ]
        ],
        rows=[
            [
                Cell(_condition(row), f"{row['limited_by'] or 'no limit'}, {row['machine_id']}", is_text=True),
                Cell(amount(row["plan_runs"]), f"{amount(row['none_runs'])} without"),
                *_effect_cells(row, "device{}_bytes", _BYTES),
                *_effect_cells(row, "wall{}_ns", _TIME),
                Cell(percent(row["hinted_share"]), f"{amount(row['hints'])} of {amount(row['plan_events'])}"),
                Cell(percent(row["completed_share"]), f"{amount(row['hints_completed'])} of {amount(row['hints'])}"),
                Cell(percent(row["named_hit_rate"]), f"{amount(row['named_hits'])} of {amount(row['named_accesses'])}"),
            ]
            for row in rows
        ],
    )


def _effect_cells(row: Row, name: str, measure: _Measure) -> list[Cell]:
    cells = []
    for side, middle, number in zip(("plan", "none"), (measure.plan, measure.none), measure.counts, strict=True):
        if row[middle] is None:
            cells.append(Cell("—"))
            continue
        low, high = (measure.text(row[f"{side}_{name.format(end)}"]) for end in ("_low", "_high"))
        runs = f"{amount(row[number])} {plural(measure.run, row[number])}"
        cells.append(Cell(measure.text(row[middle]), runs if low == high else f"{runs}, {low} to {high}"))
    return [*cells, Cell(row[measure.verdict] or "unknown")]


def _grid(rows: Sequence[Row]) -> Grid:
    ordered = sorted(
        rows,
        key=lambda row: (
            row["capacity_experts_total"], row["bandwidth_bytes_per_s"] or 0, row["predictor"] == "oracle",
            row["predictor"], row["lookahead_layers"] or 0,
        ),
    )  # fmt: skip
    return Grid(
        caption="Simulated, an LRU over all layers: accesses that were named; misses that were; misses removed, and "
        "late ones of these; hits displaced; prefetches wasted; bytes and time with the plan ÷ without. A miss that "
        "was named may remain: a prediction is issued once, when it is made, for what is not resident then. What it "
        "brings, or finds there, may be evicted again before the event; so a plan known all along, and the previous "
        "token's experts, which are there when they are named, may remove none.",
        summary="The chain from what is named to time, by cache, link and plan",
        head=[
            [
                Cell("plan", is_text=True),
                *(Cell(text) for text in ("room", "link", "named", "named and missing", "removed")),
                *(Cell(text) for text in ("displaced", "wasted", "bytes", "time")),
            ]
        ],
        rows=[
            [
                Cell(_name(row), is_text=True),
                Cell(amount(row["capacity_experts_total"])),
                Cell(
                    "unbounded" if row["bandwidth_bytes_per_s"] is None else f"{sized(row['bandwidth_bytes_per_s'])}/s"
                ),
                Cell(percent(row["recall_all"]), f"{amount(row['predicted_accesses'])} of {amount(row['accesses'])}"),
                Cell(percent(row["recall_missed"]), f"{amount(row['predicted_misses'])} of {amount(row['misses'])}"),
                Cell(
                    percent(row["prefetch_coverage"]),
                    f"{amount(row['simulated_removed_misses'])}, {amount(row['simulated_removed_late'])} late",
                ),
                Cell(amount(row["simulated_displaced"])),
                Cell(amount(row["simulated_wasted"])),
                Cell(_ratio(row["simulated_device_bytes_per_miss_byte"])),
                Cell(_ratio(row["simulated_time_per_time_without"])),
            ]
            for row in ordered
        ],
    )


def _ratio(ratio: float | None) -> str:
    return "—" if ratio is None else f"{ratio:.3f}"
