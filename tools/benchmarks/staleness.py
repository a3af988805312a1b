"""A fixed staleness bound and the adaptive one on the same example, for the same seconds of training.

Both are ``vcpo train`` of one configuration, one after the other; the clock of each starts with its first step, so that
starts and imports do not count. What is compared is what a user gets for the time: steps, ESS ratios, staleness, and
held-out accuracy.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcpo_megatron.observability.sinks import read_rows

from .soak import Attempts

#: Name -> what it sets.
CONTENDERS = {"fixed": ("staleness.adaptive=false",), "adaptive": ("staleness.adaptive=true",)}


@dataclass(frozen=True)
class TrainingOutcome:
    """What one run came to in ``seconds`` of training; nan where nothing was evaluated."""

    contender: str
    seed: int
    seconds: float
    steps: int
    trajectories: int
    ess_ratio: float
    lr_scale: float
    staleness: float
    admitted: float
    accuracy: float
    best_accuracy: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def train_for(
    seconds: float, contender: str, seed: int, config: Path, folder: Path, settings: Sequence[str]
) -> TrainingOutcome:
    """Train for ``seconds`` after the first step, and stop."""
    attempts = Attempts(config, folder, [*settings, *CONTENDERS[contender], f"train.seed={seed}"])
    attempts.start()
    try:
        attempts.wait_for_a_step()
        started = time.monotonic()
        assert attempts.process is not None
        while attempts.process.poll() is None and time.monotonic() < started + seconds:
            time.sleep(0.05)
        rows = read_rows(attempts.directory.metrics)
        spent = time.monotonic() - started
        if attempts.process.poll() is None:
            attempts.process.send_signal(signal.SIGTERM)
        attempts.end(expected=[0, 128 + signal.SIGTERM])
    finally:
        attempts.stop()
    return summarize(rows, contender, seed, spent)


def summarize(rows: Sequence[dict[str, Any]], contender: str, seed: int, seconds: float) -> TrainingOutcome:
    """The outcome of the steps of ``rows``."""

    def mean(name: str, default: float) -> float:
        return statistics.fmean(float(row.get(name, default)) for row in rows)

    accuracy = [value for row in rows if math.isfinite(value := float(row.get("eval/accuracy", math.nan)))]
    return TrainingOutcome(
        contender,
        seed,
        seconds,
        len(rows),
        int(rows[-1]["rollouts/trained"]),
        mean("ess/ratio", math.nan),
        mean("ess/lr_scale", math.nan),
        mean("staleness/mean", math.nan),
        mean("staleness/admitted", math.nan),
        accuracy[-1] if accuracy else math.nan,
        max(accuracy, default=math.nan),
    )


def compare(
    seconds: float,
    seeds: Sequence[int],
    config: Path,
    folder: Path,
    settings: Sequence[str],
    say: Callable[[str], None],
) -> list[TrainingOutcome]:
    """A B, A B, ...: both contenders with each seed."""
    found = []
    for seed in seeds:
        for contender in CONTENDERS:
            say(f"{contender}, seed {seed}: {seconds:g} s")
            found.append(train_for(seconds, contender, seed, config, folder / f"{contender}-{seed}", settings))
    return found


def table(found: Sequence[TrainingOutcome]) -> str:
    """The outcomes as text."""
    lines = ["run        seed  seconds  steps  ESS ratio  lr scale  staleness  admitted  accuracy  best"]
    lines += [
        f"{o.contender:<9}  {o.seed:>4}  {o.seconds:>7.1f}  {o.steps:>5}  {o.ess_ratio:>9.3f}  {o.lr_scale:>8.3f}  "
        f"{o.staleness:>9.2f}  {'' if math.isnan(o.admitted) else format(o.admitted, '.2f'):>8}  {o.accuracy:>8.3f}  "
        f"{o.best_accuracy:>4.3f}"
        for o in found
    ]
    return "\n".join(lines)
