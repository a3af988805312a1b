"""config.json -> ModelShape, and the refusals that keep an unsupported option from being ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from vcpo_megatron.conversion.shape import ModelShape

from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.conversion.families import FAMILIES, family_for

CONFIGS: dict[str, type[PreTrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}

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
    return family_for(config).model_shape(config)


def test_known_answer_qwen25():
    assert shape(QWEN25) == ModelShape(
        num_layers=24,
        hidden_size=896,
        ffn_hidden_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
        max_position_embeddings=32768,
    )


def test_qwen3_head_dim_is_not_hidden_over_heads():
    config = {**QWEN25, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "attention_bias": False}
    found = shape(config)
    assert (found.head_dim, found.q_size, found.kv_size, found.queries_per_group) == (128, 14 * 128, 256, 7)
    assert found.qk_norm and not found.qkv_bias


def test_rope_theta_of_transformers_5_wins_over_the_default():
    config = {key: value for key, value in QWEN25.items() if key != "rope_theta"}
    assert shape(config).rope_theta == 10000.0
    assert shape({**config, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}).rope_theta == 5e5
    assert shape({**config, "rope_theta": 3e4, "rope_scaling": None}).rope_theta == 3e4


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_what_transformers_writes_is_read_back(family, tmp_path):
    """An independent reader: the attributes of transformers' own configuration object."""
    config = CONFIGS[family.model_type](
        architectures=[family.architecture],
        num_hidden_layers=3,
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 12345.0, "rope_type": "default"},
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path)
    found = shape(json.loads((tmp_path / "config.json").read_text()))
    assert found.rope_theta == 12345.0 and found.norm_eps == 1e-5 and found.tie_word_embeddings
    assert found.head_dim == getattr(config, "head_dim", 48 // 6)
    assert (found.vocab_size, found.max_position_embeddings) == (config.vocab_size, config.max_position_embeddings)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family):
    """A key that config.json leaves out means what transformers takes it to mean."""
    config = CONFIGS[family.model_type]()
    for key, value in family.rules.defaults.items():
        if key == "rope_theta":
            assert config.rope_parameters["rope_theta"] == value
        elif key == "sliding_window":
            assert type(config).sliding_window == value
        else:
            assert getattr(config, key) == value, key


def test_multi_head_attention_where_key_heads_are_not_given():
    config = {**QWEN25, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": None}
    assert shape(config).num_key_value_heads == 14
    del config["num_key_value_heads"]
    assert shape(config).num_key_value_heads == 14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type = 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\.rope_type = 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, r"rope_parameters\.rope_type = 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs between kinds of layers"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"use_sliding_window": True, "max_window_layers": 20}, "active sliding window"),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, "active sliding window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 14 is not a multiple of num_key_value_heads = 4"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size = 'many' is not a positive integer"),
        ({"rope_theta": 0}, "rope_theta = 0 is not a positive number"),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias = True"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias = True"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias = True"),
    ],
)
def test_what_the_network_would_not_honour_is_refused_by_name(changes, message):
    with pytest.raises(ConversionError, match=message):
        shape({**QWEN25, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "max_window_layers": 24},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 24},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 0},
        {"rope_scaling": {"type": "default"}},
    ],
)
def test_options_that_change_nothing_are_accepted(changes):
    assert shape({**QWEN25, **changes}) == shape(QWEN25)


def test_all_problems_come_in_one_line():
    with pytest.raises(ConversionError) as caught:
        shape({**QWEN25, "hidden_act": "relu", "rope_scaling": {"type": "linear"}, "vocab_size": 0})
    message = str(caught.value)
    assert all(word in message for word in ("hidden_act", "linear", "vocab_size", "Qwen2ForCausalLM"))
    assert "\n" not in message


def test_family_choice():
    assert family_for({"model_type": "llama"}).architecture == "LlamaForCausalLM"
    with pytest.raises(ConversionError, match="architecture GemmaForCausalLM; supported: Qwen2ForCausalLM, Qwen3"):
        family_for({"architectures": ["GemmaForCausalLM"], "model_type": "llama"})
    with pytest.raises(ConversionError, match="model_type None; supported"):
        family_for({})
