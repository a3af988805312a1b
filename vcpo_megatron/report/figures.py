"""The charts of a report: which numbers stand together, for one run; for several, one number a chart, a line a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..observability.metrics import METRICS
from .charts import (
    PLOT_WIDTH,
    Axis,
    Guide,
    Interval,
    Series,
    line_chart,
    shares_chart,
    stacked_chart,
    timeline_chart,
)
from .collapse import Fall, running_median
from .runs import ReportedRun

_SHARE = Axis(low=0.0, high=1.0)
_LOG = Axis(log=True)
#: Values of a line up to which each gets a dot.
_MOST_DOTS = 60
#: Runs whose charts have a point a column of pixels; of more runs each has fewer.
_FINE_RUNS = 8
#: Trajectories of a timeline.
_MOST_BARS = 40
PHASES = ("generate", "tool", "wait", "train")


@dataclass(frozen=True)
class Figure:
    """``names`` of metrics, in one chart; ``bound``: key of the configuration that is drawn as a level line."""

    title: str
    names: tuple[str, ...]
    y: Axis = Axis()
    bound: str = ""


FIGURES = (
    Figure("Accuracy and reward", ("eval/accuracy", "reward/mean")),
    Figure("Effective sample size over N", ("ess/ratio", "ess/ratio_truncated"), _SHARE),
    Figure("KL from the behaviour policy, nats", ("kl/behavior",)),
    Figure("Importance weights", ("weight/max", "weight/mean"), _LOG, "algorithm.is_threshold"),
    Figure("Norms of trajectories", ("grad_norm/trajectory_max", "grad_norm/trajectory_mean"), _LOG),
    Figure("Norm of the gradient", ("grad_norm/total",), _LOG, "optimizer.clip_grad"),
    Figure("Learning rate", ("lr/effective",), Axis(low=0.0), "optimizer.lr"),
    Figure("Scale of the rate by ESS", ("ess/lr_scale",), _SHARE),
    Figure(
        "Staleness, versions",
        ("staleness/max", "staleness/p95", "staleness/mean", "staleness/token_mean", "staleness/admitted"),
        Axis(low=0.0),
        "staleness.max_staleness",
    ),
    Figure("Entropy, nats", ("entropy",), Axis(low=0.0)),
    Figure("Sampled tokens a trajectory", ("tokens/trajectory",), Axis(low=0.0)),
    Figure("Throughput, tokens a second", ("tokens/second",), Axis(low=0.0)),
    Figure("Seconds a step", ("time/step", "time/sync"), Axis(low=0.0)),
    Figure("Mismatch of learner and servers, nats", ("mismatch/max", "mismatch/mean"), _LOG),
    Figure("Groups without variance, fallbacks", ("groups/zero_variance", "baseline/fallbacks"), Axis(low=0.0)),
    Figure("Trajectories queued", ("rollouts/queued",), Axis(low=0.0)),
    Figure("Trajectories lost, since the start", ("rollouts/dropped", "rollouts/failed"), Axis(low=0.0)),
    Figure("Skipped steps", ("step/skipped",), _SHARE),
    Figure("Loss (no measure of progress)", ("loss",)),
)
#: In the stack of times, or counters that say nothing as a line.
_ELSEWHERE = {
    *("step", "policy_version", "eval/version", "eval/samples", "rollouts/generated", "rollouts/trained"),
    *("time/wait_batch", "time/forward_backward", "time/sync_stall", "tokens/trained"),
}
#: Name of a part of a step's time -> its metric; what is left of time/step is the last part.
TIME_PARTS: Mapping[str, str] = {
    "wait for a batch": "time/wait_batch",
    "forward and backward": "time/forward_backward",
    "copy of weights": "time/sync_stall",
}
REST = "rest"


def figures_of(runs: Sequence[ReportedRun]) -> list[Figure]:
    """Those of which a run has a number, and one a family for what ``metrics.jsonl`` holds beside them."""
    names = {name for run in runs for row in run.rows for name in row}
    there = {name for name in names if any(run.finite(name) for run in runs)}
    known = _ELSEWHERE | {name for figure in FIGURES for name in figure.names}
    others: dict[str, list[str]] = {}
    for name in sorted(there - known, key=lambda name: (list(METRICS).index(name) if name in METRICS else 999, name)):
        others.setdefault(name.split("/")[0], []).append(name)
    more = [Figure(f"Other: {family}", tuple(names[:6])) for family, names in others.items()]
    still = constants(runs)
    found = [replace(one, names=tuple(name for name in one.names if name in there)) for one in (*FIGURES, *more)]
    return [one for one in found if not still.keys() >= set(one.names)]


def constants(runs: Sequence[ReportedRun]) -> dict[str, float]:
    """Numbers that have one value throughout, in all steps of all runs: a sentence says as much as a chart."""
    values: dict[str, set[float]] = {}
    for run in runs:
        for name in {name for row in run.rows for name in row} - _ELSEWHERE:
            values.setdefault(name, set()).update(run.column(name)[1])
    known = {name: found for name, found in sorted(values.items()) if all(map(math.isfinite, found))}
    return {name: found.pop() for name, found in known.items() if len(found) == 1}


def chart_of(run: ReportedRun, figure: Figure, fall: Fall | None) -> str:
    """A chart of one run: a line a number."""
    series = [_series(name, run, name, i) for i, name in enumerate(figure.names)]
    return line_chart(
        figure.title, series, x=_steps([run]), y=figure.y, guides=_guides([run], figure, fall), legend=True
    )


def _steps(runs: Sequence[ReportedRun]) -> Axis:
    """The axis of all charts over steps: they can be compared by their place."""
    return Axis("step", low=0.0, high=max(1.0, *(float(run.last_step) for run in runs)), whole=True)


def charts_over_runs(runs: Sequence[ReportedRun], figure: Figure) -> Iterator[str]:
    """A chart a number, with a line a run: its running median, and faintly behind it each value."""
    columns = max(60, PLOT_WIDTH * _FINE_RUNS // max(len(runs), _FINE_RUNS))
    for name in figure.names:
        lines: list[Series] = []
        for color, run in enumerate(runs):
            line = _series(run.name, run, name, color)
            if not line.dots and len(line.ys) > _MOST_DOTS:
                lines.append(replace(line, faint=True))
                line = replace(line, ys=_medians(line.ys))
            if len(line.xs):
                lines.append(line)
        title = figure.title if len(figure.names) == 1 else f"{figure.title.partition(',')[0]}: {name}"
        guides = _guides(runs, figure, None) if name == figure.names[0] else []
        yield line_chart(title, lines, x=_steps(runs), y=figure.y, guides=guides, columns=columns, legend=True)


def _medians(values: Sequence[float]) -> Sequence[float]:
    """Running medians of the finite ones; nan stays where it is."""
    found = np.asarray(values, float).copy()
    known = np.isfinite(found)
    found[known] = running_median(found[known], len(found) // 40)
    return list(found)


def _series(label: str, run: ReportedRun, name: str, color: int) -> Series:
    steps, values = run.column(name)
    return Series(label, steps, values, color, dots=name.startswith("eval/") and len(steps) <= _MOST_DOTS)


def _guides(runs: Sequence[ReportedRun], figure: Figure, fall: Fall | None) -> list[Guide]:
    guides = [Guide(f"falls, step {fall.step}", x=fall.step)] if fall is not None else []
    bounds = {run.config.get(figure.bound) for run in runs} if figure.bound else set()
    if len(bounds) == 1 and (text := bounds.pop()) is not None:
        try:
            value = float(text)
        except ValueError:
            return guides
        if math.isfinite(value):
            guides.append(Guide(figure.bound, y=value))
    return guides


# --- trajectories -----------------------------------------------------------------------------


def log_ratio_chart(run: ReportedRun, fall: Fall | None) -> str:
    """Both tails of a batch's weights: extremes, 5 % and 95 %, and the median of the log ratios of each step."""
    return _spread(run, 1, "Log ratios of the trajectories of a step", (0, 5, 50, 95, 100), Axis(), fall)


def norm_chart(run: ReportedRun, fall: Fall | None) -> str:
    """The largest, 95 % and median norm of a trajectory of each step."""
    return _spread(run, 2, "Norms of the trajectories of a step", (50, 95, 100), _LOG, fall)


def length_chart(run: ReportedRun, fall: Fall | None) -> str:
    return _spread(run, 4, "Tokens after the prompt, a trajectory", (50, 95, 100), Axis(low=0.0), fall)


def _spread(run: ReportedRun, column: int, title: str, percents: tuple[int, ...], y: Axis, fall: Fall | None) -> str:
    """ "" where the store has no such number."""
    known = run.numbers[~np.isnan(run.numbers[:, column])]
    if not len(known):
        return ""
    steps, starts = np.unique(known[:, 0], return_index=True)
    groups = np.split(known[:, column], starts[1:])
    table = np.array([np.percentile(group, percents, method="nearest") for group in groups])
    names = {0: "least", 50: "median", 100: "largest"}
    lines = [
        Series(names.get(percent, f"{percent} %"), steps.tolist(), table[:, i].tolist(), i, dashed=percent in (5, 95))
        for i, percent in enumerate(percents)
    ]
    guides = [Guide(f"falls, step {fall.step}", x=fall.step)] if fall is not None else []
    return line_chart(title, lines, x=_steps([run]), y=y, guides=guides, legend=True)


# --- time -------------------------------------------------------------------------------------


def times_of_steps(run: ReportedRun) -> tuple[list[int], dict[str, list[float]], list[float]]:
    """(steps, seconds of each part, seconds in all), of the steps whose time is known; parts add up to the whole."""
    rows = [row for row in run.rows if _seconds(row, "time/step") is not None]
    total = [_seconds(row, "time/step") or 0.0 for row in rows]
    parts = {part: [_seconds(row, name) or 0.0 for row in rows] for part, name in TIME_PARTS.items()}
    known = [math.fsum(values) for values in zip(*parts.values(), strict=True)]
    parts[REST] = [max(0.0, whole - sum_) for whole, sum_ in zip(total, known, strict=True)]
    return [row["step"] for row in rows], parts, total


def _seconds(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def time_charts(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Where the time of all steps went, a bar a run; and step by step, a chart a run."""
    totals: dict[str, dict[str, float]] = {}
    charts = []
    for run in runs:
        steps, parts, total = times_of_steps(run)
        if not steps:
            continue
        totals[run.name] = {part: math.fsum(values) for part, values in parts.items()}
        title = "Seconds of each step" + (f": {run.name}" if len(runs) > 1 else "")
        charts.append(stacked_chart(title, steps, parts, x=_steps(runs), total=total))
    if totals:
        yield shares_chart("Where the time went, all steps", totals, unit="s")
    yield from charts


def timeline(run: ReportedRun, step: int) -> str:
    """When the trajectories of ``step`` were sampled, waited and were trained; "" where no times were recorded."""
    if run.store is None:
        return ""
    episodes = run.store.episode_times([step]).get(step, [])
    trained = run.store.step_times().get(step)
    if not episodes:
        return ""
    stride = max(1, math.ceil(len(episodes) / _MOST_BARS))
    begun = min(times.began for _, times in episodes)
    sampled = max(times.ended for _, times in episodes)
    # at a large lag a batch waits for much longer than it took to sample it
    cut = 0.0 if trained is None else max(0.0, trained[0] - sampled - 0.3 * (sampled - begun))
    rows = []
    for uid, times in episodes[::stride]:
        marks = [Interval(start - begun, end - begun, "generate") for start, end in times.answers]
        edges = [times.began, *(edge for pair in times.answers for edge in pair), times.ended]
        gaps = zip(edges[0::2], edges[1::2], strict=True)
        marks += [Interval(start - begun, end - begun, "tool") for start, end in gaps if end > start]
        if trained is not None:
            start, end = (max(edge, times.ended) - begun for edge in trained)
            marks.append(Interval(times.ended - begun, start - cut, "wait", start - (times.ended - begun)))
            marks.append(Interval(start - cut, end - cut, "train"))
        rows.append((uid, marks))
    left = f" ({len(rows)} of {len(episodes)})" if stride > 1 else ""
    shorter = f", {cut:.3g} s of wait left out" if cut else ""
    return timeline_chart(f"Step {step}{left}{shorter}", rows, PHASES, x=Axis("s", low=0.0))
