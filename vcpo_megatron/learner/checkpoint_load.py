"""Parameters from a checkpoint that a conversion or a run wrote, without the optimizer."""

from __future__ import annotations

from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel


def load_weights(model: GPTModel, path: Path) -> None:
    """Fill ``model`` from the checkpoint in ``path``, whatever layout wrote it; collective over all ranks."""
    parameters = {key: value for key, value in model.sharded_state_dict().items() if not key.endswith("_extra_state")}
    state = dist_checkpointing.load({"model": parameters}, str(path))
    model.load_state_dict(state["model"], strict=False)  # extra states are not parameters
