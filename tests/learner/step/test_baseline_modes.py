"""Which mode serves a configuration, and when the proxy has a group's baseline. Gradients of all modes are held to
fp64 oracles in ``test_methods``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vcpo_megatron.config.schema import AlgorithmConfig
from vcpo_megatron.learner.batch.packing import Share, make_pack
from vcpo_megatron.learner.step.baseline_modes import PlainMode, ProxyMode, baseline_mode
from vcpo_megatron.learner.step.objective import Objective
from vcpo_megatron.learner.step.plan import StepPlan

from .test_batch_state import samples_of_groups, state_of


class StandInPasses:
    """Norms of a pack's samples are given; what is scored is recorded."""

    def __init__(self, **algorithm: Any) -> None:
        chosen = AlgorithmConfig.model_validate(algorithm)
        self.config = SimpleNamespace(algorithm=chosen, train=SimpleNamespace(max_pack_tokens=40))
        self.objective = Objective(chosen)
        self.terms = SimpleNamespace(observer=None, estimated_norms=lambda state, pack, *_: self.norms)
        self.norms = torch.zeros(0)
        self.scored: list[int] = []

    def score(self, state: object, packs: list[Any]) -> None:
        self.scored += [pack.group for pack in packs]


@pytest.mark.parametrize("mode", ["accumulate", "deferred", "two_pass", "proxy"])
def test_a_baseline_of_rewards_needs_no_mode(mode: str) -> None:
    passes: Any = StandInPasses(method="vcpo", baseline="group_mean", opob_mode=mode)
    chosen = baseline_mode(passes)
    assert type(chosen) is PlainMode and chosen.accumulators == 0 and chosen.max_pack_tokens == 40
    assert passes.terms.observer is None


def test_the_proxy_waits_for_the_whole_group() -> None:
    groups = samples_of_groups((1.0, 0.0, 0.0), (0.5, 1.0))
    passes: Any = StandInPasses(opob_mode="proxy")
    mode, state = baseline_mode(passes), state_of((1.0, 0.0, 0.0), (0.5, 1.0))
    assert type(mode) is ProxyMode
    packs = [make_pack(part, Share(), torch.device("cpu")) for part in (groups[0][:1], groups[0][1:], groups[1])]
    mode.find_baselines(state, StepPlan(trained=tuple(packs)))
    assert passes.scored == [0, 0]  # the group in two packs
    before = state.baseline.tolist()
    passes.norms = torch.tensor([2.0]).double()
    passes.terms.observer(state, packs[0], torch.zeros(0), torch.zeros(0))
    assert state.baseline.tolist() == before
    passes.norms = torch.tensor([1.0, 1.0]).double()
    passes.terms.observer(state, packs[1], torch.zeros(0), torch.zeros(0))
    assert state.baseline.tolist() == pytest.approx([4 / 6] * 3 + [0.75] * 2)  # p = 4/6, 1/6, 1/6
    assert not state.has_norm.any()  # an estimate is no norm
