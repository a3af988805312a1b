"""Adaptive staleness: literal answers, and the bound, capacity and liveness of paced runs in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.orchestrator.fake_run import FakeRun, config
from tests.orchestrator.modes.test_staleness import _Run
from vcpo_megatron.orchestrator.modes.pacing import Pacer
from vcpo_megatron.orchestrator.modes.staleness import StalenessBound

pytestmark = pytest.mark.timeout(120)


def lags(pacer: Pacer, ratios: list[float]) -> list[int]:
    found = []
    for ratio in ratios:
        pacer.observe(ratio)
        found.append(pacer.lag)
    return found


def test_it_halves_at_once_and_then_waits_for_the_effect() -> None:
    # 8 -> 4, then 9 steps until groups admitted under 8 are trained; 4 -> 2, then 5; 2 -> 1, then 3; 1 -> 0
    assert lags(Pacer(8, 0.5), [0.1] * 19) == [4] * 9 + [2] * 5 + [1] * 3 + [0, 0]


def test_it_grows_by_one_after_a_recovery() -> None:
    pacer = Pacer(4, 0.5)
    pacer.restore({"lag": 0, "average": 0.9, "until_change": 0})
    assert lags(pacer, [0.9] * 16) == [1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(("ratio", "lag"), [(0.5, 2), (0.54, 2), (0.56, 3), (0.49, 1)])
def test_it_rests_between_target_and_margin(ratio: float, lag: int) -> None:
    pacer = Pacer(4, 0.5)
    pacer.restore({"lag": 2, "average": ratio, "until_change": 0})
    pacer.observe(ratio)
    assert pacer.lag == lag


def test_what_is_not_finite_counts_as_none_and_the_state_comes_back() -> None:
    pacer = Pacer(6, 0.9)
    pacer.observe(math.nan)
    assert pacer.lag == 3
    other = Pacer(6, 0.9)
    other.restore(pacer.state())
    assert lags(other, [1.0] * 60) == lags(pacer, [1.0] * 60) and other.lag == 6
    smaller = Pacer(2, 0.9)
    smaller.restore({"lag": 5, "average": 1.0, "until_change": 0})
    assert smaller.lag == 2
    with pytest.raises(ValueError, match="target = 1.5"):
        Pacer(2, 1.5)


class _PacedRun(_Run):
    """The simulated run, admission paced by ratios that fall with the lag of what is trained."""

    pacer: Pacer
    gain: float = 0.3

    def admit(self) -> None:
        promised = self.bound
        self.bound = replace(promised, max_staleness=self.pacer.lag)
        try:
            super().admit()
        finally:
            self.bound = promised

    def handle(self, kind: str, what: object) -> None:
        if kind == "step":
            lag = max(self.version - group.version for group in self.in_training.values())
            self.pacer.observe(math.exp(-self.gain * lag) * self.rng.uniform(0.9, 1.0))
        super().handle(kind, what)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, 1, 4, 16])
@pytest.mark.parametrize("crash", [0.0, 0.003])
def test_paced_runs_keep_the_bound_waste_nothing_and_never_stop(k: int, crash: float) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        run = _PacedRun(
            StalenessBound(k, rng.choice([1, 3, 8])),
            rng,
            servers=rng.choice([1, 3]),
            slots=24,
            tail=rng.choice([0.2, 1.5]),
            fail=rng.choice([0.0, 0.1]),
            crash=crash,
        )
        run.pacer = Pacer(k, 0.5)
        run.gain = rng.choice([0.02, 0.3, 3.0])
        run.until(60)
        assert run.expired == []  # pacing throws nothing away
        trained = [group_id for _, group_id, _ in run.trained]
        assert len(set(trained)) == len(trained)
        assert set(trained) | run.lost | set(run.live) | set(run.in_training) == set(run.generated)
        assert 0 <= run.pacer.lag <= k


def test_the_lag_settles_where_the_ratio_is_kept() -> None:
    """A ratio of exp(-0.1 lag) is 0.5 at a lag of 7: far from both 0 and 16."""
    run = _PacedRun(StalenessBound(16, 4), random.Random(0), servers=2, slots=64, tail=0.5)
    run.pacer, run.gain = Pacer(16, 0.5), 0.1
    run.until(600)
    late = [step - group.version for step, _, group in run.trained if step > 200]
    assert 3 <= sum(late) / len(late) <= 8


def test_a_run_with_adaptive_staleness_logs_the_lag_and_keeps_it_over_a_resume(tmp_path: object) -> None:
    cfg = config(
        staleness={"max_staleness": 4, "adaptive": True, "adaptive_ess": 0.6},
        train={"steps": 8},
        checkpoint={"every": 4},
    )
    run = FakeRun(tmp_path, cfg)  # type: ignore[arg-type]
    run.learner.ess_ratio = 0.2
    assert run.run() == "run ended"
    assert [row["staleness/admitted"] for row in run.rows()] == [2] * 5 + [1] * 3
    kept = run.context.directory.manifest(8).orchestrator["pacer"]
    assert kept["lag"] == 1
    again = FakeRun(
        tmp_path,
        cfg.model_copy(update={"train": config(train={"steps": 10}).train}),
        attempt=2,  # type: ignore[arg-type]
        resume_step=8,
    )
    again.learner.ess_ratio = 1.0
    again.run()
    assert [row["staleness/admitted"] for row in again.rows()][8:] == [1, 2]
