"""Children die with their parent, with their group, and leave a reason behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vcpo_megatron.transport.child import last_error, reap_adopted, signal_group, start_child, stop_child

PATIENCE_S = 20.0


@pytest.mark.parametrize("own_session", [False, True])
def test_reaping_what_was_adopted_takes_no_exit_code_of_a_child(own_session: bool) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"], start_new_session=own_session)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "the child to end")
    reap_adopted()
    assert process.wait(timeout=PATIENCE_S) == 3


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code))


def wait_for(condition, what: str):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"waited {PATIENCE_S:g} s for {what}")


def read_pid(path: Path) -> int | None:
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else None


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def child(code: str, log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    process = start_child(python(code), env=env, log=log)
    try:
        yield process
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait(timeout=PATIENCE_S)


# --- start_child ------------------------------------------------------------------------------


def test_output_of_both_streams_is_appended_to_the_log_and_stdin_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "learner.0.log"
    code = """
        import os, sys
        print("out", os.environ["GIVEN"], "PATH" in os.environ, repr(sys.stdin.read()), flush=True)
        print("err", file=sys.stderr)
    """
    for value in ("first", "second"):
        with child(code, log, GIVEN=value) as process:
            assert process.wait(timeout=PATIENCE_S) == 0
    lines = [line for line in log.read_text().splitlines() if line.startswith(("out", "err"))]
    assert lines == ["out first True ''", "err", "out second True ''", "err"]


def test_child_leads_its_own_session_and_group(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with child("import os; print('ids', os.getpid(), os.getsid(0), os.getpgid(0))", log) as process:
        process.wait(timeout=PATIENCE_S)
    assert log.read_text().splitlines()[-1] == f"ids {process.pid} {process.pid} {process.pid}"


def test_refuses_a_thread_since_the_child_would_die_with_it(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            start_child(python("pass"), env={}, log=tmp_path / "log")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(timeout=PATIENCE_S)
    assert len(errors) == 1 and "main thread" in str(errors[0])


def test_missing_program_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        start_child((str(tmp_path / "no-such-program"),), env={}, log=tmp_path / "log")


PARENT = """
    import os, sys, time
    from pathlib import Path
    from vcpo_megatron.transport.child import start_child
    code = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}\\\\n'); time.sleep(60)"
    command = (sys.executable, "-c", code)
    start_child((*command, "DIR/child"), env={}, log=Path("DIR/child.log"))
    while not os.path.exists("DIR/child"):
        time.sleep(0.02)
    open("DIR/parent", "w").write(f"{os.getpid()}\\n")
    END
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "os._exit(3)", "raise SystemExit(0)"])
def test_child_dies_with_its_parent_however_it_ends(tmp_path: Path, end: str) -> None:
    code = PARENT.replace("DIR", str(tmp_path)).replace("END", end)
    with child(code, tmp_path / "parent.log") as parent:
        wait_for(lambda: read_pid(tmp_path / "parent"), "the parent")
        pid = wait_for(lambda: read_pid(tmp_path / "child"), "the child")
        if "sleep" in end:
            parent.kill()
        wait_for(lambda: is_gone(pid), "the child to die with its parent")


# --- stop_child -------------------------------------------------------------------------------

WITH_GRANDCHILD = """
    import os, signal, subprocess, sys, time
    HANDLER
    other = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
                              "print('ready', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    other.stdout.readline()
    open("DIR/pid", "w").write(f"{other.pid}\\n")
    END
"""


@pytest.mark.parametrize(
    ("handler", "end", "grace_s", "code"),
    [
        ("", "time.sleep(60)", 50.0, -signal.SIGTERM),
        ("signal.signal(15, lambda *a: os._exit(7))", "time.sleep(60)", 50.0, 7),
        ("signal.signal(15, signal.SIG_IGN)", "time.sleep(60)", 0.5, -signal.SIGKILL),
        ("", "os._exit(5)", 50.0, 5),
    ],
    ids=["ends", "handles", "ignores", "dead already"],
)
def test_stop_ends_the_whole_group_and_returns_the_exit_code(
    tmp_path: Path, handler: str, end: str, grace_s: float, code: int
) -> None:
    text = WITH_GRANDCHILD.replace("DIR", str(tmp_path)).replace("HANDLER", handler).replace("END", end)
    with child(text, tmp_path / "log") as process:
        grandchild = wait_for(lambda: read_pid(tmp_path / "pid"), "the grandchild")
        if "exit" in end:
            process.wait(timeout=PATIENCE_S)
            assert not is_gone(grandchild)
        start = time.monotonic()
        assert stop_child(process, grace_s=grace_s) == code
        assert time.monotonic() - start < 5
        wait_for(lambda: is_gone(grandchild), "the grandchild, which ignores SIGTERM, to be killed")
        assert stop_child(process, grace_s=0.5) == code  # once more is harmless


# --- last_error -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("\n \n", None),
        ("hello\nworld\n\n", None),  # what a process said last need not be why it ended
        ("hello\nValueError: x = 3\nstep 3 done\n", "ValueError: x = 3"),
        ("[rank1]: torch.OutOfMemoryError: 3 GiB\n", "[rank1]: torch.OutOfMemoryError: 3 GiB"),
        ("no Error: here\n", None),
        (
            "vcpo: error: first\nvcpo: error: model.path: no such folder\nException ignored in atexit\n",
            "model.path: no such folder",
        ),
        ("EOFError", "EOFError"),
        ("10%|#\r20%|##\r\x1b[31mOSError: red\x1b[0m\n", "OSError: red"),
        ("vcpo: error: of the attempt before\nvcpo: started 2026-01-01 00:00:00 python\n", None),
        ("vcpo: error: before\nvcpo: started 2026-01-01 00:00:00 python\nKeyError: 'here'\n", "KeyError: 'here'"),
        ("vcpo: error: early\n" + "noise\n" * 2000, "early"),
        ("EOFError: " + "x" * 2000, "EOFError: " + "x" * 986 + " ..."),
        ("EOFError:" + "x" * 2000, "EOFError:" + "x" * 987 + " ..."),
        ("vcpo: error: " + "word " * 300, "word " * 199 + "..."),  # 998 characters, and no half of a word
    ],
)
def test_last_error(tmp_path: Path, text: str, expected: str | None) -> None:
    log = tmp_path / "log"
    log.write_text(text, newline="")
    assert last_error(log) == expected


def test_last_error_without_a_log_or_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none") is None
    (tmp_path / "log").write_bytes(b"OSError: \xff\xfe broken\n")
    assert "broken" in (last_error(tmp_path / "log") or "")


def test_a_start_hides_what_an_earlier_attempt_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for code, expected in (("print('vcpo: error: of attempt 1')", "of attempt 1"), ("pass\npass\n", None)):
        with child(code, log) as process:
            process.wait(timeout=PATIENCE_S)
        assert last_error(log) == expected


def test_variables_of_the_environment_are_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "KEPT"):
        monkeypatch.setenv(name, "caller's")
    code = "import os; print({n: os.environ.get(n) for n in ('RANK', 'MASTER_ADDR', 'KEPT')}, flush=True)"
    log = tmp_path / "log"
    process = start_child(python(code), env={"RANK": "3"}, log=log, without=("RANK", "MASTER_ADDR", "NONE"))
    assert process.wait(timeout=PATIENCE_S) == 0
    assert log.read_text().splitlines()[-1] == str({"RANK": "3", "MASTER_ADDR": None, "KEPT": "caller's"})
