#!/usr/bin/env python3
"""Adaptive staleness against the fixed bound: the same example, trained for the same seconds.

    python tools/bench_staleness.py                            # 120 s of training each, 2 seeds
    python tools/bench_staleness.py --seconds 600 --seeds 4 --json
    python tools/bench_staleness.py --quick                    # within a minute
    python tools/bench_staleness.py --set optimizer.lr=3e-3    # where the fixed bound is hard on the policy

Runs alternate, so that a machine that grows slower is slower for both. Nothing else should run beside them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks import soak, staleness
from benchmarks.tool import EXAMPLE, failed, progress, run_tool, tool_parser

SETTINGS = (
    "train.steps=1000000",
    "optimizer.schedule=constant",
    "checkpoint.every=0",
    "observability.tensorboard=false",
    "launch.learner_ranks=1",
    "parallel.tensor=1",
)


def main() -> int:
    parser = tool_parser("bench_staleness", __doc__, quick="one short run of each: ends within a minute")
    parser.add_argument("--seconds", type=float, help="of training, each run (default: 120, quick: 8)")
    parser.add_argument("--seeds", type=int, help="runs of each kind (default: 2, quick: 1)")
    example = {"type": Path, "default": EXAMPLE, "metavar": "RUN.toml"}
    parser.add_argument("--config", **example, help="default: the shipped example")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="settings", help="override a key")
    options = parser.parse_args()
    seconds = options.seconds or (8.0 if options.quick else 120.0)
    seeds = range(options.seeds or (1 if options.quick else 2))
    soak.environment()
    with tempfile.TemporaryDirectory(prefix="vcpo-staleness-") as folder:
        try:
            found = staleness.compare(
                seconds,
                seeds,
                options.config,
                Path(folder),
                [*SETTINGS, *options.settings],
                say=progress,
            )
        except soak.SoakError as error:
            return failed(error)
    if options.json:
        print(json.dumps({"benchmark": "staleness", "results": [outcome.as_dict() for outcome in found]}))
    else:
        print(staleness.table(found))
    return 0


if __name__ == "__main__":
    run_tool(main)
