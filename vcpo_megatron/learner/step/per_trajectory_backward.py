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
from ..gradients.pack_scores import Coefficients, PackScores, ScoreSwitch
from ..megatron import platform
from ..megatron.host_exchange import Arriving, HostExchange
from ..megatron.schedule import ForwardStep, Loss, as_loss
from .batch_state import BatchState
from .passes import Passes

#: Called with (state, pack) on every rank when a backward of the pack starts: its l_i are known.
Starts = Callable[[BatchState, Pack], None]


class ExactBackward:
    """``groups`` follows every pack's backward, after ``starts``; attached layers read ``switch``."""

    def __init__(self, passes: Passes, switch: ScoreSwitch, groups: GroupNorms, starts: Starts) -> None:
        self._passes = passes
        self._switch = switch
        self._groups = groups
        self._starts = starts

    def run(self, state: BatchState, packs: Sequence[Pack], found: Found, buckets: Sequence[Bucket]) -> None:
        """``found`` is called with the |g_i| of each group; the reduction of ``buckets`` starts in the end."""
        with HostExchange(self._passes.config.launch.timeout_s) as exchange:
            self._groups.start_step(packs, found, exchange)
            self._passes.run(packs, partial(self._forward, state, exchange))
            self._groups.finish_step(buckets)

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
            logprobs, _ = passes.terms.record(state, pack, logits)
            weights = passes.objective.token_weights(pack, logprobs.detach())
            value = passes.terms.normalized(state, pack, -weights * logprobs)
            log_ratio = messages.of_step(pack, state.log_ratio[pack.index])
            state.log_ratio[pack.step_index] = log_ratio
            if pack.step_samples:
                messages.send(exchange, pack, platform.start_read(log_ratio))
            self._watch_backward(state, value, scores, None)
            return as_loss(value)

        return output, loss

    def _watch_backward(
        self, state: BatchState, output: torch.Tensor, scores: PackScores, arriving: Arriving | None
    ) -> None:
        """When the backward of this pack through a chunk starts, set its coefficients; see its end, too."""
        objective, index = self._passes.objective, scores.pack.step_index

        def start(_: torch.Tensor) -> None:
            if arriving is not None:
                state.log_ratio[index] = arriving.wait()
            self._starts(state, scores.pack)
            gradient = objective.trajectory_coefficients(state, index)
            scores.coefficients = Coefficients(gradient, objective.sequence_weights(state.log_ratio[index]))
            self._groups.begin(scores)
            self._switch.current = scores  # for what is computed once more
            torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._switch.current = None
            self._groups.end(scores)

        output.register_hook(start)
