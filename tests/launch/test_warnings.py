"""Warnings in a log reach the terminal once each, those of this attempt only, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcpo_megatron.launch import warnings
from vcpo_megatron.launch.warnings import LogWarnings


def test_only_whole_new_lines_that_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    assert LogWarnings(log).poll() == []
    log.write_text("vcpo: warning: of the attempt before\n")
    found = LogWarnings(log)
    with open(log, "a") as file:
        file.write("step 3\nvcpo: warning: a\nvcpo: error: b\nvcpo: warn")
        file.flush()
        assert found.poll() == ["vcpo: warning: a"] and found.poll() == []
        file.write("ing: c\n")
    assert found.poll() == ["vcpo: warning: c"]
    monkeypatch.setattr(warnings, "_BLOCK", 32)
    with open(log, "a") as file:
        file.write("x" * 100 + "\nvcpo: warning: d\n")
    assert [line for _ in range(6) for line in found.poll()] == ["vcpo: warning: d"]  # a long line is got through


def test_a_device_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    assert LogWarnings(tmp_path / "log").poll() == []
