"""The report's section on experiments: for each, its conditions with medians and spreads, and what they show.

The paragraph is the replayer's own, made from the same runs: see `replayer.experiment_findings`.
"""

import re
from collections.abc import Callable, Sequence

import polars as pl

from pipeline.page import Block, Cell, Grid, Row, amount, percent, plural, sized

_SHOWN: tuple[tuple[str, str], ...] = (
    ("held_bytes", "held"),
    ("device_bytes", "device bytes"),
    ("nominal_miss_bytes", "LRU misses at capacity"),
    ("amplification_nominal", "measured ÷ simulated"),
    ("step_median_ns", "step, median"),
)
_METRICS = {"device_bytes": "device bytes", "step_median_ns": "step, median", "held_bytes": "held"}


def experiments(tables: dict[str, pl.DataFrame]) -> list[Block]:
    """A block per experiment, by id; empty where none was run."""
    conditions, effects = (_by_experiment(tables[f"experiment_{name}"]) for name in ("condition", "effect"))
    return [
        _block(row, conditions.get(row["experiment_id"], []), effects.get(row["experiment_id"], []))
        for row in tables["experiment"].sort("experiment_id").to_dicts()
    ]


def _by_experiment(frame: pl.DataFrame) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for row in frame.iter_rows(named=True):
        rows.setdefault(row["experiment_id"], []).append(row)
    return rows


def _block(row: Row, conditions: Sequence[Row], effects: Sequence[Row]) -> Block:
    state = "" if row["finished"] else ", not finished"
    asked = (
        f"{row['asks']} {amount(row['conditions'])} {plural('condition', row['conditions'])}, "
        f"{amount(row['repetitions'])} repetitions of each{state}; {row['run_order']} order, seed {row['order_seed']}, "
        f"sizes {row['sizes'].replace('_', ' ')}; machine {row['machine_id']}."
    )
    return Block(
        heading=f"Experiment {row['experiment']} ({row['experiment_id']})",
        findings=[asked, *_statements(row["finding"])],
        pictures=[],
        grids=[_conditions_grid(conditions), *([_effects_grid(effects)] if effects else [])],
    )


def _statements(paragraph: str) -> list[str]:
    """The paragraph cut into what is said of each condition: its sentences, a measurement with what it belongs to."""
    statements: list[str] = []
    for sentence in re.split(r"(?<=\.) ", paragraph):
        if statements and sentence.startswith("Measured, "):
            statements[-1] += f" {sentence}"
        else:
            statements.append(sentence)
    return statements


def _conditions_grid(rows: Sequence[Row]) -> Grid:
    of_condition: dict[tuple[str, str | None], dict[str, Row]] = {}
    for row in rows:
        of_condition.setdefault((row["condition"], row["tenant"]), {})[row["metric"]] = row
    return Grid(
        caption="Lower medians over the repetitions that count, below them the range. Times: of runs whose times are "
        "valid. Simulated: what an LRU of the capacity, one over all layers, event-atomic, misses in the same passes.",
        head=[
            [Cell("condition", is_text=True), Cell("valid in bytes"), *(Cell(label) for _, label in _SHOWN)],
        ],
        rows=[
            [
                Cell(condition if tenant is None else f"{condition}, tenant {tenant}", is_text=True),
                _runs_cell(metrics),
                *(_value_cell(metrics.get(metric), metric) for metric, _ in _SHOWN),
            ]
            for (condition, tenant), metrics in of_condition.items()
        ],
    )


def _runs_cell(metrics: dict[str, Row]) -> Cell:
    row = next(iter(metrics.values()))
    return Cell(f"{amount(row['valid_runs'])} of {amount(row['runs'])}")


def _value_cell(row: Row | None, metric: str) -> Cell:
    if row is None or row["median_value"] is None:
        return Cell("—")
    text = _text_of(metric)
    low, high = text(row["lowest_value"]), text(row["highest_value"])
    return Cell(text(row["median_value"]), "" if low == high else f"{low} to {high}")


def _text_of(metric: str) -> Callable[[float], str]:
    if metric.endswith("_bytes"):
        return sized
    return _milliseconds if metric.endswith("_ns") else _factor


def _effects_grid(rows: Sequence[Row]) -> Grid:
    shown = [row for row in rows if row["metric"] in _METRICS and row["effect"] is not None]
    return Grid(
        caption="Against the baseline, repetition by repetition: the lower median of the ratios and their range. An "
        "effect inside what either condition does against itself is none.",
        head=[
            [
                Cell("condition", is_text=True),
                Cell("against", is_text=True),
                Cell("of", is_text=True),
                *(Cell(text) for text in ("pairs", "times as much", "against itself", "effect")),
            ]
        ],
        rows=[
            [
                Cell(_named(row), is_text=True),
                Cell(row["baseline"], is_text=True),
                Cell(_METRICS[row["metric"]], is_text=True),
                Cell(amount(row["pairs"])),
                Cell(_factor(row["effect"]), _range(row["effect_low"], row["effect_high"])),
                Cell(_range(row["self_low"], row["self_high"])),
                Cell(_verdict(row)),
            ]
            for row in shown
        ],
        summary=f"Effects: {amount(len(shown))} comparisons",
    )


def _named(row: Row) -> str:
    return str(row["condition"]) if row["tenant"] is None else f"{row['condition']}, tenant {row['tenant']}"


def _verdict(row: Row) -> str:
    if row["outside_spread"] is None:
        return "too few repetitions"
    return percent(row["effect"] - 1) if row["outside_spread"] else "none"


def _range(low: float | None, high: float | None) -> str:
    return "—" if low is None or high is None else f"{_factor(low)} to {_factor(high)}"


def _milliseconds(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:,.3f}\N{NARROW NO-BREAK SPACE}ms"


def _factor(ratio: float) -> str:
    return f"{ratio:.3f}"
