"""Parameters whose gradient cannot be separated by trajectory in a pack: one trajectory a micro-batch.

The gradient that autograd finds for such a parameter in the backward of a micro-batch of one trajectory is that
trajectory's own. A hook takes it, records its norm, and hands it to ``weight_gradients`` like any other; autograd's
way to the gradient buffer gets zeros. Exact where a rank sees the whole trajectory and nothing of another one; where
it does not, ``alone_problem`` says so and the layout is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..megatron.parallel import Parallel
from .pack_scores import ScoreSwitch


def alone_problem(parameters: Sequence[Parameter], parallel: Parallel) -> str:
    """Why one trajectory a micro-batch does not make the gradients of ``parameters`` exact; "" where it does."""
    if parallel.context_size > 1:
        return f"parallel.context = {parallel.context_size} splits a trajectory over ranks"
    if parallel.spread_size > 1:
        return "parallel.expert > 1 brings tokens of several trajectories to an expert"
    whole = [p for p in parameters if not getattr(p, "tensor_model_parallel", False)]
    if parallel.tensor_size > 1 and whole:
        return f"parallel.tensor = {parallel.tensor_size}: whether ranks hold copies or summands of it is not known"
    return ""


def attach_alone(parameter: Parameter, name: str, switch: ScoreSwitch) -> None:
    """Separate the gradient of ``parameter`` by micro-batches while ``switch.current`` is set."""

    def record(gradient: Tensor) -> Tensor | None:
        scores = switch.current
        if scores is None:
            return None  # a plain backward
        if scores.pack.rows:
            assert len(scores.pack.step_rows) == 1, "one trajectory a micro-batch"
            own = gradient.detach().float()
            scores.owned[scores.own] += torch.linalg.vector_norm(own).double().square()
            scores.gradients.vector(scores, name, parameter, own[None])
        return torch.zeros_like(gradient)

    parameter.register_hook(record)
