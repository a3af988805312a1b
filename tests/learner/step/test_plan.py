"""The packs of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vcpo_megatron.learner.batch.packing import Share
from vcpo_megatron.learner.step.plan import StepPlan, _Packer

from .test_batch_state import samples_of_groups


def test_empty_packs_belong_to_the_last_group() -> None:
    """Its sums are still open then; those of earlier groups may be corrected already."""
    parallel: Any = SimpleNamespace(expert_data_size=1, expert_data_rank=0, steps_multiple=4, share=Share())
    packs = _Packer(parallel, 4, torch.device("cpu"), False, 0).packs(samples_of_groups((1.0, 0.0), (0.5, 1.0, 0.0)))
    assert [(pack.group, len(pack.samples)) for pack in packs] == [(0, 2), (1, 2), (1, 1), (1, 0)]


def test_packed_anew_are_the_same_samples() -> None:
    """One a pack, group by group, and as many packs as the schedule asks for."""
    parallel: Any = SimpleNamespace(expert_data_size=1, expert_data_rank=0, steps_multiple=2, share=Share())
    groups = samples_of_groups((1.0, 0.0), (0.5, 1.0, 0.0))
    plan = StepPlan(trained=_Packer(parallel, 1000, torch.device("cpu"), False, 0).packs(groups))
    config: Any = SimpleNamespace(parallel=SimpleNamespace(expert_dispatcher="alltoall"))
    found = plan.repacked(config, parallel, 1)
    assert [list(pack.index) for pack in plan.trained] == [[0, 1], [2, 3, 4]]
    assert [list(pack.index) for pack in found] == [[0], [1], [2], [3], [4], []]
    assert [pack.group for pack in found] == [0, 0, 1, 1, 1, 1]
