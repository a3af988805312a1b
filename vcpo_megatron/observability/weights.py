"""A warning when the importance weights of whole batches are far below their expectation."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: Mean weight below which a batch says little of the policy; its expectation is 1.
LOW_MEAN = 0.1
#: Steps that a warning stands for.
STEPS_A_WARNING = 50


class WeightWatch:
    """Looks at every step's ``weight/mean``; speaks when it is low, at most once in ``STEPS_A_WARNING`` steps."""

    def __init__(self) -> None:
        self._silent_until = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The line for the user, or None when there is nothing (new) to say."""
        mean = metrics.get("weight/mean", math.nan)
        if not mean < LOW_MEAN or step < self._silent_until:
            return None
        self._silent_until = step + STEPS_A_WARNING
        return (
            f"step {step}: the importance weights are {mean:.3g} on average (weight/mean), not about 1: the policy has "
            "left the answers that it is trained on; lower optimizer.lr or staleness.max_staleness, and where "
            "mismatch/mean is high, too, see why learner and servers disagree"
        )
