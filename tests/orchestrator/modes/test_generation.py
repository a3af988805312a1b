"""What is sampled next, and when failures end a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vcpo_megatron.orchestrator.controller import _failure_window
from vcpo_megatron.orchestrator.modes.failures import FailureWindow, PromptFailures
from vcpo_megatron.orchestrator.modes.generation import Cursor, Generation, GenerationRules
from vcpo_megatron.orchestrator.store.resume import ResumePlan
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import RunError

from ..fake_run import config


class SlowRecorder:
    """A store that takes its time; ``written`` are the calls in order."""

    def __init__(self) -> None:
        self.written = asyncio.Event()

    def submit(self, call: Any) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.written.wait())  # type: ignore[arg-type]


def test_the_prompt_of_an_expired_group_is_the_next_one_the_oldest_first() -> None:
    async def main() -> None:
        recorder, cursor = SlowRecorder(), Cursor(next_index=40, next_group_id=9, requeue=[30])

        class Fleet:
            changes = Notifier()

        plan = ResumePlan(step=0, buffer=(), cursors={5: 17, 6: 12}, requeue=(), next_group_id=9, next_cursor=40)
        rules = GenerationRules(1, 9, False, False, 9)
        generation = Generation(
            None,
            Fleet(),
            None,
            recorder,
            cursor,
            None,
            rules,
            plan,  # type: ignore[arg-type]
            prompts=PromptFailures(3, {}),
            failures=FailureWindow(9, 0.5),
        )
        ending = [asyncio.ensure_future(generation.expire(group_id)) for group_id in (5, 6)]
        await asyncio.sleep(0)  # the store has not answered
        assert [cursor.take() for _ in range(4)] == [(9, 12), (10, 17), (11, 30), (12, 40)]
        recorder.written.set()
        await asyncio.gather(*ending)

    asyncio.run(main())


def test_failures_of_a_kind_are_counted_together() -> None:
    failures = FailureWindow(6, 0.5)
    for number in range(3):
        failures.failure(ValueError(f"log-prob {number}.5e-3 of token {number} is not finite"))
    for text in ("the judge is down", "connection lost"):
        failures.failure(OSError(text))
    with pytest.raises(RunError) as caught:
        failures.failure(ValueError("log-prob -7.5 of token 9 is not finite"))
    assert str(caught.value) == (
        "6 of the last 6 outcomes are failures (rollout.max_failure_ratio = 0.5), 4 of them: log-prob -7.5 of token 9 "
        "is not finite"
    )


@pytest.mark.parametrize(("staleness", "groups", "limit"), [(0, 1, 100), (4, 8, 400), (16, 8, 1360)])
def test_the_window_is_many_times_what_is_in_flight(staleness: int, groups: int, limit: int) -> None:
    cfg = config(staleness={"max_staleness": staleness}, train={"groups_per_step": groups})
    assert _failure_window(cfg) == limit
