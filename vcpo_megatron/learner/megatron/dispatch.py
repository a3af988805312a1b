"""Where the tokens of a mixture of experts go, planned on the host from one copy a layer.

Megatron's dispatchers learn sizes from the device in a dozen places (counts, splits, selections by a mask), each of
which makes the host wait. Here the counts of one call, of every source rank, expert and label, are formed on the
device and sent to the host in one copy: it must know them to cut the rows among experts and ranks, and knows the rest
by them. The copy starts behind the router, the rows are put in order while it is on its way, and then the host waits
for it: not for what it has queued meanwhile, but it is no further ahead of the device than that. What Megatron's
dispatcher does with hidden states is what it does without this.

A layer that is computed once more in the backward goes by the plan of its forward (``kept``): no counts are formed, and
nobody waits.

``label`` tells tokens apart that the caller wants counted apart (trajectories). Rows of one expert from one source are
in the order of their labels, because tokens are: counts tell every row's label without a second dispatch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, MutableMapping
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

    @property
    def own(self) -> Tensor:
        """Of this rank: int64 [experts, sources, labels]."""
        return self.counts[self.rank]


@dataclass(frozen=True)
class DispatchPlan:
    """Of one call.

    counts  rows of the local experts
    sent    int64 [experts], on the host: tokens of this rank by expert; empty where all ranks gather all tokens
    place   int64 [rows], on the device: in the order of the experts, expert * tokens + token of each row
    """

    counts: ExpertCounts
    sent: Tensor
    place: Tensor


#: Counts and ``sent`` of a plan, once they are on the host.
Counting = Callable[[], tuple[ExpertCounts, Tensor]]
#: What the tokens of the call at hand are labelled with, None: nobody asks.
AskedLabels = Callable[[], Labels | None]
#: Called with the counts of a call whose tokens have labels.
Counted = Callable[[ExpertCounts], None]
#: Plans of a pack's forward that its backward will come to again, by layer; None: it computes nothing again.
KeptPlans = Callable[[], MutableMapping["PlannedDispatch", DispatchPlan] | None]


class PlannedDispatch:
    """Of one MoE layer: ``dispatcher`` with its plan made here. ``labels``, ``counted`` and ``kept`` are the caller's
    to set."""

    def __init__(self, dispatcher: Any) -> None:
        self.labels: AskedLabels = lambda: None
        self.counted: Counted = lambda counts: None
        self.kept: KeptPlans = lambda: None
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
        dispatcher.num_out_tokens = routing_map.shape[0] * dispatcher.config.moe_router_topk
        asked, plan = self.labels(), self._take()
        counting = self._count(dispatcher, routing_map, asked) if plan is None else None
        place = places(routing_map, dispatcher.num_out_tokens) if plan is None else plan.place
        tokens, chosen = selected(place, probs)
        dispatcher.reversed_local_input_permutation_mapping = tokens
        rows = hidden.index_select(0, tokens)
        if counting is not None:  # last, when all that needs no counts is queued
            plan = self._keep(DispatchPlan(*counting(), place))
        assert plan is not None
        self._split(dispatcher, plan)
        if asked is not None:
            self.counted(plan.counts)
        return rows, chosen

    def _count(self, dispatcher: Any, routing_map: Tensor, asked: Labels | None) -> Counting:
        """Of every source rank's tokens those for this rank's experts."""
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
            return self._start(here.reshape(local, sources, labels), asked, mine.sum(0))

    @staticmethod
    def _split(dispatcher: Any, plan: DispatchPlan) -> None:
        """Sizes of what is sent and received, where Megatron looks for them."""
        ranks, local = (dispatcher.ep_size, dispatcher.tp_size), dispatcher.num_local_experts
        rows = plan.counts.own.sum(-1)  # [experts, sources]
        dispatcher.tokens_per_expert = rows.sum(1)
        dispatcher.num_global_tokens_per_local_expert = rows.t().contiguous()
        if ranks[0] * ranks[1] > 1:
            from_ranks = rows.sum(0).view(ranks[1], ranks[0])
            dispatcher.input_splits = plan.sent.view(ranks[0], local).sum(1).tolist()
            dispatcher.output_splits = from_ranks[dispatcher.tp_rank].tolist()
            dispatcher.output_splits_tp = from_ranks.sum(1).numpy()

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
        experts, asked, plan = dispatcher.local_expert_indices, self._asked, self._take()
        cut = slice(experts[0], experts[-1] + 1)
        dispatcher.local_map = dispatcher.routing_map[:, cut].contiguous()
        if plan is None:  # how many rows there are the counts alone say
            counts, sent = self._count_gathered(dispatcher, asked)()
            plan = self._keep(DispatchPlan(counts, sent, places(dispatcher.local_map, int(counts.own.sum()))))
        tokens, dispatcher.local_probs = selected(plan.place, probs[:, cut])
        dispatcher.reversed_local_input_permutation_mapping = tokens
        dispatcher.routing_map = None
        if asked is not None:
            self.counted(plan.counts)
        return hidden.index_select(0, tokens), plan.counts.own.sum((1, 2)), dispatcher.local_probs

    def _count_gathered(self, dispatcher: Any, asked: Labels | None) -> Counting:
        """Of all ranks' tokens those for this rank's experts."""
        sources, experts = dispatcher.ep_size * dispatcher.tp_size, len(dispatcher.local_expert_indices)
        with torch.no_grad():
            ids = None if asked is None else asked.ids
            if ids is not None and sources > 1:
                ids = gather_from_sequence_parallel_region(ids, group=dispatcher.tp_ep_group)
            maps = dispatcher.local_map.view(sources, -1, experts)
            labels = 1 if asked is None else asked.count
            if ids is None:
                here = maps.sum(1)[:, None]
            else:
                here = maps.new_zeros(sources, labels, experts, dtype=torch.int64)
                place = ids.view(sources, -1, 1).expand(-1, -1, experts)
                here = here.scatter_add(1, place, maps.long())
            return self._start(here.permute(2, 0, 1).contiguous(), asked, here.new_zeros(0))

    # --- both -------------------------------------------------------------------------------------

    @staticmethod
    def _start(here: Tensor, asked: Labels | None, sent: Tensor) -> Counting:
        """The call's only copy. here [experts, sources, labels] of this rank, ``sent`` of what it gives away."""
        ranks, rank, every = 1, 0, here.reshape(-1)
        if asked is not None and dist.get_world_size(asked.group) > 1:
            ranks, rank = dist.get_world_size(asked.group), dist.get_rank(asked.group)
            every = here.new_empty(ranks * here.numel())
            dist.all_gather_into_tensor(every, here.reshape(-1).contiguous(), group=asked.group)
        copy = platform.start_read(torch.cat([every, sent]), awaited=True)

        def arrived() -> tuple[ExpertCounts, Tensor]:
            numbers = copy.wait()
            return ExpertCounts(numbers[: len(every)].view(ranks, *here.shape), rank), numbers[len(every) :]

        return arrived

    def _take(self) -> DispatchPlan | None:
        """The plan that this call's forward has left, where this is the call that computes it once more."""
        kept = self.kept()
        return None if kept is None else kept.pop(self, None)

    def _keep(self, plan: DispatchPlan) -> DispatchPlan:
        """``plan``, which the call that computes this one once more will find."""
        kept = self.kept()
        if kept is not None:
            kept[self] = plan
        return plan


def count_by_label(routing_map: Tensor, labels: Labels | None) -> Tensor:
    """Tokens of each label that go to each expert, of routing_map bool [t, experts]: int64 [labels, experts]."""
    if labels is None:
        return routing_map.sum(0)[None]
    counts = routing_map.new_zeros(labels.count, routing_map.shape[1], dtype=torch.int64)
    return counts.index_add_(0, labels.ids, routing_map.long())


def places(routing_map: Tensor, rows: int) -> Tensor:
    """expert * tokens + token of every True of routing_map bool [t, experts], expert by expert: int64 [rows]. The host
    knows how many there are, and so it need not wait to find them."""
    return torch.nonzero_static(routing_map.t().reshape(-1), size=rows)[:, 0]


def selected(place: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """(number of the token int64 [rows], its probability [rows]) of every row of ``place``; probs [t, experts]."""
    return place % len(probs), probs.t().reshape(-1).index_select(0, place)
