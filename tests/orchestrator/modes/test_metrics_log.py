"""What a row says of its batch, from literal trajectories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vcpo_megatron.orchestrator.modes.metrics_log import step_row
from vcpo_megatron.orchestrator.store.reader import Counts
from vcpo_megatron.types import Batch, Group, PolicyVersion, StepResult, Trajectory, Turn, VersionSpan


def trajectory(spans: list[tuple[int, int]], masked: int = 0) -> Trajectory:
    """One prompt token, then spans of (tokens, number of the version); the last ``masked`` tokens are observations."""
    length, made = 1, []
    for tokens, version in spans:
        made.append(VersionSpan(length, length + tokens, PolicyVersion(1, version)))
        length += tokens
    mask = (np.arange(length) >= 1) & (np.arange(length) < length - masked)
    zeros = np.zeros(length)
    turn = Turn(1, length, "stop", tuple(made))
    return Trajectory(0, 0, "p", 1, zeros.astype(np.int32), mask, zeros.astype(np.float32), (turn,), 0.0)


@pytest.mark.parametrize(
    ("spans", "by_trajectory", "by_token"),
    [
        ([[(1, 9)], [(99, 5)]], 3.0, 4.96),  # the long answer is the stale one
        ([[(10, 10)], [(2, 6), (8, 10)]], 2.0, 0.4),  # only the beginning of a long answer is stale
        ([[(4, 10)], [(4, 10)]], 0.0, 0.0),
        ([[(3, 8)], [(3, 8), (3, 7)]], 2.5, (3 * 2 + 3 * 2 + 3 * 3) / 9),
    ],
)
def test_staleness_by_trajectory_and_by_token(
    spans: list[list[tuple[int, int]]], by_trajectory: float, by_token: float
) -> None:
    batch = Batch(10, (Group(0, "p", tuple(trajectory(one) for one in spans)),))
    row = step_row(batch, StepResult(10, PolicyVersion(1, 11), "", {}, ()), Counts(2, 0, 2, 0, 0), {})
    assert row["staleness/mean"] == by_trajectory
    assert row["staleness/token_mean"] == pytest.approx(by_token)


def test_observations_have_no_staleness() -> None:
    one = trajectory([(2, 10), (6, 4)], masked=5)
    assert one.sampled_by_version == ((10, 2), (4, 1))
    batch = Batch(10, (Group(0, "p", (one,)),))
    done = StepResult(10, PolicyVersion(1, 11), "", {}, ())
    assert step_row(batch, done, Counts(1, 0, 1, 0, 0), {})["staleness/token_mean"] == 2.0
    silent = replace(one, loss_mask=np.zeros(9, np.bool_))
    row = step_row(replace(batch, groups=(Group(0, "p", (silent,)),)), done, Counts(1, 0, 1, 0, 0), {})
    assert "staleness/token_mean" not in row and row["staleness/mean"] == 6.0
