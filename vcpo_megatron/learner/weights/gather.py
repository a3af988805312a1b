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

from ..megatron.model import named_weights
from ..megatron.parallel import Parallel
from ..megatron.training import Trainable


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
            parallel.rank,
            parallel.data_rank,
            parallel.tensor_rank,
            parallel.expert_tensor_rank,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._own.items()},
        )
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

    def outline(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every HF tensor, in the order of ``gather``."""
        return self._trainable.family.outline(self._trainable.shape, self._trainable.chunks[0].config.params_dtype)

    def gather(
        self, value: Callable[[torch.nn.Parameter], torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, CPU tensor) on rank 0, in the order of the forward pass; nothing elsewhere.

        ``value`` picks what is gathered in place of everything that is stored: something of each parameter, all of
        one dtype, such as its gradient. Every rank must run the iterator to its end.
        """
        if value is None:
            return self.stream(lambda name: self._own[name].data, self._parallel.command_group)
        return self._stream(lambda name: value(self._own[name]), self._parallel.command_group, parameters_only=True)  # type: ignore[arg-type]

    def stream(
        self, shard: Callable[[str], torch.Tensor], group: dist.ProcessGroup | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``gather``: ``shard(Megatron name)`` is this rank's part, ``group`` is gloo's over all ranks."""
        return self._stream(shard, group, parameters_only=False)

    def _stream(
        self, shard: Callable[[str], torch.Tensor], group: dist.ProcessGroup | None, *, parameters_only: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        rank, family = self._parallel.rank, self._trainable.family
        for name, holders in self._plan:
            if parameters_only and family.place(name).rule.float32:
                continue  # no parameter
            if rank == 0:
                parts = []
                for holder in holders:
                    if holder.rank == 0:
                        parts.append(shard(name).detach().to("cpu"))
                        continue
                    shape, dtype = holder.parameters[name]
                    if parameters_only:
                        dtype = shard(next(iter(self._own))).dtype
                    parts.append(torch.empty(shape, dtype=dtype))
                    dist.recv(parts[-1], holder.rank, group=group)
                yield from family.to_hf(name, parts, self._trainable.shape)
            elif rank in {holder.rank for holder in holders}:
                dist.send(shard(name).detach().to("cpu").contiguous(), 0, group=group)
