"""``vcpo doctor``: exit code and report, with and without a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import without_torch
from vcpo_megatron.cli import main as cli


def test_doctor_passes_where_the_tests_run(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--config", str(toml)]) == 0
    report = capsys.readouterr().out
    assert f"{toml} can run" in report and "megatron-core" in report


def test_doctor_fails_on_a_bad_configuration(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml.write_text(toml.read_text() + "[algorithm]\nbase_ess_ratio = 2.0\n")
    assert cli.main(["doctor", "--config", str(toml)]) == 1
    assert "algorithm.base_ess_ratio = 2.0: must be" in capsys.readouterr().out


def test_doctor_without_torch() -> None:
    assert without_torch("doctor").returncode == 0
