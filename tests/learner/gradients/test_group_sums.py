"""How many accumulators hide the reduction of norms, against schedules counted by hand."""

from __future__ import annotations

import pytest

from vcpo_megatron.learner.gradients.group_sums import accumulators_needed


@pytest.mark.parametrize(
    ("stage", "packs", "window", "expected"),
    [
        (0, 1, 1, 1),  # the first stage, and every stage without a pipeline: one
        (3, 1, 1, 4),  # three groups ahead of the first stage, and the one at hand
        (3, 2, 1, 3),  # three packs ahead are two groups at the most
        (3, 4, 1, 2),
        (0, 1, 4, 4),  # virtual stages: a window of four packs is open at once
        (2, 2, 4, 4),  # three more packs of the window in two groups, two packs ahead in one
    ],
)
def test_accumulators(stage: int, packs: int, window: int, expected: int) -> None:
    assert accumulators_needed(stage, packs, window) == expected
