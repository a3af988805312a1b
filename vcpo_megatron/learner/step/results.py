"""From what all ranks agree on to metrics and results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...types import Batch, TrajectoryResult
from .batch_state import BatchState


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step.

    ess_scale      factor on the learning rate
    learning_rate  the one in effect, nan where the step was skipped
    total_norm     the gradient's norm before clipping, nan where the step was skipped before it was asked for
    skipped        "" or the reason
    seconds        from the plan to the end of the last backward
    """

    ess_ratio: float
    ess_scale: float
    learning_rate: float
    total_norm: float
    skipped: str
    seconds: float


def step_metrics(
    state: BatchState, outcome: StepOutcome, weights: torch.Tensor, *, ess_ratio_truncated: float, linear: bool
) -> dict[str, float]:
    """The learner's share of a line of ``metrics.jsonl``.

    weights  float64 [N]  w_i; linear: the method's gradient is linear in the advantage
    """
    advantage = (state.rewards - state.baseline) * state.inverse_std * weights
    # a method that is not linear in the advantage has it in its token coefficients already, zeros included
    factor = torch.where(state.has_variance, advantage, 0.0) if linear else torch.ones_like(advantage)
    norms = state.grad_norm[~state.grad_norm.isnan()]
    tokens, first = state.sampled_tokens.sum(), state.first_members
    return {
        "loss": -float((factor * state.loss_coefficients * state.logprob_sum).sum()),
        "reward/mean": float(state.rewards.mean()),
        "ess/ratio": outcome.ess_ratio,
        "ess/ratio_truncated": ess_ratio_truncated,
        "ess/lr_scale": outcome.ess_scale,
        "lr/effective": outcome.learning_rate,
        "weight/max": float(weights.max()),
        "grad_norm/total": outcome.total_norm,
        "grad_norm/trajectory_mean": float(norms.mean()) if len(norms) else math.nan,
        "grad_norm/trajectory_max": float(norms.max()) if len(norms) else math.nan,
        "baseline/fallbacks": float(state.fell_back[first].sum()),
        "baseline/accumulator_error": _accumulator_error(state),
        "groups/zero_variance": float((~state.has_variance)[first].sum()),
        "kl/behavior": -float((state.log_ratio + state.mismatch_log_ratio).sum() / tokens),
        "kl/reference": float(state.kl_sum.sum() / tokens),
        "entropy": float(state.entropy_sum.sum() / tokens),
        "tokens/trained": float(tokens),
        "tokens/padded": state.ranks.padded_tokens,
        "time/forward_backward": outcome.seconds,
        "step/skipped": float(bool(outcome.skipped)),
        **_mismatch(state),
    }


def spreads(state: BatchState) -> dict[str, float]:
    """Standard deviations over trajectories, population, of the two parts of their log ratios (nats)."""
    return {
        "mismatch/spread": float(state.mismatch_log_ratio.std(correction=0)),
        "lag/spread": float(state.log_ratio.std(correction=0)),
    }


def trajectory_results(state: BatchState, weights: torch.Tensor, batch: Batch) -> tuple[TrajectoryResult, ...]:
    """One result a trajectory, in the order of the batch."""
    numbers = zip(
        (t for group in batch.groups for t in group.trajectories),
        state.log_ratio.tolist(),
        weights.tolist(),
        state.grad_norm.tolist(),
        state.baseline.tolist(),
        strict=True,
    )
    return tuple(
        TrajectoryResult(t.group_id, t.sample_index, log_ratio, weight, norm, baseline)
        for t, log_ratio, weight, norm, baseline in numbers
    )


def _accumulator_error(state: BatchState) -> float:
    """Relative error of accumulators of less than fp32, on the rows that are probed."""
    error, size = state.ranks.accumulator_error, state.ranks.accumulator_size
    return math.sqrt(error / size) if size > 0 else 0.0


def _mismatch(state: BatchState) -> dict[str, float]:
    """mean and max are left out of a step without a token of the current version."""
    tokens = float(state.mismatch_tokens.sum())
    if not tokens:
        return {"mismatch/tokens": 0.0}
    return {
        "mismatch/mean": float(state.mismatch_sum.sum()) / tokens,
        "mismatch/max": float(state.mismatch_max.max()),
        "mismatch/tokens": tokens,
    }
