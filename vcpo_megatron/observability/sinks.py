"""Where metrics go: ``metrics.jsonl`` (the record of the run) and TensorBoard (a view of it).

A row is one flat object a step: ``{"step": 0, "loss": ...}``. JSON knows no nan and no infinity: a value that is
not finite is written as ``null``, so that every JSON reader can read every line; ``step/skipped`` and the logs say
what happened there. A reader takes ``null`` as nan.

Neither torch nor tensorflow is imported: ``tensorboard.summary.writer`` writes event files by itself.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..run.directory import write_atomically
from ..run.text import encodable

Row = Mapping[str, Any]


class Sink(Protocol):
    """Takes one row a step. Rows come in order of ``step``."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


def _plain(value: Any) -> Any:
    """A value that every JSON reader can read: numpy scalars as Python ones, what is not finite as None, lone
    surrogates escaped."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return encodable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonlSink:
    """Appends rows to ``path``, each one flushed as a whole line before ``write`` returns.

    A row of a step that is there already takes the place of that row and of those after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()
        rows = read_rows(path)
        self._last = int(rows[-1]["step"]) if rows and "step" in rows[-1] else -1

    def _open(self) -> None:
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        _drop_torn_line(self._file)

    def write(self, row: Row) -> None:
        """ValueError when the row has no ``step``; TypeError when a value is no number, text or None."""
        if "step" not in row:
            raise ValueError(f"a row of metrics needs 'step'; this one has only {', '.join(row) or 'nothing'}")
        line = json.dumps({encodable(name): _plain(value) for name, value in row.items()}, allow_nan=False)
        if row["step"] <= self._last:
            self._file.close()
            cut_back(self._path, row["step"])
            self._open()
        self._append(line.encode() + b"\n")
        self._last = row["step"]

    def _append(self, line: bytes) -> None:
        """OSError, which names the file, when the disk does not take the whole line."""
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(file: Any) -> None:
    """Cut off what follows the last newline: a process was killed while it wrote that."""
    size = file.seek(0, 2)
    end, block = size, 65536
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)


def cut_back(path: Path, first_step_to_drop: int) -> list[int]:
    """Atomically drop the rows with ``step`` >= ``first_step_to_drop``, for a resume.

    A torn last line goes too, for a process was killed while it wrote it; no file is no row. Returns the numbers of
    other lines that are not rows: they are dropped as well, and somebody should be told.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept, torn = [], []
    for number, line in enumerate(lines[:-1], 1):  # after the last newline: nothing, or a torn line
        try:
            step = json.loads(line)["step"]
            keep = step < first_step_to_drop
        except (ValueError, KeyError, TypeError, RecursionError):
            torn.append(number)
            continue
        if keep:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept))
    return torn


class TensorBoardSink:
    """Writes every finite or non-finite number of a row as a scalar at its step; text is left out."""

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        """``first_step`` > 0 after a resume: TensorBoard then hides what an earlier attempt wrote from there on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        if first_step > 0:
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=log))

    def write(self, row: Row) -> None:
        values = [
            self._summary.Value(tag=encodable(name), simple_value=float(value))
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float | np.number)
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=int(row["step"]), summary=summary))

    def close(self) -> None:
        self._writer.close()


def _number(text: str) -> float:
    """An integer of a line; one beyond 18 digits, which somebody else wrote, as a float."""
    return int(text) if len(text) <= 18 else float(text)


class JsonlFollower:
    """Reads the rows that are added to ``path``; the file need not exist yet.

    When the file is replaced or shortened (``cut_back``), it is read again from its start: a consumer that keeps
    rows keys them by ``step``. A line that is no object with a ``step`` is left out; an integer that no counter can
    reach is taken as a float, maybe an infinite one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._position = 0

    def poll(self) -> list[dict[str, Any]]:
        """Whole rows written since the last call; does not block."""
        try:
            with open(self._path, "rb") as file:
                return self._read_new(file)
        except FileNotFoundError:
            return []

    def _read_new(self, file: Any) -> list[dict[str, Any]]:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._position:
            self._inode, self._position = status.st_ino, 0
        file.seek(self._position)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return [row for line in whole.splitlines() if (row := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line, parse_int=_number)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            return None
        return {name: math.nan if value is None else value for name, value in row.items()}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of ``path``, in order; no file is no row."""
    return JsonlFollower(path).poll()
