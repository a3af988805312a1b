"""A trust region over the lag, beyond the paper: bounds of the step that ESS cannot give (docs/method.md).

ESS does not change when all weights shrink alike, so it cannot see that the policy has left its data. Two things are
bounded here, each from numbers that every rank holds:

    rate       x = KL / (target H), KL = mean(w - 1 - log w), w = min(exp(l), c), an estimate of KL(mu, pi) of an answer
               that is never negative (Schulman's k3, http://joschu.net/blog/kl-approx.html), H = mean(-log mu), the
               entropy of mu. Both are summed up over an answer's tokens, so their ratio does not grow with its length
    gradient   its norm, by a multiple of what the norms of recent steps were
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .importance import TOKEN_LIMIT, bounded_exp, truncated_log_weights

#: Scale of the first step, and what it is multiplied by each step until the bound is first met: the first steps of Adam
#: are the longest, and one of them at too high a rate costs more than ten at too low a one.
FIRST_SCALE, OPENING = 0.02, 1.5
#: Share of the batches before in the running means of KL and entropy.
KEPT = 0.5
#: Largest rise over one lag, as a logarithm, where x is 1.
RISE = 2.0
#: The scale never falls below this: it rises by factors only.
SMALLEST_SCALE = 1e-4
#: Share of the steps before in the running mean of squared norms.
NORMS_KEPT = 0.95


@dataclass(frozen=True)
class BoundState:
    """What the bound of the rate remembers between steps.

    kl, entropy  running means of KL and H, nats an answer; None before the first step
    scale        the last factor on the rate, in (0, 1]
    met          the bound has been met: from then on the scale falls at once and rises slowly
    """

    kl: float | None = None
    entropy: float | None = None
    scale: float = FIRST_SCALE / OPENING
    met: bool = False


def lag_kl(log_ratios: Tensor, threshold: float) -> float:
    """mean(w - 1 - log w) with w = min(exp(l), c), nats an answer, at least 0; nan where an l is not finite.

    log_ratios  float [N] l of the global minibatch, N > 0; ``threshold`` is c > 0, infinity leaves l as it is up to
                exp(20). Computed in float64.
    """
    if not bool(log_ratios.isfinite().all()):
        return math.nan
    values = truncated_log_weights(log_ratios.detach().double(), threshold).clamp(max=TOKEN_LIMIT)
    return float((bounded_exp(values) - 1.0 - values).mean())


def relative_kl_bound(state: BoundState, kl: float, entropy: float, target: float, lag: int) -> BoundState:
    """The state with the scale of the step at hand: min(1, 1 / x) where that is below what the last one may rise to.

    kl, entropy  of the batch, nats an answer
    target       KL that is allowed, as a share of the entropy, above 0
    lag          versions over which a step shows in the data; a rise is at most exp(2 min(1, x)) over as many steps:
                 where nothing is learned (x near 0), nothing says that a higher rate would be safe

    ``state`` itself where a number is not finite: such a step is skipped.
    """
    if not (math.isfinite(kl) and math.isfinite(entropy)):
        return state
    mean_kl, mean_entropy = _kept(state.kl, kl, KEPT), _kept(state.entropy, entropy, KEPT)
    allowed = target * max(0.0, mean_entropy)
    used = 1.0 if mean_kl >= allowed else mean_kl / allowed  # min(1, x)
    highest = 1.0 if mean_kl <= allowed else allowed / mean_kl
    risen = state.scale * (math.exp(RISE * used / max(1, lag)) if state.met else OPENING)
    scale = max(SMALLEST_SCALE, min(highest, risen))
    return BoundState(mean_kl, mean_entropy, scale, state.met or highest < risen)


def norm_limit(mean_square: float | None, ratio: float) -> float:
    """Largest norm of a gradient: ``ratio`` times the root of the running mean; inf where none is known, or it is 0."""
    return ratio * math.sqrt(mean_square) if mean_square else math.inf


def next_mean_square(mean_square: float | None, norm: float, limit: float) -> float:
    """The running mean of squared norms with that of a step; a norm counts as twice its ``limit`` at most, so that one
    outlier does not open the way for the next, and norms that stay high do."""
    return _kept(mean_square, min(norm, 2.0 * limit) ** 2, NORMS_KEPT)


def _kept(before: float | None, value: float, share: float) -> float:
    return value if before is None else share * before + (1.0 - share) * value
