"""Megatron's forward-backward schedules (none, 1F1B, interleaved with virtual stages) over packs of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from ..batch.packing import AttentionPlan
from .layers import PackParams
from .stage_messages import StageMessages

#: What a loss function returns to the schedule: the loss, a token count that is not used, nothing to report.
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
#: What a forward step returns: this stage's output, and on the last stage the function that makes it a loss.
ForwardStep = tuple[torch.Tensor, Callable[[torch.Tensor], Loss] | None]

_T = TypeVar("_T")


def as_loss(value: torch.Tensor) -> Loss:
    """``value`` as the schedule wants it. It is differentiated as it is: losses are normalised by the caller."""
    return value, torch.zeros((), dtype=torch.int), {}


def forward_tokens(
    model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionPlan
) -> torch.Tensor:
    """This stage's output for this rank's tokens of trajectories laid end to end, tokens and positions int64 [T]."""
    return model(tokens[None], positions[None], None, packed_seq_params=PackParams.of(attention, positions))


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    items: Sequence[_T],
    forward: Callable[[_T, torch.nn.Module], ForwardStep],
    *,
    lengths: Sequence[int],
    forward_only: bool,
) -> None:
    """Run ``forward`` on every item and chunk, and the backward unless ``forward_only``; nothing without items.

    ``lengths``: tokens of each item, on all context-parallel ranks, padding included; the same on every stage.
    """
    if not items:
        return

    def step(iterator: Iterator[_T], chunk: torch.nn.Module) -> ForwardStep:
        return forward(next(iterator), chunk)

    iterators = [iter(items) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(items),
        seq_length=lengths[0],
        micro_batch_size=1,
        forward_only=forward_only,
        **_messages(chunks, lengths),
    )


def _messages(chunks: Sequence[torch.nn.Module], lengths: Sequence[int]) -> dict[str, Any]:
    """Arguments of the schedule that say how stages talk; none where there is one stage."""
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "dp_cp", "embd", "pos_embd"])
    if groups.pp.size() == 1:
        return {}
    config = get_model_config(chunks[0])
    parts = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    tokens = [length // parts for length in lengths]
    messages = StageMessages(groups.pp, config, len(chunks), tokens, config.hidden_size)
    return {"p2p_communicator": messages, "pg_collection": groups}
