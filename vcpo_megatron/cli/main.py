"""The command ``vcpo``: parse first, import what a command needs after.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration; 129, 130 and 143 stopped by SIGHUP, SIGINT and SIGTERM, 138
by SIGUSR1 or --max-hours, after a checkpoint; 141 the reader of its output went away.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from .common import INTERRUPTED, PIPE_CLOSED, refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        try:
            args = _parser().parse_args(argv)
            return args.command(args)
        finally:
            sys.stdout.flush()  # here, where a full disk or a reader that went away can still be said
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        _drop_output()
        return refuse([f"{error.filename or 'standard output'}: {error.strerror}"])


def _drop_output() -> None:
    """What standard output still holds cannot be written; the interpreter must not try again at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stand-in without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    from .. import __version__
    from .convert import add_convert
    from .doctor import add_doctor
    from .env import add_env
    from .report import add_report
    from .serve import add_serve
    from .train import add_train

    parser = argparse.ArgumentParser(
        prog="vcpo",
        description="Asynchronous reinforcement learning of language models on Megatron-core, with VCPO.",
        epilog="example: vcpo train examples/modular_sum_cpu/run.toml",
    )
    parser.add_argument("--version", action="version", version=f"vcpo {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_train(commands)
    add_serve(commands)
    add_convert(commands)
    add_doctor(commands)
    add_env(commands)
    add_report(commands)
    return parser
