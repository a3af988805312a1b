"""Llama 2 and 3, Mistral and Mixtral: no biases, no norms on heads."""

from __future__ import annotations

from ...models import families as rules
from ..table import Family
from .dense import ATTENTION_ROWS, MLP_ROWS, OUTER_ROWS, ROTARY_BUFFERS
from .experts import expert_rows

_ATTENTION = (*OUTER_ROWS, *ATTENTION_ROWS)

LLAMA = Family(rules.LLAMA, rows=(*_ATTENTION, *MLP_ROWS), skipped=ROTARY_BUFFERS)
MISTRAL = Family(rules.MISTRAL, rows=(*_ATTENTION, *MLP_ROWS), skipped=ROTARY_BUFFERS)
MIXTRAL = Family(rules.MIXTRAL, rows=(*_ATTENTION, *expert_rows(rules.MIXTRAL)), skipped=ROTARY_BUFFERS)
