"""Multi-head latent attention (DeepSeek-V2 and V3, https://arxiv.org/abs/2405.04434) as config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import positive

#: transformers gives the norms of the latent vectors this epsilon, whatever ``rms_norm_eps`` says.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Queries, keys and values made of vectors of low rank.

    query_rank   length of the vector that queries are made of; None: they are made of the hidden state itself
    kv_rank      length of the vector that keys and values are made of
    plain, rotary  dimensions of a query and key head without and with positions; the rotary part of a key is the
                 same for all heads
    value        dimensions of a value head
    """

    query_rank: int | None
    kv_rank: int
    plain: int
    rotary: int
    value: int

    @property
    def head_dim(self) -> int:
        """Dimensions of a query and a key head."""
        return self.plain + self.rotary

    @property
    def cut_rows(self) -> tuple[int, ...]:
        """Rows of the projections onto latent vectors, which tensor parallelism cuts without regard to heads."""
        keys = self.kv_rank + self.rotary
        return (keys,) if self.query_rank is None else (self.query_rank, keys)


def read_latent(values: Mapping[str, Any], problems: list[str]) -> LatentAttention:
    """Latent attention of a config.json with defaults filled in."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, plain, rotary, value = (positive(values, name, problems) for name in names)
    if rotary % 2:
        problems.append(f"qk_rope_head_dim = {rotary} is odd")
    query_rank = None if values.get("q_lora_rank") is None else positive(values, "q_lora_rank", problems)
    return LatentAttention(query_rank, kv_rank, plain, rotary, value)


def latent_tensors(latent: LatentAttention, heads: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """HF names, within a layer, and shapes of the attention's tensors."""
    queries = heads * latent.head_dim
    if latent.query_rank is None:
        found: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (queries, hidden)}
    else:
        found = {
            "self_attn.q_a_proj.weight": (latent.query_rank, hidden),
            "self_attn.q_a_layernorm.weight": (latent.query_rank,),
            "self_attn.q_b_proj.weight": (queries, latent.query_rank),
        }
    return found | {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rotary, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.plain + latent.value), latent.kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.value),
    }
