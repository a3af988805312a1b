"""When episodes waited for servers is noted, kept and read back; an older store gets the tables when it is opened."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.orchestrator.fake_run import FakeRun, config
from tests.orchestrator.ledgers import AtOnce, now
from tests.orchestrator.store.test_store import V0, sample_group, trajectory
from vcpo_megatron.orchestrator.modes.episode_times import Timed
from vcpo_megatron.orchestrator.store.ledger import Cursor, GroupLedger
from vcpo_megatron.orchestrator.store.records import EpisodeTimes
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.rollout.client.protocol import GenerateResult, SamplingParams
from vcpo_megatron.types import PolicyVersion, StepResult


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.sqlite"


def test_every_wait_is_noted() -> None:
    answered = GenerateResult((1,), (-0.5,), (), "stop")

    async def generate(ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        await asyncio.sleep(0.02)
        if rid == "fails":
            raise RuntimeError("down")
        return answered

    async def play() -> EpisodeTimes:
        timed = Timed(generate)
        sampling = SamplingParams(max_new_tokens=1, temperature=1.0)
        assert await timed.generate([1], sampling, "one") is answered
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="down"):
            await timed.generate([1], sampling, "fails")
        return timed.times()

    times = asyncio.run(play())
    (first, second), edges = times.answers, [times.began, *times.answers[0], *times.answers[1], times.ended]
    assert edges == sorted(edges) and first[1] - first[0] >= 0.015 and second[0] - first[1] >= 0.005


TIMES = EpisodeTimes(1_700_000_000.25, 1_700_000_009.5, ((1_700_000_001.25, 1_700_000_003.5),))


def test_times_come_back(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        assert store.episode_times([0]) == {} and store.step_times() == {}
        ledger = GroupLedger(AtOnce(store), Cursor(1, 1))
        ledger.admit(1, "p1", 1, 2, V0)
        now(ledger.finish(trajectory(1, 0, V0), TIMES))
        now(ledger.finish(trajectory(1, 1, V0)))
        now(ledger.train(ledger.begin([1]), StepResult(0, PolicyVersion(1, 1), "", {}, ()), (5.0, 7.5)))
    with RolloutStore.open_readonly(path) as reader:
        assert reader.episode_times([0, 7]) == {0: [("1/0", TIMES)]} and reader.step_times() == {0: (5.0, 7.5)}


def test_what_came_too_late_has_no_times(path: Path) -> None:
    with RolloutStore(path) as store:
        ledger = GroupLedger(AtOnce(store), Cursor())
        ledger.admit(0, "p", 0, 2, V0)
        ledger.drop(0, "expired")
        assert now(ledger.finish(trajectory(0, 0, V0), TIMES)) is None
        assert store._rows("SELECT COUNT(*) FROM episode_times")[0][0] == 0


def test_a_store_without_the_tables(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        store.mark_trained(0, [], [0], [0])
    with sqlite3.connect(path) as connection:
        connection.executescript("DROP TABLE episode_times; DROP TABLE step_times;")
    connection.close()
    with RolloutStore.open_readonly(path) as reader:
        assert reader.episode_times([0]) == {} and reader.step_times() == {}
    with RolloutStore(path) as store:
        store.keep_times({(0, 1): TIMES})
        assert store.episode_times([0]) == {0: [("0/1", TIMES)]}


@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_a_run_notes_when_it_sampled_and_trained(tmp_path: Path, lag: str) -> None:
    run = FakeRun(tmp_path, config(staleness={"max_staleness": 1, "lag": lag}, train={"steps": 3}))
    began = time.time()
    run.run()
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as reader:
        steps, episodes = reader.step_times(), reader.episode_times(range(3))
    assert list(steps) == list(episodes) == [0, 1, 2]
    for step, found in episodes.items():
        assert [uid for uid, _ in found] == sorted({uid for uid, _ in found}) and found
        for _, times in found:
            assert times.answers and began - 1 < times.began <= times.answers[0][0] + 1e-3
            assert times.answers[-1][1] <= times.ended + 1e-3 and times.ended <= steps[step][0] + 0.1
            assert steps[step][0] <= steps[step][1] < time.time() + 1
