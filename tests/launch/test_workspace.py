"""Where a run is kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from vcpo_megatron.launch import workspace


def test_two_runs_in_one_second_get_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20300101-000000")
    first = workspace.new_run_directory(Path("job/run.toml"))
    first.mkdir(parents=True)
    assert workspace.new_run_directory(Path("job/run.toml")).name == "job-20300101-000000-2"
