"""Where a run keeps its things, and how a checkpoint is known to be complete.

    RUN_DIR/
      resolved.toml            the configuration with every default filled in
      metrics.jsonl            one object a step; cut back on resume
      rollouts.sqlite          every group and trajectory (opened by the orchestrator alone)
      checkpoints/step_N/      Megatron distributed checkpoint + manifest.json, written last
      checkpoints/latest       text file "step_N", replaced atomically
      logs/ROLE.RANK.log       stdout and stderr of every process
      tensorboard/
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

MANIFEST = "manifest.json"


class Manifest(BaseModel):
    """Completion marker of a checkpoint: written last, and atomically, by learner rank 0.

    ``orchestrator`` is the opaque state that the orchestrator handed over with the request
    (data cursor, staleness counters, store position); it is given back unread on resume.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    step: int
    attempt: int
    version_number: int
    learner: dict[str, Any]
    orchestrator: dict[str, Any]


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` so that a reader sees the old or the new content, durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run directory and its complete checkpoints."""

    path: Path

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.toml"

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
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, role: str, rank: int) -> Path:
        return self.logs / f"{role}.{rank}.log"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def manifest(self, step: int) -> Manifest:
        """Manifest of the complete checkpoint ``step``; FileNotFoundError when it is not complete."""
        return Manifest.model_validate(json.loads((self.checkpoint(step) / MANIFEST).read_text()))

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending, whatever else was left behind."""
        found = self.checkpoints.glob(f"step_*/{MANIFEST}") if self.checkpoints.is_dir() else ()
        names = (path.parent.name.removeprefix("step_") for path in found)
        return sorted(int(name) for name in names if name.isdecimal())

    def complete(self, step: int, manifest: Manifest) -> None:
        """Mark checkpoint ``step`` complete and make it the latest."""
        write_atomically(self.checkpoint(step) / MANIFEST, manifest.model_dump_json(indent=1))
        write_atomically(self.checkpoints / "latest", f"step_{step}\n")

    def prune(self, keep_last: int) -> None:
        """Remove all but the newest ``keep_last`` complete checkpoints."""
        for step in self.complete_steps()[:-keep_last]:
            (self.checkpoint(step) / MANIFEST).unlink()  # no longer complete before it is no longer whole
            shutil.rmtree(self.checkpoint(step))
