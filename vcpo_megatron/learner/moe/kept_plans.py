"""Layers that are computed once more in the backward send their tokens where they went in the forward.

The forward's plan of a dispatch is kept until then: the host need not wait for counts inside the backward, and a router
that chooses otherwise by a last bit does not leave rows without a place (such a token's expert gets probability 0). It
is small beside what recomputation keeps: 8 bytes a token and chosen expert, beside the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from ..megatron.dispatch import DispatchPlan, PlannedDispatch
from .pack_context import PackContext


class KeptPlans:
    """Built once for the chunks of a model whose layers are all computed once more; ``during`` runs one pack's
    forward."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._plans = PackContext[dict[PlannedDispatch, DispatchPlan]]()
        for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)):
            module.token_dispatcher.plan.kept = lambda: self._plans.current

    def during(self, forward: Callable[[], Tensor]) -> Tensor:
        """The output of ``forward``; its backward finds the plans that it has made."""
        return self._plans.during({}, forward)
