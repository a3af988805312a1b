"""What is trained next: batches of whole groups from the ledger, by the staleness bound.

Consumes: the ledger's live groups.
Produces: batches of whole groups, oldest first (``poll``), and the end of groups that are too old.
Waits for: what ``poll`` names. Unblocked by: a trajectory, an ended group, a new admission, or time
(``Poll.retry_s``).

It does no waiting itself: the loop that owns it asks again when something has changed.
A batch that is split into several updates is chosen as a whole, and handed out step by step; what is left of it stays
live in the ledger meanwhile, so a run that ends between two of its steps has lost nothing.
Groups of one reward are batched like all others: they count in N and in the ESS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...types import Batch
from ..store.ledger import GroupLedger, LiveGroup
from .staleness import Candidate, Decision, Pacer, StalenessBound

_NAMED = 4  # groups that a watchdog's line names


@dataclass(frozen=True)
class Poll:
    """Answer of ``Batcher.poll``.

    ``batch``      what to train on now, or None
    ``waits_for``  without a batch: the unfinished groups that hold it back, oldest first (empty: too few
                   groups are admitted)
    ``why``        without a batch: the same in words
    ``expired``    groups that were just ended because they are too old
    ``ends``       done when that is durable, one a group
    ``retry_s``    without a batch: ask again after this many seconds even if nothing has happened, for then
                   a wait ends; None when nothing is timed
    """

    batch: Batch | None
    waits_for: tuple[int, ...] = ()
    why: str = ""
    expired: tuple[int, ...] = ()
    ends: tuple[asyncio.Future[bool], ...] = ()
    retry_s: float | None = None


class Batcher:
    """Batches for the learner of ``ledger``, one a step.

    wait_s: how long the learner stands still for a group that is due before the group is dropped.
    pacer: lowers the bound of admission while the data is too far off-policy.
    """

    def __init__(
        self,
        ledger: GroupLedger,
        bound: StalenessBound,
        *,
        wait_s: float,
        pacer: Pacer | None = None,
    ) -> None:
        self._ledger = ledger
        self._bound = bound
        self._wait_s = wait_s
        self._pacer = pacer
        self._idle_since: float | None = None  # the learner has waited for its next step since then
        self._chosen: tuple[int, ...] = ()  # groups of the steps that are left of the batch

    @property
    def active_groups(self) -> int:
        """Groups of all steps taken, plus those that are queued or in training: what admission counts."""
        return self._ledger.version * self._bound.groups_per_step + self._ledger.queued_groups

    def may_admit(self, loaded_version: int) -> bool:
        """Whether one more group may start on a server that has ``loaded_version`` loaded."""
        bound = self._bound if self._pacer is None else replace(self._bound, max_staleness=self._pacer.lag)
        return bound.may_admit(self.active_groups, loaded_version)

    def poll(self) -> Poll:
        """The batch of the ledger's next step, or what it waits for. RuntimeError while a batch is in training.

        Ends what is too old: groups past their deadline, complete or not; and, after the learner has waited
        ``wait_s`` for them, unfinished groups whose last possible batch this is. When it has waited so long for
        groups that are due later, it goes on without them.
        """
        ledger, version = self._ledger, self._ledger.version
        if ledger.in_training is not None:
            raise RuntimeError(f"step {version} is being taken; its end comes first")
        now = ledger.clock()
        if self._idle_since is None:
            self._idle_since = now
        candidates = self._candidates()
        expired = [c.group_id for c in candidates if self._bound.expired(c.version, version)]
        expired += [c.group_id for c in candidates if c.group_id not in expired and self._overdue(c, now)]
        ends = tuple(ledger.expire(group_id) for group_id in expired)
        candidates = self._candidates()
        decision = self._decision(candidates)
        if decision.waits_for and all(self._left(group_id, now) <= 0 for group_id in decision.waits_for):
            decision = self._bound.choose([c for c in candidates if c.complete], version)
            decision = decision if decision.take else self._bound.choose(candidates, version)
        if decision.take:
            self._idle_since = None
            size = self._bound.groups_per_step
            self._chosen = decision.take[size:]
            return Poll(ledger.begin(decision.take[:size]), expired=tuple(expired), ends=ends)
        retry_s = self._retry_s(decision.waits_for, now)
        return Poll(None, decision.waits_for, decision.why, tuple(expired), ends, retry_s)

    def describe(self) -> str:
        """One line for the watchdog: who waits for whom. Changes nothing."""
        version, live = self._ledger.version, self._ledger.live
        if self._ledger.in_training is not None:
            return f"step {version} is being taken by the learner; {len(live)} groups are live"
        decision = self._decision(self._candidates())
        if decision.take:
            return f"the batch of step {version} is complete; nobody has asked for it"
        named = ", ".join(
            f"{group_id} (version {live[group_id].version}, "
            + ("not scored)" if live[group_id].whole else f"samples {list(live[group_id].missing)} missing)")
            for group_id in decision.waits_for[:_NAMED]
        )
        more = len(decision.waits_for) - _NAMED
        groups = f"groups {named}{f' and {more} more' if more > 0 else ''}" if named else "admissions"
        return f"step {version} waits for {groups}: {decision.why}"

    def _decision(self, candidates: Sequence[Candidate]) -> Decision:
        """What was chosen for the steps that are left of the batch, unless one of it has ended since; else anew."""
        if self._chosen and self._ledger.live.keys() >= set(self._chosen):
            return Decision(self._chosen)
        return self._bound.choose(candidates, self._ledger.version)

    def _candidates(self) -> list[Candidate]:
        return [_candidate(group) for group in self._ledger.live.values()]

    def _left(self, group_id: int, now: float) -> float:
        """Seconds the learner will still stand still for a group; a group admitted later gets its full time."""
        assert self._idle_since is not None
        return max(self._idle_since, self._ledger.live[group_id].since) + self._wait_s - now

    def _overdue(self, candidate: Candidate, now: float) -> bool:
        due = self._bound.deadline(candidate.version) <= self._bound.end_of_batch(self._ledger.version)
        return not candidate.complete and due and self._left(candidate.group_id, now) <= 0

    def _retry_s(self, waits_for: tuple[int, ...], now: float) -> float | None:
        left = [self._left(group_id, now) for group_id in waits_for]
        return min((seconds for seconds in left if seconds > 0), default=None)


def _candidate(group: LiveGroup) -> Candidate:
    return Candidate(group.group_id, group.oldest_version, group.complete)
