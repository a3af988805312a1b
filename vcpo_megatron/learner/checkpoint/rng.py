"""States of the random number generators of one learner rank, as plain data for a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from ..megatron import platform


def capture() -> dict[str, Any]:
    """Python's, numpy's and torch's generators, the device's, and those of Megatron's tracker."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if platform.has_gpu():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Inverse of ``capture``."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if platform.has_gpu() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def save(folder: Path, rank: int) -> None:
    """Write this rank's states into checkpoint ``folder``."""
    folder.mkdir(exist_ok=True)
    torch.save(capture(), _file(folder, rank))


def load(folder: Path, rank: int) -> None:
    """Restore this rank's states from checkpoint ``folder``."""
    restore(torch.load(_file(folder, rank), weights_only=True))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"
