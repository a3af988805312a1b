"""Rotary frequencies of every scaling that config.json may ask for, in torch, operation by operation as transformers.

At position p a frequency f turns by p f: in float32 one unit in the last place of f is a visible angle at
long positions, so the order of operations is part of the result.

Megatron's rotation of packed sequences reads their boundaries from the device, for queries and for keys of every layer.
Here the angles of a pack are laid out token by token once (``turn_by_pack``), and its rotation of one sequence does the
rest.
"""

from __future__ import annotations

import math
import types
from typing import Any

import megatron.core.transformer.attention as attention
import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from torch import Tensor

from ...models.rope import Rope
from .layers import PackParams


def inverse_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """float32 [dim / 2] on the CPU: radians a position of each pair of dimensions of a head."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default" | "dynamic":  # the latter differs beyond max_position_embeddings only
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(rope, dim, rope.theta**exponents)
        case kind:
            raise ValueError(f"no rotary frequencies for rope type {kind!r}")


def turn_by_pack(rotary: Any) -> None:
    """Make ``rotary``, Megatron's embedding, answer with the angles of every token of the pack that is asked for."""
    plain = rotary.get_emb

    def length(
        self: Any, context: Any, block: Any, hidden: Any, config: Any, packed: PackParams, **_: Any
    ) -> PackParams:
        """In place of the longest sequence: which pack it is."""
        return packed

    def forward(self: Any, packed: PackParams, **_: Any) -> Tensor:
        if packed.angles is None:
            packed.angles = plain(packed.max_seqlen_q)[packed.positions]
        return packed.angles

    rotary.get_rotary_seq_len = types.MethodType(length, rotary)
    rotary.forward = types.MethodType(forward, rotary)
    attention.apply_rotary_pos_emb = turned  # every layer of attention looks it up there; the learner feeds packs only


def turned(
    x: Tensor, angles: Tensor, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, cp_group: Any = None
) -> Tensor:
    """x [T, n, d] turned by the angles [T, 1, 1, r] of ``turn_by_pack``, in place of Megatron's function of this
    signature."""
    return apply_rotary_pos_emb(x[:, None], angles, config=config, mscale=mscale, cp_group=cp_group)[:, 0]


def attention_scale(rope: Rope, head_dim: int) -> float:
    """What q k^T is multiplied by. Scaled cosines and sines scale q and k alike, so it holds their square."""
    return rope.attention_factor**2 / math.sqrt(head_dim)


def _llama3(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1: long waves are slowed down by ``factor``, short ones kept, a ramp between them."""
    waves = 2 * math.pi / plain
    longest, shortest = rope.original / rope.low_freq_factor, rope.original / rope.high_freq_factor
    slowed = torch.where(waves > longest, plain / rope.factor, plain)
    ramp = (rope.original / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - ramp) * slowed / rope.factor + ramp * slowed
    return torch.where(~(waves < shortest) * ~(waves > longest), between, slowed)


def _yarn(rope: Rope, dim: int, periods: torch.Tensor) -> torch.Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071, section 3.2."""

    def turning(turns: float) -> float:
        """Dimension that makes ``turns`` turns over the original context."""
        return (dim * math.log(rope.original / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept
