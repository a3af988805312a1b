"""Mixtures of experts: which trajectory each dispatched token belongs to.

An expert holds tokens of all ranks that share it, in the dispatcher's order: by source, and of one source by
trajectory. So the counts that plan the dispatch (``megatron.dispatch``) say whose each row is. Several packs may be in
flight; what is found belongs to the call, and the expert layers of the same call take it from here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..megatron import platform
from ..megatron.dispatch import ExpertCounts, Labels, PlannedDispatch
from .pack_scores import PackScores, Run, ScoreSwitch, TokenRows, TokenShards


class ExpertOwners:
    """Of one MoE layer: the trajectories of the rows that its experts are about to get."""

    def __init__(self, dispatch: PlannedDispatch, switch: ScoreSwitch) -> None:
        self._switch = switch
        self._scores: PackScores | None = None
        self._counts = ExpertCounts(torch.zeros(1, 0, 0, 0, dtype=torch.int64), 0)
        self._ids: tuple[Tensor, ...] = ()
        self._tokens: dict[int, TokenShards] = {}
        dispatch.labels, dispatch.counted = self._labels, self._dispatched

    def _labels(self) -> Labels | None:
        """Tokens of this rank by trajectory; padding is the last label. Those of a forward without a gradient, too, by
        whose counts the layer is computed once more."""
        scores = self._switch.current
        if scores is None:
            return None
        return Labels(scores.sequence, scores.n + 1, scores.parallel.expert_split_group)

    def _dispatched(self, counts: ExpertCounts) -> None:
        """A call of the layer starts."""
        scores = self._switch.active()
        if scores is None:
            return  # its backward starts another one
        self._scores, self._counts, self._tokens = scores, counts, {}
        own = counts.own.numpy()  # [experts, sources, labels]
        labels = np.broadcast_to(np.arange(own.shape[2]), own.shape)
        ids = torch.from_numpy(np.repeat(labels.reshape(-1), own.reshape(-1)))
        self._ids = platform.to_device(ids, scores.owned.device).split(own.sum((1, 2)).tolist())

    def tokens_of(self, expert: int) -> Callable[[PackScores], TokenShards]:
        """For ``attach_linear``: rows of one local expert."""

        def tokens(scores: PackScores) -> TokenShards:
            assert scores is self._scores, "an expert runs in the call that dispatched its tokens"
            if expert not in self._tokens:
                self._tokens[expert] = self._shards(scores, expert)
            return self._tokens[expert]

        return tokens

    def _shards(self, scores: PackScores, expert: int) -> TokenShards:
        runs = [_runs(of_rank[expert]) for of_rank in self._counts.counts]
        local = TokenRows(runs[self._counts.rank], scores.n, self._ids[expert])
        if len(runs) == 1:
            return TokenShards(local, None)
        # ranks hold different numbers of rows, and gather as many of each
        sizes = [sum(rows for _, rows in of_rank) for of_rank in runs]
        padded = max(sizes)
        every = [
            run for size, of_rank in zip(sizes, runs, strict=True) for run in (*of_rank, (scores.n, padded - size))
        ]
        whole = TokenRows(every, scores.n, self._ids[expert])
        return TokenShards(local, scores.parallel.expert_split_group, whole, padded)


def _runs(counts: Tensor) -> list[Run]:
    """Rows of one expert on one rank, [sources, labels]."""
    return [(label, rows) for source in counts.tolist() for label, rows in enumerate(source) if rows]
