"""Results as Markdown: a row for each method, lag and rate, with mean and band over its seeds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ..run.text import printable
from .results import RunRecord, newest
from .summary import LAST, WINDOW, RunSummary, Setting, band, by_setting, summary_of
from .turning import FALL

#: Column -> (field of the summary, format).
_ACCURACY = {
    "final": ("final", ".3f"),
    "best": ("best", ".3f"),
    "turned at": ("turned", ".0f"),
    "steps to {target:g}": ("steps_to", ".0f"),
    "process-s to {target:g}": ("process_seconds_to", ".0f"),
    "process-s a step": ("process_seconds_a_step", ".2f"),
    "s a step": ("seconds_a_step", ".2f"),
}
_NUMBERS = {
    "ESS": ("ess", ".2f"),
    "lowest ESS": ("ess_low", ".2f"),
    "lowest mean weight": ("weight_low", ".2f"),
    "highest KL a token": ("kl_high", ".2g"),
    "highest gradient norm": ("norm_high", ".2g"),
}


Summaries = Mapping[Setting, Sequence[RunSummary]]


def report(records: Sequence[RunRecord], digests: Collection[str] | None = None, *, target: float) -> str:
    """Tables of the runs that are done, those of ``digests`` where they are given, and a line for each other run."""
    chosen = selected(records, digests)
    if not chosen:
        return "No results yet.\n"
    kept = finished(records, digests)
    done = [record for record in chosen if record.status == "done"]
    settings = {setting: [summary_of(record, target) for record in of] for setting, of in kept.items()}
    superseded = [record for record in done if not any(record in of for of in kept.values())]
    parts = []
    if settings:
        parts += [_table(settings, _ACCURACY, target), _explained(target)]
        parts += [_table(settings, _NUMBERS, target, last="first to turn"), _NUMBERS_SAID]
    if rates := _best_rates(settings):
        parts.append(rates)
    others = [_other(record) for record in chosen if record.status != "done"]
    others += [f"- {record.label}: left out, since a newer run has another configuration" for record in superseded]
    if others:
        parts.append("\n".join(others))
    return "\n\n".join(parts) + "\n"


def selected(records: Sequence[RunRecord], digests: Collection[str] | None = None) -> list[RunRecord]:
    """The record that counts of each run, of those of ``digests`` where they are given."""
    return [record for record in newest(records).values() if digests is None or record.digest in digests]


def finished(records: Sequence[RunRecord], digests: Collection[str] | None = None) -> dict[Setting, list[RunRecord]]:
    """Those of them that are done, by setting, one a seed."""
    return by_setting([record for record in selected(records, digests) if record.status == "done"])


def _table(
    settings: Summaries, columns: Mapping[str, tuple[str, str]], target: float, *, last: str | None = None
) -> str:
    names = ["method", "lag", "rate", "steps", "seeds", *(name.format(target=target) for name in columns)]
    rows = [[*names, *([last] if last else [])]]
    rows.append(["---"] * len(rows[0]))
    for setting, runs in settings.items():
        row = [setting.method, str(setting.lag), f"{setting.rate:g}", str(setting.steps), str(len(runs))]
        row += [_cell([getattr(run, field) for run in runs], form) for field, form in columns.values()]
        if last:
            row.append(", ".join(f"`{run.first}`" for run in runs if run.first) or "-")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(values: Sequence[float | None], form: str) -> str:
    """ "0.98 (0.97-0.99)": mean and band; how many have the number where not all do."""
    over = band(values)
    if over is None:
        return "-"
    low, mean, high = (format(value, form) for value in (over.low, over.mean, over.high))
    text = mean if low == high else f"{mean} ({low}-{high})"
    return text if over.known == over.of else f"{text}, {over.known} of {over.of}"


def _explained(target: float) -> str:
    return (
        f"Mean over seeds, in brackets least and greatest. final: mean of the last {LAST} evaluations. turned at: "
        "optimizer steps before the evaluation from which on accuracy, smoothed over three, is more than "
        f"{FALL:g} below its best. to {target:g}: until the first evaluation that reached it. process-s: processor "
        "seconds of all processes of a run, starts and evaluations included."
    )


_NUMBERS_SAID = (
    f"ESS: mean over all steps. Lowest and highest: of means over {WINDOW} steps. first to turn: of runs that turned, "
    "the number that first left the range it had had before, as vcpo report --html tells it."
)


def _best_rates(settings: Summaries) -> str | None:
    """A table of each method's best rate at each lag that has several."""
    by_lag: dict[tuple[str, int, int], dict[float, Sequence[RunSummary]]] = {}
    for setting, runs in settings.items():
        by_lag.setdefault((setting.method, setting.lag, setting.steps), {})[setting.rate] = runs
    rows = list(_best_rows(by_lag))
    if not rows:
        return None
    head = ["method", "lag", "steps", "rates", "best rate", "final there"]
    table = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def _best_rows(by_lag: Mapping[tuple[str, int, int], Mapping[float, Sequence[RunSummary]]]) -> Iterator[list[str]]:
    for (method, lag, steps), rates in by_lag.items():
        finals = {rate: over for rate, runs in rates.items() if (over := band([run.final for run in runs]))}
        if len(finals) > 1:
            best = max(finals, key=lambda rate: finals[rate].mean)
            cell = _cell([run.final for run in rates[best]], ".3f")
            yield [method, str(lag), str(steps), ", ".join(f"{rate:g}" for rate in sorted(rates)), f"{best:g}", cell]


def _other(record: RunRecord) -> str:
    """A line of a run that is not in the tables."""
    done = len(record.step)
    return f"- {record.label}: {record.status} after {done} of {record.steps} steps: {printable(record.reason)}"
