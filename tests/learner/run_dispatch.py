"""Executed on every rank of a test world: tokens dispatched by our plan and by Megatron's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vcpo_megatron.learner.megatron import platform

from .world import leave_layout

EXPERTS, TOP_K, TOKENS, HIDDEN, LABELS = 8, 2, 24, 5, 3


def assert_alike(kind: str, expert: int, expert_tensor: int) -> None:
    """Of random tokens, unlike on every rank."""
    platform.prepare()
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import token_dispatcher

    from vcpo_megatron.learner.megatron.dispatch import ExpertCounts, Labels, PlannedDispatch

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    mpu.initialize_model_parallel(expert_model_parallel_size=expert, expert_tensor_parallel_size=expert_tensor)
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "tp_ep"])
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        add_bias_linear=False,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    local = EXPERTS // expert
    own = list(range(groups.ep.rank() * local, (groups.ep.rank() + 1) * local))
    names = {"alltoall": "MoEAlltoAllTokenDispatcher", "allgather": "MoEAllGatherTokenDispatcher"}
    made = getattr(token_dispatcher, names[kind])
    theirs, ours = (made(local, own, config, pg_collection=groups) for _ in range(2))
    plan, counted = PlannedDispatch(ours), list[ExpertCounts]()
    ids = torch.arange(TOKENS) * LABELS // TOKENS
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    plan.labels, plan.counted = lambda: Labels(ids, LABELS, alone), counted.append

    torch.manual_seed(dist.get_rank())
    hidden = torch.randn(TOKENS, 1, HIDDEN)
    scores = torch.rand(TOKENS, EXPERTS)
    chosen = scores.topk(TOP_K)
    table = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen.indices, True)
    probs = torch.where(table, scores, 0.0)
    found = [_dispatched(dispatcher, hidden, table, probs) for dispatcher in (theirs, ours)]
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and torch.equal(one, other)

    # the labels travel as a hidden state does
    marks = ids.float()[:, None, None].expand(-1, 1, HIDDEN).contiguous()
    rows, per_expert, *_ = _dispatched(theirs, marks, table, probs)
    by_expert = rows[:, 0].long().split(per_expert.tolist())
    (counts,) = counted
    for expert_rows, of_sources in zip(by_expert, counts.own.tolist(), strict=True):
        assert expert_rows.tolist() == [
            label for source in of_sources for label, n in enumerate(source) for _ in range(n)
        ]
    leave_layout()


def _dispatched(dispatcher: Any, hidden: torch.Tensor, table: torch.Tensor, probs: torch.Tensor) -> list[torch.Tensor]:
    """Rows of the experts, how many each has, their probabilities, and what comes back of the rows as they are."""
    sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, table, probs))
    rows, per_expert, probabilities = dispatcher.dispatch_postprocess(*sent)
    back = dispatcher.token_combine(dispatcher.combine_preprocess(rows.clone()))
    return [rows, per_expert.long(), probabilities, dispatcher.combine_postprocess(back)]
