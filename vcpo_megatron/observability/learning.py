"""A warning when nothing is learned although everything runs: rewards that are equal in every group teach nothing."""

from __future__ import annotations

from ..types import Batch
from ..types.rewards import has_variance

#: So many steps in a row without a group of different rewards are said; then twice as many, and so on.
FIRST_SAID = 10


class LearningWatch:
    """Looks at the rewards of every step's batch."""

    def __init__(self) -> None:
        self._steps = self._in_a_row = 0
        self._said_at = FIRST_SAID
        self._ever = False
        self._lowest, self._highest = float("inf"), -float("inf")

    def observe(self, batch: Batch) -> str | None:
        """The line for the user, or None when there is nothing (new) to say."""
        self._steps += 1
        groups = [[member.reward for member in group.trajectories] for group in batch.groups]
        if any(map(has_variance, groups)):
            self._ever, self._in_a_row, self._said_at = True, 0, FIRST_SAID
            self._lowest, self._highest = float("inf"), -float("inf")
            return None
        self._in_a_row += 1
        self._lowest = min(self._lowest, *(min(rewards) for rewards in groups))
        self._highest = max(self._highest, *(max(rewards) for rewards in groups))
        if self._in_a_row < self._said_at:
            return None
        self._said_at = 2 * self._in_a_row
        return (
            f"steps {batch.step + 1 - self._in_a_row}-{batch.step}: in every group all rewards are equal"
            f"{self._which()}, so nothing is learned; are the prompts too hard, or too easy? "
            f"`vcpo report RUN_DIR --step {batch.step} --text` shows what was answered"
        )

    def summary(self) -> str | None:
        """The line at the end of a run in which no step had anything to learn from; None otherwise."""
        if self._ever or not self._steps:
            return None
        return (
            f"nothing was learned: in none of the {self._steps} steps had a group different rewards{self._which()}; "
            "`vcpo report RUN_DIR --trajectories --text` shows what was answered"
        )

    def _which(self) -> str:
        return f" (every one is {self._lowest:g})" if not has_variance([self._lowest, self._highest]) else ""
