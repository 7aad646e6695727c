"""The command `replayer probe`: a folder in, lines or one JSON document out."""

import argparse
import dataclasses
import json
from pathlib import Path

from replayer.command import Parser, byte_size
from replayer.machine import machine_row, storage_of
from replayer.probe import Bandwidth, Capability, NothingToRead, probe, read_bandwidth
from replayer.quantities import format_bytes

_EPILOG = """\
examples:
  replayer probe
  replayer probe --pool POOL --expert-bytes 16MiB
  replayer probe --folder /mnt/pools --json

Needs no root and changes nothing. With --pool and --expert-bytes it reads up to 2 GiB of the pool for up to 3 seconds.
"""
_ANSWERS = {True: "yes", False: "no", None: "unknown"}


def add_probe_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds `probe` to the subparsers of a command line."""
    command = commands.add_parser(
        "probe",
        help="what this machine can do for a replay, and what would enable the rest",
        description="Says which mechanisms, counters and read paths work here, why, and what would enable the others.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--folder", type=Path, metavar="DIR", help="where a pool would lie (default: the pool, else the current folder)"
    )
    command.add_argument("--pool", type=Path, metavar="DIR", help="a pool to measure the device's bandwidth on")
    command.add_argument("--expert-bytes", type=byte_size, metavar="B", help="size of one read of that measurement")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=_probe)


def _probe(arguments: argparse.Namespace) -> int:
    folder = arguments.folder or arguments.pool or Path()
    capabilities = probe(folder)
    bandwidth, said = _bandwidth(arguments.pool, arguments.expert_bytes)
    capabilities.append(said)
    row = machine_row(storage_of(folder))
    if arguments.json:
        document = {
            "folder": str(folder.resolve()),
            "machine": row,
            "capabilities": [dataclasses.asdict(capability) for capability in capabilities],
            "bandwidth": None if bandwidth is None else dataclasses.asdict(bandwidth),
        }
        print(json.dumps(document))
        return 0
    print(f"{row['machine_id']}: {row['cpus']} processors ({row['cpu_model'] or row['architecture']})")
    print(
        f"{format_bytes(row['memory_bytes'])} of memory in pages of {format_bytes(row['page_bytes'])}, "
        f"Linux {row['kernel_release']} on {row['architecture']}"
    )
    _print_capabilities(capabilities)
    return 0


def _bandwidth(pool: Path | None, expert_bytes: int | None) -> tuple[Bandwidth | None, Capability]:
    group, name = "storage", "bandwidth at expert size"
    if pool is None or expert_bytes is None:
        return None, Capability(group, name, None, "not measured", "add --pool DIR --expert-bytes B")
    try:
        found = read_bandwidth(pool, expert_bytes)
    except (NothingToRead, OSError) as error:
        return None, Capability(group, name, None, str(error))
    said = (
        f"{found.bytes_per_s / 1e9:.2f} GB/s: {found.reads:,} reads of {format_bytes(expert_bytes)} in "
        f"{found.elapsed_ns / 1e9:.2f} s, {found.method}, {found.threads} threads"
    )
    if found.device_bytes is not None and found.device_bytes < found.read_bytes:
        said += f"; only {format_bytes(found.device_bytes)} of {format_bytes(found.read_bytes)} came from a device"
    return found, Capability(group, name, True, said)


def _print_capabilities(capabilities: list[Capability]) -> None:
    width = max(len(capability.name) for capability in capabilities)
    for group in dict.fromkeys(capability.group for capability in capabilities):
        print(f"\n{group}")
        for one in capabilities:
            if one.group == group:
                # A path may hold bytes that are no text.
                found = one.found.encode(errors="backslashreplace").decode()
                print(f"  {_ANSWERS[one.available]:<7}  {one.name:<{width}}  {found}")
                if one.remedy and not one.available:
                    print(f"  {'':<7}  {'':<{width}}  -> {one.remedy}")
