"""Calls the command lines in this process, as their users would. No test cases live here."""

import pytest

from pipeline import cli
from replayer import cli as replayer_cli


def expert_tier(capsys: "pytest.CaptureFixture[str]", *arguments: object) -> tuple[int, str, str]:
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def replayer(capsys: "pytest.CaptureFixture[str]", *arguments: object) -> tuple[int, str, str]:
    try:
        status = replayer_cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err
