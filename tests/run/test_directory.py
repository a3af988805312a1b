"""A checkpoint counts only when its manifest is there; a reader never sees half a file."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.messages import assert_names
from vcpo_megatron.run.directory import MANIFEST, Manifest, RunDirectory, write_atomically
from vcpo_megatron.run.integrity import sealed


def manifest(step: int) -> Manifest:
    return Manifest(
        step=step, attempt=2, version_number=step, learner={"rng": [1, 2]}, orchestrator={"cursor": 7, "x": None}
    )


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def save(directory: RunDirectory, step: int) -> None:
    directory.checkpoint(step).mkdir(parents=True)
    (directory.checkpoint(step) / "data").write_text("tensors")


def complete(directory: RunDirectory, *steps: int) -> None:
    """Checkpoints of ``steps``, in this order."""
    for step in steps:
        save(directory, step)
        directory.complete(step, manifest(step))


def test_paths(directory: RunDirectory, tmp_path: Path) -> None:
    assert directory.resolved == tmp_path / "resolved.toml"
    assert directory.metrics == tmp_path / "metrics.jsonl"
    assert directory.store == tmp_path / "rollouts.sqlite"
    assert directory.checkpoint(12) == tmp_path / "checkpoints" / "step_12"
    assert directory.log("learner", 3) == tmp_path / "logs" / "learner.3.log"
    assert directory.tensorboard == tmp_path / "tensorboard"


def test_only_checkpoints_with_a_manifest_are_complete(directory: RunDirectory) -> None:
    assert directory.complete_steps() == []
    complete(directory, 2, 10, 9)
    save(directory, 11)  # killed before the manifest
    save(directory, 12)
    (directory.checkpoint(12) / f".{MANIFEST}.1.tmp").write_text("{}")  # killed while it was written
    (directory.checkpoints / "step_x").mkdir()
    (directory.checkpoints / "step_x" / MANIFEST).write_text("{}")
    assert directory.complete_steps() == [2, 9, 10]  # by number, not by text
    assert directory.damaged() == {}
    assert (directory.checkpoints / "latest").read_text() == "step_9\n"


def test_a_damaged_checkpoint_does_not_count(directory: RunDirectory) -> None:
    complete(directory, *range(1, 6))
    (directory.checkpoint(2) / "data").write_text("tens")
    (directory.checkpoint(3) / "data").unlink()
    (directory.checkpoint(4) / MANIFEST).write_text("")
    (directory.checkpoint(5) / MANIFEST).write_bytes(b'{"step": 5, \xff')
    assert directory.complete_steps() == [1]
    assert directory.damaged() == {
        2: "data has 4 bytes, not 7",
        3: "data is missing",
        4: "manifest.json cannot be read",
        5: "manifest.json cannot be read",
    }


def test_manifest_comes_back_as_it_was_given(directory: RunDirectory) -> None:
    save(directory, 4)
    directory.complete(4, manifest(4))
    crc = 0x1574C41E  # of b"tensors", by the crc32 of gzip
    assert directory.manifest(4) == manifest(4).model_copy(update={"files": {"data": 7}, "checksums": {"data": crc}})
    assert json.loads((directory.checkpoint(4) / MANIFEST).read_text())["version_number"] == 4
    save(directory, 5)
    with pytest.raises(FileNotFoundError):
        directory.manifest(5)


def test_manifest_with_unknown_keys_is_refused(directory: RunDirectory) -> None:
    save(directory, 1)
    (directory.checkpoint(1) / MANIFEST).write_text(sealed({**manifest(1).model_dump(), "surprise": 1}))
    with pytest.raises(ValidationError, match="surprise"):
        directory.manifest(1)


@pytest.mark.parametrize(("keep", "left"), [(1, [30]), (2, [20, 30]), (3, [10, 20, 30]), (9, [10, 20, 30])])
def test_prune_keeps_the_newest_complete_ones(directory: RunDirectory, keep: int, left: list[int]) -> None:
    complete(directory, 10, 20, 30)
    save(directory, 40)  # being written: neither counted nor removed
    directory.prune(keep)
    assert directory.complete_steps() == left
    assert [step for step in (10, 20, 30, 40) if directory.checkpoint(step).exists()] == [*left, 40]


def test_what_cannot_be_pruned_is_named_and_the_rest_goes(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(directory, 10, 20, 30)
    (directory.checkpoints / "step_5").touch()  # a file, and a name that we do not give
    (directory.checkpoints / "step_007").mkdir()
    remove = shutil.rmtree

    def busy(path: Path) -> None:
        if path.name == "step_10":
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path)

    monkeypatch.setattr("vcpo_megatron.run.directory.shutil.rmtree", busy)
    (line,) = directory.prune(1)
    assert str(directory.checkpoint(10)) in line and "cannot be removed (Device or resource busy)" in line
    assert directory.complete_steps() == [30] and not directory.checkpoint(20).exists()
    assert {"step_5", "step_007"} <= {path.name for path in directory.checkpoints.iterdir()}


def test_killed_while_pruning_leaves_no_checkpoint_that_looks_complete(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(directory, 10, 20)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vcpo_megatron.run.directory.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.prune(1)
    assert directory.complete_steps() == [20]
    assert (directory.checkpoint(10) / "data").exists()


def test_write_atomically_replaces_or_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old ä\n")
    write_atomically(path, "new\n")
    assert path.read_text() == "new\n" and os.listdir(tmp_path) == ["file"]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vcpo_megatron.run.directory.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "torn")
    assert path.read_text() == "new\n" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("damage", ["cut", "gone", "torn manifest", "empty manifest"])
def test_what_is_not_whole_is_not_complete(directory: RunDirectory, damage: str) -> None:
    for step in (1, 2):
        save(directory, step)
        (directory.checkpoint(step) / "rng").mkdir()
        (directory.checkpoint(step) / "rng" / "rank_0.pt").write_text("state")
        directory.complete(step, manifest(step))
    assert directory.manifest(2).files == {"data": 7, "rng/rank_0.pt": 5}
    folder = directory.checkpoint(2)
    match damage:
        case "cut":
            (folder / "data").write_text("ten")
        case "gone":
            (folder / "rng" / "rank_0.pt").unlink()
        case "torn manifest":
            (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:40])
        case "empty manifest":
            (folder / MANIFEST).write_text("")
    assert directory.complete_steps() == [1]


def test_the_best_is_marked_and_kept(directory: RunDirectory) -> None:
    complete(directory, 10, 20, 30, 40)
    save(directory, 15)  # an interrupted save
    assert directory.mark_best({}) is None
    assert directory.mark_best({10: 0.5, 20: 0.7, 25: 0.9, 30: 0.7, 40: 0.6}) == 30  # of equals the newer
    assert (directory.checkpoints / "best").read_text() == "step_30\n"
    directory.prune(1, [30])
    assert directory.complete_steps() == [30, 40]
    assert not directory.checkpoint(15).exists()


def test_a_future_that_was_left_is_moved_away(directory: RunDirectory) -> None:
    complete(directory, 10, 20, 30)
    save(directory, 35)
    assert directory.newer_than(10) == [20, 30]
    assert directory.abandon_after(10, attempt=3) == [20, 30]
    assert directory.checkpoint(35).is_dir()  # an interrupted save: the next one of step 35 replaces it
    assert directory.complete_steps() == [10]
    assert (directory.checkpoints / "latest").read_text() == "step_10\n"
    assert (directory.checkpoints / "abandoned" / "attempt_3" / "step_30" / "data").read_text() == "tensors"
    assert directory.abandon_after(10, attempt=4) == []


def test_at_no_instant_does_latest_name_what_was_moved(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(directory, 10, 20, 30)
    replace, moves = os.replace, []

    def killed_after_the_first(source: Path, target: Path) -> None:
        if Path(source).name.startswith("step_"):
            moves.append(Path(source).name)
            if len(moves) == 2:
                raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("vcpo_megatron.run.directory.os.replace", killed_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        directory.abandon_after(10, attempt=3)
    assert moves == ["step_20", "step_30"]
    assert directory.complete_steps() == [10, 30] and directory.loss() is None
    monkeypatch.undo()
    directory.abandon_after(10, attempt=4)
    assert directory.complete_steps() == [10] and directory.loss() is None
    shutil.rmtree(directory.checkpoint(10))
    latest = directory.checkpoints / "latest"
    assert_names(directory.loss(), f"{latest} names step_10", "no complete checkpoint")
    latest.write_text("")
    assert_names(directory.loss(), f"{latest} names nothing", "no complete checkpoint")
    latest.write_text("step_" + "9" * 5000)
    assert_names(directory.loss(), f"{latest} names step_{'9' * 291} ...,", "no complete checkpoint")


def test_abandoned_checkpoints_and_exports_are_pruned_by_attempt(directory: RunDirectory) -> None:
    for attempt, steps in ((2, (20, 30)), (3, (20, 100)), (10, (20,))):
        for step in (10, *steps):
            if not directory.checkpoint(step).exists():
                save(directory, step)
                directory.complete(step, manifest(step))
        for step in steps:
            directory.export(step).mkdir(parents=True)
        directory.abandon_after(10, attempt)
    directory.prune(3)
    for parent in (directory.checkpoints, directory.exports):
        left = sorted(str(path.relative_to(parent / "abandoned")) for path in parent.glob("abandoned/*/*"))
        assert left == ["attempt_10/step_20", "attempt_3/step_100", "attempt_3/step_20"]
    assert directory.complete_steps() == [10]


def test_a_manifest_that_has_changed_counts_as_damaged(directory: RunDirectory) -> None:
    save(directory, 1)
    directory.complete(1, manifest(1))
    path = directory.checkpoint(1) / MANIFEST
    text = path.read_text()
    path.write_text(text.replace('"cursor": 7', '"cursor": 8'))
    damaged = directory.damaged()
    assert list(damaged) == [1]
    assert_names(damaged[1], "manifest.json", "its checksum does not match")
    assert directory.complete_steps() == []
