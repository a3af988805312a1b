"""When the warning of low weights speaks, and when it is silent."""

from __future__ import annotations

import math

import pytest

from tests.messages import assert_names
from vcpo_megatron.observability.weights import STEPS_A_WARNING, WeightWatch


def test_it_speaks_once_in_a_while() -> None:
    watch = WeightWatch()
    means = {0: 1.0, 3: 0.1, 4: 0.0999, 5: 0.01, 3 + STEPS_A_WARNING: 1e-9, 4 + STEPS_A_WARNING: 0.05}
    spoke = {step: line for step, mean in means.items() if (line := watch.observe(step, {"weight/mean": mean}))}
    assert list(spoke) == [4, 4 + STEPS_A_WARNING]
    assert_names(spoke[4], "step 4", "0.0999 on average (weight/mean)")
    assert "optimizer.lr" in spoke[4] and "staleness.max_staleness" in spoke[4]


@pytest.mark.parametrize("found", [{}, {"weight/mean": math.nan}, {"weight/mean": math.inf}])
def test_nothing_low_is_nothing_said(found: dict[str, float]) -> None:
    assert WeightWatch().observe(0, found) is None
