"""Llama 2 and 3, Mistral and Mixtral: no biases, no norms on heads."""

from __future__ import annotations

from ...models.families import llama as config
from ..table import Family
from .dense import ATTENTION, MLP, OUTER, ROTARY_BUFFERS
from .experts import expert_rules

_ATTENTION = (*OUTER, *ATTENTION)

LLAMA = Family(config.LLAMA, mapping=(*_ATTENTION, *MLP), skipped=ROTARY_BUFFERS)
MISTRAL = Family(config.MISTRAL, mapping=(*_ATTENTION, *MLP), skipped=ROTARY_BUFFERS)
MIXTRAL = Family(config.MIXTRAL, mapping=(*_ATTENTION, *expert_rules(config.MIXTRAL)), skipped=ROTARY_BUFFERS)
