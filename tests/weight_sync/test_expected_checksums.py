"""What a server must answer, against hashes of matrices that are put together here as it puts them together."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from vcpo_megatron.models.families.registry import model_shape
from vcpo_megatron.weight_sync.expected_checksums import ExpectedChecksums

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 70,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_known_digest() -> None:
    """Of [1.0, -2.0] in float32: printf '\\x00\\x00\\x80\\x3f\\x00\\x00\\x00\\xc0' | sha256sum."""
    checksums = ExpectedChecksums("embedded", model_shape({**CONFIG, "tie_word_embeddings": False}))
    checksums.add("a.weight", torch.tensor([1.0, -2.0]))
    assert checksums.result() == {"a.weight": KNOWN}


def test_sglang_fuses_what_the_stream_has_one_after_the_other() -> None:
    q, k, v = (torch.randn(rows, 8) for rows in (8, 4, 4))
    gate, up, words = torch.randn(12, 8), torch.randn(12, 8), torch.randn(70, 8)
    checksums = ExpectedChecksums("sglang", model_shape(CONFIG))
    checksums.add("model.embed_tokens.weight", words)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checksums.add(f"model.layers.0.self_attn.{name}_proj.weight", tensor)
        checksums.add(f"model.layers.0.self_attn.{name}_proj.bias", tensor[:, 0])
    checksums.add("model.layers.0.mlp.gate_proj.weight", gate)
    checksums.add("model.layers.0.mlp.up_proj.weight", up)
    checksums.add("model.layers.0.mlp.down_proj.weight", up.T)
    assert checksums.result() == {
        "model.embed_tokens.weight": digest(torch.cat([words, torch.zeros(58, 8)])),  # 128 rows
        "model.layers.0.self_attn.qkv_proj.weight": digest(torch.cat([q, k, v])),
        "model.layers.0.self_attn.qkv_proj.bias": digest(torch.cat([q, k, v])[:, 0]),
        "model.layers.0.mlp.gate_up_proj.weight": digest(torch.cat([gate, up])),
        "model.layers.0.mlp.down_proj.weight": digest(up.T),
    }


def test_sglang_stacks_the_experts_of_a_layer() -> None:
    """w13 [E, 2 I, H] has gate above up of each expert, w2 is [E, H, I]; 6 units are 32 on CPUs."""
    gate, up, down, zeros = *(torch.randn(3, 6, 8) for _ in range(3)), torch.zeros(3, 26, 8)
    for moe, names in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
        checksums = ExpectedChecksums("sglang", model_shape(CONFIG))
        for expert in range(3):
            for name, tensor in zip(names, (gate, up, down.mT), strict=True):
                checksums.add(f"model.layers.1.{moe}.experts.{expert}.{name}.weight", tensor[expert])
        assert checksums.result() == {
            f"model.layers.1.{moe}.experts.w13_weight": digest(torch.cat([gate, zeros, up, zeros], dim=1)),
            f"model.layers.1.{moe}.experts.w2_weight": digest(torch.cat([down, zeros], dim=1).mT),
        }


def test_the_embedded_engine_shows_tied_weights_under_both_names() -> None:
    checksums = ExpectedChecksums("embedded", model_shape(CONFIG))
    checksums.add("model.embed_tokens.weight", torch.ones(70, 8))
    expected = digest(torch.ones(70, 8))
    assert checksums.result() == {"model.embed_tokens.weight": expected, "lm_head.weight": expected}


KNOWN = "ee4ac73c2bd27756"
