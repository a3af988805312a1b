"""RMSNorm of our own, where Megatron's local one does not serve, and what its layers are told of a pack."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from ..batch.packing import AttentionPlan


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


class PackParams(PackedSeqParams):
    """Megatron's parameters of a packed sequence, and what our own attention needs.

    Padding at the end counts as one more sequence. ``positions`` int64 [T], on the device: of this rank's tokens in
    their own sequences; ``angles``: how far each turns, once a layer has asked (``rope``). Nothing is copied to the
    device here.
    """

    attention: AttentionPlan
    positions: Tensor
    angles: Tensor | None = None

    @classmethod
    def of(cls, plan: AttentionPlan, positions: Tensor) -> PackParams:
        params = cls(
            qkv_format="thd",
            cu_seqlens_q=plan.sequences,
            cu_seqlens_kv=plan.sequences,
            max_seqlen_q=plan.longest,
            max_seqlen_kv=plan.longest,
        )
        params.attention = plan
        params.positions = positions
        return params
