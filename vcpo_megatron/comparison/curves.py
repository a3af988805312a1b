"""Curves of a comparison as numbers: accuracy over steps and over process seconds, metrics over steps, finals over lags
and rates. Each is a mean with a band over seeds; ``figures`` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .results import RunRecord
from .summary import WINDOW, Setting, band, summary_of

Groups = Mapping[Setting, Sequence[RunRecord]]


@dataclass(frozen=True)
class Curve:
    """``mean`` over seeds at each of ``xs``, with the least, ``low``, and the greatest, ``high``."""

    label: str
    xs: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def panels(groups: Groups) -> list[tuple[int, float, list[Setting]]]:
    """Lag, rate and settings of the charts that a comparison needs, so that each holds methods at one lag and rate.

    A method that is run at one lag alone (a control, such as synchronous training) stands beside them with its own. A
    chart whose settings all stand in one before it is left out.
    """
    found: list[tuple[int, float, list[Setting]]] = []
    lags = {method: {of.lag for of in groups if of.method == method} for method in {of.method for of in groups}}
    for rate in dict.fromkeys(setting.rate for setting in groups):
        of_rate = [setting for setting in groups if setting.rate == rate]
        for lag in sorted({setting.lag for setting in of_rate}, reverse=True):
            chosen = [setting for setting in of_rate if setting.lag == lag or len(lags[setting.method]) == 1]
            if not any(set(chosen) <= set(before) for _, _, before in found):
                found.append((lag, rate, chosen))
    return found


def name_of(setting: Setting, *, lag: int) -> str:
    """The method, with its lag where that is not ``lag``."""
    return setting.method if setting.lag == lag else f"{setting.method}, lag {setting.lag}"


def accuracy_over_steps(label: str, runs: Sequence[RunRecord]) -> Curve:
    """At the evaluations that all ``runs`` have."""
    by_step = [dict(zip(run.evaluated, run.accuracy, strict=True)) for run in runs]
    return _curve(label, [(float(step), [of[step] for of in by_step]) for step in _common(by_step)])


def accuracy_over_cost(label: str, runs: Sequence[RunRecord]) -> Curve:
    """The same over the mean of the process seconds until then; evaluations of which a run does not know them are left
    out."""
    by_step = [dict(zip(run.evaluated, run.accuracy, strict=True)) for run in runs]
    spent = [dict(zip(run.step, run.process_seconds, strict=True)) for run in runs]
    points: list[tuple[float, Sequence[float | None]]] = []
    for step in _common(by_step):
        seconds = [0.0 if step == 0 else of.get(step - 1) for of in spent]
        known = [value for value in seconds if value is not None]
        if len(known) == len(runs):
            points.append((math.fsum(known) / len(known), [of[step] for of in by_step]))
    return _curve(label, points)


def metric_over_steps(label: str, runs: Sequence[RunRecord], name: str) -> Curve:
    """``name`` in successive windows of steps, each by its mean, at its last step."""
    windows = []
    for run in runs:
        values = dict(zip(run.step, run.series.get(name, ()), strict=False))
        known = {step: value for step, value in values.items() if value is not None}
        of = {}
        for last in range(WINDOW - 1, len(run.step), WINDOW):
            inside = [known[step] for step in run.step[last - WINDOW + 1 : last + 1] if step in known]
            if inside:
                of[run.step[last]] = math.fsum(inside) / len(inside)
        windows.append(of)
    return _curve(label, [(float(step), [of[step] for of in windows]) for step in _common(windows)])


def finals_over_lags(groups: Groups, target: float) -> list[Curve]:
    """Final accuracy of each method and rate over the lags that it was run at; of those that were run at several."""
    return _finals(groups, target, lambda of: (of.lag, f"{of.method}, rate {of.rate:g}"))


def finals_over_rates(groups: Groups, target: float) -> list[Curve]:
    """The same over rates, of each method and lag."""
    return _finals(groups, target, lambda of: (of.rate, f"{of.method}, lag {of.lag}"))


def _finals(groups: Groups, target: float, place: Callable[[Setting], tuple[float, str]]) -> list[Curve]:
    points: dict[str, list[tuple[float, Sequence[float | None]]]] = {}
    for setting, runs in groups.items():
        at, label = place(setting)
        points.setdefault(label, []).append((at, [summary_of(run, target).final for run in runs]))
    return [_curve(label, sorted(of, key=lambda point: point[0])) for label, of in points.items() if len(of) > 1]


def _common(by_step: Sequence[Mapping[int, float]]) -> list[int]:
    return sorted(set(by_step[0]).intersection(*by_step[1:])) if by_step else []


def _curve(label: str, points: Sequence[tuple[float, Sequence[float | None]]]) -> Curve:
    bands = [(x, over) for x, values in points if (over := band(values)) is not None]
    return Curve(
        label,
        tuple(x for x, _ in bands),
        tuple(over.mean for _, over in bands),
        tuple(over.low for _, over in bands),
        tuple(over.high for _, over in bands),
    )
