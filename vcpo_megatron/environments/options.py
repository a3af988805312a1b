"""An environment's own options: a pydantic model, read with one line for each problem."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .base import EnvironmentSetupError

_Options = TypeVar("_Options", bound=BaseModel)


def parse_options(model: type[_Options], options: Mapping[str, Any], environment: str) -> _Options:
    """``environment.options`` as ``model``; EnvironmentSetupError names each bad value and what is allowed."""
    try:
        return model(**options)
    except ValidationError as error:
        allowed = ", ".join(model.model_fields)
        raise EnvironmentSetupError(
            *(f"{_explain(model, item)} (options of {environment}: {allowed})" for item in error.errors())
        ) from error


def _explain(model: type[BaseModel], item: ErrorDetails) -> str:
    name = f"environment.options.{'.'.join(map(str, item['loc']))}"
    if item["type"] != "extra_forbidden":
        return f"{name} = {item['input']!r}: {item['msg'].lower()}"
    near = difflib.get_close_matches(str(item["loc"][-1]), model.model_fields, 1)
    return f"{name}: unknown key" + (f"; did you mean environment.options.{near[0]}?" if near else "")
