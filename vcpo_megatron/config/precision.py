"""``model.dtype = "auto"``: the dtype that the model's folder states, whatever machine reads it."""

from __future__ import annotations

from collections.abc import Iterator

from ..models.folder import stated_dtype
from ..run.errors import ConfigError
from .schema import RunConfig

AUTO = "auto"


def with_dtype(config: RunConfig) -> RunConfig:
    """``config`` with the dtype of its model in place of "auto"; unchanged where the folder does not say, which
    ``dtype_problems`` reports."""
    if config.model.dtype != AUTO:
        return config
    try:
        dtype = stated_dtype(config.model.path)
    except ConfigError:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def dtype_problems(config: RunConfig) -> Iterator[str]:
    """Why "auto" names no dtype, for a folder whose config.json can be read."""
    if config.model.dtype == AUTO:
        try:
            stated_dtype(config.model.path)
        except ConfigError as error:
            yield from error.problems
