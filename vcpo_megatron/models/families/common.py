"""Defaults that several families share: what transformers assumes for a key that config.json leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
QWEN: Mapping[str, Any] = {**COMMON, "use_sliding_window": False, "sliding_window": 4096}
NO_ATTENTION_BIAS: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False}
