"""Rows of ``metrics.jsonl``: one a step, in order, each complete when it is written.

Where an evaluation stands. Version v is evaluated while step v trains (and v = 0 before anything has trained): its
result, ``eval/accuracy`` and ``eval/version`` = v, is in the row of step v. The version that the last step made is
evaluated at the end: that result is in the last step's row, and the version before is then not evaluated, so that a
row never has two. A row whose evaluation still runs is held back, and with it those after it. A checkpoint carries
the rows that were held back when it was taken, since a resumed run would have no other way to know them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...observability.metrics import StepMetrics
from ...observability.sinks import Row, Sink, cut_back, read_rows
from ...types import Batch, StepResult, Trajectory
from ..store.reader import Counts

#: Share of held-out samples that may fail in an evaluation by which a checkpoint becomes the best.
MOST_FAILED = 0.05


def may_be_best(result: Mapping[str, Any]) -> bool:
    """Whether an evaluation (``eval/...`` of a row) has an accuracy that nearly all samples speak for."""
    accuracy, failed, samples = (result.get(f"eval/{name}", math.nan) for name in ("accuracy", "failed", "samples"))
    return math.isfinite(accuracy) and bool(failed <= MOST_FAILED * samples)


@dataclass(frozen=True)
class DueVersions(Sequence[int]):
    """``regular`` and then ``last``, ascending. Nothing here takes longer, or more memory, in a longer run."""

    regular: range
    last: int

    def __len__(self) -> int:
        return len(self.regular) + 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index in (-1, len(self.regular)):
            return self.last
        return self.regular[index if index >= 0 else index + 1]

    def __contains__(self, version: object) -> bool:
        return version == self.last or version in self.regular


def evaluated_versions(first_step: int, steps: int, every: int) -> Sequence[int]:
    """Versions to evaluate in a run that starts at ``first_step`` and ends after ``steps`` steps; ``every`` = 0: none.

    Multiples of ``every``, and ``steps`` itself, which replaces ``steps`` - 1. A run that is past ``steps`` makes none.
    """
    if not every or first_step > steps:
        return ()
    return DueVersions(range(-(-first_step // every) * every, steps - 1, every), steps)


def row_of_version(version: int, steps: int) -> int:
    """The step whose row holds the evaluation of ``version``."""
    return min(version, steps - 1)


@dataclass(frozen=True)
class Start:
    """``rows``: held-back rows of before a resume, to be added first. ``versions``: what this attempt evaluates.
    ``written``: the rows that are in the file. ``problem``: what is missing there, in words; "" when nothing is."""

    rows: Sequence[Row]
    versions: Sequence[int]
    written: Sequence[Row] = ()
    problem: str = ""


def start_of_log(path: Path, step: int, steps: int, held: Sequence[Row], versions: Sequence[int]) -> Start:
    """Cut ``path`` back to the rows before ``step``, and find out what a resumed run has to add to them.

    ``held`` are the rows that checkpoint ``step`` carries. When all steps are done already, the last row is written
    again if its evaluation is missing (a sink puts it in the place of the first); if it is there, nothing is evaluated
    any more. Rows before ``step`` are never cut.
    """
    torn = cut_back(path, step)
    written = read_rows(path)
    last = written[-1]["step"] if written else -1
    rows = [row for row in held if last < row["step"] < step]
    problem = _problem(path, torn, {row["step"] for row in (*written, *rows)}, step)
    if step != steps or rows or last != steps - 1 or not versions:
        return Start(rows, versions, written, problem)
    if written[-1].get("eval/version") == steps:
        return Start((), (), written, problem)
    return Start(written[-1:], versions, written, problem)


def _problem(path: Path, torn: Sequence[int], there: set[int], steps: int) -> str:
    """What a user should know of a file that somebody else has changed, or a disk has lost."""
    missing = [step for step in range(steps) if step not in there]
    found = [f"lines {_ranges(torn)} were no rows and are left out"] if torn else []
    found += [f"rows of steps {_ranges(missing)} are missing"] if missing else []
    return f"{path}: {' and '.join(found)}; the run goes on without them" if found else ""


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending ``numbers`` as "3-5, 8"."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


class MetricsLog:
    """Writes rows to ``sinks`` in order of step. ``versions``: what will be evaluated, in a run of ``steps`` steps.

    ``accuracy``: held-out accuracy by version, of every evaluation so far in which nearly no sample failed; it begins
    with that of ``earlier`` rows.
    """

    def __init__(self, sinks: Sequence[Sink], versions: Sequence[int], steps: int, earlier: Sequence[Row] = ()) -> None:
        self.accuracy: dict[int, float] = {}
        for row in earlier:
            self._note(row)
        self._sinks = sinks
        self._steps = steps
        self._versions: Sequence[int] = versions
        self._done: set[int] = set()  # steps whose evaluation is in
        self._results: dict[int, Mapping[str, float]] = {}
        self._held: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        self._held.append(dict(row))
        self._write_ready()

    def evaluated(self, version: int, result: Mapping[str, float]) -> None:
        """Add what the evaluation of ``version`` found to the row that waits for it."""
        step = row_of_version(version, self._steps)
        self._results[step] = {**result, "eval/version": version}
        self._note(self._results[step])
        self._done.add(step)
        self._write_ready()

    def _note(self, row: Row) -> None:
        if may_be_best(row):
            self.accuracy[int(row["eval/version"])] = row["eval/accuracy"]

    @property
    def held(self) -> list[Row]:
        """Rows that wait for an evaluation, or for one before them."""
        return list(self._held)

    def flush(self) -> None:
        """Write what is held back as it is: its evaluation will not come."""
        self._versions = ()
        self._write_ready()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _write_ready(self) -> None:
        while self._held and not self._waits(self._held[0]["step"]):
            row = self._held.pop(0)
            row.update(self._results.pop(row["step"], {}))
            for sink in self._sinks:
                sink.write(row)

    def _waits(self, step: int) -> bool:
        due = self._steps if step == self._steps - 1 and self._steps in self._versions else step
        return due in self._versions and step not in self._done


def step_row(batch: Batch, result: StepResult, counts: Counts, times: Mapping[str, float]) -> dict[str, Any]:
    """The row of one step without its evaluation: the learner's metrics and the orchestrator's.

    ``times`` holds the ``time/...`` metrics. Counters and ``step`` are integers.
    """
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    own = StepMetrics()
    own.observe("reward/mean", *(trajectory.reward for trajectory in trajectories))
    own.distribution("staleness", (batch.step - trajectory.oldest_version for trajectory in trajectories))
    tokens = [(count, batch.step - version) for one in trajectories for version, count in one.sampled_by_version]
    if sampled := sum(count for count, _ in tokens):
        own.observe("staleness/token_mean", sum(count * lag for count, lag in tokens) / sampled)
    if ages := _ages_at_record(trajectories):
        own.observe("mismatch/versions", sum(count * age for count, age in ages) / sum(count for count, _ in ages))
    own.observe("step/skipped", float(bool(result.skipped)))
    for name, seconds in times.items():
        own.observe(name, seconds)
    trained = 0 if result.skipped else sum(trajectory.num_sampled for trajectory in trajectories)
    return {
        "step": batch.step,
        "policy_version": result.version.number,
        **result.metrics,
        **own.row(),
        "rollouts/generated": counts.generated,
        "rollouts/queued": counts.queued,
        "rollouts/trained": counts.trained,
        "rollouts/dropped": counts.dropped,
        "rollouts/failed": counts.failed,
        "tokens/trained": trained,
    }


def _ages_at_record(trajectories: Sequence[Trajectory]) -> list[tuple[int, int]]:
    """(sampled tokens, versions between the one that sampled them and the one that recorded its log-probs of them) of
    every span; of what the learner has not scored none."""
    return [
        (count, one.recorded.version.number - version)
        for one in trajectories
        if one.recorded is not None
        for version, count in one.sampled_by_version
        if count
    ]
