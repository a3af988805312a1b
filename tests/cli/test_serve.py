"""``vcpo serve``: a folder that cannot be served, and an engine until a signal."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, errors
from vcpo_megatron.cli import main as cli


def test_serve_refuses_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path / "none")]) == 2
    (line,) = errors(capsys)
    assert "no such folder" in line


def test_serve_until_a_signal(model_folder: Path) -> None:
    command = [sys.executable, "-m", "vcpo_megatron", "serve", str(model_folder), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        assert re.match(rf"vcpo: serving {model_folder} at http://127.0.0.1:\d+$", process.stdout.readline())
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
