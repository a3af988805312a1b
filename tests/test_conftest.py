"""The guard over process-wide state, in a session of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CULPRITS = """
import os, resource, signal
import pytest

def test_directory(tmp_path): os.chdir(tmp_path)
def test_limit(): resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
def test_handler(): signal.signal(signal.SIGUSR1, lambda *_: None)
def test_mask(): signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
def test_umask(): os.umask(0o077)
def test_new_variable(): os.environ["NEW"] = "1"
def test_lost_variable(): del os.environ["KEPT"]
def test_other_value(): os.environ["KEPT"] = "2"

def test_innocent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEPT", "3")
    assert "NEW" not in os.environ

def test_wrong(): raise ValueError

@pytest.fixture
def careless():
    yield
    os.environ["KEPT"] = "4"

def test_fixture(careless): pass
def test_everything_was_put_back():
    assert os.environ["KEPT"] == "1" and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_a_test_that_changes_the_process_fails_and_the_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "test_culprits.py").write_text(CULPRITS)
    options = ["-q", "-rE", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-o", "timeout=50"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_culprits.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        umask=0o022,
        env={"KEPT": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    blamed = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    assert blamed == {
        "test_directory",
        "test_limit",
        "test_handler",
        "test_mask",
        "test_umask",
        "test_new_variable",
        "test_lost_variable",
        "test_other_value",
        "test_fixture",
    }, done.stdout
    assert "1 failed, 11 passed, 9 errors" in done.stdout
    for said in (
        "limit RLIMIT_FSIZE: ",
        "os.environ['NEW']: 'absent' before, '1' after",
        "os.environ['KEPT']: '1' before, 'absent' after",
        "umask: '0022' before, '0077' after",
    ):
        assert said in done.stdout
