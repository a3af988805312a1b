"""Passes of one rank over packs, on Megatron's schedule: which forward runs, and what is differentiated.

A loss is minimised, so what flows backward is minus the gradient of the method's objective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import torch

from ...config.schema import RunConfig
from ..batch.packing import Pack
from ..megatron import platform
from ..megatron.parallel import Parallel, agree_sum
from ..megatron.schedule import ForwardStep, Loss, as_loss, forward_tokens, run_schedule
from ..megatron.training import Trainable
from ..moe.kept_plans import KeptPlans
from ..moe.load_balance import LoadBalance
from ..moe.routing_replay import RoutingReplay
from .abort import AbortCheck, Forward, ReplicaAborted
from .batch_state import BatchState
from .log_ratios import LogRatioExchange
from .objective import Objective
from .pack_terms import PackTerms
from .plan import StepPlan
from .regularizers import ReferenceWeights


class Passes:
    """Built once. Each pass is called by all ranks of a replica alike; ReplicaAborted where the step is aborted."""

    def __init__(self, config: RunConfig, parallel: Parallel, trainable: Trainable, abort: AbortCheck) -> None:
        self.config, self.parallel, self.trainable = config, parallel, trainable
        algorithm, device = config.algorithm, platform.device()
        self.messages = LogRatioExchange(parallel, device)
        self.objective = Objective(algorithm, self.messages.sum_over_context)
        self.terms = PackTerms(config, parallel, self.messages, self.objective, trainable.shape.vocab_size)
        self._abort = abort
        self._reference = ReferenceWeights(trainable.chunks) if algorithm.kl_reference == "initial" else None
        if self._reference is not None and parallel.rank == 0:
            print(f"kl_reference: {self._reference.bytes:,} bytes of host memory on rank 0", flush=True)
        replayed = config.rollout.routing_replay
        self._replay = RoutingReplay(trainable.chunks, parallel, device) if replayed else None
        again = config.model.recompute == "full" and trainable.shape.experts is not None
        self._plans = KeptPlans(trainable.chunks) if again else None
        weight, layers = algorithm.global_aux_loss, trainable.shape.num_layers
        self._balance = LoadBalance(trainable.chunks, weight, layers, parallel) if weight > 0 else None

    @property
    def metrics(self) -> dict[str, float]:
        """Of the step at hand, beyond what ``BatchState`` holds."""
        return {} if self._balance is None else self._balance.metrics

    # --- forward only -----------------------------------------------------------------------------

    def score(self, state: BatchState, packs: Sequence[Pack]) -> None:
        """l_i and what else a forward says of the packs' samples."""
        self._forward_only(packs, partial(self._forward_score, state))
        self.terms.collect()

    def score_by_reference(self, state: BatchState, packs: Sequence[Pack]) -> None:
        """log-probs of the reference policy, by one forward with its weights in place of the model's."""
        if self._reference is not None:
            with self._reference.swapped():
                self._forward_only(packs, partial(self._forward_reference, state))

    def logprobs(self, packs: Sequence[Pack], starts: Sequence[int], tokens: int) -> torch.Tensor:
        """log pi of the packs' labels, at their places among all ``tokens`` of the batch (``Pack.label_places``), and 0
        elsewhere: float64, on the host, the same on all ranks. No part of a step: nothing aborts it."""
        copies: list[tuple[Pack, platform.HostCopy]] = []

        def forward(pack: Pack, model: torch.nn.Module) -> ForwardStep:
            def loss(logits: torch.Tensor) -> Loss:
                copies.append((pack, platform.start_read(self.terms.score(pack, logits)[0])))
                return as_loss(logits.new_zeros(()))

            return self.output(pack, model), loss

        with self.trainable.no_sync():
            lengths = [pack.length for pack in packs]
            run_schedule(self.trainable.wrapped, packs, forward, lengths=lengths, forward_only=True)
        found = torch.zeros(tokens, dtype=torch.float64)
        for pack, copy in copies if self.parallel.tensor_rank == 0 else ():
            places = torch.from_numpy(pack.label_places(starts))
            found[places[places >= 0]] = copy.wait()[places >= 0].double()
        return agree_sum(found, self.parallel)

    def find_statistic(self, state: BatchState, packs: Sequence[Pack]) -> None:
        """The one number of the whole batch that the method asks for, the same on all ranks."""
        with self._abort.caught():
            self.score(state, packs)
        ratios = torch.zeros(len(state.token_log_ratios) + 1, dtype=torch.float64)
        ratios[-1] = float(self._abort.aborted)  # all ranks take part in the sum below, and learn it there
        if self.parallel.reports_trajectories:
            ratios[:-1] = state.token_log_ratios
        agree_sum(ratios, self.parallel)
        if ratios[-1] > 0:
            raise ReplicaAborted
        state.statistic = self.objective.statistic(state, ratios[:-1])

    def count_expert_tokens(self, packs: Sequence[Pack]) -> None:
        """Where the load-balancing loss asks for it: how many of the batch's tokens go to each expert."""
        balance, experts = self._balance, self.trainable.shape.experts
        if balance is None or experts is None:
            return
        with balance.passes("count"), self._abort.caught():
            self._forward_only(packs, self._forward_count)
        if balance.agree(experts.count, self._abort.aborted):
            raise ReplicaAborted

    # --- gradients --------------------------------------------------------------------------------

    def add_plain_gradient(self, state: BatchState, plan: StepPlan) -> None:
        """The whole loss, with baselines that are known, as the loss of one ordinary backward."""
        whole = self.config.algorithm.regularized or self.objective.method.whole_batch
        self._backward_balanced(plan.packs if whole else plan.trained, partial(self._forward_plain, state))
        self.terms.collect()

    def add_regularizers(self, state: BatchState, plan: StepPlan) -> None:
        """What no baseline multiplies, by itself where there is any: KL, entropy, the balance of experts, and the
        anchor where tokens have weights, which are in the gradients that another backward carries."""
        if self.config.algorithm.regularized:
            self._backward_balanced(plan.packs, partial(self._forward_regularizer, state))
        elif self.objective.has_token_anchor(state):
            self._backward_balanced(plan.trained, partial(self._forward_regularizer, state))
        self.terms.collect()

    def run(self, packs: Sequence[Pack], forward: Forward, *, forward_only: bool = False) -> None:
        """``forward`` on every pack and chunk, and its backward; no reduction of gradients starts in it."""
        self._abort.look()
        forward = self._abort.between_micro_batches(forward)
        with self.trainable.no_sync():
            lengths = [pack.length for pack in packs]
            run_schedule(self.trainable.wrapped, packs, forward, lengths=lengths, forward_only=forward_only)

    def output(self, pack: Pack, model: torch.nn.Module) -> torch.Tensor:
        """This stage's output for a pack, which is the current one of every pack context."""
        forward = partial(forward_tokens, model, pack.tokens, pack.positions, pack.attention)
        for watch in (self._replay, self._balance):
            if watch is not None:
                forward = partial(watch.during, pack, forward)
        return forward() if self._plans is None else self._plans.during(forward)

    def _forward_only(self, packs: Sequence[Pack], forward: Forward) -> None:
        self.run(packs, forward, forward_only=True)

    def _backward_balanced(self, packs: Sequence[Pack], forward: Forward) -> None:
        """With the gradient of the experts' load-balancing loss, if there is one."""
        with contextlib.nullcontext() if self._balance is None else self._balance.passes("pull"):
            self.run(packs, forward)

    # --- forwards of one pack ---------------------------------------------------------------------

    def _forward_count(self, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        return self.output(pack, model), lambda logits: as_loss(logits.new_zeros(()))

    def _forward_score(self, state: BatchState, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        def loss(logits: torch.Tensor) -> Loss:
            numbers = state.of_samples(pack.index, pack.tokens.device)
            self.terms.record(state, pack, logits, numbers)
            self.terms.send(state, pack)
            return as_loss(logits.new_zeros(()))

        return self.output(pack, model), loss

    def _forward_reference(self, state: BatchState, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        def loss(logits: torch.Tensor) -> Loss:
            state.reference_logprobs[id(pack)] = self.terms.score(pack, logits)[0].detach()
            return as_loss(logits.new_zeros(()))

        return self.output(pack, model), loss

    def _forward_plain(self, state: BatchState, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        """Differentiated: -sum_i c_i sum_t v_t log pi_t with all of the coefficient in v, and the regularizers."""

        def loss(logits: torch.Tensor) -> Loss:
            scored = self.terms.record(state, pack, logits, state.of_samples(pack.index, pack.tokens.device))
            logprobs, numbers = scored.logprobs, scored.numbers
            v = self.objective.token_coefficients(state, pack, logprobs.detach(), numbers, scored.log_ratio)
            terms = -v * logprobs + self.terms.regularizer(state, pack, logprobs, scored.entropy)
            self.terms.send(state, pack)
            return as_loss(self.terms.normalized(numbers, pack, terms))

        return self.output(pack, model), loss

    def _forward_regularizer(self, state: BatchState, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        def loss(logits: torch.Tensor) -> Loss:
            numbers = state.of_samples(pack.index, pack.tokens.device)
            logprobs, entropy = self.terms.score(pack, logits)
            terms = self.terms.regularizer(state, pack, logprobs, entropy)
            if self.objective.has_token_anchor(state):
                terms = terms - self.objective.token_anchor(numbers, pack, logprobs.detach()) * logprobs
            self.terms.send(state, pack)
            return as_loss(self.terms.normalized(numbers, pack, terms))

        return self.output(pack, model), loss
