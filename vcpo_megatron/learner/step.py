"""One optimizer step of VCPO (arXiv 2602.17616) on Megatron's schedule. Reads like the method.

    l_i   = sum_t log pi_theta - log mu                     the forward that is differentiated gives it
    w_i   = min(exp(l_i), c)
    b_g   = sum_i p_i R_i,  p = softmax(2 log u_i + 2 log |g_i|)
    G     = sum_g sum_i (R_i - b_g)/std_g  w_i g_i + a g_i   one backward pass, unweighted activations' gradients
    ratio = ESS / N of exp(l_i)
    lr    = lr * min(1, ratio / base)^p                     the same on every rank

A loss is minimised, so what flows backward is -g_i; everything is linear in it and norms do not care.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from ..algorithm import baselines, importance
from ..algorithm.ess import ess_ratio, step_scale
from ..config.models import AlgorithmConfig, RunConfig
from ..types import Batch, PolicyVersion, StepResult
from . import platform
from .log_ratios import LogRatioExchange
from .logprobs import token_logprobs
from .opob_sums import OpobSums
from .packing import Pack
from .parallel import Parallel, agree_sum
from .results import RowFacts, RowTable, step_metrics, trajectory_results
from .schedule import ForwardStep, Loss, as_loss, forward_tokens, run_schedule
from .score_gradients import PackScores, ScoreSwitch, attach
from .score_state import Coefficients
from .step_plan import StepPlan
from .training import Trainable

#: Steps, all on-policy, whose median ESS ratio is the base when ``base_ess_ratio`` is "auto".
AUTO_BASE_STEPS = 5

@dataclass
class EssState:
    """What the step size and the anchor remember between steps; part of a checkpoint.

    first_ratios  ESS ratios of the first steps taken, all on-policy, while ``base_ess_ratio`` is "auto"
    """

    previous_ratio: float = 1.0
    first_ratios: list[float] = field(default_factory=list)

    def base(self, configured: float | str) -> float | None:
        """base_ess_ratio: the configured number, or the median of the first steps; None until it is known."""
        if not isinstance(configured, str):
            return configured
        return statistics.median(self.first_ratios) if len(self.first_ratios) == AUTO_BASE_STEPS else None

    def record(self, ratio: float) -> None:
        """A step was taken with this ratio."""
        self.previous_ratio = ratio
        if len(self.first_ratios) < AUTO_BASE_STEPS:
            self.first_ratios.append(ratio)


class VcpoStep:
    """The learner's step. Built once; ``run`` is called by all ranks with the same batch."""

    def __init__(self, config: RunConfig, parallel: Parallel, trainable: Trainable) -> None:
        self.config = config
        self.parallel = parallel
        self.trainable = trainable
        self.ess_state = EssState()
        self._device = platform.device()
        self._exact_norms = config.algorithm.baseline == "opob"
        self._switch = ScoreSwitch()
        self._sums: OpobSums | None = None
        if self._exact_norms:
            parameters: dict[str, torch.nn.Parameter] = {}
            for number, chunk in enumerate(trainable.chunks):
                parameters |= attach(
                    chunk, self._switch, parallel, prefix=f"{number}.", tied=trainable.shape.tie_word_embeddings
                )
            self._sums = OpobSums(
                parameters, len(trainable.chunks), parallel, self._correction, config.algorithm.opob_accumulators
            )
        self._messages = LogRatioExchange(parallel, self._device)
        self._table = RowTable(0)
        self._plan = StepPlan(RowFacts.of([], [], [], torch.zeros(0, dtype=torch.float64)), (), (), (), ())

    @property
    def accumulators(self) -> int:
        """Gradient-sized accumulators that this rank holds for the baseline."""
        return 0 if self._sums is None else self._sums.accumulators

    # --- the method ---------------------------------------------------------------------------

    def run(self, batch: Batch, version: PolicyVersion) -> StepResult:
        """Take one step on ``batch``; ``version`` names the policy that it makes.

        Every rank returns the same result. A step with a non-finite number leaves parameters, optimizer
        and schedule unchanged and says so.
        """
        started = time.perf_counter()
        self._plan = plan = StepPlan.of(batch, self.config, self.parallel, self._device)
        self._table = RowTable(len(plan.facts.rewards))
        self.trainable.zero_gradients()
        self._forward_only(plan.silent)  # groups of one reward have no gradient, but ESS needs their l_i
        self._forward_and_backward(plan.speaking)  # l_i -> w_i -> r_i, q_i; |g_i|; b_g
        seconds = time.perf_counter() - started
        finalize_model_grads(list(self.trainable.wrapped))
        table = self._agree([*plan.silent, *plan.speaking])
        ratio = self._ess_ratio(table.log_ratio, self.config.algorithm.ess_weights)
        scale = self._step_scale(ratio)
        skipped = "" if math.isfinite(ratio) and table.finite else "non-finite step"
        learning_rate, total_norm = math.nan, math.nan
        if not skipped:
            learning_rate = self._agreed(self.trainable.scheduled_learning_rate() * scale)
            total_norm = self.trainable.optimizer_step(learning_rate)
            self.ess_state.record(ratio)
        facts, weights = plan.facts, gradient_weights(table.log_ratio, self.config.algorithm)
        metrics = step_metrics(
            table, facts, weights, ess_ratio=ratio, ess_ratio_truncated=self._ess_ratio(table.log_ratio, "truncated"),
            ess_scale=scale, learning_rate=learning_rate, total_norm=total_norm, skipped=bool(skipped),
            seconds=seconds,
        )  # fmt: skip
        return StepResult(batch.step, version, skipped, metrics, trajectory_results(table, facts, weights, batch))

    def _ess_ratio(self, log_ratio: torch.Tensor, weights: str) -> float:
        if weights == "truncated":
            log_ratio = importance.truncated_log_weights(log_ratio, self.config.algorithm.is_threshold)
        return ess_ratio(log_ratio)

    def _step_scale(self, ratio: float) -> float:
        algorithm = self.config.algorithm
        base = self.ess_state.base(algorithm.base_ess_ratio)
        return step_scale(ratio, base, algorithm.ess_rule) if algorithm.ess_scaling and base is not None else 1.0

    def _coefficients(self, group: int, index: Sequence[int], log_ratio: torch.Tensor) -> Coefficients:
        """r_i and q_i of rows ``index`` of a group from their l_i [n]; on every stage alike."""
        algorithm = self.config.algorithm
        rewards = self._plan.facts.rewards[list(index)]
        weight = gradient_weights(log_ratio, algorithm)
        anchor = algorithm.behavior_anchor * (1.0 - self.ess_state.previous_ratio)
        centred = (rewards - self._plan.centres[group]) * self._plan.scales[group].inverse_std
        return Coefficients(weight * centred + anchor, weight)

    def _correction(self, group: int, rows: Sequence[int], norms: torch.Tensor) -> float:
        """b_g of a group whose |g_i| are known; the factor of S_g in what is minimised."""
        algorithm = self.config.algorithm
        index = list(rows)
        log_ratio = self._table.log_ratio[index]
        if algorithm.is_level != "sequence":
            log_u = torch.zeros_like(log_ratio)  # token weights are inside |s_i| already
        elif algorithm.opob_weights == "truncated":
            log_u = importance.truncated_log_weights(log_ratio, algorithm.is_threshold)
        else:
            log_u = log_ratio
        baseline = baselines.opob(log_u, norms.cpu().log(), self._plan.facts.rewards[index])
        self._table.record_baseline(index, norms.cpu(), baseline.value, baseline.fell_back)
        scale = self._plan.scales[group]
        # the accumulated sums hold -s_i (a loss is minimised): adding -(b - m)/std of them takes (b - m)/std s_i off G
        return -(baseline.value - scale.mean) * scale.inverse_std

    # --- forward and backward -------------------------------------------------------------------

    def _forward_only(self, packs: Sequence[Pack]) -> None:
        self._schedule(packs, forward_only=True)

    def _forward_and_backward(self, packs: Sequence[Pack]) -> None:
        if self._sums is not None:
            self._sums.start_step(packs)
        with self.trainable.no_sync():
            self._schedule(packs, forward_only=False)
        buckets = self.trainable.overlapped_buckets()
        if self._sums is not None:
            self._sums.finish_step(buckets)
        else:
            for bucket in buckets:
                bucket.start_grad_sync()
        self._messages.finish_step()

    def _schedule(self, packs: Sequence[Pack], *, forward_only: bool) -> None:
        forward = self._forward_without_gradient if forward_only else self._forward_with_gradient
        length = packs[0].length if packs else 0
        run_schedule(self.trainable.wrapped, packs, forward, tokens=length, forward_only=forward_only)

    def _log_probs(self, pack: Pack, logits: torch.Tensor) -> torch.Tensor:
        """log pi of the pack's labels [T], at the sampling temperature; fills the pack's rows of the table."""
        logprobs, entropy = token_logprobs(
            logits.squeeze(0), pack.labels, self.config.rollout.temperature, self.trainable.shape.vocab_size,
            self.parallel.tensor_group,
        )  # fmt: skip
        n, policy = len(pack.rows), logprobs.detach()
        log_ratio = importance.log_ratios(policy, pack.behavior_logprobs, pack.mask, pack.segments, n)
        weighted = importance.segment_sum(self._token_weights(pack, policy) * policy, pack.mask, pack.segments, n)
        entropies = importance.segment_sum(entropy, pack.mask, pack.segments, n)
        sums = self._messages.sum_over_context(torch.stack([log_ratio, weighted, entropies]))
        self._table.record_forward([row.index for row in pack.rows], *sums.cpu())
        return logprobs

    def _token_weights(self, pack: Pack, logprobs: torch.Tensor) -> torch.Tensor:
        """Truncated token weights where ``is_level`` is token, else ones; [T], masked positions hold 1."""
        if self.config.algorithm.is_level != "token":
            return torch.ones_like(logprobs)
        ratios = importance.token_log_ratios(logprobs, pack.behavior_logprobs, pack.mask)
        return importance.truncated_weights(ratios, self.config.algorithm.is_threshold).to(logprobs.dtype)

    def _forward_without_gradient(self, pack: Pack, chunk: torch.nn.Module) -> ForwardStep:
        def loss(logits: torch.Tensor) -> Loss:
            self._log_probs(pack, logits)
            return as_loss(logits.new_zeros(()))

        return forward_tokens(chunk, pack.tokens, pack.positions, pack.layout), loss

    def _forward_with_gradient(self, pack: Pack, chunk: torch.nn.Module) -> ForwardStep:
        scores = PackScores(pack, self.parallel) if self._exact_norms else None
        self._switch.current = scores
        output = forward_tokens(chunk, pack.tokens, pack.positions, pack.layout)
        self._switch.current = None
        is_last_chunk = chunk is self.trainable.wrapped[-1]
        if is_last_chunk and self.parallel.is_last_stage:
            return output, lambda logits: self._loss(pack, scores, logits)
        if scores is not None:
            # the last chunk is the first whose backward needs l_i; the others find them in the table
            arriving = self._messages.receive(pack) if is_last_chunk and pack.step_rows else None
            self._watch_backward(output, scores, arriving)
        return output, None

    def _loss(self, pack: Pack, scores: PackScores | None, logits: torch.Tensor) -> Loss:
        """What is differentiated: -sum_i c_i sum_t v_t log pi_t, v_t the token weight or 1.

        With exact norms nothing else is in it: w, R and std enter at the weight gradients. Without, the
        whole coefficient is known here and multiplies the trajectory.
        """
        logprobs = self._log_probs(pack, logits)
        index = [row.index for row in pack.rows]
        log_ratio = self._table.log_ratio[index]
        per_trajectory = self._plan.facts.token_coefficients[index]
        if scores is None:
            per_trajectory = per_trajectory * self._coefficients(pack.group, index, log_ratio).gradient
        of_segment = torch.nn.functional.pad(per_trajectory, (0, 1))  # padding has none
        per_token = of_segment.to(logprobs)[pack.segments] * self._token_weights(pack, logprobs.detach())
        loss = -torch.where(pack.mask, logprobs * per_token, 0.0).sum()
        if scores is not None:
            log_ratio = self._messages.of_step(pack, log_ratio)
            self._table.log_ratio[pack.step_index] = log_ratio
            if pack.step_rows:
                self._messages.send(log_ratio)
            self._watch_backward(loss, scores, None)
        return as_loss(loss)

    def _watch_backward(
        self, output: torch.Tensor, scores: PackScores, arriving: tuple[dist.Work | None, torch.Tensor] | None
    ) -> None:
        """When the backward of this pack through a chunk starts, set its coefficients; see its end, too."""
        assert self._sums is not None
        sums, pack = self._sums, scores.pack

        def start(_: torch.Tensor) -> None:
            if arriving is not None:
                work, log_ratio = arriving
                assert work is not None
                work.wait()
                self._table.log_ratio[pack.step_index] = log_ratio.cpu()
            scores.coefficients = self._coefficients(
                pack.group, pack.step_index, self._table.log_ratio[pack.step_index]
            )
            sums.begin(scores)
            self._switch.current = scores  # for what is computed once more
            torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._switch.current = None
            sums.end(scores)
            for work, message in scores.sends:
                self._messages.keep(work, message)

        output.register_hook(start)

    # --- agreement ------------------------------------------------------------------------------

    def _agree(self, packs: Sequence[Pack]) -> RowTable:
        """Every trajectory's numbers on every rank, by one SUM of a table of which each row has one owner.

        The same reduction says whether any rank holds a non-finite gradient.
        """
        speaks = self.parallel.speaks_for_trajectories
        owned = self._table if speaks else RowTable(len(self._plan.facts.rewards))
        owned.record_rank(
            gradients_are_finite=self.trainable.gradients_are_finite(),
            padded_tokens=sum(pack.padded for pack in packs) if speaks else 0,
        )
        return RowTable.from_sum(agree_sum(owned.packed(), self.parallel))

    def _agreed(self, learning_rate: float) -> float:
        """Assert that all ranks are about to step by the same learning rate."""
        pair = torch.tensor([learning_rate, -learning_rate], dtype=torch.float64)
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=self.parallel.command_group)
        if pair[0] != learning_rate or pair[1] != -learning_rate:
            raise RuntimeError(f"learning rates differ between ranks: {-pair[1].item()} to {pair[0].item()}")
        return learning_rate


def gradient_weights(log_ratio: torch.Tensor, algorithm: AlgorithmConfig) -> torch.Tensor:
    """w_i, the weight of trajectory i's gradient; 1 where weights are by token or none are used."""
    if algorithm.is_level == "sequence":
        return importance.truncated_weights(log_ratio, algorithm.is_threshold)
    return torch.ones_like(log_ratio)
