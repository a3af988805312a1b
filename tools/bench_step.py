#!/usr/bin/env python3
"""Time and memory of one learner step: plain, the four modes of VCPO's baseline, and the reference.

    tools/bench_step.py --quick                                     a small model, within a minute
    tools/bench_step.py --model 60M --median 64 512                 8 groups of 8, every mode, three rounds
    tools/bench_step.py --model 10M 60M --curve                     over answer lengths, about 4,096 tokens a step
    tools/bench_step.py --curve 64,1024 --ways deferred --rounds 5  parts of it
    tools/bench_step.py --rewards binary                            right or wrong: few rewards for many trajectories
    tools/bench_step.py --json                                      one JSON object; progress goes to stderr

Every contender steps in turn (A B C, A B C); ratios are medians of ratios inside a round; on CPUs seconds are
processor time. "roofline" is what a mode takes at least beyond a plain step: its FLOPs and bytes at the rates of
products and additions measured between the rounds. Memory is the high-water mark of live torch storages in a step, not
RSS.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.step import (
    CONTENDERS,
    SHAPES,
    Bench,
    StepComparison,
    Workload,
    curves,
    join_world_of_one,
    prepare,
    table,
)
from benchmarks.tool import run_tool, tool_parser

#: Answer tokens of a step of the curve, roughly: groups of at most 8, and at least two trajectories.
CURVE_TOKENS = 4096
CURVE = "64,128,256,512,1024,2048,4096"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = tool_parser("bench_step", __doc__, quick="1M model, 2 groups of 4, median 64, 2 rounds")
    parser.add_argument("--model", choices=sorted(SHAPES), default=["10M"], nargs="+", help="one after another")
    parser.add_argument("--median", type=int, default=[512], nargs="+", help="median answer lengths")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rewards", choices=("distinct", "binary"), default="distinct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pack-tokens", type=int, default=4096)
    parser.add_argument("--ways", default=",".join(CONTENDERS), help="contenders; plain is always one")
    parser.add_argument(
        "--curve",
        default="",
        nargs="?",
        const=CURVE,
        metavar="LENGTHS",
        help=f"in place of --median and groups: the same number of tokens at every median length; default {CURVE}",
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.ways.split(",")) - set(CONTENDERS):
        parser.error(f"--ways: unknown {', '.join(sorted(unknown))}; known are {', '.join(CONTENDERS)}")
    return arguments


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """What is to be measured, in order."""
    if arguments.quick:
        return [Workload("1M", 64, 2, 4, rewards=arguments.rewards)]
    cases = [(median, arguments.groups, arguments.group_size) for median in arguments.median]
    if arguments.curve:
        lengths = [int(length) for length in arguments.curve.split(",")]
        cases = [(n, max(1, CURVE_TOKENS // (8 * n)), max(2, min(8, CURVE_TOKENS // n))) for n in lengths]
    return [
        Workload(model, *case, arguments.pack_tokens, rewards=arguments.rewards)
        for model in arguments.model
        for case in cases
    ]


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    contenders = ["plain", *(name for name in arguments.ways.split(",") if name != "plain")]
    rounds = 2 if arguments.quick else arguments.rounds
    prepare()
    results: list[StepComparison] = []
    for work in workloads(arguments):
        join_world_of_one()
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), work, contenders)
            file = sys.stderr if arguments.json else sys.stdout
            results.append(bench.compare(rounds, lambda line, file=file: print(line, file=file, flush=True)))
            bench.close()
        if not arguments.json:
            print(table(results[-1]), flush=True)
    if not arguments.json:
        print(curves(results), end="")
    else:
        print(json.dumps({"benchmark": "step", "results": [result.as_json() for result in results]}))
    return 0


if __name__ == "__main__":
    run_tool(lambda: main(sys.argv[1:]))
