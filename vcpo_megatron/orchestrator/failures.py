"""Failed trajectories: which prompts are set aside, and when there are too many of them to go on.

A failure is never a reward of 0: the trajectory is counted as failed and is not trained on.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping

from .tasks import RunError


def one_line(error: BaseException) -> str:
    """An exception as the one line that counts it."""
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:300]


def kind_of(message: str) -> str:
    """``message`` without what differs from one failure of a kind to the next: its prompt and its numbers."""
    return re.sub(r"\bprompt \S+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", message)


#: When so many groups, the first of an attempt, have all failed with one message, the rest would as well.
FIRST_GROUPS = 20


class FailureWindow:
    """Ends the run when more than ``max_ratio`` of the last ``size`` outcomes are failures, or a fifth of ``size`` in a
    row (more where ``max_ratio`` is above a half).

    An outcome is a complete group or a failed trajectory. Failures may be quick and successes slow: ``size`` is several
    times the number of groups in flight. So many need not be waited for where nothing works (a policy that has
    diverged, a judge that is down): when the first groups in order of admission have all failed, with one kind of
    message. Their order matters: in a run that is well, quick failures come before slow successes, but of other groups.
    """

    def __init__(self, size: int, max_ratio: float) -> None:
        self._outcomes: deque[str | None] = deque(maxlen=size)
        self._max_ratio = max_ratio
        # so many without one success: a chance of one in a million where failures are as frequent as allowed
        self._hopeless = max(20, size // 5, math.ceil(math.log(1e-6) / math.log(max_ratio)))
        self._in_a_row = 0
        self._first: dict[int, str] = {}  # kind of failure of the attempt's first groups, "" while they are not failed

    def admitted(self, group_id: int) -> None:
        if len(self._first) < FIRST_GROUPS:
            self._first[group_id] = ""

    def success(self) -> None:
        self._outcomes.append(None)
        self._in_a_row = 0

    def failure(self, error: BaseException, ended_group: int | None = None) -> None:
        """RunError with the commonest kind of the failures when there are too many. ``ended_group``: its group, unless
        that goes on with another sample."""
        self._outcomes.append(one_line(error))
        self._in_a_row += 1
        if ended_group in self._first:
            self._first[ended_group] = kind_of(one_line(error))
        kinds = set(self._first.values())
        if len(self._first) == FIRST_GROUPS and len(kinds) == 1 and "" not in kinds:
            raise RunError(f"the first {FIRST_GROUPS} groups of this attempt have all failed: {one_line(error)}")
        failures = [outcome for outcome in self._outcomes if outcome is not None]
        total, window = len(failures), len(self._outcomes)
        full = window == self._outcomes.maxlen
        hopeless = self._in_a_row >= self._hopeless
        if (full and total > self._max_ratio * window) or hopeless:
            messages = {kind_of(message): message for message in failures}  # the latest of each kind
            kind, count = Counter(map(kind_of, failures)).most_common(1)[0]
            last = f", the last {self._in_a_row} in a row" if hopeless and total < window else ""
            raise RunError(
                f"{total} of the last {window} outcomes are failures{last} (rollout.max_failure_ratio = "
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
            print(f"prompt {prompt_id} is set aside after {self._limit} failures, the last: {one_line(error)}",
                  flush=True)  # fmt: skip
        return not self.is_set_aside(prompt_id)

    def is_set_aside(self, prompt_id: str) -> bool:
        return self._counts[prompt_id] >= self._limit

    @property
    def set_aside(self) -> list[str]:
        """Names of the prompts that were set aside."""
        return sorted(prompt_id for prompt_id, count in self._counts.items() if count >= self._limit)
