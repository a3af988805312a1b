"""What the trajectories and tokens of one batch are multiplied by: numbers only, no model, no ranks.

    linear methods   v_t w_i (R_i - b_i)/std + a          v_t weight of the token or its turn, or 1; w_i of the
                                                          sequence, or 1
    with a record    c_t v_t w_i (R_i - b_i)/std + a      w_i and v_t of the lag alone, c_t the mismatch's cut ratio
    other methods    surrogate(ratios, (R_i - b_i)/std)_t + a

Samples of zero-variance groups get 0, but for a surrogate of the whole batch, which sees them with advantage 0. a is
the behaviour anchor's coefficient, which no weight multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...algorithm import baselines, importance
from ...algorithm.surrogates import STATISTICS, SURROGATES, Bounds, TokenTerms
from ...config.schema import AlgorithmConfig
from ..batch.packing import Pack
from ..gradients.pack_scores import Coefficients
from .batch_state import BatchState, SampleNumbers


class Objective:
    """The method's formulas. ``index`` are always samples' numbers in the batch; ``numbers`` and ``log_ratio`` are of
    some samples, on the host or the device; results for them are float64 [n], in the same place.

    ``sum_over_context`` makes sums over a pack's tokens of this rank those of all ranks that share them."""

    def __init__(self, algorithm: AlgorithmConfig, sum_over_context: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.method = algorithm.preset
        self._algorithm = algorithm
        self._sum_over_context = sum_over_context
        self._bounds = Bounds(algorithm.is_threshold, self.method.ratio_low, self.method.ratio_high)
        #: Whether l_i is the lag alone, counted from the log-probs that the learner recorded.
        self.splits = algorithm.mismatch == "recorded"
        #: Whether the gradient of a trajectory holds numbers of its tokens or turns, which no coefficient of it may
        #: multiply.
        self.has_token_weights = self.method.weighs_parts or self.splits

    # --- log ratios -----------------------------------------------------------------------------

    def log_ratios(self, pack: Pack, policy: Tensor) -> Tensor:
        """What l_i is the sum of: log pi_theta less log mu, or less what the learner recorded; float64 [T]."""
        return importance.token_log_ratios(policy, self._recorded(pack), pack.mask)

    def mismatch(self, pack: Pack) -> Tensor:
        """What the learner recorded less log mu, 0 where nothing is recorded; float64 [T]."""
        return importance.token_log_ratios(self._recorded(pack), pack.behavior_logprobs, pack.mask)

    def _recorded(self, pack: Pack) -> Tensor:
        if not self.splits:
            return pack.behavior_logprobs
        assert pack.recorded_logprobs is not None, "the step was planned without the learner's log-probs"
        return pack.recorded_logprobs

    # --- weights --------------------------------------------------------------------------------

    def _log_weights(self, log_ratio: Tensor, growth: Tensor | float = 1.0) -> Tensor:
        weights, bounds = self.method.weights, self._bounds
        return importance.log_weights(weights, log_ratio, bounds.threshold, bounds.low, bounds.high, growth)

    def sequence_weights(self, log_ratio: Tensor, growth: Tensor) -> Tensor:
        """w_i of log ratios [n]: the weight of trajectory i's gradient, 1 where weights are not by sequence. ``growth``
        [n] is that of the threshold."""
        if self.method.is_level != "sequence":
            return torch.ones_like(log_ratio)
        return self._log_weights(log_ratio, growth).exp()

    def token_weights(self, pack: Pack, policy: Tensor) -> Tensor:
        """v_t [T] of detached log-probs, that of the token or of its turn; 1 where weights are by sequence, or none.
        With a record times c_t."""
        weights = torch.ones_like(policy)
        if self.method.weighs_parts:
            weights = importance.bounded_exp(self._log_part_weights(pack, policy)).to(policy.dtype)
        if not self.splits:
            return weights
        cap = self._algorithm.mismatch_threshold
        recorded, behavior = self._recorded(pack), pack.behavior_logprobs
        return weights * importance.mismatch_weights(recorded, behavior, pack.mask, cap).to(policy.dtype)

    def _log_part_weights(self, pack: Pack, policy: Tensor) -> Tensor:
        """log of the weight of each token, or of its turn: float64 [T]."""
        ratios = self.log_ratios(pack, policy)
        if self.method.is_level == "token":
            return self._log_weights(ratios)
        turns = importance.segment_sum(ratios, pack.mask, pack.turns, len(pack.turn_tokens))
        growth = importance.threshold_growth(pack.turn_tokens, self._algorithm.is_threshold_length)
        logs = self._log_weights(self._sum_over_context(turns), growth)
        return torch.nn.functional.pad(logs, (0, 1))[pack.turns]

    def mean_weight(self, state: BatchState) -> float:
        """Mean of the batch's truncated weights: of trajectories, or of tokens where weights or ratios are theirs or
        their turns'.

        Its expectation is 1, less what truncation takes; 1 for a method that corrects nothing. With a record it is the
        mean of w_i c_t: an answer that the learner itself finds impossible says nothing, whatever its lag.
        """
        if self.method.is_level == "sequence":
            weights = self.sequence_weights(state.log_ratio, state.threshold_growth)
            if self.splits:
                weights = weights * state.weight_sum / state.sampled_tokens.clamp(min=1.0)
            return float(weights.mean())
        return float(state.weight_sum.sum() / state.sampled_tokens.sum()) if self.method.corrected else 1.0

    def token_ratios(self, pack: Pack, policy: Tensor) -> Tensor:
        """What ``mean_weight`` is the mean of: v_t, or the truncated ratio of a surrogate, [T]."""
        if self.method.linear:
            return self.token_weights(pack, policy)
        ratios = importance.token_log_ratios(policy, pack.behavior_logprobs, pack.mask)
        return importance.truncated_weights(ratios, self._bounds.threshold)

    # --- gradients ------------------------------------------------------------------------------

    def advantages(self, numbers: SampleNumbers) -> Tensor:
        """(R_i - b_i) / std with the baselines known so far; 0 in zero-variance groups."""
        return torch.where(numbers.has_variance, (numbers.rewards - numbers.baseline) * numbers.inverse_std, 0.0)

    def trajectory_coefficients(self, numbers: SampleNumbers, log_ratio: Tensor) -> Tensor:
        """What multiplies s_i / w_i of a linear method: w_i (R_i - b_i) / std, and a where no token has a weight.

        A trajectory's gradient holds the weights of its tokens or turns, and the anchor is then a term of its own:
        ``token_anchor``.
        """
        weights, advantages = self.sequence_weights(log_ratio, numbers.threshold_growth), self.advantages(numbers)
        weighted = torch.where(advantages == 0.0, 0.0, weights * advantages)  # a weight without bound may be infinite
        return weighted if self.has_token_weights else weighted + self._anchors(numbers)

    def coefficients(
        self, state: BatchState, index: Sequence[int], numbers: SampleNumbers, log_ratio: Tensor
    ) -> Coefficients:
        """Of a micro-step's trajectories ``index``, and those of one reward together where no anchor pulls on them."""
        gradient = self.trajectory_coefficients(numbers, log_ratio)
        sums = self.sequence_weights(log_ratio, numbers.threshold_growth)
        if not self.has_token_weights and state.anchor != 0.0:
            return Coefficients(gradient, sums)
        classes: dict[float, list[int]] = {}
        for i, reward in enumerate(state.rewards[list(index)].tolist()):
            classes.setdefault(reward, []).append(i)
        ratios = self.advantages(numbers)
        first = [members[0] for members in classes.values()]
        ratios = torch.stack([ratios[i] for i in first]) if first else ratios
        return Coefficients(gradient, sums, tuple(map(tuple, classes.values())), ratios)

    def has_token_anchor(self, state: BatchState) -> bool:
        """Whether a linear method's anchor cannot be one coefficient a trajectory; the same on all ranks."""
        return self.method.linear and self.has_token_weights and state.anchor != 0.0

    def token_anchor(self, numbers: SampleNumbers, pack: Pack, policy: Tensor) -> Tensor:
        """What the anchor adds to the coefficients of tokens that have weights: [T], dtype of ``policy``."""
        return torch.nn.functional.pad(self._anchors(numbers), (0, 1)).to(policy)[pack.segments]

    def _anchors(self, numbers: SampleNumbers) -> Tensor:
        """a, and 0 in zero-variance groups."""
        return numbers.has_variance.double() * numbers.anchor

    def token_coefficients(
        self, state: BatchState, pack: Pack, policy: Tensor, numbers: SampleNumbers, log_ratio: Tensor
    ) -> Tensor:
        """What multiplies c_i log pi_t once baselines are known: [T], dtype of the detached log-probs ``policy``."""
        if self.method.linear:
            whole = torch.nn.functional.pad(self.trajectory_coefficients(numbers, log_ratio), (0, 1)).to(policy)
            weighted = whole[pack.segments] * self.token_weights(pack, policy)
            return weighted + self.token_anchor(numbers, pack, policy) if self.has_token_anchor(state) else weighted
        ratios = importance.token_log_ratios(policy, pack.behavior_logprobs, pack.mask)
        tokens = TokenTerms(ratios, pack.mask, pack.segments, len(pack.samples), state.statistic)
        found = SURROGATES[self.method.surrogate](tokens, self.advantages(numbers), self._bounds)
        trained = tokens.per_token(numbers.has_variance) > 0
        zero_variance = found if self.method.whole_batch else torch.zeros_like(found)
        return torch.where(trained, found + state.anchor, zero_variance).to(policy.dtype)

    def reported(
        self, state: BatchState, pack: Pack, policy: Tensor, numbers: SampleNumbers, log_ratio: Tensor
    ) -> Tensor:
        """The part of the token coefficients that the loss metric cannot form from a trajectory's numbers: [T]."""
        if self.method.linear:
            return self.token_weights(pack, policy)
        return self.token_coefficients(state, pack, policy, numbers, log_ratio)

    # --- a number of the whole batch --------------------------------------------------------------

    def needs_statistic(self, state: BatchState) -> bool:
        """True until the statistic that the method asks for is set."""
        return bool(self.method.statistic) and math.isnan(state.statistic)

    def statistic(self, state: BatchState, token_log_ratios: Tensor) -> float:
        """From the log ratios of all sampled tokens of the batch, float64 [M], and the advantages that rewards give."""
        advantages = self.advantages(state.of_samples(range(len(state.rewards))))
        of_tokens = advantages.repeat_interleave(state.sampled_tokens.long())
        found = STATISTICS[self.method.statistic](token_log_ratios, of_tokens, self._algorithm.second_moment)
        return found if math.isfinite(found) else 1.0  # a non-finite ratio: the step will be skipped

    # --- baselines from norms -------------------------------------------------------------------

    def baselines(
        self, log_ratio: Tensor, growth: Tensor, norms: Tensor, rewards: Tensor
    ) -> baselines.TrajectoryBaselines:
        """b_i of one group from its l_i, the growth of its thresholds and its |g_i|, exact or estimated: float64 [n]
        each, where they are."""
        if self.method.is_level != "sequence":
            log_u = torch.zeros_like(log_ratio)  # weights of tokens and turns are inside |s_i| already
        elif self._algorithm.opob_weights == "truncated":
            log_u = self._log_weights(log_ratio, growth)
        else:
            log_u = log_ratio
        return baselines.from_norms(self.method.baseline, log_u, norms.log(), rewards)

    def set_baselines(self, state: BatchState, index: Sequence[int], norms: Tensor) -> None:
        """b_i of one group from its |g_i|, exact or estimated: float64 [n] on the CPU."""
        chosen = list(index)
        found = self.baselines(state.log_ratio[chosen], state.threshold_growth[chosen], norms, state.rewards[chosen])
        state.baseline[chosen] = found.values
        state.fell_back[chosen] = found.fallbacks > 0
