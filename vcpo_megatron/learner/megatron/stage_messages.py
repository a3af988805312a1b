"""Activations and their gradients between pipeline stages: Megatron's messages, of shapes that every stage knows.

Packs differ in length. Megatron would send the shape of each tensor ahead of it, and wait for the whole device between
the two; but every stage has the same plan, so each knows what comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from . import platform


class StageMessages(P2PCommunicator):
    """One run of a schedule. ``tokens``: of every micro-batch, on one rank."""

    def __init__(
        self, group: dist.ProcessGroup, config: ModelParallelConfig, chunks: int, tokens: Sequence[int], hidden: int
    ) -> None:
        super().__init__(pp_group=group, config=config)
        self._hidden = hidden
        is_first, is_last = group.rank() == 0, group.rank() == group.size() - 1
        order = [(number, 0) for number in range(len(tokens))]
        if chunks > 1:
            order = get_schedule_table(len(tokens), chunks, config.microbatch_group_size_per_vp_stage)

        def but(of_end: bool, chunk: int, mirrored: bool) -> deque[int]:
            """Tokens in the schedule's order, without those of ``chunk`` at the end of the model."""
            places = ((number, chunks - 1 - place if mirrored else place) for number, place in order)
            return deque(tokens[number] for number, place in places if not (of_end and place == chunk))

        last = chunks - 1
        self._expected = {
            "activations from the previous stage": but(is_first, 0, False),
            "activations for the next stage": but(is_last, last, False),
            "gradients from the next stage": but(is_last, last, True),
            "gradients for the previous stage": but(is_first, 0, True),
        }

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> Any:
        """Shapes of what comes from the previous and from the next stage; Megatron asks before every message."""
        self._sent("activations for the next stage", tensor_send_next)
        self._sent("gradients for the previous stage", tensor_send_prev)
        before, after = "activations from the previous stage", "gradients from the next stage"
        return self._next(before) if recv_prev else None, self._next(after) if recv_next else None

    def _next(self, kind: str) -> tuple[int, int, int]:
        if not self._expected[kind]:
            raise RuntimeError(f"Megatron's schedule has more {kind} than the plan has micro-batches")
        return self._expected[kind].popleft(), 1, self._hidden

    def _sent(self, kind: str, tensor: Tensor | None) -> None:
        if tensor is not None and (expected := self._next(kind)) != tuple(tensor.shape):
            raise RuntimeError(f"{kind}: {list(tensor.shape)} where the plan has {list(expected)}")


def connect_stages(group: dist.ProcessGroup, *, interleaved: bool) -> None:
    """The first message of every pair of neighbours in both directions, in the way of the schedule: NCCL's hosts wait
    for one another there."""
    config = ModelParallelConfig(pipeline_dtype=torch.float32, batch_p2p_comm=not interleaved, batch_p2p_sync=False)
    one = torch.zeros(1, device=platform.device())
    P2PCommunicator(group, config)._communicate(
        tensor_send_next=one, tensor_send_prev=one, recv_prev=True, recv_next=True, tensor_shape=[1]
    )
