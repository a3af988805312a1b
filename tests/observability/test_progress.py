"""The line says what the last row says; a file gets few lines, a terminal one."""

from __future__ import annotations

import io
import math
import re

import pytest

from vcpo_megatron.observability import progress as module
from vcpo_megatron.observability.progress import Progress

ROW = {
    "step": 11,
    "eval/accuracy": 0.53125,
    "reward/mean": 0.5,
    "ess/ratio": 0.874,
    "ess/lr_scale": 0.9349,
    "staleness/mean": 2.06,
    "staleness/max": 4.0,
    "tokens/trained": 3000.0,
    "time/step": 2.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


def test_line() -> None:
    progress = Progress(40, stream=io.StringIO())
    assert progress.line() == "starting (0:00)"
    progress.show(ROW)
    assert progress.line() == (
        "step 12/40  1:10 left  accuracy 0.5312  reward 0.500  ESS 0.87  lr x0.93  staleness 2.1 (max 4)  1200 tokens/s"
    )


LONG = {"step": 123_455, "eval/failed": 12, "staleness/max": 16.0, "tokens/trained": 3e6, "time/step": 4000.0}


@pytest.mark.parametrize(
    ("row", "width", "line"),
    [
        (ROW, 80, "step 12/40  1:10 left  accuracy 0.5312  reward 0.500  ESS 0.87  lr x0.93"),
        (ROW, 60, "step 12/40  1:10 left  accuracy 0.5312  reward 0.500"),
        (ROW, 20, "step 12/40  ESS 0.87"),
        (ROW, 1, "step 12/40"),  # cut by the terminal then
        (
            ROW | LONG,
            80,
            "step 123456/200000  85048:53:20 left  accuracy 0.5312 (12 failed)  reward 0.500",
        ),
        (ROW | {"eval/failed": 0}, 46, "step 12/40  1:10 left  accuracy 0.5312"),
        (ROW | {"eval/accuracy": 0.5, "eval/failed": 1000}, 40, "step 12/40  1:10 left  accuracy 0.5000"),
    ],
)
def test_time_left_stands_where_no_terminal_cuts_it(row: dict[str, float], width: int, line: str) -> None:
    progress = Progress(200_000 if row["step"] > 40 else 40, stream=io.StringIO())
    progress.show(row)
    assert progress.line(width) == line and (len(line) <= width or line.count("  ") == 0)


@pytest.mark.parametrize("columns", ["80", "50"])
def test_the_live_line_is_as_wide_as_the_terminal_and_has_the_time_left(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    progress = Progress(40, stream=stream)
    progress.show(ROW)
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    shown = {line.rstrip() for line in text.splitlines() if line.strip()}
    assert len(shown) == 1
    (line,) = shown
    assert "1:10 left" in line and "\u2026" not in line and len(line) <= int(columns)


def test_a_start_says_for_how_long_and_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = Terminal()
    progress = Progress(40, first_step=3, stream=stream)
    progress.tick()
    assert "starting (0:00)" in stream.getvalue()
    now[0] += 12.0
    for step in range(3):  # of an earlier attempt
        progress.show({"step": step})
    progress.say("waiting for the learner (loads its libraries), servers (0 of 1 ready), 12 s")
    assert progress.line() == "starting (0:12)  learner (loads its libraries), servers (0 of 1 ready), 12 s"
    now[0] += 1.0
    progress.tick()
    assert "starting (0:13)" in stream.getvalue()
    progress.show({"step": 3})
    progress.say("waiting for the disk")  # no start any more: a line of its own
    progress.close()
    assert "step 4/40" in stream.getvalue() and "waiting for the disk\n" in stream.getvalue()


def test_without_a_terminal_a_start_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    progress = Progress(40, stream=stream)
    progress.tick()
    progress.say("waiting for the learner (builds the model)")
    assert stream.getvalue() == "waiting for the learner (builds the model)\n"


def test_values_that_a_row_lacks_are_kept_and_nan_shows_nothing_new() -> None:
    progress = Progress(40, stream=io.StringIO())
    progress.show({"step": 0, "eval/accuracy": 0.25, "ess/ratio": math.nan})
    progress.show({"step": 1, "reward/mean": 0.125, "eval/accuracy": math.nan})
    assert progress.line() == "step 2/40  accuracy 0.2500  reward 0.125"


def test_speed_and_time_left_are_averages_over_the_last_steps() -> None:
    progress = Progress(100, stream=io.StringIO())
    progress.show({"step": 0, "time/step": 500.0, "tokens/trained": 1.0})  # slow start, out of the window later
    for step in range(1, 21):
        progress.show({"step": step, "time/step": 50.0 if step % 2 else 150.0, "tokens/trained": 1000.0})
    assert progress.line() == "step 21/100  2:11:40 left  10 tokens/s"  # 79 steps of 100 s


def test_rows_of_earlier_attempts_give_values_but_no_lines_and_no_speed() -> None:
    stream = io.StringIO()
    progress = Progress(40, first_step=10, stream=stream)
    for step in range(10):
        progress.show({"step": step, "eval/accuracy": 0.5, "time/step": 1000.0, "tokens/trained": 1.0})
    assert stream.getvalue() == ""
    progress.show({"step": 10, "time/step": 1.0, "tokens/trained": 7.0})
    assert stream.getvalue() == "step 11/40  accuracy 0.5000\n"


def test_steps_on_rollouts_of_an_earlier_attempt_tell_nothing_of_speed() -> None:
    """They waited for nothing: their batches were complete when the run was resumed."""
    progress = Progress(40, first_step=10, stream=io.StringIO())
    for step, stale in ((10, 2.0), (11, 2.0), (12, 2.0)):
        progress.show({"step": step, "staleness/max": stale, "time/step": 0.01, "tokens/trained": 1000.0})
    assert "tokens/s" not in progress.line() and "left" not in progress.line()
    progress.show({"step": 13, "staleness/max": 2.0, "time/step": 10.0, "tokens/trained": 70.0})
    assert progress.line() == "step 14/40  4:20 left (max 2)  7 tokens/s"


def test_plain_lines_are_rare_but_hold_the_first_and_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(30, stream=stream)
    for step in range(30):
        progress.show({"step": step})
        now[0] += 1.0
    progress.close()
    assert stream.getvalue().splitlines() == ["step 1/30", "step 11/30", "step 21/30", "step 30/30"]


def test_messages_are_printed_as_they_are() -> None:
    stream = io.StringIO()
    Progress(30, stream=stream).say("[bold] /a/path " + "x" * 300)
    assert stream.getvalue() == "[bold] /a/path " + "x" * 300 + "\n"


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    progress = Progress(30, stream=stream)
    for step in range(3):
        progress.show({"step": step})
    progress.say("SIGTERM: stopping")
    progress.close()
    text = stream.getvalue()
    assert "SIGTERM: stopping" in text and text.count("\n") <= 4
    assert "\r" in text or "\x1b[2K" in text
    assert text.endswith("\x1b[?25h")  # the cursor is back
    progress.close()  # once more is harmless
