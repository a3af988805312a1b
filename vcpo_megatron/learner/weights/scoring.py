"""Log-probs of one token sequence under the current parameters, for comparison with a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..batch.packing import AttentionPlan, PackLayout
from ..megatron import platform
from ..megatron.logprobs import token_logprobs
from ..megatron.parallel import Parallel, agree_sum
from ..megatron.schedule import ForwardStep, Loss, as_loss, forward_tokens, run_schedule
from ..megatron.training import Trainable


def score_tokens(trainable: Trainable, parallel: Parallel, tokens: np.ndarray) -> np.ndarray:
    """float32 [L-1]: log pi(tokens[t] | tokens[:t]) for t = 1..L-1 at temperature 1, on every rank."""
    return score_with(trainable.wrapped, trainable.shape.vocab_size, parallel, tokens)


def score_with(
    chunks: Sequence[torch.nn.Module], vocab_size: int, parallel: Parallel, tokens: np.ndarray
) -> np.ndarray:
    """``score_tokens`` for chunks of a model, wrapped for data parallelism or not."""
    length = len(tokens) - 1
    layout = PackLayout.of([length], parallel.share)
    padded = np.zeros(layout.total + 1, np.int64)
    padded[: len(tokens)] = tokens
    own = torch.from_numpy(layout.take)
    inputs, labels = (torch.from_numpy(padded[layout.take + shift]).to(platform.device()) for shift in (0, 1))
    positions = torch.from_numpy(layout.positions).to(inputs.device)
    attention = AttentionPlan.of(layout, inputs.device)
    found = torch.zeros(layout.total, dtype=torch.float64)

    def score(logits: torch.Tensor) -> Loss:
        logprobs, _ = token_logprobs(logits.squeeze(0), labels, 1.0, vocab_size, parallel.tensor_group)
        if parallel.is_last_stage and parallel.tensor_rank == 0 and parallel.data_rank == 0:
            found[own] = platform.read(logprobs.detach()).double()
        return as_loss(logits.new_zeros(()))

    def forward(_: None, model: torch.nn.Module) -> ForwardStep:
        return forward_tokens(model, inputs, positions, attention), score

    items = [None] * parallel.steps_multiple
    run_schedule(chunks, items, forward, lengths=[layout.total] * len(items), forward_only=True)
    return agree_sum(found, parallel)[:length].to(torch.float32).numpy()
