"""Only the weights of a distributed checkpoint, into model chunks of whatever layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel


def load_weights(chunks: Sequence[GPTModel], path: Path) -> None:
    """Fill ``chunks`` from the checkpoint in ``path``, whatever layout wrote it; collective over all ranks."""
    wanted = {
        f"model{number}": {k: v for k, v in chunk.sharded_state_dict().items() if not k.endswith("_extra_state")}
        for number, chunk in enumerate(chunks)
    }
    state = dist_checkpointing.load(wanted, str(path))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{number}"], strict=False)  # extra states are not parameters
