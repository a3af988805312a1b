"""The rollout store: states and counters, resume over random crashes, damage, locks, read-only access."""

from __future__ import annotations

import math
import os
import random
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.orchestrator.ledgers import AtOnce, now
from tests.transport.samples import same
from vcpo_megatron.orchestrator.modes.batcher import Batcher
from vcpo_megatron.orchestrator.modes.staleness import StalenessBound
from vcpo_megatron.orchestrator.store.ledger import GroupLedger
from vcpo_megatron.orchestrator.store.reader import Counts
from vcpo_megatron.orchestrator.store.schema import StoreError, _copy_consistently
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.types import Group, PolicyVersion, StepResult, Trajectory, TrajectoryResult, Turn, VersionSpan

V0 = PolicyVersion(1, 0)


def trajectory(group_id: int, sample: int, *versions: PolicyVersion, prompt_id: str = "") -> Trajectory:
    """Three prompt tokens, then two tokens a version, with values that differ everywhere."""
    length = 3 + 2 * len(versions)
    spans = tuple(VersionSpan(3 + 2 * i, 5 + 2 * i, version) for i, version in enumerate(versions))
    return Trajectory(
        group_id=group_id,
        sample_index=sample,
        prompt_id=prompt_id or f"p{group_id}",
        prompt_length=3,
        tokens=np.arange(length, dtype=np.int32) + 100_000 * group_id + 100 * sample,
        loss_mask=np.arange(length) >= 3,
        behavior_logprobs=-np.arange(length, dtype=np.float32) / 7,
        turns=(Turn(3, length, "length", spans),),
        reward=0.25 * sample,
        info={"tries": 2.0},
    )


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for name in ("tokens", "loss_mask", "behavior_logprobs"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert np.array_equal(getattr(a, name), getattr(b, name))
    assert (a.uid, a.prompt_id, a.prompt_length, a.turns, a.reward, dict(a.info)) == (
        b.uid,
        b.prompt_id,
        b.prompt_length,
        b.turns,
        b.reward,
        dict(b.info),
    )


def sample_group(store: RolloutStore, group_id: int, version: PolicyVersion = V0, size: int = 2) -> None:
    store.admit(group_id, f"p{group_id}", group_id, size, version)
    for sample in range(size):
        assert store.add_trajectory(trajectory(group_id, sample, version))


def check_invariant(store: RolloutStore) -> None:
    """Counters in memory equal those of the file, and add up."""
    counts = store.counts()
    assert counts.generated == counts.queued + counts.trained + counts.dropped + counts.failed
    rows = store._connection.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state").fetchall()
    by_state = Counter({row[0]: row[1] for row in rows})
    assert counts == Counts(
        sum(by_state.values()),
        by_state["admitted"] + by_state["sampled"],
        by_state["trained"],
        by_state["dropped"],
        by_state["failed"],
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.sqlite"


# --- life of a group ---------------------------------------------------------------------------


def test_life_of_groups(path: Path) -> None:
    with RolloutStore(path) as store:
        run = store.state()["run"]
        assert store.state() == {"next_group_id": 0, "next_cursor": 0, "position": 0, "run": run}
        for group_id in (0, 1, 2, 3):
            store.admit(group_id, f"p{group_id}", group_id, 2, V0)
        assert store.counts() == Counts(generated=8, queued=8)
        for group_id, sample in ((1, 1), (0, 0), (1, 0), (0, 1), (2, 0)):
            assert store.add_trajectory(trajectory(group_id, sample, V0))
        assert [group.group_id for group in store.complete_groups()] == [0, 1]
        assert [t.uid for t in store.complete_groups()[1].trajectories] == ["1/0", "1/1"]

        results = [TrajectoryResult(1, 0, -2.5, 0.5, 3.0, 0.1), TrajectoryResult(0, 1, math.inf, 8.0, math.nan, 0.2)]
        store.mark_trained(0, results, [1, 0], [0, 0])
        assert store.fail(2, 1, "tool crashed")
        assert store.drop(3, "expired")
        assert store.counts() == Counts(generated=8, queued=0, trained=4, dropped=3, failed=1)
        assert store.reasons() == {"dropped: a member failed": 1, "dropped: expired": 2, "failed: tool crashed": 1}
        assert [group.group_id for group in store.groups_trained_at(0)] == [1, 0]  # in training order
        assert store.trained_steps() == [0] and store.groups_trained_at(1) == []
        found = list(store.history(step=0))
        assert [(row["group_id"], row["sample_index"]) for row in found] == [(1, 0), (1, 1), (0, 0), (0, 1)]
        assert [found[0][name] for name in ("log_ratio", "weight", "grad_norm", "baseline")] == [-2.5, 0.5, 3.0, 0.1]
        assert found[3]["log_ratio"] == math.inf and found[3]["grad_norm"] is None  # SQLite has no nan
        assert store.state() == {"next_group_id": 4, "next_cursor": 4, "position": 1, "run": run}
        check_invariant(store)


def test_what_comes_late_changes_nothing(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        store.admit(1, "p1", 1, 2, V0)
        store.drop(0, "expired")
        store.fail(1, 0, "timeout")
        before = store.counts()
        assert not store.add_trajectory(trajectory(1, 1, V0))
        assert not store.drop(1, "expired") and not store.drop(0, "again")
        assert not store.fail(1, 1, "timeout") and not store.fail(0, 1, "timeout")
        assert store.counts() == before == Counts(generated=4, dropped=3, failed=1)
        check_invariant(store)


def test_a_skipped_step_drops_its_groups_and_counts(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        store.mark_trained(0, [], [0], [0], skipped="non-finite step")
        assert store.counts() == Counts(generated=2, dropped=2)
        assert store.reasons() == {"dropped: non-finite step": 2}
        assert store.steps_done() == 1 and store.trained_steps() == [0]
        assert [group.group_id for group in store.groups_trained_at(0)] == [0]  # a replay meets it too
        sample_group(store, 1, PolicyVersion(1, 1))
        store.mark_trained(1, [], [1], [0])
        assert store.counts() == Counts(generated=4, dropped=2, trained=2)


def test_end_of_a_run(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        sample_group(store, 1)
        store.admit(2, "p2", 2, 2, V0)
        store.mark_trained(0, [], [0], [0])
        store.end_run()
        assert store.counts() == Counts(generated=6, trained=2, dropped=4)
        assert store.reasons() == {"dropped: run ended": 4}


def test_everything_comes_back_bit_for_bit(path: Path) -> None:
    versions = (PolicyVersion(2, 17), PolicyVersion(2, 18), PolicyVersion(3, 19))
    original = trajectory(0, 0, *versions)
    original.behavior_logprobs[4] = np.float32(-1e-42)
    with RolloutStore(path) as store:
        store.admit(0, "p0", 0, 1, versions[0])
        store.add_trajectory(original)
    with RolloutStore(path) as store:
        (group,) = store.complete_groups()
        assert_same(group.trajectories[0], original)
        assert (group.oldest_version, group.newest_version) == (17, 19)
        assert group.trajectories[0].tokens.flags.writeable  # torch.from_numpy warns about arrays that are not


def rewarded(reward: float) -> Trajectory:
    return replace(trajectory(0, 1, V0), reward=reward)


def test_contradictions_are_refused(path: Path) -> None:
    with RolloutStore(path) as store:
        store.admit(0, "p0", 0, 2, V0)
        cases = [
            (lambda: store.admit(0, "p9", 9, 2, V0), "of group 0 at data position 9 contradicts .*: groups.group_id"),
            (lambda: store.admit(1, "p0", 0, 2, V0), "group 1 at data position 0 contradicts .*: groups.cursor_index"),
            (lambda: store.admit(1, "p1", 1, 0, V0), "group 1 at .* contradicts .*a group has at least one trajectory"),
            (lambda: store.drop(5, "x"), "group 5 was never admitted"),
            (lambda: store.fail(0, 2, "x"), "group 0 has no sample 2"),
            (lambda: store.add_trajectory(trajectory(0, 0, V0, prompt_id="other")), "of prompt 'other', not 'p0'"),
            (lambda: store.add_trajectory(trajectory(0, 0)), "trajectory 0/0 contradicts .*has a sampled token"),
            (lambda: store.add_trajectory(trajectory(0, 2, V0)), "0/2 came twice, or was never admitted"),
            (lambda: store.add_trajectory(rewarded(math.nan)), "trajectory 0/1 contradicts .*has a reward"),
            (lambda: store.add_trajectory(rewarded(-math.inf)), "trajectory 0/1 contradicts .*a reward is finite"),
            (lambda: store.mark_trained(0, [], [0], [0]), "group 0, which is admitted, not complete"),
            (lambda: store.mark_trained(1, [], [], []), "expects step 0"),
            (lambda: store.mark_trained(0, [TrajectoryResult(0, 0, 0, 1, 1, 0)], [], []), "0/0, not in its batch"),
        ]
        for action, message in cases:
            before = store.counts()
            with pytest.raises(StoreError, match=message):
                action()
            assert store.counts() == before
        store.add_trajectory(trajectory(0, 0, V0))
        with pytest.raises(StoreError, match="0/0 came twice"):
            store.add_trajectory(trajectory(0, 0, V0))
        store.add_trajectory(trajectory(0, 1, V0))
        with pytest.raises(StoreError, match="on group 0, which is trained, not complete"):
            store.mark_trained(0, [], [0, 0], [0, 0])
        check_invariant(store)


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        with pytest.raises(StoreError, match="never admitted"), store.transaction():
            sample_group(store, 1)
            store.drop(7, "x")
        assert store.counts() == Counts(generated=2, queued=2)
        with store.transaction():
            sample_group(store, 1)
            store.drop(0, "x")
        assert store.counts() == Counts(generated=4, queued=2, dropped=2)
        check_invariant(store)


# --- resume ------------------------------------------------------------------------------------


def test_resume_undoes_what_came_after_the_checkpoint(path: Path) -> None:
    """G = 1; checkpoint after step 1 (step_1), crash after step 2."""
    v1, v2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
    with RolloutStore(path) as store:
        for group_id in (0, 1, 2, 3):
            sample_group(store, group_id)
        store.admit(4, "p4", 4, 2, V0)
        store.drop(4, "expired")  # before the checkpoint: settled
        store.mark_trained(0, [], [0], [0])
        state = store.state()
        store.mark_trained(1, [TrajectoryResult(1, 0, 0.0, 1.0, 1.0, 0.0)], [1], [1])  # sampled by 0: trained again
        sample_group(store, 5, v1)  # version 1 is the checkpoint's: kept
        sample_group(store, 6, v2)  # version 2 is not: superseded
        store.admit(7, "p7", 7, 2, v1)  # unfinished: superseded
        store.add_trajectory(trajectory(7, 0, v1))
        store.admit(8, "p8", 8, 2, v1)
        store.fail(8, 0, "timeout")  # after the checkpoint: its prompt gets another chance, its count stays
        store.drop(3, "expired")  # after the checkpoint, complete and old enough: back
    with RolloutStore(path) as store:
        plan = store.resume(1, state)
        assert [group.group_id for group in plan.buffer] == [1, 2, 3, 5]
        assert plan.cursors == {1: 1, 2: 2, 3: 3, 5: 5}
        assert plan.requeue == (6, 7, 8)
        assert (plan.step, plan.next_group_id, plan.next_cursor) == (1, 9, 9)
        assert store.counts() == Counts(generated=18, queued=8, trained=2, dropped=7, failed=1)
        assert store.reasons() == {
            "dropped: a member failed": 1,
            "dropped: expired": 2,
            "dropped: superseded": 4,
            "failed: timeout": 1,
        }
        assert store.trained_steps() == [0]
        check_invariant(store)
        # The requeued ones are new groups of the same positions.
        store.admit(9, "p6", 6, 2, PolicyVersion(2, 1))
        # A crash before 7 and 8 are admitted again does not lose them.
        again = store.resume(1, state)
        assert again.requeue == (6, 7, 8) and again.next_group_id == 10
        assert [group.group_id for group in again.buffer] == [1, 2, 3, 5]


def test_a_failed_group_does_not_come_back_even_when_all_its_samples_are_there(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        store.fail(0, 1, "found out later")
        plan = store.resume(0)
        assert plan.buffer == () and plan.requeue == (0,)
        assert store.counts() == Counts(generated=2, dropped=1, failed=1)


def test_a_position_that_was_dropped_may_be_admitted_again(path: Path) -> None:
    """Then its newer group alone stands for it: unfinished at the crash, the position is requeued."""
    v1 = PolicyVersion(1, 1)
    with RolloutStore(path) as store:
        sample_group(store, 0)
        sample_group(store, 1)
        store.drop(0, "expired")
        store.mark_trained(0, [], [1], [0])
        store.admit(2, "p0", 0, 2, v1)
        with pytest.raises(StoreError, match="group 3 at data position 0 contradicts"):
            store.admit(3, "p0", 0, 2, v1)
        with pytest.raises(StoreError, match="group 3 at data position 1 contradicts"):
            store.admit(3, "p1", 1, 2, v1)
        assert store.resume(1).requeue == (0,)


def test_resume_after_an_end_takes_up_what_was_complete(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        sample_group(store, 1)
        store.admit(2, "p2", 2, 2, V0)
        store.mark_trained(0, [], [0], [0])
        store.end_run()
    with RolloutStore(path) as store:
        plan = store.resume(1)
        assert [group.group_id for group in plan.buffer] == [1] and plan.requeue == (2,)
        assert store.counts() == Counts(generated=6, queued=2, trained=2, dropped=2)


def test_resume_of_a_run_without_a_checkpoint(path: Path) -> None:
    with RolloutStore(path) as store:
        assert store.resume(0).requeue == ()
        sample_group(store, 0)
        store.mark_trained(0, [], [0], [0])
        plan = store.resume(0)
        assert [group.group_id for group in plan.buffer] == [0]
        assert store.steps_done() == 0 and store.trained_steps() == []


def test_each_file_has_an_id_of_its_own_for_good(path: Path) -> None:
    ids = []
    for file in (path, path, path.with_name("other.sqlite")):
        with RolloutStore(file) as store:
            ids.append(store.state()["run"])
    assert ids[0] == ids[1] != ids[2] and len(ids[0]) == 32


def test_a_store_older_than_the_checkpoint_is_refused(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        with pytest.raises(StoreError, match=r"the checkpoint of step 3 \(position is 0"):
            store.resume(3)
        with pytest.raises(StoreError, match=r"next_group_id is 1, not at least 5"):
            store.resume(0, {"position": 0, "next_group_id": 5, "next_cursor": 1})
        with pytest.raises(StoreError, match="holds the store's state of step 2"):
            store.resume(0, {"position": 2})


@dataclass
class _SimulatedRun:
    """Ledger, store and batcher driven by random events, with an account of its own of what each position came to."""

    folder: Path
    rng: random.Random
    bound: StalenessBound
    size: int = 2
    attempt: int = 1
    trained: dict[int, list[int]] = field(default_factory=dict)  # step -> positions
    settled: dict[int, int] = field(default_factory=dict)  # position that failed for good -> steps done then
    checkpoints: dict[int, tuple[dict[str, Any], list[int]]] = field(default_factory=lambda: {0: ({"position": 0}, [])})
    position: dict[int, int] = field(default_factory=dict)  # group -> position
    crashes: int = 0

    def start(self, path: Path, resume: int | None) -> None:
        self.path = path
        self.store = RolloutStore(path)
        self.store._connection.execute("PRAGMA synchronous = OFF")  # copied below, so only the order of writes counts
        state, waiting = self.checkpoints[resume or 0]
        plan = self.store.resume(resume or 0, state)
        self.ledger = GroupLedger.resumed(AtOnce(self.store), plan, requeue=waiting)
        self.cursor = self.ledger.cursor
        self.batcher = Batcher(self.ledger, self.bound, wait_s=1e9)
        if resume is None:
            return
        self.trained = {step: rows for step, rows in self.trained.items() if step < resume}
        self.settled = {position: done for position, done in self.settled.items() if done < resume}
        self.checkpoints = {step: state for step, state in self.checkpoints.items() if step <= resume}
        waiting = [self.position[group.group_id] for group in plan.buffer] + self.cursor.requeue
        known = [position for rows in self.trained.values() for position in rows] + list(self.settled) + waiting
        assert sorted(known) == list(range(self.cursor.next_index)), "a position is lost, or there twice"
        for group in plan.buffer:
            assert group.newest_version <= resume

    def admit(self) -> None:
        loaded = max(0, self.ledger.version - self.rng.randrange(2))
        if not self.batcher.may_admit(loaded):
            return
        group_id, position = self.cursor.take()
        self.ledger.admit(group_id, f"p{position}", position, self.size, PolicyVersion(self.attempt, loaded))
        self.position[group_id] = position

    def advance(self) -> None:
        open_groups = [group for group in self.ledger.live.values() if group.missing]
        if not open_groups:
            return
        group = self.rng.choice(open_groups)
        sample = self.rng.choice(group.missing)
        if self.rng.random() < 0.03:
            now(self.ledger.fail(group.group_id, sample, "tool crashed", requeue=False))
            self.settled[group.position] = self.ledger.version
            return
        newest = PolicyVersion(self.attempt, self.ledger.version)
        done = trajectory(group.group_id, sample, newest, prompt_id=f"p{group.position}")
        assert now(self.ledger.finish(done)) is group

    def train(self) -> None:
        poll = self.batcher.poll()
        if poll.batch is None:
            return
        skipped = "non-finite step" if self.rng.random() < 0.05 else ""
        version = PolicyVersion(self.attempt, poll.batch.step + 1)
        now(self.ledger.train(poll.batch, StepResult(poll.batch.step, version, skipped, {}, ())))
        self.trained[poll.batch.step] = [self.position[group.group_id] for group in poll.batch.groups]
        if self.rng.random() < 0.3:
            self.checkpoints[self.ledger.version] = self.store.state(), list(self.cursor.requeue)

    def crash(self) -> None:
        """The files as they are on disk, the process gone: nothing is closed or written any more."""
        self.crashes += 1
        copied = self.folder / f"crash{self.crashes}" / "rollouts.sqlite"
        copied.parent.mkdir()
        for file in self.path.parent.glob("rollouts.sqlite*"):
            subprocess.run(["cp", file, copied.parent], check=True, timeout=20)  # not by this process: it has locks
        self.attempt += 1
        before = self.store.counts()
        self.store._connection.close()
        steps = sorted(self.checkpoints)
        self.start(copied, steps[-1] if self.rng.random() < 0.7 else self.rng.choice(steps))
        assert self.store.counts().generated == before.generated

    def until(self, steps: int) -> None:
        for _ in range(20_000):
            if self.ledger.version >= steps:
                return
            self.rng.choice([self.admit, self.advance, self.advance, self.advance, self.train])()
            if self.rng.random() < 0.012:
                self.crash()
            if self.rng.random() < 0.05:
                check_invariant(self.store)
        raise AssertionError(f"stuck: {self.batcher.describe()}")


@pytest.mark.parametrize("seed", range(6))
def test_every_position_is_trained_once_over_random_crashes(tmp_path: Path, seed: int) -> None:
    (tmp_path / "run").mkdir()
    rng = random.Random(seed)
    run = _SimulatedRun(tmp_path, rng, StalenessBound(rng.choice([0, 1, 3]), rng.choice([1, 3])))
    run.start(tmp_path / "run" / "rollouts.sqlite", None)
    run.until(12)
    assert run.crashes > 0
    run.store.end_run()
    check_invariant(run.store)
    assert run.store.counts().queued == 0
    for step, positions in run.trained.items():
        assert [run.position[group.group_id] for group in run.store.groups_trained_at(step)] == positions
    assert run.store.trained_steps() == sorted(run.trained) == list(range(12))
    trained = [position for rows in run.trained.values() for position in rows]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(run.settled)
    there = run.cursor.next_index
    most = 3 * (run.bound.max_staleness + 1) * run.bound.groups_per_step + 3
    first_unfinished = min(set(range(there)) - set(trained) - set(run.settled), default=there)
    assert there - first_unfinished <= most  # none was left behind
    run.store.close()


def test_a_killed_process_has_kept_what_it_acknowledged(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from vcpo_megatron.orchestrator.store.store import RolloutStore\n"
        "from vcpo_megatron.types import PolicyVersion\n"
        "store = RolloutStore(Path(sys.argv[1]))\n"
        "for i in range(10**6):\n"
        "    store.admit(i, f'p{i}', i, 2, PolicyVersion(1, 0)); print(i, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        acknowledged = [int(child.stdout.readline()) for _ in range(20)]
    finally:
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate(timeout=20)
    acknowledged += [int(line) for line in rest.split("\n")[:-1]]
    with RolloutStore(path) as store:
        assert store.counts().generated in (2 * len(acknowledged), 2 * len(acknowledged) + 2)
        assert store.resume(0).requeue[: len(acknowledged)] == tuple(acknowledged)


# --- the file ----------------------------------------------------------------------------------


def _damage(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def flipped(blob: bytes, part: float) -> bytes:
    """``blob`` with one bit changed, ``part`` of the way through it."""
    at = int(len(blob) * part)
    return blob[:at] + bytes([blob[at] ^ 8]) + blob[at + 1 :]


@pytest.mark.parametrize(
    ("column", "change"),
    [
        *(("content", lambda blob, at=at: flipped(blob, at)) for at in (0.1, 0.3, 0.5, 0.7, 0.9)),
        ("content", lambda blob: blob[:-4]),
        ("prompt_length", lambda length: length - 1),
        ("length", lambda length: length - 1),
        ("checksum", lambda checksum: checksum ^ 1),
    ],
)
def test_a_changed_bit_is_found(path: Path, column: str, change: object) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
    connection = sqlite3.connect(path)
    (value,) = connection.execute(f"SELECT {column} FROM samples WHERE sample_index = 1").fetchone()
    connection.close()
    _damage(path, f"UPDATE samples SET {column} = ? WHERE sample_index = 1", change(value))  # type: ignore[operator]
    with RolloutStore(path) as store, pytest.raises(StoreError, match="trajectory 0/1 in .* is damaged") as caught:
        store.complete_groups()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_contents_that_changed_places_are_found(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
    other = "SELECT {0} FROM samples WHERE group_id = 0 AND sample_index = 0"
    _damage(
        path,
        f"UPDATE samples SET content = ({other.format('content')}), checksum = ({other.format('checksum')}) "
        "WHERE sample_index = 1",
    )
    with RolloutStore(path) as store, pytest.raises(StoreError, match="trajectory 0/1 in .* is damaged"):
        store.complete_groups()


def test_a_lost_member_is_found(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
    _damage(path, "DELETE FROM samples WHERE sample_index = 1")
    with RolloutStore(path) as store, pytest.raises(StoreError, match="group 0 .* has 1 of 2 trajectories"):
        store.complete_groups()


def test_a_reader_that_goes_away_is_waited_for(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
    reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
    reader.execute("BEGIN")
    assert reader.execute("SELECT COUNT(*) FROM groups").fetchone() == (1,)
    closing = threading.Timer(0.5, reader.close)
    closing.start()
    with RolloutStore(path) as store:
        assert len(store.complete_groups()) == 1
    closing.join()


def test_a_reader_that_stays_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcpo_megatron.orchestrator.store.schema.BUSY_S", 0.3)
    with RolloutStore(path) as store:
        sample_group(store, 0)
    reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM groups").fetchone()
    with pytest.raises(StoreError, match="another process: .* a reader, for instance a sqlite3"):
        RolloutStore(path)
    reader.close()


_IN_ANOTHER_PROCESS = (
    "import sys; from pathlib import Path\n"
    "from vcpo_megatron.orchestrator.store.schema import StoreError\n"
    "from vcpo_megatron.orchestrator.store.store import RolloutStore\n"
    "path = Path(sys.argv[1])\n"
)


def test_a_second_opener_is_refused_and_a_reader_gets_a_copy(path: Path) -> None:
    program = _IN_ANOTHER_PROCESS + (
        "try: RolloutStore(path)\n"
        "except StoreError as error: print(error)\n"
        "with RolloutStore.open_readonly(path) as store: print(store.trained_steps(), store.counts())\n"
    )
    with RolloutStore(path) as store:
        sample_group(store, 0)
        store.mark_trained(0, [], [0], [0])
        other = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True
        )
        refused, read = other.stdout.splitlines()
        assert "is in use by another process" in refused
        assert read == "[0] Counts(generated=2, queued=0, trained=2, dropped=0, failed=0)"
        with pytest.raises(StoreError, match="is in use by another process"):
            RolloutStore(path)
        sample_group(store, 1)  # the first one is not disturbed


def test_a_copy_of_a_store_that_is_being_written_is_of_one_moment(path: Path) -> None:
    """Forty copies while logs are filled and begun anew; no copy may be torn, and none may go back."""
    program = _IN_ANOTHER_PROCESS + (
        "for _ in range(40):\n"
        "    with RolloutStore.open_readonly(path) as store:\n"
        "        (problem,) = store._connection.execute('PRAGMA integrity_check').fetchone()\n"
        "        groups = len(store.complete_groups()) + sum(len(store.groups_trained_at(s)) for s in store.trained_steps())\n"  # noqa: E501
        "        print(problem, groups, store.counts().generated, len(store.trained_steps()), flush=True)\n"
    )
    with RolloutStore(path) as store:
        store._connection.execute("PRAGMA wal_autocheckpoint = 20")
        sample_group(store, 0)
        reader = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        deadline, group = time.monotonic() + 60, 1
        while reader.poll() is None and time.monotonic() < deadline:
            sample_group(store, group)
            if group % 2:
                store.mark_trained(group // 2, [], [group], [0])
            group += 1
            time.sleep(0.005)  # the later a copy, the more it must read
        reader.kill()
        lines = [line.split() for line in reader.communicate()[0].splitlines()]
    assert reader.returncode == 0 and len(lines) == 40
    for problem, groups, generated, steps in lines:
        assert problem == "ok"
        assert int(generated) - 2 * int(groups) in (0, 2)  # at most one group that was being sampled
        assert int(steps) <= int(groups)
    found = [int(groups) for _, groups, _, _ in lines]
    assert found == sorted(found) and found[-1] > found[0]


def test_a_copy_is_made_again_when_the_log_was_begun_anew_meanwhile(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old file with the new log would lack what was in the old log."""
    copied, copies = tmp_path / "copy.sqlite", 0
    with RolloutStore(path) as store:
        whole = shutil.copyfile
        sample_group(store, 0)

        def interrupted(source: Path, target: Path) -> None:
            nonlocal copies
            whole(source, target)
            copies += 1
            if copies == 1:  # the file is copied, the log is not
                sample_group(store, 1)
                store._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
                sample_group(store, 2)

        monkeypatch.setattr("vcpo_megatron.orchestrator.store.schema.shutil.copyfile", interrupted)
        _copy_consistently(path, copied)
        monkeypatch.undo()
    assert copies == 4
    with RolloutStore(copied) as read:
        assert [group.group_id for group in read.complete_groups()] == [0, 1, 2]


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database at all\n" * 100)
    foreign = tmp_path / "foreign"
    _damage(foreign, "CREATE TABLE t (x)")
    newer, older = tmp_path / "newer", tmp_path / "older"
    for version, file in ((99, newer), (4, older)):
        RolloutStore(file).close()
        _damage(file, f"PRAGMA user_version = {version}")
    for path, message in (
        (text, "text is not a rollout store"),
        (foreign, "foreign is an SQLite file of another program"),
        (newer, "newer has format 99, this version reads format 5; use the version .*, or start a new run"),
        (older, "older has format 4, this version reads format 5; use the version .*, or start a new run"),
    ):
        before = path.read_bytes()
        for opener in (RolloutStore, RolloutStore.open_readonly):
            with pytest.raises(StoreError, match=message) as caught:
                opener(path)
            assert "\n" not in str(caught.value)
        assert path.read_bytes() == before
        assert sorted(file.name for file in tmp_path.iterdir()) == ["foreign", "newer", "older", "text"]
    with pytest.raises(StoreError, match="cannot be opened"):
        RolloutStore(tmp_path / "no" / "folder")
    with pytest.raises(StoreError, match="no rollout store at"):
        RolloutStore.open_readonly(tmp_path / "absent")


def test_a_full_disk_is_one_clear_line_and_loses_nothing(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(StoreError, match=r"cannot grow .*full.*free space on its disk") as caught:
            for group_id in range(1, 2000):
                sample_group(store, group_id)
        assert "\n" not in str(caught.value)
        check_invariant(store)
        kept = store.counts()
    with RolloutStore(path) as store:
        assert store.counts() == kept
        sample_group(store, 5000)


# --- read-only ---------------------------------------------------------------------------------


def _read_without_rights(path: Path) -> str:
    """What a process reads that may not write in the folder: a fork that gives up its rights, in case it is root."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            with RolloutStore.open_readonly(path) as store:
                steps = [[group.group_id for group in store.groups_trained_at(step)] for step in store.trained_steps()]
                os.write(writing, f"{steps} {store.counts().trained}".encode())
        except BaseException as error:  # the child of a fork must not run the tests that follow
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], 30)[0], "the reader hangs"
        return os.read(reading, 10_000).decode()
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("killed", [False, True])
def test_reading_a_run_in_a_folder_that_is_read_only(killed: bool) -> None:
    with tempfile.TemporaryDirectory() as name:  # the folders of pytest are closed to other users
        os.chmod(name, 0o755)
        folder = Path(name) / "run"
        folder.mkdir()
        store = RolloutStore(folder / "rollouts.sqlite")
        for group_id in (0, 1):
            sample_group(store, group_id)
        store.mark_trained(0, [], [1, 0], [0, 0])
        if killed:
            left = Path(name) / "left"
            left.mkdir()
            for file in folder.iterdir():
                subprocess.run(["cp", file, left], check=True, timeout=20)
            assert sorted(file.name for file in left.iterdir()) == ["rollouts.sqlite", "rollouts.sqlite-wal"]
            folder = left
        store.close()
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        folder.chmod(0o555)
        try:
            assert _read_without_rights(folder / "rollouts.sqlite") == "[[1, 0]] 4"
        finally:
            folder.chmod(0o755)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_reading_a_killed_run_where_one_may_write(tmp_path: Path, path: Path) -> None:
    store = RolloutStore(path)
    sample_group(store, 0)
    store.mark_trained(0, [], [0], [0])
    copied = tmp_path / "copy" / path.name
    copied.parent.mkdir()
    for file in tmp_path.glob("rollouts.sqlite*"):
        subprocess.run(["cp", file, copied.parent], check=True, timeout=20)
    store.close()
    with RolloutStore.open_readonly(copied) as reader:
        assert reader.trained_steps() == [0]
        assert_same(reader.groups_trained_at(0)[0].trajectories[1], trajectory(0, 1, V0))
        assert not hasattr(reader, "admit")
    with RolloutStore(copied) as store:  # and it can be resumed after
        assert store.resume(1).next_group_id == 1
    shutil.rmtree(copied.parent)


# --- routed experts -------------------------------------------------------------------------------


def routed(group_id: int, sample: int, dtype: type = np.uint8) -> Trajectory:
    plain = trajectory(group_id, sample, V0)
    experts = (np.arange(5 * 2 * 3).reshape(5, 2, 3) + group_id + sample).astype(dtype)
    return replace(plain, routed_experts=experts)


def routed_group(store: RolloutStore, group_id: int, dtype: type = np.uint8) -> None:
    store.admit(group_id, f"p{group_id}", group_id, 2, V0)
    for sample in range(2):
        assert store.add_trajectory(routed(group_id, sample, dtype))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_come_back_bit_for_bit(path: Path, dtype: type) -> None:
    with RolloutStore(path) as store:
        routed_group(store, 3, dtype)
        sample_group(store, 4)
    with RolloutStore(path) as store:
        first, second = store.complete_groups()
    for sample, member in enumerate(first.trajectories):
        expected = routed(3, sample, dtype).routed_experts
        assert member.routed_experts.dtype == dtype and np.array_equal(member.routed_experts, expected)
    assert all(member.routed_experts is None for member in second.trajectories)


def test_routed_experts_are_kept_until_no_checkpoint_brings_their_group_back(path: Path) -> None:
    with RolloutStore(path) as store:
        for group_id in range(4):
            routed_group(store, group_id)
        for step in range(2):
            store.mark_trained(step, [], [step], [0])
        store.drop(2, "expired")  # after two steps
        assert store.prune_routing(1) == 2  # group 0, which step 0 trained
        kept = {g.group_id: g for step in range(2) for g in store.groups_trained_at(step)}
        assert kept[0].trajectories[0].routed_experts is None
        assert kept[1].trajectories[0].routed_experts is not None
        plan = store.resume(1)
        assert [g.group_id for g in plan.buffer] == [1, 2, 3]
        assert all(t.routed_experts is not None for g in plan.buffer for t in g.trajectories)


def test_a_changed_expert_is_found(path: Path) -> None:
    with RolloutStore(path) as store:
        routed_group(store, 0)
    connection = sqlite3.connect(path)
    (content,) = connection.execute("SELECT content FROM routing WHERE sample_index = 1").fetchone()
    connection.close()
    _damage(path, "UPDATE routing SET content = ? WHERE sample_index = 1", flipped(content, 0.9))
    with RolloutStore(path) as store, pytest.raises(StoreError, match="routed experts of trajectory 0/1 in .* damaged"):
        store.complete_groups()


# --- what the learner recorded ---------------------------------------------------------------------


def scored(group: Group, version: int) -> Group:
    tokens = sum(len(trajectory.tokens) for trajectory in group.trajectories)
    return group.with_recorded(PolicyVersion(1, version), -np.arange(tokens, dtype=np.float32) / 3 - version)


def test_the_learners_logprobs_come_back_bit_for_bit_and_the_last_ones_count(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 3)
        sample_group(store, 4)
        first, _ = store.complete_groups()
        assert store.record(scored(first, 1)) and store.record(scored(first, 2))
        store.admit(5, "p5", 5, 2, V0)
        assert not store.record(Group(5, "p5", (trajectory(5, 0, V0),)))  # it is not whole
        store.drop(4, "expired")
        assert not store.record(scored(Group(4, "p4", (trajectory(4, 0, V0),)), 2))
    with RolloutStore(path) as store:
        (found,) = store.complete_groups()
        assert same(found, scored(first, 2))
        assert store.trajectory(3, 0).recorded is None  # the report has no use for it


def test_logprobs_of_a_version_that_is_undone_are_forgotten_and_their_group_stays(path: Path) -> None:
    with RolloutStore(path) as store:
        for group_id in range(4):
            sample_group(store, group_id)
        for version, group in enumerate(store.complete_groups()):
            store.record(scored(group, version))
        for step in range(3):
            store.mark_trained(step, [], [step], [0])
        plan = store.resume(2)
        assert [(group.group_id, group.recorded) for group in plan.buffer] == [(2, True), (3, False)]
        ledger = GroupLedger.resumed(AtOnce(store), plan, recorded=True)
        assert [ledger.live[group_id].complete for group_id in (2, 3)] == [True, False]
        assert [group.group_id for group in ledger.unscored()] == [3]
        assert all(GroupLedger.resumed(AtOnce(store), plan).live[group_id].complete for group_id in (2, 3))


def test_logprobs_are_pruned_with_the_tokens_and_a_changed_one_is_found(path: Path) -> None:
    with RolloutStore(path) as store:
        for group_id in range(2):
            sample_group(store, group_id)
        for group in store.complete_groups():
            store.record(scored(group, 0))
        store.mark_trained(0, [], [0], [0])
        store.mark_trained(1, [], [], [])
        store.prune_samples(2)
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT group_id, content FROM recorded ORDER BY group_id, sample_index").fetchall()
    connection.close()
    assert [group_id for group_id, _ in rows] == [1, 1]
    _damage(path, "UPDATE recorded SET content = ? WHERE sample_index = 1", flipped(rows[1][1], 0.9))
    with RolloutStore(path) as store, pytest.raises(StoreError, match="log-probs of trajectory 1/1 in .* damaged"):
        store.complete_groups()
