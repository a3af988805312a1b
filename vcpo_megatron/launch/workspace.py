"""The run directory before any process starts: where it is, may it be used, by whom, and from which step."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..config.process import WARNING_PREFIX
from ..observability.sinks import read_rows
from ..run.directory import RunDirectory, write_atomically
from ..run.errors import ConfigError
from ..run.history import last_step, recorded

#: A disk with less than this free is full, in bytes.
_FULL = 2**20
#: Seconds from one look at it to the next.
_LOOK_S = 2.0


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used; the message names it and the remedy."""


def _run_name(config: Path) -> str:
    """Folder of the example for examples/NAME/run.toml, else the file's own name."""
    return config.absolute().parent.name if config.stem == "run" else config.stem


def new_run_directory(config: Path) -> Path:
    """runs/NAME-TIMESTAMP for the configuration file ``config``; it does not exist yet."""
    first = Path("runs") / f"{_run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidate, number = first, 1
    while candidate.exists():
        number += 1
        candidate = first.with_name(f"{first.name}-{number}")
    return candidate


def newest_run_directory(config: Path) -> Path:
    """The newest run of ``config`` by the names that ``new_run_directory`` gives; ConfigError when there is none."""
    name = _run_name(config)
    given = re.compile(rf"{re.escape(name)}-[0-9]{{8}}-[0-9]{{6}}(-[0-9]+)?")  # NAME may begin another run's name
    found = [path.parent for path in Path("runs").glob("*/resolved.toml") if given.fullmatch(path.parent.name)]
    if not found:
        raise ConfigError([f"--resume: no run directory runs/{name}-*; give one with --run-dir"])
    return max(found, key=lambda path: (path / "resolved.toml").stat().st_mtime)


def run_directory_problems(directory: RunDirectory, *, resume: bool) -> list[str]:
    """Why a run cannot be kept in ``directory``, one line each; nothing is left behind to find out."""
    path = directory.path
    if "\0" in str(path):
        return [f"--run-dir {path}: holds a NUL character, which no file name has; give another one"]
    if path.exists() and not path.is_dir():
        return [f"--run-dir {path}: is a file; give a folder"]
    found = []
    if not resume and path.is_dir() and not all(_is_left_over(entry.name) for entry in path.iterdir()):
        found.append(f"--run-dir {path}: exists and is not empty; give another one, or --resume")
    ancestor = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not (ancestor.is_dir() and os.access(ancestor, os.W_OK | os.X_OK) and _takes_folders(ancestor)):
        found.append(f"--run-dir {path}: cannot write in {ancestor}; give another one")
    files = (directory.attempts, *((directory.history, directory.metrics, directory.store) if resume else ()))
    found += [
        f"{file}: is no file; put the run's own one back" for file in files if file.exists() and not file.is_file()
    ]
    if not found:
        try:
            _attempts_made(directory)
        except RunDirectoryError as error:
            found.append(str(error))
    return found


def _takes_folders(folder: Path) -> bool:
    """Whether a folder can be made in ``folder``, which is writable by its mode: /proc and /sys are, and take none.

    It is tried only on a file system without blocks; a few of those are in memory and do take them.
    """
    if os.statvfs(folder).f_blocks:
        return True
    probe = folder / f".writable.{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _is_left_over(name: str) -> bool:
    """Whether a start that failed before its first rollout leaves a file of this name."""
    return (
        name in {".lock", "attempts", "ended", "identity", "logs", "resolved.toml"}
        or name.startswith(".writable.")
        or (name.startswith(".") and name.endswith(".tmp"))
    )


def prepare(directory: RunDirectory) -> None:
    """Make the run directory and ``logs`` and try to write there; RunDirectoryError when that fails."""
    try:
        directory.logs.mkdir(parents=True, exist_ok=True)
        probe = directory.path / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunDirectoryError(
            f"run directory {directory.path} cannot be written: {error.strerror}; choose another with --run-dir"
        ) from error


def refuse_used(directory: RunDirectory) -> None:
    """RunDirectoryError when a run has left results here, so that a fresh one would mix with them.

    An attempt that ended before its first rollout left logs only and is no obstacle.
    """
    for path in (directory.metrics, directory.store, directory.checkpoints):
        if path.exists():
            raise RunDirectoryError(
                f"run directory {directory.path} holds a run already ({path.name}); continue it with --resume or "
                "choose another with --run-dir"
            )


@contextlib.contextmanager
def locked(directory: RunDirectory) -> Iterator[None]:
    """Hold the run directory's lock; RunDirectoryError when another process holds it.

    The kernel gives the lock back when the holder dies, however it dies.
    """
    path = directory.path / ".lock"
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise RunDirectoryError(
                f"run directory {directory.path} is in use by another run (pid {holder}); "
                "stop it or choose another with --run-dir"
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {directory.path}: its file system offers no lock ({error.strerror}); "
                "choose one that does with --run-dir"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def next_attempt(directory: RunDirectory) -> int:
    """Count one more attempt, durably, and return its number, from 1. Call it with the lock held.

    Versions are named by it: where the count is lost, it goes on after that of the newest checkpoint.
    """
    attempt = _attempts_made(directory) + 1
    write_atomically(directory.attempts, f"{attempt}\n")
    return attempt


def _attempts_made(directory: RunDirectory) -> int:
    path = directory.attempts
    try:
        known = max((directory.manifest(step).attempt for step in directory.complete_steps()), default=0)
        return max(int(path.read_text()) if path.exists() else 0, known)
    except ValueError as error:
        raise RunDirectoryError(f"{path} holds no number; write the number of attempts made so far") from error


def run_identity(directory: RunDirectory) -> str:
    """What names this run among others on its servers: eight hexadecimal digits, made at the first start and kept. Call
    it with the lock held.

    The file is good for itself alone: a copy of a run directory is another run, and would otherwise make versions of
    the same names beside the original. Its inode tells them apart; where it changed without a copy (a move to another
    disk), a new name does no harm.
    """
    path = directory.path / "identity"
    with contextlib.suppress(OSError, ValueError):
        run, inode = path.read_text().split()
        if re.fullmatch(r"[0-9a-f]{8}", run) and int(inode) == path.stat().st_ino:
            return run
    run = secrets.token_hex(4)
    path.unlink(missing_ok=True)
    with open(path, "x") as file:  # in place: a rename would bring another inode
        file.write(f"{run} {os.fstat(file.fileno()).st_ino}\n")
        file.flush()
        os.fsync(file.fileno())
    return run


def newest_checkpoint(directory: RunDirectory) -> int | None:
    """Step of the newest complete checkpoint."""
    steps = directory.complete_steps()
    return steps[-1] if steps else None


def chosen_checkpoint(directory: RunDirectory, wanted: int | None) -> int | None:
    """``wanted``, which must be complete, or by default the newest one; None in a run that has completed none.

    RunDirectoryError: ``wanted`` is not complete, or by default checkpoints were lost or damaged. To go on from an
    earlier one throws steps away, and to start over throws the run away: neither is done unless it is asked for.
    """
    if directory.checkpoints.exists() and not directory.checkpoints.is_dir():
        raise RunDirectoryError(f"{directory.checkpoints} is a file; put the folder of the checkpoints back")
    steps = directory.complete_steps()
    if wanted is None:
        if (loss := directory.loss()) is not None:
            back = f"go back with --resume --from-step {steps[-1]}" if steps else "start a new run in another --run-dir"
            raise RunDirectoryError(f"{loss}: put its files back, or {back}")
        if not steps and (lost := _lost_checkpoints(directory)) is not None:
            raise RunDirectoryError(
                f"{lost}: put the folder of the checkpoints back, or start a new run in another --run-dir"
            )
        return steps[-1] if steps else None
    if wanted not in steps:
        complete = ", ".join(f"step_{step}" for step in steps) or "none"
        raise RunDirectoryError(
            f"--from-step {wanted}: {directory.checkpoint(wanted)} is no complete checkpoint; complete are: {complete}"
        )
    return wanted


def _lost_checkpoints(directory: RunDirectory) -> str | None:
    """Why a run that has no checkpoint, and no ``latest``, had one; None when it may not have completed any.

    A run makes the folder before its history begins. It goes back to a step only by a checkpoint, and begins to write
    one only when the one before is complete: with a row beyond the second that was due, the first was.
    """
    if not directory.history.is_file():
        return None
    if not directory.checkpoints.exists():
        return f"{directory.checkpoints} is missing, and the run has begun"
    if step := last_step(directory):
        return f"{directory.checkpoints} holds no complete checkpoint, and the run went on from step_{step} before"
    done = max((row["step"] + 1 for row in read_rows(directory.metrics) if isinstance(row.get("step"), int)), default=0)
    if (every := _checkpoint_every(directory)) and done > 2 * every:
        return (
            f"{directory.checkpoints} holds no complete checkpoint, and {done} steps are done, with one every {every} "
            "steps"
        )
    return None


def _checkpoint_every(directory: RunDirectory) -> int:
    """The most steps from one checkpoint to the next of a run that has completed none; 0 where they do not come, or
    that is not known. An attempt that died while it took the run over may have changed it, or not yet."""
    known = recorded(directory, None)
    texts = [held["checkpoint.every"] for held in (known.values, known.replaced) if "checkpoint.every" in held]
    found = [int(text) if text and re.fullmatch("[0-9]{1,18}", text) else 0 for text in texts]
    return max(found) if all(found) and found else 0


def full_disk(directory: RunDirectory) -> str:
    """What to add to an error when the run directory's disk is full: the logs, on the same disk, may not tell."""
    if shutil.disk_usage(directory.path).free >= _FULL:
        return ""
    return f"; no space left on device for {directory.path}: free space, then resume the run"


class DiskWatch:
    """Looks now and then whether the run directory's disk is full: the logs, which are on it, may not tell."""

    def __init__(self, directory: RunDirectory) -> None:
        self._path = directory.path
        self._is_full = False
        self._next_at = -math.inf

    def look(self) -> str | None:
        """A line for the user when the disk has become full, or has space again."""
        if time.monotonic() < self._next_at:
            return None
        self._next_at = time.monotonic() + _LOOK_S
        try:
            is_full = shutil.disk_usage(self._path).free < _FULL
        except OSError:  # it is looked at again
            return None
        if is_full == self._is_full:
            return None
        self._is_full = is_full
        if not is_full:
            return f"{self._path}: its disk has space again"
        return (
            f"{WARNING_PREFIX}{self._path}: no space left on its disk; what was sampled waits to be stored, generation "
            "pauses, nothing is lost: free space, and the run goes on"
        )
