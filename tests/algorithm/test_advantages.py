"""Group scale: population statistics, exact zeros without variance, tiny differences."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.algorithm.advantages import GroupScale, group_scale


def advantages(rewards: torch.Tensor, scale: GroupScale) -> torch.Tensor:
    """As the learner forms them."""
    return (rewards - rewards[0] - (rewards - rewards[0]).mean()) * scale.inverse_std


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_known_answer_is_the_population_deviation():
    # One of four: mean 1/4, variance 3/16; the sample deviation would give 2 instead of 4 / sqrt(3).
    scale = group_scale(tensor(1, 0, 0, 0), True, True)
    assert scale.has_variance
    assert scale.inverse_std == pytest.approx(4 / math.sqrt(3), rel=1e-15)
    assert advantages(tensor(1, 0, 0, 0), scale).tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)


def test_without_normalisation_the_scale_is_one():
    assert group_scale(tensor(1, 0, 0, 0), False, True) == GroupScale(1.0, True)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.0, 0.0], [3.7]], ids=str)
def test_no_variance_gives_exact_zeros(rewards, normalize_std):
    values = tensor(*rewards)
    scale = group_scale(values, normalize_std, False)
    assert scale == GroupScale(1.0, False)
    assert advantages(values, scale).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("factor", [1.0, 1e-170, 1e150])
def test_advantages_do_not_depend_on_the_unit_of_the_reward(factor):
    rewards = tensor(0, 1, 4, 2) * factor
    scale = group_scale(rewards, True, True)
    assert scale.has_variance
    expected = (tensor(0, 1, 4, 2) - 1.75) / tensor(0, 1, 4, 2).std(correction=0)
    torch.testing.assert_close(advantages(rewards, scale), expected, rtol=1e-12, atol=0)


def test_advantages_sum_to_zero_in_any_order():
    rewards = tensor(3, 1, 2, 2, 9)
    for permutation in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        shuffled = rewards[permutation]
        values = advantages(shuffled, group_scale(shuffled, True, True))
        assert float(values.sum()) == pytest.approx(0.0, abs=1e-14)
        assert float(values.pow(2).mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_rewards_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        group_scale(tensor(1, bad), True, True)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="n > 0"):
        group_scale(torch.zeros(0), True, True)
    with pytest.raises(ValueError, match=r"\[2, 2\]"):
        group_scale(torch.zeros(2, 2), True, True)


def test_the_caller_says_whether_rewards_differ():
    """Equal to rounding: a scale of 1 / std would make a signal of 5e-17."""
    assert group_scale(tensor(0.3, 0.1 + 0.2, 0.3, 0.3), True, False) == GroupScale(1.0, False)
    with pytest.raises(ValueError, match="equal rewards have no variance"):
        group_scale(tensor(2, 2), True, True)
