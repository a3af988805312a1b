"""The supported families, and the choice among them by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ConversionError
from .llama import LLAMA
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .shape import ModelShape
from .table import Family

__all__ = ["FAMILIES", "Family", "ModelShape", "family_for"]

FAMILIES: tuple[Family, ...] = (QWEN2, QWEN3, LLAMA)


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by ``architectures`` (by ``model_type`` where that is absent).

    Raises ConversionError naming the supported ones.
    """
    architectures = hf_config.get("architectures")
    for family in FAMILIES:
        if architectures == [family.architecture]:
            return family
        if not architectures and hf_config.get("model_type") == family.model_type:
            return family
    named = ", ".join(architectures) if architectures else f"model_type {hf_config.get('model_type')!r}"
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ConversionError(f"config.json names the architecture {named}; supported: {supported}")
