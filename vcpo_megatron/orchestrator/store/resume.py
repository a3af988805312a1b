"""Going back to a checkpoint in the rollout store: which groups are undone, and what becomes of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...types import Group, Trajectory
from .records import Answer
from .schema import ADMITTED, DROPPED, FAILED, RUN_ENDED, SAMPLED, SUPERSEDED, ZERO_VARIANCE


@dataclass(frozen=True)
class PartialGroup:
    """A group of which some trajectories are complete; ``missing``: sample indices that are still to be sampled.

    ``version``: number of the version that it was admitted at. ``answers``: what missing ones had before a stop.
    """

    group_id: int
    prompt_id: str
    version: int
    trajectories: tuple[Trajectory, ...]
    missing: tuple[int, ...]
    answers: Mapping[int, tuple[Answer, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumePlan:
    """Where a resumed run goes on.

    ``step``      the next step, which is the number of the loaded policy
    ``buffer``    complete groups that may still be trained, in order of group id
    ``partial``   groups that go on with what they have, in order of group id
    ``cursors``   cursor index of each group in ``buffer`` and ``partial``
    ``requeue``   cursor indices to sample again, ascending, before any from ``next_cursor`` on
    ``failures``  failed trajectories so far, by prompt
    """

    step: int
    buffer: tuple[Group, ...]
    cursors: Mapping[int, int]
    requeue: tuple[int, ...]
    next_group_id: int
    next_cursor: int
    partial: tuple[PartialGroup, ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)


def undo_after(connection: sqlite3.Connection, step: int, *, keep_partial: bool) -> tuple[dict[int, int], list[int]]:
    """Undo what came after ``step`` steps. Cursor index of each group that goes back, and which of these are partial.

    To be called in a transaction.
    """
    if keep_partial:
        connection.execute("DELETE FROM partial_rollouts WHERE newest_version > ?", (step,))
    else:
        connection.execute("DELETE FROM partial_rollouts")
    undone = connection.execute(
        "SELECT group_id, cursor_index, size, state, reason, "
        " (SELECT COUNT(*) FROM samples s WHERE s.group_id = g.group_id) AS complete, "
        " (SELECT COUNT(*) FROM partial_rollouts p WHERE p.group_id = g.group_id) AS begun, "
        " (SELECT MAX(newest_version) FROM trajectories t WHERE t.group_id = g.group_id) AS newest "
        "FROM groups g WHERE current = 1 AND (ended_at IS NULL OR ended_at >= ?) ORDER BY group_id",
        (step,),
    ).fetchall()
    cursors: dict[int, int] = {}
    partial: list[int] = []
    for group in undone:
        usable = (group["complete"] or group["begun"]) and (group["newest"] or 0) <= step and group["state"] != FAILED
        in_flight = group["state"] == ADMITTED or group["reason"] == RUN_ENDED
        whole = group["complete"] == group["size"] and group["reason"] != ZERO_VARIANCE
        if usable and (whole or (keep_partial and in_flight)):
            _bring_back(connection, group["group_id"], SAMPLED if whole else ADMITTED)
            cursors[group["group_id"]] = group["cursor_index"]
            if not whole:
                partial.append(group["group_id"])
        else:
            _supersede(connection, group["group_id"], group["state"], step)
            connection.execute("DELETE FROM partial_rollouts WHERE group_id = ?", (group["group_id"],))
    return cursors, partial


def _bring_back(connection: sqlite3.Connection, group_id: int, state: str) -> None:
    """As if the group had not ended: what is stored of it is sampled, the rest of it is still to come."""
    connection.execute(
        "UPDATE groups SET state = ?, reason = '', ended_at = NULL, step = NULL, position = NULL, staleness = NULL "
        "WHERE group_id = ?",
        (state, group_id),
    )
    connection.execute(
        "UPDATE trajectories SET reason = '', log_ratio = NULL, weight = NULL, grad_norm = NULL, baseline = NULL, "
        "state = CASE WHEN EXISTS (SELECT 1 FROM samples s WHERE s.group_id = trajectories.group_id "
        "AND s.sample_index = trajectories.sample_index) THEN ? ELSE ? END WHERE group_id = ? AND state != ?",
        (SAMPLED, ADMITTED, group_id, FAILED),
    )


def _supersede(connection: sqlite3.Connection, group_id: int, state: str, step: int) -> None:
    """The group is not part of the run any more; an end as dropped or failed stays as it is."""
    undone = "UPDATE groups SET current = 0, step = NULL, position = NULL, staleness = NULL"
    if state in (DROPPED, FAILED):
        connection.execute(f"{undone} WHERE group_id = ?", (group_id,))
        return
    connection.execute(
        "UPDATE trajectories SET state = ?, reason = ? WHERE group_id = ? AND state != ?",
        (DROPPED, SUPERSEDED, group_id, FAILED),
    )
    connection.execute(
        f"{undone}, state = ?, reason = ?, ended_at = ? WHERE group_id = ?", (DROPPED, SUPERSEDED, step, group_id)
    )
