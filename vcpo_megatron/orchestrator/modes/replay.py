"""Training again on the rollouts of another run: no servers, no weights sent, no evaluation.

``replay``  consumes: the recorded batches, step by step    produces: steps, rows, checkpoints
            waits for: the learner                          unblocked by: the learner
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...config.schema import RunConfig
from ...run.tasks import RunError, StopRequest
from ...types import Batch, Group
from ..store.ledger import GroupLedger
from ..store.reader import StoreReader
from ..store.store import RolloutStore
from .trainer import Trainer


def open_recorded(config: RunConfig) -> StoreReader:
    """The store of ``rollout.replay``, for reading; RunError when there is none."""
    if config.rollout.replay is None:
        raise RunError('rollout.engine = "replay" needs rollout.replay, the run directory to train on again')
    path: Path = config.rollout.replay / "rollouts.sqlite"
    if not path.is_file():
        raise RunError(f"rollout.replay = {config.rollout.replay}: has no rollouts.sqlite")
    return RolloutStore.open_readonly(path)


def recorded_steps(recorded: StoreReader, config: RunConfig, first_step: int) -> int:
    """Number of steps to take: ``train.steps``, or as many as were recorded from step 0 on without a gap.

    RunError when there is none at or after ``first_step``, when its batch has another shape than this run's, or when it
    lacks log-probs that this run needs.
    """
    known = set(recorded.trained_steps())
    count = next(step for step in range(len(known) + 1) if step not in known)
    if count <= first_step:
        raise RunError(f"rollout.replay = {config.rollout.replay}: holds {count} steps, none from step {first_step} on")
    groups = recorded.groups_trained_at(first_step)
    sizes = {len(group.trajectories) for group in groups}
    if len(groups) != config.train.groups_per_update or sizes != {config.train.group_size}:
        raise RunError(
            f"rollout.replay = {config.rollout.replay}: step {first_step} holds {len(groups)} groups of "
            f"{'/'.join(map(str, sorted(sizes)))}; this run has "
            f"train.groups_per_step = {config.train.groups_per_step}, "
            f"train.updates_per_batch = {config.train.updates_per_batch}, "
            f"train.group_size = {config.train.group_size}"
        )
    if config.algorithm.mismatch == "recorded" and not all(group.recorded for group in groups):
        raise RunError(
            f"rollout.replay = {config.rollout.replay}: holds no log-probs of a learner, which algorithm.mismatch = "
            '"recorded" needs; replay a run that had it, or set mismatch = "none"'
        )
    if count < config.train.steps:
        print(f"replay: {count} of train.steps = {config.train.steps} steps are recorded; the run ends after them")
    return min(count, config.train.steps)


def renumbered(group: Group, group_id: int) -> Group:
    """The group under an id of this run."""
    members = tuple(replace(trajectory, group_id=group_id) for trajectory in group.trajectories)
    return Group(group_id, group.prompt_id, members)


class Replay:
    """Takes the steps ``trainer.version`` ... ``steps`` - 1 of ``recorded`` with ``trainer``."""

    def __init__(self, recorded: StoreReader, trainer: Trainer, ledger: GroupLedger, *, steps: int) -> None:
        self._recorded, self._trainer, self._ledger, self._steps = recorded, trainer, ledger, steps

    async def run(self, stop: StopRequest) -> None:
        """Returns after the last step, or when a stop is asked for."""
        while self._trainer.version < self._steps and not stop.made:
            batch = await self._batch(self._trainer.version)
            result = await self._trainer.take(batch)
            if result is None:
                break
            await self._trainer.record(batch, result, wait_s=0.0, sync={"time/sync": 0.0})
            await self._trainer.checkpoint_if_due()
        await self._trainer.checkpoint()
        await self._trainer.end()

    async def _batch(self, step: int) -> Batch:
        recorded = self._recorded.groups_trained_at(step)
        first = step * len(recorded)
        positions = range(first, first + len(recorded))
        known = self._ledger.groups_at(positions)  # recorded before a resume, after its checkpoint
        fresh = {
            position: renumbered(group, self._ledger.cursor.new_id())
            for position, group in zip(positions, recorded, strict=True)
            if position not in known
        }
        await self._ledger.admit_whole(fresh)
        again = {  # scored by a version that a resume has undone, whose log-probs are recorded all the same
            position: renumbered(group, known[position].group_id)
            for position, group in zip(positions, recorded, strict=True)
            if position in known and group.recorded and not known[position].recorded
        }
        await self._ledger.record(list(again.values()))
        known |= fresh | again
        return Batch(step, tuple(known[position] for position in positions))

    def describe(self) -> str:
        """One phrase for the watchdog."""
        return f"replay of step {self._trainer.version}"
