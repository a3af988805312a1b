"""In-process stand-ins for everything around the orchestrator: learner, servers, processes, environment; no torch.

The learner speaks through the real control socket from a thread of its own; the servers are objects with the
client's methods that hold a version and check the update protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.environments.in_process import InProcess
from tests.ports import HeldPort
from vcpo_megatron.config.load import written
from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.environments.base import Example, Observation, Outcome
from vcpo_megatron.environments.workers.pool import WorkerPool
from vcpo_megatron.environments.workers.setup import WorkerSetup
from vcpo_megatron.observability.sinks import JsonlSink
from vcpo_megatron.orchestrator.controller import Controller, Parts
from vcpo_megatron.orchestrator.modes.replay import open_recorded, recorded_steps
from vcpo_megatron.rollout.client.http import ServerError, ServerUnavailable
from vcpo_megatron.rollout.client.protocol import GenerateResult, SamplingParams, Span
from vcpo_megatron.rollout.client.replies import ServerInfo
from vcpo_megatron.rollout.fleet.fleet import Fleet, FleetOptions
from vcpo_megatron.rollout.fleet.server import Server
from vcpo_megatron.run.directory import Manifest, RunDirectory
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.transport.control import ControlClient, ControlServer
from vcpo_megatron.transport.messages import (
    AbortStep,
    BatchReady,
    Checkpoint,
    CheckpointDone,
    Error,
    GroupsScored,
    Heartbeat,
    Hello,
    Loaded,
    Probe,
    ProbeResult,
    ScoreGroups,
    SendWeights,
    StepAborted,
    StepDone,
    Stop,
    SyncDone,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from vcpo_megatron.types import Batch, Group, PolicyVersion, StepResult, TrajectoryResult
from vcpo_megatron.weight_sync.probe import probe_tokens

VOCABULARY = 50
CONTEXT = 64
URL = "http://fake"


def config(**sections: dict[str, Any]) -> RunConfig:
    """A small run; ``sections`` override keys of a section. Its deadlines are those that no test waits for: so long
    that a busy machine keeps them."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "/nowhere", "dtype": "float32"},
        "train": {"steps": 6, "groups_per_step": 2, "group_size": 2, "eval_every": 0},
        "rollout": {"max_new_tokens": 8, "max_running_requests": 64, "start_timeout_s": 30.0, "sync_timeout_s": 30.0},
        "environment": {"name": "fake"},
        "staleness": {"max_staleness": 1, "wait_s": 20.0},
        "checkpoint": {"every": 0},
        "launch": {"timeout_s": 30.0},
        "observability": {"tensorboard": False, "watchdog_s": 5.0},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return RunConfig.model_validate(base)


# --- environment ------------------------------------------------------------------------------


class FakeEpisode:
    def __init__(self, environment: FakeEnvironment, example: Example) -> None:
        self._environment, self._example = environment, example
        self._turn = 0

    async def reset(self) -> Observation:
        return Observation((1 + self._example.data["index"] % 40, 2))

    async def step(self, action: Any) -> Observation | Outcome:
        self._turn += 1
        if self._environment.fails(self._example):
            raise ValueError("the judge is down")
        await asyncio.sleep(self._environment.delay_s(self._example))
        if self._turn < self._environment.turns and action.token_ids:
            return Observation((3,))
        return Outcome(float(sum(action.token_ids) % 2))

    async def close(self) -> None:
        self._environment.closed += 1


@dataclass
class FakeEnvironment:
    turns: int = 1
    fails: Callable[[Example], bool] = lambda example: False
    delay_s: Callable[[Example], float] = lambda example: 0.0
    heldout_prompts: int = 3
    name: str = "fake"
    fingerprint: str = "f"
    sampling: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True, "max_new_tokens": 4})
    max_prompt_tokens: int = 2
    closed: int = 0

    def train_example(self, index: int) -> Example:
        return Example(f"train-{index}", {"index": index})

    def heldout(self) -> Sequence[Example]:
        return [Example(f"heldout-{i}", {"index": 1000 + i}) for i in range(self.heldout_prompts)]

    def episode(self, example: Example) -> FakeEpisode:
        return FakeEpisode(self, example)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


# --- servers ----------------------------------------------------------------------------------


class FakeProcess:
    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


class FakeClient:
    """A server and its client in one. ``events`` records what it was asked, in order."""

    def __init__(self, index: int = 0, *, latency_s: float = 0.002) -> None:
        self.base_url = URL
        self.info = ServerInfo()
        self.index = index
        self.latency_s = latency_s
        self.process: FakeProcess | None = None
        self.refuses: Callable[[str], bool] = lambda version: False
        self.score_offset = 0.0
        self.moves: Callable[[int], float] = lambda number: 0.0  # log-probs of the probe, by the version held
        self.policy: Callable[[str], object] = lambda version: PolicyVersion.parse(version).number
        self.events: list[str] = []
        self.cache_key: str | None = None
        self.reset()

    def reset(self) -> None:
        self.version: str | None = None
        self.paused = False
        self.session: list[str] | None = None
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.aborted = asyncio.Event()

    def _alive(self) -> None:
        if self.process is None or self.process.code is not None:
            raise ServerUnavailable(URL, "/x", "connection refused")

    async def ready(self) -> bool:
        return self.process is not None and self.process.code is None and not self.paused

    async def adopt(self) -> None:
        self._alive()
        self.events.append("adopt")
        self.session, self.version = None, "unknown"
        self.aborted.set()
        self.aborted = asyncio.Event()
        await self.resume()

    async def check_capabilities(self) -> None:
        self._alive()

    async def health(self, timeout_s: float) -> str:
        self._alive()
        if self.paused:
            raise ServerError(URL, "/ready", 503, "it is paused")
        return str(self.version)

    async def close(self) -> None:
        self.events.append("close")

    async def pause(self, mode: str) -> None:
        self._alive()
        self.paused = True
        self.resumed.clear()

    async def resume(self) -> None:
        self._alive()
        self.paused = False
        self.resumed.set()

    async def abort(self, rid: str | None = None) -> None:
        self._alive()
        self.events.append("abort")
        self.aborted.set()
        self.aborted = asyncio.Event()

    async def begin_weight_update(self) -> None:
        self._alive()
        if not self.paused or self.session is not None:
            raise ServerError(URL, "/begin_weight_update", 400, "not paused, or a session is open")
        self.session = []

    async def update_weights_from_tensor(self, bucket: bytes, version: str, flush_cache: bool = False) -> None:
        self._alive()
        assert not flush_cache
        await asyncio.sleep(self.latency_s)
        if self.session is None:
            raise ServerError(URL, "/update_weights_from_tensor", 400, "no session")
        if self.refuses(version):
            raise ServerError(URL, "/update_weights_from_tensor", 400, "shape mismatch")
        self.session.append(bucket.decode())

    async def end_weight_update(self) -> None:
        self._alive()
        session, self.session = self.session, None
        if session == ["a" + session[0][1:], "b" + session[0][1:]] if session else False:
            self.version = session[0][1:]
            self.events.append(f"loaded {self.version}")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        self._alive()
        number = PolicyVersion.parse(self.version).number if self.version else 0
        return [-float(token) / 10 + self.score_offset + self.moves(number) for token in tokens[1:]]

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        self._alive()
        assert self.version is not None, f"request {rid} before any weights"
        process, first = self.process, self.version
        self.events.append(f"generate {rid} by {first}")
        await self.resumed.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.aborted.wait(), self.latency_s)
            return answer(input_ids, sampling, rid, first, first, self.policy(first), cut=2)
        await self.resumed.wait()
        if self.process is not process:
            raise ServerUnavailable(URL, "/generate", "connection reset")
        self._alive()
        return answer(input_ids, sampling, rid, first, self.version, self.policy(self.version))

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], rids: Sequence[str] | None = None
    ) -> list[GenerateResult]:
        assert rids is not None
        self.events.append(f"batch of {len(prompts)} by {self.version}")
        return list(await asyncio.gather(*(self.generate(*row) for row in zip(prompts, samplings, rids, strict=True))))


def answer(
    input_ids: Sequence[int],
    sampling: SamplingParams,
    rid: str,
    first: str,
    last: str,
    policy: object,
    cut: int | None = None,
) -> GenerateResult:
    """Tokens that depend on ``policy`` and on the seed, or without one on the request id; half by each version when
    they differ; aborted after ``cut`` of them."""
    key = rid if sampling.sampling_seed is None else str(sampling.sampling_seed)
    digest = hashlib.sha256(f"{list(input_ids)} {key} {policy}".encode()).digest()
    count = min(sampling.max_new_tokens, 4)
    tokens = tuple(3 + byte % 40 for byte in digest[:count])
    if cut is not None:
        logprobs = tuple(-1.0 - byte / 512 for byte in digest[:cut])
        return GenerateResult(tokens[:cut], logprobs, (Span(0, cut, first),), "abort")
    if last == first or count < 2:
        spans: tuple[Span, ...] = (Span(0, count, first),)
    else:
        spans = (Span(0, count // 2, first), Span(count // 2, count, last))
    return GenerateResult(tokens, tuple(-1.0 - byte / 512 for byte in digest[:count]), spans, "length")


def fake_fleet(cfg: RunConfig, changes: Notifier, clients: Sequence[FakeClient], run_dir: Path) -> Fleet:
    def launch(index: int) -> FakeProcess:
        client = clients[index]
        client.process = FakeProcess()
        client.reset()
        client.events.append("start")
        return client.process

    def stop(process: Any) -> int:
        process.code = -15 if process.code is None else process.code
        return process.code

    servers = [Server(i, client, run_dir / "logs" / f"server.{i}.log") for i, client in enumerate(clients)]  # type: ignore[arg-type]
    options = FleetOptions(
        capacity=cfg.rollout.max_running_requests,
        max_restarts=cfg.rollout.max_restarts,
        start_timeout_s=cfg.rollout.start_timeout_s,
        takeover_timeout_s=30.0,
    )
    return Fleet(servers, options, launch=launch, stop=stop, changes=changes)


# --- learner ----------------------------------------------------------------------------------


def weights(version: PolicyVersion) -> WeightsReady:
    return WeightsReady(version, "tensor", [[["a", "float32", [2]]], [["b", "float32", [3]]]])


def bucket_texts(version: PolicyVersion) -> tuple[bytes, bytes]:
    """What FakeClient takes as the two buckets of ``weights(version)``."""
    return f"a{version}".encode(), f"b{version}".encode()


def score_of(groups: Sequence[Group], version: PolicyVersion) -> np.ndarray:
    """What the learner gives the groups' tokens: of every version other numbers."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    own = [np.where(t.loss_mask, t.behavior_logprobs - 0.01 * version.number, 0.0) for t in trajectories]
    return np.concatenate(own).astype(np.float32)


class FakeLearner(threading.Thread):
    """Learner rank 0. ``batches`` is what it trained on, ``scored`` ids of the groups that it scored. In its thread
    ``at_step(step)`` is called before a step, and ``at_score(group ids)`` before groups are scored."""

    def __init__(self, context: ProcessContext, *, step_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._context = context
        self.step_s = step_s
        self.version = PolicyVersion(context.attempt, context.resume_step or 0)
        self.batches: list[Batch] = []
        self.scored: list[int] = []
        self.asked_for: list[int] = []  # groups to score at a time
        self.at_score: Callable[[list[int]], None] = lambda groups: None
        self.score_error_from: int | None = None
        self.checkpoints: list[int] = []
        self.stopped: str | None = None
        self.errors: list[str] = []
        self.at_step: Callable[[int], None] = lambda step: None
        self.cannot_load: str | None = None
        self.before_loaded: Callable[[ControlClient], None] = lambda client: None
        self.error_at: int | None = None
        self.silent_at: int | None = None
        self.skips: set[int] = set()
        self.vanished: set[int] = set()  # steps whose weights are all 0
        self.long_steps: set[int] = set()  # steps that take ``long_s``
        self.long_s = 60.0
        self.may_leave = True
        self.left: list[int] = []
        self.sends_weights = True
        self.updates = 1  # of a batch
        self.moves: Callable[[int], float] | None = None  # log-probs of the probe, by version
        self.ess_ratio = 1.0
        self.first_ess_ratio: float | None = None
        self.on_policy_ratio: float | None = None
        self.values: dict[str, str | None] = {}  # of the configuration, for manifests
        self._synced = threading.Event()
        self._synced.set()
        self._ended = False

    def run(self) -> None:
        client = ControlClient(self._context.control)
        try:
            client.send(Hello(self._context.token, self.version, 1))
            if self.cannot_load is not None:
                client.send(Error("learner rank 0", self.cannot_load))
                return
            self.before_loaded(client)
            client.send(Loaded(self.version))
            sender = threading.Thread(target=self._send_weights, args=(client,), daemon=True)
            sender.start()
            self._weights(client)
            deadline = time.monotonic() + 120
            while self.stopped is None and not self.errors and time.monotonic() < deadline:
                if (received := client.receive(0.02)) is not None:
                    self._handle(client, received.message)
            self._ended = True
            sender.join()
        finally:
            client.close()

    def _send_weights(self, client: ControlClient) -> None:
        """What the learner's sender does beside its steps."""
        while not self._ended:
            match client.receive_for_sender(0.02):
                case SyncDone():
                    self._synced.set()
                case SendWeights(name, version):
                    for number, text in enumerate(bucket_texts(version)):
                        client.send(WeightsBucket(name, number, text))
                    client.send(WeightsSent(name, version, {}))

    def _weights(self, client: ControlClient) -> None:
        assert self._synced.is_set(), "SyncDone comes before the next WeightsReady"
        self._synced.clear()
        if not self.sends_weights:
            return
        probe: list[float] = []
        if self.moves is not None:
            probe = [-float(token) / 10 + self.moves(self.version.number) for token in probe_tokens(VOCABULARY)[1:]]
        client.send(replace(weights(self.version), probe=probe))

    def _handle(self, client: ControlClient, message: Any) -> None:
        match message:
            case Probe():
                client.send(ProbeResult((-message.tokens[1:] / 10).astype(np.float32)))
            case BatchReady():
                self._step(client, message.batch)
            case ScoreGroups():
                self._score(client, message.batch)
            case Checkpoint():
                self._checkpoint(client, message)
            case Stop():
                self.stopped = message.reason
            case Error():
                self.errors.append(message.message)

    def _score(self, client: ControlClient, batch: Batch) -> None:
        assert batch.step == self.version.number, (batch.step, self.version)
        if self.score_error_from is not None and batch.step >= self.score_error_from:
            client.send(Error("learner rank 0", "CUDA out of memory"))
            return
        self.at_score([group.group_id for group in batch.groups])
        self.asked_for.append(len(batch.groups))
        self.scored += [group.group_id for group in batch.groups]
        client.send(GroupsScored(self.version, score_of(batch.groups, self.version)))

    def _step(self, client: ControlClient, batch: Batch) -> None:
        self.at_step(batch.step)
        if batch.step == self.error_at:
            client.send(Error("learner rank 0", "CUDA out of memory"))
            return
        if batch.step == self.silent_at:
            return
        if not self._synced.wait(30.0):  # the learner may not send newer weights before
            return
        client.send(Heartbeat("learner", f"step {batch.step}"))
        if self._leaves(client, batch.step):
            self.left.append(batch.step)
            client.send(StepAborted(batch.step))
            return
        assert batch.step == self.version.number, (batch.step, self.version)
        self.batches.append(batch)
        self.learn(batch)
        self.version = PolicyVersion(self.version.attempt, batch.step + 1)
        results = tuple(
            TrajectoryResult(t.group_id, t.sample_index, 0.0, 1.0, 1.0, 0.0)
            for group in batch.groups
            for t in group.trajectories
        )
        vanished = batch.step in self.vanished
        skipped = "non-finite step" if batch.step in self.skips else "vanishing weights" if vanished else ""
        first = self.first_ess_ratio if batch.step == 0 else None
        ess_ratio = self.ess_ratio if first is None else first
        metrics = {"loss": 0.5, "ess/ratio": ess_ratio, "time/forward_backward": 0.1}
        metrics["weight/mean"] = 0.0 if vanished else 1.0
        if self.on_policy_ratio is not None:
            metrics["ess/ratio_on_policy"] = self.on_policy_ratio
        follow = self.version.number % self.updates == 0
        client.send(StepDone(StepResult(batch.step, self.version, skipped, metrics, results), follow))
        if follow:
            self._weights(client)

    def _leaves(self, client: ControlClient, step: int) -> bool:
        """Takes as long as the step does; whether it was to be left meanwhile."""
        end = time.monotonic() + (self.long_s if step in self.long_steps else self.step_s)
        asked = False
        while not asked and (left := end - time.monotonic()) > 0:
            received = client.receive(left)
            if received is None:
                continue
            if isinstance(received.message, AbortStep):
                assert received.message.step == step
                asked = self.may_leave
            else:
                self._handle(client, received.message)
        return asked

    def learn(self, batch: Batch) -> None:
        """What a step does to the parameters: nothing here."""

    def save(self, folder: Path) -> None:
        """What a checkpoint holds beside its manifest: nothing here."""

    def _checkpoint(self, client: ControlClient, message: Checkpoint) -> None:
        assert message.step == self.version.number
        directory = self._context.directory
        directory.checkpoint(message.step).mkdir(parents=True, exist_ok=True)
        self.save(directory.checkpoint(message.step))
        manifest = Manifest(
            step=message.step,
            attempt=self.version.attempt,
            version_number=message.step,
            learner={},
            orchestrator=message.state,
            config=self.values,
        )
        directory.complete(message.step, manifest)
        self.checkpoints.append(message.step)
        client.send(CheckpointDone(message.step, 0.1))


# --- a whole run ------------------------------------------------------------------------------


@dataclass
class FakeRun:
    """One attempt of a run in ``run_dir``; change its parts before ``run``."""

    run_dir: Path
    config: RunConfig
    attempt: int = 1
    resume_step: int | None = None
    environment: FakeEnvironment = field(default_factory=FakeEnvironment)
    servers: int = 1
    during: Callable[[FakeRun, Controller], Any] | None = None
    setup: Callable[[FakeRun], None] | None = None

    def __post_init__(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._port = HeldPort()
        self.context = ProcessContext(
            run_dir=self.run_dir,
            attempt=self.attempt,
            resume_step=self.resume_step,
            token="t",
            control=f"tcp://127.0.0.1:{self._port.port}",
            server_ports=(),
        )
        self.learner = FakeLearner(self.context)
        self.learner.values = written(self.config)
        self.learner.updates = self.config.train.updates_per_batch

    def run(self, timeout_s: float = 50.0) -> str:
        """Reason of the end; what the controller raises."""
        return asyncio.run(asyncio.wait_for(self._run(), timeout_s))

    async def _run(self) -> str:
        self.changes = Notifier()
        self.clients = [FakeClient(i) for i in range(self.servers)]
        replays = self.config.rollout.engine == "replay"
        recorded = open_recorded(self.config) if replays else None
        steps = recorded_steps(recorded, self.config, self.resume_step or 0) if recorded else self.config.train.steps
        self.fleet = None if replays else fake_fleet(self.config, self.changes, self.clients, self.run_dir)
        if self.setup is not None:
            self.setup(self)
        control = ControlServer(self.context.control, self.context.token)
        environment = await self._environment_client()
        parts = Parts(
            environment=environment,
            fleet=self.fleet,
            recorded=recorded,
            socket=control,
            sinks=lambda first: [JsonlSink(self.context.directory.metrics)],
            changes=self.changes,
            steps=steps,
            vocab_size=VOCABULARY,
            context_length=CONTEXT,
        )
        controller = Controller(self.context, self.config, parts)
        self.learner.start()
        beside = asyncio.ensure_future(self.during(self, controller)) if self.during else None
        try:
            return await controller.run()
        finally:
            if beside is not None:
                beside.cancel()
            await environment.stop()
            control.close()
            self._port.release()
            # One that was never heard of is told nothing, and goes on.
            await asyncio.to_thread(self.learner.join, 10.0 if controller._link._connected else 0.5)

    async def _environment_client(self) -> InProcess | WorkerPool:
        """``environment`` in this process; or one that the configuration names as MODULE:FACTORY, in workers."""
        setup = WorkerSetup.of(self.config)
        if ":" not in self.config.environment.name:
            return InProcess(self.environment, setup.episode_timeout_s)
        log = self.context.directory.log
        pool = WorkerPool(
            setup, workers=self.config.environment.workers, start_timeout_s=60.0, log=lambda n: log("environment", n)
        )
        await pool.start()
        return pool

    def rows(self) -> list[dict[str, Any]]:
        text = RunDirectory(self.run_dir).metrics.read_text()
        return [json.loads(line) for line in text.splitlines()]

    def staleness(self) -> list[int]:
        """Of every trajectory that the learner was given."""
        return [b.step - t.oldest_version for b in self.learner.batches for g in b.groups for t in g.trajectories]


def stopped_while_it_samples(run: FakeRun) -> float:
    """Stop ``run`` once an episode hangs; the seconds that its end took."""
    stepping: list[Example] = []
    stopped_at = 0.0

    def hangs(example: Example) -> float:
        stepping.append(example)
        return 120.0

    async def stop(run: FakeRun, controller: Controller) -> None:
        nonlocal stopped_at
        while not stepping:
            await asyncio.sleep(0.005)
        stopped_at = time.monotonic()
        controller.request_stop("stopped by signal")

    run.environment.delay_s, run.during = hangs, stop
    assert run.run() == "stopped by signal"
    return time.monotonic() - stopped_at
