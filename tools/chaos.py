#!/usr/bin/env python3
"""Strikes the rollout servers of a training run, and checks that the run goes on and that its account is right.

    python tools/chaos.py                                        # 30 minutes, two embedded servers, 20 faults at least
    python tools/chaos.py --rollout-python ENV/bin/python        # two SGLang servers
    python tools/chaos.py --quick --json                         # each fault once

A server gets SIGKILL, or SIGSTOP, or is made to refuse an update. Exit code 1 when the run ends, when its pace does not
recover, when a trajectory was lost or trained twice or beyond the staleness bound, or when a token's log-prob is not
that of the version that it was recorded under.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vcpo_megatron.benchmarks import chaos, soak  # noqa: E402
from vcpo_megatron.config.process import ERROR_PREFIX  # noqa: E402

EXAMPLE = ROOT / "examples" / "modular_sum_cpu" / "run.toml"
SETTINGS = (
    "train.steps=1000000", "train.eval_every=0", "checkpoint.every=20", "observability.tensorboard=false",
    "launch.learner_ranks=1", "parallel.tensor=1", "rollout.servers=2", "rollout.max_restarts=1000000",
    "rollout.health_interval_s=1", "rollout.health_timeout_s=5", "rollout.sync_timeout_s=20",
)  # fmt: skip
#: A real server starts in a minute or two, and answers a question about its health in a second at least.
SGLANG = ("rollout.engine=sglang", "rollout.start_timeout_s=600", "rollout.health_timeout_s=8")


def say(line: str) -> None:
    """Progress goes beside the result."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/chaos.py"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=20, help="at least so many (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="each fault once, then the end")
    parser.add_argument("--rollout-python", type=Path, metavar="PYTHON", help="SGLang servers under this interpreter")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep the run here (default: a temporary folder)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of servers, faults and times")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    soak.environment()
    settings = SETTINGS
    if options.rollout_python is not None:
        settings += (*SGLANG, f"rollout.python={options.rollout_python.absolute()}")
    with tempfile.TemporaryDirectory(prefix="vcpo-chaos-") as folder:
        attempts = soak.Attempts(EXAMPLE, options.run_dir or Path(folder) / "run", settings)
        try:
            outcome = chaos.chaos(
                attempts, random.Random(options.seed), seconds=0.0 if options.quick else 60 * options.minutes,
                at_least=0 if options.quick else options.faults, say=say,
            )  # fmt: skip
        except soak.SoakError as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
            return 1
    print(outcome.as_json() if options.json else outcome.table())
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
