"""What mismatch alone makes of the ESS: against an independent program's numbers, and by its inverse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vcpo_megatron.algorithm.noise import LARGEST_INFLATION, TokenNoise, noise_ess_ratio, noise_inflation


@pytest.mark.parametrize(
    ("tokens", "expected"), [(256, 0.784), (2048, 0.188), (6332, 0.0307), (12288, 0.0126), (32768, 0.0048)]
)
def test_of_long_answers_with_the_noise_of_a_public_run(tokens: int, expected: float) -> None:
    """512 answers with an RMS of .031 nats a token: medians of 1,000 batches drawn by another program. The formula of
    very many answers has 7e-6 for the fourth."""
    found = noise_ess_ratio(torch.full((512,), tokens * 0.031**2))
    assert found == pytest.approx(expected, rel=0.15)


def test_many_answers_with_little_noise_follow_the_formula() -> None:
    variances = torch.tensor([0.0, 0.1, 0.2, 0.5]).double().repeat(1000)
    expected = 1 / float(np.mean(np.exp([0.0, 0.1, 0.2, 0.5])))
    assert noise_ess_ratio(variances) == pytest.approx(expected, rel=0.01)


def test_answers_of_two_lengths_count_by_weights_of_mean_1() -> None:
    """Half of the answers without noise, half with V = 9. Were the mean of their log ratios 0 and not -V/2, these alone
    would count, and of these the largest."""
    rng, ratios = np.random.default_rng(3), {}
    for mean in (-4.5, 0.0):
        weights = np.ones((1000, 64))
        weights[:, 1::2] = np.exp(3 * rng.normal(size=(1000, 32)) + mean)
        ratios[mean] = float(np.median(weights.sum(1) ** 2 / (weights**2).sum(1) / 64))
    found = noise_ess_ratio(torch.tensor([0.0, 9.0]).double().repeat(32))
    assert found == pytest.approx(ratios[-4.5], rel=0.1) and found > 4 * ratios[0.0]


def test_limits() -> None:
    assert noise_ess_ratio(torch.zeros(7)) == 1.0
    assert noise_ess_ratio(torch.tensor([4.0])) == 1.0  # one answer
    assert noise_ess_ratio(torch.full((64,), 1e5)) == pytest.approx(1 / 64)
    assert noise_ess_ratio(torch.full((64,), 2.0)) == noise_ess_ratio(torch.full((64,), 2.0))
    with pytest.raises(ValueError, match=r"shape \[0\]"):
        noise_ess_ratio(torch.zeros(0))


def test_truncated_weights_have_more_of_it() -> None:
    variances = torch.full((64,), 4.0)
    raw, truncated = noise_ess_ratio(variances), noise_ess_ratio(variances, math.log(8))
    assert raw < truncated < 1
    assert noise_ess_ratio(variances, torch.full((64,), math.log(8)).double()) == pytest.approx(truncated, rel=1e-6)
    assert noise_ess_ratio(variances, -100.0) == 1.0  # all at the bound


@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0, 60.0])
def test_an_inflation_is_found_again(factor: float) -> None:
    variances = torch.linspace(0.01, 0.1, 64)
    ratio = noise_ess_ratio(variances * factor)
    assert noise_inflation(ratio, variances) == pytest.approx(factor, rel=0.002)


def test_inflations_have_limits() -> None:
    variances = torch.full((16,), 0.1)
    assert noise_inflation(1.0, variances) == 1.0  # less than the noise says is the noise of the ratio
    assert noise_inflation(1 / 16, variances * 1e-6) == pytest.approx(LARGEST_INFLATION)


def test_running_moments() -> None:
    """Log ratios 1 and 3, then one of 5: means 2 and 3, mean squares 5 and 35 / 3."""
    empty = TokenNoise()
    assert empty.variance == 0
    two = empty.with_tokens(2, 4.0, 10.0)
    assert two == TokenNoise(2, 2.0, 5.0) and two.variance == 1
    three = two.with_tokens(1, 5.0, 25.0)
    assert (three.tokens, three.mean) == (3, 3.0) and three.variance == pytest.approx(35 / 3 - 9)
    assert three.with_tokens(0, 0.0, 0.0) is three
    assert three.with_tokens(4, math.nan, math.nan) is three


def test_old_tokens_count_for_less() -> None:
    """After many tokens without noise, as many as are remembered with a mean square of 1 make a half of it."""
    quiet = TokenNoise().with_tokens(1e9, 0.0, 0.0)
    assert quiet.tokens == TokenNoise.MEMORY == 16384
    assert quiet.with_tokens(16384, 0.0, 16384.0).square == 0.5
