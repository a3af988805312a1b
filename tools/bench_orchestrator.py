#!/usr/bin/env python3
"""What the orchestrator costs a trajectory and a token, with 10,000 trajectories in flight on one core.

    python tools/bench_orchestrator.py
    python tools/bench_orchestrator.py --trajectories 40000 --json
    python tools/bench_orchestrator.py --quick         # 1,000 of them: within a minute

The servers are processes that compute nothing. The costs of a trajectory must not depend on how many are in flight:
they are measured for a quarter of them as well, and ``growth`` is the ratio.
"""

from __future__ import annotations

import json

from benchmarks import orchestrator
from benchmarks.tool import failed, run_tool, tool_parser

from vcpo_megatron.rollout.client.http import allow_connections

SHORT, LONG = 32, 512


def main() -> int:
    parser = tool_parser("bench_orchestrator", __doc__, quick="fewer trajectories: ends within a minute")
    parser.add_argument("--trajectories", type=int, help="in flight together (default: 10,000, quick: 1,000)")
    options = parser.parse_args()
    count = options.trajectories or (1000 if options.quick else 10_000)
    if (problem := allow_connections(count)) is not None:  # the processes that are started inherit what it allows
        return failed(problem)
    cases = [(count // 4, SHORT), (count, SHORT), (count, LONG)]
    fewer, short, long = (orchestrator.measure_apart(max(8, n // 8 * 8), tokens) for n, tokens in cases)
    token_s, growth = orchestrator.per_token(short, long), short.seconds_each / fewer.seconds_each
    if options.json:
        print(
            json.dumps(
                {
                    "benchmark": "orchestrator",
                    "seconds_per_trajectory": short.seconds_each,
                    "seconds_per_token": token_s,
                    "growth": growth,
                    "results": [result.as_dict() for result in (fewer, short, long)],
                }
            )
        )
    else:
        print(orchestrator.table([fewer, short, long]))
        print(
            f"processor time: {1e3 * short.seconds_each:.2f} ms a trajectory of {SHORT} tokens, {1e6 * token_s:.2f} us "
            f"a further token; growth {growth:.2f} from {fewer.trajectories} to {short.trajectories} in flight"
        )
    return 0


if __name__ == "__main__":
    run_tool(main)
