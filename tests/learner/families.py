"""Tiny random models of every family, made by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from vcpo_megatron.run.integrity import crc_of_file, sealed, unsealed

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}

#: name -> (configuration class of transformers, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-mha-tied": ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied-yarn": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "mistral": ("MistralConfig", {"head_dim": 12, "sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2-moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 20}),
    "qwen2-moe-mixed": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 12, "norm_topk_prob": True}),
    "deepseek-moe": ("DeepseekV3Config", DEEPSEEK),
    "deepseek-moe-yarn": (
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "topk_group": 4,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "qwen3-moe-plain": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 8, "tie_word_embeddings": True}),
}


def make_family(name: str, folder: Path, **save: Any) -> Path:
    """A model whose norms and biases are far from their usual 1 and 0, so that a mix-up shows."""
    kind, changes = FAMILIES[name]
    torch.manual_seed(11)
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        parameter.data.normal_(*((0.8, 0.2) if parameter.dim() == 1 else (0.0, 0.2)))
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)  # enough to change the choice of experts
    model.save_pretrained(folder, **save)
    return folder


def prompts(count: int = 3, longest: int = 400) -> list[torch.Tensor]:
    """Random token ids, int64, the first one ``longest`` tokens long."""
    generator = torch.Generator().manual_seed(3)
    lengths = [longest, *(5 + 7 * i for i in range(count - 1))]
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator) for length in lengths]


def reference_logits(folder: Path) -> list[torch.Tensor]:
    """transformers' float32 logits [T, V] of ``prompts``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(prompt[None]).logits[0] for prompt in prompts()]


def resealed(checkpoint: Path) -> Path:
    """The imported ``checkpoint`` with checksums of its files as they are now: its readers must see the damage."""
    path = checkpoint / "vcpo_checkpoint.json"
    manifest = unsealed(path.read_bytes())
    present = [name for name in manifest["checksums"] if (checkpoint / name).exists()]
    path.write_text(sealed({**manifest, "checksums": {name: crc_of_file(checkpoint / name) for name in present}}))
    return checkpoint
