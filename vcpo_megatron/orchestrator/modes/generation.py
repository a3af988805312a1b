"""Bounded lag: groups are admitted, sampled, stored, and handed to the batcher.

``Generation.run``   consumes: the data cursor             produces: trajectories in store and batcher
                     waits for: a slot of the staleness bound on a serving server with room for a group, and for a
                     disk that takes writes
                     unblocked by: ``Fleet.loaded`` (a newer version), a finished trajectory, an ended group, the
                     recorder
``_sample``          one task a trajectory; waits for the environment and for ``Lease.generate``, then for the disk

A trajectory counts only once it is on disk. One that fails is counted with its reason. By ``GenerationRules`` its
group then ends, and its prompt is sampled again, or the group goes on with another sample in its place; a prompt that
keeps failing is set aside, by name. The run goes on until failures prevail: then the commonest reason ends it.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...environments.base import Environment, Example
from ...rollout.agent_loop import EpisodeError, run_episode
from ...rollout.client.protocol import SamplingParams
from ...rollout.fleet.fleet import Fleet, Lease
from ...run.tasks import RunError, cancel
from ...run.text import one_line
from ...types import Batch, Group, Trajectory
from ..store.partial import Answer
from ..store.recorder import Recorder
from ..store.records import problem_of
from ..store.schema import ZERO_VARIANCE
from ..store.store import PartialGroup, ResumePlan, RolloutStore, StoreFullError
from .batcher import Batcher
from .failures import FailureWindow, PromptFailures
from .partial_rollouts import Answers

#: Seconds that servers have, at a stop, to cut off what they are sampling.
PARK_S = 2.0


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
    parked: Mapping[int, Sequence[Answer]] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(frozen=True)
class SamplingRules:
    """How one trajectory is sampled: parameters of the first answer, and the longest sequence in tokens."""

    sampling: SamplingParams
    context_length: int


@dataclass(frozen=True)
class GenerationRules:
    """``resample_failed``: a failed member is replaced, else it ends its group. ``drop_zero_variance``: a group whose
    rewards are all equal is dropped as soon as it is complete; ``max_zero_variance``: so many in a row end the run.
    ``total_groups``: no more than these are ever needed, so no more are admitted at a time.
    """

    group_size: int
    total_groups: int
    resample_failed: bool
    drop_zero_variance: bool
    max_zero_variance: int


class Generation:
    """``plan``: where a resumed run goes on; its groups are in the batcher already."""

    def __init__(
        self,
        environment: Environment,
        fleet: Fleet,
        batcher: Batcher,
        recorder: Recorder,
        cursor: Cursor,
        sampling: SamplingRules,
        rules: GenerationRules,
        plan: ResumePlan,
        *,
        prompts: PromptFailures,
        failures: FailureWindow,
    ) -> None:
        self._environment = environment
        self._fleet = fleet
        self._batcher = batcher
        self._recorder = recorder
        self._cursor = cursor
        self._sampling = sampling
        self._rules = rules
        self._partial = plan.partial
        self._groups: dict[int, _Group] = {}  # with something in flight
        self._positions = dict(plan.cursors)  # of all live groups
        self._tasks: set[asyncio.Future[None]] = set()
        self._prompts = prompts
        self._failures = failures
        self._equal_in_a_row = 0
        self._episodes: dict[tuple[int, int], Answers] = {}
        self._parking = False
        self._error: BaseException | None = None
        # Groups that a crash came too early for: taken out here, before anyone can ask for a batch.
        self._silent = [group.group_id for group in plan.buffer if self._is_silent(group)]
        for group_id in self._silent:
            batcher.remove(group_id)
            self._positions.pop(group_id)

    async def run(self) -> None:
        """Admit groups until cancelled; cancels what is in flight then."""
        try:
            for group_id in self._silent:
                await self._drop_silent(group_id)
            for partial in self._partial:
                await self._go_on(partial)
            while True:
                self._admit(await self._fleet.changes.until(self._room))
                await asyncio.sleep(0)
        finally:
            await cancel(*self._tasks)

    async def _go_on(self, partial: PartialGroup) -> None:
        """Sample what a group from before the resume still lacks."""
        lease = await self._fleet.changes.until(lambda: self._lease(len(partial.missing)))
        if partial.group_id in self._batcher.live_groups():
            example = self._environment.train_example(self._positions[partial.group_id])
            self._start(_Group(partial.group_id, example, lease, partial.parked), partial.missing)
        else:
            lease.release(lease.places)

    def _lease(self, places: int, allowed: Callable[[int], bool] = lambda version: True) -> Lease | None:
        """Places on a server. Raises the error of a task, if any."""
        if self._error is not None:
            raise self._error
        return None if self._recorder.paused or self._parking else self._fleet.lease(places, allowed=allowed)

    def _room(self) -> Lease | None:
        """Places for a group on a server whose version the bound allows."""
        full = self._batcher.active_groups >= self._rules.total_groups
        return self._lease(self._rules.group_size, lambda version: not full and self._batcher.may_admit(version))

    def _admit(self, lease: Lease) -> None:
        group_id, position, example = self._next()
        version = lease.held
        self._positions[group_id] = position
        self._batcher.admit(group_id, example.prompt_id, version.number)
        size = self._rules.group_size

        def admit(store: RolloutStore) -> None:
            store.admit(group_id, example.prompt_id, position, size, version)

        # Handed in before any of its trajectories, so it is in the store before them; nobody needs to wait for it.
        self._follow(self._recorder.submit(admit))
        self._start(_Group(group_id, example, lease), range(size))

    def _next(self) -> tuple[int, int, Example]:
        """Group id, data position and example of the next group; prompts that were set aside are left out."""
        while True:
            group_id, position = self._cursor.take()
            example = self._environment.train_example(position)
            if not self._prompts.is_set_aside(example.prompt_id):
                return group_id, position, example

    def _start(self, group: _Group, samples: Iterable[int]) -> None:
        self._groups[group.group_id] = group
        self._failures.admitted(group.group_id)
        for sample_index in samples:
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
        wanted: int | None = sample_index
        try:
            while wanted is not None:
                try:
                    trajectory = await self._episode(group, wanted)
                except Exception as error:  # fault boundary: a trajectory fails, it is counted, the run goes on
                    wanted = await self._failed(group, wanted, error)
                else:
                    break
            else:
                return
        finally:
            group.lease.release()
        await self._store(group, trajectory)

    async def _episode(self, group: _Group, sample_index: int) -> Trajectory:
        answers = Answers(group.lease.generate, group.parked.get(sample_index, ()))
        self._episodes[group.group_id, sample_index] = answers
        try:
            trajectory = await run_episode(
                answers.generate,
                self._environment,
                group.example,
                group_id=group.group_id,
                sample_index=sample_index,
                sampling=self._sampling.sampling,
                context_length=self._sampling.context_length,
                seed_for_turn=lambda turn: None,
            )
        finally:
            del self._episodes[group.group_id, sample_index]
        if problem := problem_of(trajectory):
            raise EpisodeError(f"prompt {group.example.prompt_id}, sample {trajectory.uid} {problem}")
        return trajectory

    async def _store(self, group: _Group, trajectory: Trajectory) -> None:
        if await self._recorder.write(lambda store: store.add_trajectory(trajectory)):
            self._batcher.add(trajectory)
            await self._completed(group.group_id)
        if group.group_id in self._groups and all(task.done() for task in group.tasks - {asyncio.current_task()}):
            del self._groups[group.group_id]

    async def _completed(self, group_id: int) -> None:
        """If that was its last member: the group is a success; one without variance is dropped by choice."""
        group = self._batcher.complete_group(group_id)
        if group is None:
            return
        self._failures.success(group_id)
        if not self._is_silent(group):
            self._equal_in_a_row = 0
            return
        self._batcher.remove(group_id)  # before anyone can take it: nothing was awaited since it became complete
        self._positions.pop(group_id, None)
        await self._drop_silent(group_id)

    def _is_silent(self, group: Group) -> bool:
        """Whether the group's rewards are all equal, and such groups are dropped."""
        return self._rules.drop_zero_variance and len({member.reward for member in group.trajectories}) == 1

    async def _drop_silent(self, group_id: int) -> None:
        self._equal_in_a_row += 1
        await self._recorder.write(lambda store: store.drop(group_id, ZERO_VARIANCE))
        if self._equal_in_a_row >= self._rules.max_zero_variance:
            raise RunError(
                f"{self._equal_in_a_row} groups in a row had equal rewards and were dropped: there is nothing to learn "
                "from these prompts; take others, or set train.drop_zero_variance = false"
            )

    async def _failed(self, group: _Group, sample_index: int, error: Exception) -> int | None:
        """Count one failure. The sample index to go on with in its place, or None: its group has ended."""
        group_id, reason = group.group_id, one_line(error)
        if group_id not in self._batcher.live_groups():
            return None  # its group has ended: all its members are counted there
        print(f"trajectory {group_id}/{sample_index} failed: {reason}", flush=True)
        again = self._prompts.failure(group.example.prompt_id, error)
        replacement = self._batcher.replace(group_id, sample_index) if again and self._rules.resample_failed else None
        if replacement is not None:
            new = replacement
            await self._recorder.write(lambda store: store.replace(group_id, sample_index, reason, new))
        else:
            self._batcher.remove(group_id)
            self._cancel(group_id)
            position = self._positions.pop(group_id)
            ended = self._recorder.submit(lambda store: store.fail(group_id, sample_index, reason))
            if again:
                bisect.insort(self._cursor.requeue, position)
            await ended
        self._failures.failure(error, group_id if replacement is None else None)
        return replacement

    async def expire(self, group_id: int) -> None:
        """Drop a group that became too old (the batcher removed it already); its prompt is sampled again."""
        self._cancel(group_id)
        self._failures.dropped(group_id)
        ended = self._recorder.submit(lambda store: store.drop(group_id, "expired"))
        bisect.insort(self._cursor.requeue, self._positions.pop(group_id))  # before anything is awaited: it is the next
        await ended
        self._fleet.changes.notify()

    async def park(self) -> None:
        """At a stop: admit nothing more, have the servers cut off what they are sampling, and keep what it has."""
        self._parking = True
        for answers in self._episodes.values():
            answers.park()
        servers = [server for server in self._fleet.servers if server.serving]
        cut = await asyncio.gather(
            *(asyncio.wait_for(server.client.abort(), PARK_S) for server in servers), return_exceptions=True
        )
        for server, error in zip(servers, cut, strict=True):
            if isinstance(error, Exception):
                print(f"{server.name} did not cut its answers off: {one_line(error)}", flush=True)
        deadline = asyncio.get_running_loop().time() + PARK_S
        while any(answers.asking for answers in self._episodes.values()):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.01)
        parked = {key: tuple(answers.given) for key, answers in self._episodes.items() if answers.given}
        try:
            await self._recorder.write(lambda store: [store.park(*key, answers) for key, answers in parked.items()])
        except StoreFullError as error:
            print(f"unfinished trajectories are not kept: {error}", flush=True)
            return
        tokens = sum(len(answer.result.output_ids) for answers in parked.values() for answer in answers)
        of = f"{len(parked)} of {len(self._episodes)}"
        print(f"{of} unfinished trajectories are kept with {tokens} tokens", flush=True)

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
        paused = f"; {self._recorder.paused}" if self._recorder.paused else ""
        return f"{len(self._tasks)} trajectories in flight, next group {self._cursor.next_group_id}{paused}"
