"""A real pretrained model: SmolLM2-135M-Instruct, made by tools/make_smollm_model.py; VCPO_SMOLLM2 names its folder.

``make test-smollm`` fetches it and runs these tests.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from vcpo_megatron.cli import main as cli
from vcpo_megatron.conversion.logprobs import reference_logprobs
from vcpo_megatron.learner.checkpoint.convert import CheckpointLayout, export_hf, import_hf

from .scenarios import make_config
from .world import run_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("VCPO_SMOLLM2" not in os.environ, reason="VCPO_SMOLLM2 does not name the model's folder"),
    pytest.mark.timeout(2400),
]
ROOT = Path(__file__).parents[2]
TEXTS = (
    "The first law of thermodynamics states that energy can neither be created nor destroyed; it can only be "
    "transformed from one form to another.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ["VCPO_SMOLLM2"])


@pytest.fixture(scope="module")
def checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imported for three tensor-parallel ranks; every other layout reads the same."""
    out = tmp_path_factory.mktemp("smollm") / "checkpoint"
    assert import_hf(folder, out, CheckpointLayout(tensor=3), progress=False) == {}
    return out


def test_the_export_is_bit_equal(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    export_hf(checkpoint, tmp_path / "back", progress=False)
    original, back = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert len(original) == 272 and original.keys() == back.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in original.items())
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert cli.main(["convert", "verify", str(folder), str(checkpoint)]) == 0


def test_log_probs_of_real_text(folder: Path, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    expected = reference_logprobs(folder, prompts)
    assert all(math.exp(-float(row.mean())) < 30 for row in expected)  # perplexity: the model knows these
    for ranks, parallel in ((1, {}), (2, {"pipeline": 2}), (3, {"tensor": 3})):
        config = make_config(folder, ranks, parallel=parallel)
        arguments = {"cases": [(config, str(checkpoint))], "prompts": prompts}
        (scored,) = run_world(ranks, "learner.run_families:logprobs_each", arguments, timeout_s=1200, alone=True)
        for found, wanted in zip(scored, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


def test_three_steps_of_training(folder: Path, tmp_path: Path) -> None:
    """The shipped example: 2 groups of 4, at most 32 new tokens; what it trained is exported as it trains."""
    example, run = ROOT / "examples" / "arithmetic_smollm" / "run.toml", tmp_path / "run"
    settings = (f"model.path={folder}", "checkpoint.export_hf_every=3")
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "vcpo_megatron", "train", str(example), "--run-dir", str(run), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and not any(row["step/skipped"] for row in rows)
    assert rows[-1]["rollouts/trained"] == 24 and all(0 < row["ess/ratio"] <= 1 for row in rows)
    before, after = (load_file(path / "model.safetensors") for path in (folder, run / "exports" / "step_3"))
    assert before.keys() == after.keys()
    moved = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
    assert 0 < moved < 1e-4  # three of Adam's steps at a learning rate of 2e-6
    assert cli.main(["convert", "verify", str(run), str(run / "exports" / "step_3")]) == 0
