"""What became of the trajectories of a run, by step and one by one, and how well it learned, as text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..orchestrator.store.reader import StoreReader
from ..orchestrator.store.schema import StoreError
from ..run.text import kind_of, printable
from .learning import learning_table, span
from .tables import aligned, cell, terminal_width
from .transcript import Transcripts, lines_of

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
#: Column of the summary, named as the metric where there is one -> (key of ``StoreReader.by_steps``, format).
_SUMMARY = {
    "groups": ("groups", "d"),
    "trained": ("trained", "d"),
    "dropped": ("dropped", "d"),
    "failed": ("failed", "d"),
    "staleness/max": ("staleness", "d"),
    "reward/mean": ("reward", ".4g"),
    "tokens": ("tokens", "d"),
}

#: Where a failure happened, as ``rollout.agent_loop`` puts it before the error.
_PLACE = re.compile(r"^(failed: )environment .*?, prompt .*?, sample \d+/\d+: ")


def print_summary(store: StoreReader, metrics: Sequence[Mapping[str, Any]], *, most_rows: int) -> None:
    """Print what was trained and lost by step, what the rows of ``metrics`` say of it, then the totals and reasons of
    the whole run.

    A run of more than ``most_rows`` steps has several steps a row.
    """
    done = store.steps_done()
    size = steps_a_row(done, most_rows)
    table = [["step", *_SUMMARY]]
    for row in store.by_steps(size):
        table.append([span(row["first"], size, done), *(cell(row[key], form) for key, form in _SUMMARY.values())])
    print("\n".join(aligned(table, terminal_width())))
    if learned := learning_table(metrics, size, done):
        print("\n" + "\n".join(aligned(learned, terminal_width())))
    if size > 1:
        print(f"{size} steps a row: --rows {done} shows each, --step N the trajectories of one")
    _print_totals(store, as_json=False)


def steps_a_row(steps: int, most_rows: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... with which ``steps`` fit into ``most_rows`` rows."""
    sizes = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    return next(size for size in sizes if size * most_rows >= steps)


def print_history(
    store: StoreReader,
    *,
    step: int | None,
    prompt_id: str | None,
    as_json: bool,
    transcripts: Transcripts | None = None,
) -> None:
    """Print the selected trajectories, with ``transcripts`` their text too, then totals and reasons of the whole run.

    StoreError when nothing fits the selection.
    """
    rows = store.history(step=step, prompt_id=prompt_id)
    first = next(rows, None)
    if first is None:
        _refuse_empty_selection(store, step, prompt_id)
    if not as_json:
        print("  ".join(name.rjust(width) for name, (_, width, _) in _COLUMNS.items()).rstrip())
    for row in itertools.chain([first] if first else [], rows):
        text = transcripts.of(row) if transcripts else {}
        print(json.dumps({**row, **text}) if as_json else _line(row))
        if text and not as_json:
            print("\n".join(lines_of(text)))
    _print_totals(store, as_json=as_json)


def _refuse_empty_selection(store: StoreReader, step: int | None, prompt_id: str | None) -> None:
    """StoreError that says what there is instead of what was selected; nothing for an empty store."""
    steps = store.trained_steps()
    if step is not None and step not in steps:
        there = f"{steps[0]} ... {steps[-1]}" if steps else "none has been trained yet"
        raise StoreError(f"no step {step} ({there})")
    if prompt_id is not None:
        example = next(store.history(), None)
        there = f"prompts are named like {example['prompt_id']}" if example else "nothing has been sampled yet"
        raise StoreError(f"no prompt {prompt_id}{'' if step is None else f' in step {step}'} ({there})")


def summed(reasons: Mapping[str, int]) -> dict[str, int]:
    """``reasons`` without the place of a failure; those that differ in numbers alone are one, with "#" for them."""
    kinds: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for reason, count in reasons.items():
        error = _PLACE.sub(r"\1", reason)
        kinds[kind_of(error)].append((error, count))
    return {
        found[0][0] if len({error for error, _ in found}) == 1 else kind: sum(count for _, count in found)
        for kind, found in kinds.items()
    }


def _print_totals(store: StoreReader, *, as_json: bool) -> None:
    totals = {**dataclasses.asdict(store.counts()), "reasons": summed(store.reasons())}
    if as_json:
        print(json.dumps({"totals": totals}))
        return
    reasons = totals.pop("reasons")
    print(", ".join(f"{name} {count}" for name, count in totals.items()))
    for reason, count in reasons.items():
        print(f"{count:>8}  {printable(reason)}")


def _line(row: Mapping[str, Any]) -> str:
    return "  ".join(cell(row[key], form).rjust(width) for key, width, form in _COLUMNS.values()).rstrip()
