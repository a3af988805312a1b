"""The buffer between finished trajectories and batches; the staleness bound's one gate.

Consumes: finished trajectories (``add``), ends of groups (``remove``), steps taken (``step_done``).
Produces: batches of whole groups, oldest first (``poll``).
Waits for: what ``poll`` names. Unblocked by: a trajectory, a removed group, a new admission, or time
(``Poll.retry_s``).

It holds in memory what the store holds on disk, and does no waiting and no input or output itself: the
loop that owns it records in the store what it is told, and asks again when something has changed.
Groups of one reward are batched like all others: they count in N and in the ESS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...types import Batch, Group, Trajectory
from ..store.store import ResumePlan
from .pacing import Pacer
from .staleness import Candidate, StalenessBound

_NAMED = 4  # groups that a watchdog's line names


@dataclass(frozen=True)
class Poll:
    """Answer of ``Batcher.poll``.

    ``batch``      what to train on now, or None
    ``waits_for``  without a batch: the unfinished groups that hold it back, oldest first (empty: too few
                   groups are admitted)
    ``why``        without a batch: the same in words
    ``expired``    groups that were just removed because they are too old; the caller records each as
                   drop(group, "expired") and cancels its episodes
    ``retry_s``    without a batch: ask again after this many seconds even if nothing has happened, for then
                   a wait ends; None when nothing is timed
    """

    batch: Batch | None
    waits_for: tuple[int, ...] = ()
    why: str = ""
    expired: tuple[int, ...] = ()
    retry_s: float | None = None


@dataclass
class _Live:
    """A group that is admitted and has not ended. ``since``: when it was admitted, on the batcher's clock;
    ``expected``: the sample indices that it consists of."""

    prompt_id: str
    version: int
    since: float
    expected: set[int]
    members: dict[int, Trajectory] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.members.keys() == self.expected

    def candidate(self, group_id: int) -> Candidate:
        versions = [trajectory.oldest_version for trajectory in self.members.values()]
        complete = self.complete
        # What is not in yet may hold a token as old as the version at admission.
        return Candidate(group_id, min(versions) if complete else min([self.version, *versions]), complete)

    def group(self, group_id: int) -> Group:
        return Group(group_id, self.prompt_id, tuple(self.members[sample] for sample in sorted(self.members)))


class Batcher:
    """Live groups of a run whose learner is at ``version``.

    wait_s: how long the learner stands still for a group that is due before the group is dropped.
    pacer: lowers the bound of admission while the data is too far off-policy.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        bound: StalenessBound,
        group_size: int,
        *,
        wait_s: float,
        version: int = 0,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bound = bound
        self._group_size = group_size
        self._wait_s = wait_s
        self._pacer = pacer
        self._version = version
        self._clock = clock
        self._live: dict[int, _Live] = {}
        self._in_training: Batch | None = None
        self._idle_since: float | None = None  # the learner has waited for step ``version`` since then

    @property
    def version(self) -> int:
        """Number of the learner's policy: the step that comes next, or is being taken."""
        return self._version

    @property
    def active_groups(self) -> int:
        """Groups of all steps taken, plus live ones (those in training included): what admission counts."""
        in_training = len(self._in_training.groups) if self._in_training else 0
        return self._version * self._bound.groups_per_step + in_training + len(self._live)

    def restore(self, plan: ResumePlan) -> None:
        """Go on from a checkpoint: take over its step and its buffer. Only before anything was admitted."""
        if self._live or self._in_training:
            raise RuntimeError("a batcher can be restored only before anything is admitted")
        self._version = plan.step
        for group in plan.buffer:
            self.admit(group.group_id, group.prompt_id, group.oldest_version)
            self._live[group.group_id].expected = {member.sample_index for member in group.trajectories}
            for trajectory in group.trajectories:
                self.add(trajectory)
        for partial in plan.partial:
            self.admit(partial.group_id, partial.prompt_id, partial.version)
            stored = [trajectory.sample_index for trajectory in partial.trajectories]
            self._live[partial.group_id].expected = {*stored, *partial.missing}
            for trajectory in partial.trajectories:
                self.add(trajectory)

    # --- groups come and go -------------------------------------------------------------------

    def may_admit(self, loaded_version: int) -> bool:
        """Whether one more group may start on a server that has ``loaded_version`` loaded."""
        bound = self._bound if self._pacer is None else replace(self._bound, max_staleness=self._pacer.lag)
        return bound.may_admit(self.active_groups, loaded_version)

    def admit(self, group_id: int, prompt_id: str, loaded_version: int) -> None:
        """A group starts on a server that has ``loaded_version`` loaded. Ask ``may_admit`` first."""
        if group_id in self._live:
            raise ValueError(f"group {group_id} is admitted already")
        self._live[group_id] = _Live(prompt_id, loaded_version, self._clock(), set(range(self._group_size)))

    def add(self, trajectory: Trajectory) -> bool:
        """A trajectory is finished. False, and nothing changes: its group has ended before."""
        live = self._live.get(trajectory.group_id)
        if live is None:
            return False
        if trajectory.sample_index in live.members or trajectory.sample_index not in live.expected:
            raise ValueError(f"trajectory {trajectory.uid} came twice, or its group waits for {sorted(live.expected)}")
        live.members[trajectory.sample_index] = trajectory
        return True

    def replace(self, group_id: int, sample_index: int) -> int | None:
        """A member failed: the sample index of the one that is expected in its place. None: its group has ended."""
        live = self._live.get(group_id)
        if live is None:
            return None
        replacement = max(live.expected) + 1
        live.expected = live.expected - {sample_index} | {replacement}
        return replacement

    def complete_group(self, group_id: int) -> Group | None:
        """A live group whose members are all in; None for any other."""
        live = self._live.get(group_id)
        return live.group(group_id) if live is not None and live.complete else None

    def remove(self, group_id: int) -> bool:
        """A group was dropped or has failed: its place is free. False: it had ended before."""
        return self._live.pop(group_id, None) is not None

    # --- batches ------------------------------------------------------------------------------

    def poll(self) -> Poll:
        """The batch of step ``version``, or what it waits for. RuntimeError while a batch is in training.

        Removes what is too old: groups past their deadline, complete or not; and, after the learner has waited
        ``wait_s`` for them, unfinished groups whose last possible step this is. When it has waited so long for
        groups that are due later, it goes on without them.
        """
        if self._in_training is not None:
            raise RuntimeError(f"step {self._version} is being taken; step_done comes first")
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        candidates = self._candidates()
        expired = [c.group_id for c in candidates if self._bound.expired(c.version, self._version)]
        expired += [c.group_id for c in candidates if c.group_id not in expired and self._overdue(c, now)]
        for group_id in expired:
            del self._live[group_id]
        candidates = self._candidates()
        decision = self._bound.choose(candidates, self._version)
        if decision.waits_for and all(self._left(group_id, now) <= 0 for group_id in decision.waits_for):
            decision = self._bound.choose([c for c in candidates if c.complete], self._version)
            decision = decision if decision.take else self._bound.choose(candidates, self._version)
        if decision.take:
            groups = tuple(self._live.pop(group_id).group(group_id) for group_id in decision.take)
            self._in_training = Batch(self._version, groups)
            self._idle_since = None
            return Poll(self._in_training, expired=tuple(expired))
        return Poll(None, decision.waits_for, decision.why, tuple(expired), self._retry_s(decision.waits_for, now))

    def staleness(self, batch: Batch) -> list[int]:
        """Versions between the oldest token of each group and its use."""
        return [batch.step - group.oldest_version for group in batch.groups]

    def step_done(self) -> None:
        """The batch in training was consumed (or its step skipped): the learner is one version further."""
        if self._in_training is None:
            raise RuntimeError("no batch is in training")
        self._in_training = None
        self._version += 1

    # --- what it holds ------------------------------------------------------------------------

    def live_groups(self) -> tuple[int, ...]:
        """Admitted groups that have not ended and are not in training, in order of admission."""
        return tuple(self._live)

    def missing(self, group_id: int) -> tuple[int, ...]:
        """Sample indices of a live group that are not in yet."""
        live = self._live[group_id]
        return tuple(sorted(live.expected - live.members.keys()))

    def describe(self) -> str:
        """One line for the watchdog: who waits for whom. Changes nothing."""
        if self._in_training is not None:
            return f"step {self._version} is being taken by the learner; {len(self._live)} groups are live"
        decision = self._bound.choose(self._candidates(), self._version)
        if decision.take:
            return f"the batch of step {self._version} is complete; nobody has asked for it"
        named = ", ".join(
            f"{group_id} (version {self._live[group_id].version}, samples {list(self.missing(group_id))} missing)"
            for group_id in decision.waits_for[:_NAMED]
        )
        more = len(decision.waits_for) - _NAMED
        groups = f"groups {named}{f' and {more} more' if more > 0 else ''}" if named else "admissions"
        return f"step {self._version} waits for {groups}: {decision.why}"

    # --- internals ----------------------------------------------------------------------------

    def _candidates(self) -> list[Candidate]:
        return [live.candidate(group_id) for group_id, live in self._live.items()]

    def _left(self, group_id: int, now: float) -> float:
        """Seconds the learner will still stand still for a group; a group admitted later gets its full time."""
        assert self._idle_since is not None
        return max(self._idle_since, self._live[group_id].since) + self._wait_s - now

    def _overdue(self, candidate: Candidate, now: float) -> bool:
        due = self._bound.deadline(candidate.version) <= self._version
        return not candidate.complete and due and self._left(candidate.group_id, now) <= 0

    def _retry_s(self, waits_for: tuple[int, ...], now: float) -> float | None:
        left = [self._left(group_id, now) for group_id in waits_for]
        return min((seconds for seconds in left if seconds > 0), default=None)
