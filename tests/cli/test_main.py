"""What a user types, what it answers, and with which exit code."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import tomllib

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


@pytest.mark.parametrize("arguments", [["nope"], ["serve", "m", "--port", "70000"], ["doctor", "x"]])
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "example: vcpo train" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "Address already in use"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/a/file"), "/a/file: No such file or directory"),
    ],
)
def test_only_what_standard_output_did_is_blamed_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, says: str
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr("vcpo_megatron.planning.doctor.examine", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == f"vcpo: error: {says}\n"


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
