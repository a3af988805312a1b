"""Everything that keeps a configuration from being run: its sections together, and the files that it names.

Nothing is changed here, and nothing is started: every problem is a line that names key, value and remedy, and all of
them are returned together. Checks of this machine (free ports, a writable run directory) belong to the launcher; those
of an environment to the environment.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ...models import folder
from ...run.errors import ConfigError
from ..precision import dtype_problems
from ..schema import RunConfig
from .algorithm import algorithm_problems, idle_keys, training_problems
from .experts import expert_problems
from .limits import limit_problems
from .parallel import parallel_problems, split_problems
from .rollout import (
    episode_problems,
    generation_problems,
    model_rollout_problems,
    replay_problems,
    rollout_problems,
    weight_sync_problems,
)
from .servers import server_problems
from .start import start_problems
from .transformer_engine import engine_model_problems, engine_problems


def problems(config: RunConfig, *, begins: bool = True) -> list[str]:
    """Everything that keeps ``config`` from being run; empty when nothing does. ``begins``: from its start, not from a
    checkpoint of its own, for which the weights that it started from are not needed any more."""
    found = [
        *limit_problems(config),
        *parallel_problems(config),
        *engine_problems(config),
        *algorithm_problems(config),
        *generation_problems(config),
        *training_problems(config),
        *idle_keys(config),
        *rollout_problems(config),
        *episode_problems(config),
        *server_problems(config),
        *weight_sync_problems(config),
        *replay_problems(config),
        *_files(config),
        *_ports(config),
        *_reports(config),
    ]
    path = config.model.path
    try:
        shape = folder.read_model(path)
    except ConfigError as error:
        return found + error.problems
    return [
        *found,
        *split_problems(config, shape),
        *expert_problems(config, shape),
        *model_rollout_problems(config, shape),
        *engine_model_problems(config, shape),
        *dtype_problems(config),
        *(start_problems(config, shape) if begins else ()),
        *folder.weight_problems(path, shape),
        *folder.tokenizer_problems(path, shape),
        *folder.generation_problems(path, shape),
    ]


def _files(config: RunConfig) -> Iterator[str]:
    for name in ("data", "heldout"):
        path = getattr(config.environment, name)
        if path is not None and not path.is_file():
            yield f"environment.{name} = {path}: {'not a file' if path.exists() else 'no such file'}"


def _reports(config: RunConfig) -> Iterator[str]:
    reports = config.observability
    if reports.wandb_project is None:
        if reports.wandb_mode != "online":
            yield f'observability.wandb_mode = "{reports.wandb_mode}": has no effect without wandb_project; give both'
    elif importlib.util.find_spec("wandb") is None:
        yield (
            f'observability.wandb_project = "{reports.wandb_project}": the package wandb is not installed; pip install '
            "wandb, or leave the key out"
        )


def _ports(config: RunConfig) -> Iterator[str]:
    """Ports given as numbers must differ; 0 means any free one."""
    launch, rollout = config.launch, config.rollout
    claims: dict[int, str] = {}
    wanted = [(launch.control_port, "launch.control_port"), (launch.master_port, "launch.master_port")]
    if rollout.port and rollout.started:
        last = rollout.port + rollout.servers - 1
        if last > 65535:
            yield f"rollout.port = {rollout.port}: with {rollout.servers} servers the last port would be {last}"
        wanted += [(rollout.port + rank, f"rollout.port (server {rank})") for rank in range(rollout.servers)]
    for port, name in wanted:
        if port and port in claims:
            yield f"{name} = {port}: the port is also that of {claims[port]}; give another, or 0 for any free one"
        claims.setdefault(port, name)
