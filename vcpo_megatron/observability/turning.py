"""When a run turned from better to worse for good, and which of its numbers turned first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

#: A run has turned when its accuracy falls by more than this below its best, and stays there.
FALL = 0.1
#: A number has turned when its mean over so many steps ...
WINDOW = 10
#: ... is so many times what it was around the best evaluation, or less than one part in as many.
FACTOR = 2.0
#: Metrics that tell of a collapse -> whether they rise in it.
SIGNS: Mapping[str, bool] = {
    "ess/ratio": False,
    "weight/mean": False,
    "kl/behavior": True,
    "grad_norm/total": True,
    "grad_norm/trajectory_max": True,
}
#: Evaluations around the best one over which a number's usual value is taken.
_AROUND = 1


def smoothed(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours, of which the first and the last have one."""
    spans = (values[max(0, index - 1) : index + 2] for index in range(len(values)))
    return [math.fsum(span) / len(span) for span in spans]


def best_evaluation(accuracy: Sequence[float]) -> int:
    """Index of the best evaluation after smoothing, the first of equal ones; ValueError for none."""
    if not accuracy:
        raise ValueError("no evaluations, so none is the best")
    smooth = smoothed(accuracy)
    return smooth.index(max(smooth))


def turning_point(accuracy: Sequence[float], fall: float = FALL) -> int | None:
    """Index of the evaluation at which a run turned: the first after the best one from which on every smoothed accuracy
    is more than ``fall`` below the best smoothed one. None for a run that did not turn, or that came back."""
    smooth = smoothed(accuracy)
    turned = None
    for index in range(len(smooth) - 1, best_evaluation(accuracy) if accuracy else -1, -1):
        if not smooth[index] < max(smooth) - fall:
            break
        turned = index
    return turned


def first_to_turn(
    evaluated: Sequence[int],
    accuracy: Sequence[float],
    step: Sequence[int],
    series: Mapping[str, Sequence[float | None]],
) -> dict[str, int]:
    """Of a run that turned, the steps at which numbers of ``SIGNS`` did, by metric, the earliest first; {} for one that
    did not.

    evaluated  optimizer steps before each evaluation, ascending; accuracy: what it got
    step       index of each step; series: by metric, its value in each, None where it has none

    A number's usual value is its median over the steps from the evaluation before the best one to the one after it. It
    turned in the first step from there on, and before accuracy did, in which its mean over ``WINDOW`` steps is
    ``FACTOR`` times that in the direction of a collapse.
    """
    turned = turning_point(accuracy)
    if turned is None:
        return {}
    best = best_evaluation(accuracy)
    first = evaluated[max(0, best - _AROUND)]
    last = evaluated[min(best + _AROUND, len(evaluated) - 1)]
    found = {}
    for name, rises in SIGNS.items():
        values = [(index, value) for index, value in zip(step, series.get(name, ()), strict=False) if value is not None]
        usual = [value for index, value in values if first <= index < last]
        if usual and (level := statistics.median(usual)) > 0:
            left = _left(values, level, rises=rises, first=first, last=evaluated[turned])
            if left is not None:
                found[name] = left
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _left(values: Sequence[tuple[int, float]], level: float, *, rises: bool, first: int, last: int) -> int | None:
    for end in range(WINDOW, len(values) + 1):
        index = values[end - 1][0]
        mean = math.fsum(value for _, value in values[end - WINDOW : end]) / WINDOW
        if first <= index < last and (mean > level * FACTOR if rises else mean < level / FACTOR):
            return index
    return None
