"""`expert-tier compare`, `verify` and `bundle` of a whole data folder: arguments and what is printed.

What is compared, packed or checked is decided in `compare`, `bundle_file` and `verify`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from pipeline.bundle import UnusableBundle, write_bundle
from pipeline.compare import compare, comparison_document, comparison_text, find_result, read_warehouse
from pipeline.pack import write_bundle_file
from replayer.command import printable
from schemas.files import DataFolder


def add_compare(command: argparse.ArgumentParser) -> None:
    """Arguments of `expert-tier compare`."""
    for letter in "ab":
        command.add_argument(
            letter, metavar=letter.upper(),
            help="run_id, condition_hash or cell_hash, or its first characters; or COLUMN=VALUE,… of one row of "
            "hit_rate, or RELATION:COLUMN=VALUE,…",
        )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON document")


def run_compare(arguments: argparse.Namespace, data: DataFolder) -> int:
    """Prints the comparison; its exit code is 0 whether they are comparable or not: it says so."""
    read = read_warehouse(data.root)
    found = compare(find_result(arguments.a, read), find_result(arguments.b, read))
    if arguments.json:
        print(json.dumps(comparison_document(found), allow_nan=False))
    else:
        print("\n".join(map(printable, comparison_text(found))))
    return 0


def add_bundle_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of `expert-tier bundle`."""
    command.add_argument(
        "lab",
        nargs="?",
        metavar="LAB_ID",
        help="a lab's results alone, as a folder (default: all results, as one file)",
    )
    command.add_argument("--out", type=Path, required=True, metavar="PATH", help="the file, or the folder of a lab")
    command.add_argument("--made-by", required=True, metavar="COMMAND", help="what remakes the results")
    command.add_argument("--trace", nargs="+", action="extend", metavar="ID", help="results of these traces alone")
    command.add_argument("--run", nargs="+", action="extend", metavar="RUN_ID", help="these native runs alone")
    command.add_argument("--with-traces", action="store_true", help="pack the traces themselves, too")
    command.add_argument("--json", action="store_true", help="print one JSON document")


def run_bundle(arguments: argparse.Namespace, data: DataFolder, check_target: Callable[[Path], None]) -> int:
    """Packs a lab into a folder, or everything into a file.

    check_target: refuses what no file may take the place of.
    """
    if arguments.lab is not None:
        rows = write_bundle(data, arguments.lab, arguments.out, made_by=arguments.made_by)
        if arguments.json:
            print(json.dumps({"out": str(arguments.out), "lab_id": arguments.lab, "rows": rows}))
        else:
            print(f"{arguments.out}: {rows['replay_run']:,} runs of {arguments.lab}")
        return 0
    check_target(arguments.out)
    packed = write_bundle_file(
        data,
        arguments.out,
        made_by=arguments.made_by,
        trace_ids=arguments.trace,
        run_ids=arguments.run,
        with_traces=arguments.with_traces,
    )
    manifest = packed.manifest
    if arguments.json:
        said = manifest.model_dump(mode="json")
        print(json.dumps({"out": str(arguments.out), "bytes": packed.bytes, "sha256": packed.sha256, "manifest": said}))
        return 0
    rows_of_tables = {name: member.rows for name, member in manifest.members.items() if member.rows is not None}
    with_them = sum(trace.packed for trace in manifest.traces)
    print(
        f"{arguments.out}: {sum(rows_of_tables.values()):,} rows of {len(rows_of_tables)} tables, "
        f"{len(manifest.traces)} traces named, {with_them} packed, {packed.bytes:,} bytes"
    )
    print(f"  SHA-256 {packed.sha256}; check it elsewhere with: expert-tier verify {arguments.out.name}")
    return 0


def add_verify(command: argparse.ArgumentParser) -> None:
    """Arguments of `expert-tier verify`."""
    command.add_argument("bundle", type=Path, metavar="BUNDLE", help="a file that expert-tier bundle wrote")
    command.add_argument(
        "--all", action="store_true", help="also what is sampled otherwise, and simulations on traces of any size"
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")


def run_verify(arguments: argparse.Namespace, data: DataFolder) -> int:
    """Prints every check; exit code 1 if one failed."""
    if arguments.bundle.is_dir():
        raise UnusableBundle(
            f"{arguments.bundle}: a folder, as a lab's bundle is; add it to a data folder with: expert-tier unbundle, "
            "then pack that with: expert-tier bundle --out FILE"
        )
    # Simulators and predictors are loaded by nothing else here.
    from pipeline.verify import verified_document, verified_text, verify_bundle

    found = verify_bundle(arguments.bundle, data, everything=arguments.all)
    if arguments.json:
        print(json.dumps(verified_document(arguments.bundle, found)))
    else:
        print("\n".join(map(printable, verified_text(arguments.bundle, found))))
    return 1 if found.count(False) else 0
