"""Runs that start from the checkpoint of another, and resumes by other settings; executed by ``run_world``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.megatron import platform
from vcpo_megatron.types import Batch, PolicyVersion

from .world import leave_layout


class Run:
    """One layout: what a learner rank builds before its first command."""

    def __init__(self, config: RunConfig, folder: str, *, load: bool) -> None:
        from vcpo_megatron.learner.checkpoint.checkpoints import Checkpoints
        from vcpo_megatron.learner.megatron.parallel import initialize
        from vcpo_megatron.learner.megatron.training import build_trainable
        from vcpo_megatron.learner.step.vcpo_step import VcpoStep
        from vcpo_megatron.learner.weights.gather import WeightGatherer
        from vcpo_megatron.run.directory import RunDirectory

        self.directory = RunDirectory(Path(folder))
        self.parallel = initialize(config)
        self.trainable = build_trainable(config, self.parallel, load=load)
        self.step = VcpoStep(config, self.parallel, self.trainable)
        self.checkpoints = Checkpoints(config, self.directory, self.parallel, self.trainable)
        self.gatherer = WeightGatherer(self.trainable, self.parallel)

    def parameters(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.gatherer.gather()}

    def take(self, batch: Batch, number: int) -> dict[str, Any]:
        """One step; its metrics and the parameters after it."""
        result = self.step.run(batch, PolicyVersion(1, number))
        assert result is not None
        return {"metrics": dict(result.metrics), "parameters": self.parameters()}


def save(config: RunConfig, batches: list[Batch], folder: str) -> dict[str, Any]:
    """A step, a checkpoint and an export; what was saved, and the step after it."""
    platform.prepare()
    from vcpo_megatron.learner.checkpoint.exports import Exports

    run = Run(config, folder, load=True)
    run.take(batches[0], 1)
    run.checkpoints.start(1, PolicyVersion(1, 1), run.step.ess_state, {})
    run.checkpoints.finished(wait=True)
    Exports(config, run.directory, run.parallel, run.trainable, run.gatherer).write(1)
    saved = {"saved": run.parameters(), "next": run.take(batches[1], 2)}
    leave_layout()
    return saved


def start_each(configs: list[RunConfig], batch: Batch, folder: str) -> list[dict[str, Any]]:
    """In each: the weights after the start from ``train.start_from``, or from ``model.path``; and a step from there.
    "refused" holds what is said where it cannot start; "kl" is of that step."""
    platform.prepare()
    from vcpo_megatron.learner.checkpoint.errors import CheckpointError

    outcomes = []
    for config in configs:
        start = config.train.start_from
        run = Run(config, folder, load=start is None or config.algorithm.kl_reference == "initial")
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                if start is not None:
                    run.checkpoints.start_from(start, optimizer=config.train.start_optimizer)
            begun = {"begun": run.parameters(), "said": said.getvalue(), "steps": run.trainable.schedule.num_steps}
            outcomes.append({**begun, **run.take(batch, 2)})
        except CheckpointError as error:
            outcomes.append({"refused": str(error)})
        leave_layout()
    return outcomes


def resume_each(configs: list[RunConfig], batch: Batch, folder: str) -> list[dict[str, Any]]:
    """In each: checkpoint 1 is resumed and a step taken; what was said of the rate, and decay of every group."""
    platform.prepare()
    outcomes = []
    for config in configs:
        run = Run(config, folder, load=False)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            run.step.ess_state = run.checkpoints.load(1)
        decays = {group["weight_decay"] for group in run.trainable.optimizer.param_groups}
        outcomes.append({**run.take(batch, 2), "said": said.getvalue(), "decays": decays})
        leave_layout()
    return outcomes
