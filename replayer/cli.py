"""The command line of the standalone replayer: one module per group of commands, put together here."""

import argparse
from collections.abc import Sequence

from replayer.capacity import NotEnforceable
from replayer.command import Parser, run
from replayer.decode_cli import add_decode_command
from replayer.experiment import UnusableExperiment
from replayer.guest import GuestFailed
from replayer.lab_cli import add_lab_command
from replayer.lab_setup import SetupRefused
from replayer.plan import MalformedPlan
from replayer.pool import MalformedPool, PoolMismatch, UnsuitableStorage, UnusablePlan
from replayer.pool_cli import add_pool_commands
from replayer.probe_cli import add_probe_command
from replayer.replay_cli import add_replay_command
from replayer.request import UnusableReplay
from replayer.seat import NotServed
from replayer.simulate import UnusableRequest
from replayer.simulate_cli import add_simulate_commands
from replayer.streams import UnmatchedTraces
from replayer.trace import MalformedTrace


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="replayer", description="Replay and simulate canonical expert traces.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    add_simulate_commands(commands)
    add_pool_commands(commands)
    add_replay_command(commands)
    add_decode_command(commands)
    add_probe_command(commands)
    add_lab_command(commands)
    return parser


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
        wrong_call=(
            UnusableRequest,
            UnmatchedTraces,
            UnusablePlan,
            PoolMismatch,
            UnsuitableStorage,
            UnusableReplay,
            UnusableExperiment,
            NotEnforceable,
        ),
        failed=(MalformedTrace, MalformedPlan, MalformedPool, GuestFailed, SetupRefused, NotServed),
    )
