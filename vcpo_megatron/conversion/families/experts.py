"""Mapping rules of a mixture of experts. Experts are numbered over the whole model, whatever rank holds them."""

from __future__ import annotations

from ...models.shape import ConfigRules
from ..ops import Cut, GateUp, Replicate
from ..table import MappingRule

_M = "decoder.layers.{layer}.mlp."
_H = "model.layers.{layer}."


def expert_rules(rules: ConfigRules) -> tuple[MappingRule, ...]:
    """Router and routed experts, whose HF names differ between families."""
    gate, up, down = (f"{_H}{rules.moe}.experts.{{expert}}.{name}.weight" for name in rules.expert)
    expert = _M + "experts.local_experts.{expert}."
    return (
        MappingRule(_M + "router.weight", (f"{_H}{rules.moe}.gate.weight",), Replicate(), layers="moe"),
        MappingRule(expert + "linear_fc1.weight", (gate, up), GateUp(), layers="moe"),
        MappingRule(expert + "linear_fc2.weight", (down,), Cut(1), layers="moe"),
    )


def shared_expert_rules(rules: ConfigRules) -> tuple[MappingRule, ...]:
    """The expert that every token goes to."""
    gate, up, down = (f"{_H}{rules.shared}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return (
        MappingRule(_M + "shared_experts.linear_fc1.weight", (gate, up), GateUp(), layers="moe"),
        MappingRule(_M + "shared_experts.linear_fc2.weight", (down,), Cut(1), layers="moe"),
    )


SHARED_GATE = MappingRule(
    _M + "shared_experts.gate_weight", (_H + "mlp.shared_expert_gate.weight",), Replicate(), layers="moe"
)
