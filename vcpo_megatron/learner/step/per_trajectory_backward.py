"""One backward of unweighted g_i, from which exact |g_i| come: w, R and std enter at the weight gradients only.

On the last stage the forward of a pack gives its l_i, which travel to every earlier stage before that pack's backward;
so each chunk knows w_i when its backward starts, and its norms never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..batch.packing import Pack
from ..gradients.group_sums import Bucket, Found, GroupNorms
from ..gradients.pack_scores import PackScores, ScoreSwitch
from ..megatron import platform
from ..megatron.host_exchange import Arriving, HostExchange
from ..megatron.schedule import ForwardStep, Loss, as_loss
from .batch_state import BatchState, SampleNumbers
from .passes import Passes

#: Called on every rank when a backward of a pack starts, with the numbers and the l_i of its micro-step, on the device;
#: returns the numbers that its coefficients are made of.
Starts = Callable[[BatchState, Pack, SampleNumbers, torch.Tensor], SampleNumbers]


class ExactBackward:
    """``groups`` follows every pack's backward, after ``starts``; attached layers read ``switch``."""

    def __init__(self, passes: Passes, switch: ScoreSwitch, groups: GroupNorms, starts: Starts) -> None:
        self._passes = passes
        self._switch = switch
        self._groups = groups
        self._starts = starts
        self._log_ratio: dict[int, torch.Tensor] = {}  # of a pack's micro-step by the pack's id, where its tokens are

    def run(self, state: BatchState, packs: Sequence[Pack], found: Found, buckets: Sequence[Bucket]) -> None:
        """``found`` is called with the |g_i| of each group; the reduction of ``buckets`` starts in the end."""
        self._log_ratio.clear()
        with HostExchange(self._passes.config.launch.timeout_s) as exchange:
            self._groups.start_step(packs, found, exchange)
            self._passes.run(packs, partial(self._forward, state, exchange))
            self._groups.finish_step(buckets)
        self._passes.terms.collect()

    def _forward(self, state: BatchState, exchange: HostExchange, pack: Pack, model: torch.nn.Module) -> ForwardStep:
        """Differentiated: -sum_i c_i sum_t v_t log pi_t, v_t the token weight or 1."""
        passes, messages = self._passes, self._passes.messages
        scores = PackScores(pack, passes.parallel, exchange)
        self._switch.current = scores
        output = passes.output(pack, model)
        self._switch.current = None
        is_last_chunk = model is passes.trainable.wrapped[-1]
        if not (is_last_chunk and passes.parallel.is_last_stage):
            # the last chunk is the first whose backward needs l_i; the others find them in the state
            arriving = messages.receive(exchange, pack) if is_last_chunk and pack.step_samples else None
            self._watch_backward(state, output, scores, arriving)
            return output, None

        def loss(logits: torch.Tensor) -> Loss:
            numbers = state.of_samples(pack.index, pack.tokens.device)
            scored = passes.terms.record(state, pack, logits, numbers)
            weights = passes.objective.token_weights(pack, scored.logprobs.detach())
            value = passes.terms.normalized(numbers, pack, -weights * scored.logprobs)
            log_ratio = messages.of_step(pack, scored.log_ratio)
            self._log_ratio[id(pack)] = log_ratio
            sent = passes.terms.send(state, pack, log_ratio)
            if pack.step_samples and sent is not None:
                messages.send(exchange, pack, *sent)
            self._watch_backward(state, value, scores, None)
            return as_loss(value)

        return output, loss

    def _watch_backward(
        self, state: BatchState, output: torch.Tensor, scores: PackScores, arriving: Arriving | None
    ) -> None:
        """When the backward of this pack through a chunk starts, set its coefficients; see its end, too."""
        objective, index, device = self._passes.objective, scores.pack.step_index, scores.pack.tokens.device
        none = torch.zeros(0, dtype=torch.float64, device=device)  # of a micro-step without samples

        def start(_: torch.Tensor) -> None:
            if arriving is not None:
                state.log_ratio[index] = arriving.wait()
                self._log_ratio[id(scores.pack)] = platform.to_device(state.log_ratio[index], device)
            log_ratio = self._log_ratio.get(id(scores.pack), none)
            numbers = self._starts(state, scores.pack, state.of_samples(index, device), log_ratio)
            scores.coefficients = objective.coefficients(state, index, numbers, log_ratio)
            self._groups.begin(scores)
            self._switch.current = scores  # for what is computed once more
            torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._switch.current = None
            self._groups.end(scores)

        output.register_hook(start)
