"""What ``tools/soak.py`` and ``tools/chaos.py`` share: their options, a run of the shipped example, and its outcome."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from vcpo_megatron.config.process import ERROR_PREFIX

from .soak import Attempts, SoakError, environment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "modular_sum_cpu" / "run.toml"


class Outcome(Protocol):
    """What an attack came to."""

    @property
    def is_clean(self) -> bool: ...

    def table(self) -> str: ...

    def as_json(self) -> str: ...


def say(line: str) -> None:
    """Progress goes beside the result."""
    print(line, file=sys.stderr, flush=True)


def parser(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Options of the tool ``name``; ``quick``: what its short form does."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, prog=f"tools/{name}.py"
    )
    made.add_argument("--minutes", type=float, default=30.0, help="how long to go on (default: %(default)s)")
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--config", type=Path, default=EXAMPLE, metavar="RUN.toml", help="default: the shipped example")
    made.add_argument("--run-dir", type=Path, metavar="DIR", help="keep the run here (default: a temporary folder)")
    made.add_argument("--seed", type=int, default=0, help="of the choice of victims, faults and times")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(
    options: argparse.Namespace, settings: Sequence[str], attack: Callable[[Attempts, random.Random, float], Outcome]
) -> int:
    """Have ``attack`` at a run for some seconds, print what it came to, and return the exit code: 1 when that is not
    clean, or when the run did not do what the attack needs."""
    environment()
    with tempfile.TemporaryDirectory(prefix="vcpo-attack-") as folder:
        attempts = Attempts(options.config, options.run_dir or Path(folder) / "run", settings)
        try:
            outcome = attack(attempts, random.Random(options.seed), 0.0 if options.quick else 60 * options.minutes)
        except SoakError as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
            return 1
    print(outcome.as_json() if options.json else outcome.table())
    return 0 if outcome.is_clean else 1
