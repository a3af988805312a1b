"""Where a run keeps its things, and how a checkpoint is known to be complete.

RUN_DIR/
  resolved.toml            the configuration with every default filled in
  resolved.next.toml       that of an attempt to resume, until the run has taken it
  history.jsonl            the configuration of the start, and every change of it; see ``history``
  metrics.jsonl            one object a step; cut back on resume
  rollouts.sqlite          every group and trajectory (opened by the orchestrator alone)
  checkpoints/step_N/      Megatron distributed checkpoint + manifest.json, written last
  checkpoints/latest       text file "step_N": the checkpoint completed last; replaced atomically
  checkpoints/best         the same for the complete checkpoint of the highest held-out accuracy
  checkpoints/abandoned/   attempt_A/step_N: newer than the checkpoint that attempt A went back to
  exports/step_N/          the policy after step N as a Hugging Face folder; it appears whole
  logs/ROLE.RANK.log       stdout and stderr of every process
  attempts, ended          how often it was started; which attempt ended last, and how
  tensorboard/
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from .integrity import ChangedError, crc_of_file, sealed, unsealed
from .text import one_line

MANIFEST = "manifest.json"


class Manifest(BaseModel):
    """Completion marker of a checkpoint: written last, and atomically, by learner rank 0.

    ``files`` holds the size in bytes of every other file of the checkpoint, by its path within, and ``checksums`` its
    CRC-32; ``RunDirectory.complete`` fills them in. The text has a checksum of its own.
    ``orchestrator`` is the opaque state that the orchestrator handed over with the request
    (data cursor, staleness counters, store position); it is given back unread on resume.
    ``config`` holds every key of the configuration that made it, as "section.key" and its TOML text, None where it is
    not set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    step: int
    attempt: int
    version_number: int
    learner: dict[str, Any]
    orchestrator: dict[str, Any]
    config: dict[str, str | None] = {}
    files: dict[str, int] = {}
    checksums: dict[str, int] = {}


def read_manifest(folder: Path) -> Manifest:
    """That of one checkpoint; FileNotFoundError when it has none, ValueError when it is damaged."""
    return Manifest.model_validate(unsealed((folder / MANIFEST).read_bytes()))


def damage(folder: Path) -> str | None:
    """Why the checkpoint in ``folder``, which has a manifest, is not complete any more; None when it is. Sizes only."""
    try:
        files = read_manifest(folder).files
    except ChangedError as error:
        return f"{MANIFEST} cannot be read: {error}"
    except (OSError, ValueError):
        return f"{MANIFEST} cannot be read"
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, not {size}"
    return None


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` so that a reader sees the old or the new content, durably.

    OSError, which names ``path``, leaves the old content.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    _flush(path.parent)


def _steps_in(folder: Path) -> list[int]:
    """N of every folder ``step_N`` in ``folder``, ascending; others, ``step_007`` too, are none of ours."""
    names = [path.name.removeprefix("step_") for path in folder.glob("step_*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _remove(folder: Path) -> str | None:
    """Remove ``folder``, its manifest first, so that it is not complete before it is not whole; what prevents that."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        return f"{folder} is not to be kept and cannot be removed ({error.strerror or error}); remove it by hand"
    return None


def _flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run directory and its complete checkpoints."""

    path: Path

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.toml"

    @property
    def proposed(self) -> Path:
        """The configuration of an attempt that has not been accepted yet."""
        return self.path / "resolved.next.toml"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def attempts(self) -> Path:
        """The number of times that the run was started."""
        return self.path / "attempts"

    @property
    def ended(self) -> Path:
        return self.path / "ended"

    def mark_ended(self, attempt: int, state: str) -> None:
        """Note that ``attempt`` ended: "done", "failed" or "stopped by ..."; a full disk changes nothing of the run."""
        with contextlib.suppress(OSError):
            write_atomically(self.ended, f"{attempt} {state}\n")

    def how_it_ended(self) -> str | None:
        """The state in which the newest attempt ended; None while it goes on, or when its supervisor was killed."""
        try:
            attempt, _, state = self.ended.read_text(errors="replace").strip().partition(" ")
            return one_line(state) if int(attempt) == int(self.attempts.read_text()) else None
        except (OSError, ValueError):
            return None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def store(self) -> Path:
        return self.path / "rollouts.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Folders of weights on their way to the servers, with ``rollout.sync`` = "disk"."""
        return self.path / "weights"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, role: str, rank: int) -> Path:
        return self.logs / f"{role}.{rank}.log"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def export(self, step: int) -> Path:
        """Hugging Face folder of the policy after ``step``."""
        return self.exports / f"step_{step}"

    def manifest(self, step: int) -> Manifest:
        """Manifest of the complete checkpoint ``step``; FileNotFoundError when it is not complete, ValueError when it
        is damaged."""
        return read_manifest(self.checkpoint(step))

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending, whatever else was left behind.

        Complete: the manifest can be read, and every file that it names has its size. Checksums are for those who read
        the files anyway.
        """
        return sorted(step for step in self._steps() if self._is_complete(step))

    def _steps(self) -> list[int]:
        """Steps of all checkpoint folders, complete or not."""
        return _steps_in(self.checkpoints)

    def _is_complete(self, step: int) -> bool:
        return (self.checkpoint(step) / MANIFEST).exists() and self._damage(step) is None

    def damaged(self) -> dict[int, str]:
        """What is wrong with each checkpoint that was complete once, by step. A save that was interrupted is none."""
        steps = [step for step in self._steps() if (self.checkpoint(step) / MANIFEST).exists()]
        return {step: damage for step in steps if (damage := self._damage(step)) is not None}

    def loss(self) -> str | None:
        """Why the newest complete checkpoint is not the newest that was complete once; None when it is, and in a run
        that has completed none. Each that is newer has its manifest, and is damaged, or is what ``latest`` names."""
        newest = max(self.complete_steps(), default=-1)
        damaged = [
            f"{self.checkpoint(step)} is damaged ({damage})" for step, damage in self.damaged().items() if step > newest
        ]
        latest = self.checkpoints / "latest"
        if damaged or not latest.is_file():
            return "; ".join(damaged) or None
        name = latest.read_text(errors="replace").strip()
        step = name.removeprefix("step_")
        if step.isdecimal() and len(step) <= len(str(newest)) and int(step) <= newest:
            return None
        return f"{latest} names {one_line(name) or 'nothing'}, and this is no complete checkpoint any more"

    def _damage(self, step: int) -> str | None:
        return damage(self.checkpoint(step))

    def make_checkpoints(self) -> None:
        """Make the folder of the checkpoints, durably, unless it is there."""
        self.checkpoints.mkdir(exist_ok=True)
        _flush(self.path)

    def complete(self, step: int, manifest: Manifest, checksums: Mapping[str, int] = {}) -> None:
        """Mark checkpoint ``step`` complete and make it the latest, after everything in it is on disk.

        ``checksums``: CRC-32 of files, by path within, that are known already; the others are read.
        """
        folder = self.checkpoint(step)
        paths = sorted(path for path in folder.rglob("*") if path.name != MANIFEST)
        for path in [*paths, folder]:
            _flush(path)
        files = {str(path.relative_to(folder)): path for path in paths if path.is_file()}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        known = {name: checksums[name] if name in checksums else crc_of_file(path) for name, path in files.items()}
        manifest = manifest.model_copy(update={"files": sizes, "checksums": known})
        write_atomically(folder / MANIFEST, sealed(manifest.model_dump()))
        write_atomically(self.checkpoints / "latest", f"step_{step}\n")

    def mark_best(self, accuracy: Mapping[int, float]) -> int | None:
        """Point ``best`` to the complete checkpoint of the highest ``accuracy`` (by step); None when none is known."""
        known = [(accuracy[step], step) for step in self.complete_steps() if step in accuracy]
        if not known:
            return None
        _, best = max(known)
        write_atomically(self.checkpoints / "best", f"step_{best}\n")
        return best

    def prune(self, keep_last: int, keep: Collection[int] = ()) -> list[str]:
        """Remove all but the newest ``keep_last`` complete checkpoints and those in ``keep``, and what interrupted
        saves left behind before them; the same for exports, which are always whole. Of those that were abandoned, the
        ``keep_last`` newest stay as well, the last attempt's first. Returns a line for each folder that cannot be
        removed (somebody reads it, another owner): nothing is lost by that."""
        complete = self.complete_steps()
        kept, newest = {*complete[-keep_last:], *keep}, complete[-1] if complete else 0
        gone = [self.checkpoint(step) for step in self._steps() if step < newest and step not in kept]
        exported = _steps_in(self.exports)
        gone += [self.export(step) for step in exported if step not in {*exported[-keep_last:], *keep}]
        gone += [*_abandoned(self.checkpoints)[:-keep_last], *_abandoned(self.exports)[:-keep_last]]
        return [line for folder in gone if (line := _remove(folder)) is not None]

    def newer_than(self, step: int) -> list[int]:
        """Steps of the checkpoints after ``step`` that were complete once."""
        return [other for other in self._steps() if other > step and (self.checkpoint(other) / MANIFEST).exists()]

    def abandon_after(self, step: int, attempt: int) -> list[int]:
        """Move every checkpoint and export newer than ``step`` to a folder ``abandoned`` beside it: the run goes on
        from ``step``, and they are of another future. What interrupted saves left stays for the next save of the same
        step, or for ``prune``. Returns the steps of the checkpoints that were moved. The oldest goes first, so that an
        interrupted call leaves the run as it was, without some of its checkpoints; a second call does the rest."""
        moved = self.newer_than(step)
        if moved:  # first: what it names is there at every instant
            write_atomically(self.checkpoints / "latest", f"step_{step}\n")
        for parent, steps in ((self.checkpoints, moved), (self.exports, _steps_in(self.exports))):
            folder = parent / "abandoned" / f"attempt_{attempt}"
            for other in steps:
                if other > step:
                    folder.mkdir(parents=True, exist_ok=True)
                    os.replace(parent / f"step_{other}", folder / f"step_{other}")
        return moved


def _abandoned(parent: Path) -> list[Path]:
    """Folders of ``parent``/abandoned/attempt_A/step_N, the oldest first."""
    attempts = sorted((parent / "abandoned").glob("attempt_*"), key=lambda path: (len(path.name), path.name))
    return [folder / f"step_{step}" for folder in attempts for step in _steps_in(folder)]
