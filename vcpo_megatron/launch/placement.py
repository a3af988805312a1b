"""Which processes make up a run on this host, and what each one gets: a pure function of the configuration.

Nothing is started, bound or looked up here. ``port`` 0 means that a free port is chosen at start;
``devices`` are GPUs as CUDA_VISIBLE_DEVICES names them (empty: the process runs on CPUs). The learner's partition comes
first, SGLang servers take the devices after it, ``rollout.tensor_parallel`` each; the embedded engine runs on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config.schema import RunConfig
from ..run.directory import RunDirectory

#: Learner ranks and servers of one host; far above its GPUs, far below its ports and process ids.
MAX_PROCESSES = 512

Role = Literal["orchestrator", "environment", "learner", "server"]

#: Module that ``python -m`` runs for a role; the orchestrator starts the servers (orchestrator/peers/servers.py) and
#: the workers of the environment (environments/workers).
MODULES: dict[Role, str] = {
    "orchestrator": "vcpo_megatron.orchestrator",
    "learner": "vcpo_megatron.learner",
}


class PlacementError(ValueError):
    """The host has too few devices for the run; the message names the numbers and the remedy."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run.

    port  None: it listens on none; 0: any free one, chosen at start. The orchestrator's is the
          control socket, learner rank 0's the rendezvous, a server's its HTTP port
    log   relative to the run directory
    """

    role: Role
    rank: int
    host: str
    devices: tuple[str, ...]
    port: int | None
    log: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a run: orchestrator, workers of the environment, learner ranks and servers, each in order.

    cuts_matrices  learner ranks share matrices (``parallel.tensor`` > 1)
    """

    processes: tuple[Process, ...]
    cuts_matrices: bool = False

    def of(self, role: Role) -> tuple[Process, ...]:
        """Processes of one role, by rank."""
        return tuple(process for process in self.processes if process.role == role)

    @property
    def orchestrator(self) -> Process:
        return self.of("orchestrator")[0]

    @property
    def learners(self) -> tuple[Process, ...]:
        return self.of("learner")

    @property
    def servers(self) -> tuple[Process, ...]:
        return self.of("server")

    def table(self, directory: Path) -> str:
        """The processes as text, one a line, with their logs in the run directory ``directory``."""
        rows = [("role", "rank", "host", "devices", "port", "log")]
        for process in self.processes:
            port = {None: "-", 0: "any free"}.get(process.port, str(process.port))
            devices = f"gpu {','.join(process.devices)}" if process.devices else "cpu"
            rows.append((process.role, str(process.rank), process.host, devices, port, str(directory / process.log)))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
        )


def plan_local(config: RunConfig, *, gpus: Sequence[str] = (), host: str = "127.0.0.1") -> Plan:
    """Processes of ``config`` on one host with the GPUs ``gpus``; without any, all run on CPUs.

    Servers that are joined (rollout.addresses) are no processes of the run and take no devices. Raises PlacementError
    when there are GPUs, but fewer than one a learner rank and ``rollout.tensor_parallel`` a SGLang server, or when the
    processes are more than any host runs.
    """
    ranks = config.launch.learner_ranks
    servers, size = config.rollout.started, config.rollout.tensor_parallel if config.rollout.engine == "sglang" else 0
    if ranks + servers > MAX_PROCESSES:
        raise PlacementError(
            f"launch.learner_ranks = {ranks} and rollout.servers = {servers} are {ranks + servers} processes, one host "
            f"runs at most {MAX_PROCESSES}; lower them"
        )
    if gpus and len(gpus) < ranks + servers * size:
        of_servers = f" and rollout.servers = {servers}" * (size > 0) + f" of {size} GPUs each" * (size > 1)
        raise PlacementError(
            f"launch.learner_ranks = {ranks}{of_servers}: {ranks + servers * size} GPUs are needed, {len(gpus)} "
            "visible; lower them, or hide the GPUs (CUDA_VISIBLE_DEVICES= ) to run on CPUs"
        )

    def process(role: Role, rank: int, devices: Sequence[str], port: int | None) -> Process:
        log = RunDirectory(Path()).log(role, rank)
        return Process(role, rank, host, tuple(devices), port, log)

    processes = [process("orchestrator", 0, (), config.launch.control_port)]
    processes += [process("environment", rank, (), None) for rank in range(config.environment.workers)]
    for rank in range(ranks):
        port = config.launch.master_port if rank == 0 else None
        processes.append(process("learner", rank, gpus[rank : rank + 1], port))
    for rank in range(servers):
        port = config.rollout.port + rank if config.rollout.port else 0
        first = ranks + rank * size
        processes.append(process("server", rank, gpus[first : first + size], port))
    return Plan(tuple(processes), cuts_matrices=config.parallel.tensor > 1)
