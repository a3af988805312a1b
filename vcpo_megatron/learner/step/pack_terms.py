"""One pack on the last stage: its log-probs, what is recorded of them, and the terms that a loss is made of.

What is recorded are sums over each trajectory's tokens. They go to the host in one copy a pack, which nobody waits for
inside a pass: the loss is formed of what stays on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algorithm import importance
from ...config.schema import RunConfig
from ..batch.packing import Pack
from ..megatron import platform
from ..megatron.logprobs import squared_score_norms, token_logprobs
from ..megatron.parallel import Parallel
from .batch_state import BatchState, SampleNumbers
from .log_ratios import LogRatioExchange
from .objective import Objective
from .regularizers import regularizer


@dataclass(frozen=True)
class Scored:
    """Of one pack: log-probs of its labels and entropy, [T] each, and of its trajectories l_i, float64 [n], and the
    numbers that its loss is made of; all where the pack is."""

    logprobs: Tensor
    entropy: Tensor
    log_ratio: Tensor
    numbers: SampleNumbers


#: Called with (state, pack, logits [1, T, V / TP], what is scored) for every pack whose log-probs are recorded; returns
#: numbers with what it has found, and float64 [n] by the names of ``BatchState`` that are recorded as well.
Observer = Callable[[BatchState, Pack, Tensor, Scored], tuple[SampleNumbers, dict[str, Tensor]]]


@dataclass(frozen=True)
class _OnItsWay:
    """Rows of a table [rows, n] for the samples ``index``, by the names of ``BatchState``; behind them the log ratios
    of the whole micro-step ``step_index``, and of each token with its mask."""

    state: BatchState
    pack: Pack
    names: tuple[str, ...]
    step_index: tuple[int, ...]
    copy: platform.HostCopy


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
        self._rows: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None
        self._on_their_way: list[_OnItsWay] = []

    def score(self, pack: Pack, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log pi of the pack's labels and entropy, [T] each, at the sampling temperature; logits [1, T, V / TP]."""
        return token_logprobs(logits.squeeze(0), pack.labels, *self._logits)

    def record(self, state: BatchState, pack: Pack, logits: Tensor, numbers: SampleNumbers) -> Scored:
        """``score``; ``send`` takes to ``state`` what it says of the pack's samples."""
        logprobs, entropy = self.score(pack, logits)
        objective, policy = self._objective, logprobs.detach()
        ratios = importance.token_log_ratios(policy, pack.behavior_logprobs, pack.mask)
        log_ratio = self.sums(pack, objective.log_ratios(pack, policy) if objective.splits else ratios)
        self._rows = {"log_ratio": log_ratio, "entropy_sum": self.sums(pack, entropy.detach())}
        state.owners[pack.index] = 1
        if objective.splits:
            self._rows["mismatch_log_ratio"] = self.sums(pack, objective.mismatch(pack))
        if objective.splits or objective.method.is_level != "sequence":
            self._rows["weight_sum"] = self.sums(pack, objective.token_ratios(pack, policy))
        self._record_mismatch(pack, ratios)
        if objective.needs_statistic(state):
            self._tokens = torch.stack([ratios, pack.mask.double()])
        else:
            reported = objective.reported(state, pack, policy, numbers, log_ratio)
            self._rows["logprob_sum"] = self.sums(pack, reported * policy)
        scored = Scored(logprobs, entropy, log_ratio, numbers)
        if self.observer is not None:
            found, rows = self.observer(state, pack, logits, scored)
            self._rows |= rows
            scored = dataclasses.replace(scored, numbers=found)
        return scored

    def send(
        self, state: BatchState, pack: Pack, step_log_ratio: Tensor | None = None
    ) -> tuple[platform.HostCopy, slice] | None:
        """Start the one copy of what was recorded of the pack, if anything was; ``step_log_ratio`` float64: l of its
        whole micro-step. Returns the copy, and the part of it that holds them."""
        if not self._rows:
            return None
        parts = [*self._rows.values()]
        first = sum(map(len, parts))
        if step_log_ratio is not None:
            parts.append(step_log_ratio)
        if self._tokens is not None:
            parts.append(self._tokens.reshape(-1))
        names, step_index = tuple(self._rows), () if step_log_ratio is None else tuple(pack.step_index)
        copy = platform.start_read(torch.cat(parts))
        self._on_their_way.append(_OnItsWay(state, pack, names, step_index, copy))
        self._rows, self._tokens = {}, None
        return copy, slice(first, first + len(step_index))

    def collect(self) -> None:
        """Into its ``BatchState`` what was sent: of packs whose forward is over, so that the copies have arrived."""
        while self._on_their_way:
            sent = self._on_their_way.pop(0)
            state, numbers, index = sent.state, sent.copy.wait(), sent.pack.index
            for name in sent.names:
                recorded = getattr(state, name)
                recorded[index] = numbers[: len(index)].to(recorded.dtype)
                numbers = numbers[len(index) :]
            if sent.step_index:
                state.log_ratio[list(sent.step_index)] = numbers[: len(sent.step_index)]
                numbers = numbers[len(sent.step_index) :]
            if len(numbers):
                self._collect_tokens(state, sent.pack, *numbers.view(2, -1))

    def _collect_tokens(self, state: BatchState, pack: Pack, ratios: Tensor, mask: Tensor) -> None:
        edges = pack.boundaries
        for sample, start, end in zip(pack.index, edges, edges[1:], strict=False):
            own = ratios[start:end][mask[start:end] > 0]
            state.token_log_ratios[state.token_slice(sample)][: len(own)] = own

    def normalized(self, numbers: SampleNumbers, pack: Pack, per_token: Tensor) -> Tensor:
        """sum_i c_i sum_t per_token over sampled tokens."""
        coefficients = torch.nn.functional.pad(numbers.loss_coefficients, (0, 1))
        return torch.where(pack.mask, per_token * coefficients.to(per_token)[pack.segments], 0.0).sum()

    def regularizer(self, state: BatchState, pack: Pack, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """KL and entropy terms [T], zeros where none is asked for; ``send`` takes the KL to ``state``."""
        algorithm = self._algorithm
        if not algorithm.regularized:
            return torch.zeros_like(logprobs)
        reference = state.reference_logprobs.get(id(pack))
        term, kl = regularizer(algorithm.kl_coef, algorithm.entropy_coef, logprobs, entropy, reference)
        self._rows["kl_sum"] = self.sums(pack, kl)
        return term

    def sums(self, pack: Pack, per_token: Tensor) -> Tensor:
        """Sums over the sampled tokens of each trajectory, on whichever rank they are: float64 [n], on the device."""
        own = importance.segment_sum(per_token, pack.mask, pack.segments, len(pack.samples))
        return self._messages.sum_over_context(own)

    def estimated_norms(self, pack: Pack, logits: Tensor, scored: Scored) -> Tensor:
        """|g_i| as c_i sqrt(sum_t v_t^2 |d log pi_t / d logits|^2): float64 [n], on the device."""
        squared = squared_score_norms(logits.squeeze(0), pack.labels, *self._logits)
        weighted = self._objective.token_weights(pack, scored.logprobs.detach()).square() * squared
        return self.sums(pack, weighted).sqrt() * scored.numbers.loss_coefficients

    def _record_mismatch(self, pack: Pack, ratios: Tensor) -> None:
        """|log pi - log mu| on the tokens that the current version sampled: how far learner and servers are apart.

        Both computed log pi of the same token under the same weights and at the same temperature, so any difference is
        that of two implementations: kernels, precision, routing, or weights that are not the same after all.
        """
        size, n = ratios.abs(), len(pack.samples)
        summed = {
            "mismatch_sum": size,
            "mismatch_tokens": torch.ones_like(size),
            "noise_sum": ratios,
            "noise_squares": ratios.square(),
        }
        sums = [importance.segment_sum(x, pack.current, pack.segments, n) for x in summed.values()]
        self._rows |= dict(zip(summed, self._messages.sum_over_context(torch.stack(sums)), strict=True))
        largest = importance.segment_max(size, pack.current, pack.segments, n)
        self._rows["mismatch_max"] = self._messages.max_over_context(largest)
