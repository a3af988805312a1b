"""The supported families, and the choice among them by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...models.families.registry import model_shape, rules_for
from ...models.shape import ModelShape, ShapeError
from ..errors import ConversionError
from ..table import Family
from .deepseek import DEEPSEEK_V3
from .llama import LLAMA, MISTRAL, MIXTRAL
from .qwen2 import QWEN2, QWEN2_MOE
from .qwen3 import QWEN3, QWEN3_MOE

__all__ = ["FAMILIES", "Family", "ModelShape", "family_for", "open_model"]

FAMILIES: tuple[Family, ...] = (QWEN2, QWEN3, LLAMA, MISTRAL, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3)


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json; ConversionError naming the supported ones."""
    try:
        rules = rules_for(hf_config)
    except ShapeError as error:
        raise ConversionError(f"config.json: {error}") from None
    return next(family for family in FAMILIES if family.config_rules is rules)


def open_model(hf_config: Mapping[str, Any]) -> tuple[Family, ModelShape]:
    """Family and shape of a config.json; ConversionError names every option that is not supported."""
    family = family_for(hf_config)
    try:
        return family, model_shape(hf_config)
    except ShapeError as error:
        raise ConversionError(f"config.json of {family.architecture}: {error}") from None
