"""How HF tensors become the tensor-parallel shard of one Megatron parameter, and back.

An op is a pair of inverse functions and the dimension that tensor parallelism cuts:

    to_shard(tensors, shape, rank, size, padded_vocab) -> Tensor       HF tensors -> shard of one TP rank
    to_hf(shards, shape) -> list[Tensor]                               shards of all TP ranks -> HF tensors

They know sizes (``ModelShape``) but no names; names are in the tables. All results are contiguous and
own their memory, so that a shard does not keep the whole tensor alive, or are one of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..models.shape import ModelShape
from .errors import ConversionError


class Op(Protocol):
    """``partition_dim`` is the dimension cut by tensor parallelism, None for a replicated parameter."""

    @property
    def partition_dim(self) -> int | None: ...

    def to_shard(
        self, tensors: Sequence[Tensor], shape: ModelShape, rank: int, size: int, padded_vocab: int
    ) -> Tensor: ...

    def to_hf(self, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]: ...


@dataclass(frozen=True)
class Replicate:
    """One HF tensor, the same on every rank (norm weights)."""

    partition_dim: int | None = None

    def to_shard(self, tensors: Sequence[Tensor], shape: ModelShape, rank: int, size: int, padded_vocab: int) -> Tensor:
        return tensors[0].clone()

    def to_hf(self, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Cut:
    """One HF tensor, cut into equal parts along ``partition_dim``: 0 column parallel, 1 row parallel."""

    partition_dim: int

    def to_shard(self, tensors: Sequence[Tensor], shape: ModelShape, rank: int, size: int, padded_vocab: int) -> Tensor:
        return part(tensors[0], self.partition_dim, rank, size)

    def to_hf(self, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
        return [joined(shards, self.partition_dim)]


@dataclass(frozen=True)
class VocabRows:
    """Rows of a vocabulary, padded with zero rows to ``padded_vocab``, then cut; the padding is dropped again."""

    partition_dim: int = 0

    def to_shard(self, tensors: Sequence[Tensor], shape: ModelShape, rank: int, size: int, padded_vocab: int) -> Tensor:
        rows = divided(padded_vocab, size, "padded vocabulary")
        shard = tensors[0].new_zeros((rows, *tensors[0].shape[1:]))
        own = tensors[0][rank * rows : (rank + 1) * rows]
        shard[: len(own)] = own
        return shard

    def to_hf(self, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
        rows = len(shards[0])
        return [joined([shard[: max(0, shape.vocab_size - i * rows)] for i, shard in enumerate(shards)])]


@dataclass(frozen=True)
class QkvByGroup:
    """q, k, v stacked by query group, [q ... q k v] for each key head, then cut by rows: weights and biases."""

    partition_dim: int = 0

    def to_shard(self, tensors: Sequence[Tensor], shape: ModelShape, rank: int, size: int, padded_vocab: int) -> Tensor:
        groups = [tensor.reshape(shape.num_key_value_heads, -1, *tensor.shape[1:]) for tensor in tensors]
        if shape.num_key_value_heads % size == 0:  # whole groups a rank: nothing else need be put together
            own = shape.num_key_value_heads // size
            return torch.cat([group[rank * own : (rank + 1) * own] for group in groups], dim=1).flatten(0, 1)
        return part(torch.cat(groups, dim=1).flatten(0, 1), 0, rank, size)

    def to_hf(self, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
        stacked = joined(shards)
        groups = stacked.reshape(shape.num_key_value_heads, -1, *stacked.shape[1:])
        sizes = [shape.queries_per_group * shape.head_dim, shape.head_dim, shape.head_dim]
        return [piece.flatten(0, 1).contiguous() for piece in groups.split(sizes, dim=1)]


@dataclass(frozen=True)
class GateUp:
    """gate and up, each cut by rows, fused on every rank as [gate_r; up_r]."""

    partition_dim: int = 0

    def to_shard(self, tensors: Sequence[Tensor], shape: ModelShape, rank: int, size: int, padded_vocab: int) -> Tensor:
        return torch.cat([part(tensor, 0, rank, size) for tensor in tensors])

    def to_hf(self, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]


def joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The shards along ``dim``, in memory of its own: one that is whole is left as it is, an embedding is large."""
    if len(shards) == 1 and shards[0].untyped_storage().nbytes() == shards[0].nbytes:
        return shards[0]
    return torch.cat(list(shards), dim=dim)


def part(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Part ``rank`` of ``size`` equal ones along ``dim``, as a copy."""
    length = divided(tensor.shape[dim], size, f"dimension {dim} of a tensor of shape {list(tensor.shape)}")
    return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)


def divided(length: int, size: int, what: str) -> int:
    """length / size; raises ConversionError when it is not whole."""
    if length % size:
        raise ConversionError(f"{what} ({length}) cannot be cut into {size} equal tensor-parallel parts")
    return length // size
