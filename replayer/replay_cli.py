"""The command `replayer replay`: arguments in, rows into the data folder, lines or one JSON document out."""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from replayer.capacity import remove_leftovers
from replayer.command import Parser, byte_size, count, split, steps
from replayer.pool import read_pool
from replayer.quantities import format_bytes
from replayer.reclaim import SCAN_PER_STEAL_FLAG
from replayer.replay import Run, replay
from replayer.request import Request, UnusableReplay
from replayer.trace import read_trace
from schemas.columns import (
    DELIVERIES,
    DESTINATIONS,
    FADVICES,
    GROUP_STATS,
    MECHANISMS,
    OBSERVATIONS,
    OWNERS,
    POLICIES,
    READ_PATHS,
    SCOPES,
)
from schemas.files import DataFolder, publish
from schemas.tables import FILE_TABLES, TABLES

_EPILOG = """\
examples:
  replayer replay data/traces/ID.parquet --pool POOL --mechanism cgroup --capacity 512MiB --data data
  replayer replay data/traces/ID.parquet --pool POOL --owner restream --mechanism none --steps 0:100
  replayer replay data/traces/ID.parquet --pool POOL --mechanism cgroup --capacity 512MiB --repeat 5 --json
  replayer replay data/traces/ID.parquet --pool POOL --mechanism cgroup --wall 700MiB --owner arena --fit first:0.5
  replayer replay data/traces/ID.parquet --pool POOL --mechanism cgroup --wall 700MiB --owner user_cache --policy sieve
  replayer replay data/traces/ID.parquet --pool POOL --experiment equal-memory --fit-machine --data data

The steps are replayed twice, and the second pass is measured. Capacity is what may stay in memory of experts; the
reader's own memory and --headroom come on top. Owners:
  page_cache            the kernel's page cache, read with pread
  page_cache_mmap       the page cache, mapped and copied from
  restream              nobody: every access is read past the page cache (O_DIRECT)
  uncached              nobody: read through the page cache and dropped again (RWF_DONTCACHE)
  arena                 locked memory, filled from a table before the run; the rest by --miss-path
  hybrid                --arena-fraction of the capacity as an arena, the page cache for the rest
  user_cache            a --policy over locked slots that O_DIRECT fills: what engines build
  page_cache_admission  the page cache for what --admit names; the rest is read past it
Mechanisms:
  cgroup                a memory cgroup around the reader
  balloon               a process that locks the machine's memory but the capacity
  boot                  the machine itself, booted with mem= or small: whatever it leaves, or about --capacity
  offline               memory blocks taken offline for the run, with --offline-memory-blocks
  none                  nothing
Exits 1 when a proof about the bytes does not hold.
"""
_MAX_THREADS = 256
_OF_A_RUN = (
    "owner", "policy", "scope", "fit", "arena_fraction", "admit", "miss_path", "seed", "mechanism", "capacity", "wall",
    "headroom", "machine_bytes", "allow_thrash", "allow_unsuitable", "fadvise", "device", "threads", "steps", "cold",
    "observe", "accesses", "verify", "group_stat", "accelerator_memory",
    "offline_memory_blocks", "delivery", "split", "hint_slots",
)  # fmt: skip
"""Options that an experiment's file says for each condition."""
_MAX_REPEAT = 10_000


def add_replay_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds `replay` to the subparsers of a command line."""
    command = commands.add_parser(
        "replay",
        help="replay a trace against a pool of files, with memory limited",
        description="Replays a canonical trace natively against a file-backed pool and proves what it counted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "trace", type=Path, nargs="+", metavar="TRACE", help="a canonical trace, data/traces/ID.parquet"
    )
    command.add_argument(
        "--pool", type=Path, action="append", required=True, metavar="DIR", help="made by: replayer pool build or map"
    )
    add_options_of_a_run(command)
    command.add_argument(
        "--plan",
        action="append",
        metavar="PLAN",
        help="a lookahead plan: which experts to read ahead for which event; of an experiment NAME=PLAN, once for each",
    )
    command.add_argument(
        "--delivery",
        choices=DELIVERIES,
        default="none",
        help="how the plan is brought into the page cache, by one worker: advice (WILLNEED), blocking reads, io_uring",
    )
    command.add_argument(
        "--split",
        type=split,
        default="auto",
        metavar="S",
        help="pieces to ask for: auto (default: advice in pieces of the device's readahead, beyond which the kernel "
        "cuts it; reads whole), none, or bytes",
    )
    command.add_argument(
        "--hint-slots",
        type=count,
        metavar="N",
        help="let N hints wait in a queue that drops what finds it full (default: one slot, which a newer overwrites)",
    )
    command.add_argument(
        "--device",
        choices=DESTINATIONS,
        default="cpu",
        help="read into torch tensors (default), pinned ones copied to the GPU, or plain memory without torch",
    )
    command.add_argument("--steps", type=steps, default=(None, None), metavar="A:B", help="steps to replay, half-open")
    command.add_argument(
        "--observe", choices=OBSERVATIONS, default="every", help="ask for residency before each read (default every)"
    )
    command.add_argument(
        "--accesses",
        action="store_true",
        help="also write the table replay_access: what each access found resident (with --observe every and --data)",
    )
    command.add_argument("--verify", action="store_true", help="check all content read, not first and last pages only")
    command.add_argument(
        "--repeat", type=count, metavar="N", help="run so many times (default 1, or what an experiment says)"
    )
    command.add_argument(
        "--experiment",
        metavar="NAME",
        help="run an experiment instead: one shipped with the replayer, or a TOML file",
    )
    sizes = command.add_mutually_exclusive_group()
    sizes.add_argument("--fit-machine", action="store_true", help="scale the experiment's sizes to this machine")
    sizes.add_argument("--as-published", action="store_true", help="use the sizes of the study")
    command.add_argument(
        "--experiment-seed", type=count, metavar="N", help="of the order of its runs (default: what it says)"
    )
    command.add_argument("--data", type=Path, metavar="DIR", help="append the runs to the results of this data folder")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=_replay, of_a_run={name: command.get_default(name) for name in _OF_A_RUN})


def add_options_of_a_run(command: Parser) -> None:
    """Adds what says how experts are served: owner, limit, read path, threads; see `request_of`."""
    command.add_argument("--owner", choices=OWNERS, default="page_cache", help="who holds experts (default page_cache)")
    command.add_argument("--policy", choices=POLICIES, metavar="P", help="of user_cache; a policy of replayer simulate")
    command.add_argument(
        "--scope", choices=SCOPES, help="one table or cache per layer, or one over all (default global)"
    )
    command.add_argument(
        "--fit", metavar="FIT", help="of arena, hybrid and pinned policies: same (default), first:F or TRACE[:first:F]"
    )
    command.add_argument("--arena-fraction", type=float, metavar="F", help="of hybrid: locked share of the capacity")
    command.add_argument(
        "--admit", metavar="TABLE", help="of page_cache_admission: FIT:top:N, or a Parquet or CSV file"
    )
    command.add_argument(
        "--miss-path", choices=READ_PATHS, help="how arena, hybrid and page_cache_admission read what they do not hold"
    )
    command.add_argument("--seed", type=count, default=0, metavar="N", help="of policy random (default 0)")
    command.add_argument("--mechanism", choices=MECHANISMS, default="none", help="what limits memory (default none)")
    command.add_argument(
        "--capacity", type=byte_size, metavar="B", help="most bytes of experts that may stay in memory"
    )
    command.add_argument(
        "--wall", type=byte_size, metavar="B", help="instead of --capacity: all that the reader may use, own memory too"
    )
    command.add_argument("--headroom", type=byte_size, default=0, metavar="B", help="memory allowed beyond (default 0)")
    command.add_argument(
        "--machine-bytes",
        type=byte_size,
        metavar="B",
        help="with balloon: a memory cgroup of this size stands for the machine, and the balloon locks inside it",
    )
    command.add_argument(
        "--accelerator-memory",
        action="store_true",
        help="count and use memory nodes without processors, too: the HBM of a GH200",
    )
    command.add_argument(
        "--offline-memory-blocks",
        action="store_true",
        help="with mechanism offline: take memory blocks of this machine offline, and bring them back after the run",
    )
    command.add_argument("--allow-thrash", action="store_true", help="measure a capacity below the reads in flight")
    command.add_argument("--allow-unsuitable", action="store_true", help="measure, and mark, a pool that is on no disk")
    command.add_argument(
        "--fadvise",
        choices=FADVICES,
        default="random",
        help="random (default): no readahead; willneed: none, and each read is announced; normal, sequential, noreuse: "
        "the kernel's readahead under that advice",
    )
    command.add_argument("--threads", type=count, default=8, metavar="N", help="demand threads (default 8)")
    command.add_argument("--cold", action="store_true", help="measure the first pass: no warm-up pass before it")
    command.add_argument(
        "--group-stat",
        choices=GROUP_STATS,
        default="pass",
        help="read the group's memory.stat around each pass (default), or after each step too: that gives reclaim by "
        "step, and brings the statistics up to date by which the kernel reclaims, so it is another condition",
    )
    command.add_argument("--wait", type=count, default=0, metavar="S", help="seconds to wait for another replay to end")


def check_threads(threads: int) -> None:
    """Raises UnusableReplay: too few or too many."""
    if not 1 <= threads <= _MAX_THREADS:
        raise UnusableReplay(f"--threads {threads}, wanted 1 to {_MAX_THREADS}")


def request_of(arguments: argparse.Namespace, **more: Any) -> Request:
    """The request that `add_options_of_a_run` parsed, and `more`.

    Raises:
        UnusableReplay: --threads is out of range.
    """
    check_threads(arguments.threads)
    return Request(
        owner=arguments.owner,
        policy=arguments.policy,
        scope=arguments.scope,
        fit=arguments.fit,
        admit=arguments.admit,
        arena_fraction=arguments.arena_fraction,
        miss_path=arguments.miss_path,
        seed=arguments.seed,
        mechanism=arguments.mechanism,
        capacity_bytes=arguments.capacity,
        wall_bytes=arguments.wall,
        headroom_bytes=arguments.headroom,
        outer_group_bytes=arguments.machine_bytes,
        fadvise=arguments.fadvise,
        threads=arguments.threads,
        group_stat=arguments.group_stat,
        accelerator_memory=arguments.accelerator_memory,
        offline_memory_blocks=arguments.offline_memory_blocks,
        warm_pass=not arguments.cold,
        allow_thrash=arguments.allow_thrash,
        allow_unsuitable=arguments.allow_unsuitable,
        **more,
    )


def _replay(arguments: argparse.Namespace) -> int:
    check_threads(arguments.threads)
    if arguments.repeat is not None and not 1 <= arguments.repeat <= _MAX_REPEAT:
        raise UnusableReplay(f"--repeat {arguments.repeat}, wanted 1 to {_MAX_REPEAT}")
    if arguments.accesses and (arguments.observe != "every" or arguments.data is None):
        raise UnusableReplay(
            f"--accesses with --observe {arguments.observe} and {'no ' if arguments.data is None else ''}--data; it is "
            "a table of all accesses, so observe every one and name the data folder to write to"
        )
    if arguments.experiment is not None:
        said = [name for name, default in arguments.of_a_run.items() if getattr(arguments, name) != default]
        if said:
            raise UnusableReplay(
                f"--{said[0].replace('_', '-')} with --experiment, whose file says it for each condition; leave it "
                "out, or copy the file and change it there"
            )
        from replayer.experiment_cli import run_experiment

        return run_experiment(arguments)
    if arguments.fit_machine or arguments.as_published or arguments.experiment_seed is not None:
        raise UnusableReplay(
            "--fit-machine, --as-published and --experiment-seed belong to an --experiment; leave them out"
        )
    if len(arguments.trace) > 1 or len(arguments.pool) > 1:
        raise UnusableReplay("several traces or pools belong to an --experiment; name one of each")
    if len(arguments.plan or []) > 1:
        raise UnusableReplay(f"{len(arguments.plan)} plans, wanted one; several belong to an --experiment")
    request = request_of(
        arguments,
        destination=arguments.device,
        observe=arguments.observe,
        verify="all" if arguments.verify else "edges",
        plan=arguments.plan[0] if arguments.plan else None,
        delivery=arguments.delivery,
        split=arguments.split,
        hint_slots=arguments.hint_slots,
        steps=arguments.steps,
    )
    trace, pool = read_trace(arguments.trace[0]), read_pool(arguments.pool[0])
    for leftover in remove_leftovers():
        print(f"replayer: {leftover}", file=sys.stderr)
    data = None if arguments.data is None else DataFolder(arguments.data)
    if data is not None:
        # Before an hour of replays, not after it.
        data.results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data.results):
            pass
    documents = []
    valid = True
    unsaved = None
    for repeat in range(arguments.repeat or 1):
        result = replay(
            trace,
            pool,
            request,
            repeat=repeat,
            wait_s=arguments.wait,
            keeps_accesses=arguments.accesses,
            progress=_progress if sys.stderr.isatty() else None,
        )
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        whole = {"reclaim": next(iter(result.reclaim), None), "delivered": next(iter(result.delivery), None)}
        documents.append({**result.run, **whole, "proofs": result.proofs})
        if data is not None:
            try:
                write_run(data, result)
            except OSError as error:
                unsaved = error
        if not arguments.json:
            _print_run(result)
        valid &= bool(result.run["bytes_valid"])
        if result.run["status"] != "complete":
            print(f"replayer: {result.run['failure']}", file=sys.stderr)
        if result.run["status"] != "complete" or unsaved is not None:
            break
    if arguments.json:
        print(json.dumps(documents[0] if arguments.repeat in (None, 1) else documents))
    if unsaved is not None:
        raise unsaved
    return 0 if valid else 1


def _progress(what: str, done: int, total: int) -> None:
    print(f"\r\033[K{what}: {done:,} of {total:,} events", end="", file=sys.stderr, flush=True)


def write_run(data: DataFolder, result: Run) -> None:
    """Appends a run to the results: its rows first, the row that says the run exists last.

    Raises:
        ContractViolation: a row does not keep its table's contract. OSError: it cannot be written.
    """
    # Half a second of import that a replay without --data does not need.
    from schemas.validation import validate_table

    trace_id, run_id = result.run["trace_id"], result.run["run_id"]
    parts = [
        ("pool", result.pool["pool_id"], "part", [result.pool]),
        ("machine", result.machine["machine_id"], "part", [result.machine]),
        ("replay_step", trace_id, run_id, result.steps),
        ("replay_reclaim", trace_id, run_id, result.reclaim),
        ("replay_node", trace_id, run_id, result.nodes),
        ("replay_delivery", trace_id, run_id, result.delivery),
        ("replay_layer", trace_id, run_id, result.layers),
        ("replay_proof", trace_id, run_id, result.proofs),
        ("replay_run", trace_id, run_id, [result.run]),
    ]
    frames = {name: validate_table(TABLES[name].frame(rows), TABLES[name]) for name, _, _, rows in parts}
    if result.accesses is not None:
        table = FILE_TABLES["replay_access"]
        columns = {"run_id": [run_id] * len(result.accesses["access"]), **result.accesses}
        frames[table.name] = validate_table(pl.DataFrame(columns, schema=table.polars_schema), table)
        parts.insert(0, (table.name, trace_id, run_id, []))
    for name, folder, stem, _ in parts:
        _write(data.results / name / folder / f"{stem}.parquet", frames[name])


def write_rows(target: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Checks and publishes the rows of one table.

    Raises:
        ContractViolation: a row does not keep its table's contract. OSError: it cannot be written.
    """
    from schemas.validation import validate_table

    _write(target, validate_table(TABLES[name].frame(rows), TABLES[name]))


def read_marked_runs(data: DataFolder, table: str, name: str) -> list[dict[str, Any]]:
    """Rows of replay_run that `table` marks as those of `name`, with its columns; a mark without its run is left out.

    Runs that were measured elsewhere lie together in files of the name's own.

    Raises:
        OSError: a file cannot be read.
    """
    marks = [mark for path in _parts(data, table, name) for mark in pl.read_parquet(path).to_dicts()]
    brought = {
        run["run_id"]: run for path in _parts(data, "replay_run", name) for run in pl.read_parquet(path).to_dicts()
    }
    found = []
    for mark in marks:
        run = brought.get(mark["run_id"])
        if run is None:
            with contextlib.suppress(FileNotFoundError):
                (run,) = pl.read_parquet(data.run_file("replay_run", mark["trace_id"], mark["run_id"])).to_dicts()
        if run is not None:
            found.append({**run, **mark})
    return sorted(found, key=lambda run: (run["position"], run["run_id"]))


def _parts(data: DataFolder, table: str, partition: str) -> list[Path]:
    return sorted((data.results / table / partition).glob("[!.]*.parquet"))


def _write(target: Path, frame: pl.DataFrame) -> None:
    with publish(target) as temporary:
        pq.write_table(frame.to_arrow(), temporary, compression="zstd")


def _print_run(result: Run) -> None:
    run = result.run
    capacity = "no limit" if run["capacity_bytes"] is None else f"capacity {format_bytes(run['capacity_bytes'])}"
    limited = run["mechanism_detail"] or run["mechanism"]
    print(
        f"{run['run_id']}: {run['owner']}, {limited}, {capacity}, steps {run['step_begin']}:{run['step_end']}, "
        f"{'warm pass first' if run['warm_pass'] else 'cold'}, {run['status']}"
    )
    for label, name in (
        ("demand", "demand_bytes"), ("device, measured", "device_bytes"), ("missing before reads", "missing_bytes"),
        ("LRU misses at capacity, simulated", "nominal_miss_bytes"),
        ("LRU misses at residency, simulated", "resident_miss_bytes"),
        ("resident, median of steps", "resident_median_bytes"), ("locked for experts", "arena_bytes"),
        ("own memory", "own_anonymous_bytes"), ("wall", "wall_bytes"),
    ):  # fmt: skip
        if run[name] is not None:
            print(f"  {label:<36} {format_bytes(run[name]):>12}")
    if run["stall_median_ns"] is not None:
        print(
            f"  stall of an event: median {run['stall_median_ns'] / 1e6:.2f} ms, p99 {run['stall_p99_ns'] / 1e6:.2f} ms"
        )
    for row in result.delivery[:1]:
        print(f"  hints of the plan: {row['hints_submitted']:,} handed over, for {run['events']:,} events")
    for row in result.reclaim[:1]:
        _print_reclaim(row)
    if run["arena_hits"] is not None:
        print(f"  served from locked memory: {run['arena_hits']:,} of {run['accesses']:,} accesses")
    if run["files_stay_open"] is False:
        print("  more files than may be open (ulimit -Hn): each access opened and closed its own, within its time")
    print_verdicts(result)


def print_verdicts(result: Run) -> None:
    """How many proofs held, and what that makes of bytes and times."""
    run = result.run
    held = sum(proof["held"] is True for proof in result.proofs)
    print(
        f"  proofs: {held} of {len(result.proofs)} held; bytes {_verdict(run, 'bytes')}; times {_verdict(run, 'time')}"
    )
    for proof in result.proofs:
        if proof["held"] is None:
            print(f"    not made: {proof['name']} ({proof['found']})")


def _print_reclaim(row: dict[str, Any]) -> None:
    """What the whole pass had reclaimed: of the run's group where it counts that, else of all the machine's files."""
    counted = [
        (whose, row[f"{prefix}_scan_pages"], row[f"{prefix}_steal_pages"], row[f"{prefix}_scan_per_steal"])
        for whose, prefix in (("the group", "group"), ("all files of the machine", "machine_file"))
        if row[f"{prefix}_scan_pages"] is not None
    ]
    for whose, scanned, stolen, ratio in counted[:1]:
        told = "" if ratio is None else f", {ratio:.2f} a page{' (above 2)' if ratio > SCAN_PER_STEAL_FLAG else ''}"
        print(f"  reclaim of {whose}: {scanned:,} pages scanned for {stolen:,} reclaimed{told}")


def _verdict(run: dict[str, Any], kind: str) -> str:
    return "valid" if run[f"{kind}_valid"] else f"NOT valid: {run[f'{kind}_reasons']}"
