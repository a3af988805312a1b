"""What the numerical mismatch of learner and servers alone makes of the effective sample size (docs/method.md).

The log ratio of a token that the learner's own version sampled is mismatch and nothing else. Where tokens are
independent with variance sigma^2, the log ratio of an answer of L tokens is normal with variance V = L sigma^2, and its
mean is -V/2, since two normalised policies have E[w] = 1. Of very many answers

    ESS / N = 1 / mean_i exp(V_i)

but N answers never show less than 1/N, and far more than that formula where V is large. So the ratio to expect is the
median over draws of N such log ratios, always the same draws: a function of V that is alike on all ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Standard normal numbers that a ratio is found with, at least; and draws of a batch, at least.
_NUMBERS, _DRAWS = 32768, 16
#: Largest factor on variances that ``noise_inflation`` looks for, and its relative accuracy.
LARGEST_INFLATION, _ACCURACY = 1024.0, 1e-3


@dataclass(frozen=True)
class TokenNoise:
    """Running moments of the log ratios of tokens that the current version sampled.

    tokens  what the moments weigh against new tokens: their number, at most ``MEMORY``
    mean    of the log ratios;  square  of their squares
    """

    tokens: float = 0.0
    mean: float = 0.0
    square: float = 0.0

    #: Tokens after which older ones count for little: the variance of so many is known to a few per cent.
    MEMORY = 16384.0

    @property
    def variance(self) -> float:
        """sigma^2 of a token; 0 before the first one."""
        return max(0.0, self.square - self.mean**2)

    def with_tokens(self, count: float, total: float, squares: float) -> TokenNoise:
        """After ``count`` more tokens with this sum of log ratios and of their squares; as it is for none, or where one
        is not finite."""
        if not count or not math.isfinite(squares):
            return self
        known = min(self.tokens, self.MEMORY)
        mean = (known * self.mean + total) / (known + count)
        square = (known * self.square + squares) / (known + count)
        return TokenNoise(min(known + count, self.MEMORY), mean, square)


def noise_ess_ratio(variances: Tensor, log_bounds: Tensor | float = math.inf) -> float:
    """ESS / N to expect of N independent normal log ratios with variances V and means -V/2; in [1/N, 1].

    variances   float [N]  V_i >= 0, finite
    log_bounds  what bounds the log ratios where ESS is that of truncated weights: a number, or float [N]

    Raises ValueError for another shape or N = 0.
    """
    if variances.ndim != 1 or not variances.numel():
        raise ValueError(f"variances of a minibatch have shape {list(variances.shape)}, expected [N] with N > 0")
    variances = variances.detach().double()
    logs = variances.sqrt() * _normal_numbers(len(variances)) - variances / 2
    logs = torch.clamp(logs, max=log_bounds)
    weights = (logs - logs.max(dim=1, keepdim=True).values).exp()
    ratios = weights.sum(1).square() / weights.square().sum(1) / len(variances)
    return min(1.0, float(ratios.median()))


def noise_inflation(ratio: float, variances: Tensor, log_bounds: Tensor | float = math.inf) -> float:
    """The factor on ``variances`` at which ``noise_ess_ratio`` is ``ratio``: from 1 to ``LARGEST_INFLATION``.

    It is what an on-policy batch's own ratio says beyond its token noise: noise that goes along with its neighbours',
    or has heavier tails, weighs more in an answer than independent noise. Less than 1 is noise of the ratio.
    """
    if noise_ess_ratio(variances, log_bounds) <= ratio:
        return 1.0
    low, high = 0.0, math.log(LARGEST_INFLATION)
    while high - low > _ACCURACY:
        middle = (low + high) / 2
        above = noise_ess_ratio(variances * math.exp(middle), log_bounds) > ratio
        low, high = (middle, high) if above else (low, middle)
    return math.exp(high)


@functools.lru_cache(maxsize=8)
def _normal_numbers(n: int) -> Tensor:
    """float64 [draws, n], the same in every call and on every rank."""
    draws = max(_DRAWS, -(-_NUMBERS // n))
    return torch.randn(draws, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
