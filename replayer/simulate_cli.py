"""The commands `replayer simulate`, `curve` and `sweep`: arguments in, tables or one JSON document out."""

import argparse
import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from replayer import streams, sweep
from replayer.command import Parser, byte_size, choice, count, fraction, listed, steps
from replayer.disclosure import position_bands, reporting_block, reporting_text
from replayer.hit_curves import cycle_floor, lru_curve, static_curve
from replayer.quantities import format_bytes
from replayer.simulate import (
    Capacity,
    Choices,
    Outcome,
    Replay,
    UnusableRequest,
    Window,
    layer_rows,
    outcomes,
    phase_rows,
    prepare,
    shuffled_replay,
    step_rows,
    with_intervals,
    with_nulls,
)
from replayer.trace import MalformedTrace, Trace, TraceFile, open_or_read, read_trace
from schemas.columns import ACCESS_ORDERS, DEDUPS, POLICIES, SCOPES, SCORED_PHASES, SEMANTICS
from schemas.files import DataFolder, publish
from schemas.tables import TABLES

_SIMULATE_EPILOG = """\
examples:
  replayer simulate data/traces/ID.parquet --policy lru,belady_bypass --capacity-experts 8,17,32
  replayer simulate data/traces/ID.parquet --policy lru --scope global --capacity 64GiB --expert-bytes 17547264
  replayer simulate data/traces/ID.parquet --policy lru,static --fit first:0.6 --warm-fraction 0.6 \\
      --semantics event_atomic,sequential --capacity-experts 32 --intervals --nulls --json
  replayer simulate A.parquet --merge B.parquet C.parquet --policy lru --capacity-experts 32
  replayer simulate A.parquet --switch B.parquet --policy lru,static --fit first:0.3 --capacity-experts 32
  replayer simulate A.parquet --policy lru --admit first:0.6:top:48 --warm-fraction 0.6 --capacity-experts 32

What is scored: by default every step, of phase decode where the trace has decode rows. A policy warms up inside the
replay; --warm-fraction leaves the first steps unscored, --warm-pass replays everything once before it counts.
"""
_CURVE_EPILOG = """\
example:
  replayer curve data/traces/ID.parquet --scope global --semantics event_atomic,sequential --json

One pass gives LRU at every capacity. Below the floor a global LRU finds nothing at all: it is marked.
"""
_SWEEP_EPILOG = """\
example:
  replayer sweep data/traces/*.parquet --policy lru,sieve,belady_bypass --scope layer,global \\
      --capacity-experts 8,16,32,64 --seeds 0,1,2 --data data

Cells that the data folder already holds, by the hash of all they are computed from, are skipped.
"""
_BREAKDOWNS = ("layer", "phase", "step")


def add_simulate_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds `simulate`, `curve` and `sweep` to the subparsers of a command line."""
    command = _command(
        commands,
        "simulate",
        "hit rates of cache policies on a trace",
        "Simulates expert caches on a canonical trace: exact hit and miss counts, with their contract.",
        _SIMULATE_EPILOG,
    )
    command.add_argument("trace", type=Path, metavar="TRACE", help="a canonical trace, data/traces/ID.parquet")
    mixed = command.add_mutually_exclusive_group()
    mixed.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="batch: merge these streams step by step, cut to the shortest",
    )
    mixed.add_argument(
        "--switch", type=Path, metavar="TRACE", help="after the trace comes this one: a change of domain"
    )
    mixed.add_argument(
        "--interleave", type=Path, nargs="+", metavar="TRACE", help="steps of the traces in turn: tenants of one cache"
    )
    _add_policies(command, scopes=False)
    _add_choices(command)
    _add_window(command)
    command.add_argument("--seed", type=count, default=0, help="of order random, policy random, nulls and intervals")
    command.add_argument("--intervals", action="store_true", help="95 %% intervals, by block bootstrap over steps")
    command.add_argument(
        "--against", choices=POLICIES, default="lru", help="policy that differences are taken to (default lru)"
    )
    command.add_argument("--nulls", action="store_true", help="the same with the tokens shuffled, beside each result")
    command.add_argument(
        "--by",
        type=listed(choice(_BREAKDOWNS)),
        default=[],
        metavar="B[,B]",
        help="also by layer, phase or step (JSON)",
    )
    command.add_argument(
        "--reporting-block", action="store_true", help="print the reporting block of arXiv 2608.07911 with the results"
    )
    _add_output(command)
    command.set_defaults(run=_simulate)

    command = _command(
        commands, "curve", "hits at every capacity, in one pass", "The whole curve of LRU and of a static table.",
        _CURVE_EPILOG,
    )  # fmt: skip
    command.add_argument("trace", type=Path, metavar="TRACE", help="a canonical trace, data/traces/ID.parquet")
    command.add_argument("--scope", choices=SCOPES, default="layer", help="a cache per layer (default) or one over all")
    command.add_argument("--semantics", type=listed(choice(SEMANTICS[:2])), default=["event_atomic"], metavar="S[,S]")
    command.add_argument("--fit", default="same", metavar="FIT", help="of the static curve: same (default), first:F, …")
    _add_window(command)
    command.add_argument("--seed", type=count, default=0, help="seed of --order random")
    _add_output(command)
    command.set_defaults(run=_curve)

    command = _command(
        commands, "sweep", "many cells, resumable", "Simulates every combination and keeps the rows in a data folder.",
        _SWEEP_EPILOG,
    )  # fmt: skip
    command.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="canonical traces")
    _add_policies(command, scopes=True)
    _add_choices(command)
    _add_window(command)
    command.add_argument("--seeds", type=listed(count), default=[0], metavar="N[,N…]", help="of random order or policy")
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="keep rows in DIR/results/sweep")
    _add_output(command)
    command.set_defaults(run=_sweep)


def _command(
    commands: "argparse._SubParsersAction[Parser]", name: str, summary: str, description: str, epilog: str
) -> Parser:
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_policies(command: Parser, *, scopes: bool) -> None:
    command.add_argument(
        "--policy",
        type=listed(choice(POLICIES)),
        default=["lru"],
        metavar="P[,P…]",
        help=f"of {', '.join(POLICIES)} (default lru)",
    )
    if scopes:
        command.add_argument(
            "--scope", type=listed(choice(SCOPES)), default=["layer"], metavar="S[,S]", help="layer (default), global"
        )
    else:
        command.add_argument(
            "--scope", choices=SCOPES, default="layer", help="a cache per layer (default) or one over all"
        )
    command.add_argument(
        "--semantics",
        type=listed(choice(SEMANTICS)),
        default=["event_atomic"],
        metavar="S[,S]",
        help="event_atomic (default): an event is looked up as a whole before anything is evicted; sequential; "
        "token_clock (lru alone)",
    )
    size = command.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--capacity-experts",
        type=listed(count),
        metavar="N[,N…]",
        help="experts per layer" if scopes else "experts per layer in scope layer, in all in scope global",
    )
    size.add_argument(
        "--capacity", type=listed(byte_size), metavar="B[,B…]", help="bytes over all layers, for example 64GiB or 256GB"
    )
    command.add_argument(
        "--expert-bytes", type=byte_size, metavar="B", help="size of every expert, if the trace has none"
    )


def _add_choices(command: Parser) -> None:
    command.add_argument(
        "--fit",
        default="same",
        metavar="FIT",
        help="of static and pinned tables: same (default), first:F, TRACE or TRACE:first:F",
    )
    command.add_argument(
        "--pinned-fraction", type=fraction, default=Fraction(1, 2), metavar="F", help="share that pinned_lru pins (0.5)"
    )
    command.add_argument(
        "--admit", metavar="TABLE", help="what may enter: FIT:top:N, or a .parquet or .csv of layer_id, expert_id"
    )
    command.add_argument(
        "--quota-fit", metavar="FIT", help="split the capacity over layers by LRU curves of this fit (scope layer)"
    )
    command.add_argument(
        "--folios-per-expert", type=count, default=1, metavar="N", help="granularity of two_list and mglru (1)"
    )


def _add_window(command: Parser) -> None:
    command.add_argument("--order", choices=ACCESS_ORDERS, help="order inside an event (default: as the dump has it)")
    command.add_argument(
        "--dedup", choices=DEDUPS, default="union", help="union (default): an event asks for each expert once"
    )
    command.add_argument("--steps", type=steps, default=(None, None), metavar="A:B", help="steps to replay, half-open")
    command.add_argument("--phase", choices=SCORED_PHASES, help="phase to score (default: decode if there is any)")
    command.add_argument(
        "--warm-fraction", type=fraction, default=fraction("0"), metavar="F", help="unscored first part"
    )
    command.add_argument("--warm-pass", action="store_true", help="replay once unscored, then score a second pass")


def _add_output(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _window(arguments: argparse.Namespace) -> Window:
    return Window(arguments.steps, arguments.phase, arguments.warm_fraction, arguments.warm_pass)


def _capacities(arguments: argparse.Namespace) -> list[Capacity]:
    if arguments.capacity is not None:
        return [Capacity(bytes=size) for size in arguments.capacity]
    return [Capacity(experts=number) for number in arguments.capacity_experts]


def _choices(arguments: argparse.Namespace) -> Choices:
    if arguments.folios_per_expert < 1:
        raise UnusableRequest("--folios-per-expert 0, wanted at least 1")
    return Choices(
        arguments.fit, arguments.pinned_fraction, arguments.admit, arguments.quota_fit, arguments.folios_per_expert
    )


def _simulate(arguments: argparse.Namespace) -> int:
    trace, source_of_step = _traces(arguments)
    choices, capacities = _choices(arguments), _capacities(arguments)
    replay = prepare(trace, _window(arguments), order=arguments.order, dedup=arguments.dedup, seed=arguments.seed)

    def decided(one: Replay) -> list[Outcome]:
        return outcomes(
            one,
            names=arguments.policy,
            scope=arguments.scope,
            semantics=arguments.semantics,
            capacities=capacities,
            expert_bytes=arguments.expert_bytes,
            choices=choices,
        )

    found = decided(replay)
    if arguments.intervals:
        found = with_intervals(replay, found, arguments.against, arguments.seed)
    if arguments.nulls:
        without_order = shuffled_replay(replay, arguments.seed)
        found = with_nulls(found, without_order, decided(without_order))
    document: dict[str, Any] = {
        "trace_id": trace.metadata.trace_id,
        "results": [{**one.row, **_breakdown(replay, one, arguments.by)} for one in found],
    }
    floor = cycle_floor(replay) if arguments.scope == "global" else None
    if floor is not None:
        document["cycle_floor_experts"] = floor
        # Under dedup none an event hits its own repeats, sequentially; a token clock is no recency stack.
        if "event_atomic" in arguments.semantics or (replay.dedup == "union" and "sequential" in arguments.semantics):
            _warn_under_floor(floor, capacities, arguments.policy)
    if arguments.merge:
        document["batch"] = _batch(arguments, replay, found, decided)
    if arguments.switch:
        document["recovery"] = _recovery(arguments, replay, found, source_of_step, decided)
    if arguments.reporting_block:
        bands = position_bands(replay.survey.step_accesses, found[0].step_hits)
        document["reporting_block"] = reporting_block(
            trace.metadata,
            [one.row for one in found],
            unions=replay.survey.unions,
            expert_bytes=arguments.expert_bytes,
            bands=(found[0].row["policy"], bands),
        )
    if arguments.json:
        print(json.dumps(document))
    else:
        _print_results(trace.metadata.trace_id, document)
    return 0


def _traces(arguments: argparse.Namespace) -> tuple[Trace | TraceFile, Any]:
    """(the trace to simulate, which trace each of its steps comes from or null)."""
    if arguments.merge:
        return streams.merged([read_trace(path) for path in (arguments.trace, *arguments.merge)]), None
    if arguments.switch:
        mixture = streams.switched(read_trace(arguments.trace), read_trace(arguments.switch))
        return mixture.trace, mixture.source_of_step
    if arguments.interleave:
        mixture = streams.interleaved([read_trace(path) for path in (arguments.trace, *arguments.interleave)])
        return mixture.trace, mixture.source_of_step
    # Only what is in memory can be shuffled.
    return read_trace(arguments.trace) if arguments.nulls else open_or_read(arguments.trace), None


def _breakdown(replay: Replay, one: Outcome, wanted: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "layer" in wanted:
        measures = ("layer_id", *TABLES["hit_rate_layer"].measures)
        found["by_layer"] = [{name: row[name] for name in measures} for row in layer_rows(replay, one)]
    if "phase" in wanted:
        found["by_phase"] = phase_rows(one)
    if "step" in wanted:
        found["by_step"] = step_rows(replay, one)
    return found


def _warn_under_floor(floor: int, capacities: Sequence[Capacity], names: Sequence[str]) -> None:
    under = [one.experts for one in capacities if one.experts is not None and one.experts <= floor]
    if under and "lru" in names:
        print(
            f"replayer: a global LRU of {', '.join(map(str, under))} experts is under the cycle of {floor} that lies "
            "between two visits of a layer: it can find nothing, whatever the text",
            file=sys.stderr,
        )


def _batch(arguments: argparse.Namespace, replay: Replay, found: Sequence[Outcome], decided: Any) -> dict[str, Any]:
    """What merging changes: fewer accesses than the streams make alone, and more or fewer misses per token."""
    window = Window((replay.step_begin, replay.step_end), replay.phase, arguments.warm_fraction, arguments.warm_pass)
    alone = []
    for path in (arguments.trace, *arguments.merge):
        one = prepare(read_trace(path), window, order=replay.order, dedup=arguments.dedup, seed=arguments.seed)
        alone.append((one, decided(one)))
    accesses = [one.num_scored for one, _ in alone]
    tokens = len(alone) * int((replay.survey.step_accesses > 0).sum())
    return {
        "streams": [one.trace.metadata.trace_id for one, _ in alone],
        "stream_accesses": accesses,
        "merged_accesses": replay.num_scored,
        "dedup_factor": streams.dedup_factor(accesses, replay.num_scored),
        "results": [
            {
                **{name: merged.row[name] for name in _POINT},
                "stream_misses": [outs[number].row["misses"] for _, outs in alone],
                "merged_misses": merged.row["misses"],
                "per_token_miss_ratio": streams.per_token_miss_ratio(
                    [outs[number].row["misses"] for _, outs in alone],
                    merged.row["misses"],
                    stream_tokens=tokens,
                    merged_tokens=tokens,
                ),
            }
            for number, merged in enumerate(found)
        ],
    }


_POINT = ("policy", "scope", "semantics", "capacity_experts_total", "capacity_bytes")
_RECOVERY_WINDOW_STEPS = 50
_RECOVERY_MARGIN = 0.01


def _recovery(
    arguments: argparse.Namespace, replay: Replay, found: Sequence[Outcome], source_of_step: Any, decided: Any
) -> list[dict[str, Any]]:
    """How long each policy takes after the switch, and the misses that the switch costs."""
    sources = source_of_step[replay.step_begin : replay.step_end]
    switch_step = int((sources == 0).sum())
    after = len(sources) - switch_step
    if not 0 < switch_step < len(sources):
        raise UnusableRequest("--switch: the steps selected hold one trace alone; wanted --steps on both sides of it")
    window = Window((0, after), replay.phase, warm_pass=True)
    second = prepare(
        read_trace(arguments.switch), window, order=replay.order, dedup=arguments.dedup, seed=arguments.seed
    )
    rows = []
    accesses = replay.survey.step_accesses
    for mixed, alone in zip(found, decided(second), strict=True):
        said = streams.recovery(
            mixed.step_hits,
            accesses,
            switch_step,
            window_steps=min(_RECOVERY_WINDOW_STEPS, after),
            margin=_RECOVERY_MARGIN,
            # Warm steps may reach beyond the switch: what is not scored of one is not compared with the other.
            alone_hits=np.where(accesses[switch_step:] > 0, alone.step_hits, 0),
        )
        rows.append({**{name: mixed.row[name] for name in _POINT}, "switch_step": switch_step, **said._asdict()})
    return rows


def _print_results(trace_id: str, document: dict[str, Any]) -> None:
    results = document["results"]
    first = results[0]
    warm = f"after {first['warm_steps']} unscored warm steps" if first["warm_steps"] else "cold"
    if first["warm_pass"]:
        warm = "after an unscored warm pass"
    print(
        f"{trace_id}: steps {first['step_begin']}:{first['step_end']}, phase {first['phase']}, {warm}, scope "
        f"{first['scope']}, order {first['access_order']}, dedup {first['dedup']}; {first['accesses']:,} accesses "
        f"({first['selections']:,} selections)"
    )
    with_interval = any(row["hit_rate_low"] is not None for row in results)
    with_null = any(row["shuffled_hit_rate"] is not None for row in results)
    head = f"{'policy':<14} {'semantics':<13} {'capacity':>20} {'hits':>12} {'misses':>12} {'hit rate':>9}"
    head += f" {'95 % interval':>17} {'over ' + str(_reference(results)):>26}" if with_interval else ""
    print(head + (f" {'shuffled':>9}" if with_null else "") + "  fit")
    for row in results:
        line = f"{row['policy']:<14} {row['semantics']:<13} {_capacity_text(row):>20} {row['hits']:>12,} "
        line += f"{row['misses']:>12,} {_rate(row['hit_rate']):>9}"
        if with_interval:
            line += f" {_span(row['hit_rate_low'], row['hit_rate_high']):>17}"
            over = row["over_reference"]
            span = _span(row["over_reference_low"], row["over_reference_high"], sign="+")
            line += f" {'-' if over is None else f'{over:+.4f} ({span})':>26}"
        print(line + (f" {_rate(row['shuffled_hit_rate']):>9}" if with_null else "") + f"  {row['fit'] or ''}")
    print(
        f"chance that an access names an expert of the layer's event before: {_rate(first['lag1_chance_ratio'])} by "
        f"popularity, {_rate(first['lag1_uniform_ratio'])} under a uniform router"
    )
    if "batch" in document:
        batch = document["batch"]
        print(f"batch of {len(batch['streams'])}: dedup {batch['dedup_factor']:.3f}")
        for row in batch["results"]:
            ratio = row["per_token_miss_ratio"]
            said = "-" if ratio is None else f"{ratio:.3f}"
            print(f"  {row['policy']:<14} {row['semantics']:<13} {_capacity_text(row):>20} misses per token × {said}")
    for row in document.get("recovery", ()):
        steps_taken = "not recovered" if row["recovery_steps"] is None else f"{row['recovery_steps']} steps"
        print(
            f"after the switch at step {row['switch_step']}, {row['policy']} {row['semantics']} {_capacity_text(row)}: "
            f"{steps_taken} until within {row['margin']:.2f} of the same steps warm and alone; "
            f"{row['extra_misses']:,} extra misses of {row['compared_accesses']:,} accesses"
        )
    if "reporting_block" in document:
        print("\n".join(["", *reporting_text(document["reporting_block"])]))


def _reference(results: Sequence[dict[str, Any]]) -> str:
    return next((row["reference_policy"] for row in results if row["reference_policy"]), "-")


def _capacity_text(row: dict[str, Any]) -> str:
    if row["capacity_experts_total"] is None:
        return format_bytes(row["capacity_bytes"])
    return f"{row['capacity_experts_total']:,} experts"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _span(low: float | None, high: float | None, sign: str = "") -> str:
    return "-" if low is None or high is None else f"{low:{sign}.4f} to {high:{sign}.4f}"


def _curve(arguments: argparse.Namespace) -> int:
    trace = open_or_read(arguments.trace)
    replay = prepare(trace, _window(arguments), order=arguments.order, dedup=arguments.dedup, seed=arguments.seed)
    found = [lru_curve(replay, scope=arguments.scope, semantics=one) for one in arguments.semantics]
    table = static_curve(replay, scope=arguments.scope, fit=arguments.fit)
    document = {
        "trace_id": trace.metadata.trace_id,
        "scope": arguments.scope,
        "phase": replay.phase,
        "step_begin": replay.step_begin,
        "step_end": replay.step_end,
        "warm_steps": replay.warm_steps,
        "warm_pass": replay.window.warm_pass,
        "access_order": replay.order,
        "dedup": replay.dedup,
        "accesses": replay.num_scored,
        "cycle_floor_experts": cycle_floor(replay) if arguments.scope == "global" else None,
        "curves": [
            {
                "policy": one.policy,
                "semantics": one.semantics,
                "fit": arguments.fit if one.policy == "static" else None,
                "compulsory_misses": one.compulsory_misses.tolist(),
                "capacity_experts_total": one.capacity_experts_total.tolist(),
                "hits": one.hits.tolist(),
            }
            for one in (*found, table)
        ],
    }
    if arguments.json:
        print(json.dumps(document))
        return 0
    print(f"{document['trace_id']}: scope {arguments.scope}, {replay.num_scored:,} accesses scored")
    for one in (*found, table):
        print(f"{one.policy} {one.semantics or ''}, at most {one.compulsory_misses.max():,} compulsory misses")
        for place in _spread(len(one.hits)):
            capacity, hits = int(one.capacity_experts_total[place]), int(one.hits[place])
            rate = hits / replay.num_scored if replay.num_scored else None
            print(f"  {capacity:>12,} experts {hits:>14,} hits {_rate(rate):>8}")
    return 0


def _spread(points: int, shown: int = 16) -> list[int]:
    """About `shown` places among `points`, even on a logarithmic scale, the last among them."""
    return sorted({min(points - 1, round(points ** (step / (shown - 1)))) for step in range(shown)})


def _sweep(arguments: argparse.Namespace) -> int:
    data = DataFolder(arguments.data)
    asked = sweep.Sweep(
        traces=arguments.traces,
        policies=arguments.policy,
        scopes=arguments.scope,
        semantics=arguments.semantics,
        capacities=_capacities(arguments),
        seeds=arguments.seeds,
        window=_window(arguments),
        order=arguments.order,
        dedup=arguments.dedup,
        expert_bytes=arguments.expert_bytes,
        choices=_choices(arguments),
    )
    cells = sweep.plan(asked)
    folder = data.results / "sweep"
    files = sorted(folder.glob("*/*.parquet"))
    done = {name for file in files for name in _kept_cells(file)}
    left = sweep.without(cells, done)
    for rows in sweep.run(asked, left):
        _keep(folder / rows[0]["trace_id"] / f"{rows[0]['cell_hash']}.parquet", rows)
        if sys.stderr.isatty():
            print(f"replayer: {len(rows)} cells of {rows[0]['trace_id']} kept", file=sys.stderr)
    document = {"cells": len(cells), "skipped": len(cells) - len(left), "simulated": len(left), "folder": str(folder)}
    if arguments.json:
        print(json.dumps(document))
    else:
        print(f"{len(cells)} cells: {len(left)} simulated, {len(cells) - len(left)} found in {folder}")
    return 0


def _kept_cells(file: Path) -> list[str]:
    try:
        return pl.read_parquet(file, columns=["cell_hash"])["cell_hash"].to_list()
    except pl.exceptions.PolarsError:
        raise MalformedTrace(
            f"{file}: no readable table of a sweep; remove it, and its cells are simulated again"
        ) from None


def _keep(target: Path, rows: list[dict[str, Any]]) -> None:
    # Half a second of import that other commands do not need.
    from schemas.validation import validate_table

    frame = validate_table(TABLES["sweep"].frame(rows), TABLES["sweep"])
    with publish(target) as temporary:
        pq.write_table(frame.to_arrow(), temporary, compression="zstd")
