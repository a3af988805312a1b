"""Whether a configuration can run at all, before anything starts: its own checks and its environment's, together."""

from __future__ import annotations

from ..config.checks.problems import problems
from ..config.schema import RunConfig
from ..environments.registry import validate_environment
from ..launch.devices import visible_gpus
from ..launch.reach import reach_problems
from ..models.folder import read_model
from ..run.errors import ConfigError


def config_problems(config: RunConfig) -> list[str]:
    """Everything that keeps ``config`` from running here, but for what a start takes: its ports, its run directory."""
    found = [*problems(config), *reach_problems(config, visible_gpus())]
    try:
        context = config.rollout.context_length or read_model(config.model.path).max_position_embeddings
    except ConfigError:
        return found  # already among them
    of_environment = validate_environment(config.environment, config.model.path, config.train.seed, context)
    # A file that is missing or broken was named once already, with its key.
    files = (config.environment.data, config.environment.heldout, config.model.path / "tokenizer.json")
    named = [str(file) for file in files if file and any(str(file) in problem for problem in found)]
    return found + [line for line in of_environment if not any(file in line for file in named)]
