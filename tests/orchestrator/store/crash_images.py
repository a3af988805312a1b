"""Crashes after every single write of a run: what the disk holds then, and a learner whose parameters can be compared.

A run is kept on disk by four writers: the store, the checkpoints of the learner, ``metrics.jsonl``, and whatever
``write_atomically`` replaces. ``Disk`` stands behind all of them: after each write it copies the run directory, which
is what a kill -9 at that instant would leave behind. A resume from a copy is a resume after that crash.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vcpo_megatron.observability.sinks as sinks
import vcpo_megatron.orchestrator.controller as loop
import vcpo_megatron.run.directory as run_directory
from tests.orchestrator.fake_run import FakeLearner, FakeRun
from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.types import Batch

WEIGHTS = "weights.bin"
#: A page of the database in the write-ahead log, with its header (SQLite's file format, section 4.1).
WAL_HEADER, WAL_FRAME = 32, 24 + 4096


class DeterministicLearner(FakeLearner):
    """Its parameter is one float64 that depends on every token, reward and weight in the order of training.

    ``history`` is what this line of checkpoints was trained on; both are read back from a checkpoint.
    """

    def __init__(self, context: ProcessContext, writes: Any = None) -> None:
        super().__init__(context)
        self.parameter = 0.5
        self.history: list[str] = []
        self.published: dict[int, str] = {}
        self._writes = writes
        if context.resume_step is not None:
            data = (context.directory.checkpoint(context.resume_step) / WEIGHTS).read_bytes()
            (self.parameter,) = struct.unpack("<d", data[:8])
            self.history = data[8:].decode().split()
        self.published[self.version.number] = self.parameter.hex()

    def learn(self, batch: Batch) -> None:
        for group in batch.groups:
            for t in group.trajectories:
                scored = sum((i + 1) * int(token) for i, token in enumerate(t.tokens)) * (t.reward - 0.3)
                self.parameter = (0.9 * self.parameter + scored * float(t.behavior_logprobs.sum()) / 7.0) % 17.0
                self.history.append(f"{group.prompt_id}/{t.sample_index}")
        self.published[batch.step + 1] = self.parameter.hex()

    def save(self, folder: Path) -> None:
        data = struct.pack("<d", self.parameter) + "\n".join(self.history).encode()
        for end in (5, len(data)):  # a torn file, then the whole one
            with self._writes("weights"):
                (folder / WEIGHTS).write_bytes(data[:end])


@dataclass
class Disk:
    """``images``: copies of ``run_dir`` that differ, in the order of writes. ``writes``: how many there were in all."""

    run_dir: Path
    folder: Path
    writes: int = 0
    images: list[Path] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    _last: str = ""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def alone(self) -> AbstractContextManager[object]:
        """Nothing else is written inside."""
        return self._lock

    @contextmanager
    def writing(self, kind: str) -> Iterator[None]:
        """A write goes on inside; the disk is copied when it is done. One write at a time."""
        with self._lock:
            yield
            self.writes += 1
            self.kinds[kind] += 1
            files = sorted(path for path in self.run_dir.rglob("*") if path.is_file())
            digest = hashlib.sha256()
            for path in files:
                digest.update(str(path).encode() + path.read_bytes())
            if digest.hexdigest() != self._last:
                self._last = digest.hexdigest()
                image = self.folder / f"{len(self.images):04d}"
                shutil.copytree(self.run_dir, image)
                self.images.append(image)


class _WatchedConnection:
    """An sqlite3 connection whose every changing statement is a write of ``disk``."""

    def __init__(self, connection: Any, disk: Disk) -> None:
        self._connection, self._disk = connection, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *parameters: Any) -> Any:
        if statement.lstrip().startswith(("SELECT", "PRAGMA")):
            return self._connection.execute(statement, *parameters)
        with self._disk.writing("store"):
            return self._connection.execute(statement, *parameters)

    def executemany(self, statement: str, rows: Any) -> Any:
        with self._disk.writing("store"):
            return self._connection.executemany(statement, rows)


@contextmanager
def watched(disk: Disk) -> Iterator[None]:
    """Every write of the run goes through ``disk`` meanwhile."""

    class WatchedStore(RolloutStore):
        def __init__(self, path: Path, *, create: bool = True) -> None:
            with disk.writing("store"):
                super().__init__(path, create=create)
            self._connection = _WatchedConnection(self._connection, disk)  # type: ignore[assignment]

    whole_row, atomically = sinks.JsonlSink.write, run_directory.write_atomically

    def row_by_halves(self: Any, row: Any) -> None:
        with disk.writing("metrics"):
            self._file.write(b'{"step": 1')  # torn: taken back below, as the row is written once more, whole
        with disk.writing("metrics"):
            self._file.truncate(self._file.seek(0, 2) - 10)
            whole_row(self, row)

    def atomically_watched(path: Path, text: str) -> None:
        with disk.writing("replace"):
            path.with_name(f".{path.name}.1.tmp").write_text(text[: len(text) // 2])
        with disk.writing("replace"):
            path.with_name(f".{path.name}.1.tmp").unlink()
            atomically(path, text)

    prune = run_directory.RunDirectory.prune

    def prune_watched(self: RunDirectory, *arguments: Any) -> list[str]:
        with disk.alone():
            return prune(self, *arguments)

    def remove_watched(path: Path) -> None:
        with disk.writing("prune"):
            pass  # its manifest is gone, its files are there
        with disk.writing("prune"):
            shutil.rmtree(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory.RunDirectory, "prune", prune_watched)
        patch.setattr(run_directory, "shutil", SimpleNamespace(rmtree=remove_watched))
        patch.setattr(loop, "RolloutStore", WatchedStore)
        patch.setattr(sinks.JsonlSink, "write", row_by_halves)
        patch.setattr(run_directory, "write_atomically", atomically_watched)
        patch.setattr(sinks, "write_atomically", atomically_watched)
        yield


def torn_logs(before: Path, after: Path) -> Iterator[bytes]:
    """Every write-ahead log on the way from image ``before`` to ``after``: cut after each page, and within it."""
    name = "rollouts.sqlite-wal"
    if not (before / name).exists() or not (after / name).exists():
        return
    old, new = (before / name).read_bytes(), (after / name).read_bytes()
    if new[: len(old)] != old:
        return  # the log began anew
    for end in range(len(old) + WAL_FRAME, len(new), WAL_FRAME):
        yield new[: end - WAL_FRAME // 2]
        yield new[:end]


def run_of(run_dir: Path, config: RunConfig, disk: Disk | None = None, attempt: int = 1) -> FakeRun:
    """An attempt of a run with a ``DeterministicLearner``; it resumes from the newest complete checkpoint, if any."""
    steps = RunDirectory(run_dir).complete_steps() if run_dir.exists() else []
    made = FakeRun(run_dir, config, attempt=attempt, resume_step=steps[-1] if steps else None)
    learner = DeterministicLearner(made.context, disk.writing if disk else _unwatched)
    made.learner = learner

    def setup(run: FakeRun) -> None:
        for client in run.clients:
            client.latency_s = 0.0
            client.policy = lambda version: learner.published[int(version.split(".")[1])]

    made.setup = setup
    return made


@contextmanager
def _unwatched(kind: str) -> Iterator[None]:
    yield
