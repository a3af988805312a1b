"""Who computes what in one step: this rank's packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...algorithm.advantages import GroupScale
from ...config.schema import RunConfig
from ..batch.packing import Pack, PackLayout, Sample, assign_groups, make_pack, plan_steps
from ..megatron import platform
from ..megatron.parallel import Parallel


@dataclass(frozen=True)
class StepPlan:
    """This rank's packs.

    zero_variance  of zero-variance groups (no gradient, but ESS needs their l_i)
    trained        of the others, group by group
    """

    zero_variance: tuple[Pack, ...] = ()
    trained: tuple[Pack, ...] = ()

    @property
    def packs(self) -> tuple[Pack, ...]:
        """All of them."""
        return (*self.zero_variance, *self.trained)

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Sample]],
        scales: Sequence[GroupScale],
        config: RunConfig,
        parallel: Parallel,
        max_pack_tokens: int,
        version: int,
    ) -> StepPlan:
        """``scales`` has one entry a group of the batch; ``version`` is the number of the policy before the step."""
        costs = [sum(sample.cost for sample in group) for group in groups]
        mine = assign_groups(costs, parallel.replicas)[parallel.replica]
        zero_variance = [sample for g in mine if not scales[g].has_variance for sample in groups[g]]
        trained = [groups[g] for g in mine if scales[g].has_variance]
        packer = _Packer.of(config, parallel, max_pack_tokens, version)
        return cls(packer.packs([zero_variance]), packer.packs(trained))

    def repacked(self, config: RunConfig, parallel: Parallel, max_pack_tokens: int) -> tuple[Pack, ...]:
        """The samples of ``trained`` once more, in packs of another size and without a version."""
        groups: dict[int, list[Sample]] = {}
        for pack in self.trained:
            groups.setdefault(pack.group, []).extend(pack.step_samples)
        ordered = [sorted(group, key=lambda sample: sample.index) for group in groups.values()]
        return _Packer.of(config, parallel, max_pack_tokens, None).packs(ordered)


def scoring_packs(
    groups: Sequence[Sequence[Sample]], config: RunConfig, parallel: Parallel, max_pack_tokens: int
) -> tuple[Pack, ...]:
    """This rank's packs of ``groups`` for a forward without a step, each group cut as a step cuts it."""
    mine = assign_groups([sum(sample.cost for sample in group) for group in groups], parallel.replicas)
    packer = _Packer.of(config, parallel, max_pack_tokens, None)
    return packer.packs([groups[g] for g in mine[parallel.replica]])


def pack_tokens(per_sample: Sequence[str], config: RunConfig, parallel: Parallel) -> int:
    """Most tokens of a pack: as configured, or one trajectory a pack where any rank has parameters ``per_sample``.

    Collective: all ranks pack alike. The log says so.
    """
    everywhere: list[list[str]] = [[] for _ in range(parallel.world_size)]
    dist.all_gather_object(everywhere, list(per_sample), group=parallel.command_group)
    names = sorted({name for some in everywhere for name in some})
    if not names:
        return config.train.max_pack_tokens
    if parallel.rank == 0:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(
            f"packing: one trajectory a micro-batch, since the gradients of {', '.join(names[:3])}{more} cannot be "
            "separated in a pack",
            flush=True,
        )
    return 1  # a longer trajectory gets a pack of its own


@dataclass(frozen=True)
class _Packer:
    parallel: Parallel
    max_tokens: int
    device: torch.device
    equal_lengths: bool
    version: int | None

    @classmethod
    def of(cls, config: RunConfig, parallel: Parallel, max_tokens: int, version: int | None) -> _Packer:
        # gathering all tokens everywhere takes as many of every rank
        equal = config.parallel.expert_dispatcher == "allgather" and parallel.expert_data_size > 1
        return cls(parallel, max_tokens, platform.device(), equal, version)

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
        samples = [sample for part in step for sample in part]
        offset = sum(len(part) for part in step[:own])
        lengths = [PackLayout.of([sample.cost for sample in part], self.parallel.share).total for part in step]
        return make_pack(
            step[own],
            self.parallel.share,
            self.device,
            group=samples[0].group,
            step_samples=samples,
            offset=offset,
            at_least=max(lengths) if self.equal_lengths else 0,
            version=self.version,
        )
