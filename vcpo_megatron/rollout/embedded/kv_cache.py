"""The key-value cache: one row a running sequence, rows kept dense so that a batch is a view.

Row r holds keys and values [heads, length, head_dim] of the r-th running sequence. Rows 0..B-1 are
in use; when a sequence ends, the last one moves into its row. So the decode batch is the slice
[:B, :, :L] of each layer's tensor: nothing is gathered or copied in a step.

Memory grows by doubling up to max_rows x max_length: a long context costs only what is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Lengths are rounded up to a multiple of this, so that shapes and masks change rarely.
LENGTH_STEP = 32


class SlotCache:
    """``shapes`` is (kv_heads, dimensions of a key, of a value) a layer.

    All tensors start as zeros, so padding is finite.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, max_rows: int, max_length: int
    ) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self.rows = min(8, max_rows)
        self.length = min(LENGTH_STEP * 2, max_length)
        self._shapes = tuple(shapes)
        self._dtype = dtype
        # keys of layer 0, values of layer 0, keys of layer 1, ...
        self.tensors = [self._zeros(index) for index in range(2 * len(self._shapes))]

    def _zeros(self, index: int) -> torch.Tensor:
        heads, *sizes = self._shapes[index // 2]
        head_dim = sizes[index % 2]
        return torch.zeros(self.rows, heads, self.length, head_dim, dtype=self._dtype)

    def reserve(self, rows: int, length: int) -> bool:
        """Makes room for ``rows`` sequences of ``length`` tokens; True when the tensors were replaced."""
        if rows <= self.rows and length <= self.length:
            return False
        old_rows, old_length = self.rows, self.length
        while self.rows < rows:
            self.rows = min(self.rows * 2, self.max_rows)
        while self.length < length:
            self.length = min(self.length * 2, self.max_length)
        for index, old in enumerate(self.tensors):
            self.tensors[index] = self._zeros(index)
            self.tensors[index][:old_rows, :, :old_length] = old
        return True

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Row ``target`` gets the first ``length`` positions of row ``source``."""
        for tensor in self.tensors:
            tensor[target, :, :length] = tensor[source, :, :length]

    def zero_row(self, row: int) -> None:
        """Forgets a row whose values were not finite: masked, they would still poison the next user (0 * nan)."""
        for tensor in self.tensors:
            tensor[row].zero_()


def round_length(length: int, maximum: int) -> int:
    """``length`` rounded up to LENGTH_STEP, at most ``maximum``."""
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, maximum)
