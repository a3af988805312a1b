"""The GPU checks, as one process: on a GPU where there is one, and their code on CPUs everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcpo_megatron.launch.devices import visible_gpus

SCRIPT = Path(__file__).with_name("run.py")


def run(*arguments: str, timeout_s: float) -> tuple[int, dict[str, dict[str, str]]]:
    command = [sys.executable, str(SCRIPT), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ))
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(lines[-1])["checks"]}


@pytest.mark.gpu
@pytest.mark.timeout(660)
@pytest.mark.skipif(not visible_gpus(), reason="no GPU")
def test_on_a_gpu() -> None:
    code, checks = run(timeout_s=600)
    assert code == 0, [check for check in checks.values() if check["state"] == "failed"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_their_code_on_cpus() -> None:
    """Everything but kernels passes; those say why they are skipped."""
    code, checks = run("--device", "cpu", timeout_s=280)
    assert code == 0, checks
    states = {name: check["state"] for name, check in checks.items()}
    assert states == {
        "oracle in float32": "passed",
        "oracle in bfloat16": "passed",
        "packed as one by one": "passed",
        "modes agree": "passed",
        "memory and time of a step": "passed",
        "fused adam": "skipped",
        "fused weight gradients": "skipped",
        "attention of TransformerEngine": "skipped",
        "layers of TransformerEngine": "skipped",
    }
    assert {checks[f"{part} of TransformerEngine"]["text"] for part in ("attention", "layers")} == {"needs a GPU"}


def test_without_a_gpu_it_says_so() -> None:
    if visible_gpus():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("no GPU: ")
