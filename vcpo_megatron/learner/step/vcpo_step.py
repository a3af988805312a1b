"""One optimizer step of VCPO (arXiv 2602.17616), or of a comparator, on Megatron's schedule.

For trajectory i of prompt group g in a batch of N, with behaviour log-probs log mu recorded at sampling time:

    l_i   = sum_t log pi_theta - log mu                       over sampled tokens
    w_i   = min(exp(l_i), c)                                  the weight of i's gradient, detached
    g_i   = grad sum_t c_i log pi_theta                       c_i the loss normalisation, 1/N included
    b_g   = sum_i p_i R_i,  p = softmax(2 log u_i + 2 log |g_i|)       u_i = exp(l_i), or w_i
    G     = sum_g sum_i (R_i - b_g)/std_g  w_i g_i + a g_i    a the behaviour anchor's coefficient
    ratio = ESS / N,  log ESS = 2 logsumexp(l) - logsumexp(2 l)
    lr    = lr * min(1, ratio / base)^p                       the same on every rank, bounded further by ``StepBounds``

Weights may be of tokens or turns: then s_i = grad sum_t c_i v_t log pi_theta takes the place of w_i g_i.

With the learner's own log-probs log pi_v' recorded (``algorithm.mismatch``) l_i counts from them, and g_i holds the
truncated ratios c_t = min(pi_v' / mu, cap) of its tokens.

How b_g meets the gradient is the business of a ``BaselineMode``; ``Objective`` holds the formulas, ``BatchState`` the
numbers, ``Passes`` what the model computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads

from ...config.schema import RunConfig
from ...types import Batch, PolicyVersion, StepResult
from ..batch.packing import batch_samples
from ..megatron.parallel import Parallel, agree_equal
from ..megatron.training import Trainable
from .abort import AbortCheck
from .baseline_modes import baseline_mode, start_reductions
from .batch_state import BatchState, RankSums
from .passes import Passes
from .plan import StepPlan, scoring_packs
from .results import StepOutcome, ess_by_bucket, spreads, step_metrics, trajectory_results
from .step_size import EssState, StepBounds, batch_ess_ratio, step_bounds

#: Why a step is skipped.
NON_FINITE, VANISHING = "non-finite step", "vanishing weights"
#: Largest norm of a gradient: its square, and so Adam's second moment, has to fit fp32 (3.4e38).
LARGEST_NORM = 1e19
#: Mean importance weight below which a batch says nothing of the policy.
SMALLEST_MEAN_WEIGHT = 1e-6


class VcpoStep:
    """The learner's step. Built once, before a checkpoint is loaded; ``run`` is called by all ranks with one batch.

    ``abort_requested()`` is called on rank 0 during a step: whether it is to be aborted."""

    def __init__(
        self,
        config: RunConfig,
        parallel: Parallel,
        trainable: Trainable,
        *,
        abort_requested: Callable[[], bool] | None = None,
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.trainable = trainable
        self.ess_state = EssState()
        self._abort = AbortCheck(parallel, abort_requested)
        self._passes = Passes(config, parallel, trainable, self._abort)
        self._mode = baseline_mode(self._passes)

    @property
    def accumulators(self) -> int:
        """Gradient-sized accumulators that this rank holds for the baseline."""
        return self._mode.accumulators

    def run(self, batch: Batch, version: PolicyVersion) -> StepResult | None:
        """Take one step on ``batch``; ``version`` names the policy that it makes.

        Every rank returns the same result: None when the step was aborted. An aborted step, and one that is skipped (a
        number is not finite, or all weights vanish), leaves parameters, optimizer and schedule unchanged; the latter
        says so.
        """
        started = time.perf_counter()
        state, plan = self._plan(batch, version.number - 1)
        self.trainable.zero_gradients()
        self._abort.begin(str(version))
        buckets = self.trainable.overlapped_buckets()
        with self._abort.caught():
            self._score(state, plan)  # l_i of zero-variance groups; those of the others come with their gradient
            self._mode.find_baselines(state, plan)  # |g_i| -> b_g, where the gradient needs it from its start
            self._mode.add_gradient(state, plan, buckets)  # G
        if self._abort.aborted:
            start_reductions(buckets)  # as the ranks do that have not aborted
        seconds = time.perf_counter() - started
        finalize_model_grads(list(self.trainable.wrapped))
        self._agree(state, plan)
        if state.aborted:
            return None
        algorithm = self.config.algorithm
        ratio = self._ess_ratio(state, algorithm.ess_weights)
        ess_state = self.ess_state.observed(state)
        on_policy = ess_state.on_policy_ratio(state, algorithm)  # what mismatch alone makes of these lengths
        bounds = step_bounds(ess_state, self.config, batch, state.log_ratio)
        scale = ess_state.scale(ratio, on_policy, algorithm) * bounds.scale  # min(1, ratio / base)^p, bounded
        skipped, norm = self._judge(state, ratio)
        rate = math.nan if skipped else self._optimizer_step(scale, bounds)
        if not skipped:
            self.ess_state = ess_state.taken(ratio, state, algorithm, bounds, norm)
        outcome = StepOutcome(ratio, on_policy, scale, rate, norm, skipped, seconds, bounds)
        return self._result(batch, version, state, outcome)

    def record(self, batch: Batch) -> np.ndarray:
        """log pi that the current parameters give every token of ``batch``, at the sampling temperature, one trajectory
        after another: float32; 0 where the policy did not sample it. Called by all ranks alike, and the same on all."""
        groups = batch_samples(batch)
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        ends = np.cumsum([len(trajectory.tokens) for trajectory in trajectories]).tolist()
        packs = scoring_packs(groups, self.config, self.parallel, self._mode.max_pack_tokens)
        found = self._passes.logprobs(packs, [0, *ends[:-1]], ends[-1]).numpy()
        sampled = np.concatenate([trajectory.loss_mask for trajectory in trajectories])
        return np.where(sampled, found, 0.0).astype(np.float32)

    def _plan(self, batch: Batch, version: int) -> tuple[BatchState, StepPlan]:
        """What is known before the step, and this rank's packs; ``version`` is that of the policy before the step."""
        groups, config = batch_samples(batch), self.config
        missing = [group.group_id for group in batch.groups if not group.recorded]
        if missing and config.algorithm.mismatch == "recorded":
            raise ValueError(
                f"group {missing[0]} of step {batch.step} came without the learner's log-probs, which "
                'algorithm.mismatch = "recorded" needs'
            )
        state = BatchState.of(groups, config.algorithm, config.rollout.max_new_tokens, self.ess_state.previous_ratio)
        plan = StepPlan.of(groups, state.scales, config, self.parallel, self._mode.max_pack_tokens, version)
        return state, plan

    def _score(self, state: BatchState, plan: StepPlan) -> None:
        """What the gradient needs first, and l_i of zero-variance groups: they have no gradient, but count in ESS."""
        # numbers of the whole batch come first, before a replica may abort without the others
        has_statistic = bool(self._passes.objective.method.statistic)
        if has_statistic:
            self._passes.find_statistic(state, plan.packs)
        self._passes.count_expert_tokens(plan.packs)
        self._passes.score_by_reference(state, plan.packs)
        if not has_statistic:
            self._passes.score(state, plan.zero_variance)

    def _agree(self, state: BatchState, plan: StepPlan) -> None:
        """Every trajectory's numbers on every rank; and whether any rank has a non-finite gradient, or has aborted."""
        finite = self.trainable.gradients_are_finite()
        padded = sum(pack.padded for pack in plan.packs) if self.parallel.reports_trajectories else 0
        state.ranks = RankSums(self._abort.aborted, not finite, padded, *self._mode.accumulator_error)
        state.agree(self.parallel)

    def _ess_ratio(self, state: BatchState, weights: str) -> float:
        return batch_ess_ratio(state, weights, self.config.algorithm.is_threshold)

    def _judge(self, state: BatchState, ratio: float) -> tuple[str, float]:
        """Why the step is to be skipped, or ""; the gradient's norm, nan where the reason comes before it. The same on
        all ranks, whether the gradient is clipped or not."""
        if not (math.isfinite(ratio) and state.finite):
            return NON_FINITE, math.nan
        if self._passes.objective.mean_weight(state) < SMALLEST_MEAN_WEIGHT:
            return VANISHING, math.nan
        norm = self.trainable.gradient_norm(self.parallel)
        return "" if norm <= LARGEST_NORM else NON_FINITE, norm

    def _optimizer_step(self, scale: float, bounds: StepBounds) -> float:
        """Step at the rate that ESS and the bounds allow, which is returned."""
        scaled = self.trainable.scheduled_learning_rate() * scale
        rate = agree_equal(scaled, "learning rates", self.parallel)
        self.trainable.optimizer_step(rate, bounds.largest_norm)
        return rate

    def _result(self, batch: Batch, version: PolicyVersion, state: BatchState, outcome: StepOutcome) -> StepResult:
        objective, truncated = self._passes.objective, self._ess_ratio(state, "truncated")
        weights = objective.sequence_weights(state.log_ratio, state.threshold_growth)
        metrics = step_metrics(state, outcome, weights, ess_ratio_truncated=truncated, linear=objective.method.linear)
        ages = torch.tensor([version.number - 1 - t.oldest_version for g in batch.groups for t in g.trajectories])
        metrics |= {"weight/mean": objective.mean_weight(state), **ess_by_bucket(state, ages), **self._passes.metrics}
        if objective.splits:
            metrics |= spreads(state)
        trajectories = trajectory_results(state, weights, batch)
        return StepResult(batch.step, version, outcome.skipped, metrics, trajectories)
