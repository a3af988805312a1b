"""A stop in the middle of a step: it is left in time, checkpointed as it was before it, and taken again by a resume."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeRun, stopped_while_it_samples
from tests.orchestrator.store.crash_images import run_of
from tests.orchestrator.store.test_crash_points import EXPECTED, comparable, learner, resume_and_check, settings
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.orchestrator.store.store import RolloutStore

pytestmark = pytest.mark.timeout(60)
#: Steps whose batch the learner has before the stop; the last one is in progress then.
AT = 5


def with_grace(lag: str, grace_s: float) -> RunConfig:
    config = settings(lag)
    return config.model_copy(update={"launch": config.launch.model_copy(update={"grace_s": grace_s})})


def is_sampled(controller: Any, stage: int) -> bool:
    """Whether a run in exact lag has nothing more to sample in ``stage``."""
    return any(part() == f"stage {stage} waits for the learner" for part in controller._describe)


def stopped_in_a_step(run_dir: Path, lag: str, grace_s: float, **changes: Any) -> tuple[FakeRun, float]:
    """A run that is stopped while it takes step ``AT``, and the seconds that its end took."""
    run = run_of(run_dir, with_grace(lag, grace_s))
    stopped_at = 0.0

    async def stop(run: FakeRun, controller: Any) -> None:
        nonlocal stopped_at
        while AT not in started or lag == "exact" and not is_sampled(controller, AT):
            await asyncio.sleep(0.005)
        stopped_at = time.monotonic()
        controller.request_stop("stopped by signal")

    started: list[int] = []
    run.during, run.learner.at_step = stop, started.append
    run.learner.long_steps = {AT}
    for name, value in changes.items():
        setattr(run.learner, name, value)
    assert run.run() == "stopped by signal"
    return run, time.monotonic() - stopped_at


@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_a_step_that_is_too_long_is_left_and_taken_again_to_the_same_bits(
    lag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_of(tmp_path / "whole", settings(lag))
    whole.run()
    run, seconds = stopped_in_a_step(tmp_path / "run", lag, grace_s=2.0)
    assert 0.9 < seconds < 4.0  # half of the grace for the step; it would have taken a minute
    assert run.learner.left == [AT] and run.learner.checkpoints[-1] == AT
    assert [row["step"] for row in run.rows()] == list(range(AT))
    with RolloutStore.open_readonly(tmp_path / "run" / "rollouts.sqlite") as store:
        assert store.counts().trained == AT * 4 and store.steps_done() == AT
    assert_names(capsys.readouterr().out, "step 5 was aborted", "(launch.grace_s = 2 s)", "2 groups")
    resume_and_check(tmp_path / "run", whole, lag)  # every prompt once; exact: parameter, order and rows are equal


def test_it_is_left_at_once_when_the_last_step_took_longer_than_is_left(tmp_path: Path) -> None:
    run, seconds = stopped_in_a_step(tmp_path / "run", "bounded", grace_s=10.0, long_steps={AT - 1, AT}, long_s=6.0)
    assert run.learner.left == [AT] and seconds < 4.0  # half of the grace is 5 s


@pytest.mark.parametrize("changes", [{"long_s": 1.0}, {"may_leave": False, "long_s": 1.5}])
def test_a_step_that_ends_counts_even_if_it_was_to_be_left(changes: dict[str, Any], tmp_path: Path) -> None:
    grace_s = 20.0 if changes.get("may_leave", True) else 1.0
    run, _ = stopped_in_a_step(tmp_path / "run", "bounded", grace_s, **changes)
    assert run.learner.left == [] and run.learner.checkpoints[-1] == AT + 1
    assert [row["step"] for row in run.rows()] == list(range(AT + 1))
    again = run_of(tmp_path / "run", settings("bounded"), attempt=2)
    assert again.run() == "run ended"
    assert Counter(learner(again).history) == EXPECTED


def slow_sampling(run: FakeRun, from_prompt: int) -> None:
    run.environment.delay_s = lambda example: 60.0 if from_prompt <= example.data["index"] < 1000 else 0.0


@pytest.mark.parametrize(("step_s", "grace_s"), [(0.0, 2.0), (5.0, 20.0)])
def test_exact_lag_does_not_wait_for_what_it_still_samples(step_s: float, grace_s: float, tmp_path: Path) -> None:
    """Version 3 samples batch 5 (prompts 10 and 11) for ever: step 3 is done, or in progress, at the stop. In half of
    the grace it would end."""
    whole = run_of(tmp_path / "whole", settings("exact"))
    whole.run()

    async def stop(run: FakeRun, controller: Any) -> None:
        while 3 not in started or not step_s and await controller._recorder.write(RolloutStore.steps_done) < 4:
            await asyncio.sleep(0.005)
        controller.request_stop("stopped by signal")

    started: list[int] = []
    run = run_of(tmp_path / "run", with_grace("exact", grace_s))
    run.during, run.learner.at_step = stop, started.append
    run.learner.long_steps, run.learner.long_s = {3}, step_s
    slow_sampling(run, from_prompt=10)
    began = time.monotonic()
    assert run.run() == "stopped by signal"
    assert time.monotonic() - began < 10.0
    # left: what was before step 3 is saved; done: step 4 could never get its batch, so step_2 stays the newest
    assert run.learner.left == ([3] if step_s else [])
    assert run.context.directory.complete_steps()[-1] == (3 if step_s else 2)
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    resume_and_check(tmp_path / "run", whole, "exact")


def test_exact_lag_stops_while_its_first_batch_is_sampled(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", with_grace("exact", 600.0))
    assert stopped_while_it_samples(run) < 8.0
    assert run.learner.batches == [] and run.environment.closed > 0


def test_rows_of_the_stopped_run_are_those_of_the_whole_one(tmp_path: Path) -> None:
    whole = run_of(tmp_path / "whole", settings("exact"))
    whole.run()
    run, _ = stopped_in_a_step(tmp_path / "run", "exact", grace_s=1.0)
    assert comparable(run.rows()) == comparable(whole.rows())[:AT]
