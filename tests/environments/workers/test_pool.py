"""Environments in worker processes: what a user's code does to an episode, to its worker, and to nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import EnvironmentSetupError, Outcome
from vcpo_megatron.environments.client import EpisodeFailure
from vcpo_megatron.environments.workers import pool as pool_module
from vcpo_megatron.environments.workers.pool import WorkerPool
from vcpo_megatron.environments.workers.setup import WorkerSetup
from vcpo_megatron.run.tasks import RunError, run_beside

pytestmark = pytest.mark.timeout(120)

NAME = "tests.environments.workers.faulty:Faulty"
LIMIT_S = 0.5
PATIENCE_S = 60.0
#: Index of a training prompt -> (the call, what it does there). Prompt 0 is well.
FAULTS = {
    1: ("step", "raise"),
    2: ("reset", "cancelled"),
    3: ("step", "cancelled"),
    4: ("close", "cancelled"),
    5: ("step", "exit"),
    6: ("reset", "interrupt"),
    7: ("step", "quit"),
    8: ("step", "segfault"),
    9: ("step", "quit-later"),
    10: ("step", "hang"),
    11: ("close", "hang"),
    12: ("step", "swallow"),
    13: ("step", "compute"),
    14: ("step", "memory"),
    15: ("step", "print"),
    16: ("step", "generator-exit"),
    17: ("step", "unprintable"),
    18: ("step", "surrogate"),
    19: ("step", "background-exit"),
    20: ("step", "late"),
    21: ("step", "cancel-self"),
    22: ("train_example", "raise"),
    23: ("train_example", "compute"),
    24: ("step", "nap"),
}
SETTINGS = {str(index): {call: fault} for index, (call, fault) in FAULTS.items()}


def make_pool(folder: Path, workers: int = 1, limit_s: float = LIMIT_S, **options: Any) -> WorkerPool:
    config = EnvironmentConfig(name=NAME, options=options, worker_memory_gb=2.0)
    setup = WorkerSetup(config, folder, 0, limit_s)
    return WorkerPool(
        setup, workers=workers, start_timeout_s=PATIENCE_S, log=lambda index: folder / f"environment.{index}.log"
    )


def pids(pool: WorkerPool) -> set[int]:
    return {worker.process.pid for worker in pool._workers.values()}


class Running:
    """A pool of two workers for several tests; their event loop runs while one of them does something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.started: set[int] = set()

        async def start() -> WorkerPool:
            pool = make_pool(folder, 2, **SETTINGS)
            await pool.start()
            return pool

        self.pool = self.loop.run_until_complete(start())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``, beside the pool's supervision; all workers are there again afterwards."""

        async def all_there() -> Any:
            result = await work
            deadline = time.monotonic() + PATIENCE_S
            while len(pids(self.pool)) < 2:
                assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for two workers"
                await asyncio.sleep(0.02)
            return result

        self.started |= pids(self.pool)
        result = self.loop.run_until_complete(asyncio.wait_for(run_beside(all_there(), self.pool.supervise()), 60))
        self.started |= pids(self.pool)
        return result

    def close(self) -> None:
        self.loop.run_until_complete(self.pool.stop())
        self.loop.close()
        assert not any(map(psutil.pid_exists, self.started))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("pool"))
    yield running
    running.close()


async def play(pool: WorkerPool, index: int) -> Outcome | EpisodeFailure:
    """How an episode of training prompt ``index`` ends."""
    episode = pool.episode(await pool.train_prompt(index))
    try:
        assert await episode.reset() == (1, 2)
        result = await episode.step((3, 4), "stop")
        assert isinstance(result, Outcome)
        return result
    except EpisodeFailure as error:
        return error
    finally:
        episode.close()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (1, "step raised KeyError: 'tool'"),
        (2, "reset raised CancelledError"),
        (3, "step raised CancelledError"),
        (4, "close raised CancelledError"),
        (21, "step raised CancelledError"),
        (5, "step raised SystemExit: a tool gave up"),
        (6, "reset raised KeyboardInterrupt"),
        (16, "step raised GeneratorExit"),
        (17, "step raised Unprintable: (its message cannot be shown: RuntimeError)"),
        (18, "step raised ValueError: half a pair: \\ud83d"),
        (14, "step raised MemoryError"),
        (10, "timed out: step did not return within the 0.5 s that the environment's code has for an episode"),
        (11, "timed out: close did not return within the 0.5 s"),
        (12, "timed out: step did not return within the 0.5 s"),
        (20, "timed out: step did not return within the 0.5 s"),
    ],
)
def test_what_an_episode_does_fails_it_alone_and_its_worker_lives(running: Running, index: int, message: str) -> None:
    before = pids(running.pool)

    async def together() -> list[Any]:
        return await asyncio.gather(play(running.pool, index), *(play(running.pool, 0) for _ in range(4)))

    failure, *others = running.do(together())
    assert isinstance(failure, EpisodeFailure) and str(failure).startswith(message) and failure.blame == "own"
    assert all(isinstance(other, Outcome) for other in others)
    assert pids(running.pool) == before


def test_the_time_in_which_another_one_computes_is_given_back(running: Running) -> None:
    """For longer than the limit, in both workers; the others wait for something meanwhile."""

    async def together() -> list[Any]:
        return await asyncio.gather(*(play(running.pool, index) for index in (24, 24, 20, 20, 24, 24)))

    ends = running.do(together())
    assert [type(end) for end in ends] == [Outcome, Outcome, EpisodeFailure, EpisodeFailure, Outcome, Outcome]


@pytest.mark.parametrize("index", [15, 19])
def test_what_is_printed_or_exits_in_the_background_breaks_nothing(running: Running, index: int) -> None:
    before = pids(running.pool)
    assert isinstance(running.do(play(running.pool, index)), Outcome)
    assert pids(running.pool) == before
    logs = "".join(path.read_text("utf-8", "replace") for path in running.folder.glob("environment.*.log"))
    assert "what looks like a message" in logs or index == 19


@pytest.mark.parametrize(
    ("index", "how", "own"),
    [
        (7, "ended with exit code 7 in step of prompt train-7", ""),
        (8, "ended with signal SIGSEGV in step of prompt train-8", ""),
        (
            13,
            "was killed: it computed without awaiting beyond an episode's deadline in step of prompt train-13",
            "timed",
        ),
    ],
)
def test_a_worker_that_dies_costs_its_own_episodes_and_is_replaced(
    running: Running, index: int, how: str, own: str
) -> None:
    """Whose fault it was is known; others of the worker fail without blame, those of the other worker do not."""
    before = pids(running.pool)

    async def together() -> list[Any]:
        waiting = [asyncio.ensure_future(play(running.pool, 10)) for _ in range(2)]  # one in each worker
        await asyncio.sleep(0.05)
        return await asyncio.gather(play(running.pool, index), *waiting)

    failure, *others = running.do(together())
    assert isinstance(failure, EpisodeFailure) and failure.blame == "own"
    assert str(failure).startswith("timed out: step did not return" if own else "environment worker ")
    assert own or how in str(failure)
    assert "environment worker " in str(failure) and f"see {running.folder}" in str(failure)
    assert sorted(other.blame for other in others) == ["none", "own"]
    (innocent,) = (other for other in others if other.blame == "none")
    assert how in str(innocent)
    assert len(pids(running.pool) & before) == 1
    assert isinstance(running.do(play(running.pool, 0)), Outcome)


def test_nobody_is_blamed_for_a_death_that_nobody_explains(running: Running) -> None:
    """Of a thread that an episode left behind: the episode that waits may be at fault, or not."""
    failure = running.do(play(running.pool, 9))
    assert isinstance(failure, EpisodeFailure) and failure.blame == "unknown"
    assert "ended with exit code 9; see" in str(failure)


def test_an_episode_between_two_calls_learns_of_its_workers_death(running: Running) -> None:
    async def between() -> Any:
        episode = running.pool.episode(await running.pool.train_prompt(0))
        await episode.reset()
        for pid in (before := pids(running.pool)):
            os.kill(pid, signal.SIGKILL)
        while pids(running.pool) & before:
            await asyncio.sleep(0.02)
        with pytest.raises(EpisodeFailure, match="ended with signal SIGKILL") as caught:
            await episode.step((3,), "stop")
        return caught.value.blame

    assert running.do(between()) == "none"


@pytest.mark.parametrize(
    ("index", "message"), [(22, "raised LookupError: row 22"), (23, "timed out: train_example did not return")]
)
def test_a_prompt_that_cannot_be_had_is_named_by_its_index(running: Running, index: int, message: str) -> None:
    with pytest.raises(RunError, match=rf"environment faulty: train_example\({index}\) has no answer: .*{message}"):
        running.do(running.pool.train_prompt(index))


def test_what_the_environment_says_of_itself(running: Running) -> None:
    description = running.pool.description
    assert running.do(running.pool.reference(description.heldout[1])) == (1, 2, 3)
    assert description.notes == ("for tests",)
    assert [prompt.prompt_id for prompt in running.pool.description.heldout] == ["heldout-0", "heldout-1", "heldout-2"]


def test_episodes_are_spread_over_all_workers(running: Running) -> None:
    async def together() -> list[Any]:
        return await asyncio.gather(*(play(running.pool, 0) for _ in range(20)))

    outcomes = running.do(together())
    assert sorted([outcome.info["pid"] for outcome in outcomes].count(pid) for pid in pids(running.pool)) == [10, 10]


# --- starts and ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factory": "exit"}, "'tests.*faulty:Faulty': making it raised SystemExit: 3"),
        ({"factory": "quit"}, r"worker 0 \(pid \d+\) ended with exit code 5 in the factory while it made .*; see .*"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    async def start() -> None:
        async with make_pool(tmp_path, **options):
            pytest.fail("it started")

    with pytest.raises(EnvironmentSetupError, match=message) as caught:
        asyncio.run(asyncio.wait_for(start(), PATIENCE_S))
    assert "\n" not in str(caught.value)


def test_an_error_at_import_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_IMPORT", "no licence")

    async def start() -> None:
        async with make_pool(tmp_path):
            pytest.fail("it started")

    with pytest.raises(EnvironmentSetupError, match="faulty raised RuntimeError: no licence"):
        asyncio.run(asyncio.wait_for(start(), PATIENCE_S))
    assert "Traceback" in (tmp_path / "environment.0.log").read_text()


def test_workers_that_make_different_environments_are_refused(tmp_path: Path) -> None:
    async def start() -> None:
        async with make_pool(tmp_path, 2, factory="random"):
            pytest.fail("it started")

    with pytest.raises(EnvironmentSetupError, match=r"differ in fingerprint \('\d+' and '\d+'\)"):
        asyncio.run(asyncio.wait_for(start(), PATIENCE_S))


def test_a_worker_that_cannot_be_replaced_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(pool_module, "_TRIES", 2)
    flag = tmp_path / "flag"

    async def work() -> None:
        async with make_pool(tmp_path, flag=str(flag)) as pool:
            flag.touch()
            for pid in pids(pool):
                os.kill(pid, signal.SIGKILL)
            await pool.supervise()

    with pytest.raises(RunError, match="2 tries: .*FileNotFoundError: the data has gone"):
        asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_an_end_takes_no_notice_of_what_episodes_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE_S", 0.3)
    started: set[int] = set()

    async def work() -> float:
        async with make_pool(tmp_path, 2, 1000.0, **SETTINGS) as pool:
            started.update(pids(pool))
            for index in (12, 13):
                asyncio.ensure_future(play(pool, index))
            await asyncio.sleep(0.3)
            before = time.monotonic()
        return time.monotonic() - before

    assert asyncio.run(asyncio.wait_for(work(), PATIENCE_S)) < 5.0
    assert len(started) == 2 and not any(map(psutil.pid_exists, started))
