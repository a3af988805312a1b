"""The architectures that can be trained: how each config.json is read. Their weights are in conversion."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from .shape import ConfigRules, ModelShape, ShapeError, hf_tensors, read_shape

_COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_QWEN: Mapping[str, Any] = {**_COMMON, "use_sliding_window": False, "sliding_window": 4096}
_NO_ATTENTION_BIAS = {"hidden_act": "silu", "attention_bias": False}

QWEN2 = ConfigRules(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28},
    qkv_bias=True,
    window="switch",
)
QWEN3 = ConfigRules(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={**_QWEN, "num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, "attention_bias": False},
    # attention_bias would put a bias on o_proj too, which no row carries
    required_values=_NO_ATTENTION_BIAS,
    qk_norm=True,
    window="switch",
)
LLAMA = ConfigRules(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={**_COMMON, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    required_values={**_NO_ATTENTION_BIAS, "mlp_bias": False},
)
MISTRAL = ConfigRules(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={**_COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    window="width",
)
MIXTRAL = ConfigRules(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults={
        **_COMMON,
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
QWEN2_MOE = ConfigRules(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={
        **_QWEN,
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
QWEN3_MOE = ConfigRules(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        **_QWEN,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    required_values=_NO_ATTENTION_BIAS,
    qk_norm=True,
    window="on",
    experts="qwen",
)

DEEPSEEK_V3 = ConfigRules(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    defaults={
        **_COMMON,
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
        **_NO_ATTENTION_BIAS,
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

FAMILIES = (QWEN2, QWEN3, LLAMA, MISTRAL, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3)


#: Architectures that were looked at, and why they are not supported.
_REFUSED = {
    "GptOssForCausalLM": " (attention sinks, and biases of experts, routers and output projections, have no exact "
    "per-trajectory gradient here; its experts are stored in mxfp4)",
}


def rules_for(config: Mapping[str, Any]) -> ConfigRules:
    """The rules of a config.json, by ``architectures`` (by ``model_type`` where that is absent).

    Raises ShapeError naming the supported ones.
    """
    architectures = config.get("architectures")
    for rules in FAMILIES:
        if architectures == [rules.architecture]:
            return rules
        if not architectures and config.get("model_type") == rules.model_type:
            return rules
    if architectures:
        named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else repr(architectures)
    else:
        named = f"model_type {config.get('model_type')!r}"
    reason = _REFUSED.get(named, "")
    supported = ", ".join(rules.architecture for rules in FAMILIES)
    raise ShapeError([f"the architecture {named} is not supported{reason}; supported: {supported}"])


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Sizes and options of a parsed config.json; ShapeError names everything that is not supported."""
    return read_shape(config, rules_for(config))


@lru_cache(maxsize=8)
def tensors(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every tensor of the HF checkpoint of ``shape``."""
    rules = next(rules for rules in FAMILIES if rules.architecture == shape.architecture)
    return hf_tensors(shape, rules)
