"""The whole model as Hugging Face tensors on rank 0, one parameter at a time.

Each shard of a parameter is sent by the first rank that holds it, in one global order; rank 0 puts the
shards of one parameter together and renames them: no rank ever holds more than its own part and one whole
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .model import global_name, is_expert
from .parallel import Parallel
from .training import Trainable


@dataclass(frozen=True)
class _Shard:
    """One rank's part of one parameter: ``part`` is its number among the tensor-parallel ranks."""

    rank: int
    part: int
    shape: tuple[int, ...]


class WeightGatherer:
    """Collective over all ranks: built once, called alike everywhere."""

    def __init__(self, trainable: Trainable, parallel: Parallel) -> None:
        self._trainable = trainable
        self._parallel = parallel
        self._own: dict[str, torch.nn.Parameter] = {}
        mine: list[tuple[int, int, str, _Shard]] = []
        for number, chunk in enumerate(trainable.chunks):
            for name, parameter in chunk.named_parameters():
                name = global_name(chunk, name)
                self._own[name] = parameter
                part = parallel.expert_tensor_rank if is_expert(name) else parallel.tensor_rank
                shard = _Shard(parallel.rank, part, tuple(parameter.shape))
                mine.append((number, parallel.pipeline_rank, name, shard))
        everyone = [mine] * parallel.world_size
        dist.all_gather_object(everyone, mine, group=parallel.command_group)
        held = sorted((entry for rank in everyone for entry in rank), key=lambda entry: entry[:2])
        self._holders: dict[str, list[_Shard]] = {}  # in order of the forward pass
        for _, _, name, shard in held:
            holders = self._holders.setdefault(name, [])
            if shard.part not in {holder.part for holder in holders}:
                holders.append(shard)
        for name, holders in self._holders.items():
            holders.sort(key=lambda holder: holder.part)
            if trainable.family.partition_dim(name) is None:
                del holders[1:]

    def gather(
        self, value: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.data
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, CPU tensor) on rank 0, in the order of the forward pass; nothing elsewhere.

        ``value`` picks what is gathered: the parameter, or its gradient. Every rank must run the
        iterator to its end.
        """
        for name, holders in self._holders.items():
            if self._parallel.rank == 0:
                parts = [self._fetch(name, holder, value) for holder in holders]
                yield from self._trainable.family.to_hf(name, parts, self._trainable.shape)
            elif self._parallel.rank in {holder.rank for holder in holders}:
                shard = value(self._own[name]).detach().to("cpu").contiguous()
                dist.send(shard, 0, group=self._parallel.command_group)

    def _fetch(
        self, name: str, holder: _Shard, value: Callable[[torch.nn.Parameter], torch.Tensor]
    ) -> torch.Tensor:  # fmt: skip
        if holder.rank == 0:
            return value(self._own[name]).detach().to("cpu")
        dtype = value(next(iter(self._own.values()))).dtype
        received = torch.empty(holder.shape, dtype=dtype)
        dist.recv(received, holder.rank, group=self._parallel.command_group)
        return received
