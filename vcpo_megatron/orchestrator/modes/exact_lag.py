"""Exact lag: step t trains on what version max(0, t - k) sampled, serially and repeatably.

    stage t, servers at version t:   sample batch t + k (at the start also the ones before it), then evaluate t
                                     meanwhile the learner takes step t on batch t
    then:                            row, checkpoint, version t + 1 to the servers

Where the learner is to score what was sampled (``algorithm.mismatch`` = "recorded"), version t does so before step t:
the step waits for the whole of the stage's sampling, and the two halves run one after the other.

A stop ends a stage whose step is not done as if it had not begun: what version t sampled is sampled again, to the same
tokens, after a resume from checkpoint t. When the step is done, the rest of the stage has its part of
``launch.grace_s``, since no later version could sample it; if that is too short, the run ends with the checkpoints it
has.

``ExactRun.run``   consumes: batches by data position      produces: steps, rows, checkpoints
                   waits for: both halves of a stage, then the weights of the next version
                   unblocked by: the learner; the servers' answers
``Rounds.run``     consumes: one request of every running episode    produces: their answers, one list request a server
                   waits for: the slowest environment of the round

A batch's requests go out as one ordered list; environments of several turns move in lock-step, one list a round. Each
request carries a seed made of (train.seed, prompt, sample, turn), so an answer does not depend on anything else. Rows
are written when both halves of a stage are done, so counters do not depend on who was faster. A failed trajectory
ends the run; one that is lost with an environment worker by another one's fault is led through its answers again, so
that the one at fault ends it, by its name, if it fails at all. A batch is recorded whole, in one transaction.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from ...environments.client import EnvironmentClient, Prompt
from ...rollout.agent_loop import EpisodeError, Generate, run_episode
from ...rollout.client.http import ServerError, ServerUnavailable
from ...rollout.client.protocol import GenerateResult, ImpossibleLogprobs, ProtocolError, SamplingParams
from ...rollout.fleet.fleet import Fleet
from ...rollout.fleet.server import Server
from ...rollout.fleet.trust import impossible
from ...run.tasks import RunError, StopRequest, run_all, run_beside
from ...transport.messages import WeightsReady
from ...types import Batch, Group, StepResult, Trajectory
from ..peers.servers import back_in_service
from ..peers.weight_sync import WeightSync
from ..store.ledger import GroupLedger
from ..store.records import EpisodeTimes, HeldOutSample
from .episode_times import Timed
from .evaluation import EVALUATION_GROUP, EvaluationResults
from .failures import failure_reason
from .generation import SamplingRules
from .partial_rollouts import led_through
from .trainer import Trainer


def sampling_seed(seed: int, prompt_id: str, sample_index: int, turn: int) -> int:
    """31-bit seed of one answer: the same in every run, process and Python version."""
    text = f"{seed}\0{prompt_id}\0{sample_index}\0{turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") & 0x7FFFFFFF


@dataclass(frozen=True)
class ExactEpisode:
    """One trajectory to sample; ``server`` is where its requests go."""

    prompt: Prompt
    group_id: int
    sample_index: int
    server: Server


@dataclass(frozen=True)
class _Request:
    input_ids: Sequence[int]
    sampling: SamplingParams
    rid: str
    answer: asyncio.Future[GenerateResult]


class Rounds:
    """Answers the requests of ``servers[i]``'s episode i together: when every running episode has one."""

    def __init__(self, fleet: Fleet, servers: Sequence[Server]) -> None:
        self._fleet = fleet
        self._servers = servers
        self._running = len(servers)
        self._requests: dict[int, _Request] = {}
        self._complete = asyncio.Event()

    def generate(self, index: int) -> Generate:
        """``Generate`` of episode ``index``."""

        async def generate(input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
            answer: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
            self._requests[index] = _Request(input_ids, sampling, rid, answer)
            self._look()
            return await answer

        return generate

    def ended(self) -> None:
        """An episode has no further request."""
        self._running -= 1
        self._look()

    def _look(self) -> None:
        if self._requests and len(self._requests) == self._running:
            self._complete.set()

    async def run(self) -> None:
        """Submit round after round until cancelled."""
        while True:
            await self._complete.wait()
            self._complete.clear()
            requests, self._requests = self._requests, {}
            by_server: dict[Server, list[_Request]] = {}
            for index in sorted(requests):
                by_server.setdefault(self._servers[index], []).append(requests[index])
            await run_all(*(self._submit(server, chosen) for server, chosen in by_server.items()))

    async def _submit(self, server: Server, requests: Sequence[_Request]) -> None:
        for request, result in zip(requests, await self._answers(server, requests), strict=True):
            request.answer.set_result(result)

    async def _answers(self, server: Server, requests: Sequence[_Request]) -> list[GenerateResult]:
        """One list request; run again, with the same seeds and so the same answers, when the server was restarted, or
        when what it answered cannot be."""
        prompts = [request.input_ids for request in requests]
        samplings = [request.sampling for request in requests]
        rids = [request.rid for request in requests]
        while True:
            await back_in_service(self._fleet, server)
            incarnation, held = server.incarnation, server.held
            try:
                results = await server.client.generate_batch(prompts, samplings, rids)
            except ImpossibleLogprobs as error:
                self._fleet.doubt(server, held, impossible(error))
            except ServerUnavailable as error:
                if self._fleet.check(server, incarnation):
                    raise RunError(f"{server.name} did not answer: {error}, {server.where}") from error
            except (ServerError, ProtocolError) as error:
                raise RunError(f"{server.name} refused a batch: {error}, {server.where}") from error
            else:
                if await self._fleet.believes(server, held, results, samplings):
                    return results


class ExactSampler:
    """Samples batches by data position, and held-out prompts, on servers that hold one version."""

    def __init__(self, environment: EnvironmentClient, fleet: Fleet, rules: SamplingRules, *, seed: int) -> None:
        self._environment = environment
        self._fleet = fleet
        self._rules = rules
        self._seed = seed
        self._times: dict[tuple[int, int], EpisodeTimes] = {}

    def take_times(self) -> dict[tuple[int, int], EpisodeTimes]:
        """Of what was sampled since the last call, by (group id, sample index)."""
        times, self._times = self._times, {}
        return times

    async def sample(self, episodes: Sequence[ExactEpisode]) -> list[Trajectory]:
        """Trajectories in the order of ``episodes``; RunError when one fails."""
        rounds = Rounds(self._fleet, [episode.server for episode in episodes])
        found: list[Trajectory | None] = [None] * len(episodes)

        async def one(index: int, episode: ExactEpisode) -> None:
            prompt_id, sample_index = episode.prompt.prompt_id, episode.sample_index

            def play(generate: Generate) -> Awaitable[Trajectory]:
                return run_episode(
                    generate,
                    self._environment,
                    episode.prompt,
                    group_id=episode.group_id,
                    sample_index=sample_index,
                    sampling=self._rules.sampling,
                    context_length=self._rules.context_length,
                    seed_for_turn=lambda turn: sampling_seed(self._seed, prompt_id, sample_index, turn),
                )

            timed = Timed(rounds.generate(index))
            try:
                found[index] = await led_through(timed.generate, play)
            except EpisodeError as error:
                raise RunError(
                    f'lag = "exact" ends with the first trajectory that fails: {failure_reason(error)}'
                ) from error
            rounds.ended()
            if episode.group_id != EVALUATION_GROUP:
                self._times[episode.group_id, sample_index] = timed.times()

        await run_beside(run_all(*(one(i, episode) for i, episode in enumerate(episodes))), rounds.run())
        return [trajectory for trajectory in found if trajectory is not None]

    async def groups(self, numbered: Sequence[tuple[int, int]], size: int) -> list[Group]:
        """Groups of ``size`` samples for (group id, data position) pairs, in their order."""
        servers = self._fleet.servers
        found = await run_all(*(self._environment.train_prompt(position) for _, position in numbered))
        prompts = {group_id: prompt for (group_id, _), prompt in zip(numbered, found, strict=True)}
        episodes = [
            ExactEpisode(prompts[group_id], group_id, sample, servers[position % len(servers)])
            for group_id, position in numbered
            for sample in range(size)
        ]
        members: dict[int, list[Trajectory]] = {group_id: [] for group_id, _ in numbered}
        for trajectory in await self.sample(episodes):
            members[trajectory.group_id].append(trajectory)
        return [Group(group_id, prompts[group_id].prompt_id, tuple(members[group_id])) for group_id, _ in numbered]

    async def heldout(self) -> list[HeldOutSample]:
        """One sample of every held-out prompt, by the version that the servers hold."""
        servers = self._fleet.servers
        heldout = self._environment.description.heldout
        episodes = [ExactEpisode(e, EVALUATION_GROUP, i, servers[i % len(servers)]) for i, e in enumerate(heldout)]
        trajectories = await self.sample(episodes) if episodes else []
        return [HeldOutSample(t.sample_index, t.prompt_id, t) for t in trajectories]


class _StageAborted(Exception):
    """A stop ends the stage; ``whole``: the run is as it was before the stage, so that it can be checkpointed."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole


class ExactRun:
    """The stages from the ledger's version to ``steps``; see the module."""

    def __init__(
        self,
        sampler: ExactSampler,
        fleet: Fleet,
        sync: WeightSync,
        ledger: GroupLedger,
        trainer: Trainer,
        results: EvaluationResults,
        *,
        steps: int,
        lag: int,
        groups_per_step: int,
        group_size: int,
        evaluate: Sequence[int],
        recorded: bool,
        stop: StopRequest,
    ) -> None:
        self._recorded = recorded
        self._sampler, self._fleet, self._sync = sampler, fleet, sync
        self._ledger, self._trainer, self._results = ledger, trainer, results
        self._steps, self._lag = steps, lag
        self._groups_per_step, self._group_size = groups_per_step, group_size
        self._evaluate = evaluate
        self._stop = stop
        self._batches: dict[int, Batch] = {}
        self._weights: WeightsReady | None = None
        self._at = ""
        self._drawn = -1  # newest stage whose sampling is done
        self._sampled = -1  # newest stage whose sampling and evaluation are done

    def on_weights(self, weights: WeightsReady) -> None:
        """The first weights are loaded at once; later ones when their stage begins."""
        if self._sync.newest is None:
            self._sync.offer(weights)
        self._weights = weights
        self._fleet.changes.notify()

    async def run(self) -> None:
        """Every stage to the end, or until a stop is asked for; then the last checkpoint and evaluation."""
        try:
            while self._trainer.version < self._steps and not self._stop.made:
                await self._stage(self._trainer.version)
        except _StageAborted as aborted:
            if not aborted.whole:
                return await self._trainer.saved()
        await self._trainer.checkpoint()
        if self._steps in self._evaluate and not self._stop.made:
            await self._evaluation(self._steps)
        await self._trainer.end()

    async def _stage(self, step: int) -> None:
        started = time.monotonic()

        async def sample() -> None:
            for index in range(step, min(step + self._lag, self._steps - 1) + 1):
                if index not in self._batches:
                    self._at = f"batch {index} is being sampled by version {step}"
                    self._batches[index] = await self._batch(index, step)
                    self._fleet.changes.notify()
            self._drawn = step
            self._fleet.changes.notify()
            if step in self._evaluate:
                await self._evaluation(step)
            self._at = f"stage {step} waits for the learner"
            self._sampled = step
            self._fleet.changes.notify()

        def begins() -> bool:
            """The learner may leave version ``step``, which scores what it samples."""
            return self._drawn == step if self._recorded else step in self._batches

        async def learn() -> tuple[Batch, StepResult, float]:
            await self._fleet.changes.until(lambda: (begins() or self._stop.made) or None)
            waited, batch = time.monotonic() - started, self._batches.get(step) if begins() else None
            if batch is None:
                raise _StageAborted(whole=True)
            result = await self._trainer.take(batch, may_go_on=lambda: self._sampled == step)
            if result is None:
                raise _StageAborted(whole=True)
            await self._sampled_in_time(step)
            return batch, result, waited

        (batch, result, waited), _ = await run_all(learn(), sample())
        del self._batches[step]
        await self._trainer.record(batch, result, wait_s=waited, sync=self._sync.take_metrics())
        await self._trainer.checkpoint_if_due()
        await self._stop.unless_made(self._publish(step + 1))

    async def _sampled_in_time(self, step: int) -> None:
        """Wait until the stage's other half is done; after a stop, as long as a step may take."""
        await self._fleet.changes.until(lambda: (self._sampled == step or self._stop.made) or None)
        try:
            await self._fleet.changes.until(lambda: self._sampled == step or None, self._stop.seconds_for_step())
        except TimeoutError:
            print(
                f"stage {step} was aborted: launch.grace_s = {self._stop.grace_s:g} s had no room for what its version "
                "was still sampling; a resume takes the step again",
                flush=True,
            )
            raise _StageAborted(whole=False) from None

    async def _publish(self, version: int) -> None:
        """Load ``version`` on every server, unless nothing will be sampled by it."""
        if version == self._steps and version not in self._evaluate:
            return
        self._at = f"version {version} is being loaded"

        def arrived() -> WeightsReady | None:
            return self._weights if self._weights is not None and self._weights.version.number == version else None

        weights = await self._fleet.changes.until(arrived)
        self._sync.offer(weights)
        await self._sync.all_loaded(version)

    async def _evaluation(self, version: int) -> None:
        self._at = f"version {version} is being evaluated"
        await self._results.add(version, await self._sampler.heldout())

    async def _batch(self, index: int, version: int) -> Batch:
        """Batch ``index``: what is known of it from before a resume, the rest sampled now by ``version``."""
        positions = range(index * self._groups_per_step, (index + 1) * self._groups_per_step)
        known = self._ledger.groups_at(positions)
        missing = [position for position in positions if position not in known]
        if missing and version != max(0, index - self._lag):
            raise RunError(
                f'lag = "exact" cannot go on from step {version}: batch {index}, which version {index - self._lag} '
                "sampled, is not complete in rollouts.sqlite; resume from an earlier checkpoint"
            )
        if missing:
            numbered = [(self._ledger.cursor.new_id(), position) for position in missing]
            groups = await self._sampler.groups(numbered, self._group_size)
            if self._recorded:
                groups = list(await self._trainer.score(groups))
            sampled = dict(zip(missing, groups, strict=True))
            await self._ledger.admit_whole(sampled, self._sampler.take_times())
            known |= sampled
        return Batch(index, tuple(known[position] for position in positions))

    def describe(self) -> str:
        """One phrase for the watchdog."""
        return self._at
