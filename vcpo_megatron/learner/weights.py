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
class _Held:
    """What one rank holds: its coordinates, and the shape of each of its parameters."""

    rank: int
    data_rank: int
    tensor_rank: int
    expert_tensor_rank: int
    parameters: dict[str, tuple[int, ...]]


class WeightGatherer:
    """Collective over all ranks: built once, called alike everywhere."""

    def __init__(self, trainable: Trainable, parallel: Parallel) -> None:
        self._trainable = trainable
        self._parallel = parallel
        self._own = {global_name(c, n): p for c in trainable.chunks for n, p in c.named_parameters()}
        mine = _Held(
            parallel.rank, parallel.data_rank, parallel.tensor_rank, parallel.expert_tensor_rank,
            {name: tuple(parameter.shape) for name, parameter in self._own.items()},
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

    def shards(self) -> dict[str, torch.Tensor]:
        """What a gather takes from this rank: its parameters by Megatron name, not copied."""
        rank = self._parallel.rank
        return {
            name: self._own[name].data for name, holders in self._plan if rank in {holder.rank for holder in holders}
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """HF names and shapes in the order of ``gather``."""
        family, shape = self._trainable.family, self._trainable.shape
        return {hf: size for name, _ in self._plan for hf, size in family.sources(name, shape).items()}

    def gather(
        self, value: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.data
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, CPU tensor) on rank 0, in the order of the forward pass; nothing elsewhere.

        ``value`` picks what is gathered: the parameter, or its gradient. Every rank must run the
        iterator to its end.
        """
        return self.stream(lambda name: value(self._own[name]), self._parallel.command_group)

    def stream(
        self, shard: Callable[[str], torch.Tensor], group: dist.ProcessGroup | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``gather``: ``shard(Megatron name)`` is this rank's part, ``group`` is gloo's over all ranks."""
        rank = self._parallel.rank
        for name, holders in self._plan:
            if rank == 0:
                parts = [self._fetch(holder, name, shard, group) for holder in holders]
                yield from self._trainable.family.to_hf(name, parts, self._trainable.shape)
            elif rank in {holder.rank for holder in holders}:
                dist.send(shard(name).detach().to("cpu").contiguous(), 0, group=group)

    def _fetch(
        self, holder: _Held, name: str, shard: Callable[[str], torch.Tensor], group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        if holder.rank == 0:
            return shard(name).detach().to("cpu")
        received = torch.empty(holder.parameters[name], dtype=shard(next(iter(self._own))).dtype)
        dist.recv(received, holder.rank, group=group)
        return received
