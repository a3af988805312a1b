"""Where a run is kept."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from vcpo_megatron.launch import workspace
from vcpo_megatron.launch.workspace import run_identity
from vcpo_megatron.run.directory import RunDirectory


def test_two_runs_in_one_second_get_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20300101-000000")
    first = workspace.new_run_directory(Path("job/run.toml"))
    first.mkdir(parents=True)
    assert workspace.new_run_directory(Path("job/run.toml")).name == "job-20300101-000000-2"


def test_a_run_is_named_once_and_a_copy_of_it_is_another_run(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    first.path.mkdir()
    name = run_identity(first)
    assert re.fullmatch(r"[0-9a-f]{8}", name) and run_identity(first) == name
    copy = RunDirectory(tmp_path / "copy")
    shutil.copytree(first.path, copy.path)
    assert run_identity(copy) != name and run_identity(copy) == run_identity(copy)
    moved = RunDirectory(tmp_path / "moved")
    first.path.rename(moved.path)
    assert run_identity(moved) == name


@pytest.mark.parametrize("text", ["", "3f9a21c0", "3f9a21c0 x", "3F9A21C0 1", "../../x 1", "3f9a21c0 1 2"])
def test_an_identity_that_was_damaged_is_made_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "identity"
    path.write_text(text)
    name = run_identity(RunDirectory(tmp_path))
    assert re.fullmatch(r"[0-9a-f]{8}", name) and name != "3f9a21c0" and run_identity(RunDirectory(tmp_path)) == name


@pytest.mark.parametrize("name", ["grpo", "a[1]", "grpo-4b", "x*", "grpo.v2"])
def test_the_newest_run_is_one_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Names that begin alike, hold what a pattern would mean, or look like a date are of other runs."""
    monkeypatch.chdir(tmp_path)
    names = ["grpo", "a[1]", "a1", "grpo-4b", "grpo-2", "x*", "xy", "grpo.v2", "grpo-v2", "grpo-20261201-000000"]
    runs = [Path("runs") / f"{other}-2026120{day}-00000{day}" for day in (1, 2) for other in names]
    runs = [*runs, *(path.with_name(f"{path.name}-2") for path in runs), *(Path(f"{path}-copy") for path in runs)]
    for at, path in enumerate(runs):
        path.mkdir(parents=True)
        (path / "resolved.toml").touch()
        os.utime(path / "resolved.toml", (1000 + at, 1000 + at))
    assert workspace.newest_run_directory(Path(f"{name}.toml")).name == f"{name}-20261202-000002-2"
