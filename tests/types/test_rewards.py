"""When the rewards of a group are equal: to rounding, whatever their unit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vcpo_megatron.types import has_variance

#: Rewards, and whether they differ.
REWARDS = [
    ([0.3, 0.1 + 0.2, 0.3, 0.3], False),
    ([0.7, 0.1 * 7, 0.7], False),
    ([float(np.float32(0.1)), 0.1], False),  # one of them went through float32
    ([-2.0, -2.0 * (1 + 9e-7)], False),
    ([1e8 / 3, 1e8 / 3 + 1e-7], False),
    ([0.0, 0.0, -0.0], False),
    ([5.0], False),
    ([3e-12, 0.0, 0.0, 3e-12], True),
    ([0.0, 5e-324], True),
    ([-1e-9, 1e-9], True),
    ([1.0, 1.0 + 2e-6], True),
    ([100.0, 100.01], True),
    ([1e308, -1e308], True),
]


@pytest.mark.parametrize(("rewards", "differ"), REWARDS, ids=str)
def test_rewards_differ_by_more_than_rounding(rewards: list[float], differ: bool) -> None:
    assert has_variance(rewards) is differ
    assert has_variance([-r for r in reversed(rewards)]) is differ


@pytest.mark.parametrize("unit", [1e-200, 1e-9, 1e9, 1e200])
def test_the_unit_of_a_reward_does_not_matter(unit: float) -> None:
    for rewards, differ in REWARDS[:5] + REWARDS[9:12]:
        assert has_variance([r * unit for r in rewards if math.isfinite(r * unit)]) is differ
