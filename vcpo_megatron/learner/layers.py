"""Layers of our own where Megatron's local ones do not serve: RMSNorm, and attention over packs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


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

    query [T, heads, d], key and value [T, kv heads, d]; returns [T, heads * d]. Trajectories never see
    each other, and padding at the end of the pack attends to itself alone.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # fmt: skip
        assert packed_seq_params is not None, "the learner feeds packs only"
        lengths = packed_seq_params.lengths
        if len(set(lengths)) == 1:  # one call for the whole pack
            n, t = len(lengths), lengths[0]
            q, k, v = (z.view(n, t, *z.shape[1:]).transpose(1, 2) for z in (query, key, value))
            return self._attend(q, k, v).transpose(1, 2).reshape(n * t, -1)
        pieces = zip(*(z.split(lengths) for z in (query, key, value)), strict=True)
        outputs = [self._attend(*(z.transpose(0, 1)[None] for z in piece))[0].transpose(0, 1) for piece in pieces]
        return torch.cat(outputs).reshape(query.shape[0], -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)


class PackParams(PackedSeqParams):
    """Megatron's parameters of a packed sequence, with the lengths as plain integers.

    ``lengths`` sum to the tokens of the pack; padding at the end counts as one more sequence.
    """

    lengths: list[int]

    @classmethod
    def of(cls, boundaries: tuple[int, ...], total: int, device: torch.device) -> PackParams:
        edges = [*boundaries, total] if total > boundaries[-1] else list(boundaries)
        lengths = [b - a for a, b in zip(edges, edges[1:], strict=False)]
        cumulative = torch.tensor(edges, dtype=torch.int32, device=device)
        longest = max(lengths)
        params = cls(
            qkv_format="thd", cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative, max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )  # fmt: skip
        params.lengths = lengths
        return params
