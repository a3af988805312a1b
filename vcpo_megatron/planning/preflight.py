"""Whether a configuration can run at all, before anything starts: its own checks and its environment's, together."""

from __future__ import annotations

from collections.abc import Callable

from ..config.checks.problems import problems
from ..config.schema import RunConfig
from ..environments.registry import validate_environment
from ..models.folder import read_model
from ..run.errors import ConfigError


def config_problems(
    config: RunConfig, *, begins: bool = True, warn: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Everything that keeps ``config`` from running on any machine; ``begins``: from its start, not from a checkpoint
    of its own. ``warn`` is told what it would run with, but hardly as it is meant."""
    found = problems(config, begins=begins)
    try:
        context = config.rollout.context_length or read_model(config.model.path).max_position_embeddings
    except ConfigError:
        return found  # already among them
    of_environment = validate_environment(config.environment, config.model.path, config.train.seed, context, warn=warn)
    # A file that is missing or broken was named once already, with its key.
    files = (config.environment.data, config.environment.heldout, config.model.path / "tokenizer.json")
    named = [str(file) for file in files if file and any(str(file) in problem for problem in found)]
    return found + [line for line in of_environment if not any(file in line for file in named)]
