"""Some trajectories of a run as HTML, their sampled tokens marked for colours: by weight, by version, by probability.

Chosen are those that say most: the largest and the smallest weight, the largest norm, the best and the worst reward of
the newest step, the most versions. A weight is that of the trajectory: the store keeps none of single tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..models.tokenizer import TokenizerError, load_tokenizer
from ..orchestrator.store.schema import StoreError
from ..types import Trajectory
from .charts import escaped, number_text
from .runs import ReportedRun

#: Bins of log2 w to each side of 1, two a factor of 2.
WEIGHT_BINS = 6
#: Bins of the probability of a token: above these, and below the last.
PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
VERSION_COLORS = 6
#: Tokens that a token of text may be made of; where they are more, what cannot be decoded is shown as it is.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True)
class ChosenSample:
    """One chosen trajectory: ``why`` it is shown, and its row of ``StoreReader.history``."""

    why: str
    row: Mapping[str, Any]
    trajectory: Trajectory


def chosen_samples(run: ReportedRun, steps: Sequence[int] = ()) -> list[ChosenSample]:
    """Trajectories of which tokens are stored; of ``steps`` the worst one each. [] without a store."""
    if run.store is None or not len(run.numbers):
        return []
    known = run.numbers[np.isfinite(run.numbers[:, 4])]
    if not len(known):
        return []
    found: dict[tuple[int, int], ChosenSample] = {}
    for why, step, key, sign in _wishes(known, steps):
        rows = [row for row in run.store.history(step=step) if row[key] is not None and math.isfinite(row[key])]
        for row in sorted(rows, key=lambda row: sign * row[key]):
            uid = row["group_id"], row["sample_index"]
            if uid in found:
                continue
            try:
                trajectory = run.store.trajectory(*uid)
            except StoreError:  # damaged: the text report names it
                continue
            if trajectory is not None:
                found[uid] = ChosenSample(f"{why} (step {step})", row, trajectory)
                break
    return list(found.values())


def _wishes(known: np.ndarray, steps: Sequence[int]) -> Iterator[tuple[str, int, str, int]]:
    """(why, step, key of a row, 1 for its smallest or -1 for its largest)."""
    newest = int(known[-1, 0])
    yield "best reward of the newest step", newest, "reward", -1
    yield "worst reward of the newest step", newest, "reward", 1
    for step in steps:
        yield "worst reward where the run fell", step, "reward", 1
    for why, column, key, largest in (
        ("largest weight of the run", 1, "log_ratio", True),
        ("smallest weight of the run", 1, "log_ratio", False),
        ("largest norm of the run", 2, "grad_norm", True),
        ("longest of the run", 4, "reward", True),
    ):
        values = known[:, column]
        there = np.isfinite(values)
        if there.any():
            at = np.where(there, values, -np.inf if largest else np.inf)
            yield why, int(known[at.argmax() if largest else at.argmin(), 0]), key, -1 if largest else 1


class Decoder:
    """Texts of token ids by a run's tokenizer; the ids themselves where that cannot be read (``problem`` says why)."""

    def __init__(self, run: ReportedRun) -> None:
        self._tokenizer, self.problem = None, ""
        try:
            path = json.loads(run.config.get("model.path", '""'))
            self._tokenizer = load_tokenizer(Path(path) / "tokenizer.json")
        except (TokenizerError, OSError, ValueError, TypeError) as error:
            self.problem = f"the run's tokenizer cannot be read, so token ids are shown: {error}"

    def text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"{token} " for token in ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        """(number of tokens, text) of each piece in order: one token, or as many as a character needs."""
        found, start = [], 0
        for end in range(1, len(ids) + 1):
            text = self._after(ids[max(0, start - _LONGEST_CHARACTER) : start], ids[start:end])
            if text.endswith("\ufffd") and end - start < _LONGEST_CHARACTER and end < len(ids):
                continue
            found.append((end - start, text))
            start = end
        return found

    def _after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of ``ids`` where ``before`` stands before them: some tokenizers drop a blank at the beginning."""
        whole, known = self.text([*before, *ids]), self.text(before) if before else ""
        return whole[len(known) :] if whole.startswith(known) else self.text(ids)


def sample_html(sample: ChosenSample, decoder: Decoder, most_tokens: int) -> str:
    """One trajectory; of each piece of it ``most_tokens`` tokens at most are shown, and it says how many are not."""
    row, trajectory = sample.row, sample.trajectory
    facts = [
        ("reward", row["reward"]),
        ("staleness", row["staleness"]),
        ("weight", row["weight"]),
        ("log ratio", row["log_ratio"]),
        ("norm", row["grad_norm"]),
        ("baseline", row["baseline"]),
    ]
    said = "".join(
        f"<span>{name} <b>{number_text(float(value)) if value is not None else '-'}</b></span>" for name, value in facts
    )
    versions = " ".join(
        f'<i class="v{i % VERSION_COLORS}">{version}</i>' for i, version in enumerate(_versions(trajectory))
    )
    body = "".join(_pieces(trajectory, decoder, most_tokens))
    return (
        f'<article class="sample w{_weight_bin(row["log_ratio"])}"><h4>{escaped(sample.why)}</h4>'
        f'<p class="facts"><span>{escaped(row["prompt_id"])}, sample {trajectory.uid}</span>{said}'
        f"<span>versions {versions}</span></p><pre>{body}</pre></article>"
    )


def _versions(trajectory: Trajectory) -> list[int]:
    return sorted({version.number for version in trajectory.versions})


def _weight_bin(log_ratio: float | None) -> int:
    """0 to 2 ``WEIGHT_BINS``; the middle is a weight of 1."""
    if log_ratio is None or math.isnan(log_ratio):
        return WEIGHT_BINS
    bins = min(max(2 * log_ratio / math.log(2), -WEIGHT_BINS), WEIGHT_BINS)
    return WEIGHT_BINS + round(bins)


def _pieces(trajectory: Trajectory, decoder: Decoder, most: int) -> Iterator[str]:
    ids = trajectory.tokens.tolist()
    numbers = {version: i % VERSION_COLORS for i, version in enumerate(_versions(trajectory))}
    at = trajectory.prompt_length
    yield _given("prompt", ids[:at], decoder, most)
    for turn in trajectory.turns:
        if turn.start > at:
            yield _given("observation", ids[at : turn.start], decoder, most)
        at = turn.end
        end = min(turn.end, turn.start + most)
        shades = {p: numbers[span.version.number] for span in turn.spans for p in range(span.start, span.end)}
        position, tokens = turn.start, []
        for count, text in decoder.pieces(ids[turn.start : end]):
            bin_ = _probability_bin(float(trajectory.behavior_logprobs[position]))
            tokens.append(f'<i class="v{shades.get(position, 0)} p{bin_}">{shown(text)}</i>')
            position += count
        left = f"<em> … {turn.end - end} more tokens</em>" if end < turn.end else ""
        yield f"{''.join(tokens)}{left}<em> [{escaped(turn.finish_reason)}]</em>"
    if at < len(ids):
        yield _given("observation", ids[at:], decoder, most)


def _given(of: str, ids: Sequence[int], decoder: Decoder, most: int) -> str:
    """What the policy did not write; of a long one its end, which it answered to."""
    left = f"<em>{len(ids) - most} tokens … </em>" if len(ids) > most else ""
    return f'<span class="{of}">{left}{shown(decoder.text(ids[-most:]))}</span>'


def _probability_bin(logprob: float) -> int:
    probability = math.exp(min(logprob, 0.0)) if not math.isnan(logprob) else 0.0
    return next((i for i, bound in enumerate(PROBABILITIES) if probability > bound), len(PROBABILITIES))


def shown(text: str) -> str:
    """Text of a policy for HTML: line breaks and tabs stay, and are seen; nothing else of it is obeyed."""
    lines = text.split("\n")
    return "⏎\n".join("\t".join(escaped(part) for part in line.split("\t")) for line in lines)


def legend() -> str:
    """Controls of the colours, without a script, and what they mean."""
    choices = (("weight", "by importance weight"), ("version", "by policy version"), ("probability", "by probability"))
    boxes = "".join(
        f'<label><input type="radio" name="colour" id="by-{key}"{" checked" if key == "weight" else ""}> {text}</label>'
        for key, text in choices
    )
    return f'<fieldset class="colours"><legend>Sampled tokens are coloured</legend>{boxes}</fieldset>'


def style() -> str:
    """Rules for ``sample_html``: tints that are readable on light and dark ground."""
    rules = [".sample i{font-style:normal;border-radius:2px}"]
    for number in range(2 * WEIGHT_BINS + 1):
        away = (number - WEIGHT_BINS) / WEIGHT_BINS
        tint = f"rgba(209,73,91,{away * 0.6:.2f})" if away > 0 else f"rgba(11,111,184,{-away * 0.6:.2f})"
        rules.append(f"body:has(#by-weight:checked) .w{number} pre i{{background:{tint}}}")
    hues = (210, 30, 140, 280, 350, 60)
    for number in range(VERSION_COLORS):
        tint = f"hsla({hues[number]},70%,50%,.3)"
        rules.append(
            f"body:has(#by-version:checked) pre .v{number},.facts .v{number}{{background:{tint};padding:0 1px}}"
        )
    for number in range(len(PROBABILITIES) + 1):
        tint = f"rgba(184,134,11,{number / len(PROBABILITIES) * 0.7:.2f})"
        rules.append(f"body:has(#by-probability:checked) pre .p{number}{{background:{tint}}}")
    return "".join(rules)
