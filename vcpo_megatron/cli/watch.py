"""``vcpo watch``: a run live in the terminal, from the files of its directory alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .common import DONE, FAILED, add_command, refuse, seconds


def add_watch(commands: Any) -> None:
    """Add ``watch`` to the commands of ``vcpo``."""
    parser = add_command(
        commands,
        "watch",
        _watch,
        help="follow a run in the terminal",
        description="Follow a run in the terminal until it ends, or show one that has ended: step, time left, "
        "accuracy, reward, ESS, rate, KL, staleness, throughput and losses. Reads files of the run directory alone, so "
        "the run may be on another host that shares them. Exit code 0: the run is done, 1: it failed or was stopped.",
        example="vcpo watch runs/first",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=60.0,
        metavar="S",
        help="wait so many seconds for a run directory that is not there yet (default: 60)",
    )


def _watch(args: argparse.Namespace) -> int:
    from ..report.watch import Pace, watch
    from ..run.directory import RunDirectory
    from ..run.errors import ConfigError

    try:
        ended = watch(RunDirectory(args.run_dir), sys.stdout, Pace(directory_s=args.wait))
    except ConfigError as error:
        return refuse(error.problems, FAILED)
    return DONE if ended == "done" else FAILED
