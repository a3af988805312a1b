"""The durable record of every group and trajectory: one SQLite file, opened by the orchestrator alone.

    group        admitted -> sampled (all members in) -> trained(step) | dropped(reason) | failed(reason)
    trajectory   the same; when one fails, the other members of its group are dropped, or another one takes its
                 place in the group

Every trajectory of an admitted group ends in exactly one of the three final states; only ``resume``,
which goes back to a checkpoint, undoes an end. A change is on disk when its method, or the outermost
``transaction``, returns. The methods block for as long as the disk takes: the orchestrator's event
loop calls them from one worker thread (any thread may call, but only one at a time).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...run.text import encodable
from ...types import Group, PolicyVersion, Trajectory, TrajectoryResult
from .reader import StoreReader
from .records import (
    Answer,
    EpisodeTimes,
    HeldOutSample,
    answers_of,
    answers_row,
    heldout_row,
    recorded_row,
    routing_row,
    sample_row,
    times_row,
)
from .resume import PartialGroup, ResumePlan, undo_after
from .schema import (
    ADMITTED,
    DROPPED,
    FAILED,
    RUN_ENDED,
    SAMPLED,
    TRAINED,
    ReadOnlyFile,
    StoreError,
    open_exclusively,
    store_errors,
)


class RolloutStore(StoreReader):
    """The store, open for writing.

    Opening makes the file when there is none, unless ``create`` is False. StoreError: it is missing then, another
    process has it open, it belongs to another program or another version of this one, or its folder cannot be written.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        connection = open_exclusively(path, create=create)
        self._in_transaction = False
        super().__init__(path, connection, connection.close)

    @staticmethod
    def open_readonly(path: Path) -> StoreReader:
        """Open a run's store for reading: in place, or as a copy where its folder is read-only or the run goes on."""
        file = ReadOnlyFile(path)
        return StoreReader(path, file.connection, file.close)

    def __enter__(self) -> RolloutStore:
        return self

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is written as a whole, with one fsync, or not at all; may be nested.

        Do not go on inside a transaction after an error in it.
        """
        if self._in_transaction:
            yield
            return
        self._in_transaction = True
        with ExitStack() as on_error:
            on_error.callback(self._roll_back)
            try:
                with store_errors(self._path):
                    self._connection.execute("BEGIN IMMEDIATE")
                    yield
                    self._connection.execute("COMMIT")
            finally:
                self._in_transaction = False
            on_error.pop_all()

    def _roll_back(self) -> None:
        with store_errors(self._path):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._totals = self._count()

    # --- a group's life -----------------------------------------------------------------------

    def admit(self, group_id: int, prompt_id: str, cursor_index: int, size: int, version: PolicyVersion) -> None:
        """Record a new group of ``size`` trajectories of data-set position ``cursor_index``.

        A position may be admitted again once its former group was dropped or has failed. StoreError when the
        group id was used, or when the position is queued or trained already.
        """
        what = f"admission of group {group_id} at data position {cursor_index}"
        with self.transaction(), store_errors(self._path, what):
            self._connection.execute(
                "UPDATE groups SET current = 0 WHERE cursor_index = ? AND current = 1 AND state IN (?, ?)",
                (cursor_index, DROPPED, FAILED),
            )
            self._connection.execute(
                "INSERT INTO groups (group_id, prompt_id, cursor_index, size, admitted_version, state) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (group_id, encodable(prompt_id), cursor_index, size, str(version), ADMITTED),
            )
            self._connection.executemany(
                "INSERT INTO trajectories (group_id, sample_index, state) VALUES (?, ?, ?)",
                [(group_id, sample, ADMITTED) for sample in range(size)],
            )
            self._totals[ADMITTED] += size

    def add_trajectory(self, trajectory: Trajectory) -> bool:
        """Record a finished trajectory; its group is complete when all its members are in.

        False, and nothing changes: its group has ended before (it is counted there). StoreError: it was
        never admitted, came before, holds no sampled token, or has a reward that is not finite.
        """
        what = f"trajectory {trajectory.uid}"
        group_id, sample = trajectory.group_id, trajectory.sample_index
        with self.transaction(), store_errors(self._path, what):
            group = self._group(group_id)
            if group["state"] not in (ADMITTED, SAMPLED):
                return False
            if group["prompt_id"] != encodable(trajectory.prompt_id):
                raise StoreError(f"{what} is of prompt {trajectory.prompt_id!r}, not {group['prompt_id']!r}")
            versions = [version.number for version in trajectory.versions]
            found = self._connection.execute(
                "UPDATE trajectories SET state = ?, reward = ?, oldest_version = ?, newest_version = ? "
                "WHERE group_id = ? AND sample_index = ? AND state = ?",
                (
                    SAMPLED,
                    float(trajectory.reward),
                    min(versions, default=None),
                    max(versions, default=None),
                    group_id,
                    sample,
                    ADMITTED,
                ),
            )
            if not found.rowcount:
                raise StoreError(f"{what} came twice, or was never admitted to {self._path}")
            self._insert("samples", sample_row(trajectory))
            for table, row in (("routing", routing_row(trajectory)), ("recorded", recorded_row(trajectory))):
                if row is not None:
                    self._insert(table, row)
            self._forget_answers(group_id, sample)
            self._totals[ADMITTED] -= 1
            self._totals[SAMPLED] += 1
            self._connection.execute(
                "UPDATE groups SET state = ? WHERE group_id = ? AND NOT EXISTS "
                "(SELECT 1 FROM trajectories WHERE group_id = ? AND state = ?)",
                (SAMPLED, group_id, group_id, ADMITTED),
            )
            return True

    def record(self, group: Group) -> bool:
        """Keep the learner's own log-probs of a group whose trajectories are all in, in the place of earlier ones.
        False, and nothing changes: it has ended before."""
        with self.transaction():
            if self._group(group.group_id)["state"] != SAMPLED:
                return False
            self._connection.execute("DELETE FROM recorded WHERE group_id = ?", (group.group_id,))
            for row in map(recorded_row, group.trajectories):
                if row is not None:
                    self._insert("recorded", row)
            return True

    def mark_trained(
        self,
        step: int,
        results: Sequence[TrajectoryResult],
        group_ids: Sequence[int],
        staleness: Sequence[int],
        *,
        skipped: str = "",
    ) -> None:
        """Record that ``step`` consumed the groups, in this order.

        staleness: versions between sampling and use, one a group. skipped: the reason when the step left the
        parameters unchanged; the groups then end dropped(reason), and the step counts all the same.
        StoreError when the step is not the next one, or when a group or a result does not belong to it.
        """
        with self.transaction():
            if step != self.steps_done():
                raise StoreError(f"step {step} was trained, but {self._path} expects step {self.steps_done()}")
            end, reason = (DROPPED, skipped) if skipped else (TRAINED, "")
            for position, (group_id, age) in enumerate(zip(group_ids, staleness, strict=True)):
                state = self._group(group_id)["state"]
                if state != SAMPLED:
                    raise StoreError(f"step {step} was trained on group {group_id}, which is {state}, not complete")
                self._connection.execute(
                    "UPDATE groups SET step = ?, position = ?, staleness = ? WHERE group_id = ?",
                    (step, position, int(age), group_id),
                )
                self._end(group_id, end, reason, at=step)
            self._record(step, results, set(group_ids))
            self._connection.execute("UPDATE progress SET steps_done = ?", (step + 1,))

    def drop(self, group_id: int, reason: str) -> bool:
        """End a queued group as dropped(reason). False, and nothing changes: it had ended before."""
        with self.transaction():
            if self._group(group_id)["state"] not in (ADMITTED, SAMPLED):
                return False
            self._end(group_id, DROPPED, reason, at=self.steps_done())
            return True

    def fail(self, group_id: int, sample_index: int, reason: str) -> bool:
        """End a queued group because one trajectory failed: that one is failed(reason), the others are dropped.

        False, and nothing changes: the group had ended before (it is counted there).
        """
        with self.transaction():
            group = self._group(group_id)
            if group["state"] not in (ADMITTED, SAMPLED):
                return False
            state = self._member_state(group_id, sample_index)
            self._connection.execute(
                "UPDATE trajectories SET state = ?, reason = ? WHERE group_id = ? AND sample_index = ?",
                (FAILED, encodable(reason), group_id, sample_index),
            )
            self._totals[state] -= 1
            self._totals[FAILED] += 1
            self._end(group_id, DROPPED, "a member failed", at=self.steps_done())
            self._connection.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE group_id = ?", (FAILED, encodable(reason), group_id)
            )
            return True

    def replace(self, group_id: int, sample_index: int, reason: str, replacement: int) -> bool:
        """One trajectory failed(reason); the group goes on with a new one, ``replacement``, in its place.

        False, and nothing changes: the group had ended before (it is counted there).
        """
        with self.transaction():
            if self._group(group_id)["state"] != ADMITTED:
                return False
            if self._member_state(group_id, sample_index) != ADMITTED:
                raise StoreError(f"trajectory {group_id}/{sample_index} has ended before; it cannot be replaced")
            self._connection.execute(
                "UPDATE trajectories SET state = ?, reason = ? WHERE group_id = ? AND sample_index = ?",
                (FAILED, encodable(reason), group_id, sample_index),
            )
            self._connection.execute(
                "INSERT INTO trajectories (group_id, sample_index, state) VALUES (?, ?, ?)",
                (group_id, replacement, ADMITTED),
            )
            self._forget_answers(group_id, sample_index)
            self._totals[FAILED] += 1
            return True

    def keep_answers(self, group_id: int, sample_index: int, answers: Sequence[Answer]) -> bool:
        """Keep what an unfinished trajectory has of answers. False, and nothing changes: it has ended before."""
        with self.transaction():
            if self._group(group_id)["state"] != ADMITTED or self._member_state(group_id, sample_index) != ADMITTED:
                return False
            self._forget_answers(group_id, sample_index)
            self._insert("partial_rollouts", answers_row(group_id, sample_index, answers))
            return True

    def _forget_answers(self, group_id: int, sample_index: int | None = None) -> None:
        """Forget what a trajectory, or all of a group, had of answers: it has ended."""
        self._connection.execute(
            "DELETE FROM partial_rollouts WHERE group_id = ? AND sample_index = COALESCE(?, sample_index)",
            (group_id, sample_index),
        )

    def prune_samples(self, before: int) -> int:
        """Forget tokens and log-probs, of unfinished answers and the learner's own too, of groups that were trained or
        dropped before step ``before``, and of evaluations of versions before it; everything else about them stays,
        and all of groups that failed. Returns the number of trajectories.

        The file does not shrink: its pages are used again.
        """
        ended = "WHERE group_id IN (SELECT group_id FROM groups WHERE state IN (?, ?) AND ended_at < ?)"
        with self.transaction():
            self._connection.execute(f"DELETE FROM partial_rollouts {ended}", (TRAINED, DROPPED, before))
            self._connection.execute(
                "UPDATE evaluations SET content = NULL, checksum = NULL WHERE version < ? AND content IS NOT NULL",
                (before,),
            )
            self._connection.execute(f"DELETE FROM recorded {ended}", (TRAINED, DROPPED, before))
            return self._connection.execute(f"DELETE FROM samples {ended}", (TRAINED, DROPPED, before)).rowcount

    def prune_routing(self, before: int) -> int:
        """Forget the routed experts of the groups that ended before step ``before``; returns the number of
        trajectories."""
        with self.transaction():
            return self._connection.execute(
                "DELETE FROM routing WHERE group_id IN (SELECT group_id FROM groups WHERE ended_at < ?)", (before,)
            ).rowcount

    def end_run(self, reason: str = RUN_ENDED) -> None:
        """End every queued group as dropped(reason), at the end of a run."""
        with self.transaction():
            queued = self._rows("SELECT group_id FROM groups WHERE state IN (?, ?)", (ADMITTED, SAMPLED))
            for row in queued:
                self._end(row["group_id"], DROPPED, reason, at=self.steps_done())

    # --- when things went on ------------------------------------------------------------------

    def keep_times(self, times: Mapping[tuple[int, int], EpisodeTimes]) -> None:
        """Keep when trajectories, (group id, sample index), were sampled; in the place of earlier times."""
        with self.transaction(), store_errors(self._path, "times of trajectories"):
            self._connection.executemany(
                "INSERT OR REPLACE INTO episode_times VALUES (?, ?, ?, ?, ?)",
                [times_row(*key, found) for key, found in times.items()],
            )

    def keep_step_times(self, step: int, began: float, ended: float) -> None:
        """Keep when the learner had the batch of ``step``, in seconds since 1970."""
        with self.transaction():
            self._connection.execute("INSERT OR REPLACE INTO step_times VALUES (?, ?, ?)", (step, began, ended))

    # --- evaluation ---------------------------------------------------------------------------

    def add_evaluation(self, version: int, samples: Sequence[HeldOutSample]) -> None:
        """Keep what the evaluation of policy ``version`` gave, in the place of an earlier one."""
        with self.transaction(), store_errors(self._path, f"the evaluation of version {version}"):
            self._connection.execute("DELETE FROM evaluations WHERE version = ?", (version,))
            for sample in samples:
                self._insert("evaluations", heldout_row(version, sample))

    # --- resume -------------------------------------------------------------------------------

    def resume(self, step: int, state: Mapping[str, Any] | None = None, *, keep_partial: bool = False) -> ResumePlan:
        """Go back to the checkpoint after ``step`` steps: undo what came later, say what to go on with.

        What ended before it stays. Of the rest, complete groups sampled by policies up to ``step`` go back to
        the buffer, whatever had become of them; with ``keep_partial`` groups that were in flight go on with what
        they have. All others are not part of the run any more: they are dropped('superseded') unless they had ended
        as dropped or failed, and their data positions are requeued, so that each position is trained once along the
        history that leads to the final weights. Evaluations of versions after ``step`` are forgotten, and so are the
        log-probs that the learner gave by such a version: the group is scored again.

        state: what ``state`` had returned for this checkpoint; checked when given. StoreError when the file is
        older than the checkpoint, or of another run.
        """
        with self.transaction():
            self.check_belongs(step, state)
            cursors, partial = undo_after(self._connection, step, keep_partial=keep_partial)
            self._connection.execute("DELETE FROM evaluations WHERE version > ?", (step,))
            self._connection.execute("DELETE FROM recorded WHERE version > ?", (step,))
            self._connection.execute("UPDATE progress SET steps_done = ?", (step,))
            self._totals = self._count()
            requeue = self._rows(
                "SELECT DISTINCT cursor_index FROM groups WHERE cursor_index NOT IN "
                "(SELECT cursor_index FROM groups WHERE current = 1) ORDER BY cursor_index"
            )
            after = self.state()
            return ResumePlan(
                step=step,
                buffer=tuple(self.complete_groups()),
                partial=tuple(self._partial(group_id) for group_id in partial),
                cursors=cursors,
                requeue=tuple(row[0] for row in requeue),
                next_group_id=after["next_group_id"],
                next_cursor=after["next_cursor"],
                failures=self.failures_by_prompt(),
            )

    def _partial(self, group_id: int) -> PartialGroup:
        group = self._group(group_id)
        missing = self._rows(
            "SELECT sample_index FROM trajectories WHERE group_id = ? AND state = ? ORDER BY sample_index",
            (group_id, ADMITTED),
        )
        indices = tuple(row[0] for row in missing)
        return PartialGroup(
            group_id,
            group["prompt_id"],
            PolicyVersion.parse(group["admitted_version"]).number,
            tuple(self._members("g.group_id = ?", (group_id,))),
            indices,
            self._answers(group_id, indices),
        )

    def _answers(self, group_id: int, samples: Sequence[int]) -> dict[int, tuple[Answer, ...]]:
        rows = self._rows("SELECT * FROM partial_rollouts WHERE group_id = ?", (group_id,))
        found = {row["sample_index"]: answers_of(row, str(self._path)) for row in rows}
        return {sample: answers for sample, answers in found.items() if sample in samples}

    # --- internals ----------------------------------------------------------------------------

    def _insert(self, table: str, row: tuple[Any, ...]) -> None:
        self._connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def _group(self, group_id: int) -> Any:
        rows = self._rows("SELECT * FROM groups WHERE group_id = ?", (group_id,))
        if not rows:
            raise StoreError(f"group {group_id} was never admitted to {self._path}")
        return rows[0]

    def _member_state(self, group_id: int, sample_index: int) -> str:
        query = "SELECT state FROM trajectories WHERE group_id = ? AND sample_index = ?"
        rows = self._rows(query, (group_id, sample_index))
        if not rows:
            raise StoreError(f"group {group_id} has no sample {sample_index}")
        return str(rows[0][0])

    def _end(self, group_id: int, state: str, reason: str, *, at: int) -> None:
        """End a group and all its members that are not failed; ``at``: steps done."""
        reason = encodable(reason)
        members = self._rows(
            "SELECT state, COUNT(*) AS n FROM trajectories WHERE group_id = ? AND state != ? GROUP BY state",
            (group_id, FAILED),
        )
        for row in members:
            self._totals[row["state"]] -= row["n"]
            self._totals[state] += row["n"]
        self._connection.execute(
            "UPDATE trajectories SET state = ?, reason = ? WHERE group_id = ? AND state != ?",
            (state, reason, group_id, FAILED),
        )
        self._connection.execute(
            "UPDATE groups SET state = ?, reason = ?, ended_at = ? WHERE group_id = ?", (state, reason, at, group_id)
        )
        if reason != RUN_ENDED:  # a resume takes those up again
            self._forget_answers(group_id)

    def _record(self, step: int, results: Sequence[TrajectoryResult], group_ids: set[int]) -> None:
        foreign = [result for result in results if result.group_id not in group_ids]
        if foreign:
            raise StoreError(
                f"step {step} reports trajectory {foreign[0].group_id}/{foreign[0].sample_index}, not in its batch"
            )
        self._connection.executemany(
            "UPDATE trajectories SET log_ratio = ?, weight = ?, grad_norm = ?, baseline = ? "
            "WHERE group_id = ? AND sample_index = ?",
            [(r.log_ratio, r.weight, r.grad_norm, r.baseline, r.group_id, r.sample_index) for r in results],
        )
