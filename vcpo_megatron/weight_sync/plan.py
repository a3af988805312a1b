"""How the weights of a model are cut into buckets: the plan that learner, orchestrator and servers share. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Name and value of every tensor, in the order of the plan.
Stream = Iterator[tuple[str, "torch.Tensor"]]


def next_bucket(stream: Stream, entries: Sequence[Sequence[Any]]) -> Stream:
    """The tensors of one bucket of the plan, which come next in ``stream``."""
    for expected, _, _ in entries:
        name, tensor = next(stream)
        assert name == expected, (name, expected)
        yield name, tensor


def plan_buckets(outline: Mapping[str, tuple[tuple[int, ...], Any]], limit: int) -> list[list[list[object]]]:
    """Cut tensors of these shapes and dtypes, in their order, into buckets of at most ``limit`` bytes (a larger tensor
    goes alone): [name, dtype, shape] of each tensor of each bucket.

    A tensor must begin at a multiple of its size: another dtype begins another bucket.
    """
    plan: list[list[list[object]]] = []
    size, last = 0, None
    for name, (shape, dtype) in outline.items():
        own = math.prod(shape) * dtype.itemsize
        if dtype != last or size + own > limit:
            plan.append([])
            size, last = 0, dtype
        plan[-1].append([name, str(dtype).removeprefix("torch."), list(shape)])
        size += own
    return plan
