"""Megatron's distributed optimizer over torch's Adam (no Apex, no TransformerEngine): what its checkpoints need.

Megatron 0.16 writes the optimizer for Adams that count steps once a group; torch's counts them once a
parameter. Without these three repairs loading fails, or all parameters share one counter that each of them
advances. Everything is done on instances, and only where the optimizer within is torch's.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def _over_torch_adam(optimizer: MegatronOptimizer) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [
        part
        for part in parts
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]


def prepare_to_load(optimizer: MegatronOptimizer) -> None:
    """Before the state is read: every parameter has a counter, and none is looked for in the checkpoint."""
    for part in _over_torch_adam(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
        part._set_main_param_and_optimizer_states = types.MethodType(_set_states, part)


def finish_loading(optimizer: MegatronOptimizer) -> None:
    """After the state is set: a counter of its own for every parameter."""
    for part in _over_torch_adam(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


@torch.no_grad()
def _set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Megatron's, without the counter that a checkpoint keeps with the parameter group."""
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    for key, value in {"param": main, **self.optimizer.state[main]}.items():
        if key != "step":
            value.copy_(tensors[key])
