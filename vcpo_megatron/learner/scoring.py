"""Log-probs of one token sequence under the current parameters, for comparison with a server."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from . import platform
from .layers import PackParams
from .logprobs import token_logprobs
from .parallel import Parallel, agree_sum
from .training import Trainable


def score_tokens(trainable: Trainable, parallel: Parallel, tokens: np.ndarray) -> np.ndarray:
    """float32 [L-1]: log pi(tokens[t] | tokens[:t]) for t = 1..L-1 at temperature 1, on every rank."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(platform.device())
    inputs, labels = ids[:-1], ids[1:]
    found = torch.zeros(len(labels), dtype=torch.float64)

    def forward(_, model):  # noqa: ANN001, ANN202
        positions = torch.arange(len(inputs), device=inputs.device)
        params = PackParams.of((0, len(inputs)), len(inputs), inputs.device)
        output = model(inputs[None], positions[None], None, packed_seq_params=params)

        def loss(logits: torch.Tensor):  # noqa: ANN202
            size = trainable.shape.vocab_size
            logprobs, _ = token_logprobs(logits.squeeze(0), labels, 1.0, size, parallel.tensor_group)
            if parallel.speaks_for_replica and parallel.data_rank == 0:
                found.copy_(logprobs.detach())
            return logits.new_zeros(()), torch.zeros((), dtype=torch.int), {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter([None]), model=[trainable.wrapped], num_microbatches=1,
        seq_length=len(inputs), micro_batch_size=1, forward_only=True,
    )  # fmt: skip
    return agree_sum(found, parallel).to(torch.float32).numpy()
