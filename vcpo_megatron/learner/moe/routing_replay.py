"""Routing replay (R3, arXiv 2510.11370): the learner's routers send tokens where the server's had sent them.

Which experts a token goes to is a hard choice: two implementations that differ by rounding choose differently now and
then, and then their log-probs differ by far more than rounding. Here the choice is the server's. Everything else is the
learner's: the probabilities of the chosen experts come from its own logits, and gradients flow through them.

Tokens without a record (the last one of a trajectory, padding) are routed by the learner itself. Experts are put in the
order of the learner's own scores, as its top-k gives them: where both choose alike, nothing changes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..batch.packing import Pack
from ..megatron import platform
from ..megatron.parallel import Parallel
from .pack_context import PackContext


class RoutingReplay:
    """Built once for the chunks of a model; ``during`` runs one pack's forward with that pack's record."""

    def __init__(self, chunks: Sequence[torch.nn.Module], parallel: Parallel, device: torch.device) -> None:
        routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        self._layers = [router.layer_number - 1 for router in routers]  # counted over all pipeline stages
        self._parallel = parallel
        self._device = device
        #: int64 [T, routers of this rank, k], or None.
        self.experts = PackContext[Tensor]()
        for place, router in enumerate(routers):
            router.router_replay = _LayerReplay(self, place)

    def during(self, pack: Pack, forward: Callable[[], Tensor]) -> Tensor:
        """The output of ``forward``; layers that are computed once more in its backward follow the record as well."""
        return self.experts.during(None if pack.experts is None else self._own(pack.experts), forward)

    def _own(self, experts: Tensor) -> Tensor:
        """Of the layers and, under sequence parallelism, the tokens of this rank."""
        if self._parallel.sequence_parallel:
            experts = experts.chunk(self._parallel.tensor_size)[self._parallel.tensor_rank]
        return platform.to_device(experts[:, self._layers].long(), self._device)


class _LayerReplay:
    """What Megatron's router asks for its top k, in place of its own ``RouterReplay``."""

    def __init__(self, replay: RoutingReplay, place: int) -> None:
        self._replay = replay
        self._place = place

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [T, k] and numbers int64 [T, k] of the experts of each token; ``scores`` is [T, experts]."""
        own, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        if self._replay.experts.current is None:
            return own, chosen
        recorded = self._replay.experts.current[:, self._place]
        chosen = torch.where(recorded >= 0, recorded, chosen)
        order = scores.detach().gather(1, chosen).argsort(dim=1, descending=True, stable=True)
        chosen = chosen.gather(1, order)
        return scores.gather(1, chosen), chosen
