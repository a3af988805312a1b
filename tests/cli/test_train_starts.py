"""``vcpo train`` with the weights of another run, and a resume that changes something: what is said before a start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import errors, store
from tests.messages import assert_names
from vcpo_megatron.cli import main as cli
from vcpo_megatron.config.load import load_resolved, written
from vcpo_megatron.models.folder import read_model
from vcpo_megatron.models.identity import shape_facts
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.run.directory import Manifest, RunDirectory


def trained(directory: Path, toml: Path, *steps: int) -> RunDirectory:
    """A run directory with a store and complete checkpoints that say what their model is."""
    run = RunDirectory(store(directory, toml))
    config = load_resolved(run.resolved)
    shape = read_model(config.model.path)
    padded = {"padded vocabulary": shape.padded_vocabulary(config.model.vocab_multiple)}
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
        learner = {"model": {**shape_facts(shape), **padded}}
        values = written(config)
        manifest = Manifest(step=step, attempt=1, version_number=step, learner=learner, orchestrator={}, config=values)
        run.complete(step, manifest)
    with RolloutStore(run.store):
        pass
    return run


def test_a_dry_run_names_the_checkpoint_that_it_would_start_from(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    source = trained(Path("source"), toml, 3, 12)
    start = ["train", str(toml), "--dry-run", "--set", "train.start_from=source"]
    assert cli.main(start) == 0
    newest = source.checkpoint(12).absolute()
    assert f"\nstarts from the weights of {newest}\n" in capsys.readouterr().out
    shutil.rmtree(source.checkpoint(12))
    assert cli.main(start) == 2 and started == []
    (line,) = errors(capsys)
    assert line.startswith(f"train.start_from = {source.path.absolute()}: ") and "latest names step_12" in line


def test_a_resume_says_what_it_changes_and_needs_its_start_no_more(
    toml: Path, started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Path("run"), toml, 3)
    resume = ["train", str(toml), "--run-dir", "run", "--resume"]
    changes = ["--set", "optimizer.lr=0.5", "--set", "optimizer.weight_decay=0.01", "--set", "train.steps=9"]
    assert cli.main([*resume, *changes]) == 7
    begin = "vcpo: note: the resume changes "
    assert [line.removeprefix(begin) for line in capsys.readouterr().err.splitlines() if line.startswith(begin)] == [
        "optimizer.lr: 1e-06 -> 0.5",
        "optimizer.weight_decay: 0.1 -> 0.01",
        "train.steps: 5 -> 9",
    ]
    text = Path("run/resolved.toml").read_text().replace("[train]\n", '[train]\nstart_from = "/gone"\n')
    Path("run/resolved.toml").write_text(text)
    assert cli.main(resume) == 2  # edited: the run has started from nothing
    assert_names(errors(capsys)[0], 'train.start_from = "/gone" in run/resolved.toml', "edited")
    shutil.rmtree("run/checkpoints")
    assert cli.main(resume) == 2  # at its start it is needed
    assert errors(capsys)[0].startswith("train.start_from = /gone: no such folder")
