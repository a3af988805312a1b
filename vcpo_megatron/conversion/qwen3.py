"""Qwen3, dense: norms on the query and key heads, no biases, head_dim set apart from hidden / heads."""

from __future__ import annotations

from .dense import DENSE_ROWS, QK_NORM_ROWS, ROTARY_BUFFERS
from .shape import ConfigRules
from .table import Family

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    rows=(*DENSE_ROWS, *QK_NORM_ROWS),
    rules=ConfigRules(
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "hidden_act": "silu",
            "attention_bias": False,
        },
        # attention_bias would put a bias on o_proj too, which no row here carries.
        required_values={"hidden_act": "silu", "attention_bias": False},
        qk_norm=True,
        sliding_window=True,
    ),
    skipped=ROTARY_BUFFERS,
)
