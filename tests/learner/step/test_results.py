"""Metrics from literal numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vcpo_megatron.learner.step.batch_state import RankSums
from vcpo_megatron.learner.step.results import StepOutcome, ess_by_bucket, step_metrics
from vcpo_megatron.observability.metrics import METRICS

from .test_batch_state import filled, state_of

OUTCOME = StepOutcome(0.5, 0.9, 0.7, 1e-3, 2.0, "", 1.0)
WEIGHTS = torch.tensor([1.0, 2.0, 1.0]).double()


def test_metrics_of_known_samples() -> None:
    """Group 0: rewards 1 and 0, weights 1 and 2, b = 0.25, 1/std = 2, c = 1/6; group 1: one sample, no variance."""
    metrics = step_metrics(filled(), OUTCOME, WEIGHTS, ess_ratio_truncated=0.6, linear=True)
    # -(2 * (1 - .25) * 1 / 6 * -1  +  2 * (0 - .25) * 2 / 6 * -3) = .25 - .5
    assert metrics["loss"] == pytest.approx(-0.25)
    assert metrics["groups/zero_variance"] == 1
    assert metrics["grad_norm/trajectory_mean"] == 4 and metrics["grad_norm/trajectory_max"] == 5
    assert metrics["kl/behavior"] == pytest.approx(-(1 + math.log(2)) / 6)
    assert metrics["kl/behavior_trajectory"] == pytest.approx(-(1 + math.log(2)) / 3)
    assert metrics["entropy"] == pytest.approx(6 / 6)
    assert metrics["ess/ratio_on_policy"] == 0.9
    assert metrics["ess/ratio"] == 0.5 and metrics["ess/ratio_truncated"] == 0.6
    assert metrics["tokens/trained"] == 6 and metrics["weight/max"] == 2
    assert metrics["baseline/accumulator_error"] == 0 and metrics["baseline/fallbacks"] == 0
    assert metrics["mismatch/tokens"] == 0 and "mismatch/mean" not in metrics
    assert metrics["lr/effective"] == 1e-3 and metrics["step/skipped"] == 0
    assert metrics.keys() <= METRICS.keys()


def test_what_is_counted_once_a_group_and_over_ranks() -> None:
    state = filled()
    state.fell_back[:2] = True
    state.ranks = RankSums(padded_tokens=5.0, accumulator_error=0.04, accumulator_size=4.0)
    state.mismatch_sum[:2], state.mismatch_max[:2], state.mismatch_tokens[:2] = 0.5, 0.25, 2.0
    metrics = step_metrics(
        state, replace(OUTCOME, skipped="non-finite step"), WEIGHTS, ess_ratio_truncated=0.5, linear=False
    )
    assert metrics["baseline/fallbacks"] == 1  # of one group
    assert metrics["baseline/accumulator_error"] == pytest.approx(0.1)
    assert metrics["tokens/padded"] == 5
    assert metrics["mismatch/mean"] == 0.25 and metrics["mismatch/max"] == 0.25 and metrics["mismatch/tokens"] == 4
    # not linear: the coefficients hold the advantages already
    assert metrics["loss"] == pytest.approx(-(-1 - 3 - 2) / 6)
    assert metrics["step/skipped"] == 1


def test_trajectories_of_like_age_and_length_have_an_ess_of_their_own() -> None:
    """Ten trajectories: four on-policy of one weight, four 4 to 15 versions old of which one has thrice the weight, two
    more of other ages; six of at most 64 tokens, four of 1,025."""
    state = state_of(tuple(float(i) for i in range(10)))
    state.log_ratio[:] = torch.tensor([5.0, 5.0, 5.0, 5.0, math.log(3), 0.0, 0.0, 0.0, 50.0, -50.0])
    state.sampled_tokens[:] = torch.tensor([64, 1, 2, 3, 64, 64, 1025, 1025, 1025, 1025])
    found = ess_by_bucket(state, torch.tensor([0, 0, 0, 0, 4, 15, 7, 5, 3, 16]))
    first = 5.0 - torch.tensor([5.0, 5.0, 5.0, 5.0, math.log(3), 0.0]).double()
    weights = (-first).exp()
    assert found == {
        "ess/ratio_age_0": 1.0,
        "ess/ratio_age_4_15": pytest.approx(36 / 12 / 4),
        "ess/ratio_len_1_64": pytest.approx(float(weights.sum() ** 2 / weights.square().sum()) / 6),
        "ess/ratio_len_1025_4096": pytest.approx(0.25),
    }
    assert found.keys() <= METRICS.keys()
    state.log_ratio[0] = math.nan
    assert math.isnan(ess_by_bucket(state, torch.zeros(10, dtype=torch.int64))["ess/ratio_age_0"])
    assert "ess/ratio_on_policy" not in step_metrics(
        filled(), replace(OUTCOME, on_policy=None), WEIGHTS, ess_ratio_truncated=0.6, linear=True
    )
