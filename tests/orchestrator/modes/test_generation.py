"""When failures end a run."""

from __future__ import annotations

import pytest

from tests.messages import assert_names
from vcpo_megatron.orchestrator.controller import _failure_window
from vcpo_megatron.orchestrator.modes.failures import FailureWindow
from vcpo_megatron.run.tasks import RunError

from ..fake_run import config


def test_failures_of_a_kind_are_counted_together() -> None:
    failures = FailureWindow(6, 0.5)
    for number in range(3):
        failures.failure(ValueError(f"log-prob {number}.5e-3 of token {number} is not finite"), 0)
    for text in ("the judge is down", "connection lost"):
        failures.failure(OSError(text), 0)
    with pytest.raises(RunError) as caught:
        failures.failure(ValueError("log-prob -7.5 of token 9 is not finite"), 0)
    assert_names(caught.value, "6 of the last 6 outcomes", "(rollout.max_failure_ratio = 0.5)")
    assert_names(caught.value, "4 of them: log-prob -7.5 of token 9")


@pytest.mark.parametrize(("staleness", "groups", "limit"), [(0, 1, 100), (4, 8, 400), (16, 8, 1360)])
def test_the_window_is_many_times_what_is_in_flight(staleness: int, groups: int, limit: int) -> None:
    cfg = config(staleness={"max_staleness": staleness}, train={"groups_per_step": groups})
    assert _failure_window(cfg) == limit
