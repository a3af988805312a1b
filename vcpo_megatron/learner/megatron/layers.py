"""Layers of our own where Megatron's local ones do not serve: RMSNorm, and attention over packs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from ..batch.packing import PackLayout
from . import platform


class RMSNorm(nn.Module):
    """RMSNorm with Megatron's constructor; marks its weight for sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism, and its class is chosen by the version of
    torch; one plain class serves all layouts and is the one whose gradient can be separated.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention inside each trajectory of a pack, by torch's scaled dot product.

    query [T, heads, d], key [T, kv heads, d], value [T, kv heads, v]; returns [T, heads * v]. Trajectories never see
    each other, and padding at the end of the pack attends to itself alone. Under context parallelism the
    keys and values of all ranks are gathered once a pack; rank r's two chunks of a trajectory attend to the
    prefixes that end with them. In a layer with a sliding window a token sees the last ``window`` tokens only.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window: int | None = config.window_size[0] + 1 if windowed else None
        self._ranks = config.context_parallel_size
        self._group = pg_collection.cp if self._ranks > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "the learner feeds packs only"
        lengths = packed_seq_params.lengths
        if self._group is not None:
            return self._over_ranks(query, key, value, lengths)
        if len(set(lengths)) == 1:  # one call for the whole pack
            n, t = len(lengths), lengths[0]
            q, k, v = (z.view(n, t, *z.shape[1:]).transpose(1, 2) for z in (query, key, value))
            return self._attend(q, k, v).transpose(1, 2).reshape(n * t, -1)
        pieces = zip(*(z.split(lengths) for z in (query, key, value)), strict=True)
        outputs = [self._attend(*(z.transpose(0, 1)[None] for z in piece))[0].transpose(0, 1) for piece in pieces]
        return torch.cat(outputs).reshape(query.shape[0], -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [n, heads, T, d]; ``mask`` None: of positions from 0 on, each sees itself and what it may see before."""
        if mask is None and self._window is not None and q.shape[2] > self._window:
            position = torch.arange(q.shape[2], device=q.device)
            mask = self._seen(position, position)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )

    def _seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [T, S]: whether the token at a position of ``queries`` sees that at one of ``keys``."""
        distance = queries[:, None] - keys
        return distance >= 0 if self._window is None else (distance >= 0) & (distance < self._window)

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """``lengths``: of the trajectories on this rank, two chunks each; see ``packing.PackLayout``."""
        ranks, rank = self._ranks, dist.get_rank(self._group)
        gathered = [
            gather_from_sequence_parallel_region(z.contiguous(), tensor_parallel_output_grad=True, group=self._group)
            for z in (key, value)
        ]
        keys, values = (z.view(ranks, query.shape[0], *z.shape[1:]).split(lengths, dim=1) for z in gathered)
        outputs = []
        for q, k, v in zip(query.split(lengths), keys, values, strict=True):
            size = q.shape[0] // 2
            k, v = (torch.cat([*z[:, :size], *z[:, size:].flip(0)]) for z in (k, v))  # in order of the sequence
            for chunk, part in ((rank, q[:size]), (2 * ranks - 1 - rank, q[size:])):
                end = (chunk + 1) * size
                position = torch.arange(end, device=q.device)
                mask = self._seen(position[chunk * size :], position)
                q_piece, k_piece, v_piece = (z.transpose(0, 1)[None] for z in (part, k[:end], v[:end]))
                outputs.append(self._attend(q_piece, k_piece, v_piece, mask)[0].transpose(0, 1))
        return torch.cat(outputs).reshape(query.shape[0], -1)


class PackParams(PackedSeqParams):
    """Megatron's parameters of a packed sequence, with the lengths on this rank as plain integers.

    ``lengths`` sum to the tokens that this rank holds; padding at the end counts as one more sequence. ``positions``
    int64: of these tokens in their own sequences; ``angles``: how far each turns, once a layer has asked (``rope``).
    """

    lengths: list[int]
    positions: np.ndarray
    angles: Tensor | None = None

    @classmethod
    def of(cls, layout: PackLayout, device: torch.device) -> PackParams:
        cumulative = platform.to_device(
            torch.tensor([0, *itertools.accumulate(layout.lengths)], dtype=torch.int32), device
        )
        longest = max(layout.lengths)
        params = cls(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        params.lengths = [length // layout.ranks for length in layout.lengths]
        params.positions = layout.positions
        return params
