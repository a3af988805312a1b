"""Who computes what in one step: facts of the batch that every rank finds alike, and this rank's packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..algorithm import baselines, normalization
from ..algorithm.advantages import GroupScale, group_scale
from ..config.models import RunConfig
from ..types import Batch
from .packing import Layout, Pack, Row, assign_groups, batch_rows, make_pack, plan_steps
from .parallel import Parallel
from .results import RowFacts

#: What rewards are centred on before any norm is known: the baseline itself, or m_g until OPOB corrects it.
_CENTRES = {"opob": baselines.group_mean, "group_mean": baselines.group_mean, "zero": baselines.zero}


@dataclass(frozen=True)
class StepPlan:
    """scales and centres have one entry a group of the batch.

    silent    packs of groups without variance (forward only: ESS needs their l_i)
    speaking  packs of the others, group by group
    """

    facts: RowFacts
    scales: tuple[GroupScale, ...]
    centres: tuple[float, ...]
    silent: tuple[Pack, ...]
    speaking: tuple[Pack, ...]

    @classmethod
    def of(cls, batch: Batch, config: RunConfig, parallel: Parallel, device: torch.device) -> StepPlan:
        groups = batch_rows(batch)
        rows = [row for group in groups for row in group]
        algorithm = config.algorithm
        scales = [group_scale(_rewards(group), algorithm.normalize_std) for group in groups]
        centres = [_CENTRES[algorithm.baseline](_rewards(group)).value for group in groups]
        sampled = torch.tensor([row.trajectory.num_sampled for row in rows])
        coefficients = normalization.token_coefficients(
            algorithm.loss_normalization, sampled, config.rollout.max_new_tokens
        )
        facts = RowFacts.of(groups, scales, centres, coefficients)
        mine = assign_groups([sum(row.cost for row in group) for group in groups], parallel.replicas)[parallel.replica]
        silent = [row for g in mine if not scales[g].has_variance for row in groups[g]]
        speaking = [groups[g] for g in mine if scales[g].has_variance]
        # gathering all tokens everywhere takes as many of every rank
        equal = config.parallel.expert_dispatcher == "allgather" and parallel.spread_size > 1
        packer = _Packer(parallel, config.train.max_pack_tokens, device, equal)
        return cls(facts, tuple(scales), tuple(centres), packer.packs([silent]), packer.packs(speaking))


@dataclass(frozen=True)
class _Packer:
    parallel: Parallel
    max_tokens: int
    device: torch.device
    equal_lengths: bool

    def packs(self, groups: Sequence[Sequence[Row]]) -> tuple[Pack, ...]:
        """This rank's pack of every micro-step, padded with empty steps to what the schedule asks for."""
        found = [self._pack(step) for group in groups if group
                 for step in plan_steps(group, self.parallel.spread_size, self.max_tokens)]  # fmt: skip
        missing = -len(found) % self.parallel.steps_multiple
        empty = [make_pack([], self.parallel.share, self.device, group=found[-1].group) for _ in range(missing)]
        return (*found, *empty)

    def _pack(self, step: Sequence[Sequence[Row]]) -> Pack:
        own = self.parallel.spread_rank
        rows = [row for part in step for row in part]
        offset = sum(len(part) for part in step[:own])
        lengths = [Layout.of([row.cost for row in part], self.parallel.share).total for part in step]
        return make_pack(
            step[own], self.parallel.share, self.device, group=rows[0].group, step_rows=rows, offset=offset,
            at_least=max(lengths) if self.equal_lengths else 0,
        )  # fmt: skip


def _rewards(group: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([row.trajectory.reward for row in group], dtype=torch.float64)
