"""The model wrapped for data parallelism, its optimizer and its learning-rate schedule: all Megatron's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ...config.schema import OptimizerConfig as OptimizerSection
from ...config.schema import RunConfig
from ...conversion.dtypes import torch_dtype
from ...conversion.families.registry import Family, ModelShape
from . import platform
from .model import build_model
from .parallel import Parallel, agree_largest

#: Elements of a gradient whose squares are summed up in float64 at once, which takes a copy of them.
_NORM_BLOCK = 1 << 22


@dataclass(frozen=True)
class Trainable:
    """What a step changes. ``chunks`` are the GPTModels inside ``wrapped``: one, or one a virtual stage."""

    chunks: tuple[GPTModel, ...]
    wrapped: tuple[DistributedDataParallel, ...]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    family: Family
    shape: ModelShape

    def zero_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def no_sync(self) -> contextlib.ExitStack:
        """While it is entered no backward starts a reduction: the last one is not the end of the gradient."""
        stack = contextlib.ExitStack()
        for chunk in self.wrapped:
            stack.enter_context(chunk.no_sync())
        return stack

    def overlapped_buckets(self) -> list[Any]:
        """Bucket groups whose reduction the step starts itself; none where Megatron does it all at the end."""
        if not self.wrapped[0].ddp_config.overlap_grad_reduce:
            return []
        return [b for chunk in self.wrapped for b in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]

    def gradients_are_finite(self) -> bool:
        """True when every gradient that this rank holds is finite."""
        buffers = [b for chunk in self.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        # extremes propagate NaN and take one pass; isfinite makes copies and takes 25 times as long on a CPU
        extremes = [torch.aminmax(buffer.grad_data) for buffer in buffers if buffer.grad_data.numel()]
        if not extremes:
            return True
        return bool(
            platform.read(torch.stack([bound.double() for pair in extremes for bound in pair])).isfinite().all()
        )

    def gradient_norm(self, parallel: Parallel) -> float:
        """Norm of the whole reduced gradient, before clipping, the same on all ranks; collective. inf where it is nan.

        In float64: Megatron's own, in fp32, is inf from 1.8e19 on, where it clips everything to 0, and 0 below 1e-22.
        """
        self.optimizer.prepare_grads()
        squares: dict[dist.ProcessGroup, torch.Tensor] = {}
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            own = squared_sum(optimizer.get_main_grads_for_grad_norm())
            group = optimizer.get_grad_stats_parallel_group()
            squares[group] = squares[group] + own if group in squares else own
        for group, total in squares.items():
            dist.all_reduce(total, group=group)
        whole = float(platform.read(torch.stack(list(squares.values()))).sum())
        norm = agree_largest(math.sqrt(whole), parallel)
        # what Megatron clips by: its own would read a number of every parameter where no fused kernel is installed
        self.optimizer.get_grad_norm = lambda: norm
        return norm

    def scheduled_learning_rate(self) -> float:
        """Learning rate of the step that is about to be taken, before ESS scales it."""
        (rate,) = {self.schedule.get_lr(group) for group in self.optimizer.param_groups}
        return rate

    def optimizer_step(self, learning_rate: float, largest_norm: float | None = None) -> None:
        """Clip, and step by ``learning_rate`` (decoupled weight decay follows it). ``largest_norm`` of this step's
        gradient, inf for none; None: ``optimizer.clip_grad``."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if largest_norm is not None:
            for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                optimizer.config.clip_grad = 0.0 if math.isinf(largest_norm) else largest_norm  # 0: not clipped
        self.optimizer.step()
        self.schedule.num_steps += 1


def squared_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of all squares, float64 scalar, on the device."""
    total = torch.zeros((), dtype=torch.float64, device=platform.device())
    for tensor in tensors:
        for block in tensor.reshape(-1).split(_NORM_BLOCK):
            total += block.double().square_().sum()
    return total


def build_trainable(config: RunConfig, parallel: Parallel, *, load: bool) -> Trainable:
    """Build model, DDP, optimizer and schedule; ``load`` reads the weights of ``model.path``."""
    chunks, family, shape = build_model(config, parallel, load=load)
    # Gradients are reduced once, after the last baseline is known: see Trainable.no_sync.
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.optimizer.overlap_grad_reduce,
        use_distributed_optimizer=config.optimizer.distributed,
    )
    wrapped = tuple(DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks)
    optimizer = get_megatron_optimizer(_optimizer_config(config), list(wrapped))
    return Trainable(tuple(chunks), wrapped, optimizer, _schedule(config, optimizer), family, shape)


def take_settings(trainable: Trainable, chosen: OptimizerSection) -> None:
    """Have the optimizer do as ``chosen`` says after its state was read: Megatron keeps rates, decay and Adam's numbers
    in that state, where those of the run that saved it are."""
    for group in trainable.optimizer.param_groups:
        group["max_lr"], group["min_lr"] = chosen.lr, chosen.min_lr
        group["betas"], group["eps"] = chosen.betas, chosen.eps
    trainable.schedule.step(0)  # sets rate and weight decay of every group


def _optimizer_config(config: RunConfig) -> OptimizerConfig:
    chosen = config.optimizer
    dtype = torch_dtype(config.model.dtype)
    return OptimizerConfig(
        optimizer="adam",
        lr=chosen.lr,
        min_lr=chosen.min_lr,
        weight_decay=chosen.weight_decay,
        adam_beta1=chosen.betas[0],
        adam_beta2=chosen.betas[1],
        adam_eps=chosen.eps,
        clip_grad=chosen.clip_grad,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=chosen.distributed,
        params_dtype=dtype,
    )


def _schedule(config: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    chosen = config.optimizer
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if chosen.warmup_steps else chosen.lr,
        max_lr=chosen.lr,
        min_lr=chosen.min_lr,
        lr_warmup_steps=chosen.warmup_steps,
        lr_decay_steps=(chosen.schedule_steps or config.train.steps) + 1,
        lr_decay_style={"wsd": "WSD"}.get(chosen.schedule, chosen.schedule),
        start_wd=chosen.weight_decay,
        end_wd=chosen.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=chosen.decay_steps,
        lr_wsd_decay_style="linear",
    )
    schedule.num_steps = 1  # counts the step about to be taken, so that a warm-up does not waste one at rate 0
    return schedule
