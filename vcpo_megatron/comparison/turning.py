"""When a run turned from better to worse for good, by its evaluations, and which of its numbers turned first.

A report tells of the largest fall of one run, whether it came back or not (``report.collapse``). Here runs are
compared, so a run has turned by one measure for all: a fall of more than ``FALL`` that lasts to the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..report.collapse import find_fall
from .results import RunRecord

#: A run has turned when its accuracy falls by more than this below its best, and stays there.
FALL = 0.1


def smoothed(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours, of which the first and the last have one."""
    spans = (values[max(0, index - 1) : index + 2] for index in range(len(values)))
    return [math.fsum(span) / len(span) for span in spans]


def turning_point(accuracy: Sequence[float], fall: float = FALL) -> int | None:
    """Index of the evaluation at which a run turned: the first after the best one from which on every smoothed accuracy
    is more than ``fall`` below the best smoothed one. None for a run that did not turn, or that came back."""
    smooth = smoothed(accuracy)
    turned = None
    for index in range(len(smooth) - 1, -1, -1):
        if not smooth[index] < max(smooth) - fall:  # the best one at the latest
            break
        turned = index
    return turned


def first_to_turn(record: RunRecord) -> str | None:
    """Of a run that turned, the number that left its earlier range first (``report.collapse``); None for another run,
    and where no number did."""
    if turning_point(record.accuracy) is None:
        return None
    found = find_fall(rows_of(record))
    return found.departures[0].name if found is not None and found.departures else None


def rows_of(record: RunRecord) -> list[dict[str, Any]]:
    """Rows as those of the run's metrics.jsonl, of what is recorded: an evaluation stands in the step that follows it,
    the last one in the last step."""
    rows: dict[int, dict[str, Any]] = {step: {"step": step} for step in record.step}
    for name, values in record.series.items():
        for step, value in zip(record.step, values, strict=True):
            if value is not None:
                rows[step][name] = value
    samples = record.samples or (0,) * len(record.evaluated)
    for version, accuracy, of in zip(record.evaluated, record.accuracy, samples, strict=True):
        step = min(version, record.step[-1]) if record.step else version
        evaluation = {"eval/accuracy": accuracy, **({"eval/samples": of} if of else {})}
        rows.setdefault(step, {"step": step}).update(evaluation)
    return [rows[step] for step in sorted(rows)]
