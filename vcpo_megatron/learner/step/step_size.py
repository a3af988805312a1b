"""The step size that the effective sample size allows, and what it remembers between steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch

from ...algorithm import importance
from ...algorithm.ess import ess_ratio, step_scale
from ...config.schema import AlgorithmConfig

#: Steps, all on-policy, whose median ESS ratio is the base when ``base_ess_ratio`` is "auto".
AUTO_BASE_STEPS = 5


@dataclass
class EssState:
    """What the step size and the anchor remember between steps; part of a checkpoint.

    first_ratios  ESS ratios of the first steps taken, all on-policy, while ``base_ess_ratio`` is "auto"
    """

    previous_ratio: float = 1.0
    first_ratios: list[float] = field(default_factory=list)

    def base(self, configured: float | str) -> float | None:
        """base_ess_ratio: the configured number, or the median of the first steps; None until it is known."""
        if not isinstance(configured, str):
            return configured
        return statistics.median(self.first_ratios) if len(self.first_ratios) == AUTO_BASE_STEPS else None

    def scale(self, ratio: float, algorithm: AlgorithmConfig) -> float:
        """Factor on the learning rate; 1 where the method does not scale, or while the base is not known."""
        base = self.base(algorithm.base_ess_ratio)
        return step_scale(ratio, base, algorithm.ess_rule) if algorithm.preset.ess_scaling and base is not None else 1.0

    def record(self, ratio: float) -> None:
        """A step was taken with this ratio."""
        self.previous_ratio = ratio
        if len(self.first_ratios) < AUTO_BASE_STEPS:
            self.first_ratios.append(ratio)


def batch_ess_ratio(log_ratio: torch.Tensor, weights: str, threshold: float) -> float:
    """ESS / N of raw or truncated weights of the whole batch, log ratios float64 [N]."""
    if weights == "truncated":
        log_ratio = importance.truncated_log_weights(log_ratio, threshold)
    return ess_ratio(log_ratio)
