"""A configuration that can run, and a supervisor that starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environments.in_process import InProcessPool, forgotten_modules
from vcpo_megatron.launch import local
from vcpo_megatron.orchestrator.modes import environment_check


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environments are checked without a process; a test of code that raises or hangs takes the pool back."""
    monkeypatch.setattr(environment_check, "WorkerPool", InProcessPool)
    with forgotten_modules():
        yield


@pytest.fixture
def toml(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that passes every check; the working directory is a folder of its own."""
    path = tmp_path / "job" / "run.toml"
    path.parent.mkdir()
    path.write_text(
        '[model]\npath = "../model"\n[train]\nsteps = 5\ngroups_per_step = 2\ngroup_size = 4\n'
        '[rollout]\nmax_new_tokens = 8\n[environment]\nname = "modular_sum"\n'
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Takes the place of the supervisor; what it was called with."""
    calls: list[dict[str, Any]] = []

    def run(config: Any, directory: Any, options: Any) -> int:
        calls.append({"config": config, "directory": directory.path, "resume": options.resume, "options": options})
        return 7

    monkeypatch.setattr(local, "run", run)
    return calls
