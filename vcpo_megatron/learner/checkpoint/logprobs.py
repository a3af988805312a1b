"""Log-probs of prompts by Megatron's own layers, from a checkpoint, in this one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ...config.schema import RunConfig
from ...conversion.dtypes import dtype_name
from ...conversion.table import EMBEDDING
from ..megatron import platform
from ..megatron.model import build_network
from ..megatron.parallel import destroy, initialize
from ..weights.scoring import score_with
from .convert import OpenedCheckpoint


def checkpoint_logprobs(opened: OpenedCheckpoint, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 [L - 1] for each prompt of L tokens, in the checkpoint's dtype; in float32 where that is float16, which
    the learner does not compute in. Call once in a process."""
    platform.prepare()
    dtype = torch.float32 if opened.dtype == torch.float16 else opened.dtype
    padded = opened.files.shape(EMBEDDING)[0]
    config = RunConfig.model_validate(
        {
            "model": {"path": opened.hf, "dtype": dtype_name(dtype), "vocab_multiple": padded},
            "train": {"steps": 1},
            "environment": {"name": "none"},
        }
    )
    if not dist.is_initialized():
        dist.init_process_group(platform.backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = initialize(config)
        chunks = build_network(config, parallel, opened.family, opened.shape)
        load_weights(chunks, opened.path)
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            return [
                torch.from_numpy(score_with(chunks, opened.shape.vocab_size, parallel, np.asarray(prompt)))
                for prompt in prompts
            ]
    finally:
        destroy()


def load_weights(chunks: Sequence[GPTModel], path: Path) -> None:
    """Fill ``chunks``, of any layout, with the weights of the checkpoint in ``path``; collective over all ranks."""
    wanted = {
        f"model{number}": {k: v for k, v in chunk.sharded_state_dict().items() if not k.endswith("_extra_state")}
        for number, chunk in enumerate(chunks)
    }
    state = dist_checkpointing.load(wanted, str(path))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{number}"], strict=False)  # extra states are not parameters
