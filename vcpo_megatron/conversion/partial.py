"""A result that appears whole or not at all, can be interrupted and taken up again, and says how far it is."""

from __future__ import annotations

import codecs
import errno
import fcntl
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..config.process import WARNING_PREFIX
from ..run.json_file import JsonFileError, read_json
from ..run.text import printable
from .errors import REMEDY, ConversionError, listed

_PLAN, _JOURNAL, _LOCK = "conversion.plan.json", "conversion.journal.jsonl", "conversion.lock"
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
#: Files of a Hugging Face folder that hold weights; everything else belongs to the model and is carried over.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json", ".onnx")


class Partial:
    """The folder OUT.partial, which becomes OUT by one rename. One process at a time has it.

    plan    what is being made of what: a folder left behind by the same plan is taken up again
    sources what must not change: neither OUT nor OUT.partial may be, hold or lie in one of them
    steps   what was recorded before an interruption, oldest first

    ConversionError, with nothing changed, when OUT exists, when another process writes it, when OUT.partial is
    not what an earlier conversion left, or when the disk has no room.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], needed_bytes: int, sources: Iterable[Path] = ()) -> None:
        self.out, self.path = out, partial_of(out)
        self.steps: list[Any] = []
        self._lock: BinaryIO | None = None
        self._made: list[Path] = []  # folders, deepest first
        with ExitStack() as undo:
            undo.callback(self.release)  # nothing stays locked after an error
            with self._undone_by_errors():
                require_apart(out, sources)
                require_absent(out)
                self._require_ours()
                self._require_room(plan, needed_bytes)
                self._take(plan)
            undo.pop_all()

    def _require_ours(self) -> None:
        """Nothing is removed that no conversion has written."""
        if not os.path.lexists(self.path):
            return
        ours = self.path.is_dir() and not self.path.is_symlink()
        if not ours or not (self.path / _PLAN).exists() and {file.name for file in self.path.iterdir()} - {_LOCK}:
            raise ConversionError(
                f"{self.path}, where {self.out} is to be written, is not what an interrupted conversion left "
                f"(it would hold {_PLAN}): move it away, or give another name than {self.out}"
            )

    def _require_room(self, plan: Mapping[str, Any], needed_bytes: int) -> None:
        have = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file()) if self._left(plan) else 0
        parent = next(folder for folder in self.out.absolute().parents if folder.exists())
        if (free := shutil.disk_usage(parent).free) < needed_bytes - have:
            raise ConversionError(
                f"{parent} has {size_text(free)} free, {self.out} needs {size_text(needed_bytes - have)}"
            )

    def _take(self, plan: Mapping[str, Any]) -> None:
        """Lock the folder, made where it is missing; then take up what it holds, or empty it."""
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        file = open(self.path / _LOCK, "a+b")  # noqa: SIM115
        try:
            _lock(file)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).decode(errors="replace").strip() or "another process"
            file.close()
            raise ConversionError(f"{self.path} is being written by {holder}: wait for its end, or stop it") from None
        self._lock = file
        if os.fstat(file.fileno()).st_nlink == 0:
            self.release()
            raise ConversionError(f"{self.path} was finished or given up just now: run the command again")
        require_absent(self.out)  # it may have ended between the first look and the lock
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}".encode())
        file.flush()
        self.steps = self._left(plan)
        if not self.steps:
            self._say_what_is_lost(plan)
            for left in self.path.iterdir():
                if left.name != _LOCK:
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            (self.path / _PLAN).write_text(json.dumps(plan))

    def _say_what_is_lost(self, plan: Mapping[str, Any]) -> None:
        """One line when recorded steps of another plan are about to be removed."""
        try:
            made = read_json(self.path / _PLAN)
            lost = made != json.loads(json.dumps(plan)) and (self.path / _JOURNAL).stat().st_size > 0
        except (OSError, JsonFileError):
            return
        if lost:
            source = made.get("source", "another source") if isinstance(made, dict) else "another source"
            begun = f"from {source}" if source != plan.get("source") else "with other settings, or of other files"
            print(
                f"{WARNING_PREFIX}{self.path} held an interrupted conversion {begun}: it is begun anew",
                file=sys.stderr,
                flush=True,
            )

    def _left(self, plan: Mapping[str, Any]) -> list[Any]:
        """Steps that the same plan has recorded."""
        try:
            if read_json(self.path / _PLAN) != json.loads(json.dumps(plan)):
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

    def content(self) -> dict[str, Path]:
        """Every file that will be in the result, by its path within."""
        files = {str(path.relative_to(self.path)): path for path in self.path.rglob("*") if path.is_file()}
        return {name: path for name, path in files.items() if name not in (_PLAN, _JOURNAL, _LOCK)}

    def record(self, step: Any) -> None:
        """Note that everything up to here is on the disk."""
        with open(self.path / _JOURNAL, "a") as file:
            file.write(json.dumps(step) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Make the folder appear under its name."""
        for name in (_JOURNAL, _PLAN):
            (self.path / name).unlink(missing_ok=True)
        os.rename(self.path, self.out)
        (self.out / _LOCK).unlink()  # under its own name still, so that nobody makes another one
        self.release()
        parent = os.open(self.out.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def release(self) -> None:
        """Let other processes have the folder; what it holds stays."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """On an error nothing stays behind; on an interruption the folder stays, to be taken up again."""
        try:
            with self._undone_by_errors():
                yield
        finally:
            self.release()

    @contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        try:
            yield
        except ConversionError:
            self._remove()
            raise
        except OSError as error:
            self._remove()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else f"{error.strerror or error}"
            where = str(error.filename or "")
            if where and not full and not where.startswith(str(self.path)):
                reason = f"{where}: {reason}"
            raise ConversionError(f"{self.out} was not written: {reason}; nothing was left behind") from None

    def _remove(self) -> None:
        """Only what this process has locked, and the folders that were made for it."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._made:
            with suppress(OSError):  # removed already, never made, or used by others meanwhile
                folder.rmdir()


def partial_of(out: Path) -> Path:
    """Where ``out`` is while it is being written."""
    return out.parent / f"{out.name}.partial"


def require_apart(out: Path, sources: Iterable[Path]) -> None:
    """ConversionError when ``out``, or its partial folder, is, holds or lies in one of ``sources``."""
    for written in (Path(os.path.realpath(path)) for path in (out, partial_of(out))):
        for source in sources:
            read = Path(os.path.realpath(source))
            if written == read or written in read.parents or read in written.parents:
                raise ConversionError(
                    f"{out}: it or {partial_of(out).name} is, holds or lies in {source}, which is only read: "
                    "give a name elsewhere"
                )


def require_absent(out: Path) -> None:
    """ConversionError when something has the name of the result."""
    if os.path.lexists(out):
        raise ConversionError(f"{out} exists: give another name, or remove it")


def require_folder(path: Path) -> None:
    """ConversionError when the source of a conversion is no folder."""
    if not path.is_dir():
        raise ConversionError(f"{path} does not exist or is not a folder")


def _lock(file: BinaryIO) -> None:
    """BlockingIOError when another process has it. Some file systems of clusters know no locks: there nothing holds."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise


class CopyProgress:
    """Bytes done, rate and time left, on a terminal in place, else a line every ``every_s`` seconds."""

    def __init__(self, what: str, total: int, stream: TextIO | None, every_s: float = 5.0) -> None:
        self._what, self._total, self._stream = printable(what), max(total, 1), stream
        self._live = stream is not None and stream.isatty()
        self._every = 0.2 if self._live else every_s
        self._begun = self._told = time.monotonic()
        self._done = self._skipped = 0

    def skip(self, count: int) -> None:
        """Bytes that were done before the interruption."""
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
            f"{self._what}: {size_text(self._done)} of {size_text(self._total)} "
            f"({100 * self._done / self._total:.0f} %), {size_text(rate)}/s, {left}"
        )

    def end(self) -> None:
        if self._live and self._stream is not None:
            print(file=self._stream)


def size_text(count: float) -> str:
    """Bytes in the largest unit that leaves something before the point: 2.11 GB, 34.50 kB, 12 bytes."""
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def carried_files(folder: Path) -> list[Path]:
    """What belongs to a model beside its weights: configuration, tokenizer, chat template, generation defaults.

    ConversionError for a link to nothing (a cache that was cleared): it would be missing from what is written.
    """
    beside = [path for path in folder.iterdir() if not path.name.startswith(".") and not path.name.endswith(_WEIGHTS)]
    if broken := sorted(path.name for path in beside if path.is_symlink() and not path.exists()):
        raise ConversionError(f"{folder}: links to files that do not exist: {listed(broken)}: {REMEDY}")
    return sorted(path for path in beside if path.is_file())


def carry_over(folder: Path, out: Path) -> None:
    """Copy what belongs to a model beside its weights. JSON loses its byte order mark, which no engine reads."""
    for path in carried_files(folder):
        shutil.copyfile(path, out / path.name)
        if path.suffix == ".json" and (data := path.read_bytes()).startswith(codecs.BOM_UTF8):
            (out / path.name).write_bytes(data.removeprefix(codecs.BOM_UTF8))


def fingerprint(folder: Path) -> list[list[Any]]:
    """Names, sizes and times of the files of a folder: what must be unchanged for work to be taken up again."""
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted([path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files)
