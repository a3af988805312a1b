"""What runs beside what, what is recorded of each, how a comparison goes on and is stopped; no process is started."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.comparison.records import record
from tests.comparison.specs import written_spec
from tests.messages import assert_names
from vcpo_megatron.comparison import runner
from vcpo_megatron.comparison.matrix import PlannedRun, planned_runs
from vcpo_megatron.comparison.results import appended, newest, read_records
from vcpo_megatron.comparison.runner import Comparison, ComparisonOutcome
from vcpo_megatron.comparison.spec import load_spec
from vcpo_megatron.config.load import load_config

RESUME = "--resume"


class Child:
    """A process that ends by itself after some looks, or when it is asked to."""

    pid = 2**30  # of no process

    def __init__(self, code: int, looks: int) -> None:
        self.code, self.looks, self.returncode = code, looks, None
        self.asked, self.killed = 0, False

    def poll(self) -> int | None:
        self.looks -= 1
        if self.looks <= 0:
            self.returncode = self.code
        return self.returncode


class Fake:
    """Starts ``Child``s that have written a row for each step at once; ``code`` by the run's name."""

    def __init__(self, code: Callable[[str], int] = lambda name: 0, looks: int = 2, steps: int = 40) -> None:
        self.code, self.looks, self.steps = code, looks, steps
        self.started: list[tuple[list[str], Mapping[str, str]]] = []
        self.children: list[Child] = []
        self.most = 0

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Any:
        self.started.append((list(command), env))
        directory = Path(command[list(command).index("--run-dir") + 1])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "resolved.toml").touch()
        rows = [{"step": step, "ess/ratio": 0.5} for step in range(self.steps)]
        rows[-1] |= {"eval/accuracy": 0.75, "eval/version": self.steps}
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.children.append(Child(self.code(directory.name), self.looks))
        self.most = max(self.most, sum(child.returncode is None for child in self.children))
        return self.children[-1]

    def ask(self, child: Any) -> None:
        child.asked += 1
        child.looks, child.code = 2 * self.children.index(child), 143  # one after the other

    def kill(self, child: Any) -> None:
        child.killed, child.returncode = True, -9

    def error(self, log: Path) -> str | None:
        return f"said in {log.name}"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.0)


@pytest.fixture
def runs(tmp_path: Path) -> list[PlannedRun]:
    return planned_runs(load_spec(written_spec(tmp_path)))


def compare(
    folder: Path,
    runs: Sequence[PlannedRun],
    processes: Fake,
    *,
    slots: Sequence[Mapping[str, str]] = ({},),
    signals: Sequence[int] = (),
) -> tuple[ComparisonOutcome, list[str]]:
    """What came of it, and the lines that were said."""
    said: list[str] = []
    with appended(folder / "results.jsonl") as results:
        comparison = Comparison(
            runs,
            folder,
            results,
            newest(read_records([folder])),
            name="spec",
            slots=slots,
            processes=processes,
            signals=signals,
            say=said.append,
        )
        return comparison.run(), said


def test_every_run_is_made_once_and_recorded(tmp_path: Path, runs: list[PlannedRun]) -> None:
    fake = Fake()
    outcome, said = compare(tmp_path, runs, fake)
    assert outcome == ComparisonOutcome(done=4, before=0, failed=0, stopped=False) and fake.most == 1
    records = read_records([tmp_path])
    assert [(one.label, one.status, one.accuracy) for one in records] == [(run.label, "done", (0.75,)) for run in runs]
    assert all(len(one.step) == len(one.process_seconds) == 40 for one in records)
    assert_names("\n".join(said), "1/4 vcpo", "starts")
    assert_names("\n".join(said), "1/4 vcpo", "done", "0.750", "left")
    command, _ = fake.started[0]
    assert RESUME not in command
    assert load_config(Path(command[4])) == runs[0].config  # what is written is what was planned

    outcome, said = compare(tmp_path, runs, fake)
    assert outcome == ComparisonOutcome(done=0, before=4, failed=0, stopped=False) and len(fake.started) == 4
    assert len(read_records([tmp_path])) == 4


def test_the_time_left_is_of_all_steps_that_are_not_done(
    tmp_path: Path, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes ten seconds: a run ends at the second one, after 40 steps in 20 s."""
    clock = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runner.time, "sleep", lambda _: clock.__setitem__(0, clock[0] + 10.0))
    _, said = compare(tmp_path, runs, Fake())
    left = [line.rpartition("all runs: ")[2].removesuffix(" left") for line in said if "left" in line]
    assert left == ["0:01:00", "0:01:00", "0:00:40", "0:00:40", "0:00:20", "0:00:20"]


def test_runs_stand_side_by_side_each_with_its_own_devices(tmp_path: Path, runs: list[PlannedRun]) -> None:
    fake = Fake(looks=5)
    slots = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    outcome, _ = compare(tmp_path, runs, fake, slots=slots)
    assert outcome.done == 4 and fake.most == 3
    assert [env for _, env in fake.started][:3] == slots


def test_a_failure_is_recorded_by_reason_and_ends_nothing(tmp_path: Path, runs: list[PlannedRun]) -> None:
    fake = Fake(code=lambda name: 1 if name.startswith("synchronous") else 0)
    outcome, said = compare(tmp_path, runs, fake)
    assert outcome == ComparisonOutcome(done=2, before=0, failed=2, stopped=False)
    failed = [one for one in read_records([tmp_path]) if one.status == "failed"]
    assert [one.reason for one in failed] == [f"said in {run.name}.log" for run in runs if run.method == "synchronous"]
    assert_names("\n".join(said), "2/4 synchronous", "failed after 40 steps", "said in")
    again = Fake()
    assert compare(tmp_path, runs, again)[0] == ComparisonOutcome(done=2, before=2, failed=0, stopped=False)
    assert all(RESUME in command for command, _ in again.started)  # what had begun goes on


def test_a_run_that_began_goes_on_and_its_costs_add_up(
    tmp_path: Path, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after 30 steps with a checkpoint after 20: those count, and what the resume spends is added."""
    run, spent = runs[0], tuple(float(step) for step in range(30))
    with appended(tmp_path / "results.jsonl") as results:
        stopped = record(status="stopped", step=tuple(range(30)), process_seconds=spent, seconds=60.0)
        results.add(dataclasses.replace(stopped, digest=run.digest))
    directory = tmp_path / "runs" / run.name
    directory.mkdir(parents=True)
    (directory / "resolved.toml").touch()
    monkeypatch.setattr(runner.RunDirectory, "complete_steps", lambda self: [20])
    monkeypatch.setattr(runner.ProcessSeconds, "look", lambda self: self._already + 100.0)
    outcome, said = compare(tmp_path, [run], fake := Fake())
    assert outcome.done == 1 and fake.started[0][0][-3:] == ["--run-dir", str(directory), RESUME]
    assert_names("\n".join(said), "goes on from step 20")
    done = read_records([tmp_path])[-1]
    assert done.process_seconds == (*spent[:20], *(19.0 + 100.0,) * 20)
    assert done.seconds is not None and done.seconds >= 60.0


def test_costs_that_nobody_recorded_are_not_known(
    tmp_path: Path, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "runs" / runs[0].name
    directory.mkdir(parents=True)
    (directory / "resolved.toml").touch()
    monkeypatch.setattr(runner.RunDirectory, "complete_steps", lambda self: [20])
    compare(tmp_path, runs[:1], Fake())
    assert set(read_records([tmp_path])[0].process_seconds) == {None}


@pytest.mark.parametrize("times", [1, 2, 3])
def test_signals_are_handed_on_and_nothing_is_started_any_more(
    tmp_path: Path, runs: list[PlannedRun], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    fake = Fake(looks=10**6)
    monkeypatch.setattr(runner.time, "sleep", lambda _: signals.extend([signal.SIGINT] * times if not signals else []))
    outcome, said = compare(tmp_path, runs, fake, slots=[{}, {}], signals=signals)
    assert outcome == ComparisonOutcome(done=0, before=0, failed=0, stopped=True)
    assert [child.asked for child in fake.children] == [min(times, 2)] * 2
    assert [one.status for one in read_records([tmp_path])] == ["stopped"] * 2


def test_a_run_that_does_not_stop_is_killed(
    tmp_path: Path, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    fake = Fake(looks=10**6)
    monkeypatch.setattr(fake, "ask", lambda child: None)
    monkeypatch.setattr(runner, "_STOP_MARGIN_S", -1000.0)
    monkeypatch.setattr(runner.time, "sleep", lambda _: signals.append(signal.SIGTERM))
    outcome, said = compare(tmp_path, runs, fake, signals=signals)
    assert outcome.stopped and fake.children[0].killed
    assert_names("\n".join(said), runs[0].label, "killed")


def test_an_error_here_leaves_no_run_behind(
    tmp_path: Path, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: float) -> None:
        raise OSError("the clock stands")

    fake = Fake()
    monkeypatch.setattr(runner.time, "sleep", fails)
    with pytest.raises(OSError):
        compare(tmp_path, runs, fake, slots=[{}, {}])
    assert len(fake.children) == 2 and all(child.killed for child in fake.children)
