"""One optimizer step of VCPO (arXiv 2602.17616), or of a comparator, on Megatron's schedule. Reads like the method.

    l_i   = sum_t log pi_theta - log mu                     the forward that is differentiated gives it
    w_i   = min(exp(l_i), c)
    b_g   = sum_i p_i R_i,  p = softmax(2 log u_i + 2 log |g_i|)
    G     = sum_g sum_i (R_i - b_g)/std_g  w_i g_i + a g_i
    ratio = ESS / N of exp(l_i)
    lr    = lr * min(1, ratio / base)^p                     the same on every rank

A loss is minimised, so what flows backward is -g_i; everything is linear in it and norms do not care.
How b_g meets the gradient is the mode's business:

    plain       no norms: coefficients are known in the forward and multiply the loss
    accumulate, deferred    one backward of unweighted g_i; coefficients enter at the weight gradients
    two_pass    one backward for norms, then plain with the baselines found
    proxy       plain, with norms estimated from logits in the forward: not exact
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from ...config.schema import RunConfig
from ...types import Batch, PolicyVersion, StepResult
from ..batch.packing import Pack, batch_samples
from ..gradients.attach import attach
from ..gradients.group_sums import Bucket, DeferredGradients, GroupNorms, OpobSums
from ..gradients.pack_scores import Coefficients, PackScores, ScoreSwitch
from ..megatron import platform
from ..megatron.parallel import Parallel, agree_equal, agree_sum
from ..megatron.schedule import ForwardStep, Loss, as_loss, forward_tokens, run_schedule
from ..megatron.training import Trainable
from ..moe.load_balance import LoadBalance
from ..moe.routing_replay import RoutingReplay
from .abort import Forward, Leaving, ReplicaLeft
from .log_ratios import LogRatioExchange
from .mismatch import mismatch_metrics
from .objective import Objective
from .pack_terms import PackTerms
from .plan import StepPlan, packing_for
from .regularizers import ReferenceWeights
from .results import RowTable, step_metrics, trajectory_results
from .step_size import EssState, batch_ess_ratio

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class VcpoStep:
    """The learner's step. Built once, before a checkpoint is loaded; ``run`` is called by all ranks with one batch.

    ``leave_asked()`` is called on rank 0 in the middle of a step: whether it is to be left."""

    def __init__(
        self,
        config: RunConfig,
        parallel: Parallel,
        trainable: Trainable,
        *,
        leave_asked: Callable[[], bool] | None = None,
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.trainable = trainable
        self.ess_state = EssState()
        self._device = platform.device()
        algorithm = config.algorithm
        self._mode = algorithm.opob_mode if algorithm.row.needs_norms else "plain"
        self._switch = ScoreSwitch()
        self._packing = config
        self._groups = self._attach() if self._mode in ("accumulate", "deferred", "two_pass") else None
        self._reference = ReferenceWeights(trainable.chunks) if algorithm.kl_reference == "initial" else None
        if self._reference is not None and parallel.rank == 0:
            print(f"kl_reference: {self._reference.bytes:,} bytes of host memory on rank 0", flush=True)
        replayed = config.rollout.routing_replay
        self._replay = RoutingReplay(trainable.chunks, parallel, self._device) if replayed else None
        weight, layers = algorithm.global_aux_loss, trainable.shape.num_layers
        self._balance = LoadBalance(trainable.chunks, weight, layers, parallel) if weight > 0 else None
        self._objective: Objective  # of the batch at hand
        self._terms: PackTerms  # the same
        self._messages = LogRatioExchange(parallel, self._device)
        self._leaving = Leaving(parallel, leave_asked)

    def _attach(self) -> GroupNorms:
        algorithm, parallel, chunks = self.config.algorithm, self.parallel, self.trainable.chunks
        tied = self.trainable.shape.tie_word_embeddings
        parameters: dict[str, torch.nn.Parameter] = {}
        alone: list[str] = []
        for number, chunk in enumerate(chunks):
            attached = attach(chunk, self._switch, parallel, prefix=f"{number}.", tied=tied)
            parameters |= attached.parameters
            alone += attached.alone
        self._packing = packing_for(alone, self.config, parallel)
        common = (parameters, len(chunks), parallel)
        if self._mode == "accumulate":
            dtype = _DTYPES[algorithm.opob_accumulator_dtype]
            return OpobSums(*common, self._correction, algorithm.opob_accumulators, dtype)
        if self._mode == "deferred":
            return DeferredGradients(*common, self._final, algorithm.opob_accumulators)
        return GroupNorms(*common, self._found)

    @property
    def accumulators(self) -> int:
        """Gradient-sized accumulators that this rank holds for the baseline."""
        return 0 if self._groups is None else self._groups.accumulators

    @property
    def _table(self) -> RowTable:
        return self._terms.table

    # --- the method ---------------------------------------------------------------------------

    def run(self, batch: Batch, version: PolicyVersion) -> StepResult | None:
        """Take one step on ``batch``; ``version`` names the policy that it makes.

        Every rank returns the same result: None when the step was left before its end. A step that was left, or has a
        non-finite number, leaves parameters, optimizer and schedule unchanged; the latter says so.
        """
        started = time.perf_counter()
        plan = self._plan(batch, version.number - 1)
        self.trainable.zero_gradients()
        self._leaving.begin(str(version))
        buckets = self.trainable.overlapped_buckets()
        # l_i -> w_i; |g_i| -> b_g; G
        left = self._leaving.leaves(lambda: self._gradient(plan.silent, plan.speaking, buckets))
        if left:
            self._start_reductions(buckets)  # as the ranks do that have not left
        seconds = time.perf_counter() - started
        finalize_model_grads(list(self.trainable.wrapped))
        table, algorithm = self._agree([*plan.silent, *plan.speaking], left), self.config.algorithm
        if table.left:
            return None
        ratio = batch_ess_ratio(table.log_ratio, algorithm.ess_weights, algorithm.is_threshold)
        scale = self.ess_state.scale(ratio, algorithm)
        skipped = "" if math.isfinite(ratio) and table.finite else "non-finite step"
        learning_rate, total_norm = math.nan, math.nan
        if not skipped:
            scaled = self.trainable.scheduled_learning_rate() * scale
            learning_rate = agree_equal(scaled, "learning rates", self.parallel)
            total_norm = self.trainable.optimizer_step(learning_rate)
            self.ess_state.record(ratio)
        facts, weights = self._objective.facts, self._objective.sequence_weights(table.log_ratio)
        metrics = (
            step_metrics(
                table,
                facts,
                weights,
                ess_ratio=ratio,
                ess_ratio_truncated=batch_ess_ratio(table.log_ratio, "truncated", algorithm.is_threshold),
                ess_scale=scale,
                learning_rate=learning_rate,
                total_norm=total_norm,
                skipped=bool(skipped),
                seconds=seconds,
            )
            | mismatch_metrics(table)
            | ({} if self._balance is None else self._balance.metrics)
        )
        return StepResult(batch.step, version, skipped, metrics, trajectory_results(table, facts, weights, batch))

    def _gradient(self, silent: Sequence[Pack], packs: Sequence[Pack], buckets: Sequence[Bucket]) -> None:
        """The gradient of the whole batch; groups of one reward (``silent``) have none, but ESS needs their l_i."""
        everything, algorithm = [*silent, *packs], self.config.algorithm
        if self._objective.row.statistic:
            self._find_statistic(everything)
        self._count_experts_tokens(everything)  # as above, before a replica may leave without the others
        self._score_by_reference(everything)
        if not self._objective.row.statistic:
            self._schedule(silent, self._forward_scoring, forward_only=True)
        if self._mode == "proxy":
            self._schedule(self._cut_groups(packs), self._forward_scoring, forward_only=True)
        if self._mode in ("accumulate", "deferred"):
            if algorithm.regularized:
                self._schedule_balanced(everything, self._forward_regularizer)
            return self._exact_backward(packs, buckets)
        if self._mode == "two_pass":
            self._exact_backward(packs, [])
        whole = algorithm.regularized or algorithm.row.whole_batch
        self._schedule_balanced(everything if whole else packs, self._forward_plain)
        self._start_reductions(buckets)

    def _start_reductions(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.start_grad_sync()

    def _correction(self, group: int, rows: Sequence[int], norms: torch.Tensor) -> torch.Tensor:
        """accumulate: the factor of S_g in what is minimised.

        The sums hold -s_i (a loss is minimised): adding -(b - m)/std of them takes (b - m)/std s_i off G.
        """
        self._found(group, rows, norms)
        scale = self._objective.scales[group]
        return -(self._objective.baselines[rows[0]] - scale.mean) * scale.inverse_std

    def _final(self, group: int, rows: Sequence[int], norms: torch.Tensor) -> torch.Tensor:
        """deferred: the final coefficients of the rows."""
        self._found(group, rows, norms)
        return self._objective.trajectory_coefficients(rows, self._table.log_ratio[list(rows)])

    def _found(self, group: int, rows: Sequence[int], norms: torch.Tensor) -> torch.Tensor:
        """The baselines of a group whose exact |g_i| are known."""
        self._table.record_norms(rows, norms.cpu())
        self._terms.record_baselines(list(rows), norms.cpu())
        return norms

    # --- plan ---------------------------------------------------------------------------------

    def _plan(self, batch: Batch, version: int) -> StepPlan:
        groups, config = batch_samples(batch), self._packing
        self._objective = Objective(
            config.algorithm, groups, config.rollout.max_new_tokens, self.ess_state.previous_ratio
        )
        self._terms = PackTerms(
            config,
            self.parallel,
            self._messages,
            self._objective,
            self.trainable.shape.vocab_size,
            estimates_norms=self._mode == "proxy",
        )
        return StepPlan.of(groups, self._objective.scales, config, self.parallel, self._device, version)

    def _group_size(self, pack: Pack) -> int:
        return self._objective.facts.group_sizes[pack.group]

    def _cut_groups(self, packs: Sequence[Pack]) -> list[Pack]:
        """Packs that do not hold a whole group: its norms are not known inside one forward."""
        return [pack for pack in packs if len(pack.samples) < self._group_size(pack)]

    # --- passes over packs ----------------------------------------------------------------------

    def _schedule(self, packs: Sequence[Pack], forward: Forward, *, forward_only: bool = False) -> None:
        length = packs[0].length if packs else 0
        self._leaving.look()
        forward = self._leaving.between_micro_batches(forward)
        with self.trainable.no_sync():
            run_schedule(self.trainable.wrapped, packs, forward, tokens=length, forward_only=forward_only)

    def _exact_backward(self, packs: Sequence[Pack], buckets: Sequence[Bucket]) -> None:
        assert self._groups is not None
        self._groups.start_step(packs)
        self._schedule(packs, self._forward_exact)
        self._groups.finish_step(buckets)
        self._messages.finish_step()

    def _score_by_reference(self, packs: Sequence[Pack]) -> None:
        """log-probs of the reference policy, by one forward with its weights in place of the model's."""
        if self._reference is not None:
            with self._reference.swapped():
                self._schedule(packs, self._forward_reference, forward_only=True)

    def _schedule_balanced(self, packs: Sequence[Pack], forward: Forward) -> None:
        """With the gradient of the experts' load-balancing loss, if there is one."""
        with contextlib.nullcontext() if self._balance is None else self._balance.passes("pull"):
            self._schedule(packs, forward)

    def _count_experts_tokens(self, packs: Sequence[Pack]) -> None:
        """A forward of the whole batch that counts, where the load-balancing loss asks for it."""
        balance, experts = self._balance, self.trainable.shape.experts
        if balance is None or experts is None:
            return
        with balance.passes("count"):
            left = self._leaving.leaves(lambda: self._schedule(packs, self._forward_counting, forward_only=True))
        if balance.agree(experts.count, left):
            raise ReplicaLeft

    def _find_statistic(self, packs: Sequence[Pack]) -> None:
        """A forward of the whole batch for the one number that the method's row asks for, the same on all ranks."""
        left = self._leaving.leaves(lambda: self._schedule(packs, self._forward_scoring, forward_only=True))
        ratios = torch.zeros(int(self._objective.facts.sampled_tokens.sum()) + 1, dtype=torch.float64)
        ratios[-1] = float(left)  # all ranks take part in the sum below, and learn it there
        if self.parallel.reports_trajectories:
            starts = self._objective.facts.sampled_tokens.cumsum(0) - self._objective.facts.sampled_tokens
            for row, values in self._terms.token_ratios.items():
                ratios[int(starts[row]) : int(starts[row]) + len(values)] = values
        agree_sum(ratios, self.parallel)
        if ratios[-1] > 0:
            raise ReplicaLeft
        self._objective.set_statistic(ratios[:-1])

    def _output(self, pack: Pack, model: torch.nn.Module) -> torch.Tensor:
        forward = partial(forward_tokens, model, pack.tokens, pack.positions, pack.layout)
        for watch in (self._replay, self._balance):
            if watch is not None:
                forward = partial(watch.during, pack, forward)
        return forward()

    def _forward_counting(self, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        return self._output(pack, model), lambda logits: as_loss(logits.new_zeros(()))

    def _forward_scoring(self, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        def loss(logits: torch.Tensor) -> Loss:
            self._terms.log_probs(pack, logits)
            return as_loss(logits.new_zeros(()))

        return self._output(pack, model), loss

    def _forward_reference(self, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        def loss(logits: torch.Tensor) -> Loss:
            self._terms.reference_logprobs[id(pack)] = self._terms.score(pack, logits)[0].detach()
            return as_loss(logits.new_zeros(()))

        return self._output(pack, model), loss

    def _forward_plain(self, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        """Differentiated: -sum_i c_i sum_t v_t log pi_t with all of the coefficient in v, and the regularizers."""

        def loss(logits: torch.Tensor) -> Loss:
            logprobs, entropy = self._terms.log_probs(pack, logits)
            log_ratio = self._table.log_ratio[[row.index for row in pack.samples]]
            v = self._objective.token_coefficients(pack, logprobs.detach(), log_ratio)
            terms = -v * logprobs + self._terms.regularizer(pack, logprobs, entropy)
            return as_loss(self._terms.normalized(pack, terms))

        return self._output(pack, model), loss

    def _forward_regularizer(self, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        def loss(logits: torch.Tensor) -> Loss:
            logprobs, entropy = self._terms.score(pack, logits)
            return as_loss(self._terms.normalized(pack, self._terms.regularizer(pack, logprobs, entropy)))

        return self._output(pack, model), loss

    def _forward_exact(self, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        """Differentiated: -sum_i c_i sum_t v_t log pi_t, v_t the token weight or 1.

        Nothing else is in it: w, R and std enter at the weight gradients, where norms do not see them.
        """
        scores = PackScores(pack, self.parallel)
        self._switch.current = scores
        output = self._output(pack, model)
        self._switch.current = None
        is_last_chunk = model is self.trainable.wrapped[-1]
        if not (is_last_chunk and self.parallel.is_last_stage):
            # the last chunk is the first whose backward needs l_i; the others find them in the table
            arriving = self._messages.receive(pack) if is_last_chunk and pack.step_samples else None
            self._watch_backward(output, scores, arriving)
            return output, None

        def loss(logits: torch.Tensor) -> Loss:
            logprobs, _ = self._terms.log_probs(pack, logits)
            value = self._terms.normalized(pack, -self._objective.token_weights(pack, logprobs.detach()) * logprobs)
            log_ratio = self._messages.of_step(pack, self._table.log_ratio[[row.index for row in pack.samples]])
            self._table.log_ratio[pack.step_index] = log_ratio
            if pack.step_samples:
                self._messages.send(log_ratio)
            self._watch_backward(value, scores, None)
            return as_loss(value)

        return output, loss

    # --- the backward of one pack ---------------------------------------------------------------

    def _watch_backward(
        self, output: torch.Tensor, scores: PackScores, arriving: tuple[dist.Work | None, torch.Tensor] | None
    ) -> None:
        """When the backward of this pack through a chunk starts, set its coefficients; see its end, too."""
        assert self._groups is not None
        groups, index = self._groups, scores.pack.step_index

        def start(_: torch.Tensor) -> None:
            if arriving is not None:
                work, message = arriving
                assert work is not None
                work.wait()
                self._table.log_ratio[index] = message.cpu()
            log_ratio = self._table.log_ratio[index]
            r = self._objective.trajectory_coefficients(index, log_ratio)
            scores.coefficients = Coefficients(r, self._objective.sequence_weights(log_ratio))
            groups.begin(scores)
            self._switch.current = scores  # for what is computed once more
            torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._switch.current = None
            groups.end(scores)
            for work, message in scores.sends:
                self._messages.keep(work, message)

        output.register_hook(start)

    # --- agreement ------------------------------------------------------------------------------

    def _agree(self, packs: Sequence[Pack], left: bool) -> RowTable:
        """Every trajectory's numbers on every rank, by one SUM of a table of which each row has one owner.

        The same reduction says whether any rank holds a non-finite gradient, or has left the step.
        """
        speaks = self.parallel.reports_trajectories
        owned = self._table if speaks else RowTable(len(self._objective.facts.rewards))
        owned.record_rank(
            gradients_are_finite=self.trainable.gradients_are_finite(),
            padded_tokens=sum(pack.padded for pack in packs) if speaks else 0,
            accumulator_error=(0.0, 0.0) if self._groups is None else self._groups.accumulator_error,
            left=left,
        )
        return RowTable.from_sum(agree_sum(owned.packed(), self.parallel))
