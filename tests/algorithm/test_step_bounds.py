"""Bounds beside ESS: literal answers, what they answer to, and how they open, fall and rise."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.algorithm.ess import ess_ratio
from vcpo_megatron.algorithm.step_bounds import (
    BoundState,
    lag_kl,
    next_mean_square,
    norm_limit,
    relative_kl_bound,
)


def logs(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64).log()


def test_kl_known_answers() -> None:
    assert lag_kl(logs(1, 1, 1), 8.0) == 0.0
    # (2 - 1 - log 2 + 1/2 - 1 + log 2) / 2 = 1/4
    assert lag_kl(logs(2, 0.5), 8.0) == pytest.approx(0.25, rel=1e-15)
    assert lag_kl(torch.tensor([3000.0, 0.0]), 8.0) == pytest.approx((7 - math.log(8)) / 2, rel=1e-15)
    assert lag_kl(torch.tensor([-50.0]), 8.0) == pytest.approx(49.0)
    assert lag_kl(torch.tensor([25.0]), math.inf) == pytest.approx(math.exp(20) - 21)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_ratio_that_is_not_finite_changes_nothing(bad: float) -> None:
    kl, before = lag_kl(torch.tensor([0.0, bad]), 8.0), BoundState(0.1, 2.0, 0.5, True)
    assert math.isnan(kl) and relative_kl_bound(before, kl, 2.0, 0.3, 64) is before


def test_it_sees_what_ess_cannot() -> None:
    """Weights that all shrank alike: ESS is whole, and half of the policy's mass is where the batch has no sample."""
    gone = logs(*[0.5] * 64)
    assert ess_ratio(gone) == pytest.approx(1.0)
    assert lag_kl(gone, 8.0) == pytest.approx(math.log(2) - 0.5)


def test_it_opens_until_it_is_met() -> None:
    state, scales = BoundState(), []
    for _ in range(11):
        state = relative_kl_bound(state, 0.0, 3.0, 0.3, 64)
        scales.append(state.scale)
    assert scales[:3] == pytest.approx([0.02, 0.03, 0.045])
    assert scales[9] == pytest.approx(0.02 * 1.5**9) and scales[10] == 1.0
    assert state.met  # what it might have risen to is above 1


def test_it_falls_at_once_and_to_what_the_running_means_say() -> None:
    state = relative_kl_bound(BoundState(0.0, 2.0, 0.9, True), 4.0, 4.0, 0.3, 64)
    # KL = (0 + 4) / 2, H = (2 + 4) / 2: 0.3 * 3 / 2
    assert state == BoundState(2.0, 3.0, pytest.approx(0.45), True)


@pytest.mark.parametrize(("used", "rise"), [(0.0, 1.0), (0.5, math.exp(1 / 64)), (1.0, math.exp(2 / 64))])
def test_it_rises_as_far_as_the_kl_that_is_used_says_that_it_may(used: float, rise: float) -> None:
    state = relative_kl_bound(BoundState(0.6 * used, 2.0, 0.1, True), 0.6 * used, 2.0, 0.3, 64)
    assert state.scale == pytest.approx(0.1 * rise, rel=1e-14) and state.met


def test_an_answer_twice_as_long_is_bounded_alike() -> None:
    """KL and entropy are sums over tokens."""
    short = relative_kl_bound(BoundState(0.5, 1.0, 0.9, True), 0.7, 1.1, 0.3, 16)
    long = relative_kl_bound(BoundState(1.0, 2.0, 0.9, True), 1.4, 2.2, 0.3, 16)
    assert long.scale == pytest.approx(short.scale, rel=1e-14)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_behaviour_that_is_certain_closes_it_to_a_scale_that_can_rise(lag: int) -> None:
    closed = relative_kl_bound(BoundState(0.0, 0.0, 1.0, True), 1.0, 0.0, 0.3, lag)
    assert closed.scale == 1e-4
    # x = (0.5 + 1.5) / 2 / (0.3 * 40) = 1 / 12
    assert relative_kl_bound(closed, 1.5, 80.0, 0.3, lag).scale == pytest.approx(1e-4 * math.exp(2 / 12), rel=1e-2)
    assert relative_kl_bound(BoundState(0.0, 0.0, 0.5, True), 0.0, 0.0, 0.3, lag).scale > 0


def test_the_first_gradient_is_not_limited_and_later_ones_by_those_before() -> None:
    assert norm_limit(None, 3.0) == norm_limit(0.0, 3.0) == math.inf
    assert norm_limit(0.25, 3.0) == 1.5
    assert next_mean_square(None, 0.5, 1.0) == 0.25
    assert next_mean_square(0.25, 1.0, 1.5) == pytest.approx(0.95 * 0.25 + 0.05)


def test_one_outlier_does_not_open_the_way_for_the_next_and_norms_that_stay_high_do() -> None:
    mean = 1.0
    mean = next_mean_square(mean, 1e6, norm_limit(mean, 3.0))
    assert norm_limit(mean, 3.0) == pytest.approx(3 * math.sqrt(0.95 + 0.05 * 36))
    for _ in range(40):
        mean = next_mean_square(mean, 100.0, norm_limit(mean, 3.0))
    assert norm_limit(mean, 3.0) > 250
