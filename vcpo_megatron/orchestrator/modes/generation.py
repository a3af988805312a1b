"""Bounded lag: groups are admitted and sampled, and their trajectories entered into the ledger.

``Generation.run``   consumes: the data cursor             produces: finished trajectories in the ledger
                     waits for: a slot of the staleness bound on a serving server with room for a group, and for a
                     disk that takes writes
                     unblocked by: ``Fleet.loaded`` (a newer version), a finished trajectory, an ended group, the
                     recorder
``_sample``          one task a trajectory; waits for the environment and for ``Lease.generate``, then for the disk

Prompts are fetched ahead (``PromptSource``): a position is taken from the cursor when its prompt is there.

A trajectory counts only once it is on disk. One that fails is counted with its reason. By ``GenerationRules`` its
group then ends, and its prompt is sampled again, or the group goes on with another sample in its place; a prompt that
keeps failing is set aside, by name. The run goes on until failures prevail: then the commonest reason ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...environments.client import EnvironmentClient, Prompt
from ...rollout.agent_loop import EpisodeError, run_episode
from ...rollout.client.protocol import SamplingParams
from ...rollout.fleet.fleet import Fleet, Lease
from ...run.tasks import RunError, cancel
from ...run.text import one_line
from ...types import Trajectory, has_variance
from ..store.ledger import GroupLedger, LiveGroup
from ..store.recorder import Recorder
from ..store.records import Answer, EpisodeTimes
from ..store.resume import PartialGroup, ResumePlan
from ..store.schema import ZERO_VARIANCE, StoreFullError
from .batcher import Batcher
from .episode_times import Timed
from .failures import FailureWindow, PromptFailures, failure_reason
from .partial_rollouts import PartialRollout
from .prompts import AHEAD, PromptSource

#: Seconds that servers have, at a stop, to cut off what they are sampling.
CUT_OFF_S = 2.0


@dataclass(frozen=True)
class _Work:
    """What the samples of a group share; ``answers``: what each had of answers before a resume."""

    group: LiveGroup
    prompt: Prompt
    lease: Lease
    answers: Mapping[int, Sequence[Answer]]


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
    """``plan``: where a resumed run goes on; its groups are in the ledger already. ``begin``, then ``run``."""

    def __init__(
        self,
        environment: EnvironmentClient,
        fleet: Fleet,
        batcher: Batcher,
        ledger: GroupLedger,
        recorder: Recorder,
        sampling: SamplingRules,
        rules: GenerationRules,
        plan: ResumePlan,
        *,
        prompts: PromptFailures,
        failures: FailureWindow,
    ) -> None:
        self._environment = environment
        self._source = PromptSource(environment, fleet.changes)
        self._fleet = fleet
        self._batcher = batcher
        self._ledger = ledger
        self._recorder = recorder
        self._sampling = sampling
        self._rules = rules
        self._partial = plan.partial
        self._tasks: set[asyncio.Future[None]] = set()
        self._prompts = prompts
        self._failures = failures
        self._zero_variance_in_a_row = 0
        self._episodes: dict[tuple[int, int], PartialRollout] = {}
        self._stopping = False
        self._error: BaseException | None = None
        self._ends: list[asyncio.Future[bool]] = []

    def begin(self) -> None:
        """End whole groups without variance that a crash came too early for, before anyone can ask for a batch."""
        groups = [group for group in self._ledger.live.values() if self._lacks_variance(group)]
        self._ends = [self._drop_zero_variance(group) for group in groups]

    async def run(self) -> None:
        """Admit groups until cancelled; cancels what is in flight then."""
        try:
            for ended in self._ends:
                await self._count_zero_variance(ended)
            for partial in self._partial:
                await self._go_on(partial)
            while True:
                self._admit(*await self._fleet.changes.until(self._room))
                await asyncio.sleep(0)
        finally:
            await cancel(*self._tasks)
            await self._source.close()

    async def _go_on(self, partial: PartialGroup) -> None:
        """Sample what a group from before the resume still lacks."""
        if (group := self._ledger.live.get(partial.group_id)) is None:
            return
        prompt = await self._environment.train_prompt(group.position)
        lease = await self._fleet.changes.until(lambda: self._lease(len(partial.missing)))
        group = self._ledger.live.get(partial.group_id)
        if group is not None:
            self._start(_Work(group, prompt, lease, partial.answers), partial.missing)
        else:
            lease.release(lease.places)

    def _may_start(self) -> bool:
        """Whether anything new may begin. Raises the error of a task, if any."""
        if self._error is not None:
            raise self._error
        return not self._recorder.paused and not self._stopping

    def _lease(self, places: int, allowed: Callable[[int], bool] = lambda version: True) -> Lease | None:
        """Places on a server."""
        return self._fleet.lease(places, allowed=allowed) if self._may_start() else None

    def _room(self) -> tuple[Lease, Prompt] | None:
        """Places for a group on a server whose version the bound allows, and the prompt that is next."""
        if not self._may_start() or self._batcher.active_groups >= self._rules.total_groups:
            return None
        prompt = self._next()
        lease = None if prompt is None else self._lease(self._rules.group_size, self._batcher.may_admit)
        return None if prompt is None or lease is None else (lease, prompt)

    def _admit(self, lease: Lease, prompt: Prompt) -> None:
        group_id, position = self._ledger.cursor.take()
        self._source.forget(position)
        size = self._rules.group_size
        group, admitted = self._ledger.admit(group_id, prompt.prompt_id, position, size, lease.held)
        self._follow(admitted)
        self._start(_Work(group, prompt, lease, {}), range(size))

    def _next(self) -> Prompt | None:
        """The next group's prompt, None while it is being fetched; prompts that were set aside are left out."""
        cursor = self._ledger.cursor
        while (prompt := self._source.get(cursor.ahead(AHEAD))) and self._prompts.is_set_aside(prompt.prompt_id):
            _, position = cursor.take()
            self._source.forget(position)
        return prompt

    def _start(self, work: _Work, samples: Iterable[int]) -> None:
        for sample_index in samples:
            task = asyncio.create_task(self._sample(work, sample_index))
            work.group.tasks.add(task)
            task.add_done_callback(work.group.tasks.discard)
            self._follow(task)

    def _follow(self, task: asyncio.Future[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self._fleet.changes.notify()

    async def _sample(self, work: _Work, sample_index: int) -> None:
        wanted: int | None = sample_index
        try:
            while wanted is not None:
                try:
                    trajectory, times = await self._episode(work, wanted)
                except Exception as error:  # fault boundary: a trajectory fails, it is counted, the run goes on
                    wanted = await self._failed(work, wanted, error)
                else:
                    break
            else:
                return
        finally:
            work.lease.release()
        group = await self._ledger.finish(trajectory, times)
        if group is not None and group.whole:
            await self._completed(group)

    async def _episode(self, work: _Work, sample_index: int) -> tuple[Trajectory, EpisodeTimes]:
        key = work.group.group_id, sample_index
        rollout = self._episodes[key] = PartialRollout(work.lease.generate, work.answers.get(sample_index, ()))
        timed = Timed(rollout.generate)
        try:
            trajectory = await run_episode(
                timed.generate,
                self._environment,
                work.prompt,
                group_id=work.group.group_id,
                sample_index=sample_index,
                sampling=self._sampling.sampling,
                context_length=self._sampling.context_length,
                seed_for_turn=lambda turn: None,
            )
        finally:
            del self._episodes[key]
        return trajectory, timed.times()

    async def _completed(self, group: LiveGroup) -> None:
        """Its last trajectory is in: the group is a success; one without variance is dropped by choice."""
        self._failures.success()
        if self._lacks_variance(group):  # nothing was awaited since it became complete: nobody can have taken it
            await self._count_zero_variance(self._drop_zero_variance(group))
        else:
            self._zero_variance_in_a_row = 0

    def _lacks_variance(self, group: LiveGroup) -> bool:
        """Whether the rewards of a whole group are all equal, and such groups are dropped."""
        if not self._rules.drop_zero_variance or not group.whole:
            return False
        return not has_variance([member.reward for member in group.members.values()])

    def _drop_zero_variance(self, group: LiveGroup) -> asyncio.Future[bool]:
        return self._ledger.drop(group.group_id, ZERO_VARIANCE)

    async def _count_zero_variance(self, ended: asyncio.Future[bool]) -> None:
        self._zero_variance_in_a_row += 1
        await ended
        if self._zero_variance_in_a_row >= self._rules.max_zero_variance:
            raise RunError(
                f"{self._zero_variance_in_a_row} groups in a row had equal rewards and were dropped: there is "
                "nothing to learn from these prompts; take others, or set train.drop_zero_variance = false"
            )

    async def _failed(self, work: _Work, sample_index: int, error: Exception) -> int | None:
        """Count one failure. The sample index to go on with in its place, or None: its group has ended."""
        group_id, reason = work.group.group_id, failure_reason(error)
        if group_id not in self._ledger.live:
            return None  # its group has ended: all its members are counted there
        blame = error.blame if isinstance(error, EpisodeError) else "own"
        print(f"trajectory {group_id}/{sample_index} failed: {reason}", flush=True)
        again = blame == "none" or self._prompts.failure(work.prompt.prompt_id, error)
        replacement = None
        if again and self._rules.resample_failed:
            replacement = await self._ledger.replace(group_id, sample_index, reason)
        else:
            await self._ledger.fail(group_id, sample_index, reason, requeue=again, in_a_row=blame == "own")
        if blame == "own":
            self._failures.failure(error, self._ledger.failed_in_a_row)
        return replacement

    async def keep_unfinished(self) -> None:
        """At a stop: admit nothing more, have the servers cut off what they are sampling, and keep what it has."""
        self._stopping = True
        for rollout in self._episodes.values():
            rollout.stop()
        servers = [server for server in self._fleet.servers if server.serving]
        cut = await asyncio.gather(
            *(asyncio.wait_for(server.client.abort(), CUT_OFF_S) for server in servers), return_exceptions=True
        )
        for server, error in zip(servers, cut, strict=True):
            if isinstance(error, Exception):
                print(f"{server.name} did not cut its answers off: {one_line(error)}", flush=True)
        deadline = asyncio.get_running_loop().time() + CUT_OFF_S
        while any(rollout.waiting for rollout in self._episodes.values()):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.01)
        kept = {key: tuple(rollout.answers) for key, rollout in self._episodes.items() if rollout.answers}
        try:
            await self._ledger.keep_answers(kept)
        except StoreFullError as error:
            print(f"unfinished trajectories are not kept: {error}", flush=True)
            return
        tokens = sum(len(answer.result.output_ids) for answers in kept.values() for answer in answers)
        of = f"{len(kept)} of {len(self._episodes)}"
        print(f"{of} unfinished trajectories are kept with {tokens} tokens", flush=True)

    def describe(self) -> str:
        """One phrase for the watchdog."""
        paused = f"; {self._recorder.paused}" if self._recorder.paused else ""
        return f"{len(self._tasks)} trajectories in flight, next group {self._ledger.cursor.next_group_id}{paused}"
