#!/usr/bin/env python3
"""ESS at length under noise between learner and servers, by each way to treat it; a bfloat16 learner's own rounding.

    python tools/bench_mismatch.py
    python tools/bench_mismatch.py --quick                    # short answers: a few seconds
    python tools/bench_mismatch.py --model examples/modular_sum_cpu/model --json

Synthetic answers, half of them of the current version. ``none`` is the whole log ratio, ``recorded`` what
``algorithm.mismatch = "recorded"`` takes; the others are ways to shrink the whole one, which are not offered: those by
age and by token are given what no run knows, and show what such a way could do at best. ``off``: error of the lag over
its size.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks import mismatch
from benchmarks.tool import EXAMPLE, run_tool, tool_parser

STEPS = (1e-6, 1e-5, 1e-4, 1e-3)


def main() -> int:
    parser = tool_parser("bench_mismatch", __doc__, quick="answers of 512 tokens alone")
    parser.add_argument("--answers", type=int, default=512, help="of a batch (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=EXAMPLE.parent / "model", help="folder (default: the example's)")
    options = parser.parse_args()
    lengths = (512,) if options.quick else (512, 2048, 8192)
    noises = (0.031, 0.062)
    scenes = [mismatch.Scene(options.answers, tokens, noise) for tokens in lengths for noise in noises]
    scenes += [
        mismatch.Scene(options.answers, tokens, noise, 0.5, kind)
        for kind in ("dense", "sparse")
        for tokens in lengths
        for noise in noises
    ]
    rows = [(scene, mismatch.outcomes(scene)) for scene in scenes]
    rounding = mismatch.roundings(options.model, STEPS[:1] if options.quick else STEPS)
    if options.json:
        results = [{"scene": asdict(scene), "outcomes": [asdict(one) for one in found]} for scene, found in rows]
        print(json.dumps({"benchmark": "mismatch", "results": results, "rounding": [asdict(r) for r in rounding]}))
        return 0
    print("ESS / N and factor on the learning rate\n" + mismatch.table(rows))
    for one in rounding:
        print(
            f"parameters {one.step:g} apart: bfloat16 is off by {one.at_once:.4f} nats a token (RMS), and by "
            f"{one.between:.4f} differently"
        )
    return 0


if __name__ == "__main__":
    run_tool(main)
