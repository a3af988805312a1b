"""Adaptive staleness: how many versions of lag are admitted now, by the effective sample size of the last steps.

Beyond the paper. The bound k of the configuration stays the promise: it decides when a group expires and which
batches may be taken. Below it, ``Pacer.lag`` decides how far ahead groups are *admitted*. When the ESS ratio falls
below ``target``, the lag is halved: generation waits until the learner has caught up, and nothing that was started is
thrown away. When the ratio has recovered, the lag grows by one.

A change shows only when the groups that were admitted under it are trained, up to lag + 1 steps later: so many steps
pass between two changes. With lag = 0 a run is on-policy and its ratio is 1, so it always comes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Weight of the newest step in the average of ratios.
_NEWEST = 0.5
#: The lag grows only when the average is this far above the target, lest it go up and down around it.
_MARGIN = 1.1


class Pacer:
    """``lag``: versions of lag that may be admitted now, 0 to ``max_lag``. ``target``: ESS ratio to keep, in (0, 1)."""

    def __init__(self, max_lag: int, target: float) -> None:
        if max_lag < 0 or not 0 < target < 1:
            raise ValueError(f"max_lag = {max_lag} must be at least 0, target = {target} between 0 and 1")
        self._max_lag = max_lag
        self._target = target
        self.lag = max_lag
        self._average: float | None = None
        self._until_change = 0

    def observe(self, ess_ratio: float) -> None:
        """The ESS ratio of the step that was just taken; a ratio that is not finite counts as 0."""
        ratio = ess_ratio if math.isfinite(ess_ratio) else 0.0
        self._average = ratio if self._average is None else (1 - _NEWEST) * self._average + _NEWEST * ratio
        self._until_change -= 1
        if self._until_change > 0:
            return
        if self._average < self._target:
            self._change(self.lag // 2)
        elif self._average >= min(1.0, _MARGIN * self._target):
            self._change(min(self.lag + 1, self._max_lag))

    def _change(self, lag: int) -> None:
        if lag != self.lag:
            self._until_change = max(lag, self.lag) + 1
            self.lag = lag

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"lag": self.lag, "average": self._average, "until_change": self._until_change}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; a lag above ``max_lag``, which may have been lowered since, is cut to it."""
        self.lag = min(int(state["lag"]), self._max_lag)
        self._average, self._until_change = state["average"], int(state["until_change"])
