"""An environment's own options: a pydantic model, read with one line for each problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .base import EnvironmentSetupError

_Options = TypeVar("_Options", bound=BaseModel)


def parse_options(model: type[_Options], options: Mapping[str, Any], environment: str) -> _Options:
    """``environment.options`` as ``model``; EnvironmentSetupError names each bad value and what is allowed."""
    try:
        return model(**options)
    except ValidationError as error:
        allowed = ", ".join(model.model_fields)
        raise EnvironmentSetupError(
            *(
                f"environment.options.{'.'.join(map(str, item['loc']))} = {item['input']!r}: "
                f"{item['msg'].lower()} (options of {environment}: {allowed})"
                for item in error.errors()
            )
        ) from error
