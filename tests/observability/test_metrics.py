"""Reducers on vectors with known answers, and the table itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo_megatron.observability.metrics import METRICS, REDUCERS, StepMetrics, reduce


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_says_what_it_is_and_what_is_healthy(name: str) -> None:
    metric = METRICS[name]
    assert metric.reducer in REDUCERS
    assert metric.description and metric.healthy, (
        f"observability/metrics.py: {name} must say what it means and what is healthy; then run: "
        "python tools/make_reference.py"
    )


def test_the_names_that_scripts_rely_on() -> None:
    names = "step policy_version loss reward/mean eval/accuracy ess/ratio lr/effective staleness/max rollouts/generated"
    assert set(names.split()) <= METRICS.keys()


VECTOR = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]


@pytest.mark.parametrize(
    ("reducer", "expected"), [("last", 6.0), ("mean", 3.875), ("sum", 31.0), ("max", 9.0), ("p95", 9.0)]
)
def test_known_vector(reducer: str, expected: float) -> None:
    assert reduce(reducer, VECTOR) == expected


@pytest.mark.parametrize(
    ("n", "expected"), [(1, 1), (2, 2), (19, 19), (20, 19), (21, 20), (60, 57), (100, 95), (101, 96)]
)
def test_p95_is_the_nearest_rank(n: int, expected: int) -> None:
    assert reduce("p95", [float(i) for i in range(n, 0, -1)]) == expected


@given(st.lists(st.integers(0, 10), min_size=1, max_size=200))
def test_p95_by_its_definition(values: list[int]) -> None:
    p95 = reduce("p95", values)
    assert 20 * sum(value <= p95 for value in values) >= 19 * len(values)
    assert all(20 * sum(value <= other for value in values) < 19 * len(values) for other in values if other < p95)


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_is_never_averaged_away(reducer: str, position: int) -> None:
    values = [1.0, 2.0]
    values.insert(position, math.nan)
    assert math.isnan(reduce(reducer, values))


def test_infinities() -> None:
    assert reduce("mean", [1.0, math.inf]) == math.inf
    assert math.isnan(reduce("sum", [math.inf, -math.inf]))
    assert reduce("max", [1.0, math.inf]) == math.inf


def test_no_observation_is_an_error_and_no_zero() -> None:
    with pytest.raises(ValueError, match="at least one"):
        reduce("sum", [])


def test_row_reduces_each_name_by_the_table() -> None:
    metrics = StepMetrics()
    metrics.observe("step", 4)
    metrics.observe("reward/mean", 1.0, 0.0, 0.0, 1.0)
    metrics.observe("weight/max", 0.5)
    metrics.observe("weight/max", 7.5, 2.0)
    metrics.observe("time/sync", 0.25)
    metrics.observe("time/sync", 0.5)
    metrics.observe("lr/effective", 1e-6)
    metrics.observe("lr/effective", 2e-6)
    metrics.observe("entropy")  # nothing observed
    metrics.distribution("staleness", np.array([0, 0, 1, 4]))
    row = metrics.row()
    assert row == {
        "step": 4.0,
        "reward/mean": 0.5,
        "lr/effective": 2e-6,
        "weight/max": 7.5,
        "staleness/mean": 1.25,
        "staleness/p95": 4.0,
        "staleness/max": 4.0,
        "time/sync": 0.75,
    }
    assert list(row) == [name for name in METRICS if name in row]
    assert all(type(value) is float for value in row.values())


def test_distribution_takes_an_iterator_once() -> None:
    metrics = StepMetrics()
    metrics.distribution("staleness", iter([1.0, 3.0]))
    assert metrics.row() == {"staleness/mean": 2.0, "staleness/p95": 3.0, "staleness/max": 3.0}


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="unknown metric 'reward/men'; did you mean 'reward/mean'"):
        StepMetrics().observe("reward/men", 1.0)
    with pytest.raises(ValueError, match="rewards/min"):
        StepMetrics().distribution("rewards", [1.0])
