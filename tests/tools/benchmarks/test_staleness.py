"""What the comparison of staleness bounds reads from a run's rows."""

from __future__ import annotations

import math

import pytest
from benchmarks.staleness import CONTENDERS, summarize, table

ROWS = [
    {"ess/ratio": 1.0, "ess/lr_scale": 1.0, "staleness/mean": 0.0, "rollouts/trained": 64, "eval/accuracy": 0.25},
    {"ess/ratio": 0.5, "ess/lr_scale": 0.7, "staleness/mean": 3.0, "rollouts/trained": 128, "staleness/admitted": 4},
    {"ess/ratio": 0.75, "ess/lr_scale": 0.8, "staleness/mean": 6.0, "rollouts/trained": 192, "eval/accuracy": 0.75},
    {"ess/ratio": 0.75, "ess/lr_scale": 0.9, "staleness/mean": 3.0, "rollouts/trained": 256, "eval/accuracy": 0.5},
]


def test_an_outcome_is_of_all_steps_and_of_the_evaluations_there_were() -> None:
    found = summarize(ROWS, "fixed", 3, 12.5)
    assert (found.contender, found.seed, found.seconds, found.steps, found.trajectories) == ("fixed", 3, 12.5, 4, 256)
    assert found.ess_ratio == 0.75 and found.lr_scale == pytest.approx(0.85) and found.staleness == 3.0
    assert math.isnan(found.admitted)  # not in every row: the bound was fixed
    assert (found.accuracy, found.best_accuracy) == (0.5, 0.75)
    assert math.isnan(summarize(ROWS[1:2], "adaptive", 0, 1.0).accuracy)
    assert summarize(ROWS[1:2], "adaptive", 0, 1.0).admitted == 4.0


def test_the_table_has_a_line_a_run() -> None:
    lines = table([summarize(ROWS, name, 0, 12.5) for name in CONTENDERS]).splitlines()
    assert lines[0].split()[:4] == ["run", "seed", "seconds", "steps"]
    assert [line.split()[0] for line in lines[1:]] == ["fixed", "adaptive"]
    assert lines[1].split() == ["fixed", "0", "12.5", "4", "0.750", "0.850", "3.00", "0.500", "0.750"]
