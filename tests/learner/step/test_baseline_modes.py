"""Which mode serves a configuration, and when the proxy has a group's baseline. Gradients of all modes are held to
fp64 oracles in ``test_methods``."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vcpo_megatron.config.schema import AlgorithmConfig
from vcpo_megatron.learner.batch.packing import Share, make_pack
from vcpo_megatron.learner.step.baseline_modes import PlainMode, ProxyMode, baseline_mode
from vcpo_megatron.learner.step.objective import Objective
from vcpo_megatron.learner.step.pack_terms import Scored
from vcpo_megatron.learner.step.plan import StepPlan

from .test_batch_state import samples_of_groups, state_of


class StandInPasses:
    """Norms of a group's samples are given; what is scored is recorded, as if its copies had arrived."""

    def __init__(self, **algorithm: Any) -> None:
        chosen = AlgorithmConfig.model_validate(algorithm)
        self.config = SimpleNamespace(algorithm=chosen, train=SimpleNamespace(max_pack_tokens=40))
        self.objective = Objective(chosen)
        self.terms = SimpleNamespace(observer=None, estimated_norms=lambda pack, *_: self.norms[pack.group][pack.index])
        self.norms: dict[int, torch.Tensor] = {}
        self.scored: list[int] = []

    def score(self, state: Any, packs: list[Any]) -> None:
        for pack in packs:
            _, rows = observe(self, state, pack)
            for name, values in rows.items():
                getattr(state, name)[pack.index] = values
        self.scored += [pack.group for pack in packs]


def observe(passes: Any, state: Any, pack: Any) -> Any:
    """What the mode's observer returns of a pack."""
    empty, numbers = torch.zeros(0), state.of_samples(pack.index)
    return passes.terms.observer(state, pack, empty, Scored(empty, empty, state.log_ratio[pack.index], numbers))


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
    passes.norms = {0: torch.tensor([2.0, 1.0, 1.0]).double(), 1: torch.tensor([0.0] * 3 + [3.0, 1.0]).double()}
    mode.find_baselines(state, StepPlan(trained=tuple(packs)))
    assert passes.scored == [0, 0]  # the group in two packs
    assert state.baseline.tolist() == pytest.approx([4 / 6] * 3 + [0.75] * 2)  # p = 4/6, 1/6, 1/6
    passes.norms[0] *= math.nan  # they are not estimated a second time
    numbers, rows = observe(passes, state, packs[1])
    assert rows == {} and numbers.baseline.tolist() == pytest.approx([4 / 6] * 2)
    numbers, rows = observe(passes, state, packs[2])
    assert numbers.baseline.tolist() == rows["baseline"].tolist() == pytest.approx([0.55] * 2)  # p = 9/10, 1/10
    assert rows["estimated_norm"].tolist() == [3.0, 1.0] and rows["fell_back"].tolist() == [0.0, 0.0]
    assert state.baseline.tolist()[3:] == [0.75] * 2  # until the copy has arrived
    assert not state.has_norm.any()  # an estimate is no norm


def test_the_proxy_falls_back_for_the_whole_group_and_leaves_zero_variance_alone() -> None:
    (group, equal), state = samples_of_groups((1.0, 0.0), (1.0, 1.0)), state_of((1.0, 0.0), (1.0, 1.0))
    passes: Any = StandInPasses(opob_mode="proxy")
    baseline_mode(passes)
    packs = [make_pack(part, Share(), torch.device("cpu")) for part in (group, equal)]
    passes.norms = {0: torch.tensor([math.nan, 1.0]).double()}
    numbers, rows = observe(passes, state, packs[0])
    assert numbers.baseline.tolist() == [0.5, 0.5] and rows["fell_back"].tolist() == [1.0, 1.0]
    numbers, rows = observe(passes, state, packs[1])
    assert rows == {} and numbers.baseline.tolist() == [1.0, 1.0]


LOG_RATIOS = (0.0, 3.0, -1.0)


@pytest.mark.parametrize(
    ("algorithm", "log_u"),
    [
        ({"method": "vcpo"}, (0.0, 3.0, -1.0)),
        ({"method": "vcpo", "opob_weights": "truncated", "is_threshold": 8.0}, (0.0, math.log(8), -1.0)),
        ({"method": "vcpo", "is_level": "token"}, (0.0, 0.0, 0.0)),
        ({"method": "vcpo", "is_level": "turn"}, (0.0, 0.0, 0.0)),
        ({"method": "vcpo", "is_level": "none"}, (0.0, 0.0, 0.0)),
    ],
)
def test_weights_of_the_trajectory_are_in_a_baseline_and_those_of_tokens_in_the_norms(
    algorithm: dict[str, Any], log_u: tuple[float, ...]
) -> None:
    rewards, norms = (1.0, 0.0, 2.0), (0.5, 1.0, 0.25)
    state = state_of(rewards)
    state.log_ratio[:] = torch.tensor(LOG_RATIOS).double()
    objective = Objective(AlgorithmConfig.model_validate(algorithm))
    objective.set_baselines(state, [0, 1, 2], torch.tensor(norms).double())
    terms = [math.exp(2 * u) * norm**2 for u, norm in zip(log_u, norms, strict=True)]
    expected = sum(term * reward for term, reward in zip(terms, rewards, strict=True)) / sum(terms)
    assert state.baseline.tolist() == pytest.approx([expected] * 3)
    assert not state.fell_back.any()
    objective.set_baselines(state, [0, 1, 2], torch.zeros(3).double())
    assert state.baseline.tolist() == pytest.approx([1.0] * 3) and state.fell_back.all()


def test_padding_has_a_coefficient_of_0() -> None:
    (group,) = samples_of_groups((1.0, 0.0))
    state, pack = state_of((1.0, 0.0)), make_pack(group, Share(multiple=8), torch.device("cpu"))
    objective = Objective(AlgorithmConfig.model_validate({"method": "vcpo", "baseline": "group_mean"}))
    known = (state.of_samples(pack.index), state.log_ratio)
    found = objective.token_coefficients(state, pack, torch.zeros(8), *known)
    assert found.tolist() == [1.0, 1.0, -1.0, -1.0] + [0.0] * 4
