"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from .dense import DENSE_ROWS, QKV_BIAS_ROW, ROTARY_BUFFERS
from .shape import ConfigRules
from .table import Family

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    rows=(*DENSE_ROWS, QKV_BIAS_ROW),
    rules=ConfigRules(
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "hidden_act": "silu",
        },
        required_values={"hidden_act": "silu"},
        qkv_bias=True,
        sliding_window=True,
    ),
    skipped=ROTARY_BUFFERS,
)
