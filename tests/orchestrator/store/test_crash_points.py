"""A crash after every single write, then a resume: everything is trained once, and in exact lag to the same bits."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.fake_run import FakeRun, config
from tests.orchestrator.store.crash_images import DeterministicLearner, Disk, run_of, torn_logs, watched
from tests.slow import matrix
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.orchestrator.store.store import RolloutStore

pytestmark = pytest.mark.timeout(600)
STEPS, GROUPS, SIZE = 10, 2, 2
#: Of one run: each prompt of the stream, with all its samples, once.
EXPECTED = Counter(f"train-{prompt}/{sample}" for prompt in range(STEPS * GROUPS) for sample in range(SIZE))


def settings(lag: str) -> RunConfig:
    return config(
        train={"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "eval_every": 3},
        staleness={"max_staleness": 2, "lag": lag},
        checkpoint={"every": 2, "keep_last": 2},
    )


def learner(run: FakeRun) -> DeterministicLearner:
    assert isinstance(run.learner, DeterministicLearner)
    return run.learner


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without times, and without counters that hold what was sampled twice because of the crash."""
    left_out = ("time/", "rollouts/generated", "rollouts/dropped", "rollouts/queued")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows]


def check_store(run_dir: Path) -> None:
    """The store says the same as the learner: trained once each; every trajectory has ended."""
    with closing(sqlite3.connect(run_dir / "rollouts.sqlite")) as connection:
        trained = connection.execute(
            "SELECT prompt_id || '/' || sample_index FROM trajectories t JOIN groups g USING (group_id) "
            "WHERE t.state = 'trained'"
        ).fetchall()
        states = dict(connection.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state").fetchall())
    assert Counter(row[0] for row in trained) == EXPECTED
    assert set(states) <= {"trained", "dropped"}


def recorded_run(folder: Path, lag: str) -> tuple[FakeRun, Disk]:
    (folder / "images").mkdir(parents=True)
    disk = Disk(folder / "run", folder / "images")
    run = run_of(folder / "run", settings(lag), disk)
    with watched(disk):
        assert run.run(timeout_s=120) == "run ended"
    return run, disk


def resume_and_check(image: Path, whole: FakeRun, lag: str, attempt: int = 2, disk: Disk | None = None) -> None:
    run = run_of(image, settings(lag), disk, attempt)
    assert run.run(timeout_s=120) == "run ended"
    assert Counter(learner(run).history) == EXPECTED, image
    assert max(run.staleness(), default=0) <= 2
    check_store(image)
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        parts = [row[f"rollouts/{name}"] for name in ("queued", "trained", "dropped", "failed")]
        assert sum(parts) == row["rollouts/generated"], row
    if lag == "exact":
        assert learner(run).history == learner(whole).history
        assert learner(run).parameter == learner(whole).parameter, image
        assert comparable(rows) == comparable(whole.rows())


@pytest.mark.parametrize("lag", matrix(["bounded", "exact"], ["bounded"]))
def test_a_crash_after_every_single_write_loses_nothing(lag: str, tmp_path: Path) -> None:
    whole, disk = recorded_run(tmp_path, lag)
    assert Counter(learner(whole).history) == EXPECTED
    assert disk.writes >= 300 and {"store", "weights", "metrics", "replace", "prune"} == set(disk.kinds)
    for image in disk.images:  # writes that left the disk as it was (inside a transaction) share one
        resume_and_check(image, whole, lag)
        shutil.rmtree(image)


@pytest.mark.parametrize("lag", ["bounded", "exact"])
def test_a_crash_of_the_resumed_run_loses_nothing(lag: str, tmp_path: Path) -> None:
    whole, disk = recorded_run(tmp_path / "first", lag)
    middle = disk.images[len(disk.images) // 2]
    (tmp_path / "again").mkdir()
    again = Disk(middle, tmp_path / "again")
    with watched(again):
        resume_and_check(middle, whole, lag, attempt=2, disk=again)
    for image in again.images[::3]:
        resume_and_check(image, whole, lag, attempt=3)
        shutil.rmtree(image)


def dump(path: Path) -> list[Any]:
    """All that the store of ``path`` holds, after SQLite has recovered it."""
    with RolloutStore(path / "rollouts.sqlite") as store:
        tables = ("groups", "trajectories", "samples", "progress")
        return [
            store._rows(
                f"SELECT * FROM {name} ORDER BY rowid"
                if name != "trajectories"
                else f"SELECT * FROM {name} ORDER BY group_id, sample_index"
            )
            for name in tables
        ]


def test_a_crash_within_a_write_of_the_log_leaves_the_state_before_it(tmp_path: Path) -> None:
    _, disk = recorded_run(tmp_path, "bounded")
    torn = 0
    for before, after in zip(disk.images, disk.images[1:], strict=False):
        logs = list(torn_logs(before, after))
        expected = None
        for log in logs:
            copy = tmp_path / "copy"
            shutil.copytree(before, copy)
            (copy / "rollouts.sqlite-wal").write_bytes(log)
            if expected is None:
                untouched = tmp_path / "untouched"
                shutil.copytree(before, untouched)
                expected = [[tuple(row) for row in table] for table in dump(untouched)]
                shutil.rmtree(untouched)
            assert [[tuple(row) for row in table] for table in dump(copy)] == expected
            shutil.rmtree(copy)
            torn += 1
    assert torn >= 150
