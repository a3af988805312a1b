"""``vcpo serve``: a folder that cannot be served, and an engine until a signal."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.cli.commands import ROOT, errors
from tests.messages import assert_said
from vcpo_megatron.cli import main as cli
from vcpo_megatron.rollout.embedded import server


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


def test_a_port_that_another_program_began_to_listen_on_is_blamed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are bound, as SO_REUSEADDR lets them, before either listens: the second to listen is refused."""

    class Engine:
        def start(self) -> None:
            other.listen()

        async def stop(self, timeout_s: float) -> None:
            pass

    monkeypatch.setattr(server, "make_service", lambda options, on_failure: SimpleNamespace(engine=Engine()))
    monkeypatch.setattr("vcpo_megatron.rollout.embedded.api.make_app", lambda service: web.Application())
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert server.serve(["--model-path", str(tmp_path), "--port", str(port)]) == 1
    (line,) = errors(capsys)
    assert_said("vcpo serve", "port in use", line, port=port)
