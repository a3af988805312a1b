"""lag = "exact": which version samples which batch, repeatability, resume; and replay of recorded rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.orchestrator.fake_run import FakeClient, FakeEnvironment, FakeRun, config, fake_fleet
from tests.orchestrator.ledgers import AtOnce, now
from tests.orchestrator.store.test_store import sample_group
from tests.transport.samples import same
from vcpo_megatron.orchestrator.modes.exact_lag import Rounds, sampling_seed
from vcpo_megatron.orchestrator.modes.replay import Replay
from vcpo_megatron.orchestrator.store.ledger import GroupLedger
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.rollout.client.http import ServerUnavailable
from vcpo_megatron.rollout.client.protocol import ImpossibleLogprobs, SamplingParams, Span
from vcpo_megatron.rollout.fleet.fleet import FleetError
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import RunError, StopRequest, run_beside
from vcpo_megatron.transport.messages import ControlError
from vcpo_megatron.types import Batch, PolicyVersion

pytestmark = pytest.mark.timeout(60)


def exact(lag: int, **train: Any) -> Any:
    return config(staleness={"max_staleness": lag, "lag": "exact"}, train={"steps": 6, "eval_every": 3, **train})


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what measures time."""
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("servers", [1, 2])
def test_step_t_trains_on_what_version_t_minus_k_sampled(tmp_path: Path, lag: int, servers: int) -> None:
    run = FakeRun(tmp_path, exact(lag), servers=servers)
    assert run.run() == "run ended"
    assert [batch.step for batch in run.learner.batches] == list(range(6))
    for batch in run.learner.batches:
        versions = {v.number for g in batch.groups for t in g.trajectories for v in t.versions}
        assert versions == {max(0, batch.step - lag)}
        assert [g.prompt_id for g in batch.groups] == [f"train-{2 * batch.step}", f"train-{2 * batch.step + 1}"]
    rows = run.rows()
    assert [row["staleness/max"] for row in rows] == [min(step, lag) for step in range(6)]
    # At the end of step t, batches 0..t+k have been sampled.
    assert [row["rollouts/generated"] for row in rows] == [4 * min(t + lag + 1, 6) for t in range(6)]
    assert {row["step"]: row["eval/version"] for row in rows if "eval/version" in row} == {0: 0, 3: 3, 5: 6}
    loaded = [event for event in run.clients[0].events if event.startswith("loaded")]
    assert loaded == [f"loaded 1.{version}" for version in range(7)]  # every version, in order


@pytest.mark.parametrize("turns", [1, 3])
def test_two_runs_are_identical_whoever_is_faster(tmp_path: Path, turns: int) -> None:
    def slow(example: Any) -> float:
        return 0.002 * (example.data["index"] % 3)

    first = FakeRun(tmp_path / "a", exact(2), environment=FakeEnvironment(turns=turns))
    second = FakeRun(tmp_path / "b", exact(2), environment=FakeEnvironment(turns=turns, delay_s=slow))
    second.learner.step_s = 0.03
    assert first.run() == second.run() == "run ended"
    assert numbers(first.rows()) == numbers(second.rows())
    assert "eval/accuracy" in first.rows()[0]
    for one, other in zip(first.learner.batches, second.learner.batches, strict=True):
        for left, right in zip(one.groups, other.groups, strict=True):
            for a, b in zip(left.trajectories, right.trajectories, strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                assert a.reward == b.reward and a.num_sampled == 4 * turns - (4 if turns == 3 else 0)


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    first = FakeRun(tmp_path / "a", exact(1))
    second = FakeRun(tmp_path / "b", exact(1, seed=1))
    first.run()
    second.run()
    tokens = [
        [t.tokens.tolist() for b in r.learner.batches for g in b.groups for t in g.trajectories]
        for r in (first, second)
    ]
    assert tokens[0] != tokens[1]


def test_a_batch_is_one_list_request_a_round(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, exact(0, eval_every=0), environment=FakeEnvironment(turns=2))
    run.run()
    batches = [event for event in run.clients[0].events if event.startswith("batch")]
    assert batches == [f"batch of 4 by 1.{step}" for step in range(6) for _ in range(2)]


def test_the_seed_is_31_bits_and_fixed() -> None:
    # sha256 of b"7\0train-3\0" b"1\0" b"0", first four bytes, little-endian, without the top bit
    assert sampling_seed(7, "train-3", 1, 0) == sampling_seed(7, "train-3", 1, 0) < 2**31
    seeds = {sampling_seed(s, p, i, t) for s in (0, 1) for p in ("a", "b") for i in range(5) for t in range(5)}
    assert len(seeds) == 100


def test_a_failed_trajectory_ends_the_run(tmp_path: Path) -> None:
    environment = FakeEnvironment(fails=lambda example: example.data["index"] == 5)
    run = FakeRun(tmp_path, exact(1), environment=environment)
    with pytest.raises(RunError, match='lag = "exact" ends .*: the judge is down'):
        run.run()


@pytest.mark.parametrize("lag", [0, 2])
def test_a_stop_and_a_resume_give_the_rows_of_one_run(tmp_path: Path, lag: int) -> None:
    whole = FakeRun(tmp_path / "whole", exact(lag))
    whole.run()

    async def stop(run: FakeRun, controller: Any) -> None:
        while len(run.learner.batches) < 2:
            await asyncio.sleep(0.002)
        controller.request_stop("stopped by signal")

    first = FakeRun(tmp_path / "parts", exact(lag), during=stop)
    first.learner.step_s = 0.05
    assert first.run() == "stopped by signal"
    saved = first.learner.checkpoints[-1]
    assert 2 <= saved < 6
    second = FakeRun(tmp_path / "parts", exact(lag), attempt=2, resume_step=saved)
    assert second.run() == "run ended"
    assert numbers(second.rows()) == numbers(whole.rows())
    for batch in second.learner.batches:
        versions = {v.number for g in batch.groups for t in g.trajectories for v in t.versions}
        assert versions == {max(0, batch.step - lag)}


@pytest.mark.parametrize("lag", [0, 2])
def test_the_version_that_sampled_a_batch_records_it(tmp_path: Path, lag: int) -> None:
    """In a run that is stopped and resumed, too, and whoever is faster: rows and records are those of one run."""
    cfg = exact(lag).model_copy(update={"algorithm": config(algorithm={"mismatch": "recorded"}).algorithm})
    whole = FakeRun(tmp_path / "whole", cfg)
    whole.run()

    async def stop(run: FakeRun, controller: Any) -> None:
        while len(run.learner.batches) < 2:
            await asyncio.sleep(0.002)
        controller.request_stop("stopped by signal")

    slow = FakeEnvironment(delay_s=lambda example: 0.002 * (example.data["index"] % 3))
    first = FakeRun(tmp_path / "parts", cfg, environment=slow, during=stop)
    first.learner.step_s = 0.05
    assert first.run() == "stopped by signal"
    saved = first.learner.checkpoints[-1]
    second = FakeRun(tmp_path / "parts", cfg, attempt=2, resume_step=saved)
    assert second.run() == "run ended"
    assert numbers(second.rows()) == numbers(whole.rows())
    assert [row["mismatch/versions"] for row in whole.rows()] == [0.0] * 6
    for run in (whole, second):
        for batch in run.learner.batches:
            members = [t for group in batch.groups for t in group.trajectories]
            assert {t.recorded.version.number for t in members} == {max(0, batch.step - lag)}


def test_a_crash_and_a_resume_train_on_the_same_batches(tmp_path: Path) -> None:
    cfg = exact(2).model_copy(update={"checkpoint": config(checkpoint={"every": 2}).checkpoint})
    whole = FakeRun(tmp_path / "whole", cfg)
    whole.run()
    first = FakeRun(tmp_path / "parts", cfg)
    first.learner.error_at = 3
    with pytest.raises(ControlError):
        first.run()
    second = FakeRun(tmp_path / "parts", cfg, attempt=2, resume_step=2)
    assert second.run() == "run ended"
    rewards = [[row["reward/mean"] for row in run.rows()] for run in (whole, second)]
    assert [batch.step for batch in second.learner.batches] == [2, 3, 4, 5]
    assert [g.prompt_id for b in second.learner.batches for g in b.groups] == [f"train-{i}" for i in range(4, 12)]
    assert rewards[0] == rewards[1]


def test_a_server_that_dies_is_restarted_and_its_round_run_again(tmp_path: Path) -> None:
    async def kill(run: FakeRun, controller: Any) -> None:
        while len(run.learner.batches) < 2:
            await asyncio.sleep(0.002)
        run.clients[0].process.code = -9

    whole = FakeRun(tmp_path / "whole", exact(1))
    whole.run()
    cfg = exact(1).model_copy(update={"rollout": config(rollout={"max_restarts": 1}).rollout})
    run = FakeRun(tmp_path / "restarted", cfg, during=kill)
    run.learner.step_s = 0.02
    assert run.run() == "run ended"
    assert run.clients[0].events.count("start") == 2
    assert numbers(run.rows()) == numbers(whole.rows())


#: What the server does wrong in one round: names for its weights, or log-probs.
WRONG_ONCE = ["default", "1.9", ImpossibleLogprobs("output_token_logprobs[0] = 3.0: is above 0")]


@pytest.mark.parametrize("wrong", WRONG_ONCE, ids=str)
def test_a_round_that_cannot_be_is_run_again_after_a_full_update(tmp_path: Path, wrong: Any) -> None:
    whole = FakeRun(tmp_path / "whole", exact(1))
    whole.run()
    run = FakeRun(tmp_path / "doubted", exact(1))

    def setup(run: FakeRun) -> None:
        client, rounds = run.clients[0], 0
        answer = client.generate_batch

        async def generate_batch(*request: Any) -> Any:
            nonlocal rounds
            results, rounds = await answer(*request), rounds + 1
            if rounds != 5:
                return results
            if isinstance(wrong, Exception):
                raise wrong
            return [replace(result, spans=(Span(0, len(result.output_ids), wrong),)) for result in results]

        client.generate_batch = generate_batch  # type: ignore[method-assign]

    run.setup = setup
    assert run.run() == "run ended"
    assert numbers(run.rows()) == numbers(whole.rows())
    loaded = [event for event in run.clients[0].events if event.startswith("loaded")]
    assert sorted(set(loaded)) == [f"loaded 1.{number}" for number in range(7)] and len(loaded) == 8


def test_a_server_that_goes_on_with_that_ends_the_run_by_name(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, exact(1))

    def setup(run: FakeRun) -> None:
        answer = run.clients[0].generate_batch

        async def generate_batch(*request: Any) -> Any:
            results = await answer(*request)
            return [replace(result, spans=(Span(0, len(result.output_ids), "default"),)) for result in results]

        run.clients[0].generate_batch = generate_batch  # type: ignore[method-assign]

    run.setup = setup
    with pytest.raises(FleetError, match="rollout server 0 names its weights 'default'"):
        run.run()


@pytest.mark.parametrize("lag", ["bounded", "exact"])
@pytest.mark.parametrize("keeps_from", [1, 3])
def test_a_server_that_takes_weights_and_keeps_its_own_ends_the_run(tmp_path: Path, lag: str, keeps_from: int) -> None:
    """Without rollout.verify_sync: its log-probs of the probe do not move with the learner's."""
    cfg = exact(1) if lag == "exact" else config(train={"steps": 12})
    run = FakeRun(tmp_path, cfg)
    run.learner.moves = lambda number: 0.01 * number
    run.learner.step_s = 0.02

    def setup(run: FakeRun) -> None:
        run.clients[0].moves = lambda number: 0.01 * min(number, keeps_from - 1)

    run.setup = setup
    with pytest.raises(FleetError, match="server 0 took weights .* still computes"):
        run.run()
    assert all(
        version.number < keeps_from
        for batch in run.learner.batches
        for group in batch.groups
        for trajectory in group.trajectories
        for version in trajectory.versions
    )


@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_a_server_that_follows_is_asked_once_a_load(tmp_path: Path, lag: str) -> None:
    run = FakeRun(tmp_path, exact(1) if lag == "exact" else config())
    run.learner.moves = lambda number: 0.01 * number

    def setup(run: FakeRun) -> None:
        run.clients[0].moves = lambda number: 0.01 * number

    run.setup = setup
    assert run.run() == "run ended" and len(run.learner.batches) == 6


# --- replay -----------------------------------------------------------------------------------


def test_a_round_that_is_lost_with_a_server_that_is_back_already_is_run_again() -> None:
    """The failure is seen when the new process runs: it is not taken for a server that lives and does not answer."""

    async def main() -> None:
        cfg = config(rollout={"max_restarts": 1})
        client = FakeClient()
        fleet = fake_fleet(cfg, Notifier(), [client], Path("/nowhere"))
        server = fleet.servers[0]
        batch = client.generate_batch

        async def lost(*request: Any) -> Any:
            client.generate_batch = batch  # type: ignore[method-assign]
            client.process.code = -9  # type: ignore[union-attr]
            await fleet.changes.until(lambda: (server.starts == 2 and server.available) or None, 5)
            raise ServerUnavailable("http://fake", "/generate", "connection reset")

        client.generate_batch = lost  # type: ignore[method-assign]

        async def work() -> None:
            for starts in (1, 2):
                await fleet.changes.until(lambda n=starts: (server.starts == n and server.available) or None, 5)  # type: ignore[misc]
                client.version = "1.0"
                fleet.loaded(server, PolicyVersion(1, 0))
                if starts == 1:
                    answer = asyncio.ensure_future(rounds.generate(0)((1,), SamplingParams(4), "r"))
            assert {span.version for span in (await answer).spans} == {"1.0"}

        fleet.launch()
        rounds = Rounds(fleet, [server])
        await run_beside(work(), fleet.supervise(), rounds.run())

    asyncio.run(asyncio.wait_for(main(), 10))


def replay(path: Path, **train: Any) -> Any:
    return config(rollout={"engine": "replay", "replay": path}, train={"eval_every": 2, **train})


def test_replay_trains_on_the_recorded_batches(tmp_path: Path) -> None:
    source = FakeRun(tmp_path / "source", config())
    source.run()
    run = FakeRun(tmp_path / "replay", replay(tmp_path / "source", steps=4))
    assert run.run() == "run ended"
    assert [batch.step for batch in run.learner.batches] == [0, 1, 2, 3]
    for recorded, again in zip(source.learner.batches, run.learner.batches, strict=False):
        assert [g.prompt_id for g in recorded.groups] == [g.prompt_id for g in again.groups]
        for left, right in zip(recorded.groups, again.groups, strict=True):
            for a, b in zip(left.trajectories, right.trajectories, strict=True):
                np.testing.assert_array_equal(a.behavior_logprobs, b.behavior_logprobs)
                assert a.versions == b.versions and a.reward == b.reward
    rows, recorded_rows = run.rows(), source.rows()
    assert [row["staleness/mean"] for row in rows] == [row["staleness/mean"] for row in recorded_rows[:4]]
    assert rows[-1]["rollouts/generated"] == rows[-1]["rollouts/trained"] == 16
    assert not any("eval/accuracy" in row for row in rows)
    assert run.learner.stopped == "run ended" and run.learner.checkpoints == [4]


def test_replay_ends_with_the_recording_and_resumes(tmp_path: Path) -> None:
    source = FakeRun(tmp_path / "source", config())
    source.run()
    cfg = replay(tmp_path / "source", steps=50).model_copy(
        update={"checkpoint": config(checkpoint={"every": 2}).checkpoint}
    )
    first = FakeRun(tmp_path / "replay", cfg)
    first.learner.error_at = 5
    with pytest.raises(ControlError):
        first.run()
    second = FakeRun(tmp_path / "replay", cfg, attempt=2, resume_step=4)
    assert second.run() == "run ended"
    prompts = [[g.prompt_id for b in run.learner.batches for g in b.groups] for run in (source, second)]
    assert prompts[1] == prompts[0][8:]
    assert [row["step"] for row in second.rows()] == list(range(6))
    assert second.rows()[-1]["rollouts/trained"] == 24


def test_replay_trains_on_what_the_recorded_learner_recorded(tmp_path: Path) -> None:
    recorded = config(algorithm={"mismatch": "recorded"}).algorithm
    source = FakeRun(tmp_path / "source", config().model_copy(update={"algorithm": recorded}))
    source.run()
    checkpoint = config(checkpoint={"every": 2}).checkpoint
    cfg = replay(tmp_path / "source").model_copy(update={"checkpoint": checkpoint, "algorithm": recorded})
    first = FakeRun(tmp_path / "replay", cfg)
    first.learner.error_at = 5
    with pytest.raises(ControlError):
        first.run()
    second = FakeRun(tmp_path / "replay", cfg, attempt=2, resume_step=4)
    assert second.run() == "run ended"
    assert not first.learner.scored and not second.learner.scored
    again = first.learner.batches[:4] + second.learner.batches
    for one, other in zip(source.learner.batches, again, strict=True):
        members = [[t.recorded for g in batch.groups for t in g.trajectories] for batch in (one, other)]
        assert same(*members)
    FakeRun(tmp_path / "bare", config(train={"steps": 2})).run()
    without = replay(tmp_path / "bare", steps=2).model_copy(update={"algorithm": recorded})
    with pytest.raises(RunError, match='rollout.replay = .*bare: .*mismatch = "recorded"'):
        FakeRun(tmp_path / "b", without).run()


def test_replay_takes_records_again_that_a_resume_has_undone(tmp_path: Path) -> None:
    """Version 3 scored what version 0 had sampled: a resume from the start keeps the samples, not the record."""
    with RolloutStore(tmp_path / "source.sqlite") as recorded, RolloutStore(tmp_path / "own.sqlite") as own:
        for store in (recorded, own):
            sample_group(store, 0)
            (group,) = store.complete_groups()
            store.record(group.with_recorded(PolicyVersion(1, 3), -np.arange(10, dtype=np.float32)))
        recorded.mark_trained(0, [], [0], [0])
        ledger = GroupLedger.resumed(AtOnce(own), own.resume(0), recorded=True)
        assert not ledger.live[0].complete
        taken: list[Batch] = []

        class Once:
            version = 0

            async def take(self, batch: Batch) -> None:
                taken.append(batch)

            async def checkpoint(self) -> None: ...

            async def end(self) -> None: ...

        now(Replay(recorded, Once(), ledger, steps=1).run(StopRequest()))  # type: ignore[arg-type]
        assert same(list(taken[0].groups), recorded.groups_trained_at(0))
        assert same(own.complete_groups(), recorded.groups_trained_at(0)) and ledger.live[0].complete


def test_replay_of_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty: has no rollouts.sqlite"):
        FakeRun(tmp_path / "a", replay(tmp_path / "empty")).run()
    FakeRun(tmp_path / "source", config(train={"steps": 2})).run()
    with pytest.raises(RunError, match="step 0 .*2 groups .*groups_per_step = 3"):
        FakeRun(tmp_path / "b", replay(tmp_path / "source", groups_per_step=3)).run()
