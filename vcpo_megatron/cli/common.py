"""What all commands share: exit codes, how a command is declared, how problems are said. Imports nothing of ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

DONE, FAILED, BAD_USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

Command = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, run: Command, *, help: str, description: str, example: str
) -> argparse.ArgumentParser:
    """Declare one command; ``run`` gets its arguments and returns the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, epilog=f"example: {example}"
    )
    parser.set_defaults(command=run)
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add ``--set`` to a command that reads a configuration; its values are in ``overrides``."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, as in optimizer.lr=1e-6; repeatable; paths are taken from the working directory",
    )


def positive(text: str) -> int:
    """Type of an argument: an integer of at least 1."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer; give 1 or more")
    return int(text)


def seconds(text: str) -> float:
    """Type of an argument: a finite number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; give 0 or more")
    return value


def refuse(problems: Sequence[str], code: int = BAD_USAGE) -> int:
    """Say each problem in one line on standard error; returns ``code``."""
    from ..config.process import ERROR_PREFIX
    from ..run.text import printable

    for problem in problems:
        print(ERROR_PREFIX + printable(" ".join(problem.split())), file=sys.stderr)
    return code


def note(text: str) -> None:
    """One line on standard error that changes nothing: what a user may want to know."""
    from ..config.process import NOTE_PREFIX
    from ..run.text import printable

    print(NOTE_PREFIX + printable(text), file=sys.stderr)


def lost_output(error: OSError) -> None:
    """``run.output.surviving`` could not write: standard error hears of it, where that is not the one."""
    if error.filename == "standard output":
        note(f"{error.filename} cannot be written ({error.strerror}): the work goes on without it")


def say(text: str) -> None:
    """One line on standard output, whatever names are in it and whatever it can encode."""
    from ..run.text import printable

    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding))
