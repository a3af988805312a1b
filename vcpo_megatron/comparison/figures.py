"""Pictures of a comparison, one SVG file each: accuracy over steps and over process seconds, what tells of a collapse,
and final accuracy over lags and rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..report.charts import Axis, Guide, Series, line_chart, standalone
from ..run.directory import write_atomically
from .curves import (
    Curve,
    Groups,
    accuracy_over_cost,
    accuracy_over_steps,
    finals_over_lags,
    finals_over_rates,
    metric_over_steps,
    name_of,
    panels,
)
from .results import RunRecord
from .summary import WINDOW, Setting

_ACCURACY = Axis("accuracy", low=0.0, high=1.0)
_STEPS = Axis("step", whole=True)
#: File name's beginning -> (metric, title, axis of its values).
_METRICS = {
    "ess": ("ess/ratio", "ESS ratio", Axis(low=0.0, high=1.0)),
    "weight": ("weight/mean", "mean weight", Axis(low=0.0)),
    "kl": ("kl/behavior", "KL(mu, pi) a token", Axis("nats")),
    "norm": ("grad_norm/total", "gradient norm", Axis(log=True)),
}

Maker = Callable[[str, Sequence[RunRecord]], Curve]


def write_figures(groups: Groups, folder: Path, *, target: float) -> list[Path]:
    """Write the pictures of ``groups`` into ``folder``; those of the same names are replaced. Their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, chart in charts(groups, target=target):
        paths.append(folder / f"{name}.svg")
        write_atomically(paths[-1], standalone(chart))
    return paths


def charts(groups: Groups, *, target: float) -> Iterator[tuple[str, str]]:
    """Names and SVG of every picture; one without a curve is left out."""
    guide = Guide(f"{target:g}", y=target)
    for lag, rate, settings in panels(groups):
        title, place = f"lag {lag}, rate {rate:g}", f"lag{lag}-rate{rate:g}"

        def curves(maker: Maker, settings: Sequence[Setting] = settings, lag: int = lag) -> list[Curve]:
            return [maker(name_of(setting, lag=lag), groups[setting]) for setting in settings]

        over = {
            "accuracy": (f"Accuracy, {title}", accuracy_over_steps, _STEPS),
            "accuracy-cost": (f"Accuracy over process-seconds, {title}", accuracy_over_cost, Axis("process-s")),
        }
        for stem, (heading, maker, x) in over.items():
            yield from _chart(f"{stem}-{place}", heading, curves(maker), x, _ACCURACY, [guide])
        for stem, (metric, heading, y) in _METRICS.items():

            def of_metric(label: str, runs: Sequence[RunRecord], metric: str = metric) -> Curve:
                return metric_over_steps(label, runs, metric)

            heading = f"{heading}, means over {WINDOW} steps, {title}"
            yield from _chart(f"{stem}-{place}", heading, curves(of_metric), _STEPS, y)
    lags, rates = finals_over_lags(groups, target), finals_over_rates(groups, target)
    yield from _chart("final-lags", "Final accuracy over the lag", lags, Axis("lag", whole=True), _ACCURACY, [guide])
    yield from _chart("final-rates", "Final accuracy over the rate", rates, Axis("rate", log=True), _ACCURACY, [guide])


def _chart(
    name: str, title: str, curves: Sequence[Curve], x: Axis, y: Axis, guides: Sequence[Guide] = ()
) -> Iterator[tuple[str, str]]:
    series = [
        Series(curve.label, curve.xs, curve.mean, color=color, band=(curve.low, curve.high), dots=len(curve.xs) <= 20)
        for color, curve in enumerate(curves)
    ]
    if any(curve.xs for curve in curves):
        yield name, line_chart(title, series, x=x, y=y, guides=guides, legend=True)
