"""Kills what is left of a run when its supervisor was killed before it could.

``kill -9`` of the supervisor ends its children (PR_SET_PDEATHSIG), but not *their* children when those were
started by a library: a Megatron checkpoint save, for one, leaves a manager process behind. The guard is a process
of its own that does nothing but wait for the end of its standard input, which the kernel closes when the
supervisor dies, and then kills every process whose environment holds the run's token. When the supervisor ends
orderly it writes "done" first.

Only the standard library is imported: the guard lives as long as the run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

_PASSES_S = 10.0


def kill_marked(mark: bytes, *, seconds: float = _PASSES_S) -> int:
    """SIGKILL every process of this user that was started with the environment entry ``mark`` ("NAME=value").

    Repeated for as long as some are found, at most ``seconds``; returns the number of processes killed. This
    process is spared.
    """
    deadline, killed = time.monotonic() + seconds, set[int]()
    while (found := _marked(mark)) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                pass  # ended by itself
        time.sleep(0.1)
    return len(killed)


def _marked(mark: bytes) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:
                pass  # gone, a zombie, or another user's
    return pids


def main() -> None:
    """First line of standard input: the mark. Then "done" at an orderly end, or nothing."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # a signal to all processes must not end the guard first
    mark = sys.stdin.buffer.readline().rstrip(b"\n")
    rest = sys.stdin.buffer.read()
    if mark and rest.strip() != b"done":
        kill_marked(mark)


if __name__ == "__main__":
    main()
