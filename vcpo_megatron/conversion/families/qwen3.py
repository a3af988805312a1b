"""Qwen3 and Qwen3-MoE: norms on the query and key heads, no biases, head_dim set apart from hidden / heads."""

from __future__ import annotations

from ...models.families import qwen3 as config
from ..table import Family
from .dense import ATTENTION, MLP, OUTER, QK_NORM, ROTARY_BUFFERS
from .experts import expert_rules

_DENSE = (*OUTER, *ATTENTION, *QK_NORM, *MLP)

QWEN3 = Family(config.QWEN3, mapping=_DENSE, skipped=ROTARY_BUFFERS)
QWEN3_MOE = Family(config.QWEN3_MOE, mapping=(*_DENSE, *expert_rules(config.QWEN3_MOE)), skipped=ROTARY_BUFFERS)
