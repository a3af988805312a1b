"""Llama 2 and 3 (without rope scaling): no biases."""

from __future__ import annotations

from .dense import DENSE_ROWS, ROTARY_BUFFERS
from .shape import ConfigRules
from .table import Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    rows=DENSE_ROWS,
    rules=ConfigRules(
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        required_values={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ),
    skipped=ROTARY_BUFFERS,
)
