"""Token coefficients of methods that are not a plain weight times the advantage, as pure functions.

The learner differentiates  L = - sum_i c_i sum_t v_t log pi_theta(t)  with v detached, so a method is the
function  v = surrogate(tokens, advantage, bounds).  For a surrogate objective J(r) of the token ratio
r = pi_theta / mu this is v = dJ/d log r = r J'(r): where a clip is active, v = 0.

All ratios enter as logarithms, float64, with masked positions at 0, and are formed by ``bounded_exp``: whatever one
token's ratio is, its coefficient is finite, and 0 where the advantage is. Advantages are (R_i - b) / std of
trajectory i. Nothing here is differentiated through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .ess import ess_ratio
from .importance import bounded_exp, segment_sum, truncated_log_weights, truncated_weights


@dataclass(frozen=True)
class TokenTerms:
    """T tokens of n trajectories laid end to end.

    log_ratio  float64 [T]  log pi_theta - log mu, 0 where masked
    mask       bool    [T]  True where the policy sampled the token
    segments   int     [T]  which trajectory; n for padding
    statistic  the batch's number that the method asks for, nan where none
    """

    log_ratio: Tensor
    mask: Tensor
    segments: Tensor
    n: int
    statistic: float = float("nan")

    def per_token(self, per_trajectory: Tensor) -> Tensor:
        """[n] -> [T]; 0 for padding."""
        return torch.nn.functional.pad(per_trajectory.to(self.log_ratio), (0, 1))[self.segments]

    def sums(self, values: Tensor) -> Tensor:
        """[T] -> [n] over unmasked tokens."""
        return segment_sum(values, self.mask, self.segments, self.n)

    def lengths(self) -> Tensor:
        """Sampled tokens of each trajectory: [n]."""
        return self.sums(torch.ones_like(self.log_ratio))

    def running_sums(self, values: Tensor) -> Tensor:
        """[T] -> [T]: over the sampled tokens of the same trajectory up to this one, which must lie end to end.

        By doubling: a sum over the whole pack would mix trajectories, and on GPUs has no form that repeats its bits.
        """
        total, reach = torch.where(self.mask, values, 0.0), 1
        while reach < len(total):
            same = self.segments[reach:] == self.segments[:-reach]
            total = torch.cat([total[:reach], total[reach:] + torch.where(same, total[:-reach], 0.0)])
            reach *= 2
        return total


@dataclass(frozen=True)
class Bounds:
    """threshold: is_threshold; low, high: bounds of the ratio (1 - eps and 1 + eps of PPO)."""

    threshold: float
    low: float
    high: float

    @property
    def logs(self) -> tuple[float, float]:
        """log low and log high."""
        return math.log(self.low) if self.low > 0 else -math.inf, math.log(self.high)


Surrogate = Callable[[TokenTerms, Tensor, Bounds], Tensor]


def _clip_open(ratio: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """1.0 where min(r A, clip(r) A) still has a gradient: not (A > 0 and r > high), not (A < 0 and r < low)."""
    closed = ((advantage > 0) & (ratio > bounds.high)) | ((advantage < 0) & (ratio < bounds.low))
    return (~closed).to(ratio.dtype)


def ppo_clip(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """min(r A, clip(r, low, high) A) per token (PPO, arXiv 1707.06347 eq. 7; with group advantages GRPO,
    arXiv 2402.03300; without std and with a constant length Dr. GRPO, arXiv 2503.20783)."""
    a = tokens.per_token(advantage)
    ratio = bounded_exp(tokens.log_ratio)
    return torch.where(_clip_open(ratio, a, bounds) > 0, ratio * a, 0.0)


def decoupled_ppo(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """min(pi_prox/mu, c) times PPO's clip around pi_prox (arXiv 2110.00641; AReaL, arXiv 2505.24298).

    pi_prox is the policy at the start of the step, and a batch is used for one update: pi_theta / pi_prox is 1.
    """
    a = tokens.per_token(advantage)
    weight = bounded_exp(truncated_log_weights(tokens.log_ratio, bounds.threshold))
    return torch.where(_clip_open(torch.ones_like(weight), a, bounds) > 0, weight * a, 0.0)


def gspo(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """PPO's clip of the length-normalised sequence ratio s_i = exp(l_i / T_i) (arXiv 2507.18071 eq. 5, 7).

    d s_i / d log pi_t = s_i / T_i; the 1/T_i is that of ``loss_normalization = sequence_token_mean``.
    """
    length = tokens.sums(torch.ones_like(tokens.log_ratio)).clamp(min=1.0)
    ratio = bounded_exp(tokens.sums(tokens.log_ratio) / length)
    advantage = advantage.to(ratio)
    return tokens.per_token(torch.where(_clip_open(ratio, advantage, bounds) > 0, ratio * advantage, 0.0))


def m2po(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """r A on the tokens that are kept (M2PO as arXiv 2510.01161 describes it in words, and AReaL's documentation).

    ``statistic`` is the largest (log r)^2 that is kept, see ``second_moment_cutoff``.
    """
    kept = tokens.log_ratio.square() <= tokens.statistic
    return torch.where(kept, bounded_exp(tokens.log_ratio) * tokens.per_token(advantage), 0.0)


def m2po_clip(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """PPO's clip of r to one range, exp(-tau) to exp(tau), solved for the batch (M2PO as its authors released it).

    ``statistic`` is tau^2, see ``second_moment_range``. No token is chosen for being extreme: one whose update leads
    back towards the behaviour keeps its gradient however far away it is.
    """
    a = tokens.per_token(advantage)
    closed = _leads_away(tokens.log_ratio, a) & (tokens.log_ratio.square() > tokens.statistic)
    return torch.where(closed, 0.0, bounded_exp(tokens.log_ratio) * a)


def _leads_away(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Where an update takes r further away from 1: r > 1 and A > 0, or r < 1 and A < 0."""
    return log_ratio.sign() * advantage.sign() > 0


def cispo(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """clip(r, low, high) A, the clipped ratio detached: no token loses its gradient (MiniMax-M1, arXiv 2506.13585)."""
    weight = bounded_exp(truncated_log_weights(tokens.log_ratio, bounds.high)).clamp(min=bounds.low)
    return weight * tokens.per_token(advantage)


#: Bound of log mu - log pi inside P3O's KL estimate, as in its authors' code.
P3O_EXPONENT = 10.0


def p3o(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """min(r, e) A - (1 - e) d KL / d log pi, e the normalised ESS of the batch's token ratios.

    P3O, arXiv 2605.12380 (Fakoor et al.), as its authors' code has it (FeynRL, algs/P3O): a score function whose
    detached weight is capped at e, and (1 - e) times the estimate log r + 1/r - 1 of KL(pi || mu) on sampled tokens,
    so its derivative is 1 - 1/r. The KL term needs no reward: it runs over groups of equal rewards, too. There 1/r is
    bounded at exp(10) in value and loses its gradient beyond; here the gradient stays at that bound, since without it
    the term would push a token further away that is already too rare.
    """
    e, log_ratio = tokens.statistic, tokens.log_ratio
    distance = 1.0 - (-log_ratio).clamp(max=P3O_EXPONENT).exp()
    return truncated_weights(log_ratio, e) * tokens.per_token(advantage) - (1.0 - e) * distance


def veto(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """PPO's clip with wide bounds; nothing from a trigger on in answers of negative advantage (mu-GRPO, 2605.17570).

    A sketch from the abstract: "relaxed clipping, which preserves useful stale-rollout gradients, with
    negative-advantage veto, which removes destabilizing post-trigger suffix updates in negative-advantage responses".
    Chosen here, since the abstract does not say: the trigger is the first token whose ratio leaves [low, high]; the
    bounds are 0.2 and 5; the trigger's own update goes, too (above ``high`` the clip leaves it open, without bound).
    """
    log_ratio = tokens.log_ratio
    ratio = bounded_exp(log_ratio)
    outside = ((ratio < bounds.low) | (ratio > bounds.high)) & tokens.mask
    count = outside.long().cumsum(0)
    first = torch.ones(len(count), dtype=torch.bool, device=count.device)
    first[1:] = tokens.segments[1:] != tokens.segments[:-1]
    # triggers before this trajectory, carried from its first token to all of its tokens
    before = torch.where(first, count - outside.long(), 0).cummax(0).values
    a = tokens.per_token(advantage)
    return torch.where((a < 0) & (count > before), 0.0, ppo_clip(tokens, advantage, bounds))


def asymmetric(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """A for positive advantages, min(exp(l_i), 1) A for negative ones (tapered off-policy REINFORCE,
    arXiv 2503.14286: ratios truncated to [0, 1] on the negative side, none on the positive)."""
    weight = truncated_weights(tokens.sums(tokens.log_ratio), 1.0)
    return tokens.per_token(torch.where(advantage.to(weight) < 0, weight, 1.0) * advantage.to(weight))


def ctpo(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Cumulative ratio of the tokens up to t, clipped in a window that widens with sqrt(t) (CTPO, arXiv 2605.07331).

    r_t = exp(sum_{s <= t} log ratio_s) multiplies the score of token t alone and is detached. As its authors' code has
    it (horizon-llm/CTPO, the position-adaptive form with the product): the window is [low^sqrt(t), high^sqrt(t)], t
    counted over sampled tokens; above it a token has no gradient for either sign of A (PPO's clip for A > 0, their
    dual clip, whose bound is the same, for A < 0), below it none for A < 0.
    """
    (low, high), a = bounds.logs, tokens.per_token(advantage)
    log_ratio = tokens.running_sums(tokens.log_ratio)
    root = tokens.running_sums(torch.ones_like(log_ratio)).sqrt()
    closed = (log_ratio > high * root) | ((a < 0) & (log_ratio < low * root))
    return torch.where(closed, 0.0, bounded_exp(log_ratio) * a)


def fspo(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """PPO's clip of the whole sequence ratio exp(l_i) in a band that widens with sqrt(T_i) (FSPO, arXiv 2509.09177).

    A sketch from the abstract, which says that the log ratio of the sequence is clipped in a band that scales with the
    root of its length. Chosen here, since it does not say: PPO's min decides which side is closed, the band is
    [low^sqrt(T), high^sqrt(T)], and its width.
    """
    low, high = bounds.logs
    log_ratio, root = tokens.sums(tokens.log_ratio), tokens.lengths().sqrt()
    a = advantage.to(log_ratio)
    closed = ((a > 0) & (log_ratio > high * root)) | ((a < 0) & (log_ratio < low * root))
    return tokens.per_token(torch.where(closed, 0.0, bounded_exp(log_ratio) * a))


def _token_weighted(tokens: TokenTerms, advantage: Tensor, bounds: Bounds, kept: Tensor) -> Tensor:
    """Truncated token weights times A in the trajectories that are ``kept``, bool [n]."""
    weight = bounded_exp(truncated_log_weights(tokens.log_ratio, bounds.threshold))
    return weight * tokens.per_token(torch.where(kept, advantage.to(weight), 0.0))


def geometric_mask(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Truncated token weights; a trajectory whose geometric mean ratio exp(l_i / T_i) leaves [low, high] is dropped
    (geometric rejection with token weights, Liu et al. 2025, "When speed kills stability"; verl's rollout correction).
    """
    low, high = bounds.logs
    mean = tokens.sums(tokens.log_ratio) / tokens.lengths().clamp(min=1.0)
    return _token_weighted(tokens, advantage, bounds, (mean >= low) & (mean <= high))


def token_veto(tokens: TokenTerms, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Truncated token weights; a trajectory with a token whose ratio leaves [low, high] is dropped (the veto of Liu et
    al. 2025 and verl, against tokens that the learner finds all but impossible)."""
    low, high = bounds.logs
    outside = (tokens.log_ratio < low) | (tokens.log_ratio > high)
    return _token_weighted(tokens, advantage, bounds, tokens.sums(outside.to(tokens.log_ratio)) == 0)


#: Surrogates by name; "weighted" methods are formed from weights and have none.
SURROGATES: Mapping[str, Surrogate] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "m2po": m2po,
    "m2po_clip": m2po_clip,
    "cispo": cispo,
    "p3o": p3o,
    "veto": veto,
    "asymmetric": asymmetric,
    "ctpo": ctpo,
    "fspo": fspo,
    "geometric_mask": geometric_mask,
    "token_veto": token_veto,
}


def second_moment_cutoff(log_ratios: Tensor, bound: float) -> float:
    """Largest (log r)^2 to keep so that the mean over kept tokens is at most ``bound`` (M2PO).

    log_ratios float64 [M], of all sampled tokens of the batch. TokenTerms are dropped from the largest
    (log r)^2 down; the smallest one is always kept.
    """
    squares = log_ratios.double().square().sort().values
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=torch.float64)
    kept = max(1, int((means <= bound).sum()))  # means of sorted numbers never fall
    return float(squares[kept - 1])


def second_moment_range(log_ratios: Tensor, advantages: Tensor, bound: float) -> float:
    """tau^2 of M2PO's range [exp(-tau), exp(tau)], as its authors' code solves it (Infini-AI-Lab/M2PO).

    log_ratios, advantages  float64 [M]  of all sampled tokens of the batch

    Looked at are tokens whose update leads away from the behaviour (``_leads_away``). While the mean of their
    (log r)^2 is at most ``bound``, the largest one is given back: nothing is clipped. Else it is the largest of their
    (log r)^2 such that, with all of them capped at it, the mean is below ``bound``; 0 when there is none, and all of
    these tokens are clipped.
    """
    squares = log_ratios[_leads_away(log_ratios, advantages)].double().square().sort().values
    n = len(squares)
    if not n:
        return 0.0
    if float(squares.mean()) <= bound:
        return float(squares[-1])
    above = torch.arange(n - 1, -1, -1, dtype=torch.float64)
    within = int((squares.cumsum(0) + above * squares < bound * n).sum())  # capped sums never fall
    return float(squares[within - 1]) if within else 0.0


def token_ess(log_ratios: Tensor) -> float:
    """ESS / M of the token ratios [M]. nan when a ratio is not finite."""
    return ess_ratio(log_ratios)


#: Statistics of the whole batch: (token log ratios [M], their advantages [M], algorithm.second_moment) -> number.
STATISTICS: Mapping[str, Callable[[Tensor, Tensor, float], float]] = {
    "second_moment": lambda ratios, advantages, bound: second_moment_cutoff(ratios, bound),
    "second_moment_range": second_moment_range,
    "token_ess": lambda ratios, advantages, bound: token_ess(ratios),
}
