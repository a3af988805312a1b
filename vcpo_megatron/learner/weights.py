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

from .model import global_name
from .parallel import Parallel
from .training import Trainable


@dataclass(frozen=True)
class _Shard:
    """Where one rank's parameters are, and their order and shapes."""

    rank: int
    data_rank: int
    pipeline_rank: int
    tensor_rank: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]


class WeightGatherer:
    """Collective over all ranks: built once, called alike everywhere."""

    def __init__(self, trainable: Trainable, parallel: Parallel) -> None:
        self._trainable = trainable
        self._parallel = parallel
        self._parameters = [(global_name(trainable.model, n), p) for n, p in trainable.model.named_parameters()]
        mine = _Shard(
            parallel.rank, parallel.data_rank, parallel.pipeline_rank, parallel.tensor_rank,
            tuple((name, tuple(p.shape)) for name, p in self._parameters),
        )  # fmt: skip
        everyone: list[_Shard] = [mine] * parallel.world_size
        dist.all_gather_object(everyone, mine, group=parallel.command_group)
        replica = [shard for shard in everyone if shard.data_rank == 0]
        self._stages = [
            sorted((s for s in replica if s.pipeline_rank == stage), key=lambda s: s.tensor_rank)
            for stage in range(parallel.pipeline_size)
        ]

    def gather(
        self, value: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.data
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, CPU tensor) on rank 0, in the order of the forward pass; nothing elsewhere.

        ``value`` picks what is gathered: the parameter, or its gradient. Every rank must run the
        iterator to its end.
        """
        own = dict(self._parameters)
        for stage in self._stages:
            for position, (name, _) in enumerate(stage[0].parameters):
                cut = self._trainable.family.partition_dim(name) is not None
                holders = stage if cut else stage[:1]
                if self._parallel.rank == 0:
                    parts = [self._fetch(holder, own, position, value) for holder in holders]
                    yield from self._trainable.family.to_hf(name, parts, self._trainable.shape)
                elif self._parallel.rank in {holder.rank for holder in holders}:
                    shard = value(own[name]).detach().to("cpu").contiguous()
                    dist.send(shard, 0, group=self._parallel.command_group)

    def _fetch(
        self, holder: _Shard, own: dict[str, torch.nn.Parameter], position: int,
        value: Callable[[torch.nn.Parameter], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        name, shape = holder.parameters[position]
        if holder.rank == 0:
            return value(own[name]).detach().to("cpu")
        dtype = value(self._parameters[0][1]).dtype
        received = torch.empty(shape, dtype=dtype)
        dist.recv(received, holder.rank, group=self._parallel.command_group)
        return received
