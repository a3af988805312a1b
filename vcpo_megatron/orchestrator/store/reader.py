"""The reading half of the rollout store: counters, groups in order, what was trained when."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...run.text import encodable
from ...types import Group, LearnerRecord, Trajectory
from .records import EpisodeTimes, experts_of, heldout_trajectory_of, recorded_of, times_of, trajectory_of
from .schema import ADMITTED, DROPPED, FAILED, SAMPLED, TRAINED, WORKER_ENDED, StoreError, store_errors


@dataclass(frozen=True)
class Counts:
    """Counters in trajectories; ``generated == queued + trained + dropped + failed``, always.

    Every trajectory of an admitted group is generated; it is queued until it has ended.
    """

    generated: int = 0
    queued: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0


class StoreReader:
    """Reads an open store. One thread at a time; every method may raise ``StoreError``."""

    def __init__(self, path: Path, connection: sqlite3.Connection, close: Callable[[], None]) -> None:
        self._path = path
        self._connection = connection
        self._close = close
        connection.row_factory = sqlite3.Row
        self._totals = self._count()

    def close(self) -> None:
        """Close the file; harmless a second time."""
        with store_errors(self._path):
            self._close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def counts(self) -> Counts:
        """Counters of everything that was ever admitted."""
        totals = self._totals
        return Counts(
            generated=sum(totals.values()),
            queued=totals[ADMITTED] + totals[SAMPLED],
            trained=totals[TRAINED],
            dropped=totals[DROPPED],
            failed=totals[FAILED],
        )

    def reasons(self) -> dict[str, int]:
        """Trajectories by how they ended: {"dropped: expired": 8, "failed: ...": 1}."""
        rows = self._rows(
            "SELECT state || ': ' || reason AS how, COUNT(*) AS n FROM trajectories WHERE state IN (?, ?) "
            "GROUP BY state, reason ORDER BY how",
            (DROPPED, FAILED),
        )
        return {row["how"]: row["n"] for row in rows}

    def failures_by_prompt(self) -> dict[str, int]:
        """Number of failed trajectories of each prompt that has any; those that another one ended do not count."""
        rows = self._rows(
            "SELECT prompt_id, COUNT(*) FROM trajectories t JOIN groups g USING (group_id) WHERE t.state = ? "
            "AND t.reason NOT LIKE ? GROUP BY prompt_id",
            (FAILED, f"{WORKER_ENDED}%"),
        )
        return {row[0]: row[1] for row in rows}

    def steps_done(self) -> int:
        """Steps recorded, skipped ones included: the number of the policy they made."""
        return int(self._rows("SELECT steps_done FROM progress")[0][0])

    def state(self) -> dict[str, Any]:
        """What a checkpoint's manifest keeps: next_group_id, next_cursor, position (steps done), run (its id)."""
        group_id, cursor = self._rows("SELECT MAX(group_id), MAX(cursor_index) FROM groups")[0]
        return {
            "next_group_id": 0 if group_id is None else group_id + 1,
            "next_cursor": 0 if cursor is None else cursor + 1,
            "position": self.steps_done(),
            "run": self._rows("SELECT run FROM identity")[0][0],
        }

    def check_belongs(self, step: int, state: Mapping[str, Any] | None) -> None:
        """StoreError when the file is of another run than the checkpoint of ``step`` with ``state``, or older."""
        here = self.state()
        expected = {"position": step, **(state or {})}
        if expected["position"] != step:
            raise StoreError(f"the checkpoint of step {step} holds the store's state of step {expected['position']}")
        if expected.get("run", here["run"]) != here["run"]:
            raise StoreError(
                f"{self._path} is of another run than the checkpoint of step {step} (id {here['run']}, not "
                f"{expected['run']}); put back the file that belongs to it, or start a new run"
            )
        for name in ("position", "next_group_id", "next_cursor"):
            if here[name] < expected.get(name, 0):
                raise StoreError(
                    f"{self._path} is older than the checkpoint of step {step} ({name} is {here[name]}, not at least "
                    f"{expected[name]}); put back the file that belongs to it, or resume from an earlier checkpoint"
                )

    def complete_groups(self) -> list[Group]:
        """Groups that are complete and have not ended, in order of group id."""
        return self._groups("g.state = ? ORDER BY g.group_id", (SAMPLED,))

    def trained_steps(self) -> list[int]:
        """Steps that consumed a batch, ascending; skipped ones included."""
        return [row[0] for row in self._rows("SELECT DISTINCT step FROM groups WHERE step IS NOT NULL ORDER BY step")]

    def groups_trained_at(self, step: int) -> list[Group]:
        """The batch that ``step`` consumed (skipped or not), in the order it was trained; [] when unknown."""
        return self._groups("g.step = ? ORDER BY g.position", (step,))

    def history(self, *, step: int | None = None, prompt_id: str | None = None) -> Iterator[dict[str, Any]]:
        """One row a trajectory, in order of training and then of admission: what became of it, and with which numbers.

        ``step`` and ``prompt_id`` select. ``step`` is None for what was not trained; ``staleness`` is that of the
        trajectory itself, versions between its oldest token and the step.
        """
        if step is not None and not 0 <= step < 2**63:  # SQLite takes no more
            return
        wanted = [("g.step = ?", step), ("g.prompt_id = ?", None if prompt_id is None else encodable(prompt_id))]
        where = [condition for condition, value in wanted if value is not None] or ["1"]
        query = (
            "SELECT g.step, g.prompt_id, g.group_id, t.sample_index, t.state, t.reason, g.step - t.oldest_version AS "
            "staleness, t.oldest_version, t.newest_version, t.reward, t.weight, t.log_ratio, t.baseline, t.grad_norm "
            f"FROM trajectories t JOIN groups g USING (group_id) WHERE {' AND '.join(where)} "
            "ORDER BY g.step IS NULL, g.step, g.position, g.group_id, t.sample_index"
        )
        with store_errors(self._path):
            for row in self._connection.execute(query, [value for _, value in wanted if value is not None]):
                yield dict(row)

    def by_steps(self, size: int) -> list[dict[str, Any]]:
        """One row for each ``size`` steps, ascending: what became of the trajectories that have ended.

        ``first`` is the first step of the row; ``groups`` and ``trained`` count what was trained, ``staleness`` is its
        largest, ``reward`` its mean, ``tokens`` all after the prompts, None once any are pruned.

        What was not trained counts in the step that was being made when its group ended; in the last row, ``first``
        None, when that step is not done.
        """
        trained = f"CASE WHEN t.state = '{TRAINED}' THEN"
        return [
            dict(row)
            for row in self._rows(
                "SELECT CASE WHEN g.ended_at < steps_done THEN g.ended_at / :size * :size END AS first, "
                f"COUNT(DISTINCT {trained} t.group_id END) AS groups, SUM(t.state = '{TRAINED}') AS trained, "
                f"SUM(t.state = '{DROPPED}') AS dropped, SUM(t.state = '{FAILED}') AS failed, "
                f"MAX({trained} g.step - t.oldest_version END) AS staleness, AVG({trained} t.reward END) AS reward, "
                f"CASE WHEN COUNT({trained} s.group_id END) = SUM(t.state = '{TRAINED}') "
                f"THEN SUM({trained} s.length - s.prompt_length END) END AS tokens "
                "FROM progress, trajectories t JOIN groups g USING (group_id) "
                "LEFT JOIN samples s ON s.group_id = t.group_id AND s.sample_index = t.sample_index "
                f"WHERE t.state IN ('{TRAINED}', '{DROPPED}', '{FAILED}') GROUP BY first ORDER BY first IS NULL, first",
                {"size": size},
            )
        ]

    def trained_numbers(self) -> np.ndarray:
        """What steps found for the trajectories that they were trained on, in order of step: float64 [N, 5] of step,
        log ratio, |g_i|, weight, and tokens after the prompt; nan where there is none (any more)."""
        rows = self._rows(
            "SELECT g.step, t.log_ratio, t.grad_norm, t.weight, s.length - s.prompt_length FROM groups g "
            "JOIN trajectories t USING (group_id) LEFT JOIN samples s ON s.group_id = t.group_id "
            "AND s.sample_index = t.sample_index WHERE g.step IS NOT NULL AND t.state = ? ORDER BY g.step, g.position",
            (TRAINED,),
        )
        found = [[math.nan if value is None else value for value in row] for row in rows]
        return np.array(found, dtype=np.float64).reshape(-1, 5)

    def episode_times(self, steps: Sequence[int]) -> dict[int, list[tuple[str, EpisodeTimes]]]:
        """Step -> (GROUP/SAMPLE, times) of each trajectory that it consumed and of which times were recorded."""
        if not self._has("episode_times"):
            return {}
        marks = ", ".join("?" * len(steps))
        found: dict[int, list[tuple[str, EpisodeTimes]]] = {}
        for row in self._rows(
            f"SELECT g.step, e.* FROM groups g JOIN episode_times e USING (group_id) WHERE g.step IN ({marks}) "
            "ORDER BY g.step, e.began, e.group_id, e.sample_index",
            list(steps),
        ):
            found.setdefault(row["step"], []).append((f"{row['group_id']}/{row['sample_index']}", times_of(row)))
        return found

    def step_times(self) -> dict[int, tuple[float, float]]:
        """Step -> when the learner had its batch, start and end, in seconds since 1970, as far as it was recorded."""
        if not self._has("step_times"):
            return {}
        return {row["step"]: (row["began"], row["ended"]) for row in self._rows("SELECT * FROM step_times")}

    def _has(self, table: str) -> bool:
        return bool(self._rows("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)))

    def trajectory(self, group_id: int, sample_index: int) -> Trajectory | None:
        """One trajectory with its tokens; None when none are stored (any more). Routed experts and the learner's
        log-probs are left out."""
        rows = self._sample_rows("s.group_id = ? AND s.sample_index = ?", (group_id, sample_index))
        return trajectory_of(rows[0], str(self._path)) if rows else None

    def evaluations(self) -> list[dict[str, Any]]:
        """One row a version that was evaluated, ascending: ``version``, ``samples``, ``failed`` of them, and
        ``reward``, the mean over the others."""
        return [
            dict(row)
            for row in self._rows(
                "SELECT version, COUNT(*) AS samples, SUM(reward IS NULL) AS failed, AVG(reward) AS reward "
                "FROM evaluations GROUP BY version ORDER BY version"
            )
        ]

    def heldout(self, *, version: int | None = None, prompt_id: str | None = None) -> Iterator[dict[str, Any]]:
        """One row a held-out sample, by version and then in order of the prompts: ``version``, ``position``,
        ``prompt_id``, ``reward``, or the ``reason`` why there is none, and ``trajectory``, None where its tokens are
        not stored (any more)."""
        wanted = [("version = ?", version), ("prompt_id = ?", None if prompt_id is None else encodable(prompt_id))]
        where = [condition for condition, value in wanted if value is not None] or ["1"]
        query = f"SELECT * FROM evaluations WHERE {' AND '.join(where)} ORDER BY version, position"
        with store_errors(self._path):
            for row in self._connection.execute(query, [value for _, value in wanted if value is not None]):
                known = {name: row[name] for name in ("version", "position", "prompt_id", "reward", "reason")}
                yield {**known, "trajectory": heldout_trajectory_of(row, str(self._path))}

    # --- internals ----------------------------------------------------------------------------

    def _rows(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        with store_errors(self._path):
            return self._connection.execute(query, parameters).fetchall()

    def _count(self) -> dict[str, int]:
        totals = dict.fromkeys((ADMITTED, SAMPLED, TRAINED, DROPPED, FAILED), 0)
        totals.update((row[0], row[1]) for row in self._rows("SELECT state, COUNT(*) FROM trajectories GROUP BY state"))
        return totals

    def _experts(self, group_id: int, sample_index: int) -> np.ndarray | None:
        rows = self._rows("SELECT * FROM routing WHERE group_id = ? AND sample_index = ?", (group_id, sample_index))
        return experts_of(rows[0], str(self._path)) if rows else None

    def _recorded(self, group_id: int, sample_index: int) -> LearnerRecord | None:
        rows = self._rows("SELECT * FROM recorded WHERE group_id = ? AND sample_index = ?", (group_id, sample_index))
        return recorded_of(rows[0], str(self._path)) if rows else None

    def _trajectory(self, row: sqlite3.Row) -> Trajectory:
        experts = self._experts(row["group_id"], row["sample_index"])
        recorded = self._recorded(row["group_id"], row["sample_index"])
        return trajectory_of(row, str(self._path), experts=experts, recorded=recorded)

    def _groups(self, condition: str, parameters: Sequence[Any]) -> list[Group]:
        """Groups with all their trajectories; ``condition`` is a WHERE clause on ``g`` with its ORDER BY."""
        members: dict[int, list[Trajectory]] = {}
        heads: dict[int, tuple[str, int]] = {}
        for row in self._sample_rows(f"{condition}, s.sample_index", parameters):
            heads[row["group_id"]] = row["prompt_id"], row["size"]
            members.setdefault(row["group_id"], []).append(self._trajectory(row))
        for group_id, (_, size) in heads.items():
            if len(members[group_id]) != size:
                raise StoreError(
                    f"group {group_id} in {self._path} has {len(members[group_id])} of {size} trajectories; "
                    "the file is damaged, restore it from a copy or start a new run"
                )
        return [Group(group_id, prompt_id, tuple(members[group_id])) for group_id, (prompt_id, _) in heads.items()]

    def _members(self, condition: str, parameters: Sequence[Any]) -> list[Trajectory]:
        """Stored trajectories of groups that fit ``condition``, a WHERE clause on ``g``."""
        rows = self._sample_rows(f"{condition} ORDER BY s.group_id, s.sample_index", parameters)
        return [self._trajectory(row) for row in rows]

    def _sample_rows(self, condition: str, parameters: Sequence[Any]) -> list[sqlite3.Row]:
        return self._rows(
            f"SELECT g.prompt_id, g.size, s.* FROM groups g JOIN samples s USING (group_id) WHERE {condition}",
            parameters,
        )
