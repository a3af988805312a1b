"""Running what is not done yet, some runs side by side: each one a ``vcpo train`` in a process of its own.

    consumes    planned runs; rows of their metrics.jsonl; signals to this process
    produces    one record a run, when it has ended; a line of progress a run now and then
    waits for   the ends of the runs that are going on: each has its own deadlines
    unblocked by  a signal: the runs are asked to stop, with a checkpoint; a second one: they are ended at once

A run that was stopped, or whose process was killed, is taken up by ``vcpo train --resume``: in exact lag it goes on
from its newest checkpoint to the same numbers to the last bit, and from its start where it has none.
"""

from __future__ import annotations

import datetime
import io
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..config.load import dump_resolved
from ..observability.progress import Progress
from ..observability.sinks import JsonlFollower
from ..run.directory import RunDirectory, write_atomically
from .cost import ProcessSeconds
from .matrix import PlannedRun
from .results import ResultsFile, RunRecord, Status, record_of

POLL_S = 0.5
#: Seconds from one line of progress of a run to the next.
SAY_EVERY_S = 30.0
#: Beyond a run's own time for a stop (launch.grace_s), before it is killed.
_STOP_MARGIN_S = 60.0


class Processes(Protocol):
    """How processes are started and ended, for which this package has no means of its own."""

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """A child, whose output is appended to ``log``; it dies with this process."""
        ...

    def ask(self, child: subprocess.Popen[bytes]) -> None:
        """Ask it to stop; a second time: at once."""
        ...

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        """End it, whatever it does, and wait for that."""
        ...

    def error(self, log: Path) -> str | None:
        """The last error that it said."""
        ...


@dataclass
class _Running:
    """A run that is going on. ``cost``: process seconds until each step was done."""

    run: PlannedRun
    number: int
    child: subprocess.Popen[bytes]
    directory: RunDirectory
    log: Path
    slot: int
    processes: ProcessSeconds
    follower: JsonlFollower
    progress: Progress
    began: float
    cost: dict[int, float] = field(default_factory=dict)
    steps_done: int = 0
    first_step: int = 0
    said_at: float = 0.0


@dataclass(frozen=True)
class ComparisonOutcome:
    """Runs that are done, were done before, and failed; ``stopped``: a signal ended the comparison."""

    done: int
    before: int
    failed: int
    stopped: bool


class Comparison:
    """Runs of one comparison, as many side by side as there are ``slots``, each with variables of its own."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        folder: Path,
        results: ResultsFile,
        known: Mapping[str, RunRecord],
        *,
        name: str,
        slots: Sequence[Mapping[str, str]],
        processes: Processes,
        signals: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._results, self._known, self._name = folder, results, known, name
        self._slots, self._processes, self._signals, self._say = slots, processes, signals, say
        self._all = list(runs)
        self._waiting = [run for run in runs if not self._is_done(run)]
        self._before = len(runs) - len(self._waiting)
        self._running: list[_Running] = []
        self._done = self._failed = 0
        self._asked = 0
        self._stop_by = 0.0
        self._step_seconds: list[float] = []

    def _is_done(self, run: PlannedRun) -> bool:
        return run.digest in self._known and self._known[run.digest].status == "done"

    def run(self) -> ComparisonOutcome:
        """Until all have ended, or a signal has stopped them; then nothing that was started here is alive."""
        if self._before:
            self._say(f"{self._before} of {len(self._all)} runs are done already")
        try:
            while self._running or (self._waiting and not self._signals):
                self._fill()
                time.sleep(POLL_S)
                self._heed_signals()
                for running in list(self._running):
                    self._look(running)
        finally:
            for running in self._running:
                self._processes.kill(running.child)
        return ComparisonOutcome(self._done, self._before, self._failed, bool(self._signals))

    # --- starting ---

    def _fill(self) -> None:
        """Start runs in the slots that are free."""
        taken = {running.slot for running in self._running}
        for slot in range(len(self._slots)):
            if slot not in taken and self._waiting and not self._signals:
                self._running.append(self._start(self._waiting[0], slot))
                self._waiting.pop(0)  # now, so that it counts in the time that is left

    def _start(self, run: PlannedRun, slot: int) -> _Running:
        directory, log = RunDirectory(self._folder / "runs" / run.name), self._folder / "logs" / f"{run.name}.log"
        command = [sys.executable, "-m", "vcpo_megatron", "train"]
        begun = directory.resolved.is_file()  # a start that died before its first rollout can be resumed, too
        if begun:
            command += ["--run-dir", str(directory.path), "--resume"]
        else:
            file = self._folder / "configs" / f"{run.name}.toml"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, dump_resolved(run.config))
            command += [str(file), "--run-dir", str(directory.path)]
        first_step = max(directory.complete_steps(), default=0) if begun else 0
        number = self._all.index(run) + 1
        verb = f"goes on from step {first_step}" if begun else "starts"
        self._say(f"{number}/{len(self._all)} {run.label}: {verb}{self._time_left()}")
        follower = JsonlFollower(directory.metrics)
        follower.poll()  # rows of an earlier attempt: they are about to be cut back
        child = self._processes.start(command, self._slots[slot], log)
        known = self._known_cost(run)
        cost = {step: seconds for step, seconds in known.items() if step < first_step}
        already = cost.get(first_step - 1, 0.0)
        return _Running(
            run=run,
            number=number,
            child=child,
            directory=directory,
            log=log,
            slot=slot,
            processes=ProcessSeconds(child.pid, already),
            follower=follower,
            progress=Progress(run.config.train.steps, first_step=first_step, stream=io.StringIO()),
            began=time.monotonic(),
            cost=cost,
            steps_done=first_step,
            first_step=first_step,
            said_at=time.monotonic(),
        )

    def _known_cost(self, run: PlannedRun) -> dict[int, float]:
        """Process seconds by step of an attempt before this one, where they were recorded."""
        record = self._known.get(run.digest)
        if record is None:
            return {}
        pairs = zip(record.step, record.process_seconds, strict=False)
        return {step: seconds for step, seconds in pairs if seconds is not None}

    # --- following ---

    def _look(self, running: _Running) -> None:
        ended = running.child.poll() is not None
        seconds = running.processes.look()
        counted = running.first_step == 0 or running.first_step - 1 in running.cost
        for row in running.follower.poll():
            running.progress.show(row)
            if row["step"] >= running.first_step:
                running.steps_done = max(running.steps_done, row["step"] + 1)
                if counted:  # else what was spent before is not known
                    running.cost.setdefault(row["step"], seconds)
        if ended:
            self._end(running)
        elif time.monotonic() - running.said_at >= SAY_EVERY_S:
            running.said_at = time.monotonic()
            where = f"{running.number}/{len(self._all)} {running.run.label}"
            self._say(f"{where}: {running.progress.line()}{self._time_left()}")

    def _end(self, running: _Running) -> None:
        self._running.remove(running)
        code, took = running.child.returncode, time.monotonic() - running.began
        steps = running.steps_done - running.first_step
        if steps:
            self._step_seconds.append(took / steps)
        status, reason = self._status(running, code)
        before = self._known.get(running.run.digest)
        record = record_of(
            running.run,
            running.directory,
            comparison=self._name,
            status=status,
            reason=reason,
            cost=running.cost,
            seconds=took + (before.seconds or 0.0 if before and running.first_step else 0.0),
        )
        self._results.add(record)
        self._done += status == "done"
        self._failed += status == "failed"
        last = f", last accuracy {record.accuracy[-1]:.3f}" if record.accuracy else ""
        what = f"{status}{last}" if status == "done" else f"{status} after {running.steps_done} steps: {reason}"
        where = f"{running.number}/{len(self._all)} {running.run.label}"
        self._say(f"{where}: {what} ({_clock(took)}){self._time_left()}")

    def _status(self, running: _Running, code: int) -> tuple[Status, str]:
        if code == 0:
            return "done", ""
        if self._signals:
            return "stopped", "the comparison was stopped"
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code > 128:
            return "stopped", f"it was stopped by signal {code - 128}; the comparison takes it up again"
        return "failed", self._processes.error(running.log) or f"ended with {ending}; see {running.log}"

    def _time_left(self) -> str:
        """Of the whole comparison, by the mean time of a step so far; "" before the first run has ended."""
        if not self._step_seconds:
            return ""
        steps = sum(run.config.train.steps for run in self._waiting)
        steps += sum(running.run.config.train.steps - running.steps_done for running in self._running)
        mean = sum(self._step_seconds) / len(self._step_seconds)
        return f"; all runs: {_clock(steps * mean / len(self._slots))} left" if steps else ""

    # --- stopping ---

    def _heed_signals(self) -> None:
        """Hand each signal on as a stop: the first asks for a checkpoint, the second for an end at once."""
        if self._signals and not self._asked:
            grace = max((running.run.config.launch.grace_s for running in self._running), default=0.0)
            self._stop_by = time.monotonic() + grace + _STOP_MARGIN_S
            if self._running:
                self._say(f"stopping {len(self._running)} runs after a checkpoint; once more: at once")
        while self._asked < min(len(self._signals), 2):
            self._asked += 1
            for running in self._running:
                self._processes.ask(running.child)
        if self._asked and time.monotonic() > self._stop_by:
            for running in self._running:
                self._say(f"{running.run.label}: did not stop in time and is killed; see {running.log}")
                self._processes.kill(running.child)


def _clock(seconds: float) -> str:
    """ "1:05:09"."""
    return str(datetime.timedelta(seconds=round(seconds)))
