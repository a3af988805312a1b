"""From what all ranks agree on to metrics and results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...algorithm.ess import ess_ratio
from ...observability.buckets import AGES, FEWEST, LENGTHS
from ...types import Batch, TrajectoryResult
from .batch_state import BatchState
from .step_size import StepBounds


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step.

    on_policy      ESS ratio that mismatch alone would give, None where it is not known
    ess_scale      factor on the learning rate, that of the bounds included
    learning_rate  the one in effect, nan where the step was skipped
    total_norm     the gradient's norm before clipping, nan where the step was skipped before it was asked for
    skipped        "" or the reason
    seconds        from the plan to the end of the last backward
    bounds         what bounded the step beside ESS
    """

    ess_ratio: float
    on_policy: float | None
    ess_scale: float
    learning_rate: float
    total_norm: float
    skipped: str
    seconds: float
    bounds: StepBounds = StepBounds()


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
    to_behavior = -(state.log_ratio + state.mismatch_log_ratio)  # sums of log mu - log pi, with a record or without
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
        "kl/behavior": float(to_behavior.sum() / tokens),
        "kl/behavior_trajectory": float(to_behavior.mean()),
        "kl/reference": float(state.kl_sum.sum() / tokens),
        "entropy": float(state.entropy_sum.sum() / tokens),
        "tokens/trained": float(tokens),
        "tokens/padded": state.ranks.padded_tokens,
        "time/forward_backward": outcome.seconds,
        "step/skipped": float(bool(outcome.skipped)),
        **({} if outcome.on_policy is None else {"ess/ratio_on_policy": outcome.on_policy}),
        **outcome.bounds.metrics,
        **_mismatch(state),
    }


def ess_by_bucket(state: BatchState, ages: torch.Tensor) -> dict[str, float]:
    """ESS of raw weights over the number of trajectories, of those of like age and of like length.

    ages  int64 [N]  versions between a trajectory's oldest token and the step
    """
    found = {}
    for buckets, numbers in ((AGES, ages), (LENGTHS, state.sampled_tokens)):
        for bucket in buckets:
            own = state.log_ratio[(bucket.least <= numbers) & (numbers <= bucket.most)]
            if len(own) >= FEWEST:
                found[bucket.key] = ess_ratio(own)
    return found


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
