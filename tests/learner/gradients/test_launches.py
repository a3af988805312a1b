"""How much a GPU is given to do for one linear layer and pack: launches cost the host some microseconds each."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vcpo_megatron.learner.gradients import weight_gradients
from vcpo_megatron.learner.gradients.pack_scores import Coefficients, PackScores, TokenRows, TokenShards
from vcpo_megatron.learner.gradients.weight_gradients import Accumulate, Accumulator, Deferred, NormsOnly
from vcpo_megatron.learner.megatron import platform

META = torch.device("meta")


class Launches(TorchDispatchMode):
    """Operations but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.name() or "_to_copy" in func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decisions as on a GPU, on tensors without storage; a product of bf16 with an fp32 result is one launch there."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*a.shape[:-1], b.shape[-1], device=META)

    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr(weight_gradients, "_product", product)
    yield


def launches(mode: Any, lengths: list[int], d_in: int, d_out: int, *, rewards: int = 0) -> int:
    """Of the second linear layer of this size that a pack comes to; rewards: 0 for as many as trajectories."""
    n, total = len(lengths), sum(lengths)
    weight = torch.nn.Parameter(torch.zeros(d_out, d_in, device=META, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(d_out, d_in, device=META)
    ids = torch.zeros(total, dtype=torch.int64, device=META)
    scores = PackScores(SimpleNamespace(step_samples=range(n), samples=range(n), offset=0, tokens=ids), None)
    numbers = torch.zeros(n, dtype=torch.float64, device=META)
    classes = tuple(tuple(range(first, n, rewards)) for first in range(rewards)) if rewards else None
    scores.coefficients = Coefficients(numbers, numbers, classes, numbers[: max(1, rewards)])
    scores.accumulator = Accumulator.zeros({"w": weight}, torch.float32)
    tokens = TokenShards(TokenRows(enumerate(lengths), n, ids), None)
    inputs, grads = (torch.zeros(total, d, device=META, dtype=torch.bfloat16) for d in (d_in, d_out))
    counts = []
    for _ in range(2):
        with Launches() as seen:
            mode.matrix(scores, tokens, "w", weight, inputs, grads)
        counts.append(seen.count)
    return counts[1]


#: Answers of some hundred tokens, as a pack of 8,192 holds them.
SOME = [488, 512, 530, 475, 520, 501, 466, 533, 497, 519, 542, 460, 510, 505, 490, 516]


@pytest.mark.parametrize(("d_in", "d_out"), [(896, 9728), (4096, 6144)])
@pytest.mark.parametrize("mode", [Accumulate(), Deferred(), NormsOnly()])
def test_a_pack_of_like_lengths_takes_no_more_than_20(mode: Any, d_in: int, d_out: int) -> None:
    assert launches(mode, SOME, d_in, d_out) <= 20
    assert launches(mode, [512] * 16, d_in, d_out) <= 13  # rows end to end are multiplied where they lie
    assert launches(mode, [512] * 16, d_in, d_out, rewards=2) <= 20


@pytest.mark.parametrize("mode", [Accumulate(), NormsOnly()])
def test_launches_follow_kinds_of_lengths_and_not_trajectories(mode: Any) -> None:
    """16 or 4 trajectories; each further kind of length at most 9 launches, of 2,048 tokens 15."""
    few, many = ([length for length in (256, 1024) for _ in range(n)] for n in (2, 8))
    assert launches(mode, few, 4096, 6144) == launches(mode, many, 4096, 6144) <= 20 + 9
    assert launches(mode, [2048] * 2, 8192, 8192) == launches(mode, [2048] * 4, 8192, 8192) <= 21


def test_an_explicit_gradient_takes_five_a_trajectory() -> None:
    """Product, norm, two additions; and what is done with the norms, which is not multiplied by trajectories."""
    one, two = (launches(Accumulate(), [6000] * n, 1024, 1024) for n in (2, 3))
    assert two - one <= 5
