"""config.json -> ModelShape, and the refusals that keep an unsupported option from being ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig

from tests.learner.families import FAMILIES as TESTED
from vcpo_megatron.models.experts import Experts
from vcpo_megatron.models.families.registry import FAMILIES, model_shape, rules_for
from vcpo_megatron.models.latent_attention import LatentAttention
from vcpo_megatron.models.rope import Rope
from vcpo_megatron.models.shape import ModelShape, ShapeError
from vcpo_megatron.models.window import Window

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
}

# As published with Qwen2.5-0.5B, by transformers 4.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def shape(config: dict[str, Any]) -> ModelShape:
    return model_shape(config)


def test_known_answer_qwen25():
    assert shape(QWEN25) == ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=24,
        hidden_size=896,
        ffn_hidden_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=151936,
        norm_eps=1e-6,
        rope=Rope(1000000.0),
        tie_word_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
        max_position_embeddings=32768,
    )


def test_qwen3_head_dim_is_not_hidden_over_heads():
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False}
    config = {**QWEN25, **qwen3}
    found = shape(config)
    assert (found.head_dim, found.q_size, found.kv_size, found.queries_per_group) == (128, 14 * 128, 256, 7)
    assert found.qk_norm and not found.qkv_bias


def test_rope_theta_of_transformers_5_wins_over_the_default():
    config = {key: value for key, value in QWEN25.items() if key != "rope_theta"}
    assert shape(config).rope.theta == 10000.0
    assert shape({**config, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}).rope.theta == 5e5
    assert shape({**config, "rope_theta": 3e4, "rope_scaling": None}).rope.theta == 3e4


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_what_transformers_writes_is_read_back(family, tmp_path):
    """An independent reader: the attributes of transformers' own configuration object."""
    config = CONFIGS[family.model_type](
        architectures=[family.architecture],
        num_hidden_layers=3,
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=6 if family.latent else 2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 12345.0, "rope_type": "default"},
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    config.save_pretrained(tmp_path)
    found = shape(json.loads((tmp_path / "config.json").read_text()))
    assert found.rope.theta == 12345.0 and found.norm_eps == 1e-5 and found.tie_word_embeddings
    head_dim = "qk_head_dim" if family.latent else "head_dim"
    assert found.head_dim == (getattr(config, head_dim, None) or 48 // 6)
    assert (found.vocab_size, found.max_position_embeddings) == (config.vocab_size, config.max_position_embeddings)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family):
    """A key that config.json leaves out means what transformers takes it to mean."""
    config = CONFIGS[family.model_type]()
    for key, value in family.defaults.items():
        if key == "rope_theta":
            assert config.rope_parameters["rope_theta"] == value
        elif key == "sliding_window":
            assert type(config).sliding_window == value
        elif key == "max_window_layers" and not hasattr(config, key):
            pass  # read by older versions
        else:
            assert getattr(config, key) == value, key


def test_multi_head_attention_where_key_heads_are_not_given():
    config = {**QWEN25, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": None}
    assert shape(config).num_key_value_heads == 14
    del config["num_key_value_heads"]
    assert shape(config).num_key_value_heads == 14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, r"rope_scaling\.rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, r"rope_parameters\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, r"rope_scaling\.factor = -2 is not a positive number"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50\.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0 is not supported"),
        ({"logit_scale": 0.0625}, r"logit_scale = 0\.0625 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs between kinds of layers"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "no list of full_attention or .* 24 layers"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 24}, "no list of full_attention or"),
        ({"use_sliding_window": True, "layer_types": [{}] * 24}, "no list of full_attention or"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 14 is not a multiple of num_key_value_heads = 4"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is more than any model has"),
        ({"vocab_size": "many"}, "vocab_size = 'many' is not a positive integer"),
        ({"rope_parameters": []}, r"rope_parameters = \[\] is not an object"),
        ({"rope_scaling": False}, "rope_scaling = False is not an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": "no"}}, "truncate = 'no' is not true or false"),
        ({"use_sliding_window": "no"}, "use_sliding_window = 'no' is not true or false"),
        ({"use_sliding_window": True, "sliding_window": ""}, "sliding_window = '', no integer"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": []}, r"layers = \[\], no int"),
        ({"use_sliding_window": True, "sliding_window": -8}, "sliding_window = -8, no integer from 0 on"),
        ({"use_sliding_window": True, "layer_types": ""}, "layer_types = '', no list of"),
        ({"rope_theta": 0}, "rope_theta = 0 is not a positive number"),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias = True"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias = True"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias = True"),
    ],
)
def test_what_the_network_would_not_honour_is_refused_by_name(changes, message):
    with pytest.raises(ShapeError, match=message):
        shape({**QWEN25, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 24},
        {"use_sliding_window": True, "max_window_layers": 20},  # as wide as the context
        {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 24},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 24},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 0},
        {"rope_scaling": {"type": "default"}},
    ],
)
def test_options_that_change_nothing_are_accepted(changes):
    assert shape({**QWEN25, **changes}) == shape(QWEN25)


QWEN3_MOE = {
    **QWEN25,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_experts() -> None:
    assert shape(QWEN3_MOE).experts == Experts(128, 8, 768, 0, True, ())
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert shape({**renamed, "num_local_experts": 64}).experts == Experts(64, 8, 768, 0, True, ())  # transformers 5
    sparse = shape({**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [sparse.is_moe(layer) for layer in range(6)] == [False, True, False, False, False, True]
    qwen2 = {**QWEN3_MOE, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    assert shape({**qwen2, "shared_expert_intermediate_size": 20, "norm_topk_prob": False}).experts == Experts(
        128, 8, 768, 20, False, ()
    )
    mixtral = {**QWEN25, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    assert shape(mixtral).experts == Experts(8, 2, 4864, 0, True, ())
    assert shape(QWEN25).experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 200}, "num_experts_per_tok = 200 exceeds num_experts = 128"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1 with normalised"),
        ({"num_experts": 10**9}, "num_experts = 1000000000 is more than any model has"),
        ({"num_experts": 4.0}, "num_experts = 4.0 is not a positive integer"),
        ({"num_experts": 4.0, "num_local_experts": 128}, "num_experts = 4.0 is not a positive integer"),
        ({"num_local_experts": 4.0}, "num_local_experts = 4.0 is not a positive integer"),
        ({"mlp_only_layers": 0}, "mlp_only_layers = 0 is no list of layers"),
        ({"mlp_only_layers": {}}, "mlp_only_layers = {} is no list of layers"),
        ({"mlp_only_layers": [1.0]}, r"mlp_only_layers = \[1\.0\] is no list of layers"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers = \[True\] is no list of layers"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob = 'false' is not true or false"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0 is not a positive integer"),
        ({"use_sliding_window": True}, "active sliding window"),
    ],
)
def test_experts_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        shape({**QWEN3_MOE, **changes})


#: As published with DeepSeek-V3, without its quantisation.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}


def test_deepseek_v3() -> None:
    found = shape(DEEPSEEK_V3)
    assert found.latent == LatentAttention(1536, 512, plain=128, rotary=64, value=128)
    assert (found.head_dim, found.unused_layers, found.num_key_value_heads) == (192, 1, 128)
    assert found.experts == Experts(
        256, 8, 2048, 2048, True, (0, 1, 2), shared_gate=False, sigmoid=True, groups=8, top_groups=4, scale=2.5
    )
    assert (found.rope.attention_factor, found.rope.mscale_all_dim) == (1.0, 1.0)
    whole = shape({**DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "q_lora_rank": None})
    assert whole.latent.query_rank is None and whole.experts.groups == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ({"rope_interleave": False}, "rope_interleave = False is not supported"),
        ({"num_experts_per_tok": 4}, "groups are scored by their two best experts only where"),
        ({"n_group": 7}, "topk_group = 4 of n_group = 7 groups of n_routed_experts = 256"),
        ({"num_key_value_heads": 16}, "num_key_value_heads must be num_attention_heads"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type = 'linear' is not supported with latent"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1 is no number of layers"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"num_nextn_predict_layers": []}, r"num_nextn_predict_layers = \[\] is no number of layers"),
        ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers = 'one' is no number of layers"),
    ],
)
def test_deepseek_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        shape({**DEEPSEEK_V3, **changes})


def test_mistral_window() -> None:
    config = {**QWEN25, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert shape({**config, "sliding_window": 4096}).window == Window(4096, tuple(range(24)))
    for window in (None, 32768):
        assert shape({**config, "sliding_window": window}).window is None


def test_qwen_windows() -> None:
    config = {**QWEN25, "use_sliding_window": True, "sliding_window": 4096}
    assert shape({**config, "max_window_layers": 21}).window == Window(4096, (21, 22, 23))
    kinds = ["full_attention", "sliding_attention"] * 12
    assert shape({**config, "layer_types": kinds}).window == Window(4096, tuple(range(1, 24, 2)))
    assert shape({**config, "use_sliding_window": False, "layer_types": kinds}).window is None


def test_rope_with_defaults_filled_in() -> None:
    llama = {**QWEN25, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found = shape({**llama, "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}).rope
    assert found == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert shape({**llama, "rope_scaling": scaling}).rope.original == 32768
    found = shape({**llama, "rope_scaling": {"type": "yarn", "factor": 4.0}}).rope
    assert found.attention_factor == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1
    assert (found.beta_fast, found.beta_slow, found.truncate) == (32.0, 1.0, True)


def test_all_problems_come_in_one_line():
    with pytest.raises(ShapeError) as caught:
        shape({**QWEN25, "hidden_act": "relu", "rope_scaling": {"type": "su"}, "vocab_size": 0})
    message = str(caught.value)
    assert all(word in message for word in ("hidden_act", "su", "vocab_size"))
    assert "\n" not in message


def test_one_list_of_architectures() -> None:
    """Documents, the conversion tables and the learner's tests know exactly the families that are accepted."""
    accepted = {rules.architecture for rules in FAMILIES}
    root = Path(__file__).parents[2]
    for document in ("docs/status.md", "docs/conversion.md"):
        assert set(re.findall(r"`(\w+ForCausalLM)`", (root / document).read_text())) == accepted, document
    assert {kind.removesuffix("Config") + "ForCausalLM" for kind, _ in TESTED.values()} == accepted


def test_gpt_oss_is_refused_with_the_reason():
    with pytest.raises(ShapeError, match=r"GptOssForCausalLM .*\(attention sinks, and biases"):
        rules_for({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"})


def test_family_choice():
    assert rules_for({"model_type": "llama"}).architecture == "LlamaForCausalLM"
    with pytest.raises(ShapeError, match="architecture GemmaForCausalLM is not supported; supported: Qwen2ForCausalLM"):
        rules_for({"architectures": ["GemmaForCausalLM"], "model_type": "llama"})
    with pytest.raises(ShapeError, match="model_type None is not supported"):
        rules_for({})
