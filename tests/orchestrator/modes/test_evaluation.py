"""Evaluation at pinned versions beside training, and where its numbers stand in metrics.jsonl."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.fake_run import FakeEnvironment, FakeEpisode, FakeRun, config
from vcpo_megatron.environments.base import Example
from vcpo_megatron.observability.sinks import JsonlSink
from vcpo_megatron.orchestrator.modes.evaluation import evaluating_servers, mean_reward
from vcpo_megatron.orchestrator.modes.metrics_log import MetricsLog, evaluated_versions, start_of_log
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
    assert "1 of 3 samples failed, first: " in capsys.readouterr().out
    assert run.rows()[-1]["eval/accuracy"] in (0.0, 0.5, 1.0)


def test_mean_reward() -> None:
    assert mean_reward([1.0, 0.0, 0.5, 0.5], (), 3) == {"eval/accuracy": 0.5}
    assert math.isnan(mean_reward([], ["down"], 3)["eval/accuracy"])


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


def test_a_held_out_sample_that_hangs_fails_at_its_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = FakeEnvironment(delay_s=lambda example: 60.0 if example.data["index"] == 1000 else 0.0)
    cfg = config(train={"steps": 2, "eval_every": 1}, staleness={"wait_s": 1.0})
    run = FakeRun(tmp_path, cfg, environment=environment)
    assert run.run() == "run ended"
    assert "1 of 3 samples failed, first: no answer within 1 s (staleness.wait_s)" in capsys.readouterr().out


def test_an_evaluation_without_one_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert math.isnan(mean_reward([], ["the judge is down", "late"], 4)["eval/accuracy"])
    assert capsys.readouterr().out == (
        "vcpo: warning: evaluation of version 4: all 2 samples failed, there is no accuracy; first: the judge is down\n"
    )
