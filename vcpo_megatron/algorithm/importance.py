"""Importance weights of trajectories and tokens, in log space (VCPO, arXiv 2602.17616; docs/method.md).

    l_i = sum over sampled tokens t of (log pi_theta(t) - log mu(t)),    w_i = min(exp(l_i), c)

A weight may also be that of a part: of a token, or of a turn (the tokens of one answer of a server), whose log ratio is
the sum over its own tokens.

Prompt and tool-output tokens carry no behaviour log-prob, and a masked log-prob may be anything
(-inf, nan, garbage of a padded row): masked positions are replaced by zero before any arithmetic,
so that neither their value nor their gradient can reach a sum. A weight is formed as
exp(min(l, log c)), which cannot overflow; exp(l) itself is never formed.

Nothing here is differentiated through: weights are detached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: Largest log ratio of a token whose ratio is formed; beyond it a ratio stays exp(20) = 4.9e8. A policy that gives a
#: token at most probability 1 had sampled this one at 2e-9: only a defect does that. In fp32 exp(89) is infinite, and
#: the one token would make every gradient of its batch so.
TOKEN_LIMIT = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(min(l, 20)), elementwise: the ratio of a token, finite in fp32 with all that multiplies it; nan stays nan."""
    return torch.clamp(log_ratio, max=TOKEN_LIMIT).exp()


def segment_sum(values: Tensor, mask: Tensor, segment_ids: Tensor, n: int) -> Tensor:
    """Sum of the unmasked values of each segment.

    values       float [T]   one number a token of a pack
    mask         bool  [T]   False excludes the token, whatever its value and its segment id are
    segment_ids  int   [T]   which trajectory of the pack, 0..n-1; any order
    returns      float64 [n] zero for a segment without tokens

    Differentiable in ``values``. The same bits in every run on CPUs; on GPUs under
    ``torch.use_deterministic_algorithms(True)``. Raises ValueError on shapes or dtypes that do not fit.
    """
    _require_tokens(values=values, mask=mask, segment_ids=segment_ids)
    if n < 0:
        raise ValueError(f"n = {n}: the number of segments cannot be negative")
    if segment_ids.dtype.is_floating_point or segment_ids.dtype == torch.bool:
        raise ValueError(f"segment_ids is {segment_ids.dtype}, expected an integer dtype")
    kept = torch.where(mask, values.double(), 0.0)
    index = torch.where(mask, segment_ids.long(), 0)
    # One slot at least, so that a pack of padding only (n = 0) has somewhere to put its zeros.
    total = torch.zeros(max(n, 1), dtype=torch.float64, device=values.device)
    return total.index_add(0, index, kept)[:n]


def segment_max(values: Tensor, mask: Tensor, segment_ids: Tensor, n: int) -> Tensor:
    """Largest unmasked value of each segment, at least 0: float64 [n], detached; nan where one of them is.

    Arguments as of ``segment_sum``.
    """
    _require_tokens(values=values, mask=mask, segment_ids=segment_ids)
    kept = torch.where(mask, values.detach().double(), 0.0)
    index = torch.where(mask, segment_ids.long(), 0)
    largest = torch.zeros(max(n, 1), dtype=torch.float64, device=values.device)
    return largest.scatter_reduce(0, index, kept, "amax")[:n]


def token_log_ratios(policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi_theta - log mu of each token, 0 where masked; float64 [T], detached.

    All arguments are [T]; ``mask`` is bool.
    """
    _require_tokens(policy_logprobs=policy_logprobs, behavior_logprobs=behavior_logprobs, mask=mask)
    policy = torch.where(mask, policy_logprobs.detach().double(), 0.0)
    behavior = torch.where(mask, behavior_logprobs.detach().double(), 0.0)
    return policy - behavior


def log_ratios(policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, segment_ids: Tensor, n: int) -> Tensor:
    """l_i of the n trajectories of a pack: float64 [n], detached.

    policy_logprobs, behavior_logprobs  float [T]  at the sampling temperature, both
    mask                                bool  [T]  True where the policy sampled the token
    segment_ids                         int   [T]  trajectory of each token, 0..n-1

    Under context parallelism this is the local part; the caller sums over the group.
    """
    return segment_sum(token_log_ratios(policy_logprobs, behavior_logprobs, mask), mask, segment_ids, n)


def mismatch_weights(recorded_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """c_t = min(pi_v'(t) / mu(t), threshold) of each token, 1 where masked; float64 [T], detached.

    The weight between behaviour and proximal policy of decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): pi_v'
    is the learner as it was when it recorded its own log-probs. Arguments are [T]; ``mask`` is bool.
    """
    ratios = token_log_ratios(recorded_logprobs, behavior_logprobs, mask)
    return bounded_exp(truncated_log_weights(ratios, threshold))


def threshold_growth(tokens: Tensor, reference: int | None) -> Tensor:
    """max(1, sqrt(L / L_ref)), the factor on log c by the length of what is weighted: float64, shape of ``tokens``.

    tokens     L, sampled tokens of an answer or a turn
    reference  L_ref > 0 (``is_threshold_length``), up to which c is c; None: 1 at every length

    Independent noise of tokens has a standard deviation of sqrt(L) times theirs in a log ratio: a bound on the weight
    that stands still truncates more and more of what is noise alone.
    """
    tokens = tokens.double()
    return torch.ones_like(tokens) if reference is None else (tokens / reference).sqrt().clamp(min=1.0)


def truncated_log_weights(log_ratio: Tensor, threshold: float, growth: Tensor | float = 1.0) -> Tensor:
    """min(l, k log c), elementwise, dtype and shape of ``log_ratio``; nan stays nan.

    ``threshold`` is c > 0 (``is_threshold``); infinity leaves l untouched. Raises ValueError otherwise. ``growth`` is
    k, that of ``threshold_growth``.
    """
    if not threshold > 0:
        raise ValueError(f"is_threshold = {threshold}: weights are truncated at a positive value")
    return torch.clamp(log_ratio, max=math.log(threshold) * growth)


def truncated_weights(log_ratio: Tensor, threshold: float) -> Tensor:
    """w = exp(min(l, log c)), elementwise; at most c, never overflows. ``log_ratio`` may be [n] or [T]."""
    return truncated_log_weights(log_ratio, threshold).exp()


def masked_log_weights(log_ratio: Tensor, threshold: float, growth: Tensor | float = 1.0) -> Tensor:
    """l where l <= k log c, else -inf: masked importance sampling, which drops what it cannot trust
    (sequence-level MIS; Liu et al. 2025, "When speed kills stability")."""
    return log_ratio.masked_fill(log_ratio > truncated_log_weights(log_ratio, threshold, growth), -math.inf)


def band_log_weights(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """l where low <= exp(l) <= high, else -inf (IcePop, Ring-1T, arXiv 2510.18855: token ratios in [0.5, 5])."""
    lower = math.log(low) if low > 0 else -math.inf
    return log_ratio.masked_fill((log_ratio < lower) | (log_ratio > math.log(high)), -math.inf)


def log_weights(
    kind: str, log_ratio: Tensor, threshold: float, low: float, high: float, growth: Tensor | float = 1.0
) -> Tensor:
    """log w of log ratios [n] or [T] for a method's ``weights``: truncated | masked | band. ValueError for another."""
    if kind not in LOG_WEIGHTS:
        raise ValueError(f"weights = {kind!r}: expected one of {', '.join(LOG_WEIGHTS)}")
    return LOG_WEIGHTS[kind](log_ratio, threshold, low, high, growth)


LOG_WEIGHTS: Mapping[str, Callable[[Tensor, float, float, float, Tensor | float], Tensor]] = {
    "truncated": lambda x, threshold, low, high, growth: truncated_log_weights(x, threshold, growth),
    "masked": lambda x, threshold, low, high, growth: masked_log_weights(x, threshold, growth),
    "band": lambda x, threshold, low, high, growth: band_log_weights(x, low, high),
}


def _require_tokens(**tensors: Tensor) -> None:
    """All are [T] with one T; the one called ``mask`` is bool."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError(f"expected tensors of one shape [T], got {shapes}")
    if tensors["mask"].dtype != torch.bool:
        raise ValueError(f"mask is {tensors['mask'].dtype}, expected torch.bool")
