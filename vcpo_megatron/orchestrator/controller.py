"""The controller: starts the parts of a run in order, lets them run beside each other, ends them in order.

                    admits (bound)      finished, on disk      G oldest groups
     prompts --> Generation --------------> GroupLedger --------> Batcher --> training loop --BatchReady--> learner
                     |    ^            (Recorder, RolloutStore)                    ^                          |
            /generate|    |loaded version                                          +--------StepDone---------+|
                     v    |                                                                                   |
                rollout servers <--pause, begin, buckets, end, continue-- WeightSync <------WeightsReady------+
                  (Fleet)  ^                                                  |
                           +--------- Evaluation (held version) <-------------+--> eval/accuracy --> MetricsLog

Loops, each documented where it lives: ``LearnerLink.receive``, ``LearnerLink.heartbeat``, ``Fleet.supervise``,
``EnvironmentClient.supervise``, ``WeightSync.run``, ``Generation.run``, ``Evaluation.run``, and here:

``_train``     consumes: batches                       produces: steps, rows, checkpoints
               waits for: a batch (or an earlier evaluation, so that two never hold a version), StepDone
               unblocked by: finished trajectories, ended groups, ``Poll.retry_s``, a stop
``_watch``     consumes: nothing                       produces: a line in the log when nothing moved for watchdog_s
               waits for: time

``lag = "exact"`` replaces Generation, Batcher, Evaluation and ``_train`` by ``exact_lag.ExactRun``, and
``engine = "replay"`` replaces them by ``replay.Replay``, without servers; the ledger is the same.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..config.process import NOTE_PREFIX, WARNING_PREFIX, ProcessContext
from ..config.schema import RunConfig
from ..environments.client import EnvironmentClient
from ..observability.sinks import Sink
from ..rollout.client.protocol import SamplingParams
from ..rollout.fleet.fleet import Fleet
from ..run.notifier import Notifier
from ..run.tasks import StopRequest, run_all, run_beside
from ..transport.messages import ControlError, WeightsReady
from ..types import Batch, Group, PolicyVersion
from ..weight_sync.orchestrator import Transports, Updater
from ..weight_sync.verification import ChecksumVerifier
from .modes.batcher import Batcher
from .modes.evaluation import Evaluation, EvaluationResults, evaluating_servers
from .modes.exact_lag import ExactRun, ExactSampler
from .modes.failures import FailureWindow, PromptFailures
from .modes.generation import Generation, GenerationRules, SamplingRules
from .modes.metrics_log import MetricsLog, Start, evaluated_versions, start_of_log
from .modes.replay import Replay
from .modes.staleness import Pacer, StalenessBound
from .modes.trainer import Trainer
from .peers.learner import ControlSocket, LearnerLink, version_mismatch
from .peers.probe import Prober, compare
from .peers.servers import SAY_EVERY_S, all_answer, ready
from .peers.weight_sync import WeightSync
from .resuming import accept, check
from .store.ledger import GroupLedger
from .store.reader import StoreReader
from .store.recorder import Recorder
from .store.resume import ResumePlan
from .store.schema import StoreError
from .store.store import RolloutStore

#: With base_ess_ratio = "auto" the first steps run without lag, to measure the ratio on-policy.
AUTO_BASE_STEPS = 5


class Socket(ControlSocket, Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What a run is made of. ``fleet`` is None and ``recorded`` is set when the run replays another one's rollouts.

    ``sinks(first_step)`` opens the sinks of the metrics. ``steps``: optimizer steps to take in all. ``vocab_size`` and
    ``context_length`` (tokens) are the model's.
    """

    environment: EnvironmentClient
    fleet: Fleet | None
    recorded: StoreReader | None
    socket: Socket
    sinks: Callable[[int], Sequence[Sink]]
    changes: Notifier
    steps: int
    vocab_size: int
    context_length: int


class Controller:
    """One run of the orchestrator. Make it inside the event loop; ``run`` it once."""

    def __init__(self, context: ProcessContext, config: RunConfig, parts: Parts) -> None:
        self._context, self._config, self._parts = context, config, parts
        self._changes = parts.changes
        self._stop = StopRequest(config.launch.grace_s)
        self._version = PolicyVersion(context.attempt, context.resume_step or 0, context.run)
        fresh = context.resume_step is None
        self._recorder = Recorder(
            lambda: RolloutStore(context.directory.store, create=fresh), changed=self._changes.notify
        )
        self._link = LearnerLink(
            parts.socket,
            config.launch.timeout_s,
            on_weights=self._on_weights,
            on_sender=lambda message: self._transports.on_message(message),
            needs_weights=parts.fleet is not None,
        )
        self._transports = Transports(
            self._link.send,
            prefix=f"vcpo-{context.token[:8]}-{context.attempt}",
            timeout_s=config.rollout.sync_timeout_s,
        )
        self._take_weights: Callable[[WeightsReady], None] | None = None
        self._early: WeightsReady | None = None  # came before anybody could take them
        self._accepted = False
        self._log: MetricsLog | None = None
        self._trainer: Trainer | None = None
        self._describe: list[Callable[[], str]] = [self._link.describe]

    def request_stop(self, reason: str) -> None:
        """End with a checkpoint, within ``launch.grace_s`` if it can. Called by a signal handler of the event loop."""
        self._stop.make(reason)
        self._recorder.give_up()
        self._changes.notify()

    async def run(self) -> str:
        """The whole run; returns why it ended well ("run ended", or the reason of ``request_stop``).

        Raises RunError, ControlError, FleetError, SyncError or StoreError, each with one line for the user; servers
        are stopped and the store is closed in every case.
        """
        try:
            reason = await self._run_parts()
            await self._link.stop(reason)
            return reason
        except Exception as error:  # fault boundary: the learner must not wait for a run that is over
            await self._link.report(f"{type(error).__name__}: {error}")
            raise
        finally:
            await self._close()

    async def _run_parts(self) -> str:
        await self._recorder.open()
        state = await check(self._context, self._config, self._parts.environment, self._recorder)
        loops = [self._link.receive(), self._link.heartbeat(), self._watch(), self._parts.environment.supervise()]
        if (fleet := self._parts.fleet) is not None:
            fleet.launch()
            self._describe.append(fleet.describe)
            loops.append(fleet.supervise())
        await run_beside(self._work(state), *loops)
        return self._stop.reason or "run ended"

    async def _work(self, state: dict[str, Any]) -> None:
        """The run itself, once the learner holds what it begins with: nothing of an earlier attempt changes before."""
        if not await self._stop.unless_made(self._connect()):
            return
        plan = await accept(self._context, self._config, state, self._recorder)
        recorded = self._config.algorithm.mismatch == "recorded"
        ledger = GroupLedger.resumed(self._recorder, plan, requeue=state.get("requeue", []), recorded=recorded)
        self._accepted = True
        if self._parts.fleet is None:
            await self._replay(ledger, state)
        elif self._config.staleness.lag == "exact":
            await self._exact(self._parts.fleet, ledger, state)
        else:
            await self._bounded(self._parts.fleet, ledger, plan, state)

    # --- beginning and end --------------------------------------------------------------------

    def _start(self, ledger: GroupLedger, state: dict[str, Any], every: int) -> tuple[Trainer, Start]:
        """Trainer and metrics, cut back to the checkpoint; evaluations every ``every`` steps."""
        step = ledger.version
        versions = evaluated_versions(step, self._parts.steps, every)
        start = start_of_log(self._context.directory.metrics, step, self._parts.steps, state.get("rows", []), versions)
        self._log = MetricsLog(self._parts.sinks(step), start.versions, self._parts.steps, start.written)
        if start.problem:
            print(f"{WARNING_PREFIX}{start.problem}", flush=True)
        for row in start.rows:
            self._log.add(row)
        self._trainer = trainer = Trainer(
            self._config,
            self._link,
            ledger,
            self._recorder,
            self._log,
            self._context.directory,
            fingerprint=self._parts.environment.description.fingerprint,
            stop=self._stop,
        )
        return trainer, start

    async def _connect(self) -> None:
        """Wait for the learner, check that it is the one of this attempt, and wait until it has its parameters; say now
        and then what it does, and how many servers are ready beside it."""

        async def connect() -> None:
            hello = await self._link.hello()
            if problem := version_mismatch(hello, self._version):
                raise ControlError(problem)
            await self._link.loaded()

        async def say() -> None:
            started = time.monotonic()
            while True:
                servers = f", servers ({ready(self._parts.fleet)})" if self._parts.fleet else ""
                seconds = f"{time.monotonic() - started:.0f} s"
                print(f"{NOTE_PREFIX}waiting for the learner ({self._link.doing}){servers}, {seconds}", flush=True)
                await asyncio.sleep(SAY_EVERY_S)

        await run_beside(connect(), say())

    async def _start_servers(self, fleet: Fleet, sync: WeightSync) -> None:
        """Servers answer, hold the learner's weights, and agree with it on a probe."""
        await all_answer(fleet)
        print(f"{NOTE_PREFIX}waiting for the servers to load the learner's weights", flush=True)
        await sync.all_loaded(self._version.number)
        await compare(self._link, fleet, self._parts.vocab_size, self._config.model.dtype)
        print(
            f"{NOTE_PREFIX}learner and {len(fleet.servers)} servers hold version {self._version}: the first batch is "
            "being sampled",
            flush=True,
        )

    async def _close(self) -> None:
        """End everything; what failed before is not hidden by what fails here."""
        if self._trainer is not None:
            await self._trainer.close()
        if self._log is not None:
            self._log.flush()
            self._log.close()
        try:
            await self._recorder.finish("run ended" if self._accepted else None)
        except StoreError as error:
            print(
                f"{WARNING_PREFIX}the store did not take the end of the run, which a resume makes up for: {error}",
                flush=True,
            )
        if self._parts.fleet is not None:
            await self._parts.fleet.stop()
        if self._parts.recorded is not None:
            self._parts.recorded.close()

    def _on_weights(self, weights: WeightsReady) -> None:
        if self._take_weights is None:
            self._early = weights
        else:
            self._take_weights(weights)

    def _weights_go_to(self, take: Callable[[WeightsReady], None]) -> None:
        self._take_weights = take
        if self._early is not None:
            take(self._early)

    # --- kinds of runs ------------------------------------------------------------------------

    async def _replay(self, ledger: GroupLedger, state: dict[str, Any]) -> None:
        assert self._parts.recorded is not None
        trainer, _ = self._start(ledger, state, every=0)
        replay = Replay(self._parts.recorded, trainer, ledger, steps=self._parts.steps)
        self._describe.append(replay.describe)
        trainer.begin()
        await replay.run(self._stop)

    async def _exact(self, fleet: Fleet, ledger: GroupLedger, state: dict[str, Any]) -> None:
        config = self._config
        trainer, start = self._start(ledger, state, config.train.eval_every)
        sync = self._sync(fleet)
        run = ExactRun(
            ExactSampler(self._parts.environment, fleet, self._rules(), seed=config.train.seed),
            fleet,
            sync,
            ledger,
            trainer,
            EvaluationResults(self._recorder, trainer.log),
            steps=self._parts.steps,
            lag=config.staleness.max_staleness,
            groups_per_step=config.train.groups_per_step,
            group_size=config.train.group_size,
            evaluate=start.versions,
            recorded=config.algorithm.mismatch == "recorded",
            stop=self._stop,
        )
        self._weights_go_to(run.on_weights)
        self._describe.append(run.describe)

        async def main() -> None:
            if await self._stop.unless_made(self._start_servers(fleet, sync)):
                trainer.begin()
                await run.run()

        await run_beside(main(), sync.run())

    async def _bounded(self, fleet: Fleet, ledger: GroupLedger, plan: ResumePlan, state: dict[str, Any]) -> None:
        config = self._config
        trainer, start = self._start(ledger, state, config.train.eval_every)
        sync = self._sync(fleet, lambda version: version in start.versions)
        pacer = self._pacer(state)
        trainer.pacer = pacer
        batcher = Batcher(ledger, self._bound(), wait_s=config.staleness.wait_s, pacer=pacer)
        generation = Generation(
            self._parts.environment,
            fleet,
            batcher,
            ledger,
            self._recorder,
            self._rules(),
            self._generation_rules(),
            plan,
            prompts=PromptFailures(config.rollout.max_prompt_failures, plan.failures),
            failures=FailureWindow(_failure_window(config), config.rollout.max_failure_ratio),
        )
        evaluation = Evaluation(
            self._parts.environment,
            fleet,
            sync,
            self._rules(),
            EvaluationResults(self._recorder, trainer.log),
            start.versions,
            timeout_s=config.staleness.wait_s,
        )
        self._weights_go_to(sync.offer)
        self._describe += [batcher.describe, generation.describe, evaluation.describe]

        async def main() -> None:
            if await self._stop.unless_made(self._start_servers(fleet, sync)):
                generation.begin()
                await run_beside(
                    self._train(ledger, trainer, batcher, generation, evaluation, sync),
                    generation.run(),
                    evaluation.run(),
                )

        await run_beside(main(), sync.run())

    async def _train(
        self,
        ledger: GroupLedger,
        trainer: Trainer,
        batcher: Batcher,
        generation: Generation,
        evaluation: Evaluation,
        sync: WeightSync,
    ) -> None:
        trainer.begin()
        while trainer.version < self._parts.steps:
            started = time.monotonic()
            batch = await self._next_batch(trainer, batcher, evaluation, ledger)
            if batch is None:
                break
            waited = time.monotonic() - started
            result = await trainer.take(batch)
            if result is None:
                break
            self._changes.notify()
            await trainer.record(batch, result, wait_s=waited, sync=sync.take_metrics())
            await trainer.checkpoint_if_due()
        if self._stop.made and self._config.checkpoint.resume_partial:
            await run_all(trainer.checkpoint(), generation.keep_unfinished())
        await trainer.checkpoint()
        await self._changes.until(
            lambda: (self._stop.made or evaluation.is_settled(before=self._parts.steps + 1)) or None
        )
        await trainer.end()

    async def _next_batch(
        self, trainer: Trainer, batcher: Batcher, evaluation: Evaluation, ledger: GroupLedger
    ) -> Batch | None:
        """The batch of the next step; None when a stop is asked for. Where the method needs it, whole groups are scored
        by the learner as they come."""

        async def score(groups: Sequence[Group]) -> None:
            await ledger.record(await trainer.score(groups))

        while not self._stop.made:
            if not evaluation.may_train(trainer.version):
                await self._changes.wait()
                continue
            if unscored := ledger.unscored():
                # a step's worth at a time: what a step is made of fits the learner's memory, and a message
                await self._stop.unless_made(score(unscored[: self._config.train.groups_per_update]))
                continue
            poll = batcher.poll()
            for group_id in poll.expired:
                print(f"group {group_id} is dropped: too old, or not complete in staleness.wait_s", flush=True)
            for ended in poll.ends:
                await ended
                self._changes.notify()
            if poll.batch is not None:
                return poll.batch
            if not poll.expired:
                await self._changes.wait(float("inf") if poll.retry_s is None else poll.retry_s)
        return None

    # --- parts --------------------------------------------------------------------------------

    def _rules(self) -> SamplingRules:
        rollout = self._config.rollout
        sampling = SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature)
        return SamplingRules(sampling, self._parts.context_length)

    def _sync(self, fleet: Fleet, evaluation_due: Callable[[int], bool] = lambda number: False) -> WeightSync:
        """``lag`` = "exact" updates all servers together: none of them generates meanwhile."""
        rollout = self._config.rollout
        verifier = ChecksumVerifier() if rollout.verify_sync else None
        wave = rollout.sync_wave if self._config.staleness.lag == "bounded" else len(fleet.servers)
        return WeightSync(
            fleet,
            Updater(self._transports.of, rollout.pause_mode, verifier),
            wave=wave,
            timeout_s=rollout.sync_timeout_s,
            evaluators=evaluating_servers(fleet.servers),
            evaluation_due=evaluation_due,
            prober=Prober(self._parts.vocab_size, self._config.model.dtype),
        )

    def _generation_rules(self) -> GenerationRules:
        config = self._config
        return GenerationRules(
            group_size=config.train.group_size,
            total_groups=self._parts.steps * config.train.groups_per_update,
            resample_failed=config.rollout.on_failure == "resample",
            drop_zero_variance=config.train.drop_zero_variance,
            max_zero_variance=_failure_window(config),
        )

    def _pacer(self, state: dict[str, Any]) -> Pacer | None:
        staleness = self._config.staleness
        if not staleness.adaptive:
            return None
        least = self._config.train.updates_per_batch - 1
        pacer = Pacer(staleness.max_staleness, staleness.adaptive_ess, least)
        if "pacer" in state:
            pacer.restore(state["pacer"])
        return pacer

    def _bound(self) -> StalenessBound:
        config = self._config
        on_policy = AUTO_BASE_STEPS if config.algorithm.base_ess_ratio == "auto" else 0
        train, k = config.train, config.staleness.max_staleness
        return StalenessBound(k, train.groups_per_update, on_policy, train.updates_per_batch)

    def _starts(self) -> bool:
        """Whether a server starts, which takes minutes and has a deadline of its own."""
        fleet = self._parts.fleet
        return fleet is not None and any(server.starting for server in fleet.servers)

    async def _watch(self) -> None:
        patience = self._config.observability.watchdog_s
        seen, since = self._changes.count, time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, patience / 4))
            if self._changes.count != seen or self._starts():
                seen, since = self._changes.count, time.monotonic()
            elif time.monotonic() - since > patience:
                print(f"nothing moved for {patience:g} s: " + "; ".join(part() for part in self._describe), flush=True)
                since = time.monotonic()


def _failure_window(config: RunConfig) -> int:
    """Outcomes among which failures are counted: many times what can be in flight; no more than a list can hold."""
    return min(max(100, 10 * (config.staleness.max_staleness + 1) * config.train.groups_per_step), sys.maxsize)
