"""The report's answer to whether lookahead is worth it, and the chain behind it: from what is named to time.

It shows rows of `lookahead_benefit`, all of them simulated, over links that are assumed; how plans were delivered in
native replays is in `replay_delivery`.
"""

from collections.abc import Sequence
from itertools import groupby

from pipeline.page import Block, Cell, Grid, Row, amount, listed, percent, sized

WORTH = 0.01
"""A plan pays if it saves so much of the time, or of the misses where no time is known."""

MOSTLY = 0.5
"""What makes a link of the chain the one that breaks: less than so much covered, on time, or left after displacing."""

_NAMES = {"previous_token": "the previous token's experts", "frequency": "the most frequent experts"}


def benefit_blocks(rows: Sequence[Row]) -> list[Block]:
    """One block for the rows of one trace; nothing without any."""
    if not rows:
        return []
    # Where there is a link with a bandwidth, time is known, and it is time that is asked about.
    bounded = [row for row in rows if row["bandwidth_bytes_per_s"] is not None]
    judged = bounded or [row for row in rows if row["bandwidth_bytes_per_s"] is None]
    ordered = sorted(judged, key=lambda row: row["capacity_experts_total"])
    answers = [
        _answer(capacity, list(members))
        for capacity, members in groupby(ordered, key=lambda row: row["capacity_experts_total"])
    ]
    return [
        Block(
            heading="Is lookahead worth it here?",
            findings=[" ".join([*answers, _assumption(ordered[0])])],
            pictures=[],
            grids=[_grid(rows)],
        )
    ]


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
    if not fitted:
        return f"{where} the truth would save {percent(most)} of {_what(rows[0])}; no predictor was tried."
    best = max(fitted, key=_gain)
    if _gain(best) >= WORTH:
        return (
            f"{where} it may pay: {_name(best)} would save {percent(_gain(best))} of {_what(best)}, of the "
            f"{percent(most)} that the truth would, by removing {amount(best['simulated_removed_misses'])} of "
            f"{amount(best['misses'])} misses and displacing {amount(best['simulated_displaced'])} hits; "
            f"{(best['simulated_misses_with'] + best['simulated_submitted']) / best['misses']:.2f} times as many "
            "experts are read in all."
        )
    change = f"would save {percent(_gain(best))}" if _gain(best) >= 0 else f"would cost {percent(-_gain(best))}"
    return (
        f"{where} it does not pay: the best of {amount(len(fitted))} plans, {_name(best)}, {change} of {_what(best)}, "
        f"where the truth would save {percent(most)}: {_broken_link(best)}."
    )


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
        return (
            f"of what it names, {amount(row['predicted_accesses'])} accesses, none was missing, so it fetches nothing"
        )
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
        "late ones of these; hits displaced; prefetches wasted; bytes and time with the plan ÷ without.",
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
