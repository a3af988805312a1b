"""Checkpoints of the learner: Megatron's distributed checkpoint, and a manifest that says it is whole.

The format is free of the layout: a checkpoint saved with one tensor, pipeline and data-parallel split
is read with another. ``start`` copies the state and returns, ``finished`` completes it when every rank has
written; training goes on between the two. A directory without manifest is what an interrupted save left
behind; it is never read and is overwritten by the next save of the same step.

Random number generators belong to ranks, not to the model: they are restored when the layout is the one that
saved them. Nothing in a step draws from them (there is no dropout), so another layout loses nothing by it.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel

from ...config.checks.start import start_differences
from ...config.load import written
from ...config.process import NOTE_PREFIX
from ...config.schema import RunConfig
from ...models.identity import differences, shape_facts, weight_facts
from ...run.directory import Manifest, RunDirectory, read_manifest
from ...run.integrity import changed_files
from ...types import PolicyVersion
from ..megatron.model import padded_vocabulary
from ..megatron.parallel import Parallel
from ..megatron.training import Trainable, take_settings
from ..step.step_size import EssState
from . import rng
from .distributed_optimizer import finish_loading, prepare_to_load
from .errors import CheckpointError, reading, writing
from .logprobs import load_weights
from .optimizer_shards import shard_without_gathering
from .saving import BackgroundSave, host_storages, write_by_threads

_T = TypeVar("_T")

#: Tensors of a parameter's shape, so that any layout reads what a sharded optimizer wrote; and the same names
#: whether experts have an optimizer of their own (expert parallelism) or not.
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class _Saving:
    """A checkpoint that is being written, and the manifest that will complete it."""

    manifest: Manifest
    save: BackgroundSave
    started: float


class Checkpoints:
    """Saves and loads; every method is collective over all ranks."""

    def __init__(self, config: RunConfig, directory: RunDirectory, parallel: Parallel, trainable: Trainable) -> None:
        self._config = config
        self._directory = directory
        self._parallel = parallel
        self._trainable = trainable
        self._facts = self._model_facts()
        self._saving: _Saving | None = None
        write_by_threads()
        shard_without_gathering(trainable.optimizer)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saving is not None

    def start(self, step: int, version: PolicyVersion, ess: EssState, orchestrator: dict[str, Any]) -> None:
        """Begin to write checkpoint ``step`` as the state is now. One at a time."""
        if self._saving is not None:
            raise CheckpointError(f"checkpoint {self._saving.manifest.step} is still being written")
        started = time.perf_counter()
        path = self._directory.checkpoint(step)
        if self._parallel.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            with writing(path):
                path.mkdir(parents=True)
        self._barrier()
        with writing(path):
            state = self._state(loading=False)
            live = host_storages(state)
            request = dist_checkpointing.save(state, str(path), async_sharded_save=True)
            rng.save(path / "rng", self._parallel.rank)  # later: Megatron takes a folder with content for torn
        learner = {
            "ess": dataclasses.asdict(ess),
            "schedule_steps": self._trainable.schedule.num_steps,
            "learning_rate": self._trainable.scheduled_learning_rate(),
            "model": self._facts,
            "layout": self._layout(),
        }
        manifest = Manifest(
            step=step,
            attempt=version.attempt,
            version_number=version.number,
            learner=learner,
            orchestrator=orchestrator,
            config=written(self._config),
        )
        self._saving = _Saving(manifest, BackgroundSave(request, live), started)

    def finished(self, *, wait: bool = False) -> tuple[int, float] | None:
        """(step, seconds) when the checkpoint that was started is complete now, else None."""
        if self._saving is None or not (wait or self._written_everywhere(self._saving.save)):
            return None
        saving, self._saving = self._saving, None
        with writing(self._directory.checkpoint(saving.manifest.step)):
            saving.save.finish()
            of_ranks = self._of_all_ranks(saving.save.checksums)
            if self._parallel.rank == 0:
                known = {name: crc for checksums in of_ranks for name, crc in checksums.items()}
                self._directory.complete(saving.manifest.step, saving.manifest, known)
        return saving.manifest.step, time.perf_counter() - saving.started

    def _written_everywhere(self, save: BackgroundSave) -> bool:
        written = torch.tensor([int(save.written)])
        dist.all_reduce(written, op=dist.ReduceOp.MIN, group=self._parallel.command_group)
        return bool(written.item())

    def load(self, step: int) -> EssState:
        """Restore parameters, optimizer and schedule from the complete checkpoint ``step``."""
        path = self._directory.checkpoint(step)
        with reading(path):
            manifest = self._directory.manifest(step)
        self._compare(path, manifest.learner["model"])
        earlier = [other for other in self._directory.complete_steps() if other < step]
        back = f"resume from an earlier checkpoint with --from-step {earlier[-1]}" if earlier else "start a new run"
        self._verify(path, manifest, back)
        self._read(path)
        self._trainable.schedule.num_steps = manifest.learner["schedule_steps"]
        take_settings(self._trainable, self._config.optimizer)
        if manifest.learner["layout"] == self._layout():
            rng.load(self._directory.checkpoint(step) / "rng", self._parallel.rank)
        self._say_rate(step, manifest.learner["learning_rate"])
        return EssState(**manifest.learner["ess"])

    def start_from(self, path: Path, *, optimizer: bool) -> None:
        """Take the weights of the complete checkpoint in ``path``, of another run, and with ``optimizer`` the state of
        its optimizer; schedule, ESS and generators are those of a new run. CheckpointError when it does not fit."""
        with reading(path):
            manifest = read_manifest(path)
        if found := start_differences(manifest, self._config, self._trainable.shape):
            raise CheckpointError(f"train.start_from = {path}: {'; '.join(found)}")
        self._verify(path, manifest, "name another with train.start_from")
        if optimizer:
            self._read(path)
        else:
            with reading(path):
                load_weights(self._trainable.chunks, path)
            self._trainable.optimizer.reload_model_params()
        take_settings(self._trainable, self._config.optimizer)
        if self._parallel.rank == 0:
            what = "weights and optimizer" if optimizer else "weights"
            print(f"{NOTE_PREFIX}starts from the {what} of {path} ({manifest.version_number} steps)", flush=True)

    def _read(self, path: Path) -> None:
        """Parameters and optimizer of the checkpoint in ``path``."""
        prepare_to_load(self._trainable.optimizer)
        with reading(path):
            state = dist_checkpointing.load(self._state(loading=True), str(path))
        for key, chunk in self._chunks().items():
            chunk.load_state_dict(state[key], strict=False)  # extra states are not parameters
        self._trainable.optimizer.load_state_dict(state["optimizer"])
        finish_loading(self._trainable.optimizer)

    def _say_rate(self, step: int, before: float) -> None:
        """The learning rate of the next step, and ``before``, that which the checkpoint was saved with for it."""
        now = self._trainable.scheduled_learning_rate()
        if self._parallel.rank == 0:
            print(f"{NOTE_PREFIX}learning rate of step {step}: {now:g}, before this resume {before:g}", flush=True)

    def _compare(self, path: Path, saved: dict[str, Any]) -> None:
        """CheckpointError when the model of this run is not that of checkpoint ``path``, by its facts ``saved``."""
        if found := differences(saved, self._facts):
            raise CheckpointError(
                f"{path} does not fit this run: {'; '.join(found)}; the model in {self._config.model.path}, or how it "
                "is held, is not that of the run: restore it, or start a new run"
            )

    def _verify(self, path: Path, manifest: Manifest, remedy: str) -> None:
        """Every file of checkpoint ``path`` is what was written: each is read by one of the ranks. CheckpointError on
        all ranks when one is not."""
        mine = changed_files(path, manifest.checksums, self._parallel.rank, self._parallel.world_size)
        changed = [phrase for phrases in self._of_all_ranks(mine) for phrase in phrases]
        if not changed:
            return
        raise CheckpointError(
            f"checkpoint {path} has changed since it was written: {'; '.join(changed[:3])}"
            f"{f' and {len(changed) - 3} more' if len(changed) > 3 else ''}; put its files back, or {remedy}"
        )

    def _of_all_ranks(self, mine: _T) -> list[_T]:
        found: list[Any] = [None] * self._parallel.world_size
        dist.all_gather_object(found, mine, group=self._parallel.command_group)
        return found

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
        shape, path = self._trainable.shape, self._config.model.path
        weights = {}
        if self._config.algorithm.kl_reference == "initial":  # else a resumed run reads none of them
            weights = {f"weights {name}": fact for name, fact in weight_facts(path).items()}
        return {
            **shape_facts(shape),
            **weights,
            "padded vocabulary": padded_vocabulary(self._config, shape),
            "dtype": self._config.model.dtype,
            # Megatron then keeps a second optimizer, and stores the two in another structure than one
            "parallel.expert > 1": self._config.parallel.expert > 1,
        }

    def _layout(self) -> dict[str, int]:
        """What gives a rank its place."""
        return {"world": self._parallel.world_size, **self._config.parallel.model_dump()}

    def _barrier(self) -> None:
        dist.barrier(group=self._parallel.command_group)
