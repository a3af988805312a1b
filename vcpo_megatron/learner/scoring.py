"""Log-probs of one token sequence under the current parameters, for comparison with a server."""

from __future__ import annotations

import numpy as np
import torch

from . import platform
from .logprobs import token_logprobs
from .parallel import Parallel, agree_sum
from .schedule import ForwardStep, Loss, as_loss, forward_tokens, run_schedule
from .training import Trainable


def score_tokens(trainable: Trainable, parallel: Parallel, tokens: np.ndarray) -> np.ndarray:
    """float32 [L-1]: log pi(tokens[t] | tokens[:t]) for t = 1..L-1 at temperature 1, on every rank."""
    return score_with(trainable.wrapped, trainable.shape.vocab_size, parallel, tokens)


def score_with(model: torch.nn.Module, vocab_size: int, parallel: Parallel, tokens: np.ndarray) -> np.ndarray:
    """``score_tokens`` for a bare model."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(platform.device())
    inputs, labels = ids[:-1], ids[1:]
    positions = torch.arange(len(inputs), device=inputs.device)
    found = torch.zeros(len(labels), dtype=torch.float64)

    def score(logits: torch.Tensor) -> Loss:
        logprobs, _ = token_logprobs(logits.squeeze(0), labels, 1.0, vocab_size, parallel.tensor_group)
        if parallel.speaks_for_replica and parallel.data_rank == 0:
            found.copy_(logprobs.detach())
        return as_loss(logits.new_zeros(()))

    def forward(_: None, stage: torch.nn.Module) -> ForwardStep:
        return forward_tokens(stage, inputs, positions, (0, len(inputs))), score

    run_schedule(model, [None], forward, tokens=len(inputs), forward_only=True)
    return agree_sum(found, parallel).to(torch.float32).numpy()
