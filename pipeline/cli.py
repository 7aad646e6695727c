"""`expert-tier …`: from raw dumps to answers, for people and scripts.

Every command works on one data folder (`--data`, else EXPERT_TIER_DATA, else `data`). Dagster, DuckDB and matplotlib
are loaded only by the commands that need them.
"""

import argparse
import functools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.bundle import UnusableBundle, add_bundle, is_line, shipped
from pipeline.compare import UnknownResult
from pipeline.dump_checks import CHECKS, listed
from pipeline.dumps.blocks import MalformedDump, RefusedDump
from pipeline.dumps.packing import Unpacking
from pipeline.dumps.sniff import described
from pipeline.export import FORMATS, CannotHold, export
from pipeline.ingest import Ingested, Reading, WrongMetadata, ingest, judge, name_of, read_user_metadata
from pipeline.model_sizes import read_model
from pipeline.replays import Conditions, ReplayFailed, compiling_ahead, pool_of, replay_all, usable_mechanism
from pipeline.results import stale_traces
from pipeline.trust_cli import add_bundle_arguments, add_compare, add_verify, run_bundle, run_compare, run_verify
from replayer.command import Parser, byte_size, choice, count, printable, run
from replayer.machine import storage_of
from replayer.plan import MalformedPlan, check_replaceable, write_plan
from replayer.pool import MalformedPool, Pool
from replayer.quantities import format_bytes
from replayer.simulate import UnusableRequest
from replayer.trace import MalformedTrace, Trace, read_trace
from schemas.columns import COLUMNS, PREDICTORS
from schemas.files import ENVIRONMENT_VARIABLE, DataFolder
from schemas.tables import TABLES
from schemas.trace import TRACE_ID_PATTERN, CheckVerdict, TraceMetadata
from schemas.validation import ContractViolation


class UnknownTrace(ValueError):
    """A trace id that is not in the data folder."""


class WrongCall(ValueError):
    """Arguments that do not go together."""


class WorkFailed(ValueError):
    """An asset did not materialise."""


_EPILOG = """\
a first session:
  expert-tier demo                                 the whole road on the bundled sample
  expert-tier inspect my.npz                       what the dump says, what it leaves open, every check
  expert-tier ingest my.npz --meta domain=code     raw dump → data/traces/<trace_id>.parquet
  expert-tier run                                  analyses of all traces, warehouse, report
  expert-tier inversion                            LRU against a static table at tiny budgets, on synthetic routes
  expert-tier query --list                         tables and views, with what they answer
  expert-tier query "SELECT trace_id, scope, policy, capacity_experts_total, hit_rate FROM hit_rate
                     WHERE semantics = 'event_atomic' ORDER BY ALL"

exit codes: 0 done, 1 the work failed (bad data, interrupted), 2 the call was wrong.
"""

MAX_ROWS_SHOWN = 200
# Plain memory as destination: torch would take more memory than the whole pool of the sample.
_DEMO_CONDITIONS = Conditions(steps="0:200", device="none", wait_s=10)
_MODEL_HELP = (
    "a file of the model that says what the dump leaves open (layers, experts, k, bytes of each expert): a GGUF file, "
    "model.safetensors.index.json with its shards, or config.json"
)
_META_HELP = "what the dump does not say, as key=value (repeatable); a file <dump>.toml beside it does the same"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="expert-tier",
        description="How much DRAM, who should own the expert cache, is lookahead worth it: from your router dumps.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"expert-tier {version('expert-tier')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, function: Callable[[argparse.Namespace], int], help_text: str, **texts: Any) -> Any:
        command = commands.add_parser(
            name, help=help_text, description=help_text, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
        )
        command.add_argument(
            "--data", type=_path, metavar="DIR", help=f"data folder (default: ${ENVIRONMENT_VARIABLE}, else ./data)"
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(function=function)
        return command

    command = add(
        "demo",
        _demo,
        "The whole road on the bundled sample: ingest, analyses, native replays, warehouse, report, answer.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")

    command = add(
        "ingest", _ingest, "Turns raw router dumps into canonical traces; a dump already there is not repeated."
    )
    command.add_argument(
        "dumps", nargs="+", type=_path, metavar="DUMP",
        help="npz, route CSV v1, JSONL, events CSV; packed (gz, zst, xz, bz2, zip) or not. A folder, or a pattern in "
        "quotes ('run/rank*.jsonl'), is one dump of several files",
    )  # fmt: skip
    command.add_argument("--trace-id", metavar="ID", help="name the trace yourself (one dump only)")
    _add_said(command)
    command.add_argument("--model", type=_path, metavar="PATH", help=_MODEL_HELP)
    _add_unpacking(command)
    command.add_argument("--json", action="store_true", help="print one JSON document")

    command = add(
        "capture",
        _capture,
        "Decodes a model on prompts, keeps its routes as a dump and a trace each, and runs the analyses: from a model "
        "to the report.",
    )
    command.add_argument("model", type=_path, metavar="MODEL", help="a folder with config.json and safetensors files")
    command.add_argument("prompts", nargs="+", type=_path, metavar="PROMPT", help="a file of text to go on from")
    command.add_argument("--tokens", type=count, default=64, metavar="N", help="tokens to decode each (default 64)")
    command.add_argument(
        "--lookahead", action="store_true", help="also let each layer's input name the next layer's experts, as a plan"
    )
    command.add_argument("--dtype", choices=("checkpoint", "float32"), default="checkpoint", help="to compute in")
    command.add_argument("--json", action="store_true", help="print one JSON document")

    command = add(
        "inspect",
        _inspect,
        "Says what a dump is, what it leaves open, and how every check went, also of one that is refused; keeps "
        "nothing.",
    )
    command.add_argument("dump", nargs="?", type=_path, metavar="DUMP")
    command.add_argument("--checks", action="store_true", help="list the checks, with their thresholds and reasons")
    command.add_argument("--layouts", action="store_true", help="list the layouts of dumps that are read")
    command.add_argument(
        "--imatrix", type=_path, metavar="GGUF", help="hold the dump's selections against an imatrix of the same run"
    )
    _add_said(command)
    command.add_argument("--model", type=_path, metavar="PATH", help=_MODEL_HELP)
    _add_unpacking(command)
    command.add_argument("--json", action="store_true", help="print one JSON document")

    command = add(
        "export", _export, "Writes a trace as a raw dump that other programs read, in a layout that holds it."
    )
    command.add_argument("trace", metavar="TRACE_ID")
    layouts = "; ".join(f"{name}: {writer.description}" for name, writer in FORMATS.items())
    command.add_argument("--format", required=True, type=choice(tuple(FORMATS)), metavar="FORMAT", help=layouts)
    command.add_argument("--out", type=_path, required=True, metavar="FILE", help="replaced if it is there")
    command.add_argument("--json", action="store_true", help="print one JSON document")

    command = add("run", _run, "Runs the analyses of traces, then fills the warehouse and writes the report.")
    command.add_argument(
        "--trace", nargs="+", action="extend", metavar="ID",
        help="these, again if need be (default: all that are new, changed, or made by an older version)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON document")

    command = add(
        "inversion",
        _inversion,
        "Why LRU falls under a static table at tiny budgets: synthetic routes replayed both ways, in every order.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")

    command = add(
        "lookahead",
        _lookahead,
        "What a predictor of experts names of a trace: its recall, precision and coverage; and its plan as a file.",
    )
    command.add_argument("trace", metavar="TRACE_ID")
    command.add_argument("--predictor", required=True, type=choice(PREDICTORS), metavar="P",
                         help=f"one of {', '.join(PREDICTORS)}")  # fmt: skip
    command.add_argument(
        "--depth", type=count, metavar="D", help="layers between the event it is made at and its target (default: 1)"
    )
    command.add_argument("--width", type=count, metavar="M", help="most experts it names (default: the trace's k)")
    command.add_argument(
        "--fit", metavar="FIT",
        help="what it learns from: first:F of the steps (default: first:0.6), TRACE_ID or TRACE_ID:first:F; scored is "
        "what it did not learn from, and of a predictor that learns nothing what follows first:0.6",
    )  # fmt: skip
    command.add_argument("--seed", type=count, default=0, metavar="N", help="of what is drawn (default: 0)")
    command.add_argument("--out", type=_path, metavar="PLAN.parquet", help="write the plan there")
    command.add_argument("--json", action="store_true", help="print one JSON document")

    add_bundle_arguments(
        add("bundle", _bundle, "Packs results into one file that can be checked elsewhere, or a lab's into a folder.")
    )
    add_verify(
        add(
            "verify",
            lambda arguments: run_verify(arguments, _folder(arguments)),
            "Checks a bundle: hashes, contracts, identities, and the same simulations; traces come from it or --data.",
        )
    )

    command = add("unbundle", _unbundle, "Adds a lab's results that were measured elsewhere; then: expert-tier run.")
    command.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="default: those that are shipped")

    command = add("query", _query, "Asks the warehouse in DuckDB SQL; the file is opened read-only.")
    command.add_argument("sql", nargs="?", metavar="SQL")
    command.add_argument("--list", action="store_true", help="tables and views, with what they hold and answer")
    command.add_argument("--format", choices=("table", "csv", "json"), default="table")

    add_compare(
        add(
            "compare",
            lambda arguments: run_compare(arguments, _folder(arguments)),
            "Holds two results against each other: every contract column that differs first, then the quantities.",
        )
    )

    command = add("report", _report, "Writes data/report/index.html from the warehouse.")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_unpacking(command: argparse.ArgumentParser) -> None:
    default = Unpacking()
    command.add_argument(
        "--max-unpacked", type=byte_size, default=default.max_bytes, metavar="SIZE",
        help=f"most that a packed dump may become, all its files together (default: {format_bytes(default.max_bytes)})",
    )  # fmt: skip
    command.add_argument(
        "--max-ratio", type=_from_one, default=default.max_ratio, metavar="N",
        help="most times its stored size that a packed file may become (default: %(default)s)",
    )  # fmt: skip


def _unpacking(arguments: argparse.Namespace) -> Unpacking:
    return Unpacking(max_bytes=arguments.max_unpacked, max_ratio=arguments.max_ratio)


_REPAIRS = ("expert_id_base", "moe_layer_ids", "drop_warmup", "sequence_lengths", "shared_experts")
"""Keys of what a user may say that change rows or their numbers; each has a flag of its own."""


def _add_said(command: argparse.ArgumentParser) -> None:
    """What the user says of a dump: metadata, and repairs, each by a flag that names it."""
    command.add_argument("--meta", action="append", default=[], metavar="KEY=VALUE", help=_META_HELP)
    repairs = command.add_argument_group(
        "repairs", "nothing is repaired unless it is named; each is counted, and makes another trace"
    )
    repairs.add_argument(
        "--expert-id-base", type=count, choices=(0, 1), metavar="0|1", help="1: the dump counts experts from 1"
    )
    repairs.add_argument(
        "--layer-map", dest="moe_layer_ids", type=_layer_numbers, metavar="N,N,…",
        help="the model's numbers of the dump's layers, in order; 1-26 is a range",
    )  # fmt: skip
    repairs.add_argument(
        "--drop-warmup", action="store_true", default=None,
        help="leave leading warm-up rows out; without it they are marked, and never replayed",
    )  # fmt: skip
    repairs.add_argument(
        "--sequence-lengths", type=_whole_numbers, metavar="N,N,…",
        help="tokens of each request, in order: rows at later positions are padding, left out",
    )  # fmt: skip
    repairs.add_argument(
        "--strip-shared-experts", dest="shared_experts", type=_shared, metavar="N",
        help="shared experts fused into every row as ids num_experts..; they are left out",
    )  # fmt: skip


def _path(text: str) -> Path:
    """argparse type: a path; an empty one, as an unset variable leaves it, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'', wanted a path")
    return Path(text)


def _from_one(text: str) -> int:
    """argparse type: a whole number, not 0."""
    number = count(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted at least 1")
    return number


def _shared(text: str) -> int:
    """argparse type: how many experts are shared."""
    number = _from_one(text)
    if number > 16:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted 1 to 16")
    return number


def _layer_numbers(text: str) -> list[int]:
    """argparse type: numbers of layers, ascending."""
    numbers = _whole_numbers(text)
    if numbers != sorted(set(numbers)) or numbers[-1] > 65535:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}, wanted layer numbers of at most 65535 that ascend without repeats, such as 3,4,9-26"
        )
    return numbers


def _whole_numbers(text: str) -> list[int]:
    """argparse type: `3,4,9` or `1-26`, or both."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            begin = count(first.strip())
            end = count(last.strip()) if dash else begin
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r}, wanted whole numbers and ranges of them, such as 3,4,9-26"
            ) from None
        if not 0 <= end - begin < 65536:
            raise argparse.ArgumentTypeError(f"{part[:40]!r}, wanted a range upwards, of at most 65,536 numbers")
        numbers += range(begin, end + 1)
    return numbers


def _said(arguments: argparse.Namespace) -> list[str]:
    """What the command line says of a dump, as overrides of its metadata file."""
    asked = {key: getattr(arguments, key) for key in _REPAIRS}
    return [*arguments.meta, *(f"{key}={json.dumps(value)}" for key, value in asked.items() if value is not None)]


def _folder(arguments: argparse.Namespace) -> DataFolder:
    root = arguments.data or os.environ.get(ENVIRONMENT_VARIABLE) or "data"
    try:
        folder = Path(root).expanduser().resolve()
        str(folder).encode()
    except (RuntimeError, UnicodeEncodeError, ValueError) as error:
        raise WrongCall(f"data folder {str(root)!r:.80}: {error}") from None
    if folder.exists() and not folder.is_dir():
        raise WrongCall(f"data folder {str(folder)!r}: a file, wanted a folder; choose another --data")
    if "?" in str(folder):
        raise WrongCall(
            f"data folder {str(folder)!r}: a `?` in it would end the address of Dagster's database; choose another"
        )
    return DataFolder(folder)


def _ingest(arguments: argparse.Namespace) -> int:
    if arguments.trace_id is not None and len(arguments.dumps) > 1:
        raise WrongCall("--trace-id names one trace; pass one dump with it")
    if arguments.trace_id is not None and not TRACE_ID_PATTERN.fullmatch(arguments.trace_id):
        raise WrongCall(
            f"--trace-id {arguments.trace_id!r:.160}: wanted lower-case letters, digits, `.`, `_`, `-`, at most 128"
        )
    data = _folder(arguments)
    model = None if arguments.model is None else read_model(arguments.model)
    done: list[Ingested] = []
    failures = 0
    for path in arguments.dumps:
        reading = Reading()
        with _Progress(f"ingesting {path.name or name_of(path)}", reading):
            try:
                user = read_user_metadata(path, _said(arguments))
                done.append(
                    ingest(
                        path,
                        data,
                        user,
                        trace_id=arguments.trace_id,
                        model=model,
                        unpacking=_unpacking(arguments),
                        reading=reading,
                    )
                )
            except (MalformedDump, RefusedDump, ContractViolation, MalformedTrace, OSError) as error:
                # The other dumps of the call are still wanted; the exit code tells.
                if len(arguments.dumps) == 1 or arguments.debug:
                    raise
                failures += 1
                print(f"expert-tier: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([_ingested_document(one) for one in done]))
    else:
        for one in done:
            counts = one.metadata.counts
            verb = "written" if one.is_new else "already there"
            print(
                f"{one.metadata.trace_id}: {verb}, {counts.rows:,} rows, {counts.steps:,} steps, "
                f"{counts.selections:,} selections, {counts.accesses:,} accesses → {one.path}"
            )
            for warning in one.warnings:
                print(f"  note: {printable(warning)}")
    return 1 if failures else 0


def _capture(arguments: argparse.Namespace) -> int:
    from replayer.decode_cli import MOST_TOKENS, let_compute_threads_sleep

    data = _folder(arguments)
    if not 2 <= arguments.tokens <= MOST_TOKENS:
        raise WrongCall(f"--tokens {arguments.tokens}, wanted 2 to {MOST_TOKENS:,}: the first comes of the prompt")
    let_compute_threads_sleep()
    # Seconds of import, which other commands do without.
    from pipeline.capture import capture
    from replayer.request import UnusableReplay
    from replayer.seat import NotServed

    captured: list[Ingested] = []
    try:
        with _Progress(f"decoding {name_of(arguments.model)}"):
            dumps = capture(
                arguments.model,
                arguments.prompts,
                arguments.tokens,
                data.dumps,
                dtype=arguments.dtype,
                lookahead=arguments.lookahead,
            )
            captured.extend(ingest(dump, data, read_user_metadata(dump, [])) for dump in dumps)
    except (UnusableReplay, NotServed) as error:
        raise WorkFailed(str(error)) from error
    document = _materialize(data, [one.metadata.trace_id for one in captured])
    if arguments.json:
        print(json.dumps({"captured": [_ingested_document(one) for one in captured], **document}))
        return 0
    for one in captured:
        counts = one.metadata.counts
        print(
            f"{one.metadata.trace_id}: {counts.rows:,} rows, {counts.steps:,} steps, {counts.accesses:,} accesses → "
            f"{one.path}"
        )
        for warning in one.warnings:
            print(f"  note: {printable(warning)}")
    print(f"report: {document['report']}")
    return 0


def _ingested_document(one: Ingested) -> dict[str, Any]:
    counts = one.metadata.counts
    return {
        "trace_id": one.metadata.trace_id,
        "path": str(one.path),
        "rows": counts.rows,
        "selections": counts.selections,
        "accesses": counts.accesses,
        "steps": counts.steps,
        "warnings": one.warnings,
    }


def _inspect(arguments: argparse.Namespace) -> int:
    import tempfile

    if arguments.checks + arguments.layouts + (arguments.dump is not None) != 1:
        raise WrongCall("inspect takes a DUMP, --checks or --layouts, for example: expert-tier inspect my.npz")
    if arguments.layouts:
        names = [{"name": name, "description": description} for name, description in described()]
        lines = [f"{one['name']:<36} {one['description']}" for one in names]
        print(json.dumps(names) if arguments.json else "\n".join(lines))
        return 0
    if arguments.checks:
        print(json.dumps([asdict(check) for check in CHECKS]) if arguments.json else listed())
        return 0
    user = read_user_metadata(arguments.dump, _said(arguments))
    model = None if arguments.model is None else read_model(arguments.model)
    reading, name = Reading(), arguments.dump.name or name_of(arguments.dump)
    counted = None
    if arguments.imatrix is not None:
        from pipeline.dumps.imatrix import compare_counts, imatrix_counts, trace_counts

        # Before the dump is read, which may take long.
        size = arguments.imatrix.stat().st_size
        if not arguments.imatrix.is_file() or not size:
            what = "no regular file" if size else "an empty file"
            raise MalformedDump(f"--imatrix {arguments.imatrix}: {what}, wanted the GGUF that llama-imatrix wrote")
        counted = imatrix_counts(arguments.imatrix)
    with tempfile.TemporaryDirectory(prefix="expert-tier-") as spool, _Progress(f"inspecting {name}", reading):
        verdict = judge(
            arguments.dump, user, Path(spool), model=model, unpacking=_unpacking(arguments), reading=reading
        )
        if counted is not None and verdict.metadata is not None:
            one = ingest(arguments.dump, DataFolder(Path(spool)), user, model=model, unpacking=_unpacking(arguments))
            compared = compare_counts(counted, trace_counts(one.path))
            verdict = replace(
                verdict, checks=[*verdict.checks, *(CheckVerdict(**check.model_dump()) for check in compared)]
            )
    metadata = verdict.metadata
    if arguments.json:
        document = {
            "dump": str(arguments.dump),
            "verdict": verdict.outcome,
            "refusal": None if verdict.refusal is None else str(verdict.refusal),
            "checks": [check.model_dump(mode="json") for check in verdict.checks],
            "unknown": [] if metadata is None else metadata.unknowns,
            "metadata": None if metadata is None else metadata.model_dump(mode="json"),
        }
        print(json.dumps(document))
    else:
        if metadata is not None:
            print("\n".join(map(printable, _described(metadata))))
        print(f"verdict: {verdict.outcome}")
        for check in verdict.checks:
            # Why it is refused is the line on stderr.
            found = f": {check.found}" if check.outcome not in ("refuse", "not_reached") else ""
            print(printable(f"  {check.outcome.replace('_', ' '):<15} {check.name}{found}"))
        for observation in [] if metadata is None else metadata.engine_observations:
            print(f"  the engine's own: {observation.hits:,} hits of {observation.accesses:,} ({observation.meaning})")
    if verdict.refusal is not None:
        raise verdict.refusal
    return 0


def _described(metadata: TraceMetadata) -> list[str]:
    """What a trace is and what is unknown about it, in a few lines."""
    counts, phases = metadata.counts, metadata.counts.rows_by_phase
    experts = sorted(set(metadata.experts_per_layer))
    by_phase = ", ".join(f"{rows:,} {phase}" for phase, rows in phases.items() if rows)
    sizes = [size for layer in range(len(metadata.moe_layer_ids)) for size in metadata.sizes_of_layer(layer) or []]
    size = f"{format_bytes(sum(sizes))} in all, {min(sizes):,}–{max(sizes):,} bytes each" if sizes else "unknown"
    return [
        f"{metadata.trace_id}: {metadata.model or 'model unknown'}, {metadata.source.format} of "
        f"{format_bytes(metadata.source.bytes)}, domain {metadata.domain or 'unknown'}",
        f"  {len(metadata.moe_layer_ids)} MoE layers × {'/'.join(map(str, experts))} experts, top "
        f"{metadata.top_k_observed}; expert bytes: {size}",
        f"  {counts.steps:,} steps ({metadata.pass_boundaries}), {counts.requests:,} requests, {counts.rows:,} rows "
        f"({by_phase}), {counts.accepted_tokens:,} accepted tokens",
        f"  unknown: {', '.join(metadata.unknowns) or 'nothing'}",
    ]


def _export(arguments: argparse.Namespace) -> int:
    data = _folder(arguments)
    trace = _trace_file(data, arguments.trace)
    _check_file_target(data, arguments.out, f"{arguments.trace}.{arguments.format}")
    with _Progress(f"exporting {arguments.trace}"):
        done = export(trace, arguments.format, arguments.out)
    if arguments.json:
        document = {"trace_id": arguments.trace, "format": arguments.format, "out": str(arguments.out)}
        print(json.dumps({**document, "rows": done.rows, "left_out": done.left_out}))
        return 0
    print(f"{arguments.trace}: {done.rows:,} rows as {arguments.format} → {arguments.out}")
    if done.left_out:
        print(f"  note: the layout has no place for {', '.join(done.left_out)}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    data = _folder(arguments)
    there = data.trace_ids()
    # The results of a lab that another machine made, or of replays whose trace has gone, are something to show too.
    if not there and not any(data.results.glob("*/*/*.parquet")):
        raise UnknownTrace(f"no trace in {data.traces}; make one with: expert-tier ingest DUMP")
    stale = [one.trace_id for one in stale_traces(data)]
    wanted = stale if arguments.trace is None else list(dict.fromkeys(arguments.trace))
    missing = [trace_id for trace_id in wanted if trace_id not in there]
    if missing:
        raise WrongCall(f"no trace {missing[0]!r} in {data.traces}; known: {', '.join(there[:5]) or 'none'}")
    document = _materialize(data, wanted)
    if arguments.json:
        print(json.dumps(document))
    else:
        current = len(there) - len(wanted)
        print(
            f"{len(wanted)} traces analysed, {current} unchanged; {sum(document['tables'].values()):,} rows in "
            f"{data.warehouse}"
        )
        print(f"report: {data.report}")
    return 0


def _materialize(
    data: DataFolder, trace_ids: Sequence[str], between: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Analyses traces, does what has to be done before the warehouse is built, and builds it and the report."""
    from pipeline.definitions import materialize_all, materialize_trace
    from warehouse.build import list_relations

    if not os.access(data.root, os.W_OK):
        raise PermissionError(f"{data.root}: not writable, so no results can be kept in it; choose another --data")
    failed = []
    for ordinal, trace_id in enumerate(trace_ids, start=1):
        with _Progress(f"analysing {trace_id} ({ordinal} of {len(trace_ids)})"):
            failed += materialize_trace(data, trace_id)
    between()
    with _Progress("building the warehouse and the report"):
        failed += materialize_all(data)
    if failed:
        first = failed[0]
        where = f"{first.name} of {first.trace_id}" if first.trace_id else first.name
        more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        raise WorkFailed(f"{where}: {first.reason}{more}; all runs are recorded, see: make dev")
    tables = {row["name"]: row["rows"] for row in list_relations(data.root) if row["kind"] == "table"}
    return {
        "traces": list(trace_ids),
        "tables": tables,
        "warehouse": str(data.warehouse),
        "report": str(data.report),
    }


def _lookahead(arguments: argparse.Namespace) -> int:
    from pipeline.lookahead import FIT_FRACTION, TAKES, predict, recall_rows, score_window
    from pipeline.predictors import first_part, parse_fit

    data, predictor = _folder(arguments), arguments.predictor
    taken = TAKES[predictor]
    for option in ("depth", "width", "fit"):
        if getattr(arguments, option) is not None and option not in taken:
            raise WrongCall(f"--{option}, but predictor {predictor} knows none; leave it out")
    for option in ("depth", "width"):
        if getattr(arguments, option) == 0:
            raise WrongCall(f"--{option} 0, wanted at least 1")
    if arguments.out is not None:
        _check_plan_target(data, arguments.out)
    trace = _trace_of(data, arguments.trace)
    if arguments.fit is None:
        fit = first_part(trace, FIT_FRACTION)
    else:
        fit = parse_fit(arguments.fit, trace, functools.partial(_trace_of, data))
    with _Progress(f"predicting {arguments.trace} by {predictor}"):
        found = predict(
            trace, data.trace_file(arguments.trace), predictor, depth=arguments.depth or 1,
            width=arguments.width or trace.top_k, fit=fit, seed=arguments.seed,
        )  # fmt: skip
        # As in the table: what learns nothing is scored on the same events as what learns.
        window = score_window(trace, fit if "fit" in taken else first_part(trace, FIT_FRACTION))
        row = recall_rows(trace, found, window, seed=arguments.seed)[-1]
        if arguments.out is not None:
            write_plan(arguments.out, found.plan, trace)
    if arguments.json:
        document = {name: row[name] for name in TABLES["lookahead_recall"].column_names if name != "layer_id"}
        print(json.dumps({**document, "out": None if arguments.out is None else str(arguments.out)}))
        return 0
    print("\n".join(_recalled(row)))
    if arguments.out is not None:
        print(f"  plan for {int(found.plan.covered.sum()):,} events → {arguments.out}")
    return 0


def _check_plan_target(data: DataFolder, out: Path) -> None:
    """Before any work: a plan takes the place of nothing but a plan."""
    _check_file_target(data, out, "plan.parquet")
    try:
        check_replaceable(out)
    except MalformedPlan as error:
        raise WrongCall(f"--out {error}") from None


def _check_file_target(data: DataFolder, out: Path, example: str) -> None:
    """Before any work: a file outside of what the data folder keeps, in a folder that is there."""
    if not out.name:
        raise WrongCall(f"--out {str(out)!r}, wanted the name of a file, such as {example}")
    try:
        own = data.owner_of(out)
    except RuntimeError as error:
        raise WrongCall(f"--out {out}: {error}; choose another place") from None
    if own is not None:
        raise WrongCall(f"--out {out}: in {own}, which holds what the data folder keeps; choose a place outside of it")
    if out.is_dir():
        raise WrongCall(f"--out {out}: a folder, wanted the name of a file; name one in it, such as {out / example}")
    if out.exists() and not out.is_file():
        raise WrongCall(f"--out {out}: no regular file, wanted the name of one; choose another place")
    if not out.parent.exists():
        raise WrongCall(f"--out {out}: there is no folder {out.parent}; make it first, or choose another place")


def _trace_of(data: DataFolder, trace_id: str) -> Trace:
    return read_trace(_trace_file(data, trace_id))


def _trace_file(data: DataFolder, trace_id: str) -> Path:
    there = data.trace_ids()
    if trace_id not in there:
        known = f"known: {', '.join(there[:5])}" if there else "make one with: expert-tier ingest DUMP"
        raise WrongCall(f"no trace {trace_id[:80]!r} in {data.traces}; {known}")
    return data.trace_file(trace_id)


def _recalled(row: dict[str, Any]) -> list[str]:
    """What a plan names, each ratio beside its parts."""
    distances = [
        f"{row[name]} {noun}{'' if row[name] == 1 else 's'} ahead"
        for name, noun in (("lookahead_layers", "layer"), ("lookahead_steps", "step"))
        if row[name]
    ]
    told = [
        row["predictor"],
        *distances,
        *([] if row["width"] is None else [f"{row['width']} wide"]),
        *([] if row["fit"] is None else [f"fitted on {row['fit']}"]),
        f"seed {row['seed']}",
    ]
    lines = [
        f"{row['trace_id']}: {', '.join(told)}",
        f"  scored: phase {row['phase']}, steps {row['warm_steps']}:{row['step_end']}, {row['events']:,} events",
    ]
    for said, name in (
        ("recall, all events", "recall_all"),
        ("  shuffled", "shuffled_recall_all"),
        ("  by chance", "chance_recall_all"),
        ("recall, covered events", "recall_covered"),
        ("precision", "precision"),
        ("hint coverage", "hint_coverage"),
    ):
        part, whole = COLUMNS[name].ratio or ("", "")
        value = "-" if row[name] is None else f"{row[name]:.4f}"
        lines.append(f"  {said:<24}{value:>8}  {row[part]:>14,.0f} of {row[whole]:,} {whole.replace('_', ' ')}")
    return lines


def _query(arguments: argparse.Namespace) -> int:
    from warehouse.build import list_relations, query

    data = _folder(arguments)
    if arguments.list == (arguments.sql is not None):
        raise WrongCall('query takes either SQL or --list, for example: expert-tier query "SELECT * FROM trace"')
    frame = pl.DataFrame(list_relations(data.root)) if arguments.list else query(data.root, arguments.sql)
    if arguments.format == "json":
        # JSON knows no infinities and no NaN.
        finite = frame.with_columns(pl.when(pl.selectors.float().is_finite()).then(pl.selectors.float()))
        print(json.dumps(finite.to_dicts(), default=str, allow_nan=False))
    elif arguments.format == "csv":
        sys.stdout.write(_flat(frame).write_csv())
    else:
        print(_printed(frame))
    return 0


def _printed(frame: pl.DataFrame) -> str:
    """The frame as a table, or row by row with one value a line where the table would be wider than the terminal."""
    columns = shutil.get_terminal_size(fallback=(160, 24)).columns
    with pl.Config(
        tbl_rows=MAX_ROWS_SHOWN,
        tbl_cols=-1,
        fmt_str_lengths=400,
        tbl_width_chars=10_000,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
    ):
        table = str(frame)
    if frame.width < 2 or all(len(line) <= columns for line in table.splitlines()):
        return table
    longest = max(map(len, frame.columns))
    lines = []
    for number, row in enumerate(frame.head(MAX_ROWS_SHOWN).iter_rows(named=True), start=1):
        lines += [f"── row {number} of {frame.height}", *(f"{name:<{longest}}  {value}" for name, value in row.items())]
    return "\n".join(lines)


def _flat(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with what CSV has no form for (lists, structs, bytes) as JSON or text."""
    columns = []
    for column in frame.iter_columns():
        if column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object):
            texts = [None if value is None else json.dumps(value, default=str) for value in column.to_list()]
            columns.append(pl.Series(column.name, texts, dtype=pl.String))
        else:
            columns.append(column)
    return pl.DataFrame(columns)


def _inversion(arguments: argparse.Namespace) -> int:
    from pipeline.inversion import inversion_sentences, inversion_text, kept_inversion

    with _Progress("replaying a synthetic trace"):
        rows = kept_inversion(_folder(arguments))
    if arguments.json:
        print(json.dumps({"results": rows.to_dicts(), "findings": inversion_sentences(rows)}))
    else:
        print("\n".join(inversion_text(rows)))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from pipeline.report import write_report

    path = write_report(_folder(arguments).root)
    print(json.dumps({"report": str(path)}) if arguments.json else f"report: {path}")
    return 0


def _bundle(arguments: argparse.Namespace) -> int:
    if not is_line(arguments.made_by):
        raise WrongCall(
            f"--made-by {arguments.made_by!r:.60}, wanted the command that remakes the results, as: make lab"
        )
    if arguments.lab is not None and (arguments.trace or arguments.run or arguments.with_traces):
        raise WrongCall("a lab's bundle is all of its runs; leave --trace, --run and --with-traces out, or the LAB_ID")
    data = _folder(arguments)
    return run_bundle(arguments, data, lambda out: _check_file_target(data, out, "results.zip"))


def _unbundle(arguments: argparse.Namespace) -> int:
    data = _folder(arguments)
    for folder in [arguments.folder] if arguments.folder else shipped():
        added = add_bundle(folder, data)
        runs = f"{added.runs:,} {'run' if added.runs == 1 else 'runs'}"
        more = f"{added.lab_id}, {runs}{' added' if added.is_new else ' more'}"
        print(f"{folder.name}: {more if added.runs else 'there already'}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    data = _folder(arguments)
    with resources.as_file(resources.files("pipeline") / "sample") as sample:
        dumps = sorted(sample.glob("*.gz"))
        with _Progress("ingesting the bundled sample"):
            done = [ingest(path, data, read_user_metadata(path)) for path in dumps]
    native = _NativeDemo(data, done[0].metadata.trace_id)
    with compiling_ahead() as compiler:

        def replay() -> None:
            compiler.wait()
            native.replay()

        document = _materialize(data, [one.metadata.trace_id for one in done], replay)
    if arguments.json:
        print(json.dumps({**document, "replays": native.runs, "replay_skipped": native.skipped}))
    else:
        print("\n".join([*_answer(data, done), *native.answer(), *_places(data)]))
    return 0


class _NativeDemo:
    """Native replays of one trace of the sample; where the machine does not allow one, why."""

    def __init__(self, data: DataFolder, trace_id: str) -> None:
        self.data, self.trace_id = data, trace_id
        self.pool: Pool | None = None
        self.runs: list[dict[str, Any]] = []
        self.skipped: str | None = None
        self.unlimited: str | None = None

    def replay(self) -> None:
        """Builds the pool if need be and replays; what stands in the way is kept in words, and raises nothing."""
        try:
            with _Progress("building a pool of files"):
                self.pool = pool_of(self.data, self.trace_id, layout="per-layer")
            _, self.unlimited = usable_mechanism(_DEMO_CONDITIONS.mechanism)
            with _Progress("replaying natively"):
                for documents in replay_all(self.data, self.trace_id, self.pool, _DEMO_CONDITIONS):
                    self.runs += documents
        except (ReplayFailed, MalformedPool, OSError) as error:
            self.skipped = " ".join(str(error).split())

    def answer(self) -> list[str]:
        """Measured device bytes beside simulated miss bytes, a run a line."""
        lines = []
        if self.pool is not None and self.runs:
            first, storage = self.runs[0], storage_of(self.pool.folder)
            pool = f"{format_bytes(int(self.pool.object_bytes.sum()))} in {len(self.pool.files)} files"
            lines += [
                f"native replay of {self.trace_id}, measured: a pool of {pool} on {storage.filesystem},",
                f"owner {first['owner']}, {first['mechanism_detail'] or 'no memory limit'}, steps "
                f"{first['step_begin']}:{first['step_end']} after a warm pass, "
                f"{format_bytes(first['demand_bytes'])} demanded",
                f"  {'capacity':>10}{'resident':>12}{'device bytes':>14}{'simulated LRU misses':>36}",
                f"  {'':>10}{'measured':>12}{'measured':>14}{'at capacity':>18}{'at residency':>18}   proofs",
                *(self._line(run) for run in self.runs),
            ]
        if self.unlimited is not None:
            lines.append(f"  no memory limit: {self.unlimited}")
        if self.skipped is not None:
            lines.append(f"{'no more native runs' if self.runs else 'no native replay'}: {self.skipped}")
        return lines

    def _line(self, run: dict[str, Any]) -> str:
        made = [proof for proof in run["proofs"] if proof["held"] is not None]
        held = sum(proof["held"] for proof in made)
        verdict = f"{held} of {len(made)} proofs held"
        if not run["bytes_valid"]:
            verdict += f"; bytes NOT valid: {run['bytes_reasons']}"
        elif not run["time_valid"]:
            verdict += "; times not valid"
        return (
            f"  {_size(run['capacity_bytes'], 'no limit'):>10}{_size(run['resident_median_bytes']):>12}"
            f"{_size(run['device_bytes']):>14}{_size(run['nominal_miss_bytes']):>18}"
            f"{_size(run['resident_miss_bytes']):>18}   {verdict}"
        )


def _size(size_bytes: int | None, unknown: str = "-") -> str:
    return unknown if size_bytes is None else format_bytes(size_bytes)


_DEMO_POLICIES = ("lru", "sieve", "lfu_gated", "static", "belady_forced", "belady_bypass")
"""Enough for a first look; the table hit_rate has all."""

_DEMO_PREDICTORS = ("previous_token", "conditional", "learned")


def _answer(data: DataFolder, done: Sequence[Ingested]) -> list[str]:
    """The demo's answer in about twenty lines, read from the warehouse like anybody would."""
    from warehouse.build import query

    first = done[0].metadata
    rates = query(data.root, "SELECT * FROM hit_rate").filter(
        pl.col("trace_id") == first.trace_id, pl.col("scope") == "layer", pl.col("semantics") == "event_atomic"
    )
    contract = rates.row(0, named=True)
    capacities = sorted(rates["capacity_experts_total"].unique().to_list())
    pool = sum(first.experts_per_layer)
    lines = [line for one in done for line in _described(one.metadata)]
    lines += [
        "",
        f"simulated hit rate of {first.trace_id}: a cache per layer, {contract['semantics']}, order "
        f"{contract['access_order']},",
        f"phase {contract['phase']}, first {contract['warm_steps']} of {contract['step_end']} steps unscored, "
        f"{contract['accesses']:,} accesses scored; static table fitted on {_fit(rates)}",
        f"  {'policy':<16}" + "".join(f"{f'{number} of {pool} experts':>24}" for number in capacities),
    ]
    for policy in _DEMO_POLICIES:
        of_policy = rates.filter(pl.col("policy") == policy).sort("capacity_experts_total")
        lines.append(
            f"  {policy:<16}" + "".join(f"{row['hit_rate']:>24.3f}" for row in of_policy.iter_rows(named=True))
        )
    recall = query(data.root, "SELECT * FROM lookahead_recall").filter(
        pl.col("trace_id") == first.trace_id, pl.col("layer_id").is_null()
    )
    window = recall.row(0, named=True)
    lines.append(
        f"lookahead of {first.trace_id}: phase {window['phase']}, steps {window['warm_steps']}:{window['step_end']}, "
        "what nobody learned from:"
    )
    lines.append(f"  {'predictor':<16}{'':<28}{'recall':>8}{'precis.':>8}{'covered':>8}")
    nearest = (pl.col("lookahead_layers") <= 1) & pl.col("predictor").is_in(_DEMO_PREDICTORS)
    for row in recall.filter(nearest).sort("predictor", "width").iter_rows(named=True):
        ahead = "next layer" if row["lookahead_layers"] else "next token"
        width = f", {row['width']} named" if row["width"] else ""
        lines.append(
            f"  {row['predictor']:<16}{ahead + width:<28}{row['recall_all']:>8.3f}{row['precision']:>8.3f}"
            f"{row['hint_coverage']:>8.3f}"
        )
    return lines


def _places(data: DataFolder) -> list[str]:
    return [
        "The sample is a toy model: no conclusion about big models follows from these numbers.",
        "kernel lab, as measured elsewhere: expert-tier unbundle, then expert-tier run",
        f"warehouse: {data.warehouse}",
        f"report:    {data.report}",
    ]


def _fit(rates: pl.DataFrame) -> str:
    fits = rates.filter(pl.col("policy") == "static")["fit"].unique().to_list()
    return ", ".join(str(fit) for fit in fits)


class _Progress:
    """A line on a terminal while something runs, with bytes, rate and end time of what is read; silent in a pipe."""

    def __init__(self, what: str, reading: Reading | None = None) -> None:
        self.what, self.reading = what, reading
        self.shown = sys.stderr.isatty()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_Progress":
        self.started = time.monotonic()
        if self.shown:
            print(f"{self.what} …", end="", file=sys.stderr, flush=True)
            if self.reading is not None:
                self._watcher.start()
        return self

    def _watch(self) -> None:
        assert self.reading is not None
        stage, since = "", time.monotonic()
        columns = shutil.get_terminal_size().columns
        while not self._over.wait(PROGRESS_SECONDS):
            if (now := self.reading.stage) != stage:
                stage, since = now, time.monotonic()
            dump = self.reading.dump
            if dump is None:
                continue
            line = f"{self.what}: {reading_text(stage, dump.read_bytes, dump.size_bytes, time.monotonic() - since)}"
            print(f"\r{line[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self.shown:
            self._over.set()
            if self._watcher.is_alive():
                self._watcher.join()
            print(f"\r{self.what}: {time.monotonic() - self.started:.1f} s\x1b[K", file=sys.stderr, flush=True)


PROGRESS_SECONDS = 0.5
"""Between two looks at how far a dump is read."""


def reading_text(stage: str, done: int, size: int, seconds: float, now: datetime | None = None) -> str:
    """How far `done` of `size` stored bytes is, at what rate, and when it ends at that rate."""
    if not done or not seconds:
        return f"{stage}, {format_bytes(size)}"
    if done >= size:
        return f"{stage}, all of {format_bytes(size)} read, not done yet"
    left = (size - done) * seconds / done
    end = (now or datetime.now().astimezone()) + timedelta(seconds=left)
    return (
        f"{stage}, {done / size:.0%} of {format_bytes(size)}, {format_bytes(int(done / seconds))}/s, "
        f"{left:.0f} s left, ends {end:%H:%M:%S}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""

    def work(given: Sequence[str] | None) -> int:
        arguments = _parser().parse_args(given)
        status: int = arguments.function(arguments)
        return status

    wrong_call: tuple[type[Exception], ...] = (WrongCall, WrongMetadata, UnusableRequest)
    failed: tuple[type[Exception], ...] = (
        MalformedDump, RefusedDump, MalformedTrace, MalformedPlan, ContractViolation, UnknownTrace, UnusableBundle,
        UnknownResult,
        WorkFailed, CannotHold,
    )  # fmt: skip
    from warehouse.build import QueryFailed, WarehouseMissing

    return run("expert-tier", work, argv, wrong_call=wrong_call, failed=(*failed, QueryFailed, WarehouseMissing))


if __name__ == "__main__":
    sys.exit(main())
