"""How a run is doing, on one line that stays in place (a terminal) or one line now and then (a file, a pipe)."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, TypeGuard

from rich.console import Console
from rich.live import Live
from rich.text import Text

#: Without a terminal: at most one line in this many seconds, the first and the last step always.
PLAIN_EVERY_S = 10.0
#: Speed and time left are averages over this many last steps.
_WINDOW = 20
#: A message that begins so says who is waited for.
WAITING = "waiting for "


class Progress:
    """Takes the rows of ``metrics.jsonl`` in order and shows the newest.

    Keys that a row lacks keep their last value (accuracy is in few rows) or are left out of the line.
    """

    def __init__(self, steps: int, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        """``steps``: number of steps of the run. Rows before ``first_step`` (of earlier attempts) only give values."""
        self._steps, self.first_step = steps, first_step
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        self._values: dict[str, float] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # (seconds, tokens) of a step
        self._printed_at = self._tick_at = -math.inf
        self._begun, self._starts, self._waits_for = time.monotonic(), True, ""

    def show(self, row: Mapping[str, Any]) -> None:
        self._values.update({name: value for name, value in row.items() if _is_finite(value)})
        if row["step"] < self.first_step:
            return
        self._starts = False
        seconds = row.get("time/step")
        if _is_finite(seconds) and self._is_of_this_attempt(row):
            tokens = row.get("tokens/trained", 0.0)
            self._recent.append((seconds, tokens if _is_finite(tokens) else 0.0))
        if self._console.is_terminal:
            self._show_live()
        elif row["step"] + 1 == self._steps or time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            print(self.line(), file=self._stream, flush=True)

    def _is_of_this_attempt(self, row: Mapping[str, Any]) -> bool:
        """Whether everything it trained on was sampled in this attempt. What an earlier one left waits complete in the
        store: the steps on it are much faster than those that follow."""
        stale = row.get("staleness/max")
        return self.first_step == 0 or row["step"] - (stale if _is_finite(stale) else 0) > self.first_step

    def line(self, width: int | None = None) -> str:
        """The line for what was shown last, such as
        "step 12/40  5:20 left  accuracy 0.5312  ESS 0.87  lr x0.93  staleness 2.1 (max 4)  1234 tokens/s".

        What matters most stands first; parts that do not fit ``width`` characters are left out whole. Before the first
        step it says who is waited for.
        """
        if self._starts:
            return f"starting ({clock(time.monotonic() - self._begun)})  {self._waits_for}".rstrip()
        parts = [f"step {int(self._values['step']) + 1}/{self._steps}"]
        total = sum(seconds for seconds, _ in self._recent)
        if total > 0:
            left = self._steps - 1 - int(self._values["step"])
            parts.append(f"{clock(left * total / len(self._recent))} left")
        for name, form in (
            ("eval/accuracy", "accuracy {:.4f}"),
            ("reward/mean", "reward {:.3f}"),
            ("ess/ratio", "ESS {:.2f}"),
            ("ess/lr_scale", "lr x{:.2f}"),
            ("staleness/mean", "staleness {:.1f}"),
            ("staleness/max", "(max {:.0f})"),
        ):
            if name in self._values:
                parts.append(form.format(self._values[name]))
            if name == "eval/accuracy" and self._values.get("eval/failed", 0):
                parts.append(f"({self._values['eval/failed']:.0f} failed)")
        if total > 0:
            parts.append(f"{sum(tokens for _, tokens in self._recent) / total:.0f} tokens/s")
        return _fitting(parts, width)

    def tick(self) -> None:
        """Called often: a run that starts shows on a terminal for how long."""
        if self._starts and self._console.is_terminal and time.monotonic() >= self._tick_at:
            self._tick_at = time.monotonic() + 1.0
            self._show_live()

    def say(self, message: str) -> None:
        """Print a line of its own above the live one; before the first step, who is waited for stands in that one."""
        if self._starts and self._console.is_terminal and message.startswith(WAITING):
            self._waits_for = message.removeprefix(WAITING).removeprefix("the ")
            return self._show_live()
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last line in place and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_live(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(Text(self.line(self._console.width), no_wrap=True, overflow="ellipsis"), refresh=True)


def _fitting(parts: Sequence[str], width: int | None) -> str:
    """``parts`` in one line, without those that do not fit; what stands in brackets belongs to the part before it."""
    line, dropped = "", False
    for part in filter(None, parts):
        if dropped and part.startswith("("):
            continue
        gap = "" if not line else " " if part.startswith("(") else "  "
        dropped = bool(line) and width is not None and len(line) + len(gap) + len(part) > width
        if not dropped:
            line += gap + part
    return line


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def clock(seconds: float) -> str:
    """ "1:05:09", or "5:09" below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
