"""The report's section on reclaim: mechanisms held against each other, and MGLRU against the classic lists.

It shows the views `mechanism_agreement` and `reclaim_knee`, which say how medians, residencies and comparisons are
made; nothing is computed here but how many of the rows say what.
"""

from collections.abc import Mapping, Sequence

import polars as pl

from pipeline.page import Block, Cell, Grid, Row, amount, percent, plural, sized

VIEWS = ("mechanism_agreement", "reclaim_knee")
"""What the section is made of."""

MAX_SENTENCES = 5


def reclaim_blocks(tables: Mapping[str, pl.DataFrame]) -> list[Block]:
    """A block per trace whose native runs had their reclaim counted; empty without those views, or runs."""
    if not all(name in tables for name in VIEWS):
        return []
    agreement, knee = (_by_trace(tables[name]) for name in VIEWS)
    return [
        Block(
            heading=f"Trace {trace_id}",
            findings=[
                *_agreement_findings(conditions, agreement.get(trace_id, [])),
                *_knee_findings(conditions),
                _scan_finding(conditions),
            ],
            pictures=[],
            grids=[
                _conditions_grid(conditions),
                *([_pairs_grid(agreement[trace_id])] if trace_id in agreement else []),
            ],
        )
        for trace_id, conditions in sorted(knee.items())
    ]


def _by_trace(frame: pl.DataFrame) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for row in frame.iter_rows(named=True):
        rows.setdefault(row["trace_id"], []).append(row)
    return rows


def _agreement_findings(conditions: Sequence[Row], pairs: Sequence[Row]) -> list[str]:
    if len({one["limited_by"] for one in conditions}) < 2:
        return ["One mechanism alone limited memory here, so it is held against no other."]
    matched = [pair for pair in pairs if pair["matched_by"] is not None]
    if not matched:
        return [
            "No two mechanisms left as much of the pool resident with the same reclaim, so none is held against one."
        ]
    told = [pair for pair in matched if pair["is_repeated_enough"]]
    apart = sorted(
        (pair for pair in told if not pair["agrees_within_tenth"]), key=lambda pair: -abs(pair["device_over_other"] - 1)
    )
    few = len(matched) - len(told)
    sentences = [
        f"At equal measured residency {amount(len(told) - len(apart))} of {amount(len(told))} comparisons of two "
        "mechanisms agree within 10\N{NARROW NO-BREAK SPACE}%"
        + (f"; {amount(few)} more have fewer than five repetitions and count for nothing." if few else ".")
    ]
    sentences += [_apart(pair) for pair in apart[:MAX_SENTENCES]]
    rest = len(apart) - MAX_SENTENCES
    return sentences + ([f"And {amount(rest)} more that do not agree, in the table."] if rest > 0 else [])


def _apart(pair: Row) -> str:
    difference = pair["device_over_other"] - 1
    sentence = (
        f"{_named(pair)} with {sized(pair['resident_bytes'])} resident reads {percent(abs(difference))} "
        f"{'more' if difference > 0 else 'less'} than {pair['other_limited_by']}"
    )
    simulated = pair["amplification_over_nearest"]
    if simulated is None:
        return f"{sentence}."
    if abs(simulated - 1) <= 0.1:
        return (
            f"{sentence}, but each reads as much as the other per byte that an LRU of its own residency misses "
            f"({simulated:.2f}): the curve is steep there."
        )
    return f"{sentence}, and {simulated:.2f} times as much per byte that an LRU of its own residency misses."


def _knee_findings(conditions: Sequence[Row]) -> list[str]:
    with_mglru = [one for one in conditions if one["is_mglru"]]
    if not with_mglru:
        states = sorted({one["mglru"] for one in conditions})
        return [f"No run was made with MGLRU on (its state: {', '.join(states)}), so nothing is said of it."]
    compared = [one for one in with_mglru if one["device_over_classic"] is not None]
    if not compared:
        return ["MGLRU was on, and no run of the classic lists by the same mechanism left as much resident."]
    ordered = sorted(compared, key=lambda one: -one["device_over_classic"])
    return [
        f"With MGLRU {_named(one)} at {sized(one['resident_bytes'])} resident reads {one['device_over_classic']:.2f} "
        f"times what the classic lists do{_locked(one)}{_scans(one)}."
        for one in ordered[:MAX_SENTENCES]
    ]


def _locked(one: Row) -> str:
    return "" if one["locked_share"] is None else f", {percent(one['locked_share'])} of the memory locked"


def _scans(one: Row) -> str:
    return "" if one["scan_per_steal"] is None else f", {one['scan_per_steal']:.1f} pages scanned a page reclaimed"


def _scan_finding(conditions: Sequence[Row]) -> str:
    counted = [one for one in conditions if one["scans_above_2"] is not None]
    if not counted:
        return "No counter told how many pages were scanned for each page reclaimed."
    flagged = [one for one in counted if one["scans_above_2"]]
    return (
        f"In {amount(len(flagged))} of {amount(len(counted))} {plural('condition', len(counted))} more than 2 pages "
        "were scanned for each page reclaimed, the study's mark of reclaim that amplifies."
    )


def _named(row: Row) -> str:
    read = ", statistics read after each step" if row["group_stat"] == "step" else ""
    return f"{row['owner']} at {sized(row['capacity_bytes'])}, {row['limited_by']}{read}"


def _conditions_grid(rows: Sequence[Row]) -> Grid:
    return Grid(
        caption="Measured: lower medians over valid runs, below them the range. Scanned per reclaimed: sums over runs, "
        "of the run's group where that counts it, else of all files of the machine. Against classic: device bytes with "
        "MGLRU ÷ those of the classic lists by the same mechanism and kernel, at equal measured residency.",
        head=[
            [
                Cell("condition", is_text=True),
                Cell("MGLRU", is_text=True),
                *(Cell(text) for text in ("runs", "resident", "locked", "device bytes", "spread", "÷ simulated LRU")),
                *(Cell(text) for text in ("scanned per reclaimed", "against classic")),
            ]
        ],
        rows=[
            [
                Cell(_named(row), f"kernel {row['kernel_release']}, {row['virtualization']}", is_text=True),
                Cell(row["mglru"], is_text=True),
                Cell(amount(row["valid_runs"])),
                _ranged(row, "resident"),
                Cell(percent(row["locked_share"])),
                _ranged(row, "device"),
                Cell(percent(row["relative_spread"])),
                Cell(_factor(row["amplification_resident"])),
                _scans_cell(row),
                Cell(_factor(row["device_over_classic"]), row["matched_by"] or ""),
            ]
            for row in rows
        ],
    )


def _scans_cell(row: Row) -> Cell:
    if row["scan_per_steal"] is None:
        return Cell("—")
    above = ", above 2" if row["scans_above_2"] else ""
    counts = f"{amount(row['scan_pages'])} / {amount(row['steal_pages'])} pages, {row['scan_counter']}"
    return Cell(f"{row['scan_per_steal']:.2f}{above}", counts)


def _ranged(row: Row, name: str) -> Cell:
    low, high = sized(row[f"{name}_low_bytes"]), sized(row[f"{name}_high_bytes"])
    return Cell(sized(row[f"{name}_bytes"]), "" if low == high else f"{low} to {high}")


def _pairs_grid(rows: Sequence[Row]) -> Grid:
    return Grid(
        caption="Each condition against every other mechanism with the same reclaim, at equal measured residency: from "
        "the other's own condition where it has one, else on the line between the two around it; — where it has none "
        "near. Per simulated miss: device bytes ÷ what an LRU of the own residency misses, of both.",
        head=[
            [
                Cell("condition", is_text=True),
                Cell("against", is_text=True),
                *(Cell(text) for text in ("resident", "device bytes", "the other's", "ratio", "per simulated miss")),
                Cell("within a tenth"),
            ]
        ],
        rows=[
            [
                Cell(_named(row), f"MGLRU {row['mglru']}", is_text=True),
                Cell(row["other_limited_by"], f"kernel {row['other_kernel_release']}", is_text=True),
                _ranged(row, "resident"),
                _ranged(row, "device"),
                Cell("—") if row["matched_by"] is None else Cell(sized(row["other_device_bytes"]), row["matched_by"]),
                Cell(_factor(row["device_over_other"])),
                Cell(_factor(row["amplification_over_nearest"])),
                Cell(_verdict(row)),
            ]
            for row in rows
        ],
        summary=f"Mechanisms against each other: {amount(len(rows))} comparisons",
    )


def _verdict(row: Row) -> str:
    if row["matched_by"] is None:
        return "—"
    if not row["is_repeated_enough"]:
        return "too few repetitions"
    return "yes" if row["agrees_within_tenth"] else "no"


def _factor(ratio: float | None) -> str:
    return "—" if ratio is None else f"{ratio:.3f}"
