"""The distributed optimizer's state by boxes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import costs

from vcpo_megatron.learner.checkpoint.optimizer_shards import boxes

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world

BF16 = {"model": {"dtype": "bfloat16"}}
DISTRIBUTED = {"optimizer": {"distributed": True}}


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((7,), 2, 5, [((2,), (3,))]),
        ((4, 3), 0, 12, [((0, 0), (4, 3))]),
        ((4, 3), 3, 9, [((1, 0), (2, 3))]),
        ((4, 3), 4, 5, [((1, 1), (1, 1))]),
        ((4, 3), 2, 4, [((0, 2), (1, 1)), ((1, 0), (1, 1))]),
        ((4, 3), 1, 11, [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]),
        ((4, 3), 5, 5, []),
    ],
)
def test_boxes_of_a_range(shape: tuple[int, ...], start: int, stop: int, expected: list[object]) -> None:
    assert list(boxes(shape, start, stop)) == expected


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_boxes_are_the_range_in_its_order(shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    whole = torch.arange(total).view(shape)
    for start in range(total):
        for stop in range(start, total + 1):
            found = list(boxes(shape, start, stop))
            parts = [
                whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].reshape(-1)
                for offset, size in found
            ]
            assert [int(value) for part in parts for value in part] == list(range(start, stop))
            assert len(found) <= 2 * len(shape) - 1


def _slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("sections", "distributed", "element"),
    [
        ({**BF16, **DISTRIBUTED}, True, 2),
        _slow(DISTRIBUTED, True, 4),
        _slow(BF16, False, 2),
        _slow({}, False, 4),
    ],
)
def test_a_rank_copies_what_it_writes_once_and_loads_in_place(
    sections: dict[str, Any], distributed: bool, element: int, tmp_path: Path
) -> None:
    """Of four layers, what six take beyond two; on two data-parallel ranks: at the peak of a save one copy of what the
    rank writes, and of a load what Megatron puts together of halves (gates, of the weights and without the distributed
    optimizer of its state)."""
    models = [make_model_folder(tmp_path / f"layers{count}", layers=count) for count in (2, 6)]
    cases = [(make_config(model, 2, algorithm={"method": "grpo"}, **sections), [make_batch(model)]) for model in models]
    small, large = run_world(
        2, "learner.run_checkpoints:host_bytes", {"cases": cases, "run_dir": str(tmp_path)}, timeout_s=350
    )
    # without the distributed optimizer the second rank writes nothing
    for rank in range(1 + distributed):
        parameters, saving, loading = (b - a for a, b in zip(small[rank], large[rank], strict=True))
        formula = costs.staged_bytes(parameters, 2, element, distributed=distributed, first=rank == 0)
        # What Python's collector frees earlier or later is in both; a second copy would be twice as much, and one of
        # the optimizer's whole state 12 bytes a parameter.
        assert saving == pytest.approx(formula, rel=0.5)
        assert loading < (4 if distributed else 10) * parameters
