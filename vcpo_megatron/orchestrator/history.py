"""What became of every trajectory, as text: from the rollout store alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from .store_reader import StoreReader

#: Column of the table -> (key of ``StoreReader.history``, width, format of a number).
_COLUMNS = {
    "step": ("step", 6, "d"),
    "prompt": ("prompt_id", 24, ""),
    "sample": ("sample_index", 6, "d"),
    "state": ("state", 8, ""),
    "staleness": ("staleness", 9, "d"),
    "reward": ("reward", 9, ".4g"),
    "weight": ("weight", 9, ".4g"),
    "baseline": ("baseline", 9, ".4g"),
    "reason": ("reason", 0, ""),
}


def print_history(store: StoreReader, *, step: int | None, prompt_id: str | None, as_json: bool) -> None:
    """Print the selected trajectories, then the totals of the whole run and its reasons."""
    totals = {**dataclasses.asdict(store.counts()), "reasons": store.reasons()}
    if not as_json:
        print("  ".join(name.rjust(width) for name, (_, width, _) in _COLUMNS.items()).rstrip())
    for row in store.history(step=step, prompt_id=prompt_id):
        print(json.dumps(row) if as_json else _line(row))
    if as_json:
        print(json.dumps({"totals": totals}))
        return
    reasons = totals.pop("reasons")
    print(", ".join(f"{name} {count}" for name, count in totals.items()))
    for reason, count in reasons.items():
        print(f"{count:>8}  {reason}")


def _line(row: Mapping[str, Any]) -> str:
    cells = []
    for key, width, form in _COLUMNS.values():
        value = row[key]
        text = "-" if value is None else format(value, form) if form else str(value)
        cells.append(text.rjust(width))
    return "  ".join(cells).rstrip()
