"""What a user's environment does to a run: it is counted, its prompt is set aside, and nothing stands or dies of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.environments.workers.faulty import Faulty
from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeEnvironment, FakeEpisode, FakeRun, config
from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import Example, Outcome
from vcpo_megatron.environments.client import EpisodeFailure
from vcpo_megatron.environments.workers.episodes import RemoteEpisode
from vcpo_megatron.orchestrator.modes.partial_rollouts import MOST_LOSSES
from vcpo_megatron.orchestrator.store.reader import StoreReader
from vcpo_megatron.orchestrator.store.schema import WORKER_ENDED
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.run.tasks import RunError

pytestmark = pytest.mark.timeout(120)

EXACT = {"max_staleness": 1, "lag": "exact"}
FAULTY = "tests.environments.workers.faulty:Faulty"


def failed(run_dir: Path) -> list[tuple[str, str]]:
    """(prompt, reason) of every failed trajectory."""
    with closing(sqlite3.connect(run_dir / "rollouts.sqlite")) as connection:
        return connection.execute(
            "SELECT prompt_id, t.reason FROM trajectories t JOIN groups g USING (group_id) WHERE t.state = 'failed'"
        ).fetchall()


def trained(run: FakeRun) -> set[str]:
    return {group.prompt_id for batch in run.learner.batches for group in batch.groups}


class LeakyEpisode(FakeEpisode):
    """One prompt's episodes raise ``error`` in ``call``, or hang there without one."""

    call, index, error = "step", 3, BaseException

    async def _leak(self, call: str) -> None:
        if (call, self._example.data["index"]) == (self.call, self.index):
            if self.error is TimeoutError:
                await asyncio.sleep(1000.0)
            raise self.error

    async def reset(self) -> Any:
        await self._leak("reset")
        return await super().reset()

    async def step(self, action: Any) -> Any:
        await self._leak("step")
        return await super().step(action)

    async def close(self) -> None:
        await self._leak("close")
        await super().close()


def leaky(call: str, index: int, error: type[BaseException]) -> FakeEnvironment:
    members = {"call": call, "index": index, "error": error}

    class Environment(FakeEnvironment):
        def episode(self, example: Example) -> FakeEpisode:
            return type("Episode", (LeakyEpisode,), members)(self, example)

    return Environment()


LEAKS: list[tuple[str, type[BaseException], str]] = [
    ("reset", asyncio.CancelledError, "reset raised CancelledError"),
    ("step", asyncio.CancelledError, "step raised CancelledError"),
    ("close", asyncio.CancelledError, "close raised CancelledError"),
    ("step", SystemExit, "step raised SystemExit"),
    ("step", TimeoutError, "timed out: step did not return within the 0.5 s"),
    ("reset", TimeoutError, "timed out: reset did not return within the 0.5 s"),
]


@pytest.mark.parametrize(
    ("call", "error", "reason", "index"), [*((*leak, 3) for leak in LEAKS), (*LEAKS[1], 11), (*LEAKS[4], 11)]
)
def test_an_episode_that_leaks_or_hangs_is_a_failure_and_its_prompt_is_set_aside(
    tmp_path: Path, call: str, error: type[BaseException], reason: str, index: int
) -> None:
    """In mid-run, and at the last step, where the learner has nothing else to wait for."""
    cfg = config(environment={"episode_timeout_s": 0.5})
    run = FakeRun(tmp_path, cfg, environment=leaky(call, index, error))
    assert run.run() == "run ended"
    assert trained(run) == {f"train-{i}" for i in range(13) if i != index}
    found = failed(tmp_path)
    assert len(found) == 3 and {prompt for prompt, _ in found} == {f"train-{index}"}
    assert all(f"environment fake, prompt train-{index}, sample " in why and f": {reason}" in why for _, why in found)


@pytest.mark.parametrize(("call", "error", "reason"), LEAKS[1:6:3])
def test_exact_lag_ends_with_it(tmp_path: Path, call: str, error: type[BaseException], reason: str) -> None:
    cfg = config(environment={"episode_timeout_s": 0.5}, staleness=EXACT)
    run = FakeRun(tmp_path, cfg, environment=leaky(call, 3, error))
    with pytest.raises(RunError, match=f'lag = "exact" .*prompt train-3, sample 3/0: {reason}'):
        run.run()


@pytest.mark.parametrize(("call", "error", "reason"), LEAKS[1:6:3])
@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_a_held_out_sample_fails_like_any_other(
    tmp_path: Path, lag: str, call: str, error: type[BaseException], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(
        train={"steps": 2, "eval_every": 1}, environment={"episode_timeout_s": 0.5}, staleness={**EXACT, "lag": lag}
    )
    run = FakeRun(tmp_path, cfg, environment=leaky(call, 1001, error))
    if lag == "bounded":
        assert run.run() == "run ended"
        said = capsys.readouterr().out
        assert_names(said, "of 3 samples failed", "environment fake, prompt heldout-1")
        assert reason in said and 0.0 <= run.rows()[-1]["eval/accuracy"] <= 1.0
    else:
        with pytest.raises(RunError, match=f"prompt heldout-1, sample -1/1: {reason}"):
            run.run()


def test_a_run_in_which_every_episode_hangs_ends(tmp_path: Path) -> None:
    environment = FakeEnvironment(delay_s=lambda example: 1000.0)
    run = FakeRun(tmp_path, config(environment={"episode_timeout_s": 0.1}), environment=environment)
    with pytest.raises(RunError, match="20 groups in a row, .*max_failure_ratio.*timed out: step"):
        run.run()


@pytest.mark.parametrize("staleness", [{}, EXACT])
def test_a_prompt_that_cannot_be_made_ends_the_run_by_its_index(tmp_path: Path, staleness: dict[str, Any]) -> None:
    class Environment(FakeEnvironment):
        def train_example(self, index: int) -> Example:
            if index == 5:
                raise LookupError("row 5")
            return super().train_example(index)

    run = FakeRun(tmp_path, config(staleness=staleness), environment=Environment())
    with pytest.raises(RunError, match=r"environment fake: train_example\(5\) .*LookupError: row 5"):
        run.run()
    assert "train-5" not in trained(run)


def test_rewards_of_any_kind_are_trained_on_and_stored_as_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(self: Any, action: Any) -> Any:
        return Outcome(np.float32(0.5), {"a": np.int64(3), "b": np.bool_(True)})  # type: ignore[arg-type, dict-item]

    monkeypatch.setattr(FakeEpisode, "step", step)
    run = FakeRun(tmp_path, config())
    assert run.run() == "run ended"
    (trajectory, *_) = run.learner.batches[0].groups[0].trajectories
    assert trajectory.reward == 0.5 and trajectory.info == {"a": 3.0, "b": 1.0}
    assert type(trajectory.reward) is type(trajectory.info["a"]) is float
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as store:
        stored = store.trajectory(trajectory.group_id, trajectory.sample_index)
    assert stored is not None and stored.info == {"a": 3.0, "b": 1.0}


# --- in workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["drop", "resample"])
def test_a_worker_that_dies_costs_its_own_trajectories_only(tmp_path: Path, policy: str) -> None:
    """The prompt that kills its worker is set aside after three of them; no other one is blamed."""
    cfg = config(
        environment={"name": FAULTY, "options": {"3": {"step": "quit"}}},
        rollout={"on_failure": policy},
    )
    run = FakeRun(tmp_path, cfg)
    assert run.run() == "run ended"
    assert trained(run) == {f"train-{i}" for i in range(13) if i != 3}
    found = failed(tmp_path)
    own = [(prompt, why) for prompt, why in found if not why.startswith(WORKER_ENDED)]
    assert Counter(prompt for prompt, _ in own) == {"train-3": 3}
    for _, why in found:
        assert_names(why, "environment worker", "exit code 7 in step of prompt train-3", "see")
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as store:
        assert isinstance(store, StoreReader) and store.failures_by_prompt() == {"train-3": 3}


@pytest.mark.parametrize("fault", ["quit", "segfault"])
def test_a_held_out_sample_that_kills_its_worker_is_the_only_one_that_fails(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {"0": {"step": fault}, "1": {"step": "nap"}, "2": {"reset": "nap"}}
    cfg = config(
        train={"steps": 1, "eval_every": 1}, environment={"name": FAULTY, "workers": 1, "options": {"heldout": faults}}
    )
    run = FakeRun(tmp_path, cfg)
    assert run.run() == "run ended"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "evaluation of version 1" in line]
    own = "environment faulty, prompt heldout-0, sample -1/0: environment worker"
    assert_names(line, "1 of 3 samples failed", own)
    assert run.rows()[-1]["eval/failed"] == 1


def test_exact_lag_ends_by_the_name_of_the_one_that_killed_the_worker(tmp_path: Path) -> None:
    """Although those that were lost with it stand before it in their batch."""
    options = {"0": {"step": "nap"}, "1": {"step": "quit"}}
    cfg = config(staleness=EXACT, environment={"name": FAULTY, "workers": 1, "options": options})
    with pytest.raises(RunError, match=r"faulty, prompt train-1, sample 1/[01]: environment worker"):
        FakeRun(tmp_path, cfg).run()


def losing(monkeypatch: pytest.MonkeyPatch, prompts: set[str], lost_at: str, times: int) -> Counter[str]:
    """So many first episodes of each of ``prompts`` are lost with their worker, without blame, in "reset" or in their
    "step N"; how many were."""
    lost: Counter[str] = Counter()
    reset, step, steps = RemoteEpisode.reset, RemoteEpisode.step, Counter[RemoteEpisode]()

    def lose(episode: RemoteEpisode, at: str) -> None:
        name = episode._prompt.prompt_id
        if at == lost_at and name in prompts and lost[name] < times:
            lost[name] += 1
            raise EpisodeFailure("the worker died", "none")

    async def losing_reset(episode: RemoteEpisode) -> Any:
        lose(episode, "reset")
        return await reset(episode)

    async def losing_step(episode: RemoteEpisode, *action: Any) -> Any:
        steps[episode] += 1
        lose(episode, f"step {steps[episode]}")
        return await step(episode, *action)

    monkeypatch.setattr(RemoteEpisode, "reset", losing_reset)
    monkeypatch.setattr(RemoteEpisode, "step", losing_step)
    return lost


@pytest.mark.parametrize("lost_at", ["reset", "step 1", "step 2"])
def test_exact_lag_is_the_same_where_episodes_are_lost_by_the_fault_of_others(
    tmp_path: Path, lost_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, and the servers notice nothing: what was sampled is not asked for again."""
    exact = config(staleness=EXACT, train={"eval_every": 3})
    environment = FakeEnvironment(turns=2)
    whole, other = (FakeRun(tmp_path / name, exact, environment=environment) for name in ("whole", "other"))
    assert whole.run() == "run ended"
    lost = losing(monkeypatch, {"train-3", "train-6", "heldout-1"}, lost_at, times=3)
    assert other.run() == "run ended"
    assert lost == {"train-3": 3, "train-6": 3, "heldout-1": 3}
    assert other.clients[0].events == whole.clients[0].events
    rows = [[{k: v for k, v in row.items() if not k.startswith("time/")} for row in r.rows()] for r in (whole, other)]
    assert rows[0] == rows[1]
    members = [[t for b in run.learner.batches for g in b.groups for t in g.trajectories] for run in (whole, other)]
    for one, two in zip(*members, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.behavior_logprobs, two.behavior_logprobs)
        assert (one.reward, one.turns) == (two.reward, two.turns)


@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_a_held_out_sample_that_is_lost_again_and_again_has_failed(
    tmp_path: Path, lag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = losing(monkeypatch, {"heldout-1"}, "step 1", times=10**9)
    run = FakeRun(tmp_path, config(train={"steps": 1, "eval_every": 1}, staleness={**EXACT, "lag": lag}))
    said = f"{WORKER_ENDED}environment fake, prompt heldout-1, sample -1/1: the worker died"
    if lag == "exact":
        with pytest.raises(RunError, match=f"fails: {said}"):
            run.run()
    else:
        assert run.run() == "run ended" and said in capsys.readouterr().out
    assert lost == {"heldout-1": MOST_LOSSES}


def test_exact_lag_is_the_same_in_workers_and_ends_with_one_that_dies(tmp_path: Path) -> None:
    exact = {"staleness": EXACT, "train": {"eval_every": 3}}
    inside = FakeRun(tmp_path / "inside", config(**exact))
    inside.environment = Faulty(EnvironmentConfig(name=FAULTY), tmp_path, 0)  # type: ignore[assignment]
    outside = FakeRun(tmp_path / "outside", config(**exact, environment={"name": FAULTY, "workers": 2}))
    assert inside.run() == outside.run() == "run ended"
    rows = [
        [{key: value for key, value in row.items() if not key.startswith("time/")} for row in run.rows()]
        for run in (inside, outside)
    ]
    assert rows[0] == rows[1] and "eval/accuracy" in rows[0][0]
    members = [[t for b in run.learner.batches for g in b.groups for t in g.trajectories] for run in (inside, outside)]
    for one, other in zip(*members, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert (one.prompt_id, one.reward) == (other.prompt_id, other.reward)

    dying = config(**exact, environment={"name": FAULTY, "workers": 1, "options": {"7": {"reset": "segfault"}}})
    with pytest.raises(RunError, match="worker 0 .*SIGSEGV in reset of prompt train-7"):
        FakeRun(tmp_path / "dying", dying).run()
