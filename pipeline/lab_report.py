"""The report's section on labs: a matrix of conditions with their spreads, and mechanisms against each other.

It shows the view `lab_matrix`; capacities that were asked for come from the lab's own definition, since a guest that is
small by its boot was asked for none.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby

import polars as pl

from pipeline.page import Block, Cell, Grid, Row, amount, listed, percent, plural, points, sized
from replayer.lab import CALIBRATED_WITHIN, asked_bytes

VIEWS = ("lab_matrix",)
"""What the section is made of."""

LEAST_RUNS = 5
"""Below so many repetitions a condition is shown, and compared with none."""

AGREEMENT = 0.1
"""Two ways of limiting memory agree if what they read is within this share of each other."""


def lab_blocks(tables: Mapping[str, pl.DataFrame]) -> list[Block]:
    """A block per lab, by id; empty without the view, or labs."""
    if not all(name in tables for name in VIEWS) or not tables["lab"].height:
        return []
    rows: dict[str, list[Row]] = {}
    for row in tables["lab_matrix"].iter_rows(named=True):
        rows.setdefault(row["lab_id"], []).append(row)
    labs = tables["lab"].sort("lab_id").to_dicts()
    return [_block(lab, rows[lab["lab_id"]]) for lab in labs if lab["lab_id"] in rows]


def _asked(lab: Row) -> dict[str, int | None]:
    """The capacity of each condition; empty where the definition does not say it."""
    try:
        return asked_bytes(lab["definition"])
    except ValueError:
        return {}


def _settings(lab: Row) -> dict[str, str]:
    """All that each condition asks for but MGLRU, by label: what two conditions must share to be held against it."""
    if not _asked(lab):
        return {}
    return {
        one["label"]: json.dumps({key: value for key, value in one.items() if key not in ("label", "mglru")})
        for one in json.loads(lab["definition"])["conditions"]
    }


def _in_order(rows: Sequence[Row], asked: Mapping[str, int | None], settings: Mapping[str, str]) -> list[Row]:
    """The rows with the capacity and setting that their condition asks for, smallest first, in its order."""
    place = {label: number for number, label in enumerate(asked)}
    with_capacity = [
        {**row, "asked_bytes": asked.get(row["condition"]), "setting": settings.get(row["condition"])} for row in rows
    ]
    return sorted(with_capacity, key=lambda row: (row["asked_bytes"] or 0, place.get(row["condition"], 0)))


def _block(lab: Row, unordered: Sequence[Row]) -> Block:
    capacities = _asked(lab)
    rows = _in_order(unordered, capacities, _settings(lab))
    state = "" if lab["finished"] else ", not finished"
    asked = (
        f"{lab['asks']} {amount(lab['conditions'])} {plural('condition', lab['conditions'])}, "
        f"{amount(lab['repetitions'])} repetitions of each{state}, in an order drawn with seed {lab['order_seed']}."
    )
    findings = [asked, *_places(rows), *_off_target(rows)]
    strange = list(dict.fromkeys(row["condition"] for row in rows if row["condition"] not in capacities))
    if strange:
        findings.append(
            f"What was asked for is not known of {amount(len(strange))} {plural('condition', len(strange))}, first "
            f"{strange[0]}: the lab's definition does not say it, so nothing is held against them. Remove the lab's "
            "results and add them again."
        )
    for _, of_capacity in groupby(rows, key=lambda row: row["asked_bytes"]):
        members = [
            row
            for row in of_capacity
            if row["condition"] in capacities and row["valid_runs"] >= LEAST_RUNS and row["amplification_resident"]
        ]
        findings += [*_agreement(members), *_against_classic(members)]
    return Block(
        heading=f"Lab {lab['lab']} ({lab['lab_id']})",
        findings=findings,
        pictures=[],
        grids=[_grid(rows)],
    )


def _places(rows: Sequence[Row]) -> list[str]:
    guests = sorted({
        f"{sized(row['guest_memory_bytes'])}, kernel {row['kernel_release']}, "
        f"{'emulated' if row['accelerator'] == 'tcg' else 'on KVM'}"
        for row in rows
        if row["place"] == "guest"
    })  # fmt: skip
    hosts = sorted({f"kernel {row['kernel_release']}" for row in rows if row["place"] == "host"})
    parts = [f"guests of {' and of '.join(guests)}"] if guests else []
    parts += [f"the host with {' and '.join(hosts)}"] if hosts else []
    return [f"Run in {listed(parts)}. Bytes are its result; a guest's times say nothing."]


def _off_target(rows: Sequence[Row]) -> list[str]:
    """Which conditions kept another number of bytes than they were asked to."""
    missed = [
        f"{row['condition']} keeps {sized(row['resident_bytes'])} of {sized(row['asked_bytes'])} "
        f"({points(row['resident_bytes'] / row['asked_bytes'] - 1)}\N{NARROW NO-BREAK SPACE}%)"
        for row in rows
        if row["asked_bytes"]
        and row["resident_bytes"] is not None
        and abs(row["resident_bytes"] - row["asked_bytes"]) > CALIBRATED_WITHIN * row["asked_bytes"]
    ]
    if not missed:
        return []
    return [
        f"Further than {percent(float(CALIBRATED_WITHIN))} from the capacity asked for: {listed(missed)}. Comparisons "
        "go by the residency that was measured."
    ]


def _agreement(rows: Sequence[Row]) -> list[str]:
    """What the ways of limiting memory read against each other under the classic lists, at one capacity."""
    classic = [row for row in rows if not _has_mglru(row)]
    if len(classic) < 2:
        return []
    least, most = (choose(classic, key=lambda row: row["amplification_resident"]) for choose in (min, max))
    ratio = most["amplification_resident"] / least["amplification_resident"]
    verdict = "agree within a tenth" if ratio - 1 <= AGREEMENT else "do not agree within a tenth"
    return [
        f"Asked for {sized(rows[0]['asked_bytes'])}, {amount(len(classic))} ways of limiting memory without MGLRU "
        f"{verdict}: per byte that an LRU of the measured residency misses, they read from "
        f"{least['amplification_resident']:.3f} ({least['condition']}) to {most['amplification_resident']:.3f} "
        f"({most['condition']}), {ratio:.3f} times as much."
    ]


def _against_classic(rows: Sequence[Row]) -> list[str]:
    """MGLRU against the classic lists in the same guest, by the same mechanism, at one capacity."""
    sentences = []
    for row in rows:
        if not _has_mglru(row):
            continue
        alike = ("place", "mechanism", "owner", "guest_memory_bytes", "kernel_release", "setting")
        # What else a condition is called by: its threads, its readahead.
        label = row["condition"]
        name = label.removesuffix(", MGLRU on") if label.endswith(", MGLRU on") else row["mechanism"]
        for other in rows:
            if _has_mglru(other) or any(row[key] != other[key] for key in alike):
                continue
            ratio = row["amplification_resident"] / other["amplification_resident"]
            apart = (
                row["amplification_low"] > other["amplification_high"]
                or row["amplification_high"] < other["amplification_low"]
            )
            sentences.append(
                f"{name} at {sized(row['asked_bytes'])}: with MGLRU {ratio:.3f} times what the classic "
                f"lists read, each per byte that an LRU of its own residency misses "
                f"({_range(row)} against {_range(other)}); "
                + ("the ranges are apart." if apart else "inside the spread, so no effect is claimed.")
            )
    return sentences


def _has_mglru(row: Row) -> bool:
    return str(row["mglru"]).startswith("on")


def _range(row: Row) -> str:
    return f"{row['amplification_low']:.3f} to {row['amplification_high']:.3f}"


def _grid(rows: Sequence[Row]) -> Grid:
    return Grid(
        caption="Measured: lower medians over the repetitions that count, below them the range. ÷ simulated LRU: "
        "device bytes ÷ what an LRU of the run's measured residency misses, event-atomic, in the same passes.",
        head=[
            [
                Cell("condition", is_text=True),
                Cell("MGLRU", is_text=True),
                *(Cell(text) for text in ("asked for", "valid runs", "boots", "mem=", "resident", "locked")),
                *(Cell(text) for text in ("device bytes", "÷ simulated LRU")),
            ]
        ],
        rows=[
            [
                Cell(row["condition"], f"kernel {row['kernel_release']}, {row['virtualization']}", is_text=True),
                Cell(row["mglru"], is_text=True),
                Cell(sized(row["asked_bytes"])),
                Cell(f"{amount(row['valid_runs'])} of {amount(row['runs'])}"),
                Cell(amount(row["boots"]) if row["place"] == "guest" else "—"),
                Cell("—" if row["boot_limit_bytes"] is None else sized(row["boot_limit_bytes"])),
                _sizes(row, "resident"),
                Cell(percent(row["locked_share"])),
                _sizes(row, "device"),
                _amplification(row),
            ]
            for row in rows
        ],
    )


def _sizes(row: Row, name: str) -> Cell:
    if row[f"{name}_bytes"] is None:
        return Cell("—")
    low, high = sized(row[f"{name}_low_bytes"]), sized(row[f"{name}_high_bytes"])
    return Cell(sized(row[f"{name}_bytes"]), "" if low == high else f"{low} to {high}")


def _amplification(row: Row) -> Cell:
    if row["amplification_resident"] is None:
        return Cell("—")
    return Cell(f"{row['amplification_resident']:.3f}", _range(row))
