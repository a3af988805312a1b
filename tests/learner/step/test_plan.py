"""The packs of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vcpo_megatron.learner.batch.packing import Share
from vcpo_megatron.learner.step.plan import _Packer

from .test_batch_state import samples_of_groups


def test_empty_packs_belong_to_the_last_group() -> None:
    """Its sums are still open then; those of earlier groups may be corrected already."""
    parallel: Any = SimpleNamespace(expert_data_size=1, expert_data_rank=0, steps_multiple=4, share=Share())
    packs = _Packer(parallel, 4, torch.device("cpu"), False, 0).packs(samples_of_groups((1.0, 0.0), (0.5, 1.0, 0.0)))
    assert [(pack.group, len(pack.samples)) for pack in packs] == [(0, 2), (1, 2), (1, 1), (1, 0)]
