"""The context of a process of the run: its parent hands it over in environment variables.

The same variables are set by the local launcher, by Slurm and by MPI, so a role is started the
same way everywhere: ``python -m vcpo_megatron.ROLE`` with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT for learner ranks, and the VCPO_* variables below for all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..run.directory import RunDirectory
from .load import load_resolved
from .schema import RunConfig

#: The last line in the log of a process that fails begins with this.
ERROR_PREFIX = "vcpo: error: "
#: A line of a log that begins with this is shown to the user as well.
WARNING_PREFIX = "vcpo: warning: "
#: So is one that begins with this, but without the prefix: news of a run that is well.
NOTE_PREFIX = "vcpo: note: "
#: In the last line of a learner rank that did not fail itself: the orchestrator ended the run, for its own reason.
ENDED_BY_ORCHESTRATOR = "orchestrator ended the run: "


@dataclass(frozen=True)
class ProcessContext:
    """run_dir, attempt (from 1), resume_step (None: a fresh run), token (secret of the run),
    control (address of the orchestrator's socket, "tcp://host:port"), server_ports (one a server that the run starts),
    server_devices (GPUs of all of them, in order; empty: on CPUs), run (part of every version's name, see
    ``types.PolicyVersion``), learner_devices (GPUs of all learner ranks, in order; empty: on CPUs)."""

    run_dir: Path
    attempt: int
    resume_step: int | None
    token: str
    control: str
    server_ports: tuple[int, ...]
    server_devices: tuple[str, ...] = ()
    run: str = ""
    learner_devices: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Variables to set in a child's environment."""
        return {
            "VCPO_RUN_DIR": str(self.run_dir),
            "VCPO_ATTEMPT": str(self.attempt),
            "VCPO_RESUME_STEP": "" if self.resume_step is None else str(self.resume_step),
            "VCPO_RUN_TOKEN": self.token,
            "VCPO_CONTROL": self.control,
            "VCPO_SERVER_PORTS": ",".join(map(str, self.server_ports)),
            "VCPO_SERVER_DEVICES": ",".join(self.server_devices),
            "VCPO_RUN": self.run,
            "VCPO_LEARNER_DEVICES": ",".join(self.learner_devices),
        }

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ProcessContext:
        """Inverse of ``environment``; KeyError names the variable that is missing."""
        return cls(
            run_dir=Path(environ["VCPO_RUN_DIR"]),
            attempt=int(environ["VCPO_ATTEMPT"]),
            resume_step=int(environ["VCPO_RESUME_STEP"]) if environ["VCPO_RESUME_STEP"] else None,
            token=environ["VCPO_RUN_TOKEN"],
            control=environ["VCPO_CONTROL"],
            server_ports=tuple(int(port) for port in environ["VCPO_SERVER_PORTS"].split(",") if port),
            server_devices=tuple(device for device in environ["VCPO_SERVER_DEVICES"].split(",") if device),
            run=environ["VCPO_RUN"],
            learner_devices=tuple(device for device in environ["VCPO_LEARNER_DEVICES"].split(",") if device),
        )

    def config(self) -> RunConfig:
        """The configuration of this attempt: on a resume the run takes it over when nothing has refused it."""
        proposed = self.directory.proposed
        return load_resolved(proposed if proposed.exists() else self.directory.resolved)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.run_dir)
