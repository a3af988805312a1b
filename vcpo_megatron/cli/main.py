"""The command ``vcpo``: parse first, import what a command needs after.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration; 129, 130 and 143 stopped by SIGHUP, SIGINT and SIGTERM, 138
by SIGUSR1 or --max-hours, after a checkpoint; 141 the reader of its output went away. A run (``vcpo train``) needs
nobody who reads its output: it goes on without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .common import DONE, INTERRUPTED, PIPE_CLOSED, refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from ..run.output import drop, named_output, open_standard_streams

    open_standard_streams()  # before they are remembered
    stdout, stderr = sys.stdout, sys.stderr
    try:
        with named_output():
            return _run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        drop(stdout)
        drop(stderr)
        return PIPE_CLOSED
    except OSError as error:
        if error.filename == "standard output":
            drop(stdout)
        what = f"{error.filename}: " if error.filename else ""
        return refuse([f"{what}{error.strerror or error}"])
    finally:
        try:
            stderr.flush()
        except (OSError, ValueError):  # there is nowhere to say it
            drop(stderr)


def _run(argv: Sequence[str] | None) -> int:
    try:
        if not (sys.argv[1:] if argv is None else argv):
            _parser().print_help()
            return DONE
        args = _parser().parse_args(argv)
        return int(args.command(args))
    finally:
        sys.stdout.flush()  # here, where a full disk or a reader that went away can still be said


def _parser() -> argparse.ArgumentParser:
    from .. import __version__
    from .compare import add_compare
    from .convert import add_convert
    from .doctor import add_doctor
    from .env import add_env
    from .report import add_report
    from .serve import add_serve
    from .train import add_train
    from .watch import add_watch

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
    add_compare(commands)
    add_watch(commands)
    return parser
