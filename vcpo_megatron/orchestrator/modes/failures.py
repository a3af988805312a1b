"""Failed trajectories: which prompts are set aside, and when there are too many of them to go on.

A failure is never a reward of 0: the trajectory is counted as failed and is not trained on.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping

from ...rollout.agent_loop import EpisodeError
from ...run.tasks import RunError
from ...run.text import kind_of, one_line
from ..store.schema import WORKER_ENDED


def failure_reason(error: BaseException) -> str:
    """One line; that of a trajectory that was lost with its environment worker, by another one's fault, says so."""
    innocent = isinstance(error, EpisodeError) and error.blame == "none"
    return (WORKER_ENDED if innocent else "") + one_line(error)


class FailureWindow:
    """Ends the run by one of two rules, with the commonest kind of the failures.

    - In the long run: more than ``max_ratio`` of the last ``size`` outcomes are failures. An outcome is a complete
      group or a failed trajectory. ``size`` is several times the number of groups in flight, for failures may be
      quicker.
    - Where nothing works (a policy that has diverged, a judge that is down), early or late: so many groups in a row
      have failed (``GroupLedger.failed_in_a_row``) that the chance of it is one in a million where failures are as
      frequent as allowed: 20 for a ratio of a half.
    """

    def __init__(self, size: int, max_ratio: float) -> None:
        self._outcomes: deque[str | None] = deque(maxlen=size)
        self._max_ratio = max_ratio
        self._most_in_a_row = max(20, math.ceil(math.log(1e-6) / math.log(max_ratio)))

    def success(self) -> None:
        """A group is complete."""
        self._outcomes.append(None)

    def failure(self, error: BaseException, failed_in_a_row: int) -> None:
        """A trajectory failed; ``failed_in_a_row``: groups. RunError when there are too many."""
        self._outcomes.append(one_line(error))
        failures = [outcome for outcome in self._outcomes if outcome is not None]
        total, window = len(failures), len(self._outcomes)
        full = window == self._outcomes.maxlen
        too_many_in_a_row = failed_in_a_row >= self._most_in_a_row
        if (full and total > self._max_ratio * window) or too_many_in_a_row:
            messages = {kind_of(message): message for message in failures}  # the latest of each kind
            kind, count = Counter(map(kind_of, failures)).most_common(1)[0]
            groups = f"{failed_in_a_row} groups in a row, in order of admission, have failed, and "
            raise RunError(
                f"{groups if too_many_in_a_row else ''}{total} of the last {window} outcomes are failures "
                f"(rollout.max_failure_ratio = {self._max_ratio:g}), {count} of them: {messages[kind]}"
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
