"""Whether a run fell, when, and which number turned first: literal series, and noise that is none."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.report.collapse import find_fall, in_words, outcome_of, running_median

#: Accuracy every 30 steps of runs at a lag of 64 versions: those that fell, and those that did not.
FELL = {
    "tis": [0.28, 0.79, 0.91, 0.94, 0.80, 0.90, 0.42, 0.18, 0.09, 0.09, 0.08],
    "slowly": [0.26, 0.51, 0.75, 0.90, 0.91, 0.99, 0.75, 0.82, 0.69, 0.81, 0.57],
    "late": [0.32, 0.76, 0.71, 0.93, 0.95, 0.97, 0.99, 0.99, 0.99, 0.68, 0.35],
}
STOOD = {
    "vcpo": [0.28, 0.71, 0.79, 0.90, 0.94, 0.96, 0.97, 0.96, 0.99, 0.99, 0.99],
    "wobbles": [0.27, 0.62, 0.72, 0.87, 0.92, 0.97, 0.85, 0.84, 0.95, 0.97, 0.98],
    "never learned": [0.26, 0.24, 0.25, 0.28, 0.27, 0.25, 0.23, 0.26, 0.25, 0.27, 0.26],
}


def rows_of(accuracy: list[float], **columns: list[float]) -> list[dict[str, Any]]:
    """A row a step, with an accuracy every 30 steps; ``columns`` have a value a step."""
    rows: list[dict[str, Any]] = [{"step": step} for step in range(30 * (len(accuracy) - 1) + 1)]
    for number, value in enumerate(accuracy):
        rows[30 * number] |= {"eval/accuracy": value, "eval/samples": 256}
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name.replace("_", "/", 1)] = value
    return rows


@pytest.mark.parametrize(
    ("name", "peak_step", "good_step", "step", "trough_step"),
    [("tis", 90, 150, 180, 300), ("slowly", 150, 150, 180, 300), ("late", 180, 240, 270, 300)],
)
def test_a_run_that_fell(name: str, peak_step: int, good_step: int, step: int, trough_step: int) -> None:
    fall = find_fall(rows_of(FELL[name]))
    assert fall is not None and fall.back is None
    assert (fall.peak_step, fall.good_step, fall.step, fall.trough_step) == (peak_step, good_step, step, trough_step)
    assert (fall.peak, fall.trough) == (max(FELL[name]), FELL[name][trough_step // 30])


@pytest.mark.parametrize("name", STOOD)
def test_a_run_that_did_not_fall(name: str) -> None:
    rows = rows_of(STOOD[name])
    assert find_fall(rows) is None and outcome_of(rows) == "eval/accuracy"
    (told,) = in_words(None, "eval/accuracy")
    assert_names(told, "No collapse", "eval/accuracy")


def test_a_run_that_came_back() -> None:
    fall = find_fall(rows_of([0.3, 0.6, 0.9, 0.9, 0.3, 0.2, 0.6, 0.9, 0.95]))
    assert fall is not None and (fall.good_step, fall.step, fall.trough_step, fall.back) == (90, 120, 150, 210)
    assert_names(in_words(fall, fall.outcome)[0], "Dip", "step 90", "step 120", "step 150", "step 210")


def test_which_number_turned_first() -> None:
    """KL leaves its range at step 160, ESS at 170, the norm never: in words, with the ranges of steps 37 to 112."""
    wave = [0.5 + 0.1 * math.sin(step / 3) for step in range(301)]
    kl = [0.02 if step < 160 else 0.5 for step in range(301)]
    ess = [value if step < 170 else 0.1 for step, value in enumerate(wave)]
    rows = rows_of(FELL["tis"], kl_behavior=kl, ess_ratio=ess, grad_norm_total=wave)
    for row in rows:
        row["grad_norm/total"] = row.pop("grad/norm_total")
    fall = find_fall(rows)
    assert fall is not None
    assert [(one.name, one.step, one.value) for one in fall.departures] == [
        ("kl/behavior", 160, 0.5),
        ("ess/ratio", 170, 0.1),
    ]
    assert (fall.departures[0].since, fall.departures[0].until) == (37, 112)
    assert fall.departures[1].low == pytest.approx(0.4, abs=0.01)
    told = in_words(fall, fall.outcome)
    assert_names(told[1], "kl/behavior", "step 160", "20 steps before", "0.5", "0.02")
    assert_names(told[2], "ess/ratio", "step 170")


def test_what_was_bad_long_before_is_told() -> None:
    ess = [0.2 + 0.01 * (step % 5) for step in range(301)]
    weights = [1.0] * 301
    fall = find_fall(rows_of(FELL["tis"], ess_ratio=ess, weight_mean=weights))
    assert fall is not None and fall.departures == () and fall.bad == {"ess/ratio": pytest.approx(0.22)}
    assert_names(in_words(fall, fall.outcome)[-1], "steps 37 to 150", "ess/ratio 0.22", "healthy from 0.6")


@pytest.mark.parametrize(
    ("value", "length", "found"), [(9.0, 2, False), (9.0, 12, True), (-9.0, 12, False), (math.nan, 12, True)]
)
def test_a_number_turns_when_it_stays_out_on_its_bad_side(value: float, length: int, found: bool) -> None:
    kl = [0.1 + 0.05 * math.sin(step / 2) for step in range(301)]
    kl[130 : 130 + length] = [value] * length
    fall = find_fall(rows_of(FELL["tis"], kl_behavior=kl))
    assert fall is not None
    assert [(one.name, one.step) for one in fall.departures] == ([("kl/behavior", 130)] if found else [])
    assert found or "None" in in_words(fall, fall.outcome)[1]


def test_the_reward_speaks_where_nothing_was_evaluated() -> None:
    noise = random.Random(0)
    means = [0.2] * 100 + [0.9] * 100 + [0.1] * 100
    rows = [{"step": step, "reward/mean": mean + noise.gauss(0, 0.06)} for step, mean in enumerate(means)]
    fall = find_fall(rows)
    assert fall is not None and fall.outcome == "reward/mean" and abs(fall.step - 200) <= 3
    assert find_fall(rows[:200]) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("steps", [40, 200, 2000])
def test_noise_is_no_fall(seed: int, steps: int) -> None:
    noise = random.Random(seed)
    rising = [0.3 + 0.4 * step / steps for step in range(steps)]
    for mean in ([0.3] * steps, rising):
        rows = [{"step": step, "reward/mean": value + noise.gauss(0, 0.06)} for step, value in enumerate(mean)]
        assert find_fall(rows) is None


@pytest.mark.parametrize(
    "rows", [[], [{"step": 0}], [{"step": 0, "reward/mean": math.nan}] * 50, [{"step": 0, "reward/mean": "x"}]]
)
def test_too_few_values_say_nothing(rows: list[dict[str, Any]]) -> None:
    assert find_fall(rows) is None and outcome_of(rows) is None
    assert_names(in_words(None, None)[0], "too few")


def test_a_running_median() -> None:
    import numpy as np

    values = np.array([1.0, 9.0, 2.0, 3.0, 8.0, 4.0])
    assert running_median(values, 3).tolist() == [5.0, 2.0, 3.0, 3.0, 4.0, 6.0]
    assert running_median(values, 0).tolist() == values.tolist()
