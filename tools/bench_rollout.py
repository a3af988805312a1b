#!/usr/bin/env python3
"""Compares the embedded engine's tokens a second with transformers' batched ``generate``.

    python tools/bench_rollout.py                      # a random Qwen2 of about 200,000 parameters
    python tools/bench_rollout.py --model DIR --json
    python tools/bench_rollout.py --quick              # within a minute

Both sides run on this machine, one after the other in turns, with as many threads as OMP_NUM_THREADS
says (1 unless set). Requests have mixed prompt and answer lengths; 1, 16 and 64 run at a time.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import rollout
from benchmarks.tool import failed, run_tool, tool_parser

#: concurrency -> requests of one run; (full, quick).
REQUESTS = {1: (8, 3), 16: (96, 32), 64: (384, 128)}


def make_random_model(folder: Path) -> None:
    """A Qwen2 of 201,152 random parameters: hidden 64, 2 layers, vocabulary 512."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=373,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def run(model: Path | None, quick: bool, rounds: int) -> dict:
    """Result of all comparisons, as it is printed by --json."""
    from vcpo_megatron.rollout.embedded.errors import ModelError

    with tempfile.TemporaryDirectory(prefix="bench_rollout_") as temporary:
        folder = model or Path(temporary) / "model"
        if model is None:
            make_random_model(folder)
        try:
            baseline = rollout.TransformersBaseline(folder)
        except ModelError as error:
            raise rollout.BenchmarkError(str(error)) from error
        with rollout.engine_server(folder, Path(temporary) / "engine.log", max(REQUESTS)) as url:
            comparisons = [
                rollout.compare(url, baseline, concurrency, counts[quick], rounds, seed=concurrency)
                for concurrency, counts in REQUESTS.items()
            ]
    return {
        "benchmark": "rollout",
        "model": str(model) if model else "random Qwen2",
        "parameters": baseline.parameters,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "rounds": rounds,
        "comparisons": comparisons,
    }


def main() -> int:
    parser = tool_parser("bench_rollout", __doc__, quick="fewer requests and 2 rounds: ends within a minute")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: a random Qwen2 in a temporary one")
    parser.add_argument("--rounds", type=int, help="turns of each side (default: 3, quick: 2)")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 3)
    try:
        result = run(options.model, options.quick, rounds)
    except rollout.BenchmarkError as error:
        return failed(error)
    comparisons = result.pop("comparisons")
    if options.json:
        print(json.dumps({**result, "results": [comparison.as_dict() for comparison in comparisons]}))
        return 0
    print(f"{result['model']}, {result['parameters']:,} parameters, {result['threads']} thread(s), median of {rounds}")
    print(rollout.table(comparisons))
    return 0


if __name__ == "__main__":
    run_tool(main)
