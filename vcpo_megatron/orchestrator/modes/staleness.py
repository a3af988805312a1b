"""The staleness bound: how many policy versions may lie between sampling and training.

Units. Everything is counted in groups; versions are numbers (optimizer steps since the start).
``k`` is ``max_staleness``, ``G`` the groups of a step, ``v`` the learner's version (it is about to
take step v, which makes version v + 1), ``s`` the version that sampled a group's oldest token.

A group sampled at s may be trained at step s + k at the latest: that step is its *deadline*. The bound
is kept in three places:

admission   A group is admitted on a server that has version s loaded only if the step it will be
            trained at, when groups are trained in order of admission, is not past s + k:
            ``active // G <= s + k``, which is ``active < (s + k + 1) G``.
dequeue     A batch is the G oldest complete groups. It is taken only if the rest can still meet their
            deadlines: at most (j + 1) G groups may be left over that are due by step v + 1 + j, for
            every j, and none that is due now (j = -1). Otherwise the learner waits for the older
            ones. Without this rule fast groups overtake slow ones until the slow ones expire, which
            wastes them and biases training to short answers.
use         A group past its deadline is never trained (``expired``).

A batch may be split into ``U`` = ``updates_per_batch`` steps. Then G is a U-th of it, servers get new weights when v is
a multiple of U, and a dequeue is for the steps v to e that are left of the batch, e = v - v mod U + U - 1: it takes the
(e - v + 1) G oldest complete groups, the oldest for the first step, and at most (j + 1) G of those left over may be due
by step e + 1 + j. The j-th step of a batch is at least j versions from what any server had loaded, so k is at least
U - 1: with less, a batch could never be admitted whole.

``active`` counts the groups of all steps taken, whether a step was skipped or not, plus the groups
that are admitted and have not ended. Dropped and failed groups give their place back. Since the
steps taken are the version, nothing has to be restored after a resume.

Adaptive staleness (``Pacer``) is beyond the paper. The bound k of the configuration stays the promise: it decides when
a group expires and which batches may be taken. Below it, ``Pacer.lag`` decides how far ahead groups are *admitted*.
When the ESS ratio falls below ``target`` times that of on-policy batches, the lag is halved: generation waits until the
learner has caught up, and nothing that was started is thrown away. When the ratio has recovered, the lag grows by one.

On-policy batches do not have a ratio of 1: learner and servers compute a little differently, and long answers add it
up. No lag mends that, so it is no reason for a smaller one. The learner follows what an on-policy batch of the same
lengths would have (``ess/ratio_on_policy``), from tokens that its own version sampled: those of a run's first batch are
such, and all are once the lag has been 0 for a while.

A change shows only when the groups that were admitted under it are trained, up to lag + 1 steps later: so many steps
pass between two changes. With lag = 0 a run is on-policy and so is what it is compared with: it always comes back.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Weight of the newest step in the average of ESS ratios.
_NEWEST = 0.5
#: The lag grows only when the average is this far above the target, lest it go up and down around it; half of the way
#: from the target to 1 where that is less, since the average of an on-policy run moves around 1.
_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live group as the bound sees it.

    ``version``: number of the oldest version that sampled a token of it; for a group that is not
    complete, the oldest among its segments and the version it was admitted at.
    """

    group_id: int
    version: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What to train on now, or what to wait for; both oldest first.

    ``take`` holds the group ids of a batch, or is empty. Then ``waits_for`` names the unfinished groups
    that hold the batch back (empty: there are too few groups; more must be admitted) and ``why`` says it
    in words.
    """

    take: tuple[int, ...]
    waits_for: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class StalenessBound:
    """The bound for ``max_staleness`` = k versions and ``groups_per_step`` = G groups of each optimizer step, of which
    ``updates_per_batch`` = U make a batch.

    What was sampled before version ``on_policy_steps`` is trained without any lag: with
    ``algorithm.base_ess_ratio = "auto"`` the first steps measure the on-policy ratio.
    """

    max_staleness: int
    groups_per_step: int
    on_policy_steps: int = 0
    updates_per_batch: int = 1

    def __post_init__(self) -> None:
        least_staleness = self.updates_per_batch - 1
        for name, least in (
            ("updates_per_batch", 1),
            ("max_staleness", least_staleness),
            ("groups_per_step", 1),
            ("on_policy_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {least}")

    def deadline(self, version: int) -> int:
        """Last step that may train on what ``version`` sampled."""
        return version if version < self.on_policy_steps else version + self.max_staleness

    def may_admit(self, active_groups: int, loaded_version: int) -> bool:
        """Whether one more group may start on a server that has ``loaded_version`` loaded.

        active_groups: groups of all steps taken (version * G) plus admitted groups that have not ended.
        """
        return active_groups // self.groups_per_step <= self.deadline(loaded_version)

    def end_of_batch(self, version: int) -> int:
        """Last step of the batch that step ``version`` belongs to."""
        return version - version % self.updates_per_batch + self.updates_per_batch - 1

    def expired(self, oldest_version: int, version: int) -> bool:
        """Whether a group whose oldest token ``oldest_version`` sampled is too old for step ``version``."""
        return version > self.deadline(oldest_version)

    def choose(self, groups: Sequence[Candidate], version: int) -> Decision:
        """The batch from step ``version`` on out of all live ``groups`` that are not expired, or what to wait for: the
        groups of every step that is left of it, one step after another.

        Waiting is asked for only where it can help: when too many complete groups are due, which the rule
        of admission excludes but a changed configuration may cause, the oldest are taken.
        """
        end = self.end_of_batch(version)
        size = (end - version + 1) * self.groups_per_step
        oldest_first = sorted(groups, key=lambda group: (self.deadline(group.version), group.version, group.group_id))
        batch = [group for group in oldest_first if group.complete][:size]
        unfinished = [group for group in oldest_first if not group.complete]
        if len(batch) < size:
            why = f"{len(batch)} of {size} groups are complete"
            return Decision((), tuple(group.group_id for group in unfinished), why)
        taken = {group.group_id for group in batch}
        left = [group for group in oldest_first if group.group_id not in taken]
        deadlines = [self.deadline(group.version) for group in left]
        # A later batch can only be better for a deadline if this one holds a group with a later one.
        last = min(version + 1 + self.max_staleness, self.deadline(batch[-1].version) - 1)
        for due in sorted({max(end, deadline) for deadline in deadlines}):  # between two of them only room grows
            room = (due - end) * self.groups_per_step
            late = left[: bisect_right(deadlines, due)]
            if due <= last and len(late) > room:
                why = f"{len(late)} unfinished groups are due by step {due}, which has room for {room}"
                return Decision((), tuple(group.group_id for group in late), why)
        return Decision(tuple(group.group_id for group in batch))


class Pacer:
    """Adaptive staleness. ``lag``: versions of lag that may be admitted now, ``least`` (what the updates of a batch
    need) to ``max_lag``. ``target``: the share of the on-policy ESS ratio to keep, in (0, 1)."""

    def __init__(self, max_lag: int, target: float, least: int = 0) -> None:
        if max_lag < least or not 0 < target < 1:
            raise ValueError(f"max_lag = {max_lag} must be at least {least}, target = {target} between 0 and 1")
        self._max_lag, self._least = max_lag, least
        self._target = target
        self.lag = max_lag
        self._on_policy = 1.0  # what the last one that is known was; 1 is assumed until one is
        self._average: float | None = None  # of ratios relative to it
        self._until_change = 0

    def observe(self, ess_ratio: float, *, on_policy: float | None) -> None:
        """The ESS ratio of the step that was just taken; a ratio that is not finite counts as 0. ``on_policy``: what it
        would be without lag, above 0; None where the learner does not know."""
        ratio = ess_ratio if math.isfinite(ess_ratio) else 0.0
        self._on_policy = self._on_policy if on_policy is None else on_policy
        self._average = _averaged(self._average, min(1.0, ratio / self._on_policy))
        self._until_change -= 1
        if self._until_change > 0:
            return
        if self._average < self._target:
            self._change(max(self.lag // 2, self._least))
        elif self._average >= min(_MARGIN * self._target, (1 + self._target) / 2):
            self._change(min(self.lag + 1, self._max_lag))

    def _change(self, lag: int) -> None:
        if lag != self.lag:
            self._until_change = max(lag, self.lag) + 1
            self.lag = lag

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "lag": self.lag,
            "on_policy": self._on_policy,
            "average": self._average,
            "until_change": self._until_change,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; a lag above ``max_lag``, which may have been lowered since, is cut to it."""
        self.lag = min(int(state["lag"]), self._max_lag)
        self._on_policy, self._average = state["on_policy"] or 1.0, state["average"]
        self._until_change = int(state["until_change"])


def _averaged(average: float | None, newest: float) -> float:
    return newest if average is None else (1 - _NEWEST) * average + _NEWEST * newest
