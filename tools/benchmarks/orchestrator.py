"""What the orchestrator spends on a trajectory and on a token, with very many of them in flight, on one core.

The orchestrator's own parts (generation, leases, clients, agent loop, batcher, store) talk over HTTP to servers that
compute nothing. All trajectories are started, held by the servers, and answered together:

    start    admission, episode and request          until the servers hold all of them
    resume   every request is aborted half-way and sent again with the tokens it has
    finish   answer, trajectory, store, batch

Processor time is that of this process, the store's thread included; memory is what the process has grown by. What the
workers of the environment spend is measured apart; they have the other cores.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import Action, Episode, Example, Observation, Outcome
from vcpo_megatron.environments.client import EnvironmentClient
from vcpo_megatron.environments.workers.pool import WorkerPool
from vcpo_megatron.environments.workers.setup import WorkerSetup
from vcpo_megatron.orchestrator.modes.batcher import Batcher
from vcpo_megatron.orchestrator.modes.failures import FailureWindow, PromptFailures
from vcpo_megatron.orchestrator.modes.generation import Generation, GenerationRules, SamplingRules
from vcpo_megatron.orchestrator.modes.staleness import StalenessBound
from vcpo_megatron.orchestrator.store.ledger import GroupLedger
from vcpo_megatron.orchestrator.store.recorder import Recorder
from vcpo_megatron.orchestrator.store.resume import ResumePlan
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.rollout.client.http import ServerClient
from vcpo_megatron.rollout.client.protocol import SamplingParams
from vcpo_megatron.rollout.fleet.fleet import Fleet, FleetOptions
from vcpo_megatron.rollout.fleet.server import Server, ServerProcess, ServerState
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import cancel, run_beside
from vcpo_megatron.transport.child import start_child, stop_child
from vcpo_megatron.types import PolicyVersion

from .store import one_core

VOCABULARY = 2048
_PROMPT = 64
_GROUP = 8
_SERVERS = 4
_PATIENCE_S = 300.0
_TOOLS = Path(__file__).resolve().parents[1]
#: Child processes find this package and the product's.
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(_TOOLS), str(_TOOLS.parent)))}


@dataclass(frozen=True)
class OrchestratorCost:
    """``trajectories`` in flight together, answers of ``tokens``; processor seconds of the phases, all together;
    ``workers_s``: of the environment's workers in all of them; bytes of resident memory in flight and at the end, all
    together."""

    trajectories: int
    tokens: int
    start_s: float
    resume_s: float
    finish_s: float
    workers_s: float
    flight_bytes: int
    kept_bytes: int

    @property
    def seconds_each(self) -> float:
        """Start and finish of one trajectory."""
        return (self.start_s + self.finish_s) / self.trajectories

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds_each": self.seconds_each}


class OneTurn:
    """An environment of one turn."""

    def __init__(self, config: EnvironmentConfig, tokenizer_dir: Path, seed: int) -> None: ...

    name = "fake"
    fingerprint = ""
    sampling: Mapping[str, Any] = {}  # noqa: RUF012
    max_prompt_tokens = _PROMPT

    def train_example(self, index: int) -> Example:
        return Example(f"train/{index}", {"tokens": tuple((index + i) % VOCABULARY for i in range(_PROMPT))})

    def heldout(self) -> Sequence[Example]:
        return ()

    def episode(self, example: Example) -> Episode:
        return _Turn(example)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class _Turn:
    def __init__(self, example: Example) -> None:
        self._example = example

    async def reset(self) -> Observation:
        return Observation(self._example.data["tokens"])

    async def step(self, action: Action) -> Outcome:
        return Outcome(float(len(action.token_ids) % 2))

    async def close(self) -> None: ...


@contextmanager
def fake_servers(folder: Path, tokens: int) -> Iterator[list[str]]:
    """Addresses of servers that run in processes of their own."""
    command = [sys.executable, "-m", "benchmarks.fake_server", str(tokens)]
    logs = [folder / f"fake-{tokens}-{index}.log" for index in range(_SERVERS)]
    children = [start_child(command, env=_ENVIRONMENT, log=log) for log in logs]
    try:
        deadline = time.monotonic() + 60
        while not all(log.exists() and " at http://" in log.read_text() for log in logs):
            if time.monotonic() > deadline or any(child.poll() is not None for child in children):
                raise RuntimeError(f"a fake server did not start within 60 s, see {folder}")
            time.sleep(0.05)
        yield [log.read_text().split(" at ")[-1].strip() for log in logs]
    finally:
        for child in children:
            stop_child(child, grace_s=1.0)


class _Run:
    """The orchestrator's parts around servers at ``urls``."""

    def __init__(
        self, urls: Sequence[str], trajectories: int, tokens: int, path: Path, environment: EnvironmentClient
    ) -> None:
        self.urls, self.count = urls, trajectories
        self.changes = Notifier()
        servers = [Server(i, ServerClient(url, VOCABULARY, _PATIENCE_S), path) for i, url in enumerate(urls)]
        options = FleetOptions(trajectories, 0, _PATIENCE_S, _PATIENCE_S)
        self.fleet = Fleet(servers, options, launch=_no_process, stop=lambda process: 0, changes=self.changes)
        for server in servers:
            server.state = ServerState.EMPTY  # they answer already
            self.fleet.loaded(server, PolicyVersion(1, 0))
        groups = trajectories // _GROUP
        self.recorder = Recorder(lambda: RolloutStore(path))
        plan = ResumePlan(step=0, buffer=(), cursors={}, requeue=(), next_group_id=0, next_cursor=0)
        ledger = GroupLedger.resumed(self.recorder, plan)
        self.batcher = Batcher(ledger, StalenessBound(0, groups), wait_s=_PATIENCE_S)
        self.generation = Generation(
            environment,
            self.fleet,
            self.batcher,
            ledger,
            self.recorder,
            SamplingRules(SamplingParams(max_new_tokens=2 * tokens), _PROMPT + 2 * tokens),
            GenerationRules(_GROUP, groups, False, False, groups),
            plan,
            prompts=PromptFailures(3, {}),
            failures=FailureWindow(trajectories, 0.5),
        )

    async def held(self) -> int:
        """Requests that the servers hold."""
        return sum(await asyncio.gather(*(asyncio.to_thread(_ask, url + "/held") for url in self.urls)))

    async def all_held(self) -> None:
        """Wait until every trajectory is in flight."""
        deadline = time.monotonic() + _PATIENCE_S
        while (held := await self.held()) < self.count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the servers hold {held} of {self.count} requests after {_PATIENCE_S:g} s")
            await asyncio.sleep(0.1)

    async def release(self, how: str) -> None:
        await asyncio.gather(*(asyncio.to_thread(_ask, f"{url}/release?how={how}", b"") for url in self.urls))

    async def batch(self) -> int:
        """Wait for the batch, as the training loop does; its trajectories."""
        poll = await self.changes.until(lambda: found if (found := self.batcher.poll()).batch else None, _PATIENCE_S)
        assert poll.batch is not None
        return sum(len(group.trajectories) for group in poll.batch.groups)

    async def close(self) -> None:
        await self.recorder.finish("run ended")
        await asyncio.gather(*(server.client.close() for server in self.fleet.servers))


def _no_process(index: int) -> ServerProcess:
    raise RuntimeError("the fake servers run already")


def _ask(url: str, data: bytes | None = None) -> int:
    with urllib.request.urlopen(url, data, timeout=60) as answer:
        return int(answer.read())


def _resident() -> int:
    """Bytes of resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _of_workers() -> float:
    """Processor seconds of the environment's workers so far."""
    children = psutil.Process().children()
    workers = [child for child in children if "vcpo_megatron.environments.workers" in child.cmdline()]
    return sum(times.user + times.system for times in (worker.cpu_times() for worker in workers))


async def _measured(run: _Run, environment: WorkerPool, tokens: int) -> OrchestratorCost:
    await run.recorder.open()
    workers, before, times = _of_workers(), _resident(), [time.process_time()]
    generating = asyncio.create_task(run_beside(run.generation.run(), environment.supervise()))
    try:
        await run.all_held()
        times.append(time.process_time())
        flight = _resident() - before
        await run.release("abort")
        await run.all_held()
        times.append(time.process_time())
        batch = asyncio.create_task(run.batch())
        await asyncio.sleep(0)
        await run.release("stop")
        found = await batch
        times.append(time.process_time())
        if found != run.count:
            raise RuntimeError(f"{found} of {run.count} trajectories came back")
        kept = _resident() - before
        workers = _of_workers() - workers
    finally:
        await cancel(generating)
        await run.close()
    start, resume, finish = (later - earlier for earlier, later in zip(times, times[1:], strict=False))
    return OrchestratorCost(run.count, tokens, start, resume, finish, workers, flight, kept)


def measure(folder: Path, trajectories: int, tokens: int) -> OrchestratorCost:
    """One run in a process that has done nothing else: memory of an earlier one would be used again."""
    with fake_servers(folder, tokens) as urls:
        path = folder / f"rollouts-{trajectories}-{tokens}.sqlite"
        config = EnvironmentConfig(name="benchmarks.orchestrator:OneTurn")
        setup = WorkerSetup(config, folder, 0, _PATIENCE_S)

        async def main() -> OrchestratorCost:
            async with WorkerPool(
                setup,
                workers=config.workers,
                start_timeout_s=_PATIENCE_S,
                log=lambda index: folder / f"environment.{index}.log",
            ) as environment:
                with one_core():  # neither the servers nor the workers
                    run = _Run(urls, trajectories, tokens, path, environment)
                    return await _measured(run, environment, tokens)

        return asyncio.run(main())


def measure_apart(trajectories: int, tokens: int) -> OrchestratorCost:
    """``measure`` in a new process on one core."""
    command = [sys.executable, "-m", "benchmarks.orchestrator", str(trajectories), str(tokens)]
    done = subprocess.run(
        command, env=_ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=4 * _PATIENCE_S, check=True
    )
    return OrchestratorCost(*map(_number, done.stdout.split()[-8:]))  # type: ignore[arg-type]


def _number(text: str) -> float | int:
    return float(text) if "." in text else int(text)


def per_token(short: OrchestratorCost, long: OrchestratorCost) -> float:
    """Processor seconds that one more token of an answer costs."""
    return (long.seconds_each - short.seconds_each) / (long.tokens - short.tokens)


def table(results: Sequence[OrchestratorCost]) -> str:
    """The results as text, each a trajectory."""
    lines = ["in flight  tokens  start ms  resume ms  finish ms  workers ms  in flight KiB  at the end KiB"]
    for r in results:
        times = (r.start_s, r.resume_s, r.finish_s, r.workers_s)
        ms = "  ".join(f"{1000 * value / r.trajectories:>9.3f}" for value in times)
        kib = "  ".join(f"{value / r.trajectories / 1024:>13.1f}" for value in (r.flight_bytes, r.kept_bytes))
        lines.append(f"{r.trajectories:>9}  {r.tokens:>6} {ms}  {kib}")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="vcpo-orchestrator-") as name:
        print(*asdict(measure(Path(name), int(sys.argv[1]), int(sys.argv[2]))).values())
