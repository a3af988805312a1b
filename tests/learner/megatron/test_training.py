"""Learning rates of every schedule, step by step, against literal numbers; and the check of gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ..scenarios import make_config

#: lr 1, ten steps: schedule keys -> rates of steps 0..10 (the last is after the run).
RATES: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [1.0] * 11),
    ({"warmup_steps": 4}, [0.25, 0.5, 0.75, *[1.0] * 8]),
    # 0.5 (1 + cos(pi t / 11)) scaled to [0.1, 1], t = 1..11: the last step of the run is not yet at min_lr
    (
        {"schedule": "cosine", "min_lr": 0.1},
        [0.9818, 0.9286, 0.8447, 0.7369, 0.6140, 0.4860, 0.3631, 0.2553, 0.1714, 0.1182, 0.1],
    ),
    # warm-up over 3, then cosine over the remaining 8 down to 0
    (
        {"schedule": "cosine", "warmup_steps": 3},
        [0.3333, 0.6667, 1.0, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381, 0.0],
    ),
    # stable until 11 - 5, then linearly to min_lr 0.5
    (
        {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 5, "min_lr": 0.5},
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5],
    ),
]


@pytest.mark.parametrize(("keys", "expected"), RATES, ids=[str(keys) for keys, _ in RATES])
def test_rates(keys: dict[str, Any], expected: list[float]) -> None:
    from vcpo_megatron.learner.megatron.training import _schedule

    config = make_config(Path("m"), 1, optimizer={"lr": 1.0, **keys})
    schedule = _schedule(config, SimpleNamespace(param_groups=[{}]))
    found = []
    for _ in range(11):
        found.append(schedule.get_lr({}))
        schedule.num_steps += 1
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3e-25, 4e-25], 25e-50),  # whose squares are 0 in fp32
        ([3e25, 4e25, 1.0], 25e50),  # infinite in fp32
        ([], 0.0),
        ([1.0] * 1001, 1001.0),
    ],
)
def test_squares_of_any_size_are_summed(values: list[float], expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from vcpo_megatron.learner.megatron import training

    monkeypatch.setattr(training, "_NORM_BLOCK", 100)
    tensors = [torch.tensor(values), torch.zeros(0), torch.zeros(2, 3)]
    assert float(training.squared_sum(tensors)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), None])
def test_one_gradient_that_is_not_finite_is_found(bad: float | None) -> None:
    from vcpo_megatron.learner.megatron.training import Trainable

    dense, experts, nothing = torch.linspace(-1, 1, 1000), torch.linspace(-3, 2, 77), torch.zeros(0)
    if bad is not None:
        experts[76] = bad
    buffers = [SimpleNamespace(grad_data=data) for data in (dense, nothing)]
    chunk = SimpleNamespace(buffers=buffers, expert_parallel_buffers=[SimpleNamespace(grad_data=experts)])
    assert Trainable.gradients_are_finite(SimpleNamespace(wrapped=(chunk,))) is (bad is None)
