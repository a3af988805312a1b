#!/usr/bin/env python3
"""Kills processes of a training run at random, resumes it, and checks that nothing was lost or trained twice.

    python tools/soak.py                  # 30 minutes on the shipped example
    python tools/soak.py --minutes 5 --json
    python tools/soak.py --quick          # one kill of each: learner, orchestrator, server

Learner, orchestrator and server processes get SIGKILL; the run is resumed until the time is over, then stopped by
SIGTERM. Exit code 1 when a trajectory was lost, trained twice, or trained beyond the staleness bound.
"""

from __future__ import annotations

import random

from benchmarks import fault_injection, soak
from benchmarks.tool import progress, run_tool

SETTINGS = ("checkpoint.every=5",)
#: The quick form: one learner rank, so that a start costs fewer imports.
QUICK = ("launch.learner_ranks=1", "parallel.tensor=1", "checkpoint.every=2")


def main() -> int:
    options = fault_injection.fault_parser("soak", __doc__, quick="one kill of each kind, then the end").parse_args()

    def inject(attempts: soak.Attempts, rng: random.Random, seconds: float) -> soak.Account:
        victims = ("learner", "server", "orchestrator")
        faults = soak.soak(attempts, rng, seconds=seconds, victims=victims, say=progress)
        found = soak.account(attempts.directory)
        found.faults = dict(faults)
        return found

    return fault_injection.run_with_faults(options, (*SETTINGS, *(QUICK if options.quick else ())), inject)


if __name__ == "__main__":
    run_tool(main)
