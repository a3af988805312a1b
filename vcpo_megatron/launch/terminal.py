"""What the supervisor says: on the terminal as long as there is one, and in a log, which has it all the same."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..config.process import ERROR_PREFIX, WARNING_PREFIX
from ..run.text import encodable, printable


def _safe(text: str) -> str:
    """``text`` line by line as a terminal can take it: what a user's code or a policy wrote may be in it."""
    return "\n".join(map(printable, text.split("\n")))


def _print(line: str) -> None:
    print(line, flush=True)


class Terminal:
    """Says lines, each on the terminal and, once it is known, in the log."""

    def __init__(self) -> None:
        self._show: Callable[[str], None] = _print
        self._log: Path | None = None

    def keep_in(self, log: Path) -> None:
        """From now on ``log`` holds every line, too, with the time of it."""
        self._log = log

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[str], None]) -> Iterator[None]:
        """``show`` puts lines on the terminal meanwhile: a progress line stands there, and they go above it."""
        self._show = show
        try:
            yield
        finally:
            self._show = _print

    def say(self, line: str) -> None:
        self._keep(line := _safe(line))
        self._show(line)

    def warn(self, message: str) -> None:
        """On standard error; as ``complain``, once no progress line stands any more."""
        self._on_stderr(WARNING_PREFIX + message)

    def complain(self, message: str) -> None:
        self._on_stderr(ERROR_PREFIX + message)

    def lost(self, error: OSError) -> None:
        """An output cannot be written (``run.output.surviving``): the other one is told, and the log."""
        where = f"; what it says is in {self._log}" if self._log else ""
        what = f"{error.filename} cannot be written ({error.strerror})"
        line = f"{WARNING_PREFIX}{what}: the run goes on without it{where}"
        self._keep(line)
        if error.filename == "standard output":
            print(line, file=sys.stderr, flush=True)

    def _on_stderr(self, line: str) -> None:
        self._keep(line := _safe(line))
        print(line, file=sys.stderr, flush=True)

    def _keep(self, line: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError), open(self._log, "a", encoding="utf-8") as file:  # a full disk
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {encodable(line)}\n")
