"""How well a run learned, and where its time went: rows of ``metrics.jsonl``, several steps a row in a long run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .tables import cell

#: Column -> (metric, "last" or "mean" of a row's steps, format). The last ones are left out where there is no room.
_COLUMNS = {
    "accuracy": ("eval/accuracy", "last", ".4f"),
    "reward": ("reward/mean", "mean", ".3f"),
    "loss": ("loss", "mean", ".2g"),
    "lr": ("lr/effective", "last", ".1e"),
    "ESS": ("ess/ratio", "mean", ".2f"),
    "KL": ("kl/behavior", "mean", ".2g"),
    "s/step": ("time/step", "mean", ".1f"),
    "s/wait": ("time/wait_batch", "mean", ".1f"),
    "s/train": ("time/forward_backward", "mean", ".1f"),
    "s/sync": ("time/sync", "mean", ".1f"),
}


def learning_table(rows: Iterable[Mapping[str, Any]], size: int, done: int) -> list[list[str]]:
    """Cells of the table of a run of ``done`` steps, ``size`` steps a row, under their names; [] without a row."""
    spans: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if isinstance(step := row.get("step"), int):
            spans[step // size * size].append(row)
    if not spans:
        return []
    table = [["step", *_COLUMNS]]
    for first in sorted(spans):
        cells = (cell(_value(spans[first], name, of), form) for name, of, form in _COLUMNS.values())
        table.append([span(first, size, done), *cells])
    return table


def span(first: int | None, size: int, done: int) -> str:
    """The steps of a row that begins with ``first``, of ``done`` in all; "-" for none."""
    if first is None:
        return "-"
    last = max(first, min(first + size, done) - 1)
    return str(first) if first == last else f"{first}-{last}"


def _value(rows: Sequence[Mapping[str, Any]], name: str, of: str) -> float | None:
    values = [float(value) for row in rows if isinstance(value := row.get(name), int | float) and math.isfinite(value)]
    if not values:
        return None
    if of == "last":
        return values[-1]
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # of two numbers near the largest
        return math.fsum(value / len(values) for value in values)
