"""The batcher: groups into batches, expiry, waiting, and what it says about both."""

from __future__ import annotations

import numpy as np
import pytest

from tests.messages import assert_names
from tests.orchestrator.ledgers import NoStore, now
from vcpo_megatron.orchestrator.modes.batcher import Batcher
from vcpo_megatron.orchestrator.modes.staleness import StalenessBound
from vcpo_megatron.orchestrator.store.ledger import Cursor, GroupLedger
from vcpo_megatron.orchestrator.store.resume import ResumePlan
from vcpo_megatron.types import Batch, Group, PolicyVersion, StepResult, Trajectory, Turn, VersionSpan


def trajectory(group_id: int, sample: int, *versions: int) -> Trajectory:
    """One prompt token, then one token a version."""
    length = 1 + len(versions)
    spans = tuple(VersionSpan(i + 1, i + 2, PolicyVersion(1, version)) for i, version in enumerate(versions))
    return Trajectory(
        group_id=group_id,
        sample_index=sample,
        prompt_id=f"p{group_id}",
        prompt_length=1,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        behavior_logprobs=np.full(length, -1.0, np.float32),
        turns=(Turn(1, length, "stop", spans),),
        reward=1.0,
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Made:
    """A batcher on a ledger whose writes are durable at once."""

    def __init__(self, ledger: GroupLedger, bound: StalenessBound, size: int, wait_s: float) -> None:
        self.ledger, self.size = ledger, size
        self.batcher = Batcher(ledger, bound, wait_s=wait_s)
        self.poll, self.may_admit, self.describe = self.batcher.poll, self.batcher.may_admit, self.batcher.describe

    def admit(self, group_id: int, loaded: int) -> None:
        self.ledger.admit(group_id, f"p{group_id}", group_id, self.size, PolicyVersion(1, loaded))

    def add(self, trajectory: Trajectory) -> bool:
        return now(self.ledger.finish(trajectory)) is not None

    def complete(self, group_id: int, *versions: int) -> None:
        for sample in range(self.size):
            assert self.add(trajectory(group_id, sample, *versions))

    def train(self) -> None:
        batch = self.ledger.in_training
        assert batch is not None
        now(self.ledger.train(batch, StepResult(batch.step, PolicyVersion(1, batch.step + 1), "", {}, ())))

    def step(self) -> list[int]:
        poll = self.poll()
        assert poll.batch is not None and poll.expired == ()
        self.train()
        return [group.group_id for group in poll.batch.groups]


def make(
    k: int, groups: int, size: int = 2, wait_s: float = 10.0, version: int = 0, updates: int = 1
) -> tuple[Made, Clock]:
    """``groups`` of a step."""
    clock = Clock()
    ledger = GroupLedger(NoStore(), Cursor(), version=version, clock=clock)
    return Made(ledger, StalenessBound(k, groups, updates_per_batch=updates), size, wait_s), clock


def ages(batch: Batch) -> list[int]:
    return [batch.step - group.oldest_version for group in batch.groups]


def test_a_batch_is_whole_groups_with_members_in_order() -> None:
    batcher, _ = make(0, 2)
    for group_id in (0, 1):
        batcher.admit(group_id, 0)
    for group_id, sample in ((1, 1), (0, 1), (1, 0)):
        batcher.add(trajectory(group_id, sample, 0))
    poll = batcher.poll()
    assert poll.batch is None and poll.waits_for == (0,)
    assert batcher.ledger.live[0].missing == (0,)
    batcher.add(trajectory(0, 0, 0))
    batch = batcher.poll().batch
    assert batch is not None and batch.step == 0
    assert [[t.uid for t in group.trajectories] for group in batch.groups] == [["0/0", "0/1"], ["1/0", "1/1"]]
    assert ages(batch) == [0, 0]
    with pytest.raises(RuntimeError, match="being taken"):
        batcher.poll()
    batcher.train()
    assert batcher.ledger.version == 1


def test_on_policy_admission_opens_with_the_loaded_version_only() -> None:
    batcher, _ = make(0, 2)
    for group_id in (0, 1):
        assert batcher.may_admit(0)
        batcher.admit(group_id, 0)
        batcher.complete(group_id, 0)
    assert not batcher.may_admit(0)
    assert batcher.poll().batch is not None
    assert not batcher.may_admit(0)  # the batch in training still counts
    batcher.train()
    assert not batcher.may_admit(0)  # and so does the step, for a server that has not got the new weights
    assert batcher.may_admit(1)
    assert batcher.batcher.active_groups == 2


def test_dropped_groups_give_their_place_back() -> None:
    batcher, _ = make(0, 2)
    for group_id in (0, 1):
        batcher.admit(group_id, 0)
    assert not batcher.may_admit(0)
    batcher.ledger.drop(0, "by choice")
    assert batcher.may_admit(0)
    assert not batcher.add(trajectory(0, 0, 0))  # late: it has been counted
    assert tuple(batcher.ledger.live) == (1,)


def test_what_is_queued_too_long_is_dropped_at_use() -> None:
    """Fake versions: sampled at 0, k = 1; at version 2 it is gone, complete or not, and its place is free."""
    batcher, _ = make(1, 1)
    for group_id in range(4):
        batcher.admit(group_id, 0)
        if group_id != 3:
            batcher.complete(group_id, 0)
    assert batcher.step() == [0] and batcher.step() == [1]
    poll = batcher.poll()
    assert poll.batch is None and set(poll.expired) == {2, 3}
    assert batcher.batcher.active_groups == 2
    assert not batcher.add(trajectory(3, 0, 0))


def test_the_oldest_segment_counts() -> None:
    """A resumed generation of versions 0, 1, 2 is as old as 0."""
    batcher, _ = make(1, 1, size=1, version=2)
    batcher.admit(0, 0)
    batcher.add(trajectory(0, 0, 0, 1, 2))
    assert batcher.poll().expired == (0,)
    batcher.admit(1, 0)  # admitted at 0, but no token of it is older than 1
    batcher.add(trajectory(1, 0, 1, 2))
    batch = batcher.poll().batch
    assert batch is not None and ages(batch) == [1]


def test_an_unfinished_group_is_as_old_as_its_oldest_member() -> None:
    """Admitted at 3, but a server that was restarted with version 2 has sampled for it."""
    batcher, _ = make(1, 1, version=4)
    batcher.admit(0, 3)
    assert batcher.poll().expired == ()
    batcher.add(trajectory(0, 0, 2))
    assert batcher.poll().expired == (0,)


def test_waits_for_what_is_due_then_drops_it() -> None:
    batcher, clock = make(1, 1, version=3)
    batcher.admit(7, 2)  # due now
    batcher.admit(8, 3)
    batcher.complete(8, 3)
    clock.now = 5.0
    poll = batcher.poll()
    assert (poll.batch, poll.waits_for, poll.retry_s) == (None, (7,), 10.0)
    clock.now = 12.0
    assert batcher.poll().retry_s == 3.0
    assert_names(batcher.describe(), "step 3", "groups 7 (version 2, samples [0, 1] missing)")
    clock.now = 15.0
    poll = batcher.poll()
    assert poll.expired == (7,) and poll.batch is not None
    assert [group.group_id for group in poll.batch.groups] == [8]


def test_the_wait_ends_with_the_group() -> None:
    batcher, clock = make(1, 1, version=3)
    batcher.admit(7, 2)
    batcher.admit(8, 3)
    batcher.complete(8, 3)
    assert batcher.poll().batch is None
    clock.now = 9.0
    batcher.complete(7, 2)
    assert batcher.step() == [7] and batcher.step() == [8]
    batcher.admit(9, 4)
    clock.now = 15.0  # the wait of step 3, begun at 0, is no wait of step 5
    poll = batcher.poll()
    assert poll.waits_for == (9,) and poll.expired == () and poll.retry_s == 10.0


def test_a_group_admitted_during_the_wait_gets_its_full_time() -> None:
    """Else, with k = 0, what replaces a dropped group would be dropped at once, for ever."""
    batcher, clock = make(0, 1)
    batcher.admit(0, 0)
    batcher.poll()
    clock.now = 10.0
    assert batcher.poll().expired == (0,)
    batcher.admit(1, 0)
    assert batcher.poll().expired == ()
    clock.now = 19.0
    poll = batcher.poll()
    assert poll.expired == () and poll.retry_s == 1.0
    clock.now = 20.0
    assert batcher.poll().expired == (1,)


def test_it_looks_again_when_the_next_of_several_waits_ends() -> None:
    batcher, clock = make(1, 1, version=3)
    batcher.admit(0, 3)
    assert batcher.poll().waits_for == (0,)
    clock.now = 5.0
    batcher.admit(1, 3)
    batcher.admit(2, 4)
    batcher.complete(2, 4)
    clock.now = 10.5  # the wait for 0 ended half a second ago
    poll = batcher.poll()
    assert (poll.batch, poll.waits_for, poll.retry_s) == (None, (0, 1), 4.5)


def test_after_the_wait_it_goes_on_without_what_is_due_later() -> None:
    batcher, clock = make(1, 1, version=3)
    for group_id, loaded in ((0, 3), (1, 3), (2, 4)):
        batcher.admit(group_id, loaded)
    batcher.complete(2, 4)
    poll = batcher.poll()
    assert poll.batch is None and poll.waits_for == (0, 1)  # due by step 4, which has room for one
    clock.now = 10.0
    assert batcher.step() == [2]
    assert tuple(batcher.ledger.live) == (0, 1)


def test_what_is_not_due_is_not_dropped_for_want_of_groups() -> None:
    batcher, clock = make(2, 2)
    batcher.admit(0, 0)
    batcher.poll()
    clock.now = 100.0
    poll = batcher.poll()
    assert poll.expired == () and poll.waits_for == (0,) and poll.retry_s is None
    assert poll.why == "0 of 2 groups are complete"


def test_a_batch_of_two_updates_is_chosen_whole_and_handed_out_in_order() -> None:
    """G = 2 groups a step, k = 1: a batch is four groups of one version; the second step trains at a lag of 1."""
    batcher, _ = make(1, 2, updates=2)
    for group_id in range(4):
        assert batcher.may_admit(0)
        batcher.admit(group_id, 0)
    assert not batcher.may_admit(0)
    for group_id in (3, 1, 2):
        batcher.complete(group_id, 0)
    poll = batcher.poll()
    assert poll.batch is None and poll.waits_for == (0,)  # two are complete, and would do for the first step
    batcher.complete(0, 0)
    assert batcher.step() == [0, 1]
    assert not batcher.may_admit(0)  # no server has newer weights in the midst of a batch
    assert_names(batcher.describe(), "step 1")
    batch = batcher.poll().batch
    assert batch is not None and [group.group_id for group in batch.groups] == [2, 3] and ages(batch) == [1, 1]
    batcher.train()
    assert batcher.may_admit(2) and batcher.poll().batch is None


def test_a_group_of_the_batch_that_ends_between_its_updates_is_replaced() -> None:
    batcher, _ = make(3, 1, updates=2)
    for group_id in range(3):
        batcher.admit(group_id, 0)
        batcher.complete(group_id, 0)
    assert batcher.step() == [0]
    batcher.ledger.drop(1, "by choice")
    assert batcher.step() == [2]


def test_a_group_that_hangs_holds_up_a_batch_no_longer_than_allowed() -> None:
    """It is due with the last update; the first one waits for it, too."""
    batcher, clock = make(1, 1, updates=2)
    for group_id in (0, 1):
        batcher.admit(group_id, 0)
    batcher.complete(1, 0)
    assert batcher.poll().retry_s == 10.0
    clock.now = 10.0
    assert batcher.poll().expired == (0,)
    batcher.admit(2, 0)
    batcher.complete(2, 0)
    assert batcher.step() == [1] and batcher.step() == [2]


def test_restored_from_a_plan() -> None:
    group = Group(4, "p4", (trajectory(4, 0, 5), trajectory(4, 1, 6)))
    plan = ResumePlan(6, (group,), {4: 4}, (2, 3), 9, 7)
    batcher = Made(GroupLedger.resumed(NoStore(), plan, requeue=[0, 4]), StalenessBound(1, 1), 2, 10.0)
    assert (batcher.ledger.version, batcher.batcher.active_groups) == (6, 7)
    assert batcher.may_admit(6) and not batcher.may_admit(5)
    batch = batcher.poll().batch
    assert batch is not None and batch.step == 6 and batch.groups == (group,)
    assert [batcher.ledger.cursor.take() for _ in range(4)] == [(9, 0), (10, 2), (11, 3), (12, 7)]


def test_says_who_waits_for_whom() -> None:
    batcher, _ = make(1, 1)
    assert_names(batcher.describe(), "step 0", "admissions", "0 of 1 groups")
    batcher.admit(0, 0)
    batcher.add(trajectory(0, 1, 0))
    assert_names(batcher.describe(), "step 0", "groups 0 (version 0, samples [0] missing)", "0 of 1 groups")
    batcher.add(trajectory(0, 0, 0))
    assert "nobody has asked" in batcher.describe()
    batcher.poll()
    assert "being taken by the learner" in batcher.describe()
