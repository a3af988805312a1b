"""What runs did, as one HTML page that needs nothing beside itself: no network, no fonts, no script.

What a run or a policy wrote is escaped wherever it stands. A page of few runs is some hundred kilobytes; charts of
many runs have fewer points each, so that it stays below ``MOST_BYTES``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..run.directory import write_atomically
from . import charts, figures, samples
from .charts import COLORS, escaped, number_text
from .collapse import Fall, find_fall, in_words, outcome_of
from .learning import learning_table
from .runs import ReportedRun, defaults
from .terminal import steps_a_row, summed

MOST_BYTES = 5_000_000
#: Rows of the table of numbers, and tokens of all samples of a page.
_ROWS, _TOKENS = 40, 6_000
_MOST_REASONS = 20

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--card:#f6f8fa;--ink:#24292f;--dim:#5b6570;--edge:#d9dee3;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ground:#14181d;--card:#1b2027;--ink:#e6e9ec;--dim:#9aa4ae;--edge:#343b43;
--bad:#ff8594}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1500px;background:var(--ground);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}
h1{font-size:20px;margin:0 0 8px}h2{font-size:16px;margin:28px 0 8px;border-bottom:1px solid var(--edge)}
h3{font-size:14px;margin:12px 0 4px}h4{font-size:13px;margin:0}p{margin:4px 0}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:12px}
.card{background:var(--ground);border:1px solid var(--edge);border-radius:6px;padding:6px;min-width:0}
.verdict{border-left:4px solid var(--edge);padding:4px 10px;margin:8px 0;background:var(--card)}
.verdict.fell{border-color:var(--bad)}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:2px 10px 2px 0;text-align:right;vertical-align:top;border-bottom:1px solid var(--edge)}
th:first-child,td:first-child,td.text{text-align:left}td.text{overflow-wrap:anywhere;min-width:9em}
.swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.bar{display:inline-block;height:9px;background:var(--bad);border-radius:2px;min-width:1px}
.note,.dim{color:var(--dim)}nav{display:flex;flex-wrap:wrap;gap:0 12px}a{color:inherit}
.numbers{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,260px),1fr));gap:2px 24px;margin:0}
.numbers div{display:flex;justify-content:space-between;border-bottom:1px solid var(--edge)}
.numbers dd{margin:0;font-variant-numeric:tabular-nums}
.sample{border:1px solid var(--edge);border-radius:6px;padding:8px;margin:8px 0}
.sample pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0 0;font:12px/1.6 ui-monospace,Menlo,monospace}
.sample .prompt,.sample .observation,.sample em{color:var(--dim);font-style:normal}
.sample .observation{border-left:2px solid var(--edge);padding-left:4px}
.facts{display:flex;flex-wrap:wrap;gap:2px 12px;color:var(--dim);font-size:12px}.facts b{color:var(--ink)}
.colours{border:1px solid var(--edge);border-radius:6px;margin:6px 0;font-size:13px}.colours label{margin-right:14px}
summary{cursor:pointer;font-weight:600;margin:6px 0}
"""


def write_page(path: Path, runs: Sequence[ReportedRun]) -> int:
    """Write the page of ``runs``; its size in bytes. OSError, which names the file, leaves what was there."""
    text = page(runs)
    write_atomically(path, text)
    return len(text.encode())


def page(runs: Sequence[ReportedRun]) -> str:
    """The page; one run at least."""
    falls = [find_fall(run.rows) for run in runs]
    sections = (
        ("Numbers", _summary(runs)),
        ("Charts", _charts(runs, falls)),
        ("Time", _grid(figures.time_charts(runs)) or _note("time/step was not recorded.")),
        ("Losses", "".join(_losses(run, len(runs) > 1) for run in runs)),
        ("Trajectories in time", _timelines(runs, falls)),
        ("Samples", _samples(runs, falls)),
        ("Configuration", _configuration(runs)),
        ("Step by step", "".join(_steps(run, len(runs) > 1) for run in runs)),
    )
    title = escaped(", ".join(run.name for run in runs))
    links = "".join(f'<a href="#s{i}">{name}</a>' for i, (name, _) in enumerate(sections))
    body = "".join(f'<section id="s{i}"><h2>{name}</h2>{text}</section>' for i, (name, text) in enumerate(sections))
    verdicts = "".join(_verdict(run, fall, i, len(runs)) for i, (run, fall) in enumerate(zip(runs, falls, strict=True)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{title}</title>'
        f"<style>{_STYLE}{charts.STYLE}{samples.style()}{_swatches()}</style></head><body><h1>{title}</h1>"
        f"{verdicts}<nav>{links}</nav>{body}</body></html>\n"
    )


def _swatches() -> str:
    """The colours of runs outside of charts."""
    light, dark = (
        "".join(f".r{i}{{background:{color}}}" for i, color in enumerate(charts.colors(dark=dark)))
        for dark in (False, True)
    )
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _named(run: ReportedRun, number: int, count: int) -> str:
    swatch = f'<span class="swatch r{number % COLORS}"></span>' if count > 1 else ""
    return f"{swatch}{escaped(run.name)}"


def _note(text: str) -> str:
    return f'<p class="note">{escaped(text)}</p>'


def _grid(cards: Iterator[str]) -> str:
    found = "".join(f'<div class="card">{card}</div>' for card in cards if card)
    return f'<div class="grid">{found}</div>' if found else ""


def _verdict(run: ReportedRun, fall: Fall | None, number: int, count: int) -> str:
    told = [escaped(line) for line in in_words(fall, outcome_of(run.rows))]
    told[0] = f"<b>{told[0]}</b>" if fall is not None else told[0]
    notes = "".join(map(_note, run.notes))
    name = f"<h3>{_named(run, number, count)}</h3>" if count > 1 else ""
    fell = " fell" if fall is not None and fall.back is None else ""
    return f'<div class="verdict{fell}">{name}<p>{" ".join(told)}</p>{notes}</div>'


# --- numbers ----------------------------------------------------------------------------------


def _last(run: ReportedRun, name: str) -> str:
    steps, values = run.column(name)
    known = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return f"{number_text(known[-1][1])} (step {known[-1][0]})" if known else "-"


def _best(run: ReportedRun, name: str) -> str:
    steps, values = run.column(name)
    known = [(value, -step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return f"{number_text(max(known)[0])} (step {-max(known)[1]})" if known else "-"


def _of(reduce: Callable[[Sequence[float]], float], name: str) -> Callable[[ReportedRun], str]:
    def text(run: ReportedRun) -> str:
        values = run.finite(name)
        return number_text(reduce(values)) if values else "-"

    return text


def _steps_of(run: ReportedRun) -> str:
    wanted = run.config.get("train.steps")
    return f"{run.last_step + 1}" + (f" of {wanted}" if wanted else "")


def _speed(run: ReportedRun) -> str:
    pairs = [(row.get("tokens/trained"), row.get("time/step")) for row in run.rows]
    known = [(a, b) for a, b in pairs if isinstance(a, int | float) and isinstance(b, int | float)]
    known = [(a, b) for a, b in known if math.isfinite(a) and math.isfinite(b)]
    seconds = math.fsum(b for _, b in known)
    return number_text(math.fsum(a for a, _ in known) / seconds) if seconds > 0 else "-"


#: Line of the table -> what of ``metrics.jsonl`` it says.
SUMMARY: dict[str, Callable[[ReportedRun], str]] = {
    "steps": _steps_of,
    "accuracy, last": lambda run: _last(run, "eval/accuracy"),
    "accuracy, best": lambda run: _best(run, "eval/accuracy"),
    "reward, last": lambda run: _last(run, "reward/mean"),
    "reward, best": lambda run: _best(run, "reward/mean"),
    "ESS ratio, median": _of(statistics.median, "ess/ratio"),
    "ESS ratio, least": _of(min, "ess/ratio"),
    "scale of the rate, median": _of(statistics.median, "ess/lr_scale"),
    "KL, median": _of(statistics.median, "kl/behavior"),
    "KL, largest": _of(max, "kl/behavior"),
    "weight, mean, least": _of(min, "weight/mean"),
    "weight, largest": _of(max, "weight/max"),
    "gradient norm, median": _of(statistics.median, "grad_norm/total"),
    "gradient norm, largest": _of(max, "grad_norm/total"),
    "trajectory norm, largest": _of(max, "grad_norm/trajectory_max"),
    "staleness, mean": _of(statistics.fmean, "staleness/mean"),
    "staleness, largest": _of(max, "staleness/max"),
    "tokens a second": _speed,
    "seconds in all": _of(math.fsum, "time/step"),
    "skipped steps": _of(math.fsum, "step/skipped"),
    "trained": lambda run: _last(run, "rollouts/trained").partition(" ")[0],
    "dropped": lambda run: _last(run, "rollouts/dropped").partition(" ")[0],
    "failed": lambda run: _last(run, "rollouts/failed").partition(" ")[0],
}


def _summary(runs: Sequence[ReportedRun]) -> str:
    head = "".join(f"<th>{_named(run, i, len(runs))}</th>" for i, run in enumerate(runs))
    lines = []
    for name, text in SUMMARY.items():
        cells = [text(run) for run in runs]
        if cells == ["-"] * len(runs):
            continue
        if len(runs) == 1:
            lines.append(f"<div><dt>{name}</dt><dd>{escaped(cells[0])}</dd></div>")
        else:
            lines.append(f"<tr><td>{name}</td>{''.join(f'<td>{escaped(cell)}</td>' for cell in cells)}</tr>")
    if len(runs) == 1:
        return f'<dl class="numbers">{"".join(lines)}</dl>'
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'


def _steps(run: ReportedRun, named: bool) -> str:
    size = steps_a_row(run.last_step + 1, _ROWS) if run.rows else 1
    table = learning_table(run.rows, size, run.last_step + 1)
    if not table:
        return _note(f"{run.name}: no rows." if named else "No rows.")
    head = "".join(f"<th>{escaped(name)}</th>" for name in table[0])
    lines = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in table[1:])
    name = f"<h3>{escaped(run.name)}</h3>" if named else ""
    what = _note("accuracy and lr are the last of a row's steps, the others means.") if size > 1 else ""
    return f'{name}<div class="wide"><table><tr>{head}</tr>{lines}</table></div>{what}'


# --- charts -----------------------------------------------------------------------------------


def _charts(runs: Sequence[ReportedRun], falls: Sequence[Fall | None]) -> str:
    still = [f"{name} = {number_text(value)}" for name, value in figures.constants(runs).items()]
    note = _note(f"One value throughout: {', '.join(still)}.") if still else ""
    return (_grid(_cards(runs, falls)) or _note("There are no numbers yet.")) + note


def _cards(runs: Sequence[ReportedRun], falls: Sequence[Fall | None]) -> Iterator[str]:
    shown = figures.figures_of(runs)
    if len(runs) > 1:
        for figure in shown:
            yield from figures.charts_over_runs(runs, figure)
        return
    (run,), (fall,) = runs, falls
    for figure in shown:
        yield figures.chart_of(run, figure, fall)
        if "weight/max" in figure.names:
            yield figures.log_ratio_chart(run, fall)
        if "grad_norm/trajectory_max" in figure.names:
            yield figures.norm_chart(run, fall)
        if "tokens/trajectory" in figure.names:
            yield figures.length_chart(run, fall)


def _timelines(runs: Sequence[ReportedRun], falls: Sequence[Fall | None]) -> str:
    """Of each run the trajectories of a step in its middle, or of that at which it fell."""
    cards, without = [], []
    for run, fall in zip(runs, falls, strict=True):
        known = run.numbers[:, 0]
        steps = {int(known[len(known) // 2])} if len(known) else set()
        if fall is not None and fall.step in known:
            steps.add(fall.step)
        found = [text for step in sorted(steps) if (text := figures.timeline(run, step))]
        cards += [f"<h3>{escaped(run.name)}</h3>{text}" if len(runs) > 1 else text for text in found]
        if not found:
            without.append(run.name)
    notes = _note(
        "generate: waiting for a server's answer, its queue included; tool: the environment, from one answer to the "
        "next; wait: in the queue until the learner took the batch; train: the learner's step on it."
    )
    if without:
        notes += _note(f"No times of trajectories were recorded in the rollout store of {', '.join(without)}.")
    return _grid(iter(cards)) + notes


# --- trajectories -----------------------------------------------------------------------------


def _losses(run: ReportedRun, named: bool) -> str:
    name = f"<h3>{escaped(run.name)}</h3>" if named else ""
    if run.store is None:
        return name + _note("There is no rollout store to ask.")
    counts = dataclasses.asdict(run.store.counts())
    said = _note(", ".join(f"{state} {count}" for state, count in counts.items()))
    reasons = sorted(summed(run.store.reasons()).items(), key=lambda item: -item[1])
    most = max((count for _, count in reasons), default=1)
    lines = "".join(
        f'<tr><td class="text">{escaped(reason)}</td><td>{count}</td><td class="text"><span class="bar" '
        f'style="width:{max(1, round(120 * count / most))}px"></span></td></tr>'
        for reason, count in reasons[:_MOST_REASONS]
    )
    rest = reasons[_MOST_REASONS:]
    if rest:
        lines += f'<tr><td class="text">{len(rest)} more kinds</td><td>{sum(n for _, n in rest)}</td><td></td></tr>'
    table = f'<div class="wide"><table>{lines}</table></div>' if reasons else _note("None was dropped, none failed.")
    return name + said + table


def _samples(runs: Sequence[ReportedRun], falls: Sequence[Fall | None]) -> str:
    parts, tokens = [], max(100, _TOKENS // (8 * len(runs)))
    for run, fall in zip(runs, falls, strict=True):
        steps = [fall.step] if fall is not None else []
        chosen = samples.chosen_samples(run, steps)
        if len(runs) > 1:
            parts.append(f"<h3>{escaped(run.name)}</h3>")
        if not chosen:
            parts.append(_note("No tokens of trained trajectories are stored."))
            continue
        decoder = samples.Decoder(run)
        if decoder.problem:
            parts.append(_note(decoder.problem))
        parts += [samples.sample_html(one, decoder, tokens) for one in chosen]
    note = _note(
        "Weights are of whole trajectories: blue below 1, red above, each shade a factor of the root of 2; those of "
        "single tokens are not recorded. Probabilities are the behaviour policy's: the darker, the less likely."
    )
    return samples.legend() + note + "".join(parts)


# --- configuration ----------------------------------------------------------------------------


def _configuration(runs: Sequence[ReportedRun]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    usual = defaults()
    if len(runs) > 1:
        differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
        shown = _keys("Differences between the runs", differing, runs, usual)
    else:
        shown = _keys("Not at the default", [key for key in keys if runs[0].config[key] != usual.get(key)], runs, usual)
    whole = _keys("", keys, runs, usual)
    return f"{shown}<details><summary>Every key</summary>{whole}</details>"


def _keys(title: str, keys: Sequence[str], runs: Sequence[ReportedRun], usual: dict[str, str]) -> str:
    head = f"<h3>{title}</h3>" if title else ""
    if not keys:
        return head + _note("None.")
    names = "".join(f"<th>{_named(run, i, len(runs)) if len(runs) > 1 else ''}</th>" for i, run in enumerate(runs))
    lines = "".join(
        f'<tr><td class="text">{escaped(key)}</td>'
        + "".join(f'<td class="text">{escaped(run.config.get(key, "-"))}</td>' for run in runs)
        + f'<td class="text dim">{escaped(usual.get(key, ""))}</td></tr>'
        for key in keys
    )
    table = f"<table><tr><th></th>{names}<th>default</th></tr>{lines}</table>"
    return f'{head}<div class="wide">{table}</div>'
