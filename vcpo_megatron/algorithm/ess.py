"""Effective sample size of a minibatch and the step size it allows (VCPO, arXiv 2602.17616; docs/method.md).

    log ESS = 2 logsumexp(l) - logsumexp(2 l),   ratio = ESS / N in [1/N, 1],   lr_eff = lr * min(1, ratio / base)^p

Log ratios of any size are safe and no epsilon is added anywhere. A non-finite log ratio makes the
ratio nan, and nan stays nan: the caller must skip such a step, since min(1, nan) would be a full step
in most languages.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

EXPONENTS = {"sqrt": 0.5, "linear": 1.0}


def ess_ratio(log_ratios: Tensor) -> float:
    """ESS / N of the global minibatch with log weights l, float [N], N > 0; in [1/N, 1], or nan.

    Pass l for raw weights, min(l, log c) for truncated ones. Adding a constant to all l changes
    nothing. Computed in float64. Raises ValueError for another shape or N = 0.
    """
    if log_ratios.ndim != 1 or not log_ratios.numel():
        raise ValueError(f"log ratios of a minibatch have shape {list(log_ratios.shape)}, expected [N] with N > 0")
    values = log_ratios.detach().double()
    if not bool(values.isfinite().all()):
        return math.nan
    # Relative to the largest, so that two large logarithms are not subtracted from each other.
    shifted = values - values.max()
    log_ess = 2 * torch.logsumexp(shifted, 0) - torch.logsumexp(2 * shifted, 0)
    count = len(values)
    return min(1.0, max(1.0 / count, float(log_ess.exp()) / count))


def step_scale(ratio: float, base: float, rule: Literal["sqrt", "linear"]) -> float:
    """min(1, ratio / base)^p, p = 1/2 for "sqrt" (Adam-type optimizers), 1 for "linear" (SGD); nan for a nan ratio.

    ``base`` is ``base_ess_ratio`` in (0, 1]. Raises ValueError on another base or an unknown rule.
    """
    if rule not in EXPONENTS:
        raise ValueError(f"ess_rule = {rule!r}: expected one of {', '.join(EXPONENTS)}")
    if not 0 < base <= 1:
        raise ValueError(f"base_ess_ratio = {base}: expected a ratio in (0, 1]")
    if math.isnan(ratio):
        return math.nan
    return min(1.0, ratio / base) ** EXPONENTS[rule]
