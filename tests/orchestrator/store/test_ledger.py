"""The ledger: one state a group, durable before it counts, and what an end does at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.orchestrator.ledgers import AtOnce, NoStore, now
from tests.orchestrator.store.test_store import check_invariant, sample_group, trajectory
from tests.transport.samples import same
from vcpo_megatron.orchestrator.store.ledger import Cursor, GroupLedger
from vcpo_megatron.orchestrator.store.reader import Counts
from vcpo_megatron.orchestrator.store.resume import ResumePlan
from vcpo_megatron.orchestrator.store.schema import StoreError
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.types import Group, PolicyVersion, StepResult

pytestmark = pytest.mark.timeout(60)
V0 = PolicyVersion(1, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "rollouts.sqlite") as opened:
        yield opened


def ledger_of(store: RolloutStore, groups: int = 0) -> GroupLedger:
    ledger = GroupLedger(AtOnce(store), Cursor())
    for _ in range(groups):
        group_id, position = ledger.cursor.take()
        ledger.admit(group_id, f"p{position}", position, 2, V0)
    return ledger


def finish(ledger: GroupLedger, *groups: int) -> None:
    for group in groups:
        for sample in ledger.live[group].missing:
            assert now(ledger.finish(trajectory(group, sample, V0))) is not None


def result(step: int, skipped: str = "") -> StepResult:
    return StepResult(step, PolicyVersion(1, step + 1), skipped, {}, ())


def test_every_transition_is_in_the_store(store: RolloutStore) -> None:
    ledger = ledger_of(store, 6)
    finish(ledger, 0, 1, 3)
    assert ledger.live[0].complete and ledger.queued_groups == 6
    batch = ledger.begin([1, 0])
    assert [group.group_id for group in batch.groups] == [1, 0] and ledger.in_training is batch
    assert list(ledger.live) == [2, 3, 4, 5] and ledger.queued_groups == 6
    now(ledger.train(batch, result(0)))
    assert ledger.version == 1 and ledger.queued_groups == 4
    assert now(ledger.replace(2, 0, "no judge")) == 2 and ledger.live[2].missing == (1, 2)
    now(ledger.fail(2, 1, "no judge", requeue=True))
    ledger.drop(3, "zero variance")
    ledger.expire(4)
    assert list(ledger.live) == [5] and ledger.cursor.requeue == [2, 4]
    assert store.reasons() == {
        "dropped: a member failed": 1,
        "dropped: expired": 2,
        "dropped: zero variance": 2,
        "failed: no judge": 2,
    }
    assert store.counts() == Counts(generated=13, queued=2, trained=4, dropped=5, failed=2)
    check_invariant(store)


def test_a_group_counts_when_the_learners_logprobs_are_durable(store: RolloutStore) -> None:
    ledger = GroupLedger(AtOnce(store), Cursor(), recorded=True)
    for group_id in range(2):
        ledger.admit(group_id, f"p{group_id}", group_id, 2, V0)
    now(ledger.finish(trajectory(1, 0, V0)))
    finish(ledger, 0)
    assert ledger.live[0].whole and not ledger.live[0].complete and not ledger.live[1].whole
    (group,) = ledger.unscored()
    scored = group.with_recorded(V0, np.zeros(10, np.float32))
    ledger.expire(1)
    now(ledger.record([scored, Group(1, "p1", (trajectory(1, 0, V0),))]))  # the latter ended meanwhile
    assert ledger.live[0].complete and not ledger.unscored() and list(ledger.live) == [0]
    assert same(ledger.begin([0]).groups, (scored,)) and same(store.complete_groups(), [scored])


def test_failures_in_a_row_are_counted_in_the_order_of_admission(store: RolloutStore) -> None:
    ledger = ledger_of(store, 5)
    now(ledger.fail(1, 0, "no judge", requeue=False))
    assert ledger.failed_in_a_row == 0  # group 0 may still succeed
    now(ledger.fail(0, 0, "no judge", requeue=False))
    assert ledger.failed_in_a_row == 2
    ledger.expire(2)  # says nothing
    now(ledger.fail(3, 0, "no judge", requeue=False))
    assert ledger.failed_in_a_row == 3
    finish(ledger, 4)
    assert ledger.failed_in_a_row == 0


def test_a_skipped_step_counts(store: RolloutStore) -> None:
    ledger = ledger_of(store, 1)
    finish(ledger, 0)
    now(ledger.train(ledger.begin([0]), result(0, "non-finite step")))
    assert ledger.version == 1 and store.reasons() == {"dropped: non-finite step": 2}


def test_what_comes_late_changes_nothing_and_what_contradicts_is_refused(store: RolloutStore) -> None:
    ledger = ledger_of(store, 2)
    ledger.expire(0)
    assert now(ledger.finish(trajectory(0, 0, V0))) is None
    now(ledger.finish(trajectory(1, 0, V0)))
    for sample in (0, 2):
        with pytest.raises(StoreError, match=f"1/{sample} came twice, or was never admitted"):
            now(ledger.finish(trajectory(1, sample, V0)))
    assert ledger.live[1].missing == (1,)
    with pytest.raises(StoreError, match="group 1 at data position 9 contradicts"):
        ledger.admit(1, "p1", 9, 2, V0)


class Slow:
    """Writes that are durable when a test says so."""

    def __init__(self) -> None:
        self.pending: list[asyncio.Future[Any]] = []

    def submit(self, operation: Callable[[RolloutStore], Any]) -> asyncio.Future[Any]:
        self.pending.append(asyncio.get_running_loop().create_future())
        return self.pending[-1]


def test_a_trajectory_counts_when_it_is_durable_and_an_end_at_once() -> None:
    async def main() -> None:
        disk = Slow()
        ledger = GroupLedger(disk, Cursor())
        for group in range(2):
            ledger.admit(group, "p", group, 1, V0)
        finishing = [asyncio.create_task(ledger.finish(trajectory(group, 0, V0))) for group in range(2)]
        await asyncio.sleep(0)
        assert len(disk.pending) == 4 and not ledger.live[0].members
        ledger.expire(1)
        assert list(ledger.live) == [0]
        for write in disk.pending:
            write.set_result(True)
        kept, late = await asyncio.gather(*finishing)
        assert kept is ledger.live[0] and kept.complete and late is None
        training = asyncio.create_task(ledger.train(ledger.begin([0]), result(0)))
        await asyncio.sleep(0)
        assert ledger.version == 0 and ledger.in_training is not None
        disk.pending[-1].set_result(None)
        await training
        assert ledger.version == 1 and ledger.in_training is None

    asyncio.run(main())


def test_the_prompt_of_an_expired_group_is_the_next_one_the_oldest_first() -> None:
    async def main() -> None:
        plan = ResumePlan(
            step=0,
            buffer=tuple(Group(group, "p", (trajectory(group, 0, V0),)) for group in (5, 6)),
            cursors={5: 17, 6: 12},
            requeue=(),
            next_group_id=9,
            next_cursor=40,
        )
        ledger = GroupLedger.resumed(Slow(), plan, requeue=[30])
        for group_id in (5, 6):
            ledger.expire(group_id)
        # the store has not answered
        assert ledger.cursor.ahead(4) == [12, 17, 30, 40] and ledger.cursor.ahead(2) == [12, 17]
        assert [ledger.cursor.take() for _ in range(4)] == [(9, 12), (10, 17), (11, 30), (12, 40)]

    asyncio.run(main())


def test_an_end_cancels_what_works_on_the_group_but_not_itself() -> None:
    async def main() -> None:
        ledger = GroupLedger(NoStore(), Cursor())
        group, _ = ledger.admit(0, "p", 0, 2, V0)

        async def fails() -> str:
            await ledger.fail(0, 0, "no", requeue=False)
            return "ended"

        other = asyncio.ensure_future(asyncio.sleep(60))
        own = asyncio.ensure_future(fails())
        group.tasks |= {other, own}  # type: ignore[arg-type]
        assert await own == "ended"
        with pytest.raises(asyncio.CancelledError):
            await other

    asyncio.run(asyncio.wait_for(main(), 10))


def test_complete_groups_are_added_whole_and_found_by_their_position(store: RolloutStore) -> None:
    ledger = ledger_of(store, 1)
    groups = {p: Group(p, f"p{p}", tuple(trajectory(p, s, V0) for s in range(2))) for p in (4, 5)}
    now(ledger.admit_whole(groups))
    assert ledger.groups_at([0, 4, 5, 6]) == groups  # position 0 is not complete
    assert [group.group_id for group in store.complete_groups()] == [4, 5]


def test_a_resumed_ledger_holds_what_the_store_holds(store: RolloutStore) -> None:
    sample_group(store, 0)
    store.admit(1, "p1", 1, 3, V0)
    store.add_trajectory(trajectory(1, 1, V0))
    plan = store.resume(0, keep_partial=True)
    ledger = GroupLedger.resumed(AtOnce(store), plan, requeue=[1, 7])
    assert ledger.live[0].complete and ledger.live[1].missing == (0, 2)
    assert (ledger.version, ledger.cursor.next_group_id, ledger.cursor.next_index) == (0, 2, 2)
    assert ledger.cursor.requeue == [7]  # position 1 goes on
    finish(ledger, 1)
    assert [group.group_id for group in store.complete_groups()] == [0, 1]
    store.admit(2, "p2", 2, 3, V0)
    again = GroupLedger.resumed(AtOnce(store), store.resume(0, keep_partial=False), requeue=[2, 7])
    assert again.cursor.requeue == [2, 7]  # 2 is undone and waited as well: once
