"""One pack on the last stage: its log-probs, what is recorded of them, and the terms that a loss is made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...algorithm import importance
from ...config.schema import RunConfig
from ..batch.packing import Pack
from ..megatron.logprobs import squared_score_norms, token_logprobs
from ..megatron.parallel import Parallel
from .batch_state import BatchState
from .log_ratios import LogRatioExchange
from .objective import Objective
from .regularizers import regularizer

#: Called with (state, pack, logits [1, T, V / TP], detached log-probs [T]) for every pack whose log-probs are recorded.
Observer = Callable[[BatchState, Pack, Tensor, Tensor], None]


class PackTerms:
    """Log-probs and loss terms of packs. ``observer`` sees every pack whose log-probs are recorded, too."""

    observer: Observer | None = None

    def __init__(
        self,
        config: RunConfig,
        parallel: Parallel,
        messages: LogRatioExchange,
        objective: Objective,
        vocab_size: int,
    ) -> None:
        self._algorithm = config.algorithm
        self._logits = (config.rollout.temperature, vocab_size, parallel.tensor_group)
        self._messages = messages
        self._objective = objective

    def score(self, pack: Pack, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log pi of the pack's labels and entropy, [T] each, at the sampling temperature; logits [1, T, V / TP]."""
        return token_logprobs(logits.squeeze(0), pack.labels, *self._logits)

    def record(self, state: BatchState, pack: Pack, logits: Tensor) -> tuple[Tensor, Tensor]:
        """``score``; what it says of the pack's samples goes into ``state``."""
        logprobs, entropy = self.score(pack, logits)
        objective, policy, index = self._objective, logprobs.detach(), pack.index
        ratios = importance.token_log_ratios(policy, pack.behavior_logprobs, pack.mask)
        state.owners[index] = 1
        state.log_ratio[index] = self.sums(pack, ratios)
        state.entropy_sum[index] = self.sums(pack, entropy.detach())
        if objective.method.is_level != "sequence":
            state.weight_sum[index] = self.sums(pack, objective.token_ratios(pack, policy))
        self._record_mismatch(state, pack, ratios)
        if self.observer is not None:
            self.observer(state, pack, logits, policy)
        if objective.needs_statistic(state):
            for i, sample in enumerate(index):
                own = ratios[pack.mask & (pack.segments == i)].cpu()
                state.token_log_ratios[state.token_slice(sample)][: len(own)] = own
        else:
            state.logprob_sum[index] = self.sums(pack, objective.reported(state, pack, policy) * policy)
        return logprobs, entropy

    def normalized(self, state: BatchState, pack: Pack, per_token: Tensor) -> Tensor:
        """sum_i c_i sum_t per_token over sampled tokens."""
        coefficients = torch.nn.functional.pad(state.loss_coefficients[pack.index], (0, 1))
        return torch.where(pack.mask, per_token * coefficients.to(per_token)[pack.segments], 0.0).sum()

    def regularizer(self, state: BatchState, pack: Pack, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """KL and entropy terms [T], zeros where none is asked for."""
        algorithm = self._algorithm
        if not algorithm.regularized:
            return torch.zeros_like(logprobs)
        reference = state.reference_logprobs.get(id(pack))
        term, kl = regularizer(algorithm.kl_coef, algorithm.entropy_coef, logprobs, entropy, reference)
        state.kl_sum[pack.index] = self.sums(pack, kl)
        return term

    def sums(self, pack: Pack, per_token: Tensor) -> Tensor:
        """Sums over the sampled tokens of each trajectory, on whichever rank they are: float64 [n], on the CPU."""
        own = importance.segment_sum(per_token, pack.mask, pack.segments, len(pack.samples))
        return self._messages.sum_over_context(own).cpu()

    def estimated_norms(self, state: BatchState, pack: Pack, logits: Tensor, policy: Tensor) -> Tensor:
        """|g_i| as c_i sqrt(sum_t v_t^2 |d log pi_t / d logits|^2): float64 [n], on the CPU."""
        squared = squared_score_norms(logits.squeeze(0), pack.labels, *self._logits)
        weighted = self._objective.token_weights(pack, policy).square() * squared
        return self.sums(pack, weighted).sqrt() * state.loss_coefficients[pack.index]

    def _record_mismatch(self, state: BatchState, pack: Pack, ratios: Tensor) -> None:
        """|log pi - log mu| on the tokens that the current version sampled: how far learner and servers are apart.

        Both computed log pi of the same token under the same weights and at the same temperature, so any difference is
        that of two implementations: kernels, precision, routing, or weights that are not the same after all.
        """
        size, n = ratios.abs(), len(pack.samples)
        sums = [importance.segment_sum(x, pack.current, pack.segments, n) for x in (size, torch.ones_like(size))]
        total, count = self._messages.sum_over_context(torch.stack(sums)).cpu()
        largest = self._messages.max_over_context(importance.segment_max(size, pack.current, pack.segments, n)).cpu()
        state.mismatch_sum[pack.index] = total
        state.mismatch_max[pack.index] = largest
        state.mismatch_tokens[pack.index] = count
