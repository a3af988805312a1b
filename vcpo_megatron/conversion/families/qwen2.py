"""Qwen2 and Qwen2.5: biases on q, k and v. Qwen2-MoE: the same with experts, and one that every token goes to."""

from __future__ import annotations

from ...models.families import qwen2 as config
from ..table import Family
from .dense import ATTENTION, MLP, OUTER, QKV_BIAS, ROTARY_BUFFERS
from .experts import SHARED_GATE, expert_rules, shared_expert_rules

QWEN2 = Family(config.QWEN2, mapping=(*OUTER, *ATTENTION, QKV_BIAS, *MLP), skipped=ROTARY_BUFFERS)
QWEN2_MOE = Family(
    config.QWEN2_MOE,
    mapping=(
        *OUTER,
        *ATTENTION,
        QKV_BIAS,
        *MLP,
        *expert_rules(config.QWEN2_MOE),
        SHARED_GATE,
        *shared_expert_rules(config.QWEN2_MOE),
    ),
    skipped=ROTARY_BUFFERS,
)
