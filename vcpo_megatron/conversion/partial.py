"""A result that appears whole or not at all, can be interrupted and taken up again, and says how far it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .errors import ConversionError

_PLAN, _JOURNAL = "conversion.plan.json", "conversion.journal.jsonl"
#: Files of a Hugging Face folder that hold weights; everything else belongs to the model and is carried over.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json", ".onnx")


class Partial:
    """The folder OUT.partial, which becomes OUT by one rename.

    plan    what is being made of what: a folder left behind by the same plan is taken up again
    steps   what was recorded before an interruption, oldest first
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], needed_bytes: int) -> None:
        if out.exists():
            raise ConversionError(f"{out} exists: give another name, or remove it")
        self.out, self.path = out, out.with_name(out.name + ".partial")
        self.steps = self._left_behind(plan)
        have = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file()) if self.steps else 0
        parent = next(folder for folder in out.absolute().parents if folder.exists())
        if (free := shutil.disk_usage(parent).free) < needed_bytes - have:
            raise ConversionError(
                f"{parent} has {free / 1e9:.2f} GB free, {out} needs {(needed_bytes - have) / 1e9:.2f} GB"
            )
        if not self.steps:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            (self.path / _PLAN).write_text(json.dumps(plan))

    def _left_behind(self, plan: Mapping[str, Any]) -> list[Any]:
        try:
            if json.loads((self.path / _PLAN).read_text()) != json.loads(json.dumps(plan)):
                return []
            lines = (self.path / _JOURNAL).read_text().splitlines()
        except (OSError, ValueError):
            return []
        steps = []
        for line in lines:  # the last one may be cut short
            try:
                steps.append(json.loads(line))
            except ValueError:
                break
        return steps

    def record(self, step: Any) -> None:
        """Note that everything up to here is on the disk."""
        with open(self.path / _JOURNAL, "a") as file:
            file.write(json.dumps(step) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Make the folder appear under its name."""
        for name in (_PLAN, _JOURNAL):
            (self.path / name).unlink(missing_ok=True)
        os.rename(self.path, self.out)
        parent = os.open(self.out.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """On an error nothing stays behind; on an interruption the folder stays, to be taken up again."""
        try:
            yield
        except ConversionError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else f"{error.strerror or error}"
            raise ConversionError(f"{self.out} was not written: {reason}; nothing was left behind") from None


class Progress:
    """Bytes done, rate and time left, on a terminal in place, else a line every ``every_s`` seconds."""

    def __init__(self, what: str, total: int, stream: TextIO | None, every_s: float = 5.0) -> None:
        self._what, self._total, self._stream = what, max(total, 1), stream
        self._live = stream is not None and stream.isatty()
        self._every = 0.2 if self._live else every_s
        self._begun = self._told = time.monotonic()
        self._done = self._skipped = 0

    def skip(self, count: int) -> None:
        """Bytes that an earlier run did."""
        self._done = self._skipped = count

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._stream is not None and now - self._told >= self._every:
            self._told = now
            print(self.line(now - self._begun), file=self._stream, end="\r" if self._live else "\n", flush=True)

    def line(self, seconds: float) -> str:
        """What is shown after ``seconds`` of work."""
        rate = (self._done - self._skipped) / max(seconds, 1e-9)
        left = f"{(self._total - self._done) / rate:.0f} s left" if rate > 0 else "time left unknown"
        return (
            f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB "
            f"({100 * self._done / self._total:.0f} %), {rate / 1e6:.0f} MB/s, {left}"
        )

    def end(self) -> None:
        if self._live and self._stream is not None:
            print(file=self._stream)


def carried_files(folder: Path) -> list[Path]:
    """What belongs to a model beside its weights: configuration, tokenizer, chat template, generation defaults."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS)
    )


def fingerprint(folder: Path) -> list[list[Any]]:
    """Names, sizes and times of the files of a folder: what must be unchanged for work to be taken up again."""
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted([path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files)
