"""config.json of Qwen2, Qwen2.5 and Qwen2-MoE."""

from __future__ import annotations

from ..shape import ConfigRules
from .common import QWEN

QWEN2 = ConfigRules(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={**QWEN, "num_key_value_heads": 32, "max_window_layers": 28},
    qkv_bias=True,
    window="switch",
)

QWEN2_MOE = ConfigRules(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={
        **QWEN,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    required_values={"hidden_act": "silu", "qkv_bias": True},
    qkv_bias=True,
    window="on",
    experts="qwen-shared",
)
