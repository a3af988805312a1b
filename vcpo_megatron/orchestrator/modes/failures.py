"""Failed trajectories: which prompts are set aside, and when there are too many of them to go on.

A failure is never a reward of 0: the trajectory is counted as failed and is not trained on.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping

from ...run.tasks import RunError
from ...run.text import kind_of, one_line


class Streak:
    """How many groups in a row have failed, in the order of their admission.

    Failures may be quick and successes slow: in a run that is well, the failures of many groups may come before the
    first success, but not those of the groups that were admitted one after the other. So a group counts when all that
    were admitted before it have ended; one that was dropped for another reason counts for nothing.
    """

    def __init__(self) -> None:
        self.length = 0
        self._open: dict[int, bool | None] = {}  # whether it failed; None: it has not ended; in order of admission

    def admitted(self, group_id: int) -> None:
        self._open[group_id] = None

    def ended(self, group_id: int, *, failed: bool) -> None:
        if group_id in self._open:
            self._open[group_id] = failed
            self._count()

    def dropped(self, group_id: int) -> None:
        self._open.pop(group_id, None)
        self._count()

    def _count(self) -> None:
        while self._open and (failed := next(iter(self._open.values()))) is not None:
            self.length = self.length + 1 if failed else 0
            del self._open[next(iter(self._open))]


class FailureWindow:
    """Ends the run by one of two rules, with the commonest kind of the failures.

    - In the long run: more than ``max_ratio`` of the last ``size`` outcomes are failures. An outcome is a complete
      group or a failed trajectory. ``size`` is several times the number of groups in flight, for failures may be
      quicker.
    - Where nothing works (a policy that has diverged, a judge that is down), early or late: so many groups in a row
      have failed (``Streak``) that the chance of it is one in a million where failures are as frequent as allowed: 20
      for a ratio of a half.
    """

    def __init__(self, size: int, max_ratio: float) -> None:
        self._outcomes: deque[str | None] = deque(maxlen=size)
        self._max_ratio = max_ratio
        self._streak = Streak()
        self._hopeless = max(20, math.ceil(math.log(1e-6) / math.log(max_ratio)))

    def admitted(self, group_id: int) -> None:
        self._streak.admitted(group_id)

    def success(self, group_id: int) -> None:
        """The group is complete."""
        self._outcomes.append(None)
        self._streak.ended(group_id, failed=False)

    def dropped(self, group_id: int) -> None:
        """The group has ended for another reason than a failure."""
        self._streak.dropped(group_id)

    def failure(self, error: BaseException, ended_group: int | None = None) -> None:
        """RunError when there are too many. ``ended_group``: the failed one's group, unless that goes on with another
        sample."""
        self._outcomes.append(one_line(error))
        if ended_group is not None:
            self._streak.ended(ended_group, failed=True)
        failures = [outcome for outcome in self._outcomes if outcome is not None]
        total, window = len(failures), len(self._outcomes)
        full = window == self._outcomes.maxlen
        hopeless = self._streak.length >= self._hopeless
        if (full and total > self._max_ratio * window) or hopeless:
            messages = {kind_of(message): message for message in failures}  # the latest of each kind
            kind, count = Counter(map(kind_of, failures)).most_common(1)[0]
            row = f"{self._streak.length} groups in a row, in order of admission, have failed, and " if hopeless else ""
            raise RunError(
                f"{row}{total} of the last {window} outcomes are failures (rollout.max_failure_ratio = "
                f"{self._max_ratio:g}), {count} of them: {messages[kind]}"
            )


class PromptFailures:
    """Counts failures by prompt. A prompt with ``limit`` failures is set aside: it is not sampled any more.

    ``before``: failures of earlier attempts of the run.
    """

    def __init__(self, limit: int, before: Mapping[str, int]) -> None:
        self._limit = limit
        self._counts = Counter(before)

    def failure(self, prompt_id: str, error: BaseException) -> bool:
        """Count one; whether the prompt is to be tried again."""
        self._counts[prompt_id] += 1
        if self._counts[prompt_id] == self._limit:
            print(
                f"prompt {prompt_id} is set aside after {self._limit} failures, the last: {one_line(error)}", flush=True
            )
        return not self.is_set_aside(prompt_id)

    def is_set_aside(self, prompt_id: str) -> bool:
        return self._counts[prompt_id] >= self._limit

    @property
    def set_aside(self) -> list[str]:
        """Names of the prompts that were set aside."""
        return sorted(prompt_id for prompt_id, count in self._counts.items() if count >= self._limit)
