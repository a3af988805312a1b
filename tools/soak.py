#!/usr/bin/env python3
"""Kills processes of a training run at random, resumes it, and checks that nothing was lost or trained twice.

    python tools/soak.py                  # 30 minutes on the shipped example
    python tools/soak.py --minutes 5 --json
    python tools/soak.py --quick          # one kill of each: learner, orchestrator, server

Learner, orchestrator and server processes get SIGKILL; the run is resumed until the time is over, then stopped by
SIGTERM. Exit code 1 when a trajectory was lost, trained twice, or trained beyond the staleness bound.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vcpo_megatron.benchmarks import soak  # noqa: E402
from vcpo_megatron.config.process import ERROR_PREFIX  # noqa: E402

EXAMPLE = ROOT / "examples" / "modular_sum_cpu" / "run.toml"
SETTINGS = ("train.steps=1000000", "train.eval_every=0", "checkpoint.every=5", "rollout.max_restarts=1000000",
            "observability.tensorboard=false")  # fmt: skip
#: The quick form: one learner rank, so that a start costs fewer imports.
QUICK = ("launch.learner_ranks=1", "parallel.tensor=1", "checkpoint.every=2")


def say(line: str) -> None:
    """Progress goes beside the result."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/soak.py"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one kill of each kind, then the end")
    parser.add_argument("--config", type=Path, default=EXAMPLE, metavar="RUN.toml", help="default: the shipped example")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep the run here (default: a temporary folder)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims and times")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    soak.environment()
    settings = (*SETTINGS, *(QUICK if options.quick else ()))
    with tempfile.TemporaryDirectory(prefix="vcpo-soak-") as folder:
        attempts = soak.Attempts(options.config, options.run_dir or Path(folder) / "run", settings)
        try:
            faults = soak.soak(
                attempts, random.Random(options.seed), seconds=0.0 if options.quick else 60 * options.minutes,
                victims=("learner", "server", "orchestrator"), say=say,
            )  # fmt: skip
        except soak.SoakError as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
            return 1
        found = soak.account(attempts.directory)
    found.faults = dict(faults)
    print(soak.as_json(found) if options.json else soak.table(found))
    return 0 if found.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
