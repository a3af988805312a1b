"""What tests of commands share: run directories as earlier starts left them, what was said, a process without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcpo_megatron.config.load import dump_resolved, load_config, load_resolved, written
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.run.directory import Manifest, RunDirectory

ROOT = Path(__file__).parents[2]

WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "megatron", "transformers"}:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
from vcpo_megatron.cli.main import main
code = main(sys.argv[1:])
sys.exit(code)
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def store(directory: Path, toml: Path, *overrides: str) -> Path:
    """A run directory as an earlier start left it."""
    directory.mkdir(parents=True)
    (directory / "resolved.toml").write_text(dump_resolved(load_config(toml, overrides)))
    return directory


def done(directory: Path, step: int, rows: str) -> None:
    """A complete checkpoint after ``step`` steps, by the configuration that is there, and store and rows of the run."""
    run = RunDirectory(directory)
    values = written(load_resolved(run.resolved))
    run.checkpoint(step).mkdir(parents=True)
    manifest = Manifest(step=step, attempt=1, version_number=step, learner={}, orchestrator={}, config=values)
    run.complete(step, manifest)
    run.metrics.write_text(rows)
    with RolloutStore(run.store):
        pass


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("vcpo: error: ") for line in lines)
    return [line.removeprefix("vcpo: error: ") for line in lines]
