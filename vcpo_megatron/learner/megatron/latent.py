"""Megatron's multi-head latent attention, made right for packs and for tensor parallelism with the local layers.

Under tensor parallelism every rank computes the positional part of a key for all its heads. Megatron 0.16.1 with local
layers takes each rank's own gradient of it for the whole; here it is summed.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from ...models.latent_attention import LATENT_NORM_EPS, LatentAttention
from ...models.rope import Rope
from .layers import RMSNorm
from .rope import turned


class LatentNorm(RMSNorm):
    """RMSNorm of a latent vector, with transformers' epsilon."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, LATENT_NORM_EPS)


def latent_options(latent: LatentAttention, rope: Rope) -> dict[str, Any]:
    """MLATransformerConfig's own options. Frequencies are set from outside, so its rope is the plain one."""
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        "rope_type": "rope",
        "rotary_base": rope.theta,
        # scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2
        "rotary_scaling_factor": rope.factor,
        "mscale_all_dim": rope.mscale_all_dim,
        # cosines and sines are multiplied by it
        "mscale": rope.attention_factor,
    }


class LatentSelfAttention(MLASelfAttention):
    """Queries, keys and values of a pack; everything else is Megatron's."""

    config: MLATransformerConfig

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """hidden_states [T, 1, h], or this rank's part of T; returns query and key [T, heads, d], value [T, heads, v].

        The two further results are those that Megatron's sparse attention would use.
        """
        assert packed_seq_params is not None, "the learner feeds packs only"
        config, heads = self.config, self.num_attention_heads_per_partition
        latent, position = self._down(hidden_states)
        queries = self._queries(hidden_states)
        pairs, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        tokens = pairs.shape[0]
        plain, value = pairs.view(tokens, heads, -1).split([config.qk_head_dim, config.v_head_dim], dim=-1)
        query, turned = queries.view(tokens, heads, -1).split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        turned = self._turn(turned, packed_seq_params)
        position = self._turn(position.view(tokens, 1, -1), packed_seq_params).expand(-1, heads, -1)
        return torch.cat([query, turned], -1), torch.cat([plain, position], -1), value.contiguous(), None, None

    def _down(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The latent vector of keys and values (this rank's tokens), the positional part of keys (all tokens)."""
        both = self._gathered(self.linear_kv_down_proj(hidden)[0])
        latent, position = both.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return self._own_tokens(latent), copy_to_tensor_model_parallel_region(position, group=self.tp_group)

    def _queries(self, hidden: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return self.linear_q_proj(hidden)[0]
        latent = self._own_tokens(self._gathered(self.linear_q_down_proj(hidden)[0]))
        return self.linear_q_up_proj(self.q_layernorm(latent))[0]

    def _gathered(self, latent: Tensor) -> Tensor:
        return gather_from_tensor_model_parallel_region(latent, group=self.tp_group)

    def _own_tokens(self, latent: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(latent) if self.config.sequence_parallel else latent

    def _turn(self, x: Tensor, packed: PackedSeqParams) -> Tensor:
        """Rotary positions inside each trajectory, x [T, n, rotary]; pairs of dimensions lie side by side."""
        angles = self.rotary_pos_emb(packed)
        return turned(x, angles, self.config, mscale=self.config.mscale, cp_group=self.pg_collection.cp)
