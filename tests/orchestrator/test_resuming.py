"""A resume that is refused, by whomever, leaves the run as it was; one that is accepted puts newer checkpoints away."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeEnvironment, FakeRun, config
from vcpo_megatron.launch.workspace import RunDirectoryError, chosen_checkpoint
from vcpo_megatron.orchestrator.store.schema import StoreError
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.run.history import recorded
from vcpo_megatron.run.tasks import RunError
from vcpo_megatron.transport.messages import ControlError
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(120)
CONFIG = {"checkpoint": {"every": 2}, "train": {"steps": 6}}


def finished_run(run_dir: Path) -> FakeRun:
    """Checkpoints of steps 2, 4 and 6, an export of step 4, and a configuration that was not accepted yet."""
    run = FakeRun(run_dir, config(**CONFIG))
    assert run.run() == "run ended"
    directory = RunDirectory(run_dir)
    assert directory.complete_steps() == [2, 4, 6]
    directory.export(4).mkdir(parents=True)
    directory.resolved.write_text("before")
    directory.proposed.write_text("after")
    return run


def what_a_run_is(run_dir: Path) -> dict[str, Any]:
    """Every file but the store's by content, and all rows of the store."""
    files = {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and not path.name.startswith("rollouts.sqlite")
    }
    return {**files, "store": rows(run_dir / "rollouts.sqlite")}


def rows(path: Path) -> Any:
    if not path.exists() or path.stat().st_size == 0:
        return path.exists()
    with closing(sqlite3.connect(path)) as connection:
        tables = ("groups", "trajectories", "samples", "partial_rollouts", "progress")
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables}


def edit(run_dir: Path, statement: str) -> None:
    with closing(sqlite3.connect(run_dir / "rollouts.sqlite")) as connection, connection:
        connection.execute(statement)


@pytest.mark.parametrize(
    "why", ["data", "learner", "store older", "store of another", "store missing", "store empty", "row damaged"]
)
def test_a_refused_resume_leaves_the_run_as_it_was(why: str, tmp_path: Path) -> None:
    finished_run(tmp_path)
    store = tmp_path / "rollouts.sqlite"
    with RolloutStore(store) as open_store:  # a group in flight, as a crash leaves it
        open_store.admit(1000, "in flight", 1000, 1, PolicyVersion(1, 6))
    again = FakeRun(tmp_path, config(**CONFIG), attempt=2, resume_step=2)
    kind: type[Exception] = StoreError
    match why:
        case "data":
            again.environment = FakeEnvironment(fingerprint="g")
            kind, says = RunError, "the environment is not that of checkpoint step_2"
        case "learner":
            again.learner.cannot_load = "step_2 has changed since it was written"
            kind, says = ControlError, "learner rank 0: step_2 has changed"
        case "store older":
            edit(tmp_path, "UPDATE progress SET steps_done = 1")
            says = "is older than the checkpoint of step 2 "
        case "store of another":
            edit(tmp_path, "UPDATE identity SET run = 'another'")
            says = r"is of another run than the checkpoint of step 2 \(id another, not [0-9a-f]{32}\); put back"
        case "store missing":
            store.unlink()
            says = "rollouts.sqlite is missing, and the run has checkpoints that need it; put back the file"
        case "store empty":
            store.write_bytes(b"")
            says = "rollouts.sqlite is empty, and the run has checkpoints that need it"
        case "row damaged":  # of a group that the resume would bring back
            edit(tmp_path, "UPDATE samples SET length = length + 1")
            says = "is damaged: its checksum does not match"
    before = what_a_run_is(tmp_path)
    with pytest.raises(kind, match=says):
        again.run()
    assert what_a_run_is(tmp_path) == before


def test_a_run_leaves_what_tells_that_its_checkpoints_were_lost(tmp_path: Path) -> None:
    finished_run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(RunDirectoryError, match="checkpoints is missing, .*: put the folder"):
        chosen_checkpoint(RunDirectory(tmp_path), None)


def test_after_a_refusal_the_newest_checkpoint_still_goes_on(tmp_path: Path) -> None:
    """Had the store gone back to step 2 by then, it would be older than the checkpoint of step 6."""
    finished_run(tmp_path)
    refused = FakeRun(tmp_path, config(**CONFIG), attempt=2, resume_step=2)
    refused.learner.cannot_load = "no memory"
    with pytest.raises(ControlError):
        refused.run()
    longer = config(checkpoint={"every": 2}, train={"steps": 8})
    again = FakeRun(tmp_path, longer, attempt=3, resume_step=6)
    assert again.run() == "run ended"
    assert [batch.step for batch in again.learner.batches] == [6, 7]


def test_an_accepted_one_puts_newer_checkpoints_away_and_takes_its_configuration(tmp_path: Path) -> None:
    finished_run(tmp_path)
    again = FakeRun(tmp_path, config(**CONFIG), attempt=2, resume_step=2)
    assert again.run() == "run ended"
    assert [batch.step for batch in again.learner.batches] == [2, 3, 4, 5]
    directory = RunDirectory(tmp_path)
    away = directory.checkpoints / "abandoned" / "attempt_2"
    assert sorted(path.name for path in away.iterdir()) == ["step_4", "step_6"]
    assert (directory.exports / "abandoned" / "attempt_2" / "step_4").is_dir() and not directory.export(4).exists()
    assert directory.complete_steps() == [2, 4, 6]
    assert directory.resolved.read_text() == "after" and not directory.proposed.exists()


def test_checkpoints_go_before_the_store_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash after newer checkpoints were put away leaves a store that still fits the one that is left."""
    finished_run(tmp_path)
    whole = RunDirectory.abandon_after

    def crash(self: RunDirectory, step: int, attempt: int) -> list[int]:
        whole(self, step, attempt)
        raise OSError(5, "Input/output error", "step_4")

    monkeypatch.setattr(RunDirectory, "abandon_after", crash)
    before = rows(tmp_path / "rollouts.sqlite")
    with pytest.raises(RunError, match="back to step 2: step_4: Input/output error"):
        FakeRun(tmp_path, config(**CONFIG), attempt=2, resume_step=2).run()
    assert rows(tmp_path / "rollouts.sqlite") == before
    monkeypatch.undo()
    again = FakeRun(tmp_path, config(**CONFIG), attempt=3, resume_step=2)
    assert again.run() == "run ended" and again.learner.batches[0].step == 2


def test_a_hole_in_the_metrics_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20] + "\n" + "".join(lines[3:]))
    capsys.readouterr()
    assert FakeRun(tmp_path, config(**CONFIG), attempt=2, resume_step=4).run() == "run ended"
    assert_names(capsys.readouterr().out, f"vcpo: warning: {path}: lines 2", "rows of steps 1-2 are missing")


def test_every_change_of_an_accepted_resume_is_in_the_history(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(**CONFIG))
    assert run.run() == "run ended"
    refused = FakeRun(tmp_path, config(**CONFIG, optimizer={"lr": 0.5}), attempt=2, resume_step=2)
    refused.learner.cannot_load = "no memory"
    with pytest.raises(ControlError):
        refused.run()
    changed = config(**{**CONFIG, "train": {"steps": 8}}, optimizer={"lr": 0.25})
    assert FakeRun(tmp_path, changed, attempt=3, resume_step=6).run() == "run ended"
    found = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(line["event"], line["attempt"], line["step"]) for line in found] == [
        ("start", 1, 0),
        ("resume", 3, 6),
        ("change", 3, 6),
        ("change", 3, 6),
    ]
    assert found[0]["values"]["train.steps"] == "6" and found[0]["values"]["staleness.max_staleness"] == "1"
    assert [(line["key"], line["old"], line["new"]) for line in found[2:]] == [
        ("optimizer.lr", "1e-06", "0.25"),
        ("train.steps", "6", "8"),
    ]
    assert recorded(RunDirectory(tmp_path), 8).values["optimizer.lr"] == "0.25"  # by the manifest, too


def test_a_larger_lag_is_used_from_the_resume_on(tmp_path: Path) -> None:
    first = FakeRun(tmp_path, config(**CONFIG, staleness={"max_staleness": 0}))
    assert first.run() == "run ended" and max(first.staleness()) == 0
    more = config(checkpoint={"every": 2}, train={"steps": 14}, staleness={"max_staleness": 3})
    again = FakeRun(tmp_path, more, attempt=2, resume_step=4)
    again.learner.step_s = 0.05
    assert again.run() == "run ended"
    assert max(again.staleness()) == 3
    rows = again.rows()
    assert [row["step"] for row in rows] == list(range(14)) and all(row["rollouts/failed"] == 0 for row in rows)
    assert rows[-1]["rollouts/trained"] == 14 * 2 * 2
    trained = [group.prompt_id for run in (first, again) for batch in run.learner.batches for group in batch.groups]
    assert len(set(trained[-20:])) == 20
