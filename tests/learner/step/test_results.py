"""The table of rows: one owner each, and metrics from literal numbers."""

from __future__ import annotations

import math

import pytest
import torch

from vcpo_megatron.algorithm.advantages import group_scale
from vcpo_megatron.learner.batch.packing import Row
from vcpo_megatron.learner.step.results import RowFacts, RowTable, step_metrics

from ..batch.test_packing import trajectory


def filled() -> RowTable:
    table = RowTable(3)
    table.record_forward(
        [0, 2],
        torch.tensor([0.0, math.log(2)], dtype=torch.float64),
        torch.tensor([-1.0, -3.0]),
        torch.tensor([2.0, 4.0]),
    )
    table.record_forward([1], torch.tensor([1.0]), torch.tensor([-2.0]), torch.tensor([0.0]))
    table.record_norms([0, 2], torch.tensor([3.0, 5.0]))
    table.record_baselines([0, 2], torch.tensor([0.25, 0.25]), False)
    return table


def test_the_sum_over_ranks_gives_every_row_to_all() -> None:
    mine, other = filled(), RowTable(3)
    mine.record_rank(gradients_are_finite=True, padded_tokens=3)
    agreed = RowTable.from_sum(mine.packed() + other.packed())
    assert agreed.log_ratio.tolist() == [0.0, 1.0, math.log(2)]
    assert agreed.grad_norm[[0, 2]].tolist() == [3.0, 5.0] and agreed.grad_norm[1].isnan()
    assert agreed.finite
    assert agreed.padded_tokens == 3
    other.record_rank(gradients_are_finite=False, padded_tokens=0)
    assert not RowTable.from_sum(mine.packed() + other.packed()).finite


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_row_of_no_rank_or_of_several_is_a_fault(ranks: int) -> None:
    with pytest.raises(RuntimeError, match="by no rank, or by several"):
        RowTable.from_sum(filled().packed() * ranks)


def test_a_nan_log_ratio_is_seen() -> None:
    table = filled()
    table.log_ratio[1] = math.nan
    assert not RowTable.from_sum(table.packed()).finite


def test_metrics_of_known_rows() -> None:
    """Group 0: rewards 1 and 0, weights 1 and 2, b = 0.25; group 1: one row, no variance."""
    rows = [Row(0, 0, trajectory([1, 2, 3], 1)), Row(1, 1, trajectory([1, 2], 1)), Row(2, 0, trajectory([1, 2, 3], 1))]
    groups = [[rows[0], rows[2]], [rows[1]]]
    for row, reward in zip(rows, (1.0, 1.0, 0.0), strict=True):
        object.__setattr__(row.trajectory, "reward", reward)
    table = RowTable(3)
    table.record_forward(
        [0, 1],
        torch.tensor([0.0, math.log(2)], dtype=torch.float64),
        torch.tensor([-1.0, -3.0]),
        torch.tensor([2.0, 4.0]),
    )
    table.record_forward([2], torch.tensor([1.0]), torch.tensor([-2.0]), torch.tensor([0.0]))
    table.record_norms([0, 1], torch.tensor([3.0, 5.0]))
    table.record_baselines([0, 1], torch.tensor([0.25, 0.25]), False)
    scales = [group_scale(torch.tensor([1.0, 0.0]), True), group_scale(torch.tensor([1.0]), True)]
    tenths = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)
    facts = RowFacts.of(groups, scales, torch.tensor([0.5, 0.5, 1.0]), tenths)
    metrics = step_metrics(
        table,
        facts,
        torch.tensor([1.0, 2.0, 1.0]).double(),
        ess_ratio=0.5,
        ess_ratio_truncated=0.5,
        ess_scale=0.7,
        learning_rate=1e-3,
        total_norm=2.0,
        skipped=False,
        seconds=1.0,
    )
    # -(2 * (1 - .25) * 1 * .1 * -1  +  2 * (0 - .25) * 2 * .1 * -3) = .15 - .3
    assert metrics["loss"] == pytest.approx(-0.15)
    assert metrics["groups/zero_variance"] == 1
    assert metrics["grad_norm/trajectory_mean"] == 4 and metrics["grad_norm/trajectory_max"] == 5
    assert metrics["kl/behavior"] == pytest.approx(-(1 + math.log(2)) / 5)
    assert metrics["entropy"] == pytest.approx(6 / 5)
    assert metrics["tokens/trained"] == 5 and metrics["weight/max"] == 2
