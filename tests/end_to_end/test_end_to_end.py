"""The real system on CPUs: it trains within the bound, repeats bit for bit, replays, and survives kills."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from .running import Run, read_rows, without_times, without_what_a_crash_changes

pytestmark = pytest.mark.timeout(400)
SHORT = ("train.steps=24", "train.eval_every=12", "checkpoint.every=6")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 steps of the example as shipped: two learner ranks, k = 16."""
    run_dir = tmp_path_factory.mktemp("short") / "run"
    with Run(run_dir, *SHORT) as run:
        assert run.wait(200) == 0, run.text()
    return run_dir


def test_a_short_run_keeps_the_bound_and_accounts_for_every_trajectory(short_run: Path) -> None:
    rows = read_rows(short_run)
    assert [row["step"] for row in rows] == list(range(24))
    for row in rows:
        ended = row["rollouts/trained"] + row["rollouts/dropped"] + row["rollouts/failed"]
        assert ended + row["rollouts/queued"] == row["rollouts/generated"]
        assert 0 <= row["staleness/mean"] <= row["staleness/max"] <= 16
        assert 1 / 64 <= row["ess/ratio"] <= 1 and row["step/skipped"] == 0
        assert 0 < row["time/sync_stall"] < 5
    assert abs(rows[0]["kl/behavior"]) < 1e-5  # on-policy: learner and server agree on every token
    assert rows[-1]["rollouts/trained"] == 24 * 64 and rows[-1]["rollouts/queued"] == 0
    assert max(row["staleness/max"] for row in rows) >= 1
    # the start is 0.277 with a standard error of 0.017
    assert rows[0]["eval/accuracy"] < 0.36 and rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"]
    assert any((short_run / "tensorboard").iterdir())


@pytest.mark.slow
def test_the_same_rollouts_give_the_same_steps_in_every_layout(short_run: Path, tmp_path: Path) -> None:
    names = ("loss", "grad_norm/total", "grad_norm/trajectory_max", "ess/ratio", "lr/effective")
    replay = ("rollout.engine=replay", f"rollout.replay={short_run}", "train.steps=20")
    layouts = {
        "tp1": ("launch.learner_ranks=1", "parallel.tensor=1"),
        "tp2": (),
        "pp2": ("parallel.tensor=1", "parallel.pipeline=2"),
        "dp2": ("parallel.tensor=1",),
    }
    found = {}
    for name, layout in layouts.items():
        with Run(tmp_path / name, *replay, *layout) as run:
            assert run.wait(150) == 0, run.text()
        found[name] = read_rows(tmp_path / name)
        assert len(found[name]) == 20
    for name, rows in found.items():
        for row, reference in zip(rows, found["tp1"], strict=True):
            for key in names:
                # a loss near zero is a difference of terms of 0.1: 1e-6 is its noise in fp32
                assert row[key] == pytest.approx(reference[key], rel=1e-3, abs=1e-6), (name, row["step"], key)


@pytest.mark.slow
def test_exact_lag_repeats_bit_for_bit_and_over_a_resume(tmp_path: Path) -> None:
    settings = (
        "staleness.lag=exact",
        "staleness.max_staleness=3",
        "train.steps=12",
        "train.eval_every=4",
        "checkpoint.every=6",
    )
    for name in ("one", "two"):
        with Run(tmp_path / name, *settings) as run:
            assert run.wait(150) == 0, run.text()
    one = without_times(read_rows(tmp_path / "one"))
    assert one == without_times(read_rows(tmp_path / "two"))
    assert [row["staleness/max"] for row in one] == [0, 1, 2] + [3] * 9
    with Run(tmp_path / "three", *settings) as run:
        run.wait_for(run.has_checkpoint, 120, "checkpoint")
        run.members()["learner 1"].kill()
        assert run.wait(20) == 1
    with Run(tmp_path / "three", resume=True) as run:
        assert run.wait(150) == 0, run.text()
    assert without_what_a_crash_changes(read_rows(tmp_path / "three")) == without_what_a_crash_changes(one)


ONE_RANK = ("launch.learner_ranks=1", "parallel.tensor=1")


@pytest.mark.slow
def test_recorded_norms_change_no_row_of_a_run(tmp_path: Path) -> None:
    """Clips, at a lag of 2, every bit of every other number."""
    settings = (
        *ONE_RANK,
        "algorithm.method=grpo",
        "staleness.lag=exact",
        "staleness.max_staleness=2",
        "train.steps=10",
        "train.eval_every=5",
    )
    rows = {}
    for recorded in ("false", "true"):
        with Run(tmp_path / recorded, *settings, f"algorithm.record_norms={recorded}") as run:
            assert run.wait(150) == 0, run.text()
        rows[recorded] = without_times(read_rows(tmp_path / recorded))
    for before, after in zip(rows["false"], rows["true"], strict=True):
        norms = {key: (before.pop(key), after.pop(key)) for key in list(before) if "norm/trajectory" in key}
        assert before == after
        assert [value for value, _ in norms.values()] == [None, None]
        assert 0 < norms["grad_norm/trajectory_mean"][1] <= norms["grad_norm/trajectory_max"][1]


@pytest.mark.slow
def test_kill_9_between_two_updates_of_a_batch_trains_every_prompt_once(tmp_path: Path) -> None:
    settings = (
        *ONE_RANK,
        "train.groups_per_step=6",
        "train.updates_per_batch=3",
        "staleness.max_staleness=4",
        "train.steps=18",
        "train.eval_every=9",
        "checkpoint.every=4",
    )
    with Run(tmp_path / "run", *settings) as run:
        run.wait_for(lambda: newest_checkpoint(run.run_dir) > 0, 150, "checkpoint")
        run.members()["learner 0"].kill()
        assert run.wait(20) == 1
    begun = newest_checkpoint(tmp_path / "run")
    with Run(tmp_path / "run", resume=True) as run:
        assert run.wait(150) == 0, run.text()
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(18)) and begun % 3
    assert all(row["step"] % 3 <= row["staleness/max"] <= 4 for row in rows if row["step"] < begun)
    # from the checkpoint on the servers had its version, in the midst of a batch
    assert all(min(row["step"] % 3, row["step"] - begun) <= row["staleness/max"] <= 4 for row in rows[begun:])
    assert rows[-1]["rollouts/trained"] == 18 * 2 * 8 and rows[-1]["eval/version"] == 18
    with closing(sqlite3.connect(tmp_path / "run" / "rollouts.sqlite")) as store:
        trained = store.execute("SELECT cursor_index FROM groups WHERE current = 1 AND state = 'trained'").fetchall()
    assert sorted(position for (position,) in trained) == list(range(36))


VICTIMS = ("learner 0", "learner 1", "orchestrator 0", "server 0", "supervisor")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_of_each_process_leaves_no_orphan_and_the_run_resumes(tmp_path: Path) -> None:
    """One run, five deaths: every attempt writes a checkpoint of its own before one of its processes is killed."""
    settings = ("train.steps=40", "checkpoint.every=5", "train.eval_every=0", "rollout.max_restarts=0")
    for number, victim in enumerate(VICTIMS):
        before = newest_checkpoint(tmp_path / "run")
        with Run(tmp_path / "run", *(() if number else settings), resume=number > 0) as run:
            run.wait_for(lambda least=before: newest_checkpoint(run.run_dir) > least, 150, f"checkpoint for {victim}")
            kill_9(run, victim)
    with Run(tmp_path / "run", resume=True) as run:
        assert run.wait(150) == 0, run.text()
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(40))
    assert rows[-1]["rollouts/trained"] == 40 * 64


def newest_checkpoint(run_dir: Path) -> int:
    """Step of the newest complete one; 0 when there is none."""
    found = (run_dir / "checkpoints").glob("step_*/manifest.json")
    return max((int(path.parent.name.removeprefix("step_")) for path in found), default=0)


def kill_9(run: Run, victim: str) -> None:
    """Nothing of the run is left within 10 s, and its last line names who died, how, and the log."""
    members = run.members()
    assert set(members) == {"learner 0", "learner 1", "orchestrator 0", "server 0"}, victim
    said, killed = len(run.text()), time.monotonic()
    run.process.kill() if victim == "supervisor" else members[victim].kill()
    code = run.wait(10)
    while run.left_over() and time.monotonic() < killed + 10:
        time.sleep(0.1)
    assert run.left_over() == [], victim
    if victim == "supervisor":
        return
    role, rank = victim.split()
    last = [line for line in run.text()[said:].splitlines() if line.startswith("vcpo: error:")]
    assert code == 1 and len(last) == 1, run.text()
    named = {"learner": f"learner rank {rank}", "server": f"rollout server {rank}"}.get(role, role)
    assert named in last[0]
    assert "SIGKILL" in last[0] or "-9" in last[0]
    assert f"{role}.{rank}.log" in last[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_signals_checkpoint_and_a_resume_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM, then SIGUSR1 to every process, as a batch system sends it; then one rank instead of two."""
    settings = ("train.steps=40", "checkpoint.every=0", "train.eval_every=0", "staleness.max_staleness=1")
    metrics, number = tmp_path / "run/metrics.jsonl", 0
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)):
        with Run(tmp_path / "run", *(() if number else settings), resume=number > 0) as run:
            run.wait_for(lambda least=number + 2: metrics.exists() and len(run.rows()) >= least, 150, "two more steps")
            if sent == signal.SIGUSR1:
                for process in run.members().values():
                    process.send_signal(sent)
            run.signal(sent)
            assert run.wait(60) == code
            assert run.left_over() == []
            assert f"stopped by {sent.name}" in run.text()
            number = len(run.rows())
            assert newest_checkpoint(run.run_dir) == number  # of the step that was being taken
    assert number < 40, "too fast a machine for this test: raise train.steps"
    with Run(tmp_path / "run", "launch.learner_ranks=1", "parallel.tensor=1", resume=True) as run:
        assert run.wait(150) == 0, run.text()
        assert f"resuming from step_{number}" in run.text()
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(40))
    assert rows[-1]["rollouts/trained"] == 40 * 64


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with Run(tmp_path / "run", "train.steps=1000") as run:
        run.wait_for(lambda: "learner 1" in run.members(), 60, "learner")
        run.signal(signal.SIGTERM)
        # two that came before either was looked at would be one
        run.wait_for(lambda: "SIGTERM: stopping" in run.text(), 60, "answer to the first signal")
        run.signal(signal.SIGTERM)
        assert run.wait(5) == 143
        assert run.left_over() == []


@pytest.mark.slow
def test_a_finished_run_of_two_ranks_goes_on_with_one_and_ends_with_a_line_when_it_is_done(
    short_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(short_run, tmp_path / "run")
    layout = ("train.steps=26", "train.eval_every=0", "parallel.tensor=1", "launch.learner_ranks=1")
    with Run(tmp_path / "run", *layout, resume=True) as run:
        assert run.wait(200) == 0, run.text()
        assert "resuming from step_24" in run.text()
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(26))
    assert all(abs(row["kl/behavior"]) < 0.1 for row in rows[24:])  # servers and learner hold the same policy
    with Run(tmp_path / "run", "train.steps=3", resume=True) as run:
        assert run.wait(60) == 2 and "26 steps are done already" in run.text()
    with Run(tmp_path / "run", resume=True) as run:
        assert run.wait(60) == 0 and "already finished" in run.text()
    assert read_rows(tmp_path / "run") == rows
