"""Standard output and standard error of a process that has better things to do than to end because of them.

A terminal goes away, a reader of a pipe ends, a disk fills up under a log. ``surviving`` is for a process whose work
must go on then; without it an error of writing is raised as one of "standard output", so that nobody blames another
file for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO, cast

from .text import encodable

#: Errors of writing that pass: a disk with space again takes what is said then.
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Output:
    """A text stream that writes what its encoding cannot hold in escaped form, and names itself in its errors.

    ``on_error``, where given, takes an error of writing instead of the caller.
    """

    def __init__(self, stream: TextIO, name: str, on_error: Callable[[OSError], None] | None) -> None:
        self._stream, self._name, self._on_error = stream, name, on_error
        self._dead = self._told = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(encodable(text, self._stream.encoding or "utf-8")))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self._dead:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: somebody has closed it
            failed = OSError(getattr(error, "errno", None) or errno.EBADF, _reason(error), self._name)
            if self._on_error is None:
                raise failed from error
            if failed.errno not in _PASSING:
                self._dead = True
                drop(self._stream)
            if not self._told:
                self._told = True
                self._on_error(failed)

    def finish(self) -> None:
        """Write what waits, or drop it."""
        try:
            if not self._dead:
                self._stream.flush()
        except (OSError, ValueError):
            drop(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def open_standard_streams() -> None:
    """Where a caller has closed standard input, output or error, /dev/null takes its place.

    Otherwise the next file that is opened would get its number, and with it whatever anybody prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(opened, True)
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w", closefd=False))


def drop(stream: TextIO) -> None:
    """What ``stream`` still holds cannot be written; the interpreter must not try again at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stand-in without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def exit_now(code: int) -> NoReturn:
    """End the process with ``code`` at once: threads that never end (of a broken world's collectives, of a user's code)
    would be waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def named_output() -> Iterator[None]:
    """Errors of standard output and error are OSErrors whose file name is "standard output" or "standard error"."""
    with _replaced(None):
        yield


@contextlib.contextmanager
def surviving(on_error: Callable[[OSError], None] = lambda error: None) -> Iterator[None]:
    """What is printed meanwhile and cannot be written is left out; ``on_error`` is told once a stream, nobody else is.

    An output without a reader is not tried again, one on a full disk is. At the end nothing waits to be written.
    """
    with _replaced(on_error) as outputs:
        try:
            yield
        finally:
            for output in outputs:
                output.finish()


@contextlib.contextmanager
def _replaced(on_error: Callable[[OSError], None] | None) -> Iterator[list[_Output]]:
    open_standard_streams()
    before = sys.stdout, sys.stderr
    outputs = [_Output(before[0], "standard output", on_error), _Output(before[1], "standard error", on_error)]
    sys.stdout, sys.stderr = (cast(TextIO, output) for output in outputs)
    try:
        yield outputs
    finally:
        sys.stdout, sys.stderr = before
