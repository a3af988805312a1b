"""The published implementation's way to OPOB on one rank, as the baseline to beat; written from its description.

One trajectory a micro-batch, w_i inside the loss, the norm read from a full gradient buffer after every
backward, and two more buffers of the gradient's size, made anew in every step: the sum over the batch and S_g of
the group. Passes over full buffers a trajectory: zeroed, added to by the backward, squared, added to both sums.
"""

from __future__ import annotations

import torch

from vcpo_megatron.algorithm import baselines, importance, normalization
from vcpo_megatron.algorithm.advantages import group_scale
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.batch.packing import Pack, Sample, batch_samples, make_pack
from vcpo_megatron.learner.megatron import platform
from vcpo_megatron.learner.megatron.logprobs import token_logprobs
from vcpo_megatron.learner.megatron.parallel import Parallel
from vcpo_megatron.learner.megatron.schedule import ForwardStep, Loss, as_loss, forward_tokens, run_schedule
from vcpo_megatron.learner.megatron.training import Trainable
from vcpo_megatron.types import Batch, PolicyVersion, StepResult, has_variance


class ReferenceStep:
    """Takes the place of ``VcpoStep`` in a comparison; no pipeline, no tensor parallelism."""

    accumulators = 2

    def __init__(self, config: RunConfig, parallel: Parallel, trainable: Trainable) -> None:
        self._config = config
        self._parallel = parallel
        self._trainable = trainable
        self._gradients = [p.main_grad for chunk in trainable.chunks for p in chunk.parameters()]
        self._total: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def run(self, batch: Batch, version: PolicyVersion) -> StepResult:
        """One step with OPOB; ESS scaling, which costs nothing, is left out."""
        groups = batch_samples(batch)
        sampled = torch.tensor([sample.trajectory.num_sampled for group in groups for sample in group])
        coefficients = normalization.loss_coefficients("sequence_token_mean", sampled, 1)
        self._total = [torch.zeros_like(g) for g in self._gradients]
        self._sums = [torch.zeros_like(g) for g in self._gradients]
        for group in groups:
            self._group(group, coefficients)
        torch._foreach_copy_(self._gradients, self._total)
        self._total, self._sums = [], []
        self._trainable.optimizer_step(self._trainable.scheduled_learning_rate())
        return StepResult(batch.step, version, "", {}, ())

    def _group(self, group: list[Sample], coefficients: torch.Tensor) -> None:
        rewards = torch.tensor([sample.trajectory.reward for sample in group], dtype=torch.float64)
        scale = group_scale(rewards, True, has_variance(rewards.tolist()))
        torch._foreach_zero_(self._sums)
        log_ratios, norms = [], []
        for sample in group:
            self._trainable.zero_gradients()
            log_ratios.append(self._backward(sample, float(coefficients[sample.index])))
            norms.append(float(torch.stack(torch._foreach_norm(self._gradients)).square().sum().sqrt()))
            torch._foreach_add_(self._total, self._gradients, alpha=sample.trajectory.reward * scale.inverse_std)
            torch._foreach_add_(self._sums, self._gradients, alpha=scale.inverse_std)
        log_norm = torch.tensor(norms, dtype=torch.float64).log()
        baseline = baselines.opob(torch.tensor(log_ratios), log_norm, rewards)
        torch._foreach_add_(self._total, self._sums, alpha=-baseline.value)

    def _backward(self, sample: Sample, coefficient: float) -> float:
        """Gradient of one trajectory into the main buffer; returns its log ratio."""
        pack = make_pack([sample], self._parallel.share, platform.device())
        found = []

        def forward(pack: Pack, model: torch.nn.Module) -> ForwardStep:
            def loss(logits: torch.Tensor) -> Loss:
                temperature, size = self._config.rollout.temperature, self._trainable.shape.vocab_size
                group = self._parallel.tensor_group
                logprobs, _ = token_logprobs(logits.squeeze(0), pack.labels, temperature, size, group)
                ratio = importance.log_ratios(logprobs, pack.behavior_logprobs, pack.mask, pack.segments, 1)
                found.append(float(ratio))
                weight = float(importance.truncated_weights(ratio, self._config.algorithm.is_threshold))
                return as_loss(-(weight * coefficient) * torch.where(pack.mask, logprobs, 0.0).sum())

            return forward_tokens(model, pack.tokens, pack.positions, pack.attention), loss

        run_schedule(self._trainable.wrapped, [pack], forward, lengths=[pack.length], forward_only=False)
        return found[0]
