"""config.json of Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from ..shape import ConfigRules
from .common import NO_ATTENTION_BIAS, QWEN

QWEN3 = ConfigRules(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={**QWEN, "num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, "attention_bias": False},
    # attention_bias would put a bias on o_proj too, which no mapping rule carries
    required_values=NO_ATTENTION_BIAS,
    qk_norm=True,
    window="switch",
)

QWEN3_MOE = ConfigRules(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        **QWEN,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    required_values=NO_ATTENTION_BIAS,
    qk_norm=True,
    window="on",
    experts="qwen",
)
