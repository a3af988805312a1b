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
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import attacks, soak  # noqa: E402
from benchmarks.ending import run_tool  # noqa: E402

SETTINGS = (
    "train.steps=1000000",
    "train.eval_every=0",
    "checkpoint.every=5",
    "rollout.max_restarts=1000000",
    "observability.tensorboard=false",
)
#: The quick form: one learner rank, so that a start costs fewer imports.
QUICK = ("launch.learner_ranks=1", "parallel.tensor=1", "checkpoint.every=2")


def main() -> int:
    options = attacks.parser("soak", __doc__, quick="one kill of each kind, then the end").parse_args()

    def attack(attempts: soak.Attempts, rng: random.Random, seconds: float) -> soak.Account:
        victims = ("learner", "server", "orchestrator")
        faults = soak.soak(attempts, rng, seconds=seconds, victims=victims, say=attacks.say)
        found = soak.account(attempts.directory)
        found.faults = dict(faults)
        return found

    return attacks.run(options, (*SETTINGS, *(QUICK if options.quick else ())), attack)


if __name__ == "__main__":
    run_tool(main)
