"""Every failure of a checkpoint's files is one line with the path, and a full disk is called one."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.messages import assert_names, assert_said
from vcpo_megatron.learner.checkpoint.errors import CheckpointError, reading, writing


def failed_write(path: Path, error: Exception) -> str:
    with pytest.raises(CheckpointError) as caught, writing(path):
        raise error
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_even_below_other_errors(tmp_path: Path, number: int) -> None:
    error = RuntimeError("Worker failure:\n 1")
    error.__cause__ = OSError(number, "full")
    said = failed_write(tmp_path / "step_3", error)
    assert_said("lines of a run", "full disk for a checkpoint", said, folder=tmp_path)


def test_a_full_disk_is_found_when_the_error_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("PytorchStreamWriter failed writing file data/0")
    assert "no space" not in failed_write(tmp_path, error)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert_names(failed_write(tmp_path, error), f"checkpoint {tmp_path}: no space left on device")


@pytest.mark.parametrize("error", [EOFError(), ValueError("Expecting value: line 1 column 1 (char 0)")])
def test_a_damaged_checkpoint_is_named_and_not_only_its_error(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=f"^cannot read checkpoint {tmp_path}: {type(error).__name__}: "),
        reading(tmp_path),
    ):
        raise error
