"""Metrics from literal numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vcpo_megatron.learner.step.batch_state import RankSums
from vcpo_megatron.learner.step.results import StepOutcome, step_metrics
from vcpo_megatron.observability.metrics import METRICS

from .test_batch_state import filled

OUTCOME = StepOutcome(0.5, 0.7, 1e-3, 2.0, "", 1.0)
WEIGHTS = torch.tensor([1.0, 2.0, 1.0]).double()


def test_metrics_of_known_samples() -> None:
    """Group 0: rewards 1 and 0, weights 1 and 2, b = 0.25, 1/std = 2, c = 1/6; group 1: one sample, no variance."""
    metrics = step_metrics(filled(), OUTCOME, WEIGHTS, ess_ratio_truncated=0.6, linear=True)
    # -(2 * (1 - .25) * 1 / 6 * -1  +  2 * (0 - .25) * 2 / 6 * -3) = .25 - .5
    assert metrics["loss"] == pytest.approx(-0.25)
    assert metrics["groups/zero_variance"] == 1
    assert metrics["grad_norm/trajectory_mean"] == 4 and metrics["grad_norm/trajectory_max"] == 5
    assert metrics["kl/behavior"] == pytest.approx(-(1 + math.log(2)) / 6)
    assert metrics["entropy"] == pytest.approx(6 / 6)
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
