#!/usr/bin/env python3
"""Time of a weight update by each transport against the raw transfer of the same bytes, and what the learner waits.

    python tools/bench_sync.py                        # 60M and 500M parameters, float32
    python tools/bench_sync.py --models 60m --json
    python tools/bench_sync.py --quick                # 2M parameters: within a minute

``raw``: a broadcast of the same buckets between two processes (tensor, distributed), or the same bytes written,
fsynced and read (disk). ``extra memory``: what this process, the learner's rank 0, holds at most while it sends, above
its copy of the weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks import sync
from benchmarks.tool import run_tool, tool_parser


def main() -> int:
    parser = tool_parser("bench_sync", __doc__, quick="a small model: ends within a minute")
    parser.add_argument("--models", nargs="+", choices=sync.MODELS, help="default: 60m 500m, quick: 2m")
    parser.add_argument("--bucket-mb", type=float, help="bucket size (default: an eighth of the model)")
    parser.add_argument("--repeats", type=int, help="updates of each kind (default: 7, quick: 3)")
    parser.add_argument("--no-pauses", action="store_true", help="leave out what an update costs answers in flight")
    options = parser.parse_args()
    models = options.models or (["2m"] if options.quick else ["60m", "500m"])
    repeats = options.repeats or (3 if options.quick else 7)
    sizes = {"2m": 1.0, "60m": 32.0, "500m": 256.0}
    results = []
    for name in models:
        bucket = int(1e6 * (options.bucket_mb or sizes[name]))
        with tempfile.TemporaryDirectory(prefix="vcpo-sync-") as folder:
            results.append(
                sync.run(name, Path(folder), bucket_bytes=bucket, repeats=repeats, pauses=not options.no_pauses)
            )
        if not options.json:
            print(sync.table(results[-1]), flush=True)
    if options.json:
        print(json.dumps({"benchmark": "sync", "results": results}))
    return 0


if __name__ == "__main__":
    run_tool(main)
