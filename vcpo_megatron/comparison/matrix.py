"""From a spec to the runs that it stands for, each a whole configuration with a name and a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config.load import load_config, written
from ..config.methods import METHODS
from ..config.precision import with_dtype
from ..config.schema import RunConfig
from ..run.errors import ConfigError
from .spec import ComparedMethod, ComparisonSpec

#: Sections and keys that change how a run is watched and kept, not what comes of it.
_BESIDE = ("checkpoint.", "observability.")
_BESIDE_KEYS = frozenset(
    {
        *("environment.date", "environment.workers", "environment.worker_memory_gb", "environment.episode_timeout_s"),
        *("launch.address", "launch.control_port", "launch.grace_s", "launch.master_port", "launch.timeout_s"),
        *("rollout.health_interval_s", "rollout.health_timeout_s", "rollout.max_restarts", "rollout.port"),
        *("rollout.request_timeout_s", "rollout.start_timeout_s", "rollout.sync_timeout_s", "staleness.wait_s"),
    }
)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison. ``digest``: of what decides its result, see ``digest_of``."""

    method: str
    lag: int
    rate: float
    seed: int
    config: RunConfig = field(repr=False)
    digest: str

    @property
    def label(self) -> str:
        """For people: "vcpo, lag 64, rate 0.0005, seed 1"."""
        return f"{self.method}, lag {self.lag}, rate {self.rate:g}, seed {self.seed}"

    @property
    def name(self) -> str:
        """Of its files; another configuration has another one."""
        return f"{self.method}-lag{self.lag}-rate{self.rate:g}-seed{self.seed}-{self.digest[:8]}"


def planned_runs(spec: ComparisonSpec) -> list[PlannedRun]:
    """Every run of ``spec``, seeds last, so that a part of them compares all methods; ConfigError with what is wrong
    with any of their configurations."""
    runs: list[PlannedRun] = []
    problems: dict[str, list[str]] = {}
    for seed in spec.seeds:
        for method in spec.methods:
            for lag in method.lags or spec.lags:
                for rate in method.rates or spec.rates:
                    try:
                        config = _config(spec, method, lag=lag, rate=rate, seed=seed)
                    except ConfigError as error:
                        problems[f"{method.name}, lag {lag}, rate {rate:g}, seed {seed}"] = error.problems
                        continue
                    runs.append(PlannedRun(method.name, lag, rate, seed, config, digest_of(config)))
    if problems:
        raise ConfigError(summed_problems(problems, of=len(runs) + len(problems)))
    return runs


def _config(spec: ComparisonSpec, method: ComparedMethod, *, lag: int, rate: float, seed: int) -> RunConfig:
    named = {"algorithm": {"method": method.name}} if method.name in METHODS else {}
    decided = {
        "train": {"steps": spec.steps, "eval_every": spec.eval_every, "seed": seed},
        "optimizer": {"lr": rate},
        "staleness": {"lag": "exact", "max_staleness": lag},
    }
    layers = [(spec.folder, tables) for tables in (named, spec.set, method.set, decided)]
    return with_dtype(load_config(spec.base, layers=layers))


def digest_of(config: RunConfig) -> str:
    """24 hexadecimal digits of every key of ``config`` that decides what comes of an exact run.

    Two runs of one digest are the same run: how they are watched, kept and waited for is left out, and the day that
    the environment is told, which a run settles at its start.
    """
    values = {
        key: text for key, text in written(config).items() if key not in _BESIDE_KEYS and not key.startswith(_BESIDE)
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def problems_of(runs: Sequence[PlannedRun], examine: Callable[[RunConfig, bool], Sequence[str]]) -> list[str]:
    """What keeps any of ``runs`` from running, one line a problem. ``examine(config, whole)`` tells of one; ``whole``:
    its environment is tried, too, which is done once for all runs that have the same."""
    seen: set[str] = set()
    problems = {}
    for run in runs:
        aside = {"algorithm", "optimizer", "staleness", "train"}
        surroundings = json.dumps(run.config.model_dump(mode="json", exclude=aside), sort_keys=True)
        problems[run.label] = examine(run.config, surroundings not in seen)
        seen.add(surroundings)
    return summed_problems(problems, of=len(runs))


def summed_problems(problems: Mapping[str, Sequence[str]], *, of: int) -> list[str]:
    """Each problem once, with the runs that have it; ``problems`` by run, ``of`` runs in all."""
    by_text: dict[str, list[str]] = {}
    for label, lines in problems.items():
        for line in dict.fromkeys(lines):
            by_text.setdefault(line, []).append(label)
    return [f"{_who(labels, of)}: {line}" for line, labels in by_text.items()]


def _who(labels: Sequence[str], of: int) -> str:
    if len(labels) == of and of > 1:
        return f"all {of} runs"
    return labels[0] if len(labels) == 1 else f"{len(labels)} of {of} runs, {labels[0]} for one"


def default_folder(spec: Path) -> Path:
    """Where the results of ``spec`` go when it is not said."""
    return Path("runs") / f"compare-{spec.stem}"
