"""What layers must know of the pack that they compute: in its forward, and where its backward computes it once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class PackContext(Generic[T]):
    """``current`` is what is known of the pack at hand, None outside of packs. Several packs may be in flight."""

    def __init__(self) -> None:
        self.current: T | None = None

    def during(self, value: T | None, forward: Callable[[], Tensor]) -> Tensor:
        """The output of ``forward``; ``value`` is current in it and in the backward from its output."""
        self.current = value
        output = forward()
        self.current = None
        if output.requires_grad:
            output.register_hook(lambda _: self._until_backward_ends(value))
        return output

    def _until_backward_ends(self, value: T | None) -> None:
        self.current = value

        def end() -> None:
            self.current = None

        torch.autograd.Variable._execution_engine.queue_callback(end)
