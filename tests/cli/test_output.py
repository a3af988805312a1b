"""Every command with an output that is gone: quiet where the output is all there is, and where it is not, going on."""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import ROOT
from tests.messages import assert_said
from tests.orchestrator.store.test_store import sample_group
from tests.orchestrator.store.test_store_policies import train
from tests.run.test_output import Broken
from vcpo_megatron.cli.convert import _guarded
from vcpo_megatron.orchestrator.store.store import RolloutStore

FULL = "vcpo: error: standard output: No space left on device\n"
GONE = 141


def shell(arguments: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """The command's exit code and standard error; a reader is gone before the command starts."""
    wait = "sleep 0.3; " if "|" in redirection else ""
    command = f"set -o pipefail; ({wait}exec {sys.executable} -m vcpo_megatron {arguments}) {redirection}"
    return subprocess.run(
        ["bash", "-c", command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
    )


@pytest.fixture
def run(tmp_path: Path, toml: Path) -> Path:
    (tmp_path / "run").mkdir()
    with RolloutStore(tmp_path / "run" / "rollouts.sqlite") as store:
        sample_group(store, 0)
        train(store, 0, 0)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("command", "redirection", "code", "says"),
    [
        ("train {toml} --dry-run", "> /dev/full", 2, FULL),
        ("train {toml} --dry-run", "| true", GONE, ""),
        ("report {run}", "| true", GONE, ""),
        ("report {run}", ">&-", 0, ""),
        ("report nowhere", ">&- 2>&-", 1, ""),
        ("--help", "| true", GONE, ""),
        ("nonsense", "2> /dev/full", 2, ""),
    ],
)
def test_output_that_cannot_be_written(
    toml: Path, run: Path, command: str, redirection: str, code: int, says: str
) -> None:
    done = shell(command.format(toml=toml, run=run), redirection)
    assert (done.returncode, done.stderr) == (code, says)


def test_a_conversion_goes_on_without_a_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []

    def convert(args: argparse.Namespace) -> int:
        for part in range(3):
            print(f"{part} of 3", flush=True)
            done.append(part)
        return 0

    monkeypatch.setattr(sys, "stdout", Broken(errno.EPIPE))
    assert _guarded(convert)(argparse.Namespace()) == 0 and done == [0, 1, 2]
    assert_said("vcpo", "standard output cannot be written", capsys.readouterr().err)
