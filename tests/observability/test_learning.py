"""When nothing is learned it is said: after some steps, and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeEnvironment, FakeEpisode, FakeRun, config
from tests.orchestrator.store.test_store import V0, trajectory
from vcpo_megatron.environments.base import Example, Outcome
from vcpo_megatron.observability.learning import FIRST_SAID, LearningWatch
from vcpo_megatron.types import Batch, Group


def batch(step: int, *groups: Sequence[float]) -> Batch:
    return Batch(
        step,
        tuple(
            Group(g, f"p{g}", tuple(replace(trajectory(g, s, V0), reward=r) for s, r in enumerate(rewards)))
            for g, rewards in enumerate(groups)
        ),
    )


@pytest.mark.parametrize(
    ("groups", "which"),
    [
        (((0.0, 0.0), (0.0, 0.0)), " (every one is 0)"),
        (((1.0, 1.0), (1.0, 1.0)), " (every one is 1)"),
        (((0.0, 0.0), (1.0, 1.0)), ""),
        (((0.3, 0.1 + 0.2), (0.3, 0.3)), " (every one is 0.3)"),  # equal but for rounding
        (((1.0,), (0.0,)), ""),  # groups of one
    ],
)
def test_equal_rewards_are_said_after_some_steps_ever_more_rarely_and_at_the_end(
    groups: tuple[tuple[float, ...], ...], which: str
) -> None:
    watch = LearningWatch()
    said = {step: line for step in range(50) if (line := watch.observe(batch(step, *groups))) is not None}
    assert list(said) == [FIRST_SAID - 1, 2 * FIRST_SAID - 1, 4 * FIRST_SAID - 1]
    assert_names(said[19], "steps 0-19", f"all rewards are equal{which},", "nothing is learned")
    assert_names(watch.summary(), "nothing was learned", "50 steps", f"different rewards{which};")


def test_one_group_with_different_rewards_is_something() -> None:
    watch = LearningWatch()
    assert watch.summary() is None
    same, other = batch(0, (1.0, 1.0), (1.0, 1.0)), batch(0, (1.0, 1.0), (1.0, 0.0))
    assert [watch.observe(same) for _ in range(FIRST_SAID - 1)] == [None] * (FIRST_SAID - 1)
    assert watch.observe(other) is None and watch.summary() is None
    assert [watch.observe(same) is None for _ in range(FIRST_SAID)] == [True] * (FIRST_SAID - 1) + [False]
    assert watch.summary() is None  # there was something, before the task was solved


class Episode(FakeEpisode):
    async def step(self, action: Any) -> Any:
        return Outcome(0.0)


class Environment(FakeEnvironment):
    def episode(self, example: Example) -> FakeEpisode:
        return Episode(self, example)


@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_a_run_without_rewards_ends_with_a_warning(
    tmp_path: Path, lag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(train={"steps": 11}, staleness={"lag": lag})
    assert FakeRun(tmp_path, cfg, environment=Environment()).run() == "run ended"
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vcpo: warning: ")]
    assert [line.split(":")[2].strip() for line in told] == ["steps 0-9", "nothing was learned"]
