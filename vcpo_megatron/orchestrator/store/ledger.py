"""Which groups there are and what state each is in: in memory for the event loop, written through to the store.

    admit     a group starts (``admit_whole``: complete ones are added)
    finish    one of its trajectories is on disk; the group is whole when all are
    record    the learner's own log-probs of a whole group are on disk, too, where a run needs them
    replace   a trajectory failed, another one is expected in its place
    fail      a trajectory failed, and its group ends with it
    drop      the group ends by choice
    expire    the group ends because it is too old; its prompt is sampled again
    begin     groups leave the queue as the batch of the next step
    train     that step was taken

A trajectory is finished when it is durable, never before. A group is complete, and may be trained, when it is whole
and, with ``recorded``, scored. An end frees the group's place at once; writes are carried out in the order of the
calls, and what is returned is done when they are durable. The staleness bound, the batcher and the generation ask here;
nobody else keeps a list of groups.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar

from ...types import Batch, Group, PolicyVersion, StepResult, Trajectory
from .records import Answer, EpisodeTimes
from .resume import ResumePlan
from .store import RolloutStore

_T = TypeVar("_T")


class Writer(Protocol):
    """The part of ``Recorder`` that the ledger needs."""

    def submit(self, operation: Callable[[RolloutStore], _T]) -> asyncio.Future[_T]: ...


@dataclass(eq=False)
class LiveGroup:
    """A group that was admitted and has not ended. ``position``: of its prompt in the data; ``version``: number of the
    policy that it was admitted at; ``since``: when, on the ledger's clock; ``expected``: the sample indices that it
    consists of; ``tasks``: what works on it, cancelled when it ends; ``recorded``: it is not complete without the
    learner's own log-probs."""

    group_id: int
    prompt_id: str
    position: int
    version: int
    since: float
    expected: set[int]
    members: dict[int, Trajectory] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    recorded: bool = False

    @property
    def whole(self) -> bool:
        """Whether every trajectory is in."""
        return self.members.keys() == self.expected

    @property
    def complete(self) -> bool:
        """Whether it may be trained."""
        return self.whole and not (self.recorded and any(t.recorded is None for t in self.members.values()))

    @property
    def missing(self) -> tuple[int, ...]:
        """Sample indices that are not in yet."""
        return tuple(sorted(self.expected - self.members.keys()))

    @property
    def oldest_version(self) -> int:
        """Number of the oldest version that sampled a token of it; what is not in yet may hold one as old as the
        version at admission."""
        versions = [trajectory.oldest_version for trajectory in self.members.values()]
        return min(versions) if self.whole else min([self.version, *versions])

    def group(self) -> Group:
        return Group(self.group_id, self.prompt_id, tuple(self.members[sample] for sample in sorted(self.members)))


@dataclass
class Cursor:
    """What is admitted next: prompts to be sampled again first, then the stream; ids are never reused."""

    next_index: int = 0
    next_group_id: int = 0
    requeue: list[int] = field(default_factory=list)

    def take(self) -> tuple[int, int]:
        """(group id, data position) of the next group."""
        if self.requeue:
            return self.new_id(), self.requeue.pop(0)
        self.next_index += 1
        return self.new_id(), self.next_index - 1

    def ahead(self, count: int) -> list[int]:
        """Data positions of the next ``count`` groups, if none is to be sampled again meanwhile."""
        found = self.requeue[:count]
        return [*found, *range(self.next_index, self.next_index + count - len(found))]

    def new_id(self) -> int:
        self.next_group_id += 1
        return self.next_group_id - 1


class GroupLedger:
    """Groups of a run whose learner is at ``version``. ``recorded``: it trains on groups that it has scored itself.
    ``clock``: seconds, monotonic."""

    def __init__(
        self,
        writer: Writer,
        cursor: Cursor,
        *,
        version: int = 0,
        recorded: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self.clock = clock
        self.cursor = cursor
        #: Number of the learner's policy: the step that comes next, or is being taken.
        self.version = version
        #: Groups that have not ended and are not in training, in order of admission.
        self.live: dict[int, LiveGroup] = {}
        #: What ``begin`` gave and ``train`` has not had yet.
        self.in_training: Batch | None = None
        self._failures = _FailuresInARow()
        self._recorded = recorded

    @classmethod
    def resumed(
        cls,
        writer: Writer,
        plan: ResumePlan,
        *,
        requeue: Iterable[int] = (),
        recorded: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> GroupLedger:
        """Go on from a checkpoint, with its step and the groups that it left. ``requeue``: the data positions that
        waited at the checkpoint to be sampled again."""
        waiting = set(requeue) - set(plan.cursors.values())
        cursor = Cursor(plan.next_cursor, plan.next_group_id, sorted(waiting | set(plan.requeue)))
        ledger = cls(writer, cursor, version=plan.step, recorded=recorded, clock=clock)
        for whole in plan.buffer:
            ledger._add(
                whole.group_id, whole.prompt_id, plan.cursors[whole.group_id], whole.oldest_version, whole.trajectories
            )
        for partial in plan.partial:
            position = plan.cursors[partial.group_id]
            group = ledger._add(partial.group_id, partial.prompt_id, position, partial.version, partial.trajectories)
            group.expected.update(partial.missing)
            ledger._failures.admitted(partial.group_id)
        return ledger

    @property
    def queued_groups(self) -> int:
        """Groups that were admitted and have not ended, those in training included."""
        return len(self.live) + (len(self.in_training.groups) if self.in_training else 0)

    @property
    def failed_in_a_row(self) -> int:
        """Groups that have failed one after the other, in order of admission, of those before which all have ended."""
        return self._failures.count

    # --- groups come --------------------------------------------------------------------------

    def admit(
        self, group_id: int, prompt_id: str, position: int, size: int, version: PolicyVersion
    ) -> tuple[LiveGroup, asyncio.Future[None]]:
        """A group of ``size`` starts on a server that has ``version`` loaded. It is durable before any of its
        trajectories; the future is there for the errors."""
        group = self._add(group_id, prompt_id, position, version.number, ())
        group.expected.update(range(size))
        self._failures.admitted(group_id)
        return group, self._writer.submit(lambda store: store.admit(group_id, prompt_id, position, size, version))

    async def admit_whole(
        self, groups: Mapping[int, Group], times: Mapping[tuple[int, int], EpisodeTimes] = MappingProxyType({})
    ) -> None:
        """Add complete groups, each at its data position, with all their trajectories, in one transaction. ``times``:
        of trajectories by (group id, sample index), as far as they are known."""

        def record(store: RolloutStore) -> None:
            for position, group in groups.items():
                version = min(version for trajectory in group.trajectories for version in trajectory.versions)
                store.admit(group.group_id, group.prompt_id, position, len(group.trajectories), version)
                for trajectory in group.trajectories:
                    store.add_trajectory(trajectory)
            store.keep_times(times)

        await self._writer.submit(record)
        for position, group in groups.items():
            self._add(group.group_id, group.prompt_id, position, group.oldest_version, group.trajectories)

    def _add(
        self, group_id: int, prompt_id: str, position: int, version: int, trajectories: Sequence[Trajectory]
    ) -> LiveGroup:
        members = {trajectory.sample_index: trajectory for trajectory in trajectories}
        group = LiveGroup(
            group_id, prompt_id, position, version, self.clock(), set(members), members, recorded=self._recorded
        )
        self.live[group_id] = group
        return group

    # --- trajectories end ---------------------------------------------------------------------

    async def finish(self, trajectory: Trajectory, times: EpisodeTimes | None = None) -> LiveGroup | None:
        """Make a trajectory durable, with its ``times`` if they are known, then count it; its group, or None: that has
        ended before.

        StoreError when it came twice or is not expected.
        """

        def record(store: RolloutStore) -> bool:
            added = store.add_trajectory(trajectory)
            if added and times is not None:
                store.keep_times({(trajectory.group_id, trajectory.sample_index): times})
            return added

        stored = await self._writer.submit(record)
        group = self.live.get(trajectory.group_id) if stored else None
        if group is not None:
            group.members[trajectory.sample_index] = trajectory
            if group.whole:
                self._failures.ended(group.group_id, failed=False)
        return group

    def unscored(self) -> list[Group]:
        """Whole groups that the learner is still to score, in order of admission."""
        return [group.group() for group in self.live.values() if group.whole and not group.complete]

    async def record(self, groups: Sequence[Group]) -> None:
        """Make the learner's log-probs of ``groups`` durable, then count those that have not ended as complete."""
        await self._writer.submit(lambda store: [store.record(group) for group in groups])
        for group in groups:
            if (live := self.live.get(group.group_id)) is not None:
                live.members.update({trajectory.sample_index: trajectory for trajectory in group.trajectories})

    async def replace(self, group_id: int, sample_index: int, reason: str) -> int:
        """A trajectory of a live group failed; the sample index of the one that is expected in its place."""
        group = self.live[group_id]
        replacement = max(group.expected) + 1
        group.expected = group.expected - {sample_index} | {replacement}
        await self._writer.submit(lambda store: store.replace(group_id, sample_index, reason, replacement))
        return replacement

    async def keep_answers(self, answers: Mapping[tuple[int, int], Sequence[Answer]]) -> None:
        """Keep what unfinished trajectories, (group id, sample index), have of answers, for a resume to go on with."""
        await self._writer.submit(lambda store: [store.keep_answers(*key, found) for key, found in answers.items()])

    # --- groups end ---------------------------------------------------------------------------

    async def fail(
        self, group_id: int, sample_index: int, reason: str, *, requeue: bool, in_a_row: bool = True
    ) -> None:
        """A trajectory of a live group failed, and the group with it; ``requeue``: its prompt is sampled again.
        ``in_a_row``: whether the group counts among those that failed one after the other."""
        group = self._take_out(group_id)
        ended = self._writer.submit(lambda store: store.fail(group_id, sample_index, reason))
        if requeue:
            bisect.insort(self.cursor.requeue, group.position)
        await ended
        if in_a_row:
            self._failures.ended(group_id, failed=True)
        else:
            self._failures.dropped(group_id)

    def drop(self, group_id: int, reason: str) -> asyncio.Future[bool]:
        """A live group ends as dropped(reason), by choice."""
        self._take_out(group_id)
        return self._writer.submit(lambda store: store.drop(group_id, reason))

    def expire(self, group_id: int) -> asyncio.Future[bool]:
        """A live group is too old, or keeps the learner waiting too long: it ends, and its prompt is the next, but for
        older ones."""
        group = self._take_out(group_id)
        self._failures.dropped(group_id)
        bisect.insort(self.cursor.requeue, group.position)
        return self._writer.submit(lambda store: store.drop(group_id, "expired"))

    def _take_out(self, group_id: int) -> LiveGroup:
        group = self.live.pop(group_id)
        for task in group.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        return group

    # --- steps --------------------------------------------------------------------------------

    def begin(self, group_ids: Sequence[int]) -> Batch:
        """The batch of step ``version``: live, complete groups, in this order."""
        groups = tuple(self.live.pop(group_id).group() for group_id in group_ids)
        self.in_training = Batch(self.version, groups)
        return self.in_training

    async def train(self, batch: Batch, result: StepResult, times: tuple[float, float] | None = None) -> None:
        """The step on ``batch`` was taken, or skipped; the learner is one version further once that is durable.
        ``times``: when it had the batch, start and end, in seconds since 1970, if that is known."""
        groups = [group.group_id for group in batch.groups]
        staleness = [batch.step - group.oldest_version for group in batch.groups]

        def mark(store: RolloutStore) -> None:
            store.mark_trained(batch.step, result.trajectories, groups, staleness, skipped=result.skipped)
            if times is not None:
                store.keep_step_times(batch.step, *times)

        await self._writer.submit(mark)
        for group_id in groups:
            self.live.pop(group_id, None)  # of a batch that was made without ``begin``
        self.in_training = None
        self.version = batch.step + 1

    def groups_at(self, positions: Iterable[int]) -> dict[int, Group]:
        """Live groups that are whole, scored or not, by data position, of those at ``positions``."""
        wanted = set(positions)
        return {
            group.position: group.group() for group in self.live.values() if group.position in wanted and group.whole
        }


class _FailuresInARow:
    """How many groups in a row have failed, in the order of their admission.

    Failures may be quick and successes slow: in a run that is well, the failures of many groups may come before the
    first success, but not those of the groups that were admitted one after the other. So a group counts when all that
    were admitted before it have ended; one that was dropped for another reason counts for nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[int, bool | None] = {}  # whether it failed; None: it has not ended; in order of admission

    def admitted(self, group_id: int) -> None:
        self._waiting[group_id] = None

    def ended(self, group_id: int, *, failed: bool) -> None:
        if group_id in self._waiting:
            self._waiting[group_id] = failed
            self._advance()

    def dropped(self, group_id: int) -> None:
        self._waiting.pop(group_id, None)
        self._advance()

    def _advance(self) -> None:
        while self._waiting and (failed := next(iter(self._waiting.values()))) is not None:
            self.count = self.count + 1 if failed else 0
            del self._waiting[next(iter(self._waiting))]
