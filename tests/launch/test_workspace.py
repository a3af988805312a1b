"""Where a run is kept."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.messages import assert_said
from vcpo_megatron.launch import workspace
from vcpo_megatron.launch.workspace import RunDirectoryError, chosen_checkpoint, run_identity
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.run.history import record


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


def begun(path: Path, *, steps: int, every: str = "10") -> RunDirectory:
    """A run of ``steps`` steps that has no checkpoint, but the folder of one whose save was interrupted."""
    directory = RunDirectory(path)
    path.mkdir()
    directory.make_checkpoints()
    record(directory, attempt=1, step=None, values={"checkpoint.every": every})
    directory.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(steps)))
    if steps >= 10:
        directory.checkpoint(10).mkdir()
    return directory


@pytest.mark.parametrize(
    ("steps", "every"), [(0, "10"), (9, "10"), (20, "10"), (500, "0"), (90, "x"), (90, "9" * 5000)]
)
def test_a_run_that_may_have_completed_no_checkpoint_starts_over(tmp_path: Path, steps: int, every: str) -> None:
    assert chosen_checkpoint(begun(tmp_path / "run", steps=steps, every=every), None) is None


def test_a_run_that_was_not_taken_up_has_lost_nothing(tmp_path: Path) -> None:
    assert chosen_checkpoint(RunDirectory(tmp_path), None) is None


@pytest.mark.parametrize("lost", ["the folder", "the folder, early", "content", "content after a resume"])
def test_a_run_that_lost_all_its_checkpoints_does_not_start_over(tmp_path: Path, lost: str) -> None:
    directory = begun(tmp_path / "run", steps=3 if lost in {"the folder, early", "content after a resume"} else 25)
    says = {
        "the folder": "is missing, and the run has begun",
        "the folder, early": "is missing, and the run has begun",
        "content": "holds no complete checkpoint, and 25 steps are done, with one every 10 steps",
        "content after a resume": "holds no complete checkpoint, and the run went on from step_2 before",
    }[lost]
    if lost == "content after a resume":
        directory.history.write_text(directory.history.read_text() + '{"event": "resume", "attempt": 2, "step": 2}\n')
    shutil.rmtree(directory.checkpoints)
    if lost.startswith("content"):
        directory.make_checkpoints()
    with pytest.raises(RunDirectoryError) as caught:
        chosen_checkpoint(directory, None)
    assert_said("lines of a run", "checkpoints are lost", str(caught.value), what=f"{directory.checkpoints} {says}")


def test_an_attempt_that_died_as_it_took_the_run_over_may_have_changed_how_often(tmp_path: Path) -> None:
    """Its rows are those of the attempt before, which saved every 10 steps."""
    directory = begun(tmp_path / "run", steps=9)
    record(directory, attempt=2, step=None, values={"checkpoint.every": "2"})
    assert chosen_checkpoint(directory, None) is None
