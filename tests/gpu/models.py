"""Random models and batches that the checks make for themselves: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vcpo_megatron.types import PolicyVersion, Trajectory, Turn, VersionSpan

#: Standard deviation of logits: as sharp as those of a trained model, so that their rounding shows.
LOGITS_STD = 3.0


@dataclass(frozen=True)
class Size:
    """Of a Qwen2 with grouped queries and untied embeddings."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int


def make_random_model(folder: Path, size: Size, dtype: str) -> Path:
    """A Hugging Face folder of ``size``, its weights and its config.json in ``dtype``."""
    import torch
    import transformers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    transformers.logging.disable_progress_bar()
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.1) if parameter.dim() == 1 else parameter.normal_(0.0, size.hidden**-0.5)
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.normal_(0.0, 0.1)
        model.lm_head.weight.mul_(LOGITS_STD)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def trajectory(
    group: int, sample: int, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], reward: float
) -> Trajectory:
    """One that version 1.0 has sampled whole."""
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    start, end = len(prompt), len(tokens)
    behavior = np.zeros(end, dtype=np.float32)
    behavior[start:] = logprobs
    turn = Turn(start, end, "length", (VersionSpan(start, end, PolicyVersion(1, 0)),))
    return Trajectory(group, sample, f"p{group}", start, tokens, np.arange(end) >= start, behavior, (turn,), reward)
