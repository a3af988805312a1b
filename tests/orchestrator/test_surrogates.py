"""Half of a surrogate pair, which no encoding of Unicode has, ends no run: wherever it comes from it is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.orchestrator.fake_run import FakeEnvironment, FakeEpisode, FakeRun, config
from tests.orchestrator.store.test_store import V0, trajectory
from vcpo_megatron.cli import main as cli
from vcpo_megatron.environments.base import Example, Outcome
from vcpo_megatron.observability.sinks import JsonlSink, TensorBoardSink
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.transport.frames import decode, encode
from vcpo_megatron.transport.messages import Error, Probe, StepDone
from vcpo_megatron.types import StepResult

pytestmark = pytest.mark.timeout(60)
HALF, ESCAPED = "half \ud83d", "half \\ud83d"


class Episode(FakeEpisode):
    async def step(self, action: Any) -> Any:
        environment, index = self._environment, self._example.data["index"]
        assert isinstance(environment, Environment)
        if environment.where == "error" and index in (1, 1001):
            raise ValueError(HALF)
        outcome = await super().step(action)
        return Outcome(outcome.reward, {HALF: 1.0}) if environment.where == "info" else outcome


class Environment(FakeEnvironment):
    where = ""

    def train_example(self, index: int) -> Example:
        return Example(f"{HALF}-{index}" if self.where == "prompt" else f"train-{index}", {"index": index})

    def episode(self, example: Example) -> FakeEpisode:
        return Episode(self, example)

    def decode(self, token_ids: Sequence[int]) -> str:
        return HALF if self.where == "answer" else super().decode(token_ids)


@pytest.mark.parametrize(
    ("where", "lag"),
    [("error", "bounded"), ("info", "bounded"), ("answer", "bounded"), ("prompt", "bounded"), ("prompt", "exact")],
)
def test_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, lag: str) -> None:
    environment = Environment()
    environment.where = where
    cfg = config(train={"steps": 3, "eval_every": 2}, staleness={"lag": lag})
    run = FakeRun(tmp_path, cfg, environment=environment)
    assert run.run() == "run ended"
    assert len(run.learner.batches) == 3
    assert cli.main(["report", str(tmp_path), "--trajectories"]) == 0
    said = capsys.readouterr().out
    assert (ESCAPED in said) == (where in ("error", "prompt"))
    if where == "prompt":
        assert cli.main(["report", str(tmp_path), "--prompt", f"{HALF}-0"]) == 0


def test_the_store_takes_reasons_and_prompts(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        for group in range(4):
            store.admit(group, HALF, group, 2, V0)
        store.fail(0, 0, HALF)
        store.replace(1, 0, HALF, 2)
        store.drop(2, HALF)
        assert store.add_trajectory(trajectory(3, 0, V0, prompt_id=HALF))
        store.end_run(HALF)
        assert set(store.reasons()) == {f"dropped: {ESCAPED}", f"failed: {ESCAPED}", "dropped: a member failed"}
        assert store.failures_by_prompt() == {ESCAPED: 2}
        assert len(list(store.history(prompt_id=HALF))) == 9


@pytest.mark.parametrize(
    "message",
    [
        Error("learner", HALF),
        StepDone(StepResult(0, V0, HALF, {HALF: 1.0}, ())),
    ],
)
def test_control_messages(message: Any) -> None:
    assert ESCAPED in str(decode(encode(message))).replace("\\\\", "\\")
    assert decode(encode(Probe(np.arange(3, dtype=np.int32)))).tokens.tolist() == [0, 1, 2]  # type: ignore[union-attr]


def test_rows_of_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sinks = JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path / "tensorboard")
    for sink in sinks:
        sink.write({"step": 0, HALF: 1.0, "why": HALF})
        sink.close()
    # every JSON reader can read the line: there is no half of a pair in it, escaped as JSON does or not
    assert (tmp_path / "metrics.jsonl").read_text() == ('{"step": 0, "half \\\\ud83d": 1.0, "why": "half \\\\ud83d"}\n')
