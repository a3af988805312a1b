"""config.json of DeepSeek-V3."""

from __future__ import annotations

from ..shape import ConfigRules
from .common import COMMON, NO_ATTENTION_BIAS

DEEPSEEK_V3 = ConfigRules(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    defaults={
        **COMMON,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    },
    required_values={
        **NO_ATTENTION_BIAS,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    experts="deepseek",
    shared="mlp.shared_experts",
    latent=True,
    unused_layers="num_nextn_predict_layers",
)
