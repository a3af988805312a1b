"""Every Hugging Face tensor of every family belongs to exactly one Megatron parameter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.conversion.families.registry import FAMILIES, open_model
from vcpo_megatron.models.families.registry import model_shape, tensors

CONFIG: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
    "mlp_only_layers": [1],
    "num_local_experts": 4,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.config_rules.model_type)
def test_tables_are_complete_and_disjoint(family: Any, tied: bool) -> None:
    config = {**CONFIG, "architectures": [family.architecture], "tie_word_embeddings": tied}
    if family.config_rules.latent:
        config |= {"num_key_value_heads": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    found, shape = open_model(config)
    assert found is family and shape == model_shape(config)
    names = family.megatron_names(shape)
    assert len(set(names)) == len(names)
    uses = Counter(source for name in names for source in family.sources(name, shape))
    assert set(uses.values()) == {1}
    assert uses.keys() == tensors(shape).keys()


def test_known_answer_for_experts() -> None:
    config = {**CONFIG, "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 2}
    family, shape = open_model(config)
    names = family.megatron_names(shape)
    assert "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight" in names
    assert family.sources("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", shape) == {
        "model.layers.0.mlp.experts.3.gate_proj.weight": (8, 24),
        "model.layers.0.mlp.experts.3.up_proj.weight": (8, 24),
    }
    assert family.sources("decoder.layers.0.mlp.shared_experts.gate_weight", shape) == {
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 24)
    }
    assert family.is_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight")
    assert not family.is_expert("decoder.layers.0.mlp.shared_experts.linear_fc2.weight")
    # layer 1 is dense, and there is no fifth expert
    assert family.sources("decoder.layers.1.mlp.linear_fc2.weight", shape) == {
        "model.layers.1.mlp.down_proj.weight": (24, 20)
    }
    fifth = "decoder.layers.0.mlp.experts.local_experts.4.linear_fc2.weight"
    for name in ("decoder.layers.1.mlp.router.weight", fifth):
        with pytest.raises(ConversionError, match="of the model has no such parameter"):
            family.sources(name, shape)


def test_mixtral_names() -> None:
    family, shape = open_model({**CONFIG, "architectures": ["MixtralForCausalLM"]})
    assert list(family.sources("decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight", shape)) == [
        "model.layers.2.block_sparse_moe.experts.1.w1.weight",
        "model.layers.2.block_sparse_moe.experts.1.w3.weight",
    ]
