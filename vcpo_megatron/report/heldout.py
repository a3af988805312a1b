"""What evaluations of a run got: how many samples failed, and each held-out prompt's answer, from the rollout store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..orchestrator.store.reader import StoreReader
from ..orchestrator.store.schema import StoreError
from ..run.text import printable
from .tables import aligned, cell
from .transcript import Transcripts, lines_of

#: Column of the summary -> (key of ``StoreReader.evaluations``, format).
_SUMMARY = {
    "version": ("version", "d"),
    "samples": ("samples", "d"),
    "failed": ("failed", "d"),
    "accuracy": ("reward", ".4f"),
}


def print_evaluations(
    store: StoreReader,
    *,
    version: int | None,
    prompt_id: str | None,
    as_json: bool,
    transcripts: Transcripts | None = None,
) -> None:
    """Print a row a version that was evaluated, and the answers to the held-out prompts: by the newest version, by
    ``version``, or all to ``prompt_id``. With ``transcripts`` their text too.

    StoreError when there is nothing to print.
    """
    evaluations = store.evaluations()
    _refuse_nothing(evaluations, version)
    if version is None and prompt_id is None:
        version = evaluations[-1]["version"]
    rows = [_shown(row, transcripts) for row in store.heldout(version=version, prompt_id=prompt_id)]
    if not rows:
        example = next(store.heldout())["prompt_id"]
        raise StoreError(f"no held-out prompt {prompt_id} (they are named like {example})")
    if as_json:
        for row in rows:
            print(json.dumps(row))
        print(json.dumps({"evaluations": evaluations}))
        return
    table = [list(_SUMMARY), *([cell(row[key], form) for key, form in _SUMMARY.values()] for row in evaluations)]
    print("\n".join(aligned(table)))
    print()
    names = ["version", "prompt", "reward", "tokens"]
    lines = aligned([names, *([_cell(row, name) for name in names] for row in rows)])
    print(f"{lines[0]}  answer")
    for line, row in zip(lines[1:], rows, strict=True):
        print(f"{line}  {printable(row['reason'] or row['finish_reason'] or '-')}".rstrip())
        if transcripts:
            print("\n".join(lines_of(row)))


def _refuse_nothing(evaluations: list[dict[str, Any]], version: int | None) -> None:
    if not evaluations:
        raise StoreError("no evaluation is stored: none is done yet, there are no held-out prompts, or eval_every is 0")
    known = [row["version"] for row in evaluations]
    if version is not None and version not in known:
        raise StoreError(f"version {version} was not evaluated; these were: {', '.join(map(str, known))}")


def _shown(row: Mapping[str, Any], transcripts: Transcripts | None) -> dict[str, Any]:
    """What is printed of a row of ``StoreReader.heldout``: sampled tokens are counted, not listed."""
    trajectory = row["trajectory"]
    shown = {name: row[name] for name in ("version", "position", "prompt_id", "reward", "reason")}
    shown["tokens"] = None if trajectory is None else trajectory.num_sampled
    shown["finish_reason"] = None if trajectory is None else trajectory.turns[-1].finish_reason
    text = transcripts.of_trajectory(trajectory, sampled=not row["reason"]) if transcripts else {}
    return {**shown, **text}


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name == "prompt":
        return printable(row["prompt_id"])
    return cell(row[name], ".4g" if name == "reward" else "d")
