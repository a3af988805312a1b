"""Unfinished trajectories at a stop: kept with their tokens and finished after the resume, or sampled anew."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeEnvironment, FakeRun, config
from tests.orchestrator.store import test_store
from vcpo_megatron.orchestrator.modes.partial_rollouts import PartialRollout
from vcpo_megatron.orchestrator.store.records import Answer, answers_of, answers_row
from vcpo_megatron.orchestrator.store.schema import StoreError
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.rollout.client.protocol import GenerateResult, SamplingParams, Span
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(60)
SAMPLING = SamplingParams(max_new_tokens=8)


def result(*tokens: int, reason: str = "stop", version: str = "1.0") -> GenerateResult:
    return GenerateResult(tokens, tuple(-0.1 * t for t in tokens), (Span(0, len(tokens), version),), reason)


def back(*answers: Answer) -> tuple[Answer, ...]:
    """``answers`` through a row of the store."""
    columns = ("group_id", "sample_index", "newest_version", "content", "checksum")
    return answers_of(dict(zip(columns, answers_row(3, 1, answers), strict=True)), "the store")


def test_answers_come_back_bit_for_bit() -> None:
    spans = (Span(0, 1, "1.3"), Span(1, 3, "2.4"))
    answers = (Answer(2**32 - 1, GenerateResult((5, 0, 7), (-0.1, -1e-7, -3.3333333333333335), spans, "abort")),)
    assert back(*answers) == answers
    assert answers[0].versions() == [3, 4]
    routed = np.arange(300, 318, dtype=np.uint16).reshape(3, 3, 2)
    (found,) = back(Answer(1, GenerateResult((5,), (-0.1,), (Span(0, 1, "1.0"),), "stop", routed)))
    assert found.result.routed_experts is not None and found.result.routed_experts.dtype == np.uint16
    np.testing.assert_array_equal(found.result.routed_experts, routed)


def test_an_episode_is_led_through_its_answers_and_goes_on() -> None:
    async def main() -> None:
        asked: list[tuple[int, ...]] = []

        async def server(ids: Any, sampling: SamplingParams, rid: str) -> GenerateResult:
            asked.append(tuple(ids))
            return result(9)

        first = PartialRollout(server)
        assert await first.generate((1, 2), SAMPLING, "a") == result(9)
        for observed in (3, 4):
            asked.clear()
            again = PartialRollout(
                server, [*first.answers, Answer(0, result(8))]
            )  # the second was given to another prompt
            assert await again.generate((1, 2), SAMPLING, "b") == result(9) and asked == []
            assert await again.generate((1, 2, 9, observed), SAMPLING, "b") == result(9)
            assert asked == [(1, 2, 9, observed)] and len(again.answers) == 2
        shorter = PartialRollout(server, [Answer(first.answers[0].prompt, result(1, 2, 3))])
        await shorter.generate((1, 2), SamplingParams(max_new_tokens=2), "c")  # it has no room for three tokens
        assert shorter.answers[0].result == result(9)

    asyncio.run(asyncio.wait_for(main(), 10))


def stopped(run_dir: Path, cfg: Any, **parts: Any) -> FakeRun:
    """A run whose first answers take a minute, stopped after a moment."""

    async def stop(run: FakeRun, controller: Any) -> None:
        while sum(event.startswith("generate") for event in run.clients[0].events) < 8:
            await asyncio.sleep(0.01)
        controller.request_stop("stopped by signal")

    def setup(run: FakeRun) -> None:
        for client in run.clients:
            client.latency_s = 60.0

        async def load(*arguments: Any, **keywords: Any) -> None:  # weights come at once
            for client in run.clients:
                client.latency_s = 0.0
            await update(*arguments, **keywords)
            for client in run.clients:
                client.latency_s = 60.0

        update = run.clients[0].update_weights_from_tensor
        run.clients[0].update_weights_from_tensor = load  # type: ignore[method-assign]

    run = FakeRun(run_dir, cfg, during=stop, setup=setup, **parts)
    assert run.run() == "stopped by signal"
    return run


@pytest.mark.parametrize("keep", [True, False])
def test_cut_off_trajectories_go_on_or_are_sampled_anew(
    tmp_path: Path, keep: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(checkpoint={"resume_partial": keep})  # k = 1, G = 2, groups of 2: 8 trajectories in flight
    first = stopped(tmp_path, cfg)
    assert ("abort" in first.clients[0].events) is keep
    said = capsys.readouterr().out
    assert ("8 of 8 unfinished trajectories" in said and "with 16 tokens" in said) is keep
    again = FakeRun(tmp_path, cfg, attempt=2)
    assert again.run() == "run ended"
    groups = [group for batch in again.learner.batches for group in batch.groups]
    assert sorted(g.prompt_id for g in groups) == sorted(f"train-{i}" for i in range(12))
    begun = [t for g in groups for t in g.trajectories if t.turns[0].spans[0].version == PolicyVersion(1, 0)]
    said = capsys.readouterr().out
    if not keep:
        assert begun == [] and "4 prompts are sampled again" in said
        return
    assert len(begun) == 8
    assert_names(said, "4 go on", "0 trajectories", "lack 8", "8 are begun")
    for trajectory in begun:
        (turn,) = trajectory.turns  # one answer of two pieces: two tokens of before the stop, the rest of after it
        versions = [span.version for span in turn.spans]
        assert versions[0] == PolicyVersion(1, 0) and turn.spans[0].end - turn.start == 2
        assert {version.attempt for version in versions[1:]} == {2}
        assert trajectory.num_sampled == 4 and turn.finish_reason == "length"
    assert max(again.staleness()) <= 1
    assert again.rows()[-1]["rollouts/generated"] == 24  # taken up, not admitted a second time


def test_a_trajectory_of_several_turns_steps_its_environment_again(tmp_path: Path) -> None:
    """Stopped in the second turn; after the resume the first turn's answer is that of before."""
    cfg = config(train={"steps": 2})

    async def stop(run: FakeRun, controller: Any) -> None:
        while sum("/1.0 by" in event for event in run.clients[0].events) < 8:
            await asyncio.sleep(0.005)
        controller.request_stop("stopped by signal")

    def setup(run: FakeRun) -> None:
        (client,) = run.clients
        whole = client.generate

        async def generate(ids: Any, sampling: SamplingParams, rid: str) -> GenerateResult:
            client.latency_s = 60.0 if rid.endswith("/1.0") else 0.0
            return await whole(ids, sampling, rid)

        client.generate = generate  # type: ignore[method-assign]

    FakeRun(tmp_path, cfg, environment=FakeEnvironment(turns=2), during=stop, setup=setup).run()
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        kept = {(p.group_id, i): a for p in store.resume(0, keep_partial=True).partial for i, a in p.answers.items()}
    before = {key: answers for key, answers in kept.items() if len(answers) == 2}
    assert len(before) == 8  # first turn complete, the second one cut off
    again = FakeRun(tmp_path, cfg, attempt=2, environment=FakeEnvironment(turns=2))
    assert again.run() == "run ended"
    trained = {(t.group_id, t.sample_index): t for b in again.learner.batches for g in b.groups for t in g.trajectories}
    assert before.keys() <= trained.keys()
    for key, answers in before.items():
        first, second = trained[key].turns
        assert tuple(trained[key].tokens[first.start : first.end]) == answers[0].result.output_ids
        cut = answers[1].result.output_ids
        assert tuple(trained[key].tokens[second.start : second.start + len(cut)]) == cut and len(cut) == 2
        assert {span.version.attempt for span in first.spans} == {1}


def test_the_store_forgets_what_is_newer_than_the_checkpoint_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.sqlite"
    with RolloutStore(path) as store:
        for group in (0, 1):
            store.admit(group, f"p{group}", group, 2, PolicyVersion(1, 0))
        assert store.keep_answers(0, 1, [Answer(1, result(4, reason="abort", version="1.0"))])
        assert store.keep_answers(1, 0, [Answer(1, result(4, version="1.0")), Answer(2, result(5, version="1.1"))])
        store.end_run()
        assert not store.keep_answers(0, 0, [Answer(1, result(4))])
        plan = store.resume(0, keep_partial=True)
        expected = [(0, {1: (Answer(1, result(4, reason="abort")),)})]
        assert [(partial.group_id, dict(partial.answers)) for partial in plan.partial] == expected
        assert plan.requeue == (1,)
        assert store.resume(0, keep_partial=True).partial == plan.partial  # and after another crash
        assert store.resume(0, keep_partial=False).partial == ()
        store.admit(2, "p0", 0, 1, PolicyVersion(2, 0))
        store.keep_answers(2, 0, [Answer(1, result(4))])
    with closing(sqlite3.connect(path)) as connection, connection:
        (content,) = connection.execute("SELECT content FROM partial_rollouts").fetchone()
        connection.execute("UPDATE partial_rollouts SET content = ?", (test_store.flipped(content, 0.5),))
    with RolloutStore(path) as store, pytest.raises(StoreError, match=r"answers of trajectory 2/0 .* are damaged"):
        store.resume(0, keep_partial=True)


def test_what_is_kept_of_a_trajectory_goes_with_its_end(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:

        def kept() -> set[tuple[int, int]]:
            return {tuple(row) for row in store._rows("SELECT group_id, sample_index FROM partial_rollouts")}

        for group in range(4):
            store.admit(group, f"p{group}", group, 2, PolicyVersion(1, 0))
            for sample in range(2):
                assert store.keep_answers(group, sample, [Answer(1, result(4, reason="abort"))])
        assert store.add_trajectory(test_store.trajectory(0, 1, PolicyVersion(1, 0)))
        assert kept() == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)}
        assert store.replace(1, 0, "no", 2)
        assert kept() == {(0, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)}
        assert store.fail(1, 1, "no") and store.drop(2, "expired")
        assert kept() == {(0, 0), (3, 0), (3, 1)}
        store.end_run()  # a resume takes these up
        assert kept() == {(0, 0), (3, 0), (3, 1)}
        store.prune_samples(0)
        assert kept() == {(0, 0), (3, 0), (3, 1)}
        store.prune_samples(1)  # no checkpoint brings them back
        assert kept() == set()


def test_a_server_that_does_not_answer_delays_the_stop_by_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vcpo_megatron.orchestrator.modes.generation.CUT_OFF_S", 0.3)

    async def hangs(self: Any, rid: str | None = None) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("tests.orchestrator.fake_run.FakeClient.abort", hangs)
    stopped(tmp_path, config())
    said = capsys.readouterr().out
    assert_names(said, "rollout server 0", "TimeoutError")
    assert_names(said, "0 of 8 unfinished trajectories", "0 tokens")
