"""What ranks are told of a checkpoint after it, or the model, has changed; run by ``world.run_world``."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.megatron import platform
from vcpo_megatron.types import Batch, PolicyVersion

from .run_starts import Run
from .world import leave_layout


def loads_after_changes(config: RunConfig, batches: list[Batch], run_dir: str, changes: list[str]) -> list[str]:
    """Save two checkpoints, then change one byte of each of ``changes`` in the second, one after the other (its size
    stays); what this rank is told when it loads that one, "" where it does."""
    platform.prepare()
    from vcpo_megatron.learner.checkpoint.checkpoints import Checkpoints
    from vcpo_megatron.learner.checkpoint.errors import CheckpointError
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep
    from vcpo_megatron.run.directory import RunDirectory

    parallel, directory = initialize(config), RunDirectory(Path(run_dir))
    trainable = build_trainable(config, parallel, load=True)
    step = VcpoStep(config, parallel, trainable)
    checkpoints = Checkpoints(config, directory, parallel, trainable)
    for number in (1, 2):
        step.run(batches[number - 1], PolicyVersion(1, number))
        checkpoints.start(number, PolicyVersion(1, number), step.ess_state, {})
        checkpoints.finished(wait=True)
    messages = []
    for name in ["", *changes]:
        path = directory.checkpoint(2) / name
        torch.distributed.barrier()
        whole = path.read_bytes() if name else b""
        torch.distributed.barrier()
        if name and parallel.rank == 0:
            middle = len(whole) // 2
            path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        torch.distributed.barrier()
        try:
            checkpoints.load(2)
            messages.append("")
        except CheckpointError as error:
            messages.append(str(error))
        torch.distributed.barrier()
        if name and parallel.rank == 0:
            path.write_bytes(whole)
    messages += _other_models(config, directory, parallel, trainable)
    leave_layout()
    return messages


def _other_models(config: RunConfig, directory: Any, parallel: Any, trainable: Any) -> list[str]:
    """What this rank is told of checkpoint 2 with: another rope of the same shapes; other initial weights of the same
    size; another width."""
    from vcpo_megatron.learner.checkpoint.checkpoints import Checkpoints
    from vcpo_megatron.learner.checkpoint.errors import CheckpointError

    def told(shape: Any) -> str:
        torch.distributed.barrier()
        try:
            Checkpoints(config, directory, parallel, replace(trainable, shape=shape)).load(2)
            return ""
        except CheckpointError as error:
            return str(error)
        finally:
            torch.distributed.barrier()

    shape = trainable.shape
    other = replace(shape, rope=replace(shape.rope, theta=123.0), norm_eps=0.5)
    messages = [told(other)]
    weights = config.model.path / "model.safetensors"
    if parallel.rank == 0:
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    messages.append(told(shape))
    if parallel.rank == 0:
        weights.write_bytes(whole)
    return [*messages, told(replace(shape, hidden_size=7))]


def host_bytes(cases: list[tuple[RunConfig, list[Batch]]], run_dir: str) -> list[list[tuple[int, int, int]]]:
    """For each case and rank: the parameters of its shard, and the most bytes of tensors that were alive at a time
    beside what there was before: in the copy that a save makes, and in a load."""
    platform.prepare()
    from benchmarks.step import peak_bytes

    found: list[list[tuple[int, int, int]]] = []
    for number, (config, batches) in enumerate(cases):
        run = Run(config, f"{run_dir}/{number}", load=True)
        for batch in batches:
            run.step.run(batch, PolicyVersion(1, batch.step + 1))

        def save(_: str, run: Run = run) -> float:
            run.checkpoints.start(1, PolicyVersion(1, 1), run.step.ess_state, {})
            return 0.0

        def load(_: str, run: Run = run) -> float:
            run.checkpoints.load(1)
            return 0.0

        gc.collect()  # what a step left is not to be freed, and so taken off, while a copy is made
        saving = peak_bytes("save", save)
        run.checkpoints.finished(wait=True)
        torch.distributed.barrier()  # rank 0 has written the manifest
        parameters = sum(p.numel() for chunk in run.trainable.chunks for p in chunk.parameters())
        ranks: list[Any] = [None] * run.parallel.world_size
        gc.collect()
        torch.distributed.all_gather_object(ranks, (parameters, saving, peak_bytes("load", load)))
        found.append(ranks)
        leave_layout()
    return found
