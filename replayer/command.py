"""What the command lines share: one-line errors, exit codes, and byte sizes and fractions as arguments.

Exit codes: 0 done, 1 the work failed (bad data, interrupted), 2 the call was wrong. A traceback only with `--debug`.
"""

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NoReturn

from replayer.quantities import parse_bytes, parse_fraction


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def run(
    prog: str,
    work: Callable[[Sequence[str] | None], int],
    argv: Sequence[str] | None,
    *,
    wrong_call: tuple[type[Exception], ...],
    failed: tuple[type[Exception], ...],
) -> int:
    """Runs `work` and turns what it raises into one line on stderr and an exit code.

    `wrong_call` exceptions exit 2, `failed` ones and OSError exit 1. Anything else is a bug and keeps its traceback.
    """
    arguments = sys.argv[1:] if argv is None else argv
    worded: tuple[type[Exception], ...] = (OSError, *wrong_call, *failed)
    try:
        with terminate_as_interrupt():
            status = work(argv)
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        # The reader of our output has gone; let the interpreter not complain about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; nothing half-written was kept", file=sys.stderr)
        return 1
    except worded as error:
        if "--debug" in arguments:
            raise
        said = _sentence(error)
        print(f"{prog}: {'; '.join(' '.join(printable(line).split()) for line in said.splitlines())}", file=sys.stderr)
        return 2 if isinstance(error, wrong_call) else 1


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends what is going on as Ctrl-C does: with everything released, and what was begun marked or removed."""
    # Only the main thread hears signals, and only it may say what they do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def printable(text: str) -> str:
    """The text with what a terminal would obey, or show as nothing, escaped: names and dumps are anybody's."""
    return "".join(
        one if one.isprintable() or one in " \t" else one.encode("unicode_escape", "backslashreplace").decode()
        for one in text
    )


_HINTS = {
    errno.ENOENT: "check the path",
    errno.EACCES: "give this user the right, or choose another place",
    errno.EPERM: "it needs a right that this user lacks",
    errno.EEXIST: "it is in the way; choose another place",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "a part of the path is a file; choose another",
    errno.ENOSPC: "free some room, or choose another place",
    errno.ELOOP: "the link leads back to itself; name the file itself",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EROFS: "choose another place",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENFILE: "close other programs, or raise fs.file-max",
}


def _sentence(error: Exception) -> str:
    """What an error says; one that the system raised as place, fault and what to do."""
    # A text of our own has no number, or stands where the system's would.
    if not isinstance(error, OSError) or error.errno is None or error.strerror != os.strerror(error.errno):
        return str(error)
    place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    hint = _HINTS.get(error.errno)
    return f"{place}{error.strerror}{f'; {hint}' if hint else ''}"


def byte_size(text: str) -> int:
    """argparse type: a positive size in bytes."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted more than 0 bytes")
    return size


def fraction(text: str) -> Fraction:
    """argparse type: a decimal in [0, 1), kept exact so that floor(f × steps) is what a person expects."""
    try:
        value = parse_fraction(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a number from 0 to below 1")
    return value


def listed(one: Callable[[str], object]) -> Callable[[str], list[object]]:
    """argparse type: a comma-separated list of `one`."""

    def parse(text: str) -> list[object]:
        return [one(part.strip()) for part in text.split(",")]

    return parse


def count(text: str) -> int:
    """argparse type: a whole number below 2^31, not negative."""
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted a whole number below 2^31, not negative")
    return int(text)


def choice(allowed: Sequence[str]) -> Callable[[str], str]:
    """argparse type: one of `allowed`."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted one of {', '.join(allowed)}")
        return text

    return parse


def steps(text: str) -> tuple[int | None, int | None]:
    """argparse type: a half-open range `a:b`, either end may be left out."""
    begin, colon, end = text.partition(":")
    if not colon or not all(
        part == "" or (part.isascii() and part.isdigit() and len(part) < 11) for part in (begin, end)
    ):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted a:b, for example 0:400")
    return int(begin) if begin else None, int(end) if end else None


def split(text: str) -> str | int:
    """`auto`, `none`, or bytes, for argparse."""
    return text if text in ("auto", "none") else byte_size(text)
