"""The report's section on native replays: what was measured, beside what is simulated for the same passes.

A measured and a simulated number never share a cell, and each says which it is. Runs whose bytes are not valid are
counted with their reasons and enter nothing else.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import polars as pl
from markupsafe import Markup

from pipeline.page import Block, Cell, Grid, Picture, Row, amount, described, percent, plural, sized
from pipeline.plots import PAGE_PLOT_INCHES, Line, LineStyle, Plots, draw_lines, drawing, show_capacities

MAX_QUARANTINED_SHOWN = 20

_OWNER_STYLES: dict[str, LineStyle] = {"page_cache": ("vermillion", "", "D"), "restream": ("green", "", "s")}
_SIMULATED_STYLE: LineStyle = ("blue", "-", "o")


@dataclass(frozen=True)
class NativeRuns:
    """All that the page says about native runs: `warnings` name the quarantined ones and why, `blocks` are one per
    trace, each with a command that makes its last run again.
    """

    summary: str
    warnings: list[str]
    blocks: list[tuple[Block, str]]
    places: list[str]


def native_runs(tables: dict[str, pl.DataFrame], plots: Plots) -> NativeRuns | None:
    """The section for these tables; null where no native run was made but those of labs, which have a section."""
    runs = tables["replay_run"].join(tables["lab_run"], on="run_id", how="anti").sort("started_at", "run_id").to_dicts()
    if not runs:
        return None
    valid = [run for run in runs if run["bytes_valid"]]
    quarantined = [run for run in runs if not run["bytes_valid"]]
    proofs: dict[str, list[Row]] = {}
    for proof in tables["replay_proof"].iter_rows(named=True):
        proofs.setdefault(proof["run_id"], []).append(proof)
    by_trace = _grouped(valid, lambda run: run["trace_id"])
    return NativeRuns(
        summary=_summary(runs, quarantined, proofs),
        warnings=_quarantine(quarantined),
        blocks=[
            (_block(trace_id, of_trace, plots), _command(of_trace[-1]))
            for trace_id, of_trace in sorted(by_trace.items())
        ],
        places=_places(tables, valid),
    )


def _summary(runs: Sequence[Row], quarantined: Sequence[Row], proofs: dict[str, list[Row]]) -> str:
    made = [proof for run in runs for proof in proofs.get(run["run_id"], []) if proof["held"] is not None]
    held = sum(proof["held"] for proof in made)
    return (
        f"{amount(len(runs))} native {plural('run', len(runs))}, {amount(len(quarantined))} of them quarantined. "
        f"{amount(held)} of {amount(len(made))} proofs held."
    )


def _quarantine(quarantined: Sequence[Row]) -> list[str]:
    shown = [
        f"{run['run_id']} ({run['owner']}, {_capacity(run)}, trace {run['trace_id']}): {run['bytes_reasons']}"
        for run in quarantined[:MAX_QUARANTINED_SHOWN]
    ]
    rest = len(quarantined) - len(shown)
    return shown + ([f"and {amount(rest)} more, in the view quarantined_runs"] if rest else [])


def _block(trace_id: str, runs: Sequence[Row], plots: Plots) -> Block:
    conditions = sorted(
        _grouped(runs, lambda run: (run["condition_hash"], run["machine_id"])).values(),
        key=lambda group: (group[0]["owner"], group[0]["mechanism"], group[0]["capacity_bytes"] or 0),
    )
    return Block(
        heading=f"Trace {trace_id}",
        findings=[_finding(group) for group in conditions],
        pictures=_pictures(trace_id, runs, plots),
        grids=[_bytes_grid(conditions), _waits_grid(conditions)],
    )


def _finding(runs: Sequence[Row]) -> str:
    """What one condition read, and whether that is more than the simulated LRU misses in every run of it."""
    run = runs[0]
    of_runs = f"in {amount(len(runs))} runs together " if len(runs) > 1 else ""
    sentence = f"{_condition(run)}: "
    counted = [one for one in runs if one["device_bytes"] is not None]
    if not counted:
        return sentence + "the kernel counts no device bytes of a process here."
    device, demand = (_sum(counted, name) for name in ("device_bytes", "demand_bytes"))
    sentence += f"the device delivered {sized(device)} of {sized(demand)} demanded {of_runs}(measured)"
    compared = [one for one in counted if one["resident_miss_bytes"] is not None]
    if not compared:
        return sentence + "."
    device, missed = (_sum(compared, name) for name in ("device_bytes", "resident_miss_bytes"))
    sentence += f"; an LRU of the measured residency misses {sized(missed)} (simulated)"
    signs = {_sign(one["device_bytes"] - one["resident_miss_bytes"]) for one in compared}
    if signs == {0}:
        return f"{sentence}, just as much."
    if len(signs) > 1:
        return f"{sentence}: no difference beyond the spread of its runs."
    if not missed:
        return f"{sentence}: all of it more than simulated."
    return f"{sentence}: {percent(abs(device - missed) / missed)} {'more' if signs == {1} else 'less'} than simulated."


def _condition(run: Row) -> str:
    limit = "no memory limit" if run["mechanism"] == "none" else run["mechanism_detail"] or run["mechanism"]
    readahead = "" if run["fadvise"] == "random" else ", with readahead"
    first = "" if run["warm_pass"] else ", cold"
    return (
        f"{run['owner']} at {_capacity(run)}, {limit}{readahead}{first}, steps {amount(run['step_begin'])} to "
        f"{amount(run['step_end'] - 1)}"
    )


def _capacity(run: Row) -> str:
    return "no limit" if run["capacity_bytes"] is None else sized(run["capacity_bytes"])


def _bytes_grid(conditions: Sequence[Sequence[Row]]) -> Grid:
    simulated = ("nominal_miss_bytes", "resident_miss_bytes")
    return Grid(
        caption="Runs whose bytes are valid, a condition a row: medians, and below them the range of several runs. "
        "Simulated: what an LRU, one over all layers, event-atomic, misses in the same passes. Ratio: sums of device "
        "bytes ÷ sums of miss bytes.",
        head=[
            [
                Cell(""),
                Cell("measured", span=3),
                Cell("simulated LRU misses", span=2),
                Cell("measured ÷ simulated", span=2),
            ],
            [
                Cell("condition", is_text=True),
                *(Cell(text) for text in ("runs", "resident", "device bytes")),
                *(Cell(text) for text in ("at capacity", "at residency") * 2),
            ],
        ],
        rows=[
            [
                Cell(_condition(runs[0]), f"condition {runs[0]['condition_hash']}", is_text=True),
                Cell(amount(len(runs))),
                *(_median_cell(runs, name, sized) for name in ("resident_median_bytes", "device_bytes", *simulated)),
                *(_ratio_of_sums(runs, "device_bytes", name, _factor, sized) for name in simulated),
            ]
            for runs in conditions
        ],
    )


def _waits_grid(conditions: Sequence[Sequence[Row]]) -> Grid:
    times = ("stall_median_ns", "stall_p99_ns")
    return Grid(
        caption="The same runs, all measured. Hit: every page of the expert was resident right before the read. Stall: "
        "from an event's first read to its last, of runs whose times are valid.",
        head=[
            [
                Cell("condition", is_text=True),
                *(Cell(text) for text in ("memory enforced", "hit rate", "times valid", "stall, median", "stall, p99")),
            ]
        ],
        rows=[
            [
                Cell(_condition(runs[0]), is_text=True),
                _median_cell(runs, "enforced_bytes", sized),
                _ratio_of_sums(runs, "native_hits", "observed_accesses", percent, amount),
                Cell(f"{amount(len(timed))} of {amount(len(runs))}"),
                *(_median_cell(timed, name, _milliseconds) for name in times),
            ]
            for runs in conditions
            for timed in [[run for run in runs if run["time_valid"]]]
        ],
    )


def _median_cell(runs: Sequence[Row], name: str, text: Callable[[float], str]) -> Cell:
    values = [run[name] for run in runs if run[name] is not None]
    if not values:
        return Cell("—")
    low, high = min(values), max(values)
    return Cell(text(median_low(values)), "" if low == high else f"{text(low)} to {text(high)}")


def _ratio_of_sums(
    runs: Sequence[Row], numerator: str, denominator: str, text: Callable[[float], str], part: Callable[[float], str]
) -> Cell:
    known = [run for run in runs if run[numerator] is not None and run[denominator] is not None]
    above, below = _sum(known, numerator), _sum(known, denominator)
    return Cell(text(above / below), f"{part(above)} / {part(below)}") if below else Cell("—")


def _pictures(trace_id: str, runs: Sequence[Row], plots: Plots) -> list[Picture]:
    drawn: list[Markup] = []
    legend: list[Line] = []
    windows: list[str] = []
    by_window = _grouped(runs, lambda run: (run["step_begin"], run["step_end"], run["warm_pass"], run["access_order"]))
    for (begin, end, warm_pass, _), of_window in sorted(by_window.items()):
        lines = [_simulated_line(of_window), *_measured_points(of_window)]
        lines = [line for line in lines if line.x]
        capacities = sorted({round(x) for line in lines for x in line.x})
        if len(capacities) < 2:
            continue
        window = f"steps {amount(begin)} to {amount(end - 1)}, {'after a warm pass' if warm_pass else 'cold'}"
        with drawing(PAGE_PLOT_INCHES) as (figure, axes):
            draw_lines(axes, lines)
            axes.set_ylim(0, max(1.0, *(1.05 * y for line in lines for y in line.y)))
            show_capacities(axes, capacities, name=sized, label="memory for experts")
            axes.set_title(window)
            axes.set_ylabel("bytes ÷ demand bytes")
            drawn.append(plots.svg(figure, f"Device bytes by memory, {window}", described(lines, "at the most memory")))
        legend = lines if len(lines) > len(legend) else legend
        windows.append(window)
    caption = (
        f"Trace {trace_id}, {'; '.join(windows)}. Points are measured: device bytes ÷ demand bytes, at the measured "
        "residency. The line is simulated: what an LRU (one over all layers, event-atomic, the same passes) misses ÷ "
        "demand bytes, at the capacities and residencies of these runs."
    )
    return [Picture(drawn, legend, caption)] if drawn else []


def _simulated_line(runs: Sequence[Row]) -> Line:
    points = {
        (run[capacity], run[missed] / run["demand_bytes"])
        for run in runs
        for capacity, missed in (
            ("capacity_bytes", "nominal_miss_bytes"),
            ("resident_median_bytes", "resident_miss_bytes"),
        )
        if run[capacity] is not None and run[missed] is not None and run["demand_bytes"]
    }
    ordered = sorted(points)
    return Line("LRU, simulated", _SIMULATED_STYLE, [x for x, _ in ordered], [y for _, y in ordered])


def _measured_points(runs: Sequence[Row]) -> list[Line]:
    lines = []
    for owner, of_owner in sorted(_grouped(runs, lambda run: run["owner"]).items()):
        points = sorted(
            (place, run["device_bytes"] / run["demand_bytes"])
            for run in of_owner
            for place in [_place(run)]
            if place is not None and run["device_bytes"] is not None and run["demand_bytes"]
        )
        style = _OWNER_STYLES.get(owner, ("purple", "", "^"))
        lines.append(Line(f"{owner}, measured", style, [x for x, _ in points], [y for _, y in points]))
    return lines


def _place(run: Row) -> int | None:
    """Where a run stands on the axis of memory: what it had of the pool in memory; its capacity if it keeps nothing."""
    place: int | None = run["capacity_bytes" if run["owner"] == "restream" else "resident_median_bytes"]
    return place


def _places(tables: dict[str, pl.DataFrame], runs: Sequence[Row]) -> list[str]:
    """A line on each machine and pool that a valid run was measured with."""
    pools, machines = ({run[name] for run in runs} for name in ("pool_id", "machine_id"))
    lines = [_machine(row) for row in tables["machine"].sort("machine_id").to_dicts() if row["machine_id"] in machines]
    return lines + [_pool(row) for row in tables["pool"].sort("pool_id").to_dicts() if row["pool_id"] in pools]


def _machine(row: Row) -> str:
    device = row["block_device"] or "no block device"
    return (
        f"{row['machine_id']}: {row['architecture']}, {amount(row['cpus'])} "
        f"{'processor' if row['cpus'] == 1 else 'processors'} ({row['cpu_model'] or 'unnamed'}), "
        f"{sized(row['memory_bytes'])} of memory in pages of {amount(row['page_bytes'])} bytes, kernel "
        f"{row['kernel_release']} ({row['virtualization']}), MGLRU {row['mglru']}, DAMON {row['damon']}, pool on "
        f"{row['filesystem'] or 'an unknown file system'} on {device}"
    )


def _pool(row: Row) -> str:
    place = "packed" if row["alignment_bytes"] == 1 else f"aligned to {amount(row['alignment_bytes'])} bytes"
    return (
        f"{row['pool_id']}: {amount(row['pool_experts'])} experts of {amount(row['moe_layers'])} layers, "
        f"{sized(row['pool_bytes'])} in {amount(row['files'])} {plural('file', row['files'])}, "
        f"{row['layout'].replace('_', '-')}, {place}, {row['content'] or 'of a checkpoint'}"
    )


def _command(run: Row) -> str:
    asked = ["--owner", run["owner"], "--mechanism", run["mechanism"]]
    # A booted machine has the size it has.
    unsized = run["capacity_bytes"] is None or run["mechanism"] == "boot"
    asked += [] if unsized else ["--capacity", str(run["capacity_bytes"])]
    asked += ["--offline-memory-blocks"] if run["mechanism"] == "offline" else []
    asked += [] if run["fadvise"] == "random" else ["--fadvise", run["fadvise"]]
    asked += [] if run["warm_pass"] else ["--cold"]
    asked += ["--device", run["destination"], "--steps", f"{run['step_begin']}:{run['step_end']}"]
    trace = shlex.quote(f"data/traces/{run['trace_id']}.parquet")
    return f"replayer replay {trace} --pool POOL {' '.join(asked)} --data data && expert-tier run"


def _grouped(runs: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _sum(runs: Iterable[Row], name: str) -> int:
    return sum(run[name] for run in runs)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _milliseconds(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:,.3f}\N{NARROW NO-BREAK SPACE}ms"


def _factor(ratio: float) -> str:
    return f"{ratio:.3f}"
