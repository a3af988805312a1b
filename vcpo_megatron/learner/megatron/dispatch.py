"""Where the tokens of a mixture of experts go, planned on the host from one read a layer.

Megatron's dispatchers learn sizes from the device in a dozen places (counts, splits, selections by a mask), each of
which makes the host wait. Here the counts of one call, of every source rank, expert and label, are formed on the
device and read at once: the host must know them to cut the rows among experts and ranks, and knows the rest by them.
What Megatron's dispatcher does with hidden states is what it does without this.

``label`` tells tokens apart that the caller wants counted apart (trajectories). Rows of one expert from one source are
in the order of their labels, because tokens are: counts tell every row's label without a second dispatch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch import Tensor

from . import platform


@dataclass(frozen=True)
class Labels:
    """``ids`` int64 [t]: the label of each token of this rank, ascending; ``count`` labels there are. ``group``: ranks
    that hold the same experts, this one among them, whose counts are asked for."""

    ids: Tensor
    count: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class ExpertCounts:
    """Rows of every local expert, on the host: int64 [ranks, experts, sources, labels].

    In the order in which an expert has its rows: by source, then by label. ``rank`` is this rank's place in the group
    of the ``Labels`` (0 of 1 without).
    """

    counts: Tensor
    rank: int


#: What the tokens of the call at hand are labelled with, None: nobody asks.
AskedLabels = Callable[[], Labels | None]
#: Called with the counts of a call whose tokens have labels.
Counted = Callable[[ExpertCounts], None]


class PlannedDispatch:
    """Of one MoE layer: ``dispatcher`` with its plan made here. ``labels`` and ``counted`` are the caller's to set."""

    def __init__(self, dispatcher: Any) -> None:
        self.labels: AskedLabels = lambda: None
        self.counted: Counted = lambda counts: None
        self._asked: Labels | None = None
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            dispatcher.dispatch_preprocess = types.MethodType(self._dispatch_preprocess, dispatcher)
        elif isinstance(dispatcher, MoEAllGatherTokenDispatcher):
            dispatcher.dispatch_preprocess = types.MethodType(self._keep_labels, dispatcher)
            dispatcher.dispatch_postprocess = types.MethodType(self._dispatch_postprocess, dispatcher)
        else:
            raise TypeError(f"no plan for tokens of a {type(dispatcher).__name__}")

    # --- all to all -------------------------------------------------------------------------------

    def _dispatch_preprocess(
        self, dispatcher: Any, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """In place of Megatron's: rows of ``hidden`` and ``probs`` by expert, and all splits on the host."""
        dispatcher.hidden_shape, dispatcher.probs, dispatcher.routing_map = hidden.shape, probs, routing_map
        hidden = hidden.view(-1, hidden.shape[-1])
        dispatcher.hidden_shape_before_permute = hidden.shape
        self._plan(dispatcher, routing_map)
        dispatcher.num_out_tokens = routing_map.shape[0] * dispatcher.config.moe_router_topk
        tokens, chosen = selected(routing_map, probs, dispatcher.num_out_tokens)
        dispatcher.reversed_local_input_permutation_mapping = tokens
        return hidden.index_select(0, tokens), chosen

    def _plan(self, dispatcher: Any, routing_map: Tensor) -> None:
        asked = self.labels()
        ranks, local = (dispatcher.ep_size, dispatcher.tp_size), dispatcher.num_local_experts
        with torch.no_grad():
            mine = count_by_label(routing_map, asked)  # [labels, experts]
            labels, sources = mine.shape[0], ranks[0] * ranks[1]
            every = mine
            if sources > 1:
                every = gather_from_sequence_parallel_region(mine, group=dispatcher.tp_ep_group)
            first = dispatcher.local_expert_indices[0]
            # an expert has the rows of tensor rank 0 of all expert ranks first, then those of tensor rank 1
            here = every.view(*ranks, labels, -1)[..., first : first + local].permute(3, 1, 0, 2)
            counts, sent = self._read(here.reshape(local, sources, labels), asked, mine.sum(0))
        rows = counts.counts[counts.rank].sum(-1)  # [experts, sources]
        dispatcher.tokens_per_expert = rows.sum(1)
        dispatcher.num_global_tokens_per_local_expert = rows.t().contiguous()
        if sources > 1:
            from_ranks = rows.sum(0).view(ranks[1], ranks[0])
            dispatcher.input_splits = sent.view(ranks[0], local).sum(1).tolist()
            dispatcher.output_splits = from_ranks[dispatcher.tp_rank].tolist()
            dispatcher.output_splits_tp = from_ranks.sum(1).numpy()
        if asked is not None:
            self.counted(counts)

    # --- all gather -------------------------------------------------------------------------------

    def _keep_labels(
        self, dispatcher: Any, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._asked = self.labels()
        dispatcher.hidden_shape, dispatcher.routing_map = hidden.shape, routing_map
        return hidden.view(-1, hidden.shape[-1]), probs

    def _dispatch_postprocess(self, dispatcher: Any, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In place of Megatron's: the rows of all ranks' tokens that are for this rank's experts."""
        dispatcher.hidden_shape_before_permute = hidden.shape
        experts, asked = dispatcher.local_expert_indices, self._asked
        cut = slice(experts[0], experts[-1] + 1)
        dispatcher.local_map = dispatcher.routing_map[:, cut].contiguous()
        sources = dispatcher.ep_size * dispatcher.tp_size
        with torch.no_grad():
            ids = None if asked is None else asked.ids
            if ids is not None and sources > 1:
                ids = gather_from_sequence_parallel_region(ids, group=dispatcher.tp_ep_group)
            maps = dispatcher.local_map.view(sources, -1, len(experts))
            labels = 1 if asked is None else asked.count
            if ids is None:
                here = maps.sum(1)[:, None]
            else:
                here = maps.new_zeros(sources, labels, len(experts), dtype=torch.int64)
                place = ids.view(sources, -1, 1).expand(-1, -1, len(experts))
                here = here.scatter_add(1, place, maps.long())
            counts, _ = self._read(here.permute(2, 0, 1).contiguous(), asked, here.new_zeros(0))
        per_expert = counts.counts[counts.rank].sum((1, 2))
        tokens, dispatcher.local_probs = selected(dispatcher.local_map, probs[:, cut], int(per_expert.sum()))
        dispatcher.reversed_local_input_permutation_mapping = tokens
        dispatcher.routing_map = None
        if asked is not None:
            self.counted(counts)
        return hidden.index_select(0, tokens), per_expert, dispatcher.local_probs

    # --- both -------------------------------------------------------------------------------------

    @staticmethod
    def _read(here: Tensor, asked: Labels | None, sent: Tensor) -> tuple[ExpertCounts, Tensor]:
        """The call's only read. here [experts, sources, labels] of this rank, ``sent`` of what it gives away."""
        ranks, rank, every = 1, 0, here.reshape(-1)
        if asked is not None and dist.get_world_size(asked.group) > 1:
            ranks, rank = dist.get_world_size(asked.group), dist.get_rank(asked.group)
            every = here.new_empty(ranks * here.numel())
            dist.all_gather_into_tensor(every, here.reshape(-1).contiguous(), group=asked.group)
        numbers = platform.read(torch.cat([every, sent]))
        return ExpertCounts(numbers[: len(every)].view(ranks, *here.shape), rank), numbers[len(every) :]


def count_by_label(routing_map: Tensor, labels: Labels | None) -> Tensor:
    """Tokens of each label that go to each expert, of routing_map bool [t, experts]: int64 [labels, experts]."""
    if labels is None:
        return routing_map.sum(0)[None]
    counts = routing_map.new_zeros(labels.count, routing_map.shape[1], dtype=torch.int64)
    return counts.index_add_(0, labels.ids, routing_map.long())


def selected(routing_map: Tensor, probs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(number of the token int64 [rows], its probability [rows]) of every True of routing_map bool [t, experts], expert
    by expert. The host knows how many there are, and so it need not wait to find them."""
    tokens = routing_map.shape[0]
    place = torch.nonzero_static(routing_map.t().reshape(-1), size=rows)[:, 0]
    return place % tokens, probs.t().reshape(-1).index_select(0, place)
