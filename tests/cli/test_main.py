"""What a user types, what it answers, and with which exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.commands import ROOT
from vcpo_megatron.cli import main as cli


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["serve", "--help"], ["doctor", "--help"]])
def test_every_help_shows_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    command = arguments[0] if len(arguments) == 2 else "train"
    assert f"example: vcpo {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [[], ["nope"], ["train"], ["serve", "m", "--port", "70000"], ["doctor", "x"]])
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [("> /dev/full", 2, "vcpo: error: standard output: No space left on device\n"), ("| true", 141, "")],
)
def test_output_that_cannot_be_written(toml: Path, redirection: str, code: int, says: str) -> None:
    wait = "sleep 1; " if redirection.startswith("|") else ""  # the reader is gone by then
    command = f"({wait}exec {sys.executable} -m vcpo_megatron train {toml} --dry-run) {redirection}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    (version,) = re.findall(r'version="(.+)"', (ROOT / "setup.py").read_text())
    assert (caught.value.code, capsys.readouterr().out) == (0, f"vcpo {version}\n")


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "vcpo_megatron", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0 and result.stdout.startswith("usage: vcpo ")


def test_the_console_script_is_the_same() -> None:
    assert 'console_scripts": ["vcpo = vcpo_megatron.cli.main:main"]' in (ROOT / "setup.py").read_text()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["timeout"] == 120
