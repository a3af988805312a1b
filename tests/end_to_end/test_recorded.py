"""``algorithm.mismatch = "recorded"`` in real runs: where learner and servers agree only rounding changes; crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcpo_megatron.orchestrator.store.store import RolloutStore

from .running import Run, read_rows, without_times, without_what_a_crash_changes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECORDED = "algorithm.mismatch=recorded"
EXACT = (
    "staleness.lag=exact",
    "staleness.max_staleness=3",
    "train.steps=12",
    "train.eval_every=0",
    "train.groups_per_step=4",
    "checkpoint.every=4",
    "launch.learner_ranks=1",
    "parallel.tensor=1",
)


def check_records(run_dir: Path, *, sampled: bool) -> None:
    """Every trained trajectory holds what a version between its newest token's and its step's gave it; ``sampled``: the
    version that sampled it."""
    with RolloutStore.open_readonly(run_dir / "rollouts.sqlite") as store:
        for step in store.trained_steps():
            for one in (t for group in store.groups_trained_at(step) for t in group.trajectories):
                assert one.recorded is not None
                version = one.recorded.version.number
                assert one.newest_version <= version <= (one.newest_version if sampled else step)
                assert (one.recorded.logprobs[one.loss_mask] < 0).all()
                assert (one.recorded.logprobs[~one.loss_mask] == 0).all()


def test_in_exact_lag_only_rounding_changes_and_a_crash_changes_nothing(tmp_path: Path) -> None:
    for name, more in (("none", ()), ("recorded", (RECORDED,))):
        with Run(tmp_path / name, *EXACT, *more) as run:
            assert run.wait(200) == 0, run.text()
    plain, recorded = (without_times(read_rows(tmp_path / name)) for name in ("none", "recorded"))
    for one, other in zip(plain, recorded, strict=True):
        assert one.keys() - other.keys() <= {"ess/ratio_on_policy"}  # of mismatch, which the other's ratio has not
        for key, value in ((key, one[key]) for key in one.keys() & other.keys()):
            assert other[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (one["step"], key)
        assert other["mismatch/versions"] == 0 and other["mismatch/spread"] < 1e-4
        assert (other["lag/spread"] > 1e-3) is (other["step"] > 0)
    check_records(tmp_path / "recorded", sampled=True)
    with Run(tmp_path / "crashed", *EXACT, RECORDED) as run:
        run.wait_for(run.has_checkpoint, 150, "checkpoint")
        run.members()["learner 0"].kill()
        assert run.wait(20) == 1
    with Run(tmp_path / "crashed", resume=True) as run:
        assert run.wait(200) == 0, run.text()
    crashed = read_rows(tmp_path / "crashed")
    assert without_what_a_crash_changes(crashed) == without_what_a_crash_changes(recorded)


def test_in_bounded_lag_two_ranks_train_on_what_they_recorded_over_a_kill_9(tmp_path: Path) -> None:
    settings = ("train.steps=24", "train.eval_every=12", "checkpoint.every=6", "staleness.max_staleness=4", RECORDED)
    with Run(tmp_path / "run", *settings) as run:
        run.wait_for(run.has_checkpoint, 200, "checkpoint")
        run.members()["orchestrator 0"].kill()
        assert run.wait(20) == 1
    with Run(tmp_path / "run", resume=True) as run:
        assert run.wait(200) == 0, run.text()
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(24))
    assert rows[-1]["rollouts/trained"] == 24 * 64 and rows[-1]["rollouts/queued"] == 0
    for row in rows:
        assert 1 / 64 <= row["ess/ratio"] <= 1 and row["step/skipped"] == 0
        assert 0 <= row["mismatch/versions"] <= row["staleness/token_mean"] <= row["staleness/max"] <= 4
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"]
    check_records(tmp_path / "run", sampled=False)
