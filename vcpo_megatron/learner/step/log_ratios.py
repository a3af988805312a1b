"""How l_i reaches everyone whose backward needs it.

Known on the last pipeline stage after a pack's forward, summed over context-parallel ranks. Ranks that share
experts exchange those of a micro-step there; then they travel to every earlier stage, from host to host, a few doubles
that arrive long before that pack's backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..batch.packing import Pack
from ..megatron import platform
from ..megatron.host_exchange import Arriving, HostExchange
from ..megatron.parallel import Parallel


class LogRatioExchange:
    """Sums and messages of one rank."""

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self._parallel = parallel
        self._device = device

    def sum_over_context(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over the tokens of this rank -> over those of all context-parallel ranks."""
        if self._parallel.context_size > 1:
            sums = sums.contiguous()
            dist.all_reduce(sums, group=self._parallel.context_group)
        return sums

    def max_over_context(self, largest: torch.Tensor) -> torch.Tensor:
        """Largest over the tokens of this rank -> over those of all context-parallel ranks."""
        if self._parallel.context_size > 1:
            largest = largest.contiguous()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._parallel.context_group)
        return largest

    def of_step(self, pack: Pack, own: torch.Tensor) -> torch.Tensor:
        """l of this rank's trajectories -> of the micro-step's, float64, both on the device."""
        if self._parallel.expert_data_size == 1:
            return own
        every = torch.zeros(len(pack.step_samples), dtype=torch.float64, device=self._device)
        every[pack.offset : pack.offset + len(own)] = own
        dist.all_reduce(every, group=self._parallel.expert_data_group)
        return every

    def send(self, exchange: HostExchange, pack: Pack, copy: platform.HostCopy, part: slice) -> None:
        """Last stage -> every earlier one: l of a micro-step, ``part`` of a copy."""
        parallel = self._parallel
        earlier = [parallel.stage_global_rank(stage) for stage in range(parallel.pipeline_size - 1)]
        exchange.send(copy, earlier, parallel.log_ratio_group, _name(pack), part)

    def receive(self, exchange: HostExchange, pack: Pack) -> Arriving:
        """On an earlier stage, in the order of the packs' forwards: float64 [n], on the host."""
        parallel = self._parallel
        last = parallel.stage_global_rank(parallel.pipeline_size - 1)
        shape = (len(pack.step_samples),)
        return exchange.receive(shape, torch.float64, last, parallel.log_ratio_group, _name(pack))


def _name(pack: Pack) -> str:
    return f"log ratios of trajectories {pack.step_index} of the batch, which the last pipeline stage sends"
