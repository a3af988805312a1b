#!/usr/bin/env python3
"""Seconds and peak memory of ``vcpo convert`` against copying the same bytes, and a projection for 70B and 405B.

python tools/bench_convert.py                 # a synthetic model of 2 GB, 3 rounds
python tools/bench_convert.py --quick         # 0.15 GB, 1 round: within a minute
python tools/bench_convert.py --json --folder /scratch
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import convert
from benchmarks.tool import failed, run_tool, tool_parser

from vcpo_megatron.conversion.errors import ConversionError

_FULL = {
    "vocab_size": 64000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
}
_QUICK = {
    "vocab_size": 16000,
    "hidden_size": 768,
    "intermediate_size": 2688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}


def main() -> int:
    parser = tool_parser("bench_convert", __doc__, quick="a small model and one round: ends within a minute")
    parser.add_argument("--folder", type=Path, help="where to write (four times the model); default: a temporary one")
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel size of the import (default: 2)")
    parser.add_argument("--rounds", type=int, help="turns of each action (default: 3, quick: 1)")
    options = parser.parse_args()
    config = convert.llama_config(**(_QUICK if options.quick else _FULL))
    rounds = options.rounds or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory(prefix="bench_convert_", dir=options.folder) as temporary:
        root = Path(temporary)
        need = 4 * (160 * 10**6 if options.quick else 2 * 10**9)
        if (free := shutil.disk_usage(root).free) < need:
            reason = f"{root} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} are needed; give another with --folder"
            return failed(reason)
        try:
            measured = convert.compare(root, config, rounds, options.tensor)
        except ConversionError as error:
            return failed(error)
    projections = convert.project(config, measured)
    if options.json:
        head = {"benchmark": "convert", "rounds": rounds, "tensor": options.tensor, "bytes": measured[0].bytes}
        print(json.dumps({**head, **convert.as_dict(measured, projections)}))
        return 0
    print(f"synthetic Llama of {measured[0].bytes / 1e9:.2f} GB in bfloat16, median of {rounds}")
    print(convert.table(measured, projections, convert.largest_parameter(config)))
    return 0


if __name__ == "__main__":
    run_tool(main)
