"""A tool that is told to end leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOL = """
import tempfile, time
from benchmarks.tool import run_tool
def main():
    with tempfile.TemporaryDirectory(dir={folder!r}):
        print("ready", flush=True)
        time.sleep(30)
    return 0
run_tool(main)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_the_contexts(signum: int, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "of the tool"
    folder.mkdir()
    command = [sys.executable, "-c", TOOL.format(folder=str(folder))]
    process = subprocess.Popen(command, cwd=ROOT / "tools", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    assert len(list(folder.iterdir())) == 1
    process.send_signal(signum)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (code, b"") and list(folder.iterdir()) == []
