"""What a worker is given to make its environment, and what it has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.schema import EnvironmentConfig, RunConfig
from ..base import Environment, Example


@dataclass(frozen=True)
class WorkerSetup:
    """The arguments of the environment's factory, and the seconds that an episode may spend in its code."""

    environment: EnvironmentConfig
    tokenizer_dir: Path
    seed: int
    episode_timeout_s: float

    @classmethod
    def of(cls, config: RunConfig) -> WorkerSetup:
        """Of ``config``: by default an episode fails, and is counted, before its group is given up."""
        given, waits = config.environment.episode_timeout_s, config.staleness.wait_s
        limit = waits / 2 if given is None else given
        return cls(config.environment, config.model.path, config.train.seed, limit)


@dataclass(frozen=True)
class Made:
    """``description``: see ``values.description``."""

    environment: Environment
    heldout: Sequence[Example]
    description: dict[str, Any]
