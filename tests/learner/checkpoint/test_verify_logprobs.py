"""``vcpo convert verify`` by log-probs: transformers for a folder, Megatron for a checkpoint, HTTP for a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.rollout import engine_server
from safetensors.torch import load_file, save_file

from tests.messages import assert_names
from vcpo_megatron.conversion.verify import compare_logprobs
from vcpo_megatron.learner.checkpoint.convert import CheckpointLayout, import_hf

from ..families import make_family

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen2-tied-yarn", tmp_path_factory.mktemp("model") / "hf")


def verify(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vcpo_megatron", "convert", "verify", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=400)


def changed(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"] += 0.01
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.timeout(900)
def test_folder_and_checkpoint(folder: Path, tmp_path: Path) -> None:
    import_hf(folder, tmp_path / "checkpoint", CheckpointLayout(tensor=2), vocab_multiple=8, progress=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"tokens": [(5 * i) % 37 for i in range(300)]}) + "\n")
    import_hf(folder, tmp_path / "other", CheckpointLayout(pipeline=2), vocab_multiple=16, progress=False)
    said = {}
    for a, b in ((folder, "checkpoint"), ("checkpoint", folder), ("checkpoint", "other")):
        done = verify(tmp_path / a, tmp_path / b, "--logprobs", "--prompts", prompts)
        # torch built for CUDA says itself that this host has none
        said_wrong = [line for line in done.stderr.splitlines() if "torch/utils/cpp_extension.py" not in line]
        assert (done.returncode, said_wrong) == (0, []), done.stdout + done.stderr
        assert "tensors, " in done.stdout and "log-probs of 1 prompts: equal to" in done.stdout
        said[str(a), str(b)] = done.stdout
    assert said[str(folder), "checkpoint"] == said["checkpoint", str(folder)]  # the same numbers, too
    assert "equal to 0 (" in said["checkpoint", "other"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", "0.02"), ("bfloat16", "0.05")])
def test_every_dtype_of_an_import(folder: Path, tmp_path: Path, dtype: str, tolerance: str) -> None:
    import_hf(folder, tmp_path / "narrow", CheckpointLayout(), dtype=dtype, vocab_multiple=8, progress=False)
    done = verify(folder, tmp_path / "narrow", "--cast", "--logprobs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"(at most {tolerance})" in done.stdout
    assert verify(folder, tmp_path / "narrow", "--cast", "--logprobs", "--tolerance", "0").returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_server(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "changed")
    with engine_server(folder, tmp_path / "log", 4) as url:
        assert verify(folder, url).returncode == 0
        done = verify(other, url)
        assert done.returncode == 1 and "A and B differ: prompt 0, token " in done.stdout
    for address, cause in ((url, "Connect"), ("http://", "this is no address"), ("http://127.0.0.1:x", "no address")):
        done = verify(folder, address)
        assert done.returncode == 1 and "could not score the prompts" in done.stderr and cause in done.stderr


def test_the_first_difference_is_named() -> None:
    a, b = [torch.tensor([-1.0, -2.0, -3.0])], [torch.tensor([-1.0, -2.5, -2.0])]
    assert compare_logprobs(a, a, 1e-6) == 0.0
    first = "prompt 0, token 2: log-prob -2.000000 in A"
    assert_names(compare_logprobs(a, b, 0.1), first, "-2.500000 in B", "(2 of 3 tokens", "0.1)")
    assert compare_logprobs(a, b, 1.0) == 1.0
    assert "differ" in str(compare_logprobs(a, [torch.tensor([float("nan"), -2.0, -3.0])], 1.0))
