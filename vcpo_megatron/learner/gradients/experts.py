"""Mixtures of experts: which trajectory each dispatched token belongs to.

An expert holds tokens of all ranks that share it, in the dispatcher's order. Before Megatron dispatches the
hidden states it dispatches, by the same calls and the same routing, the number of every token's trajectory:
whatever the dispatcher does with tokens it does with their owners. Several packs may be in flight; what is
found belongs to the call, and the expert layers of the same call take it from here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .pack_scores import PackScores, ScoreSwitch, TokenShards


class ExpertOwners:
    """Of one MoE layer: the trajectories of the rows that its experts are about to get."""

    def __init__(self) -> None:
        self._ids: tuple[Tensor, ...] = ()
        self._scores: PackScores | None = None
        self._tokens: dict[int, TokenShards] = {}

    def dispatched(self, scores: PackScores, ids: tuple[Tensor, ...]) -> None:
        """A call of the layer starts: ids int64 [rows of the expert], one tensor a local expert."""
        self._ids, self._scores, self._tokens = ids, scores, {}

    def tokens_of(self, expert: int) -> Callable[[PackScores], TokenShards]:
        """For ``attach_linear``: rows of one local expert."""

        def tokens(scores: PackScores) -> TokenShards:
            assert scores is self._scores, "an expert runs in the call that dispatched its tokens"
            if expert not in self._tokens:
                self._tokens[expert] = scores.expert_tokens(self._ids[expert])
            return self._tokens[expert]

        return tokens


def attach_dispatcher(dispatcher: Any, switch: ScoreSwitch, owners: ExpertOwners) -> None:
    """Make the dispatcher record in ``owners`` which trajectories' tokens it brings to which expert."""
    original = dispatcher.dispatch_preprocess

    def dispatch_preprocess(self: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        scores = switch.active()
        if scores is not None:
            with torch.no_grad():
                ids, weights = original(scores.sequence[:, None].contiguous(), routing_map, probs.detach())
                ids, weights = self.token_dispatch(ids, weights)
                ids, per_expert, _ = self.dispatch_postprocess(ids, weights)
            owners.dispatched(scores, ids[:, 0].split(per_expert.tolist()))
        return original(tokens, routing_map, probs)

    dispatcher.dispatch_preprocess = types.MethodType(dispatch_preprocess, dispatcher)
