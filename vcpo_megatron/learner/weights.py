"""The whole model as Hugging Face tensors on rank 0, one parameter at a time.

The ranks of data-parallel replica 0 send their shards in one global order (stage by stage, parameter
by parameter), rank 0 puts the shards of one parameter together and renames them: no rank ever holds
more than its own part and one whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .model import named_weights
from .parallel import Parallel
from .training import Trainable


@dataclass(frozen=True)
class _Held:
    """What one rank holds: its coordinates, and shape and dtype of each of its parameters."""

    rank: int
    data_rank: int
    tensor_rank: int
    expert_tensor_rank: int
    parameters: dict[str, tuple[tuple[int, ...], torch.dtype]]


class WeightGatherer:
    """Collective over all ranks: built once, called alike everywhere."""

    def __init__(self, trainable: Trainable, parallel: Parallel) -> None:
        self._trainable = trainable
        self._parallel = parallel
        self._own = {name: tensor for chunk in trainable.chunks for name, tensor in named_weights(chunk).items()}
        mine = _Held(
            parallel.rank, parallel.data_rank, parallel.tensor_rank, parallel.expert_tensor_rank,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._own.items()},
        )  # fmt: skip
        everyone: list[_Held] = [mine] * parallel.world_size
        dist.all_gather_object(everyone, mine, group=parallel.command_group)
        names = trainable.family.megatron_names(trainable.shape)
        self._plan = [(name, self._holders(name, everyone)) for name in names]

    def _holders(self, name: str, everyone: list[_Held]) -> list[_Held]:
        """The ranks whose shards make up one parameter, in order; the first of several that hold the same."""
        family = self._trainable.family
        expert = family.is_expert(name)
        first: dict[int, _Held] = {}
        for held in everyone:
            if name in held.parameters and (expert or held.data_rank == 0):
                first.setdefault(held.expert_tensor_rank if expert else held.tensor_rank, held)
        holders = [first[part] for part in sorted(first)]
        return holders if family.partition_dim(name) is not None else holders[:1]

    def gather(
        self, value: Callable[[torch.nn.Parameter], torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, CPU tensor) on rank 0, in the order of the forward pass; nothing elsewhere.

        ``value`` picks what is gathered in place of everything that is stored: something of each parameter, all of
        one dtype, such as its gradient. Every rank must run the iterator to its end.
        """
        for name, holders in self._plan:
            if value is not None and self._trainable.family.place(name).row.float32:
                continue  # no parameter
            if self._parallel.rank == 0:
                parts = [self._fetch(holder, name, value) for holder in holders]
                yield from self._trainable.family.to_hf(name, parts, self._trainable.shape)
            elif self._parallel.rank in {holder.rank for holder in holders}:
                shard = self._picked(name, value).contiguous()
                dist.send(shard, 0, group=self._parallel.command_group)

    def _picked(self, name: str, value: Callable[[torch.nn.Parameter], torch.Tensor] | None) -> torch.Tensor:
        own = self._own[name]
        return (own.data if value is None else value(own)).detach().to("cpu")  # type: ignore[arg-type]

    def _fetch(
        self, holder: _Held, name: str, value: Callable[[torch.nn.Parameter], torch.Tensor] | None
    ) -> torch.Tensor:
        if holder.rank == 0:
            return self._picked(name, value)
        shape, dtype = holder.parameters[name]
        if value is not None:
            dtype = self._picked(next(iter(self._own)), value).dtype
        received = torch.empty(shape, dtype=dtype)
        dist.recv(received, holder.rank, group=self._parallel.command_group)
        return received
