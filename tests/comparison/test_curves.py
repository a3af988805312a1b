"""Curves with bands, and which of them stand in one chart, by literals."""

from __future__ import annotations

from tests.comparison.records import record
from vcpo_megatron.comparison.curves import (
    Curve,
    accuracy_over_cost,
    accuracy_over_steps,
    finals_over_lags,
    finals_over_rates,
    metric_over_steps,
    name_of,
    panels,
)
from vcpo_megatron.comparison.summary import Setting, by_setting

TWO = [record(), record(seed=1, accuracy=(0.1, 0.2, 0.7), process_seconds=(12.0, 14.0, 16.0, 20.0))]


def test_accuracy_over_steps_and_over_cost() -> None:
    means = {"mean": (0.2, 0.4, 0.8), "low": (0.1, 0.2, 0.7), "high": (0.3, 0.6, 0.9)}
    assert accuracy_over_steps("a", TWO) == Curve("a", (0.0, 2.0, 4.0), **means)
    assert accuracy_over_cost("a", TWO) == Curve("a", (0.0, 13.0, 18.0), **means)


def test_a_curve_has_what_all_seeds_have() -> None:
    shorter = record(seed=2, evaluated=(0, 2), accuracy=(0.3, 0.6), process_seconds=(10.0, None, None, None))
    assert accuracy_over_steps("a", [*TWO, shorter]).xs == (0.0, 2.0)
    assert accuracy_over_cost("a", [*TWO, shorter]).xs == (0.0,)
    assert accuracy_over_steps("a", []).xs == ()


def test_a_metric_in_windows_of_ten_steps() -> None:
    steps = tuple(range(25))
    series = {"kl/behavior": (*(1.0,) * 10, *(None,) * 5, *(3.0,) * 10)}
    run = record(step=steps, process_seconds=(None,) * 25, series=series)
    assert metric_over_steps("a", [run], "kl/behavior") == Curve("a", (9.0, 19.0), (1.0, 3.0), (1.0, 3.0), (1.0, 3.0))
    assert metric_over_steps("a", [run], "ess/ratio").xs == ()


def test_a_control_stands_beside_every_lag() -> None:
    runs = [record("a", lag=lag) for lag in (16, 64)] + [record("b", lag=64), record("sync", lag=0)]
    a16, a64, b64, sync = (Setting(run.method, run.lag, 1e-3, 4) for run in runs)
    assert panels(by_setting(runs)) == [
        (64, 1e-3, [a64, b64, sync]),
        (16, 1e-3, [a16, b64, sync]),
    ]
    assert panels(by_setting([runs[1], runs[3]])) == [(64, 1e-3, [a64, sync])]
    assert (name_of(a64, lag=64), name_of(sync, lag=64)) == ("a", "sync, lag 0")


def test_finals_over_lags_and_rates() -> None:
    runs = [record(lag=lag, accuracy=(acc,) * 3) for lag, acc in ((64, 0.25), (16, 0.75))]
    runs += [record(lag=16, seed=1, accuracy=(0.5,) * 3), record("b", rate=2.0)]
    (only,) = finals_over_lags(by_setting(runs), 0.9)
    assert only == Curve("vcpo, rate 0.001", (16, 64), (0.625, 0.25), (0.5, 0.25), (0.75, 0.25))
    assert finals_over_rates(by_setting(runs), 0.9) == []
