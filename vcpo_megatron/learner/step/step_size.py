"""The step that the effective sample size and the bounds beside it allow, and what they remember between steps."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field

import numpy as np
import torch

from ...algorithm import importance
from ...algorithm.ess import ess_ratio, step_scale
from ...algorithm.noise import TokenNoise, noise_ess_ratio, noise_inflation
from ...algorithm.step_bounds import BoundState, lag_kl, next_mean_square, norm_limit, relative_kl_bound
from ...config.schema import AlgorithmConfig, RunConfig
from ...types import Batch
from .batch_state import BatchState

#: Steps, all on-policy, whose median ESS ratio is the first base when ``base_ess_ratio`` is "auto"; and on-policy steps
#: whose median inflation counts.
AUTO_BASE_STEPS = 5


@dataclass(frozen=True)
class EssState:
    """What the step size, its bounds and the anchor remember between steps; part of a checkpoint.

    first_ratios  ESS ratios of the first steps taken, all on-policy where ``base_ess_ratio`` is "auto"
    noise_tokens, noise_mean, noise_square  the fields of a ``TokenNoise``: tokens of the current version, as they came
    inflations    of the last on-policy steps taken: how much noisier answers were than their tokens say
    bound         of the rate, where ``step_bound`` is on
    mean_square   running mean of the gradients' squared norms, where ``spike_clip`` is on; None before the first step
    """

    previous_ratio: float = 1.0
    first_ratios: list[float] = field(default_factory=list)
    noise_tokens: float = 0.0
    noise_mean: float = 0.0
    noise_square: float = 0.0
    inflations: list[float] = field(default_factory=list)
    bound: BoundState = BoundState()
    mean_square: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bound, dict):  # as a checkpoint's manifest has it
            object.__setattr__(self, "bound", BoundState(**self.bound))

    def observed(self, state: BatchState) -> EssState:
        """With what a batch's tokens of the current version say, whether its step is taken or not."""
        noise = TokenNoise(self.noise_tokens, self.noise_mean, self.noise_square).with_tokens(*_noise_sums(state))
        return dataclasses.replace(self, noise_tokens=noise.tokens, noise_mean=noise.mean, noise_square=noise.square)

    def on_policy_ratio(self, state: BatchState, algorithm: AlgorithmConfig) -> float | None:
        """ESS / N that mismatch alone would give a batch of these lengths; None before the first token of a current
        version, and where l is the lag alone."""
        noise = TokenNoise(self.noise_tokens, self.noise_mean, self.noise_square)
        if not noise.tokens or algorithm.mismatch == "recorded":
            return None
        inflation = statistics.median(self.inflations) if self.inflations else 1.0
        return noise_ess_ratio(state.sampled_tokens * noise.variance * inflation, _log_bounds(state, algorithm))

    def base(self, on_policy: float | None, algorithm: AlgorithmConfig) -> float | None:
        """base_ess_ratio: the configured number; or, once it is known, ``on_policy``, which a batch's tokens give, or
        the median of the first steps."""
        if not isinstance(algorithm.base_ess_ratio, str):
            return algorithm.base_ess_ratio
        if len(self.first_ratios) < AUTO_BASE_STEPS:
            return None
        return statistics.median(self.first_ratios) if on_policy is None else on_policy

    def scale(self, ratio: float, on_policy: float | None, algorithm: AlgorithmConfig) -> float:
        """Factor on the learning rate; 1 where the method does not scale, or while the base is not known."""
        base = self.base(on_policy, algorithm)
        return step_scale(ratio, base, algorithm.ess_rule) if algorithm.preset.ess_scaling and base is not None else 1.0

    def taken(
        self, ratio: float, state: BatchState, algorithm: AlgorithmConfig, bounds: StepBounds, norm: float
    ) -> EssState:
        """After a step that was taken on this batch, with this ratio, within ``bounds``, on a gradient of this norm."""
        mean_square = self.mean_square
        if bounds.largest_norm is not None:
            mean_square = next_mean_square(mean_square, norm, bounds.largest_norm)
        return dataclasses.replace(
            self,
            previous_ratio=ratio,
            first_ratios=[*self.first_ratios, ratio][:AUTO_BASE_STEPS],
            inflations=[*self.inflations, *_inflation(ratio, state, algorithm)][-AUTO_BASE_STEPS:],
            bound=self.bound if bounds.state is None else bounds.state,
            mean_square=mean_square,
        )


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


def batch_ess_ratio(state: BatchState, weights: str, threshold: float) -> float:
    """ESS / N of raw or truncated weights of the whole batch."""
    log_ratio = state.log_ratio
    if weights == "truncated":
        log_ratio = importance.truncated_log_weights(log_ratio, threshold, state.threshold_growth)
    return ess_ratio(log_ratio)


def _noise_sums(state: BatchState) -> tuple[float, float, float]:
    """Tokens of the current version, the sum of their log ratios, and that of the squares."""
    names = ("mismatch_tokens", "noise_sum", "noise_squares")
    count, total, squares = (float(getattr(state, name).sum()) for name in names)
    return count, total, squares


def _inflation(ratio: float, state: BatchState, algorithm: AlgorithmConfig) -> list[float]:
    """What the ratio of an on-policy batch says beyond its tokens' noise; nothing of others, without noise, or where
    none is in the ratio."""
    noise = TokenNoise().with_tokens(*_noise_sums(state))
    is_on_policy = torch.equal(state.mismatch_tokens, state.sampled_tokens)
    if algorithm.mismatch == "recorded" or noise.variance == 0 or not is_on_policy:
        return []
    return [noise_inflation(ratio, state.sampled_tokens * noise.variance, _log_bounds(state, algorithm))]


def _log_bounds(state: BatchState, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Of the log weights that ESS is made of: float64 [N]."""
    unbounded = torch.full_like(state.log_ratio, torch.inf)
    if algorithm.ess_weights == "raw":
        return unbounded
    return importance.truncated_log_weights(unbounded, algorithm.is_threshold, state.threshold_growth)
