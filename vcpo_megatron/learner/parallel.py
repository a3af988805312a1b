"""Process groups of the learner: Megatron's own, and the few that the method adds.

command     gloo, all ranks: commands and batches from rank 0, agreed numbers (CPU tensors)
statistics  this replica's TP x PP x CP ranks: squared gradient norms of a group are summed here
log_ratio   from the last pipeline stage to each earlier one: l_i, before that pack's backward
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from ..config.models import RunConfig
from . import platform


@dataclass(frozen=True)
class Parallel:
    """Coordinates of this rank and the groups it is in."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    expert_tensor_rank: int
    expert_tensor_size: int
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    command_group: dist.ProcessGroup
    statistics_group: dist.ProcessGroup
    log_ratio_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_size * self.pipeline_size

    @property
    def speaks_for_replica(self) -> bool:
        """True on one rank a replica: the one that reports what the whole replica agrees on."""
        return self.tensor_rank == 0 and self.is_last_stage

    def stage_global_rank(self, stage: int) -> int:
        """Global rank of pipeline stage ``stage`` with this rank's tensor and data coordinates."""
        return dist.get_global_rank(self.pipeline_group, stage)


def initialize(config: RunConfig) -> Parallel:
    """Join the world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and build every group."""
    timeout = datetime.timedelta(seconds=config.launch.timeout_s)
    if not dist.is_initialized():
        dist.init_process_group(platform.backend(), timeout=timeout)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tensor,
        pipeline_model_parallel_size=config.parallel.pipeline,
        expert_model_parallel_size=config.parallel.expert,
        expert_tensor_parallel_size=config.parallel.expert_tensor,
        distributed_timeout_minutes=config.launch.timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed + 1)
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        tensor_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        pipeline_size=mpu.get_pipeline_model_parallel_world_size(),
        data_rank=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        expert_tensor_rank=mpu.get_expert_tensor_parallel_rank(),
        expert_tensor_size=mpu.get_expert_tensor_parallel_world_size(),
        tensor_group=mpu.get_tensor_model_parallel_group(),
        pipeline_group=mpu.get_pipeline_model_parallel_group(),
        command_group=dist.new_group(backend="gloo", timeout=timeout),
        statistics_group=mpu.get_model_parallel_group(),
        log_ratio_group=_own_copy_of_pipeline_groups(timeout),
    )


def _own_copy_of_pipeline_groups(timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A second communicator over the pipeline ranks, so that l_i never mixes with activations."""
    mine_now = tuple(dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group()))
    members = [mine_now] * dist.get_world_size()
    dist.all_gather_object(members, mine_now)
    mine = None
    for ranks in sorted(set(members)):  # every rank creates every group, in one order
        group = dist.new_group(list(ranks), timeout=timeout)
        if ranks == mine_now:
            mine = group
    assert mine is not None
    return mine


def agree_sum(table: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Sum a CPU tensor over all ranks, in place; every rank then holds the same bits."""
    dist.all_reduce(table, group=parallel.command_group)
    return table


def destroy() -> None:
    """Leave the world."""
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
