"""`expert-tier compare`, `verify` and `bundle` of a whole data folder: arguments and what is printed.

What is compared, packed or checked is decided in `compare`, `bundle_file` and `verify`.
"""

import argparse
import json

from pipeline.compare import compare, comparison_document, comparison_text, find_result, read_warehouse
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
