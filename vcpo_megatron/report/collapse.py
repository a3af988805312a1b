"""Whether a run fell from what it had reached, and which of its numbers turned first.

The outcome is ``eval/accuracy`` where there are enough evaluations, else ``reward/mean``, smoothed by a running
median. The fall is its largest drawdown, from a peak to the lowest value after it, if that is at least half of what it
had risen to the peak, a quarter of its whole range, and eight times its noise: that of so many held-out samples, or
what differences of neighbours show. It stood last in its range where it was last within a tenth of the drop (or three
times its noise) of the peak; it turned at the next value.

A number that may tell why (ESS, KL, weights, norms) turned where it left its earlier range and stayed out for
``HOLD`` values: the range of its running median over the second and third quarter of the steps up to the outcome's last
good one, a fifth wider on the side that is bad for it. The first quarter is left out, where everything moves; what
happens from the fourth on, to the lowest point, is what is looked at. A value that is not finite is out of any range. A
number may be bad long before, and so never leave a range: what ``HEALTHY`` says of its median until then is told, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

OUTCOMES = {"eval/accuracy": 8, "reward/mean": 40}  # name -> values that it needs
#: Number -> the sides on which it is bad: -1 below, 1 above.
SUSPECTS: Mapping[str, tuple[int, ...]] = {
    "ess/ratio": (-1,),
    "kl/behavior": (1,),
    "weight/mean": (-1, 1),
    "weight/max": (1,),
    "grad_norm/total": (1,),
    "grad_norm/trajectory_mean": (1,),
    "grad_norm/trajectory_max": (1,),
    "mismatch/mean": (1,),
    "staleness/mean": (1,),
    "reward/mean": (-1,),
}
#: Number -> its healthy values, as docs/metrics.md has them; a mean weight has no bound there but near 1.
HEALTHY: Mapping[str, tuple[float, float]] = {
    "ess/ratio": (0.6, 1.0),
    "kl/behavior": (-math.inf, 0.1),
    "weight/mean": (0.5, 2.0),
}
#: Values in a row outside of a range that count as having left it.
HOLD = 5
_WINDOW = 5
_WIDER = 0.2


@dataclass(frozen=True)
class Departure:
    """``name`` left its range, ``low`` to ``high`` (of steps ``since`` to ``until``), at ``step``, where its median was
    ``value``; nan for one that is not finite."""

    name: str
    step: int
    value: float
    low: float
    high: float
    since: int
    until: int


@dataclass(frozen=True)
class Fall:
    """``outcome`` was at ``peak`` at ``peak_step``, last in its range at ``good_step`` (``good``), below it from
    ``step`` on, and lowest, ``trough``, at ``trough_step``. ``back``: the step at which it was in its range again, if
    it was. ``departures``: the numbers that left their range until then, the first one first. ``bad``: those whose
    median from the second quarter of the steps up to ``good_step`` was not healthy, with it."""

    outcome: str
    peak: float
    peak_step: int
    good: float
    good_step: int
    step: int
    trough: float
    trough_step: int
    back: int | None
    departures: tuple[Departure, ...]
    bad: Mapping[str, float]


def outcome_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The number that says how well the run does; None where no number has enough values."""
    for name, needed in OUTCOMES.items():
        if len(_column(rows, name, finite=True)[0]) >= needed:
            return name
    return None


def find_fall(rows: Sequence[Mapping[str, Any]]) -> Fall | None:
    """The largest fall of a run by its rows of ``metrics.jsonl``; None where there is none."""
    outcome = outcome_of(rows)
    if outcome is None:
        return None
    steps, values = _column(rows, outcome, finite=True)
    window = max(len(values) // 40, 1 if outcome == "eval/accuracy" else 5)
    level = running_median(values, window)
    drawdown = np.maximum.accumulate(level) - level
    low = int(drawdown.argmax())
    top = int(level[: low + 1].argmax())
    drop, noise = float(drawdown[low]), _noise(rows, outcome, values, window)
    rise = float(level[top] - level[: top + 1].min())
    if drop <= 0 or drop < max(rise / 2, 8 * noise, 0.25 * float(values.max() - values.min())):
        return None
    within = float(level[top]) - max(drop / 10, min(3 * noise, drop / 3))
    good = top + int(np.flatnonzero(level[top : low + 1] >= within)[-1])
    again = np.flatnonzero(level[low:] >= within)
    return Fall(
        outcome=outcome,
        peak=float(level[top]),
        peak_step=int(steps[top]),
        good=float(level[good]),
        good_step=int(steps[good]),
        step=int(steps[good + 1]),
        trough=float(level[low]),
        trough_step=int(steps[low]),
        back=int(steps[low + again[0]]) if len(again) else None,
        departures=tuple(_departures(rows, outcome, int(steps[good]), int(steps[low]))),
        bad=_bad(rows, int(steps[good])),
    )


def in_words(fall: Fall | None, outcome: str | None) -> list[str]:
    """What a reader should know first, in sentences."""
    if outcome is None:
        return ["There are too few steps to say whether it fell."]
    if fall is None:
        return [f"No collapse: {outcome} never lost half of what it had gained."]
    end = (
        f"and was back in its range at step {fall.back}" if fall.back is not None else "and was not in that range again"
    )
    told = [
        f"{'Dip' if fall.back is not None else 'Collapse'}: {fall.outcome} rose to {fall.peak:.4g} (step "
        f"{fall.peak_step}), was last near that at step {fall.good_step} ({fall.good:.4g}), below it from step "
        f"{fall.step} on, lowest at step {fall.trough_step} ({fall.trough:.4g}), {end}."
    ]
    told += _first_to_turn(fall)
    if fall.bad:
        values = ", ".join(f"{name} {value:.4g} ({_healthy(name)})" for name, value in fall.bad.items())
        told.append(
            f"Not healthy long before, by medians of steps {fall.good_step // 4} to {fall.good_step}: {values}."
        )
    return told


def _healthy(name: str) -> str:
    low, high = HEALTHY[name]
    return f"healthy up to {high:g}" if low == -math.inf else f"healthy from {low:g} to {high:g}"


def _first_to_turn(fall: Fall) -> list[str]:
    told = []
    if not fall.departures:
        return ["None of the numbers that usually tell left its earlier range before the lowest point."]
    first, *others = fall.departures
    lead = fall.step - first.step
    away = f"{abs(lead)} step{'s' * (abs(lead) != 1)}"
    when = f"{away} before" if lead > 0 else f"{away} after" if lead < 0 else "the very one at which"
    told.append(
        f"First to turn: {first.name}, which left its earlier range at step {first.step}, {when} {fall.outcome} was "
        f"seen to fall: {first.value:.4g}, where it had been {first.low:.4g} to {first.high:.4g} in steps "
        f"{first.since} to {first.until}."
    )
    if others:
        told.append("Then " + ", ".join(f"{one.name} (step {one.step})" for one in others) + ".")
    return told


def running_median(values: np.ndarray, window: int) -> np.ndarray:
    """The median of ``window`` values around each, an odd number of 51 at most; at the ends of those that there are."""
    window = min(max(window, 1), 51) | 1
    if window == 1 or len(values) < window:
        return values
    half = window // 2
    middle = np.median(np.lib.stride_tricks.sliding_window_view(values, window), axis=1)
    first = [float(np.median(values[: half + 1 + i])) for i in range(half)]
    last = [float(np.median(values[-(window - 1 - i) :])) for i in range(half)]
    return np.concatenate([first, middle, last])


def _noise(rows: Sequence[Mapping[str, Any]], outcome: str, values: np.ndarray, window: int) -> float:
    """The standard deviation of a smoothed value about its trend: the largest that a mean of so many samples of 0 or 1
    has, else from differences of neighbours (their median: a jump does not count)."""
    samples = _column(rows, "eval/samples", finite=True)[1]
    if outcome == "eval/accuracy" and len(samples) and samples.min() > 0:
        return 0.5 / math.sqrt(samples.min())
    if len(values) < 2:
        return 0.0
    single = float(np.median(np.abs(np.diff(values)))) * 1.4826 / math.sqrt(2)
    return single * (1.25 / math.sqrt(window) if window > 1 else 1.0)  # 1.25: a median is that much wider than a mean


def _bad(rows: Sequence[Mapping[str, Any]], good: int) -> dict[str, float]:
    """Numbers of ``HEALTHY`` whose median before the fall is outside of it."""
    found = {}
    for name, (low, high) in HEALTHY.items():
        steps, values = _column(rows, name, finite=True)
        before = values[(steps >= good // 4) & (steps <= good)]
        if len(before) >= HOLD and not low <= (median := float(np.median(before))) <= high:
            found[name] = median
    return found


def _departures(rows: Sequence[Mapping[str, Any]], outcome: str, good: int, trough: int) -> list[Departure]:
    since, until = good // 4, 3 * good // 4
    found = [
        departure
        for name, sides in SUSPECTS.items()
        if name != outcome and (departure := _departure(rows, name, sides, since, until, trough)) is not None
    ]
    return sorted(found, key=lambda one: one.step)


def _departure(
    rows: Sequence[Mapping[str, Any]], name: str, sides: Iterable[int], since: int, until: int, end: int
) -> Departure | None:
    steps, values = _column(rows, name, finite=False)
    values = np.where(np.isfinite(values), values, np.inf)
    before = (steps >= since) & (steps < until) & np.isfinite(values)
    if before.sum() < HOLD:
        return None
    level = running_median(values, _WINDOW)
    usual = level[before & np.isfinite(level)]
    if not len(usual):
        return None
    low, high = float(usual.min()), float(usual.max())
    room = _WIDER * (high - low) + 1e-9 * max(abs(low), abs(high))
    out = np.isinf(level)
    for side in sides:
        out |= level > high + room if side > 0 else level < low - room
    at = _first_run(out & (steps >= until) & (steps <= end), HOLD)
    if at is None:
        return None
    value = float(level[at])
    return Departure(name, int(steps[at]), value if math.isfinite(value) else math.nan, low, high, since, until)


def _first_run(out: np.ndarray, length: int) -> int | None:
    """Where ``length`` true values in a row begin for the first time."""
    sums = np.convolve(out.astype(int), np.ones(length, int), mode="valid") if len(out) >= length else np.zeros(0)
    found = np.flatnonzero(sums == length)
    return int(found[0]) if len(found) else None


def _column(rows: Sequence[Mapping[str, Any]], name: str, *, finite: bool) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the rows that have ``name``, in order of step."""
    known = sorted(
        (row["step"], float(value))
        for row in rows
        if type(row.get("step")) is int and isinstance(value := row.get(name), int | float)
        if not finite or math.isfinite(value)
    )
    steps = np.array([step for step, _ in known], dtype=np.int64)
    return steps, np.array([value for _, value in known], dtype=np.float64)
