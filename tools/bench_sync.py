#!/usr/bin/env python3
"""Time of each way of weights to a server against the bare transfer of the same bytes, and what the learner waits.

    python tools/bench_sync.py                        # 60M and 500M parameters, float32
    python tools/bench_sync.py --models 60m --json
    python tools/bench_sync.py --quick                # 2M parameters: within a minute

``bare``: a broadcast of the same buckets between two processes (tensor, distributed), or the same bytes written,
fsynced and read (disk). ``extra memory``: what this process, the learner's rank 0, holds at most while it sends, above
its copy of the weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import sync  # noqa: E402
from benchmarks.ending import run_tool  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/bench_sync.py"
    )
    parser.add_argument("--models", nargs="+", choices=sync.MODELS, help="default: 60m 500m, quick: 2m")
    parser.add_argument("--bucket-mb", type=float, help="bucket size (default: an eighth of the model)")
    parser.add_argument("--repeats", type=int, help="updates of each kind (default: 7, quick: 3)")
    parser.add_argument("--no-pauses", action="store_true", help="leave out what an update costs answers in flight")
    parser.add_argument("--quick", action="store_true", help="a small model: ends within a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
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
