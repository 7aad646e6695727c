"""The command line of the standalone replayer: arguments in, a table or one JSON document out."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayer.capacity import NotEnforceable
from replayer.command import Parser, byte_size, choice, count, fraction, listed, run, steps
from replayer.pool import MalformedPool, PoolMismatch, UnsuitableStorage, UnusablePlan
from replayer.pool_cli import add_pool_commands
from replayer.probe_cli import add_probe_command
from replayer.quantities import format_bytes
from replayer.replay import UnusableReplay
from replayer.replay_cli import add_replay_command
from replayer.simulate import Capacity, UnusableRequest, Window, prepare, simulate
from replayer.trace import MalformedTrace, read_trace
from schemas.columns import ACCESS_ORDERS, DEDUPS, POLICIES, SCOPES, SCORED_PHASES, SEMANTICS

_SIMULATE_EPILOG = """\
examples:
  replayer simulate data/traces/ID.parquet --policy lru,belady_bypass --capacity-experts 8,17,32
  replayer simulate data/traces/ID.parquet --policy lru --scope global --capacity 64GiB --expert-bytes 17547264
  replayer simulate data/traces/ID.parquet --policy lru,static --fit first:0.6 --warm-fraction 0.6 \\
      --semantics event_atomic,sequential --capacity-experts 32 --json

What is scored: by default every step, of phase decode where the trace has decode rows. A policy warms up inside the
replay; --warm-fraction leaves the first steps unscored, --warm-pass replays everything once before it counts.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="replayer", description="Replay and simulate canonical expert traces.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    command = commands.add_parser(
        "simulate",
        help="hit rates of cache policies on a trace",
        description="Simulates expert caches on a canonical trace: exact hit and miss counts, with their contract.",
        epilog=_SIMULATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("trace", type=Path, metavar="TRACE", help="a canonical trace, data/traces/ID.parquet")
    command.add_argument(
        "--policy",
        type=listed(choice(POLICIES)),
        default=["lru"],
        metavar="P[,P…]",
        help=f"of {', '.join(POLICIES)} (default lru)",
    )
    command.add_argument("--scope", choices=SCOPES, default="layer", help="a cache per layer (default) or one over all")
    command.add_argument(
        "--semantics",
        type=listed(choice(SEMANTICS)),
        default=["event_atomic"],
        metavar="S[,S]",
        help="event_atomic (default): an event is looked up as a whole before anything is evicted; sequential",
    )
    command.add_argument("--order", choices=ACCESS_ORDERS, help="order inside an event (default: as the dump has it)")
    command.add_argument(
        "--dedup", choices=DEDUPS, default="union", help="union (default): an event asks for each expert once"
    )
    size = command.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--capacity-experts",
        type=listed(count),
        metavar="N[,N…]",
        help="experts per layer in scope layer, in all in scope global",
    )
    size.add_argument(
        "--capacity", type=listed(byte_size), metavar="B[,B…]", help="bytes over all layers, for example 64GiB or 256GB"
    )
    command.add_argument(
        "--expert-bytes", type=byte_size, metavar="B", help="size of every expert, if the trace has none"
    )
    command.add_argument("--steps", type=steps, default=(None, None), metavar="A:B", help="steps to replay, half-open")
    command.add_argument("--phase", choices=SCORED_PHASES, help="phase to score (default: decode if there is any)")
    command.add_argument(
        "--warm-fraction", type=fraction, default=fraction("0"), metavar="F", help="unscored first part"
    )
    command.add_argument("--warm-pass", action="store_true", help="replay once unscored, then score a second pass")
    command.add_argument(
        "--fit", default="same", metavar="FIT", help="static table: same (default), first:F, TRACE or TRACE:first:F"
    )
    command.add_argument("--seed", type=count, default=0, help="seed of --order random")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=_simulate)
    add_pool_commands(commands)
    add_replay_command(commands)
    add_probe_command(commands)
    return parser


def _simulate(arguments: argparse.Namespace) -> int:
    trace = read_trace(arguments.trace)
    window = Window(arguments.steps, arguments.phase, arguments.warm_fraction, arguments.warm_pass)
    replay = prepare(trace, window, order=arguments.order, dedup=arguments.dedup, seed=arguments.seed)
    if arguments.capacity is not None:
        capacities = [Capacity(bytes=size) for size in arguments.capacity]
    else:
        capacities = [Capacity(experts=number) for number in arguments.capacity_experts]
    results = list(
        simulate(
            replay,
            names=arguments.policy,
            scope=arguments.scope,
            semantics=arguments.semantics,
            capacities=capacities,
            fit=arguments.fit,
            expert_bytes=arguments.expert_bytes,
        )
    )
    if arguments.json:
        print(json.dumps({"trace_id": trace.metadata.trace_id, "results": results}))
    else:
        _print_results(trace.metadata.trace_id, results)
    return 0


def _print_results(trace_id: str, results: list[dict[str, Any]]) -> None:
    first = results[0]
    warm = f"after {first['warm_steps']} unscored warm steps" if first["warm_steps"] else "cold"
    if first["warm_pass"]:
        warm = "after an unscored warm pass"
    print(
        f"{trace_id}: steps {first['step_begin']}:{first['step_end']}, phase {first['phase']}, {warm}, scope "
        f"{first['scope']}, order {first['access_order']}, dedup {first['dedup']}; {first['accesses']:,} accesses "
        f"({first['selections']:,} selections)"
    )
    print(f"{'policy':<14} {'semantics':<13} {'capacity':>20} {'hits':>12} {'misses':>12} {'hit rate':>9}  fit")
    for row in results:
        if row["capacity_experts_total"] is not None:
            capacity = f"{row['capacity_experts_total']:,} experts"
        else:
            capacity = format_bytes(row["capacity_bytes"])
        rate = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.4f}"
        print(
            f"{row['policy']:<14} {row['semantics']:<13} {capacity:>20} {row['hits']:>12,} {row['misses']:>12,} "
            f"{rate:>9}  {row['fit'] or ''}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""

    def work(given: Sequence[str] | None) -> int:
        arguments = _parser().parse_args(given)
        status: int = arguments.run(arguments)
        return status

    return run(
        "replayer",
        work,
        argv,
        wrong_call=(UnusableRequest, UnusablePlan, PoolMismatch, UnsuitableStorage, UnusableReplay, NotEnforceable),
        failed=(MalformedTrace, MalformedPool),
    )
