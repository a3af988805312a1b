"""The state of a batch: what is known before a step, and one owner a sample in what ranks agree on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vcpo_megatron.config.schema import AlgorithmConfig
from vcpo_megatron.learner.batch.packing import Sample
from vcpo_megatron.learner.step.batch_state import BatchState, RankSums

from ..batch.test_packing import trajectory


def samples_of_groups(*groups: tuple[float, ...]) -> list[list[Sample]]:
    """Groups of these rewards; every trajectory has two sampled tokens."""
    samples: list[list[Sample]] = []
    for group, rewards in enumerate(groups):
        start = sum(map(len, samples))
        made = [replace(trajectory([1, 2, 3], 1, group, i), reward=reward) for i, reward in enumerate(rewards)]
        samples.append([Sample(start + i, group, one) for i, one in enumerate(made)])
    return samples


def state_of(*groups: tuple[float, ...], previous_ess: float = 1.0) -> BatchState:
    algorithm = AlgorithmConfig.model_validate({"behavior_anchor": 0.5})
    return BatchState.of(samples_of_groups(*groups), algorithm, 16, previous_ess)


def filled() -> BatchState:
    """Of three samples this rank computed all, and the norms of the first two, which are a group."""
    state = state_of((1.0, 0.0), (1.0,))
    state.owners[:] = 1
    state.log_ratio[:] = torch.tensor([0.0, math.log(2), 1.0], dtype=torch.float64)
    state.logprob_sum[:] = torch.tensor([-1.0, -3.0, -2.0])
    state.entropy_sum[:] = torch.tensor([2.0, 4.0, 0.0])
    state.has_norm[:2], state.grad_norm[:2] = True, torch.tensor([3.0, 5.0]).double()
    state.baseline[:2] = 0.25
    return state


def test_what_is_known_before_the_step() -> None:
    state = state_of((1.0, 0.0), (0.5, 0.5, 0.5), previous_ess=0.75)
    assert state.rewards.tolist() == [1.0, 0.0, 0.5, 0.5, 0.5]
    assert state.inverse_std.tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]
    assert state.has_variance.tolist() == [True, True, False, False, False]
    assert state.loss_coefficients.tolist() == [1 / 10] * 5
    assert state.baseline.tolist() == [0.5] * 5
    assert state.anchor == 0.5 * 0.25
    assert state.first_members.tolist() == [0, 2]
    assert state_of((1.0,), (0.5, 0.5, 0.5), (1.0, 0.0), (1.0,)).first_members.tolist() == [0, 1, 4, 6]
    assert state.members(0) == [0, 1] and state.members(1) == [2, 3, 4]
    assert len(state.token_log_ratios) == 10 and state.token_slice(3) == slice(6, 8)
    assert state.grad_norm.isnan().all() and math.isnan(state.statistic)


@pytest.mark.parametrize(
    ("rewards", "inverse_std"),
    [
        ((0.3, 0.1 + 0.2, 0.3, 0.3), 1.0),  # equal but for rounding
        ((0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1), 1.0),
        ((3e-12, 0.0, 0.0, 3e-12), 1 / 1.5e-12),
    ],
    ids=str,
)
def test_rewards_that_differ_by_rounding_alone_are_no_signal(rewards: tuple[float, ...], inverse_std: float) -> None:
    state = state_of(rewards)
    assert state.inverse_std.tolist() == pytest.approx([inverse_std] * len(rewards))
    differ = inverse_std != 1.0
    assert state.has_variance.tolist() == [differ] * len(rewards) and state.scales[0].has_variance is differ


def test_the_sum_over_ranks_gives_every_sample_to_all() -> None:
    mine, other = filled(), state_of((1.0, 0.0), (1.0,))
    other.log_ratio[:] = 7.0  # known to a rank that owns no sample: on an earlier stage
    mine.ranks = RankSums(padded_tokens=3.0)
    agreed = state_of((1.0, 0.0), (1.0,))
    agreed.unpack(mine.packed() + other.packed())
    assert agreed.log_ratio.tolist() == [0.0, math.log(2), 1.0]
    assert agreed.grad_norm[:2].tolist() == [3.0, 5.0] and agreed.grad_norm[2].isnan()
    assert agreed.baseline.tolist() == [0.25, 0.25, 1.0]
    assert agreed.has_norm.tolist() == [True, True, False]
    assert agreed.finite and not agreed.aborted
    assert agreed.ranks.padded_tokens == 3
    other.ranks = RankSums(non_finite_gradients=1.0)
    agreed.unpack(mine.packed() + other.packed())
    assert not agreed.finite


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_sample_of_no_rank_or_of_several_is_a_fault(ranks: int) -> None:
    with pytest.raises(RuntimeError, match="by no rank, or by several"):
        filled().unpack(filled().packed() * ranks)


def test_owners_do_not_matter_in_an_aborted_step() -> None:
    """A replica that aborted has not computed all of its samples."""
    state = state_of((1.0, 0.0))
    state.ranks = RankSums(aborted=1.0)
    state.unpack(state.packed())
    assert state.aborted


@pytest.mark.parametrize("name", ["log_ratio", "grad_norm"])
def test_a_number_that_is_not_finite_is_seen(name: str) -> None:
    state = filled()
    getattr(state, name)[1] = math.nan
    state.unpack(state.packed())
    assert not state.finite
