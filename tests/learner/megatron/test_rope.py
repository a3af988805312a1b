"""Frequencies of every rope scaling against transformers' own functions, bit for bit, at the sizes of real models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vcpo_megatron.learner.megatron.rope import attention_scale, inverse_frequencies
from vcpo_megatron.models.families.registry import model_shape

SCALINGS: dict[str, dict[str, Any]] = {
    "llama-3.1": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama-3.2": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "qwen-yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor(name: str) -> None:
    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=dict(SCALINGS[name])
    )
    expected, factor = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config, torch.device("cpu"))
    rope = model_shape({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    found = inverse_frequencies(rope, 128)
    # transformers' dynamic frequencies at its own length go through a power of 1.0 that may round
    assert torch.equal(found, expected)
    assert attention_scale(rope, 128) == pytest.approx(factor**2 / math.sqrt(128), rel=1e-12)


def test_known_answers() -> None:
    """By hand: head size 4, base 10,000: frequencies 1 and 0.01."""
    rope = model_shape(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 2,
            "vocab_size": 8,
            "rope_scaling": {"type": "linear", "factor": 4},
        }
    ).rope
    torch.testing.assert_close(inverse_frequencies(rope, 4), torch.tensor([0.25, 0.0025]))
