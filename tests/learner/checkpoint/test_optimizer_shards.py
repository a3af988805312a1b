"""The distributed optimizer's state by boxes."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.learner.checkpoint.optimizer_shards import boxes


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
