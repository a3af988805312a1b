"""config.json of Llama 2 and 3, Mistral and Mixtral."""

from __future__ import annotations

from ..shape import ConfigRules
from .common import COMMON, NO_ATTENTION_BIAS

LLAMA = ConfigRules(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={**COMMON, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    required_values={**NO_ATTENTION_BIAS, "mlp_bias": False},
)

MISTRAL = ConfigRules(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={**COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    window="width",
)

MIXTRAL = ConfigRules(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    window="width",
    experts="mixtral",
    moe="block_sparse_moe",
    expert=("w1", "w3", "w2"),
)
