"""How far learner and rollout servers are apart where they should agree: on tokens of the current version.

Both computed log pi of the same token under the same weights and at the same temperature, so any difference is
that of two implementations: kernels, precision, routing, or weights that are not the same after all.
"""

from __future__ import annotations

import torch

from ...algorithm import importance
from ..batch.packing import Pack
from .log_ratios import LogRatioExchange
from .results import RowTable


def pack_mismatch(pack: Pack, token_log_ratios: torch.Tensor, exchange: LogRatioExchange) -> torch.Tensor:
    """(sum, largest, number) of |log pi - log mu| over the current tokens of each trajectory: float64 [n, 3], CPU.

    token_log_ratios  float64 [T]  log pi_theta - log mu of this rank's tokens
    """
    size, n = token_log_ratios.abs(), len(pack.samples)
    sums = [importance.segment_sum(x, pack.current, pack.segments, n) for x in (size, torch.ones_like(size))]
    total, count = exchange.sum_over_context(torch.stack(sums)).cpu()
    largest = exchange.max_over_context(importance.segment_max(size, pack.current, pack.segments, n)).cpu()
    return torch.stack([total, largest, count], dim=1)


def mismatch_metrics(table: RowTable) -> dict[str, float]:
    """Of the agreed table; mean and max are left out of a step without a token of the current version."""
    total, largest, count = table.mismatch.unbind(1)
    tokens = float(count.sum())
    if not tokens:
        return {"mismatch/tokens": 0.0}
    return {
        "mismatch/mean": float(total.sum()) / tokens,
        "mismatch/max": float(largest.max()),
        "mismatch/tokens": tokens,
    }
