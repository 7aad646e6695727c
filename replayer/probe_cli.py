"""The command `replayer probe`."""

import argparse

from replayer.command import Parser


def add_probe_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds `probe` to the subparsers of a command line."""
