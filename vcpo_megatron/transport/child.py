"""Starting and stopping child processes so that none outlives the one that started it.

Three things together guarantee it, on Linux:

- PR_SET_PDEATHSIG: the kernel sends the child SIGKILL when its parent dies, kill -9 included. The signal is
  bound to the *thread* that forked: it also fires when that thread ends. ``start_child`` therefore refuses to
  run outside the main thread, unless it is told that the child may end with its thread.
- An own session, hence an own process group: grandchildren that stay in the group (data workers, the manager
  process that a Megatron checkpoint save leaves behind) are killed with the child by ``stop_child``, whether the
  child is still alive or not.
- A check after fork that the parent is still there, for a parent that died before the kernel was told.

No torch here: the supervisor and the orchestrator both use this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from ..config.process import ERROR_PREFIX
from ..run.text import one_line

_PR_SET_PDEATHSIG = 1
#: Loaded before any fork: the child may not take the loader's locks.
_LIBC = ctypes.CDLL(None, use_errno=True)

#: First line that ``start_child`` writes into a log. What comes before it belongs to an earlier start.
_STARTED = "vcpo: started "
_TAIL_BYTES = 256 * 1024
_MESSAGE_LENGTH = 1000
#: A line that tells an error, as Python writes it last: "torch.OutOfMemoryError: ...", maybe with the rank before it.
_ERROR_LINE = re.compile(r"(\[[^\]]*\]:?\s*)?([A-Za-z_][\w.]*(Error|Exception)|Fatal Python error)(:|$)")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def _die_with(parent: int) -> Callable[[], None]:
    """What the child does between fork and exec: the least possible, since only this thread was forked."""
    prctl, kill_me, set_handler = _LIBC.prctl, signal.SIGKILL, signal.signal

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, kill_me, 0, 0, 0)
        set_handler(signal.SIGUSR1, signal.SIG_IGN)
        if os.getppid() != parent:
            os.kill(os.getpid(), kill_me)

    return prepare


def start_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    pass_fds: Sequence[int] = (),
    with_thread: bool = False,
    without: Collection[str] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own session; it gets SIGKILL when this process dies, and ignores SIGUSR1: the warning
    that a batch system sends to every process is for the supervisor.

    ``env`` is added to this process's environment, of which the names ``without`` are left out. Standard input is
    empty; standard output and error are appended to ``log``, whose folder is made. Call it from the main thread:
    RuntimeError otherwise, because the child would die with the thread, unless ``with_thread`` says that it may.
    ``pass_fds`` stay open in the child.
    OSError when the command cannot be executed.
    """
    if threading.current_thread() is not threading.main_thread() and not with_thread:
        raise RuntimeError(f"{command[0]}: children are started from the main thread only: they die with the thread")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        shown = one_line(" ".join(command), _MESSAGE_LENGTH)  # whatever an argument holds
        output.write(f"{_STARTED}{time.strftime('%Y-%m-%d %H:%M:%S')} {shown}\n".encode(errors="replace"))
        output.flush()
        return subprocess.Popen(
            list(command),
            env={**{name: value for name, value in os.environ.items() if name not in without}, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - one system call, takes no lock
        )


def signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
    """Send ``signum`` to the child and to what it left in its process group; nothing when all are gone."""
    try:
        os.killpg(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # nobody left; PermissionError: only zombies left, on some kernels


def stop_child(process: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """End the child and its process group; return its exit code (-N: killed by signal N).

    SIGTERM to the group, up to ``grace_s`` seconds for the child itself to end, then SIGKILL to the group. A
    child that is dead already leaves its group to SIGKILL at once. Blocks at most ``grace_s`` + 10 seconds;
    subprocess.TimeoutExpired when even SIGKILL does not end it (a process stuck in the kernel).
    """
    if process.poll() is None:
        signal_group(process, signal.SIGTERM)
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            pass  # SIGKILL follows in any case
    signal_group(process, signal.SIGKILL)
    return process.wait(timeout=10.0)


def reap_adopted() -> None:
    """Reap children that ended and that this process did not start: orphans of its descendants, which a subreaper gets.

    They are told by their session: what is started here is in that of this process or leads its own, so no exit code
    that a ``Popen`` waits for is taken. An orphan that leads a session of its own is left as it is.
    """
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # one system call, in nearly every case
    except ChildProcessError:
        return
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) not in (os.getsid(0), child.pid):
                os.waitpid(child.pid, os.WNOHANG)


def last_error(log: Path) -> str | None:
    """Why the process that wrote ``log`` ended: its last "vcpo: error: " line without the prefix, else its last line
    that tells an error; None when it wrote none since its last start. One line of at most 1,000 characters."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return None
    fallback = None
    for raw in reversed(text.splitlines()):
        if raw.startswith(_STARTED):
            break
        line = _ESCAPES.sub("", raw).strip()
        if line.startswith(ERROR_PREFIX.strip()):
            return one_line(line.removeprefix(ERROR_PREFIX.strip()), _MESSAGE_LENGTH)
        if fallback is None and _ERROR_LINE.match(line):
            fallback = one_line(line, _MESSAGE_LENGTH)
    return fallback
