"""One pack on the last stage: its log-probs, what is recorded of them, and the terms that a loss is made of."""

from __future__ import annotations

import math

import torch

from ...algorithm import importance
from ...config.schema import RunConfig
from ..batch.packing import Pack
from ..megatron.logprobs import squared_score_norms, token_logprobs
from ..megatron.parallel import Parallel
from .log_ratios import LogRatioExchange
from .mismatch import pack_mismatch
from .objective import Objective
from .regularizers import regularizer
from .results import RowTable


class PackTerms:
    """Of one batch; a pack's rows of ``table`` are filled as it passes.

    token_ratios        row -> log ratios of its sampled tokens, float64, while the batch's statistic is not known
    reference_logprobs  id of a pack -> log-probs of the reference policy [T]
    """

    def __init__(
        self,
        config: RunConfig,
        parallel: Parallel,
        messages: LogRatioExchange,
        objective: Objective,
        vocab_size: int,
        *,
        estimates_norms: bool,
    ) -> None:
        """``estimates_norms``: baselines come from norms that are estimated from logits."""
        rows = len(objective.facts.rewards)
        self.table = RowTable(rows)
        self.token_ratios: dict[int, torch.Tensor] = {}
        self.reference_logprobs: dict[int, torch.Tensor] = {}
        self._algorithm = config.algorithm
        self._logits = (config.rollout.temperature, vocab_size, parallel.tensor_group)
        self._messages = messages
        self._objective = objective
        self._estimates_norms = estimates_norms
        self._estimated = torch.full((rows,), math.nan, dtype=torch.float64)

    def score(self, pack: Pack, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi of the pack's labels and entropy, [T] each, at the sampling temperature; logits [1, T, V / TP]."""
        return token_logprobs(logits.squeeze(0), pack.labels, *self._logits)

    def log_probs(self, pack: Pack, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``score``, with the pack's rows of the table filled."""
        logprobs, entropy = self.score(pack, logits)
        objective, policy = self._objective, logprobs.detach()
        n, index = len(pack.samples), [row.index for row in pack.samples]
        ratios = importance.token_log_ratios(policy, pack.behavior_logprobs, pack.mask)
        self.table.record_forward(index, self._sums(pack, ratios), torch.zeros(n), self._sums(pack, entropy.detach()))
        self.table.record_mismatch(index, pack_mismatch(pack, ratios, self._messages))
        if self._estimates_norms:
            self._estimate_norms(pack, logits, policy)
        if objective.needs_statistic:
            for i, row in enumerate(index):
                self.token_ratios[row] = ratios[pack.mask & (pack.segments == i)].cpu()
        else:
            self.table.logprob_sum[index] = self._sums(pack, objective.reported(pack, policy) * policy)
        return logprobs, entropy

    def normalized(self, pack: Pack, per_token: torch.Tensor) -> torch.Tensor:
        """sum_i c_i sum_t per_token over sampled tokens."""
        index = [row.index for row in pack.samples]
        coefficients = torch.nn.functional.pad(self._objective.facts.token_coefficients[index], (0, 1))
        return torch.where(pack.mask, per_token * coefficients.to(per_token)[pack.segments], 0.0).sum()

    def regularizer(self, pack: Pack, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """KL and entropy terms [T], zeros where none is asked for."""
        algorithm = self._algorithm
        if not algorithm.regularized:
            return torch.zeros_like(logprobs)
        reference = self.reference_logprobs.get(id(pack))
        term, kl = regularizer(algorithm.kl_coef, algorithm.entropy_coef, logprobs, entropy, reference)
        self.table.record_kl([row.index for row in pack.samples], self._sums(pack, kl))
        return term

    def record_baselines(self, rows: list[int], norms: torch.Tensor) -> None:
        """b_i of one group from its |g_i|, exact or estimated: float64 [n] on the CPU."""
        fallbacks = self._objective.find_baselines(rows, self.table.log_ratio[rows], norms)
        self.table.record_baselines(rows, self._objective.baselines[rows], fallbacks > 0)

    def _sums(self, pack: Pack, per_token: torch.Tensor) -> torch.Tensor:
        """Sums over the sampled tokens of each trajectory, on whichever rank they are: float64 [n], on the CPU."""
        own = importance.segment_sum(per_token, pack.mask, pack.segments, len(pack.samples))
        return self._messages.sum_over_context(own).cpu()

    def _estimate_norms(self, pack: Pack, logits: torch.Tensor, policy: torch.Tensor) -> None:
        """|g_i| as c_i sqrt(sum_t v_t^2 |d log pi_t / d logits|^2); the baseline once a group is complete."""
        squared = squared_score_norms(logits.squeeze(0), pack.labels, *self._logits)
        weighted = self._objective.token_weights(pack, policy).square() * squared
        index, facts = [row.index for row in pack.samples], self._objective.facts
        self._estimated[index] = self._sums(pack, weighted).sqrt() * facts.token_coefficients[index]
        rows = facts.rows_of(pack.group)
        if self._objective.scales[pack.group].has_variance and not bool(self._estimated[rows].isnan().any()):
            self.record_baselines(rows, self._estimated[rows])
