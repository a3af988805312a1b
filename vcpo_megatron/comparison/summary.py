"""What one run comes to in a few numbers, and what several seeds come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .results import RunRecord
from .turning import first_to_turn, turning_point

#: The final accuracy is the mean of so many last evaluations.
LAST = 3
#: Extremes of what differs much from step to step are those of means over so many steps.
WINDOW = 10


@dataclass(frozen=True)
class RunSummary:
    """Numbers of one run; None where it has none.

    final         mean accuracy of the ``LAST`` evaluations; best: the highest of one
    turned        optimizer steps before the evaluation at which it turned (``turning``); first: the number that did so
                  first
    steps_to, process_seconds_to   until the first evaluation that reached the target
    process_seconds_a_step, seconds_a_step   of all its steps: processor time with start and evaluations over steps, and
                  the median time from one step's end to the next
    ess, ess_low, weight_low, kl_high, norm_high   mean ESS ratio; lowest ESS ratio, lowest mean weight, highest KL and
                  gradient norm, of means over ``WINDOW`` steps
    """

    final: float | None
    best: float | None
    turned: int | None
    first: str | None
    steps_to: int | None
    process_seconds_to: float | None
    process_seconds_a_step: float | None
    seconds_a_step: float | None
    ess: float | None
    ess_low: float | None
    weight_low: float | None
    kl_high: float | None
    norm_high: float | None


def summary_of(record: RunRecord, target: float) -> RunSummary:
    """The numbers of ``record``; ``target``: an accuracy."""
    accuracy = record.accuracy
    reached = next((i for i, value in enumerate(accuracy) if value >= target), None)
    turned = turning_point(accuracy)
    steps_to = None if reached is None else record.evaluated[reached]
    spent = [seconds for seconds in record.process_seconds if seconds is not None]
    whole = spent and len(spent) == len(record.process_seconds)
    windows = {name: means(record.series.get(name, ()), WINDOW) for name in _EXTREMES}
    return RunSummary(
        final=_mean(accuracy[-LAST:]),
        best=max(accuracy, default=None),
        turned=None if turned is None else record.evaluated[turned],
        first=first_to_turn(record),
        steps_to=steps_to,
        process_seconds_to=_spent_until(record, steps_to),
        process_seconds_a_step=spent[-1] / len(spent) if whole else None,
        seconds_a_step=_median(record.series.get("time/step", ())),
        ess=_mean(_known(record.series.get("ess/ratio", ()))),
        **{field: pick(windows[name], default=None) for name, (field, pick) in _EXTREMES.items()},
    )


@dataclass(frozen=True)
class Setting:
    """What runs that differ in the seed alone have in common."""

    method: str
    lag: int
    rate: float
    steps: int


def by_setting(records: Sequence[RunRecord]) -> dict[Setting, list[RunRecord]]:
    """Records of each setting, the last one of each seed, in the order of their first."""
    seeds: dict[Setting, dict[int, RunRecord]] = {}
    for record in records:
        setting = Setting(record.method, record.lag, record.rate, record.steps)
        seeds.setdefault(setting, {})[record.seed] = record
    return {setting: list(of.values()) for setting, of in seeds.items()}


#: Metric -> (field, which of its means).
_EXTREMES = {
    "ess/ratio": ("ess_low", min),
    "weight/mean": ("weight_low", min),
    "kl/behavior": ("kl_high", max),
    "grad_norm/total": ("norm_high", max),
}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _median(values: Iterable[float | None]) -> float | None:
    known = sorted(_known(values))
    return known[len(known) // 2] if known else None


def means(values: Sequence[float | None], window: int) -> list[float]:
    """Means over ``window`` successive values; what is None is left out of the row first."""
    known = _known(values)
    return [math.fsum(known[end - window : end]) / window for end in range(window, len(known) + 1)]


def _spent_until(record: RunRecord, steps: int | None) -> float | None:
    """Process seconds when ``steps`` optimizer steps were done."""
    if steps is None:
        return None
    by_step: Mapping[int, float | None] = dict(zip(record.step, record.process_seconds, strict=True))
    return 0.0 if steps == 0 else by_step.get(steps - 1)


@dataclass(frozen=True)
class Band:
    """A number over seeds: mean, least and greatest of ``known`` of ``of`` runs; the others have none."""

    mean: float
    low: float
    high: float
    known: int
    of: int


def band(values: Sequence[float | None]) -> Band | None:
    """None where no run has the number."""
    known = _known(values)
    if not known:
        return None
    return Band(math.fsum(known) / len(known), min(known), max(known), len(known), len(values))
