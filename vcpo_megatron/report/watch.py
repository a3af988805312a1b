"""A run live in the terminal, from the files of its directory alone: the run may be on another host.

It follows ``metrics.jsonl``. The end of the run is what its supervisor writes into ``ended``; one that was killed has
written nothing, so it is said for how long there has been no news.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..observability.progress import PLAIN_EVERY_S, clock
from ..observability.sinks import JsonlFollower
from ..run.directory import RunDirectory
from ..run.errors import ConfigError
from .charts import number_text
from .collapse import find_fall, in_words, outcome_of
from .runs import by_step, config_of

#: Label -> metric; two labels of the plain line are short forms.
SHOWN = {
    "accuracy": "eval/accuracy",
    "reward": "reward/mean",
    "ESS": "ess/ratio",
    "rate": "lr/effective",
    "KL": "kl/behavior",
    "staleness": "staleness/mean",
    "tokens/s": "tokens/second",
    "s/step": "time/step",
}
_COUNTS = {"trained": "rollouts/trained", "dropped": "rollouts/dropped", "failed": "rollouts/failed"}
#: Steps over which the time left is averaged.
_WINDOW = 20
#: Seconds without a row after which that is said.
_QUIET_S = 60.0
#: Seconds after which a file with all rows gets no more: a resume that goes back has cut it by then.
_SETTLED_S = 30.0
_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
#: Width of the columns of labels and values of the table, and of what stands between columns.
_FIXED = 28


@dataclass(frozen=True)
class Pace:
    """``directory_s``: how long a run directory that is not there is waited for. ``poll_s``: from one look to the next.
    ``sleep`` and ``now`` are the clock's."""

    directory_s: float = 60.0
    poll_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic


def watch(directory: RunDirectory, stream: TextIO, waiting: Pace = Pace()) -> str:
    """Show the run until it ends; how it ended, as ``RunDirectory`` has it. ConfigError: there is no run.

    On a terminal a table stays in place, elsewhere a line is printed now and then, and one at the end.
    """
    console = Console(file=stream)
    _await_directory(directory, console, waiting)
    view = RunView(directory)
    if console.is_terminal:
        return _watch_live(view, console, waiting)
    printed_at = -math.inf
    while True:
        ended = view.ended()  # before the rows: what came before the end is shown
        new = view.poll(waiting.now())
        if new and (ended is not None or waiting.now() - printed_at >= PLAIN_EVERY_S):
            printed_at = waiting.now()
            _say(console, view.line())
        if ended is not None:
            _say(console, f"{directory.path}: {ended}")
            return ended
        waiting.sleep(waiting.poll_s)


def _watch_live(view: RunView, console: Console, waiting: Pace) -> str:
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            ended = view.ended()
            view.poll(waiting.now())
            live.update(view.table(console, ended, waiting.now()), refresh=True)
            if ended is not None:
                return ended
            waiting.sleep(waiting.poll_s)


def _await_directory(directory: RunDirectory, console: Console, waiting: Pace) -> None:
    deadline, told = waiting.now() + waiting.directory_s, False
    while not directory.attempts.exists() and not directory.metrics.exists():
        if waiting.now() >= deadline:
            raise ConfigError(
                [f"{directory.path}: no run within {waiting.directory_s:g} s (--wait); give a run directory"]
            )
        if not told:
            told = True
            _say(console, f"waiting for a run in {directory.path} (up to {waiting.directory_s:g} s)")
        waiting.sleep(min(waiting.poll_s, max(0.0, deadline - waiting.now())))


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class RunView:
    """What has been read of a run, and how it is shown."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._follower = JsonlFollower(directory.metrics)
        self._raw: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._news_at: float | None = None
        self._steps: int | None = None
        self._verdict = ""

    def poll(self, now: float) -> bool:
        """Read what is new at ``now``; whether there was anything."""
        new = self._follower.poll()
        if not new:
            self._news_at = now if self._news_at is None else self._news_at
            return False
        self._news_at = now
        first = min(row["step"] for row in new)  # a resume cuts the file back: it is read again from there
        self._raw = [row for row in self._raw if row["step"] < first] + new
        self._rows = by_step(self._raw)
        text = config_of(self.directory.resolved)[0].get("train.steps", "")
        self._steps = int(text) if text.isdecimal() else None
        fall = find_fall(self._rows)
        self._verdict = " ".join(in_words(fall, outcome_of(self._rows))) if fall is not None else ""
        return True

    def ended(self) -> str | None:
        """How the run ended. One that has all its rows, and no new one for a while, is done, whatever became of its
        supervisor."""
        if (state := self.directory.how_it_ended()) is not None or not self._is_complete():
            return state
        try:
            age = time.time() - self.directory.metrics.stat().st_mtime
        except OSError:
            return None
        return "done" if age > _SETTLED_S else None

    def _is_complete(self) -> bool:
        return bool(self._rows) and self._rows[-1]["step"] + 1 == self._steps

    def line(self) -> str:
        """One line of what is known, such as "step 12/40  5:20 left  accuracy 0.53  reward 0.4  ESS 0.87"."""
        parts = [self._head()]
        parts += [f"{label} {number_text(found[-1])}" for label, name in SHOWN.items() if (found := self._finite(name))]
        parts += [f"{label} {found[-1]:.0f}" for label, name in _COUNTS.items() if (found := self._finite(name))]
        if self._verdict:
            parts.append(self._verdict.partition(":")[0].lower())
        return "  ".join(parts)

    def table(self, console: Console, ended: str | None, now: float) -> Group:
        """Everything in place, no wider than the console: label, newest value, and the course of the run."""
        plain = not (console.encoding or "").lower().startswith("utf")
        width = max(8, console.width - _FIXED)
        table = Table.grid(padding=(0, 2))
        table.add_column(width=10, no_wrap=True)
        table.add_column(justify="right", width=10, no_wrap=True)
        table.add_column(no_wrap=True, width=width)
        for label, name in SHOWN.items():
            if found := self._finite(name):
                ends = f"{number_text(min(found))} to {number_text(max(found))}"
                room = max(4, width - len(ends) - 1)
                table.add_row(label, number_text(found[-1]), f"{sparkline(found, room, plain=plain)} {ends}")
        counts = [f"{label} {found[-1]:.0f}" for label, name in _COUNTS.items() if (found := self._finite(name))]
        below = [Text("  ".join(counts)), *([Text(self._verdict)] if self._verdict else [])]
        where = Text(f"{self.directory.path}: {ended or self._going(now)}", overflow="fold")
        return Group(where, Text(self._head()), table, *below)

    def _going(self, now: float) -> str:
        quiet = now - self._news_at if self._news_at is not None else 0.0
        news = f"no row for {clock(quiet)}" if quiet >= _QUIET_S else "goes on"
        return news if self._rows else f"starts, {news}" if quiet >= _QUIET_S else "starts"

    def _head(self) -> str:
        if not self._rows:
            return "no step yet"
        done = int(self._rows[-1]["step"]) + 1
        if self._steps is None:
            return f"step {done}"
        seconds = self._finite("time/step")[-_WINDOW:]
        left = (self._steps - done) * math.fsum(seconds) / len(seconds) if seconds else 0.0
        return f"step {done}/{self._steps}" + (f"  {clock(left)} left" if left > 0 else "")

    def _finite(self, name: str) -> list[float]:
        values = (row.get(name) for row in self._rows)
        return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def sparkline(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """``values`` as at most ``width`` characters, from the least to the largest; of several that share a character it
    shows the one that is farthest from the middle of all."""
    blocks = _PLAIN_BLOCKS if plain else _BLOCKS
    low, high = min(values), max(values)
    middle = sorted(values)[len(values) // 2]
    shown = [max(part, key=lambda value: abs(value - middle)) for part in _parts(values, width)]
    span = high - low
    if not 0 < span < math.inf:
        return blocks[0] * len(shown)
    return "".join(blocks[min(int((value - low) / span * len(blocks)), len(blocks) - 1)] for value in shown)


def _parts(values: Sequence[float], width: int) -> Iterator[Sequence[float]]:
    count = min(len(values), width)
    edges = [i * len(values) // count for i in range(count + 1)]
    return (values[start:end] for start, end in zip(edges, edges[1:], strict=False))
