"""Bounded lag: groups are admitted, sampled, stored, and handed to the batcher.

``Generation.run``   consumes: the data cursor             produces: trajectories in store and batcher
                     waits for: a slot of the staleness bound on a serving server with room for a group
                     unblocked by: ``Fleet.loaded`` (a newer version), a finished trajectory, an ended group
``_sample``          one task a trajectory; waits for the environment and for ``Lease.generate``, then for the disk

A trajectory counts only once it is on disk. One that fails is counted with its reason and ends its group; the run
goes on, unless nothing but failures comes: then the commonest reason ends it.
"""

from __future__ import annotations

import asyncio
import bisect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..environments.base import Environment, Example
from ..rollout.agent_loop import run_episode
from ..rollout.fleet import Fleet, Lease
from ..rollout.protocol import SamplingParams
from ..types import Batch, Trajectory
from .batcher import Batcher
from .recorder import Recorder
from .store import RolloutStore
from .tasks import RunError, cancel


@dataclass
class Cursor:
    """What is admitted next: prompts to be sampled again first, then the stream; ids are never reused."""

    next_index: int = 0
    next_group_id: int = 0
    requeue: list[int] = field(default_factory=list)

    def take(self) -> tuple[int, int]:
        """(group id, data position) of the next group."""
        group_id = self.next_group_id
        self.next_group_id += 1
        if self.requeue:
            return group_id, self.requeue.pop(0)
        self.next_index += 1
        return group_id, self.next_index - 1


@dataclass(eq=False)
class _Group:
    group_id: int
    example: Example
    lease: Lease
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(frozen=True)
class SamplingRules:
    """How one trajectory is sampled: parameters of the first answer, and the longest sequence in tokens."""

    sampling: SamplingParams
    context_length: int


def one_line(error: BaseException) -> str:
    """An exception as the one line that counts it."""
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:300]


def kind_of(message: str) -> str:
    """``message`` without what differs from one failure of a kind to the next: its numbers."""
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", message)


class FailureCounter:
    """Ends the run when ``limit`` groups fail in a row, without one complete group between them.

    Failures may be quick and successes slow: the limit is above the number of groups in flight.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row: Counter[str] = Counter()
        self._latest: dict[str, str] = {}  # message by kind

    def success(self) -> None:
        self._in_a_row.clear()
        self._latest.clear()

    def failure(self, error: BaseException) -> None:
        """RunError with the commonest kind of the failures when there are too many in a row."""
        message = one_line(error)
        self._in_a_row[kind_of(message)] += 1
        self._latest[kind_of(message)] = message
        total = sum(self._in_a_row.values())
        if total >= self._limit:
            kind, count = self._in_a_row.most_common(1)[0]
            raise RunError(f"{total} groups failed in a row, {count} of them with: {self._latest[kind]}")


class Generation:
    """``total_groups``: no more than these are ever needed, so no more are admitted at a time. ``positions``: data
    positions of the groups that are in the batcher already, after a resume."""

    def __init__(
        self,
        environment: Environment,
        fleet: Fleet,
        batcher: Batcher,
        recorder: Recorder,
        cursor: Cursor,
        rules: SamplingRules,
        *,
        group_size: int,
        total_groups: int,
        positions: Mapping[int, int],
        failures: FailureCounter,
    ) -> None:
        self._environment = environment
        self._fleet = fleet
        self._batcher = batcher
        self._recorder = recorder
        self._cursor = cursor
        self._rules = rules
        self._group_size = group_size
        self._total_groups = total_groups
        self._groups: dict[int, _Group] = {}  # with something in flight
        self._positions = dict(positions)  # of all live groups
        self._tasks: set[asyncio.Future[None]] = set()
        self._failures = failures
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Admit groups until cancelled; cancels what is in flight then."""
        try:
            while True:
                self._admit(await self._fleet.changes.until(self._room))
                await asyncio.sleep(0)
        finally:
            await cancel(*self._tasks)

    def _room(self) -> Lease | None:
        """Places for a group on a server whose version the bound allows. Raises the error of a task, if any."""
        if self._error is not None:
            raise self._error
        if self._batcher.active_groups >= self._total_groups:
            return None
        return self._fleet.lease(self._group_size, allowed=self._batcher.may_admit)

    def _admit(self, lease: Lease) -> None:
        group_id, position = self._cursor.take()
        example = self._environment.train_example(position)
        version = lease.server.version
        assert version is not None
        group = _Group(group_id, example, lease)
        self._groups[group_id] = group
        self._positions[group_id] = position
        self._batcher.admit(group_id, example.prompt_id, version.number)
        size = self._group_size

        def admit(store: RolloutStore) -> None:
            store.admit(group_id, example.prompt_id, position, size, version)

        # Handed in before any of its trajectories, so it is in the store before them; nobody needs to wait for it.
        self._follow(self._recorder.submit(admit))
        for sample_index in range(size):
            task = asyncio.create_task(self._sample(group, sample_index))
            group.tasks.add(task)
            self._follow(task)

    def _follow(self, task: asyncio.Future[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self._fleet.changes.notify()

    async def _sample(self, group: _Group, sample_index: int) -> None:
        try:
            trajectory = await run_episode(
                group.lease.generate, self._environment, group.example,
                group_id=group.group_id, sample_index=sample_index, sampling=self._rules.sampling,
                context_length=self._rules.context_length, seed_for_turn=lambda turn: None,
            )  # fmt: skip
        except Exception as error:  # fault boundary: a trajectory fails, it is counted, the run goes on
            await self._failed(group, sample_index, error)
            return
        finally:
            group.lease.release()
        await self._store(group, trajectory)

    async def _store(self, group: _Group, trajectory: Trajectory) -> None:
        if await self._recorder.write(lambda store: store.add_trajectory(trajectory)):
            self._batcher.add(trajectory)
        if group.group_id in self._groups and all(task.done() for task in group.tasks - {asyncio.current_task()}):
            del self._groups[group.group_id]
            self._failures.success()

    async def _failed(self, group: _Group, sample_index: int, error: Exception) -> None:
        """Count one failure; the other members of the group are ended with it."""
        if not self._batcher.remove(group.group_id):
            return
        reason = one_line(error)
        print(f"trajectory {group.group_id}/{sample_index} failed: {reason}", flush=True)
        self._cancel(group.group_id)
        self._positions.pop(group.group_id, None)
        await self._recorder.write(lambda store: store.fail(group.group_id, sample_index, reason))
        self._failures.failure(error)

    async def expire(self, group_id: int) -> None:
        """Drop a group that became too old (the batcher removed it already); its prompt is sampled again."""
        self._cancel(group_id)
        ended = self._recorder.submit(lambda store: store.drop(group_id, "expired"))
        bisect.insort(self._cursor.requeue, self._positions.pop(group_id))  # before anything is awaited: it is the next
        await ended
        self._fleet.changes.notify()

    def forget(self, batch: Batch) -> None:
        """The groups of ``batch`` were trained on."""
        for group in batch.groups:
            self._positions.pop(group.group_id, None)

    def _cancel(self, group_id: int) -> None:
        """Cancel what a group still has in flight."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            for task in group.tasks - {asyncio.current_task()}:
                task.cancel()

    def describe(self) -> str:
        """One phrase for the watchdog."""
        return f"{len(self._tasks)} trajectories in flight, next group {self._cursor.next_group_id}"

