"""The architectures that can be trained, and the choice among them by config.json. Their weights are in conversion."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..shape import ConfigRules, ModelShape, ShapeError, hf_tensors, read_shape
from .deepseek import DEEPSEEK_V3
from .llama import LLAMA, MISTRAL, MIXTRAL
from .qwen2 import QWEN2, QWEN2_MOE
from .qwen3 import QWEN3, QWEN3_MOE

FAMILIES = (QWEN2, QWEN3, LLAMA, MISTRAL, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3)

#: Architectures that were looked at, and why they are not supported.
_REFUSED = {
    "GptOssForCausalLM": " (attention sinks, and biases of experts, routers and output projections, have no exact "
    "per-trajectory gradient here; its experts are stored in mxfp4)",
}


def rules_for(config: Mapping[str, Any]) -> ConfigRules:
    """The rules of a config.json, by ``architectures`` (by ``model_type`` where that is absent).

    Raises ShapeError naming the supported ones.
    """
    architectures = config.get("architectures")
    for rules in FAMILIES:
        if architectures == [rules.architecture]:
            return rules
        if not architectures and config.get("model_type") == rules.model_type:
            return rules
    if architectures:
        named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else repr(architectures)
    else:
        named = f"model_type {config.get('model_type')!r}"
    reason = _REFUSED.get(named, "")
    supported = ", ".join(rules.architecture for rules in FAMILIES)
    raise ShapeError([f"the architecture {named} is not supported{reason}; supported: {supported}"])


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Sizes and options of a parsed config.json; ShapeError names everything that is not supported."""
    return read_shape(config, rules_for(config))


@lru_cache(maxsize=8)
def tensors(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every tensor of the HF checkpoint of ``shape``."""
    rules = next(rules for rules in FAMILIES if rules.architecture == shape.architecture)
    return hf_tensors(shape, rules)
