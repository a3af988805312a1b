"""Who computes what in one step: this rank's packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...algorithm.advantages import GroupScale
from ...config.schema import RunConfig
from ..batch.packing import Layout, Pack, Sample, assign_groups, make_pack, plan_steps
from ..megatron.parallel import Parallel


@dataclass(frozen=True)
class StepPlan:
    """This rank's packs.

    silent    of groups without variance (no gradient, but ESS needs their l_i)
    speaking  of the others, group by group
    """

    silent: tuple[Pack, ...] = ()
    speaking: tuple[Pack, ...] = ()

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Sample]],
        scales: Sequence[GroupScale],
        config: RunConfig,
        parallel: Parallel,
        device: torch.device,
        version: int,
    ) -> StepPlan:
        """``scales`` has one entry a group of the batch; ``version`` is the number of the policy before the step."""
        costs = [sum(row.cost for row in group) for group in groups]
        mine = assign_groups(costs, parallel.replicas)[parallel.replica]
        silent = [row for g in mine if not scales[g].has_variance for row in groups[g]]
        speaking = [groups[g] for g in mine if scales[g].has_variance]
        # gathering all tokens everywhere takes as many of every rank
        equal = config.parallel.expert_dispatcher == "allgather" and parallel.expert_data_size > 1
        packer = _Packer(parallel, config.train.max_pack_tokens, device, equal, version)
        return cls(packer.packs([silent]), packer.packs(speaking))


def packing_for(alone: Sequence[str], config: RunConfig, parallel: Parallel) -> RunConfig:
    """``config``, or one trajectory a micro-batch where any rank has parameters ``alone`` that need it.

    Collective: all ranks pack alike. The log says so.
    """
    everywhere: list[list[str]] = [[] for _ in range(parallel.world_size)]
    dist.all_gather_object(everywhere, list(alone), group=parallel.command_group)
    names = sorted({name for some in everywhere for name in some})
    if not names:
        return config
    if parallel.rank == 0:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(
            f"packing: one trajectory a micro-batch, since the gradients of {', '.join(names[:3])}{more} cannot be "
            "separated in a pack",
            flush=True,
        )
    one_row = config.train.model_copy(update={"max_pack_tokens": 1})  # a longer row gets a pack of its own
    return config.model_copy(update={"train": one_row})


@dataclass(frozen=True)
class _Packer:
    parallel: Parallel
    max_tokens: int
    device: torch.device
    equal_lengths: bool
    version: int

    def packs(self, groups: Sequence[Sequence[Sample]]) -> tuple[Pack, ...]:
        """This rank's pack of every micro-step, padded with empty steps to what the schedule asks for."""
        found = [
            self._pack(step)
            for group in groups
            if group
            for step in plan_steps(group, self.parallel.expert_data_size, self.max_tokens)
        ]
        missing = -len(found) % self.parallel.steps_multiple
        empty = [make_pack([], self.parallel.share, self.device, group=found[-1].group) for _ in range(missing)]
        return (*found, *empty)

    def _pack(self, step: Sequence[Sequence[Sample]]) -> Pack:
        own = self.parallel.expert_data_rank
        rows = [row for part in step for row in part]
        offset = sum(len(part) for part in step[:own])
        lengths = [Layout.of([row.cost for row in part], self.parallel.share).total for part in step]
        return make_pack(
            step[own],
            self.parallel.share,
            self.device,
            group=rows[0].group,
            step_samples=rows,
            offset=offset,
            at_least=max(lengths) if self.equal_lengths else 0,
            version=self.version,
        )
