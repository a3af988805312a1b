"""Process groups of the learner: Megatron's own, and the few that the method adds.

Ranks that work on the same trajectories, or on the same experts at the same time, form a replica:

    replica      TP x CP x PP x expert-data ranks; a group's trajectories live on one replica
    expert-data  data-parallel ranks of one replica; 1 without expert parallelism. Experts hold tokens of
                 all of them, so all of them work on the same group in the same micro-step.
                 (Not Megatron's expert-data-parallel group, whose ranks hold the same experts.)

    command     gloo, all ranks: commands and batches from rank 0, agreed numbers
    statistics  gloo, the replica's ranks: squared gradient norms of a group are summed here
    replica     gloo, the same ranks: whether a step is aborted between two micro-batches
    log_ratio, tied  gloo, the pipeline's ranks: from the last stage to each earlier one l_i, before that pack's
                backward; and rows of the output layer's gradient to the first stage where it is tied to the embedding
    expert-data  l_i of one micro-step
    expert_split  ranks of the replica that hold the same experts and different tokens

Groups of gloo carry tensors of the host, and what a stage sends to another ahead of a need of it (``host_exchange``);
all others are the device's, NCCL's on GPUs. Those of more than one stage carry nothing but Megatron's own messages in
the order of its schedule, and sums behind it. NCCL makes a communicator when it is used first and holds up the host
until all its ranks use it, in whatever order stages come to that: ``initialize`` uses each once, in one order.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch.distributed import distributed_c10d

from ...config.schema import RunConfig
from ..batch.packing import Share
from . import platform
from .stage_messages import connect_stages


@dataclass(frozen=True)
class Parallel:
    """Coordinates of this rank and the groups it is in."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    pipeline_rank: int
    pipeline_size: int
    virtual_size: int
    data_rank: int
    data_size: int
    expert_tensor_rank: int
    expert_tensor_size: int
    expert_data_size: int
    sequence_parallel: bool
    tensor_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    tensor_context_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    command_group: dist.ProcessGroup
    statistics_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    replica_size: int
    is_first_of_replica: bool
    log_ratio_group: dist.ProcessGroup
    tied_group: dist.ProcessGroup
    expert_data_group: dist.ProcessGroup
    expert_split_group: dist.ProcessGroup

    @property
    def layout(self) -> str:
        """For a reader of the log."""
        sizes = {
            "data": self.data_size,
            "tensor": self.tensor_size,
            "context": self.context_size,
            "pipeline": self.pipeline_size,
            "virtual stages": self.virtual_size,
        }
        return f"{self.world_size} ranks: " + ", ".join(f"{name} {size}" for name, size in sizes.items())

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def replica(self) -> int:
        """Number of this rank's replica."""
        return self.data_rank // self.expert_data_size

    @property
    def replicas(self) -> int:
        return self.data_size // self.expert_data_size

    @property
    def expert_data_rank(self) -> int:
        return self.data_rank % self.expert_data_size

    @property
    def share(self) -> Share:
        """How packs are cut for this rank."""
        return Share(self.context_rank, self.context_size, self.tensor_size if self.sequence_parallel else 1)

    @property
    def steps_multiple(self) -> int:
        """Micro-batches of a schedule must be a multiple of this (the interleaved schedule's rule)."""
        return self.pipeline_size if self.virtual_size > 1 else 1

    @property
    def reports_trajectories(self) -> bool:
        """True on one rank a data-parallel rank: the one that reports what all that share its packs agree on."""
        return self.tensor_rank == 0 and self.context_rank == 0 and self.is_last_stage

    def stage_global_rank(self, stage: int) -> int:
        """Global rank of pipeline stage ``stage`` with this rank's other coordinates."""
        return dist.get_global_rank(self.pipeline_group, stage)


def initialize(config: RunConfig) -> Parallel:
    """Join the world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and build every group."""
    timeout = datetime.timedelta(seconds=config.launch.timeout_s)
    chosen = config.parallel
    if not dist.is_initialized():
        # with a device NCCL makes the communicators of all groups at once, where they are built
        bound = platform.device() if platform.has_gpu() else None
        dist.init_process_group(platform.backend(), timeout=timeout, device_id=bound)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=chosen.tensor,
        pipeline_model_parallel_size=chosen.pipeline,
        virtual_pipeline_model_parallel_size=chosen.virtual_pipeline if chosen.virtual_pipeline > 1 else None,
        context_parallel_size=chosen.context,
        expert_model_parallel_size=chosen.expert,
        expert_tensor_parallel_size=chosen.expert_tensor,
        distributed_timeout_minutes=config.launch.timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed + 1)
    rank, world = dist.get_rank(), dist.get_world_size()
    dense = chosen.tensor * chosen.context
    block = dense * config.expert_data_size  # neighbours, in Megatron's order of ranks
    stage = world // chosen.pipeline
    first = rank % stage // block * block
    in_stage = range(first, first + block)
    replica = tuple(s * stage + r for s in range(chosen.pipeline) for r in in_stage)
    own_stage = rank // stage * stage
    expert_data = tuple(own_stage + r for r in in_stage if (r - rank) % dense == 0)
    same_experts = set(dist.get_process_group_ranks(mpu.get_expert_data_parallel_group()))
    pipeline = tuple(dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group()))
    parallel = Parallel(
        rank=rank,
        world_size=world,
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        tensor_size=chosen.tensor,
        context_rank=mpu.get_context_parallel_rank(),
        context_size=chosen.context,
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        pipeline_size=chosen.pipeline,
        virtual_size=chosen.virtual_pipeline,
        data_rank=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        expert_tensor_rank=mpu.get_expert_tensor_parallel_rank(),
        expert_tensor_size=chosen.expert_tensor,
        expert_data_size=config.expert_data_size,
        sequence_parallel=chosen.sequence_parallel and chosen.tensor > 1,
        tensor_group=mpu.get_tensor_model_parallel_group(),
        context_group=mpu.get_context_parallel_group(),
        tensor_context_group=mpu.get_tensor_and_context_parallel_group(),
        pipeline_group=mpu.get_pipeline_model_parallel_group(),
        command_group=dist.new_group(backend="gloo", timeout=timeout),
        statistics_group=_group_of(replica, timeout, backend="gloo"),
        replica_group=_group_of(replica, timeout, backend="gloo"),
        replica_size=len(replica),
        is_first_of_replica=rank == replica[0],
        log_ratio_group=_group_of(pipeline, timeout, backend="gloo"),
        tied_group=_group_of(pipeline, timeout, backend="gloo"),
        expert_data_group=_group_of(expert_data, timeout),
        expert_split_group=_group_of(tuple(r for r in replica if r in same_experts), timeout),
    )
    _connect(parallel)
    return parallel


def _connect(parallel: Parallel) -> None:
    """Use every communicator of the device once: groups in the order in which all ranks have made them, then pairs of
    stages."""
    for group in list(distributed_c10d._world.pg_map):
        if group.size() > 1 and dist.get_backend(group) == platform.backend():
            dist.all_reduce(torch.zeros(1, device=platform.device()), group=group)
    if parallel.pipeline_size > 1:
        connect_stages(parallel.pipeline_group, interleaved=parallel.virtual_size > 1)


def _group_of(mine: tuple[int, ...], timeout: datetime.timedelta, *, backend: str | None = None) -> dist.ProcessGroup:
    """A new communicator over this rank's ``mine``; called alike on all ranks, whose sets must not overlap."""
    members = [mine] * dist.get_world_size()
    dist.all_gather_object(members, mine)
    own = None
    for ranks in sorted(set(members)):  # every rank creates every group, in one order
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if ranks == mine:
            own = group
    assert own is not None
    return own


def agree_sum(table: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Sum a CPU tensor over all ranks, in place; every rank then holds the same bits."""
    dist.all_reduce(table, group=parallel.command_group)
    return table


def agree_largest(value: float, parallel: Parallel) -> float:
    """The largest ``value`` of all ranks; infinite where any rank's is nan."""
    largest = torch.tensor(math.inf if math.isnan(value) else value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel.command_group)
    return float(largest)


def agree_equal(value: float, name: str, parallel: Parallel) -> float:
    """``value``, when all ranks have it; RuntimeError, naming it, when they do not."""
    pair = torch.tensor([value, -value], dtype=torch.float64)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=parallel.command_group)
    if pair[0] != value or pair[1] != -value:
        raise RuntimeError(f"{name} differ between ranks: {-pair[1].item()} to {pair[0].item()}")
    return value


def destroy() -> None:
    """Leave the world."""
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
