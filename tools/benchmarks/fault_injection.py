"""What ``tools/soak.py`` and ``tools/chaos.py`` share: their options, a run of the shipped example, and its report."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from .soak import Attempts, SoakError, environment
from .tool import EXAMPLE, failed, tool_parser

#: Of a run that goes on until it is ended, and whose servers may die any number of times.
SETTINGS = (
    "train.steps=1000000",
    "train.eval_every=0",
    "observability.tensorboard=false",
    "rollout.max_restarts=1000000",
)


class FaultReport(Protocol):
    """What a run came to in which faults were injected."""

    @property
    def is_clean(self) -> bool: ...

    def table(self) -> str: ...

    def as_json(self) -> str: ...


def fault_parser(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Options of the tool ``name``; ``quick``: what its short form does."""
    parser = tool_parser(name, description, quick=quick)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=EXAMPLE, metavar="RUN.toml", help="default: the shipped example")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep the run here (default: a temporary folder)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims, faults and times")
    return parser


def run_with_faults(
    options: argparse.Namespace,
    settings: Sequence[str],
    inject: Callable[[Attempts, random.Random, float], FaultReport],
) -> int:
    """Have ``inject`` at a run for some seconds, print its report, and return the exit code: 1 when that is not clean,
    or when the run did not do what is needed for it."""
    environment()
    with tempfile.TemporaryDirectory(prefix="vcpo-faults-") as folder:
        attempts = Attempts(options.config, options.run_dir or Path(folder) / "run", (*SETTINGS, *settings))
        try:
            report = inject(attempts, random.Random(options.seed), 0.0 if options.quick else 60 * options.minutes)
        except SoakError as error:
            return failed(error)
    print(report.as_json() if options.json else report.table())
    return 0 if report.is_clean else 1
