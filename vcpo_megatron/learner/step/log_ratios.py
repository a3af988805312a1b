"""How l_i reaches everyone whose backward needs it.

Known on the last pipeline stage after a pack's forward, summed over context-parallel ranks. Ranks that share
experts exchange those of a micro-step there; then they travel to every earlier stage, a few doubles that
arrive long before that pack's backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..batch.packing import Pack
from ..megatron.parallel import Parallel


class LogRatioExchange:
    """The messages of one rank; ``finish_step`` waits until all sends are complete."""

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self._parallel = parallel
        self._device = device
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []

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

    def send(self, log_ratio: torch.Tensor) -> None:
        """Last stage -> every earlier one: l of a micro-step."""
        message = log_ratio
        for stage in range(self._parallel.pipeline_size - 1):
            self.keep(dist.isend(message, self._stage(stage), group=self._parallel.log_ratio_group), message)

    def receive(self, pack: Pack) -> tuple[dist.Work | None, torch.Tensor]:
        """On an earlier stage, in the order of the packs' forwards: wait for the work before reading."""
        log_ratio = torch.empty(len(pack.step_samples), dtype=torch.float64, device=self._device)
        last = self._stage(self._parallel.pipeline_size - 1)
        return dist.irecv(log_ratio, last, group=self._parallel.log_ratio_group), log_ratio

    def keep(self, work: dist.Work | None, message: torch.Tensor) -> None:
        """Hold a message until its send is complete."""
        assert work is not None
        self._sends.append((work, message))

    def finish_step(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _stage(self, stage: int) -> int:
        return self._parallel.stage_global_rank(stage)
