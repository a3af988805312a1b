"""A run followed from its files: lines, the table, how it ends, and a directory that is not there yet."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.cli import main as cli
from vcpo_megatron.report.watch import Pace, RunView, sparkline, watch
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.run.errors import ConfigError

pytestmark = pytest.mark.timeout(60)


class Clock:
    """Time that passes when somebody sleeps; ``then`` are called one a sleep."""

    def __init__(self, *then: Callable[[], object]) -> None:
        self.time = 0.0
        self.then = list(then)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        assert self.time < 1000, "it goes on for ever"
        if self.then:
            self.then.pop(0)()

    def waiting(self, directory_s: float = 5.0) -> Pace:
        return Pace(directory_s, poll_s=20.0, sleep=self.sleep, now=lambda: self.time)


class Screen(io.StringIO):
    """A terminal of 80 columns."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "attempts").write_text("1\n")
    (tmp_path / "resolved.toml").write_text("[train]\nsteps = 5\n")
    return RunDirectory(tmp_path)


def add(directory: RunDirectory, *steps: int, **more: Any) -> None:
    with open(directory.metrics, "a") as file:
        for step in steps:
            row = {"step": step, "ess/ratio": 0.5, "reward/mean": step / 4, "time/step": 60.0, "tokens/trained": 600}
            file.write(json.dumps({**row, "rollouts/failed": 3, "rollouts/trained": 8 * (step + 1), **more}) + "\n")


def test_lines_of_a_run_until_it_is_done(directory: RunDirectory) -> None:
    add(directory, 0, **{"eval/accuracy": 0.25})
    clock = Clock(
        lambda: add(directory, 1, 2),
        lambda: None,
        lambda: add(directory, 3),
        lambda: (add(directory, 4), directory.mark_ended(1, "done")),
    )
    stream = io.StringIO()
    assert watch(directory, stream, clock.waiting()) == "done"
    said = stream.getvalue().splitlines()
    heads = [line.split("  accuracy")[0] for line in said[:-1]]
    assert heads == ["step 1/5  4:00 left", "step 3/5  2:00 left", "step 4/5  1:00 left", "step 5/5"]
    assert_names(said[1], "accuracy 0.25", "reward 0.5", "ESS 0.5", "tokens/s 10", "trained 24", "failed 3")
    assert said[-1] == f"{directory.path}: done"


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 1), ("stopped by SIGTERM", 1)])
def test_the_command_ends_with_the_run(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    add(directory, 0, 1)
    directory.mark_ended(1, state)
    assert cli.main(["watch", str(directory.path)]) == code
    assert capsys.readouterr().out.splitlines()[-1] == f"{directory.path}: {state}"


def test_an_end_is_that_of_its_attempt(directory: RunDirectory) -> None:
    assert directory.how_it_ended() is None
    directory.mark_ended(1, "failed")
    assert directory.how_it_ended() == "failed"
    directory.attempts.write_text("2\n")  # it was resumed
    assert directory.how_it_ended() is None
    directory.ended.write_text("no number")
    assert directory.how_it_ended() is None
    directory.mark_ended(2, "stopped by SIGTERM")
    assert directory.how_it_ended() == "stopped by SIGTERM"


def test_all_rows_and_no_news_is_an_end(directory: RunDirectory) -> None:
    """Of a run whose supervisor was killed, or of before ends were recorded."""
    add(directory, *range(5))
    view = RunView(directory)
    view.poll(0.0)
    assert view.ended() is None
    old = time.time() - 3600
    os.utime(directory.metrics, (old, old))
    assert view.ended() == "done"
    add(directory, *range(2))
    view = RunView(directory)
    view.poll(0.0)
    os.utime(directory.metrics, (old, old))
    assert view.ended() == "done"  # the rows of two steps were written twice
    directory.metrics.write_text('{"step": 3}\n')
    os.utime(directory.metrics, (old, old))
    view.poll(0.0)
    assert view.ended() is None


def test_a_resume_takes_rows_back(directory: RunDirectory) -> None:
    add(directory, 0, 1, 2, 3)
    view = RunView(directory)
    assert view.poll(0.0) and view.line().startswith("step 4/5")
    directory.metrics.unlink()
    add(directory, 0, 1)
    assert view.poll(1.0) and view.line().startswith("step 2/5")
    assert not view.poll(2.0)


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")

    def begin() -> None:
        run.path.mkdir()
        run.attempts.write_text("1\n")
        add(run, 0)
        run.mark_ended(1, "done")

    stream = io.StringIO()
    assert watch(run, stream, Clock(begin).waiting()) == "done"
    assert_names(stream.getvalue(), "waiting for", run.path, "5 s")
    with pytest.raises(ConfigError) as refused:
        watch(RunDirectory(tmp_path / "other"), io.StringIO(), Clock().waiting())
    assert_names(refused.value, tmp_path / "other", "no run within 5 s", "--wait")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_fits_the_terminal(directory: RunDirectory, columns: int) -> None:
    add(directory, 0, 1, 2, **{"kl/behavior": -1.5e-7, "lr/effective": 1e-6})
    directory.mark_ended(1, "failed")
    from rich.console import Console

    stream = Screen()
    console = Console(file=stream, width=columns, height=25)
    view = RunView(directory)
    view.poll(0.0)
    console.print(view.table(console, "failed", 0.0))
    said = stream.getvalue()
    assert [line for line in said.splitlines() if len(line.rstrip()) > columns] == []
    assert_names(said, "step 3/5", "2:00 left")
    assert_names(said, "KL", "-1.5e-7")
    assert "failed 3" in said


def test_on_a_terminal_the_table_stays_in_place(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    add(directory, 0)
    clock = Clock(lambda: (add(directory, 1, 2, 3, 4), directory.mark_ended(1, "done")))
    stream = Screen()
    assert watch(directory, stream, clock.waiting()) == "done"
    assert "\x1b[" in stream.getvalue() and "step 5/5" in stream.getvalue() and stream.getvalue().endswith("\x1b[?25h")


def test_no_news_is_said(directory: RunDirectory) -> None:
    add(directory, 0)
    view = RunView(directory)
    view.poll(0.0)
    assert (view._going(10.0), view._going(125.0)) == ("goes on", "no row for 2:05")


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [
        ([1.0], 8, "▁"),
        ([0.0, 1.0], 8, "▁█"),
        ([0.0, 0.5, 1.0], 3, "▁▅█"),
        ([0.0] * 50 + [9.0] + [0.0] * 49, 4, "▁▁█▁"),  # a spike is kept
        ([5.0] * 30, 4, "▁▁▁▁"),
        ([-1e308, 1e308], 4, "▁▁"),
    ],
)
def test_a_sparkline(values: list[float], width: int, shown: str) -> None:
    assert sparkline(values, width) == shown
    assert len(sparkline(values, width, plain=True)) == len(shown) and sparkline(values, width, plain=True).isascii()


@pytest.mark.parametrize("wait", ["-1", "x", "inf", "nan"])
def test_a_wait_is_a_number_of_seconds(wait: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["watch", "run", f"--wait={wait}"])
    assert_names(capsys.readouterr().err, f"'{wait}'")


def test_ctrl_c_is_130(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    add(directory, 0)
    monkeypatch.setattr(Pace.__init__, "__defaults__", (60.0, 1.0, interrupt, time.monotonic))
    assert cli.main(["watch", str(directory.path)]) == 130
