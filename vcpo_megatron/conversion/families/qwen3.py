"""Qwen3 and Qwen3-MoE: norms on the query and key heads, no biases, head_dim set apart from hidden / heads."""

from __future__ import annotations

from ...models import families as rules
from ..table import Family
from .dense import ATTENTION_ROWS, MLP_ROWS, OUTER_ROWS, QK_NORM_ROWS, ROTARY_BUFFERS
from .experts import expert_rows

_ROWS = (*OUTER_ROWS, *ATTENTION_ROWS, *QK_NORM_ROWS, *MLP_ROWS)

QWEN3 = Family(rules.QWEN3, rows=_ROWS, skipped=ROTARY_BUFFERS)
QWEN3_MOE = Family(rules.QWEN3_MOE, rows=(*_ROWS, *expert_rows(rules.QWEN3_MOE)), skipped=ROTARY_BUFFERS)
