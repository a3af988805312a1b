"""Checkpoints of the learner: Megatron's distributed checkpoint, and a manifest that says it is whole.

The format is free of the layout: a checkpoint saved with one tensor, pipeline and data-parallel split
is read with another. A directory without manifest is what an interrupted save left behind; it is
never read and is overwritten by the next save of the same step.
"""

from __future__ import annotations

import dataclasses
import queue
import shutil
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel

from ..config.models import RunConfig
from ..config.run_directory import Manifest, RunDirectory
from ..types import PolicyVersion
from .checkpoint_errors import CheckpointError, reading, writing
from .distributed_optimizer import finish_loading, prepare_to_load
from .model import padded_vocabulary
from .parallel import Parallel
from .step_size import EssState
from .training import Trainable

#: Tensors of a parameter's shape, so that any layout reads what a sharded optimizer wrote; and the same names
#: whether experts have an optimizer of their own (expert parallelism) or not.
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class Checkpoints:
    """Saves and loads; collective over all ranks."""

    def __init__(self, config: RunConfig, directory: RunDirectory, parallel: Parallel, trainable: Trainable) -> None:
        self._config = config
        self._directory = directory
        self._parallel = parallel
        self._trainable = trainable
        # Saving is synchronous, so the writers' results need no queue between processes. Megatron's own
        # would start a manager process that outlives a killed rank.
        filesystem_async._results_queue = queue.Queue()

    def save(self, step: int, version: PolicyVersion, ess: EssState, orchestrator: dict[str, Any]) -> None:
        """Write checkpoint ``step`` and make it the latest; older ones beyond ``keep_last`` are removed."""
        path = self._directory.checkpoint(step)
        if self._parallel.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            with writing(path):
                path.mkdir(parents=True)
        self._barrier()
        with writing(path):
            dist_checkpointing.save(self._state(loading=False), str(path))
        self._barrier()
        if self._parallel.rank == 0:
            learner = {
                "ess": dataclasses.asdict(ess),
                "schedule_steps": self._trainable.schedule.num_steps,
                "model": self._model_facts(),
            }
            with writing(path):
                self._directory.complete(
                    step,
                    Manifest(step=step, attempt=version.attempt, version_number=version.number, learner=learner,
                             orchestrator=orchestrator),
                )  # fmt: skip
            self._directory.prune(self._config.checkpoint.keep_last)

    def load(self, step: int) -> EssState:
        """Restore parameters, optimizer and schedule from the complete checkpoint ``step``."""
        path = self._directory.checkpoint(step)
        with reading(path):
            manifest = self._directory.manifest(step)
        saved, current = manifest.learner["model"], self._model_facts()
        differing = [f"{key} {saved.get(key)} in the checkpoint, {current[key]} now" for key in current
                     if saved.get(key) != current[key]]  # fmt: skip
        if differing:
            raise CheckpointError(f"{path} does not fit this run: {'; '.join(differing)}")
        prepare_to_load(self._trainable.optimizer)
        with reading(path):
            state = dist_checkpointing.load(self._state(loading=True), str(path))
        for key, chunk in self._chunks().items():
            chunk.load_state_dict(state[key], strict=False)  # extra states are not parameters
        self._trainable.optimizer.load_state_dict(state["optimizer"])
        finish_loading(self._trainable.optimizer)
        self._trainable.schedule.num_steps = manifest.learner["schedule_steps"]
        return EssState(**manifest.learner["ess"])

    def _state(self, *, loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {key: chunk.sharded_state_dict() for key, chunk in self._chunks().items()}
        state["optimizer"] = self._trainable.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=_OPTIMIZER_FORMAT
        )
        return state

    def _chunks(self) -> dict[str, GPTModel]:
        """Chunks of this rank; what they hold is stored by global layer, so another split finds it."""
        return {f"model{number}": chunk for number, chunk in enumerate(self._trainable.chunks)}

    def _model_facts(self) -> dict[str, Any]:
        """What must agree between the run that saved and the one that loads."""
        shape = self._trainable.shape
        return {
            "layers": shape.num_layers,
            "hidden": shape.hidden_size,
            "vocabulary": shape.vocab_size,
            "padded vocabulary": padded_vocabulary(self._config, shape),
            "dtype": self._config.model.dtype,
            # Megatron then keeps a second optimizer, and stores the two in another structure than one
            "parallel.expert > 1": self._config.parallel.expert > 1,
        }

    def _barrier(self) -> None:
        dist.barrier(group=self._parallel.command_group)
