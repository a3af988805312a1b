"""What became of each run, one JSON object a line of ``results.jsonl``: the record that all tables are made of.

Lines are only added. A run that was stopped, or failed, has a line too, and one more when it was taken up again: the
newest line of a digest counts. Numbers by step have four significant digits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ..config.load import written
from ..observability.sinks import read_rows
from ..run.directory import RunDirectory
from ..run.errors import ConfigError
from .matrix import PlannedRun

#: Metrics that are kept by step.
SERIES = (
    *("reward/mean", "ess/ratio", "ess/lr_scale", "weight/mean", "weight/max", "kl/behavior", "entropy"),
    *("grad_norm/total", "grad_norm/trajectory_mean", "grad_norm/trajectory_max", "groups/zero_variance"),
    *("lr/effective", "time/step", "step/skipped"),
)
#: Keys of a configuration that name places of one machine.
_PLACES = (
    *("environment.data", "environment.heldout", "environment.modules", "model.path", "rollout.python"),
    *("rollout.replay", "train.start_from"),
)
_LIBRARIES = ("vcpo-megatron", "megatron-core", "torch", "transformers")

#: Fields that are lists in a line.
_LISTS = ("evaluated", "accuracy", "samples", "step", "process_seconds")

Status = Literal["done", "failed", "stopped"]


@dataclass(frozen=True)
class RunRecord:
    """One line.

    status       "stopped": by a signal, to be taken up again
    reason       why it failed, or what stopped it
    evaluated    optimizer steps before each evaluation; ``accuracy``: what it got, ``samples``: of how many
    step         index of every step done; ``series``: metric -> its value in each of them, None where it has none;
                 a metric that has none at all is left out
    process_seconds   processor seconds of all processes of the run until each step was done, starts and evaluations
                 included; None where they are not known
    seconds      of the clock, from start to end, of all attempts together
    """

    comparison: str
    digest: str
    method: str
    lag: int
    rate: float
    seed: int
    steps: int
    status: Status
    reason: str = ""
    evaluated: tuple[int, ...] = ()
    accuracy: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    series: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    process_seconds: tuple[float | None, ...] = ()
    seconds: float | None = None
    ended: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As that of the run that was planned."""
        return f"{self.method}, lag {self.lag}, rate {self.rate:g}, seed {self.seed}"


def record_of(
    run: PlannedRun,
    directory: RunDirectory,
    *,
    comparison: str,
    status: Status,
    reason: str = "",
    cost: Mapping[int, float] | None = None,
    seconds: float | None = None,
) -> RunRecord:
    """The record of ``run`` from its run directory; ``cost``: process seconds until a step was done, by step."""
    rows = read_rows(directory.metrics)
    seen = {int(row["eval/version"]): row for row in rows if _finite(row.get("eval/accuracy"))}
    values = written(run.config)
    return RunRecord(
        comparison=comparison,
        digest=run.digest,
        method=run.method,
        lag=run.lag,
        rate=run.rate,
        seed=run.seed,
        steps=run.config.train.steps,
        status=status,
        reason=reason,
        evaluated=tuple(sorted(seen)),
        accuracy=tuple(seen[version]["eval/accuracy"] for version in sorted(seen)),
        samples=tuple(int(seen[version].get("eval/samples", 0)) for version in sorted(seen)),
        step=tuple(row["step"] for row in rows),
        series={
            name: tuple(_short(row.get(name)) for row in rows)
            for name in SERIES
            if any(_finite(row.get(name)) for row in rows)
        },
        process_seconds=tuple(_short((cost or {}).get(row["step"]), 6) for row in rows),
        seconds=_short(seconds, 6),
        ended=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        machine={"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "system": platform.system()},
        config={key: text for key, text in values.items() if key not in _PLACES},
    )


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _short(value: Any, digits: int = 4) -> float | None:
    return float(f"{value:.{digits}g}") if _finite(value) else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> str:
    """As the kernel names it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# --- the file ---------------------------------------------------------------------------------


@contextlib.contextmanager
def appended(path: Path) -> Iterator[ResultsFile]:
    """``path``, open for adding lines, by one process at a time; ConfigError while another one has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError([f"{path}: another comparison is adding to it; wait, or give another --out"]) from None
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # a line that a kill left without its end
        yield ResultsFile(path, file)


class ResultsFile:
    """Adds lines, each one on disk before ``add`` returns."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._file = path, file

    def add(self, record: RunRecord) -> None:
        """OSError, which names the file, when the disk does not take it."""
        line = json.dumps(dataclasses.asdict(record), allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def read_records(paths: Iterable[Path]) -> list[RunRecord]:
    """All records of ``paths``, files or the folders that hold a results.jsonl; a torn last line is passed over.
    ConfigError: there is no such file, or a line is none of ours."""
    records = []
    for path in paths:
        file = path / "results.jsonl" if path.is_dir() else path
        try:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except OSError as error:
            raise ConfigError([f"{file}: {error.strerror}; give a results.jsonl, or the folder of a comparison"]) from (
                None
            )
        for number, line in enumerate(lines, 1):
            if line.endswith("\n"):
                records.append(_record(line, f"{file}: line {number}"))
    return records


def _record(line: str, where: str) -> RunRecord:
    try:
        values = json.loads(line)
        return RunRecord(
            **{
                **values,
                **{name: tuple(values[name]) for name in _LISTS if name in values},
                "series": {name: tuple(by_step) for name, by_step in values["series"].items()},
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError([f"{where}: is no result of a run; give files that vcpo compare wrote"]) from None


def newest(records: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """By digest, the newest record; one of a run that is done is not replaced by one that is not."""
    found: dict[str, RunRecord] = {}
    for record in records:
        held = found.get(record.digest)
        if held is None or held.status != "done" or record.status == "done":
            found[record.digest] = record
    return found
