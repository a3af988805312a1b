"""ESS: literal answers, invariances, extremes, and no full step on nan."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.algorithm.ess import ess_ratio, step_scale


def logs(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64).log()


def test_known_answers():
    assert ess_ratio(logs(1, 1, 1, 1)) == 1.0
    # (1 + 2 + 3)^2 / (1 + 4 + 9) = 36 / 14 of 3
    assert ess_ratio(logs(1, 2, 3)) == pytest.approx(36 / 14 / 3, rel=1e-14)
    assert ess_ratio(logs(1, 0, 0, 0)[:1]) == 1.0
    assert ess_ratio(torch.tensor([0.0, -1e6, -1e6])) == pytest.approx(1 / 3, rel=1e-15)


def test_constant_factor_changes_nothing():
    ratios = torch.tensor([0.3, -1.2, 2.0, 0.0], dtype=torch.float64)
    assert ess_ratio(ratios - 512) == pytest.approx(ess_ratio(ratios), rel=1e-12)


@pytest.mark.parametrize("size", [2000.0, 1e5, 1e300])
def test_extreme_log_ratios_are_finite_and_in_range(size):
    ratio = ess_ratio(torch.tensor([size, -size, 0.0], dtype=torch.float64))
    assert ratio == pytest.approx(1 / 3, rel=1e-12)
    assert ess_ratio(torch.full((3,), -size, dtype=torch.float64)) == 1.0


def test_range_is_kept_for_random_input():
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-9, 1.0, 30.0, 1e4):
        for n in (1, 2, 7, 100):
            ratio = ess_ratio(torch.randn(n, generator=generator) * scale)
            assert 1 / n <= ratio <= 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gives_nan(bad):
    assert math.isnan(ess_ratio(torch.tensor([0.0, bad, 1.0])))
    assert math.isnan(ess_ratio(torch.tensor([bad])))


def test_empty_minibatch_is_refused():
    with pytest.raises(ValueError, match=r"shape \[0\]"):
        ess_ratio(torch.zeros(0))
    with pytest.raises(ValueError, match=r"shape \[2, 2\]"):
        ess_ratio(torch.zeros(2, 2))


def test_step_scale_known_answers():
    assert step_scale(0.25, 1.0, "sqrt") == 0.5
    assert step_scale(0.25, 1.0, "linear") == 0.25
    assert step_scale(0.25, 0.5, "linear") == 0.5
    assert step_scale(0.9, 0.5, "sqrt") == 1.0


def test_nan_is_never_a_full_step():
    # min(1.0, nan) is 1.0 in Python: the reference's way to take its worst batch at full rate.
    assert math.isnan(step_scale(math.nan, 1.0, "sqrt"))
    assert math.isnan(step_scale(math.nan, 1.0, "linear"))


@pytest.mark.parametrize("base", [0.0, -0.1, 1.1, math.nan])
def test_bad_base_is_refused(base):
    with pytest.raises(ValueError, match="base_ess_ratio"):
        step_scale(0.5, base, "sqrt")


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="ess_rule = 'cube'"):
        step_scale(0.5, 1.0, "cube")
