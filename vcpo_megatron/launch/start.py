"""What a run fixes at its start, so that a resume finds it as it was: what follows from the day, from other keys, and
from what lies on the disk then."""

from __future__ import annotations

import datetime
from pathlib import Path

from ..config.checks.start import start_checkpoint
from ..config.precision import AUTO, with_dtype
from ..config.schema import RunConfig

#: Keys that ``settled`` may give a value to.
SETTLED = ("model.dtype", "optimizer.schedule_steps", "environment.date", "train.start_from")


def settled(config: RunConfig, today: datetime.date) -> RunConfig:
    """``config`` as the run keeps it: with its dtype, the length of its schedule, the date that chat templates print,
    and the very checkpoint that it starts from. ConfigError when there is none any more."""
    config = with_dtype(config)
    optimizer, train, environment = config.optimizer, config.train, config.environment
    if optimizer.schedule != "constant" and optimizer.schedule_steps is None:
        optimizer = optimizer.model_copy(update={"schedule_steps": train.steps})
    if environment.date is None:
        environment = environment.model_copy(update={"date": today})
    if train.start_from is not None:
        train = train.model_copy(update={"start_from": start_checkpoint(train.start_from)})
    return config.model_copy(update={"optimizer": optimizer, "train": train, "environment": environment})


def was_settled(key: str, given: object, used: object) -> bool:
    """Whether the run's value ``used`` of ``key`` is what ``settled`` makes of ``given``, whenever it was asked."""
    if key not in SETTLED or used is None:
        return False
    if key == "train.start_from":
        return isinstance(given, Path) and isinstance(used, Path) and used.is_relative_to(given)
    return given == AUTO if key == "model.dtype" else given is None
