#!/usr/bin/env python3
"""Groups of rollouts a minute that the store makes durable on one core, and what limits it.

    python tools/bench_store.py                       # groups of 8 x 512 tokens
    python tools/bench_store.py --tokens 4096 --json
    python tools/bench_store.py --quick               # within a minute
    python tools/bench_store.py --dir /scratch        # on the disk that runs will be on

``writers`` is the number of trajectories that end at the same time: what ends while a transaction is written shares
the next one and its fsync. The last line is of a run's own pace: trajectories that end evenly, 2,000 groups a minute.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import store
from benchmarks.tool import run_tool, tool_parser

WRITERS = (1, 8, 64)


def main() -> int:
    parser = tool_parser("bench_store", __doc__, quick="fewer groups: ends within a minute")
    parser.add_argument("--groups", type=int, help="groups to write each time (default: 1,000, quick: 80)")
    parser.add_argument("--size", type=int, default=8, help="trajectories of a group (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a trajectory (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: that of temporary files)")
    options = parser.parse_args()
    groups = options.groups or (80 if options.quick else 1000)
    with tempfile.TemporaryDirectory(prefix="vcpo-store-", dir=options.dir) as folder, store.one_core():
        fsync_s = store.fsync_seconds(Path(folder))
        results = [
            store.measure(Path(folder), groups=groups, size=options.size, tokens=options.tokens, writers=writers)
            for writers in WRITERS
        ]
        offered = store.offer(
            Path(folder), groups=groups, size=options.size, tokens=options.tokens, groups_per_minute=store.TARGET
        )
    if options.json:
        print(
            json.dumps(
                {
                    "benchmark": "store",
                    "size": options.size,
                    "tokens": options.tokens,
                    "fsync_s": fsync_s,
                    "target_groups_per_minute": store.TARGET,
                    "results": [result.as_dict() for result in results],
                    "offered": asdict(offered),
                }
            )
        )
    else:
        print(f"groups of {options.size} x {options.tokens} tokens, {groups} each time")
        print(store.table(results, offered, fsync_s))
    return 0


if __name__ == "__main__":
    run_tool(main)
