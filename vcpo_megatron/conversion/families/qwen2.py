"""Qwen2 and Qwen2.5: biases on q, k and v. Qwen2-MoE: the same with experts, and one that every token goes to."""

from __future__ import annotations

from ...models import families as rules
from ..table import Family
from .dense import ATTENTION_ROWS, MLP_ROWS, OUTER_ROWS, QKV_BIAS_ROW, ROTARY_BUFFERS
from .experts import SHARED_GATE_ROW, expert_rows, shared_expert_rows

QWEN2 = Family(rules.QWEN2, rows=(*OUTER_ROWS, *ATTENTION_ROWS, QKV_BIAS_ROW, *MLP_ROWS), skipped=ROTARY_BUFFERS)
QWEN2_MOE = Family(
    rules.QWEN2_MOE,
    rows=(
        *OUTER_ROWS,
        *ATTENTION_ROWS,
        QKV_BIAS_ROW,
        *MLP_ROWS,
        *expert_rows(rules.QWEN2_MOE),
        SHARED_GATE_ROW,
        *shared_expert_rows(rules.QWEN2_MOE),
    ),
    skipped=ROTARY_BUFFERS,
)
