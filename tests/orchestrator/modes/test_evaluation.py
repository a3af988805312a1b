"""Evaluation at pinned versions beside training, and where its numbers stand in metrics.jsonl."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names, assert_said
from tests.orchestrator.fake_run import FakeEnvironment, FakeEpisode, FakeRun, config
from tests.orchestrator.store.test_store import V0, trajectory
from vcpo_megatron.cli import main as cli
from vcpo_megatron.environments.base import Example
from vcpo_megatron.observability.sinks import JsonlSink
from vcpo_megatron.orchestrator.modes.evaluation import evaluating_servers, summary
from vcpo_megatron.orchestrator.modes.metrics_log import MetricsLog, evaluated_versions, start_of_log
from vcpo_megatron.orchestrator.store.records import HeldOutSample
from vcpo_megatron.orchestrator.store.schema import StoreError
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.transport.messages import ControlError
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("first", "steps", "every", "versions"),
    [
        (0, 6, 2, [0, 2, 4, 6]),
        (0, 7, 2, [0, 2, 4, 7]),  # 7 and 6 would share the last row
        (0, 5, 1, [0, 1, 2, 3, 5]),
        (0, 40, 20, [0, 20, 40]),
        (20, 40, 20, [20, 40]),
        (40, 40, 20, [40]),
        (3, 12, 4, [4, 8, 12]),
        (41, 40, 20, []),
        (0, 1, 1, [1]),
        (0, 5, 0, []),
    ],
)
def test_versions_to_evaluate(first: int, steps: int, every: int, versions: list[int]) -> None:
    due = evaluated_versions(first, steps, every)
    assert list(due) == versions and len(due) == len(versions)
    assert [version in due for version in range(50)] == [version in versions for version in range(50)]


def test_a_run_of_a_thousand_million_steps_starts_as_fast_as_a_short_one(tmp_path: Path) -> None:
    started = time.process_time()
    due = evaluated_versions(0, 10**9, 1)
    log = MetricsLog([], due, steps=10**9)
    log.add({"step": 7})
    assert time.process_time() - started < 1
    assert (len(due), due[5], due[-1], 10**9 - 1 in due) == (10**9, 5, 10**9, False)
    assert log.held == [{"step": 7}]


def eval_events(run: FakeRun) -> dict[str, set[str]]:
    """Version -> held-out prompts that were sampled by it."""
    found: dict[str, set[str]] = {}
    for client in run.clients:
        for event in client.events:
            if event.startswith("generate heldout"):
                _, rid, _, version = event.split()
                found.setdefault(version, set()).add(rid.split("/")[0])
    return found


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("lag", [0, 2])
def test_every_due_version_is_evaluated_whole_and_in_its_row(tmp_path: Path, lag: int, servers: int) -> None:
    cfg = config(train={"steps": 7, "eval_every": 2}, staleness={"max_staleness": lag})
    run = FakeRun(tmp_path, cfg, servers=servers)
    assert run.run() == "run ended"
    everything = {"heldout-0", "heldout-1", "heldout-2"}
    assert eval_events(run) == {f"1.{v}": everything for v in (0, 2, 4, 7)}
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(7))
    assert {row["step"]: row["eval/version"] for row in rows if "eval/accuracy" in row} == {0: 0, 2: 2, 4: 4, 6: 7}
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows if "eval/accuracy" in row)
    assert max(run.staleness()) <= lag
    assert rows[-1]["rollouts/generated"] == 7 * 4  # evaluation is not counted


def test_training_goes_on_during_an_evaluation_and_the_server_keeps_the_pinned_version(tmp_path: Path) -> None:
    during_evaluation: list[tuple[int, Any]] = []
    goes_on = asyncio.Event()

    class HeldBack(FakeEpisode):
        async def step(self, action: Any) -> Any:
            if self._example.data["index"] >= 1000:
                await goes_on.wait()
            return await super().step(action)

    class Environment(FakeEnvironment):
        def episode(self, example: Example) -> FakeEpisode:
            return HeldBack(self, example)

    async def during(run: FakeRun, controller: Any) -> None:
        assert run.fleet is not None
        while len(run.learner.batches) < 4 or not any("generate heldout" in event for event in run.clients[0].events):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        during_evaluation.append((len(run.learner.batches), run.fleet.servers[0].version))
        goes_on.set()

    cfg = config(train={"steps": 10, "eval_every": 8}, staleness={"max_staleness": 3})
    run = FakeRun(tmp_path, cfg, environment=Environment(), during=during)
    assert run.run() == "run ended"
    assert during_evaluation == [(4, PolicyVersion(1, 0))]  # what version 0 may still be trained on: steps 0..3
    assert max(run.staleness()) == 3


def test_an_evaluation_every_step_never_pins_two_versions(tmp_path: Path) -> None:
    cfg = config(train={"steps": 5, "eval_every": 1}, staleness={"max_staleness": 4})
    run = FakeRun(tmp_path, cfg)
    assert run.run() == "run ended"
    versions = [row.get("eval/version") for row in run.rows()]
    assert versions == [0, 1, 2, 3, 5]


def test_failed_samples_of_an_evaluation_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(fails=lambda example: example.data["index"] == 1001)
    run = FakeRun(tmp_path, config(train={"steps": 2, "eval_every": 1}), environment=environment)
    assert run.run() == "run ended"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "evaluation of version 2" in line]
    assert_names(line, "vcpo: warning", "version 2", "1 of 3 samples failed")
    row = run.rows()[-1]
    assert row["eval/accuracy"] in (0.0, 0.5, 1.0) and (row["eval/failed"], row["eval/samples"]) == (1, 3)


def samples(*rewards: float | None) -> list[HeldOutSample]:
    """One a reward; None failed."""
    return [
        HeldOutSample(i, f"heldout-{i}", reason="the judge is down")
        if reward is None
        else HeldOutSample(i, f"heldout-{i}", replace(trajectory(-1, i, V0, prompt_id=f"heldout-{i}"), reward=reward))
        for i, reward in enumerate(rewards)
    ]


def test_accuracy_is_over_the_samples_that_did_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(3, samples(1.0, 0.0, 0.5, 0.5)) == {"eval/accuracy": 0.5, "eval/failed": 0, "eval/samples": 4}
    assert capsys.readouterr().out == ""
    assert summary(3, samples(1.0, *[None] * 7)) == {"eval/accuracy": 1.0, "eval/failed": 7, "eval/samples": 8}
    assert "7 of 8 samples failed" in capsys.readouterr().out
    assert math.isnan(summary(3, samples(None))["eval/accuracy"])


@pytest.mark.parametrize(("failed", "of", "is_best"), [(0, 8, True), (1, 20, True), (2, 20, False), (7, 8, False)])
def test_the_best_checkpoint_needs_nearly_all_samples(
    tmp_path: Path, failed: int, of: int, is_best: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog([], [0, 4], steps=4)
    log.evaluated(0, summary(0, samples(*[0.5] * of)))
    log.evaluated(4, summary(4, samples(*[None] * failed, *[1.0] * (of - failed))))
    assert log.accuracy == ({0: 0.5, 4: 1.0} if is_best else {0: 0.5})
    assert ("to be `best` (more than 5%)" in capsys.readouterr().out) == (not is_best)
    row = {"step": 3, "eval/version": 4, "eval/accuracy": 1.0, "eval/failed": failed, "eval/samples": of}
    assert (4 in MetricsLog([], [], 8, [row]).accuracy) == is_best  # the same after a resume


def held(path: Path) -> dict[int, list[tuple[str, float | None, str]]]:
    """Version -> prompt, reward and reason of each sample that is stored."""
    found: dict[int, list[tuple[str, float | None, str]]] = {}
    with RolloutStore.open_readonly(path / "rollouts.sqlite") as store:
        for row in store.heldout():
            found.setdefault(row["version"], []).append((row["prompt_id"], row["reward"], row["reason"]))
            assert (row["trajectory"] is None) == bool(row["reason"])
    return found


@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_held_out_answers_are_stored_and_shown(tmp_path: Path, lag: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config(train={"steps": 4, "eval_every": 2}, staleness={"lag": lag, "max_staleness": 1})
    run = FakeRun(tmp_path, cfg)
    assert run.run() == "run ended"
    stored = held(tmp_path)
    assert list(stored) == [0, 2, 4]
    assert all([prompt for prompt, _, _ in rows] == ["heldout-0", "heldout-1", "heldout-2"] for rows in stored.values())
    accuracy = {row["eval/version"]: row["eval/accuracy"] for row in run.rows() if "eval/version" in row}
    assert {version: sum(r for _, r, _ in rows if r is not None) / 3 for version, rows in stored.items()} == accuracy
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path), "--eval"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        ["version", "samples", "failed", "accuracy"],
        *([str(version), "3", "0", f"{accuracy[version]:.4f}"] for version in (0, 2, 4)),
    ]
    assert lines[5] == ["version", "prompt", "reward", "tokens", "answer"]
    assert [line[:2] for line in lines[6:]] == [["4", f"heldout-{i}"] for i in range(3)]
    assert cli.main(["report", str(tmp_path), "--eval", "--prompt", "heldout-1", "--json"]) == 0
    *rows, totals = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["version"], row["prompt_id"], row["tokens"]) for row in rows] == [
        (v, "heldout-1", 4) for v in (0, 2, 4)
    ]
    assert [row["version"] for row in totals["evaluations"]] == [0, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--step", "1"), "version 1 was not evaluated; these were: 0, 2"),
        (("--prompt", "x"), "no held-out prompt x (they are named like heldout-0)"),
        ((), ""),
    ],
)
def test_what_evaluations_did_not_get_is_said(
    tmp_path: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        if says:
            store.add_evaluation(0, samples(1.0, None))
            store.add_evaluation(2, samples(0.0, 1.0))
    assert cli.main(["report", str(tmp_path), "--eval", *arguments]) == 1
    assert (says or "no evaluation is stored") in capsys.readouterr().err


def test_an_evaluation_takes_the_place_of_an_earlier_one_and_a_resume_forgets_newer_ones(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        for version in (0, 2, 4):
            store.add_evaluation(version, samples(0.0, 1.0, None))
        store.add_evaluation(2, samples(1.0, 1.0))
        assert [(row["version"], row["samples"], row["failed"], row["reward"]) for row in store.evaluations()] == [
            (0, 3, 1, 0.5),
            (2, 2, 0, 1.0),
            (4, 3, 1, 0.5),
        ]
        store.prune_samples(2)
        kept = {row["version"]: row["trajectory"] is not None for row in store.heldout() if row["position"] == 0}
        assert kept == {0: False, 2: True, 4: True}
        store._connection.execute("UPDATE progress SET steps_done = 5")
        store.resume(2)
        assert [row["version"] for row in store.evaluations()] == [0, 2]
        store._connection.execute("UPDATE evaluations SET content = zeroblob(20) WHERE version = 2")
        with pytest.raises(StoreError, match="heldout-0 by version 2 .* is damaged"):
            list(store.heldout(version=2))


def test_a_stop_in_the_final_evaluation_leaves_it_to_the_resumed_run(tmp_path: Path) -> None:
    async def stop(run: FakeRun, controller: Any) -> None:
        while not any(" by 1.3" in event and "heldout" in event for event in run.clients[0].events):
            await asyncio.sleep(0.005)
        controller.request_stop("stopped by signal")

    slow = FakeEnvironment(delay_s=lambda example: 0.5 if example.data["index"] >= 1000 else 0.0)
    cfg = config(train={"steps": 3, "eval_every": 3})
    first = FakeRun(tmp_path, cfg, environment=slow, during=stop)
    assert first.run() == "stopped by signal"
    assert first.learner.checkpoints == [3]
    assert [("eval/accuracy" in row) for row in first.rows()] == [True, False, False]
    before = first.rows()
    second = FakeRun(tmp_path, cfg, attempt=2, resume_step=3)
    assert second.run() == "run ended"
    rows = second.rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["eval/version"] == 3 and rows[:2] == before[:2]
    assert {k: v for k, v in rows[2].items() if not k.startswith("eval/")} == before[2]


def test_rows_held_back_at_a_checkpoint_are_not_lost_by_a_crash(tmp_path: Path) -> None:
    """The evaluation of version 0 does not end; checkpoint 2 is taken, then the orchestrator dies."""
    stuck = FakeEnvironment(delay_s=lambda example: 60.0 if example.data["index"] >= 1000 else 0.0)
    cfg = config(train={"steps": 6, "eval_every": 5}, checkpoint={"every": 2}, staleness={"max_staleness": 4})
    first = FakeRun(tmp_path, cfg, environment=stuck)
    first.learner.error_at = 3
    with pytest.raises(ControlError):
        first.run()
    (tmp_path / "metrics.jsonl").write_text("")  # a SIGKILL would not have written what was held back
    second = FakeRun(tmp_path, cfg, attempt=2, resume_step=2)
    assert second.run() == "run ended"
    rows = second.rows()
    assert [row["step"] for row in rows] == list(range(6))
    assert "eval/accuracy" not in rows[0]  # its evaluation was lost with the attempt
    assert rows[-1]["eval/version"] == 6


def test_rows_are_written_in_order_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def written() -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    log = MetricsLog([JsonlSink(path)], [0, 2, 4], steps=4)
    log.add({"step": 0, "loss": 1.0})
    log.add({"step": 1, "loss": 2.0})
    assert written() == [] and [row["step"] for row in log.held] == [0, 1]
    log.evaluated(0, {"eval/accuracy": 0.25})
    assert written() == [{"step": 0, "loss": 1.0, "eval/accuracy": 0.25, "eval/version": 0}, {"step": 1, "loss": 2.0}]
    log.evaluated(2, {"eval/accuracy": 0.5})  # before its row: it trains still
    log.add({"step": 2})
    log.add({"step": 3})
    assert [row["step"] for row in written()] == [0, 1, 2]
    log.evaluated(4, {"eval/accuracy": 1.0})
    assert written()[-1] == {"step": 3, "eval/accuracy": 1.0, "eval/version": 4}
    log.close()


def test_start_of_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    start = start_of_log(path, 2, 6, [{"step": 1}], [2, 6])
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    assert list(start.rows) == [] and list(start.versions) == [2, 6]
    path.write_text('{"step": 0}\n')
    assert list(start_of_log(path, 2, 6, [{"step": 1}], [2, 6]).rows) == [{"step": 1}]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["0", "1", "2", "3"], ""),  # and 4, which the checkpoint has held back
        (["0", "2", "3"], "rows of steps 1 are missing"),
        (["0", "?", "3"], "lines 2 were no rows and are left out and rows of steps 1-2 are missing"),
        (["3"], "rows of steps 0-2 are missing"),
        ([], "rows of steps 0-3 are missing"),
        (["0", "?", "?", "1", "?", "2", "3"], "lines 2-3, 5 were no rows and are left out"),
        (["0", "1", "2", "3", "4", "?", "5", "6"], "lines 6 were no rows and are left out"),  # 5 and 6 are cut off
    ],
)
def test_what_is_missing_in_the_log_is_told(tmp_path: Path, lines: list[str], says: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join('{"step": 1, "lo\n' if line == "?" else f'{{"step": {line}}}\n' for line in lines))
    start = start_of_log(path, 5, 9, [{"step": 4}], [])
    assert start.problem == (f"{path}: {says}; the run goes on without them" if says else "")


def test_rows_of_steps_that_are_done_are_never_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = "".join(f'{{"step": {step}}}\n' for step in range(20))
    path.write_text(rows)
    assert start_of_log(path, 20, 10, [], evaluated_versions(20, 10, 5)).rows == []
    assert path.read_text() == rows
    start = start_of_log(path, 20, 20, [], evaluated_versions(20, 20, 5))  # its evaluation is missing
    assert (path.read_text(), list(start.rows), list(start.versions)) == (rows, [{"step": 19}], [20])
    log = MetricsLog([JsonlSink(path)], start.versions, 20)
    log.add(start.rows[0])
    assert path.read_text() == rows
    log.evaluated(20, {"eval/accuracy": 0.5})
    log.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == [{"step": n} for n in range(19)] + [{"step": 19, "eval/accuracy": 0.5, "eval/version": 20}]


def test_some_of_several_servers_evaluate() -> None:
    assert [len(evaluating_servers([object()] * n)) for n in (1, 2, 4, 8, 9)] == [1, 1, 1, 2, 2]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("limit_s", "said"),
    [
        (60.0, "no answer within 1 s (staleness.wait_s)"),
        (0.5, "environment fake, prompt heldout-0, sample -1/0: timed out: step did not return within the 0.5 s"),
    ],
)
def test_a_held_out_sample_that_hangs_fails_at_its_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit_s: float, said: str
) -> None:
    environment = FakeEnvironment(delay_s=lambda example: 60.0 if example.data["index"] == 1000 else 0.0)
    cfg = config(
        train={"steps": 2, "eval_every": 1}, staleness={"wait_s": 1.0}, environment={"episode_timeout_s": limit_s}
    )
    run = FakeRun(tmp_path, cfg, environment=environment)
    assert run.run() == "run ended"
    assert f"1 of 3 samples failed, first: {said}" in capsys.readouterr().out


def test_an_evaluation_without_one_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert math.isnan(summary(4, samples(None, None))["eval/accuracy"])
    assert_said("lines of a run", "evaluation without one answer", capsys.readouterr().out)
