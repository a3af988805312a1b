"""What a report knows of one run: its rows of metrics, its configuration, its store; what is missing is left out."""

from __future__ import annotations

import contextlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config.schema import RunConfig
from ..observability.sinks import read_rows
from ..orchestrator.store.reader import StoreReader
from ..orchestrator.store.schema import StoreError
from ..orchestrator.store.store import RolloutStore
from ..run.directory import RunDirectory
from ..run.errors import ConfigError

#: Numbers that are made of others of the same row, and of the row before.
DERIVED = ("tokens/second", "tokens/trajectory")


@dataclass(frozen=True)
class ReportedRun:
    """``rows``: of ``metrics.jsonl``, in order of step, one a step, with ``DERIVED`` numbers. ``config``: "section.key"
    -> value as JSON text. ``store`` is None where it cannot be read, and ``notes`` say what is missing."""

    name: str
    directory: RunDirectory
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, str]
    store: StoreReader | None
    notes: tuple[str, ...] = ()
    numbers: np.ndarray = field(default_factory=lambda: np.zeros((0, 5)))

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the rows that have ``name``; nan where it was not finite."""
        found = [(row["step"], float(row[name])) for row in self.rows if isinstance(row.get(name), int | float)]
        return [step for step, _ in found], [value for _, value in found]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.column(name)[1] if math.isfinite(value)]

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else -1


@contextlib.contextmanager
def opened(paths: Sequence[Path]) -> Iterator[list[ReportedRun]]:
    """The runs of ``paths``, in this order, each under a name of its own. ConfigError: one of them is no run."""
    with contextlib.ExitStack() as stack:
        yield [_open(path, name, stack) for path, name in zip(paths, run_names(paths), strict=True)]


def run_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart; a path that is given twice gets a number."""
    full = [path.resolve().parts for path in paths]
    different = set(full)

    def name(parts: tuple[str, ...]) -> str:
        sizes = range(1, len(parts) + 1)
        alone = (size for size in sizes if sum(other[-size:] == parts[-size:] for other in different) == 1)
        return "/".join(parts[-next(alone, len(parts)) :])

    names = [name(parts) for parts in full]
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _open(path: Path, name: str, stack: contextlib.ExitStack) -> ReportedRun:
    directory, notes = RunDirectory(path), list[str]()
    if not any(file.is_file() for file in (directory.metrics, directory.store, directory.resolved)):
        raise ConfigError([f"{path}: no run directory (no metrics.jsonl, rollouts.sqlite or resolved.toml); give one"])
    rows = by_step(read_rows(directory.metrics))
    if not rows:
        notes.append("metrics.jsonl has no row yet")
    store, numbers = None, np.zeros((0, 5))
    try:
        store = stack.enter_context(RolloutStore.open_readonly(directory.store))
        numbers = store.trained_numbers()
    except StoreError as error:
        notes.append(str(error))
    config, problem = config_of(directory.resolved)
    if problem:
        notes.append(problem)
    return ReportedRun(name, directory, rows, config, store, tuple(notes), numbers)


def by_step(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows in order of step, the last one of each, with ``DERIVED`` numbers where they can be made."""
    last = {row["step"]: dict(row) for row in rows}
    found = [last[step] for step in sorted(last)]
    before: Mapping[str, Any] = {"step": -1, "rollouts/trained": 0}
    for row in found:
        tokens, seconds = _number(row, "tokens/trained"), _number(row, "time/step")
        if tokens is not None and seconds:
            row["tokens/second"] = tokens / seconds
        trained, earlier = _number(row, "rollouts/trained"), _number(before, "rollouts/trained")
        if before["step"] == row["step"] - 1 and None not in (tokens, trained, earlier) and trained != earlier:
            row["tokens/trajectory"] = tokens / (trained - earlier)  # type: ignore[operator]
        before = row
    return found


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def config_of(path: Path) -> tuple[dict[str, str], str]:
    """("section.key" -> value as JSON, what is wrong with the file). Not validated: an older one is shown, too."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return {}, f"resolved.toml cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return {}, f"resolved.toml is no TOML: {error}"
    return {
        f"{section}.{key}": as_json(value)
        for section, table in tables.items()
        for key, value in (table.items() if isinstance(table, dict) else [])
    }, ""


def as_json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def defaults() -> dict[str, str]:
    """ "section.key" -> default as JSON, of every key that has one."""
    found = {}
    for section, model in RunConfig.model_fields.items():
        for key, option in getattr(model.annotation, "model_fields", {}).items():
            if not option.is_required() and (value := option.get_default(call_default_factory=True)) is not None:
                found[f"{section}.{key}"] = as_json(value)
    return found
