"""The step that the effective sample size and the bounds beside it allow, and what they remember between steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import numpy as np
import torch

from ...algorithm import importance
from ...algorithm.ess import ess_ratio, step_scale
from ...algorithm.step_bounds import BoundState, lag_kl, next_mean_square, norm_limit, relative_kl_bound
from ...config.schema import AlgorithmConfig, RunConfig
from ...types import Batch

#: Steps, all on-policy, whose median ESS ratio is the base when ``base_ess_ratio`` is "auto".
AUTO_BASE_STEPS = 5


@dataclass
class EssState:
    """What the step size, its bounds and the anchor remember between steps; part of a checkpoint.

    first_ratios  ESS ratios of the first steps taken, all on-policy, while ``base_ess_ratio`` is "auto"
    bound         of the rate, where ``step_bound`` is on
    mean_square   running mean of the gradients' squared norms, where ``spike_clip`` is on; None before the first step
    """

    previous_ratio: float = 1.0
    first_ratios: list[float] = field(default_factory=list)
    bound: BoundState = BoundState()
    mean_square: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bound, dict):  # as a checkpoint's manifest has it
            self.bound = BoundState(**self.bound)

    def base(self, configured: float | str) -> float | None:
        """base_ess_ratio: the configured number, or the median of the first steps; None until it is known."""
        if not isinstance(configured, str):
            return configured
        return statistics.median(self.first_ratios) if len(self.first_ratios) == AUTO_BASE_STEPS else None

    def scale(self, ratio: float, algorithm: AlgorithmConfig) -> float:
        """Factor on the learning rate; 1 where the method does not scale, or while the base is not known."""
        base = self.base(algorithm.base_ess_ratio)
        return step_scale(ratio, base, algorithm.ess_rule) if algorithm.preset.ess_scaling and base is not None else 1.0

    def record(self, ratio: float, bounds: StepBounds, norm: float) -> None:
        """A step was taken with this ratio, within ``bounds``, on a gradient of this norm."""
        self.previous_ratio = ratio
        if bounds.state is not None:
            self.bound = bounds.state
        if bounds.largest_norm is not None:
            self.mean_square = next_mean_square(self.mean_square, norm, bounds.largest_norm)
        if len(self.first_ratios) < AUTO_BASE_STEPS:
            self.first_ratios.append(ratio)


@dataclass(frozen=True)
class StepBounds:
    """What bounds one step beside ESS.

    state         what the bound of the rate will remember once the step is taken; None where ``step_bound`` is off
    kl, entropy   of the batch, nats an answer; nan where it is off
    largest_norm  of the gradient, inf for none; None where ``spike_clip`` is off
    """

    state: BoundState | None = None
    kl: float = math.nan
    entropy: float = math.nan
    largest_norm: float | None = None

    @property
    def scale(self) -> float:
        """Factor on the learning rate beside that of ESS."""
        return 1.0 if self.state is None else self.state.scale

    @property
    def metrics(self) -> dict[str, float]:
        """Of the bounds that are on; no norm where nothing limits it yet."""
        largest = math.inf if self.largest_norm is None else self.largest_norm
        found = {"bound/grad_norm": largest} if largest < math.inf else {}
        if self.state is not None:
            found |= {"bound/lr_scale": self.state.scale, "bound/kl": self.kl, "bound/entropy": self.entropy}
        return found


def step_bounds(state: EssState, config: RunConfig, batch: Batch, log_ratio: torch.Tensor) -> StepBounds:
    """Bounds of the step on ``batch``, from the log ratios of all its trajectories, float64 [N]."""
    algorithm, clip = config.algorithm, config.optimizer.clip_grad or math.inf
    limit = norm_limit(state.mean_square, algorithm.preset.spike_clip)
    largest = min(clip, limit) if algorithm.preset.spike_clip else None
    if algorithm.preset.step_bound == "off":
        return StepBounds(largest_norm=largest)
    kl, entropy = lag_kl(log_ratio, algorithm.is_threshold), behavior_entropy(batch)
    lag, target = config.staleness.max_staleness, algorithm.step_bound_target
    return StepBounds(relative_kl_bound(state.bound, kl, entropy, target, lag), kl, entropy, largest)


def behavior_entropy(batch: Batch) -> float:
    """mean(-log mu) over the answers of the batch: the entropy of the behaviour of a whole answer, in nats."""
    sums = [
        -float(t.behavior_logprobs[t.loss_mask].sum(dtype=np.float64)) for g in batch.groups for t in g.trajectories
    ]
    return math.fsum(sums) / len(sums)


def batch_ess_ratio(log_ratio: torch.Tensor, weights: str, threshold: float) -> float:
    """ESS / N of raw or truncated weights of the whole batch, log ratios float64 [N]."""
    if weights == "truncated":
        log_ratio = importance.truncated_log_weights(log_ratio, threshold)
    return ess_ratio(log_ratio)
