"""What the trajectories and tokens of one batch are multiplied by: numbers only, no model, no ranks.

    linear rows     v_t w_i ((R_i - b_i)/std + a/w_i)    v_t token weight or 1, w_i sequence weight or 1
    other rows      surrogate(ratios, (R_i - b_i)/std)_t + a

Rows of groups without variance get 0, but for a surrogate of the whole batch, which sees them with advantage 0. a is
the behaviour anchor's coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...algorithm import baselines, importance, normalization
from ...algorithm.advantages import group_scale
from ...algorithm.surrogates import STATISTICS, SURROGATES, Bounds, TokenTerms
from ...config.schema import AlgorithmConfig
from ..batch.packing import Pack, Sample
from .results import RowFacts


class Objective:
    """Built for every batch on every rank alike. Rows are numbered over the batch, 0..N-1.

    statistic  the batch's number that the method's row asks for; the step sets it
    baselines  float64 [N]  b_i as far as it is known: from rewards at first, from norms once they are found
    """

    def __init__(
        self, algorithm: AlgorithmConfig, groups: Sequence[Sequence[Sample]], max_new_tokens: int, previous_ess: float
    ) -> None:
        self.algorithm = algorithm
        self.row = algorithm.row
        self.anchor = algorithm.behavior_anchor * (1.0 - previous_ess)
        self.statistic = math.nan
        rewards = [torch.tensor([row.trajectory.reward for row in group], dtype=torch.float64) for group in groups]
        self.scales = [group_scale(values, self.row.normalize_std) for values in rewards]
        before = [baselines.before_norms(self.row.baseline, values) for values in rewards]
        self.baselines = torch.cat([torch.zeros(0, dtype=torch.float64), *before])
        sampled = torch.tensor([row.trajectory.num_sampled for group in groups for row in group])
        rule = self.row.loss_normalization
        coefficients = normalization.token_coefficients(rule, sampled, max_new_tokens)
        self.facts = RowFacts.of(groups, self.scales, self.baselines.clone(), coefficients, linear=self.row.linear)
        self._bounds = Bounds(algorithm.is_threshold, self.row.ratio_low, self.row.ratio_high)

    # --- weights --------------------------------------------------------------------------------

    def _weights(self, log_ratio: torch.Tensor) -> torch.Tensor:
        bounds = self._bounds
        logs = importance.log_weights(self.row.weights, log_ratio, bounds.threshold, bounds.low, bounds.high)
        return logs.exp()

    def sequence_weights(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """w_i of log ratios [n]: the weight of trajectory i's gradient, 1 where weights are not by sequence."""
        return self._weights(log_ratio) if self.row.is_level == "sequence" else torch.ones_like(log_ratio)

    def token_weights(self, pack: Pack, policy: torch.Tensor) -> torch.Tensor:
        """v_t [T] of detached log-probs, 1 where weights are not by token."""
        if self.row.is_level != "token":
            return torch.ones_like(policy)
        ratios = importance.token_log_ratios(policy, pack.behavior_logprobs, pack.mask)
        return self._weights(ratios).to(policy.dtype)

    # --- gradients ------------------------------------------------------------------------------

    def advantages(self, rows: Sequence[int]) -> torch.Tensor:
        """(R_i - b_i) / std with the baselines known so far; 0 in groups without variance. float64 [n]"""
        facts, index = self.facts, list(rows)
        found = (facts.rewards[index] - self.baselines[index]) * facts.inverse_std[index]
        return torch.where(facts.has_variance[index], found, 0.0)

    def trajectory_coefficients(self, rows: Sequence[int], log_ratio: torch.Tensor) -> torch.Tensor:
        """w_i (R_i - b_i) / std + a of linear rows, float64 [n]."""
        speaks = self.facts.has_variance[list(rows)]
        return self.sequence_weights(log_ratio) * self.advantages(rows) + torch.where(speaks, self.anchor, 0.0)

    def token_coefficients(self, pack: Pack, policy: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
        """What multiplies c_i log pi_t once baselines are known: [T], dtype of the detached log-probs ``policy``.

        log_ratio  float64 [n]  l_i of the pack, on the CPU
        """
        rows = [row.index for row in pack.samples]
        if self.row.linear:
            whole = torch.nn.functional.pad(self.trajectory_coefficients(rows, log_ratio), (0, 1)).to(policy)
            return whole[pack.segments] * self.token_weights(pack, policy)
        tokens = self._tokens(pack, policy)
        found = SURROGATES[self.row.surrogate](tokens, self.advantages(rows).to(policy.device), self._bounds)
        speaks = tokens.per_token(self.facts.has_variance[rows].to(policy.device)) > 0
        silent = found if self.row.whole_batch else torch.zeros_like(found)
        return torch.where(speaks, found + self.anchor, silent).to(policy.dtype)

    def _tokens(self, pack: Pack, policy: torch.Tensor) -> TokenTerms:
        ratios = importance.token_log_ratios(policy, pack.behavior_logprobs, pack.mask)
        return TokenTerms(ratios, pack.mask, pack.segments, len(pack.samples), self.statistic)

    def reported(self, pack: Pack, policy: torch.Tensor) -> torch.Tensor:
        """The part of the token coefficients that the loss metric cannot form from a trajectory's numbers: [T]."""
        if self.row.linear:
            return self.token_weights(pack, policy)
        return self.token_coefficients(pack, policy, torch.zeros(len(pack.samples)))

    def set_statistic(self, token_log_ratios: torch.Tensor) -> None:
        """From the log ratios of all sampled tokens of the batch, float64 [M]."""
        found = STATISTICS[self.row.statistic](token_log_ratios, self.algorithm.second_moment)
        self.statistic = found if math.isfinite(found) else 1.0  # a non-finite ratio: the step will be skipped

    @property
    def needs_statistic(self) -> bool:
        """True until the statistic that the row asks for is set."""
        return bool(self.row.statistic) and math.isnan(self.statistic)

    # --- baselines from norms -------------------------------------------------------------------

    def find_baselines(self, rows: Sequence[int], log_ratio: torch.Tensor, norms: torch.Tensor) -> int:
        """Set b_i of one group from its |g_i| float64 [n]; returns how many fell back to a plain mean."""
        index = list(rows)
        if self.row.is_level != "sequence":
            log_u = torch.zeros_like(log_ratio)  # token weights are inside |s_i| already
        elif self.algorithm.opob_weights == "truncated":
            bounds = self._bounds
            log_u = importance.log_weights(self.row.weights, log_ratio, bounds.threshold, bounds.low, bounds.high)
        else:
            log_u = log_ratio
        found = baselines.from_norms(self.row.baseline, log_u, norms.log(), self.facts.rewards[index])
        self.baselines[index] = found.values
        return found.fallbacks
