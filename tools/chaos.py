#!/usr/bin/env python3
"""Injects faults into the rollout servers of a training run, and checks that it goes on and that its account is right.

    python tools/chaos.py                                        # 30 minutes, two embedded servers, 20 faults at least
    python tools/chaos.py --rollout-python ENV/bin/python        # two SGLang servers
    python tools/chaos.py --quick --json                         # each fault once

A server gets SIGKILL, or SIGSTOP, or is made to refuse an update. Exit code 1 when the run ends, when its pace does not
recover, when a trajectory was lost or trained twice or beyond the staleness bound, or when a token's log-prob is not
that of the version that it was recorded under.
"""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks import chaos, fault_injection, soak
from benchmarks.tool import progress, run_tool

SETTINGS = (
    "checkpoint.every=20",
    "launch.learner_ranks=1",
    "parallel.tensor=1",
    "rollout.servers=2",
    "rollout.health_interval_s=1",
    "rollout.health_timeout_s=5",
    "rollout.sync_timeout_s=20",
)
#: A real server starts in a minute or two, and answers a question about its health in a second at least.
SGLANG = ("rollout.engine=sglang", "rollout.start_timeout_s=600", "rollout.health_timeout_s=8")


def main() -> int:
    parser = fault_injection.fault_parser("chaos", __doc__, quick="each fault once, then the end")
    parser.add_argument("--faults", type=int, default=20, help="at least so many (default: %(default)s)")
    parser.add_argument("--rollout-python", type=Path, metavar="PYTHON", help="SGLang servers under this interpreter")
    options = parser.parse_args()
    settings = SETTINGS
    if options.rollout_python is not None:
        settings += (*SGLANG, f"rollout.python={options.rollout_python.absolute()}")

    def inject(attempts: soak.Attempts, rng: random.Random, seconds: float) -> chaos.ChaosReport:
        at_least = 0 if options.quick else options.faults
        return chaos.chaos(attempts, rng, seconds=seconds, at_least=at_least, say=progress)

    return fault_injection.run_with_faults(options, settings, inject)


if __name__ == "__main__":
    run_tool(main)
